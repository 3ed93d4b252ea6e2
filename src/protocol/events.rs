//! An incremental parser of server-sent events (WHATWG HTML, section 9.2.6), for every client in this crate. Pure: bytes in, events out.
//!
//! Events come out the same wherever the bytes are cut. The buffers are reused, so a stream in steady state allocates nothing.
//! `id` and `retry` fields are skipped: these clients never reconnect. What an unfinished event holds is the caller's to bound, by `held`.

/// One dispatched event; it borrows the parser's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SseEvent<'a> {
    /// The `event` field, empty when the stream gave none.
    pub name: &'a [u8],
    /// The `data` lines, joined by line feeds.
    pub data: &'a [u8],
}

/// The parser's state between two pieces of a stream.
#[derive(Debug, Default)]
pub struct SseParser {
    /// The beginning of a line whose end has not arrived.
    partial: Vec<u8>,
    name: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    after_carriage_return: bool,
    begun: bool,
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

impl SseParser {
    /// A parser at the start of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next piece of the stream and hands every event that it completes to `sink`, in order.
    pub fn feed(&mut self, mut bytes: &[u8], sink: &mut impl FnMut(SseEvent<'_>)) {
        while !bytes.is_empty() {
            if std::mem::take(&mut self.after_carriage_return) && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let Some(end) = memchr::memchr2(b'\n', b'\r', bytes) else {
                self.partial.extend_from_slice(bytes);
                return;
            };
            self.after_carriage_return = bytes[end] == b'\r';
            if self.partial.is_empty() {
                self.line(&bytes[..end], sink);
            } else {
                let mut whole = std::mem::take(&mut self.partial);
                whole.extend_from_slice(&bytes[..end]);
                self.line(&whole, sink);
                whole.clear();
                self.partial = whole;
            }
            bytes = &bytes[end + 1..];
        }
    }

    /// Bytes of an event that is not complete: what a stream without line ends makes grow.
    pub fn held(&self) -> usize {
        self.partial.len() + self.name.len() + self.data.len()
    }

    fn line(&mut self, mut line: &[u8], sink: &mut impl FnMut(SseEvent<'_>)) {
        if !std::mem::replace(&mut self.begun, true) {
            line = line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line);
        }
        if line.is_empty() {
            self.dispatch(sink);
            return;
        }
        let (field, value) = match memchr::memchr(b':', line) {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (line, &[][..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"data" => {
                if self.has_data {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(value);
                self.has_data = true;
            }
            b"event" => {
                self.name.clear();
                self.name.extend_from_slice(value);
            }
            _ => {} // a comment (empty field name), an id, a retry or an unknown field
        }
    }

    fn dispatch(&mut self, sink: &mut impl FnMut(SseEvent<'_>)) {
        if std::mem::take(&mut self.has_data) {
            sink(SseEvent { name: &self.name, data: &self.data });
        }
        self.name.clear();
        self.data.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Owned = (Vec<u8>, Vec<u8>);

    fn parse(pieces: &[&[u8]]) -> Vec<Owned> {
        let mut parser = SseParser::new();
        let mut out = Vec::new();
        for piece in pieces {
            parser.feed(piece, &mut |e| out.push((e.name.to_vec(), e.data.to_vec())));
        }
        out
    }

    fn event(name: &str, data: &str) -> Owned {
        (name.as_bytes().to_vec(), data.as_bytes().to_vec())
    }

    const STREAM: &[u8] =
        b"\xef\xbb\xbfevent: token\ndata: {\"token_id\":7}\n\n: keep-alive\n\r\ndata:one\r\ndata: two\r\n\r\n\
        id: 4\rretry: 10\revent:done\rdata\r\rdata:  \xe6\xbc\xa2\n\nevent: lost\n\ndata: unfinished";

    fn expected() -> Vec<Owned> {
        vec![event("token", "{\"token_id\":7}"), event("", "one\ntwo"), event("done", ""), event("", " 漢")]
    }

    #[test]
    fn lines_end_with_lf_cr_or_crlf_and_only_events_with_data_are_dispatched() {
        assert_eq!(parse(&[STREAM]), expected());
    }

    #[test]
    fn events_come_out_the_same_under_every_split_in_three() {
        for first in 0..=STREAM.len() {
            for second in first..=STREAM.len() {
                let pieces = [&STREAM[..first], &STREAM[first..second], &STREAM[second..]];
                assert_eq!(parse(&pieces), expected(), "cut at {first} and {second}");
            }
        }
        let single: Vec<&[u8]> = STREAM.chunks(1).collect();
        assert_eq!(parse(&single), expected());
    }

    #[test]
    fn what_an_unfinished_event_holds_is_told() {
        let mut parser = SseParser::new();
        parser.feed(b"event: ab\ndata: 0123\n", &mut |_| panic!("it is not complete"));
        assert_eq!(parser.held(), 6);
        parser.feed(b"data", &mut |_| panic!("it is not complete"));
        assert_eq!(parser.held(), 10);
        parser.feed(b": 4\n\n", &mut |_| {});
        assert_eq!(parser.held(), 0);
    }

    #[test]
    fn a_stream_in_steady_state_keeps_its_buffers() {
        let mut parser = SseParser::new();
        let mut seen = 0;
        parser.feed(b"event: token\ndata: 0123456789\n\n", &mut |_| seen += 1);
        let before = (parser.name.capacity(), parser.data.capacity());
        for _ in 0..1_000 {
            parser.feed(b"event: token\ndata: 0123456789\n\n", &mut |_| seen += 1);
        }
        assert_eq!(seen, 1_001);
        assert_eq!(before, (parser.name.capacity(), parser.data.capacity()));
    }
}
