//! What the terminal shows, cell by cell, in windows of several sizes.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;
use crate::tui::settings::Sampling;
use crate::tui::state::{Effect, Event, StreamNews};
use crate::tui::wire::{Health, Stats};

fn app() -> App {
    let mut app = App::new("http://127.0.0.1:8080".to_owned(), Sampling::default());
    let health = Health {
        status: "ok".to_owned(),
        model: "SmolLM2-135M-Instruct".to_owned(),
        device: "cpu".to_owned(),
        profile: "q8".to_owned(),
        max_batch: 16,
        context: 8192,
        kv_pages: 1024,
        ..Health::default()
    };
    app.handle(Duration::ZERO, Event::Health(Ok(health)));
    for (second, steps) in [(1, 0), (2, 45)] {
        let stats = Stats {
            active_requests: 3,
            queued_requests: 2,
            kv_pages_used: 12,
            kv_pages_free: 1012,
            decode_steps: steps,
            average_batch_size: 1.0,
            ..Stats::default()
        };
        app.handle(Duration::from_secs(second), Event::Stats(stats));
    }
    app
}

fn press(app: &mut App, at_ms: u64, code: KeyCode) -> Option<Effect> {
    app.handle(Duration::from_millis(at_ms), Event::Key(KeyEvent::new(code, KeyModifiers::NONE)))
}

fn converse(app: &mut App, prompt: &str, answer: &[&str]) {
    app.editor.set(prompt);
    let Some(Effect::Ask(ask)) = press(app, 1000, KeyCode::Enter) else { panic!("no ask") };
    for (at, text) in answer.iter().enumerate() {
        let at = Duration::from_millis(1050 + 20 * at as u64);
        app.handle(at, Event::Stream(ask.stream, StreamNews::Token((*text).to_owned())));
    }
    let done = StreamNews::Done { reason: "stop".to_owned(), tokens: answer.len(), text: String::new() };
    app.handle(Duration::from_secs(2), Event::Stream(ask.stream, done));
}

/// The rows of the window, and the cursor.
fn rows(app: &App, width: u16, height: u16) -> (Vec<String>, (u16, u16), usize) {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let mut scroll_max = 0;
    terminal.draw(|frame| scroll_max = draw(frame, app)).unwrap();
    let cursor = terminal.get_cursor_position().unwrap();
    let buffer = terminal.backend().buffer();
    let rows = buffer.content().chunks(usize::from(width)).map(|row| row.iter().map(|cell| cell.symbol()).collect());
    (rows.collect(), (cursor.x, cursor.y), scroll_max)
}

fn screen(app: &App, width: u16, height: u16) -> String {
    rows(app, width, height).0.join("\n")
}

#[test]
fn everything_stands_in_80_by_24() {
    let mut app = app();
    converse(&mut app, "What is the capital of France?", &["The capital", " of France", " is Paris."]);
    let shown = screen(&app, 80, 24);
    for part in [
        "crucible · SmolLM2-135M-Instruct · cpu · q8",
        "● ready 127.0.0.1:8080",
        "What is the capital of France?",
        "The capital of France is Paris.",
        "3 tokens · 50.0 tok/s · first after 50.0 ms · stop",
        "temperature",
        "0 · greedy",
        "max_tokens         256",
        "3 / 16",
        "12 / 1024",
        "45.0 tok/s",
        "20.0 ms",
        "worst gap",
        "Enter send",
        "Ctrl-C quit",
    ] {
        assert!(shown.contains(part), "{part:?} is missing in\n{shown}");
    }
}

#[test]
fn a_title_that_is_too_long_is_cut_before_the_lamp() {
    let mut app = app();
    let health = app.server.health.as_mut().unwrap();
    health.device = "cpu (avx2, 1 threads)".to_owned();
    let title = |width| rows(&app, width, 24).0.swap_remove(0);
    // It ran into the lamp: "cpu (avx2, 1 threads● ready".
    assert_eq!(title(80), " crucible · SmolLM2-135M-Instruct · cpu (avx2, 1 thread… ● ready 127.0.0.1:8080 ");
    assert!(title(120).contains("cpu (avx2, 1 threads) · q8"), "{}", title(120));
    for width in 24..90 {
        let title = title(width);
        let lamp = title.find('●').expect("a lamp");
        assert!(lamp == 0 || title[..lamp].ends_with(' '), "{width}: {title}");
    }
}

#[test]
fn no_window_size_is_too_odd_to_draw() {
    let mut app = app();
    converse(&mut app, "中文 and a-rather-long-word-that-has-no-break", &["👩‍🚀 ", "yes\n\n\nno"]);
    for focus in [Focus::Message, Focus::Settings] {
        app.focus = focus;
        app.editor.set("a message of\nseveral lines that is also rather wide for a small window 中文中文中文");
        for width in 1..=130 {
            for height in 1..=40 {
                screen(&app, width, height);
            }
        }
    }
}

#[test]
fn the_cursor_follows_the_text() {
    let mut app = app();
    assert_eq!(rows(&app, 80, 24).1, (3, 21));
    app.editor.set("ab中");
    assert_eq!(rows(&app, 80, 24).1, (7, 21), "a wide character takes two cells");
    app.editor.left();
    assert_eq!(rows(&app, 80, 24).1, (5, 21));
    app.editor.set("one\ntwo\n");
    assert_eq!(rows(&app, 80, 24).1, (3, 21), "the box has grown upwards and the cursor is on its third line");
    app.editor.set(&"x".repeat(75));
    assert_eq!(rows(&app, 80, 24).1, (78, 21));
    app.editor.insert("y");
    assert_eq!(rows(&app, 80, 24).1, (4, 21), "wrapped");
}

#[test]
fn a_long_message_shows_the_lines_around_its_cursor() {
    let mut app = app();
    app.editor.set(&(0..30).map(|n| format!("line {n}\n")).collect::<String>());
    let shown = screen(&app, 80, 24);
    assert!(shown.contains("line 29") && !shown.contains("line 3\n"), "{shown}");
}

#[test]
fn a_narrow_window_shows_either_the_conversation_or_the_panels() {
    let mut app = app();
    converse(&mut app, "Hi", &["Hello"]);
    let shown = screen(&app, 50, 24);
    assert!(shown.contains("Hello") && !shown.contains("top_k"), "{shown}");
    press(&mut app, 3000, KeyCode::Tab);
    let shown = screen(&app, 50, 24);
    assert!(!shown.contains("Hello") && shown.contains("top_k") && shown.contains("resident"), "{shown}");
}

#[test]
fn a_long_conversation_ends_at_the_bottom_and_scrolls() {
    let mut app = app();
    let lines: Vec<String> = (0..60).map(|n| format!("row-{n}\n")).collect();
    converse(&mut app, "Count", &lines.iter().map(String::as_str).collect::<Vec<_>>());
    let (shown, _, scroll_max) = rows(&app, 80, 24);
    assert!(shown.join("\n").contains("row-59"));
    assert!(scroll_max > 40);
    app.drawn(scroll_max);
    for _ in 0..20 {
        press(&mut app, 3000, KeyCode::PageUp);
    }
    let shown = screen(&app, 80, 24);
    assert!(shown.contains("Count") && shown.contains("more ↓") && !shown.contains("row-59"), "{shown}");
}

#[test]
fn a_refused_setting_says_what_to_give() {
    let mut app = app();
    press(&mut app, 0, KeyCode::Tab);
    press(&mut app, 0, KeyCode::Char('9'));
    press(&mut app, 0, KeyCode::Enter);
    let shown = screen(&app, 80, 24);
    assert!(shown.contains("temperature: give 0 to 5"), "{shown}");
}

#[test]
fn a_server_that_does_not_answer_is_said_so() {
    let mut app = app();
    app.handle(Duration::ZERO, Event::Health(Err("connection refused".to_owned())));
    let shown = screen(&app, 80, 24);
    assert!(shown.contains("○ no answer") && shown.contains("crucible serve"), "{shown}");
    assert!(!shown.contains("12 / 1024"), "no stale numbers");
}

#[test]
fn a_failed_turn_shows_the_words_of_the_server() {
    let mut app = app();
    app.editor.set("Hi");
    let Some(Effect::Ask(ask)) = press(&mut app, 0, KeyCode::Enter) else { panic!("no ask") };
    assert!(screen(&app, 80, 24).contains("waiting for the first token"));
    let failed = StreamNews::Failed("the queue is full; try again in 1 s".to_owned());
    app.handle(Duration::ZERO, Event::Stream(ask.stream, failed));
    assert!(screen(&app, 80, 24).contains("the queue is full; try again in 1 s"));
}
