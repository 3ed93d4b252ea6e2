//! Admission by example and against a naive model of the waiting queue.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::actors::session::messages::SessionFailure;
use crate::backend::Rule;
use crate::pages::{PageHome, Pool, ReturnedPages};
use crate::planner::Cause;
use crate::planner::seeded::Seeded;

const LIMITS: Limits =
    Limits { context: 4096, max_prompt_tokens: 4096, max_new_tokens: 4096, vocab: 100, pages: 64, page_tokens: 16 };

fn arrival(permits: &QueuePermits, id: u64, pages: usize) -> Option<Arrival<()>> {
    let spec = RequestSpec {
        prompt: Arc::from(vec![1; pages * LIMITS.page_tokens]),
        max_new_tokens: 1,
        rule: Rule::Greedy,
        adjust: None,
        seed: 0,
        choice: 0,
        eos: Arc::from([]),
        logprobs: None,
        score_prompt: false,
        dialect: Dialect::ALL[id as usize % Dialect::ALL.len()],
    };
    let request = ValidRequest::new(RequestId(id), spec, &LIMITS).unwrap();
    Some(Arrival { request, permit: permits.try_take()?, hub: (), at: Duration::from_micros(id) })
}

#[test]
fn no_sequence_is_longer_than_the_longest_that_is_told_and_the_longest_prompt_has_one() {
    let narrow = |context, max_prompt_tokens, max_new_tokens, pages| Limits {
        context,
        max_prompt_tokens,
        max_new_tokens,
        pages,
        ..LIMITS
    };
    for limits in [narrow(64, 64, 64, 9), narrow(64, 20, 64, 9), narrow(64, 64, 64, 2), narrow(64, 20, 10, 9)] {
        let (prompt, sequence) = (limits.longest_prompt(), limits.longest_sequence());
        let taken = |prompt: usize, new: usize| {
            (1..=limits.max_prompt_tokens).contains(&prompt) && (1..=limits.room(prompt)).contains(&new)
        };
        assert!(taken(prompt, sequence - prompt), "{limits:?}");
        assert!((1..=sequence).all(|prompt| !taken(prompt, sequence + 1 - prompt)), "{limits:?}");
    }
}

fn home() -> (PageHome, Arc<Mutex<Vec<ReturnedPages>>>) {
    let returned = Arc::<Mutex<Vec<ReturnedPages>>>::default();
    let sink = Arc::clone(&returned);
    (Arc::new(move |pages| sink.lock().unwrap().push(pages)), returned)
}

/// The effects of one event.
fn after(core: &mut Admission<()>, event: impl FnOnce(&mut Admission<()>, &mut Vec<Effect<()>>)) -> Vec<Effect<()>> {
    let mut effects = Vec::new();
    event(core, &mut effects);
    effects
}

fn ended(outcome: Outcome) -> Ended {
    Ended { outcome, generated: 1 }
}

#[test]
fn a_second_reservation_waits_for_the_first_answer_and_settled_follows_the_last_enqueue() {
    let (permits, (home, _)) = (QueuePermits::new(4), home());
    let (mut core, mut pool) = (Admission::new(4, LIMITS.pages), Pool::new(LIMITS.pages));
    let first = after(&mut core, |c, e| c.submit(arrival(&permits, 1, 2).unwrap(), e));
    assert!(matches!(first[..], [Effect::Reserve { request: RequestId(1), pages: 2 }]));
    assert!(after(&mut core, |c, e| c.submit(arrival(&permits, 2, 1).unwrap(), e)).is_empty());
    let lease = pool.reserve(RequestId(1), 2, home.clone()).unwrap();
    let effects = after(&mut core, |c, e| c.reserved(lease, Duration::ZERO, e));
    assert!(matches!(effects[..], [Effect::Enqueue { .. }, Effect::Reserve { request: RequestId(2), .. }]));
    assert_eq!(permits.held(), 1, "the permit returns at Enqueue");
    let lease = pool.reserve(RequestId(2), 1, home).unwrap();
    let effects = after(&mut core, |c, e| c.reserved(lease, Duration::ZERO, e));
    assert!(matches!(effects[..], [Effect::Enqueue { .. }, Effect::Settled]));
}

#[test]
fn the_lease_of_a_request_cancelled_meanwhile_goes_straight_home() {
    let (permits, (home, returned)) = (QueuePermits::new(4), home());
    let (mut core, mut pool) = (Admission::new(4, LIMITS.pages), Pool::new(LIMITS.pages));
    after(&mut core, |c, e| c.submit(arrival(&permits, 1, 3).unwrap(), e));
    assert!(after(&mut core, |c, e| c.cancel(RequestId(1), e)).is_empty());
    let lease = pool.reserve(RequestId(1), 3, home).unwrap();
    assert!(after(&mut core, |c, e| c.reserved(lease, Duration::ZERO, e)).is_empty());
    pool.release(returned.lock().unwrap().pop().unwrap());
    assert_eq!((pool.free(), permits.held(), core.account().ended_as(Outcome::Cancelled)), (LIMITS.pages, 0, 1));
}

#[test]
fn a_request_that_does_not_fit_stops_admission_until_pages_come_back() {
    let permits = QueuePermits::new(4);
    let mut core = Admission::new(4, LIMITS.pages);
    after(&mut core, |c, e| c.submit(arrival(&permits, 1, 60).unwrap(), e));
    after(&mut core, |c, e| c.submit(arrival(&permits, 2, 1).unwrap(), e));
    assert!(after(&mut core, |c, e| c.insufficient(RequestId(1), e)).is_empty(), "the younger one does not pass");
    assert!(after(&mut core, |c, e| c.submit(arrival(&permits, 3, 1).unwrap(), e)).is_empty());
    let effects = after(&mut core, |c, e| c.pages_freed(RequestId(99), e));
    assert!(matches!(effects[..], [Effect::Reserve { request: RequestId(1), .. }]));
}

#[test]
fn cancelling_the_request_that_does_not_fit_lets_the_next_one_try() {
    let permits = QueuePermits::new(4);
    let mut core = Admission::new(4, LIMITS.pages);
    after(&mut core, |c, e| c.submit(arrival(&permits, 1, 60).unwrap(), e));
    after(&mut core, |c, e| c.submit(arrival(&permits, 2, 1).unwrap(), e));
    after(&mut core, |c, e| c.insufficient(RequestId(1), e));
    let effects = after(&mut core, |c, e| c.cancel(RequestId(1), e));
    assert!(matches!(effects[..], [Effect::Reserve { request: RequestId(2), .. }]));
}

#[test]
fn a_request_is_live_until_its_end_its_pages_and_its_times_are_all_in() {
    type Report = fn(&mut Admission<()>, &mut Vec<Effect<()>>);
    let reports: [Report; 3] = [
        |c, e| c.request_ended(RequestId(1), ended(Outcome::Finished), e),
        |c, e| c.pages_freed(RequestId(1), e),
        |c, e| c.measured(RequestId(1), Timing::default(), e),
    ];
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1]] {
        let (permits, (home, _)) = (QueuePermits::new(4), home());
        let (mut core, mut pool) = (Admission::new(4, LIMITS.pages), Pool::new(LIMITS.pages));
        after(&mut core, |c, e| c.submit(arrival(&permits, 1, 3).unwrap(), e));
        let lease = pool.reserve(RequestId(1), 3, home).unwrap();
        after(&mut core, |c, e| c.reserved(lease, Duration::ZERO, e));
        assert_eq!(core.account().kv_pages_used, 3);
        for (reported, report) in order.iter().enumerate() {
            assert_eq!((core.account().live(), core.account().ended_as(Outcome::Finished)), (1, 0), "{reported}");
            after(&mut core, reports[*report]);
        }
        let account = core.account();
        assert_eq!((account.live(), account.kv_pages_used, account.ended_as(Outcome::Finished)), (0, 0, 1));
        assert_eq!(core.take_samples().len(), 1);
    }
}

#[test]
fn a_stop_or_a_cancel_of_someone_unknown_does_nothing() {
    let mut core = Admission::<()>::new(4, LIMITS.pages);
    assert!(after(&mut core, |c, e| c.cancel(RequestId(5), e)).is_empty());
    assert!(after(&mut core, |c, e| c.stop_hit(RequestId(5), 0, e)).is_empty());
    assert!(after(&mut core, |c, e| c.pages_freed(RequestId(5), e)).is_empty());
}

#[test]
fn a_draining_door_refuses_with_its_reason_and_says_once_that_nothing_is_live() {
    let permits = QueuePermits::new(4);
    let mut core = Admission::new(4, LIMITS.pages);
    assert!(matches!(after(&mut core, |c, e| c.drain(e))[..], [Effect::Drained]));
    let effects = after(&mut core, |c, e| c.submit(arrival(&permits, 1, 1).unwrap(), e));
    assert!(matches!(effects[..], [Effect::Reject { failure: SessionFailure::Draining, .. }]));
    assert_eq!((core.account().accepted, core.account().refused_draining, permits.held()), (0, 1, 0));
}

/// What the model knows of one request.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Where {
    Waiting,
    Resident,
    Gone(Outcome),
}

/// A naive queue: ids in order, a table of places, and whoever is at the head enters when credits and pages allow.
struct Model {
    place: Vec<Where>,
    order: VecDeque<u64>,
}

impl Model {
    fn count(&self, place: Where) -> usize {
        self.place.iter().filter(|&&p| p == place).count()
    }

    fn check(&self, account: &Account, permits: &QueuePermits, step: usize) {
        assert!(account.balances(), "I2 at step {step}: {account:?}");
        assert!(permits.held() <= permits.limit() && account.waiting as usize == permits.held(), "I5 at step {step}");
        assert_eq!(account.waiting as usize, self.count(Where::Waiting), "step {step}");
        assert_eq!(account.resident as usize, self.count(Where::Resident), "step {step}");
        assert_eq!(account.accepted as usize, self.place.len(), "step {step}");
        for outcome in Outcome::ALL {
            assert_eq!(account.ended_as(outcome) as usize, self.count(Where::Gone(outcome)), "step {step}");
        }
    }
}

/// 100,000 seeded events against the model: entries are first come, first served, and the account always balances.
#[test]
fn a_long_random_history_agrees_with_a_naive_queue() {
    const CREDITS: usize = 5;
    let (mut random, permits, (home, returned)) = (Seeded::new(0xad317), QueuePermits::new(7), home());
    let (mut core, mut pool) = (Admission::new(CREDITS, LIMITS.pages), Pool::new(LIMITS.pages));
    let mut model = Model { place: Vec::new(), order: VecDeque::new() };
    let (mut reserving, mut residents) = (None::<(RequestId, usize)>, Vec::new());
    for step in 0..100_000 {
        let mut effects = Vec::new();
        match random.below(6) {
            0 | 1 => {
                if let Some(arrival) = arrival(&permits, model.place.len() as u64, 1 + random.below(30)) {
                    model.order.push_back(arrival.request.id().0);
                    model.place.push(Where::Waiting);
                    core.submit(arrival, &mut effects);
                } else {
                    assert_eq!(core.account().waiting, 7, "refused only when full");
                }
            }
            2 if !model.place.is_empty() => {
                let recent = model.place.len().min(12);
                let id = (model.place.len() - 1 - random.below(recent)) as u64;
                core.cancel(RequestId(id), &mut effects);
                if model.place[id as usize] == Where::Waiting {
                    model.place[id as usize] = Where::Gone(Outcome::Cancelled);
                    model.order.retain(|&waiting| waiting != id);
                }
            }
            3 | 4 => {
                if let Some((request, pages)) = reserving.take() {
                    match pool.reserve(request, pages, home.clone()) {
                        Ok(lease) => core.reserved(lease, Duration::ZERO, &mut effects),
                        Err(_) => core.insufficient(request, &mut effects),
                    }
                }
            }
            _ if !residents.is_empty() => {
                let lease: crate::pages::PageLease = residents.swap_remove(random.below(residents.len()));
                let (id, outcome) = (lease.request(), Outcome::ALL[random.below(3)]);
                drop(lease);
                core.request_ended(id, ended(outcome), &mut effects);
                core.measured(id, Timing::default(), &mut effects);
                let back = returned.lock().unwrap().pop().unwrap();
                pool.release(back);
                core.pages_freed(id, &mut effects);
                model.place[id.0 as usize] = Where::Gone(outcome);
            }
            _ => {}
        }
        for effect in effects {
            match effect {
                Effect::Reserve { request, pages } => {
                    assert!(reserving.replace((request, pages)).is_none(), "one reservation at a time");
                }
                Effect::Enqueue { lease, .. } => {
                    assert_eq!(model.order.pop_front(), Some(lease.request().0), "first come, first served");
                    model.place[lease.request().0 as usize] = Where::Resident;
                    residents.push(lease);
                }
                Effect::CancelResident { request, cause } => {
                    assert_eq!((cause, model.place[request.0 as usize]), (Cause::Client, Where::Resident));
                }
                Effect::Settled => assert!(reserving.is_none()),
                Effect::Reject { .. } | Effect::Drained => panic!("the door is open"),
            }
        }
        for back in returned.lock().unwrap().drain(..) {
            let id = back.request();
            pool.release(back);
            let mut effects = Vec::new();
            core.pages_freed(id, &mut effects);
            for effect in effects {
                let Effect::Reserve { request, pages } = effect else { panic!("{effect:?}") };
                assert!(reserving.replace((request, pages)).is_none());
            }
        }
        assert!(residents.len() <= CREDITS);
        assert_eq!(core.account().kv_pages_used as usize, pool.assigned(), "step {step}");
        model.check(core.account(), &permits, step);
    }
    assert!(model.count(Where::Gone(Outcome::Finished)) > 1_000);
}
