//! `crucible generate`: one answer from the same engine in this process, streamed to standard output.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::Actor;
use bytes::Bytes;
use futures_util::StreamExt;

use super::Outcome;
use super::assemble::{Assembled, assemble};
use crate::actors::session::{FieldNames, FrameBody, Output, Plan, Registry, SessionHub, launch};
use crate::admission::{Dialect, RequestSpec};
use crate::config::{Config, LogLevel};
use crate::model::chat_template::{ChatMessage, GenerationPrompt};
use crate::model::conversation;
use crate::model::pull::Progress;
use crate::model::tokenizer::SpecialTokens;
use crate::output::{self, Reader};
use crate::protocol::choice::{Answer, ChoiceDecoder, ChoiceEnd, Delta};
use crate::protocol::errors::ApiError;
use crate::protocol::format::{Format, Usage};
use crate::protocol::sampling::{DEFAULT_SEED, Sampling};
use crate::telemetry::log;

/// Arguments of `generate`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to continue, or to answer with --chat.
    prompt: String,
    /// Takes the prompt as a user's message and applies the model's chat template.
    #[arg(long)]
    chat: bool,
    /// Most tokens to generate.
    #[arg(long, default_value_t = 128)]
    max_tokens: usize,
    /// Draws tokens; without it the answer is greedy.
    #[arg(long)]
    temperature: Option<f64>,
    /// Keeps the k most likely tokens.
    #[arg(long, requires = "temperature")]
    top_k: Option<NonZeroU32>,
    /// Keeps the most likely tokens that make up this share.
    #[arg(long, requires = "temperature")]
    top_p: Option<f64>,
    /// Seed of the draws.
    #[arg(long, requires = "temperature")]
    seed: Option<u64>,
    /// Ends the answer at this text; may be given several times.
    #[arg(long)]
    stop: Vec<String>,
    /// Configuration file (TOML).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Overrides one key of the configuration.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

/// The frames of plain text: the text itself.
struct PlainText {
    failed: Rc<Cell<bool>>,
}

impl Format for PlainText {
    fn whole(&self, answers: &[Answer], _usage: Usage) -> Bytes {
        answers.iter().map(|a| a.text.as_str()).collect::<String>().into()
    }

    fn token(&mut self, _choice: usize, delta: &Delta) -> Option<Bytes> {
        (!delta.text.is_empty()).then(|| Bytes::copy_from_slice(delta.text.as_bytes()))
    }

    fn end(&mut self, _choice: usize, end: &ChoiceEnd) -> Bytes {
        Bytes::from(format!("{}\n", end.tail))
    }

    fn failed(&mut self, error: &ApiError) -> Bytes {
        self.failed.set(true);
        Bytes::from(format!("\n[{error}]\n"))
    }
}

/// Generates one answer.
///
/// # Errors
/// The configuration, the model, the backend, or a prompt that does not fit.
pub fn run(args: &Args) -> Outcome {
    let mut config = Config::load(args.config.as_deref(), &args.overrides)?;
    // The answer is the output; only what went wrong belongs beside it.
    config.telemetry.log_level = LogLevel::Warn;
    log::init(&config.telemetry);
    let sampling = sampling(args)?;
    if args.stop.iter().any(String::is_empty) {
        return Err("--stop is empty: give the text that ends the answer".into());
    }
    let Assembled { engine, tokenizer, template } = assemble(&config, Progress::Shown)?;
    let prompt = if args.chat {
        let message = ChatMessage { role: "user".into(), content: args.prompt.clone() };
        conversation::ids(&template, &tokenizer, &[message], GenerationPrompt::Add, usize::MAX)?
    } else {
        tokenizer.encode_prompt(&args.prompt, SpecialTokens::Parse)?
    };
    let spec = RequestSpec {
        prompt: prompt.into(),
        max_new_tokens: args.max_tokens,
        rule: sampling.rule(),
        adjust: None,
        seed: args.seed.unwrap_or(DEFAULT_SEED),
        choice: 0,
        eos: tokenizer.eos_ids(),
        logprobs: None,
        score_prompt: false,
        dialect: Dialect::Internal,
    };
    let failed = Rc::new(Cell::new(false));
    let (output, frames) = Output::frames(Box::new(PlainText { failed: Rc::clone(&failed) }), usize::MAX);
    let plan = Plan {
        name: "generate".into(),
        prompt_tokens: spec.prompt.len(),
        choices: vec![(spec, ChoiceDecoder::new(Box::new(tokenizer.detokenizer()), &args.stop))],
        output,
        names: FieldNames { prompt: "prompt", max_tokens: "max_tokens" },
        keep_alive: Duration::MAX,
    };
    actix::System::new().block_on(async move {
        let registry = Arc::new(Registry::default());
        let hub = SessionHub::new(Arc::clone(&registry)).start();
        let guard = launch(&engine.handle(), &registry, &hub, plan)?;
        let mut body = FrameBody::new(frames, guard);
        while let Some(frame) = body.next().await {
            if output::send(&frame?)? == Reader::Gone {
                break;
            }
        }
        Ok(if failed.get() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    })
}

fn sampling(args: &Args) -> Result<Sampling, String> {
    let temperature = args.temperature.unwrap_or(0.0);
    let top_p = args.top_p.unwrap_or(1.0);
    if !(0.0..=5.0).contains(&temperature) {
        return Err(format!("--temperature is {temperature}, it must lie in 0..=5"));
    }
    if !(0.0..=1.0).contains(&top_p) {
        return Err(format!("--top-p is {top_p}, it must lie in 0..=1"));
    }
    Ok(Sampling { temperature, top_k: args.top_k, top_p, min_p: 0.0 })
}
