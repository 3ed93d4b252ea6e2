//! The CPU backend alone, without engine or HTTP: tokens per second of one prefill and of decode.
//!
//! Every figure is a whole step as the executor sees it, its check included, submit to poll. Rounds are reported apart, so that a busy machine shows.

use std::time::Instant;

use crate::admission::RequestId;
use crate::backend::cpu::{CpuBackend, CpuConfig};
use crate::backend::driver::{Driver, DriverError};
use crate::backend::{Backend, HostLogits, Input, Row, Rule, SamplingRow, SlotBinding, Start, Want};
use crate::model::{ModelWeights, Profile};

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct CpuBench {
    /// Prompt tokens of the prefill step.
    pub prompt: usize,
    /// Decode steps after it.
    pub decode: usize,
    /// Sequences that prefill one after the other and then decode together.
    pub batch: usize,
    /// Repetitions.
    pub rounds: usize,
}

/// One repetition.
#[derive(Clone, Copy, Debug)]
pub struct CpuRound {
    /// Prompt tokens per second of the first sequence's prefill.
    pub prefill_tokens_per_second: f64,
    /// Decoded tokens per second of all sequences together.
    pub decode_tokens_per_second: f64,
}

/// Runs the benchmark; `config` gives threads and instruction set, sizes are chosen to fit.
///
/// # Errors
/// The backend refused, died, or the lengths exceed the model's context.
pub fn run(
    weights: ModelWeights,
    profile: Profile,
    config: CpuConfig,
    bench: CpuBench,
) -> Result<(String, Vec<CpuRound>), DriverError> {
    let pages = (bench.prompt + bench.decode).div_ceil(config.page_tokens);
    let config = CpuConfig {
        pages: pages * bench.batch,
        slots: bench.batch,
        max_step_tokens: bench.prompt.max(bench.batch),
        ..config
    };
    let backend = CpuBackend::new(weights, profile, config)?;
    let facts = backend.facts().clone();
    let mut driver = Driver::new(Box::new(backend));
    let mut step = |bindings, rows, tokens| {
        let begun = Instant::now();
        driver.run(bindings, rows, tokens)?;
        Ok::<f64, DriverError>(begun.elapsed().as_secs_f64())
    };
    let mut rounds = Vec::new();
    for round in 0..bench.rounds {
        let request = |slot: usize| RequestId((round * bench.batch + slot + 1) as u64);
        let mut prefill = 0.0;
        for slot in 0..bench.batch {
            let pages = (slot * pages..(slot + 1) * pages).map(|p| p as u32).collect();
            let binding = SlotBinding { slot: slot as u32, request: request(slot), pages, adjust: None };
            let tokens = (0..bench.prompt).map(|i| ((i * 7919 + slot) % facts.vocab) as u32).collect();
            let row = row(request(slot), slot, Start::Host(0), bench.prompt);
            let seconds = step(vec![binding], vec![row], tokens)?;
            if slot == 0 {
                prefill = bench.prompt as f64 / seconds;
            }
        }
        let mut seconds = 0.0;
        for _ in 0..bench.decode {
            let rows = (0..bench.batch).map(|s| row(request(s), s, Start::Device, 1)).collect();
            seconds += step(vec![], rows, vec![])?;
        }
        let decode_tokens_per_second = (bench.decode * bench.batch) as f64 / seconds;
        rounds.push(CpuRound { prefill_tokens_per_second: prefill, decode_tokens_per_second });
    }
    Ok((facts.device, rounds))
}

fn row(request: RequestId, slot: usize, start: Start, len: usize) -> Row {
    Row {
        request,
        slot: slot as u32,
        start,
        len: len as u32,
        input: if start == Start::Device { Input::DeviceLast } else { Input::Tokens },
        want: Want::Last,
        sampling: SamplingRow { rule: Rule::Greedy, seed: 0, token_index: 0, choice: 0 },
        logprobs: None,
        host_logits: HostLogits::No,
    }
}
