//! `crucible check`: the validation suites.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};

use super::Outcome;
use crate::backend::cuda::program::{ARCHITECTURES, Program};
use crate::backend::cuda::sources::Sources;
use crate::check::models::{Source, Which};
use crate::check::suites::{self, Extent, Suite};
use crate::check::{compile, failure, kernels};
use crate::model::Profile;
use crate::output;

/// Run a validation suite.
#[derive(Debug, ClapArgs)]
pub struct Args {
    #[command(subcommand)]
    suite: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Compile the kernels without a GPU and read what came out.
    Compile(CompileArgs),
    /// Every kernel on seeded shapes, bits against the canonical arithmetic (GPU).
    Kernels(SuiteArgs),
    /// The GPU's logits are the CPU's, at every position: on every geometry and format, or of the model of a file (--model FILE).
    Model(SuiteArgs),
    /// Contiguous storage by the definitions, contiguous pages and shuffled pages, kernel by kernel and with graphs.
    Paged(SuiteArgs),
    /// Decode graphs against kernel by kernel, every batch size (GPU).
    Graph(SuiteArgs),
    /// Batch sizes 1 to 16 in both orders, the five-slot boundary, sixteen shrinking to eight.
    Batch(SuiteArgs),
    /// Lengths, offsets and chunks of single prompts.
    Prefill(SuiteArgs),
    /// Graphs of single prompts: reuse, offsets, the cache's bound, refused recordings (GPU).
    PrefillGraph(SuiteArgs),
    /// Fuzzed packed prefill and mixed steps, batches that shrink and grow, cancellation with immediate page reuse.
    Packed(SuiteArgs),
    /// The part of `packed` that cancels.
    Cancel(SuiteArgs),
    /// Every selection rule: ties, draws at interval edges, all filters; then through whole models.
    Sampling(SuiteArgs),
    /// A pool of 32 pages.
    Pressure(SuiteArgs),
    /// Every position of many prompts, alone against crowded.
    Invariance(SuiteArgs),
    /// A device that fails under live requests: a kernel that traps (GPU, once), a compute thread that panics (CPU).
    Failure(SuiteArgs),
    /// Everything that this backend can run, but for `failure`, which breaks the device.
    All(SuiteArgs),
}

#[derive(Debug, ClapArgs)]
struct CompileArgs {
    /// Architectures, "sm_90a" and the like, or "all".
    #[arg(long, default_value = "all", value_delimiter = ',')]
    arch: Vec<String>,
    /// Every instantiation, not only those of the shipped geometries.
    #[arg(long)]
    full: bool,
    /// Folder to search first for the kernel compiler (an unpacked nvidia-cuda-nvrtc wheel will do).
    #[arg(long)]
    libraries: Option<PathBuf>,
    /// Folder of kernel sources that replace embedded ones of the same name: for trying a kernel, or breaking one on purpose.
    #[arg(long, value_name = "DIR")]
    kernels: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
struct SuiteArgs {
    /// Backend under test.
    #[arg(long, value_enum, default_value_t = Which::Cuda)]
    backend: Which,
    /// Geometry of the synthetic model (small, nine, wide, single, eight, seed), or a GGUF file.
    #[arg(long, default_value = "small", value_parser = Source::parse)]
    model: Source,
    /// Profiles: f32, int8, q8.
    #[arg(long, value_delimiter = ',', default_value = "f32,int8,q8", value_parser = profile)]
    profile: Vec<Profile>,
    /// Seed of shapes, values and schedules.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Shapes of each kernel.
    #[arg(long, default_value_t = 200)]
    shapes: usize,
    /// Fuzz sets of `packed`.
    #[arg(long, default_value_t = 24)]
    sets: usize,
    /// Most generated tokens of a sequence in `packed`.
    #[arg(long, default_value_t = 16)]
    steps: usize,
    /// Plays part i of n of `packed` and `cancel` only: i/n.
    #[arg(long, default_value = "1/1", value_parser = part, value_name = "I/N")]
    part: (usize, usize),
    /// Plays a part of what the suites promise, for gates without a GPU.
    #[arg(long)]
    quick: bool,
    /// Folder to search first for the kernel compiler.
    #[arg(long)]
    libraries: Option<PathBuf>,
    /// Folder of kernel sources that replace embedded ones of the same name: for trying a kernel, or breaking one on purpose.
    #[arg(long, value_name = "DIR")]
    kernels: Option<PathBuf>,
    /// Folder of compiled kernels.
    #[arg(long)]
    cache: Option<PathBuf>,
}

pub(super) fn profile(name: &str) -> Result<Profile, String> {
    [Profile::F32, Profile::Int8, Profile::Q8]
        .into_iter()
        .find(|p| p.name() == name)
        .ok_or_else(|| format!("{name} is no profile, they are f32, int8 and q8"))
}

/// "i/n" with 1 <= i <= n.
fn part(text: &str) -> Result<(usize, usize), String> {
    let parsed = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
    parsed.filter(|&(i, n)| 1 <= i && i <= n).ok_or_else(|| format!("{text} is no part, write i/n with i from 1 to n"))
}

/// Says which kernels are not the embedded ones.
pub(super) fn announce(kernels: Option<&Path>) -> Result<(), Box<dyn std::error::Error>> {
    if let Some(folder) = kernels {
        let replaced = Sources::overlaid(kernels)?.replaced;
        super::print(&format!("NOT THE EMBEDDED KERNELS: {} from {}\n", replaced.join(", "), folder.display()))?;
    }
    Ok(())
}

/// Runs the suite; fails when anything in it fails.
pub fn run(args: &Args) -> Outcome {
    let breaks_the_device = matches!(args.suite, Command::Failure(_));
    let (args, chosen) = match &args.suite {
        Command::Compile(args) => return run_compile(args),
        Command::Kernels(args) => (args, Vec::new()),
        Command::Model(args) => (args, vec![Suite::Model]),
        Command::Paged(args) => (args, vec![Suite::Paged]),
        Command::Graph(args) => (args, vec![Suite::Graph]),
        Command::Batch(args) => (args, vec![Suite::Batch]),
        Command::Prefill(args) => (args, vec![Suite::Prefill]),
        Command::PrefillGraph(args) => (args, vec![Suite::PrefillGraph]),
        Command::Packed(args) => (args, vec![Suite::Packed]),
        Command::Cancel(args) => (args, vec![Suite::Cancel]),
        Command::Sampling(args) => (args, vec![Suite::Sampling]),
        Command::Pressure(args) => (args, vec![Suite::Pressure]),
        Command::Invariance(args) => (args, vec![Suite::Invariance]),
        Command::Failure(args) => (args, vec![]),
        Command::All(args) => (args, Suite::ALL.to_vec()),
    };
    announce(args.kernels.as_deref())?;
    let everything = chosen.len() == Suite::ALL.len();
    let with_kernels = (chosen.is_empty() || everything) && !breaks_the_device && args.backend == Which::Cuda;
    let mut failures = 0;
    if with_kernels {
        failures += kernels::run(&kernels::Options {
            device: 0,
            libraries: args.libraries.clone(),
            kernels: args.kernels.clone(),
            cache_dir: args.cache.clone(),
            seed: args.seed,
            shapes: args.shapes,
        })?;
    }
    let options = suites::Options {
        which: args.backend,
        source: args.model.clone(),
        profiles: args.profile.clone(),
        seed: args.seed,
        libraries: args.libraries.clone(),
        kernels: args.kernels.clone(),
        cache_dir: args.cache.clone(),
        sets: args.sets,
        steps: args.steps,
        part: args.part,
        extent: if args.quick { Extent::Quick } else { Extent::Full },
    };
    if breaks_the_device {
        failures += failure::run(&options)?;
    }
    for suite in chosen {
        if suite == Suite::Model && args.backend == Which::Cpu {
            super::print("Model: skipped, it compares the GPU with the CPU\n")?;
            continue;
        }
        failures += suite.run(&options)?;
        output::complete()?;
    }
    output::complete()?;
    super::print(&format!("check: seed {}, {failures} failures\n", args.seed))?;
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run_compile(args: &CompileArgs) -> Outcome {
    announce(args.kernels.as_deref())?;
    let all = args.arch.iter().any(|a| a == "all");
    let architectures: Vec<String> = if all { ARCHITECTURES.map(String::from).to_vec() } else { args.arch.clone() };
    let programs = if args.full { Program::all() } else { Program::shipped() };
    let report = compile::compile(args.libraries.as_deref(), args.kernels.as_deref(), &architectures, &programs)?;
    for (what, fault) in &report.faults {
        super::print(&format!("{what}: {}: {}\n", fault.rule, fault.line))?;
    }
    let (major, minor) = report.version;
    super::print(&format!(
        "compile: compiler {major}.{minor}, {} programs for {}, {} faults\n",
        report.compiled,
        architectures.join(" "),
        report.faults.len()
    ))?;
    Ok(if report.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
