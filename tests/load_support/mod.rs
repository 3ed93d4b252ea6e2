//! The load generator and its stub as real processes.

#![allow(dead_code, reason = "each suite uses its share")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

/// A stub as a process of its own; it ends with this.
pub struct StubProcess {
    child: Child,
    pub url: String,
}

impl Drop for StubProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn crucible(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_crucible"));
    command.arg("load").args(args).stdin(Stdio::null());
    command
}

pub fn stub(args: &[&str]) -> StubProcess {
    use std::io::{BufRead, BufReader};
    let all = [&["stub", "--listen", "127.0.0.1:0"], args].concat();
    let mut child = crucible(&all).stdout(Stdio::piped()).spawn().expect("the stub starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("its output")).read_line(&mut line).expect("its first line");
    let url = line.trim().rsplit(' ').next().expect("its address").to_owned();
    StubProcess { child, url }
}

pub fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("load-{name}"));
    std::fs::create_dir_all(&path).expect("a folder");
    path
}

pub fn run(args: &[&str]) -> Output {
    crucible(args).output().expect("the generator runs")
}

pub fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("the file")).expect("JSON")
}

/// A file that describes a server to compare: the stub with these arguments, started by `shell` where that is given (`$STUB` is the command).
pub struct Described {
    pub file: String,
    pub url: String,
}

pub fn described(folder: &Path, name: &str, stub: &str, shell: Option<&str>) -> Described {
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
    let (exe, url) = (env!("CARGO_BIN_EXE_crucible"), format!("http://127.0.0.1:{port}"));
    let command = format!("{exe} load stub --listen 127.0.0.1:{port} {stub}");
    let line = shell.map_or(format!("exec {command}"), |shell| shell.replace("$STUB", &command));
    let path = folder.join(format!("{name}.toml"));
    std::fs::write(&path, format!("command = ['/bin/sh', '-c', '''{line}''']\nurl = '{url}'\n")).expect("written");
    Described { file: text(&path).to_owned(), url }
}

pub fn text(path: &Path) -> &str {
    path.to_str().expect("a path")
}

/// One counter of a server's /stats, when it answers.
pub fn counted(url: &str, name: &str) -> Option<u64> {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(url.trim_start_matches("http://")).ok()?;
    // The stub keeps the connection, so as much is read as it says.
    stream.write_all(b"GET /stats HTTP/1.1\r\nhost: x\r\n\r\n").ok()?;
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let n = stream.read(&mut buffer).ok()?;
        answer.extend_from_slice(&buffer[..n]);
        let said = String::from_utf8_lossy(&answer);
        let body = said.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
        if let Some(stats) = body.and_then(|b| serde_json::from_str::<Value>(&b).ok()) {
            return stats[name].as_u64();
        }
        if n == 0 {
            return None;
        }
    }
}

/// Waits until a server's counter has reached a number, as long as the generator that makes it runs.
pub fn until_counted(generator: &mut Child, url: &str, name: &str, least: u64) {
    while counted(url, name).is_none_or(|n| n < least) {
        let ended = generator.try_wait().expect("its state");
        assert!(ended.is_none(), "it ended with {ended:?} before {name} was {least}");
        std::thread::yield_now();
    }
}

/// Sends a signal such as `-TERM` to one process.
pub fn signal(process: u32, name: &str) {
    let sent = Command::new("kill").args([name, &process.to_string()]).status().expect("kill");
    assert!(sent.success(), "{name} to {process}");
}

/// Whether nobody listens there.
pub fn is_silent(url: &str) -> bool {
    std::net::TcpStream::connect(url.trim_start_matches("http://")).is_err()
}

/// The checks of a report that did not hold, with their figures.
pub fn failed_checks(report: &Value) -> Vec<(String, String)> {
    let checks = report["checks"].as_array().expect("checks").iter().filter(|c| c["passed"] == false);
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    checks.map(|c| (text(&c["name"]), text(&c["detail"]))).collect()
}
