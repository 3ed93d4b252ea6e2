//! What the tests of the HTTP side share: a raw client, the real binary, and (in scripted.rs) the real server over a
//! scripted backend.
#![allow(dead_code)] // no test file needs everything

pub mod binary;
pub mod client;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use client::get;

/// Waits until `done`, at most a minute.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} did not happen within a minute");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether nobody is inside a server and every page is back.
pub fn at_rest(address: SocketAddr) -> bool {
    let stats = get(address, "/stats").json();
    stats["active_requests"] == 0 && stats["queued_requests"] == 0 && stats["kv_pages_used"] == 0
}
