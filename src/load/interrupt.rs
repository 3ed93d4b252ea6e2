//! The end of a measurement before its time: a signal, or the death of the server that it needs. The client stops asking and hangs up,
//! what was measured so far is kept and written, and the servers that were started are ended. A later signal kills them and ends the
//! process at once; a hang-up, or a signal within a second of the first, is the same wish again.
//!
//! One state for the process, as signals are: whoever waits asks here.

use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal as Sent, kill_process_group};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::process::resident_bytes;
use crate::output::note;

/// Signals within this time of the first are the same wish: kernel and shell both tell of a closed terminal.
const ONE_WISH: Duration = Duration::from_secs(1);
/// Between two looks of a thread that sleeps.
const LOOK: Duration = Duration::from_millis(20);
/// Whoever watches a server tells of its end within this after its sockets were closed.
const TOLD_WITHIN: Duration = Duration::from_secs(5);
/// What was started may be the parent of what serves, and ends so much later.
const PARENT_WITHIN: Duration = Duration::from_secs(1);

/// Why the measurement ends early.
static CAUSE: LazyLock<watch::Sender<Option<String>>> = LazyLock::new(|| watch::channel(None).0);
/// Process groups of the servers that run, each by its first process.
static GROUPS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// The signals, each with its name and number.
const SIGNALS: [(SignalKind, &str); 3] =
    [(SignalKind::terminate(), "SIGTERM"), (SignalKind::interrupt(), "SIGINT"), (SignalKind::hangup(), "SIGHUP")];

/// Takes the process's signals from now on.
///
/// # Errors
/// The system refuses a handler or a thread.
pub fn catch() -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = {
        let _inside = runtime.enter();
        SIGNALS.into_iter().map(|(kind, name)| Ok((signal(kind)?, kind, name))).collect::<std::io::Result<Vec<_>>>()?
    };
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            let (_, name) = next(&mut signals).await;
            let begun = Instant::now();
            raise(&format!("{name} came"));
            let text =
                "ending with what was measured so far; SIGTERM or Ctrl-C a second from now or later ends at once";
            note(format_args!("{name}: {text}"));
            let kind = loop {
                let (kind, _) = next(&mut signals).await;
                if kind != SignalKind::hangup() && begun.elapsed() >= ONE_WISH {
                    break kind;
                }
            };
            kill_groups();
            std::process::exit(128 + kind.as_raw_value());
        });
    })?;
    Ok(())
}

async fn next(signals: &mut [(Signal, SignalKind, &'static str)]) -> (SignalKind, &'static str) {
    let waits = signals.iter_mut().map(|(signal, kind, name)| {
        Box::pin(async move {
            signal.recv().await;
            (*kind, *name)
        })
    });
    futures_util::future::select_all(waits).await.0
}

/// Ends the measurement; the first cause is kept.
pub fn raise(cause: &str) {
    CAUSE.send_if_modified(|held| {
        let first = held.is_none();
        if first {
            *held = Some(cause.to_owned());
        }
        first
    });
}

/// Whether the measurement is to end.
pub fn raised() -> bool {
    CAUSE.borrow().is_some()
}

/// Why it is to end.
pub fn cause() -> Option<String> {
    CAUSE.borrow().clone()
}

/// Waits until the measurement is to end.
pub async fn wait() {
    // The sender is never dropped.
    let _ = CAUSE.subscribe().wait_for(Option::is_some).await;
}

/// Whether the measurement ends because of what a request without a whole answer ran into: a server that was started has ended, and whoever
/// watches it is about to say so. Nothing is waited for while all of them run, but for a moment when not a byte `came`.
pub async fn ends_without_answer(came: bool) -> bool {
    let servers = GROUPS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let patience = if servers.iter().any(|&server| resident_bytes(server).is_none()) {
        TOLD_WITHIN
    } else if !came && !servers.is_empty() {
        PARENT_WITHIN
    } else {
        return raised();
    };
    tokio::time::timeout(patience, wait()).await.is_ok()
}

/// Sleeps, but no longer than the measurement lasts.
pub fn sleep(time: Duration) {
    let end = Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || raised() {
            return;
        }
        std::thread::sleep(left.min(LOOK));
    }
}

/// A server runs in a process group of its own.
pub(super) fn began(group: u32) {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner).push(group);
}

/// It has ended.
pub(super) fn ended(group: u32) {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner).retain(|g| *g != group);
}

/// Sends a signal to a process group; one that is gone is no error.
pub(super) fn tell(group: u32, signal: Sent) {
    if let Some(group) = i32::try_from(group).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, signal);
    }
}

fn kill_groups() {
    for group in GROUPS.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        tell(group, Sent::KILL);
    }
}
