//! Servers that a measurement starts and stops itself, while they run.
//!
//! What answers must be what was started: nothing may answer before, and the process must live when it does. It runs in a process group
//! of its own, so that a Ctrl-C meant for the measurement reaches it through the measurement, and so that all of it can be ended.

use std::fs::File;
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::devices::DevicesError;
use super::interrupt;
use super::target::{Target, TargetError};
use super::variant::Variant;

/// A server that has not ended so long after SIGTERM is killed.
const STOP_WAIT: Duration = Duration::from_secs(60);
/// Nothing answers that takes longer to accept a connection.
const CONNECT_WAIT: Duration = Duration::from_secs(1);
/// Between two looks whether a measured server still runs.
const ALIVE_PERIOD: Duration = Duration::from_millis(10);
/// Between two questions whether a server is ready.
const READY_PERIOD: Duration = Duration::from_millis(100);
/// Lines of a log that an error repeats.
const TAIL_LINES: usize = 5;

/// Why a server cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A file cannot be read or written, or a program not started.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A variant's file is wrong.
    #[error("{path}: {message}")]
    Variant {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// Something is there already.
    #[error("{name} cannot be started: {url} answers already; end what listens there, or choose another port")]
    Answers {
        /// The variant.
        name: String,
        /// Where it would answer.
        url: String,
    },
    /// A server ended instead of becoming ready.
    #[error("{name} ended before it was ready ({status}); its output is in {log}{tail}")]
    Exited {
        /// The variant.
        name: String,
        /// How it ended.
        status: ExitStatus,
        /// Its output.
        log: PathBuf,
        /// The last lines of that, each after a line break.
        tail: String,
    },
    /// The measurement ended while a server started.
    #[error("{0} was not waited for")]
    Interrupted(String),
    /// A server did not become ready.
    #[error("{name} was not ready within {seconds} s; its output is in {log}")]
    NotReady {
        /// The variant.
        name: String,
        /// How long was waited.
        seconds: u64,
        /// Its output.
        log: PathBuf,
    },
    /// It cannot be asked for what was to be measured.
    #[error("{name} is not measured: {message}")]
    Unfit {
        /// The variant.
        name: String,
        /// Why.
        message: String,
    },
    /// A server cannot be used.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The devices cannot be watched.
    #[error(transparent)]
    Devices(#[from] DevicesError),
}

pub(super) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> LaunchError {
    let what = what.into();
    move |source| LaunchError::Io { what, source }
}

/// A started server; dropping it stops it.
#[derive(Debug)]
pub struct Running {
    child: Child,
    /// How it ended, once it has.
    ended: Option<ExitStatus>,
    /// It was waited for in vain after SIGTERM.
    deaf: bool,
    name: String,
    log: PathBuf,
}

impl Running {
    /// Starts it; its output goes to `log`.
    ///
    /// # Errors
    /// Something answers at its address already, or the log or the process cannot be made.
    pub fn start(variant: &Variant, target: &Target, log: &Path) -> Result<Self, LaunchError> {
        if TcpStream::connect_timeout(&target.address, CONNECT_WAIT).is_ok() {
            return Err(LaunchError::Answers { name: variant.name.clone(), url: variant.url.clone() });
        }
        let out = File::create(log).map_err(io(format!("cannot write {}", log.display())))?;
        let err = out.try_clone().map_err(io("cannot share the log"))?;
        let child = Command::new(&variant.command[0])
            .args(&variant.command[1..])
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .process_group(0)
            .spawn()
            .map_err(io(format!("cannot start {}", variant.command[0])))?;
        interrupt::began(child.id());
        Ok(Self { child, ended: None, deaf: false, name: variant.name.clone(), log: log.to_owned() })
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, when it has.
    fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
        }
        self.ended
    }

    /// Asks it to end and waits; its exit status, or `None` when it does not end.
    pub fn stop(&mut self) -> Option<ExitStatus> {
        self.stop_within(STOP_WAIT)
    }

    fn stop_within(&mut self, wait: Duration) -> Option<ExitStatus> {
        if self.ended().is_none() && !self.deaf {
            interrupt::tell(self.child.id(), Signal::TERM);
            let deadline = Instant::now() + wait;
            while self.ended().is_none() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            self.deaf = self.ended.is_none();
        }
        self.ended
    }

    /// Does `work` while it looks whether the server still runs; when it ends meanwhile, or has, `gone` is told how, once.
    pub fn during<T>(&mut self, work: impl FnOnce() -> T, gone: impl FnOnce(&str, ExitStatus) + Send) -> T {
        let (done, over) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                loop {
                    let last = over.recv_timeout(ALIVE_PERIOD) != Err(RecvTimeoutError::Timeout);
                    if let Some(status) = self.ended() {
                        return gone(&self.name, status);
                    }
                    if last {
                        return;
                    }
                }
            });
            let found = work();
            drop(done);
            found
        })
    }

    /// Waits until `ready` answers 200.
    ///
    /// # Errors
    /// The process ends, the time is over, or the measurement is.
    pub fn wait_ready(&mut self, target: &Target, ready: &str, wait: Duration) -> Result<(), LaunchError> {
        let (begin, request) = (Instant::now(), target.get(ready));
        while begin.elapsed() < wait {
            let answer = super::client::fetch(target.address, &request, Duration::from_secs(2));
            // After the answer: a process that is gone did not give it.
            if let Some(status) = self.ended() {
                let (name, log, tail) = (self.name.clone(), self.log.clone(), tail(&self.log));
                return Err(LaunchError::Exited { name, status, log, tail });
            }
            if answer.is_ok_and(|(status, _)| status == 200) {
                return Ok(());
            }
            if interrupt::raised() {
                return Err(LaunchError::Interrupted(self.name.clone()));
            }
            interrupt::sleep(READY_PERIOD);
        }
        let (name, log) = (self.name.clone(), self.log.clone());
        Err(LaunchError::NotReady { name, seconds: wait.as_secs(), log })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let stopped = self.stop().is_some();
        // What it started itself goes with it.
        interrupt::tell(self.child.id(), Signal::KILL);
        interrupt::ended(self.child.id());
        if !stopped {
            let _ = self.child.wait();
        }
    }
}

/// The last lines of a log, each after a line break.
fn tail(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    lines.iter().skip(lines.len().saturating_sub(TAIL_LINES)).map(|line| format!("\n  {line}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::stub::{Stub, StubOptions};

    /// A variant that runs a line of shell, its address, and where its output goes.
    fn shell(line: &str) -> (Variant, Target, PathBuf) {
        let text = format!("command = ['/bin/sh', '-c', '{line}']\nurl = 'http://127.0.0.1:9'\n");
        let id = std::thread::current().id();
        let path = std::env::temp_dir().join(format!("crucible-launch-{}-{id:?}.toml", std::process::id()));
        std::fs::write(&path, text).expect("written");
        let variant = Variant::from_file(&path, Path::new("x"), None).expect("a variant");
        let target = Target::new(&variant.url, None).expect("a target");
        std::fs::remove_file(&path).expect("removed");
        (variant, target, path.with_extension("log"))
    }

    #[test]
    fn a_server_that_ends_before_it_is_ready_is_reported_with_its_status_and_last_words() {
        let (variant, target, log) = shell("echo no such model; exit 3");
        let mut running = Running::start(&variant, &target, &log).expect("started");
        let error = running.wait_ready(&target, "/health", Duration::from_secs(60)).expect_err("it ended");
        assert!(matches!(error, LaunchError::Exited { status, .. } if status.code() == Some(3)), "{error}");
        assert!(error.to_string().ends_with("\n  no such model"), "{error}");
        drop(running);
        std::fs::remove_file(&log).expect("removed");
    }

    #[test]
    fn nothing_is_started_where_something_answers_already() {
        let stub = Stub::start(([127, 0, 0, 1], 0).into(), StubOptions::default()).expect("a stub");
        let (variant, _, log) = shell("sleep 600");
        let target = Target::new(&format!("http://{}", stub.address), None).expect("a target");
        let error = Running::start(&variant, &target, &log).expect_err("it answers");
        assert!(matches!(error, LaunchError::Answers { .. }), "{error}");
        assert!(!log.exists(), "nothing was started");
    }

    #[test]
    fn a_server_that_does_not_listen_to_its_end_is_killed_and_waited_for_once() {
        let (variant, target, log) = shell("trap \"\" TERM; echo deaf; while :; do sleep 600 & wait; done");
        let mut running = Running::start(&variant, &target, &log).expect("started");
        while !std::fs::read_to_string(&log).unwrap_or_default().contains("deaf") {
            std::thread::yield_now();
        }
        let process = running.id();
        assert_eq!(running.stop_within(Duration::from_millis(50)), None);
        assert_eq!(running.stop(), None, "it is not waited for again");
        drop(running);
        assert!(!Path::new(&format!("/proc/{process}")).exists(), "it was killed, and its end taken");
        std::fs::remove_file(&log).expect("removed");
    }

    #[test]
    fn the_end_of_a_server_in_the_middle_of_work_is_told_and_one_that_stays_is_not() {
        let (variant, target, log) = shell("exec sleep 600");
        let mut running = Running::start(&variant, &target, &log).expect("started");
        running.during(|| (), |name, status| panic!("{name} lives: {status}"));
        let (process, (told, heard)) = (running.id(), channel());
        let found = running.during(
            || {
                interrupt::tell(process, Signal::KILL);
                heard.recv().expect("its end, before the work is done")
            },
            move |_, status| told.send(status.to_string()).expect("heard"),
        );
        assert!(found.contains("signal: 9"), "{found}");
        drop(running);
        std::fs::remove_file(&log).expect("removed");
    }

    #[test]
    fn what_a_server_started_ends_with_it() {
        let (variant, target, log) = shell("sleep 600 & echo $!; wait");
        let running = Running::start(&variant, &target, &log).expect("started");
        let inner = || std::fs::read_to_string(&log).unwrap_or_default().trim().parse::<u32>().ok();
        while inner().is_none() {
            std::thread::yield_now();
        }
        drop(running);
        let process = inner().expect("its number");
        // Gone, or a zombie until its new parent looks; the kernel ends what was killed in its own time.
        let lives = || std::fs::read_to_string(format!("/proc/{process}/stat")).is_ok_and(|s| !s.contains(") Z "));
        while lives() {
            std::thread::yield_now();
        }
        std::fs::remove_file(&log).expect("removed");
    }
}
