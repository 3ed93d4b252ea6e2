//! Clients that misbehave and disks that are full, against the real binary: its memory stays bounded, everybody else is served, and
//! every page comes back. Faults inside the process are in faults_injected.rs.

mod http_support;

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use http_support::binary::Binary;
use http_support::client::{get, post, send};
use http_support::{at_rest, until};
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};

/// A tiny model with a context long enough to fill every buffer of the system between server and client.
const LONG: [&str; 4] =
    ["model.geometry.context=65536", "kv.pages=8192", "limits.max_new_tokens=65536", "executor.threads=1"];

fn long(overrides: &[&str]) -> Binary {
    Binary::tiny(&[&LONG[..], overrides].concat())
}

/// About a kilobyte an event. With 20 alternatives a token; one body holds 49,932 of those, a stream any number.
fn long_answer(tokens: usize) -> Value {
    json!({"prompt": "abc", "max_tokens": tokens, "ignore_eos": true, "logprobs": 20})
}

fn stats(address: SocketAddr) -> Value {
    get(address, "/stats").json()
}

fn answers(address: SocketAddr) -> bool {
    post(address, "/v1/generate", &json!({"prompt": "abc", "max_tokens": 4})).status == 200
}

/// Resident memory of a process, bytes.
fn resident(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a Linux process");
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).expect("VmRSS");
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).expect("a number") * 1024
}

/// Open sockets of a process.
fn sockets(process: u32) -> usize {
    let open = std::fs::read_dir(format!("/proc/{process}/fd")).expect("a Linux process");
    open.flatten()
        .filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket")))
        .count()
}

/// Whether a process still holds the server's socket of the connection from a client's port. The system may go on sending what was
/// written to a closed one, which belongs to no process (inode 0).
fn serves(server: u16, client: u16) -> bool {
    let port = |address: &str| address.rsplit(':').next().and_then(|port| u16::from_str_radix(port, 16).ok());
    let table = std::fs::read_to_string("/proc/net/tcp").expect("a Linux system");
    table.lines().skip(1).any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        port(fields[1]) == Some(server) && port(fields[2]) == Some(client) && fields[9] != "0"
    })
}

/// A connection whose system takes only a few kilobytes that nobody has read.
fn narrow(address: SocketAddr) -> Socket {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).expect("a socket");
    socket.set_recv_buffer_size(4_096).expect("a small buffer");
    socket.connect(&address.into()).expect("connected");
    socket
}

fn request(path: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Everything until the server has closed, at most twenty seconds; a reset is an end too.
fn until_closed(stream: &mut TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let (mut seen, mut buffer) = (Vec::new(), [0; 65_536]);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return seen,
            Ok(n) => seen.extend_from_slice(&buffer[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => panic!("the server keeps the connection open"),
            Err(_) => return seen,
        }
    }
}

/// What a server may grow by for one reader that takes nothing or little, beside the bound of its stream; the whole answer is four times
/// as much.
const GROWTH_BYTES_MAX: u64 = 16 << 20;

fn grown(server: &Binary, before: u64) -> u64 {
    resident(server.id()).saturating_sub(before)
}

#[test]
fn a_client_that_reads_byte_by_byte_is_cut_within_bounded_memory_and_delays_nobody() {
    let server = long(&["server.stream_buffer_bytes=65536"]);
    assert!(answers(server.address));
    let before = resident(server.id());
    let mut slow: TcpStream = narrow(server.address).into();
    slow.write_all(&request("/v1/generate/stream", &long_answer(60_000))).expect("sent");
    slow.read_exact(&mut [0]).expect("its first byte");
    // A byte for every answer of somebody else's, until the cut.
    until("the cut", || {
        let _ = slow.read(&mut [0]); // the server may have closed it by now
        assert!(answers(server.address), "others are served meanwhile");
        stats(server.address)["cancelled_requests"] == 1 && at_rest(server.address)
    });
    let log = server.log.lock().expect("no panic").clone();
    assert!(log.contains("cut: the client reads too slowly"), "{log}");
    let grown = grown(&server, before);
    assert!(grown < GROWTH_BYTES_MAX, "{grown} bytes more for one slow reader");
    let rest = until_closed(&mut slow);
    assert!(!String::from_utf8_lossy(&rest).contains("event: done"), "a cut answer has no end");
}

/// A client that takes nothing of a long answer, whose stream the server bounds by so many bytes; its log once the request is cancelled and
/// the connection closed.
fn never_reads(server: &Binary, tokens: usize, stream_bytes: u64) -> String {
    assert!(answers(server.address));
    let before = resident(server.id());
    let held = narrow(server.address);
    (&held).write_all(&request("/v1/generate/stream", &long_answer(tokens))).expect("sent");
    until("it is inside", || stats(server.address)["accepted_requests"] == 2);
    let client = held.local_addr().expect("a local address").as_socket_ipv4().expect("an IPv4 address").port();
    let mut most = 0;
    until("the cut", || {
        most = most.max(grown(server, before));
        stats(server.address)["cancelled_requests"] == 1 && at_rest(server.address)
    });
    until("its socket is closed", || !serves(server.address.port(), client));
    assert!(most < stream_bytes + GROWTH_BYTES_MAX, "{most} bytes more for one client that takes nothing");
    assert!(answers(server.address));
    server.log.lock().expect("no panic").clone()
}

#[test]
fn a_client_that_never_reads_is_cut_at_the_bound_of_its_stream_within_bounded_memory() {
    // The bound is full some tokens after the connection is, long before a write of it has waited too long.
    let server = long(&["server.stream_buffer_bytes=65536", "server.write_timeout_ms=5000"]);
    let log = never_reads(&server, 60_000, 65_536);
    assert!(log.contains("cut: the client reads too slowly"), "{log}");
}

#[test]
fn a_client_that_never_reads_a_stream_within_its_bound_is_cut_by_the_write_timeout() {
    // The answer's 20 MB fit the bound and no buffer of the system: only the write timeout is left to end the connection.
    let server = long(&["server.stream_buffer_bytes=33554432", "server.write_timeout_ms=1000"]);
    let log = never_reads(&server, 20_000, 33_554_432);
    assert!(!log.contains("cut: the client reads too slowly"), "{log}");
}

#[test]
fn a_client_whose_host_vanished_is_noticed_while_it_streams_and_while_it_waits() {
    let server = long(&["server.write_timeout_ms=1000", "limits.max_batch=2"]);
    for path in ["/v1/generate/stream", "/v1/generate"] {
        let cancelled = stats(server.address)["cancelled_requests"].as_u64().expect("a number");
        let vanishing = narrow(server.address);
        (&vanishing).write_all(&request(path, &long_answer(45_000))).expect("sent");
        until("it is resident", || stats(server.address)["active_requests"] == 1);
        // From here on the client's system drops whatever arrives, unanswered, as if its cable were cut.
        vanishing.attach_filter(&[socket2::SockFilter::new(6, 0, 0, 0)]).expect("a filter");
        until("its request is cancelled", || stats(server.address)["cancelled_requests"] == cancelled + 1);
        until("every page is back", || at_rest(server.address));
    }
}

#[test]
fn a_client_that_closes_its_half_has_left() {
    let server = long(&[]);
    let half = narrow(server.address);
    (&half).write_all(&request("/v1/generate", &long_answer(45_000))).expect("sent");
    until("it is resident", || stats(server.address)["active_requests"] == 1);
    half.shutdown(std::net::Shutdown::Write).expect("half closed");
    until("its request is cancelled", || stats(server.address)["cancelled_requests"] == 1 && at_rest(server.address));
}

#[test]
fn a_client_that_leaves_behind_the_bytes_of_further_requests_has_left() {
    let server = long(&["limits.max_batch=1"]);
    // The HTTP library reads ahead up to a bound: seen, beyond it the end of what the client sent was not seen.
    let small = b"GET /ready HTTP/1.1\r\nhost: t\r\n\r\n".repeat(12_500);
    for further in [request("/v1/generate", &json!({"prompt": "b".repeat(400_000)})), small] {
        let cancelled = stats(server.address)["cancelled_requests"].as_u64().expect("a number");
        let ask = |path: &str| {
            let mut client = TcpStream::connect(server.address).expect("connected");
            client.write_all(&request(path, &long_answer(45_000))).expect("sent");
            client
        };
        let running = ask("/v1/generate");
        until("it is resident", || stats(server.address)["active_requests"] == 1);
        let waiting = ask("/v1/generate/stream");
        until("it waits", || stats(server.address)["queued_requests"] == 1);
        for mut client in [waiting, running] {
            client.write_all(&further).expect("further requests");
        }
        until("both are cancelled", || stats(server.address)["cancelled_requests"] == cancelled + 2);
        until("every page is back", || at_rest(server.address));
    }
    assert_eq!(stats(server.address)["completed_requests"], 0);
}

#[test]
fn a_client_that_goes_on_asking_while_it_waits_gets_every_answer() {
    let server = long(&[]);
    let mut client = TcpStream::connect(server.address).expect("connected");
    client.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let mut sent = request("/v1/generate", &json!({"prompt": "abc", "max_tokens": 2_000, "ignore_eos": true}));
    sent.extend(b"GET /ready HTTP/1.1\r\nhost: t\r\n\r\n".repeat(9_999));
    sent.extend(b"GET /ready HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n");
    let mut writer = client.try_clone().expect("a second handle");
    let writing = std::thread::spawn(move || writer.write_all(&sent).expect("sent"));
    let mut answers = Vec::new();
    client.read_to_end(&mut answers).expect("every answer");
    writing.join().expect("no panic");
    let answers = String::from_utf8(answers).expect("UTF-8");
    assert_eq!(answers.matches("HTTP/1.1 200").count(), 10_001);
}

#[test]
fn ten_thousand_idle_connections_hold_little_memory_and_delay_neither_requests_nor_the_drain() {
    let hard = raise_open_files();
    let most = 10_000.min(hard.saturating_sub(500));
    if most < 10_000 {
        // Past the capture of the test harness: what was scaled down must be seen.
        let _ = writeln!(std::io::stderr(), "scaled down: {most} idle connections, the limit of open files is {hard}");
    }
    let mut server = Binary::tiny(&["server.keep_alive_ms=600000"]);
    assert!(answers(server.address));
    let before = resident(server.id());
    let connections: Vec<TcpStream> = (0..most).map(|_| kept_alive(server.address)).collect();
    assert!(sockets(server.id()) >= most, "{} sockets", sockets(server.id()));
    assert!(answers(server.address), "a request among idle connections");
    let each = resident(server.id()).saturating_sub(before) / most as u64;
    assert!(each < 32 << 10, "{each} bytes for an idle connection");
    server.terminate();
    assert_eq!(server.wait(Duration::from_secs(20)).code(), Some(0));
    drop(connections);
}

/// Raises this process's limit of open files, which the server inherits, as far as the system lets it.
fn raise_open_files() -> usize {
    let limit = |kind: &str| {
        let output = Command::new("sh").args(["-c", &format!("ulimit -{kind}n")]).output().expect("sh");
        String::from_utf8_lossy(&output.stdout).trim().parse::<usize>().unwrap_or(usize::MAX)
    };
    let hard = limit("H");
    if limit("S") < hard {
        let process = std::process::id().to_string();
        let raise = Command::new("prlimit").args(["--pid", &process, &format!("--nofile={hard}:{hard}")]).status();
        return if raise.is_ok_and(|status| status.success()) { hard } else { limit("S") };
    }
    hard
}

/// A connection that has asked once and stays.
fn kept_alive(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    let mut answer = [0; 4_096];
    let read = stream.read(&mut answer).expect("an answer");
    assert!(answer[..read].starts_with(b"HTTP/1.1 200"));
    stream
}

#[test]
fn slow_heads_and_slow_bodies_end_at_their_timers() {
    let server = Binary::tiny(&["server.header_timeout_ms=1000", "server.body_timeout_ms=500"]);
    let start = Instant::now();
    let mut stream = TcpStream::connect(server.address).expect("connected");
    let mut writer = stream.try_clone().expect("a second handle");
    let drip = std::thread::spawn(move || {
        for byte in b"GET /health HTTP/1.1\r\nx-long: ".iter().chain([b'a'; 400].iter()) {
            if writer.write_all(&[*byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let answer = until_closed(&mut stream);
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&answer));
    assert!(start.elapsed() < Duration::from_secs(15), "the whole head would take 20 s");
    drip.join().expect("no panic");

    let mut stream = TcpStream::connect(server.address).expect("connected");
    let head =
        b"POST /v1/generate HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{";
    stream.write_all(head).expect("sent");
    let answer = String::from_utf8(until_closed(&mut stream)).expect("text");
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("request_timeout"), "{answer}");
    assert!(answers(server.address));
}

#[test]
fn a_connection_whose_chunked_body_is_never_finished_is_closed_after_its_answer() {
    let server = Binary::tiny(&["server.body_timeout_ms=500", "server.body_limit_bytes=1024"]);
    let json = "content-type: application/json\r\n";
    let large = format!("800\r\n{}\r\n", "x".repeat(2_048));
    let cases = [
        ("POST /v1/generate", "content-type: text/plain\r\n", "1\r\n{\r\n", "415"),
        ("POST /v1/generate", json, "1\r\n{\r\n", "408"),
        ("POST /v1/generate", json, large.as_str(), "413"),
        ("POST /nowhere", json, "1\r\n{\r\n", "404"),
        ("GET /health", "", "1\r\n{\r\n", "200"),
    ];
    for (line, headers, body, status) in cases {
        let mut stream = TcpStream::connect(server.address).expect("connected");
        let head = format!("{line} HTTP/1.1\r\nhost: t\r\n{headers}transfer-encoding: chunked\r\n\r\n{body}");
        stream.write_all(head.as_bytes()).expect("sent");
        let answer = String::from_utf8(until_closed(&mut stream)).expect("text");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{line}: {answer}");
    }
    // A whole one leaves its connection open for the next request.
    let mut stream = TcpStream::connect(server.address).expect("connected");
    for _ in 0..2 {
        let body = "{\"prompt\":\"abc\",\"max_tokens\":2}";
        let head = format!(
            "POST /v1/generate HTTP/1.1\r\nhost: t\r\n{json}transfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).expect("sent");
        let mut answer = [0; 4_096];
        let read = stream.read(&mut answer).expect("an answer");
        assert!(answer[..read].starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer[..read]));
    }
}

#[test]
fn a_full_disk_for_the_log_and_the_step_trace_costs_only_their_lines() {
    if !std::path::Path::new("/dev/full").exists() {
        let _ = writeln!(std::io::stderr(), "skipped 1 check: no /dev/full to write to");
        return;
    }
    let full = || Stdio::from(OpenOptions::new().write(true).open("/dev/full").expect("/dev/full"));
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut server = Command::new(env!("CARGO_BIN_EXE_crucible"))
        .args(["serve", "--config", "config/cpu-test.toml", "--set", &format!("server.port={port}")])
        .args(["--set", "telemetry.step_trace=/dev/full", "--set", "telemetry.log_level=debug"])
        .stdout(full())
        .stderr(full())
        .spawn()
        .expect("the binary");
    until("it listens", || TcpStream::connect(address).is_ok());
    for _ in 0..3 {
        let answer = post(address, "/v1/generate", &json!({"prompt": "abc", "max_tokens": 50, "ignore_eos": true}));
        assert_eq!((answer.status, &answer.json()["tokens_generated"]), (200, &json!(50)));
    }
    assert_eq!(send(address, "GET", "/health", &[], &[]).response().status, 200);
    let ended = Command::new("kill").args(["-TERM", &server.id().to_string()]).status().expect("kill");
    assert!(ended.success());
    assert_eq!(server.wait().expect("an end").code(), Some(0));
}
