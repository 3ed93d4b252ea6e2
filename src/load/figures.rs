//! From the records of one burst to its figures, and from the rounds of a workload to its summary. Pure.
//!
//! Token counts are the server's where it reports them. Gaps are taken between output events of one request, as the client received
//! them; two tokens in one event make one arrival.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::burst::Burst;
use super::dialect::Dialect;
use super::job::{Outcome, Record};
use super::stats::{AcrossRounds, Distribution, LogHistogram};

/// Bins of a gap histogram.
const HISTOGRAM_BINS: usize = 48;
/// Width of a bin of output events.
const EVENT_BIN: Duration = Duration::from_millis(100);

/// What latencies count from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The moment the request was written: closed loop.
    Sent,
    /// The moment it was due: open loop.
    Due,
}

/// One request in a report.
#[derive(Clone, Debug, Serialize)]
pub struct RequestRow {
    /// Its dialect.
    pub dialect: Dialect,
    /// Seconds from the round's start to the moment it was due.
    pub due_s: f64,
    /// Milliseconds from due to sent: the client's own lag.
    pub lag_ms: f64,
    /// Prompt tokens as the server counts them.
    pub prompt_tokens: Option<u32>,
    /// Generated tokens.
    pub output_tokens: u32,
    /// To the first output event.
    pub ttft_ms: Option<f64>,
    /// Mean gap.
    pub mean_gap_ms: Option<f64>,
    /// To the end.
    pub e2e_ms: f64,
    /// How it ended.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// How many requests ended how.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Sent.
    pub submitted: usize,
    /// Streams that ended in order.
    pub completed: usize,
    /// Refused for want of room.
    pub refused: usize,
    /// Of those, without a `Retry-After`.
    pub refused_without_retry_after: usize,
    /// Cancelled by the client as planned.
    pub cancelled: usize,
    /// Everything else.
    pub failed: usize,
    /// Sent again because a kept-alive connection had been closed.
    pub reconnected: usize,
}

impl Counts {
    /// Counts records.
    pub fn of<'a>(records: impl IntoIterator<Item = &'a Record>) -> Self {
        let mut counts = Self::default();
        for record in records {
            counts.submitted += 1;
            counts.reconnected += usize::from(record.reconnected);
            match record.outcome {
                Outcome::Completed => counts.completed += 1,
                Outcome::Refused { .. } => {
                    counts.refused += 1;
                    counts.refused_without_retry_after += usize::from(!record.has_retry_after);
                }
                Outcome::Cancelled => counts.cancelled += 1,
                Outcome::Failed { .. } => counts.failed += 1,
            }
        }
        counts
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.submitted += other.submitted;
        self.completed += other.completed;
        self.refused += other.refused;
        self.refused_without_retry_after += other.refused_without_retry_after;
        self.cancelled += other.cancelled;
        self.failed += other.failed;
        self.reconnected += other.reconnected;
    }
}

impl std::iter::Sum for Counts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |mut sum, counts| {
            sum += counts;
            sum
        })
    }
}

/// The disturbed stream of a stall workload, over the disturbance: from the first arrival's sending to the last arrival's end.
#[derive(Clone, Debug, Serialize)]
pub struct StreamFigures {
    /// Gaps that overlap the disturbance.
    pub disturbed_gap_ms: Distribution,
    /// Gaps before it.
    pub undisturbed_gap_ms: Distribution,
    /// The stream outlasted the disturbance; otherwise the worst gap may be missing.
    pub covered: bool,
}

/// Output events over time, as the client received them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EventBins {
    /// Width of a bin, seconds.
    pub bin_s: f64,
    /// Events per bin, from the round's start.
    pub counts: Vec<u32>,
}

impl EventBins {
    /// Bins the events since `start` of all requests, however they ended.
    pub fn of<'a>(start: Instant, records: impl IntoIterator<Item = &'a Record>) -> Self {
        let mut counts: Vec<u32> = Vec::new();
        for record in records {
            for &us in &record.event_us {
                let at = record.sent + Duration::from_micros(u64::from(us));
                let Some(since) = at.checked_duration_since(start) else { continue };
                let bin = (since.as_micros() / EVENT_BIN.as_micros()) as usize;
                if bin >= counts.len() {
                    counts.resize(bin + 1, 0);
                }
                counts[bin] += 1;
            }
        }
        Self { bin_s: EVENT_BIN.as_secs_f64(), counts }
    }
}

/// The figures of one burst.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Round {
    /// Which round.
    pub round: usize,
    /// When it began, seconds since the first of the run.
    pub t_s: f64,
    /// First request due to last request ended, seconds.
    pub duration_s: f64,
    /// Requests by end.
    pub counts: Counts,
    /// Output tokens of completed requests.
    pub output_tokens: u64,
    /// Output tokens of completed requests a second, over the round's duration.
    pub output_tok_per_s: f64,
    /// To the first output event, over completed requests.
    pub ttft_ms: Distribution,
    /// Between output events, over completed requests.
    pub gap_ms: Distribution,
    /// To the end, over completed requests.
    pub e2e_ms: Distribution,
    /// The client's own lag between due and sent, over all requests.
    pub lag_ms: Distribution,
    /// Output events over time, the disturbed stream's included.
    pub output_events: EventBins,
    /// The gaps' histogram.
    pub gap_histogram_ms: Option<LogHistogram>,
    /// The disturbed stream.
    pub stream: Option<StreamFigures>,
    /// Every request.
    pub requests: Vec<RequestRow>,
}

impl Round {
    /// Output events a second in the busiest bin, or over a round that is shorter than one.
    pub fn busiest_events_per_s(&self) -> f64 {
        let width = self.output_events.bin_s.min(self.duration_s);
        let most = self.output_events.counts.iter().max().copied().unwrap_or(0);
        if width > 0.0 { f64::from(most) / width } else { 0.0 }
    }
}

/// The figures of a workload over its rounds: each is the rounds' median with the least and the greatest.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Median TTFT.
    pub ttft_p50_ms: Option<AcrossRounds>,
    /// 95th percentile of TTFT.
    pub ttft_p95_ms: Option<AcrossRounds>,
    /// 99th percentile of TTFT, where a round has 100 requests.
    pub ttft_p99_ms: Option<AcrossRounds>,
    /// Median gap.
    pub gap_p50_ms: Option<AcrossRounds>,
    /// 95th percentile of gaps.
    pub gap_p95_ms: Option<AcrossRounds>,
    /// 99th percentile of gaps.
    pub gap_p99_ms: Option<AcrossRounds>,
    /// Greatest gap; of the disturbed stream where there is one.
    pub gap_worst_ms: Option<AcrossRounds>,
    /// Median end-to-end time.
    pub e2e_p50_ms: Option<AcrossRounds>,
    /// 95th percentile of end-to-end time.
    pub e2e_p95_ms: Option<AcrossRounds>,
    /// Output tokens a second.
    pub output_tok_per_s: Option<AcrossRounds>,
    /// Totals over the rounds.
    pub counts: Counts,
}

fn ms(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e3
}

fn origin_of(record: &Record, origin: Origin) -> Instant {
    if origin == Origin::Sent { record.sent } else { record.due }
}

/// Time to the first output event, milliseconds.
pub fn ttft_ms(record: &Record, origin: Origin) -> Option<f64> {
    let before = ms(origin_of(record, origin), record.sent);
    record.event_us.first().map(|&us| before + f64::from(us) / 1e3)
}

/// Gaps between output events, milliseconds.
pub fn gaps_ms(record: &Record) -> impl Iterator<Item = f64> + '_ {
    record.event_us.windows(2).map(|w| f64::from(w[1] - w[0]) / 1e3)
}

fn mean_gap_ms(record: &Record) -> Option<f64> {
    let (first, last) = (record.event_us.first()?, record.event_us.last()?);
    let gaps = record.event_us.len() - 1;
    (gaps > 0).then(|| f64::from(last - first) / 1e3 / gaps as f64)
}

fn row(record: &Record, start: Instant, origin: Origin) -> RequestRow {
    RequestRow {
        dialect: record.dialect,
        due_s: ms(start, record.due) / 1e3,
        lag_ms: ms(record.due, record.sent),
        prompt_tokens: record.prompt_tokens,
        output_tokens: record.output_tokens,
        ttft_ms: ttft_ms(record, origin),
        mean_gap_ms: mean_gap_ms(record),
        e2e_ms: ms(origin_of(record, origin), record.ended),
        outcome: record.outcome.clone(),
    }
}

/// The figures of the requests that started at `start`.
pub fn round_of(round: usize, start: Instant, records: &[Record], origin: Origin) -> Round {
    let completed = || records.iter().filter(|r| r.outcome == Outcome::Completed);
    let first = records.iter().map(|r| origin_of(r, origin)).min().unwrap_or(start);
    let last = records.iter().map(|r| r.ended).max().unwrap_or(start);
    let duration_s = ms(first, last) / 1e3;
    let output_tokens: u64 = completed().map(|r| u64::from(r.output_tokens)).sum();
    let gaps: Vec<f64> = completed().flat_map(gaps_ms).collect();
    Round {
        round,
        t_s: 0.0,
        duration_s,
        output_events: EventBins::of(start, records),
        counts: Counts::of(records),
        output_tokens,
        output_tok_per_s: if duration_s > 0.0 { output_tokens as f64 / duration_s } else { 0.0 },
        ttft_ms: Distribution::of(completed().filter_map(|r| ttft_ms(r, origin)).collect()),
        gap_histogram_ms: LogHistogram::of(&gaps, HISTOGRAM_BINS),
        gap_ms: Distribution::of(gaps),
        e2e_ms: Distribution::of(completed().map(|r| ms(origin_of(r, origin), r.ended)).collect()),
        lag_ms: Distribution::of(records.iter().map(|r| ms(r.due, r.sent)).collect()),
        stream: None,
        requests: records.iter().map(|r| row(r, start, origin)).collect(),
    }
}

/// The figures of a closed-loop burst, the disturbed stream included.
pub fn round_of_burst(burst: &Burst) -> Round {
    let mut round = round_of(burst.round, burst.start, &burst.records, Origin::Sent);
    if let Some(stream) = &burst.stream {
        round.stream = Some(stream_figures(stream, &burst.records));
        round.output_events = EventBins::of(burst.start, burst.records.iter().chain([stream]));
        round.counts += Counts::of([stream]);
    }
    round
}

fn stream_figures(stream: &Record, arrivals: &[Record]) -> StreamFigures {
    let since_us = |at: Instant| ms(stream.sent, at) * 1e3;
    let begin = arrivals.iter().map(|r| since_us(r.sent)).fold(f64::INFINITY, f64::min);
    let end = arrivals.iter().map(|r| since_us(r.ended)).fold(0.0, f64::max);
    let (mut disturbed, mut undisturbed) = (Vec::new(), Vec::new());
    for pair in stream.event_us.windows(2) {
        let gap = f64::from(pair[1] - pair[0]) / 1e3;
        let (from, to) = (f64::from(pair[0]), f64::from(pair[1]));
        if to > begin && from < end {
            disturbed.push(gap);
        } else if to <= begin {
            undisturbed.push(gap);
        }
    }
    StreamFigures {
        disturbed_gap_ms: Distribution::of(disturbed),
        undisturbed_gap_ms: Distribution::of(undisturbed),
        covered: stream.event_us.last().is_some_and(|&last| f64::from(last) >= end),
    }
}

/// The rounds' summary.
pub fn summarise(rounds: &[Round]) -> Summary {
    let across = |figure: fn(&Round) -> Option<f64>| AcrossRounds::of(rounds.iter().map(figure));
    Summary {
        ttft_p50_ms: across(|r| r.ttft_ms.p50),
        ttft_p95_ms: across(|r| r.ttft_ms.p95),
        ttft_p99_ms: across(|r| r.ttft_ms.p99),
        gap_p50_ms: across(|r| gaps_of(r).p50),
        gap_p95_ms: across(|r| gaps_of(r).p95),
        gap_p99_ms: across(|r| gaps_of(r).p99),
        gap_worst_ms: across(|r| gaps_of(r).worst),
        e2e_p50_ms: across(|r| r.e2e_ms.p50),
        e2e_p95_ms: across(|r| r.e2e_ms.p95),
        output_tok_per_s: across(|r| Some(r.output_tok_per_s)),
        counts: rounds.iter().map(|r| r.counts.clone()).sum(),
    }
}

/// The gaps that a workload is about: the disturbed stream's where there is one.
pub fn gaps_of(round: &Round) -> &Distribution {
    round.stream.as_ref().map_or(&round.gap_ms, |s| &s.disturbed_gap_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(start: Instant, due_ms: u64, sent_ms: u64, events_ms: &[u32]) -> Record {
        let at = |ms| start + Duration::from_millis(ms);
        let last = u64::from(events_ms.last().copied().unwrap_or(0));
        Record {
            due: at(due_ms),
            sent: at(sent_ms),
            ended: at(sent_ms + last),
            outcome: Outcome::Completed,
            event_us: events_ms.iter().map(|e| e * 1_000).collect(),
            output_tokens: events_ms.len() as u32,
            ..Record::failed(0, String::new())
        }
    }

    #[test]
    fn open_loop_latency_counts_from_the_due_time_and_closed_loop_from_the_send() {
        let start = Instant::now();
        let records = [record(start, 0, 5, &[10, 12, 16])];
        let closed = round_of(0, start, &records, Origin::Sent);
        let open = round_of(0, start, &records, Origin::Due);
        assert_eq!((closed.ttft_ms.p50, open.ttft_ms.p50), (Some(10.0), Some(15.0)));
        assert_eq!((closed.gap_ms.p50, closed.gap_ms.worst), (Some(3.0), Some(4.0)));
        assert_eq!((closed.e2e_ms.p50, open.e2e_ms.p50), (Some(16.0), Some(21.0)));
        assert!((closed.output_tok_per_s - 3.0 / 0.016).abs() < 1e-6);
    }

    #[test]
    fn only_completed_requests_give_latencies_and_tokens_but_all_are_counted() {
        let start = Instant::now();
        let mut records = vec![record(start, 0, 0, &[10, 20]); 4];
        records[1].outcome = Outcome::Refused { status: 429 };
        records[2].outcome = Outcome::Cancelled;
        records[3].outcome = Outcome::Failed { message: "x".into() };
        let round = round_of(0, start, &records, Origin::Sent);
        let c = &round.counts;
        assert_eq!((c.submitted, c.completed, c.refused, c.cancelled, c.failed), (4, 1, 1, 1, 1));
        assert_eq!((round.output_tokens, round.ttft_ms.count, round.requests.len()), (2, 1, 4));
    }

    #[test]
    fn events_are_counted_when_they_come_whether_or_not_their_request_completes() {
        let start = Instant::now();
        let mut records = vec![record(start, 0, 0, &[10, 99, 101]), record(start, 0, 250, &[60, 70])];
        records[1].outcome = Outcome::Cancelled;
        let round = round_of(0, start, &records, Origin::Sent);
        assert_eq!(round.output_events, EventBins { bin_s: 0.1, counts: vec![2, 1, 0, 2] });
        let later = EventBins::of(start + Duration::from_millis(100), &records);
        assert_eq!(later.counts, [1, 0, 2], "what came before the start is not its own");
    }

    #[test]
    fn the_streams_gaps_are_those_that_overlap_the_disturbance() {
        let start = Instant::now();
        let stream = record(start, 0, 0, &[10, 11, 12, 40, 41, 42, 90]);
        let arrival = record(start, 20, 20, &[15, 21]); // 20 ms to 41 ms
        let figures = stream_figures(&stream, &[arrival]);
        assert_eq!((figures.disturbed_gap_ms.count, figures.disturbed_gap_ms.worst), (2, Some(28.0)));
        assert_eq!((figures.undisturbed_gap_ms.count, figures.covered), (2, true));
        let long = record(start, 20, 20, &[15, 100]);
        assert!(!stream_figures(&stream, &[long]).covered);
    }
}
