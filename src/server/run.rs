//! The life of the process: listen, serve, and end by a signal or by the death of the engine.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use actix_cors::Cors;
use actix_web::dev::ServerHandle;
use actix_web::http::{Method, header};
use actix_web::{App, HttpRequest, HttpResponse, Resource, Route, guard, middleware, web};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::listen::{self, FLUSH_SECONDS};
use super::respond::{answering, telling};
use super::{Service, WorkerHub, anthropic, connection, generate, intake, models, openai, openapi, status, tools};
use crate::config::{Origins, ServerConfig};
use crate::protocol::errors::{ApiError, Code, beginning};

/// How serving ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Every live request was answered after a signal, or failed at the deadline.
    Drained,
    /// SIGTERM or Ctrl-C came again while draining.
    Interrupted,
    /// The engine died.
    Failed(String),
}

/// Signals within this time of the one that began the drain are the same wish.
const ONE_WISH: Duration = Duration::from_secs(1);

/// How long a browser may remember what it was told about another site's calls.
const CORS_MAX_AGE_SECONDS: usize = 600;

/// Serves until a signal or the death of the engine. `ready` learns the bound address.
///
/// # Errors
/// The address cannot be bound, or the system refuses signals or threads.
pub async fn serve(service: web::Data<Service>, ready: impl FnOnce(SocketAddr)) -> io::Result<Ending> {
    let mut signals = Signals::new()?;
    let config = service.config.server.clone();
    let shared = service.clone();
    let origins = config.cors_origins.clone();
    let app = move || {
        App::new()
            .app_data(shared.clone())
            .app_data(web::Data::new(WorkerHub::default()))
            .wrap(middleware::from_fn(intake::authorise))
            .wrap(cors(&origins))
            .wrap(middleware::from_fn(intake::explain_preflight))
            .wrap(middleware::from_fn(connection::hold_unread_body))
            .wrap(middleware::from_fn(connection::suit_client))
            .configure(routes)
            .configure(crate::web::configure)
            .default_service(web::to(not_found))
    };
    let asked = SocketAddr::new(config.host, config.port);
    let listener = connection::listener(asked, config.write_timeout).map_err(|e| cannot_listen(asked, &e))?;
    let address = listener.local_addr()?;
    let server = listen::start(listener, &config, app)?;
    let handle = server.handle();
    let running = tokio::task::spawn_local(server);
    ready(address);
    let mut fatal = service.engine.fatal();
    let asked_to_end = async {
        tokio::select! {
            () = signals.next() => {}
            () = service.stop.notified() => {}
        }
    };
    let died = tokio::select! {
        biased;
        reason = died(&mut fatal) => Some(Ending::Failed(reason)),
        () = asked_to_end => None,
    };
    // What the answers of a drain leave of its time, their readers have.
    let until = Instant::now() + config.drain_deadline;
    let ending = match died {
        Some(ending) => ending,
        None => drain(&service, &mut signals).await,
    };
    let ending = wind_down(&service, &handle, &mut signals, ending, until).await;
    drop(running);
    Ok(ending)
}

/// Whether `serve` could begin now: the address is free, and certificate and key can be used. It is asked before a model is loaded; the
/// address is given back, because a client should be refused for as long as nobody serves.
///
/// # Errors
/// Those of `serve`.
pub fn check(config: &ServerConfig) -> io::Result<()> {
    listen::offered(config)?;
    let asked = SocketAddr::new(config.host, config.port);
    connection::bound(asked, config.write_timeout).map(drop).map_err(|e| cannot_listen(asked, &e))
}

/// Headers for browsers on the sites that are let in; nothing at all where none is. It stands outside of the question for the key,
/// because a browser asks first whether it may send one.
fn cors(origins: &Origins) -> middleware::Condition<Cors> {
    let shared = Cors::default()
        .allowed_methods([Method::GET, Method::HEAD, Method::POST])
        .allow_any_header()
        .expose_headers(["x-request-id", "request-id", "retry-after"])
        .max_age(CORS_MAX_AGE_SECONDS);
    let (on, cors) = match origins {
        Origins::None => (false, shared),
        Origins::Any => (true, shared.allow_any_origin().send_wildcard()),
        Origins::Listed(list) => (true, list.iter().fold(shared, |cors, origin| cors.allowed_origin(origin))),
    };
    middleware::Condition::new(on, cors)
}

/// The error of the system with the address that it is about.
fn cannot_listen(address: SocketAddr, error: &io::Error) -> io::Error {
    let text = format!("cannot listen on {address}: {error}; choose another server.host or server.port");
    io::Error::new(error.kind(), text)
}

/// SIGTERM, Ctrl-C, and the hang-up of the terminal that the server was started from.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    /// When the drain began.
    draining_since: Option<Instant>,
}

impl Signals {
    fn new() -> io::Result<Self> {
        let [terminate, interrupt, hang_up] =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        Ok(Self { terminate: terminate?, interrupt: interrupt?, hang_up: hang_up?, draining_since: None })
    }

    /// A signal that asks for the end: any, and in a drain one that asks for it at once. One wish often comes as several signals: the
    /// kernel and the shell both tell of a closed terminal, a service manager sends SIGHUP after SIGTERM, `timeout` tells the child and
    /// its group. So a hang-up never hastens a drain, nor does what comes within `ONE_WISH` of its beginning.
    async fn next(&mut self) {
        loop {
            let hung_up = tokio::select! {
                _ = self.terminate.recv() => false,
                _ = self.interrupt.recv() => false,
                _ = self.hang_up.recv() => true,
            };
            match self.draining_since {
                Some(begun) if hung_up || begun.elapsed() < ONE_WISH => {}
                _ => return,
            }
        }
    }
}

/// Waits for the death of the engine; returns its reason.
async fn died(fatal: &mut watch::Receiver<Option<Arc<str>>>) -> String {
    let reason = fatal.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
    said(reason)
}

/// Why the engine is dead.
fn said(reason: Option<Arc<str>>) -> String {
    reason.map_or_else(|| "the engine has stopped".to_owned(), |reason| reason.to_string())
}

/// Refuses new work and waits for what is live. An engine that dies meanwhile has failed, although nothing is live in it either.
async fn drain(service: &Service, signals: &mut Signals) -> Ending {
    service.draining.store(true, Ordering::Release);
    signals.draining_since = Some(Instant::now());
    let deadline = service.config.server.drain_deadline;
    let live = service.engine.snapshot().account.live();
    tracing::info!(
        live,
        deadline_ms = deadline.as_millis() as u64,
        "draining; SIGTERM or Ctrl-C once more, a second from now or later, ends at once"
    );
    let mut fatal = service.engine.fatal();
    let drained = service.engine.drain(deadline);
    tokio::select! {
        biased;
        reason = died(&mut fatal) => Ending::Failed(reason),
        () = signals.next() => Ending::Interrupted,
        done = drained => {
            let reason = service.engine.fatal().borrow().clone();
            if done.is_ok() && reason.is_none() { Ending::Drained } else { Ending::Failed(said(reason)) }
        }
    }
}

/// Lets the sessions write what they have, and their clients read it until `until`, at least for `FLUSH_SECONDS`; then stops the
/// workers. A signal meanwhile hastens the end as one in the drain does.
async fn wind_down(
    service: &Service,
    handle: &ServerHandle,
    signals: &mut Signals,
    ending: Ending,
    until: Instant,
) -> Ending {
    if ending == Ending::Interrupted {
        handle.stop(false).await;
        return ending;
    }
    let linger = match ending {
        // Whoever watches /health sees the 503 before the process is gone.
        Ending::Failed(_) => service.config.server.fatal_linger,
        _ => Duration::ZERO,
    };
    let written = async {
        tokio::select! {
            () = tokio::time::sleep(linger) => {}
            () = service.stop.notified() => {}
        }
        let flushed = Instant::now() + Duration::from_secs(FLUSH_SECONDS);
        let until = if ending == Ending::Drained { until.max(flushed) } else { flushed };
        while !service.registry.is_empty() && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if tokio::time::timeout_at(until.into(), handle.stop(true)).await.is_err() {
            tracing::warn!("clients that had not read their answers to the end are cut");
        }
    };
    tokio::select! {
        () = written => ending,
        () = signals.next() => {
            // The command is sent at once; workers that are stopping already would be waited for.
            drop(handle.stop(false));
            if ending == Ending::Drained { Ending::Interrupted } else { ending }
        }
    }
}

fn routes(app: &mut web::ServiceConfig) {
    app.service(resource("/v1/generate", "POST", answering(generate::whole)))
        .service(resource("/v1/generate/stream", "POST", answering(generate::stream)))
        .service(resource("/v1/chat/completions", "POST", answering(openai::chat)))
        .service(resource("/v1/completions", "POST", answering(openai::completions)))
        .service(resource("/v1/messages", "POST", answering(anthropic::messages)))
        .service(resource("/v1/messages/count_tokens", "POST", telling(anthropic::count_tokens)))
        .service(resource("/v1/models", "GET, HEAD", reading().to(models::list)))
        .service(resource("/v1/models/{id:.+}", "GET, HEAD", reading().to(models::one)))
        .service(resource("/tokenize", "POST", telling(tools::tokenize)))
        .service(resource("/detokenize", "POST", telling(tools::detokenize)))
        .service(resource("/health", "GET, HEAD", reading().to(status::health)))
        .service(resource("/ready", "GET, HEAD", reading().to(status::ready)))
        .service(resource("/metrics", "GET, HEAD", reading().to(status::metrics)))
        .service(resource("/stats", "GET, HEAD", reading().to(status::stats)))
        .service(resource("/openapi.json", "GET, HEAD", reading().to(openapi::document)));
}

/// GET, and HEAD for those who only look (load balancers); the server leaves the body out of an answer to HEAD.
fn reading() -> Route {
    web::route().guard(guard::Any(guard::Get()).or(guard::Head()))
}

/// A path with its methods; others get 405 with the methods that are allowed.
fn resource(path: &str, method: &'static str, route: Route) -> Resource {
    let refused = move |request: HttpRequest, service: web::Data<Service>| async move {
        let text =
            format!("{} takes {method}, not {}", beginning(request.path()), beginning(request.method().as_str()));
        let mut response = intake::refuse(&service, &request, &ApiError::new(Code::MethodNotAllowed, text));
        response.headers_mut().insert(header::ALLOW, header::HeaderValue::from_static(method));
        response
    };
    web::resource(path.to_owned()).route(route).default_service(web::to(refused))
}

async fn not_found(request: HttpRequest, service: web::Data<Service>) -> HttpResponse {
    let hint = if request.method() == Method::GET { "; see /health" } else { "" };
    let text = format!("there is no {}{hint}", beginning(request.path()));
    intake::refuse(&service, &request, &ApiError::new(Code::NotFound, text))
}
