//! SwiGLU.

use super::exp::exp_c;

/// (g / (1 + exp_c(−g))) · u.
#[inline(always)]
pub fn swiglu(g: f32, u: f32) -> f32 {
    (g / (1.0 + exp_c(-g))) * u
}
