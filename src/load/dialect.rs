//! The four surfaces that the generator speaks: how a request is written and what each event of its stream means. Pure.
//!
//! Two ways to read an event: `Counts` scans for the two or three keys that matter and allocates nothing, `Outputs` parses
//! the JSON and keeps ids and text for comparison. Token counts come from the server's usage figures where it reports them; an event
//! is not always one token.

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::job::Length;
use crate::protocol::events::SseEvent;

/// A surface of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// POST /v1/generate/stream with token ids.
    Native,
    /// POST /v1/completions with `stream: true`.
    OpenaiCompletions,
    /// POST /v1/chat/completions with `stream: true`.
    OpenaiChat,
    /// POST /v1/messages with `stream: true`.
    Anthropic,
}

impl Dialect {
    /// Every dialect.
    pub const ALL: [Dialect; 4] =
        [Dialect::Native, Dialect::OpenaiCompletions, Dialect::OpenaiChat, Dialect::Anthropic];

    /// As the command line and the reports spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Dialect::Native => "native",
            Dialect::OpenaiCompletions => "openai-completions",
            Dialect::OpenaiChat => "openai-chat",
            Dialect::Anthropic => "anthropic",
        }
    }

    /// Path of the streaming endpoint.
    pub const fn path(self) -> &'static str {
        match self {
            Dialect::Native => "/v1/generate/stream",
            Dialect::OpenaiCompletions => "/v1/completions",
            Dialect::OpenaiChat => "/v1/chat/completions",
            Dialect::Anthropic => "/v1/messages",
        }
    }

    /// Whether the dialect says that an event is JSON; what counts for nothing may hold anything.
    fn is_json(self, event: SseEvent<'_>) -> bool {
        match self {
            Dialect::Native => matches!(event.name, b"token" | b"done"),
            Dialect::OpenaiCompletions | Dialect::OpenaiChat => event.data != OPENAI_END && event.name != b"error",
            Dialect::Anthropic => event.name == b"content_block_delta" || event.name.starts_with(b"message_"),
        }
    }

    /// Whether a prompt can be given as token ids.
    pub const fn takes_token_ids(self) -> bool {
        matches!(self, Dialect::Native | Dialect::OpenaiCompletions)
    }
}

/// A prompt as it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Token ids, exactly as many as the workload says.
    Tokens(Vec<u32>),
    /// Text of about that many tokens, for surfaces that take only text.
    Text(String),
}

/// How a request samples. `Greedy` sends temperature 0 (nothing on the native surface, where that is its meaning).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Highest logit.
    Greedy,
    /// Temperature alone.
    Temperature,
    /// Temperature and the k best.
    TopK,
    /// Temperature and the nucleus.
    TopP,
    /// Temperature and a floor relative to the best.
    MinP,
}

impl Policy {
    /// The five policies of mixed workloads.
    pub const ALL: [Policy; 5] = [Policy::Greedy, Policy::Temperature, Policy::TopK, Policy::TopP, Policy::MinP];

    /// The policies that a surface can express without leaving its documented parameters.
    pub fn on(dialect: Dialect) -> &'static [Policy] {
        match dialect {
            Dialect::Native => &Policy::ALL,
            Dialect::OpenaiCompletions | Dialect::OpenaiChat => &[Policy::Greedy, Policy::Temperature, Policy::TopP],
            Dialect::Anthropic => &[Policy::Greedy, Policy::Temperature, Policy::TopK, Policy::TopP],
        }
    }

    fn write(self, dialect: Dialect, seed: Option<u64>, body: &mut Map<String, Value>) {
        if self == Policy::Greedy {
            if dialect != Dialect::Native {
                body.insert("temperature".into(), json!(0));
            }
            return;
        }
        body.insert("temperature".into(), json!(0.8));
        if let Some(seed) = seed {
            body.insert("seed".into(), json!(seed));
        }
        match self {
            Policy::TopK => body.insert("top_k".into(), json!(40)),
            Policy::TopP => body.insert("top_p".into(), json!(0.9)),
            Policy::MinP => body.insert("min_p".into(), json!(0.05)),
            Policy::Greedy | Policy::Temperature => None,
        };
    }
}

/// What a target was found to take, beyond the documented surface; see `probe`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// Sends `ignore_eos: true`.
    pub ignore_eos: bool,
    /// Sends token ids where the surface has them.
    pub token_prompts: bool,
    /// Asks for the usage figures in the stream.
    pub stream_usage: bool,
    /// Sends a seed with what is drawn; without one a drawn answer is nobody's to repeat.
    pub seed: bool,
}

impl Capabilities {
    /// What a dialect takes at best.
    pub fn best_of(dialect: Dialect) -> Self {
        Self {
            ignore_eos: true,
            token_prompts: dialect.takes_token_ids(),
            stream_usage: matches!(dialect, Dialect::OpenaiCompletions | Dialect::OpenaiChat),
            seed: true,
        }
    }

    /// Whether a request with this policy has one answer only.
    pub fn repeats(self, policy: Policy) -> bool {
        self.seed || policy == Policy::Greedy
    }
}

/// One request to be written.
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    /// The surface.
    pub dialect: Dialect,
    /// Model id; empty on surfaces without one.
    pub model: &'a str,
    /// The prompt.
    pub prompt: &'a Prompt,
    /// Tokens to generate.
    pub max_tokens: u32,
    /// How to sample.
    pub policy: Policy,
    /// Seed of the draws.
    pub seed: u64,
    /// What the target takes.
    pub takes: Capabilities,
}

impl Ask<'_> {
    /// What the answer must have: every token asked for where the target takes `ignore_eos`.
    pub fn length(&self) -> Length {
        if self.takes.ignore_eos { Length::Exactly(self.max_tokens) } else { Length::AtMost(self.max_tokens) }
    }

    /// The JSON body.
    pub fn body(&self) -> String {
        let mut body = Map::new();
        body.insert("max_tokens".into(), json!(self.max_tokens));
        if self.dialect != Dialect::Native {
            body.insert("model".into(), json!(self.model));
            body.insert("stream".into(), json!(true));
        }
        if self.takes.ignore_eos {
            body.insert("ignore_eos".into(), json!(true));
        }
        if self.takes.stream_usage {
            body.insert("stream_options".into(), json!({"include_usage": true}));
        }
        match (self.dialect, self.prompt) {
            (Dialect::Native, Prompt::Tokens(ids)) => body.insert("prompt_tokens".into(), json!(ids)),
            (Dialect::OpenaiCompletions, Prompt::Tokens(ids)) => body.insert("prompt".into(), json!(ids)),
            (Dialect::Native | Dialect::OpenaiCompletions, Prompt::Text(text)) => {
                body.insert("prompt".into(), json!(text))
            }
            (Dialect::OpenaiChat | Dialect::Anthropic, prompt) => {
                let text = match prompt {
                    Prompt::Text(text) => text.clone(),
                    Prompt::Tokens(ids) => ids.iter().map(|id| format!("{id} ")).collect(),
                };
                body.insert("messages".into(), json!([{"role": "user", "content": text}]))
            }
        };
        self.policy.write(self.dialect, self.takes.seed.then_some(self.seed), &mut body);
        Value::Object(body).to_string()
    }
}

/// How much of an answer is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// Counts and times only.
    Counts,
    /// Token ids and text as well, for an oracle.
    Outputs,
}

/// What one event of a stream means.
#[derive(Clone, Debug, PartialEq)]
pub enum Meaning {
    /// Output: with its id on the native surface; the text is empty unless it was to be kept.
    Token {
        /// The token's id, where the surface tells.
        id: Option<u32>,
        /// Text, under `Capture::Outputs`.
        text: String,
    },
    /// Token counts as the server reports them.
    Usage {
        /// Prompt tokens.
        prompt: Option<u32>,
        /// Generated tokens.
        output: Option<u32>,
    },
    /// The stream is complete; the text is what the server still held.
    Done {
        /// Text, under `Capture::Outputs`.
        text: String,
        /// Generated tokens, where the event tells.
        output: Option<u32>,
    },
    /// The server gave up on the request, or says what its dialect does not know.
    Error(String),
    /// Nothing that counts: roles, pings, empty deltas.
    Nothing,
}

/// The data of the last event of OpenAI's streams.
const OPENAI_END: &[u8] = b"[DONE]";
/// Characters of an event that an error repeats.
const EVENT_SHOWN: usize = 120;

/// Reads one event. An event that counts and is no JSON is an error.
pub fn interpret(dialect: Dialect, capture: Capture, event: SseEvent<'_>) -> Meaning {
    if !dialect.is_json(event) || serde_json::from_slice::<IgnoredAny>(event.data).is_ok() {
        return meaning(dialect, capture, event);
    }
    Meaning::Error(format!("an event of the stream is no JSON: {}", shown(event.data)))
}

/// The beginning of an event.
fn shown(data: &[u8]) -> String {
    String::from_utf8_lossy(data).chars().take(EVENT_SHOWN).collect()
}

fn meaning(dialect: Dialect, capture: Capture, event: SseEvent<'_>) -> Meaning {
    match dialect {
        Dialect::Native => native(capture, event),
        Dialect::OpenaiCompletions => openai(capture, event, b"\"text\":"),
        Dialect::OpenaiChat => openai(capture, event, b"\"content\":"),
        Dialect::Anthropic => anthropic(capture, event),
    }
}

fn native(capture: Capture, event: SseEvent<'_>) -> Meaning {
    match event.name {
        b"token" => {
            let (id, text) = match capture {
                Capture::Counts => (number_after(event.data, b"\"token_id\":"), String::new()),
                Capture::Outputs => {
                    let value = parse(event.data);
                    (u32_at(&value, "/token_id"), string_at(&value, "/text"))
                }
            };
            match id {
                Some(_) => Meaning::Token { id, text },
                None => Meaning::Error(format!("a token event without its token_id: {}", shown(event.data))),
            }
        }
        b"done" => {
            let value = parse(event.data);
            if !value.is_object() {
                return Meaning::Error(format!("the done event is no JSON object: {}", shown(event.data)));
            }
            let text = if capture == Capture::Outputs { string_at(&value, "/text") } else { String::new() };
            counted(&value, "/tokens_generated", |output| Meaning::Done { text, output })
        }
        b"error" => Meaning::Error(String::from_utf8_lossy(event.data).into_owned()),
        _ => Meaning::Nothing,
    }
}

fn openai(capture: Capture, event: SseEvent<'_>, text_key: &[u8]) -> Meaning {
    if event.data == OPENAI_END {
        return Meaning::Done { text: String::new(), output: None };
    }
    if has_object_after(event.data, b"\"usage\":") {
        let value = parse(event.data);
        // Some servers put usage on every chunk; the total is on a chunk without choices, or on the one that ends its choice.
        let no_choices = value.pointer("/choices").and_then(Value::as_array).is_none_or(Vec::is_empty);
        let ends = value.pointer("/choices/0/finish_reason").is_some_and(|f| !f.is_null());
        if no_choices || (ends && !has_nonempty_string_after(event.data, text_key)) {
            let prompt = u32_at(&value, "/usage/prompt_tokens");
            return counted(&value, "/usage/completion_tokens", |output| Meaning::Usage { prompt, output });
        }
    }
    if has_nonempty_string_after(event.data, text_key) {
        let text = match capture {
            Capture::Counts => String::new(),
            Capture::Outputs => {
                let value = parse(event.data);
                string_at(&value, "/choices/0/text") + &string_at(&value, "/choices/0/delta/content")
            }
        };
        return Meaning::Token { id: None, text };
    }
    if event.name == b"error" || has_object_after(event.data, b"\"error\":") {
        return Meaning::Error(String::from_utf8_lossy(event.data).into_owned());
    }
    Meaning::Nothing
}

fn anthropic(capture: Capture, event: SseEvent<'_>) -> Meaning {
    match event.name {
        b"content_block_delta" if has_nonempty_string_after(event.data, b"\"text\":") => {
            let text = match capture {
                Capture::Counts => String::new(),
                Capture::Outputs => string_at(&parse(event.data), "/delta/text"),
            };
            Meaning::Token { id: None, text }
        }
        b"message_start" => {
            Meaning::Usage { prompt: u32_at(&parse(event.data), "/message/usage/input_tokens"), output: None }
        }
        b"message_delta" => {
            counted(&parse(event.data), "/usage/output_tokens", |output| Meaning::Usage { prompt: None, output })
        }
        b"message_stop" => Meaning::Done { text: String::new(), output: None },
        b"error" => Meaning::Error(String::from_utf8_lossy(event.data).into_owned()),
        _ => Meaning::Nothing,
    }
}

fn parse(data: &[u8]) -> Value {
    serde_json::from_slice(data).unwrap_or(Value::Null)
}

fn u32_at(value: &Value, pointer: &str) -> Option<u32> {
    value.pointer(pointer).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok())
}

/// What an event means by the count of generated tokens in it, which may be absent or null but nothing else than a count.
fn counted(value: &Value, pointer: &str, meaning: impl FnOnce(Option<u32>) -> Meaning) -> Meaning {
    let count = u32_at(value, pointer);
    match value.pointer(pointer) {
        Some(told) if count.is_none() && !told.is_null() => {
            Meaning::Error(format!("the server's count of tokens is {told}"))
        }
        _ => meaning(count),
    }
}

fn string_at(value: &Value, pointer: &str) -> String {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// What follows a key, without white space. A quoted key with bare quotes cannot occur inside a JSON string, where every quote is
/// escaped, so the scan finds keys only.
fn after<'a>(data: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let at = memchr::memmem::find(data, key)?;
    Some(data[at + key.len()..].trim_ascii_start())
}

fn number_after(data: &[u8], key: &[u8]) -> Option<u32> {
    let rest = after(data, key)?;
    let digits = rest.iter().take_while(|b| b.is_ascii_digit());
    let (mut value, mut any) = (0u32, false);
    for digit in digits {
        value = value.checked_mul(10)?.checked_add(u32::from(digit - b'0'))?;
        any = true;
    }
    any.then_some(value)
}

fn has_nonempty_string_after(data: &[u8], key: &[u8]) -> bool {
    after(data, key).is_some_and(|rest| rest.first() == Some(&b'"') && rest.get(1) != Some(&b'"'))
}

fn has_object_after(data: &[u8], key: &[u8]) -> bool {
    after(data, key).is_some_and(|rest| rest.first() == Some(&b'{'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(dialect: Dialect, capture: Capture, name: &str, data: &str) -> Meaning {
        interpret(dialect, capture, SseEvent { name: name.as_bytes(), data: data.as_bytes() })
    }

    fn token(id: Option<u32>, text: &str) -> Meaning {
        Meaning::Token { id, text: text.into() }
    }

    #[test]
    fn native_tokens_give_the_same_id_by_scan_and_by_parser() {
        for data in [r#"{"token_id":42,"text":"\"token_id\":7"}"#, r#"{"text": "\"token_id\":7", "token_id": 42}"#] {
            assert_eq!(read(Dialect::Native, Capture::Counts, "token", data), token(Some(42), ""));
            assert_eq!(read(Dialect::Native, Capture::Outputs, "token", data), token(Some(42), "\"token_id\":7"));
        }
        let done = read(Dialect::Native, Capture::Outputs, "done", r#"{"tokens_generated":3,"text":"!"}"#);
        assert_eq!(done, Meaning::Done { text: "!".into(), output: Some(3) });
    }

    #[test]
    fn an_empty_delta_a_role_and_a_ping_are_no_tokens() {
        let chat = |data| read(Dialect::OpenaiChat, Capture::Counts, "", data);
        assert_eq!(chat(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#), Meaning::Nothing);
        assert_eq!(chat(r#"{"choices":[{"delta":{"role":"assistant","content":null}}]}"#), Meaning::Nothing);
        assert_eq!(chat(r#"{"choices":[{"delta":{"content": "a"}}],"usage":null}"#), token(None, ""));
        assert_eq!(read(Dialect::Anthropic, Capture::Counts, "ping", r#"{"type":"ping"}"#), Meaning::Nothing);
        let text = read(Dialect::OpenaiCompletions, Capture::Outputs, "", r#"{"choices":[{"text":"\u6f22"}]}"#);
        assert_eq!(text, token(None, "漢"));
    }

    #[test]
    fn usage_counts_only_when_it_is_the_total() {
        let read = |data| read(Dialect::OpenaiCompletions, Capture::Counts, "", data);
        let total = read(r#"{"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":64}}"#);
        assert_eq!(total, Meaning::Usage { prompt: Some(8), output: Some(64) });
        let running = read(r#"{"choices":[{"text":"a"}],"usage":{"prompt_tokens":8,"completion_tokens":1}}"#);
        assert_eq!(running, token(None, ""));
        let last = read(
            r#"{"choices":[{"text":"","finish_reason":"length"}],"usage":{"prompt_tokens":8,"completion_tokens":9}}"#,
        );
        assert_eq!(last, Meaning::Usage { prompt: Some(8), output: Some(9) });
    }

    #[test]
    fn a_body_carries_what_its_surface_documents_and_of_the_rest_what_the_target_takes() {
        let prompt = Prompt::Tokens(vec![5, 6]);
        let ask = |dialect, policy| {
            let takes = Capabilities { seed: dialect != Dialect::Anthropic, ..Capabilities::best_of(dialect) };
            let body = Ask { dialect, model: "m", prompt: &prompt, max_tokens: 4, policy, seed: 9, takes }.body();
            serde_json::from_str::<Value>(&body).expect("a JSON body")
        };
        let native = ask(Dialect::Native, Policy::Greedy);
        assert_eq!(native, json!({"prompt_tokens": [5, 6], "max_tokens": 4, "ignore_eos": true}));
        let open = ask(Dialect::OpenaiCompletions, Policy::TopP);
        assert_eq!((&open["prompt"], &open["top_p"], &open["seed"]), (&json!([5, 6]), &json!(0.9), &json!(9)));
        let anthropic = ask(Dialect::Anthropic, Policy::TopK);
        assert_eq!((anthropic.get("seed"), anthropic.get("stream_options")), (None, None));
        let takes = Capabilities::best_of(Dialect::Anthropic);
        let ask_seeded = |policy| {
            let (dialect, prompt) = (Dialect::Anthropic, &prompt);
            let body = Ask { dialect, model: "m", prompt, max_tokens: 4, policy, seed: 9, takes }.body();
            serde_json::from_str::<Value>(&body).expect("a JSON body")
        };
        assert_eq!(ask_seeded(Policy::TopK)["seed"], json!(9), "this server's extension, where the target takes it");
        assert_eq!(ask_seeded(Policy::Greedy).get("seed"), None);
        assert_eq!(anthropic["messages"][0]["content"], json!("5 6 "));
        for dialect in Dialect::ALL {
            for &policy in Policy::on(dialect) {
                let openai = matches!(dialect, Dialect::OpenaiCompletions | Dialect::OpenaiChat);
                assert!(!(openai && ask(dialect, policy).get("top_k").is_some()));
            }
        }
    }
}
