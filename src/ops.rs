//! Operations on rows of activations: products with encoded matrices, norms, rotary positions.
//!
//! A batch of T rows is a flat slice `[T, width]`. Every row's result depends on that row alone,
//! in one defined order, so it is the same in any batch.

#![forbid(unsafe_code)]

use crate::kernels::{add, dot, sin_cos};
use crate::quant::Encoded;

/// Consecutive positions of one timeline, as one layer sees them.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// Index of the layer.
    pub layer: usize,
    /// Position of row 0.
    pub first: usize,
    /// Rotary angles of each row, `[T][rope/2]` as (sin, cos).
    pub angles: &'a [Vec<(f32, f32)>],
}

/// y = x · Wᵀ: `x [T, cols]`, `y [T, rows]`. `row` is scratch of at least `cols` floats.
///
/// Each weight row is decoded once for all T rows of the batch.
pub fn matmul(matrix: Encoded<'_>, x: &[f32], y: &mut [f32], row: &mut Vec<f32>) {
    let (rows, cols) = (matrix.rows, matrix.cols);
    assert_eq!(x.len() / cols, y.len() / rows, "input and output rows");
    assert!(x.len().is_multiple_of(cols) && y.len().is_multiple_of(rows), "whole rows");
    row.resize(cols, 0.0);
    for r in 0..rows {
        matrix.decode_row(r, row);
        for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact_mut(rows)) {
            y[r] = dot(row, x);
        }
    }
}

/// Adds `bias [width]` to every row of `rows [T, width]`, if there is one.
pub fn add_bias(rows: &mut [f32], bias: Option<&Vec<f32>>) {
    if let Some(bias) = bias {
        rows.chunks_exact_mut(bias.len()).for_each(|row| add(bias, row));
    }
}

/// 1 / √(sum / n + eps). A sum that overflowed gives NaN, which the checks of router, indexer and
/// logits then report; 1 / √∞ = 0 would hide it.
fn inverse_root(square_sum: f32, n: usize, eps: f32) -> f32 {
    if square_sum.is_finite() { 1.0 / (square_sum / n as f32 + eps).sqrt() } else { f32::NAN }
}

/// RMSNorm of each row of `x [T, width]` into `out`: x / √(mean(x²) + eps) · weight.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    assert_eq!(x.len(), out.len(), "norm keeps the shape");
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let scale = inverse_root(dot(x, x), width, eps);
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * weight;
        }
    }
}

/// RMSNorm of one row in place.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = inverse_root(dot(x, x), weight.len(), eps);
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = *x * scale * weight;
    }
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
        let mut out = [0.0; 2];
        rms_norm(&[3.0, 4.0], &[1.0, 2.0], 0.0, &mut out);
        assert!((out[0] - 0.848_528_1).abs() < 1e-6 && (out[1] - 2.262_741_7).abs() < 1e-6);
        let mut x = [1.0, 3.0];
        layer_norm_in_place(&mut x, &[2.0, 2.0], &[0.5, 0.5], 0.0);
        assert_eq!(x, [-1.5, 2.5]);
    }
}
