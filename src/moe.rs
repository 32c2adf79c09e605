//! Feed-forward half of a layer: gated MLPs, the sigmoid router and its experts.
//!
//! Routing of one position: s = sigmoid(x · Wgᵀ); b = s + correction bias ranks only. With
//! groups, a group's score is the sum of its two largest b, and experts outside the `topk_group`
//! best groups are out. The K experts with the largest b are chosen, on ties the lowest index.
//! Their weights are s (not b), divided by their sum + 1e-20 with `norm_topk_prob`, always times
//! `routed_scaling_factor`.
//!
//! Output: Σ over chosen experts in ascending index of weight · down(silu(gate x) · up x), then
//! the shared expert, unweighted. Each distinct expert of a batch is fetched once, and those that
//! are in memory compute while the others are read.

#![forbid(unsafe_code)]

use crate::bail;
use crate::config::Config;
use crate::error::Result;
use crate::experts::ExpertStore;
use crate::kernels::elementwise::{Axpy, Gate, Sigmoid};
use crate::kernels::{Activations, Forms, add, fit};
use crate::ops::{Compute, Product, Stage, rms_norm};
use crate::quant::Encoded;
use crate::safetensors::Directory;
use crate::weights::{Ffn, Input, Layer, Mlp, Moe};
use std::ops::Range;
use std::sync::Arc;

/// Keeps the sum of all-zero weights from dividing by zero, as the model does.
const NORM_EPS: f32 = 1e-20;
/// Rows (of all experts together) that one pass works on, unless a single expert has more: keeps
/// the buffers of a long chunk small, and is far more than a barrier costs.
const PASS_ROWS: usize = 256;

/// Buffers of one batch, kept between layers.
#[derive(Default)]
pub struct Scratch {
    router_logits: Vec<f32>,
    scores: Vec<f32>,
    biased: Vec<f32>,
    routes: Routes,
    gathered: Gathered,
    pass: Pass,
    results: Results,
    guess: Guess,
}

/// Buffers for guessing what layers further on want.
#[derive(Default)]
struct Guess {
    normed: Vec<f32>,
    input: Activations,
    stage: Stage,
    logits: Vec<f32>,
    scores: Vec<f32>,
    biased: Vec<f32>,
    routes: Vec<(u32, f32)>,
    /// Per layer that was looked at: its index, and its experts, those of most rows first.
    likely: [(usize, Vec<u32>); LOOKAHEAD],
}

/// Sparse layers that are looked ahead at. While one computes, the disk has the next to read, and
/// where a guess was poor or all was there, the one behind it.
pub const LOOKAHEAD: usize = 2;

/// Where a pass is, for reading ahead.
#[derive(Clone, Copy)]
pub struct Ahead<'a> {
    /// All layers of the model.
    pub layers: &'a [Layer],
    /// The first that lies ahead.
    pub from: usize,
    /// `[T, D]`, the residual stream as it is now: what the layers in between add to it changes
    /// the choices little.
    pub residual: &'a [f32],
}

impl<'a> Ahead<'a> {
    /// Index, experts and norm `[D]` of the sparse layers to look at.
    fn sparse(&self) -> impl Iterator<Item = (usize, &'a Moe, &'a [f32])> {
        let sparse = |(index, layer): (usize, &'a Layer)| match &layer.mlp {
            Mlp::Sparse(moe) => Some((index, moe, &layer.post_attention_norm[..])),
            Mlp::Dense(_) => None,
        };
        self.layers.iter().enumerate().skip(self.from).filter_map(sparse).take(LOOKAHEAD)
    }
}

/// Reads ahead, behind all that is wanted now. What was expected before and is not any more is
/// forgotten. `all` is 0, 1, …, T−1 and maybe more.
pub fn look_ahead(
    compute: &mut Compute,
    config: &Config,
    (ahead, all): (Ahead<'_>, &[u32]),
    (directory, store): (&Arc<Directory>, &mut ExpertStore),
    scratch: &mut Scratch,
) {
    scratch.guess.run(compute, config, (ahead, all), (directory, store));
}

impl Guess {
    fn run(
        &mut self,
        compute: &mut Compute,
        config: &Config,
        (ahead, all): (Ahead<'_>, &[u32]),
        (directory, store): (&Arc<Directory>, &mut ExpertStore),
    ) {
        self.likely.iter_mut().for_each(|(_, likely)| likely.clear());
        for (i, (layer, moe, norm)) in ahead.sparse().enumerate() {
            self.likely[i].0 = layer;
            self.choose(compute, config, (ahead.residual, all), (moe, norm), i);
        }
        store.forget_expected(|(layer, e)| {
            self.likely.iter().any(|(at, likely)| *at == layer && likely.contains(&(e as u32)))
        });
        for ((layer, moe, _), (_, likely)) in ahead.sparse().zip(&self.likely) {
            store.expect(directory, layer, likely, &moe.experts);
        }
    }

    /// The experts that the router of a layer would choose now, into `likely[at]`. Nothing depends
    /// on them but what is read early.
    fn choose(
        &mut self,
        compute: &mut Compute,
        config: &Config,
        (residual, all): (&[f32], &[u32]),
        (moe, norm): (&Moe, &[f32]),
        at: usize,
    ) {
        let Guess { normed, input, stage, logits, scores, biased, routes, likely } = self;
        let (hidden, experts) = (config.hidden_size, config.n_routed_experts);
        let rows = residual.len() / hidden;
        let normed = fit(normed, residual.len(), 0.0);
        rms_norm(compute, residual, norm, config.rms_norm_eps, normed);
        let row = |t: usize| &normed[t * hidden..(t + 1) * hidden];
        let forms = Forms::of_rows(rows).and(moe.router.source.format);
        compute.prepare(rows, hidden, forms, row, input);
        let tokens = &all[..rows];
        stage.run(compute, 1, |_| Product { matrix: moe.router.encoded(), x: input, tokens });
        let logits = fit(logits, rows * experts, 0.0);
        stage.copy(compute, 0, logits);
        routes.clear();
        // Whatever is wrong here, the layer itself will find and name.
        for logits in logits.chunks_exact_mut(experts).filter(|x| x.iter().all(|x| x.is_finite())) {
            compute.arithmetic.run(Sigmoid { x: logits });
            choose_experts(logits, &moe.correction_bias, config, [scores, biased], routes);
        }
        // Rows that chose an expert, as the weight of its first route.
        routes.sort_unstable_by_key(|(e, _)| *e);
        let likely = &mut likely[at].1;
        for same in routes.chunk_by_mut(|a, b| a.0 == b.0) {
            same[0].1 = same.len() as f32;
            likely.push(same[0].0);
        }
        let rows_of = |e: &u32| routes[routes.partition_point(|route| route.0 < *e)].1;
        likely.sort_unstable_by(|a, b| rows_of(b).total_cmp(&rows_of(a)).then(a.cmp(b)));
    }
}

/// What every row chose.
#[derive(Default)]
struct Routes {
    /// `[T, K]` (expert, weight), ascending expert
    all: Vec<(u32, f32)>,
    /// K
    top_k: usize,
}

impl Routes {
    /// Those of row `t`.
    fn of(&self, t: usize) -> &[(u32, f32)] {
        &self.all[t * self.top_k..(t + 1) * self.top_k]
    }
}

/// Results of some experts, before they are added up.
#[derive(Default)]
struct Results {
    /// `[rows of all these experts, D]`, expert after expert
    rows: Vec<f32>,
    /// Experts that are not computed yet.
    left: Vec<usize>,
    /// Experts that are computed now, and the rows before theirs.
    here: Vec<(usize, usize)>,
}

/// Buffers of one pass over some MLPs, and its results.
#[derive(Default)]
struct Pass {
    gate_up: Stage,
    /// `[rows, I]` silu(gate) · up
    gated: Vec<f32>,
    gated_input: Activations,
    /// Result i is that of MLP i
    down: Stage,
}

/// The rows of a batch by expert.
#[derive(Default)]
struct Gathered {
    /// Experts that some row chose, ascending.
    experts: Vec<u32>,
    /// First of each expert's rows in `tokens`, and the end of the last.
    firsts: Vec<usize>,
    /// Rows of the batch, expert after expert, ascending.
    tokens: Vec<u32>,
    /// Next free place of every expert, while they are filled in.
    next: Vec<usize>,
}

impl Scratch {
    /// Bytes at most, for batches of `rows`.
    pub fn bytes(c: &Config, rows: usize) -> usize {
        let pass = |rows: usize, width: usize| {
            // Results of the stage, and the same in order.
            4 * rows * (3 * width + 2 * c.hidden_size) + Activations::bytes(rows, width)
        };
        let shared = c.moe_intermediate_size * c.n_shared_experts;
        let widest = pass(rows, c.intermediate_size.max(shared));
        let routes = rows * (4 * c.n_routed_experts + 12 * c.top_k);
        let guess = 4 * rows * (c.hidden_size + 2 * c.n_routed_experts + 2 * c.top_k)
            + Activations::bytes(rows, c.hidden_size);
        widest.max(pass(pass_rows(rows), c.moe_intermediate_size)) + routes + guess
    }

    /// Chosen experts of row `t`, `(index, weight)` in ascending index.
    pub fn route(&self, t: usize) -> &[(u32, f32)] {
        self.routes.of(t)
    }
}

/// One gated MLP over some rows: down(silu(gate x) · up x).
#[derive(Clone, Copy)]
struct Gated<'a> {
    gate: Encoded<'a>,
    up: Encoded<'a>,
    down: Encoded<'a>,
    /// What down is multiplied with.
    input: Input,
    /// Rows of the batch that it sees.
    tokens: &'a [u32],
    /// Rows of the pass before its own.
    first: usize,
}

/// Forms that gate and up of an MLP need their input in.
fn input_forms(forms: Forms, ffn: &Ffn) -> Forms {
    forms.and(ffn.gate.source.format).and(ffn.up.source.format)
}

/// Forms that a dense layer needs the hidden state in.
pub fn dense_forms(ffn: &Ffn, rows: usize) -> Forms {
    input_forms(Forms::of_rows(rows), ffn)
}

/// Forms that a sparse layer needs the hidden state in.
pub fn sparse_forms(moe: &Moe, rows: usize) -> Forms {
    let forms = Forms::of_rows(rows).and(moe.router.source.format);
    let forms = moe.shared.iter().fold(forms, input_forms);
    (moe.experts.iter()).fold(forms, |f, e| f.and(e.gate.format).and(e.up.format))
}

/// Sees every row `[I]` that a down is multiplied with: of which, and from which row of the batch.
pub type Show<'a> = dyn FnMut(Input, usize, &[f32]) + 'a;

impl Pass {
    /// Computes `count` gated MLPs of one width over rows of `x`, in two stages. `all` is 0, 1, …,
    /// as long as the rows of the pass.
    fn run<'a>(
        &mut self,
        compute: &mut Compute,
        count: usize,
        mlp: impl Fn(usize) -> Gated<'a> + Sync,
        (x, all): (&'a Activations, &[u32]),
        show: &mut Show<'_>,
    ) {
        let Pass { gate_up, gated, gated_input, down } = self;
        gate_up.run(compute, 2 * count, |i| {
            let Gated { gate, up, tokens, .. } = mlp(i / 2);
            Product { matrix: if i % 2 == 0 { gate } else { up }, x, tokens }
        });
        let last = mlp(count - 1);
        let (rows, width) = (last.first + last.tokens.len(), last.gate.rows);
        let gated = fit(gated, rows * width, 0.0);
        let arithmetic = compute.arithmetic;
        let most = (0..count).map(|i| mlp(i).tokens.len()).max().unwrap_or(0);
        let mut forms = Forms::of_rows(most);
        for i in 0..count {
            let Gated { down, input, tokens, first, .. } = mlp(i);
            forms = forms.and(down.format);
            let gated = &mut gated[first * width..(first + tokens.len()) * width];
            compute.each_row(gated, width, |t, gate, scratch| {
                gate_up.copy_row(2 * i, t, gate);
                let up = fit(&mut scratch.row, width, 0.0);
                gate_up.copy_row(2 * i + 1, t, up);
                arithmetic.run(Gate { gate, up });
            });
            let rows = tokens.iter().zip(gated.chunks_exact(width));
            rows.for_each(|(t, row)| show(input, *t as usize, row));
        }
        let row = |t: usize| &gated[t * width..(t + 1) * width];
        compute.prepare(rows, width, forms, row, gated_input);
        let x = &*gated_input;
        down.run(compute, count, |i| {
            let Gated { down, tokens, first, .. } = mlp(i);
            Product { matrix: down, x, tokens: &all[first..first + tokens.len()] }
        });
    }
}

/// The MLP of a dense layer, or a shared expert, over all rows; its result is the only one of the
/// pass. `x [T, D]`, `all` is 0 … T−1.
fn run_ffn(
    compute: &mut Compute,
    ffn: &Ffn,
    input: Input,
    (x, all): (&Activations, &[u32]),
    pass: &mut Pass,
    show: &mut Show<'_>,
) {
    let [gate, up, down] = [&ffn.gate, &ffn.up, &ffn.down].map(|matrix| matrix.encoded());
    let mlp = |_| Gated { gate, up, down, input, tokens: all, first: 0 };
    pass.run(compute, 1, mlp, (x, all), show);
}

/// The MLP of a dense layer: `x [T, D]` to `out [T, D]`.
pub fn dense(
    compute: &mut Compute,
    ffn: &Ffn,
    x: (&Activations, &[u32]),
    out: &mut [f32],
    scratch: &mut Scratch,
    show: &mut Show<'_>,
) {
    run_ffn(compute, ffn, Input::DenseDown, x, &mut scratch.pass, show);
    scratch.pass.down.copy(compute, 0, out);
}

/// Routes each row of `x [T, D]`, at these positions of their timelines, into `scratch`.
///
/// Errors: a non-finite router logit, with position and expert. (The caller adds the layer.)
pub fn route(
    compute: &mut Compute,
    moe: &Moe,
    config: &Config,
    positions: &[usize],
    (x, all): (&Activations, &[u32]),
    scratch: &mut Scratch,
) -> Result<()> {
    let experts = config.n_routed_experts;
    let Scratch { router_logits, scores, biased, routes, pass, .. } = scratch;
    let stage = &mut pass.gate_up;
    stage.run(compute, 1, |_| Product { matrix: moe.router.encoded(), x, tokens: all });
    let router_logits = fit(router_logits, all.len() * experts, 0.0);
    stage.copy(compute, 0, router_logits);
    routes.top_k = config.top_k;
    let routes = &mut routes.all;
    routes.clear();
    routes.reserve_exact(all.len() * config.top_k);
    for (t, logits) in router_logits.chunks_exact_mut(experts).enumerate() {
        if let Some(e) = logits.iter().position(|logit| !logit.is_finite()) {
            bail!("position {}: the router logit of expert {e} is {}", positions[t], logits[e]);
        }
        compute.arithmetic.run(Sigmoid { x: logits });
        choose_experts(logits, &moe.correction_bias, config, [scores, biased], routes);
    }
    Ok(())
}

/// The routing rule of the module's first paragraph for one position's sigmoid `scores [E]`;
/// appends K (expert, weight) in ascending order.
fn choose_experts(
    scores: &[f32],
    correction_bias: &[f32],
    config: &Config,
    [group_scores, biased]: [&mut Vec<f32>; 2],
    routes: &mut Vec<(u32, f32)>,
) {
    biased.clear();
    biased.extend(scores.iter().zip(correction_bias).map(|(s, b)| s + b));
    if config.n_group > 1 {
        let group_size = config.n_routed_experts / config.n_group;
        group_scores.clear();
        group_scores.extend(biased.chunks_exact(group_size).map(|group| {
            let (best, first) = largest(group, |_| true);
            // The lowest index wins, so what remains is everything else.
            best + if group_size > 1 { largest(group, |i| i != first).0 } else { 0.0 }
        }));
        // A group whose score was taken becomes −∞; those never taken lose their experts.
        for _ in 0..config.topk_group {
            let (_, best) = largest(group_scores, |_| true);
            group_scores[best] = f32::NEG_INFINITY;
        }
        for (group, score) in biased.chunks_exact_mut(group_size).zip(group_scores.iter()) {
            if *score != f32::NEG_INFINITY {
                group.fill(f32::NEG_INFINITY);
            }
        }
    }
    let start = routes.len();
    for _ in 0..config.top_k {
        let (_, e) = largest(biased, |_| true);
        biased[e] = f32::NEG_INFINITY;
        routes.push((e as u32, scores[e]));
    }
    let chosen = &mut routes[start..];
    chosen.sort_unstable_by_key(|(e, _)| *e);
    let mut sum = 1.0;
    if config.norm_topk_prob {
        sum = chosen.iter().map(|(_, score)| *score).sum::<f32>() + NORM_EPS;
    }
    for (_, weight) in chosen {
        *weight = *weight / sum * config.routed_scaling_factor;
    }
}

/// The largest of the finite values whose index is `among`, and the lowest index that has it.
fn largest(values: &[f32], among: impl Fn(usize) -> bool) -> (f32, usize) {
    let mut best = (f32::NEG_INFINITY, 0);
    for (i, value) in values.iter().enumerate() {
        if *value > best.0 && among(i) {
            best = (*value, i);
        }
    }
    best
}

impl Gathered {
    /// Groups the rows of `routes [T, K]` by expert.
    fn gather(&mut self, routes: &Routes, experts: usize) {
        let Routes { all: routes, top_k } = routes;
        let Gathered { experts: chosen, firsts, tokens, next } = self;
        next.clear();
        next.resize(experts, 0);
        routes.iter().for_each(|(e, _)| next[*e as usize] += 1);
        chosen.clear();
        firsts.clear();
        let mut first = 0;
        for (e, next) in next.iter_mut().enumerate().filter(|(_, count)| **count > 0) {
            chosen.push(e as u32);
            firsts.push(first);
            first += std::mem::replace(next, first);
        }
        firsts.push(first);
        fit(tokens, routes.len(), 0);
        for (i, (e, _)) in routes.iter().enumerate() {
            let place = &mut next[*e as usize];
            tokens[*place] = (i / top_k) as u32;
            *place += 1;
        }
    }

    /// Rows of the batch that chose the expert at `index` of `experts`.
    fn tokens(&self, index: usize) -> &[u32] {
        &self.tokens[self.firsts[index]..self.firsts[index + 1]]
    }

    /// How many experts from `index` on one pass takes.
    fn pass_experts(&self, index: usize) -> usize {
        let end = self.firsts[index] + PASS_ROWS;
        let within = |first: &&usize| **first <= end;
        self.firsts[index + 1..].iter().take_while(within).count().max(1)
    }
}

/// Runs the routed experts of the routes in `scratch` and the shared one: `x [T, D]` to
/// `out [T, D]`. `all` is 0, 1, …, long enough for every row of a pass.
#[allow(clippy::too_many_arguments, reason = "the parts of one step, each of its own type")]
pub fn sparse(
    compute: &mut Compute,
    moe: &Moe,
    layer: usize,
    (x, rows, all): (&Activations, usize, &[u32]),
    out: &mut [f32],
    (directory, store): (&Arc<Directory>, &mut ExpertStore),
    (config, ahead): (&Config, Ahead<'_>),
    scratch: &mut Scratch,
    show: &mut Show<'_>,
) -> Result<()> {
    let hidden = out.len() / rows;
    let Scratch { routes, gathered, pass, results, guess, .. } = scratch;
    out.fill(0.0);
    gathered.gather(routes, moe.experts.len());
    let counts = gathered.firsts.windows(2).map(|firsts| firsts[1] - firsts[0]);
    let chosen = gathered.experts.iter().copied().zip(counts);
    store.visit(layer, moe.experts.len(), rows, chosen);
    let mut index = 0;
    while index < gathered.experts.len() {
        let wanted = &gathered.experts[index..];
        let in_pass = gathered.pass_experts(index);
        let count = store.ask(directory, layer, &wanted[..in_pass], &moe.experts);
        assert!(count > 0, "the largest expert fits the budget");
        let mut asked = count;
        if count == in_pass {
            // What comes next is read meanwhile, as far as there is room for it.
            asked += store.ask(directory, layer, &wanted[in_pass..], &moe.experts);
        }
        let turn = Turn { layer, moe, gathered, experts: index..index + count, hidden };
        // Only where the disk is waited for is there something to win by reading ahead.
        if turn.is_complete(store) {
            store.forget_expected(|(expected, _)| expected > layer);
        } else if asked == wanted.len() {
            guess.run(compute, config, (ahead, all), (directory, store));
        }
        turn.run(compute, store, (x, all), pass, results, show)?;
        turn.add_up(compute, routes, results, out);
        store.give_up(layer, &wanted[..count]);
        index += count;
    }
    if let Some(shared) = &moe.shared {
        run_ffn(compute, shared, Input::SharedDown, (x, &all[..rows]), pass, show);
        let down = &pass.down;
        compute.each_row(out, hidden, |t, out, _| {
            down.each_run(0, t, |first, x| add(x, &mut out[first..first + x.len()]));
        });
    }
    Ok(())
}

/// Some consecutive experts of a batch, as many as one pass takes.
struct Turn<'a> {
    layer: usize,
    moe: &'a Moe,
    gathered: &'a Gathered,
    /// Which of `gathered.experts`.
    experts: Range<usize>,
    /// D
    hidden: usize,
}

impl Turn<'_> {
    /// Fills `results [rows of all these experts, D]`: first with the experts that are present,
    /// then with the others as they arrive.
    fn run(
        &self,
        compute: &mut Compute,
        store: &mut ExpertStore,
        (x, all): (&Activations, &[u32]),
        pass: &mut Pass,
        results: &mut Results,
        show: &mut Show<'_>,
    ) -> Result<()> {
        let Turn { layer, moe, gathered, hidden, .. } = *self;
        let Results { rows, left, here } = results;
        let rows = fit(rows, self.first_row(self.experts.end) * hidden, 0.0);
        left.clear();
        left.extend(self.experts.clone());
        while !left.is_empty() {
            store.receive(false)?;
            here.clear();
            let mut before = 0;
            left.retain(|at| {
                let is_present = store.is_present((layer, gathered.experts[*at] as usize));
                if is_present {
                    here.push((*at, before));
                    before += gathered.tokens(*at).len();
                }
                !is_present
            });
            if here.is_empty() {
                store.receive(true)?;
                continue;
            }
            let store = &*store;
            let mlp = |i: usize| {
                let (at, first) = here[i];
                let e = gathered.experts[at] as usize;
                let expert = store.expert((layer, e), &moe.experts[e]);
                let (tokens, input) = (gathered.tokens(at), Input::ExpertDown(e as u32));
                let (gate, up, down) = (expert.gate, expert.up, expert.down);
                Gated { gate, up, down, input, tokens, first }
            };
            pass.run(compute, here.len(), mlp, (x, all), show);
            for (i, (at, _)) in here.iter().enumerate() {
                let rows = &mut rows[self.first_row(*at) * hidden..];
                let rows = &mut rows[..gathered.tokens(*at).len() * hidden];
                compute.each_row(rows, hidden, |t, out, _| pass.down.copy_row(i, t, out));
            }
        }
        Ok(())
    }

    /// Whether all its experts are in memory.
    fn is_complete(&self, store: &ExpertStore) -> bool {
        let experts = &self.gathered.experts[self.experts.clone()];
        experts.iter().all(|e| store.is_present((self.layer, *e as usize)))
    }

    /// Rows of the turn before those of the expert `at`.
    fn first_row(&self, at: usize) -> usize {
        self.gathered.firsts[at] - self.gathered.firsts[self.experts.start]
    }

    /// Adds the results, weighted, to the rows of `out [T, D]` that chose them, in ascending
    /// order of experts, whatever order they arrived in.
    fn add_up(&self, compute: &mut Compute, routes: &Routes, results: &Results, out: &mut [f32]) {
        let (arithmetic, hidden, gathered) = (compute.arithmetic, self.hidden, self.gathered);
        let wanted = &gathered.experts[self.experts.clone()];
        compute.each_row(out, hidden, |t, y, _| {
            for (e, weight) in routes.of(t) {
                let Ok(i) = wanted.binary_search(e) else { continue };
                let at = self.experts.start + i;
                let row = gathered.tokens(at).binary_search(&(t as u32));
                let row = self.first_row(at) + row.expect("an expert has the rows that chose it");
                let x = &results.rows[row * hidden..(row + 1) * hidden];
                arithmetic.run(Axpy { a: *weight, x, y });
            }
        });
    }
}

/// Length of `all` that a batch of `rows` needs: no pass has more rows.
pub fn pass_rows(rows: usize) -> usize {
    rows.max(PASS_ROWS)
}
