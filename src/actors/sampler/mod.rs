//! The sampler's actor. The planner hears of a step before the sessions and the scorer do, and these are told after the next step is
//! launched: waking other threads costs more than the whole ring, and the device must not wait for it.

pub mod messages;

use std::collections::VecDeque;

use actix::{Actor, ActorFutureExt, Addr, AsyncContext, Context, Handler, WrapFuture};

use self::messages::{Forget, StepCompleted, Track};
use super::admission::messages::Measured;
use super::admission::{AdmissionActor, Hub};
use super::planner::PlannerActor;
use super::planner::messages::StepRetired;
use super::scorer::ScorerActor;
use super::scorer::messages::Score;
use super::session::messages::TokenBatch;
use crate::sampler::Sampler;

/// A thin shell over `sampler::Sampler`.
pub struct SamplerActor {
    pub(super) core: Sampler<Hub>,
    pub(super) planner: Addr<PlannerActor>,
    pub(super) admission: Addr<AdmissionActor>,
    pub(super) scorer: Addr<ScorerActor>,
    pub(super) outbox: VecDeque<Outgoing>,
}

/// What waits until the next step is launched.
pub(super) enum Outgoing {
    Batch(Hub, TokenBatch),
    Score(Score),
}

impl Actor for SamplerActor {
    type Context = Context<Self>;
}

impl SamplerActor {
    fn deliver(&mut self) {
        for outgoing in self.outbox.drain(..) {
            match outgoing {
                Outgoing::Batch(hub, batch) => hub.do_send(batch),
                Outgoing::Score(score) => self.scorer.do_send(score),
            }
        }
    }
}

impl Handler<Track> for SamplerActor {
    type Result = ();
    fn handle(&mut self, Track { request, tracked }: Track, _: &mut Self::Context) {
        self.core.track(request, tracked);
    }
}

impl Handler<StepCompleted> for SamplerActor {
    type Result = ();
    fn handle(&mut self, StepCompleted { output, at }: StepCompleted, ctx: &mut Self::Context) {
        #[cfg(feature = "fault-injection")]
        crate::faults::panics(crate::faults::Point::Sampler);
        let digest = self.core.digest(output, at);
        self.planner.do_send(StepRetired(digest.retired));
        let batches = digest.batches.into_iter().map(|(hub, entries)| Outgoing::Batch(hub, TokenBatch { entries }));
        let slices = digest.slices.into_iter().map(|slice| Outgoing::Score(Score(slice)));
        self.outbox.extend(batches.chain(slices));
        if !self.outbox.is_empty() {
            let after_the_launch = tokio::task::yield_now().into_actor(self);
            ctx.spawn(after_the_launch.map(|(), actor, _| actor.deliver()));
        }
    }
}

impl Handler<Forget> for SamplerActor {
    type Result = ();
    fn handle(&mut self, Forget { request, generated }: Forget, _: &mut Self::Context) {
        if let Some(timing) = self.core.forget(request, generated) {
            self.admission.do_send(Measured { request, timing });
        }
    }
}
