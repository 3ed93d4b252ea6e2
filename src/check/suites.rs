//! The suites over whole models: the same sequences under different schedules must leave the same traces, and the GPU's must be the CPU's.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;

use super::kernels::adjust::adjust;
use super::models::{EAGER, Setup, Shape, Subject, Which, weights};
use super::play::{Counts, Observe, Pages, Player, Sequence, Style, Trace};
use super::{Dice, Tally};
use crate::arith::rule::top_p_fixed;
use crate::backend::cuda::GraphLimits;
use crate::backend::{Backend, Rule};
use crate::model::{MatrixFormat, Profile};

/// A suite that cannot go on.
pub type Failure = Box<dyn std::error::Error>;

/// What the suites run on.
#[derive(Clone, Debug)]
pub struct Options {
    /// Backend.
    pub which: Which,
    /// Geometry.
    pub shape: Shape,
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
}

/// A suite over whole models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// The GPU's logits at every position are the CPU's, on every geometry.
    Model,
    /// Contiguous pages against shuffled pages.
    Paged,
    /// Graphs against kernel by kernel.
    Graph,
    /// Batch sizes 1 to 16, both orders, shrinking.
    Batch,
    /// Lengths, offsets and chunks of one prompt.
    Prefill,
    /// Graphs of single prompts, past the bound of the cache.
    PrefillGraph,
    /// Fuzzed packed prefill and mixed steps.
    Packed,
    /// Cancellation with immediate page reuse.
    Cancel,
    /// A pool of 32 pages.
    Pressure,
    /// Every position of many prompts, solo against crowded.
    Invariance,
    /// Every rule through the whole model, solo against crowded.
    Sampling,
}

impl Suite {
    /// Every suite, in the order of `all`.
    pub const ALL: [Suite; 11] = [
        Suite::Model,
        Suite::Paged,
        Suite::Graph,
        Suite::Batch,
        Suite::Prefill,
        Suite::PrefillGraph,
        Suite::Packed,
        Suite::Cancel,
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
            return model(options);
        }
        let gpu_only = matches!(self, Suite::Graph | Suite::PrefillGraph);
        if gpu_only && options.which == Which::Cpu {
            println!("{self:?}: skipped, the cpu has no graphs");
            return Ok(0);
        }
        let mut failures = 0;
        for &profile in &options.profiles {
            let mut stage = Stage::new(self, profile, options);
            match self {
                Suite::Paged => paged(&mut stage)?,
                Suite::Graph => graph(&mut stage)?,
                Suite::Batch => batch(&mut stage)?,
                Suite::Prefill => prefill(&mut stage)?,
                Suite::PrefillGraph => prefill_graph(&mut stage)?,
                Suite::Packed => packed(&mut stage)?,
                Suite::Cancel => cancel(&mut stage)?,
                Suite::Pressure => pressure(&mut stage)?,
                Suite::Invariance => invariance(&mut stage)?,
                Suite::Sampling => sampling(&mut stage)?,
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
    dice: Dice,
    tally: Tally,
    counts: Counts,
    sequences: u64,
}

impl<'a> Stage<'a> {
    fn new(suite: Suite, profile: Profile, options: &'a Options) -> Self {
        let name = format!("{suite:?} {} {:?} {:?}", profile.name(), options.shape, options.which);
        let dice = Dice::new(options.seed ^ ((suite as u64) << 32));
        Self { options, profile, dice, tally: Tally::new(name, options.seed), counts: Counts::default(), sequences: 0 }
    }

    fn print(&self) {
        let Counts { steps, packed, tokens, .. } = &self.counts;
        println!("  {} sequences played, {steps} steps, {packed} packed, {tokens} token rows", self.sequences);
        self.tally.print();
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
        let weights = weights(self.options.shape, self.profile, MatrixFormat::Q8_0, 1);
        Ok(Player::new(Subject::open(weights, self.profile, setup)?))
    }

    fn prompt(&mut self, len: usize) -> Vec<u32> {
        let vocab = self.options.shape.geometry().vocab;
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
        let (traces, counts) = player.play(sequences, style)?;
        self.counts.steps += counts.steps;
        self.counts.packed += counts.packed;
        self.counts.tokens += counts.tokens;
        self.sequences += sequences.len() as u64;
        Ok(traces)
    }

    fn expect(&mut self, what: &str, sequences: &[Sequence], got: &[Trace], want: &[Trace]) {
        for (i, ((got, want), s)) in got.iter().zip(want).zip(sequences).enumerate() {
            let limit = s.cancel_after.map_or(usize::MAX, |c| c.max(1));
            self.tally.values += got.logits.len() as u64;
            self.tally.case(same_trace(got, want, limit).map_err(|e| {
                format!("{what}, sequence {i} (prompt {}, generate {}): {e}", s.prompt.len(), s.generate)
            }));
        }
    }
}

/// `limit` tokens at most are compared: a cancelled sequence stops early.
fn same_trace(got: &Trace, want: &Trace, limit: usize) -> Result<(), String> {
    let cut = |n: usize| n.min(limit);
    if let Some(i) = got.logits.iter().zip(&want.logits).position(|(g, w)| g != w) {
        return Err(format!("the logits of observed position {i} differ"));
    }
    if got.tokens[..cut(got.tokens.len())] != want.tokens[..cut(want.tokens.len()).min(got.tokens.len())] {
        return Err(format!("tokens {:?}, wanted {:?}", got.tokens, want.tokens));
    }
    if limit == usize::MAX && (got.tokens.len(), got.logits.len()) != (want.tokens.len(), want.logits.len()) {
        return Err(format!("{} tokens, wanted {}", got.tokens.len(), want.tokens.len()));
    }
    Ok(())
}

const SOLO: Observe = Observe::Generated;

/// GPU against CPU at every position, in every format of every profile.
fn model(options: &Options) -> Result<u64, Failure> {
    let mut failures = 0;
    let formats = [
        (Profile::F32, MatrixFormat::F32),
        (Profile::Int8, MatrixFormat::F32),
        (Profile::Q8, MatrixFormat::Q8_0),
        (Profile::Q8, MatrixFormat::Q4_0),
        (Profile::Q8, MatrixFormat::Q4_1),
    ];
    for shape in Shape::ALL {
        for (profile, format) in formats {
            let on = Options { shape, ..options.clone() };
            let mut stage = Stage::new(Suite::Model, profile, &on);
            stage.tally.name = format!("Model {} {format:?} {shape:?} Cuda = Cpu", profile.name());
            let lens: &[usize] =
                if shape == Shape::Seed { &[1, 37, 290] } else { &[1, 7, 16, 33, 64, 130, 257, 300, 520, 1100] };
            let sequences: Vec<Sequence> =
                lens.iter().map(|&n| Sequence { rule: Rule::Greedy, ..stage.sequence(n, 4) }).collect();
            let style = Style::solo(Observe::Everything);
            let crowded =
                Style { resident: 8, budget: 512, chunk: 100, ahead: 2, shuffle: 9, pages: Pages::Shuffled, ..style };
            let setup = |which| Setup { which, logit_rows: 1280, ..stage.setup() };
            let (cpu, cuda) = (setup(Which::Cpu), setup(Which::Cuda));
            let open = |setup: &Setup| -> Result<Player, Failure> {
                Ok(Player::new(Subject::open(weights(shape, profile, format, 1), profile, setup)?))
            };
            let want = stage.play(&mut open(&cpu)?, &sequences, &style)?;
            let mut gpu = open(&cuda)?;
            let solo = stage.play(&mut gpu, &sequences, &style)?;
            stage.expect("solo", &sequences, &solo, &want);
            let together = stage.play(&mut gpu, &sequences, &crowded)?;
            stage.expect("crowded", &sequences, &together, &want);
            stage.print();
            failures += stage.tally.failures();
        }
    }
    Ok(failures)
}

fn paged(stage: &mut Stage<'_>) -> Result<(), Failure> {
    for graphs in [EAGER, GraphLimits::default()] {
        let mut player = stage.open(&Setup { graphs, ..stage.setup() })?;
        let sequences: Vec<Sequence> =
            [1, 15, 16, 17, 100, 255, 257, 300, 530].map(|n| stage.sequence(n, 20)).into_iter().collect();
        let style = Style::solo(SOLO);
        let want = stage.play(&mut player, &sequences, &style)?;
        for round in 1..4 {
            let shuffled = Style { pages: Pages::Shuffled, shuffle: round, ..style };
            let got = stage.play(&mut player, &sequences, &shuffled)?;
            stage.expect("shuffled pages", &sequences, &got, &want);
        }
    }
    Ok(())
}

fn graph(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut eager = stage.open(&Setup { graphs: EAGER, ..stage.setup() })?;
    let mut graphs = stage.open(&stage.setup())?;
    for batch in 1..=16 {
        for round in 1..=2 {
            let sequences: Vec<Sequence> = (0..batch)
                .map(|_| {
                    let len = stage.dice.between(1, 90);
                    stage.sequence(len, 12)
                })
                .collect();
            let style = Style {
                resident: batch,
                budget: 1200,
                ahead: 2,
                shuffle: round,
                pages: Pages::Shuffled,
                ..Style::solo(SOLO)
            };
            let want = stage.play(&mut eager, &sequences, &style)?;
            let got = stage.play(&mut graphs, &sequences, &style)?;
            stage.expect(&format!("batch {batch}"), &sequences, &got, &want);
        }
    }
    let replays = graphs.subject.counts().all_graphs().replays;
    let none = eager.subject.counts().all_graphs().replays;
    println!("  {replays} replays with graphs, {none} without");
    stage.tally.case(if replays > 0 && none == 0 { Ok(()) } else { Err("graphs were not used as asked".into()) });
    Ok(())
}

fn batch(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut player = stage.open(&stage.setup())?;
    let mut eager = stage.open(&Setup { graphs: EAGER, ..stage.setup() })?;
    for batch in 1..=16 {
        let mut sequences: Vec<Sequence> = (0..batch)
            .map(|i| {
                let len = stage.dice.between(1, 200);
                // Half of a full batch ends early: sixteen shrink to eight.
                stage.sequence(len, if i % 2 == 0 { 10 } else { 4 })
            })
            .collect();
        let mut want = stage.play(&mut player, &sequences, &Style::solo(SOLO))?;
        let style =
            Style { resident: batch, budget: 600, pages: Pages::Shuffled, shuffle: batch as u64, ..Style::solo(SOLO) };
        for round in 0..2 {
            let got = stage.play(&mut player, &sequences, &style)?;
            stage.expect(&format!("batch {batch}, order {round}"), &sequences, &got, &want);
            let got = stage.play(&mut eager, &sequences, &style)?;
            stage.expect(&format!("batch {batch}, order {round}, eager"), &sequences, &got, &want);
            sequences.reverse();
            want.reverse();
        }
    }
    // Twelve sequences through five slots.
    let sequences: Vec<Sequence> = (0..12).map(|i| stage.sequence(3 + 7 * i, 6)).collect();
    let want = stage.play(&mut player, &sequences, &Style::solo(SOLO))?;
    let style = Style { resident: 5, budget: 64, ahead: 2, ..Style::solo(SOLO) };
    let got = stage.play(&mut player, &sequences, &style)?;
    stage.expect("five slots", &sequences, &got, &want);
    Ok(())
}

const LENGTHS: [usize; 27] = [
    1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 700, 941, 1100,
];

fn prefill(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut player = stage.open(&stage.setup())?;
    let sequences: Vec<Sequence> = LENGTHS.map(|n| stage.sequence(n, 3)).into_iter().collect();
    let want = stage.play(&mut player, &sequences, &Style::solo(SOLO))?;
    for chunk in [1, 5, 16, 37, 64, 131, 256, 1000] {
        let chosen: Vec<usize> =
            (0..sequences.len()).filter(|&i| chunk > 5 || sequences[i].prompt.len() < 130).collect();
        let some: Vec<Sequence> = chosen.iter().map(|&i| sequences[i].clone()).collect();
        let wanted: Vec<Trace> = chosen.iter().map(|&i| want[i].clone()).collect();
        let got = stage.play(&mut player, &some, &Style { chunk, ahead: 2, ..Style::solo(SOLO) })?;
        stage.expect(&format!("chunk {chunk}"), &some, &got, &wanted);
    }
    Ok(())
}

fn prefill_graph(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut eager = stage.open(&Setup { graphs: EAGER, ..stage.setup() })?;
    let mut graphs = stage.open(&stage.setup())?;
    for round in 0..3 {
        let sequences: Vec<Sequence> = (0..68).map(|i| stage.sequence(2 + 3 * i, 2)).collect();
        let want = stage.play(&mut eager, &sequences, &Style::solo(SOLO))?;
        let got = stage.play(&mut graphs, &sequences, &Style::solo(SOLO))?;
        stage.expect(&format!("round {round}"), &sequences, &got, &want);
    }
    let counts = graphs.subject.counts().all_graphs();
    println!("  {counts:?}");
    let bounded = counts.evictions > 0 && counts.replays > 0;
    stage.tally.case(if bounded { Ok(()) } else { Err("the cache did not evict or replay".into()) });
    Ok(())
}

fn packed(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut player = stage.open(&stage.setup())?;
    let allocations = player.subject.counts().allocations;
    for set in 0..stage.options.sets {
        let count = stage.dice.between(12, 19);
        let mut sequences: Vec<Sequence> = (0..count)
            .map(|_| {
                let len = match stage.dice.below(4) {
                    0 => stage.dice.between(1, 12),
                    1 | 2 => stage.dice.between(13, 120),
                    _ => stage.dice.between(121, 400),
                };
                let generate = stage.dice.between(1, stage.options.steps);
                stage.sequence(len, generate)
            })
            .collect();
        let mut want = stage.play(&mut player, &sequences, &Style::solo(SOLO))?;
        for (round, chunks) in [[32, 64, 128, 256], [37, 73, 131, 2048], [64, 37, 256, 73]].iter().enumerate() {
            let style = Style {
                budget: stage.dice.pick(&[128, 256, 512, 1024]),
                chunk: chunks[set % 4],
                resident: stage.dice.pick(&[4, 8, 12, 16]),
                ahead: 1 + round % 2,
                shuffle: (set * 3 + round + 1) as u64,
                pages: Pages::Shuffled,
                observe: SOLO,
            };
            let got = stage.play(&mut player, &sequences, &style)?;
            stage.expect(&format!("set {set}, order {round}"), &sequences, &got, &want);
            // A new packing order, the same for the wanted traces.
            let turn = stage.dice.below(count);
            sequences.rotate_left(turn);
            want.rotate_left(turn);
        }
    }
    let after = player.subject.counts().allocations;
    let outcome =
        if after == allocations { Ok(()) } else { Err(format!("{} allocations inside steps", after - allocations)) };
    stage.tally.case(outcome);
    Ok(())
}

fn cancel(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut player = stage.open(&Setup { pages: 160, ..stage.setup() })?;
    for boundary in [0, 1, 3, 6] {
        let mut sequences: Vec<Sequence> = (0..24)
            .map(|_| {
                let len = stage.dice.between(2, 150);
                stage.sequence(len, 10)
            })
            .collect();
        let want = stage.play(&mut player, &sequences, &Style::solo(SOLO))?;
        sequences.iter_mut().step_by(2).for_each(|s| s.cancel_after = Some(boundary));
        sequences[1].generate = 1;
        let style =
            Style { budget: 100, chunk: 64, resident: 8, ahead: 2, shuffle: 5, pages: Pages::Shuffled, observe: SOLO };
        let got = stage.play(&mut player, &sequences, &style)?;
        let want: Vec<Trace> = want
            .iter()
            .enumerate()
            .map(|(i, t)| {
                let keep = if i == 1 { 1 } else { usize::MAX };
                Trace {
                    tokens: t.tokens.iter().copied().take(keep).collect(),
                    logits: t.logits.iter().copied().take(keep).collect(),
                }
            })
            .collect();
        stage.expect(&format!("cancel after {boundary}"), &sequences, &got, &want);
    }
    Ok(())
}

fn pressure(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut player = stage.open(&Setup { pages: 32, slots: 8, ..stage.setup() })?;
    let sequences: Vec<Sequence> = (0..24)
        .map(|_| {
            let len = stage.dice.between(1, 100);
            stage.sequence(len, 40)
        })
        .collect();
    let want = stage.play(&mut player, &sequences, &Style::solo(SOLO))?;
    for shuffle in 1..=3 {
        let style =
            Style { budget: 128, chunk: 64, resident: 8, ahead: 2, shuffle, pages: Pages::Shuffled, observe: SOLO };
        let got = stage.play(&mut player, &sequences, &style)?;
        stage.expect("pressure", &sequences, &got, &want);
    }
    Ok(())
}

fn invariance(stage: &mut Stage<'_>) -> Result<(), Failure> {
    // Whole prompts are scored at once.
    let mut player = stage.open(&Setup { logit_rows: 1280, ..stage.setup() })?;
    let mut sequences = Vec::new();
    let mut positions = 0;
    while positions < 11_000 {
        let len = stage.dice.between(1, 600);
        let generate = stage.dice.between(1, 20);
        positions += len + generate - 1;
        sequences.push(Sequence { rule: Rule::Greedy, ..stage.sequence(len, generate) });
    }
    let want = stage.play(&mut player, &sequences, &Style::solo(Observe::Everything))?;
    for (shuffle, resident, chunk) in [(1, 16, 64), (2, 5, 131)] {
        let style = Style {
            budget: 512,
            chunk,
            resident,
            ahead: 2,
            shuffle,
            pages: Pages::Shuffled,
            observe: Observe::Everything,
        };
        let got = stage.play(&mut player, &sequences, &style)?;
        stage.expect("crowded", &sequences, &got, &want);
    }
    println!("  {positions} positions");
    Ok(())
}

fn sampling(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut player = stage.open(&stage.setup())?;
    let vocab = stage.options.shape.geometry().vocab as u32;
    let mut sequences = Vec::new();
    for top_k in [0, 1, 5, 40, 128, 500, vocab] {
        for (top_p, min_p) in [(1.0, 0.0), (0.9, 0.0), (1.0, 0.1), (0.5, 0.02)] {
            let rule = Rule::Sampled {
                inv_temperature: stage.dice.pick(&[0.7, 1.0, 2.0]),
                top_k: NonZeroU32::new(top_k),
                top_p: top_p_fixed(top_p),
                min_p,
            };
            let len = stage.dice.between(1, 60);
            sequences.push(Sequence { rule, ..stage.sequence(len, 16) });
            // The same rule after penalties and bias, and greedily.
            let vocab = vocab as usize;
            let adjust = (0..2).map(|_| Some(Arc::new(adjust(&mut stage.dice, vocab)))).collect::<Vec<_>>();
            for (rule, adjust) in [rule, Rule::Greedy].into_iter().zip(adjust) {
                sequences.push(Sequence { rule, adjust, ..stage.sequence(len, 24) });
            }
        }
    }
    let want = stage.play(&mut player, &sequences, &Style::solo(Observe::Tokens))?;
    let style = Style {
        budget: 256,
        chunk: 37,
        resident: 16,
        ahead: 2,
        shuffle: 3,
        pages: Pages::Shuffled,
        observe: Observe::Tokens,
    };
    let got = stage.play(&mut player, &sequences, &style)?;
    stage.expect("crowded", &sequences, &got, &want);
    Ok(())
}
