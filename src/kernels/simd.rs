//! The operations that an instruction set must provide: 16 lanes of 32 bits, as floats, as
//! integers, or as 32 lanes of 16 bits.
//!
//! An implementor is a token that exists only on processors with the instructions (detection
//! hands it out), which is why all of this is safe to call. Everything here is exact or rounds
//! once, as IEEE 754 and two's complement say, so no implementation can differ from another.

#![forbid(unsafe_code)]

use super::Kernel;
use super::scalar::LANES;

/// One instruction set.
pub trait Simd: Copy {
    /// 16 lanes of `f32`.
    type F: Copy;
    /// 16 lanes of `i32`, or 32 of `i16`, or 64 bytes.
    type I: Copy;
    /// Registers hold many lanes: larger tiles pay.
    const WIDE: bool;

    /// Runs `kernel` compiled for this instruction set.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;
    /// Asks for the cache line at `address`, which need not exist, up to the second cache level:
    /// the first has too few requests in flight for a stream from memory.
    fn prefetch(self, address: *const u8);

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::F;
    /// From memory.
    fn load(self, x: &[f32; LANES]) -> Self::F;
    /// From little-endian memory of any alignment.
    fn load_bytes(self, x: &[u8; 64]) -> Self::I;
    /// To memory.
    fn store(self, x: Self::F, out: &mut [f32; LANES]);
    /// a + b
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b + c, rounded once
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The tree of 8, 4, 2, 1 of four registers.
    fn lane_sums(self, x: [Self::F; 4]) -> [f32; 4];
    /// The first of two little-endian floats in lanes 0 … 7, the second in the others.
    fn splat_pair(self, pair: &[u8; 8]) -> Self::F;
    /// Lane l is float `index[l]` of the eight in `table`, little-endian and of any alignment.
    fn pick(self, table: &[u8; 32], index: &[u32; LANES]) -> Self::F;
    /// 16 IEEE halves as floats.
    fn halves(self, x: &[u8; 32]) -> Self::F;

    /// All 32-bit lanes `x`.
    fn splat_i(self, x: i32) -> Self::I;
    /// 32-bit lanes from memory.
    fn load_i(self, x: &[i32; LANES]) -> Self::I;
    /// 16-bit lanes from memory.
    fn load_w(self, x: &[i16; 32]) -> Self::I;
    /// 16-bit lanes to memory.
    fn store_w(self, x: Self::I, out: &mut [i16; 32]);
    /// Sign-extends 32 bytes to 16-bit lanes.
    fn widen_i8(self, x: &[u8; 32]) -> Self::I;
    /// Zero-extends 8 + 8 words of 16 bits to 32-bit lanes.
    fn widen_u16(self, low: &[u8; 16], high: &[u8; 16]) -> Self::I;
    /// Zero-extends 8 + 8 bytes to 32-bit lanes.
    fn widen_u8(self, low: &[u8; 8], high: &[u8; 8]) -> Self::I;
    /// 32-bit lanes shifted left.
    fn shl(self, x: Self::I, bits: u32) -> Self::I;
    /// 32-bit lanes shifted right, zeros shifted in.
    fn shr(self, x: Self::I, bits: u32) -> Self::I;
    /// 32-bit lanes shifted right, the sign shifted in.
    fn sar(self, x: Self::I, bits: u32) -> Self::I;
    /// Bitwise and.
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise or.
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// 32-bit lanes: all ones where equal.
    fn equal(self, a: Self::I, b: Self::I) -> Self::I;
    /// 16-bit lanes: a − b.
    fn sub_w(self, a: Self::I, b: Self::I) -> Self::I;
    /// 32-bit lanes: a + b.
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// sum + a[2l]·b[2l] + a[2l+1]·b[2l+1] of the 16-bit lanes, in each 32-bit lane l.
    fn dot_pairs(self, sum: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// sum + Σ over four bytes and both registers of code · (256 · upper + lower), in each 32-bit
    /// lane. Codes are below 32, upper bytes are signed and lower bytes unsigned.
    fn dot_codes(
        self,
        sum: Self::I,
        codes: [Self::I; 2],
        upper: [Self::I; 2],
        lower: [Self::I; 2],
    ) -> Self::I;
    /// Each byte of `index` below 16 becomes `table[byte]`; bytes of 128 and above become 0.
    fn lookup(self, table: &[u8; 16], index: Self::I) -> Self::I;
    /// Bits 4c … 4c + 3 of each 32-bit lane, less 8, as float c.
    fn nibbles(self, x: Self::I) -> [Self::F; 8];
    /// 32-bit lanes to floats, rounded to the nearest.
    fn to_f(self, x: Self::I) -> Self::F;
    /// The bits of 32-bit lanes as floats.
    fn cast_f(self, x: Self::I) -> Self::F;
    /// The bits of floats as 32-bit lanes.
    fn cast_i(self, x: Self::F) -> Self::I;
}
