//! What is there: device, memory, clocks, power and library versions, for `inspect --device` and `executor.backend = "auto"`.

use std::fmt;
use std::path::Path;

use cudarc::driver::sys;

use super::driver::Device;
use super::library;
use super::nvrtc::Compiler;

/// A usable GPU and the libraries that drive it.
#[derive(Clone, Debug)]
pub struct DeviceReport {
    /// Name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// What kernels are compiled for.
    pub architecture: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Most dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// Free and total memory, bytes.
    pub memory: (usize, usize),
    /// The driver library; its version is the newest CUDA that it serves.
    pub driver: Library,
    /// Clocks, power and driver version, or why there are none.
    pub sensors: Result<Sensors, String>,
    /// The kernel compiler, or why there is none.
    pub compiler: Result<Library, String>,
}

/// A library in use.
#[derive(Clone, Debug)]
pub struct Library {
    /// "libcuda" and the like.
    pub name: &'static str,
    /// Its version.
    pub version: String,
    /// Where it was found.
    pub path: String,
}

/// Readings of the management library.
#[derive(Clone, Debug)]
pub struct Sensors {
    /// The management library.
    pub library: Library,
    /// Driver version.
    pub driver: String,
    /// Multiprocessor clock and its most, MHz.
    pub sm_mhz: [Option<u32>; 2],
    /// Memory clock and its most, MHz.
    pub memory_mhz: [Option<u32>; 2],
    /// Power drawn, W.
    pub power_w: Option<f64>,
    /// Power limit, W.
    pub power_limit_w: Option<f64>,
    /// Temperature, degrees Celsius.
    pub celsius: Option<u32>,
}

/// Names under which the management library is looked for.
const MANAGEMENT: [&str; 3] = ["libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Reads the management library about device `index`.
///
/// # Errors
/// Why it cannot be read.
pub fn sensors(index: u32) -> Result<Sensors, String> {
    use nvml_wrapper::Nvml;
    use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
    let open = |name: &'static str| Nvml::builder().lib_path(std::ffi::OsStr::new(name)).init().ok().map(|n| (n, name));
    let (nvml, name) = MANAGEMENT
        .into_iter()
        .find_map(open)
        .ok_or_else(|| format!("libnvidia-ml was not found or cannot be used ({})", MANAGEMENT.join(", ")))?;
    let device = nvml.device_by_index(index).map_err(|e| e.to_string())?;
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
    let clock = |clock: Clock| [device.clock_info(clock).ok(), device.max_clock_info(clock).ok()];
    let path = library::origin_of(name, c"nvmlInit_v2").unwrap_or_else(|| name.to_owned());
    let version = nvml.sys_nvml_version().unwrap_or_default();
    Ok(Sensors {
        library: Library { name: "libnvidia-ml", version, path },
        driver: nvml.sys_driver_version().unwrap_or_default(),
        sm_mhz: clock(Clock::SM),
        memory_mhz: clock(Clock::Memory),
        power_w: device.power_usage().ok().map(watts),
        power_limit_w: device.enforced_power_limit().ok().map(watts),
        celsius: device.temperature(TemperatureSensor::Gpu).ok(),
    })
}

/// The newest CUDA that the driver serves, as "13.0".
fn cuda_version() -> String {
    let mut version = 0;
    // SAFETY: the library is present; the place is valid.
    let known = unsafe { sys::cuDriverGetVersion(&mut version) }.result().is_ok();
    if known { format!("{}.{}", version / 1000, version % 1000 / 10) } else { "unknown".into() }
}

/// Looks at device `ordinal` and at the libraries; `libraries` is searched first. A compiler that is missing is part of the report.
/// Never panics.
///
/// # Errors
/// One line that says why there is no usable device.
pub fn inspect(ordinal: usize, libraries: Option<&Path>) -> Result<DeviceReport, String> {
    let look = || {
        let driver = library::driver().map_err(|e| e.to_string())?;
        let device = Device::open(ordinal).map_err(|e| e.to_string())?;
        let compiler = Compiler::open(libraries, None).map_err(|e| e.to_string()).map(|compiler| Library {
            name: compiler.found.name,
            version: format!("{}.{}", compiler.version.0, compiler.version.1),
            path: compiler.found.path.display().to_string(),
        });
        Ok(DeviceReport {
            name: device.name.clone(),
            capability: device.capability,
            architecture: device.architecture(),
            multiprocessors: device.multiprocessors,
            shared_bytes: device.shared_bytes,
            memory: device.memory().map_err(|e| e.to_string())?,
            driver: Library { name: driver.name, version: cuda_version(), path: driver.path.display().to_string() },
            sensors: sensors(ordinal as u32),
            compiler,
        })
    };
    // The bindings panic when a library lacks a function; `library` looks for those that are called, this is for one it forgot.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(look))
        .unwrap_or_else(|_| Err("the CUDA libraries lack a function that is needed: update the driver".into()))
}

/// A device that can serve: the report with a compiler in it.
///
/// # Errors
/// One line that says what is missing.
pub fn probe(ordinal: usize, libraries: Option<&Path>) -> Result<DeviceReport, String> {
    let report = inspect(ordinal, libraries)?;
    match &report.compiler {
        Ok(_) => Ok(report),
        Err(reason) => Err(format!("{} is there, but no kernel compiler: {reason}", report.name)),
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} at {}", self.name, self.version, self.path)
    }
}

impl fmt::Display for DeviceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = |value: Option<u32>| value.map_or_else(|| "unknown".to_owned(), |v| v.to_string());
        let watts = |value: Option<f64>| value.map_or_else(|| "unknown".to_owned(), |v| format!("{v:.0}"));
        let (major, minor) = self.capability;
        writeln!(f, "{}", self.name)?;
        writeln!(f, "  {:<14}{major}.{minor}, kernels for {}", "capability", self.architecture)?;
        let shared = self.shared_bytes >> 10;
        writeln!(f, "  {:<14}{}, {shared} KiB of shared memory a block", "processors", self.multiprocessors)?;
        let (free, total) = self.memory;
        writeln!(f, "  {:<14}{} MiB, {} MiB free", "memory", total >> 20, free >> 20)?;
        match &self.sensors {
            Ok(s) => {
                let ([sm, sm_max], [memory, memory_max]) = (s.sm_mhz.map(known), s.memory_mhz.map(known));
                let clocks = format!("processors {sm} of {sm_max} MHz, memory {memory} of {memory_max} MHz");
                writeln!(f, "  {:<14}{clocks}", "clocks")?;
                let (drawn, limit) = (watts(s.power_w), watts(s.power_limit_w));
                writeln!(f, "  {:<14}{drawn} of {limit} W, {} degrees Celsius", "power", known(s.celsius))?;
                writeln!(f, "  {:<14}{}, {}", "driver", s.driver, self.driver)?;
                writeln!(f, "  {:<14}{}", "management", s.library)?;
            }
            Err(reason) => {
                writeln!(f, "  {:<14}unknown: {reason}", "clocks, power")?;
                writeln!(f, "  {:<14}{}", "driver", self.driver)?;
            }
        }
        match &self.compiler {
            Ok(library) => write!(f, "  {:<14}{library}", "compiler"),
            Err(reason) => write!(f, "  {:<14}none: {reason}", "compiler"),
        }
    }
}
