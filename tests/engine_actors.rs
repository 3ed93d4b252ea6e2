//! The five actors over a scripted backend: tokens, ends, credits and refusals as the sessions see them.

mod engine_support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crucible::actors::session::messages::{SessionEnd, SessionFailure};
use crucible::admission::{Outcome, RequestSpec};
use crucible::arith::select::token_logprobs;
use crucible::backend::{Completion, TokenLogprobs, Want};

use engine_support::fake::{Script, expected, logits, next_token};
use engine_support::probe::Hub;
use engine_support::{config, eventually, prompt, scored, settle, spec, start, submit, try_submit};

const BOTH: [Completion; 2] = [Completion::Notified, Completion::Polled];

fn script(completion: Completion) -> Script {
    Script { completion, ..Script::default() }
}

#[test]
fn one_request_gets_the_tokens_of_its_own_history() {
    for completion in BOTH {
        let (engine, hub) = (start(config(), script(completion)), Hub::start());
        let prompt = prompt(37, 1);
        let id = submit(&engine.handle(), &hub, spec(&prompt, 12));
        let got = hub.end(id);
        assert_eq!((got.ids(), got.end), (expected(&prompt, 12), Some(SessionEnd::Length)));
        settle(&engine.handle());
    }
}

#[test]
fn a_sequence_in_a_crowd_gets_the_tokens_that_it_gets_alone() {
    for completion in BOTH {
        for (budget, cap, packing) in [(1024, None, true), (16, None, true), (64, Some(7), true), (64, None, false)] {
            let mut config = config();
            (config.token_budget, config.chunk_cap, config.packing) = (budget, cap, packing);
            let (engine, hub) = (start(config, script(completion)), Hub::start());
            let handle = engine.handle();
            let prompts: Vec<_> = (0..40).map(|i| prompt(1 + (i as usize * 13) % 90, i)).collect();
            let ids: Vec<_> = prompts.iter().map(|p| submit(&handle, &hub, spec(p, 1 + p.len() % 20))).collect();
            for (prompt, id) in prompts.iter().zip(ids) {
                assert_eq!(hub.end(id).ids(), expected(prompt, 1 + prompt.len() % 20));
            }
            settle(&handle);
            let account = handle.snapshot().account.clone();
            let prompt_tokens: u64 = prompts.iter().map(|p| p.len() as u64).sum();
            assert_eq!((account.ended_as(Outcome::Finished), account.prompt_tokens), (40, prompt_tokens));
            assert_eq!(account.steps.prefill_tokens, prompt_tokens);
            assert!(account.steps.max_prefill_batch_tokens as usize <= budget);
            assert_eq!(account.steps.packed_prefill_batches > 0, packing);
            assert_eq!(account.steps.prefill_final_rows, 40);
        }
    }
}

#[test]
fn an_end_of_sequence_token_ends_the_text_and_its_overrun_is_never_seen() {
    let (engine, hub) = (start(config(), Script::default()), Hub::start());
    let prompt = prompt(5, 3);
    let text = expected(&prompt, 9);
    let request = RequestSpec { eos: Arc::from([text[8]]), ..spec(&prompt, 100) };
    let first = text.iter().position(|t| *t == text[8]).unwrap();
    let got = hub.end(submit(&engine.handle(), &hub, request));
    assert_eq!((got.ids(), got.end), (text[..=first].to_vec(), Some(SessionEnd::Eos)));
    settle(&engine.handle());
    assert_eq!(engine.handle().snapshot().account.generated_tokens, first as u64 + 1);
}

#[test]
fn a_stop_hit_in_flight_ends_as_finished_and_counts_up_to_its_token() {
    let script = Script { step_time: Duration::from_millis(1), ..Script::default() };
    let (engine, hub) = (start(config(), script), Hub::start());
    let handle = engine.handle();
    let id = submit(&handle, &hub, spec(&prompt(5, 4), 5_000));
    hub.tokens(id, 8);
    handle.stop_hit(id, 3);
    handle.stop_hit(id, 1);
    handle.cancel(id);
    settle(&handle);
    let published = handle.take_published();
    let account = &published.snapshot.account;
    assert_eq!((account.ended_as(Outcome::Finished), account.generated_tokens), (1, 4), "the first end wins");
    assert_eq!((published.samples[0].generated_tokens, published.samples[0].gaps_us.len()), (4, 3));
}

#[test]
fn a_cancel_at_every_boundary_gives_every_page_back_and_moves_no_neighbour() {
    for completion in BOTH {
        let script = Script { step_time: Duration::from_micros(300), ..script(completion) };
        let mut config = config();
        config.token_budget = 32;
        let (engine, hub) = (start(config, script), Hub::start());
        let handle = engine.handle();
        let neighbour_prompt = prompt(20, 9);
        for boundary in 0..10 {
            let neighbour = submit(&handle, &hub, spec(&neighbour_prompt, 24));
            let id = submit(&handle, &hub, spec(&prompt(100, boundary), 10_000));
            hub.tokens(id, boundary.saturating_sub(4) as usize);
            std::thread::sleep(Duration::from_micros(u64::from(boundary.min(4)) * 300));
            handle.cancel(id);
            assert_eq!(hub.end(neighbour).ids(), expected(&neighbour_prompt, 24));
            settle(&handle);
        }
        let account = handle.snapshot().account.clone();
        assert_eq!((account.ended_as(Outcome::Cancelled), account.ended_as(Outcome::Finished)), (10, 10));
    }
}

#[test]
fn a_cancelled_waiting_request_never_becomes_resident() {
    let held = Script { slots: 1, ..Script::default() };
    held.hold.store(true, Ordering::Release);
    let (hold, seen) = (Arc::clone(&held.hold), Arc::clone(&held.seen));
    let mut config = config();
    config.max_batch = 1;
    let (engine, hub) = (start(config, held), Hub::start());
    let handle = engine.handle();
    let first = submit(&handle, &hub, spec(&prompt(4, 1), 3));
    let second = submit(&handle, &hub, spec(&prompt(4, 2), 3));
    handle.cancel(second);
    hold.store(false, Ordering::Release);
    hub.end(first);
    settle(&handle);
    assert_eq!(handle.permits().held(), 0);
    assert!(seen.lock().unwrap().iter().flat_map(|s| &s.rows).all(|row| row.request == first));
    assert_eq!(handle.snapshot().account.ended_as(Outcome::Cancelled), 1);
}

#[test]
fn the_queue_never_exceeds_its_bound_and_pages_admit_in_order() {
    let script = Script { pages: 32, step_time: Duration::from_micros(200), ..Script::default() };
    script.hold.store(true, Ordering::Release);
    let hold = Arc::clone(&script.hold);
    let mut config = config();
    config.max_queue = 4;
    let (engine, hub) = (start(config, script), Hub::start());
    let handle = engine.handle();
    let mut ids: Vec<_> = (0..3).map(|salt| submit(&handle, &hub, spec(&prompt(100, salt), 50))).collect();
    eventually("three are resident", || handle.snapshot().account.resident == 3);
    ids.extend((3..24).filter_map(|salt| try_submit(&handle, &hub, spec(&prompt(100, salt), 50))));
    // Ten pages each: three are resident, four wait, the others were refused.
    assert_eq!((ids.len(), handle.permits().refused(), handle.permits().peak()), (7, 17, 4));
    hold.store(false, Ordering::Release);
    ids.iter().for_each(|&id| assert_eq!(hub.end(id).tokens.len(), 50));
    settle(&handle);
    let account = handle.snapshot().account.clone();
    assert_eq!((account.ended_as(Outcome::Finished), account.kv_pages_peak), (7, 30));
}

#[test]
fn a_non_finite_logit_fails_its_request_and_no_other() {
    let script = Script { not_finite: Arc::new(|request, index| request.0 == 1 && index == 3), ..Script::default() };
    let (engine, hub) = (start(config(), script), Hub::start());
    let handle = engine.handle();
    let bad = submit(&handle, &hub, spec(&prompt(6, 1), 10));
    let good = submit(&handle, &hub, spec(&prompt(6, 2), 10));
    let got = hub.end(bad);
    assert_eq!((got.tokens.len(), got.end), (3, Some(SessionEnd::Failed(SessionFailure::NonFinite))));
    assert_eq!(hub.end(good).ids(), expected(&prompt(6, 2), 10));
    settle(&handle);
    let account = handle.snapshot().account.clone();
    assert_eq!((account.ended_as(Outcome::Failed), account.ended_as(Outcome::Finished)), (1, 1));
}

#[test]
fn log_probabilities_ride_with_their_tokens() {
    let (engine, hub) = (start(config(), Script::default()), Hub::start());
    let prompt = prompt(6, 8);
    let id = submit(&engine.handle(), &hub, RequestSpec { logprobs: Some(0), ..spec(&prompt, 2) });
    let first = hub.end(id).tokens[0].clone();
    assert_eq!(first.logprobs.unwrap().chosen, -f64::from(next_token(&prompt)));
}

/// The scores of a prompt on the fake model.
fn scores(prompt: &[u32]) -> Vec<TokenLogprobs> {
    (1..prompt.len()).map(|end| token_logprobs(&logits(&prompt[..end]), prompt[end], 1)).collect()
}

#[test]
fn scores_of_a_prompt_come_before_its_tokens_in_a_crowd_that_shares_few_rows_of_logits() {
    for completion in BOTH {
        // Sixteen rows are for tokens: 24 are left for positions of prompts.
        let script = Script { logit_rows: 16 + 24, ..script(completion) };
        let seen = Arc::clone(&script.seen);
        let (engine, hub) = (start(config(), script), Hub::start());
        let handle = engine.handle();
        let prompts: Vec<_> = (0..12).map(|i| prompt(1 + (i as usize * 29) % 150, i)).collect();
        let ids: Vec<_> = prompts.iter().map(|p| submit(&handle, &hub, scored(p, 5))).collect();
        let plain = submit(&handle, &hub, spec(&prompt(70, 40), 30));
        for (prompt, id) in prompts.iter().zip(ids) {
            let got = hub.end(id);
            assert_eq!((got.ids(), got.end), (expected(prompt, 5), Some(SessionEnd::Length)));
            assert_eq!(got.scores, scores(prompt));
        }
        let got = hub.end(plain);
        assert_eq!((got.ids(), got.scores.len()), (expected(&prompt(70, 40), 30), 0));
        settle(&handle);
        for step in seen.lock().unwrap().iter() {
            let rows = step.rows.iter().filter(|r| r.want == Want::All);
            assert!(rows.map(|r| r.len).sum::<u32>() <= 24, "step {}", step.id);
        }
    }
}

#[test]
fn whoever_ends_while_its_prompt_is_scored_leaves_the_room_for_logits_to_the_next() {
    let not_finite = Arc::new(|request: crucible::admission::RequestId, _| request.0.is_multiple_of(5));
    let script = Script { logit_rows: 16 + 40, not_finite, ..Script::default() };
    let seen = Arc::clone(&script.seen);
    let (engine, hub) = (start(config(), script), Hub::start());
    let handle = engine.handle();
    // Each leaves at another moment: planned, in flight, at the sampler, at the scorer. Two of them are all the room there is.
    for round in 0..60 {
        let id = submit(&handle, &hub, scored(&prompt(400, round), 3));
        let steps = seen.lock().unwrap().len();
        for _ in 0..round {
            std::thread::yield_now();
        }
        while round % 3 == 0 && handle.snapshot().account.live() > 0 && seen.lock().unwrap().len() == steps {
            std::thread::yield_now();
        }
        handle.cancel(id);
    }
    let prompt = prompt(100, 99);
    let last = (0..2).map(|_| submit(&handle, &hub, scored(&prompt, 3))).find(|id| !id.0.is_multiple_of(5));
    let got = hub.end(last.expect("of two numbers in a row"));
    assert_eq!((got.ids(), got.scores), (expected(&prompt, 3), scores(&prompt)));
    settle(&handle);
}

#[test]
fn counters_and_samples_agree_at_every_scrape() {
    let script = Script { step_time: Duration::from_micros(100), ..Script::default() };
    let (engine, hub) = (start(config(), script), Hub::start());
    let handle = engine.handle();
    let mut sampled = (0, 0);
    let mut ids = Vec::new();
    for salt in 0..60 {
        ids.push(submit(&handle, &hub, spec(&prompt(10, salt), 8)));
        if salt % 5 == 0 {
            handle.cancel(ids[ids.len() - 1]);
        }
        std::thread::sleep(Duration::from_micros(200));
        let published = handle.take_published();
        sampled.0 += published.samples.len() as u64;
        sampled.1 += published.samples.iter().map(|s| u64::from(s.generated_tokens)).sum::<u64>();
        let account = &published.snapshot.account;
        assert_eq!(account.ended_as(Outcome::Finished), sampled.0, "{account:?}");
        assert!(account.balances() && account.generated_tokens >= sampled.1);
        assert!(account.prefilling <= account.resident);
    }
    settle(&handle);
}

#[test]
fn a_hub_gets_one_message_a_step() {
    let (engine, hub) = (start(config(), Script::default()), Hub::start());
    let handle = engine.handle();
    let ids: Vec<_> = (0..8).map(|salt| submit(&handle, &hub, spec(&prompt(9, salt), 30))).collect();
    ids.iter().for_each(|&id| drop(hub.end(id)));
    settle(&handle);
    let steps = handle.snapshot().account.steps.clone();
    assert!(hub.batches() as u64 <= steps.decode_steps + steps.prefill_batches, "{} {steps:?}", hub.batches());
}

#[test]
fn a_burst_packs_into_few_prefill_batches() {
    let script = Script::default();
    script.hold.store(true, Ordering::Release);
    let (hold, seen) = (Arc::clone(&script.hold), Arc::clone(&script.seen));
    let (engine, hub) = (start(config(), script), Hub::start());
    let handle = engine.handle();
    let blocker = submit(&handle, &hub, spec(&prompt(32, 0), 4));
    eventually("its step is in flight", || seen.lock().unwrap().len() == 1);
    let ids: Vec<_> = (1..16).map(|salt| submit(&handle, &hub, spec(&prompt(32, salt), 4))).collect();
    eventually("all are resident", || handle.snapshot().account.resident == 16);
    hold.store(false, Ordering::Release);
    [blocker].iter().chain(&ids).for_each(|&id| drop(hub.end(id)));
    let steps = handle.snapshot().account.steps.clone();
    // The blocker; what had come when the second step in flight was planned; all others.
    assert!(steps.prefill_batches <= 3 && steps.packed_prefill_batches > 0, "{steps:?}");
}

#[test]
fn an_idle_engine_asks_its_backend_nothing() {
    for completion in BOTH {
        let script = script(completion);
        let polls = Arc::clone(&script.polls);
        let (engine, hub) = (start(config(), script), Hub::start());
        hub.end(submit(&engine.handle(), &hub, spec(&prompt(9, 0), 5)));
        settle(&engine.handle());
        // The last step's driver may still be on its way to sleep: the engine falls silent, and it does so by itself.
        let silent = (0..50).any(|_| {
            let before = polls.load(Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(100));
            polls.load(Ordering::Relaxed) == before
        });
        assert!(silent, "{completion:?} is still asked after five seconds");
    }
}
