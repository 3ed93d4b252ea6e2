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
use std::sync::mpsc as std_mpsc;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::sync::mpsc as tokio_mpsc;

use super::answer::{Answer, Progress, Stop};
use super::dialect::Capture;
use super::http1::{HttpError, ResponseDecoder};
use super::interrupt;
use super::job::{CancelPoint, Job, Outcome, Record};

/// Bytes of a worker's read buffer.
const READ_BUFFER_BYTES: usize = 256 * 1024;
/// Longest body of a small blocking exchange.
const BODY_BYTES_MAX: usize = 8 << 20;
/// The fleet answers for a request so long after its timeout at the latest; past it a worker has died.
const RECORD_GRACE: Duration = Duration::from_secs(30);

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
    /// The exchange as a whole took too long, whatever came meanwhile.
    #[error("no whole answer within {0:?}")]
    Late(Duration),
    /// More than any JSON endpoint says.
    #[error("the answer exceeds {} bytes", BODY_BYTES_MAX)]
    TooLong,
}

/// The worker threads. Dropping it ends them once their requests have ended.
#[derive(Debug)]
pub struct Fleet {
    jobs: Vec<tokio_mpsc::UnboundedSender<Job>>,
    records: std_mpsc::Receiver<Record>,
    next: std::cell::Cell<usize>,
    timeout: Duration,
}

impl Fleet {
    /// Starts `threads` workers that connect to `address`. A request that takes longer than `timeout`, from its connection to its last
    /// byte, fails.
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
        Self { jobs, records, next: std::cell::Cell::new(0), timeout }
    }

    /// Hands a job to the next worker, which sends it at once. A dead worker shows as a missing record.
    pub fn submit(&self, job: Job) {
        let turn = self.next.get();
        self.next.set(turn.wrapping_add(1));
        let _ = self.jobs[turn % self.jobs.len()].send(job);
    }

    /// Waits for the next request to end; `None` when a worker has died, which shows as a record that does not come, or when the measurement
    /// is to end.
    pub fn next(&self) -> Option<Record> {
        self.next_within(self.timeout + RECORD_GRACE)
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
    let all = async {
        while let Some(job) = jobs.recv().await {
            let worker = Rc::clone(&worker);
            tokio::task::spawn_local(async move {
                let record = worker.perform(job).await;
                // What a dead server was asked counts nowhere.
                if is_unanswered(&record) && ends_without_answer(&record).await {
                    return;
                }
                let _ = worker.tell.send(record); // the caller may have stopped listening
            });
        }
    };
    // The jobs, then those still running; at a premature end every connection is closed.
    let ended = local.block_on(&runtime, async {
        tokio::select! { () = all => false, () = interrupt::wait() => true }
    });
    if !ended {
        runtime.block_on(async {
            tokio::select! { () = local => {}, () = interrupt::wait() => {} }
        });
    }
}

/// No whole answer came, or nothing at all.
fn is_unanswered(record: &Record) -> bool {
    record.bytes_received == 0 || matches!(record.outcome, Outcome::Failed { .. }) && record.status.is_none()
}

async fn ends_without_answer(record: &Record) -> bool {
    // A request that was cancelled at once has had no time for a byte.
    interrupt::ends_without_answer(record.bytes_received > 0 || record.outcome == Outcome::Cancelled).await
}

/// When an exchange ends at the latest, and how.
#[derive(Clone, Copy)]
struct Limit {
    /// Nothing of the exchange goes on past it.
    deadline: Instant,
    /// Whether the client hangs up before, as planned.
    cancel_at: Option<Instant>,
}

impl Limit {
    fn next(&self) -> Instant {
        self.cancel_at.map_or(self.deadline, |at| at.min(self.deadline))
    }
}

impl Worker {
    async fn perform(&self, job: Job) -> Record {
        let deadline = Instant::now() + self.timeout;
        let reused = self.idle.borrow_mut().pop();
        let reconnected = reused.is_some();
        if let Some(stream) = reused {
            let (record, stop) = self.exchange(stream, &job, deadline).await;
            if matches!(stop, Stop::Ended) {
                return record;
            }
        }
        let begun = Instant::now();
        let failed = |message| Record { outcome: Outcome::Failed { message }, ..Record::begun(&job, begun) };
        match tokio::time::timeout_at(deadline.into(), TcpStream::connect(self.address)).await {
            Ok(Ok(stream)) => {
                let _ = stream.set_nodelay(true); // a delay costs time, not correctness
                Record { reconnected, ..self.exchange(stream, &job, deadline).await.0 }
            }
            Ok(Err(e)) => failed(format!("cannot connect: {e}")),
            Err(_) => failed(format!("no connection within {} s", self.timeout.as_secs())),
        }
    }

    async fn exchange(&self, stream: TcpStream, job: &Job, deadline: Instant) -> (Record, Stop) {
        let sent = Instant::now();
        let mut answer = Answer::new(job, sent, self.capture);
        match tokio::time::timeout_at(deadline.into(), write_all(&stream, &job.wire.bytes)).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => return (answer.fail(format!("cannot send: {e}")), Stop::Stale),
            Err(_) => return (answer.fail(self.late("the target does not read the request")), Stop::Ended),
        }
        let cancel_at = match job.cancel {
            Some(CancelPoint::AtOnce) => return (answer.cancelled(), Stop::Ended),
            Some(CancelPoint::AfterMs(ms)) => Some(sent + Duration::from_millis(u64::from(ms))),
            Some(CancelPoint::AfterTokens(_)) | None => None,
        };
        let limit = Limit { deadline, cancel_at };
        let timer = tokio::time::sleep_until(limit.next().into());
        tokio::pin!(timer);
        loop {
            tokio::select! {
                biased;
                ready = stream.readable() => if let Err(e) = ready {
                    return (answer.fail(format!("the connection failed: {e}")), Stop::Ended);
                },
                () = &mut timer => return self.stopped(answer, limit),
            }
            let mut buffer = self.buffer.borrow_mut();
            match stream.try_read(&mut buffer) {
                Ok(0) => return answer.closed(),
                Ok(n) => {
                    let now = Instant::now();
                    match answer.take(&buffer[..n], now) {
                        // A stream that is always readable never lets the timer have its turn.
                        Progress::More if now >= limit.next() => return self.stopped(answer, limit),
                        Progress::More => {}
                        Progress::Cancel => return (answer.cancelled(), Stop::Ended),
                        Progress::Done { reusable } => {
                            if reusable {
                                self.idle.borrow_mut().push(stream);
                            }
                            return (answer.finish(), Stop::Ended);
                        }
                        Progress::Broken(e) => return (answer.fail(e.to_string()), Stop::Ended),
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) if !answer.has_begun() => return answer.closed(),
                Err(e) => return (answer.fail(format!("the connection failed: {e}")), Stop::Ended),
            }
        }
    }

    /// The moment of the limit has come.
    fn stopped(&self, answer: Answer, limit: Limit) -> (Record, Stop) {
        let planned = limit.cancel_at.is_some_and(|at| at < limit.deadline);
        let record = if planned { answer.cancelled() } else { answer.fail(self.late("no end")) };
        (record, Stop::Ended)
    }

    fn late(&self, what: &str) -> String {
        format!("{what} within {} s; --timeout-s sets how long a request may take", self.timeout.as_secs())
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

/// One small blocking exchange, for JSON endpoints.
///
/// # Errors
/// The target does not accept the connection, has not answered as a whole within `timeout`, says more than an endpoint may, or does not
/// speak HTTP.
pub fn fetch(address: SocketAddr, request: &[u8], timeout: Duration) -> Result<(u16, Vec<u8>), ClientError> {
    let deadline = Instant::now() + timeout;
    // A socket takes no timeout of zero.
    let left = || match deadline.saturating_duration_since(Instant::now()) {
        left if left.is_zero() => Err(ClientError::Late(timeout)),
        left => Ok(left),
    };
    let timed = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => ClientError::Late(timeout),
        _ => ClientError::Io(e),
    };
    let mut stream = std::net::TcpStream::connect_timeout(&address, left()?).map_err(timed)?;
    stream.set_write_timeout(Some(left()?))?;
    stream.write_all(request).map_err(timed)?;
    let mut decoder = ResponseDecoder::new();
    let (mut buffer, mut body) = ([0; 8192], Vec::new());
    while !decoder.is_done() {
        stream.set_read_timeout(Some(left()?))?;
        let n = stream.read(&mut buffer).map_err(timed)?;
        if n == 0 {
            if !decoder.end_of_input() {
                return Err(ClientError::Truncated);
            }
            break;
        }
        decoder.feed(&buffer[..n], &mut |_, piece| body.extend_from_slice(piece))?;
        if body.len() > BODY_BYTES_MAX {
            return Err(ClientError::TooLong);
        }
    }
    Ok((decoder.head().map_or(0, |h| h.status), body))
}
