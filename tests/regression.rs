//! One test for each defect that was found in a release candidate: the smallest request that showed it, on the real binary.

mod http_support;

use http_support::binary::Binary;
use http_support::client::{get, post, send};
use serde_json::json;

#[test]
fn a_top_p_of_zero_keeps_the_most_likely_token_and_the_engine_lives() {
    let server = Binary::tiny(&[]);
    let greedy = post(server.address, "/v1/generate", &json!({"prompt": "x", "max_tokens": 4})).json();
    for top_p in [0.0, 1e-12, 1e-300] {
        let body = json!({"prompt": "x", "max_tokens": 4, "temperature": 1, "top_p": top_p});
        let answer = post(server.address, "/v1/generate", &body);
        assert_eq!(answer.status, 200, "top_p {top_p}: {}", answer.text());
        assert_eq!(answer.json()["token_ids"], greedy["token_ids"], "top_p {top_p}");
    }
    let body = json!({"model": "tiny", "prompt": "x", "max_tokens": 4, "top_p": 0});
    assert_eq!(post(server.address, "/v1/completions", &body).json()["choices"][0]["text"], greedy["text"]);
    assert_eq!(get(server.address, "/health").status, 200);
}

#[test]
fn a_field_that_stands_twice_inside_a_message_is_refused() {
    let server = Binary::tiny(&[]);
    let body =
        br#"{"model": "tiny", "max_tokens": 1, "messages": [{"role": "system", "role": "user", "content": "a"}]}"#;
    let headers = [("content-type", "application/json")];
    let answer = send(server.address, "POST", "/v1/chat/completions", &headers, body).response();
    assert_eq!(
        (answer.status, answer.json()["error"]["code"].as_str()),
        (400, Some("invalid_json")),
        "{}",
        answer.text()
    );
}

#[test]
fn a_bad_token_id_is_blamed_on_the_field_that_holds_it() {
    let server = Binary::tiny(&[]);
    for ids in [json!([320]), json!([])] {
        let answer = post(server.address, "/v1/generate", &json!({"prompt_tokens": ids}));
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some("prompt_tokens")), "{ids}");
    }
}

#[test]
fn a_content_encoding_is_refused_and_not_ignored() {
    let server = Binary::tiny(&[]);
    let body = json!({"prompt": "x", "max_tokens": 1}).to_string();
    let sent = |encoding| {
        let headers = [("content-type", "application/json"), ("content-encoding", encoding)];
        send(server.address, "POST", "/v1/generate", &headers, body.as_bytes()).response().status
    };
    assert_eq!((sent("gzip"), sent("br"), sent("identity")), (415, 415, 200));
}
