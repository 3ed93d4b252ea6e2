//! A TOML document as a flat list of dotted keys, each with its value and the place it came from. Nothing here knows which keys
//! exist; [`super::fields`] asks for them by name.

use std::collections::BTreeMap;
use std::fmt;

use toml::de::{DeTable, DeValue};

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A line, from 1, of the configuration file.
    Line(usize),
    /// A `--set` on the command line.
    Override,
}

/// One thing wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where; absent when no single place is to blame.
    pub origin: Option<Origin>,
    /// What is wrong and what to write instead.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Some(Origin::Line(line)) => write!(f, "line {line}: {}", self.text),
            Some(Origin::Override) => write!(f, "--set: {}", self.text),
            None => write!(f, "{}", self.text),
        }
    }
}

/// A value as written, before its key gives it a meaning.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A string.
    Text(String),
    /// An integer.
    Integer(i64),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// An array of strings.
    Texts(Vec<String>),
    /// A table without keys: a section that may be empty, or nothing that a key takes.
    EmptyTable,
    /// Something no key takes, by its TOML name.
    Other(&'static str),
}

impl Value {
    /// What to call it in a message.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Text(_) => "a string",
            Value::Integer(_) => "an integer",
            Value::Float(_) => "a float",
            Value::Bool(_) => "a boolean",
            Value::Texts(_) => "an array",
            Value::EmptyTable => "a table",
            Value::Other(name) => name,
        }
    }
}

/// A value with its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The value.
    pub value: Value,
    /// Its place.
    pub origin: Origin,
}

/// Dotted key → entry.
#[derive(Clone, Debug, Default)]
pub struct Document {
    entries: BTreeMap<String, Entry>,
}

impl Document {
    /// Parses a whole file. Every syntax error is reported; keys around one are kept.
    pub fn parse(text: &str) -> (Self, Vec<Problem>) {
        let lines = LineIndex::new(text);
        let (table, errors) = DeTable::parse_recoverable(text);
        let mut document = Self::default();
        document.collect("", table.get_ref(), &|at| Origin::Line(lines.line(at)));
        let problems = errors
            .into_iter()
            .map(|e| Problem {
                origin: e.span().map(|s| Origin::Line(lines.line(s.start))),
                text: e.message().replace('\n', ", "),
            })
            .collect();
        (document, problems)
    }

    /// Applies one `key=value`. The value is TOML; what is no TOML value is taken as a string, so quotes are optional.
    ///
    /// # Errors
    /// A text without `=` or with an empty key.
    pub fn set(&mut self, assignment: &str) -> Result<(), Problem> {
        let wrong = |text: String| Problem { origin: Some(Origin::Override), text };
        let Some((key, value)) = assignment.split_once('=') else {
            return Err(wrong(format!("`{assignment}` has no `=`; write key=value, as in prefill.token_budget=512")));
        };
        let (key, value) = (key.trim(), value.trim());
        if key.is_empty() {
            return Err(wrong(format!("`{assignment}` has no key; write key=value, as in prefill.token_budget=512")));
        }
        match DeValue::parse(value) {
            Ok(parsed) => self.insert(key.to_owned(), parsed.get_ref(), &|_| Origin::Override, 0),
            Err(_) => {
                let entry = Entry { value: Value::Text(value.to_owned()), origin: Origin::Override };
                self.entries.insert(key.to_owned(), entry);
            }
        }
        Ok(())
    }

    /// Removes and returns a key's entry.
    pub fn take(&mut self, key: &str) -> Option<Entry> {
        self.entries.remove(key)
    }

    /// What is left, in key order.
    pub fn into_rest(self) -> impl Iterator<Item = (String, Entry)> {
        self.entries.into_iter()
    }

    /// Keys present, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    fn collect(&mut self, prefix: &str, table: &DeTable<'_>, origin: &dyn Fn(usize) -> Origin) {
        for (key, value) in table.iter() {
            let name = key.get_ref();
            let path = if prefix.is_empty() { name.to_string() } else { format!("{prefix}.{name}") };
            self.insert(path, value.get_ref(), origin, key.span().start);
        }
    }

    fn insert(&mut self, path: String, value: &DeValue<'_>, origin: &dyn Fn(usize) -> Origin, at: usize) {
        let value = match value {
            DeValue::Table(table) if table.is_empty() => Value::EmptyTable,
            DeValue::Table(table) => return self.collect(&path, table, origin),
            DeValue::String(text) => Value::Text(text.to_string()),
            DeValue::Integer(number) => integer(number.as_str(), number.radix()),
            DeValue::Float(number) => {
                number.as_str().replace('_', "").parse().map_or(Value::Other("a float"), Value::Float)
            }
            DeValue::Boolean(value) => Value::Bool(*value),
            DeValue::Datetime(_) => Value::Other("a date"),
            DeValue::Array(items) => texts(items.iter().map(|item| item.get_ref().as_str())),
        };
        self.entries.insert(path, Entry { value, origin: origin(at) });
    }
}

/// An array of strings, which may be empty; one with anything else in it is of no use to any key.
fn texts<'a>(items: impl Iterator<Item = Option<&'a str>>) -> Value {
    let texts: Option<Vec<String>> = items.map(|item| item.map(str::to_owned)).collect();
    texts.map_or(Value::Other("an array of other things than strings"), Value::Texts)
}

fn integer(digits: &str, radix: u32) -> Value {
    let plain = digits.replace('_', "");
    i64::from_str_radix(&plain, radix).map_or(Value::Other("an integer beyond 64 bits"), Value::Integer)
}

/// Byte offsets at which lines start.
struct LineIndex(Vec<usize>);

impl LineIndex {
    fn new(text: &str) -> Self {
        Self(std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect())
    }

    /// The line, from 1, that holds the byte at `offset`.
    fn line(&self, offset: usize) -> usize {
        self.0.partition_point(|&start| start <= offset)
    }
}
