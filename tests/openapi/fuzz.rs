//! Every route of the document answers, and no request that a fuzzer makes from it, valid or mutated, ends in a 500 or an answer
//! without its schema's shape. One fuzzer is here and always runs; schemathesis runs where Python and its packages can be had, and is
//! skipped visibly where not.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use serde_json::{Map, Value, json};

use crate::http_support::binary::Binary;
use crate::http_support::client::{get, send};
use crate::http_support::{at_rest, until};

/// Requests of the fuzzer that is here, per operation.
const CASES: usize = 120;
/// Seconds that schemathesis may spend.
const SCHEMATHESIS_SECONDS: &str = "60";

/// A small server on which every request is short.
fn server() -> Binary {
    Binary::tiny(&["limits.max_new_tokens=24", "server.workers=2"])
}

pub fn operations(document: &Value) -> Vec<(String, String, Value)> {
    let mut all = Vec::new();
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("methods") {
            all.push((path.clone(), method.to_uppercase(), operation.clone()));
        }
    }
    all
}

#[test]
fn every_route_of_the_document_answers() {
    let server = server();
    let document = get(server.address, "/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    let operations = operations(&document);
    assert!(operations.len() >= 15);
    for (path, method, operation) in operations {
        let concrete = path.replace("{id}", "tiny");
        let json = [("content-type", "application/json")];
        let answer =
            send(server.address, &method, &concrete, &json, if method == "POST" { b"{}" } else { b"" }).response();
        assert!(!matches!(answer.status, 404 | 405 | 500..), "{method} {path}: {} {}", answer.status, answer.text());
        let documented = operation["responses"].as_object().expect("responses");
        assert!(documented.contains_key(&answer.status.to_string()), "{method} {path}: {}", answer.status);
        // Another method is refused with the ones that are taken.
        let other = send(server.address, "DELETE", &concrete, &[], &[]).response();
        assert_eq!((other.status, other.header("allow").is_some()), (405, true), "{path}");
    }
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % n as u64) as usize
    }

    fn text(&mut self) -> String {
        let words = [
            "",
            "a",
            "tiny",
            "user",
            "text",
            "0",
            "\u{0}",
            "é",
            "日本",
            "😀",
            "<|im_end|>",
            "{{ x }}",
            "\n",
            "a\u{301}",
            " ",
        ];
        (0..self.below(4)).map(|_| words[self.below(words.len())]).collect()
    }

    /// Anything at all.
    fn anything(&mut self, depth: usize) -> Value {
        let numbers = [json!(0), json!(-1), json!(1.5), json!(1e300), json!(u64::MAX), json!(i64::MIN), json!(320)];
        match self.below(if depth == 0 { 5 } else { 7 }) {
            0 => Value::Null,
            1 => json!(self.below(2) == 1),
            2 | 3 => numbers[self.below(numbers.len())].clone(),
            4 => json!(self.text()),
            5 => (0..self.below(4)).map(|_| self.anything(depth - 1)).collect(),
            _ => (0..self.below(3)).map(|_| (self.text(), self.anything(depth - 1))).collect::<Map<_, _>>().into(),
        }
    }
}

/// Values from schemas, some of them broken on purpose.
struct Maker<'a> {
    document: &'a Value,
    dice: Dice,
    /// One value in so many is anything at all; 0 is never.
    broken: usize,
}

impl Maker<'_> {
    fn make(&mut self, schema: &Value, depth: usize) -> Value {
        if self.broken > 0 && self.dice.below(self.broken) == 0 {
            return self.dice.anything(3);
        }
        if let Some(pointer) = schema["$ref"].as_str() {
            let document = self.document;
            return self.make(document.pointer(&pointer[1..]).expect("a schema"), depth);
        }
        if let Some(fixed) = schema.get("const") {
            return fixed.clone();
        }
        for choices in ["enum", "anyOf"] {
            if let Some(list) = schema[choices].as_array() {
                let chosen = &list[self.dice.below(list.len())];
                return if choices == "enum" { chosen.clone() } else { self.make(chosen, depth) };
            }
        }
        match schema["type"].as_str() {
            Some("object") => self.object(schema, depth),
            Some("array") => {
                let least = schema["minItems"].as_u64().unwrap_or(0) as usize;
                (0..least + self.dice.below(3)).map(|_| self.make(&schema["items"], depth + 1)).collect()
            }
            Some("integer") => self.integer(schema),
            Some("number") => {
                let (low, high) =
                    (schema["minimum"].as_f64().unwrap_or(-2.0), schema["maximum"].as_f64().unwrap_or(2.0));
                let share = [0.0, 1.0, 0.5, 0.1, 1e-12][self.dice.below(5)];
                json!(low + (high - low) * share)
            }
            Some("boolean") => json!(self.dice.below(2) == 1),
            _ => json!(self.dice.text() + if schema["minLength"].is_null() { "" } else { "x" }),
        }
    }

    fn integer(&mut self, schema: &Value) -> Value {
        let (low, high) = (schema["minimum"].as_u64().unwrap_or(0), schema["maximum"].as_u64().unwrap_or(9));
        match self.dice.below(8) {
            0 => json!(high),
            1 => json!(low),
            _ => json!((low + self.dice.below(20) as u64).min(high)),
        }
    }

    /// What a schema says of fields together: one of `oneOf`'s alternatives, and what `dependentRequired` asks for.
    fn keep_together(&mut self, schema: &Value, fields: &mut Map<String, Value>, depth: usize) {
        let names = |list: &Value| -> Vec<String> {
            list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let mut wanted = Vec::new();
        if let Some(alternatives) = schema["oneOf"].as_array() {
            for other in alternatives.iter().flat_map(|one| names(&one["required"])) {
                fields.remove(&other);
            }
            wanted = names(&alternatives[self.dice.below(alternatives.len())]["required"]);
        }
        for (name, needs) in schema["dependentRequired"].as_object().into_iter().flatten() {
            if fields.contains_key(name) {
                wanted.extend(names(needs));
            }
        }
        for (name, needs) in schema["dependentSchemas"].as_object().into_iter().flatten() {
            if fields.contains_key(name) {
                for (other, needed) in needs["properties"].as_object().into_iter().flatten() {
                    fields.insert(other.clone(), needed["const"].clone());
                }
            }
        }
        for name in wanted {
            let dropped = self.broken > 0 && self.dice.below(self.broken) == 0;
            if !dropped && !fields.contains_key(&name) {
                let value = self.make(&schema["properties"][&name], depth + 1);
                fields.insert(name, value);
            }
        }
    }

    fn object(&mut self, schema: &Value, depth: usize) -> Value {
        let mut fields = Map::new();
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let dropped = self.broken > 0 && self.dice.below(self.broken) == 0;
            if (required.contains(&name.as_str()) && !dropped) || self.dice.below(4) == 0 {
                let value =
                    if name == "model" && self.dice.below(8) > 0 { json!("tiny") } else { self.make(field, depth + 1) };
                fields.insert(name.clone(), value);
            }
        }
        self.keep_together(schema, &mut fields, depth);
        if schema["additionalProperties"].is_object() {
            for _ in 0..self.dice.below(4) {
                fields.insert(self.dice.below(400).to_string(), self.make(&schema["additionalProperties"], depth + 1));
            }
        }
        if self.broken > 0 && self.dice.below(12) == 0 {
            fields.insert(self.dice.text(), self.dice.anything(2));
        }
        Value::Object(fields)
    }
}

#[test]
fn no_request_made_from_the_document_valid_or_broken_ends_in_a_500() {
    let server = server();
    let document = get(server.address, "/openapi.json").json();
    let mut statuses = std::collections::BTreeMap::<(String, u16), usize>::new();
    for (path, method, operation) in operations(&document) {
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        if schema.is_null() {
            continue;
        }
        let mut maker = Maker { document: &document, dice: Dice(7), broken: 0 };
        for case in 0..CASES {
            maker.broken = [0, 40, 12][case % 3];
            let mut body = maker.make(schema, 0).to_string().into_bytes();
            if case % 10 == 9 && !body.is_empty() {
                // Broken below the level of JSON: a byte changed, or the end cut off.
                let at = maker.dice.below(body.len());
                if case % 20 == 19 { body.truncate(at) } else { body[at] = maker.dice.below(256) as u8 }
            }
            let answer =
                send(server.address, &method, &path, &[("content-type", "application/json")], &body).response();
            let shown = String::from_utf8_lossy(&body).into_owned();
            let documented = operation["responses"].as_object().expect("responses");
            assert!(answer.status < 500 || answer.status == 529, "{path} {shown}: {} {}", answer.status, answer.text());
            assert!(documented.contains_key(&answer.status.to_string()), "{path} {shown}: {}", answer.status);
            if answer.status != 200 {
                assert!(answer.json()["error"]["message"].as_str().is_some_and(|m| !m.is_empty()), "{path} {shown}");
            }
            *statuses.entry((path.clone(), answer.status)).or_default() += 1;
        }
        let of = |status: u16| statuses.get(&(path.clone(), status)).copied().unwrap_or(0);
        // A fuzzer that is always refused, or never, tests little.
        assert!(of(200) >= CASES / 20 && of(400) >= CASES / 20, "{path}: {statuses:?}");
    }
    until("everything is back", || at_rest(server.address));
    assert_eq!(get(server.address, "/stats").json()["failed_requests"], 0);
    assert_eq!(get(server.address, "/health").status, 200);
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {text}")) }
}

/// schemathesis in an environment of its own below the build folder, made once.
fn schemathesis() -> Result<std::path::PathBuf, String> {
    let base = Path::new(env!("CARGO_TARGET_TMPDIR")).join("openapi");
    fs::create_dir_all(&base).expect("the target folder is writable");
    let lock = File::create(base.join("lock")).expect("the target folder is writable");
    lock.lock().expect("the lock can be taken");
    let requirements = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/openapi/requirements.txt");
    let wanted = fs::read_to_string(&requirements).expect("the file is in the repository");
    let (venv, done) = (base.join("venv"), base.join("done"));
    let program = venv.join("bin").join("schemathesis");
    if fs::read_to_string(&done).is_ok_and(|made| made == wanted) && program.exists() {
        return Ok(program);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
    let quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"];
    run(Command::new(venv.join("bin").join("python")).args(quiet).arg(&requirements))?;
    fs::write(done, wanted).expect("the target folder is writable");
    Ok(program)
}

#[test]
fn schemathesis_finds_no_500_and_no_answer_beside_its_schema() {
    let program = match schemathesis() {
        Ok(program) => program,
        Err(error) => {
            eprintln!("{error}");
            eprintln!("SKIPPED 1 test: schemathesis needs python3 with venv, pip and a package index");
            return;
        }
    };
    // The longest text that is taken, escaped, is longer than the usual limit of a body.
    let server = Binary::tiny(&["limits.max_new_tokens=24", "server.body_limit_bytes=33554432"]);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("openapi");
    let output = Command::new(program)
        .current_dir(folder)
        .args(["run", &format!("http://{}/openapi.json", server.address)])
        .args([
            "--checks",
            "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        ])
        // One worker: its generator of values is not safe for threads, and called a case of its own inconsistent.
        .args(["--phases", "examples,coverage,fuzzing", "--max-examples", "40", "--seed", "1", "--workers", "1"])
        .args(["--max-time", SCHEMATHESIS_SECONDS, "--request-timeout", "300", "--warnings", "off"])
        .args(["--suppress-health-check", "all", "--no-color"])
        .output()
        .expect("schemathesis starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("generated"), "{text}");
    assert_eq!(get(server.address, "/health").status, 200);
}
