//! Which keys exist, their defaults and their ranges: the one table that config/crucible.toml is tested against.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use super::fields::Fields;
use super::keys::api_keys;
use super::origins::origins;
use super::{
    BackendChoice, Config, ExecutorConfig, GraphsConfig, IsaChoice, KvConfig, LimitsConfig, LogFormat, LogLevel,
    ModelConfig, ModelPath, PrefillConfig, ServerConfig, TelemetryConfig, TlsFiles,
};
use crate::backend::AttentionVariant;
use crate::model::{Geometry, MatrixFormat, Profile, RopePairing};

/// Positions per page that every kernel is written for.
const PAGE_TOKENS: usize = 16;

/// Reads every key; problems stay in `f`.
pub fn config(f: &mut Fields) -> Config {
    let config = Config {
        model: model(f),
        prefill: prefill(f),
        attention: f.choice(
            "attention.variant",
            &[("auto", AttentionVariant::Auto), ("reference", AttentionVariant::Reference)],
        ),
        graphs: graphs(f),
        kv: kv(f),
        limits: limits(f),
        executor: executor(f),
        server: server(f),
        telemetry: telemetry(f),
        cache_dir: f.path("cache.dir"),
    };
    check_together(f, &config);
    config
}

fn model(f: &mut Fields) -> ModelConfig {
    let id = f.text("model.id", "smollm2-135m-instruct");
    if id.is_empty() || id.len() > 256 || id.chars().any(|c| c.is_control() || c.is_whitespace()) {
        f.reject("model.id", "model.id must be 1 to 256 characters without spaces".into());
    }
    ModelConfig {
        id,
        source: source(f),
        profile: f.choice("model.profile", &[("q8", Profile::Q8), ("f32", Profile::F32), ("int8", Profile::Int8)]),
        block: f.choice(
            "model.block",
            &[("q8_0", MatrixFormat::Q8_0), ("q4_0", MatrixFormat::Q4_0), ("q4_1", MatrixFormat::Q4_1)],
        ),
        seed: f.integer("model.seed", 0, 0..=i64::MAX).unsigned_abs(),
        geometry: geometry(f),
    }
}

/// The last CPU that fits a system's set of them (`CPU_SETSIZE`).
const CPU_MAX: usize = 1_023;

/// Inputs of a block in profile q8.
const Q8_BLOCK: usize = 32;

/// How `model.path` is read.
#[derive(Clone, Copy)]
enum LoadFormat {
    /// By what the path is.
    Auto,
    /// A GGUF file, whatever its name.
    Gguf,
    /// Seeded random weights.
    Synthetic,
}

fn source(f: &mut Fields) -> ModelPath {
    let path = f.text("model.path", "");
    let formats = [("auto", LoadFormat::Auto), ("gguf", LoadFormat::Gguf), ("synthetic", LoadFormat::Synthetic)];
    match (f.choice("model.load_format", &formats), path.as_str()) {
        (LoadFormat::Auto, "synthetic") | (LoadFormat::Synthetic, "" | "synthetic") => ModelPath::Synthetic,
        (LoadFormat::Synthetic, path) => {
            let text = "model.load_format is \"synthetic\", which reads no file";
            let keys = ["model.load_format", "model.path"];
            f.reject_together(&keys, format!("{text}: leave model.path empty or write \"gguf\" to read {path}"));
            ModelPath::Synthetic
        }
        (LoadFormat::Auto | LoadFormat::Gguf, "") => ModelPath::Default,
        (LoadFormat::Auto | LoadFormat::Gguf, path) => ModelPath::File(path.into()),
    }
}

fn geometry(f: &mut Fields) -> Geometry {
    let geometry = Geometry {
        layers: f.size("model.geometry.layers", 4, 1..=512),
        hidden: f.size("model.geometry.hidden", 128, 1..=65_536),
        heads: f.size("model.geometry.heads", 4, 1..=1_024),
        kv_heads: f.size("model.geometry.kv_heads", 2, 1..=1_024),
        head_dim: f.size("model.geometry.head_dim", 32, 1..=512),
        ffn: f.size("model.geometry.ffn", 256, 1..=262_144),
        vocab: f.size("model.geometry.vocab", 512, 1..=1 << 20),
        context: f.size("model.geometry.context", 1_024, 1..=1 << 20),
        rope_base: f.float("model.geometry.rope_base", 10_000.0, 1.000_001..=1e12),
        rms_eps: f.float("model.geometry.rms_eps", 1e-5, 1e-12..=1.0) as f32,
        rope_pairing: RopePairing::Halves,
    };
    if let Err(error) = geometry.validate() {
        let text = format!("model.geometry: {error}");
        let keys = ["heads", "kv_heads", "head_dim", "rope_base", "rms_eps"];
        let keys: Vec<_> =
            keys.iter().filter(|key| text.contains(*key)).map(|k| format!("model.geometry.{k}")).collect();
        f.reject_together(&keys.iter().map(String::as_str).collect::<Vec<_>>(), text);
    }
    geometry
}

fn prefill(f: &mut Fields) -> PrefillConfig {
    PrefillConfig {
        packing: f.boolean("prefill.packing", true),
        token_budget: f.size("prefill.token_budget", 1_024, 1..=65_536),
        chunk_cap: f.size_or_off("prefill.chunk_cap", 1..=65_536),
        max_requests: f.size("prefill.max_requests", 64, 1..=4_096),
        step_time_target: f
            .size_or_off("prefill.step_time_target_us", 100..=10_000_000)
            .map(|us| Duration::from_micros(us as u64)),
    }
}

fn graphs(f: &mut Fields) -> GraphsConfig {
    let (on, off) = (("on", true), ("off", false));
    GraphsConfig {
        prefill: f.choice("graphs.prefill", &[on, off]),
        decode: f.choice("graphs.decode", &[on, off]),
        packed: f.choice("graphs.packed", &[off, on]),
        max_entries: f.size("graphs.max_entries", 64, 1..=4_096),
    }
}

fn kv(f: &mut Fields) -> KvConfig {
    let memory_fraction = f.float("kv.memory_fraction", 0.0, 0.0..=0.95);
    KvConfig {
        pages: f.size("kv.pages", 1_024, 1..=16_777_216),
        page_tokens: f.size("kv.page_tokens", PAGE_TOKENS, PAGE_TOKENS..=PAGE_TOKENS),
        memory_fraction: (memory_fraction > 0.0).then_some(memory_fraction),
    }
}

fn limits(f: &mut Fields) -> LimitsConfig {
    LimitsConfig {
        max_batch: f.size("limits.max_batch", 16, 1..=4_096),
        max_queue: f.size("limits.max_queue", 64, 1..=1_048_576),
        max_prompt_tokens: f.size_or_off("limits.max_prompt_tokens", 1..=1 << 20),
        max_new_tokens: f.size_or_off("limits.max_new_tokens", 1..=1 << 20),
        default_new_tokens: f.size("limits.default_new_tokens", 1_024, 1..=1 << 20),
    }
}

fn executor(f: &mut Fields) -> ExecutorConfig {
    ExecutorConfig {
        backend: f.choice(
            "executor.backend",
            &[("auto", BackendChoice::Auto), ("cpu", BackendChoice::Cpu), ("cuda", BackendChoice::Cuda)],
        ),
        device: f.size("executor.device", 0, 0..=63),
        libraries: f.path("executor.libraries"),
        threads: match f.size("executor.threads", 0, 0..=1_024) {
            0 => None,
            threads => Some(threads),
        },
        isa: f.choice(
            "executor.isa",
            &[
                ("auto", IsaChoice::Auto),
                ("scalar", IsaChoice::Scalar),
                ("avx2", IsaChoice::Avx2),
                ("avx512", IsaChoice::Avx512),
            ],
        ),
        pin: f.size_or_off("executor.pin", 0..=CPU_MAX),
        step_timeout: millis(f, "executor.step_timeout_ms", 30_000, 10..=3_600_000),
    }
}

fn server(f: &mut Fields) -> ServerConfig {
    let host = f.text("server.host", "127.0.0.1");
    let host = host.parse().unwrap_or_else(|_| {
        f.reject("server.host", format!("server.host must be an IP address such as 127.0.0.1, not \"{host}\""));
        IpAddr::V4(Ipv4Addr::LOCALHOST)
    });
    ServerConfig {
        host,
        port: u16::try_from(f.integer("server.port", 8_080, 0..=65_535)).unwrap_or_default(),
        workers: f.size("server.workers", 2, 1..=256),
        api_keys: api_keys(f),
        cors_origins: origins(f),
        tls: tls(f),
        body_limit_bytes: f.size("server.body_limit_bytes", 4_194_304, 1_024..=1_073_741_824),
        body_timeout: millis(f, "server.body_timeout_ms", 30_000, 100..=3_600_000),
        header_timeout: header_timeout(f),
        keep_alive: millis(f, "server.keep_alive_ms", 75_000, 0..=3_600_000),
        write_timeout: millis(f, "server.write_timeout_ms", 30_000, 1_000..=3_600_000),
        sse_keep_alive: millis(f, "server.sse_keep_alive_ms", 15_000, 10..=3_600_000),
        stream_buffer_bytes: f.size("server.stream_buffer_bytes", 1_048_576, 4_096..=1_073_741_824),
        fatal_linger: millis(f, "server.fatal_linger_ms", 1_000, 0..=60_000),
        drain_deadline: millis(f, "server.drain_deadline_ms", 30_000, 0..=3_600_000),
    }
}

/// The HTTP library counts this time from a clock that it reads every 500 ms: a deadline may come half a second early.
fn header_timeout(f: &mut Fields) -> Duration {
    const KEY: &str = "server.header_timeout_ms";
    let time = millis(f, KEY, 10_000, 0..=3_600_000);
    if time < Duration::from_millis(1_000) {
        let text = format!(
            "{KEY} is {}, it must be at least 1000: the HTTP library's clock may be 500 ms late, and good requests would be refused",
            time.as_millis()
        );
        f.reject(KEY, text);
    }
    time
}

fn tls(f: &mut Fields) -> Option<TlsFiles> {
    match (f.path("server.tls_certificate"), f.path("server.tls_key")) {
        (Some(certificate), Some(key)) => Some(TlsFiles { certificate, key }),
        (None, None) => None,
        (Some(_), None) => {
            f.reject("server.tls_certificate", "server.tls_certificate needs server.tls_key, its private key".into());
            None
        }
        (None, Some(_)) => {
            f.reject(
                "server.tls_key",
                "server.tls_key needs server.tls_certificate, the certificate it belongs to".into(),
            );
            None
        }
    }
}

fn telemetry(f: &mut Fields) -> TelemetryConfig {
    TelemetryConfig {
        log_format: f.choice("telemetry.log_format", &[("text", LogFormat::Text), ("json", LogFormat::Json)]),
        log_level: f.choice(
            "telemetry.log_level",
            &[
                ("info", LogLevel::Info),
                ("error", LogLevel::Error),
                ("warn", LogLevel::Warn),
                ("debug", LogLevel::Debug),
                ("trace", LogLevel::Trace),
            ],
        ),
        step_trace: f.path("telemetry.step_trace"),
    }
}

fn millis(f: &mut Fields, key: &str, default: usize, range: std::ops::RangeInclusive<usize>) -> Duration {
    Duration::from_millis(f.size(key, default, range) as u64)
}

/// What single keys cannot show.
fn check_together(f: &mut Fields, config: &Config) {
    if config.model.source == ModelPath::Synthetic && config.model.profile == Profile::Q8 {
        let geometry = &config.model.geometry;
        for (key, width) in [("model.geometry.hidden", geometry.hidden), ("model.geometry.ffn", geometry.ffn)] {
            if !width.is_multiple_of(Q8_BLOCK) {
                let text = format!("{key} is {width}, it must be a multiple of {Q8_BLOCK} in profile q8");
                f.reject_together(&[key, "model.profile"], text);
            }
        }
    }
    if let Some(cap) = config.prefill.chunk_cap.filter(|&cap| cap > config.prefill.token_budget) {
        let budget = config.prefill.token_budget;
        let text =
            format!("prefill.chunk_cap is {cap}, above prefill.token_budget ({budget}); lower it or write \"off\"");
        f.reject_together(&["prefill.chunk_cap", "prefill.token_budget"], text);
    }
    if config.executor.backend == BackendChoice::Cpu && config.kv.memory_fraction.is_some() {
        let text = "kv.memory_fraction needs a GPU; write 0.0 and set kv.pages";
        f.reject_together(&["kv.memory_fraction", "executor.backend"], text.into());
    }
}
