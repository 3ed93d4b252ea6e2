//! What an attacker's bytes reach before anything is trusted. Every entry returns, whatever the bytes: no panic, no endless
//! loop, no allocation beyond the input's size. Shared by the fuzz targets and by the replay of their corpus on stable.
#![allow(dead_code)]

use crucible::model::chat_template::{ChatMessage, ChatTemplate, GenerationPrompt};
use crucible::model::gguf::{Gguf, llama};
use crucible::protocol::{anthropic, native, openai};

/// A model file: header, metadata, tensor table, geometry.
pub fn gguf(bytes: &[u8]) {
    if let Ok(file) = Gguf::parse(bytes) {
        let _ = llama::geometry(&file);
    }
}

/// The template before the first NUL byte, the messages' text after it.
pub fn template(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (source, content) = text.split_once('\0').unwrap_or((&text, "hello"));
    if let Ok(template) = ChatTemplate::compile(source, "<s>", "</s>") {
        let messages =
            ["system", "user", content].map(|role| ChatMessage { role: role.to_owned(), content: content.to_owned() });
        let _ = template.render(&messages, GenerationPrompt::Add);
        let _ = template.render(&messages, GenerationPrompt::Continue);
    }
}

/// A request body, read as every dialect.
pub fn body(bytes: &[u8]) {
    let _ = native::Generate::parse(bytes);
    let _ = openai::chat::ChatRequest::parse(bytes, openai::MAX_CHOICES);
    let _ = openai::completions::CompletionRequest::parse(bytes, openai::MAX_CHOICES);
    let _ = anthropic::messages::MessagesRequest::parse(bytes);
    let _ = anthropic::Conversation::parse(bytes);
}
