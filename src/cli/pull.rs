//! `crucible pull`: fetches the default model into the cache and prints its path.

use std::path::PathBuf;
use std::process::ExitCode;

use super::Outcome;
use crate::model::pull::{self, Progress};

/// Arguments of `pull`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Cache folder; the user's cache when absent.
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
}

/// Where models are kept when the command line names no folder.
///
/// # Errors
/// Neither `XDG_CACHE_HOME` nor `HOME` names a folder.
pub fn cache_dir(given: Option<&PathBuf>) -> Result<PathBuf, Box<dyn std::error::Error>> {
    let found = given.cloned().or_else(pull::default_cache_dir);
    found.ok_or_else(|| "there is no home folder for the model cache: name one with --cache".into())
}

/// Fetches the model unless the cache holds it.
///
/// # Errors
/// As `model::pull::default_model`.
pub fn run(args: &Args) -> Outcome {
    let path = pull::default_model(&cache_dir(args.cache.as_ref())?, Progress::Shown)?;
    super::print(&format!("{}\n", path.display()))?;
    Ok(ExitCode::SUCCESS)
}
