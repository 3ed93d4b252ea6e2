//! The body of /stats: one snapshot of the account, field by field as docs promise it.

use serde::Serialize;

use crate::admission::{Outcome, QueuePermits, Snapshot};

/// Counters and gauges of one instant.
#[derive(Debug, Serialize)]
#[allow(missing_docs)] // The names are the documentation; docs/operations.md explains each.
pub struct Stats {
    pub active_requests: u32,
    pub queued_requests: u32,
    pub completed_requests: u64,
    pub cancelled_requests: u64,
    pub failed_requests: u64,
    pub rejected_requests: u64,
    pub kv_pages_used: u32,
    pub kv_pages_free: u32,
    pub last_batch_size: u32,
    pub decode_steps: u64,
    pub aggregate_tokens_generated: u64,
    pub average_batch_size: f64,
    pub uptime_seconds: f64,
    pub greedy_requests: u64,
    pub sampled_requests: u64,
    pub prefilling_requests: u32,
    pub prefill_chunks: u64,
    pub prefill_tokens: u64,
    pub last_prefill_chunk_tokens: u32,
    pub prefill_batches: u64,
    pub packed_prefill_batches: u64,
    pub packed_prefill_tokens: u64,
    pub prefill_requests: u64,
    pub prefill_final_rows: u64,
    pub last_prefill_batch_requests: u32,
    pub last_prefill_batch_tokens: u32,
    pub max_prefill_batch_tokens: u32,
    pub average_prefill_batch_requests: f64,
    pub average_prefill_batch_tokens: f64,
    pub prefill_d2h_bytes: u64,
    pub d2h_bytes: u64,
    pub h2d_bytes: u64,
    pub last_step_d2h_bytes: u64,
    pub last_step_h2d_bytes: u64,
    pub graph_replays: u64,
    pub graph_eager_steps: u64,
    pub graph_captures: u64,
    pub graph_capture_failures: u64,
    pub graph_evictions: u64,
    pub graph_capture_us: u64,
    pub device_allocations: u64,
    pub accepted_requests: u64,
    pub queue_peak: usize,
    pub kv_pages_peak: u32,
    pub decode_batch_peak: u32,
}

fn average(sum: u64, count: u64) -> f64 {
    if count == 0 { 0.0 } else { sum as f64 / count as f64 }
}

impl Stats {
    /// The statistics of one snapshot.
    pub fn new(snapshot: &Snapshot, permits: &QueuePermits, uptime_seconds: f64) -> Self {
        let (account, steps) = (&snapshot.account, &snapshot.account.steps);
        let graphs = steps.device.all_graphs();
        Self {
            active_requests: account.resident,
            queued_requests: account.waiting,
            completed_requests: account.ended_as(Outcome::Finished),
            cancelled_requests: account.ended_as(Outcome::Cancelled),
            failed_requests: account.ended_as(Outcome::Failed),
            rejected_requests: permits.refused() as u64 + account.refused_draining,
            kv_pages_used: account.kv_pages_used,
            kv_pages_free: account.kv_pages_total.saturating_sub(account.kv_pages_used),
            last_batch_size: steps.last_batch_size,
            decode_steps: steps.decode_steps,
            aggregate_tokens_generated: account.generated_tokens,
            average_batch_size: average(steps.decode_rows, steps.decode_steps),
            uptime_seconds,
            greedy_requests: account.greedy_requests,
            sampled_requests: account.sampled_requests,
            prefilling_requests: account.prefilling,
            prefill_chunks: steps.prefill_chunks,
            prefill_tokens: steps.prefill_tokens,
            last_prefill_chunk_tokens: steps.last_prefill_chunk_tokens,
            prefill_batches: steps.prefill_batches,
            packed_prefill_batches: steps.packed_prefill_batches,
            packed_prefill_tokens: steps.packed_prefill_tokens,
            prefill_requests: steps.prefill_requests,
            prefill_final_rows: steps.prefill_final_rows,
            last_prefill_batch_requests: steps.last_prefill_batch_requests,
            last_prefill_batch_tokens: steps.last_prefill_batch_tokens,
            max_prefill_batch_tokens: steps.max_prefill_batch_tokens,
            average_prefill_batch_requests: average(steps.prefill_requests, steps.prefill_batches),
            average_prefill_batch_tokens: average(steps.prefill_tokens, steps.prefill_batches),
            prefill_d2h_bytes: steps.prefill_d2h_bytes,
            d2h_bytes: steps.d2h_bytes,
            h2d_bytes: steps.h2d_bytes,
            last_step_d2h_bytes: steps.last_step_d2h_bytes,
            last_step_h2d_bytes: steps.last_step_h2d_bytes,
            graph_replays: graphs.replays,
            graph_eager_steps: graphs.eager,
            graph_captures: graphs.captures,
            graph_capture_failures: graphs.failures,
            graph_evictions: graphs.evictions,
            graph_capture_us: graphs.capture_us,
            device_allocations: steps.device.allocations,
            accepted_requests: account.accepted,
            queue_peak: permits.peak(),
            kv_pages_peak: account.kv_pages_peak,
            decode_batch_peak: steps.decode_batch_peak,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operations_page_explains_every_field() {
        let page = include_str!("../../docs/operations.md");
        let stats = Stats::new(&Snapshot::default(), &QueuePermits::new(1), 0.0);
        let fields = serde_json::to_value(stats).expect("plain numbers");
        for field in fields.as_object().expect("an object").keys() {
            let explained = page.lines().any(|line| line.starts_with("| `") && line.contains(&format!("`{field}`")));
            assert!(explained, "{field}");
        }
    }
}
