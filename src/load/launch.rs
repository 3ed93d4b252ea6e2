//! Servers that a measurement starts and stops itself: what is started, with the hash of its program, and the running process.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::devices::DevicesError;
use super::dialect::Dialect;
use super::target::{Target, TargetError};
use crate::model::pull::sha256;

/// A server that has not ended so long after SIGTERM is killed.
const STOP_WAIT: Duration = Duration::from_secs(60);

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
    /// A server cannot be used.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The devices cannot be watched.
    #[error(transparent)]
    Devices(#[from] DevicesError),
}

fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> LaunchError {
    let what = what.into();
    move |source| LaunchError::Io { what, source }
}

/// A server that can be started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// In reports.
    #[serde(default)]
    pub name: String,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Where it will answer.
    pub url: String,
    /// How it is asked.
    #[serde(default = "native")]
    pub dialect: Dialect,
    /// Answers 200 once it can serve.
    #[serde(default = "health")]
    pub ready: String,
    /// SHA-256 of the program.
    #[serde(default, skip_deserializing)]
    pub sha256: Option<String>,
}

fn native() -> Dialect {
    Dialect::Native
}

fn health() -> String {
    "/health".into()
}

impl Variant {
    /// A server of this project: a binary, its configuration and settings on top of it.
    ///
    /// # Errors
    /// No port is free.
    pub fn serve(name: &str, binary: &Path, config: &Path, settings: &[String]) -> Result<Self, LaunchError> {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).map_err(io("no free port"))?.port();
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut command = vec![text(binary), "serve".into(), "--config".into(), text(config)];
        for setting in settings.iter().cloned().chain([format!("server.port={port}")]) {
            command.extend(["--set".into(), setting]);
        }
        let url = format!("http://127.0.0.1:{port}");
        let (dialect, ready) = (native(), health());
        Ok(Self { name: name.into(), command, url, dialect, ready, sha256: None })
    }

    /// Reads a file: with a `command` it describes any server (docs/load.md), otherwise it is a configuration for `binary`.
    ///
    /// # Errors
    /// The file cannot be read or its variant form is wrong.
    pub fn from_file(path: &Path, binary: &Path) -> Result<Self, LaunchError> {
        let text = std::fs::read_to_string(path).map_err(io(format!("cannot read {}", path.display())))?;
        let wrong = |message: String| LaunchError::Variant { path: path.to_owned(), message };
        let table: toml::Table = toml::from_str(&text).map_err(|e| wrong(e.to_string()))?;
        let stem = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
        if !table.contains_key("command") {
            return Self::serve(&stem, binary, path, &[]);
        }
        let mut variant: Self = toml::from_str(&text).map_err(|e| wrong(e.to_string()))?;
        if variant.command.is_empty() {
            return Err(wrong("command must name a program".into()));
        }
        if variant.name.is_empty() {
            variant.name = stem;
        }
        Ok(variant)
    }

    /// Takes the hash of the program.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn hash(&mut self) -> Result<(), LaunchError> {
        let program = &self.command[0];
        let path = which(program).unwrap_or_else(|| PathBuf::from(program));
        self.sha256 = Some(sha256(&path).map_err(io(format!("cannot read {}", path.display())))?);
        Ok(())
    }
}

fn which(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return None;
    }
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(program)).find(|p| p.is_file())
}

/// A started server; dropping it stops it.
#[derive(Debug)]
pub struct Running(Child);

impl Running {
    /// Starts it; its output goes to `log`.
    ///
    /// # Errors
    /// The log or the process cannot be made.
    pub fn start(variant: &Variant, log: &Path) -> Result<Self, LaunchError> {
        let out = File::create(log).map_err(io(format!("cannot write {}", log.display())))?;
        let err = out.try_clone().map_err(io("cannot share the log"))?;
        let child = Command::new(&variant.command[0])
            .args(&variant.command[1..])
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .map_err(io(format!("cannot start {}", variant.command[0])))?;
        Ok(Self(child))
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Asks it to end and waits; its exit status, or `None` when it does not end.
    pub fn stop(&mut self) -> Option<ExitStatus> {
        if let Ok(Some(ended)) = self.0.try_wait() {
            return Some(ended);
        }
        let pid = self.0.id().to_string();
        let _ = Command::new("kill").args(["-TERM", &pid]).stderr(Stdio::null()).status();
        let deadline = Instant::now() + STOP_WAIT;
        while Instant::now() < deadline {
            if let Ok(Some(ended)) = self.0.try_wait() {
                return Some(ended);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        None
    }

    /// Waits until `ready` answers 200 or the process has ended.
    pub fn wait_ready(&mut self, target: &Target, ready: &str, wait: Duration) -> bool {
        let deadline = Instant::now() + wait;
        while Instant::now() < deadline {
            let answer = super::client::fetch(target.address, &target.get(ready), Duration::from_secs(2));
            if answer.is_ok_and(|(status, _)| status == 200) {
                return true;
            }
            if self.0.try_wait().is_ok_and(|ended| ended.is_some()) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        false
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.stop().is_none() {
            let _ = self.0.kill().and_then(|()| self.0.wait());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_a_command_is_any_server_and_one_without_is_a_configuration() {
        let dir = std::env::temp_dir();
        let path = dir.join(format!("crucible-variant-{}.toml", std::process::id()));
        std::fs::write(
            &path,
            "command = ['peer', '-p', '1']\nurl = 'http://127.0.0.1:1'\ndialect = 'openai-completions'\n",
        )
        .expect("written");
        let peer = Variant::from_file(&path, Path::new("/bin/crucible")).expect("a variant");
        assert_eq!((peer.dialect, peer.command.len()), (Dialect::OpenaiCompletions, 3));
        std::fs::write(&path, "[kv]\npages = 64\n").expect("written");
        let own = Variant::from_file(&path, Path::new("/bin/crucible")).expect("a configuration");
        assert_eq!(own.command[..3], ["/bin/crucible", "serve", "--config"]);
        assert!(own.command.last().is_some_and(|s| s.starts_with("server.port=")));
        std::fs::write(&path, "command = []\nurl = ''\n").expect("written");
        assert!(Variant::from_file(&path, Path::new("x")).is_err());
        std::fs::remove_file(&path).expect("removed");
    }
}
