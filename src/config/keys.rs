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

/// Reads `server.api_key`, `server.api_key_file` (a key a line, empty lines and lines after `#` do not count) and
/// `server.api_key_env`; the keys of all three count.
pub fn api_keys(f: &mut Fields) -> ApiKeys {
    let mut keys = vec![("server.api_key", f.text("server.api_key", ""))];
    keys.retain(|(_, key)| !key.is_empty());
    if let Some(path) = f.path("server.api_key_file") {
        let name = "server.api_key_file";
        match std::fs::read_to_string(&path) {
            Err(error) => f.reject(name, format!("{name}: cannot read {}: {error}", path.display())),
            Ok(text) => {
                let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
                let before = keys.len();
                keys.extend(lines.map(|line| (name, line.to_owned())));
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
            Ok(key) if !key.trim().is_empty() => keys.push((name, key.trim().to_owned())),
            _ => f.reject(name, format!("{name}: the environment variable {variable} is not set or holds no text")),
        }
    }
    for (name, key) in &keys {
        // A header carries visible ASCII; the message must not repeat the key.
        if key.len() < KEY_BYTES_MIN || !key.bytes().all(|b| b.is_ascii_graphic()) {
            let text =
                format!("{name}: a key must have at least {KEY_BYTES_MIN} visible ASCII characters and no space");
            f.reject(name, text);
        }
    }
    ApiKeys(keys.iter().map(|(_, key)| digest(key)).collect())
}
