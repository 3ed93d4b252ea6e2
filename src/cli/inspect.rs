//! `crucible inspect`: what a model file holds, without computing anything: geometry, metadata, tensors, special tokens; with
//! `--device` what the machine's GPU is and where its libraries were found.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use super::{Outcome, pull};
use crate::backend::cuda;
use crate::model::gguf::{self, Gguf};
use crate::model::pull::Progress;
use crate::model::{Geometry, MatrixFormat, SpecialText, Tokenizer};

/// Arguments of `inspect`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A GGUF file; the default model when absent.
    model: Option<PathBuf>,
    /// Cache folder of the default model.
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Lists every tensor, not only the sums by format.
    #[arg(long)]
    tensors: bool,
    /// Shows the GPU and its libraries instead of a model; without a GPU it says why there is none.
    #[arg(long, conflicts_with_all = ["model", "cache", "tensors"])]
    device: bool,
    /// Device ordinal.
    #[arg(long, default_value_t = 0, requires = "device")]
    ordinal: usize,
    /// Folder that is searched first for the kernel compiler.
    #[arg(long, value_name = "DIR", requires = "device")]
    libraries: Option<PathBuf>,
}

/// Prints the report.
///
/// # Errors
/// A file that is not a supported model, or the pull's.
pub fn run(args: &Args) -> Outcome {
    if args.device {
        match cuda::inspect(args.ordinal, args.libraries.as_deref()) {
            Ok(report) => println!("{report}"),
            Err(reason) => println!("no usable GPU: {reason}"),
        }
        return Ok(ExitCode::SUCCESS);
    }
    let path = model_path(args.model.as_ref(), args.cache.as_ref())?;
    let (map, gguf) = gguf::open(&path)?;
    let geometry = gguf::llama::geometry(&gguf)?;
    let tokenizer = Tokenizer::from_gguf(&gguf.metadata)?;
    println!("{} ({} bytes, GGUF {})", path.display(), map.len(), gguf.version);
    print_geometry(&geometry);
    print_tokens(&tokenizer);
    println!("\nmetadata");
    for (key, value) in gguf.metadata.iter() {
        println!("  {key} = {value}");
    }
    print_tensors(&gguf, args.tensors);
    Ok(ExitCode::SUCCESS)
}

/// The file that a command works on: the one named, else the default model, pulled when the cache does not hold it.
///
/// # Errors
/// The pull's.
pub(super) fn model_path(
    named: Option<&PathBuf>,
    cache: Option<&PathBuf>,
) -> Result<PathBuf, Box<dyn std::error::Error>> {
    match named {
        Some(path) => Ok(path.clone()),
        None => Ok(crate::model::pull::default_model(&pull::cache_dir(cache)?, Progress::Shown)?),
    }
}

fn print_geometry(g: &Geometry) {
    println!("\ngeometry");
    let rows: [(&str, String); 9] = [
        ("layers", g.layers.to_string()),
        ("hidden", g.hidden.to_string()),
        ("heads", format!("{} query, {} key/value, of {}", g.heads, g.kv_heads, g.head_dim)),
        ("ffn", g.ffn.to_string()),
        ("vocabulary", g.vocab.to_string()),
        ("context", g.context.to_string()),
        ("rope", format!("base {}, {:?} pairs", g.rope_base, g.rope_pairing)),
        ("rms eps", format!("{:e}", g.rms_eps)),
        ("kv cache", format!("{} bytes a token in f32", 2 * g.layers * g.kv_dim() * 4)),
    ];
    for (name, value) in rows {
        println!("  {name:<11}{value}");
    }
}

fn print_tokens(tokenizer: &Tokenizer) {
    let name = |id: &u32| format!("{id} {}", tokenizer.decode(&[*id], SpecialText::Show));
    let special: Vec<u32> = (0..tokenizer.vocab_size() as u32).filter(|&id| tokenizer.is_special(id)).collect();
    let list = |ids: &[u32]| ids.iter().map(name).collect::<Vec<_>>().join(", ");
    println!("\ntokens");
    println!("  {:<11}{}", "text", tokenizer.vocab_size() - special.len());
    println!("  {:<11}{}", "special", list(&special));
    println!("  {:<11}{}", "ends", list(&tokenizer.eos_ids()));
    println!("  {:<11}{}", "begins", tokenizer.bos().map_or_else(|| "nothing".to_owned(), |id| name(&id)));
}

fn print_tensors(gguf: &Gguf, each: bool) {
    println!("\ntensors");
    let mut sums: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for tensor in &gguf.tensors {
        let sum = sums.entry(format_name(tensor.format)).or_default();
        sum.0 += 1;
        sum.1 += tensor.range.len();
        if each {
            let shape: Vec<String> = tensor.shape.iter().rev().map(usize::to_string).collect();
            println!("  {:<28}{:<8}[{}]", tensor.name, format_name(tensor.format), shape.join(", "));
        }
    }
    for (format, (count, bytes)) in sums {
        println!("  {format:<8}{count} tensors, {bytes} bytes");
    }
}

fn format_name(format: MatrixFormat) -> String {
    format!("{format:?}").to_uppercase()
}
