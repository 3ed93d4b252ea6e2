//! A hub that collects what its sessions would get, on an actix thread of its own as an HTTP worker would be.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use actix::{Actor, Addr, Context, Handler, Recipient};
use crucible::actors::session::messages::{GeneratedToken, SessionEnd, TokenBatch};
use crucible::admission::RequestId;
use crucible::backend::TokenLogprobs;

/// What one session got.
#[derive(Clone, Debug, Default)]
pub struct Got {
    pub scores: Vec<TokenLogprobs>,
    pub tokens: Vec<GeneratedToken>,
    pub end: Option<SessionEnd>,
}

impl Got {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|t| t.id).collect()
    }
}

#[derive(Default)]
struct Collected {
    sessions: HashMap<RequestId, Got>,
    batches: usize,
}

type Shared = Arc<(Mutex<Collected>, Condvar)>;

struct Collector(Shared);

impl Actor for Collector {
    type Context = Context<Self>;
}

impl Handler<TokenBatch> for Collector {
    type Result = ();
    fn handle(&mut self, batch: TokenBatch, _: &mut Self::Context) {
        let mut collected = self.0.0.lock().unwrap();
        collected.batches += 1;
        for entry in batch.entries {
            let got = collected.sessions.entry(entry.request).or_default();
            if got.end.is_some() {
                continue; // a session is over at its first end, as the hub would have it
            }
            for token in &entry.tokens {
                assert_eq!(token.index as usize, got.tokens.len() + token_offset(&entry.tokens, token), "in order");
            }
            assert!(entry.prompt_scores.is_empty() || got.tokens.is_empty(), "scores come before every token");
            got.scores.extend(entry.prompt_scores);
            got.tokens.extend(entry.tokens);
            got.end = entry.end;
        }
        self.0.1.notify_all();
    }
}

fn token_offset(tokens: &[GeneratedToken], token: &GeneratedToken) -> usize {
    tokens.iter().position(|t| t.index == token.index).unwrap_or(0)
}

/// The handle of a collecting hub.
pub struct Hub {
    shared: Shared,
    address: Addr<Collector>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Hub {
    pub fn start() -> Self {
        let shared = Shared::default();
        let (given, address) = std::sync::mpsc::channel();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let collector = Collector(Arc::clone(&shared));
        let thread = std::thread::spawn(move || {
            actix::System::new().block_on(async move {
                given.send(collector.start()).unwrap();
                let _ = stopped.await;
            });
        });
        let address = address.recv().unwrap();
        Self { shared, address, stop: Some(stop), thread: Some(thread) }
    }

    pub fn recipient(&self) -> Recipient<TokenBatch> {
        self.address.clone().recipient()
    }

    /// Messages received.
    pub fn batches(&self) -> usize {
        self.shared.0.lock().unwrap().batches
    }

    /// What the session has so far.
    pub fn so_far(&self, request: RequestId) -> Got {
        self.shared.0.lock().unwrap().sessions.get(&request).cloned().unwrap_or_default()
    }

    /// Waits until the session has `tokens` tokens; panics after a minute.
    pub fn tokens(&self, request: RequestId, tokens: usize) -> Got {
        self.wait(request, |got| got.tokens.len() >= tokens)
    }

    /// Waits for the session's end; panics after a minute.
    pub fn end(&self, request: RequestId) -> Got {
        self.wait(request, |got| got.end.is_some())
    }

    fn wait(&self, request: RequestId, enough: impl Fn(&Got) -> bool) -> Got {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut collected = self.shared.0.lock().unwrap();
        loop {
            if let Some(got) = collected.sessions.get(&request).filter(|got| enough(got)) {
                return got.clone();
            }
            let left = deadline.checked_duration_since(Instant::now());
            let left = left.unwrap_or_else(|| panic!("{request} got {:?}", collected.sessions.get(&request)));
            collected = self.shared.1.wait_timeout(collected, left).unwrap().0;
        }
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        let _ = self.stop.take().map(|stop| stop.send(()));
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}
