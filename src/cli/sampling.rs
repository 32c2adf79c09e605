//! How the next token is chosen and a reply ends: the flags of every verb that generates text.

#![forbid(unsafe_code)]

use super::{Args, Flag};
use crate::error::{Error, Result};
use crate::sample::Params;
use std::time::{SystemTime, UNIX_EPOCH};

/// Flags that the functions below read, and `--think`.
pub const FLAGS: &[Flag] = &[
    Flag::switch("--think", "let the model think first (default: thinking is off)"),
    Flag::value("-n", "N", "at most N new tokens (default 256)").or_env("NGEN"),
    Flag::value("--temp", "X", "temperature, 0 is greedy (default 1)"),
    Flag::value("--top-p", "X", "nucleus of the distribution (default 0.95)"),
    Flag::value("--top-k", "N", "only the N best tokens (default 0: all)"),
    Flag::value("--min-p", "X", "only tokens this likely against the best (default 0)"),
    Flag::value("--repetition-penalty", "X", "divides logits of all tokens so far (default 1)"),
    Flag::value("--presence-penalty", "X", "taken from those in the reply (default 0)"),
    Flag::value("--frequency-penalty", "X", "the same, each time it is there (default 0)"),
    Flag::value("--logit-bias", "ID:X,…", "added to the logits of these tokens"),
    Flag::value("--seed", "N", "seed of all draws (default: from the clock)"),
    Flag::value("--stop", "TEXT", "end before this text; may be given several times").repeated(),
];

/// New tokens when `-n` does not say.
const NEW_TOKENS_DEFAULT: usize = 256;

/// Most new tokens of a reply.
pub fn new_tokens(args: &Args) -> Result<usize> {
    Ok(args.number("-n", 1..=1usize << 24)?.unwrap_or(NEW_TOKENS_DEFAULT))
}

/// Texts that end a reply.
pub fn stops(args: &Args) -> Result<Vec<String>> {
    let stops = args.all("--stop");
    if stops.iter().any(String::is_empty) {
        return Err(Error::usage("--stop: expected a text, found none"));
    }
    Ok(stops)
}

/// Sampling parameters of the flags.
pub fn params(args: &Args, vocab_size: usize) -> Result<Params> {
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let params = Params {
        temperature: args.number("--temp", 0.0..=100.0)?.unwrap_or(1.0),
        top_p: args.number("--top-p", 0.0..=1.0)?.unwrap_or(0.95),
        top_k: args.number("--top-k", 0..=usize::MAX)?.unwrap_or(0),
        min_p: args.number("--min-p", 0.0..=1.0)?.unwrap_or(0.0),
        repetition_penalty: args.number("--repetition-penalty", 0.01..=100.0)?.unwrap_or(1.0),
        presence_penalty: args.number("--presence-penalty", -2.0..=2.0)?.unwrap_or(0.0),
        frequency_penalty: args.number("--frequency-penalty", -2.0..=2.0)?.unwrap_or(0.0),
        logit_bias: logit_bias(args)?,
        seed: args.number("--seed", 0..=u64::MAX)?.unwrap_or_else(clock),
    };
    // What the ranges of the flags let pass: a top_p of 0, a bias.
    let checked = params.validate(vocab_size);
    checked.map_err(|error| Error::usage(format!("--{error}").replace('_', "-")))?;
    Ok(params)
}

/// Pairs of token id and bias between commas.
fn logit_bias(args: &Args) -> Result<Vec<(u32, f64)>> {
    let pair = |text: &str| {
        let numbers =
            text.split_once(':').map(|(id, bias)| (id.trim().parse(), bias.trim().parse()));
        match numbers {
            Some((Ok(id), Ok(bias))) => Ok((id, bias)),
            _ => Err(Error::usage(format!("--logit-bias: expected id:bias, found {text:?}"))),
        }
    };
    args.get("--logit-bias").map_or(Ok(Vec::new()), |text| text.split(',').map(pair).collect())
}
