//! One conversation through every dialect: the engine is told the same, the model says the same, and a stream says what the whole
//! answer says, for characters that split over tokens, too.

mod common;
mod engine_support;
mod http_support;
#[path = "http_support/scripted.rs"]
mod scripted;

use std::net::SocketAddr;

use crucible::backend::Step;
use engine_support::fake::Script;
use http_support::binary::Binary;
use http_support::client::{Response, post};
use scripted::Scripted;
use serde_json::{Value, json};

/// The surfaces that one conversation can go through; the first two take its rendered tokens.
const SURFACES: [&str; 4] = ["native", "completions", "chat", "messages"];
const QUESTIONS: [&str; 4] = ["你好，请用中文写一句话。", "🎉🚀👩‍👩‍👧‍👦 and more emoji?", "Les élèves à l'école", "hi"];

struct Asker {
    address: SocketAddr,
    model: &'static str,
    /// The conversation as token ids, for the surfaces that take them.
    ids: Value,
    question: &'static str,
}

impl Asker {
    fn new(address: SocketAddr, model: &'static str, question: &'static str) -> Self {
        let messages = json!([{"role": "user", "content": question}]);
        let ids = post(address, "/tokenize", &json!({"messages": messages})).json()["tokens"].clone();
        Self { address, model, ids, question }
    }

    /// The same request in a surface, whole or (`stream` fields) streamed.
    fn send(&self, surface: &str, delivery: Delivery) -> Response {
        let sampling =
            json!({"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 7, "ignore_eos": true});
        let messages = json!([{"role": "user", "content": self.question}]);
        let (path, own) = match surface {
            "native" => match delivery {
                Delivery::Whole => ("/v1/generate", json!({"prompt_tokens": self.ids})),
                Delivery::Streamed => ("/v1/generate/stream", json!({"prompt_tokens": self.ids})),
            },
            "completions" => ("/v1/completions", json!({"model": self.model, "prompt": self.ids})),
            "chat" => ("/v1/chat/completions", json!({"model": self.model, "messages": messages})),
            _ => ("/v1/messages", json!({"model": self.model, "messages": messages})),
        };
        let mut body = sampling;
        body.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        if delivery == Delivery::Streamed && surface != "native" {
            body["stream"] = json!(true);
        }
        let response = post(self.address, path, &body);
        assert_eq!(response.status, 200, "{surface}: {}", response.text());
        response
    }

    fn whole(&self, surface: &str) -> String {
        let body = self.send(surface, Delivery::Whole).json();
        let text = match surface {
            "native" => &body["text"],
            "completions" => &body["choices"][0]["text"],
            "chat" => &body["choices"][0]["message"]["content"],
            _ => &body["content"][0]["text"],
        };
        text.as_str().unwrap_or_else(|| panic!("{surface}: {body}")).to_owned()
    }

    fn streamed(&self, surface: &str) -> String {
        let events = self.send(surface, Delivery::Streamed).events();
        let parsed = events.iter().filter_map(|(_, data)| serde_json::from_str::<Value>(data).ok());
        let piece = |event: Value| {
            let text = match surface {
                "native" => &event["text"],
                "completions" => &event["choices"][0]["text"],
                "chat" => &event["choices"][0]["delta"]["content"],
                _ => &event["delta"]["text"],
            };
            text.as_str().map(String::from)
        };
        parsed.filter_map(piece).collect()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Delivery {
    Whole,
    Streamed,
}

/// What the backend was told, without whose it was and where it lay.
fn told(steps: &[Step]) -> Vec<String> {
    let row = |row: &crucible::backend::Row| {
        format!("{:?} {} {:?} {:?} {:?}", row.start, row.len, row.input, row.want, row.sampling)
    };
    steps.iter().map(|s| format!("{:?} {:?}", s.tokens, s.rows.iter().map(row).collect::<Vec<_>>())).collect()
}

#[test]
fn one_conversation_is_the_same_steps_of_the_same_token_ids_through_every_dialect() {
    let script = Script::default();
    let server = Scripted::start(script.clone(), &[]);
    for question in QUESTIONS {
        let asker = Asker::new(server.address, "tiny", question);
        let of = |surface: &str| {
            script.seen.lock().unwrap().clear();
            asker.whole(surface);
            let seen = script.seen.lock().unwrap();
            // The step after the last token may have been planned before its end was known.
            told(&seen)[..24].to_vec()
        };
        let native = of("native");
        assert!(native[0].contains(&asker.ids.to_string().replace(',', ", ")), "the prompt is the conversation's ids");
        for surface in SURFACES {
            assert_eq!(of(surface), native, "{surface}: {question}");
        }
    }
}

#[test]
fn streamed_text_is_the_whole_text_in_every_dialect_and_the_same_in_all_of_them() {
    let scripted = Scripted::start(Script::default(), &[]);
    let path = format!("model.path=\"{}\"", common::default_model().display());
    let real = Binary::start("config/crucible.toml", &[&path, "executor.backend=cpu"]);
    for (address, model) in [(scripted.address, "tiny"), (real.address, "smollm2-135m-instruct")] {
        for question in QUESTIONS {
            let asker = Asker::new(address, model, question);
            let text = asker.whole("native");
            assert!(!text.is_empty());
            for surface in SURFACES {
                assert_eq!(asker.whole(surface), text, "{model} whole, {surface}: {question}");
                assert_eq!(asker.streamed(surface), text, "{model} streamed, {surface}: {question}");
            }
        }
    }
}
