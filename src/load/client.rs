//! The client: worker threads, each with one single-threaded runtime, its own keep-alive connections and one read buffer. It writes
//! a prepared request, stamps the time once per read, and turns the stream's events into one `Record`. It decides nothing about
//! what is sent or when; the caller dispatches jobs when they are due.
//!
//! Built for its own cost to vanish against a server: requests are rendered before the clock starts, events are scanned in place,
//! and an event in steady state allocates nothing. `crucible load selftest` measures it against the stub.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc as std_mpsc;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::net::TcpStream;
use tokio::sync::mpsc as tokio_mpsc;

use super::dialect::{Capture, Dialect, Meaning, interpret};
use super::http1::{HttpError, ResponseDecoder};
use crate::protocol::events::{SseEvent, SseParser};

/// Bytes of a worker's read buffer.
const READ_BUFFER_BYTES: usize = 256 * 1024;
/// Bytes kept of an error's body.
const ERROR_BODY_BYTES_MAX: usize = 400;
/// Longest cancel delay is bounded by the request's timeout; this stands for "never".
const NEVER: Duration = Duration::from_secs(86_400 * 365);

/// Why a small blocking exchange failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The response.
    #[error("{0}")]
    Http(#[from] HttpError),
    /// The connection ended early.
    #[error("the connection ended before the response did")]
    Truncated,
}

/// A request ready to be written.
#[derive(Clone, Debug)]
pub struct Wire {
    /// How its stream is read.
    pub dialect: Dialect,
    /// The whole HTTP request.
    pub bytes: Arc<[u8]>,
    /// Names the request in an oracle.
    pub key: Arc<str>,
}

impl Wire {
    /// Takes rendered bytes.
    pub fn new(dialect: Dialect, bytes: Vec<u8>, key: String) -> Self {
        Self { dialect, bytes: bytes.into(), key: key.into() }
    }
}

/// When a request is cancelled by closing its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelPoint {
    /// As soon as the request is written.
    AtOnce,
    /// So many milliseconds after it was written: in the queue or in prefill.
    AfterMs(u32),
    /// When so many tokens have come.
    AfterTokens(u32),
}

/// A wish to be told when a stream has reached a token.
#[derive(Clone, Debug)]
pub struct Milestone {
    /// Tokens received.
    pub token: u32,
    /// Gets one message then, and none if the stream ends before.
    pub tell: std_mpsc::Sender<Instant>,
}

/// One request to send.
#[derive(Clone, Debug)]
pub struct Job {
    /// Comes back in the record.
    pub id: usize,
    /// The request.
    pub wire: Wire,
    /// When it should have been sent.
    pub due: Instant,
    /// Whether and when it is cancelled.
    pub cancel: Option<CancelPoint>,
    /// Whether someone waits for one of its tokens.
    pub milestone: Option<Milestone>,
}

impl Job {
    /// A request that is due now.
    pub fn now(id: usize, wire: Wire) -> Self {
        Self { id, wire, due: Instant::now(), cancel: None, milestone: None }
    }
}

/// How a request ended, as the client saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Outcome {
    /// The stream ended as its dialect ends streams.
    Completed,
    /// Refused for want of room: 429, 503 or 529.
    Refused {
        /// The status.
        status: u16,
    },
    /// Cancelled by this client as planned.
    Cancelled,
    /// Anything else.
    Failed {
        /// What happened.
        message: String,
    },
}

/// What a request's answer was, for an oracle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// Token ids, on the native surface.
    pub token_ids: Vec<u32>,
    /// The text of all pieces.
    pub text: String,
}

/// Everything that was seen of one request.
#[derive(Clone, Debug)]
pub struct Record {
    /// The job's id.
    pub id: usize,
    /// Its dialect.
    pub dialect: Dialect,
    /// When it should have been sent.
    pub due: Instant,
    /// When its bytes were handed to the socket.
    pub sent: Instant,
    /// When the client was done with it.
    pub ended: Instant,
    /// How it ended.
    pub outcome: Outcome,
    /// The server said when to retry.
    pub has_retry_after: bool,
    /// Arrival of each output event, microseconds after `sent`.
    pub event_us: Vec<u32>,
    /// Prompt tokens as the server counts them.
    pub prompt_tokens: Option<u32>,
    /// Generated tokens: the server's count where it reports one, output events otherwise.
    pub output_tokens: u32,
    /// The answer, under `Capture::Outputs`.
    pub output: Output,
    /// Bytes received.
    pub bytes_received: u64,
    /// It was sent a second time because the server had closed the kept-alive connection before a byte of the answer.
    pub reconnected: bool,
    /// The oracle's name for it.
    pub key: Arc<str>,
}

impl Record {
    /// A request that got nowhere.
    pub fn failed(id: usize, message: String) -> Self {
        let now = Instant::now();
        let job = Job::now(id, Wire::new(Dialect::Native, Vec::new(), String::new()));
        Self { outcome: Outcome::Failed { message }, ..Self::begun(&job, now) }
    }

    fn begun(job: &Job, sent: Instant) -> Self {
        Self {
            id: job.id,
            dialect: job.wire.dialect,
            due: job.due,
            sent,
            ended: sent,
            outcome: Outcome::Completed,
            has_retry_after: false,
            event_us: Vec::new(),
            prompt_tokens: None,
            output_tokens: 0,
            output: Output::default(),
            bytes_received: 0,
            reconnected: false,
            key: Arc::clone(&job.wire.key),
        }
    }
}

/// The worker threads. Dropping it ends them once their requests have ended.
#[derive(Debug)]
pub struct Fleet {
    jobs: Vec<tokio_mpsc::UnboundedSender<Job>>,
    records: std_mpsc::Receiver<Record>,
    next: std::cell::Cell<usize>,
}

impl Fleet {
    /// Starts `threads` workers that connect to `address`. A request that takes longer than `timeout` fails.
    pub fn start(address: SocketAddr, threads: usize, capture: Capture, timeout: Duration) -> Self {
        let (tell, records) = std_mpsc::channel();
        let jobs = (0..threads.max(1))
            .map(|_| {
                let (submit, jobs) = tokio_mpsc::unbounded_channel();
                let tell = tell.clone();
                std::thread::spawn(move || work(jobs, tell, address, capture, timeout));
                submit
            })
            .collect();
        Self { jobs, records, next: std::cell::Cell::new(0) }
    }

    /// Hands a job to the next worker, which sends it at once. A dead worker shows as a missing record.
    pub fn submit(&self, job: Job) {
        let turn = self.next.get();
        self.next.set(turn.wrapping_add(1));
        let _ = self.jobs[turn % self.jobs.len()].send(job);
    }

    /// Waits for the next request to end; `None` when every worker has gone.
    pub fn next(&self) -> Option<Record> {
        self.records.recv().ok()
    }

    /// Waits at most so long for the next request to end.
    pub fn next_within(&self, wait: Duration) -> Option<Record> {
        self.records.recv_timeout(wait).ok()
    }
}

struct Worker {
    address: SocketAddr,
    capture: Capture,
    timeout: Duration,
    idle: RefCell<Vec<TcpStream>>,
    buffer: RefCell<Box<[u8]>>,
    tell: std_mpsc::Sender<Record>,
}

fn work(
    mut jobs: tokio_mpsc::UnboundedReceiver<Job>,
    tell: std_mpsc::Sender<Record>,
    address: SocketAddr,
    capture: Capture,
    timeout: Duration,
) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
    let worker = Rc::new(Worker {
        address,
        capture,
        timeout,
        idle: RefCell::default(),
        buffer: RefCell::new(vec![0; READ_BUFFER_BYTES].into()),
        tell,
    });
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        while let Some(job) = jobs.recv().await {
            let worker = Rc::clone(&worker);
            tokio::task::spawn_local(async move {
                let record = worker.perform(job).await;
                let _ = worker.tell.send(record); // the caller may have stopped listening
            });
        }
    });
    runtime.block_on(local); // the jobs still running
}

/// Why an exchange on one connection stopped.
enum Stop {
    Ended,
    /// A kept-alive connection was closed before a byte of the answer: worth a second try on a new one.
    Stale,
}

impl Worker {
    async fn perform(&self, job: Job) -> Record {
        let reused = self.idle.borrow_mut().pop();
        let reconnected = reused.is_some();
        if let Some(stream) = reused {
            let (record, stop) = self.exchange(stream, &job).await;
            if matches!(stop, Stop::Ended) {
                return record;
            }
        }
        match TcpStream::connect(self.address).await {
            Ok(stream) => {
                let _ = stream.set_nodelay(true); // a delay costs time, not correctness
                Record { reconnected, ..self.exchange(stream, &job).await.0 }
            }
            Err(e) => {
                let outcome = Outcome::Failed { message: format!("cannot connect: {e}") };
                Record { outcome, ..Record::begun(&job, Instant::now()) }
            }
        }
    }

    async fn exchange(&self, stream: TcpStream, job: &Job) -> (Record, Stop) {
        let sent = Instant::now();
        let mut answer = Answer::new(job, sent, self.capture);
        if let Err(e) = write_all(&stream, &job.wire.bytes).await {
            return (answer.fail(format!("cannot send: {e}")), Stop::Stale);
        }
        let cancel_after = match job.cancel {
            Some(CancelPoint::AtOnce) => return (answer.cancelled(), Stop::Ended),
            Some(CancelPoint::AfterMs(ms)) => Duration::from_millis(u64::from(ms)),
            Some(CancelPoint::AfterTokens(_)) | None => NEVER,
        };
        let deadline = tokio::time::sleep(cancel_after.min(self.timeout));
        tokio::pin!(deadline);
        loop {
            tokio::select! {
                biased;
                ready = stream.readable() => if let Err(e) = ready {
                    return (answer.fail(format!("the connection failed: {e}")), Stop::Ended);
                },
                () = &mut deadline => {
                    let ended = if cancel_after < self.timeout { answer.cancelled() }
                        else { answer.fail(format!("no end within {} s", self.timeout.as_secs())) };
                    return (ended, Stop::Ended);
                }
            }
            let mut buffer = self.buffer.borrow_mut();
            match stream.try_read(&mut buffer) {
                Ok(0) => return answer.closed(),
                Ok(n) => match answer.take(&buffer[..n], Instant::now()) {
                    Progress::More => {}
                    Progress::Cancel => return (answer.cancelled(), Stop::Ended),
                    Progress::Done { reusable } => {
                        if reusable {
                            self.idle.borrow_mut().push(stream);
                        }
                        return (answer.finish(), Stop::Ended);
                    }
                    Progress::Broken(e) => return (answer.fail(e.to_string()), Stop::Ended),
                },
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) if answer.record.bytes_received == 0 => return answer.closed(),
                Err(e) => return (answer.fail(format!("the connection failed: {e}")), Stop::Ended),
            }
        }
    }
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

enum Progress {
    More,
    Cancel,
    Done { reusable: bool },
    Broken(HttpError),
}

/// The answer of one request while it arrives: bytes → body → events → record.
struct Answer {
    http: ResponseDecoder,
    sse: SseParser,
    reading: Reading,
    record: Record,
}

/// What the events have said so far; apart from the record's identity so that it can be filled while the decoders are borrowed.
struct Reading {
    dialect: Dialect,
    capture: Capture,
    sent: Instant,
    now: Instant,
    event_us: Vec<u32>,
    output: Output,
    prompt_tokens: Option<u32>,
    output_tokens: Option<u32>,
    done: bool,
    error: Option<String>,
    error_body: Vec<u8>,
    milestone: Option<Milestone>,
    cancel_at: Option<u32>,
}

impl Answer {
    fn new(job: &Job, sent: Instant, capture: Capture) -> Self {
        let cancel_at = match job.cancel {
            Some(CancelPoint::AfterTokens(tokens)) => Some(tokens),
            _ => None,
        };
        let reading = Reading {
            dialect: job.wire.dialect,
            capture,
            sent,
            now: sent,
            event_us: Vec::with_capacity(64),
            output: Output::default(),
            prompt_tokens: None,
            output_tokens: None,
            done: false,
            error: None,
            error_body: Vec::new(),
            milestone: job.milestone.clone(),
            cancel_at,
        };
        Self { http: ResponseDecoder::new(), sse: SseParser::new(), reading, record: Record::begun(job, sent) }
    }

    fn take(&mut self, bytes: &[u8], now: Instant) -> Progress {
        self.record.bytes_received += bytes.len() as u64;
        self.reading.now = now;
        let (sse, reading) = (&mut self.sse, &mut self.reading);
        let fed = self.http.feed(bytes, &mut |status, body| {
            if status == 200 {
                sse.feed(body, &mut |event| reading.event(event));
            } else {
                let room = ERROR_BODY_BYTES_MAX.saturating_sub(reading.error_body.len());
                reading.error_body.extend_from_slice(&body[..body.len().min(room)]);
            }
        });
        if let Err(e) = fed {
            return Progress::Broken(e);
        }
        if self.reading.cancel_at.is_some_and(|at| self.reading.event_us.len() >= at as usize) {
            return Progress::Cancel;
        }
        if !self.http.is_done() {
            return Progress::More;
        }
        Progress::Done { reusable: self.http.head().is_some_and(|h| !h.closes) }
    }

    /// The server closed the connection.
    fn closed(mut self) -> (Record, Stop) {
        if self.http.end_of_input() {
            return (self.finish(), Stop::Ended);
        }
        let stop = if self.record.bytes_received == 0 { Stop::Stale } else { Stop::Ended };
        (self.fail("the connection closed before the answer was complete".into()), stop)
    }

    fn finish(mut self) -> Record {
        let head = self.http.head().cloned().unwrap_or_default();
        self.record.has_retry_after = head.retry_after.is_some();
        let outcome = match (head.status, self.reading.error.take()) {
            (429 | 503 | 529, _) => Outcome::Refused { status: head.status },
            (200, None) if self.reading.done => Outcome::Completed,
            (200, None) => Outcome::Failed { message: "the stream ended without its last event".into() },
            (200, Some(message)) => Outcome::Failed { message },
            (status, _) => {
                let body = String::from_utf8_lossy(&self.reading.error_body);
                Outcome::Failed { message: format!("status {status}: {body}") }
            }
        };
        self.end(outcome)
    }

    fn fail(self, message: String) -> Record {
        self.end(Outcome::Failed { message })
    }

    fn cancelled(self) -> Record {
        self.end(Outcome::Cancelled)
    }

    fn end(mut self, outcome: Outcome) -> Record {
        let events = u32::try_from(self.reading.event_us.len()).unwrap_or(u32::MAX);
        self.record.ended = Instant::now();
        self.record.outcome = outcome;
        self.record.event_us = self.reading.event_us;
        self.record.output = self.reading.output;
        self.record.prompt_tokens = self.reading.prompt_tokens;
        self.record.output_tokens = self.reading.output_tokens.unwrap_or(events);
        self.record
    }
}

impl Reading {
    fn event(&mut self, event: SseEvent<'_>) {
        match interpret(self.dialect, self.capture, event) {
            Meaning::Token { id, text } => self.token(id, &text),
            Meaning::Usage { prompt, output } => {
                self.prompt_tokens = prompt.or(self.prompt_tokens);
                self.output_tokens = output.or(self.output_tokens);
            }
            Meaning::Done { text, output } => {
                self.done = true;
                self.output_tokens = output.or(self.output_tokens);
                self.output.text.push_str(&text);
            }
            Meaning::Error(message) => self.error = Some(message),
            Meaning::Nothing => {}
        }
    }

    fn token(&mut self, id: Option<u32>, text: &str) {
        let after = self.now.saturating_duration_since(self.sent).as_micros();
        self.event_us.push(u32::try_from(after).unwrap_or(u32::MAX));
        if self.capture == Capture::Outputs {
            self.output.token_ids.extend(id);
            self.output.text.push_str(text);
        }
        if self.milestone.as_ref().is_some_and(|m| m.token as usize == self.event_us.len())
            && let Some(milestone) = self.milestone.take()
        {
            let _ = milestone.tell.send(self.now); // nobody waits any more
        }
    }
}

/// One small blocking exchange, for JSON endpoints.
///
/// # Errors
/// The target does not accept the connection, does not answer within `timeout`, or not in HTTP.
pub fn fetch(address: SocketAddr, request: &[u8], timeout: Duration) -> Result<(u16, Vec<u8>), ClientError> {
    let mut stream = std::net::TcpStream::connect_timeout(&address, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    stream.write_all(request)?;
    let mut decoder = ResponseDecoder::new();
    let (mut buffer, mut body) = ([0; 8192], Vec::new());
    while !decoder.is_done() {
        let n = stream.read(&mut buffer)?;
        if n == 0 {
            if !decoder.end_of_input() {
                return Err(ClientError::Truncated);
            }
            break;
        }
        decoder.feed(&buffer[..n], &mut |_, piece| body.extend_from_slice(piece))?;
    }
    Ok((decoder.head().map_or(0, |h| h.status), body))
}
