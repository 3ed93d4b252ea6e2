//! What can be started and measured: a configuration of this server, or any server by its command, with the hash of its program.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};

use super::dialect::Dialect;
use super::file;
use super::launch::{LaunchError, io};
use crate::config::{Document, Entry, Written};
use crate::model::pull::sha256;

/// Stands for a key in reports.
const HIDDEN: &str = "(hidden)";

/// A server that can be started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// In reports.
    #[serde(default)]
    pub name: String,
    /// Program and arguments; values of keys, tokens and secrets are hidden in reports.
    #[serde(serialize_with = "without_secrets")]
    pub command: Vec<String>,
    /// Where it will answer.
    pub url: String,
    /// How it is asked.
    #[serde(default = "native")]
    pub dialect: Dialect,
    /// Answers 200 once it can serve.
    #[serde(default = "health")]
    pub ready: String,
    /// SHA-256 of the program.
    #[serde(default, skip_deserializing)]
    pub sha256: Option<String>,
    /// What the configuration of a server of this project sets, overrides included, keys hidden; absent for other servers.
    #[serde(default, skip_deserializing)]
    pub config: Option<BTreeMap<String, Value>>,
}

fn native() -> Dialect {
    Dialect::Native
}

fn health() -> String {
    "/health".into()
}

impl Variant {
    /// A server of this project: a binary, its configuration and settings on top of it.
    ///
    /// # Errors
    /// The configuration cannot be read, a setting names the port, or no port is free.
    pub fn serve(name: &str, binary: &Path, config: &Path, settings: &[String]) -> Result<Self, LaunchError> {
        if settings.iter().any(|s| sets(s, "server.port")) {
            let message = "server.port is chosen for it; leave it out of --set".into();
            return Err(LaunchError::Unfit { name: name.into(), message });
        }
        let set = file::read(config).map_err(io(format!("cannot read {}", config.display())))?;
        let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).map_err(io("no free port"))?.port();
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut command = vec![text(binary), "serve".into(), "--config".into(), text(config)];
        for setting in settings.iter().cloned().chain([format!("server.port={port}")]) {
            command.extend(["--set".into(), setting]);
        }
        let url = format!("http://127.0.0.1:{port}");
        let (dialect, ready) = (native(), health());
        let config = Some(what_is_set(&set, settings));
        Ok(Self { name: name.into(), command, url, dialect, ready, sha256: None, config })
    }

    /// Reads a file: with a `command` it describes any server (docs/load.md), otherwise it is a configuration for `binary`. A `dialect`
    /// of the caller's stands where the file names none.
    ///
    /// # Errors
    /// The file cannot be read or its variant form is wrong.
    pub fn from_file(path: &Path, binary: &Path, dialect: Option<Dialect>) -> Result<Self, LaunchError> {
        let (text, table) = table(path)?;
        let wrong = |message: String| LaunchError::Variant { path: path.to_owned(), message };
        let stem = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
        if !table.contains_key("command") {
            let own = Self::serve(&stem, binary, path, &[])?;
            return Ok(Self { dialect: dialect.unwrap_or(own.dialect), ..own });
        }
        let mut variant: Self = toml::from_str(&text).map_err(|e| wrong(e.to_string()))?;
        if variant.command.is_empty() {
            return Err(wrong("command must name a program".into()));
        }
        if variant.name.is_empty() {
            variant.name = stem;
        }
        if let Some(dialect) = dialect.filter(|_| !table.contains_key("dialect")) {
            variant.dialect = dialect;
        }
        Ok(variant)
    }

    /// The id of the model of a server of this project, where its configuration sets one.
    pub fn model(&self) -> Option<&str> {
        self.config.as_ref()?.get("model.id")?.as_str()
    }

    /// Whether a file as `from_file` takes it names a dialect itself.
    ///
    /// # Errors
    /// The file cannot be read or is no TOML.
    pub fn names_dialect(path: &Path) -> Result<bool, LaunchError> {
        Ok(table(path)?.1.contains_key("dialect"))
    }

    /// The command as reports tell it: without secrets.
    pub fn told_command(&self) -> Vec<String> {
        hidden(&self.command)
    }

    /// The variant as reports tell it: also `key`, which the load generator was given, stands nowhere in it.
    #[must_use]
    pub fn told(self, key: Option<&str>) -> Self {
        let Some(key) = key.filter(|key| !key.is_empty()) else { return self };
        let command = self.told_command().into_iter().map(|argument| argument.replace(key, HIDDEN)).collect();
        Self { command, ..self }
    }

    /// Takes the hash of the program.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn hash(&mut self) -> Result<(), LaunchError> {
        let path = found(Path::new(&self.command[0]));
        self.sha256 = Some(sha256(&path).map_err(io(format!("cannot read {}", path.display())))?);
        Ok(())
    }
}

/// A file's text, and what it says.
fn table(path: &Path) -> Result<(String, toml::Table), LaunchError> {
    let text = file::read(path).map_err(io(format!("cannot read {}", path.display())))?;
    let wrong = |e: toml::de::Error| LaunchError::Variant { path: path.to_owned(), message: e.to_string() };
    let table = toml::from_str(&text).map_err(wrong)?;
    Ok((text, table))
}

/// Where a program is: in a folder of PATH when it is named without one.
pub fn found(program: &Path) -> PathBuf {
    let folders = std::env::var_os("PATH").filter(|_| !program.to_string_lossy().contains('/')).unwrap_or_default();
    let there = std::env::split_paths(&folders).map(|folder| folder.join(program)).find(|path| path.is_file());
    there.unwrap_or_else(|| program.to_owned())
}

/// Whether a setting `KEY=VALUE` sets `key`.
pub fn sets(setting: &str, key: &str) -> bool {
    setting.split_once('=').is_some_and(|(name, _)| name.trim() == key)
}

/// Whether an option, a variable or a key of a configuration holds a secret: the last word of its name says so.
fn is_secret(name: &str) -> bool {
    let last = name.trim().rsplit(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default().to_ascii_lowercase();
    SECRETS.iter().any(|word| last.ends_with(word))
}

/// What the last words of the names of secrets end with.
const SECRETS: [&str; 6] = ["key", "keys", "token", "secret", "secrets", "password"];

/// `None` of a section without keys, which sets nothing.
fn plain(value: Written) -> Option<Value> {
    Some(match value {
        Written::Text(text) => json!(text),
        Written::Integer(number) => json!(number),
        Written::Float(number) => json!(number),
        Written::Bool(yes) => json!(yes),
        Written::Texts(texts) => json!(texts),
        Written::EmptyTable => return None,
        Written::Other(kind) => json!(kind),
    })
}

fn without_secrets<S: Serializer>(command: &[String], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(hidden(command))
}

fn hidden(command: &[String]) -> Vec<String> {
    let words: Vec<&str> = command.iter().map(String::as_str).collect();
    hidden_words(&words)
}

/// Hides the value after every `NAME=` and every `--name` of a secret, also in an argument that is a line of words itself.
fn hidden_words(words: &[&str]) -> Vec<String> {
    let mut named = false;
    let mut one = |word: &&str| {
        let value = std::mem::replace(&mut named, word.starts_with('-') && !word.contains('=') && is_secret(word));
        if value { HIDDEN.to_owned() } else { hidden_word(word) }
    };
    words.iter().map(&mut one).collect()
}

fn hidden_word(word: &str) -> String {
    let mut ends = word.match_indices('=').map(|(at, _)| at);
    if let Some(at) = ends.find(|&at| is_secret(&word[..at])) {
        return format!("{}={HIDDEN}", &word[..at]);
    }
    let words: Vec<&str> = word.split_whitespace().collect();
    let told = if words.len() > 1 { hidden_words(&words) } else { Vec::new() };
    if told.is_empty() || told == words { word.to_owned() } else { told.join(" ") }
}

/// The keys that a configuration and overrides set, with their values.
fn what_is_set(text: &str, settings: &[String]) -> BTreeMap<String, Value> {
    let (mut document, _) = Document::parse(text);
    for setting in settings {
        let _ = document.set(setting); // the server refuses what is wrong
    }
    let shown = |(key, entry): (String, Entry)| {
        let value = plain(entry.value)?;
        Some((key.clone(), if is_secret(&key) { json!(HIDDEN) } else { value }))
    };
    document.into_rest().filter_map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_a_command_is_any_server_and_one_without_is_a_configuration() {
        let dir = std::env::temp_dir();
        let path = dir.join(format!("crucible-variant-{}.toml", std::process::id()));
        std::fs::write(
            &path,
            "command = ['peer', '-p', '1']\nurl = 'http://127.0.0.1:1'\ndialect = 'openai-completions'\n",
        )
        .expect("written");
        let peer = Variant::from_file(&path, Path::new("/bin/crucible"), None).expect("a variant");
        assert_eq!((peer.dialect, peer.command.len()), (Dialect::OpenaiCompletions, 3));
        std::fs::write(&path, "[kv]\npages = 64\n").expect("written");
        let own = Variant::from_file(&path, Path::new("/bin/crucible"), None).expect("a configuration");
        assert_eq!(own.command[..3], ["/bin/crucible", "serve", "--config"]);
        assert!(own.command.last().is_some_and(|s| s.starts_with("server.port=")));
        std::fs::write(&path, "command = []\nurl = ''\n").expect("written");
        assert!(Variant::from_file(&path, Path::new("x"), None).is_err());
        std::fs::remove_file(&path).expect("removed");
    }

    #[test]
    fn a_configuration_is_told_with_its_overrides_and_without_its_key() {
        let settings = ["kv.pages=64", "server.api_key=s3cret"].map(str::to_owned);
        let set =
            what_is_set("[kv]\npages = 32\n[model]\npath = 'synthetic'\n[server]\napi_key = 's3cret'\n", &settings);
        assert_eq!((&set["kv.pages"], &set["model.path"]), (&json!(64), &json!("synthetic")));
        assert_eq!(set["server.api_key"], HIDDEN);
        let command = vec!["x".to_owned(), "--set".into(), "server.api_key=s3cret".into(), "kv.pages=64".into()];
        let (dialect, ready, url) = (Dialect::Native, health(), String::new());
        let variant = Variant { name: "v".into(), command, url, dialect, ready, sha256: None, config: Some(set) };
        let told = serde_json::to_string(&variant).expect("JSON");
        assert!(told.contains("kv.pages=64") && !told.contains("s3cret"), "{told}");
    }

    #[test]
    fn no_form_of_a_key_a_token_or_a_secret_is_told() {
        let peer = |arguments: &[&str]| Variant {
            name: "v".into(),
            command: arguments.iter().map(|a| (*a).to_owned()).collect(),
            url: String::new(),
            dialect: Dialect::Native,
            ready: health(),
            sha256: None,
            config: None,
        };
        for arguments in [
            &["x", "--set=server.api_key=topsecret"][..],
            &["x", "--set", "server.api_key = topsecret"],
            &["x", "--api-key", "topsecret"],
            &["x", "--api-key=topsecret"],
            &["x", "--auth.token", "topsecret"],
            &["env", "HF_TOKEN=topsecret", "x"],
            &["sh", "-c", "exec x --client-secret topsecret --port 1"],
        ] {
            let variant = peer(arguments);
            let told = serde_json::to_string(&variant).expect("JSON");
            assert!(!told.contains("topsecret") && told.contains(HIDDEN), "{told}");
            assert!(!variant.told_command().join(" ").contains("topsecret"));
        }
        let plain = ["x", "--max-tokens", "8", "--set", "prefill.token_budget=64", "--api-key-file", "/etc/key"];
        assert_eq!(peer(&plain).told_command(), plain);
        let own = peer(&["x", "-k", "Bearer:topsecret"]).told(Some("topsecret"));
        assert_eq!(own.command, ["x", "-k", "Bearer:(hidden)"]);
        assert_eq!(peer(&plain).told(Some("")).command, plain);
    }
}
