//! The suites over whole models: the same sequences under different schedules must leave the same traces, and the GPU's must be the CPU's.
//!
//! Every suite says from its steps which shapes it reached, and fails where a promised one is missing. On the GPU the traces of
//! sequences alone are held against the CPU's as well, so that a kernel that is wrong in the same way everywhere shows in each suite.

mod graphs;
mod model;
mod packed;
mod schedules;
mod selection;

use std::num::NonZeroU32;
use std::path::PathBuf;

use super::models::{Setup, Shape, Source, Subject, Which};
use super::play::{Counts, Observe, Pages, Player, Sequence, Style, Trace};
use super::seen::Seen;
use super::{Dice, Tally};
use crate::arith::rule::top_p_fixed;
use crate::backend::Rule;
use crate::backend::cuda::GraphLimits;
use crate::model::{Geometry, MatrixFormat, ModelWeights, Profile};

/// A suite that cannot go on.
pub type Failure = Box<dyn std::error::Error>;

/// How much is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// What the suites promise.
    Full,
    /// A part of it that a gate can wait for.
    Quick,
}

/// What the suites run on.
#[derive(Clone, Debug)]
pub struct Options {
    /// Backend.
    pub which: Which,
    /// Model.
    pub source: Source,
    /// Profiles.
    pub profiles: Vec<Profile>,
    /// Seed of prompts, rules and schedules.
    pub seed: u64,
    /// Folder to search first for the compiler.
    pub libraries: Option<PathBuf>,
    /// Folder of kernel sources that replace embedded ones.
    pub kernels: Option<PathBuf>,
    /// Folder of compiled kernels.
    pub cache_dir: Option<PathBuf>,
    /// Fuzz sets of `packed`.
    pub sets: usize,
    /// Most generated tokens of a sequence in `packed`.
    pub steps: usize,
    /// (i, n): plays only every n-th piece of `packed` and `cancel`, from the i-th on, counted from 1.
    pub part: (usize, usize),
    /// How much is played.
    pub extent: Extent,
}

/// A suite over whole models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// The GPU's logits at every position are the CPU's, on every geometry.
    Model,
    /// Paged against contiguous storage with the attention of the definitions.
    Paged,
    /// Graphs against kernel by kernel.
    Graph,
    /// Batch sizes 1 to 16, both orders, shrinking.
    Batch,
    /// Lengths, offsets and chunks of one prompt.
    Prefill,
    /// Graphs of single prompts, past the bound of the cache, and refused ones.
    PrefillGraph,
    /// Fuzzed packed prefill and mixed steps, batches that shrink and grow, cancellation.
    Packed,
    /// The part of `Packed` that cancels.
    Cancel,
    /// A pool of 32 pages.
    Pressure,
    /// Every position of many prompts, solo against crowded, cold against warm.
    Invariance,
    /// Every rule: crafted logits, then whole models, solo against crowded.
    Sampling,
}

impl Suite {
    /// Every suite, in the order of `all`; `Cancel` is inside `Packed`.
    pub const ALL: [Suite; 10] = [
        Suite::Model,
        Suite::Paged,
        Suite::Graph,
        Suite::Batch,
        Suite::Prefill,
        Suite::PrefillGraph,
        Suite::Packed,
        Suite::Pressure,
        Suite::Invariance,
        Suite::Sampling,
    ];

    /// Runs it; returns the failures.
    ///
    /// # Errors
    /// A backend that does not open, a refused plan, a failed step.
    pub fn run(self, options: &Options) -> Result<u64, Failure> {
        if self == Suite::Model {
            return model::run(options);
        }
        let gpu_only = matches!(self, Suite::Graph | Suite::PrefillGraph);
        if gpu_only && options.which == Which::Cpu {
            say!("{self:?}: skipped, the cpu has no graphs");
            return Ok(0);
        }
        let mut failures = 0;
        for &profile in &options.profiles {
            let mut stage = Stage::new(self, profile, options)?;
            match self {
                Suite::Paged => schedules::paged(&mut stage)?,
                Suite::Graph => graphs::decode(&mut stage)?,
                Suite::Batch => schedules::batch(&mut stage)?,
                Suite::Prefill => schedules::prefill(&mut stage)?,
                Suite::PrefillGraph => graphs::prefill(&mut stage)?,
                Suite::Packed => packed::run(&mut stage, packed::Pieces::All)?,
                Suite::Cancel => packed::run(&mut stage, packed::Pieces::Cancellations)?,
                Suite::Pressure => schedules::pressure(&mut stage)?,
                Suite::Invariance => schedules::invariance(&mut stage)?,
                Suite::Sampling => selection::run(&mut stage)?,
                Suite::Model => {}
            }
            stage.print();
            failures += stage.tally.failures();
        }
        Ok(failures)
    }
}

/// One suite in one profile.
struct Stage<'a> {
    options: &'a Options,
    profile: Profile,
    weights: ModelWeights,
    dice: Dice,
    tally: Tally,
    counts: Counts,
    sequences: u64,
    /// The CPU beside a GPU under test.
    witness: Option<Player>,
}

impl<'a> Stage<'a> {
    fn new(suite: Suite, profile: Profile, options: &'a Options) -> Result<Self, Failure> {
        let weights = options.source.weights(profile, MatrixFormat::Q8_0)?;
        let name = format!("{suite:?} {} {} {:?}", profile.name(), options.source.name(), options.which);
        Ok(Self::over(weights, name, Dice::new(options.seed ^ ((suite as u64) << 32)), profile, options))
    }

    fn over(weights: ModelWeights, name: String, dice: Dice, profile: Profile, options: &'a Options) -> Self {
        let (tally, counts) = (Tally::new(name, options.seed), Counts::default());
        Self { options, profile, weights, dice, tally, counts, sequences: 0, witness: None }
    }

    fn print(&self) {
        let Counts { steps, packed, tokens, seen, .. } = &self.counts;
        say!("  {} sequences played, {steps} steps, {packed} packed, {tokens} token rows", self.sequences);
        say!(
            "  {} steps with prefill and decode rows, {} with poison before them, {} tokens held against the definition of selection",
            seen.mixed,
            seen.poisoned,
            seen.defined
        );
        self.tally.print();
    }

    fn geometry(&self) -> &Geometry {
        &self.weights.geometry
    }

    /// `full`, or less of it when the extent is quick.
    fn amount(&self, full: usize, quick: usize) -> usize {
        if self.options.extent == Extent::Full { full } else { quick }
    }

    fn setup(&self) -> Setup {
        Setup {
            which: self.options.which,
            pages: 2048,
            slots: 16,
            tokens: 1280,
            logit_rows: 16,
            graphs: GraphLimits::default(),
            libraries: self.options.libraries.clone(),
            kernels: self.options.kernels.clone(),
            cache_dir: self.options.cache_dir.clone(),
        }
    }

    fn open(&self, setup: &Setup) -> Result<Player, Failure> {
        Ok(Player::new(Subject::open(self.weights.clone(), self.profile, setup)?).poisoned())
    }

    fn prompt(&mut self, len: usize) -> Vec<u32> {
        let vocab = self.geometry().vocab;
        (0..len).map(|_| self.dice.below(vocab) as u32).collect()
    }

    fn rule(&mut self) -> Rule {
        let top_k = self.dice.pick(&[0, 5, 40, 128, 500]);
        if top_k == 0 {
            return Rule::Greedy;
        }
        Rule::Sampled {
            inv_temperature: self.dice.pick(&[1.0, 1.25]),
            top_k: NonZeroU32::new(top_k),
            top_p: top_p_fixed(self.dice.pick(&[1.0, 0.95])),
            min_p: 0.0,
        }
    }

    fn sequence(&mut self, len: usize, generate: usize) -> Sequence {
        let (prompt, rule, seed) = (self.prompt(len), self.rule(), self.dice.bits());
        Sequence { prompt, generate, rule, seed, adjust: None, cancel_after: None }
    }

    fn play(&mut self, player: &mut Player, sequences: &[Sequence], style: &Style) -> Result<Vec<Trace>, Failure> {
        Ok(self.play_seen(player, sequences, style)?.0)
    }

    /// Plays, and says which shapes this play had.
    fn play_seen(
        &mut self,
        player: &mut Player,
        sequences: &[Sequence],
        style: &Style,
    ) -> Result<(Vec<Trace>, Seen), Failure> {
        let (traces, counts) = player.play(sequences, style)?;
        self.counts.steps += counts.steps;
        self.counts.packed += counts.packed;
        self.counts.tokens += counts.tokens;
        self.counts.seen.absorb(&counts.seen);
        self.sequences += sequences.len() as u64;
        Ok((traces, counts.seen))
    }

    /// The traces that every schedule must give: each sequence alone; under a GPU they are held against the CPU's.
    fn solo(&mut self, player: &mut Player, sequences: &[Sequence], observe: Observe) -> Result<Vec<Trace>, Failure> {
        let alone = self.play(player, sequences, &Style::solo(observe))?;
        self.witnessed(sequences, &alone, observe)?;
        Ok(alone)
    }

    /// Holds traces of a GPU against the CPU's, except on the seed's geometry, which would take a CPU minutes.
    fn witnessed(&mut self, sequences: &[Sequence], got: &[Trace], observe: Observe) -> Result<(), Failure> {
        if self.options.which == Which::Cpu || self.options.source == Source::Shape(Shape::Seed) {
            return Ok(());
        }
        if self.witness.is_none() {
            let setup = Setup { which: Which::Cpu, pages: 4096, slots: 64, ..self.setup() };
            self.witness = Some(Player::new(Subject::open(self.weights.clone(), self.profile, &setup)?));
        }
        let crowded = Style { resident: 16, budget: 512, pages: Pages::Shuffled, ..Style::solo(observe) };
        if let Some(witness) = &mut self.witness {
            let (want, _) = witness.play(sequences, &crowded)?;
            self.expect("GPU = CPU", sequences, got, &want);
        }
        Ok(())
    }

    fn expect(&mut self, what: &str, sequences: &[Sequence], got: &[Trace], want: &[Trace]) {
        for (i, ((got, want), s)) in got.iter().zip(want).zip(sequences).enumerate() {
            self.tally.values += got.logits.len() as u64;
            self.tally.case(same_trace(got, want, s).map_err(|e| {
                format!("{what}, sequence {i} (prompt {}, generate {}): {e}", s.prompt.len(), s.generate)
            }));
        }
    }

    /// Counts one case: a shape that the suite promises was reached.
    fn reached(&mut self, what: &str, holds: impl Into<bool>) {
        let outcome = if holds.into() { Ok(()) } else { Err(format!("not reached: {what}")) };
        self.tally.case(outcome);
    }
}

/// A cancelled sequence must have got exactly the beginning of what it would have got.
fn same_trace(got: &Trace, want: &Trace, sequence: &Sequence) -> Result<(), String> {
    if let Some(fault) = got.faults.first() {
        return Err(format!("{fault} ({} faults)", got.faults.len()));
    }
    let stop = sequence.cancel_after.map_or(sequence.generate, |c| c.min(sequence.generate));
    let cut = want.tokens.len().saturating_sub(stop);
    let (tokens, draws) = (&want.tokens[..want.tokens.len() - cut], &want.draws[..want.draws.len() - cut]);
    let logits = &want.logits[..want.logits.len().saturating_sub(cut)];
    if let Some(i) = got.logits.iter().zip(logits).position(|(g, w)| g != w) {
        return Err(format!("the logits of observed position {i} differ"));
    }
    if got.tokens != tokens {
        return Err(format!("tokens {:?}, wanted {tokens:?}", got.tokens));
    }
    if got.draws != draws {
        return Err(format!("drawn at {:?}, wanted {draws:?}", got.draws));
    }
    if got.logits.len() != logits.len() {
        return Err(format!("{} observed positions, wanted {}", got.logits.len(), logits.len()));
    }
    Ok(())
}

const SOLO: Observe = Observe::Generated;

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(cancel_after: Option<usize>) -> Sequence {
        Sequence { prompt: vec![1, 2], generate: 3, rule: Rule::Greedy, seed: 1, adjust: None, cancel_after }
    }

    fn trace(n: usize) -> Trace {
        let tokens: Vec<u32> = (0..n as u32).collect();
        Trace { logits: vec![7; n], draws: tokens.clone(), tokens, faults: vec![] }
    }

    #[test]
    fn a_trace_that_is_short_long_different_or_faulty_is_not_the_same() {
        assert_eq!(same_trace(&trace(3), &trace(3), &sequence(None)), Ok(()));
        assert!(same_trace(&trace(2), &trace(3), &sequence(None)).is_err());
        assert!(same_trace(&trace(3), &trace(2), &sequence(None)).is_err());
        for field in 0..4 {
            let mut other = trace(3);
            match field {
                0 => other.tokens[2] = 9,
                1 => other.logits[2] = 9,
                2 => other.draws[2] = 9,
                _ => other.faults.push("a fault".into()),
            }
            assert!(same_trace(&other, &trace(3), &sequence(None)).is_err(), "field {field}");
        }
    }

    #[test]
    fn a_cancelled_sequence_has_exactly_the_beginning() {
        assert_eq!(same_trace(&trace(1), &trace(3), &sequence(Some(1))), Ok(()));
        assert_eq!(same_trace(&trace(0), &trace(3), &sequence(Some(0))), Ok(()));
        assert!(same_trace(&trace(2), &trace(3), &sequence(Some(1))).is_err());
        assert!(same_trace(&trace(0), &trace(3), &sequence(Some(1))).is_err());
    }
}
