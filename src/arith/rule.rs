//! Compiles sampling parameters into a `Rule`: everything that is rounded is rounded here, once.

use std::num::NonZeroU32;

use crate::backend::Rule;

/// Why parameters make no rule.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum RuleError {
    /// Not a usable temperature.
    #[error("temperature is {0}, it must be 0 (greedy) or lie where its reciprocal is a finite positive number")]
    Temperature(f64),
    /// Not a probability.
    #[error("top_p is {0}, it must be above 0 and at most 1")]
    TopP(f64),
    /// Not a probability.
    #[error("min_p is {0}, it must lie between 0 and 1")]
    MinP(f64),
}

/// round(p·2^32), half away from zero, at least 1 so that one token is kept.
pub fn top_p_fixed(top_p: f64) -> u64 {
    (libm::round(top_p * 4_294_967_296.0) as u64).max(1)
}

/// The rule of a request. `temperature` 0 is greedy; 1/T is taken in f64 and rounded to f32; `min_p` is rounded to f32.
///
/// # Errors
/// The first parameter out of its range.
pub fn sampled_rule(temperature: f64, top_k: Option<NonZeroU32>, top_p: f64, min_p: f64) -> Result<Rule, RuleError> {
    if temperature == 0.0 {
        return Ok(Rule::Greedy);
    }
    let inv_temperature = (1.0 / temperature) as f32;
    if !(inv_temperature.is_finite() && inv_temperature > 0.0) {
        return Err(RuleError::Temperature(temperature));
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(RuleError::TopP(top_p));
    }
    if !(0.0..=1.0).contains(&min_p) {
        return Err(RuleError::MinP(min_p));
    }
    Ok(Rule::Sampled { inv_temperature, top_k, top_p: top_p_fixed(top_p), min_p: min_p as f32 })
}
