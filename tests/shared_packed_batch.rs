//! One batch for every surface: while a blocker of 941 tokens computes (its step is held), prompts of 16, 16, 23, 23 and 16 tokens
//! come in through the native dialect, OpenAI's completions and chat, Anthropic's messages, and the real terminal client in tmux. All
//! 1,035 prompt rows are two prefill batches, proved from /stats and the step trace; the terminal's request is cancelled, its pages
//! come back, and every other answer is the one that its request has alone.
//!
//! The server is the real one in this process, over the real CPU backend; a wrapper decides how many steps may complete.

mod engine_support;
mod http_support;
#[path = "http_support/scripted.rs"]
mod scripted;
mod tmux;

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crucible::backend::cpu::{CpuBackend, CpuConfig, Isa};
use crucible::backend::{Backend, BackendError, BackendFactory, Completion, Facts, StepOutput, ValidStep};
use crucible::model::{Geometry, MatrixFormat, Profile, RopePairing, synthetic};
use engine_support::fake::VOCAB;
use http_support::client::{get, post, send, send_json};
use http_support::until;
use scripted::Scripted;
use serde_json::{Value, json};

/// How many steps may complete; more are computed and kept back.
#[derive(Default)]
struct Gate {
    allowed: AtomicU64,
    notify: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
}

impl Gate {
    fn allow(&self, steps: u64) {
        self.allowed.store(steps, Ordering::Release);
        if let Some(notify) = &*self.notify.lock().expect("no panic") {
            notify();
        }
    }
}

struct Gated {
    inner: CpuBackend,
    gate: Arc<Gate>,
    completed: u64,
}

impl Backend for Gated {
    fn facts(&self) -> &Facts {
        self.inner.facts()
    }

    fn completion(&self) -> Completion {
        self.inner.completion()
    }

    fn on_completion(&mut self, notify: Arc<dyn Fn() + Send + Sync>) {
        *self.gate.notify.lock().expect("no panic") = Some(Arc::clone(&notify));
        self.inner.on_completion(notify);
    }

    fn submit(&mut self, step: ValidStep) -> Result<(), BackendError> {
        self.inner.submit(step)
    }

    fn poll(&mut self) -> Result<Option<StepOutput>, BackendError> {
        if self.completed >= self.gate.allowed.load(Ordering::Acquire) {
            return Ok(None);
        }
        let output = self.inner.poll()?;
        self.completed += u64::from(output.is_some());
        Ok(output)
    }
}

/// Seventeen bytes about a single message, so that a chat of 23 tokens says something.
const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:";

fn factory(gate: Arc<Gate>) -> BackendFactory {
    Box::new(move || {
        let geometry = Geometry {
            layers: 2,
            hidden: 64,
            heads: 2,
            kv_heads: 1,
            head_dim: 32,
            ffn: 128,
            vocab: VOCAB,
            context: 4096,
            rope_base: 10_000.0,
            rms_eps: 1e-5,
            rope_pairing: RopePairing::Halves,
        };
        let weights = synthetic::weights(&geometry, Profile::F32, MatrixFormat::F32, 1);
        let config =
            CpuConfig { threads: 1, isa: Isa::Auto, pages: 512, page_tokens: 16, slots: 8, max_step_tokens: 1032 };
        let inner = CpuBackend::new(weights, Profile::F32, config)?;
        Ok(Box::new(Gated { inner, gate, completed: 0 }) as Box<dyn Backend>)
    })
}

fn stats(address: SocketAddr) -> Value {
    get(address, "/stats").json()
}

/// A chat of one message whose prompt has exactly `tokens` tokens; every character is one.
fn chat_of(address: SocketAddr, tokens: usize) -> Value {
    let messages = |text: String| json!([{"role": "user", "content": text}]);
    let count = |messages: &Value| {
        post(address, "/tokenize", &json!({"messages": messages})).json()["count"].as_u64().expect("a count") as usize
    };
    let fixed = count(&messages("x".into())) - 1;
    let messages = messages("abcdefghijklmnopqrstuvwxyz"[..tokens - fixed].to_owned());
    assert_eq!(count(&messages), tokens);
    messages
}

/// The four requests beside the terminal's: path, body, and where the answer is.
fn requests(address: SocketAddr) -> [(&'static str, Value, &'static str); 4] {
    let chat = chat_of(address, 23);
    let ids: Vec<u32> = (0..16).map(|i| 100 + i * 7).collect();
    let shared = |mut body: Value| {
        let fields = json!({"model": "tiny", "max_tokens": 24, "ignore_eos": true, "temperature": 0});
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        body
    };
    let native = json!({"prompt": "sixteen letters.", "max_tokens": 24, "ignore_eos": true});
    [
        ("/v1/generate", native, "/token_ids"),
        ("/v1/completions", shared(json!({"prompt": ids})), "/choices/0/text"),
        ("/v1/chat/completions", shared(json!({"messages": chat})), "/choices/0/message/content"),
        ("/v1/messages", shared(json!({"messages": chat})), "/content/0/text"),
    ]
}

/// The terminal's request: the real client in a real terminal, or where there is no tmux the same request with the client's name.
enum Terminal {
    Real(tmux::Pane),
    Request(http_support::client::Pending),
}

const RAW_PROMPT: &str = "a river in April";

impl Terminal {
    fn open(address: SocketAddr) -> Option<tmux::Pane> {
        if !tmux::present(1) {
            let _ = writeln!(std::io::stderr(), "the terminal's request is sent without the terminal");
            return None;
        }
        let pane = tmux::Pane::open(80, 24);
        let program = env!("CARGO_BIN_EXE_crucible");
        pane.run(&format!("{program} tui --target http://{address} --set mode=raw --set max_tokens=2000"));
        pane.wait("● ready");
        Some(pane)
    }

    fn ask(pane: Option<tmux::Pane>, address: SocketAddr) -> Self {
        let Some(pane) = pane else {
            let agent = concat!("crucible-tui/", env!("CARGO_PKG_VERSION"));
            let headers = [("content-type", "application/json"), ("user-agent", agent)];
            let body = json!({"prompt": RAW_PROMPT, "max_tokens": 2000}).to_string();
            return Terminal::Request(send(address, "POST", "/v1/generate/stream", &headers, body.as_bytes()));
        };
        pane.write(RAW_PROMPT);
        pane.wait(&format!("› {RAW_PROMPT}"));
        pane.press(&["Enter"]);
        Terminal::Real(pane)
    }

    fn cancel(self) -> Option<tmux::Pane> {
        match self {
            Terminal::Real(pane) => {
                pane.press(&["Escape"]);
                Some(pane)
            }
            Terminal::Request(pending) => {
                drop(pending);
                None
            }
        }
    }
}

/// The lines of the step trace.
fn trace(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("a trace");
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

#[test]
fn five_surfaces_share_one_packed_batch_and_none_of_them_can_tell() {
    let trace_file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("shared-packed-batch.jsonl");
    let gate = Arc::new(Gate::default());
    let traced = format!("telemetry.step_trace={}", trace_file.display());
    let server =
        Scripted::templated(factory(Arc::clone(&gate)), TEMPLATE, &[&traced, "executor.step_timeout_ms=300000"]);
    let address = server.address;
    let requests = requests(address);
    let pane = Terminal::open(address);

    // The blocker's only step computes, and is held.
    let blocker_ids: Vec<u32> = (0..941).map(|i| i * 13 % 900).collect();
    let blocker = json!({"prompt_tokens": blocker_ids, "max_tokens": 1, "ignore_eos": true});
    let blocker = send_json(address, "/v1/generate", &blocker);
    until("the blocker is resident", || stats(address)["prefilling_requests"] == 1);
    let sent = requests.each_ref().map(|(path, body, _)| send_json(address, path, body));
    let terminal = Terminal::ask(pane, address);
    until("all six are resident", || stats(address)["active_requests"] == 6);
    assert_eq!(stats(address)["prefill_batches"], 0, "nothing has completed");

    // The held step completes; then so many steps that four finish and the terminal's goes on.
    gate.allow(1);
    gate.allow(60);
    assert_eq!(blocker.response().json()["tokens_generated"], 1);
    let answers: Vec<Value> = sent.into_iter().map(|pending| pending.response().json()).collect();
    until("only the terminal's is left", || stats(address)["active_requests"] == 1);
    let pane = terminal.cancel();
    // What is in flight must complete before the pages come back.
    until("the cancellation has arrived", || {
        stats(address)["cancelled_requests"] == 1 || {
            gate.allow(gate.allowed.load(Ordering::Acquire) + 1);
            false
        }
    });
    until("its pages are back", || stats(address)["kv_pages_used"] == 0);
    if let Some(pane) = pane {
        pane.wait("● ready");
        pane.press(&["C-c"]);
    }
    let counted = stats(address);
    for (name, value) in [
        ("prefill_tokens", 1_035),
        ("prefill_batches", 2),
        ("packed_prefill_batches", 1),
        ("packed_prefill_tokens", 94),
        ("last_prefill_batch_tokens", 94),
        ("last_prefill_batch_requests", 5),
        ("max_prefill_batch_tokens", 941),
        ("prefill_requests", 6),
        ("prefill_final_rows", 6),
        ("decode_batch_peak", 5),
        ("completed_requests", 5),
        ("cancelled_requests", 1),
        ("failed_requests", 0),
        ("active_requests", 0),
        ("kv_pages_free", 512),
    ] {
        assert_eq!(counted[name], value, "{name} in {counted}");
    }

    // Alone, each of them has the same answer.
    gate.allow(u64::MAX);
    for ((path, body, at), shared) in requests.iter().zip(&answers) {
        let alone = post(address, path, body).json();
        let (alone, shared) = (alone.pointer(at), shared.pointer(at));
        assert!(shared.is_some_and(|s| !s.is_null()), "{path}: {answers:?}");
        assert_eq!(shared, alone, "{path}");
    }
    drop(server);
    check_trace(&trace(&trace_file));
}

/// The second prefill batch names five dialects; the first is the blocker's.
fn check_trace(lines: &[Value]) {
    let slices = |line: &Value| line["slices"].as_array().cloned().unwrap_or_default();
    let prefill: Vec<Vec<Value>> = lines.iter().map(slices).filter(|s| !s.is_empty()).collect();
    assert_eq!(prefill[0].len(), 1);
    assert_eq!((&prefill[0][0]["length"], &prefill[0][0]["dialect"]), (&json!(941), &json!("native")));
    let mut second: Vec<(String, u64)> = prefill[1]
        .iter()
        .map(|s| (s["dialect"].as_str().expect("a name").to_owned(), s["length"].as_u64().expect("a length")))
        .collect();
    second.sort();
    let expected = [("anthropic", 23), ("native", 16), ("openai_chat", 23), ("openai_completions", 16), ("tui", 16)];
    assert_eq!(second, expected.map(|(name, length)| (name.to_owned(), length)));
    let decode_rows = lines.iter().filter_map(|l| l["decode_rows"].as_u64()).max();
    assert_eq!(decode_rows, Some(5));
    // The four requests that were sent once more came alone.
    assert_eq!(prefill.len(), 2 + 4);
}
