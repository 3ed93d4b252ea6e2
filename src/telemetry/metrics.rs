//! The scrape. Under one lock it takes the published account with the samples that belong to it, brings the registry up to exactly
//! that state and renders it, so no scrape can see half an event.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use super::names::{self, Kind, Metric};
use crate::actors::topology::{EngineHandle, Published};
use crate::admission::account::SizeCounts;
use crate::admission::{Account, Dialect, FinishedSample, Outcome};
use crate::backend::{GraphClass, GraphCounts};
use crate::protocol::errors::Code;

/// Content type of the text format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Sequences after which samples are taken without a scrape, so that they do not pile up: each leaves at most one.
const ABSORB_EVERY: u64 = 256;
const METADATA: Metadata<'static> = Metadata::new("crucible", Level::INFO, None);

/// The registry of one server.
pub struct Metrics {
    handle: PrometheusHandle,
    series: Series,
    /// Held from taking the published state until it is rendered.
    scrape: Mutex<()>,
    refusals: [AtomicU64; Code::ALL.len()],
    started: Instant,
    arrivals: AtomicU64,
}

/// Handles of all series, made at the start, so that each is visible from the first scrape.
struct Series {
    running: Gauge,
    waiting: Gauge,
    prefilling: Gauge,
    prefill_budget: Gauge,
    queue_peak: Gauge,
    pages_used: Gauge,
    pages_total: Gauge,
    pages_peak: Gauge,
    uptime: Gauge,
    failed_engines: Gauge,
    accepted: Vec<Counter>,
    ended: Vec<Vec<Counter>>,
    refused: Vec<Counter>,
    greedy: Counter,
    sampled: Counter,
    prompt_tokens: Counter,
    generated_tokens: Counter,
    prefill_packed: Counter,
    prefill_single: Counter,
    prefill_tokens: Counter,
    decode_steps: Counter,
    decode_rows: Counter,
    d2h: Counter,
    h2d: Counter,
    /// In the order of `GraphClass::ALL`.
    graphs: Vec<GraphSeries>,
    device_allocations: Counter,
    ttft: Histogram,
    inter_token: Histogram,
    queue_time: Histogram,
    e2e: Histogram,
    prompt_length: Histogram,
    output_length: Histogram,
}

/// Series of one class of graphs.
struct GraphSeries {
    replays: Counter,
    eager: Counter,
    kept: Counter,
    failed: Counter,
    evictions: Counter,
    capture_us: Counter,
}

impl GraphSeries {
    fn set(&self, counts: &GraphCounts) {
        self.replays.absolute(counts.replays);
        self.eager.absolute(counts.eager);
        self.kept.absolute(counts.captures);
        self.failed.absolute(counts.failures);
        self.evictions.absolute(counts.evictions);
        self.capture_us.absolute(counts.capture_us);
    }
}

fn key(metric: Metric, labels: &[(&'static str, &'static str)]) -> Key {
    let labels: Vec<Label> = labels.iter().map(|&(name, value)| Label::from_static_parts(name, value)).collect();
    Key::from_parts(metric.name, labels)
}

impl Series {
    fn new(recorder: &PrometheusRecorder) -> Self {
        let gauge = |metric| recorder.register_gauge(&key(metric, &[]), &METADATA);
        let counter = |metric, labels: &[(&'static str, &'static str)]| {
            recorder.register_counter(&key(metric, labels), &METADATA)
        };
        let histogram = |metric| recorder.register_histogram(&key(metric, &[]), &METADATA);
        let ended = |dialect: &Dialect| {
            let one =
                |outcome: &Outcome| counter(names::ENDED, &[("dialect", dialect.name()), ("outcome", outcome.name())]);
            Outcome::ALL.iter().map(one).collect()
        };
        let graphs = |class: &GraphClass| {
            let class = ("class", class.name());
            GraphSeries {
                replays: counter(names::GRAPH_STEPS, &[class, ("launch", "graph")]),
                eager: counter(names::GRAPH_STEPS, &[class, ("launch", "eager")]),
                kept: counter(names::GRAPH_CAPTURES, &[class, ("outcome", "kept")]),
                failed: counter(names::GRAPH_CAPTURES, &[class, ("outcome", "failed")]),
                evictions: counter(names::GRAPH_EVICTIONS, &[class]),
                capture_us: counter(names::GRAPH_CAPTURE_TIME, &[class]),
            }
        };
        Self {
            running: gauge(names::RUNNING),
            waiting: gauge(names::WAITING),
            prefilling: gauge(names::PREFILLING),
            prefill_budget: gauge(names::PREFILL_BUDGET),
            queue_peak: gauge(names::QUEUE_PEAK),
            pages_used: gauge(names::PAGES_USED),
            pages_total: gauge(names::PAGES_TOTAL),
            pages_peak: gauge(names::PAGES_PEAK),
            uptime: gauge(names::UPTIME),
            failed_engines: gauge(names::FAILED_ENGINES),
            accepted: Dialect::ALL.iter().map(|d| counter(names::ACCEPTED, &[("dialect", d.name())])).collect(),
            ended: Dialect::ALL.iter().map(ended).collect(),
            refused: Code::ALL.iter().map(|c| counter(names::REFUSED, &[("reason", c.name())])).collect(),
            greedy: counter(names::SELECTED, &[("mode", "greedy")]),
            sampled: counter(names::SELECTED, &[("mode", "sampled")]),
            prompt_tokens: counter(names::PROMPT_TOKENS, &[]),
            generated_tokens: counter(names::GENERATED_TOKENS, &[]),
            prefill_packed: counter(names::PREFILL_BATCHES, &[("packed", "true")]),
            prefill_single: counter(names::PREFILL_BATCHES, &[("packed", "false")]),
            prefill_tokens: counter(names::PREFILL_TOKENS, &[]),
            decode_steps: counter(names::DECODE_STEPS, &[]),
            decode_rows: counter(names::DECODE_ROWS, &[]),
            d2h: counter(names::TRANSFERRED, &[("direction", "d2h")]),
            h2d: counter(names::TRANSFERRED, &[("direction", "h2d")]),
            graphs: GraphClass::ALL.iter().map(graphs).collect(),
            device_allocations: counter(names::DEVICE_ALLOCATIONS, &[]),
            ttft: histogram(names::TTFT),
            inter_token: histogram(names::INTER_TOKEN),
            queue_time: histogram(names::QUEUE_TIME),
            e2e: histogram(names::E2E),
            prompt_length: histogram(names::PROMPT_LENGTH),
            output_length: histogram(names::OUTPUT_LENGTH),
        }
    }

    /// One finished request: exactly one observation in every histogram but the gaps, which get one for each.
    fn observe(&self, sample: &FinishedSample) {
        self.ttft.record(sample.ttft_us * 1e-6);
        self.queue_time.record(sample.queue_us * 1e-6);
        self.e2e.record(sample.e2e_us * 1e-6);
        self.prompt_length.record(sample.prompt_tokens);
        self.output_length.record(sample.generated_tokens);
        for &gap in &sample.gaps_us {
            self.inter_token.record(f64::from(gap) * 1e-6);
        }
    }

    fn set(&self, account: &Account) {
        self.running.set(account.resident);
        self.waiting.set(account.waiting);
        self.prefilling.set(account.prefilling);
        self.prefill_budget.set(account.steps.prefill_budget_tokens);
        self.pages_used.set(account.kv_pages_used);
        self.pages_total.set(account.kv_pages_total);
        self.pages_peak.set(account.kv_pages_peak);
        for (counter, &value) in self.accepted.iter().zip(&account.accepted_by_dialect) {
            counter.absolute(value);
        }
        for (counters, values) in self.ended.iter().zip(&account.ended) {
            for (counter, &value) in counters.iter().zip(values) {
                counter.absolute(value);
            }
        }
        self.greedy.absolute(account.greedy_requests);
        self.sampled.absolute(account.sampled_requests);
        self.prompt_tokens.absolute(account.prompt_tokens);
        self.generated_tokens.absolute(account.generated_tokens);
        let steps = &account.steps;
        self.prefill_packed.absolute(steps.packed_prefill_batches);
        self.prefill_single.absolute(steps.prefill_batches.saturating_sub(steps.packed_prefill_batches));
        self.prefill_tokens.absolute(steps.prefill_tokens);
        self.decode_steps.absolute(steps.decode_steps);
        self.decode_rows.absolute(steps.decode_rows);
        self.d2h.absolute(steps.d2h_bytes);
        self.h2d.absolute(steps.h2d_bytes);
        for (series, counts) in self.graphs.iter().zip(&steps.device.graphs) {
            series.set(counts);
        }
        self.device_allocations.absolute(steps.device.allocations);
    }
}

fn describe(recorder: &PrometheusRecorder) {
    for metric in names::ALL {
        let (name, unit, help) = (metric.name.into(), Some(metric.unit), metric.help.into());
        match metric.kind {
            Kind::Gauge => recorder.describe_gauge(name, unit, help),
            Kind::Counter => recorder.describe_counter(name, unit, help),
            Kind::Histogram(_) => recorder.describe_histogram(name, unit, help),
            Kind::Sizes => {}
        }
    }
}

/// Appends a histogram of the engine's own; `sum` is the sum of all sizes.
fn write_sizes(text: &mut String, metric: Metric, sizes: &SizeCounts, sum: u64) {
    let Metric { name, help, .. } = metric;
    text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} histogram\n"));
    let mut count = 0;
    for (bound, batches) in sizes.cumulative() {
        let bound = if bound.is_finite() { bound.to_string() } else { "+Inf".to_owned() };
        text.push_str(&format!("{name}_bucket{{le=\"{bound}\"}} {batches}\n"));
        count = batches;
    }
    text.push_str(&format!("{name}_sum {sum}\n{name}_count {count}\n\n"));
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// An empty registry that knows every metric.
    pub fn new() -> Self {
        let buckets = names::ALL.iter().filter_map(|metric| match metric.kind {
            Kind::Histogram(bounds) => Some((metric.name, bounds)),
            _ => None,
        });
        let builder = buckets.fold(PrometheusBuilder::new(), |builder, (name, bounds)| {
            // Only an empty list of bounds is refused, and none is.
            builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), bounds).unwrap_or_default()
        });
        let recorder = builder.build_recorder();
        describe(&recorder);
        Self {
            handle: recorder.handle(),
            series: Series::new(&recorder),
            scrape: Mutex::new(()),
            refusals: Default::default(),
            started: Instant::now(),
            arrivals: AtomicU64::new(0),
        }
    }

    /// Counts a request that was answered with an error before the engine was given it.
    pub fn refused(&self, code: Code) {
        if let Some(at) = Code::ALL.iter().position(|&c| c == code) {
            self.refusals[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Called for every request with the number of its sequences: now and then takes what has piled up.
    pub fn arrived(&self, engine: &EngineHandle, sequences: usize) {
        if self.piles_up(sequences as u64) {
            let _scrape = self.scrape.lock().unwrap_or_else(PoisonError::into_inner);
            self.absorb(&engine.take_published());
            self.handle.run_upkeep();
        }
    }

    /// Whether these sequences fill another block of `ABSORB_EVERY`.
    fn piles_up(&self, sequences: u64) -> bool {
        let before = self.arrivals.fetch_add(sequences, Ordering::Relaxed);
        before / ABSORB_EVERY != (before + sequences) / ABSORB_EVERY
    }

    /// The text of a scrape.
    pub fn render(&self, engine: &EngineHandle) -> String {
        let _scrape = self.scrape.lock().unwrap_or_else(PoisonError::into_inner);
        self.series.queue_peak.set(engine.permits().peak() as f64);
        self.series.uptime.set(self.started.elapsed().as_secs_f64());
        self.series.failed_engines.set(if engine.fatal().borrow().is_some() { 1.0 } else { 0.0 });
        let published = engine.take_published();
        let account = &published.snapshot.account;
        for ((counter, count), code) in self.series.refused.iter().zip(&self.refusals).zip(Code::ALL) {
            // The engine refuses those that come when it has just closed.
            let by_engine = match code {
                Code::Draining => account.refused_draining.saturating_sub(account.refused_dead),
                Code::EngineFailed => account.refused_dead,
                _ => 0,
            };
            counter.absolute(count.load(Ordering::Relaxed) + by_engine);
        }
        self.absorb(&published);
        self.text(&published.snapshot.account)
    }

    /// The time the server has run.
    pub fn uptime_seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    fn text(&self, account: &Account) -> String {
        let mut text = self.handle.render();
        let steps = &account.steps;
        write_sizes(&mut text, names::DECODE_BATCH, &steps.decode_sizes, steps.decode_rows);
        write_sizes(&mut text, names::PREFILL_BATCH, &steps.prefill_sizes, steps.prefill_tokens);
        text
    }

    fn absorb(&self, published: &Published) {
        published.samples.iter().for_each(|sample| self.series.observe(sample));
        self.series.set(&published.snapshot.account);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::Snapshot;
    use std::sync::Arc;

    fn sample() -> FinishedSample {
        FinishedSample {
            dialect: Dialect::Native,
            prompt_tokens: 7,
            generated_tokens: 3,
            queue_us: 10.0,
            ttft_us: 2_000.0,
            e2e_us: 9_000.0,
            gaps_us: vec![3_000.0, 4_000.0],
        }
    }

    #[test]
    fn histograms_count_the_finished_requests_and_gaps_count_tokens_but_the_first() {
        let metrics = Metrics::new();
        let mut account = Account { accepted: 2, ..Account::default() };
        account.accepted_by_dialect[0] = 2;
        account.ended[0][0] = 2;
        let snapshot = Arc::new(Snapshot { account, version: 1 });
        metrics.absorb(&Published { snapshot, samples: vec![sample(), sample()] });
        let text = metrics.handle.render();
        let holds = |line: &str| assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        holds("crucible_time_to_first_token_seconds_count 2");
        holds("crucible_time_to_first_token_seconds_bucket{le=\"0.001\"} 0");
        holds("crucible_time_to_first_token_seconds_bucket{le=\"0.0025\"} 2");
        holds("crucible_inter_token_latency_seconds_count 4");
        holds("crucible_ended_requests_total{dialect=\"native\",outcome=\"finished\"} 2");
        holds("crucible_ended_requests_total{dialect=\"openai_chat\",outcome=\"failed\"} 0");
    }

    #[test]
    fn samples_are_taken_by_sequences_and_not_by_requests() {
        // Seen: 255 requests of 1,024 choices left their samples lying.
        let metrics = Metrics::new();
        assert!((0..255).all(|_| !metrics.piles_up(1)) && metrics.piles_up(1));
        assert!((0..255).all(|_| metrics.piles_up(1_024)));
        assert!(!metrics.piles_up(255) && metrics.piles_up(2));
    }

    #[test]
    fn graphs_are_told_apart_by_class_launch_and_outcome() {
        let metrics = Metrics::new();
        let mut account = Account::default();
        let counts = |n| GraphCounts {
            replays: n,
            eager: n + 1,
            captures: n + 2,
            failures: n + 3,
            evictions: n + 4,
            capture_us: n + 5,
        };
        account.steps.device.graphs = [counts(10), counts(20), counts(30)];
        account.steps.device.allocations = 99;
        let snapshot = Arc::new(Snapshot { account, version: 1 });
        metrics.absorb(&Published { snapshot, samples: Vec::new() });
        let text = metrics.handle.render();
        let holds = |line: &str| assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        holds("crucible_graph_steps_total{class=\"decode\",launch=\"graph\"} 10");
        holds("crucible_graph_steps_total{class=\"prefill\",launch=\"eager\"} 21");
        holds("crucible_graph_captures_total{class=\"packed\",outcome=\"kept\"} 32");
        holds("crucible_graph_captures_total{class=\"decode\",outcome=\"failed\"} 13");
        holds("crucible_graph_evictions_total{class=\"prefill\"} 24");
        holds("crucible_graph_capture_microseconds_total{class=\"packed\"} 35");
        holds("crucible_device_allocations_total 99");
    }

    #[test]
    fn every_metric_has_its_help_text() {
        let metrics = Metrics::new();
        let snapshot = Arc::new(Snapshot::default());
        metrics.absorb(&Published { snapshot, samples: vec![sample()] });
        let text = metrics.text(&Account::default());
        for metric in names::ALL {
            assert!(text.contains(&format!("# HELP {} {}", metric.name, metric.help)), "{}", metric.name);
        }
    }
}
