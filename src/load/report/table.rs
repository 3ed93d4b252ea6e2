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
    let Some(v) = value else { return "-".into() };
    let size = v.abs();
    // Rounding may add a digit before the point: 9.996 is 10.0.
    let decimals = [(99.95, 0), (9.995, 1), (0.9995, 2), (0.09995, 3), (0.009995, 4)];
    if size > 0.0 && size < 0.0009995 {
        return format!("{v:.1e}");
    }
    let decimals = decimals.iter().find(|(from, _)| size >= *from).map_or(5, |d| d.1);
    if size == 0.0 { "0".into() } else { format!("{v:.decimals$}") }
}

/// One row a workload, the heading first; goodput where there are objectives.
pub fn workload_rows(reports: &[WorkloadReport]) -> Vec<Vec<String>> {
    let heading = ["workload", "rounds", "ttft p50", "ttft p95", "gap p50", "gap p95", "gap worst", "tok/s"];
    let ends = ["done", "refused", "cancelled", "failed"];
    let judged = reports.iter().any(|r| !r.goodput_per_s.is_empty());
    let goodput = judged.then_some("goodput/s");
    let mut rows = vec![heading.into_iter().chain(goodput).chain(ends).map(str::to_owned).collect::<Vec<_>>()];
    for report in reports {
        let s = &report.summary;
        let times = [s.ttft_p50_ms, s.ttft_p95_ms, s.gap_p50_ms, s.gap_p95_ms, s.gap_worst_ms, s.output_tok_per_s];
        let medians = times.map(|across| figure(across.map(|a| a.median)));
        let good = AcrossRounds::of(report.goodput_per_s.iter().copied().map(Some)).map(|a| a.median);
        let counts = [s.counts.completed, s.counts.refused, s.counts.cancelled, s.counts.failed];
        let name = [report.workload.name.clone(), report.rounds.len().to_string()];
        let row = name.into_iter().chain(medians).chain(judged.then(|| figure(good)));
        rows.push(row.chain(counts.map(|c| c.to_string())).collect());
    }
    rows
}

/// The medians of every workload.
pub fn workloads(reports: &[WorkloadReport]) -> String {
    format!("{}times in ms, medians of the rounds' figures\n", aligned(&workload_rows(reports)))
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
        let small = [0.0, 0.004, -0.0456, 0.5, 0.999_9, 9.996, 0.000_02].map(|v| figure(Some(v)));
        assert_eq!(small, ["0", "0.00400", "-0.0456", "0.500", "1.00", "10.0", "2.0e-5"]);
    }
}
