//! The specification of the arithmetic, in plain code that runs on any CPU.
//!
//! * [`dot`]: 16 lanes, lane l takes elements l, l+16, … by fused multiply-add in ascending
//!   order; then the lanes are added as a tree of 8, 4, 2, 1.
//! * [`axpy`]: one fused multiply-add per element; a sum of many is their sequence.
//! * [`exp`], [`sigmoid`], [`silu`], [`sin_cos`]: own polynomials with a fixed operation order,
//!   because libm differs between systems.
//! * [`softmax`]: maximum, exponentials and their sum in ascending order, one division each.
//!
//! Nothing here knows about shapes of the model, threads or files.

#![forbid(unsafe_code)]

/// Lanes of a float dot product: one AVX-512 register, or two of AVX2.
pub const LANES: usize = 16;

/// a · b over 16 lanes. Panics when the lengths differ.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "dot of vectors of different lengths");
    let mut lanes = [0.0f32; LANES];
    let (a_blocks, a_tail) = a.as_chunks::<LANES>();
    let (b_blocks, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for l in 0..LANES {
            lanes[l] = a[l].mul_add(b[l], lanes[l]);
        }
    }
    // The tail fills the first lanes; the others are left as they are.
    for (l, (a, b)) in a_tail.iter().zip(b_tail).enumerate() {
        lanes[l] = a.mul_add(*b, lanes[l]);
    }
    lane_sum(lanes)
}

/// The sum of 16 lanes as a tree: l + (l+8), then 4, 2, 1.
fn lane_sum(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
    }
    lanes[0]
}

/// y += a · x, one fused multiply-add per element. Panics when the lengths differ.
pub fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "axpy of vectors of different lengths");
    for (y, x) in y.iter_mut().zip(x) {
        *y = a.mul_add(*x, *y);
    }
}

/// y += x.
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
pub fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 355.0 / 512.0; // ln 2 to 9 bits: n · LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4; // ln 2 − 355/512
    if x > 88.73 {
        return f32::INFINITY;
    }
    if x < -104.0 {
        return 0.0;
    }
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    let mut sum = 1.0f32 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum.mul_add(r, coefficient);
    }
    let half = (n as i32) / 2;
    sum * power_of_two(half) * power_of_two(n as i32 - half)
}

/// 2ⁿ for −126 ≤ n ≤ 127.
fn power_of_two(n: i32) -> f32 {
    debug_assert!((-126..=127).contains(&n));
    f32::from_bits(((n + 127) as u32) << 23)
}

/// 1 / (1 + e⁻ˣ).
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x · sigmoid(x).
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

/// Turns scores into probabilities in place: e^(s − max), divided by their ascending sum.
///
/// An empty slice stays empty. Non-finite scores give non-finite results: callers check.
pub fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0f32;
    for score in scores.iter_mut() {
        *score = exp(*score - max);
        sum += *score;
    }
    for score in scores.iter_mut() {
        *score /= sum;
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

    #[test]
    fn softmax_sums_to_one_and_orders_as_its_scores() {
        let mut scores = [1.0f32, 3.0, -1000.0, 2.0];
        softmax(&mut scores);
        let want = [0.090_030_57, 0.665_240_94, 0.0, 0.244_728_47];
        for (got, want) in scores.iter().zip(want) {
            assert!((got - want).abs() < 1e-6);
        }
    }
}
