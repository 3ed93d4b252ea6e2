//! A stand-in for the server: the native API over a script instead of a model, so that the people's surfaces are tested for what
//! they show and send, at a pace the test chooses. What a real engine does with the requests is tested elsewhere.
//!
//! The script is chosen by words of the last message: `long` runs to max_tokens, `emoji` splits characters over tokens, `refuse`
//! meets a full queue, `break` loses its connection, everything else gets one sentence.
#![allow(dead_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::web::{self, Bytes, Data, Json};
use actix_web::{App, HttpResponse, HttpServer};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// KV pages of the stand-in.
pub const PAGES: u64 = 64;

/// Bytes of a conversation that the stand-in refuses to tokenise.
pub const TEXT_MAX: usize = 7_000;

/// What the stand-in saw and counts.
#[derive(Debug, Default)]
pub struct Seen {
    /// Bodies of /v1/generate/stream, in order of arrival.
    pub generates: Vec<Value>,
    /// Bodies of /tokenize.
    pub tokenizes: Vec<Value>,
    /// Streams running now.
    pub active: u64,
    /// Streams that ended by themselves.
    pub completed: u64,
    /// Streams whose client went away.
    pub cancelled: u64,
    /// Tokens sent.
    pub tokens: u64,
    /// Every path asked for, in order.
    pub paths: Vec<String>,
}

/// A running stand-in.
pub struct Stub {
    /// `http://127.0.0.1:port`.
    pub url: String,
    seen: Arc<Mutex<Seen>>,
    allowed: Arc<AtomicUsize>,
    handle: ServerHandle,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone)]
struct Stage {
    seen: Arc<Mutex<Seen>>,
    pace: Duration,
    /// Tokens of an answer that may leave.
    allowed: Arc<AtomicUsize>,
}

impl Stub {
    /// Starts one with so much time between two tokens.
    pub fn start(pace: Duration) -> Self {
        Self::staged(pace, usize::MAX)
    }

    /// Starts one whose answers stop after so many tokens until [`Self::release`].
    pub fn held_after(tokens: usize) -> Self {
        Self::staged(Duration::from_millis(5), tokens)
    }

    fn staged(pace: Duration, allowed: usize) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let allowed = Arc::new(AtomicUsize::new(allowed));
        let stage = Stage { seen: seen.clone(), pace, allowed: allowed.clone() };
        let (sender, receiver) = channel();
        let thread = std::thread::spawn(move || {
            actix_web::rt::System::new().block_on(async move {
                let server = HttpServer::new(move || {
                    App::new()
                        .app_data(Data::new(stage.clone()))
                        .wrap_fn(|request, service| {
                            if let Some(stage) = request.app_data::<Data<Stage>>() {
                                lock(&stage.seen).paths.push(request.path().to_owned());
                            }
                            actix_web::dev::Service::call(service, request)
                        })
                        .route("/health", web::get().to(health))
                        .route("/stats", web::get().to(stats))
                        .route("/tokenize", web::post().to(tokenize))
                        .route("/detokenize", web::post().to(detokenize))
                        .route("/v1/generate/stream", web::post().to(generate))
                        .configure(crucible::web::configure)
                })
                .workers(1)
                .h1_allow_half_closed(false)
                .shutdown_timeout(1)
                .disable_signals()
                .bind("127.0.0.1:0")
                .unwrap();
                let address = server.addrs()[0];
                let server = server.run();
                sender.send((address, server.handle())).unwrap();
                server.await.unwrap();
            });
        });
        let (address, handle) = receiver.recv().unwrap();
        Self { url: format!("http://{address}"), seen, allowed, handle, thread: Some(thread) }
    }

    /// Lets held answers go on.
    pub fn release(&self) {
        self.allowed.store(usize::MAX, Ordering::Release);
    }

    /// What it saw so far.
    pub fn seen(&self) -> MutexGuard<'_, Seen> {
        lock(&self.seen)
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        // The command is sent at once; the future only waits for its end, and the thread's end says the same.
        drop(self.handle.stop(false));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

async fn health() -> HttpResponse {
    HttpResponse::Ok().json(json!({
        "status": "ok", "model": "stand-in", "device": "script", "max_batch": 4, "context": 4096, "kv_pages": PAGES,
        "profile": "none",
    }))
}

async fn stats(stage: Data<Stage>) -> HttpResponse {
    let seen = lock(&stage.seen);
    let used = seen.active * 4;
    HttpResponse::Ok().json(json!({
        "active_requests": seen.active, "queued_requests": 0, "kv_pages_used": used, "kv_pages_free": PAGES - used,
        "completed_requests": seen.completed, "cancelled_requests": seen.cancelled, "rejected_requests": 0,
        "failed_requests": 0, "decode_steps": seen.tokens, "average_batch_size": 1.0, "prefill_final_rows": 0,
    }))
}

/// One id per character, so that a prompt of ids can be read back.
async fn tokenize(stage: Data<Stage>, body: Json<Value>) -> HttpResponse {
    lock(&stage.seen).tokenizes.push(body.0.clone());
    let messages = body["messages"].as_array().cloned().unwrap_or_default();
    let text: String = messages
        .iter()
        .map(|m| format!("{}: {}\n", m["role"].as_str().unwrap_or(""), m["content"].as_str().unwrap_or("")))
        .collect();
    if text.len() > TEXT_MAX {
        let error = json!({"code": "context_length_exceeded", "message": "the conversation is too long"});
        return HttpResponse::BadRequest().json(json!({"error": error}));
    }
    HttpResponse::Ok().json(json!({"tokens": text.chars().map(u32::from).collect::<Vec<_>>()}))
}

async fn detokenize(body: Json<Value>) -> HttpResponse {
    let ids = body["tokens"].as_array().cloned().unwrap_or_default();
    let text: String = ids.iter().filter_map(|id| WORDS.get(id.as_u64()? as usize).copied()).collect();
    HttpResponse::Ok().json(json!({"text": text}))
}

/// The vocabulary of the answers.
const WORDS: [&str; 16] = [
    "The", " capital", " of", " France", " is", " Paris", ".", " It", " lies", " on", " the", " Seine", " and", " was",
    " Lyon", " not",
];

fn prompt_text(body: &Value) -> String {
    match &body["prompt_tokens"] {
        Value::Array(ids) => ids.iter().filter_map(|id| char::from_u32(id.as_u64()? as u32)).collect(),
        _ => body["prompt"].as_str().unwrap_or("").to_owned(),
    }
}

/// Token ids and texts, whether the answer ends by itself, and the text that `done` releases.
fn script(prompt: &str, max_tokens: usize) -> (Vec<(u32, &'static str)>, &'static str, &'static str) {
    let last = prompt.trim_end().rsplit("user: ").next().unwrap_or("");
    if last.contains("long") {
        let long = (0..max_tokens).map(|at| (at as u32 % 14, WORDS[at % 14]));
        return (long.collect(), "length", "");
    }
    if last.contains("emoji") {
        let split = [(0, "中"), (1, ""), (2, "文"), (3, " "), (4, ""), (5, ""), (6, "👩‍🚀"), (7, " <b>&amp;")];
        return (split.to_vec(), "stop", "!");
    }
    let sentence = [0, 1, 2, 3, 4, 5, 6].map(|id| (id as u32, WORDS[id]));
    (sentence.into_iter().take(max_tokens).collect(), "stop", "")
}

async fn generate(stage: Data<Stage>, body: Json<Value>) -> HttpResponse {
    lock(&stage.seen).generates.push(body.0.clone());
    let prompt = prompt_text(&body);
    if prompt.contains("refuse") {
        let error =
            json!({"error": {"code": "queue_full", "message": "the waiting queue is full; retry after a second"}});
        return HttpResponse::TooManyRequests().insert_header(("Retry-After", "1")).json(error);
    }
    let max_tokens = body["max_tokens"].as_u64().unwrap_or(64) as usize;
    let (tokens, reason, tail) = script(&prompt, max_tokens);
    let wants_logprobs = body["logprobs"].as_u64().is_some();
    let breaks = prompt.contains("break");
    let (sender, receiver) = mpsc::channel::<Bytes>(1);
    lock(&stage.seen).active += 1;
    actix_web::rt::spawn(async move {
        let mut gone = sender.send(Bytes::from_static(b": hello\n\n")).await.is_err();
        for (at, (id, text)) in tokens.iter().enumerate() {
            tokio::time::sleep(stage.pace).await;
            while at >= stage.allowed.load(Ordering::Acquire) {
                tokio::time::sleep(stage.pace).await;
            }
            let mut data = json!({"token_id": id, "text": text});
            if wants_logprobs {
                // Some are sure, some are not.
                let share = [0.97f64, 0.81, 0.42, 0.12][at % 4];
                let rest = (1.0 - share) / 2.0;
                data["logprobs"] = json!({"token_id": id, "logprob": share.ln(), "top": [
                    {"token_id": id, "logprob": share.ln()},
                    {"token_id": (id + 1) % 16, "logprob": rest.ln()},
                    {"token_id": (id + 9) % 16, "logprob": (rest / 3.0).ln()},
                ]});
            }
            gone = gone || sender.send(Bytes::from(format!("event: token\ndata: {data}\n\n"))).await.is_err();
            if gone || breaks && at == 3 {
                break;
            }
            lock(&stage.seen).tokens += 1;
        }
        if !gone && !breaks {
            let data = json!({"finish_reason": reason, "tokens_generated": tokens.len(), "text": tail});
            gone = sender.send(Bytes::from(format!("event: done\ndata: {data}\n\n"))).await.is_err();
        }
        let mut seen = lock(&stage.seen);
        seen.active -= 1;
        if gone { seen.cancelled += 1 } else { seen.completed += 1 }
    });
    HttpResponse::Ok()
        .content_type("text/event-stream")
        .insert_header(("Cache-Control", "no-store"))
        .streaming(ReceiverStream::new(receiver).map(Ok::<_, actix_web::Error>))
}
