//! Fuzzed packed prefill with decode beside it, prompts that end together in given numbers, batches that walk up and down, one-token
//! sequences, and cancellation with immediate reuse of pages: every sequence against itself alone, in logits, tokens and draws.
//!
//! The suite is a list of pieces with their own seeds, so that it can be split over runs without changing a sequence.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use super::{Failure, SOLO, Stage};
use crate::arith::rule::top_p_fixed;
use crate::backend::{Backend, Rule};
use crate::check::Dice;
use crate::check::models::{Setup, Which};
use crate::check::play::{Pages, Player, Sequence, Style, Trace};

/// Which pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pieces {
    All,
    Cancellations,
}

#[derive(Clone, Copy, Debug)]
enum Piece {
    /// A fuzz set by number.
    Set(usize),
    /// So many prompts end in one packed step.
    Ends(usize),
    /// A walk of `WALKS`.
    Walk(usize),
    /// Sequences of one token.
    OneToken,
    /// Every third sequence leaves after so many tokens.
    Cancel(usize),
}

/// The two families of chunks; a set plays one of each.
const EVEN: [usize; 4] = [32, 64, 128, 256];
const ODD: [usize; 3] = [37, 73, 131];
const ENDS: [usize; 6] = [1, 2, 3, 4, 8, 16];
const WALKS: [&[usize]; 2] = [&[16, 1, 8, 2], &[1, 2, 4, 8, 16, 1, 8, 2]];
const BOUNDARIES: [usize; 4] = [0, 1, 3, 6];
/// 0 is greedy.
const TOP_K: [u32; 5] = [0, 5, 40, 128, 500];
const SET: usize = 16;
/// What 24 sets must come to: sequences in packed plays, packed steps.
const LEAST: (u64, u64) = (1084, 878);

/// What the pieces came to.
#[derive(Default)]
struct Totals {
    sequences: u64,
    packed: u64,
    sets: u64,
    orders: BTreeMap<usize, u64>,
    chunks: BTreeMap<usize, u64>,
    ends: BTreeMap<usize, u64>,
    rules: BTreeMap<u32, u64>,
    longest: usize,
    walks: [usize; 2],
    one_token: usize,
    survivors: BTreeMap<usize, usize>,
    rebound: BTreeMap<usize, u64>,
}

struct Run<'s, 'o> {
    stage: &'s mut Stage<'o>,
    player: Player,
    tight: Option<Player>,
    totals: Totals,
}

/// Plays the pieces of this part, prints what was reached, and fails where a promised shape was not.
pub(super) fn run(stage: &mut Stage<'_>, which: Pieces) -> Result<(), Failure> {
    let sets = stage.amount(stage.options.sets, stage.options.sets.min(6));
    let directed = ENDS.map(Piece::Ends).into_iter().chain([0, 1].map(Piece::Walk)).chain([Piece::OneToken]);
    let all = (0..sets).map(Piece::Set).chain(directed).chain(BOUNDARIES.map(Piece::Cancel));
    let (part, parts) = stage.options.part;
    let chosen: Vec<(usize, Piece)> = all
        .enumerate()
        .filter(|(i, piece)| i % parts == part - 1 && (which == Pieces::All || matches!(piece, Piece::Cancel(_))))
        .collect();
    let player = stage.open(&stage.setup())?;
    let allocations = player.subject.counts().allocations;
    let (base, seed) = (stage.dice.bits(), stage.options.seed);
    let mut run = Run { stage, player, tight: None, totals: Totals::default() };
    for (index, piece) in chosen {
        run.stage.dice = Dice::new(base ^ seed ^ ((index as u64 + 1) << 20));
        match piece {
            Piece::Set(set) => run.set(set)?,
            Piece::Ends(count) => run.ends(count)?,
            Piece::Walk(which) => run.walk(which)?,
            Piece::OneToken => run.one_token()?,
            Piece::Cancel(boundary) => run.cancel(boundary)?,
        }
    }
    if run.tight.is_none() {
        let after = run.player.subject.counts().allocations;
        run.stage.reached("no allocation inside a step", after == allocations || run.stage.witness.is_some());
    }
    run.report();
    Ok(())
}

impl Run<'_, '_> {
    fn rule(&mut self, index: usize) -> Rule {
        let top_k = TOP_K[index % TOP_K.len()];
        *self.totals.rules.entry(top_k).or_default() += 1;
        let Some(k) = NonZeroU32::new(top_k) else { return Rule::Greedy };
        Rule::Sampled {
            inv_temperature: self.stage.dice.pick(&[1.0, 1.25]),
            top_k: Some(k),
            top_p: top_p_fixed(self.stage.dice.pick(&[1.0, 0.95])),
            min_p: 0.0,
        }
    }

    fn sequence(&mut self, index: usize, len: usize, generate: usize) -> Sequence {
        self.totals.longest = self.totals.longest.max(generate);
        Sequence { rule: self.rule(index), ..self.stage.sequence(len, generate) }
    }

    /// Three packing orders of the same sequences: as they are, reversed, rotated and shuffled.
    fn orders(
        &mut self,
        what: &str,
        sequences: &[Sequence],
        want: &[Trace],
        style: &Style,
    ) -> Result<Vec<crate::check::seen::Seen>, Failure> {
        let mut seen = Vec::new();
        let mut order: Vec<usize> = (0..sequences.len()).collect();
        for turn in 0..3 {
            match turn {
                0 => {}
                1 => order.reverse(),
                _ => self.stage.dice.shuffle(&mut order),
            }
            let ordered: Vec<Sequence> = order.iter().map(|&i| sequences[i].clone()).collect();
            let wanted: Vec<Trace> = order.iter().map(|&i| want[i].clone()).collect();
            let style = Style { ahead: 1 + turn % 2, shuffle: self.stage.dice.bits() | 1, ..*style };
            let before = self.stage.counts.packed;
            let (got, saw) = self.stage.play_seen(&mut self.player, &ordered, &style)?;
            self.stage.expect(&format!("{what}, order {turn}"), &ordered, &got, &wanted);
            self.totals.sequences += sequences.len() as u64;
            self.totals.packed += self.stage.counts.packed - before;
            seen.push(saw);
        }
        Ok(seen)
    }

    fn set(&mut self, set: usize) -> Result<(), Failure> {
        let chunks = [EVEN[set % EVEN.len()], ODD[set % ODD.len()]];
        let most = chunks[0].max(chunks[1]);
        let steps = self.stage.options.steps;
        let sequences: Vec<Sequence> = (0..SET)
            .map(|i| {
                let dice = &mut self.stage.dice;
                let len = match (i, dice.below(4)) {
                    // Two prompts are longer than both chunks.
                    (0 | 1, _) => dice.between(most + 1, most + 120),
                    (_, 0) => dice.between(1, 12),
                    (_, 1 | 2) => dice.between(13, 120),
                    _ => dice.between(121, 300),
                };
                let generate = if i == 2 { steps } else { dice.between(1, steps) };
                self.sequence(i, len, generate)
            })
            .collect();
        let want = self.stage.solo(&mut self.player, &sequences, SOLO)?;
        for chunk in chunks {
            let dice = &mut self.stage.dice;
            let style = Style {
                budget: (chunk * dice.between(2, 4)).min(1024),
                chunk,
                resident: dice.pick(&[6, 8, 12, 16]),
                pages: Pages::Shuffled,
                ..Style::solo(SOLO)
            };
            // In one order the last long prompt may find itself alone; over the three of a set it does not.
            let played = self.orders(&format!("set {set}, chunk {chunk}"), &sequences, &want, &style)?;
            let full: u64 = played.iter().filter_map(|seen| seen.chunks.get(&chunk)).sum();
            self.stage.reached(&format!("set {set}: a packed step with a slice of {chunk}"), full > 0);
            *self.totals.chunks.entry(chunk).or_default() += full;
            *self.totals.orders.entry(chunk).or_default() += played.len() as u64;
        }
        self.totals.sets += 1;
        Ok(())
    }

    /// `count` short prompts end in the first packed step, beside longer ones that do not.
    fn ends(&mut self, count: usize) -> Result<(), Failure> {
        let longer = (SET - count).min(3);
        let sequences: Vec<Sequence> = (0..count + longer)
            .map(|i| {
                let dice = &mut self.stage.dice;
                let len = if i < count { dice.between(1, 40) } else { dice.between(129, 180) };
                let generate = dice.between(2, 6);
                self.sequence(i, len, generate)
            })
            .collect();
        let want = self.stage.solo(&mut self.player, &sequences, SOLO)?;
        let style = Style { budget: 1024, chunk: 64, resident: SET, pages: Pages::Shuffled, ..Style::solo(SOLO) };
        for seen in self.orders(&format!("{count} prompts end together"), &sequences, &want, &style)? {
            let steps = seen.ended.get(&count).copied().unwrap_or(0);
            self.stage.reached(&format!("a packed step in which {count} prompts end"), steps > 0);
            *self.totals.ends.entry(count).or_default() += steps;
        }
        Ok(())
    }

    /// Sixteen sequences decode in batches that shrink and grow.
    fn walk(&mut self, which: usize) -> Result<(), Failure> {
        let sequences: Vec<Sequence> = (0..SET)
            .map(|i| {
                let len = self.stage.dice.between(1, 100);
                self.sequence(i, len, 16)
            })
            .collect();
        let want = self.stage.solo(&mut self.player, &sequences, SOLO)?;
        let walk = WALKS[which];
        let style = Style { budget: 512, chunk: 64, resident: SET, pages: Pages::Shuffled, walk, ..Style::solo(SOLO) };
        for seen in self.orders(&format!("walk {walk:?}"), &sequences, &want, &style)? {
            let rounds = seen.rounds(walk);
            self.stage.reached(&format!("two whole walks {walk:?}, there were {rounds}"), rounds >= 2);
            self.totals.walks[which] += rounds;
        }
        Ok(())
    }

    /// A sequence of one token ends with its prompt: no decode step may follow.
    fn one_token(&mut self) -> Result<(), Failure> {
        let lens = [1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 128, 160, 200];
        let sequences: Vec<Sequence> = (0..SET).map(|i| self.sequence(i, lens[i], 1)).collect();
        let want = self.stage.solo(&mut self.player, &sequences, SOLO)?;
        let style = Style { budget: 160, chunk: 64, resident: SET, pages: Pages::Shuffled, ..Style::solo(SOLO) };
        for seen in self.orders("one token each", &sequences, &want, &style)? {
            self.stage.reached("one token without a decode row", seen.walk.is_empty() && seen.mixed == 0);
            self.totals.one_token += sequences.len();
        }
        Ok(())
    }

    /// Every third of 36 sequences leaves at the boundary; the pool is so small that its pages go to the next one at once.
    fn cancel(&mut self, boundary: usize) -> Result<(), Failure> {
        let mut sequences: Vec<Sequence> = (0..36)
            .map(|i| {
                let len = self.stage.dice.between(2, 150);
                self.sequence(i, len, 10)
            })
            .collect();
        let mut player = match self.tight.take() {
            Some(player) => player,
            None => self.stage.open(&Setup { pages: 64, ..self.stage.setup() })?,
        };
        let want = self.stage.solo(&mut player, &sequences, SOLO)?;
        sequences.iter_mut().step_by(3).for_each(|s| s.cancel_after = Some(boundary));
        let mut survivors = 0;
        for shuffle in 1..=2 {
            let style = Style {
                budget: 100,
                chunk: 64,
                resident: 8,
                ahead: 2,
                shuffle,
                pages: Pages::Shuffled,
                ..Style::solo(SOLO)
            };
            let (got, seen) = self.stage.play_seen(&mut player, &sequences, &style)?;
            self.stage.expect(&format!("cancelled after {boundary}"), &sequences, &got, &want);
            *self.totals.rebound.entry(boundary).or_default() += seen.rebound;
            survivors += sequences.iter().filter(|s| s.cancel_after.is_none()).count();
        }
        self.stage.reached("twenty survivors", survivors >= 20);
        self.stage.reached("pages given away at once", self.totals.rebound[&boundary] > 0);
        self.totals.survivors.insert(boundary, survivors);
        self.tight = Some(player);
        Ok(())
    }

    fn report(&mut self) {
        let t = &self.totals;
        let list = |name: &str, items: Vec<String>| {
            if !items.is_empty() {
                say!("  {name}: {}", items.join(", "));
            }
        };
        say!("  {} sequences in packed plays, {} packed steps, {} fuzz sets", t.sequences, t.packed, t.sets);
        list("packing orders by chunk", t.orders.iter().map(|(c, n)| format!("{c}: {n}")).collect());
        list("packed steps with a full slice by chunk", t.chunks.iter().map(|(c, n)| format!("{c}: {n}")).collect());
        list("packed steps by prompts that end in them", t.ends.iter().map(|(c, n)| format!("{c}: {n}")).collect());
        let rule = |k: u32| if k == 0 { "greedy".to_string() } else { format!("top-k {k}") };
        list("sequences by rule", t.rules.iter().map(|(&k, n)| format!("{}: {n}", rule(k))).collect());
        let walks = WALKS.iter().zip(t.walks).filter(|(_, n)| *n > 0);
        list("whole walks of batch sizes", walks.map(|(w, n)| format!("{w:?}: {n}")).collect());
        list("survivors compared by boundary", t.survivors.iter().map(|(b, n)| format!("{b}: {n}")).collect());
        list("cancelled whose pages went on at once", t.rebound.iter().map(|(b, n)| format!("{b}: {n}")).collect());
        say!("  longest {} generated tokens; {} sequences of one token", t.longest, t.one_token);
        let (sequences, packed, sets, orders) = (t.sequences, t.packed, t.sets, t.orders.clone());
        let rules = t.rules.len();
        if sets > 0 {
            // A small part may hold fewer than its share of the whole; who plays all of them adds them up (tests/sanitizer.py).
            let halves = if sets < 6 { 1 } else { 2 };
            let least = |of: u64| (of * sets * halves).div_ceil(48);
            self.stage.reached(&format!("{} sequences for {sets} sets", least(LEAST.0)), sequences >= least(LEAST.0));
            self.stage.reached(&format!("{} packed steps for {sets} sets", least(LEAST.1)), packed >= least(LEAST.1));
            self.stage.reached("every rule", rules == TOP_K.len());
            self.stage.reached("three orders a chunk", orders.values().all(|n| n.is_multiple_of(3)));
        }
        if sets >= 6 && self.stage.options.part.1 == 1 {
            let all = EVEN.iter().chain(&ODD).all(|c| orders.contains_key(c));
            self.stage.reached("every chunk", all);
        }
        let (steps, poisoned) = (self.stage.counts.steps, self.stage.counts.seen.poisoned);
        self.stage.reached("poison before each step", steps == poisoned);
        if self.stage.options.which == Which::Cuda {
            say!(
                "  poisoned before each of {steps} steps: the uploaded step, token rows, tables, scratch, logits, new pages"
            );
        } else {
            say!(
                "  poisoned before each of {steps} steps: activations, logits, new pages (the cpu keeps no descriptors)"
            );
        }
    }
}
