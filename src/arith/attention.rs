//! Attention of one query head over its visible history, on a grid of segments anchored at position 0.

use super::exp::exp_c;
use super::reduce::{sum_parts, tree32};

/// f32(1/sqrt(D)), taken in f64.
pub fn score_scale(head_dim: usize) -> f32 {
    (1.0 / libm::sqrt(head_dim as f64)) as f32
}

/// One score: 32 chains over the components d, d+32, …, reduced by halves, times the scale. q and k are `[32·R]`.
pub fn score(q: &[f32], k: &[f32], scale: f32) -> f32 {
    let mut a: [f32; 32] = std::array::from_fn(|d| q[d] * k[d]);
    for c in (32..q.len()).step_by(32) {
        for (d, a) in a.iter_mut().enumerate() {
            *a = q[c + d].mul_add(k[c + d], *a);
        }
    }
    tree32(&a) * scale
}

/// What one segment contributes: maximum, sum of weights, weighted values `[head_dim]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Partial {
    /// max of the scores.
    pub m: f32,
    /// Sum of exp_c(x − m).
    pub l: f32,
    /// Σ exp_c(x − m)·V, one ascending chain per component.
    pub o: Vec<f32>,
}

/// One segment. `x[i]` is the score of absolute position `start + i`; `offset` = start − segment·S places it in the part grid;
/// `value(i)` is V of that position.
pub fn segment<'a>(x: &[f32], offset: usize, head_dim: usize, value: impl Fn(usize) -> &'a [f32]) -> Partial {
    let m = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut part = [0.0f32; 256];
    let mut o = vec![0.0f32; head_dim];
    for (i, x) in x.iter().enumerate() {
        let w = exp_c(x - m);
        part[(offset + i) % 256] += w;
        for (o, v) in o.iter_mut().zip(value(i)) {
            *o = w.mul_add(*v, *o);
        }
    }
    Partial { m, l: sum_parts(&part), o }
}

/// Folds segment `b` into the running `a`: N = max(M,m); L = fma(L,a,l·b); O = fma(O,a,o·b).
pub fn fold(a: &mut Partial, b: &Partial) {
    let n = a.m.max(b.m);
    let (ea, eb) = (exp_c(a.m - n), exp_c(b.m - n));
    a.l = a.l.mul_add(ea, b.l * eb);
    for (o, p) in a.o.iter_mut().zip(&b.o) {
        *o = o.mul_add(ea, p * eb);
    }
    a.m = n;
}

/// Attention at position `p` with first visible position `w0`: `keys[j]` and `values[j]` are `[head_dim]` for j in 0..=p, segments
/// hold `s` positions. Invisible positions are skipped, never multiplied by zero.
pub fn attend(q: &[f32], keys: &[&[f32]], values: &[&[f32]], p: usize, w0: usize, s: usize) -> Vec<f32> {
    let scale = score_scale(q.len());
    let one = |index: usize| {
        let (first, last) = (w0.max(s * index), (s * index + s - 1).min(p));
        let x: Vec<f32> = (first..=last).map(|j| score(q, keys[j], scale)).collect();
        segment(&x, first - s * index, q.len(), |i| values[first + i])
    };
    let mut total = one(w0 / s);
    for index in w0 / s + 1..=p / s {
        fold(&mut total, &one(index));
    }
    let inverse = 1.0 / total.l;
    total.o.iter().map(|o| o * inverse).collect()
}
