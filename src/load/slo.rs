//! Objectives such as `ttft_p95_ms=50`, and goodput: the rate of requests that meet all of them. Pure.

use serde::Serialize;

use super::figures::{Round, gaps_of};
use super::stats::Distribution;

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
        let limit_ms = limit.parse::<f64>().ok().filter(|l| *l > 0.0 && l.is_finite()).ok_or_else(help)?;
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

    /// The round's figure, where it has one.
    pub fn figure(&self, round: &Round) -> Option<f64> {
        self.at(match self.measure {
            Measure::Ttft => &round.ttft_ms,
            Measure::Gap => gaps_of(round),
            Measure::E2e => &round.e2e_ms,
        })
    }

    /// Whether a round meets it. A figure that a round cannot have (gaps of one token, a p99 of ten requests) fails nothing; a round
    /// in which no request completed fails everything.
    pub fn met_by(&self, round: &Round) -> bool {
        round.counts.completed > 0 && self.figure(round).is_none_or(|f| f <= self.limit_ms)
    }
}

/// Completed requests a second that keep every bound themselves: their TTFT, their mean gap, their end-to-end time.
pub fn goodput_per_s(round: &Round, objectives: &[Objective]) -> f64 {
    let good = round.requests.iter().filter(|r| {
        r.outcome == super::job::Outcome::Completed
            && objectives.iter().all(|o| {
                let own = match o.measure {
                    Measure::Ttft => r.ttft_ms,
                    Measure::Gap => r.mean_gap_ms,
                    Measure::E2e => Some(r.e2e_ms),
                };
                own.is_none_or(|ms| ms <= o.limit_ms)
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
        for bad in ["ttft_p95_ms", "ttft_p95=5", "ttft_p96_ms=5", "tpot_p50_ms=5", "ttft_p50_ms=-1", "ttft_p50_ms=nan"]
        {
            assert!(bad.parse::<Objective>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_round_meets_or_misses_and_goodput_counts_the_requests_that_keep_every_bound() {
        let round = round();
        assert!(objective("ttft_p50_ms=20").met_by(&round) && !objective("ttft_p50_ms=19").met_by(&round));
        assert!(!objective("ttft_worst_ms=89").met_by(&round));
        assert!(objective("ttft_p99_ms=1").met_by(&round), "three requests have no p99");
        assert_eq!(goodput_per_s(&round, &[objective("ttft_p95_ms=50")]), 1.0);
        assert_eq!(goodput_per_s(&round, &[objective("ttft_p95_ms=50"), objective("gap_p50_ms=3")]), 0.0);
        assert_eq!(goodput_per_s(&round, &[]), 1.5);
    }

    #[test]
    fn a_round_without_a_completed_request_meets_nothing() {
        let start = Instant::now();
        let round = round_of(0, start, &[Record::failed(0, "x".into())], Origin::Sent);
        assert!(!objective("ttft_p95_ms=50").met_by(&round));
    }
}
