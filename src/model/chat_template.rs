//! Chat templates: Jinja2 as model files carry it, rendered like the reference (trim_blocks, lstrip_blocks, Python's methods).
//!
//! A template comes with a model file and is trusted like one: it gets messages and names, no files and no network, and a budget
//! of `FUEL` steps after which it is stopped. Rendering is a pure function: `strftime_now` tells a fixed date. The
//! rendered text spells every special token, so it is encoded with `SpecialTokens::Parse` and no further token is added.

use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::Serialize;

/// Steps of a render; allocated text counts too, 64 bytes a step. Not counted by minijinja 3.1: a list added to itself, which a
/// model file could do more than thirty times to use up the memory.
const FUEL: u64 = 2_000_000;
/// Longest template in bytes.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Deepest nesting of macros and includes.
const MAX_RECURSION: usize = 64;
/// Longest text that `tojson` writes.
const MAX_JSON_BYTES: usize = 1 << 22;
const NAME: &str = "chat";

/// The template of models that carry none, synthetic ones included: ChatML.
pub const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// What `strftime_now` tells: the day on which templates of Llama 3 fall back when there is no clock.
const TODAY: Date = Date { year: 2024, month: 7, day: 26, weekday: 5, day_of_year: 208 };

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// Text.
    pub content: String,
}

impl ChatMessage {
    fn to_value(&self) -> Value {
        Value::from_pairs([("role", self.role.as_str()), ("content", self.content.as_str())])
    }
}

/// How the rendered text ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenerationPrompt {
    /// With the beginning of an answer: the model speaks next.
    Add,
    /// After the last message.
    Omit,
    /// Inside the last message, right after its content without trailing white space: the model continues it.
    Continue,
}

/// Why a template cannot be used, or a conversation not rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template does not compile.
    #[error("the model's chat template does not compile ({0}): use a model with another template")]
    Compile(String),
    /// The template itself refuses the conversation, by `raise_exception`.
    #[error("{0}")]
    Refused(String),
    /// The template failed.
    #[error("the model's chat template failed ({0}): send a plain prompt instead")]
    Render(String),
    /// The template used up its budget.
    #[error("the model's chat template does not come to an end in {FUEL} steps: send fewer messages or a plain prompt")]
    OutOfFuel,
    /// `Continue` without a last message whose content the rendered text contains.
    #[error("there is no last message to continue: end the conversation with a message that has text")]
    NothingToContinue,
}

/// A compiled template; clones share it.
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    bos: Arc<str>,
    eos: Arc<str>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ChatTemplate")
    }
}

impl ChatTemplate {
    /// Compiles `source`; `bos` and `eos` are what it calls `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// `Compile` with the line.
    pub fn compile(source: &str, bos: &str, eos: &str) -> Result<Self, TemplateError> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(TemplateError::Compile(format!("it has {} bytes, at most {MAX_SOURCE_BYTES}", source.len())));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| TemplateError::Compile(error.to_string()))?);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(MAX_RECURSION);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|error| TemplateError::Compile(error.to_string()))?;
        Ok(Self { environment: Arc::new(environment), bos: bos.into(), eos: eos.into() })
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// `Refused` when the template does not take this conversation (the client's fault), `Render` when the template is at
    /// fault, `OutOfFuel` when it may be either.
    pub fn render(&self, messages: &[ChatMessage], end: GenerationPrompt) -> Result<String, TemplateError> {
        match end {
            GenerationPrompt::Add | GenerationPrompt::Omit => self.whole(messages, end),
            GenerationPrompt::Continue => {
                let mut messages = messages.to_vec();
                let last = messages.last_mut().ok_or(TemplateError::NothingToContinue)?;
                let begun = last.content.trim_end().len();
                last.content.truncate(begun);
                if last.content.is_empty() {
                    return Err(TemplateError::NothingToContinue);
                }
                last.content.push_str(CUT);
                let mut text = self.whole(&messages, end)?;
                text.truncate(text.rfind(CUT).ok_or(TemplateError::NothingToContinue)?);
                Ok(text)
            }
        }
    }

    fn whole(&self, messages: &[ChatMessage], end: GenerationPrompt) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME).map_err(|error| TemplateError::Render(error.to_string()))?;
        let text = template.render(context! {
            messages => messages.iter().map(ChatMessage::to_value).collect::<Value>(),
            add_generation_prompt => end == GenerationPrompt::Add,
            bos_token => &*self.bos,
            eos_token => &*self.eos,
            tools => (),
            documents => (),
        });
        text.map_err(failure)
    }
}

/// Stands after a content that is to be continued while it is rendered, and says where to cut: the content itself may be written
/// again after it, as the `m` of an answer that begins with it is in `<|im_end|>`. Two noncharacters, which no text has.
const CUT: &str = "\u{fdd0}\u{fdd1}";

/// Marks the error that `raise_exception` makes; the text after it is the template's own.
const RAISED: &str = "raised by the template: ";

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
}

fn failure(error: Error) -> TemplateError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::OutOfFuel;
    }
    match error.detail().and_then(|detail| detail.strip_prefix(RAISED)) {
        Some(message) => TemplateError::Refused(message.to_owned()),
        None => TemplateError::Render(error.to_string()),
    }
}

/// `{% generation %}` marks the model's own words for training. It becomes `{% if true %}`, which renders the same, with the tag's
/// white-space control.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match word {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// `tojson` as Python's `json.dumps(ensure_ascii=False)` writes it: a space after commas and colons, nothing escaped for HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Accepted because templates write it; it is how this filter behaves anyway.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = Bounded(Vec::new());
    let result = match indent {
        Some(n) => {
            let spaces = " ".repeat(n.min(16));
            let format = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, format))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, PythonSpacing)),
    };
    let invalid = |error: String| Error::new(ErrorKind::BadSerialization, format!("tojson: {error}"));
    result.map_err(|error| invalid(error.to_string()))?;
    String::from_utf8(out.0).map(Value::from_safe_string).map_err(|error| invalid(error.to_string()))
}

/// Memory that refuses to grow past `MAX_JSON_BYTES`: a list may be far longer than the steps that made it.
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_JSON_BYTES {
            return Err(std::io::Error::other(format!("more than {MAX_JSON_BYTES} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// One line, `", "` between items and `": "` after keys.
struct PythonSpacing;

impl serde_json::ser::Formatter for PythonSpacing {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

struct Date {
    year: u32,
    month: usize,
    day: u32,
    /// 0 is Sunday.
    weekday: usize,
    day_of_year: u32,
}

/// `strftime` at midnight of the fixed day.
fn strftime_now(format: String) -> Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
    let (month, day) = (MONTHS[TODAY.month - 1], DAYS[TODAY.weekday]);
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(c) = characters.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match characters.next() {
            Some('Y') => out.push_str(&TODAY.year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", TODAY.year % 100)),
            Some('m') => out.push_str(&format!("{:02}", TODAY.month)),
            Some('d') => out.push_str(&format!("{:02}", TODAY.day)),
            Some('j') => out.push_str(&format!("{:03}", TODAY.day_of_year)),
            Some('B') => out.push_str(month),
            Some('b') => out.push_str(&month[..3]),
            Some('A') => out.push_str(day),
            Some('a') => out.push_str(&day[..3]),
            Some('H' | 'M' | 'S') => out.push_str("00"),
            Some('%') => out.push('%'),
            other => {
                let code = other.map(String::from).unwrap_or_default();
                let text = format!("strftime_now does not know %{code}");
                return Err(Error::new(ErrorKind::InvalidOperation, text));
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, content: &str) -> ChatMessage {
        ChatMessage { role: role.to_owned(), content: content.to_owned() }
    }

    fn render(source: &str, messages: &[ChatMessage]) -> Result<String, TemplateError> {
        ChatTemplate::compile(source, "<s>", "</s>")?.render(messages, GenerationPrompt::Add)
    }

    fn text_of(source: &str) -> String {
        render(source, &[message("user", "a<b> \"é\" 'q'")]).unwrap_or_else(|error| panic!("{source}: {error}"))
    }

    #[test]
    fn the_default_template_is_chatml() {
        let messages = [message("system", "Be brief."), message("user", "Hi")];
        let template = ChatTemplate::compile(CHATML, "", "").unwrap();
        let base = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n";
        assert_eq!(template.render(&messages, GenerationPrompt::Omit).unwrap(), base);
        assert_eq!(
            template.render(&messages, GenerationPrompt::Add).unwrap(),
            format!("{base}<|im_start|>assistant\n")
        );
    }

    #[test]
    fn an_answer_that_has_begun_is_continued_after_its_last_character() {
        let template = ChatTemplate::compile(CHATML, "", "").unwrap();
        let begun = [message("user", "The capital?"), message("assistant", "The capital? is ")];
        let text = template.render(&begun, GenerationPrompt::Continue).unwrap();
        assert!(text.ends_with("<|im_start|>assistant\nThe capital? is"), "{text}");
        for begun in ["m", "im_end", "end|>", "\n  x"] {
            let text = template.render(&[message("assistant", begun)], GenerationPrompt::Continue).unwrap();
            assert_eq!(text, format!("<|im_start|>assistant\n{begun}"));
        }
        let nothing = template.render(&[message("assistant", " ")], GenerationPrompt::Continue);
        assert!(matches!(nothing, Err(TemplateError::NothingToContinue)));
    }

    #[test]
    fn tojson_writes_what_python_writes() {
        assert_eq!(text_of("{{ messages | tojson }}"), r#"[{"role": "user", "content": "a<b> \"é\" 'q'"}]"#);
        assert_eq!(text_of("{{ {'a': [1, 2.5, none, true]} | tojson }}"), r#"{"a": [1, 2.5, null, true]}"#);
        assert_eq!(text_of("{{ {'a': [1]} | tojson(indent=2) }}"), "{\n  \"a\": [\n    1\n  ]\n}");
        assert_eq!(text_of("{{ {} | tojson }}{{ [] | tojson(ensure_ascii=false) }}"), "{}[]");
    }

    #[test]
    fn python_methods_and_names_are_there() {
        assert_eq!(text_of("{{ bos_token }}{{ ' x '.strip() }}{{ 'a,b'.split(',')[1] }}{{ eos_token }}"), "<s>xb</s>");
        assert_eq!(text_of("{% if tools is not none %}no{% else %}none{% endif %}"), "none");
        assert_eq!(text_of("{{ strftime_now('%d %b %Y, %A %B %j%%') }}"), "26 Jul 2024, Friday July 208%");
        assert_eq!(
            text_of("{% for m in messages %}{% if m['role'] == 'tool' %}{% continue %}{% endif %}x{% endfor %}"),
            "x"
        );
    }

    #[test]
    fn blocks_are_trimmed_as_in_the_reference() {
        assert_eq!(text_of("  {% if true %}\nx\n  {% endif %}\ny"), "x\ny");
    }

    #[test]
    fn generation_tags_vanish_with_their_white_space_control() {
        assert_eq!(text_of("a {%- generation -%} b {%- endgeneration %} c"), "ab c");
        assert_eq!(text_of("{% generation %}\nb{% endgeneration %}"), "b");
        assert_eq!(text_of("{{ 'generation' }}"), "generation");
    }

    #[test]
    fn a_refusal_is_the_templates_own_text() {
        let error = render("{{ raise_exception('roles must alternate') }}", &[]).unwrap_err();
        assert!(matches!(&error, TemplateError::Refused(text) if text == "roles must alternate"), "{error:?}");
    }

    #[test]
    fn hostile_templates_end() {
        let hostile = [
            "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{% set ns = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
            "{{ 'x' * 90000000 * 90000000 }}",
            "{% set ns = namespace(l=[0]) %}{% for i in range(28) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l | tojson }}",
        ];
        for source in hostile {
            let error = render(source, &[message("user", "x")]).expect_err(source);
            assert!(matches!(error, TemplateError::Render(_) | TemplateError::OutOfFuel), "{source}: {error:?}");
        }
    }

    #[test]
    fn a_broken_template_is_refused_when_it_is_compiled() {
        assert!(matches!(render("{% for %}", &[]), Err(TemplateError::Compile(_))));
        assert!(matches!(render(&"x".repeat(MAX_SOURCE_BYTES + 1), &[]), Err(TemplateError::Compile(_))));
    }
}
