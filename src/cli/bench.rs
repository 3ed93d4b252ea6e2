//! `crucible bench`: parts of the engine alone, on this machine.

use std::path::PathBuf;
use std::process::ExitCode;

use super::Outcome;
use super::assemble::{assemble, cpu_settings, source};
use super::bench_device;
use crate::bench::cpu::{self, CpuBench};
use crate::bench::memory::{self, MemoryReport};
use crate::config::Config;
use crate::model::load;
use crate::model::pull::Progress;

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Debug, clap::Subcommand)]
enum Subject {
    /// Prefill and decode of the CPU backend, without engine or HTTP.
    Cpu(CpuArgs),
    /// Decode steps and packed prefills of a synthetic model: wall, device and host time.
    Step(bench_device::BenchArgs),
    /// Stage by stage: prefill of 16x16 and 4x256, decode at 1 and 16 (GPU).
    Profile(bench_device::BenchArgs),
    /// Memory of a started engine: weights once, the KV pool, and the rest.
    Memory(MemoryArgs),
}

#[derive(Debug, clap::Args)]
struct CpuArgs {
    /// Prompt tokens.
    #[arg(long, default_value_t = 512)]
    prompt: usize,
    /// Decode steps.
    #[arg(long, default_value_t = 64)]
    decode: usize,
    /// Sequences that decode together.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Repetitions.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Configuration file (TOML): model, profile, threads, instruction set.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Overrides one key of the configuration.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct MemoryArgs {
    /// Configuration file (TOML).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Overrides one key of the configuration.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Runs the benchmark and prints what it found.
///
/// # Errors
/// The model, the configuration or the backend.
pub fn run(args: &Args) -> Outcome {
    match &args.subject {
        Subject::Cpu(args) => run_cpu(args),
        Subject::Memory(args) => run_memory(args),
        Subject::Step(args) => bench_device::run_step(args).map(|()| ExitCode::SUCCESS),
        Subject::Profile(args) => bench_device::run_profile(args).map(|()| ExitCode::SUCCESS),
    }
}

/// Starts the configured engine and reports before its first request; fails when the bound does not hold.
fn run_memory(args: &MemoryArgs) -> Outcome {
    let config = Config::load(args.config.as_deref(), &args.set)?;
    let assembled = assemble(&config, Progress::Shown)?;
    let handle = assembled.engine.handle();
    let (weights, kv) = (handle.facts().weight_bytes, handle.facts().kv_bytes);
    let report = MemoryReport { resident: memory::resident()?, weights, kv };
    super::print(&format!("{report}\n"))?;
    Ok(if report.holds() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run_cpu(args: &CpuArgs) -> Outcome {
    let config = Config::load(args.config.as_deref(), &args.set)?;
    let model = load::load(&source(&config, Progress::Shown)?, config.model.profile)?;
    let context = model.weights.geometry.context;
    let (prompt, decode) = (args.prompt.max(1), args.decode.max(1));
    if prompt.saturating_add(decode) > context {
        let text = format!("--prompt {prompt} and --decode {decode} exceed the model's context of {context} tokens");
        return Err(format!("{text}: lower them (a synthetic model's context is model.geometry.context)").into());
    }
    let bench = CpuBench { prompt, decode, batch: args.batch.max(1), rounds: args.rounds.max(1) };
    let (device, rounds) = cpu::run(model.weights, config.model.profile, cpu_settings(&config), bench)?;
    super::print(&format!("{device}, {}, profile {}\n", model.name, config.model.profile.name()))?;
    for round in rounds {
        let (prefill, decode) = (round.prefill_tokens_per_second, round.decode_tokens_per_second);
        let (prompt, batch) = (bench.prompt, bench.batch);
        super::print(&format!("prefill of {prompt} {prefill:.0} tok/s, decode of {batch} {decode:.1} tok/s\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}
