//! The real model over HTTP: it answers, its streams equal its answers, and clients that leave leave nothing behind.

mod common;
mod http_support;

use std::sync::OnceLock;

use http_support::binary::Binary;
use http_support::client::{Response, get, post, send_json};
use http_support::{at_rest, until};
use serde_json::{Value, json};

/// A server of this test's own.
fn server(overrides: &[&str]) -> Binary {
    static MODEL: OnceLock<String> = OnceLock::new();
    let model = MODEL.get_or_init(|| format!("model.path=\"{}\"", common::default_model().display()));
    Binary::start("config/crucible.toml", &[&[model.as_str(), "executor.backend=cpu"], overrides].concat())
}

fn chat(question: &str, fields: Value) -> Value {
    let mut body = json!({
        "model": "smollm2-135m-instruct", "temperature": 0, "max_tokens": 24,
        "messages": [{"role": "user", "content": question}],
    });
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn stats(server: &Binary) -> Value {
    get(server.address, "/stats").json()
}

fn content(response: &Response) -> String {
    response.json()["choices"][0]["message"]["content"].as_str().expect("content").to_owned()
}

#[test]
fn a_question_about_the_capital_of_france_is_answered_with_paris_whole_and_streamed() {
    let server = server(&[]);
    let whole =
        post(server.address, "/v1/chat/completions", &chat("What is the name of the capital of France?", json!({})));
    let text = content(&whole);
    assert!(text.contains("Paris"), "{text}");
    assert_eq!(whole.json()["choices"][0]["finish_reason"], "stop");
    let streamed = chat("What is the name of the capital of France?", json!({"stream": true}));
    let events = post(server.address, "/v1/chat/completions", &streamed).events();
    let streamed: String = events
        .iter()
        .filter_map(|(_, data)| serde_json::from_str::<Value>(data).ok())
        .filter_map(|e| e["choices"][0]["delta"]["content"].as_str().map(String::from))
        .collect();
    assert_eq!(streamed, text);
}

/// The commands of README's session that send a body, as (path, body, what is printed).
fn readme_session() -> Vec<(String, Value, String)> {
    let readme = include_str!("../README.md");
    let session = readme.split("```console\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a session");
    let commands = session.split("$ curl ").filter(|command| command.contains(" -d '"));
    let parts = commands.map(|command| {
        let path = command.split("localhost:8080").nth(1).and_then(|rest| rest.split(' ').next()).expect("a path");
        let (body, printed) = command.split(" -d '").nth(1).and_then(|rest| rest.split_once("'\n")).expect("a body");
        (path.to_owned(), serde_json::from_str(body).expect("JSON"), printed.trim().to_owned())
    });
    parts.collect()
}

#[test]
fn the_session_of_the_readme_prints_what_the_readme_says() {
    let server = server(&[]);
    let session = readme_session();
    assert_eq!(session.len(), 2);
    for (path, body, printed) in session {
        let answer = String::from_utf8(post(server.address, &path, &body).body).expect("text").replace("\n\n", "\n");
        let mut rest = answer.as_str();
        for part in printed.split('…').map(str::trim) {
            let found = rest.split_once(part).unwrap_or_else(|| panic!("{path} does not print {part} in {answer}"));
            rest = found.1;
        }
    }
    let questions = include_str!("../README.md").matches("What is the name of the capital of France?").count();
    assert_eq!(questions, 3, "the SDK examples ask what the session asks");
}

#[test]
fn text_of_many_scripts_streams_as_it_answers() {
    let server = server(&[]);
    for prompt in ["你好，请用中文写一句话：", "Emoji: 🎉🚀👩‍🚀 and more emoji:", "Les élèves à l'école"]
    {
        let body = json!({"prompt": prompt, "max_tokens": 32, "temperature": 1.5, "seed": 7});
        let whole = post(server.address, "/v1/generate", &body).json();
        let events = post(server.address, "/v1/generate/stream", &body).events();
        let text: String = events
            .iter()
            .filter_map(|(_, d)| serde_json::from_str::<Value>(d).unwrap()["text"].as_str().map(String::from))
            .collect();
        assert_eq!(json!(text), whole["text"]);
    }
}

#[test]
fn clients_that_leave_at_any_time_leave_nothing_behind() {
    // Small slices, so that a prompt takes many steps.
    let server = server(&["prefill.token_budget=16"]);
    let long = "word ".repeat(1500);
    let alone = post(server.address, "/v1/generate", &json!({"prompt": "The sky is", "max_tokens": 12})).json();
    // In prefill, streaming and unary.
    for path in ["/v1/generate/stream", "/v1/generate"] {
        let request = send_json(server.address, path, &json!({"prompt": long, "max_tokens": 64}));
        until("prefill has begun", || {
            let stats = stats(&server);
            stats["prefilling_requests"] == 1 && stats["last_prefill_batch_tokens"] == 16
        });
        drop(request);
        until("everything is back", || at_rest(server.address));
    }
    // Mid-stream and mid-answer.
    let mut stream = send_json(
        server.address,
        "/v1/generate/stream",
        &json!({"prompt": "Once", "max_tokens": 2000, "ignore_eos": true}),
    );
    stream.head();
    stream.read_events(4);
    drop(stream);
    until("the stream is out", || at_rest(server.address));
    let steps = |stats: Value| stats["decode_steps"].as_u64().unwrap();
    let before = steps(stats(&server));
    let unary =
        send_json(server.address, "/v1/generate", &json!({"prompt": "Once", "max_tokens": 2000, "ignore_eos": true}));
    until("its answer is under way", || steps(stats(&server)) > before + 2);
    drop(unary);
    until("all are cancelled", || stats(&server)["cancelled_requests"] == 4);
    until("everything is back", || at_rest(server.address));
    let again = post(server.address, "/v1/generate", &json!({"prompt": "The sky is", "max_tokens": 12})).json();
    assert_eq!(again, alone, "the same bits after all of that");
}

#[test]
fn a_burst_under_pressure_is_served_or_refused_and_every_page_is_back() {
    let server = server(&["kv.pages=32", "limits.max_queue=4", "limits.max_batch=4"]);
    let body = json!({"prompt": "The capital of France is", "max_tokens": 100, "ignore_eos": true});
    // Set-up traffic, counted apart.
    assert_eq!(post(server.address, "/v1/generate", &body).status, 200);
    // The client has its answer before the account has closed it.
    until("the set-up traffic is accounted for", || at_rest(server.address));
    let before = stats(&server);
    let burst: Vec<_> = (0..24).map(|_| send_json(server.address, "/v1/generate", &body)).collect();
    let responses: Vec<_> = burst.into_iter().map(|p| p.response()).collect();
    let ok: Vec<_> = responses.iter().filter(|r| r.status == 200).collect();
    let refused: Vec<_> = responses.iter().filter(|r| r.status == 429).collect();
    assert_eq!(ok.len() + refused.len(), 24);
    assert!(!ok.is_empty() && !refused.is_empty());
    assert!(refused.iter().all(|r| r.header("retry-after").is_some()));
    assert!(ok.iter().all(|r| r.json()["token_ids"] == ok[0].json()["token_ids"]), "one prompt has one answer");
    until("everything is back", || at_rest(server.address));
    let stats = stats(&server);
    assert_eq!(stats["queue_peak"], 4);
    assert!(stats["kv_pages_peak"].as_u64().unwrap() <= 32);
    assert_eq!((&stats["failed_requests"], &stats["kv_pages_free"]), (&json!(0), &json!(32)));
    let completed = stats["completed_requests"].as_u64().unwrap() - before["completed_requests"].as_u64().unwrap();
    assert_eq!(completed, ok.len() as u64);
}
