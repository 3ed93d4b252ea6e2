//! Parses the command line, runs the one command named there and turns its outcome into an exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    crucible::cli::main()
}
