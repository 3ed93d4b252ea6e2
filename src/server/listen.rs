//! The workers of a listening socket: HTTP/1.1 over TCP or over TLS, the same service with the same bounds on both.
//!
//! HTTP/2 is not offered, whatever features the HTTP library was built with: it computes the request of an HTTP/2 client that hangs up
//! to its end. So the connections are put together here from the library's own parts, not by its `HttpServer`, whose TLS always offers
//! what the library can do.

use std::fmt::Debug;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use actix_http::body::MessageBody;
use actix_http::error::DispatchError;
use actix_http::{HttpService, KeepAlive, Request, Response};
use actix_server::{GracefulShutdownSignal, Server, ServerBuilder};
use actix_service::{IntoServiceFactory, Service, ServiceFactory, ServiceFactoryExt, fn_service, map_config};
use actix_tls::accept::TlsError as ConnectionError;
use actix_tls::accept::rustls_0_23::{Acceptor, TlsStream};
use actix_web::dev::AppConfig;
use actix_web::rt::net::{ActixStream, TcpStream};

use super::socket::Socket;
use super::tls;
use crate::config::ServerConfig;

/// Time that written responses have to leave the process, seconds.
pub const FLUSH_SECONDS: u64 = 1;

/// What a client offers and gets by ALPN.
const HTTP_1_1: &[u8] = b"http/1.1";

/// What bounds every connection.
#[derive(Clone)]
struct Bounds {
    keep_alive: KeepAlive,
    head: Duration,
    /// Resolves when the workers begin to stop: idle connections are closed, others after the answer that they are about.
    stopping: GracefulShutdownSignal,
}

/// Starts the workers on a listening socket. `app` makes the application of one worker.
///
/// # Errors
/// The certificate or its key cannot be used, or the system refuses the socket.
pub fn start<F, I, S, B>(listener: TcpListener, config: &ServerConfig, app: F) -> io::Result<Server>
where
    F: Fn() -> I + Clone + Send + 'static,
    I: IntoServiceFactory<S, Request>,
    S: ServiceFactory<Request, Config = AppConfig> + 'static,
    S::Future: 'static,
    S::Service: 'static,
    <S::Service as Service<Request>>::Future: 'static,
    S::Error: Into<actix_web::Error> + 'static,
    S::InitError: Debug,
    S::Response: Into<Response<B>> + 'static,
    B: MessageBody + 'static,
{
    // Who ends the process waits for less, as long as is left of the drain.
    let patience = config.drain_deadline.as_secs() + 1 + FLUSH_SECONDS;
    let workers = ServerBuilder::new().workers(config.workers).shutdown_timeout(patience).disable_signals();
    let keep_alive = match config.keep_alive {
        Duration::ZERO => KeepAlive::Disabled,
        time => KeepAlive::Timeout(time),
    };
    let bounds = Bounds { keep_alive, head: config.header_timeout, stopping: workers.graceful_shutdown_signal() };
    let workers = match offered(config)? {
        None => workers.listen("http", listener, move || {
            fn_service(|stream: TcpStream| async { Ok(addressed(Socket::new(stream), |socket| socket)) })
                .and_then(http1(bounds.clone(), app(), |socket| socket))
        }),
        Some(offered) => {
            let mut acceptor = Acceptor::new(offered);
            acceptor.set_handshake_timeout(config.header_timeout);
            workers.listen("https", listener, move || {
                let handshake = acceptor.clone().map_err(ConnectionError::into_service_error);
                let handshake = fn_service(|stream: TcpStream| async { Ok(Socket::new(stream)) }).and_then(handshake);
                let handshake = handshake.map(|stream| addressed(stream, below));
                handshake.and_then(http1(bounds.clone(), app(), below).map_err(ConnectionError::Service))
            })
        }
    };
    Ok(workers?.run())
}

/// What TLS offers; `None` where it is not configured.
///
/// # Errors
/// The certificate or its key cannot be used.
pub fn offered(config: &ServerConfig) -> io::Result<Option<rustls::ServerConfig>> {
    let Some(files) = &config.tls else { return Ok(None) };
    let mut offered = tls::configuration(&files.certificate, &files.key)?;
    offered.alpn_protocols = vec![HTTP_1_1.to_vec()];
    Ok(Some(offered))
}

/// A connection with its client's address. `socket` finds the socket below.
fn addressed<T>(stream: T, socket: impl FnOnce(&T) -> &Socket) -> (T, Option<SocketAddr>) {
    let client = socket(&stream).client_address();
    (stream, client)
}

/// The socket of a TLS connection.
fn below(stream: &TlsStream<Socket>) -> &Socket {
    stream.get_ref().0
}

/// The application of one worker as a service of connections of type `T`; `socket` finds the socket below.
fn http1<T, I, S, B>(
    bounds: Bounds,
    app: I,
    socket: impl Fn(&T) -> &Socket + 'static,
) -> impl ServiceFactory<(T, Option<SocketAddr>), Config = (), Response = (), Error = DispatchError, InitError = ()>
where
    T: ActixStream + 'static,
    I: IntoServiceFactory<S, Request>,
    S: ServiceFactory<Request, Config = AppConfig> + 'static,
    S::Future: 'static,
    S::Service: 'static,
    <S::Service as Service<Request>>::Future: 'static,
    S::Error: Into<actix_web::Error> + 'static,
    S::InitError: Debug,
    S::Response: Into<Response<B>> + 'static,
    B: MessageBody + 'static,
{
    let Bounds { keep_alive, head, stopping } = bounds;
    let app = app.into_factory().map_err(|error| error.into().error_response());
    HttpService::build()
        .graceful_shutdown_signal(move || {
            let stopping = stopping.clone();
            async move { stopping.notified().await }
        })
        .keep_alive(keep_alive)
        .client_request_timeout(head)
        .client_disconnect_timeout(Duration::from_secs(FLUSH_SECONDS))
        .h1_allow_half_closed(false)
        .on_connect_ext(move |stream, data| _ = data.insert(socket(stream).client()))
        .h1(map_config(app, |()| AppConfig::default()))
}
