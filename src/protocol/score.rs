//! How likely a prompt's own tokens were, from the logits of its positions as they are computed.

use std::sync::Arc;

use crate::arith::select::token_logprobs;
use crate::backend::TokenLogprobs;

/// Scores one prompt. The logits of position i predict token i + 1, so the first token has no score.
pub struct PromptScore {
    prompt: Arc<[u32]>,
    top: usize,
    /// Tokens that have been scored or never will be.
    done: usize,
}

impl PromptScore {
    /// Begins with the first position of `prompt`; `top` alternatives a token.
    pub fn new(prompt: Arc<[u32]>, top: usize) -> Self {
        Self { prompt, top, done: 1 }
    }

    /// Takes the logits of the next positions, `[positions][vocab]`; gives the scores of the tokens after them.
    pub fn push(&mut self, logits: &[Vec<f32>]) -> Vec<TokenLogprobs> {
        let targets = self.prompt.get(self.done..).unwrap_or_default();
        let scores: Vec<_> = targets.iter().zip(logits).map(|(&id, l)| token_logprobs(l, id, self.top)).collect();
        self.done += scores.len();
        scores
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logits_of_a_position_score_the_token_after_it_however_they_are_cut() {
        let prompt: Arc<[u32]> = [2, 0, 1, 2].into();
        let logits: Vec<Vec<f32>> = vec![vec![1.0, 2.0, 3.0], vec![3.0, 1.0, 2.0], vec![0.0, 0.5, 0.25]];
        let expected: Vec<_> = logits.iter().zip([0, 1, 2]).map(|(l, id)| token_logprobs(l, id, 2)).collect();
        for cut in 0..=3 {
            let mut score = PromptScore::new(Arc::clone(&prompt), 2);
            let scores = [score.push(&logits[..cut]), score.push(&logits[cut..])].concat();
            assert_eq!(scores, expected);
            assert_eq!(score.push(&logits), [], "the last position predicts no token of the prompt");
        }
    }
}
