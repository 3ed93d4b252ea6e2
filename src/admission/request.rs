//! A request as the engine takes it: ids, limits and the one constructor that checks everything before a page is touched.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::account::Dialect;
use crate::arith::MAX_BIAS;
use crate::backend::{Adjust, LogprobsWanted, Rule};

/// Names one choice of one request for life; never reused. Ascending from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "r{}", self.0)
    }
}

/// Hands out request ids; shared by the HTTP workers because a session registers before it submits.
#[derive(Debug, Default)]
pub struct RequestIds(AtomicU64);

impl RequestIds {
    /// The next id.
    pub fn next(&self) -> RequestId {
        RequestId(self.0.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

/// Bounds that a request is checked against; fixed at start.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Longest sequence in tokens.
    pub context: usize,
    /// Longest prompt in tokens.
    pub max_prompt_tokens: usize,
    /// Most generated tokens.
    pub max_new_tokens: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Physical pages in all.
    pub pages: usize,
    /// Positions per page.
    pub page_tokens: usize,
}

impl Limits {
    /// Most new tokens after a prompt of so many; 0 where the prompt leaves no room in the context or the pool.
    pub fn room(&self, prompt: usize) -> usize {
        // The last token of an answer is never computed with, so it needs no position in the pool.
        let pool = (self.pages.saturating_mul(self.page_tokens)).saturating_add(1).saturating_sub(prompt);
        self.max_new_tokens.min(self.context.saturating_sub(prompt)).min(pool)
    }

    /// Most tokens of a prompt that one new token can follow.
    pub fn longest_prompt(&self) -> usize {
        let pool = self.pages.saturating_mul(self.page_tokens);
        self.max_prompt_tokens.min(self.context.saturating_sub(1)).min(pool)
    }

    /// Most tokens of a prompt and its answer together.
    pub fn longest_sequence(&self) -> usize {
        let pool = self.pages.saturating_mul(self.page_tokens).saturating_add(1);
        self.context.min(pool).min(self.max_prompt_tokens.saturating_add(self.max_new_tokens))
    }
}

/// A request before it is checked.
#[derive(Clone, Debug)]
pub struct RequestSpec {
    /// Prompt token ids.
    pub prompt: Arc<[u32]>,
    /// Most tokens to generate.
    pub max_new_tokens: usize,
    /// Selection rule.
    pub rule: Rule,
    /// Penalties and bias, applied before the rule.
    pub adjust: Option<Arc<Adjust>>,
    /// Seed of the draws.
    pub seed: u64,
    /// Choice index (n > 1).
    pub choice: u32,
    /// Token ids that end the sequence; empty with `ignore_eos`.
    pub eos: Arc<[u32]>,
    /// Log-probabilities wanted for each generated token.
    pub logprobs: LogprobsWanted,
    /// Whether the prompt's own tokens are scored: their log-probabilities go to the session.
    pub score_prompt: bool,
    /// Which surface it came through (for the account only).
    pub dialect: Dialect,
}

/// Why a request is refused before admission.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ValidationError {
    /// No tokens.
    #[error("the prompt is empty; send at least one token")]
    EmptyPrompt,
    /// Nothing to generate.
    #[error("max_tokens must be at least 1")]
    ZeroMaxTokens,
    /// Over `Limits::max_prompt_tokens`.
    #[error("the prompt has {tokens} tokens, the limit is {limit}; shorten it")]
    PromptTooLong {
        /// Prompt tokens.
        tokens: usize,
        /// Limit.
        limit: usize,
    },
    /// Over `Limits::max_new_tokens`.
    #[error("max_tokens is {tokens}, the limit is {limit}; lower it")]
    TooManyNewTokens {
        /// Asked for.
        tokens: usize,
        /// Limit.
        limit: usize,
    },
    /// Prompt plus generated tokens over the context.
    #[error(
        "{prompt} prompt tokens and {max_new} new tokens exceed the context of {context}; lower max_tokens or shorten the prompt"
    )]
    ContextOverflow {
        /// Prompt tokens.
        prompt: usize,
        /// Asked for.
        max_new: usize,
        /// The context.
        context: usize,
    },
    /// More pages than exist.
    #[error("the request needs {needed} KV pages, the pool has {pages}; lower max_tokens or shorten the prompt")]
    PoolTooSmall {
        /// Needed for life.
        needed: usize,
        /// In the pool.
        pages: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} at position {position} is outside the vocabulary of {vocab}; send ids below {vocab}")]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// Where.
        position: usize,
        /// Vocabulary size.
        vocab: usize,
    },
    /// More biases than a slot holds.
    #[error("the bias has {entries} entries, the limit is {MAX_BIAS}; send fewer")]
    TooManyBiases {
        /// Entries that have an effect.
        entries: usize,
    },
    /// A bias for a token that does not exist.
    #[error("the bias names token id {id}, which is outside the vocabulary of {vocab}; send ids below {vocab}")]
    BiasOutOfRange {
        /// The id.
        id: u32,
        /// Vocabulary size.
        vocab: usize,
    },
    /// A bias that stands twice.
    #[error("the bias names token id {id} twice; give it once")]
    BiasRepeated {
        /// The id.
        id: u32,
    },
}

/// A request that can be served: lengths, pages and token ids are in bounds.
#[derive(Clone, Debug)]
pub struct ValidRequest {
    id: RequestId,
    spec: RequestSpec,
    pages: usize,
}

impl ValidRequest {
    /// Checks a request. Pages for life: ceil((P + G − 1) / page_tokens). More log-probabilities than there are tokens are as many as
    /// there are.
    ///
    /// # Errors
    /// The first bound that it exceeds.
    pub fn new(id: RequestId, mut spec: RequestSpec, limits: &Limits) -> Result<Self, ValidationError> {
        let (prompt, max_new) = (spec.prompt.len(), spec.max_new_tokens);
        if prompt == 0 {
            return Err(ValidationError::EmptyPrompt);
        }
        if max_new == 0 {
            return Err(ValidationError::ZeroMaxTokens);
        }
        if prompt > limits.max_prompt_tokens {
            return Err(ValidationError::PromptTooLong { tokens: prompt, limit: limits.max_prompt_tokens });
        }
        if max_new > limits.max_new_tokens {
            return Err(ValidationError::TooManyNewTokens { tokens: max_new, limit: limits.max_new_tokens });
        }
        let total = prompt.checked_add(max_new).filter(|&t| t <= limits.context);
        let Some(total) = total else {
            return Err(ValidationError::ContextOverflow { prompt, max_new, context: limits.context });
        };
        let pages = (total - 1).div_ceil(limits.page_tokens);
        if pages > limits.pages {
            return Err(ValidationError::PoolTooSmall { needed: pages, pages: limits.pages });
        }
        if let Some(position) = spec.prompt.iter().position(|&t| t as usize >= limits.vocab) {
            let id = spec.prompt[position];
            return Err(ValidationError::TokenOutOfRange { id, position, vocab: limits.vocab });
        }
        if let Some(adjust) = &spec.adjust {
            check_bias(&adjust.bias, limits.vocab)?;
        }
        spec.logprobs = spec.logprobs.map(|wanted| wanted.min(u8::try_from(limits.vocab).unwrap_or(u8::MAX)));
        Ok(Self { id, spec, pages })
    }

    /// Its id.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// What was asked.
    pub fn spec(&self) -> &RequestSpec {
        &self.spec
    }

    /// KV pages that it reserves for life.
    pub fn pages(&self) -> usize {
        self.pages
    }
}

/// `bias` is sorted by id.
fn check_bias(bias: &[(u32, f32)], vocab: usize) -> Result<(), ValidationError> {
    if bias.len() > MAX_BIAS {
        return Err(ValidationError::TooManyBiases { entries: bias.len() });
    }
    if let Some(&(id, _)) = bias.iter().find(|(id, _)| *id as usize >= vocab) {
        return Err(ValidationError::BiasOutOfRange { id, vocab });
    }
    match bias.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(ValidationError::BiasRepeated { id: pair[0].0 }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Rule;

    fn limits() -> Limits {
        Limits { context: 64, max_prompt_tokens: 64, max_new_tokens: 64, vocab: 7, pages: 4, page_tokens: 16 }
    }

    fn spec(prompt: usize, max_new_tokens: usize) -> RequestSpec {
        RequestSpec {
            prompt: vec![1; prompt].into(),
            max_new_tokens,
            rule: Rule::Greedy,
            adjust: None,
            seed: 0,
            choice: 0,
            eos: Arc::from([]),
            logprobs: None,
            score_prompt: false,
            dialect: Dialect::Native,
        }
    }

    #[test]
    fn the_longest_prompt_and_the_room_after_each_prompt_are_what_the_check_takes_and_no_more() {
        let narrow = [
            limits(),
            Limits { max_prompt_tokens: 9, max_new_tokens: 5, ..limits() },
            Limits { context: 1_000, max_prompt_tokens: 1_000, max_new_tokens: 1_000, pages: 2, ..limits() },
        ];
        for limits in narrow {
            let taken = |prompt, new| ValidRequest::new(RequestId(1), spec(prompt, new), &limits).is_ok();
            let longest = limits.longest_prompt();
            assert!(taken(longest, 1) && !taken(longest + 1, 1), "{limits:?}");
            for prompt in 1..=longest {
                let room = limits.room(prompt);
                assert!(taken(prompt, room) && !taken(prompt, room + 1), "{prompt} of {limits:?}");
            }
        }
    }

    #[test]
    fn no_more_log_probabilities_are_asked_for_than_there_are_tokens() {
        let spec = RequestSpec { logprobs: Some(20), ..spec(2, 3) };
        let request = ValidRequest::new(RequestId(1), spec, &limits()).expect("it fits");
        assert_eq!(request.spec().logprobs, Some(7));
    }
}
