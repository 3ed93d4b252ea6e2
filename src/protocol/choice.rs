//! One answer as its client sees it: generated tokens become text, a stop string ends it. Streams and whole answers are made from
//! the same deltas, so they cannot differ (I7).

use std::sync::Arc;

use crate::actors::session::messages::GeneratedToken;
use crate::backend::TokenLogprobs;
use crate::protocol::stop::{Scan, StopMatcher};

/// Turns token ids into text that never splits a character.
pub trait Pieces {
    /// The text that this token completes; may be empty.
    fn push(&mut self, id: u32) -> String;
    /// What was held back, at the end.
    fn finish(&mut self) -> String;
}

/// The text of a single token, for log-probabilities.
pub trait Vocabulary: Send + Sync {
    /// As the tokenizer shows it, special tokens included.
    fn token_text(&self, id: u32) -> String;
    /// The bytes it stands for; part of a character has bytes and no text of its own.
    fn token_bytes(&self, id: u32) -> Vec<u8>;
    /// Whether the text of an answer leaves it out.
    fn is_special(&self, id: u32) -> bool;
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-sequence token.
    Eos,
    /// This stop string.
    StopString(Arc<str>),
    /// The number of tokens asked for.
    Length,
}

impl FinishReason {
    /// As it stands in native and OpenAI bodies.
    pub const fn name(&self) -> &'static str {
        match self {
            FinishReason::Eos | FinishReason::StopString(_) => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// A token and the text that may be shown because of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Delta {
    /// The token.
    pub token: GeneratedToken,
    /// Text released; may belong to earlier tokens, may be empty.
    pub text: String,
    /// The stop string that this token completed: the answer ends here.
    pub stop: Option<Arc<str>>,
}

/// How an answer ended, with the text released by the end.
#[derive(Clone, Debug, PartialEq)]
pub struct ChoiceEnd {
    /// What was still held back.
    pub tail: String,
    /// Why.
    pub reason: FinishReason,
    /// Tokens that count.
    pub tokens: u32,
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Scores of the prompt's tokens but the first, where they were asked for.
    pub prompt: Vec<TokenLogprobs>,
    /// Its text, without the stop string.
    pub text: String,
    /// Every token that counts.
    pub tokens: Vec<GeneratedToken>,
    /// Why it ended.
    pub reason: FinishReason,
}

/// Decodes one answer.
pub struct ChoiceDecoder {
    pieces: Box<dyn Pieces>,
    stops: StopMatcher,
    tokens: u32,
}

impl ChoiceDecoder {
    /// Starts an answer.
    pub fn new(pieces: Box<dyn Pieces>, stops: &[String]) -> Self {
        Self { pieces, stops: StopMatcher::new(stops), tokens: 0 }
    }

    /// Tokens so far.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Takes the next token.
    pub fn push(&mut self, token: GeneratedToken) -> Delta {
        self.tokens += 1;
        let piece = self.pieces.push(token.id);
        match self.stops.push(&piece) {
            Scan::Open(text) => Delta { token, text, stop: None },
            Scan::Hit { text, stop } => Delta { token, text, stop: Some(stop) },
        }
    }

    /// Ends the answer: what was held back is released, unless it completes a stop string.
    pub fn finish(&mut self, reason: FinishReason) -> ChoiceEnd {
        let piece = self.pieces.finish();
        match self.stops.push(&piece) {
            Scan::Open(mut tail) => {
                tail.push_str(&self.stops.finish());
                ChoiceEnd { tail, reason, tokens: self.tokens }
            }
            Scan::Hit { text, stop } => {
                ChoiceEnd { tail: text, reason: FinishReason::StopString(stop), tokens: self.tokens }
            }
        }
    }

    /// Ends the answer after a stop string: nothing held back is shown.
    pub fn stop(&mut self, stop: Arc<str>) -> ChoiceEnd {
        ChoiceEnd { tail: String::new(), reason: FinishReason::StopString(stop), tokens: self.tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ids are bytes; text is released at character boundaries.
    #[derive(Default)]
    struct Bytes(Vec<u8>);

    impl Pieces for Bytes {
        fn push(&mut self, id: u32) -> String {
            self.0.push(id as u8);
            match String::from_utf8(std::mem::take(&mut self.0)) {
                Ok(text) => text,
                Err(error) => {
                    self.0 = error.into_bytes();
                    String::new()
                }
            }
        }

        fn finish(&mut self) -> String {
            String::from_utf8_lossy(&std::mem::take(&mut self.0)).into_owned()
        }
    }

    fn token(index: usize, id: u8) -> GeneratedToken {
        GeneratedToken { id: id.into(), index: index as u32, logprobs: None }
    }

    fn run(text: &[u8], stops: &[&str]) -> (Vec<String>, ChoiceEnd) {
        let stops: Vec<String> = stops.iter().map(|&s| s.to_owned()).collect();
        let mut decoder = ChoiceDecoder::new(Box::<Bytes>::default(), &stops);
        let mut texts = Vec::new();
        for (index, &id) in text.iter().enumerate() {
            let delta = decoder.push(token(index, id));
            texts.push(delta.text);
            if let Some(stop) = delta.stop {
                return (texts, decoder.stop(stop));
            }
        }
        let end = decoder.finish(FinishReason::Length);
        (texts, end)
    }

    #[test]
    fn a_character_split_over_tokens_comes_whole() {
        let (texts, end) = run("é".as_bytes(), &[]);
        assert_eq!((texts, end.tail.as_str()), (vec![String::new(), "é".into()], ""));
    }

    #[test]
    fn a_stop_string_ends_the_answer_before_itself_and_counts_the_token_that_completed_it() {
        let (texts, end) = run(b"abSTOPcd", &["STOP"]);
        assert_eq!(texts.concat(), "ab");
        assert_eq!((end.reason, end.tokens, end.tail.as_str()), (FinishReason::StopString("STOP".into()), 6, ""));
    }

    #[test]
    fn a_stop_string_that_the_last_half_character_completes_is_the_reason_of_the_end() {
        let (texts, end) = run(&[b'a', 0xe7], &["\u{fffd}"]);
        assert_eq!((texts.concat().as_str(), end.tail.as_str()), ("a", ""));
        assert_eq!(end.reason, FinishReason::StopString("\u{fffd}".into()));
    }

    #[test]
    fn a_half_stop_string_and_a_half_character_are_flushed_at_the_end() {
        let (texts, end) = run(b"abST", &["STOP"]);
        assert_eq!((texts.concat().as_str(), end.tail.as_str()), ("ab", "ST"));
        let (_, end) = run(&[b'a', 0xe7], &[]);
        assert_eq!(end.tail, "\u{fffd}");
    }
}
