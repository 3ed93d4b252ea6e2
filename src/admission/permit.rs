//! Queue permits: the bound of the waiting queue (I5). A permit is taken on the HTTP worker before `Submit` is sent, so that a full
//! queue is answered at once and a mailbox never is the queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug)]
struct Counter {
    limit: usize,
    held: AtomicUsize,
    peak: AtomicUsize,
    refused: AtomicUsize,
}

/// The permits of one waiting queue; cheap to clone.
#[derive(Clone, Debug)]
pub struct QueuePermits(Arc<Counter>);

impl QueuePermits {
    /// A queue of at most `limit` waiting requests.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Counter {
            limit,
            held: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
        }))
    }

    /// Takes a permit, or counts a refusal.
    pub fn try_take(&self) -> Option<QueuePermit> {
        self.try_take_many(1)?.pop()
    }

    /// Takes `n` permits at once, or none of them and counts one refusal.
    pub fn try_take_many(&self, n: usize) -> Option<Vec<QueuePermit>> {
        let c = &*self.0;
        let more = |held: usize| held.checked_add(n).filter(|&held| held <= c.limit);
        match c.held.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(before) => {
                c.peak.fetch_max(before + n, Ordering::AcqRel);
                Some((0..n).map(|_| QueuePermit(Arc::clone(&self.0))).collect())
            }
            Err(_) => {
                c.refused.fetch_add(1, Ordering::AcqRel);
                None
            }
        }
    }

    /// Permits held now.
    pub fn held(&self) -> usize {
        self.0.held.load(Ordering::Acquire)
    }

    /// Most permits ever held at once.
    pub fn peak(&self) -> usize {
        self.0.peak.load(Ordering::Acquire)
    }

    /// Requests refused because none was left.
    pub fn refused(&self) -> usize {
        self.0.refused.load(Ordering::Acquire)
    }

    /// The bound.
    pub fn limit(&self) -> usize {
        self.0.limit
    }
}

/// One place in the waiting queue; dropping it gives the place back.
#[derive(Debug)]
pub struct QueuePermit(Arc<Counter>);

impl Drop for QueuePermit {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_refuses_and_a_dropped_permit_makes_room() {
        let permits = QueuePermits::new(2);
        let (a, b) = (permits.try_take(), permits.try_take());
        assert!(a.is_some() && b.is_some() && permits.try_take().is_none());
        drop(a);
        assert!(permits.try_take().is_some());
        assert_eq!((permits.held(), permits.peak(), permits.refused()), (1, 2, 1));
    }

    #[test]
    fn a_request_of_many_takes_all_its_permits_or_none() {
        let permits = QueuePermits::new(64);
        let held = permits.try_take_many(40).unwrap();
        assert!(permits.try_take_many(40).is_none() && permits.try_take_many(usize::MAX).is_none());
        assert_eq!((held.len(), permits.held(), permits.peak(), permits.refused()), (40, 40, 40, 2));
        assert!(permits.try_take_many(24).is_some());
        assert_eq!((permits.held(), permits.peak()), (40, 64));
    }

    #[test]
    fn of_two_requests_that_do_not_fit_together_one_is_served() {
        let permits = QueuePermits::new(64);
        let barrier = std::sync::Barrier::new(2);
        let rounds = || {
            let mut served = [false; 2_000];
            for served in &mut served {
                barrier.wait();
                let taken = permits.try_take_many(40);
                *served = taken.is_some();
                barrier.wait();
                drop(taken);
                // Both have given back what they held before the next round begins.
                barrier.wait();
            }
            served
        };
        let (a, b) = std::thread::scope(|scope| {
            let other = scope.spawn(rounds);
            (rounds(), other.join().unwrap())
        });
        assert!(a.iter().zip(&b).all(|(a, b)| a != b));
        assert_eq!((permits.held(), permits.peak(), permits.refused()), (0, 40, 2_000));
    }
}
