//! `crucible check`: the validation suites.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};

use super::Outcome;
use crate::backend::cuda::program::{ARCHITECTURES, Program};
use crate::check::compile;

/// Run a validation suite.
#[derive(Debug, ClapArgs)]
pub struct Args {
    #[command(subcommand)]
    suite: Suite,
}

#[derive(Debug, Subcommand)]
enum Suite {
    /// Compile the kernels without a GPU and read what came out.
    Compile(CompileArgs),
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
}

/// Runs the suite; fails when anything in it fails.
pub fn run(args: &Args) -> Outcome {
    match &args.suite {
        Suite::Compile(args) => run_compile(args),
    }
}

fn run_compile(args: &CompileArgs) -> Outcome {
    let all = args.arch.iter().any(|a| a == "all");
    let architectures: Vec<String> = if all { ARCHITECTURES.map(String::from).to_vec() } else { args.arch.clone() };
    let programs = if args.full { Program::all() } else { Program::shipped() };
    let report = compile::compile(args.libraries.as_deref(), &architectures, &programs)?;
    for (what, fault) in &report.faults {
        println!("{what}: {}: {}", fault.rule, fault.line);
    }
    let (major, minor) = report.version;
    println!(
        "compile: compiler {major}.{minor}, {} programs for {}, {} faults",
        report.compiled,
        architectures.join(" "),
        report.faults.len()
    );
    Ok(if report.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
