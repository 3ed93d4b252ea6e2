//! The pure core of the scorer: how likely a prompt's own tokens were, from the logits of its positions as they are computed. It holds
//! nothing between two slices; what it needs travels with the logits.

use std::sync::Arc;

use crate::actors::session::messages::TokenEntry;
use crate::admission::RequestId;
use crate::arith::select::token_logprobs;

/// Logits of consecutive positions of a prompt that is scored. `H` is the address of its session's hub.
#[derive(Debug)]
pub struct ScoredSlice<H> {
    /// Whose.
    pub request: RequestId,
    /// Where the scores go.
    pub hub: H,
    /// `[positions][vocab]`, all of them finite.
    pub logits: Vec<Vec<f32>>,
    /// The token after each position: whose score its logits hold.
    pub targets: Vec<u32>,
    /// Alternatives wanted beside each token.
    pub top: usize,
}

impl<H> ScoredSlice<H> {
    /// Positions whose logits it holds.
    pub fn positions(&self) -> u32 {
        self.logits.len() as u32
    }

    /// Scores it (`arith::select::token_logprobs`): news for the session, and its hub. The logits are gone when this returns.
    pub fn score(self) -> (H, TokenEntry) {
        let scored = self.logits.iter().zip(self.targets);
        let prompt_scores = scored.map(|(logits, id)| token_logprobs(logits, id, self.top)).collect();
        (self.hub, TokenEntry { request: self.request, prompt_scores, tokens: Vec::new(), end: None })
    }
}

/// The tokens of a prompt that are still to be scored. The logits of position i predict token i + 1, so the first token has no score.
#[derive(Debug)]
pub struct Targets {
    prompt: Arc<[u32]>,
    top: usize,
    /// Tokens that have been handed out or never will be.
    done: usize,
}

impl Targets {
    /// Begins with the first position of `prompt`; `top` alternatives a token.
    pub fn new(prompt: Arc<[u32]>, top: usize) -> Self {
        Self { prompt, top, done: 1 }
    }

    /// The slice of the next positions, whose logits `[positions][vocab]` these are. Its scores go to `hub`.
    pub fn slice<H>(&mut self, request: RequestId, hub: H, logits: Vec<Vec<f32>>) -> ScoredSlice<H> {
        let left = self.prompt.get(self.done..).unwrap_or_default();
        let targets = left[..left.len().min(logits.len())].to_vec();
        self.done += targets.len();
        ScoredSlice { request, hub, logits, targets, top: self.top }
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
            let mut targets = Targets::new(Arc::clone(&prompt), 2);
            let mut push = |logits: &[Vec<f32>]| {
                let slice = targets.slice(RequestId(7), 'h', logits.to_vec());
                assert_eq!(slice.positions() as usize, logits.len());
                let (hub, entry) = slice.score();
                assert_eq!((hub, entry.request, entry.tokens.len(), entry.end), ('h', RequestId(7), 0, None));
                entry.prompt_scores
            };
            assert_eq!([push(&logits[..cut]), push(&logits[cut..])].concat(), expected);
            assert_eq!(push(&logits[..1]), [], "the last position predicts no token of the prompt");
        }
    }
}
