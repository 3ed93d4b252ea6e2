//! `crucible bench step`: what a decode step and a packed prefill cost on the device and on the host, without HTTP.

use std::time::Instant;

use crate::backend::Rule;
use crate::check::models::{Setup, Shape, Subject, weights};
use crate::check::play::{Counts, Observe, Pages, Player, Sequence, Style};
use crate::model::{MatrixFormat, Profile};

/// A benchmark that cannot go on.
pub type Failure = Box<dyn std::error::Error>;

/// Decode at one batch size.
#[derive(Clone, Copy, Debug)]
pub struct StepTimes {
    /// Sequences.
    pub batch: usize,
    /// Wall time of a step, µs.
    pub wall_us: f64,
    /// Device time of a step, µs.
    pub device_us: f64,
    /// Host time to prepare and launch it, µs, on average.
    pub launch_us: f64,
    /// The same of every second step, and of 99 in 100, at most, µs: a step that the system interrupted shows in the average alone.
    pub launch_us_p50: f64,
    /// See `launch_us_p50`.
    pub launch_us_p99: f64,
}

const PROMPT: usize = 64;
const STEPS: usize = 256;

fn sequences(batch: usize, prompt: usize, generate: usize, vocab: usize) -> Vec<Sequence> {
    let one = |i: usize| Sequence {
        prompt: (0..prompt).map(|j| ((i * 7919 + j * 104_729) % vocab) as u32).collect(),
        generate,
        rule: Rule::Greedy,
        seed: 1,
        adjust: None,
        cancel_after: None,
    };
    (0..batch).map(one).collect()
}

fn timed(player: &mut Player, sequences: &[Sequence], budget: usize) -> Result<(f64, Counts), Failure> {
    let style = Style {
        budget,
        chunk: usize::MAX,
        resident: sequences.len(),
        ahead: 2,
        shuffle: 0,
        pages: Pages::Ascending,
        observe: Observe::Tokens,
        walk: &[],
    };
    let began = Instant::now();
    let (_, counts) = player.play(sequences, &style)?;
    Ok((began.elapsed().as_secs_f64() * 1e6, counts))
}

/// Opens a synthetic model for benchmarks.
///
/// # Errors
/// The backend's.
pub fn open(shape: Shape, profile: Profile, block: MatrixFormat, setup: &Setup) -> Result<Player, Failure> {
    Ok(Player::new(Subject::open(weights(shape, profile, block, 1), profile, setup)?))
}

/// Decode steps after a prompt of 64: a long run less a short one, so that the prefill cancels.
///
/// # Errors
/// A failed step.
pub fn decode(player: &mut Player, vocab: usize, batch: usize) -> Result<StepTimes, Failure> {
    let budget = PROMPT * batch;
    let (short, long) = (sequences(batch, PROMPT, 2, vocab), sequences(batch, PROMPT, 2 + STEPS, vocab));
    timed(player, &long, budget)?;
    let (short_us, short) = timed(player, &short, budget)?;
    let (long_us, mut long) = timed(player, &long, budget)?;
    let steps = (long.steps - short.steps) as f64;
    // The last steps are decode steps only.
    let mut launches = long.launches_us.split_off(long.launches_us.len().saturating_sub(STEPS));
    launches.sort_by(f64::total_cmp);
    let quantile = |q: f64| launches.get((launches.len() as f64 * q) as usize).copied().unwrap_or_default();
    Ok(StepTimes {
        batch,
        wall_us: (long_us - short_us) / steps,
        device_us: (long.timing.device_us - short.timing.device_us) / steps,
        launch_us: (long.timing.launch_us - short.timing.launch_us) / steps,
        launch_us_p50: quantile(0.5),
        launch_us_p99: quantile(0.99),
    })
}

/// Packed prefill of `count` prompts of `len`, the best of five: (wall µs, device µs of all steps, host µs, steps).
///
/// # Errors
/// A failed step.
pub fn prefill(
    player: &mut Player,
    vocab: usize,
    count: usize,
    len: usize,
    budget: usize,
) -> Result<(f64, f64, f64, u64), Failure> {
    let prompts = sequences(count, len, 1, vocab);
    let mut best = (f64::MAX, 0.0, 0.0, 0);
    for _ in 0..5 {
        let (wall, counts) = timed(player, &prompts, budget)?;
        if wall < best.0 {
            best = (wall, counts.timing.device_us, counts.timing.launch_us, counts.steps);
        }
    }
    Ok(best)
}
