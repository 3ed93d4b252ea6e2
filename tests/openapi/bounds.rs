//! Every bound that the document states, held against the real server: the last value inside is taken, the first outside is refused.
//! The probes are made from the document itself, so a bound cannot be documented and untested. The other direction: what no schema
//! mentions is never taken.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::fuzz::operations;
use crate::http_support::binary::Binary;
use crate::http_support::client::{get, post};

#[path = "../http_support/checks.rs"]
mod checks;

use checks::Checks;

/// A server on which every documented maximum can be reached: the context is longer than prompt and answer together, the queue than
/// the choices of a request.
const OVERRIDES: [&str; 4] =
    ["limits.max_new_tokens=24", "limits.max_prompt_tokens=96", "limits.max_queue=160", "model.geometry.vocab=1200"];

/// What the server should say to a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Taken,
    Refused,
}

/// One body and what should become of it.
struct Probe {
    sentence: String,
    body: Value,
    expected: Expected,
}

/// An object that takes no other fields.
struct Closed {
    /// A body that holds it.
    body: Value,
    /// Where.
    at: String,
    fields: Vec<String>,
}

/// Walks the schema of one operation and collects its probes.
struct Walk<'a> {
    document: &'a Value,
    path: &'a str,
    probes: Vec<Probe>,
    objects: Vec<Closed>,
}

impl<'a> Walk<'a> {
    /// Everything that the schema of `path` promises.
    fn of(document: &'a Value, path: &'a str, schema: &Value) -> Self {
        let mut walk = Self { document, path, probes: Vec::new(), objects: Vec::new() };
        let body = walk.sample(schema, "");
        walk.expect(&body, "", "the least body", Expected::Taken);
        walk.any(schema, &body, "");
        walk
    }

    fn resolve(&self, schema: &Value) -> Value {
        match schema["$ref"].as_str() {
            Some(pointer) => self.document.pointer(&pointer[1..]).expect("a schema").clone(),
            None => schema.clone(),
        }
    }

    /// A small valid value; `name` is its field.
    fn sample(&self, schema: &Value, name: &str) -> Value {
        let schema = self.resolve(schema);
        if let Some(fixed) = schema.get("const") {
            return fixed.clone();
        }
        if let Some(values) = schema["enum"].as_array().or(schema["anyOf"].as_array()) {
            return if schema["enum"].is_array() { values[0].clone() } else { self.sample(&values[0], name) };
        }
        match schema["type"].as_str().expect("a type") {
            "object" => {
                let mut fields: BTreeSet<String> = names(&schema["required"]).into_iter().collect();
                fields.extend(schema["oneOf"].as_array().into_iter().flat_map(|one| names(&one[0]["required"])));
                // Without a number of tokens a dialect's own default may be over this server's limit.
                fields.extend(schema["properties"].get("max_tokens").map(|_| "max_tokens".to_owned()));
                fields.into_iter().map(|f| (f.clone(), self.sample(&schema["properties"][&f], &f))).collect()
            }
            "array" => json!([self.sample(&schema["items"], name)]),
            "string" if name == "model" => json!("tiny"),
            "string" => json!("hi"),
            "boolean" => json!(true),
            _ => schema["minimum"].clone(),
        }
    }

    fn expect(&mut self, body: &Value, at: &str, what: &str, expected: Expected) {
        let sentence = format!("{} {at}: {what} is {expected:?}", self.path);
        self.probes.push(Probe { sentence, body: settled(body.clone(), at), expected });
    }

    /// Expects of `value` at `at` in `body`.
    fn try_value(&mut self, body: &Value, at: &str, value: Value, expected: Expected) {
        let shown = shown(&value);
        self.expect(&set(body, at, value), at, &shown, expected);
    }

    /// Probes the value at `at`, which `body` holds in a form that this schema allows.
    fn any(&mut self, schema: &Value, body: &Value, at: &str) {
        let schema = self.resolve(schema);
        if let Some(fixed) = schema.get("const").or(schema.get("enum")) {
            let list = fixed.as_array().filter(|_| schema["enum"].is_array()).cloned();
            for value in list.unwrap_or_else(|| vec![fixed.clone()]) {
                self.try_value(body, at, value, Expected::Taken);
            }
            return self.try_value(body, at, json!("another"), Expected::Refused);
        }
        if let Some(alternatives) = schema["anyOf"].as_array() {
            for alternative in alternatives {
                let name = at.rsplit('/').next().unwrap_or("");
                let with = set(body, at, self.sample(alternative, name));
                self.any(alternative, &with, at);
            }
            return;
        }
        match schema["type"].as_str().expect("a type") {
            "object" => self.object(&schema, body, at),
            "array" => self.array(&schema, body, at),
            "string" => self.string(&schema, body, at),
            "boolean" => {
                self.try_value(body, at, json!(false), Expected::Taken);
                self.try_value(body, at, json!(1), Expected::Refused);
                self.try_value(body, at, json!("true"), Expected::Refused);
            }
            kind => self.number(&schema, kind, body, at),
        }
    }

    fn number(&mut self, schema: &Value, kind: &str, body: &Value, at: &str) {
        let (low, high) = (&schema["minimum"], &schema["maximum"]);
        let [below, above] = match kind {
            "integer" => [(low, -1), (high, 1)].map(|(bound, by)| moved(bound, by)),
            _ => [(low, -0.001), (high, 0.001)].map(|(bound, by)| json!(bound.as_f64().expect("a bound") + by)),
        };
        for (value, expected) in [
            (low.clone(), Expected::Taken),
            (high.clone(), Expected::Taken),
            (below, Expected::Refused),
            (above, Expected::Refused),
            (json!({}), Expected::Refused),
            (json!(true), Expected::Refused),
        ] {
            self.try_value(body, at, value, expected);
        }
        if kind == "integer" {
            self.try_value(body, at, json!(1.5), Expected::Refused);
        }
    }

    fn string(&mut self, schema: &Value, body: &Value, at: &str) {
        self.try_value(body, at, json!(true), Expected::Refused);
        if let Some(least) = schema["minLength"].as_u64() {
            assert_eq!(least, 1, "{at}");
            self.try_value(body, at, json!(""), Expected::Refused);
        }
        if let Some(most) = schema["maxLength"].as_u64() {
            // Two bytes a character: the bound is one of characters.
            self.try_value(body, at, json!("é".repeat(most as usize)), Expected::Taken);
            self.try_value(body, at, json!("é".repeat(most as usize + 1)), Expected::Refused);
        }
    }

    fn array(&mut self, schema: &Value, body: &Value, at: &str) {
        self.try_value(body, at, json!(true), Expected::Refused);
        let item = self.sample(&schema["items"], "");
        let of = |count: u64| Value::Array(vec![item.clone(); count as usize]);
        match schema["minItems"].as_u64().unwrap_or(u64::from(schema["contains"].is_object())) {
            0 => self.try_value(body, at, of(0), Expected::Taken),
            least => {
                self.try_value(body, at, of(least), Expected::Taken);
                self.try_value(body, at, of(least - 1), Expected::Refused);
            }
        }
        if let Some(most) = schema["maxItems"].as_u64() {
            self.try_value(body, at, of(most), Expected::Taken);
            self.try_value(body, at, of(most + 1), Expected::Refused);
        }
        self.any(&schema["items"], &set(body, at, of(1)), &format!("{at}/0"));
    }

    fn object(&mut self, schema: &Value, body: &Value, at: &str) {
        self.try_value(body, at, json!(["x"]), Expected::Refused);
        if schema["additionalProperties"].is_object() {
            return self.map(schema, body, at);
        }
        let fields = schema["properties"].as_object().expect("fields").keys().cloned().collect();
        self.objects.push(Closed { body: body.clone(), at: at.to_owned(), fields });
        for name in names(&schema["required"]) {
            self.expect(&without(body, at, &name), at, &format!("no {name}"), Expected::Refused);
        }
        self.together(schema, body, at);
        for (name, field) in schema["properties"].as_object().expect("fields") {
            let with = self.with(schema, body, at, name);
            self.any(field, &with, &format!("{at}/{name}"));
        }
    }

    /// A map from names to values of one schema.
    fn map(&mut self, schema: &Value, body: &Value, at: &str) {
        let most = schema["maxProperties"].as_u64().expect("a bound");
        let of = |count: u64| (0..count).map(|id| (id.to_string(), json!(1))).collect::<Value>();
        self.try_value(body, at, of(most), Expected::Taken);
        self.try_value(body, at, of(most + 1), Expected::Refused);
        for name in ["07", "a", "-1", "1.0", ""] {
            self.try_value(body, at, json!({name: 1}), Expected::Refused);
        }
        self.any(&schema["additionalProperties"], &set(body, at, json!({"7": 1})), &format!("{at}/7"));
    }

    /// What a schema says of fields together.
    fn together(&mut self, schema: &Value, body: &Value, at: &str) {
        if let Some(alternatives) = schema["oneOf"].as_array() {
            let all: Vec<String> = alternatives.iter().flat_map(|one| names(&one["required"])).collect();
            let none = all.iter().fold(body.clone(), |body, name| without(&body, at, name));
            self.expect(&none, at, &format!("none of {all:?}"), Expected::Refused);
            let fields = &schema["properties"];
            let every = all
                .iter()
                .fold(none, |body, name| set(&body, &format!("{at}/{name}"), self.sample(&fields[name], name)));
            self.expect(&every, at, &format!("all of {all:?}"), Expected::Refused);
        }
        for (name, needs) in schema["dependentRequired"].as_object().into_iter().flatten() {
            let with = self.with(schema, body, at, name);
            for other in names(needs) {
                self.expect(&without(&with, at, &other), at, &format!("{name} without {other}"), Expected::Refused);
            }
        }
        for (name, needs) in schema["dependentSchemas"].as_object().into_iter().flatten() {
            let with = self.with(schema, body, at, name);
            for (other, needed) in needs["properties"].as_object().expect("fields") {
                assert_eq!(needed["const"], true, "{name}");
                self.expect(&without(&with, at, other), at, &format!("{name} without {other}"), Expected::Refused);
                let wrong = set(&with, &format!("{at}/{other}"), json!(false));
                self.expect(&wrong, at, &format!("{name} with {other} = false"), Expected::Refused);
            }
        }
    }

    /// `body` with a sample of field `name` at `at`, and with what this field needs beside it.
    fn with(&self, schema: &Value, body: &Value, at: &str, name: &str) -> Value {
        let mut body = body.clone();
        for one in schema["oneOf"].as_array().into_iter().flatten() {
            let others = schema["oneOf"].as_array().into_iter().flatten().filter(|other| *other != one);
            if names(&one["required"]).iter().any(|n| n == name) {
                body = others.flat_map(|other| names(&other["required"])).fold(body, |b, n| without(&b, at, &n));
            }
        }
        for other in names(&schema["dependentRequired"][name]) {
            if body.pointer(&format!("{at}/{other}")).is_none() {
                body = self.with(schema, &body, at, &other);
            }
        }
        for (other, needed) in schema["dependentSchemas"][name]["properties"].as_object().into_iter().flatten() {
            body = set(&body, &format!("{at}/{other}"), needed["const"].clone());
        }
        if body.pointer(&format!("{at}/{name}")).is_some() {
            return body;
        }
        set(&body, &format!("{at}/{name}"), self.sample(&schema["properties"][name], name))
    }
}

/// The rules that the document can only tell in words.
fn settled(mut body: Value, at: &str) -> Value {
    match at {
        "/best_of" => body["n"] = body["best_of"].clone(),
        "/max_completion_tokens" => _ = body.as_object_mut().expect("an object").remove("max_tokens"),
        _ => {}
    }
    body
}

fn names(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// `body` with `value` at the pointer `at`.
fn set(body: &Value, at: &str, value: Value) -> Value {
    let mut body = body.clone();
    if let Some(place) = body.pointer_mut(at) {
        *place = value;
        return body;
    }
    let (parent, name) = at.rsplit_once('/').expect("a pointer");
    body.pointer_mut(parent).and_then(Value::as_object_mut).expect("an object").insert(name.to_owned(), value);
    body
}

fn without(body: &Value, at: &str, name: &str) -> Value {
    let mut body = body.clone();
    body.pointer_mut(at).and_then(Value::as_object_mut).expect("an object").remove(name);
    body
}

/// An integer one away, beyond 64 bits too.
fn moved(bound: &Value, by: i128) -> Value {
    let bound = bound.as_i64().map(i128::from).or(bound.as_u64().map(i128::from)).expect("an integer");
    let value = bound + by;
    i64::try_from(value).map(Value::from).or(u64::try_from(value).map(Value::from)).unwrap_or(json!(value as f64))
}

/// A value in a sentence: at length it is only counted.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match value {
        _ if text.len() <= 40 => text,
        Value::String(text) => format!("a string of {} characters", text.chars().count()),
        Value::Array(items) => format!("an array of {}", items.len()),
        Value::Object(fields) => format!("an object of {} fields", fields.len()),
        other => other.to_string(),
    }
}

/// The walks over all operations that take a body.
fn walks(document: &Value, mut each: impl FnMut(&str, Walk<'_>)) {
    for (path, _, operation) in operations(document) {
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        if !schema.is_null() {
            each(&path, Walk::of(document, &path, schema));
        }
    }
}

#[test]
fn every_documented_bound_is_the_servers_to_the_last_value() {
    let server = Binary::tiny(&OVERRIDES);
    let document = get(server.address, "/openapi.json").json();
    let mut checks = Checks::of("the document's bounds");
    let mut sentences = BTreeSet::new();
    walks(&document, |path, walk| {
        // A branch may be reached by several alternatives with the same value.
        for probe in walk.probes.into_iter().filter(|probe| sentences.insert(probe.sentence.clone())) {
            checks.check(&probe.sentence, || {
                let answer = post(server.address, path, &probe.body);
                // So many messages are never a short prompt: their number is taken when only their length is refused.
                let too_long = answer.status == 400 && answer.text().contains("context_length_exceeded");
                let most_messages = probe.sentence.contains("/messages: an array of 100000 is Taken");
                let expected = if probe.expected == Expected::Taken { 200 } else { 400 };
                let held = answer.status == expected || (most_messages && too_long);
                assert!(held, "{}: {} {}\n{}", probe.sentence, answer.status, answer.text(), shown(&probe.body));
            });
        }
    });
    checks.finish(700);
}

/// Every quoted name in the sources of the parsers: whatever they could ask for.
fn quoted(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).expect("the sources").map(|entry| entry.expect("an entry").path()) {
        if entry.is_dir() {
            quoted(&entry, found);
            continue;
        }
        let source = fs::read_to_string(&entry).expect("a source");
        let name = |text: &&str| {
            text.len() < 40
                && text.starts_with(|c: char| c.is_ascii_lowercase())
                && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
        };
        found.extend(source.split('"').filter(name).map(str::to_owned));
    }
}

#[test]
fn no_field_beside_the_document_is_ever_taken() {
    let server = Binary::tiny(&OVERRIDES);
    let document = get(server.address, "/openapi.json").json();
    let mut candidates = BTreeSet::new();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    quoted(&sources.join("protocol"), &mut candidates);
    for known in ["temperature", "tools", "cache_control", "include_obfuscation", "refusal", "suffix"] {
        assert!(candidates.contains(known), "{known}");
    }
    let values =
        [json!([]), json!({}), json!(""), json!("auto"), json!("none"), json!(true), json!(false), json!(0), json!(1)];
    let mut asked = BTreeSet::new();
    walks(&document, |path, walk| {
        for Closed { body, at, fields } in walk.objects {
            if !asked.insert((path.to_owned(), at.replace(|c: char| c.is_ascii_digit(), ""))) {
                continue;
            }
            for name in candidates.iter().filter(|name| !fields.contains(name)) {
                for value in &values {
                    let answer = post(server.address, path, &set(&body, &format!("{at}/{name}"), value.clone()));
                    assert_eq!(answer.status, 400, "{path} {at}/{name} = {value}: {}", answer.text());
                    // Nobody asks for it, whatever its value.
                    if answer.text().contains("unknown_parameter") {
                        break;
                    }
                }
            }
        }
    });
    assert!(asked.len() >= 12, "{asked:?}");
}
