//! The groups of arguments that commands of `crucible load` share, and their checks.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use crate::load::burst::{PromptReuse, Rounds};
use crate::load::devices::DeviceOptions;
use crate::load::dialect::{Dialect, Policy};
use crate::load::job::CancelPoint;
use crate::load::limits;
use crate::load::prompts::TokenRange;
use crate::load::render::Seeding;
use crate::load::slo::Objective;

/// Warm-ups, and trials.
const ROUNDS: usize = 3;
/// Seconds until a server is ready.
const READY_S: u64 = 120;
/// Generated tokens of a mix.
const OUTPUT_TOKENS: u32 = 64;
/// Cancel points of a mix.
const CANCEL_AT: [CancelPoint; 4] =
    [CancelPoint::AtOnce, CancelPoint::AfterMs(20), CancelPoint::AfterTokens(1), CancelPoint::AfterTokens(8)];

#[derive(Debug, Args)]
pub(super) struct TargetArgs {
    /// The server; http://127.0.0.1:8080 by default.
    #[arg(long)]
    pub target: Option<String>,
    /// Model id to name; the first of /v1/models otherwise.
    #[arg(long)]
    pub model: Option<String>,
    /// Sent as bearer token and x-api-key.
    #[arg(long)]
    pub api_key: Option<String>,
    #[command(flatten)]
    pub client: ClientArgs,
}

#[derive(Debug, Args)]
pub(super) struct ClientArgs {
    /// Seed of prompts, sampling seeds and arrivals.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Token ids that prompts draw from.
    #[arg(long, default_value = "300..30000")]
    pub token_range: TokenRange,
    /// Worker threads of the client; 1 by default.
    #[arg(long, value_parser = limits::THREADS.parse::<usize>())]
    pub threads: Option<usize>,
    /// A request that takes longer has failed.
    #[arg(long, default_value_t = 600, value_parser = limits::TIMEOUT_S.parse::<u64>())]
    pub timeout_s: u64,
}

impl TargetArgs {
    pub fn url(&self) -> &str {
        self.target.as_deref().unwrap_or("http://127.0.0.1:8080")
    }
}

impl ClientArgs {
    pub fn seeding(&self) -> Seeding {
        Seeding { seed: self.seed, token_range: self.token_range }
    }

    pub fn threads(&self) -> usize {
        self.threads.unwrap_or(1)
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s)
    }
}

#[derive(Debug, Args)]
pub(super) struct AskArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// How the server is asked; native by default.
    #[arg(long, value_enum)]
    pub dialect: Option<Dialect>,
}

impl AskArgs {
    pub fn dialect(&self) -> Dialect {
        self.dialect.unwrap_or(Dialect::Native)
    }
}

#[derive(Debug, Args)]
pub(super) struct DeviceArgs {
    /// A program that is asked for the GPUs' clocks and power, as nvidia-smi is, instead of the driver's library.
    #[arg(long, value_name = "PROGRAM")]
    pub nvidia_smi: Option<PathBuf>,
    /// The GPU whose medians under load are compared, by its number in nvidia-smi; 0 by default.
    #[arg(long, value_parser = limits::GPU.parse::<u32>())]
    pub gpu: Option<u32>,
}

impl DeviceArgs {
    pub fn options(&self) -> DeviceOptions {
        DeviceOptions { nvidia_smi: self.nvidia_smi.clone(), gpu: self.gpu.unwrap_or(0) }
    }

    /// A flag that was given.
    pub fn given(&self) -> Option<&'static str> {
        first_given(&[("--nvidia-smi", self.nvidia_smi.is_some()), ("--gpu", self.gpu.is_some())])
    }
}

#[derive(Debug, Args)]
pub(super) struct OutputArgs {
    /// Write the report as JSON.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Write the report as one HTML page.
    #[arg(long)]
    pub html: Option<PathBuf>,
}

impl OutputArgs {
    /// The files, for the check before a measurement.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        [&self.out, &self.html].into_iter().flatten().map(PathBuf::as_path)
    }
}

#[derive(Debug, Args)]
pub(super) struct JudgeArgs {
    /// Compare every output with this oracle.
    #[arg(long)]
    pub verify: Option<PathBuf>,
    /// An objective that every round must meet, such as ttft_p95_ms=50; may be given several times.
    #[arg(long)]
    pub slo: Vec<Objective>,
    /// Measure the client against the stub first and keep the figure in the report.
    #[arg(long)]
    pub capacity: bool,
}

#[derive(Debug, Args)]
pub(super) struct WorkloadArgs {
    /// Names, patterns such as isolated-*, or all; comma-separated.
    #[arg(long)]
    pub workload: String,
    /// A TOML file with workloads of your own.
    #[arg(long)]
    pub workloads: Option<PathBuf>,
    /// Rounds that are not reported; 3 by default.
    #[arg(long, value_parser = limits::WARMUPS.parse::<usize>())]
    pub warmups: Option<usize>,
    /// Rounds that are; 3 by default.
    #[arg(long, value_parser = limits::TRIALS.parse::<usize>())]
    pub trials: Option<usize>,
    /// Whether rounds repeat each other's prompts; fresh by default.
    #[arg(long, value_enum)]
    pub prompts: Option<PromptReuse>,
}

impl WorkloadArgs {
    pub fn rounds(&self) -> Rounds {
        let prompts = self.prompts.unwrap_or(PromptReuse::Fresh);
        Rounds { warmups: self.warmups.unwrap_or(ROUNDS), trials: self.trials.unwrap_or(ROUNDS), prompts }
    }

    /// A flag of rounds or of a file that was given.
    pub fn given(&self) -> Option<&'static str> {
        let flags = [
            ("--warmups", self.warmups.is_some()),
            ("--trials", self.trials.is_some()),
            ("--prompts", self.prompts.is_some()),
            ("--workloads", self.workloads.is_some()),
        ];
        first_given(&flags)
    }
}

#[derive(Debug, Args)]
pub(super) struct PairArgs {
    /// Times that every server is started; 3 by default.
    #[arg(long, value_parser = limits::PAIRS.parse::<usize>())]
    pub pairs: Option<usize>,
    #[command(flatten)]
    pub servers: ServerArgs,
}

#[derive(Debug, Args)]
pub(super) struct ServerArgs {
    /// The program of configurations without a command, this one by default; with --ab once for both, or once for each.
    #[arg(long)]
    pub binary: Vec<PathBuf>,
    /// A server must be ready within this; 120 by default.
    #[arg(long, value_parser = limits::READY_S.parse::<u64>())]
    pub ready_s: Option<u64>,
    /// Folder for the servers' output; target/load-logs by default.
    #[arg(long)]
    pub logs: Option<PathBuf>,
}

impl ServerArgs {
    pub fn ready_wait(&self) -> Duration {
        Duration::from_secs(self.ready_s.unwrap_or(READY_S))
    }

    pub fn logs(&self) -> &Path {
        self.logs.as_deref().unwrap_or(Path::new("target/load-logs"))
    }

    /// A flag that was given.
    pub fn given(&self) -> Option<&'static str> {
        let flags = [
            ("--binary", !self.binary.is_empty()),
            ("--ready-s", self.ready_s.is_some()),
            ("--logs", self.logs.is_some()),
        ];
        first_given(&flags)
    }
}

fn first_given(flags: &[(&'static str, bool)]) -> Option<&'static str> {
    flags.iter().find(|(_, given)| *given).map(|(flag, _)| *flag)
}

/// What a server of this project is started with.
#[derive(Debug, Args)]
pub(super) struct ServedArgs {
    /// The server's configuration; a sweep sets budget and cap on top of it.
    #[arg(long)]
    pub config: PathBuf,
    /// Overrides one key of it, such as executor.backend=cuda.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub settings: Vec<String>,
    /// Sent as bearer token and x-api-key, where the configuration asks for one.
    #[arg(long)]
    pub api_key: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct MixArgs {
    /// Surfaces, in turn; all by default.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub dialects: Vec<Dialect>,
    /// Sampling policies, in turn: greedy, temperature, top-k, top-p, min-p; all by default.
    #[arg(long, value_delimiter = ',', value_parser = policy)]
    pub policies: Vec<Policy>,
    /// Prompt lengths, in turn; 16,64,256,512 by default.
    #[arg(long = "prompt-tokens", value_delimiter = ',', value_parser = limits::PROMPT_TOKENS.parse::<u32>())]
    pub prompt_tokens: Vec<u32>,
    /// Generated tokens; 64 by default.
    #[arg(long, value_parser = limits::OUTPUT_TOKENS.parse::<u32>())]
    pub output_tokens: Option<u32>,
    /// Distinct prompts of each kind; 4 by default.
    #[arg(long, value_parser = limits::PROMPT_VARIANTS.parse::<u64>())]
    pub prompt_variants: Option<u64>,
    /// Every n-th request is cancelled by disconnect, 0 cancels none; 17 by default.
    #[arg(long, value_parser = limits::CANCEL_EVERY.parse::<usize>())]
    pub cancel_every: Option<usize>,
    /// Where, in turn: 0 (at once), 20ms (so long after sending), 8tok (after so many tokens); 0,20ms,1tok,8tok by default, as far as
    /// answers are that long.
    #[arg(long, value_delimiter = ',', value_parser = cancel_point)]
    pub cancel_at: Vec<CancelPoint>,
}

impl MixArgs {
    pub fn output(&self) -> u32 {
        self.output_tokens.unwrap_or(OUTPUT_TOKENS)
    }

    /// The cancel points of answers of at most so many tokens.
    ///
    /// # Errors
    /// One that was given lies beyond all of them.
    pub fn cancel_points(&self, longest: u32) -> Result<Vec<CancelPoint>, String> {
        let beyond = |point: &CancelPoint| matches!(point, CancelPoint::AfterTokens(tokens) if *tokens > longest);
        if let Some(CancelPoint::AfterTokens(tokens)) = self.cancel_at.iter().find(|p| beyond(p)) {
            return Err(format!("--cancel-at {tokens}tok never comes: answers have {longest} tokens at most"));
        }
        if !self.cancel_at.is_empty() {
            return Ok(self.cancel_at.clone());
        }
        Ok(CANCEL_AT.into_iter().filter(|p| !beyond(p)).collect())
    }

    /// A flag of cancelled requests that was given.
    pub fn cancels_given(&self) -> Option<&'static str> {
        first_given(&[("--cancel-every", self.cancel_every.is_some()), ("--cancel-at", !self.cancel_at.is_empty())])
    }

    /// A flag of the requests themselves that was given.
    pub fn given(&self) -> Option<&'static str> {
        let flags = [
            ("--dialects", !self.dialects.is_empty()),
            ("--policies", !self.policies.is_empty()),
            ("--prompt-tokens", !self.prompt_tokens.is_empty()),
            ("--output-tokens", self.output_tokens.is_some()),
            ("--prompt-variants", self.prompt_variants.is_some()),
        ];
        first_given(&flags)
    }
}

pub(super) fn policy(text: &str) -> Result<Policy, String> {
    let value = serde_json::Value::String(text.to_owned());
    serde_json::from_value(value).map_err(|_| format!("{text} is none of greedy, temperature, top-k, top-p, min-p"))
}

pub(super) fn cancel_point(text: &str) -> Result<CancelPoint, String> {
    let help = || format!("{text} is no cancel point; write 0, 20ms or 8tok");
    if text == "0" {
        return Ok(CancelPoint::AtOnce);
    }
    if let Some(ms) = text.strip_suffix("ms") {
        return limits::CANCEL_MS.parse()(ms).map(CancelPoint::AfterMs).map_err(|e| format!("{}: {e}", help()));
    }
    let tokens = text.strip_suffix("tok").ok_or_else(help)?;
    limits::OUTPUT_TOKENS.parse()(tokens).map(CancelPoint::AfterTokens).map_err(|e| format!("{}: {e}", help()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cancel_points_and_policies_read_as_they_are_written() {
        assert_eq!(cancel_point("0"), Ok(CancelPoint::AtOnce));
        assert_eq!(cancel_point("20ms"), Ok(CancelPoint::AfterMs(20)));
        assert_eq!(cancel_point("8tok"), Ok(CancelPoint::AfterTokens(8)));
        assert!(cancel_point("0tok").is_err() && cancel_point("8").is_err());
        assert!(cancel_point("4294967295ms").is_err() && cancel_point("4294967295tok").is_err());
        assert_eq!(policy("top-k"), Ok(Policy::TopK));
        assert!(policy("beam").is_err());
    }
}
