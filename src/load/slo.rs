//! Objectives such as `ttft_p95_ms=50`, and goodput: the rate of requests that meet all of them. Pure.

use serde::Serialize;

use super::figures::{Round, gaps_of};
use super::limits;
use super::stats::{Distribution, P99_SAMPLES_MIN};

/// Which time an objective bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Time to first token.
    Ttft,
    /// Time between tokens.
    Gap,
    /// End to end.
    E2e,
}

/// Which point of a round's distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Point {
    /// Median.
    P50,
    /// 95th percentile.
    P95,
    /// 99th percentile.
    P99,
    /// The greatest.
    Worst,
}

/// An upper bound on one figure of every round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Objective {
    /// As it was written.
    pub text: String,
    /// What is bounded.
    pub measure: Measure,
    /// Where.
    pub point: Point,
    /// By how many milliseconds.
    pub limit_ms: f64,
}

impl std::str::FromStr for Objective {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let help = || {
            format!("{text} is no objective; write one like ttft_p95_ms=50 (ttft, gap or e2e; p50, p95, p99 or worst)")
        };
        let (name, limit) = text.split_once('=').ok_or_else(help)?;
        let limit_ms = limit.parse::<f64>().map_err(|_| help())?;
        let limit_ms = limits::OBJECTIVE_MS.check(limit_ms).map_err(|e| format!("{text}: {e}"))?;
        let mut parts = name.split('_');
        let measure = match parts.next() {
            Some("ttft") => Measure::Ttft,
            Some("gap") => Measure::Gap,
            Some("e2e") => Measure::E2e,
            _ => return Err(help()),
        };
        let point = match parts.next() {
            Some("p50") => Point::P50,
            Some("p95") => Point::P95,
            Some("p99") => Point::P99,
            Some("worst") => Point::Worst,
            _ => return Err(help()),
        };
        if parts.next() != Some("ms") || parts.next().is_some() {
            return Err(help());
        }
        Ok(Self { text: text.to_owned(), measure, point, limit_ms })
    }
}

impl Objective {
    fn at(&self, distribution: &Distribution) -> Option<f64> {
        match self.point {
            Point::P50 => distribution.p50,
            Point::P95 => distribution.p95,
            Point::P99 => distribution.p99,
            Point::Worst => distribution.worst,
        }
    }

    fn samples<'a>(&self, round: &'a Round) -> &'a Distribution {
        match self.measure {
            Measure::Ttft => &round.ttft_ms,
            Measure::Gap => gaps_of(round),
            Measure::E2e => &round.e2e_ms,
        }
    }

    /// The round's figure, over its completed requests.
    ///
    /// # Errors
    /// It has none, and why: such an objective is not met, it cannot be judged.
    pub fn figure(&self, round: &Round) -> Result<f64, String> {
        let samples = self.samples(round);
        self.at(samples).ok_or_else(|| {
            if round.counts.completed == 0 {
                format!("no figure: none of {} requests completed", round.counts.submitted)
            } else if samples.count == 0 {
                "no figure: no sample".into()
            } else {
                format!("no figure: {} samples are too few, a p99 needs {P99_SAMPLES_MIN}", samples.count)
            }
        })
    }

    /// Whether a round has the figure and it keeps the bound.
    pub fn met_by(&self, round: &Round) -> bool {
        self.figure(round).is_ok_and(|f| f <= self.limit_ms)
    }
}

/// Completed requests a second that keep every bound themselves: their TTFT, their mean gap, their end-to-end time. Refused, cancelled and
/// failed requests are never among them.
pub fn goodput_per_s(round: &Round, objectives: &[Objective]) -> f64 {
    let good = round.requests.iter().filter(|r| {
        r.outcome == super::job::Outcome::Completed
            && objectives.iter().all(|o| {
                let keeps = |ms: f64| ms <= o.limit_ms;
                match o.measure {
                    Measure::Ttft => r.ttft_ms.is_some_and(keeps),
                    Measure::Gap => r.mean_gap_ms.is_none_or(keeps), // one output event has no gap to be late in
                    Measure::E2e => keeps(r.e2e_ms),
                }
            })
    });
    if round.duration_s > 0.0 { good.count() as f64 / round.duration_s } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::load::figures::{Origin, round_of};
    use crate::load::job::{Outcome, Record};

    fn round() -> Round {
        let start = Instant::now();
        let record = |ttft_ms: u32| Record {
            sent: start,
            due: start,
            ended: start + Duration::from_millis(2_000),
            outcome: Outcome::Completed,
            event_us: vec![ttft_ms * 1_000, ttft_ms * 1_000 + 4_000],
            ..Record::failed(0, String::new())
        };
        round_of(0, start, &[record(10), record(20), record(90)], Origin::Sent)
    }

    fn objective(text: &str) -> Objective {
        text.parse().expect(text)
    }

    #[test]
    fn objectives_read_as_they_are_written() {
        let o = objective("gap_worst_ms=2.5");
        assert_eq!((o.measure, o.point, o.limit_ms), (Measure::Gap, Point::Worst, 2.5));
        let bad = ["ttft_p95_ms", "ttft_p95=5", "ttft_p96_ms=5", "tpot_p50_ms=5"];
        for bad in bad.into_iter().chain(["ttft_p50_ms=-1", "ttft_p50_ms=nan", "e2e_p50_ms=inf", "e2e_p50_ms=1e300"]) {
            assert!(bad.parse::<Objective>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_round_meets_or_misses_and_goodput_counts_the_requests_that_keep_every_bound() {
        let round = round();
        assert!(objective("ttft_p50_ms=20").met_by(&round) && !objective("ttft_p50_ms=19").met_by(&round));
        assert!(!objective("ttft_worst_ms=89").met_by(&round));
        let p99 = objective("ttft_p99_ms=5000");
        assert_eq!(p99.figure(&round), Err("no figure: 3 samples are too few, a p99 needs 100".into()));
        assert!(!p99.met_by(&round), "what cannot be judged is not met");
        assert_eq!(goodput_per_s(&round, &[objective("ttft_p95_ms=50")]), 1.0);
        assert_eq!(goodput_per_s(&round, &[objective("ttft_p95_ms=50"), objective("gap_p50_ms=3")]), 0.0);
        assert_eq!(goodput_per_s(&round, &[]), 1.5);
    }

    #[test]
    fn a_round_without_a_completed_request_meets_nothing() {
        let start = Instant::now();
        let round = round_of(0, start, &[Record::failed(0, "x".into())], Origin::Sent);
        let ttft = objective("ttft_p95_ms=50");
        assert_eq!(ttft.figure(&round), Err("no figure: none of 1 requests completed".into()));
        assert!(!ttft.met_by(&round));
    }

    #[test]
    fn answers_of_one_token_have_no_gaps_to_judge() {
        let start = Instant::now();
        let one = Record { outcome: Outcome::Completed, event_us: vec![10], ..Record::failed(0, String::new()) };
        let round = round_of(0, start, &[one], Origin::Sent);
        assert_eq!(objective("gap_p50_ms=9").figure(&round), Err("no figure: no sample".into()));
    }
}
