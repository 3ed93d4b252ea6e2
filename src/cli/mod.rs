//! The command line: one file per command; this one parses and dispatches.

use std::process::ExitCode;

/// Parses the arguments and runs the command.
pub fn main() -> ExitCode {
    ExitCode::SUCCESS
}
