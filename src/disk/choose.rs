//! Whether experts are read around the page cache or through it, and from which drives.
//!
//! Around it, a container that is larger than memory does not push out what is in use, and memory
//! is what the plan says. Through it, a second run finds what the first one read. Drives and file
//! systems differ, so a short probe reads some blocks both ways. Where there are mirrors, every
//! drive is probed, and gets its share of the reads by its speed.

#![forbid(unsafe_code)]

use super::{DIRECT_ALIGN, open_direct, read_direct};
use crate::bail;
use crate::error::{Error, Result};
use crate::memory::Available;
use crate::safetensors::{Directory, Shard};
use crate::sys::Pages;
use std::path::Path;
use std::time::Instant;

/// How the page cache is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// A probe decides.
    #[default]
    Auto,
    /// Around it; an error where the file system refuses.
    On,
    /// Through it.
    Off,
}

impl std::str::FromStr for Direct {
    type Err = Error;

    fn from_str(name: &str) -> Result<Direct> {
        Ok(match name {
            "auto" => Direct::Auto,
            "on" => Direct::On,
            "off" => Direct::Off,
            other => bail!("expected auto, on or off, found {other:?}"),
        })
    }
}

/// One read of the probe.
const BLOCK_BYTES: usize = 4 << 20;
/// Reads of each kind.
const BLOCKS: usize = 6;
/// In smaller files there is nothing to gain, and no room for a probe.
pub const PROBE_BYTES_MIN: u64 = (4 * BLOCKS * BLOCK_BYTES) as u64;
/// Around the page cache may be this much slower and is still taken for a container that is larger
/// than memory: what the page cache holds now, it cannot hold all along.
const SLOWER_MAX: f64 = 2.0;

/// Slower than any drive: of one that fails the probe.
const GBS_MIN: f64 = 1e-3;

/// Prepares `directory` for reads as `direct` says. Returns what was chosen by probes, and why;
/// `None` when there was no choice. Error: reads around the page cache are refused but wanted.
pub fn prepare(directory: &mut Directory, direct: Direct) -> Result<Option<String>> {
    let mut notes = Vec::new();
    let path = directory.largest_shard().path.clone();
    if direct == Direct::On {
        if let Err(error) = open_direct(&path) {
            bail!("{}: reads around the page cache: {error}", path.display());
        }
        directory.add_direct(open_direct);
    }
    if direct == Direct::Auto || directory.is_mirrored() {
        let speeds = measure(directory, &path)?;
        if direct == Direct::Auto
            && let Some(speeds) = speeds
        {
            notes.push(choose(directory, speeds));
        }
    }
    notes.extend(directory.mirror_notes());
    Ok((!notes.is_empty()).then(|| notes.join("; ")))
}

/// Chooses by the speeds of [`probe`]; returns the choice in words.
fn choose(directory: &mut Directory, speeds: [f64; 2]) -> String {
    let is_larger = Available::now().is_some_and(|memory| directory.bytes() > memory.bytes as u64);
    let (is_direct, why) = match speeds {
        [0.0, _] => (false, "the file system has no direct reads".into()),
        [direct, buffered] => {
            let speeds = format!("{direct:.1} GB/s direct, {buffered:.1} GB/s buffered");
            match is_larger {
                true => (direct * SLOWER_MAX > buffered, format!("larger than memory; {speeds}")),
                false => (direct > buffered, speeds),
            }
        }
    };
    if is_direct {
        directory.add_direct(open_direct);
    }
    let name = if is_direct { "direct" } else { "buffered" };
    format!("experts are read {name} ({why})")
}

/// Probes each directory's drive, in its largest file. Returns the speeds of the one at `path`, a
/// file of that size; `None` where all files are small: there is nothing to gain, and no room.
fn measure(directory: &mut Directory, path: &Path) -> Result<Option<[f64; 2]>> {
    let mut speeds = None;
    let mut files: Vec<&mut Shard> = directory.files_mut().collect();
    files.sort_by(|a, b| (a.path.parent(), b.bytes).cmp(&(b.path.parent(), a.bytes)));
    for drive in files.chunk_by_mut(|a, b| a.path.parent() == b.path.parent()) {
        if drive[0].bytes < PROBE_BYTES_MIN {
            continue;
        }
        let [direct, buffered] = probe(drive[0])?;
        // The page cache would look like a very good drive.
        let gbs = if direct > 0.0 { direct } else { buffered };
        drive.iter_mut().for_each(|file| file.gbs = gbs.max(GBS_MIN));
        if path.parent() == drive[0].path.parent() {
            speeds = Some([direct, buffered]);
        }
    }
    Ok(speeds)
}

/// Gigabytes a second around the page cache and through it, of blocks at different places of a
/// shard of at least [`PROBE_BYTES_MIN`]; 0 where reads are refused or fail.
pub fn probe(shard: &Shard) -> Result<[f64; 2]> {
    let mut buffer = Pages::<u8>::new(BLOCK_BYTES)?;
    let stride = shard.bytes as usize / (2 * BLOCKS) / DIRECT_ALIGN * DIRECT_ALIGN;
    let direct = open_direct(&shard.path);
    let mut speeds = [0.0; 2];
    for (way, speed) in speeds.iter_mut().enumerate() {
        let file = if way == 0 { direct.as_ref().ok() } else { Some(&shard.file) };
        let Some(file) = file else { continue };
        let start = Instant::now();
        let blocks = (0..BLOCKS).map(|i| ((2 * i + way) * stride) as u64);
        if blocks.into_iter().all(|at| read_direct(file, at, &mut buffer, BLOCK_BYTES)) {
            *speed = (BLOCKS * BLOCK_BYTES) as f64 / 1e9 / start.elapsed().as_secs_f64();
        }
    }
    Ok(speeds)
}
