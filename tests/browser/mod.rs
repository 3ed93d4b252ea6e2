//! A real Chromium, headless, driven over its DevTools protocol. One page a browser; every request that the page makes is kept.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use actix_codec::Framed;
use awc::ws::{Codec, Frame, Message};
use base64::Engine as _;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard};

/// Programs that are tried, in this order.
const PROGRAMS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chromium-headless-shell"];
/// How long a page may take to become as a test expects it.
const PATIENCE: Duration = Duration::from_secs(20);

static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// The program, or none with a visible word about so many checks that are skipped.
pub fn program(checks: usize) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path)
        .flat_map(|dir| PROGRAMS.map(|name| dir.join(name)))
        .find(|candidate| candidate.is_file());
    if found.is_none() {
        // Past the capture of the test harness: a skip must be seen.
        let _ = writeln!(std::io::stderr(), "skipped {checks} browser checks: no Chromium (Debian package chromium)");
    }
    found
}

/// A browser with one page.
pub struct Browser {
    child: Child,
    profile: PathBuf,
    socket: Framed<awc::BoxedSocket, Codec>,
    session: Value,
    next_id: u64,
    /// Addresses of all requests of the page.
    pub requests: Vec<String>,
    /// What the page wrote to the console as an error, and exceptions that nobody caught.
    pub complaints: Vec<String>,
    _turn: MutexGuard<'static, ()>,
}

impl Browser {
    /// Starts one. Tests take turns: two browsers at once only slow each other down.
    pub async fn start(program: &Path) -> Self {
        let turn = ONE_AT_A_TIME.lock().await;
        let profile = std::env::temp_dir().join(format!("crucible-browser-{}-{}", std::process::id(), unique()));
        let mut child = Command::new(program)
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
            .args(["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"])
            .args(["--remote-debugging-port=0", "--remote-allow-origins=*", "--lang=en-US"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .arg("about:blank")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = lines
            .find_map(|line| line.unwrap().strip_prefix("DevTools listening on ").map(str::to_owned))
            .expect("the browser names its DevTools address");
        // What it says later must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        let client = awc::Client::builder().disable_timeout().finish();
        let (_, socket) = client.ws(address).max_frame_size(64 << 20).connect().await.unwrap();
        let (requests, complaints) = (Vec::new(), Vec::new());
        let session = Value::Null;
        let mut browser = Self { child, profile, socket, session, next_id: 0, requests, complaints, _turn: turn };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"})).await["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true})).await;
        browser.session = attached["sessionId"].clone();
        for domain in ["Page", "Network", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({})).await;
        }
        browser
    }

    /// One command of the protocol and its result.
    pub async fn call(&mut self, method: &str, params: Value) -> Value {
        self.next_id += 1;
        let id = self.next_id;
        let mut command = json!({"id": id, "method": method, "params": params});
        if !self.session.is_null() {
            command["sessionId"] = self.session.clone();
        }
        self.socket.send(Message::Text(command.to_string().into())).await.unwrap();
        loop {
            let message = self.receive().await;
            if message["id"] == id {
                assert!(message["error"].is_null(), "{method}: {}", message["error"]);
                return message["result"].clone();
            }
            self.note(&message);
        }
    }

    async fn receive(&mut self) -> Value {
        loop {
            let frame = tokio::time::timeout(PATIENCE, self.socket.next()).await.expect("the browser answers");
            match frame.unwrap().unwrap() {
                Frame::Text(text) => return serde_json::from_slice(&text).unwrap(),
                Frame::Ping(data) => self.socket.send(Message::Pong(data)).await.unwrap(),
                other => panic!("unexpected frame {other:?}"),
            }
        }
    }

    fn note(&mut self, message: &Value) {
        let params = &message["params"];
        match message["method"].as_str() {
            Some("Network.requestWillBeSent") => {
                self.requests.push(params["request"]["url"].as_str().unwrap_or("").to_owned());
            }
            Some("Runtime.exceptionThrown") => self.complaints.push(params["exceptionDetails"].to_string()),
            Some("Log.entryAdded") if params["entry"]["level"] == "error" => {
                self.complaints.push(params["entry"]["text"].to_string());
            }
            _ => {}
        }
    }

    /// Opens an address and waits until it is loaded.
    pub async fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url})).await;
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'").await;
    }

    /// The value of an expression in the page; promises are awaited.
    pub async fn eval(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let result = self.call("Runtime.evaluate", params).await;
        assert!(result["exceptionDetails"].is_null(), "{expression}: {}", result["exceptionDetails"]);
        result["result"]["value"].clone()
    }

    /// The value of an expression as text.
    pub async fn text(&mut self, expression: &str) -> String {
        self.eval(expression).await.as_str().unwrap_or_default().to_owned()
    }

    /// Waits until an expression is true.
    pub async fn wait(&mut self, condition: &str) {
        let start = Instant::now();
        while self.eval(condition).await != true {
            assert!(start.elapsed() < PATIENCE, "{condition} did not become true");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Presses and releases a key by its DOM name.
    pub async fn key(&mut self, key: &str) {
        self.key_with(key, 0).await;
    }

    /// A key with modifiers (Alt 1, Control 2, Meta 4, Shift 8).
    pub async fn key_with(&mut self, key: &str, modifiers: u8) {
        let (code, text) = match key {
            "Enter" => (13, "\r"),
            "Tab" => (9, ""),
            "Escape" => (27, ""),
            " " => (32, " "),
            "End" => (35, ""),
            "Home" => (36, ""),
            "ArrowLeft" => (37, ""),
            "ArrowRight" => (39, ""),
            "ArrowUp" => (38, ""),
            other => panic!("no code for the key {other}"),
        };
        let mut event = json!({"type": if text.is_empty() { "rawKeyDown" } else { "keyDown" }, "key": key,
            "code": if key == " " { "Space" } else { key }, "windowsVirtualKeyCode": code, "modifiers": modifiers});
        if !text.is_empty() {
            event["text"] = text.into();
        }
        self.call("Input.dispatchKeyEvent", event.clone()).await;
        event["type"] = "keyUp".into();
        self.call("Input.dispatchKeyEvent", event).await;
    }

    /// Text as if typed, where the focus is.
    pub async fn insert(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text})).await;
    }

    /// Moves the pointer to the middle of an element.
    pub async fn point_at(&mut self, selector: &str) -> (f64, f64) {
        let middle = format!(
            "(() => {{ const r = document.querySelector({selector:?}).getClientRects()[0]; \
             return [r.x + r.width / 2, r.y + r.height / 2]; }})()"
        );
        let at = self.eval(&middle).await;
        let (x, y) = (at[0].as_f64().unwrap(), at[1].as_f64().unwrap());
        self.call("Input.dispatchMouseEvent", json!({"type": "mouseMoved", "x": x, "y": y})).await;
        (x, y)
    }

    /// Clicks the middle of an element.
    pub async fn click(&mut self, selector: &str) {
        let (x, y) = self.point_at(selector).await;
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1});
            self.call("Input.dispatchMouseEvent", event).await;
        }
    }

    /// The size of the window.
    pub async fn size(&mut self, width: u32, height: u32) {
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", metrics).await;
    }

    /// What the system prefers: `light` or `dark`.
    pub async fn color_scheme(&mut self, scheme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features).await;
    }

    /// A picture of the window, kept among the test's temporary files for people to look at.
    pub async fn picture(&mut self, name: &str) -> Vec<u8> {
        let data = self.call("Page.captureScreenshot", json!({"format": "png"})).await;
        let png = base64::engine::general_purpose::STANDARD.decode(data["data"].as_str().unwrap()).unwrap();
        std::fs::write(Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.png")), &png).unwrap();
        png
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.profile);
    }
}

fn unique() -> u128 {
    std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos()
}
