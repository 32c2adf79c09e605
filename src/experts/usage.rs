//! What every expert was chosen for: the learning store `.coli_usage` of a model directory.
//!
//! ```text
//! -1 78 256
//! -2 1 3815245270
//! 3 0 118
//! 3 2 97
//! ```
//!
//! Lines of `layer expert choices`, ascending, of whatever was chosen at all; every row counts once
//! for each expert that it chose. Two lines before them say whose they are: the model's layers and
//! experts, and the format 1 with FNV-1a-32 of the architecture's name. Older files lack them. The
//! C engine reads and writes the same.
//!
//! Files of another model and files with a line that is none are refused; lines about a layer or an
//! expert that the model lacks, and unknown ones that start with a negative number, are skipped.

#![forbid(unsafe_code)]

use super::ExpertId;
use crate::bail;
use crate::error::{Context, Result};
use crate::sys;
use std::path::Path;

/// Name of the file in a model directory.
pub const FILE_NAME: &str = ".coli_usage";
/// Longest file: twenty times what GLM-5.2 needs.
const FILE_BYTES_MAX: usize = 8 << 20;
const FORMAT: i64 = 1;
const ARCHITECTURE: &[u8] = b"glm_moe_dsa";

/// How often each expert was chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// By layer and expert; nothing in dense layers.
    layers: Vec<Vec<u64>>,
}

/// FNV-1a of 32 bits.
fn fnv1a32(bytes: &[u8]) -> u32 {
    let step = |hash: u32, byte: &u8| (hash ^ *byte as u32).wrapping_mul(0x0100_0193);
    bytes.iter().fold(0x811c_9dc5, step)
}

impl Usage {
    /// Reads the file of a model with `layers` (and a draft layer behind them) of `experts`;
    /// nothing when there is no file. Errors name it, and the line.
    pub fn read(path: &Path, layers: usize, experts: usize) -> Result<Usage> {
        if !sys::is_present(path) {
            return Ok(Usage::default());
        }
        let read = || {
            let bytes = sys::read_file(path, FILE_BYTES_MAX)?;
            Usage::parse(&bytes, layers, experts)
        };
        read().context(|| path.display().to_string())
    }

    fn parse(bytes: &[u8], layers: usize, experts: usize) -> Result<Usage> {
        let mut usage = Usage::default();
        let Ok(text) = std::str::from_utf8(bytes) else { bail!("not a text file") };
        for (i, line) in text.split_inclusive('\n').enumerate() {
            let expected = || format!("line {}: expected three integers, found {line:?}", i + 1);
            let Some(line) = line.strip_suffix('\n') else { bail!("{}", expected()) };
            let mut numbers = line.split_ascii_whitespace().map(|word| word.parse::<i64>().ok());
            let (first, second, third) = match [(); 4].map(|()| numbers.next()) {
                [Some(Some(first)), Some(Some(second)), Some(Some(third)), None] => {
                    (first, second, third)
                }
                _ => bail!("{}", expected()),
            };
            let (found, wanted) = match first {
                -1 => ((second, third), (layers as i64, experts as i64)),
                -2 => ((second, third), (FORMAT, fnv1a32(ARCHITECTURE).into())),
                _ => Default::default(),
            };
            if found != wanted {
                let ((a, b), (c, d)) = (found, wanted);
                bail!("line {}: of another model: expected {first} {c} {d}, found {a} {b}", i + 1);
            }
            if first < 0 {
                continue;
            }
            if second < 0 || third < 0 {
                bail!("{}", expected());
            }
            let id = (first as usize, second as usize);
            if id.0 <= layers && id.1 < experts {
                usage.make_known(id.0, experts);
                usage.add(id, third as u64);
            }
        }
        Ok(usage)
    }

    /// Replaces the file; a kill at any moment leaves the old one or the new one. Errors name it.
    pub fn write(&self, path: &Path, layers: usize, experts: usize) -> Result<()> {
        let mut text = format!("-1 {layers} {experts}\n-2 {FORMAT} {}\n", fnv1a32(ARCHITECTURE));
        for ((layer, e), choices) in self.iter().filter(|(_, choices)| *choices > 0) {
            text += &format!("{layer} {e} {choices}\n");
        }
        sys::replace_file(path, text.as_bytes()).context(|| path.display().to_string())
    }

    /// Makes room for a layer's experts.
    pub fn make_known(&mut self, layer: usize, experts: usize) {
        if self.layers.len() <= layer {
            self.layers.resize_with(layer + 1, Vec::new);
        }
        if self.layers[layer].len() < experts {
            self.layers[layer].resize(experts, 0);
        }
    }

    /// Counts choices of an expert that is known.
    pub fn add(&mut self, (layer, e): ExpertId, choices: u64) {
        let count = &mut self.layers[layer][e];
        // What does not fit the file's numbers cannot be read again.
        *count = count.saturating_add(choices).min(i64::MAX as u64);
    }

    /// Choices of an expert.
    pub fn count(&self, (layer, e): ExpertId) -> u64 {
        self.layers.get(layer).and_then(|layer| layer.get(e)).copied().unwrap_or(0)
    }

    /// By layer and expert.
    pub fn layers(&self) -> &[Vec<u64>] {
        &self.layers
    }

    /// Every expert that is known, with its choices, in order.
    pub fn iter(&self) -> impl Iterator<Item = (ExpertId, u64)> + '_ {
        let layers = self.layers.iter().enumerate();
        layers.flat_map(|(l, layer)| layer.iter().enumerate().map(move |(e, n)| ((l, e), *n)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = "-1 6 16\n-2 1 3815245270\n1 0 7\n1 15 3\n6 2 12\n";

    fn parse(text: &str) -> Result<Usage> {
        Usage::parse(text.as_bytes(), 6, 16)
    }

    /// The published vectors of the hash, and the file as an older engine has it.
    #[test]
    fn files_of_the_c_engine_are_read_with_and_without_their_first_lines() {
        assert_eq!(
            [b"".as_slice(), b"a", b"foobar"].map(fnv1a32),
            [0x811c_9dc5, 0xe40c_292c, 0xbf9c_f968]
        );
        let usage = parse(SAMPLE).unwrap();
        assert_eq!(
            [(1, 0), (1, 15), (6, 2), (1, 1), (9, 9)].map(|id| usage.count(id)),
            [7, 3, 12, 0, 0]
        );
        let (_, old) = SAMPLE.split_at(SAMPLE.find("1 0 7").unwrap());
        assert_eq!(parse(old).unwrap(), usage);
        // What the model lacks, and what a newer engine may add.
        assert_eq!(parse(&format!("{SAMPLE}7 0 1\n1 16 1\n-3 9 9\n")).unwrap(), usage);
        assert_eq!(parse(&format!("{SAMPLE}1 0 1\n")).unwrap().count((1, 0)), 8);
    }

    #[test]
    fn files_of_other_models_and_malformed_lines_are_refused_with_their_line() {
        for (text, message) in [
            ("-1 6 17\n", "line 1: of another model: expected -1 6 16, found 6 17"),
            ("1 1 1\n-2 1 5\n", "line 2: of another model"),
            ("-2 2 3815245270\n", "line 1: of another model"),
            ("1 1\n", "line 1: expected three integers, found \"1 1\\n\""),
            ("1 1 1 1\n", "line 1: expected three integers"),
            ("1 2 3\n\n", "line 2: expected three integers"),
            ("1 1 x\n", "line 1: expected three integers"),
            ("1 -1 1\n", "line 1: expected three integers"),
            ("1 1 99999999999999999999\n", "line 1: expected three integers"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.starts_with(message), "{text:?}: {error}");
        }
    }

    /// Every beginning of a file is either refused or is some whole lines of it.
    #[test]
    fn a_file_cut_at_any_byte_has_whole_lines_or_is_refused() {
        for end in 0..SAMPLE.len() {
            let cut = &SAMPLE[..end];
            assert_eq!(parse(cut).is_ok(), cut.is_empty() || cut.ends_with('\n'), "{cut:?}");
        }
    }
}
