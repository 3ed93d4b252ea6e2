//! What is there: device, memory, clocks, power and library versions, for `inspect --device` and `executor.backend = "auto"`.

use std::path::Path;

use super::driver::Device;
use super::library;
use super::nvrtc::Compiler;

/// A usable GPU and the libraries that drive it.
#[derive(Clone, Debug, serde::Serialize)]
pub struct DeviceReport {
    /// Name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Free and total memory, bytes.
    pub memory: (usize, usize),
    /// Clocks, power and driver version; absent when the management library is not there.
    pub sensors: Option<Sensors>,
    /// Library, version, where it was found.
    pub libraries: Vec<(String, String, String)>,
}

/// Readings of the management library.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Sensors {
    /// Driver version.
    pub driver: String,
    /// Multiprocessor clock, MHz.
    pub sm_mhz: Option<u32>,
    /// Memory clock, MHz.
    pub memory_mhz: Option<u32>,
    /// Power drawn, W.
    pub power_w: Option<f64>,
    /// Power limit, W.
    pub power_limit_w: Option<f64>,
}

/// Reads the management library; `None` when it is not there.
pub fn sensors(index: u32) -> Option<Sensors> {
    use nvml_wrapper::Nvml;
    use nvml_wrapper::enum_wrappers::device::Clock;
    let nvml = Nvml::init()
        .or_else(|_| Nvml::builder().lib_path(std::ffi::OsStr::new("libnvidia-ml.so.1")).init())
        .or_else(|_| Nvml::builder().lib_path(std::ffi::OsStr::new("/usr/local/nvidia/lib64/libnvidia-ml.so.1")).init())
        .ok()?;
    let device = nvml.device_by_index(index).ok()?;
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
    Some(Sensors {
        driver: nvml.sys_driver_version().unwrap_or_default(),
        sm_mhz: device.clock_info(Clock::SM).ok(),
        memory_mhz: device.clock_info(Clock::Memory).ok(),
        power_w: device.power_usage().ok().map(watts),
        power_limit_w: device.enforced_power_limit().ok().map(watts),
    })
}

/// Looks for device 0 and the kernel compiler; `libraries` is searched first. Never panics.
///
/// # Errors
/// One line that says what is missing.
pub fn probe(libraries: Option<&Path>) -> Result<DeviceReport, String> {
    let look = || {
        let driver = library::driver().map_err(|e| e.to_string())?;
        let device = Device::open(0).map_err(|e| e.to_string())?;
        let compiler = Compiler::open(libraries, None).map_err(|e| e.to_string())?;
        let sensors = sensors(0);
        let version = sensors.as_ref().map_or_else(String::new, |s| s.driver.clone());
        Ok(DeviceReport {
            name: device.name.clone(),
            capability: device.capability,
            multiprocessors: device.multiprocessors,
            memory: device.memory().map_err(|e| e.to_string())?,
            sensors,
            libraries: vec![
                (driver.name.into(), version, driver.path.display().to_string()),
                (
                    compiler.found.name.into(),
                    format!("{}.{}", compiler.version.0, compiler.version.1),
                    compiler.found.path.display().to_string(),
                ),
            ],
        })
    };
    // The bindings panic when a library lacks a symbol that they look up.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(look))
        .unwrap_or_else(|_| Err("the CUDA libraries lack a function that is needed: update the driver".into()))
}
