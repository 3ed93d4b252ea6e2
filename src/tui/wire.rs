//! The native API as this client speaks it: the bodies it sends and the part of each answer that it shows.
//! Unknown fields of an answer are passed over and absent ones are zero, so that an older or newer server still works.

use serde::{Deserialize, Serialize};

/// One message of a conversation, as the chat template takes it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Message {
    /// `user` or `assistant`.
    pub role: &'static str,
    /// Its text.
    pub content: String,
}

/// POST /tokenize, chat form.
#[derive(Debug, Serialize)]
pub struct TokenizeBody<'a> {
    /// The conversation, oldest first.
    pub messages: &'a [Message],
}

/// What /tokenize answers.
#[derive(Debug, Deserialize)]
pub struct Tokenized {
    /// Token ids, the template's special tokens included.
    pub tokens: Vec<u32>,
}

/// The sampling fields of POST /v1/generate/stream. An absent field is left out: the native dialect refuses filters without a
/// temperature.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SamplingBody {
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Absent means greedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    /// Keep the k likeliest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Keep the smallest set of this mass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Keep what is at least this share of the likeliest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
    /// Seed of the draws; absent is the server's documented value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
}

/// The prompt of a request: text as it is, or token ids.
#[derive(Debug, Serialize)]
pub enum PromptBody<'a> {
    /// Raw text.
    #[serde(rename = "prompt")]
    Text(&'a str),
    /// The ids that /tokenize gave.
    #[serde(rename = "prompt_tokens")]
    Tokens(&'a [u32]),
}

/// POST /v1/generate/stream.
#[derive(Debug, Serialize)]
pub struct GenerateBody<'a> {
    /// What to continue.
    #[serde(flatten)]
    pub prompt: PromptBody<'a>,
    /// How.
    #[serde(flatten)]
    pub sampling: &'a SamplingBody,
}

/// Data of the SSE event `token`.
#[derive(Debug, Deserialize)]
pub struct TokenData {
    /// Text that this token released; empty while a character is incomplete.
    #[serde(default)]
    pub text: String,
}

/// Data of the SSE event `done`.
#[derive(Debug, Deserialize)]
pub struct DoneData {
    /// Why it ended.
    #[serde(default)]
    pub finish_reason: String,
    /// Tokens generated in all.
    #[serde(default)]
    pub tokens_generated: usize,
    /// Text that was still held back.
    #[serde(default)]
    pub text: String,
}

/// The body of an error, in a stream or as a whole answer: `{"error": "…"}` or `{"error": {"message": "…"}}`.
#[derive(Debug, Deserialize)]
pub struct ErrorData {
    error: ErrorBody,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum ErrorBody {
    Text(String),
    Object {
        message: String,
        #[serde(default)]
        code: Option<String>,
    },
}

impl ErrorData {
    /// The words for a person.
    pub fn message(self) -> String {
        match self.error {
            ErrorBody::Text(text) | ErrorBody::Object { message: text, .. } => text,
        }
    }

    /// Whether prompt and answer are too long for the server.
    pub fn says_too_long(&self) -> bool {
        matches!(&self.error, ErrorBody::Object { code: Some(code), .. } if code == "context_length_exceeded")
    }
}

/// GET /health.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Health {
    /// `ok` while the engine lives.
    pub status: String,
    /// The configured model id.
    pub model: String,
    /// What computes.
    pub device: String,
    /// Resident requests at most.
    pub max_batch: u64,
    /// Longest sequence of the model in tokens.
    pub context: usize,
    /// Longest prompt that is served, in tokens.
    pub max_prompt_tokens: usize,
    /// Longest prompt and answer together that are served, in tokens.
    pub max_sequence_tokens: usize,
    /// KV pages in all.
    pub kv_pages: u64,
    /// The numerics profile.
    pub profile: String,
}

impl Health {
    /// What the server takes; an older one told its context only.
    pub fn lengths(&self) -> Lengths {
        let known = |tokens: usize| (tokens > 0).then_some(tokens);
        let sequence = known(self.max_sequence_tokens).or(known(self.context));
        Lengths { prompt: known(self.max_prompt_tokens), sequence }
    }
}

/// The longest prompt and the longest prompt and answer together that a server takes, in tokens; absent while unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lengths {
    /// Of the prompt.
    pub prompt: Option<usize>,
    /// Of both.
    pub sequence: Option<usize>,
}

impl Lengths {
    /// Whether a prompt and so many new tokens are within what is known.
    pub fn hold(&self, prompt: usize, max_new: usize) -> bool {
        self.prompt.is_none_or(|most| prompt <= most) && self.sequence.is_none_or(|most| prompt + max_new <= most)
    }
}

/// GET /stats, the fields of the live panel.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Resident requests.
    pub active_requests: u64,
    /// Waiting requests.
    pub queued_requests: u64,
    /// KV pages leased.
    pub kv_pages_used: u64,
    /// KV pages free.
    pub kv_pages_free: u64,
    /// Steps with a decode row.
    pub decode_steps: u64,
    /// Decode rows per such step, since the start.
    pub average_batch_size: f64,
    /// Slices that ended their prompt, each of which yields the first token of a request.
    pub prefill_final_rows: u64,
}

impl Stats {
    /// Tokens that the steps have yielded so far. Unlike `aggregate_tokens_generated` it moves while a request runs.
    pub fn tokens_computed(&self) -> f64 {
        self.average_batch_size * self.decode_steps as f64 + self.prefill_final_rows as f64
    }

    /// KV pages in all.
    pub fn kv_pages(&self) -> u64 {
        self.kv_pages_used + self.kv_pages_free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greedy_body_holds_no_sampling_field() {
        let sampling = SamplingBody { max_tokens: 8, ..SamplingBody::default() };
        let body = GenerateBody { prompt: PromptBody::Text("Hi"), sampling: &sampling };
        assert_eq!(serde_json::to_string(&body).unwrap(), r#"{"prompt":"Hi","max_tokens":8}"#);
    }

    #[test]
    fn a_sampled_body_names_every_field_as_the_contract_does() {
        let sampling = SamplingBody {
            max_tokens: 8,
            temperature: Some(0.5),
            top_k: Some(40),
            top_p: Some(0.9),
            min_p: Some(0.05),
            seed: Some(u64::MAX),
        };
        let body = GenerateBody { prompt: PromptBody::Tokens(&[1, 2]), sampling: &sampling };
        assert_eq!(
            serde_json::to_string(&body).unwrap(),
            r#"{"prompt_tokens":[1,2],"max_tokens":8,"temperature":0.5,"top_k":40,"top_p":0.9,"min_p":0.05,"seed":18446744073709551615}"#
        );
    }

    #[test]
    fn both_shapes_of_an_error_are_read() {
        for body in [r#"{"error":"too long"}"#, r#"{"error":{"message":"too long","code":"context"}}"#] {
            assert_eq!(serde_json::from_str::<ErrorData>(body).unwrap().message(), "too long");
        }
    }

    #[test]
    fn a_conversation_is_held_against_the_prompt_and_the_sequence_that_the_server_takes() {
        let health = Health { context: 8192, max_prompt_tokens: 100, max_sequence_tokens: 150, ..Health::default() };
        let holds = |prompt, max_new| health.lengths().hold(prompt, max_new);
        assert!(holds(100, 50) && !holds(101, 1) && !holds(100, 51));
        let older = Health { context: 8192, ..Health::default() }.lengths();
        assert!(older.hold(8000, 192) && !older.hold(8000, 193));
        assert!(Lengths::default().hold(1 << 30, 1 << 30), "nothing is known");
    }

    #[test]
    fn tokens_computed_counts_decode_rows_and_first_tokens() {
        let stats = Stats { decode_steps: 10, average_batch_size: 2.5, prefill_final_rows: 3, ..Stats::default() };
        assert_eq!(stats.tokens_computed(), 28.0);
    }
}
