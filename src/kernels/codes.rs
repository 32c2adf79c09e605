//! How each weight format comes out of its bytes, over vectors: 128 integer codes of a block, or
//! 16 floats at a time; and the scales of groups as lanes.
//!
//! Packed codes come out as bytes, even columns and odd columns, which is what one row of
//! activations meets ([`Order::Bytes`]), and from there as four planes of 16-bit lanes, which is
//! what several rows meet ([`Order::Planes`]). The layouts are those of [`crate::quant`], whose
//! plain decoder is the definition.

#![forbid(unsafe_code)]

use super::activations::{BLOCK, Block, Order};
use super::scalar::LANES;
use super::simd::Simd;
use crate::float::{E4M3, f32_at};
use crate::quant::{Encoded, Format, INT3_BLOCK, NVFP4_BLOCK};
use std::ops::Range;

/// A format of integer weights.
pub trait Code: Copy {
    /// The bytes of 128 weights.
    type Bytes: AsRef<[u8]>;
    /// How many they are.
    const BLOCK_BYTES: usize = size_of::<Self::Bytes>();
    /// The order of activations for several rows of them.
    const ORDER: Order;
    /// The whole blocks of a row.
    fn blocks(row: &[u8]) -> &[Self::Bytes];
    /// The integers of `bytes [BLOCK_BYTES]` in that order.
    fn planes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 4];
    /// The same integers as floats. Lane l of chunk c has, in natural order, column
    /// 32 · (c / 2) + 2l + c mod 2, and column 8l + c otherwise.
    fn floats<S: Simd>(simd: S, bytes: &[u8]) -> [S::F; 8];
    /// Sums of the block's lanes with a single row of activations.
    fn sums<S: Simd>(simd: S, bytes: &[u8], x: &Block) -> S::I;
}

/// Bytes at a constant offset.
#[inline(always)]
fn at<const N: usize>(bytes: &[u8], offset: usize) -> &[u8; N] {
    bytes[offset..].first_chunk().expect("a block has all its bytes")
}

/// Signed bytes.
#[derive(Clone, Copy)]
pub struct Int8;

impl Code for Int8 {
    type Bytes = [u8; 128];
    const ORDER: Order = Order::Natural;

    #[inline(always)]
    fn blocks(row: &[u8]) -> &[Self::Bytes] {
        row.as_chunks().0
    }

    // Written out, as everywhere below: a closure might not be compiled for the instruction set.
    #[inline(always)]
    fn planes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 4] {
        [
            simd.widen_i8(at(bytes, 0)),
            simd.widen_i8(at(bytes, 32)),
            simd.widen_i8(at(bytes, 64)),
            simd.widen_i8(at(bytes, 96)),
        ]
    }

    #[inline(always)]
    fn floats<S: Simd>(simd: S, bytes: &[u8]) -> [S::F; 8] {
        let mut floats = [simd.splat(0.0); 8];
        for (p, plane) in Self::planes(simd, bytes).into_iter().enumerate() {
            floats[2 * p] = simd.to_f(simd.sar(simd.shl(plane, 16), 16));
            floats[2 * p + 1] = simd.to_f(simd.sar(plane, 16));
        }
        floats
    }

    #[inline(always)]
    fn sums<S: Simd>(simd: S, bytes: &[u8], x: &Block) -> S::I {
        let mut sums = simd.splat_i(0);
        for (plane, x) in Self::planes(simd, bytes).into_iter().zip(&x.planes) {
            sums = simd.dot_pairs(sums, plane, simd.load_bytes(x));
        }
        sums
    }
}

/// A format whose codes are below 32 and stored above the weights' integers by an offset.
pub trait Packed: Copy {
    /// The bytes of 128 weights.
    type Bytes: AsRef<[u8]>;
    /// What a code is above its weight's integer; a multiple of 2 and at most 12.
    const OFFSET: i32;
    /// The whole blocks of a row.
    fn blocks(row: &[u8]) -> &[Self::Bytes];
    /// The codes of even columns and of odd columns.
    fn codes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 2];
    /// The weights' integers as floats, see [`Code::floats`].
    #[inline(always)]
    fn floats<S: Simd>(simd: S, bytes: &[u8]) -> [S::F; 8] {
        let mut floats = [simd.splat(0.0); 8];
        for (parity, codes) in Self::codes(simd, bytes).into_iter().enumerate() {
            for i in 0..4 {
                let code = simd.and(simd.shr(codes, 8 * i as u32), simd.splat_i(0x1f));
                floats[2 * i + parity] = simd.to_f(simd.add_i(code, simd.splat_i(-Self::OFFSET)));
            }
        }
        floats
    }
}

impl<P: Packed> Code for P {
    type Bytes = P::Bytes;
    const ORDER: Order = Order::Planes;

    #[inline(always)]
    fn blocks(row: &[u8]) -> &[Self::Bytes] {
        P::blocks(row)
    }

    #[inline(always)]
    fn planes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 4] {
        let [even, odd] = P::codes(simd, bytes);
        let low = simd.splat_i(0x00ff_00ff);
        let offset = simd.splat_i(P::OFFSET | P::OFFSET << 16);
        [
            simd.sub_w(simd.and(even, low), offset),
            simd.sub_w(simd.and(odd, low), offset),
            simd.sub_w(simd.and(simd.shr(even, 8), low), offset),
            simd.sub_w(simd.and(simd.shr(odd, 8), low), offset),
        ]
    }

    #[inline(always)]
    fn floats<S: Simd>(simd: S, bytes: &[u8]) -> [S::F; 8] {
        P::floats(simd, bytes)
    }

    #[inline(always)]
    fn sums<S: Simd>(simd: S, bytes: &[u8], x: &Block) -> S::I {
        let codes = P::codes(simd, bytes);
        let [upper_even, upper_odd, lower_even, lower_odd] = &x.planes;
        let upper = [simd.load_bytes(upper_even), simd.load_bytes(upper_odd)];
        let lower = [simd.load_bytes(lower_even), simd.load_bytes(lower_odd)];
        let offsets = simd.load_i(&x.offsets);
        // −OFFSET · Σx from −8 · Σx, by exact shifts.
        let offsets = match P::OFFSET {
            8 => offsets,
            4 => simd.sar(offsets, 1),
            2 => simd.sar(offsets, 2),
            _ => simd.add_i(offsets, simd.sar(offsets, 1)),
        };
        simd.dot_codes(offsets, codes, upper, lower)
    }
}

/// Nibbles.
#[derive(Clone, Copy)]
pub struct Int4;

impl Packed for Int4 {
    type Bytes = [u8; 64];
    const OFFSET: i32 = 8;
    #[inline(always)]
    fn blocks(row: &[u8]) -> &[Self::Bytes] {
        row.as_chunks().0
    }
    #[inline(always)]
    fn codes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 2] {
        let (bytes, mask) = (simd.load_bytes(at(bytes, 0)), simd.splat_i(0x0f0f_0f0f));
        [simd.and(bytes, mask), simd.and(simd.shr(bytes, 4), mask)]
    }
    #[inline(always)]
    fn floats<S: Simd>(simd: S, bytes: &[u8]) -> [S::F; 8] {
        simd.nibbles(simd.load_bytes(at(bytes, 0)))
    }
}

/// Two-bit fields: lane l gets the eight of word l, a nibble of two in each byte.
#[inline(always)]
fn spread<S: Simd>(simd: S, low: &[u8; 16], high: &[u8; 16]) -> S::I {
    let words = simd.widen_u16(low, high);
    let bytes = simd.and(simd.or(words, simd.shl(words, 8)), simd.splat_i(0x00ff_00ff));
    simd.or(bytes, simd.shl(bytes, 4))
}

/// Two-bit fields.
#[derive(Clone, Copy)]
pub struct Int2;

impl Packed for Int2 {
    type Bytes = [u8; 32];
    const OFFSET: i32 = 2;
    #[inline(always)]
    fn blocks(row: &[u8]) -> &[Self::Bytes] {
        row.as_chunks().0
    }
    #[inline(always)]
    fn codes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 2] {
        let (pairs, mask) = (spread(simd, at(bytes, 0), at(bytes, 16)), simd.splat_i(0x0303_0303));
        [simd.and(pairs, mask), simd.and(simd.shr(pairs, 2), mask)]
    }
}

/// Two runs of 64 three-bit codes: 16 bytes of low bit pairs, 8 of high bits each.
#[derive(Clone, Copy)]
pub struct Int3;

impl Packed for Int3 {
    type Bytes = [u8; 48];
    const OFFSET: i32 = 4;
    #[inline(always)]
    fn blocks(row: &[u8]) -> &[Self::Bytes] {
        row.as_chunks().0
    }
    #[inline(always)]
    fn codes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 2] {
        let (pairs, low) = (spread(simd, at(bytes, 0), at(bytes, 24)), simd.splat_i(0x0303_0303));
        // Bit 2j of the lane's byte goes to bit 2 of byte j for even columns, 2j + 1 for odd.
        let bits = simd.widen_u8(at(bytes, 16), at(bytes, 40));
        let bits = simd.or(bits, simd.shl(bits, 12));
        let bits = simd.or(bits, simd.shl(bits, 6));
        let (even, odd) = (simd.shl(bits, 2), simd.shl(bits, 1));
        let high = simd.splat_i(0x0404_0404);
        [
            simd.or(simd.and(pairs, low), simd.and(even, high)),
            simd.or(simd.and(simd.shr(pairs, 2), low), simd.and(odd, high)),
        ]
    }
}

/// E2M1 nibbles, as integers of half a unit.
#[derive(Clone, Copy)]
pub struct Nvfp4;

/// 2 · value + 12 of each E2M1 code.
const E2M1_CODES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

impl Packed for Nvfp4 {
    type Bytes = [u8; 64];
    const OFFSET: i32 = 12;
    #[inline(always)]
    fn blocks(row: &[u8]) -> &[Self::Bytes] {
        row.as_chunks().0
    }
    #[inline(always)]
    fn codes<S: Simd>(simd: S, bytes: &[u8]) -> [S::I; 2] {
        let [even, odd] = Int4::codes(simd, bytes);
        [simd.lookup(&E2M1_CODES, even), simd.lookup(&E2M1_CODES, odd)]
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
    /// Which of the block's scales each lane has, for blocks b = 0, 1, 2 modulo 3; all the same
    /// for powers of two. 48, 96 and 192 repeat with every third block.
    index: [[u32; LANES]; 3],
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
        let fits = (3 * BLOCK).is_multiple_of(columns.min(BLOCK));
        assert!(columns.is_multiple_of(8) && fits, "groups of {columns}");
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
        })
    }

    /// The scales of `block` of `row`, one per lane.
    #[inline(always)]
    pub fn lanes<S: Simd>(&self, simd: S, row: usize, block: usize) -> S::F {
        let first = row * self.per_row + BLOCK * block / self.columns;
        let table = match self.is_e4m3 {
            false => self.scales[4 * first..].first_chunk(),
            true => None,
        };
        // Behind the row's end come another row's, of which no column is in this block.
        let table = match table {
            Some(table) => table,
            None => &self.table(row, block),
        };
        simd.pick(table, &self.index[block % 3])
    }

    /// The scales of `rows` as pairs, one for each half of a block, if that is what they are and
    /// blocks are whole.
    #[inline(always)]
    pub fn pairs(&self, rows: Range<usize>) -> Option<&'a [[u8; 8]]> {
        if self.is_e4m3 || self.columns != BLOCK / 2 || !self.cols.is_multiple_of(BLOCK) {
            return None;
        }
        Some(self.scales[4 * rows.start * self.per_row..4 * rows.end * self.per_row].as_chunks().0)
    }

    /// Scales from the first of `block` on; 0 behind the row's end, where lanes have no column.
    // Cold, so that sums are not kept in memory for the sake of this call.
    #[cold]
    fn table(&self, row: usize, block: usize) -> [u8; 32] {
        let in_row = BLOCK * block / self.columns;
        let first = row * self.per_row + in_row;
        let mut table = [0; 32];
        let chunks = table.as_chunks_mut::<4>().0.iter_mut();
        for (i, bytes) in chunks.enumerate().take(self.per_row - in_row) {
            let scale = match self.is_e4m3 {
                true => E4M3[self.scales[first + i] as usize] * self.factor,
                false => f32_at(self.scales, first + i),
            };
            *bytes = scale.to_le_bytes();
        }
        table
    }
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
