//! Targets that misbehave on purpose, for tests of the client: one thread a connection, and bytes as a test wants them.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};

/// Listens; every connection gets a thread that behaves as given, and is closed when that returns.
pub fn target(behave: impl Fn(&mut TcpStream) + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let behave = behave.clone();
            std::thread::spawn(move || behave(&mut stream));
        }
    });
    address
}

/// Reads one request whole: head, and the body that its length tells.
pub fn request(stream: &mut TcpStream) -> Vec<u8> {
    let (mut seen, mut buffer) = (Vec::new(), [0; 65_536]);
    loop {
        let head = memchr::memmem::find(&seen, b"\r\n\r\n").map(|at| at + 4);
        if let Some(head) = head {
            let text = String::from_utf8_lossy(&seen[..head]).to_lowercase();
            let length = text.lines().find_map(|l| l.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
            if seen.len() >= head + length.unwrap_or(0) {
                return seen;
            }
        }
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return seen,
            Ok(n) => seen.extend_from_slice(&buffer[..n]),
        }
    }
}
