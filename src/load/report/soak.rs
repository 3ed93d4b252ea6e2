//! The page of a soak. Pure.

use std::fmt::Write as _;

use super::svg::{Series, escape, lines};
use super::{devices, html, plots};
use crate::load::figures::Round;
use crate::load::soak::{Soak, Window};

/// The page.
pub fn page(s: &Soak) -> String {
    let mut rows = html::client(&s.client);
    rows.extend([
        ("server", s.server.told_command().join(" ")),
        ("SHA-256 of the binary", s.server.sha256.clone().unwrap_or_else(|| "-".into())),
        ("model", s.target.model.clone()),
        ("seed, token range", html::prompts(s.seeding)),
    ]);
    let mut body = html::facts(rows);
    body.push_str(&html::as_json("plan", &s.plan));
    body.push_str(&html::as_json("mix", &s.mix));
    body.push_str(&html::as_json("server: configuration", &s.server.config));
    body.push_str(&html::as_json("server: /health", &s.target.health));
    body.push_str(&html::as_json("server: /stats before", &s.stats_before));
    body.push_str(&html::as_json("server: /stats after", &s.stats_after));
    body.push_str(&html::checks(&s.checks));
    let _ = write!(body, "<h2>Phases</h2><pre>{}</pre>", escape(&s.figures()));
    let _ = write!(body, "<h2>Over time</h2>{}", html::grid(&over_time(s)));
    for phase in &s.phases {
        let rounds: Vec<&Round> = phase.windows.iter().map(|w| &w.round).collect();
        let of = [
            plots::distributions("TTFT, cumulative %", rounds.iter().copied(), |r| &r.ttft_ms),
            plots::distributions("gaps between tokens, cumulative %", rounds.iter().copied(), |r| &r.gap_ms),
            plots::gap_histograms(rounds.iter().copied()),
        ];
        let _ = write!(body, "<h2>Distributions: {}</h2>{}", phase.name, html::grid(&of.concat()));
    }
    html::page("Soak", &body)
}

fn over_time(s: &Soak) -> String {
    let memory = s.memory.iter().map(|m| (m.t_s, m.resident_bytes as f64 / 1e6)).collect();
    let events = |p: &crate::load::soak::Phase| {
        let mut line = plots::throughput(p.name, p.windows.iter().map(|w| (w.round.t_s, &w.round)));
        // What lies before the phase is not its own.
        line.points.retain(|point| p.windows.first().is_some_and(|w| point.0 >= w.round.t_s.floor()));
        line
    };
    let per_window = |title: &str, figure: fn(&Window) -> Option<f64>| {
        let of = |w: &Window| Some((w.round.t_s, figure(w)?));
        let line = |p: &crate::load::soak::Phase| Series::line(p.name, p.windows.iter().filter_map(of).collect());
        let all: Vec<Series> = s.phases.iter().map(line).filter(|line| line.points.len() > 1).collect();
        lines(plots::seconds(title), &all)
    };
    [
        lines(plots::seconds("resident memory of the server, MB"), &[Series::line("resident", memory)]),
        plots::throughputs(&s.phases.iter().map(events).collect::<Vec<_>>()),
        plots::server(&s.observed),
        per_window("output tokens a second, per window", |w| Some(w.round.output_tok_per_s)),
        per_window("TTFT p95 per window, ms", |w| w.round.ttft_ms.p95),
        per_window("gap p95 per window, ms", |w| w.round.gap_ms.p95),
        devices::plots(&s.observed),
    ]
    .concat()
}
