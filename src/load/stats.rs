//! Statistics of bursts and rounds. Pure.
//!
//! Every figure is taken inside one burst first; rounds are then compared by those figures. Samples of several bursts are never
//! pooled, because a pooled p95 hides a bad round behind two good ones. A p99 needs 100 samples.

use serde::Serialize;

/// Samples that a p99 needs.
pub const P99_SAMPLES_MIN: usize = 100;
/// Steps of a distribution's curve.
const CURVE_STEPS: usize = 20;

/// The q-quantile of ascending samples by linear interpolation between the closest ranks (rank q·(n−1), NumPy's default); `None`
/// without samples.
pub fn quantile(ascending: &[f64], q: f64) -> Option<f64> {
    let last = ascending.len().checked_sub(1)?;
    let rank = q.clamp(0.0, 1.0) * last as f64;
    let below = rank.floor() as usize;
    let above = (below + 1).min(last);
    Some(ascending[below] + (ascending[above] - ascending[below]) * (rank - below as f64))
}

/// A distribution within one burst, in the samples' unit.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Distribution {
    /// Samples.
    pub count: usize,
    /// Arithmetic mean.
    pub mean: Option<f64>,
    /// Median.
    pub p50: Option<f64>,
    /// 95th percentile.
    pub p95: Option<f64>,
    /// 99th percentile; absent below 100 samples.
    pub p99: Option<f64>,
    /// The greatest.
    pub worst: Option<f64>,
    /// The quantiles at 0, 5, ... 100 %, for plots; empty without samples.
    pub curve: Vec<f64>,
}

impl Distribution {
    /// Takes the samples of one burst.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_unstable_by(f64::total_cmp);
        let count = samples.len();
        Self {
            count,
            mean: (count > 0).then(|| samples.iter().sum::<f64>() / count as f64),
            p50: quantile(&samples, 0.50),
            p95: quantile(&samples, 0.95),
            p99: quantile(&samples, 0.99).filter(|_| count >= P99_SAMPLES_MIN),
            worst: samples.last().copied(),
            curve: (0..=CURVE_STEPS).filter_map(|i| quantile(&samples, i as f64 / CURVE_STEPS as f64)).collect(),
        }
    }

    /// The cumulative curve: (sample, percent), ascending.
    pub fn cumulative(&self) -> Vec<(f64, f64)> {
        let percent = |i: usize| i as f64 * 100.0 / CURVE_STEPS as f64;
        self.curve.iter().enumerate().map(|(i, &sample)| (sample, percent(i))).collect()
    }
}

/// One figure over the rounds of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AcrossRounds {
    /// Median of the rounds' figures.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
}

impl AcrossRounds {
    /// Takes one figure of each round that has it; `None` when none has.
    pub fn of(figures: impl IntoIterator<Item = Option<f64>>) -> Option<Self> {
        let mut figures: Vec<f64> = figures.into_iter().flatten().collect();
        figures.sort_unstable_by(f64::total_cmp);
        Some(Self { median: quantile(&figures, 0.5)?, min: *figures.first()?, max: *figures.last()? })
    }
}

/// (b − a) / a in percent; `None` when a is 0.
pub fn percent_change(a: f64, b: f64) -> Option<f64> {
    (a != 0.0).then(|| (b - a) / a * 100.0)
}

/// A histogram with bins of equal width on a logarithmic axis, for plots.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LogHistogram {
    /// Bin edges, ascending, one more than bins.
    pub edges: Vec<f64>,
    /// Samples per bin.
    pub counts: Vec<u64>,
    /// Samples of 0, which no such axis has: tokens that came in one read.
    pub zeros: u64,
}

impl LogHistogram {
    /// Bins the positive samples and counts the others; `None` when none is positive.
    pub fn of(samples: &[f64], bins: usize) -> Option<Self> {
        let positive = || samples.iter().copied().filter(|&s| s > 0.0);
        let low = positive().min_by(f64::total_cmp)?;
        let high = positive().max_by(f64::total_cmp)?.max(low * 1.01);
        let step = (libm::log(high) - libm::log(low)) / bins as f64;
        let edges = (0..=bins).map(|i| low * libm::exp(step * i as f64)).collect();
        let mut counts = vec![0; bins];
        for sample in positive() {
            let bin = ((libm::log(sample) - libm::log(low)) / step) as usize;
            counts[bin.min(bins - 1)] += 1;
        }
        let zeros = samples.len() as u64 - counts.iter().sum::<u64>();
        Some(Self { edges, counts, zeros })
    }

    /// The bins' middles with their share of all samples in percent.
    pub fn shares(&self) -> Vec<(f64, f64)> {
        let middle = |bin: usize| f64::midpoint(self.edges[bin], self.edges[bin + 1]);
        self.counts.iter().enumerate().map(|(bin, &count)| (middle(bin), self.percent(count))).collect()
    }

    /// The samples of 0 in percent of all.
    pub fn zeros_percent(&self) -> f64 {
        self.percent(self.zeros)
    }

    fn percent(&self, count: u64) -> f64 {
        count as f64 * 100.0 / (self.counts.iter().sum::<u64>() + self.zeros).max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::rng::SplitMix64;

    /// The definition by counting: the value at fractional rank q·(n−1), found without sorting.
    fn naive_quantile(samples: &[f64], q: f64) -> f64 {
        let kth = |k: usize| {
            let below = |v: f64| samples.iter().filter(|&&s| s < v).count();
            let up_to = |v: f64| samples.iter().filter(|&&s| s <= v).count();
            samples.iter().copied().find(|&v| below(v) <= k && k < up_to(v)).expect("a k-th value")
        };
        let rank = q * (samples.len() - 1) as f64;
        let (low, high) = (kth(rank.floor() as usize), kth(rank.ceil() as usize));
        low + (high - low) * (rank - rank.floor())
    }

    #[test]
    fn quantiles_agree_with_the_definition_on_random_samples_with_ties() {
        let mut rng = SplitMix64::new(5);
        for n in 1..60 {
            let samples: Vec<f64> = (0..n).map(|_| rng.below(20) as f64 / 4.0).collect();
            let mut sorted = samples.clone();
            sorted.sort_by(f64::total_cmp);
            for q in [0.0, 0.01, 0.25, 0.5, 0.9, 0.95, 0.99, 1.0] {
                assert_eq!(quantile(&sorted, q), Some(naive_quantile(&samples, q)), "n {n}, q {q}");
            }
        }
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[1.0, 2.0, 4.0, 8.0], 0.5), Some(3.0));
    }

    #[test]
    fn a_p99_appears_at_100_samples_and_not_before() {
        assert_eq!(Distribution::of(vec![1.0; 99]).p99, None);
        assert_eq!(Distribution::of(vec![1.0; 100]).p99, Some(1.0));
        assert_eq!(Distribution::of(Vec::new()), Distribution::default());
    }

    #[test]
    fn a_curve_goes_from_the_least_sample_to_the_greatest() {
        let curve = Distribution::of((0..=40).rev().map(f64::from).collect()).cumulative();
        assert_eq!((curve.len(), curve[0], curve[1], curve[20]), (21, (0.0, 0.0), (2.0, 5.0), (40.0, 100.0)));
    }

    #[test]
    fn rounds_are_compared_by_their_own_figures_and_not_pooled() {
        let rounds = [vec![1.0; 20], vec![1.0; 20], vec![100.0; 20]];
        let p95 = AcrossRounds::of(rounds.iter().map(|r| Distribution::of(r.clone()).p95));
        assert_eq!(p95, Some(AcrossRounds { median: 1.0, min: 1.0, max: 100.0 }));
        let pooled = Distribution::of(rounds.concat()).p95;
        assert_eq!(pooled, Some(100.0), "which is what the rule is there to avoid");
        assert_eq!(AcrossRounds::of([None, None]), None);
    }

    #[test]
    fn a_histogram_loses_no_sample() {
        let mut rng = SplitMix64::new(6);
        let samples: Vec<f64> = (0..1_000).map(|_| rng.exponential()).collect();
        let histogram = LogHistogram::of(&samples, 24).expect("samples");
        assert_eq!(histogram.counts.iter().sum::<u64>(), 1_000);
        assert!(histogram.edges.len() == 25 && histogram.edges.windows(2).all(|w| w[0] < w[1]));
        assert_eq!(LogHistogram::of(&[2.0, 2.0], 4).expect("one value").counts.iter().sum::<u64>(), 2);
        let half = LogHistogram::of(&[0.0, 1.0, 0.0, 1.0], 1).expect("samples");
        assert_eq!(
            (half.zeros, half.zeros_percent(), half.shares()[0].1),
            (2, 50.0, 50.0),
            "shares are of all samples"
        );
    }
}
