//! The kernels against a naive restatement of the canonical arithmetic, bit for bit: every weight
//! format on every instruction set of this processor, for shapes that no vector fits.
//!
//! The restatement is written from the words of `colibri::kernels` with plain loops of its own;
//! from the crate it takes only how a weight is stored. Kernels whose specification is also their
//! vector form are compared with themselves, compiled without vectors.
//! Every run draws a new seed and prints it; `COLI_FUZZ_SEED=<number>` repeats a run.

#![forbid(unsafe_code)]

use colibri::cpu::Isa;
use colibri::kernels::attention::{Absorb, Keys, Mix, Scores};
use colibri::kernels::elementwise::{Axpy, Gate, IndexScores, Norm, Sigmoid, SoftmaxBlock};
use colibri::kernels::scalar::{KEYS, RunningSoftmax};
use colibri::kernels::tiles::{ProductPart, Scratch};
use colibri::kernels::{Activations, Arithmetic, Forms};
use colibri::ops::prepare_here;
use colibri::quant::{Encoded, Format, INT4_GROUPS};

/// Marsaglia's xorshift64*.
struct Random(u64);

impl Random {
    /// Prints the seed, for repetition.
    fn new(name: &str) -> (Random, u64) {
        let given = std::env::var("COLI_FUZZ_SEED").ok().and_then(|text| text.parse().ok());
        let seed = given.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            now.as_nanos() as u64
        });
        println!("{name}: COLI_FUZZ_SEED={seed}");
        // Zero is the generator's fixed point.
        (Random(seed | 1), seed)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Finite, of either sign, from 2⁻³ to 2⁴ mostly; sometimes zero, tiny, or an outlier.
    fn float(&mut self) -> f32 {
        let magnitude = match self.below(24) {
            0 => return 0.0,
            1 => 1e-36,
            2 => 1e-7,
            3 => 3e4,
            _ => 1.0,
        };
        let exponent = 2.0f32.powi(self.below(7) as i32 - 3);
        let fraction = 1.0 + self.below(1 << 23) as f32 / (1 << 23) as f32;
        let sign = if self.below(2) == 0 { 1.0 } else { -1.0 };
        sign * fraction * exponent * magnitude
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    /// Bytes of any value but the two NaN codes of E4M3.
    fn bytes(&mut self, n: usize) -> Vec<u8> {
        let not_nan = |byte: u8| if byte & 0x7f == 0x7f { byte & 0x80 } else { byte };
        (0..n).map(|_| not_nan(self.next() as u8)).collect()
    }
}

fn formats() -> impl Iterator<Item = Format> {
    let others = [
        Format::Int8Row,
        Format::Int4Row,
        Format::Int2Row,
        Format::Int3Group64,
        Format::Nvfp4,
        Format::F32,
        Format::Bf16,
        Format::F16,
        Format::Fp8Block,
    ];
    others.into_iter().chain(INT4_GROUPS.map(Format::Int4Group))
}

fn is_float(format: Format) -> bool {
    matches!(format, Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8Block)
}

fn available() -> impl Iterator<Item = Arithmetic> {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.missing_feature().is_none());
    isas.map(Arithmetic::new)
}

/// A random matrix.
struct Stored {
    format: Format,
    rows: usize,
    cols: usize,
    weights: Vec<u8>,
    scales: Vec<u8>,
}

impl Stored {
    fn new(random: &mut Random, format: Format, rows: usize, cols: usize) -> Stored {
        let count = rows * cols;
        let weights = match format {
            Format::F32 => random.floats(count).iter().flat_map(|x| x.to_le_bytes()).collect(),
            Format::Bf16 => {
                let halves = random.floats(count).into_iter().map(|x| (x.to_bits() >> 16) as u16);
                halves.flat_map(u16::to_le_bytes).collect()
            }
            // Every code but infinities and NaN.
            Format::F16 => {
                let finite = |x: u16| if x & 0x7c00 == 0x7c00 { x ^ 0x4000 } else { x };
                (0..count).flat_map(|_| finite(random.next() as u16).to_le_bytes()).collect()
            }
            _ => random.bytes(rows * format.row_bytes(cols)),
        };
        let scale_bytes = format.scale_bytes(rows, cols);
        let scales = match format {
            Format::Nvfp4 => random.bytes(scale_bytes),
            _ => random.floats(scale_bytes / 4).iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        Stored { format, rows, cols, weights, scales }
    }

    fn encoded(&self) -> Encoded<'_> {
        let Stored { format, rows, cols, .. } = *self;
        let scalar = if format == Format::Nvfp4 { 0.37 } else { 1.0 };
        Encoded { format, rows, cols, weights: &self.weights, scales: &self.scales, scalar }
    }
}

/// 16 lanes added as a tree of 8, 4, 2, 1.
fn tree(lanes: &[f32]) -> f32 {
    match lanes {
        [sum] => *sum,
        _ => {
            let (a, b) = lanes.split_at(lanes.len() / 2);
            tree(&a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>())
        }
    }
}

/// The float dot: lane l takes l, l + 16, …, the tail padded with zeros.
fn naive_dot(a: &[f32], b: &[f32]) -> f32 {
    let at = |x: &[f32], i: usize| x.get(i).copied().unwrap_or(0.0);
    let end = a.len().next_multiple_of(16);
    let lane = |l: usize| {
        let terms = (l..end).step_by(16);
        terms.fold(0.0f32, |sum, i| at(a, i).mul_add(at(b, i), sum))
    };
    tree(&(0..16).map(lane).collect::<Vec<_>>())
}

/// Row `row` times `x`, whose values are rounded to 16 bits with the largest of their lane.
fn naive_quantized_dot(matrix: &Encoded<'_>, row: usize, x: &[f32]) -> f32 {
    let is_natural = matrix.format == Format::Int8Row;
    let has_row_scale =
        matches!(matrix.format, Format::Int8Row | Format::Int4Row | Format::Int2Row);
    let mut codes = vec![0; matrix.cols];
    matrix.each_code(row, |column, code| codes[column] = code as i32);
    let mut lanes = [0.0f32; 16];
    for first in (0..matrix.cols).step_by(128) {
        for (l, lane) in lanes.iter_mut().enumerate() {
            // Bytes go by pairs of columns, 32 apart; packed weights by eight neighbours.
            let of_lane = |c: &usize| if is_natural { c % 32 / 2 == l } else { c / 8 == l };
            let columns: Vec<usize> = (0..128).filter(of_lane).map(|c| first + c).collect();
            let inside = || columns.iter().copied().filter(|c| *c < matrix.cols);
            let amax = inside().map(|c| x[c].abs()).fold(0.0, f32::max);
            let (unit, inverse) =
                if amax < 1e-34 { (0.0, 0.0) } else { (amax / 32767.0, 32767.0 / amax) };
            let integer = |c: usize| (x[c] * inverse).round_ties_even() as i32;
            let sum: i32 = inside().map(|c| codes[c] * integer(c)).sum();
            let scale = match columns[0] < matrix.cols {
                _ if has_row_scale => unit,
                true => matrix.scale(row, columns[0]) * unit,
                false => 0.0,
            };
            *lane = (sum as f32).mul_add(scale, *lane);
        }
    }
    let sum = tree(&lanes);
    if has_row_scale { sum * matrix.scale(row, 0) } else { sum }
}

fn decoded(matrix: &Encoded<'_>, row: usize) -> Vec<f32> {
    let mut values = vec![0.0; matrix.cols];
    matrix.decode_row(row, &mut values);
    values
}

/// W · x for one row of W.
fn naive_product(matrix: &Encoded<'_>, row: usize, x: &[f32]) -> f32 {
    match is_float(matrix.format) {
        true => naive_dot(&decoded(matrix, row), x),
        false => naive_quantized_dot(matrix, row, x),
    }
}

#[track_caller]
fn assert_same_bits(got: &[f32], want: &[f32], case: &str) {
    assert_eq!(got.len(), want.len(), "{case}");
    let differs = |i: &usize| got[*i].to_bits() != want[*i].to_bits();
    if let Some(i) = (0..got.len()).find(differs) {
        panic!("{case}: element {i}: {:e}, not {:e}", got[i], want[i]);
    }
}

/// `[tokens, rows]` for some rows of activations, by the kernel; `apart` tells whether the rows
/// are prepared for products of one row each.
fn product(
    arithmetic: Arithmetic,
    matrix: Encoded<'_>,
    rows: std::ops::Range<usize>,
    (x, tokens, apart): (&[f32], &[u32], bool),
    scratch: &mut Scratch,
) -> Vec<f32> {
    let cols = matrix.cols;
    let mut activations = Activations::default();
    let row = |t: usize| &x[t * cols..(t + 1) * cols];
    let forms = Forms::of_rows(if apart { 1 } else { x.len() / cols }).and(matrix.format);
    prepare_here(arithmetic, x.len() / cols, cols, forms, row, &mut activations);
    let mut y = vec![f32::NAN; tokens.len() * rows.len()];
    ProductPart { matrix, rows, x: &activations, tokens, y: &mut y, scratch }.run(arithmetic);
    y
}

/// Kernel and restatement on one shape, for a token alone, some of several, and all in reverse.
fn check_products(random: &mut Random, seed: u64, [rows, cols]: [usize; 2], counts: &[usize]) {
    let mut scratch = Scratch::default();
    for format in formats() {
        let stored = Stored::new(random, format, rows, cols);
        let matrix = stored.encoded();
        let count_max = *counts.iter().max().unwrap();
        let x = random.floats(count_max * cols);
        let row = |t: usize| &x[t * cols..(t + 1) * cols];
        let naive = |t: usize| (0..rows).map(|r| naive_product(&matrix, r, row(t))).collect();
        let want: Vec<Vec<f32>> = (0..count_max).map(naive).collect();
        for count in counts {
            let x = &x[..count * cols];
            let all: Vec<u32> = (0..*count as u32).rev().collect();
            for (tokens, first_row, apart) in [
                (&all[..], 0, false),
                (&all[..1], 0, false),
                (&all[..1], 0, true),
                (&all[..], rows / 2, false),
            ] {
                let inputs = (x, tokens, apart);
                let rows = first_row..rows;
                let want: Vec<f32> =
                    tokens.iter().flat_map(|t| &want[*t as usize][rows.clone()]).copied().collect();
                for arithmetic in available() {
                    let got = product(arithmetic, matrix, rows.clone(), inputs, &mut scratch);
                    let (isa, whole) = (arithmetic.isa(), matrix.rows);
                    let shape =
                        format!("{rows:?} of [{whole}, {cols}], tokens {tokens:?} of {count}");
                    let case = format!("seed {seed}: {format} {shape} on {isa}");
                    assert_same_bits(&got, &want, &case);
                }
            }
        }
    }
}

#[test]
fn products_of_every_format_and_odd_shape_are_the_restated_sums() {
    let (mut random, seed) = Random::new("products");
    for cols in [1, 7, 64, 127, 128, 129, 200, 257, 384] {
        for rows in [1, 3, 5, 66] {
            check_products(&mut random, seed, [rows, cols], &[1, 2, 3, 4, 7]);
        }
    }
}

/// More columns than a square of sums goes through at once with several tiles of rows; and than
/// the activations of a single row take turns at (6144), with a block or a part of one behind.
#[test]
fn products_of_long_rows_are_the_restated_sums() {
    let (mut random, seed) = Random::new("long products");
    check_products(&mut random, seed, [66, 2200], &[1, 3, 5]);
    for cols in [6144, 6200, 6272, 12_400] {
        check_products(&mut random, seed, [11, cols], &[1, 2]);
    }
}

#[test]
fn absorbed_queries_are_sums_over_rows_ascending() {
    let (mut random, seed) = Random::new("absorb");
    let mut scratch = Scratch::default();
    for (format, cols) in formats().flat_map(|f| [7, 64, 129, 200, 512].map(|cols| (f, cols))) {
        for (nope, count) in [(1, 1), (16, 1), (33, 1), (5, 2), (17, 3), (16, 4), (3, 7)] {
            let (first_row, query_stride, out_stride) = (2, nope + 3, cols + 5);
            let stored = Stored::new(&mut random, format, nope + 4, cols);
            let matrix = stored.encoded();
            let queries = random.floats(count * query_stride);
            let mut want = vec![7.5f32; count * out_stride];
            for t in 0..count {
                let out = &mut want[t * out_stride..][..cols];
                out.fill(0.0);
                for j in 0..nope {
                    let (row, q) = (first_row + j, queries[t * query_stride + j]);
                    let mut codes =
                        if is_float(format) { decoded(&matrix, row) } else { vec![0.0; cols] };
                    if !is_float(format) {
                        matrix.each_code(row, |c, code| codes[c] = code as f32);
                    }
                    for (c, out) in out.iter_mut().enumerate() {
                        let q = if is_float(format) { q } else { q * matrix.scale(row, c) };
                        *out = codes[c].mul_add(q, *out);
                    }
                }
            }
            for arithmetic in available() {
                let mut out = vec![7.5; count * out_stride];
                let (queries, scratch) = (&queries[..], &mut scratch);
                Absorb {
                    matrix,
                    first_row,
                    queries,
                    query_stride,
                    nope,
                    skipped_rows: 5,
                    out: &mut out,
                    out_stride,
                    count,
                    scratch,
                }
                .run(arithmetic);
                let isa = arithmetic.isa();
                let case =
                    format!("seed {seed}: {format} [{nope}, {cols}], {count} queries on {isa}");
                assert_same_bits(&out, &want, &case);
            }
        }
    }
}

fn chunks(floats: &[f32]) -> &[[f32; 16]] {
    floats.as_chunks().0
}

/// Heads, chunks of a key, keys of the cache; and the range that is asked for.
const ATTENTION_SHAPES: [([usize; 3], std::ops::Range<usize>); 6] = [
    ([1, 1, 1], 0..1),
    ([2, 3, 9], 0..9),
    ([3, 4, 33], 5..30),
    ([4, 5, 66], 1..66),
    ([5, 9, 130], 64..129),
    ([9, 36, 20], 3..20),
];

#[test]
fn scores_are_float_dots_of_the_keys_asked_for() {
    let (mut random, seed) = Random::new("scores");
    let mut scratch = Scratch::default();
    for ([heads, width, keys], range) in ATTENTION_SHAPES {
        let (queries, rows) = (random.floats(heads * width * 16), random.floats(keys * width * 16));
        let picked: Vec<u32> = (0..keys).map(|_| random.below(keys) as u32).collect();
        for positions in [None, Some(&picked[..])] {
            let key = |i: usize| {
                let position = positions.map_or(i, |positions| positions[i] as usize);
                &rows[position * width * 16..][..width * 16]
            };
            let stride = keys + 3;
            let mut want = vec![7.5; heads * stride];
            for (h, query) in queries.chunks_exact(width * 16).enumerate() {
                for (i, at) in range.clone().enumerate() {
                    want[h * stride + i] = naive_dot(query, key(at)) * 0.3;
                }
            }
            for arithmetic in available() {
                let mut scores = vec![7.5; heads * stride];
                arithmetic.run(Scores {
                    queries: chunks(&queries),
                    keys: Keys { rows: chunks(&rows), chunks: width, positions },
                    range: range.clone(),
                    scale: 0.3,
                    scores: &mut scores,
                    stride,
                    prefetch: keys % 2 == 0,
                    scratch: &mut scratch,
                });
                let isa = arithmetic.isa();
                let case =
                    format!("seed {seed}: {heads} heads, {width} chunks, {range:?} on {isa}");
                assert_same_bits(&scores, &want, &case);
            }
        }
    }
}

#[test]
fn mixes_add_the_keys_ascending() {
    let (mut random, seed) = Random::new("mix");
    for ([heads, width, keys], range) in ATTENTION_SHAPES {
        let stride = keys + 3;
        let (weights, rows) = (random.floats(heads * stride), random.floats(keys * width * 16));
        let picked: Vec<u32> = (0..keys).map(|_| random.below(keys) as u32).collect();
        // Only the first chunks of a key are mixed.
        let mixed = width.div_ceil(2);
        let before = random.floats(heads * mixed * 16);
        for positions in [None, Some(&picked[..])] {
            let mut want = before.clone();
            for (at, sum) in want.iter_mut().enumerate() {
                let (h, column) = (at / (mixed * 16), at % (mixed * 16));
                for (i, at) in range.clone().enumerate() {
                    let position = positions.map_or(at, |positions| positions[at] as usize);
                    let value = rows[position * width * 16 + column];
                    *sum = weights[h * stride + i].mul_add(value, *sum);
                }
            }
            for arithmetic in available() {
                let mut out = chunks(&before).to_vec();
                arithmetic.run(Mix {
                    weights: &weights,
                    stride,
                    keys: Keys { rows: chunks(&rows), chunks: width, positions },
                    range: range.clone(),
                    out: &mut out,
                    chunks: mixed,
                });
                let isa = arithmetic.isa();
                let case =
                    format!("seed {seed}: {heads} heads, {width} chunks, {range:?} on {isa}");
                assert_same_bits(out.as_flattened(), &want, &case);
            }
        }
    }
}

/// Weights, factors of what came before, and sum of a softmax in blocks.
fn softmax_blocks(arithmetic: Arithmetic, scores: &[f32]) -> Vec<f32> {
    let (mut out, mut softmaxes) = (Vec::new(), [RunningSoftmax::EMPTY]);
    for block in scores.chunks(KEYS) {
        let (mut scores, mut mixed) = ([7.5; KEYS], [[1.0; 16]]);
        scores[..block.len()].copy_from_slice(block);
        let (count, softmaxes) = (block.len(), &mut softmaxes[..]);
        arithmetic.run(SoftmaxBlock { scores: &mut scores, count, softmaxes, mixed: &mut mixed });
        out.extend_from_slice(&scores);
        out.extend_from_slice(&mixed[0]);
    }
    out.extend([softmaxes[0].max, softmaxes[0].sum]);
    out
}

/// What each elementwise kernel makes of the same two rows of random data.
fn elementwise(arithmetic: Arithmetic, a: &[f32], b: &[f32]) -> [(&'static str, Vec<f32>); 6] {
    let n = a.len();
    let (mut gate, mut norm) = (a.to_vec(), vec![0.0; n]);
    let (mut sigmoid, mut axpy, mut index) = (a.to_vec(), b.to_vec(), vec![7.5; n]);
    let softmax = softmax_blocks(arithmetic, b);
    arithmetic.run(Gate { gate: &mut gate, up: b });
    arithmetic.run(Norm { x: a, weight: b, eps: 1e-5, out: &mut norm });
    arithmetic.run(Sigmoid { x: &mut sigmoid });
    arithmetic.run(Axpy { a: b[0], x: a, y: &mut axpy });
    let dots = [a, b].concat();
    let weights = [a[0], -b[n - 1]];
    arithmetic.run(IndexScores { dots: &dots, stride: n, weights: &weights, scores: &mut index });
    [
        ("softmax", softmax),
        ("gate", gate),
        ("norm", norm),
        ("sigmoid", sigmoid),
        ("axpy", axpy),
        ("index scores", index),
    ]
}

#[test]
fn elementwise_kernels_have_the_same_bits_with_and_without_vectors() {
    let (mut random, seed) = Random::new("elementwise");
    for n in (1..70).chain([127, 128, 129, 513, 2048]) {
        let (a, b) = (random.floats(n), random.floats(n));
        let want = elementwise(Arithmetic::new(Isa::Scalar), &a, &b);
        for arithmetic in available() {
            let got = elementwise(arithmetic, &a, &b);
            for ((name, got), (_, want)) in got.iter().zip(&want) {
                let isa = arithmetic.isa();
                assert_same_bits(got, want, &format!("seed {seed}: {name} of {n} on {isa}"));
            }
        }
    }
}

#[track_caller]
fn assert_none_is_finite(values: &[f32], case: &str) {
    let finite = values.iter().position(|value| value.is_finite());
    assert!(finite.is_none(), "{case}: element {finite:?} is {:?}", finite.map(|i| values[i]));
}

#[test]
fn an_activation_that_is_not_finite_spoils_every_product_with_it() {
    let (mut random, seed) = Random::new("not finite");
    let mut scratch = Scratch::default();
    for (format, cols) in formats().flat_map(|f| [1, 100, 128, 300].map(|cols| (f, cols))) {
        let stored = Stored::new(&mut random, format, 6, cols);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for count in [1, 3] {
                let mut x = random.floats(count * cols);
                let at = random.below(cols);
                x[at] = bad;
                let tokens: Vec<u32> = (0..count as u32).collect();
                for arithmetic in available() {
                    let inputs = (&x[..], &tokens[..], false);
                    let y = product(arithmetic, stored.encoded(), 0..6, inputs, &mut scratch);
                    let isa = arithmetic.isa();
                    let case =
                        format!("seed {seed}: {format}, {bad} in column {at} of {cols}, {isa}");
                    assert_none_is_finite(&y[..6], &case);
                    assert!(y[6..].iter().all(|y| y.is_finite()), "{case}: another token");
                }
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_stay_visible_in_every_other_kernel() {
    let (mut random, seed) = Random::new("not finite");
    for arithmetic in available() {
        for (bad, at) in [f32::NAN, f32::INFINITY].into_iter().flat_map(|b| [(b, 0), (b, 20)]) {
            let case =
                |name: &str| format!("seed {seed}: {name}, {bad} at {at}, {}", arithmetic.isa());
            let (one, mut x) = ([1.0; 37], random.floats(37));
            x[at] = bad;
            let sum = softmax_blocks(arithmetic, &[&x[..], &one].concat()).pop();
            assert_none_is_finite(&[sum.unwrap()], &case("softmax"));
            let mut out = [0.0; 37];
            arithmetic.run(Norm { x: &x, weight: &one, eps: 1e-5, out: &mut out });
            assert_none_is_finite(&out, &case("norm"));
            for sign in [1.0, -1.0] {
                let mut gate = x.iter().map(|x| x * sign).collect::<Vec<_>>();
                arithmetic.run(Gate { gate: &mut gate, up: &one });
                assert_none_is_finite(&gate[at..=at], &case("gate"));
                let dots: Vec<f32> = x.iter().map(|x| x * sign).collect();
                arithmetic.run(IndexScores {
                    dots: &dots,
                    stride: 37,
                    weights: &[1.0],
                    scores: &mut out,
                });
                assert_none_is_finite(&out[at..=at], &case("index scores"));
            }
        }
    }
}
