//! Feed-forward half of a layer: gated MLPs, the sigmoid router and its experts.
//!
//! Routing of one position: s = sigmoid(x · Wgᵀ); b = s + correction bias ranks only. With
//! groups, a group's score is the sum of its two largest b, and experts outside the `topk_group`
//! best groups are out. The K experts with the largest b are chosen, on ties the lowest index.
//! Their weights are s (not b), divided by their sum + 1e-20 with `norm_topk_prob`, always times
//! `routed_scaling_factor`.
//!
//! Output: Σ over chosen experts in ascending index of weight · down(silu(gate x) · up x), then
//! the shared expert, unweighted. Each distinct expert of a batch is fetched once.

#![forbid(unsafe_code)]

use crate::bail;
use crate::config::Config;
use crate::error::Result;
use crate::experts::ExpertStore;
use crate::kernels::{add, axpy, sigmoid, silu};
use crate::ops::matmul;
use crate::quant::Encoded;
use crate::safetensors::Directory;
use crate::weights::{Ffn, Moe};

/// Keeps the sum of all-zero weights from dividing by zero, as the model does.
const NORM_EPS: f32 = 1e-20;

/// Experts of one position: `(index, weight)`, ascending index.
pub type Route = Vec<(usize, f32)>;

/// Buffers of one batch, kept between layers.
#[derive(Default)]
pub struct Scratch {
    router_logits: Vec<f32>,
    /// Per row the chosen experts
    pub routes: Vec<Route>,
    gathered: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
    row: Vec<f32>,
}

/// down(silu(gate x) · up x) for `x [T, D]` into `out [T, D]`.
fn gated(
    [gate, up, down]: [Encoded<'_>; 3],
    x: &[f32],
    out: &mut [f32],
    [gate_out, up_out, row]: [&mut Vec<f32>; 3],
) {
    let rows = x.len() / gate.cols;
    gate_out.resize(rows * gate.rows, 0.0);
    up_out.resize(rows * up.rows, 0.0);
    matmul(gate, x, gate_out, row);
    matmul(up, x, up_out, row);
    for (gate, up) in gate_out.iter_mut().zip(up_out.iter()) {
        *gate = silu(*gate) * up;
    }
    matmul(down, gate_out, out, row);
}

/// The MLP of a dense layer, or a shared expert: `x [T, D]` to `out [T, D]`.
pub fn dense(ffn: &Ffn, x: &[f32], out: &mut [f32], scratch: &mut Scratch) {
    let matrices = [ffn.gate.encoded(), ffn.up.encoded(), ffn.down.encoded()];
    gated(matrices, x, out, [&mut scratch.gate, &mut scratch.up, &mut scratch.row]);
}

/// Routes each row of `x [T, D]`, the first at position `first`, into `scratch.routes`.
///
/// Errors: a non-finite router logit, with position and expert. (The caller adds the layer.)
pub fn route(
    moe: &Moe,
    config: &Config,
    first: usize,
    x: &[f32],
    scratch: &mut Scratch,
) -> Result<()> {
    let experts = config.n_routed_experts;
    let rows = x.len() / config.hidden_size;
    let Scratch { router_logits, routes, row, .. } = scratch;
    router_logits.resize(rows * experts, 0.0);
    matmul(moe.router.encoded(), x, router_logits, row);
    routes.clear();
    for (t, logits) in router_logits.chunks_exact(experts).enumerate() {
        if let Some(e) = logits.iter().position(|logit| !logit.is_finite()) {
            bail!("position {}: the router logit of expert {e} is {}", first + t, logits[e]);
        }
        routes.push(choose_experts(logits, &moe.correction_bias, config));
    }
    Ok(())
}

/// The routing rule of the module's first paragraph for one position's logits `[E]`.
fn choose_experts(logits: &[f32], correction_bias: &[f32], config: &Config) -> Route {
    let scores: Vec<f32> = logits.iter().map(|logit| sigmoid(*logit)).collect();
    let biased: Vec<f32> = scores.iter().zip(correction_bias).map(|(s, b)| s + b).collect();
    let group_size = config.n_routed_experts / config.n_group;
    let group_scores: Vec<f32> = biased
        .chunks_exact(group_size)
        .map(|group| {
            let best = best_indices(group, 2);
            best.iter().map(|i| group[*i]).sum()
        })
        .collect();
    let groups = best_indices(&group_scores, config.topk_group);
    let candidates: Vec<usize> = (0..config.n_routed_experts)
        .filter(|e| config.n_group == 1 || groups.contains(&(e / group_size)))
        .collect();
    let candidate_scores: Vec<f32> = candidates.iter().map(|e| biased[*e]).collect();
    let mut chosen: Vec<usize> =
        best_indices(&candidate_scores, config.top_k).into_iter().map(|i| candidates[i]).collect();
    chosen.sort_unstable();
    let mut sum = 1.0;
    if config.norm_topk_prob {
        sum = chosen.iter().map(|e| scores[*e]).sum::<f32>() + NORM_EPS;
    }
    let weight = |e: usize| scores[e] / sum * config.routed_scaling_factor;
    chosen.into_iter().map(|e| (e, weight(e))).collect()
}

/// Indices of the `count` largest values, best first; among equals the lowest index first.
fn best_indices(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    let compare = |a: &usize, b: &usize| {
        values[*b].partial_cmp(&values[*a]).expect("scores are numbers").then(a.cmp(b))
    };
    order.sort_by(compare);
    order.truncate(count);
    order
}

/// Runs the routed experts of `scratch.routes` and the shared one: `x [T, D]` to `out [T, D]`.
pub fn sparse(
    moe: &Moe,
    layer: usize,
    x: &[f32],
    out: &mut [f32],
    directory: &Directory,
    store: &mut ExpertStore,
    scratch: &mut Scratch,
) -> Result<()> {
    out.fill(0.0);
    let hidden = x.len() / scratch.routes.len();
    let mut distinct: Vec<usize> = scratch.routes.iter().flatten().map(|(e, _)| *e).collect();
    distinct.sort_unstable();
    distinct.dedup();
    for e in distinct {
        let expert = store.get(directory, (layer, e), &moe.experts[e])?;
        let weight_of = |route: &Route| route.iter().find(|(id, _)| *id == e).map(|(_, w)| *w);
        let rows: Vec<(usize, f32)> = (scratch.routes.iter().enumerate())
            .filter_map(|(t, route)| weight_of(route).map(|weight| (t, weight)))
            .collect();
        let Scratch { gathered, gate, up, down, row, .. } = scratch;
        gathered.clear();
        for (t, _) in &rows {
            gathered.extend_from_slice(&x[t * hidden..(t + 1) * hidden]);
        }
        down.resize(gathered.len(), 0.0);
        gated([expert.gate, expert.up, expert.down], gathered, down, [gate, up, row]);
        for ((t, weight), down) in rows.iter().zip(down.chunks_exact(hidden)) {
            axpy(*weight, down, &mut out[t * hidden..(t + 1) * hidden]);
        }
    }
    if let Some(shared) = &moe.shared {
        let mut down = std::mem::take(&mut scratch.down);
        down.resize(x.len(), 0.0);
        dense(shared, x, &mut down, scratch);
        add(&down, out);
        scratch.down = down;
    }
    Ok(())
}
