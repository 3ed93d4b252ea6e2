//! Scored prompts: their slices, and the credits for the logits that the host holds of them.

use super::*;

/// A planner with room for `scored_positions` rows of logits and these residents, ids from 1.
fn with_specs(scored_positions: usize, specs: impl IntoIterator<Item = RequestSpec>) -> Planner {
    let config = PlannerConfig { scored_positions, token_budget: 400, ..config() };
    let (mut planner, mut pool) = (Planner::new(config), Pool::new(LIMITS.pages));
    for (id, spec) in (1..).zip(specs) {
        let sequence = sequence_of(id, spec);
        let lease = lease(&mut pool, &sequence);
        planner.enqueue(sequence, lease);
    }
    planner
}

fn scored(prompt: usize, max_new_tokens: usize) -> RequestSpec {
    RequestSpec { score_prompt: true, ..spec(0, prompt, max_new_tokens) }
}

/// (request, positions) of the rows whose logits the scorer gets.
fn scores(planned: &PlannedStep) -> Vec<(u64, u32)> {
    let rows = planned.step.rows.iter().filter(|r| r.want == Want::All);
    rows.map(|r| (r.request.0, r.len)).collect()
}

/// A step whose logits went to the scorer and whose other rows have a token each, but for slices that do not end their prompt.
fn digested(planned: &PlannedStep) -> Retired {
    let of = |want| planned.step.rows.iter().filter(move |r| r.want == want).map(|r| r.request.0);
    let scoring = of(Want::All).map(RequestId).collect();
    Retired { scoring, ..retired(planned.step.id, &of(Want::Last).collect::<Vec<_>>()) }
}

#[test]
fn a_scored_prompt_yields_its_logits_in_bounded_slices_and_selects_from_its_last_position_alone() {
    let mut planner = with_specs(64, [scored(70, 2)]);
    for (step, (start, len, want, logits)) in (1..).zip([
        (0, 32, Want::All, HostLogits::Yes),
        (32, 32, Want::All, HostLogits::Yes),
        (64, 5, Want::All, HostLogits::Yes),
        (69, 1, Want::Last, HostLogits::No),
    ]) {
        let planned = planner.plan().expect("a slice");
        let row = &planned.step.rows[0];
        assert_eq!((row.start, row.len, row.want, row.host_logits), (Start::Host(start), len, want, logits));
        assert_eq!(row.sampling.token_index, 0, "no token is drawn before the last position");
        planner.retire(&retired(step, if want == Want::Last { &[1] } else { &[] }));
    }
    assert_eq!(planner.plan().expect("a decode row").step.rows[0].start, Start::Device);
}

#[test]
fn only_the_position_whose_token_is_kept_selects_by_the_rule_of_the_request() {
    let rule = Rule::Sampled { inv_temperature: 0.5, top_k: None, top_p: 1 << 31, min_p: 0.1 };
    let mut planner = with_specs(64, [RequestSpec { rule, ..scored(40, 2) }, RequestSpec { rule, ..spec(2, 40, 2) }]);
    let mut seen = Vec::new();
    for step in 1..=4 {
        let planned = planner.plan().expect("a step");
        seen.extend(planned.step.rows.iter().map(|r| (r.request.0, r.want, r.sampling.rule)));
        let tokens: Vec<_> = planned.step.rows.iter().filter(|r| r.want == Want::Last).map(|r| r.request.0).collect();
        planner.retire(&retired(step, &tokens));
    }
    let of = |id: u64| seen.iter().filter(|s| s.0 == id).map(|s| (s.1, s.2)).collect::<Vec<_>>();
    assert_eq!(of(1), [(Want::All, Rule::Greedy), (Want::All, Rule::Greedy), (Want::Last, rule), (Want::Last, rule)]);
    assert_eq!(of(2), [(Want::Last, rule); 2]);
}

#[test]
fn scored_prompts_share_the_positions_whose_logits_the_host_has_room_for() {
    let mut planner = with_specs(40, [scored(60, 2), scored(60, 2), scored(60, 2), spec(4, 60, 2)]);
    let mut slices = Vec::new();
    for step in 1..20 {
        let Some(planned) = planner.plan() else { break };
        let scored: u32 = planned.step.rows.iter().filter(|r| r.want == Want::All).map(|r| r.len).sum();
        assert!(scored <= 40, "step {step} scores {scored} positions");
        let of = |row: &Row| (row.request.0, row.len);
        slices.push(planned.step.rows.iter().filter(|r| r.start != Start::Device).map(of).collect::<Vec<_>>());
        planner.retire(&retired(step, &[]));
    }
    assert_eq!(slices[0], [(1, 32), (2, 8), (4, 60)], "who has no room waits, who needs none does not");
    let computed = |id: u64| slices.iter().flatten().filter(|s| s.0 == id).map(|s| s.1).sum::<u32>();
    assert_eq!([1, 2, 3, 4].map(computed), [60; 4]);
}

#[test]
fn a_scorer_that_never_answers_holds_no_more_logits_than_there_is_room_for_and_stops_nobody_else() {
    let mut planner = with_specs(40, [scored(60, 2), scored(60, 2), scored(60, 2), spec(4, 60, 9), spec(5, 300, 9)]);
    let (mut waiting, mut gone) = (0, Vec::new());
    for _ in 0..40 {
        let Some(planned) = planner.plan() else { break };
        waiting += scores(&planned).iter().map(|s| s.1).sum::<u32>();
        assert!(waiting <= 40 && planner.unscored() == waiting as usize, "{waiting} rows of logits");
        let mut retired = digested(&planned);
        let ends = |row: &&Row| row.request.0 > 3 && row.want == Want::Last && row.sampling.token_index == 8;
        retired.ended = planned.step.rows.iter().filter(ends).map(|r| (r.request, RowEnd::Length)).collect();
        planner.retire(&retired);
        gone.extend(planner.depart().iter().map(|d| (d.request.0, d.ended.generated)));
    }
    gone.sort_unstable();
    assert_eq!((waiting, gone), (40, vec![(4, 9), (5, 9)]), "the scored prompts wait, the others have their answers");
    assert!(planner.plan().is_none());
    planner.scored(RequestId(1), 32);
    assert_eq!(scores(&planner.plan().unwrap()), [(3, 32)], "who had no room is the first to have it");
}

#[test]
fn without_packing_a_prompt_that_is_being_scored_lets_others_pass() {
    let config = PlannerConfig { max_requests: 1, ..config() };
    let (mut planner, mut pool) = (Planner::new(config), Pool::new(LIMITS.pages));
    for sequence in [sequence_of(1, scored(60, 2)), sequence(2, 20, 2)] {
        let lease = lease(&mut pool, &sequence);
        planner.enqueue(sequence, lease);
    }
    let first = planner.plan().unwrap();
    planner.retire(&digested(&first));
    assert_eq!(shape(&planner.plan().unwrap()).0, [(2, 0, 20)]);
}

#[test]
fn a_prompt_goes_on_only_when_its_last_slice_is_scored() {
    let mut planner = with_specs(64, [scored(40, 3)]);
    for (start, len) in [(0, 32), (32, 7)] {
        let planned = planner.plan().unwrap();
        assert_eq!(shape(&planned).0, [(1, start, len)]);
        assert!(planner.plan().is_none(), "its logits are not there yet");
        planner.retire(&digested(&planned));
        assert!(planner.plan().is_none(), "its logits are there and not scored");
        planner.scored(RequestId(1), len);
    }
    assert_eq!(shape(&planner.plan().unwrap()).0, [(1, 39, 1)], "the first token comes after every score");
    assert_eq!(planner.unscored(), 0);
}

#[test]
fn a_cancelled_request_keeps_its_credits_until_its_logits_are_scored_and_gives_them_back_once() {
    let mut planner = with_specs(64, [scored(60, 2), scored(60, 2), scored(60, 2)]);
    let planned = planner.plan().unwrap();
    assert_eq!(scores(&planned), [(1, 32), (2, 32)]);
    planner.cancel(RequestId(1), Cause::Client);
    planner.retire(&digested(&planned));
    assert_eq!(planner.depart().len(), 1, "its pages do not wait for the scorer");
    assert_eq!(planner.unscored(), 64, "its logits are still there");
    assert!(planner.plan().is_none());
    planner.scored(RequestId(1), 32);
    assert_eq!(planner.unscored(), 32);
    let planned = planner.plan().unwrap();
    assert_eq!(scores(&planned), [(3, 32)]);
    planner.cancel(RequestId(2), Cause::DrainDeadline);
    planner.scored(RequestId(2), 32);
    assert_eq!((planner.depart().len(), planner.unscored()), (1, 32));
    // The sampler knows of no such sequence any more: nothing goes to the scorer.
    planner.cancel(RequestId(3), Cause::Client);
    planner.retire(&retired(planned.step.id, &[]));
    assert_eq!((planner.depart().len(), planner.residents(), planner.unscored()), (1, 0, 0));
}

#[test]
fn a_slice_with_a_logit_that_is_not_finite_is_never_scored_and_gives_its_credits_back() {
    let mut planner = with_specs(64, [scored(60, 2)]);
    let planned = planner.plan().unwrap();
    let ended = vec![(RequestId(1), RowEnd::NonFinite)];
    planner.retire(&Retired { ended, ..retired(planned.step.id, &[]) });
    assert_eq!((planner.depart()[0].ended.outcome, planner.unscored()), (Outcome::Failed, 0));
}

#[test]
fn a_dead_planner_holds_no_credits_and_hears_of_late_scores_without_harm() {
    let mut planner = with_specs(64, [scored(60, 2), scored(60, 2)]);
    let planned = planner.plan().unwrap();
    planner.retire(&digested(&planned));
    planner.scored(RequestId(1), 32);
    planner.plan().unwrap();
    planner.fail();
    assert_eq!((planner.depart().len(), planner.unscored()), (2, 0));
    planner.scored(RequestId(2), 32);
    assert!(planner.plan().is_none());
}
