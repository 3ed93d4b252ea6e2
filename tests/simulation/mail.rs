//! What the cores are told, as the actors' messages have it. The scorer's mail is its slices, a hub's its entries.

use crucible::admission::{Arrival, Ended, RequestId, StepCounters, Timing};
use crucible::backend::StepOutput;
use crucible::pages::{PageLease, ReturnedPages};
use crucible::planner::{Cause, Retired, Sequence};
use crucible::sampler::Tracked;

/// Mail for Admission.
pub enum ToAdmission {
    Submit(Arrival<usize>),
    Cancel(RequestId),
    StopHit(RequestId, u32),
    Reserved(PageLease),
    Insufficient(RequestId),
    PagesFreed(RequestId),
    RequestEnded(RequestId, Ended),
    Measured(RequestId, Timing),
    Progressed(Box<StepCounters>, u32),
    Drain,
    DrainDeadline,
    EngineFailed,
}

/// Mail for the page allocator.
pub enum ToPages {
    Reserve(RequestId, usize),
    Release(ReturnedPages),
}

/// Mail for the planner.
pub enum ToPlanner {
    Enqueue(Sequence, PageLease, usize),
    Settled,
    CancelResident(RequestId, Cause),
    StepRetired(Retired),
    Scored(RequestId, u32),
    Close,
}

/// Mail for the sampler.
pub enum ToSampler {
    Track(RequestId, Tracked<usize>),
    StepCompleted(StepOutput),
    Forget(RequestId, u32),
}
