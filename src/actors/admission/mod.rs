//! The admission actor: gives events to the core, carries its effects out, and publishes the account after every event.

pub mod messages;

use std::sync::Arc;

use actix::{Actor, Addr, AsyncContext, Context, Handler, Recipient};
use tokio::sync::oneshot;

use self::messages::{
    Cancel, Drain, EngineFailed, Insufficient, Measured, PagesFreed, Progressed, RequestEnded, Reserved, StopHit,
    Submit,
};
use super::board::Board;
use super::clock::Clock;
use super::pages::PagesActor;
use super::pages::messages::Reserve;
use super::planner::PlannerActor;
use super::planner::messages::{CancelResident, Enqueue, Settled};
use super::session::messages::{SessionEnd, TokenBatch, TokenEntry};
use crate::admission::{Admission, Arrival, Effect};

/// The hub of an HTTP worker.
pub(super) type Hub = Recipient<TokenBatch>;

/// A thin shell over `admission::Admission`.
pub struct AdmissionActor {
    pub(super) core: Admission<Hub>,
    pub(super) pages: Addr<PagesActor>,
    pub(super) planner: Addr<PlannerActor>,
    pub(super) board: Arc<Board>,
    pub(super) clock: Clock,
    pub(super) drains: Vec<oneshot::Sender<()>>,
}

impl Actor for AdmissionActor {
    type Context = Context<Self>;
}

impl AdmissionActor {
    fn event(&mut self, give: impl FnOnce(&mut Admission<Hub>, &mut Vec<Effect<Hub>>)) {
        let mut effects = Vec::new();
        give(&mut self.core, &mut effects);
        let samples = self.core.take_samples();
        self.board.publish(self.core.account(), samples);
        effects.into_iter().for_each(|effect| self.carry_out(effect));
    }

    fn carry_out(&mut self, effect: Effect<Hub>) {
        match effect {
            Effect::Reserve { request, pages } => self.pages.do_send(Reserve { request, pages }),
            Effect::Enqueue { sequence, lease, hub } => self.planner.do_send(Enqueue { sequence, lease, hub }),
            Effect::Settled => self.planner.do_send(Settled),
            Effect::CancelResident { request, cause } => self.planner.do_send(CancelResident { request, cause }),
            Effect::Reject { request, hub, failure } => {
                let entry = TokenEntry {
                    request,
                    prompt_scores: Vec::new(),
                    tokens: Vec::new(),
                    end: Some(SessionEnd::Failed(failure)),
                };
                hub.do_send(TokenBatch { entries: vec![entry] });
            }
            Effect::Drained => self.drains.drain(..).for_each(|done| done.send(()).unwrap_or_default()),
        }
    }
}

impl Handler<Submit> for AdmissionActor {
    type Result = ();
    fn handle(&mut self, Submit { request, permit, hub }: Submit, _: &mut Self::Context) {
        #[cfg(feature = "fault-injection")]
        crate::faults::panics(crate::faults::Point::Admission);
        let at = self.clock.now();
        self.event(|core, effects| core.submit(Arrival { request, permit, hub, at }, effects));
    }
}

impl Handler<Cancel> for AdmissionActor {
    type Result = ();
    fn handle(&mut self, Cancel { request }: Cancel, _: &mut Self::Context) {
        self.event(|core, effects| core.cancel(request, effects));
    }
}

impl Handler<StopHit> for AdmissionActor {
    type Result = ();
    fn handle(&mut self, StopHit { request, token_index }: StopHit, _: &mut Self::Context) {
        self.event(|core, effects| core.stop_hit(request, token_index, effects));
    }
}

impl Handler<Reserved> for AdmissionActor {
    type Result = ();
    fn handle(&mut self, Reserved { lease }: Reserved, _: &mut Self::Context) {
        let at = self.clock.now();
        self.event(|core, effects| core.reserved(lease, at, effects));
    }
}

impl Handler<Insufficient> for AdmissionActor {
    type Result = ();
    fn handle(&mut self, Insufficient { request }: Insufficient, _: &mut Self::Context) {
        self.event(|core, effects| core.insufficient(request, effects));
    }
}

impl Handler<PagesFreed> for AdmissionActor {
    type Result = ();
    fn handle(&mut self, PagesFreed { request }: PagesFreed, _: &mut Self::Context) {
        self.event(|core, effects| core.pages_freed(request, effects));
    }
}

impl Handler<RequestEnded> for AdmissionActor {
    type Result = ();
    fn handle(&mut self, RequestEnded { request, ended }: RequestEnded, _: &mut Self::Context) {
        self.event(|core, effects| core.request_ended(request, ended, effects));
    }
}

impl Handler<Measured> for AdmissionActor {
    type Result = ();
    fn handle(&mut self, Measured { request, timing }: Measured, _: &mut Self::Context) {
        self.event(|core, effects| core.measured(request, timing, effects));
    }
}

impl Handler<Progressed> for AdmissionActor {
    type Result = ();
    fn handle(&mut self, Progressed { steps, prefilling }: Progressed, _: &mut Self::Context) {
        self.event(|core, _| core.progressed(steps, prefilling));
    }
}

impl Handler<Drain> for AdmissionActor {
    type Result = ();
    fn handle(&mut self, Drain { done, deadline }: Drain, ctx: &mut Self::Context) {
        self.drains.push(done);
        self.event(|core, effects| core.drain(effects));
        if !self.drains.is_empty() {
            ctx.run_later(deadline, |actor, _| actor.event(|core, effects| core.drain_deadline(effects)));
        }
    }
}

impl Handler<EngineFailed> for AdmissionActor {
    type Result = ();
    fn handle(&mut self, EngineFailed { reason }: EngineFailed, _: &mut Self::Context) {
        self.event(|core, effects| core.engine_failed(&reason, effects));
    }
}
