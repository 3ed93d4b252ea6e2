//! The executor's actor: owns the backend, checks every step before it (I9), launches, and hands outputs to the sampler. It never
//! blocks its thread. Any error raises the engine's fatal flag (rule 6); a step past its deadline is the watchdog's to notice.

pub mod messages;
mod trace;

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use actix::{Actor, ActorFuture, Addr, AsyncContext, Context, Handler};

use self::messages::{Close, Finished, RunStep};
use self::trace::StepRecord;
pub(super) use self::trace::StepTrace;
use super::clock::Clock;
use super::fatal::FatalFlag;
use super::sampler::SamplerActor;
use super::sampler::messages::StepCompleted;
use super::watchdog::StepTimer;
use crate::backend::{Backend, Completion, StepOutput, StepValidator};

/// Owns the device. Made and used on the engine's thread.
pub struct ExecutorActor {
    pub(super) backend: Box<dyn Backend>,
    pub(super) validator: StepValidator,
    pub(super) sampler: Addr<SamplerActor>,
    pub(super) fatal: FatalFlag,
    pub(super) clock: Clock,
    pub(super) timer: StepTimer,
    pub(super) trace: Option<StepTrace>,
    pub(super) flight: Flight,
}

/// The steps in flight.
#[derive(Default)]
pub(super) struct Flight {
    steps: VecDeque<Option<StepRecord>>,
    polled: bool,
    closed: bool,
}

impl Actor for ExecutorActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if self.backend.completion() == Completion::Notified {
            let own = ctx.address();
            self.backend.on_completion(Arc::new(move || own.do_send(Finished)));
        }
    }
}

impl ExecutorActor {
    fn run(&mut self, RunStep { planned, prepare }: RunStep, ctx: &mut Context<Self>) {
        #[cfg(feature = "fault-injection")]
        crate::faults::panics(crate::faults::Point::Executor);
        let record = self.trace.as_ref().map(|_| StepRecord::of(&planned, prepare));
        if self.flight.steps.is_empty() {
            // Before the backend is called: a call that blocks is a step that does not end.
            self.timer.arm();
        }
        let checked = self.validator.check(planned.step).map_err(|e| format!("a malformed step was planned: {e}"));
        #[cfg(feature = "fault-injection")]
        let checked = checked.and_then(|step| crate::faults::fails(crate::faults::Point::Step).map(|()| step));
        let submitted = checked.and_then(|step| self.backend.submit(step).map_err(|e| e.to_string()));
        if let Err(reason) = submitted {
            return self.fail(&reason);
        }
        self.flight.steps.push_back(record);
        if self.backend.completion() == Completion::Polled && !std::mem::replace(&mut self.flight.polled, true) {
            ctx.spawn(PollWhileInFlight);
        }
    }

    /// Takes every finished step from the backend.
    fn collect(&mut self) {
        while !self.flight.closed {
            match self.backend.poll() {
                Ok(Some(output)) => self.complete(output),
                Ok(None) => break,
                Err(error) => self.fail(&error.to_string()),
            }
        }
    }

    fn complete(&mut self, output: StepOutput) {
        let at = self.clock.now();
        let Some(record) = self.flight.steps.pop_front() else {
            return self.fail("the backend completed a step that was not submitted");
        };
        if self.flight.steps.is_empty() {
            self.timer.disarm()
        } else {
            self.timer.arm()
        }
        if let (Some(trace), Some(record)) = (&mut self.trace, record) {
            trace.write(record.completed(&output));
        }
        self.sampler.do_send(StepCompleted { output, at });
    }

    fn fail(&mut self, reason: &str) {
        self.close();
        self.fatal.raise(reason);
    }

    fn close(&mut self) {
        self.flight.closed = true;
        self.flight.steps.clear();
        self.timer.disarm();
    }
}

/// Asks the backend once per turn of the runtime, so that timers and other threads' messages get theirs; ends when nothing is
/// in flight.
struct PollWhileInFlight;

impl ActorFuture<ExecutorActor> for PollWhileInFlight {
    type Output = ();

    fn poll(
        self: Pin<&mut Self>,
        actor: &mut ExecutorActor,
        _: &mut Context<ExecutorActor>,
        task: &mut std::task::Context<'_>,
    ) -> Poll<()> {
        actor.collect();
        if actor.flight.steps.is_empty() {
            actor.flight.polled = false;
            return Poll::Ready(());
        }
        pin!(tokio::task::yield_now()).poll(task)
    }
}

impl Handler<RunStep> for ExecutorActor {
    type Result = ();
    fn handle(&mut self, message: RunStep, ctx: &mut Self::Context) {
        if !self.flight.closed {
            self.run(message, ctx);
        }
    }
}

impl Handler<Finished> for ExecutorActor {
    type Result = ();
    fn handle(&mut self, Finished: Finished, _: &mut Self::Context) {
        self.collect();
    }
}

impl Handler<Close> for ExecutorActor {
    type Result = ();
    fn handle(&mut self, Close: Close, _: &mut Self::Context) {
        self.close();
    }
}
