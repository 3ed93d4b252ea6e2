//! The roll of residents: a request leaves the account only when its end, its pages and its timing are all known, so that no
//! snapshot shows a request gone and its pages still out, or a counter without its sample.

use std::collections::BTreeMap;
use std::time::Duration;

use super::account::{Dialect, FinishedSample, Outcome};
use super::request::RequestId;

/// How a resident ended, as the planner judged it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Finished, cancelled or failed.
    pub outcome: Outcome,
    /// Generated tokens that count.
    pub generated: u32,
}

/// When a request's tokens came; every value on the engine's monotonic clock.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timing {
    /// From `Submit` to residence.
    pub queue: Duration,
    /// From `Submit` to the step of the first token; absent when there was none.
    pub ttft: Option<Duration>,
    /// From `Submit` to the last token that counts.
    pub e2e: Duration,
    /// Between consecutive tokens, µs.
    pub gaps_us: Vec<f32>,
}

/// A resident request. `H` is the address of its session's hub, opaque here.
#[derive(Debug)]
pub(super) struct Resident<H> {
    pub dialect: Dialect,
    pub prompt_tokens: u32,
    pub pages: u32,
    pub hub: H,
    ended: Option<Ended>,
    timing: Option<Timing>,
    pages_back: bool,
}

impl<H> Resident<H> {
    fn has_left(&self) -> bool {
        self.ended.is_some() && self.timing.is_some() && self.pages_back
    }
}

/// A resident that has left, and the sample that it leaves when it finished.
pub(super) struct Left {
    pub dialect: Dialect,
    pub prompt_tokens: u32,
    pub ended: Ended,
    pub sample: Option<FinishedSample>,
}

/// The residents by id.
#[derive(Debug)]
pub(super) struct Roll<H>(BTreeMap<RequestId, Resident<H>>);

impl<H> Roll<H> {
    pub fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub fn enter(&mut self, id: RequestId, dialect: Dialect, prompt_tokens: u32, pages: u32, hub: H) {
        let resident = Resident { dialect, prompt_tokens, pages, hub, ended: None, timing: None, pages_back: false };
        self.0.insert(id, resident);
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn contains(&self, id: RequestId) -> bool {
        self.0.contains_key(&id)
    }

    /// Residents that the planner has not reported as ended, in the order of their ids.
    pub fn running(&self) -> impl Iterator<Item = (RequestId, &Resident<H>)> {
        self.0.iter().filter(|(_, r)| r.ended.is_none()).map(|(&id, r)| (id, r))
    }

    /// Pages that residents hold.
    pub fn pages(&self) -> u32 {
        self.0.values().filter(|r| !r.pages_back).map(|r| r.pages).sum()
    }

    pub fn ended(&mut self, id: RequestId, ended: Ended) -> Option<Left> {
        self.note(id, |r| r.ended = Some(ended))
    }

    pub fn measured(&mut self, id: RequestId, timing: Timing) -> Option<Left> {
        self.note(id, |r| r.timing = Some(timing))
    }

    pub fn pages_back(&mut self, id: RequestId) -> Option<Left> {
        self.note(id, |r| r.pages_back = true)
    }

    /// Everybody out: the engine is dead and nothing more will be reported.
    pub fn clear(&mut self) -> Vec<(RequestId, Resident<H>)> {
        std::mem::take(&mut self.0).into_iter().collect()
    }

    fn note(&mut self, id: RequestId, what: impl FnOnce(&mut Resident<H>)) -> Option<Left> {
        let resident = self.0.get_mut(&id)?;
        what(resident);
        if !resident.has_left() {
            return None;
        }
        let resident = self.0.remove(&id)?;
        let (ended, timing) = (resident.ended?, resident.timing?);
        let (dialect, prompt_tokens) = (resident.dialect, resident.prompt_tokens);
        let sample =
            (ended.outcome == Outcome::Finished).then(|| sample(dialect, prompt_tokens, ended.generated, timing));
        Some(Left { dialect, prompt_tokens, ended, sample })
    }
}

fn sample(dialect: Dialect, prompt_tokens: u32, generated_tokens: u32, timing: Timing) -> FinishedSample {
    let micros = |d: Duration| d.as_secs_f64() * 1e6;
    FinishedSample {
        dialect,
        prompt_tokens,
        generated_tokens,
        queue_us: micros(timing.queue),
        ttft_us: micros(timing.ttft.unwrap_or(timing.e2e)),
        e2e_us: micros(timing.e2e),
        gaps_us: timing.gaps_us,
    }
}
