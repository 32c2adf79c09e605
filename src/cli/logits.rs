//! `coli logits`: the logits after every token of a sequence, as raw floats, and their hash.

#![forbid(unsafe_code)]

use super::load::{count, object, open, print_json};
use super::{Args, Flag, Verb, load, oracle};
use crate::error::{Context, Error, Result};
use crate::json::Value;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "logits",
    positional: "",
    summary: "write the logits of every position as raw f32, with a hash of their bytes",
    example: "coli logits --model tests/fixtures/a_seed --ids 3,14,159 --out /tmp/logits.f32",
    flags: &[
        load::FLAGS,
        &[
            Flag::value("--ids", "1,2,3", "token ids to run"),
            Flag::value("--ref", "FILE", "or a reference file: its full_ids"),
            Flag::value("--out", "FILE", "where to write little-endian f32 [T, V]"),
        ],
    ],
    run,
};

fn run(args: &Args) -> Result<()> {
    let ids = match (args.ids("--ids")?, args.get("--ref")) {
        (Some(ids), None) => ids,
        (None, Some(path)) => oracle::Reference::read(Path::new(path))?.full_ids,
        _ => return Err(Error::usage("coli logits: expected exactly one of --ids and --ref")),
    };
    let engine = open(args, ids.len())?;
    let mut out = match args.get("--out") {
        Some(path) => Some((path, BufWriter::new(File::create(path).context(|| path)?))),
        None => None,
    };
    let mut hash = Fnv1a64::new();
    let mut watch = load::Watch::new(&engine, ids.len());
    engine.session().logits_of_all(&ids, &mut watch, |logits| {
        let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
        hash.update(&bytes);
        match &mut out {
            Some((path, file)) => file.write_all(&bytes).context(|| *path),
            None => Ok(()),
        }
    })?;
    watch.clear();
    if let Some((path, file)) = &mut out {
        file.flush().context(|| *path)?;
    }
    print_json(&object(vec![
        ("tokens", count(ids.len())),
        ("vocab", count(engine.config().vocab_size)),
        ("fnv1a64", Value::String(format!("{:016x}", hash.0))),
    ]))
}

/// FNV-1a with 64 bits: offset basis 0xcbf29ce484222325, prime 0x100000001b3.
struct Fnv1a64(u64);

impl Fnv1a64 {
    fn new() -> Fnv1a64 {
        Fnv1a64(0xcbf2_9ce4_8422_2325)
    }

    fn update(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ *byte as u64).wrapping_mul(0x100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors of the function's published test suite.
    #[test]
    fn fnv1a64_matches_its_published_vectors() {
        let vectors =
            [("", 0xcbf29ce484222325), ("a", 0xaf63dc4c8601ec8c), ("foobar", 0x85944171f73967e8)];
        for (text, want) in vectors {
            let mut hash = Fnv1a64::new();
            hash.update(text.as_bytes());
            assert_eq!(hash.0, want, "{text:?}");
        }
    }
}
