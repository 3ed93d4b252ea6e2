//! Selection: crafted logits through the backend's own selection, then every rule through a whole model, alone and crowded.
//!
//! The crafted part needs no luck: for any draw the logits are built so that an interval begins or ends exactly at the drawn point, and
//! so that top-p reaches its target exactly, misses it by one unit, or misses it only because the target is rounded up.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::{Failure, SOLO, Stage};
use crate::arith::exp::exp_c;
use crate::arith::philox::token_draw;
use crate::arith::rule::top_p_fixed;
use crate::arith::select::{draw_point, fixed_weight, select};
use crate::backend::cpu::{Isa, kernels};
use crate::backend::cuda::adjust::AdjustArgs;
use crate::backend::cuda::args::{SelectBuffers, SelectOut};
use crate::backend::cuda::memory::DeviceBuffer;
use crate::backend::{Rule, STEPS_IN_FLIGHT, SamplingRow};
use crate::check::Dice;
use crate::check::kernels::adjust::adjust;
use crate::check::kernels::device_row;
use crate::check::play::{Pages, Player, Sequence, Style};

/// One position to select, and what must come out.
struct Case {
    class: &'static str,
    logits: Vec<f32>,
    sampling: SamplingRow,
    want: u32,
}

impl Case {
    /// The definition says what comes out.
    fn defined(class: &'static str, logits: Vec<f32>, sampling: SamplingRow) -> Self {
        let want = select(&logits, &sampling, 0).token;
        Self { class, logits, sampling, want }
    }
}

const VOCABULARIES: [usize; 6] = [2, 31, 1000, 1025, 5000, 49_152];

fn position(dice: &mut Dice, rule: Rule) -> SamplingRow {
    SamplingRow { rule, seed: dice.bits(), token_index: dice.below(1000) as u32, choice: dice.below(3) as u32 }
}

fn sampled(inv_temperature: f32, top_k: usize, top_p: u64, min_p: f32) -> Rule {
    Rule::Sampled { inv_temperature, top_k: NonZeroU32::new(top_k as u32), top_p, min_p }
}

const ALL: u64 = 1 << 32;

/// Every class of top-k over spread logits.
fn top_k_classes(dice: &mut Dice, vocab: usize) -> Vec<Case> {
    [0, 1, 5, 40, 128, 500, vocab - 1, vocab, vocab + 10]
        .map(|k| {
            let logits = (0..vocab).map(|_| (dice.unit() + dice.unit() + dice.unit()) * 3.0).collect();
            let rule = sampled(dice.pick(&[0.7, 1.0, 2.0]), k, ALL, 0.0);
            Case::defined("top-k classes", logits, position(dice, rule))
        })
        .into()
}

/// Few distinct values, all equal, zeros of both signs; greedy and sampled.
fn ties(dice: &mut Dice, vocab: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in 0..3 {
        for rule in [Rule::Greedy, sampled(1.0, 40, ALL, 0.0), sampled(1.0, 0, top_p_fixed(0.5), 0.0)] {
            let logits = (0..vocab)
                .map(|_| match kind {
                    0 => dice.below(3) as f32,
                    1 => 1.5,
                    _ => [0.0, -0.0][dice.below(2)],
                })
                .collect();
            cases.push(Case::defined("ties", logits, position(dice, rule)));
        }
    }
    cases
}

fn all_filters(dice: &mut Dice, vocab: usize) -> Vec<Case> {
    (0..8)
        .map(|_| {
            let logits = (0..vocab).map(|_| (dice.unit() + dice.unit()) * 5.0).collect();
            let top_p = top_p_fixed(dice.pick(&[0.95, 0.5, 0.1]));
            let rule = sampled(dice.pick(&[0.5, 1.0, 1.25]), dice.between(2, 60), top_p, dice.pick(&[0.02, 0.1, 0.5]));
            Case::defined("all filters", logits, position(dice, rule))
        })
        .collect()
}

/// 2^n equal logits and P = kept/2^n: top-p keeps exactly `kept` of them, and one more when P is one unit higher.
fn top_p_edges(dice: &mut Dice) -> Vec<Case> {
    let vocab = 64;
    let mut cases = Vec::new();
    for kept in [1u64, 2, 31, 32, 63] {
        for more in [0, 1] {
            let rule = sampled(1.0, 0, (kept << 32) / vocab + more, 0.0);
            let sampling = position(dice, rule);
            let u = token_draw(sampling.seed, sampling.token_index, sampling.choice);
            // Equal weights of 2^40: the drawn id is the drawn point's upper part.
            let want = (draw_point(u, (kept + more) << 40) >> 40) as u32;
            cases.push(Case { class: "top-p edges", logits: vec![0.25; vocab as usize], sampling, want });
        }
    }
    cases
}

/// Where the weight of the first tokens lies beside P·W / 2^32.
#[derive(Clone, Copy)]
enum Target {
    /// It is this, rounded down: the target, which is rounded up, asks for a token more.
    RoundedDown,
    /// It is this, rounded up: it reaches the target.
    RoundedUp,
}

/// The token that the draw takes of ids with their weights, ids ascending.
fn drawn(kept: &[(u32, u64)], sampling: &SamplingRow) -> u32 {
    let total = kept.iter().map(|&(_, weight)| weight).sum();
    let point = draw_point(token_draw(sampling.seed, sampling.token_index, sampling.choice), total);
    let mut sum = 0;
    let reaches = |&&(_, weight): &&(u32, u64)| {
        sum += weight;
        sum > point
    };
    kept.iter().find(reaches).map_or(u32::MAX, |&(id, _)| id)
}

/// A few tokens of weight 2^40 and lower ones, with a P whose exact target is no whole number and lies within one unit of what the few
/// weigh; the draw is one that tells whether a token more was kept.
///
/// With n of weight 2^40, P = 2^32 − d and R the others' weight, P·W = n·2^72 + P·R − d·n·2^40. The least R above d·n·2^40 / P puts the
/// exact target less than one unit above n·2^40, the next lower R less than one below it.
fn top_p_rounding(dice: &mut Dice, vocab: usize, target: Target) -> Case {
    let first = 1 + dice.below(4) as u64;
    let share = (1 << 32) / (4 * (first + 1));
    let d = share + dice.below(share as usize) as u64;
    let p = (1 << 32) - d;
    let above = ((u128::from(d * first) << 40) / u128::from(p)) as u64 + 1;
    let others = match target {
        Target::RoundedDown => above,
        Target::RoundedUp => above - 1,
    };
    let mut weighty = vec![0.0; first as usize];
    weighty.extend(decompose(others));
    let next = weighty[first as usize];
    dice.shuffle(&mut weighty);
    let (ids, logits) = placed(dice, vocab, &weighty);
    let weights = || ids.iter().zip(&weighty).map(|(&id, &l)| (id, l));
    let kept = |lowest: f32| -> Vec<(u32, u64)> {
        weights().filter(|&(_, l)| l >= lowest).map(|(id, l)| (id, fixed_weight(exp_c(l)))).collect()
    };
    let (few, more) = (kept(0.0), kept(next));
    let mut sampling = position(dice, sampled(1.0, 0, p, 0.0));
    while drawn(&few, &sampling) == drawn(&more, &sampling) {
        sampling.token_index += 1;
    }
    let (class, kept) = match target {
        Target::RoundedDown => ("top-p target rounded up to a token more", more),
        Target::RoundedUp => ("top-p target rounded up to what is kept", few),
    };
    Case { class, logits, want: drawn(&kept, &sampling), sampling }
}

/// Spreads logits over random ids of a vocabulary, in order; the other ids weigh nothing. The ids, and all logits.
fn placed(dice: &mut Dice, vocab: usize, weighty: &[f32]) -> (Vec<u32>, Vec<f32>) {
    let vocab = vocab.max(weighty.len());
    let mut ids: Vec<u32> = (0..vocab as u32).collect();
    dice.shuffle(&mut ids);
    ids.truncate(weighty.len());
    ids.sort_unstable();
    let mut logits = vec![-80.0; vocab];
    ids.iter().zip(weighty).for_each(|(&id, &l)| logits[id as usize] = l);
    (ids, logits)
}

/// Logits, at most 0, whose weights sum to exactly `sum`, the highest first.
fn decompose(mut sum: u64) -> Vec<f32> {
    let mut logits = Vec::new();
    while sum > 0 {
        // The highest logit whose weight does not exceed the rest: bits of negative floats ascend as they fall.
        let weight = |bits: u32| fixed_weight(exp_c(f32::from_bits(bits)));
        let (mut low, mut high) = ((-0.0f32).to_bits(), (-60.0f32).to_bits());
        while low < high {
            let middle = low + (high - low) / 2;
            if weight(middle) <= sum { high = middle } else { low = middle + 1 }
        }
        logits.push(f32::from_bits(low) + 0.0);
        sum -= weight(low);
    }
    logits
}

/// An interval that ends (`ends`) or begins exactly where the draw falls.
fn draw_edge(dice: &mut Dice, vocab: usize, ends: bool) -> Case {
    let sampling = position(dice, sampled(1.0, 0, ALL, 0.0));
    let total = ((2 + dice.below(3) as u64) << 40) + (dice.bits() >> 25);
    let point = draw_point(token_draw(sampling.seed, sampling.token_index, sampling.choice), total);
    // First id whose prefix sum exceeds the point: with a sum of `point` before it the next one, with `point` + 1 the last one.
    let before = if ends { point + 1 } else { point };
    let (mut head, mut tail) = (decompose(before), decompose(total - before));
    dice.shuffle(&mut head);
    dice.shuffle(&mut tail);
    let wanted = if ends { head.len() - 1 } else { head.len() };
    let weighty: Vec<f32> = head.into_iter().chain(tail).collect();
    let (ids, logits) = placed(dice, vocab, &weighty);
    Case {
        class: if ends { "interval ends at the draw" } else { "interval begins at the draw" },
        logits,
        sampling,
        want: ids[wanted],
    }
}

fn crafted(dice: &mut Dice, rounds: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for _ in 0..rounds {
        for vocab in VOCABULARIES {
            cases.extend(top_k_classes(dice, vocab));
            cases.extend(ties(dice, vocab));
            cases.extend(all_filters(dice, vocab));
            cases.extend([true, false].map(|ends| draw_edge(dice, vocab, ends)));
            cases.extend([Target::RoundedDown, Target::RoundedUp].map(|target| top_p_rounding(dice, vocab, target)));
        }
        cases.extend(top_p_edges(dice));
    }
    cases
}

/// The token that the backend under test selects.
fn selected(player: &Player, case: &Case) -> Result<Vec<Option<u32>>, Failure> {
    let Some(cuda) = player.subject.cuda() else {
        let kinds = [Isa::Scalar, Isa::Avx2, Isa::Avx512].into_iter().filter_map(|isa| kernels::Kernels::new(isa).ok());
        return Ok(kinds.map(|k| k.select(&case.logits, &case.sampling, 0)).collect());
    };
    let device = cuda.device();
    let logits = DeviceBuffer::from_slice(device, "a check", &case.logits)?;
    let row = DeviceBuffer::from_slice(device, "a check", &[device_row(&case.sampling, 0)])?;
    let poison = SelectOut { token: u32::MAX, finite: u32::MAX };
    let out = DeviceBuffer::from_slice(device, "a check", &[poison])?;
    let last = DeviceBuffer::from_slice(device, "a check", &[u32::MAX])?;
    let buffers = SelectBuffers {
        logits: logits.address(),
        sampling: row.address(),
        lanes: [out.address(); STEPS_IN_FLIGHT],
        last_token: last.address(),
        adjust: AdjustArgs::default(),
    };
    cuda.pass().kernels.select(1, case.logits.len(), buffers)?;
    Ok(out.read(0, 1)?.iter().map(|s| (s.finite == 1).then_some(s.token)).collect())
}

pub(super) fn run(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut player = stage.open(&stage.setup())?;
    let rounds = stage.amount(6, 2);
    let cases = crafted(&mut stage.dice, rounds);
    let mut classes = std::collections::BTreeMap::<&str, u64>::new();
    for case in &cases {
        *classes.entry(case.class).or_default() += 1;
        let defined = select(&case.logits, &case.sampling, 0).token;
        for got in selected(&player, case)? {
            let same = got == Some(case.want) && defined == case.want;
            stage.tally.case(if same {
                Ok(())
            } else {
                let (class, rule, n) = (case.class, case.sampling.rule, case.logits.len());
                Err(format!("{class}, {rule:?} over {n}: {got:?}, wanted {}, by definition {defined}", case.want))
            });
        }
    }
    say!("  crafted positions: {classes:?}");
    whole_model(stage, &mut player)
}

fn whole_model(stage: &mut Stage<'_>, player: &mut Player) -> Result<(), Failure> {
    let vocab = stage.geometry().vocab;
    let mut sequences = Vec::new();
    for top_k in [0, 1, 5, 40, 128, 500, vocab] {
        for (top_p, min_p) in [(1.0, 0.0), (0.9, 0.0), (1.0, 0.1), (0.5, 0.02)] {
            let rule = sampled(stage.dice.pick(&[0.7, 1.0, 2.0]), top_k, top_p_fixed(top_p), min_p);
            let len = stage.dice.between(1, 60);
            sequences.push(Sequence { rule, ..stage.sequence(len, 16) });
            // The same rule after penalties and bias, and greedily.
            for rule in [rule, Rule::Greedy] {
                let adjust = Some(Arc::new(adjust(&mut stage.dice, vocab)));
                sequences.push(Sequence { rule, adjust, ..stage.sequence(len, 24) });
            }
        }
    }
    let want = stage.solo(player, &sequences, SOLO)?;
    for (shuffle, resident) in [(3, 16), (4, 7)] {
        let style =
            Style { budget: 256, chunk: 37, resident, ahead: 2, shuffle, pages: Pages::Shuffled, ..Style::solo(SOLO) };
        let got = stage.play(player, &sequences, &style)?;
        stage.expect("crowded", &sequences, &got, &want);
    }
    say!("  {} rules through the model", sequences.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decomposed_weights_sum_exactly_and_the_built_edges_are_what_the_definition_gives() {
        let mut dice = Dice::new(7);
        for _ in 0..200 {
            let sum = dice.bits() >> 22;
            let parts = decompose(sum);
            assert_eq!(parts.iter().map(|&l| fixed_weight(exp_c(l))).sum::<u64>(), sum);
            assert!(parts.iter().all(|l| *l <= 0.0));
        }
        for case in crafted(&mut dice, 1) {
            assert_eq!(select(&case.logits, &case.sampling, 0).token, case.want, "{}", case.class);
        }
    }
}
