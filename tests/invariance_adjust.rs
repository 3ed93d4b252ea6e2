//! Penalties and bias: what they are, that the backend computes exactly that, and that they keep every promise of invariance: the
//! same bits alone and among others, with two steps in flight, in any slot, on any instruction set.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;

use crucible::admission::RequestId;
use crucible::arith::adjust::adjust;
use crucible::arith::rule::top_p_fixed;
use crucible::arith::select::{select, token_logprobs};
use crucible::arith::{MAX_BIAS, adjusted_logit, adjusted_logits};
use crucible::backend::cpu::{CpuBackend, CpuConfig, Isa};
use crucible::backend::cuda::GraphLimits;
use crucible::backend::driver::Driver;
use crucible::backend::*;
use crucible::check::models::{Setup, Shape, Subject, Which, weights};
use crucible::check::play::{Observe, Pages, Player, Sequence, Style};
use crucible::model::{MatrixFormat, Profile};

const SAMPLED: Rule =
    Rule::Sampled { inv_temperature: 1.25, top_k: NonZeroU32::new(40), top_p: 4_080_218_931, min_p: 0.02 };

#[test]
fn a_penalty_is_that_of_openais_documentation_and_the_bias_comes_last() {
    // mu[j] - c[j] * frequency - [c[j] > 0] * presence, then the bias.
    let expected: f32 = ((-3.0f32).mul_add(0.3, 1.7) - 0.6) + 2.5;
    assert_eq!(adjusted_logit(1.7, 3, 2.5, 0.6, 0.3).to_bits(), expected.to_bits());
    // A token that was not generated keeps its logit: the prompt does not count.
    assert_eq!(adjusted_logit(1.7, 0, 0.0, 0.6, 0.3), 1.7);
    let given = Adjust { presence: 0.5, frequency: 0.25, bias: vec![(1, -100.0), (3, 2.0)] };
    assert_eq!(adjusted_logits(&[1.0, 1.0, 1.0, 1.0], &given, &[0, 3, 0]), [0.0, -99.0, 1.0, 2.25]);
    // The largest finite logit stays finite under the largest bias.
    assert!(adjusted_logit(f32::MAX, u32::MAX, 100.0, -2.0, -2.0).is_finite());
}

#[test]
fn what_has_no_effect_is_no_adjustment_and_biases_are_sorted() {
    assert_eq!(adjust(0.0, -0.0, [(5, 0.0)]), None);
    let some = adjust(0.1, 0.0, [(9, 1.0), (5, 0.0), (2, -1.0)]).expect("an effect");
    assert_eq!(some, Adjust { presence: 0.1, frequency: 0.0, bias: vec![(2, -1.0), (9, 1.0)] });
}

fn setup() -> Setup {
    let graphs = GraphLimits::default();
    Setup {
        which: Which::Cpu,
        pages: 512,
        slots: 16,
        tokens: 640,
        logit_rows: 640,
        graphs,
        libraries: None,
        cache_dir: None::<PathBuf>,
        kernels: None,
    }
}

fn player(profile: Profile) -> Player {
    let weights = weights(Shape::Small, profile, MatrixFormat::Q8_0, 1);
    Player::new(Subject::open(weights, profile, &setup()).expect("the cpu"))
}

fn vocab() -> u32 {
    Shape::Small.geometry().vocab as u32
}

/// Every combination of penalties, bias and rule, with prompts of several lengths; some plain ones between them.
fn sequences() -> Vec<Sequence> {
    let mut all = Vec::new();
    let some_bias = || (0..20).map(|i| (i * 11 % vocab(), if i % 2 == 0 { 4.0 } else { -4.0 }));
    for (presence, frequency) in [(0.0, 0.0), (1.5, 0.0), (0.0, 0.7), (-1.0, 2.0), (2.0, -2.0)] {
        for biased in [false, true] {
            for rule in [Rule::Greedy, SAMPLED] {
                let bias: Vec<(u32, f64)> = if biased { some_bias().collect() } else { Vec::new() };
                let index = all.len() as u32;
                let len = 1 + index as usize * 13 % 70;
                all.push(Sequence {
                    prompt: (0..len as u32).map(|i| (i * 7 + index * 31) % vocab()).collect(),
                    generate: 24,
                    rule,
                    seed: u64::from(index) * 977,
                    adjust: adjust(presence, frequency, bias).map(Arc::new),
                    cancel_after: None,
                });
            }
        }
    }
    all
}

#[test]
fn the_same_tokens_alone_and_interleaved_with_others_two_steps_in_flight() {
    for profile in [Profile::Q8, Profile::F32] {
        let sequences = sequences();
        let mut player = player(profile);
        let (want, _) = player.play(&sequences, &Style::solo(Observe::Generated)).expect("solo");
        for (shuffle, chunk, resident) in [(1, 37, 16), (2, 16, 5), (3, 640, 11)] {
            let style = Style {
                budget: 200,
                chunk,
                resident,
                ahead: 2,
                shuffle,
                pages: Pages::Shuffled,
                observe: Observe::Generated,
                walk: &[],
            };
            let (got, counts) = player.play(&sequences, &style).expect("crowded");
            assert!(counts.packed > 0);
            assert_eq!(got, want, "{profile:?}, shuffle {shuffle}");
        }
    }
}

#[test]
fn penalties_and_biases_change_what_is_generated() {
    // Without this the invariance above could hold because nothing is applied.
    let mut player = player(Profile::Q8);
    let sequences = sequences();
    let plain: Vec<Sequence> = sequences.iter().map(|s| Sequence { adjust: None, ..s.clone() }).collect();
    let (with, _) = player.play(&sequences, &Style::solo(Observe::Tokens)).expect("adjusted");
    let (without, _) = player.play(&plain, &Style::solo(Observe::Tokens)).expect("plain");
    let changed = |rule: Rule| {
        let of = sequences.iter().zip(with.iter().zip(&without)).filter(|(s, _)| s.rule == rule && s.adjust.is_some());
        of.filter(|(_, (with, without))| with.tokens != without.tokens).count()
    };
    assert!(changed(Rule::Greedy) >= 6 && changed(SAMPLED) >= 6, "{} {}", changed(Rule::Greedy), changed(SAMPLED));
}

/// Runs one adjusted sequence by hand and checks every token against the definition over the raw logits of its own row.
fn check_against_definition(isa: Isa, threads: usize, rule: Rule, given: &Adjust) {
    let weights = weights(Shape::Small, Profile::Q8, MatrixFormat::Q4_0, 3);
    let config = CpuConfig { threads, isa, pages: 32, page_tokens: 16, slots: 2, max_step_tokens: 64 };
    let mut driver = Driver::new(Box::new(CpuBackend::new(weights, Profile::Q8, config).expect("a backend")));
    let request = RequestId(1);
    let pages = (0..8).collect();
    let mut bindings = vec![SlotBinding { slot: 1, request, pages, adjust: Some(Arc::new(given.clone())) }];
    let mut generated: Vec<u32> = Vec::new();
    for index in 0..40 {
        let sampling = SamplingRow { rule, seed: 5, token_index: index, choice: 0 };
        let first = index == 0;
        let row = Row {
            request,
            slot: 1,
            start: if first { Start::Host(0) } else { Start::Device },
            len: if first { 3 } else { 1 },
            input: if first { Input::Tokens } else { Input::DeviceLast },
            want: Want::Last,
            sampling,
            logprobs: Some(3),
            host_logits: HostLogits::Yes,
        };
        let tokens = if first { vec![9, 9, 4] } else { vec![] };
        let output = driver.run(std::mem::take(&mut bindings), vec![row], tokens).expect("a step");
        let out = &output.rows[0];
        let want = select(&adjusted_logits(&out.logits[0], given, &generated), &sampling, 0).token;
        assert_eq!(out.tokens, [want], "token {index} of {rule:?} on {isa:?}");
        // Log-probabilities are those of the raw logits, before penalties and bias.
        assert_eq!(out.logprobs[0], token_logprobs(&out.logits[0], want, 3));
        generated.push(want);
    }
}

#[test]
fn the_backend_selects_what_the_definition_selects_and_reports_raw_log_probabilities() {
    let full: Vec<(u32, f64)> = (0..vocab().min(MAX_BIAS as u32)).map(|id| (id, f64::from(id % 7) - 3.0)).collect();
    let cases = [adjust(0.9, 0.4, [(4, -100.0), (9, 3.0)]), adjust(-2.0, -0.3, []), adjust(0.0, 0.0, full)];
    for given in cases.into_iter().flatten() {
        for rule in [Rule::Greedy, SAMPLED] {
            check_against_definition(Isa::Scalar, 1, rule, &given);
            check_against_definition(Isa::Auto, 2, rule, &given);
        }
    }
}

#[test]
fn the_sampled_rule_of_these_tests_is_one_that_clients_can_ask_for() {
    assert!(matches!(SAMPLED, Rule::Sampled { top_p, .. } if top_p == top_p_fixed(0.95)));
}
