//! One test for each defect that was found in a release candidate: the smallest request that showed it, on the real binary.

mod http_support;

use http_support::binary::Binary;
use http_support::client::{get, post};
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
