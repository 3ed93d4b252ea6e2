//! An incremental decoder of HTTP/1.1 responses (RFC 9112): status, the few headers that a load generator needs, and the body
//! freed of its framing. Pure: no socket, no clock. It expects answers to POST and GET, never to HEAD or CONNECT.

/// Longest head (with its interim responses and trailers) or chunk-size line that is accepted, in bytes.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// Why a response cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// Not an HTTP/1.x status line.
    #[error("the target does not answer in http/1.1; check the url")]
    NotHttp,
    /// Over the bound on heads.
    #[error("the response head exceeds 65536 bytes; is the target an http server?")]
    HeadTooLong,
    /// A content length or chunk size that is no number, or a chunk without its end.
    #[error("the response body is framed wrongly")]
    BadFraming,
}

/// What the head of a response says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Status code.
    pub status: u16,
    /// The server closes the connection after this response.
    pub closes: bool,
    /// `Retry-After` as it stands.
    pub retry_after: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Head,
    /// Bytes of a body of known length still to come.
    Length(u64),
    UntilClose,
    ChunkSize,
    /// Bytes of this chunk still to come.
    Chunk(u64),
    ChunkEnd,
    Trailer,
    Done,
}

/// How the head says that the body ends; chunking outranks a length (RFC 9112, section 6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    UntilClose,
    Length(u64),
    Chunked,
}

/// The decoder of one response; `reset` makes it ready for the next on the same connection.
#[derive(Debug)]
pub struct ResponseDecoder {
    state: State,
    line: Vec<u8>,
    /// Bytes of head and trailer lines so far.
    head_bytes: usize,
    head: Head,
    framing: Framing,
    has_head: bool,
}

impl Default for ResponseDecoder {
    fn default() -> Self {
        Self {
            state: State::Head,
            line: Vec::new(),
            head_bytes: 0,
            head: Head::default(),
            framing: Framing::UntilClose,
            has_head: false,
        }
    }
}

impl ResponseDecoder {
    /// A decoder at the start of a response.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets the response, keeps the buffers.
    pub fn reset(&mut self) {
        self.head_bytes = 0;
        self.begin();
    }

    fn begin(&mut self) {
        self.state = State::Head;
        self.line.clear();
        self.head = Head::default();
        self.framing = Framing::UntilClose;
        self.has_head = false;
    }

    /// The head, once it is complete.
    pub fn head(&self) -> Option<&Head> {
        self.has_head.then_some(&self.head)
    }

    /// The whole response has arrived.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// The connection ended: true when that completes the response (a body that ends with the connection).
    pub fn end_of_input(&mut self) -> bool {
        if self.state == State::UntilClose {
            self.state = State::Done;
        }
        self.is_done()
    }

    /// Takes received bytes and hands the pieces of the body to `body`, each with the status. Bytes behind the response are dropped:
    /// this client never pipelines.
    ///
    /// # Errors
    /// The response is not HTTP/1.x or its framing is wrong.
    pub fn feed(&mut self, mut bytes: &[u8], body: &mut impl FnMut(u16, &[u8])) -> Result<(), HttpError> {
        while !bytes.is_empty() {
            match self.state {
                State::Head => {
                    let Some(line) = take_line(&mut self.line, &mut bytes)? else { return Ok(()) };
                    self.count(&line)?;
                    self.head_line(&line)?;
                    self.recycle(line);
                }
                State::Length(left) => {
                    let left = self.pass(left, &mut bytes, body);
                    self.state = if left == 0 { State::Done } else { State::Length(left) };
                }
                State::UntilClose => {
                    body(self.head.status, bytes);
                    return Ok(());
                }
                State::ChunkSize => {
                    let Some(line) = take_line(&mut self.line, &mut bytes)? else { return Ok(()) };
                    let size = chunk_size(&line)?;
                    self.state = if size == 0 { State::Trailer } else { State::Chunk(size) };
                    self.recycle(line);
                }
                State::Chunk(left) => {
                    let left = self.pass(left, &mut bytes, body);
                    self.state = if left == 0 { State::ChunkEnd } else { State::Chunk(left) };
                }
                State::ChunkEnd => {
                    let Some(line) = take_line(&mut self.line, &mut bytes)? else { return Ok(()) };
                    if !line.is_empty() {
                        return Err(HttpError::BadFraming);
                    }
                    self.state = State::ChunkSize;
                    self.recycle(line);
                }
                State::Trailer => {
                    let Some(line) = take_line(&mut self.line, &mut bytes)? else { return Ok(()) };
                    self.count(&line)?;
                    if line.is_empty() {
                        self.state = State::Done;
                    }
                    self.recycle(line);
                }
                State::Done => return Ok(()),
            }
        }
        Ok(())
    }

    fn pass(&self, left: u64, bytes: &mut &[u8], body: &mut impl FnMut(u16, &[u8])) -> u64 {
        let here = left.min(bytes.len() as u64);
        let (piece, rest) = bytes.split_at(here as usize);
        body(self.head.status, piece);
        *bytes = rest;
        left - here
    }

    /// Counts a line of the head or the trailers: a head without an end is an error before it fills anything.
    fn count(&mut self, line: &[u8]) -> Result<(), HttpError> {
        self.head_bytes += line.len() + 1;
        if self.head_bytes > HEAD_BYTES_MAX { Err(HttpError::HeadTooLong) } else { Ok(()) }
    }

    fn recycle(&mut self, mut line: Vec<u8>) {
        line.clear();
        self.line = line;
    }

    fn head_line(&mut self, line: &[u8]) -> Result<(), HttpError> {
        if self.head.status == 0 {
            self.head.status = status_of(line)?;
            self.head.closes = line.starts_with(b"HTTP/1.0");
            return Ok(());
        }
        if line.is_empty() {
            self.head_end();
            return Ok(());
        }
        let Some(colon) = line.iter().position(|&b| b == b':') else { return Err(HttpError::NotHttp) };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if name.eq_ignore_ascii_case(b"content-length") {
            let length = std::str::from_utf8(value).ok().and_then(|v| v.parse().ok()).ok_or(HttpError::BadFraming)?;
            if self.framing != Framing::Chunked {
                self.framing = Framing::Length(length);
            }
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            self.framing = Framing::Chunked;
        } else if name.eq_ignore_ascii_case(b"connection") {
            self.head.closes = value.eq_ignore_ascii_case(b"close");
        } else if name.eq_ignore_ascii_case(b"retry-after") {
            self.head.retry_after = Some(String::from_utf8_lossy(value).into_owned());
        }
        Ok(())
    }

    fn head_end(&mut self) {
        let status = self.head.status;
        if (100..200).contains(&status) {
            self.begin(); // an interim response; the final one follows
            return;
        }
        self.has_head = true;
        self.state = match self.framing {
            _ if status == 204 || status == 304 => State::Done,
            Framing::Chunked => State::ChunkSize,
            Framing::Length(0) => State::Done,
            Framing::Length(length) => State::Length(length),
            Framing::UntilClose => {
                self.head.closes = true;
                State::UntilClose
            }
        };
    }
}

/// Moves a line without its CRLF (or LF) out of `bytes`; what is there of an unfinished one waits in `partial`.
fn take_line(partial: &mut Vec<u8>, bytes: &mut &[u8]) -> Result<Option<Vec<u8>>, HttpError> {
    let end = memchr::memchr(b'\n', bytes);
    let (here, rest) = bytes.split_at(end.map_or(bytes.len(), |e| e + 1));
    if partial.len() + here.len() > HEAD_BYTES_MAX {
        return Err(HttpError::HeadTooLong);
    }
    partial.extend_from_slice(here);
    *bytes = rest;
    if end.is_none() {
        return Ok(None);
    }
    let mut line = std::mem::take(partial);
    line.pop();
    if line.last() == Some(&b'\r') {
        line.pop();
    }
    Ok(Some(line))
}

fn status_of(line: &[u8]) -> Result<u16, HttpError> {
    let rest = line.strip_prefix(b"HTTP/1.").ok_or(HttpError::NotHttp)?;
    let code = rest.get(2..5).and_then(|c| std::str::from_utf8(c).ok()).and_then(|c| c.parse().ok());
    code.filter(|c| (100..600).contains(c)).ok_or(HttpError::NotHttp)
}

fn chunk_size(line: &[u8]) -> Result<u64, HttpError> {
    let digits = line.split(|&b| b == b';').next().unwrap_or(line).trim_ascii();
    let digits = std::str::from_utf8(digits).map_err(|_| HttpError::BadFraming)?;
    u64::from_str_radix(digits, 16).map_err(|_| HttpError::BadFraming)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(pieces: &[&[u8]]) -> (Option<Head>, Vec<u8>, bool) {
        let mut decoder = ResponseDecoder::new();
        let mut body = Vec::new();
        for piece in pieces {
            decoder.feed(piece, &mut |_, b| body.extend_from_slice(b)).expect("a well-formed response");
        }
        (decoder.head().cloned(), body, decoder.is_done())
    }

    const CHUNKED: &[u8] =
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 99\r\nTransfer-Encoding: chunked\r\n\r\n\
        5\r\nhello\r\nC;ext=1\r\n to\r\nyou all\r\n0\r\ntrailer: x\r\n\r\n";
    const COUNTED: &[u8] =
        b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbusy";

    #[test]
    fn a_chunked_body_comes_out_the_same_under_every_split_in_two() {
        for cut in 0..=CHUNKED.len() {
            let (head, body, done) = decode(&[&CHUNKED[..cut], &CHUNKED[cut..]]);
            assert_eq!(body, b"hello to\r\nyou all", "cut at {cut}");
            assert_eq!(head.map(|h| (h.status, h.closes)), Some((200, false)), "cut at {cut}");
            assert!(done, "cut at {cut}");
        }
    }

    #[test]
    fn a_counted_body_ends_at_its_length_and_its_head_is_kept() {
        for cut in 0..=COUNTED.len() {
            let (head, body, done) = decode(&[&COUNTED[..cut], &COUNTED[cut..]]);
            assert!(done && body == b"busy", "cut at {cut}");
            assert_eq!(head, Some(Head { status: 429, closes: true, retry_after: Some("3".into()) }));
        }
    }

    #[test]
    fn a_body_without_a_length_ends_with_the_connection() {
        let mut decoder = ResponseDecoder::new();
        let mut body = Vec::new();
        decoder.feed(b"HTTP/1.0 200 OK\r\n\r\nall of it", &mut |_, b| body.extend_from_slice(b)).expect("fed");
        assert!(!decoder.is_done());
        assert!(decoder.end_of_input() && decoder.head().is_some_and(|h| h.closes) && body == b"all of it");
    }

    #[test]
    fn wrong_framing_is_an_error_and_no_panic() {
        let feed = |bytes: &[u8]| ResponseDecoder::new().feed(bytes, &mut |_, _| {});
        assert_eq!(feed(b"SSH-2.0-OpenSSH\r\n"), Err(HttpError::NotHttp));
        assert_eq!(feed(b"HTTP/1.1 200 OK\r\ncontent-length: -4\r\n\r\n"), Err(HttpError::BadFraming));
        let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        assert_eq!(feed(&[chunked, &b"zz\r\n"[..]].concat()), Err(HttpError::BadFraming));
        assert_eq!(feed(&[chunked, &b"1\r\nabc"[..], b"\r\n"].concat()), Err(HttpError::BadFraming));
        assert_eq!(feed(&vec![b'x'; HEAD_BYTES_MAX + 1]), Err(HttpError::HeadTooLong));
        let endless = |begin: &[u8], line: &[u8]| [begin, &line.repeat(2 * HEAD_BYTES_MAX / line.len())].concat();
        assert_eq!(feed(&endless(b"HTTP/1.1 200 OK\r\n", b"x-more: 1\r\n")), Err(HttpError::HeadTooLong));
        assert_eq!(feed(&endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n")), Err(HttpError::HeadTooLong));
        assert_eq!(feed(&endless(&[chunked, &b"0\r\n"[..]].concat(), b"x: 1\r\n")), Err(HttpError::HeadTooLong));
    }
}
