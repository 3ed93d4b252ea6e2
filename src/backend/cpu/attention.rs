//! Attention kernel: a few consecutive tokens of one sequence times the query heads of one KV head, over paged K and V, in the
//! order of `arith::attention`.
//!
//! A page holds, per layer and KV head, K as `[head_dim][16]` (a vector lane is a position, so that scores need no sum across
//! lanes) and V as `[16][head_dim]`. A lane past the last visible position may hold anything: its score is not used, its weight is
//! +0 in the sums (which adds nothing to a sum that is never −0) and its V is never read.

use super::level::dispatch;
use super::simd::{Simd, exp};
use crate::arith::reduce::combine_parts;

/// Positions of a page, and keys of one vector.
pub const PAGE: usize = 16;

/// Where the K (or V) of one layer and KV head lies: `base + page · page_stride`, `[head_dim · 16]` floats.
#[derive(Clone, Copy)]
pub struct PagedHead {
    /// First float of this layer and head in page 0.
    pub base: *const f32,
    /// Floats from one page to the next.
    pub page_stride: usize,
}

/// One block of work: `tokens` consecutive positions from `position` on, the `group` query heads that share a KV head.
#[derive(Clone, Copy)]
pub struct AttentionBlock<'a> {
    /// Rotated queries of the block's first token and first head; head g of token t at `q + t·stride + g·head_dim`.
    pub q: *const f32,
    /// Where the outputs go, with the same strides.
    pub out: *mut f32,
    /// Floats from one token to the next, in `q`.
    pub q_stride: usize,
    /// Floats from one token to the next, in `out`.
    pub out_stride: usize,
    /// Tokens.
    pub tokens: usize,
    /// Query heads.
    pub group: usize,
    /// Components, a multiple of 32.
    pub head_dim: usize,
    /// Absolute position of the first token.
    pub position: usize,
    /// The sequence's pages.
    pub table: &'a [u32],
    /// Keys.
    pub k: PagedHead,
    /// Values.
    pub v: PagedHead,
    /// S: positions per segment, a multiple of 256.
    pub segment: usize,
    /// f32(1/sqrt(head_dim)).
    pub scale: f32,
}

/// Room for one block, reused from block to block.
#[derive(Default)]
pub struct AttentionScratch {
    scores: Vec<f32>,
    segment_out: Vec<f32>,
    /// (m, l) of the segment at hand.
    sums: Vec<[f32; 2]>,
    /// (M, L) so far.
    totals: Vec<[f32; 2]>,
}

/// Computes one block; every output is written.
///
/// # Safety
/// The pages of `table` up to the last token's position are written and in bounds of `k` and `v`; `q` and `out` hold the block.
pub unsafe fn attention(level: super::level::Level, block: &AttentionBlock<'_>, scratch: &mut AttentionScratch) {
    let queries = block.tokens * block.group;
    let visible = (block.position + block.tokens).min(block.segment).next_multiple_of(PAGE);
    scratch.scores.resize(queries * visible, 0.0);
    scratch.segment_out.resize(queries * block.head_dim, 0.0);
    scratch.sums.resize(queries, [0.0; 2]);
    scratch.totals.resize(queries, [0.0; 2]);
    // SAFETY: the caller's grant; the scratch holds `queries` rows.
    unsafe { attend(level, block, scratch, visible) }
}

dispatch! {
    unsafe fn attend(block: &AttentionBlock<'_>, scratch: &mut AttentionScratch, stride: usize) = attend_body
}

#[inline(always)]
unsafe fn attend_body<S: Simd>(b: &AttentionBlock<'_>, scratch: &mut AttentionScratch, stride: usize) {
    let AttentionScratch { scores, segment_out, sums, totals } = scratch;
    let output = |query: usize| b.out.wrapping_add(query / b.group * b.out_stride + query % b.group * b.head_dim);
    let accumulator = |query: usize, segment: usize, segment_out: &mut [f32]| match segment {
        0 => output(query),
        _ => segment_out[query * b.head_dim..].as_mut_ptr(),
    };
    let last = b.position + b.tokens - 1;
    for segment in 0..=last / b.segment {
        let base = segment * b.segment;
        let visible = |t: usize| (b.position + t + 1).saturating_sub(base).min(b.segment);
        let pages = &b.table[base / PAGE..][..visible(b.tokens - 1).div_ceil(PAGE)];
        for (tile, &page) in pages.iter().enumerate() {
            let k = b.k.base.wrapping_add(page as usize * b.k.page_stride);
            for t in (0..b.tokens).filter(|&t| visible(t) > tile * PAGE) {
                let at = t * b.group * stride + tile * PAGE;
                // SAFETY: a written page; the score rows of token t.
                unsafe { scores_of_page::<S>(b, b.q.add(t * b.q_stride), k, scores[at..].as_mut_ptr(), stride) }
            }
        }
        for query in (0..b.tokens * b.group).filter(|q| visible(q / b.group) > 0) {
            let visible = visible(query / b.group);
            let row = &mut scores[query * stride..][..visible.next_multiple_of(PAGE)];
            // SAFETY: whole vectors of one score row; the accumulator of this query.
            unsafe {
                sums[query] = weights_of_scores::<S>(row, visible);
                clear::<S>(accumulator(query, segment, segment_out), b.head_dim);
            }
        }
        for (tile, &page) in pages.iter().enumerate() {
            let v = b.v.base.wrapping_add(page as usize * b.v.page_stride);
            for t in (0..b.tokens).filter(|&t| visible(t) > tile * PAGE) {
                let keys = (visible(t) - tile * PAGE).min(PAGE);
                let w = scores[t * b.group * stride + tile * PAGE..].as_ptr();
                let o = accumulator(t * b.group, segment, segment_out);
                // SAFETY: a written page, `keys` visible positions, the accumulators of token t.
                unsafe { values_of_page::<S>(b, w, stride, v, keys, o) }
            }
        }
        for query in (0..b.tokens * b.group).filter(|q| visible(q / b.group) > 0) {
            if segment == 0 {
                totals[query] = sums[query];
                continue;
            }
            let o = &segment_out[query * b.head_dim..][..b.head_dim];
            // SAFETY: this query's outputs.
            unsafe { fold::<S>(&mut totals[query], sums[query], output(query), o) }
        }
    }
    for (query, total) in totals.iter().enumerate().take(b.tokens * b.group) {
        let inverse = S::splat(1.0 / total[1]);
        let o = output(query);
        for d in (0..b.head_dim).step_by(16) {
            // SAFETY: this query's outputs.
            unsafe { S::store(o.add(d), S::mul(S::load(o.add(d)), inverse)) }
        }
    }
}

/// Scores of 16 keys for every head of one token.
#[inline(always)]
unsafe fn scores_of_page<S: Simd>(b: &AttentionBlock<'_>, q: *const f32, k: *const f32, out: *mut f32, stride: usize) {
    let mut g = 0;
    while g < b.group {
        // SAFETY: heads g.. of the token, as the caller grants.
        unsafe {
            let (q, o) = (q.add(g * b.head_dim), out.add(g * stride));
            g += match (b.group - g, b.head_dim / 32) {
                (4.., 2) => page_scores::<S, 4>(q, 2, k, b.scale, o, stride),
                (3, 2) => page_scores::<S, 3>(q, 2, k, b.scale, o, stride),
                (2, 2) => page_scores::<S, 2>(q, 2, k, b.scale, o, stride),
                (1, 2) => page_scores::<S, 1>(q, 2, k, b.scale, o, stride),
                (4.., 4) => page_scores::<S, 4>(q, 4, k, b.scale, o, stride),
                (_, r) => page_scores::<S, 1>(q, r, k, b.scale, o, stride),
            };
        }
    }
}

/// Scores of 16 keys for N heads; returns N. Lanes are keys; the tree over components runs depth first.
#[inline(always)]
unsafe fn page_scores<S: Simd, const N: usize>(
    q: *const f32,
    r: usize,
    k: *const f32,
    scale: f32,
    out: *mut f32,
    stride: usize,
) -> usize {
    // SAFETY: component d < 32·r of K and of N heads lies inside the caller's grant.
    let chain = |d: usize| unsafe {
        let key = S::load(k.add(d * PAGE));
        let mut a: [S::F; N] = std::array::from_fn(|n| S::mul(S::splat(*q.add(n * 32 * r + d)), key));
        for c in 1..r {
            let at = d + 32 * c;
            let key = S::load(k.add(at * PAGE));
            for (n, a) in a.iter_mut().enumerate() {
                *a = S::fma(S::splat(*q.add(n * 32 * r + at)), key, *a);
            }
        }
        a
    };
    let add = |a: [S::F; N], b: [S::F; N]| -> [S::F; N] { std::array::from_fn(|n| S::add(a[n], b[n])) };
    let quad = |d: usize| add(add(chain(d), chain(d + 16)), add(chain(d + 8), chain(d + 24)));
    let even = add(add(quad(0), quad(4)), add(quad(2), quad(6)));
    let odd = add(add(quad(1), quad(5)), add(quad(3), quad(7)));
    for (n, a) in add(even, odd).into_iter().enumerate() {
        // SAFETY: 16 scores of head n.
        unsafe { S::store(out.add(n * stride), S::mul(a, S::splat(scale))) }
    }
    N
}

/// Turns `visible` scores of one segment into weights (lanes past them become +0); returns the maximum and the sum.
#[inline(always)]
unsafe fn weights_of_scores<S: Simd>(row: &mut [f32], visible: usize) -> [f32; 2] {
    let lowest = S::splat(f32::NEG_INFINITY);
    let mut max = lowest;
    for (i, x) in row.chunks_exact(16).enumerate() {
        // SAFETY: a whole vector.
        max = S::max(max, S::first(visible - i * 16, unsafe { S::load(x.as_ptr()) }, lowest));
    }
    let m = S::max16(max);
    let mut part = [S::splat(0.0); 16];
    for (i, x) in row.chunks_exact_mut(16).enumerate() {
        // SAFETY: a whole vector.
        unsafe {
            let w = exp::<S>(S::sub(S::load(x.as_ptr()), S::splat(m)));
            let w = S::first(visible - i * 16, w, S::splat(0.0));
            S::store(x.as_mut_ptr(), w);
            part[i % 16] = S::add(part[i % 16], w);
        }
    }
    let mut l = [0.0; 8];
    for (g, l) in l.iter_mut().enumerate().take(row.len().div_ceil(32)) {
        *l = S::tree16(S::add(part[2 * g], part[2 * g + 1]));
    }
    [m, combine_parts(&l)]
}

/// Clears the accumulator that the values of a query's segment go to.
#[inline(always)]
unsafe fn clear<S: Simd>(o: *mut f32, head_dim: usize) {
    for d in (0..head_dim).step_by(16) {
        // SAFETY: the caller grants `head_dim` floats.
        unsafe { S::store(o.add(d), S::splat(0.0)) }
    }
}

/// Folds a later segment into the outputs: N = max(M,m); L = fma(L,a,l·b); O = fma(O,a,o·b).
#[inline(always)]
unsafe fn fold<S: Simd>(total: &mut [f32; 2], later: [f32; 2], out: *mut f32, o: &[f32]) {
    let n = total[0].max(later[0]);
    let (a, b) = (crate::arith::exp_c(total[0] - n), crate::arith::exp_c(later[0] - n));
    *total = [n, total[1].mul_add(a, later[1] * b)];
    for (d, o) in o.chunks_exact(16).enumerate() {
        // SAFETY: the caller grants as many floats at `out` as `o` has.
        unsafe {
            let at = out.add(16 * d);
            let scaled = S::mul(S::load(o.as_ptr()), S::splat(b));
            S::store(at, S::fma(S::load(at), S::splat(a), scaled));
        }
    }
}

/// Adds up to 16 weighted values to every head of one token: one ascending chain a component.
#[inline(always)]
unsafe fn values_of_page<S: Simd>(
    b: &AttentionBlock<'_>,
    w: *const f32,
    stride: usize,
    v: *const f32,
    keys: usize,
    o: *mut f32,
) {
    let mut g = 0;
    while g < b.group {
        // SAFETY: heads g.. of the token, as the caller grants.
        unsafe {
            let (w, o) = (w.add(g * stride), o.add(g * b.head_dim));
            g += match (b.group - g, b.head_dim % 64) {
                (4.., 0) => page_values::<S, 4, 4>(w, stride, v, keys, b.head_dim, o),
                (3, 0) => page_values::<S, 3, 4>(w, stride, v, keys, b.head_dim, o),
                (2, 0) => page_values::<S, 2, 4>(w, stride, v, keys, b.head_dim, o),
                (_, 0) => page_values::<S, 1, 4>(w, stride, v, keys, b.head_dim, o),
                _ => page_values::<S, 1, 2>(w, stride, v, keys, b.head_dim, o),
            };
        }
    }
}

/// N heads, C vectors of components at a time; returns N.
#[inline(always)]
unsafe fn page_values<S: Simd, const N: usize, const C: usize>(
    w: *const f32,
    stride: usize,
    v: *const f32,
    keys: usize,
    head_dim: usize,
    o: *mut f32,
) -> usize {
    for d in (0..head_dim).step_by(16 * C) {
        // SAFETY: components d.. of N heads, `keys` rows of V.
        unsafe {
            let mut acc: [[S::F; C]; N] =
                std::array::from_fn(|n| std::array::from_fn(|c| S::load(o.add(n * head_dim + d + 16 * c))));
            for j in 0..keys {
                let row: [S::F; C] = std::array::from_fn(|c| S::load(v.add(j * head_dim + d + 16 * c)));
                for (n, acc) in acc.iter_mut().enumerate() {
                    let w = S::splat(*w.add(n * stride + j));
                    for (acc, row) in acc.iter_mut().zip(row) {
                        *acc = S::fma(w, row, *acc);
                    }
                }
            }
            for (n, acc) in acc.into_iter().enumerate() {
                for (c, acc) in acc.into_iter().enumerate() {
                    S::store(o.add(n * head_dim + d + 16 * c), acc);
                }
            }
        }
    }
    N
}
