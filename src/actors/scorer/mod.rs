//! The scorer's actor: logits of scored prompts become log-probabilities here, on a thread of its own. One row is work over the whole
//! vocabulary, which neither the engine's arbiter nor an HTTP worker has time for.

pub mod messages;

use std::sync::mpsc;
use std::thread::JoinHandle;

use actix::{Actor, Addr, Context, Handler};
use tokio::sync::oneshot;

use self::messages::Score;
use super::fatal::FatalFlag;
use super::planner::PlannerActor;
use super::planner::messages::Scored;
use super::session::messages::TokenBatch;

/// A thin shell over `scorer::ScoredSlice`.
pub struct ScorerActor {
    planner: Addr<PlannerActor>,
}

impl Actor for ScorerActor {
    type Context = Context<Self>;
}

impl Handler<Score> for ScorerActor {
    type Result = ();
    fn handle(&mut self, Score(slice): Score, _: &mut Self::Context) {
        #[cfg(feature = "fault-injection")]
        crate::faults::panics(crate::faults::Point::Scorer);
        let (request, positions) = (slice.request, slice.positions());
        let (hub, entry) = slice.score();
        // First the hub, then the planner: it plans more of this request only when it is told, so that the scores are in the hub's mail
        // before any later token of the request can be. The session may be gone; the planner is told all the same.
        hub.do_send(TokenBatch { entries: vec![entry] });
        self.planner.do_send(Scored { request, positions });
    }
}

/// The scorer's thread; dropping it ends and joins it.
pub(super) struct ScorerThread {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ScorerThread {
    /// Starts the scorer. A panic of its thread raises `fatal`.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(planner: Addr<PlannerActor>, fatal: FatalFlag) -> std::io::Result<(Self, Addr<ScorerActor>)> {
        let (stop, stopped) = oneshot::channel();
        let (started, starting) = mpsc::channel();
        let body = move || {
            fatal.guard_this_thread();
            actix::System::new().block_on(async move {
                let _ = started.send(ScorerActor { planner }.start());
                let _ = stopped.await;
            });
        };
        let thread = std::thread::Builder::new().name("crucible-scorer".into()).spawn(body)?;
        let address = starting.recv().map_err(|_| std::io::Error::other("the scorer's thread ended at once"))?;
        Ok((Self { stop: Some(stop), thread: Some(thread) }, address))
    }
}

impl Drop for ScorerThread {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            // A panic of it has raised the flag.
            let _ = thread.join();
        }
    }
}
