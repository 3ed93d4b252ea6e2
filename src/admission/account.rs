//! The account of every request: who was accepted, how each ended, what the steps did. One immutable snapshot of it is what /stats
//! and every metric under a conservation law render from, so that the laws (I2, I3, I10) hold at any scrape.

use serde::Serialize;

use crate::backend::DeviceCounts;

/// The surface a request came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// /v1/generate.
    Native,
    /// /v1/completions.
    OpenaiCompletions,
    /// /v1/chat/completions.
    OpenaiChat,
    /// /v1/messages.
    Anthropic,
    /// /v1/generate, asked by the terminal client.
    Tui,
    /// Inside the process: command line and checks.
    Internal,
}

impl Dialect {
    /// Every dialect, in the order of the account's tables.
    pub const ALL: [Dialect; 6] = [
        Dialect::Native,
        Dialect::OpenaiCompletions,
        Dialect::OpenaiChat,
        Dialect::Anthropic,
        Dialect::Tui,
        Dialect::Internal,
    ];

    /// The label in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Dialect::Native => "native",
            Dialect::OpenaiCompletions => "openai_completions",
            Dialect::OpenaiChat => "openai_chat",
            Dialect::Anthropic => "anthropic",
            Dialect::Tui => "tui",
            Dialect::Internal => "internal",
        }
    }
}

/// How an accepted request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// End-of-sequence token, length or stop string.
    Finished,
    /// The client went away or asked for it.
    Cancelled,
    /// Non-finite logits, a dead engine or the drain's deadline.
    Failed,
}

impl Outcome {
    /// Every outcome, in the order of the account's tables.
    pub const ALL: [Outcome; 3] = [Outcome::Finished, Outcome::Cancelled, Outcome::Failed];

    /// The label in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Outcome::Finished => "finished",
            Outcome::Cancelled => "cancelled",
            Outcome::Failed => "failed",
        }
    }
}

/// Measurements of one finished request, taken on the engine's monotonic clock. Cancelled and failed requests leave none.
#[derive(Clone, Debug)]
pub struct FinishedSample {
    /// Its surface.
    pub dialect: Dialect,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Generated tokens that count.
    pub generated_tokens: u32,
    /// Submit to residence, µs.
    pub queue_us: f64,
    /// Submit to the first token's step, µs.
    pub ttft_us: f64,
    /// Submit to the end, µs.
    pub e2e_us: f64,
    /// Time between consecutive token steps, µs; one fewer than tokens.
    pub gaps_us: Vec<f32>,
}

/// Batches counted by size: entry i counts sizes in 2^(i−1)+1..=2^i, the last everything above 2^16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SizeCounts([u64; 18]);

impl SizeCounts {
    /// Counts a batch of this size.
    pub fn add(&mut self, size: u32) {
        let class = size.max(1).checked_next_power_of_two().map_or(17, u32::trailing_zeros).min(17);
        self.0[class as usize] += 1;
    }

    /// (upper bound, batches up to it), ascending; the last bound is infinite and counts all.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> {
        let bound = |class| if class == 17 { f64::INFINITY } else { f64::from(1u32 << class) };
        self.0.iter().enumerate().scan(0, move |sum, (class, count)| {
            *sum += count;
            Some((bound(class), *sum))
        })
    }
}

/// What the steps did so far; the planner keeps it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StepCounters {
    /// Steps that had at least one decode row.
    pub decode_steps: u64,
    /// Decode rows in all.
    pub decode_rows: u64,
    /// Decode rows of the last decode step.
    pub last_batch_size: u32,
    /// Most decode rows in one step.
    pub decode_batch_peak: u32,
    /// Decode steps by their rows.
    pub decode_sizes: SizeCounts,
    /// Steps with prefill rows by their prompt tokens.
    pub prefill_sizes: SizeCounts,
    /// Prompt tokens that the next step may hold.
    pub prefill_budget_tokens: u32,
    /// Prefill slices.
    pub prefill_chunks: u64,
    /// Prompt tokens computed.
    pub prefill_tokens: u64,
    /// Length of the last slice.
    pub last_prefill_chunk_tokens: u32,
    /// Steps with prefill rows.
    pub prefill_batches: u64,
    /// Those with slices of two or more requests.
    pub packed_prefill_batches: u64,
    /// Prompt tokens computed in packed batches.
    pub packed_prefill_tokens: u64,
    /// Sum over prefill batches of the requests in each.
    pub prefill_requests: u64,
    /// Slices that ended their prompt.
    pub prefill_final_rows: u64,
    /// Requests of the last prefill batch.
    pub last_prefill_batch_requests: u32,
    /// Tokens of the last prefill batch.
    pub last_prefill_batch_tokens: u32,
    /// Most tokens in one prefill batch.
    pub max_prefill_batch_tokens: u32,
    /// Bytes of the token ids that final prefill rows returned (4 each).
    pub prefill_d2h_bytes: u64,
    /// Bytes device to host in all.
    pub d2h_bytes: u64,
    /// Bytes host to device in all.
    pub h2d_bytes: u64,
    /// Bytes device to host of the last step.
    pub last_step_d2h_bytes: u64,
    /// Bytes host to device of the last step.
    pub last_step_h2d_bytes: u64,
    /// What the backend has counted.
    pub device: DeviceCounts,
}

/// Counters and gauges of the engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Account {
    /// Requests that entered by `Submit`.
    pub accepted: u64,
    /// Waiting for residence.
    pub waiting: u32,
    /// Resident (prefill or decode), or ended and not yet out of flight.
    pub resident: u32,
    /// Residents whose prompt is not complete.
    pub prefilling: u32,
    /// `[dialect][outcome]` in the order of `Dialect::ALL`, `Outcome::ALL`.
    pub ended: [[u64; 3]; Dialect::ALL.len()],
    /// `[dialect]` accepted.
    pub accepted_by_dialect: [u64; Dialect::ALL.len()],
    /// Refused after the permit: draining or a dead engine.
    pub refused_draining: u64,
    /// Of those, the ones that met a dead engine.
    pub refused_dead: u64,
    /// Accepted requests with the greedy rule.
    pub greedy_requests: u64,
    /// Accepted requests that draw.
    pub sampled_requests: u64,
    /// Prompt tokens of ended requests.
    pub prompt_tokens: u64,
    /// Generated tokens, counted once, when the request ends.
    pub generated_tokens: u64,
    /// Pages in the pool.
    pub kv_pages_total: u32,
    /// Pages leased.
    pub kv_pages_used: u32,
    /// Most pages leased at once.
    pub kv_pages_peak: u32,
    /// What the steps did.
    pub steps: StepCounters,
}

impl Account {
    /// Requests that ended in this way.
    pub fn ended_as(&self, outcome: Outcome) -> u64 {
        let column = Outcome::ALL.iter().position(|&o| o == outcome).unwrap_or(0);
        self.ended.iter().map(|row| row[column]).sum()
    }

    /// Requests inside: waiting or resident.
    pub fn live(&self) -> u64 {
        u64::from(self.waiting) + u64::from(self.resident)
    }

    /// I2: accepted = finished + cancelled + failed + live.
    pub fn balances(&self) -> bool {
        self.accepted == Outcome::ALL.iter().map(|&o| self.ended_as(o)).sum::<u64>() + self.live()
    }
}

/// One published state of the account.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The account.
    pub account: Account,
    /// Ascending with every publication.
    pub version: u64,
}
