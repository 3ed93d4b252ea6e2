//! POST /tokenize and /detokenize: exactly the ids that a request would be served with, and back.

use bytes::Bytes;
use serde_json::{Value, json};

use super::{Service, text};
use crate::model::chat_template::{ChatMessage, GenerationPrompt};
use crate::model::tokenizer::{SpecialText, SpecialTokens};
use crate::protocol::body::Body;
use crate::protocol::errors::{ApiError, Code};
use crate::protocol::openai::chat;

/// Text of a token, roughly: decides only where ids are turned into text.
const BYTES_PER_TOKEN: usize = 4;
/// Characters of a text that /tokenize takes at most.
pub const MAX_TEXT_CHARS: usize = 524_288;
/// Ids that /detokenize takes at most. A token may stand for a hundred bytes, so the body's limit alone would let a small request ask
/// for a very large answer.
pub const MAX_IDS: usize = 131_072;

/// POST /tokenize: `{text, special_tokens = true}` or `{messages, add_generation_prompt = true}` → `{tokens, count}`.
///
/// # Errors
/// The first thing that is wrong with the request.
pub async fn tokenize(service: &Service, body: Bytes) -> Result<Value, ApiError> {
    let tokens = tokens(service, body).await?;
    Ok(json!({"tokens": tokens, "count": tokens.len()}))
}

/// What is to be tokenised.
enum Asked {
    Text(String, SpecialTokens),
    Chat(Vec<ChatMessage>, GenerationPrompt),
}

impl Asked {
    fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let asked = match (body.string("text")?, body.value("messages")) {
            (Some(text), None) => match body.boolean("special_tokens")?.unwrap_or(true) {
                true => Self::Text(text, SpecialTokens::Parse),
                false => Self::Text(text, SpecialTokens::AsText),
            },
            (None, Some(messages)) => match body.boolean("add_generation_prompt")?.unwrap_or(true) {
                true => Self::Chat(chat::turns(messages)?, GenerationPrompt::Add),
                false => Self::Chat(chat::turns(messages)?, GenerationPrompt::Omit),
            },
            (None, None) => body.require("text", None)?,
            (Some(_), Some(_)) => {
                return Err(ApiError::about(Code::InvalidValue, "messages", "text and messages exclude each other"));
            }
        };
        body.finish()?;
        asked.short_enough()
    }

    /// # Errors
    /// A text is longer than `MAX_TEXT_CHARS`; what becomes of messages has the bound of prompts.
    fn short_enough(self) -> Result<Self, ApiError> {
        let characters = if let Self::Text(text, _) = &self { text.chars().count() } else { 0 };
        if characters <= MAX_TEXT_CHARS {
            return Ok(self);
        }
        let text = format!("text has {characters} characters, at most {MAX_TEXT_CHARS} are taken; send it in parts");
        Err(ApiError::about(Code::InvalidValue, "text", text))
    }
}

async fn tokens(service: &Service, body: Bytes) -> Result<Vec<u32>, ApiError> {
    match text::parsed(body, Asked::parse).await? {
        Asked::Text(text, special) => {
            let tokenizer = service.tokenizer.clone();
            let length = text.len();
            // Text that spells special tokens is a prompt; text that does not is only text.
            let encode = move || {
                let ids = match special {
                    SpecialTokens::Parse => tokenizer.encode_prompt(&text, special),
                    SpecialTokens::AsText => tokenizer.encode(&text, special),
                };
                ids.map_err(|e| ApiError::about(Code::InvalidValue, "text", e.to_string()))
            };
            text::off_the_worker(length, encode).await
        }
        Asked::Chat(turns, end) => Ok(text::chat(service, turns, end).await?.to_vec()),
    }
}

/// POST /detokenize: `{tokens, special_tokens = true}` → `{text}`.
///
/// # Errors
/// The first thing that is wrong with the request.
pub async fn detokenize(service: &Service, body: Bytes) -> Result<Value, ApiError> {
    let (tokens, special) = text::parsed(body, ids).await?;
    let vocab = service.engine.limits().vocab;
    if let Some(id) = tokens.iter().find(|&&id| id as usize >= vocab) {
        let text = format!("token id {id} is outside the vocabulary of {vocab}; send ids below {vocab}");
        return Err(ApiError::about(Code::InvalidValue, "tokens", text));
    }
    let tokenizer = service.tokenizer.clone();
    let bytes = tokens.len() * BYTES_PER_TOKEN;
    let text = text::off_the_worker(bytes, move || Ok(tokenizer.decode(&tokens, special))).await?;
    Ok(json!({"text": text}))
}

/// The ids that are to become text, and how.
fn ids(bytes: &[u8]) -> Result<(Vec<u32>, SpecialText), ApiError> {
    let mut body = Body::parse(bytes)?;
    let tokens = body.token_ids("tokens")?;
    let tokens = body.require("tokens", tokens)?;
    let special = match body.boolean("special_tokens")?.unwrap_or(true) {
        true => SpecialText::Show,
        false => SpecialText::Hide,
    };
    body.finish()?;
    if tokens.len() > MAX_IDS {
        let text = format!("tokens has {} ids, at most {MAX_IDS} are taken; send them in parts", tokens.len());
        return Err(ApiError::about(Code::InvalidValue, "tokens", text));
    }
    Ok((tokens, special))
}
