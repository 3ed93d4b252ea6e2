//! The native dialect of the real binary with the real model, on a raw socket: every field, one answer whatever runs beside it, one
//! decode step for all, clients that leave, the account, and health after everything that is wrong.

mod answers;
#[path = "../http_support/checks.rs"]
mod checks;
#[path = "../common/mod.rs"]
mod common;
mod company;
mod dialect;
#[path = "../http_support/mod.rs"]
mod http_support;
mod refusals;

use checks::Checks;
use dialect::{WHOLE, ask, at_rest, number, start};
use http_support::binary::Binary;
use http_support::client::{get, post};
use serde_json::json;

#[test]
fn the_native_dialect_holds_in_every_check() {
    let mut checks = Checks::of("native over HTTP");
    let server = start(&[]);
    answers::all(&mut checks, &server);
    refusals::all(&mut checks, &server);
    company::all(&mut checks, &server);
    the_end_of_it(&mut checks, &server);
    checks.finish(60);
}

fn the_end_of_it(checks: &mut Checks, server: &Binary) {
    let last = at_rest(server);
    checks.check("after all of that everything adds up: accepted is completed, cancelled and failed", || {
        let ended = ["completed_requests", "cancelled_requests", "failed_requests"].map(|f| number(&last, f));
        assert_eq!(number(&last, "accepted_requests"), ended.iter().sum::<u64>());
        let selected = number(&last, "greedy_requests") + number(&last, "sampled_requests");
        assert_eq!(number(&last, "accepted_requests"), selected);
        assert_eq!((&last["failed_requests"], &last["rejected_requests"]), (&json!(0), &json!(0)));
        assert_eq!(last["kv_pages_free"], 1024);
    });
    checks.check("the server is healthy and gives the bits that a fresh one gives", || {
        assert_eq!(get(server.address, "/health").json()["status"], "ok");
        assert_eq!(get(server.address, "/ready").status, 200);
        let fresh = start(&[]);
        let body = ask(json!({"max_tokens": 12, "logprobs": 5}));
        assert_eq!(post(server.address, WHOLE, &body).json(), post(fresh.address, WHOLE, &body).json());
    });
}
