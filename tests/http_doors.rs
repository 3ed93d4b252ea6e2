//! Who gets in: API keys from every source, the page's files without one, other sites' pages (CORS), TLS, and clients that are too
//! slow to say what they want.

mod engine_support;
mod http_support;
#[path = "http_support/scripted.rs"]
mod scripted;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use engine_support::fake::Script;
use http_support::binary::Binary;
use http_support::client::{Response, get, send};
use http_support::until;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use scripted::Scripted;
use serde_json::{Value, json};

/// A folder of its own below the build folder.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn with(address: SocketAddr, path: &str, header: (&str, &str)) -> u16 {
    send(address, "GET", path, &[header], &[]).response().status
}

#[test]
fn every_key_of_every_source_opens_and_nothing_else_does() {
    let file = folder("doors-keys").join("keys");
    std::fs::write(&file, "# the team\nfirst-key\n\n  second-key  \n").expect("a file");
    let file = format!("server.api_key_file={}", file.display());
    let server = Scripted::start(Script::default(), &["server.api_key=inline-key", &file]);
    for key in ["inline-key", "first-key", "second-key"] {
        assert_eq!(with(server.address, "/stats", ("x-api-key", key)), 200, "{key}");
        assert_eq!(with(server.address, "/stats", ("authorization", &format!("Bearer {key}"))), 200, "{key}");
        assert_eq!(with(server.address, "/stats", ("authorization", &format!("bearer   {key} "))), 200, "{key}");
    }
    for wrong in ["", "inline-ke", "inline-keys", "# the team", "first-key\tsecond-key", "INLINE-KEY"] {
        assert_eq!(with(server.address, "/stats", ("x-api-key", wrong)), 401, "{wrong}");
        assert_eq!(with(server.address, "/stats", ("authorization", &format!("Bearer {wrong}"))), 401, "{wrong}");
    }
    for (bearer, key, status) in [("x", "first-key", 200), ("first-key", "x", 200), ("x", "y", 401)] {
        let headers = [("authorization", &*format!("Bearer {bearer}")), ("x-api-key", key)];
        assert_eq!(send(server.address, "GET", "/stats", &headers, &[]).response().status, status, "{bearer} {key}");
    }
    let refused = get(server.address, "/v1/models");
    assert_eq!((refused.status, refused.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
}

#[test]
fn a_key_from_the_environment_works_and_no_log_at_the_highest_level_shows_a_key() {
    let server = Binary::with_environment(
        "config/cpu-test.toml",
        &["server.api_key_env=DOOR_KEY", "server.api_key=inline-secret", "telemetry.log_level=trace"],
        &[("DOOR_KEY", "secret-of-the-environment")],
    );
    assert_eq!(with(server.address, "/stats", ("x-api-key", "secret-of-the-environment")), 200);
    assert_eq!(with(server.address, "/stats", ("x-api-key", "inline-secret")), 200);
    assert_eq!(with(server.address, "/stats", ("x-api-key", "wrong-secret")), 401);
    assert_eq!(with(server.address, "/stats", ("authorization", "Bearer wrong-secret")), 401);
    until("the refusal is logged", || server.log.lock().unwrap().contains("invalid_api_key"));
    let log = server.log.lock().unwrap().clone() + &server.output.lock().unwrap();
    for secret in ["secret-of-the-environment", "inline-secret", "wrong-secret"] {
        assert!(!log.contains(secret), "{secret} stands in the log");
    }
}

/// What the binary says when it does not start.
fn complaint(overrides: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_crucible"));
    command.args(["serve", "--config", "config/cpu-test.toml"]);
    for set in overrides {
        command.args(["--set", set]);
    }
    let run = command.output().expect("the binary");
    assert_eq!(run.status.code(), Some(1), "{overrides:?}");
    String::from_utf8_lossy(&run.stderr).into_owned()
}

#[test]
fn key_sources_that_hold_no_key_are_errors_that_do_not_repeat_what_they_hold() {
    let folder = folder("doors-bad-keys");
    std::fs::write(folder.join("empty"), "# nothing\n\n").expect("a file");
    std::fs::write(folder.join("spaced"), "two words\n").expect("a file");
    let at = |name: &str| format!("server.api_key_file={}", folder.join(name).display());
    assert!(complaint(&[&at("missing")]).contains("server.api_key_file: cannot read"));
    assert!(complaint(&[&at("empty")]).contains("holds no key"));
    let spaced = complaint(&[&at("spaced")]);
    assert!(spaced.contains("visible ASCII") && !spaced.contains("two words"), "{spaced}");
    assert!(complaint(&["server.api_key_env=NO_SUCH_VARIABLE"]).contains("NO_SUCH_VARIABLE is not set"));
    let short = complaint(&["server.api_key=xyz"]);
    assert!(short.contains("server.api_key: a key must have at least 4") && !short.contains("xyz"), "{short}");
}

#[test]
fn the_files_of_the_page_need_no_key_and_everything_that_holds_data_does() {
    let server = Scripted::start(Script::default(), &["server.api_key=door-key"]);
    let page = get(server.address, "/");
    assert_eq!(page.status, 200);
    let mut files = 0;
    for name in page.text().split("\"/assets/").skip(1) {
        let name = name.split('"').next().unwrap();
        assert_eq!(get(server.address, &format!("/assets/{name}")).status, 200, "{name}");
        files += 1;
    }
    assert!(files >= 2, "{}", page.text());
    assert!(page.text().contains("id=\"api-key\""), "the page can ask for the key");
    for path in ["/health", "/ready"] {
        assert_eq!(get(server.address, path).status, 200, "{path}");
    }
    for path in ["/stats", "/metrics", "/v1/models", "/assets/", "/assets/../stats", "/nowhere", "//", "/health/"] {
        assert_eq!(get(server.address, path).status, 401, "{path}");
    }
}

fn preflight(address: SocketAddr, origin: &str) -> Response {
    let headers = [
        ("origin", origin),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type,x-stainless-lang"),
    ];
    send(address, "OPTIONS", "/v1/chat/completions", &headers, &[]).response()
}

#[test]
fn without_configured_origins_no_cors_header_is_sent() {
    let server = Scripted::start(Script::default(), &[]);
    let answer = send(server.address, "GET", "/health", &[("origin", "https://chat.example.org")], &[]).response();
    assert_eq!(answer.status, 200);
    assert!(!answer.headers.iter().any(|(name, _)| name.to_lowercase().starts_with("access-control")));
    assert_eq!(preflight(server.address, "https://chat.example.org").status, 405);
}

#[test]
fn a_listed_origin_is_let_in_before_the_key_is_asked_for_and_others_are_not() {
    let origins = "server.cors_origins=[\"https://chat.example.org\", \"http://localhost:3000\"]";
    let server = Scripted::start(Script::default(), &[origins, "server.api_key=door-key"]);
    for origin in ["https://chat.example.org", "http://localhost:3000"] {
        let answer = preflight(server.address, origin);
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, Some(origin)));
        let allowed = answer.header("access-control-allow-headers").expect("headers").to_lowercase();
        assert!(allowed.contains("authorization") && allowed.contains("x-stainless-lang"), "{allowed}");
        assert!(answer.header("access-control-allow-methods").expect("methods").contains("POST"));
        // The refusal itself must be readable by the page.
        let refused = send(server.address, "GET", "/stats", &[("origin", origin)], &[]).response();
        assert_eq!((refused.status, refused.header("access-control-allow-origin")), (401, Some(origin)));
    }
    let other = preflight(server.address, "https://evil.example.org");
    assert_eq!(other.header("access-control-allow-origin"), None);
    let key = [("origin", "https://evil.example.org"), ("x-api-key", "door-key")];
    let answer = send(server.address, "GET", "/stats", &key, &[]).response();
    assert_eq!(answer.header("access-control-allow-origin"), None);
    assert!(answer.header("access-control-allow-credentials").is_none());
}

#[test]
fn any_origin_is_a_wildcard_and_a_wrong_origin_in_the_list_is_an_error() {
    let server = Scripted::start(Script::default(), &["server.cors_origins=[\"*\"]"]);
    let answer = preflight(server.address, "https://any.example.org");
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, Some("*")));
    for wrong in
        ["chat.example.org", "https://chat.example.org/", "https://a.org/path", "ftp://a.org", "HTTPS://A.org", "*"]
    {
        let said = complaint(&[&format!("server.cors_origins=[\"https://good.example.org\", \"{wrong}\"]")]);
        assert!(said.contains("server.cors_origins holds"), "{wrong}: {said}");
    }
    for (wrong, right) in [("https://a.org:443", "https://a.org"), ("http://[::1]:80", "http://[::1]")] {
        let said = complaint(&[&format!("server.cors_origins=[\"{wrong}\"]")]);
        assert!(said.contains(&format!("holds \"{wrong}\"; browsers send it as \"{right}\": write that")), "{said}");
    }
    let others = "server.cors_origins=[\"https://a.org:80\", \"http://a.org:443\", \"http://a.org:8080\"]";
    Scripted::start(Script::default(), &[others]);
    assert!(complaint(&["server.cors_origins=https://a.org"]).contains("must be an array of strings"));
}

/// A certificate for 127.0.0.1 that signs itself, as DER, with the two configuration overrides.
fn certificate(name: &str) -> (CertificateDer<'static>, [String; 2]) {
    let folder = folder(name);
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    let (certificate, key) = (folder.join("certificate.pem"), folder.join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).expect("a file");
    std::fs::write(&key, made.signing_key.serialize_pem()).expect("a file");
    let set =
        [format!("server.tls_certificate={}", certificate.display()), format!("server.tls_key={}", key.display())];
    (made.cert.der().clone(), set)
}

/// What a client of HTTP/2 and HTTP/1.1 says that it speaks.
const BOTH: &[&str] = &["h2", "http/1.1"];

fn tls(address: SocketAddr, trusted: &CertificateDer<'static>) -> StreamOwned<ClientConnection, TcpStream> {
    tls_offering(address, trusted, &[])
}

/// A connection whose client offers these protocols by ALPN.
fn tls_offering(
    address: SocketAddr,
    trusted: &CertificateDer<'static>,
    protocols: &[&str],
) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).expect("a certificate");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().expect("versions");
    let mut client = client.with_root_certificates(roots).with_no_client_auth();
    client.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
    let name = ServerName::try_from("127.0.0.1").expect("a name");
    let stream = TcpStream::connect(address).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
    StreamOwned::new(ClientConnection::new(Arc::new(client), name).expect("a client"), stream)
}

/// A JSON request as it goes over the wire.
fn posted(path: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ");
    format!("{head}{}\r\n\r\n{body}", body.len()).into_bytes()
}

/// What /stats says over TLS.
fn tls_stats(address: SocketAddr, trusted: &CertificateDer<'static>) -> Value {
    let mut probe = tls_offering(address, trusted, BOTH);
    probe.write_all(b"GET /stats HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("a request");
    let mut answer = String::new();
    // A server may close the socket right after its close_notify.
    let _ = probe.read_to_string(&mut answer);
    serde_json::from_str(answer.split_once("\r\n\r\n").expect("a body").1).expect("JSON")
}

/// One whole answer with a length of its own, from a connection that stays open.
fn one_answer(stream: &mut impl Read) -> String {
    let (mut answer, mut byte) = (Vec::new(), [0]);
    let mut left = usize::MAX;
    while left > 0 {
        stream.read_exact(&mut byte).expect("an answer");
        answer.push(byte[0]);
        left -= 1;
        if answer.ends_with(b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&answer).to_lowercase();
            let length = head.split("content-length: ").nth(1).and_then(|rest| rest.lines().next());
            left = length.expect("a length").parse().expect("a number");
        }
    }
    String::from_utf8(answer).expect("UTF-8")
}

#[test]
fn with_a_certificate_the_server_speaks_tls_and_only_tls() {
    let (trusted, set) = certificate("doors-tls");
    let server = Scripted::start(Script::default(), &[&set[0], &set[1]]);
    let mut stream = tls(server.address, &trusted);
    stream.write_all(&posted("/v1/generate", &json!({"prompt": "abc", "max_tokens": 4}))).expect("a request");
    let answer = one_answer(&mut stream);
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"tokens_generated\":4"), "{answer}");

    // Another certificate is not this server's, and plain HTTP gets no answer.
    let (other, _) = certificate("doors-tls-other");
    assert!(tls(server.address, &other).write_all(b"GET /health HTTP/1.1\r\n\r\n").is_err());
    let mut plain = TcpStream::connect(server.address).expect("a connection");
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").expect("a request");
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&answer));
}

// HTTP/2 was offered first, and the request of an HTTP/2 client that hung up was computed to its end.
#[test]
fn over_tls_a_client_of_http_2_gets_http_1_1() {
    let (trusted, set) = certificate("doors-alpn");
    let server = Scripted::start(Script::default(), &[&set[0], &set[1]]);
    for offers in [BOTH, &["http/1.1", "h2"], &["http/1.1"]] {
        let mut stream = tls_offering(server.address, &trusted, offers);
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").expect("a request");
        assert!(one_answer(&mut stream).starts_with("HTTP/1.1 200"), "{offers:?}");
        assert_eq!(stream.conn.alpn_protocol(), Some(&b"http/1.1"[..]), "{offers:?}");
    }
    let mut none = tls(server.address, &trusted);
    none.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").expect("a request");
    assert!(one_answer(&mut none).starts_with("HTTP/1.1 200"));
    let mut only_2 = tls_offering(server.address, &trusted, &["h2"]);
    assert!(only_2.flush().and_then(|()| only_2.read(&mut [0])).is_err(), "nothing is left to agree on");
}

/// How a client leaves.
#[derive(Clone, Copy, Debug)]
enum Leaving {
    /// It says so: the alert close_notify, and its socket stays open.
    Told,
    /// Its socket is closed.
    Closed,
    /// The same behind the bytes of a further request.
    ClosedBehind,
}

#[test]
fn a_client_that_leaves_in_the_middle_of_an_answer_over_tls_is_cancelled() {
    let (trusted, set) = certificate("doors-tls-leave");
    let script = Script { step_time: Duration::from_millis(5), ..Script::default() };
    let server = Scripted::start(script, &[&set[0], &set[1]]);
    let stats = || tls_stats(server.address, &trusted);
    let body = json!({"prompt": "abc", "max_tokens": 8000, "ignore_eos": true});
    let mut left = 0;
    for path in ["/v1/generate", "/v1/generate/stream"] {
        for leaving in [Leaving::Told, Leaving::Closed, Leaving::ClosedBehind] {
            let mut stream = tls_offering(server.address, &trusted, BOTH);
            stream.write_all(&posted(path, &body)).expect("a request");
            until("it is resident", || stats()["active_requests"] == 1);
            if path.ends_with("stream") {
                stream.read_exact(&mut [0]).expect("the begin of an answer");
            }
            if let Leaving::ClosedBehind = leaving {
                stream.write_all(&posted("/v1/generate", &json!({"prompt": "b".repeat(400_000)}))).expect("bytes");
            }
            let open = match leaving {
                Leaving::Told => {
                    stream.conn.send_close_notify();
                    stream.flush().expect("an alert");
                    Some(stream)
                }
                Leaving::Closed | Leaving::ClosedBehind => {
                    drop(stream);
                    None
                }
            };
            left += 1;
            let what = format!("{path}, {leaving:?}: the request is cancelled");
            until(&what, || stats()["cancelled_requests"] == left && stats()["kv_pages_used"] == 0);
            drop(open);
        }
    }
    assert_eq!(stats()["completed_requests"], 0);
}

#[test]
fn a_tls_connection_has_the_bounds_of_a_plain_one() {
    let (trusted, set) = certificate("doors-tls-bounds");
    let times = ["server.header_timeout_ms=1000", "server.body_timeout_ms=300", "server.keep_alive_ms=1000"];
    let server = Scripted::start(Script::default(), &[&set[0], &set[1], times[0], times[1], times[2]]);
    let connect = || tls_offering(server.address, &trusted, BOTH);
    let rest = |mut stream: StreamOwned<ClientConnection, TcpStream>| {
        let mut answer = Vec::new();
        let late = |kind| matches!(kind, std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
        let end = stream.read_to_end(&mut answer);
        assert!(!end.is_err_and(|error| late(error.kind())), "the server does not close");
        String::from_utf8(answer).expect("UTF-8")
    };

    let no_handshake = TcpStream::connect(server.address).expect("a connection");
    assert_eq!(until_closed(no_handshake).as_deref(), Some(""));

    let mut slow_head = connect();
    slow_head.write_all(b"GET /health HTTP/1.1\r\nhost:").expect("half a head");
    let answer = rest(slow_head);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");

    let mut slow_body = connect();
    let mut half = posted("/v1/generate", &json!({"prompt": "abc", "max_tokens": 4}));
    half.truncate(half.len() - 4);
    slow_body.write_all(&half).expect("half a body");
    let answer = rest(slow_body);
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("request_timeout"), "{answer}");

    let mut idle = connect();
    for _ in 0..2 {
        idle.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").expect("a request on a connection that was kept");
        assert!(one_answer(&mut idle).starts_with("HTTP/1.1 200"));
    }
    assert_eq!(rest(idle), "");
    assert_eq!(tls_stats(server.address, &trusted)["accepted_requests"], 0);
}

#[test]
fn files_that_make_no_tls_are_named() {
    let folder = folder("doors-bad-tls");
    let (_, good) = certificate("doors-good-tls");
    let (_, other) = certificate("doors-other-tls");
    std::fs::write(folder.join("text"), "no certificate").expect("a file");
    let text = |key: &str| format!("server.{key}={}", folder.join("text").display());
    let said = complaint(&[&text("tls_certificate"), &good[1]]);
    assert!(said.contains("cannot read server.tls_certificate = ") && said.contains("no PEM section"), "{said}");
    let said = complaint(&[&good[0], &text("tls_key")]);
    assert!(said.contains("cannot read server.tls_key = "), "{said}");
    let said = complaint(&["server.tls_certificate=/no/such.pem", &good[1]]);
    assert!(said.contains("/no/such.pem") && said.contains("No such file"), "{said}");
    let said = complaint(&[&good[0], &other[1]]);
    assert!(said.contains("cannot be used together"), "{said}");
    assert!(complaint(&[&good[0]]).contains("server.tls_certificate needs server.tls_key"));
    assert!(complaint(&[&good[1]]).contains("server.tls_key needs server.tls_certificate"));
}

/// What arrives until the server closes; `None` when it has not after thirty seconds.
fn until_closed(mut stream: TcpStream) -> Option<String> {
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => Some(String::from_utf8_lossy(&answer).into_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Some(String::new()),
        Err(_) => None,
    }
}

#[test]
fn slow_heads_slow_bodies_and_idle_connections_are_closed() {
    let times = ["server.header_timeout_ms=1000", "server.body_timeout_ms=300", "server.keep_alive_ms=1000"];
    let server = Scripted::start(Script::default(), &times);
    let connect = || TcpStream::connect(server.address).expect("a connection");

    let mut slow_head = connect();
    slow_head.write_all(b"GET /health HTTP/1.1\r\nhost:").expect("half a head");
    let answer = until_closed(slow_head).expect("the server closes");
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");

    let mut slow_body = connect();
    let head = b"POST /v1/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"prompt\"";
    slow_body.write_all(head).expect("half a body");
    let answer = until_closed(slow_body).expect("the server closes");
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("request_timeout"), "{answer}");

    let mut idle = connect();
    idle.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").expect("a request");
    let answer = until_closed(idle).expect("the server closes");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(get(server.address, "/stats").json()["accepted_requests"], 0);
}
