//! One answer while it arrives: bytes → body → events → record. Decides nothing about connections.

use std::time::Instant;

use super::dialect::{Capture, Dialect, Meaning, interpret};
use super::http1::{HttpError, ResponseDecoder};
use super::job::{CancelPoint, Job, Length, Milestone, Outcome, Output, Record};
use crate::protocol::events::{SseEvent, SseParser};

/// Bytes kept of an error's body.
const ERROR_BODY_BYTES_MAX: usize = 400;
/// Longest event of a stream, bytes: far above any token with its alternatives. A line without an end stops here.
const EVENT_BYTES_MAX: usize = 4 << 20;
/// Output events that may come beyond the tokens asked for: text that was held back is an event of its own on some surfaces.
const EVENTS_BEYOND_MAX: usize = 16;
/// Codes by which a 503 says that it is about room or a drain and not about a fault, as bodies quote them.
const REFUSAL_CODES: [&[u8]; 4] = [b"\"draining\"", b"\"queue_full\"", b"\"overloaded\"", b"\"overloaded_error\""];

/// Why an answer cannot be read on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Broken {
    /// It is no HTTP.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// An event without an end.
    #[error("an event of the stream exceeds {} bytes; is the target a server of this dialect?", EVENT_BYTES_MAX)]
    EventTooLong,
    /// Output without an end.
    #[error("more than {0} output events came for {1} tokens asked for; the target ignores max_tokens")]
    TooManyEvents(usize, u32),
}

/// Why an exchange on one connection stopped.
pub(super) enum Stop {
    /// The request is over.
    Ended,
    /// A kept-alive connection was closed before a byte of the answer: worth a second try on a new one.
    Stale,
}

/// What the caller does next.
pub(super) enum Progress {
    /// Reads on.
    More,
    /// Hangs up, as planned.
    Cancel,
    /// Takes the record; the connection may serve again.
    Done {
        /// Whether it may.
        reusable: bool,
    },
    /// Gives up.
    Broken(Broken),
}

/// The answer of one request while it arrives: bytes → body → events → record.
pub(super) struct Answer {
    http: ResponseDecoder,
    sse: SseParser,
    reading: Reading,
    record: Record,
}

/// What the events have said so far; apart from the record's identity so that it can be filled while the decoders are borrowed.
struct Reading {
    dialect: Dialect,
    capture: Capture,
    sent: Instant,
    now: Instant,
    event_us: Vec<u32>,
    output: Output,
    prompt_tokens: Option<u32>,
    output_tokens: Option<u32>,
    done: bool,
    error: Option<String>,
    error_body: Vec<u8>,
    /// Whether the body is events; known from its first byte on.
    is_events: Option<bool>,
    milestone: Option<Milestone>,
    cancel_at: Option<u32>,
    length: Length,
}

impl Answer {
    /// An answer of which nothing has come.
    pub fn new(job: &Job, sent: Instant, capture: Capture) -> Self {
        let cancel_at = match job.cancel {
            Some(CancelPoint::AfterTokens(tokens)) => Some(tokens),
            _ => None,
        };
        let reading = Reading {
            dialect: job.wire.dialect,
            capture,
            sent,
            now: sent,
            event_us: Vec::with_capacity(64),
            output: Output::default(),
            prompt_tokens: None,
            output_tokens: None,
            done: false,
            error: None,
            error_body: Vec::new(),
            is_events: None,
            milestone: job.milestone.clone(),
            cancel_at,
            length: job.wire.length,
        };
        Self { http: ResponseDecoder::new(), sse: SseParser::new(), reading, record: Record::begun(job, sent) }
    }

    /// Takes bytes that arrived at `now`.
    pub fn take(&mut self, bytes: &[u8], now: Instant) -> Progress {
        self.record.bytes_received += bytes.len() as u64;
        self.reading.now = now;
        let (sse, reading) = (&mut self.sse, &mut self.reading);
        let fed = self.http.feed(bytes, &mut |status, body| {
            if status == 200 && reading.is_events(body) {
                sse.feed(body, &mut |event| reading.event(event));
            } else {
                let room = ERROR_BODY_BYTES_MAX.saturating_sub(reading.error_body.len());
                reading.error_body.extend_from_slice(&body[..body.len().min(room)]);
            }
        });
        if let Err(e) = fed {
            return Progress::Broken(e.into());
        }
        if self.sse.held() > EVENT_BYTES_MAX {
            return Progress::Broken(Broken::EventTooLong);
        }
        let (events, most) = (self.reading.event_us.len(), self.reading.length.most());
        if events > most as usize + EVENTS_BEYOND_MAX {
            return Progress::Broken(Broken::TooManyEvents(events, most));
        }
        if self.reading.cancel_at.is_some_and(|at| self.reading.event_us.len() >= at as usize) {
            return Progress::Cancel;
        }
        if !self.http.is_done() {
            return Progress::More;
        }
        Progress::Done { reusable: self.http.head().is_some_and(|h| !h.closes) }
    }

    /// The server closed the connection.
    pub fn closed(mut self) -> (Record, Stop) {
        if self.http.end_of_input() {
            return (self.finish(), Stop::Ended);
        }
        let stop = if self.record.bytes_received == 0 { Stop::Stale } else { Stop::Ended };
        (self.fail("the connection closed before the answer was complete".into()), stop)
    }

    /// The response is complete.
    pub fn finish(mut self) -> Record {
        let head = self.http.head().cloned().unwrap_or_default();
        self.record.has_retry_after = head.retry_after.is_some();
        self.record.status = Some(head.status);
        let says_refusal = || REFUSAL_CODES.iter().any(|c| memchr::memmem::find(&self.reading.error_body, c).is_some());
        let outcome = match (head.status, self.reading.error.take()) {
            (429 | 529, _) => Outcome::Refused { status: head.status },
            (503, _) if head.retry_after.is_some() || says_refusal() => Outcome::Refused { status: head.status },
            (200, None) => match self.reading.wrong_end() {
                None => Outcome::Completed,
                Some(message) => Outcome::Failed { message },
            },
            (200, Some(message)) => Outcome::Failed { message },
            (status, _) => {
                let body = String::from_utf8_lossy(&self.reading.error_body);
                Outcome::Failed { message: format!("status {status}: {body}") }
            }
        };
        self.end(outcome)
    }

    /// It failed.
    pub fn fail(self, message: String) -> Record {
        self.end(Outcome::Failed { message })
    }

    /// This client hung up as planned.
    pub fn cancelled(self) -> Record {
        self.end(Outcome::Cancelled)
    }

    /// Whether a byte of the answer has come.
    pub fn has_begun(&self) -> bool {
        self.record.bytes_received > 0
    }

    fn end(mut self, outcome: Outcome) -> Record {
        let tokens = self.reading.tokens();
        self.record.ended = Instant::now();
        self.record.outcome = outcome;
        self.record.event_us = self.reading.event_us;
        self.record.output = self.reading.output;
        self.record.prompt_tokens = self.reading.prompt_tokens;
        self.record.output_tokens = tokens;
        self.record
    }
}

impl Reading {
    /// Generated tokens as far as anybody tells: the server's count, output events otherwise.
    fn tokens(&self) -> u32 {
        self.output_tokens.unwrap_or_else(|| u32::try_from(self.event_us.len()).unwrap_or(u32::MAX))
    }

    /// What is wrong with a stream that ended without an error.
    fn wrong_end(&self) -> Option<String> {
        if !self.error_body.is_empty() {
            return Some(format!("the answer is no stream of events: {}", String::from_utf8_lossy(&self.error_body)));
        }
        if !self.done {
            return Some("the stream ended without its last event".into());
        }
        let events = u32::try_from(self.event_us.len()).unwrap_or(u32::MAX);
        let counted = self.output_tokens;
        if self.dialect == Dialect::Native && counted.is_some_and(|n| n != events) {
            return Some(format!("{events} token events came, and the done event counts {}", self.tokens()));
        }
        // Without a count of the server's, one event of text may be several tokens.
        let known = counted.is_some() || self.dialect == Dialect::Native || events == 0;
        let (tokens, asked) = (self.tokens(), self.length.most());
        if known && tokens > asked {
            return Some(format!("{tokens} tokens came for {asked} asked for; the target ignores max_tokens"));
        }
        if counted == Some(0) && events > 0 {
            return Some(format!("{events} output events came, and the server counts 0 tokens"));
        }
        let short = known && tokens < asked && matches!(self.length, Length::Exactly(_));
        short.then(|| format!("{tokens} of {asked} tokens came, although the request says ignore_eos"))
    }

    /// No line of a stream of events begins as JSON or HTML does.
    fn is_events(&mut self, body: &[u8]) -> bool {
        if self.is_events.is_none() {
            self.is_events = body.trim_ascii_start().first().map(|first| !b"{[<".contains(first));
        }
        self.is_events.unwrap_or(true)
    }

    fn event(&mut self, event: SseEvent<'_>) {
        match interpret(self.dialect, self.capture, event) {
            Meaning::Token { id, text } => self.token(id, &text),
            Meaning::Usage { prompt, output } => {
                self.prompt_tokens = prompt.or(self.prompt_tokens);
                self.output_tokens = output.or(self.output_tokens);
            }
            Meaning::Done { text, output } => {
                self.done = true;
                self.output_tokens = output.or(self.output_tokens);
                self.output.text.push_str(&text);
            }
            Meaning::Error(message) => {
                self.error.get_or_insert(message);
            }
            Meaning::Nothing => {}
        }
    }

    fn token(&mut self, id: Option<u32>, text: &str) {
        let after = self.now.saturating_duration_since(self.sent).as_micros();
        self.event_us.push(u32::try_from(after).unwrap_or(u32::MAX));
        if self.capture == Capture::Outputs {
            self.output.token_ids.extend(id);
            self.output.text.push_str(text);
        }
        if self.milestone.as_ref().is_some_and(|m| m.token as usize == self.event_us.len())
            && let Some(milestone) = self.milestone.take()
        {
            let _ = milestone.tell.send(self.now); // nobody waits any more
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::job::Wire;

    fn ended(dialect: Dialect, length: Length, response: &str) -> Outcome {
        let job = Job::now(0, Wire::new(dialect, Vec::new(), String::new(), length));
        let outcome = |capture| {
            let mut answer = Answer::new(&job, Instant::now(), capture);
            match answer.take(response.as_bytes(), Instant::now()) {
                Progress::Broken(e) => answer.fail(e.to_string()).outcome,
                _ => answer.closed().0.outcome,
            }
        };
        let (counts, outputs) = (outcome(Capture::Counts), outcome(Capture::Outputs));
        assert_eq!(counts, outputs, "what is kept of an answer does not change how it ended");
        counts
    }

    fn response(status: &str, headers: &str, body: &str) -> Outcome {
        let text = format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n{body}", body.len());
        ended(Dialect::Native, Length::Exactly(2), &text)
    }

    #[test]
    fn only_what_says_that_there_is_no_room_is_a_refusal() {
        let refused = |status| Outcome::Refused { status };
        assert_eq!(response("429 Too Many Requests", "", ""), refused(429));
        assert_eq!(response("529 Overloaded", "", ""), refused(529));
        assert_eq!(response("503 Service Unavailable", "retry-after: 1\r\n", ""), refused(503));
        assert_eq!(response("503 Service Unavailable", "", r#"{"error":{"code":"draining"}}"#), refused(503));
        for body in
            [r#"{"error":{"code":"engine_failed","message":"draining died"}}"#, "<html>Service Unavailable</html>"]
        {
            let failed = response("503 Service Unavailable", "", body);
            assert_eq!(failed, Outcome::Failed { message: format!("status 503: {body}") });
        }
    }

    fn native(length: Length, events: &str) -> Result<(), String> {
        stream(Dialect::Native, length, events)
    }

    fn stream(dialect: Dialect, length: Length, events: &str) -> Result<(), String> {
        match ended(dialect, length, &format!("HTTP/1.1 200 OK\r\n\r\n{events}")) {
            Outcome::Completed => Ok(()),
            Outcome::Failed { message } => Err(message),
            other => panic!("{other:?}"),
        }
    }

    const TOKEN: &str = "event: token\ndata: {\"token_id\":7,\"text\":\"a\"}\n\n";

    fn done(tokens: u32) -> String {
        format!("event: done\ndata: {{\"finish_reason\":\"length\",\"tokens_generated\":{tokens},\"text\":\"\"}}\n\n")
    }

    #[test]
    fn an_answer_has_every_token_that_was_asked_for_unless_its_model_may_end_it() {
        let two = format!("{TOKEN}{TOKEN}{}", done(2));
        assert_eq!(native(Length::Exactly(2), &two), Ok(()));
        let short = native(Length::Exactly(3), &two);
        assert_eq!(short, Err("2 of 3 tokens came, although the request says ignore_eos".into()));
        assert_eq!(native(Length::AtMost(3), &two), Ok(()));
        assert!(native(Length::Exactly(2), &done(0)).is_err_and(|e| e.starts_with("0 of 2 tokens came")));
        assert!(native(Length::Exactly(2), "event: done\ndata: {}\n\n").is_err_and(|e| e.starts_with("0 of 2")));
        assert_eq!(native(Length::AtMost(2), &done(0)), Ok(()), "the model may end it at once");
        let other = native(Length::Exactly(2), &format!("{TOKEN}{}", done(2)));
        assert_eq!(other, Err("1 token events came, and the done event counts 2".into()));
        let more = native(Length::Exactly(1), &format!("{}{}", TOKEN.repeat(17), done(17)));
        assert_eq!(more, Err("17 tokens came for 1 asked for; the target ignores max_tokens".into()));
        assert!(native(Length::AtMost(1), &two).is_err_and(|e| e.starts_with("2 tokens came for 1")));
        let endless = native(Length::Exactly(2), &TOKEN.repeat(30));
        assert!(endless.is_err_and(|e| e.contains("ignores max_tokens")));
    }

    #[test]
    fn text_surfaces_are_held_to_their_usage_and_to_an_answer_at_all() {
        let delta = r#"data: {"choices":[{"text":"ab","finish_reason":null}]}"#;
        let usage = |n: u32| format!(r#"data: {{"choices":[],"usage":{{"prompt_tokens":1,"completion_tokens":{n}}}}}"#);
        let openai = |parts: &[&str]| {
            stream(Dialect::OpenaiCompletions, Length::Exactly(2), &format!("{}\n\n", parts.join("\n\n")))
        };
        let end = "data: [DONE]";
        assert_eq!(openai(&[delta, &usage(2), end]), Ok(()));
        assert!(openai(&[delta, &usage(1), end]).is_err_and(|e| e.starts_with("1 of 2 tokens")));
        assert!(openai(&[delta, &usage(3), end]).is_err_and(|e| e.starts_with("3 tokens came for 2")));
        assert!(openai(&[delta, &usage(0), end]).is_err_and(|e| e.contains("the server counts 0 tokens")));
        assert_eq!(openai(&[delta, end]), Ok(()), "one event may be two tokens where nobody counts them");
        assert!(openai(&[end]).is_err_and(|e| e.starts_with("0 of 2 tokens")));
        assert!(openai(&[delta, "data: <html>", end]).is_err_and(|e| e.contains("no JSON: <html>")));
    }

    #[test]
    fn a_count_that_is_no_count_is_a_failure() {
        for (count, shown) in [("-3", "-3"), ("1.5", "1.5"), ("\"2\"", "\"2\"")] {
            let done = format!("event: done\ndata: {{\"tokens_generated\":{count},\"text\":\"\"}}\n\n");
            let broken = native(Length::Exactly(1), &format!("{TOKEN}{done}"));
            assert_eq!(broken, Err(format!("the server's count of tokens is {shown}")));
        }
        let usage = r#"data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":-1}}"#;
        let openai = format!("data: {{\"choices\":[{{\"text\":\"a\"}}]}}\n\n{usage}\n\ndata: [DONE]\n\n");
        let broken = stream(Dialect::OpenaiCompletions, Length::Exactly(1), &openai);
        assert_eq!(broken, Err("the server's count of tokens is -1".into()));
    }

    #[test]
    fn an_error_in_an_answer_that_says_200_is_told() {
        let broken = native(Length::Exactly(1), "{\"error\":{\"message\":\"the engine is dead\"}}");
        assert!(
            broken.is_err_and(
                |e| e.starts_with("the answer is no stream of events: {\"error\":{\"message\":\"the engine")
            )
        );
    }

    #[test]
    fn events_that_are_no_json_are_failures_and_not_tokens() {
        let html = "event: done\ndata: <html>\n\n";
        let broken = |events: &str| native(Length::AtMost(2), events).expect_err("it is broken");
        assert_eq!(broken(&format!("{TOKEN}{html}")), "an event of the stream is no JSON: <html>");
        let nonsense = format!("event: token\ndata: tokens!\n\n{html}");
        assert_eq!(broken(&nonsense), "an event of the stream is no JSON: tokens!");
        let torn = format!("event: token\ndata: {{\"token_id\":7,\"te\n\n{}", done(1));
        assert!(broken(&torn).contains("no JSON"));
        let nameless = format!("event: token\ndata: {{\"text\":\"a\"}}\n\n{}", done(1));
        assert!(broken(&nameless).starts_with("a token event without its token_id"));
        assert!(broken("event: done\ndata: [2]\n\n").starts_with("the done event is no JSON object"));
    }
}
