//! From a published checkpoint to a container: what `coli convert` does.
//!
//! A conversion is planned from headers alone ([`Plan`]), and then runs through the source files
//! one after another: one thread reads, all cores encode, one writes ([`run`]). Memory holds a few
//! blocks of rows, whatever the size of a tensor. The same request gives the same bytes, for any
//! number of threads and however often it was stopped in between: finished files are recorded with
//! their hash and never touched again, and a file gets its name only when it is whole and on the
//! drive. A checkpoint that a server has is fetched on the way ([`Repo`]).
//!
//! Refused: another architecture, before any shard is opened; a source that lacks a tensor or that
//! is a container already; an output directory that holds anything else. The same directory with
//! other settings is refused by the name of the first that differs.

#![forbid(unsafe_code)]

mod calibration;
mod classes;
mod encode;
mod fetch;
mod manifest;
mod pipeline;
mod plan;
mod writer;

pub use calibration::{Calibration, Sums};
pub use classes::{Class, Formats, parse_format};
pub use encode::{Scales, encode_row};
pub use fetch::{DEFAULT_BASE_URL, DIR_NAME, Repo};
pub use manifest::{FILE_NAME, Record};
pub use pipeline::{Speed, probe, run};
pub use plan::{Plan, Totals};
pub use writer::Event;

use std::path::PathBuf;
use std::sync::Arc;

/// What a model needs beside its tensors; copied as they are, where the source has them.
pub const METADATA_FILES: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];
const METADATA_BYTES_MAX: usize = 256 << 20;

/// What is to be converted, and how.
#[derive(Clone)]
pub struct Request {
    /// Directory of the checkpoint.
    pub from: PathBuf,
    /// Where its shards are fetched from, if they are; `from` is then [`DIR_NAME`] in `to`.
    pub repo: Option<Repo>,
    /// Directory of the container; made if it does not exist.
    pub to: PathBuf,
    /// Format of each class of tensors.
    pub formats: Formats,
    /// How the scales of integers are chosen.
    pub scales: Scales,
    /// By what a search weighs errors, if not all alike.
    pub calibration: Option<Arc<Calibration>>,
    /// Whether to convert the draft head, if there is one.
    pub mtp: bool,
    /// Whether to convert the sparse-attention indexers, if there are any.
    pub indexer: bool,
    /// Room that stays free on the drive of `to`.
    pub keep_free_bytes: u64,
    /// Whether a source file is deleted once everything made of it has been read back.
    pub delete_source: bool,
    /// Threads that encode.
    pub threads: usize,
}

impl Request {
    /// All that decides the bytes of the output, besides the source.
    fn settings(&self) -> Vec<(String, String)> {
        let on_off = |name: &str, on: bool| (name.into(), if on { "on" } else { "off" }.into());
        let formats = Class::ALL
            .into_iter()
            .map(|class| (format!("--{}", class.name()), self.formats.of(class).to_string()));
        let parts = [on_off("draft head", self.mtp), on_off("indexers", self.indexer)];
        let repo = self.repo.iter().map(|repo| ("--repo".into(), (&*repo.name).into()));
        let by = |calibration: &Arc<Calibration>| format!(" by {:016x}", calibration.hash());
        let by = self.calibration.as_ref().map(by).unwrap_or_default();
        let scales = ("--scales".into(), self.scales.name().to_string() + &by);
        parts.into_iter().chain([scales]).chain(formats).chain(repo).collect()
    }
}
