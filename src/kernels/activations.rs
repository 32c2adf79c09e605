//! Activations as the quantized dot product takes them: blocks of 128 sixteen-bit integers.
//!
//! Eight columns of a block share a lane and a scale, amax / 32767; their integers are
//! x · (32767 / amax) rounded to the nearest, ties to even: an error of at most about 2⁻¹⁶ of the
//! largest of the eight, so an outlier costs the other lanes nothing. Eight columns below 1e-34
//! become zero, so that 32767 / amax stays finite; with a NaN or an infinity among them the scale
//! is not finite, and neither is any result that depends on it.
//!
//! Integers are stored in the order in which the weights they meet come out of their bytes, see
//! [`Order`], so that decoding weights takes shifts and masks only.

#![forbid(unsafe_code)]

use super::fit;
use super::scalar::LANES;
use crate::quant::Format;

/// Columns of a block.
pub const BLOCK: usize = 128;
/// Up to so many rows of activations meet each row of weights in turn, as it comes from memory.
/// More are worth decoding a tile of weights first: measured, from about 16 on.
pub const FEW_ROWS: usize = 12;
/// Below this the largest value of a lane counts as zero.
const AMAX_MIN: f32 = 1e-34;

/// Where a block keeps its columns, which decides what each of the 16 lanes sums up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Plane p holds the columns 32p … 32p + 31 as 16-bit integers. Lane l has the columns 2l and
    /// 2l + 1 of each. For weights of whole bytes.
    Natural,
    /// Plane p holds the columns 4w + p as 16-bit integers. Lane l has columns 8l … 8l + 7, so
    /// scales of groups of a multiple of 8 columns are a vector over lanes. For packed weights
    /// and many rows of activations.
    Planes,
    /// The same lanes for few rows of activations, where decoding weights takes most of the time
    /// and bytes take least: the upper bytes (signed) of even and of odd columns, then the lower
    /// bytes (unsigned) of even and of odd columns. Σ w·x = 256 · Σ w·upper + Σ w·lower, exactly.
    Bytes,
}

impl Order {
    /// The order that a weight format needs for so many rows of activations; `None` for formats
    /// of floats.
    pub const fn of(format: Format, rows: usize) -> Option<Order> {
        match format {
            Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8Block => None,
            Format::Int8Row => Some(Order::Natural),
            Format::Int4Row
            | Format::Int2Row
            | Format::Int4Group(_)
            | Format::Int3Group64
            | Format::Nvfp4 => Some(if rows <= FEW_ROWS { Order::Bytes } else { Order::Planes }),
        }
    }

    /// The lane that sums up a column of its block.
    pub const fn lane(self, column: usize) -> usize {
        match self {
            Order::Natural => column % 32 / 2,
            Order::Planes | Order::Bytes => column / 8,
        }
    }
}

/// 128 activations.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(align(64))]
pub struct Block {
    /// The integers, see [`Order`].
    pub planes: [[u8; 64]; 4],
    /// −8 times the sum of the integers of each lane: what takes an offset of 8 in the weights'
    /// codes out of a sum. Not used in natural order.
    pub offsets: [i32; LANES],
    /// Value of one unit of each lane.
    pub scales: [f32; LANES],
}

/// A block of zeros.
pub const ZERO_BLOCK: Block =
    Block { planes: [[0; 64]; 4], offsets: [0; LANES], scales: [0.0; LANES] };

impl Block {
    /// The integer of one column.
    pub fn integer(&self, order: Order, column: usize) -> i16 {
        let word =
            |plane: &[u8; 64], w: usize| i16::from_le_bytes([plane[2 * w], plane[2 * w + 1]]);
        match order {
            Order::Natural => word(&self.planes[column / 32], column % 32),
            Order::Planes => word(&self.planes[column % 4], column / 4),
            Order::Bytes => {
                let (parity, i) = (column % 2, column / 2);
                i16::from_le_bytes([self.planes[2 + parity][i], self.planes[parity][i]])
            }
        }
    }
}

/// Quantizes the row `x` into `blocks`, `x.len() / 128` rounded up of them.
#[inline(always)]
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

// Every loop goes through columns in order, whatever the order of storage: loops that jump become
// gathers, which take several times as long.
#[inline(always)]
fn quantize_block(x: &[f32; BLOCK], order: Order, block: &mut Block) {
    // As integers, magnitudes order like the floats and a NaN is above all: none is overlooked.
    let magnitude = |x: f32| x.to_bits() & 0x7fff_ffff;
    let mut amax = [0; LANES];
    if order == Order::Natural {
        for plane in x.as_chunks::<32>().0 {
            for (amax, [a, b]) in amax.iter_mut().zip(plane.as_chunks::<2>().0) {
                *amax = magnitude(*a).max(magnitude(*b)).max(*amax);
            }
        }
    } else {
        for (amax, x) in amax.iter_mut().zip(x.as_chunks::<8>().0) {
            *amax = x.iter().fold(0, |amax, x| magnitude(*x).max(amax));
        }
    }
    let mut inverses = [0.0; LANES];
    for l in 0..LANES {
        // Divided whether it is needed or not: a division that may not happen is done alone.
        let amax = f32::from_bits(amax[l]);
        let (inverse, scale) = (32767.0 / amax, amax / 32767.0);
        inverses[l] = if amax < AMAX_MIN { 0.0 } else { inverse };
        block.scales[l] = if amax < AMAX_MIN { 0.0 } else { scale };
    }
    let mut by_column = [0.0; BLOCK];
    if order == Order::Natural {
        let (first, rest) = by_column.split_first_chunk_mut::<32>().expect("128 columns");
        for (pair, inverse) in first.as_chunks_mut::<2>().0.iter_mut().zip(&inverses) {
            *pair = [*inverse; 2];
        }
        rest.as_chunks_mut::<32>().0.iter_mut().for_each(|plane| *plane = *first);
    } else {
        for (eight, inverse) in by_column.as_chunks_mut::<8>().0.iter_mut().zip(&inverses) {
            *eight = [*inverse; 8];
        }
    }
    let mut integers = [0i16; BLOCK];
    for ((integer, x), inverse) in integers.iter_mut().zip(x).zip(&by_column) {
        // Adding and subtracting 1.5·2²³ rounds to the nearest integer, ties to even; it is
        // exact for magnitudes up to 2²². Only lanes that are not finite are ever clamped.
        let rounded = (x * inverse).clamp(-32767.0, 32767.0) + ROUND;
        *integer = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i16;
    }
    block.store(&integers, order);
}

impl Block {
    /// Puts the integers of all columns in their places.
    #[inline(always)]
    fn store(&mut self, integers: &[i16; BLOCK], order: Order) {
        let word = |integer: i16| integer as u16 as u64;
        match order {
            Order::Natural => {
                for (plane, integers) in self.planes.iter_mut().zip(integers.as_chunks::<32>().0) {
                    let words = plane.as_chunks_mut::<2>().0.iter_mut();
                    words.zip(integers).for_each(|(word, i)| *word = i.to_le_bytes());
                }
                return;
            }
            Order::Planes => {
                for (w, [a, b, c, d]) in integers.as_chunks::<4>().0.iter().enumerate() {
                    let four = word(*a) | word(*b) << 16 | word(*c) << 32 | word(*d) << 48;
                    for (p, plane) in self.planes.iter_mut().enumerate() {
                        let word = (four >> (16 * p)) as u16;
                        [plane[2 * w], plane[2 * w + 1]] = word.to_le_bytes();
                    }
                }
            }
            Order::Bytes => {
                for (i, [even, odd]) in integers.as_chunks::<2>().0.iter().enumerate() {
                    self.planes[0][i] = (even >> 8) as u8;
                    self.planes[1][i] = (odd >> 8) as u8;
                    self.planes[2][i] = *even as u8;
                    self.planes[3][i] = *odd as u8;
                }
            }
        }
        for (offset, eight) in self.offsets.iter_mut().zip(integers.as_chunks::<8>().0) {
            *offset = -8 * eight.iter().map(|i| *i as i32).sum::<i32>();
        }
    }
}

const ROUND: f32 = 12_582_912.0;

/// Which forms of its rows a product's input is needed in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forms {
    /// Blocks in natural order.
    pub natural: bool,
    /// Blocks for packed weights.
    pub packed: bool,
    /// Plain floats.
    pub floats: bool,
    /// Whether products take many rows each, which decides the order of packed blocks.
    pub many: bool,
}

impl Forms {
    /// No form yet, for products of `rows` rows each at most.
    pub fn of_rows(rows: usize) -> Forms {
        Forms { many: rows > FEW_ROWS, ..Forms::default() }
    }

    /// These forms and the one that `format` needs.
    pub fn and(mut self, format: Format) -> Forms {
        match Order::of(format, 1) {
            Some(Order::Natural) => self.natural = true,
            Some(_) => self.packed = true,
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
    packed: Vec<Block>,
    /// `[rows, cols / 16 rounded up]`, padded with zeros
    floats: Vec<[f32; LANES]>,
}

/// What is to be filled of some activations, `rows` equal parts each; empty when not needed.
pub struct Unfilled<'a> {
    /// Blocks in natural order.
    pub natural: &'a mut [Block],
    /// Blocks for packed weights.
    pub packed: &'a mut [Block],
    /// Their order.
    pub packed_order: Order,
    /// Rows padded to chunks of 16.
    pub floats: &'a mut [[f32; LANES]],
}

impl Activations {
    /// Makes room for `rows` of `cols` in these forms.
    pub fn reshape(&mut self, rows: usize, cols: usize, forms: Forms) -> Unfilled<'_> {
        let blocks = rows * cols.div_ceil(BLOCK);
        let chunks = rows * cols.div_ceil(LANES);
        (self.cols, self.forms) = (cols, forms);
        Unfilled {
            packed_order: self.packed_order(),
            natural: fit(&mut self.natural, if forms.natural { blocks } else { 0 }, ZERO_BLOCK),
            packed: fit(&mut self.packed, if forms.packed { blocks } else { 0 }, ZERO_BLOCK),
            floats: fit(&mut self.floats, if forms.floats { chunks } else { 0 }, [0.0; LANES]),
        }
    }

    /// Bytes of `rows` of `cols` in every form.
    pub fn bytes(rows: usize, cols: usize) -> usize {
        let blocks = 2 * cols.div_ceil(BLOCK) * size_of::<Block>();
        rows * (blocks + cols.div_ceil(LANES) * size_of::<[f32; LANES]>())
    }

    /// Features of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The order of blocks for packed weights.
    #[inline(always)]
    pub fn packed_order(&self) -> Order {
        if self.forms.many { Order::Planes } else { Order::Bytes }
    }

    /// The blocks of one row for weights of `format`, and their order; `None` for float formats.
    pub fn blocks_for(&self, format: Format, row: usize) -> Option<(&[Block], Order)> {
        let order = Order::of(format, 1 + FEW_ROWS * self.forms.many as usize)?;
        Some((self.blocks(order, row), order))
    }

    /// The blocks of one row. Panics when that order was not filled.
    #[inline(always)]
    pub fn blocks(&self, order: Order, row: usize) -> &[Block] {
        let blocks = self.cols.div_ceil(BLOCK);
        let (all, filled) = match order {
            Order::Natural => (&self.natural, self.forms.natural),
            packed => (&self.packed, self.forms.packed && packed == self.packed_order()),
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

    /// Every order gives each column its own integer, rounded to the nearest, ties to even.
    #[test]
    fn a_lane_keeps_sixteen_bits_of_its_largest_value_in_every_order() {
        for order in [Order::Natural, Order::Planes, Order::Bytes] {
            let x: Vec<f32> = (0..BLOCK).map(|i| (i as f32 - 60.3) * 1.7).collect();
            let mut blocks = [ZERO_BLOCK];
            quantize_row(&x, order, &mut blocks);
            for lane in 0..LANES {
                let columns = || (0..BLOCK).filter(|column| order.lane(*column) == lane);
                let amax = columns().map(|c| x[c].abs()).fold(0.0, f32::max);
                assert_eq!(blocks[0].scales[lane], amax / 32767.0);
                let exact = |c: usize| x[c] as f64 / (amax as f64 / 32767.0);
                let integers: Vec<i16> = columns().map(|c| blocks[0].integer(order, c)).collect();
                for (c, integer) in columns().zip(&integers) {
                    assert!((*integer as f64 - exact(c)).abs() < 0.51, "column {c}");
                }
                assert_eq!(integers.iter().map(|i| i.unsigned_abs()).max(), Some(32767));
                let sum: i32 = integers.iter().map(|i| *i as i32).sum();
                assert_eq!(integers.len(), 8);
                let offset = if order == Order::Natural { 0 } else { -8 * sum };
                assert_eq!(blocks[0].offsets[lane], offset);
            }
        }
        let mut x = [0.0; BLOCK];
        x[..4].copy_from_slice(&[32767.0, 0.5, 1.5, -2.5]);
        let mut blocks = [ZERO_BLOCK];
        quantize_row(&x, Order::Planes, &mut blocks);
        let integers = [0, 1, 2, 3].map(|c| blocks[0].integer(Order::Planes, c));
        assert_eq!(integers, [32767, 0, 2, -2]);
    }

    #[test]
    fn nothing_that_is_not_finite_is_lost_and_nothing_tiny_becomes_infinite() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 200];
            x[150] = bad;
            let mut blocks = [ZERO_BLOCK; 2];
            quantize_row(&x, Order::Planes, &mut blocks);
            let lane = Order::Planes.lane(150 - BLOCK);
            assert!(blocks[0].scales[lane].is_finite() && !blocks[1].scales[lane].is_finite());
        }
        let mut blocks = [ZERO_BLOCK];
        quantize_row(&[1e-38, -1e-40], Order::Planes, &mut blocks);
        assert_eq!(blocks[0], ZERO_BLOCK);
        quantize_row(&[1e-33, 0.0], Order::Natural, &mut blocks);
        assert_eq!(blocks[0].integer(Order::Natural, 0), 32767);
    }
}
