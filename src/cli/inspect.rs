//! `crucible inspect`: what a model file holds, without computing anything: geometry, metadata, tensors, special tokens; with
//! `--device` what the machine's GPU is and where its libraries were found.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
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
            Ok(report) => super::print(&format!("{report}\n"))?,
            Err(reason) => super::print(&format!("no usable GPU: {reason}\n"))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let path = model_path(args.model.as_ref(), args.cache.as_ref())?;
    let (map, gguf) = gguf::open(&path)?;
    let geometry = gguf::llama::geometry(&gguf)?;
    let tokenizer = Tokenizer::from_gguf(&gguf.metadata)?;
    let mut out = String::new();
    writeln!(out, "{} ({} bytes, GGUF {})", path.display(), map.len(), gguf.version)?;
    write_geometry(&mut out, &geometry)?;
    write_tokens(&mut out, &tokenizer)?;
    writeln!(out, "\nmetadata")?;
    for (key, value) in gguf.metadata.iter() {
        writeln!(out, "  {key} = {value}")?;
    }
    write_tensors(&mut out, &gguf, args.tensors)?;
    super::print(&out)?;
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

fn write_geometry(out: &mut String, g: &Geometry) -> fmt::Result {
    writeln!(out, "\ngeometry")?;
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
        writeln!(out, "  {name:<11}{value}")?;
    }
    Ok(())
}

fn write_tokens(out: &mut String, tokenizer: &Tokenizer) -> fmt::Result {
    let name = |id: &u32| format!("{id} {}", tokenizer.decode(&[*id], SpecialText::Show));
    let special: Vec<u32> = (0..tokenizer.vocab_size() as u32).filter(|&id| tokenizer.is_special(id)).collect();
    let list = |ids: &[u32]| ids.iter().map(name).collect::<Vec<_>>().join(", ");
    writeln!(out, "\ntokens")?;
    writeln!(out, "  {:<11}{}", "text", tokenizer.vocab_size() - special.len())?;
    writeln!(out, "  {:<11}{}", "special", list(&special))?;
    writeln!(out, "  {:<11}{}", "ends", list(&tokenizer.eos_ids()))?;
    writeln!(out, "  {:<11}{}", "begins", tokenizer.bos().map_or_else(|| "nothing".to_owned(), |id| name(&id)))?;
    Ok(())
}

fn write_tensors(out: &mut String, gguf: &Gguf, each: bool) -> fmt::Result {
    writeln!(out, "\ntensors")?;
    let mut sums: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for tensor in &gguf.tensors {
        let sum = sums.entry(format_name(tensor.format)).or_default();
        sum.0 += 1;
        sum.1 += tensor.range.len();
        if each {
            let shape: Vec<String> = tensor.shape.iter().rev().map(usize::to_string).collect();
            writeln!(out, "  {:<28}{:<8}[{}]", tensor.name, format_name(tensor.format), shape.join(", "))?;
        }
    }
    for (format, (count, bytes)) in sums {
        writeln!(out, "  {format:<8}{count} tensors, {bytes} bytes")?;
    }
    Ok(())
}

fn format_name(format: MatrixFormat) -> String {
    format!("{format:?}").to_uppercase()
}
