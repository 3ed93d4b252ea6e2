//! The page for people in Chromium before the real binary with the real model, proved from /stats: answers, probabilities, the same
//! again, one batch shared with another client in the gauges, cancellation, every page back. tests/tui_real_model.rs is the terminal's.

mod browser;
mod common;
mod http_support;

use std::sync::OnceLock;

use http_support::binary::Binary;
use http_support::client::{get, send_json};
use http_support::{at_rest, until};
use serde_json::{Value, json};

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

#[actix_web::test]
async fn the_page_chats_shows_probabilities_answers_the_same_again_and_stands_beside_another_client() {
    let Some(program) = browser::program(12) else { return };
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
    browser.wait("document.querySelector('#resident').textContent === '1 of 16'").await;
    let body = json!({"prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": true});
    let mut other = send_json(server.address, "/v1/generate/stream", &body);
    assert_eq!(other.head().status, 200);
    other.read_events(4);
    browser.wait("document.querySelector('#resident').textContent === '2 of 16'").await;
    assert_eq!(browser.text("document.querySelector('#resident-gauge').getAttribute('aria-valuenow')").await, "2");
    let pages = browser.text("document.querySelector('#pages').textContent").await;
    assert!(pages.ends_with(" of 1024") && !pages.starts_with("0 "), "{pages}");
    assert_eq!(stats(&server)["decode_batch_peak"], 2, "both decode in one step");
    browser.key("Escape").await;
    until("stopping cancels its own request only", || {
        let stats = stats(&server);
        stats["active_requests"] == 1 && stats["cancelled_requests"] == 1
    });
    drop(other);
    until("every page is back", || at_rest(server.address) && stats(&server)["cancelled_requests"] == 2);
    browser.wait("document.querySelector('#pages').textContent === '0 of 1024'").await;
    assert_eq!(browser.complaints, Vec::<String>::new());
    assert_eq!(stats(&server)["failed_requests"], 0);
}
