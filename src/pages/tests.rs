//! The pool by example and against a naive model: a set of pages and how often each is held.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::*;
use crate::planner::seeded::Seeded;

type Returned = Arc<Mutex<Vec<ReturnedPages>>>;

fn home() -> (PageHome, Returned) {
    let returned = Returned::default();
    let sink = Arc::clone(&returned);
    (Arc::new(move |pages| sink.lock().unwrap().push(pages)), returned)
}

#[test]
fn a_reservation_takes_all_or_nothing() {
    let (home, _returned) = home();
    let mut pool = Pool::new(4);
    let lease = pool.reserve(RequestId(1), 3, home.clone()).unwrap();
    assert_eq!((lease.pages().len(), pool.free()), (3, 1));
    assert_eq!(pool.reserve(RequestId(2), 2, home).unwrap_err(), Insufficient { needed: 2, free: 1 });
    assert_eq!((pool.free(), pool.assigned()), (1, 3));
}

#[test]
fn a_dropped_lease_sends_its_pages_home_once() {
    let (home, returned) = home();
    let mut pool = Pool::new(4);
    drop(pool.reserve(RequestId(7), 3, home).unwrap());
    let back = returned.lock().unwrap().pop().unwrap();
    assert_eq!((back.request(), pool.release(back), pool.free()), (RequestId(7), 3, 4));
    assert!(returned.lock().unwrap().is_empty());
}

#[test]
fn a_shared_page_is_free_only_when_its_last_reader_is_gone() {
    let (home, returned) = home();
    let mut pool = Pool::new(4);
    let first = pool.reserve(RequestId(1), 3, home.clone()).unwrap();
    let second = pool.share(&first, 2, RequestId(2), home);
    drop(first);
    let back = returned.lock().unwrap().pop().unwrap();
    assert_eq!((pool.release(back), pool.assigned()), (1, 2));
    drop(second);
    let back = returned.lock().unwrap().pop().unwrap();
    assert_eq!((pool.release(back), pool.free()), (2, 4));
}

/// 100,000 seeded steps of reserve, share and drop. The model is a table of holders per page.
#[test]
fn a_long_random_history_agrees_with_a_table_of_holders() {
    let mut random = Seeded::new(0x9a6e5);
    let (home, returned) = home();
    let total = 61;
    let mut pool = Pool::new(total);
    let mut leases: Vec<PageLease> = Vec::new();
    let mut holders: HashMap<u32, u32> = HashMap::new();
    for step in 0..100_000_u64 {
        match random.below(5) {
            0 | 1 => {
                let wanted = 1 + random.below(20);
                let free = total - holders.len();
                match pool.reserve(RequestId(step), wanted, home.clone()) {
                    Ok(lease) => {
                        assert!(wanted <= free && lease.pages().len() == wanted);
                        for &page in lease.pages() {
                            assert!(holders.insert(page, 1).is_none(), "page {page} was already held (I4)");
                        }
                        leases.push(lease);
                    }
                    Err(error) => assert_eq!((error, wanted > free), (Insufficient { needed: wanted, free }, true)),
                }
            }
            2 if !leases.is_empty() => {
                let lease = &leases[random.below(leases.len())];
                let shared = pool.share(lease, random.below(4), RequestId(step), home.clone());
                shared.pages().iter().for_each(|page| *holders.get_mut(page).unwrap() += 1);
                leases.push(shared);
            }
            _ if !leases.is_empty() => {
                let lease = leases.swap_remove(random.below(leases.len()));
                for page in lease.pages() {
                    let count = holders.get_mut(page).unwrap();
                    *count -= 1;
                    if *count == 0 {
                        holders.remove(page);
                    }
                }
                drop(lease);
                let back = returned.lock().unwrap().pop().unwrap();
                pool.release(back);
            }
            _ => {}
        }
        assert_eq!((pool.free(), pool.assigned()), (total - holders.len(), holders.len()), "I3 at step {step}");
    }
    leases.clear();
    for back in returned.lock().unwrap().drain(..) {
        pool.release(back);
    }
    assert_eq!(pool.free(), total, "idle means free = total");
}
