//! A thousand seeded histories of the whole server below its sockets: arrivals, disconnects, stop strings, penalties and biases, scored
//! prompts, slow readers, drains, deaths and logits that are not finite, against a small synthetic model on the CPU backend. After every
//! message every invariant is checked that can be seen then; at the end every client has what it gets alone, bit for bit.

mod simulation;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use crucible::admission::Outcome;
use simulation::world::{World, history};

const HISTORIES: u64 = 1_000;

/// What a history saw, one count for each kind of event.
fn seen(world: &World) -> [u64; 14] {
    let (account, tally) = (world.account(), &world.tally);
    let [finished, cancelled, failed] = Outcome::ALL.map(|outcome| account.ended_as(outcome));
    let [answered, errors, cut, gone] = tally.verdicts;
    let turned_away = [tally.refused, tally.rejected_late, tally.malformed];
    let packed = account.steps.packed_prefill_batches;
    let [refused, late, malformed] = turned_away;
    [
        finished,
        cancelled,
        failed,
        answered,
        errors,
        cut,
        gone,
        refused,
        late,
        malformed,
        tally.stops,
        packed,
        tally.scored,
        tally.adjusted,
    ]
}

#[test]
fn a_thousand_seeded_histories_keep_every_invariant() {
    let next = AtomicU64::new(0);
    let worker = || {
        let mut sum = [0_u64; 14];
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= HISTORIES {
                return sum;
            }
            let world = catch_unwind(AssertUnwindSafe(|| history(seed))).unwrap_or_else(|_| panic!("history {seed}"));
            sum.iter_mut().zip(seen(&world)).for_each(|(sum, count)| *sum += count);
        }
    };
    let seen = std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(4);
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let sums = workers.into_iter().map(|w| w.join().expect("a history failed; its seed is above"));
        sums.fold([0_u64; 14], |all, one| std::array::from_fn(|i| all[i] + one[i]))
    });
    assert!(seen.iter().all(|&count| count > 200), "every kind of event was seen often: {seen:?}");
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 0..12 {
        let (first, second) = (history(seed), history(seed));
        assert_eq!(first.log, second.log);
        let steady = |world: &World| serde_json::to_string(world.account()).expect("an account");
        assert_eq!(steady(&first), steady(&second));
    }
}
