//! AVX-512 (F, BW, DQ, VL) with VNNI: one register holds the 16 lanes.

#![allow(unsafe_code)]

use super::Kernel;
use super::scalar::LANES;
use super::simd::Simd;
use crate::cpu::Isa;
use std::arch::asm;
use std::arch::x86_64::*;

/// Proof that this processor has the instructions: only [`Avx512::detect`] makes one.
#[derive(Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// The token, on processors that have everything used here.
    pub fn detect() -> Option<Avx512> {
        Isa::Avx512.missing_feature().is_none().then_some(Avx512(()))
    }
}

/// Compiles `kernel` with the instructions of this file.
///
/// # Safety
/// The processor has them.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
// SAFETY: callers hold the token.
unsafe fn run<K: Kernel>(token: Avx512, kernel: K) -> K::Output {
    kernel.vector(token)
}

/// `_mm512_dpwssd_epi32`, as the one instruction: for a processor it does not know, the compiler
/// makes a multiplication and an addition of it, and products of many rows reach 0.48 of the
/// multiply-add peak instead of 0.59.
///
/// # Safety
/// The processor has AVX-512 F and VNNI.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
// SAFETY: callers hold the token.
unsafe fn multiply_add_words(mut sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the instruction reads and writes these registers and nothing else.
    unsafe {
        asm!(
            "vpdpwssd {sum}, {a}, {b}",
            sum = inout(zmm_reg) sum,
            a = in(zmm_reg) a,
            b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Four bits less 8.
const NIBBLES: [f32; LANES] =
    [-8., -7., -6., -5., -4., -3., -2., -1., 0., 1., 2., 3., 4., 5., 6., 7.];
/// Two 32-bit lanes that are 1.
const ONES: i64 = 1 << 32 | 1;

/// Evaluates an intrinsic or several.
macro_rules! intrinsics {
    ($($body:tt)*) => {
        // SAFETY: `self` exists only where detection found these instructions; loads and stores
        // go to references of exactly the size that they touch, with no alignment asked for.
        unsafe { $($body)* }
    };
}

impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    const WIDE: bool = true;

    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        intrinsics!(run(self, kernel))
    }
    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        intrinsics!(_mm_prefetch::<_MM_HINT_T1>(address.cast()))
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        intrinsics!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> __m512 {
        intrinsics!(_mm512_loadu_ps(x.as_ptr()))
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> __m512i {
        intrinsics!(_mm512_loadu_si512(x.as_ptr().cast()))
    }
    #[inline(always)]
    fn store(self, x: __m512, out: &mut [f32; LANES]) {
        intrinsics!(_mm512_storeu_ps(out.as_mut_ptr(), x))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsics!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn lane_sums(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        intrinsics!(
            // Quarters of registers: [a0 a1 b0 b1] + [a2 a3 b2 b3] is the step of 8.
            let fold8 = |x, y| {
                let low = _mm512_shuffle_f32x4::<0x44>(x, y);
                _mm512_add_ps(low, _mm512_shuffle_f32x4::<0xee>(x, y))
            };
            let (ab, cd) = (fold8(a, b), fold8(c, d));
            let low = _mm512_shuffle_f32x4::<0x88>(ab, cd);
            let by4 = _mm512_add_ps(low, _mm512_shuffle_f32x4::<0xdd>(ab, cd));
            let by2 = _mm512_add_ps(by4, _mm512_permute_ps::<0x4e>(by4));
            let by1 = _mm512_add_ps(by2, _mm512_permute_ps::<0xb1>(by2));
            let first_of_four = _mm512_maskz_compress_ps(0x1111, by1);
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(first_of_four));
            sums
        )
    }
    #[inline(always)]
    fn splat_pair(self, pair: &[u8; 8]) -> __m512 {
        intrinsics!(
            let pairs = _mm512_castpd_ps(_mm512_set1_pd(f64::from_le_bytes(*pair)));
            _mm512_permutevar_ps(pairs, _mm512_set_epi64(ONES, ONES, ONES, ONES, 0, 0, 0, 0))
        )
    }
    #[inline(always)]
    fn pick(self, table: &[u8; 32], index: &[u32; LANES]) -> __m512 {
        intrinsics!(
            let table = _mm512_castps256_ps512(_mm256_loadu_ps(table.as_ptr().cast()));
            _mm512_permutexvar_ps(_mm512_loadu_si512(index.as_ptr().cast()), table)
        )
    }
    #[inline(always)]
    fn halves(self, x: &[u8; 32]) -> __m512 {
        intrinsics!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> __m512i {
        intrinsics!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn load_i(self, x: &[i32; LANES]) -> __m512i {
        intrinsics!(_mm512_loadu_si512(x.as_ptr().cast()))
    }
    #[inline(always)]
    fn load_w(self, x: &[i16; 32]) -> __m512i {
        intrinsics!(_mm512_loadu_si512(x.as_ptr().cast()))
    }
    #[inline(always)]
    fn store_w(self, x: __m512i, out: &mut [i16; 32]) {
        intrinsics!(_mm512_storeu_si512(out.as_mut_ptr().cast(), x))
    }
    #[inline(always)]
    fn widen_i8(self, x: &[u8; 32]) -> __m512i {
        intrinsics!(_mm512_cvtepi8_epi16(_mm256_loadu_si256(x.as_ptr().cast())))
    }
    #[inline(always)]
    fn widen_u16(self, low: &[u8; 16], high: &[u8; 16]) -> __m512i {
        intrinsics!(
            let high = _mm_loadu_si128(high.as_ptr().cast());
            let low = _mm_loadu_si128(low.as_ptr().cast());
            _mm512_cvtepu16_epi32(_mm256_set_m128i(high, low))
        )
    }
    #[inline(always)]
    fn widen_u8(self, low: &[u8; 8], high: &[u8; 8]) -> __m512i {
        intrinsics!(
            let high = _mm_loadl_epi64(high.as_ptr().cast());
            let low = _mm_loadl_epi64(low.as_ptr().cast());
            _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(low, high))
        )
    }
    #[inline(always)]
    fn shl(self, x: __m512i, bits: u32) -> __m512i {
        intrinsics!(_mm512_sllv_epi32(x, _mm512_set1_epi32(bits as i32)))
    }
    #[inline(always)]
    fn shr(self, x: __m512i, bits: u32) -> __m512i {
        intrinsics!(_mm512_srlv_epi32(x, _mm512_set1_epi32(bits as i32)))
    }
    #[inline(always)]
    fn sar(self, x: __m512i, bits: u32) -> __m512i {
        intrinsics!(_mm512_srav_epi32(x, _mm512_set1_epi32(bits as i32)))
    }
    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsics!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsics!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn equal(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsics!(_mm512_movm_epi32(_mm512_cmpeq_epi32_mask(a, b)))
    }
    #[inline(always)]
    fn sub_w(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsics!(_mm512_sub_epi16(a, b))
    }
    #[inline(always)]
    fn add_i(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsics!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn dot_pairs(self, sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
        intrinsics!(multiply_add_words(sum, a, b))
    }
    #[inline(always)]
    fn dot_codes(
        self,
        sum: __m512i,
        codes: [__m512i; 2],
        upper: [__m512i; 2],
        lower: [__m512i; 2],
    ) -> __m512i {
        // Two chains, so that neither waits for the other.
        intrinsics!(
            let uppers = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes[0], upper[0]);
            let uppers = _mm512_dpbusd_epi32(uppers, codes[1], upper[1]);
            let lowers = _mm512_dpbusd_epi32(sum, lower[0], codes[0]);
            let lowers = _mm512_dpbusd_epi32(lowers, lower[1], codes[1]);
            _mm512_add_epi32(_mm512_slli_epi32::<8>(uppers), lowers)
        )
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], index: __m512i) -> __m512i {
        intrinsics!(
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, index)
        )
    }
    #[inline(always)]
    fn nibbles(self, x: __m512i) -> [__m512; 8] {
        // Only the lowest four bits of an index count.
        let value =
            |c: u32| intrinsics!(_mm512_permutexvar_ps(self.shr(x, 4 * c), self.load(&NIBBLES)));
        [value(0), value(1), value(2), value(3), value(4), value(5), value(6), value(7)]
    }
    #[inline(always)]
    fn to_f(self, x: __m512i) -> __m512 {
        intrinsics!(_mm512_cvtepi32_ps(x))
    }
    #[inline(always)]
    fn cast_f(self, x: __m512i) -> __m512 {
        intrinsics!(_mm512_castsi512_ps(x))
    }
    #[inline(always)]
    fn cast_i(self, x: __m512) -> __m512i {
        intrinsics!(_mm512_castps_si512(x))
    }
}
