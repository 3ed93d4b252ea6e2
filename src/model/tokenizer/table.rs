//! What each id stands for: its bytes and whether text hides it. One block of memory, shared by every detokeniser.

use super::{TokenizerError, byte_level};
use crate::model::gguf::Metadata;

/// The part a token plays, from `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text in the byte-level alphabet.
    Normal,
    /// Steers the model; text hides it.
    Control,
    /// Text spelled as it is, found before the BPE runs.
    UserDefined,
    /// Has an id and no use.
    Unused,
}

/// Bytes of every token, and the special ones.
pub(in crate::model) struct TokenTable {
    bytes: Vec<u8>,
    /// Token i ends here in `bytes` and begins where token i − 1 ends.
    ends: Vec<usize>,
    special: Vec<bool>,
}

impl TokenTable {
    fn new(tokens: impl Iterator<Item = (Vec<u8>, bool)>) -> Self {
        let mut table = Self { bytes: Vec::new(), ends: Vec::new(), special: Vec::new() };
        for (bytes, special) in tokens {
            table.bytes.extend(bytes);
            table.ends.push(table.bytes.len());
            table.special.push(special);
        }
        table
    }

    /// Tokens written in the byte-level alphabet; those that are not normal, or leave the alphabet, are spelled as they are.
    pub(super) fn byte_level(tokens: &[String], kinds: &[Kind]) -> Self {
        Self::new(tokens.iter().zip(kinds).map(|(token, &kind)| {
            let decoded = if kind == Kind::Normal { byte_level::bytes_of(token) } else { None };
            (decoded.unwrap_or_else(|| token.clone().into_bytes()), kind == Kind::Control)
        }))
    }

    /// Ids 0 to 255 are bytes, any other is spelled `<id>`.
    pub(super) fn bytes(vocab: usize) -> Self {
        Self::new((0..vocab).map(|id| match u8::try_from(id) {
            Ok(byte) => (vec![byte], false),
            Err(_) => (format!("<{id}>").into_bytes(), false),
        }))
    }

    /// Bytes of the longest token.
    pub(super) fn longest(&self) -> usize {
        let begins = std::iter::once(0).chain(self.ends.iter().copied());
        self.ends.iter().zip(begins).map(|(end, begin)| end - begin).max().unwrap_or(0)
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of an id; none for an id outside the vocabulary (a model may have more rows than tokens).
    pub(in crate::model) fn bytes_of(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else {
            return &[];
        };
        let begin = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[begin..end]
    }

    pub(in crate::model) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

/// The kind of every token. A file without types has normal tokens, except those that the metadata name (`named`).
pub(super) fn kinds(metadata: &Metadata, vocab: usize, named: &[u32]) -> Result<Vec<Kind>, TokenizerError> {
    let Some(types) = metadata.i32s("tokenizer.ggml.token_type")? else {
        let mut kinds = vec![Kind::Normal; vocab];
        named.iter().for_each(|&id| kinds[id as usize] = Kind::Control);
        return Ok(kinds);
    };
    if types.len() != vocab {
        return Err(TokenizerError::Broken(format!("{} token types for {vocab} tokens", types.len())));
    }
    let kind = |number: &i32| match number {
        1 => Ok(Kind::Normal),
        2 | 3 => Ok(Kind::Control),
        4 => Ok(Kind::UserDefined),
        5 => Ok(Kind::Unused),
        other => Err(TokenizerError::Broken(format!("token type {other} in a byte-level vocabulary"))),
    };
    types.iter().map(kind).collect()
}
