//! `coli render`: an OpenAI chat request on stdin to the prompt, exactly as it would be fed.

#![forbid(unsafe_code)]

use super::load::print_json;
use super::{Args, Verb};
use crate::bail;
use crate::chat;
use crate::error::{Context, Result};
use crate::json::{self, Limits};
use crate::object;
use crate::tokenizer::Tokenizer;
use std::io::{Read, Write};
use std::path::Path;

/// Largest request that is read.
const REQUEST_BYTES_MAX: usize = 64 << 20;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "render",
    positional: "",
    summary: "turn an OpenAI chat request on stdin into its prompt; thinking follows the request",
    example: "echo '{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}' | \
              coli render --model oracle/demo",
    flags: &[&[super::MODEL, super::JSON]],
    run,
};

fn run(args: &Args) -> Result<()> {
    let tokenizer = Tokenizer::load(&Path::new(args.required("--model")?).join("tokenizer.json"))?;
    let mut body = Vec::new();
    std::io::stdin().lock().take(REQUEST_BYTES_MAX as u64 + 1).read_to_end(&mut body)?;
    if body.len() > REQUEST_BYTES_MAX {
        bail!("the request is larger than {REQUEST_BYTES_MAX} bytes");
    }
    let request = json::parse(&body, Limits::default()).context(|| "request")?;
    let prompt = chat::render(&request).context(|| "request")?;
    let tokens = prompt.ids(&tokenizer)?;
    if args.has("--json") {
        return print_json(&object! { "text": prompt.text(), "ids": tokens });
    }
    let mut out = std::io::stdout().lock();
    Ok(writeln!(out, "{}", prompt.text())?)
}
