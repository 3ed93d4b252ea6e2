//! The planner by example, and against a naive model that knows every sequence's place.

mod history;
mod scores;

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::admission::{Dialect, Ended, Limits, Outcome, RequestId, RequestSpec, ValidRequest};
use crate::backend::{DeviceCounts, HostLogits, Input, Row, Rule, Start, StepTiming, Want};
use crate::pages::{PageHome, PageLease, Pool};

const LIMITS: Limits =
    Limits { context: 4096, max_prompt_tokens: 4096, max_new_tokens: 4096, vocab: 100, pages: 512, page_tokens: 16 };

fn config() -> PlannerConfig {
    PlannerConfig {
        slots: 8,
        token_budget: 64,
        step_time_target: None,
        chunk_cap: usize::MAX,
        max_requests: 8,
        max_step_tokens: 1024,
        scored_positions: 64,
    }
}

fn sequence(id: u64, prompt: usize, max_new_tokens: usize) -> Sequence {
    sequence_of(id, spec(id, prompt, max_new_tokens))
}

fn sequence_of(id: u64, spec: RequestSpec) -> Sequence {
    let request = ValidRequest::new(RequestId(id), spec, &LIMITS).unwrap();
    Sequence { request, submitted: Duration::ZERO, resident: Duration::ZERO }
}

fn spec(id: u64, prompt: usize, max_new_tokens: usize) -> RequestSpec {
    RequestSpec {
        prompt: (0..prompt as u32).map(|p| p % 100).collect(),
        max_new_tokens,
        rule: Rule::Greedy,
        adjust: None,
        seed: id,
        choice: 0,
        eos: Arc::from([]),
        logprobs: None,
        score_prompt: false,
        dialect: Dialect::Native,
    }
}

fn lease(pool: &mut Pool, sequence: &Sequence) -> PageLease {
    let home: PageHome = Arc::new(|_| {});
    pool.reserve(sequence.request.id(), sequence.request.pages(), home).unwrap()
}

/// A planner with these prompts resident; ids from 1.
fn with_prompts(config: PlannerConfig, prompts: &[usize], max_new_tokens: usize) -> Planner {
    let (mut planner, mut pool) = (Planner::new(config), Pool::new(LIMITS.pages));
    for (id, &prompt) in (1..).zip(prompts) {
        let sequence = sequence(id, prompt, max_new_tokens);
        let lease = lease(&mut pool, &sequence);
        planner.enqueue(sequence, lease);
    }
    planner
}

/// (request, start, length) of the slices, and the requests of the decode rows.
fn shape(planned: &PlannedStep) -> (Vec<(u64, u32, u32)>, Vec<u64>) {
    let slice = |row: &Row| match row.start {
        Start::Host(start) => Some((row.request.0, start, row.len)),
        Start::Device => None,
    };
    let rows = &planned.step.rows;
    let decodes = rows.iter().filter(|r| r.start == Start::Device).map(|r| r.request.0).collect();
    (rows.iter().filter_map(slice).collect(), decodes)
}

/// One token for each of these requests, in step `step`.
fn retired(step: u64, progressed: &[u64]) -> Retired {
    let progressed = progressed.iter().map(|&id| (RequestId(id), 1)).collect();
    Retired { step, progressed, ended: Vec::new(), scoring: Vec::new(), timing: StepTiming::default() }
}

#[test]
fn a_burst_is_packed_up_to_the_budget_and_the_rest_goes_first_next_time() {
    let mut planner = with_prompts(config(), &[20, 30, 40], 4);
    assert_eq!(shape(&planner.plan().unwrap()), (vec![(1, 0, 20), (2, 0, 30), (3, 0, 14)], vec![]));
    planner.retire(&retired(1, &[1, 2]));
    assert_eq!(shape(&planner.plan().unwrap()), (vec![(3, 14, 26)], vec![1, 2]));
}

#[test]
fn unfinished_contributors_go_to_the_back() {
    let config = PlannerConfig { chunk_cap: 16, max_requests: 2, ..config() };
    let mut planner = with_prompts(config, &[40, 40, 40], 4);
    let mut seen = Vec::new();
    for step in 1..=3 {
        seen.push(shape(&planner.plan().unwrap()).0);
        planner.retire(&retired(step, &[]));
    }
    assert_eq!(seen[0], [(1, 0, 16), (2, 0, 16)]);
    assert_eq!(seen[1], [(3, 0, 16), (1, 16, 16)]);
    assert_eq!(seen[2], [(2, 16, 16), (3, 16, 16)]);
}

#[test]
fn without_packing_a_plan_has_one_prompt() {
    let mut planner = with_prompts(PlannerConfig { max_requests: 1, ..config() }, &[8, 8], 4);
    assert_eq!(shape(&planner.plan().unwrap()).0, [(1, 0, 8)]);
    assert_eq!(shape(&planner.plan().unwrap()), (vec![(2, 0, 8)], vec![1]));
}

#[test]
fn a_step_over_its_target_makes_the_next_plan_shorter() {
    let target = Some(Duration::from_micros(1_000));
    let config = PlannerConfig { token_budget: 400, step_time_target: target, ..config() };
    let mut planner = with_prompts(config, &[2_000], 4);
    assert_eq!(shape(&planner.plan().unwrap()).0, [(1, 0, 400)]);
    let took =
        |step, device_us| Retired { timing: StepTiming { device_us, ..StepTiming::default() }, ..retired(step, &[]) };
    assert_eq!(shape(&planner.plan().unwrap()).0, [(1, 400, 400)], "a full plan may look ahead");
    planner.retire(&took(1, 4_000.0));
    assert_eq!(planner.counters().prefill_budget_tokens, 100);
    assert_eq!(shape(&planner.plan().unwrap()).0, [(1, 800, 100)]);
    planner.retire(&took(2, 4_000.0));
    planner.retire(&took(3, 100.0));
    assert_eq!(shape(&planner.plan().unwrap()).0, [(1, 900, 113)], "a quick one lets it grow");
}

#[test]
fn the_first_decode_row_may_be_planned_before_its_prefill_is_known() {
    let mut planner = with_prompts(PlannerConfig { max_requests: 1, ..config() }, &[8, 8], 4);
    let first = planner.plan().unwrap();
    assert_eq!((first.step.rows[0].want, first.step.rows[0].sampling.token_index), (Want::Last, 0));
    let second = planner.plan().unwrap();
    let decode = &second.step.rows[0];
    assert_eq!((decode.start, decode.input, decode.len), (Start::Device, Input::DeviceLast, 1));
    assert_eq!(decode.sampling.token_index, 1);
    assert!(planner.plan().is_none(), "two steps in flight are enough");
}

#[test]
fn a_prefill_in_flight_holds_the_look_ahead_back_for_later_arrivals() {
    let (mut planner, mut pool) = (Planner::new(config()), Pool::new(LIMITS.pages));
    for id in 1..=3 {
        let sequence = sequence(id, 10, 4);
        let lease = lease(&mut pool, &sequence);
        planner.enqueue(sequence, lease);
        assert_eq!(planner.plan().is_some(), id == 1);
    }
    planner.retire(&retired(1, &[1]));
    assert_eq!(shape(&planner.plan().unwrap()), (vec![(2, 0, 10), (3, 0, 10)], vec![1]));
}

#[test]
fn decode_steps_look_ahead_at_once() {
    let mut planner = with_prompts(config(), &[10], 9);
    planner.plan().unwrap();
    planner.retire(&retired(1, &[1]));
    assert!(planner.plan().is_some() && planner.plan().is_some() && planner.plan().is_none());
}

#[test]
fn no_plan_goes_past_the_known_length_end() {
    let mut planner = with_prompts(config(), &[10], 3);
    planner.plan().unwrap();
    planner.retire(&retired(1, &[1]));
    assert!(planner.plan().is_some() && planner.plan().is_some());
    planner.retire(&retired(2, &[1]));
    assert!(planner.plan().is_none(), "three tokens are planned");
    let ended = vec![(RequestId(1), RowEnd::Length)];
    planner.retire(&Retired { ended, ..retired(3, &[1]) });
    let ended = Ended { outcome: Outcome::Finished, generated: 3 };
    assert_eq!(planner.depart(), [Departure { request: RequestId(1), ended }]);
    assert_eq!((planner.residents(), planner.depart()), (0, vec![]));
}

#[test]
fn a_cancelled_sequence_enters_no_plan_and_leaves_when_its_steps_are_done() {
    let mut planner = with_prompts(config(), &[10, 10], 9);
    planner.plan().unwrap();
    planner.retire(&retired(1, &[1, 2]));
    planner.plan().unwrap();
    planner.plan().unwrap();
    planner.cancel(RequestId(1), Cause::Client);
    assert!(planner.depart().is_empty(), "two steps still read and write its pages");
    planner.retire(&retired(2, &[1, 2]));
    assert_eq!(shape(&planner.plan().unwrap()), (vec![], vec![2]));
    assert!(planner.depart().is_empty());
    planner.retire(&retired(3, &[1, 2]));
    let ended = Ended { outcome: Outcome::Cancelled, generated: 1 };
    assert_eq!(planner.depart(), [Departure { request: RequestId(1), ended }]);
}

#[test]
fn the_first_end_wins() {
    let mut planner = with_prompts(config(), &[10], 9);
    planner.plan().unwrap();
    planner.retire(&retired(1, &[1]));
    planner.plan().unwrap();
    planner.cancel(RequestId(1), Cause::Stop { token_index: 0 });
    planner.cancel(RequestId(1), Cause::Client);
    planner.cancel(RequestId(1), Cause::DrainDeadline);
    planner.retire(&Retired { ended: vec![(RequestId(1), RowEnd::NonFinite)], ..retired(2, &[]) });
    let ended = Ended { outcome: Outcome::Finished, generated: 1 };
    assert_eq!(planner.depart(), [Departure { request: RequestId(1), ended }]);
}

#[test]
fn an_overrun_after_an_end_of_sequence_token_is_discarded() {
    let mut planner = with_prompts(config(), &[10], 9);
    planner.plan().unwrap();
    planner.retire(&retired(1, &[1]));
    planner.plan().unwrap();
    planner.plan().unwrap();
    planner.retire(&Retired { ended: vec![(RequestId(1), RowEnd::Eos)], ..retired(2, &[1]) });
    assert!(planner.plan().is_none() && planner.depart().is_empty());
    planner.retire(&retired(3, &[]));
    assert_eq!(planner.depart()[0].ended, Ended { outcome: Outcome::Finished, generated: 2 });
}

#[test]
fn a_page_table_travels_once_and_before_the_first_row() {
    let mut planner = with_prompts(PlannerConfig { token_budget: 8, ..config() }, &[20], 2);
    let first = planner.plan().unwrap().step;
    assert_eq!((first.bindings.len(), first.bindings[0].pages.len()), (1, 2));
    assert_eq!((first.bindings[0].slot, first.bindings[0].request), (first.rows[0].slot, RequestId(1)));
    assert!(planner.plan().unwrap().step.bindings.is_empty());
}

#[test]
fn decode_rows_come_out_of_the_step_before_prompt_tokens() {
    let mut planner = with_prompts(PlannerConfig { max_step_tokens: 9, ..config() }, &[3, 3, 100], 9);
    assert_eq!(shape(&planner.plan().unwrap()).0, [(1, 0, 3), (2, 0, 3), (3, 0, 3)]);
    planner.retire(&retired(1, &[1, 2]));
    assert_eq!(shape(&planner.plan().unwrap()), (vec![(3, 3, 7)], vec![1, 2]));
}

#[test]
fn a_dead_planner_lets_everybody_go_as_failed_and_plans_nothing() {
    let mut planner = with_prompts(config(), &[10, 10], 9);
    planner.plan().unwrap();
    planner.cancel(RequestId(2), Cause::Client);
    planner.fail();
    let outcomes: Vec<_> = planner.depart().iter().map(|d| d.ended.outcome).collect();
    assert_eq!(outcomes, [Outcome::Failed, Outcome::Cancelled]);
    assert!(planner.plan().is_none());
    let late = sequence(3, 4, 4);
    let lease = lease(&mut Pool::new(8), &late);
    planner.enqueue(late, lease);
    assert!(planner.plan().is_none());
    assert_eq!((planner.depart().len(), planner.residents()), (1, 0));
}

#[test]
fn counters_tell_batches_slices_and_final_rows_apart() {
    let mut planner = with_prompts(config(), &[20, 30, 40], 2);
    for (step, tokens) in [(1, &[1, 2][..]), (2, &[1, 2, 3]), (3, &[3])] {
        planner.plan().unwrap();
        let counts = DeviceCounts { allocations: 40 + step, ..DeviceCounts::default() };
        let timing = StepTiming { download_bytes: 12, upload_bytes: 98 + step, counts, ..StepTiming::default() };
        planner.retire(&Retired { timing, ..retired(step, tokens) });
    }
    let c = planner.counters();
    assert_eq!((c.prefill_batches, c.packed_prefill_batches, c.prefill_chunks, c.prefill_requests), (2, 1, 4, 4));
    assert_eq!((c.prefill_tokens, c.packed_prefill_tokens, c.max_prefill_batch_tokens), (90, 64, 64));
    assert_eq!((c.last_prefill_batch_tokens, c.last_prefill_batch_requests, c.last_prefill_chunk_tokens), (26, 1, 26));
    assert_eq!((c.prefill_final_rows, c.prefill_d2h_bytes, c.d2h_bytes, c.h2d_bytes), (3, 12, 36, 300));
    assert_eq!((c.last_step_d2h_bytes, c.last_step_h2d_bytes, c.device.allocations), (12, 101, 43));
    assert_eq!((c.decode_steps, c.decode_rows, c.last_batch_size, c.decode_batch_peak), (2, 3, 1, 2));
    let up_to =
        |sizes: crate::admission::account::SizeCounts, bound| sizes.cumulative().find(|s| s.0 == bound).map(|s| s.1);
    assert_eq!((up_to(c.decode_sizes, 1.0), up_to(c.decode_sizes, 2.0)), (Some(1), Some(2)));
    assert_eq!((up_to(c.prefill_sizes, 32.0), up_to(c.prefill_sizes, 64.0)), (Some(1), Some(2)));
}
