//! The machine, event by event.

use super::*;
use crate::tui::settings::Field;

const NOW: Duration = Duration::from_secs(1);

fn app() -> App {
    App::new("http://127.0.0.1:8080".to_owned(), Sampling::default())
}

fn press(app: &mut App, code: KeyCode) -> Option<Effect> {
    app.handle(NOW, Event::Key(KeyEvent::new(code, KeyModifiers::NONE)))
}

fn control(app: &mut App, character: char) -> Option<Effect> {
    app.handle(NOW, Event::Key(KeyEvent::new(KeyCode::Char(character), KeyModifiers::CONTROL)))
}

fn type_text(app: &mut App, text: &str) {
    for character in text.chars() {
        assert_eq!(press(app, KeyCode::Char(character)), None);
    }
}

fn ask(app: &mut App, text: &str) -> Ask {
    type_text(app, text);
    match press(app, KeyCode::Enter) {
        Some(Effect::Ask(ask)) => ask,
        other => panic!("expected an ask, got {other:?}"),
    }
}

fn news(app: &mut App, stream: StreamId, news: StreamNews) {
    assert_eq!(app.handle(NOW, Event::Stream(stream, news)), None);
}

fn token(app: &mut App, stream: StreamId, text: &str) {
    news(app, stream, StreamNews::Token(text.to_owned()));
}

fn done(app: &mut App, stream: StreamId, text: &str) {
    let done = StreamNews::Done { reason: "stop".to_owned(), tokens: 3, text: text.to_owned() };
    news(app, stream, done);
}

fn user(content: &str) -> Message {
    Message { role: "user", content: content.to_owned() }
}

fn assistant(content: &str) -> Message {
    Message { role: "assistant", content: content.to_owned() }
}

#[test]
fn an_answer_is_the_concatenation_of_its_tokens_and_the_tail() {
    let mut app = app();
    let first = ask(&mut app, "Hi");
    assert_eq!(first.prompt, Prompt::Chat(vec![user("Hi")]));
    assert!(app.is_streaming());
    assert_eq!(app.editor.text(), "");
    token(&mut app, first.stream, "Hel");
    token(&mut app, first.stream, "");
    token(&mut app, first.stream, "lo");
    done(&mut app, first.stream, "!");
    assert_eq!(app.turns[0].answer, "Hello!");
    assert_eq!(app.turns[0].meter.tokens(), 3);
    assert_eq!(app.turns[0].state, TurnState::Finished { reason: "stop".to_owned(), tokens: 3 });
    assert!(!app.is_streaming());
}

#[test]
fn escape_drops_the_stream_and_what_still_arrives_is_not_shown() {
    let mut app = app();
    let first = ask(&mut app, "one");
    token(&mut app, first.stream, "kept");
    assert_eq!(press(&mut app, KeyCode::Esc), Some(Effect::Drop(first.stream)));
    token(&mut app, first.stream, " lost");
    assert_eq!((app.turns[0].answer.as_str(), &app.turns[0].state), ("kept", &TurnState::Stopped));

    let second = ask(&mut app, "two");
    assert_ne!(second.stream, first.stream);
    token(&mut app, first.stream, " late");
    done(&mut app, first.stream, " later");
    assert!(app.is_streaming(), "the end of the old stream does not end the new one");
    token(&mut app, second.stream, "new");
    assert_eq!(app.turns[1].answer, "new");
    assert_eq!(press(&mut app, KeyCode::Esc), Some(Effect::Drop(second.stream)));
    assert_eq!(press(&mut app, KeyCode::Esc), None, "nothing is left to stop");
}

#[test]
fn a_conversation_holds_the_answered_turns_only() {
    let mut app = app();
    let first = ask(&mut app, "a");
    done(&mut app, first.stream, "A");
    let unanswered = ask(&mut app, "b");
    press(&mut app, KeyCode::Esc);
    assert_eq!(unanswered.prompt, Prompt::Chat(vec![user("a"), assistant("A"), user("b")]));
    let stopped = ask(&mut app, "c");
    token(&mut app, stopped.stream, "C");
    press(&mut app, KeyCode::Esc);
    let last = ask(&mut app, "d");
    assert_eq!(last.prompt, Prompt::Chat(vec![user("a"), assistant("A"), user("c"), assistant("C"), user("d")]));
}

#[test]
fn raw_turns_stand_alone() {
    let mut app = app();
    let first = ask(&mut app, "a");
    done(&mut app, first.stream, "A");
    app.panel.sampling.set(Field::Mode, "raw").unwrap();
    let raw = ask(&mut app, "Once upon");
    done(&mut app, raw.stream, " a time");
    assert_eq!(raw.prompt, Prompt::Raw("Once upon".to_owned()));
    app.panel.sampling.set(Field::Mode, "chat").unwrap();
    assert_eq!(ask(&mut app, "b").prompt, Prompt::Chat(vec![user("a"), assistant("A"), user("b")]));
}

#[test]
fn a_second_message_waits_for_the_first_answer() {
    let mut app = app();
    let first = ask(&mut app, "one");
    type_text(&mut app, "two");
    assert_eq!(press(&mut app, KeyCode::Enter), None);
    assert!(app.notice.is_some());
    assert_eq!(app.editor.text(), "two", "the message is kept");
    done(&mut app, first.stream, "");
    assert!(matches!(press(&mut app, KeyCode::Enter), Some(Effect::Ask(_))));
}

#[test]
fn a_refused_message_comes_back_into_the_box() {
    let mut app = app();
    let first = ask(&mut app, "too much");
    news(&mut app, first.stream, StreamNews::Failed("the queue is full".to_owned()));
    assert_eq!(app.editor.text(), "too much");
    assert_eq!(app.turns[0].state, TurnState::Failed("the queue is full".to_owned()));
    assert!(!app.is_streaming());
}

#[test]
fn a_failure_overwrites_nothing_that_was_typed_meanwhile() {
    let mut app = app();
    let first = ask(&mut app, "one");
    type_text(&mut app, "next");
    news(&mut app, first.stream, StreamNews::Failed("gone".to_owned()));
    assert_eq!(app.editor.text(), "next");
}

#[test]
fn settings_reach_the_request() {
    let mut app = app();
    press(&mut app, KeyCode::Tab);
    type_text(&mut app, "0.8");
    press(&mut app, KeyCode::Down);
    type_text(&mut app, "40");
    press(&mut app, KeyCode::Tab);
    assert_eq!(app.focus, Focus::Message);
    let sampling = ask(&mut app, "Hi").sampling;
    assert_eq!((sampling.temperature, sampling.top_k), (Some(0.8), Some(40)));
}

#[test]
fn a_refused_setting_keeps_the_focus() {
    let mut app = app();
    press(&mut app, KeyCode::Tab);
    type_text(&mut app, "9");
    press(&mut app, KeyCode::Tab);
    assert_eq!(app.focus, Focus::Settings);
    press(&mut app, KeyCode::Esc);
    press(&mut app, KeyCode::Esc);
    assert_eq!((app.focus, app.panel.sampling.shown(Field::Temperature)), (Focus::Message, "0".to_owned()));
}

#[test]
fn a_new_conversation_stops_the_answer_and_forgets_the_turns() {
    let mut app = app();
    let first = ask(&mut app, "one");
    assert_eq!(control(&mut app, 'n'), Some(Effect::Drop(first.stream)));
    assert!(app.turns.is_empty() && !app.is_streaming());
    token(&mut app, first.stream, "late");
    assert!(app.turns.is_empty());
    assert_eq!(ask(&mut app, "two").prompt, Prompt::Chat(vec![user("two")]));
}

#[test]
fn both_quit_keys_and_the_signal_quit() {
    let mut app = app();
    assert_eq!(control(&mut app, 'c'), Some(Effect::Quit));
    assert_eq!(control(&mut app, 'd'), Some(Effect::Quit));
    assert_eq!(app.handle(NOW, Event::Terminate), Some(Effect::Quit));
    type_text(&mut app, "x");
    assert_eq!(control(&mut app, 'd'), None, "with text in the box it deletes");
}

#[test]
fn a_key_release_does_nothing() {
    let mut app = app();
    let mut key = KeyEvent::new(KeyCode::Char('x'), KeyModifiers::NONE);
    key.kind = KeyEventKind::Release;
    app.handle(NOW, Event::Key(key));
    assert_eq!(app.editor.text(), "");
}

#[test]
fn a_pasted_prompt_keeps_its_lines() {
    let mut app = app();
    app.handle(NOW, Event::Paste("a\r\nb\x1b[31m".to_owned()));
    assert_eq!(app.editor.text(), "a\nb[31m");
    assert!(!app.is_streaming(), "a pasted line feed does not send");
}

#[test]
fn escape_sequences_of_a_model_are_not_passed_on() {
    let mut app = app();
    let first = ask(&mut app, "Hi");
    token(&mut app, first.stream, "\x1b]0;title\x07ok");
    assert_eq!(app.turns[0].answer, "]0;titleok");
}

#[test]
fn an_unreachable_server_shows_no_stale_numbers() {
    let mut app = app();
    let health = Health { status: "ok".to_owned(), model: "m".to_owned(), ..Health::default() };
    app.handle(NOW, Event::Health(Ok(health.clone())));
    app.handle(NOW, Event::Stats(Stats { active_requests: 3, ..Stats::default() }));
    assert_eq!(app.server.trouble, None);
    app.handle(NOW, Event::Health(Err("connection refused".to_owned())));
    assert_eq!((app.server.stats.clone(), app.server.trouble.is_some()), (None, true));
    app.handle(NOW, Event::Health(Ok(health)));
    assert_eq!(app.server.trouble, None);
}

#[test]
fn the_lengths_that_the_server_takes_go_with_the_request() {
    let mut app = app();
    let health = Health {
        status: "ok".to_owned(),
        context: 8192,
        max_prompt_tokens: 4096,
        max_sequence_tokens: 5000,
        ..Health::default()
    };
    app.handle(NOW, Event::Health(Ok(health)));
    assert_eq!(ask(&mut app, "Hi").lengths, Lengths { prompt: Some(4096), sequence: Some(5000) });
}

#[test]
fn no_word_of_a_server_moves_the_cursor() {
    let mut app = app();
    let word = || "a\x1b[2J\nb\x07".to_owned();
    let health = Health { status: word(), model: word(), device: word(), profile: word(), ..Health::default() };
    app.handle(NOW, Event::Health(Ok(health)));
    let clean = "a[2J b".to_owned();
    let shown = app.server.health.clone().unwrap();
    assert_eq!([shown.status, shown.model, shown.device, shown.profile], [(); 4].map(|()| clean.clone()));
    assert_eq!(app.server.trouble, Some(format!("the server is {clean}")));
    app.handle(NOW, Event::Health(Err(word())));
    assert_eq!(app.server.trouble, Some(clean.clone()));
    let first = ask(&mut app, "Hi");
    news(&mut app, first.stream, StreamNews::Done { reason: word(), tokens: 0, text: String::new() });
    assert_eq!(app.turns[0].state, TurnState::Finished { reason: clean, tokens: 0 });
    let second = ask(&mut app, "Hi");
    news(&mut app, second.stream, StreamNews::Failed(word()));
    assert_eq!(app.turns[1].state, TurnState::Failed("a[2J\nb".to_owned()));
}

#[test]
fn who_reads_further_up_stays_there_while_text_arrives() {
    let mut app = app();
    app.drawn(30);
    press(&mut app, KeyCode::PageUp);
    assert_eq!(app.scroll, PAGE_LINES);
    app.drawn(35);
    assert_eq!(app.scroll, PAGE_LINES + 5);
    press(&mut app, KeyCode::PageDown);
    press(&mut app, KeyCode::PageDown);
    assert_eq!(app.scroll, 0);
    app.drawn(50);
    assert_eq!(app.scroll, 0, "at the end the view follows");
    press(&mut app, KeyCode::PageUp);
    app.drawn(4);
    assert_eq!(app.scroll, 4, "after a resize it stays within the text");
}
