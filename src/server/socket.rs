//! A connection's socket. While an answer is in the making it also tells that its client has left when nobody reads any more:
//! the HTTP library reads ahead up to a bound, and beyond it never comes to the end of what a client sent.
//!
//! It does not see the end of a client that left more behind than the system's own buffers take.

use std::cell::Cell;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use actix_web::HttpRequest;
use actix_web::rt::net::{ActixStream, Ready, TcpStream};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

struct Shared {
    stream: TcpStream,
    /// Answers in the making.
    waiting: Cell<usize>,
}

impl Shared {
    /// Until the client has closed its half, whatever lies unread before that.
    async fn closed_half(&self) {
        // Out-of-band bytes are never asked for, so that this interest stands for the closed half alone.
        #[cfg(target_os = "linux")]
        let _ = self.stream.ready(Interest::PRIORITY).await;
        #[cfg(not(target_os = "linux"))]
        std::future::pending::<()>().await;
    }
}

/// The socket of one connection.
pub struct Socket {
    shared: Rc<Shared>,
    /// Resolves when the client has closed its half; made when an answer first waits.
    closed_half: Option<Pin<Box<dyn Future<Output = ()>>>>,
    /// Whether that was seen.
    closed: bool,
    /// Whether the reader came to the end.
    read_to_end: bool,
}

impl Socket {
    /// A connection that sends what it has at once.
    pub fn new(stream: TcpStream) -> Self {
        // A socket that refuses is already dead; reading from it says so.
        let _ = stream.set_nodelay(true);
        let shared = Rc::new(Shared { stream, waiting: Cell::new(0) });
        Self { shared, closed_half: None, closed: false, read_to_end: false }
    }

    /// The client's address, while it is connected.
    pub fn client_address(&self) -> Option<SocketAddr> {
        self.shared.stream.peer_addr().ok()
    }

    /// What the requests of this connection know of it.
    pub fn client(&self) -> Client {
        Client(Rc::clone(&self.shared))
    }

    /// Whether an answer is in the making for a client that has left unseen by the reader; else the task hears of it.
    fn left_unseen(&mut self, cx: &mut Context<'_>) -> bool {
        if self.shared.waiting.get() == 0 || self.read_to_end {
            return false;
        }
        let closed_half = self.closed_half.get_or_insert_with(|| {
            let shared = Rc::clone(&self.shared);
            Box::pin(async move { shared.closed_half().await })
        });
        if closed_half.as_mut().poll(cx).is_pending() {
            return false;
        }
        self.closed_half = None;
        if !std::mem::replace(&mut self.closed, true) {
            // A reader that still reads usually gets one more turn to see the end for itself, and closes as it always does.
            cx.waker().wake_by_ref();
            return false;
        }
        true
    }
}

/// The client of a connection, for its requests.
#[derive(Clone)]
pub struct Client(Rc<Shared>);

/// An answer in the making.
pub struct Waiting(Rc<Shared>);

impl Client {
    /// From now on, while the result is held, the connection ends when the client leaves. Whoever calls it has read the whole
    /// body of the request: a half closed behind the body must not end the reading of it.
    pub fn waits(request: &HttpRequest) -> Option<Waiting> {
        let Client(shared) = request.conn_data()?;
        shared.waiting.set(shared.waiting.get() + 1);
        Some(Waiting(Rc::clone(shared)))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.set(self.0.waiting.get() - 1);
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.shared.stream.poll_read_ready(cx))?;
            match self.shared.stream.try_read_buf(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(read) => {
                    self.read_to_end |= read == 0;
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl Socket {
    /// Writes by `write` as soon as the system takes bytes.
    fn poll_writing(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.shared.stream.poll_write_ready(cx))?;
            match write(&self.shared.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_writing(cx, |stream| stream.try_write(buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_writing(cx, |stream| stream.try_write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        self.shared.stream.is_write_vectored()
    }

    /// A socket has nothing to flush; whoever serves it asks at every turn, after it has read what it wants.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(if self.left_unseen(cx) { Err(io::ErrorKind::ConnectionReset.into()) } else { Ok(()) })
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match SockRef::from(&self.shared.stream).shutdown(Shutdown::Write) {
            Err(error) if error.kind() != io::ErrorKind::NotConnected => Poll::Ready(Err(error)),
            _ => Poll::Ready(Ok(())),
        }
    }
}

impl ActixStream for Socket {
    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<Ready>> {
        pin!(self.shared.stream.ready(Interest::READABLE)).poll(cx)
    }

    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<Ready>> {
        pin!(self.shared.stream.ready(Interest::WRITABLE)).poll(cx)
    }
}
