//! Multi-head latent attention, always in its absorbed form.
//!
//! With x the normed hidden state of a position (H heads; nope, rope, v the head widths):
//!
//! 1. q_latent = RMSNorm(x · Wq_aᵀ) `[q_lora]`; q = q_latent · Wq_bᵀ, per head
//!    [q_nope | q_rope], q_rope rotated.
//! 2. [c | k_rope] = x · Wkv_aᵀ; latent = RMSNorm(c) `[kv_lora]`, k_rope rotated, not normed:
//!    together they are the position's row in the cache.
//! 3. Per head, with K `[nope, kv_lora]` and V `[v, kv_lora]` the head's rows of Wkv_b:
//!    q̃ = Kᵀ · q_nope; score[s] = (q̃ · latent[s] + q_rope · k_rope[s]) / √(nope + rope);
//!    p = softmax over the kept s ≤ t; context = V · Σ_s p[s] · latent[s], s ascending. Both sums
//!    go through the kept positions once, in blocks of 64, see [`RunningSoftmax`].
//! 4. out = concat(contexts) · Woᵀ.
//!
//! Absorbing Wkv_b into query and output means that cached rows are used as they are: prefill
//! and decode share this one code path, and the context is never expanded into keys and values.
//! Both latent norms use the configuration's rms_norm_eps, as the serving stacks do.

#![forbid(unsafe_code)]

use crate::config::Config;
use crate::indexer::Selection;
use crate::kernels::activations::BLOCK;
use crate::kernels::attention::{Absorb, Keys, Mix, Scores};
use crate::kernels::elementwise::{Norm, SoftmaxBlock};
use crate::kernels::scalar::{KEYS, RunningSoftmax};
use crate::kernels::tiles::{self, ProductPart};
use crate::kernels::{Activations, Arithmetic, Forms, LANES, fit, reserve};
use crate::kv::Sequence;
use crate::ops::{Compute, Product, Rows, Stage, add_bias, prepare_here, rotate};
use crate::quant::Encoded;
use crate::weights::{self, Indexer};
use std::time::Instant;

/// Heads that share each cached row while it is in registers.
const HEADS: usize = 4;
/// Most heads that share each cached row while it is in the second cache level.
const HEADS_MAX: usize = 16;
/// Most positions whose queries are worked on together by one thread, of [`HEADS`] heads.
const QUERIES_MAX: usize = 32;

/// Buffers of one batch, kept between layers.
#[derive(Default)]
pub struct Scratch {
    /// `[T, q_lora]` before the norm
    q_raw: Vec<f32>,
    /// `[T, q_lora]`, normed
    q_latent: Vec<f32>,
    /// The same, as input of products
    q_input: Activations,
    /// `[T, H, nope+rope]`, rotated
    queries: Vec<f32>,
    /// `[T, kv_lora+rope]`
    kv_rows: Vec<f32>,
    /// `[H, T, v]`
    contexts: Vec<f32>,
    /// `[T, H, v]`
    joined: Vec<f32>,
    /// The same, as input of products
    o_input: Activations,
    cuts: Vec<usize>,
    workers: Vec<Worker>,
}

impl Scratch {
    /// Bytes at most, for batches of `rows` in a context of `ctx_tokens`.
    pub fn bytes(c: &Config, rows: usize, threads: usize) -> usize {
        let (kv_dim, context) = (c.kv_lora_rank + c.qk_rope_head_dim, c.num_heads * c.v_head_dim);
        let row = 2 * c.q_lora_rank + c.num_heads * c.qk_head_dim() + kv_dim + 2 * context;
        let pairs = (HEADS * QUERIES_MAX.min(rows)).max(HEADS_MAX);
        let padded = kv_dim.next_multiple_of(LANES) + c.kv_lora_rank.next_multiple_of(LANES);
        // A running softmax is two floats.
        let scores = HEADS_MAX * KEYS + 2 * pairs;
        // K of one head, decoded, with its scales.
        let decoded = c.qk_nope_head_dim * (c.kv_lora_rank + LANES).next_multiple_of(BLOCK);
        let worker = 4 * (pairs * padded + scores + 2 * decoded)
            + Activations::bytes(QUERIES_MAX, c.kv_lora_rank)
            + tiles::Scratch::bytes(c.kv_lora_rank);
        4 * rows * row
            + Activations::bytes(rows, c.q_lora_rank)
            + Activations::bytes(rows, context)
            + threads * worker
    }
}

/// Heads that one thread works on together: few positions leave room for more heads, which share
/// what is read of the cache. All threads get equally many.
fn heads_together(heads: usize, rows: usize, threads: usize) -> usize {
    let most = (HEADS * QUERIES_MAX / rows).clamp(HEADS, HEADS_MAX);
    let turns = heads.div_ceil(most * threads);
    heads.div_ceil(turns * threads)
}

/// Buffers of one thread: of some heads and some positions.
#[derive(Default)]
struct Worker {
    /// `[T, heads, kv_lora+rope]`: q̃, then q_rope
    absorbed: Vec<[f32; LANES]>,
    /// `[heads, KEYS]`
    scores: Vec<f32>,
    /// `[T, heads]`
    softmaxes: Vec<RunningSoftmax>,
    /// `[T, heads, kv_lora]`: Σ p · latent
    mixed: Vec<[f32; LANES]>,
    mixed_input: Activations,
    tokens: Vec<u32>,
    tiles: tiles::Scratch,
}

/// What [`project`] computes beside the rows of the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Queries {
    /// Nothing: the batch only has to be seen by later ones.
    None,
    /// Queries of attention, and weights of the indexer's heads.
    Heads,
    /// The indexer's queries, too.
    Index,
}

/// What the indexer's projections give, raw: they share their inputs with those of attention, and
/// so their stages.
#[derive(Default)]
pub struct IndexerRows {
    /// `[T, dI]`
    pub keys: Vec<f32>,
    /// `[T, nI]`, only if they were asked for
    pub head_weights: Vec<f32>,
    /// `[T, nI·dI]`, likewise
    pub queries: Vec<f32>,
}

/// Forms that the projections of the hidden state need it in.
pub fn hidden_forms(weights: &weights::Attention, indexer: Option<&Indexer>, rows: usize) -> Forms {
    let forms = Forms::of_rows(rows).and(weights.q_a.source.format).and(weights.kv_a.source.format);
    match indexer {
        Some(i) => forms.and(i.wk.source.format).and(i.weights_proj.source.format),
        None => forms,
    }
}

/// Steps 1 and 2: caches the batch's rows and fills the `queries` that are asked for; with an
/// indexer also its projections.
///
/// `hidden [T, D]` is normed; `all` is 0 … T−1.
#[allow(clippy::too_many_arguments, reason = "the parts of one step, each of its own type")]
pub fn project(
    compute: &mut Compute,
    stage: &mut Stage,
    weights: &weights::Attention,
    indexer: Option<&Indexer>,
    queries: Queries,
    config: &Config,
    rows_of: Rows<'_>,
    (hidden, all): (&Activations, &[u32]),
    batch: &mut [Sequence<'_>],
    scratch: &mut Scratch,
    index_rows: &mut IndexerRows,
) {
    let rows = rows_of.angles.len();
    let (wk, weights_proj) = indexer.map(|i| (&i.wk, &i.weights_proj)).unzip();
    let matrices = [Some(&weights.kv_a), wk, Some(&weights.q_a), weights_proj];
    let matrices = || matrices.iter().flatten();
    let is_whole = queries != Queries::None;
    // Those of the cache come first.
    let cached = 1 + wk.is_some() as usize;
    let product = |i: usize| {
        let matrix = matrices().nth(i).expect("as many as there are").encoded();
        Product { matrix, x: hidden, tokens: all }
    };
    stage.run(compute, if is_whole { matrices().count() } else { cached }, product);
    let kv_dim = config.kv_lora_rank + config.qk_rope_head_dim;
    let kv_rows = fit(&mut scratch.kv_rows, rows * kv_dim, 0.0);
    stage.copy(compute, 0, kv_rows);
    if let Some(wk) = wk {
        stage.copy(compute, 1, fit(&mut index_rows.keys, rows * wk.source.rows, 0.0));
    }
    cache_rows(compute.arithmetic, weights, config, rows_of, kv_rows, batch);
    if !is_whole {
        return;
    }
    let q_raw = fit(&mut scratch.q_raw, rows * config.q_lora_rank, 0.0);
    stage.copy(compute, cached, q_raw);
    if let Some(weights_proj) = weights_proj {
        let head_weights = &mut index_rows.head_weights;
        let head_weights = fit(head_weights, rows * weights_proj.source.rows, 0.0);
        stage.copy(compute, cached + 1, head_weights);
    }

    add_bias(q_raw, weights.q_a_bias.as_ref());
    let q_latent = fit(&mut scratch.q_latent, q_raw.len(), 0.0);
    crate::ops::rms_norm(compute, q_raw, &weights.q_a_norm, config.rms_norm_eps, q_latent);
    let wq_b = indexer.filter(|_| queries == Queries::Index).map(|indexer| &indexer.wq_b);
    let mut forms = Forms::of_rows(rows).and(weights.q_b.source.format);
    if let Some(wq_b) = wq_b {
        forms = forms.and(wq_b.source.format);
    }
    let width = config.q_lora_rank;
    let row = |t: usize| &q_latent[t * width..(t + 1) * width];
    compute.prepare(rows, width, forms, row, &mut scratch.q_input);
    stage.run(compute, 1 + wq_b.is_some() as usize, |i| {
        let matrix = if i == 0 { &weights.q_b } else { wq_b.expect("the second product") };
        Product { matrix: matrix.encoded(), x: &scratch.q_input, tokens: all }
    });
    let query_dim = config.num_heads * config.qk_head_dim();
    let queries = fit(&mut scratch.queries, rows * query_dim, 0.0);
    compute.each_row(queries, query_dim, |t, query, _| {
        stage.copy_row(0, t, query);
        for head in query.chunks_exact_mut(config.qk_head_dim()) {
            rotate(&mut head[config.qk_nope_head_dim..], &rows_of.angles[t]);
        }
    });
    if let Some(wq_b) = wq_b {
        stage.copy(compute, 1, fit(&mut index_rows.queries, rows * wq_b.source.rows, 0.0));
    }
}

/// Step 2: normed latents and rotated keys into the cache. `kv_rows [T, kv_lora+rope]` is raw.
fn cache_rows(
    arithmetic: Arithmetic,
    weights: &weights::Attention,
    config: &Config,
    Rows { layer, angles }: Rows<'_>,
    kv_rows: &mut [f32],
    batch: &mut [Sequence<'_>],
) {
    let (latent_dim, eps) = (config.kv_lora_rank, config.rms_norm_eps);
    add_bias(kv_rows, weights.kv_a_bias.as_ref());
    let kv_dim = latent_dim + config.qk_rope_head_dim;
    let mut rows = kv_rows.chunks_exact_mut(kv_dim).zip(angles);
    for Sequence { tokens, first, kv, .. } in batch {
        for (position, (kv_row, angles)) in (*first..*first + tokens.len()).zip(&mut rows) {
            let (latent, key) = kv_row.split_at_mut(latent_dim);
            rotate(key, angles);
            let (out, key_out) = kv.latent_mut(layer, position).split_at_mut(latent_dim);
            arithmetic.run(Norm { x: latent, weight: &weights.kv_a_norm, eps, out });
            key_out[..key.len()].copy_from_slice(key);
        }
    }
}

/// What all parts of step 3 share.
struct Attending<'a, 's> {
    arithmetic: Arithmetic,
    kv_b: Encoded<'a>,
    config: &'a Config,
    layer: usize,
    rows: usize,
    selection: &'a Selection,
    batch: &'a [Sequence<'s>],
    /// `[T, H, nope+rope]`
    queries: &'a [f32],
}

/// Steps 3 and 4: attends over the caches and writes the layer's output into `out [T, D]`.
#[allow(clippy::too_many_arguments, reason = "the parts of one step, each of its own type")]
pub fn attend(
    compute: &mut Compute,
    stage: &mut Stage,
    weights: &weights::Attention,
    config: &Config,
    Rows { layer, angles }: Rows<'_>,
    (selection, all): (&Selection, &[u32]),
    batch: &[Sequence<'_>],
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let start = Instant::now();
    let rows = angles.len();
    let (heads, v_dim) = (config.num_heads, config.v_head_dim);
    let Scratch { queries, contexts, joined, o_input, cuts, workers, .. } = scratch;
    let (arithmetic, kv_b) = (compute.arithmetic, weights.kv_b.encoded());
    let step = Attending { arithmetic, kv_b, config, layer, rows, selection, batch, queries };
    let contexts = fit(contexts, heads * rows * v_dim, 0.0);
    let threads = compute.pool.threads();
    let group = heads_together(heads, rows, threads);
    cuts.clear();
    cuts.extend((0..heads).step_by(group).chain([heads]).map(|head| head * rows * v_dim));
    workers.resize_with(threads, Worker::default);
    let group_most = heads_together(heads, 1, threads);
    workers.iter_mut().for_each(|worker| step.reserve(group_most, worker));
    // Absorbing and expanding, and scores and sums over the keys, of one head and position.
    let weights_macs = (config.qk_nope_head_dim + v_dim) * config.kv_lora_rank;
    let seen =
        |s: &Sequence<'_>| s.tokens.len() * s.kv.keys_max(config).min(s.first + s.tokens.len());
    let keys = batch.iter().map(seen).sum::<usize>();
    let macs = heads * (rows * weights_macs + 2 * keys * config.kv_lora_rank);
    compute.pool.share(macs, contexts, cuts, workers, |part, out, worker| {
        let first = part * group;
        step.heads([first, (first + group).min(heads)], out, worker);
    });
    compute.tally.add(&kv_b, rows);
    compute.tally.attention_s += start.elapsed().as_secs_f64();

    let width = heads * v_dim;
    let joined = fit(joined, rows * width, 0.0);
    compute.each_row(joined, width, |t, row, _| {
        for (head, out) in row.chunks_exact_mut(v_dim).enumerate() {
            out.copy_from_slice(&contexts[(head * rows + t) * v_dim..][..v_dim]);
        }
    });
    let row = |t: usize| &joined[t * width..(t + 1) * width];
    compute.prepare(rows, width, Forms::of_rows(rows).and(weights.o.source.format), row, o_input);
    stage.run(compute, 1, |_| Product { matrix: weights.o.encoded(), x: o_input, tokens: all });
    stage.copy(compute, 0, out);
    add_bias(out, weights.o_bias.as_ref());
}

impl Attending<'_, '_> {
    /// Makes room for one position: a decode allocates nothing later on, however long its context
    /// grows and whichever thread takes a part.
    fn reserve(&self, group: usize, worker: &mut Worker) {
        let c = self.config;
        let (_, chunks) = self.batch[0].kv.latents(self.layer);
        reserve(&mut worker.absorbed, group * chunks);
        reserve(&mut worker.scores, group * KEYS);
        reserve(&mut worker.softmaxes, group);
        reserve(&mut worker.mixed, group * chunks);
        reserve(&mut worker.tokens, 1);
        worker.tiles.reserve([c.qk_nope_head_dim, c.kv_lora_rank], KEYS);
        let forms = Forms::of_rows(1).and(self.kv_b.format);
        worker.mixed_input.reshape(1, c.kv_lora_rank, forms);
    }

    /// Contexts of the heads `first … end` for all rows, into `out [heads, T, v]`.
    fn heads(&self, [first, end]: [usize; 2], out: &mut [f32], worker: &mut Worker) {
        let (rows, v_dim) = (self.rows, self.config.v_head_dim);
        for t in (0..rows).step_by(QUERIES_MAX) {
            let count = QUERIES_MAX.min(rows - t);
            self.absorb_queries([first, end], t, count, worker);
            self.mix_latents(end - first, t, count, worker);
            for (i, out) in out.chunks_exact_mut(rows * v_dim).enumerate() {
                let out = &mut out[t * v_dim..(t + count) * v_dim];
                self.expand_values(first + i, [i, end - first], count, out, worker);
            }
        }
    }

    /// The sequence of row t of the batch, and the keys that the row sees.
    fn sequence(&self, t: usize) -> (&Sequence<'_>, usize) {
        let sequence = self.batch.iter().find(|sequence| sequence.rows().contains(&t));
        let sequence = sequence.expect("each row is one of a sequence");
        let all = sequence.first + t - sequence.row + 1;
        (sequence, self.selection.kept(t).map_or(all, <[u32]>::len))
    }

    /// q̃ = Kᵀ · q_nope followed by q_rope, of some heads and `count` positions from t.
    fn absorb_queries(&self, heads: [usize; 2], t: usize, count: usize, worker: &mut Worker) {
        let c = self.config;
        let (nope, rope, latent_dim) = (c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank);
        let (qk_dim, query_dim) = (c.qk_head_dim(), c.num_heads * c.qk_head_dim());
        let group = heads[1] - heads[0];
        let (_, chunks) = self.batch[0].kv.latents(self.layer);
        let width = chunks * LANES;
        let absorbed = fit(&mut worker.absorbed, count * group * chunks, [0.0; LANES]);
        let absorbed = absorbed.as_flattened_mut();
        for (i, head) in (heads[0]..heads[1]).enumerate() {
            let queries = &self.queries[t * query_dim + head * qk_dim..];
            Absorb {
                matrix: self.kv_b,
                first_row: head * (nope + c.v_head_dim),
                queries,
                query_stride: query_dim,
                nope,
                skipped_rows: c.v_head_dim,
                out: &mut absorbed[i * width..],
                out_stride: group * width,
                count,
                scratch: &mut worker.tiles,
            }
            .run(self.arithmetic);
            for t in 0..count {
                let out =
                    &mut absorbed[(t * group + i) * width + latent_dim..][..width - latent_dim];
                out[..rope].copy_from_slice(&queries[t * query_dim + nope..][..rope]);
                out[rope..].fill(0.0);
            }
        }
    }

    /// Scores, softmax and Σ p · latent over each position's kept keys, into `worker.mixed`.
    fn mix_latents(&self, group: usize, t: usize, count: usize, worker: &mut Worker) {
        let latent_chunks = self.config.kv_lora_rank.div_ceil(LANES);
        let scale = 1.0 / (self.config.qk_head_dim() as f32).sqrt();
        let Worker { absorbed, scores, softmaxes, mixed, tiles, .. } = worker;
        let scores = fit(scores, group * KEYS, 0.0);
        let softmaxes = fit(softmaxes, count * group, RunningSoftmax::EMPTY);
        softmaxes.fill(RunningSoftmax::EMPTY);
        let mixed = fit(mixed, count * group * latent_chunks, [0.0; LANES]);
        mixed.fill([0.0; LANES]);
        let keys_most = (t..t + count).map(|t| self.sequence(t).1).max().unwrap_or(0);
        // Queries take turns at a block of keys: mostly they see the same.
        for first in (0..keys_most).step_by(KEYS) {
            let each = mixed.chunks_exact_mut(group * latent_chunks);
            let each = each.zip(softmaxes.chunks_exact_mut(group)).enumerate();
            for (i, (out, softmaxes)) in each {
                let (sequence, keys) = self.sequence(t + i);
                let range = first..keys.min(first + KEYS);
                if range.is_empty() {
                    continue;
                }
                let (rows, chunks) = sequence.kv.latents(self.layer);
                let keys = Keys { rows, chunks, positions: self.selection.kept(t + i) };
                let (stride, prefetch) = (KEYS, count == 1);
                let queries = &absorbed[i * group * chunks..(i + 1) * group * chunks];
                let (range_, scratch) = (range.clone(), &mut *tiles);
                self.arithmetic.run(Scores {
                    queries,
                    keys,
                    range: range_,
                    scale,
                    scores,
                    stride,
                    prefetch,
                    scratch,
                });
                let (count, mixed) = (range.len(), &mut *out);
                self.arithmetic.run(SoftmaxBlock { scores, count, softmaxes, mixed });
                let (weights, chunks) = (&*scores, latent_chunks);
                self.arithmetic.run(Mix { weights, stride, keys, range, out, chunks });
            }
        }
        for (mixed, softmax) in mixed.chunks_exact_mut(latent_chunks).zip(softmaxes) {
            let factor = 1.0 / softmax.sum;
            mixed.as_flattened_mut().iter_mut().for_each(|x| *x *= factor);
        }
    }

    /// context = V · mixed of one head for `count` positions, into `out [count, v]`. The head is
    /// number `index` of the `group` that `worker.mixed` holds.
    fn expand_values(
        &self,
        head: usize,
        [index, group]: [usize; 2],
        count: usize,
        out: &mut [f32],
        worker: &mut Worker,
    ) {
        let c = self.config;
        let (v_dim, latent_dim) = (c.v_head_dim, c.kv_lora_rank);
        let first_row = head * (c.qk_nope_head_dim + v_dim) + c.qk_nope_head_dim;
        let width = latent_dim.div_ceil(LANES);
        let Worker { mixed, mixed_input, tokens, tiles, .. } = worker;
        let row = |t: usize| {
            let first = (t * group + index) * width;
            &mixed[first..first + width].as_flattened()[..latent_dim]
        };
        let forms = Forms::of_rows(count).and(self.kv_b.format);
        prepare_here(self.arithmetic, count, latent_dim, forms, row, mixed_input);
        tokens.clear();
        tokens.extend(0..count as u32);
        ProductPart {
            matrix: self.kv_b,
            rows: first_row..first_row + v_dim,
            x: mixed_input,
            tokens,
            y: out,
            scratch: tiles,
        }
        .run(self.arithmetic);
    }
}
