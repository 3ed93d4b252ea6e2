//! A soak on the terminal. Pure.

use super::{Soak, Window};
use crate::load::report::table::{aligned, checks, figure};
use crate::load::stats::quantile;

impl Soak {
    /// Figures and checks for the terminal.
    pub fn table(&self) -> String {
        format!("{}\n{}", self.figures(), checks(&self.checks))
    }

    /// A row a phase, with the clocks below.
    pub fn figures(&self) -> String {
        let heading = [
            "phase",
            "req/s",
            "windows",
            "sent",
            "done",
            "gone",
            "refused",
            "failed",
            "ttft p50",
            "ttft p95",
            "gap p95",
            "gap worst",
            "tok/s",
            "compared",
        ];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        for phase in &self.phases {
            let sum = |of: fn(&Window) -> usize| phase.windows.iter().map(of).sum::<usize>().to_string();
            let median = |of: fn(&Window) -> Option<f64>| {
                let mut values: Vec<f64> = phase.windows.iter().filter_map(of).collect();
                values.sort_by(f64::total_cmp);
                figure(quantile(&values, 0.5))
            };
            rows.push(vec![
                phase.name.to_owned(),
                figure(phase.rate_per_s),
                phase.windows.len().to_string(),
                sum(|w| w.round.counts.submitted),
                sum(|w| w.round.counts.completed),
                sum(|w| w.round.counts.cancelled),
                sum(|w| w.round.counts.refused),
                sum(|w| w.round.counts.failed),
                median(|w| w.round.ttft_ms.p50),
                median(|w| w.round.ttft_ms.p95),
                median(|w| w.round.gap_ms.p95),
                figure(phase.windows.iter().filter_map(|w| w.round.gap_ms.worst).max_by(f64::total_cmp)),
                median(|w| Some(w.round.output_tok_per_s)),
                sum(|w| w.verification.compared),
            ]);
        }
        format!(
            "capacity {:.2} requests/s; times in ms, medians of the windows' figures, the worst gap of all\n{}{}\n",
            self.capacity_per_s,
            aligned(&rows),
            self.observed.line()
        )
    }
}
