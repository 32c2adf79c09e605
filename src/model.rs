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
use crate::kernels::{Activations, Forms, add, fit, tiles};
use crate::kv::KvCache;
use crate::moe::{self, Ahead};
use crate::ops::{Compute, Product, Rope, Rows, Stage, rms_norm};
use crate::safetensors::Directory;
use crate::weights::{Layer, Mlp, Weights};
use std::ops::Range;
use std::sync::Arc;

/// Sees what the forward pass decides; for tests and tracing. Every method does nothing unless
/// implemented.
pub trait Observer {
    /// The residual stream `[D]` of `position` before `layer` (index L: after the last layer,
    /// L + 1: after the final norm).
    fn hidden(&mut self, _layer: usize, _position: usize, _hidden: &[f32]) {}
    /// Routed experts of `position`, `(index, weight)` in ascending index.
    fn routed(&mut self, _layer: usize, _position: usize, _route: &[(u32, f32)]) {}
    /// Keys that a full indexer layer kept for `position`; `None` means all up to its own.
    fn kept(&mut self, _layer: usize, _position: usize, _keys: Option<&[u32]>) {}
    /// Drafts that were run behind the first `tokens` positions, and how many of them were right.
    fn drafted(&mut self, _tokens: usize, _drafts: &[u32], _accepted: usize) {}
    /// `token` was chosen by these logits `[V]`, in the order of the timeline.
    fn chosen(&mut self, _token: u32, _logits: &[f32]) {}
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
    pub directory: Arc<Directory>,
    /// Resident weights and the places of the others.
    pub weights: Weights,
    rope: Rope,
}

/// What one forward pass at a time works with, whatever its timeline.
pub struct Runtime {
    /// Threads and instruction set.
    pub compute: Compute,
    /// Routed experts.
    pub store: ExpertStore,
    /// Buffers.
    pub scratch: Scratch,
}

/// Buffers of a batch, reused from layer to layer and from batch to batch.
#[derive(Default)]
pub struct Scratch {
    /// `[T, D]` residual stream
    x: Vec<f32>,
    /// `[T, D]` normed input of a half layer
    normed: Vec<f32>,
    /// The same, as input of products
    input: Activations,
    /// `[T, D]` output of a half layer
    delta: Vec<f32>,
    angles: Vec<Vec<(f32, f32)>>,
    /// 0, 1, …: the rows of a batch
    all: Vec<u32>,
    stage: Stage,
    selection: Selection,
    attention: attention::Scratch,
    indexer: indexer::Scratch,
    moe: moe::Scratch,
    embedding_row: Vec<u8>,
    mtp: mtp::Scratch,
}

/// A layer and the rows that pass through it.
#[derive(Clone, Copy)]
struct Pass<'a> {
    layer: &'a Layer,
    index: usize,
    /// Position of the first row.
    first: usize,
    rows: usize,
    /// Keeps the keys that the last batch selected instead of selecting anew.
    keeps_selection: bool,
}

/// Most rows of one batch whose logits are asked for.
pub const LOGITS_ROWS_MAX: usize = 16;
/// Vocabulary-sized rows of four bytes that choosing a token takes: a copy of the logits and a
/// ranking of (token, weight).
const SAMPLER_ROWS: usize = 5;

impl Scratch {
    /// Bytes at most of everything here and of a session's logits, for batches of `rows`.
    pub fn bytes(c: &Config, ctx_tokens: usize, rows: usize, threads: usize) -> usize {
        let kv_dim = c.kv_lora_rank + c.qk_rope_head_dim;
        let index_dim = c.index_n_heads * c.index_head_dim;
        let projected = (c.q_lora_rank + kv_dim + c.index_head_dim + c.index_n_heads)
            .max(c.num_heads * c.qk_head_dim() + index_dim)
            .max(c.hidden_size);
        let logits_rows = rows.min(LOGITS_ROWS_MAX) * c.vocab_size;
        let slab = (rows * projected).max(logits_rows);
        let row = 3 * c.hidden_size + 2 * c.qk_rope_head_dim + 4;
        let widest = c.intermediate_size.max(c.num_heads * c.v_head_dim).max(c.hidden_size);
        4 * (rows * row + slab + logits_rows + SAMPLER_ROWS * c.vocab_size)
            + Activations::bytes(rows, c.hidden_size)
            + attention::Scratch::bytes(c, rows, threads)
            + indexer::Scratch::bytes(c, ctx_tokens, rows, threads)
            + moe::Scratch::bytes(c, rows)
            + mtp::Scratch::bytes(c, rows)
            + threads * tiles::Scratch::bytes(widest)
    }
}

mod mtp;

impl Model {
    /// Puts the parts together. The weights must be loaded before the first pass.
    pub fn new(config: Config, directory: Directory, weights: Weights) -> Model {
        let rope = Rope::new(config.qk_rope_head_dim, config.rope_theta);
        Model { config, directory: Arc::new(directory), weights, rope }
    }

    /// Runs `tokens` at positions `first…`; [`Model::logits`] then gives what any of them predicts.
    ///
    /// The cache must hold the positions before `first` and have room for the tokens. Errors: a
    /// token outside the vocabulary, a failed expert read, a non-finite value (with layer and
    /// position), an interruption. After an error the cache beyond `first` is undefined.
    pub fn forward(
        &self,
        tokens: &[u32],
        first: usize,
        kv: &mut KvCache,
        runtime: &mut Runtime,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        assert!(first + tokens.len() <= kv.capacity_tokens(), "the cache is too small");
        let Runtime { compute, store, scratch } = runtime;
        self.embed(tokens, first, scratch)?;
        let (rows, hidden) = (tokens.len(), self.config.hidden_size);
        let has_waited = store.take_waited();
        for (index, layer) in self.weights.layers.iter().enumerate() {
            if has_waited && matches!(layer.mlp, Mlp::Dense(_)) {
                let Scratch { x, all, moe: moe_scratch, .. } = &mut *scratch;
                let ahead = (self.ahead(index, rows, x), &all[..]);
                let reads = (&self.directory, &mut *store);
                moe::look_ahead(compute, &self.config, ahead, reads, moe_scratch);
            }
            if observer.interrupted() {
                return Err(Error::interrupted());
            }
            self.observe_hidden(index, first, &scratch.x[..rows * hidden], observer);
            let pass = Pass { layer, index, first, rows, keeps_selection: false };
            self.run_layer(pass, kv, (compute, store), scratch, observer)?;
        }
        self.observe_hidden(self.config.num_layers, first, &scratch.x[..rows * hidden], observer);
        let forms = Forms::of_rows(rows).and(self.weights.lm_head.source.format);
        self.norm(compute, rows, &self.weights.final_norm, forms, scratch);
        let normed = &scratch.normed[..rows * hidden];
        self.observe_hidden(self.config.num_layers + 1, first, normed, observer);
        Ok(())
    }

    /// `[D]`, what the output head saw of row `t` of the batch that just ran.
    pub fn hidden<'a>(&self, scratch: &'a Scratch, t: usize) -> &'a [f32] {
        let hidden = self.config.hidden_size;
        &scratch.normed[t * hidden..(t + 1) * hidden]
    }

    /// Logits `[rows, V]` of some rows of the batch that [`Model::forward`] just ran from position
    /// `first` on. Error: a logit that is not finite, with position and token.
    pub fn logits(
        &self,
        rows: Range<usize>,
        first: usize,
        runtime: &mut Runtime,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let Scratch { input, all, stage, .. } = &mut runtime.scratch;
        let vocab = self.config.vocab_size;
        logits.resize(rows.len() * vocab, 0.0);
        let (matrix, tokens) = (self.weights.lm_head.encoded(), &all[rows.clone()]);
        stage.run(&mut runtime.compute, 1, |_| Product { matrix, x: input, tokens });
        stage.copy(&mut runtime.compute, 0, logits);
        if let Some(i) = logits.iter().position(|logit| !logit.is_finite()) {
            let (position, token) = (first + rows.start + i / vocab, i % vocab);
            bail!("position {position}: the logit of token {token} is {}", logits[i]);
        }
        Ok(())
    }

    /// x = embedding rows; angles of each position.
    fn embed(&self, tokens: &[u32], first: usize, scratch: &mut Scratch) -> Result<()> {
        let hidden = self.config.hidden_size;
        let Scratch { x, angles, all, embedding_row, .. } = scratch;
        let x = fit(x, tokens.len() * hidden, 0.0);
        if angles.len() < tokens.len() {
            angles.resize(tokens.len(), Vec::new());
        }
        for i in all.len()..moe::pass_rows(tokens.len()) {
            all.push(i as u32);
        }
        for ((t, token), row) in tokens.iter().enumerate().zip(x.chunks_exact_mut(hidden)) {
            if *token as usize >= self.config.vocab_size {
                let vocab = self.config.vocab_size;
                bail!("token {token} at position {}: the vocabulary has {vocab}", first + t);
            }
            self.weights.embedding.read(&self.directory, *token, row, embedding_row)?;
            self.rope.angles(first + t, &mut angles[t]);
        }
        Ok(())
    }

    /// x += attention(norm(x)); x += mlp(norm(x)).
    fn run_layer(
        &self,
        pass: Pass<'_>,
        kv: &mut KvCache,
        (compute, store): (&mut Compute, &mut ExpertStore),
        scratch: &mut Scratch,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.attention_half(pass, kv, compute, scratch, observer)
            .and_then(|()| self.mlp_half(pass, store, compute, scratch, observer))
            .context(|| format!("layer {}", pass.index))
    }

    /// x += attention(norm(x)), with the selection of this or an earlier full layer.
    fn attention_half(
        &self,
        pass: Pass<'_>,
        kv: &mut KvCache,
        compute: &mut Compute,
        scratch: &mut Scratch,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Pass { layer, index, first, rows, keeps_selection } = pass;
        let config = &self.config;
        let chooses = layer.indexer.is_some()
            && !keeps_selection
            && indexer::must_choose(config, first, rows);
        self.project(pass, chooses, kv, compute, scratch);
        let Scratch { x, delta, angles, all, stage, selection, .. } = scratch;
        let (attn, idx) = (&mut scratch.attention, &mut scratch.indexer);
        let (all, delta) = (&all[..rows], fit(delta, rows * config.hidden_size, 0.0));
        let batch = Rows { layer: index, first, angles: &angles[..rows] };
        if layer.indexer.is_some() && !keeps_selection {
            indexer::select(compute, config, batch, kv, idx, selection)?;
            for t in 0..rows {
                observer.kept(index, first + t, selection.kept(t));
            }
        } else if layer.indexer.is_none() && (!self.weights.has_indexer || self.is_mtp(index)) {
            selection.keep_all(rows);
        }
        let selected = (&*selection, all);
        attention::attend(
            compute,
            stage,
            &layer.attention,
            config,
            batch,
            selected,
            kv,
            attn,
            delta,
        );
        add(delta, &mut x[..rows * config.hidden_size]);
        Ok(())
    }

    /// Queries, and the rows of the cache: latents, and index keys where there is an indexer. Index
    /// queries only if keys are to be chosen.
    fn project(
        &self,
        Pass { layer, index, first, rows, .. }: Pass<'_>,
        chooses: bool,
        kv: &mut KvCache,
        compute: &mut Compute,
        scratch: &mut Scratch,
    ) {
        let config = &self.config;
        let indexer = layer.indexer.as_ref();
        let forms = attention::hidden_forms(&layer.attention, indexer, rows);
        self.norm(compute, rows, &layer.input_norm, forms, scratch);
        let Scratch { input, angles, all, stage, .. } = scratch;
        let (attn, idx) = (&mut scratch.attention, &mut scratch.indexer);
        let batch = Rows { layer: index, first, angles: &angles[..rows] };
        attention::project(
            compute,
            stage,
            &layer.attention,
            indexer,
            chooses,
            config,
            batch,
            (input, &all[..rows]),
            kv,
            attn,
            &mut idx.rows,
        );
        if let Some(indexer) = indexer {
            indexer::cache_keys(indexer, config, batch, kv, idx);
        }
    }

    /// Whether a layer is that of the draft head.
    fn is_mtp(&self, index: usize) -> bool {
        index == self.config.num_layers
    }

    /// normed = norm(x), and its forms.
    fn norm(
        &self,
        compute: &mut Compute,
        rows: usize,
        weight: &[f32],
        forms: Forms,
        scratch: &mut Scratch,
    ) {
        let hidden = self.config.hidden_size;
        let normed = fit(&mut scratch.normed, rows * hidden, 0.0);
        let x = &scratch.x[..rows * hidden];
        rms_norm(compute, x, weight, self.config.rms_norm_eps, normed);
        let row = |t: usize| &normed[t * hidden..(t + 1) * hidden];
        compute.prepare(rows, hidden, forms, row, &mut scratch.input);
    }

    /// x += mlp(norm(x)).
    fn mlp_half(
        &self,
        Pass { layer, index, first, rows, .. }: Pass<'_>,
        store: &mut ExpertStore,
        compute: &mut Compute,
        scratch: &mut Scratch,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let forms = match &layer.mlp {
            Mlp::Dense(ffn) => moe::dense_forms(ffn, rows),
            Mlp::Sparse(moe) => moe::sparse_forms(moe, rows),
        };
        self.norm(compute, rows, &layer.post_attention_norm, forms, scratch);
        let Scratch { x: residual, input, delta, all, moe: moe_scratch, .. } = scratch;
        let delta = fit(delta, rows * self.config.hidden_size, 0.0);
        match &layer.mlp {
            Mlp::Dense(ffn) => moe::dense(compute, ffn, (input, &all[..rows]), delta, moe_scratch),
            Mlp::Sparse(moe) => {
                let x = (&*input, &all[..rows]);
                moe::route(compute, moe, &self.config, first, x, moe_scratch)?;
                for t in 0..rows {
                    observer.routed(index, first + t, moe_scratch.route(t));
                }
                let (directory, x) = (&self.directory, (&*input, rows, &all[..]));
                let ahead = (&self.config, self.ahead(index + 1, rows, residual));
                moe::sparse(compute, moe, index, x, delta, directory, store, ahead, moe_scratch)?;
            }
        }
        add(delta, &mut residual[..rows * self.config.hidden_size]);
        Ok(())
    }

    /// The layers from `from` on, while the residual stream of `rows` is `x`.
    fn ahead<'a>(&'a self, from: usize, rows: usize, x: &'a [f32]) -> Ahead<'a> {
        let residual = &x[..rows * self.config.hidden_size];
        Ahead { layers: &self.weights.layers, from, residual }
    }

    fn observe_hidden(&self, layer: usize, first: usize, x: &[f32], observer: &mut dyn Observer) {
        for (t, row) in x.chunks_exact(self.config.hidden_size).enumerate() {
            observer.hidden(layer, first + t, row);
        }
    }
}
