//! A comparison of servers as tables on the terminal and as one HTML page. Pure.

use std::fmt::Write as _;

use super::devices;
use super::html;
use super::svg::{BarGroup, bars, escape};
use super::table::{aligned, figure};
use crate::load::compare::{Comparison, PairedRound, VariantRun};
use crate::load::devices::LoadedFigure;
use crate::load::stats::AcrossRounds;

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
        "{}\nunder load, medians of every process; * differs from its pair's control by more than 1 %\n{}",
        aligned(&rows),
        aligned(&loaded_rows(c))
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
    let mut body = String::from("<dl>");
    for v in &c.variants {
        let binary = v.sha256.as_ref().map_or(String::new(), |s| format!(", SHA-256 of the binary {s}"));
        let _ =
            write!(body, "<dt>{}</dt><dd>{}{}</dd>", escape(&v.name), escape(&v.command.join(" ")), escape(&binary));
    }
    let _ = write!(
        body,
        "</dl><p>Every round starts each server anew; the order is reversed on every other round. Changes are in percent against {} \
         of the same round: medians, with the least and the greatest round. Rounds whose loaded clocks differ by more than 1 % \
         are marked with *, those whose clocks are not known with ?.</p>",
        escape(&c.variants[0].name)
    );
    changes(&mut body, c);
    body.push_str("<h2>Clocks and power</h2><p>Medians under load of every process; * differs from its pair's control by more than 1 %.</p><table>");
    for (row, cells) in loaded_rows(c).iter().enumerate() {
        let tag = if row == 0 { "th" } else { "td" };
        body.push_str("<tr>");
        for cell in cells {
            let _ = write!(body, "<{tag}>{}</{tag}>", escape(cell));
        }
        body.push_str("</tr>");
    }
    let _ = write!(
        body,
        "</table><details><summary>second by second</summary><div class=\"plots\">{}</div></details>",
        devices::plots_of_pairs(c)
    );
    rounds(&mut body, c);
    html::page("Load comparison", &body)
}

fn changes(body: &mut String, c: &Comparison) {
    for (title, figure_name) in [
        ("TTFT p50, change in %", "ttft_p50_ms"),
        ("TTFT p95, change in %", "ttft_p95_ms"),
        ("gap p95, change in %", "gap_p95_ms"),
        ("output tok/s, change in %", "output_tok_per_s"),
    ] {
        body.push_str("<div class=\"plots\">");
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
            body.push_str(&bars(title, &others, &groups));
        }
        body.push_str("</div>");
    }
}

fn rounds(body: &mut String, c: &Comparison) {
    body.push_str("<h2>All rounds</h2><table><tr><th>workload</th><th>figure</th><th>variant</th><th>rounds: control → variant (change)</th></tr>");
    for row in &c.changes {
        let rounds: Vec<String> = row
            .rounds
            .iter()
            .map(|r| {
                let mark = match r.clocks_differ {
                    Some(true) => "*",
                    Some(false) => "",
                    None => "?",
                };
                let (a, b) = (figure(Some(r.control)), figure(Some(r.variant)));
                format!("{a} → {b} ({} %){mark}", figure(r.percent))
            })
            .collect();
        let _ = write!(
            body,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&row.workload),
            row.figure,
            escape(&row.variant),
            rounds.join("; ")
        );
    }
    body.push_str("</table>");
}
