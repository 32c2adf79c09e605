//! Operations on rows of activations: stages of matrix products, norms, rotary positions.
//!
//! A batch of T rows is a flat slice `[T, width]`. Every row's result depends on that row alone,
//! in one defined order, so it is the same in any batch, on any number of threads.

#![forbid(unsafe_code)]

use crate::cpu::Isa;
use crate::kernels::activations::{BLOCK, Unfilled, pad_row};
use crate::kernels::elementwise::{Norm, Quantize};
use crate::kernels::tiles::{self, ProductPart};
use crate::kernels::{
    Activations, Arithmetic, Forms, LANES, Order, add, dot, fit, inverse_root, sin_cos,
};
use crate::pool::Pool;
use crate::quant::Encoded;
use std::time::Instant;

/// Weight bytes that one part of a stage streams when there is one row of activations: enough
/// that its start is cheap, small enough that the last parts of two threads end together.
const PART_BYTES: usize = 48 << 10;
/// Rows that take less than this are not worth waking a thread for.
const SERIAL_BYTES: usize = 128 << 10;
/// Weight rows of one part when there are several rows of activations.
const PART_ROWS: usize = 32;

/// The rows of a batch, as one layer sees them.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// Index of the layer.
    pub layer: usize,
    /// Rotary angles of each row, `[T][rope/2]` as (sin, cos).
    pub angles: &'a [Vec<(f32, f32)>],
}

/// Who computes, and how: threads, instruction set, and each thread's buffers.
pub struct Compute {
    /// Threads.
    pub pool: Pool,
    /// Instruction set.
    pub arithmetic: Arithmetic,
    /// One per thread.
    pub scratch: Vec<tiles::Scratch>,
    /// What was computed so far.
    pub tally: Tally,
    cuts: Vec<usize>,
}

/// Work done and the time it took, for benchmarks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Multiply-adds of weights with activations.
    pub macs: u64,
    /// Weights and scales that they read, once per stage.
    pub weight_bytes: u64,
    /// Seconds in stages of products.
    pub product_s: f64,
    /// Seconds from absorbed queries to contexts; its weights count in `macs` and
    /// `weight_bytes`.
    pub attention_s: f64,
    /// Seconds of scoring and choosing keys.
    pub indexer_s: f64,
}

impl Tally {
    /// Counts one matrix times `rows` rows.
    pub fn add(&mut self, matrix: &Encoded<'_>, rows: usize) {
        self.macs += (matrix.rows * matrix.cols * rows) as u64;
        self.weight_bytes += (matrix.weights.len() + matrix.scales.len()) as u64;
    }
}

impl Compute {
    /// With `threads` threads and the instructions of `isa`.
    pub fn new(threads: usize, isa: Isa) -> Compute {
        let pool = Pool::new(threads);
        let scratch = (0..pool.threads()).map(|_| tiles::Scratch::default()).collect();
        let arithmetic = Arithmetic::new(isa);
        Compute { pool, arithmetic, scratch, tally: Tally::default(), cuts: Vec::new() }
    }

    /// Calls `f(t, row t, scratch of the thread)` for each of the rows of `data [T, width]`, on
    /// all threads when it is worth a barrier.
    pub fn each_row<T: Send>(
        &mut self,
        data: &mut [T],
        width: usize,
        f: impl Fn(usize, &mut [T], &mut tiles::Scratch) + Sync,
    ) {
        if size_of_val(data) < SERIAL_BYTES {
            let rows = data.chunks_exact_mut(width.max(1)).enumerate();
            rows.for_each(|(t, row)| f(t, row, &mut self.scratch[0]));
            return;
        }
        self.cuts.clear();
        self.cuts.extend((0..=data.len() / width).map(|t| t * width));
        self.pool.for_each_part(data, &self.cuts, &mut self.scratch, f);
    }

    /// Brings the rows `row(0 … count)` of `cols` features into the forms that products need.
    pub fn prepare<'a>(
        &mut self,
        count: usize,
        cols: usize,
        forms: Forms,
        row: impl Fn(usize) -> &'a [f32] + Sync,
        out: &mut Activations,
    ) {
        let arithmetic = self.arithmetic;
        let Unfilled { natural, packed, packed_order, floats } = out.reshape(count, cols, forms);
        for (order, blocks) in [(Order::Natural, natural), (packed_order, packed)] {
            self.each_row(blocks, cols.div_ceil(BLOCK), |t, blocks, _| {
                arithmetic.run(Quantize { x: row(t), order, blocks });
            });
        }
        self.each_row(floats, cols.div_ceil(LANES), |t, chunks, _| pad_row(row(t), chunks));
    }
}

/// [`Compute::prepare`] on the calling thread, for use within a part of a stage.
pub fn prepare_here<'a>(
    arithmetic: Arithmetic,
    count: usize,
    cols: usize,
    forms: Forms,
    row: impl Fn(usize) -> &'a [f32],
    out: &mut Activations,
) {
    let Unfilled { natural, packed, packed_order, floats } = out.reshape(count, cols, forms);
    for (order, blocks) in [(Order::Natural, natural), (packed_order, packed)] {
        for (t, blocks) in blocks.chunks_exact_mut(cols.div_ceil(BLOCK)).enumerate() {
            arithmetic.run(Quantize { x: row(t), order, blocks });
        }
    }
    for (t, chunks) in floats.chunks_exact_mut(cols.div_ceil(LANES)).enumerate() {
        pad_row(row(t), chunks);
    }
}

/// One matrix times some rows of activations.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    /// `[O, I]`
    pub matrix: Encoded<'a>,
    /// Rows of I features in the form that the matrix needs.
    pub x: &'a Activations,
    /// Which of them.
    pub tokens: &'a [u32],
}

/// Products that are computed together, with one barrier at the end, and their results.
#[derive(Default)]
pub struct Stage {
    /// Results, part after part, each `[tokens, rows of the part]`.
    slab: Vec<f32>,
    cuts: Vec<usize>,
    parts: Vec<Part>,
    /// Index of the first part of every product, and the number of parts.
    firsts: Vec<usize>,
}

/// Rows `first_row…` of one product.
#[derive(Clone, Copy)]
struct Part {
    product: usize,
    first_row: usize,
    rows: usize,
}

impl Stage {
    /// Computes the products `0 … count`: y = x · Wᵀ for each.
    pub fn run<'a>(
        &mut self,
        compute: &mut Compute,
        count: usize,
        product: impl Fn(usize) -> Product<'a> + Sync,
    ) {
        let start = Instant::now();
        let Stage { slab, cuts, parts, firsts } = self;
        parts.clear();
        firsts.clear();
        cuts.clear();
        let (mut floats, mut macs) = (0, 0);
        cuts.push(0);
        for i in 0..count {
            let Product { matrix, x, tokens } = product(i);
            assert_eq!(matrix.cols, x.cols(), "input features");
            compute.tally.add(&matrix, tokens.len());
            macs += matrix.rows * matrix.cols * tokens.len();
            firsts.push(parts.len());
            let rows_most = match tokens.len() {
                1 => (PART_BYTES / matrix.format.row_bytes(matrix.cols)).max(4) / 4 * 4,
                _ => PART_ROWS,
            };
            for first_row in (0..matrix.rows).step_by(rows_most) {
                let rows = rows_most.min(matrix.rows - first_row);
                parts.push(Part { product: i, first_row, rows });
                floats += rows * tokens.len();
                cuts.push(floats);
            }
        }
        firsts.push(parts.len());
        let slab = fit(slab, floats, 0.0);
        let arithmetic = compute.arithmetic;
        compute.pool.share(macs, slab, cuts, &mut compute.scratch, |i, y, scratch| {
            let Part { product: p, first_row, rows } = parts[i];
            let Product { matrix, x, tokens } = product(p);
            let rows = first_row..first_row + rows;
            ProductPart { matrix, rows, x, tokens, y, scratch }.run(arithmetic);
        });
        compute.tally.product_s += start.elapsed().as_secs_f64();
    }

    /// Result `[O]` of product `i` for the `t`-th of its tokens, as runs: `f(first row, values)`.
    pub fn each_run(&self, i: usize, t: usize, mut f: impl FnMut(usize, &[f32])) {
        for part in self.firsts[i]..self.firsts[i + 1] {
            let Part { first_row, rows, .. } = self.parts[part];
            f(first_row, &self.slab[self.cuts[part] + t * rows..][..rows]);
        }
    }

    /// The same result, into `out`.
    pub fn copy_row(&self, i: usize, t: usize, out: &mut [f32]) {
        self.each_run(i, t, |first, run| out[first..first + run.len()].copy_from_slice(run));
    }

    /// Results `[tokens, O]` of product `i`, into `out`.
    pub fn copy(&self, compute: &mut Compute, i: usize, out: &mut [f32]) {
        let last = self.parts[self.firsts[i + 1] - 1];
        let width = last.first_row + last.rows;
        compute.each_row(out, width, |t, row, _| self.copy_row(i, t, row));
    }
}

/// Adds `bias [width]` to every row of `rows [T, width]`, if there is one.
pub fn add_bias(rows: &mut [f32], bias: Option<&Vec<f32>>) {
    if let Some(bias) = bias {
        rows.chunks_exact_mut(bias.len()).for_each(|row| add(bias, row));
    }
}

/// RMSNorm of each row of `x [T, width]` into `out`: x / √(mean(x²) + eps) · weight.
pub fn rms_norm(compute: &mut Compute, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    assert_eq!(x.len(), out.len(), "norm keeps the shape");
    let arithmetic = compute.arithmetic;
    compute.each_row(out, width, |t, out, _| {
        arithmetic.run(Norm { x: &x[t * width..(t + 1) * width], weight, eps, out });
    });
}

/// LayerNorm of one row in place: (x − mean) / √(variance + eps) · weight + bias.
pub fn layer_norm_in_place(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    let mean = x.iter().sum::<f32>() / x.len() as f32;
    x.iter_mut().for_each(|x| *x -= mean);
    let scale = inverse_root(dot(x, x), x.len(), eps);
    for ((x, weight), bias) in x.iter_mut().zip(weight).zip(bias) {
        *x = (*x * scale).mul_add(*weight, *bias);
    }
}

/// Rotary position embedding, interleaved: pair j is (x[2j], x[2j+1]).
///
/// The angles copy the float32 scheme that the model was trained with: at position 200,000 exact
/// angles would differ by 4e-3. e_j = 2j/d and θ^e_j are rounded to `f32` (the power computed in
/// double), inv_j is its `f32` reciprocal, and the angle is the `f32` product with the position.
pub struct Rope {
    inverse_frequencies: Vec<f32>,
}

impl Rope {
    /// Tables for vectors of `dim` (even) and base `theta`.
    pub fn new(dim: usize, theta: f64) -> Rope {
        assert!(dim.is_multiple_of(2), "rotary dimension {dim} is odd");
        let inverse = |j: usize| {
            let exponent = (2 * j) as f32 / dim as f32;
            1.0 / theta.powf(exponent as f64) as f32
        };
        Rope { inverse_frequencies: (0..dim / 2).map(inverse).collect() }
    }

    /// (sin, cos) of every pair at `position`, into `out [dim/2]`.
    pub fn angles(&self, position: usize, out: &mut Vec<(f32, f32)>) {
        out.clear();
        out.extend(self.inverse_frequencies.iter().map(|inv| sin_cos(position as f32 * inv)));
    }
}

/// Rotates the pairs of `x [2 · angles]`, in place and interleaved.
pub fn rotate(x: &mut [f32], angles: &[(f32, f32)]) {
    let (pairs, rest) = x.as_chunks_mut::<2>();
    assert!(pairs.len() == angles.len() && rest.is_empty(), "one angle per pair");
    for (pair, (sin, cos)) in pairs.iter_mut().zip(angles) {
        let [a, b] = *pair;
        *pair = [a * cos - b * sin, b * cos + a * sin];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// θ^(2j/d) is exact here, and sin 3 and cos 3 are known to many digits.
    #[test]
    fn rope_tables_follow_the_float32_scheme() {
        let rope = Rope::new(8, 10000.0);
        assert_eq!(rope.inverse_frequencies, [1.0, 0.1, 0.01, 0.001]);
        let mut angles = Vec::new();
        rope.angles(3, &mut angles);
        let (sin, cos) = (0.141_120_008_059_867_2_f64, -0.989_992_496_600_445_4_f64);
        assert_eq!(angles[0], (sin as f32, cos as f32));
    }

    #[test]
    fn rotation_pairs_neighbours() {
        let mut x = [1.0, 0.0, 0.0, 2.0];
        rotate(&mut x, &[(1.0, 0.0), (0.0, 1.0)]);
        assert_eq!(x, [0.0, 1.0, 0.0, 2.0]);
    }

    #[test]
    fn norms_match_hand_computed_values() {
        let (mut compute, mut out) = (Compute::new(1, Isa::Scalar), [0.0; 2]);
        rms_norm(&mut compute, &[3.0, 4.0], &[1.0, 2.0], 0.0, &mut out);
        assert!((out[0] - 0.848_528_1).abs() < 1e-6 && (out[1] - 2.262_741_7).abs() < 1e-6);
        let mut x = [1.0, 3.0];
        layer_norm_in_place(&mut x, &[2.0, 2.0], &[0.5, 0.5], 0.0);
        assert_eq!(x, [-1.5, 2.5]);
    }
}
