//! What the commands write to the terminal. Nothing here panics: a reader of standard output that has seen enough (`| head -1`) is no
//! error, a full disk is one, and what standard error does not take is lost, because the terminal may be gone while the work goes on.

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::OnceLock;

/// The first failure of [`line`].
static LOST: OnceLock<(ErrorKind, String)> = OnceLock::new();

/// Who reads standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// Has taken it, or may yet.
    There,
    /// Has seen enough and closed the pipe.
    Gone,
}

/// Writes bytes to standard output at once.
///
/// # Errors
/// Standard output takes no more, such as a file on a full disk.
pub fn send(bytes: &[u8]) -> io::Result<Reader> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(Reader::There),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(Reader::Gone),
        Err(error) => Err(io::Error::new(error.kind(), format!("cannot write to standard output: {error}"))),
    }
}

/// Writes a report to standard output, whether or not someone still reads it.
///
/// # Errors
/// As [`send`].
pub fn print(report: &str) -> io::Result<()> {
    send(report.as_bytes()).map(|_| ())
}

/// Writes a line from deep inside of long work, which goes on whatever comes of it; [`complete`] tells of a failure.
pub fn line(text: fmt::Arguments<'_>) {
    if let Err(error) = print(&format!("{text}\n")) {
        // The first failure says it all.
        let _ = LOST.set((error.kind(), error.to_string()));
    }
}

/// Whether every [`line`] so far was taken.
///
/// # Errors
/// The first failure.
pub fn complete() -> io::Result<()> {
    LOST.get().map_or(Ok(()), |(kind, text)| Err(io::Error::new(*kind, text.clone())))
}

/// Writes a line to standard error.
pub fn note(text: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{text}");
}
