//! Server-sent events: frames as `Bytes`, each built once and handed to the socket without another copy.

use bytes::Bytes;
use serde::Serialize;

/// A comment that keeps proxies from closing a silent stream.
pub const KEEP_ALIVE: Bytes = Bytes::from_static(b": keep-alive\n\n");

/// OpenAI's end of a stream.
pub const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// `data: <json>`.
pub fn data<T: Serialize>(payload: &T) -> Bytes {
    frame("", payload)
}

/// `event: <name>` and `data: <json>`.
pub fn event<T: Serialize>(name: &str, payload: &T) -> Bytes {
    frame(name, payload)
}

fn frame<T: Serialize>(name: &str, payload: &T) -> Bytes {
    let mut out = Vec::with_capacity(192);
    if !name.is_empty() {
        out.extend_from_slice(b"event: ");
        out.extend_from_slice(name.as_bytes());
        out.push(b'\n');
    }
    out.extend_from_slice(b"data: ");
    // JSON escapes line breaks, so the payload is one line. Writing plain data to memory cannot fail; a payload that did would
    // be cut to an empty object, never to a broken frame.
    let start = out.len();
    if serde_json::to_writer(&mut out, payload).is_err() {
        out.truncate(start);
        out.extend_from_slice(b"{}");
    }
    out.extend_from_slice(b"\n\n");
    Bytes::from(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_break_in_a_payload_does_not_break_the_frame() {
        assert_eq!(event("token", &"a\nb"), "event: token\ndata: \"a\\nb\"\n\n");
        assert_eq!(data(&1), "data: 1\n\n");
    }
}
