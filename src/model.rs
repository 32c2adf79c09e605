//! The forward pass: tokens in, logits out, one batch of rows at a time.
//!
//! x = embedding(token). For each layer: x += attention(norm(x)); x += mlp(norm(x)). Then the
//! final norm and the output head. A batch is consecutive positions of one timeline, or of several;
//! how they are cut into batches never changes a bit, because every row's arithmetic is its own.

#![forbid(unsafe_code)]

use crate::attention::{self, Queries};
use crate::bail;
use crate::config::Config;
use crate::error::{Context, Error, Result};
use crate::experts::ExpertStore;
use crate::indexer::{self, Selection};
use crate::kernels::{Activations, Forms, add, fit, tiles};
use crate::kv::Sequence;
use crate::moe::{self, Ahead};
use crate::ops::{Compute, Product, Rope, Rows, Stage, rms_norm};
use crate::safetensors::Directory;
use crate::weights::{Input, Layer, Mlp, Mtp, Weights};
use std::sync::Arc;

/// Sees what the forward pass decides; for tests and tracing. Every method does nothing unless
/// implemented.
pub trait Observer {
    /// The residual stream `[D]` of `position` before `layer` (index L: after the last layer,
    /// L + 1: after the final norm).
    fn hidden(&mut self, _layer: usize, _position: usize, _hidden: &[f32]) {}
    /// Routed experts of `position`, `(index, weight)` in ascending index.
    fn routed(&mut self, _layer: usize, _position: usize, _route: &[(u32, f32)]) {}
    /// A row of activations `[cols]` that matrices of `layer` are multiplied with. That of the head
    /// is the last that `hidden` gives.
    fn input(&mut self, _layer: usize, _input: Input, _x: &[f32]) {}
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

/// One for each sequence of a batch.
pub type Observers<'a, 'o> = [&'a mut (dyn Observer + 'o)];

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
    /// The draft head, while it is in use.
    pub head: Option<Arc<Mtp>>,
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
    /// Position of each row, and its rotary angles
    positions: Vec<usize>,
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
    rows: usize,
    /// Keeps the keys that the last batch selected instead of selecting anew.
    keeps_selection: bool,
}

/// Most rows whose logits are held at once.
const LOGITS_ROWS_MAX: usize = 16;
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

    /// Runs the rows of all sequences; [`Model::logits`] then gives what any of them predicts. Each
    /// has an observer of its own.
    ///
    /// Errors: a token outside the vocabulary, a failed expert read, a non-finite value (with layer
    /// and position), an interruption, which all observers must want. After an error the caches
    /// are undefined from the first of these positions on.
    pub fn forward(
        &self,
        batch: &mut [Sequence<'_>],
        runtime: &mut Runtime,
        observers: &mut Observers<'_, '_>,
    ) -> Result<()> {
        let Runtime { compute, store, scratch, .. } = runtime;
        let rows = Sequence::place(batch);
        let each = batch.iter().flat_map(|s| s.tokens.iter().copied().zip(s.first..));
        self.embed(each, scratch)?;
        let has_waited = store.take_waited();
        for (index, layer) in self.weights.layers.iter().enumerate() {
            if has_waited && matches!(layer.mlp, Mlp::Dense(_)) {
                let Scratch { x, all, moe: moe_scratch, .. } = &mut *scratch;
                let ahead = (self.ahead(index, rows, x), &all[..]);
                let reads = (&self.directory, &mut *store);
                moe::look_ahead(compute, &self.config, ahead, reads, moe_scratch);
            }
            // All are asked, also behind one that goes on.
            if observers.iter_mut().fold(true, |all, observer| observer.interrupted() & all) {
                return Err(Error::interrupted());
            }
            self.observe_hidden(index, &scratch.x, batch, observers);
            let pass = Pass { layer, index, rows, keeps_selection: false };
            self.run_layer(pass, batch, (compute, store), scratch, observers)?;
        }
        self.observe_hidden(self.config.num_layers, &scratch.x, batch, observers);
        let forms = Forms::of_rows(rows).and(self.weights.lm_head.source.format);
        self.norm(compute, rows, &self.weights.final_norm, forms, scratch);
        self.observe_hidden(self.config.num_layers + 1, &scratch.normed, batch, observers);
        Ok(())
    }

    /// `[D]`, what the output head saw of row `t` of the batch that just ran.
    pub fn hidden<'a>(&self, scratch: &'a Scratch, t: usize) -> &'a [f32] {
        let hidden = self.config.hidden_size;
        &scratch.normed[t * hidden..(t + 1) * hidden]
    }

    /// Hands the logits `[V]` of some rows of the batch that just ran to `sink`, in order; those of
    /// the last ones stay in `logits`. Errors: a logit that is not finite, with position and token;
    /// those of the sink.
    pub fn logits(
        &self,
        mut rows: impl Iterator<Item = usize>,
        runtime: &mut Runtime,
        logits: &mut Vec<f32>,
        mut sink: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let Runtime { compute, scratch: Scratch { input, positions, stage, .. }, .. } = runtime;
        let (matrix, vocab) = (self.weights.lm_head.encoded(), self.config.vocab_size);
        let mut places = [0; LOGITS_ROWS_MAX];
        loop {
            let mut count = 0;
            for (place, row) in places.iter_mut().zip(&mut rows) {
                *place = row as u32;
                count += 1;
            }
            if count == 0 {
                return Ok(());
            }
            let tokens = &places[..count];
            logits.resize(count * vocab, 0.0);
            stage.run(compute, 1, |_| Product { matrix, x: input, tokens });
            stage.copy(compute, 0, logits);
            for (row, logits) in tokens.iter().zip(logits.chunks_exact(vocab)) {
                let row = *row as usize;
                if let Some(token) = logits.iter().position(|logit| !logit.is_finite()) {
                    let (position, logit) = (positions[row], logits[token]);
                    bail!("position {position}: the logit of token {token} is {logit}");
                }
                sink(row, logits)?;
            }
        }
    }

    /// x = embedding rows of (token, position); angles of each position.
    fn embed(
        &self,
        rows: impl Iterator<Item = (u32, usize)> + Clone,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let (hidden, count) = (self.config.hidden_size, rows.clone().count());
        let Scratch { x, positions, angles, all, embedding_row, .. } = scratch;
        let x = fit(x, count * hidden, 0.0);
        if angles.len() < count {
            angles.resize(count, Vec::new());
        }
        for i in all.len()..moe::pass_rows(count) {
            all.push(i as u32);
        }
        positions.clear();
        for (((token, position), angles), row) in rows.zip(angles).zip(x.chunks_exact_mut(hidden)) {
            if token as usize >= self.config.vocab_size {
                let vocab = self.config.vocab_size;
                bail!("token {token} at position {position}: the vocabulary has {vocab}");
            }
            self.weights.embedding.read(&self.directory, token, row, embedding_row)?;
            self.rope.angles(position, angles);
            positions.push(position);
        }
        Ok(())
    }

    /// x += attention(norm(x)); x += mlp(norm(x)).
    fn run_layer(
        &self,
        pass: Pass<'_>,
        batch: &mut [Sequence<'_>],
        (compute, store): (&mut Compute, &mut ExpertStore),
        scratch: &mut Scratch,
        observers: &mut Observers<'_, '_>,
    ) -> Result<()> {
        self.attention_half(pass, batch, compute, scratch, observers)
            .and_then(|()| self.mlp_half(pass, batch, (compute, store), scratch, observers))
            .context(|| format!("layer {}", pass.index))
    }

    /// x += attention(norm(x)), with the selection of this or an earlier full layer.
    fn attention_half(
        &self,
        pass: Pass<'_>,
        batch: &mut [Sequence<'_>],
        compute: &mut Compute,
        scratch: &mut Scratch,
        observers: &mut Observers<'_, '_>,
    ) -> Result<()> {
        let Pass { layer, index, rows, keeps_selection } = pass;
        let config = &self.config;
        let selects = layer.indexer.is_some() && !keeps_selection;
        let chooses = selects && indexer::must_choose(config, batch);
        let queries = if chooses { Queries::Index } else { Queries::Heads };
        self.project(pass, queries, batch, compute, scratch);
        self.observe_input(index, Input::Attention, &scratch.normed, batch, observers);
        let Scratch { x, delta, angles, all, stage, selection, .. } = scratch;
        let (attn, idx) = (&mut scratch.attention, &mut scratch.indexer);
        let (all, delta) = (&all[..rows], fit(delta, rows * config.hidden_size, 0.0));
        let rows_of = Rows { layer: index, angles: &angles[..rows] };
        if selects {
            indexer::select(compute, config, rows_of, batch, idx, selection)?;
            each_row(batch, observers, |t, position, observer| {
                observer.kept(index, position, selection.kept(t));
            });
        } else if layer.indexer.is_none() && (!self.weights.has_indexer || self.is_mtp(index)) {
            selection.keep_all(rows);
        }
        let selected = (&*selection, all);
        attention::attend(
            compute,
            stage,
            &layer.attention,
            config,
            rows_of,
            selected,
            batch,
            attn,
            delta,
        );
        add(delta, &mut x[..rows * config.hidden_size]);
        Ok(())
    }

    /// The rows of the cache: latents, and index keys where there is an indexer; and `queries`.
    fn project(
        &self,
        Pass { layer, index, rows, .. }: Pass<'_>,
        queries: Queries,
        batch: &mut [Sequence<'_>],
        compute: &mut Compute,
        scratch: &mut Scratch,
    ) {
        let config = &self.config;
        let indexer = layer.indexer.as_ref();
        let forms = attention::hidden_forms(&layer.attention, indexer, rows);
        self.norm(compute, rows, &layer.input_norm, forms, scratch);
        let Scratch { input, angles, all, stage, .. } = scratch;
        let (attn, idx) = (&mut scratch.attention, &mut scratch.indexer);
        let rows_of = Rows { layer: index, angles: &angles[..rows] };
        attention::project(
            compute,
            stage,
            &layer.attention,
            indexer,
            queries,
            config,
            rows_of,
            (input, &all[..rows]),
            batch,
            attn,
            &mut idx.rows,
        );
        if let Some(indexer) = indexer {
            indexer::cache_keys(indexer, config, rows_of, batch, idx);
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
        Pass { layer, index, rows, .. }: Pass<'_>,
        batch: &[Sequence<'_>],
        (compute, store): (&mut Compute, &mut ExpertStore),
        scratch: &mut Scratch,
        observers: &mut Observers<'_, '_>,
    ) -> Result<()> {
        let forms = match &layer.mlp {
            Mlp::Dense(ffn) => moe::dense_forms(ffn, rows),
            Mlp::Sparse(moe) => moe::sparse_forms(moe, rows),
        };
        self.norm(compute, rows, &layer.post_attention_norm, forms, scratch);
        self.observe_input(index, Input::Mlp, &scratch.normed, batch, observers);
        let Scratch { x: residual, input, delta, positions, all, moe: moe_scratch, .. } = scratch;
        let delta = fit(delta, rows * self.config.hidden_size, 0.0);
        match &layer.mlp {
            Mlp::Dense(ffn) => {
                let x = (&*input, &all[..rows]);
                let show = &mut show_inputs(index, batch, observers);
                moe::dense(compute, ffn, x, delta, moe_scratch, show);
            }
            Mlp::Sparse(moe) => {
                let x = (&*input, &all[..rows]);
                moe::route(compute, moe, &self.config, positions, x, moe_scratch)?;
                each_row(batch, observers, |t, position, observer| {
                    observer.routed(index, position, moe_scratch.route(t));
                });
                let (directory, x) = (&self.directory, (&*input, rows, &all[..]));
                let ahead = (&self.config, self.ahead(index + 1, rows, residual));
                let show = &mut show_inputs(index, batch, observers);
                let reads = (directory, store);
                moe::sparse(compute, moe, index, x, delta, reads, ahead, moe_scratch, show)?;
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

    /// Shows rows `x [T, D]` as an input of `layer`.
    fn observe_input(
        &self,
        layer: usize,
        input: Input,
        x: &[f32],
        batch: &[Sequence<'_>],
        observers: &mut Observers<'_, '_>,
    ) {
        let width = self.config.hidden_size;
        each_row(batch, observers, |t, _, observer| {
            observer.input(layer, input, &x[t * width..(t + 1) * width]);
        });
    }

    fn observe_hidden(
        &self,
        layer: usize,
        x: &[f32],
        batch: &[Sequence<'_>],
        observers: &mut Observers<'_, '_>,
    ) {
        let width = self.config.hidden_size;
        each_row(batch, observers, |t, position, observer| {
            observer.hidden(layer, position, &x[t * width..(t + 1) * width]);
        });
    }
}

/// Calls `f(row, its position, its observer)` for each row of a batch; nothing without observers.
fn each_row(
    batch: &[Sequence<'_>],
    observers: &mut Observers<'_, '_>,
    mut f: impl FnMut(usize, usize, &mut dyn Observer),
) {
    for (sequence, observer) in batch.iter().zip(observers) {
        sequence.rows().zip(sequence.first..).for_each(|(t, position)| f(t, position, *observer));
    }
}

/// Shows an input of row t of a batch to the observer of that row.
fn show_inputs<'s>(
    layer: usize,
    batch: &'s [Sequence<'_>],
    observers: &'s mut Observers<'_, '_>,
) -> impl FnMut(Input, usize, &[f32]) {
    move |input, t, x| {
        let mut rows = batch.iter().zip(observers.iter_mut());
        if let Some((_, observer)) = rows.find(|(sequence, _)| sequence.rows().contains(&t)) {
            observer.input(layer, input, x);
        }
    }
}
