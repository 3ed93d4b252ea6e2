//! What is read: blocks, a system prompt, turns, and the beginning of an answer.

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{PATH, ask, post};
use crate::expected::{answer, chatml, ids, merge};
use crate::http_support::client::send;
use crate::scripted::Scripted;

/// The greedy text of a request is that of the prompt that it must be.
fn same(server: &Scripted, fields: Value, prompt: String) {
    let body = post(server, PATH, &ask(merge(fields, json!({"temperature": 0})))).json();
    assert_eq!(body["usage"]["input_tokens"], json!(ids(&prompt).len()), "{body}");
    assert_eq!(body["content"][0]["text"], json!(answer(&prompt, 12)));
}

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    content(checks, server);
    turns(checks, server);
    beginnings(checks, server);
    characters(checks, server);
}

fn content(checks: &mut Checks, server: &Scripted) {
    let same = |fields: Value, prompt: String| same(server, fields, prompt);
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let block = |text: &str| json!({"type": "text", "text": text});
    checks.check("content may be an array of text blocks, joined as they are", || {
        same(user(json!([block("a"), block("b")])), chatml(&[("user", "ab")]));
    });
    checks.check("content as a string and as one block is the same prompt", || {
        same(user(json!([block("hi")])), chatml(&[("user", "hi")]));
    });
    checks.check("system may be a string", || {
        same(json!({"system": "be brief"}), chatml(&[("system", "be brief"), ("user", "hi")]));
    });
    checks.check("system may be an array of text blocks", || {
        let system = json!([block("be "), block("brief")]);
        same(json!({"system": system}), chatml(&[("system", "be brief"), ("user", "hi")]));
    });
    checks.check("an empty system is no system", || same(json!({"system": ""}), chatml(&[("user", "hi")])));
    checks.check("an empty array as system is no system", || same(json!({"system": []}), chatml(&[("user", "hi")])));
}

fn turns(checks: &mut Checks, server: &Scripted) {
    let same = |fields: Value, prompt: String| same(server, fields, prompt);
    checks.check("turns alternate into the template", || {
        let messages = json!([
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
        ]);
        same(json!({"messages": messages}), chatml(&[("user", "a"), ("assistant", "b"), ("user", "c")]));
    });
    checks.check("neighbouring user messages are one turn", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]);
        same(json!({"messages": messages}), chatml(&[("user", "ab")]));
    });
    checks.check("neighbouring assistant messages are one turn", || {
        let messages = json!([
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"},
        ]);
        same(json!({"messages": messages}), chatml(&[("user", "a"), ("assistant", "bc"), ("user", "d")]));
    });
    checks.check("a system message may stand inside the conversation", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]);
        same(json!({"messages": messages}), chatml(&[("user", "a"), ("system", "b")]));
    });
}

fn beginnings(checks: &mut Checks, server: &Scripted) {
    let same = |fields: Value, prompt: String| same(server, fields, prompt);
    let block = |text: &str| json!({"type": "text", "text": text});
    checks.check("a last message of the assistant begins the answer", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]);
        same(json!({"messages": messages}), chatml(&[("user", "a")]) + "It is");
    });
    checks.check("a beginning that occurs in the template's end mark is continued, too", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "m"}]);
        same(json!({"messages": messages}), chatml(&[("user", "a")]) + "m");
    });
    checks.check("a beginning in blocks is their text", || {
        let begun = json!([block("It"), block(" is")]);
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": begun}]);
        same(json!({"messages": messages}), chatml(&[("user", "a")]) + "It is");
    });
    checks.check("the content of an answer does not repeat its beginning", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]);
        let body = post(server, PATH, &ask(json!({"messages": messages, "temperature": 0}))).json();
        assert!(!body["content"][0]["text"].as_str().unwrap().starts_with("It is"));
    });
    checks.check("an empty last message of the assistant is the same as none", || {
        let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]);
        same(json!({"messages": messages}), chatml(&[("user", "hi")]));
    });
}

fn characters(checks: &mut Checks, server: &Scripted) {
    let same = |fields: Value, prompt: String| same(server, fields, prompt);
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    checks.check("a conversation may begin with the assistant", || {
        let messages = json!([{"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}]);
        same(json!({"messages": messages}), chatml(&[("assistant", "b"), ("user", "a")]));
    });
    checks.check("Chinese and emoji are the bytes that they are", || {
        same(user(json!("渔船 👩‍👩‍👧")), chatml(&[("user", "渔船 👩‍👩‍👧")]));
    });
    checks.check("escaped characters of JSON are read", || {
        let raw = br#"{"model": "tiny", "max_tokens": 3, "temperature": 0, "messages": [{"role": "user", "content": "\u6e14\ud83d\ude00"}]}"#;
        let body = send(server.address, "POST", PATH, &[], raw).response().json();
        assert_eq!(body["content"][0]["text"], json!(answer(&chatml(&[("user", "渔😀")]), 3)));
    });
}
