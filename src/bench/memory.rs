//! Where the memory goes: weights once, the KV pool, and a rest that must stay below a bound.

use std::fmt;

/// Memory beyond weights and KV pool that the process may use, bytes.
pub const REST_MAX: u64 = 200_000_000;

/// What the operating system says of this process, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Resident now that no file backs (weights, pool, heap, stacks).
    pub anonymous: u64,
    /// Resident now, mapped files included.
    pub total: u64,
    /// Most resident ever, mapped files included: while a model loads its file is mapped beside the packed weights.
    pub peak: u64,
}

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// No /proc on this system.
    #[error("cannot read /proc/self/status: {0}; memory is measured on Linux only")]
    Unreadable(#[from] std::io::Error),
    /// A line is missing.
    #[error("/proc/self/status has no line {0}")]
    Missing(&'static str),
}

/// Reads the process's own figures.
///
/// # Errors
/// There is no /proc, or it lacks a line.
pub fn resident() -> Result<Resident, MemoryError> {
    parse(&std::fs::read_to_string("/proc/self/status")?)
}

fn parse(status: &str) -> Result<Resident, MemoryError> {
    let line = |name: &'static str| {
        let value = status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
        let kib = value.and_then(|v| v.trim().trim_end_matches(" kB").trim().parse::<u64>().ok());
        kib.map(|k| k * 1024).ok_or(MemoryError::Missing(name))
    };
    Ok(Resident { anonymous: line("RssAnon")?, total: line("VmRSS")?, peak: line("VmHWM")? })
}

/// The figures beside what the backend holds.
#[derive(Clone, Copy, Debug)]
pub struct MemoryReport {
    /// Of the process, before the first request: no page of the KV pool has been written.
    pub resident: Resident,
    /// Weights as the backend holds them, bytes.
    pub weights: u64,
    /// KV pool when every page has been written, bytes.
    pub kv: u64,
}

impl MemoryReport {
    /// Anonymous memory beyond the weights.
    pub fn rest(&self) -> u64 {
        self.resident.anonymous.saturating_sub(self.weights)
    }

    /// Whether the rest stays below `REST_MAX` and not even the peak of loading exceeds weights + KV + `REST_MAX`.
    pub fn holds(&self) -> bool {
        self.rest() < REST_MAX && self.resident.peak < self.weights + self.kv + REST_MAX
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mb = |bytes: u64| bytes as f64 / 1e6;
        writeln!(f, "weights                {:9.1} MB, held once", mb(self.weights))?;
        writeln!(f, "KV pool, fully written {:9.1} MB", mb(self.kv))?;
        writeln!(
            f,
            "resident at rest       {:9.1} MB, {:.1} MB of it anonymous",
            mb(self.resident.total),
            mb(self.resident.anonymous)
        )?;
        writeln!(f, "peak while loading     {:9.1} MB, the mapped file included", mb(self.resident.peak))?;
        let verdict = if self.holds() { "holds" } else { "EXCEEDED" };
        write!(f, "beyond the weights     {:9.1} MB of {:.0} MB: {verdict}", mb(self.rest()), mb(REST_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_file_is_read_in_kibibytes() {
        let status = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 1024 kB\nRssAnon:\t     512 kB\n";
        let read = parse(status).unwrap();
        assert_eq!(read, Resident { anonymous: 512 << 10, total: 1 << 20, peak: 2 << 20 });
        assert!(matches!(parse("VmRSS:\t1 kB\n"), Err(MemoryError::Missing("RssAnon"))));
    }

    #[test]
    fn a_second_copy_of_the_weights_breaks_the_bound() {
        let report = |anonymous| MemoryReport {
            resident: Resident { anonymous, total: anonymous, peak: anonymous },
            weights: 300_000_000,
            kv: 500_000_000,
        };
        assert!(report(350_000_000).holds() && !report(620_000_000).holds());
    }
}
