//! Text to token ids and back: byte-level BPE from GGUF metadata, or plain bytes for synthetic models.
//!
//! Decoding is exact: every id stands for fixed bytes, a text is their concatenation, and U+FFFD appears only where those bytes
//! are not UTF-8. Nothing here adds a token that the text does not spell, except `encode_prompt`, which follows the model's rule
//! for a beginning-of-sequence token. Bytes that a vocabulary does not know are dropped, as the models' own tokenizers do.

mod bpe;
mod byte_level;
mod controls;
pub(super) mod table;

use std::sync::Arc;

use bpe::Bpe;
use controls::Controls;
use table::TokenTable;

use super::detokenizer::{self, Detokenizer};
use super::gguf::{GgufError, Metadata};

/// What becomes of special tokens that the text spells, such as `<|im_end|>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// They become their id: for templates and for people who ask for it.
    Parse,
    /// They stay text: for what a user wrote.
    AsText,
}

/// Whether decoded text shows special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialText {
    /// As they are spelled.
    Show,
    /// Not at all.
    Hide,
}

/// Why there is no tokenizer, or a text has no ids.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The metadata cannot be read.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// Another kind of tokenizer.
    #[error(
        "the tokenizer {0} is not supported: use a model with byte-level BPE (gpt2) and pre-tokenizer smollm, gpt2, default, llama-bpe or qwen2"
    )]
    Unsupported(String),
    /// The vocabulary and the merges do not fit each other.
    #[error("the model's tokenizer is broken ({0}): fetch or convert the model again")]
    Broken(String),
    /// The text could not be encoded.
    #[error("the text cannot be tokenised: {0}")]
    Encode(String),
}

/// A model's tokenizer; clones share it.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    encoder: Encoder,
    table: Arc<TokenTable>,
    eos: Arc<[u32]>,
    /// Stands before a prompt when the model asks for it.
    bos: Option<u32>,
    controls: Controls,
    /// No token of a text stands for more bytes than this, at least 1.
    bytes_per_token_max: usize,
    /// What templates call `bos_token` and `eos_token`.
    bos_text: String,
    eos_text: String,
}

enum Encoder {
    Bytes,
    Bpe(Box<Bpe>),
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.vocab_size())
    }
}

/// Control tokens that end an answer whether or not the metadata name them.
const END_NAMES: [&str; 8] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|EOT|>", "</s>"];

impl Tokenizer {
    /// The tokenizer that a GGUF file's metadata describe.
    ///
    /// # Errors
    /// An absent, broken or unsupported tokenizer.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let model = metadata.string("tokenizer.ggml.model")?.unwrap_or("(absent)");
        if model != "gpt2" {
            return Err(TokenizerError::Unsupported(model.to_owned()));
        }
        let key = "tokenizer.ggml.tokens";
        let tokens = metadata.strings(key)?.ok_or_else(|| GgufError::MissingKey { key: key.to_owned() })?;
        let named = |name: &str| named_token(metadata, name, tokens.len());
        let (bos, eos) = (named("bos")?, named("eos")?);
        let ends: Vec<u32> = [eos, named("eot")?, named("eom")?].into_iter().flatten().collect();
        let kinds = table::kinds(metadata, tokens.len(), &[bos.as_slice(), &ends].concat())?;
        let encoder = Bpe::new(metadata, tokens, &kinds)?;
        let table = TokenTable::byte_level(tokens, &kinds);
        let by_name = (0..tokens.len() as u32).filter(|&id| {
            table.is_special(id) && END_NAMES.contains(&tokens[id as usize].as_str()) && !ends.contains(&id)
        });
        let eos_ids = ends.iter().copied().chain(by_name).collect();
        let text = |id: Option<u32>| id.map_or_else(String::new, |id| tokens[id as usize].clone());
        let control = |id: &u32| kinds[*id as usize] == table::Kind::Control && !tokens[*id as usize].is_empty();
        let controls = (0..tokens.len() as u32).filter(control).map(|id| (tokens[id as usize].clone(), id));
        Ok(Self(Arc::new(Inner {
            controls: Controls::new(controls.collect()),
            bytes_per_token_max: table.longest().max(1),
            bos: bos.filter(|_| encoder.adds_bos()),
            encoder: Encoder::Bpe(Box::new(encoder)),
            table: Arc::new(table),
            eos: eos_ids,
            bos_text: text(bos),
            eos_text: text(eos),
        })))
    }

    /// The byte tokenizer of synthetic models: ids 0 to 255 are bytes, any other renders as `<id>`. Nothing is special.
    pub fn bytes(vocab: usize) -> Self {
        Self(Arc::new(Inner {
            encoder: Encoder::Bytes,
            controls: Controls::new(Vec::new()),
            bytes_per_token_max: 1,
            table: Arc::new(TokenTable::bytes(vocab)),
            eos: Arc::new([]),
            bos: None,
            bos_text: String::new(),
            eos_text: String::new(),
        }))
    }

    /// The ids of `text`; adds none that the text does not spell.
    ///
    /// # Errors
    /// `Encode` when a byte is above the vocabulary of a small synthetic model, or the BPE fails.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, TokenizerError> {
        match &self.0.encoder {
            Encoder::Bpe(bpe) => bpe.encode(text, special),
            Encoder::Bytes => match text.bytes().find(|&byte| usize::from(byte) >= self.vocab_size()) {
                None => Ok(text.bytes().map(u32::from).collect()),
                Some(byte) => {
                    let vocab = self.vocab_size();
                    Err(TokenizerError::Encode(format!("byte {byte} lies outside the vocabulary of {vocab}")))
                }
            },
        }
    }

    /// The ids of a prompt that is plain text: `encode`, after the beginning-of-sequence token where the model wants one and the
    /// text does not begin with it. Text from a chat template goes through `encode` instead: it spells that token itself.
    ///
    /// # Errors
    /// As `encode`.
    pub fn encode_prompt(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = self.encode(text, special)?;
        if let Some(bos) = self.bos().filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The text of `ids`; bytes that are not UTF-8 become U+FFFD as in `String::from_utf8_lossy`.
    pub fn decode(&self, ids: &[u32], special: SpecialText) -> String {
        let shown = ids.iter().filter(|&&id| special == SpecialText::Show || !self.is_special(id));
        let bytes: Vec<u8> = shown.flat_map(|&id| self.0.table.bytes_of(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// A detokeniser for one stream of ids.
    pub fn detokenizer(&self) -> Detokenizer {
        detokenizer::new(Arc::clone(&self.0.table))
    }

    /// Tokens that have an id.
    pub fn vocab_size(&self) -> usize {
        self.0.table.len()
    }

    /// The bytes that an id stands for: for a special token its spelling. `None` outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        ((id as usize) < self.vocab_size()).then(|| self.0.table.bytes_of(id).to_vec())
    }

    /// The longest control token that `text` begins with: its length in bytes and its id.
    pub fn control_at(&self, text: &str) -> Option<(usize, u32)> {
        self.0.controls.at(text)
    }

    /// Tokens that `text` has at least, in a fraction of the time that `encode` takes: so many are needed for the bytes that no step of
    /// the encoding takes away.
    pub fn tokens_min(&self, text: &str) -> usize {
        let bytes = match &self.0.encoder {
            Encoder::Bpe(bpe) => bpe.bytes_min(text),
            Encoder::Bytes => text.len(),
        };
        bytes.div_ceil(self.0.bytes_per_token_max)
    }

    /// Whether text hides this token.
    pub fn is_special(&self, id: u32) -> bool {
        self.0.table.is_special(id)
    }

    /// The tokens that end an answer: the model's end of sequence and end of turn. Empty for synthetic models.
    pub fn eos_ids(&self) -> Arc<[u32]> {
        Arc::clone(&self.0.eos)
    }

    /// The token that stands before a plain prompt; `None` when the model wants none there.
    pub fn bos(&self) -> Option<u32> {
        self.0.bos
    }

    /// What a chat template calls `bos_token`; empty when the model has none.
    pub fn bos_text(&self) -> &str {
        &self.0.bos_text
    }

    /// What a chat template calls `eos_token`; empty when the model has none.
    pub fn eos_text(&self) -> &str {
        &self.0.eos_text
    }
}

/// The id under `tokenizer.ggml.<name>_token_id`, inside the vocabulary.
fn named_token(metadata: &Metadata, name: &str, vocab: usize) -> Result<Option<u32>, TokenizerError> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    match metadata.unsigned(&key)? {
        None => Ok(None),
        Some(id) if id < vocab as u64 => Ok(Some(id as u32)),
        Some(id) => Err(TokenizerError::Broken(format!("{key} is {id}, the vocabulary has {vocab} tokens"))),
    }
}

#[cfg(test)]
pub(super) mod tests;
