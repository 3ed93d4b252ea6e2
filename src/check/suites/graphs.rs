//! Graphs against kernel by kernel (GPU).

use super::{Failure, SOLO, Stage};
use crate::backend::{Backend, GraphCounts};
use crate::check::models::{EAGER, Setup};
use crate::check::play::{Pages, Player, Sequence, Style};

/// Batch sizes, one a slice of a walk.
const SIZES: [usize; 64] = {
    let mut sizes = [0; 64];
    let mut i = 0;
    while i < 64 {
        sizes[i] = i + 1;
        i += 1;
    }
    sizes
};

/// Batches of more rows than a block of the linear kernels takes that the CPU plays, too.
const WITNESSED: [usize; 5] = [17, 31, 32, 48, 64];

fn counts(player: &Player) -> GraphCounts {
    player.subject.counts().all_graphs()
}

/// Every decode batch, twice with other tokens, pages, slots and positions: replay = eager, and for small batches and some large ones = the CPU.
pub(super) fn decode(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let setup = Setup { slots: 64, logit_rows: 64, ..stage.setup() };
    let mut eager = stage.open(&Setup { graphs: EAGER, ..setup.clone() })?;
    let mut graphs = stage.open(&setup)?;
    for batch in 1..=SIZES.len() {
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
                walk: &SIZES[batch - 1..batch],
                ..Style::solo(SOLO)
            };
            let want = stage.play(&mut eager, &sequences, &style)?;
            let got = stage.play(&mut graphs, &sequences, &style)?;
            stage.expect(&format!("batch {batch}"), &sequences, &got, &want);
            if round == 1 && (batch <= 16 || WITNESSED.contains(&batch)) {
                stage.witnessed(&sequences, &got, SOLO)?;
            }
        }
        let steps = stage.counts.seen.batches(batch);
        stage.reached(&format!("forty decode steps of {batch} rows, there were {steps}"), steps >= 40);
    }
    let (with, without) = (counts(&graphs), counts(&eager));
    let decodes = stage.counts.seen.walk.len() / 2;
    say!("  batches 1 to {}, {decodes} decode steps each way; with graphs {with:?}; without {without:?}", SIZES.len());
    stage.reached("a replay for every decode step", with.replays >= decodes as u64);
    stage.reached("no replay without graphs", without.replays == 0);
    Ok(())
}

/// Lengths past the bound of the cache, replays with other tokens and at other offsets, an evicted length, refused recordings.
pub(super) fn prefill(stage: &mut Stage<'_>) -> Result<(), Failure> {
    let mut eager = stage.open(&Setup { graphs: EAGER, ..stage.setup() })?;
    let mut graphs = stage.open(&stage.setup())?;
    let length = |i: usize| 2 + 3 * i;
    let mut both =
        |stage: &mut Stage<'_>, graphs: &mut Player, what: &str, lens: &[usize], chunk| -> Result<_, Failure> {
            let before = counts(graphs);
            let sequences: Vec<Sequence> = lens.iter().map(|&n| stage.sequence(n, 2)).collect();
            let style = Style { chunk, ..Style::solo(SOLO) };
            let want = stage.play(&mut eager, &sequences, &style)?;
            let got = stage.play(graphs, &sequences, &style)?;
            stage.expect(what, &sequences, &got, &want);
            stage.witnessed(&sequences, &got, SOLO)?;
            let after = counts(graphs);
            say!("  {what}: {} lengths, before {before:?}, after {after:?}", lens.len());
            Ok((before, after))
        };
    let all: Vec<usize> = (0..68).map(length).collect();
    let (start, seen) = both(stage, &mut graphs, "first meeting", &all, usize::MAX)?;
    stage.reached("no recording of a length met once", seen.captures == start.captures);
    let (_, recorded) = both(stage, &mut graphs, "second meeting, the 65th and more", &all, usize::MAX)?;
    stage.reached("a recording for each length", recorded.captures == start.captures + 68);
    stage.reached("four evictions past the bound of 64", recorded.evictions == start.evictions + 4);
    let recent: Vec<usize> = (20..60).map(length).collect();
    let (before, reused) = both(stage, &mut graphs, "reuse with other tokens, rules and pages", &recent, usize::MAX)?;
    stage.reached("replays without a recording", reused.captures == before.captures);
    stage.reached("a replay for each reuse", reused.replays >= before.replays + recent.len() as u64);
    let (before, evicted) = both(stage, &mut graphs, "an evicted length", &[length(0), length(0)], usize::MAX)?;
    stage.reached("a new recording of it", evicted.captures == before.captures + 1);
    let (before, offsets) = both(stage, &mut graphs, "slices of 48 at offsets 0 to 960", &[1008, 1000, 500, 240], 48)?;
    stage.reached("one recording a score capacity", offsets.captures - before.captures <= 12);
    stage.reached("replays at other offsets", offsets.replays >= before.replays + 30);

    let mut refusing = stage.open(&stage.setup())?;
    if let Some(cuda) = refusing.subject.cuda_mut() {
        cuda.refuse_captures();
    }
    let lens = [5, 9, 40];
    both(stage, &mut refusing, "refused recordings, first meeting", &lens, usize::MAX)?;
    let (before, failed) = both(stage, &mut refusing, "refused recordings, second meeting", &lens, usize::MAX)?;
    stage.reached("a failure for each length", failed.failures == before.failures + 3);
    let (before, after) = both(stage, &mut refusing, "refused recordings, third meeting", &lens, usize::MAX)?;
    stage.reached(
        "failures that are remembered",
        after.failures == before.failures && after.captures == before.captures,
    );
    Ok(())
}
