//! The record of a conversion, `.coli_convert.json` in the output directory: what was asked for,
//! the source files, and of every output its size and, once it is whole, its hash.
//!
//! A source file is bound by its name, its length and the hash of its header: other tensors, or
//! other places of them, are seen; other numbers at the same places are not.
//!
//! An output's hash is written before the output gets its name: a file with its final name is
//! finished, one that is still `NAME.partial` may be. The record itself is replaced in one step.

#![forbid(unsafe_code)]

use crate::bail;
use crate::disk::read_exact_at;
use crate::error::{Context, Error, Result};
use crate::json::{self, Limits, Value, object, to_compact};
use crate::safetensors::{Directory, Shard};
use crate::sys;
use std::path::Path;

/// Name of the file.
pub const FILE_NAME: &str = ".coli_convert.json";
/// What stands behind the name of an output that is not finished.
pub const PARTIAL: &str = ".partial";

/// Changes whenever the same request would give other bytes, or a record says something else.
const FORMAT: usize = 2;
const FILE_BYTES_MAX: usize = 16 << 20;

/// One file of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Within the source directory.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// [`hash_header`] of it.
    pub header_hash: u64,
}

/// One file of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Within the output directory.
    pub name: String,
    /// The source file that it is made of.
    pub source: usize,
    /// Every source file that it cannot be made without, ascending.
    pub needs: Vec<usize>,
    /// Its length.
    pub bytes: u64,
    /// [`Hash`] of its content, once that is written.
    pub hash: Option<u64>,
}

/// The whole record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Name and value of everything that decides bytes.
    pub settings: Vec<(String, String)>,
    /// In byte order of their names.
    pub sources: Vec<SourceFile>,
    /// In the order in which they are made.
    pub outputs: Vec<Record>,
}

impl Manifest {
    /// Reads that of `dir`; `None` when there is none. Errors name the file.
    pub fn read(dir: &Path) -> Result<Option<Manifest>> {
        let path = dir.join(FILE_NAME);
        if !sys::is_present(&path) {
            return Ok(None);
        }
        let read = || {
            let bytes = sys::read_file(&path, FILE_BYTES_MAX)?;
            let value = json::parse(&bytes, Limits::default())?;
            if value.get("format").and_then(Value::as_u64) != Some(FORMAT as u64) {
                bail!(
                    "format: expected {FORMAT}: another version began this conversion: finish it \
                     with that one, or choose another --to"
                );
            }
            let why = "not the record of a conversion: choose another --to";
            parse(&value).ok_or_else(|| Error::new(why))
        };
        read().map(Some).context(|| path.display())
    }

    /// Replaces that of `dir`.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let string = |text: &str| Value::String(text.into());
        let hex = |hash: u64| Value::String(format!("{hash:016x}"));
        let source = |file: &SourceFile| {
            object(vec![
                ("name", string(&file.name)),
                ("bytes", (file.bytes as usize).into()),
                ("header_hash", hex(file.header_hash)),
            ])
        };
        let output = |record: &Record| {
            object(vec![
                ("name", string(&record.name)),
                ("source", record.source.into()),
                ("needs", Value::Array(record.needs.iter().map(|i| (*i).into()).collect())),
                ("bytes", (record.bytes as usize).into()),
                ("hash", record.hash.map(hex).into()),
            ])
        };
        let settings = self.settings.iter().map(|(name, value)| (&**name, string(value)));
        let value = object(vec![
            ("format", FORMAT.into()),
            ("settings", object(settings.collect())),
            ("sources", Value::Array(self.sources.iter().map(source).collect())),
            ("outputs", Value::Array(self.outputs.iter().map(output).collect())),
        ]);
        let path = dir.join(FILE_NAME);
        sys::replace_file(&path, (to_compact(&value) + "\n").as_bytes()).context(|| path.display())
    }
}

fn parse(value: &Value) -> Option<Manifest> {
    let index = |value: &Value| usize::try_from(value.as_u64()?).ok();
    let name = |value: &Value| {
        let name = value.get("name")?.as_str()?;
        // A name, not a way out of its directory.
        (!name.contains('/') && !name.starts_with('.')).then(|| name.to_string())
    };
    let unhex = |value: &Value| u64::from_str_radix(value.as_str()?, 16).ok();
    let source = |value: &Value| {
        let (name, bytes) = (name(value)?, value.get("bytes")?.as_u64()?);
        Some(SourceFile { name, bytes, header_hash: unhex(value.get("header_hash")?)? })
    };
    let sources: Vec<SourceFile> =
        value.get("sources")?.as_array()?.iter().map(source).collect::<Option<_>>()?;
    let in_range = |i: usize| (i < sources.len()).then_some(i);
    let output = |value: &Value| {
        let hash = match value.get("hash")? {
            Value::Null => None,
            hash => Some(unhex(hash)?),
        };
        let needs = value.get("needs")?.as_array()?.iter();
        Some(Record {
            name: name(value)?,
            source: in_range(index(value.get("source")?)?)?,
            needs: needs.map(|i| in_range(index(i)?)).collect::<Option<_>>()?,
            bytes: value.get("bytes")?.as_u64()?,
            hash,
        })
    };
    let outputs = value.get("outputs")?.as_array()?.iter().map(output).collect::<Option<_>>()?;
    let setting = |(name, value): &(String, Value)| Some((name.clone(), value.as_str()?.into()));
    let settings =
        value.get("settings")?.as_object()?.iter().map(setting).collect::<Option<_>>()?;
    Some(Manifest { settings, sources, outputs })
}

/// FNV-1a over words of 64 bits: eight times as fast as over bytes, and each step is still a
/// bijection of the state, so that one changed word always changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hash(pub u64);

impl Hash {
    /// Of nothing.
    pub const START: Hash = Hash(0xcbf2_9ce4_8422_2325);

    /// Takes bytes as words, the last padded with zeros: only the last of several calls may bring
    /// a number that is no multiple of eight.
    pub fn add(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(&last);
        for word in words.iter().chain(last) {
            self.0 = (self.0 ^ u64::from_le_bytes(*word)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// The hash of a file is that of the hashes of its parts: its header, and then every tensor in
    /// order. So tensors may be written in any order.
    pub fn of_parts(parts: impl IntoIterator<Item = Hash>) -> u64 {
        let mut hash = Hash::START;
        parts.into_iter().for_each(|part| hash.add(&part.0.to_le_bytes()));
        hash.0
    }
}

/// Bytes that are read at once.
const BLOCK_BYTES: usize = 4 << 20;

/// The [`Hash`] of so many bytes of a file. Errors name the file, and what was read.
fn hash_span(
    shard: &Shard,
    what: &str,
    mut offset: u64,
    mut left: u64,
    buffer: &mut Vec<u8>,
) -> Result<Hash> {
    let mut hash = Hash::START;
    while left > 0 {
        let count = left.min(BLOCK_BYTES as u64);
        buffer.resize(count as usize, 0);
        read_exact_at(&shard.file, &shard.path, what, offset, buffer)?;
        hash.add(buffer);
        offset += count;
        left -= count;
    }
    Ok(hash)
}

/// The [`Hash`] of the header of a shard, its length word included.
pub fn hash_header(shard: &Shard) -> Result<u64> {
    let (mut word, what) = ([0; 8], "header");
    read_exact_at(&shard.file, &shard.path, what, 0, &mut word)?;
    let header_bytes = u64::from_le_bytes(word).saturating_add(8);
    Ok(hash_span(shard, what, 0, header_bytes.min(shard.bytes), &mut Vec::new())?.0)
}

/// Reads a finished output back, from the drive if the system lets go of its copy, and checks
/// every byte. Errors name the file.
pub fn verify(path: &Path, record: &Record) -> Result<()> {
    let directory = Directory::open_files(path, &[path.to_path_buf()])?;
    let shard = &directory.shards()[0];
    let found_bytes = shard.bytes;
    sys::forget_cached(&shard.file, 0, found_bytes as usize);
    let data_start = directory.iter().map(|(_, tensor)| tensor.offset).min();
    let header = (0, data_start.unwrap_or(found_bytes));
    let tensors = directory.iter().map(|(_, tensor)| (tensor.offset, tensor.bytes));
    let (what, mut buffer, mut parts) = ("a check of what was written", Vec::new(), Vec::new());
    for (offset, bytes) in [header].into_iter().chain(tensors) {
        parts.push(hash_span(shard, what, offset, bytes, &mut buffer)?);
    }
    if record.bytes != found_bytes || record.hash != Some(Hash::of_parts(parts)) {
        bail!(
            "{}: its bytes are not those that were written: delete it, and run the same command \
             again",
            path.display()
        );
    }
    Ok(())
}
