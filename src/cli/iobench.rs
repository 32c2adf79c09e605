//! `coli iobench`: what a drive gives when it is read as the engine reads it: blocks of the size of
//! an expert, at scattered places, several at a time, around the page cache and through it.
//!
//! Speeds of the page cache look like those of a very good drive. How much the drive itself
//! delivered is asked of the system, and a row that it did not deliver says so.

#![forbid(unsafe_code)]

use super::load::{self, figure, print_json};
use super::{Args, Flag, Verb, note, print_text};
use crate::bail;
use crate::disk::{open_direct, read_direct};
use crate::error::{Context, Error, Result};
use crate::object;
use crate::sys::{self, Pages};
use std::fs::File;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "iobench",
    positional: "FILE",
    summary: "measure a drive as the engine reads it",
    example: "coli iobench --model /models/glm-5.2 --queue 1,4,8",
    flags: &[
        load::MODEL_FLAGS,
        &[
            Flag::value("--block-mb", "N", "MiB of one read (default 18: an expert of GLM-5.2)"),
            Flag::value("--reads", "N", "reads of each row (default 64)"),
            Flag::value("--queue", "N,N", "reads in flight (default 1,2,4,8,16)"),
            super::JSON,
        ],
    ],
    run,
};

/// Less than this part of the bytes from the drive: the page cache answered.
const FROM_DRIVE_MIN: f64 = 0.9;

/// One measurement.
pub struct Speed {
    /// Gigabytes a second.
    pub gbs: f64,
    /// Whether reads went around the page cache.
    pub is_direct: bool,
    /// Whether the page cache answered some of them all the same, or instead.
    pub is_cached: bool,
}

fn run(args: &Args) -> Result<()> {
    let path = match &args.positional[..] {
        [] => load::directory(args)?.largest_shard().path.clone(),
        [file] => PathBuf::from(file),
        _ => return Err(Error::usage("iobench takes one file")),
    };
    let block_bytes = args.number("--block-mb", 1..=1024usize)?.unwrap_or(18) << 20;
    let reads = args.number("--reads", 1..=1 << 20)?.unwrap_or(64);
    let queues = args.ids("--queue")?.unwrap_or(vec![1, 2, 4, 8, 16]);
    if let Some(queue) = queues.iter().find(|queue| !(1..=256).contains(*queue)) {
        return Err(Error::usage(format!("--queue: expected 1 to 256, found {queue}")));
    }
    let mut rows = Vec::new();
    for is_direct in [true, false] {
        for queue in queues.iter().map(|queue| *queue as usize) {
            let Some(speed) = measure(&path, is_direct, block_bytes, reads, queue)? else {
                note("coli: this file system has no reads around the page cache\n");
                break;
            };
            if !args.has("--json") {
                let cached = ["", "  (from the page cache, not the drive)"];
                print_text(&format!(
                    "{:8}  {queue:3} in flight  {:6.2} GB/s{}\n",
                    speed.mode(),
                    speed.gbs,
                    cached[usize::from(speed.is_cached)]
                ))?;
            }
            rows.push(object! {
                "mode": speed.mode(),
                "queue": queue,
                "gbs": figure(speed.gbs),
                "from_page_cache": speed.is_cached,
            });
        }
    }
    if args.has("--json") {
        let file = path.display().to_string();
        print_json(&object! {
            "file": file, "block_bytes": block_bytes, "reads": reads, "rows": rows,
        })?;
    }
    Ok(())
}

impl Speed {
    fn mode(&self) -> &'static str {
        if self.is_direct { "direct" } else { "buffered" }
    }
}

/// Reads `reads` blocks of `path` at scattered places, `queue` of them at a time. `None` when the
/// file system refuses reads around the page cache. Errors: a file shorter than a block; a failed
/// read.
pub fn measure(
    path: &Path,
    is_direct: bool,
    block_bytes: usize,
    reads: usize,
    queue: usize,
) -> Result<Option<Speed>> {
    let name = || path.display().to_string();
    let opened = if is_direct { open_direct(path) } else { File::open(path) };
    if opened.is_err() && is_direct && path.exists() {
        return Ok(None);
    }
    let file = opened.context(name)?;
    let blocks = file.metadata()?.len() as usize / block_bytes;
    if blocks == 0 {
        bail!("{}: shorter than one block of {block_bytes} bytes", name());
    }
    let next = AtomicUsize::new(0);
    let read = || -> Result<()> {
        let mut buffer = Pages::<u8>::new(block_bytes)?;
        loop {
            let i = next.fetch_add(1, Relaxed);
            if i >= reads {
                return Ok(());
            }
            // A step that shares no factor with most counts visits the blocks in no order.
            let offset = i * 7919 % blocks * block_bytes;
            if !read_direct(&file, offset as u64, &mut buffer, block_bytes) {
                bail!("{}: a read of {block_bytes} bytes failed", name());
            }
        }
    };
    let (before, start) = (sys::drive_bytes_read(), Instant::now());
    thread::scope(|scope| {
        let readers: Vec<_> = (0..queue.min(reads)).map(|_| scope.spawn(read)).collect();
        readers.into_iter().try_for_each(|r| r.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let bytes = (reads * block_bytes) as f64;
    let from_drive = before.zip(sys::drive_bytes_read()).map(|(before, now)| (now - before) as f64);
    let is_cached = from_drive.is_some_and(|from_drive| from_drive < FROM_DRIVE_MIN * bytes);
    Ok(Some(Speed { gbs: bytes / 1e9 / seconds, is_direct, is_cached }))
}
