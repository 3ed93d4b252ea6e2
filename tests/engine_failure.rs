//! Drain and death: everything live gets a typed end, later work is refused at once, and nothing hangs (rule 6).

mod engine_support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crucible::actors::session::messages::{SessionEnd, SessionFailure};
use crucible::actors::topology::{Engine, EngineError, EngineHandle};
use crucible::admission::Outcome;
use crucible::backend::{BackendError, Completion};

use engine_support::fake::{Fault, Script, expected};
use engine_support::probe::Hub;
use engine_support::{config, prompt, settle, spec, start, submit};

const BOTH: [Completion; 2] = [Completion::Notified, Completion::Polled];

/// The death of the engine as its handle shows it; panics after half a minute.
fn death(handle: &EngineHandle) -> Arc<str> {
    let fatal = handle.fatal();
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(reason) = fatal.borrow().clone() {
            return reason;
        }
        assert!(Instant::now() < deadline, "the engine still lives");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn engine_failure(end: Option<SessionEnd>) -> Arc<str> {
    match end {
        Some(SessionEnd::Failed(SessionFailure::Engine(reason))) => reason,
        other => panic!("not a typed engine failure: {other:?}"),
    }
}

fn at_step(step: u64, fault: Fault) -> Arc<dyn Fn(u64) -> Fault + Send + Sync> {
    Arc::new(move |id| if id == step { fault } else { Fault::Nothing })
}

/// Three requests, of which the engine dies under all: two resident, one waiting.
fn dies_under_three(completion: Completion, fault: Fault, step: u64) -> (Engine, Hub, Arc<str>) {
    let script = Script { completion, fault: at_step(step, fault), ..Script::default() };
    let mut config = config();
    config.max_batch = 2;
    if fault == Fault::Hang {
        config.step_timeout = Duration::from_millis(150);
    }
    let (engine, hub) = (start(config, script), Hub::start());
    let handle = engine.handle();
    let ids: Vec<_> = (0..3).map(|salt| submit(&handle, &hub, spec(&prompt(20, salt), 1_000))).collect();
    let reason = death(&handle);
    for id in ids {
        assert_eq!(engine_failure(hub.end(id).end), reason);
    }
    (engine, hub, reason)
}

#[test]
fn a_failing_step_fails_every_live_request_in_the_typed_way() {
    for completion in BOTH {
        for (fault, step) in [(Fault::FailAtSubmit, 1), (Fault::FailAtSubmit, 2), (Fault::FailAtSubmit, 7)]
            .into_iter()
            .chain([1, 2, 7, 40].map(|step| (Fault::FailAtPoll, step)))
        {
            let (engine, _hub, reason) = dies_under_three(completion, fault, step);
            assert!(reason.contains("scripted"), "{reason}");
            settle(&engine.handle());
            let account = engine.handle().snapshot().account.clone();
            // A request that came after the death was refused instead.
            assert_eq!(account.ended_as(Outcome::Failed), account.accepted);
            assert_eq!(account.accepted + account.refused_draining, 3);
        }
    }
}

#[test]
fn a_hung_step_is_fatal_at_its_deadline_and_the_engine_still_stops() {
    for completion in BOTH {
        let begun = Instant::now();
        let (engine, _hub, reason) = dies_under_three(completion, Fault::Hang, 5);
        assert!(reason.contains("executor.step_timeout_ms = 150"), "{reason}");
        settle(&engine.handle());
        drop(engine);
        assert!(begun.elapsed() < Duration::from_secs(20), "a hung step is left behind, not waited for");
    }
}

#[test]
fn a_call_of_the_backend_that_never_returns_is_fatal_though_the_arbiter_is_stuck_in_it() {
    for completion in BOTH {
        for (fault, step) in [(Fault::BlockInSubmit, 1), (Fault::BlockInSubmit, 6), (Fault::BlockInPoll, 6)] {
            let begun = Instant::now();
            let script = Script { completion, fault: at_step(step, fault), ..Script::default() };
            let mut config = config();
            (config.max_batch, config.step_timeout) = (2, Duration::from_millis(150));
            let (engine, hub) = (start(config, script), Hub::start());
            for salt in 0..3 {
                submit(&engine.handle(), &hub, spec(&prompt(20, salt), 1_000));
            }
            // The arbiter can tell nobody. The flag can, and every session follows it (tests/http_scripted.rs).
            assert!(death(&engine.handle()).contains("executor.step_timeout_ms = 150"));
            drop(engine);
            assert!(begun.elapsed() < Duration::from_secs(20), "a stuck thread is left behind, not joined");
        }
    }
}

#[test]
fn a_slow_engine_that_keeps_completing_steps_is_not_hung() {
    let script = Script { step_time: Duration::from_millis(300), ..Script::default() };
    let mut config = config();
    // Less than all steps together, far more than one on a busy machine.
    config.step_timeout = Duration::from_secs(3);
    let (engine, hub) = (start(config, script), Hub::start());
    let id = submit(&engine.handle(), &hub, spec(&prompt(20, 1), 12));
    assert_eq!(hub.end(id).ids(), expected(&prompt(20, 1), 12));
    // Nor is an idle one.
    std::thread::sleep(Duration::from_millis(3_300));
    assert!(engine.handle().fatal().borrow().is_none());
}

#[test]
fn a_panic_in_an_actor_closes_the_engine_instead_of_limping_on() {
    for completion in BOTH {
        let (engine, hub, reason) = dies_under_three(completion, Fault::Panic, 4);
        assert!(reason.contains("scripted panic"), "{reason}");
        settle(&engine.handle());
        let late = submit(&engine.handle(), &hub, spec(&prompt(3, 1), 3));
        assert_eq!(engine_failure(hub.end(late).end), reason);
    }
}

#[test]
fn a_dead_engine_refuses_later_work_at_once_and_gives_the_permit_back() {
    let (engine, hub, reason) = dies_under_three(Completion::Notified, Fault::FailAtPoll, 2);
    let handle = engine.handle();
    for _ in 0..config().max_queue + 3 {
        let id = submit(&handle, &hub, spec(&prompt(3, 1), 3));
        assert_eq!(engine_failure(hub.end(id).end), reason);
    }
    assert_eq!(handle.permits().held(), 0);
    let account = handle.snapshot().account.clone();
    assert_eq!(account.accepted + account.refused_draining, 3 + config().max_queue as u64 + 3);
    assert_eq!(account.ended_as(Outcome::Failed), account.accepted);
}

#[test]
fn a_stopped_engine_answers_through_the_hub() {
    let (engine, hub) = (start(config(), Script::default()), Hub::start());
    let handle = engine.handle();
    drop(engine);
    let id = submit(&handle, &hub, spec(&prompt(3, 1), 3));
    assert_eq!(&*engine_failure(hub.end(id).end), "it was stopped");
    assert!(handle.drain(Duration::from_secs(1)).blocking_recv().is_err());
}

#[test]
fn a_drain_lets_live_requests_finish_and_refuses_new_ones() {
    for completion in BOTH {
        let script = Script { completion, step_time: Duration::from_millis(1), ..Script::default() };
        let mut config = config();
        config.max_batch = 1;
        let (engine, hub) = (start(config, script), Hub::start());
        let handle = engine.handle();
        let (resident, waiting) =
            (submit(&handle, &hub, spec(&prompt(8, 1), 40)), submit(&handle, &hub, spec(&prompt(8, 2), 10)));
        hub.tokens(resident, 1);
        let drained = handle.drain(Duration::from_secs(20));
        let refused = submit(&handle, &hub, spec(&prompt(8, 3), 10));
        assert_eq!(hub.end(refused).end, Some(SessionEnd::Failed(SessionFailure::Draining)));
        drained.blocking_recv().expect("drained");
        assert_eq!(handle.snapshot().account.live(), 0, "drained means that nothing is live");
        assert_eq!((hub.end(resident).tokens.len(), hub.end(waiting).tokens.len()), (40, 10));
        let account = handle.snapshot().account.clone();
        assert_eq!((account.accepted, account.ended_as(Outcome::Finished), account.refused_draining), (2, 2, 1));
    }
}

#[test]
fn the_drains_deadline_fails_what_is_left_and_then_completes() {
    let script = Script { step_time: Duration::from_millis(2), ..Script::default() };
    let mut config = config();
    config.max_batch = 1;
    let (engine, hub) = (start(config, script), Hub::start());
    let handle = engine.handle();
    let ids = [submit(&handle, &hub, spec(&prompt(8, 1), 10_000)), submit(&handle, &hub, spec(&prompt(8, 2), 10))];
    hub.tokens(ids[0], 2);
    handle.drain(Duration::from_millis(50)).blocking_recv().expect("drained");
    for id in ids {
        assert_eq!(hub.end(id).end, Some(SessionEnd::Failed(SessionFailure::DrainDeadline)));
    }
    settle(&handle);
    assert_eq!(handle.snapshot().account.ended_as(Outcome::Failed), 2);
}

#[test]
fn an_idle_engine_drains_at_once() {
    let engine = start(config(), Script::default());
    engine.handle().drain(Duration::from_secs(20)).blocking_recv().expect("drained");
}

#[test]
fn a_drain_completes_when_the_engine_dies_meanwhile() {
    let script = Script { fault: at_step(9, Fault::Hang), ..Script::default() };
    let mut config = config();
    config.step_timeout = Duration::from_millis(100);
    let (engine, hub) = (start(config, script), Hub::start());
    let id = submit(&engine.handle(), &hub, spec(&prompt(8, 1), 1_000));
    engine.handle().drain(Duration::from_secs(20)).blocking_recv().expect("drained");
    engine_failure(hub.end(id).end);
}

#[test]
fn a_batch_with_more_rows_than_the_backend_has_log_probabilities_for_is_refused_at_the_start() {
    let mut config = config();
    config.max_batch = 8;
    let refused = Engine::start(config, engine_support::fake::factory(Script { logit_rows: 8, ..Script::default() }));
    assert!(refused.err().is_some_and(|e| e.to_string().contains("logits of 8 rows a step")));
}

#[test]
fn the_account_starts_with_what_the_backend_counted_at_its_start_and_follows_every_step() {
    let (engine, hub) = (start(config(), Script::default()), Hub::start());
    let counts = |engine: &Engine| engine.handle().snapshot().account.steps.device;
    assert_eq!(counts(&engine), engine_support::fake::counted(0));
    hub.end(submit(&engine.handle(), &hub, spec(&prompt(20, 1), 12)));
    settle(&engine.handle());
    assert_eq!(counts(&engine), engine_support::fake::counted(12));
}

#[test]
fn an_engine_that_cannot_start_says_why() {
    let unavailable = Engine::start(
        config(),
        Box::new(|| Err(BackendError::Unavailable { backend: "fake", reason: "no memory".into() })),
    );
    assert!(matches!(unavailable, Err(EngineError::Backend(BackendError::Unavailable { .. }))));
    let panics = Engine::start(config(), Box::new(|| panic!("scripted panic of the factory")));
    assert!(panics.err().is_some_and(|e| e.to_string().contains("scripted panic of the factory")));
    let mut wide = config();
    wide.max_batch = 17;
    let mismatch = Engine::start(wide, engine_support::fake::factory(Script::default()));
    assert!(mismatch.err().is_some_and(|e| e.to_string().contains("limits.max_batch is 17")));
    let mut nowhere = config();
    nowhere.pin = Some(1000);
    let mismatch = Engine::start(nowhere, engine_support::fake::factory(Script::default()));
    assert!(mismatch.err().is_some_and(|e| e.to_string().contains("executor.pin is 1000")));
}

#[test]
fn a_pinned_engine_serves() {
    let mut config = config();
    config.pin = Some(0);
    let (engine, hub) = (start(config, Script::default()), Hub::start());
    let id = submit(&engine.handle(), &hub, spec(&prompt(20, 1), 12));
    assert_eq!(hub.end(id).ids(), expected(&prompt(20, 1), 12));
}

#[test]
fn dropping_an_engine_at_work_joins_its_thread() {
    for completion in BOTH {
        let script = Script { completion, step_time: Duration::from_millis(1), ..Script::default() };
        let (engine, hub) = (start(config(), script.clone()), Hub::start());
        let id = submit(&engine.handle(), &hub, spec(&prompt(8, 1), 10_000));
        hub.tokens(id, 3);
        drop(engine);
        let polls = script.polls.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(script.polls.load(Ordering::Relaxed), polls, "nobody is left to poll");
    }
}

#[test]
fn the_step_trace_names_every_slice_and_every_decode_row() {
    let path = std::env::temp_dir().join(format!("crucible-trace-{}.jsonl", std::process::id()));
    let mut config = config();
    (config.step_trace, config.token_budget) = (Some(path.clone()), 16);
    let (engine, hub) = (start(config, Script::default()), Hub::start());
    let id = submit(&engine.handle(), &hub, spec(&prompt(40, 1), 4));
    hub.end(id);
    settle(&engine.handle());
    drop(engine);
    let text = std::fs::read_to_string(&path).expect("the trace");
    std::fs::remove_file(&path).expect("the trace is ours");
    let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let slices: Vec<_> = lines.iter().flat_map(|l| l["slices"].as_array().cloned().unwrap_or_default()).collect();
    let spans: Vec<_> = slices.iter().map(|s| (s["start"].as_u64().unwrap(), s["length"].as_u64().unwrap())).collect();
    assert_eq!(spans, [(0, 16), (16, 16), (32, 8)]);
    assert!(slices.iter().all(|s| s["request"] == id.0 && s["dialect"] == "internal"));
    assert_eq!(lines.iter().map(|l| l["decode_rows"].as_u64().unwrap()).sum::<u64>(), 3);
    assert!(lines.iter().all(|l| l["dropped"] == 0 && l["prepare_us"].as_f64().unwrap() >= 0.0));
}
