//! A soak on the terminal. Pure.

use super::{Soak, Window};
use crate::load::report::table::{aligned, checks, figure};
use crate::load::stats::quantile;

impl Soak {
    /// The table for the terminal.
    pub fn table(&self) -> String {
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
                sum(|w| w.counts.submitted),
                sum(|w| w.counts.completed),
                sum(|w| w.counts.cancelled),
                sum(|w| w.counts.refused),
                sum(|w| w.counts.failed),
                median(|w| w.ttft_p50_ms),
                median(|w| w.ttft_p95_ms),
                median(|w| w.gap_p95_ms),
                figure(phase.windows.iter().filter_map(|w| w.gap_worst_ms).max_by(f64::total_cmp)),
                median(|w| Some(w.output_tok_per_s)),
                sum(|w| w.verification.compared),
            ]);
        }
        format!(
            "capacity {:.2} requests/s; times in ms, medians of the windows' figures, the worst gap of all\n{}{}\n{}",
            self.capacity_per_s,
            aligned(&rows),
            self.observed.line(),
            checks(&self.checks)
        )
    }
}
