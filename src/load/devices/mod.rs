//! The machine under a measurement: clocks, power, temperature and utilisation of its GPUs and the clock of its cores, second by second.
//!
//! The server exposes nothing of this; the client looks itself, so it looks only when the server is on the client's own machine. A
//! figure that cannot be had is absent, never 0.

mod loaded;
mod nvml;
mod smi;

use std::net::{IpAddr, UdpSocket};
use std::path::PathBuf;

use serde::Serialize;

pub use loaded::{Loaded, LoadedFigure, LoadedPair};
use smi::NvidiaSmi;

/// Why devices cannot be watched as they were asked to be.
#[derive(Debug, thiserror::Error)]
pub enum DevicesError {
    /// The given program does not start.
    #[error("cannot start {path}: {source}; give --nvidia-smi the path of the program")]
    Start {
        /// The program.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It says nothing that can be read.
    #[error("{0} gave no reading; run it by hand to see why")]
    Silent(PathBuf),
}

/// How devices are watched.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// A program that is asked instead of the management library.
    pub nvidia_smi: Option<PathBuf>,
    /// The GPU whose medians are compared.
    pub gpu: u32,
}

/// Clocks and power at one moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceSample {
    /// Seconds since the watch began.
    pub t_s: f64,
    /// Mean clock of the cores, where the kernel tells.
    pub cpu_mhz: Option<f64>,
    /// Runnable tasks, averaged over a minute.
    pub load_average: Option<f64>,
    /// Every GPU.
    pub gpus: Vec<GpuSample>,
}

impl DeviceSample {
    /// The sample of one GPU.
    pub fn gpu(&self, index: u32) -> Option<&GpuSample> {
        self.gpus.iter().find(|g| g.index == index)
    }
}

/// One GPU at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GpuSample {
    /// Its number for the management library.
    pub index: u32,
    /// Streaming multiprocessors' clock.
    pub sm_mhz: Option<u32>,
    /// Memory clock.
    pub memory_mhz: Option<u32>,
    /// Power.
    pub power_w: Option<f64>,
    /// Temperature.
    pub celsius: Option<u32>,
    /// Share of time with a kernel running.
    pub utilisation_percent: Option<u32>,
}

/// Something that tells the GPUs' figures.
pub trait Sampler: Send {
    /// Its name in reports.
    fn name(&self) -> &'static str;
    /// Every GPU now.
    fn gpus(&mut self) -> Vec<GpuSample>;
}

/// What is known of the GPUs' side: the given program, or the management library, or `nvidia-smi` where it is on the path; none on a
/// machine without a GPU.
///
/// # Errors
/// The given program does not start or gives no reading.
pub fn sampler(options: &DeviceOptions) -> Result<Option<Box<dyn Sampler>>, DevicesError> {
    if let Some(path) = &options.nvidia_smi {
        return Ok(Some(Box::new(NvidiaSmi::start(path)?)));
    }
    if let Some(nvml) = nvml::Management::open() {
        return Ok(Some(Box::new(nvml)));
    }
    let found = NvidiaSmi::start(std::path::Path::new("nvidia-smi")).ok();
    Ok(found.map(|smi| Box::new(smi) as Box<dyn Sampler>))
}

/// GPUs by name and the driver's version.
pub(super) fn gpu_names() -> (Vec<String>, Option<String>) {
    nvml::Management::open().map(|m| m.names()).unwrap_or_default()
}

/// The address is one of this machine's.
pub fn is_here(address: IpAddr) -> bool {
    address.is_loopback() || UdpSocket::bind((address, 0)).is_ok()
}

/// The devices now.
pub(super) fn look(t_s: f64, sampler: Option<&mut Box<dyn Sampler>>) -> DeviceSample {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    DeviceSample {
        t_s,
        cpu_mhz: mean_cpu_mhz(&read("/proc/cpuinfo")),
        load_average: read("/proc/loadavg").split(' ').next().and_then(|v| v.parse().ok()),
        gpus: sampler.map(|s| s.gpus()).unwrap_or_default(),
    }
}

/// Mean of the cores' clocks in the text of /proc/cpuinfo.
fn mean_cpu_mhz(cpuinfo: &str) -> Option<f64> {
    let clocks: Vec<f64> = fields(cpuinfo, "cpu MHz").filter_map(|v| v.parse().ok()).collect();
    (!clocks.is_empty()).then(|| clocks.iter().sum::<f64>() / clocks.len() as f64)
}

/// The values of one key in the text of /proc/cpuinfo.
pub(super) fn fields<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter_map(move |line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_the_cores_is_their_mean_and_absent_where_the_kernel_tells_none() {
        let text = "processor\t: 0\ncpu MHz\t\t: 2900.000\n\nprocessor\t: 1\ncpu MHz\t\t: 3100.000\n";
        assert_eq!(mean_cpu_mhz(text), Some(3_000.0));
        assert_eq!(mean_cpu_mhz("processor\t: 0\nBogoMIPS\t: 50.00\n"), None);
    }

    #[test]
    fn only_this_machines_addresses_are_here() {
        assert!(is_here([127, 0, 0, 1].into()) && is_here([127, 9, 9, 9].into()));
        // Reserved for documentation: no machine has it.
        assert!(!is_here([192, 0, 2, 1].into()));
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error_only_when_it_was_asked_for() {
        let options = DeviceOptions { nvidia_smi: Some("/nowhere/nvidia-smi".into()), gpu: 0 };
        let error = sampler(&options).err().expect("an error").to_string();
        assert!(error.contains("/nowhere/nvidia-smi"), "{error}");
        assert!(sampler(&DeviceOptions::default()).is_ok());
    }
}
