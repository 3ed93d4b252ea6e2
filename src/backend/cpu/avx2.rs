//! Sixteen lanes in two AVX2 registers, byte dot products by widening to 16 bits.

use std::arch::x86_64::*;

use super::simd::Simd;

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub struct Avx2;

// Values-only intrinsics are safe once the features are there: `dispatch!` instantiates this type only where detection found them.
impl Simd for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];

    #[inline(always)]
    fn splat(x: f32) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::F) {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    fn add(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn sub(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn mul(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn div(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe { [_mm256_fnmadd_ps(a[0], b[0], c[0]), _mm256_fnmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    fn max(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn min(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn abs(a: Self::F) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
        }
    }
    #[inline(always)]
    fn round(a: Self::F) -> Self::F {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe { [_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])] }
    }
    #[inline(always)]
    fn pow2(n: Self::F) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        n.map(|n| unsafe {
            let n = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
        })
    }
    #[inline(always)]
    fn to_f32(a: Self::I) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe { [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])] }
    }
    #[inline(always)]
    fn first(n: usize, v: Self::F, fill: Self::F) -> Self::F {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe {
            let limit = _mm256_set1_epi32(n.min(16) as i32);
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let low = _mm256_cmpgt_epi32(limit, lane);
            let high = _mm256_cmpgt_epi32(limit, _mm256_add_epi32(lane, _mm256_set1_epi32(8)));
            [
                _mm256_blendv_ps(fill[0], v[0], _mm256_castsi256_ps(low)),
                _mm256_blendv_ps(fill[1], v[1], _mm256_castsi256_ps(high)),
            ]
        }
    }
    #[inline(always)]
    fn tree16(v: Self::F) -> f32 {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe {
            let a = _mm256_add_ps(v[0], v[1]);
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }
    }
    #[inline(always)]
    fn max16(v: Self::F) -> f32 {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe {
            let a = _mm256_max_ps(v[0], v[1]);
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::F {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe {
            let bytes = _mm_loadu_si128(p.cast());
            let low = _mm256_cvtepi8_epi32(bytes);
            let high = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast()))] }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        let widen = |p: *const u8| unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        };
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe { [widen(p), widen(p.add(16))] }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: Self::F) {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe {
            let (low, high) = (_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
            // packs works inside 128-bit halves: words come out as low[0..4] high[0..4] low[4..8] high[4..8].
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(p.cast(), bytes);
        }
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a prefetch reads nothing that the program sees: any address will do.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    fn isplat(x: i32) -> Self::I {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        unsafe { [_mm256_set1_epi32(x); 2] }
    }
    #[inline(always)]
    unsafe fn iload(p: *const u8) -> Self::I {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())] }
    }
    #[inline(always)]
    fn ishr4(a: Self::I) -> Self::I {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        a.map(|a| unsafe { _mm256_srai_epi32::<4>(a) })
    }
    #[inline(always)]
    fn low_nibbles(a: Self::I) -> Self::I {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        a.map(|a| unsafe { _mm256_and_si256(a, _mm256_set1_epi8(15)) })
    }
    #[inline(always)]
    fn high_nibbles(a: Self::I) -> Self::I {
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        a.map(|a| unsafe { _mm256_and_si256(_mm256_srli_epi16::<4>(a), _mm256_set1_epi8(15)) })
    }
    #[inline(always)]
    fn dot4(acc: Self::I, w: Self::I, x: i32) -> Self::I {
        // Bytes widen to 16 bits, so that 255·127·2 cannot saturate; hadd joins the two halves of each lane, in lane order.
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        let one = |acc: __m256i, w: __m256i| unsafe {
            let zero = _mm256_setzero_si256();
            let x = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(x)));
            let low = _mm256_madd_epi16(_mm256_unpacklo_epi8(w, zero), x);
            let high = _mm256_madd_epi16(_mm256_unpackhi_epi8(w, zero), x);
            _mm256_add_epi32(acc, _mm256_hadd_epi32(low, high))
        };
        [one(acc[0], w[0]), one(acc[1], w[1])]
    }
    #[inline(always)]
    fn dot4_nibbles(acc: Self::I, w: Self::I, x: i32) -> Self::I {
        // 15·127·2 fits 16 bits: the saturating byte product is exact.
        // SAFETY: detection found AVX2, FMA and F16C; no memory is touched.
        let one = |acc: __m256i, w: __m256i| unsafe {
            let pairs = _mm256_maddubs_epi16(w, _mm256_set1_epi32(x));
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        };
        [one(acc[0], w[0]), one(acc[1], w[1])]
    }
}
