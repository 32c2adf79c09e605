//! `coli plan`: where the bytes of a run would lie, exactly, from headers and config.json alone.
//!
//! The fields are those of the C engine's plan, version 2, and what a check wants beside them:
//! `plan`, the bytes that the engine itself would reserve, and `classes`, as `coli info` has them.
//! A run that does not fit is refused here as it would be there, with the flags that would do.

#![forbid(unsafe_code)]

use super::info::{self, Classes};
use super::load::{self, print_json};
use super::{Args, Verb, print_text};
use crate::config::Config;
use crate::cpu;
use crate::engine::Options;
use crate::error::{Context, Result};
use crate::json::Value;
use crate::memory::Available;
use crate::object;
use crate::plan::{Plan, gb};
use crate::safetensors::Directory;
use crate::sys;
use crate::weights::Weights;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "plan",
    positional: "",
    summary: "show what a run would hold in memory, without loading it",
    example: "coli plan --model tests/fixtures/a_seed --ctx 1000 --ram 0.5",
    flags: &[load::MODEL_FLAGS, load::PLAN_FLAGS, &[load::PIN, super::JSON]],
    run,
};

fn run(args: &Args) -> Result<()> {
    let dir = Path::new(args.required("--model")?);
    let options = load::options(args)?;
    let config = Config::load(dir)?;
    let directory = load::directory(args)?;
    let weights = Weights::bind(&directory, &config).context(|| dir.display().to_string())?;
    let report = Report::new(options, &config, &directory, &weights)?;
    if args.has("--json") { print_json(&report.json()) } else { print_text(&report.text()) }
}

/// Routed experts as the names of the tensors have them, the draft head's included, whether the
/// forward pass uses them or not.
struct Experts {
    count: usize,
    layers: usize,
    bytes: usize,
    /// Bytes of all other tensors.
    dense_bytes: usize,
    /// Median of the layers' medians.
    typical_bytes: usize,
    /// Sum of the layers' medians: the cost of one slot in every layer.
    per_cap_bytes: usize,
}

impl Experts {
    /// Counts tensors by name and bytes.
    fn count<'a>(tensors: impl Iterator<Item = (&'a str, usize)>) -> Experts {
        let mut layers: BTreeMap<usize, BTreeMap<usize, usize>> = BTreeMap::new();
        let mut dense_bytes = 0;
        for (name, bytes) in tensors {
            match expert_of(name) {
                Some((layer, expert)) => {
                    *layers.entry(layer).or_default().entry(expert).or_default() += bytes;
                }
                None => dense_bytes += bytes,
            }
        }
        let sizes = |layer: &BTreeMap<usize, usize>| layer.values().copied().collect::<Vec<_>>();
        let medians: Vec<usize> = layers.values().map(|layer| median(sizes(layer))).collect();
        Experts {
            count: layers.values().map(BTreeMap::len).sum(),
            layers: layers.len(),
            bytes: layers.values().flat_map(BTreeMap::values).sum(),
            dense_bytes,
            per_cap_bytes: medians.iter().sum(),
            typical_bytes: median(medians),
        }
    }
}

/// Layer and index of `model.layers.N.mlp.experts.M.…`.
fn expert_of(name: &str) -> Option<(usize, usize)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (expert, _) = rest.strip_prefix("mlp.experts.")?.split_once('.')?;
    Some((layer.parse().ok()?, expert.parse().ok()?))
}

/// The middle value, or the mean of the two in the middle; 0 of none.
fn median(mut values: Vec<usize>) -> usize {
    values.sort_unstable();
    match (values.len() / 2, values.len() % 2) {
        (0, 0) => 0,
        (middle, 0) => (values[middle - 1] + values[middle]) / 2,
        (middle, _) => values[middle],
    }
}

/// What both forms of the output say.
pub struct Report {
    path: PathBuf,
    shards: usize,
    /// Of the files.
    model_bytes: usize,
    /// Of the file system that holds them.
    disk_free_bytes: Option<u64>,
    experts: Experts,
    classes: Classes,
    /// Of one layer.
    routed_experts: usize,
    options: Options,
    /// What memory is left.
    pub available: Option<Available>,
    /// The bytes of the run.
    pub plan: Plan,
}

impl Report {
    /// Plans a run with `options` now. Error: it does not fit.
    pub fn new(
        options: Options,
        config: &Config,
        directory: &Directory,
        weights: &Weights,
    ) -> Result<Report> {
        let available = Available::now();
        let plan = options.plan(config, weights, available.as_ref())?;
        let names = directory.iter().map(|(name, tensor)| (name, tensor.bytes as usize));
        Ok(Report {
            path: std::path::absolute(directory.path())?,
            shards: directory.shards().len(),
            model_bytes: directory.bytes() as usize,
            disk_free_bytes: sys::disk_free_bytes(directory.path()),
            experts: Experts::count(names),
            classes: info::classes(directory, config, weights),
            routed_experts: config.n_routed_experts,
            options,
            available,
            plan,
        })
    }

    /// Slots that every layer with experts could have at once.
    pub fn slots_per_layer(&self) -> usize {
        self.plan.expert_bytes.checked_div(self.experts.per_cap_bytes).unwrap_or(0)
    }

    /// Expert bytes that do not fit into memory.
    fn cold_bytes(&self) -> usize {
        self.experts.bytes.saturating_sub(self.plan.expert_bytes)
    }

    fn bottleneck(&self) -> &'static str {
        match self.cold_bytes() {
            0 => "CPU expert compute and RAM bandwidth",
            _ => "disk expert misses",
        }
    }

    /// Whether layers have to share less than one slot each.
    pub fn is_starved(&self) -> bool {
        self.experts.count > 0 && self.slots_per_layer() < 1
    }

    /// What of the plan a person should know before running it.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.is_starved() {
            warnings.push("memory for less than one expert per layer: nearly all are read".into());
        }
        if self.cold_bytes() > 0 {
            warnings.push(format!("{} of experts stay on disk", gb(self.cold_bytes())));
        }
        warnings
    }

    /// A line for each matter.
    pub fn text(&self) -> String {
        let Report { plan, experts, .. } = self;
        let mut text = String::new();
        let mut line = |name, value: String| text += &format!("{name:<8} {value}\n");
        line("policy", "quality: placement never changes a bit of the output".into());
        line("model", self.path.display().to_string());
        let shards = info::describe_shards(self.shards);
        let (count, layers) = (experts.count, experts.layers);
        let [model, all, typical, dense] =
            [self.model_bytes, experts.bytes, experts.typical_bytes, experts.dense_bytes].map(gb);
        line(
            "disk",
            format!(
                "{model} in {shards}: {count} experts in {layers} layers, {all}, typically \
                 {typical}; all else {dense}"
            ),
        );
        let (ctx, slots) = (self.options.ctx_tokens, self.slots_per_layer());
        let [total, resident, kv, scratch, held, allowed] = [
            plan.total_bytes(),
            plan.resident_bytes,
            plan.kv_bytes,
            plan.scratch_bytes,
            plan.expert_bytes,
            plan.ram_bytes,
        ]
        .map(gb);
        line(
            "RAM",
            format!(
                "{total} = {resident} resident weights + {kv} cache (ctx {ctx}) + {scratch} \
                 scratch + {held} experts ({slots} in each layer)"
            ),
        );
        let free = self.available.as_ref();
        let free = free.map(|free| format!(", {} left: {}", gb(free.bytes), free.bound));
        line("", format!("{allowed} allowed{}", free.unwrap_or_default()));
        line("VRAM", "not used".into());
        line("limit", self.bottleneck().into());
        self.warnings().into_iter().for_each(|warning| line("warn", warning));
        text
    }

    /// The schema of the C engine, version 2, then what is ours.
    pub fn json(&self) -> Value {
        let Report { plan, experts, options, .. } = self;
        object! {
            "version": 2,
            // There is one: nothing that is lossy happens unasked.
            "policy": object! {
                "name": "quality", "preserve_quantization": true, "preserve_router": true,
                "quality_preserving": true,
            },
            "model": object! {
                "path": self.path.display().to_string(),
                "shards": self.shards,
                "model_bytes": self.model_bytes,
                "dense_bytes": experts.dense_bytes,
                "expert_bytes": experts.bytes,
                "expert_count": experts.count,
                "expert_layers": experts.layers,
                "typical_expert_bytes": experts.typical_bytes,
                "per_cap_bytes": experts.per_cap_bytes,
            },
            "cpu": object! {
                "physical_cores": cpu::usable_cores(),
                "thread_policy": "physical-cores",
                "threads": options.threads,
            },
            "tiers": self.tiers(),
            "expected_bottleneck": self.bottleneck(),
            "decisions": DECISIONS.map(|(target, reason)| {
                object! { "target": target, "reason": reason }
            }).to_vec(),
            "warnings": self.warnings(),
            "plan": object! {
                "ctx_tokens": options.ctx_tokens,
                "ram_bytes": plan.ram_bytes,
                "resident_bytes": plan.resident_bytes,
                "kv_bytes": plan.kv_bytes,
                "scratch_bytes": plan.scratch_bytes,
                "expert_bytes": plan.expert_bytes,
                "largest_expert_bytes": plan.largest_expert_bytes,
                "slots_per_layer": self.slots_per_layer(),
                "total_bytes": plan.total_bytes(),
            },
            "classes": info::class_rows(&self.classes),
        }
    }

    /// Disk, memory, and the device memory that there never is.
    fn tiers(&self) -> Value {
        let Report { plan, experts, .. } = self;
        let free = self.available.as_ref();
        object! {
            "disk": object! {
                "role": "cold-backing",
                "model_bytes": self.model_bytes,
                "available_bytes": self.disk_free_bytes,
                "cold_expert_bytes": self.cold_bytes(),
            },
            "ram": object! {
                "role": "resident+warm-experts",
                "available_bytes": free.map(|free| free.bytes),
                "available_bound": free.map(|free| free.bound.as_str()),
                "budget_bytes": plan.ram_bytes,
                "dense_bytes": plan.resident_bytes,
                "runtime_bytes": plan.kv_bytes + plan.scratch_bytes,
                "expert_cache_bytes": plan.expert_bytes,
                "warm_expert_bytes": experts.bytes - self.cold_bytes(),
                "cache_slots_per_layer": self.slots_per_layer().min(self.routed_experts),
            },
            "vram": object! {
                "role": "hot-experts", "devices": Vec::<Value>::new(), "budget_bytes": 0,
                "hot_expert_bytes": 0, "expert_capacity": 0, "requires_host_backing": false,
            },
        }
    }
}

/// What lies where, and why.
const DECISIONS: [(&str, &str); 3] = [
    ("VRAM", "no device is used: the processor computes everything"),
    ("RAM", "weights that every token needs, cache and scratch; experts get what is left"),
    ("Disk", "holds all experts; one that is not in memory is read when a token needs it"),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// GLM-5.2: layers 3 to 77 with 256 experts of int4, the draft head's layer 78 of int8; a
    /// matrix of 2048 × 6144 or 6144 × 2048 each, with a scale for every row.
    #[test]
    fn the_experts_of_the_real_model_are_counted_from_names() {
        let scales = [("gate", 4 * 2048), ("up", 4 * 2048), ("down", 4 * 6144)];
        let mut tensors = vec![
            ("model.layers.3.mlp.shared_experts.up_proj.weight".to_string(), 5),
            ("model.layers.3.mlp.gate.weight".into(), 7),
            ("model.layers.3.mlp.experts.gate_up_proj".into(), 11),
            ("lm_head.weight".into(), 13),
        ];
        for layer in 3..79 {
            let weight_bytes = 2048 * 6144 / if layer == 78 { 1 } else { 2 };
            for expert in 0..256 {
                for (name, scale_bytes) in scales {
                    let name =
                        format!("model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight");
                    tensors.push((format!("{name}.qs"), scale_bytes));
                    tensors.push((name, weight_bytes));
                }
            }
        }
        let experts = Experts::count(tensors.iter().map(|(name, bytes)| (&**name, *bytes)));
        assert_eq!((experts.count, experts.layers, experts.dense_bytes), (19_456, 76, 36));
        assert_eq!((experts.typical_bytes, experts.per_cap_bytes), (18_915_328, 1_456_439_296));
        assert_eq!(experts.bytes, 372_848_459_776);
    }

    #[test]
    fn the_median_of_an_even_count_is_the_mean_of_the_middle_two() {
        assert_eq!(median(vec![]), 0);
        assert_eq!(median(vec![9]), 9);
        assert_eq!(median(vec![9, 1, 4]), 4);
        assert_eq!(median(vec![9, 1, 4, 7]), 5);
    }
}
