//! The sampler's actor. The planner hears of a step before the sessions do, and the sessions are told after the next step is
//! launched: waking HTTP workers costs more than the whole ring, and the device must not wait for it.

pub mod messages;

use std::collections::VecDeque;

use actix::{Actor, ActorFutureExt, Addr, AsyncContext, Context, Handler, WrapFuture};

use self::messages::{Forget, StepCompleted, Track};
use super::admission::messages::Measured;
use super::admission::{AdmissionActor, Hub};
use super::planner::PlannerActor;
use super::planner::messages::StepRetired;
use super::session::messages::TokenBatch;
use crate::sampler::Sampler;

/// A thin shell over `sampler::Sampler`.
pub struct SamplerActor {
    pub(super) core: Sampler<Hub>,
    pub(super) planner: Addr<PlannerActor>,
    pub(super) admission: Addr<AdmissionActor>,
    pub(super) outbox: VecDeque<(Hub, TokenBatch)>,
}

impl Actor for SamplerActor {
    type Context = Context<Self>;
}

impl SamplerActor {
    fn deliver(&mut self) {
        for (hub, batch) in self.outbox.drain(..) {
            hub.do_send(batch);
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
        self.outbox.extend(digest.batches.into_iter().map(|(hub, entries)| (hub, TokenBatch { entries })));
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
