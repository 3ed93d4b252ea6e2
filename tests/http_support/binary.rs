//! The real binary as a process of its own.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A running `crucible serve`; killed on drop.
pub struct Binary {
    pub address: SocketAddr,
    child: Child,
    /// What the process wrote to standard error so far.
    pub log: Arc<Mutex<String>>,
    /// What it wrote to standard output so far.
    pub output: Arc<Mutex<String>>,
}

fn collect(stream: impl std::io::Read + Send + 'static) -> Arc<Mutex<String>> {
    let text = Arc::new(Mutex::new(String::new()));
    let into = Arc::clone(&text);
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let mut text = into.lock().expect("no panic");
            text.push_str(&line);
            text.push('\n');
        }
    });
    text
}

impl Binary {
    /// Starts the binary with a configuration file and overrides on a free port.
    pub fn start(config: &str, overrides: &[&str]) -> Self {
        Self::with_arguments(config, overrides, &[])
    }

    /// The same with further arguments of `serve`.
    pub fn with_arguments(config: &str, overrides: &[&str], arguments: &[&str]) -> Self {
        Self::launch(config, overrides, |command| _ = command.args(arguments))
    }

    /// The same in an environment with further variables.
    pub fn with_environment(config: &str, overrides: &[&str], variables: &[(&str, &str)]) -> Self {
        Self::launch(config, overrides, |command| _ = command.envs(variables.iter().copied()))
    }

    fn launch(config: &str, overrides: &[&str], prepare: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_crucible"));
        command.args(["serve", "--config", config, "--set", "server.port=0"]);
        for set in overrides {
            command.args(["--set", set]);
        }
        prepare(&mut command);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary");
        let log = collect(child.stderr.take().expect("stderr"));
        let output = collect(child.stdout.take().expect("stdout"));
        let start = Instant::now();
        let address = loop {
            if let Some(address) = listening(&log.lock().expect("no panic")) {
                break address;
            }
            if let Ok(Some(status)) = child.try_wait() {
                panic!("the server ended with {status}:\n{}", log.lock().expect("no panic"));
            }
            assert!(start.elapsed() < Duration::from_secs(120), "the server did not start:\n{}", log.lock().unwrap());
            std::thread::sleep(Duration::from_millis(5));
        };
        Self { address, child, log, output }
    }

    /// Starts the tiny synthetic model.
    pub fn tiny(overrides: &[&str]) -> Self {
        Self::start("config/cpu-test.toml", overrides)
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        self.signal("TERM");
    }

    /// Sends a signal by its name.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status().expect("kill");
        assert!(status.success());
    }

    /// Ends the process without a word.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for the end of the process.
    pub fn wait(&mut self, most: Duration) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            assert!(start.elapsed() < most, "the server did not end:\n{}", self.log.lock().unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Binary {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The address in the line that says where the server listens.
fn listening(log: &str) -> Option<SocketAddr> {
    let rest = log.split("http://").nth(1)?;
    let end = rest.find(|c: char| c.is_whitespace() || c == '"')?;
    rest[..end].parse().ok()
}
