//! AVX2 with FMA and F16C: two registers hold the 16 lanes, the lower eight first.

#![allow(unsafe_code)]

use super::Kernel;
use super::scalar::LANES;
use super::simd::Simd;
use crate::cpu::Isa;
use crate::float::f32_at;
use std::arch::x86_64::*;

/// Proof that this processor has the instructions: only [`Avx2::detect`] makes one.
#[derive(Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// The token, on processors that have everything used here.
    pub fn detect() -> Option<Avx2> {
        Isa::Avx2.missing_feature().is_none().then_some(Avx2(()))
    }
}

/// Compiles `kernel` with the instructions of this file.
///
/// # Safety
/// The processor has them.
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: callers hold the token.
unsafe fn run<K: Kernel>(token: Avx2, kernel: K) -> K::Output {
    kernel.vector(token)
}

/// Evaluates an intrinsic or several.
macro_rules! intrinsics {
    ($($body:tt)*) => {
        // SAFETY: `self` exists only where detection found these instructions; loads and stores
        // go to references of exactly the size that they touch, with no alignment asked for.
        unsafe { $($body)* }
    };
}

/// Applies an intrinsic of one or two operands to both registers.
macro_rules! both {
    ($intrinsic:ident, $a:expr) => {
        intrinsics!([$intrinsic($a[0]), $intrinsic($a[1])])
    };
    ($intrinsic:ident, $a:expr, $b:expr) => {
        intrinsics!([$intrinsic($a[0], $b[0]), $intrinsic($a[1], $b[1])])
    };
}

impl Simd for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    const WIDE: bool = false;

    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        intrinsics!(run(self, kernel))
    }
    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        intrinsics!(_mm_prefetch::<_MM_HINT_T1>(address.cast()))
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        intrinsics!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F {
        intrinsics!([_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x[8..].as_ptr())])
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> Self::I {
        intrinsics!([
            _mm256_loadu_si256(x.as_ptr().cast()),
            _mm256_loadu_si256(x[32..].as_ptr().cast())
        ])
    }
    #[inline(always)]
    fn store(self, x: Self::F, out: &mut [f32; LANES]) {
        intrinsics!(
            _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(out[8..].as_mut_ptr(), x[1])
        )
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        intrinsics!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }
    #[inline(always)]
    fn lane_sums(self, x: [Self::F; 4]) -> [f32; 4] {
        intrinsics!(
            let [a, b] = [_mm256_add_ps(x[0][0], x[0][1]), _mm256_add_ps(x[1][0], x[1][1])];
            let [c, d] = [_mm256_add_ps(x[2][0], x[2][1]), _mm256_add_ps(x[3][0], x[3][1])];
            let fold4 = |x, y| {
                let low = _mm256_permute2f128_ps::<0x20>(x, y);
                _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(x, y))
            };
            let fold = |x| {
                let by2 = _mm256_add_ps(x, _mm256_permute_ps::<0x4e>(x));
                _mm256_add_ps(by2, _mm256_permute_ps::<0xb1>(by2))
            };
            let mut lanes = [0.0; LANES];
            _mm256_storeu_ps(lanes.as_mut_ptr(), fold(fold4(a, b)));
            _mm256_storeu_ps(lanes[8..].as_mut_ptr(), fold(fold4(c, d)));
            [lanes[0], lanes[4], lanes[8], lanes[12]]
        )
    }
    #[inline(always)]
    fn splat_pair(self, pair: &[u8; 8]) -> Self::F {
        let half = |i: usize| f32_at(pair, i);
        intrinsics!([_mm256_set1_ps(half(0)), _mm256_set1_ps(half(1))])
    }
    #[inline(always)]
    fn pick(self, table: &[u8; 32], index: &[u32; LANES]) -> Self::F {
        intrinsics!(
            let table = _mm256_loadu_ps(table.as_ptr().cast());
            let low = _mm256_loadu_si256(index.as_ptr().cast());
            let high = _mm256_loadu_si256(index[8..].as_ptr().cast());
            [_mm256_permutevar8x32_ps(table, low), _mm256_permutevar8x32_ps(table, high)]
        )
    }
    #[inline(always)]
    fn halves(self, x: &[u8; 32]) -> Self::F {
        intrinsics!([
            _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(x[16..].as_ptr().cast()))
        ])
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        intrinsics!([_mm256_set1_epi32(x); 2])
    }
    #[inline(always)]
    fn load_i(self, x: &[i32; LANES]) -> Self::I {
        intrinsics!([
            _mm256_loadu_si256(x.as_ptr().cast()),
            _mm256_loadu_si256(x[8..].as_ptr().cast())
        ])
    }
    #[inline(always)]
    fn load_w(self, x: &[i16; 32]) -> Self::I {
        intrinsics!([
            _mm256_loadu_si256(x.as_ptr().cast()),
            _mm256_loadu_si256(x[16..].as_ptr().cast())
        ])
    }
    #[inline(always)]
    fn store_w(self, x: Self::I, out: &mut [i16; 32]) {
        intrinsics!(
            _mm256_storeu_si256(out.as_mut_ptr().cast(), x[0]);
            _mm256_storeu_si256(out[16..].as_mut_ptr().cast(), x[1])
        )
    }
    #[inline(always)]
    fn widen_i8(self, x: &[u8; 32]) -> Self::I {
        intrinsics!([
            _mm256_cvtepi8_epi16(_mm_loadu_si128(x.as_ptr().cast())),
            _mm256_cvtepi8_epi16(_mm_loadu_si128(x[16..].as_ptr().cast()))
        ])
    }
    #[inline(always)]
    fn widen_u16(self, low: &[u8; 16], high: &[u8; 16]) -> Self::I {
        intrinsics!([
            _mm256_cvtepu16_epi32(_mm_loadu_si128(low.as_ptr().cast())),
            _mm256_cvtepu16_epi32(_mm_loadu_si128(high.as_ptr().cast()))
        ])
    }
    #[inline(always)]
    fn widen_u8(self, low: &[u8; 8], high: &[u8; 8]) -> Self::I {
        intrinsics!([
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(low.as_ptr().cast())),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(high.as_ptr().cast()))
        ])
    }
    #[inline(always)]
    fn shl(self, x: Self::I, bits: u32) -> Self::I {
        let bits = self.splat_i(bits as i32);
        both!(_mm256_sllv_epi32, x, bits)
    }
    #[inline(always)]
    fn shr(self, x: Self::I, bits: u32) -> Self::I {
        let bits = self.splat_i(bits as i32);
        both!(_mm256_srlv_epi32, x, bits)
    }
    #[inline(always)]
    fn sar(self, x: Self::I, bits: u32) -> Self::I {
        let bits = self.splat_i(bits as i32);
        both!(_mm256_srav_epi32, x, bits)
    }
    #[inline(always)]
    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_and_si256, a, b)
    }
    #[inline(always)]
    fn or(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_or_si256, a, b)
    }
    #[inline(always)]
    fn equal(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_cmpeq_epi32, a, b)
    }
    #[inline(always)]
    fn sub_w(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_sub_epi16, a, b)
    }
    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_add_epi32, a, b)
    }
    #[inline(always)]
    fn dot_pairs(self, sum: Self::I, a: Self::I, b: Self::I) -> Self::I {
        let pairs = both!(_mm256_madd_epi16, a, b);
        both!(_mm256_add_epi32, sum, pairs)
    }
    #[inline(always)]
    fn dot_codes(
        self,
        sum: Self::I,
        codes: [Self::I; 2],
        upper: [Self::I; 2],
        lower: [Self::I; 2],
    ) -> Self::I {
        // Four products of at most 31 · 255 that share a word fit it.
        let even = both!(_mm256_maddubs_epi16, codes[0], upper[0]);
        let odd = both!(_mm256_maddubs_epi16, codes[1], upper[1]);
        let uppers = both!(_mm256_add_epi16, even, odd);
        let even = both!(_mm256_maddubs_epi16, lower[0], codes[0]);
        let odd = both!(_mm256_maddubs_epi16, lower[1], codes[1]);
        let lowers = both!(_mm256_add_epi16, even, odd);
        let sum = self.dot_pairs(sum, lowers, intrinsics!([_mm256_set1_epi16(1); 2]));
        self.dot_pairs(sum, uppers, intrinsics!([_mm256_set1_epi16(256); 2]))
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], index: Self::I) -> Self::I {
        let table =
            intrinsics!([_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())); 2]);
        both!(_mm256_shuffle_epi8, table, index)
    }
    #[inline(always)]
    fn nibbles(self, x: Self::I) -> [Self::F; 8] {
        // With the upper bit flipped, four bits less 8 are four bits with a sign.
        let x = both!(_mm256_xor_si256, x, self.splat_i(0x8888_8888u32 as i32));
        let mut values = [self.splat(0.0); 8];
        for (c, value) in values.iter_mut().enumerate() {
            *value = self.to_f(self.sar(self.shl(x, 28 - 4 * c as u32), 28));
        }
        values
    }
    #[inline(always)]
    fn to_f(self, x: Self::I) -> Self::F {
        both!(_mm256_cvtepi32_ps, x)
    }
    #[inline(always)]
    fn cast_f(self, x: Self::I) -> Self::F {
        both!(_mm256_castsi256_ps, x)
    }
    #[inline(always)]
    fn cast_i(self, x: Self::F) -> Self::I {
        both!(_mm256_castps_si256, x)
    }
}
