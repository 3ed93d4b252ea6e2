//! Tests of the reader on a small complete model made in memory: whole, cut at every byte, changed at every byte.

use std::panic::catch_unwind;

use proptest::prelude::*;

use super::write::GgufFile;
use super::*;
use crate::model::load::{self, ModelError};
use crate::model::{Geometry, Matrix, Profile, RopePairing, synthetic};

/// A model of one layer with a vocabulary of three tokens and a few merges: every section of a file, in a few kilobytes.
fn small_model() -> GgufFile {
    let geometry = Geometry {
        layers: 1,
        hidden: 32,
        heads: 1,
        kv_heads: 1,
        head_dim: 32,
        ffn: 32,
        vocab: 4,
        context: 64,
        rope_base: 10_000.0,
        rms_eps: 1e-5,
        rope_pairing: RopePairing::Adjacent,
    };
    let weights = synthetic::weights(&geometry, Profile::Q8, MatrixFormat::Q4_1, 3);
    let strings = |list: &[&str]| Value::Array(Array::String(list.iter().map(|s| (*s).to_owned()).collect()));
    let text = |text: &str| Value::String(text.to_owned());
    let mut file = GgufFile::default();
    file.set("general.architecture", text("llama"))
        .set("general.name", text("small"))
        .set("general.alignment", Value::U32(32))
        .set("llama.block_count", Value::U32(1))
        .set("llama.context_length", Value::U64(64))
        .set("llama.embedding_length", Value::U32(32))
        .set("llama.feed_forward_length", Value::I32(32))
        .set("llama.attention.head_count", Value::U16(1))
        .set("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5))
        .set("tokenizer.ggml.model", text("gpt2"))
        .set("tokenizer.ggml.pre", text("smollm"))
        .set("tokenizer.ggml.tokens", strings(&["<end>", "a", "b", "ab"]))
        .set("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![3, 1, 1, 1])))
        .set("tokenizer.ggml.merges", strings(&["a b"]))
        .set("tokenizer.ggml.eos_token_id", Value::U32(0))
        .set("nested", Value::Array(Array::Array(vec![Array::U8(vec![1, 2]), Array::F64(vec![0.5])])));
    let layer = &weights.layers[0];
    let mut matrix = |name: &str, m: &Matrix| {
        file.tensor(name, &[m.cols as u64, m.rows as u64], m.format, m.bytes.to_vec());
    };
    matrix("token_embd.weight", &weights.embedding);
    for (name, m) in [
        ("attn_q", &layer.wq),
        ("attn_k", &layer.wk),
        ("attn_v", &layer.wv),
        ("attn_output", &layer.wo),
        ("ffn_gate", &layer.w_gate),
        ("ffn_up", &layer.w_up),
        ("ffn_down", &layer.w_down),
    ] {
        matrix(&format!("blk.0.{name}.weight"), m);
    }
    for name in ["blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"] {
        let bytes = layer.attn_norm.iter().flat_map(|x| x.to_le_bytes()).collect();
        file.tensor(&format!("{name}.weight"), &[32], MatrixFormat::F32, bytes);
    }
    file
}

/// Where the tensors' bytes begin.
fn header_bytes(file: &GgufFile) -> usize {
    let gguf = Gguf::parse(&file.to_bytes()).unwrap();
    gguf.tensors[0].range.start
}

fn error_of(file: &GgufFile) -> String {
    let error = load::from_bytes(&file.to_bytes()).expect_err("the file must be refused").to_string();
    assert!(!error.contains('\n') && !error.ends_with('.'), "{error}");
    error
}

fn changed(change: impl FnOnce(&mut GgufFile)) -> String {
    let mut file = small_model();
    change(&mut file);
    error_of(&file)
}

fn without(name: &'static str) -> String {
    changed(|file| {
        file.metadata.retain(|(key, _)| key != name);
        file.tensors.retain(|tensor| tensor.name != name);
    })
}

fn replacing(key: &'static str, value: Value) -> String {
    changed(|file| file.metadata.iter_mut().filter(|(name, _)| name == key).for_each(|(_, old)| *old = value.clone()))
}

#[test]
fn a_small_model_loads_with_its_geometry_weights_and_text() {
    let model = load::from_bytes(&small_model().to_bytes()).unwrap();
    assert_eq!(model.name, "small");
    let g = &model.weights.geometry;
    assert_eq!((g.layers, g.hidden, g.kv_heads, g.head_dim, g.vocab), (1, 32, 1, 32, 4));
    assert_eq!(g.rope_pairing, RopePairing::Adjacent);
    assert!(model.weights.head.is_none(), "tied");
    assert_eq!(model.tokenizer.encode("ab", crate::model::SpecialTokens::AsText).unwrap(), [3]);
    let written = small_model().tensors[0].bytes.clone();
    assert_eq!(*model.weights.embedding.bytes, *written);
}

#[test]
fn a_mapped_file_gives_the_same_weights_as_memory() {
    let path = std::env::temp_dir().join(format!("crucible-map-{}.gguf", std::process::id()));
    let bytes = small_model().to_bytes();
    std::fs::write(&path, &bytes).unwrap();
    let source = load::ModelSource::Gguf(path.clone());
    let mapped = load::load(&source, Profile::Q8).unwrap();
    let memory = load::from_bytes(&bytes).unwrap();
    assert_eq!(*mapped.weights.layers[0].w_down.bytes, *memory.weights.layers[0].w_down.bytes);
    assert_eq!(mapped.weights.layers[0].attn_norm, memory.weights.layers[0].attn_norm);
    std::fs::remove_file(&path).unwrap();
    let error = load::load(&source, Profile::Q8).expect_err("the file is gone").to_string();
    assert!(error.contains("cannot open the model"), "{error}");
}

#[test]
fn a_file_cut_at_any_byte_is_an_error() {
    let bytes = small_model().to_bytes();
    for end in 0..bytes.len() {
        let result = catch_unwind(|| load::from_bytes(&bytes[..end]));
        let result = result.unwrap_or_else(|_| panic!("panic when cut at byte {end}"));
        assert!(matches!(result, Err(ModelError::Gguf(_))), "cut at byte {end} of {}", bytes.len());
    }
}

#[test]
fn a_file_changed_at_any_byte_of_its_header_never_panics() {
    let file = small_model();
    let (bytes, header) = (file.to_bytes(), header_bytes(&file));
    let mut refused = 0;
    for at in 0..header {
        for value in [0, 1, 0x7f, 0x80, 0xff, bytes[at] ^ 1, bytes[at].wrapping_add(1)] {
            let mut changed = bytes.clone();
            changed[at] = value;
            let result = catch_unwind(|| load::from_bytes(&changed));
            refused += usize::from(result.unwrap_or_else(|_| panic!("panic: byte {at} = {value}")).is_err());
        }
    }
    assert!(refused > header, "most changes are faults: {refused} of {}", 7 * header);
}

#[test]
fn every_missing_part_is_named() {
    for key in ["llama.block_count", "llama.attention.head_count", "tokenizer.ggml.merges", "tokenizer.ggml.tokens"] {
        assert!(without(key).contains(key), "{key}");
    }
    for tensor in ["blk.0.attn_norm.weight", "blk.0.ffn_down.weight", "output_norm.weight", "token_embd.weight"] {
        let error = without(tensor);
        assert!(error.contains(tensor) || tensor.starts_with("token_embd"), "{tensor}: {error}");
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let text = |text: &str| Value::String(text.to_owned());
    assert!(replacing("general.architecture", text("qwen2moe")).contains("architecture qwen2moe"));
    let added = |key: &'static str, value: Value| changed(|file| _ = file.set(key, value));
    assert!(added("llama.expert_count", Value::U32(8)).contains("llama.expert_count = 8"));
    assert!(added("llama.rope.scaling.type", text("yarn")).contains("rope scaling yarn"));
    assert!(added("llama.rope.dimension_count", Value::U32(16)).contains("rope.dimension_count = 16"));
    let bias = changed(|file| _ = file.tensor("blk.0.attn_q.bias", &[32], MatrixFormat::F32, vec![0; 128]));
    assert!(bias.contains("tensor blk.0.attn_q.bias"), "{bias}");
    for (kind, name) in [(12, "Q4_K"), (14, "Q6_K"), (20, "IQ4_NL"), (4, "number 4"), (1000, "number 1000")] {
        let error = changed(|file| file.tensors[1].kind = kind);
        assert!(error.contains(name) && error.contains("blk.0.attn_q.weight"), "{error}");
    }
}

#[test]
fn lies_about_sizes_are_refused_before_anything_is_allocated() {
    assert!(changed(|file| file.tensors[0].shape = vec![32, u64::MAX / 4]).contains("impossible shape"));
    assert!(changed(|file| file.tensors[0].shape = vec![0, 4]).contains("empty dimension"));
    assert!(changed(|file| file.tensors[0].shape = vec![31, 4]).contains("not a multiple"));
    assert!(changed(|file| file.tensors[0].shape = vec![32, 1 << 40]).contains("past the end"));
    assert!(changed(|file| file.tensors[0].shape = vec![32; 5]).contains("5 dimensions"));
    assert!(changed(|file| file.tensors[2].shape = vec![32, 16]).contains("the metadata ask for [32, 32]"));
    assert!(replacing("general.alignment", Value::U32(0)).contains("general.alignment"));
    assert!(replacing("general.alignment", Value::U32(48)).contains("power of two"));
    assert!(replacing("llama.block_count", Value::U32(u32::MAX)).contains("layers is 4294967295"));
    assert!(replacing("llama.embedding_length", Value::I64(-32)).contains("not an integer of at least 0"));
    assert!(replacing("llama.attention.layer_norm_rms_epsilon", Value::F32(f32::NAN)).contains("rms_eps"));
    let mut bytes = small_model().to_bytes();
    bytes[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(Gguf::parse(&bytes), Err(GgufError::TooMany { what: "tensors", .. })));
    bytes[8..16].copy_from_slice(&60_000u64.to_le_bytes());
    assert!(matches!(Gguf::parse(&bytes), Err(GgufError::Truncated { what: "tensors", .. })));
}

#[test]
fn arrays_have_bounds_in_depth_and_length() {
    let nested = (0..MAX_NESTING).fold(Array::U8(vec![7]), |inner, _| Array::Array(vec![inner]));
    assert!(replacing("nested", Value::Array(nested)).contains("nested deeper than 4"));
    // A length that the file cannot hold, in the last eight bytes of a truncated array.
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes.extend(1u64.to_le_bytes());
    bytes.extend(1u64.to_le_bytes());
    bytes.extend(b"k");
    bytes.extend(9u32.to_le_bytes());
    bytes.extend(10u32.to_le_bytes());
    bytes.extend((1u64 << 23).to_le_bytes());
    assert!(matches!(Gguf::parse(&bytes), Err(GgufError::Truncated { what: "array elements", .. })));
}

#[test]
fn names_are_unique() {
    let key = changed(|file| _ = file.set("general.name", Value::Bool(true)));
    assert!(key.contains("general.name appears twice"), "{key}");
    let tensor = changed(|file| {
        let again = file.tensors[0].clone();
        file.tensors.push(again);
    });
    assert!(tensor.contains("token_embd.weight appears twice"), "{tensor}");
}

#[test]
fn other_files_and_versions_are_told_apart() {
    assert!(matches!(Gguf::parse(b"GGML...."), Err(GgufError::Magic)));
    assert!(matches!(Gguf::parse(b""), Err(GgufError::Magic)));
    let mut bytes = small_model().to_bytes();
    bytes[4..8].copy_from_slice(&2u32.to_le_bytes());
    assert_eq!(Gguf::parse(&bytes).unwrap().version, 2);
    for version in [0, 1, 4, 3u32.swap_bytes()] {
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        assert!(matches!(Gguf::parse(&bytes), Err(GgufError::Version(v)) if v == version));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Several bytes at once, and a cut, anywhere in the file.
    #[test]
    fn any_damage_gives_a_model_or_an_error(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = small_model().to_bytes();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let _ = load::from_bytes(&bytes);
    }

    #[test]
    fn any_bytes_after_the_magic_give_an_error_or_a_file(tail in prop::collection::vec(any::<u8>(), 0..256)) {
        let bytes = [b"GGUF\x03\0\0\0".as_slice(), &tail].concat();
        let _ = Gguf::parse(&bytes);
    }

    #[test]
    fn metadata_of_every_type_come_back_as_written(
        (a, b, c, d) in (any::<i8>(), any::<i16>(), any::<i64>(), any::<f64>().prop_filter("equal to itself", |x| !x.is_nan())),
        strings in prop::collection::vec(".{0,8}", 0..5),
        numbers in prop::collection::vec(any::<u16>(), 0..9),
    ) {
        let mut file = GgufFile::default();
        file.set("a", Value::I8(a)).set("b", Value::I16(b)).set("c", Value::I64(c)).set("d", Value::F64(d));
        file.set("s", Value::Array(Array::String(strings)));
        file.set("n", Value::Array(Array::Array(vec![Array::U16(numbers.clone()), Array::Array(vec![Array::U16(numbers)])])));
        let read = Gguf::parse(&file.to_bytes()).unwrap();
        let entries: Vec<_> = read.metadata.iter().map(|(k, v)| (k.to_owned(), v.clone())).collect();
        prop_assert_eq!(entries, file.metadata);
    }
}

#[test]
fn a_byte_that_two_tensors_claim_is_refused() {
    let file = small_model();
    let mut bytes = file.to_bytes();
    let name = &file.tensors[1].name;
    let entry =
        bytes.windows(name.len()).position(|window| window == name.as_bytes()).expect("a second tensor") + name.len();
    let offset = entry + 4 + 8 * file.tensors[1].shape.len() + 4;
    bytes[offset..offset + 8].fill(0);
    let error = Gguf::parse(&bytes).expect_err("two tensors at offset 0").to_string();
    assert!(error.contains(name.as_str()) && error.contains("shares bytes with tensor"), "{error}");
    assert!(Gguf::parse(&file.to_bytes()).is_ok());
}
