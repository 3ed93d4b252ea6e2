//! What the kernel tells of a process of this machine.

/// Resident memory in bytes; `None` of a process that has ended, even while nobody has waited for it. Its memory goes before its
/// sockets are closed, so whoever finds a connection closed by its end finds this gone, too.
pub(super) fn resident_bytes(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find(|l| l.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}
