//! The client against targets that never end, never begin or never read: every exchange ends at its deadline, and nothing grows without bound.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::client::{ClientError, Fleet, fetch};
use super::dialect::{Capture, Dialect};
use super::fake;
use super::job::{CancelPoint, Job, Length, Outcome, Record, Wire};

const STREAM: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
/// Of every request here.
const TIMEOUT: Duration = Duration::from_millis(400);
/// A record that has not come by then does not come.
const LOST: Duration = Duration::from_secs(60);

fn wire(bytes: usize) -> Wire {
    let head = format!("POST /v1/generate/stream HTTP/1.1\r\nhost: t\r\ncontent-length: {bytes}\r\n\r\n");
    let bytes = [head.into_bytes(), vec![b' '; bytes]].concat();
    Wire::new(Dialect::Native, bytes, String::new(), Length::AtMost(1 << 20))
}

fn ask(address: SocketAddr, job: Job) -> Record {
    let fleet = Fleet::start(address, 1, Capture::Outputs, TIMEOUT);
    fleet.submit(job);
    fleet.next_within(LOST).expect("the request ends")
}

fn failure(address: SocketAddr, wire: Wire) -> String {
    match ask(address, Job::now(0, wire)).outcome {
        Outcome::Failed { message } => message,
        other => panic!("{other:?}"),
    }
}

/// Writes `begin` and then `piece` until the client has gone.
fn flood(begin: &'static [u8], piece: Vec<u8>) -> SocketAddr {
    fake::target(move |stream| {
        fake::request(stream);
        let _ = stream.write_all(begin);
        while stream.write_all(&piece).is_ok() {}
    })
}

#[test]
fn a_target_that_always_sends_starves_neither_the_deadline_nor_a_planned_cancellation() {
    let comments = flood(STREAM, b": still here\n".repeat(1_000));
    let message = failure(comments, wire(2));
    assert!(message.starts_with("no end within 0 s; --timeout-s"), "{message}");
    let cancelled = Job { cancel: Some(CancelPoint::AfterMs(20)), ..Job::now(0, wire(2)) };
    assert_eq!(ask(comments, cancelled).outcome, Outcome::Cancelled);
}

#[test]
fn a_head_without_an_end_is_an_error() {
    let message = failure(flood(b"HTTP/1.1 200 OK\r\n", b"x-more: and more\r\n".repeat(100)), wire(2));
    assert!(message.contains("head exceeds 65536 bytes"), "{message}");
}

#[test]
fn a_line_and_an_event_without_an_end_are_errors_and_fill_no_memory() {
    for piece in [b"data: and no line ends ".to_vec(), b"data: and no event ends\n".to_vec()] {
        let message = failure(flood(STREAM, piece.repeat(1_000)), wire(2));
        assert!(message.contains("event of the stream exceeds 4194304 bytes"), "{message}");
    }
}

#[test]
fn a_target_that_is_silent_or_does_not_read_meets_the_deadline() {
    let silent = fake::target(|stream| {
        fake::request(stream);
        std::thread::park();
    });
    assert!(failure(silent, wire(2)).starts_with("no end within"));
    // More than the system's buffers between the two take.
    let deaf = fake::target(|_| std::thread::park());
    let message = failure(deaf, wire(64 << 20));
    assert!(message.starts_with("the target does not read the request within"), "{message}");
}

fn drip(stream: &mut TcpStream, head: &[u8]) {
    fake::request(stream);
    let _ = stream.write_all(head);
    while stream.write_all(b" ").is_ok() {
        std::thread::sleep(Duration::from_millis(20)); // faster than any timeout of a single read
    }
}

#[test]
fn a_small_exchange_ends_at_its_deadline_and_its_body_is_bounded() {
    let ask = |address| fetch(address, b"GET /stats HTTP/1.1\r\nhost: t\r\n\r\n", TIMEOUT);
    let body: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n";
    assert!(matches!(ask(fake::target(move |stream| drip(stream, body))), Err(ClientError::Late(_))));
    assert!(matches!(ask(fake::target(|stream| drip(stream, b"HTTP/1.1 200 OK\r\nx:"))), Err(ClientError::Late(_))));
    let silent = ask(fake::target(|stream| {
        let _ = stream.read(&mut [0]);
        std::thread::park();
    }));
    assert_eq!(silent.expect_err("silence").to_string(), "no whole answer within 400ms");
    let address = flood(b"HTTP/1.1 200 OK\r\n\r\n", vec![b' '; 65_536]);
    let endless = fetch(address, b"GET /stats HTTP/1.1\r\nhost: t\r\n\r\n", LOST);
    assert!(matches!(endless, Err(ClientError::TooLong)));
}
