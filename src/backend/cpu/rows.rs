//! Kernels over one token row: RMSNorm, activation quantisation, rotary embedding, SwiGLU, exp_c. Each gives the bits of its
//! scalar definition in `arith`.

use super::level::{Level, dispatch};
use super::simd::{Simd, exp};
use crate::arith::norm::rms_norm;
use crate::arith::quant::ACT_AMAX_MIN;
use crate::arith::reduce::combine_parts;
use crate::model::RopePairing;

/// One row in quantised form, where it goes. Slices of `[cols]`, `[cols/32]`.
pub struct QuantisedRow<'a> {
    /// i8.
    pub q: &'a mut [i8],
    /// da.
    pub d: &'a mut [f32],
    /// da·f32(asum).
    pub s: &'a mut [f32],
    /// −128·asum.
    pub excess: &'a mut [i32],
}

/// RMSNorm of `x` into `out`, all of one length.
pub fn norm_row(level: Level, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == w.len() && x.len() == out.len(), "the rows of a norm have one length");
    // SAFETY: slices; no other precondition.
    unsafe { norm(level, x, w, eps, out) }
}

/// Quantises `x`, whose length is a multiple of 32, by blocks.
pub fn quantise_row(level: Level, x: &[f32], out: QuantisedRow<'_>) {
    let blocks = x.len() / 32;
    let fits = x.len() == blocks * 32 && out.q.len() == x.len();
    assert!(fits && [out.d.len(), out.s.len(), out.excess.len()] == [blocks; 3], "a quantised row is whole blocks");
    // SAFETY: the lengths fit each other.
    unsafe { quantise(level, x, out) }
}

/// Rotates one head in place by its position's cos and sin, each `[head_dim / 2]`.
pub fn rotate(level: Level, x: &mut [f32], cos: &[f32], sin: &[f32], pairing: RopePairing) {
    assert!(x.len() == 2 * cos.len() && cos.len() == sin.len(), "a head has two components a pair");
    // SAFETY: slices; no other precondition.
    unsafe { rotary(level, x, cos, sin, pairing) }
}

/// gate = swiglu(gate, up), element by element; lengths are equal multiples of 16.
pub fn swiglu_rows(level: Level, gate: &mut [f32], up: &[f32]) {
    assert!(gate.len() == up.len() && gate.len().is_multiple_of(16), "gate and up have one length");
    // SAFETY: equal lengths in whole vectors.
    unsafe { swiglu(level, gate, up) }
}

/// x = exp_c((x − minus)·times), element by element.
pub fn exp_slice(level: Level, x: &mut [f32], minus: f32, times: f32) {
    // SAFETY: a slice; no other precondition.
    unsafe { exp_all(level, x, minus, times) }
}

dispatch! { unsafe fn norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) = norm_body }
dispatch! { unsafe fn quantise(x: &[f32], out: QuantisedRow<'_>) = quantise_body }
dispatch! { unsafe fn rotary(x: &mut [f32], cos: &[f32], sin: &[f32], pairing: RopePairing) = rotary_body }
dispatch! { unsafe fn swiglu(gate: &mut [f32], up: &[f32]) = swiglu_body }
dispatch! { unsafe fn exp_all(x: &mut [f32], minus: f32, times: f32) = exp_body }

#[inline(always)]
unsafe fn norm_body<S: Simd>(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    if !x.len().is_multiple_of(16) {
        return rms_norm(x, w, eps, out);
    }
    let mut part = [S::splat(0.0); 16];
    for (i, v) in x.chunks_exact(16).enumerate() {
        // SAFETY: a whole vector of `x`.
        let v = unsafe { S::load(v.as_ptr()) };
        part[i % 16] = S::fma(v, v, part[i % 16]);
    }
    let l = std::array::from_fn(|g| S::tree16(S::add(part[2 * g], part[2 * g + 1])));
    let mean = combine_parts(&l) / x.len() as f32;
    let r = S::splat(1.0 / (mean + eps).sqrt());
    for ((o, v), w) in out.chunks_exact_mut(16).zip(x.chunks_exact(16)).zip(w.chunks_exact(16)) {
        // SAFETY: whole vectors of the three rows.
        unsafe { S::store(o.as_mut_ptr(), S::mul(S::mul(S::load(v.as_ptr()), r), S::load(w.as_ptr()))) }
    }
}

#[inline(always)]
unsafe fn quantise_body<S: Simd>(x: &[f32], out: QuantisedRow<'_>) {
    let (low, high) = (S::splat(-127.0), S::splat(127.0));
    for (b, x) in x.chunks_exact(32).enumerate() {
        // SAFETY: two whole vectors of block b.
        let v = unsafe { [S::load(x.as_ptr()), S::load(x.as_ptr().add(16))] };
        let amax = S::max16(S::max(S::abs(v[0]), S::abs(v[1])));
        let (mut d, mut inverse) = (0.0, 0.0);
        if amax >= ACT_AMAX_MIN {
            (d, inverse) = (amax / 127.0, 127.0 / amax);
        }
        let inverse = S::splat(inverse);
        let q = [
            S::max(low, S::min(high, S::round(S::mul(v[0], inverse)))),
            S::max(low, S::min(high, S::round(S::mul(v[1], inverse)))),
        ];
        let bytes = out.q[b * 32..][..32].as_mut_ptr();
        // SAFETY: the two halves of a block of i8.
        unsafe {
            S::store_i8(bytes, q[0]);
            S::store_i8(bytes.add(16), q[1]);
        }
        let sum = S::tree16(S::add(q[0], q[1])); // integers below 2^24: exact in any order
        out.d[b] = d;
        out.s[b] = d * sum;
        out.excess[b] = -128 * sum as i32;
    }
}

#[inline(always)]
unsafe fn rotary_body<S: Simd>(x: &mut [f32], cos: &[f32], sin: &[f32], pairing: RopePairing) {
    let turn = |x0: f32, x1: f32, c: f32, s: f32| (x0.mul_add(c, -(x1 * s)), x1.mul_add(c, x0 * s));
    match pairing {
        RopePairing::Adjacent => {
            for ((x, &c), &s) in x.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                *x = turn(x[0], x[1], c, s).into();
            }
        }
        RopePairing::Halves => {
            let (first, second) = x.split_at_mut(cos.len());
            for (((x0, x1), &c), &s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                (*x0, *x1) = turn(*x0, *x1, c, s);
            }
        }
    }
}

#[inline(always)]
unsafe fn swiglu_body<S: Simd>(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.chunks_exact_mut(16).zip(up.chunks_exact(16)) {
        // SAFETY: whole vectors of both rows.
        unsafe {
            let x = S::load(g.as_ptr());
            let e = exp::<S>(S::mul(x, S::splat(-1.0)));
            let silu = S::div(x, S::add(S::splat(1.0), e));
            S::store(g.as_mut_ptr(), S::mul(silu, S::load(u.as_ptr())));
        }
    }
}

#[inline(always)]
unsafe fn exp_body<S: Simd>(x: &mut [f32], minus: f32, times: f32) {
    let one = |v: S::F| exp::<S>(S::mul(S::sub(v, S::splat(minus)), S::splat(times)));
    let whole = x.len() / 16 * 16;
    for v in x[..whole].chunks_exact_mut(16) {
        // SAFETY: a whole vector.
        unsafe { S::store(v.as_mut_ptr(), one(S::load(v.as_ptr()))) }
    }
    let mut tail = [0.0f32; 16];
    let rest = &mut x[whole..];
    tail[..rest.len()].copy_from_slice(rest);
    // SAFETY: `tail` is a whole vector.
    unsafe { S::store(tail.as_mut_ptr(), one(S::load(tail.as_ptr()))) }
    rest.copy_from_slice(&tail[..rest.len()]);
}
