//! The Grafana dashboard and the alert rules against a real Prometheus that scrapes the real server: every panel's query returns data,
//! every rule is evaluated without an error, and none fires; a dead engine and a restart are seen. Without Prometheus (Debian's package `prometheus`) the checks skip visibly.

mod engine_support;
mod http_support;
#[path = "http_support/scripted.rs"]
mod scripted;

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crucible::telemetry::names;
use engine_support::fake::{Fault, Script};
use http_support::binary::Binary;
use http_support::client::{get, post, send_json};
use http_support::until;
use scripted::Scripted;
use serde_json::{Value, json};

const DASHBOARD: &str = include_str!("../config/grafana/crucible.json");
const RULES: &str = include_str!("../config/grafana/alerts.yml");
const OPERATIONS: &str = include_str!("../docs/operations.md");
/// What Grafana would put for `$__rate_interval` at a scrape a second.
const RATE_INTERVAL: &str = "20s";

/// Whether a tool is there; says so past the capture of the test harness where it is not.
fn have(tool: &str, checks: usize) -> bool {
    let there = Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !there {
        let _ = writeln!(std::io::stderr(), "skipped {checks} check(s): no {tool}; install the package prometheus");
    }
    there
}

fn panels() -> Vec<(String, Vec<String>)> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("the dashboard is JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let queries = |panel: &Value| {
        let targets = panel["targets"].as_array().cloned().unwrap_or_default();
        targets.iter().map(|t| t["expr"].as_str().expect("a query").to_owned()).collect()
    };
    let shown = panels.iter().filter(|p| p["type"] != "row");
    shown.map(|p| (p["title"].as_str().expect("a title").to_owned(), queries(p))).collect()
}

fn rule_names() -> Vec<&'static str> {
    RULES.lines().filter_map(|l| l.trim().strip_prefix("- alert: ")).collect()
}

#[test]
fn every_metric_stands_in_a_panel_and_every_metric_of_panels_and_rules_exists() {
    let queries: String = panels().into_iter().flat_map(|(_, queries)| queries).collect::<Vec<_>>().join("\n");
    for metric in names::ALL {
        assert!(queries.contains(metric.name), "no panel shows {}", metric.name);
    }
    for word in queries.split(|c: char| !(c.is_alphanumeric() || c == '_')).chain(
        RULES
            .lines()
            .filter(|l| !l.contains("annotations"))
            .flat_map(|l| l.split(|c: char| !(c.is_alphanumeric() || c == '_'))),
    ) {
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| word.strip_suffix(end)).unwrap_or(word);
        assert!(
            !word.starts_with("crucible_") || names::ALL.iter().any(|m| m.name == word || m.name == base),
            "there is no metric {word}"
        );
    }
}

#[test]
fn every_alert_is_explained_on_the_operations_page() {
    let names = rule_names();
    assert!(names.len() >= 10, "{names:?}");
    for name in names {
        assert!(OPERATIONS.contains(&format!("| `{name}` |")), "{name}");
    }
}

#[test]
fn every_alert_fires_on_its_fault_and_none_on_a_healthy_server() {
    if !have("promtool", 1) {
        return;
    }
    let run = |args: &[&str]| {
        let output = Command::new("promtool").args(args).output().expect("promtool");
        let said = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
        assert!(output.status.success(), "promtool {args:?}: {}", String::from_utf8_lossy(&said));
    };
    run(&["check", "rules", "config/grafana/alerts.yml"]);
    run(&["test", "rules", "config/grafana/alerts_test.yml"]);
    let tested = include_str!("../config/grafana/alerts_test.yml");
    for name in rule_names() {
        assert!(tested.contains(&format!("alertname=\"{name}\"")), "{name} is never seen firing");
    }
}

/// A running Prometheus that scrapes one server every second; killed on drop.
struct Prometheus {
    child: Child,
    address: SocketAddr,
    folder: PathBuf,
}

impl Prometheus {
    fn start(target: SocketAddr) -> Self {
        let folder = std::env::temp_dir().join(format!("crucible-prometheus-{}-{}", std::process::id(), target.port()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let rules = std::fs::canonicalize("config/grafana/alerts.yml").expect("the rules");
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{}']\nscrape_configs:\n- job_name: crucible\n  \
             static_configs: [{{targets: ['{target}']}}]\n",
            rules.display()
        );
        std::fs::write(folder.join("prometheus.yml"), config).expect("written");
        let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", folder.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(folder.join("log")).expect("a log"))
            .spawn()
            .expect("prometheus");
        let this = Self { child, address, folder };
        until("Prometheus is ready", || std::net::TcpStream::connect(this.address).is_ok());
        until("Prometheus is ready", || get(this.address, "/-/ready").status == 200);
        this
    }

    /// The samples of an instant query.
    fn query(&self, expr: &str) -> Vec<Value> {
        let encoded: String = expr.bytes().map(|b| format!("%{b:02x}")).collect();
        let answer = get(self.address, &format!("/api/v1/query?query={encoded}"));
        let body = answer.json();
        assert_eq!(body["status"], "success", "{expr}: {body}");
        body["data"]["result"].as_array().cloned().unwrap_or_default()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Traffic in which every metric moves: packed and single prefill, sampled and greedy, refused and cancelled.
fn traffic(address: SocketAddr) {
    let ask = |n: usize| {
        json!({"prompt": "abc".repeat(n + 1), "max_tokens": 60, "ignore_eos": true,
               "temperature": if n.is_multiple_of(2) { 0.0 } else { 1.0 }, "seed": n})
    };
    let together: Vec<_> = (0..6).map(|n| send_json(address, "/v1/generate", &ask(n))).collect();
    together.into_iter().for_each(|pending| assert_eq!(pending.response().status, 200));
    assert_eq!(post(address, "/v1/completions", &json!({"model": "tiny", "prompt": "x", "max_tokens": 5})).status, 200);
    assert_eq!(post(address, "/v1/generate", &json!({"prompt": 5})).status, 400);
    let mut gone =
        send_json(address, "/v1/generate/stream", &json!({"prompt": "x", "max_tokens": 400, "ignore_eos": true}));
    gone.head();
    drop(gone);
}

#[test]
fn every_panel_returns_data_and_every_rule_is_evaluated_and_quiet_on_a_healthy_server() {
    if !have("prometheus", 1) {
        return;
    }
    let server = Binary::tiny(&[]);
    let prometheus = Prometheus::start(server.address);
    for _ in 0..10 {
        traffic(server.address);
        std::thread::sleep(Duration::from_secs(1));
    }
    let instance = server.address.to_string();
    for (title, queries) in panels() {
        assert!(!queries.is_empty(), "{title} asks nothing");
        for query in queries {
            let query = query.replace("$__rate_interval", RATE_INTERVAL).replace("$instance", &instance);
            assert!(!query.contains('$'), "{title}: a variable is left in {query}");
            let samples = prometheus.query(&query);
            let numbers = samples.iter().filter(|s| s["value"][1].as_str().is_some_and(|v| v != "NaN")).count();
            assert!(numbers > 0, "{title} shows nothing for {query}: {samples:?}");
        }
    }
    let rules = get(prometheus.address, "/api/v1/rules").json();
    let rules = rules["data"]["groups"][0]["rules"].as_array().cloned().expect("the rules");
    assert_eq!(rules.len(), rule_names().len());
    for rule in rules {
        assert_eq!((&rule["health"], &rule["state"]), (&json!("ok"), &json!("inactive")), "{rule}");
    }
    assert!(prometheus.query("ALERTS").is_empty());
}

/// Whether an alert fires.
fn fires(prometheus: &Prometheus, alert: &str) -> bool {
    !prometheus.query(&format!("ALERTS{{alertname=\"{alert}\",alertstate=\"firing\"}}")).is_empty()
}

#[test]
fn an_ordinary_scrape_sees_a_dead_engine_while_its_process_lives_and_the_alerts_fire() {
    if !have("prometheus", 2) {
        return;
    }
    let script = Script { fault: Arc::new(|_| Fault::FailAtPoll), ..Script::default() };
    script.hold.store(true, Ordering::Release);
    let server = Scripted::start(script.clone(), &["server.fatal_linger_ms=60000"]);
    let prometheus = Prometheus::start(server.address);
    let pending = send_json(server.address, "/v1/generate", &json!({"prompt": "abc", "max_tokens": 5}));
    until("a scrape sees the request", || !prometheus.query("crucible_running_requests == 1").is_empty());
    assert!(!fires(&prometheus, "CrucibleEngineFailed") && !fires(&prometheus, "CrucibleRequestsFail"));
    script.hold.store(false, Ordering::Release);
    assert_eq!(pending.response().status, 503);
    until("CrucibleEngineFailed fires", || fires(&prometheus, "CrucibleEngineFailed"));
    until("CrucibleRequestsFail fires", || fires(&prometheus, "CrucibleRequestsFail"));
}

#[test]
fn a_restart_is_seen_by_the_fall_of_the_uptime() {
    if !have("prometheus", 1) {
        return;
    }
    let before = Binary::tiny(&[]);
    let prometheus = Prometheus::start(before.address);
    until("the server has run for a while", || !prometheus.query("crucible_uptime_seconds > 5").is_empty());
    assert!(!fires(&prometheus, "CrucibleRestarted"));
    let port = before.address.port();
    drop(before);
    let _after = Binary::tiny(&[&format!("server.port={port}")]);
    until("CrucibleRestarted fires", || fires(&prometheus, "CrucibleRestarted"));
}

#[test]
fn the_systemd_unit_is_valid_and_waits_longer_than_the_drain() {
    let unit = include_str!("../config/crucible.service");
    let stop = unit.lines().find_map(|l| l.strip_prefix("TimeoutStopSec=")).and_then(|s| s.parse::<u64>().ok());
    assert!(stop > Some(crucible::config::Config::default().server.drain_deadline.as_secs()));
    if !have("systemd-analyze", 1) {
        return;
    }
    let folder = std::env::temp_dir().join(format!("crucible-unit-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join("crucible.service");
    let here = unit.replace("/usr/local/bin/crucible", env!("CARGO_BIN_EXE_crucible"));
    std::fs::write(&path, here).expect("written");
    let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().expect("it runs");
    let said = String::from_utf8_lossy(&verified.stderr).into_owned();
    std::fs::remove_dir_all(&folder).expect("ours");
    assert!(verified.status.success() && !said.contains("crucible.service:"), "{said}");
}
