//! Checks of the machine: program, memory, drives and limits.

#![forbid(unsafe_code)]

use super::{Finding, Part, Status, Subject, needs};
use crate::cli::iobench;
use crate::cli::load::figure;
use crate::disk::{self, PROBE_BYTES_MIN};
use crate::error::Context;
use crate::plan::gb;
use crate::safetensors::files_needed;
use crate::sys;
use crate::weights::Mlp;

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
    Ok(Finding::pass(summary).with("path", path.display().to_string()))
}

/// Whether the file system has room left.
pub fn disk(subject: &Subject) -> Part<Finding> {
    let directory = needs(&subject.directory, "model.shards")?;
    let Some(free) = sys::disk_free_bytes(subject.dir) else {
        return Err(Finding::skip("the file system does not say what is free"));
    };
    let status = if free < FREE_BYTES_MIN { Status::Warn } else { Status::Pass };
    let found = Finding::new(status, format!("{} free", gb(free as usize)));
    Ok(found.with("available_bytes", free).with("model_bytes", directory.bytes()))
}

/// Whether a run fits, by the plan that it would make.
pub fn ram(subject: &Subject) -> Part<Finding> {
    let report = subject.report.as_ref().map_err(Finding::clone)?;
    let total = gb(report.plan.total_bytes());
    let free = report.available.as_ref();
    let found = match free {
        Some(free) => Finding::pass(format!("{total} of {} left ({})", gb(free.bytes), free.bound)),
        None => Finding::warn(format!("{total}; what is left is not known")),
    };
    let found = found.with("available_bytes", free.map(|free| free.bytes));
    let found = found.with("budget_bytes", report.plan.ram_bytes);
    Ok(found.with("cache_slots_per_layer", report.slots_per_layer()))
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
    let mut found = Finding::pass(format!("{direct:.1} GB/s direct, {buffered:.1} GB/s buffered"))
        .with("direct_gbs", figure(direct))
        .with("buffered_gbs", figure(buffered));
    let mut best = if direct > 0.0 { direct } else { buffered };
    if subject.args.has("--deep")
        && let Some(deep) = iobench::measure(&shard.path, direct > 0.0, 18 << 20, 64, 8)?
    {
        best = deep.gbs;
        found = found.with("queue_8_gbs", figure(best));
        found.summary += &format!(", {best:.1} GB/s with 8 in flight");
        if deep.is_cached {
            found.status = Status::Warn;
            found.summary += " (from the page cache, not the drive)";
        }
    }
    let top_k = needs(&subject.config, "model.config")?.top_k;
    let experts = weights.layers.iter().filter_map(|layer| match &layer.mlp {
        Mlp::Sparse(moe) => moe.experts.first(),
        Mlp::Dense(_) => None,
    });
    let bytes: usize = experts.map(|expert| expert.bytes() * top_k).sum();
    let seconds = bytes as f64 / 1e9 / best;
    found.summary += &format!("; a token whose experts all come from there takes {seconds:.1} s");
    Ok(found)
}

/// Whether so many files can be open.
pub fn files(subject: &Subject) -> Part<Finding> {
    let shards = needs(&subject.directory, "model.shards")?.shards().len();
    let needed = files_needed(shards);
    // Each shard is open once by now.
    let limit = sys::raise_file_limit(needed - shards)?;
    let found = Finding::pass(format!("{limit} open files allowed, up to {needed} needed"));
    Ok(found.with("limit", limit).with("needed", needed))
}
