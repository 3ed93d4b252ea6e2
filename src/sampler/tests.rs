//! What the sampler makes of outputs, by example.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::actors::session::messages::{SessionEnd, SessionFailure};
use crate::admission::{Dialect, Limits, RequestId, RequestSpec, ValidRequest};
use crate::backend::{RowOutput, Rule, StepOutput, StepTiming};
use crate::planner::{RowEnd, Sequence};

fn tracked(id: u64, max_new_tokens: usize, eos: &[u32], hub: char) -> (RequestId, Tracked<char>) {
    let spec = RequestSpec {
        prompt: Arc::from([1]),
        max_new_tokens,
        rule: Rule::Greedy,
        adjust: None,
        seed: 0,
        choice: 0,
        eos: Arc::from(eos),
        logprobs: None,
        score_prompt: false,
        dialect: Dialect::Native,
    };
    tracked_spec(id, spec, hub)
}

fn tracked_spec(id: u64, spec: RequestSpec, hub: char) -> (RequestId, Tracked<char>) {
    let limits =
        Limits { context: 99, max_prompt_tokens: 99, max_new_tokens: 99, vocab: 99, pages: 99, page_tokens: 16 };
    let request = ValidRequest::new(RequestId(id), spec, &limits).unwrap();
    let (submitted, resident) = (Duration::from_micros(100), Duration::from_micros(150));
    (RequestId(id), Tracked::new(&Sequence { request, submitted, resident }, hub))
}

fn sampler(all: impl IntoIterator<Item = (RequestId, Tracked<char>)>) -> Sampler<char> {
    let mut sampler = Sampler::default();
    all.into_iter().for_each(|(id, tracked)| sampler.track(id, tracked));
    sampler
}

fn row(id: u64, tokens: &[u32]) -> RowOutput {
    let (request, tokens) = (RequestId(id), tokens.to_vec());
    RowOutput { request, tokens, logprobs: Vec::new(), logits: Vec::new(), finite: true }
}

fn output(step: u64, rows: Vec<RowOutput>) -> StepOutput {
    StepOutput { step, rows, timing: StepTiming::default() }
}

fn at(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

#[test]
fn tokens_are_numbered_and_grouped_by_hub_in_row_order() {
    let mut sampler = sampler([tracked(1, 9, &[], 'a'), tracked(2, 9, &[], 'b'), tracked(3, 9, &[], 'a')]);
    sampler.digest(output(1, vec![row(1, &[10])]), at(0));
    let digest = sampler.digest(output(2, vec![row(3, &[5]), row(2, &[6]), row(1, &[7])]), at(1));
    let seen: Vec<_> = digest
        .batches
        .iter()
        .map(|(hub, entries)| {
            (*hub, entries.iter().map(|e| (e.request.0, e.tokens[0].id, e.tokens[0].index)).collect::<Vec<_>>())
        })
        .collect();
    assert_eq!(seen, [('a', vec![(3, 5, 0), (1, 7, 1)]), ('b', vec![(2, 6, 0)])]);
    assert_eq!(digest.retired.progressed, [(RequestId(3), 1), (RequestId(2), 1), (RequestId(1), 1)]);
}

#[test]
fn the_end_of_sequence_token_is_the_last_one_counted() {
    let mut sampler = sampler([tracked(1, 9, &[7, 8], 'a')]);
    let digest = sampler.digest(output(1, vec![row(1, &[3, 8, 4])]), at(0));
    let entry = &digest.batches[0].1[0];
    assert_eq!((entry.tokens.len(), entry.end.clone()), (2, Some(SessionEnd::Eos)));
    assert_eq!(
        (&digest.retired.progressed[..], &digest.retired.ended[..]),
        (&[(RequestId(1), 2)][..], &[(RequestId(1), RowEnd::Eos)][..])
    );
}

#[test]
fn an_end_of_sequence_token_at_the_length_end_is_an_end_of_sequence() {
    let mut sampler = sampler([tracked(1, 2, &[7], 'a')]);
    sampler.digest(output(1, vec![row(1, &[3])]), at(0));
    let digest = sampler.digest(output(2, vec![row(1, &[7])]), at(0));
    assert_eq!(digest.retired.ended, [(RequestId(1), RowEnd::Eos)]);
}

#[test]
fn what_comes_after_an_end_is_neither_counted_nor_sent() {
    let mut sampler = sampler([tracked(1, 1, &[], 'a')]);
    assert_eq!(sampler.digest(output(1, vec![row(1, &[3])]), at(0)).retired.ended, [(RequestId(1), RowEnd::Length)]);
    let overrun = sampler.digest(output(2, vec![row(1, &[4]), row(99, &[5])]), at(0));
    assert!(overrun.batches.is_empty() && overrun.retired.progressed.is_empty() && overrun.retired.ended.is_empty());
}

#[test]
fn a_non_finite_row_ends_as_failed_without_a_token() {
    let mut sampler = sampler([tracked(1, 9, &[], 'a')]);
    let bad = RowOutput { finite: false, ..row(1, &[3]) };
    let digest = sampler.digest(output(1, vec![bad]), at(0));
    let entry = &digest.batches[0].1[0];
    assert_eq!(entry.end, Some(SessionEnd::Failed(SessionFailure::NonFinite)));
    assert!(entry.tokens.is_empty() && digest.retired.progressed.is_empty());
    assert_eq!(digest.retired.ended, [(RequestId(1), RowEnd::NonFinite)]);
}

#[test]
fn logits_of_a_scored_prompt_go_to_the_scorer_with_the_tokens_that_they_predict_and_to_nobody_else() {
    let (id, _) = tracked(1, 9, &[], 'a');
    let spec = RequestSpec {
        prompt: Arc::from([5, 6, 7, 8]),
        max_new_tokens: 9,
        rule: Rule::Greedy,
        adjust: None,
        seed: 0,
        choice: 0,
        eos: Arc::from([]),
        logprobs: Some(2),
        score_prompt: true,
        dialect: Dialect::Native,
    };
    let mut sampler = sampler([tracked_spec(1, spec, 'a')]);
    let scoring = |positions: usize| RowOutput { logits: vec![vec![0.5; 9]; positions], ..row(1, &[3, 3]) };
    for (step, positions, targets) in [(1, 2, vec![6, 7]), (2, 1, vec![8])] {
        let digest = sampler.digest(output(step, vec![scoring(positions)]), at(step));
        assert!(digest.batches.is_empty() && digest.retired.progressed.is_empty() && digest.retired.ended.is_empty());
        assert_eq!(digest.retired.scoring, [id]);
        let slice = &digest.slices[0];
        assert_eq!((slice.request, slice.hub, slice.top, slice.positions() as usize), (id, 'a', 2, positions));
        assert_eq!(slice.targets, targets);
    }
    let digest = sampler.digest(output(3, vec![row(1, &[4])]), at(3));
    assert_eq!((digest.batches[0].1[0].tokens[0].index, digest.slices.len()), (0, 0));
    let bad = RowOutput { finite: false, ..scoring(1) };
    let digest = sampler.digest(output(4, vec![bad]), at(4));
    assert!(digest.slices.is_empty() && digest.retired.scoring.is_empty());
    assert_eq!(digest.retired.ended, [(id, RowEnd::NonFinite)]);
    assert!(sampler.digest(output(5, vec![scoring(1)]), at(5)).slices.is_empty(), "the sequence is over");
}

#[test]
fn times_count_from_submit_and_leave_the_overrun_out() {
    let mut sampler = sampler([tracked(1, 9, &[], 'a')]);
    for (step, micros) in [(1, 400), (2, 500), (3, 750), (4, 2_000)] {
        sampler.digest(output(step, vec![row(1, &[3])]), at(micros));
    }
    let timing = sampler.forget(RequestId(1), 3).unwrap();
    assert_eq!((timing.queue, timing.ttft, timing.e2e), (at(50), Some(at(300)), at(650)));
    assert_eq!(timing.gaps_us, [100.0, 250.0]);
    assert!(sampler.is_empty() && sampler.forget(RequestId(1), 3).is_none());
}
