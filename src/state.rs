//! Saved sessions: token timelines with their caches, in files that outlive the process.
//!
//! Restored equals computed anew, byte for byte: the floats are stored as they are, and a file is
//! bound to the model by a [`Fingerprint`]. A file of another model, another version of the format
//! or another program is refused, and never written to.
//!
//! A file is a header and records, only ever appended to. All numbers are little-endian; those
//! without a type are u64.
//!
//! | header | |
//! |---|---|
//! | 8 bytes | `coli-kv` and a zero |
//! | 1 number | version of the format |
//! | 4 numbers | fingerprint |
//! | 1 number | hash of all that |
//!
//! | record | |
//! |---|---|
//! | 2 numbers | position of the first token, not beyond the end so far; tokens n, not 0 |
//! | 2 numbers | bytes of the whole record; seconds since 1970 when it was written |
//! | n × u32 | tokens |
//! | f32 | per layer, per position: latent row, and index key on layers that keep one |
//! | f32 | draft head, if there is one: see below |
//! | 1 number | hash that continues the one before it in the file |
//!
//! A row of the draft head is made of the token behind its position. So a record has its rows from
//! the position before the first token to the one before the last, then the hidden state `[D]` of
//! the last, from which the next row is made.
//!
//! Where a record begins before the end of the timeline so far, the timeline is cut there: nothing
//! that was valid is overwritten. A record that is cut short, or whose hash is not right, ends the
//! file; the next one takes its place. When more of a file is stale than not, it is written anew
//! beside the old one and renamed. Every record is flushed to the drive before it counts as saved,
//! so neither a kill nor a power cut loses more than the turn being saved.

#![forbid(unsafe_code)]

mod journal;
mod store;
mod stream;

use crate::error::{Context, Result};
use crate::safetensors::{Directory, Shard};
use crate::sys;
use std::os::unix::fs::FileExt;

pub use journal::{Journal, Shape, Timeline};
pub use store::Sessions;
use stream::Hash;

/// Stands for the canonical arithmetic: the golden hashes of some fixtures, which a test combines.
/// Rows that other arithmetic computed are not those of this engine.
pub const ARITHMETIC: u64 = 0xb14e_32c7_412a_b556;

/// Longest config.json and tokenizer.json.
const FILE_BYTES_MAX: usize = 256 << 20;

/// Payload that is looked at, evenly spaced in each shard: tells fine-tunes and conversions apart,
/// whose headers are the same.
const SAMPLES: u64 = 4;
const SAMPLE_BYTES: u64 = 4096;

/// What a saved session is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint([u64; 4]);

impl Fingerprint {
    /// What each of its hashes is of.
    const PARTS: [&'static str; 4] = ["arithmetic", "config.json", "tokenizer.json", "weights"];

    /// Hashes config.json and tokenizer.json, and of each shard its length, header, and samples of
    /// the payload: some megabytes are read of a model of any size. Where the files lie is no part
    /// of it.
    pub fn of(directory: &Directory) -> Result<Fingerprint> {
        let file = |name: &str| -> Result<u64> {
            let path = directory.path().join(name);
            let mut hash = Hash::START;
            if sys::is_present(&path) {
                let bytes = sys::read_file(&path, FILE_BYTES_MAX).context(|| path.display())?;
                hash.add(&(bytes.len() as u64).to_le_bytes());
                hash.add(&bytes);
            }
            Ok(hash.0)
        };
        let mut weights = Hash::START;
        for shard in directory.shards() {
            add_shard(&mut weights, shard).context(|| shard.path.display())?;
        }
        Ok(Fingerprint([ARITHMETIC, file("config.json")?, file("tokenizer.json")?, weights.0]))
    }
}

fn add_shard(hash: &mut Hash, shard: &Shard) -> Result<()> {
    let mut bytes = shard.header()?;
    hash.add(&shard.bytes.to_le_bytes());
    hash.add(&bytes);
    let payload = bytes.len() as u64;
    let stride = (shard.bytes - payload) / SAMPLES;
    for i in 0..SAMPLES {
        bytes.resize(stride.min(SAMPLE_BYTES) as usize, 0);
        shard.file.read_exact_at(&mut bytes, payload + i * stride)?;
        hash.add(&bytes);
    }
    Ok(())
}

/// How many tokens two timelines have in common.
pub fn common_tokens(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
