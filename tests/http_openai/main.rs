//! OpenAI's dialect, byte for byte on a raw socket, field by field against the published schemas of its API: over the scripted backend,
//! whose answers are known in advance. `tests/sdk` speaks to the same surface through the official client.

mod chat;
#[path = "../http_support/checks.rs"]
mod checks;
mod completion;
mod dialect;
#[path = "../engine_support/mod.rs"]
mod engine_support;
#[path = "../http_support/expected.rs"]
mod expected;
#[path = "../http_support/mod.rs"]
mod http_support;
mod refusals;
mod scores;
#[path = "../http_support/scripted.rs"]
mod scripted;
mod selection;
mod server;

use checks::Checks;
use engine_support::fake::Script;
use http_support::client::get;
use http_support::{at_rest, until};
use scripted::Scripted;

#[test]
fn openais_dialect_holds_in_every_check() {
    let mut checks = Checks::of("openai over HTTP");
    let server = Scripted::start(Script::default(), &["server.body_limit_bytes=65536"]);
    chat::all(&mut checks, &server);
    completion::all(&mut checks, &server);
    scores::all(&mut checks, &server);
    selection::all(&mut checks, &server);
    refusals::all(&mut checks, &server);
    server::all(&mut checks, &server);
    checks.check("every page is back after all of that", || until("rest", || at_rest(server.address)));
    checks.check("none of the refused requests failed in the engine", || {
        assert_eq!(get(server.address, "/stats").json()["failed_requests"], 0);
    });
    checks.finish(207);
}
