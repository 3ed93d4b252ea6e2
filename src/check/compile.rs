//! `crucible check compile`: compiles kernels for every architecture without a GPU and reads what came out: no inexact arithmetic in
//! the intermediate text, no spills in the assembler's report.

use std::path::Path;

use crate::backend::cuda::gate::{Fault, ptx_faults, spill_faults};
use crate::backend::cuda::nvrtc::{CompileError, Compiler};
use crate::backend::cuda::program::Program;

/// What was compiled, and every fault found.
#[derive(Debug, Default)]
pub struct CompileReport {
    /// Compiler version.
    pub version: (i32, i32),
    /// Programs compiled, architectures counted apart.
    pub compiled: usize,
    /// (program and architecture, fault).
    pub faults: Vec<(String, Fault)>,
}

/// Compiles each program for each architecture. `libraries` is searched first for the compiler; `kernels` replaces embedded sources.
///
/// # Errors
/// No compiler, or a program that does not compile.
pub fn compile(
    libraries: Option<&Path>,
    kernels: Option<&Path>,
    architectures: &[String],
    programs: &[Program],
) -> Result<CompileReport, CompileError> {
    let compiler = Compiler::open(libraries, kernels)?;
    let mut report = CompileReport { version: compiler.version, ..CompileReport::default() };
    for architecture in architectures {
        for &program in programs {
            let compiled = compiler.compile(program, architecture)?;
            let faults = ptx_faults(&compiled.ptx).into_iter().chain(spill_faults(&compiled.log));
            report.faults.extend(faults.map(|f| (format!("{program} {architecture}"), f)));
            report.compiled += 1;
        }
    }
    Ok(report)
}
