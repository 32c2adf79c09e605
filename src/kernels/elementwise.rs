//! Kernels whose specification is also their vector form: loops over elements, which the compiler
//! vectorizes for the instruction set they are compiled for, without changing an operation.

#![forbid(unsafe_code)]

use super::Kernel;
use super::activations::{Block, Order, quantize_row};
use super::scalar::{KEYS, LANES, RunningSoftmax, axpy, sigmoid, silu};
use super::simd::Simd;

/// Defines a kernel from its fields and the one body that serves both forms.
macro_rules! elementwise {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)? }
     $body:block) => {
        $(#[$doc])*
        pub struct $name<'a> {
            $($(#[$field_doc])* pub $field: $type),*
        }
        impl $name<'_> {
            #[inline(always)]
            fn body(self) {
                let $name { $($field),* } = self;
                $body
            }
        }
        impl Kernel for $name<'_> {
            type Output = ();
            fn scalar(self) {
                self.body();
            }
            #[inline(always)]
            fn vector<S: Simd>(self, _simd: S) {
                self.body();
            }
        }
    };
}

elementwise! {
    /// [`RunningSoftmax::add`] for each row of `[H, KEYS]`, of which the first `count` are scores;
    /// scales the row's results so far.
    SoftmaxBlock {
        /// Scores in, weights out.
        scores: &'a mut [f32],
        /// Scores of a row.
        count: usize,
        /// `[H]`
        softmaxes: &'a mut [RunningSoftmax],
        /// `[H, chunks]`, what was mixed so far
        mixed: &'a mut [[f32; LANES]],
    }
    {
        let chunks = mixed.len() / softmaxes.len();
        let rows = scores.chunks_mut(KEYS).zip(mixed.chunks_mut(chunks));
        for ((scores, mixed), softmax) in rows.zip(softmaxes) {
            let factor = softmax.add(&mut scores[..count]);
            if factor != 1.0 {
                mixed.as_flattened_mut().iter_mut().for_each(|x| *x *= factor);
            }
        }
    }
}

elementwise! {
    /// gate = silu(gate) · up.
    Gate {
        /// In and out.
        gate: &'a mut [f32],
        /// Of the same length.
        up: &'a [f32],
    }
    {
        assert_eq!(gate.len(), up.len(), "gate and up of different lengths");
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = silu(*gate) * up;
        }
    }
}

elementwise! {
    /// One row as blocks of 16-bit integers.
    Quantize {
        /// Features.
        x: &'a [f32],
        /// Order of storage.
        order: Order,
        /// Out.
        blocks: &'a mut [Block],
    }
    {
        quantize_row(x, order, blocks);
    }
}

elementwise! {
    /// y += a · x.
    Axpy {
        /// Factor.
        a: f32,
        /// Addend.
        x: &'a [f32],
        /// Sum, of the same length.
        y: &'a mut [f32],
    }
    {
        axpy(a, x, y);
    }
}

elementwise! {
    /// out = x · scale · weight, where scale comes from x · x over 16 lanes; see `rms_norm`.
    Norm {
        /// Features.
        x: &'a [f32],
        /// Of the same length.
        weight: &'a [f32],
        /// Added to the mean square.
        eps: f32,
        /// Of the same length.
        out: &'a mut [f32],
    }
    {
        assert_eq!(x.len(), out.len(), "a norm keeps the length");
        let mut lanes = [0.0f32; LANES];
        let (chunks, tail) = x.as_chunks::<LANES>();
        for x in chunks {
            for (lane, x) in lanes.iter_mut().zip(x) {
                *lane = x.mul_add(*x, *lane);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(tail) {
            *lane = x.mul_add(*x, *lane);
        }
        let scale = super::scalar::inverse_root(super::scalar::lane_sum(lanes), x.len(), eps);
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * weight;
        }
    }
}

elementwise! {
    /// x = sigmoid(x).
    Sigmoid {
        /// In and out.
        x: &'a mut [f32],
    }
    {
        for x in x.iter_mut() {
            *x = sigmoid(*x);
        }
    }
}

elementwise! {
    /// scores[i] = Σ_h weights[h] · relu(dots[h, i]), h ascending.
    IndexScores {
        /// `[H, stride]`
        dots: &'a [f32],
        /// Floats from one row to the next.
        stride: usize,
        /// `[H]`, signed
        weights: &'a [f32],
        /// Out.
        scores: &'a mut [f32],
    }
    {
        scores.fill(0.0);
        for (dots, weight) in dots.chunks(stride).zip(weights) {
            for (score, dot) in scores.iter_mut().zip(dots) {
                // NaN for anything that is not finite, so that it reaches the check of the scores.
                let relu = if *dot > 0.0 { *dot } else { 0.0 };
                let relu = if dot.is_finite() { relu } else { f32::NAN };
                *score = weight.mul_add(relu, *score);
            }
        }
    }
}
