//! What a dialect must say to turn deltas into the frames of a stream.

use bytes::Bytes;

use super::choice::{ChoiceEnd, Delta};
use super::errors::ApiError;

/// Token counts of a whole response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens, each prompt once.
    pub prompt_tokens: usize,
    /// Generated tokens of all choices.
    pub completion_tokens: usize,
}

/// The frames of one stream, in the order of the calls: `open`, then `token` and `end` per choice, then `close` or `failed`.
pub trait StreamFormat {
    /// Before anything else.
    fn open(&mut self) -> Option<Bytes> {
        None
    }

    /// A token of a choice.
    fn token(&mut self, choice: usize, delta: &Delta) -> Option<Bytes>;

    /// A choice has ended.
    fn end(&mut self, choice: usize, end: &ChoiceEnd) -> Bytes;

    /// Every choice has ended.
    fn close(&mut self, _usage: Usage) -> Option<Bytes> {
        None
    }

    /// The response fails; nothing follows.
    fn failed(&mut self, error: &ApiError) -> Bytes;
}
