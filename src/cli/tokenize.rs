//! `crucible tokenize`: text to ids and pieces, or ids to text, with a model's own tokenizer.

use std::io::Read as _;
use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;

use super::{Outcome, inspect};
use crate::model::gguf;
use crate::model::{SpecialText, SpecialTokens, Tokenizer};

/// Arguments of `tokenize`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The text; `-` reads standard input. With --decode: ids, separated by commas or white space.
    text: String,
    /// Finds special tokens such as <|im_end|> in the text; with --decode, shows them.
    #[arg(long)]
    special: bool,
    /// Turns ids into text.
    #[arg(long)]
    decode: bool,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
    /// A GGUF file; the default model when absent.
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Cache folder of the default model.
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
}

/// Prints ids and pieces, or text.
///
/// # Errors
/// A model without a supported tokenizer, ids that are not numbers, or the pull's.
pub fn run(args: &Args) -> Outcome {
    let path = inspect::model_path(args.model.as_ref(), args.cache.as_ref())?;
    let (_, gguf) = gguf::open(&path)?;
    let tokenizer = Tokenizer::from_gguf(&gguf.metadata)?;
    let input = match args.text.as_str() {
        "-" => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text)?;
            text
        }
        text => text.to_owned(),
    };
    let out = if args.decode { decoded(args, &tokenizer, &input)? } else { encoded(args, &tokenizer, &input)? };
    super::print(&out)?;
    Ok(ExitCode::SUCCESS)
}

fn encoded(args: &Args, tokenizer: &Tokenizer, text: &str) -> Result<String, Box<dyn std::error::Error>> {
    let special = if args.special { SpecialTokens::Parse } else { SpecialTokens::AsText };
    let ids = tokenizer.encode(text, special)?;
    let piece = |id: &u32| String::from_utf8_lossy(&tokenizer.token_bytes(*id).unwrap_or_default()).into_owned();
    let pieces: Vec<String> = ids.iter().map(piece).collect();
    if args.json {
        return Ok(format!("{}\n", json!({ "ids": ids, "pieces": pieces })));
    }
    Ok(ids.iter().zip(pieces).map(|(id, piece)| format!("{id:>6}  {piece:?}\n")).collect())
}

fn decoded(args: &Args, tokenizer: &Tokenizer, ids: &str) -> Result<String, Box<dyn std::error::Error>> {
    let words = ids.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
    let number = |word: &str| match word.parse::<u32>() {
        Ok(id) if (id as usize) < tokenizer.vocab_size() => Ok(id),
        _ => Err(format!("{word:?} is not a token id: give numbers below {}", tokenizer.vocab_size())),
    };
    let ids = words.map(number).collect::<Result<Vec<u32>, _>>()?;
    let special = if args.special { SpecialText::Show } else { SpecialText::Hide };
    let text = tokenizer.decode(&ids, special);
    Ok(if args.json { format!("{}\n", json!({ "text": text })) } else { format!("{text}\n") })
}
