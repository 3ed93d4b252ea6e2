//! What is known of an oracle before a server is started: whether it can judge that server in any form in which it may have to be asked.

use std::collections::BTreeSet;

use super::CompareOptions;
use crate::load::drive::wires_of;
use crate::load::job::Wire;
use crate::load::oracle::{Oracle, OracleError};
use crate::load::render::Renderer;
use crate::load::target::{Target, forms};
use crate::load::variant::Variant;
use crate::load::workload::Workload;

/// The oracle must be of the seed and, where they are known, of the model, and must know every request that the server is sure to be
/// asked, in one of the forms of each dialect at least. The model that only the server tells is taken to be the oracle's.
///
/// # Errors
/// It cannot judge the server whatever that takes.
pub(super) fn foreseen(
    oracle: &Oracle,
    variant: &Variant,
    target: &Target,
    options: &CompareOptions,
) -> Result<(), OracleError> {
    let model = options.model.as_deref().or_else(|| variant.model()).unwrap_or(&oracle.model);
    let best = Renderer::unprobed(target.clone(), model, variant.dialect, options.seeding);
    oracle.fits(&best)?;
    let sure = |w: &&Workload| !options.may_be_skipped.contains(&w.name);
    let workloads: Vec<Workload> = options.workloads.iter().filter(sure).cloned().collect();
    let wires = |renderer: &Renderer| wires_of(renderer, &workloads, options.rounds).collect::<Vec<Wire>>();
    let asked = wires(&best);
    let dialects: BTreeSet<_> = asked.iter().map(|w| w.dialect).collect();
    let knows = |renderer: Renderer, dialect| {
        let mut wires = wires_of(&renderer, &workloads, options.rounds).filter(|w| w.dialect == dialect);
        wires.all(|wire| oracle.covers([wire]).is_ok())
    };
    for dialect in dialects {
        if !forms(dialect).any(|takes| knows(best.clone().taking(dialect, takes), dialect)) {
            return oracle.covers(asked);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::burst::{PromptReuse, Rounds};
    use crate::load::devices::DeviceOptions;
    use crate::load::dialect::{Capabilities, Dialect};
    use crate::load::job::{Outcome, Record};
    use crate::load::prompts::TokenRange;
    use crate::load::render::Seeding;
    use crate::load::report::ClientFacts;

    fn options(names: &[&str]) -> CompareOptions {
        CompareOptions {
            pairs: 1,
            rounds: Rounds { warmups: 0, trials: 2, prompts: PromptReuse::Fresh },
            workloads: names.iter().map(|name| Workload::named(name).expect(name)).collect(),
            may_be_skipped: vec!["shared-packed-batch".into()],
            seeding: Seeding { seed: 1, token_range: TokenRange::default() },
            client: ClientFacts::here(1),
            timeout: std::time::Duration::from_secs(1),
            ready_wait: std::time::Duration::from_secs(1),
            devices: DeviceOptions::default(),
            api_key: None,
            model: None,
            objectives: Vec::new(),
            oracle: None,
        }
    }

    fn variant(dialect: Dialect, model: Option<&str>) -> Variant {
        let config = model.map(|id| [("model.id".to_owned(), id.into())].into());
        let (name, url, ready) = ("v".into(), String::new(), String::new());
        Variant { name, command: Vec::new(), url, dialect, ready, sha256: None, config }
    }

    fn target() -> Target {
        Target::new("http://127.0.0.1:9", None).expect("a target")
    }

    /// An oracle of model `m` and seed 1 that knows `names` as a server that takes so much is asked for them.
    fn oracle(names: &[&str], dialect: Dialect, takes: Capabilities) -> Oracle {
        let options = options(names);
        let renderer = Renderer::unprobed(target(), "m", dialect, options.seeding).taking(dialect, takes);
        let mut oracle = Oracle::new("m", 1);
        for wire in wires_of(&renderer, &options.workloads, options.rounds) {
            let record = Record { outcome: Outcome::Completed, key: wire.key, ..Record::failed(0, String::new()) };
            oracle.record(&record).expect("a completed request");
        }
        oracle
    }

    #[test]
    fn an_oracle_that_can_judge_a_server_in_no_form_is_refused_before_it_is_started() {
        let (native, words) = (Dialect::Native, Dialect::OpenaiCompletions);
        let of = |oracle: &Oracle, variant: &Variant, options: &CompareOptions| {
            foreseen(oracle, variant, &target(), options).map_err(|e| e.to_string())
        };
        let tiny = options(&["tiny-4x1"]);
        let best = oracle(&["tiny-4x1"], native, Capabilities::best_of(native));
        assert_eq!(of(&best, &variant(native, None), &tiny), Ok(()));
        assert_eq!(of(&best, &variant(native, Some("m")), &tiny), Ok(()));
        let why = of(&best, &variant(native, Some("n")), &tiny).expect_err("another model");
        assert!(why.contains("with model m, this run has n"), "{why}");
        let named = CompareOptions { model: Some("n".into()), ..tiny.clone() };
        assert!(of(&best, &variant(native, Some("m")), &named).is_err_and(|e| e.contains("this run has n")));
        let seeded = CompareOptions { seeding: Seeding { seed: 2, ..tiny.seeding }, ..tiny.clone() };
        assert!(of(&best, &variant(native, None), &seeded).is_err_and(|e| e.contains("with seed 1, this run has 2")));
        let why = of(&best, &variant(words, None), &tiny).expect_err("another dialect");
        assert!(why.contains("does not know 8 of 8 requests"), "{why}");
        let more = options(&["tiny-4x1", "tiny-2x1", "shared-packed-batch"]);
        let why = of(&best, &variant(native, None), &more).expect_err("another workload");
        assert!(why.contains("does not know 4 of 12 requests"), "what may be skipped is not wanted: {why}");
        // Of a peer that takes less, only its start can tell.
        for takes in forms(words) {
            let peer = oracle(&["tiny-4x1"], words, takes);
            assert_eq!(of(&peer, &variant(words, None), &tiny), Ok(()), "{takes:?}");
        }
    }
}
