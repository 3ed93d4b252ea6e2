//! The report as one HTML page: figures, plots and every round, without a request to anywhere. Here are the page, its tables and the page
//! of a run; the pages of comparisons and soaks lie beside it.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::json;

use super::svg::{BarGroup, Series, bars, escape, lines};
use super::table::{figure, workload_rows};
use super::{Check, ClientFacts, Report, WorkloadReport, devices, plots};
use crate::load::figures::gaps_of;
use crate::load::render::Seeding;
use crate::load::stats::AcrossRounds;

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;color:#222;background:#fff;max-width:1180px;margin:2em auto;padding:0 1em}\
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em;border-top:1px solid #ddd;padding-top:.8em}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #eee;white-space:nowrap}\
td:first-child,th:first-child{text-align:left}.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1em}\
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#555}svg .title{font-weight:600;fill:#222}svg .y,svg .legend{text-anchor:end}\
svg .x{text-anchor:middle}svg .grid{stroke:#e4e4e4}svg path{fill:none;stroke-width:1.6}svg .thin{stroke-width:1;opacity:.35}svg .band{fill-opacity:.14;stroke:none}svg .whisker{stroke:#222}\
.ok{color:#2f8f5b}.fail{color:#b00020;font-weight:600}dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.2em 1em}dt{color:#777}dd{margin:0;overflow-wrap:anywhere}pre{overflow-x:auto}\
details{margin:.6em 0}";

pub(super) fn page(title: &str, body: &str) -> String {
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title><style>{STYLE}</style></head>\
         <body><h1>{0}</h1>{body}</body></html>\n",
        escape(title)
    )
}

/// A cell of a table: its text, and the class that it is shown in.
pub(super) struct Cell(pub String, pub &'static str);

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self(text, "")
    }
}

/// A table; the first row is the heading.
pub(super) fn table<C: Into<Cell>>(rows: impl IntoIterator<Item = Vec<C>>) -> String {
    let mut out = String::from("<table>");
    for (row, cells) in rows.into_iter().enumerate() {
        let tag = if row == 0 { "th" } else { "td" };
        out.push_str("<tr>");
        for Cell(text, class) in cells.into_iter().map(Into::into) {
            let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
            let _ = write!(out, "<{tag}{class}>{}</{tag}>", escape(&text));
        }
        out.push_str("</tr>");
    }
    out + "</table>"
}

/// Names and values.
pub(super) fn facts<'a>(rows: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let mut out = String::from("<dl>");
    for (name, value) in rows {
        let _ = write!(out, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(&value));
    }
    out + "</dl>"
}

/// A group of plots.
pub(super) fn grid(plots: &str) -> String {
    format!("<div class=\"plots\">{plots}</div>")
}

/// What opens at a click.
pub(super) fn folded(title: &str, body: &str) -> String {
    format!("<details><summary>{}</summary>{body}</details>", escape(title))
}

/// A value as it stands in the JSON, folded.
pub(super) fn as_json(title: &str, value: &impl Serialize) -> String {
    let text = serde_json::to_string_pretty(value).unwrap_or_default();
    folded(title, &format!("<pre>{}</pre>", escape(&text)))
}

/// The client's part of a page's facts.
pub(super) fn client(client: &ClientFacts) -> Vec<(&'static str, String)> {
    let host = &client.host;
    let gpu = if host.gpus.is_empty() { "none".to_owned() } else { host.gpus.join(", ") };
    vec![
        ("client", format!("{}, {} threads", client.build(), client.threads)),
        ("client's machine", format!("{}, {} cores", host.cpu.clone().unwrap_or_default(), host.cores)),
        ("GPU, driver", format!("{gpu}, {}", host.driver.clone().unwrap_or_else(|| "-".into()))),
        ("client's load", client.load()),
    ]
}

/// What prompts follow from, in words.
pub(super) fn prompts(seeding: Seeding) -> String {
    format!("{}, {}", seeding.seed, json!(seeding.token_range))
}

/// The checks of a page.
pub(super) fn checks(checks: &[Check]) -> String {
    if checks.is_empty() {
        return String::new();
    }
    let row = |check: &Check| {
        let (class, word) = if check.passed { ("ok", "ok") } else { ("fail", "failed") };
        vec![Cell::from(check.name.clone()), Cell(word.into(), class), Cell::from(check.detail.clone())]
    };
    let heading = ["what had to hold", "", "figures"].map(|name| Cell::from(name.to_owned())).into();
    format!("<h2>Checks</h2>{}", table(std::iter::once(heading).chain(checks.iter().map(row))))
}

/// The page of one run.
pub fn run(report: &Report) -> String {
    let mut body = facts_of(report);
    body.push_str(&checks(&report.checks));
    if let Some(v) = report.verification.as_ref().filter(|v| !v.differences.is_empty()) {
        let items: String = v.differences.iter().map(|d| format!("<li>{}</li>", escape(d))).collect();
        let _ = write!(body, "<ul>{items}</ul>");
    }
    overview(&mut body, &report.workloads);
    let _ = write!(body, "<h2>Over time</h2>{}", grid(&over_time(report)));
    for workload in &report.workloads {
        body.push_str(&one_workload(workload));
    }
    page(&format!("Load report: {} against {}", report.kind, report.target.url), &body)
}

fn facts_of(report: &Report) -> String {
    let device = report.target.health.as_ref().and_then(|h| h.get("device")?.as_str()).unwrap_or("-").to_owned();
    let rows = [
        ("model", report.target.model.clone()),
        ("server's device", device),
        ("clocks and power", report.observed.line()),
        ("seed, token range", prompts(report.seeding)),
        ("options", report.options.to_string()),
    ];
    let server = [
        as_json("server: /health", &report.target.health),
        as_json("server: /stats before", &report.stats_before),
        as_json("server: /stats after", &report.stats_after),
    ];
    facts(rows.into_iter().chain(client(&report.client))) + &server.concat()
}

fn overview(out: &mut String, workloads: &[WorkloadReport]) {
    out.push_str("<h2>Workloads</h2><p>Times in milliseconds: medians of the rounds' own figures.</p>");
    out.push_str(&table(workload_rows(workloads)));
    let mut plots = String::new();
    for chunk in workloads.chunks(6) {
        let group = |figure: fn(&WorkloadReport) -> Option<AcrossRounds>| -> Vec<BarGroup> {
            let bar = |a: AcrossRounds| (a.median, a.min, a.max);
            chunk.iter().map(|w| BarGroup { name: w.workload.name.clone(), bars: vec![figure(w).map(bar)] }).collect()
        };
        plots.push_str(&bars("TTFT p50, ms", &["median"], &group(|w| w.summary.ttft_p50_ms)));
        plots.push_str(&bars("output tokens a second", &["median"], &group(|w| w.summary.output_tok_per_s)));
    }
    out.push_str(&grid(&plots));
}

/// Throughput, requests, the server and the devices over the run.
fn over_time(report: &Report) -> String {
    // In open loop the first entry is the whole run; in closed loop no two workloads run at once.
    let entries = if report.timeline.is_empty() { report.workloads.len() } else { 1 };
    let rounds = report.workloads.iter().take(entries).flat_map(|w| &w.rounds);
    let mut out = plots::throughputs(&[plots::throughput("events", rounds.map(|r| (r.t_s, r)))]);
    let per_second = |name: &str, figure: fn(&super::Second) -> usize| {
        Series::line(name, report.timeline.iter().map(|s| (s.t_s as f64, figure(s) as f64)).collect())
    };
    let requests = [
        per_second("due", |s| s.due),
        per_second("completed", |s| s.completed),
        per_second("refused", |s| s.refused),
        per_second("cancelled", |s| s.cancelled),
    ];
    out.push_str(&lines(plots::seconds("requests a second"), &requests));
    out + &plots::server(&report.observed) + &devices::plots(&report.observed)
}

fn one_workload(w: &WorkloadReport) -> String {
    let plots = [
        plots::distributions("TTFT, cumulative %", &w.rounds, |r| &r.ttft_ms),
        plots::distributions("gaps between tokens, cumulative %", &w.rounds, gaps_of),
        plots::gap_histograms(&w.rounds),
    ];
    let heading = [
        "round",
        "TTFT p50",
        "p95",
        "p99",
        "gap p50",
        "p95",
        "p99",
        "worst",
        "E2E p50",
        "p95",
        "tok/s",
        "client lag p95",
        "done",
        "refused",
        "cancelled",
        "failed",
    ];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for r in &w.rounds {
        let gaps = gaps_of(r);
        let figures = [
            r.ttft_ms.p50,
            r.ttft_ms.p95,
            r.ttft_ms.p99,
            gaps.p50,
            gaps.p95,
            gaps.p99,
            gaps.worst,
            r.e2e_ms.p50,
            r.e2e_ms.p95,
            Some(r.output_tok_per_s),
            r.lag_ms.p95,
        ];
        let counts = [r.counts.completed, r.counts.refused, r.counts.cancelled, r.counts.failed];
        let row = std::iter::once(r.round.to_string()).chain(figures.map(figure));
        rows.push(row.chain(counts.map(|c| c.to_string())).collect());
    }
    let (name, every) = (escape(&w.workload.name), folded("every round", &table(rows)));
    format!("<h2>{name}</h2>{}{every}", grid(&plots.concat()))
}
