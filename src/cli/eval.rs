//! `crucible eval`: cross-entropy and perplexity of a text, through prefill and through decode, equal to the last bit.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use super::Outcome;
use super::assemble::{backend, source};
use crate::backend::driver::Driver;
use crate::check::score::{PREFILL_SLICE, Score, Scorer};
use crate::config::{Config, LogLevel};
use crate::model::load::{self, LoadedModel};
use crate::model::pull::Progress;
use crate::model::tokenizer::SpecialTokens;
use crate::telemetry::log;

/// Tokens per window where none is asked for and the model and its pool hold so many.
const WINDOW: usize = 512;

/// Arguments of `eval`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A file with the text to score.
    text: PathBuf,
    /// Tokens per window; windows do not see each other. Without it 512, or what the model and its pool hold.
    #[arg(long)]
    window: Option<usize>,
    /// Stops after this many tokens.
    #[arg(long, default_value_t = 4096)]
    tokens: usize,
    /// Configuration file (TOML).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Overrides one key of the configuration.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

/// Scores the text both ways and fails when one bit differs.
///
/// # Errors
/// The text cannot be read, has fewer than two tokens, or the model cannot be loaded.
pub fn run(args: &Args) -> Outcome {
    let mut config = Config::load(args.config.as_deref(), &args.overrides)?;
    config.telemetry.log_level = LogLevel::Warn;
    log::init(&config.telemetry);
    for (flag, tokens) in [("--window", args.window), ("--tokens", Some(args.tokens))] {
        if let Some(tokens) = tokens.filter(|&tokens| tokens < 2) {
            return Err(format!("{flag} is {tokens}, it must be at least 2: a token is scored after another").into());
        }
    }
    let path = args.text.display();
    let text = std::fs::read(&args.text).map_err(|e| format!("cannot read {path}: {e}"))?;
    let text = String::from_utf8(text).map_err(|e| format!("{path} is not UTF-8 text: {}", e.utf8_error()))?;
    let LoadedModel { weights, tokenizer, name, .. } =
        load::load(&source(&config, Progress::Shown)?, config.model.profile)?;
    let window = window(&config, weights.geometry.context, args.window)?;
    let mut tokens = tokenizer.encode_prompt(&text, SpecialTokens::AsText)?;
    tokens.truncate(args.tokens);
    if tokens.len() < 2 {
        let text = format!("{path} has fewer than two tokens ({} bytes): a token is scored after another", text.len());
        return Err(text.into());
    }
    let mut scorer = Scorer::new(Driver::new(backend(&config, weights)()?));
    let mut pass = |slice: usize| {
        let (begun, mut score) = (Instant::now(), Score::default());
        for window in tokens.chunks(window) {
            scorer.window(window, slice, &mut score)?;
        }
        Ok::<_, Box<dyn std::error::Error>>((score, begun.elapsed().as_secs_f64()))
    };
    let (prefill, prefill_seconds) = pass(PREFILL_SLICE.min(config.max_step_tokens()))?;
    let (decode, decode_seconds) = pass(1)?;
    let differing = prefill.differing_bits(&decode);
    let mut out = String::new();
    writeln!(out, "model      {name}, profile {}", config.model.profile.name())?;
    writeln!(out, "tokens     {} in windows of {window}, {} scored", tokens.len(), prefill.log_probabilities.len())?;
    for (path, score, seconds) in [("prefill", &prefill, prefill_seconds), ("decode", &decode, decode_seconds)] {
        let (ce, ppl) = (score.cross_entropy(), score.perplexity());
        writeln!(out, "{path:10} cross-entropy {ce:.6} nats, perplexity {ppl:.4} ({seconds:.1} s)")?;
    }
    writeln!(out, "{differing} of {} log-probabilities differ in a bit", prefill.log_probabilities.len())?;
    super::print(&out)?;
    Ok(if differing == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Tokens of a window: as many as were asked for, else `WINDOW` or what fits.
fn window(config: &Config, context: usize, asked: Option<usize>) -> Result<usize, String> {
    let pool = config.kv.pages * config.kv.page_tokens;
    let room = pool.min(context);
    let held = format!("the model's context is {context} tokens, the pool of kv.pages holds {pool}");
    match asked {
        _ if room < 2 => Err(format!("no window of two tokens fits: {held}")),
        Some(window) if window > room => Err(format!("--window is {window}, it must lie in 2..={room}: {held}")),
        asked => Ok(asked.unwrap_or(WINDOW.min(room))),
    }
}
