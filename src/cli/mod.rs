//! The command line: one file per command; this one parses and dispatches.
//!
//! A command has an `Args` struct and a `run` that returns an `Outcome`. An error is printed as one line on standard error.

pub mod bench;
pub mod check;
pub mod pull;
pub mod tui;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What a command ends with: an exit code, or an error whose text says what to do.
pub type Outcome = Result<ExitCode, Box<dyn std::error::Error>>;

/// A language-model server whose answer is a pure function of the request.
#[derive(Debug, Parser)]
#[command(name = "crucible", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure a backend without HTTP.
    Bench(bench::Args),
    /// Run a validation suite.
    Check(check::Args),
    /// Fetch the default model into the cache.
    Pull(pull::Args),
    /// Chat with a running server in this terminal.
    Tui(tui::Args),
}

/// Parses the arguments and runs the command.
pub fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Pull(args) => pull::run(&args),
        Command::Tui(args) => tui::run(&args),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("crucible: {error}");
        ExitCode::FAILURE
    })
}
