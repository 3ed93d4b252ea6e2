//! The people's surfaces on the real binary with the real model: the terminal client in tmux and the page in Chromium, proved from
//! /stats: answers, one batch shared with another client, cancellation, reuse, every page back.

mod browser;
mod common;
mod http_support;
mod tmux;

use std::sync::OnceLock;

use http_support::binary::Binary;
use http_support::client::{get, send_json};
use http_support::until;
use serde_json::{Value, json};
use tmux::Pane;

const PROGRAM: &str = env!("CARGO_BIN_EXE_crucible");
const STORY: &str = "Tell me a very long story about a dragon and a knight";

/// A server of this test's own.
fn server() -> Binary {
    static MODEL: OnceLock<String> = OnceLock::new();
    let model = MODEL.get_or_init(|| format!("model.path=\"{}\"", common::default_model().display()));
    Binary::start("config/crucible.toml", &[model.as_str(), "executor.backend=cpu"])
}

fn stats(server: &Binary) -> Value {
    get(server.address, "/stats").json()
}

fn at_rest(server: &Binary) -> bool {
    let stats = stats(server);
    stats["active_requests"] == 0 && stats["queued_requests"] == 0 && stats["kv_pages_used"] == 0
}

#[test]
fn the_terminal_client_chats_shares_a_batch_cancels_and_goes_on() {
    if !tmux::present(9) {
        return;
    }
    let server = server();
    let pane = Pane::open(80, 24);
    pane.run(&format!("{PROGRAM} tui --target http://{} --set max_tokens=1000; echo code $?", server.address));
    pane.wait("● ready");
    pane.write("What is the name of the capital of France?");
    pane.press(&["Enter"]);
    pane.wait_said("· stop");
    assert!(pane.screen().contains("Paris"), "{}", pane.screen());
    until("the first answer is accounted for", || stats(&server)["completed_requests"] == 1 && at_rest(&server));

    pane.write(STORY);
    pane.press(&["Enter"]);
    pane.wait("1 / 16");
    let body = json!({"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": true});
    let mut other = send_json(server.address, "/v1/generate/stream", &body);
    assert_eq!(other.head().status, 200);
    other.read_events(4);
    pane.wait("2 / 16");
    assert!(stats(&server)["decode_batch_peak"].as_u64() >= Some(2), "both decode in one step");

    pane.press(&["Escape"]);
    pane.wait_said("stopped by you");
    until("only the other client is left", || stats(&server)["active_requests"] == 1);
    assert_eq!(stats(&server)["cancelled_requests"], 1);
    drop(other);
    until("every page is back", || at_rest(&server) && stats(&server)["cancelled_requests"] == 2);

    pane.press(&["C-n"]);
    pane.write("What is the name of the capital of France?");
    pane.press(&["Enter"]);
    pane.wait_said("· stop");
    until("reuse after the cancellation", || stats(&server)["completed_requests"] == 2 && at_rest(&server));
    pane.wait("0 / 16");

    pane.write(STORY);
    pane.press(&["Enter"]);
    pane.wait("1 / 16");
    pane.press(&["C-c"]);
    pane.wait("code 0");
    until("quitting cancels", || at_rest(&server) && stats(&server)["cancelled_requests"] == 3);
    let stats = stats(&server);
    assert_eq!((&stats["failed_requests"], &stats["rejected_requests"]), (&json!(0), &json!(0)));
}

#[actix_web::test]
async fn the_page_chats_shows_probabilities_and_answers_the_same_again() {
    let Some(program) = browser::program(6) else { return };
    let server = server();
    let mut browser = browser::Browser::start(&program).await;
    browser.size(1280, 800).await;
    browser.open(&format!("http://{}/", server.address)).await;
    browser.wait("document.querySelector('#status').dataset.state === 'ready'").await;
    browser.insert("What is the name of the capital of France?").await;
    browser.key("Enter").await;
    let is_over = "document.querySelector('.reply')?.getAttribute('aria-busy') === 'false'";
    browser.wait(is_over).await;
    assert!(browser.text("document.querySelector('.reply .text').textContent").await.contains("Paris"));

    browser.point_at(".t:nth-child(2)").await;
    browser.wait("document.querySelectorAll('#probe div').length >= 5").await;
    browser.wait("![...document.querySelectorAll('#probe span')].some(s => s.textContent === '…')").await;
    browser.picture("web-real").await;

    let check = "[...document.querySelectorAll('.actions button')].at(-1)";
    browser.eval(&format!("{check}.click()")).await;
    browser.wait(&format!("{check}.textContent.startsWith('Same ')")).await;

    browser.insert(STORY).await;
    browser.key("Enter").await;
    browser.wait("document.querySelectorAll('.turn').length === 2").await;
    browser.wait("document.querySelectorAll('.turn')[1].querySelectorAll('.t').length > 5").await;
    browser.key("Escape").await;
    until("stopping cancels and every page is back", || at_rest(&server) && stats(&server)["cancelled_requests"] == 1);
    assert_eq!(browser.complaints, Vec::<String>::new());
    assert_eq!(stats(&server)["failed_requests"], 0);
}
