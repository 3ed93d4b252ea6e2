//! What the host still has to compute of a finished step: log-probabilities, and copies of logits that were asked for. A thread of the
//! backend's own does it, so that the engine's arbiter only ever asks whether a step's outputs are there.
//!
//! Steps without such rows never come here: `token_rows` makes their outputs of a few words each.

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use super::args::SelectOut;
use super::plan::Expected;
use crate::backend::cpu::Isa;
use crate::backend::cpu::kernels::Kernels;
use crate::backend::{BackendError, HostLogits, RowOutput};

/// A finished step whose logits the host must read. `L` holds them, `[rows][vocab]`, in the order of the rows that need them.
#[derive(Debug)]
pub struct Job<L> {
    /// Rows that yield something.
    pub expected: Vec<Expected>,
    /// By wanted position.
    pub selected: Vec<SelectOut>,
    /// The logits; read until the outputs are taken.
    pub logits: L,
    /// Width of a row of logits.
    pub vocab: usize,
}

/// The thread; dropping it ends and joins it.
#[derive(Debug)]
pub struct HostRows<L> {
    jobs: Option<Sender<Job<L>>>,
    done: Receiver<Vec<RowOutput>>,
    thread: Option<JoinHandle<()>>,
}

impl<L: AsRef<[f32]> + Send + 'static> HostRows<L> {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start() -> Result<Self, String> {
        let kernels = Kernels::new(Isa::Auto).map_err(|e| e.to_string())?;
        let (jobs, incoming) = channel::<Job<L>>();
        let (outgoing, done) = channel();
        let body = move || {
            for job in incoming {
                if outgoing.send(outputs(kernels, &job)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("crucible-logprobs".into()).spawn(body);
        let thread = thread.map_err(|e| format!("the thread of the log-probabilities did not start: {e}"))?;
        Ok(Self { jobs: Some(jobs), done, thread: Some(thread) })
    }

    /// Hands a step over; at most one a lane is under way, so nothing piles up.
    ///
    /// # Errors
    /// The thread has died.
    pub fn begin(&self, job: Job<L>) -> Result<(), BackendError> {
        self.jobs.as_ref().and_then(|jobs| jobs.send(job).ok()).ok_or_else(died)
    }

    /// The outputs of the oldest step that was handed over, when they are there.
    ///
    /// # Errors
    /// The thread has died.
    pub fn take(&self) -> Result<Option<Vec<RowOutput>>, BackendError> {
        match self.done.try_recv() {
            Ok(rows) => Ok(Some(rows)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(died()),
        }
    }
}

impl<L> Drop for HostRows<L> {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported by `take`.
            let _ = thread.join();
        }
    }
}

fn died() -> BackendError {
    BackendError::Failed { backend: "cuda", reason: "the thread of the log-probabilities has died".into() }
}

/// Tokens of a row, and whether its logits were finite.
fn tokens_of(row: &Expected, selected: &[SelectOut]) -> (Vec<u32>, bool) {
    let chosen = &selected[row.first..row.first + row.count];
    (chosen.iter().map(|s| s.token).collect(), chosen.iter().all(|s| s.finite == 1))
}

/// Outputs of a step of which no row needs logits on the host.
pub fn token_rows(expected: &[Expected], selected: &[SelectOut]) -> Vec<RowOutput> {
    let output = |row: &Expected| {
        let (tokens, finite) = tokens_of(row, selected);
        RowOutput { request: row.request, tokens, logprobs: Vec::new(), logits: Vec::new(), finite }
    };
    expected.iter().map(output).collect()
}

fn outputs<L: AsRef<[f32]>>(kernels: Kernels, job: &Job<L>) -> Vec<RowOutput> {
    let mut rest = job.logits.as_ref();
    let output = |row: &Expected| {
        let (tokens, finite) = tokens_of(row, &job.selected);
        let mut output = RowOutput { request: row.request, tokens, logprobs: Vec::new(), logits: Vec::new(), finite };
        if !row.needs_logits() {
            return output;
        }
        let (own, others) = rest.split_at(row.count * job.vocab);
        rest = others;
        let logits = own.chunks_exact(job.vocab);
        if let (Some(top), true) = (row.logprobs, finite) {
            let rows = logits.clone().zip(&output.tokens);
            output.logprobs = rows.filter_map(|(l, &t)| kernels.logprobs(l, t, usize::from(top))).collect();
        }
        if row.host_logits == HostLogits::Yes {
            output.logits = logits.map(<[f32]>::to_vec).collect();
        }
        output
    };
    job.expected.iter().map(output).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::RequestId;
    use crate::arith::select::token_logprobs;
    use crate::backend::LogprobsWanted;
    use crate::check::Dice;

    const VOCAB: usize = 300;

    fn row(id: u64, first: usize, count: usize, logprobs: LogprobsWanted, host_logits: HostLogits) -> Expected {
        Expected { request: RequestId(id), first, count, logprobs, host_logits }
    }

    fn wait<L: AsRef<[f32]> + Send + 'static>(host: &HostRows<L>) -> Vec<RowOutput> {
        loop {
            if let Some(rows) = host.take().expect("a living thread") {
                return rows;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn only_rows_that_ask_get_logits_and_their_log_probabilities_are_the_definition_s() {
        let mut dice = Dice::new(7);
        let logits = dice.values(4 * VOCAB);
        let selected: Vec<SelectOut> = (0..6).map(|i| SelectOut { token: 10 + i, finite: 1 }).collect();
        let expected = vec![
            row(1, 0, 1, None, HostLogits::No),
            row(2, 1, 2, Some(5), HostLogits::No),
            row(3, 3, 1, None, HostLogits::No),
            row(4, 4, 1, None, HostLogits::Yes),
            row(5, 5, 1, Some(0), HostLogits::Yes),
        ];
        let host = HostRows::start().unwrap();
        host.begin(Job { expected, selected, logits: logits.clone(), vocab: VOCAB }).unwrap();
        let rows = wait(&host);
        let of = |row: usize| &logits[row * VOCAB..(row + 1) * VOCAB];
        assert_eq!(rows.iter().map(|r| r.request.0).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert!(rows[0].logprobs.is_empty() && rows[0].logits.is_empty() && rows[2].logits.is_empty());
        assert_eq!(rows[1].tokens, [11, 12]);
        assert_eq!(rows[1].logprobs, [token_logprobs(of(0), 11, 5), token_logprobs(of(1), 12, 5)]);
        assert!(rows[1].logits.is_empty() && rows[3].logprobs.is_empty());
        assert_eq!(rows[3].logits, [of(2).to_vec()]);
        assert_eq!((&rows[4].logits, &rows[4].logprobs), (&vec![of(3).to_vec()], &vec![token_logprobs(of(3), 15, 0)]));
    }

    #[test]
    fn steps_come_back_in_the_order_in_which_they_were_handed_over() {
        let host = HostRows::start().unwrap();
        for id in 1..=2 {
            let (expected, selected) = (vec![row(id, 0, 1, Some(1), HostLogits::No)], vec![SelectOut::default()]);
            host.begin(Job { expected, selected, logits: vec![0.0; VOCAB], vocab: VOCAB }).unwrap();
        }
        assert_eq!([wait(&host)[0].request.0, wait(&host)[0].request.0], [1, 2]);
        assert_eq!(host.take().unwrap(), None);
    }

    #[test]
    fn a_row_with_a_logit_that_is_not_finite_has_no_log_probabilities() {
        let host = HostRows::start().unwrap();
        let expected = vec![row(1, 0, 1, Some(2), HostLogits::No)];
        let selected = vec![SelectOut { token: 0, finite: 0 }];
        host.begin(Job { expected, selected, logits: vec![f32::NAN; VOCAB], vocab: VOCAB }).unwrap();
        let rows = wait(&host);
        assert!(!rows[0].finite && rows[0].logprobs.is_empty());
    }

    #[test]
    fn a_dead_thread_is_a_failed_step_and_no_wait_for_ever() {
        let host = HostRows::start().unwrap();
        // Fewer logits than its rows need: the thread panics.
        let expected = vec![row(1, 0, 1, Some(2), HostLogits::No)];
        let job = Job { expected, selected: vec![SelectOut::default()], logits: vec![0.0], vocab: VOCAB };
        host.begin(job).unwrap();
        let failure = loop {
            match host.take() {
                Ok(None) => std::thread::yield_now(),
                Ok(Some(rows)) => panic!("{rows:?}"),
                Err(error) => break error,
            }
        };
        assert!(failure.to_string().contains("the thread of the log-probabilities has died"));
    }
}
