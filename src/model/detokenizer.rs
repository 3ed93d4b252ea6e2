//! Ids to text one at a time: bytes wait until their character is complete, so that the pieces together are exactly the text of
//! the whole (I7).

use std::sync::Arc;

use super::tokenizer::table::TokenTable;

/// Bytes to text in pieces: what could still become a character waits. U+FFFD stands where `String::from_utf8_lossy` of all bytes
/// would put it.
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    /// The beginning of a character; at most three bytes between calls.
    pending: Vec<u8>,
}

impl TextStream {
    /// Takes the next bytes and gives the text that they complete.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = Vec::new();
        let mut chunks = self.pending.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            if chunks.peek().is_none() && may_continue(chunk.invalid()) {
                rest = chunk.invalid().to_vec();
            } else if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending = rest;
        text
    }

    /// The bytes that wait for the rest of their character; none, or one to three.
    pub fn pending(&self) -> &[u8] {
        &self.pending
    }

    /// Ends the text: a character that never became complete is U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// The detokeniser of one stream. Special tokens have no text.
pub struct Detokenizer {
    table: Arc<TokenTable>,
    text: TextStream,
}

pub(super) fn new(table: Arc<TokenTable>) -> Detokenizer {
    Detokenizer { table, text: TextStream::default() }
}

impl Detokenizer {
    /// Takes the next id and gives the text that it completes; often empty inside a character.
    pub fn push(&mut self, id: u32) -> String {
        if self.table.is_special(id) {
            return String::new();
        }
        self.text.push(self.table.bytes_of(id))
    }

    /// Ends the stream: a character that never became complete is U+FFFD.
    pub fn finish(&mut self) -> String {
        self.text.finish()
    }
}

/// Whether bytes that are not UTF-8 yet could become a character.
fn may_continue(invalid: &[u8]) -> bool {
    std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none())
}
