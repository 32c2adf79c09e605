//! `coli logits`: the logits after every token of a sequence, as raw floats, and their hash.

#![forbid(unsafe_code)]

use super::load::{Setup, count, object, print_json};
use super::{Args, Flag, Verb, load, oracle};
use crate::bail;
use crate::error::{Context, Error, Result};
use crate::json::Value;
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
    let target = args.get("--out").map(|path| target(path).context(|| path)).transpose()?;
    let engine = setup.open(ids.len())?;
    let mut out = target.map(PendingFile::create).transpose()?;
    let mut hash = Fnv1a64::new();
    let mut watch = load::Watch::new(&engine, ids.len());
    engine.session()?.logits_of_all(&ids, &mut watch, |logits| {
        let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
        hash.update(&bytes);
        match &mut out {
            Some(out) => out.file.write_all(&bytes).context(|| out.temporary.display()),
            None => Ok(()),
        }
    })?;
    watch.clear();
    if let Some(out) = out {
        out.finish()?;
    }
    print_json(&object(vec![
        ("tokens", count(ids.len())),
        ("vocab", count(engine.config().vocab_size)),
        ("fnv1a64", Value::String(format!("{:016x}", hash.0))),
    ]))
}

/// The file that `path` names, links followed. What cannot be replaced is refused: a pipe, a
/// device, a directory.
fn target(path: &str) -> Result<PathBuf> {
    let path = Path::new(path);
    if sys::is_present(path) {
        if !path.metadata()?.is_file() {
            bail!("expected a regular file or a new name");
        }
        return Ok(path.canonicalize()?);
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if path.file_name().is_none() || parent.is_some_and(|parent| !parent.is_dir()) {
        bail!("its directory does not exist");
    }
    Ok(path.to_path_buf())
}

/// A file under a temporary name beside its own, which it takes when it is complete. Dropped
/// before that it is removed, and what has the name stays as it was.
struct PendingFile {
    file: BufWriter<File>,
    temporary: PathBuf,
    target: PathBuf,
}

impl PendingFile {
    fn create(target: PathBuf) -> Result<PendingFile> {
        let mut name = target.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".part-{}", std::process::id()));
        let temporary = target.with_file_name(name);
        let file = File::create_new(&temporary).context(|| temporary.display())?;
        Ok(PendingFile { file: BufWriter::new(file), temporary, target })
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
