//! What is asked: the named workloads, workloads of the user's own from TOML, and the expansion of patterns. Pure but for reading
//! the one file. Prompts of a shot come from `prompts`; when it is sent, from its burst or from `arrivals`.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::dialect::{Dialect, Policy};
use super::rng::SplitMix64;
use super::{file, limits};

/// Generated tokens of a request unless its workload says otherwise.
pub const OUTPUT_TOKENS_DEFAULT: u32 = 64;
/// Prompt tokens of the established stream of the stall workloads.
const STREAM_PROMPT_TOKENS: u32 = 8;
/// Tokens that the established stream generates.
const STREAM_OUTPUT_TOKENS: u32 = 256;
/// The established stream's token at which the arrivals start.
const STREAM_TRIGGER_TOKEN: u32 = 32;
/// Generated tokens of an arrival at an established stream.
const STALL_OUTPUT_TOKENS: u32 = 8;
const SHORT_PROMPTS: [u32; 4] = [8, 16, 32, 64];
const MIXED_PROMPTS: [u32; 8] = [8, 17, 33, 64, 127, 256, 512, 941];
const HOL_PROMPTS: [u32; 4] = [33, 127, 535, 941];

/// The names that `all` stands for, in order.
pub const STANDARD: [&str; 32] = [
    "isolated-1",
    "isolated-8",
    "isolated-16",
    "isolated-32",
    "isolated-64",
    "isolated-128",
    "isolated-256",
    "isolated-512",
    "isolated-941",
    "short-2",
    "short-4",
    "short-8",
    "short-16",
    "tiny-2x1",
    "tiny-4x1",
    "tiny-8x1",
    "tiny-16x1",
    "mixed-8",
    "long-4x256",
    "long-4x512",
    "long-4x941",
    "long-8x512",
    "batch-64x128",
    "batch-256x128",
    "fairness-sorted",
    "fairness-reverse",
    "fairness-shuffled",
    "stall-33",
    "stall-535",
    "stall-941",
    "hol-4",
    "shared-packed-batch",
];

/// Why a workload cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// No such name.
    #[error("there is no workload {0}; `crucible load list` names them, and --workloads FILE.toml adds your own")]
    Unknown(String),
    /// Numbers past the bounds.
    #[error("the workload {name} is out of bounds: {message}")]
    OutOfBounds {
        /// The name.
        name: String,
        /// Which number, and its bounds.
        message: String,
    },
    /// A pattern without a match.
    #[error("no workload matches {0}")]
    NoMatch(String),
    /// The file cannot be read.
    #[error("cannot read the workloads in {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not as documented.
    #[error("{path}: {message}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong where.
        message: String,
    },
}

/// One request of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Shot {
    /// Milliseconds after the start of the burst.
    pub at_ms: f64,
    /// Prompt tokens.
    pub prompt: u32,
    /// Generated tokens.
    pub output: u32,
    /// The surface, or the run's own.
    pub dialect: Option<Dialect>,
    /// How it samples.
    pub policy: Policy,
}

impl Shot {
    /// A greedy request at the start of its burst.
    pub fn new(prompt: u32, output: u32) -> Self {
        Self { at_ms: 0.0, prompt, output, dialect: None, policy: Policy::Greedy }
    }
}

/// A stream that runs before the measured requests arrive.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Established {
    /// The stream itself.
    pub shot: Shot,
    /// The arrivals are sent when this many of its tokens have come.
    pub trigger_token: u32,
}

/// A named pattern of requests; one round of it is one burst.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Workload {
    /// Its name in reports.
    pub name: String,
    /// The stream that is disturbed, in the stall workloads.
    pub established: Option<Established>,
    /// The measured requests.
    pub shots: Vec<Shot>,
}

impl Workload {
    fn burst(name: &str, shots: Vec<Shot>) -> Self {
        Self { name: name.into(), established: None, shots }
    }

    fn disturbed(name: &str, prompts: &[u32]) -> Self {
        let shot = Shot::new(STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS);
        let shots = prompts.iter().map(|&p| Shot::new(p, STALL_OUTPUT_TOKENS)).collect();
        let established = Some(Established { shot, trigger_token: STREAM_TRIGGER_TOKEN });
        Self { name: name.into(), established, shots }
    }

    /// The workload of a name, standard or of the same form with other numbers (`isolated-77`, `long-3x700`).
    ///
    /// # Errors
    /// The name has no such form or a number is 0.
    pub fn named(name: &str) -> Result<Self, WorkloadError> {
        let unknown = || WorkloadError::Unknown(name.to_owned());
        let (family, rest) = name.split_once('-').ok_or_else(unknown)?;
        let out = |message: String| WorkloadError::OutOfBounds { name: name.to_owned(), message };
        let number = |text: &str, what: &str, bounds: limits::Whole| {
            let number = positive(text).ok_or_else(unknown)?;
            bounds.check(number).map(|n| n as u32).map_err(|e| out(format!("{what} {e}")))
        };
        let requests = |text: &str| number(text, "requests", limits::BURST_REQUESTS);
        let tokens = |text: &str| number(text, "prompt tokens", limits::PROMPT_TOKENS);
        let one = || tokens(rest);
        let two = || {
            let (n, p) = rest.split_once('x').ok_or_else(unknown)?;
            let (n, p) = (requests(n)?, tokens(p)?);
            burst_fits(u64::from(n) * u64::from(p)).map_err(out)?;
            Ok::<_, WorkloadError>((n, p))
        };
        let cycle = |n: u32, output| (0..n as usize).map(|i| Shot::new(SHORT_PROMPTS[i % 4], output)).collect();
        let equal = |(n, p): (u32, u32)| vec![Shot::new(p, OUTPUT_TOKENS_DEFAULT); n as usize];
        Ok(match (family, rest) {
            ("isolated", _) => Self::burst(name, vec![Shot::new(one()?, OUTPUT_TOKENS_DEFAULT)]),
            ("short", _) => Self::burst(name, cycle(requests(rest)?, OUTPUT_TOKENS_DEFAULT)),
            ("tiny", _) => {
                let (n, output) = two()?;
                Self::burst(name, cycle(n, output))
            }
            ("mixed", "8") => Self::burst(name, shots(&MIXED_PROMPTS)),
            ("long" | "batch", _) => Self::burst(name, equal(two()?)),
            ("fairness", order) => Self::burst(name, fairness(order).ok_or_else(unknown)?),
            ("stall", _) => Self::disturbed(name, &[one()?]),
            ("hol", "4") => Self::disturbed(name, &HOL_PROMPTS),
            ("shared", "packed-batch") => Self::burst(name, shared_packed_batch()),
            _ => return Err(unknown()),
        })
    }

    /// The largest number of tokens that one of its requests needs room for.
    pub fn context_tokens(&self) -> u32 {
        let stream = self.established.map(|e| e.shot);
        self.shots.iter().chain(stream.iter()).map(|s| s.prompt + s.output).max().unwrap_or(0)
    }
}

/// Prompt tokens of a burst in all.
fn burst_fits(tokens: u64) -> Result<u64, String> {
    limits::BURST_TOKENS.check(tokens).map_err(|e| format!("prompt tokens in all: {e}"))
}

/// A number in a name: digits alone.
fn positive(text: &str) -> Option<u64> {
    text.parse().ok().filter(|&n| n > 0)
}

fn shots(prompts: &[u32]) -> Vec<Shot> {
    prompts.iter().map(|&p| Shot::new(p, OUTPUT_TOKENS_DEFAULT)).collect()
}

fn fairness(order: &str) -> Option<Vec<Shot>> {
    let mut prompts = MIXED_PROMPTS;
    match order {
        "sorted" => {}
        "reverse" => prompts.reverse(),
        "shuffled" => SplitMix64::new(8).shuffle(&mut prompts),
        _ => return None,
    }
    let mut shots = shots(&prompts);
    for (i, shot) in shots.iter_mut().enumerate() {
        shot.at_ms = i as f64;
    }
    Some(shots)
}

/// A long prompt that keeps the engine busy, then five short ones from every surface that must share a prefill batch. The terminal
/// client speaks the native surface.
fn shared_packed_batch() -> Vec<Shot> {
    let mut shots = vec![Shot { dialect: Some(Dialect::Native), ..Shot::new(941, 8) }];
    let surfaces =
        [Dialect::Native, Dialect::OpenaiCompletions, Dialect::OpenaiChat, Dialect::Anthropic, Dialect::Native];
    shots.extend(surfaces.map(|d| Shot { at_ms: 2.0, dialect: Some(d), ..Shot::new(16, 8) }));
    shots
}

/// Workloads that a file describes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    workload: Vec<FileWorkload>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileWorkload {
    name: String,
    established: Option<FileEstablished>,
    requests: Vec<FileShot>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEstablished {
    prompt: u32,
    output: u32,
    trigger_token: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileShot {
    prompt: u32,
    #[serde(default = "output_default")]
    output: u32,
    #[serde(default = "one")]
    count: u32,
    #[serde(default)]
    at_ms: f64,
    /// Between one and the next of `count`.
    #[serde(default)]
    every_ms: f64,
    dialect: Option<Dialect>,
    #[serde(default = "greedy")]
    policy: Policy,
}

fn output_default() -> u32 {
    OUTPUT_TOKENS_DEFAULT
}

fn one() -> u32 {
    1
}

fn greedy() -> Policy {
    Policy::Greedy
}

/// Reads workloads from a TOML file; its form is in docs/load.md.
///
/// # Errors
/// The file cannot be read, has unknown keys, or a workload without requests, with zero lengths or with negative times.
pub fn from_file(path: &Path) -> Result<Vec<Workload>, WorkloadError> {
    let text = file::read(path).map_err(|source| WorkloadError::Read { path: path.to_owned(), source })?;
    from_toml(&text).map_err(|message| WorkloadError::Invalid { path: path.to_owned(), message })
}

fn from_toml(text: &str) -> Result<Vec<Workload>, String> {
    let file: File = toml::from_str(text).map_err(|e| e.to_string())?;
    let mut workloads: Vec<Workload> = Vec::new();
    for described in file.workload {
        let workload = described.checked()?;
        if workloads.iter().any(|w| w.name == workload.name) {
            return Err(format!("two workloads are named {}; every name may occur once", workload.name));
        }
        workloads.push(workload);
    }
    Ok(workloads)
}

/// Names that stand for something else on the command line.
const RESERVED: [&str; 2] = ["all", "sustained"];

/// A name that a list can hold and that is nobody else's.
fn own_name(name: &str) -> Result<(), String> {
    let told = |why: &str| Err(format!("a workload cannot be named {name:?}: {why}; choose another name"));
    if name.is_empty() || name.contains([',', '*']) || name.trim() != name || name.contains(char::is_control) {
        return told("a name is not empty and has no comma, star, control character or white space at its ends");
    }
    if RESERVED.contains(&name) {
        return told("it has a meaning of its own");
    }
    match Workload::named(name) {
        Ok(_) | Err(WorkloadError::OutOfBounds { .. }) => told("it is a standard name"),
        Err(_) => Ok(()),
    }
}

impl FileWorkload {
    fn checked(self) -> Result<Workload, String> {
        let name = self.name;
        own_name(&name)?;
        let out = |what: &str, e: String| format!("workload {name}: {what} {e}");
        let length = |what, bounds: limits::Whole, n: u32| bounds.check(n.into()).map_err(|e| out(what, e));
        let (mut shots, mut tokens) = (Vec::new(), 0);
        for r in &self.requests {
            length("prompt", limits::PROMPT_TOKENS, r.prompt)?;
            length("output", limits::OUTPUT_TOKENS, r.output)?;
            let requests = shots.len() as u64 + u64::from(r.count);
            limits::BURST_REQUESTS.check(requests.max(1)).map_err(|e| out("requests in all", e))?;
            tokens = burst_fits(tokens + u64::from(r.prompt) * u64::from(r.count).max(1)).map_err(|e| out("", e))?;
            let last = r.at_ms + f64::from(r.count) * r.every_ms;
            for (what, ms) in [("at_ms", r.at_ms), ("every_ms", r.every_ms), ("the last request's time in ms", last)] {
                limits::AT_MS.check(ms).map_err(|e| out(what, e))?;
            }
            shots.extend((0..r.count).map(|i| Shot {
                at_ms: r.at_ms + f64::from(i) * r.every_ms,
                prompt: r.prompt,
                output: r.output,
                dialect: r.dialect,
                policy: r.policy,
            }));
        }
        if shots.is_empty() {
            return Err(format!("workload {name} has no requests"));
        }
        if let Some(e) = &self.established {
            length("established prompt", limits::PROMPT_TOKENS, e.prompt)?;
            length("established output", limits::OUTPUT_TOKENS, e.output)?;
        }
        let established = match self.established {
            Some(e) if e.trigger_token == 0 || e.trigger_token >= e.output => {
                return Err(format!("workload {name}: the stream must outlast its trigger_token"));
            }
            Some(e) => Some(Established { shot: Shot::new(e.prompt, e.output), trigger_token: e.trigger_token }),
            None => None,
        };
        Ok(Workload { name, established, shots })
    }
}

/// The workloads of a comma-separated list: names, `all`, patterns such as `isolated-*`, in the order given, each once.
///
/// # Errors
/// A name or pattern that stands for nothing.
pub fn select(list: &str, own: &[Workload]) -> Result<Vec<Workload>, WorkloadError> {
    let mut chosen: Vec<Workload> = Vec::new();
    for item in list.split(',').map(str::trim).filter(|i| !i.is_empty()) {
        let mut matched: Vec<Workload> = Vec::new();
        if let Some(prefix) = if item == "all" { Some("") } else { item.strip_suffix('*') } {
            matched.extend(own.iter().filter(|w| w.name.starts_with(prefix)).cloned());
            for name in STANDARD.iter().filter(|n| n.starts_with(prefix)) {
                matched.push(Workload::named(name)?);
            }
            if matched.is_empty() {
                return Err(WorkloadError::NoMatch(item.to_owned()));
            }
        } else if let Some(found) = own.iter().find(|w| w.name == item) {
            matched.push(found.clone());
        } else {
            matched.push(Workload::named(item)?);
        }
        for workload in matched {
            if !chosen.iter().any(|c| c.name == workload.name) {
                chosen.push(workload);
            }
        }
    }
    if chosen.is_empty() { Err(WorkloadError::NoMatch(list.to_owned())) } else { Ok(chosen) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(name: &str) -> Vec<u32> {
        Workload::named(name).expect("a known name").shots.iter().map(|s| s.prompt).collect()
    }

    #[test]
    fn every_standard_name_is_a_workload_of_that_name() {
        for name in STANDARD {
            let workload = Workload::named(name).expect(name);
            assert!(workload.name == name && !workload.shots.is_empty());
        }
    }

    #[test]
    fn the_shapes_are_those_of_the_contract() {
        assert_eq!(prompts("isolated-941"), [941]);
        assert_eq!(prompts("short-8"), [8, 16, 32, 64, 8, 16, 32, 64]);
        assert_eq!(prompts("long-4x256"), [256; 4]);
        assert_eq!(prompts("batch-256x128").len(), 256);
        let tiny = Workload::named("tiny-4x1").expect("tiny");
        assert!(tiny.shots.iter().all(|s| s.output == 1) && tiny.shots.len() == 4);
        let stall = Workload::named("stall-535").expect("stall");
        let stream = stall.established.expect("a stream");
        assert_eq!((stream.shot.prompt, stream.trigger_token), (8, 32));
        assert_eq!(stall.shots, [Shot::new(535, 8)]);
        assert_eq!(prompts("hol-4"), [33, 127, 535, 941]);
        let shuffled = prompts("fairness-shuffled");
        let mut sorted = shuffled.clone();
        sorted.sort_unstable();
        assert!(sorted == prompts("fairness-sorted") && shuffled != sorted);
        let at: Vec<f64> = Workload::named("fairness-reverse").expect("f").shots.iter().map(|s| s.at_ms).collect();
        assert_eq!(at, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    }

    #[test]
    fn names_without_meaning_are_refused() {
        for name in
            ["batch-4294967295x1", "batch-1x4294967295", "short-100001", "long-1000x1000000", "tiny-99999999999x1"]
        {
            assert!(matches!(Workload::named(name), Err(WorkloadError::OutOfBounds { .. })), "{name}");
        }
        for name in ["isolated", "isolated-0", "isolated-x", "long-4", "mixed-9", "fairness-up", "", "tiny-4"] {
            assert!(Workload::named(name).is_err(), "{name}");
        }
    }

    #[test]
    fn lists_expand_patterns_and_keep_each_name_once() {
        let names =
            |list| -> Vec<String> { select(list, &[]).expect("a good list").into_iter().map(|w| w.name).collect() };
        assert_eq!(names("tiny-*, mixed-8,tiny-2x1"), ["tiny-2x1", "tiny-4x1", "tiny-8x1", "tiny-16x1", "mixed-8"]);
        assert_eq!(names("all").len(), STANDARD.len());
        assert!(select("nothing-*", &[]).is_err() && select(" , ", &[]).is_err());
    }

    #[test]
    fn a_file_describes_bursts_and_refuses_what_it_does_not_know() {
        let text = "[[workload]]\nname = 'chatty'\nrequests = [{ prompt = 8, count = 3, every_ms = 2.5 }]\n\
            established = { prompt = 8, output = 64, trigger_token = 4 }\n";
        let own = from_toml(text).expect("a good file");
        assert_eq!(own[0].shots.iter().map(|s| s.at_ms).collect::<Vec<_>>(), [0.0, 2.5, 5.0]);
        assert_eq!(select("chatty", &own).expect("found")[0], own[0]);
        let one = |name: &str, request: &str| {
            from_toml(&format!("[[workload]]\nname = \"{name}\"\nrequests = [{{ {request} }}]\n"))
        };
        for name in
            ["isolated-8", "isolated-77", "batch-999999999x9", "all", "sustained", "a,b", "a*", "", " a", "a\\n"]
        {
            assert!(one(name, "prompt = 8").is_err_and(|e| e.contains("choose another name")), "{name}");
        }
        assert!(from_toml(&text.repeat(2)).is_err_and(|e| e.contains("two workloads are named chatty")));
        for wrong in [
            "prompt = 1048577",
            "prompt = 8, output = 4294967295",
            "prompt = 8, count = 4294967295",
            "prompt = 1000000, count = 1000",
            "prompt = 8, at_ms = inf",
            "prompt = 8, at_ms = nan",
            "prompt = 8, at_ms = -1.0",
            "prompt = 8, count = 2, every_ms = 1e300",
            "prompt = 8, count = 0",
        ] {
            assert!(one("x", wrong).is_err(), "{wrong}");
        }
        assert!(from_toml("[[workload]]\nname = 'x'\nrequests = []\n").is_err());
        assert!(from_toml("[[workload]]\nname = 'x'\nrequests = [{ prompt = 0 }]\n").is_err());
        let unknown = from_toml("[[workload]]\nname = 'x'\nrequests = [{ prompt = 1, ouput = 3 }]\n");
        assert!(unknown.is_err_and(|e| e.contains("ouput")));
    }
}
