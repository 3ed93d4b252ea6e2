//! A client and the session that answers it: what it asked for, how it reads, what it must have got.

use std::task::{Context, Poll, Waker};

use crucible::actors::session::messages::TokenEntry;
use crucible::actors::session::output::{FrameReceiver, Outcome, Output, SlowReader};
use crucible::actors::session::{SessionCore, SessionEffect};
use crucible::admission::{Dialect, RequestId, RequestSpec};
use crucible::backend::TokenLogprobs;
use crucible::model::tokenizer::{SpecialText, Tokenizer};
use crucible::protocol::choice::{Answer, ChoiceDecoder, ChoiceEnd, Delta, FinishReason};
use crucible::protocol::errors::{ApiError, Code};
use crucible::protocol::events::SseParser;
use crucible::protocol::format::{Format, Usage, json_bytes};
use crucible::protocol::native::NativeFormat;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::catalogue::{CHOICES, Catalogue, Kind};
use super::seeded::Seeded;

/// What one choice of an answer must be when nothing cuts it short.
#[derive(Clone, Debug)]
pub struct Expected {
    pub text: String,
    /// Tokens that count for the client.
    pub tokens: usize,
    /// Tokens up to the end of sequence or the length: what the engine would go to.
    pub natural: usize,
    pub reason: FinishReason,
}

/// Mail for a session.
pub enum News {
    Entry(TokenEntry),
    ClientGone,
    EngineDied,
}

/// What a client asks for.
pub struct Ask {
    kind: &'static Kind,
    choices: usize,
    eos: Option<u32>,
    stops: Vec<String>,
    streams: bool,
    /// Bytes that may wait for it, when it streams.
    buffer: usize,
}

/// How a client takes what comes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reads {
    /// Soon enough for any answer.
    Promptly,
    /// Only now and then, with little room: it may be cut.
    Slowly,
}

/// Whether the history had a reason to fail a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MayFail {
    Yes,
    No,
}

enum Body {
    Frames { frames: FrameReceiver, parser: SseParser, got: Got, reads: Reads },
    Whole(oneshot::Receiver<Outcome>),
}

/// What came through a stream.
#[derive(Default)]
struct Got {
    ids: Vec<u32>,
    text: String,
    done: Option<(String, usize)>,
    failed: bool,
    cut: bool,
    closed: bool,
}

/// A client with its session.
pub struct Client {
    ask: Ask,
    ids: Vec<RequestId>,
    session: SessionCore,
    body: Body,
    expected: Vec<Expected>,
    /// `[choice]`: scores of the prompt that came.
    scored: Vec<usize>,
    gone: bool,
}

impl Ask {
    /// Draws one.
    pub fn draw(random: &mut Seeded, catalogue: &'static Catalogue) -> Self {
        let kind = &catalogue.kinds[random.below(catalogue.kinds.len())];
        let streams = random.below(3) > 0;
        let choices = if streams || random.below(2) == 0 { 1 } else { 1 + random.below(CHOICES) };
        let ids: Vec<u32> = kind.alone[0].iter().map(|t| t.id).collect();
        let eos = (random.below(3) == 0).then(|| ids[random.below(ids.len())]);
        let stops = if random.below(3) == 0 { vec![piece(random, &catalogue.tokenizer, &ids)] } else { Vec::new() };
        let buffer = if random.below(3) == 0 { 100 + random.below(400) } else { 1 << 20 };
        Self { kind, choices, eos, stops, streams, buffer }
    }

    /// What its sequences are, one a choice.
    pub fn specs(&self) -> Vec<RequestSpec> {
        let spec = |choice| RequestSpec {
            prompt: self.kind.prompt.clone(),
            max_new_tokens: self.kind.max_new_tokens,
            rule: self.kind.rule,
            adjust: self.kind.adjust.clone(),
            seed: self.kind.seed,
            choice,
            eos: self.eos.into_iter().collect(),
            logprobs: self.kind.logprobs,
            score_prompt: self.kind.scores.is_some(),
            dialect: Dialect::ALL[choice as usize],
        };
        (0..self.choices as u32).map(spec).collect()
    }

    fn expected(&self, choice: usize, tokenizer: &Tokenizer) -> Expected {
        let alone: Vec<u32> = self.kind.alone[choice].iter().map(|t| t.id).collect();
        let end = alone.iter().position(|&id| Some(id) == self.eos);
        let natural = end.map_or(alone.len(), |at| at + 1);
        let whole = tokenizer.decode(&alone[..natural], SpecialText::Hide);
        let ends = whole.char_indices().map(|(at, c)| at + c.len_utf8());
        let hit = ends.into_iter().find(|&end| self.stops.iter().any(|stop| whole[..end].ends_with(stop.as_str())));
        let Some(hit) = hit else {
            let reason = if end.is_some() { FinishReason::Eos } else { FinishReason::Length };
            return Expected { text: whole, tokens: natural, natural, reason };
        };
        let text = whole[..hit - self.stops[0].len()].to_owned();
        // The token with which the text so far, whole characters only, holds the stop string.
        let (mut detokenizer, mut shown) = (tokenizer.detokenizer(), 0);
        let completes = |&id: &u32| {
            shown += detokenizer.push(id).len();
            shown >= hit
        };
        let tokens = alone[..natural].iter().position(completes).map_or(natural, |at| at + 1);
        Expected { text, tokens, natural, reason: FinishReason::StopString(self.stops[0].as_str().into()) }
    }
}

/// One to three characters of what these tokens say, or a word that they do not.
fn piece(random: &mut Seeded, tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let characters: Vec<char> = tokenizer.decode(ids, SpecialText::Hide).chars().collect();
    let (at, len) = (random.below(characters.len().max(1)), 1 + random.below(3));
    let piece: String = characters.iter().skip(at).take(len).collect();
    if piece.is_empty() { "never".into() } else { piece }
}

impl Client {
    /// Starts the session of `ask` under these ids.
    pub fn new(ask: Ask, ids: Vec<RequestId>, tokenizer: &Tokenizer, effects: &mut Vec<SessionEffect>) -> Self {
        let (output, body) = if ask.streams {
            let (output, frames) = Output::frames(Box::new(NativeFormat { logprobs: None }), ask.buffer);
            let reads = if ask.buffer < 1 << 20 { Reads::Slowly } else { Reads::Promptly };
            (output, Body::Frames { frames, parser: SseParser::new(), got: Got::default(), reads })
        } else {
            let (output, outcome) = Output::whole(Box::new(Answers), ask.choices);
            (output, Body::Whole(outcome))
        };
        let decoder = || ChoiceDecoder::new(Box::new(tokenizer.detokenizer()), &ask.stops);
        let choices: Vec<_> = ids.iter().map(|&id| (id, decoder())).collect();
        let mut session = SessionCore::new(choices, output, ask.kind.prompt.len());
        session.open(effects);
        let expected = (0..ask.choices).map(|choice| ask.expected(choice, tokenizer)).collect();
        let scored = vec![0; ask.choices];
        Self { ask, ids, session, body, expected, scored, gone: false }
    }

    /// What the choice under `id` must be.
    pub fn expected_of(&self, id: RequestId) -> &Expected {
        &self.expected[self.choice_of(id)]
    }

    fn choice_of(&self, id: RequestId) -> usize {
        self.ids.iter().position(|&own| own == id).expect("an id of this client")
    }

    /// Prompt tokens of each of its sequences.
    pub fn prompt_tokens(&self) -> usize {
        self.ask.kind.prompt.len()
    }

    /// Whether it can still go away.
    pub fn is_waiting(&self) -> bool {
        !self.gone && !self.session.is_over()
    }

    /// Whether it reads only now and then.
    pub fn is_slow(&self) -> bool {
        matches!(self.body, Body::Frames { reads: Reads::Slowly, .. })
    }

    /// The client goes away; its session hears of it by mail.
    pub fn go(&mut self) {
        self.gone = true;
    }

    /// The session gets mail. Every score and every token is compared with the solo run, bit for bit, before it is used; no token comes
    /// before the last score.
    pub fn receive(&mut self, news: News, effects: &mut Vec<SessionEffect>) {
        match news {
            News::Entry(entry) => {
                let (choice, kind) = (self.choice_of(entry.request), self.ask.kind);
                let (alone, scores) = (&kind.alone[choice], kind.scores.as_deref().unwrap_or_default());
                let begin = self.scored[choice];
                self.scored[choice] += entry.prompt_scores.len();
                assert_eq!(entry.prompt_scores, scores[begin..self.scored[choice]], "I8: {} is scored", entry.request);
                assert!(entry.tokens.is_empty() || self.scored[choice] == scores.len(), "every score comes first");
                for token in &entry.tokens {
                    assert_eq!(token, &alone[token.index as usize], "I8: {} gets what it gets alone", entry.request);
                }
                self.session.news(entry, effects);
            }
            News::ClientGone => self.session.client_gone(effects),
            News::EngineDied => {
                self.session.fail(&ApiError::new(Code::EngineFailed, "the engine failed: scripted"), effects);
            }
        }
    }

    /// Reads what waits, at most `most` frames.
    pub fn read(&mut self, most: usize) {
        let Body::Frames { frames, parser, got, .. } = &mut self.body else { return };
        for _ in 0..most {
            match frames.poll_next(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(Some(Ok(bytes))) => parser.feed(&bytes, &mut |event| got.take(event.name, event.data)),
                Poll::Ready(Some(Err(SlowReader))) => got.cut = true,
                Poll::Ready(None) => {
                    got.closed = true;
                    return;
                }
                Poll::Pending => return,
            }
        }
    }

    /// Whether it asks for penalties or a bias.
    pub fn is_adjusted(&self) -> bool {
        self.ask.kind.adjust.is_some()
    }

    /// Nothing will come any more: the client has all that it must have.
    pub fn check(&mut self, may_fail: MayFail) -> Verdict {
        if self.gone {
            assert!(self.session.is_over(), "the session of a client that is gone has ended");
            return Verdict::Gone;
        }
        self.read(usize::MAX);
        match &mut self.body {
            Body::Frames { got, reads, .. } => got.check(&self.expected[0], &self.ask.kind.alone[0], *reads, may_fail),
            Body::Whole(outcome) => match outcome.try_recv().expect("a whole answer or a failure") {
                Ok(body) => {
                    let tokens: usize = self.expected.iter().map(|e| e.tokens).sum();
                    let scores = self.ask.kind.scores.as_deref().unwrap_or_default();
                    let answers = self.expected.iter().map(|expected| one(expected, scores));
                    let body: Value = serde_json::from_slice(&body).expect("JSON");
                    assert_eq!(body, said(answers, self.ask.kind.prompt.len(), tokens), "I7");
                    Verdict::Answered
                }
                Err(error) => {
                    assert_eq!(may_fail, MayFail::Yes, "failed without a reason: {error}");
                    Verdict::Failed
                }
            },
        }
    }
}

/// A whole answer as this client wants it.
struct Answers;

fn said(answers: impl Iterator<Item = Value>, prompt_tokens: usize, tokens: usize) -> Value {
    json!({"answers": answers.collect::<Vec<_>>(), "usage": [prompt_tokens, tokens]})
}

/// Debug text tells floats apart to the last bit.
fn one(expected: &Expected, scores: &[TokenLogprobs]) -> Value {
    json!([expected.text, format!("{:?}", expected.reason), expected.tokens, format!("{scores:?}")])
}

impl Format for Answers {
    fn whole(&self, answers: &[Answer], usage: Usage) -> bytes::Bytes {
        let one = |a: &Answer| json!([a.text, format!("{:?}", a.reason), a.tokens.len(), format!("{:?}", a.prompt)]);
        json_bytes(&said(answers.iter().map(one), usage.prompt_tokens, usage.completion_tokens))
    }

    fn token(&mut self, _choice: usize, _delta: &Delta) -> Option<bytes::Bytes> {
        unreachable!("a whole answer has no frames")
    }

    fn end(&mut self, _choice: usize, _end: &ChoiceEnd) -> bytes::Bytes {
        unreachable!("a whole answer has no frames")
    }

    fn failed(&mut self, _error: &ApiError) -> bytes::Bytes {
        unreachable!("a whole answer has no frames")
    }
}

/// How a client's request went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Answered,
    Failed,
    Cut,
    Gone,
}

impl Verdict {
    /// All of them, in the order of the tally.
    pub const ALL: [Verdict; 4] = [Verdict::Answered, Verdict::Failed, Verdict::Cut, Verdict::Gone];
}

impl Got {
    fn take(&mut self, name: &[u8], data: &[u8]) {
        assert!(self.done.is_none() && !self.failed, "nothing follows the end of a stream");
        let data: serde_json::Value = serde_json::from_slice(data).expect("a frame of JSON");
        let text = || data["text"].as_str().expect("a text").to_owned();
        match name {
            b"token" => {
                self.ids.push(data["token_id"].as_u64().expect("an id") as u32);
                self.text.push_str(&text());
            }
            b"done" => {
                self.text.push_str(&text());
                let tokens = data["tokens_generated"].as_u64().expect("a count") as usize;
                self.done = Some((data["finish_reason"].as_str().expect("a reason").to_owned(), tokens));
            }
            b"error" => self.failed = true,
            other => panic!("an unknown event {:?}", String::from_utf8_lossy(other)),
        }
    }

    fn check(
        &self,
        expected: &Expected,
        alone: &[crucible::actors::session::messages::GeneratedToken],
        reads: Reads,
        may_fail: MayFail,
    ) -> Verdict {
        assert!(self.closed, "the stream has an end");
        assert!(expected.text.starts_with(&self.text), "I7: {:?} begins {:?}", self.text, expected.text);
        assert!(self.ids.len() <= expected.tokens && self.ids.iter().zip(alone).all(|(&id, token)| id == token.id));
        match &self.done {
            Some((reason, tokens)) => {
                assert_eq!((&self.text, reason.as_str()), (&expected.text, expected.reason.name()), "I7");
                assert_eq!((*tokens, self.ids.len()), (expected.tokens, expected.tokens));
                Verdict::Answered
            }
            None if self.cut => {
                assert!(reads == Reads::Slowly, "only a slow reader is cut");
                Verdict::Cut
            }
            None => {
                assert!(self.failed && may_fail == MayFail::Yes, "a stream ended without an end");
                Verdict::Failed
            }
        }
    }
}
