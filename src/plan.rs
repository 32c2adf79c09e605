//! The memory plan: what a run will hold, in exact bytes, decided before anything is loaded.
//!
//! ram = resident weights + cache of the context + scratch of a batch + routed experts. The first
//! three are fixed by the model and the flags; the experts get the rest, and the plan is refused
//! when that is less than one expert, naming what would have to change.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::Result;
use crate::memory::Available;
use crate::weights::{MATRIX_ALIGN, Mlp, Weights};

/// Share of the available memory used when no limit is given; the rest is for the system and for
/// what the allocator and the page cache hold on our behalf.
const AVAILABLE_SHARE: f64 = 0.85;

/// How much memory routed experts may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// All of it within a share of what is available.
    Available,
    /// All of it within this many bytes.
    RamBytes(usize),
    /// This many expert slots per sparse layer, whatever that takes.
    SlotsPerLayer(usize),
}

/// Bytes of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What the run may take; it takes less when there are not that many experts.
    pub ram_bytes: usize,
    /// Weights that stay in memory.
    pub resident_bytes: usize,
    /// Cache of one session at full context.
    pub kv_bytes: usize,
    /// Activations of one batch.
    pub scratch_bytes: usize,
    /// Budget of the expert store.
    pub expert_bytes: usize,
    /// The largest routed expert; 0 in a model without any.
    pub largest_expert_bytes: usize,
}

impl Plan {
    /// Plans a run whose session holds `ctx_tokens`. `context_bytes` says for a number of tokens
    /// what the cache and the scratch of the largest batch take; both must not shrink with it.
    ///
    /// Error: it does not fit, with the smallest `--ram` and the largest `--ctx` that would.
    pub fn new(
        weights: &Weights,
        ctx_tokens: usize,
        context_bytes: impl Fn(usize) -> (usize, usize),
        limit: Limit,
        available: Option<&Available>,
    ) -> Result<Plan> {
        let experts = Experts::of(weights);
        let resident_bytes = weights.resident_bytes();
        let (kv_bytes, scratch_bytes) = context_bytes(ctx_tokens);
        let fixed_bytes = resident_bytes + kv_bytes + scratch_bytes;
        let ram_bytes = match (limit, available) {
            (Limit::RamBytes(bytes), _) => bytes,
            (Limit::SlotsPerLayer(slots), _) => fixed_bytes + experts.slots_bytes(slots),
            (Limit::Available, Some(free)) => (free.bytes as f64 * AVAILABLE_SHARE) as usize,
            (Limit::Available, None) => fixed_bytes + experts.all_bytes,
        };
        let plan = Plan {
            ram_bytes,
            resident_bytes,
            kv_bytes,
            scratch_bytes,
            expert_bytes: ram_bytes.saturating_sub(fixed_bytes).min(experts.all_bytes),
            largest_expert_bytes: experts.largest_bytes,
        };
        let wall_bytes = available.map_or(ram_bytes, |free| free.bytes.min(ram_bytes));
        // What a smaller context would leave room for, beside `expert_bytes`.
        let or_ctx = |expert_bytes| {
            let fits = |tokens| {
                let (kv_bytes, scratch_bytes) = context_bytes(tokens);
                resident_bytes + kv_bytes + scratch_bytes + expert_bytes <= wall_bytes
            };
            match largest_below(ctx_tokens, fits) {
                0 => String::new(),
                tokens => format!(", or give --ctx {tokens} or less"),
            }
        };
        if fixed_bytes + experts.largest_bytes > wall_bytes {
            bail!("{}{}", plan.too_large(limit, available), or_ctx(experts.largest_bytes));
        }
        if let Some(free) = available
            && plan.total_bytes() > free.bytes
        {
            let less = match (limit, (free.bytes - fixed_bytes) / experts.slots_bytes(1)) {
                (Limit::SlotsPerLayer(_), slots @ 1..) => {
                    format!("--cap {slots} or less{}", or_ctx(plan.expert_bytes))
                }
                _ => format!("--ram {} or less", exact_gb(free.bytes)),
            };
            let (needed, left) = (gb(plan.total_bytes()), gb(free.bytes));
            bail!("the plan needs {needed}, but {left} are left ({}): give {less}", free.bound);
        }
        Ok(plan)
    }

    /// Why not even one expert fits beside the rest, and the `--ram` that would do.
    fn too_large(&self, limit: Limit, available: Option<&Available>) -> String {
        let needed_bytes = self.fixed_bytes() + self.largest_expert_bytes;
        let ram = exact_gb(needed_bytes);
        let wall = match available {
            Some(Available { bytes, bound }) if limit == Limit::Available => {
                let percent = AVAILABLE_SHARE * 100.0;
                format!("{} ({percent} % of {}: {bound})", gb(self.ram_bytes), gb(*bytes))
            }
            Some(Available { bytes, bound }) if *bytes < self.ram_bytes => {
                format!("{} ({bound})", gb(*bytes))
            }
            _ => gb(self.ram_bytes),
        };
        let remedy = match available {
            Some(Available { bytes, bound }) if *bytes < needed_bytes => {
                format!("make room for --ram {ram} ({} are left: {bound})", gb(*bytes))
            }
            _ => format!("give --ram {ram} or more"),
        };
        format!(
            "the model does not fit in {wall}: it needs at least {} ({} resident \
             weights, {} cache of the context, {} scratch, {} for one expert); {remedy}",
            gb(needed_bytes),
            gb(self.resident_bytes),
            gb(self.kv_bytes),
            gb(self.scratch_bytes),
            gb(self.largest_expert_bytes),
        )
    }

    /// Refuses pins that leave less than the `top_k` experts of a layer of the expert memory, with
    /// the `--pin` that would do.
    pub fn check_pins(&self, pin_bytes: usize, top_k: usize) -> Result<()> {
        let most = self.expert_bytes.saturating_sub(top_k * self.largest_expert_bytes);
        if pin_bytes > most {
            bail!(
                "{} of pins leave less than {top_k} experts of the {} for experts: give --pin {} \
                 or less",
                gb(pin_bytes),
                gb(self.expert_bytes),
                exact_gb(most)
            );
        }
        Ok(())
    }

    /// Everything but routed experts.
    pub fn fixed_bytes(&self) -> usize {
        self.resident_bytes + self.kv_bytes + self.scratch_bytes
    }

    /// Everything.
    pub fn total_bytes(&self) -> usize {
        self.fixed_bytes() + self.expert_bytes
    }
}

/// Sizes of the routed experts, each as it lies in the store.
struct Experts {
    largest_bytes: usize,
    all_bytes: usize,
    sparse_layers: usize,
}

impl Experts {
    fn of(weights: &Weights) -> Experts {
        let mut sizes = Experts { largest_bytes: 0, all_bytes: 0, sparse_layers: 0 };
        for (_, layer) in weights.all_layers() {
            let Mlp::Sparse(moe) = &layer.mlp else { continue };
            sizes.sparse_layers += 1;
            for expert in moe.experts.iter() {
                let bytes = expert.bytes().next_multiple_of(MATRIX_ALIGN);
                sizes.largest_bytes = sizes.largest_bytes.max(bytes);
                sizes.all_bytes += bytes;
            }
        }
        sizes
    }

    /// Bytes of `slots` slots in each sparse layer, or of all experts when those are fewer.
    fn slots_bytes(&self, slots: usize) -> usize {
        (slots * self.sparse_layers * self.largest_bytes).min(self.all_bytes)
    }
}

/// The largest number below `end` that `fits`, as all smaller ones do; 0 if there is none.
fn largest_below(end: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, end);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    low
}

/// Bytes as gigabytes (10⁹), to the byte: what `--ram` takes.
fn exact_gb(bytes: usize) -> String {
    let text = format!("{}.{:09}", bytes / 1_000_000_000, bytes % 1_000_000_000);
    text.trim_end_matches('0').trim_end_matches('.').into()
}

/// Bytes as gigabytes (10⁹) with one decimal; small amounts as megabytes or as they are.
pub fn gb(bytes: usize) -> String {
    if bytes < 100_000 {
        format!("{bytes} bytes")
    } else if bytes < 100_000_000 {
        format!("{:.1} MB", bytes as f64 / 1e6)
    } else {
        format!("{:.1} GB", bytes as f64 / 1e9)
    }
}
