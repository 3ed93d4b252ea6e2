//! Sixteen lanes of f32 or i32 behind one trait, so that every kernel is written once and instantiated per instruction set.
//!
//! Lanes are independent except in `tree16` and `max16`, whose orders are written down; every method rounds as the scalar
//! operation of docs/arithmetic.md does. A kernel is a generic `#[inline(always)]` function that `dispatch!` compiles inside a
//! function with the right target features. Nothing outside `dispatch!` may instantiate a kernel: that is what makes the safe
//! methods of this trait sound.

/// Vectors of sixteen lanes.
pub trait Simd: Copy + 'static {
    /// 16 × f32.
    type F: Copy;
    /// 16 × i32, or 64 bytes.
    type I: Copy;

    fn splat(x: f32) -> Self::F;
    /// Reads 16 floats. # Safety: 64 readable bytes at `p`.
    unsafe fn load(p: *const f32) -> Self::F;
    /// Writes 16 floats. # Safety: 64 writable bytes at `p`.
    unsafe fn store(p: *mut f32, v: Self::F);
    fn add(a: Self::F, b: Self::F) -> Self::F;
    fn sub(a: Self::F, b: Self::F) -> Self::F;
    fn mul(a: Self::F, b: Self::F) -> Self::F;
    fn div(a: Self::F, b: Self::F) -> Self::F;
    /// a·b + c, rounded once.
    fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// c − a·b, rounded once.
    fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger; b when either is not a number.
    fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; b when either is not a number.
    fn min(a: Self::F, b: Self::F) -> Self::F;
    fn abs(a: Self::F) -> Self::F;
    /// Round to nearest, ties to even.
    fn round(a: Self::F) -> Self::F;
    /// 2^n for integral n in −126..=127.
    fn pow2(n: Self::F) -> Self::F;
    fn to_f32(a: Self::I) -> Self::F;
    /// Lanes below `n` of `v`, the others of `fill`.
    fn first(n: usize, v: Self::F, fill: Self::F) -> Self::F;
    /// Halves 8, 4, 2, 1: lane d = lane d + lane d+h.
    fn tree16(v: Self::F) -> f32;
    fn max16(v: Self::F) -> f32;

    /// Reads 16 i8 as f32. # Safety: 16 readable bytes at `p`.
    unsafe fn load_i8(p: *const u8) -> Self::F;
    /// Reads 16 IEEE halves. # Safety: 32 readable bytes at `p`.
    unsafe fn load_f16(p: *const u8) -> Self::F;
    /// Reads 16 bfloat16. # Safety: 32 readable bytes at `p`.
    unsafe fn load_bf16(p: *const u8) -> Self::F;
    /// Writes 16 integral values in −127..=127 as i8. # Safety: 16 writable bytes at `p`.
    unsafe fn store_i8(p: *mut i8, v: Self::F);

    /// Asks for the cache line at `p`, which need not exist.
    fn prefetch(p: *const u8);
    fn isplat(x: i32) -> Self::I;
    /// Reads 64 bytes. # Safety: 64 readable bytes at `p`.
    unsafe fn iload(p: *const u8) -> Self::I;
    /// Arithmetic shift right by 4 of every i32.
    fn ishr4(a: Self::I) -> Self::I;
    /// Byte & 15.
    fn low_nibbles(a: Self::I) -> Self::I;
    /// Byte >> 4.
    fn high_nibbles(a: Self::I) -> Self::I;
    /// acc + Σ of four products: bytes of a lane of `w` (0..=255) times the four i8 of `x` (−127..=127). Exact.
    fn dot4(acc: Self::I, w: Self::I, x: i32) -> Self::I;
    /// The same for bytes of at most 15.
    fn dot4_nibbles(acc: Self::I, w: Self::I, x: i32) -> Self::I;
}

/// The scalar path: plain arrays. The compiler may vectorise it; that moves no bit.
#[derive(Clone, Copy)]
pub struct Scalar;

#[inline(always)]
fn map(a: [f32; 16], f: impl Fn(f32) -> f32) -> [f32; 16] {
    std::array::from_fn(|i| f(a[i]))
}

#[inline(always)]
fn zip(a: [f32; 16], b: [f32; 16], f: impl Fn(f32, f32) -> f32) -> [f32; 16] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Scalar {
    type F = [f32; 16];
    type I = [i32; 16];

    #[inline(always)]
    fn splat(x: f32) -> Self::F {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the caller grants 64 readable bytes.
        unsafe { p.cast::<[f32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::F) {
        // SAFETY: the caller grants 64 writable bytes.
        unsafe { p.cast::<[f32; 16]>().write_unaligned(v) }
    }
    #[inline(always)]
    fn add(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| (-a[i]).mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(a: Self::F) -> Self::F {
        map(a, f32::abs)
    }
    #[inline(always)]
    fn round(a: Self::F) -> Self::F {
        map(a, f32::round_ties_even)
    }
    #[inline(always)]
    fn pow2(n: Self::F) -> Self::F {
        map(n, |n| f32::from_bits((((n as i32) + 127) as u32) << 23))
    }
    #[inline(always)]
    fn to_f32(a: Self::I) -> Self::F {
        std::array::from_fn(|i| a[i] as f32)
    }
    #[inline(always)]
    fn first(n: usize, v: Self::F, fill: Self::F) -> Self::F {
        std::array::from_fn(|i| if i < n { v[i] } else { fill[i] })
    }
    #[inline(always)]
    fn tree16(v: Self::F) -> f32 {
        let mut a = v;
        for h in [8, 4, 2, 1] {
            for d in 0..h {
                a[d] += a[d + h];
            }
        }
        a[0]
    }
    #[inline(always)]
    fn max16(v: Self::F) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m })
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::F {
        // SAFETY: the caller grants 16 readable bytes.
        let bytes = unsafe { p.cast::<[i8; 16]>().read_unaligned() };
        bytes.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        // SAFETY: the caller grants 32 readable bytes.
        let halves = unsafe { p.cast::<[u16; 16]>().read_unaligned() };
        halves.map(|h| half::f16::from_bits(u16::from_le(h)).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        // SAFETY: the caller grants 32 readable bytes.
        let halves = unsafe { p.cast::<[u16; 16]>().read_unaligned() };
        halves.map(|h| f32::from_bits(u32::from(u16::from_le(h)) << 16))
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: Self::F) {
        // SAFETY: the caller grants 16 writable bytes.
        unsafe { p.cast::<[i8; 16]>().write_unaligned(v.map(|x| x as i8)) }
    }
    #[inline(always)]
    fn prefetch(_p: *const u8) {}
    #[inline(always)]
    fn isplat(x: i32) -> Self::I {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn iload(p: *const u8) -> Self::I {
        // SAFETY: the caller grants 64 readable bytes.
        unsafe { p.cast::<[i32; 16]>().read_unaligned() }.map(i32::from_le)
    }
    #[inline(always)]
    fn ishr4(a: Self::I) -> Self::I {
        a.map(|x| x >> 4)
    }
    #[inline(always)]
    fn low_nibbles(a: Self::I) -> Self::I {
        a.map(|x| x & 0x0f0f_0f0f)
    }
    #[inline(always)]
    fn high_nibbles(a: Self::I) -> Self::I {
        a.map(|x| (x >> 4) & 0x0f0f_0f0f)
    }
    #[inline(always)]
    fn dot4(acc: Self::I, w: Self::I, x: i32) -> Self::I {
        let x = x.to_le_bytes().map(|b| i32::from(b as i8));
        std::array::from_fn(|i| {
            let w = w[i].to_le_bytes().map(i32::from);
            acc[i] + w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3]
        })
    }
    #[inline(always)]
    fn dot4_nibbles(acc: Self::I, w: Self::I, x: i32) -> Self::I {
        Self::dot4(acc, w, x)
    }
}

/// exp_c on sixteen lanes: the steps of `arith::exp_c`, one by one.
#[inline(always)]
pub fn exp<S: Simd>(x: S::F) -> S::F {
    use crate::arith::exp::*;
    let s = S::splat;
    let x = S::min(s(EXP_MAX), S::max(s(EXP_MIN), x));
    let n = S::round(S::mul(x, s(LOG2_E)));
    let h = S::fnma(n, s(LN2_HI), x);
    let r = S::fnma(n, s(LN2_LO), h);
    let q = S::fma(S::fma(S::fma(S::fma(s(C6), r, s(C5)), r, s(C4)), r, s(C3)), r, s(C2));
    let tail = S::fnma(n, s(LN2_LO), S::mul(q, S::mul(r, r)));
    let e = S::add(S::add(h, tail), s(1.0));
    S::mul(e, S::pow2(n))
}
