//! Server-sent events: bytes in, whole events out, by the parsing rules of the HTML standard (section 9.2.6) as far as a client of
//! this API needs them: `event` and `data` fields, comments, LF and CRLF, a byte-order mark. Pure.

/// One dispatched event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SseEvent {
    /// Its name, `message` when none was given.
    pub name: String,
    /// Its data; several `data` lines are joined by LF.
    pub data: String,
}

/// More than one line may hold, in bytes; a server that sends more is not one of ours.
const LINE_BYTES_MAX: usize = 1 << 20;

/// The stream is no event stream.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// A line passed [`LINE_BYTES_MAX`].
    #[error("the server sent a line of more than {LINE_BYTES_MAX} bytes; check that the target is a crucible server")]
    LineTooLong,
}

/// Collects bytes until an event is complete.
#[derive(Debug, Default)]
pub struct SseParser {
    line: Vec<u8>,
    name: String,
    data: Option<String>,
}

impl SseParser {
    /// Takes the next bytes, cut anywhere, and returns the events that they complete.
    ///
    /// # Errors
    /// A line without an end.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<SseEvent>, SseError> {
        let mut events = Vec::new();
        for &byte in bytes {
            if byte != b'\n' {
                if self.line.len() == LINE_BYTES_MAX {
                    return Err(SseError::LineTooLong);
                }
                self.line.push(byte);
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let line = line.strip_suffix(b"\r").unwrap_or(&line);
            let line = line.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(line);
            events.extend(self.take_line(&String::from_utf8_lossy(line)));
        }
        Ok(events)
    }

    /// One line without its end; a blank one dispatches.
    fn take_line(&mut self, line: &str) -> Option<SseEvent> {
        if line.is_empty() {
            let name = std::mem::take(&mut self.name);
            let name = if name.is_empty() { "message".to_owned() } else { name };
            return self.data.take().map(|data| SseEvent { name, data });
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => self.name = value.to_owned(),
            "data" => match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                none => *none = Some(value.to_owned()),
            },
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str =
        ": waiting\n\nevent: token\ndata: {\"text\":\"né\"}\n\nevent: token\r\ndata: a\r\ndata: b\r\n\r\ndata: x\n\n";

    fn expected() -> Vec<SseEvent> {
        let event = |name: &str, data: &str| SseEvent { name: name.to_owned(), data: data.to_owned() };
        vec![event("token", "{\"text\":\"né\"}"), event("token", "a\nb"), event("message", "x")]
    }

    #[test]
    fn events_are_the_same_wherever_the_bytes_are_cut() {
        for size in 1..STREAM.len() {
            let mut parser = SseParser::default();
            let events: Vec<_> = STREAM.as_bytes().chunks(size).flat_map(|chunk| parser.push(chunk).unwrap()).collect();
            assert_eq!(events, expected(), "chunks of {size} bytes");
        }
    }

    #[test]
    fn a_comment_or_a_name_without_data_dispatches_nothing() {
        let mut parser = SseParser::default();
        assert_eq!(parser.push(b": ping\n\nevent: token\n\n").unwrap(), []);
        assert_eq!(parser.push(b"data: 1\n\n").unwrap()[0].name, "message", "the name of a dropped event is not kept");
    }

    #[test]
    fn an_endless_line_is_an_error_and_not_memory() {
        let mut parser = SseParser::default();
        let block = vec![b'x'; LINE_BYTES_MAX];
        assert_eq!(parser.push(&block).unwrap(), []);
        assert_eq!(parser.push(b"x"), Err(SseError::LineTooLong));
    }
}
