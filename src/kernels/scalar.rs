//! The specification of the arithmetic, in plain code that runs on any CPU, one row at a time.
//!
//! * [`dot`], [`quantized_dot`], [`absorb`], [`mix`]: the sums; see the parent module.
//! * [`exp`], [`sigmoid`], [`silu`], [`sin_cos`]: own polynomials with a fixed operation order,
//!   because libm differs between systems.
//! * [`RunningSoftmax`]: blocks of 64 scores; maximum so far, exponentials, their sum over 16
//!   lanes; what came before is scaled when the maximum grows; one division at the end.
//! * [`axpy`], [`add`]: one operation per element; a sum of many is their sequence.
//!
//! Loops over elements are written without branches, so that the compiler can vectorize them for
//! any instruction set: it must not reorder or contract them, so the bits stay.
//! Nothing here knows about shapes of the model, threads or files.

#![forbid(unsafe_code)]

use super::activations::{BLOCK, Block, Order};
use crate::quant::Encoded;

/// Lanes of a float dot product: one AVX-512 register, or two of AVX2.
pub const LANES: usize = 16;

/// a · b over 16 lanes. Panics when the lengths differ.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "dot of vectors of different lengths");
    let mut lanes = [0.0f32; LANES];
    let (a_blocks, a_tail) = a.as_chunks::<LANES>();
    let (b_blocks, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        fma_lanes(a, b, &mut lanes);
    }
    if !a_tail.is_empty() {
        let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
        a[..a_tail.len()].copy_from_slice(a_tail);
        b[..b_tail.len()].copy_from_slice(b_tail);
        fma_lanes(&a, &b, &mut lanes);
    }
    lane_sum(lanes)
}

fn fma_lanes(a: &[f32; LANES], b: &[f32; LANES], lanes: &mut [f32; LANES]) {
    for l in 0..LANES {
        lanes[l] = a[l].mul_add(b[l], lanes[l]);
    }
}

/// The sum of 16 lanes as a tree: l + (l+8), then 4, 2, 1.
pub fn lane_sum(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
    }
    lanes[0]
}

/// Row `row` of `matrix`, a format of integers, times quantized activations.
///
/// `codes` is scratch. Columns behind the end of the row have the code and the scale 0.
pub fn quantized_dot(
    matrix: &Encoded<'_>,
    row: usize,
    x: &[Block],
    order: Order,
    codes: &mut Vec<i16>,
) -> f32 {
    codes.clear();
    codes.resize(x.len() * BLOCK, 0);
    matrix.each_code(row, |col, code| codes[col] = code);
    let mut lanes = [0.0f32; LANES];
    for (b, (x, codes)) in x.iter().zip(codes.chunks_exact(BLOCK)).enumerate() {
        let mut sums = [0i32; LANES];
        for (column, code) in codes.iter().enumerate() {
            sums[order.lane(column)] += *code as i32 * x.integer(order, column) as i32;
        }
        for l in 0..LANES {
            let scale = match matrix.format.row_scaled() {
                true => x.scales[l],
                false => group_scale(matrix, row, b, l) * x.scales[l],
            };
            lanes[l] = (sums[l] as f32).mul_add(scale, lanes[l]);
        }
    }
    let sum = lane_sum(lanes);
    if matrix.format.row_scaled() { sum * matrix.scale(row, 0) } else { sum }
}

/// The scale of the group that lane `lane` of block `block` lies in; 0 behind the row's end.
fn group_scale(matrix: &Encoded<'_>, row: usize, block: usize, lane: usize) -> f32 {
    let col = BLOCK * block + BLOCK / LANES * lane;
    if col < matrix.cols { matrix.scale(row, col) } else { 0.0 }
}

/// q · K for the rows `first_row…` of `matrix` as K `[q.len(), cols]`, into `out [cols]`:
/// out[c] = Σ_j code[j, c] · (q[j] · scale[j, c]), j ascending. For formats of floats the code is
/// the decoded value and the scale 1.
pub fn absorb(
    matrix: &Encoded<'_>,
    first_row: usize,
    q: &[f32],
    row: &mut Vec<f32>,
    out: &mut [f32],
) {
    out.fill(0.0);
    row.resize(matrix.cols, 0.0);
    for (j, q) in q.iter().enumerate() {
        let j = first_row + j;
        if Order::of(matrix.format, 1).is_none() {
            matrix.decode_row(j, row);
            axpy(*q, row, out);
            continue;
        }
        matrix.each_code(j, |c, code| {
            out[c] = (code as f32).mul_add(q * matrix.scale(j, c), out[c]);
        });
    }
}

/// out += Σ_i weights[i] · rows(i), i ascending, one fused multiply-add per element.
pub fn mix<'a>(weights: &[f32], rows: impl Fn(usize) -> &'a [f32], out: &mut [f32]) {
    for (i, weight) in weights.iter().enumerate() {
        axpy(*weight, &rows(i)[..out.len()], out);
    }
}

/// y += a · x, one fused multiply-add per element. Panics when the lengths differ.
#[inline(always)]
pub fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "axpy of vectors of different lengths");
    for (y, x) in y.iter_mut().zip(x) {
        *y = a.mul_add(*x, *y);
    }
}

/// y += x.
#[inline(always)]
pub fn add(x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "sum of vectors of different lengths");
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

/// eˣ in single precision, within 2 ulp; 0 below −104, infinity above 88.73, NaN stays NaN.
///
/// x = n·ln 2 + r with |r| ≤ ½ ln 2, eʳ by its Taylor series to r⁷ (the next term is below
/// 6e-9 of the sum, a tenth of an ulp), then 2ⁿ in two factors so that subnormals come out.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 355.0 / 512.0; // ln 2 to 9 bits: n · LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4; // ln 2 − 355/512
    // Adding 1.5·2²³ leaves the nearest integer in the low bits, ties to even.
    const ROUND: f32 = 12_582_912.0;
    let inside = x.clamp(-105.0, 89.0);
    let shifted = inside * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, inside);
    let r = n.mul_add(-LN2_LOW, r);
    let mut sum = 1.0f32 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum.mul_add(r, coefficient);
    }
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let value = sum * power_of_two(half) * power_of_two(n.wrapping_sub(half));
    let value = if x > 88.73 { f32::INFINITY } else { value };
    if x < -104.0 { 0.0 } else { value }
}

/// 2ⁿ for −126 ≤ n ≤ 127; anything for other n.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// 1 / (1 + e⁻ˣ).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x · sigmoid(x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// (sin x, cos x) of a rotary angle in single precision, computed in double and rounded once.
///
/// x = k·π/2 + r with |r| ≤ π/4, π/2 in two doubles; then Taylor to r¹⁵ and r¹⁶ (the next terms
/// are below 5e-17). Exact enough for angles up to about 10⁹, far above any context length.
pub fn sin_cos(x: f32) -> (f32, f32) {
    const HALF_PI_HIGH: f64 = std::f64::consts::FRAC_PI_2;
    const HALF_PI_LOW: f64 = 6.123_233_995_736_766e-17;
    let x = x as f64;
    let k = (x * std::f64::consts::FRAC_2_PI).round_ties_even();
    let r = k.mul_add(-HALF_PI_HIGH, x);
    let r = k.mul_add(-HALF_PI_LOW, r);
    let square = r * r;
    // Nested Taylor: sin r = r(1 − r²/(2·3)(1 − r²/(4·5)(…))), cos r = 1 − r²/(1·2)(1 − …).
    let (mut sin, mut cos) = (1.0f64, 1.0f64);
    for n in (1..=7).rev() {
        let n = n as f64;
        sin = 1.0 - square / (2.0 * n * (2.0 * n + 1.0)) * sin;
    }
    for n in (1..=8).rev() {
        let n = n as f64;
        cos = 1.0 - square / ((2.0 * n - 1.0) * 2.0 * n) * cos;
    }
    let sin = sin * r;
    let (sin, cos) = match (k as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    };
    (sin as f32, cos as f32)
}

/// 1 / √(sum / n + eps). A sum that overflowed gives NaN, which the checks of router, indexer and
/// logits then report; 1 / √∞ = 0 would hide it.
pub fn inverse_root(square_sum: f32, n: usize, eps: f32) -> f32 {
    if square_sum.is_finite() { 1.0 / (square_sum / n as f32 + eps).sqrt() } else { f32::NAN }
}

/// A softmax whose scores come a block at a time, each block of [`KEYS`] of them but the last.
#[derive(Clone, Copy)]
pub struct RunningSoftmax {
    /// Largest score so far.
    pub max: f32,
    /// Σ e^(score − max) so far.
    pub sum: f32,
}

/// Scores of one block: so many rows of 576 floats stay in the second cache level while several
/// queries see them.
pub const KEYS: usize = 64;

impl RunningSoftmax {
    /// Before the first score.
    pub const EMPTY: RunningSoftmax = RunningSoftmax { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Turns the scores of a block into e^(s − max) in place and adds them up like a dot product:
    /// 16 lanes, then the tree. Returns e^(former max − max), by which the sum was scaled and by
    /// which all that earlier blocks gave must be.
    ///
    /// A NaN or +∞ among the scores makes the sum NaN for good: callers check.
    #[inline(always)]
    pub fn add(&mut self, scores: &mut [f32]) -> f32 {
        let larger = |max: f32, score: f32| if score > max { score } else { max };
        let mut maxima = [f32::NEG_INFINITY; LANES];
        let (chunks, tail) = scores.as_chunks::<LANES>();
        for chunk in chunks {
            maxima = std::array::from_fn(|l| larger(maxima[l], chunk[l]));
        }
        let max = maxima.iter().chain(tail).fold(self.max, |max, score| larger(max, *score));
        let mut sums = [0.0f32; LANES];
        let (chunks, tail) = scores.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for (score, sum) in chunk.iter_mut().zip(&mut sums) {
                *score = exp(*score - max);
                *sum += *score;
            }
        }
        for (score, sum) in tail.iter_mut().zip(&mut sums) {
            *score = exp(*score - max);
            *sum += *score;
        }
        let factor = exp(self.max - max);
        self.sum = self.sum.mul_add(factor, lane_sum(sums));
        self.max = max;
        factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f32::consts::{FRAC_PI_4, PI};

    fn noise(n: usize, mut state: u32) -> Vec<f32> {
        let step = |state: &mut u32| {
            *state ^= *state << 13;
            *state ^= *state >> 17;
            *state ^= *state << 5;
            *state as f32 / u32::MAX as f32 - 0.5
        };
        (0..n).map(|_| step(&mut state)).collect()
    }

    /// Against f64, for every tail length: a wrong lane or a lost tail is off by far more.
    #[test]
    fn dot_is_near_the_exact_sum_for_every_length() {
        for n in 0..100 {
            let (a, b) = (noise(n, 7 + n as u32), noise(n, 1000 + n as u32));
            let exact: f64 = a.iter().zip(&b).map(|(a, b)| *a as f64 * *b as f64).sum();
            assert!((dot(&a, &b) as f64 - exact).abs() < 1e-6, "length {n}");
        }
    }

    /// The order itself: values chosen so that any other order of sums gives another result.
    #[test]
    fn dot_adds_lanes_first_and_then_the_tree() {
        let mut a = vec![0.0f32; 32];
        (a[0], a[8], a[16]) = (1e8, -1e8, 1.0); // lane 0: 1e8 + 1 = 1e8; then lane 8 cancels
        assert_eq!(dot(&a, &[1.0; 32]), 0.0);
        (a[16], a[24]) = (0.0, 1.0); // lane 8: −1e8 + 1 = −1e8; cancels to 0 as well
        assert_eq!(dot(&a, &[1.0; 32]), 0.0);
        (a[24], a[1]) = (0.0, 1.0); // another lane survives
        assert_eq!(dot(&a, &[1.0; 32]), 1.0);
    }

    #[test]
    fn exp_is_within_two_ulp_of_double_precision() {
        let mut x = -103.9f32;
        while x < 88.7 {
            let want = (x as f64).exp();
            let ulp = (want as f32).to_bits().max(1) as f64;
            let ulp = f32::from_bits(ulp as u32 + 1) as f64 - f32::from_bits(ulp as u32) as f64;
            let error = (exp(x) as f64 - want).abs() / ulp;
            assert!(error <= 2.0, "exp({x}): {} against {want}, {error} ulp", exp(x));
            x += 0.0137;
        }
        assert_eq!((exp(0.0), exp(-200.0), exp(89.0)), (1.0, 0.0, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
        assert_eq!((exp(f32::NEG_INFINITY), sigmoid(f32::NEG_INFINITY)), (0.0, 0.0));
    }

    /// Within half an ulp (plus the double's own error) of the C library in double precision.
    #[test]
    fn sin_cos_is_the_rounded_double_result() {
        for angle in [0.0f32, 1e-7, 0.5, FRAC_PI_4, 1.0, 2.0, PI, 4.0, 5.5, 600.25]
            .into_iter()
            .chain((0..2000).map(|i| i as f32 * 523.7))
        {
            let (sin, cos) = sin_cos(angle);
            let (want_sin, want_cos) = (angle as f64).sin_cos();
            assert!((sin as f64 - want_sin).abs() <= 3.0e-8, "sin {angle}");
            assert!((cos as f64 - want_cos).abs() <= 3.0e-8, "cos {angle}");
        }
    }

    /// e¹, e³, e⁻¹⁰⁰⁰ and e² over their sum, however they are cut.
    #[test]
    fn softmax_is_that_of_all_scores_in_blocks_of_any_size() {
        let want = [0.090_030_57, 0.665_240_94, 0.0, 0.244_728_47];
        for block in 1..=4 {
            let (mut softmax, mut weights) = (RunningSoftmax::EMPTY, Vec::new());
            for scores in [1.0f32, 3.0, -1000.0, 2.0].chunks_mut(block) {
                let factor = softmax.add(scores);
                weights.iter_mut().for_each(|weight: &mut f32| *weight *= factor);
                weights.extend_from_slice(scores);
            }
            for (weight, want) in weights.iter().zip(want) {
                assert!((weight / softmax.sum - want).abs() < 1e-6);
            }
            assert_eq!(softmax.max, 3.0);
        }
    }
}
