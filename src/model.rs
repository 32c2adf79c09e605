//! The forward pass: tokens in, logits out, one batch of rows at a time.
//!
//! x = embedding(token). For each layer: x += attention(norm(x)); x += mlp(norm(x)). Then the
//! final norm and the output head. A batch is consecutive positions of one timeline; how a prompt
//! is cut into batches never changes a bit, because every row's arithmetic is its own.

#![forbid(unsafe_code)]

use crate::attention;
use crate::bail;
use crate::config::Config;
use crate::error::{Context, Error, Result};
use crate::experts::ExpertStore;
use crate::indexer::{self, Selection};
use crate::kernels::add;
use crate::kv::KvCache;
use crate::moe;
use crate::ops::{Rope, Rows, matmul, rms_norm};
use crate::safetensors::Directory;
use crate::weights::{Layer, Mlp, Weights};

/// Sees what the forward pass decides; for tests and tracing. Every method does nothing unless
/// implemented.
pub trait Observer {
    /// The residual stream `[D]` of `position` before `layer` (index L: after the last layer,
    /// L + 1: after the final norm).
    fn hidden(&mut self, _layer: usize, _position: usize, _hidden: &[f32]) {}
    /// Routed experts of `position`, `(index, weight)` in ascending index.
    fn routed(&mut self, _layer: usize, _position: usize, _route: &[(usize, f32)]) {}
    /// Keys that a full indexer layer kept for `position`; `None` means all up to its own.
    fn kept(&mut self, _layer: usize, _position: usize, _keys: Option<&[u32]>) {}
    /// Asked before each layer: true stops the pass with an error.
    fn interrupted(&mut self) -> bool {
        false
    }
}

/// An observer that looks at nothing.
pub struct Unobserved;
impl Observer for Unobserved {}

/// What a forward pass reads and never changes.
pub struct Model {
    /// Shape.
    pub config: Config,
    /// Tensor files; experts and embedding rows are read from them.
    pub directory: Directory,
    /// Resident weights and the places of the others.
    pub weights: Weights,
    rope: Rope,
}

/// What a forward pass changes: one timeline's cache, the buffers, and the logits it appends to.
pub struct State {
    /// Rows of earlier positions.
    pub kv: KvCache,
    /// Buffers.
    pub scratch: Scratch,
    /// `[rows, V]`
    pub logits: Vec<f32>,
}

/// Buffers of a batch, reused from layer to layer and from batch to batch.
#[derive(Default)]
pub struct Scratch {
    /// `[T, D]` residual stream
    x: Vec<f32>,
    /// `[T, D]` normed input of a half layer
    normed: Vec<f32>,
    /// `[T, D]` output of a half layer
    delta: Vec<f32>,
    angles: Vec<Vec<(f32, f32)>>,
    selection: Selection,
    attention: attention::Scratch,
    indexer: indexer::Scratch,
    moe: moe::Scratch,
    row: Vec<f32>,
}

/// Most rows of one batch whose logits are asked for.
pub const LOGITS_ROWS_MAX: usize = 16;
/// Vocabulary-sized rows of four bytes that choosing a token takes: a copy of the logits and a
/// ranking of (token, weight).
const SAMPLER_ROWS: usize = 5;

impl Scratch {
    /// Bytes of the buffers of a batch of `rows` at their largest.
    pub fn bytes(c: &Config, ctx_tokens: usize, rows: usize) -> usize {
        let attention = c.q_lora_rank
            + c.num_heads * (c.qk_head_dim() + c.v_head_dim)
            + 3 * (c.kv_lora_rank + c.qk_rope_head_dim);
        let indexer = c.index_n_heads * (c.index_head_dim + 1) + c.index_head_dim;
        let shared = c.moe_intermediate_size * c.n_shared_experts.max(1);
        let mlp = 2 * c.intermediate_size.max(shared) + c.n_routed_experts;
        let row = 5 * c.hidden_size + attention + indexer + mlp + c.index_topk.min(ctx_tokens);
        let vocab_rows = rows.min(LOGITS_ROWS_MAX) + SAMPLER_ROWS;
        4 * (rows * (row + c.qk_rope_head_dim) + 4 * ctx_tokens + vocab_rows * c.vocab_size)
    }
}

impl Model {
    /// Puts the parts together. The weights must be loaded before the first pass.
    pub fn new(config: Config, directory: Directory, weights: Weights) -> Model {
        let rope = Rope::new(config.qk_rope_head_dim, config.rope_theta);
        Model { config, directory, weights, rope }
    }

    /// Runs `tokens` at positions `first…` and appends the logits `[V]` of the last
    /// `logits_rows` of them to `state.logits`.
    ///
    /// The cache must hold the positions before `first` and have room for the tokens. Errors: a
    /// token outside the vocabulary, a failed expert read, a non-finite value (with layer and
    /// position), an interruption. After an error the cache beyond `first` is undefined.
    pub fn forward(
        &self,
        tokens: &[u32],
        first: usize,
        logits_rows: usize,
        state: &mut State,
        store: &mut ExpertStore,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        assert!(first + tokens.len() <= state.kv.capacity_tokens(), "the cache is too small");
        assert!(logits_rows <= tokens.len(), "logits of rows that are not in the batch");
        assert!(logits_rows <= LOGITS_ROWS_MAX, "logits of {logits_rows} rows at once");
        let State { kv, scratch, logits } = state;
        self.embed(tokens, first, scratch)?;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            if observer.interrupted() {
                return Err(Error::interrupted());
            }
            self.observe_hidden(index, first, &scratch.x, observer);
            self.attention_half(layer, index, first, kv, scratch, observer)
                .and_then(|()| self.mlp_half(layer, index, first, store, scratch, observer))
                .context(|| format!("layer {index}"))?;
        }
        self.observe_hidden(self.config.num_layers, first, &scratch.x, observer);
        self.head(first, scratch, logits_rows, logits, observer)
    }

    /// x = embedding rows; angles of each position.
    fn embed(&self, tokens: &[u32], first: usize, scratch: &mut Scratch) -> Result<()> {
        let hidden = self.config.hidden_size;
        scratch.x.resize(tokens.len() * hidden, 0.0);
        scratch.angles.resize(tokens.len(), Vec::new());
        for (t, token) in tokens.iter().enumerate() {
            if *token as usize >= self.config.vocab_size {
                let vocab = self.config.vocab_size;
                bail!("token {token} at position {}: the vocabulary has {vocab}", first + t);
            }
            let row = &mut scratch.x[t * hidden..(t + 1) * hidden];
            self.weights.embedding.read(&self.directory, *token, row)?;
            self.rope.angles(first + t, &mut scratch.angles[t]);
        }
        Ok(())
    }

    /// x += attention(norm(x)), with the selection of this or an earlier full layer.
    fn attention_half(
        &self,
        layer: &Layer,
        index: usize,
        first: usize,
        kv: &mut KvCache,
        scratch: &mut Scratch,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Scratch { x, normed, delta, angles, selection, attention: attn, indexer: idx, .. } =
            scratch;
        let config = &self.config;
        normed.resize(x.len(), 0.0);
        delta.resize(x.len(), 0.0);
        rms_norm(x, &layer.input_norm, config.rms_norm_eps, normed);
        let rows = Rows { layer: index, first, angles };
        attention::project(&layer.attention, config, rows, normed, kv, attn);
        if let Some(weights) = &layer.indexer {
            let batch = indexer::Batch { rows, hidden: normed, q_latent: &attn.q_latent };
            indexer::select(weights, config, batch, kv, idx, selection)?;
            for (t, kept) in selection.rows.iter().enumerate() {
                observer.kept(index, first + t, kept.as_deref());
            }
        } else if !self.weights.has_indexer {
            selection.keep_all(angles.len());
        }
        attention::attend(&layer.attention, config, rows, selection, kv, attn, delta);
        add(delta, x);
        Ok(())
    }

    /// x += mlp(norm(x)).
    fn mlp_half(
        &self,
        layer: &Layer,
        index: usize,
        first: usize,
        store: &mut ExpertStore,
        scratch: &mut Scratch,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Scratch { x, normed, delta, moe: moe_scratch, .. } = scratch;
        rms_norm(x, &layer.post_attention_norm, self.config.rms_norm_eps, normed);
        match &layer.mlp {
            Mlp::Dense(ffn) => moe::dense(ffn, normed, delta, moe_scratch),
            Mlp::Sparse(moe) => {
                moe::route(moe, &self.config, first, normed, moe_scratch)?;
                for (t, route) in moe_scratch.routes.iter().enumerate() {
                    observer.routed(index, first + t, route);
                }
                moe::sparse(moe, index, normed, delta, &self.directory, store, moe_scratch)?;
            }
        }
        add(delta, x);
        Ok(())
    }

    /// Final norm and output head of the last `logits_rows` rows.
    fn head(
        &self,
        first: usize,
        scratch: &mut Scratch,
        logits_rows: usize,
        logits: &mut Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let Scratch { x, normed, row, .. } = scratch;
        rms_norm(x, &self.weights.final_norm, self.config.rms_norm_eps, normed);
        self.observe_hidden(self.config.num_layers + 1, first, normed, observer);
        let skipped = x.len() / hidden - logits_rows;
        let start = logits.len();
        logits.resize(start + logits_rows * vocab, 0.0);
        let out = &mut logits[start..];
        matmul(self.weights.lm_head.encoded(), &normed[skipped * hidden..], out, row);
        if let Some(i) = out.iter().position(|logit| !logit.is_finite()) {
            let (position, token) = (first + skipped + i / vocab, i % vocab);
            bail!("position {position}: the logit of token {token} is {}", out[i]);
        }
        Ok(())
    }

    fn observe_hidden(&self, layer: usize, first: usize, x: &[f32], observer: &mut dyn Observer) {
        for (t, row) in x.chunks_exact(self.config.hidden_size).enumerate() {
            observer.hidden(layer, first + t, row);
        }
    }
}
