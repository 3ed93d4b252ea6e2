//! What the engine's tests share: a scripted backend whose tokens are a pure function of each sequence's own history, and hubs
//! that collect what the sessions would get.
#![allow(dead_code)]

pub mod fake;
pub mod probe;
#[path = "../../src/planner/seeded.rs"]
pub mod seeded;

use std::sync::Arc;
use std::time::Duration;

use crucible::actors::topology::{Engine, EngineConfig, EngineHandle};
use crucible::admission::{Dialect, RequestId, RequestSpec, ValidRequest};
use crucible::backend::Rule;

/// A configuration with room for everything in these tests.
pub fn config() -> EngineConfig {
    EngineConfig {
        max_batch: 16,
        max_queue: 64,
        token_budget: 1024,
        step_time_target: None,
        chunk_cap: None,
        prefill_max_requests: 64,
        packing: true,
        max_prompt_tokens: 1 << 16,
        max_new_tokens: 1 << 16,
        step_timeout: Duration::from_secs(20),
        pin: None,
        step_trace: None,
    }
}

/// A greedy request without end-of-sequence tokens.
pub fn spec(prompt: &[u32], max_new_tokens: usize) -> RequestSpec {
    RequestSpec {
        prompt: Arc::from(prompt),
        max_new_tokens,
        rule: Rule::Greedy,
        adjust: None,
        seed: 0,
        choice: 0,
        eos: Arc::from([]),
        logprobs: None,
        score_prompt: false,
        dialect: Dialect::Internal,
    }
}

/// The same with its prompt scored, one alternative a token.
pub fn scored(prompt: &[u32], max_new_tokens: usize) -> RequestSpec {
    RequestSpec { score_prompt: true, logprobs: Some(1), ..spec(prompt, max_new_tokens) }
}

/// A prompt of `len` tokens that differs with `salt`.
pub fn prompt(len: usize, salt: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 7 + salt * 131) % fake::VOCAB as u32).collect()
}

/// Checks and submits a request; panics when the queue is full.
pub fn submit(engine: &EngineHandle, hub: &probe::Hub, spec: RequestSpec) -> RequestId {
    try_submit(engine, hub, spec).expect("a free queue permit")
}

/// Checks and submits a request, unless the queue is full.
pub fn try_submit(engine: &EngineHandle, hub: &probe::Hub, spec: RequestSpec) -> Option<RequestId> {
    let permit = engine.try_permit()?;
    let id = engine.next_id();
    let request = ValidRequest::new(id, spec, engine.limits()).expect("a valid request");
    engine.submit(crucible::actors::admission::messages::Submit { request, permit, hub: hub.recipient() });
    Some(id)
}

/// Waits until `done`; panics after half a minute.
pub fn eventually(what: &str, done: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until nothing is live and no page is out; panics with the account after half a minute.
pub fn settle(engine: &EngineHandle) {
    for _ in 0..30_000 {
        let account = engine.snapshot().account.clone();
        assert!(account.balances(), "I2: {account:?}");
        if account.live() == 0 {
            assert_eq!(account.kv_pages_used, 0, "idle means every page is free: {account:?}");
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("still live: {:?}", engine.snapshot().account);
}

/// Starts an engine over a scripted backend.
pub fn start(config: EngineConfig, script: fake::Script) -> Engine {
    Engine::start(config, fake::factory(script)).expect("the engine starts")
}
