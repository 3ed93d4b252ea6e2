//! What the tests of the HTTP side share: a raw client, and servers of two kinds: the real binary, and the real server over a
//! scripted backend.
#![allow(dead_code)] // no test file needs everything

pub mod binary;
pub mod client;
pub mod scripted;

use std::time::{Duration, Instant};

/// Waits until `done`, at most ten seconds.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what} did not happen within ten seconds");
        std::thread::sleep(Duration::from_millis(5));
    }
}
