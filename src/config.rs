//! The shape of a model: config.json of a `glm_moe_dsa` checkpoint, validated.
//!
//! Owns every number that decides a tensor's shape or a branch of the forward pass. A [`Config`]
//! that exists is consistent in itself, so the layers above never check it again. Another model
//! family is refused before anything else is looked at; a dimension that is missing is named, not
//! guessed; a field that asks for other maths than the engine's (another activation, router or
//! rope) is refused by name rather than ignored. Fields without effect on inference are skipped.

#![forbid(unsafe_code)]

mod fields;

#[cfg(test)]
mod tests;

use crate::bail;
use crate::error::{Context, Result};
use crate::json::{self, Limits, Value};
use crate::sys::{is_present, read_file};
use fields::Fields;
use std::path::Path;

/// The one architecture this engine runs.
pub const MODEL_TYPE: &str = "glm_moe_dsa";

/// Longest config.json or generation_config.json; real ones are a few kilobytes, or some hundred
/// with a long list of modules that were not quantized.
const FILE_BYTES_MAX: usize = 16 << 20;
const FILE_LIMITS: Limits =
    Limits { max_bytes: FILE_BYTES_MAX, max_depth: 64, max_values: 1 << 20 };

// Upper ends of the accepted ranges, far above any known model, far below overflow of a product.
const LAYERS_MAX: usize = 1024;
const WIDTH_MAX: usize = 1 << 20;
const DENSE_WIDTH_MAX: usize = 1 << 24;
const VOCAB_MAX: usize = 1 << 24;
const HEADS_MAX: usize = 1024;
const HEAD_DIM_MAX: usize = 1 << 16;
const EXPERTS_MAX: usize = 4096;
const SHARED_EXPERTS_MAX: usize = 64;
const INDEX_TOPK_MAX: usize = 1 << 24;
const POSITIONS_MAX: usize = u32::MAX as usize;
const NEXTN_LAYERS_MAX: usize = 16;
const EOS_IDS_MAX: usize = 1024;
const QUANT_BLOCK_MAX: usize = 1 << 16;

/// Where a layer's set of kept keys comes from (sparse attention).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexerKind {
    /// The layer has its own indexer tensors and selects keys.
    Full,
    /// The layer reuses the selection of the nearest full layer before it.
    Shared,
}

/// What kind of MLP a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpKind {
    /// One MLP of `intermediate_size`.
    Dense,
    /// Router, routed experts and shared experts.
    Sparse,
}

/// How `quantization_config` says the source checkpoint was quantized. A converted container keeps
/// the entry of its source, so this is a hint: the tensors themselves decide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// E4M3 weights with one scale per block of rows × columns.
    Fp8 {
        /// Rows (outputs) of a block.
        block_rows: usize,
        /// Columns (inputs) of a block.
        block_columns: usize,
    },
    /// E2M1 weights with an E4M3 scale per 16 columns and an f32 scale per matrix.
    Nvfp4,
    /// Anything else, by its name.
    Other(String),
}

/// A validated model shape. Symbols in parentheses are those of the tensor shapes elsewhere.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Rows of the embedding and of lm_head (V).
    pub vocab_size: usize,
    /// Width of the residual stream (D).
    pub hidden_size: usize,
    /// Width of a dense layer's MLP.
    pub intermediate_size: usize,
    /// Width of one routed expert.
    pub moe_intermediate_size: usize,
    /// Decoder layers (L), the MTP layer not counted: it has index L.
    pub num_layers: usize,
    /// Attention heads (H).
    pub num_heads: usize,
    /// Routed experts of a sparse layer (E).
    pub n_routed_experts: usize,
    /// Shared experts, stored as one MLP of as many times `moe_intermediate_size`; may be 0.
    pub n_shared_experts: usize,
    /// Routed experts chosen per token (K).
    pub top_k: usize,
    /// Groups the routed experts are divided into.
    pub n_group: usize,
    /// Groups a token may choose from.
    pub topk_group: usize,
    /// Whether the chosen experts' weights are normalized to sum 1 before scaling.
    pub norm_topk_prob: bool,
    /// Factor on the routed experts' weights.
    pub routed_scaling_factor: f32,
    /// Width of the query latent.
    pub q_lora_rank: usize,
    /// Width of the key/value latent.
    pub kv_lora_rank: usize,
    /// Dimensions of a query/key head without position.
    pub qk_nope_head_dim: usize,
    /// Rotary dimensions of a query/key head; even.
    pub qk_rope_head_dim: usize,
    /// Dimensions of a value head.
    pub v_head_dim: usize,
    /// Keys kept per query.
    pub index_topk: usize,
    /// Dimensions of an indexer head, the first `qk_rope_head_dim` of them rotary.
    pub index_head_dim: usize,
    /// Heads of the indexer.
    pub index_n_heads: usize,
    /// One per layer; the first is full.
    pub indexer: Vec<IndexerKind>,
    /// One per layer.
    pub mlp: Vec<MlpKind>,
    /// Epsilon of every RMSNorm, the two latent norms included.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether q_a_proj, kv_a_proj_with_mqa and o_proj have a bias.
    pub attention_bias: bool,
    /// Whether lm_head is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// Token ids that end a reply, without repeats, config.json's first.
    pub eos_token_ids: Vec<u32>,
    /// Longest context the model was made for; no effect on the maths.
    pub max_position_embeddings: usize,
    /// MTP layers the checkpoint may hold.
    pub num_nextn_predict_layers: usize,
    /// Whether later MTP steps of a draft round reuse the first step's selection.
    pub index_share_for_mtp_iteration: bool,
    /// The source's quantization, if config.json names one.
    pub quantization: Option<Quantization>,
}

impl Config {
    /// Reads `config.json` of a model directory, and adds the stop ids of `generation_config.json`
    /// if that exists.
    pub fn load(dir: &Path) -> Result<Config> {
        let path = dir.join("config.json");
        let read = || Config::from_json(&read_json(&path)?);
        let mut config = read().context(|| path.display())?;
        let path = dir.join("generation_config.json");
        if is_present(&path) {
            let read = || eos_ids(&Fields::new(&read_json(&path)?, "")?);
            for id in read().context(|| path.display())? {
                if !config.eos_token_ids.contains(&id) {
                    config.eos_token_ids.push(id);
                }
            }
        }
        Ok(config)
    }

    /// Validates a parsed config.json.
    pub fn from_json(value: &Value) -> Result<Config> {
        let fields = Fields::new(value, "")?;
        match fields.get("model_type") {
            Some(Value::String(name)) if name == MODEL_TYPE => {}
            Some(other) => return Err(fields.unexpected("model_type", MODEL_TYPE, other)),
            None => bail!("model_type is missing; expected {MODEL_TYPE}"),
        }
        check_fixed(&fields)?;
        let num_layers = fields.required("num_hidden_layers", 1..=LAYERS_MAX)?;
        let config = Config {
            vocab_size: fields.required("vocab_size", 1..=VOCAB_MAX)?,
            hidden_size: fields.required("hidden_size", 1..=WIDTH_MAX)?,
            intermediate_size: fields.required("intermediate_size", 1..=DENSE_WIDTH_MAX)?,
            moe_intermediate_size: fields.required("moe_intermediate_size", 1..=WIDTH_MAX)?,
            num_layers,
            num_heads: fields.required("num_attention_heads", 1..=HEADS_MAX)?,
            n_routed_experts: routed_experts(&fields)?,
            n_shared_experts: fields.required("n_shared_experts", 0..=SHARED_EXPERTS_MAX)?,
            top_k: fields.required("num_experts_per_tok", 1..=EXPERTS_MAX)?,
            n_group: fields.integer("n_group", 1..=EXPERTS_MAX)?.unwrap_or(1),
            topk_group: fields.integer("topk_group", 1..=EXPERTS_MAX)?.unwrap_or(1),
            norm_topk_prob: fields.boolean("norm_topk_prob")?.unwrap_or(true),
            routed_scaling_factor: fields
                .number("routed_scaling_factor", 1e-6..=1e6)?
                .unwrap_or(2.5) as f32,
            q_lora_rank: fields.required("q_lora_rank", 1..=WIDTH_MAX)?,
            kv_lora_rank: fields.required("kv_lora_rank", 1..=WIDTH_MAX)?,
            // `head_dim` is not read: GLM-5.2 stores 192 there, and the reference implementation
            // overwrites it. The rotary size is qk_rope_head_dim, the head qk_head_dim().
            qk_nope_head_dim: fields.required("qk_nope_head_dim", 1..=HEAD_DIM_MAX)?,
            qk_rope_head_dim: fields.required("qk_rope_head_dim", 2..=HEAD_DIM_MAX)?,
            v_head_dim: fields.required("v_head_dim", 1..=HEAD_DIM_MAX)?,
            index_topk: fields.required("index_topk", 1..=INDEX_TOPK_MAX)?,
            index_head_dim: fields.required("index_head_dim", 1..=HEAD_DIM_MAX)?,
            index_n_heads: fields.required("index_n_heads", 1..=HEADS_MAX)?,
            indexer: indexer_kinds(&fields, num_layers)?,
            mlp: mlp_kinds(&fields, num_layers)?,
            rms_norm_eps: fields.number("rms_norm_eps", 1e-12..=0.1)?.unwrap_or(1e-5) as f32,
            rope_theta: rope_theta(&fields)?,
            attention_bias: fields.boolean("attention_bias")?.unwrap_or(false),
            tie_word_embeddings: fields.boolean("tie_word_embeddings")?.unwrap_or(false),
            eos_token_ids: eos_ids(&fields)?,
            max_position_embeddings: fields
                .integer("max_position_embeddings", 1..=POSITIONS_MAX)?
                .unwrap_or(202_752),
            num_nextn_predict_layers: fields
                .integer("num_nextn_predict_layers", 0..=NEXTN_LAYERS_MAX)?
                .unwrap_or(0),
            index_share_for_mtp_iteration: fields
                .boolean("index_share_for_mtp_iteration")?
                .unwrap_or(false),
            quantization: quantization(&fields)?,
        };
        config.check_heads(&fields)?;
        config.check_router()?;
        Ok(config)
    }

    /// Dimensions of a query or key head, both parts; the attention scale is its inverse root.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    fn check_heads(&self, fields: &Fields<'_>) -> Result<()> {
        let Config { num_heads, qk_rope_head_dim, index_head_dim, .. } = *self;
        let kv_heads = fields.integer("num_key_value_heads", 1..=HEADS_MAX)?.unwrap_or(num_heads);
        if kv_heads != num_heads {
            bail!(
                "num_key_value_heads: expected {num_heads}, as num_attention_heads, found \
                 {kv_heads}"
            );
        }
        if qk_rope_head_dim % 2 != 0 {
            bail!("qk_rope_head_dim: expected an even number, found {qk_rope_head_dim}");
        }
        if index_head_dim < qk_rope_head_dim {
            bail!(
                "index_head_dim: expected at least qk_rope_head_dim, {qk_rope_head_dim}, found \
                 {index_head_dim}"
            );
        }
        Ok(())
    }

    fn check_router(&self) -> Result<()> {
        let Config { n_routed_experts: experts, n_group, topk_group, top_k, .. } = *self;
        if experts % n_group != 0 {
            bail!("n_group: expected a divisor of the {experts} routed experts, found {n_group}");
        }
        // A group's score is the sum of its two best experts.
        if n_group > 1 && experts / n_group < 2 {
            bail!("n_group: expected groups of at least 2 of the {experts} routed experts");
        }
        if topk_group > n_group {
            bail!("topk_group: expected at most n_group, {n_group}, found {topk_group}");
        }
        let eligible = topk_group * (experts / n_group);
        if top_k > eligible {
            bail!(
                "num_experts_per_tok: expected at most {eligible} ({topk_group} of {n_group} \
                 groups of {experts} routed experts), found {top_k}"
            );
        }
        Ok(())
    }
}

fn read_json(path: &Path) -> Result<Value> {
    json::parse(&read_file(path, FILE_BYTES_MAX)?, FILE_LIMITS)
}

/// Refuses fields that would change the maths; the values accepted are those the reference
/// implementation has built in, and the official checkpoints store.
fn check_fixed(fields: &Fields<'_>) -> Result<()> {
    let word = |text: &str| Value::String(text.into());
    for (name, only) in [
        ("hidden_act", word("silu")),
        ("scoring_func", word("sigmoid")),
        ("topk_method", word("noaux_tc")),
        ("moe_router_dtype", word("float32")),
        ("moe_layer_freq", Value::Int(1)),
        ("rope_interleave", Value::Bool(true)),
        ("indexer_rope_interleave", Value::Bool(true)),
    ] {
        fields.fixed(name, &only)?;
    }
    Ok(())
}

/// The expert count goes by three names; those present must agree.
fn routed_experts(fields: &Fields<'_>) -> Result<usize> {
    let mut known: Option<(&str, usize)> = None;
    for name in ["n_routed_experts", "num_local_experts", "num_experts"] {
        let Some(count) = fields.integer(name, 1..=EXPERTS_MAX)? else { continue };
        match known {
            Some((first, other)) if other != count => {
                bail!("{name}: expected {other}, as {first}, found {count}")
            }
            _ => known = known.or(Some((name, count))),
        }
    }
    match known {
        Some((_, count)) => Ok(count),
        None => fields.required("n_routed_experts", 1..=EXPERTS_MAX),
    }
}

/// Full or shared per layer: the explicit list wins, then the pattern, then frequency and offset.
fn indexer_kinds(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<IndexerKind>> {
    let parse = |word: &str| match word {
        "full" => Some(IndexerKind::Full),
        "shared" => Some(IndexerKind::Shared),
        _ => None,
    };
    let words = "\"full\" or \"shared\"";
    let (kinds, source) =
        if let Some(kinds) = fields.words("indexer_types", num_layers, words, parse)? {
            (kinds, "indexer_types")
        } else if let Some(Value::String(letters)) = fields.get("index_topk_pattern") {
            (pattern_kinds(letters, num_layers)?, "index_topk_pattern")
        } else if let Some(kinds) = fields.words("index_topk_pattern", num_layers, words, parse)? {
            (kinds, "index_topk_pattern")
        } else {
            let freq = fields.integer("index_topk_freq", 1..=LAYERS_MAX)?.unwrap_or(1);
            let offset = fields.integer("index_skip_topk_offset", 0..=LAYERS_MAX)?.unwrap_or(2);
            // Full iff max(layer - offset + 1, 0) is a multiple of freq.
            let kind = |layer: usize| match (layer + 1).saturating_sub(offset) % freq {
                0 => IndexerKind::Full,
                _ => IndexerKind::Shared,
            };
            ((0..num_layers).map(kind).collect(), "index_topk_freq and index_skip_topk_offset")
        };
    if kinds.first() == Some(&IndexerKind::Shared) {
        bail!("{source}: layer 0 is shared, but no layer before it selects keys; expected full");
    }
    Ok(kinds)
}

/// The letters `F` and `S`, one per layer.
fn pattern_kinds(letters: &str, num_layers: usize) -> Result<Vec<IndexerKind>> {
    let mut kinds = Vec::new();
    for letter in letters.chars() {
        kinds.push(match letter {
            'F' => IndexerKind::Full,
            'S' => IndexerKind::Shared,
            _ => bail!("index_topk_pattern: expected the letters F and S, found {letter:?}"),
        });
    }
    if kinds.len() != num_layers {
        let found = kinds.len();
        bail!("index_topk_pattern: expected {num_layers} letters, one per layer, found {found}");
    }
    Ok(kinds)
}

/// Dense or sparse per layer: the explicit list wins over the count of dense layers.
fn mlp_kinds(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<MlpKind>> {
    let parse = |word: &str| match word {
        "dense" => Some(MlpKind::Dense),
        "sparse" => Some(MlpKind::Sparse),
        _ => None,
    };
    let words = "\"dense\" or \"sparse\"";
    if let Some(kinds) = fields.words("mlp_layer_types", num_layers, words, parse)? {
        return Ok(kinds);
    }
    let dense = fields.integer("first_k_dense_replace", 0..=LAYERS_MAX)?.unwrap_or(3);
    let kind = |layer| if layer < dense { MlpKind::Dense } else { MlpKind::Sparse };
    Ok((0..num_layers).map(kind).collect())
}

/// The rotary base: from `rope_parameters`, else its old name `rope_scaling`, else the top level,
/// else 10000. Any rope that is not the plain one is refused.
fn rope_theta(fields: &Fields<'_>) -> Result<f64> {
    let range = 1.0..=1e15;
    let mut theta = None;
    for (name, path) in [("rope_parameters", "rope_parameters."), ("rope_scaling", "rope_scaling.")]
    {
        let Some(value) = fields.get(name) else { continue };
        let rope = Fields::new(value, path)?;
        for key in ["rope_type", "type"] {
            rope.fixed(key, &Value::String("default".into()))?;
        }
        check_full_rotary(&rope)?;
        // Sets of parameters per layer kind would otherwise pass as an object without a theta.
        if let Some((key, nested)) =
            rope.all().iter().find(|(_, value)| value.kind() == "an object")
        {
            return Err(rope.unexpected(key, "a plain value", nested));
        }
        theta = theta.or(rope.number("rope_theta", range.clone())?);
    }
    check_full_rotary(fields)?;
    Ok(theta.or(fields.number("rope_theta", range)?).unwrap_or(10_000.0))
}

/// A partial rotary factor would shrink the rotary dimensions below qk_rope_head_dim.
fn check_full_rotary(fields: &Fields<'_>) -> Result<()> {
    fields.number("partial_rotary_factor", 1.0..=1.0).map(|_| ())
}

/// `eos_token_id`: a number, a list, or nothing; repeats dropped.
fn eos_ids(fields: &Fields<'_>) -> Result<Vec<u32>> {
    let name = "eos_token_id";
    let Some(value) = fields.get(name) else { return Ok(Vec::new()) };
    let elements = value.as_array().unwrap_or(std::slice::from_ref(value));
    if elements.len() > EOS_IDS_MAX {
        bail!("{name}: expected at most {EOS_IDS_MAX} ids, found {}", elements.len());
    }
    let mut ids = Vec::new();
    for element in elements {
        let id = element.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.ok_or_else(|| fields.unexpected(name, "token ids below 2^32", element))?;
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}

fn quantization(fields: &Fields<'_>) -> Result<Option<Quantization>> {
    let Some(value) = fields.get("quantization_config") else { return Ok(None) };
    let quant = Fields::new(value, "quantization_config.")?;
    let text = |name: &str| match quant.get(name) {
        Some(Value::String(text)) => Ok(text.as_str()),
        Some(other) => Err(quant.unexpected(name, "a string", other)),
        None => Ok(""),
    };
    let (method, algorithm, format) = (text("quant_method")?, text("quant_algo")?, text("fmt")?);
    if algorithm.eq_ignore_ascii_case("nvfp4") {
        return Ok(Some(Quantization::Nvfp4));
    }
    let block = quant.get("weight_block_size");
    if let ("fp8", "e4m3" | "", Some(block)) = (method, format, block) {
        let side = |value: &Value| {
            let side = value.as_u64().and_then(|side| usize::try_from(side).ok());
            side.filter(|side| (1..=QUANT_BLOCK_MAX).contains(side))
        };
        let (block_rows, block_columns) = match block.as_array() {
            Some([rows, columns]) => side(rows).zip(side(columns)),
            _ => None,
        }
        .ok_or_else(|| {
            let expected = format!("two integers from 1 to {QUANT_BLOCK_MAX}");
            quant.unexpected("weight_block_size", &expected, block)
        })?;
        return Ok(Some(Quantization::Fp8 { block_rows, block_columns }));
    }
    let words = [method, algorithm, format].into_iter().filter(|word| !word.is_empty());
    Ok(Some(Quantization::Other(words.collect::<Vec<_>>().join(" "))))
}
