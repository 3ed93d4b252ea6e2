//! /v1/completions.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use super::envelope::Envelope;
use super::joined::{Offsets, Seam};
use super::{Common, MaxTokens};
use crate::actors::session::messages::GeneratedToken;
use crate::backend::TokenLogprobs;
use crate::model::detokenizer::TextStream;
use crate::protocol::body::{Body, Unserved, token_ids, wrong_type};
use crate::protocol::choice::{Answer, ChoiceEnd, Delta, Vocabulary};
use crate::protocol::errors::{ApiError, Code};
use crate::protocol::format::{Format, Usage};
use crate::protocol::native::Prompt;
use crate::protocol::sampling::{LOGPROBS, MAX_TOKENS};

const OBJECT: &str = "text_completion";

/// Fields that are not served.
pub static UNSERVED: LazyLock<Unserved> = LazyLock::new(|| vec![("suffix", vec![json!("")])]);

/// A completion request.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// Fields of both OpenAI endpoints.
    pub common: Common,
    /// What to continue, at least one.
    pub prompts: Vec<Prompt>,
    /// Most tokens to generate, when the client names a number.
    pub max_tokens: Option<MaxTokens>,
    /// Whether the prompt stands before each answer.
    pub echo: bool,
    /// Log-probabilities wanted, with so many alternatives.
    pub logprobs: Option<u8>,
}

impl CompletionRequest {
    /// Reads a request body; `n` may be `most_choices` at most.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn parse(bytes: &[u8], most_choices: u64) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let prompt = body.value("prompt");
        let echo = body.boolean("echo")?.unwrap_or(false);
        if echo {
            generates(&body)?;
        }
        let request = Self {
            common: Common::parse(&mut body, most_choices)?,
            prompts: prompts(body.require("prompt", prompt)?)?,
            max_tokens: body
                .integer("max_tokens", MAX_TOKENS)?
                .map(|n| MaxTokens { tokens: n as usize, field: "max_tokens" }),
            echo,
            logprobs: body.integer("logprobs", LOGPROBS)?.map(|n| n as u8),
        };
        body.unsupported("best_of", &[json!(request.common.n)])?;
        body.refuse(&UNSERVED)?;
        body.finish()?;
        Ok(request)
    }
}

/// A request always generates: one that only wants its prompt scored is told how to ask.
fn generates(body: &Body) -> Result<(), ApiError> {
    if body.peek("max_tokens").and_then(Value::as_u64) != Some(0) {
        return Ok(());
    }
    let text = "max_tokens is 0, it must be at least 1; to score a prompt send echo, logprobs and max_tokens 1 and leave out what \
                stands after the prompt";
    Err(ApiError::about(Code::InvalidValue, "max_tokens", text))
}

fn prompts(value: Value) -> Result<Vec<Prompt>, ApiError> {
    let items = match value {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(items) => items,
        other => return Err(wrong_type("prompt", "a string, an array of token ids, or an array of either", &other)),
    };
    match items.first() {
        None => Err(ApiError::about(
            Code::InvalidValue,
            "prompt",
            "prompt is empty; send a text, token ids or a list of them",
        )),
        Some(Value::Number(_)) => Ok(vec![Prompt::Tokens(token_ids("prompt", Value::Array(items))?)]),
        Some(_) => items
            .into_iter()
            .enumerate()
            .map(|(at, item)| match item {
                Value::String(text) => Ok(Prompt::Text(text)),
                ids => token_ids(&format!("prompt[{at}]"), ids).map(Prompt::Tokens),
            })
            .collect(),
    }
}

/// Log-probabilities in the four parallel lists of this endpoint.
#[derive(Clone, Debug, Default, Serialize)]
struct Logprobs {
    tokens: Vec<String>,
    /// Null for the first token of a prompt, which nothing predicts.
    token_logprobs: Vec<Option<f64>>,
    top_logprobs: Vec<Option<BTreeMap<String, f64>>>,
    text_offset: Vec<usize>,
}

impl Logprobs {
    /// Appends a token that stands at `offset`, in characters.
    fn push(&mut self, id: u32, values: Option<&TokenLogprobs>, offset: usize, vocabulary: &dyn Vocabulary) {
        let text = name(id, vocabulary);
        let top = values.map(|values| {
            let named = values.top.iter().map(|&(id, logprob)| (name(id, vocabulary), logprob));
            let mut top: BTreeMap<_, _> = named.collect();
            top.insert(text.clone(), values.chosen);
            top
        });
        self.tokens.push(text);
        self.token_logprobs.push(values.map(|v| v.chosen));
        self.top_logprobs.push(top);
        self.text_offset.push(offset);
    }

    /// Appends a prompt from its beginning.
    fn push_prompt(&mut self, echo: &Echo, scores: &[TokenLogprobs], at: &mut Offsets, vocabulary: &dyn Vocabulary) {
        let values = std::iter::once(None).chain(scores.iter().map(Some));
        for (&id, values) in echo.ids.iter().zip(values) {
            self.push(id, values, at.push(&vocabulary.token_bytes(id)), vocabulary);
        }
    }

    /// Appends a token of an answer.
    fn push_answer(&mut self, token: &GeneratedToken, at: &mut Offsets, vocabulary: &dyn Vocabulary) {
        self.push(token.id, token.logprobs.as_ref(), at.push(&answer_bytes(token.id, vocabulary)), vocabulary);
    }
}

/// What a token is called here. Part of a character has no text of its own and would share one replacement character with all
/// others, so it is called by its bytes, as OpenAI does: `bytes:\xe3\x81`.
fn name(id: u32, vocabulary: &dyn Vocabulary) -> String {
    let bytes = vocabulary.token_bytes(id);
    if std::str::from_utf8(&bytes).is_ok() {
        return vocabulary.token_text(id);
    }
    bytes.iter().fold("bytes:".to_owned(), |name, byte| format!("{name}\\x{byte:02x}"))
}

/// The bytes that a token adds to the text of an answer.
fn answer_bytes(id: u32, vocabulary: &dyn Vocabulary) -> Vec<u8> {
    if vocabulary.is_special(id) { Vec::new() } else { vocabulary.token_bytes(id) }
}

/// A prompt that stands before its answer.
#[derive(Clone)]
pub struct Echo {
    /// Its text, special tokens included, but for a character at its end that is not whole.
    text: String,
    /// That character, which the answer may complete.
    unfinished: TextStream,
    /// Its tokens.
    ids: Arc<[u32]>,
    /// Scores of its tokens but the first, as they come in a stream.
    scores: Vec<TokenLogprobs>,
}

impl Echo {
    /// The prompt of these tokens.
    pub fn new(ids: Arc<[u32]>, vocabulary: &dyn Vocabulary) -> Self {
        let mut unfinished = TextStream::default();
        let text = ids.iter().map(|&id| unfinished.push(&vocabulary.token_bytes(id))).collect();
        Self { text, unfinished, ids, scores: Vec::new() }
    }

    /// What joins an answer to it.
    fn seam(&self) -> Seam {
        Seam::after(self.unfinished.clone())
    }

    /// It and its whole answer as one text.
    fn with(&self, answer: &Answer, vocabulary: &dyn Vocabulary) -> String {
        let mut seam = self.seam();
        answer.tokens.iter().for_each(|token| seam.push(&answer_bytes(token.id, vocabulary)));
        format!("{}{}", self.text, seam.finish(&answer.text))
    }

    /// Whether every token that can have a score has it.
    fn is_scored(&self) -> bool {
        self.scores.len() + 1 >= self.ids.len()
    }
}

/// One response.
pub struct CompletionFormat {
    /// What is around the choices.
    envelope: Envelope,
    /// What stands before each choice, or nothing.
    echo: Vec<Echo>,
    /// Whether choices carry log-probabilities.
    logprobs: Option<u8>,
    /// Per choice, where the tokens of its stream stand, and what joins it to what stands before it.
    streams: Vec<(Offsets, Seam)>,
}

#[derive(Serialize)]
struct WholeChoice {
    text: String,
    index: usize,
    logprobs: Option<Logprobs>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    text: &'a str,
    index: usize,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

impl CompletionFormat {
    /// A response of `choices` choices; `echo` has what stands before each, or nothing.
    pub fn new(envelope: Envelope, choices: usize, echo: Vec<Echo>, logprobs: Option<u8>) -> Self {
        let seam = |choice| echo.get(choice).map(Echo::seam).unwrap_or_default();
        let streams = (0..choices).map(|choice| (Offsets::default(), seam(choice))).collect();
        Self { envelope, echo, logprobs, streams }
    }

    fn chunk(&self, choice: ChunkChoice<'_>) -> Bytes {
        self.envelope.chunk(OBJECT, choice)
    }

    /// The prompt of a choice, with its scores where they were asked for.
    fn before(&mut self, choice: usize) -> Bytes {
        let echo = &self.echo[choice];
        let logprobs = self.logprobs.map(|_| {
            let mut lists = Logprobs::default();
            lists.push_prompt(echo, &echo.scores, &mut self.streams[choice].0, &*self.envelope.vocabulary);
            lists
        });
        self.chunk(ChunkChoice { text: &echo.text, index: choice, logprobs, finish_reason: None })
    }
}

impl Format for CompletionFormat {
    fn whole(&self, answers: &[Answer], usage: Usage) -> Bytes {
        let choice = |(index, answer): (usize, &Answer)| {
            let (echo, vocabulary) = (self.echo.get(index), &*self.envelope.vocabulary);
            let logprobs = self.logprobs.map(|_| {
                let (mut lists, mut at) = (Logprobs::default(), Offsets::default());
                if let Some(echo) = echo {
                    lists.push_prompt(echo, &answer.prompt, &mut at, vocabulary);
                }
                answer.tokens.iter().for_each(|token| lists.push_answer(token, &mut at, vocabulary));
                lists
            });
            let text = echo.map_or_else(|| answer.text.clone(), |echo| echo.with(answer, vocabulary));
            WholeChoice { text, index, logprobs, finish_reason: answer.reason.name() }
        };
        let choices: Vec<_> = answers.iter().enumerate().map(choice).collect();
        self.envelope.whole(OBJECT, &choices, usage)
    }

    fn open(&mut self) -> Option<Bytes> {
        // A prompt whose tokens are still to be scored follows with its scores.
        let due: Vec<_> =
            (0..self.echo.len()).filter(|&c| self.logprobs.is_none() || self.echo[c].is_scored()).collect();
        (!due.is_empty()).then(|| due.into_iter().flat_map(|choice| self.before(choice)).collect())
    }

    fn prompt(&mut self, choice: usize, scores: Vec<TokenLogprobs>) -> Option<Bytes> {
        let echo = self.echo.get_mut(choice)?;
        echo.scores.extend(scores);
        echo.is_scored().then(|| self.before(choice))
    }

    fn token(&mut self, choice: usize, delta: &Delta) -> Option<Bytes> {
        let vocabulary = &*self.envelope.vocabulary;
        let (offsets, seam) = &mut self.streams[choice];
        seam.push(&answer_bytes(delta.token.id, vocabulary));
        let text = seam.text(&delta.text);
        let logprobs = self.logprobs.map(|_| {
            let mut lists = Logprobs::default();
            lists.push_answer(&delta.token, offsets, vocabulary);
            lists
        });
        let shown = logprobs.is_some() || !text.is_empty();
        shown.then(|| self.chunk(ChunkChoice { text: &text, index: choice, logprobs, finish_reason: None }))
    }

    fn end(&mut self, choice: usize, end: &ChoiceEnd) -> Bytes {
        let finish_reason = Some(end.reason.name());
        let text = self.streams[choice].1.finish(&end.tail);
        self.chunk(ChunkChoice { text: &text, index: choice, logprobs: None, finish_reason })
    }

    fn close(&mut self, usage: Usage) -> Option<Bytes> {
        Some(self.envelope.close(OBJECT, usage))
    }

    fn failed(&mut self, error: &ApiError) -> Bytes {
        Envelope::failed(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::openai::MAX_CHOICES;

    fn parse(prompt: Value, fields: Value) -> Result<CompletionRequest, ApiError> {
        let mut body = json!({"model": "m", "prompt": prompt});
        for (name, value) in fields.as_object().expect("an object") {
            body[name] = value.clone();
        }
        CompletionRequest::parse(body.to_string().as_bytes(), MAX_CHOICES)
    }

    #[test]
    fn a_prompt_is_text_or_ids_or_an_array_of_either() {
        let cases = [
            (json!("a"), vec![Prompt::Text("a".into())]),
            (json!(["a", "b"]), vec![Prompt::Text("a".into()), Prompt::Text("b".into())]),
            (json!([1, 2]), vec![Prompt::Tokens(vec![1, 2])]),
            (json!([[1], [2, 3]]), vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]),
        ];
        for (prompt, expected) in cases {
            assert_eq!(parse(prompt, json!({})).expect("valid").prompts, expected);
        }
        for prompt in [json!([]), json!(3), json!([1, "a"]), json!([[1], [true]]), json!([1.5])] {
            assert_eq!(parse(prompt, json!({})).expect_err("invalid").code, Code::InvalidValue);
        }
    }

    #[test]
    fn a_prompt_that_is_only_to_be_scored_is_refused_with_the_way_to_ask() {
        let error = parse(json!("a"), json!({"max_tokens": 0, "echo": true, "logprobs": 1})).expect_err("refused");
        assert_eq!((error.code, error.param.as_deref()), (Code::InvalidValue, Some("max_tokens")));
        assert!(error.message.contains("max_tokens 1"), "{error}");
        let error = parse(json!("a"), json!({"max_tokens": 0})).expect_err("refused");
        assert!(!error.message.contains("echo"), "{error}");
    }

    #[test]
    fn best_of_passes_at_n_only_and_a_suffix_when_it_is_empty_only() {
        assert!(parse(json!("a"), json!({"n": 2, "best_of": 2})).is_ok());
        assert!(parse(json!("a"), json!({"n": 2, "best_of": 3})).is_err());
        for none in [json!(""), json!(null)] {
            assert!(parse(json!("a"), json!({"suffix": none})).is_ok());
        }
        assert_eq!(parse(json!("a"), json!({"suffix": "x"})).expect_err("suffix").param.as_deref(), Some("suffix"));
    }
}
