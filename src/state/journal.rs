//! One file of a saved session: opened and checked, loaded into a cache, appended to, written anew.
//!
//! Sizes that a file claims are compared with its length and the model before anything is made of
//! them; what is held in memory is its tokens and a few numbers per record. A file that is open
//! here is locked: a second process is refused.

#![forbid(unsafe_code)]

use super::stream::{BUFFER_BYTES, Hash, Hashed};
use super::{Fingerprint, common_tokens};
use crate::bail;
use crate::error::{Error, Result};
use crate::kv::KvCache;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufReader, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const MAGIC: u64 = u64::from_le_bytes(*b"coli-kv\0");
/// Of `.coli_kv` files. Their rows were computed in another order of operations.
const MAGIC_OF_C: u64 = u64::from_le_bytes(*b"COLIKV1\0");
const VERSION: u64 = 1;
/// Its words of eight bytes are the mark, the version, the fingerprint and the hash.
const HEADER_BYTES: u64 = 56;
/// Position of the first token, tokens, bytes of the record, time.
const HEAD_BYTES: u64 = 32;
const HASH_BYTES: u64 = 8;
/// Most tokens of a timeline, as of a context.
const TOKENS_MAX: u64 = 1 << 24;

/// What a file is made for.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Bound to it.
    pub fingerprint: Fingerprint,
    /// Rows of the vocabulary.
    pub vocab_size: usize,
    /// Layers, without that of a draft head.
    pub layers: usize,
    /// Floats that all of them keep of one position.
    pub position_floats: usize,
    /// Floats of a hidden state.
    pub hidden_size: usize,
}

/// What is saved.
pub struct Timeline<'a> {
    /// Its tokens, at least one.
    pub tokens: &'a [u32],
    /// Their rows.
    pub kv: &'a KvCache,
    /// Where the draft head has all rows but the last: the hidden state `[D]` of the last token.
    pub head: Option<&'a [f32]>,
}

/// An open file with the timeline that it holds.
pub struct Journal {
    path: PathBuf,
    /// Open for reading, and locked.
    file: File,
    shape: Shape,
    tokens: Vec<u32>,
    records: Vec<Record>,
    /// Bytes that are valid, and the hash of them.
    end: u64,
    hash: Hash,
}

/// One valid record.
struct Record {
    /// Where its rows start.
    rows_at: u64,
    positions: Range<usize>,
    /// Bytes of the draft head's part.
    head_bytes: u64,
    saved_at: u64,
}

impl Journal {
    /// Opens a file and checks all of it; `None` if there is none. Errors, beside those of the
    /// system: not a file that this engine wrote for this model, or one that is in use. Damage ends
    /// what is valid and is no error.
    pub fn open(path: &Path, shape: Shape) -> Result<Option<Journal>> {
        match std::fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            // Asked before opening, because opening a pipe would block.
            Ok(metadata) if !metadata.is_file() => bail!("expected a regular file"),
            other => _ = other?,
        }
        let mut journal = Journal::new(path, File::open(path)?, shape).locked()?;
        journal.scan(true)?;
        Ok(Some(journal))
    }

    /// The timeline of a file, found without its rows. Damage is not: what [`Journal::open`] finds
    /// may be shorter.
    pub fn peek(path: &Path, shape: Shape) -> Result<Vec<u32>> {
        let mut journal = Journal::new(path, File::open(path)?, shape);
        journal.scan(false)?;
        Ok(std::mem::take(&mut journal.tokens))
    }

    /// The same, or a new file.
    pub fn open_or_create(path: &Path, shape: Shape) -> Result<Journal> {
        if let Some(journal) = Journal::open(path, shape)? {
            return Ok(journal);
        }
        Journal::new(path, options().create_new(true).open(path)?, shape).locked()
    }

    fn new(path: &Path, file: File, shape: Shape) -> Journal {
        let (path, hash) = (path.to_path_buf(), Hash::START);
        Journal { path, file, shape, tokens: Vec::new(), records: Vec::new(), end: 0, hash }
    }

    fn locked(self) -> Result<Journal> {
        // A file system without locks is none of our business.
        if let Err(TryLockError::WouldBlock) = self.file.try_lock() {
            bail!("in use by another session");
        }
        Ok(self)
    }

    /// Path as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The timeline.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Seconds since 1970 when it was saved last.
    pub fn saved_at(&self) -> u64 {
        self.records.last().map_or(0, |record| record.saved_at)
    }

    /// Reads the file up to what is not valid; without `checks`, past the rows and hashes.
    fn scan(&mut self, checks: bool) -> Result<()> {
        let bytes = self.file.metadata()?.len();
        let reader = BufReader::with_capacity(BUFFER_BYTES, self.file.try_clone()?);
        let mut input = Hashed::new(reader, self.hash);
        if bytes < HEADER_BYTES {
            let start = input.bytes(bytes as usize)?;
            if start.iter().zip(MAGIC.to_le_bytes()).any(|(a, b)| *a != b) {
                bail!("not a saved session");
            }
            return Ok(());
        }
        let [magic, version, parts @ ..]: [u64; 6] = input.longs()?;
        match magic {
            MAGIC => {}
            MAGIC_OF_C => bail!("written by the C engine, whose rows are others than this one's"),
            _ => bail!("not a saved session"),
        }
        if version != VERSION {
            bail!("a saved session of version {version}; this engine reads version {VERSION}");
        }
        if !input.ends_in_hash()? {
            bail!("the first {HEADER_BYTES} bytes of this saved session are damaged");
        }
        let Fingerprint(ours) = self.shape.fingerprint;
        for ((found, expected), part) in parts.iter().zip(ours).zip(Fingerprint::PARTS) {
            if *found != expected {
                bail!(
                    "saved with other {part}: expected the fingerprint {expected:016x}, found \
                     {found:016x}"
                );
            }
        }
        self.end = HEADER_BYTES;
        self.hash = input.hash;
        while self.scan_record(&mut input, bytes - self.end, checks)? {}
        Ok(())
    }

    /// Takes the next record, if it is whole and right; `left` bytes follow.
    fn scan_record(
        &mut self,
        input: &mut Hashed<BufReader<File>>,
        left: u64,
        checks: bool,
    ) -> Result<bool> {
        if left < HEAD_BYTES {
            return Ok(false);
        }
        let [first, count, bytes, saved_at] = input.longs()?;
        let is_possible =
            first <= self.tokens.len() as u64 && (1..=TOKENS_MAX - first).contains(&count);
        let rows_bytes = 4 * count.min(TOKENS_MAX) * self.shape.position_floats as u64;
        let known_bytes = HEAD_BYTES + 4 * count.min(TOKENS_MAX) + rows_bytes + HASH_BYTES;
        if !is_possible || !(known_bytes..=left).contains(&bytes) {
            return Ok(false);
        }
        let (first, count) = (first as usize, count as usize);
        let tokens = input.tokens(count)?;
        let head_bytes = bytes - known_bytes;
        if checks {
            input.skip(rows_bytes + head_bytes)?;
            let is_token = |token: &u32| (*token as usize) < self.shape.vocab_size;
            if !input.ends_in_hash()? || !tokens.iter().all(is_token) {
                return Ok(false);
            }
        } else {
            input.inner.seek_relative((rows_bytes + head_bytes + HASH_BYTES) as i64)?;
        }
        let (rows_at, positions) = (self.end + rows_offset(count), first..first + count);
        self.records.push(Record { rows_at, positions, head_bytes, saved_at });
        self.tokens.truncate(first);
        self.tokens.extend(tokens);
        self.end += bytes;
        self.hash = input.hash;
        Ok(true)
    }

    /// Fills a cache, which must have room for the timeline. Returns the hidden state of the last
    /// token if there is a draft head and all of its rows were saved.
    pub fn load(&self, kv: &mut KvCache) -> Result<Option<Vec<f32>>> {
        let Shape { layers, hidden_size, .. } = self.shape;
        let mut has_head = kv.layers() > layers;
        let mut hidden = vec![0.0; hidden_size];
        let mut buffer = Vec::new();
        let mut input = BufReader::with_capacity(BUFFER_BYTES, self.file.try_clone()?);
        // What later records leave of one is its start.
        let mut later = usize::MAX;
        for Record { rows_at, positions, head_bytes, .. } in self.records.iter().rev() {
            let end = positions.end.min(later);
            if end <= positions.start {
                continue;
            }
            input.seek(SeekFrom::Start(*rows_at))?;
            for layer in 0..layers {
                load_rows(&mut input, kv, layer, positions.clone(), end, &mut buffer)?;
            }
            let rows = head_rows(positions);
            let bytes = |kv: &KvCache| rows.len() * kv.position_floats(layers) + hidden_size;
            has_head &= kv.layers() > layers && *head_bytes == 4 * bytes(kv) as u64;
            if has_head {
                load_rows(&mut input, kv, layers, rows, end - 1, &mut buffer)?;
            }
            if has_head && later == usize::MAX {
                read_floats(&mut input, &mut hidden, &mut buffer)?;
            }
            later = positions.start;
        }
        Ok(has_head.then_some(hidden))
    }

    /// Makes `timeline` what the file holds, by what is new in it. Returns the bytes written. After
    /// an error the file holds what it held before.
    pub fn save(&mut self, timeline: &Timeline<'_>) -> Result<u64> {
        let count = timeline.tokens.len();
        let common = common_tokens(&self.tokens, timeline.tokens);
        if common == count && common == self.tokens.len() {
            return Ok(0);
        }
        let first = common.min(count - 1);
        let written: usize = self.records.iter().map(|record| record.positions.len()).sum();
        if written + count - first > 2 * count {
            return self.rewrite(timeline);
        }
        let file = options().open(&self.path)?;
        self.append(&file, first, timeline)
    }

    /// Whether the path still leads to this file.
    pub fn is_in_place(&self) -> bool {
        let id = |metadata: std::io::Result<std::fs::Metadata>| {
            metadata.ok().map(|metadata| (metadata.dev(), metadata.ino()))
        };
        id(std::fs::metadata(&self.path)) == id(self.file.metadata())
    }

    /// Writes the whole timeline beside the file, and renames that.
    fn rewrite(&mut self, timeline: &Timeline<'_>) -> Result<u64> {
        let target = std::fs::canonicalize(&self.path)?;
        let mut aside = target.clone().into_os_string();
        aside.push(".new");
        let aside = PathBuf::from(aside);
        let replace = || {
            let file = options().create(true).truncate(true).open(&aside)?;
            let mut new = Journal::new(&self.path, file.try_clone()?, self.shape).locked()?;
            let bytes = new.append(&file, 0, timeline)?;
            std::fs::rename(&aside, &target)?;
            sync_directory(&target);
            Ok((new, bytes))
        };
        let (new, bytes) = replace().inspect_err(|_: &Error| _ = std::fs::remove_file(&aside))?;
        *self = new;
        Ok(bytes)
    }

    /// Writes one record, with everything from position `first` on.
    fn append(&mut self, file: &File, first: usize, timeline: &Timeline<'_>) -> Result<u64> {
        let written = self.write(file, first, timeline);
        let (hash, record, bytes) = written.inspect_err(|_| _ = file.set_len(self.end))?;
        if self.end == 0 {
            sync_directory(&self.path);
        }
        self.hash = hash;
        self.end += bytes;
        self.records.push(record);
        self.tokens.truncate(first);
        self.tokens.extend(&timeline.tokens[first..]);
        Ok(bytes)
    }

    /// The bytes of [`Journal::append`], flushed to the drive.
    fn write(
        &self,
        file: &File,
        first: usize,
        timeline: &Timeline<'_>,
    ) -> Result<(Hash, Record, u64)> {
        let Timeline { tokens, kv, head } = timeline;
        let Shape { fingerprint, layers, position_floats, .. } = self.shape;
        // What lies behind is no record.
        file.set_len(self.end)?;
        let mut inner = BufWriter::with_capacity(BUFFER_BYTES, file);
        inner.seek(SeekFrom::Start(self.end))?;
        let mut out = Hashed::new(inner, self.hash);
        let start = self.end.max(HEADER_BYTES);
        if self.end == 0 {
            out.put_longs(&[MAGIC, VERSION])?;
            out.put_longs(&fingerprint.0)?;
            out.put_hash()?;
        }
        let (positions, count) = (first..tokens.len(), tokens.len() - first);
        let head_floats = head.map_or(0, |hidden| {
            head_rows(&positions).len() * kv.position_floats(layers) + hidden.len()
        });
        let head_bytes = 4 * head_floats as u64;
        let rows_bytes = 4 * (count * position_floats) as u64;
        let bytes = rows_offset(count) + rows_bytes + head_bytes + HASH_BYTES;
        let saved_at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
        out.put_longs(&[first as u64, count as u64, bytes, saved_at])?;
        out.put(tokens[first..].iter().map(|token| token.to_le_bytes()))?;
        let head_layer = head.map(|_| (layers, head_rows(&positions)));
        for (layer, positions) in (0..layers).map(|l| (l, positions.clone())).chain(head_layer) {
            for row in positions.flat_map(|position| kv.rows(layer, position)) {
                out.put_floats(row)?;
            }
        }
        out.put_floats(head.unwrap_or_default())?;
        out.put_hash()?;
        out.inner.flush()?;
        file.sync_data()?;
        let record =
            Record { rows_at: start + rows_offset(count), positions, head_bytes, saved_at };
        Ok((out.hash, record, start + bytes - self.end))
    }
}

impl Drop for Journal {
    /// Closing is not enough where a process that was just started still has the file as well.
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

/// For files that only their owner may read: they hold what was said.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

/// Flushes a new name to the drive, where the file system can.
fn sync_directory(path: &Path) {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let _ = File::open(dir.unwrap_or(Path::new("."))).and_then(|dir| dir.sync_all());
}

/// Where the rows of a record of `count` tokens start in it.
fn rows_offset(count: usize) -> u64 {
    HEAD_BYTES + 4 * count as u64
}

/// The draft head's rows in a record: each is made of the token behind its position.
fn head_rows(positions: &Range<usize>) -> Range<usize> {
    positions.start.saturating_sub(1)..positions.end - 1
}

/// Reads the rows `stored` of a layer: those before `end`, and past the others.
fn load_rows(
    input: &mut BufReader<File>,
    kv: &mut KvCache,
    layer: usize,
    stored: Range<usize>,
    end: usize,
    buffer: &mut Vec<u8>,
) -> Result<()> {
    for position in stored.start..end {
        for row in kv.rows_mut(layer, position) {
            read_floats(input, row, buffer)?;
        }
    }
    let rest = stored.end.saturating_sub(end.max(stored.start));
    Ok(input.seek_relative((4 * rest * kv.position_floats(layer)) as i64)?)
}

fn read_floats(input: &mut impl Read, row: &mut [f32], buffer: &mut Vec<u8>) -> Result<()> {
    buffer.resize(4 * row.len(), 0);
    input.read_exact(buffer)?;
    for (float, word) in row.iter_mut().zip(buffer.as_chunks::<4>().0) {
        *float = f32::from_le_bytes(*word);
    }
    Ok(())
}
