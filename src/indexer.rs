//! DSA indexer: which earlier positions a query may attend to.
//!
//! On a "full" layer, with x the normed hidden state and q the normed query latent
//! (T positions, nI heads of width dI):
//!
//! 1. iq = q · Wq_bᵀ `[T, nI, dI]`; ik = LayerNorm(x · Wkᵀ) `[T, dI]`, one key for all heads,
//!    eps 1e-6; both rotated (interleaved) on their *first* rope dimensions; ik is cached.
//! 2. a[h,s] = relu(iq[h] · ik[s] · dI^-½); w[h] = (x · Wweightsᵀ)[h] · nI^-½, signed.
//! 3. score[s] = Σ_h w[h] · a[h,s], heads ascending, for s ≤ t; the `index_topk` best are kept,
//!    on equal scores the lowest position.
//!
//! While t + 1 ≤ index_topk every visible key is kept and no score is computed: attention is
//! exactly dense. "Shared" layers reuse the selection of the nearest full layer before them.

#![forbid(unsafe_code)]

use crate::attention::IndexerRows;
use crate::bail;
use crate::config::Config;
use crate::error::Result;
use crate::kernels::attention::{Keys, Scores};
use crate::kernels::elementwise::IndexScores;
use crate::kernels::{LANES, fit, reserve, tiles};
use crate::kv::Sequence;
use crate::ops::{Compute, Rows, layer_norm_in_place, rotate};
use crate::weights::Indexer;
use std::ops::Range;
use std::time::Instant;

/// Epsilon of the key's LayerNorm; fixed, not the configuration's.
const KEY_NORM_EPS: f32 = 1e-6;
/// Keys that one thread scores at a time: 512 rows of 128 floats stay in the second cache level.
const KEYS: usize = 512;
/// Scores that are held at once: rows of a batch wait for their turn.
const SCORES_MAX: usize = 1 << 20;

/// Kept keys of each row of a batch.
#[derive(Default)]
pub struct Selection {
    rows: Vec<Kept>,
}

/// Kept keys of one row.
#[derive(Default)]
struct Kept {
    /// Every position up to the row's own; `positions` says nothing then.
    all: bool,
    /// Ascending.
    positions: Vec<u32>,
}

impl Selection {
    /// Every row attends to all positions up to its own.
    pub fn keep_all(&mut self, rows: usize) {
        // Rows beyond the batch keep their buffers for the next one.
        if self.rows.len() < rows {
            self.rows.resize_with(rows, Kept::default);
        }
        self.rows[..rows].iter_mut().for_each(|row| row.all = true);
    }

    /// The positions that row `t` attends to, ascending; `None` means all up to its own.
    pub fn kept(&self, t: usize) -> Option<&[u32]> {
        let row = &self.rows[t];
        (!row.all).then_some(&row.positions[..])
    }
}

/// Buffers of one batch, kept between layers.
#[derive(Default)]
pub struct Scratch {
    /// What the projections gave
    pub rows: IndexerRows,
    /// `[T, nI, chunks of dI]`, rotated
    queries: Vec<[f32; LANES]>,
    /// `[rows, keys]` of the rows whose turn it is
    scores: Vec<f32>,
    cuts: Vec<usize>,
    workers: Vec<Worker>,
}

/// Buffers of one thread.
#[derive(Default)]
struct Worker {
    /// `[nI, KEYS]`
    dots: Vec<f32>,
    /// Positions by rank
    order: Vec<u64>,
    tiles: tiles::Scratch,
}

impl Scratch {
    /// Bytes at most, the kept keys included, for batches of `rows` in a context of `ctx_tokens`.
    pub fn bytes(c: &Config, ctx_tokens: usize, rows: usize, threads: usize) -> usize {
        let (heads, dim) = (c.index_n_heads, c.index_head_dim);
        let row = dim + heads + heads * (dim + dim.next_multiple_of(LANES));
        let kept = c.index_topk.min(ctx_tokens);
        let scores = ctx_tokens.max(SCORES_MAX.min(rows * ctx_tokens));
        let worker = 4 * heads * KEYS + 8 * ctx_tokens + tiles::Scratch::bytes(dim);
        4 * (rows * (row + kept) + scores) + threads * worker
    }
}

/// Whether any row of a batch sees more keys than are kept.
pub fn must_choose(config: &Config, batch: &[Sequence<'_>]) -> bool {
    batch.iter().any(|sequence| sequence.first + sequence.tokens.len() > config.index_topk)
}

/// Caches the index keys of the batch, from the projections in `scratch.rows`.
pub fn cache_keys(
    weights: &Indexer,
    config: &Config,
    Rows { layer, angles }: Rows<'_>,
    batch: &mut [Sequence<'_>],
    scratch: &mut Scratch,
) {
    let (dim, rope) = (config.index_head_dim, config.qk_rope_head_dim);
    let mut keys = scratch.rows.keys.chunks_exact_mut(dim).zip(angles);
    for Sequence { tokens, first, kv, .. } in batch {
        for (position, (key, angles)) in (*first..*first + tokens.len()).zip(&mut keys) {
            layer_norm_in_place(key, &weights.k_norm, &weights.k_norm_bias, KEY_NORM_EPS);
            rotate(&mut key[..rope], angles);
            kv.index_key_mut(layer, position)[..dim].copy_from_slice(key);
        }
    }
}

/// Selects the keys of each row of the batch, whose own are cached. The projections are in
/// `scratch.rows`.
///
/// Errors: a non-finite score, with the position. (The caller adds the layer.)
pub fn select(
    compute: &mut Compute,
    config: &Config,
    Rows { layer, angles }: Rows<'_>,
    batch: &[Sequence<'_>],
    scratch: &mut Scratch,
    selection: &mut Selection,
) -> Result<()> {
    let start = Instant::now();
    let (heads, dim, rope) = (config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim);
    let rows = angles.len();
    let Scratch { rows: raw, queries, .. } = scratch;
    selection.keep_all(rows);
    if !must_choose(config, batch) {
        return Ok(());
    }
    let chunks = dim.div_ceil(LANES);
    let queries = fit(queries, rows * heads * chunks, [0.0; LANES]).as_flattened_mut();
    for (i, query) in queries.chunks_exact_mut(chunks * LANES).enumerate() {
        query[..dim].copy_from_slice(&raw.queries[i * dim..(i + 1) * dim]);
        query[dim..].fill(0.0);
        rotate(&mut query[..rope], &angles[i / heads]);
    }
    let head_scale = 1.0 / (heads as f32).sqrt();
    raw.head_weights[..rows * heads].iter_mut().for_each(|weight| *weight *= head_scale);
    for sequence in batch {
        let kept = &mut selection.rows[sequence.rows()];
        select_keys(compute, config, layer, sequence, scratch, kept)?;
    }
    compute.tally.indexer_s += start.elapsed().as_secs_f64();
    Ok(())
}

/// Selects the keys of the rows of one sequence.
fn select_keys(
    compute: &mut Compute,
    config: &Config,
    layer: usize,
    sequence: &Sequence<'_>,
    scratch: &mut Scratch,
    kept: &mut [Kept],
) -> Result<()> {
    let (first, rows) = (sequence.first, sequence.tokens.len());
    let choosing = config.index_topk.saturating_sub(first)..rows;
    let stride = first + rows;
    let turn = (SCORES_MAX / stride).max(1);
    for t in choosing.clone().step_by(turn) {
        let turn = t..(t + turn).min(choosing.end);
        score_keys(compute, config, layer, sequence, turn.clone(), scratch);
        let all_scores = &scratch.scores;
        let scores = |i: usize| &all_scores[i * stride..][..first + turn.start + i + 1];
        for i in 0..turn.len() {
            if let Some(s) = scores(i).iter().position(|score| !score.is_finite()) {
                let (position, score) = (first + turn.start + i, scores(i)[s]);
                bail!("position {position}: the index score of key {s} is {score}");
            }
        }
        let kept = &mut kept[turn.clone()];
        scratch.cuts.clear();
        scratch.cuts.extend(0..=kept.len());
        let (cuts, workers) = (&scratch.cuts, &mut scratch.workers);
        // To choose among n keys takes about as long as 30 n multiply-adds.
        let macs = 30 * kept.len() * stride;
        compute.pool.share(macs, kept, cuts, workers, |i, kept, worker| {
            kept[0].choose(scores(i), config.index_topk, &mut worker.order);
        });
    }
    Ok(())
}

/// score[t, s] = Σ_h w[h] · relu(query[h] · key[s] · dI^-½) for the rows `turn` of a sequence, into
/// `scratch.scores`, whose rows hold all keys that the last row of the sequence sees.
fn score_keys(
    compute: &mut Compute,
    config: &Config,
    layer: usize,
    Sequence { tokens, first, row, kv }: &Sequence<'_>,
    turn: Range<usize>,
    scratch: &mut Scratch,
) {
    let (heads, dim, first_seen) = (config.index_n_heads, config.index_head_dim, first + 1);
    let stride = first + tokens.len();
    let (rows, chunks) = kv.index_keys(layer);
    let keys = Keys { rows, chunks, positions: None };
    let scale = 1.0 / (dim as f32).sqrt();
    let Scratch { rows: raw, queries, scores, cuts, workers } = scratch;
    cuts.clear();
    let parts = stride.div_ceil(KEYS);
    let capacity = kv.capacity_tokens();
    reserve(cuts, capacity.div_ceil(KEYS) + 1);
    reserve(scores, capacity);
    let part_cuts = |row: usize| (0..parts).map(move |part| row * stride + part * KEYS);
    cuts.extend((0..turn.len()).flat_map(part_cuts));
    cuts.push(turn.len() * stride);
    workers.resize_with(compute.pool.threads(), Worker::default);
    // A decode allocates nothing later on, however long its context grows.
    for worker in workers.iter_mut() {
        reserve(&mut worker.dots, heads * KEYS.min(capacity));
        reserve(&mut worker.order, capacity);
        worker.tiles.reserve([0, 0], KEYS.min(capacity));
    }
    let arithmetic = compute.arithmetic;
    let scores = fit(scores, turn.len() * stride, 0.0);
    let macs = turn.len() * stride * heads * dim;
    compute.pool.share(macs, scores, cuts, workers, |i, scores, worker| {
        let (t, first) = (turn.start + i / parts, i % parts * KEYS);
        // Keys behind the row's own position are not there for it.
        let count = scores.len().min((first_seen + t).saturating_sub(first));
        if count == 0 {
            return;
        }
        let row = row + t;
        let queries = &queries[row * heads * chunks..(row + 1) * heads * chunks];
        let keys = Keys { rows: &keys.rows[first * chunks..], ..keys };
        let dots = fit(&mut worker.dots, heads * count, 0.0);
        arithmetic.run(Scores {
            queries,
            keys,
            range: 0..count,
            scale,
            scores: dots,
            stride: count,
            prefetch: false,
            scratch: &mut worker.tiles,
        });
        let weights = &raw.head_weights[row * heads..(row + 1) * heads];
        let scores = &mut scores[..count];
        arithmetic.run(IndexScores { dots, stride: count, weights, scores });
    });
}

impl Kept {
    /// Keeps the `count` positions with the largest scores; among equal scores the lowest
    /// positions. Scores must be finite; −0 equals 0.
    fn choose(&mut self, scores: &[f32], count: usize, order: &mut Vec<u64>) {
        self.all = count >= scores.len();
        if self.all {
            return;
        }
        // Larger scores first, then lower positions, as one integer.
        let rank = |position: usize, score: f32| {
            let bits = (score + 0.0).to_bits();
            let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
            (!ascending as u64) << 32 | position as u64
        };
        let ranks = scores.iter().enumerate().map(|(position, score)| rank(position, *score));
        order.clear();
        order.extend(ranks.clone());
        let (_, last, _) = order.select_nth_unstable(count - 1);
        let last = *last;
        self.positions.clear();
        self.positions.reserve_exact(count);
        self.positions.extend(ranks.filter(|rank| *rank <= last).map(|rank| rank as u32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::kernels::Arithmetic;

    #[test]
    fn equal_scores_keep_the_lowest_positions() {
        let top = |scores: &[f32], count: usize| {
            let mut kept = Kept::default();
            kept.choose(scores, count, &mut Vec::new());
            kept.positions
        };
        assert_eq!(top(&[0.0, 5.0, 0.0, -0.0, 0.0, 7.0], 4), [0, 1, 2, 5]);
        assert_eq!(top(&[-1.0, -1.0, -2.0], 2), [0, 1]);
        assert_eq!(top(&[-3.0, -0.5, 2.0, -1e-40, 1e-40], 3), [2, 3, 4]);
        let mut kept = Kept::default();
        kept.choose(&[1.0], 5, &mut Vec::new());
        assert!(kept.all);
    }

    /// Two heads, one with a negative weight: relu comes before the weight.
    #[test]
    fn scores_apply_relu_per_head_before_the_signed_weight() {
        for isa in Isa::ALL {
            let mut scores = [9.0; 3];
            let dots = [1.0, -1.0, f32::INFINITY, -2.0, 2.0, 0.0];
            let weights = [3.0, -1.0];
            let kernel =
                IndexScores { dots: &dots, stride: 3, weights: &weights, scores: &mut scores };
            Arithmetic::new(isa).run(kernel);
            assert_eq!(scores[..2], [3.0, -2.0]); // 3·1 and −1·2
            assert!(scores[2].is_nan());
        }
    }
}
