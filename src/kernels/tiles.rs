//! Products of a range of matrix rows with rows of activations, over vectors.
//!
//! Few rows of activations (decode, drafts to verify): each weight row streams through registers
//! once, four sums are folded together at a time, and memory is asked for ahead of its use. Many
//! rows (prefill): a tile of weight rows is decoded once into scratch that fits the second
//! cache level, and small squares of (weight rows × activation rows) are computed in registers.
//! Both are the sums of [`super::scalar`], bit for bit: every result has its own lanes.

#![forbid(unsafe_code)]

use super::activations::{Activations, BLOCK, Block, FEW_ROWS, Order};
use super::codes::{Bf16, Code, F16, F32, FloatCode, Fp8, Groups, Int2, Int3, Int4, Int8, Nvfp4};
use super::scalar::{self, LANES};
use super::simd::Simd;
use super::{Arithmetic, Kernel, fit, reserve};
use crate::float::f32_at;
use crate::quant::{Encoded, FP8_BLOCK, Format};
use std::ops::Range;

/// How far ahead of its use weight memory is asked for: at 18 GB/s a core, about 350 ns. Measured
/// in decode, of the streaming limit: 4 KiB reach 0.81, 6 KiB 0.87, 8 KiB 0.84, 12 KiB 0.80.
pub(super) const PREFETCH_BYTES: usize = 6 << 10;
/// The same for scales, of which 1 KiB belongs to 8 KiB of nibbles in groups of 64.
const PAIRS_AHEAD_BYTES: usize = 1 << 10;
/// Weight rows that take turns when a row of activations does not fit the first cache level.
const GROUP_ROWS: usize = 8;
/// Blocks of activations that do: 18 KiB.
const RESIDENT_BLOCKS: usize = 48;
/// Decoded weights of a tile, in bytes: half of a second-level cache of 512 KiB.
const TILE_BYTES: usize = 256 << 10;
/// Most rows of a tile.
const TILE_ROWS_MAX: usize = 64;
/// Blocks of 128 columns that a square goes through before the next one: two activation rows of
/// so many stay in the first cache level.
const SEGMENT_BLOCKS: usize = 8;

/// Buffers of one worker.
#[derive(Default)]
pub struct Scratch {
    /// `[rows, blocks]` decoded integers
    pub(super) planes: Vec<[[i16; 32]; 4]>,
    /// `[rows, blocks]` scales per lane
    pub(super) scales: Vec<[f32; LANES]>,
    /// `[rows, chunks]` decoded floats
    pub(super) floats: Vec<[f32; LANES]>,
    /// `[rows, activation rows of a square]` lanes of unfinished sums
    pub(super) sums: Vec<[f32; LANES]>,
    /// A row of floats, for whoever needs one
    pub row: Vec<f32>,
    codes: Vec<i16>,
}

impl Scratch {
    /// Bytes at most, when no matrix has more than `cols` columns.
    pub fn bytes(cols: usize) -> usize {
        let row = cols.div_ceil(BLOCK) * (size_of::<[[i16; 32]; 4]>() + size_of::<[f32; LANES]>());
        // Integers with their scales, floats, sums, and a row.
        2 * TILE_BYTES.max(4 * row) + TILE_ROWS_MAX * 4 * LANES * size_of::<f32>() + 6 * cols
    }

    /// Makes room for what one row of activations needs: absorbing it into `nope` rows of `cols`,
    /// and comparing up to four queries with `keys` keys.
    pub fn reserve(&mut self, [nope, cols]: [usize; 2], keys: usize) {
        let chunks = cols.next_multiple_of(BLOCK) / LANES;
        reserve(&mut self.sums, chunks.max(4 * keys.next_multiple_of(4)));
        reserve(&mut self.floats, nope * chunks);
        reserve(&mut self.row, cols);
        reserve(&mut self.codes, chunks * LANES);
    }
}

/// y[t, r] = W[rows[r]] · x[tokens[t]].
pub struct ProductPart<'a> {
    /// W `[O, I]`
    pub matrix: Encoded<'a>,
    /// Rows of W to compute.
    pub rows: Range<usize>,
    /// Rows of I features, in the form that the matrix needs
    pub x: &'a Activations,
    /// Which rows of `x`.
    pub tokens: &'a [u32],
    /// `[tokens, rows]`
    pub y: &'a mut [f32],
    /// Buffers.
    pub scratch: &'a mut Scratch,
}

impl ProductPart<'_> {
    /// Computes it. Not generic: many tiles, compiled once and not again by every crate.
    pub fn run(self, arithmetic: Arithmetic) {
        arithmetic.run(self);
    }
}

impl Kernel for ProductPart<'_> {
    type Output = ();

    fn scalar(self) {
        let ProductPart { matrix, rows, x, tokens, y, scratch } = self;
        let count = rows.len();
        for (i, r) in rows.enumerate() {
            if Order::of(matrix.format, 1).is_none() {
                matrix.decode_row(r, fit(&mut scratch.row, matrix.cols, 0.0));
            }
            for (t, token) in tokens.iter().enumerate() {
                let token = *token as usize;
                y[t * count + i] = match x.blocks_for(matrix.format, token) {
                    Some((x, order)) => {
                        scalar::quantized_dot(&matrix, r, x, order, &mut scratch.codes)
                    }
                    None => {
                        let x = &x.floats(token).as_flattened()[..matrix.cols];
                        scalar::dot(&scratch.row[..matrix.cols], x)
                    }
                };
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, simd: S) {
        match self.matrix.format {
            Format::Int8Row => quantized::<S, Int8, false>(simd, self),
            Format::Int4Row => quantized::<S, Int4, false>(simd, self),
            Format::Int2Row => quantized::<S, Int2, false>(simd, self),
            Format::Int4Group(_) => quantized::<S, Int4, true>(simd, self),
            Format::Int3Group64 => quantized::<S, Int3, true>(simd, self),
            Format::Nvfp4 => quantized::<S, Nvfp4, true>(simd, self),
            Format::F32 => floats::<S, F32>(simd, self),
            Format::Bf16 => floats::<S, Bf16>(simd, self),
            Format::F16 => floats::<S, F16>(simd, self),
            Format::Fp8Block => floats::<S, Fp8>(simd, self),
        }
    }
}

/// Integer weights; `GROUPED` tells whether scales belong to groups or to rows.
#[inline(always)]
fn quantized<S: Simd, C: Code, const GROUPED: bool>(simd: S, part: ProductPart<'_>) {
    let ProductPart { matrix, rows, x, tokens, y, scratch } = part;
    let groups = Groups::of(&matrix);
    assert_eq!(groups.is_some(), GROUPED, "scales of {}", matrix.format);
    let row_scale = |r: usize| if GROUPED { 1.0 } else { f32_at(matrix.scales, r) };
    // Packed activations are in the order of few rows only if every product has few.
    let is_packed = C::ORDER != Order::Natural && x.packed_order() == Order::Planes;
    if tokens.len() <= FEW_ROWS && !is_packed {
        if !GROUPED {
            // They are far from the weights, and each line would be waited for.
            for line in matrix.scales[4 * rows.start..4 * rows.end].chunks(64) {
                simd.prefetch(line.as_ptr());
            }
        }
        let few = FewRows { matrix, groups: groups.as_ref(), x };
        for first in rows.clone().step_by(GROUP_ROWS) {
            let group = first..(first + GROUP_ROWS).min(rows.end);
            let mut finish = |t: usize, sums: [f32; GROUP_ROWS]| {
                let y = &mut y[t * rows.len() + first - rows.start..][..group.len()];
                for (i, (y, sum)) in y.iter_mut().zip(sums).enumerate() {
                    *y = scaled::<GROUPED>(sum, row_scale(first + i));
                }
            };
            let width = if S::WIDE { 4 } else { 2 };
            for (i, tokens) in tokens.chunks(width).enumerate() {
                let group = group.clone();
                match *tokens {
                    [a] => few.sums::<S, C, 1>(simd, group, [a], i * width, &mut finish),
                    [a, b] => few.sums::<S, C, 2>(simd, group, [a, b], i * width, &mut finish),
                    [a, b, c] => {
                        few.sums::<S, C, 3>(simd, group, [a, b, c], i * width, &mut finish)
                    }
                    [a, b, c, d] => {
                        few.sums::<S, C, 4>(simd, group, [a, b, c, d], i * width, &mut finish)
                    }
                    _ => unreachable!("chunks of at most four"),
                }
            }
        }
        return;
    }
    let blocks = matrix.cols.div_ceil(BLOCK);
    for tile in tiles(rows.clone(), blocks * size_of::<[[i16; 32]; 4]>()) {
        decode_tile::<S, C>(simd, &matrix, groups.as_ref(), tile.clone(), scratch);
        let Scratch { planes, scales, sums, .. } = scratch;
        let dots = IntegerDots::<GROUPED> { planes, scales, blocks, x, order: C::ORDER, tokens };
        squares(simd, &dots, [tile.len(), tokens.len()], blocks, sums, |t, r, sums| {
            let y = &mut y[t * rows.len() + tile.start - rows.start + r..];
            for (i, (y, sum)) in y.iter_mut().zip(sums).enumerate() {
                *y = scaled::<GROUPED>(*sum, row_scale(tile.start + r + i));
            }
        });
    }
}

#[inline(always)]
fn scaled<const GROUPED: bool>(sum: f32, row_scale: f32) -> f32 {
    if GROUPED { sum } else { sum * row_scale }
}

/// Cuts `rows` into tiles whose decoded rows of `row_bytes` fit the scratch.
#[inline(always)]
fn tiles(rows: Range<usize>, row_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let most = (TILE_BYTES / row_bytes.max(1)).clamp(4, TILE_ROWS_MAX) / 4 * 4;
    let end = rows.end;
    rows.step_by(most).map(move |first| first..(first + most).min(end))
}

/// Bytes of block `b` of a row; those of a ragged end are copied behind each other and padded.
#[inline(always)]
pub(super) fn block_bytes<'a>(
    row: &'a [u8],
    b: usize,
    bytes: usize,
    padded: &'a mut [u8; 128],
) -> &'a [u8] {
    let rest = &row[b * bytes..];
    if rest.len() >= bytes {
        return &rest[..bytes];
    }
    pad(rest, padded);
    &padded[..bytes]
}

// Cold, so that sums are not kept in memory for the sake of this call.
#[cold]
fn pad(rest: &[u8], padded: &mut [u8; 128]) {
    padded[..rest.len()].copy_from_slice(rest);
    padded[rest.len()..].fill(0);
}

/// A product with few rows of activations.
struct FewRows<'a> {
    matrix: Encoded<'a>,
    groups: Option<&'a Groups<'a>>,
    x: &'a Activations,
}

impl FewRows<'_> {
    /// Sums of a group of weight rows with the activations `tokens`; `finish` gets those of each,
    /// counted from `at`.
    #[inline(always)]
    fn sums<S: Simd, C: Code, const T: usize>(
        &self,
        simd: S,
        group: Range<usize>,
        tokens: [u32; T],
        at: usize,
        finish: &mut impl FnMut(usize, [f32; GROUP_ROWS]),
    ) {
        let lanes = self.lanes::<S, C, T>(simd, group, tokens);
        for t in 0..T {
            let mut sums = [0.0; GROUP_ROWS];
            for (i, sums) in sums.as_chunks_mut().0.iter_mut().enumerate() {
                let mut four = [simd.splat(0.0); 4];
                for (r, four) in four.iter_mut().enumerate() {
                    *four = lanes[4 * i + r][t];
                }
                *sums = simd.lane_sums(four);
            }
            finish(at + t, sums);
        }
    }

    /// The lanes of up to [`GROUP_ROWS`] weight rows times some activation rows.
    #[inline(always)]
    fn lanes<S: Simd, C: Code, const T: usize>(
        &self,
        simd: S,
        group: Range<usize>,
        tokens: [u32; T],
    ) -> [[S::F; T]; GROUP_ROWS] {
        let FewRows { matrix, groups, .. } = *self;
        let row_bytes = matrix.format.row_bytes(matrix.cols);
        let bytes = &matrix.weights[group.start * row_bytes..group.end * row_bytes];
        let pairs = groups.and_then(|groups| groups.pairs(group.clone()));
        for line in pairs.unwrap_or_default().chunks(64 / size_of::<[u8; 8]>()) {
            simd.prefetch(line.as_ptr().cast::<u8>().wrapping_add(PAIRS_AHEAD_BYTES));
        }
        let (blocks, whole) = (matrix.cols.div_ceil(BLOCK), matrix.cols / BLOCK);
        let order = if C::ORDER == Order::Natural { Order::Natural } else { Order::Bytes };
        let mut x = [&[][..]; T];
        for t in 0..T {
            x[t] = self.x.blocks(order, tokens[t] as usize);
        }
        let (first, count) = (group.start, group.len());
        let rows = GroupedRows { bytes, row_bytes, first, groups, pairs, x };
        let mut lanes = [[simd.splat(0.0); T]; GROUP_ROWS];
        let resident = RESIDENT_BLOCKS / T;
        for start in (0..blocks).step_by(resident) {
            let end = (start + resident).min(blocks);
            let ahead = (blocks > resident).then(|| match end == blocks {
                true => GROUP_ROWS * row_bytes - start * C::BLOCK_BYTES,
                false => resident * C::BLOCK_BYTES,
            });
            let part = start..end.min(whole);
            let mut i = 0;
            while i < count {
                if S::WIDE && count - i >= 2 {
                    let pair = [lanes[i], lanes[i + 1]];
                    [lanes[i], lanes[i + 1]] =
                        rows.add::<S, C, 2>(simd, i, part.clone(), ahead, pair);
                    i += 2;
                } else {
                    [lanes[i]] = rows.add::<S, C, 1>(simd, i, part.clone(), ahead, [lanes[i]]);
                    i += 1;
                }
            }
        }
        if whole < blocks {
            for (i, lanes) in lanes.iter_mut().enumerate().take(count) {
                *lanes = rows.add_ragged::<S, C>(simd, i, whole, *lanes);
            }
        }
        lanes
    }
}

/// Weight rows that follow each other, and some activation rows.
struct GroupedRows<'a, const T: usize> {
    bytes: &'a [u8],
    row_bytes: usize,
    /// The first of them in its matrix.
    first: usize,
    groups: Option<&'a Groups<'a>>,
    /// Their scales, if those are pairs.
    pairs: Option<&'a [[u8; 8]]>,
    x: [&'a [Block]; T],
}

impl<const T: usize> GroupedRows<'_, T> {
    /// Adds whole blocks of `R` rows from the i-th on to their lanes; activations are in
    /// registers once for all. `ahead`: how far behind these blocks a row's turn goes on, if not
    /// as memory does.
    #[inline(always)]
    fn add<S: Simd, C: Code, const R: usize>(
        &self,
        simd: S,
        i: usize,
        blocks: Range<usize>,
        ahead: Option<usize>,
        lanes: [[S::F; T]; R],
    ) -> [[S::F; T]; R] {
        // One loop for each, so that none keeps its sums in memory for the sake of another.
        match (self.groups, self.pairs) {
            (None, _) => self.add_blocks::<S, C, R, BY_ROW>(simd, i, blocks, ahead, lanes),
            (_, Some(_)) => self.add_blocks::<S, C, R, BY_PAIR>(simd, i, blocks, ahead, lanes),
            _ => self.add_blocks::<S, C, R, BY_GROUP>(simd, i, blocks, ahead, lanes),
        }
    }

    /// The same; `SCALING` says whose scales there are.
    #[inline(always)]
    fn add_blocks<S: Simd, C: Code, const R: usize, const SCALING: u8>(
        &self,
        simd: S,
        i: usize,
        blocks: Range<usize>,
        ahead: Option<usize>,
        lanes: [[S::F; T]; R],
    ) -> [[S::F; T]; R] {
        let (mut lanes, mut x) = (lanes, self.x);
        for x in &mut x {
            *x = &x[blocks.clone()];
        }
        let (mut rows, mut pairs) = ([&[][..]; R], [&[][..]; R]);
        for r in 0..R {
            let bytes = &self.bytes[(i + r) * self.row_bytes..][..self.row_bytes];
            rows[r] = &C::blocks(bytes)[blocks.clone()];
            if SCALING == BY_PAIR {
                let per_row = C::blocks(bytes).len();
                let all = self.pairs.expect("this scaling has them");
                pairs[r] = &all[(i + r) * per_row + blocks.start..][..blocks.len()];
            }
        }
        // Memory is asked for in its own order, whichever rows it belongs to, or in the rows'.
        let at = |r: usize| rows[r].as_ptr().cast::<u8>();
        let mut next = [std::ptr::null::<u8>(); R];
        for (r, next) in next.iter_mut().enumerate() {
            *next = match ahead {
                Some(ahead) => at(r).wrapping_add(ahead),
                None => at(0).wrapping_add(r * C::BLOCK_BYTES + PREFETCH_BYTES),
            };
        }
        let step = if ahead.is_some() { C::BLOCK_BYTES } else { R * C::BLOCK_BYTES };
        for b in 0..blocks.len() {
            for next in &mut next {
                for line in 0..C::BLOCK_BYTES.div_ceil(64) {
                    simd.prefetch(next.wrapping_add(64 * line));
                }
                *next = next.wrapping_add(step);
            }
            for r in 0..R {
                let scale = match (SCALING, self.groups) {
                    (BY_PAIR, _) => Some(simd.splat_pair(&pairs[r][b])),
                    (BY_GROUP, Some(groups)) => {
                        Some(groups.lanes(simd, self.first + i + r, blocks.start + b))
                    }
                    _ => None,
                };
                for t in 0..T {
                    let (lanes, bytes) = (&mut lanes[r][t], rows[r][b].as_ref());
                    *lanes = add_block::<S, C>(simd, *lanes, scale, bytes, &x[t][b]);
                }
            }
        }
        lanes
    }

    /// Adds the last block `b` of the i-th row, whose bytes do not fill it, to its lanes.
    #[inline(always)]
    fn add_ragged<S: Simd, C: Code>(
        &self,
        simd: S,
        i: usize,
        b: usize,
        mut lanes: [S::F; T],
    ) -> [S::F; T] {
        let mut padded = [0; 128];
        let row = &self.bytes[i * self.row_bytes..][..self.row_bytes];
        let bytes = block_bytes(row, b, C::BLOCK_BYTES, &mut padded);
        let scale = match self.groups {
            Some(groups) => Some(groups.lanes(simd, self.first + i, b)),
            None => None,
        };
        for t in 0..T {
            lanes[t] = add_block::<S, C>(simd, lanes[t], scale, bytes, &self.x[t][b]);
        }
        lanes
    }
}

/// Scales belong to rows: they are left to the end.
pub(super) const BY_ROW: u8 = 0;
/// Each half of a block has its scale, see [`Groups::pairs`].
pub(super) const BY_PAIR: u8 = 1;
/// Scales belong to groups of any other size.
pub(super) const BY_GROUP: u8 = 2;

/// Adds one block of one row, with its groups' scales if it has any, to its lanes.
#[inline(always)]
fn add_block<S: Simd, C: Code>(
    simd: S,
    lanes: S::F,
    scale: Option<S::F>,
    bytes: &[u8],
    x: &Block,
) -> S::F {
    let sums = simd.to_f(C::sums(simd, bytes, x));
    let unit = simd.load(&x.scales);
    let scale = match scale {
        Some(scale) => simd.mul(scale, unit),
        None => unit,
    };
    simd.fma(sums, scale, lanes)
}

/// Decodes the rows `tile` into `scratch.planes`, as signed integers, and their groups' scales.
#[inline(always)]
fn decode_tile<S: Simd, C: Code>(
    simd: S,
    matrix: &Encoded<'_>,
    groups: Option<&Groups<'_>>,
    tile: Range<usize>,
    scratch: &mut Scratch,
) {
    let blocks = matrix.cols.div_ceil(BLOCK);
    let Scratch { planes, scales, .. } = scratch;
    fit(planes, tile.len() * blocks, [[0; 32]; 4]);
    fit(scales, if groups.is_some() { tile.len() * blocks } else { 0 }, [0.0; LANES]);
    let mut padded = [0; 128];
    for (i, r) in tile.enumerate() {
        let bytes = matrix.row(r);
        for b in 0..blocks {
            simd.prefetch(bytes.as_ptr().wrapping_add(b * C::BLOCK_BYTES + PREFETCH_BYTES));
            let block = block_bytes(bytes, b, C::BLOCK_BYTES, &mut padded);
            let codes = C::planes(simd, block);
            for (codes, out) in codes.into_iter().zip(&mut planes[i * blocks + b]) {
                simd.store_w(codes, out);
            }
            if let Some(groups) = groups {
                simd.store(groups.lanes(simd, r, b), &mut scales[i * blocks + b]);
            }
        }
    }
}

/// What a square of sums is made of.
pub(super) trait Dots<S: Simd> {
    /// Weight rows and activation rows of a square on wide registers.
    const SQUARE: [usize; 2];
    /// Steps of the sum that are done for one square before the next one's turn.
    const SEGMENT: usize;
    /// Adds the steps `segment` of rows `row…` times activations `token…` to `sums`.
    fn add<const R: usize, const T: usize>(
        &self,
        simd: S,
        row: usize,
        token: usize,
        segment: Range<usize>,
        sums: &mut [[S::F; T]; R],
    );
}

/// All sums of `rows × tokens`, each over `steps`; `finish(token, row, sums)` gets up to four rows.
#[inline(always)]
pub(super) fn squares<S: Simd, D: Dots<S>>(
    simd: S,
    dots: &D,
    [rows, tokens]: [usize; 2],
    steps: usize,
    sums: &mut Vec<[f32; LANES]>,
    mut finish: impl FnMut(usize, usize, &[f32]),
) {
    let [height, width] = if S::WIDE { D::SQUARE } else { [2, 2] };
    for token in (0..tokens).step_by(width) {
        let count = (tokens - token).min(width);
        // Padded to a multiple of four rows, which are folded together.
        let sums = fit(sums, rows.next_multiple_of(4) * count, [0.0; LANES]);
        sums.fill([0.0; LANES]);
        for start in (0..steps).step_by(D::SEGMENT) {
            let segment = start..(start + D::SEGMENT).min(steps);
            let mut row = 0;
            while row < rows {
                let high = if rows - row >= height { height } else { 1 };
                let sums = &mut sums[row * count..];
                let at = (row, token, segment.clone());
                match (high, count) {
                    (4, 4) => square::<S, D, 4, 4>(simd, dots, at, sums),
                    (4, 3) => square::<S, D, 4, 3>(simd, dots, at, sums),
                    (4, 2) => square::<S, D, 4, 2>(simd, dots, at, sums),
                    (4, _) => square::<S, D, 4, 1>(simd, dots, at, sums),
                    (2, 4) => square::<S, D, 2, 4>(simd, dots, at, sums),
                    (2, 3) => square::<S, D, 2, 3>(simd, dots, at, sums),
                    (2, 2) => square::<S, D, 2, 2>(simd, dots, at, sums),
                    (2, _) => square::<S, D, 2, 1>(simd, dots, at, sums),
                    (_, 4) => square::<S, D, 1, 4>(simd, dots, at, sums),
                    (_, 3) => square::<S, D, 1, 3>(simd, dots, at, sums),
                    (_, 2) => square::<S, D, 1, 2>(simd, dots, at, sums),
                    _ => square::<S, D, 1, 1>(simd, dots, at, sums),
                }
                row += high;
            }
        }
        for row in (0..rows).step_by(4) {
            for t in 0..count {
                let mut lanes = [simd.splat(0.0); 4];
                for (i, lanes) in lanes.iter_mut().enumerate() {
                    *lanes = simd.load(&sums[(row + i) * count + t]);
                }
                let folded = simd.lane_sums(lanes);
                finish(token + t, row, &folded[..(rows - row).min(4)]);
            }
        }
    }
}

/// One square: sums from memory, steps added, sums to memory.
#[inline(always)]
fn square<S: Simd, D: Dots<S>, const R: usize, const T: usize>(
    simd: S,
    dots: &D,
    (row, token, segment): (usize, usize, Range<usize>),
    memory: &mut [[f32; LANES]],
) {
    let memory = &mut memory[..R * T];
    let mut sums = [[simd.splat(0.0); T]; R];
    for (sum, memory) in sums.as_flattened_mut().iter_mut().zip(&*memory) {
        *sum = simd.load(memory);
    }
    dots.add(simd, row, token, segment, &mut sums);
    for (sum, memory) in sums.as_flattened().iter().zip(memory) {
        simd.store(*sum, memory);
    }
}

/// Decoded integers times quantized activations.
struct IntegerDots<'a, const GROUPED: bool> {
    planes: &'a [[[i16; 32]; 4]],
    scales: &'a [[f32; LANES]],
    blocks: usize,
    x: &'a Activations,
    order: Order,
    tokens: &'a [u32],
}

impl<S: Simd, const GROUPED: bool> Dots<S> for IntegerDots<'_, GROUPED> {
    // Sums, operands and scales of a square fit 32 registers.
    const SQUARE: [usize; 2] = if GROUPED { [2, 4] } else { [4, 3] };
    const SEGMENT: usize = SEGMENT_BLOCKS;

    #[inline(always)]
    fn add<const R: usize, const T: usize>(
        &self,
        simd: S,
        row: usize,
        token: usize,
        segment: Range<usize>,
        sums: &mut [[S::F; T]; R],
    ) {
        let count = segment.len();
        let (mut w, mut scales) = ([&[][..]; R], [&[][..]; R]);
        for r in 0..R {
            let first = (row + r) * self.blocks + segment.start;
            w[r] = &self.planes[first..first + count];
            if GROUPED {
                scales[r] = &self.scales[first..first + count];
            }
        }
        let mut x = [&[][..]; T];
        for (t, x) in x.iter_mut().enumerate() {
            let blocks = self.x.blocks(self.order, self.tokens[token + t] as usize);
            *x = &blocks[segment.start..segment.start + count];
        }
        for b in 0..count {
            let mut integers = [[simd.splat_i(0); T]; R];
            for p in 0..4 {
                let mut values = [simd.splat_i(0); T];
                for t in 0..T {
                    values[t] = simd.load_bytes(&x[t][b].planes[p]);
                }
                for r in 0..R {
                    let w = simd.load_w(&w[r][b][p]);
                    for t in 0..T {
                        integers[r][t] = simd.dot_pairs(integers[r][t], w, values[t]);
                    }
                }
            }
            for t in 0..T {
                let unit = simd.load(&x[t][b].scales);
                for r in 0..R {
                    let scale =
                        if GROUPED { simd.mul(simd.load(&scales[r][b]), unit) } else { unit };
                    sums[r][t] = simd.fma(simd.to_f(integers[r][t]), scale, sums[r][t]);
                }
            }
        }
    }
}

/// Float weights.
#[inline(always)]
fn floats<S: Simd, C: FloatCode>(simd: S, part: ProductPart<'_>) {
    let ProductPart { matrix, rows, x, tokens, y, scratch } = part;
    if let [token] = tokens {
        let x = x.floats(*token as usize);
        for first in rows.clone().step_by(4) {
            let mut lanes = [simd.splat(0.0); 4];
            let count = (rows.end - first).min(4);
            for i in 0..count {
                let sum = &mut lanes[i];
                each_chunk::<S, C>(simd, &matrix, first + i, |chunk, w| {
                    *sum = simd.fma(w, simd.load(&x[chunk]), *sum);
                });
            }
            let sums = simd.lane_sums(lanes);
            y[first - rows.start..][..count].copy_from_slice(&sums[..count]);
        }
        return;
    }
    let chunks = matrix.cols.div_ceil(LANES);
    for tile in tiles(rows.clone(), chunks * size_of::<[f32; LANES]>()) {
        decode_floats::<S, C>(simd, &matrix, tile.clone(), &mut scratch.floats);
        let Scratch { floats, sums, .. } = scratch;
        let dots = FloatDots::<_, _, _, false> {
            row: |r: usize| &floats[r * chunks..(r + 1) * chunks],
            ahead: |_| None,
            token: |t: usize| x.floats(tokens[t] as usize),
        };
        squares(simd, &dots, [tile.len(), tokens.len()], chunks, sums, |t, r, sums| {
            let y = &mut y[t * rows.len() + tile.start - rows.start + r..];
            y[..sums.len()].copy_from_slice(sums);
        });
    }
}

/// Decodes rows into `out [rows, chunks of 16]`, padded with zeros.
#[inline(always)]
pub(super) fn decode_floats<S: Simd, C: FloatCode>(
    simd: S,
    matrix: &Encoded<'_>,
    rows: Range<usize>,
    out: &mut Vec<[f32; LANES]>,
) {
    let chunks = matrix.cols.div_ceil(LANES);
    let out = fit(out, rows.len() * chunks, [0.0; LANES]);
    for (r, out) in rows.zip(out.chunks_exact_mut(chunks)) {
        each_chunk::<S, C>(simd, matrix, r, |chunk, w| simd.store(w, &mut out[chunk]));
    }
}

/// Hands every 16 values of a row to `sink`; those behind its end are 0.
#[inline(always)]
fn each_chunk<S: Simd, C: FloatCode>(
    simd: S,
    matrix: &Encoded<'_>,
    row: usize,
    mut sink: impl FnMut(usize, S::F),
) {
    let is_fp8 = matrix.format == Format::Fp8Block;
    let first_scale = row / FP8_BLOCK * matrix.cols.div_ceil(FP8_BLOCK);
    let scale = |chunk: usize| match is_fp8 {
        true => f32_at(matrix.scales, first_scale + chunk / (FP8_BLOCK / LANES)),
        false => 1.0,
    };
    let bytes = matrix.row(row);
    let mut padded = [0; 128];
    for chunk in 0..matrix.cols.div_ceil(LANES) {
        let bytes = block_bytes(bytes, chunk, C::BYTES, &mut padded);
        simd.prefetch(bytes.as_ptr().wrapping_add(PREFETCH_BYTES));
        sink(chunk, C::values(simd, bytes, scale(chunk)));
    }
}

/// Rows of floats times rows of floats.
pub(super) struct FloatDots<R, T, A, const AHEAD: bool> {
    /// Row r, in chunks of 16
    pub(super) row: R,
    /// What to ask memory for while row r is used for the first time; only looked at with `AHEAD`
    pub(super) ahead: A,
    /// Activation row t
    pub(super) token: T,
}

impl<'a, S: Simd, Row, Token, Ahead, const AHEAD: bool> Dots<S>
    for FloatDots<Row, Token, Ahead, AHEAD>
where
    Row: Fn(usize) -> &'a [[f32; LANES]],
    Ahead: Fn(usize) -> Option<&'a [[f32; LANES]]>,
    Token: Fn(usize) -> &'a [[f32; LANES]],
{
    const SQUARE: [usize; 2] = [4, 4];
    const SEGMENT: usize = SEGMENT_BLOCKS * BLOCK / LANES;

    #[inline(always)]
    fn add<const R: usize, const T: usize>(
        &self,
        simd: S,
        row: usize,
        token: usize,
        segment: Range<usize>,
        sums: &mut [[S::F; T]; R],
    ) {
        let (mut w, mut x) = ([&[][..]; R], [&[][..]; T]);
        for (r, w) in w.iter_mut().enumerate() {
            *w = &(self.row)(row + r)[segment.clone()];
        }
        for (t, x) in x.iter_mut().enumerate() {
            *x = &(self.token)(token + t)[segment.clone()];
        }
        // What is used next, a line at a time, while these rows are worked on for the first time.
        let mut ahead = w;
        if AHEAD && token == 0 {
            for (r, ahead) in ahead.iter_mut().enumerate() {
                *ahead = (self.ahead)(row + r).map_or(*ahead, |row| &row[segment.clone()]);
            }
        }
        for chunk in 0..segment.len() {
            if AHEAD {
                for ahead in ahead {
                    simd.prefetch(ahead[chunk].as_ptr().cast());
                }
            }
            let mut values = [simd.splat(0.0); T];
            for t in 0..T {
                values[t] = simd.load(&x[t][chunk]);
            }
            for r in 0..R {
                let w = simd.load(&w[r][chunk]);
                for t in 0..T {
                    sums[r][t] = simd.fma(w, values[t], sums[r][t]);
                }
            }
        }
    }
}
