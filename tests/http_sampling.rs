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

/// The id that a log-probability's key names: the tiny model's tokens are the bytes and, above them, numbers in angle brackets.
fn id(token: &Value) -> u32 {
    let token = token.as_str().unwrap();
    if let Some(byte) = token.strip_prefix("bytes:\\x") {
        return u32::from_str_radix(byte, 16).unwrap();
    }
    match token.strip_prefix('<').and_then(|rest| rest.strip_suffix('>')) {
        Some(number) => number.parse().unwrap(),
        None => u32::from(token.as_bytes()[0]),
    }
}

fn generated(server: &Binary, fields: &Value) -> Vec<u32> {
    let response = post(server.address, "/v1/completions", &completion(fields)).json();
    choice(&response)["logprobs"]["tokens"].as_array().unwrap().iter().map(id).collect()
}

/// Every token of the penalised answer is the one that a request for it alone gets with a bias of `taken_off(count)` on each token
/// before it. The answer differs from the one without the penalty.
fn is_a_bias(server: &Binary, penalty: &Value, taken_off: impl Fn(u32) -> u32) -> Vec<u32> {
    let ids = generated(server, penalty);
    assert_ne!(ids, generated(server, &json!({})), "{penalty} has an effect");
    for at in 0..ids.len() {
        let mut counts = std::collections::BTreeMap::<u32, u32>::new();
        for &id in &ids[..at] {
            *counts.entry(id).or_default() += 1;
        }
        let bias: Value = counts.iter().map(|(id, &n)| (id.to_string(), json!(-f64::from(taken_off(n))))).collect();
        let prompt = [&[5, 9, 12, 5], &ids[..at]].concat();
        let next = generated(server, &json!({"prompt": prompt, "max_tokens": 1, "logit_bias": bias}));
        assert_eq!(next, [ids[at]], "{penalty}, token {at} of {ids:?}");
    }
    ids
}

#[test]
fn a_presence_penalty_is_a_bias_on_every_token_that_was_generated() {
    is_a_bias(&Binary::tiny(&[]), &json!({"presence_penalty": 2}), |_| 2);
}

#[test]
fn a_frequency_penalty_is_a_bias_that_grows_with_every_use() {
    let server = Binary::tiny(&[]);
    let penalty = json!({"frequency_penalty": 2});
    let ids = is_a_bias(&server, &penalty, |count| 2 * count);
    let distinct: std::collections::BTreeSet<u32> = ids.iter().copied().collect();
    assert!(distinct.len() > 5, "{ids:?}");
    is_a_bias(&server, &json!({"frequency_penalty": 1, "presence_penalty": 2}), |count| 2 + count);
}

#[test]
fn the_answer_is_the_same_alone_and_among_others_in_every_combination() {
    let server = Binary::tiny(&[]);
    let bias: Value = (0..40).map(|i| ((i * 8 + 1).to_string(), json!(if i % 2 == 0 { 3.5 } else { -6.0 }))).collect();
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
