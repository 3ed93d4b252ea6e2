//! Comparisons of servers that are started for it: two in pairs, or the combinations of a sweep.

use std::path::PathBuf;

use super::args::{ClientArgs, DeviceArgs, JudgeArgs, OutputArgs, PairArgs, WorkloadArgs};
use super::commands::{RunArgs, SweepArgs};
use super::ready::{may_be_skipped, note_given_up, oracle_of, runnable};
use super::{Failure, Outcome, bar, binary, client_facts, exit, publish, workloads_of};
use crate::config::Config;
use crate::load::compare::{CompareOptions, compare};
use crate::load::file;
use crate::load::render::Renderer;
use crate::load::report::comparison;
use crate::load::variant::{Variant, sets};
use crate::load::workload::Workload;

/// Times that every server is started.
const PAIRS: usize = 3;

/// The keys that a sweep sets: of a budget and of a cap.
const SWEPT: [&str; 2] = ["prefill.token_budget", "prefill.chunk_cap"];

/// What both kinds are given.
struct Compared<'a> {
    work: &'a WorkloadArgs,
    client: &'a ClientArgs,
    pairs: &'a PairArgs,
    judge: &'a JudgeArgs,
    devices: &'a DeviceArgs,
    output: &'a OutputArgs,
    api_key: Option<&'a String>,
    model: Option<&'a String>,
}

impl Compared<'_> {
    fn options(&self) -> Result<CompareOptions, Failure> {
        let workloads = workloads_of(&self.work.workload, self.work.workloads.as_ref())?;
        let optional = workloads.iter().filter(|w| may_be_skipped(w, &self.work.workload));
        Ok(CompareOptions {
            may_be_skipped: optional.map(|w| w.name.clone()).collect(),
            workloads,
            oracle: oracle_of(self.judge)?,
            pairs: self.pairs.pairs.unwrap_or(PAIRS),
            rounds: self.work.rounds(),
            seeding: self.client.seeding(),
            client: client_facts(self.client.threads(), self.judge.capacity)?,
            timeout: self.client.timeout(),
            ready_wait: self.pairs.servers.ready_wait(),
            devices: self.devices.options(),
            api_key: self.api_key.cloned(),
            model: self.model.cloned(),
            objectives: self.judge.slo.clone(),
        })
    }

    fn run(&self, variants: Vec<Variant>) -> Outcome {
        let (options, logs) = (self.options()?, self.pairs.servers.logs());
        file::make_folder(logs)?;
        let progress = bar();
        let settle = |renderer: &mut Renderer, workloads: &[Workload]| {
            note_given_up(renderer);
            let kept = runnable(renderer, workloads.to_vec(), &self.work.workload).map(|(kept, _)| kept);
            kept.map_err(|e| e.to_string())
        };
        let found = compare(variants, &options, &settle, logs, &progress)?;
        progress.finish_and_clear();
        publish(&comparison::text(&found), &found, || comparison::page(&found), self.output)?;
        Ok(exit(found.passed))
    }
}

/// A flag that would do nothing for any of the two is a misunderstanding.
fn refuse_idle_flags(args: &RunArgs, files: &[PathBuf], variants: &[Variant]) -> Result<(), Failure> {
    let programs = args.pairs.servers.binary.len();
    let described = |v: &&Variant| v.config.is_none();
    let idle = if programs > 1 {
        variants.iter().find(described)
    } else {
        variants.iter().all(|v| described(&v)).then(|| &variants[0])
    };
    if let Some(variant) = idle.filter(|_| programs > 0) {
        let name = &variant.name;
        return Err(format!(
            "--binary belongs to configurations, and {name} has a command; give it once for each configuration"
        )
        .into());
    }
    if args.ask.dialect.is_none() {
        return Ok(());
    }
    let names = files.iter().map(|file| Variant::names_dialect(file)).collect::<Result<Vec<_>, _>>()?;
    let own = std::iter::zip(variants, names).all(|(variant, named)| named && variant.config.is_none());
    if own {
        return Err("--dialect belongs to files that name none, and both do; leave it out".into());
    }
    Ok(())
}

pub fn ab(args: &RunArgs, files: &[PathBuf]) -> Outcome {
    let mut variants: Vec<Variant> = Vec::new();
    for (index, file) in files.iter().enumerate() {
        let program = binary(&args.pairs.servers, index, files.len())?;
        let mut variant = Variant::from_file(file, &program, args.ask.dialect)?;
        if variants.iter().any(|v| v.name == variant.name) {
            variant.name.push_str(" (B)");
        }
        variants.push(variant);
    }
    refuse_idle_flags(args, files, &variants)?;
    let target = &args.ask.target;
    let compared = Compared {
        work: &args.work,
        client: &target.client,
        pairs: &args.pairs,
        judge: &args.judge,
        devices: &args.devices,
        output: &args.output,
        api_key: target.api_key.as_ref(),
        model: target.model.as_ref(),
    };
    compared.run(variants)
}

pub fn sweep(args: &SweepArgs) -> Outcome {
    if let Some(own) = SWEPT.iter().find(|key| args.served.settings.iter().any(|s| sets(s, key))) {
        return Err(format!("{own} is what a sweep sets; leave it out of --set and give --budgets and --caps").into());
    }
    let program = binary(&args.pairs.servers, 0, 1)?;
    let mut variants: Vec<Variant> = Vec::new();
    for budget in &args.budgets {
        for cap in &args.caps {
            let name = format!("{budget}/{cap}");
            if variants.iter().any(|v| v.name == name) {
                return Err(format!("the combination {name} is given twice; name every budget and cap once").into());
            }
            let quoted = if cap.parse::<u32>().is_ok() { cap.clone() } else { format!("\"{cap}\"") };
            let own = [format!("{}={budget}", SWEPT[0]), format!("{}={quoted}", SWEPT[1])];
            let settings = [args.served.settings.as_slice(), &own].concat();
            if args.pairs.servers.binary.is_empty() {
                // Another program may have other keys.
                Config::load(Some(&args.served.config), &settings).map_err(|e| format!("{name}: {e}"))?;
            }
            variants.push(Variant::serve(&name, &program, &args.served.config, &settings)?);
        }
    }
    if variants.len() < 2 {
        return Err("a sweep needs at least two combinations of --budgets and --caps".into());
    }
    let compared = Compared {
        work: &args.work,
        client: &args.client,
        pairs: &args.pairs,
        judge: &args.judge,
        devices: &args.devices,
        output: &args.output,
        api_key: args.served.api_key.as_ref(),
        model: None,
    };
    compared.run(variants)
}
