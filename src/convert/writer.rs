//! The last stage: files of the output, from the first byte to their names, and the source files
//! that are not needed any more.
//!
//! A file is written as `NAME.partial`, flushed to the drive, recorded with its hash, and only
//! then renamed. So whatever happens, a recorded file is whole, under one of its two names, and
//! what is not recorded is made anew.

#![forbid(unsafe_code)]

use super::manifest::{Hash, Manifest, PARTIAL, Record, verify};
use super::pipeline::{Message, Rows, check_interrupt};
use super::plan::{Output, Tensor};
use super::{METADATA_BYTES_MAX, METADATA_FILES, Request};
use crate::bail;
use crate::error::{Context, Error, Result};
use crate::plan::gb;
use crate::sys;
use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender};

/// Bytes after which the drive is asked to have what was written: it works while we do, instead of
/// all at once at the end of a file.
const SYNC_BYTES: usize = 64 << 20;

/// What happened.
pub enum Event<'a> {
    /// So many more bytes of the source were fetched.
    Fetched(u64),
    /// So many more bytes of the source are done.
    Done(u64),
    /// A file of the output is finished.
    Finished(&'a Record),
    /// A source file was deleted.
    Deleted(&'a Path),
}

/// The output that is being written.
struct Open {
    path: PathBuf,
    file: File,
    /// Of its parts: the header, then every tensor.
    hashes: Vec<Hash>,
    unsynced_bytes: usize,
}

/// The writing stage.
pub struct Writer<'a, F> {
    request: &'a Request,
    manifest: Manifest,
    /// Hears what happens.
    pub on_event: F,
    open: Option<Open>,
    /// Outputs that were read back.
    verified: BTreeSet<usize>,
    /// Of the output directory; holds the lock on it.
    dir: File,
}

impl<'a, F: FnMut(Event<'_>)> Writer<'a, F> {
    /// Makes the directory, copies what is not tensors, and gives finished files their names; what
    /// is there already is not written again, so that a finished directory may be read-only.
    /// Errors: another conversion writes there, or did since the record was as `begun`; what was
    /// finished is no longer whole.
    pub fn new(
        request: &'a Request,
        manifest: Manifest,
        begun: Option<Manifest>,
        on_event: F,
    ) -> Result<Self> {
        let to = &request.to;
        std::fs::create_dir_all(to).context(|| to.display())?;
        let dir = File::open(to).context(|| to.display())?;
        match dir.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!("{}: another conversion writes there: wait for its end", to.display())
            }
            Err(TryLockError::Error(error)) => return Err(error).context(|| to.display()),
        }
        if Manifest::read(to)? != begun {
            let to = to.display();
            bail!("{to}: another conversion wrote there meanwhile: run the same command again");
        }
        if begun.as_ref() != Some(&manifest) {
            manifest.write(to)?;
        }
        let verified = BTreeSet::new();
        let mut writer = Writer { request, manifest, on_event, open: None, verified, dir };
        for name in METADATA_FILES {
            let (source, target) = (request.from.join(name), to.join(name));
            if sys::is_present(&source) && !sys::is_present(&target) {
                let bytes = sys::read_file(&source, METADATA_BYTES_MAX);
                let bytes = bytes.context(|| source.display())?;
                sys::replace_file(&target, &bytes).context(|| target.display())?;
            }
        }
        writer.settle()?;
        Ok(writer)
    }

    /// Goes on where an earlier run was stopped behind the last byte of a file.
    fn settle(&mut self) -> Result<()> {
        for i in 0..self.manifest.outputs.len() {
            let record = &self.manifest.outputs[i];
            let path = self.request.to.join(&record.name);
            if record.hash.is_some() && !sys::is_present(&path) {
                let partial = self.partial(i);
                verify(&partial, record)?;
                std::fs::rename(&partial, &path).context(|| path.display())?;
                self.verified.insert(i);
            }
        }
        self.free_sources()
    }

    /// Writes what arrives; gives buffers back through `free`.
    pub fn run(&mut self, blocks: Receiver<Message<'_>>, free: Sender<Vec<u8>>) -> Result<()> {
        for message in blocks {
            check_interrupt()?;
            match message {
                Message::Rows(rows) => {
                    self.write(&rows)?;
                    let format = rows.tensor.source.format;
                    let cols = rows.tensor.source.cols;
                    let scale_bytes = format.scale_bytes(rows.rows, cols);
                    let bytes = rows.rows * format.row_bytes(cols) + scale_bytes;
                    (self.on_event)(Event::Done(bytes as u64));
                    // The encoder may have ended.
                    let _ = free.send(rows.bytes);
                }
                Message::End(output) => self.finish(output)?,
            }
        }
        Ok(())
    }

    fn partial(&self, index: usize) -> PathBuf {
        self.request.to.join(format!("{}{PARTIAL}", self.manifest.outputs[index].name))
    }

    /// Begins a file unless it is begun. Error: no room.
    fn open(&mut self, output: &Output) -> Result<&mut Open> {
        if self.open.is_none() {
            // What an earlier run left of it makes room first.
            let path = self.partial(output.index);
            let file = File::create(&path).context(|| path.display())?;
            let record = &self.manifest.outputs[output.index];
            check_room(self.request, &record.name, record.bytes)?;
            let last = |tensor: &Tensor| tensor.weights.1.max(tensor.scales.1);
            let parts = 1 + output.tensors.iter().map(last).max().unwrap_or(0);
            let hashes = vec![Hash::START; parts];
            let mut open = Open { path, file, hashes, unsynced_bytes: 0 };
            open.write(0, 0, &output.header)?;
            self.open = Some(open);
        }
        Ok(self.open.as_mut().expect("just opened"))
    }

    fn write(&mut self, rows: &Rows<'_>) -> Result<()> {
        let Rows { tensor, first, rows: count, bytes, output } = rows;
        let cols = tensor.source.cols;
        let (row_bytes, scales) = (tensor.format.row_bytes(cols), tensor.format);
        let (weight_bytes, scale_bytes) = bytes.split_at(count * row_bytes);
        let open = self.open(output)?;
        let (offset, part) = tensor.weights;
        open.write(part, offset + (first * row_bytes) as u64, weight_bytes)?;
        if !scale_bytes.is_empty() {
            let (offset, part) = tensor.scales;
            open.write(part, offset + scales.scale_bytes(*first, cols) as u64, scale_bytes)?;
        }
        Ok(())
    }

    /// Flushes, records, renames.
    fn finish(&mut self, output: &Output) -> Result<()> {
        self.open(output)?;
        let Open { path, file, hashes, .. } = self.open.take().expect("just opened");
        file.sync_all().map_err(|error| cannot_write(&path, error))?;
        let record = &mut self.manifest.outputs[output.index];
        let found = file.metadata().context(|| path.display())?.len();
        assert_eq!(found, record.bytes, "{} is as long as planned", record.name);
        record.hash = Some(Hash::of_parts(hashes));
        let target = self.request.to.join(&record.name);
        self.manifest.write(&self.request.to)?;
        std::fs::rename(&path, &target).context(|| target.display())?;
        self.dir.sync_all().context(|| self.request.to.display())?;
        sys::forget_cached(&file, 0, found as usize);
        (self.on_event)(Event::Finished(&self.manifest.outputs[output.index]));
        self.free_sources()
    }

    /// Deletes every source file that no unfinished output needs, if that was asked for, once all
    /// that was made of it has been read back.
    fn free_sources(&mut self) -> Result<()> {
        let sources = if self.request.delete_source { self.manifest.sources.len() } else { 0 };
        for source in 0..sources {
            let path = self.request.from.join(&self.manifest.sources[source].name);
            let outputs = self.manifest.outputs.iter().enumerate();
            let made: Vec<_> = outputs.filter(|(_, o)| o.needs.contains(&source)).collect();
            if made.iter().any(|(_, output)| output.hash.is_none()) || !sys::is_present(&path) {
                continue;
            }
            for (i, record) in made {
                if !self.verified.contains(&i) {
                    check_interrupt()?;
                    verify(&self.request.to.join(&record.name), record)?;
                    self.verified.insert(i);
                }
            }
            // A download cache links to its files from elsewhere.
            let file = path.canonicalize().context(|| path.display())?;
            std::fs::remove_file(&file).context(|| file.display())?;
            if file != path && path.is_symlink() {
                std::fs::remove_file(&path).context(|| path.display())?;
            }
            (self.on_event)(Event::Deleted(&path));
        }
        Ok(())
    }
}

impl Open {
    /// Writes bytes of a part, which arrive in order within it.
    fn write(&mut self, part: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let failed = |error| cannot_write(&self.path, error);
        self.file.write_all_at(bytes, offset).map_err(failed)?;
        self.hashes[part].add(bytes);
        self.unsynced_bytes += bytes.len();
        if self.unsynced_bytes >= SYNC_BYTES {
            self.file.sync_data().map_err(failed)?;
            self.unsynced_bytes = 0;
        }
        Ok(())
    }
}

/// Refuses to begin a file of so many bytes where there is no room.
pub fn check_room(request: &Request, name: &str, bytes: u64) -> Result<()> {
    let (to, keep_free) = (&request.to, request.keep_free_bytes);
    if let Some(free) = sys::disk_free_bytes(to)
        && free < bytes.saturating_add(keep_free)
    {
        bail!(
            "{}: {} free, {name} takes {} and --keep-free {}: make room, and run the same command \
             again",
            to.display(),
            gb(free as usize),
            gb(bytes as usize),
            gb(keep_free as usize)
        );
    }
    Ok(())
}

/// The error of a write, with what a person can do.
fn cannot_write(path: &Path, error: std::io::Error) -> Error {
    let is_room = [ErrorKind::StorageFull, ErrorKind::FileTooLarge, ErrorKind::QuotaExceeded];
    let step = if is_room.contains(&error.kind()) { "make room" } else { "mend that" };
    Error::new(format!("{}: {error}: {step}, and run the same command again", path.display()))
}
