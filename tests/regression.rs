//! One test for each defect that was found in a release candidate: the smallest request that showed it, on the real binary.

mod common;
mod http_support;

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use crucible::protocol::stop::{Scan, StopMatcher};
use http_support::binary::Binary;
use http_support::client::{get, post, send, send_json};
use http_support::until;
use serde_json::{Value, json};

#[test]
fn a_top_p_of_zero_keeps_the_most_likely_token_and_the_engine_lives() {
    let server = Binary::tiny(&[]);
    let greedy = post(server.address, "/v1/generate", &json!({"prompt": "x", "max_tokens": 4})).json();
    for top_p in [0.0, 1e-12, 1e-300] {
        let body = json!({"prompt": "x", "max_tokens": 4, "temperature": 1, "top_p": top_p});
        let answer = post(server.address, "/v1/generate", &body);
        assert_eq!(answer.status, 200, "top_p {top_p}: {}", answer.text());
        assert_eq!(answer.json()["token_ids"], greedy["token_ids"], "top_p {top_p}");
    }
    let body = json!({"model": "tiny", "prompt": "x", "max_tokens": 4, "top_p": 0});
    assert_eq!(post(server.address, "/v1/completions", &body).json()["choices"][0]["text"], greedy["text"]);
    assert_eq!(get(server.address, "/health").status, 200);
}

#[test]
fn a_field_that_stands_twice_inside_a_message_is_refused() {
    let server = Binary::tiny(&[]);
    let body =
        br#"{"model": "tiny", "max_tokens": 1, "messages": [{"role": "system", "role": "user", "content": "a"}]}"#;
    let headers = [("content-type", "application/json")];
    let answer = send(server.address, "POST", "/v1/chat/completions", &headers, body).response();
    assert_eq!(
        (answer.status, answer.json()["error"]["code"].as_str()),
        (400, Some("invalid_json")),
        "{}",
        answer.text()
    );
}

#[test]
fn a_bad_token_id_is_blamed_on_the_field_that_holds_it() {
    let server = Binary::tiny(&[]);
    for ids in [json!([320]), json!([])] {
        let answer = post(server.address, "/v1/generate", &json!({"prompt_tokens": ids}));
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some("prompt_tokens")), "{ids}");
    }
}

#[test]
fn a_content_encoding_is_refused_and_not_ignored() {
    let server = Binary::tiny(&[]);
    let body = json!({"prompt": "x", "max_tokens": 1}).to_string();
    let sent = |encoding| {
        let headers = [("content-type", "application/json"), ("content-encoding", encoding)];
        send(server.address, "POST", "/v1/generate", &headers, body.as_bytes()).response().status
    };
    assert_eq!((sent("gzip"), sent("br"), sent("identity")), (415, 415, 200));
}

#[test]
fn parts_of_characters_have_names_of_their_own_among_log_probabilities() {
    let server = Binary::tiny(&[]);
    // The tiny model repeats its prompt: the two bytes of é, which are no text one by one.
    let body = json!({"model": "tiny", "prompt": [[195], [169]], "max_tokens": 1, "temperature": 0, "logprobs": 20});
    let answer = post(server.address, "/v1/completions", &body).json();
    let mut parts = 0;
    for choice in answer["choices"].as_array().unwrap() {
        let top = choice["logprobs"]["top_logprobs"][0].as_object().unwrap();
        assert!(top.len() >= 20, "names collide: {top:?}");
        assert!(!top.keys().any(|name| name.contains('\u{fffd}')), "{top:?}");
        parts += top.keys().filter(|name| name.starts_with("bytes:\\x")).count();
    }
    assert!(parts > 0, "{answer}");
}

#[test]
fn a_port_in_use_is_named_with_the_keys_that_choose_another() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let run = Command::new(env!("CARGO_BIN_EXE_crucible"))
        .args(["serve", "--config", "config/cpu-test.toml", "--set", &format!("server.port={}", address.port())])
        .output()
        .expect("the binary");
    let text = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(1), "{text}");
    assert!(text.contains(&address.to_string()) && text.contains("server.port"), "{text}");
}

#[test]
fn a_load_balancer_that_only_looks_gets_the_head_without_the_body() {
    let server = Binary::tiny(&[]);
    for path in ["/health", "/ready", "/stats", "/metrics", "/v1/models"] {
        let mut pending = send(server.address, "HEAD", path, &[], &[]);
        assert_eq!(pending.head().status, 200, "{path}");
        assert_eq!(pending.rest(), b"", "{path}");
    }
    let mut pending = send(server.address, "HEAD", "/v1/generate", &[], &[]);
    assert_eq!(pending.head().status, 405);
}

#[test]
fn penalties_with_a_scored_prompt_are_served_and_the_engine_lives() {
    let server = Binary::tiny(&[]);
    let body = |echo: bool| {
        json!({"model": "tiny", "prompt": "a long prompt of many letters, scored", "max_tokens": 9, "temperature": 0, "logprobs": 1,
               "echo": echo, "presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"97": 2}})
    };
    let scored = post(server.address, "/v1/completions", &body(true));
    assert_eq!(scored.status, 200, "{}", scored.text());
    let plain = post(server.address, "/v1/completions", &body(false)).json();
    let scored = scored.json()["choices"][0]["text"].as_str().unwrap().to_owned();
    // Scored positions are not counted: the answer is the same.
    assert!(scored.ends_with(plain["choices"][0]["text"].as_str().unwrap()), "{scored} {plain}");
    assert_eq!(get(server.address, "/health").status, 200);
}

/// Positions of a scored prompt select by the cheapest rule; the answer after them is drawn by the request's own.
#[test]
fn a_sampled_answer_is_the_same_when_its_prompt_is_scored() {
    let server = Binary::tiny(&[]);
    let body = |echo: bool| {
        json!({"model": "tiny", "prompt": "a long prompt of many letters, scored in three slices, and then one letter more: x",
               "max_tokens": 12, "temperature": 1.3, "top_p": 0.95, "seed": 7, "logprobs": 1, "echo": echo})
    };
    let answer = |echo: bool| post(server.address, "/v1/completions", &body(echo)).json()["choices"][0].clone();
    let (scored, plain) = (answer(true), answer(false));
    let text = |choice: &serde_json::Value| choice["text"].as_str().expect("a text").to_owned();
    assert!(text(&scored).ends_with(&text(&plain)), "{scored} {plain}");
    let drawn = plain["logprobs"]["token_logprobs"].as_array().expect("log-probabilities");
    assert!(!drawn.is_empty() && scored["logprobs"]["token_logprobs"].as_array().expect("scores").ends_with(drawn));
}

fn failing(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_crucible")).args(arguments).output().expect("the binary runs");
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_file_that_is_no_model_is_named_and_so_is_a_folder() {
    let (file, folder) = ("config/crucible.toml", "config");
    for command in [
        vec!["inspect", file],
        vec!["tokenize", "x", "--model", file],
        vec!["serve", "--set", "model.path=config/crucible.toml"],
        vec!["serve", "--set", "model.path=config/crucible.toml", "--set", "model.load_format=gguf"],
    ] {
        let error = failing(&command);
        assert!(error.contains("config/crucible.toml: this is not a GGUF file"), "{command:?}: {error}");
    }
    for command in [vec!["inspect", folder], vec!["serve", "--set", "model.path=config"]] {
        let error = failing(&command);
        assert!(error.contains("config is a folder: name the .gguf file in it"), "{command:?}: {error}");
    }
}

#[test]
fn a_character_that_prompt_and_answer_share_is_whole_in_an_echo() {
    let server = Binary::tiny(&[]);
    // é, 😰 and 中 cut at every byte; the bias makes the model go on with their last byte. Both halves were shown as U+FFFD.
    for (prompt, next) in
        [(vec![195], 169), (vec![97, 240, 159, 152], 176), (vec![228, 184], 173), (vec![240, 159], 169)]
    {
        let bias = json!({next.to_string(): 100});
        let ask = |fields: serde_json::Value| {
            let mut body =
                json!({"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 3, "logit_bias": bias});
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            post(server.address, "/v1/completions", &body)
        };
        let tokens = [prompt.as_slice(), &[next; 3]].concat();
        let whole = post(server.address, "/detokenize", &json!({"tokens": tokens})).json()["text"].clone();
        for extra in [json!({"echo": true}), json!({"echo": true, "logprobs": 0})] {
            assert_eq!(ask(extra.clone()).json()["choices"][0]["text"], whole, "{prompt:?} {extra}");
            let mut streamed = extra.clone();
            streamed["stream"] = json!(true);
            assert_eq!(streamed_text(&ask(streamed)), whole, "{prompt:?} {extra}");
        }
        assert_eq!(ask(json!({})).json()["choices"][0]["text"], "\u{fffd}".repeat(3), "an answer alone is as before");
    }
}

/// The text of choice 0 in a stream of /v1/completions.
fn streamed_text(answer: &http_support::client::Response) -> String {
    let events = answer.events().into_iter().filter(|(_, data)| data != "[DONE]");
    let chunks = events.map(|(_, data)| serde_json::from_str::<serde_json::Value>(&data).expect("JSON"));
    chunks.filter_map(|chunk| chunk["choices"][0]["text"].as_str().map(str::to_owned)).collect()
}

#[test]
fn every_stray_byte_is_a_character_to_the_text_offsets() {
    let server = Binary::tiny(&[]);
    // Four bytes that begin no character had the offsets 0, 0, 0, 0.
    let body = json!({"model": "tiny", "prompt": "x", "temperature": 0, "max_tokens": 4, "logprobs": 0, "logit_bias": {"169": 100}});
    let choice = post(server.address, "/v1/completions", &body).json()["choices"][0].clone();
    assert_eq!(
        (&choice["text"], &choice["logprobs"]["text_offset"]),
        (&json!("\u{fffd}".repeat(4)), &json!([0, 1, 2, 3]))
    );
}

#[test]
fn prompts_that_no_queue_holds_are_blamed_on_the_field_that_is_too_many() {
    let server = Binary::tiny(&[]);
    for (prompts, n, param) in
        [(33, 1, "prompt"), (33, 2, "prompt"), (20, 2, "n"), (1, 33, "n"), (1_025, 1, "prompt"), (20, 100, "n")]
    {
        let body = json!({"model": "tiny", "prompt": vec!["a"; prompts], "n": n, "max_tokens": 1});
        let answer = post(server.address, "/v1/completions", &body);
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(param)), "{}", answer.text());
    }
}

#[test]
fn a_refusal_repeats_no_more_than_the_beginning_of_a_long_name() {
    let server = Binary::tiny(&[]);
    let long = "x".repeat(20_000);
    for answer in [
        get(server.address, &format!("/{long}")),
        get(server.address, &format!("/v1/models/{long}")),
        send(server.address, "PUT", &format!("/v1/models/{long}"), &[], &[]).response(),
        post(server.address, "/v1/completions", &json!({"model": long, "prompt": "a"})),
        post(server.address, "/v1/generate", &json!({"prompt": "a", &*long: 1})),
        post(
            server.address,
            "/v1/chat/completions",
            &json!({"model": "tiny", "messages": [{"role": "user", "content": [{"type": long}]}]}),
        ),
    ] {
        let text = answer.text();
        assert!(
            answer.status >= 400 && text.len() < 1_000 && text.contains("xxx…"),
            "{}: {} bytes",
            answer.status,
            text.len()
        );
    }
}

#[test]
fn a_refused_preflight_has_the_error_body_of_its_path() {
    let server = Binary::tiny(&["server.cors_origins=[\"https://good.example.org\"]"]);
    let ask = |path: &str, origin: &str, method: &str| {
        let headers = [("origin", origin), ("access-control-request-method", method)];
        send(server.address, "OPTIONS", path, &headers, &[]).response()
    };
    for (path, id, code) in [
        ("/v1/completions", "x-request-id", "/error/code"),
        ("/v1/messages", "request-id", "/error/details/error_code"),
        ("/v1/generate", "x-request-id", "/error/code"),
    ] {
        for (origin, method) in [("https://bad.example.org", "POST"), ("https://good.example.org", "DELETE")] {
            let answer = ask(path, origin, method);
            assert_eq!((answer.status, answer.header("access-control-allow-origin")), (400, None), "{path} {origin}");
            assert!(answer.header(id).is_some_and(|id| id.starts_with("req_")), "{path} {origin}");
            assert_eq!(answer.json().pointer(code), Some(&json!("invalid_value")), "{path} {origin}");
        }
        assert_eq!(ask(path, "https://good.example.org", "POST").status, 200);
    }
}

#[test]
fn a_bad_line_of_a_key_file_is_named_by_its_number_and_a_comment_has_a_line_of_its_own() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("regression-keys");
    std::fs::write(&file, "# the team\n\nkeyone\nkeytwo  # comment\n").expect("a file");
    let set = format!("server.api_key_file={}", file.display());
    let error = failing(&["serve", "--config", "config/cpu-test.toml", "--set", &set]);
    assert!(error.contains("line 4") && error.contains("# at the beginning of a line"), "{error}");
    assert!(!error.contains("keytwo"), "{error}");
}

#[test]
fn the_terminal_client_says_that_it_speaks_plain_http_only() {
    let error = failing(&["tui", "--target", "https://127.0.0.1:8443"]);
    assert!(error.contains("plain HTTP only"), "{error}");
}

#[test]
fn a_text_that_no_prompt_can_hold_is_refused_by_its_length() {
    let server = Binary::tiny(&[]);
    let long = "x".repeat(1 << 20);
    for (path, body, param) in [
        ("/v1/generate", json!({"prompt": long}), "prompt"),
        ("/v1/completions", json!({"model": "tiny", "prompt": long}), "prompt"),
        ("/v1/chat/completions", json!({"model": "tiny", "messages": [{"role": "user", "content": long}]}), "messages"),
    ] {
        let answer = post(server.address, path, &body);
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, error["code"].as_str()), (400, Some("context_length_exceeded")), "{path}: {error}");
        assert_eq!(error["param"], param);
        assert!(error["message"].as_str().is_some_and(|m| m.contains("bytes")), "{error}");
    }
}

#[test]
fn an_answer_whose_beginning_occurs_in_the_end_mark_of_the_template_is_continued_where_it_ends() {
    let server = Binary::tiny(&[]);
    let count = |begun: &str| {
        let messages = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": begun}]);
        let body = json!({"model": "tiny", "messages": messages});
        post(server.address, "/v1/messages/count_tokens", &body).json()["input_tokens"].as_u64().unwrap()
    };
    let none = count("");
    for begun in ["x", "m", "im_end", "|>"] {
        assert_eq!(count(begun), none + begun.len() as u64, "{begun}");
    }
}

#[test]
fn a_closed_terminal_drains_as_a_termination_does() {
    let mut server = Binary::tiny(&[]);
    server.signal("HUP");
    assert_eq!(server.wait(Duration::from_secs(60)).code(), Some(0));
    let log = server.log.lock().expect("no panic").clone();
    assert!(log.contains("draining") && log.contains("every request has ended"), "{log}");
}

/// A closed terminal comes as two hang-ups, `timeout` and service managers send two signals at once: seen, live streams were cut.
#[test]
fn signals_that_come_together_are_one_wish_to_end_and_a_hang_up_never_hastens_it() {
    let long = ["model.geometry.context=16384", "kv.pages=2048", "server.stream_buffer_bytes=67108864"];
    for (first, second) in [("HUP", "HUP"), ("TERM", "HUP"), ("TERM", "INT"), ("INT", "TERM")] {
        let mut server = Binary::tiny(&[&long[..], &["server.drain_deadline_ms=600000"]].concat());
        let body = json!({"prompt": "abc", "max_tokens": 8_000, "ignore_eos": true});
        let mut stream = send_json(server.address, "/v1/generate/stream", &body);
        stream.head();
        stream.read_events(1);
        let both = format!("kill -s {first} $0; kill -s {second} $0");
        assert!(Command::new("sh").args(["-c", &both, &server.id().to_string()]).status().expect("sh").success());
        until("it drains", || get(server.address, "/ready").status == 503);
        server.signal("HUP");
        let text = String::from_utf8(stream.rest()).expect("UTF-8");
        assert!(text.contains("event: done"), "{first} {second}: the stream is whole");
        assert_eq!(server.wait(Duration::from_secs(60)).code(), Some(0), "{first} {second}");
    }
}

#[test]
fn a_report_that_cannot_be_written_is_an_error_and_one_that_nobody_reads_on_is_none() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("a Linux system");
    let model = common::default_model();
    let inspect = [OsStr::new("inspect"), model.as_os_str(), OsStr::new("--tensors")];
    let run = Command::new(env!("CARGO_BIN_EXE_crucible")).args(inspect).stdout(full).output().expect("the binary");
    let error = String::from_utf8(run.stderr).expect("UTF-8");
    assert_eq!(run.status.code(), Some(1), "{error}");
    assert!(error.contains("cannot write to standard output") && !error.contains("panicked"), "{error}");
    let mut unread = Command::new(env!("CARGO_BIN_EXE_crucible"));
    let mut unread = unread.args(inspect).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary");
    drop(unread.stdout.take());
    let end = unread.wait_with_output().expect("an end");
    assert_eq!((end.status.code(), String::from_utf8_lossy(&end.stderr).as_ref()), (Some(0), ""));
}

#[test]
fn what_a_command_cannot_read_or_use_is_refused_and_not_replaced() {
    let file = std::env::temp_dir().join(format!("crucible-not-utf8-{}", std::process::id()));
    std::fs::write(&file, b"\xff\xfeabc").expect("a temporary file");
    let error = failing(&["eval", file.to_str().expect("UTF-8"), "--set", "model.path=synthetic"]);
    std::fs::remove_file(&file).expect("the file");
    assert!(error.contains("is not UTF-8 text"), "{error}");
    let error = failing(&["generate", "hi", "--stop", "", "--set", "model.path=synthetic"]);
    assert!(error.contains("--stop is empty"), "{error}");
    let error = failing(&["serve", "--set", "model.path=synthetic", "--set", "executor.pin=1024"]);
    assert!(error.contains("executor.pin is 1024, it must lie in 0..=1023") && !error.contains("panicked"), "{error}");
}

#[test]
fn health_tells_the_longest_prompt_and_sequence_and_they_are_served() {
    for (overrides, prompt, sequence) in [
        (&[][..], 511, 512),
        (&["limits.max_prompt_tokens=40"], 40, 512),
        (&["kv.pages=4"], 64, 65),
        (&["limits.max_prompt_tokens=40", "limits.max_new_tokens=10"], 40, 50),
    ] {
        let server = Binary::tiny(overrides);
        // Seen: only the model's context was told, and clients went on to ask for more than the bounds below it.
        let health = get(server.address, "/health").json();
        assert_eq!(
            (&health["context"], &health["max_prompt_tokens"], &health["max_sequence_tokens"]),
            (&json!(512), &json!(prompt), &json!(sequence))
        );
        let ask = |tokens: usize, new: usize| {
            let body = json!({"prompt_tokens": vec![97; tokens], "max_tokens": new});
            let answer = post(server.address, "/v1/generate", &body);
            (answer.status, answer.json()["error"]["code"].as_str().map(str::to_owned))
        };
        let too_long = || (400, Some("context_length_exceeded".to_owned()));
        assert_eq!((ask(prompt, sequence - prompt), ask(prompt + 1, 1)), ((200, None), too_long()), "{overrides:?}");
    }
}

/// What a server answers to these bytes, until it closes the connection.
fn spoken(address: SocketAddr, bytes: &[u8]) -> String {
    let mut client = TcpStream::connect(address).expect("connected");
    client.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    client.write_all(bytes).expect("sent");
    let mut answer = String::new();
    client.read_to_string(&mut answer).expect("an answer and the end of the connection");
    answer
}

fn posted(path: &str, version: &str, headers: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    let head =
        format!("POST {path} {version}\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: {length}");
    format!("{head}\r\n{headers}\r\n{body}").into_bytes()
}

/// Paths of streams with a request for each.
fn streams() -> [(&'static str, Value); 4] {
    let messages = json!([{"role": "user", "content": "a"}]);
    [
        ("/v1/generate/stream", json!({"prompt": "a", "max_tokens": 3})),
        ("/v1/completions", json!({"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": true})),
        ("/v1/chat/completions", json!({"model": "tiny", "messages": messages, "max_tokens": 3, "stream": true})),
        ("/v1/messages", json!({"model": "tiny", "messages": messages, "max_tokens": 3, "stream": true})),
    ]
}

#[test]
fn a_stream_for_a_client_of_http_1_0_has_no_chunks_and_ends_with_the_connection() {
    let server = Binary::tiny(&[]);
    for (path, body) in streams() {
        let answer = spoken(server.address, &posted(path, "HTTP/1.0", "connection: keep-alive\r\n", &body));
        let (head, events) = answer.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with("HTTP/1.0 200") && head.contains("text/event-stream"), "{head}");
        for wrong in ["transfer-encoding", "content-length", "keep-alive"] {
            assert!(!head.to_lowercase().contains(wrong), "{path}: {head}");
        }
        let line = |line: &str| line.is_empty() || line.starts_with("event: ") || line.starts_with("data: ");
        assert!(events.lines().count() > 4 && events.ends_with("\n\n") && events.lines().all(line), "{events}");
    }
    // An answer with a length keeps the connection, as ever.
    let (path, body) = ("/v1/generate", json!({"prompt": "a", "max_tokens": 3}));
    let mut twice = posted(path, "HTTP/1.0", "connection: keep-alive\r\n", &body);
    twice.extend(posted(path, "HTTP/1.0", "", &body));
    let answers = spoken(server.address, &twice);
    assert_eq!((answers.matches("HTTP/1.0 200").count(), answers.matches("content-length").count()), (2, 2));
}

#[test]
fn an_offer_of_another_protocol_is_declined_in_words() {
    let server = Binary::tiny(&["server.keep_alive_ms=600000"]);
    let h2c = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n";
    let [stream, ..] = streams();
    let posts = [("/v1/generate", json!({"prompt": "a", "max_tokens": 3})), stream, ("/nowhere", json!({}))];
    let mut requests: Vec<Vec<u8>> = posts.iter().map(|(path, body)| posted(path, "HTTP/1.1", h2c, body)).collect();
    let web_socket = "connection: upgrade\r\nupgrade: websocket\r\n";
    requests
        .extend([h2c, web_socket].map(|offer| format!("GET /health HTTP/1.1\r\nhost: t\r\n{offer}\r\n").into_bytes()));
    for request in requests {
        let answer = spoken(server.address, &request);
        let head = answer.split_once("\r\n\r\n").expect("a head").0.to_lowercase();
        let asked = String::from_utf8_lossy(&request);
        assert!(head.contains("connection: close") && !head.contains("upgrade"), "{asked}: {head}");
    }
}

#[test]
fn no_request_writes_a_line_of_its_own_or_a_control_character_to_the_log() {
    let server = Binary::tiny(&["telemetry.log_level=debug"]);
    let forged = "\nFORGED \u{1b}[31m \u{9b}1m \r";
    let message = json!([{"role": forged, "content": "a"}]);
    let bodies = [
        ("/v1/generate", json!({forged: 1, "prompt": "a"}).to_string()),
        ("/v1/generate", format!("{{{0}: 1, {0}: 2}}", json!(forged))),
        ("/v1/chat/completions", json!({"model": forged, "messages": [{"role": "user", "content": "a"}]}).to_string()),
        ("/v1/chat/completions", json!({"model": "tiny", "messages": message}).to_string()),
        ("/v1/messages", json!({"model": forged, "messages": message, "max_tokens": 1}).to_string()),
        ("/v1/completions", json!({"model": "tiny", "prompt": "a", "user": forged, "max_tokens": 1}).to_string()),
    ];
    for (path, body) in &bodies {
        send(server.address, "POST", path, &[("content-type", "application/json")], body.as_bytes()).response();
    }
    until("the last is logged", || server.log.lock().expect("no panic").contains("request ended"));
    let log = server.log.lock().expect("no panic").clone();
    assert_eq!(log.matches("request not served").count(), bodies.len() - 1, "{log}");
    assert!(!log.lines().any(|line| line.starts_with("FORGED")), "{log}");
    assert!(!log.chars().any(|c| c.is_control() && c != '\n'), "{log:?}");
}

#[test]
fn a_refusal_says_what_is_wrong_and_which_prompt_and_how_many_answers_there_may_be() {
    let server = Binary::tiny(&[]);
    let head =
        "POST /v1/generate HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    let answer = spoken(server.address, format!("{head}xyz\r\n{{}}\r\n0\r\n\r\n").as_bytes());
    assert!(answer.contains("a chunk of it has no valid size") && !answer.contains("None"), "{answer}");
    let completion = |fields: Value| {
        let mut body = json!({"model": "tiny", "prompt": "a", "max_tokens": 1});
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        let error = post(server.address, "/v1/completions", &body).json()["error"].clone();
        (error["param"].as_str().unwrap_or("").to_owned(), error["message"].as_str().unwrap_or("").to_owned())
    };
    for n in [0, 33] {
        assert_eq!(completion(json!({"n": n})), ("n".to_owned(), format!("n is {n}, it must lie in 1..=32")));
    }
    let long = "c".repeat(600);
    for (prompts, n, blamed) in [
        (json!(["a", "b", ""]), 1, "prompt[2]"),
        (json!(["a", "", "b"]), 2, "prompt[1]"),
        (json!([[97], [320], [98]]), 3, "prompt[1]"),
        (json!(["a", long]), 1, "prompt[1]"),
        (json!([[97], vec![97; 600]]), 1, "prompt[1]"),
        (json!([""]), 1, "prompt"),
        (json!(""), 2, "prompt"),
    ] {
        assert_eq!(completion(json!({"prompt": prompts, "n": n})).0, blamed, "{prompts}");
    }
}

/// An upload outside of the backend's stream may return before its last part has arrived, and kernels of the stream do not wait for it.
#[test]
fn every_upload_to_the_device_is_in_stream_order() {
    let memory = std::fs::read_to_string("src/backend/cuda/memory.rs").expect("a source file");
    assert!(memory.contains("memcpy_htod_async") && !memory.contains("memcpy_htod_sync"));
}

#[test]
fn an_empty_system_is_none_in_anthropics_dialect_and_an_empty_message_in_openais() {
    let server = Binary::tiny(&[]);
    let user = json!({"role": "user", "content": "a"});
    let count = |path: &str, pointer: &str, mut body: serde_json::Value| {
        body["model"] = json!("tiny");
        post(server.address, path, &body).json().pointer(pointer).and_then(serde_json::Value::as_u64).expect("a count")
    };
    let (path, tokens) = ("/v1/messages/count_tokens", "/input_tokens");
    let none = count(path, tokens, json!({"messages": [user]}));
    assert_eq!(count(path, tokens, json!({"messages": [user], "system": ""})), none);
    let (path, tokens) = ("/v1/chat/completions", "/usage/prompt_tokens");
    let empty = json!({"role": "system", "content": ""});
    assert_eq!(count(path, tokens, json!({"messages": [user], "max_tokens": 1})), none);
    assert!(count(path, tokens, json!({"messages": [empty, user], "max_tokens": 1})) > none);
}

#[test]
fn of_several_stop_strings_the_occurrence_that_ends_first_ends_the_answer() {
    let mut matcher = StopMatcher::new(&["<295", "9"]);
    assert_eq!(matcher.push("<295>"), Scan::Hit { text: "<2".into(), stop: "9".into() });
}

/// Commands whose report was a panic with a backtrace, on a full disk as on a closed pipe.
#[test]
fn every_command_on_a_full_disk_is_an_error_and_with_a_reader_that_left_ends_quietly() {
    let cache = common::default_model().parent().expect("a folder").to_owned();
    let cache = cache.to_str().expect("UTF-8");
    let bench = ["bench", "cpu", "--config", "config/cpu-test.toml", "--prompt", "8", "--decode", "2", "--rounds", "1"];
    let quick = ["--backend", "cpu", "--quick", "--sets", "1", "--profile", "f32"];
    for arguments in [
        &bench[..],
        &["bench", "memory", "--config", "config/cpu-test.toml"],
        &["generate", "x", "--max-tokens", "2", "--config", "config/cpu-test.toml"],
        &[&["check", "cancel"][..], &quick].concat(),
        &[&["check", "failure"][..], &quick].concat(),
        &["load", "list"],
        &["pull", "--cache", cache],
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("a Linux system");
        let command = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_crucible"));
            command.args(arguments).stderr(Stdio::piped());
            command
        };
        let end = command().stdout(full).output().expect("the binary");
        let error = String::from_utf8_lossy(&end.stderr).into_owned();
        assert_eq!(end.status.code(), Some(1), "{arguments:?}: {error}");
        assert!(error.contains("crucible: cannot write to standard output: No space left"), "{arguments:?}: {error}");
        assert!(!error.contains("stdout"), "{arguments:?}: {error}");
        let mut unread = command().stdout(Stdio::piped()).spawn().expect("the binary");
        drop(unread.stdout.take());
        let end = unread.wait_with_output().expect("an end");
        let error = String::from_utf8_lossy(&end.stderr).into_owned();
        assert_eq!(end.status.code(), Some(0), "{arguments:?}: {error}");
        assert!(!error.contains("stdout") && !error.contains("standard output"), "{arguments:?}: {error}");
    }
}

/// Those macros panic where nothing can be written.
#[test]
fn no_command_prints_with_a_macro_that_panics() {
    let mut folders = vec![std::path::PathBuf::from("src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = if path.extension().is_some_and(|e| e == "rs") {
                std::fs::read_to_string(&path).expect("a source file")
            } else {
                continue;
            };
            for line in text.split("#[cfg(test)]").next().unwrap_or_default().lines() {
                let code = line.split("//").next().unwrap_or_default();
                let panics = ["println!(", "eprint!(", " print!("].iter().any(|word| code.contains(word));
                assert!(!panics, "{}: {line}", path.display());
            }
        }
    }
}

#[test]
fn what_keeps_a_server_from_serving_is_told_before_a_model_is_loaded() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = format!("server.port={}", taken.local_addr().expect("an address").port());
    let tls = ["server.tls_certificate=README.md", "server.tls_key=README.md"];
    for (sets, told) in [
        (&[port.as_str()][..], "cannot listen on"),
        (&tls, "cannot read server.tls_certificate = README.md"),
        (&["telemetry.step_trace=no/such/folder/trace"], "no/such/folder/trace"),
    ] {
        let mut arguments = vec!["serve", "--config", "config/cpu-test.toml"];
        let model = ["server.port=0", "model.load_format=gguf", "model.path=no-such-model.gguf"];
        model.iter().chain(sets).for_each(|set| arguments.extend(["--set", set]));
        let error = failing(&arguments);
        assert!(error.contains(told) && !error.contains("no-such-model"), "{told}: {error}");
    }
}

#[test]
fn a_synthetic_model_larger_than_the_memory_is_an_error_that_names_the_keys() {
    let sets = ["model.geometry.hidden=32768", "model.geometry.ffn=65536"].map(|set| format!("--set {set}")).join(" ");
    for command in ["serve", "generate x", "eval README.md", "bench cpu --prompt 8 --decode 1", "bench memory"] {
        let limited = format!("ulimit -v 8000000; exec \"$0\" {command} --config config/cpu-test.toml {sets}");
        let run = Command::new("sh").args(["-c", &limited, env!("CARGO_BIN_EXE_crucible")]).output().expect("sh");
        let error = String::from_utf8_lossy(&run.stderr).into_owned();
        assert_eq!(run.status.code(), Some(1), "{command}: {error}");
        assert!(error.contains("bytes of the synthetic model's weights: lower model.geometry.layers"), "{error}");
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused_by_their_own_name() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("regression-short");
    std::fs::write(&file, "x").expect("a file");
    let file = file.to_str().expect("UTF-8");
    let tiny = |arguments: &[&str]| failing(&[arguments, &["--config", "config/cpu-test.toml"]].concat());
    let error = tiny(&["eval", file]);
    assert!(error.contains(&format!("{file} has fewer than two tokens (1 bytes)")), "{error}");
    let error = tiny(&["eval", "README.md", "--window", "513"]);
    assert!(error.contains("--window is 513, it must lie in 2..=512: the model's context is 512 tokens"), "{error}");
    for flag in ["--window", "--tokens"] {
        let error = tiny(&["eval", "README.md", flag, "1"]);
        assert!(error.contains(&format!("{flag} is 1, it must be at least 2")), "{error}");
    }
    let error = tiny(&["bench", "cpu"]);
    assert!(error.contains("--prompt 512 and --decode 64 exceed the model's context of 512 tokens"), "{error}");
}

#[test]
fn a_negative_number_is_the_value_of_its_flag_and_no_flag() {
    for (arguments, told) in [
        (&["generate", "x", "--temperature", "-1"][..], "--temperature is -1, it must lie in 0..=5"),
        (&["generate", "x", "--temperature", "1", "--top-p", "-0.5"], "--top-p is -0.5, it must lie in 0..=1"),
        (&["generate", "x", "--max-tokens", "-1"], "invalid value '-1' for '--max-tokens"),
        (&["eval", "README.md", "--window", "-2"], "invalid value '-2' for '--window"),
        (&["bench", "cpu", "--prompt", "-3"], "invalid value '-3' for '--prompt"),
        (&["check", "sampling", "--seed", "-1"], "invalid value '-1' for '--seed"),
        (&["load", "sustained", "--rate", "-1"], "invalid value '-1' for '--rate"),
    ] {
        let error = failing(arguments);
        assert!(error.contains(told), "{arguments:?}: {error}");
    }
}
