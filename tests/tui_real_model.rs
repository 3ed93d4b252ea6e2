//! `crucible tui` in a real terminal (tmux) of 80 by 24, before the real binary with the real model: one long sitting, each step
//! proved from the screen and from /stats. Every wait is for a condition, so that a slow machine only takes longer.

#[path = "http_support/checks.rs"]
mod checks;
mod common;
mod http_support;
mod tmux;

use checks::Checks;
use http_support::binary::Binary;
use http_support::client::{get, post, send_json};
use http_support::until;
use serde_json::{Value, json};
use tmux::Pane;

const PROGRAM: &str = env!("CARGO_BIN_EXE_crucible");
const FRANCE: &str = "What is the name of the capital of France?";
const STORY: &str = "Tell me a very long story about a dragon and a knight";
const CHECKS: usize = 23;

fn start(overrides: &[&str]) -> Binary {
    let model = format!("model.path=\"{}\"", common::default_model().display());
    Binary::start("config/crucible.toml", &[&[model.as_str(), "executor.backend=cpu"], overrides].concat())
}

fn stats(server: &Binary) -> Value {
    get(server.address, "/stats").json()
}

fn at_rest(server: &Binary) -> Value {
    let rest = |stats: &Value| ["active_requests", "queued_requests", "kv_pages_used"].iter().all(|f| stats[f] == 0);
    until("everything is back", || rest(&stats(server)));
    stats(server)
}

fn ask(pane: &Pane, prompt: &str) {
    pane.write(prompt);
    pane.press(&["Enter"]);
    let is_empty = |line: &str| line.starts_with("│›") && line.trim_matches(['│', '›', ' ']).is_empty();
    pane.wait_until("the message is sent", |screen| tmux::said(screen).contains("You") && screen.lines().any(is_empty));
}

/// Asks in a new chat.
fn ask_afresh(pane: &Pane, prompt: &str) {
    pane.press(&["C-n"]);
    pane.wait_gone("Model");
    ask(pane, prompt);
}

/// Waits for the end of one answer more, and of its account; the words of the conversation.
fn ended(pane: &Pane, server: &Binary, completed: u64) -> String {
    until("an answer more", || stats(server)["completed_requests"] == completed + 1);
    at_rest(server);
    let screen = pane.wait_until("the end of the answer", |screen| {
        let said = conversation(screen);
        said.ends_with("· stop") || said.ends_with("· length")
    });
    conversation(&screen)
}

/// The words of the conversation, without the mark of the empty message box below it.
fn conversation(screen: &str) -> String {
    tmux::said(screen).trim_end_matches(['›', ' ']).to_owned()
}

fn completed(server: &Binary) -> u64 {
    at_rest(server)["completed_requests"].as_u64().expect("a count")
}

/// Opens the settings and brings this one under the mark.
fn open_setting(pane: &Pane, field: &str) {
    pane.press(&["Tab"]);
    pane.wait("↑↓ choose");
    choose(pane, field);
}

fn choose(pane: &Pane, field: &str) {
    const FIELDS: [&str; 7] = ["mode", "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens"];
    let marked = |screen: &str| FIELDS.iter().position(|field| screen.contains(&format!("│›{field}")));
    let wanted = FIELDS.iter().position(|name| *name == field);
    loop {
        let now = marked(&pane.wait_until("a marked setting", |screen| marked(screen).is_some()));
        if now == wanted {
            return;
        }
        pane.press(&[if now < wanted { "Down" } else { "Up" }]);
        pane.wait_until("another setting", |screen| marked(screen).is_some_and(|at| Some(at) != now));
    }
}

fn close_settings(pane: &Pane) {
    pane.press(&["Tab"]);
    pane.wait("Alt-Enter new line");
}

/// Whether a screen is a whole picture of this size.
fn is_whole(screen: &str, columns: usize, rows: usize) -> bool {
    let lines: Vec<&str> = screen.trim_end_matches('\n').lines().collect();
    let framed = lines.iter().filter(|line| line.starts_with(['╭', '│', '╰'])).count();
    lines.len() == rows
        && lines[0].starts_with(" crucible")
        && lines[1].starts_with("╭ Conversation")
        && framed == rows - 2
        && lines[1].chars().count() == columns
        && screen.contains("Sampling") == (columns >= 64)
}

#[test]
fn the_terminal_client_holds_in_every_check_before_the_real_server() {
    if !tmux::present(CHECKS) {
        return;
    }
    let mut checks = Checks::of("terminal client");
    let mut server = start(&[]);
    let pane = Pane::open(80, 24);
    pane.run(&format!("{PROGRAM} tui --target http://{} --set max_tokens=3000; echo code $?", server.address));
    pane.wait("● ready");
    a_first_answer(&mut checks, &pane, &server);
    beside_another_client(&mut checks, &pane, &server);
    after_a_cancellation(&mut checks, &pane, &server);
    what_is_typed(&mut checks, &pane, &server);
    the_size_of_the_window(&mut checks, &pane, &server);
    when_the_server_dies(&mut checks, &pane, &mut server);
    the_end(&mut checks, &pane, &server);
    checks.finish(CHECKS);
}

fn a_first_answer(checks: &mut Checks, pane: &Pane, server: &Binary) {
    checks.check("80 by 24 holds the whole picture: model, device, conversation, settings, figures, keys", || {
        let screen = pane.wait("0 / 16");
        assert!(is_whole(&screen, 80, 24), "{screen}");
        for part in ["smollm2-135m-instruct", "cpu", "Sampling", "Live", "0 / 1024", "Enter send", "Ctrl-C quit"] {
            assert!(screen.contains(part), "{part}:\n{screen}");
        }
    });
    checks.check("a question is answered, with its pace and the reason of its end", || {
        let before = completed(server);
        ask(pane, FRANCE);
        let said = ended(pane, server, before);
        assert!(said.contains(FRANCE) && said.contains("Paris") && said.contains("· stop"), "{said}");
        assert!(said.contains("tok/s") && said.contains("first after"), "{said}");
    });
    checks.check("it was one greedy request, and every page is back on the screen and in the account", || {
        let now = at_rest(server);
        let counts = ["accepted_requests", "completed_requests", "greedy_requests", "kv_pages_used"].map(|f| &now[f]);
        assert_eq!(counts, [1, 1, 1, 0].map(|n| json!(n)).each_ref());
        pane.wait("0 / 1024");
    });
}

fn beside_another_client(checks: &mut Checks, pane: &Pane, server: &Binary) {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": true});
    let whole = json!({"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": true});
    let alone = post(server.address, "/v1/generate", &whole).json();
    at_rest(server);
    checks.check("text appears while its request runs, and how to stop it is told", || {
        ask_afresh(pane, STORY);
        pane.wait_until("a part of the answer", |screen| {
            tmux::said(screen).contains(" tokens ·") && screen.contains("Esc stop")
        });
        let now = stats(server);
        assert_eq!((&now["active_requests"], &now["completed_requests"]), (&json!(1), &json!(2)), "{now}");
    });
    checks.check("the live figures show it: one resident of sixteen, and pages in use", || {
        pane.wait("1 / 16");
        pane.wait_gone("0 / 1024");
    });
    let mut other = send_json(server.address, "/v1/generate/stream", &body);
    checks.check("another client's request stands beside it in the figures", || {
        assert_eq!(other.head().status, 200);
        pane.wait("2 / 16");
    });
    checks.check("both decode in one step, and the other client's text is what it is alone", || {
        let events = other.read_events(12);
        let text = |(_, data): &(String, String)| serde_json::from_str::<Value>(data).unwrap()["token_id"].clone();
        let ids: Vec<Value> = events.iter().take(12).map(text).collect();
        assert_eq!(json!(ids), alone["token_ids"]);
        let now = stats(server);
        assert_eq!((&now["decode_batch_peak"], &now["active_requests"]), (&json!(2), &json!(2)), "{now}");
    });
    checks.check("Escape takes only one's own request out", || {
        pane.press(&["Escape"]);
        pane.wait_said("stopped by you");
        until("only the other is left", || stats(server)["active_requests"] == 1);
        assert_eq!(stats(server)["cancelled_requests"], 1);
        other.read_events(3);
    });
    drop(other);
    checks.check("every page is back once both are out", || {
        assert_eq!(at_rest(server)["cancelled_requests"], 2);
        pane.wait("0 / 16");
        pane.wait("0 / 1024");
    });
}

fn after_a_cancellation(checks: &mut Checks, pane: &Pane, server: &Binary) {
    checks.check("the conversation goes on after a cancellation, with the part that came", || {
        let before = at_rest(server);
        // How much of the cancelled story came is up to the machine, and so is this answer: it gets a bound.
        open_setting(pane, "max_tokens");
        pane.write("40");
        close_settings(pane);
        ask(pane, "And what is 1 + 1?");
        ended(pane, server, before["completed_requests"].as_u64().expect("a count"));
        let sent = |now: &Value| now["prefill_tokens"].as_u64().expect("a count");
        let questions = [STORY, "And what is 1 + 1?"].map(|text| json!({"role": "user", "content": text}));
        let chat = json!({"messages": questions});
        let without = post(server.address, "/tokenize", &chat).json()["count"].as_u64().expect("a count");
        assert!(sent(&at_rest(server)) - sent(&before) > without + 10);
    });
    checks.check("a new chat remembers nothing: the first question has the answer of a first question", || {
        let prompt = json!({"messages": [{"role": "user", "content": FRANCE}]});
        let tokens = post(server.address, "/tokenize", &prompt).json()["tokens"].clone();
        let body = json!({"prompt_tokens": tokens, "max_tokens": 100});
        let expected = post(server.address, "/v1/generate", &body).json();
        let before = completed(server);
        ask_afresh(pane, FRANCE);
        let said = ended(pane, server, before);
        let words = expected["text"].as_str().expect("text").split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains(&format!("Model {words} {} tokens", expected["tokens_generated"])), "{said}: {words}");
    });
    let words = |said: &str| {
        let answer = said.split("Model ").nth(1).and_then(|rest| rest.split(" 12 tokens").next());
        answer.unwrap_or_else(|| panic!("no answer of 12 tokens in {said}")).to_owned()
    };
    let mut first = String::new();
    checks.check("settings are checked and reach the server: a temperature, a seed and a length", || {
        let before = at_rest(server);
        open_setting(pane, "temperature");
        pane.write("9");
        pane.press(&["Enter"]);
        pane.wait("temperature: give 0 to 5");
        pane.press(&["BSpace"]);
        pane.write("1");
        pane.press(&["Enter"]);
        pane.wait_gone("temperature: give 0 to 5");
        choose(pane, "seed");
        pane.write("7");
        choose(pane, "max_tokens");
        pane.write("12");
        close_settings(pane);
        ask_afresh(pane, STORY);
        let said = ended(pane, server, before["completed_requests"].as_u64().expect("a count"));
        assert!(said.ends_with("· length"), "{said}");
        first = words(&said);
        let sampled = |stats: &Value| stats["sampled_requests"].as_u64().expect("a count");
        assert_eq!(sampled(&at_rest(server)), sampled(&before) + 1);
    });
    checks.check("the same seed says the same again", || {
        let before = completed(server);
        ask_afresh(pane, STORY);
        assert_eq!(words(&ended(pane, server, before)), first);
    });
}

fn what_is_typed(checks: &mut Checks, pane: &Pane, server: &Binary) {
    checks.check("Chinese, accents and emoji are typed, shown and sent as they are", || {
        let prompt = "你好 café 👩‍🚀";
        let before = at_rest(server);
        ask_afresh(pane, prompt);
        let said = ended(pane, server, before["completed_requests"].as_u64().expect("a count"));
        assert!(said.contains("你好 café"), "{said}");
        let chat = json!({"messages": [{"role": "user", "content": prompt}]});
        let count = post(server.address, "/tokenize", &chat).json()["count"].as_u64().expect("a count");
        let sent = |stats: &Value| stats["prefill_tokens"].as_u64().expect("a count");
        assert_eq!(sent(&at_rest(server)) - sent(&before), count, "the prompt's tokens, and no other");
        let screen = pane.screen();
        assert!(is_whole(&screen, 80, 24), "wide characters move no border:\n{screen}");
    });
    checks.check("a pasted line feed is text and does not send", || {
        let before = stats(server)["accepted_requests"].clone();
        pane.paste("first line\nsecond line");
        pane.wait("second line");
        assert_eq!(stats(server)["accepted_requests"], before);
        pane.press(&["C-u", "BSpace", "C-u"]);
        pane.wait_gone("first line");
    });
    checks.check("Up brings the last message back", || {
        pane.press(&["Up"]);
        pane.wait("› 你好 café");
        pane.press(&["C-u"]);
        pane.wait_gone("› 你好 café");
    });
    checks.check("a refusal is told in the server's words and the message comes back", || {
        // More new tokens than the context has positions.
        open_setting(pane, "max_tokens");
        pane.write("9000");
        close_settings(pane);
        pane.write("Too much?");
        pane.press(&["Enter"]);
        pane.wait_until("the words of the server", |screen| tmux::said(screen).contains("status 400)"));
        pane.wait("› Too much?");
        pane.press(&["C-u"]);
        open_setting(pane, "max_tokens");
        pane.write("3000");
        choose(pane, "temperature");
        pane.write("0");
        close_settings(pane);
    });
}

fn the_size_of_the_window(checks: &mut Checks, pane: &Pane, server: &Binary) {
    checks.check("the picture follows the window while text streams, down to a line that says it is too small", || {
        ask_afresh(pane, STORY);
        pane.wait("1 / 16");
        for (columns, rows) in [(120, 40), (40, 12), (20, 5), (200, 50), (80, 24)] {
            pane.resize(columns, rows);
            if columns < 24 {
                pane.wait("window too small");
                continue;
            }
            let (columns, rows) = (usize::from(columns), usize::from(rows));
            pane.wait_until(&format!("a picture of {columns} by {rows}"), |screen| is_whole(screen, columns, rows));
        }
    });
    checks.check("a conversation longer than the window can be scrolled", || {
        pane.wait_gone("Model");
        pane.press(&["PPage"]);
        pane.wait("more ↓");
        pane.press(&["NPage", "NPage", "NPage"]);
        pane.wait_gone("more ↓");
        pane.press(&["Escape"]);
        pane.wait_said("stopped by you");
        at_rest(server);
    });
}

fn when_the_server_dies(checks: &mut Checks, pane: &Pane, server: &mut Binary) {
    checks.check("a server that dies in the middle of an answer is told, and no old figure stays", || {
        ask_afresh(pane, STORY);
        pane.wait("1 / 16");
        pane.wait_until("a part of the answer", |screen| tmux::said(screen).contains(" tokens ·"));
        server.kill();
        pane.wait_until("the broken answer", |screen| tmux::said(screen).contains("cannot reach"));
        let screen = pane.wait("○ no answer");
        assert!(!screen.contains("/ 1024"), "{screen}");
    });
    checks.check("a server in its place is found again, and answers", || {
        let port = format!("server.port={}", server.address.port());
        *server = start(&[&port]);
        pane.wait("● ready");
        pane.press(&["C-u"]);
        ask_afresh(pane, FRANCE);
        let said = ended(pane, server, 0);
        assert!(said.contains("Paris"), "{said}");
    });
}

fn the_end(checks: &mut Checks, pane: &Pane, server: &Binary) {
    checks.check("Ctrl-C ends at once and cancels what runs", || {
        ask_afresh(pane, STORY);
        pane.wait("1 / 16");
        pane.press(&["C-c"]);
        pane.wait("code 0");
        let last = at_rest(server);
        assert_eq!((&last["cancelled_requests"], &last["failed_requests"]), (&json!(1), &json!(0)));
        assert_eq!(last["kv_pages_free"], 1024);
    });
    checks.check("the terminal is as before: its screen, its cursor, its modes", || {
        assert_eq!((pane.fact("alternate_on"), pane.fact("cursor_flag")), ("0".to_owned(), "1".to_owned()));
        pane.run("stty -a");
        let modes = pane.wait("echoke");
        for mode in ["icanon", "isig", "icrnl", "opost", "echo"] {
            assert!(modes.split_whitespace().any(|word| word == mode), "{mode} is not restored:\n{modes}");
        }
    });
}
