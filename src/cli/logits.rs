//! `coli logits`: the logits after every token of a sequence, as raw floats, and their hash.

#![forbid(unsafe_code)]

use super::load::{Setup, print_json};
use super::{Args, Flag, Verb, load, oracle};
use crate::bail;
use crate::error::{Context, Error, Result};
use crate::object;
use crate::sys;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "logits",
    positional: "",
    summary: "write the logits of every position as raw f32, with a hash of their bytes",
    example: "coli logits --model tests/fixtures/a_seed --ids 3,14,159 --out /tmp/logits.f32",
    flags: &[
        load::MODEL_FLAGS,
        load::PLAN_FLAGS,
        load::FLAGS,
        &[super::JSON],
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
        _ => {
            let wanted = "expected exactly one of --ids 1,2,3 and --ref FILE";
            return Err(Error::usage(format!("{wanted}; for example\n  {}", VERB.example)));
        }
    };
    let setup = Setup::new(args, ids.len())?;
    setup.check(&ids)?;
    let out = args.get("--out").map(|path| PendingFile::create(path).context(|| path));
    let mut out = out.transpose()?;
    let engine = setup.open(ids.len())?;
    let mut hash = FNV_START;
    let mut watch = load::Watch::new(&engine, ids.len());
    engine.session()?.logits_of_all(&ids, &mut watch, |logits| {
        let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
        hash = fnv1a64(hash, &bytes);
        match &mut out {
            Some(out) => out.file.write_all(&bytes).context(|| out.temporary.display()),
            None => Ok(()),
        }
    })?;
    watch.clear();
    if let Some(out) = out {
        out.finish()?;
    }
    let (vocab, hash) = (engine.config().vocab_size, format!("{hash:016x}"));
    print_json(&object! { "tokens": ids.len(), "vocab": vocab, "fnv1a64": hash })
}

/// A file under a temporary name beside its own, which it takes when it is complete. Dropped
/// before that it is removed, and what has the name stays as it was.
struct PendingFile {
    file: BufWriter<File>,
    temporary: PathBuf,
    target: PathBuf,
}

impl PendingFile {
    /// Links are followed. What cannot be replaced is refused: a pipe, a device, a directory.
    fn create(path: &str) -> Result<PendingFile> {
        let mut target = PathBuf::from(path);
        if sys::is_present(&target) {
            if !target.metadata()?.is_file() {
                bail!("expected a regular file or a new name");
            }
            target = target.canonicalize()?;
        }
        let mut name = target.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".part-{}", std::process::id()));
        let temporary = target.with_file_name(name);
        let file = BufWriter::new(File::create_new(&temporary)?);
        Ok(PendingFile { file, temporary, target })
    }

    fn finish(mut self) -> Result<()> {
        self.file.flush().context(|| self.temporary.display())?;
        std::fs::rename(&self.temporary, &self.target).context(|| self.target.display())
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        // Gone already when it was finished.
        let _ = std::fs::remove_file(&self.temporary);
    }
}

/// The hash of no bytes.
const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a with 64 bits, prime 0x100000001b3: the hash of what `hash` is of, and of `bytes` behind.
fn fnv1a64(hash: u64, bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(hash, step)
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
            assert_eq!(fnv1a64(FNV_START, text.as_bytes()), want, "{text:?}");
        }
    }
}
