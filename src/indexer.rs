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

use crate::bail;
use crate::config::Config;
use crate::error::Result;
use crate::kernels::{axpy, dot};
use crate::kv::KvCache;
use crate::ops::{Rows, layer_norm_in_place, matmul, rotate};
use crate::weights::Indexer;

/// Epsilon of the key's LayerNorm; fixed, not the configuration's.
const KEY_NORM_EPS: f32 = 1e-6;

/// Kept keys of each row of a batch.
#[derive(Default)]
pub struct Selection {
    /// Per row the kept positions, ascending; `None` keeps every position up to the row's own.
    pub rows: Vec<Option<Vec<u32>>>,
}

impl Selection {
    /// Every row attends to all positions up to its own.
    pub fn keep_all(&mut self, rows: usize) {
        self.rows.clear();
        self.rows.resize(rows, None);
    }
}

/// Buffers of one batch, kept between layers.
#[derive(Default)]
pub struct Scratch {
    queries: Vec<f32>,
    keys: Vec<f32>,
    head_weights: Vec<f32>,
    scores: Vec<f32>,
    head_scores: Vec<f32>,
    order: Vec<u32>,
    row: Vec<f32>,
}

/// The batch as the indexer sees it.
#[derive(Clone, Copy)]
pub struct Batch<'a> {
    /// Layer, positions and angles.
    pub rows: Rows<'a>,
    /// `[T, D]`, after input_layernorm
    pub hidden: &'a [f32],
    /// `[T, q_lora]`, after q_a_layernorm
    pub q_latent: &'a [f32],
}

/// Caches the index keys of the batch and selects the keys of each of its rows.
///
/// Errors: a non-finite score, with the position. (The caller adds the layer.)
pub fn select(
    weights: &Indexer,
    config: &Config,
    batch: Batch<'_>,
    kv: &mut KvCache,
    scratch: &mut Scratch,
    selection: &mut Selection,
) -> Result<()> {
    let (heads, dim, rope) = (config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim);
    let Rows { layer, first, angles } = batch.rows;
    let rows = angles.len();
    let Scratch { queries, keys, head_weights, row, .. } = scratch;
    keys.resize(rows * dim, 0.0);
    matmul(weights.wk.encoded(), batch.hidden, keys, row);
    for (t, key) in keys.chunks_exact_mut(dim).enumerate() {
        layer_norm_in_place(key, &weights.k_norm, &weights.k_norm_bias, KEY_NORM_EPS);
        rotate(&mut key[..rope], &angles[t]);
        kv.index_key_mut(layer, first + t).copy_from_slice(key);
    }
    selection.keep_all(rows);
    if first + rows <= config.index_topk {
        return Ok(());
    }
    queries.resize(rows * heads * dim, 0.0);
    matmul(weights.wq_b.encoded(), batch.q_latent, queries, row);
    head_weights.resize(rows * heads, 0.0);
    matmul(weights.weights_proj.encoded(), batch.hidden, head_weights, row);
    let head_scale = 1.0 / (heads as f32).sqrt();
    head_weights.iter_mut().for_each(|weight| *weight *= head_scale);
    for (t, angles) in angles.iter().enumerate() {
        let position = first + t;
        if position < config.index_topk {
            continue;
        }
        let queries = &mut scratch.queries[t * heads * dim..(t + 1) * heads * dim];
        for query in queries.chunks_exact_mut(dim) {
            rotate(&mut query[..rope], angles);
        }
        score_keys(
            queries,
            &scratch.head_weights[t * heads..(t + 1) * heads],
            (0..=position).map(|s| kv.index_key(layer, s)),
            &mut scratch.head_scores,
            &mut scratch.scores,
        );
        if let Some(s) = scratch.scores.iter().position(|score| !score.is_finite()) {
            let score = scratch.scores[s];
            bail!("position {position}: the index score of key {s} is {score}");
        }
        selection.rows[t] = {
            let Scratch { scores, order, .. } = scratch;
            Some(top_positions(scores, config.index_topk, order))
        };
    }
    Ok(())
}

/// score[s] = Σ_h w[h] · relu(query[h] · key[s] · dI^-½) into `scores`, heads ascending.
fn score_keys<'a>(
    queries: &[f32],
    head_weights: &[f32],
    keys: impl Iterator<Item = &'a [f32]> + Clone,
    head_scores: &mut Vec<f32>,
    scores: &mut Vec<f32>,
) {
    let dim = queries.len() / head_weights.len();
    let scale = 1.0 / (dim as f32).sqrt();
    scores.clear();
    scores.resize(keys.clone().count(), 0.0);
    for (query, weight) in queries.chunks_exact(dim).zip(head_weights) {
        head_scores.clear();
        head_scores.extend(keys.clone().map(|key| relu(dot(query, key) * scale)));
        axpy(*weight, head_scores, scores);
    }
}

/// max(x, 0), but NaN for anything that is not finite, so that it reaches the check of the scores.
fn relu(x: f32) -> f32 {
    match x {
        x if !x.is_finite() => f32::NAN,
        x if x > 0.0 => x,
        _ => 0.0,
    }
}

/// The `count` positions with the largest scores, ascending by position; among equal scores the
/// lowest positions. Scores must be finite; −0 equals 0.
fn top_positions(scores: &[f32], count: usize, order: &mut Vec<u32>) -> Vec<u32> {
    order.clear();
    order.extend(0..scores.len() as u32);
    let better = |a: &u32, b: &u32| {
        let (left, right) = (scores[*a as usize], scores[*b as usize]);
        right.partial_cmp(&left).expect("scores are finite").then(a.cmp(b))
    };
    if count < order.len() {
        order.select_nth_unstable_by(count, better);
        order.truncate(count);
        order.sort_unstable();
    }
    // Copied at its own size: the buffer has room for every position.
    order.to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_scores_keep_the_lowest_positions() {
        let mut order = Vec::new();
        assert_eq!(top_positions(&[0.0, 5.0, 0.0, -0.0, 0.0, 7.0], 4, &mut order), [0, 1, 2, 5]);
        assert_eq!(top_positions(&[-1.0, -1.0, -2.0], 2, &mut order), [0, 1]);
        assert_eq!(top_positions(&[1.0], 5, &mut order), [0]);
    }

    /// Two heads, one with a negative weight: relu comes before the weight.
    #[test]
    fn scores_apply_relu_per_head_before_the_signed_weight() {
        let keys = [[1.0f32, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]];
        let queries = [2.0, 0.0, 0.0, 0.0, -4.0, 0.0, 0.0, 0.0];
        let (mut head_scores, mut scores) = (Vec::new(), Vec::new());
        let keys = keys.iter().map(|key| &key[..]);
        score_keys(&queries, &[3.0, -1.0], keys, &mut head_scores, &mut scores);
        assert_eq!(scores, [3.0, -2.0]); // 3·(2/2) and −1·(4/2)
    }
}
