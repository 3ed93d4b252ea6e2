//! I9: every malformed step is refused by its own error, and a refused step leaves no trace in the validator.

use crucible::admission::RequestId;
use crucible::backend::*;

const LIMITS: StepLimits = StepLimits {
    pages: 8,
    page_tokens: 16,
    slots: 4,
    max_step_tokens: 40,
    host_logit_rows: 3,
    context: 48,
    vocab: 100,
};

fn sampling() -> SamplingRow {
    SamplingRow { rule: Rule::Greedy, seed: 0, token_index: 0, choice: 0 }
}

fn row(slot: u32, start: Start, len: u32) -> Row {
    Row {
        request: RequestId(u64::from(slot) + 1),
        slot,
        start,
        len,
        input: Input::Tokens,
        want: Want::Last,
        sampling: sampling(),
        logprobs: None,
        host_logits: HostLogits::No,
    }
}

fn bind(slot: u32, pages: &[u32]) -> SlotBinding {
    SlotBinding { slot, request: RequestId(u64::from(slot) + 1), pages: pages.to_vec(), adjust: None }
}

/// Slot 0 with pages 0 and 1 and 20 computed positions, slot 1 with page 2 and 16 positions that selected nothing.
fn begun() -> StepValidator {
    let mut v = StepValidator::new(LIMITS);
    let rows = vec![row(0, Start::Host(0), 20), Row { want: Want::None, ..row(1, Start::Host(0), 15) }];
    let step = Step { id: 1, bindings: vec![bind(0, &[0, 1]), bind(1, &[2])], rows, tokens: vec![7; 35] };
    v.check(step).unwrap();
    v
}

fn decode() -> Step {
    let rows = vec![Row { input: Input::DeviceLast, ..row(0, Start::Device, 1) }];
    Step { id: 2, bindings: vec![], rows, tokens: vec![] }
}

/// Refuses `decode()` as `change` bends it, then takes the straight one: the refusal left no trace.
fn refused(change: impl FnOnce(&mut Step)) -> PlanError {
    let mut v = begun();
    let before = format!("{:?}", v).split("marks").next().unwrap().to_owned();
    let mut step = decode();
    change(&mut step);
    let error = v.check(step).expect_err("the step is malformed");
    assert_eq!(before, format!("{:?}", v).split("marks").next().unwrap(), "{error}");
    v.check(decode()).expect("a refused step leaves no trace");
    error
}

#[test]
fn well_formed_steps_pass_and_positions_are_followed() {
    let mut v = begun();
    for id in 2..14 {
        v.check(Step { id, ..decode() }).unwrap();
    }
    assert!(matches!(v.check(Step { id: 14, ..decode() }), Err(PlanError::PastTable { end: 33, table: 32, .. })));
}

#[test]
fn faults_of_the_whole_step_are_refused() {
    assert_eq!(refused(|s| s.id = 1), PlanError::StepOrder { id: 1, last: 1 });
    assert_eq!(refused(|s| s.rows.clear()), PlanError::EmptyStep);
    assert_eq!(refused(|s| s.tokens.push(1)), PlanError::TokenCount { given: 1, needed: 0 });
    let id = refused(|s| {
        s.rows[0].input = Input::Tokens;
        s.tokens = vec![100];
    });
    assert_eq!(id, PlanError::TokenOutOfRange { id: 100, vocab: 100 });
    let many = refused(|s| {
        s.bindings = vec![bind(2, &[3, 4, 5])];
        s.rows.push(row(2, Start::Host(0), 40));
        s.tokens = vec![0; 40];
    });
    assert_eq!(many, PlanError::TooManyTokenRows { rows: 41, limit: 40 });
}

#[test]
fn faults_of_a_binding_are_refused() {
    let binding = |pages: &'static [u32]| refused(move |s| s.bindings = vec![bind(2, pages)]);
    assert_eq!(binding(&[]), PlanError::EmptyTable { slot: 2 });
    assert_eq!(binding(&[3, 8]), PlanError::PageOutOfRange { slot: 2, page: 8, pages: 8 });
    assert_eq!(binding(&[3, 4, 3]), PlanError::PageRepeated { slot: 2, page: 3 });
    assert_eq!(binding(&[3, 4, 5, 6]), PlanError::TableTooLong { slot: 2, pages: 4, limit: 3 });
    assert_eq!(binding(&[3, 1]), PlanError::PageOwned { slot: 2, page: 1, owner: 0 });
    assert_eq!(refused(|s| s.bindings = vec![bind(4, &[3])]), PlanError::BindingSlotOutOfRange { slot: 4, slots: 4 });
    assert_eq!(refused(|s| s.bindings = vec![bind(2, &[3]), bind(2, &[4])]), PlanError::BoundTwice { slot: 2 });
    let shared = refused(|s| s.bindings = vec![bind(2, &[3]), bind(3, &[4, 3])]);
    assert_eq!(shared, PlanError::PageOwned { slot: 3, page: 3, owner: 2 });
    let twin = refused(|s| s.bindings = vec![SlotBinding { request: RequestId(1), ..bind(2, &[3]) }]);
    assert_eq!(twin, PlanError::RequestBoundElsewhere { request: RequestId(1), slot: 2, other: 0 });
}

#[test]
fn faults_of_a_row_are_refused() {
    assert_eq!(refused(|s| s.rows[0].slot = 4), PlanError::SlotOutOfRange { slot: 4, slots: 4 });
    assert_eq!(refused(|s| s.rows.push(s.rows[0].clone())), PlanError::SlotRepeated { slot: 0 });
    assert_eq!(refused(|s| s.rows[0].len = 0), PlanError::EmptyRow { slot: 0 });
    assert_eq!(refused(|s| s.rows[0].slot = 3), PlanError::Unbound { slot: 3 });
    let stranger = refused(|s| s.rows[0].request = RequestId(9));
    assert_eq!(stranger, PlanError::RequestMismatch { slot: 0, given: RequestId(9), bound: RequestId(1) });
    for start in [0, 19, 21, u32::MAX] {
        let gap = refused(|s| s.rows[0].start = Start::Host(start));
        assert_eq!(gap, PlanError::StartGap { slot: 0, start, position: 20 });
    }
    let fresh = refused(|s| {
        s.bindings = vec![bind(2, &[3])];
        s.rows = vec![row(2, Start::Device, 1)];
        s.tokens = vec![0];
    });
    assert_eq!(fresh, PlanError::DeviceStartFresh { slot: 2 });
    let long = |len: u32| {
        refused(move |s| {
            s.rows = vec![row(0, Start::Device, len)];
            s.tokens = vec![0; len.min(99) as usize];
        })
    };
    assert_eq!(long(13), PlanError::PastTable { slot: 0, end: 33, table: 32 });
    assert_eq!(long(29), PlanError::PastContext { slot: 0, end: 49, context: 48 });
    assert_eq!(long(u32::MAX), PlanError::PastContext { slot: 0, end: u64::from(u32::MAX) + 20, context: 48 });
    assert_eq!(refused(|s| s.rows[0].len = 2), PlanError::DeviceLastLength { slot: 0, len: 2 });
    let unselected = refused(|s| s.rows = vec![Row { input: Input::DeviceLast, ..row(1, Start::Device, 1) }]);
    assert_eq!(unselected, PlanError::NoLastToken { slot: 1 });
}

#[test]
fn faults_of_a_selection_are_refused_and_a_wide_top_k_is_not() {
    let rule = |inv_temperature: f32, top_p: u64, min_p: f32| {
        let top_k = std::num::NonZeroU32::new(1_000_000);
        Rule::Sampled { inv_temperature, top_k, top_p, min_p }
    };
    for value in [0.0, -1.0, f32::INFINITY] {
        let error = refused(|s| s.rows[0].sampling.rule = rule(value, 1, 0.0));
        assert_eq!(error, PlanError::InvTemperature { slot: 0, value });
    }
    let nan = refused(|s| s.rows[0].sampling.rule = rule(f32::NAN, 1, 0.0));
    assert!(matches!(nan, PlanError::InvTemperature { .. }));
    for value in [0, (1 << 32) + 1] {
        assert_eq!(refused(|s| s.rows[0].sampling.rule = rule(1.0, value, 0.0)), PlanError::TopP { slot: 0, value });
    }
    for value in [-0.1, 1.1] {
        assert_eq!(refused(|s| s.rows[0].sampling.rule = rule(1.0, 1, value)), PlanError::MinP { slot: 0, value });
    }
    let many = refused(|s| s.rows[0].logprobs = Some(101));
    assert_eq!(many, PlanError::TooManyLogprobs { slot: 0, wanted: 101, vocab: 100 });
    for (logprobs, host_logits) in [(Some(0), HostLogits::No), (None, HostLogits::Yes)] {
        let many = refused(move |s| {
            s.rows[0] = Row { want: Want::All, logprobs, host_logits, ..row(0, Start::Device, 4) };
            s.tokens = vec![0; 4];
        });
        assert_eq!(many, PlanError::TooManyHostLogits { rows: 4, limit: 3 });
    }
    let overflow = refused(|s| {
        s.rows[0] = Row { len: 2, want: Want::All, ..row(0, Start::Device, 2) };
        s.rows[0].sampling.token_index = u32::MAX;
        s.tokens = vec![0, 0];
    });
    assert_eq!(overflow, PlanError::TokenIndexOverflow { slot: 0 });
    let rows = vec![Row { want: Want::All, logprobs: Some(1), ..row(0, Start::Device, 3) }, row(1, Start::Device, 1)];
    begun().check(Step { rows, tokens: vec![0; 4], ..decode() }).expect("three positions with logits are allowed");
    let mut step = decode();
    step.rows[0].sampling.rule = rule(1.0, 1 << 32, 1.0);
    begun().check(step).expect("a top_k above the vocabulary keeps all");
}

#[test]
fn a_binding_may_take_pages_of_an_ended_sequence_whose_slot_then_refuses_rows() {
    let mut v = begun();
    let rows = vec![row(2, Start::Host(0), 1)];
    v.check(Step { id: 2, bindings: vec![bind(2, &[1, 3])], rows, tokens: vec![0] }).unwrap();
    assert_eq!(v.check(Step { id: 3, ..decode() }).unwrap_err(), PlanError::Revoked { slot: 0, to: 2 });
    let rows = vec![row(0, Start::Host(0), 1)];
    v.check(Step { id: 3, bindings: vec![bind(0, &[0])], rows, tokens: vec![0] }).expect("bound again");
}

#[test]
fn a_rebound_slot_frees_its_old_pages_first() {
    let mut v = begun();
    let rows = vec![row(0, Start::Host(0), 1), row(1, Start::Host(0), 1)];
    let bindings = vec![bind(1, &[0]), bind(0, &[2, 1])];
    v.check(Step { id: 2, bindings, rows, tokens: vec![0, 0] }).expect("the slots exchange their pages");
}
