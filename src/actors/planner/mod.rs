//! The planner's actor. After a completed step it launches the next one first, then lets departed sequences go.

pub mod messages;

use actix::{Actor, Addr, Context, Handler};

use self::messages::{CancelResident, Close, Enqueue, Scored, Settled, StepRetired};
use super::admission::AdmissionActor;
use super::admission::messages::{Progressed, RequestEnded};
use super::clock::Clock;
use super::executor::ExecutorActor;
use super::executor::messages::RunStep;
use super::sampler::SamplerActor;
use super::sampler::messages::{Forget, Track};
use crate::planner::Planner;
use crate::sampler::Tracked;

/// A thin shell over `planner::Planner`.
pub struct PlannerActor {
    pub(super) core: Planner,
    pub(super) executor: Addr<ExecutorActor>,
    pub(super) sampler: Addr<SamplerActor>,
    pub(super) admission: Addr<AdmissionActor>,
    pub(super) clock: Clock,
}

impl Actor for PlannerActor {
    type Context = Context<Self>;

    /// The account shows the budget from the start.
    fn started(&mut self, _: &mut Self::Context) {
        self.let_go();
    }
}

impl PlannerActor {
    fn launch(&mut self) {
        loop {
            let begun = self.clock.now();
            let Some(planned) = self.core.plan() else { break };
            let prepare = self.clock.now().saturating_sub(begun);
            self.executor.do_send(RunStep { planned, prepare });
        }
    }

    /// In this order for each: its lease drops, its slot is free, `Forget`, `RequestEnded`.
    fn let_go(&mut self) {
        let departures = self.core.depart();
        self.admission.do_send(Progressed { steps: self.core.counters().clone(), prefilling: self.core.prefilling() });
        for departure in departures {
            let (request, ended) = (departure.request, departure.ended);
            self.sampler.do_send(Forget { request, generated: ended.generated });
            self.admission.do_send(RequestEnded { request, ended });
        }
    }
}

impl Handler<Enqueue> for PlannerActor {
    type Result = ();
    fn handle(&mut self, Enqueue { sequence, lease, hub }: Enqueue, _: &mut Self::Context) {
        let request = sequence.request.id();
        self.sampler.do_send(Track { request, tracked: Tracked::new(&sequence, hub) });
        self.core.enqueue(sequence, lease);
    }
}

impl Handler<Settled> for PlannerActor {
    type Result = ();
    fn handle(&mut self, Settled: Settled, _: &mut Self::Context) {
        self.launch();
        self.let_go();
    }
}

impl Handler<CancelResident> for PlannerActor {
    type Result = ();
    fn handle(&mut self, CancelResident { request, cause }: CancelResident, _: &mut Self::Context) {
        self.core.cancel(request, cause);
        self.let_go();
    }
}

impl Handler<StepRetired> for PlannerActor {
    type Result = ();
    fn handle(&mut self, StepRetired(retired): StepRetired, _: &mut Self::Context) {
        #[cfg(feature = "fault-injection")]
        crate::faults::panics(crate::faults::Point::Planner);
        self.core.retire(&retired);
        self.launch();
        self.let_go();
    }
}

impl Handler<Scored> for PlannerActor {
    type Result = ();
    fn handle(&mut self, Scored { request, positions }: Scored, _: &mut Self::Context) {
        self.core.scored(request, positions);
        self.launch();
    }
}

impl Handler<Close> for PlannerActor {
    type Result = ();
    fn handle(&mut self, Close: Close, _: &mut Self::Context) {
        self.core.fail();
        self.let_go();
    }
}
