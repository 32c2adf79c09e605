//! `coli iobench`: what a drive gives when it is read as the engine reads it: blocks of the size of
//! an expert, at scattered places, several at a time, around the page cache and through it.
//!
//! Speeds of the page cache look like those of a very good drive. How much the drive itself
//! delivered is asked of the system, and a row that it did not deliver says so.

#![forbid(unsafe_code)]

use super::load::{self, count, float, object, print_json};
use super::{Args, Flag, Verb, note, print_text};
use crate::bail;
use crate::disk::{Readers, open_direct, read_direct};
use crate::error::{Context, Error, Result};
use crate::json::Value;
use crate::sys::{self, Pages};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
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
                print_text(&row_text(&speed, queue))?;
            }
            rows.push(row_value(&speed, queue));
        }
    }
    if args.has("--json") {
        let file = Value::String(path.display().to_string());
        let rows = Value::Array(rows);
        let block = count(block_bytes);
        let fields = vec![("file", file), ("block_bytes", block), ("reads", count(reads))];
        print_json(&object(fields.into_iter().chain([("rows", rows)]).collect()))?;
    }
    Ok(())
}

fn row_text(speed: &Speed, queue: usize) -> String {
    let mode = if speed.is_direct { "direct" } else { "buffered" };
    let cached = if speed.is_cached { "  (from the page cache, not the drive)" } else { "" };
    format!("{mode:8}  {queue:3} in flight  {:6.2} GB/s{cached}\n", speed.gbs)
}

fn row_value(speed: &Speed, queue: usize) -> Value {
    let mode = if speed.is_direct { "direct" } else { "buffered" };
    object(vec![
        ("mode", Value::String(mode.into())),
        ("queue", count(queue)),
        ("gbs", float(speed.gbs)),
        ("from_page_cache", Value::Bool(speed.is_cached)),
    ])
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
    let file = match is_direct {
        true => match open_direct(path) {
            Ok(file) => file,
            Err(_) if path.exists() => return Ok(None),
            Err(error) => return Err(error).context(name),
        },
        false => File::open(path).context(name)?,
    };
    let blocks = file.metadata()?.len() as usize / block_bytes;
    if blocks == 0 {
        bail!("{}: shorter than one block of {block_bytes} bytes", name());
    }
    let file = Arc::new(file);
    let readers = Readers::new(queue)?;
    // Buffers go round: each job has one and gives it back.
    let mut buffers = Vec::new();
    for _ in 0..queue.min(reads) {
        buffers.push(Pages::<u8>::new(block_bytes)?);
    }
    let (before, start) = (sys::drive_bytes_read(), Instant::now());
    let (mut begun, mut ended) = (0, 0);
    while ended < reads {
        while begun < reads
            && let Some(buffer) = buffers.pop()
        {
            // A step that shares no factor with most counts visits the blocks in no order.
            let offset = begun * 7919 % blocks * block_bytes;
            let (file, mut buffer) = (Arc::clone(&file), Some(buffer));
            readers.submit(move |_| {
                let mut buffer = buffer.take()?;
                Some((read_direct(&*file, offset as u64, &mut buffer, block_bytes), buffer))
            });
            begun += 1;
        }
        let (is_read, buffer) = readers.take();
        if !is_read {
            bail!("{}: a read of {block_bytes} bytes failed", name());
        }
        buffers.push(buffer);
        ended += 1;
    }
    let seconds = start.elapsed().as_secs_f64();
    let bytes = (reads * block_bytes) as f64;
    let from_drive = before.zip(sys::drive_bytes_read()).map(|(before, now)| (now - before) as f64);
    let is_cached = from_drive.is_some_and(|from_drive| from_drive < FROM_DRIVE_MIN * bytes);
    Ok(Some(Speed { gbs: bytes / 1e9 / seconds, is_direct, is_cached }))
}
