//! `crucible bench step` and `bench profile`: steps and stages of a backend over a synthetic model.

use std::path::PathBuf;
use std::{fmt, io};

use clap::Args as ClapArgs;

use super::check::{announce, profile};
use crate::backend::cuda::GraphLimits;
use crate::bench::{profile, step};
use crate::check::models::{Setup, Shape, Which};
use crate::model::{MatrixFormat, Profile};

/// What `bench step` and `bench profile` run on.
#[derive(Debug, ClapArgs)]
pub struct BenchArgs {
    /// Backend.
    #[arg(long, value_enum, default_value_t = Which::Cuda)]
    backend: Which,
    /// Geometry of the synthetic model.
    #[arg(long, value_enum, default_value_t = Shape::Seed)]
    model: Shape,
    /// Profiles: f32, int8, q8.
    #[arg(long, value_delimiter = ',', default_value = "q8,int8,f32", value_parser = profile)]
    profile: Vec<Profile>,
    /// Folder to search first for the kernel compiler.
    #[arg(long)]
    libraries: Option<PathBuf>,
    /// Folder of kernel sources that replace embedded ones of the same name: for trying a kernel.
    #[arg(long, value_name = "DIR")]
    kernels: Option<PathBuf>,
    /// Folder of compiled kernels.
    #[arg(long)]
    cache: Option<PathBuf>,
}

impl BenchArgs {
    fn setup(&self) -> Setup {
        Setup {
            which: self.backend,
            pages: 4096,
            slots: 64,
            tokens: 4096,
            logit_rows: 64,
            graphs: GraphLimits::default(),
            libraries: self.libraries.clone(),
            kernels: self.kernels.clone(),
            cache_dir: self.cache.clone(),
        }
    }
}

fn line(text: fmt::Arguments<'_>) -> io::Result<()> {
    super::print(&format!("{text}\n"))
}

/// Decode steps and packed prefills.
///
/// # Errors
/// The backend's.
pub fn run_step(args: &BenchArgs) -> Result<(), Box<dyn std::error::Error>> {
    announce(args.kernels.as_deref())?;
    let vocab = args.model.geometry().vocab;
    for &numerics in &args.profile {
        let mut player = step::open(args.model, numerics, MatrixFormat::Q8_0, &args.setup())?;
        for batch in [1, 4, 16, 64] {
            let t = step::decode(&mut player, vocab, batch)?;
            line(format_args!(
                "{} decode {batch}: wall {:.1} us, device {:.1} us, host {:.1} us (p50 {:.1}, p99 {:.1}), {:.0} tok/s",
                numerics.name(),
                t.wall_us,
                t.device_us,
                t.launch_us,
                t.launch_us_p50,
                t.launch_us_p99,
                batch as f64 * 1e6 / t.wall_us
            ))?;
        }
        for (count, len, budget) in
            [(1, 16, 4096), (16, 16, 4096), (1, 512, 4096), (4, 256, 4096), (8, 512, 1024), (8, 512, 4096)]
        {
            let (wall, device, host, steps) = step::prefill(&mut player, vocab, count, len, budget)?;
            line(format_args!(
                "{} prefill {count}x{len} budget {budget}: wall {wall:.0} us, device {device:.0} us, host {host:.0} us, {steps} steps",
                numerics.name()
            ))?;
        }
    }
    Ok(())
}

/// Where a pass spends its time.
///
/// # Errors
/// The device's.
pub fn run_profile(args: &BenchArgs) -> Result<(), Box<dyn std::error::Error>> {
    announce(args.kernels.as_deref())?;
    let vocab = args.model.geometry().vocab;
    for &numerics in &args.profile {
        let mut player = step::open(args.model, numerics, MatrixFormat::Q8_0, &args.setup())?;
        for (name, batch, len, decode) in
            [("prefill", 16, 16, false), ("prefill", 4, 256, false), ("decode", 1, 64, true), ("decode", 16, 64, true)]
        {
            if decode {
                step::decode(&mut player, vocab, batch)?;
            } else {
                step::prefill(&mut player, vocab, batch, len, 4096)?;
            }
            let backend = player.subject.cuda().ok_or("the profile needs the cuda backend")?;
            let p = profile::profile(backend)?;
            line(format_args!(
                "{} {name} {batch}x{len}: wall {:.1} us, replay {:.1} us",
                numerics.name(),
                p.wall_us,
                p.replay_us
            ))?;
            let stages: Vec<String> = p.stages.iter().map(|(s, us)| format!("{s:?} {us:.1}")).collect();
            line(format_args!("  {}", stages.join(", ")))?;
        }
    }
    Ok(())
}
