//! The client's own capacity: how many stream events a second it reads from the stub. A measurement of a server means something
//! only well below this figure, so every report may carry it.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::client::Fleet;
use super::dialect::{Ask, Capabilities, Capture, Dialect, Policy, Prompt};
use super::job::{Job, Outcome, Wire};
use super::stub::{Stub, StubOptions};
use super::target::{Target, TargetError};

/// What to measure.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SelfTest {
    /// Threads of the client; the stub has as many.
    pub threads: usize,
    /// Requests in flight.
    pub concurrency: usize,
    /// Tokens of one stream.
    pub tokens: u32,
    /// How long.
    pub duration_s: f64,
}

/// What the client managed against the stub, both on this machine.
#[derive(Clone, Debug, Serialize)]
pub struct Capacity {
    /// The dialect read.
    pub dialect: Dialect,
    /// As measured.
    pub test: SelfTest,
    /// Output events read a second.
    pub events_per_s: f64,
    /// Whole requests a second.
    pub requests_per_s: f64,
    /// Bytes received a second.
    pub bytes_per_s: f64,
    /// Requests that did not complete; anything but 0 spoils the figure.
    pub failed: usize,
}

/// Why it could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum SelfTestError {
    /// The stub cannot listen.
    #[error("the stub of the self-test: {0}")]
    Stub(#[from] std::io::Error),
    /// The stub cannot be addressed.
    #[error(transparent)]
    Target(#[from] TargetError),
}

/// Runs a closed loop of streams against a stub of its own.
///
/// # Errors
/// The stub cannot listen on the loopback interface.
pub fn measure(dialect: Dialect, options: StubOptions, test: SelfTest) -> Result<Capacity, SelfTestError> {
    let stub = Stub::start(([127, 0, 0, 1], 0).into(), options)?;
    let target = Target::new(&format!("http://{}", stub.address), None)?;
    let prompt = Prompt::Tokens(vec![1; 8]);
    let takes = Capabilities::best_of(dialect);
    let (max_tokens, policy) = (test.tokens, Policy::Greedy);
    let ask = Ask { dialect, model: "stub", prompt: &prompt, max_tokens, policy, seed: 0, takes };
    let wire = Wire::new(dialect, target.post(dialect, &ask.body()), String::new(), ask.length());
    let fleet = Fleet::start(target.address, test.threads, Capture::Counts, Duration::from_secs(60));
    let start = Instant::now();
    for id in 0..test.concurrency {
        fleet.submit(Job::now(id, wire.clone()));
    }
    let (mut live, mut events, mut requests, mut bytes, mut failed) = (test.concurrency, 0u64, 0u64, 0u64, 0usize);
    while live > 0 {
        let Some(record) = fleet.next() else { break };
        live -= 1;
        events += record.event_us.len() as u64;
        bytes += record.bytes_received;
        requests += 1;
        failed += usize::from(record.outcome != Outcome::Completed || record.event_us.len() != test.tokens as usize);
        if start.elapsed().as_secs_f64() < test.duration_s {
            fleet.submit(Job::now(record.id, wire.clone()));
            live += 1;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let per_s = |n: u64| n as f64 / seconds;
    let (events_per_s, requests_per_s, bytes_per_s) = (per_s(events), per_s(requests), per_s(bytes));
    Ok(Capacity { dialect, test, events_per_s, requests_per_s, bytes_per_s, failed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_reads_every_event_that_the_stub_sends_in_every_dialect_and_pace() {
        let test = SelfTest { threads: 2, concurrency: 4, tokens: 300, duration_s: 0.05 };
        for dialect in Dialect::ALL {
            for pace in [crate::load::stub::Pace::Together, crate::load::stub::Pace::EachEvent] {
                let options = StubOptions { pace, ..StubOptions::default() };
                let capacity = measure(dialect, options, test).expect("a stub");
                assert_eq!(capacity.failed, 0, "{dialect:?} {pace:?}");
                assert!(capacity.requests_per_s > 0.0);
            }
        }
    }
}
