//! Every metric: name, kind, unit, help text, and the name that vLLM has for the same thing, for people who move dashboards. Nothing
//! else in the crate spells a metric's name.

use metrics::Unit;

/// What a metric is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Goes up and down.
    Gauge,
    /// Only goes up.
    Counter,
    /// Observations, counted by upper bound.
    Histogram(&'static [f64]),
    /// A histogram that the engine keeps itself, in powers of two.
    Sizes,
}

/// One metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// `crucible_<name>_<unit>[_total]`.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// Its unit.
    pub unit: Unit,
    /// For people.
    pub help: &'static str,
    /// vLLM's name, where it has one.
    pub vllm: Option<&'static str>,
}

/// Upper bounds, seconds, from a millisecond to minutes.
const LATENCY: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0,
];
/// Upper bounds, seconds, of the time between two tokens.
const GAPS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    2.5, 5.0,
];
/// Upper bounds, tokens.
const LENGTHS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 20_000.0, 50_000.0,
    100_000.0,
];

const fn gauge(name: &'static str, unit: Unit, help: &'static str, vllm: Option<&'static str>) -> Metric {
    Metric { name, kind: Kind::Gauge, unit, help, vllm }
}

const fn counter(name: &'static str, unit: Unit, help: &'static str, vllm: Option<&'static str>) -> Metric {
    Metric { name, kind: Kind::Counter, unit, help, vllm }
}

const fn histogram(
    name: &'static str,
    unit: Unit,
    bounds: &'static [f64],
    help: &'static str,
    vllm: Option<&'static str>,
) -> Metric {
    Metric { name, kind: Kind::Histogram(bounds), unit, help, vllm }
}

/// Resident requests.
pub const RUNNING: Metric = gauge(
    "crucible_running_requests",
    Unit::Count,
    "Requests that are resident: in prefill, in decode, or ended and not yet out of flight.",
    Some("vllm:num_requests_running"),
);
/// Waiting requests.
pub const WAITING: Metric = gauge(
    "crucible_waiting_requests",
    Unit::Count,
    "Requests that were accepted and wait for a slot and pages.",
    Some("vllm:num_requests_waiting"),
);
/// Residents in prefill.
pub const PREFILLING: Metric =
    gauge("crucible_prefilling_requests", Unit::Count, "Resident requests whose prompt is not complete.", None);
/// Prompt tokens that the next step may hold.
pub const PREFILL_BUDGET: Metric = gauge(
    "crucible_prefill_budget_tokens",
    Unit::Count,
    "Prompt tokens that the next step may hold; follows the step times when prefill.step_time_target_us is set.",
    None,
);
/// Most waiting at once.
pub const QUEUE_PEAK: Metric =
    gauge("crucible_queue_peak_requests", Unit::Count, "Most queue permits held at once since the start.", None);
/// Pages leased.
pub const PAGES_USED: Metric = gauge(
    "crucible_kv_used_pages",
    Unit::Count,
    "KV pages leased. Divided by crucible_kv_total_pages it is the share in use.",
    Some("vllm:kv_cache_usage_perc"),
);
/// Pages in the pool.
pub const PAGES_TOTAL: Metric = gauge("crucible_kv_total_pages", Unit::Count, "KV pages in the pool.", None);
/// Most pages leased at once.
pub const PAGES_PEAK: Metric =
    gauge("crucible_kv_peak_pages", Unit::Count, "Most KV pages leased at once since the start.", None);
/// Seconds since the start.
pub const UPTIME: Metric = gauge("crucible_uptime_seconds", Unit::Seconds, "Time since the start.", None);
/// Whether the engine has died.
pub const FAILED_ENGINES: Metric = gauge(
    "crucible_failed_engines",
    Unit::Count,
    "1 from the death of the engine to the end of the process (server.fatal_linger_ms), else 0.",
    None,
);

/// Accepted requests.
pub const ACCEPTED: Metric = counter(
    "crucible_accepted_requests_total",
    Unit::Count,
    "Requests that entered the engine, by dialect. Equals ended, running and waiting requests together.",
    None,
);
/// Ended requests.
pub const ENDED: Metric = counter(
    "crucible_ended_requests_total",
    Unit::Count,
    "Accepted requests that ended, by dialect and outcome (finished, cancelled, failed).",
    Some("vllm:request_success_total"),
);
/// Refused requests.
pub const REFUSED: Metric = counter(
    "crucible_refused_requests_total",
    Unit::Count,
    "Requests that were not accepted, by the code of the error that answered them (queue_full, invalid_value, ...).",
    None,
);
/// Accepted requests by selection rule.
pub const SELECTED: Metric = counter(
    "crucible_selection_requests_total",
    Unit::Count,
    "Accepted requests by how they select tokens (greedy, sampled).",
    None,
);
/// Prompt tokens.
pub const PROMPT_TOKENS: Metric = counter(
    "crucible_prompt_tokens_total",
    Unit::Count,
    "Prompt tokens of ended requests.",
    Some("vllm:prompt_tokens_total"),
);
/// Generated tokens.
pub const GENERATED_TOKENS: Metric = counter(
    "crucible_generated_tokens_total",
    Unit::Count,
    "Generated tokens, counted once, when their request ends.",
    Some("vllm:generation_tokens_total"),
);
/// Steps with prefill rows.
pub const PREFILL_BATCHES: Metric = counter(
    "crucible_prefill_batches_total",
    Unit::Count,
    "Steps that computed prompt tokens, by whether they held slices of several requests (packed).",
    None,
);
/// Prompt tokens computed.
pub const PREFILL_TOKENS: Metric =
    counter("crucible_prefill_tokens_total", Unit::Count, "Prompt tokens computed by steps.", None);
/// Steps with decode rows.
pub const DECODE_STEPS: Metric =
    counter("crucible_decode_steps_total", Unit::Count, "Steps with at least one decode row.", None);
/// Decode rows.
pub const DECODE_ROWS: Metric = counter(
    "crucible_decode_rows_total",
    Unit::Count,
    "Decode rows of all steps; divided by crucible_decode_steps_total it is the average batch size.",
    None,
);
/// Bytes between host and device.
pub const TRANSFERRED: Metric = counter(
    "crucible_transferred_bytes_total",
    Unit::Bytes,
    "Bytes that steps moved between host and device, by direction (d2h, h2d).",
    None,
);

/// Steps by the way they were launched.
pub const GRAPH_STEPS: Metric = counter(
    "crucible_graph_steps_total",
    Unit::Count,
    "Steps on a GPU by class of shape (decode, prefill, packed) and launch (graph: a hit, eager: kernel by kernel).",
    None,
);
/// Graphs recorded.
pub const GRAPH_CAPTURES: Metric = counter(
    "crucible_graph_captures_total",
    Unit::Count,
    "Recordings of graphs by class of shape and outcome (kept, failed); a failed shape runs eagerly from then on.",
    None,
);
/// Graphs dropped.
pub const GRAPH_EVICTIONS: Metric = counter(
    "crucible_graph_evictions_total",
    Unit::Count,
    "Graphs dropped for room by class of shape; many of them say that graphs.max_entries is too low for this traffic.",
    None,
);
/// Time spent recording.
pub const GRAPH_CAPTURE_TIME: Metric = counter(
    "crucible_graph_capture_microseconds_total",
    Unit::Microseconds,
    "Time spent recording graphs by class of shape; the engine waits for it.",
    None,
);
/// Allocations of device memory.
pub const DEVICE_ALLOCATIONS: Metric = counter(
    "crucible_device_allocations_total",
    Unit::Count,
    "Allocations of device and page-locked memory. Constant after the start: none happens inside a step.",
    None,
);

/// Time to first token.
pub const TTFT: Metric = histogram(
    "crucible_time_to_first_token_seconds",
    Unit::Seconds,
    LATENCY,
    "Submission to the step of the first token, of finished requests.",
    Some("vllm:time_to_first_token_seconds"),
);
/// Time between tokens.
pub const INTER_TOKEN: Metric = histogram(
    "crucible_inter_token_latency_seconds",
    Unit::Seconds,
    GAPS,
    "Time between the steps of consecutive tokens, of finished requests.",
    Some("vllm:inter_token_latency_seconds"),
);
/// Time in the queue.
pub const QUEUE_TIME: Metric = histogram(
    "crucible_queue_time_seconds",
    Unit::Seconds,
    LATENCY,
    "Submission to residence, of finished requests.",
    Some("vllm:request_queue_time_seconds"),
);
/// Whole time.
pub const E2E: Metric = histogram(
    "crucible_end_to_end_seconds",
    Unit::Seconds,
    LATENCY,
    "Submission to the end, of finished requests.",
    Some("vllm:e2e_request_latency_seconds"),
);
/// Prompt lengths.
pub const PROMPT_LENGTH: Metric = histogram(
    "crucible_prompt_length_tokens",
    Unit::Count,
    LENGTHS,
    "Prompt tokens of finished requests.",
    Some("vllm:request_prompt_tokens"),
);
/// Output lengths.
pub const OUTPUT_LENGTH: Metric = histogram(
    "crucible_output_length_tokens",
    Unit::Count,
    LENGTHS,
    "Generated tokens of finished requests.",
    Some("vllm:request_generation_tokens"),
);

/// Decode rows of a step.
pub const DECODE_BATCH: Metric = Metric {
    name: "crucible_decode_batch_rows",
    kind: Kind::Sizes,
    unit: Unit::Count,
    help: "Decode rows of a step, of steps with at least one.",
    vllm: None,
};
/// Prompt tokens of a step.
pub const PREFILL_BATCH: Metric = Metric {
    name: "crucible_prefill_batch_tokens",
    kind: Kind::Sizes,
    unit: Unit::Count,
    help: "Prompt tokens of a step, of steps with at least one.",
    vllm: Some("vllm:iteration_tokens_total"),
};

/// Every metric.
pub const ALL: &[Metric] = &[
    RUNNING,
    WAITING,
    PREFILLING,
    PREFILL_BUDGET,
    QUEUE_PEAK,
    PAGES_USED,
    PAGES_TOTAL,
    PAGES_PEAK,
    UPTIME,
    FAILED_ENGINES,
    ACCEPTED,
    ENDED,
    REFUSED,
    SELECTED,
    PROMPT_TOKENS,
    GENERATED_TOKENS,
    PREFILL_BATCHES,
    PREFILL_TOKENS,
    DECODE_STEPS,
    DECODE_ROWS,
    TRANSFERRED,
    GRAPH_STEPS,
    GRAPH_CAPTURES,
    GRAPH_EVICTIONS,
    GRAPH_CAPTURE_TIME,
    DEVICE_ALLOCATIONS,
    TTFT,
    INTER_TOKEN,
    QUEUE_TIME,
    E2E,
    PROMPT_LENGTH,
    OUTPUT_LENGTH,
    DECODE_BATCH,
    PREFILL_BATCH,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_follows_the_grammar_and_stands_once() {
        let mut names: Vec<&str> = ALL.iter().map(|m| m.name).collect();
        for metric in ALL {
            assert!(metric.name.starts_with("crucible_"), "{}", metric.name);
            assert_eq!(metric.name.ends_with("_total"), metric.kind == Kind::Counter, "{}", metric.name);
            assert!(metric.help.ends_with('.'), "{}", metric.name);
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ALL.len());
    }

    #[test]
    fn the_operations_page_lists_every_metric_and_every_error_code() {
        let page = include_str!("../../docs/operations.md");
        for metric in ALL {
            let vllm = metric.vllm.map(|name| format!("`{name}`")).unwrap_or_default();
            let row = page.lines().find(|line| line.starts_with(&format!("| `{}` |", metric.name)));
            let row = row.unwrap_or_else(|| panic!("{} is missing", metric.name));
            assert!(row.contains(metric.help) && row.contains(&vllm), "{row}");
        }
        for code in crate::protocol::errors::Code::ALL {
            let row = format!("| `{}` | {} |", code.name(), code.status().as_u16());
            assert!(page.contains(&row), "{row}");
        }
    }
}
