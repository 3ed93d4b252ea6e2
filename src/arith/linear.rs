//! One output of a linear layer: K cut into segments, segments dealt into eight contiguous groups, groups combined by a fixed tree.

use super::quant::{ActBlock, Int8Row, WeightBlock};
use super::reduce::combine_groups;

/// Inputs of one segment in the f32 and int8 orders.
pub const SEGMENT: usize = 64;

/// Groups of every linear row.
pub const GROUPS: usize = 8;

/// Segments per group: ceil(segments / 8). The last groups may be short or empty.
pub const fn group_len(segments: usize) -> usize {
    segments.div_ceil(GROUPS)
}

/// Sums segment values: each group ascending from +0, then the tree.
fn grouped(segments: &[f32]) -> f32 {
    let mut g = [0.0f32; GROUPS];
    for (g, part) in g.iter_mut().zip(segments.chunks(group_len(segments.len()).max(1))) {
        for s in part {
            *g += s;
        }
    }
    combine_groups(&g)
}

/// The f32 order: inside a segment of 64 one ascending chain of fused multiply-adds from +0; the last segment may be short.
pub fn linear_f32(w: &[f32], x: &[f32]) -> f32 {
    let chain = |(w, x): (&[f32], &[f32])| w.iter().zip(x).fold(0.0f32, |a, (w, x)| w.mul_add(*x, a));
    let segments: Vec<f32> = w.chunks(SEGMENT).zip(x.chunks(SEGMENT)).map(chain).collect();
    grouped(&segments)
}

/// The int8 order: the f32 order over f32(q), the row's scale last.
pub fn linear_int8(w: &Int8Row, x: &[f32]) -> f32 {
    let q: Vec<f32> = w.q.iter().map(|&q| f32::from(q)).collect();
    linear_f32(&q, x) * w.s
}

/// The q8 order over blocks of 32: g = fma(f32(isum), dw·da, g), with a minimum then g = fma(mw, sa, g), sa = da·f32(asum).
pub fn linear_q8(w: &[WeightBlock], x: &[ActBlock]) -> f32 {
    let mut g = [0.0f32; GROUPS];
    let per_group = group_len(w.len()).max(1);
    for (g, (w, x)) in g.iter_mut().zip(w.chunks(per_group).zip(x.chunks(per_group))) {
        for (w, x) in w.iter().zip(x) {
            let isum: i32 = w.q.iter().zip(&x.q).map(|(&w, &x)| i32::from(w) * i32::from(x)).sum();
            *g = (isum as f32).mul_add(w.d * x.d, *g);
            if let Some(m) = w.m {
                *g = m.mul_add(x.d * x.sum as f32, *g);
            }
        }
    }
    combine_groups(&g)
}
