//! How much memory this process may still take: what the system has, and every limit above us.
//!
//! The kernel ends a process that outgrows the limit of its control group, or of any group above
//! that, however much the machine has left. So the answer is the least of MemAvailable and, for
//! each group from ours up to the root, its limit less its working set: what it holds without the
//! file pages that can be dropped at once. Both versions of control groups are understood, side by
//! side too. Nothing here is an error: a level whose files are missing or malformed says nothing.

#![forbid(unsafe_code)]

use crate::sys::kib_field;
use std::fs::read_to_string;
use std::path::{Component, Path, PathBuf};

/// Limits from here on are none: the first version writes 2⁶³ less a page.
const NO_LIMIT_BYTES: u64 = 1 << 62;

/// What may still be taken, and what bounds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Available {
    /// Bytes before the tightest bound is reached; 0 when it is exceeded.
    pub bytes: usize,
    /// `available memory`, or the file that holds the limit of a control group.
    pub bound: String,
}

impl Available {
    /// Asks the running system; `None` where it has no figure at all.
    pub fn now() -> Option<Available> {
        Available::below(Path::new("/"))
    }

    /// The same from the files of a system that lie below `root`.
    pub fn below(root: &Path) -> Option<Available> {
        let read = |path| read_to_string(root.join(path)).unwrap_or_default();
        let free = kib_field(&read("proc/meminfo"), "MemAvailable:")
            .map(|bytes| Available { bytes, bound: "available memory".into() });
        let mounts = read("proc/self/mountinfo");
        let groups = read("proc/self/cgroup");
        let levels = groups.lines().flat_map(|line| levels(root, line, &mounts));
        levels.chain(free).min_by_key(|available| available.bytes)
    }
}

/// What one version of control groups calls its files.
struct Version {
    file_system: &'static str,
    /// Where it is mounted when the table of mounts does not say.
    usual_mount: &'static str,
    /// Files with a limit. Beyond `high` a process is slowed down until it stands still.
    limits: &'static [&'static str],
    usage: &'static str,
    /// Key in `memory.stat`.
    droppable: &'static str,
}

const V1: Version = Version {
    file_system: "cgroup",
    usual_mount: "/sys/fs/cgroup/memory",
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    droppable: "total_inactive_file",
};

const V2: Version = Version {
    file_system: "cgroup2",
    usual_mount: "/sys/fs/cgroup",
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    droppable: "inactive_file",
};

/// What every group says, from the one that a line of `/proc/self/cgroup` names
/// (`ID:CONTROLLERS:PATH`) up to the root of its mount.
fn levels(root: &Path, line: &str, mounts: &str) -> Vec<Available> {
    let mut fields = line.splitn(3, ':');
    let (Some(id), Some(controllers), Some(group)) = (fields.next(), fields.next(), fields.next())
    else {
        return Vec::new();
    };
    let version = match (id, controllers) {
        ("0", "") => &V2,
        _ if controllers.split(',').any(|name| name == "memory") => &V1,
        _ => return Vec::new(),
    };
    let (mount, mut group) = place(version, Path::new(group), mounts);
    let on_disk = root.join(mount.strip_prefix("/").unwrap_or(&mount));
    // Within a container the path may be that of another view of the tree, or climb out of ours.
    let is_below = group.components().all(|part| matches!(part, Component::Normal(_)));
    if !is_below || !on_disk.join(&group).is_dir() {
        group = PathBuf::new();
    }
    let level = |group: &Path| version.level(&on_disk.join(group), &mount.join(group));
    group.ancestors().filter_map(level).collect()
}

/// The mount that shows `group`, and the group's path below it; empty when the mount shows only
/// another part of the tree. A line of `mounts` is `ID PARENT DEVICE ROOT MOUNT … - TYPE SOURCE
/// OPTIONS`, and ROOT is the group that stands at MOUNT.
fn place(version: &Version, group: &Path, mounts: &str) -> (PathBuf, PathBuf) {
    let mut first = None;
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (mut left, mut right) = (left.split(' ').skip(3), right.split(' '));
        let (Some(top), Some(mount)) = (left.next(), left.next()) else { continue };
        let file_system = right.next();
        let mut options = right.nth(1).unwrap_or_default().split(',');
        if file_system != Some(version.file_system)
            || version.file_system == V1.file_system && !options.any(|name| name == "memory")
        {
            continue;
        }
        if let Ok(below) = group.strip_prefix(top) {
            return (mount.into(), below.into());
        }
        first = first.or(Some(mount));
    }
    match first {
        Some(mount) => (mount.into(), PathBuf::new()),
        None => (version.usual_mount.into(), group.strip_prefix("/").unwrap_or(group).into()),
    }
}

impl Version {
    /// What the group in `dir`, which is shown as `name`, leaves; `None` without a limit or when
    /// any figure is missing.
    fn level(&self, dir: &Path, name: &Path) -> Option<Available> {
        let read = |file: &str| read_to_string(dir.join(file)).ok();
        let number = |file: &str| read(file)?.trim().parse::<u64>().ok();
        let limits = self.limits.iter().filter_map(|file| Some((number(file)?, file)));
        let (limit, file) = limits.filter(|(bytes, _)| *bytes < NO_LIMIT_BYTES).min()?;
        let droppable = |line: &str| line.strip_prefix(self.droppable)?.trim().parse::<u64>().ok();
        let droppable = read("memory.stat")?.lines().find_map(droppable)?;
        let working_set = number(self.usage)?.saturating_sub(droppable);
        let bytes = limit.saturating_sub(working_set).try_into().ok()?;
        Some(Available { bytes, bound: name.join(file).display().to_string() })
    }
}
