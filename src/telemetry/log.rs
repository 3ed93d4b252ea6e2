//! The log: one subscriber on standard error, shaped by the configuration and by nothing else. A line that cannot be written, as on a
//! full disk, is lost: the log never stops the server.

use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, LogLevel, TelemetryConfig};

impl LogLevel {
    const fn directive(self) -> &'static str {
        match self {
            LogLevel::Error => "error",
            LogLevel::Warn => "warn",
            LogLevel::Info => "info",
            LogLevel::Debug => "debug",
            LogLevel::Trace => "trace",
        }
    }
}

/// Starts the log. A second call, as in tests, changes nothing.
pub fn init(config: &TelemetryConfig) {
    // The HTTP library's own lines at info say only what ours say too.
    let filter = match config.log_level {
        LogLevel::Info => EnvFilter::new("info,actix_server=warn"),
        level => EnvFilter::new(level.directive()),
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // To say so on the same full disk would be a panic.
    let builder = builder.log_internal_errors(false);
    let _ = match config.log_format {
        LogFormat::Text => builder.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}
