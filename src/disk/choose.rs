//! Whether experts are read around the page cache or through it.
//!
//! Around it, a container that is larger than memory does not push out what is in use, and memory
//! is what the plan says. Through it, a second run finds what the first one read. Drives and file
//! systems differ, so a short probe reads some blocks both ways.

#![forbid(unsafe_code)]

use super::{DIRECT_ALIGN, open_direct, read_direct};
use crate::bail;
use crate::error::{Error, Result};
use crate::memory::Available;
use crate::safetensors::{Directory, Shard};
use crate::sys::Pages;
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
/// Around the page cache may be this much slower and is still taken for a container that is larger
/// than memory: what the page cache holds now, it cannot hold all along.
const SLOWER_MAX: f64 = 2.0;

/// Prepares `directory` for reads as `direct` says. Returns what was chosen by a probe, and why;
/// `None` when there was no choice. Error: reads around the page cache are refused but wanted.
pub fn prepare(directory: &mut Directory, direct: Direct) -> Result<Option<String>> {
    let largest = directory.shards().iter().max_by_key(|shard| shard.bytes);
    let Some(largest) = largest.filter(|_| direct != Direct::Off) else { return Ok(None) };
    if direct == Direct::On {
        if let Err(error) = open_direct(&largest.path) {
            bail!("{}: reads around the page cache: {error}", largest.path.display());
        }
        directory.add_direct(open_direct);
        return Ok(None);
    }
    // In small files there is nothing to gain, and no room for a probe.
    if largest.bytes < (4 * BLOCKS * BLOCK_BYTES) as u64 {
        return Ok(None);
    }
    let bytes: u64 = directory.shards().iter().map(|shard| shard.bytes).sum();
    let is_larger = Available::now().is_some_and(|memory| bytes > memory.bytes as u64);
    let speeds = probe(largest)?;
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
    Ok(Some(format!("experts are read {name} ({why})")))
}

/// Gigabytes a second around the page cache (0 when that is refused) and through it, of blocks
/// at different places.
fn probe(shard: &Shard) -> Result<[f64; 2]> {
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
