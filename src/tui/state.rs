//! The client as a machine: one event in, the new state and at most one effect out. No I/O and no clock; every event carries its
//! time. News of a stream that is no longer the current one is passed over, so that a cancelled answer cannot write into the next.

use std::time::Duration;

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::editor::{Editor, printable};
use super::meter::{RateMeter, StreamMeter};
use super::settings::{Mode, Panel, Sampling, Step};
use super::wire::{Health, Lengths, Message, SamplingBody, Stats};

/// Lines that PageUp and PageDown move.
const PAGE_LINES: usize = 10;

/// Names one request of this client; ascending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamId(pub u64);

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A key.
    Key(KeyEvent),
    /// Pasted text.
    Paste(String),
    /// The answer of /health, or why there is none.
    Health(Result<Health, String>),
    /// The answer of /stats.
    Stats(Stats),
    /// News of a stream.
    Stream(StreamId, StreamNews),
    /// The process is asked to end.
    Terminate,
}

/// News of one stream.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamNews {
    /// The prompt went out; so many of the oldest turns did not fit. Said again if the server refused it and it is shortened.
    Prompted {
        /// Tokens of the prompt; unknown for raw text.
        tokens: Option<usize>,
        /// Turns left out.
        turns_left_out: usize,
    },
    /// One token's text, perhaps empty.
    Token(String),
    /// The end.
    Done {
        /// Why.
        reason: String,
        /// Tokens generated in all.
        tokens: usize,
        /// Text that was still held back.
        text: String,
    },
    /// It failed.
    Failed(String),
}

/// What the machine wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Ask for an answer.
    Ask(Ask),
    /// Drop the connection of the stream.
    Drop(StreamId),
    /// Draw the whole terminal anew.
    Redraw,
    /// End.
    Quit,
}

/// A request for an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// Its name.
    pub stream: StreamId,
    /// What to answer.
    pub prompt: Prompt,
    /// How.
    pub sampling: SamplingBody,
    /// What the server takes.
    pub lengths: Lengths,
}

/// What to answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text as it is.
    Raw(String),
    /// A conversation that ends with the user.
    Chat(Vec<Message>),
}

/// How a turn stands.
#[derive(Clone, Debug, PartialEq)]
pub enum TurnState {
    /// Asked, or streaming.
    Running,
    /// The server ended it, for this reason and after so many tokens.
    Finished {
        /// `stop` or `length`.
        reason: String,
        /// Tokens generated.
        tokens: usize,
    },
    /// The user stopped it.
    Stopped,
    /// It failed.
    Failed(String),
}

/// A prompt and its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// How the prompt was meant.
    pub mode: Mode,
    /// What the user wrote.
    pub prompt: String,
    /// The answer so far.
    pub answer: String,
    /// How it stands.
    pub state: TurnState,
    /// Its pace.
    pub meter: StreamMeter,
    /// Tokens of the prompt, once known.
    pub prompt_tokens: Option<usize>,
    /// Oldest turns that did not fit.
    pub turns_left_out: usize,
}

/// Where keys go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Focus {
    /// The message box.
    Message,
    /// The settings panel.
    Settings,
}

/// What is known of the server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Server {
    /// The last answer of /health.
    pub health: Option<Health>,
    /// The last answer of /stats.
    pub stats: Option<Stats>,
    /// Output tokens a second over all requests.
    pub rate: RateMeter,
    /// Why it cannot be reached, while it cannot.
    pub trouble: Option<String>,
}

/// The whole state.
#[derive(Clone, Debug)]
pub struct App {
    /// The server's address, for the title.
    pub target: String,
    /// The conversation, oldest first.
    pub turns: Vec<Turn>,
    /// The message box.
    pub editor: Editor,
    /// The settings.
    pub panel: Panel,
    /// Where keys go.
    pub focus: Focus,
    /// The server.
    pub server: Server,
    /// A word to the user in the last line.
    pub notice: Option<String>,
    /// Lines between the end of the conversation and the bottom of its window.
    pub scroll: usize,
    scroll_max: usize,
    stream: Option<StreamId>,
    streams_made: u64,
}

impl App {
    /// A client of the server at `target`.
    pub fn new(target: String, sampling: Sampling) -> Self {
        Self {
            target,
            turns: Vec::new(),
            editor: Editor::default(),
            panel: Panel { sampling, ..Panel::default() },
            focus: Focus::Message,
            server: Server::default(),
            notice: None,
            scroll: 0,
            scroll_max: 0,
            stream: None,
            streams_made: 0,
        }
    }

    /// Whether an answer is under way.
    pub fn is_streaming(&self) -> bool {
        self.stream.is_some()
    }

    /// Takes one event that happened at this time.
    pub fn handle(&mut self, at: Duration, event: Event) -> Option<Effect> {
        match event {
            Event::Key(key) if key.kind == KeyEventKind::Release => None,
            Event::Key(key) => self.key(at, key),
            Event::Paste(text) => {
                if self.focus == Focus::Message {
                    self.editor.insert(&text);
                }
                None
            }
            Event::Health(Ok(health)) => {
                let health = shown(health);
                self.server.trouble = (health.status != "ok").then(|| format!("the server is {}", health.status));
                self.server.health = Some(health);
                None
            }
            Event::Health(Err(trouble)) => {
                let trouble = Some(line(&trouble));
                self.server = Server { health: self.server.health.take(), trouble, ..Server::default() };
                None
            }
            Event::Stats(stats) => {
                self.server.rate.sample(at, stats.tokens_computed());
                self.server.stats = Some(stats);
                None
            }
            Event::Stream(stream, news) => {
                if self.stream == Some(stream) {
                    self.stream_news(at, news);
                }
                None
            }
            Event::Terminate => Some(Effect::Quit),
        }
    }

    /// After drawing: how far the conversation can be scrolled up. Who reads further up stays there while text arrives below.
    pub fn drawn(&mut self, scroll_max: usize) {
        if self.scroll > 0 {
            self.scroll += scroll_max.saturating_sub(self.scroll_max);
        }
        self.scroll_max = scroll_max;
        self.scroll = self.scroll.min(scroll_max);
    }

    fn stream_news(&mut self, at: Duration, news: StreamNews) {
        let Some(turn) = self.turns.last_mut() else { return };
        match news {
            StreamNews::Prompted { tokens, turns_left_out } => {
                turn.prompt_tokens = tokens;
                turn.turns_left_out = turns_left_out;
            }
            StreamNews::Token(text) => {
                turn.meter.token(at);
                turn.answer.push_str(&printable(&text));
            }
            StreamNews::Done { reason, tokens, text } => {
                turn.answer.push_str(&printable(&text));
                turn.state = TurnState::Finished { reason: line(&reason), tokens };
                self.stream = None;
            }
            StreamNews::Failed(error) => {
                if turn.answer.is_empty() && self.editor.text().is_empty() {
                    self.editor.set(&turn.prompt);
                }
                turn.state = TurnState::Failed(printable(&error));
                self.stream = None;
            }
        }
    }

    fn key(&mut self, at: Duration, key: KeyEvent) -> Option<Effect> {
        self.notice = None;
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control => return Some(Effect::Quit),
            KeyCode::Char('d') if control && self.editor.text().is_empty() => return Some(Effect::Quit),
            KeyCode::Char('l') if control => return Some(Effect::Redraw),
            KeyCode::Char('n') if control => {
                let effect = self.stop();
                self.turns.clear();
                self.scroll = 0;
                return effect;
            }
            KeyCode::Esc if self.is_streaming() => return self.stop(),
            KeyCode::PageUp => self.scroll = (self.scroll + PAGE_LINES).min(self.scroll_max),
            KeyCode::PageDown => self.scroll = self.scroll.saturating_sub(PAGE_LINES),
            KeyCode::Tab | KeyCode::BackTab => self.switch_focus(),
            _ if self.focus == Focus::Settings => self.settings_key(key),
            _ => return self.message_key(at, key),
        }
        None
    }

    fn switch_focus(&mut self) {
        self.focus = match self.focus {
            Focus::Message => Focus::Settings,
            Focus::Settings if self.panel.commit() => Focus::Message,
            Focus::Settings => Focus::Settings,
        };
    }

    fn settings_key(&mut self, key: KeyEvent) {
        match key.code {
            KeyCode::Up => self.panel.choose(Step::Up),
            KeyCode::Down => self.panel.choose(Step::Down),
            KeyCode::Left => self.panel.step(Step::Down),
            KeyCode::Right => self.panel.step(Step::Up),
            KeyCode::Backspace => self.panel.backspace(),
            KeyCode::Delete => self.panel.clear(),
            KeyCode::Enter => {
                self.panel.commit();
            }
            KeyCode::Esc if self.panel.edit.is_some() => self.panel.cancel(),
            KeyCode::Esc => self.focus = Focus::Message,
            KeyCode::Char(character) if (key.modifiers - KeyModifiers::SHIFT).is_empty() => self.panel.typed(character),
            _ => {}
        }
    }

    fn message_key(&mut self, at: Duration, key: KeyEvent) -> Option<Effect> {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        let alt = key.modifiers.contains(KeyModifiers::ALT);
        match key.code {
            KeyCode::Enter if alt => self.editor.insert("\n"),
            KeyCode::Enter => return self.send(at),
            KeyCode::Char('j') if control => self.editor.insert("\n"),
            KeyCode::Char('w') if control => self.editor.delete_word(),
            KeyCode::Char('u') if control => self.editor.delete_to_start(),
            KeyCode::Char('a') if control => self.editor.home(),
            KeyCode::Char('e') if control => self.editor.end(),
            KeyCode::Char('d') if control => self.editor.delete(),
            KeyCode::Char(character) if !control && !alt => self.editor.insert(character.encode_utf8(&mut [0; 4])),
            KeyCode::Backspace => self.editor.backspace(),
            KeyCode::Delete => self.editor.delete(),
            KeyCode::Left => self.editor.left(),
            KeyCode::Right => self.editor.right(),
            KeyCode::Home => self.editor.home(),
            KeyCode::End => self.editor.end(),
            KeyCode::Up => self.editor.older(),
            KeyCode::Down => self.editor.newer(),
            _ => {}
        }
        None
    }

    /// Asks for an answer to the message, if there is one and none is under way.
    fn send(&mut self, at: Duration) -> Option<Effect> {
        if self.is_streaming() {
            self.notice = Some("an answer is still coming: Esc stops it".to_owned());
            return None;
        }
        let prompt = self.editor.take()?;
        let mode = self.panel.sampling.mode;
        self.streams_made += 1;
        let stream = StreamId(self.streams_made);
        let ask = Ask {
            stream,
            prompt: match mode {
                Mode::Raw => Prompt::Raw(prompt.clone()),
                Mode::Chat => Prompt::Chat(self.conversation(&prompt)),
            },
            sampling: self.panel.sampling.body(),
            lengths: self.server.health.as_ref().map(Health::lengths).unwrap_or_default(),
        };
        self.turns.push(Turn {
            mode,
            prompt,
            answer: String::new(),
            state: TurnState::Running,
            meter: StreamMeter::new(at),
            prompt_tokens: None,
            turns_left_out: 0,
        });
        self.stream = Some(stream);
        self.scroll = 0;
        Some(Effect::Ask(ask))
    }

    /// The answered chat turns and the new message. A turn without an answer is left out: two user messages in a row are not
    /// what a chat template expects.
    fn conversation(&self, prompt: &str) -> Vec<Message> {
        let mut messages = Vec::new();
        for turn in self.turns.iter().filter(|turn| turn.mode == Mode::Chat && !turn.answer.is_empty()) {
            messages.push(Message { role: "user", content: turn.prompt.clone() });
            messages.push(Message { role: "assistant", content: turn.answer.clone() });
        }
        messages.push(Message { role: "user", content: prompt.to_owned() });
        messages
    }

    /// Stops the answer under way; what came of it stays.
    fn stop(&mut self) -> Option<Effect> {
        let stream = self.stream.take()?;
        if let Some(turn) = self.turns.last_mut() {
            turn.state = TurnState::Stopped;
        }
        Some(Effect::Drop(stream))
    }
}

/// Text of a server for one line of the screen.
fn line(text: &str) -> String {
    printable(text).replace('\n', " ")
}

/// What a server says of itself, without what would move the terminal's cursor.
fn shown(health: Health) -> Health {
    let Health { status, model, device, profile, .. } = &health;
    let [status, model, device, profile] = [status, model, device, profile].map(|text| line(text));
    Health { status, model, device, profile, ..health }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
