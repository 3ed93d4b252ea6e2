//! Sixteen lanes in one AVX-512 register, byte dot products by VNNI.

use std::arch::x86_64::*;

use super::simd::Simd;

/// AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy)]
pub struct Avx512;

// Values-only intrinsics are safe once the features are there: `dispatch!` instantiates this type only where detection found them.
impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;

    #[inline(always)]
    fn splat(x: f32) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn fnma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn abs(a: __m512) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_abs_ps(a) }
    }
    #[inline(always)]
    fn round(a: __m512) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    fn pow2(n: __m512) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe {
            let n = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(n))
        }
    }
    #[inline(always)]
    fn to_f32(a: __m512i) -> __m512 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    fn first(n: usize, v: __m512, fill: __m512) -> __m512 {
        let mask = if n >= 16 { u16::MAX } else { (1u16 << n) - 1 };
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_mask_mov_ps(fill, mask, v) }
    }
    #[inline(always)]
    fn tree16(v: __m512) -> f32 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe {
            let a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }
    }
    #[inline(always)]
    fn max16(v: __m512) -> f32 {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_reduce_max_ps(v) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> __m512 {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m512 {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m512 {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: __m512) {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v))) }
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a prefetch reads nothing that the program sees: any address will do.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    fn isplat(x: i32) -> __m512i {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn iload(p: *const u8) -> __m512i {
        // SAFETY: the caller grants the memory behind the pointer, as `Simd` says; detection found the features.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    fn ishr4(a: __m512i) -> __m512i {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_srai_epi32::<4>(a) }
    }
    #[inline(always)]
    fn low_nibbles(a: __m512i) -> __m512i {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_and_si512(a, _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    fn high_nibbles(a: __m512i) -> __m512i {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(a), _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    fn dot4(acc: __m512i, w: __m512i, x: i32) -> __m512i {
        // SAFETY: detection found AVX-512 with VNNI; no memory is touched.
        unsafe { _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x)) }
    }
    #[inline(always)]
    fn dot4_nibbles(acc: __m512i, w: __m512i, x: i32) -> __m512i {
        Self::dot4(acc, w, x)
    }
}
