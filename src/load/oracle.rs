//! The oracle: what each request answered when it ran alone. Under load every output must be the same, id for id and byte for byte;
//! of a cancelled request, what had come must be the beginning of it.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::file;
use super::job::{Outcome, Output, Record, Wire};
use super::render::Renderer;

/// Names the form of the file.
const FORMAT: &str = "crucible-oracle/1";
/// Differences that a report spells out.
const DIFFERENCES_SHOWN: usize = 10;

/// Why an oracle cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OracleError {
    /// The file cannot be read.
    #[error("cannot read the oracle {path}: {source}; make one with record-oracle")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no oracle.
    #[error("{path} is no oracle of this version: {message}; record it again")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// It is of another model or seed.
    #[error(
        "the oracle was recorded with {what} {theirs}, this run has {ours}; record it again or give --{what} {theirs}"
    )]
    Other {
        /// `model` or `seed`.
        what: &'static str,
        /// The oracle's.
        theirs: String,
        /// The run's.
        ours: String,
    },
    /// Requests of the run are not in it.
    #[error(
        "the oracle does not know {unknown} of {all} requests of this run; record it with the same workloads, rounds, lengths, policies, \
         dialects, token range and seed"
    )]
    Unknown {
        /// How many.
        unknown: usize,
        /// Of how many that have one answer.
        all: usize,
    },
    /// A solo run did not complete.
    #[error("a solo request did not complete: {0}")]
    Incomplete(String),
}

/// The answer of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Token ids; empty on surfaces that tell none.
    pub token_ids: Vec<u32>,
    /// The text.
    pub text: String,
}

/// Answers by request key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Oracle {
    format: String,
    /// The model that answered.
    pub model: String,
    /// The seed of the prompts.
    pub seed: u64,
    /// The answers.
    pub entries: BTreeMap<String, Entry>,
}

/// What a comparison found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Verdict {
    /// The same.
    Equal,
    /// Another answer.
    Different {
        /// What differs first.
        detail: String,
    },
    /// The oracle knows no such request.
    Unknown,
    /// Drawn without a seed: it has no one answer.
    Unseeded,
    /// Refused, failed, or cancelled before anything came: there is nothing to compare.
    NoOutput,
}

impl Oracle {
    /// An oracle without answers.
    pub fn new(model: &str, seed: u64) -> Self {
        Self { format: FORMAT.into(), model: model.into(), seed, entries: BTreeMap::new() }
    }

    /// Keeps the answer of a request that ran alone.
    ///
    /// # Errors
    /// It did not complete.
    pub fn record(&mut self, record: &Record) -> Result<(), OracleError> {
        if record.outcome != Outcome::Completed {
            let why = match &record.outcome {
                Outcome::Failed { message } => message.clone(),
                Outcome::Refused { status } => format!("refused with status {status}; wait until the target is idle"),
                Outcome::Cancelled | Outcome::Completed => "it was cancelled".into(),
            };
            return Err(OracleError::Incomplete(why));
        }
        let Output { token_ids, text } = record.output.clone();
        self.entries.insert(record.key.to_string(), Entry { token_ids, text });
        Ok(())
    }

    /// Whether it can judge a run: its model and seed are the run's.
    ///
    /// # Errors
    /// They are not.
    pub fn fits(&self, renderer: &Renderer) -> Result<(), OracleError> {
        let other = |what, theirs: String, ours: String| Err(OracleError::Other { what, theirs, ours });
        if self.model != renderer.model() {
            return other("model", self.model.clone(), renderer.model().to_owned());
        }
        let seed = renderer.seeding().seed;
        if self.seed == seed { Ok(()) } else { other("seed", self.seed.to_string(), seed.to_string()) }
    }

    /// Whether it knows every request that has one answer only: the same prompts, lengths, dialects and sampling.
    ///
    /// # Errors
    /// It does not.
    pub fn covers<W: Borrow<Wire>>(&self, wires: impl IntoIterator<Item = W>) -> Result<(), OracleError> {
        let (mut unknown, mut all) = (0, 0);
        for wire in wires {
            let key = &*wire.borrow().key;
            all += usize::from(!key.is_empty());
            unknown += usize::from(!key.is_empty() && !self.entries.contains_key(key));
        }
        if unknown == 0 { Ok(()) } else { Err(OracleError::Unknown { unknown, all }) }
    }

    /// Compares an answer with the one recorded.
    pub fn compare(&self, record: &Record) -> Verdict {
        let whole = match record.outcome {
            Outcome::Completed => true,
            Outcome::Cancelled => false,
            Outcome::Refused { .. } | Outcome::Failed { .. } => return Verdict::NoOutput,
        };
        if record.key.is_empty() {
            return Verdict::Unseeded;
        }
        let Some(entry) = self.entries.get(&*record.key) else { return Verdict::Unknown };
        let seen = &record.output;
        if !whole && seen.token_ids.is_empty() && seen.text.is_empty() {
            return Verdict::NoOutput;
        }
        if let Some(detail) = difference("token", &entry.token_ids, &seen.token_ids, whole) {
            return Verdict::Different { detail };
        }
        match difference("byte", entry.text.as_bytes(), seen.text.as_bytes(), whole) {
            Some(detail) => Verdict::Different { detail },
            None => Verdict::Equal,
        }
    }

    /// Reads an oracle.
    ///
    /// # Errors
    /// The file cannot be read or is no oracle of this form.
    pub fn read(path: &Path) -> Result<Self, OracleError> {
        let text = file::read(path).map_err(|source| OracleError::Io { path: path.to_owned(), source })?;
        let invalid = |message: String| OracleError::Invalid { path: path.to_owned(), message };
        let oracle: Self = serde_json::from_str(&text).map_err(|e| invalid(e.to_string()))?;
        if oracle.format != FORMAT {
            return Err(invalid(format!("its format is {}", oracle.format)));
        }
        Ok(oracle)
    }

    /// Writes it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), file::WriteError> {
        file::write_json_compact(path, self)
    }
}

/// The first difference, or `None`. Of an answer that is not whole, only what came is compared.
fn difference<T: PartialEq + std::fmt::Display>(what: &str, oracle: &[T], seen: &[T], whole: bool) -> Option<String> {
    if let Some(at) = oracle.iter().zip(seen).position(|(a, b)| a != b) {
        return Some(format!("{what} {at} is {} and was {} alone", seen[at], oracle[at]));
    }
    let too_long = seen.len() > oracle.len();
    let too_short = whole && seen.len() < oracle.len();
    (too_long || too_short).then(|| format!("{} {what}s came and {} alone", seen.len(), oracle.len()))
}

/// The outcome of all comparisons of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verification {
    /// Outputs compared.
    pub compared: usize,
    /// Token ids among them.
    pub token_ids_compared: usize,
    /// Bytes of text among them.
    pub text_bytes_compared: usize,
    /// Outputs that differ.
    pub different: usize,
    /// Outputs that the oracle does not know.
    pub unknown: usize,
    /// Outputs that were drawn without a seed, because the target takes none: not compared.
    pub unseeded: usize,
    /// The first differences.
    pub differences: Vec<String>,
}

impl Verification {
    /// Compares one record and counts the verdict.
    pub fn add(&mut self, oracle: &Oracle, workload: &str, record: &Record) {
        match oracle.compare(record) {
            Verdict::Equal => {
                self.compared += 1;
                self.token_ids_compared += record.output.token_ids.len();
                self.text_bytes_compared += record.output.text.len();
            }
            Verdict::Different { detail } => {
                self.compared += 1;
                self.different += 1;
                if self.differences.len() < DIFFERENCES_SHOWN {
                    self.differences.push(format!("{workload}, request {} ({}): {detail}", record.id, record.key));
                }
            }
            Verdict::Unknown => self.unknown += 1,
            Verdict::Unseeded => self.unseeded += 1,
            Verdict::NoOutput => {}
        }
    }

    /// Something was compared, a token id or a byte at least, nothing differed and nothing was unknown.
    pub fn passed(&self) -> bool {
        let something = self.compared > 0 && self.token_ids_compared + self.text_bytes_compared > 0;
        something && self.different == 0 && self.unknown == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(ids: &[u32], text: &str, outcome: Outcome) -> Record {
        let output = Output { token_ids: ids.to_vec(), text: text.into() };
        Record { outcome, output, key: "k".into(), ..Record::failed(3, String::new()) }
    }

    fn oracle() -> Oracle {
        let mut oracle = Oracle::new("m", 1);
        oracle.record(&record(&[5, 6, 7], "abc", Outcome::Completed)).expect("a completed request");
        oracle
    }

    #[test]
    fn one_changed_bit_of_one_token_is_found() {
        let oracle = oracle();
        assert_eq!(oracle.compare(&record(&[5, 6, 7], "abc", Outcome::Completed)), Verdict::Equal);
        for position in 0..3 {
            for bit in 0..32 {
                let mut ids = [5, 6, 7];
                ids[position] ^= 1 << bit;
                let verdict = oracle.compare(&record(&ids, "abc", Outcome::Completed));
                assert!(matches!(verdict, Verdict::Different { .. }), "token {position}, bit {bit}");
            }
        }
        let changed_text = oracle.compare(&record(&[5, 6, 7], "abC", Outcome::Completed));
        assert_eq!(changed_text, Verdict::Different { detail: "byte 2 is 67 and was 99 alone".into() });
    }

    #[test]
    fn a_whole_answer_must_have_every_token_and_a_cancelled_one_must_be_a_beginning() {
        let compare = |ids: &[u32], text: &str, outcome| oracle().compare(&record(ids, text, outcome));
        assert!(matches!(compare(&[5, 6], "abc", Outcome::Completed), Verdict::Different { .. }));
        assert!(matches!(compare(&[5, 6, 7, 8], "abc", Outcome::Completed), Verdict::Different { .. }));
        assert_eq!(compare(&[5, 6], "ab", Outcome::Cancelled), Verdict::Equal);
        assert_eq!(compare(&[], "", Outcome::Cancelled), Verdict::NoOutput);
        assert!(matches!(compare(&[5, 7], "ab", Outcome::Cancelled), Verdict::Different { .. }));
        assert!(matches!(compare(&[5, 6, 7, 8], "abc", Outcome::Cancelled), Verdict::Different { .. }));
    }

    #[test]
    fn a_run_that_compared_nothing_or_met_unknown_requests_has_not_passed() {
        let mut verification = Verification::default();
        assert!(!verification.passed());
        verification.add(&oracle(), "w", &record(&[], "", Outcome::Refused { status: 429 }));
        assert!(!verification.passed());
        verification.add(&oracle(), "w", &record(&[5, 6, 7], "abc", Outcome::Completed));
        assert!(verification.passed() && verification.token_ids_compared == 3);
        let mut nothing = Oracle::new("m", 1);
        nothing.record(&record(&[], "", Outcome::Completed)).expect("a completed request");
        let mut empty = Verification::default();
        empty.add(&nothing, "w", &record(&[], "", Outcome::Completed));
        assert_eq!((empty.compared, empty.passed()), (1, false), "nothing equals nothing");
        let stranger = Record { key: "other".into(), ..record(&[], "", Outcome::Completed) };
        verification.add(&oracle(), "w", &stranger);
        assert!(!verification.passed() && verification.unknown == 1);
        let drawn = Record { key: "".into(), ..record(&[8], "x", Outcome::Completed) };
        let mut verification = Verification::default();
        verification.add(&oracle(), "w", &drawn);
        assert_eq!((verification.compared, verification.unseeded, verification.passed()), (0, 1, false));
    }

    #[test]
    fn an_oracle_survives_its_file_and_another_format_is_refused() {
        let path = std::env::temp_dir().join(format!("crucible-oracle-{}.json", std::process::id()));
        oracle().write(&path).expect("written");
        assert_eq!(Oracle::read(&path).expect("read"), oracle());
        std::fs::write(&path, r#"{"format":"crucible-oracle/0","model":"m","seed":1,"entries":{}}"#).expect("written");
        assert!(matches!(Oracle::read(&path), Err(OracleError::Invalid { .. })));
        std::fs::remove_file(&path).expect("removed");
        assert!(oracle().record(&record(&[], "", Outcome::Cancelled)).is_err());
    }

    #[test]
    fn an_oracle_of_another_model_seed_or_sampling_is_refused() {
        use crate::load::dialect::{Dialect, Policy};
        use crate::load::prompts::TokenRange;
        use crate::load::render::Seeding;
        use crate::load::target::Target;
        use crate::load::workload::Shot;
        let renderer = |model, seed| {
            let target = Target::new("http://127.0.0.1:1", None).expect("a target");
            Renderer::unprobed(target, model, Dialect::Native, Seeding { seed, token_range: TokenRange::default() })
        };
        let fits = |model, seed| oracle().fits(&renderer(model, seed)).map_err(|e| e.to_string());
        assert_eq!(fits("m", 1), Ok(()));
        assert!(fits("n", 1).is_err_and(|e| e.contains("with model m, this run has n")));
        assert!(fits("m", 2).is_err_and(|e| e.contains("with seed 1, this run has 2")));
        let wire = |policy| renderer("m", 1).wire("w", 0, 0, &Shot { policy, ..Shot::new(5, 3) });
        let mut known = oracle();
        let answered = Record { key: wire(Policy::TopP).key, ..record(&[5], "a", Outcome::Completed) };
        known.record(&answered).expect("a completed request");
        assert!(known.covers(&[wire(Policy::TopP)]).is_ok());
        let unknown = known.covers(&[wire(Policy::TopP), wire(Policy::TopK)]);
        assert!(matches!(unknown, Err(OracleError::Unknown { unknown: 1, all: 2 })));
    }
}
