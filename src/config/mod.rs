//! The configuration: a TOML file and `--set` overrides become one checked [`Config`], or a list of everything that is wrong.
//!
//! config/crucible.toml states every key with its default; a test holds the two together. An environment variable is only
//! read where the file names it (`server.api_key_env`).

mod document;
mod fields;
mod keys;
mod origins;
mod read;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use document::{Document, Entry, Origin, Problem, Value as Written};
pub use keys::ApiKeys;
pub use origins::Origins;

use crate::actors::topology::EngineConfig;
use crate::backend::AttentionVariant;
use crate::model::{Geometry, MatrixFormat, Profile};

/// Everything that can be set.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Which model.
    pub model: ModelConfig,
    /// How prompts are computed.
    pub prefill: PrefillConfig,
    /// Which attention kernel.
    pub attention: AttentionVariant,
    /// CUDA graphs.
    pub graphs: GraphsConfig,
    /// The KV pool.
    pub kv: KvConfig,
    /// Bounds on requests.
    pub limits: LimitsConfig,
    /// What computes.
    pub executor: ExecutorConfig,
    /// The HTTP side.
    pub server: ServerConfig,
    /// Logs and traces.
    pub telemetry: TelemetryConfig,
    /// Where fetched models live; absent is the XDG cache folder.
    pub cache_dir: Option<PathBuf>,
}

/// `model.*`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The id that clients name.
    pub id: String,
    /// Where the weights come from.
    pub source: ModelPath,
    /// Numerics profile.
    pub profile: Profile,
    /// Block format of synthetic weights in profile q8.
    pub block: MatrixFormat,
    /// Seed of synthetic weights.
    pub seed: u64,
    /// Shape of a synthetic model.
    pub geometry: Geometry,
}

/// `model.path`, as `model.load_format` reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelPath {
    /// The default model, fetched when absent.
    Default,
    /// Seeded random weights of `model.geometry`.
    Synthetic,
    /// A file.
    File(PathBuf),
}

/// `prefill.*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillConfig {
    /// Whether one prefill plan may hold slices of several requests.
    pub packing: bool,
    /// Prompt tokens per plan.
    pub token_budget: usize,
    /// Prompt tokens per request and plan.
    pub chunk_cap: Option<usize>,
    /// Requests per plan.
    pub max_requests: usize,
    /// Step time that the budget adapts to.
    pub step_time_target: Option<Duration>,
}

/// `graphs.*`; without meaning on the CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphsConfig {
    /// Graphs for prefill steps.
    pub prefill: bool,
    /// Graphs for decode steps.
    pub decode: bool,
    /// Graphs for packed prefill steps.
    pub packed: bool,
    /// Graphs of prompts kept at most, of each kind.
    pub max_entries: usize,
}

/// `kv.*`.
#[derive(Clone, Debug, PartialEq)]
pub struct KvConfig {
    /// Physical pages.
    pub pages: usize,
    /// Positions per page.
    pub page_tokens: usize,
    /// Share of free device memory for the pool instead of `pages`; absent is off.
    pub memory_fraction: Option<f64>,
}

/// `limits.*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitsConfig {
    /// Resident requests.
    pub max_batch: usize,
    /// Waiting requests.
    pub max_queue: usize,
    /// Longest prompt; absent is the context.
    pub max_prompt_tokens: Option<usize>,
    /// Most new tokens; absent is the context.
    pub max_new_tokens: Option<usize>,
    /// New tokens of a chat request that names no number.
    pub default_new_tokens: usize,
}

/// `executor.backend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendChoice {
    /// A GPU when there is one, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// A CUDA device.
    Cuda,
}

/// `executor.isa`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IsaChoice {
    /// The best that the machine has.
    Auto,
    /// Plain Rust.
    Scalar,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 with VNNI.
    Avx512,
}

/// `executor.*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecutorConfig {
    /// What computes.
    pub backend: BackendChoice,
    /// CUDA device ordinal.
    pub device: usize,
    /// Folder that is searched first for CUDA's run-time compiler.
    pub libraries: Option<PathBuf>,
    /// CPU compute threads; absent is one per core.
    pub threads: Option<usize>,
    /// Instruction set of the CPU kernels.
    pub isa: IsaChoice,
    /// CPU that the engine thread is pinned to.
    pub pin: Option<usize>,
    /// A step that takes longer is fatal.
    pub step_timeout: Duration,
}

/// `server.*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Address to listen on.
    pub host: IpAddr,
    /// Port; 0 takes a free one.
    pub port: u16,
    /// HTTP worker threads.
    pub workers: usize,
    /// Keys of which clients must present one.
    pub api_keys: ApiKeys,
    /// Who may call from a browser on another site.
    pub cors_origins: Origins,
    /// Certificate chain and private key; absent is plain HTTP.
    pub tls: Option<TlsFiles>,
    /// Largest request body.
    pub body_limit_bytes: usize,
    /// Time for a body to arrive.
    pub body_timeout: Duration,
    /// Time for the request head to arrive.
    pub header_timeout: Duration,
    /// How long an idle connection is kept.
    pub keep_alive: Duration,
    /// How long a client may take nothing of what waits for it.
    pub write_timeout: Duration,
    /// Longest silence on a stream before a comment is sent.
    pub sse_keep_alive: Duration,
    /// Bytes buffered for a client that reads slowly.
    pub stream_buffer_bytes: usize,
    /// Time that /health answers 503 after the engine died, before the process ends.
    pub fatal_linger: Duration,
    /// Time for live requests after a signal.
    pub drain_deadline: Duration,
}

/// `server.tls_*`: PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates, the server's own first.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// `telemetry.log_format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// `telemetry.log_level`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// Failures.
    Error,
    /// And what should be looked at.
    Warn,
    /// And start, end and one line a request.
    Info,
    /// And decisions.
    Debug,
    /// And everything.
    Trace,
}

/// `telemetry.*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TelemetryConfig {
    /// Shape of the log.
    pub log_format: LogFormat,
    /// Least severe line logged.
    pub log_level: LogLevel,
    /// File for one JSON line a step.
    pub step_trace: Option<PathBuf>,
}

/// Everything that is wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {reason}")]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// At least one problem.
    #[error("the configuration {name} cannot be used:{}", list(.problems))]
    Invalid {
        /// The file's name, or "(defaults)".
        name: String,
        /// All of them, by line.
        problems: Vec<Problem>,
    },
}

fn list(problems: &[Problem]) -> String {
    problems.iter().map(|p| format!("\n  {p}")).collect()
}

impl Default for Config {
    fn default() -> Self {
        read::config(&mut fields::Fields::new(Document::default(), Vec::new()))
    }
}

impl Config {
    /// Reads a file (absent is all defaults) and applies overrides of the form `key=value`.
    ///
    /// # Errors
    /// The file cannot be read, or everything that is wrong with it.
    pub fn load(path: Option<&Path>, overrides: &[String]) -> Result<Self, ConfigError> {
        let (name, text) = match path {
            None => ("(defaults)".to_owned(), String::new()),
            Some(path) => {
                let unreadable =
                    |e: std::io::Error| ConfigError::Unreadable { path: path.into(), reason: e.to_string() };
                (path.display().to_string(), std::fs::read_to_string(path).map_err(unreadable)?)
            }
        };
        Self::parse(&name, &text, overrides)
    }

    /// As `load`, from text; `name` stands in the error.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(name: &str, text: &str, overrides: &[String]) -> Result<Self, ConfigError> {
        let (mut document, mut problems) = Document::parse(text);
        problems.extend(overrides.iter().filter_map(|o| document.set(o).err()));
        let mut fields = fields::Fields::new(document, problems);
        let config = read::config(&mut fields);
        let (_, problems) = fields.finish();
        if problems.is_empty() {
            return Ok(config);
        }
        Err(ConfigError::Invalid { name: name.to_owned(), problems })
    }

    /// Every key that exists, in reading order.
    pub fn keys() -> Vec<String> {
        let mut fields = fields::Fields::new(Document::default(), Vec::new());
        read::config(&mut fields);
        fields.finish().0
    }

    /// What the engine is started with, for a model of this context in tokens.
    pub fn engine(&self, context: usize) -> EngineConfig {
        EngineConfig {
            max_batch: self.limits.max_batch,
            max_queue: self.limits.max_queue,
            token_budget: self.prefill.token_budget,
            step_time_target: self.prefill.step_time_target,
            chunk_cap: self.prefill.chunk_cap,
            prefill_max_requests: self.prefill.max_requests,
            packing: self.prefill.packing,
            max_prompt_tokens: self.limits.max_prompt_tokens.unwrap_or(context),
            max_new_tokens: self.limits.max_new_tokens.unwrap_or(context),
            step_timeout: self.executor.step_timeout,
            pin: self.executor.pin,
            step_trace: self.telemetry.step_trace.clone(),
        }
    }

    /// Most token rows of one step: a full prefill budget and one decode row for every resident.
    pub fn max_step_tokens(&self) -> usize {
        self.prefill.token_budget + self.limits.max_batch
    }
}
