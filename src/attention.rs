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
//!    p = softmax over the kept s ≤ t; context = V · Σ_s p[s] · latent[s], s ascending.
//! 4. out = concat(contexts) · Woᵀ.
//!
//! Absorbing Wkv_b into query and output means that cached rows are used as they are: prefill
//! and decode share this one code path, and the context is never expanded into keys and values.
//! Both latent norms use the configuration's rms_norm_eps, as the serving stacks do.

#![forbid(unsafe_code)]

use crate::config::Config;
use crate::indexer::Selection;
use crate::kernels::{axpy, dot, softmax};
use crate::kv::KvCache;
use crate::ops::{Rows, add_bias, matmul, rms_norm_in_place, rotate};
use crate::quant::Encoded;
use crate::weights::Attention;

/// Buffers of one batch, kept between layers.
#[derive(Default)]
pub struct Scratch {
    /// `[T, q_lora]`, normed; the indexer reads it too
    pub q_latent: Vec<f32>,
    /// `[T, H, nope+rope]`, rotated
    queries: Vec<f32>,
    /// `[T, kv_lora+rope]`
    kv_rows: Vec<f32>,
    /// `[T, H, v]`
    contexts: Vec<f32>,
    /// `[T, kv_lora+rope]` of one head: q̃, then q_rope
    absorbed: Vec<f32>,
    /// `[T, kv_lora]` of one head: Σ p · latent
    mixed: Vec<f32>,
    scores: Vec<f32>,
    row: Vec<f32>,
}

/// Steps 1 and 2: fills `scratch.q_latent` and the queries, and caches the batch's rows.
///
/// `hidden [T, D]` is normed.
pub fn project(
    weights: &Attention,
    config: &Config,
    batch: Rows<'_>,
    hidden: &[f32],
    kv: &mut KvCache,
    scratch: &mut Scratch,
) {
    let (rows, eps) = (batch.angles.len(), config.rms_norm_eps);
    let (nope, latent_dim) = (config.qk_nope_head_dim, config.kv_lora_rank);
    let Scratch { q_latent, queries, kv_rows, row, .. } = scratch;
    q_latent.resize(rows * config.q_lora_rank, 0.0);
    matmul(weights.q_a.encoded(), hidden, q_latent, row);
    add_bias(q_latent, weights.q_a_bias.as_ref());
    for latent in q_latent.chunks_exact_mut(config.q_lora_rank) {
        rms_norm_in_place(latent, &weights.q_a_norm, eps);
    }
    let query_dim = config.num_heads * config.qk_head_dim();
    queries.resize(rows * query_dim, 0.0);
    matmul(weights.q_b.encoded(), q_latent, queries, row);
    for (query, angles) in queries.chunks_exact_mut(query_dim).zip(batch.angles) {
        for head in query.chunks_exact_mut(config.qk_head_dim()) {
            rotate(&mut head[nope..], angles);
        }
    }
    let kv_dim = latent_dim + config.qk_rope_head_dim;
    kv_rows.resize(rows * kv_dim, 0.0);
    matmul(weights.kv_a.encoded(), hidden, kv_rows, row);
    add_bias(kv_rows, weights.kv_a_bias.as_ref());
    for (t, kv_row) in kv_rows.chunks_exact_mut(kv_dim).enumerate() {
        let (latent, key) = kv_row.split_at_mut(latent_dim);
        rms_norm_in_place(latent, &weights.kv_a_norm, eps);
        rotate(key, &batch.angles[t]);
        kv.latent_mut(batch.layer, batch.first + t).copy_from_slice(kv_row);
    }
}

/// Steps 3 and 4: attends over the cache and writes the layer's output into `out [T, D]`.
pub fn attend(
    weights: &Attention,
    config: &Config,
    batch: Rows<'_>,
    selection: &Selection,
    kv: &KvCache,
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let rows = batch.angles.len();
    let context_dim = config.num_heads * config.v_head_dim;
    scratch.contexts.resize(rows * context_dim, 0.0);
    for head in 0..config.num_heads {
        absorb_queries(weights.kv_b.encoded(), config, head, rows, scratch);
        mix_latents(config, batch, selection, kv, scratch);
        expand_values(weights.kv_b.encoded(), config, head, scratch);
    }
    matmul(weights.o.encoded(), &scratch.contexts, out, &mut scratch.row);
    add_bias(out, weights.o_bias.as_ref());
}

/// q̃ = Kᵀ · q_nope of one head for every row, followed by its q_rope, into `scratch.absorbed`.
fn absorb_queries(
    kv_b: Encoded<'_>,
    config: &Config,
    head: usize,
    rows: usize,
    scratch: &mut Scratch,
) {
    let (nope, rope, latent_dim) =
        (config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank);
    let (qk_dim, kv_dim) = (nope + rope, latent_dim + rope);
    let Scratch { queries, absorbed, row, .. } = scratch;
    absorbed.clear();
    absorbed.resize(rows * kv_dim, 0.0);
    row.resize(latent_dim, 0.0);
    let query = |t: usize| (t * config.num_heads + head) * qk_dim;
    for j in 0..nope {
        kv_b.decode_row(head * (nope + config.v_head_dim) + j, row);
        for (t, absorbed) in absorbed.chunks_exact_mut(kv_dim).enumerate() {
            axpy(queries[query(t) + j], row, &mut absorbed[..latent_dim]);
        }
    }
    for (t, absorbed) in absorbed.chunks_exact_mut(kv_dim).enumerate() {
        absorbed[latent_dim..].copy_from_slice(&queries[query(t) + nope..query(t) + qk_dim]);
    }
}

/// Scores, softmax and Σ p · latent over each row's kept keys, into `scratch.mixed`.
fn mix_latents(
    config: &Config,
    batch: Rows<'_>,
    selection: &Selection,
    kv: &KvCache,
    scratch: &mut Scratch,
) {
    let latent_dim = config.kv_lora_rank;
    let kv_dim = latent_dim + config.qk_rope_head_dim;
    let scale = 1.0 / (config.qk_head_dim() as f32).sqrt();
    let Scratch { absorbed, mixed, scores, .. } = scratch;
    mixed.clear();
    mixed.resize(selection.rows.len() * latent_dim, 0.0);
    for (t, kept) in selection.rows.iter().enumerate() {
        let query = &absorbed[t * kv_dim..(t + 1) * kv_dim];
        let mixed = &mut mixed[t * latent_dim..(t + 1) * latent_dim];
        let count = kept.as_ref().map_or(batch.first + t + 1, Vec::len);
        let key = |i: usize| kept.as_ref().map_or(i, |kept| kept[i] as usize);
        scores.clear();
        scores.extend((0..count).map(|i| dot(query, kv.latent(batch.layer, key(i))) * scale));
        softmax(scores);
        for (i, probability) in scores.iter().enumerate() {
            axpy(*probability, &kv.latent(batch.layer, key(i))[..latent_dim], mixed);
        }
    }
}

/// context = V · mixed of one head for every row, into its place in `scratch.contexts`.
fn expand_values(kv_b: Encoded<'_>, config: &Config, head: usize, scratch: &mut Scratch) {
    let (nope, v_dim, latent_dim) =
        (config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank);
    let Scratch { mixed, contexts, row, .. } = scratch;
    row.resize(latent_dim, 0.0);
    for j in 0..v_dim {
        kv_b.decode_row(head * (nope + v_dim) + nope + j, row);
        for (t, mixed) in mixed.chunks_exact(latent_dim).enumerate() {
            contexts[(t * config.num_heads + head) * v_dim + j] = dot(row, mixed);
        }
    }
}
