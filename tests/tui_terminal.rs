//! `crucible tui` in a real terminal (tmux), against a stand-in of the server: what a person sees, what goes out, and that the
//! terminal is given back however it ends. tests/tui_real_model.rs has the same terminal before the real server.

mod stub;
mod tmux;

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use stub::{PAGES, Stub};
use tmux::Pane;

const PROGRAM: &str = env!("CARGO_BIN_EXE_crucible");
const PACE: Duration = Duration::from_millis(25);
const SENTENCE: &str = "The capital of France is Paris.";

/// A terminal of 80 by 24 with the client running in it.
fn opened(stub: &Stub, options: &str) -> Pane {
    let pane = Pane::open(80, 24);
    // A long answer must outlast a slow machine.
    pane.run(&format!("{PROGRAM} tui --target {} --set max_tokens=2000 {options}; echo code $?", stub.url));
    pane.wait("● ready");
    pane
}

fn ask(pane: &Pane, prompt: &str) {
    pane.write(prompt);
    pane.wait(&format!("› {prompt}"));
    pane.press(&["Enter"]);
}

fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn last_body(stub: &Stub) -> Value {
    stub.seen().generates.last().cloned().unwrap_or_default()
}

fn last_messages(stub: &Stub) -> Value {
    stub.seen().tokenizes.last().map(|body| body["messages"].clone()).unwrap_or_default()
}

/// The shell is back, on the ordinary screen, with a cursor and with what is typed shown.
fn assert_given_back(pane: &Pane, code: &str) {
    pane.wait(code);
    assert_eq!(pane.fact("alternate_on"), "0", "the ordinary screen is back");
    assert_eq!(pane.fact("cursor_flag"), "1", "the cursor is shown");
    pane.run("stty -a");
    let modes = pane.wait("echoke");
    for mode in ["icanon", "isig", "icrnl", "opost", "echo"] {
        assert!(modes.split_whitespace().any(|word| word == mode), "{mode} is not restored:\n{modes}");
    }
}

#[test]
fn text_appears_while_it_is_generated() {
    if !tmux::present(6) {
        return;
    }
    let stub = Stub::held_after(2);
    let pane = opened(&stub, "");
    assert!(pane.screen().contains("stand-in · script · none"), "the server is named");
    ask(&pane, "What is the capital of France?");
    let early = pane.wait("The capital");
    assert!(!early.contains("Paris"), "the answer comes token by token:\n{early}");
    assert!(early.contains("Esc stop"), "how to stop it is told");
    stub.release();
    let late = pane.wait_said("· stop");
    assert!(late.contains(SENTENCE) && late.contains("7 tokens"), "{late}");
    assert!(late.contains("gap") && late.contains("tok/s"), "{late}");
    let body = last_body(&stub);
    assert_eq!((&body["max_tokens"], body.get("temperature")), (&json!(2000), None), "greedy unless told otherwise");
}

#[test]
fn escape_cancels_on_the_server_and_the_next_question_is_answered() {
    if !tmux::present(6) {
        return;
    }
    let stub = Stub::start(PACE);
    let pane = opened(&stub, "");
    ask(&pane, "Tell a long story");
    pane.wait("Paris. It lies");
    pane.press(&["Escape"]);
    pane.wait_said("stopped by you");
    wait_for("the cancellation", || stub.seen().cancelled == 1 && stub.seen().active == 0);
    pane.wait(&format!("0 / {PAGES}"));
    ask(&pane, "And the capital?");
    // The first answer may have been shown whole, so the sentence alone says nothing.
    wait_for("the second question", || last_messages(&stub).as_array().is_some_and(|messages| messages.len() == 3));
    pane.wait(SENTENCE);
    let messages = last_messages(&stub);
    assert_eq!(messages[0], json!({"role": "user", "content": "Tell a long story"}));
    assert!(
        messages[1]["content"].as_str().unwrap().starts_with("The capital of France"),
        "the part that came is kept"
    );
    assert_eq!(messages[2], json!({"role": "user", "content": "And the capital?"}));
    wait_for("the end", || stub.seen().completed == 1);
    pane.press(&["C-n"]);
    pane.wait_gone("And the capital?");
    ask(&pane, "Afresh?");
    pane.wait(SENTENCE);
    assert_eq!(last_messages(&stub), json!([{"role": "user", "content": "Afresh?"}]), "a new chat remembers nothing");
}

#[test]
fn live_figures_show_other_clients_too() {
    if !tmux::present(4) {
        return;
    }
    let stub = Stub::start(PACE);
    let (one, other) = (opened(&stub, ""), opened(&stub, ""));
    one.wait("0 / 4");
    ask(&one, "Tell a long story");
    one.wait("1 / 4");
    ask(&other, "Tell another long story");
    one.wait("2 / 4");
    other.wait(&format!("8 / {PAGES}"));
    one.press(&["Escape"]);
    other.wait("1 / 4");
    other.press(&["Escape"]);
    one.wait(&format!("0 / {PAGES}"));
}

#[test]
fn settings_are_edited_checked_and_sent() {
    if !tmux::present(5) {
        return;
    }
    let stub = Stub::start(Duration::from_millis(5));
    let pane = opened(&stub, "--set seed=7");
    pane.press(&["Tab"]);
    pane.wait("›temperature");
    pane.write("9");
    pane.press(&["Enter"]);
    pane.wait("temperature: give 0 to 5");
    pane.press(&["BSpace"]);
    pane.write("0.5");
    pane.press(&["Down"]);
    pane.write("40");
    pane.press(&["Down", "Right", "Down", "Right", "End", "Tab"]);
    pane.wait("Alt-Enter new line");
    ask(&pane, "Hi");
    pane.wait("7 tokens");
    let body = last_body(&stub);
    for (field, value) in
        [("temperature", json!(0.5)), ("top_k", json!(40)), ("top_p", json!(0.05)), ("min_p", json!(0.01))]
    {
        assert_eq!(body[field], value, "{field}");
    }
    assert_eq!(body["seed"], json!(7), "from the command line");
}

#[test]
fn raw_text_is_continued_without_a_template() {
    if !tmux::present(2) {
        return;
    }
    let stub = Stub::start(Duration::from_millis(5));
    let pane = opened(&stub, "--set mode=raw --set max_tokens=3");
    ask(&pane, "Once upon a time");
    pane.wait("3 tokens");
    let body = last_body(&stub);
    assert_eq!((&body["prompt"], &body["max_tokens"]), (&json!("Once upon a time"), &json!(3)));
    assert!(stub.seen().tokenizes.is_empty());
}

#[test]
fn split_characters_wide_characters_and_pasted_lines_are_shown_whole() {
    if !tmux::present(3) {
        return;
    }
    let stub = Stub::start(PACE);
    let pane = opened(&stub, "");
    ask(&pane, "emoji");
    let screen = pane.wait("8 tokens");
    assert!(screen.contains("中文") && screen.contains("<b>&amp;!"), "{screen}");
    pane.paste("first line\nsecond line");
    pane.wait("second line");
    assert_eq!(stub.seen().generates.len(), 1, "a pasted line feed does not send");
    pane.press(&["Enter"]);
    pane.wait("7 tokens");
    assert_eq!(last_messages(&stub)[2]["content"], "first line\nsecond line");
}

#[test]
fn the_picture_follows_the_size_of_the_terminal() {
    if !tmux::present(5) {
        return;
    }
    let stub = Stub::start(PACE);
    let pane = opened(&stub, "");
    ask(&pane, "Tell a long story");
    pane.wait("Paris. It lies");
    for (columns, rows) in [(120, 40), (40, 12), (20, 5), (200, 50), (80, 24)] {
        pane.resize(columns, rows);
        if columns < 24 {
            pane.wait("window too small");
            continue;
        }
        let whole = |screen: &str| {
            let lines: Vec<&str> = screen.trim_end_matches('\n').lines().collect();
            let width = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
            width == usize::from(columns)
                && lines.len() == usize::from(rows)
                && lines[0].starts_with(" crucible")
                && lines[1].starts_with("╭ Conversation")
                && lines[lines.len() - 1].starts_with(" Esc stop")
                && screen.contains("Sampling") == (columns >= 64)
        };
        pane.wait_until(&format!("a picture of {columns} by {rows}"), whole);
    }
    pane.press(&["Escape"]);
    pane.wait_said("stopped by you");
}

#[test]
fn refusals_and_broken_streams_are_told_and_the_question_comes_back() {
    if !tmux::present(5) {
        return;
    }
    let stub = Stub::start(Duration::from_millis(5));
    let pane = opened(&stub, "");
    ask(&pane, "refuse me");
    pane.wait("the waiting queue is full");
    pane.wait("› refuse me");
    pane.press(&["C-u"]);
    ask(&pane, "break off");
    let screen = pane.wait("cannot reach");
    assert!(screen.contains("The capital of France"), "what arrived stays:\n{screen}");
    pane.press(&["Up"]);
    pane.wait("› break off");
    drop(stub);
    let screen = pane.wait("○ no answer");
    assert!(!screen.contains(&format!("/ {PAGES}")), "no stale figure:\n{screen}");
    pane.press(&["C-c"]);
    assert_given_back(&pane, "code 0");
}

#[test]
fn quitting_gives_the_terminal_back_and_cancels() {
    if !tmux::present(7) {
        return;
    }
    let stub = Stub::start(PACE);
    let pane = opened(&stub, "");
    assert_eq!(pane.fact("alternate_on"), "1");
    ask(&pane, "Tell a long story");
    pane.wait("Paris. It lies");
    pane.press(&["C-c"]);
    assert_given_back(&pane, "code 0");
    wait_for("the cancellation", || stub.seen().cancelled == 1 && stub.seen().active == 0);
}

#[test]
fn a_signal_gives_the_terminal_back() {
    if !tmux::present(6) {
        return;
    }
    let stub = Stub::start(PACE);
    for signal in ["TERM", "HUP"] {
        let pane = Pane::open(80, 24);
        // The client takes the place of the shell whose process id stands in the variable.
        pane.run(&format!(
            "sh -c 'echo $$ > \"$0\"; exec {PROGRAM} tui --target {}' {signal}.pid; echo code $?",
            stub.url
        ));
        pane.wait("● ready");
        let pid_file = std::path::Path::new(&pane.fact("pane_current_path")).join(format!("{signal}.pid"));
        let pid = std::fs::read_to_string(&pid_file).unwrap();
        std::fs::remove_file(&pid_file).unwrap();
        assert!(Command::new("kill").args([&format!("-{signal}"), pid.trim()]).status().unwrap().success());
        assert_given_back(&pane, "code 0");
    }
}

#[test]
fn a_panic_gives_the_terminal_back() {
    if !tmux::present(6) {
        return;
    }
    let pane = Pane::open(80, 24);
    let this = std::env::current_exe().unwrap();
    pane.run(&format!("{} --ignored --exact child_that_panics_on_the_screen; echo code $?", this.display()));
    let screen = pane.wait("code 101");
    assert!(screen.contains("as a program does on a bad day"), "the message can be read:\n{screen}");
    assert_given_back(&pane, "code 101");
}

/// Not a test of its own: `a_panic_gives_the_terminal_back` runs it in a terminal.
#[test]
#[ignore = "runs inside another test's terminal"]
fn child_that_panics_on_the_screen() {
    let screen = crucible::tui::Screen::take().unwrap();
    std::thread::sleep(Duration::from_millis(200));
    // Forgotten, so that only the panic hook can restore the terminal.
    std::mem::forget(screen);
    panic!("as a program does on a bad day");
}

#[test]
fn what_cannot_work_is_said_in_one_line() {
    for (args, said) in [
        (vec!["tui", "--target", "ftp://host"], "give http://HOST:PORT"),
        (vec!["tui", "--set", "top_k=0"], "top_k: give a whole number from 1, or off"),
        (vec!["tui", "--set", "size=3"], "is no setting"),
        (vec!["tui", "--api-key-file", "/nonexistent/key"], "cannot read the API key"),
        (vec!["tui"], "crucible tui needs a terminal"),
    ] {
        let output = Command::new(PROGRAM).args(&args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(stderr.contains(said) && stderr.lines().count() == 1, "{args:?}: {stderr}");
        assert!(output.stdout.is_empty());
    }
}
