//! The web page in a real Chromium, against a stand-in of the server: what it shows, what it sends, and that a keyboard, a narrow
//! window and a dark system are enough.

mod browser;
mod stub;

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use browser::Browser;
use stub::Stub;

const PACE: Duration = Duration::from_millis(25);
const SENTENCE: &str = "The capital of France is Paris.";

/// The text of the last answer.
const ANSWER: &str = "([...document.querySelectorAll('.reply .text')].at(-1)?.textContent ?? '')";
/// What stands below it.
const REMARK: &str = "([...document.querySelectorAll('.remark')].at(-1)?.textContent ?? '')";
/// An answer has come to its end.
const IS_OVER: &str = "document.querySelector('#stop').hidden && document.querySelectorAll('.turn').length > 0 \
                       && document.querySelectorAll('.reply[aria-busy=true]').length === 0";

async fn opened(program: &Path, stub: &Stub) -> Browser {
    let mut browser = Browser::start(program).await;
    browser.size(1280, 800).await;
    browser.open(&format!("{}/", stub.url)).await;
    browser.wait("document.querySelector('#status').dataset.state === 'ready'").await;
    browser
}

async fn ask(browser: &mut Browser, prompt: &str) {
    browser.eval("document.querySelector('#message').focus()").await;
    browser.insert(prompt).await;
    browser.key("Enter").await;
}

async fn asked(browser: &mut Browser, prompt: &str) -> String {
    let turns = browser.eval("document.querySelectorAll('.turn').length").await;
    ask(browser, prompt).await;
    browser.wait(&format!("document.querySelectorAll('.turn').length > {turns} && {IS_OVER}")).await;
    browser.text(ANSWER).await
}

/// Sets an input as a person would, events included.
async fn fill(browser: &mut Browser, id: &str, value: &str) {
    let script = format!(
        "(() => {{ const i = document.getElementById({id:?}); i.value = {value:?}; \
         i.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
    );
    browser.eval(&script).await;
}

fn last_body(stub: &Stub) -> Value {
    stub.seen().generates.last().cloned().unwrap_or_default()
}

fn no_complaints(browser: &Browser) {
    assert_eq!(browser.complaints, Vec::<String>::new(), "the console is clean");
}

#[actix_web::test]
async fn text_appears_while_it_is_generated_and_every_byte_of_it() {
    let Some(program) = browser::program(5) else { return };
    let stub = Stub::held_after(2);
    let mut browser = opened(&program, &stub).await;
    ask(&mut browser, "What is the capital of France?").await;
    browser.wait(&format!("{ANSWER} === 'The capital'")).await;
    assert_eq!(browser.eval("document.querySelector('.reply').getAttribute('aria-busy')").await, "true");
    stub.release();
    browser.wait(IS_OVER).await;
    assert_eq!(browser.text(ANSWER).await, SENTENCE);
    let remark = browser.text(REMARK).await;
    assert!(remark.starts_with("7 tokens · ") && remark.ends_with(" · stop"), "{remark}");
    assert_eq!(asked(&mut browser, "emoji").await, "中文 👩‍🚀 <b>&amp;!", "split characters, markup and the tail");
    no_complaints(&browser);
}

#[actix_web::test]
async fn the_conversation_and_the_settings_reach_the_server() {
    let Some(program) = browser::program(6) else { return };
    let stub = Stub::start(Duration::from_millis(5));
    let mut browser = opened(&program, &stub).await;
    asked(&mut browser, "First?").await;
    let body = last_body(&stub);
    assert_eq!((&body["max_tokens"], &body["logprobs"]), (&json!(256), &json!(5)));
    assert!(body.get("temperature").is_none() && body.get("seed").is_none(), "greedy sends no filter: {body}");

    for (id, value) in [
        ("temperature", "0.7"),
        ("top-k", "40"),
        ("top-p", "0.9"),
        ("min-p", "0.05"),
        ("seed", "7"),
        ("max-tokens", "3"),
        ("system", "Be brief."),
    ] {
        fill(&mut browser, id, value).await;
    }
    assert_eq!(asked(&mut browser, "Second?").await, "The capital of");
    let body = last_body(&stub);
    for (field, value) in [
        ("temperature", json!(0.7)),
        ("top_k", json!(40)),
        ("top_p", json!(0.9)),
        ("min_p", json!(0.05)),
        ("seed", json!(7)),
        ("max_tokens", json!(3)),
    ] {
        assert_eq!(body[field], value, "{field}");
    }
    let messages = stub.seen().tokenizes.last().unwrap()["messages"].clone();
    let expected = [("system", "Be brief."), ("user", "First?"), ("assistant", SENTENCE), ("user", "Second?")];
    assert_eq!(messages, json!(expected.map(|(role, content)| json!({"role": role, "content": content}))));

    fill(&mut browser, "temperature", "9").await;
    ask(&mut browser, "Third?").await;
    browser.wait("document.activeElement.id === 'temperature'").await;
    assert_eq!(stub.seen().generates.len(), 2, "a value out of bounds is not sent");

    fill(&mut browser, "temperature", "0.5").await;
    browser.open(&format!("{}/", stub.url)).await;
    browser.wait("document.querySelector('#top-k').value === '40'").await;
    assert_eq!(browser.text("document.querySelector('#temperature').value").await, "0.5", "kept over a reload");
    no_complaints(&browser);
}

#[actix_web::test]
async fn a_keyboard_is_enough() {
    let Some(program) = browser::program(9) else { return };
    let stub = Stub::start(PACE);
    let mut browser = opened(&program, &stub).await;
    assert_eq!(browser.text("document.activeElement.id").await, "message", "one can type at once");
    browser.insert("one").await;
    browser.key_with("Enter", 8).await;
    browser.insert("two").await;
    assert_eq!(browser.text("document.querySelector('#message').value").await, "one\ntwo");
    browser.key("Enter").await;
    browser.wait(IS_OVER).await;
    assert_eq!(browser.text("document.querySelector('.question .text').textContent").await, "one\ntwo");

    fill(&mut browser, "max-tokens", "2000").await;
    browser.insert("Tell a long story").await;
    browser.key("Enter").await;
    browser.wait(&format!("{ANSWER}.length > 20")).await;
    browser.key("Escape").await;
    browser.wait(IS_OVER).await;
    assert!(browser.text(REMARK).await.ends_with("stopped by you"));
    assert_eq!(browser.text("document.activeElement.id").await, "message");

    // Back from the message: the last answer's buttons, then its text.
    browser.key_with("Tab", 8).await;
    assert_eq!(browser.text("document.activeElement.textContent").await, "Check");
    browser.key_with("Tab", 8).await;
    browser.key_with("Tab", 8).await;
    assert_eq!(browser.text("document.activeElement.className").await, "text");
    browser.key("ArrowRight").await;
    browser.key("ArrowRight").await;
    assert_eq!(browser.text("document.querySelector('.chosen').textContent").await, " capital");
    assert_eq!(browser.text("document.querySelector('#announcer').textContent").await, " capital: 81.0 %");
    assert_eq!(browser.eval("document.querySelector('#probe').hidden").await, false);
    browser.key("Home").await;
    assert_eq!(browser.text("document.querySelector('.t.chosen').textContent").await, "The");
    browser.key("Escape").await;
    assert_eq!(browser.eval("document.querySelector('#probe').hidden").await, true);

    let script = "[...document.querySelectorAll('input, textarea, button')].filter(e => e.offsetParent) \
                  .filter(e => !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label'))).map(e => e.id)";
    assert_eq!(browser.eval(script).await, json!([]), "every control has a name");
    no_complaints(&browser);
}

#[actix_web::test]
async fn stopping_and_leaving_cancel_on_the_server() {
    let Some(program) = browser::program(4) else { return };
    let stub = Stub::start(PACE);
    let mut browser = opened(&program, &stub).await;
    fill(&mut browser, "max-tokens", "2000").await;
    ask(&mut browser, "Tell a long story").await;
    browser.wait(&format!("{ANSWER}.length > 20")).await;
    browser.click("#stop").await;
    browser.wait(IS_OVER).await;
    wait_for(|| stub.seen().cancelled == 1).await;
    assert_eq!(asked(&mut browser, "And the capital?").await, SENTENCE, "the page goes on after a stop");

    ask(&mut browser, "Another long story").await;
    browser.wait(&format!("{ANSWER}.length > 20")).await;
    browser.click("#new-chat").await;
    wait_for(|| stub.seen().cancelled == 2).await;
    assert_eq!(browser.eval("document.querySelectorAll('.turn').length").await, 0);

    ask(&mut browser, "A third long story").await;
    browser.wait(&format!("{ANSWER}.length > 20")).await;
    browser.open("about:blank#left").await;
    wait_for(|| stub.seen().cancelled == 3 && stub.seen().active == 0).await;
}

async fn wait_for(condition: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "the server did not see it");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[actix_web::test]
async fn probabilities_stand_beside_the_token_under_the_pointer() {
    let Some(program) = browser::program(4) else { return };
    let stub = Stub::start(Duration::from_millis(5));
    let mut browser = opened(&program, &stub).await;
    asked(&mut browser, "What is the capital of France?").await;
    browser.point_at(".t:nth-child(6)").await;
    let rows = "[...document.querySelectorAll('#probe div')].map(row => [...row.querySelectorAll('span')].map(s => s.textContent))";
    browser.wait(&format!("JSON.stringify({rows}).includes('Lyon')")).await;
    let expected = json!([["␣Paris", "81.0 %"], [".", "9.5 %"], ["␣Lyon", "3.2 %"]]);
    assert_eq!(browser.eval(rows).await, expected, "the chosen token and what else could have been");
    let inside = "(() => { const r = document.querySelector('#probe').getBoundingClientRect(); \
                  return r.left >= 0 && r.top >= 0 && r.right <= innerWidth && r.bottom <= innerHeight; })()";
    assert_eq!(browser.eval(inside).await, true);
    browser.click("#shade").await;
    let shades = "new Set([...document.querySelectorAll('.t')].map(t => getComputedStyle(t).backgroundColor)).size";
    assert_eq!(browser.eval(shades).await, 4, "four of the five levels occur in the script");
    no_complaints(&browser);
}

#[actix_web::test]
async fn a_check_answers_again_and_compares() {
    let Some(program) = browser::program(2) else { return };
    let stub = Stub::start(Duration::from_millis(5));
    let mut browser = opened(&program, &stub).await;
    asked(&mut browser, "What is the capital of France?").await;
    let check = "[...document.querySelectorAll('.actions button')].at(-1)";
    browser.eval(&format!("{check}.click()")).await;
    browser.wait(&format!("{check}.textContent === 'Same 7 tokens'")).await;
    {
        let seen = stub.seen();
        assert_eq!(seen.generates[0], seen.generates[1], "the same request, field by field");
    }
    assert_eq!(browser.eval(&format!("{check}.classList.contains('good')")).await, true);
    no_complaints(&browser);
}

#[actix_web::test]
async fn refusals_and_broken_streams_are_told_and_the_question_is_kept() {
    let Some(program) = browser::program(5) else { return };
    let stub = Stub::start(Duration::from_millis(5));
    let mut browser = opened(&program, &stub).await;
    assert_eq!(asked(&mut browser, "refuse me").await, "");
    let error = "[...document.querySelectorAll('.error')].at(-1).textContent";
    assert_eq!(browser.text(error).await, "The waiting queue is full; retry after a second.");
    assert_eq!(browser.text("document.querySelector('#message').value").await, "refuse me");
    browser.eval("document.querySelector('#message').value = ''").await;
    assert_eq!(asked(&mut browser, "break off").await, "The capital of France", "what arrived stays");
    assert!(browser.text(error).await.starts_with("The connection broke"));
    let url = stub.url.clone();
    drop(stub);
    browser.wait("document.querySelector('#status').dataset.state === 'away'").await;
    assert_eq!(browser.text("document.querySelector('#resident').textContent").await, "–", "no stale figure");
    assert!(!browser.requests.iter().any(|request| !request.starts_with(&url) && !request.starts_with("about:")));
}

#[actix_web::test]
async fn a_conversation_that_is_refused_as_too_long_goes_on_without_its_oldest_turns() {
    let Some(program) = browser::program(2) else { return };
    let stub = Stub::start(Duration::from_millis(5));
    let mut browser = opened(&program, &stub).await;
    let question = "why ".repeat(stub::TEXT_MAX / 8 + 25);
    assert_eq!(asked(&mut browser, &question).await, SENTENCE);
    // Seen: the refusal of /tokenize ended every further turn.
    assert_eq!(asked(&mut browser, &question).await, SENTENCE);
    let remark = browser.text(REMARK).await;
    assert!(remark.ends_with("the oldest turn did not fit"), "{remark}");
}

#[actix_web::test]
async fn nothing_is_fetched_from_elsewhere_and_the_policy_forbids_it() {
    let Some(program) = browser::program(4) else { return };
    let stub = Stub::start(Duration::from_millis(5));
    let mut browser = opened(&program, &stub).await;
    asked(&mut browser, "What is the capital of France?").await;
    browser.point_at(".t:nth-child(3)").await;
    browser.wait("document.querySelectorAll('#probe div').length >= 3").await;
    browser.wait("![...document.querySelectorAll('#probe span')].some(s => s.textContent === '…')").await;
    let foreign: Vec<_> = browser.requests.iter().filter(|url| !url.starts_with(&stub.url)).collect();
    assert!(foreign.is_empty() && browser.requests.len() > 10, "{foreign:?}");
    no_complaints(&browser);
    let blocked = "fetch('http://127.0.0.1:9/').then(() => 'sent', error => error.message)";
    assert_eq!(browser.text(blocked).await, "Failed to fetch");
    browser
        .eval("document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))")
        .await;
    assert_eq!(browser.eval("window.ran === undefined").await, true, "no inline script runs");
    assert!(browser.complaints.iter().any(|text| text.contains("Content Security Policy")), "{:?}", browser.complaints);
}

#[actix_web::test]
async fn a_narrow_window_has_everything_without_scrolling_sideways() {
    let Some(program) = browser::program(8) else { return };
    let stub = Stub::start(Duration::from_millis(5));
    let mut browser = opened(&program, &stub).await;
    for (width, height) in [(320, 560), (390, 800), (768, 1024)] {
        browser.size(width, height).await;
        asked(&mut browser, &format!("width {width} {}", "unbroken".repeat(20))).await;
        let sideways = "[...document.querySelectorAll('html, body, body *')].filter(e => !e.closest('.unseen, svg') && \
                        e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 1).map(e => e.id || e.className || e.tagName)";
        assert_eq!(browser.eval(sideways).await, json!([]), "{width}");
        let reachable = "['#message', '#send', '#new-chat', '#panel-toggle'].every(s => { \
                         const r = document.querySelector(s).getBoundingClientRect(); \
                         return r.width > 0 && r.left >= 0 && r.right <= innerWidth && r.top >= 0 && r.bottom <= innerHeight; })";
        assert_eq!(browser.eval(reachable).await, true, "{width}");
    }
    browser.size(390, 800).await;
    assert_eq!(browser.eval("document.querySelector('#temperature').offsetParent === null").await, true);
    browser.click("#panel-toggle").await;
    browser.picture("web-narrow-panel").await;
    assert_eq!(browser.eval("document.querySelector('#temperature').offsetParent !== null").await, true);
    assert_eq!(browser.text("document.querySelector('#panel-toggle').getAttribute('aria-expanded')").await, "true");
    browser.key("Escape").await;
    assert_eq!(browser.text("document.querySelector('#panel-toggle').getAttribute('aria-expanded')").await, "false");
    browser.picture("web-narrow").await;
    no_complaints(&browser);
}

/// Lowest contrast of text against what is behind it, over the elements that hold text, by WCAG 2's formula.
const LOWEST_CONTRAST: &str = r"(() => {
  const parse = (c) => { const n = c.match(/[\d.]+/g).map(Number); return { rgb: n.slice(0, 3), a: n[3] ?? 1 }; };
  const luminance = (rgb) => rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.a === 1) return c.rgb; } return [255, 255, 255]; };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || !e.offsetParent || e.closest('fieldset:disabled, .unseen')) continue;
    const [a, b] = [luminance(parse(getComputedStyle(e).color).rgb), luminance(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.id || e.className || e.tagName];
  }
  return worst;
})()";

#[actix_web::test]
async fn light_and_dark_follow_the_system_and_both_can_be_read() {
    let Some(program) = browser::program(6) else { return };
    let stub = Stub::start(PACE);
    let mut browser = opened(&program, &stub).await;
    browser.picture("web-welcome").await;
    asked(&mut browser, "What is the capital of France?").await;
    fill(&mut browser, "max-tokens", "2000").await;
    ask(&mut browser, "Tell a long story").await;
    browser.wait(&format!("{ANSWER}.length > 300")).await;
    browser.point_at(".turn:first-child .t:nth-child(6)").await;
    browser.wait("document.querySelector('#probe').textContent.includes('Lyon')").await;
    let mut papers = Vec::new();
    for scheme in ["light", "dark"] {
        browser.color_scheme(scheme).await;
        let worst = browser.eval(LOWEST_CONTRAST).await;
        assert!(worst[0].as_f64().unwrap() >= 4.5, "{scheme}: {worst}");
        papers.push(browser.text("getComputedStyle(document.body).backgroundColor").await);
        browser.picture(&format!("web-{scheme}")).await;
    }
    assert_ne!(papers[0], papers[1]);
    let brightness = |paper: &str| -> u32 {
        paper.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse::<u32>().ok()).sum()
    };
    assert!(brightness(&papers[0]) > 600 && brightness(&papers[1]) < 120, "{papers:?}");
    no_complaints(&browser);
}
