//! The suites that vary one thing about a schedule: pages, batch size, slices, the size of the pool, the crowd.

use super::{Failure, SOLO, Stage};
use crate::backend::Rule;
use crate::backend::cuda::GraphLimits;
use crate::check::models::{EAGER, Setup, Which};
use crate::check::play::{Observe, Pages, Sequence, Style, Trace, digest};
use crate::check::reference::Reference;

/// Contiguous storage by the definitions = pages in order = pages in any order, kernel by kernel and (on a GPU) with graphs.
pub(super) fn paged(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let lens: &[usize] =
        if stage.amount(1, 0) == 1 { &[1, 15, 16, 17, 100, 255, 257, 300, 530] } else { &[1, 15, 16, 17, 50, 257] };
    let sequences: Vec<Sequence> = lens.iter().map(|&n| stage.sequence(n, 20)).collect();
    let ways: &[(&str, GraphLimits)] = match stage.options.which {
        Which::Cpu => &[("cpu", EAGER)],
        Which::Cuda => &[("eager", EAGER), ("graph", GraphLimits { decode: 64, singleton: 64, packed: 0 })],
    };
    for &(way, graphs) in ways {
        let mut player = stage.open(&Setup { graphs, ..stage.setup() })?;
        let want = stage.solo(&mut player, &sequences, SOLO)?;
        let positions = by_definition(stage, &sequences, &want);
        say!("  {way}: {positions} positions by the definitions on contiguous storage");
        for round in 1..4 {
            let shuffled = Style { pages: Pages::Shuffled, shuffle: round, ..Style::solo(SOLO) };
            let got = stage.play(&mut player, &sequences, &shuffled)?;
            stage.expect("shuffled pages", &sequences, &got, &want);
        }
    }
    let crossings = stage.counts.seen.crossings;
    stage.reached("decode across a page's edge", crossings > 0);
    Ok(())
}

/// Holds the generated positions of short prompts against `Reference`; returns how many.
fn by_definition(stage: &mut Stage<'_>, sequences: &[Sequence], traces: &[Trace]) -> usize {
    if stage.geometry().layers * stage.geometry().hidden > 4096 {
        return 0;
    }
    let reference = Reference::new(&stage.weights, stage.profile);
    let short: Vec<(&Sequence, &Trace)> = sequences.iter().zip(traces).filter(|(s, _)| s.prompt.len() <= 260).collect();
    let wanted: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let one = |&(s, t): &(&Sequence, &Trace)| {
            let reference = &reference;
            let tokens: Vec<u32> = s.prompt.iter().chain(&t.tokens[..t.tokens.len() - 1]).copied().collect();
            let from = s.prompt.len() - 1;
            scope.spawn(move || reference.logits(&tokens, from).iter().map(|l| digest(l)).collect())
        };
        let threads: Vec<_> = short.iter().map(one).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_default()).collect()
    });
    for ((s, trace), want) in short.iter().zip(&wanted) {
        let same = &trace.logits == want;
        stage.tally.values += want.len() as u64;
        let what = format!("a prompt of {} differs from the definitions on contiguous storage", s.prompt.len());
        stage.tally.case(if same { Ok(()) } else { Err(what) });
    }
    wanted.iter().map(Vec::len).sum()
}

/// Sizes 1 to 16 in both orders, sixteen mixed shrinking to eight, twelve sequences through five slots.
pub(super) fn batch(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut players = vec![stage.open(&stage.setup())?];
    if stage.options.which == Which::Cuda {
        players.push(stage.open(&Setup { graphs: EAGER, ..stage.setup() })?);
    }
    let longest = stage.amount(200, 60);
    let mut compared = 0;
    for batch in 1..=16 {
        let mut sequences: Vec<Sequence> = (0..batch)
            .map(|i| {
                let len = stage.dice.between(1, longest);
                // Half of a full batch ends early: sixteen shrink to eight.
                stage.sequence(len, if i % 2 == 0 { 10 } else { 4 })
            })
            .collect();
        let mut want = stage.solo(&mut players[0], &sequences, SOLO)?;
        let style =
            Style { resident: batch, budget: 600, pages: Pages::Shuffled, shuffle: batch as u64, ..Style::solo(SOLO) };
        // Every prompt is in before the first decode row: the batch is whole.
        let style = Style { walk: &[16], ..style };
        for order in ["in order", "reversed"] {
            for (way, player) in players.iter_mut().enumerate() {
                let (got, seen) = stage.play_seen(player, &sequences, &style)?;
                stage.expect(&format!("batch {batch}, {order}, way {way}"), &sequences, &got, &want);
                compared += sequences.len();
                let shrank = batch < 16 || seen.walk.windows(2).any(|w| w == [16, 8]);
                stage.reached("sixteen decode rows, then eight", shrank);
                stage.reached(&format!("a decode step of {batch} rows"), seen.batches(batch) > 0);
            }
            sequences.reverse();
            want.reverse();
        }
    }
    let sequences: Vec<Sequence> = (0..12).map(|i| stage.sequence(3 + 7 * i, 6)).collect();
    let want = stage.solo(&mut players[0], &sequences, SOLO)?;
    let style = Style { resident: 5, budget: 64, ahead: 2, ..Style::solo(SOLO) };
    for player in &mut players {
        let (got, seen) = stage.play_seen(player, &sequences, &style)?;
        stage.expect("five slots", &sequences, &got, &want);
        stage.reached("five residents and no more", seen.resident_most == 5);
        compared += sequences.len();
    }
    let sizes: Vec<usize> = (1..=16).map(|n| stage.counts.seen.batches(n)).collect();
    say!("  {compared} sequences compared {} ways; decode steps of 1 to 16 rows: {sizes:?}", players.len());
    stage.reached("64 sequences", compared >= 64);
    Ok(())
}

const LENGTHS: [usize; 27] = [
    1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 700, 941, 1100,
];

/// Lengths at every edge, each cut into chunks, so that slices start at many offsets; every other prompt is sampled.
pub(super) fn prefill(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut player = stage.open(&stage.setup())?;
    let longest = stage.amount(2000, 300);
    let mut sequences: Vec<Sequence> =
        LENGTHS.iter().filter(|&&n| n <= longest).map(|&n| stage.sequence(n, 3)).collect();
    sequences.iter_mut().step_by(2).for_each(|s| s.rule = Rule::Greedy);
    let want = stage.solo(&mut player, &sequences, SOLO)?;
    for chunk in [1, 5, 16, 37, 64, 131, 256, 1000] {
        let short = if chunk > 5 { usize::MAX } else { stage.amount(130, 34) };
        let chosen: Vec<usize> = (0..sequences.len()).filter(|&i| sequences[i].prompt.len() < short).collect();
        let some: Vec<Sequence> = chosen.iter().map(|&i| sequences[i].clone()).collect();
        let wanted: Vec<Trace> = chosen.iter().map(|&i| want[i].clone()).collect();
        for pages in [Pages::Ascending, Pages::Shuffled] {
            let style = Style { chunk, ahead: 2, pages, ..Style::solo(SOLO) };
            let got = stage.play(&mut player, &some, &style)?;
            stage.expect(&format!("chunk {chunk}"), &some, &got, &wanted);
        }
    }
    let sampled = sequences.iter().filter(|s| s.rule != Rule::Greedy).count();
    say!(
        "  {} lengths, {sampled} of them sampled, chunks 1 5 16 37 64 131 256 1000, pages in order and reused",
        sequences.len()
    );
    stage.reached("sampled prompts", sampled > 0);
    Ok(())
}

/// A pool of 32 pages: admission waits for pages, decode grows across their edges, every sequence is exact.
pub(super) fn pressure(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut player = stage.open(&Setup { pages: 32, slots: 8, ..stage.setup() })?;
    let sequences: Vec<Sequence> = (0..24)
        .map(|_| {
            let len = stage.dice.between(1, 100);
            stage.sequence(len, 40)
        })
        .collect();
    let want = stage.solo(&mut player, &sequences, SOLO)?;
    for shuffle in 1..=stage.amount(3, 1) as u64 {
        let style = Style {
            budget: 128,
            chunk: 64,
            resident: 8,
            ahead: 2,
            shuffle,
            pages: Pages::Shuffled,
            ..Style::solo(SOLO)
        };
        let (got, seen) = stage.play_seen(&mut player, &sequences, &style)?;
        stage.expect("pressure", &sequences, &got, &want);
        say!(
            "  {} of 32 pages in use at most, admission waited for pages in {} steps, {} decode rows began a page",
            seen.pages_most,
            seen.blocked,
            seen.crossings
        );
        stage.reached("a full pool", seen.pages_most >= 28);
        stage.reached("admission that waits for pages", seen.blocked > 0);
        stage.reached("decode growth", seen.crossings >= 24);
    }
    Ok(())
}

/// At least 10,000 positions: alone, crowded twice, alone again on the warm backend, and some on a fresh one.
pub(super) fn invariance(stage: &mut Stage<'_>) -> Result<(), Failure> {
    // Whole prompts are scored at once.
    let setup = Setup { logit_rows: 1280, ..stage.setup() };
    let mut player = stage.open(&setup)?;
    let (least, longest) = (stage.amount(10_500, 2_000), stage.amount(600, 300));
    let mut sequences = Vec::new();
    let mut planned = 0;
    while planned < least {
        let len = stage.dice.between(1, longest);
        let generate = stage.dice.between(1, 20);
        planned += len + generate - 1;
        sequences.push(Sequence { rule: Rule::Greedy, ..stage.sequence(len, generate) });
    }
    let want = stage.solo(&mut player, &sequences, Observe::Everything)?;
    let style = Style { budget: 512, ahead: 2, pages: Pages::Shuffled, ..Style::solo(Observe::Everything) };
    for (shuffle, resident, chunk) in [(1, 16, 64), (2, 5, 131)] {
        let got = stage.play(&mut player, &sequences, &Style { shuffle, resident, chunk, ..style })?;
        stage.expect("crowded", &sequences, &got, &want);
    }
    let few = sequences.len().min(8);
    let warm = stage.play(&mut player, &sequences[..few], &Style::solo(Observe::Everything))?;
    stage.expect("warm, after the crowd", &sequences[..few], &warm, &want[..few]);
    drop(player);
    let mut fresh = stage.open(&setup)?;
    let cold = stage.play(&mut fresh, &sequences[..few], &Style { resident: few, chunk: 37, ..style })?;
    stage.expect("cold, on a fresh backend", &sequences[..few], &cold, &want[..few]);
    let positions: usize = want.iter().map(|t| t.logits.len()).sum();
    say!("  logits of {positions} positions, each alone and crowded twice; {few} sequences warm and cold");
    stage.reached("the promised positions", positions >= stage.amount(10_000, 2_000));
    Ok(())
}
