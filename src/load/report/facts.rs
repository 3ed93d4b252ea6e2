//! Who measured and what was measured: the part that every report begins with.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::Value;

use crate::load::dialect::{Capabilities, Dialect};
use crate::load::figures::Round;
use crate::load::render::Renderer;
use crate::load::selftest::Capacity;
use crate::load::watch::Host;

/// The commit that this program was built from; `None` where the build had no history.
pub const COMMIT: Option<&str> = option_env!("CRUCIBLE_COMMIT");

/// The client's side.
#[derive(Clone, Debug, Serialize)]
pub struct ClientFacts {
    /// Version of this program.
    pub version: &'static str,
    /// The commit it was built from, with `+changes` when its sources had some.
    pub commit: Option<&'static str>,
    /// Worker threads.
    pub threads: usize,
    /// Its machine.
    pub host: Host,
    /// What it managed against the stub, when that was measured.
    pub capacity: Option<Capacity>,
    /// Output events a second in the busiest tenth of a second of the run.
    pub busiest_events_per_s: Option<f64>,
    /// That in percent of the capacity; a measurement is sound well below 100.
    pub busiest_percent: Option<f64>,
}

impl ClientFacts {
    /// This program on this machine.
    pub fn here(threads: usize) -> Self {
        let (version, host) = (env!("CARGO_PKG_VERSION"), Host::here());
        let (capacity, busiest_events_per_s, busiest_percent) = (None, None, None);
        Self { version, commit: COMMIT, threads, host, capacity, busiest_events_per_s, busiest_percent }
    }

    /// Sets the run's rate against the capacity.
    pub fn set_against<'a>(&mut self, rounds: impl IntoIterator<Item = &'a Round>) {
        self.busiest_events_per_s = rounds.into_iter().map(Round::busiest_events_per_s).max_by(f64::total_cmp);
        let capacity = self.capacity.as_ref().map(|c| c.events_per_s).filter(|c| *c > 0.0);
        self.busiest_percent = self.busiest_events_per_s.zip(capacity).map(|(busiest, all)| busiest / all * 100.0);
    }

    /// Version and commit.
    pub fn build(&self) -> String {
        format!("crucible {}, commit {}", self.version, self.commit.unwrap_or("unknown"))
    }

    /// The run's rate and the capacity in words.
    pub fn load(&self) -> String {
        let busiest = self
            .busiest_events_per_s
            .map_or("no event".to_owned(), |rate| format!("at most {rate:.0} events/s in this run"));
        match (&self.capacity, self.busiest_percent) {
            (Some(c), Some(percent)) => format!(
                "{busiest}, {percent:.1} % of the {:.0} events/s that {} threads read from the stub",
                c.events_per_s, c.test.threads
            ),
            _ => format!("{busiest}; its capacity was not measured (--capacity)"),
        }
    }
}

/// The server's side.
#[derive(Clone, Debug, Serialize)]
pub struct TargetFacts {
    /// Its address.
    pub url: String,
    /// The model that requests name.
    pub model: String,
    /// /health as it stands: what the server tells of its configuration.
    pub health: Option<Value>,
    /// What each dialect takes.
    pub dialects: BTreeMap<Dialect, Capabilities>,
}

impl TargetFacts {
    /// Asks the server.
    pub fn of(renderer: &Renderer) -> Self {
        let target = renderer.target();
        Self {
            url: target.url.clone(),
            model: renderer.model().to_owned(),
            health: target.json("/health"),
            dialects: renderer.takes().clone(),
        }
    }
}

/// Milliseconds since 1970.
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(0)
}
