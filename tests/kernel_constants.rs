//! What stands in Rust and again in kernels/ is equal: macros, block sizes, the numbers of the arithmetic, the size of a page, and the
//! structs that travel as arguments. The kernels are read as text; no GPU and no compiler is needed.

use std::collections::BTreeMap;
use std::path::Path;

use crucible::arith::MAX_BIAS;
use crucible::arith::exp::{C2, C3, C4, C5, C6, EXP_MAX, EXP_MIN, LN2_HI, LN2_LO, LOG2_E};
use crucible::arith::linear::GROUPS;
use crucible::arith::quant::ACT_AMAX_MIN;
use crucible::arith::select::fixed_weight;
use crucible::backend::STEPS_IN_FLIGHT;
use crucible::backend::cuda::args::{Epilogue, FEW_ROWS, FROM_DEVICE};
use crucible::backend::cuda::program::Kind;
use crucible::config::Config;

const FILES: [&str; 11] = [
    "attention.cuh",
    "attention_decode.cu",
    "attention_prefill.cu",
    "common.cuh",
    "linear.cuh",
    "linear_rows_f32.cu",
    "linear_rows_q8.cu",
    "linear_tile_f32.cu",
    "linear_tile_q8.cu",
    "rows.cu",
    "select.cu",
];

fn text(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn kernel(file: &str) -> String {
    text(&format!("kernels/{file}"))
}

fn launchers() -> String {
    ["args", "kernels", "linear", "attention"].map(|name| text(&format!("src/backend/cuda/{name}.rs"))).concat()
}

/// The text between `from` and the first `to` after it.
fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let (_, rest) = text.split_once(from).unwrap_or_else(|| panic!("no {from:?}"));
    rest.split_once(to).unwrap_or_else(|| panic!("no {to:?} after {from:?}")).0
}

/// The body of a method of the launchers.
fn launcher<'a>(text: &'a str, name: &str) -> &'a str {
    between(text, &format!("fn {name}("), "\n    }\n")
}

/// A literal of either language: decimal or hexadecimal, with `_` or a suffix.
fn number(literal: &str) -> Option<u64> {
    let plain = literal.trim().trim_end_matches(['u', 'U']).replace('_', "");
    match plain.strip_prefix("0x").or(plain.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => plain.parse().ok(),
    }
}

/// The words that begin with `0x`, in order.
fn hexadecimals(text: &str) -> Vec<u64> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|w| w.starts_with("0x")).filter_map(number).collect()
}

/// (name, value) of every object-like macro.
fn macros(file: &str) -> Vec<(String, String)> {
    let source = kernel(file);
    let defines = source.lines().filter_map(|line| line.trim().strip_prefix("#define "));
    let split = defines.filter_map(|rest| rest.split_once(' '));
    let plain = split.filter(|(name, _)| !name.contains('('));
    let value = |text: &str| text.split("//").next().unwrap_or_default().trim().to_owned();
    plain.map(|(name, rest)| (name.to_owned(), value(rest))).collect()
}

/// Macros that Rust repeats, with Rust's value.
fn repeated() -> Vec<(&'static str, &'static str, u64)> {
    vec![
        ("select.cu", "MAX_BIAS", MAX_BIAS as u64),
        ("rows.cu", "START_DEVICE", u64::from(FROM_DEVICE)),
        ("rows.cu", "INPUT_LAST", u64::from(FROM_DEVICE)),
        ("linear_rows_q8.cu", "ROWS", FEW_ROWS as u64),
        ("linear.cuh", "KIND_F32", Kind::F32 as u64),
        ("linear.cuh", "KIND_INT8", Kind::Int8 as u64),
        ("linear.cuh", "KIND_BLOCK", Kind::Block as u64),
        ("linear.cuh", "KIND_BLOCK_MIN", Kind::BlockMin as u64),
        ("linear.cuh", "EPILOGUE_STORE", Epilogue::Store as u64),
        ("linear.cuh", "EPILOGUE_ADD", Epilogue::Add as u64),
        ("linear.cuh", "EPILOGUE_SWIGLU", Epilogue::Swiglu as u64),
    ]
}

/// Macros that the launchers repeat as plain numbers; the tests below find them there.
const OF_LAUNCHERS: [(&str, &str); 9] = [
    ("attention_decode.cu", "HEADS"),
    ("attention_decode.cu", "DEPTH"),
    ("attention_decode.cu", "STAGE"),
    ("attention_decode.cu", "PAGES"),
    ("linear_rows_q8.cu", "HELD"),
    ("linear_tile_f32.cu", "BN"),
    ("linear_tile_q8.cu", "BM"),
    ("linear_tile_q8.cu", "BN"),
    ("select.cu", "THREADS"),
];

/// Macros that are a kernel's own business.
const OWN: [(&str, &str); 12] = [
    ("attention.cuh", "D"),
    ("attention_decode.cu", "KEY"),
    ("attention_prefill.cu", "BLOCKS_AT_LEAST"),
    ("common.cuh", "FULL_MASK"),
    ("common.cuh", "INT_BIAS"),
    ("linear_rows_f32.cu", "SIZE"),
    ("linear_rows_q8.cu", "MINIMUM"),
    ("linear_tile_f32.cu", "BK"),
    ("linear_tile_q8.cu", "STAGES"),
    ("linear_tile_q8.cu", "ROW_BYTES"),
    ("rows.cu", "NORM_HELD"),
    ("select.cu", "BINS"),
];

/// The values of one macro, in the order of its definitions.
fn values(file: &str, name: &str) -> Vec<String> {
    macros(file).into_iter().filter(|(n, _)| n == name).map(|(_, value)| value).collect()
}

fn value(file: &str, name: &str) -> u64 {
    let values = values(file, name);
    assert_eq!(values.len(), 1, "{file}: {name}");
    number(&values[0]).unwrap_or_else(|| panic!("{file}: {name} is no number: {}", values[0]))
}

#[test]
fn macros_that_rust_repeats_have_its_values() {
    for (file, name, expected) in repeated() {
        assert_eq!(value(file, name), expected, "{file}: {name}");
    }
}

#[test]
fn every_macro_is_known_as_repeated_or_as_the_kernels_own() {
    let repeated = repeated().into_iter().map(|(file, name, _)| (file, name));
    let known: Vec<(&str, &str)> = repeated.chain(OF_LAUNCHERS).chain(OWN).collect();
    for file in FILES {
        for (name, value) in macros(file) {
            let here = known.contains(&(file, name.as_str()));
            assert!(
                here,
                "{file}: {name} {value} is in none of the lists: if Rust repeats it, this file must compare it"
            );
        }
    }
    for (file, name) in known {
        assert!(!values(file, name).is_empty(), "{file} has no {name}");
    }
    let mut there: Vec<String> = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels"))
        .expect("kernels/")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter(|name| !name.ends_with(".md"))
        .collect();
    there.sort();
    assert_eq!(there, FILES);
}

/// `(kernel, threads)` of every kernel that bounds its block; macros are resolved.
fn launch_bounds() -> BTreeMap<String, u64> {
    let mut bounds = BTreeMap::new();
    for file in FILES {
        let source = kernel(file);
        for declared in source.split("__launch_bounds__(").skip(1) {
            let (inside, rest) = declared.split_once(')').expect("a bound");
            let first = inside.split(',').next().unwrap_or_default();
            let threads = number(first).unwrap_or_else(|| value(file, first));
            bounds.insert(rest.split('(').next().unwrap_or_default().trim().to_owned(), threads);
        }
    }
    bounds
}

#[test]
fn blocks_are_launched_with_as_many_threads_as_their_kernels_are_written_for() {
    let text = launchers();
    let bounds = launch_bounds();
    let mut seen = 0;
    for (kernel, &threads) in &bounds {
        let (name, written) = match kernel.as_str() {
            "NAME" | "NAME##_norm" => ("shape_of", format!("threads: {threads},")),
            k if k.starts_with("linear_rows") => ("shape_of", format!("threads: {threads},")),
            "linear_tile_q8" => ("linear_tile", format!("if kind.is_block() {{ {threads} }}")),
            k if k.starts_with("linear_tile_f32") => ("linear_tile", format!("else {{ {threads} }};")),
            k if k.starts_with("attend_prefill") => ("attend_prefill", format!("threads: {threads},")),
            "select_token" => ("select", format!("threads: {threads},")),
            k @ ("norm_f32" | "norm_q8") => (k, format!(", {threads}, Overlap::Early")),
            k => (k, format!("threads: {threads},")),
        };
        assert!(launcher(&text, name).contains(&written), "{kernel} is written for {threads} threads: no {written:?}");
        seen += 1;
    }
    assert!(seen >= 13, "{bounds:?}");
}

#[test]
fn tiles_and_stages_are_those_that_the_launchers_reckon_with() {
    let text = launchers();
    let holds = |method: &str, written: String| {
        assert!(launcher(&text, method).contains(&written), "{method} has no {written:?}");
    };
    let heads = values("attention_decode.cu", "HEADS");
    holds("decode_heads", format!("if self.head_dim <= 64 {{ {} }} else {{ {} }}", heads[0], heads[1]));
    let depths = values("attention_decode.cu", "DEPTH");
    let pair = |n: u64| format!("(HEAD_DIM <= 64 ? {} : {n})", 2 * n);
    assert_eq!(depths, [pair(1), pair(2)]);
    holds("decode_depth", "if self.head_dim <= 64 { 2 } else { 1 }".into());
    holds("decode_depth", "{ few } else { 2 * few }".into());
    let (stage, pages) = (value("attention_decode.cu", "STAGE"), value("attention_decode.cu", "PAGES"));
    holds("attend_decode", format!("self.decode_depth() * {stage} * (2 * d + 4)"));
    holds("check_attend", format!("capacity % {stage} == 0"));
    holds("check_attend", format!("segment <= {}", page() * pages));
    assert_eq!(
        values("attention_decode.cu", "KEY"),
        ["(D + 4)"],
        "what the shared memory of attend_decode reckons with"
    );
    let normalised: u64 = between(&text, "const MOST_NORMALISED: usize = ", ";").parse().expect("a number");
    assert!(normalised <= value("linear_rows_q8.cu", "ROWS"), "a block normalises rows of its own alone");
    let held = value("linear_rows_q8.cu", "HELD");
    assert!(
        text.contains(&format!("const WIDEST_NORMALISED: usize = {};", 256 * held)),
        "values that a block normalises"
    );
    let columns = value("linear_tile_q8.cu", "BN");
    assert_eq!((columns, value("linear_tile_f32.cu", "BN")), (64, 64));
    holds("linear_tile", format!("n.div_ceil({columns})"));
    holds("linear_tile", format!("if wide {{ 128 }} else {{ {} }}", value("linear_tile_q8.cu", "BM")));
    // linear_tile_f32_4 and _8 are 16 times 4 and 8 rows high.
    assert!(kernel("linear_tile_f32.cu").contains("BM = 16 * TM"));
    assert!(text.contains("(kind, 64), module.kernel(\"linear_tile_f32_4\")"));
    assert!(text.contains("(kind, 128), module.kernel(\"linear_tile_f32_8\")"));
    assert!(kernel("linear.cuh").contains(&format!("float2 s[{GROUPS}];")), "groups of the canonical order");
}

/// Positions of a page, as the configuration has it.
fn page() -> u64 {
    Config::load(None, &[]).expect("the default configuration").kv.page_tokens as u64
}

#[test]
fn a_page_holds_as_many_positions_in_the_kernels_as_in_the_configuration() {
    let (page, shift) = (page(), page().ilog2());
    assert!(page.is_power_of_two());
    let within = |at: &str| [format!("{at} >> {shift}]"), format!("* {page} + ({at} & {})", page - 1)];
    let (common, decode) = (kernel("common.cuh"), kernel("attention_decode.cu"));
    let offset = between(&common, "kv_offset(", "\n}");
    let history = between(&decode, "history_offset(", "\n}");
    for written in within("pos") {
        assert!(offset.contains(&written), "kv_offset has no {written:?}");
    }
    for written in within("index") {
        assert!(history.contains(&written), "history_offset has no {written:?}");
    }
    let own = between(&decode, "void __launch_bounds__(256, 1) attend_decode(", "own_value(");
    assert!(own.contains(&format!("e.pos >> {shift}")) && own.contains(&format!("* {page} + (e.pos & {})", page - 1)));
    assert!(between(&decode, "void load_pages(", "\n}").contains(&format!("first / {page} + threadIdx.x")));
    let executor = text("src/backend/cuda/executor.rs");
    assert!(executor.contains(&format!("page_tokens: {page},")), "the CUDA executor's own facts");
    let pass = text("src/backend/cuda/pass.rs");
    assert!(pass.contains(&format!("2 * g.layers * {page} * g.kv_dim()")), "bytes of a page");
}

#[test]
fn the_numbers_of_the_arithmetic_are_the_definitions() {
    let common = kernel("common.cuh");
    let exp = between(&common, "float exp_c(float x) {", "\n}");
    let order = [LOG2_E, LN2_HI, LN2_LO, C6, C5, C4, C3, C2, LN2_LO];
    assert_eq!(hexadecimals(exp), order.map(|c| u64::from(c.to_bits())));
    assert!(exp.contains(&format!("fminf(fmaxf(x, {EXP_MIN:.1}f), {EXP_MAX:.1}f)")));
    let quantise = between(&common, "int quantise_lane(", "\n}");
    let least: u32 = between(quantise, "amax < __uint_as_float(", "u << 23").parse().expect("a number");
    assert_eq!(least << 23, ACT_AMAX_MIN.to_bits());
    let select = kernel("select.cu");
    assert!(select.contains(&format!("{}.0f", fixed_weight(1.0))), "trunc(e * 2^40)");
    let (ours, theirs) = (text("src/arith/philox.rs"), between(&select, "u64 token_draw(", "\n}"));
    let constants = hexadecimals(between(&ours, "const MULTIPLIERS", "\n\n"));
    let mut used = hexadecimals(theirs);
    used.dedup();
    assert_eq!((constants.len(), &used), (4, &vec![constants[0], constants[1], constants[2], constants[3]]));
}

/// (name, bytes) of every field of a struct of C, methods left out.
fn fields_of_c(source: &str, name: &str) -> Vec<(String, usize)> {
    let body = between(source, &format!("struct {name} {{\n"), "\n};");
    let code: String = body.lines().map(|l| l.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join(" ");
    let mut fields = Vec::new();
    for declaration in code.split(';').map(str::trim).filter(|d| !d.is_empty()) {
        let declaration = declaration.strip_prefix("const ").unwrap_or(declaration);
        let (kind, names) = declaration.split_once(' ').expect("a type and names");
        for (index, declarator) in names.split(',').map(str::trim).enumerate() {
            // `float* x` makes the first name a pointer, `float *x, *y` each of them.
            let pointer = declarator.starts_with('*') || (index == 0 && kind.ends_with('*'));
            let one = if pointer || kind == "u64" { 8 } else { 4 };
            let (plain, count) = match declarator.trim_start_matches('*').split_once('[') {
                Some((plain, count)) => (plain, number(count.trim_end_matches(']')).expect("a count") as usize),
                None => (declarator.trim_start_matches('*'), 1),
            };
            fields.push((plain.to_owned(), one * count));
        }
    }
    fields
}

/// (name, bytes) of every field of a struct of Rust.
fn fields_of_rust(source: &str, name: &str) -> Vec<(String, usize)> {
    let body = between(source, &format!("pub struct {name} {{\n"), "\n}");
    let lines = body.lines().filter_map(|l| l.trim().strip_prefix("pub "));
    let field = |line: &str| {
        let (name, kind) = line.trim_end_matches(',').split_once(": ").expect("a field");
        let bytes = match kind {
            "u64" => 8,
            "u32" | "i32" | "f32" => 4,
            "[u32; 3]" => 12,
            other => panic!("{name}: {other} is no type of an argument"),
        };
        (name.to_owned(), bytes)
    };
    lines.map(field).collect()
}

#[test]
fn argument_structs_have_the_same_fields_in_the_same_places() {
    let (launchers, adjust) = (launchers(), text("src/backend/cuda/adjust.rs"));
    for (rust, name, file) in [
        (&launchers, "LinearArgs", "linear.cuh"),
        (&launchers, "AttendArgs", "attention.cuh"),
        (&launchers, "NormArgs", "linear_rows_q8.cu"),
        (&launchers, "EmbedArgs", "rows.cu"),
        (&launchers, "RopeArgs", "rows.cu"),
        (&launchers, "StepRow", "rows.cu"),
        (&launchers, "SelectRow", "select.cu"),
        (&launchers, "SelectOut", "select.cu"),
        (&adjust, "Adjustment", "select.cu"),
        (&adjust, "AdjustArgs", "select.cu"),
    ] {
        let ours = fields_of_rust(rust, name);
        assert!(ours.len() >= 2, "{name}");
        assert_eq!(fields_of_c(&kernel(file), name), ours, "{name} of {file}");
    }
    // One of the host's buffers for each step in flight.
    let select = kernel("select.cu");
    let lanes = between(&select, "struct Lanes {", "};");
    assert!(lanes.contains(&format!("lanes[{STEPS_IN_FLIGHT}]")) && STEPS_IN_FLIGHT.is_power_of_two());
    assert!(select.contains(&format!("out.lanes[r.lane & {}]", STEPS_IN_FLIGHT - 1)));
    assert!(launchers.contains("pub lanes: [u64; STEPS_IN_FLIGHT]"));
    let order = |text: &str| text.find("linear").zip(text.find("norm")).map(|(linear, norm)| linear < norm);
    let rows = kernel("linear_rows_q8.cu");
    assert_eq!(order(between(&rows, "struct NormedArgs {", "};")), Some(true));
    assert_eq!(order(between(&launchers, "pub struct NormedArgs {", "}")), Some(true));
    // The host keeps a bias as two words.
    assert_eq!(fields_of_c(&kernel("select.cu"), "Bias"), [("id".to_owned(), 4), ("value".to_owned(), 4)]);
}
