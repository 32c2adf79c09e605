//! Rows of floats to rows of a container's bytes: the quantizers.
//!
//! All of them are plain and symmetric, in f32: over a row or a group of columns,
//!
//! ```text
//! scale = max(max|w| / top, 1e-8)        top = 127 (int8), 7 (int4), 3 (int3)
//! code  = w / scale, rounded to the nearest integer, ties to even
//! ```
//!
//! |w| ≤ top · scale up to a rounding, so a code never leaves −top…top and needs no clamp. Bits
//! behind a ragged end are those of the reference converter: a zero nibble of int4, code 4 (which
//! is the value zero) of int3. A value that is not finite is refused, because its row would lose
//! all others.
//!
//! The loops are written for the compiler to vectorise: slices, no calls, no branches.

#![forbid(unsafe_code)]

use crate::quant::{Format, INT3_BLOCK, INT3_BLOCK_BYTES};

/// The least scale: rows of zeros divide by it.
const SCALE_MIN: f32 = 1e-8;

/// 1.5 · 2²³: floats of this size are whole numbers, so that adding it rounds to the nearest, ties
/// to even, and leaves the integer in the low bits, in two's complement.
const ROUND: f32 = 12_582_912.0;

/// Encodes the values of one group, given their scale.
type EncodeGroup = fn(&[f32], f32, &mut [u8]);

/// Writes `row` to `weights` and `scales`, whose sizes are those of a row in `format`: plain F32,
/// or int8, int4 or int3 with scales. `false` when a value that needs a scale is not finite.
pub fn encode_row(format: Format, row: &[f32], weights: &mut [u8], scales: &mut [u8]) -> bool {
    let row_bytes = weights.len();
    let (columns, group_bytes, top, encode): (_, _, _, EncodeGroup) = match format {
        Format::F32 => {
            for (bytes, value) in weights.as_chunks_mut::<4>().0.iter_mut().zip(row) {
                *bytes = value.to_le_bytes();
            }
            return true;
        }
        Format::Int8Row => (row.len(), row_bytes, 127.0, int8),
        Format::Int4Row => (row.len(), row_bytes, 7.0, int4),
        Format::Int4Group(columns) => (columns, columns / 2, 7.0, int4),
        Format::Int3Group64 => (INT3_BLOCK, INT3_BLOCK_BYTES, 3.0, int3),
        other => panic!("nothing is encoded as {other}"),
    };
    let groups = row.chunks(columns).zip(weights.chunks_mut(group_bytes));
    let mut is_finite = true;
    for ((group, bytes), scale_bytes) in groups.zip(scales.as_chunks_mut::<4>().0) {
        let largest = largest(group);
        is_finite &= largest.is_finite();
        let scale = (largest / top).max(SCALE_MIN);
        *scale_bytes = scale.to_le_bytes();
        encode(group, scale, bytes);
    }
    is_finite
}

/// max|w|; not finite if any of them is not.
fn largest(group: &[f32]) -> f32 {
    // Without their signs, floats are in the order of their bits, NaN last.
    let bits = |value: &f32| (value.to_bits() & 0x7fff_ffff) as i32;
    f32::from_bits(group.iter().fold(0, |most, value| most.max(bits(value))) as u32)
}

/// The low byte of the code, in two's complement.
#[inline(always)]
fn code(value: f32, scale: f32) -> u8 {
    (value / scale + ROUND).to_bits() as u8
}

fn int8(group: &[f32], scale: f32, out: &mut [u8]) {
    for (byte, value) in out.iter_mut().zip(group) {
        *byte = code(*value, scale);
    }
}

fn int4(group: &[f32], scale: f32, out: &mut [u8]) {
    let nibble = |value: f32| code(value, scale).wrapping_add(8) & 15;
    let (pairs, rest) = group.as_chunks::<2>();
    for (byte, [low, high]) in out.iter_mut().zip(pairs) {
        *byte = nibble(*low) | nibble(*high) << 4;
    }
    if let [last] = rest {
        out[pairs.len()] = nibble(*last);
    }
}

fn int3(group: &[f32], scale: f32, out: &mut [u8]) {
    let mut codes = [4; INT3_BLOCK];
    for (stored, value) in codes.iter_mut().zip(group) {
        *stored = code(*value, scale).wrapping_add(4);
    }
    let (low, high) = out.split_at_mut(INT3_BLOCK / 4);
    for (byte, codes) in low.iter_mut().zip(codes.as_chunks::<4>().0) {
        *byte = (0..4).fold(0, |byte, i| byte | (codes[i] & 3) << (2 * i));
    }
    for (byte, codes) in high.iter_mut().zip(codes.as_chunks::<8>().0) {
        *byte = (0..8).fold(0, |byte, i| byte | (codes[i] >> 2) << i);
    }
}
