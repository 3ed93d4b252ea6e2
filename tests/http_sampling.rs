//! Penalties and bias through the real binary: they do what they say, and the answer does not depend on who else is served.

mod http_support;

use http_support::binary::Binary;
use http_support::client::{post, send_json};
use serde_json::{Value, json};

fn completion(fields: &Value) -> Value {
    let mut body = json!({"model": "tiny", "prompt": [5, 9, 12, 5], "max_tokens": 30, "temperature": 0, "ignore_eos": true, "logprobs": 2});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn choice(response: &Value) -> Value {
    response["choices"][0].clone()
}

#[test]
fn a_large_bias_decides_the_token_and_a_large_negative_one_forbids_it() {
    let server = Binary::tiny(&[]);
    let forced = post(server.address, "/v1/completions", &completion(&json!({"logit_bias": {"97": 100}}))).json();
    assert_eq!(forced["choices"][0]["text"], "a".repeat(30));
    let plain = choice(&post(server.address, "/v1/completions", &completion(&json!({}))).json());
    // Log-probabilities are those before the bias: the forced token is no more likely than without.
    let raw = plain["logprobs"]["top_logprobs"][0].clone();
    let same = forced["choices"][0]["logprobs"]["top_logprobs"][0].clone();
    for (token, value) in raw.as_object().unwrap().iter().take(2) {
        assert!(same.get(token).is_none_or(|v| v == value), "{raw} {same}");
    }
    let chat = json!({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 7, "temperature": 0,
                      "logit_bias": {"98": 100, "97": -100}});
    let chat = post(server.address, "/v1/chat/completions", &chat).json();
    assert_eq!(chat["choices"][0]["message"]["content"], "b".repeat(7));
}

#[test]
fn a_presence_penalty_on_forced_candidates_takes_turns() {
    let server = Binary::tiny(&[]);
    // Three candidates far above the rest; a frequency penalty of 2 makes the least used one win, whatever the raw logits are.
    let body =
        completion(&json!({"logit_bias": {"97": 100, "98": 100, "99": 100}, "frequency_penalty": 2, "max_tokens": 30}));
    let text = post(server.address, "/v1/completions", &body).json()["choices"][0]["text"].as_str().unwrap().to_owned();
    for letter in ["a", "b", "c"] {
        assert!((8..=12).contains(&text.matches(letter).count()), "{text}");
    }
}

#[test]
fn the_answer_is_the_same_alone_and_among_others_in_every_combination() {
    let server = Binary::tiny(&[]);
    let bias: Value = (0..40).map(|i| ((i * 8).to_string(), json!(if i % 2 == 0 { 3.5 } else { -6.0 }))).collect();
    let mut bodies = Vec::new();
    for penalties in
        [json!({}), json!({"presence_penalty": 1.3}), json!({"frequency_penalty": 0.8, "presence_penalty": -0.4})]
    {
        for bias in [json!({}), json!({"logit_bias": bias})] {
            for rule in [json!({}), json!({"temperature": 1.3, "top_p": 0.9, "top_k": 50, "seed": 11, "n": 2})] {
                let mut body = completion(&penalties);
                body.as_object_mut().unwrap().extend(bias.as_object().unwrap().clone());
                body.as_object_mut().unwrap().extend(rule.as_object().unwrap().clone());
                bodies.push(body);
            }
        }
    }
    let choices = |response: Value| response["choices"].clone();
    let alone: Vec<Value> = bodies.iter().map(|b| choices(post(server.address, "/v1/completions", b).json())).collect();
    for round in 0..2 {
        let mut order: Vec<usize> = (0..bodies.len()).collect();
        order.rotate_left(round * 5);
        let sent: Vec<_> =
            order.iter().map(|&i| (i, send_json(server.address, "/v1/completions", &bodies[i]))).collect();
        for (i, pending) in sent {
            assert_eq!(choices(pending.response().json()), alone[i], "{}", bodies[i]);
        }
    }
    let distinct: std::collections::BTreeSet<String> = alone.iter().map(Value::to_string).collect();
    assert_eq!(distinct.len(), bodies.len(), "every combination has an effect of its own");
}
