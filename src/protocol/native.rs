//! The native dialect: /v1/generate and /v1/generate/stream. Strict: greedy unless a temperature is given, a fixed seed unless one is
//! given, and a sampling parameter without a temperature is an error.

use std::num::NonZeroU32;
use std::ops::RangeInclusive;

use bytes::Bytes;
use serde::Serialize;

use super::body::Body;
use super::choice::{Answer, ChoiceEnd, Delta};
use super::errors::{ApiError, Code, ErrorDialect};
use super::format::{Format, Usage, json_bytes};
use super::sampling::{DEFAULT_SEED, LOGPROBS, MAX_TOKENS, SEEDS, SHARE, Sampling, TOP_K};
use super::sse;
use crate::actors::session::messages::GeneratedToken;
use crate::backend::TokenLogprobs;

/// Stop strings of one request at most.
pub const MAX_STOPS: usize = 16;
/// `temperature`.
pub const TEMPERATURE: RangeInclusive<f64> = 0.0..=5.0;

/// What to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// A native request.
#[derive(Clone, Debug, PartialEq)]
pub struct Generate {
    /// What to continue.
    pub prompt: Prompt,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Selection.
    pub sampling: Sampling,
    /// Seed of the draws.
    pub seed: u64,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Log-probabilities wanted, with so many alternatives.
    pub logprobs: Option<u8>,
    /// Whether end-of-sequence tokens are tokens like others.
    pub ignore_eos: bool,
}

impl Generate {
    /// Reads a request body.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let prompt = match (body.string("prompt")?, body.token_ids("prompt_tokens")?) {
            (Some(text), None) => Prompt::Text(text),
            (None, Some(ids)) => Prompt::Tokens(ids),
            (None, None) => return body.require("prompt", None),
            (Some(_), Some(_)) => {
                let text = "prompt and prompt_tokens exclude each other";
                return Err(ApiError::about(Code::InvalidValue, "prompt_tokens", text));
            }
        };
        let request = Self {
            prompt,
            max_tokens: body.integer("max_tokens", MAX_TOKENS)?.unwrap_or(64) as usize,
            sampling: Sampling::GREEDY,
            seed: DEFAULT_SEED,
            stop: body.stop_strings("stop", MAX_STOPS)?,
            logprobs: body.integer("logprobs", LOGPROBS)?.map(|n| n as u8),
            ignore_eos: body.boolean("ignore_eos")?.unwrap_or(false),
        };
        let (sampling, seed) = sampling(&mut body)?;
        body.finish()?;
        Ok(Self { sampling, seed, ..request })
    }
}

fn sampling(body: &mut Body) -> Result<(Sampling, u64), ApiError> {
    let temperature = body.number("temperature", TEMPERATURE)?;
    let top_k = body.integer("top_k", TOP_K)?;
    let top_p = body.number("top_p", SHARE)?;
    let min_p = body.number("min_p", SHARE)?;
    let seed = body.integer("seed", SEEDS)?;
    let given =
        [("top_k", top_k.is_some()), ("top_p", top_p.is_some()), ("min_p", min_p.is_some()), ("seed", seed.is_some())];
    if let (None, Some((name, _))) = (temperature, given.iter().find(|(_, given)| *given)) {
        let text = format!("{name} needs a temperature: without one the answer is greedy and {name} has no effect");
        return Err(ApiError::about(Code::InvalidValue, *name, text));
    }
    let sampling = Sampling {
        temperature: temperature.unwrap_or(0.0),
        top_k: top_k.and_then(|k| NonZeroU32::new(k as u32)),
        top_p: top_p.unwrap_or(1.0),
        min_p: min_p.unwrap_or(0.0),
    };
    Ok((sampling, seed.unwrap_or(DEFAULT_SEED)))
}

/// Log-probabilities of one token.
#[derive(Serialize)]
struct TokenLogprob {
    token_id: u32,
    logprob: f64,
    top: Vec<Alternative>,
}

#[derive(Serialize)]
struct Alternative {
    token_id: u32,
    logprob: f64,
}

impl TokenLogprob {
    fn of(token: &GeneratedToken) -> Option<Self> {
        let TokenLogprobs { chosen, top } = token.logprobs.as_ref()?;
        let top = top.iter().map(|&(token_id, logprob)| Alternative { token_id, logprob }).collect();
        Some(Self { token_id: token.id, logprob: *chosen, top })
    }
}

/// The body of /v1/generate, and the frames of /v1/generate/stream: `token`, then `done` or `error`.
pub struct NativeFormat {
    /// Whether the body has log-probabilities.
    pub logprobs: Option<u8>,
}

#[derive(Serialize)]
struct TokenFrame<'a> {
    token_id: u32,
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<TokenLogprob>,
}

/// A whole answer.
#[derive(Serialize)]
struct Generated<'a> {
    text: &'a str,
    tokens_generated: usize,
    finish_reason: &'static str,
    prompt_tokens: usize,
    token_ids: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<TokenLogprob>>,
}

#[derive(Serialize)]
struct DoneFrame<'a> {
    finish_reason: &'static str,
    tokens_generated: u32,
    text: &'a str,
}

impl Format for NativeFormat {
    fn whole(&self, answers: &[Answer], usage: Usage) -> Bytes {
        let Some(answer) = answers.first() else { return Bytes::from_static(b"null") };
        let ids: Vec<u32> = answer.tokens.iter().map(|t| t.id).collect();
        json_bytes(&Generated {
            text: &answer.text,
            tokens_generated: ids.len(),
            finish_reason: answer.reason.name(),
            prompt_tokens: usage.prompt_tokens,
            token_ids: ids,
            logprobs: self.logprobs.map(|_| answer.tokens.iter().filter_map(TokenLogprob::of).collect()),
        })
    }

    fn token(&mut self, _choice: usize, delta: &Delta) -> Option<Bytes> {
        let logprobs = TokenLogprob::of(&delta.token);
        Some(sse::event("token", &TokenFrame { token_id: delta.token.id, text: &delta.text, logprobs }))
    }

    fn end(&mut self, _choice: usize, end: &ChoiceEnd) -> Bytes {
        let done = DoneFrame { finish_reason: end.reason.name(), tokens_generated: end.tokens, text: &end.tail };
        sse::event("done", &done)
    }

    fn failed(&mut self, error: &ApiError) -> Bytes {
        sse::event("error", &error.body(ErrorDialect::Native))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn refused(body: Value) -> (Code, String) {
        let error = Generate::parse(body.to_string().as_bytes()).expect_err("refused");
        (error.code, error.param.unwrap_or_default())
    }

    #[test]
    fn a_prompt_alone_is_greedy_for_64_tokens() {
        let request = Generate::parse(br#"{"prompt": "x"}"#).expect("valid");
        assert_eq!((request.max_tokens, request.sampling), (64, Sampling::GREEDY));
    }

    #[test]
    fn sampling_parameters_need_a_temperature() {
        for (name, value) in [("top_k", json!(3)), ("top_p", json!(0.5)), ("min_p", json!(0.1)), ("seed", json!(1))] {
            assert_eq!(refused(json!({"prompt": "x", name: value})), (Code::InvalidValue, name.to_owned()));
            let with = json!({"prompt": "x", name: value, "temperature": 0.5});
            assert!(Generate::parse(with.to_string().as_bytes()).is_ok());
        }
    }

    #[test]
    fn every_bad_field_is_refused_by_name() {
        let cases = [
            (json!({}), Code::MissingParameter, "prompt"),
            (json!({"prompt": "x", "prompt_tokens": [1]}), Code::InvalidValue, "prompt_tokens"),
            (json!({"prompt_tokens": [1, -1]}), Code::InvalidValue, "prompt_tokens"),
            (json!({"prompt_tokens": [1, 4294967296u64]}), Code::InvalidValue, "prompt_tokens"),
            (json!({"prompt": 3}), Code::InvalidValue, "prompt"),
            (json!({"prompt": "x", "max_tokens": 0}), Code::InvalidValue, "max_tokens"),
            (json!({"prompt": "x", "temperature": 5.1}), Code::InvalidValue, "temperature"),
            (json!({"prompt": "x", "temperature": 1, "top_k": 0}), Code::InvalidValue, "top_k"),
            (json!({"prompt": "x", "stop": ""}), Code::InvalidValue, "stop"),
            (json!({"prompt": "x", "stop": [3]}), Code::InvalidValue, "stop"),
            (json!({"prompt": "x", "logprobs": 21}), Code::InvalidValue, "logprobs"),
            (json!({"prompt": "x", "ignore_eos": 1}), Code::InvalidValue, "ignore_eos"),
            (json!({"prompt": "x", "stream": true}), Code::UnknownParameter, "stream"),
        ];
        for (body, code, param) in cases {
            assert_eq!(refused(body), (code, param.to_owned()));
        }
    }
}
