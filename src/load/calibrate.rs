//! The closed loop in which a request that was refused waits before its place asks again, and the capacity that it measures.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use super::client::Fleet;
use super::drive::Setup;
use super::figures::Counts;
use super::interrupt;
use super::job::{Job, Outcome, Record, Wire};
use super::report::Check;

/// A place whose request was refused asks again after this.
const PAUSE: Duration = Duration::from_millis(5);
/// And so much more for every place that pauses already: all of them together ask at most four thousand times a second.
const PAUSE_EACH: Duration = Duration::from_micros(250);

/// The places of a closed loop, each with one request at a time. One whose request was refused or failed pauses by itself: it delays no other.
#[derive(Debug)]
pub struct Places {
    free: usize,
    taken: usize,
    paused: BinaryHeap<Reverse<Instant>>,
}

/// What came of waiting.
#[derive(Debug)]
pub enum Came {
    /// A request has ended, and its place is free or pauses.
    Ended(Box<Record>),
    /// A pause is over.
    Place,
    /// Nothing more comes: the measurement is to end, or a worker has died.
    Nothing,
}

impl Places {
    /// So many, all free.
    pub fn new(count: usize) -> Self {
        Self { free: count, taken: 0, paused: BinaryHeap::new() }
    }

    /// Requests in flight.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Takes a place that is free at that time; false when there is none.
    pub fn take(&mut self, now: Instant) -> bool {
        self.resume(now);
        let free = self.free > 0;
        (self.free, self.taken) = (self.free - usize::from(free), self.taken + usize::from(free));
        free
    }

    /// Waits until a request ends or a pause is over.
    pub fn wait(&mut self, fleet: &Fleet) -> Came {
        let now = Instant::now();
        self.resume(now);
        let record = match self.paused.peek() {
            Some(Reverse(at)) => fleet.next_within(*at - now),
            None => fleet.next(),
        };
        match record {
            Some(record) => {
                self.give_back(&record.outcome, Instant::now());
                Came::Ended(Box::new(record))
            }
            None if self.paused.is_empty() || interrupt::raised() => Came::Nothing,
            None => Came::Place,
        }
    }

    fn resume(&mut self, now: Instant) {
        while self.paused.peek().is_some_and(|Reverse(at)| *at <= now) {
            self.paused.pop();
            self.free += 1;
        }
    }

    fn give_back(&mut self, outcome: &Outcome, now: Instant) {
        self.taken -= 1;
        match outcome {
            Outcome::Completed | Outcome::Cancelled => self.free += 1,
            Outcome::Refused { .. } | Outcome::Failed { .. } => {
                let others = u32::try_from(self.paused.len()).unwrap_or(u32::MAX);
                self.paused.push(Reverse(now + PAUSE + PAUSE_EACH * others));
            }
        }
    }
}

/// What the measurement of the capacity gave.
#[derive(Clone, Debug, Default)]
pub struct Calibration {
    /// Completed requests a second: the capacity that open-loop rates are set against.
    pub per_s: f64,
    /// Its requests; one that was refused counts as often as it was sent.
    pub counts: Counts,
    /// The first failure.
    pub failure: Option<String>,
}

impl Calibration {
    /// None of its requests fails.
    pub fn check(&self) -> Check {
        let Counts { submitted, failed, .. } = self.counts;
        let first = self.failure.as_ref().map_or(String::new(), |message| format!(", first: {message}"));
        let detail = format!("{failed} of {submitted} failed{first}");
        Check::when(failed == 0, "no request fails while the capacity is measured", detail)
    }
}

/// Measures the capacity with `concurrency` places for `seconds`, of which the first quarter is not counted. From the end on nothing is sent, and
/// what is in flight is waited for.
pub fn capacity(setup: &Setup<'_>, concurrency: usize, seconds: f64, wire: impl Fn(u64) -> Wire) -> Calibration {
    let fleet = setup.fleet();
    let start = Instant::now();
    let (settle, end) = (start + Duration::from_secs_f64(seconds / 4.0), start + Duration::from_secs_f64(seconds));
    let (mut places, mut sent, mut completed) = (Places::new(concurrency), 0, 0u64);
    let mut found = Calibration::default();
    loop {
        while Instant::now() < end && places.take(Instant::now()) {
            fleet.submit(Job::now(0, wire(sent)));
            sent += 1;
        }
        if places.taken() == 0 && Instant::now() >= end {
            break;
        }
        let record = match places.wait(&fleet) {
            Came::Ended(record) => record,
            Came::Place => continue,
            Came::Nothing => break,
        };
        found.counts += Counts::of([&*record]);
        completed += u64::from(record.outcome == Outcome::Completed && (settle..end).contains(&record.ended));
        if let Outcome::Failed { message } = record.outcome {
            found.failure.get_or_insert(message);
        }
    }
    // Less than three quarters when the measurement was ended.
    let counted = Instant::now().min(end).saturating_duration_since(settle).as_secs_f64();
    Calibration { per_s: if counted > 0.0 { completed as f64 / counted } else { 0.0 }, ..found }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::dialect::Dialect;
    use crate::load::job::Length;
    use crate::load::prompts::TokenRange;
    use crate::load::render::{Renderer, Seeding};
    use crate::load::stub::{Stub, StubOptions};
    use crate::load::target::Target;

    #[test]
    fn a_refusal_pauses_its_own_place_and_no_other() {
        let now = Instant::now();
        let mut places = Places::new(3);
        assert!((0..3).all(|_| places.take(now)) && !places.take(now));
        places.give_back(&Outcome::Refused { status: 429 }, now);
        places.give_back(&Outcome::Refused { status: 429 }, now);
        places.give_back(&Outcome::Completed, now);
        assert!(places.take(now) && !places.take(now), "the one that was answered asks at once");
        let first = now + PAUSE;
        assert!(places.take(first) && !places.take(first));
        assert!(places.take(first + PAUSE_EACH) && places.taken() == 3);
    }

    fn calibrated(options: StubOptions, concurrency: usize) -> Calibration {
        let stub = Stub::start(([127, 0, 0, 1], 0).into(), options).expect("a stub");
        let target = Target::new(&format!("http://{}", stub.address), None).expect("a target");
        let seeding = Seeding { seed: 1, token_range: TokenRange::default() };
        let renderer = Renderer::unprobed(target, "stub", Dialect::Native, seeding);
        let timeout = Duration::from_secs(20);
        let setup = Setup { renderer: &renderer, threads: 1, timeout, objectives: &[], oracle: None };
        let bytes = renderer.target().post(Dialect::Native, "{\"max_tokens\":2}");
        let wire = |_| Wire::new(Dialect::Native, bytes.clone(), String::new(), Length::Exactly(2));
        capacity(&setup, concurrency, 0.2, wire)
    }

    #[test]
    fn a_calibration_ends_whatever_is_refused_and_counts_every_request() {
        let none = calibrated(StubOptions { refuse_every: 1, ..StubOptions::default() }, 300);
        assert!(none.per_s == 0.0 && none.counts.refused >= 300 && none.counts.refused == none.counts.submitted);
        assert!(none.check().passed, "a refusal is no failure");
        let broken = calibrated(StubOptions { break_every: 3, ..StubOptions::default() }, 4);
        assert!(broken.counts.failed > 0 && broken.counts.completed > 0, "{broken:?}");
        let check = broken.check();
        assert!(!check.passed && check.detail.contains("failed, first: the connection closed"), "{check:?}");
    }
}
