//! `crucible check kernels`: every launcher on seeded shapes, bits against `arith`, outputs poisoned before each launch.

pub(super) mod adjust;
mod attention;
mod linear;
mod rows;
mod selection;

pub use selection::device_row;

use std::path::PathBuf;
use std::rc::Rc;

use super::Tally;
use crate::backend::cuda::cache::Cache;
use crate::backend::cuda::driver::Device;
use crate::backend::cuda::kernels::Kernels;
use crate::backend::cuda::memory::DeviceBuffer;
use crate::backend::cuda::nvrtc::Compiler;
use crate::backend::cuda::program::Kind;

/// A check that cannot go on: device, compiler or launcher.
pub type Failure = Box<dyn std::error::Error>;

/// What to check and where the compiler is.
#[derive(Clone, Debug)]
pub struct Options {
    /// Device number.
    pub device: usize,
    /// Folder to search first for the compiler.
    pub libraries: Option<PathBuf>,
    /// Folder of kernel sources that replace embedded ones.
    pub kernels: Option<PathBuf>,
    /// Folder of compiled kernels.
    pub cache_dir: Option<PathBuf>,
    /// Seed of shapes and values.
    pub seed: u64,
    /// Shapes a launcher.
    pub shapes: usize,
}

/// The device with kernels for one head dimension.
struct Bench {
    device: Rc<Device>,
    kernels: Kernels,
    head_dim: usize,
}

impl Bench {
    fn open(options: &Options, kinds: &[Kind], head_dim: usize) -> Result<Self, Failure> {
        let device = Device::open(options.device)?;
        let compiler = Compiler::open(options.libraries.as_deref(), options.kernels.as_deref())?;
        let cache = Cache::new(options.cache_dir.clone());
        let kernels = Kernels::load(&device, &compiler, &cache, kinds, head_dim)?;
        Ok(Self { device, kernels, head_dim })
    }

    fn upload<T: bytemuck::Pod>(&self, values: &[T]) -> Result<DeviceBuffer<T>, Failure> {
        Ok(DeviceBuffer::from_slice(&self.device, "a check", values)?)
    }

    /// A buffer full of NaN (or of impossible numbers).
    fn poisoned<T: bytemuck::Pod>(&self, len: usize) -> Result<DeviceBuffer<T>, Failure> {
        let buffer = DeviceBuffer::new(&self.device, "a check", len)?;
        buffer.fill_bytes(0xff)?;
        Ok(buffer)
    }

    fn read<T: bytemuck::Pod>(&self, buffer: &DeviceBuffer<T>) -> Result<Vec<T>, Failure> {
        Ok(buffer.read(0, buffer.len())?)
    }
}

/// Every loaded kernel was launched by some of the shapes: an instantiation that no shape chooses would pass unseen. Each kind of
/// shape has had its turn after 48; fewer cannot choose every kernel.
fn reached(launched: &[(String, u64)], options: &Options) -> Tally {
    let mut tally = Tally::new("kernels that the shapes chose", options.seed);
    let least = if options.shapes < 48 { 0 } else { options.shapes.div_ceil(50) as u64 };
    let list: Vec<String> = launched.iter().map(|(name, n)| format!("{name}: {n}")).collect();
    say!("launches: {}", list.join(", "));
    for (name, n) in launched {
        tally.case(if *n >= least { Ok(()) } else { Err(format!("{name} was launched {n} times, wanted {least}")) });
    }
    tally
}

/// Runs every part; returns the failures.
///
/// # Errors
/// Device, compiler or launcher.
pub fn run(options: &Options) -> Result<u64, Failure> {
    let mut total = Tally::new("kernels", options.seed);
    let bench = Bench::open(options, &Kind::ALL, 64)?;
    say!("kernels: {} ({})", bench.device.name, bench.device.architecture());
    let mut parts = linear::run(&bench, options)?;
    parts.extend(rows::run(&bench, options)?);
    parts.extend(selection::run(&bench, options)?);
    parts.extend(adjust::run(&bench, options)?);
    parts.extend(attention::run(&bench, options)?);
    let mut launched = bench.kernels.launches();
    for head_dim in [128, 32, 96] {
        let bench = Bench::open(options, &[], head_dim)?;
        parts.extend(attention::run(&bench, options)?);
        launched.extend(bench.kernels.launches().into_iter().filter(|(name, _)| name.contains("D=")));
    }
    parts.push(reached(&launched, options));
    for part in &parts {
        part.print();
        total.absorb(part);
    }
    total.print();
    Ok(total.failures())
}
