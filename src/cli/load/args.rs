//! The arguments of `crucible load` and their checks.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::load::arrivals::Law;
use crate::load::burst::{PromptReuse, Rounds};
use crate::load::devices::DeviceOptions;
use crate::load::dialect::{Dialect, Policy};
use crate::load::job::CancelPoint;
use crate::load::limits;
use crate::load::prompts::TokenRange;
use crate::load::render::Seeding;
use crate::load::slo::Objective;

/// Measure a server under load, or this client itself.
#[derive(Debug, Args)]
pub struct LoadArgs {
    #[command(subcommand)]
    pub(super) command: LoadCommand,
}

#[derive(Debug, Subcommand)]
pub(super) enum LoadCommand {
    /// Closed loop over named workloads; with --ab, two servers in pairs.
    Run(RunArgs),
    /// Open loop at a steady rate, all dialects in turn.
    Sustained(OpenArgs),
    /// Open loop above capacity: refusals apart from failures, all pages back.
    Overload(OpenArgs),
    /// A burst at a small pool and queue (32 pages, queue of 4).
    Pressure(PressureArgs),
    /// Prefill budgets and chunk caps over the same workloads, each against the same round's control.
    Sweep(SweepArgs),
    /// One server from start to drain: stable, overloaded, cancelled and mixed traffic, every output compared, memory watched.
    Soak(SoakArgs),
    /// Send every request alone and keep the answers for --verify.
    RecordOracle(OracleArgs),
    /// Serve the stub, which answers at once.
    Stub(StubArgs),
    /// Measure this client against the stub.
    Selftest(SelftestArgs),
    /// Name the standard workloads.
    List,
}

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
    /// Worker threads of the client.
    #[arg(long, default_value_t = 1, value_parser = limits::THREADS.parse::<usize>())]
    pub threads: usize,
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
    /// The GPU whose medians under load are compared, by its number in nvidia-smi.
    #[arg(long, default_value_t = 0, value_parser = limits::GPU.parse::<u32>())]
    pub gpu: u32,
}

impl DeviceArgs {
    pub fn options(&self) -> DeviceOptions {
        DeviceOptions { nvidia_smi: self.nvidia_smi.clone(), gpu: self.gpu }
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
    /// Rounds that are not reported.
    #[arg(long, default_value_t = 3, value_parser = limits::WARMUPS.parse::<usize>())]
    pub warmups: usize,
    /// Rounds that are.
    #[arg(long, default_value_t = 3, value_parser = limits::TRIALS.parse::<usize>())]
    pub trials: usize,
    /// Whether rounds repeat each other's prompts.
    #[arg(long, value_enum, default_value_t = PromptReuse::Fresh)]
    pub prompts: PromptReuse,
}

impl WorkloadArgs {
    pub fn rounds(&self) -> Rounds {
        Rounds { warmups: self.warmups, trials: self.trials, prompts: self.prompts }
    }
}

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    #[command(flatten)]
    pub ask: AskArgs,
    #[command(flatten)]
    pub work: WorkloadArgs,
    #[command(flatten)]
    pub judge: JudgeArgs,
    #[command(flatten)]
    pub devices: DeviceArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    /// Start two servers in pairs instead: two configurations, or files with a command (docs/load.md).
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with = "target")]
    pub ab: Option<Vec<PathBuf>>,
    #[command(flatten)]
    pub pairs: PairArgs,
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
    /// A server must be ready within this.
    #[arg(long, default_value_t = 120, value_parser = limits::READY_S.parse::<u64>())]
    pub ready_s: u64,
    /// Folder for the servers' output.
    #[arg(long, default_value = "target/load-logs")]
    pub logs: PathBuf,
}

#[derive(Debug, Args)]
pub(super) struct MixArgs {
    /// Surfaces, in turn; all by default.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub dialects: Vec<Dialect>,
    /// Sampling policies, in turn: greedy, temperature, top-k, top-p, min-p; all by default.
    #[arg(long, value_delimiter = ',', value_parser = policy)]
    pub policies: Vec<Policy>,
    /// Prompt lengths, in turn.
    #[arg(long = "prompt-tokens", value_delimiter = ',', default_value = "16,64,256,512", value_parser = limits::PROMPT_TOKENS.parse::<u32>())]
    pub prompt_tokens: Vec<u32>,
    /// Generated tokens.
    #[arg(long, default_value_t = 64, value_parser = limits::OUTPUT_TOKENS.parse::<u32>())]
    pub output_tokens: u32,
    /// Distinct prompts of each kind.
    #[arg(long, default_value_t = 4, value_parser = limits::PROMPT_VARIANTS.parse::<u64>())]
    pub prompt_variants: u64,
    /// Every n-th request is cancelled by disconnect; 0 cancels none.
    #[arg(long, default_value_t = 17, value_parser = limits::CANCEL_EVERY.parse::<usize>())]
    pub cancel_every: usize,
    /// Where, in turn: 0 (at once), 20ms (so long after sending), 8tok (after so many tokens).
    #[arg(long, value_delimiter = ',', value_parser = cancel_point, default_value = "0,20ms,1tok,8tok")]
    pub cancel_at: Vec<CancelPoint>,
}

/// What a trace says itself.
const TRACE_REPLACES: [&str; 10] = [
    "rate",
    "factor",
    "calibrate_s",
    "calibrate_concurrency",
    "duration_s",
    "arrivals",
    "burst",
    "prompt_tokens",
    "output_tokens",
    "prompt_variants",
];

#[derive(Debug, Args)]
pub(super) struct OpenArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub mix: MixArgs,
    /// Requests a second; measured capacity times --factor otherwise.
    #[arg(long, conflicts_with_all = ["factor", "calibrate_s", "calibrate_concurrency"], value_parser = limits::RATE.parse())]
    pub rate: Option<f64>,
    /// Share of the measured capacity: 0.5 for sustained and 2 for overload by default.
    #[arg(long, value_parser = limits::FACTOR.parse())]
    pub factor: Option<f64>,
    /// Requests in flight while capacity is measured.
    #[arg(long, default_value_t = 32, value_parser = limits::CONCURRENCY.parse::<usize>())]
    pub calibrate_concurrency: usize,
    /// How long capacity is measured.
    #[arg(long, default_value_t = 10.0, value_parser = limits::CALIBRATE_S.parse())]
    pub calibrate_s: f64,
    /// How long requests arrive.
    #[arg(long, default_value_t = 60.0, value_parser = limits::DURATION_S.parse())]
    pub duration_s: f64,
    /// The law of arrivals.
    #[arg(long, value_enum, default_value_t = Law::Poisson)]
    pub arrivals: Law,
    /// Requests of one burst, for --arrivals burst; 8 by default.
    #[arg(long, value_parser = limits::BURST_REQUESTS.parse::<u32>())]
    pub burst: Option<u32>,
    /// Times and lengths from a JSONL file instead.
    #[arg(long, conflicts_with_all = TRACE_REPLACES)]
    pub trace: Option<PathBuf>,
    /// The server's queue bound: `overload` must reach it and never exceed it.
    #[arg(long, value_parser = limits::EXPECTED.parse::<u64>())]
    pub expect_queue: Option<u64>,
    #[command(flatten)]
    pub judge: JudgeArgs,
    #[command(flatten)]
    pub devices: DeviceArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Debug, Args)]
pub(super) struct PressureArgs {
    #[command(flatten)]
    pub ask: AskArgs,
    /// Requests at once.
    #[arg(long, default_value_t = 24, value_parser = limits::BURST_REQUESTS.parse::<u32>())]
    pub burst: u32,
    /// Prompt tokens of each.
    #[arg(long, default_value_t = 64, value_parser = limits::PROMPT_TOKENS.parse::<u32>())]
    pub prompt_tokens: u32,
    /// Generated tokens of each.
    #[arg(long, default_value_t = 64, value_parser = limits::OUTPUT_TOKENS.parse::<u32>())]
    pub output_tokens: u32,
    /// Start a server with this configuration and these bounds, instead of asking --target.
    #[arg(long, conflicts_with = "target")]
    pub config: Option<PathBuf>,
    /// Overrides one key of it, such as executor.backend=cuda.
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "config")]
    pub settings: Vec<String>,
    #[command(flatten)]
    pub servers: ServerArgs,
    /// The server's pages.
    #[arg(long, default_value_t = 32, value_parser = limits::EXPECTED.parse::<u64>())]
    pub expect_pages: u64,
    /// The server's queue bound.
    #[arg(long, default_value_t = 4, value_parser = limits::EXPECTED.parse::<u64>())]
    pub expect_queue: u64,
    #[command(flatten)]
    pub judge: JudgeArgs,
    #[command(flatten)]
    pub devices: DeviceArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Debug, Args)]
pub(super) struct SweepArgs {
    /// The server's configuration; the sweep sets budget and cap on top of it.
    #[arg(long)]
    pub config: PathBuf,
    /// Overrides one key of it, such as executor.backend=cuda.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub settings: Vec<String>,
    /// Sent as bearer token and x-api-key, where the configuration asks for one.
    #[arg(long)]
    pub api_key: Option<String>,
    #[command(flatten)]
    pub work: WorkloadArgs,
    #[command(flatten)]
    pub client: ClientArgs,
    #[command(flatten)]
    pub judge: JudgeArgs,
    /// Values of prefill.token_budget; the first with the first cap is the control.
    #[arg(long, value_delimiter = ',', default_value = "1024,256,512,2048", value_parser = limits::BUDGETS.parse::<u32>())]
    pub budgets: Vec<u32>,
    /// Values of prefill.chunk_cap.
    #[arg(long, value_delimiter = ',', default_value = "off,256,128,64")]
    pub caps: Vec<String>,
    #[command(flatten)]
    pub pairs: PairArgs,
    #[command(flatten)]
    pub devices: DeviceArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Debug, Args)]
pub(super) struct SoakArgs {
    /// The server's configuration.
    #[arg(long)]
    pub config: PathBuf,
    /// Overrides one key of it, such as executor.backend=cuda.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub settings: Vec<String>,
    /// Sent as bearer token and x-api-key, where the configuration asks for one.
    #[arg(long)]
    pub api_key: Option<String>,
    #[command(flatten)]
    pub client: ClientArgs,
    #[command(flatten)]
    pub mix: MixArgs,
    /// Requests in flight while capacity is measured and while requests are cancelled.
    #[arg(long, default_value_t = 32, value_parser = limits::CONCURRENCY.parse::<usize>())]
    pub concurrency: usize,
    /// How long capacity is measured.
    #[arg(long, default_value_t = 10.0, value_parser = limits::CALIBRATE_S.parse())]
    pub calibrate_s: f64,
    /// Traffic at half the capacity.
    #[arg(long, default_value_t = 60.0, value_parser = limits::DURATION_S.parse())]
    pub stable_s: f64,
    /// Traffic above the capacity.
    #[arg(long, default_value_t = 30.0, value_parser = limits::DURATION_S.parse())]
    pub overload_s: f64,
    /// Its rate as a multiple of the capacity.
    #[arg(long, default_value_t = 2.0, value_parser = limits::FACTOR.parse())]
    pub overload_factor: f64,
    /// Requests that are cancelled by disconnect.
    #[arg(long, default_value_t = 10_000, value_parser = limits::CANCELLED.parse::<usize>())]
    pub cancelled: usize,
    /// Mixed traffic: 1800 s on a CPU, 480 s on a GPU.
    #[arg(long, default_value_t = 1_800.0, value_parser = limits::DURATION_S.parse())]
    pub mixed_s: f64,
    /// Its rate as a share of the capacity.
    #[arg(long, default_value_t = 0.7, value_parser = limits::FACTOR.parse())]
    pub mixed_share: f64,
    /// It comes in windows; at the end of each, nothing may be left inside the server.
    #[arg(long, default_value_t = 60.0, value_parser = limits::DURATION_S.parse())]
    pub window_s: f64,
    /// Compare with this oracle of `record-oracle --workload sustained`, of another backend for example, instead of solo answers.
    #[arg(long)]
    pub verify: Option<PathBuf>,
    /// Keep the oracle.
    #[arg(long)]
    pub oracle_out: Option<PathBuf>,
    /// Measure the client against the stub first and keep the figure in the report.
    #[arg(long)]
    pub capacity: bool,
    #[command(flatten)]
    pub servers: ServerArgs,
    #[command(flatten)]
    pub devices: DeviceArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Debug, Args)]
pub(super) struct OracleArgs {
    #[command(flatten)]
    pub ask: AskArgs,
    /// As in the run that will be verified; `--workload sustained` stands for the open-loop mix.
    #[command(flatten)]
    pub work: WorkloadArgs,
    #[command(flatten)]
    pub mix: MixArgs,
    /// Where the oracle goes.
    #[arg(long)]
    pub out: PathBuf,
}

#[derive(Debug, Args)]
pub(super) struct StubArgs {
    /// Where to listen.
    #[arg(long, default_value = "127.0.0.1:8090")]
    pub listen: std::net::SocketAddr,
    /// Serving threads.
    #[arg(long, default_value_t = 1, value_parser = limits::THREADS.parse::<usize>())]
    pub threads: usize,
    /// One write an event instead of as few as the socket takes.
    #[arg(long)]
    pub each_event: bool,
    /// One write an event, so many microseconds apart (timers have millisecond steps).
    #[arg(long, conflicts_with = "each_event", value_parser = limits::GAP_US.parse::<u64>())]
    pub gap_us: Option<u64>,
    /// Refuses every n-th generation.
    #[arg(long, default_value_t = 0, value_parser = limits::EVERY.parse::<u64>())]
    pub refuse_every: u64,
    /// Breaks every n-th stream in the middle.
    #[arg(long, default_value_t = 0, value_parser = limits::EVERY.parse::<u64>())]
    pub break_every: u64,
}

#[derive(Debug, Args)]
pub(super) struct SelftestArgs {
    /// The dialect read; all by default.
    #[arg(long, value_enum)]
    pub dialect: Option<Dialect>,
    /// Threads of the client, and as many of the stub.
    #[arg(long, default_value_t = 1, value_parser = limits::THREADS.parse::<usize>())]
    pub threads: usize,
    /// Requests in flight.
    #[arg(long, default_value_t = 16, value_parser = limits::CONCURRENCY.parse::<usize>())]
    pub concurrency: usize,
    /// Tokens of one stream.
    #[arg(long, default_value_t = 64, value_parser = limits::OUTPUT_TOKENS.parse::<u32>())]
    pub tokens: u32,
    /// How long, each.
    #[arg(long, default_value_t = 2.0, value_parser = limits::CALIBRATE_S.parse())]
    pub duration_s: f64,
    /// One write an event instead of as few as the socket takes.
    #[arg(long)]
    pub each_event: bool,
    /// Fails when the native dialect stays below this.
    #[arg(long, value_parser = limits::EVENTS_PER_S.parse())]
    pub expect_events_per_s: Option<f64>,
    /// Write the figures as JSON.
    #[arg(long)]
    pub out: Option<PathBuf>,
}

fn policy(text: &str) -> Result<Policy, String> {
    let value = serde_json::Value::String(text.to_owned());
    serde_json::from_value(value).map_err(|_| format!("{text} is none of greedy, temperature, top-k, top-p, min-p"))
}

fn cancel_point(text: &str) -> Result<CancelPoint, String> {
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
