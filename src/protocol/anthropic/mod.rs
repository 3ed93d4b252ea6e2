//! Anthropic's dialect. Parameters that are not served pass at their no-op value and are refused by name otherwise; `seed`, `min_p`
//! and `ignore_eos` are ours. A cache control is a hint that changes no answer: it is read, and the usage says that nothing was
//! cached.

pub mod messages;
pub mod models;

use std::sync::LazyLock;

use serde_json::{Value, json};

use super::body::{Body, Unserved, wrong_type};
use super::content;
use super::errors::{ApiError, Code};
use crate::model::chat_template::{ChatMessage, GenerationPrompt};

/// Messages of one request at most.
pub const MAX_MESSAGES: usize = 100_000;
/// Who speaks.
pub const ROLES: [&str; 3] = ["user", "assistant", "system"];
/// The `type` of a cache control, and how long it may hold.
pub const CACHE_CONTROLS: [&str; 1] = ["ephemeral"];
/// `ttl` of a cache control.
pub const CACHE_TIMES: [&str; 2] = ["5m", "1h"];

/// Fields of both endpoints that are not served.
pub static UNSERVED: LazyLock<Unserved> = LazyLock::new(|| {
    let parallel = |tools: bool| json!({"type": "auto", "disable_parallel_tool_use": !tools});
    let no_config = json!({"effort": null, "format": null});
    vec![
        ("thinking", vec![json!({"type": "disabled"})]),
        ("tools", vec![json!([])]),
        ("tool_choice", vec![json!({"type": "auto"}), json!({"type": "none"}), parallel(true), parallel(false)]),
        ("output_config", vec![json!({}), json!({"effort": null}), json!({"format": null}), no_config]),
        ("speed", vec![json!("standard")]),
        ("mcp_servers", vec![json!([])]),
        ("output_format", vec![]),
        ("context_management", vec![]),
        ("user_profile_id", vec![]),
        ("workspace_id", vec![]),
    ]
});
/// Fields of a block of text that are not served.
pub static UNSERVED_OF_BLOCK: LazyLock<Unserved> = LazyLock::new(|| vec![("citations", vec![json!([])])]);

/// What both endpoints read: the model and what it is to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// The model named.
    pub model: String,
    /// The system prompt, then the turns; neighbours of one role are one turn.
    pub turns: Vec<ChatMessage>,
    /// Whether the model answers the last turn or continues it.
    pub end: GenerationPrompt,
}

impl Conversation {
    /// Reads a request of /v1/messages/count_tokens.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let conversation = Self::read(&mut body)?;
        body.finish()?;
        Ok(conversation)
    }

    fn read(body: &mut Body) -> Result<Self, ApiError> {
        let model = body.string("model")?;
        let model = body.require("model", model)?;
        let mut turns = Vec::new();
        let system = match body.value("system") {
            Some(system) => content::text(system, "system", block)?,
            None => String::new(),
        };
        if !system.is_empty() {
            turns.push(ChatMessage { role: "system".to_owned(), content: system });
        }
        let messages = body.value("messages");
        let end = read_messages(body.require("messages", messages)?, &mut turns)?;
        cache_control(body)?;
        body.refuse(&UNSERVED)?;
        Ok(Self { model, turns, end })
    }
}

/// Appends the turns of `messages`; tells how the conversation ends.
fn read_messages(value: Value, turns: &mut Vec<ChatMessage>) -> Result<GenerationPrompt, ApiError> {
    let Value::Array(items) = value else { return Err(wrong_type("messages", "an array of messages", &value)) };
    if items.is_empty() || items.len() > MAX_MESSAGES {
        let text = format!("messages must hold 1 to {MAX_MESSAGES} messages, not {}", items.len());
        return Err(ApiError::about(Code::InvalidValue, "messages", text));
    }
    let last = items.len() - 1;
    let mut end = GenerationPrompt::Add;
    for (at, item) in items.into_iter().enumerate() {
        let message = message(item, &format!("messages[{at}]"))?;
        let path = format!("messages[{at}].content");
        let begun = at == last && message.role == "assistant";
        if message.content.is_empty() {
            if begun {
                continue;
            }
            let text = format!("{path} is empty; only a last message of the assistant may be");
            return Err(ApiError::about(Code::InvalidValue, path, text));
        }
        if begun {
            if message.content.ends_with(char::is_whitespace) {
                let text = format!("{path} begins the answer and must not end in white space");
                return Err(ApiError::about(Code::InvalidValue, path, text));
            }
            end = GenerationPrompt::Continue;
        }
        match turns.last_mut().filter(|t| t.role == message.role) {
            Some(turn) => turn.content.push_str(&message.content),
            None => turns.push(message),
        }
    }
    Ok(end)
}

fn message(item: Value, path: &str) -> Result<ChatMessage, ApiError> {
    let mut body = Body::nested(item, path)?;
    let role = body.string("role")?;
    let role = body.require("role", role)?;
    one_of(&body, "role", &role, &ROLES)?;
    let content = body.value("content");
    let content = content::text(body.require("content", content)?, &body.path("content"), block)?;
    body.finish()?;
    Ok(ChatMessage { role, content })
}

/// What a block of text has besides its text.
fn block(body: &mut Body) -> Result<(), ApiError> {
    cache_control(body)?;
    body.refuse(&UNSERVED_OF_BLOCK)
}

fn cache_control(body: &mut Body) -> Result<(), ApiError> {
    let Some(value) = body.value("cache_control") else { return Ok(()) };
    let mut control = Body::nested(value, &body.path("cache_control"))?;
    let kind = control.string("type")?;
    one_of(&control, "type", &control.require("type", kind)?, &CACHE_CONTROLS)?;
    if let Some(ttl) = control.string("ttl")? {
        one_of(&control, "ttl", &ttl, &CACHE_TIMES)?;
    }
    control.finish()
}

fn one_of(body: &Body, name: &str, value: &str, allowed: &[&str]) -> Result<(), ApiError> {
    if allowed.contains(&value) {
        return Ok(());
    }
    let path = body.path(name);
    let text = format!("{path} must be {}", allowed.join(" or "));
    Err(ApiError::about(Code::InvalidValue, path, text))
}
