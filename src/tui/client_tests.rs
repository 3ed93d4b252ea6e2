//! The client against a server that takes short conversations only.

use std::sync::{Arc, Mutex};

use actix_web::dev::ServerHandle;
use actix_web::web::{Data, Json, post};
use actix_web::{App, HttpResponse, HttpServer};
use serde_json::{Value, json};

use super::*;
use crate::tui::state::StreamId;
use crate::tui::wire::{Lengths, SamplingBody};

/// What the server takes: messages to be tokenised, and tokens of a prompt. A message is ten tokens.
#[derive(Clone, Copy)]
struct Takes {
    messages: usize,
    tokens: usize,
}

#[derive(Clone)]
struct Scene {
    takes: Takes,
    /// Messages of every call to /tokenize.
    asked: Arc<Mutex<Vec<usize>>>,
}

fn too_long() -> HttpResponse {
    HttpResponse::BadRequest().json(json!({"error": {"code": "context_length_exceeded", "message": "too long"}}))
}

async fn tokenize(scene: Data<Scene>, body: Json<Value>) -> HttpResponse {
    let messages = body["messages"].as_array().map_or(0, Vec::len);
    scene.asked.lock().unwrap().push(messages);
    if messages > scene.takes.messages {
        return too_long();
    }
    HttpResponse::Ok().json(json!({"tokens": vec![1; 10 * messages]}))
}

async fn generate(scene: Data<Scene>, body: Json<Value>) -> HttpResponse {
    if body["prompt_tokens"].as_array().map_or(0, Vec::len) > scene.takes.tokens {
        return too_long();
    }
    let done = json!({"finish_reason": "stop", "tokens_generated": 0, "text": "hi"});
    HttpResponse::Ok().content_type("text/event-stream").body(format!("event: done\ndata: {done}\n\n"))
}

fn serve(takes: Takes) -> (String, Arc<Mutex<Vec<usize>>>, ServerHandle) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let scene = Scene { takes, asked: Arc::clone(&asked) };
    let app = move || {
        let app = App::new().app_data(Data::new(scene.clone()));
        app.route("/tokenize", post().to(tokenize)).route("/v1/generate/stream", post().to(generate))
    };
    let server = HttpServer::new(app).workers(1).disable_signals().bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", server.addrs()[0]);
    let server = server.run();
    let handle = server.handle();
    actix_rt::spawn(server);
    (url, asked, handle)
}

/// The news of a question after so many turns, and the messages of every call to /tokenize.
fn ask(takes: Takes, lengths: Lengths, turns: usize) -> (Vec<StreamNews>, Vec<usize>) {
    actix_rt::System::new().block_on(async {
        let (url, asked, handle) = serve(takes);
        let message = |role| Message { role, content: "x".to_owned() };
        let mut messages: Vec<_> = (0..turns).flat_map(|_| [message("user"), message("assistant")]).collect();
        messages.push(message("user"));
        let sampling = SamplingBody { max_tokens: 5, ..SamplingBody::default() };
        let ask = Ask { stream: StreamId(1), prompt: Prompt::Chat(messages), sampling, lengths };
        let mut news = Vec::new();
        Client::new(url, None).ask(&ask, |item| news.push(item)).await;
        handle.stop(false).await;
        let asked = asked.lock().unwrap().clone();
        (news, asked)
    })
}

fn left_out(news: &[StreamNews]) -> usize {
    assert!(matches!(news.last(), Some(StreamNews::Done { .. })), "{news:?}");
    let prompted = |item: &StreamNews| match item {
        StreamNews::Prompted { turns_left_out, .. } => Some(*turns_left_out),
        _ => None,
    };
    news.iter().rev().find_map(prompted).expect("the prompt went out")
}

const ALL: Takes = Takes { messages: usize::MAX, tokens: usize::MAX };

#[test]
fn the_oldest_turns_are_left_out_until_the_prompt_is_short_enough_for_the_server() {
    // Five turns and a question are 110 tokens.
    let (news, _) = ask(ALL, Lengths { prompt: Some(70), sequence: Some(1_000) }, 5);
    assert_eq!(left_out(&news), 2);
    let (news, _) = ask(ALL, Lengths { prompt: Some(1_000), sequence: Some(74) }, 5);
    assert_eq!(left_out(&news), 3);
    let (news, asked) = ask(ALL, Lengths::default(), 5);
    assert_eq!((left_out(&news), asked), (0, vec![11]));
}

#[test]
fn a_conversation_that_is_refused_as_too_long_goes_on_without_its_older_half() {
    // Seen: a conversation over the server's own bound was refused for good.
    let (news, asked) = ask(Takes { messages: 6, ..ALL }, Lengths::default(), 8);
    assert_eq!((left_out(&news), asked), (6, vec![17, 9, 5]));
    let (news, asked) = ask(Takes { tokens: 60, ..ALL }, Lengths::default(), 8);
    assert_eq!((left_out(&news), asked), (6, vec![17, 9, 5]));
}

#[test]
fn a_question_that_is_too_long_by_itself_fails_with_the_words_of_the_server() {
    let (news, asked) = ask(Takes { messages: 0, ..ALL }, Lengths::default(), 3);
    assert_eq!((news, asked), (vec![StreamNews::Failed("too long".to_owned())], vec![7, 3, 1]));
}
