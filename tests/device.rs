//! The device as the commands see it: what is missing is said in one line and nothing panics; a device that fails under live requests
//! ends every one of them in the typed way.

mod http_support;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use http_support::binary::Binary;

fn crucible(args: &[&str], libraries: Option<&Path>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_crucible"));
    if let Some(folder) = libraries {
        command.env("LD_LIBRARY_PATH", folder);
    }
    command.args(args).output().expect("the binary")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Past the capture of the test harness: a skip must be seen.
fn skip(reason: &str) {
    let _ = writeln!(std::io::stderr(), "skipped 1 check: {reason}");
}

fn gpu_is_here() -> bool {
    Path::new("/dev/nvidiactl").exists()
}

/// A folder with a `libcuda.so.1` made of this C source; none without a C compiler.
fn driver_of(name: &str, source: &str) -> Option<PathBuf> {
    let folder = std::env::temp_dir().join(format!("crucible-driver-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("driver.c"), source).expect("a source");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .args([folder.join("libcuda.so.1"), folder.join("driver.c")])
        .status();
    built.is_ok_and(|status| status.success()).then_some(folder)
}

/// One line on standard output, nothing on standard error, exit code 0.
fn one_line(run: &Output) -> String {
    let (out, err) = (text(&run.stdout), text(&run.stderr));
    assert_eq!((run.status.code(), err.as_str()), (Some(0), ""), "{out}");
    assert_eq!(out.lines().count(), 1, "{out}");
    out
}

#[test]
fn inspect_device_without_a_gpu_says_why_in_one_line_and_is_no_failure() {
    if gpu_is_here() {
        return skip("a GPU is here, the line about its absence cannot be seen");
    }
    let line = one_line(&crucible(&["inspect", "--device"], None));
    assert!(line.starts_with("no usable GPU: libcuda was not found"), "{line}");
}

#[test]
fn a_driver_that_lacks_functions_or_devices_is_named_and_never_panics() {
    let functions = [
        "cuInit",
        "cuGetErrorString",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDriverGetVersion",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuMemGetInfo_v2",
        "cuMemAlloc_v2",
        "cuMemHostAlloc",
        "cuModuleLoadData",
        "cuLaunchKernelEx",
        "cuStreamBeginCapture_v2",
        "cuGraphInstantiateWithFlags",
        "cuGraphUpload",
    ];
    let source: String = functions.iter().map(|f| format!("int {f}() {{ return 100; }}\n")).collect();
    let (Some(bare), Some(deviceless)) = (driver_of("bare", "int nothing;"), driver_of("none", &source)) else {
        return skip("no C compiler to make a driver with");
    };
    let line = one_line(&crucible(&["inspect", "--device"], Some(&bare)));
    assert!(line.contains("libcuda.so.1 cannot be used, it lacks cuInit"), "{line}");
    let line = one_line(&crucible(&["inspect", "--device"], Some(&deviceless)));
    assert!(line.contains("cuInit failed"), "{line}");
    for folder in [&bare, &deviceless] {
        let serve =
            ["serve", "--config", "config/cpu-test.toml", "--set", "executor.backend=cuda", "--set", "server.port=0"];
        let run = crucible(&serve, Some(folder));
        let err = text(&run.stderr);
        assert_eq!(run.status.code(), Some(1), "{err}");
        assert!(err.contains("cannot start the cuda backend") && !err.contains("panicked"), "{err}");
        std::fs::remove_dir_all(folder).expect("the folder is ours");
    }
}

#[test]
fn auto_serves_on_the_cpu_and_says_in_one_line_why() {
    if gpu_is_here() {
        return skip("a GPU is here, auto takes it");
    }
    let server = Binary::tiny(&["executor.backend=auto"]);
    let log = server.log.lock().unwrap().clone();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("no GPU: serving on the CPU")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("libcuda was not found"), "{log}");
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn cuda_that_is_insisted_on_and_absent_is_an_error_that_says_what_to_install() {
    if gpu_is_here() {
        return skip("a GPU is here, it cannot be absent");
    }
    let run = crucible(&["serve", "--config", "config/cpu-test.toml", "--set", "executor.backend=cuda"], None);
    let err = text(&run.stderr);
    assert_eq!(run.status.code(), Some(1), "{err}");
    assert!(err.contains("libcuda was not found") && err.contains("install the NVIDIA driver"), "{err}");
    assert!(!err.contains("panicked"), "{err}");
}

#[test]
fn a_pool_that_does_not_fit_is_refused_with_its_size_and_the_key_to_lower() {
    let huge = "kv.pages=16777216";
    let run =
        crucible(&["generate", "a", "--max-tokens", "1", "--config", "config/cpu-test.toml", "--set", huge], None);
    let err = text(&run.stderr);
    if run.status.success() {
        return skip("this system promises memory that it does not have");
    }
    assert!(err.contains("16777216 KV pages (131072 MiB)") && err.contains("lower kv.pages"), "{err}");
}

#[test]
fn a_compute_thread_that_panics_under_live_requests_passes_the_failure_suite() {
    let run = crucible(&["check", "failure", "--backend", "cpu", "--profile", "int8"], None);
    let out = text(&run.stdout);
    assert_eq!(run.status.code(), Some(0), "{out}");
    assert_eq!(out.matches("gone after").count(), 4, "{out}");
    assert!(out.contains("Failure int8 Small Cpu: seed 1, 64 cases, 0 values, 64 passed, 0 failed"), "{out}");
    assert!(out.ends_with("check: seed 1, 0 failures\n"), "{out}");
}
