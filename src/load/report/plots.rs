//! The plots that the pages have in common: distributions, throughput and the server over time. Pure.

use super::svg::{Form, Labels, Scale, Series, lines};
use crate::load::figures::Round;
use crate::load::stats::{Distribution, LogHistogram, quantile};
use crate::load::watch::{Observed, ServerSample};

/// Lines that have a colour and a name each; more are thin and of one colour.
const NAMED_MAX: usize = 6;
/// Points of a line of throughput.
const RATE_POINTS_MAX: f64 = 300.0;

/// A plot over seconds.
pub(super) fn seconds(title: &str) -> Labels<'_> {
    Labels { title, x: "seconds", x_scale: Scale::Linear }
}

/// A plot over milliseconds.
fn milliseconds(title: &str) -> Labels<'_> {
    Labels { title, x: "ms", x_scale: Scale::Log }
}

/// Series with the names that they have while they are few, and as thin lines of one colour when they are many.
fn few_or_many(what: &str, mut all: Vec<Series>) -> Vec<Series> {
    all.retain(|s| s.points.len() > 1);
    let count = all.len();
    if count > NAMED_MAX {
        for (index, one) in all.iter_mut().enumerate() {
            one.name = if index == 0 { format!("{count} {what}") } else { String::new() };
            (one.form, one.colour) = (Form::Thin, Some(0));
        }
    }
    all
}

fn of_rounds<'a>(
    rounds: impl IntoIterator<Item = &'a Round>,
    points: impl Fn(&Round) -> Vec<(f64, f64)>,
) -> Vec<Series> {
    let one = |r: &Round| Series::line(format!("round {}", r.round), points(r));
    few_or_many("rounds", rounds.into_iter().map(one).collect())
}

/// The cumulative distribution of every round.
pub(super) fn distributions<'a>(
    title: &str,
    rounds: impl IntoIterator<Item = &'a Round>,
    of: fn(&Round) -> &Distribution,
) -> String {
    lines(milliseconds(title), &of_rounds(rounds, |r| of(r).cumulative()))
}

/// The gap histogram of every round, in percent of all gaps; those of 0 are named in the title.
pub(super) fn gap_histograms<'a>(rounds: impl IntoIterator<Item = &'a Round> + Clone) -> String {
    let histograms = || rounds.clone().into_iter().filter_map(|r| r.gap_histogram_ms.as_ref());
    let mut zeros: Vec<f64> = histograms().map(LogHistogram::zeros_percent).collect();
    zeros.sort_by(f64::total_cmp);
    let none = quantile(&zeros, 0.5).filter(|z| *z > 0.0);
    let left_out = none.map_or(String::new(), |z| format!("; {z:.1} % are 0 (one read) and not drawn"));
    let title = format!("gaps between tokens, % of all per bin{left_out}");
    let shares = |r: &Round| r.gap_histogram_ms.as_ref().map(LogHistogram::shares).unwrap_or_default();
    lines(milliseconds(&title), &of_rounds(rounds.clone(), shares))
}

/// Distributions of several groups, each with its rounds': the median of the rounds' quantiles as a line, the least and the greatest as a
/// band.
pub(super) fn grouped_distributions(title: &str, groups: &[(&str, Vec<&Distribution>)]) -> String {
    let mut series = Vec::new();
    for (index, (name, rounds)) in groups.iter().enumerate() {
        let curves: Vec<Vec<(f64, f64)>> =
            rounds.iter().map(|d| d.cumulative()).filter(|curve| !curve.is_empty()).collect();
        let Some(first) = curves.first() else { continue };
        let at = |step: usize, q: f64| {
            let mut values: Vec<f64> = curves.iter().map(|c| c[step].0).collect();
            values.sort_by(f64::total_cmp);
            (quantile(&values, q).unwrap_or(0.0), first[step].1)
        };
        let along = |q: f64| (0..first.len()).map(move |step| (step, q));
        let point = |(step, q)| at(step, q);
        let band: Vec<(f64, f64)> = along(0.0).map(point).chain(along(1.0).rev().map(point)).collect();
        series.push(Series { form: Form::Band, colour: Some(index), ..Series::line("", band) });
        let median = along(0.5).map(point).collect();
        series.push(Series { colour: Some(index), ..Series::line(*name, median) });
    }
    lines(milliseconds(title), &series)
}

/// Output events a second as the client received them, over the time since the first of these rounds' runs began.
pub(super) fn throughput<'a>(name: &str, rounds: impl IntoIterator<Item = (f64, &'a Round)>) -> Series {
    let (mut counts, mut bin_s): (Vec<f64>, f64) = (Vec::new(), 0.0);
    for (t_s, round) in rounds {
        bin_s = round.output_events.bin_s;
        let first = (t_s / bin_s).round() as usize;
        counts.resize(counts.len().max(first + round.output_events.counts.len() + 1), 0.0);
        for (bin, &events) in round.output_events.counts.iter().enumerate() {
            counts[first + bin] += f64::from(events);
        }
    }
    let together = (counts.len() as f64 / RATE_POINTS_MAX).ceil().max(1.0) as usize;
    let width = bin_s * together as f64;
    let rate = |(step, few): (usize, &[f64])| (step as f64 * width, few.iter().sum::<f64>() / width);
    Series::line(name, counts.chunks(together).enumerate().map(rate).collect())
}

/// The plot of one or several lines of throughput, as the client saw it.
pub(super) fn throughputs(series: &[Series]) -> String {
    lines(seconds("output events a second"), series)
}

/// One figure of the server over time.
pub(super) fn of_server(name: &str, observed: &Observed, figure: fn(&ServerSample) -> Option<u64>) -> Series {
    let points = observed.server.iter().filter_map(|s| Some((s.t_s, figure(s)? as f64))).collect();
    Series::line(name, points)
}

/// Requests inside and pages in use, over time; empty where the server does not tell.
pub(super) fn server(observed: &Observed) -> String {
    if observed.server.len() < 2 {
        return String::new();
    }
    let inside = [of_server("active", observed, |s| s.active), of_server("waiting", observed, |s| s.queued)];
    let pages = [of_server("pages", observed, |s| s.pages_used)];
    [lines(seconds("requests inside the server"), &inside), lines(seconds("KV pages in use"), &pages)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::figures::EventBins;

    fn round(round: usize, t_s: f64, counts: &[u32]) -> Round {
        let output_events = EventBins { bin_s: 0.1, counts: counts.to_vec() };
        let ttft_ms = Distribution::of(vec![1.0 + round as f64, 2.0, 3.0]);
        Round { round, t_s, output_events, ttft_ms, ..Round::default() }
    }

    #[test]
    fn throughput_counts_events_in_the_second_in_which_they_came() {
        let rounds = [round(0, 0.0, &[1, 2]), round(1, 0.3, &[4])];
        let line = throughput("x", rounds.iter().map(|r| (r.t_s, r)));
        let rates: Vec<f64> = line.points.iter().map(|p| p.1.round()).collect();
        assert_eq!(rates, [10.0, 20.0, 0.0, 40.0, 0.0]);
    }

    #[test]
    fn every_round_is_drawn_however_many_there_are() {
        let of = |count: usize| {
            let rounds: Vec<Round> = (0..count).map(|n| round(n, 0.0, &[])).collect();
            distributions("TTFT", &rounds, |r| &r.ttft_ms)
        };
        assert_eq!((of(6).matches("<path").count(), of(6).matches("class=\"thin\"").count()), (6, 0));
        assert_eq!((of(30).matches("<path").count(), of(30).matches("class=\"thin\"").count()), (30, 30));
        assert!(of(30).contains("30 rounds"));
    }

    #[test]
    fn a_group_is_a_line_with_a_band_around_it() {
        let (a, b) = (Distribution::of(vec![1.0, 2.0]), Distribution::of(vec![2.0, 4.0]));
        let svg = grouped_distributions("TTFT", &[("x", vec![&a, &b]), ("none", Vec::new())]);
        assert_eq!((svg.matches("<path").count(), svg.matches("class=\"band\"").count()), (2, 1));
        assert!(svg.contains(">x</text>") && !svg.contains("NaN"));
    }
}
