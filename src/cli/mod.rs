//! The command line: one file per command; this one parses and dispatches.
//!
//! A command has an `Args` struct and a `run` that returns an `Outcome`. An error is printed as one line on standard error.

pub mod assemble;
pub mod bench;
pub mod bench_device;
pub mod check;
pub mod eval;
pub mod generate;
pub mod inspect;
pub mod load;
pub mod pull;
pub mod serve;
pub mod tokenize;
pub mod tui;

use std::io::Write as _;
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
    /// Serve a model over HTTP.
    Serve(serve::Args),
    /// Generate one answer in this terminal, without a server.
    Generate(generate::Args),
    /// Measure a part of the engine alone.
    Bench(bench::Args),
    /// Run a validation suite.
    Check(check::Args),
    /// Score a text, through prefill and through decode.
    Eval(eval::Args),
    /// Measure a server under load.
    Load(Box<load::Args>),
    /// Fetch the default model into the cache.
    Pull(pull::Args),
    /// Show what a model file holds.
    Inspect(inspect::Args),
    /// Turn text into token ids, or ids into text.
    Tokenize(tokenize::Args),
    /// Chat with a running server in this terminal.
    Tui(tui::Args),
}

/// Writes a report to standard output. A reader that has seen enough (`| head -1`) is no error.
///
/// # Errors
/// Standard output takes no more, such as a file on a full disk.
fn print(report: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(report.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|e| std::io::Error::new(e.kind(), format!("cannot write to standard output: {e}"))),
    }
}

/// Parses the arguments and runs the command.
pub fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Load(args) => load::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Pull(args) => pull::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Tui(args) => tui::run(&args),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("crucible: {error}");
        ExitCode::FAILURE
    })
}
