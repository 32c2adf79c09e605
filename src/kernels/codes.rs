//! How each weight format comes out of its bytes, over vectors: 128 integer codes of a block as
//! four planes of 16-bit lanes, or 16 floats at a time; and the scales of groups as lanes.
//!
//! The layouts are those of [`crate::quant`], whose plain decoder is the definition.

#![forbid(unsafe_code)]

use super::activations::{BLOCK, Order};
use super::scalar::LANES;
use super::simd::Simd;
use crate::float::E4M3;
use crate::quant::{Encoded, Format, INT3_BLOCK, NVFP4_BLOCK};

/// A format of integer weights.
pub trait Code: Copy {
    /// Bytes of 128 weights.
    const BLOCK_BYTES: usize;
    /// What a stored code is above the weight's integer.
    const OFFSET: i32;
    /// The order of columns in which the planes come out.
    const ORDER: Order;
    /// The stored codes of `bytes [BLOCK_BYTES]`.
    fn planes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 4];
}

/// Bytes at a constant offset.
#[inline(always)]
fn at<const N: usize>(bytes: &[u8], offset: usize) -> &[u8; N] {
    bytes[offset..].first_chunk().expect("a block has all its bytes")
}

/// Four planes from lanes that hold the bits of plane p at `step · p`.
#[inline(always)]
fn split<S: Simd>(simd: S, lanes: S::I, step: u32, mask: i32) -> [S::I; 4] {
    let mask = simd.splat_i(mask);
    [0, 1, 2, 3].map(|p| simd.and(simd.shr(lanes, step * p), mask))
}

/// Two-bit fields: lane l gets the eight of word l, four in each half.
#[inline(always)]
fn pairs<S: Simd>(simd: S, low: &[u8; 16], high: &[u8; 16]) -> [S::I; 4] {
    let words = simd.widen_u16(low, high);
    split(simd, simd.or(words, simd.shl(words, 8)), 2, 0x0003_0003)
}

/// Signed bytes.
#[derive(Clone, Copy)]
pub struct Int8;

impl Code for Int8 {
    const BLOCK_BYTES: usize = 128;
    const OFFSET: i32 = 0;
    const ORDER: Order = Order::Natural;
    #[inline(always)]
    fn planes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 4] {
        [0, 32, 64, 96].map(|offset| simd.widen_i8(at(bytes, offset)))
    }
}

/// Nibbles.
#[derive(Clone, Copy)]
pub struct Int4;

impl Code for Int4 {
    const BLOCK_BYTES: usize = 64;
    const OFFSET: i32 = 8;
    const ORDER: Order = Order::Planes;
    #[inline(always)]
    fn planes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 4] {
        split(simd, simd.load_bytes(at(bytes, 0)), 4, 0x000f_000f)
    }
}

/// Two-bit fields.
#[derive(Clone, Copy)]
pub struct Int2;

impl Code for Int2 {
    const BLOCK_BYTES: usize = 32;
    const OFFSET: i32 = 2;
    const ORDER: Order = Order::Planes;
    #[inline(always)]
    fn planes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 4] {
        pairs(simd, at(bytes, 0), at(bytes, 16))
    }
}

/// Two runs of 64 three-bit codes: 16 bytes of low bit pairs, 8 of high bits each.
#[derive(Clone, Copy)]
pub struct Int3;

impl Code for Int3 {
    const BLOCK_BYTES: usize = 48;
    const OFFSET: i32 = 4;
    const ORDER: Order = Order::Planes;
    #[inline(always)]
    fn planes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 4] {
        let low = pairs(simd, at(bytes, 0), at(bytes, 24));
        let high = simd.widen_u8(at(bytes, 16), at(bytes, 40));
        let high = split(simd, simd.or(high, simd.shl(high, 12)), 1, 0x0001_0001);
        [0, 1, 2, 3].map(|p| simd.or(low[p], simd.shl(high[p], 2)))
    }
}

/// E2M1 nibbles, as integers of half a unit.
#[derive(Clone, Copy)]
pub struct Nvfp4;

/// 2 · value + 12 of each E2M1 code.
const E2M1_CODES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

impl Code for Nvfp4 {
    const BLOCK_BYTES: usize = 64;
    const OFFSET: i32 = 12;
    const ORDER: Order = Order::Planes;
    #[inline(always)]
    fn planes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 4] {
        // The high byte of each 16-bit lane is made to look up 0.
        let empty = simd.splat_i(0x8000_8000u32 as i32);
        Int4::planes(simd, bytes).map(|plane| simd.lookup(&E2M1_CODES, simd.or(plane, empty)))
    }
}

/// Scales that groups of columns have, as lanes of a block.
pub struct Groups<'a> {
    scales: &'a [u8],
    /// Scales are E4M3 bytes, to be multiplied by `factor`; else `f32`.
    is_e4m3: bool,
    factor: f32,
    /// Columns of a group; a multiple of 8.
    columns: usize,
    /// Columns and groups of a row.
    cols: usize,
    per_row: usize,
    /// Which of the block's scales each lane has, for blocks b = 0, 1, 2 modulo `period`.
    index: [[u32; LANES]; 3],
    period: usize,
}

impl<'a> Groups<'a> {
    /// The groups of `matrix`; `None` for formats with one scale a row.
    pub fn of(matrix: &Encoded<'a>) -> Option<Groups<'a>> {
        let columns = match matrix.format {
            Format::Int4Group(columns) => columns,
            Format::Int3Group64 => INT3_BLOCK,
            Format::Nvfp4 => NVFP4_BLOCK,
            _ => return None,
        };
        assert!(columns % 8 == 0 && 3 * BLOCK % columns.min(BLOCK) == 0, "groups of {columns}");
        let first = |block: usize| BLOCK * block / columns;
        let lane = |block: usize, l: usize| (BLOCK * block + 8 * l) / columns - first(block);
        let index = [0, 1, 2].map(|b| std::array::from_fn(|l| lane(b, l) as u32));
        Some(Groups {
            scales: matrix.scales,
            is_e4m3: matrix.format == Format::Nvfp4,
            factor: matrix.scalar * 0.5,
            columns,
            cols: matrix.cols,
            per_row: matrix.cols.div_ceil(columns),
            index,
            // Powers of two repeat with every block, 48, 96 and 192 with every third.
            period: if columns.is_power_of_two() { 1 } else { 3 },
        })
    }

    /// The scales of `block` of `row`, one per lane.
    #[inline(always)]
    pub fn lanes<S: Simd>(&self, simd: S, row: usize, block: usize) -> S::F {
        let in_row = BLOCK * block / self.columns;
        let first = row * self.per_row + in_row;
        let index = if self.period == 1 { &self.index[0] } else { &self.index[block % 3] };
        if self.is_e4m3 {
            let count = (self.per_row - in_row).min(8);
            let mut table = [0.0; 8];
            for (scale, byte) in table.iter_mut().zip(&self.scales[first..first + count]) {
                *scale = E4M3[*byte as usize] * self.factor;
            }
            return simd.pick(&table, index);
        }
        // Lanes of a ragged end have no column; they must not see the next row's scales.
        let is_ragged = BLOCK * (block + 1) > self.cols;
        let end = if is_ragged { 4 * (row + 1) * self.per_row } else { self.scales.len() };
        let bytes = &self.scales[4 * first..end];
        match bytes.first_chunk::<32>() {
            Some(bytes) => simd.pick(&floats_of(bytes), index),
            None => {
                let mut padded = [0; 32];
                padded[..bytes.len()].copy_from_slice(bytes);
                simd.pick(&floats_of(&padded), index)
            }
        }
    }
}

#[inline(always)]
fn floats_of(bytes: &[u8; 32]) -> [f32; 8] {
    let (words, _) = bytes.as_chunks::<4>();
    std::array::from_fn(|i| f32::from_le_bytes(words[i]))
}

/// A format of float weights.
pub trait FloatCode: Copy {
    /// Bytes of 16 weights.
    const BYTES: usize;
    /// The values of `bytes [BYTES]`; `scale` is that of their block.
    fn values<S: Simd>(simd: S, bytes: &[u8], scale: f32) -> S::F;
}

/// Plain `f32`.
#[derive(Clone, Copy)]
pub struct F32;

impl FloatCode for F32 {
    const BYTES: usize = 64;
    #[inline(always)]
    fn values<S: Simd>(simd: S, bytes: &[u8], _scale: f32) -> S::F {
        simd.cast_f(simd.load_bytes(at(bytes, 0)))
    }
}

/// bfloat16.
#[derive(Clone, Copy)]
pub struct Bf16;

impl FloatCode for Bf16 {
    const BYTES: usize = 32;
    #[inline(always)]
    fn values<S: Simd>(simd: S, bytes: &[u8], _scale: f32) -> S::F {
        simd.cast_f(simd.shl(simd.widen_u16(at(bytes, 0), at(bytes, 16)), 16))
    }
}

/// IEEE half.
#[derive(Clone, Copy)]
pub struct F16;

impl FloatCode for F16 {
    const BYTES: usize = 32;
    #[inline(always)]
    fn values<S: Simd>(simd: S, bytes: &[u8], _scale: f32) -> S::F {
        simd.halves(at(bytes, 0))
    }
}

/// E4M3 with a scale.
#[derive(Clone, Copy)]
pub struct Fp8;

impl FloatCode for Fp8 {
    const BYTES: usize = 16;
    #[inline(always)]
    fn values<S: Simd>(simd: S, bytes: &[u8], scale: f32) -> S::F {
        let codes = simd.widen_u8(at(bytes, 0), at(bytes, 8));
        let sign = simd.shl(simd.and(codes, simd.splat_i(0x80)), 24);
        let magnitude = simd.and(codes, simd.splat_i(0x7f));
        // Exponent and mantissa in the places of an f32 are the value times 2⁻¹²⁰, subnormals
        // included; the one code that means NaN is set to all ones.
        let nan = simd.equal(magnitude, simd.splat_i(0x7f));
        let small = simd.cast_f(simd.or(sign, simd.shl(magnitude, 20)));
        let value = simd.mul(small, simd.splat(f32::from_bits((127 + 120) << 23)));
        let value = simd.cast_f(simd.or(simd.cast_i(value), nan));
        simd.mul(value, simd.splat(scale))
    }
}
