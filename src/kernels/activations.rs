//! Activations as the quantized dot product takes them: blocks of 128 sixteen-bit integers.
//!
//! A block's scale is amax / 32767 and its integers are x / scale rounded to the nearest, ties to
//! even: an error of at most 2⁻¹⁶ of the block's largest value. A block whose largest value is
//! below 1e-34 becomes zero, so that 32767 / amax stays finite; a block with a NaN or an infinity
//! gets a non-finite scale, and with it every result that depends on it.
//!
//! Integers are stored in the order in which the weights they meet come out of their bytes, see
//! [`Order`], so that decoding weights takes shifts and masks only.

#![forbid(unsafe_code)]

use super::fit;
use super::scalar::LANES;
use crate::quant::Format;

/// Columns of a block.
pub const BLOCK: usize = 128;
/// Below this the largest value of a block counts as zero.
const AMAX_MIN: f32 = 1e-34;

/// Where a block keeps its columns. Element i of the stored integers belongs to lane
/// (i mod 32) / 2 of 16: a lane is one 32-bit sum of two products per plane of 32 integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they are. Lane l has columns 2l and 2l + 1 of every 32. For weights of whole bytes.
    Natural,
    /// Plane p holds the columns 4w + p. Lane l has columns 8l … 8l + 7, so scales of groups of
    /// a multiple of 8 columns are a vector over lanes. For packed weights: bits 4p … 4p + 3 of
    /// the 16-bit word w are the weights of plane p.
    Planes,
}

impl Order {
    /// Columns in the order of storage.
    pub const fn column(self, index: usize) -> usize {
        match self {
            Order::Natural => index,
            Order::Planes => 4 * (index % 32) + index / 32,
        }
    }

    /// The order that a weight format needs; `None` for formats of floats.
    pub const fn of(format: Format) -> Option<Order> {
        match format {
            Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8Block => None,
            Format::Int8Row => Some(Order::Natural),
            Format::Int4Row
            | Format::Int2Row
            | Format::Int4Group(_)
            | Format::Int3Group64
            | Format::Nvfp4 => Some(Order::Planes),
        }
    }
}

/// 128 activations.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(align(64))]
pub struct Block {
    /// Four planes of 32 integers, see [`Order`].
    pub planes: [[i16; 32]; 4],
    /// Sum of the integers of each lane: what an offset in the weights' codes is multiplied by.
    pub lane_sums: [i32; LANES],
    /// Value of one unit of each lane.
    pub scales: [f32; LANES],
}

/// A block of zeros.
pub const ZERO_BLOCK: Block =
    Block { planes: [[0; 32]; 4], lane_sums: [0; LANES], scales: [0.0; LANES] };

/// Quantizes the row `x` into `blocks`, `x.len() / 128` rounded up of them.
pub fn quantize_row(x: &[f32], order: Order, blocks: &mut [Block]) {
    assert_eq!(blocks.len(), x.len().div_ceil(BLOCK), "blocks of a row");
    let (whole, tail) = x.as_chunks::<BLOCK>();
    for (x, block) in whole.iter().zip(blocks.iter_mut()) {
        quantize_block(x, order, block);
    }
    if !tail.is_empty() {
        let mut padded = [0.0; BLOCK];
        padded[..tail.len()].copy_from_slice(tail);
        quantize_block(&padded, order, &mut blocks[whole.len()]);
    }
}

#[inline(always)]
fn quantize_block(x: &[f32; BLOCK], order: Order, block: &mut Block) {
    let planes: [[f32; 32]; 4] =
        std::array::from_fn(|p| std::array::from_fn(|w| x[order.column(32 * p + w)]));
    // As integers, magnitudes order like the floats and a NaN is above all: none is overlooked.
    let magnitude = |x: f32| x.to_bits() & 0x7fff_ffff;
    let mut inverses = [0.0; LANES];
    for l in 0..LANES {
        let pairs = planes.iter().map(|p| magnitude(p[2 * l]).max(magnitude(p[2 * l + 1])));
        let amax = f32::from_bits(pairs.fold(0, u32::max));
        let is_zero = amax < AMAX_MIN;
        inverses[l] = if is_zero { 0.0 } else { 32767.0 / amax };
        block.scales[l] = if is_zero { 0.0 } else { amax / 32767.0 };
    }
    for (plane, x) in block.planes.iter_mut().zip(&planes) {
        for w in 0..32 {
            // Adding and subtracting 1.5·2²³ rounds to the nearest integer, ties to even; it is
            // exact for magnitudes up to 2²². Only lanes that are not finite are ever clamped.
            let rounded = (x[w] * inverses[w / 2]).clamp(-32767.0, 32767.0) + ROUND;
            plane[w] = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i16;
        }
    }
    for (l, sum) in block.lane_sums.iter_mut().enumerate() {
        *sum = block.planes.iter().map(|p| p[2 * l] as i32 + p[2 * l + 1] as i32).sum();
    }
}

const ROUND: f32 = 12_582_912.0;

/// Which forms of its rows a product's input is needed in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forms {
    /// Blocks in natural order.
    pub natural: bool,
    /// Blocks in planes.
    pub planes: bool,
    /// Plain floats.
    pub floats: bool,
}

impl Forms {
    /// These forms and the one that `format` needs.
    pub fn and(mut self, format: Format) -> Forms {
        match Order::of(format) {
            Some(Order::Natural) => self.natural = true,
            Some(Order::Planes) => self.planes = true,
            None => self.floats = true,
        }
        self
    }
}

/// Rows of activations in the forms that the next products need.
#[derive(Default)]
pub struct Activations {
    /// Features of a row.
    cols: usize,
    /// What was filled.
    forms: Forms,
    /// `[rows, blocks]`
    natural: Vec<Block>,
    /// `[rows, blocks]`
    planes: Vec<Block>,
    /// `[rows, cols / 16 rounded up]`, padded with zeros
    floats: Vec<[f32; LANES]>,
}

impl Activations {
    /// Makes room for `rows` of `cols` in these forms and returns what is to be filled, one slice
    /// per form (empty when it is not needed), each `rows` equal parts.
    pub fn reshape(
        &mut self,
        rows: usize,
        cols: usize,
        forms: Forms,
    ) -> (&mut [Block], &mut [Block], &mut [[f32; LANES]]) {
        let blocks = rows * cols.div_ceil(BLOCK);
        let chunks = rows * cols.div_ceil(LANES);
        (self.cols, self.forms) = (cols, forms);
        (
            fit(&mut self.natural, if forms.natural { blocks } else { 0 }, ZERO_BLOCK),
            fit(&mut self.planes, if forms.planes { blocks } else { 0 }, ZERO_BLOCK),
            fit(&mut self.floats, if forms.floats { chunks } else { 0 }, [0.0; LANES]),
        )
    }

    /// Features of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The blocks of one row. Panics when that order was not filled.
    #[inline(always)]
    pub fn blocks(&self, order: Order, row: usize) -> &[Block] {
        let blocks = self.cols.div_ceil(BLOCK);
        let (all, filled) = match order {
            Order::Natural => (&self.natural, self.forms.natural),
            Order::Planes => (&self.planes, self.forms.planes),
        };
        assert!(filled, "activations are not in {order:?} order");
        &all[row * blocks..(row + 1) * blocks]
    }

    /// One row as floats, padded with zeros. Panics when that form was not filled.
    #[inline(always)]
    pub fn floats(&self, row: usize) -> &[[f32; LANES]] {
        assert!(self.forms.floats, "activations are not floats");
        let chunks = self.cols.div_ceil(LANES);
        &self.floats[row * chunks..(row + 1) * chunks]
    }
}

/// Copies the row `x` into `chunks`, padded with zeros.
pub fn pad_row(x: &[f32], chunks: &mut [[f32; LANES]]) {
    let (whole, tail) = x.as_chunks::<LANES>();
    chunks[..whole.len()].copy_from_slice(whole);
    if !tail.is_empty() {
        let last = &mut chunks[whole.len()];
        last.fill(0.0);
        last[..tail.len()].copy_from_slice(tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_keeps_sixteen_bits_of_its_largest_value() {
        let mut x = [0.0f32; BLOCK];
        (x[0], x[1], x[2], x[127]) = (-2.0, 1.0, 2.0 / 32767.0 * 0.5, 2.0 / 32767.0 * 1.5);
        let mut blocks = [ZERO_BLOCK];
        quantize_row(&x, Order::Natural, &mut blocks);
        let [block] = blocks;
        assert_eq!(block.scale, 2.0 / 32767.0);
        // 16383.5, 0.5 and 1.5 round to even (the products are within an ulp of these ties).
        let got = [block.planes[0][0], block.planes[0][1], block.planes[3][31]];
        assert_eq!(got[0], -32767);
        assert!((got[1] - 16384).abs() <= 1 && (1..=2).contains(&got[2]), "{got:?}");
        assert_eq!(block.lane_sums[0], got[0] as i32 + got[1] as i32);
    }

    #[test]
    fn planes_hold_the_columns_of_their_nibbles() {
        let x: Vec<f32> = (0..BLOCK).map(|i| i as f32).collect();
        let mut blocks = [ZERO_BLOCK];
        quantize_row(&x, Order::Planes, &mut blocks);
        let value = |p: usize, w: usize| blocks[0].planes[p][w] as f32 * blocks[0].scale;
        for (p, w, column) in [(0, 0, 0.0), (1, 0, 1.0), (3, 31, 127.0), (2, 5, 22.0)] {
            assert!((value(p, w) - column).abs() < 0.01, "plane {p}, word {w}");
        }
        // Lane 2 of eight columns: 16 + … + 23.
        assert!((blocks[0].lane_sums[2] as f32 * blocks[0].scale - 156.0).abs() < 0.1);
    }

    #[test]
    fn nothing_that_is_not_finite_is_lost_and_nothing_tiny_becomes_infinite() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 200];
            x[150] = bad;
            let mut blocks = [ZERO_BLOCK; 2];
            quantize_row(&x, Order::Planes, &mut blocks);
            assert!(blocks[0].scale.is_finite() && !blocks[1].scale.is_finite(), "{bad}");
        }
        let mut blocks = [ZERO_BLOCK];
        quantize_row(&[1e-38, -1e-40], Order::Planes, &mut blocks);
        assert_eq!(blocks[0], ZERO_BLOCK);
        quantize_row(&[1e-33, 0.0], Order::Natural, &mut blocks);
        assert_eq!(blocks[0].planes[0][0], 32767);
    }
}
