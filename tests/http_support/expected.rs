//! What the scripted model answers, and small tools for bodies of every dialect.
#![allow(dead_code)] // no suite needs everything

use crucible::backend::SamplingRow;
use crucible::model::tokenizer::{SpecialText, SpecialTokens, Tokenizer};
use serde_json::Value;

use crate::engine_support::fake::{self, Script};

/// `body` with these fields on top.
pub fn merge(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// The names of an object's fields, sorted.
pub fn keys(value: &Value) -> Vec<String> {
    let mut keys: Vec<String> = value.as_object().expect("an object").keys().cloned().collect();
    keys.sort();
    keys
}

/// The tokenizer of the scripted server.
pub fn tokenizer() -> Tokenizer {
    Tokenizer::bytes(fake::VOCAB)
}

/// The ids of a prompt.
pub fn ids(prompt: &str) -> Vec<u32> {
    tokenizer().encode(prompt, SpecialTokens::Parse).expect("ids")
}

/// The text of an answer's ids.
pub fn text_of(ids: &[u32]) -> String {
    tokenizer().decode(ids, SpecialText::Hide)
}

/// ChatML of these turns, with the beginning of an answer.
pub fn chatml(turns: &[(&str, &str)]) -> String {
    let turn = |(role, content): &(&str, &str)| format!("<|im_start|>{role}\n{content}<|im_end|>\n");
    turns.iter().map(turn).collect::<String>() + "<|im_start|>assistant\n"
}

/// The text that the scripted model answers to a prompt.
pub fn answer(prompt: &str, tokens: usize) -> String {
    text_of(&fake::expected(&ids(prompt), tokens))
}

/// What the backend was told for the sequences of the last request, one row for each, by their ids.
pub fn selections(script: &Script) -> Vec<SamplingRow> {
    let seen = script.seen.lock().unwrap();
    let mut rows: Vec<_> = seen.iter().flat_map(|s| &s.rows).map(|r| (r.request, r.sampling)).collect();
    rows.sort_by_key(|(request, _)| *request);
    rows.dedup_by_key(|(request, _)| *request);
    rows.into_iter().map(|(_, sampling)| sampling).collect()
}
