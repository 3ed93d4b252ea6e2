//! What surrounds a measurement: the server's /stats four times a second, the machine's clocks and power every second, and the facts
//! of host, device and commit that a report must carry. A target without /stats or a machine without a GPU leaves those parts empty.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use super::stats::quantile;
use super::target::Target;

/// Between two looks at /stats.
const STATS_PERIOD: Duration = Duration::from_millis(250);
/// Looks at /stats for one look at the devices.
const STATS_PER_DEVICE_SAMPLE: u32 = 4;

/// The server at one moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ServerSample {
    /// Seconds since the watch began.
    pub t_s: f64,
    /// Resident requests.
    pub active: u64,
    /// Waiting requests.
    pub queued: u64,
    /// KV pages in use.
    pub pages_used: u64,
    /// KV pages free.
    pub pages_free: u64,
    /// Generated tokens so far.
    pub tokens: u64,
}

impl ServerSample {
    fn of(t_s: f64, stats: &Value) -> Self {
        let get = |name| counter(stats, name).unwrap_or(0);
        Self {
            t_s,
            active: get("active_requests"),
            queued: get("queued_requests"),
            pages_used: get("kv_pages_used"),
            pages_free: get("kv_pages_free"),
            tokens: get("aggregate_tokens_generated"),
        }
    }
}

/// A counter of /stats.
pub fn counter(stats: &Value, name: &str) -> Option<u64> {
    stats.get(name).and_then(Value::as_u64)
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

/// One GPU at one moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuSample {
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

/// Everything that the watch saw.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Observed {
    /// The server.
    pub server: Vec<ServerSample>,
    /// The devices.
    pub devices: Vec<DeviceSample>,
    /// Medians while the server had work, or over all samples where it does not tell.
    pub loaded: Loaded,
}

/// Medians under load, by which runs are judged comparable.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Loaded {
    /// CPU clock.
    pub cpu_mhz: Option<f64>,
    /// SM clock of the first GPU.
    pub sm_mhz: Option<f64>,
    /// Power of the first GPU.
    pub power_w: Option<f64>,
}

impl Loaded {
    fn of(server: &[ServerSample], devices: &[DeviceSample]) -> Self {
        let busy = |t_s: f64| {
            let near = server.iter().min_by(|a, b| (a.t_s - t_s).abs().total_cmp(&(b.t_s - t_s).abs()));
            near.is_none_or(|s| s.active > 0)
        };
        let median = |figure: &dyn Fn(&DeviceSample) -> Option<f64>| {
            let mut values: Vec<f64> = devices.iter().filter(|d| busy(d.t_s)).filter_map(figure).collect();
            values.sort_by(f64::total_cmp);
            quantile(&values, 0.5)
        };
        Self {
            cpu_mhz: median(&|d| d.cpu_mhz),
            sm_mhz: median(&|d| d.gpus.first()?.sm_mhz.map(f64::from)),
            power_w: median(&|d| d.gpus.first()?.power_w),
        }
    }

    /// The clock by which a pair is judged: the GPU's where there is one.
    pub fn clock_mhz(&self) -> Option<f64> {
        self.sm_mhz.or(self.cpu_mhz)
    }
}

/// A thread that watches until it is stopped.
#[derive(Debug)]
pub struct Watch {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Observed>,
}

impl Watch {
    /// Begins; times count from now.
    pub fn begin(target: Target) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        Self { stop, thread: std::thread::spawn(move || observe(&target, &stopped)) }
    }

    /// Ends and gives what was seen.
    pub fn end(self) -> Observed {
        self.stop.store(true, Ordering::Release);
        self.thread.join().unwrap_or_default()
    }
}

fn observe(target: &Target, stop: &AtomicBool) -> Observed {
    let start = Instant::now();
    let gpus = open_nvml();
    let mut seen = Observed::default();
    let mut turn = 0;
    let has_stats = target.json("/stats").is_some();
    while !stop.load(Ordering::Acquire) {
        let t_s = start.elapsed().as_secs_f64();
        if let Some(stats) = has_stats.then(|| target.json("/stats")).flatten() {
            seen.server.push(ServerSample::of(t_s, &stats));
        }
        if turn % STATS_PER_DEVICE_SAMPLE == 0 {
            let gpus = gpus.as_ref().map(gpu_samples).unwrap_or_default();
            seen.devices.push(DeviceSample { t_s, cpu_mhz: cpu_mhz(), load_average: load_average(), gpus });
        }
        turn += 1;
        let next = start + STATS_PERIOD * turn;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    seen.loaded = Loaded::of(&seen.server, &seen.devices);
    seen
}

fn open_nvml() -> Option<nvml_wrapper::Nvml> {
    nvml_wrapper::Nvml::init().ok()
}

fn gpu_samples(nvml: &nvml_wrapper::Nvml) -> Vec<GpuSample> {
    use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
    let count = nvml.device_count().unwrap_or(0);
    (0..count)
        .filter_map(|index| {
            let gpu = nvml.device_by_index(index).ok()?;
            Some(GpuSample {
                sm_mhz: gpu.clock_info(Clock::SM).ok(),
                memory_mhz: gpu.clock_info(Clock::Memory).ok(),
                power_w: gpu.power_usage().ok().map(|mw| f64::from(mw) / 1e3),
                celsius: gpu.temperature(TemperatureSensor::Gpu).ok(),
                utilisation_percent: gpu.utilization_rates().ok().map(|u| u.gpu),
            })
        })
        .collect()
}

fn cpu_mhz() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let clocks: Vec<f64> = fields(&text, "cpu MHz").filter_map(|v| v.parse().ok()).collect();
    (!clocks.is_empty()).then(|| clocks.iter().sum::<f64>() / clocks.len() as f64)
}

fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

fn fields<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter_map(move |line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// The machine that the client runs on.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Host {
    /// CPU model.
    pub cpu: Option<String>,
    /// Logical cores that this process may use.
    pub cores: usize,
    /// Operating system and kernel.
    pub kernel: Option<String>,
    /// GPUs by name.
    pub gpus: Vec<String>,
    /// GPU driver.
    pub driver: Option<String>,
}

impl Host {
    /// Looks around.
    pub fn here() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let nvml = open_nvml();
        let names = |nvml: &nvml_wrapper::Nvml| {
            (0..nvml.device_count().unwrap_or(0)).filter_map(|i| nvml.device_by_index(i).ok()?.name().ok()).collect()
        };
        Self {
            cpu: fields(&cpuinfo, "model name").next().map(str::to_owned),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease").ok().map(|k| format!("Linux {}", k.trim())),
            gpus: nvml.as_ref().map(names).unwrap_or_default(),
            driver: nvml.and_then(|n| n.sys_driver_version().ok()),
        }
    }
}

/// The commit of the working directory, with `+changes` when something in it is not committed; `None` outside a repository.
pub fn commit() -> Option<String> {
    let git = |args: &[&str]| {
        let output = std::process::Command::new("git").args(args).stderr(std::process::Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let head = git(&["rev-parse", "--short=12", "HEAD"])?;
    let clean = git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Some(if clean { head } else { format!("{head}+changes") })
}

/// The page check at the end of a run: waits until the server is idle and compares its pool with the beginning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PageCheck {
    /// Free pages before the run.
    pub free_before: u64,
    /// Free pages after it.
    pub free_after: u64,
    /// Pages still in use after it.
    pub used_after: u64,
    /// Requests still inside.
    pub live_after: u64,
}

impl PageCheck {
    /// Looks at the idle server until it is clean or `wait` has passed; `None` when it has no /stats.
    pub fn after(target: &Target, before: Option<&Value>, wait: Duration) -> Option<Self> {
        let before = before?;
        let deadline = Instant::now() + wait;
        loop {
            let check = Self::between(before, &target.json("/stats")?)?;
            if check.passed() || Instant::now() >= deadline {
                return Some(check);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn between(before: &Value, after: &Value) -> Option<Self> {
        Some(Self {
            free_before: counter(before, "kv_pages_free")?,
            free_after: counter(after, "kv_pages_free")?,
            used_after: counter(after, "kv_pages_used")?,
            live_after: counter(after, "active_requests")? + counter(after, "queued_requests")?,
        })
    }

    /// Every page is back and nothing lives.
    pub fn passed(&self) -> bool {
        self.free_before == self.free_after && self.used_after == 0 && self.live_after == 0
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn stats(free: u64, used: u64, active: u64) -> Value {
        json!({"kv_pages_free": free, "kv_pages_used": used, "active_requests": active, "queued_requests": 0})
    }

    #[test]
    fn a_missing_page_or_a_living_request_fails_the_page_check() {
        let check = |after: &Value| PageCheck::between(&stats(32, 0, 0), after).expect("counters").passed();
        assert!(check(&stats(32, 0, 0)));
        assert!(!check(&stats(31, 0, 0)) && !check(&stats(32, 1, 0)) && !check(&stats(32, 0, 1)));
        assert_eq!(PageCheck::between(&json!({}), &stats(1, 1, 1)), None);
    }

    #[test]
    fn loaded_medians_leave_idle_seconds_out() {
        let server = |t_s, active| ServerSample { active, ..ServerSample::of(t_s, &Value::Null) };
        let device = |t_s, mhz| DeviceSample { t_s, cpu_mhz: Some(mhz), load_average: None, gpus: Vec::new() };
        let servers = [server(0.0, 0), server(1.0, 3), server(2.0, 1), server(3.0, 0)];
        let devices = [device(0.0, 800.0), device(1.0, 3_000.0), device(2.0, 3_100.0), device(3.0, 800.0)];
        assert_eq!(Loaded::of(&servers, &devices).cpu_mhz, Some(3_050.0));
        assert_eq!(Loaded::of(&[], &devices).cpu_mhz, Some(1_900.0));
    }
}
