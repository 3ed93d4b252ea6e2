//! A streamed message, event by event.

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{PATH, ask, data, post, refused, streamed_text};
use crate::expected::{answer, chatml, ids, keys};
use crate::http_support::client::Response;
use crate::scripted::Scripted;

/// A stream of forty tokens and its events.
fn stream(server: &Scripted) -> (Response, Vec<Value>) {
    let response = post(server, PATH, &ask(json!({"temperature": 0, "stream": true, "max_tokens": 40})));
    let events = data(&response);
    (response, events)
}

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    the_order_of_events(checks, server);
    the_start(checks, server);
    the_block(checks, server);
    the_end(checks, server);
    what_it_says(checks, server);
}

fn the_order_of_events(checks: &mut Checks, server: &Scripted) {
    let (response, events) = stream(server);
    let kinds: Vec<&str> = events.iter().filter_map(|e| e["type"].as_str()).filter(|k| *k != "ping").collect();
    checks.check("a stream is text/event-stream and not to be cached", || {
        assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
        assert_eq!(response.header("cache-control"), Some("no-cache"));
    });
    checks.check("a stream has a request-id header", || {
        assert!(response.header("request-id").unwrap().starts_with("req_"));
    });
    checks.check("a stream begins with message_start and content_block_start", || {
        assert_eq!(kinds[..2], ["message_start", "content_block_start"]);
    });
    checks.check("a stream ends with content_block_stop, message_delta, message_stop", || {
        assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    });
    checks.check("between them there are only content_block_delta events", || {
        assert!(kinds.len() > 6);
        assert!(kinds[2..kinds.len() - 3].iter().all(|k| *k == "content_block_delta"), "{kinds:?}");
    });
    checks.check("every event has an event line before its data line", || {
        let frames = response.text();
        assert!(frames.split_terminator("\n\n").all(|f| f.starts_with("event: ") && f.contains("\ndata: ")));
    });
    checks.check("there is no [DONE]", || assert!(!response.text().contains("[DONE]")));
}

fn the_start(checks: &mut Checks, server: &Scripted) {
    let (response, events) = stream(server);
    let start = &events[0]["message"];
    checks.check("message_start has the fields of a message", || {
        let whole = post(server, PATH, &ask(json!({"temperature": 0}))).json();
        assert_eq!(keys(start), keys(&whole));
    });
    checks.check("message_start has an empty content and no stop reason", || {
        assert_eq!(start["content"], json!([]));
        assert!(start["stop_reason"].is_null() && start["stop_sequence"].is_null());
    });
    checks.check("message_start counts the prompt", || {
        assert_eq!(start["usage"]["input_tokens"], ids(&chatml(&[("user", "hi")])).len());
    });
    checks.check("message_start has generated nothing yet", || assert_eq!(start["usage"]["output_tokens"], 0));
    checks.check("message_start has the usage fields of a whole message", || {
        let whole = post(server, PATH, &ask(json!({"temperature": 0}))).json();
        assert_eq!(keys(&start["usage"]), keys(&whole["usage"]));
    });
    checks.check("the id of a streamed message and its request share their serial", || {
        let id = start["id"].as_str().unwrap();
        assert_eq!(&id[4..], &response.header("request-id").unwrap()[4..]);
    });
}

fn the_block(checks: &mut Checks, server: &Scripted) {
    let (_, events) = stream(server);
    checks.check("content_block_start opens an empty text block at index 0", || {
        let expected = json!({
            "type": "content_block_start", "index": 0,
            "content_block": {"type": "text", "text": "", "citations": null},
        });
        assert_eq!(events[1], expected);
    });
    checks.check("every delta is a text_delta at index 0", || {
        for delta in events.iter().filter(|e| e["type"] == "content_block_delta") {
            assert_eq!((&delta["index"], &delta["delta"]["type"]), (&json!(0), &json!("text_delta")));
            assert_eq!(keys(&delta["delta"]), ["text", "type"]);
        }
    });
    checks.check("no delta is empty", || {
        let mut deltas = events.iter().filter(|e| e["type"] == "content_block_delta");
        assert!(deltas.all(|d| !d["delta"]["text"].as_str().unwrap().is_empty()));
    });
    checks.check("content_block_stop closes index 0", || {
        assert_eq!(events[events.len() - 3], json!({"type": "content_block_stop", "index": 0}));
    });
}

fn the_end(checks: &mut Checks, server: &Scripted) {
    let (_, events) = stream(server);
    let (start, last) = (&events[0]["message"], &events[events.len() - 2]);
    checks.check("message_delta has the stop reason", || {
        let expected = json!({
            "stop_reason": "max_tokens", "stop_sequence": null, "stop_details": null, "container": null,
        });
        assert_eq!(last["delta"], expected);
    });
    checks.check("message_delta has the cumulative usage", || {
        assert_eq!(last["usage"]["output_tokens"], 40);
        assert_eq!(last["usage"]["input_tokens"], start["usage"]["input_tokens"]);
        assert_eq!(last["usage"]["cache_read_input_tokens"], 0);
    });
    checks.check("message_delta's usage has the fields of the published schema", || {
        let expected = [
            "cache_creation_input_tokens",
            "cache_read_input_tokens",
            "input_tokens",
            "output_tokens",
            "output_tokens_details",
            "server_tool_use",
        ];
        assert_eq!(keys(&last["usage"]), expected);
    });
    checks.check("message_stop says nothing else", || {
        assert_eq!(events[events.len() - 1], json!({"type": "message_stop"}));
    });
}

fn what_it_says(checks: &mut Checks, server: &Scripted) {
    let (_, events) = stream(server);
    let last = &events[events.len() - 2];
    checks.check("a stream says what the whole answer says", || {
        let whole = post(server, PATH, &ask(json!({"temperature": 0, "max_tokens": 40}))).json();
        assert_eq!(json!(streamed_text(&events)), whole["content"][0]["text"]);
        assert_eq!(last["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
    });
    checks.check("a stream of characters split over tokens says what the whole answer says", || {
        // The scripted model speaks bytes at random: many of its answers are broken characters.
        for seed in 0..12 {
            let content = format!("{seed} 渔船 🎉");
            let fields =
                json!({"temperature": 0, "max_tokens": 60, "messages": [{"role": "user", "content": content}]});
            let whole = post(server, PATH, &ask(fields.clone())).json();
            let mut fields = fields;
            fields["stream"] = json!(true);
            let events = data(&post(server, PATH, &ask(fields)));
            assert_eq!(json!(streamed_text(&events)), whole["content"][0]["text"]);
        }
    });
    checks.check("stream = false is a whole answer", || {
        let response = post(server, PATH, &ask(json!({"stream": false})));
        assert_eq!(response.header("content-type"), Some("application/json"));
    });
    checks.check("a stream with a beginning of the answer does not repeat it", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]);
        let fields = json!({"messages": messages, "temperature": 0, "stream": true});
        let text = streamed_text(&data(&post(server, PATH, &ask(fields))));
        assert_eq!(text, answer(&(chatml(&[("user", "a")]) + "It is"), 12));
    });
    checks.check("a refused stream is refused before it begins", || {
        let response = post(server, PATH, &ask(json!({"stream": true, "max_tokens": 0})));
        refused(&response, 400, "invalid_request_error", "invalid_value", Some("max_tokens"));
    });
}
