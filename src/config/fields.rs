//! Reads known keys out of a [`Document`] and keeps every problem found on the way: wrong types, values out of range, keys that
//! nobody asked for. The caller learns all of them at once.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use super::document::{Document, Entry, Origin, Problem, Value};

/// A document that is being read.
pub struct Fields {
    document: Document,
    known: Vec<String>,
    origins: Vec<(String, Origin)>,
    problems: Vec<Problem>,
}

impl Fields {
    /// Starts to read; `problems` are those of the syntax.
    pub fn new(document: Document, problems: Vec<Problem>) -> Self {
        Self { document, known: Vec::new(), origins: Vec::new(), problems }
    }

    /// An integer within `range`.
    pub fn integer(&mut self, key: &str, default: i64, range: RangeInclusive<i64>) -> i64 {
        let Some(entry) = self.take(key) else { return default };
        self.checked_integer(key, entry, &range, "").unwrap_or(default)
    }

    /// As `integer`, for sizes.
    pub fn size(&mut self, key: &str, default: usize, range: RangeInclusive<usize>) -> usize {
        let bound = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let value = self.integer(key, bound(default), bound(*range.start())..=bound(*range.end()));
        usize::try_from(value).unwrap_or(default)
    }

    /// An integer within `range`, or `"off"`, which is the default.
    pub fn size_or_off(&mut self, key: &str, range: RangeInclusive<usize>) -> Option<usize> {
        let bound = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let entry = self.take(key)?;
        if entry.value == Value::Text("off".into()) {
            return None;
        }
        let range = bound(*range.start())..=bound(*range.end());
        self.checked_integer(key, entry, &range, " or \"off\"").and_then(|v| usize::try_from(v).ok())
    }

    /// A float (an integer is one too) within `range`.
    pub fn float(&mut self, key: &str, default: f64, range: RangeInclusive<f64>) -> f64 {
        let Some(entry) = self.take(key) else { return default };
        let value = match entry.value {
            Value::Float(value) => value,
            Value::Integer(value) => value as f64,
            ref other => {
                let text = format!("{key} must be a number, not {}", other.kind());
                self.blame(entry.origin, text);
                return default;
            }
        };
        if range.contains(&value) {
            return value;
        }
        self.blame(entry.origin, format!("{key} is {value}, it must lie in {}..={}", range.start(), range.end()));
        default
    }

    /// A boolean.
    pub fn boolean(&mut self, key: &str, default: bool) -> bool {
        let Some(entry) = self.take(key) else { return default };
        match entry.value {
            Value::Bool(value) => value,
            other => {
                self.blame(entry.origin, format!("{key} must be true or false, not {}", other.kind()));
                default
            }
        }
    }

    /// A string.
    pub fn text(&mut self, key: &str, default: &str) -> String {
        let Some(entry) = self.take(key) else { return default.to_owned() };
        match entry.value {
            Value::Text(value) => value,
            other => {
                self.blame(entry.origin, format!("{key} must be a string, not {}", other.kind()));
                default.to_owned()
            }
        }
    }

    /// An array of strings; empty is the default.
    pub fn texts(&mut self, key: &str) -> Vec<String> {
        let Some(entry) = self.take(key) else { return Vec::new() };
        match entry.value {
            Value::Texts(values) => values,
            other => {
                self.blame(entry.origin, format!("{key} must be an array of strings, not {}", other.kind()));
                Vec::new()
            }
        }
    }

    /// A path; the empty string, which is the default, is none.
    pub fn path(&mut self, key: &str) -> Option<PathBuf> {
        let text = self.text(key, "");
        (!text.is_empty()).then(|| PathBuf::from(text))
    }

    /// One of a few names; the first choice is the default.
    pub fn choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> T {
        let default = choices[0].1;
        let Some(entry) = self.take(key) else { return default };
        let names: Vec<String> = choices.iter().map(|(name, _)| format!("\"{name}\"")).collect();
        let found = match &entry.value {
            Value::Text(text) => choices.iter().find(|(name, _)| name == text).map(|&(_, value)| value),
            _ => None,
        };
        found.unwrap_or_else(|| {
            let given = match &entry.value {
                Value::Text(text) => format!("\"{text}\""),
                other => other.kind().to_owned(),
            };
            self.blame(entry.origin, format!("{key} must be {}, not {given}", names.join(" or ")));
            default
        })
    }

    /// Adds a problem that concerns the value of `key`, wherever that was written.
    pub fn reject(&mut self, key: &str, text: String) {
        self.reject_together(&[key], text);
    }

    /// Adds a problem that concerns the values of several keys. An override is to blame before a file, which was right without it;
    /// within a file the key that is named first.
    pub fn reject_together(&mut self, keys: &[&str], text: String) {
        let origin = |key: &&str| self.origins.iter().find(|(name, _)| name == key).map(|(_, origin)| origin.clone());
        let written: Vec<Origin> = keys.iter().filter_map(origin).collect();
        let origin = written.iter().find(|origin| **origin == Origin::Override).or(written.first()).cloned();
        self.problems.push(Problem { origin, text });
    }

    /// Ends the reading: what was not asked for is unknown. Returns the keys that exist and every problem, by line.
    pub fn finish(mut self) -> (Vec<String>, Vec<Problem>) {
        let names = sections(&self.known);
        for (key, entry) in self.document.into_rest() {
            let empty = entry.value == Value::EmptyTable;
            let text = match nearest(&key, &self.known, if empty { &names } else { &[] }) {
                _ if names.contains(&key) && empty => continue,
                _ if names.contains(&key) => {
                    format!("{key} is a section, not a key: write [{key}] and its keys below it")
                }
                Some(near) => format!("unknown key {key}, did you mean {near}?"),
                None => format!("unknown key {key}"),
            };
            self.problems.push(Problem { origin: Some(entry.origin), text });
        }
        let place = |p: &Problem| match p.origin {
            Some(Origin::Line(line)) => line,
            _ => usize::MAX,
        };
        self.problems.sort_by_key(place);
        (self.known, self.problems)
    }

    fn take(&mut self, key: &str) -> Option<Entry> {
        self.known.push(key.to_owned());
        let entry = self.document.take(key)?;
        self.origins.push((key.to_owned(), entry.origin.clone()));
        Some(entry)
    }

    fn blame(&mut self, origin: Origin, text: String) {
        self.problems.push(Problem { origin: Some(origin), text });
    }

    fn checked_integer(&mut self, key: &str, entry: Entry, range: &RangeInclusive<i64>, or: &str) -> Option<i64> {
        match entry.value {
            Value::Integer(value) if range.contains(&value) => return Some(value),
            Value::Integer(value) => {
                let text = format!("{key} is {value}, it must lie in {}..={}{or}", range.start(), range.end());
                self.blame(entry.origin, text);
            }
            other => self.blame(entry.origin, format!("{key} must be an integer{or}, not {}", other.kind())),
        }
        None
    }
}

/// Every section that some key stands in, `model` and `model.geometry` among them.
fn sections(known: &[String]) -> Vec<String> {
    let of = |key: &String| key.match_indices('.').map(|(at, _)| key[..at].to_owned()).collect::<Vec<_>>();
    known.iter().flat_map(of).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The known key or section closest to a misspelt one, if it is close.
fn nearest<'a>(key: &str, known: &'a [String], sections: &'a [String]) -> Option<&'a str> {
    let names = known.iter().chain(sections);
    let best = names.map(|k| (edit_distance(key, k), k)).min_by_key(|(distance, _)| *distance)?;
    (best.0 <= 3 && 2 * best.0 <= key.len()).then_some(best.1.as_str())
}

/// Levenshtein distance in bytes, one row at a time.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
