//! What the processor can do at most, with the instructions that the products use: the limits
//! that a benchmark compares with. Results are returned, so that no work can be left out.

#![forbid(unsafe_code)]

use super::Kernel;
use super::scalar::LANES;
use super::simd::Simd;

/// Sums in flight, as squares of 4 × 3: more than latency × throughput of a multiply-add on any
/// processor known, and few enough for the registers of all but AVX2.
const SUMS: usize = 12;

/// Operands of the register loops, in the first cache level: read anew in every step, so that no
/// product can be taken out of the loop.
const OPERANDS: usize = 16;

/// Reads all of `bytes` once, in order, asking for memory ahead.
pub struct Read<'a> {
    /// Memory of a multiple of 256 bytes.
    pub bytes: &'a [u8],
    /// How far ahead of its use memory is asked for.
    pub ahead_bytes: usize,
}

impl Kernel for Read<'_> {
    type Output = i32;

    fn scalar(self) -> i32 {
        let (words, _) = self.bytes.as_chunks::<8>();
        words.iter().fold(0, |or, word| or | u64::from_le_bytes(*word)) as i32
    }

    #[inline(always)]
    fn vector<S: Simd>(self, simd: S) -> i32 {
        let mut or = [simd.splat_i(0); 4];
        for group in self.bytes.chunks_exact(256) {
            for (or, line) in or.iter_mut().zip(group.as_chunks::<64>().0) {
                simd.prefetch(line.as_ptr().wrapping_add(self.ahead_bytes));
                *or = simd.or(*or, simd.load_bytes(line));
            }
        }
        let all = simd.or(simd.or(or[0], or[1]), simd.or(or[2], or[3]));
        all_lanes(simd, simd.to_f(all))
    }
}

/// Something that depends on every lane.
#[inline(always)]
fn all_lanes<S: Simd>(simd: S, x: S::F) -> i32 {
    simd.lane_sums([x; 4])[0] as i32
}

/// `steps` × [`MultiplyAdd16::MACS`] multiply-adds of 16-bit integers, from registers only.
pub struct MultiplyAdd16 {
    /// Repetitions.
    pub steps: usize,
}

impl MultiplyAdd16 {
    /// Multiply-adds of one step.
    pub const MACS: usize = SUMS * 2 * LANES;
}

impl Kernel for MultiplyAdd16 {
    type Output = i32;

    fn scalar(self) -> i32 {
        let operands = [[3i16; 2 * LANES]; OPERANDS];
        let mut sums = [[0i32; LANES]; SUMS];
        for step in 0..self.steps {
            for (i, sums) in sums.iter_mut().enumerate() {
                let (x, y) = (&operands[(step + i / 3) % OPERANDS], &operands[(step + i % 3) % 16]);
                for l in 0..LANES {
                    sums[l] += x[2 * l] as i32 * y[2 * l] as i32;
                    sums[l] += x[2 * l + 1] as i32 * y[2 * l + 1] as i32;
                }
            }
        }
        sums.as_flattened().iter().fold(0, |or, sum| or | sum)
    }

    #[inline(always)]
    fn vector<S: Simd>(self, simd: S) -> i32 {
        // Half the squares at a time where registers are few.
        match S::WIDE {
            true => multiply_add_16::<S, 4>(simd, self.steps),
            false => multiply_add_16::<S, 2>(simd, 2 * self.steps),
        }
    }
}

#[inline(always)]
fn multiply_add_16<S: Simd, const R: usize>(simd: S, steps: usize) -> i32 {
    let operands = std::hint::black_box([[3i16; 2 * LANES]; OPERANDS]);
    let mut sums = [[simd.splat_i(0); 3]; R];
    for step in 0..steps {
        let mut x = [simd.splat_i(0); 3];
        for (t, x) in x.iter_mut().enumerate() {
            *x = simd.load_w(&operands[(step + t) % OPERANDS]);
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            let w = simd.load_w(&operands[(step + 3 + r) % OPERANDS]);
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum = simd.dot_pairs(*sum, w, x);
            }
        }
    }
    let mut all = simd.splat_i(0);
    for sum in sums.as_flattened() {
        all = simd.or(all, *sum);
    }
    all_lanes(simd, simd.to_f(all))
}

/// `steps` × [`MultiplyAdd32::FLOPS`] operations of fused multiply-add, from registers only.
pub struct MultiplyAdd32 {
    /// Repetitions.
    pub steps: usize,
}

impl MultiplyAdd32 {
    /// Operations of one step: two per multiply-add.
    pub const FLOPS: usize = SUMS * 2 * LANES;
}

impl Kernel for MultiplyAdd32 {
    type Output = i32;

    fn scalar(self) -> i32 {
        let mut sums = [0.5f32; SUMS * LANES];
        for _ in 0..self.steps {
            sums.iter_mut().for_each(|sum| *sum = sum.mul_add(0.5, 0.25));
        }
        sums.iter().sum::<f32>() as i32
    }

    #[inline(always)]
    fn vector<S: Simd>(self, simd: S) -> i32 {
        match S::WIDE {
            true => multiply_add_32::<S, 4>(simd, self.steps),
            false => multiply_add_32::<S, 2>(simd, 2 * self.steps),
        }
    }
}

#[inline(always)]
fn multiply_add_32<S: Simd, const R: usize>(simd: S, steps: usize) -> i32 {
    let operands = std::hint::black_box([[0.5f32; LANES]; OPERANDS]);
    let mut sums = [[simd.splat(0.5); 3]; R];
    for step in 0..steps {
        let mut x = [simd.splat(0.0); 3];
        for (t, x) in x.iter_mut().enumerate() {
            *x = simd.load(&operands[(step + t) % OPERANDS]);
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            let w = simd.load(&operands[(step + 3 + r) % OPERANDS]);
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum = simd.fma(*sum, w, x);
            }
        }
    }
    let mut all = simd.splat(0.0);
    for sum in sums.as_flattened() {
        all = simd.add(all, *sum);
    }
    all_lanes(simd, all)
}
