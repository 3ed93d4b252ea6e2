//! The commands of `crucible load` and their own arguments.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::args::{
    AskArgs, ClientArgs, DeviceArgs, JudgeArgs, MixArgs, OutputArgs, PairArgs, ServedArgs, ServerArgs, TargetArgs,
    WorkloadArgs,
};
use crate::load::arrivals::Law;
use crate::load::dialect::Dialect;
use crate::load::limits;

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
    #[command(flatten)]
    pub served: ServedArgs,
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
    #[command(flatten)]
    pub served: ServedArgs,
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
    /// Speaks this dialect alone.
    #[arg(long, value_enum)]
    pub only: Option<Dialect>,
    /// Refuses prompts of token ids.
    #[arg(long)]
    pub text_prompts: bool,
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
