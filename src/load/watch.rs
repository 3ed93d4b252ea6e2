//! What surrounds a measurement: the server's /stats, the machine's clocks and power every second, and the facts of host and device
//! that a report must carry. A target without /stats, one on another machine, or a machine without a GPU leaves its part empty.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::Value;

use super::devices::{self, DeviceOptions, DeviceSample, DevicesError, Loaded, Sampler};
use super::target::Target;
use crate::output::note;

/// Between two looks at /stats.
const STATS_PERIOD: Duration = Duration::from_millis(250);
/// Between two looks at the devices.
const DEVICE_PERIOD: Duration = Duration::from_secs(1);

/// The server at one moment; a figure that it does not tell is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ServerSample {
    /// Seconds since the watch began.
    pub t_s: f64,
    /// Resident requests.
    pub active: Option<u64>,
    /// Waiting requests.
    pub queued: Option<u64>,
    /// KV pages in use.
    pub pages_used: Option<u64>,
    /// KV pages free.
    pub pages_free: Option<u64>,
    /// Generated tokens so far.
    pub tokens: Option<u64>,
}

impl ServerSample {
    fn of(t_s: f64, stats: &Value) -> Self {
        Self {
            t_s,
            active: counter(stats, "active_requests"),
            queued: counter(stats, "queued_requests"),
            pages_used: counter(stats, "kv_pages_used"),
            pages_free: counter(stats, "kv_pages_free"),
            tokens: counter(stats, "aggregate_tokens_generated"),
        }
    }
}

/// A counter of /stats.
pub fn counter(stats: &Value, name: &str) -> Option<u64> {
    stats.get(name).and_then(Value::as_u64)
}

/// Everything that the watch saw.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Observed {
    /// The server.
    pub server: Vec<ServerSample>,
    /// The server is on this machine; the devices of another one are not looked at.
    pub same_machine: bool,
    /// What told the GPUs' figures: `nvml` or `nvidia-smi`.
    pub sampler: Option<&'static str>,
    /// The GPU behind `loaded`, by its number.
    pub gpu: u32,
    /// The devices.
    pub devices: Vec<DeviceSample>,
    /// Medians while the server had work, or over all samples where it does not tell.
    pub loaded: Loaded,
}

impl Observed {
    /// The server had work at the look at it that is closest to `t_s`, or does not tell.
    fn busy(&self, t_s: f64) -> bool {
        let near = self.server.iter().min_by(|a, b| (a.t_s - t_s).abs().total_cmp(&(b.t_s - t_s).abs()));
        near.and_then(|s| s.active).is_none_or(|active| active > 0)
    }

    /// The greatest figure of the server that was seen between two moments.
    pub fn peak(&self, from_s: f64, to_s: f64, figure: fn(&ServerSample) -> Option<u64>) -> Option<u64> {
        self.server.iter().filter(|s| (from_s..=to_s).contains(&s.t_s)).filter_map(figure).max()
    }

    /// One line for the terminal.
    pub fn line(&self) -> String {
        if !self.same_machine {
            return "clocks and power: not sampled, the server is on another machine".into();
        }
        let gpu = self.sampler.map_or("no GPU".to_owned(), |name| format!("GPU {} by {name}", self.gpu));
        match self.loaded.samples {
            0 => format!("clocks and power under load: no sample ({gpu})"),
            1 => format!("under load, one sample: {} ({gpu})", self.loaded.line()),
            n => format!("under load, medians of {n} samples: {} ({gpu})", self.loaded.line()),
        }
    }
}

/// Looks at `period` until the sender is dropped; the first look is at once. A look that comes late moves no later one.
fn every(period: Duration, start: Instant, stopped: &Receiver<()>, mut look: impl FnMut(f64)) {
    let mut next = Instant::now();
    loop {
        look(start.elapsed().as_secs_f64());
        let now = Instant::now();
        while next <= now {
            next += period;
        }
        if stopped.recv_timeout(next - now) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

/// Threads that watch until they are stopped: one the server, one the devices, so that a slow answer delays no sample.
#[derive(Debug)]
pub struct Watch {
    stop: [Sender<()>; 2],
    server: JoinHandle<Vec<ServerSample>>,
    devices: Option<JoinHandle<Vec<DeviceSample>>>,
    seen: Observed,
}

impl Watch {
    /// Begins; times count from now. /stats is read four times a second, the devices every second.
    ///
    /// # Errors
    /// A device program that was given cannot be used.
    pub fn begin(target: Target, options: &DeviceOptions) -> Result<Self, DevicesError> {
        Self::since(Instant::now(), target, options)
    }

    /// As `begin`, with times that count from another moment.
    ///
    /// # Errors
    /// As `begin`.
    pub fn since(start: Instant, target: Target, options: &DeviceOptions) -> Result<Self, DevicesError> {
        let sampler = if devices::is_here(target.address.ip()) { Some(devices::sampler(options)?) } else { None };
        Ok(Self::with(start, target, sampler, options.gpu, [STATS_PERIOD, DEVICE_PERIOD]))
    }

    /// `sampler` is absent when the server is on another machine, and holds none where this one has no GPU.
    fn with(
        start: Instant,
        target: Target,
        sampler: Option<Option<Box<dyn Sampler>>>,
        gpu: u32,
        periods: [Duration; 2],
    ) -> Self {
        let ((stop_server, server_stopped), (stop_devices, devices_stopped)) = (channel(), channel());
        let name = sampler.iter().flatten().next().map(|s| s.name());
        let seen = Observed { same_machine: sampler.is_some(), sampler: name, gpu, ..Observed::default() };
        let server = std::thread::spawn(move || {
            let mut samples = Vec::new();
            if target.json("/stats").is_some() {
                every(periods[0], start, &server_stopped, |t_s| {
                    samples.extend(target.json("/stats").map(|stats| ServerSample::of(t_s, &stats)));
                });
            }
            samples
        });
        let watch_devices = |mut sampler: Option<Box<dyn Sampler>>| {
            std::thread::spawn(move || {
                let mut samples = Vec::new();
                every(periods[1], start, &devices_stopped, |t_s| samples.push(devices::look(t_s, sampler.as_mut())));
                samples
            })
        };
        Self { stop: [stop_server, stop_devices], server, devices: sampler.map(watch_devices), seen }
    }

    /// Ends and gives what was seen.
    pub fn end(self) -> Observed {
        drop(self.stop);
        let mut seen = self.seen;
        seen.server = self.server.join().unwrap_or_default();
        seen.devices = self.devices.and_then(|d| d.join().ok()).unwrap_or_default();
        seen.loaded = Loaded::of(&seen.devices, seen.gpu, |t_s| seen.busy(t_s));
        seen
    }
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
        let (gpus, driver) = devices::gpu_names();
        Self {
            cpu: devices::fields(&cpuinfo, "model name").next().map(str::to_owned),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease").ok().map(|k| format!("Linux {}", k.trim())),
            gpus,
            driver,
        }
    }
}

/// A line for whoever watches: above the bar, or on a standard error that has none.
pub fn say(progress: &ProgressBar, line: &str) {
    if progress.is_hidden() { note(format_args!("{line}")) } else { progress.println(line) }
}

/// The server's /stats once nothing is inside and no page is out, or as they are after `wait`; `None` when it has none.
pub fn at_rest(target: &Target, wait: Duration) -> Option<Value> {
    let deadline = Instant::now() + wait;
    loop {
        let stats = target.json("/stats")?;
        if PageCheck::between(&stats, &stats)?.passed() || Instant::now() >= deadline {
            return Some(stats);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
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

    use super::super::devices::GpuSample;
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

    /// A GPU whose n-th look gives the n-th sample; every look says how many were left before it.
    struct Scripted(std::vec::IntoIter<GpuSample>, Sender<usize>);

    impl Sampler for Scripted {
        fn name(&self) -> &'static str {
            "script"
        }

        fn gpus(&mut self) -> Vec<GpuSample> {
            let _ = self.1.send(self.0.len());
            self.0.next().into_iter().collect()
        }
    }

    /// Nobody listens there, so the server tells nothing.
    fn silent() -> Target {
        Target::new("http://127.0.0.1:9", None).expect("a target")
    }

    const SHORT: Duration = Duration::from_millis(2);

    #[test]
    fn the_timeline_is_what_the_sampler_said_second_by_second() {
        let gpu = |sm_mhz, power_w| GpuSample { sm_mhz, power_w, ..GpuSample::default() };
        let script = vec![gpu(Some(1_980), Some(246.5)), gpu(None, None), gpu(Some(1_970), None)];
        let (said, heard) = channel();
        let sampler: Box<dyn Sampler> = Box::new(Scripted(script.clone().into_iter(), said));
        let watch = Watch::with(Instant::now(), silent(), Some(Some(sampler)), 0, [SHORT, SHORT]);
        // The script is over when a look found none left.
        while heard.recv().expect("a look") > 0 {}
        let seen = watch.end();
        let told: Vec<GpuSample> = seen.devices.iter().flat_map(|d| d.gpus.clone()).collect();
        assert_eq!((seen.sampler, seen.same_machine, told), (Some("script"), true, script));
        assert!(seen.devices.windows(2).all(|w| w[0].t_s < w[1].t_s));
        // The server tells nothing, so every sample counts; absent figures take no part.
        assert_eq!(
            (seen.loaded.sm_mhz, seen.loaded.power_w, seen.loaded.memory_mhz),
            (Some(1_975.0), Some(246.5), None)
        );
        let json = serde_json::to_value(&seen).expect("JSON");
        assert!(json.pointer("/devices/1/gpus/0/sm_mhz").is_some_and(Value::is_null), "{json}");
    }

    #[test]
    fn the_devices_of_another_machine_are_not_passed_off_as_the_servers() {
        let seen = Watch::with(Instant::now(), silent(), None, 0, [SHORT, SHORT]).end();
        assert_eq!((seen.same_machine, seen.sampler, seen.devices.len()), (false, None, 0));
        assert_eq!(seen.loaded, Loaded::default());
        assert!(seen.line().contains("another machine"));
    }

    #[test]
    fn seconds_at_which_the_server_idled_are_not_under_load() {
        let server = |t_s, active| ServerSample { active, ..ServerSample::of(t_s, &Value::Null) };
        let observed = |server| Observed { server, ..Observed::default() };
        let seen =
            observed(vec![server(0.0, Some(0)), server(1.0, Some(3)), server(2.0, Some(1)), server(3.0, Some(0))]);
        assert_eq!([0.1, 0.9, 2.2, 3.4].map(|t_s| seen.busy(t_s)), [false, true, true, false]);
        assert!(observed(Vec::new()).busy(1.0) && observed(vec![server(0.0, None)]).busy(1.0), "it does not tell");
    }
}
