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

use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::output::{note, print};

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

/// A negative number after a flag is its value, which the flag refuses with its own words, and no unknown flag.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let taking = |arg: clap::Arg| if arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg };
    command.mut_args(taking).mut_subcommands(with_negative_numbers)
}

fn parsed() -> Cli {
    let matches = with_negative_numbers(Cli::command()).get_matches();
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

/// Parses the arguments and runs the command.
pub fn main() -> ExitCode {
    let outcome = match parsed().command {
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
        note(format_args!("crucible: {error}"));
        ExitCode::FAILURE
    })
}
