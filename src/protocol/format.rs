//! What a dialect must say to turn the answers of one request into a response: as one body, or as the frames of a stream.

use bytes::Bytes;
use serde::Serialize;

use super::choice::{Answer, ChoiceEnd, Delta};
use super::errors::ApiError;
use super::sse;
use crate::backend::TokenLogprobs;

/// Token counts of a whole response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens, each prompt once.
    pub prompt_tokens: usize,
    /// Generated tokens of all choices.
    pub completion_tokens: usize,
}

/// A value as JSON. Writing plain data to memory cannot fail; a value that did would be an empty object.
pub fn json_bytes<T: Serialize>(value: &T) -> Bytes {
    serde_json::to_vec(value).map_or_else(|_| Bytes::from_static(b"{}"), Bytes::from)
}

/// One response in its dialect: either `whole`, or the frames in the order of the calls: `open`, then `prompt`, `token` and `end` per choice,
/// then `close` or `failed`.
pub trait Format {
    /// Every answer, as one body.
    fn whole(&self, answers: &[Answer], usage: Usage) -> Bytes;

    /// Before anything else.
    fn open(&mut self) -> Option<Bytes> {
        None
    }

    /// Scores of the next tokens of a choice's prompt, where they were asked for; before its first token.
    fn prompt(&mut self, _choice: usize, _scores: Vec<TokenLogprobs>) -> Option<Bytes> {
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

    /// What a client hears of a stream that has been silent.
    fn keep_alive(&self) -> Bytes {
        sse::KEEP_ALIVE
    }
}
