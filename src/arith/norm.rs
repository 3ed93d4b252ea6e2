//! RMSNorm with a fixed order of summation.

use super::reduce::sum_parts;

/// Writes (x·r)·w into `out`, all `[n]`; r = 1/sqrt(mean + eps), correctly rounded.
///
/// part[t] is the chain of fused multiply-adds from +0 over x[t]², x[t+256]², …; the parts are summed by `sum_parts`.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let mut part = [0.0f32; 256];
    for run in x.chunks(256) {
        for (p, v) in part.iter_mut().zip(run) {
            *p = v.mul_add(*v, *p);
        }
    }
    let mean = sum_parts(&part) / x.len() as f32;
    let r = 1.0 / (mean + eps).sqrt();
    for ((o, v), w) in out.iter_mut().zip(x).zip(w) {
        *o = (v * r) * w;
    }
}
