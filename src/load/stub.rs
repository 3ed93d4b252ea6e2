//! A server that answers at once, in every dialect, without a model: against it the client measures itself, and tests see refusals,
//! failures and known gaps. Not a reference for any dialect; it says just enough for a client to read.

use std::cell::Cell;
use std::net::{SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::dialect::Dialect;

/// Longest request that is read, in bytes.
const REQUEST_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Most tokens of one answer.
const TOKENS_MAX: usize = 1 << 20;
/// Tokens of an answer whose request names no number.
const TOKENS_DEFAULT: usize = 16;

/// When the stub writes its events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// The whole answer in as few writes as the socket takes.
    Together,
    /// One write an event, without a pause.
    EachEvent,
    /// One write an event, so far apart.
    Every(Duration),
}

/// How the stub behaves.
#[derive(Clone, Copy, Debug)]
pub struct StubOptions {
    /// When it writes.
    pub pace: Pace,
    /// Refuses every n-th generation with 429; 0 refuses none.
    pub refuse_every: u64,
    /// Breaks every n-th stream in the middle; 0 breaks none.
    pub break_every: u64,
    /// Serving threads; at least 1.
    pub threads: usize,
    /// The one dialect that it speaks; all of them otherwise.
    pub only: Option<Dialect>,
    /// Whether prompts of token ids are taken.
    pub prompts: Prompts,
}

/// Prompts that the stub takes on surfaces that may take both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prompts {
    /// Token ids and text.
    Any,
    /// Text; token ids are refused with 400.
    Text,
}

impl Default for StubOptions {
    fn default() -> Self {
        Self { pace: Pace::Together, refuse_every: 0, break_every: 0, threads: 1, only: None, prompts: Prompts::Any }
    }
}

/// What the stub did, as its /stats tells.
#[derive(Debug, Default)]
struct Counters {
    accepted: AtomicU64,
    completed: AtomicU64,
    cancelled: AtomicU64,
    failed: AtomicU64,
    rejected: AtomicU64,
    tokens: AtomicU64,
}

/// A running stub. It serves until the process ends.
#[derive(Debug)]
pub struct Stub {
    /// Where it listens.
    pub address: SocketAddr,
    acceptor: std::thread::JoinHandle<()>,
}

impl Stub {
    /// Listens on `address` (port 0 picks one) and serves on threads of its own.
    ///
    /// # Errors
    /// The address cannot be bound; the error names it.
    pub fn start(address: SocketAddr, options: StubOptions) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address).map_err(|e| {
            std::io::Error::new(e.kind(), format!("cannot listen on {address}: {e}; choose another address or port"))
        })?;
        let address = listener.local_addr()?;
        let counters = Arc::new(Counters::default());
        let threads = (0..options.threads.max(1)).map(|_| {
            let (hand, connections) = mpsc::unbounded_channel();
            let counters = Arc::clone(&counters);
            std::thread::spawn(move || serve(connections, options, counters));
            hand
        });
        let threads: Vec<mpsc::UnboundedSender<std::net::TcpStream>> = threads.collect();
        let acceptor = std::thread::spawn(move || {
            for (turn, stream) in listener.incoming().flatten().enumerate() {
                let _ = threads[turn % threads.len()].send(stream);
            }
        });
        Ok(Self { address, acceptor })
    }

    /// Serves until the process ends.
    pub fn join(self) {
        let _ = self.acceptor.join();
    }
}

struct Server {
    options: StubOptions,
    counters: Arc<Counters>,
    scripts: [Script; 4],
    generations: Cell<u64>,
}

fn serve(mut connections: mpsc::UnboundedReceiver<std::net::TcpStream>, options: StubOptions, counters: Arc<Counters>) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
    let scripts = Dialect::ALL.map(Script::of);
    let server = Rc::new(Server { options, counters, scripts, generations: Cell::new(0) });
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        while let Some(stream) = connections.recv().await {
            let _ = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
            let server = Rc::clone(&server);
            tokio::task::spawn_local(async move {
                if let Ok(stream) = TcpStream::from_std(stream) {
                    let _ = server.connection(stream).await; // the client has gone
                }
            });
        }
    });
}

/// A request as far as the stub looks.
struct Request {
    path: String,
    tokens: usize,
    prompt_bytes: usize,
    /// Its `prompt` is a list of token ids.
    token_ids: bool,
    /// Bytes of the buffer that it took.
    length: usize,
}

impl Server {
    async fn connection(&self, stream: TcpStream) -> std::io::Result<()> {
        let (mut buffer, mut out) = (Vec::with_capacity(16 * 1024), Vec::new());
        loop {
            if let Some(request) = parse(&buffer) {
                buffer.drain(..request.length);
                self.answer(&stream, &request, &mut out).await?;
                continue;
            }
            stream.readable().await?;
            match stream.try_read_buf(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(_) if buffer.len() > REQUEST_BYTES_MAX => return Ok(()),
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
    }

    async fn answer(&self, stream: &TcpStream, request: &Request, out: &mut Vec<u8>) -> std::io::Result<()> {
        out.clear();
        let speaks = |d: &Dialect| d.path() == request.path && self.options.only.is_none_or(|only| only == *d);
        let Some(which) = Dialect::ALL.iter().position(speaks) else {
            self.plain(request, out);
            return write_all(stream, out).await;
        };
        if request.token_ids && self.options.prompts == Prompts::Text {
            json(out, "400 Bad Request", "{\"error\":{\"message\":\"prompt must be a text\"}}");
            return write_all(stream, out).await;
        }
        let turn = self.generations.get() + 1;
        self.generations.set(turn);
        if self.options.refuse_every > 0 && turn.is_multiple_of(self.options.refuse_every) {
            self.counters.rejected.fetch_add(1, Ordering::Relaxed);
            let body = "{\"error\":{\"message\":\"the queue is full\",\"code\":\"overloaded\"}}";
            json(out, if which == 3 { "529 Overloaded" } else { "429 Too Many Requests" }, body);
            return write_all(stream, out).await;
        }
        self.counters.accepted.fetch_add(1, Ordering::Relaxed);
        let breaks = self.options.break_every > 0 && turn.is_multiple_of(self.options.break_every);
        let sent = self.stream(stream, &self.scripts[which], request, breaks.then_some(request.tokens / 2), out).await;
        let counters = &self.counters;
        match (&sent, breaks) {
            (Err(_), _) => counters.cancelled.fetch_add(1, Ordering::Relaxed),
            (Ok(()), true) => counters.failed.fetch_add(1, Ordering::Relaxed),
            (Ok(()), false) => {
                counters.tokens.fetch_add(request.tokens as u64, Ordering::Relaxed);
                counters.completed.fetch_add(1, Ordering::Relaxed)
            }
        };
        if breaks { Err(std::io::ErrorKind::ConnectionAborted.into()) } else { sent }
    }

    async fn stream(
        &self,
        stream: &TcpStream,
        script: &Script,
        request: &Request,
        stop_at: Option<usize>,
        out: &mut Vec<u8>,
    ) -> std::io::Result<()> {
        let tokens = stop_at.unwrap_or(request.tokens);
        out.extend_from_slice(&script.head);
        if self.options.pace == Pace::Together {
            for index in 0..tokens {
                out.extend_from_slice(script.event(index));
            }
        } else {
            write_all(stream, out).await?;
            for index in 0..tokens {
                if let Pace::Every(gap) = self.options.pace {
                    tokio::time::sleep(gap).await;
                }
                write_all(stream, script.event(index)).await?;
            }
            out.clear();
        }
        if stop_at.is_none() {
            script.tail(request, out);
        }
        write_all(stream, out).await
    }

    fn plain(&self, request: &Request, out: &mut Vec<u8>) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let c = &self.counters;
        match request.path.as_str() {
            "/v1/models" => {
                json(out, "200 OK", "{\"object\":\"list\",\"data\":[{\"id\":\"stub\",\"object\":\"model\"}]}")
            }
            "/health" | "/ready" => json(out, "200 OK", "{\"status\":\"ok\",\"model\":\"stub\",\"device\":\"none\"}"),
            "/stats" => {
                let (accepted, completed) = (load(&c.accepted), load(&c.completed));
                let (cancelled, failed) = (load(&c.cancelled), load(&c.failed));
                let active = accepted.saturating_sub(completed + cancelled + failed);
                let body = format!(
                    "{{\"active_requests\":{active},\"queued_requests\":0,\"accepted_requests\":{accepted},\
                     \"completed_requests\":{completed},\"cancelled_requests\":{cancelled},\"failed_requests\":{failed},\
                     \"rejected_requests\":{},\"aggregate_tokens_generated\":{},\"kv_pages_used\":0,\"kv_pages_free\":0}}",
                    load(&c.rejected),
                    load(&c.tokens),
                );
                json(out, "200 OK", &body);
            }
            _ => json(out, "404 Not Found", "{\"error\":\"no such path\"}"),
        }
    }
}

fn json(out: &mut Vec<u8>, status: &str, body: &str) {
    let retry = if status.starts_with("429") || status.starts_with("529") { "retry-after: 1\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{retry}content-length: {}\r\n\r\n{body}",
        body.len()
    );
    out.extend_from_slice(head.as_bytes());
}

async fn write_all(stream: &TcpStream, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match stream.try_write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => stream.writable().await?,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Reads one request from the front of the buffer; `None` until it is whole.
fn parse(buffer: &[u8]) -> Option<Request> {
    let head_end = memchr::memmem::find(buffer, b"\r\n\r\n")? + 4;
    let head = std::str::from_utf8(&buffer[..head_end]).unwrap_or("");
    let path = head.split(' ').nth(1).unwrap_or("/").to_owned();
    let content_length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        if name.eq_ignore_ascii_case("content-length") { value.trim().parse::<usize>().ok() } else { None }
    });
    let length = head_end.checked_add(content_length.unwrap_or(0))?;
    let body = buffer.get(head_end..length)?;
    let tokens = memchr::memmem::find(body, b"\"max_tokens\":").and_then(|at| {
        let digits: Vec<u8> =
            body[at + 13..].trim_ascii_start().iter().copied().take_while(u8::is_ascii_digit).collect();
        std::str::from_utf8(&digits).ok()?.parse::<usize>().ok()
    });
    let tokens = tokens.unwrap_or(TOKENS_DEFAULT).min(TOKENS_MAX);
    let token_ids = memchr::memmem::find(body, b"\"prompt\":[").is_some();
    Some(Request { path, tokens, prompt_bytes: body.len(), token_ids, length })
}

/// Distinct events of a script; longer answers repeat them.
const EVENTS: usize = 256;

/// The chunks of one dialect's stream, rendered once.
struct Script {
    dialect: Dialect,
    head: Vec<u8>,
    events: Vec<u8>,
    ends: Vec<usize>,
}

impl Script {
    fn of(dialect: Dialect) -> Self {
        let mut head =
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
        match dialect {
            Dialect::OpenaiChat => chunk(
                &mut head,
                "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":0,\"model\":\"stub\",\
                 \"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n",
            ),
            Dialect::Anthropic => {
                chunk(
                    &mut head,
                    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_0\",\"type\":\"message\",\
                     \"role\":\"assistant\",\"content\":[],\"model\":\"stub\",\"usage\":{\"input_tokens\":1,\"output_tokens\":0}}}\n\n",
                );
                chunk(
                    &mut head,
                    "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\
                     \"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n",
                );
            }
            Dialect::Native | Dialect::OpenaiCompletions => {}
        }
        let (mut events, mut ends) = (Vec::new(), Vec::new());
        for index in 0..EVENTS {
            chunk(&mut events, &event(dialect, index));
            ends.push(events.len());
        }
        Self { dialect, head, events, ends }
    }

    fn event(&self, index: usize) -> &[u8] {
        let index = index % EVENTS;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.events[start..self.ends[index]]
    }

    fn tail(&self, request: &Request, out: &mut Vec<u8>) {
        let (tokens, prompt) = (request.tokens, request.prompt_bytes);
        match self.dialect {
            Dialect::Native => chunk(
                out,
                &format!(
                    "event: done\ndata: {{\"finish_reason\":\"length\",\"tokens_generated\":{tokens},\"text\":\"\"}}\n\n"
                ),
            ),
            Dialect::OpenaiCompletions | Dialect::OpenaiChat => {
                chunk(
                    out,
                    &format!(
                        "data: {{\"id\":\"cmpl-0\",\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt},\
                         \"completion_tokens\":{tokens},\"total_tokens\":{}}}}}\n\n",
                        prompt + tokens
                    ),
                );
                chunk(out, "data: [DONE]\n\n");
            }
            Dialect::Anthropic => {
                chunk(out, "event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\n");
                chunk(
                    out,
                    &format!(
                        "event: message_delta\ndata: {{\"type\":\"message_delta\",\"delta\":{{\"stop_reason\":\"max_tokens\"}},\
                         \"usage\":{{\"output_tokens\":{tokens}}}}}\n\n"
                    ),
                );
                chunk(out, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
            }
        }
        out.extend_from_slice(b"0\r\n\r\n");
    }
}

fn event(dialect: Dialect, index: usize) -> String {
    match dialect {
        Dialect::Native => format!("event: token\ndata: {{\"token_id\":{index},\"text\":\" word{index}\"}}\n\n"),
        Dialect::OpenaiCompletions => format!(
            "data: {{\"id\":\"cmpl-0\",\"object\":\"text_completion\",\"created\":0,\"model\":\"stub\",\
             \"choices\":[{{\"index\":0,\"text\":\" word{index}\",\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
        ),
        Dialect::OpenaiChat => format!(
            "data: {{\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":0,\"model\":\"stub\",\
             \"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" word{index}\"}},\"finish_reason\":null}}]}}\n\n"
        ),
        Dialect::Anthropic => format!(
            "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"index\":0,\
             \"delta\":{{\"type\":\"text_delta\",\"text\":\" word{index}\"}}}}\n\n"
        ),
    }
}

fn chunk(out: &mut Vec<u8>, data: &str) {
    out.extend_from_slice(format!("{:x}\r\n{data}\r\n", data.len()).as_bytes());
}
