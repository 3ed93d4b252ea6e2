//! HTTP: the four requests of this client. Every answer is read with a bound; dropping the future of a request drops its
//! connection, which is how a stream is cancelled.

use std::time::Duration;

use awc::http::header::USER_AGENT;
use awc::{ClientRequest, ClientResponse, SendClientRequest};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::state::{Ask, Prompt, StreamNews};
use super::wire::{
    DoneData, ErrorData, GenerateBody, Health, Message, PromptBody, Stats, TokenData, TokenizeBody, Tokenized,
};
use crate::protocol::events::{SseEvent, SseParser};

/// The bytes of an answer that is read whole, at most.
const BODY_BYTES_MAX: usize = 8 << 20;
/// The bytes of one event, at most; a server that sends more is not one of ours.
const EVENT_BYTES_MAX: usize = 1 << 20;
/// How long /health, /stats and /tokenize may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// A stream that says nothing for so long, not even a keep-alive comment, is dead.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(120);

/// Why a request failed, in words for the screen.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection, or it broke.
    #[error("cannot reach {0}: {1}")]
    Unreachable(String, String),
    /// The server took too long.
    #[error("{0} did not answer in time")]
    Silent(String),
    /// Prompt and answer are too long for the server.
    #[error("{0}")]
    TooLong(String),
    /// The server refused.
    #[error("{message} (status {status})")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The server's words.
        message: String,
    },
    /// An answer that is not the API's.
    #[error("unexpected answer of {0}: {1}; check that the target is a crucible server")]
    Unexpected(&'static str, String),
}

/// A connection to one server.
#[derive(Clone)]
pub struct Client {
    base: String,
    key: Option<String>,
    http: awc::Client,
}

impl Client {
    /// `base` is `http://host:port`, without a trailing slash.
    pub fn new(base: String, key: Option<String>) -> Self {
        let http = awc::Client::builder().disable_timeout().finish();
        Self { base, key, http }
    }

    /// GET /health.
    ///
    /// # Errors
    /// Unreachable, or no health in the answer. A 503 with a body of health is an answer.
    pub async fn health(&self) -> Result<Health, ClientError> {
        let mut response = within(ANSWER_TIMEOUT, self.get("/health").send(), &self.base).await?;
        if response.status().is_success() {
            return json("/health", &mut response).await;
        }
        let refusal =
            ClientError::Refused { status: response.status().as_u16(), message: "the server is not well".to_owned() };
        json("/health", &mut response).await.map_err(|_| refusal)
    }

    /// GET /stats.
    ///
    /// # Errors
    /// Unreachable, refused or not JSON.
    pub async fn stats(&self) -> Result<Stats, ClientError> {
        let response = within(ANSWER_TIMEOUT, self.get("/stats").send(), &self.base).await?;
        json("/stats", &mut accepted(response).await?).await
    }

    /// Asks for an answer and hands out its news as they come; the last is `Done` or `Failed`.
    pub async fn ask(&self, ask: &Ask, mut news: impl FnMut(StreamNews)) {
        if let Err(error) = self.stream(ask, &mut news).await {
            news(StreamNews::Failed(error.to_string()));
        }
    }

    async fn stream(&self, ask: &Ask, news: &mut impl FnMut(StreamNews)) -> Result<(), ClientError> {
        let response = match &ask.prompt {
            Prompt::Raw(text) => {
                news(StreamNews::Prompted { tokens: None, turns_left_out: 0 });
                self.generate(PromptBody::Text(text), ask).await?
            }
            Prompt::Chat(messages) => self.chat(messages, ask, news).await?,
        };
        self.read_events(response, news).await
    }

    async fn generate(&self, prompt: PromptBody<'_>, ask: &Ask) -> Result<ClientResponse, ClientError> {
        let body = GenerateBody { prompt, sampling: &ask.sampling };
        // A stream is cancelled by dropping its connection, so it has one of its own.
        let request = self.post("/v1/generate/stream").force_close();
        accepted(within(SILENCE_TIMEOUT, request.send_json(&body), &self.base).await?).await
    }

    /// Asks for the answer to a conversation, without its oldest turns if the server takes no more: one by one while the lengths that
    /// it told are exceeded, and half of those left whenever it refuses all the same.
    async fn chat(
        &self,
        messages: &[Message],
        ask: &Ask,
        news: &mut impl FnMut(StreamNews),
    ) -> Result<ClientResponse, ClientError> {
        let turns = messages.len() / 2;
        let mut turns_left_out = 0;
        loop {
            let answer = match self.tokenize(&messages[2 * turns_left_out..]).await {
                Ok(tokens) if turns_left_out < turns && !ask.lengths.hold(tokens.len(), ask.sampling.max_tokens) => {
                    turns_left_out += 1;
                    continue;
                }
                Ok(tokens) => {
                    news(StreamNews::Prompted { tokens: Some(tokens.len()), turns_left_out });
                    self.generate(PromptBody::Tokens(&tokens), ask).await
                }
                Err(error) => Err(error),
            };
            match answer {
                Err(ClientError::TooLong(_)) if turns_left_out < turns => {
                    turns_left_out += (turns - turns_left_out).div_ceil(2);
                }
                answer => return answer,
            }
        }
    }

    async fn tokenize(&self, messages: &[Message]) -> Result<Vec<u32>, ClientError> {
        let request = self.post("/tokenize").send_json(&TokenizeBody { messages });
        let response = within(ANSWER_TIMEOUT, request, &self.base).await?;
        let Tokenized { tokens } = json("/tokenize", &mut accepted(response).await?).await?;
        Ok(tokens)
    }

    /// Reads events until the one that ends the stream.
    async fn read_events(
        &self,
        mut response: ClientResponse,
        news: &mut impl FnMut(StreamNews),
    ) -> Result<(), ClientError> {
        let broken = |why: String| ClientError::Unreachable(self.base.clone(), why);
        let mut parser = SseParser::default();
        loop {
            let Ok(chunk) = timeout(SILENCE_TIMEOUT, response.next()).await else {
                return Err(ClientError::Silent(self.base.clone()));
            };
            let bytes = chunk.ok_or_else(|| broken("the stream broke off".to_owned()))?;
            let bytes = bytes.map_err(|error| broken(error.to_string()))?;
            let mut items = Vec::new();
            parser.feed(&bytes, &mut |event| items.extend(news_of(event).transpose()));
            for item in items {
                let item = item?;
                let is_last = matches!(item, StreamNews::Done { .. } | StreamNews::Failed(_));
                news(item);
                if is_last {
                    return Ok(());
                }
            }
            if parser.held() > EVENT_BYTES_MAX {
                return Err(unexpected("the stream", format!("an event of more than {EVENT_BYTES_MAX} bytes")));
            }
        }
    }

    fn get(&self, path: &str) -> ClientRequest {
        self.prepared(self.http.get(format!("{}{path}", self.base)))
    }

    fn post(&self, path: &str) -> ClientRequest {
        self.prepared(self.http.post(format!("{}{path}", self.base)))
    }

    fn prepared(&self, request: ClientRequest) -> ClientRequest {
        let request = request.insert_header((USER_AGENT, concat!("crucible-tui/", env!("CARGO_PKG_VERSION"))));
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }
}

/// What an event of the stream says; names that this client does not know say nothing.
fn news_of(event: SseEvent<'_>) -> Result<Option<StreamNews>, ClientError> {
    fn data<T: DeserializeOwned>(text: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(text).map_err(|error| unexpected("the stream", error))
    }
    Ok(match event.name {
        b"token" => Some(StreamNews::Token(data::<TokenData>(event.data)?.text)),
        b"done" => {
            let DoneData { finish_reason, tokens_generated, text } = data(event.data)?;
            Some(StreamNews::Done { reason: finish_reason, tokens: tokens_generated, text })
        }
        b"error" => Some(StreamNews::Failed(data::<ErrorData>(event.data)?.message())),
        _ => None,
    })
}

/// The head of an answer, within a time.
async fn within(limit: Duration, request: SendClientRequest, base: &str) -> Result<ClientResponse, ClientError> {
    match timeout(limit, request).await {
        Ok(Ok(response)) => Ok(response),
        Ok(Err(error)) => Err(ClientError::Unreachable(base.to_owned(), error.to_string())),
        Err(_) => Err(ClientError::Silent(base.to_owned())),
    }
}

/// Passes an answer with a status of success; of any other, the server's words become the error.
async fn accepted(mut response: ClientResponse) -> Result<ClientResponse, ClientError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let status = status.as_u16();
    Err(match json::<ErrorData>("an error", &mut response).await {
        Ok(error) if error.says_too_long() => ClientError::TooLong(error.message()),
        Ok(error) => ClientError::Refused { status, message: error.message() },
        Err(_) => ClientError::Refused { status, message: "refused without a reason".to_owned() },
    })
}

/// Reads a whole answer as JSON.
async fn json<T: DeserializeOwned>(path: &'static str, response: &mut ClientResponse) -> Result<T, ClientError> {
    let body = timeout(ANSWER_TIMEOUT, response.body().limit(BODY_BYTES_MAX)).await;
    let body = body.map_err(|_| ClientError::Silent(path.to_owned()))?;
    let body = body.map_err(|error| unexpected(path, error))?;
    serde_json::from_slice(&body).map_err(|error| unexpected(path, error))
}

fn unexpected(what: &'static str, error: impl std::fmt::Display) -> ClientError {
    ClientError::Unexpected(what, error.to_string())
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
