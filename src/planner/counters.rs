//! What a step was made of, and how it counts once it has completed.

use crate::admission::{RequestId, StepCounters};
use crate::backend::{Row, Start, StepTiming, Want};

/// One row of a step in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowInFlight {
    pub request: RequestId,
    /// Prompt positions; 0 for a decode row.
    pub prompt: u32,
    pub last_slice: bool,
    /// Whether it yields logits for the scorer.
    pub scores: bool,
}

impl RowInFlight {
    pub fn of(row: &Row) -> Self {
        let prompt = if row.start == Start::Device { 0 } else { row.len };
        Self {
            request: row.request,
            prompt,
            last_slice: prompt > 0 && row.want == Want::Last,
            scores: row.want == Want::All,
        }
    }
}

/// Counts a completed step.
pub(super) fn count(counters: &mut StepCounters, rows: &[RowInFlight], timing: &StepTiming) {
    counters.d2h_bytes += timing.download_bytes;
    counters.h2d_bytes += timing.upload_bytes;
    (counters.last_step_d2h_bytes, counters.last_step_h2d_bytes) = (timing.download_bytes, timing.upload_bytes);
    counters.device = timing.counts;
    let decode = rows.iter().filter(|r| r.prompt == 0).count() as u32;
    if decode > 0 {
        counters.decode_steps += 1;
        counters.decode_rows += u64::from(decode);
        counters.decode_sizes.add(decode);
        counters.last_batch_size = decode;
        counters.decode_batch_peak = counters.decode_batch_peak.max(decode);
    }
    let slices: Vec<_> = rows.iter().filter(|r| r.prompt > 0).collect();
    let Some(last) = slices.last() else { return };
    let tokens: u32 = slices.iter().map(|r| r.prompt).sum();
    let finals = slices.iter().filter(|r| r.last_slice).count() as u64;
    let requests = slices.len() as u32;
    counters.prefill_batches += 1;
    counters.prefill_sizes.add(tokens);
    counters.prefill_chunks += u64::from(requests);
    counters.prefill_requests += u64::from(requests);
    counters.prefill_tokens += u64::from(tokens);
    counters.prefill_final_rows += finals;
    counters.prefill_d2h_bytes += 4 * finals;
    counters.last_prefill_chunk_tokens = last.prompt;
    counters.last_prefill_batch_requests = requests;
    counters.last_prefill_batch_tokens = tokens;
    counters.max_prefill_batch_tokens = counters.max_prefill_batch_tokens.max(tokens);
    if requests > 1 {
        counters.packed_prefill_batches += 1;
        counters.packed_prefill_tokens += u64::from(tokens);
    }
}
