//! The loop: events of the terminal, the network and the clock go into the state; its effects come out; the screen follows.
//! One thread, one task a request; aborting a task drops its connection.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use actix_rt::task::JoinHandle;
use crossterm::event::{Event as TerminalEvent, EventStream};
use futures_util::StreamExt;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::client::Client;
use super::screen::Screen;
use super::settings::{Field, Sampling, SettingError};
use super::state::{App, Ask, Effect, Event, StreamId};
use super::view;

/// Time between two looks at /stats.
const POLL_PERIOD: Duration = Duration::from_millis(500);
/// Time between two frames at least: a fast stream must not fill a slow line with redraws.
const FRAME_PERIOD: Duration = Duration::from_millis(33);

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// `http://host:port` of the server.
    pub target: String,
    /// A file whose first line is the API key.
    pub api_key_file: Option<PathBuf>,
    /// `field=value` pairs for the settings panel.
    pub set: Vec<String>,
}

/// Why the client did not run.
#[derive(Debug, thiserror::Error)]
pub enum TuiError {
    /// Not `http://host:port`.
    #[error("the target {0:?} is no server address; give http://HOST:PORT")]
    Target(String),
    /// `https://…`.
    #[error(
        "crucible tui speaks plain HTTP only and cannot reach {0}; give the http://HOST:PORT of a server without TLS or of a tunnel to it"
    )]
    Tls(String),
    /// The key file.
    #[error("cannot read the API key from {}: {error}", .path.display())]
    KeyFile {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A `field=value` pair that names no field.
    #[error(
        "{0:?} is no setting; give one of mode, temperature, top_k, top_p, min_p, seed or max_tokens as FIELD=VALUE"
    )]
    UnknownSetting(String),
    /// A value out of bounds.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// Standard input or output is a file or a pipe.
    #[error("crucible tui needs a terminal; for one answer use crucible generate")]
    NoTerminal,
    /// The terminal or a signal handler failed.
    #[error("the terminal failed: {0}")]
    Terminal(#[from] io::Error),
}

/// Runs the client until the user quits. The terminal is as before when it returns.
///
/// # Errors
/// Options that cannot be used, or a terminal that fails.
pub fn run(options: &Options) -> Result<(), TuiError> {
    let target = target(&options.target)?;
    let sampling = sampling(&options.set)?;
    let key = options.api_key_file.as_ref().map(api_key).transpose()?;
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(TuiError::NoTerminal);
    }
    actix_rt::System::new().block_on(async {
        let app = App::new(target.clone(), sampling);
        Session::start(app, Client::new(target, key))?.run().await
    })
}

/// The address without a trailing slash.
fn target(text: &str) -> Result<String, TuiError> {
    let wrong = || TuiError::Target(text.to_owned());
    let target = text.trim_end_matches('/');
    let uri: awc::http::Uri = target.parse().map_err(|_| wrong())?;
    if uri.scheme_str() == Some("https") {
        return Err(TuiError::Tls(target.to_owned()));
    }
    let plain = uri.scheme_str() == Some("http") && uri.host().is_some() && uri.query().is_none();
    if plain { Ok(target.to_owned()) } else { Err(wrong()) }
}

fn sampling(pairs: &[String]) -> Result<Sampling, TuiError> {
    let mut sampling = Sampling::default();
    for pair in pairs {
        let unknown = || TuiError::UnknownSetting(pair.clone());
        let (name, value) = pair.split_once('=').ok_or_else(unknown)?;
        let field = Field::ALL.into_iter().find(|field| field.label() == name.trim()).ok_or_else(unknown)?;
        sampling.set(field, value)?;
    }
    Ok(sampling)
}

fn api_key(path: &PathBuf) -> Result<String, TuiError> {
    let text = std::fs::read_to_string(path).map_err(|error| TuiError::KeyFile { path: path.clone(), error })?;
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// The parts of a running client.
struct Session {
    app: App,
    client: Client,
    screen: Screen,
    started: Instant,
    sender: UnboundedSender<Event>,
    receiver: UnboundedReceiver<Event>,
    stream: Option<(StreamId, JoinHandle<()>)>,
    signals: [Signal; 2],
}

impl Session {
    fn start(app: App, client: Client) -> Result<Self, TuiError> {
        let signals = [signal(SignalKind::terminate())?, signal(SignalKind::hangup())?];
        let (sender, receiver) = unbounded_channel();
        let screen = Screen::take()?;
        Ok(Self { app, client, screen, started: Instant::now(), sender, receiver, stream: None, signals })
    }

    async fn run(mut self) -> Result<(), TuiError> {
        let poller = actix_rt::spawn(poll(self.client.clone(), self.sender.clone()));
        let result = self.turn_events().await;
        poller.abort();
        if let Some((_, task)) = self.stream.take() {
            task.abort();
        }
        result
    }

    async fn turn_events(&mut self) -> Result<(), TuiError> {
        let mut keys = EventStream::new();
        let mut frames = interval(FRAME_PERIOD);
        frames.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut stale = true;
        loop {
            let [terminate, hangup] = &mut self.signals;
            let event = tokio::select! {
                key = keys.next() => match key {
                    Some(Ok(key)) => from_terminal(key),
                    Some(Err(error)) => return Err(error.into()),
                    None => Some(Event::Terminate),
                },
                Some(event) = self.receiver.recv() => Some(event),
                _ = terminate.recv() => Some(Event::Terminate),
                _ = hangup.recv() => Some(Event::Terminate),
                _ = frames.tick(), if stale => {
                    self.draw()?;
                    stale = false;
                    continue;
                }
            };
            stale = true;
            let effect = event.and_then(|event| self.app.handle(self.started.elapsed(), event));
            match effect {
                Some(Effect::Ask(ask)) => self.ask(ask),
                Some(Effect::Drop(stream)) => self.drop_stream(stream),
                Some(Effect::Redraw) => self.screen.terminal.clear()?,
                Some(Effect::Quit) => return Ok(()),
                None => {}
            }
        }
    }

    fn draw(&mut self) -> Result<(), TuiError> {
        let mut scroll_max = 0;
        let app = &self.app;
        self.screen.terminal.draw(|frame| scroll_max = view::draw(frame, app))?;
        self.app.drawn(scroll_max);
        Ok(())
    }

    fn ask(&mut self, ask: Ask) {
        let (client, sender) = (self.client.clone(), self.sender.clone());
        let stream = ask.stream;
        let task = actix_rt::spawn(async move {
            client
                .ask(&ask, |news| {
                    // The receiver is gone only when the client is ending.
                    let _ = sender.send(Event::Stream(ask.stream, news));
                })
                .await;
        });
        self.stream = Some((stream, task));
    }

    fn drop_stream(&mut self, stream: StreamId) {
        if let Some((_, task)) = self.stream.take_if(|(current, _)| *current == stream) {
            task.abort();
        }
    }
}

/// A key press, a paste or, for a resize, nothing but a new frame.
fn from_terminal(event: TerminalEvent) -> Option<Event> {
    match event {
        TerminalEvent::Key(key) => Some(Event::Key(key)),
        TerminalEvent::Paste(text) => Some(Event::Paste(text)),
        _ => None,
    }
}

/// Looks at /health and /stats for ever.
async fn poll(client: Client, sender: UnboundedSender<Event>) {
    loop {
        let health = client.health().await.map_err(|error| error.to_string());
        let is_there = health.is_ok();
        let _ = sender.send(Event::Health(health));
        if is_there && let Ok(stats) = client.stats().await {
            let _ = sender.send(Event::Stats(stats));
        }
        sleep(POLL_PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_plain_http_addresses() {
        assert_eq!(target("http://127.0.0.1:8080/").unwrap(), "http://127.0.0.1:8080");
        assert!(matches!(target("https://host/"), Err(TuiError::Tls(_))));
        for wrong in ["127.0.0.1:8080", "ftp://host", "http://", "http://host/?q", "nonsense here"] {
            assert!(matches!(target(wrong), Err(TuiError::Target(_))), "{wrong}");
        }
    }

    #[test]
    fn settings_come_from_pairs() {
        let pairs = ["temperature=0.5", "seed=7", "mode=raw"].map(str::to_owned);
        let sampling = sampling(&pairs).unwrap();
        assert_eq!((sampling.body().temperature, sampling.body().seed), (Some(0.5), Some(7)));
        assert!(matches!(super::sampling(&["top=1".to_owned()]), Err(TuiError::UnknownSetting(_))));
        assert!(matches!(super::sampling(&["top_k=0".to_owned()]), Err(TuiError::Setting(_))));
    }
}
