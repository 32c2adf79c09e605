//! Names to typed weights: every tensor of the model, addressed by field.
//!
//! [`Weights::bind`] resolves each matrix on its own (format by exact sizes, see
//! [`crate::quant`]) and checks every shape against the configuration before anything large is
//! read; a missing, misshapen or ambiguous tensor is one error with its name. [`Weights::load`]
//! then reads the resident part, but for the draft head, which comes and goes ([`Mtp::load`]). Two
//! things are never loaded whole: routed experts, which are only *located* here
//! ([`ExpertSource`]), and the embedding table, whose rows are read on demand (unless it is tied to
//! the output head, which is resident).
//!
//! Shape letters: D hidden, H heads, V vocabulary, E experts, I width of an MLP, nI and dI heads
//! and width of the indexer; q_lora, kv_lora, nope, rope and v as in the configuration.
//! A matrix `[O, I]` maps I inputs to O outputs: y = x · Wᵀ.

#![forbid(unsafe_code)]

use crate::bail;
use crate::config::{Config, IndexerKind, MlpKind, Quantization};
use crate::disk::read_exact_at;
use crate::error::Result;
use crate::quant::{Encoded, FP8_BLOCK};
use crate::safetensors::Directory;
use crate::sys::{self, Arena, Region};
use std::fmt::Display;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

mod expert;
mod input;
mod source;
pub use expert::{Expert, ExpertSource, Progress};
pub use input::Input;
pub use source::{MatrixSource, Span};

/// One weight matrix `[rows, cols]`: its place on disk and, once loaded, its bytes as stored.
#[derive(Clone)]
pub struct Matrix {
    /// Shape, format and place.
    pub source: MatrixSource,
    /// Weights, then scales, from an offset on; set once, by loading.
    bytes: OnceLock<(Arc<Region>, usize)>,
}

/// Where matrices and experts start within the memory of all: at a cache line.
pub const MATRIX_ALIGN: usize = 64;

/// Threads that read resident weights: a drive is faster with several reads in flight, and the page
/// cache copies faster on several cores.
const LOADERS: usize = 4;

impl Matrix {
    fn bind(directory: &Directory, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        Ok(Matrix {
            source: MatrixSource::bind(directory, name, rows, cols)?,
            bytes: OnceLock::new(),
        })
    }

    /// The loaded matrix, ready to decode. Panics when it was never loaded.
    pub fn encoded(&self) -> Encoded<'_> {
        let bytes = self.bytes.get();
        let (region, start) = bytes.unwrap_or_else(|| panic!("{} is not loaded", self.source.name));
        self.source.encoded(&region[*start..*start + self.source.bytes()])
    }
}

/// The embedding table `[V, D]`, read row by row.
pub struct Embedding {
    source: MatrixSource,
}

impl Embedding {
    /// Shape, format and place.
    pub fn source(&self) -> &MatrixSource {
        &self.source
    }

    /// Reads the row of `token` into `out [D]`, through `buffer`. The token must be below the
    /// vocabulary size.
    pub fn read(
        &self,
        directory: &Directory,
        token: u32,
        out: &mut [f32],
        buffer: &mut Vec<u8>,
    ) -> Result<()> {
        self.source.read_row(directory, token as usize, out, buffer)
    }
}

/// Multi-head latent attention of one layer.
#[derive(Clone)]
pub struct Attention {
    /// `[q_lora, D]`
    pub q_a: Matrix,
    /// `[q_lora]`, with `attention_bias`
    pub q_a_bias: Option<Vec<f32>>,
    /// `[q_lora]`
    pub q_a_norm: Vec<f32>,
    /// `[H·(nope+rope), q_lora]`; per head the unrotated rows first
    pub q_b: Matrix,
    /// `[kv_lora+rope, D]`; latent rows, then the rotary key that all heads share
    pub kv_a: Matrix,
    /// `[kv_lora+rope]`, with `attention_bias`
    pub kv_a_bias: Option<Vec<f32>>,
    /// `[kv_lora]`
    pub kv_a_norm: Vec<f32>,
    /// `[H·(nope+v), kv_lora]`; per head the key rows first
    pub kv_b: Matrix,
    /// `[D, H·v]`
    pub o: Matrix,
    /// `[D]`, with `attention_bias`
    pub o_bias: Option<Vec<f32>>,
}

/// Sparse-attention indexer of one "full" layer.
#[derive(Clone)]
pub struct Indexer {
    /// `[nI·dI, q_lora]`
    pub wq_b: Matrix,
    /// `[dI, D]`
    pub wk: Matrix,
    /// `[dI]`, LayerNorm
    pub k_norm: Vec<f32>,
    /// `[dI]`
    pub k_norm_bias: Vec<f32>,
    /// `[nI, D]`
    pub weights_proj: Matrix,
}

/// A gated MLP: down(silu(gate x) · up x).
#[derive(Clone)]
pub struct Ffn {
    /// `[I, D]`
    pub gate: Matrix,
    /// `[I, D]`
    pub up: Matrix,
    /// `[D, I]`
    pub down: Matrix,
}

/// Mixture of experts of one sparse layer.
#[derive(Clone)]
pub struct Moe {
    /// `[E, D]`
    pub router: Matrix,
    /// `[E]`, added to the scores for ranking only
    pub correction_bias: Vec<f32>,
    /// Width I·n_shared; absent when the configuration has no shared expert
    pub shared: Option<Ffn>,
    /// E routed experts
    pub experts: Arc<[ExpertSource]>,
}

/// The feed-forward half of a layer.
#[derive(Clone)]
pub enum Mlp {
    /// One MLP for every token.
    Dense(Ffn),
    /// A router and its experts.
    Sparse(Moe),
}

/// One decoder layer.
#[derive(Clone)]
pub struct Layer {
    /// `[D]`
    pub input_norm: Vec<f32>,
    /// Attention half
    pub attention: Attention,
    /// Present on "full" layers of a model that ships an indexer
    pub indexer: Option<Indexer>,
    /// `[D]`
    pub post_attention_norm: Vec<f32>,
    /// Feed-forward half
    pub mlp: Mlp,
}

/// The draft head: one more layer, which predicts the token after the next one.
#[derive(Clone)]
pub struct Mtp {
    /// `[D]`, of the next token's embedding
    pub embedding_norm: Vec<f32>,
    /// `[D]`, of the main model's hidden state
    pub hidden_norm: Vec<f32>,
    /// `[D, 2D]`; columns of the embedding first
    pub eh_proj: Matrix,
    /// Sparse, with an indexer of its own where the file has one
    pub layer: Layer,
    /// `[D]`, before the output head
    pub final_norm: Vec<f32>,
}

/// All weights of the model.
pub struct Weights {
    /// `[V, D]`, on disk
    pub embedding: Embedding,
    /// L layers
    pub layers: Vec<Layer>,
    /// `[D]`
    pub final_norm: Vec<f32>,
    /// `[V, D]`; the embedding's own tensor when they are tied
    pub lm_head: Matrix,
    /// False when the directory ships no indexer at all: attention is dense then.
    pub has_indexer: bool,
    /// The draft head, if there is one
    pub mtp: Option<Mtp>,
}

impl Weights {
    /// Finds and checks every tensor. Reads only vectors (norms and biases).
    pub fn bind(directory: &Directory, config: &Config) -> Result<Weights> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        if let Some(Quantization::Fp8 { block_rows, block_columns }) = config.quantization
            && [block_rows, block_columns] != [FP8_BLOCK; 2]
        {
            bail!(
                "config.json: weight_block_size: expected [{FP8_BLOCK}, {FP8_BLOCK}], found \
                 [{block_rows}, {block_columns}]"
            );
        }
        let embedding = "model.embed_tokens.weight";
        let head = if config.tie_word_embeddings { embedding } else { "lm_head.weight" };
        // Containers without any indexer are in wide use and mean dense attention. A directory
        // with some of an indexer's tensors is incomplete and refused by the missing name.
        let has_indexer = directory.iter().any(|(name, _)| {
            let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
            let is_main = |layer: &str| layer.parse().is_ok_and(|i: usize| i < config.num_layers);
            layer.is_some_and(|(i, rest)| rest.starts_with("self_attn.indexer.") && is_main(i))
        });
        let layer = |i: usize| {
            let is_full = has_indexer && config.indexer[i] == IndexerKind::Full;
            Layer::bind(directory, config, i, (config.mlp[i], is_full))
        };
        let layers = (0..config.num_layers).map(layer).collect::<Result<Vec<_>>>()?;
        Ok(Weights {
            embedding: Embedding {
                source: MatrixSource::bind(directory, embedding, vocab, hidden)?,
            },
            layers,
            final_norm: vector(directory, "model.norm.weight", hidden)?,
            lm_head: Matrix::bind(directory, head, vocab, hidden)?,
            has_indexer,
            mtp: Mtp::bind(directory, config)?,
        })
    }

    /// Every layer with its index; the draft head's is the last.
    pub fn all_layers(&self) -> impl Iterator<Item = (usize, &Layer)> + Clone {
        self.layers.iter().chain(self.mtp.iter().map(|mtp| &mtp.layer)).enumerate()
    }

    /// Reads every resident matrix but those of the draft head, several at a time, straight into
    /// its place. `progress` is called with the bytes read so far, of [`Weights::resident_bytes`]
    /// without [`Weights::head_bytes`].
    pub fn load(&self, directory: &Directory, progress: impl FnMut(usize)) -> Result<()> {
        let main = self.main();
        let arena = Arena::new(bytes_of(&main))?;
        let region = arena.take(bytes_of(&main), 1).expect("the arena is as large");
        load_into(region, &main, directory, progress)?;
        for shard in directory.shards().iter().filter(|shard| shard.direct.is_some()) {
            // What was read ahead in vain.
            sys::forget_cached(&shard.file, 0, shard.bytes as usize);
        }
        Ok(())
    }

    /// Bytes of all resident matrices.
    pub fn resident_bytes(&self) -> usize {
        bytes_of(&self.main()) + self.head_bytes()
    }

    /// Bytes of those of the draft head.
    pub fn head_bytes(&self) -> usize {
        self.mtp.as_ref().map_or(0, Mtp::resident_bytes)
    }

    /// Which layers have an indexer, and so cache index keys.
    pub fn index_layers(&self) -> Vec<bool> {
        self.all_layers().map(|(_, layer)| layer.indexer.is_some()).collect()
    }

    /// Every layer with routed experts.
    pub fn sparse_layers(&self) -> impl Iterator<Item = (usize, &Moe)> + Clone {
        self.all_layers().filter_map(|(index, layer)| match &layer.mlp {
            Mlp::Sparse(moe) => Some((index, moe)),
            Mlp::Dense(_) => None,
        })
    }

    /// Every matrix that is in memory as a whole, in the order of use.
    pub fn resident(&self) -> Vec<&Matrix> {
        let mut all = self.main();
        all.extend(self.mtp.iter().flat_map(Mtp::resident));
        all
    }

    /// Those of them that always are.
    fn main(&self) -> Vec<&Matrix> {
        let layers = self.layers.iter().flat_map(Layer::resident);
        layers.chain([&self.lm_head]).collect()
    }
}

impl Mtp {
    /// Bytes that [`Mtp::load`] reads.
    pub fn resident_bytes(&self) -> usize {
        bytes_of(&self.resident())
    }

    /// The same head with its matrices in memory, which is `region [resident_bytes()]`.
    pub fn load(&self, directory: &Directory, region: Region) -> Result<Mtp> {
        let head = self.clone();
        load_into(region, &head.resident(), directory, |_| ())?;
        Ok(head)
    }

    fn resident(&self) -> Vec<&Matrix> {
        let mut all = self.layer.resident();
        all.push(&self.eh_proj);
        all
    }

    /// `None` when there is no tensor of a layer behind the last.
    fn bind(directory: &Directory, c: &Config) -> Result<Option<Mtp>> {
        let prefix = format!("model.layers.{}.", c.num_layers);
        if !directory.iter().any(|(name, _)| name.starts_with(&prefix)) {
            return Ok(None);
        }
        let norm = |name: &str| vector(directory, &format!("{prefix}{name}.weight"), c.hidden_size);
        let indexer = directory.get(&format!("{prefix}self_attn.indexer.wk.weight"));
        let kind = (MlpKind::Sparse, indexer.is_some());
        let eh_proj = format!("{prefix}eh_proj.weight");
        Ok(Some(Mtp {
            embedding_norm: norm("enorm")?,
            hidden_norm: norm("hnorm")?,
            eh_proj: Matrix::bind(directory, &eh_proj, c.hidden_size, 2 * c.hidden_size)?,
            layer: Layer::bind(directory, c, c.num_layers, kind)?,
            final_norm: norm("shared_head.norm")?,
        }))
    }
}

impl Layer {
    /// How many routed experts it has.
    pub fn experts(&self) -> usize {
        match &self.mlp {
            Mlp::Dense(_) => 0,
            Mlp::Sparse(moe) => moe.experts.len(),
        }
    }

    /// Every matrix that stays in memory, in the order of use.
    fn resident(&self) -> Vec<&Matrix> {
        let Attention { q_a, q_b, kv_a, kv_b, o, .. } = &self.attention;
        let mut all = vec![q_a, q_b, kv_a, kv_b, o];
        if let Some(Indexer { wq_b, wk, weights_proj, .. }) = &self.indexer {
            all.extend([wq_b, wk, weights_proj]);
        }
        let ffn = match &self.mlp {
            Mlp::Dense(ffn) => Some(ffn),
            Mlp::Sparse(moe) => {
                all.push(&moe.router);
                moe.shared.as_ref()
            }
        };
        if let Some(Ffn { gate, up, down }) = ffn {
            all.extend([gate, up, down]);
        }
        all
    }

    fn bind(
        directory: &Directory,
        c: &Config,
        layer: usize,
        (mlp, has_indexer): (MlpKind, bool),
    ) -> Result<Layer> {
        let prefix = format!("model.layers.{layer}.");
        let norm = |name: &str| vector(directory, &format!("{prefix}{name}.weight"), c.hidden_size);
        Ok(Layer {
            input_norm: norm("input_layernorm")?,
            attention: Attention::bind(directory, c, &format!("{prefix}self_attn."))?,
            indexer: has_indexer
                .then(|| Indexer::bind(directory, c, &format!("{prefix}self_attn.indexer.")))
                .transpose()?,
            post_attention_norm: norm("post_attention_layernorm")?,
            mlp: match mlp {
                MlpKind::Dense => Mlp::Dense(Ffn::bind(
                    directory,
                    &format!("{prefix}mlp."),
                    c.hidden_size,
                    c.intermediate_size,
                )?),
                MlpKind::Sparse => Mlp::Sparse(Moe::bind(directory, c, &format!("{prefix}mlp."))?),
            },
        })
    }
}

impl Attention {
    fn bind(directory: &Directory, c: &Config, prefix: &str) -> Result<Attention> {
        let (hidden, heads, qk_dim) = (c.hidden_size, c.num_heads, c.qk_head_dim());
        let kv_dim = c.kv_lora_rank + c.qk_rope_head_dim;
        let matrix = |name: &str, rows, cols| {
            Matrix::bind(directory, &format!("{prefix}{name}.weight"), rows, cols)
        };
        let bias = |name: &str, n| {
            let name = format!("{prefix}{name}.bias");
            if !c.attention_bias && directory.get(&name).is_some() {
                bail!("tensor {name} exists, but config.json says attention_bias false");
            }
            c.attention_bias.then(|| vector(directory, &name, n)).transpose()
        };
        let norm = |name: &str, n| vector(directory, &format!("{prefix}{name}.weight"), n);
        Ok(Attention {
            q_a: matrix("q_a_proj", c.q_lora_rank, hidden)?,
            q_a_bias: bias("q_a_proj", c.q_lora_rank)?,
            q_a_norm: norm("q_a_layernorm", c.q_lora_rank)?,
            q_b: matrix("q_b_proj", heads * qk_dim, c.q_lora_rank)?,
            kv_a: matrix("kv_a_proj_with_mqa", kv_dim, hidden)?,
            kv_a_bias: bias("kv_a_proj_with_mqa", kv_dim)?,
            kv_a_norm: norm("kv_a_layernorm", c.kv_lora_rank)?,
            kv_b: matrix("kv_b_proj", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)?,
            o: matrix("o_proj", hidden, heads * c.v_head_dim)?,
            o_bias: bias("o_proj", hidden)?,
        })
    }
}

impl Indexer {
    fn bind(directory: &Directory, c: &Config, prefix: &str) -> Result<Indexer> {
        let (heads, dim) = (c.index_n_heads, c.index_head_dim);
        let matrix = |name: &str, rows, cols| {
            Matrix::bind(directory, &format!("{prefix}{name}"), rows, cols)
        };
        Ok(Indexer {
            wq_b: matrix("wq_b.weight", heads * dim, c.q_lora_rank)?,
            wk: matrix("wk.weight", dim, c.hidden_size)?,
            k_norm: vector(directory, &format!("{prefix}k_norm.weight"), dim)?,
            k_norm_bias: vector(directory, &format!("{prefix}k_norm.bias"), dim)?,
            weights_proj: matrix("weights_proj.weight", heads, c.hidden_size)?,
        })
    }
}

impl Ffn {
    fn bind(directory: &Directory, prefix: &str, hidden: usize, width: usize) -> Result<Ffn> {
        let matrix = |name: &str, rows, cols| {
            Matrix::bind(directory, &format!("{prefix}{name}_proj.weight"), rows, cols)
        };
        Ok(Ffn {
            gate: matrix("gate", width, hidden)?,
            up: matrix("up", width, hidden)?,
            down: matrix("down", hidden, width)?,
        })
    }
}

impl Moe {
    fn bind(directory: &Directory, c: &Config, prefix: &str) -> Result<Moe> {
        let (hidden, width) = (c.hidden_size, c.moe_intermediate_size);
        let expert = |e: usize| {
            let matrix = |name: &str, rows, cols| {
                let name = format!("{prefix}experts.{e}.{name}_proj.weight");
                MatrixSource::bind(directory, &name, rows, cols)
            };
            Ok(ExpertSource::new(
                directory,
                matrix("gate", width, hidden)?,
                matrix("up", width, hidden)?,
                matrix("down", hidden, width)?,
            ))
        };
        let shared_width = width * c.n_shared_experts;
        let shared = format!("{prefix}shared_experts.");
        Ok(Moe {
            router: Matrix::bind(
                directory,
                &format!("{prefix}gate.weight"),
                c.n_routed_experts,
                hidden,
            )?,
            correction_bias: vector(
                directory,
                &format!("{prefix}gate.e_score_correction_bias"),
                c.n_routed_experts,
            )?,
            shared: (shared_width > 0)
                .then(|| Ffn::bind(directory, &shared, hidden, shared_width))
                .transpose()?,
            experts: (0..c.n_routed_experts).map(expert).collect::<Result<_>>()?,
        })
    }
}

/// Where each matrix starts behind the one before, and where the last ends.
fn starts(matrices: &[&Matrix]) -> (Vec<usize>, usize) {
    let mut end = 0usize;
    let starts = matrices.iter().map(|matrix| {
        let start = end.next_multiple_of(MATRIX_ALIGN);
        end = start + matrix.source.bytes();
        start
    });
    (starts.collect(), end)
}

/// Bytes of matrices that lie behind each other.
fn bytes_of(matrices: &[&Matrix]) -> usize {
    starts(matrices).1
}

/// Loads matrices into `region [bytes_of(matrices)]`.
fn load_into(
    mut region: Region,
    matrices: &[&Matrix],
    directory: &Directory,
    progress: impl FnMut(usize),
) -> Result<()> {
    let (mut rest, mut end, mut parts) = (&mut region[..], 0, Vec::new());
    let (starts, _) = starts(matrices);
    for (matrix, start) in matrices.iter().zip(&starts) {
        let bytes = matrix.source.bytes();
        let (part, behind) = rest[start - end..].split_at_mut(bytes);
        parts.push((*matrix, part));
        (rest, end) = (behind, start + bytes);
    }
    read_all(directory, parts, progress)?;
    let region = Arc::new(region);
    for (matrix, start) in matrices.iter().zip(starts) {
        let place = (Arc::clone(&region), start);
        assert!(matrix.bytes.set(place).is_ok(), "{} is loaded twice", matrix.source.name);
    }
    Ok(())
}

/// Reads matrices into their places on [`LOADERS`] threads; the first error ends all of them.
fn read_all(
    directory: &Directory,
    parts: Vec<(&Matrix, &mut [u8])>,
    mut progress: impl FnMut(usize),
) -> Result<()> {
    let parts = Mutex::new(parts.into_iter());
    let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
    let (sender, receiver) = channel();
    std::thread::scope(|scope| {
        for _ in 0..LOADERS {
            let sender = sender.clone();
            scope.spawn(move || {
                while let Some((matrix, part)) = next() {
                    let result = matrix.source.read(directory, part).map(|()| part.len());
                    // Nobody listens any more after an error.
                    if sender.send(result).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut done = 0;
        for bytes in receiver {
            done += bytes?;
            progress(done);
        }
        Ok(())
    })
}

/// Reads the float vector `name [n]` (norm weight or bias).
fn vector(directory: &Directory, name: &str, n: usize) -> Result<Vec<f32>> {
    if directory.get(name).is_none() {
        bail!("tensor {name} is missing (expected shape [{n}])");
    }
    let source = MatrixSource::bind(directory, name, 1, n)?;
    if source.scales.is_some() {
        bail!("tensor {name}: expected plain floats, found quantized {}", source.format);
    }
    let mut values = vec![0.0; n];
    source.read_row(directory, 0, &mut values, &mut Vec::new())?;
    if let Some(i) = values.iter().position(|value| !value.is_finite()) {
        bail!("tensor {name}: element {i} is {}, expected a finite number", values[i]);
    }
    Ok(values)
}

/// Reads the span `what` into `buffer`, whose length is the span's.
fn read_span(
    directory: &Directory,
    what: impl Display,
    span: Span,
    buffer: &mut [u8],
) -> Result<()> {
    let shard = &directory.shards()[span.shard];
    read_exact_at(&shard.file, &shard.path, what, span.offset, buffer)
}
