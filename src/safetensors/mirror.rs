//! Mirrors: directories on other drives with copies of some or all shards.
//!
//! A copy stands in for its shard only if it has the same length and, byte for byte, the same
//! header; the data behind it is taken on trust, as a shard's own is. Reads go to the copies of a
//! shard in proportion to the speed of their drives. A mirror whose reads fail loses them to the
//! shard itself, and after [`FAILURES_MAX`] of them it is no longer used.

#![forbid(unsafe_code)]

use super::{Directory, Shard};
use crate::bail;
use crate::error::{Context, Error, Result};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// After so many failed reads a mirror is no longer used.
const FAILURES_MAX: u32 = 3;

/// One directory with copies.
#[derive(Debug)]
pub struct Mirror {
    /// As given.
    path: PathBuf,
    /// For each shard of the model its copy, if there is one.
    copies: Vec<Option<Shard>>,
    /// Why files of a shard's name are no copies of it.
    refusals: Vec<Error>,
    failures: AtomicU32,
    /// Why it is no longer used, until somebody asks.
    end: Mutex<Option<String>>,
}

impl Mirror {
    /// Takes note that a read of a copy failed.
    pub fn count_failure(&self, error: &Error) {
        if self.failures.fetch_add(1, Relaxed) + 1 == FAILURES_MAX {
            let (path, reads) = (self.path.display(), FAILURES_MAX);
            let text = format!("mirror {path} is no longer used: {reads} reads failed: {error}");
            *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
        }
    }

    /// The copy of a shard, unless reads of this mirror have failed too often.
    fn copy(&self, shard: usize) -> Option<&Shard> {
        let is_used = self.failures.load(Relaxed) < FAILURES_MAX;
        self.copies[shard].as_ref().filter(|_| is_used)
    }
}

impl Directory {
    /// Opens the copies that `dir` has of this directory's shards. A file that is no copy is not
    /// used; [`Directory::mirror_notes`] says so.
    pub fn add_mirror(&mut self, dir: &Path) {
        let mut refusals = Vec::new();
        let copies = self.shards.iter().map(|shard| {
            let path = dir.join(shard.path.file_name().expect("a shard has a name"));
            let copy = open_copy(&path, shard).context(|| path.display());
            copy.unwrap_or_else(|error| {
                refusals.push(error);
                None
            })
        });
        let (copies, path) = (copies.collect(), dir.to_path_buf());
        let (failures, end) = (AtomicU32::new(0), Mutex::new(None));
        self.mirrors.push(Mirror { path, copies, refusals, failures, end });
    }

    /// Whether there is any mirror.
    pub fn is_mirrored(&self) -> bool {
        !self.mirrors.is_empty()
    }

    /// Every open file: the shards and their copies.
    pub fn files_mut(&mut self) -> impl Iterator<Item = &mut Shard> {
        let copies = self.mirrors.iter_mut().flat_map(|mirror| mirror.copies.iter_mut().flatten());
        self.shards.iter_mut().chain(copies)
    }

    /// Where a read of `shard` goes: to the copy of a mirror, or to the shard itself (`None`).
    /// Evenly distributed values of `hash` are distributed by the speed of the drives.
    pub fn route(&self, shard: usize, hash: u64) -> Option<(&Mirror, &Shard)> {
        let mut point = hash as f64 / u64::MAX as f64 * self.all_gbs(shard);
        self.copies(shard).find(|(_, copy)| {
            point -= copy.gbs;
            point < 0.0
        })
    }

    /// The copies of a shard that are in use.
    pub(super) fn copies(&self, shard: usize) -> impl Iterator<Item = (&Mirror, &Shard)> {
        self.mirrors.iter().filter_map(move |mirror| Some((mirror, mirror.copy(shard)?)))
    }

    /// Gigabytes a second of a shard and its copies together.
    fn all_gbs(&self, shard: usize) -> f64 {
        self.shards[shard].gbs + self.copies(shard).map(|(_, copy)| copy.gbs).sum::<f64>()
    }

    /// What there is of each mirror: its shards, the part of the container's bytes that is read
    /// there, and what is no copy.
    pub fn mirror_notes(&self) -> impl Iterator<Item = String> {
        let all_bytes: u64 = self.shards.iter().map(|shard| shard.bytes).sum();
        self.mirrors.iter().map(move |mirror| {
            let copies = (0..self.shards.len()).filter_map(|i| Some((i, mirror.copy(i)?)));
            let shares = copies.map(|(i, copy)| copy.bytes as f64 * copy.gbs / self.all_gbs(i));
            let (count, bytes) = shares.fold((0, 0.0), |(n, sum), share| (n + 1, sum + share));
            let (path, shards) = (mirror.path.display(), self.shards.len());
            let percent = 100.0 * bytes / all_bytes as f64;
            let note =
                format!("mirror {path}: {count} of {shards} shards, {percent:.0} % of the reads");
            match &mirror.refusals[..] {
                [] => note,
                [one] => format!("{note}; not used: {one}"),
                [one, more @ ..] => format!("{note}; not used: {one} (and {} more)", more.len()),
            }
        })
    }

    /// Why a mirror is no longer used, once for each.
    pub fn take_mirror_end(&self) -> Option<String> {
        let take = |m: &Mirror| m.end.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.mirrors.iter().find_map(take)
    }
}

/// Opens `path` as a copy of `shard`; `None` when there is no such file. Error: it differs.
fn open_copy(path: &Path, shard: &Shard) -> Result<Option<Shard>> {
    if matches!(std::fs::metadata(path), Err(error) if error.kind() == ErrorKind::NotFound) {
        return Ok(None);
    }
    let copy = Shard::open(path)?;
    if copy.bytes != shard.bytes {
        bail!(
            "expected the {} bytes of {}, found {}",
            shard.bytes,
            shard.path.display(),
            copy.bytes
        );
    }
    let wanted = shard.header()?;
    let mut found = vec![0; wanted.len()];
    copy.file.read_exact_at(&mut found, 0)?;
    if let Some(at) = wanted.iter().zip(&found).position(|(wanted, found)| wanted != found) {
        bail!("its header differs from that of {} at byte {at}", shard.path.display());
    }
    Ok(Some(copy))
}
