//! The wire between planner and backend: a step of rows without pointers, and what comes back.
//!
//! A row is a run of consecutive positions of one sequence: one position in decode, a slice of the prompt in prefill. Rows of both
//! kinds share a step. Everything here is plain data and could be sent to one executor per device.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::counts::DeviceCounts;
use crate::admission::RequestId;

/// Where a row starts in its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// At this position (prefill).
    Host(u32),
    /// At the slot's own position: one past the last row of this slot, in this or an earlier step (decode).
    Device,
}

/// Where a row's tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The next `len` entries of `Step::tokens`.
    Tokens,
    /// The token that this slot selected last; `len` is 1. The host need not know it yet.
    DeviceLast,
}

/// Which positions of a row select a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// None: a slice that does not end its prompt.
    None,
    /// The last position.
    Last,
    /// Every position (scoring); position i of the row yields output i. Only the last becomes the slot's last token. A row whose tokens
    /// nobody reads asks for `Rule::Greedy`, which costs one look at the logits.
    All,
}

/// Whether a row's logits are copied to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HostLogits {
    /// Token ids only.
    #[default]
    No,
    /// All logits of the wanted positions.
    Yes,
}

/// Log-probabilities that a wanted position reports: absent, or the chosen token's and this many alternatives.
pub type LogprobsWanted = Option<u8>;

/// The selection rule of docs/arithmetic.md, compiled: no parsing left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Highest logit, ties to the lower id.
    Greedy,
    /// The canonical integer draw.
    Sampled {
        /// f32(1/T), T in f64.
        inv_temperature: f32,
        /// Keep the k highest; absent keeps all.
        top_k: Option<NonZeroU32>,
        /// round(p·2^32), half away from zero; 2^32 keeps all.
        top_p: u64,
        /// Keep e >= min_p; 0 keeps all.
        min_p: f32,
    },
}

/// What is added to a sequence's logits before its rule (`arith::adjust`). The backend counts the tokens that the slot selects.
#[derive(Clone, Debug, PartialEq)]
pub struct Adjust {
    /// Taken off once a token was generated, −2..=2.
    pub presence: f32,
    /// Taken off for each time that a token was generated, −2..=2.
    pub frequency: f32,
    /// (token id, what is added), ids ascending, at most `arith::MAX_BIAS`, each −100..=100.
    pub bias: Vec<(u32, f32)>,
}

/// How one row selects. Rides in the step; of selection the backend keeps only what `SlotBinding::adjust` asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingRow {
    /// The rule.
    pub rule: Rule,
    /// The request's seed.
    pub seed: u64,
    /// Index, from 0, of the token drawn by the row's first wanted position among the generated tokens.
    pub token_index: u32,
    /// Choice index of the request (n > 1), part of the random counter.
    pub choice: u32,
}

/// A run of consecutive positions of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Whose row; outputs are keyed by it.
    pub request: RequestId,
    /// Resident slot, below `Facts::slots`.
    pub slot: u32,
    /// First position.
    pub start: Start,
    /// Positions, at least 1.
    pub len: u32,
    /// Token source.
    pub input: Input,
    /// Which positions select.
    pub want: Want,
    /// The selection, read when `want` is not `None`.
    pub sampling: SamplingRow,
    /// Log-probabilities of wanted positions.
    pub logprobs: LogprobsWanted,
    /// Copies logits of wanted positions to the host.
    pub host_logits: HostLogits,
}

/// Gives a slot a new sequence: its page table for life. Takes effect before the rows of the same step.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotBinding {
    /// The slot.
    pub slot: u32,
    /// Whose it is now.
    pub request: RequestId,
    /// Physical pages; position p lives in `pages[p >> 4]`.
    pub pages: Vec<u32>,
    /// Penalties and bias of the new sequence; absent costs nothing. Its counts start at zero.
    /// Rows that want every position score: they select from the raw logits and count nothing.
    pub adjust: Option<Arc<Adjust>>,
}

/// One forward pass.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Step {
    /// Ascending from 1.
    pub id: u64,
    /// Slots that change hands before this step's rows.
    pub bindings: Vec<SlotBinding>,
    /// Rows; at most one per slot.
    pub rows: Vec<Row>,
    /// Tokens of the `Input::Tokens` rows, in row order.
    pub tokens: Vec<u32>,
}

impl Step {
    /// Token rows of the pass: the sum of the rows' lengths.
    pub fn token_rows(&self) -> usize {
        self.rows.iter().map(|r| r.len as usize).sum()
    }
}

/// Log-probabilities at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Natural logarithm, raw distribution at T = 1.
    pub chosen: f64,
    /// The most likely tokens, by (logit descending, id ascending).
    pub top: Vec<(u32, f64)>,
}

/// What one row with `want != None` yields; one entry per wanted position in each list that was asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct RowOutput {
    /// Whose.
    pub request: RequestId,
    /// Selected token ids, in position order.
    pub tokens: Vec<u32>,
    /// Present when `Row::logprobs` is.
    pub logprobs: Vec<TokenLogprobs>,
    /// `[wanted positions][vocab]`, present when `Row::host_logits` is `Yes`.
    pub logits: Vec<Vec<f32>>,
    /// False when a wanted position had a non-finite logit: the request fails, the tokens mean nothing.
    pub finite: bool,
}

/// Where the time and the bytes of a step went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTiming {
    /// Host time to prepare and launch, µs.
    pub launch_us: f64,
    /// Time on the device (or compute threads), selection included, µs.
    pub device_us: f64,
    /// Part of it spent in selection, µs; 0 where not measured.
    pub selection_us: f64,
    /// Bytes host to device.
    pub upload_bytes: u64,
    /// Bytes device to host.
    pub download_bytes: u64,
    /// What the backend had counted since its start when this step was launched.
    pub counts: DeviceCounts,
}

/// A finished step. Rows that wanted nothing do not appear.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutput {
    /// The step's id.
    pub step: u64,
    /// Outputs in row order.
    pub rows: Vec<RowOutput>,
    /// Measurements.
    pub timing: StepTiming,
}
