//! Penalties and bias against the definition: slots bound, selecting several times in a row next to plain rows, bound again. The
//! device's counts and biases are poisoned before the first binding, so that what a binding leaves out shows.

use std::sync::Arc;

use super::selection::{device_row, logits, rule};
use super::{Bench, Failure, Options};
use crate::admission::RequestId;
use crate::arith::adjusted_logits;
use crate::arith::select::select;
use crate::backend::cuda::adjust::{AdjustArgs, words};
use crate::backend::cuda::args::{SelectBuffers, SelectOut, SelectRow};
use crate::backend::cuda::memory::DeviceBuffer;
use crate::backend::{Adjust, STEPS_IN_FLIGHT, SamplingRow, SlotBinding, Step};
use crate::check::{Dice, Tally};

/// Random penalties and biases, extremes and full lists among them.
pub(in crate::check) fn adjust(dice: &mut Dice, vocab: usize) -> Adjust {
    let most = crate::arith::MAX_BIAS.min(vocab);
    let entries = match dice.below(4) {
        0 => 0,
        1 => most,
        _ => dice.between(1, most.min(40)),
    };
    let mut ids: Vec<u32> = (0..vocab as u32).collect();
    dice.shuffle(&mut ids);
    ids.truncate(entries);
    ids.sort_unstable();
    let bias = ids.into_iter().map(|id| (id, dice.pick(&[100.0, -100.0, 0.25, -3.3, 1e-30]))).collect();
    Adjust { presence: dice.pick(&[0.0, 0.6, -2.0, 2.0, 0.1]), frequency: dice.pick(&[0.0, 0.3, 2.0, -0.7, 1.1]), bias }
}

/// The device's side of some slots.
struct Slots {
    headers: DeviceBuffer<[u32; 4]>,
    biases: DeviceBuffer<[u32; 2]>,
    counts: DeviceBuffer<u32>,
    adjusted: DeviceBuffer<f32>,
}

impl Slots {
    fn new(bench: &Bench, slots: usize, vocab: usize) -> Result<Self, Failure> {
        Ok(Self {
            headers: bench.poisoned(slots)?,
            biases: bench.poisoned(slots * crate::arith::MAX_BIAS)?,
            counts: bench.poisoned(slots * vocab)?,
            adjusted: bench.poisoned(slots * vocab)?,
        })
    }

    fn args(&self) -> AdjustArgs {
        AdjustArgs {
            slots: self.headers.address(),
            biases: self.biases.address(),
            counts: self.counts.address(),
            adjusted: self.adjusted.address(),
        }
    }
}

/// What the host knows of a slot.
#[derive(Default)]
struct Known {
    adjust: Option<Arc<Adjust>>,
    generated: Vec<u32>,
}

pub(super) fn run(bench: &Bench, options: &Options) -> Result<Vec<Tally>, Failure> {
    let mut tally = Tally::new("select_token adjusted", options.seed);
    let mut dice = Dice::new(options.seed ^ 0x9a);
    for _ in 0..options.shapes {
        let vocab = dice.pick(&[1, 2, 31, 100, 1023, 1025, 5000, 50_304]);
        let count = dice.between(1, 6);
        let slots = Slots::new(bench, count, vocab)?;
        let mut known: Vec<Known> = (0..count).map(|_| Known::default()).collect();
        for round in 0..8 {
            bind(bench, &mut dice, &slots, &mut known, round == 0, vocab)?;
            select_round(bench, &mut dice, &slots, &mut known, vocab, &mut tally)?;
        }
    }
    Ok(vec![tally])
}

/// Binds every slot, or some of them anew.
fn bind(
    bench: &Bench,
    dice: &mut Dice,
    slots: &Slots,
    known: &mut [Known],
    first: bool,
    vocab: usize,
) -> Result<(), Failure> {
    let mut step = Step::default();
    for (slot, known) in known.iter_mut().enumerate() {
        if first || dice.below(6) == 0 {
            let adjust = (dice.below(4) > 0).then(|| Arc::new(adjust(dice, vocab)));
            *known = Known { adjust: adjust.clone(), generated: Vec::new() };
            step.bindings.push(SlotBinding { slot: slot as u32, request: RequestId(1), pages: vec![0], adjust });
        }
    }
    let (words, bindings) = words(&step);
    if bindings > 0 {
        let words = bench.upload(&words)?;
        bench.kernels.bind_adjust(bindings, words.address(), slots.args(), vocab)?;
        bench.device.synchronise()?;
    }
    Ok(())
}

/// Every slot selects once; few distinct logits now and then, so that a penalty decides ties.
fn select_round(
    bench: &Bench,
    dice: &mut Dice,
    slots: &Slots,
    known: &mut [Known],
    vocab: usize,
    tally: &mut Tally,
) -> Result<(), Failure> {
    let rows = known.len();
    let all: Vec<Vec<f32>> = known.iter().map(|_| logits(dice, vocab)).collect();
    let sampling: Vec<SamplingRow> = known
        .iter()
        .map(|k| SamplingRow {
            rule: rule(dice, vocab),
            seed: dice.bits(),
            token_index: k.generated.len() as u32,
            choice: 0,
        })
        .collect();
    let device_rows: Vec<SelectRow> = (0..rows)
        .map(|i| SelectRow { adjusted: u32::from(known[i].adjust.is_some()), ..device_row(&sampling[i], i as u32) })
        .collect();
    let (device_logits, device_rows) = (bench.upload(&all.concat())?, bench.upload(&device_rows)?);
    let (out, last) = (bench.poisoned::<SelectOut>(rows)?, bench.poisoned::<u32>(rows)?);
    let [raw, described, out_at, last_at] =
        [device_logits.address(), device_rows.address(), out.address(), last.address()];
    let buffers = SelectBuffers {
        logits: raw,
        sampling: described,
        lanes: [out_at; STEPS_IN_FLIGHT],
        last_token: last_at,
        adjust: slots.args(),
    };
    bench.kernels.select(rows, vocab, buffers)?;
    let (got, last, raw) = (bench.read(&out)?, bench.read(&last)?, bench.read(&device_logits)?);
    for (i, (row, sampling)) in all.iter().zip(&sampling).enumerate() {
        let own = &mut known[i];
        let want = match &own.adjust {
            Some(adjust) => select(&adjusted_logits(row, adjust, &own.generated), sampling, 0),
            None => select(row, sampling, 0),
        };
        let untouched = raw[i * vocab..][..vocab].iter().zip(row).all(|(a, b)| a.to_bits() == b.to_bits());
        let same = got[i].token == want.token && (got[i].finite == 1) == want.finite && last[i] == want.token;
        tally.case(match (same, untouched) {
            (true, true) => Ok(()),
            (true, false) => Err(format!("vocabulary {vocab}, slot {i}: the raw logits were changed")),
            (false, _) => Err(format!(
                "vocabulary {vocab}, slot {i} after {} tokens, {:?}: {:?}, wanted {want:?}",
                own.generated.len(),
                sampling.rule,
                got[i]
            )),
        });
        own.generated.push(want.token);
    }
    Ok(())
}
