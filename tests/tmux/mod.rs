//! A real terminal: one shell in one tmux pane, driven by keys and read as a person reads it.
#![allow(dead_code)]

use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long the screen may take to become as a test expects it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether tmux is there; if not, a visible word about so many checks that are skipped.
pub fn present(checks: usize) -> bool {
    let found = Command::new("tmux").arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !found {
        // Past the capture of the test harness: a skip must be seen.
        let _ = writeln!(std::io::stderr(), "skipped {checks} terminal checks: no tmux (Debian package tmux)");
    }
    found
}

/// A shell in a pane of its own tmux server.
pub struct Pane {
    server: String,
}

impl Pane {
    /// A shell in a terminal of this size.
    pub fn open(columns: u16, rows: u16) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let server = format!("crucible-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let pane = Self { server };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        let shell = "env LC_ALL=C.UTF-8 PS1='ready> ' sh";
        pane.tmux(&["-u", "-f", "/dev/null", "new-session", "-d", "-x", &columns, "-y", &rows, shell]);
        pane.tmux(&["set-option", "-g", "status", "off"]);
        pane.resize(columns.parse().unwrap(), rows.parse().unwrap());
        pane.wait("ready>");
        pane
    }

    fn tmux(&self, args: &[&str]) -> String {
        let Output { status, stdout, stderr } =
            Command::new("tmux").args(["-L", &self.server]).args(args).output().unwrap();
        assert!(status.success(), "tmux {args:?}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).unwrap()
    }

    /// Types text, character by character.
    pub fn write(&self, text: &str) {
        self.tmux(&["send-keys", "-l", "--", text]);
    }

    /// Presses keys by tmux's names: `Enter`, `Escape`, `C-c`, `PPage`.
    pub fn press(&self, keys: &[&str]) {
        for key in keys {
            self.tmux(&["send-keys", key]);
        }
    }

    /// Pastes text as a terminal does.
    pub fn paste(&self, text: &str) {
        self.tmux(&["set-buffer", text]);
        self.tmux(&["paste-buffer", "-p", "-r"]);
    }

    /// Runs a shell command.
    pub fn run(&self, command: &str) {
        self.write(command);
        self.press(&["Enter"]);
    }

    /// The lines of the screen.
    pub fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    /// Gives the terminal another size.
    pub fn resize(&self, columns: u16, rows: u16) {
        self.tmux(&["resize-window", "-x", &columns.to_string(), "-y", &rows.to_string()]);
    }

    /// A value that tmux knows of the pane, such as `alternate_on`.
    pub fn fact(&self, name: &str) -> String {
        self.tmux(&["display-message", "-p", &format!("#{{{name}}}")]).trim().to_owned()
    }

    /// Waits until the screen holds a text; returns the screen.
    pub fn wait(&self, text: &str) -> String {
        self.wait_until(text, |screen| screen.contains(text))
    }

    /// Waits until the conversation holds a text, wherever its lines are broken: the summary of an answer is as long as its figures.
    pub fn wait_said(&self, text: &str) -> String {
        self.wait_until(text, |screen| said(screen).contains(text))
    }

    /// Waits until a text is gone.
    pub fn wait_gone(&self, text: &str) -> String {
        self.wait_until(&format!("no {text}"), |screen| !screen.contains(text))
    }

    /// Waits until the screen passes.
    pub fn wait_until(&self, what: &str, passes: impl Fn(&str) -> bool) -> String {
        let start = Instant::now();
        loop {
            let screen = self.screen();
            if passes(&screen) {
                return screen;
            }
            assert!(start.elapsed() < PATIENCE, "waited for {what:?}, the screen is\n{screen}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Pane {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-L", &self.server, "kill-server"]).stderr(Stdio::null()).status();
    }
}

/// The words of a screen's first panel, one space between them.
pub fn said(screen: &str) -> String {
    let words = screen.lines().filter_map(|line| line.split('│').nth(1)).flat_map(str::split_whitespace);
    words.collect::<Vec<_>>().join(" ")
}
