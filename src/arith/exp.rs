//! exp_c: the one exponential of the engine. The same bits on every machine, at most one ulp from the true value.
//!
//! ```text
//! x clamped to [-87, 88]
//! n = round_to_nearest_even(x * LOG2_E)
//! h = fma(-n, LN2_HI, x)                                   exact: LN2_HI = f32(ln 2)
//! r = fma(-n, LN2_LO, h)
//! q = fma(fma(fma(fma(C6, r, C5), r, C4), r, C3), r, C2)   minimax for (e^r - 1 - r) / r^2, |r| <= ln2/2
//! s = fma(-n, LN2_LO, q * (r*r))
//! e = (h + s) + 1                                          h, not r: the rounding of r stays out of the leading term
//! exp_c = e * 2^n                                          n in [-126, 127], so 2^n is normal and the product exact
//! ```
//! The coefficients were fitted for this engine (Lawson's iteration on the relative error of e^r: 3.1e-9).

/// Lower clamp of the argument.
pub const EXP_MIN: f32 = -87.0;
/// Upper clamp of the argument.
pub const EXP_MAX: f32 = 88.0;
/// f32(1 / ln 2).
pub const LOG2_E: f32 = f32::from_bits(0x3fb8_aa3b);
/// f32(ln 2).
pub const LN2_HI: f32 = f32::from_bits(0x3f31_7218);
/// f32(ln 2 - LN2_HI), negative.
pub const LN2_LO: f32 = f32::from_bits(0xb102_e308);
/// Coefficient of r^2.
pub const C2: f32 = f32::from_bits(0x3eff_fffe);
/// Coefficient of r^3.
pub const C3: f32 = f32::from_bits(0x3e2a_aa48);
/// Coefficient of r^4.
pub const C4: f32 = f32::from_bits(0x3d2a_ac79);
/// Coefficient of r^5.
pub const C5: f32 = f32::from_bits(0x3c09_1d13);
/// Coefficient of r^6.
pub const C6: f32 = f32::from_bits(0x3ab5_11f0);

/// The canonical exponential. `exp_c(±0)` is exactly 1; outside [-87, 88] the argument is clamped.
#[inline(always)]
pub fn exp_c(x: f32) -> f32 {
    let x = x.clamp(EXP_MIN, EXP_MAX);
    let n = (x * LOG2_E).round_ties_even();
    let h = (-n).mul_add(LN2_HI, x);
    let r = (-n).mul_add(LN2_LO, h);
    let q = C6.mul_add(r, C5).mul_add(r, C4).mul_add(r, C3).mul_add(r, C2);
    let s = (-n).mul_add(LN2_LO, q * (r * r));
    let e = (h + s) + 1.0;
    e * f32::from_bits((((n as i32) + 127) as u32) << 23)
}
