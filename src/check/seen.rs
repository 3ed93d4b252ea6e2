//! Which shapes the steps of a play really had: counted from the steps, so that a suite can say what it covered and fail where it did
//! not get there.

use std::collections::BTreeMap;

use crate::backend::{Input, Step, Want};

/// Counts of shapes and events.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Decode-only steps in order, by their rows.
    pub walk: Vec<usize>,
    /// Packed steps (two prefill slices and more) by the prompts that ended in them.
    pub ended: BTreeMap<usize, u64>,
    /// Packed steps by chunk, where at least one slice was as long as the chunk allows.
    pub chunks: BTreeMap<usize, u64>,
    /// Steps with prefill slices and decode rows.
    pub mixed: u64,
    /// Most sequences resident at once.
    pub resident_most: usize,
    /// Most pages in use at once.
    pub pages_most: usize,
    /// Times that the first in the queue did not fit the free pages.
    pub blocked: u64,
    /// Decode rows whose position begins a page.
    pub crossings: u64,
    /// Cancelled sequences of whose pages one was given away in the step after they left.
    pub rebound: u64,
    /// Steps before which unused descriptors, stale metadata, scratch and new pages were poisoned.
    pub poisoned: u64,
    /// Tokens held against the definition of selection.
    pub defined: u64,
}

impl Seen {
    /// Counts a step; true when it packs at least two prefill slices.
    pub fn step(&mut self, step: &Step, chunk: usize) -> bool {
        let slices = step.rows.iter().filter(|r| r.input == Input::Tokens);
        let (count, longest) = slices.clone().fold((0, 0), |(n, most), r| (n + 1, most.max(r.len as usize)));
        let ended = slices.filter(|r| r.want != Want::None).count();
        let decodes = step.rows.len() - count;
        if count == 0 {
            self.walk.push(decodes);
        }
        self.mixed += u64::from(count > 0 && decodes > 0);
        if count < 2 {
            return false;
        }
        *self.ended.entry(ended).or_default() += 1;
        if longest == chunk {
            *self.chunks.entry(chunk).or_default() += 1;
        }
        true
    }

    /// Adds another play's counts.
    pub fn absorb(&mut self, other: &Seen) {
        self.walk.extend(&other.walk);
        for (mine, theirs) in [(&mut self.ended, &other.ended), (&mut self.chunks, &other.chunks)] {
            theirs.iter().for_each(|(&k, &n)| *mine.entry(k).or_default() += n);
        }
        self.mixed += other.mixed;
        self.resident_most = self.resident_most.max(other.resident_most);
        self.pages_most = self.pages_most.max(other.pages_most);
        self.blocked += other.blocked;
        self.crossings += other.crossings;
        self.rebound += other.rebound;
        self.poisoned += other.poisoned;
        self.defined += other.defined;
    }

    /// Decode-only steps of so many rows.
    pub fn batches(&self, rows: usize) -> usize {
        self.walk.iter().filter(|&&n| n == rows).count()
    }

    /// Whole rounds of `walk` that the decode-only steps began with.
    pub fn rounds(&self, walk: &[usize]) -> usize {
        self.walk.chunks_exact(walk.len().max(1)).take_while(|w| *w == walk).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::RequestId;
    use crate::backend::{HostLogits, Row, Rule, SamplingRow, Start};

    fn row(input: Input, len: u32, want: Want) -> Row {
        let sampling = SamplingRow { rule: Rule::Greedy, seed: 0, token_index: 0, choice: 0 };
        let (request, start) = (RequestId(1), Start::Device);
        Row { request, slot: 0, start, len, input, want, sampling, logprobs: None, host_logits: HostLogits::No }
    }

    fn step(rows: Vec<Row>) -> Step {
        Step { id: 1, rows, ..Step::default() }
    }

    #[test]
    fn a_step_is_packed_from_two_slices_on_and_counts_the_prompts_that_end_in_it() {
        let mut seen = Seen::default();
        let (slice, end) = (row(Input::Tokens, 37, Want::None), row(Input::Tokens, 5, Want::Last));
        let decode = row(Input::DeviceLast, 1, Want::Last);
        assert!(!seen.step(&step(vec![end.clone(), decode.clone()]), 37));
        assert!(seen.step(&step(vec![end.clone(), end.clone(), slice, decode.clone()]), 37));
        assert!(seen.step(&step(vec![end.clone(), end]), 37));
        assert_eq!((seen.ended[&2], seen.chunks[&37], seen.mixed), (2, 1, 2));
        assert!(!seen.step(&step(vec![decode.clone(), decode]), 37));
        assert_eq!(seen.walk, [2]);
    }

    #[test]
    fn rounds_count_whole_walks_from_the_first_step_on() {
        let seen = Seen { walk: vec![16, 1, 8, 2, 16, 1, 8, 2, 16, 1, 3], ..Seen::default() };
        assert_eq!((seen.rounds(&[16, 1, 8, 2]), seen.rounds(&[16, 1, 8, 3]), seen.batches(1)), (2, 0, 3));
    }
}
