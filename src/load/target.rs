//! The server under load: its address, its small JSON endpoints, and what each of its dialects takes.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::client::{ClientError, Fleet};
use super::dialect::{Ask, Capabilities, Capture, Dialect, Policy};
use super::job::{Job, Outcome, Record, Wire};
use super::prompts::{self, TokenRange};
use super::rng::SplitMix64;

/// Longest wait for all the small requests of one probe, unless the target was given less: a server may load its model on the first.
const PROBE_WAIT: Duration = Duration::from_secs(120);
/// Longest wait for a JSON endpoint.
const JSON_WAIT: Duration = Duration::from_secs(10);
/// Requests of one probe: every form once, and a few answers of a busy server.
const PROBE_TRIES: usize = 8;
/// Between two tries at a busy server.
const BUSY_WAIT: Duration = Duration::from_millis(500);

/// Why a target cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// Not `http://host:port[/base]`.
    #[error("{0} is no target; write it like http://127.0.0.1:8080")]
    BadUrl(String),
    /// The name does not resolve.
    #[error("cannot resolve {0}; check the host name")]
    Unresolved(String),
    /// It does not answer.
    #[error("{url} does not answer: {source}; is the server running and ready?")]
    Silent {
        /// The target.
        url: String,
        /// Why.
        source: ClientError,
    },
    /// It refuses every form of a small request.
    #[error("the target does not take {dialect} requests: {message}; {}", advice(.message))]
    Unusable {
        /// The dialect tried.
        dialect: &'static str,
        /// Its last answer.
        message: String,
    },
    /// It refuses everything for want of room.
    #[error("the target refused small {dialect} requests {tries} times with status {status}; wait until it has room")]
    Busy {
        /// The dialect tried.
        dialect: &'static str,
        /// How often.
        tries: usize,
        /// Its last status.
        status: u16,
    },
    /// A small request had no whole answer.
    #[error("a small {dialect} request to {url} failed: {message}")]
    Unanswered {
        /// The target.
        url: String,
        /// The dialect tried.
        dialect: &'static str,
        /// What happened.
        message: String,
    },
}

/// What helps against a refusal.
fn advice(message: &str) -> &'static str {
    let of_ids = message.contains("vocabulary") || message.contains("token id");
    if of_ids { "choose --token-range within its vocabulary" } else { "choose a dialect that it speaks" }
}

/// A server's address.
#[derive(Clone, Debug)]
pub struct Target {
    /// As given.
    pub url: String,
    /// Where to connect.
    pub address: SocketAddr,
    /// `Host` header.
    host: String,
    /// Path in front of every endpoint, without a slash at its end.
    base: String,
    /// Sent as a bearer token and as `x-api-key`.
    api_key: Option<String>,
    /// Its answers to probes and small questions must have come by then.
    patience: Duration,
}

impl Target {
    /// Parses and resolves `http://host:port[/base]`.
    ///
    /// # Errors
    /// Another scheme, no host, or a host that does not resolve.
    pub fn new(url: &str, api_key: Option<String>) -> Result<Self, TargetError> {
        let bad = || TargetError::BadUrl(url.to_owned());
        let rest = url.strip_prefix("http://").ok_or_else(bad)?;
        let (host, base) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
        let with_port = if host.rsplit_once(':').is_some_and(|(_, p)| p.parse::<u16>().is_ok()) {
            host.to_owned()
        } else {
            format!("{host}:80")
        };
        if host.is_empty() || base.bytes().any(|b| b.is_ascii_whitespace() || b.is_ascii_control()) {
            return Err(bad());
        }
        let resolved = with_port.to_socket_addrs().ok().and_then(|mut found| found.next());
        let address = resolved.ok_or_else(|| TargetError::Unresolved(host.to_owned()))?;
        let base = base.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        Ok(Self { url: url.to_owned(), address, host: host.to_owned(), base, api_key, patience: PROBE_WAIT })
    }

    /// The same target, which must answer probes and small questions within `timeout` where that is less than their own bounds.
    #[must_use]
    pub fn within(self, timeout: Duration) -> Self {
        Self { patience: timeout.min(PROBE_WAIT), ..self }
    }

    fn credentials(&self) -> String {
        self.api_key
            .as_ref()
            .map_or(String::new(), |key| format!("authorization: Bearer {key}\r\nx-api-key: {key}\r\n"))
    }

    /// The bytes of a streaming request.
    pub fn post(&self, dialect: Dialect, body: &str) -> Vec<u8> {
        let version = if dialect == Dialect::Anthropic { "anthropic-version: 2023-06-01\r\n" } else { "" };
        format!(
            "POST {}{} HTTP/1.1\r\nhost: {}\r\n{}{version}accept: text/event-stream\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            self.base,
            dialect.path(),
            self.host,
            self.credentials(),
            body.len(),
        )
        .into_bytes()
    }

    /// The bytes of a GET.
    pub fn get(&self, path: &str) -> Vec<u8> {
        format!("GET {}{path} HTTP/1.1\r\nhost: {}\r\n{}\r\n", self.base, self.host, self.credentials()).into_bytes()
    }

    /// A JSON endpoint's answer; `None` when it does not answer with 200 and JSON.
    pub fn json(&self, path: &str) -> Option<Value> {
        let (status, body) = super::client::fetch(self.address, &self.get(path), JSON_WAIT.min(self.patience)).ok()?;
        if status == 200 { serde_json::from_slice(&body).ok() } else { None }
    }

    /// The id of the first model that /v1/models lists.
    ///
    /// # Errors
    /// The target does not answer at all.
    pub fn first_model(&self) -> Result<Option<String>, TargetError> {
        let answer = super::client::fetch(self.address, &self.get("/v1/models"), JSON_WAIT.min(self.patience));
        let (_, body) = answer.map_err(|source| TargetError::Silent { url: self.url.clone(), source })?;
        let list: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        Ok(list.pointer("/data/0/id").and_then(Value::as_str).map(str::to_owned))
    }
}

/// Finds out by small requests what a dialect of the target takes: `ignore_eos`, usage in the stream, token-id prompts and the seed are
/// given up one by one until a request is answered. Busy answers are waited out.
///
/// # Errors
/// Every form is refused, the target stays busy, or a request is not answered: one without an answer says nothing of what it held.
pub fn probe(target: &Target, dialect: Dialect, model: &str, range: TokenRange) -> Result<Capabilities, TargetError> {
    let deadline = Instant::now() + target.patience;
    let (mut message, mut busy, mut tries) = (String::new(), None, 0);
    let mut takes = Capabilities::best_of(dialect);
    while tries < PROBE_TRIES {
        tries += 1;
        let prompt = if takes.token_prompts {
            prompts::tokens(&mut SplitMix64::new(0), 4, range)
        } else {
            prompts::words(&mut SplitMix64::new(0), 4)
        };
        // A greedy request carries no seed.
        let policy = Policy::Temperature;
        let ask = Ask { dialect, model, prompt: &prompt, max_tokens: 2, policy, seed: 0, takes };
        let record = once(target, &ask, deadline.saturating_duration_since(Instant::now()));
        match record.outcome {
            Outcome::Completed => return Ok(takes),
            Outcome::Refused { status } => {
                busy = Some(status);
                std::thread::sleep(BUSY_WAIT.min(deadline.saturating_duration_since(Instant::now())));
            }
            Outcome::Cancelled => {}
            // The time went by while it was busy.
            Outcome::Failed { .. } if record.status.is_none() && busy.is_some() => break,
            Outcome::Failed { message: why } if record.status.is_none() => {
                return Err(TargetError::Unanswered { url: target.url.clone(), dialect: dialect.name(), message: why });
            }
            Outcome::Failed { message: why } => {
                if !give_up(&mut takes, dialect, &why) {
                    return Err(TargetError::Unusable { dialect: dialect.name(), message: why });
                }
                message = why;
            }
        }
    }
    Err(match busy {
        Some(status) => TargetError::Busy { dialect: dialect.name(), tries, status },
        None => TargetError::Unusable { dialect: dialect.name(), message },
    })
}

/// What a target's form of a dialect lacks of the best, in words; empty when it lacks nothing.
pub fn given_up(dialect: Dialect, takes: Capabilities) -> Vec<&'static str> {
    let best = Capabilities::best_of(dialect);
    let lost = [
        (best.ignore_eos && !takes.ignore_eos, "ignore_eos is not taken or does nothing, so answers may end early"),
        (
            best.token_prompts && !takes.token_prompts,
            "token ids are not taken, so prompts are words of about that length",
        ),
        (best.stream_usage && !takes.stream_usage, "stream usage is not taken, so tokens are counted by output events"),
        (best.seed && !takes.seed, "a seed is not taken, so drawn answers cannot be compared"),
    ];
    lost.into_iter().filter(|(lost, _)| *lost).map(|(_, words)| words).collect()
}

/// Every form of a dialect that `probe` can find, the best first.
pub fn forms(dialect: Dialect) -> impl Iterator<Item = Capabilities> {
    let best = Capabilities::best_of(dialect);
    // The native surface always takes token ids.
    let held = [best.ignore_eos, best.token_prompts && dialect != Dialect::Native, best.stream_usage, best.seed];
    let lost = (0..1u8 << held.len()).map(move |bits| std::array::from_fn::<bool, 4, _>(|i| bits >> i & 1 == 1));
    let possible = lost.filter(move |lost| lost.iter().zip(held).all(|(lost, held)| held || !lost));
    possible.map(move |[ignore_eos, token_prompts, stream_usage, seed]| Capabilities {
        ignore_eos: best.ignore_eos && !ignore_eos,
        token_prompts: best.token_prompts && !token_prompts,
        stream_usage: best.stream_usage && !stream_usage,
        seed: best.seed && !seed,
    })
}

/// Gives up what the refusal names, or the first that is still sent where it names nothing of it; false when nothing is left to give up.
fn give_up(takes: &mut Capabilities, dialect: Dialect, why: &str) -> bool {
    let sent = [
        ("ignore_eos", &mut takes.ignore_eos),
        ("stream_options", &mut takes.stream_usage),
        ("prompt", &mut takes.token_prompts),
        ("seed", &mut takes.seed),
    ];
    // The native surface always takes token ids.
    let can = |(name, sent): &(&str, &mut bool)| **sent && (*name != "prompt" || dialect != Dialect::Native);
    let named = sent.iter().position(|s| can(s) && why.contains(s.0));
    let chosen = named.or_else(|| sent.iter().position(can));
    if let Some(at) = chosen {
        *sent[at].1 = false;
    }
    chosen.is_some()
}

fn once(target: &Target, ask: &Ask<'_>, timeout: Duration) -> Record {
    let fleet = Fleet::start(target.address, 1, Capture::Counts, timeout);
    let wire = Wire::new(ask.dialect, target.post(ask.dialect, &ask.body()), String::new(), ask.length());
    fleet.submit(Job::now(0, wire));
    fleet.next().unwrap_or_else(|| Record::failed(0, "the client's thread ended".into()))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::load::fake;

    #[test]
    fn a_url_gives_address_host_and_base() {
        let target = Target::new("http://127.0.0.1:8080/api/v1/", None).expect("a target");
        assert_eq!((target.address.port(), target.base.as_str()), (8080, "/api"));
        let bytes = String::from_utf8(target.post(Dialect::OpenaiChat, "{}")).expect("ascii");
        assert!(bytes.starts_with("POST /api/v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:8080\r\n"));
        assert!(bytes.ends_with("content-length: 2\r\n\r\n{}") && !bytes.contains("authorization"));
        assert!(Target::new("https://127.0.0.1", None).is_err() && Target::new("http:///x", None).is_err());
    }

    #[test]
    fn what_a_refusal_names_is_given_up_first_and_otherwise_one_after_the_other() {
        let all = Capabilities { ignore_eos: true, token_prompts: true, stream_usage: true, seed: true };
        let after = |dialect, whys: &[&str]| {
            let mut takes = all;
            let gave = whys.iter().all(|why| give_up(&mut takes, dialect, why));
            gave.then_some([takes.ignore_eos, takes.stream_usage, takes.token_prompts, takes.seed])
        };
        let chat = Dialect::OpenaiChat;
        assert_eq!(after(chat, &["seed: Extra inputs are not permitted"]), Some([true, true, true, false]));
        assert_eq!(after(chat, &["unknown field stream_options"]), Some([true, false, true, true]));
        assert_eq!(after(chat, &["bad request"; 2]), Some([false, false, true, true]));
        assert_eq!(after(chat, &["bad request"; 4]), Some([false; 4]));
        assert_eq!(after(chat, &["bad request"; 5]), None);
        assert_eq!(after(Dialect::Native, &["prompt_tokens has an id beyond the vocabulary"; 4]), None);
    }

    #[test]
    fn every_form_that_can_be_found_is_named_once_and_the_best_first() {
        for (dialect, count) in
            [(Dialect::Native, 4), (Dialect::OpenaiCompletions, 16), (Dialect::OpenaiChat, 8), (Dialect::Anthropic, 4)]
        {
            let all: Vec<Capabilities> = forms(dialect).collect();
            assert_eq!((all.len(), all[0]), (count, Capabilities::best_of(dialect)));
            assert!(all.iter().enumerate().all(|(i, form)| !all[..i].contains(form)));
        }
        assert!(forms(Dialect::Native).all(|takes| takes.token_prompts));
    }

    #[test]
    fn a_target_without_an_answer_is_not_asked_again_and_a_busy_one_is_told_apart() {
        let of = |behave: fn(&mut std::net::TcpStream)| {
            let url = format!("http://{}", fake::target(behave));
            let target = Target::new(&url, None).expect("a target").within(Duration::from_millis(700));
            let refusal = probe(&target, Dialect::Native, "", TokenRange::default()).expect_err("it serves nothing");
            (refusal.to_string(), target.first_model().err().map_or(String::new(), |e| e.to_string()))
        };
        let (silent, models) = of(|stream| {
            let _ = stream.read(&mut [0]);
            std::thread::park();
        });
        assert!(silent.contains("a small native request") && silent.contains("no end within"), "{silent}");
        assert!(models.contains("no whole answer within 700ms; is the server running"), "{models}");
        let (busy, _) = of(|stream| {
            fake::request(stream);
            let _ = stream.write_all(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy");
        });
        assert!(busy.contains("with status 429; wait until it has room"), "{busy}");
    }

    #[test]
    fn a_prompt_beyond_the_vocabulary_is_no_matter_of_the_dialect() {
        let refused = |message: &str| TargetError::Unusable { dialect: "native", message: message.into() }.to_string();
        assert!(
            refused("token id 900 is outside the vocabulary of 512")
                .ends_with("; choose --token-range within its vocabulary")
        );
        assert!(refused("status 404: {}").ends_with("; choose a dialect that it speaks"));
    }

    #[test]
    fn what_a_target_gave_up_is_said_in_words() {
        let takes = Capabilities { ignore_eos: false, seed: false, token_prompts: false, stream_usage: false };
        assert_eq!(given_up(Dialect::OpenaiCompletions, takes).len(), 4);
        assert_eq!(given_up(Dialect::Anthropic, takes).len(), 2, "what a surface never had is not given up");
        assert!(given_up(Dialect::Native, Capabilities::best_of(Dialect::Native)).is_empty());
    }

    #[test]
    fn a_key_goes_into_both_headers_and_the_version_to_one_dialect() {
        let target = Target::new("http://127.0.0.1", Some("k".into())).expect("a target");
        let bytes = String::from_utf8(target.post(Dialect::Anthropic, "{}")).expect("ascii");
        assert!(bytes.contains("authorization: Bearer k\r\nx-api-key: k\r\nanthropic-version: 2023-06-01\r\n"));
        assert_eq!(target.address.port(), 80);
    }
}
