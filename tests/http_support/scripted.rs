//! The real server in this process over the scripted backend of the engine's tests: steps can be held, slowed down or made to fail.
#![allow(dead_code)] // no test file needs everything

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use actix_web::web;
use crucible::actors::topology::Engine;
use crucible::backend::BackendFactory;
use crucible::config::Config;
use crucible::model::chat_template::{CHATML, ChatTemplate};
use crucible::model::tokenizer::Tokenizer;
use crucible::server::{Ending, Service, serve};
use serde_json::Value;

use crate::engine_support::fake::{self, Script};
use crate::http_support::client::{Pending, get, send_json};
use crate::http_support::until;

/// A server whose drop drains it.
pub struct Scripted {
    pub address: SocketAddr,
    service: Arc<Service>,
    thread: Option<JoinHandle<Ending>>,
}

/// A server with one resident request and one that waits, until the script lets go.
pub struct Full {
    pub server: Scripted,
    pub script: Script,
    /// Both requests.
    pub waiting: Vec<Pending>,
}

impl Scripted {
    /// Starts a server with these overrides of the defaults.
    pub fn start(script: Script, overrides: &[&str]) -> Self {
        Self::over(fake::factory(script), overrides)
    }

    /// The same over another backend with the fake's vocabulary.
    pub fn over(backend: BackendFactory, overrides: &[&str]) -> Self {
        Self::templated(backend, CHATML, overrides)
    }

    /// The same with another chat template: every byte of ChatML's marks is a token of this vocabulary.
    pub fn templated(backend: BackendFactory, template: &'static str, overrides: &[&str]) -> Self {
        let fixed = ["server.port=0", "model.id=tiny", "limits.max_batch=8", "server.fatal_linger_ms=300"];
        let overrides: Vec<String> = fixed.iter().chain(overrides).map(|&o| o.to_owned()).collect();
        let config = Config::parse("test", "", &overrides).unwrap_or_else(|e| panic!("{e}"));
        let (ready, started) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            actix_web::rt::System::new().block_on(async move {
                let mut engine_config = config.engine(1 << 14);
                engine_config.max_new_tokens = 1 << 13;
                let engine = Engine::start(engine_config, backend).expect("an engine");
                let template = ChatTemplate::compile(template, "", "").expect("a template");
                let service = Service::new(config, engine.handle(), Tokenizer::bytes(fake::VOCAB), template);
                let service = web::Data::new(service);
                let shared = service.clone().into_inner();
                let tell = move |address| ready.send((address, shared)).expect("a test that waits");
                serve(service, tell).await.expect("a server")
            })
        });
        let (address, service) = started.recv().expect("a started server");
        Self { address, service, thread: Some(thread) }
    }

    /// A server that has room for nobody beside two of these requests.
    pub fn full(path: &str, body: &Value) -> Full {
        let script = Script { pages: 32, ..Script::default() };
        let server = Self::start(script.clone(), &["limits.max_queue=1", "limits.max_batch=1"]);
        script.hold.store(true, Ordering::Release);
        let enter = |waiting: u64| {
            let pending = send_json(server.address, path, body);
            until("it is where it stays", || {
                let stats = get(server.address, "/stats").json();
                stats["active_requests"] == 1 && stats["queued_requests"] == waiting
            });
            pending
        };
        let waiting = (0..2).map(enter).collect();
        Full { server, script, waiting }
    }

    /// A server that drains while it computes these requests; its deadline is an override of the configuration.
    pub fn draining(deadline: &str, path: &str, bodies: &[Value]) -> (Self, Vec<Pending>) {
        let script = Script { step_time: Duration::from_millis(5), ..Script::default() };
        let server = Self::start(script, &[deadline]);
        let pending = bodies.iter().map(|body| send_json(server.address, path, body)).collect();
        until("all are in", || get(server.address, "/stats").json()["active_requests"] == bodies.len());
        server.begin_drain();
        (server, pending)
    }

    /// Asks the server to drain, as a signal does, without waiting.
    pub fn begin_drain(&self) {
        self.service.stop();
    }

    /// Waits for the server's end.
    pub fn ending(mut self) -> Ending {
        self.thread.take().expect("a thread").join().expect("no panic")
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.service.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
