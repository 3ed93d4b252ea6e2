//! A comparison of servers as tables on the terminal and as one HTML page. Pure.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::json;

use super::devices::{self, LINES_MAX};
use super::html;
use super::plots::{grouped_distributions, of_server, seconds, throughput};
use super::svg::{BarGroup, Series, bars, escape, lines};
use super::table::{self, aligned, figure};
use crate::load::compare::{Comparison, PairedRound, VariantRun};
use crate::load::devices::LoadedFigure;
use crate::load::figures::{Round, gaps_of};
use crate::load::stats::{AcrossRounds, Distribution};
use crate::load::variant::Variant;

/// How many pairs have other clocks, and how many none that are known.
fn clocks(rounds: &[PairedRound]) -> String {
    let count = |what| rounds.iter().filter(|r| r.clocks_differ == what).count();
    match (count(Some(true)), count(None)) {
        (0, 0) => "same".into(),
        (0, unknown) => format!("{unknown} unknown"),
        (differ, 0) => format!("{differ} differ"),
        (differ, unknown) => format!("{differ} differ, {unknown} unknown"),
    }
}

/// The tables for the terminal: every figure, then the loaded medians of every process.
pub fn text(c: &Comparison) -> String {
    let heading = ["workload", "variant", "figure", "control", "variant", "change %", "min", "max", "clocks"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for row in &c.changes {
        let side = |of: fn(&PairedRound) -> f64| {
            figure(AcrossRounds::of(row.rounds.iter().map(|r| Some(of(r)))).map(|a| a.median))
        };
        let percent = |of: fn(&AcrossRounds) -> f64| figure(row.percent.as_ref().map(of));
        rows.push(vec![
            row.workload.clone(),
            row.variant.clone(),
            row.figure.to_owned(),
            side(|r| r.control),
            side(|r| r.variant),
            percent(|a| a.median),
            percent(|a| a.min),
            percent(|a| a.max),
            clocks(&row.rounds),
        ]);
    }
    format!(
        "{}\nunder load, medians of every process; * differs from its pair's control by more than 1 %\n{}\n{}",
        aligned(&rows),
        aligned(&loaded_rows(c)),
        table::checks(&c.checks)
    )
}

/// One row a process, the heading first; a figure with a star differs from the control's of its pair.
fn loaded_rows(c: &Comparison) -> Vec<Vec<String>> {
    let heading = ["variant", "pair", "samples", "CPU MHz", "SM MHz", "memory MHz", "W", "clocks"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(c.runs.iter().map(|run| loaded_row(c, run)));
    rows
}

fn loaded_row(c: &Comparison, run: &VariantRun) -> Vec<String> {
    let judged = c.loaded.iter().find(|p| p.pair == run.pair && p.variant == run.variant);
    let differs = |f: &&LoadedFigure| f.differs == Some(true);
    let starred = |name: &str, value| {
        let mark = judged.and_then(|p| p.figures.iter().filter(|f| f.figure == name).find(differs)).map_or("", |_| "*");
        format!("{}{mark}", figure(value))
    };
    let clocks = match judged.map(|p| p.clocks_differ) {
        None => "control",
        Some(None) => "unknown",
        Some(Some(true)) => "differ",
        Some(Some(false)) => "same",
    };
    let loaded = &run.observed.loaded;
    vec![
        run.variant.clone(),
        (run.pair + 1).to_string(),
        loaded.samples.to_string(),
        starred("cpu_mhz", loaded.cpu_mhz),
        starred("sm_mhz", loaded.sm_mhz),
        starred("memory_mhz", loaded.memory_mhz),
        starred("power_w", loaded.power_w),
        clocks.to_owned(),
    ]
}

/// The page of a comparison.
pub fn page(c: &Comparison) -> String {
    let mut rows = html::client(&c.client);
    let models: BTreeSet<&str> = c.runs.iter().map(|r| r.target.model.as_str()).collect();
    rows.extend([
        ("model", models.into_iter().collect::<Vec<_>>().join(", ")),
        ("seed, token range", html::prompts(c.seeding)),
        ("rounds of a start", format!("{} warm-ups, {} trials, {} pairs", c.rounds.warmups, c.rounds.trials, c.pairs)),
    ]);
    let mut body = html::facts(rows);
    body.push_str(&html::facts(c.variants.iter().map(|v| {
        let binary = v.sha256.as_ref().map_or(String::new(), |s| format!(", SHA-256 of the binary {s}"));
        (v.name.as_str(), format!("{}{binary}", v.told_command().join(" ")))
    })));
    for v in &c.variants {
        let first = c.runs.iter().find(|r| r.variant == v.name);
        let server = json!({"config": v.config, "health": first.and_then(|r| r.target.health.as_ref()),
            "stats_before": first.and_then(|r| r.stats_before.as_ref()),
            "stats_after": first.and_then(|r| r.stats_after.as_ref())});
        body.push_str(&html::as_json(
            &format!("{}: configuration, /health and /stats of its first start", v.name),
            &server,
        ));
    }
    body.push_str(&html::checks(&c.checks));
    let _ = write!(
        body,
        "<h2>Changes</h2><p>Every round starts each server anew; the order is reversed on every other round. Changes are in percent \
         against {} of the same round: medians, with the least and the greatest round. Rounds whose loaded clocks differ by more than 1 % \
         are marked with *, those whose clocks are not known with ?.</p>",
        escape(&c.variants[0].name)
    );
    changes(&mut body, c);
    distributions(&mut body, c);
    over_time(&mut body, c);
    let _ = write!(
        body,
        "<h2>Clocks and power</h2><p>Medians under load of every process; * differs from its pair's control by more than 1 %.</p>{}{}",
        html::table(loaded_rows(c)),
        html::folded("second by second", &html::grid(&devices::plots_of_pairs(c)))
    );
    rounds(&mut body, c);
    html::page("Load comparison", &body)
}

/// TTFT and gaps of every workload, one line with its band a variant.
fn distributions(body: &mut String, c: &Comparison) {
    body.push_str(
        "<h2>Distributions</h2><p>Cumulative, in percent: the median of the rounds' quantiles, and the least and the greatest around it.</p>",
    );
    for workload in &c.workload_names() {
        let mut plots = String::new();
        for few in few_variants(c) {
            let of = |figure: fn(&Round) -> &Distribution| -> Vec<(&str, Vec<&Distribution>)> {
                let rounds = |v: &Variant| {
                    let runs = c.runs.iter().filter(|r| !r.cut_short && r.variant == v.name);
                    let all = runs.flat_map(|r| &r.workloads).filter(|w| w.workload.name == *workload);
                    all.flat_map(|w| &w.rounds).map(figure).collect()
                };
                few.iter().map(|v| (v.name.as_str(), rounds(v))).collect()
            };
            let title = |what| format!("{workload}: {what}");
            plots.push_str(&grouped_distributions(&title("TTFT"), &of(|r| &r.ttft_ms)));
            plots.push_str(&grouped_distributions(&title("gaps between tokens"), &of(gaps_of)));
        }
        body.push_str(&html::grid(&plots));
    }
}

/// As many variants as a plot has colours, the control among them each time.
fn few_variants(c: &Comparison) -> Vec<Vec<&Variant>> {
    let Some((control, others)) = c.variants.split_first() else { return Vec::new() };
    others.chunks(LINES_MAX - 1).map(|few| std::iter::once(control).chain(few).collect()).collect()
}

/// Throughput, queue and pages of every start, pair by pair.
fn over_time(body: &mut String, c: &Comparison) {
    let pairs = c.runs.iter().map(|r| r.pair + 1).max().unwrap_or(0);
    let mut plots = String::new();
    for pair in 0..pairs {
        let runs: Vec<&VariantRun> = c.runs.iter().filter(|r| r.pair == pair).collect();
        for few in runs.chunks(LINES_MAX) {
            let all = |of: &dyn Fn(&VariantRun) -> Series| -> Vec<Series> {
                few.iter().map(|r| of(r)).filter(|s| !s.points.is_empty()).collect()
            };
            let events = |r: &VariantRun| {
                throughput(&r.variant, r.workloads.iter().flat_map(|w| &w.rounds).map(|round| (round.t_s, round)))
            };
            for (what, series) in [
                ("output events a second", all(&events)),
                ("requests waiting", all(&|r| of_server(&r.variant, &r.observed, |s| s.queued))),
                ("KV pages in use", all(&|r| of_server(&r.variant, &r.observed, |s| s.pages_used))),
            ] {
                plots.push_str(&lines(seconds(&format!("pair {}: {what}", pair + 1)), &series));
            }
        }
    }
    let _ = write!(body, "<h2>Over time</h2>{}", html::grid(&plots));
}

fn changes(body: &mut String, c: &Comparison) {
    let mut plots = String::new();
    for (title, figure_name) in [
        ("TTFT p50, change in %", "ttft_p50_ms"),
        ("TTFT p95, change in %", "ttft_p95_ms"),
        ("gap p95, change in %", "gap_p95_ms"),
        ("output tok/s, change in %", "output_tok_per_s"),
    ] {
        let others: Vec<&str> = c.variants.iter().skip(1).map(|v| v.name.as_str()).collect();
        for chunk in c.workload_names().chunks(6) {
            let groups: Vec<BarGroup> = chunk
                .iter()
                .map(|workload| BarGroup {
                    name: workload.clone(),
                    bars: others
                        .iter()
                        .map(|v| c.change(v, workload, figure_name).map(|a| (a.median, a.min, a.max)))
                        .collect(),
                })
                .collect();
            plots.push_str(&bars(title, &others, &groups));
        }
    }
    body.push_str(&html::grid(&plots));
}

fn rounds(body: &mut String, c: &Comparison) {
    let heading = ["workload", "figure", "variant", "rounds: control → variant (change)"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for row in &c.changes {
        let told = |r: &PairedRound| {
            let mark = match r.clocks_differ {
                Some(true) => "*",
                Some(false) => "",
                None => "?",
            };
            let (a, b) = (figure(Some(r.control)), figure(Some(r.variant)));
            format!("{a} → {b} ({} %){mark}", figure(r.percent))
        };
        let all = row.rounds.iter().map(told).collect::<Vec<_>>().join("; ");
        rows.push(vec![row.workload.clone(), row.figure.to_owned(), row.variant.clone(), all]);
    }
    let _ = write!(body, "<h2>All rounds</h2>{}", html::table(rows));
}
