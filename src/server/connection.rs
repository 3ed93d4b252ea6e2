//! What bounds a connection whose client misbehaves: a socket that gives up on a peer that takes nothing or has vanished, and an end
//! for connections whose request body is never finished.
//!
//! Slow heads, slow bodies and idle connections have timers of their own (`server.header_timeout_ms`, `server.body_timeout_ms`,
//! `server.keep_alive_ms`).

use std::cell::RefCell;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::Error;
use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::{Payload, ServiceRequest, ServiceResponse};
use actix_web::error::PayloadError;
use actix_web::http::{ConnectionType, Version, header};
use actix_web::middleware::Next;
use bytes::Bytes;
use futures_util::Stream;
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 2_048;
/// Shortest time between two probes of a silent connection that the system takes.
const PROBE_MIN: Duration = Duration::from_secs(1);

/// A listening socket. What it is told here is inherited by every connection that it accepts: a peer that takes no byte of what waits
/// for it, or answers no probe, for `write_timeout` is cut off by the system.
///
/// # Errors
/// The address is in use or not this machine's.
pub fn listener(address: SocketAddr, write_timeout: Duration) -> io::Result<TcpListener> {
    let socket = bound(address, write_timeout)?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// The same before it listens: nobody can connect to it.
///
/// # Errors
/// As `listener`.
pub fn bound(address: SocketAddr, write_timeout: Duration) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    let probe = (write_timeout / 3).max(PROBE_MIN);
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(probe).with_interval(probe))?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(write_timeout))?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Frames an answer as its client can take it. The HTTP library would send chunks to a client of HTTP/1.0, which knows none and
/// gets a body that ends with the connection; and of a request that offers another protocol it would claim to have changed to
/// it, and then close.
///
/// # Errors
/// Those of the services inside.
pub async fn suit_client(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let (version, offers_other) = (request.version(), request.head().upgrade());
    let mut response = next.call(request).await?.map_into_boxed_body();
    let unframed = version < Version::HTTP_11 && response.response().body().size() == BodySize::Stream;
    let head = response.response_mut().head_mut();
    head.no_chunking(unframed);
    if unframed || offers_other {
        head.set_connection_type(ConnectionType::Close);
    }
    Ok(response)
}

/// Keeps a chunked request body alive until its response has been sent. The HTTP library closes a connection, after a short wait,
/// whose body is unread and still held; one whose body was dropped it would read for as long as the client goes on sending.
///
/// # Errors
/// Those of the services inside.
pub async fn hold_unread_body(
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    if !request.headers().contains_key(header::TRANSFER_ENCODING) {
        return Ok(next.call(request).await?.map_into_boxed_body());
    }
    let held = Rc::new(RefCell::new(std::mem::replace(request.parts_mut().1, Payload::None)));
    request.set_payload(Payload::Stream { payload: Box::pin(Reader(Rc::clone(&held))) });
    let response = next.call(request).await?;
    Ok(response.map_body(|_, body| holding(body, held)))
}

/// The handler's end of a body that someone else holds too.
struct Reader(Rc<RefCell<Payload>>);

impl Stream for Reader {
    type Item = Result<Bytes, PayloadError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_next(cx)
    }
}

/// A response body that keeps `held` until it has been sent or given up.
pub fn holding(body: impl MessageBody + 'static, held: impl Unpin + 'static) -> BoxBody {
    BoxBody::new(Holding { body: body.boxed(), _held: held })
}

struct Holding<T> {
    body: BoxBody,
    _held: T,
}

impl<T: Unpin> MessageBody for Holding<T> {
    type Error = Box<dyn std::error::Error>;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Self::Error>>> {
        self.body.as_pin_mut().poll_next(cx)
    }
}
