//! Scores a text: the log-probability of every token given the ones before it, once through prefill slices and once token by
//! token. The two paths are one function (I1), so their figures are equal to the last bit.

use crate::admission::RequestId;
use crate::arith::select::{log_probability, total_weight};
use crate::backend::driver::{Driver, DriverError};
use crate::backend::{HostLogits, Input, Row, Rule, SamplingRow, SlotBinding, Start, Want};

/// Positions per prefill slice: bounds the logits held on the host.
pub const PREFILL_SLICE: usize = 32;

/// Log-probabilities of a text, natural logarithm.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// One per scored token, in order.
    pub log_probabilities: Vec<f64>,
}

impl Score {
    /// Mean negative log-probability in nats.
    pub fn cross_entropy(&self) -> f64 {
        -self.log_probabilities.iter().sum::<f64>() / self.log_probabilities.len() as f64
    }

    /// e to the cross-entropy.
    pub fn perplexity(&self) -> f64 {
        libm::exp(self.cross_entropy())
    }

    /// How many log-probabilities differ in at least one bit.
    pub fn differing_bits(&self, other: &Score) -> usize {
        let pairs = self.log_probabilities.iter().zip(&other.log_probabilities);
        pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count()
            + self.log_probabilities.len().abs_diff(other.log_probabilities.len())
    }
}

/// Scores windows of a text on one backend, one window at a time in slot 0.
pub struct Scorer {
    driver: Driver,
    windows: u64,
}

impl Scorer {
    /// Takes a fresh backend.
    pub fn new(driver: Driver) -> Self {
        Self { driver, windows: 0 }
    }

    /// Scores tokens 1.. of `window` given those before them, `slice` positions a step, or as many as the backend gives logits of.
    ///
    /// # Errors
    /// The window does not fit the backend, or a step failed.
    pub fn window(&mut self, window: &[u32], slice: usize, score: &mut Score) -> Result<(), DriverError> {
        self.windows += 1;
        let request = RequestId(self.windows);
        let facts = self.driver.backend().facts();
        let most = facts.host_logit_rows.max(1);
        let pages = (0..window.len().div_ceil(facts.page_tokens) as u32).collect();
        let mut bindings = vec![SlotBinding { slot: 0, request, pages, adjust: None }];
        let mut position = 0;
        for tokens in window.chunks(slice.clamp(1, most)) {
            let row = row(request, position, tokens.len());
            let output = self.driver.run(std::mem::take(&mut bindings), vec![row], tokens.to_vec())?;
            for logits in output.rows.iter().flat_map(|r| &r.logits) {
                position += 1;
                if let Some(&target) = window.get(position) {
                    score.log_probabilities.push(log_probability_of(logits, target));
                }
            }
        }
        Ok(())
    }
}

/// log p(target) from raw logits, as docs/arithmetic.md defines log-probabilities.
fn log_probability_of(logits: &[f32], target: u32) -> f64 {
    let highest = logits.iter().fold(f32::NEG_INFINITY, |m, &l| m.max(l));
    log_probability(logits[target as usize], highest, total_weight(logits))
}

fn row(request: RequestId, start: usize, len: usize) -> Row {
    Row {
        request,
        slot: 0,
        start: Start::Host(start as u32),
        len: len as u32,
        input: Input::Tokens,
        want: Want::All,
        sampling: SamplingRow { rule: Rule::Greedy, seed: 0, token_index: start as u32, choice: 0 },
        logprobs: None,
        host_logits: HostLogits::Yes,
    }
}
