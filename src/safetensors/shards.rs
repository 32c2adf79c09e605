//! Which files of a model's directories are shards, and whether a numbered one is missing.
//!
//! Shards may be spread over several directories: their union is one container, in byte order of
//! the file names. A name that occurs in two of them is refused, for nobody could say which counts.
//!
//! People count files and find the right number while one is absent, because another family's
//! file filled the count. So every numbered family is checked on its own: the converter's `out-`,
//! `out-idx-` and `out-mtp-` (from 0, end unknown) and `…-00001-of-00006` (from 1, end known).
//! Other names may hold numbers of any meaning and are left alone.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::{Context, Result};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Most shards of one model. Each is an open file; usual limits are 1024 of them.
const SHARDS_MAX: usize = 512;

/// Shorter runs of digits are names, not shard numbers.
const NUMBER_DIGITS_MIN: usize = 5;
/// Longer ones would not fit a u64.
const NUMBER_DIGITS_MAX: usize = 18;

/// The families the converter numbers from 0.
const CONVERTER_PREFIXES: [&str; 3] = ["out-", "out-idx-", "out-mtp-"];

const EXTENSION: &str = ".safetensors";

/// The shards of `dirs` in byte order of their names; `._*` files (resource forks) are ignored.
/// Errors: a directory without a shard, except that the first may leave them all to others; a name
/// that occurs twice; a gap.
pub fn list(dirs: &[&Path]) -> Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for (i, dir) in dirs.iter().enumerate() {
        let is_optional = i == 0 && dirs.len() > 1;
        add_names(dir, is_optional, &mut names).context(|| dir.display())?;
    }
    names.sort_by(|(a, _), (b, _)| a.as_encoded_bytes().cmp(b.as_encoded_bytes()));
    if let Some([(name, a), (_, b)]) = names.array_windows().find(|[(a, _), (b, _)]| a == b) {
        bail!("{}: also in {}", a.join(name).display(), b.display());
    }
    check_numbers(names.iter().filter_map(|(name, _)| name.to_str())).context(|| {
        let dirs: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
        format!("{}: shards", dirs.join(", "))
    })?;
    Ok(names.iter().map(|(name, dir)| dir.join(name)).collect())
}

/// Adds the shards of one directory.
fn add_names<'a>(
    dir: &'a Path,
    is_optional: bool,
    names: &mut Vec<(OsString, &'a Path)>,
) -> Result<()> {
    let before = names.len();
    for entry in std::fs::read_dir(dir)? {
        let name = entry?.file_name();
        let bytes = name.as_encoded_bytes();
        if bytes.ends_with(EXTENSION.as_bytes()) && !bytes.starts_with(b"._") {
            names.push((name, dir));
        }
        if names.len() > SHARDS_MAX {
            bail!("more than {SHARDS_MAX} {EXTENSION} files");
        }
    }
    if names.len() == before && !is_optional {
        bail!("no {EXTENSION} file in this directory");
    }
    Ok(())
}

/// A shard name split at its number.
struct Numbered<'a> {
    /// Text before the number, dash included.
    prefix: &'a str,
    number: u64,
    digits: usize,
    /// Text after the number: `.safetensors` or `-of-00006.safetensors`.
    suffix: &'a str,
    /// The 6 of `-of-00006`.
    total: Option<u64>,
}

/// Splits the digits that end `text` off, if there are as many as a shard number has.
fn split_number(text: &str) -> Option<(&str, u64, usize)> {
    let prefix = text.trim_end_matches(|char: char| char.is_ascii_digit());
    let digits = text.len() - prefix.len();
    if !(NUMBER_DIGITS_MIN..=NUMBER_DIGITS_MAX).contains(&digits) || !prefix.ends_with('-') {
        return None;
    }
    Some((prefix, text[prefix.len()..].parse().ok()?, digits))
}

fn split_name(name: &str) -> Option<Numbered<'_>> {
    let stem = name.strip_suffix(EXTENSION)?;
    let (before, last, last_digits) = split_number(stem)?;
    if let Some((prefix, number, digits)) = before.strip_suffix("-of-").and_then(split_number) {
        let suffix = &name[prefix.len() + digits..];
        return Some(Numbered { prefix, number, digits, suffix, total: Some(last) });
    }
    if !CONVERTER_PREFIXES.contains(&before) {
        return None;
    }
    let (prefix, digits, suffix) = (before, last_digits, EXTENSION);
    Some(Numbered { prefix, number: last, digits, suffix, total: None })
}

/// Refuses a numbered family with a gap. Work and memory follow the names, not the numbers.
fn check_numbers<'a>(names: impl Iterator<Item = &'a str>) -> Result<()> {
    let mut shards: Vec<Numbered> = names.filter_map(split_name).collect();
    shards.sort_by_key(|shard| (shard.prefix, shard.suffix, shard.digits, shard.number));
    let same_family = |a: &Numbered, b: &Numbered| {
        (a.prefix, a.suffix, a.digits) == (b.prefix, b.suffix, b.digits)
    };
    shards.chunk_by(same_family).try_for_each(check_family)
}

/// Refuses a gap in one family, which is sorted by number and not empty.
fn check_family(family: &[Numbered<'_>]) -> Result<()> {
    let Numbered { prefix, suffix, digits, total, .. } = family[0];
    let file = |number: u64| format!("{prefix}{number:0digits$}{suffix}");
    let first = if total.is_some() { 1 } else { 0 };
    let mut expected = first;
    for number in family.iter().map(|shard| shard.number) {
        if number < expected {
            bail!("{} does not fit a numbering that starts at {first}", file(number));
        }
        if number > expected {
            bail!("{} is missing; {} is there", file(expected), file(number));
        }
        expected += 1;
    }
    match total {
        Some(total) if expected <= total => bail!("{} is missing", file(expected)),
        Some(total) if expected > total + 1 => {
            bail!("{} is beyond the {total} shards its name counts", file(expected - 1))
        }
        _ => Ok(()),
    }
}
