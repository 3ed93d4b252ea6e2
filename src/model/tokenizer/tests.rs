//! Tests of tokenizer and detokeniser on small vocabularies; the real model's ids are compared in tests/model_tokenizer.rs.

use proptest::prelude::*;

use super::*;
use crate::model::gguf::write::GgufFile;
use crate::model::gguf::{Array, Gguf, Value};

/// A byte-level vocabulary: controls, a user-defined token, the 256 bytes and a few merges.
fn small_gguf() -> GgufFile {
    let alphabet: Vec<char> =
        (0..0x200).filter_map(char::from_u32).filter(|&c| byte_level::byte_of(c).is_some()).collect();
    let mut tokens: Vec<String> = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[tool]"].map(str::to_owned).to_vec();
    let mut types = vec![3, 3, 3, 4];
    tokens.extend(alphabet.iter().map(char::to_string));
    let merges = ["h e", "l l", "he ll", "Ġ w", "ð Ł", "ðŁ ĺ"];
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    types.resize(tokens.len(), 1);
    let mut file = GgufFile::default();
    let text = |text: &str| Value::String(text.to_owned());
    file.set("tokenizer.ggml.model", text("gpt2"))
        .set("tokenizer.ggml.pre", text("smollm"))
        .set("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)))
        .set("tokenizer.ggml.token_type", Value::Array(Array::I32(types)))
        .set("tokenizer.ggml.merges", Value::Array(Array::String(merges.map(str::to_owned).to_vec())))
        .set("tokenizer.ggml.bos_token_id", Value::U32(1))
        .set("tokenizer.ggml.eos_token_id", Value::U32(2));
    file
}

fn tokenizer_of(file: &GgufFile) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::from_gguf(&Gguf::parse(&file.to_bytes()).expect("the writer writes what the reader reads").metadata)
}

/// The small vocabulary's tokenizer.
pub fn small() -> Tokenizer {
    tokenizer_of(&small_gguf()).expect("the small vocabulary is sound")
}

fn replaced(key: &str, value: Value) -> GgufFile {
    let mut file = small_gguf();
    file.metadata.retain(|(name, _)| name != key);
    file.set(key, value);
    file
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut detokenizer = tokenizer.detokenizer();
    let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
    text.push_str(&detokenizer.finish());
    text
}

#[test]
fn a_text_has_no_fewer_tokens_than_its_bytes_need() {
    let pre = |name: &str| replaced("tokenizer.ggml.pre", Value::String(name.to_owned()));
    // As the default model: a byte without a token, which is dropped, is part of no count.
    let without_x = |mut file: GgufFile| {
        for (key, value) in &mut file.metadata {
            if let ("tokenizer.ggml.tokens", Value::Array(Array::String(tokens))) = (key.as_str(), value) {
                tokens.iter_mut().filter(|token| *token == "x").for_each(|token| token.push_str("xx"));
            }
        }
        file
    };
    let files = [pre("smollm"), pre("qwen2"), without_x(pre("smollm")), without_x(pre("qwen2"))];
    let mut random = crate::planner::seeded::Seeded::new(1);
    for tokenizer in files.map(|file| tokenizer_of(&file).expect("a sound vocabulary")) {
        for _ in 0..500 {
            // The last ones are shorter in normal form C.
            let pieces =
                ["<|endoftext|>", "[tool]", "hell", " w", "😀", "x", "\0", "\u{1fbe}\u{308}\u{301}", "K\u{327}"];
            let text: String = (0..random.below(40)).map(|_| pieces[random.below(pieces.len())]).collect();
            for special in [SpecialTokens::Parse, SpecialTokens::AsText] {
                let tokens = tokenizer.encode(&text, special).unwrap().len();
                assert!(tokenizer.tokens_min(&text) <= tokens, "{text:?}: {tokens} tokens");
            }
        }
    }
    let min = |file: GgufFile, text: &str| tokenizer_of(&file).unwrap().tokens_min(text);
    let (longest, text) = ("<|endoftext|>".len(), "word x ".repeat(1_000));
    assert_eq!(min(pre("smollm"), &text), 7_000usize.div_ceil(longest));
    assert_eq!(min(without_x(pre("smollm")), &text), 6_000usize.div_ceil(longest));
    assert_eq!(min(pre("qwen2"), &text), 7_000usize.div_ceil(longest), "ASCII stays in any normal form");
    assert_eq!(min(without_x(pre("qwen2")), &text), 0, "nothing is known");
    assert_eq!(Tokenizer::bytes(320).tokens_min(&text), 7_000);
}

#[test]
fn special_tokens_are_parsed_only_where_that_is_asked_for() {
    let t = small();
    let text = "<|im_start|>he[tool]";
    assert_eq!(t.encode(text, SpecialTokens::Parse).unwrap().first(), Some(&1));
    assert_eq!(t.encode(text, SpecialTokens::Parse).unwrap().len(), 3);
    let as_text = t.encode(text, SpecialTokens::AsText).unwrap();
    assert!(as_text.iter().all(|&id| !t.is_special(id)), "{as_text:?}");
    assert_eq!(as_text.last(), Some(&3), "a user-defined token is text and always found");
    assert_eq!(t.decode(&as_text, SpecialText::Hide), text);
}

#[test]
fn hidden_special_tokens_leave_no_trace_and_shown_ones_are_spelled() {
    let t = small();
    let ids = t.encode("<|im_start|>hello<|im_end|>", SpecialTokens::Parse).unwrap();
    assert_eq!(t.decode(&ids, SpecialText::Hide), "hello");
    assert_eq!(t.decode(&ids, SpecialText::Show), "<|im_start|>hello<|im_end|>");
    assert_eq!(streamed(&t, &ids), "hello");
}

#[test]
fn the_end_tokens_are_the_named_one_and_the_well_known_ones() {
    let mut ids = small().eos_ids().to_vec();
    ids.sort_unstable();
    assert_eq!(ids, [0, 2]);
}

#[test]
fn a_character_over_three_tokens_appears_with_the_last() {
    let t = small();
    let ids = t.encode("a😀b", SpecialTokens::AsText).unwrap();
    assert_eq!(ids.len(), 4, "a, three bytes merged, one byte, b");
    let mut d = t.detokenizer();
    let pieces: Vec<String> = ids.iter().map(|&id| d.push(id)).collect();
    assert_eq!(pieces, ["a", "", "😀", "b"]);
    assert_eq!(d.finish(), "");
}

#[test]
fn a_character_that_never_ends_is_one_replacement_at_the_end() {
    let t = Tokenizer::bytes(256);
    let mut d = t.detokenizer();
    assert_eq!([d.push(0xf0), d.push(0x9f), d.push(0x98)].concat(), "");
    assert_eq!(d.finish(), "\u{fffd}");
    assert_eq!(d.finish(), "");
}

#[test]
fn an_invalid_byte_is_replaced_at_once() {
    let t = Tokenizer::bytes(256);
    let mut d = t.detokenizer();
    assert_eq!(d.push(0xff), "\u{fffd}");
    assert_eq!([d.push(0xe4), d.push(u32::from(b'x'))], ["", "\u{fffd}x"]);
}

#[test]
fn a_prompt_gets_the_beginning_token_only_where_the_model_asks_and_never_twice() {
    assert_eq!(small().bos(), None);
    let t = tokenizer_of(&replaced("tokenizer.ggml.add_bos_token", Value::Bool(true))).unwrap();
    assert_eq!(t.bos(), Some(1));
    let once = t.encode_prompt("hi", SpecialTokens::Parse).unwrap();
    assert_eq!(once[0], 1);
    assert_eq!(t.encode_prompt("<|im_start|>hi", SpecialTokens::Parse).unwrap(), once);
    assert!(!t.encode("hi", SpecialTokens::Parse).unwrap().contains(&1));
}

#[test]
fn every_broken_vocabulary_is_refused_by_name() {
    let strings = |list: &[&str]| Value::Array(Array::String(list.iter().map(|s| (*s).to_owned()).collect()));
    let cases = [
        ("tokenizer.ggml.model", Value::String("llama".into()), "tokenizer llama is not supported"),
        ("tokenizer.ggml.pre", Value::String("tekken".into()), "pre-tokenizer tekken"),
        ("tokenizer.ggml.merges", strings(&["h"]), "the merge \"h\""),
        ("tokenizer.ggml.merges", strings(&["h zz"]), "the merge \"h zz\""),
        ("tokenizer.ggml.merges", strings(&["h x"]), "the merge \"h x\""),
        ("tokenizer.ggml.tokens", strings(&["a", "a", "b"]), "types"),
        ("tokenizer.ggml.eos_token_id", Value::U32(100_000), "eos_token_id is 100000"),
        ("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![1])), "1 token types"),
    ];
    for (key, value, wanted) in cases {
        let error = tokenizer_of(&replaced(key, value)).expect_err(key).to_string();
        assert!(error.contains(wanted), "{key}: {error}");
    }
}

#[test]
fn digits_stand_alone_before_merging() {
    let mut file = small_gguf();
    for (key, value) in &mut file.metadata {
        match (key.as_str(), value) {
            ("tokenizer.ggml.tokens", Value::Array(Array::String(v))) => v.push("12".into()),
            ("tokenizer.ggml.token_type", Value::Array(Array::I32(v))) => v.push(1),
            ("tokenizer.ggml.merges", Value::Array(Array::String(v))) => v.push("1 2".into()),
            _ => {}
        }
    }
    let smollm = tokenizer_of(&file).unwrap();
    assert_eq!(smollm.encode("12", SpecialTokens::AsText).unwrap().len(), 2);
    for (key, value) in &mut file.metadata {
        if key == "tokenizer.ggml.pre" {
            *value = Value::String("gpt2".into());
        }
    }
    assert_eq!(tokenizer_of(&file).unwrap().encode("12", SpecialTokens::AsText).unwrap().len(), 1);
}

#[test]
fn the_byte_tokenizer_spells_ids_above_255() {
    let t = Tokenizer::bytes(300);
    assert_eq!(t.encode("é", SpecialTokens::Parse).unwrap(), [0xc3, 0xa9]);
    assert_eq!(t.decode(&[104, 105, 256, 299, 300], SpecialText::Hide), "hi<256><299>");
    assert_eq!(t.token_bytes(299), Some(b"<299>".to_vec()));
    assert_eq!(t.token_bytes(300), None);
    assert!(Tokenizer::bytes(100).encode("é", SpecialTokens::AsText).is_err());
}

proptest! {
    /// I7 on any ids: special, broken characters, ids outside the vocabulary.
    #[test]
    fn streamed_text_is_the_whole_text(ids in prop::collection::vec(0u32..280, 0..64)) {
        for t in [small(), Tokenizer::bytes(270)] {
            prop_assert_eq!(streamed(&t, &ids), t.decode(&ids, SpecialText::Hide));
        }
    }

    #[test]
    fn decoding_gives_back_every_text(text in "[a-z 0-9é中文字😀👩‍👩‍👧\\n<|>\u{0}-\u{1f}]{0,40}") {
        let t = small();
        for special in [SpecialTokens::Parse, SpecialTokens::AsText] {
            let ids = t.encode(&text, special).unwrap();
            prop_assert_eq!(&t.decode(&ids, SpecialText::Show), &text);
            prop_assert_eq!(&streamed(&t, &ids), &t.decode(&ids, SpecialText::Hide));
        }
    }
}
