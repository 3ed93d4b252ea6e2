//! Tables for the terminal: aligned columns of text. Pure.

use super::{Check, WorkloadReport};
use crate::load::stats::AcrossRounds;

/// Lines of columns; the first row is the heading, the first column is set left, the others right.
pub fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|t| t.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(c, (text, &w))| if c == 0 { format!("{text:<w$}") } else { format!("{text:>w$}") })
            .collect();
        out.push_str(cells.join("  ").trim_end());
        out.push('\n');
    }
    out
}

/// Three significant digits, or a dash.
pub fn figure(value: Option<f64>) -> String {
    match value {
        None => "-".into(),
        Some(v) if v.abs() >= 100.0 => format!("{v:.0}"),
        Some(v) if v.abs() >= 10.0 => format!("{v:.1}"),
        Some(v) => format!("{v:.2}"),
    }
}

/// The medians of every workload.
pub fn workloads(reports: &[WorkloadReport]) -> String {
    let heading = [
        "workload",
        "rounds",
        "ttft p50",
        "ttft p95",
        "gap p50",
        "gap p95",
        "gap worst",
        "tok/s",
        "done",
        "refused",
        "cancelled",
        "failed",
    ];
    let median = |a: &Option<AcrossRounds>| figure(a.map(|a| a.median));
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for report in reports {
        let s = &report.summary;
        rows.push(vec![
            report.workload.name.clone(),
            report.rounds.len().to_string(),
            median(&s.ttft_p50_ms),
            median(&s.ttft_p95_ms),
            median(&s.gap_p50_ms),
            median(&s.gap_p95_ms),
            median(&s.gap_worst_ms),
            median(&s.output_tok_per_s),
            s.counts.completed.to_string(),
            s.counts.refused.to_string(),
            s.counts.cancelled.to_string(),
            s.counts.failed.to_string(),
        ]);
    }
    format!("{}times in ms, medians of the rounds' figures\n", aligned(&rows))
}

/// What had to hold, one line each.
pub fn checks(checks: &[Check]) -> String {
    checks.iter().map(|c| format!("{} {}: {}\n", if c.passed { "ok  " } else { "FAIL" }, c.name, c.detail)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_figures_keep_three_digits() {
        let rows = [vec!["name".to_owned(), "ms".to_owned()], vec!["a".to_owned(), "123".to_owned()]];
        assert_eq!(aligned(&rows), "name   ms\na     123\n");
        let shown: Vec<String> = [Some(1234.5), Some(12.34), Some(1.234), None].map(figure).into();
        assert_eq!(shown, ["1234", "12.3", "1.23", "-"]);
    }
}
