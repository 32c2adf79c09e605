//! `coli info`: what a model directory holds, from headers alone. No weight is loaded.

#![forbid(unsafe_code)]

use super::load::{self, print_json};
use super::{Args, Verb, print_text};
use crate::config::{Config, IndexerKind, MlpKind};
use crate::error::{Context, Result};
use crate::json::{Value, to_compact};
use crate::object;
use crate::plan::gb;
use crate::quant::Format;
use crate::safetensors::Directory;
use crate::sys;
use crate::tokenizer::Tokenizer;
use crate::weights::{MatrixSource, Mlp, Weights};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "info",
    positional: "",
    summary: "show what a model directory holds, without loading it",
    example: "coli info --model tests/fixtures/a_seed",
    flags: &[load::MODEL_FLAGS, &[super::JSON]],
    run,
};

/// Tensors of one class and format, scales included: how many, and their bytes.
pub type Classes = BTreeMap<(&'static str, String), (usize, usize)>;

fn run(args: &Args) -> Result<()> {
    let dir = Path::new(args.required("--model")?);
    let config = Config::load(dir)?;
    let directory = load::directory(args)?;
    let weights = Weights::bind(&directory, &config).context(|| dir.display().to_string())?;
    let classes = classes(&directory, &config, &weights);
    let total_bytes = classes.values().map(|(_, bytes)| bytes).sum();
    let head_format = draft_head_format(&directory, &config)?;
    let tokenizer_file = dir.join("tokenizer.json");
    let tokenizer =
        sys::is_present(&tokenizer_file).then(|| Tokenizer::load(&tokenizer_file)).transpose()?;
    let tokens = tokenizer.map(|tokenizer| tokenizer.vocab_size());
    let (shards, tensors) = (directory.shards().len(), directory.len());
    let (shape, state_files) = (shape(&config), state_files(dir)?);
    if args.has("--json") {
        return print_json(&object! {
            "shards": shards,
            "tensors": tensors,
            "bytes": total_bytes,
            "shape": shape,
            "classes": class_rows(&classes),
            "mtp": head_format.map(|format| format.to_string()),
            "indexer": weights.has_indexer,
            "tokenizer": tokens,
            "state_files": state_files,
        });
    }
    let (of, total) = (describe_shards(shards), gb(total_bytes));
    let mut text = format!("{of}, {tensors} tensors, {total}\n");
    let mut line = |name: &str, value: String| text += &format!("  {name:<22} {value}\n");
    for (name, value) in shape.as_object().unwrap_or_default() {
        line(name, to_compact(value));
    }
    for ((class, format), (tensors, bytes)) in &classes {
        line(class, format!("{format:<14} {tensors:>6} tensors  {}", gb(*bytes)));
    }
    line("draft head (MTP)", head_format.map_or("none".into(), describe_draft_head));
    line("indexer", if weights.has_indexer { "yes" } else { "no" }.into());
    line("tokenizer", tokens.map_or("none".into(), |tokens| format!("{tokens} tokens")));
    line("chat template", "built in (GLM-5.2); no file is read for it".into());
    if !state_files.is_empty() {
        line("state files", state_files.join(" "));
    }
    print_text(&text)
}

/// How many files there are.
pub fn describe_shards(shards: usize) -> String {
    format!("{shards} shard{}", if shards == 1 { "" } else { "s" })
}

/// One object for each class and format.
pub fn class_rows(classes: &Classes) -> Vec<Value> {
    let rows = classes.iter().map(|((class, format), (tensors, bytes))| {
        let (class, format) = (*class, format.as_str());
        object! { "class": class, "format": format, "tensors": *tensors, "bytes": *bytes }
    });
    rows.collect()
}

/// How the draft head's input projection is stored, if there is a draft head.
pub fn draft_head_format(directory: &Directory, config: &Config) -> Result<Option<Format>> {
    let name = format!("model.layers.{}.eh_proj.weight", config.num_layers);
    if directory.get(&name).is_none() {
        return Ok(None);
    }
    let hidden = config.hidden_size;
    Ok(Some(MatrixSource::bind(directory, &name, hidden, 2 * hidden)?.format))
}

/// With one scale a row at 4 bits, the half of the projection with the smaller weights rounds to
/// nothing: its two halves differ 20 to 30 times in size. Measured acceptance: 0 to 4 %.
pub fn draft_head_warning(format: Format) -> Option<&'static str> {
    let is_coarse = matches!(format, Format::Int4Row | Format::Int2Row);
    is_coarse.then_some("drafts of a head with so few bits are rarely accepted")
}

fn describe_draft_head(format: Format) -> String {
    match draft_head_warning(format) {
        Some(warning) => format!("{format}: warning: {warning}"),
        None => format.to_string(),
    }
}

/// The figures of the configuration that decide shapes, as one object.
fn shape(c: &Config) -> Value {
    let full = c.indexer.iter().filter(|kind| **kind == IndexerKind::Full).count();
    let sparse = c.mlp.iter().filter(|kind| **kind == MlpKind::Sparse).count();
    object! {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "layers": c.num_layers,
        "sparse_layers": sparse,
        "heads": c.num_heads,
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
        "intermediate_size": c.intermediate_size,
        "moe_intermediate_size": c.moe_intermediate_size,
        "routed_experts": c.n_routed_experts,
        "experts_per_token": c.top_k,
        "shared_experts": c.n_shared_experts,
        "index_topk": c.index_topk,
        "full_indexer_layers": full,
    }
}

/// Counts every tensor of the directory by class and format. Scales count with their matrix.
pub fn classes(directory: &Directory, config: &Config, weights: &Weights) -> Classes {
    let resident = weights.resident().into_iter().map(|matrix| &matrix.source);
    let experts = weights.layers.iter().flat_map(|layer| match &layer.mlp {
        Mlp::Sparse(moe) => &moe.experts[..],
        Mlp::Dense(_) => &[],
    });
    let experts = experts.flat_map(|expert| [&expert.gate, &expert.up, &expert.down]);
    let bound = resident.chain(experts).chain([weights.embedding.source()]);
    let formats: HashMap<&str, Format> =
        bound.map(|source| (&*source.name, source.format)).collect();
    let mut classes = Classes::new();
    for (name, tensor) in directory.iter() {
        let owner = SCALE_SUFFIXES.iter().filter_map(|suffix| name.strip_suffix(suffix));
        let owner = owner.filter_map(|owner| Some((owner, directory.get(owner)?))).next();
        let (name, dtype) = owner.map_or((name, tensor.dtype), |(name, t)| (name, t.dtype));
        let format = formats.get(name);
        let class = class_of(name, config, format.is_some());
        let format = format.map_or_else(|| dtype.name().to_ascii_lowercase(), Format::to_string);
        let entry = classes.entry((class, format)).or_default();
        entry.0 += 1;
        entry.1 += tensor.bytes as usize;
    }
    classes
}

/// What is added to a matrix's name to name its scales.
const SCALE_SUFFIXES: [&str; 4] = [".qs", "_scale_inv", "_scale", "_scale_2"];

/// The class of a tensor, from its name; `is_bound` tells that the forward pass has it as a matrix.
fn class_of(name: &str, config: &Config, is_bound: bool) -> &'static str {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
    if layer.and_then(|i| i.parse().ok()).is_some_and(|i: usize| i >= config.num_layers) {
        return "mtp layer";
    }
    let classes = [
        ("norm.", "norm"),
        ("bias", "bias"),
        (".mlp.experts.", "routed expert"),
        (".indexer.", "indexer"),
        (".self_attn.", "attention"),
        (".shared_experts.", "shared expert"),
        (".mlp.gate.weight", "router"),
        (".mlp.", "dense mlp"),
        (
            "embed_tokens",
            if config.tie_word_embeddings { "embedding and head" } else { "embedding" },
        ),
        ("lm_head", "output head"),
    ];
    let class = classes.into_iter().find(|(part, _)| name.contains(part)).map(|(_, class)| class);
    class.filter(|class| is_bound || ["norm", "bias"].contains(class)).unwrap_or("not used")
}

/// Names of state files that engines leave in the directory.
pub fn state_files(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).context(|| dir.display().to_string())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with(".coli_") {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
