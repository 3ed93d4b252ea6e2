//! GPUs through the management library, which the driver brings.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};

use super::{GpuSample, Sampler};
use crate::backend::cuda::probe;

/// The opened library.
pub(super) struct Management(Nvml);

impl Management {
    /// Opens the library that the CUDA backend finds: drivers of containers lie outside the linker's folders. None without a GPU.
    pub fn open() -> Option<Self> {
        let library = probe::sensors(0).ok()?.library.path;
        Nvml::builder().lib_path(library.as_ref()).init().ok().map(Self)
    }

    /// GPUs by name and the driver's version.
    pub fn names(&self) -> (Vec<String>, Option<String>) {
        let count = self.0.device_count().unwrap_or(0);
        let names = (0..count).filter_map(|i| self.0.device_by_index(i).ok()?.name().ok()).collect();
        (names, self.0.sys_driver_version().ok())
    }
}

impl Sampler for Management {
    fn name(&self) -> &'static str {
        "nvml"
    }

    fn gpus(&mut self) -> Vec<GpuSample> {
        let count = self.0.device_count().unwrap_or(0);
        let sample = |index| {
            let gpu = self.0.device_by_index(index).ok()?;
            Some(GpuSample {
                index,
                sm_mhz: gpu.clock_info(Clock::SM).ok(),
                memory_mhz: gpu.clock_info(Clock::Memory).ok(),
                power_w: gpu.power_usage().ok().map(|mw| f64::from(mw) / 1e3),
                celsius: gpu.temperature(TemperatureSensor::Gpu).ok(),
                utilisation_percent: gpu.utilization_rates().ok().map(|u| u.gpu),
            })
        };
        (0..count).filter_map(sample).collect()
    }
}
