//! What is refused, by name, and what passes without an effect.

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{PATH, ask, post, refused};
use crate::expected::merge;
use crate::scripted::Scripted;

const MISSING: &str = "missing_required_parameter";
const INVALID: &str = "invalid_value";
const UNSUPPORTED: &str = "unsupported_parameter";
const UNKNOWN: &str = "unknown_parameter";
const TOO_LONG: &str = "context_length_exceeded";

/// Checks that a body is refused with a code and the field to blame.
fn refusing(checks: &mut Checks, server: &Scripted) -> impl FnMut(&str, Value, &str, &str) {
    move |sentence, body, code, param| {
        checks.check(sentence, || {
            let response = post(server, PATH, &body);
            refused(&response, 400, "invalid_request_error", code, Some(param));
        });
    }
}

/// A request whose only message has this content.
fn said(content: Value) -> Value {
    ask(json!({"messages": [{"role": "user", "content": content}]}))
}

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    what_is_required(checks, server);
    lengths_and_messages(checks, server);
    values_of_fields(checks, server);
    content_that_is_no_text(checks, server);
    fields_that_are_not_served(checks, server);
    fields_that_do_not_exist(checks, server);
    what_passes(checks, server);
}

fn what_is_required(checks: &mut Checks, server: &Scripted) {
    let mut refuse = refusing(checks, server);
    let without = |name: &str| {
        let mut body = ask(json!({}));
        body.as_object_mut().unwrap().remove(name);
        body
    };
    refuse("model is required", without("model"), MISSING, "model");
    refuse("messages are required", without("messages"), MISSING, "messages");
    refuse("max_tokens is required", without("max_tokens"), MISSING, "max_tokens");
    refuse("a role is required", ask(json!({"messages": [{"content": "a"}]})), MISSING, "messages[0].role");
    refuse("content is required", ask(json!({"messages": [{"role": "user"}]})), MISSING, "messages[0].content");
    refuse("a block has a type", said(json!([{"text": "a"}])), MISSING, "messages[0].content[0].type");
    refuse("a text block has a text", said(json!([{"type": "text"}])), MISSING, "messages[0].content[0].text");
}

fn lengths_and_messages(checks: &mut Checks, server: &Scripted) {
    let mut refuse = refusing(checks, server);
    refuse("max_tokens is not 0: there is no cache to warm", ask(json!({"max_tokens": 0})), INVALID, "max_tokens");
    refuse("max_tokens is not negative", ask(json!({"max_tokens": -1})), INVALID, "max_tokens");
    refuse("max_tokens is no fraction", ask(json!({"max_tokens": 1.5})), INVALID, "max_tokens");
    refuse("max_tokens is no string", ask(json!({"max_tokens": "5"})), INVALID, "max_tokens");
    refuse("max_tokens is within the limit of the server", ask(json!({"max_tokens": 8193})), INVALID, "max_tokens");
    refuse("messages are not empty", ask(json!({"messages": []})), INVALID, "messages");
    refuse("messages are an array", ask(json!({"messages": "hi"})), INVALID, "messages");
    refuse("a message is an object", ask(json!({"messages": ["hi"]})), INVALID, "messages[0]");
    let alien = json!({"messages": [{"role": "alien", "content": "a"}]});
    refuse("a role is one of three", ask(alien), INVALID, "messages[0].role");
    refuse("content is no number", said(json!(3)), INVALID, "messages[0].content");
    refuse("content is not empty", said(json!("")), INVALID, "messages[0].content");
    refuse("content is no empty array", said(json!([])), INVALID, "messages[0].content");
    let space = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is "}]);
    refuse("a beginning does not end in a space", ask(json!({"messages": space})), INVALID, "messages[1].content");
    let line = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is\n"}]);
    refuse("a beginning does not end in a line break", ask(json!({"messages": line})), INVALID, "messages[1].content");
}

fn values_of_fields(checks: &mut Checks, server: &Scripted) {
    let mut refuse = refusing(checks, server);
    refuse("temperature is at most 1", ask(json!({"temperature": 1.01})), INVALID, "temperature");
    refuse("temperature is not negative", ask(json!({"temperature": -0.1})), INVALID, "temperature");
    refuse("temperature is a number", ask(json!({"temperature": "hot"})), INVALID, "temperature");
    refuse("top_p is at most 1", ask(json!({"top_p": 1.5})), INVALID, "top_p");
    refuse("top_p is not negative", ask(json!({"top_p": -0.5})), INVALID, "top_p");
    refuse("top_k is not negative", ask(json!({"top_k": -1})), INVALID, "top_k");
    refuse("top_k is no fraction", ask(json!({"top_k": 1.5})), INVALID, "top_k");
    refuse("stop_sequences are an array", ask(json!({"stop_sequences": "x"})), INVALID, "stop_sequences");
    refuse("a stop sequence is a string", ask(json!({"stop_sequences": [1]})), INVALID, "stop_sequences");
    refuse("a stop sequence is not empty", ask(json!({"stop_sequences": [""]})), INVALID, "stop_sequences");
    let many: Vec<String> = (0..17).map(|n| n.to_string()).collect();
    refuse("there are at most 16 stop sequences", ask(json!({"stop_sequences": many})), INVALID, "stop_sequences");
    refuse("stream is a boolean", ask(json!({"stream": "yes"})), INVALID, "stream");
    refuse("system is no number", ask(json!({"system": 5})), INVALID, "system");
    refuse("metadata is an object", ask(json!({"metadata": "me"})), INVALID, "metadata");
    refuse("metadata has only a user_id", ask(json!({"metadata": {"x": 1}})), UNKNOWN, "metadata.x");
    refuse("service_tier is one of two", ask(json!({"service_tier": "gold"})), INVALID, "service_tier");
}

fn content_that_is_no_text(checks: &mut Checks, server: &Scripted) {
    let mut refuse = refusing(checks, server);
    let image = json!({"type": "base64", "media_type": "image/png", "data": ""});
    let image = json!([{"type": "image", "source": image}]);
    refuse("images are refused by name", said(image), UNSUPPORTED, "messages[0].content[0].type");
    let document = json!([{"type": "text", "text": "a"}, {"type": "document", "source": {}}]);
    refuse("documents are refused by name", said(document), UNSUPPORTED, "messages[0].content[1].type");
    let result = json!([{"type": "tool_result", "tool_use_id": "t"}]);
    refuse("tool results are refused by name", said(result), UNSUPPORTED, "messages[0].content[0].type");
    let thought = json!([{"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": ""}]}]);
    refuse("thoughts are refused", ask(json!({"messages": thought})), UNSUPPORTED, "messages[1].content[0].type");
    let picture = json!([{"type": "image", "source": {}}]);
    refuse("a system prompt is text", ask(json!({"system": picture})), UNSUPPORTED, "system[0].type");
    let cited = json!([{"type": "text", "text": "a", "citations": [{"type": "char_location"}]}]);
    refuse("citations are refused", said(cited), UNSUPPORTED, "messages[0].content[0].citations");
}

fn fields_that_are_not_served(checks: &mut Checks, server: &Scripted) {
    let mut refuse = refusing(checks, server);
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    refuse("tools are refused by name", ask(json!({"tools": tools})), UNSUPPORTED, "tools");
    refuse("a tool choice is refused", ask(json!({"tool_choice": {"type": "any"}})), UNSUPPORTED, "tool_choice");
    let thinking = json!({"type": "enabled", "budget_tokens": 1024});
    refuse("thinking is refused by name", ask(json!({"thinking": thinking})), UNSUPPORTED, "thinking");
    refuse("adaptive thinking is refused", ask(json!({"thinking": {"type": "adaptive"}})), UNSUPPORTED, "thinking");
    refuse("an effort is refused", ask(json!({"output_config": {"effort": "low"}})), UNSUPPORTED, "output_config");
    refuse("speed = fast is refused", ask(json!({"speed": "fast"})), UNSUPPORTED, "speed");
    refuse("a container is refused", ask(json!({"container": "c"})), UNSUPPORTED, "container");
    refuse("MCP servers are refused", ask(json!({"mcp_servers": [{"url": "x"}]})), UNSUPPORTED, "mcp_servers");
    refuse("an inference region is refused", ask(json!({"inference_geo": "us"})), UNSUPPORTED, "inference_geo");
    refuse("diagnostics are refused", ask(json!({"diagnostics": {}})), UNSUPPORTED, "diagnostics");
}

fn fields_that_do_not_exist(checks: &mut Checks, server: &Scripted) {
    let mut refuse = refusing(checks, server);
    refuse("a misspelt field is refused by name", ask(json!({"max_token": 3})), UNKNOWN, "max_token");
    refuse("OpenAI's stop is not Anthropic's", ask(json!({"stop": ["x"]})), UNKNOWN, "stop");
    let named = json!({"messages": [{"role": "user", "content": "a", "name": "me"}]});
    refuse("a message has no other fields", ask(named), UNKNOWN, "messages[0].name");
    let control = json!([{"type": "text", "text": "a", "cache_control": {"type": "forever"}}]);
    let path = "messages[0].content[0].cache_control.type";
    refuse("a cache control has a known type", said(control), INVALID, path);
    let ttl = json!({"type": "ephemeral", "ttl": "2h"});
    refuse("a cache control has a known ttl", ask(json!({"cache_control": ttl})), INVALID, "cache_control.ttl");
    let long = "x".repeat(17_000);
    refuse("a prompt over the context is refused", said(json!(long)), TOO_LONG, "messages");
}

fn what_passes(checks: &mut Checks, server: &Scripted) {
    let plain = post(server, PATH, &ask(json!({"temperature": 0}))).json()["content"].clone();
    let mut pass = |sentence: &str, fields: Value| {
        checks.check(sentence, || {
            let response = post(server, PATH, &ask(merge(json!({"temperature": 0}), fields)));
            assert_eq!(response.status, 200, "{}", response.text());
            assert_eq!(response.json()["content"], plain);
        });
    };
    pass("metadata without a user changes nothing", json!({"metadata": {}}));
    pass("metadata with a user changes nothing", json!({"metadata": {"user_id": "me"}}));
    pass("service_tier auto changes nothing", json!({"service_tier": "auto"}));
    pass("service_tier standard_only changes nothing", json!({"service_tier": "standard_only"}));
    pass("no tools change nothing", json!({"tools": [], "tool_choice": {"type": "auto"}}));
    pass("tool_choice none changes nothing", json!({"tool_choice": {"type": "none"}}));
    pass("disabled thinking changes nothing", json!({"thinking": {"type": "disabled"}}));
    pass("an empty output_config changes nothing", json!({"output_config": {}}));
    pass("speed = standard changes nothing", json!({"speed": "standard"}));
    pass(
        "a cache control of the request changes nothing",
        json!({"cache_control": {"type": "ephemeral", "ttl": "1h"}}),
    );
    let block = json!([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": null}]);
    pass("a cache control of a block changes nothing", json!({"messages": [{"role": "user", "content": block}]}));
    pass("null is the same as absent", json!({"system": null, "tools": null, "container": null, "stream": null}));
}
