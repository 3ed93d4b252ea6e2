//! OpenAI's dialect: what its two generating endpoints share. Parameters that are not served pass at their no-op value and are
//! refused by name otherwise; `top_k`, `min_p` and `ignore_eos` are ours.

pub mod chat;
pub mod completions;
pub mod envelope;
pub mod joined;
pub mod models;

use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::sync::Arc;

use serde_json::json;

use super::adjust;
use super::body::{Body, wrong_type};
use super::errors::{ApiError, Code};
use super::sampling::{SHARE, Sampling, TOP_K};
use crate::backend::Adjust;

/// Stop strings of one request at most.
pub const MAX_STOPS: usize = 4;
/// Choices of one prompt at most; the waiting queue may hold fewer.
pub const MAX_CHOICES: u64 = 128;
/// `temperature`.
pub const TEMPERATURE: RangeInclusive<f64> = 0.0..=2.0;

/// Choices of one prompt at most, of a server whose waiting queue holds so many requests.
pub fn most_choices(queue: usize) -> u64 {
    MAX_CHOICES.min(queue as u64)
}

/// Fields of both endpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    /// The model named.
    pub model: String,
    /// Selection.
    pub sampling: Sampling,
    /// Penalties and bias before it.
    pub adjust: Option<Arc<Adjust>>,
    /// Seed of the draws, when the client names one.
    pub seed: Option<u64>,
    /// Strings that end an answer.
    pub stop: Vec<String>,
    /// Choices per prompt.
    pub n: usize,
    /// Whether the answer is a stream, and of which kind.
    pub delivery: Delivery,
    /// Whether end-of-sequence tokens are tokens like others.
    pub ignore_eos: bool,
    /// The client's name for its user; goes to the log only.
    pub user: Option<String>,
}

/// Most tokens to generate, as the client wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxTokens {
    /// How many.
    pub tokens: usize,
    /// The field that says it.
    pub field: &'static str,
}

/// How the answer travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// One JSON body.
    Whole,
    /// Events.
    Stream,
    /// Events, with a last one for the token counts.
    StreamWithUsage,
}

impl Common {
    fn parse(body: &mut Body, most_choices: u64) -> Result<Self, ApiError> {
        let model = body.string("model")?;
        Ok(Self {
            model: body.require("model", model)?,
            sampling: sampling(body)?,
            adjust: adjust::parse(body)?,
            seed: seed(body)?,
            stop: body.stop_strings("stop", MAX_STOPS)?,
            n: body.integer("n", 1..=most_choices)?.unwrap_or(1) as usize,
            delivery: delivery(body)?,
            ignore_eos: body.boolean("ignore_eos")?.unwrap_or(false),
            user: body.string("user")?,
        })
    }
}

fn sampling(body: &mut Body) -> Result<Sampling, ApiError> {
    let top_k = body.integer("top_k", TOP_K)?;
    Ok(Sampling {
        temperature: body.number("temperature", TEMPERATURE)?.unwrap_or(1.0),
        top_k: top_k.and_then(|k| NonZeroU32::new(k as u32)),
        top_p: body.number("top_p", SHARE)?.unwrap_or(1.0),
        min_p: body.number("min_p", SHARE)?.unwrap_or(0.0),
    })
}

/// A seed is any 64-bit integer; a negative one is taken by its bits.
fn seed(body: &mut Body) -> Result<Option<u64>, ApiError> {
    let Some(value) = body.value("seed") else { return Ok(None) };
    let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    seed.map(Some).ok_or_else(|| wrong_type("seed", "a 64-bit integer", &value))
}

fn delivery(body: &mut Body) -> Result<Delivery, ApiError> {
    let stream = body.boolean("stream")?.unwrap_or(false);
    let Some(options) = body.value("stream_options") else {
        return Ok(if stream { Delivery::Stream } else { Delivery::Whole });
    };
    if !stream {
        let text = "stream_options is only allowed with stream = true";
        return Err(ApiError::about(Code::InvalidValue, "stream_options", text));
    }
    let mut options = Body::nested(options, "stream_options")?;
    let usage = options.boolean("include_usage")?.unwrap_or(false);
    options.unsupported("include_obfuscation", &[json!(false)])?;
    options.finish()?;
    Ok(if usage { Delivery::StreamWithUsage } else { Delivery::Stream })
}
