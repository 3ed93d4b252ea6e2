//! Bodies to requests, and prompts to token ids. Short ones are read and encoded in place; long ones on a thread of their own, so that a
//! worker's other connections do not wait.

use std::sync::Arc;

use actix_web::web;
use bytes::Bytes;
use tokio::sync::Semaphore;

use super::Service;
use crate::actors::session::messages::SessionFailure;
use crate::model::chat_template::{ChatMessage, GenerationPrompt};
use crate::model::conversation::{self, ConversationError};
use crate::model::tokenizer::{SpecialTokens, Tokenizer};
use crate::protocol::errors::{ApiError, Code};
use crate::protocol::native::Prompt;

/// Bytes of a body or a text that a worker reads or encodes itself: well under a millisecond.
const IN_PLACE_BYTES: usize = 4_096;
/// Long inputs that are worked on at once; the others wait. An encoder takes a few hundred bytes for each byte of such a text.
static LONG_WORK: Semaphore = Semaphore::const_new(8);
/// Bytes that a template puts around a message, roughly.
const MARKS_BYTES: usize = 32;

/// What a body asks for.
///
/// # Errors
/// `parse` refuses it.
pub async fn parsed<T: Send + 'static>(
    body: Bytes,
    parse: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    off_the_worker(body.len(), move || parse(&body)).await
}

/// The ids of a prompt; `field` is its name in the dialect. Text may spell special tokens, and gets a beginning-of-sequence token
/// where the model wants one.
///
/// # Errors
/// The text has no ids.
pub async fn prompt(service: &Service, prompt: Prompt, field: &'static str) -> Result<Arc<[u32]>, ApiError> {
    let mut one = prompts(service, vec![prompt], field).await?;
    one.pop().ok_or_else(|| ApiError::about(Code::InvalidValue, field, format!("{field} is empty: send a text or ids")))
}

/// The ids of the prompts of one request, in order; where they are encoded depends on their length together. All are short enough by their
/// bytes alone before the first one is encoded.
///
/// # Errors
/// One has no ids, or too many by its bytes alone.
pub async fn prompts(
    service: &Service,
    prompts: Vec<Prompt>,
    field: &'static str,
) -> Result<Vec<Arc<[u32]>>, ApiError> {
    let (tokenizer, limit) = (service.tokenizer.clone(), service.engine.limits().max_prompt_tokens);
    let length = prompts.iter().map(|p| if let Prompt::Text(text) = p { text.len() } else { 0 }).sum();
    let encode = move || {
        let count = prompts.len();
        let name = |at| ApiError::one_of(field, at, count);
        prompts.iter().enumerate().try_for_each(|(at, p)| check_length(&tokenizer, p, limit, &name(at)))?;
        prompts.into_iter().enumerate().map(|(at, p)| ids(&tokenizer, p, &name(at))).collect()
    };
    off_the_worker(length, encode).await
}

/// Refuses a text that has too many tokens by its bytes alone.
fn check_length(tokenizer: &Tokenizer, prompt: &Prompt, limit: usize, field: &str) -> Result<(), ApiError> {
    let Prompt::Text(text) = prompt else { return Ok(()) };
    let (bytes, tokens) = (text.len(), tokenizer.tokens_min(text));
    if tokens > limit {
        let text =
            format!("{field} has {bytes} bytes, which are at least {tokens} tokens; the limit is {limit}: shorten it");
        return Err(ApiError::about(Code::ContextLengthExceeded, field, text));
    }
    Ok(())
}

fn ids(tokenizer: &Tokenizer, prompt: Prompt, field: &str) -> Result<Arc<[u32]>, ApiError> {
    let text = match prompt {
        Prompt::Tokens(ids) => return Ok(ids.into()),
        Prompt::Text(text) => text,
    };
    let ids = tokenizer.encode_prompt(&text, SpecialTokens::Parse);
    ids.map(Arc::from).map_err(|e| ApiError::about(Code::InvalidValue, field, e.to_string()))
}

/// The ids of a conversation, ending as `end` says.
///
/// # Errors
/// The template refuses the conversation.
pub async fn chat(service: &Service, turns: Vec<ChatMessage>, end: GenerationPrompt) -> Result<Arc<[u32]>, ApiError> {
    let (tokenizer, template) = (service.tokenizer.clone(), service.template.clone());
    let limit = service.engine.limits().max_prompt_tokens;
    let length = chat_bytes(&turns);
    let encode = move || {
        let refused = |e: ConversationError| {
            let too_long = matches!(e, ConversationError::TooLong { .. } | ConversationError::TooMany { .. });
            let code = if too_long { Code::ContextLengthExceeded } else { Code::InvalidValue };
            ApiError::about(code, "messages", e.to_string())
        };
        let ids = conversation::ids(&template, &tokenizer, &turns, end, limit);
        ids.map(Arc::from).map_err(refused)
    };
    off_the_worker(length, encode).await
}

/// What a template makes of a conversation, in bytes, roughly: it runs for every message, an empty one too.
fn chat_bytes(turns: &[ChatMessage]) -> usize {
    turns.iter().map(|turn| turn.role.len() + turn.content.len() + MARKS_BYTES).sum()
}

/// Runs `work` here when its input is `length` bytes and that is short, else on a thread of its own, a few at a time.
///
/// # Errors
/// The work's, or the server is shutting down.
pub async fn off_the_worker<T: Send + 'static>(
    length: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if length <= IN_PLACE_BYTES {
        return work();
    }
    let draining = || ApiError::from(&SessionFailure::Draining);
    let _turn = LONG_WORK.acquire().await.map_err(|_| draining())?;
    web::block(work).await.map_err(|_| draining())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(count: usize, content: &str) -> Vec<ChatMessage> {
        vec![ChatMessage { role: "user".to_owned(), content: content.to_owned() }; count]
    }

    #[test]
    fn very_many_empty_messages_are_no_short_conversation() {
        // Seen: only contents counted, so that the template ran on the worker for a hundred thousand empty messages.
        assert!(chat_bytes(&turns(100_000, "")) > IN_PLACE_BYTES);
        assert!(chat_bytes(&turns(8, "a question of some length")) <= IN_PLACE_BYTES);
    }

    #[test]
    fn long_work_leaves_the_worker_and_short_work_does_not() {
        actix_web::rt::System::new().block_on(async {
            let here = std::thread::current().id();
            let on = async |length| off_the_worker(length, || Ok(std::thread::current().id())).await.expect("no error");
            assert_eq!(on(IN_PLACE_BYTES).await, here);
            assert_ne!(on(IN_PLACE_BYTES + 1).await, here);
            let body = |bytes: usize| Bytes::from(vec![b' '; bytes]);
            let parsed_on = async |body| parsed(body, |_| Ok(std::thread::current().id())).await.expect("no error");
            assert_eq!(parsed_on(body(IN_PLACE_BYTES)).await, here);
            assert_ne!(parsed_on(body(IN_PLACE_BYTES + 1)).await, here);
        });
    }
}
