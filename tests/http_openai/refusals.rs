//! What is refused, by name, and what passes without an effect.

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{CHAT, TEXT, chat, refused, text};
use crate::http_support::client::post;
use crate::scripted::Scripted;

const MISSING: &str = "missing_required_parameter";
const INVALID: &str = "invalid_value";
const UNSUPPORTED: &str = "unsupported_parameter";
const UNKNOWN: &str = "unknown_parameter";
const TOO_LONG: &str = "context_length_exceeded";

/// Checks that a body is refused with a code and the field to blame.
fn refusing(checks: &mut Checks, server: &Scripted, path: &str) -> impl FnMut(&str, Value, &str, &str) {
    move |sentence, body, code, param| {
        checks.check(sentence, || {
            let response = post(server.address, path, &body);
            refused(&response, 400, "invalid_request_error", code, Some(param));
        });
    }
}

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    messages_of_a_chat(checks, server);
    fields_of_a_chat(checks, server);
    what_a_chat_does_not_serve(checks, server);
    what_a_completion_refuses(checks, server);
    what_passes(checks, server);
}

fn messages_of_a_chat(checks: &mut Checks, server: &Scripted) {
    let mut refuse = refusing(checks, server, CHAT);
    let without = |name: &str| {
        let mut body = chat(json!({}));
        body.as_object_mut().unwrap().remove(name);
        body
    };
    let said = |message: Value| chat(json!({"messages": [message]}));
    refuse("a chat needs a model", without("model"), MISSING, "model");
    refuse("a chat needs messages", without("messages"), MISSING, "messages");
    refuse("messages are not empty", chat(json!({"messages": []})), INVALID, "messages");
    refuse("messages are an array", chat(json!({"messages": "hi"})), INVALID, "messages");
    refuse("a message has a role", said(json!({"content": "a"})), MISSING, "messages[0].role");
    refuse("a message has a content", said(json!({"role": "user"})), MISSING, "messages[0].content");
    refuse("an unknown role is refused", said(json!({"role": "alien", "content": "a"})), INVALID, "messages[0].role");
    let tool = json!({"role": "tool", "content": "a", "tool_call_id": "t"});
    refuse("the role tool is refused by name", said(tool), UNSUPPORTED, "messages[0].role");
    let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]});
    refuse("images are refused by name", said(image), UNSUPPORTED, "messages[0].content[0].type");
    let audio = json!({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]});
    refuse("audio parts are refused by name", said(audio), UNSUPPORTED, "messages[0].content[0].type");
    let named = json!({"role": "user", "content": "a", "name": "me"});
    refuse("a name in a message is refused", said(named), UNSUPPORTED, "messages[0].name");
    let calls = json!({"role": "assistant", "content": "a", "tool_calls": [{"id": "t"}]});
    refuse("tool calls are refused", said(calls), UNSUPPORTED, "messages[0].tool_calls");
}

fn fields_of_a_chat(checks: &mut Checks, server: &Scripted) {
    let mut refuse = refusing(checks, server, CHAT);
    refuse("max_tokens is not 0", chat(json!({"max_tokens": 0})), INVALID, "max_tokens");
    let two = json!({"max_tokens": 3, "max_completion_tokens": 4});
    refuse("two limits that differ are refused", chat(two), INVALID, "max_completion_tokens");
    refuse("temperature is at most 2", chat(json!({"temperature": 2.1})), INVALID, "temperature");
    refuse("top_p is at most 1", chat(json!({"top_p": 1.1})), INVALID, "top_p");
    refuse("n is at most 128", chat(json!({"n": 129})), INVALID, "n");
    refuse("top_logprobs need logprobs", chat(json!({"top_logprobs": 2})), INVALID, "top_logprobs");
    let many = json!({"logprobs": true, "top_logprobs": 21});
    refuse("top_logprobs are at most 20", chat(many), INVALID, "top_logprobs");
    refuse("logprobs of a chat are a boolean", chat(json!({"logprobs": 3})), INVALID, "logprobs");
    refuse("there are at most four stop strings", chat(json!({"stop": ["a", "b", "c", "d", "e"]})), INVALID, "stop");
    refuse("a stop string is not empty", chat(json!({"stop": ""})), INVALID, "stop");
    refuse("a seed is an integer", chat(json!({"seed": 1.5})), INVALID, "seed");
    refuse("stream is a boolean", chat(json!({"stream": 1})), INVALID, "stream");
    let options = json!({"stream_options": {"include_usage": true}});
    refuse("stream_options need a stream", chat(options), INVALID, "stream_options");
    let options = json!({"stream": true, "stream_options": {"include_usage": true, "x": 1}});
    refuse("an unknown stream option is refused", chat(options), UNKNOWN, "stream_options.x");
}

fn what_a_chat_does_not_serve(checks: &mut Checks, server: &Scripted) {
    let mut refuse = refusing(checks, server, CHAT);
    let said = |message: Value| chat(json!({"messages": [message]}));
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    refuse("tools are refused by name", chat(json!({"tools": tools})), UNSUPPORTED, "tools");
    refuse("functions are refused by name", chat(json!({"functions": [{"name": "f"}]})), UNSUPPORTED, "functions");
    refuse("a required tool is refused", chat(json!({"tool_choice": "required"})), UNSUPPORTED, "tool_choice");
    let json_mode = json!({"response_format": {"type": "json_object"}});
    refuse("JSON mode is refused by name", chat(json_mode), UNSUPPORTED, "response_format");
    refuse("audio output is refused", chat(json!({"modalities": ["text", "audio"]})), UNSUPPORTED, "modalities");
    refuse("a voice is refused", chat(json!({"audio": {"voice": "x"}})), UNSUPPORTED, "audio");
    refuse("a prediction is refused", chat(json!({"prediction": {"type": "content"}})), UNSUPPORTED, "prediction");
    refuse("an effort is refused", chat(json!({"reasoning_effort": "low"})), UNSUPPORTED, "reasoning_effort");
    refuse("a verbosity is refused", chat(json!({"verbosity": "low"})), UNSUPPORTED, "verbosity");
    refuse("web search is refused", chat(json!({"web_search_options": {}})), UNSUPPORTED, "web_search_options");
    refuse("storing is refused", chat(json!({"store": true})), UNSUPPORTED, "store");
    refuse("metadata is refused", chat(json!({"metadata": {"a": "b"}})), UNSUPPORTED, "metadata");
    refuse("another service tier is refused", chat(json!({"service_tier": "flex"})), UNSUPPORTED, "service_tier");
    refuse("a misspelt field is refused by name", chat(json!({"max_token": 3})), UNKNOWN, "max_token");
    let long = json!({"role": "user", "content": "x".repeat(17_000)});
    refuse("a chat over the context is refused", said(long), TOO_LONG, "messages");
    for name in ["max_tokens", "max_completion_tokens"] {
        let mut limits = json!({"max_tokens": null});
        limits[name] = json!(1_000_000);
        refuse(&format!("an answer too long is refused as the client named it: {name}"), chat(limits), INVALID, name);
    }
}

fn what_a_completion_refuses(checks: &mut Checks, server: &Scripted) {
    let mut refuse = refusing(checks, server, TEXT);
    let empty = json!({"model": "tiny"});
    refuse("a completion needs a prompt", empty, MISSING, "prompt");
    refuse("a prompt is not empty", text(json!({"prompt": ""})), INVALID, "prompt");
    refuse("an array of prompts is not empty", text(json!({"prompt": []})), INVALID, "prompt");
    refuse("a prompt is no number", text(json!({"prompt": 3})), INVALID, "prompt");
    refuse("a token id is in the vocabulary", text(json!({"prompt": [1000]})), INVALID, "prompt");
    refuse("a token id is not negative", text(json!({"prompt": [-1]})), INVALID, "prompt");
    refuse("ids and texts are not mixed", text(json!({"prompt": [1, "a"]})), INVALID, "prompt");
    let suffix = json!({"suffix": "y"});
    refuse("a suffix is refused by name", text(suffix), UNSUPPORTED, "suffix");
    let best = json!({"n": 2, "best_of": 3});
    refuse("best_of above n is refused by name", text(best), UNSUPPORTED, "best_of");
    let beyond = json!({"echo": true, "logprobs": 1, "presence_penalty": 2.1});
    refuse("a penalty of a scored prompt is at most 2", text(beyond), INVALID, "presence_penalty");
    refuse("logprobs of a completion are at most 20", text(json!({"logprobs": 21})), INVALID, "logprobs");
    refuse("echo is a boolean", text(json!({"echo": 1})), INVALID, "echo");
    let many: Vec<String> = (0..1025).map(|n| n.to_string()).collect();
    refuse("there are at most 1024 answers", text(json!({"prompt": many})), INVALID, "prompt");
    let some: Vec<&str> = vec!["a"; 200];
    refuse("there are no more answers than the queue holds", text(json!({"prompt": some})), INVALID, "prompt");
    let mut some = vec!["a".to_owned(); 199];
    some.push("x".repeat(17_000));
    refuse("they are counted before any is encoded", text(json!({"prompt": some})), INVALID, "prompt");
    let full = vec![1; 16_380];
    refuse(
        "a prompt that leaves no room for 16 is named",
        text(json!({"prompt": full, "max_tokens": null})),
        TOO_LONG,
        "prompt",
    );
    refuse(
        "and so is the length that was sent",
        text(json!({"prompt": full, "max_tokens": 16})),
        TOO_LONG,
        "max_tokens",
    );
    let only_scored = json!({"echo": true, "logprobs": 1, "max_tokens": 0});
    refuse("a prompt is not scored without a token after it", text(only_scored), INVALID, "max_tokens");
    let chat_only = json!({"max_completion_tokens": 3});
    refuse("a chat's field is unknown to completions", text(chat_only), UNKNOWN, "max_completion_tokens");
}

fn what_passes(checks: &mut Checks, server: &Scripted) {
    let plain = post(server.address, CHAT, &chat(json!({}))).json()["choices"].clone();
    let mut pass = |sentence: &str, fields: Value| {
        checks.check(sentence, || {
            let response = post(server.address, CHAT, &chat(fields));
            assert_eq!(response.status, 200, "{}", response.text());
            assert_eq!(response.json()["choices"], plain);
        });
    };
    pass("a user changes nothing", json!({"user": "me"}));
    pass("a safety identifier changes nothing", json!({"safety_identifier": "me"}));
    pass("a prompt cache key changes nothing", json!({"prompt_cache_key": "k"}));
    pass("penalties of 0 change nothing", json!({"frequency_penalty": 0, "presence_penalty": 0.0}));
    pass("an empty logit_bias changes nothing", json!({"logit_bias": {}}));
    pass("no tools change nothing", json!({"tools": [], "tool_choice": "auto", "parallel_tool_calls": true}));
    pass("a format of text changes nothing", json!({"response_format": {"type": "text"}}));
    pass("modalities of text change nothing", json!({"modalities": ["text"]}));
    pass("not storing changes nothing", json!({"store": false, "metadata": {}}));
    pass("the usual service tier changes nothing", json!({"service_tier": "auto"}));
    pass("null is the same as absent", json!({"stop": null, "tools": null, "stream": null, "audio": null, "n": null}));
}
