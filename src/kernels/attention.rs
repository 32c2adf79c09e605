//! The sums of latent attention, over vectors: queries absorbed into keys, scores of queries with
//! cached rows, and cached rows mixed by their probabilities.
//!
//! Cached rows and queries are padded to whole chunks of 16 floats, so no sum has a ragged end.

#![forbid(unsafe_code)]

use super::activations::{BLOCK, Order};
use super::codes::{Bf16, Code, F16, F32, FloatCode, Fp8, Groups, Int2, Int3, Int4, Int8, Nvfp4};
use super::scalar::{self, LANES};
use super::simd::Simd;
use super::tiles::{
    BY_GROUP, BY_PAIR, BY_ROW, FloatDots, PREFETCH_BYTES, Scratch, block_bytes, decode_floats,
    squares,
};
use super::{Arithmetic, Kernel, fit};
use crate::float::f32_at;
use crate::quant::{Encoded, Format};
use std::ops::Range;

/// Chunks of 16 columns of a block.
const BLOCK_CHUNKS: usize = BLOCK / LANES;

/// Rows of a cache, some of which a query may see.
#[derive(Clone, Copy)]
pub struct Keys<'a> {
    /// `[positions, chunks]`
    pub rows: &'a [[f32; LANES]],
    /// Chunks of 16 floats of a row.
    pub chunks: usize,
    /// Positions of the keys; `None`: key i is at position i.
    pub positions: Option<&'a [u32]>,
}

impl<'a> Keys<'a> {
    /// The row of key i, if there is one.
    #[inline(always)]
    fn get(&self, i: usize) -> Option<&'a [[f32; LANES]]> {
        let position = match self.positions {
            None => i,
            Some(positions) => *positions.get(i)? as usize,
        };
        self.rows.get(position * self.chunks..(position + 1) * self.chunks)
    }

    /// The row of key i.
    #[inline(always)]
    fn row(&self, i: usize) -> &'a [[f32; LANES]] {
        let position = self.positions.map_or(i, |positions| positions[i] as usize);
        &self.rows[position * self.chunks..(position + 1) * self.chunks]
    }
}

/// scores[h, i] = (query[h] · key[range.start + i]) · scale for the keys `range`.
pub struct Scores<'a> {
    /// `[H, chunks]`
    pub queries: &'a [[f32; LANES]],
    /// What they are compared with.
    pub keys: Keys<'a>,
    /// Which keys.
    pub range: Range<usize>,
    /// 1 / √(width of a head)
    pub scale: f32,
    /// `[H, stride]`
    pub scores: &'a mut [f32],
    /// Keys that `scores` has room for.
    pub stride: usize,
    /// Whether to ask memory for the keys behind the range, as many as it has.
    pub prefetch: bool,
    /// Buffers.
    pub scratch: &'a mut Scratch,
}

impl Kernel for Scores<'_> {
    type Output = ();

    fn scalar(self) {
        let Scores { queries, keys, range, scale, scores, stride, .. } = self;
        for (query, scores) in queries.chunks_exact(keys.chunks).zip(scores.chunks_mut(stride)) {
            for (score, i) in scores.iter_mut().zip(range.clone()) {
                let key = keys.row(i).as_flattened();
                *score = scalar::dot(query.as_flattened(), key) * scale;
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, simd: S) {
        let Scores { queries, keys, range, scale, scores, stride, prefetch, scratch } = self;
        let (chunks, first) = (keys.chunks, range.start);
        let shape = [range.len(), queries.len() / chunks];
        let dots = FloatDots::<_, _, _, true> {
            row: |i: usize| keys.row(first + i),
            ahead: |i: usize| prefetch.then(|| keys.get(first + i + shape[0])).flatten(),
            token: |h: usize| &queries[h * chunks..(h + 1) * chunks],
        };
        squares(simd, &dots, shape, chunks, &mut scratch.sums, |h, i, sums| {
            let scores = &mut scores[h * stride + i..];
            for (score, sum) in scores.iter_mut().zip(sums) {
                *score = sum * scale;
            }
        });
    }
}

/// out[h] += Σ_i weights[h, i] · key[range.start + i] over the keys `range`, ascending.
pub struct Mix<'a> {
    /// `[H, stride]`
    pub weights: &'a [f32],
    /// Keys that `weights` has room for.
    pub stride: usize,
    /// What is mixed; the first chunks of each row.
    pub keys: Keys<'a>,
    /// Which keys.
    pub range: Range<usize>,
    /// `[H, chunks]`
    pub out: &'a mut [[f32; LANES]],
    /// Chunks of 16 floats of a row of `out`.
    pub chunks: usize,
}

impl Kernel for Mix<'_> {
    type Output = ();

    fn scalar(self) {
        let Mix { weights, stride, keys, range, out, chunks } = self;
        for (out, weights) in out.chunks_exact_mut(chunks).zip(weights.chunks(stride)) {
            let row = |i: usize| keys.row(range.start + i).as_flattened();
            scalar::mix(&weights[..range.len()], row, out.as_flattened_mut());
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, simd: S) {
        let Mix { weights, stride, keys, range, out, chunks } = self;
        let row = |i: usize| keys.row(range.start + i);
        mix_rows(simd, row, &Table { weights, stride }, range.len(), out, chunks);
    }
}

/// How much of row i goes into result h. Not a closure: those that touch vectors may be compiled
/// without the instructions they need.
trait Weights<S: Simd> {
    /// The weights of the 16 lanes of any chunk of block `b`.
    fn lanes(&self, simd: S, h: usize, i: usize, b: usize) -> S::F;
}

/// One weight a row: `weights[h · stride + i]`.
struct Table<'a> {
    weights: &'a [f32],
    stride: usize,
}

impl<S: Simd> Weights<S> for Table<'_> {
    #[inline(always)]
    fn lanes(&self, simd: S, h: usize, i: usize, _: usize) -> S::F {
        simd.splat(self.weights[h * self.stride + i])
    }
}

/// The same, times the scale `[rows, blocks]` of the row's block.
struct ScaledTable<'a> {
    table: Table<'a>,
    scales: &'a [[f32; LANES]],
    blocks: usize,
}

impl<S: Simd> Weights<S> for ScaledTable<'_> {
    #[inline(always)]
    fn lanes(&self, simd: S, h: usize, i: usize, b: usize) -> S::F {
        let weight = self.table.lanes(simd, h, i, b);
        simd.mul(weight, simd.load(&self.scales[i * self.blocks + b]))
    }
}

/// out[h] += Σ weight(h, i, block of 8 chunks) · row(i) over `count` rows, ascending, in squares of
/// registers.
#[inline(always)]
fn mix_rows<'a, S: Simd>(
    simd: S,
    row: impl Fn(usize) -> &'a [[f32; LANES]] + Copy,
    weights: &impl Weights<S>,
    count: usize,
    out: &mut [[f32; LANES]],
    chunks: usize,
) {
    let heads = out.len() / chunks;
    let (height, width) = if S::WIDE { (4, 4) } else { (2, 2) };
    let mut head = 0;
    while head < heads {
        let high = if heads - head >= height { height } else { 1 };
        let mut chunk = 0;
        while chunk < chunks {
            let wide = if chunks - chunk >= width { width } else { 1 };
            let at = [head, chunk];
            match (high, wide) {
                (4, 4) => mix_square::<S, 4, 4>(simd, row, weights, count, out, chunks, at),
                (4, _) => mix_square::<S, 4, 1>(simd, row, weights, count, out, chunks, at),
                (2, 2) => mix_square::<S, 2, 2>(simd, row, weights, count, out, chunks, at),
                (2, _) => mix_square::<S, 2, 1>(simd, row, weights, count, out, chunks, at),
                (_, 4) => mix_square::<S, 1, 4>(simd, row, weights, count, out, chunks, at),
                (_, 2) => mix_square::<S, 1, 2>(simd, row, weights, count, out, chunks, at),
                _ => mix_square::<S, 1, 1>(simd, row, weights, count, out, chunks, at),
            }
            chunk += wide;
        }
        head += high;
    }
}

/// One square of `H` heads and `C` chunks.
#[inline(always)]
fn mix_square<'a, S: Simd, const H: usize, const C: usize>(
    simd: S,
    row: impl Fn(usize) -> &'a [[f32; LANES]],
    weights: &impl Weights<S>,
    count: usize,
    out: &mut [[f32; LANES]],
    chunks: usize,
    [head, chunk]: [usize; 2],
) {
    let at = |h: usize, c: usize| (head + h) * chunks + chunk + c;
    let mut sums = [[simd.splat(0.0); C]; H];
    for h in 0..H {
        for c in 0..C {
            sums[h][c] = simd.load(&out[at(h, c)]);
        }
    }
    for i in 0..count {
        let row = &row(i)[chunk..chunk + C];
        let mut values = [simd.splat(0.0); C];
        for c in 0..C {
            values[c] = simd.load(&row[c]);
        }
        for h in 0..H {
            let weight = weights.lanes(simd, head + h, i, chunk / BLOCK_CHUNKS);
            for c in 0..C {
                sums[h][c] = simd.fma(weight, values[c], sums[h][c]);
            }
        }
    }
    for h in 0..H {
        for c in 0..C {
            simd.store(sums[h][c], &mut out[at(h, c)]);
        }
    }
}

/// out[t] = q[t] · K, K the rows `first_row…` of `matrix`; see [`scalar::absorb`].
pub struct Absorb<'a> {
    /// Holds K as `nope` rows of `cols`.
    pub matrix: Encoded<'a>,
    /// First row of K.
    pub first_row: usize,
    /// Query t is `queries[t · query_stride..][..nope]`
    pub queries: &'a [f32],
    /// Floats from one query to the next.
    pub query_stride: usize,
    /// Rows of K, and width of a query.
    pub nope: usize,
    /// Rows between the end of K and that of the head whose turn is next.
    pub skipped_rows: usize,
    /// Result t is `out[t · out_stride..][..cols]`
    pub out: &'a mut [f32],
    /// Floats from one result to the next.
    pub out_stride: usize,
    /// Results.
    pub count: usize,
    /// Buffers.
    pub scratch: &'a mut Scratch,
}

impl Absorb<'_> {
    /// Computes it. Not generic: many tiles, compiled once and not again by every crate.
    pub fn run(self, arithmetic: Arithmetic) {
        arithmetic.run(self);
    }
}

impl Kernel for Absorb<'_> {
    type Output = ();

    fn scalar(self) {
        for t in 0..self.count {
            let query = &self.queries[t * self.query_stride..][..self.nope];
            let out = &mut self.out[t * self.out_stride..][..self.matrix.cols];
            scalar::absorb(&self.matrix, self.first_row, query, &mut self.scratch.row, out);
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, simd: S) {
        match self.matrix.format {
            Format::Int8Row => absorb::<S, Int8>(simd, self),
            Format::Int4Row | Format::Int4Group(_) => absorb::<S, Int4>(simd, self),
            Format::Int2Row => absorb::<S, Int2>(simd, self),
            Format::Int3Group64 => absorb::<S, Int3>(simd, self),
            Format::Nvfp4 => absorb::<S, Nvfp4>(simd, self),
            Format::F32 => absorb_floats::<S, F32>(simd, self),
            Format::Bf16 => absorb_floats::<S, Bf16>(simd, self),
            Format::F16 => absorb_floats::<S, F16>(simd, self),
            Format::Fp8Block => absorb_floats::<S, Fp8>(simd, self),
        }
    }
}

/// The column within its block of every lane of the chunks of [`Code::floats`].
const fn columns(order: Order) -> [u8; BLOCK] {
    let mut columns = [0; BLOCK];
    let mut i = 0;
    while i < BLOCK {
        let (chunk, lane) = (i / LANES, i % LANES);
        columns[i] = match order {
            Order::Natural => 32 * (chunk / 2) + 2 * lane + chunk % 2,
            Order::Planes | Order::Bytes => 8 * lane + chunk,
        } as u8;
        i += 1;
    }
    columns
}

const NATURAL_COLUMNS: [u8; BLOCK] = columns(Order::Natural);
const PLANES_COLUMNS: [u8; BLOCK] = columns(Order::Planes);

#[inline(always)]
fn absorb<S: Simd, C: Code>(simd: S, mut part: Absorb<'_>) {
    let groups = Groups::of(&part.matrix);
    let chunks = part.matrix.cols.div_ceil(BLOCK) * BLOCK_CHUNKS;
    fit(&mut part.scratch.sums, part.count * chunks, [0.0; LANES]).fill([0.0; LANES]);
    if part.count == 1 {
        let mut sums = std::mem::take(&mut part.scratch.sums);
        absorb_one::<S, C>(simd, groups.as_ref(), &part, &mut sums[..chunks]);
        part.scratch.sums = sums;
    } else {
        absorb_several::<S, C>(simd, groups.as_ref(), &mut part);
    }
    let Absorb { matrix, out, out_stride, count, scratch, .. } = part;
    let columns = if C::ORDER == Order::Natural { &NATURAL_COLUMNS } else { &PLANES_COLUMNS };
    for (t, sums) in scratch.sums.chunks_exact(chunks).take(count).enumerate() {
        let out = &mut out[t * out_stride..][..matrix.cols];
        let (blocks, _) = sums.as_flattened().as_chunks::<BLOCK>();
        for (block, out) in blocks.iter().zip(out.chunks_mut(BLOCK)) {
            let mut ordered = [0.0; BLOCK];
            for (value, column) in block.iter().zip(columns) {
                ordered[*column as usize % BLOCK] = *value;
            }
            out.copy_from_slice(&ordered[..out.len()]);
        }
    }
}

/// Several queries: K is decoded once for all.
#[inline(always)]
fn absorb_several<S: Simd, C: Code>(simd: S, groups: Option<&Groups<'_>>, part: &mut Absorb<'_>) {
    let Absorb { matrix, first_row, queries, query_stride, nope, count, scratch, .. } = part;
    let blocks = matrix.cols.div_ceil(BLOCK);
    let chunks = blocks * BLOCK_CHUNKS;
    let Scratch { floats, scales, sums, .. } = &mut **scratch;
    fit(floats, *nope * chunks, [0.0; LANES]);
    fit(scales, *nope * blocks, [0.0; LANES]);
    let mut padded = [0; 128];
    for j in 0..*nope {
        let bytes = matrix.row(*first_row + j);
        for b in 0..blocks {
            let block = block_bytes(bytes, b, C::BLOCK_BYTES, &mut padded);
            let codes = C::floats(simd, block);
            let first = j * chunks + b * BLOCK_CHUNKS;
            for (code, out) in codes.into_iter().zip(&mut floats[first..]) {
                simd.store(code, out);
            }
            let scale = match groups {
                None => lane_scale::<S, BY_ROW>(simd, matrix, groups, *first_row + j, b),
                Some(_) => lane_scale::<S, BY_GROUP>(simd, matrix, groups, *first_row + j, b),
            };
            simd.store(scale, &mut scales[j * blocks + b]);
        }
    }
    let table = Table { weights: queries, stride: *query_stride };
    let weights = ScaledTable { table, scales, blocks };
    let row = |j: usize| &floats[j * chunks..(j + 1) * chunks];
    mix_rows(simd, row, &weights, *nope, &mut sums[..*count * chunks], chunks);
}

/// The scales of block `b` of a row, one per lane; `SCALING` says whose scales there are.
#[inline(always)]
fn lane_scale<S: Simd, const SCALING: u8>(
    simd: S,
    matrix: &Encoded<'_>,
    groups: Option<&Groups<'_>>,
    row: usize,
    b: usize,
) -> S::F {
    match (SCALING, groups) {
        (BY_PAIR, Some(groups)) => {
            let pairs = groups.pairs(row..row + 1).expect("this scaling has them");
            simd.splat_pair(&pairs[b])
        }
        (BY_GROUP, Some(groups)) => groups.lanes(simd, row, b),
        _ => simd.splat(f32_at(matrix.scales, row)),
    }
}

/// Rows of K that pass while the sums of a block stay in registers.
const ABSORBED_ROWS: usize = 16;

/// One query.
#[inline(always)]
fn absorb_one<S: Simd, C: Code>(
    simd: S,
    groups: Option<&Groups<'_>>,
    part: &Absorb<'_>,
    sums: &mut [[f32; LANES]],
) {
    for first in (0..part.nope).step_by(ABSORBED_ROWS) {
        let rows = first..part.nope.min(first + ABSORBED_ROWS);
        for (b, sums) in sums.as_chunks_mut::<BLOCK_CHUNKS>().0.iter_mut().enumerate() {
            // One loop for each, so that none keeps its sums in memory for another's sake.
            let is_pair = groups.is_some_and(|groups| groups.pairs(0..0).is_some());
            let rows = rows.clone();
            match groups {
                None => part.add_block::<S, C, BY_ROW>(simd, groups, rows, b, sums),
                Some(_) if is_pair => part.add_block::<S, C, BY_PAIR>(simd, groups, rows, b, sums),
                Some(_) => part.add_block::<S, C, BY_GROUP>(simd, groups, rows, b, sums),
            }
        }
    }
}

impl Absorb<'_> {
    /// Adds block `b` of some rows of K.
    #[inline(always)]
    fn add_block<S: Simd, C: Code, const SCALING: u8>(
        &self,
        simd: S,
        groups: Option<&Groups<'_>>,
        rows: Range<usize>,
        b: usize,
        out: &mut [[f32; LANES]; BLOCK_CHUNKS],
    ) {
        if S::WIDE {
            self.add_chunks::<S, C, SCALING, 0, 8>(simd, groups, rows, b, out);
        } else {
            // Half of the sums at a time where registers are few.
            self.add_chunks::<S, C, SCALING, 0, 4>(simd, groups, rows.clone(), b, out);
            self.add_chunks::<S, C, SCALING, 4, 4>(simd, groups, rows, b, out);
        }
    }

    /// The chunks `FIRST … FIRST + COUNT` of it.
    #[inline(always)]
    fn add_chunks<S: Simd, C: Code, const SCALING: u8, const FIRST: usize, const COUNT: usize>(
        &self,
        simd: S,
        groups: Option<&Groups<'_>>,
        rows: Range<usize>,
        b: usize,
        out: &mut [[f32; LANES]; BLOCK_CHUNKS],
    ) {
        let row_bytes = self.matrix.format.row_bytes(self.matrix.cols);
        // Behind the last rows comes V, which has its turn later, but the next head's K as well.
        let further = match rows.end * row_bytes + PREFETCH_BYTES > self.nope * row_bytes {
            true => self.skipped_rows * row_bytes,
            false => 0,
        };
        let mut padded = [0; 128];
        let mut sums = [simd.splat(0.0); COUNT];
        for (sum, out) in sums.iter_mut().zip(&out[FIRST..]) {
            *sum = simd.load(out);
        }
        for j in rows {
            let row = self.first_row + j;
            let bytes = block_bytes(self.matrix.row(row), b, C::BLOCK_BYTES, &mut padded);
            if FIRST == 0 {
                for line in (0..C::BLOCK_BYTES).step_by(64) {
                    let ahead = bytes.as_ptr().wrapping_add(PREFETCH_BYTES + line);
                    simd.prefetch(ahead);
                    simd.prefetch(ahead.wrapping_add(further));
                }
            }
            let scale = lane_scale::<S, SCALING>(simd, &self.matrix, groups, row, b);
            let weight = simd.mul(simd.splat(self.queries[j]), scale);
            let codes = C::floats(simd, bytes);
            for (sum, code) in sums.iter_mut().zip(&codes[FIRST..]) {
                *sum = simd.fma(weight, *code, *sum);
            }
        }
        for (sum, out) in sums.into_iter().zip(&mut out[FIRST..]) {
            simd.store(sum, out);
        }
    }
}

#[inline(always)]
fn absorb_floats<S: Simd, C: FloatCode>(simd: S, part: Absorb<'_>) {
    let Absorb { matrix, first_row, queries, query_stride, nope, out, out_stride, count, .. } =
        part;
    let scratch = part.scratch;
    let chunks = matrix.cols.div_ceil(LANES);
    let Scratch { floats, sums, .. } = scratch;
    decode_floats::<S, C>(simd, &matrix, first_row..first_row + nope, floats);
    let sums = fit(sums, count * chunks, [0.0; LANES]);
    sums.fill([0.0; LANES]);
    let weights = Table { weights: queries, stride: query_stride };
    let row = |j: usize| &floats[j * chunks..(j + 1) * chunks];
    mix_rows(simd, row, &weights, nope, sums, chunks);
    for (t, sums) in sums.chunks_exact(chunks).enumerate() {
        let out = &mut out[t * out_stride..][..matrix.cols];
        out.copy_from_slice(&sums.as_flattened()[..out.len()]);
    }
}
