//! Checks of the machine: program, memory, drives and limits.

#![forbid(unsafe_code)]

use super::{Finding, Part, Status, Subject, needs};
use crate::cli::iobench;
use crate::cli::load::{count, float};
use crate::disk::{self, PROBE_BYTES_MIN};
use crate::error::Context;
use crate::json::Value;
use crate::plan::gb;
use crate::safetensors::files_needed;
use crate::sys;
use crate::weights::Mlp;
use std::path::{Path, PathBuf};

/// With less room than this a disk is as good as full.
const FREE_BYTES_MIN: u64 = 1_000_000_000;

/// Whether anything can be kept beside the model.
pub fn persistence(subject: &Subject) -> Part<Finding> {
    Ok(match sys::is_writable(subject.dir) {
        true => Finding::pass("the directory is writable"),
        false => Finding::warn("the directory is read-only: no state can be kept beside the model"),
    })
}

/// The program that computes is this one.
pub fn engine(subject: &Subject) -> Part<Finding> {
    let path = std::env::current_exe().context(|| "the path of this program")?;
    let (isa, threads) = (subject.options.isa, subject.options.threads);
    let summary = format!("coli {}, {isa}, {threads} threads", crate::VERSION);
    let details = vec![("path", Value::String(path.display().to_string()))];
    Ok(Finding::pass(summary).with(details))
}

/// Whether the file system has room left.
pub fn disk(subject: &Subject) -> Part<Finding> {
    let directory = needs(&subject.directory, "model.shards")?;
    let Some(free) = sys::disk_free_bytes(subject.dir) else {
        return Err(Finding::skip("the file system does not say what is free"));
    };
    let (available, model) = (count(free as usize), count(directory.bytes() as usize));
    let summary = format!("{} free", gb(free as usize));
    let status = if free < FREE_BYTES_MIN { Status::Warn } else { Status::Pass };
    let details = vec![("available_bytes", available), ("model_bytes", model)];
    Ok(Finding::new(status, summary).with(details))
}

/// Whether a run fits, by the plan that it would make.
pub fn ram(subject: &Subject) -> Part<Finding> {
    let report = subject.report.as_ref().map_err(Finding::clone)?;
    let total = gb(report.plan.total_bytes());
    let (available, finding) = match &report.available {
        Some(free) => {
            let left = format!("{total} of {} left ({})", gb(free.bytes), free.bound);
            (count(free.bytes), Finding::pass(left))
        }
        None => (Value::Null, Finding::warn(format!("{total}; what is left is not known"))),
    };
    Ok(finding.with(vec![
        ("available_bytes", available),
        ("budget_bytes", count(report.plan.ram_bytes)),
        ("cache_slots_per_layer", count(report.slots_per_layer())),
    ]))
}

/// Whether each layer has room for its experts. That most of them stay on disk is as it should be.
pub fn placement(subject: &Subject) -> Part<Finding> {
    let report = needs(&subject.report, "memory.ram")?;
    let status = if report.is_starved() { Status::Warn } else { Status::Pass };
    Ok(match &report.warnings()[..] {
        [] => Finding::pass("everything fits into memory"),
        warnings => Finding::new(status, warnings.join("; ")),
    })
}

/// Whether the shards lie on a drive with fast access to any place.
pub fn kind(subject: &Subject) -> Part<Finding> {
    let directory = needs(&subject.directory, "model.shards")?;
    let path = std::path::absolute(&directory.largest_shard().path);
    let path = path.and_then(|path| path.canonicalize()).context(|| "the largest shard")?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let Some(mount) = Mount::of(&mounts, &path) else {
        return Err(Finding::skip("the system does not say what is mounted"));
    };
    Ok(mount.finding(is_rotational(&mount)))
}

/// A mounted file system, as a line of `/proc/self/mountinfo` has it:
/// `ID PARENT DEVICE ROOT POINT … - TYPE SOURCE OPTIONS`.
#[derive(Debug, PartialEq, Eq)]
struct Mount<'a> {
    device: &'a str,
    file_system: &'a str,
    source: &'a str,
}

/// File systems that another machine serves, or a host to its guest.
const NETWORK: [&str; 10] =
    ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "afs", "sshfs", "rclone"];

impl Mount<'_> {
    /// The one that holds `path`, which has no links: the last of the deepest.
    fn of<'a>(mounts: &'a str, path: &Path) -> Option<Mount<'a>> {
        let holding = mounts.lines().filter_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let (mut left, mut right) = (left.split(' ').skip(2), right.split(' '));
            let (device, point) = (left.next()?, left.nth(1)?.replace("\\040", " "));
            let (file_system, source) = (right.next()?, right.next()?);
            let mount = Mount { device, file_system, source };
            path.starts_with(&point).then_some((point.len(), mount))
        });
        holding.max_by_key(|(depth, _)| *depth).map(|(_, mount)| mount)
    }

    fn finding(&self, is_rotational: Option<bool>) -> Finding {
        let Mount { file_system, source, .. } = self;
        let name = file_system.strip_prefix("fuse.").unwrap_or(file_system);
        let place = format!("{file_system} on {source}");
        match is_rotational {
            _ if NETWORK.contains(&name) => {
                Finding::warn(format!("{place}: every expert comes from another machine"))
            }
            Some(true) => Finding::warn(format!(
                "{place}: says that it spins, and experts lie in many places (see storage.speed)"
            )),
            Some(false) => Finding::pass(format!("{place}: solid state")),
            None => Finding::skip(format!("{place}: the system does not say what it is")),
        }
    }
}

/// What the system says of the drive below a mount. Some file systems have device numbers of their
/// own; then the name of their source counts. A virtual drive says that it spins, whatever it is.
fn is_rotational(mount: &Mount) -> Option<bool> {
    let source = std::fs::canonicalize(mount.source).unwrap_or_default();
    let name = source.file_name().unwrap_or_default();
    if ["vd", "xvd"].iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
        return None;
    }
    let dirs = [Path::new("dev/block").join(mount.device), Path::new("class/block").join(name)];
    // A partition's queue is that of the drive, whose directory holds its own.
    let queues = dirs.iter().flat_map(|dir| ["queue", "../queue"].map(|queue| dir.join(queue)));
    let read =
        |queue: PathBuf| std::fs::read_to_string(Path::new("/sys").join(queue).join("rotational"));
    let text = queues.into_iter().find_map(|queue| read(queue).ok())?;
    Some(text.trim() != "0")
}

/// How fast experts come: one read at a time, and with `--deep` eight.
pub fn speed(subject: &Subject) -> Part<Finding> {
    let weights = needs(&subject.weights, "model.tensors")?;
    let shard = needs(&subject.directory, "model.shards")?.largest_shard();
    if shard.bytes < PROBE_BYTES_MIN {
        return Err(Finding::skip("the shards are too small to tell"));
    }
    let [direct, buffered] = disk::probe(shard)?;
    if buffered == 0.0 {
        let summary = format!("{}: a read failed", shard.path.display());
        return Ok(Finding::new(Status::Fail, summary));
    }
    let mut details = vec![("direct_gbs", float(direct)), ("buffered_gbs", float(buffered))];
    let mut summary = format!("{direct:.1} GB/s direct, {buffered:.1} GB/s buffered");
    let (mut best, mut status) = (if direct > 0.0 { direct } else { buffered }, Status::Pass);
    if subject.args.has("--deep")
        && let Some(deep) = iobench::measure(&shard.path, direct > 0.0, 18 << 20, 64, 8)?
    {
        best = deep.gbs;
        details.push(("queue_8_gbs", float(best)));
        summary += &format!(", {best:.1} GB/s with 8 in flight");
        if deep.is_cached {
            status = Status::Warn;
            summary += " (from the page cache, not the drive)";
        }
    }
    let top_k = needs(&subject.config, "model.config")?.top_k;
    let experts = weights.layers.iter().filter_map(|layer| match &layer.mlp {
        Mlp::Sparse(moe) => moe.experts.first(),
        Mlp::Dense(_) => None,
    });
    let bytes: usize = experts.map(|expert| expert.bytes() * top_k).sum();
    let seconds = bytes as f64 / 1e9 / best;
    summary += &format!("; a token whose experts all come from there takes {seconds:.1} s");
    Ok(Finding::new(status, summary).with(details))
}

/// Whether so many files can be open.
pub fn files(subject: &Subject) -> Part<Finding> {
    let shards = needs(&subject.directory, "model.shards")?.shards().len();
    let needed = files_needed(shards);
    // Each shard is open once by now.
    let limit = sys::raise_file_limit(needed - shards)?;
    let details = vec![("limit", count(limit as usize)), ("needed", count(needed))];
    let summary = format!("{limit} open files allowed, up to {needed} needed");
    Ok(Finding::pass(summary).with(details))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw
23 22 0:45 / /models rw - nfs4 server:/export rw
24 22 259:1 / /models/fast\\040one rw,noatime - xfs /dev/nvme0n1p1 rw
25 22 0:50 /a /srv rw - fuse.sshfs me@there: rw
";

    #[test]
    fn the_deepest_mount_above_a_path_is_the_one_that_holds_it() {
        for (path, device, file_system, source) in [
            ("/models/fast one/a/x", "259:1", "xfs", "/dev/nvme0n1p1"),
            ("/models/fast", "0:45", "nfs4", "server:/export"),
            ("/modelsx", "8:2", "ext4", "/dev/sda2"),
            ("/srv/x", "0:50", "fuse.sshfs", "me@there:"),
        ] {
            let want = Mount { device, file_system, source };
            assert_eq!(Mount::of(MOUNTS, Path::new(path)), Some(want), "{path}");
        }
        assert_eq!(Mount::of("22 1 8:2", Path::new("/")), None);
    }

    #[test]
    fn networks_and_spinning_drives_are_warned_of() {
        let status = |path, is_rotational| {
            Mount::of(MOUNTS, Path::new(path)).unwrap().finding(is_rotational).status
        };
        assert!(status("/models/x", None) == Status::Warn);
        assert!(status("/srv/x", Some(false)) == Status::Warn);
        assert!(status("/x", Some(true)) == Status::Warn);
        assert!(status("/x", Some(false)) == Status::Pass);
        assert!(status("/x", None) == Status::Skip);
    }
}
