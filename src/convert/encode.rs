//! Rows of floats to rows of a container's bytes: the quantizers.
//!
//! All of them are plain and symmetric, in f32: over a row or a group of columns,
//!
//! ```text
//! scale = max(max|w| / top, 1e-8)        top = 127 (int8), 7 (int4), 3 (int3)
//! code  = w / scale, rounded to the nearest integer, ties to even, in −top − 1…top
//! ```
//!
//! That is [`Scales::AbsMax`], for which no code needs the bounds. It keeps the largest weight and
//! gives all others a grid as coarse as that takes. [`Scales::Search`] tries this scale and 48
//! below it, each 31/32 of the one before, and takes the one with the least Σ(w − code · scale)²,
//! the largest of equals: it cuts off a few weights for the good of the rest. With a calibration
//! the square of each error is multiplied by the importance of its column, which is otherwise 1.
//! The sum has an order of its own, so that it is the same however it is computed: what weight i
//! adds goes to the (i mod 16)th of sixteen sums, and they are added up from first to last.
//!
//! Bits behind a ragged end are those of the reference converter: a zero nibble of int4, code 4
//! (which is the value zero) of int3. A value that is not finite is refused, because its row would
//! lose all others.
//!
//! The loops are written for the compiler to vectorise: slices, no calls, no branches.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::quant::{Format, INT3_BLOCK, INT3_BLOCK_BYTES};

/// The least scale: rows of zeros divide by it.
const SCALE_MIN: f32 = 1e-8;

/// 1.5 · 2²³: floats of this size are whole numbers, so that adding it rounds to the nearest, ties
/// to even, and leaves the integer in the low bits, in two's complement.
const ROUND: f32 = 12_582_912.0;

/// Sums that an error is computed in.
const LANES: usize = 16;

/// A search tries this many scales below the first, each of them `SHRINK` times the one before.
const SHRINKS: usize = 48;
const SHRINK: f32 = 31.0 / 32.0;

/// How scales are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// By the largest weight: the reference.
    AbsMax,
    /// By the least squared error.
    Search,
}

impl Scales {
    /// As the flag and the record of a conversion call it.
    pub const fn name(self) -> &'static str {
        match self {
            Scales::AbsMax => "abs-max",
            Scales::Search => "search",
        }
    }

    /// The rule of that name.
    pub fn parse(text: &str) -> Result<Scales> {
        let found = [Scales::AbsMax, Scales::Search].into_iter().find(|rule| rule.name() == text);
        found.ok_or_else(|| Error::new(format!("expected abs-max or search, found {text:?}")))
    }
}

/// Encodes the values of one group, given their scale.
type EncodeGroup = fn(&[f32], f32, &mut [u8]);

/// Squared error of one group, given the importance of its columns and its scale.
type GroupError = fn(&[f32], &[f32], f32) -> f32;

/// Writes `row` to `weights` and `scales`, whose sizes are those of a row in `format`: plain F32,
/// or int8, int4 or int3 with scales. These are searched for with the `importance` of each column,
/// or are those of the largest weights. `false` when a value that needs a scale is not finite.
pub fn encode_row(
    format: Format,
    importance: Option<&[f32]>,
    row: &[f32],
    weights: &mut [u8],
    scales: &mut [u8],
) -> bool {
    let row_bytes = weights.len();
    let (columns, group_bytes): (usize, usize) = match format {
        Format::F32 => {
            for (bytes, value) in weights.as_chunks_mut::<4>().0.iter_mut().zip(row) {
                *bytes = value.to_le_bytes();
            }
            return true;
        }
        Format::Int4Group(columns) => (columns, columns / 2),
        Format::Int3Group64 => (INT3_BLOCK, INT3_BLOCK_BYTES),
        _ => (row.len(), row_bytes),
    };
    let (top, encode, error): (i8, EncodeGroup, GroupError) = match format {
        Format::Int8Row => (127, int8, error::<127>),
        Format::Int4Row | Format::Int4Group(_) => (7, int4, error::<7>),
        Format::Int3Group64 => (3, int3, error::<3>),
        other => panic!("nothing is encoded as {other}"),
    };
    let groups = row.chunks(columns).zip(weights.chunks_mut(group_bytes));
    let mut is_finite = true;
    for (i, ((group, bytes), scale_bytes)) in groups.zip(scales.as_chunks_mut::<4>().0).enumerate()
    {
        let largest = largest(group);
        is_finite &= largest.is_finite();
        let mut scale = (largest / f32::from(top)).max(SCALE_MIN);
        if let Some(importance) = importance {
            scale = search(group, &importance[i * columns..][..group.len()], scale, error);
        }
        *scale_bytes = scale.to_le_bytes();
        encode(group, scale, bytes);
    }
    is_finite
}

/// The scale of least error among `full`, that of the largest weight, and those below it.
fn search(group: &[f32], importance: &[f32], full: f32, error: GroupError) -> f32 {
    let mut scale = full;
    let mut best = (full, error(group, importance, full));
    for _ in 0..SHRINKS {
        scale *= SHRINK;
        let error = error(group, importance, scale);
        if error < best.1 {
            best = (scale, error);
        }
    }
    best.0
}

/// Σ importance · (w − code · scale)², in the order that the top of this file defines.
fn error<const TOP: i8>(group: &[f32], importance: &[f32], scale: f32) -> f32 {
    let mut sums = [0.0; LANES];
    let add = |((sum, value), importance): ((&mut f32, &f32), &f32)| {
        let error = value - (shifted::<TOP>(*value, scale) - ROUND) * scale;
        *sum += error * error * importance;
    };
    let (chunks, rest) = group.as_chunks::<LANES>();
    let (importances, rest_importance) = importance.as_chunks::<LANES>();
    for (chunk, importances) in chunks.iter().zip(importances) {
        sums.iter_mut().zip(chunk).zip(importances).for_each(add);
    }
    sums.iter_mut().zip(rest).zip(rest_importance).for_each(add);
    sums.iter().sum()
}

/// max|w|; not finite if any of them is not.
fn largest(group: &[f32]) -> f32 {
    // Without their signs, floats are in the order of their bits, NaN last.
    let bits = |value: &f32| (value.to_bits() & 0x7fff_ffff) as i32;
    f32::from_bits(group.iter().fold(0, |most, value| most.max(bits(value))) as u32)
}

/// The code as a float, plus [`ROUND`].
#[inline(always)]
fn shifted<const TOP: i8>(value: f32, scale: f32) -> f32 {
    let top = f32::from(TOP);
    (value / scale).max(-top - 1.0).min(top) + ROUND
}

/// The low byte of the code, in two's complement.
#[inline(always)]
fn code<const TOP: i8>(value: f32, scale: f32) -> u8 {
    shifted::<TOP>(value, scale).to_bits() as u8
}

fn int8(group: &[f32], scale: f32, out: &mut [u8]) {
    for (byte, value) in out.iter_mut().zip(group) {
        *byte = code::<127>(*value, scale);
    }
}

fn int4(group: &[f32], scale: f32, out: &mut [u8]) {
    let nibble = |value: f32| code::<7>(value, scale).wrapping_add(8) & 15;
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
        *stored = code::<3>(*value, scale).wrapping_add(4);
    }
    let (low, high) = out.split_at_mut(INT3_BLOCK / 4);
    for (byte, codes) in low.iter_mut().zip(codes.as_chunks::<4>().0) {
        *byte = (0..4).fold(0, |byte, i| byte | (codes[i] & 3) << (2 * i));
    }
    for (byte, codes) in high.iter_mut().zip(codes.as_chunks::<8>().0) {
        *byte = (0..8).fold(0, |byte, i| byte | (codes[i] >> 2) << i);
    }
}
