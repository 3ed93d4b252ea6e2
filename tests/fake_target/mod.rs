//! A target of the load generator that answers whatever a test wants: a closure from request to bytes, one thread a connection.
#![allow(dead_code)] // no test file needs everything

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

/// A request as far as a fake looks.
#[derive(Debug)]
pub struct Request {
    /// Its path.
    pub path: String,
    /// Its JSON; null without a body.
    pub body: Value,
    /// How many generations came before it, counted over all connections.
    pub generation: usize,
}

/// Where a fake listens.
pub struct Fake {
    /// `http://127.0.0.1:port`.
    pub url: String,
}

impl Fake {
    /// Answers every request with the bytes of `answer`; a POST is a generation.
    pub fn start(answer: impl Fn(&Request) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let (answer, generations) = (Arc::new(answer), Arc::new(AtomicUsize::new(0)));
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let (answer, generations) = (Arc::clone(&answer), Arc::clone(&generations));
                std::thread::spawn(move || {
                    while let Some(request) = read(&mut stream, &generations) {
                        if stream.write_all(&answer(&request)).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { url }
    }
}

fn read(stream: &mut TcpStream, generations: &AtomicUsize) -> Option<Request> {
    let (mut seen, mut buffer) = (Vec::new(), [0; 65_536]);
    loop {
        if let Some(head) = seen.windows(4).position(|w| w == b"\r\n\r\n").map(|at| at + 4) {
            let text = String::from_utf8_lossy(&seen[..head]).into_owned();
            let length = text.lines().find_map(|l| l.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
            if seen.len() >= head + length.unwrap_or(0) {
                let body = serde_json::from_slice(&seen[head..]).unwrap_or(Value::Null);
                let path = text.split(' ').nth(1).unwrap_or_default().to_owned();
                let generation = match text.starts_with("POST") {
                    true => generations.fetch_add(1, Ordering::SeqCst),
                    false => generations.load(Ordering::SeqCst),
                };
                return Some(Request { path, body, generation });
            }
        }
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return None,
            Ok(n) => seen.extend_from_slice(&buffer[..n]),
        }
    }
}

/// A response with a length.
pub fn respond(status: &str, headers: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// A response of JSON.
pub fn json_of(value: &Value) -> Vec<u8> {
    respond("200 OK", "", &value.to_string())
}

/// What a server without the path says.
pub fn missing() -> Vec<u8> {
    respond("404 Not Found", "", "{}")
}

/// Events as a whole stream.
pub fn stream(events: &str) -> Vec<u8> {
    respond("200 OK", "content-type: text/event-stream\r\n", events)
}

/// The tokens that a request asks for.
pub fn asked(request: &Request) -> usize {
    request.body["max_tokens"].as_u64().unwrap_or(1) as usize
}

/// A native answer of so many tokens.
pub fn native(tokens: usize) -> Vec<u8> {
    let one = |id| format!("event: token\ndata: {{\"token_id\":{id},\"text\":\"a\"}}\n\n");
    let events: String = (0..tokens).map(one).collect();
    stream(&format!(
        "{events}event: done\ndata: {{\"finish_reason\":\"length\",\"tokens_generated\":{tokens},\"text\":\"\"}}\n\n"
    ))
}

/// An answer of OpenAI's completions.
pub fn completion(tokens: usize) -> Vec<u8> {
    let one = "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\n\n".repeat(tokens);
    let usage = json!({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}});
    stream(&format!("{one}data: {usage}\n\ndata: [DONE]\n\n"))
}

/// The statistics of a server that did nothing but complete so many requests.
pub fn stats(completed: usize) -> Value {
    json!({
        "active_requests": 0, "queued_requests": 0, "accepted_requests": completed, "completed_requests": completed,
        "cancelled_requests": 0, "failed_requests": 0, "rejected_requests": 0, "kv_pages_used": 0, "kv_pages_free": 8,
    })
}
