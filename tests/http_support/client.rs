//! A small HTTP/1.1 client on a bare socket: tests see every byte and can hang up at any of them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// A response that has arrived whole.
#[derive(Clone, Debug)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// The events of a stream, as (event name, data).
    pub fn events(&self) -> Vec<(String, String)> {
        events(&self.text())
    }
}

/// Splits server-sent events; comments are left out.
pub fn events(text: &str) -> Vec<(String, String)> {
    let field = |frame: &str, name: &str| {
        frame.lines().find_map(|l| l.strip_prefix(name)).map(|v| v.trim_start().to_owned()).unwrap_or_default()
    };
    let frames = text.split("\n\n").filter(|f| f.lines().any(|l| l.starts_with("data:")));
    frames.map(|f| (field(f, "event:"), field(f, "data:"))).collect()
}

/// A request that was sent; its answer can be read or hung up on.
pub struct Pending {
    stream: BufReader<TcpStream>,
}

/// Sends a request without waiting for its answer.
pub fn send(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Pending {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
    stream.set_nodelay(true).expect("nodelay");
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n");
    if !body.is_empty() {
        head += &format!("content-length: {}\r\n", body.len());
    }
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    head += "\r\n";
    // A server may answer and close before it has read a body that it refuses.
    let _ = stream.write_all(&[head.as_bytes(), body].concat());
    Pending { stream: BufReader::new(stream) }
}

/// Sends JSON without waiting for the answer.
pub fn send_json(address: SocketAddr, path: &str, body: &Value) -> Pending {
    send(address, "POST", path, &[("content-type", "application/json")], body.to_string().as_bytes())
}

/// Posts JSON.
pub fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    send_json(address, path, body).response()
}

/// Gets a path.
pub fn get(address: SocketAddr, path: &str) -> Response {
    send(address, "GET", path, &[], &[]).response()
}

impl Pending {
    /// Sends more bytes.
    pub fn write(&mut self, bytes: &[u8]) {
        // A server may answer and close before it has read a body that it refuses.
        let _ = self.stream.get_mut().write_all(bytes);
    }

    /// Reads status and headers.
    pub fn head(&mut self) -> Response {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("a status line");
        let status =
            line.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("no status: {line:?}"));
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).expect("a header");
            let Some((name, value)) = line.trim_end().split_once(':') else { break };
            headers.push((name.to_owned(), value.trim().to_owned()));
        }
        Response { status, headers, body: Vec::new() }
    }

    /// Everything until the server closes the connection.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest).expect("a closed connection");
        rest
    }

    /// One chunk of a chunked body; `None` at the end.
    ///
    /// # Errors
    /// The server cut the connection.
    pub fn chunk(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let cut = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let size = usize::from_str_radix(line.trim_end(), 16).map_err(|_| cut())?;
        let mut chunk = vec![0; size + 2];
        self.stream.read_exact(&mut chunk)?;
        chunk.truncate(size);
        Ok((size > 0).then_some(chunk))
    }

    /// Reads the whole answer.
    pub fn response(mut self) -> Response {
        let mut response = self.head();
        let chunked = response.header("transfer-encoding").is_some_and(|v| v == "chunked");
        if chunked {
            while let Some(chunk) = self.chunk().expect("a whole stream") {
                response.body.extend(chunk);
            }
        } else {
            let length: usize = response.header("content-length").and_then(|v| v.parse().ok()).unwrap_or(0);
            response.body = vec![0; length];
            self.stream.read_exact(&mut response.body).expect("a whole body");
        }
        response
    }

    /// Reads events until there are `count`, then gives the connection back, still open.
    pub fn read_events(&mut self, count: usize) -> Vec<(String, String)> {
        let mut text = String::new();
        while events(&text).len() < count {
            let chunk = self.chunk().expect("a stream").expect("more events");
            text.push_str(&String::from_utf8(chunk).expect("UTF-8"));
        }
        events(&text)
    }
}
