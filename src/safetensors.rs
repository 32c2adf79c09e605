//! The tensor directory: every `*.safetensors` file of one model, indexed by name.
//!
//! Owns the headers and the open files; reads no tensor data. A [`Directory`] that opened is proof
//! that each tensor's byte span lies inside its file, has exactly the size its dtype and shape ask
//! for, and overlaps no other; that every byte behind a header belongs to one tensor; that no name
//! occurs twice; and that no numbered shard is missing. Anything else is refused, naming the file
//! and the tensors. It also refuses entropy-coded containers, whose spans are compressed streams.
//! `model.safetensors.index.json` is never consulted: names inside the shards decide.

#![forbid(unsafe_code)]

mod dtype;
mod header;
mod mirror;
mod shards;

#[cfg(test)]
mod tests;

use crate::bail;
use crate::error::{Context, Error, Result};
use crate::sys;
use header::Header;
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use dtype::Dtype;
pub use header::{CALIBRATION_KEY, STAMP_KEY};
pub use mirror::Mirror;

/// Most tensors of one model; GLM-5.2 has about 118,500. Bounds the memory of the index.
const TENSORS_MAX: usize = 1 << 20;

/// Files that a run has open beside the shards, at most: its own, and those it reads whole.
const OTHER_FILES_MAX: usize = 16;

/// Files that a run over so many shards may have to open: each shard twice, see
/// [`Directory::add_direct`].
pub fn files_needed(shards: usize) -> usize {
    2 * shards + OTHER_FILES_MAX
}

/// Where one tensor's bytes are and what they mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Index of the shard, in byte order of the file names.
    pub shard: u32,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Length in bytes: the product of `shape` times the size of `dtype`.
    pub bytes: u64,
    /// Element type as stored; quantized weights are `U8` with a one-dimensional shape.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Box<[usize]>,
}

impl Tensor {
    /// Number of elements: the product of the shape (1 for a scalar).
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&dim| dim as u64).product()
    }
}

/// One open file of the directory.
#[derive(Debug)]
pub struct Shard {
    /// Path of the file, the directory's path included.
    pub path: PathBuf,
    /// Open for reading.
    pub file: File,
    /// Open for reading around the page cache, if that was asked for and is possible.
    pub direct: Option<File>,
    /// Length of the file when it was opened.
    pub bytes: u64,
    /// Gigabytes a second of its drive, as far as reads are shared with [`Mirror`]s.
    pub gbs: f64,
}

impl Shard {
    /// Opens a regular file.
    fn open(path: &Path) -> Result<Shard> {
        // Asked before opening, because opening a pipe would block.
        if !std::fs::metadata(path)?.is_file() {
            bail!("expected a regular file");
        }
        let file = File::open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Shard { path: path.to_path_buf(), file, direct: None, bytes, gbs: 1.0 })
    }

    /// The length word and the header of a file whose header was found right.
    pub fn header(&self) -> Result<Vec<u8>> {
        let mut word = [0; 8];
        self.file.read_exact_at(&mut word, 0)?;
        let end = u64::from_le_bytes(word).saturating_add(8).min(self.bytes);
        let mut header = vec![0; end as usize];
        self.file.read_exact_at(&mut header, 0)?;
        Ok(header)
    }
}

/// All tensors of a model directory.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    shards: Vec<Shard>,
    mirrors: Vec<Mirror>,
    /// By shard, then by offset.
    tensors: Vec<(Arc<str>, Tensor)>,
    /// Name to position in `tensors`.
    index: HashMap<Arc<str>, u32>,
    /// Tensor name to format name, from the shards' `colibri.fmt` metadata.
    stamps: HashMap<String, String>,
    calibration: Option<String>,
}

impl Directory {
    /// Opens every shard of `dir` and checks every header; see the module text for what is refused.
    pub fn open(dir: &Path) -> Result<Directory> {
        Directory::open_split(dir, &[])
    }

    /// The same for a model whose shards lie in `dir` and in `more` directories. Further errors: a
    /// file name in two of them; one of `more` without a shard.
    pub fn open_split(dir: &Path, more: &[PathBuf]) -> Result<Directory> {
        let dirs: Vec<&Path> = [dir].into_iter().chain(more.iter().map(PathBuf::as_path)).collect();
        Directory::open_files(dir, &shards::list(&dirs)?)
    }

    /// The same for these files alone, in this order; one of a numbered family may be missing.
    /// `dir` is where the model is said to be.
    pub fn open_files(dir: &Path, paths: &[PathBuf]) -> Result<Directory> {
        let mut directory = Directory {
            path: dir.to_path_buf(),
            shards: Vec::new(),
            mirrors: Vec::new(),
            tensors: Vec::new(),
            index: HashMap::new(),
            stamps: HashMap::new(),
            calibration: None,
        };
        sys::raise_file_limit(files_needed(paths.len())).context(|| dir.display())?;
        for path in paths {
            directory.add_shard(path).context(|| path.display())?;
        }
        Ok(directory)
    }

    /// Opens every file once more, with `open`, for reads around the page cache; where that fails,
    /// reads go through it.
    pub fn add_direct(&mut self, open: impl Fn(&Path) -> std::io::Result<File>) {
        for shard in self.files_mut() {
            shard.direct = open(&shard.path).ok();
        }
    }

    /// Whether any file is read around the page cache.
    pub fn is_direct(&self) -> bool {
        (0..self.shards.len()).any(|i| self.is_shard_direct(i))
    }

    /// Whether a shard or a copy of it is.
    pub fn is_shard_direct(&self, shard: usize) -> bool {
        let mut copies = self.copies(shard).map(|(_, copy)| copy);
        self.shards[shard].direct.is_some() || copies.any(|copy| copy.direct.is_some())
    }

    /// The path of the model directory as given, that of the first where shards are split.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensor of exactly this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        let position = *self.index.get(name)?;
        Some(&self.tensors[position as usize].1)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is no tensor at all (shards of zero tensors are legal).
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Names and tensors, by shard and then by offset.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (&**name, tensor))
    }

    /// All shards, in byte order of their names.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The largest shard, the last of several; there is at least one shard.
    pub fn largest_shard(&self) -> &Shard {
        self.shards.iter().max_by_key(|shard| shard.bytes).expect("a directory has shards")
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).sum()
    }

    /// The file that holds `tensor`, which must come from this directory.
    pub fn shard(&self, tensor: &Tensor) -> &Shard {
        &self.shards[tensor.shard as usize]
    }

    /// The format name the converter stamped on a tensor (metadata `colibri.fmt`), if any.
    pub fn stamp(&self, name: &str) -> Option<&str> {
        self.stamps.get(name).map(String::as_str)
    }

    /// The shape of the model that a calibration file was made with (metadata
    /// `colibri.calibration`), if any.
    pub fn calibration(&self) -> Option<&str> {
        self.calibration.as_deref()
    }

    fn add_shard(&mut self, path: &Path) -> Result<()> {
        let file = Shard::open(path)?;
        let Header { entries, data_start, stamps, calibration } =
            header::read(&file.file, file.bytes)?;
        let shard = u32::try_from(self.shards.len()).expect("the number of shards is capped");
        self.shards.push(file);
        self.calibration = calibration.or(self.calibration.take());
        if self.tensors.len() + entries.len() > TENSORS_MAX {
            bail!("more than {TENSORS_MAX} tensors in the shards up to this one");
        }
        self.tensors.reserve(entries.len());
        self.index.reserve(entries.len());
        for entry in entries {
            let name: Arc<str> = entry.name.into();
            let position = u32::try_from(self.tensors.len()).expect("capped above");
            if let Some(first) = self.index.insert(name.clone(), position) {
                return Err(self.duplicate(&name, first));
            }
            let tensor = Tensor {
                shard,
                offset: data_start + entry.begin,
                bytes: entry.end - entry.begin,
                dtype: entry.dtype,
                shape: entry.shape,
            };
            self.tensors.push((name, tensor));
        }
        for (name, format) in stamps {
            match self.stamps.get(&name) {
                Some(known) if *known != format => bail!(
                    "metadata colibri.fmt: tensor {name} is stamped {format:?}, elsewhere {known:?}"
                ),
                _ => self.stamps.insert(name, format),
            };
        }
        Ok(())
    }

    /// The error for a name met again, whose first tensor is at position `first`.
    fn duplicate(&self, name: &str, first: u32) -> Error {
        let file = self.shard(&self.tensors[first as usize].1).path.display();
        Error::new(format!("tensor {name}: defined here and in {file}"))
    }
}
