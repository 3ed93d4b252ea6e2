//! `crucible tui`: a terminal client of a running server.

use std::path::PathBuf;
use std::process::ExitCode;

use super::Outcome;
use crate::tui::{self, Options};

/// Arguments of `tui`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The server to talk to.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    target: String,
    /// A file whose first line is the server's API key.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// A sampling setting to begin with (mode, temperature, top_k, top_p, min_p, seed, max_tokens).
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,
}

/// Runs the client until the user quits.
///
/// # Errors
/// As `tui::run`.
pub fn run(args: &Args) -> Outcome {
    let Args { target, api_key_file, set } = args;
    tui::run(&Options { target: target.clone(), api_key_file: api_key_file.clone(), set: set.clone() })?;
    Ok(ExitCode::SUCCESS)
}
