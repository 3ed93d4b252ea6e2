//! API keys: read from the configuration, a file and an environment variable that the configuration names; kept as digests only, so
//! that no log, error or dump can show one.

use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use super::fields::Fields;

/// Shortest key that is taken; below it a typo is more likely than a key.
const KEY_BYTES_MIN: usize = 4;

/// The keys that clients may present. None at all is an open server.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct ApiKeys(Vec<[u8; 32]>);

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

impl ApiKeys {
    /// Whether nobody is asked for a key.
    pub fn is_open(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `given` is one of the keys. Takes the same time for every `given` of one length: digests are compared, each in constant
    /// time, and all of them.
    pub fn admit(&self, given: &str) -> bool {
        let digest = digest(given);
        self.0.iter().fold(Choice::from(0), |found, key| found | key.ct_eq(&digest)).into()
    }
}

fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

/// A key as it was found.
struct Found {
    /// The configuration key that it comes from.
    name: &'static str,
    /// Its line in a file, from 1.
    line: Option<usize>,
    key: String,
}

/// Reads `server.api_key`, `server.api_key_file` (a key a line; empty lines and lines that begin with `#` do not count) and
/// `server.api_key_env`; the keys of all three count.
pub fn api_keys(f: &mut Fields) -> ApiKeys {
    let mut keys = vec![Found { name: "server.api_key", line: None, key: f.text("server.api_key", "") }];
    keys.retain(|found| !found.key.is_empty());
    if let Some(path) = f.path("server.api_key_file") {
        let name = "server.api_key_file";
        match std::fs::read_to_string(&path) {
            Err(error) => f.reject(name, format!("{name}: cannot read {}: {error}", path.display())),
            Ok(text) => {
                let lines = text.lines().map(str::trim).zip(1..);
                let lines = lines.filter(|(line, _)| !line.is_empty() && !line.starts_with('#'));
                let before = keys.len();
                keys.extend(lines.map(|(line, at)| Found { name, line: Some(at), key: line.to_owned() }));
                if keys.len() == before {
                    f.reject(name, format!("{name}: {} holds no key; write one a line", path.display()));
                }
            }
        }
    }
    let variable = f.text("server.api_key_env", "");
    if !variable.is_empty() {
        let name = "server.api_key_env";
        match std::env::var(&variable) {
            Ok(key) if !key.trim().is_empty() => keys.push(Found { name, line: None, key: key.trim().to_owned() }),
            _ => f.reject(name, format!("{name}: the environment variable {variable} is not set or holds no text")),
        }
    }
    for Found { name, line, key } in &keys {
        // A header carries visible ASCII; the message must not repeat the key.
        if key.len() < KEY_BYTES_MIN || !key.bytes().all(|b| b.is_ascii_graphic()) {
            let rule = format!("a key must have at least {KEY_BYTES_MIN} visible ASCII characters and no space");
            f.reject(
                name,
                match line {
                    None => format!("{name}: {rule}"),
                    Some(line) => {
                        format!("{name}, line {line}: {rule}; a comment needs a # at the beginning of a line")
                    }
                },
            );
        }
    }
    ApiKeys(keys.iter().map(|found| digest(&found.key)).collect())
}
