//! `crucible serve`: fetches the model when it is absent, loads it, listens, and says how to ask.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use actix_web::web;

use super::Outcome;
use super::assemble::{Assembled, assemble};
use crate::config::Config;
use crate::model::pull::Progress;
use crate::server::{self, Ending, Service};
use crate::telemetry::log;

/// Arguments of `serve`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Configuration file (TOML); every key's default stands in config/crucible.toml.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Overrides one key of the configuration, such as prefill.token_budget=512.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// A fault on purpose, such as planner=100: at the hundredth visit of that point.
    #[cfg(feature = "fault-injection")]
    #[arg(long = "fault", value_name = "POINT=VISIT")]
    faults: Vec<crate::faults::Fault>,
}

/// Serves until SIGTERM or Ctrl-C, or until the engine dies.
///
/// # Errors
/// The configuration, the model, the backend or the address.
pub fn run(args: &Args) -> Outcome {
    let config = Config::load(args.config.as_deref(), &args.overrides)?;
    log::init(&config.telemetry);
    #[cfg(feature = "fault-injection")]
    args.faults.iter().copied().for_each(crate::faults::arm);
    server::check(&config.server)?;
    let Assembled { engine, tokenizer, template } = assemble(&config, Progress::Shown)?;
    let service = web::Data::new(Service::new(config.clone(), engine.handle(), tokenizer, template));
    let ready = move |address| announce(&config, address);
    let ending = actix_web::rt::System::new().block_on(server::serve(service, ready))?;
    match ending {
        Ending::Drained => {
            tracing::info!("every request has ended; good bye");
            Ok(ExitCode::SUCCESS)
        }
        Ending::Interrupted => leave("interrupted while draining", 130),
        Ending::Failed(reason) => leave(&format!("the engine failed: {reason}"), 1),
    }
}

/// Ends the process without waiting for a device or a thread that may never answer.
fn leave(reason: &str, code: i32) -> ! {
    tracing::error!("{reason}");
    // Standard error may be a file on a full disk.
    let _ = writeln!(std::io::stderr(), "crucible: {reason}");
    std::process::exit(code)
}

/// The log says where; the last line on the terminal is a command to paste.
fn announce(config: &Config, address: SocketAddr) {
    tracing::info!("listening on {}://{address}", scheme(config));
    // The server serves, whoever reads its terminal.
    let _ = writeln!(std::io::stdout(), "{}", example(config, address));
}

fn scheme(config: &Config) -> &'static str {
    if config.server.tls.is_some() { "https" } else { "http" }
}

/// A curl command that chats with this server. Without a tokenizer for words (a synthetic model) it asks for any text.
fn example(config: &Config, address: SocketAddr) -> String {
    let host = match address.ip() {
        ip if ip.is_unspecified() => "127.0.0.1".to_owned(),
        ip if ip.is_ipv6() => format!("[{ip}]"),
        ip => ip.to_string(),
    };
    let key = match config.server.api_keys.is_open() {
        true => "",
        false => " -H 'authorization: Bearer YOUR_KEY'",
    };
    let body = serde_json::json!({
        "model": config.model.id,
        "messages": [{"role": "user", "content": "What is the name of the capital of France?"}],
        "temperature": 0,
        "max_tokens": 32,
    });
    let port = address.port();
    let scheme = scheme(config);
    format!("curl -s {scheme}://{host}:{port}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'")
}
