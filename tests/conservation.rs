//! I2, I3 and I10 on the real binary: while streams, whole answers, cancelled and refused requests run, every scrape of /metrics and every
//! look at /stats keeps every law. At the end server and clients have counted the same.

mod http_support;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use http_support::binary::Binary;
use http_support::client::{get, post, send_json};
use http_support::until;
use serde_json::{Value, json};

/// Histograms that count each finished request once.
const ONCE: [&str; 5] = [
    "crucible_time_to_first_token_seconds",
    "crucible_queue_time_seconds",
    "crucible_end_to_end_seconds",
    "crucible_prompt_length_tokens",
    "crucible_output_length_tokens",
];

/// One scrape: series (name with its labels) → value.
struct Scrape(BTreeMap<String, f64>);

impl Scrape {
    fn of(address: SocketAddr) -> Self {
        let text = get(address, "/metrics").text();
        let series = text.lines().filter(|l| !l.starts_with('#')).filter_map(|l| {
            let (series, value) = l.rsplit_once(' ')?;
            Some((series.to_owned(), value.parse().expect("a number")))
        });
        Self(series.collect())
    }

    /// The sum over the series of a name whose labels contain `label`.
    fn sum(&self, name: &str, label: &str) -> f64 {
        let of = |series: &str| series.split('{').next() == Some(name) && series.contains(label);
        self.0.iter().filter(|(series, _)| of(series)).map(|(_, value)| value).sum()
    }

    fn get(&self, name: &str) -> f64 {
        assert!(self.0.keys().any(|series| series.split('{').next() == Some(name)), "{name} is missing");
        self.sum(name, "")
    }

    fn check(&self) {
        let (running, waiting) = (self.get("crucible_running_requests"), self.get("crucible_waiting_requests"));
        let accepted = self.get("crucible_accepted_requests_total");
        let ended = |outcome: &str| self.sum("crucible_ended_requests_total", &format!("outcome=\"{outcome}\""));
        let finished = ended("finished");
        assert_eq!(accepted, finished + ended("cancelled") + ended("failed") + running + waiting, "I2");
        assert_eq!(self.get("crucible_selection_requests_total"), accepted, "greedy and sampled are all");
        assert!(self.get("crucible_prefilling_requests") <= running);
        for name in ONCE {
            assert_eq!(self.get(&format!("{name}_count")), finished, "{name} counts exactly the finished");
        }
        let generated = self.get("crucible_output_length_tokens_sum");
        let gaps = self.get("crucible_inter_token_latency_seconds_count");
        assert_eq!(gaps, generated - finished, "one gap fewer than tokens");
        assert!(
            self.get("crucible_generated_tokens_total") >= generated,
            "tokens of ended requests, finished ones among them"
        );
        let prompts = self.get("crucible_prompt_length_tokens_sum");
        assert!(self.get("crucible_prompt_tokens_total") >= prompts);
        assert!(self.get("crucible_prefill_tokens_total") >= prompts, "a finished prompt was computed");
        let decode = ["count", "sum"].map(|end| self.get(&format!("crucible_decode_batch_rows_{end}")));
        assert_eq!(decode, [self.get("crucible_decode_steps_total"), self.get("crucible_decode_rows_total")]);
        let prefill = ["count", "sum"].map(|end| self.get(&format!("crucible_prefill_batch_tokens_{end}")));
        assert_eq!(prefill, [self.get("crucible_prefill_batches_total"), self.get("crucible_prefill_tokens_total")]);
        let [used, peak, total] = ["used", "peak", "total"].map(|what| self.get(&format!("crucible_kv_{what}_pages")));
        assert!(used <= peak && peak <= total, "I3: {used} used, {peak} at most, {total} in all");
        assert!(running + waiting > 0.0 || used == 0.0, "I3: nobody is inside and {used} pages are out");
        assert!(waiting <= self.get("crucible_queue_peak_requests"));
        self.check_buckets();
    }

    /// Buckets are cumulative and the last one is the count.
    fn check_buckets(&self) {
        for (series, &count) in
            self.0.iter().filter(|(series, _)| series.split('{').next().is_some_and(|n| n.ends_with("_count")))
        {
            let name = series.split('{').next().expect("a name").trim_end_matches("_count");
            let mut buckets: Vec<(f64, f64)> = Vec::new();
            for (bucket, &value) in self.0.iter().filter(|(b, _)| b.starts_with(&format!("{name}_bucket{{"))) {
                let bound = bucket.split("le=\"").nth(1).and_then(|b| b.split('"').next()).expect("a bound");
                buckets.push((if bound == "+Inf" { f64::INFINITY } else { bound.parse().expect("a number") }, value));
            }
            buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            assert!(buckets.windows(2).all(|b| b[0].1 <= b[1].1), "{name}: {buckets:?}");
            assert_eq!(buckets.last().map(|b| b.1), Some(count), "{name}");
        }
    }

    /// What only goes up has not gone down.
    fn check_after(&self, before: &Self) {
        for (series, &value) in &self.0 {
            let name = series.split('{').next().expect("a name");
            let rises = ["_total", "_bucket", "_sum", "_count"].iter().any(|end| name.ends_with(end));
            let earlier = before.0.get(series).copied().unwrap_or(0.0);
            assert!(!rises || value >= earlier - 1e-9, "{series} fell from {earlier} to {value}");
        }
    }
}

fn number(stats: &Value, name: &str) -> u64 {
    stats[name].as_u64().unwrap_or_else(|| panic!("{name} in {stats}"))
}

fn check_stats(address: SocketAddr, pages: u64) {
    let stats = get(address, "/stats").json();
    let n = |name| number(&stats, name);
    let ended = n("completed_requests") + n("cancelled_requests") + n("failed_requests");
    assert_eq!(n("accepted_requests"), ended + n("active_requests") + n("queued_requests"), "I2: {stats}");
    assert_eq!(n("kv_pages_used") + n("kv_pages_free"), pages, "I3: {stats}");
    assert_eq!(n("greedy_requests") + n("sampled_requests"), n("accepted_requests"), "{stats}");
    assert!(n("queued_requests") <= 4 && n("queue_peak") <= 4, "I5: {stats}");
}

/// What the clients saw.
#[derive(Default)]
struct Seen {
    completed: AtomicU64,
    refused: AtomicU64,
    tokens: AtomicU64,
    prompts: AtomicU64,
    /// By the watcher.
    scrapes: AtomicU64,
}

impl Seen {
    fn count(counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, Ordering::Relaxed);
    }
}

/// One client: whole answers and streams, greedy and sampled.
fn whole_answers(address: SocketAddr, client: usize, seen: &Seen) {
    // Some turns, and more until the watcher has seen enough of them.
    for turn in (0..10_000).take_while(|&turn| turn < 40 || seen.scrapes.load(Ordering::Acquire) < 5) {
        let body = json!({"prompt": "abcdefg".repeat(1 + (client + turn) % 9), "max_tokens": 3 + turn % 30, "ignore_eos": true,
                          "temperature": if turn % 2 == 0 { 0.0 } else { 1.0 }, "seed": turn});
        let answer = post(address, "/v1/generate", &body);
        if answer.status == 429 {
            Seen::count(&seen.refused, 1);
            continue;
        }
        assert_eq!(answer.status, 200, "{}", answer.text());
        let answer = answer.json();
        Seen::count(&seen.completed, 1);
        Seen::count(&seen.tokens, number(&answer, "tokens_generated"));
        Seen::count(&seen.prompts, number(&answer, "prompt_tokens"));
    }
}

/// One client that hangs up at another point each time.
fn hang_ups(address: SocketAddr) {
    for turn in 0..30 {
        let body = json!({"prompt": "abc".repeat(1 + turn), "max_tokens": 300, "ignore_eos": true});
        let mut stream = send_json(address, "/v1/generate/stream", &body);
        if turn % 3 > 0 && stream.head().status == 200 && turn % 3 > 1 {
            stream.read_events(turn % 5 + 1);
        }
    }
}

/// Scrapes until the load has ended and checks every law at every scrape.
fn watch(address: SocketAddr, pages: u64, done: &AtomicBool, seen: &Seen) {
    let mut before = Scrape::of(address);
    while !done.load(Ordering::Acquire) {
        let now = Scrape::of(address);
        now.check();
        now.check_after(&before);
        check_stats(address, pages);
        before = now;
        seen.scrapes.fetch_add(1, Ordering::AcqRel);
    }
}

fn under_load(server: &Binary, pages: u64, cancelling: usize) -> Seen {
    let (address, done, seen) = (server.address, AtomicBool::new(false), Seen::default());
    thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(address, pages, &done, &seen));
        let clients: Vec<_> = (0..12)
            .map(|client| {
                let seen = &seen;
                scope.spawn(move || whole_answers(address, client, seen))
            })
            .collect();
        let leavers: Vec<_> = (0..cancelling).map(|_| scope.spawn(move || hang_ups(address))).collect();
        clients.into_iter().chain(leavers).for_each(|client| client.join().expect("a client without a failure"));
        done.store(true, Ordering::Release);
        watcher.join().expect("every law held");
    });
    until("the server is idle", || {
        let stats = get(address, "/stats").json();
        number(&stats, "active_requests") + number(&stats, "queued_requests") + number(&stats, "kv_pages_used") == 0
    });
    seen
}

#[test]
fn every_law_of_the_metrics_holds_at_every_scrape_under_load_and_everybody_counts_the_same() {
    let pages = 48;
    let server = Binary::tiny(&["kv.pages=48", "limits.max_queue=4", "limits.max_batch=4"]);
    let seen = under_load(&server, pages, 0);
    let last = Scrape::of(server.address);
    last.check();
    let seen_by_clients = [&seen.completed, &seen.tokens, &seen.prompts, &seen.refused]
        .map(|counter| counter.load(Ordering::Relaxed) as f64);
    let counted = [
        last.sum("crucible_ended_requests_total", "outcome=\"finished\""),
        last.get("crucible_generated_tokens_total"),
        last.get("crucible_prompt_tokens_total"),
        last.sum("crucible_refused_requests_total", "reason=\"queue_full\""),
    ];
    assert_eq!(counted, seen_by_clients, "finished requests, their tokens, their prompts, refusals");
    assert_eq!(last.get("crucible_output_length_tokens_sum"), counted[1]);
    assert!(seen_by_clients[3] > 0.0, "a queue of four must have refused someone");

    under_load(&server, pages, 3);
    let last = Scrape::of(server.address);
    last.check();
    assert!(last.sum("crucible_ended_requests_total", "outcome=\"cancelled\"") > 0.0);
    assert_eq!(last.sum("crucible_ended_requests_total", "outcome=\"failed\""), 0.0);
}
