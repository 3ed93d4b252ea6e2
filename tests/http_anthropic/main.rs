//! Anthropic's dialect, byte for byte on a raw socket, field by field against the published schemas of its API: over the scripted
//! backend, whose answers are known in advance. `tests/sdk` speaks to the same surface through the official client.

mod beside;
#[path = "../http_support/checks.rs"]
mod checks;
#[path = "../common/mod.rs"]
mod common;
mod dialect;
mod ending;
#[path = "../engine_support/mod.rs"]
mod engine_support;
#[path = "../http_support/expected.rs"]
mod expected;
#[path = "../http_support/mod.rs"]
mod http_support;
mod messages;
mod reading;
mod refusals;
#[path = "../http_support/scripted.rs"]
mod scripted;
mod server;
mod stream;

use checks::Checks;
use engine_support::fake::Script;
use http_support::client::get;
use http_support::{at_rest, until};
use scripted::Scripted;

#[test]
fn anthropics_dialect_holds_in_every_check() {
    let mut checks = Checks::of("anthropic over HTTP");
    let server = Scripted::start(Script::default(), &["server.body_limit_bytes=65536"]);
    messages::all(&mut checks, &server);
    reading::all(&mut checks, &server);
    stream::all(&mut checks, &server);
    ending::all(&mut checks, &server);
    refusals::all(&mut checks, &server);
    beside::all(&mut checks, &server);
    server::all(&mut checks, &server);
    checks.check("every page is back after all of that", || until("rest", || at_rest(server.address)));
    checks.check("a refused request touched no page and none failed", || {
        let stats = get(server.address, "/stats").json();
        assert_eq!(stats["failed_requests"], 0);
    });
    checks.finish(232);
}
