//! Selection against the sorting definition: every filter, ties, extreme and non-finite logits.

use std::num::NonZeroU32;

use super::{Bench, Failure, Options};
use crate::arith::rule::top_p_fixed;
use crate::arith::select::select;
use crate::backend::cuda::adjust::AdjustArgs;
use crate::backend::cuda::args::{SelectBuffers, SelectOut, SelectRow};
use crate::backend::{Rule, STEPS_IN_FLIGHT, SamplingRow};
use crate::check::{Dice, Tally};

pub(super) fn logits(dice: &mut Dice, vocab: usize) -> Vec<f32> {
    let mut logits: Vec<f32> = match dice.below(6) {
        // Few distinct values: ties everywhere.
        0 => (0..vocab).map(|_| dice.below(5) as f32 - 2.0).collect(),
        1 => vec![dice.unit(); vocab],
        2 => (0..vocab).map(|_| dice.unit() * 200.0).collect(),
        3 => (0..vocab).map(|_| if dice.coin() { 0.0 } else { -0.0 }).collect(),
        _ => (0..vocab).map(|_| (dice.unit() + dice.unit() + dice.unit()) * 3.0).collect(),
    };
    match dice.below(24) {
        0 => logits[dice.below(vocab)] = f32::NAN,
        1 => logits[dice.below(vocab)] = f32::INFINITY,
        2 => logits[dice.below(vocab)] = f32::NEG_INFINITY,
        3 => logits[dice.below(vocab)] = f32::MAX,
        4 => logits[dice.below(vocab)] = f32::MIN,
        _ => {}
    }
    logits
}

pub(super) fn rule(dice: &mut Dice, vocab: usize) -> Rule {
    if dice.below(6) == 0 {
        return Rule::Greedy;
    }
    let top_k = match dice.below(8) {
        0 | 1 => None,
        2 => Some(1),
        3 => Some(vocab),
        4 => Some(vocab + 10),
        5 => Some(dice.pick(&[5, 40, 128, 500])),
        _ => Some(dice.between(1, vocab)),
    };
    let top_p = dice.pick(&[1.0, 1.0, 0.95, 0.9, 0.5, 0.1, 1e-9, 0.999_999]);
    Rule::Sampled {
        inv_temperature: dice.pick(&[1.0, 1.25, 0.5, 10.0, 0.01]),
        top_k: top_k.and_then(|k| NonZeroU32::new(k as u32)),
        top_p: top_p_fixed(top_p),
        min_p: dice.pick(&[0.0, 0.0, 0.05, 0.5, 1.0]),
    }
}

/// The row as the device takes it.
pub fn device_row(sampling: &SamplingRow, slot: u32) -> SelectRow {
    let SamplingRow { rule, seed, token_index, choice } = *sampling;
    let base = SelectRow { seed, token_index, choice, slot, is_last: 1, ..SelectRow::default() };
    match rule {
        Rule::Greedy => SelectRow { greedy: 1, ..base },
        Rule::Sampled { inv_temperature, top_k, top_p, min_p } => {
            SelectRow { inv_temperature, top_k: top_k.map_or(0, |k| k.get()), top_p, min_p, ..base }
        }
    }
}

pub(super) fn run(bench: &Bench, options: &Options) -> Result<Vec<Tally>, Failure> {
    let mut tally = Tally::new("select_token", options.seed);
    let mut dice = Dice::new(options.seed ^ 0x99);
    for _ in 0..4 * options.shapes {
        let vocab = dice.pick(&[1, 2, 31, 100, 1023, 1024, 1025, 4096, 5000, 50_304]);
        let rows = dice.between(1, 6);
        let all: Vec<Vec<f32>> = (0..rows).map(|_| logits(&mut dice, vocab)).collect();
        let sampling: Vec<SamplingRow> = (0..rows)
            .map(|_| SamplingRow {
                rule: rule(&mut dice, vocab),
                seed: dice.bits(),
                token_index: dice.below(1000) as u32,
                choice: dice.below(3) as u32,
            })
            .collect();
        let device_rows: Vec<SelectRow> = sampling.iter().enumerate().map(|(i, s)| device_row(s, i as u32)).collect();
        let (device_logits, device_rows) = (bench.upload(&all.concat())?, bench.upload(&device_rows)?);
        let (out, last) = (bench.poisoned::<SelectOut>(rows)?, bench.poisoned::<u32>(rows)?);
        let buffers = SelectBuffers {
            logits: device_logits.address(),
            sampling: device_rows.address(),
            lanes: [out.address(); STEPS_IN_FLIGHT],
            last_token: last.address(),
            adjust: AdjustArgs::default(),
        };
        bench.kernels.select(rows, vocab, buffers)?;
        let (got, last) = (bench.read(&out)?, bench.read(&last)?);
        for (i, (row, sampling)) in all.iter().zip(&sampling).enumerate() {
            let want = select(row, sampling, 0);
            let same = got[i].token == want.token && (got[i].finite == 1) == want.finite && last[i] == want.token;
            tally.case(if same {
                Ok(())
            } else {
                Err(format!("vocabulary {vocab}, {:?}: {:?}, wanted {want:?}", sampling.rule, got[i]))
            });
        }
    }
    Ok(vec![tally])
}
