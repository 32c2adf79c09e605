//! The canonical arithmetic: what every float operation of the engine means, to the bit.
//!
//! Rust neither reorders nor contracts float operations, so writing an order down defines it.
//! [`scalar`] is that definition, in plain code for one row at a time. The other files compute
//! exactly the same with vectors and in tiles: [`tiles`] once for every instruction set, on top of
//! the few operations that [`simd::Simd`] names and the files `avx2` and `avx512` provide.
//!
//! * **Float dot**, for weights that are floats: 16 lanes, lane l takes elements l, l + 16, … by
//!   fused multiply-add in ascending order, the tail padded with zeros; then the lanes are added
//!   as a tree of 8, 4, 2, 1.
//! * **Quantized dot**, for weights that are integers: activations are 16-bit integers in blocks
//!   of 128, with a scale for every lane ([`activations`]). A block's sum is exact in each of 16
//!   integer lanes, is converted to `f32` once and added to its lane by fused multiply-add with
//!   the lane's scale (times the group's scale, rounded first, when the weights have one per
//!   group), blocks ascending; then the tree; then the row's scale, when there is one per row.
//! * **Transposed product** (absorbing keys into a query): per column, rows ascending, by fused
//!   multiply-add of the weight's code with (activation · scale, rounded first).
//! * **Sums over keys and experts**: one fused multiply-add each, ascending.
//!
//! Speed comes from several results in flight, never from splitting one differently: a product
//! has one order of sums, and `tests/bits.rs` pins what comes of it for every fixture.
//!
//! What [`tiles`] and [`attention`] do must be compiled with the instructions it uses. Functions
//! there are `#[inline(always)]` and take no closures that touch registers: one that is not
//! inlined calls every single instruction, which costs a factor of twenty and no bit.

// Not `forbid`, which the two instruction-set files could not lift.
#![deny(unsafe_code)]
// Loops over lanes and registers of a square read best with their index, and closures might not be
// compiled for the instruction set.
#![allow(clippy::needless_range_loop, clippy::manual_map)]

pub mod activations;
pub mod attention;
#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod codes;
pub mod elementwise;
pub mod limits;
pub mod scalar;
pub mod simd;
pub mod tiles;

pub use activations::{Activations, Block, Forms, Order};
pub use scalar::*;

use crate::cpu::Isa;
use simd::Simd;

/// One unit of work, written twice: as the specification, and over vectors.
pub trait Kernel {
    /// What it returns.
    type Output;
    /// The definition.
    fn scalar(self) -> Self::Output;
    /// The same bits. Implementations are `#[inline(always)]`, so that they are compiled with the
    /// instruction set of `simd`.
    fn vector<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set that this processor has; runs kernels with it.
#[derive(Clone, Copy)]
pub struct Arithmetic(Level);

#[derive(Clone, Copy)]
enum Level {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
}

impl Arithmetic {
    /// For `isa`, or the best level below it that the processor has.
    pub fn new(isa: Isa) -> Arithmetic {
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512
            && let Some(token) = avx512::Avx512::detect()
        {
            return Arithmetic(Level::Avx512(token));
        }
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx2
            && let Some(token) = avx2::Avx2::detect()
        {
            return Arithmetic(Level::Avx2(token));
        }
        let _ = isa;
        Arithmetic(Level::Scalar)
    }

    /// The level in use.
    pub fn isa(self) -> Isa {
        match self.0 {
            Level::Scalar => Isa::Scalar,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Isa::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => Isa::Avx512,
        }
    }

    /// Runs one kernel.
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Level::Scalar => kernel.scalar(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(token) => token.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(token) => token.run(kernel),
        }
    }
}

/// The first `n` elements of a buffer that only ever grows, and then to exactly what is needed.
/// They hold what was there before: callers write all they read.
pub fn fit<T: Copy>(buffer: &mut Vec<T>, n: usize, zero: T) -> &mut [T] {
    if buffer.len() < n {
        buffer.reserve_exact(n - buffer.len());
        buffer.resize(n, zero);
    }
    &mut buffer[..n]
}

/// Makes room for `n` elements in all: [`fit`] to any length up to it allocates nothing. Room that
/// is never used costs no memory, because the system hands out pages when they are written.
pub fn reserve<T>(buffer: &mut Vec<T>, n: usize) {
    buffer.reserve_exact(n.saturating_sub(buffer.len()));
}
