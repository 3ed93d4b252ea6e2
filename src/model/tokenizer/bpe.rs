//! Byte-level BPE over the `tokenizers` crate, built from GGUF metadata. Encoding only: `table` decodes.
//!
//! Two encoders share the vocabulary: one finds special tokens in the text, the other does not know them, so that what a user
//! wrote can never become a control token.

use std::collections::HashSet;

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::byte_level;
use super::table::Kind;
use super::{SpecialTokens, TokenizerError};
use crate::model::gguf::{GgufError, Metadata};

/// Splits of Llama 3 and Qwen 2; they differ in how many digits stay together.
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How text is cut before merging, by its name in `tokenizer.ggml.pre`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PreTokenizer {
    /// GPT-2's splits.
    Gpt2,
    /// Every digit alone, then GPT-2's splits.
    Smollm,
    Llama3,
    Qwen2,
}

impl PreTokenizer {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "gpt2" | "gpt-2" | "default" => Self::Gpt2,
            "smollm" => Self::Smollm,
            "llama-bpe" | "llama3" => Self::Llama3,
            "qwen2" => Self::Qwen2,
            _ => return None,
        })
    }

    fn build(self) -> tokenizers::Result<PreTokenizerWrapper> {
        let gpt2 = ByteLevel::new(false, true, true);
        let bytes_only = ByteLevel::new(false, true, false);
        let split =
            |regex: &str| Split::new(SplitPattern::Regex(regex.to_owned()), SplitDelimiterBehavior::Isolated, false);
        let steps: Vec<PreTokenizerWrapper> = match self {
            Self::Gpt2 => vec![gpt2.into()],
            Self::Smollm => vec![Digits::new(true).into(), gpt2.into()],
            Self::Llama3 => vec![split(LLAMA_3)?.into(), bytes_only.into()],
            Self::Qwen2 => vec![split(QWEN_2)?.into(), bytes_only.into()],
        };
        Ok(Sequence::new(steps).into())
    }
}

/// The two encoders of one vocabulary.
pub(super) struct Bpe {
    /// Finds control and user-defined tokens first.
    parsing: tokenizers::Tokenizer,
    /// Finds user-defined tokens only and has no control token at all.
    as_text: tokenizers::Tokenizer,
    adds_bos: bool,
    survivors: Survivors,
}

/// Bytes of a text that its tokens stand for, however it is cut.
enum Survivors {
    /// Those that have a token of their own; others may be dropped.
    WithToken(Box<[bool; 256]>),
    /// All of the text in normal form C, and every byte has a token.
    Normalized,
    /// Nothing is known: normal form C may make bytes that are dropped.
    Unknown,
}

/// Normal form C makes of a text no less than a byte for each ASCII character and a quarter of the bytes of the others; the most that it
/// takes is 5 bytes of 7, from iota with two marks.
const NORMALIZED_SHARE: usize = 4;

impl Bpe {
    /// Builds both encoders; `kinds` has one entry a token.
    pub(super) fn new(metadata: &Metadata, tokens: &[String], kinds: &[Kind]) -> Result<Self, TokenizerError> {
        let name = metadata.string("tokenizer.ggml.pre")?.unwrap_or("default");
        let pre = PreTokenizer::named(name)
            .ok_or_else(|| TokenizerError::Unsupported(format!("gpt2 with pre-tokenizer {name}")))?;
        let key = "tokenizer.ggml.merges";
        let merges = metadata.strings(key)?.ok_or_else(|| GgufError::MissingKey { key: key.to_owned() })?;
        let merges = checked_merges(merges, tokens, kinds)?;
        let spelled = |kind| tokens.iter().zip(kinds).filter(move |(_, k)| **k == kind).map(|(token, _)| token.clone());
        let build = |keeps: &dyn Fn(Kind) -> bool| {
            let ids = tokens.iter().zip(kinds).zip(0u32..).filter(|((_, kind), _)| keeps(**kind));
            let vocab: Vocab = ids.map(|((token, _), id)| (token.clone(), id)).collect();
            let user_defined = spelled(Kind::UserDefined).map(|token| AddedToken::from(token, false).normalized(false));
            encoder(vocab, merges.clone(), pre, user_defined.collect())
        };
        let broken = |error: tokenizers::Error| TokenizerError::Broken(error.to_string());
        let as_text = build(&|kind| kind != Kind::Control).map_err(broken)?;
        let mut parsing = build(&|_| true).map_err(broken)?;
        let control = spelled(Kind::Control).filter(|token| !token.is_empty());
        parsing.add_special_tokens(control.map(|token| AddedToken::from(token, true))).map_err(broken)?;
        let adds_bos = metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(pre == PreTokenizer::Llama3);
        let normal = tokens.iter().zip(kinds).filter(|(_, kind)| **kind == Kind::Normal);
        let bytes: HashSet<Vec<u8>> = normal.filter_map(|(token, _)| byte_level::bytes_of(token)).collect();
        let mut single = Box::new([false; 256]);
        bytes.iter().filter(|bytes| bytes.len() == 1).for_each(|bytes| single[usize::from(bytes[0])] = true);
        let survivors = match (pre, single.iter().all(|&has| has)) {
            (PreTokenizer::Qwen2, true) => Survivors::Normalized,
            (PreTokenizer::Qwen2, false) => Survivors::Unknown,
            _ => Survivors::WithToken(single),
        };
        Ok(Self { parsing, as_text, adds_bos, survivors })
    }

    pub(super) fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, TokenizerError> {
        let encoder = match special {
            SpecialTokens::Parse => &self.parsing,
            SpecialTokens::AsText => &self.as_text,
        };
        let encoding = encoder.encode_fast(text, false).map_err(|error| TokenizerError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Bytes that the tokens of `text` stand for, at least.
    pub(super) fn bytes_min(&self, text: &str) -> usize {
        match &self.survivors {
            Survivors::WithToken(kept) => text.bytes().filter(|&byte| kept[usize::from(byte)]).count(),
            Survivors::Normalized => {
                let ascii = text.bytes().filter(u8::is_ascii).count();
                ascii + (text.len() - ascii) / NORMALIZED_SHARE
            }
            Survivors::Unknown => 0,
        }
    }

    /// Whether a plain prompt begins with the beginning-of-sequence token.
    pub(super) fn adds_bos(&self) -> bool {
        self.adds_bos
    }
}

fn encoder(
    vocab: Vocab,
    merges: Merges,
    pre: PreTokenizer,
    user_defined: Vec<AddedToken>,
) -> tokenizers::Result<tokenizers::Tokenizer> {
    let whole_words_first = pre == PreTokenizer::Llama3;
    let bpe = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(whole_words_first).build()?;
    let mut tokenizer = tokenizers::Tokenizer::new(bpe);
    if pre == PreTokenizer::Qwen2 {
        tokenizer.with_normalizer(Some(NFC))?;
    }
    tokenizer.with_pre_tokenizer(Some(pre.build()?));
    tokenizer.add_tokens(user_defined)?;
    Ok(tokenizer)
}

/// Splits the merges and checks what the crate takes for granted: tokens are unique, and the parts and the result of a merge are
/// tokens that text may produce.
fn checked_merges(merges: &[String], tokens: &[String], kinds: &[Kind]) -> Result<Merges, TokenizerError> {
    let mut known = HashSet::with_capacity(tokens.len());
    if let Some(twice) = tokens.iter().find(|token| !known.insert(token.as_str())) {
        return Err(TokenizerError::Broken(format!("the token {twice:?} has two ids")));
    }
    tokens.iter().zip(kinds).filter(|(_, kind)| **kind == Kind::Control).for_each(|(token, _)| {
        known.remove(token.as_str());
    });
    let pair = |merge: &String| {
        let (left, right) = merge.split_once(' ')?;
        let result = format!("{left}{right}");
        let all_known = [left, right, &result].iter().all(|part| known.contains(part));
        all_known.then(|| (left.to_owned(), right.to_owned()))
    };
    let checked = |merge| {
        pair(merge)
            .ok_or_else(|| TokenizerError::Broken(format!("the merge {merge:?} does not join two tokens to a third")))
    };
    merges.iter().map(checked).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tokenizers::normalizers::NFD;
    use tokenizers::{NormalizedString, Normalizer};

    use super::*;

    fn normalized(normalizer: &impl Normalizer, text: &str) -> String {
        let mut text = NormalizedString::from(text);
        normalizer.normalize(&mut text).expect("it normalises");
        text.get().to_owned()
    }

    /// Every character of the first three planes; those above have no normal forms.
    #[test]
    fn normal_form_c_takes_no_more_from_a_text_than_is_assumed() {
        let all: Vec<(char, String)> =
            ('\0'..'\u{30000}').map(|c| (c, normalized(&NFD, c.encode_utf8(&mut [0; 4])))).collect();
        // The longest spelling of each character that has no decomposition: itself, or one that decomposes to it alone.
        let mut longest: HashMap<char, usize> = HashMap::new();
        for (c, decomposed) in &all {
            let mut parts = decomposed.chars();
            if let (Some(part), None) = (parts.next(), parts.next()) {
                let bytes = longest.entry(part).or_insert(part.len_utf8());
                *bytes = c.len_utf8().max(*bytes);
            }
        }
        let spelled = |decomposed: &str| decomposed.chars().map(|part| longest[&part]).sum::<usize>();
        // What a character has to be worth: the ASCII ones that it may come from are counted whole, the others by their share.
        let share = |part: char| if part.is_ascii() { NORMALIZED_SHARE.max(longest[&part]) } else { longest[&part] };
        let mut composed = 0;
        for (c, decomposed) in &all {
            assert!(c.len_utf8() <= spelled(decomposed), "{c:?} is no longer than what it decomposes to");
            if normalized(&NFC, c.encode_utf8(&mut [0; 4])) == c.to_string() {
                let worth = decomposed.chars().map(share).sum::<usize>();
                assert!(worth <= NORMALIZED_SHARE * c.len_utf8(), "{c:?} may come from more");
                composed += usize::from(decomposed.chars().count() > 1);
            }
        }
        assert!(composed > 11_000, "{composed}");
    }
}
