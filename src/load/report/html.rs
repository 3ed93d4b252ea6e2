//! The report as one HTML page: figures, plots and every round, without a request to anywhere.

use std::fmt::Write as _;

use super::devices;
use super::svg::{BarGroup, Labels, Scale, Series, bars, cumulative, escape, lines};
use super::table::figure;
use super::{Report, WorkloadReport};
use crate::load::figures::{Round, gaps_of};
use crate::load::soak::{Soak, Window};
use crate::load::stats::{AcrossRounds, LogHistogram};
use crate::load::watch::ServerSample;

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;color:#222;background:#fff;max-width:1180px;margin:2em auto;padding:0 1em}\
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em;border-top:1px solid #ddd;padding-top:.8em}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #eee;white-space:nowrap}\
td:first-child,th:first-child{text-align:left}.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1em}\
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#555}svg .title{font-weight:600;fill:#222}svg .y,svg .legend{text-anchor:end}\
svg .x{text-anchor:middle}svg .grid{stroke:#e4e4e4}svg path{fill:none;stroke-width:1.6}svg .whisker{stroke:#222}\
.ok{color:#2f8f5b}.fail{color:#b00020;font-weight:600}dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.2em 1em}dt{color:#777}dd{margin:0;overflow-wrap:anywhere}pre{overflow-x:auto}\
details{margin:.6em 0}";

pub(super) fn page(title: &str, body: &str) -> String {
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title><style>{STYLE}</style></head>\
         <body><h1>{0}</h1>{body}</body></html>\n",
        escape(title)
    )
}

/// The page of one run.
pub fn run(report: &Report) -> String {
    let mut body = facts(report);
    checks(&mut body, report);
    overview(&mut body, &report.workloads);
    if !report.timeline.is_empty() || report.observed.server.len() > 1 || report.observed.devices.len() > 1 {
        body.push_str("<h2>Over time</h2><div class=\"plots\">");
        over_time(&mut body, report);
        body.push_str("</div>");
    }
    for workload in &report.workloads {
        one_workload(&mut body, workload);
    }
    page(&format!("Load report: {} against {}", report.kind, report.target.url), &body)
}

fn facts(report: &Report) -> String {
    let host = &report.client.host;
    let device = report.target.health.as_ref().and_then(|h| h.get("device")?.as_str()).unwrap_or("-").to_owned();
    let gpu = if host.gpus.is_empty() { "none".to_owned() } else { host.gpus.join(", ") };
    let rows = [
        ("model", report.target.model.clone()),
        ("server's device", device),
        ("client's machine", format!("{}, {} cores", host.cpu.clone().unwrap_or_default(), host.cores)),
        ("GPU, driver", format!("{gpu}, {}", host.driver.clone().unwrap_or_else(|| "-".into()))),
        ("clocks and power", report.observed.line()),
        ("commit", report.client.commit.clone().unwrap_or_else(|| "-".into())),
        ("seed", report.seeding.seed.to_string()),
        ("options", report.options.to_string()),
        (
            "client's capacity",
            report.client.capacity.as_ref().map_or("not measured".into(), |c| {
                format!("{:.0} events/s on {} threads against the stub", c.events_per_s, c.test.threads)
            }),
        ),
    ];
    let mut out = String::from("<dl>");
    for (name, value) in rows {
        let _ = write!(out, "<dt>{name}</dt><dd>{}</dd>", escape(&value));
    }
    out + "</dl>"
}

fn checks(out: &mut String, report: &Report) {
    if report.checks.is_empty() {
        return;
    }
    out.push_str("<h2>Checks</h2><table>");
    for check in &report.checks {
        let (class, word) = if check.passed { ("ok", "ok") } else { ("fail", "failed") };
        let (name, detail) = (escape(&check.name), escape(&check.detail));
        let _ = write!(out, "<tr><td>{name}</td><td class=\"{class}\">{word}</td><td>{detail}</td></tr>");
    }
    out.push_str("</table>");
    if let Some(v) = report.verification.as_ref().filter(|v| !v.differences.is_empty()) {
        out.push_str("<ul>");
        for difference in &v.differences {
            let _ = write!(out, "<li>{}</li>", escape(difference));
        }
        out.push_str("</ul>");
    }
}

fn bar(across: Option<AcrossRounds>) -> Vec<Option<(f64, f64, f64)>> {
    vec![across.map(|a| (a.median, a.min, a.max))]
}

fn overview(out: &mut String, workloads: &[WorkloadReport]) {
    out.push_str("<h2>Workloads</h2><p>Times in milliseconds. Medians of the rounds' own figures; least and greatest in brackets.</p><table><tr>");
    let heading = [
        "workload",
        "rounds",
        "TTFT p50",
        "TTFT p95",
        "gap p50",
        "gap p95",
        "gap worst",
        "tok/s",
        "goodput/s",
        "done",
        "refused",
        "cancelled",
        "failed",
    ];
    for name in heading {
        let _ = write!(out, "<th>{name}</th>");
    }
    out.push_str("</tr>");
    for w in workloads {
        let s = &w.summary;
        let _ = write!(out, "<tr><td>{}</td><td>{}</td>", escape(&w.workload.name), w.rounds.len());
        for across in [s.ttft_p50_ms, s.ttft_p95_ms, s.gap_p50_ms, s.gap_p95_ms, s.gap_worst_ms, s.output_tok_per_s] {
            let range = across
                .filter(|_| w.rounds.len() > 1)
                .map_or(String::new(), |a| format!(" [{}, {}]", figure(Some(a.min)), figure(Some(a.max))));
            let _ = write!(out, "<td>{}{range}</td>", figure(across.map(|a| a.median)));
        }
        let goodput = AcrossRounds::of(w.goodput_per_s.iter().map(|&g| Some(g)));
        let _ = write!(out, "<td>{}</td>", figure(goodput.map(|g| g.median)));
        for count in [s.counts.completed, s.counts.refused, s.counts.cancelled, s.counts.failed] {
            let _ = write!(out, "<td>{count}</td>");
        }
        out.push_str("</tr>");
    }
    out.push_str("</table><div class=\"plots\">");
    for chunk in workloads.chunks(6) {
        let group = |figure: fn(&WorkloadReport) -> Option<AcrossRounds>| -> Vec<BarGroup> {
            chunk.iter().map(|w| BarGroup { name: w.workload.name.clone(), bars: bar(figure(w)) }).collect()
        };
        out.push_str(&bars("TTFT p50, ms", &["median"], &group(|w| w.summary.ttft_p50_ms)));
        out.push_str(&bars("output tokens a second", &["median"], &group(|w| w.summary.output_tok_per_s)));
    }
    out.push_str("</div>");
}

fn over_time(out: &mut String, report: &Report) {
    let series = |name: &str, points: Vec<(f64, f64)>| Series { name: name.into(), points };
    let labels = |title| Labels { title, x: "seconds", x_scale: Scale::Linear };
    let t = &report.timeline;
    if !t.is_empty() {
        let per_second = |figure: fn(&super::Second) -> usize| -> Vec<(f64, f64)> {
            t.iter().map(|s| (s.t_s as f64, figure(s) as f64)).collect()
        };
        out.push_str(&lines(labels("output events a second"), &[series("events", per_second(|s| s.events))]));
        let requests = [
            series("due", per_second(|s| s.due)),
            series("completed", per_second(|s| s.completed)),
            series("refused", per_second(|s| s.refused)),
            series("cancelled", per_second(|s| s.cancelled)),
        ];
        out.push_str(&lines(labels("requests a second"), &requests));
    }
    let server = &report.observed.server;
    if server.len() > 1 {
        let of = |figure: fn(&ServerSample) -> Option<u64>| -> Vec<(f64, f64)> {
            server.iter().filter_map(|s| Some((s.t_s, figure(s)? as f64))).collect()
        };
        let inside = [series("active", of(|s| s.active)), series("waiting", of(|s| s.queued))];
        out.push_str(&lines(labels("requests inside the server"), &inside));
        out.push_str(&lines(labels("KV pages in use"), &[series("pages", of(|s| s.pages_used))]));
        let tokens = of(|s| s.tokens);
        let rate = tokens.windows(2).filter(|w| w[1].0 > w[0].0).map(|w| {
            // A counter that fell belongs to another server.
            (w[1].0, (w[1].1 - w[0].1).max(0.0) / (w[1].0 - w[0].0))
        });
        let name = "generated tokens a second, counted when their request ends";
        out.push_str(&lines(labels(name), &[series("tokens", rate.collect())]));
    }
    out.push_str(&devices::plots(&report.observed));
}

fn histogram_line(name: String, histogram: &LogHistogram) -> Series {
    let total = histogram.counts.iter().sum::<u64>().max(1) as f64;
    let points = histogram.counts.iter().enumerate().map(|(bin, &count)| {
        (f64::midpoint(histogram.edges[bin], histogram.edges[bin + 1]), count as f64 / total * 100.0)
    });
    Series { name, points: points.collect() }
}

fn one_workload(out: &mut String, w: &WorkloadReport) {
    let _ = write!(out, "<h2>{}</h2><div class=\"plots\">", escape(&w.workload.name));
    let shown: Vec<&Round> = w.rounds.iter().take(6).collect();
    let ttft: Vec<Series> = shown
        .iter()
        .map(|r| cumulative(&format!("round {}", r.round), r.requests.iter().filter_map(|q| q.ttft_ms).collect()))
        .filter(|s| s.points.len() > 1)
        .collect();
    out.push_str(&lines(Labels { title: "TTFT, cumulative %", x: "ms", x_scale: Scale::Log }, &ttft));
    let gaps: Vec<Series> = shown
        .iter()
        .filter_map(|r| Some(histogram_line(format!("round {}", r.round), r.gap_histogram_ms.as_ref()?)))
        .collect();
    out.push_str(&lines(Labels { title: "gaps between tokens, % per bin", x: "ms", x_scale: Scale::Log }, &gaps));
    out.push_str("</div><details><summary>every round</summary><table><tr>");
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
    for name in heading {
        let _ = write!(out, "<th>{name}</th>");
    }
    out.push_str("</tr>");
    for r in &w.rounds {
        let _ = write!(out, "<tr><td>{}</td>", r.round);
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
        for value in figures {
            let _ = write!(out, "<td>{}</td>", figure(value));
        }
        for count in [r.counts.completed, r.counts.refused, r.counts.cancelled, r.counts.failed] {
            let _ = write!(out, "<td>{count}</td>");
        }
        out.push_str("</tr>");
    }
    out.push_str("</table></details>");
}

/// The page of a soak.
pub fn soak(s: &Soak) -> String {
    let mut body = String::from("<dl>");
    let mix = serde_json::to_string(&s.mix).unwrap_or_default();
    let plan = serde_json::to_string(&s.plan).unwrap_or_default();
    let health = s.health.as_ref().map_or("-".into(), ToString::to_string);
    let commit = s.client.commit.clone().unwrap_or_else(|| "-".into());
    for (name, value) in
        [("server", s.server.to_string()), ("health", health), ("plan", plan), ("mix", mix), ("commit", commit)]
    {
        let _ = write!(body, "<dt>{name}</dt><dd>{}</dd>", escape(&value));
    }
    let _ = write!(body, "</dl><pre>{}</pre><div class=\"plots\">", escape(&s.table()));
    let labels = |title| Labels { title, x: "seconds", x_scale: Scale::Linear };
    let series = |name: &str, points: Vec<(f64, f64)>| Series { name: name.into(), points };
    let memory = s.memory.iter().map(|m| (m.t_s, m.resident_bytes as f64 / 1e6)).collect();
    body.push_str(&lines(labels("resident memory of the server, MB"), &[series("resident", memory)]));
    let per_window = |figure: fn(&Window) -> Option<f64>| -> Vec<Series> {
        s.phases
            .iter()
            .map(|p| series(p.name, p.windows.iter().filter_map(|w| Some((w.t_s, figure(w)?))).collect()))
            .filter(|line| line.points.len() > 1)
            .collect()
    };
    body.push_str(&lines(labels("output tokens a second, per window"), &per_window(|w| Some(w.output_tok_per_s))));
    body.push_str(&lines(labels("TTFT p95 per window, ms"), &per_window(|w| w.ttft_p95_ms)));
    body.push_str(&lines(labels("gap p95 per window, ms"), &per_window(|w| w.gap_p95_ms)));
    body.push_str(&devices::plots(&s.observed));
    body.push_str("</div>");
    page("Soak", &body)
}
