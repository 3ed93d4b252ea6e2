//! The configuration as a user meets it: the shipped files, the errors, the overrides.

use super::*;

const COMMENTED: &str = include_str!("../../config/crucible.toml");

fn problems(text: &str, overrides: &[&str]) -> Vec<String> {
    let overrides: Vec<String> = overrides.iter().map(|&o| o.to_owned()).collect();
    match Config::parse("test.toml", text, &overrides) {
        Ok(_) => Vec::new(),
        Err(ConfigError::Invalid { problems, .. }) => problems.iter().map(Problem::to_string).collect(),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn the_commented_file_equals_the_defaults_and_holds_every_key() {
    assert_eq!(Config::parse("crucible.toml", COMMENTED, &[]).expect("valid"), Config::default());
    let (document, _) = Document::parse(COMMENTED);
    let mut written: Vec<&str> = document.keys().collect();
    let keys = Config::keys();
    let mut known: Vec<&str> = keys.iter().map(String::as_str).collect();
    written.sort_unstable();
    known.sort_unstable();
    assert_eq!(written, known);
}

#[test]
fn the_operations_page_lists_every_key_with_its_default() {
    let page = include_str!("../../docs/operations.md");
    let mut section = "";
    let mut seen = 0;
    for line in COMMENTED.lines() {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']');
        } else if let Some((key, value)) = line.split_once(" = ").filter(|_| !line.starts_with('#')) {
            let row = format!("| `{section}.{key}` | `{value}` | ");
            assert!(page.contains(&row), "docs/operations.md has no row that begins with {row}");
            seen += 1;
        }
    }
    assert_eq!(seen, Config::keys().len());
}

#[test]
fn every_key_of_the_commented_file_has_a_comment_above_it() {
    let mut commented = false;
    for (at, line) in COMMENTED.lines().enumerate() {
        let line = line.trim();
        let key = line.contains(" = ") && !line.starts_with('#');
        assert!(!key || commented, "line {} has a key without a comment: {line}", at + 1);
        commented = line.starts_with('#') || (key && commented);
    }
}

#[test]
fn every_shipped_file_is_valid() {
    for entry in std::fs::read_dir("config").expect("config folder") {
        let path = entry.expect("entry").path();
        if path.extension().is_some_and(|e| e == "toml") {
            Config::load(Some(&path), &[]).unwrap_or_else(|e| panic!("{e}"));
        }
    }
}

#[test]
fn everything_that_is_wrong_is_reported_at_once_with_its_line() {
    let text = "[prefill]\ntoken_bugdet = 5\npacking = 3\n\n[kv]\npages = 0\n[limits]\nmax_batch = \"many\"\n[server]\nhost = \"here\"\n";
    let found = problems(text, &["nonsense", "graphs.decode=fast"]);
    let expected = [
        "line 2: unknown key prefill.token_bugdet, did you mean prefill.token_budget?",
        "line 3: prefill.packing must be true or false, not an integer",
        "line 6: kv.pages is 0, it must lie in 1..=16777216",
        "line 8: limits.max_batch must be an integer, not a string",
        "line 10: server.host must be an IP address such as 127.0.0.1, not \"here\"",
        "--set: `nonsense` has no `=`; write key=value, as in prefill.token_budget=512",
        "--set: graphs.decode must be \"on\" or \"off\", not \"fast\"",
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_time_for_heads_below_the_clock_of_the_http_library_is_refused_with_the_reason() {
    for (given, refused) in [("0", true), ("100", true), ("999", true), ("1000", false)] {
        let found = problems(&format!("[server]\nheader_timeout_ms = {given}\n"), &[]).concat();
        assert_eq!(!found.is_empty(), refused, "{given}: {found}");
        let reason =
            format!("line 2: server.header_timeout_ms is {given}, it must be at least 1000: the HTTP library's clock");
        assert!(!refused || found.starts_with(&reason), "{found}");
    }
}

#[test]
fn a_syntax_error_does_not_hide_the_other_errors() {
    let found = problems("[kv]\npages = = 4\n[limits]\nmax_queue = -1\n", &[]);
    assert!(found.iter().any(|p| p.starts_with("line 2: ")), "{found:?}");
    assert!(found.iter().any(|p| p.starts_with("line 4: limits.max_queue is -1")), "{found:?}");
}

#[test]
fn a_key_where_a_section_should_be_and_a_section_where_a_key_should_be_are_told_apart() {
    let found = problems("prefill = 3\n[kv.pages]\nx = 1\n", &["model=3"]);
    let expected = [
        "line 1: prefill is a section, not a key: write [prefill] and its keys below it",
        "line 3: unknown key kv.pages.x, did you mean kv.pages?",
        "--set: model is a section, not a key: write [model] and its keys below it",
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_table_without_keys_is_as_wrong_as_one_with_keys_unless_it_is_a_section() {
    let file = "[limts]\n[kv.pages]\n[server.nope]\n[limits]\n[model.geometry]\n";
    let found = problems(file, &["nope={}", "prefill.packing={}", "limits.max_batch = {}", "kv={}", "cache.dirs={}"]);
    let expected = [
        "line 1: unknown key limts, did you mean limits?",
        "line 2: kv.pages must be an integer, not a table",
        "line 3: unknown key server.nope, did you mean server.host?",
        "--set: prefill.packing must be true or false, not a table",
        "--set: limits.max_batch must be an integer, not a table",
        "--set: unknown key cache.dirs, did you mean cache.dir?",
        "--set: unknown key nope",
    ];
    assert_eq!(found, expected);
}

#[test]
fn widths_that_no_block_divides_are_refused_with_their_lines_where_blocks_are_used() {
    let text = "[model]\npath = \"synthetic\"\n[model.geometry]\nhidden = 33\nffn = 40\n";
    let found = problems(text, &["executor.pin=1024"]);
    let expected = [
        "line 4: model.geometry.hidden is 33, it must be a multiple of 32 in profile q8",
        "line 5: model.geometry.ffn is 40, it must be a multiple of 32 in profile q8",
        "--set: executor.pin is 1024, it must lie in 0..=1023 or \"off\"",
    ];
    assert_eq!(found, expected);
    let config = Config::parse("t", text, &["model.profile=f32".to_owned()]).expect("no blocks");
    assert_eq!(config.model.geometry.hidden, 33);
}

#[test]
fn an_override_wins_over_the_file_and_quotes_are_optional() {
    let overrides =
        ["prefill.token_budget=512", "model.path=synthetic", "prefill.chunk_cap = 37", "server.api_key=\"a=bc\""];
    let config = Config::parse("t", "[prefill]\ntoken_budget = 64\n", &overrides.map(String::from)).expect("valid");
    assert_eq!(config.prefill.token_budget, 512);
    assert_eq!(config.model.source, ModelPath::Synthetic);
    assert_eq!(config.prefill.chunk_cap, Some(37));
    assert!(config.server.api_keys.admit("a=bc") && !config.server.api_keys.admit("a=b"));
}

#[test]
fn the_load_format_decides_how_the_path_is_read() {
    let source = |path: &str, format: &str| {
        let text = format!("[model]\npath = \"{path}\"\nload_format = \"{format}\"\n");
        Config::parse("t", &text, &[]).map(|config| config.model.source)
    };
    let file = |name: &str| Ok(ModelPath::File(name.into()));
    assert_eq!(source("", "auto"), Ok(ModelPath::Default));
    assert_eq!(source("synthetic", "auto"), Ok(ModelPath::Synthetic));
    assert_eq!(source("a.gguf", "auto"), file("a.gguf"));
    assert_eq!(source("", "gguf"), Ok(ModelPath::Default));
    assert_eq!(source("synthetic", "gguf"), file("synthetic"), "a file may have any name");
    assert_eq!(source("", "synthetic"), Ok(ModelPath::Synthetic));
    let error = source("a.gguf", "synthetic").expect_err("a file for a synthetic model").to_string();
    assert!(error.contains("line 3: model.load_format is \"synthetic\", which reads no file"), "{error}");
    let error = source("", "safetensors").expect_err("unknown").to_string();
    assert!(error.contains("must be \"auto\" or \"gguf\" or \"synthetic\", not \"safetensors\""), "{error}");
}

#[test]
fn values_that_contradict_each_other_are_refused() {
    let found = problems("[prefill]\ntoken_budget = 64\nchunk_cap = 128\n[model.geometry]\nheads = 5\n", &[]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("line 3: prefill.chunk_cap is 128"), "{found:?}");
    assert!(found[1].starts_with("line 5: model.geometry: heads (5)"), "{found:?}");
}

#[test]
fn an_override_that_contradicts_the_file_is_blamed_and_not_a_line_of_the_file() {
    let file =
        "[prefill]\ntoken_budget = 64\nchunk_cap = 32\n[model.geometry]\nheads = 4\nkv_heads = 2\nhead_dim = 32\n";
    let blamed = |over: &str| problems(file, &[over]).concat();
    assert!(blamed("model.geometry.kv_heads=3").starts_with("--set: model.geometry: heads (4)"));
    assert!(blamed("model.geometry.heads=3").starts_with("--set: model.geometry: heads (3)"));
    assert!(blamed("model.geometry.head_dim=33").starts_with("--set: model.geometry: head_dim (33)"));
    assert!(blamed("prefill.token_budget=16").starts_with("--set: prefill.chunk_cap is 32"));
    let cpu = problems("[kv]\nmemory_fraction = 0.5\n", &["executor.backend=cpu"]).concat();
    assert!(cpu.starts_with("--set: kv.memory_fraction needs a GPU"), "{cpu}");
}

#[test]
fn a_missing_file_says_so() {
    let error = Config::load(Some(Path::new("no/such.toml")), &[]).expect_err("missing");
    assert!(error.to_string().starts_with("cannot read the configuration no/such.toml"), "{error}");
}
