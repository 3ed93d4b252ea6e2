//! Sampling parameters as clients write them, compiled into the selection rule of docs/arithmetic.md.

use std::num::NonZeroU32;
use std::ops::RangeInclusive;

use crate::arith::rule::top_p_fixed;
use crate::backend::Rule;

/// The seed of a native request that names none.
pub const DEFAULT_SEED: u64 = 0;
/// Seeds where a dialect does not say more.
pub const SEEDS: RangeInclusive<u64> = 0..=u64::MAX;
/// `max_tokens` as it can be read; how many there is room for depends on the model.
pub const MAX_TOKENS: RangeInclusive<u64> = 1..=u32::MAX as u64;
/// `top_k` where every value has an effect.
pub const TOP_K: RangeInclusive<u64> = 1..=u32::MAX as u64;
/// `top_p` and `min_p`.
pub const SHARE: RangeInclusive<f64> = 0.0..=1.0;
/// Alternatives a token of log-probabilities.
pub const LOGPROBS: RangeInclusive<u64> = 0..=20;

/// Parameters after the dialect's defaults; in range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Temperature; 0 is greedy.
    pub temperature: f64,
    /// Keep the k most likely.
    pub top_k: Option<NonZeroU32>,
    /// Keep the shortest prefix of this share, 0..=1.
    pub top_p: f64,
    /// Keep what is at least this likely relative to the most likely, 0..=1.
    pub min_p: f64,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: None, top_p: 1.0, min_p: 0.0 };

    /// The compiled rule: 1/T in f64, then f32; top-p in 32 bits after the point, half away from zero, at least one unit, so that one token is kept; min-p in f32. A temperature
    /// so small that its inverse overflows f32 takes the largest f32.
    pub fn rule(&self) -> Rule {
        if self.temperature == 0.0 {
            return Rule::Greedy;
        }
        Rule::Sampled {
            inv_temperature: ((1.0 / self.temperature) as f32).min(f32::MAX),
            top_k: self.top_k,
            top_p: top_p_fixed(self.top_p),
            min_p: self.min_p as f32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperature_zero_is_greedy_whatever_else_is_set() {
        assert_eq!(Sampling { top_k: NonZeroU32::new(3), ..Sampling::GREEDY }.rule(), Rule::Greedy);
    }

    #[test]
    fn a_top_p_that_rounds_to_nothing_keeps_one_token() {
        for top_p in [0.0, 1e-300, 1e-10] {
            let rule = Sampling { temperature: 1.0, top_p, ..Sampling::GREEDY }.rule();
            assert!(matches!(rule, Rule::Sampled { top_p: 1, .. }), "{top_p}: {rule:?}");
        }
    }

    #[test]
    fn a_rule_is_compiled_in_double_precision_and_stays_finite() {
        let rule = Sampling { temperature: 0.7, top_k: None, top_p: 0.9, min_p: 0.05 }.rule();
        let expected =
            Rule::Sampled { inv_temperature: (1.0f64 / 0.7) as f32, top_k: None, top_p: 3_865_470_566, min_p: 0.05 };
        assert_eq!(rule, expected);
        let cold = Sampling { temperature: 1e-300, ..Sampling::GREEDY }.rule();
        assert!(
            matches!(cold, Rule::Sampled { inv_temperature, top_p: 4_294_967_296, .. } if inv_temperature == f32::MAX)
        );
    }
}
