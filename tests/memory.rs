//! What may still be taken, from laid-out copies of the system's files. The expected figures are
//! worked out by hand: limit − (usage − what can be dropped), the least of all levels.

mod common;

use colibri::memory::Available;
use common::TempDir;

const V2_MOUNT: &str = "35 31 0:32 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
const V1_MOUNTS: &str = "\
    33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
    35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n";
/// 1,024,000,000 bytes.
const MEMINFO: &str = "MemTotal: 2000000 kB\nMemAvailable:    1000000 kB\n";

/// What the files `(path, text)` say, as bytes and bound.
fn available(name: &str, files: &[(&str, &str)]) -> Option<(usize, String)> {
    let dir = TempDir::new(&format!("limits-{name}"));
    for (path, text) in files {
        let path = dir.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    Available::below(&dir.0).map(|available| (available.bytes, available.bound))
}

/// The same beside `MEMINFO`.
fn beside_meminfo(name: &str, files: &[(&str, &str)]) -> (usize, String) {
    available(name, &[files, &[("proc/meminfo", MEMINFO)]].concat()).unwrap()
}

/// `/proc/self/cgroup`, the mounts, and groups of version 2 as (directory, limit, usage, stat).
fn v2(name: &str, line: &str, mounts: &str, groups: &[[&str; 4]]) -> (usize, String) {
    let mut files = vec![("proc/self/cgroup".to_string(), line)];
    files.push(("proc/self/mountinfo".into(), mounts));
    for [dir, limit, usage, stat] in groups {
        files.push((format!("sys/fs/cgroup{dir}/memory.max"), limit));
        files.push((format!("sys/fs/cgroup{dir}/memory.current"), usage));
        files.push((format!("sys/fs/cgroup{dir}/memory.stat"), stat));
    }
    let files: Vec<_> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
    beside_meminfo(name, &files)
}

fn bound(bytes: usize, bound: &str) -> (usize, String) {
    (bytes, bound.to_string())
}

fn unbounded() -> (usize, String) {
    bound(1_024_000_000, "available memory")
}

/// 300 of 500 MB are in use, 100 of these are file pages that can go.
const STAT: &str = "anon 170000000\ninactive_anon 1\ninactive_file 100000000\nactive_file 7\n";
const APP: [&str; 4] = ["/app", "500000000\n", "300000000\n", STAT];

#[test]
fn a_limit_counts_less_the_working_set() {
    let of = |name, group| v2(name, "0::/app\n", V2_MOUNT, &[group]);
    assert_eq!(of("limit", APP), bound(300_000_000, "/sys/fs/cgroup/app/memory.max"));
    assert_eq!(of("max", ["/app", "max\n", "300000000\n", STAT]), unbounded());
    let over = ["/app", "150000000", "300000000", STAT];
    assert_eq!(of("over", over), bound(0, "/sys/fs/cgroup/app/memory.max"));
    let idle = ["/app", "500000000", "90000000", STAT];
    assert_eq!(of("idle", idle), bound(500_000_000, "/sys/fs/cgroup/app/memory.max"));
    // More than the machine has left.
    assert_eq!(of("wide", ["/app", "5000000000", "300000000", STAT]), unbounded());
}

#[test]
fn the_tightest_of_all_levels_wins() {
    let child = ["/a/b", "900000000", "50000000", "inactive_file 0\n"];
    let parent = ["/a", "400000000", "350000000", "inactive_file 50000000\n"];
    let both = v2("parent", "0::/a/b\n", V2_MOUNT, &[child, parent]);
    assert_eq!(both, bound(100_000_000, "/sys/fs/cgroup/a/memory.max"));
    let parent = ["/a", "max", "350000000", "inactive_file 50000000\n"];
    let both = v2("child", "0::/a/b\n", V2_MOUNT, &[child, parent]);
    assert_eq!(both, bound(850_000_000, "/sys/fs/cgroup/a/b/memory.max"));
    // A sibling, or a group below, is not ours.
    let others = [["/a/c", "1", "0", STAT], ["/a/b/d", "1", "0", STAT], child];
    let others = v2("others", "0::/a/b\n", V2_MOUNT, &others);
    assert_eq!(others, bound(850_000_000, "/sys/fs/cgroup/a/b/memory.max"));
}

/// Beyond `memory.high` nothing is killed, but nothing moves either.
#[test]
fn the_throttling_limit_counts_too() {
    let files = [
        ("proc/self/cgroup", "0::/app"),
        ("proc/self/mountinfo", V2_MOUNT),
        ("sys/fs/cgroup/app/memory.max", "max"),
        ("sys/fs/cgroup/app/memory.high", "450000000"),
        ("sys/fs/cgroup/app/memory.current", "300000000"),
        ("sys/fs/cgroup/app/memory.stat", STAT),
    ];
    let want = bound(250_000_000, "/sys/fs/cgroup/app/memory.high");
    assert_eq!(beside_meminfo("high", &files), want);
}

#[test]
fn a_level_with_a_malformed_or_missing_file_says_nothing() {
    let parent = ["/a", "400000000", "350000000", "inactive_file 50000000\n"];
    let parents = bound(100_000_000, "/sys/fs/cgroup/a/memory.max");
    for (i, child) in [
        ["/a/b", "12x", "1", STAT],
        ["/a/b", "", "1", STAT],
        ["/a/b", "-5", "1", STAT],
        ["/a/b", "99999999999999999999999", "1", STAT],
        ["/a/b", "1000", "many", STAT],
        ["/a/b", "1000", "1", "inactive_file lots\n"],
        ["/a/b", "1000", "1", "total_inactive_file 5\n"],
    ]
    .into_iter()
    .enumerate()
    {
        let got = v2(&format!("malformed-{i}"), "0::/a/b\n", V2_MOUNT, &[child, parent]);
        assert_eq!(got, parents, "{child:?}");
    }
    let files = [
        ("proc/self/cgroup", "0::/app\n"),
        ("proc/self/mountinfo", V2_MOUNT),
        ("sys/fs/cgroup/app/memory.max", "1000"),
        ("sys/fs/cgroup/app/memory.current", "10"),
    ];
    assert_eq!(beside_meminfo("no-stat", &files), unbounded());
    for (i, line) in ["", "0", "0:", "0::", "x:y:z", "0:/app", "\n\n::\n"].iter().enumerate() {
        assert_eq!(v2(&format!("line-{i}"), line, "35 31 - cgroup2\n - \n", &[APP]), unbounded());
    }
    assert_eq!(available("nothing", &[]), None);
    assert_eq!(available("bad-meminfo", &[("proc/meminfo", "MemAvailable: lots kB")]), None);
    let group = [&files[..], &[("sys/fs/cgroup/app/memory.stat", "inactive_file 4")]].concat();
    let want = bound(994, "/sys/fs/cgroup/app/memory.max");
    assert_eq!(available("no-meminfo", &group), Some(want));
}

const V1_GROUPS: &str = "9:name=systemd:/x\n4:memory:/job/1\n1:cpu,cpuacct:/job/1\n0::/x\n";

/// The group's own `inactive_file` is without its children; the total counts.
#[test]
fn the_first_version_is_read_by_its_own_names_beside_the_second() {
    let stat = "inactive_file 1\ntotal_inactive_file 100000000\n";
    let mounts = V1_MOUNTS.to_string() + &V2_MOUNT.replace("/cgroup rw", "/cgroup/unified rw");
    let group = [
        ("proc/self/cgroup", V1_GROUPS),
        ("proc/self/mountinfo", &mounts),
        ("sys/fs/cgroup/memory/job/1/memory.limit_in_bytes", "500000000\n"),
        ("sys/fs/cgroup/memory/job/1/memory.usage_in_bytes", "300000000\n"),
        ("sys/fs/cgroup/memory/job/1/memory.stat", stat),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "9000000000\n"),
        ("sys/fs/cgroup/memory/memory.stat", stat),
    ];
    let own = bound(300_000_000, "/sys/fs/cgroup/memory/job/1/memory.limit_in_bytes");
    assert_eq!(beside_meminfo("v1", &group), own);
    // Pages of 64 KiB round the largest number further down.
    for (name, none) in [("v1-4k", "9223372036854771712"), ("v1-64k", "9223372036854710272")] {
        let mut unlimited = group;
        unlimited[2].1 = none;
        assert_eq!(available(name, &unlimited), None);
        assert_eq!(beside_meminfo(name, &unlimited), unbounded());
    }
    let unified = [
        ("sys/fs/cgroup/unified/x/memory.max", "80000000"),
        ("sys/fs/cgroup/unified/x/memory.current", "0"),
        ("sys/fs/cgroup/unified/x/memory.stat", "inactive_file 0\n"),
    ];
    let both = beside_meminfo("hybrid", &[&group[..], &unified].concat());
    assert_eq!(both, bound(80_000_000, "/sys/fs/cgroup/unified/x/memory.max"));
    // A mount that shows the group itself at its top, as in a container.
    let mut top = group;
    let mounts = V1_MOUNTS.replace(" / /sys/fs/cgroup/memory", " /job /sys/fs/cgroup/memory");
    top[1].1 = &mounts;
    top[2].0 = "sys/fs/cgroup/memory/1/memory.limit_in_bytes";
    top[3].0 = "sys/fs/cgroup/memory/1/memory.usage_in_bytes";
    top[4].0 = "sys/fs/cgroup/memory/1/memory.stat";
    let own = bound(300_000_000, "/sys/fs/cgroup/memory/1/memory.limit_in_bytes");
    assert_eq!(beside_meminfo("v1-top", &top), own);
}

/// Inside a container the path may be one that only the host could resolve.
#[test]
fn a_path_that_the_mount_does_not_show_stands_for_its_root() {
    let root = ["", "500000000", "300000000", STAT];
    // Neither a group outside nor one of our own that is only called the same.
    let [outside, namesake] = ["/../other", "/docker"].map(|dir| [dir, "1000", "0", STAT]);
    let want = bound(300_000_000, "/sys/fs/cgroup/memory.max");
    let other_top = V2_MOUNT.replace("0:32 / ", "0:32 /docker/abc ");
    for (i, (line, mounts)) in [
        ("0::/docker/abc\n", V2_MOUNT),
        ("0::/docker/abc\n", other_top.as_str()),
        ("0::/elsewhere\n", other_top.as_str()),
        ("0::/docker/abcdef\n", other_top.as_str()),
        ("0::/../other\n", V2_MOUNT),
        ("0::/docker/abc\n", ""),
        ("0::/\n", "garbage\n"),
    ]
    .into_iter()
    .enumerate()
    {
        let got = v2(&format!("namespace-{i}"), line, mounts, &[root, outside, namesake]);
        assert_eq!(got, want, "{line:?} {mounts:?}");
    }
    // Without a table of mounts, the usual places.
    assert_eq!(
        v2("usual", "0::/app\n", "", &[APP]),
        bound(300_000_000, "/sys/fs/cgroup/app/memory.max")
    );
    let usual = [
        ("proc/self/cgroup", V1_GROUPS),
        ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "7000"),
        ("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "3000"),
        ("sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file 500"),
        ("sys/fs/cgroup/memory/job/1/memory.stat", ""),
    ];
    let want = bound(4500, "/sys/fs/cgroup/memory/job/memory.limit_in_bytes");
    assert_eq!(beside_meminfo("v1-usual", &usual), want);
}
