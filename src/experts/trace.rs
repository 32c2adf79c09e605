//! Routing traces: which experts every layer of every pass chose, as a text file.
//!
//! ```text
//! coli-trace 1
//! layers 78 experts 256 top_k 8
//! 3 1 7 19 42 88 101 140 200 231
//! 4 12 0:3 5 9:12 …
//! ```
//!
//! Behind the version and the shape stands one line for each visit of a sparse layer, in the order
//! of the passes: the layer, the rows of the pass, and the experts that some row chose, ascending,
//! each with the number of rows that chose it where that is not 1. Refuses anything else with the
//! number of the line.

#![forbid(unsafe_code)]

use super::usage::Usage;
use crate::bail;
use crate::error::{Context, Error, Result};
use crate::sys;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

const VERSION_LINE: &str = "coli-trace 1";
/// Longest file: some hours of a large model's decoding.
const FILE_BYTES_MAX: usize = 1 << 30;
/// Most layers, experts and rows that a trace may speak of.
const COUNT_MAX: usize = 1 << 16;

/// The shape that a trace is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Layers, the dense ones too.
    pub layers: usize,
    /// Experts of a sparse layer.
    pub experts: usize,
    /// Experts that one row chooses.
    pub top_k: usize,
}

/// One layer of one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// Layer.
    pub layer: usize,
    /// Rows of the pass.
    pub rows: usize,
    /// Its part of [`Trace::chosen`].
    pub chosen: Range<usize>,
}

/// A trace in memory.
#[derive(Debug, PartialEq, Eq)]
pub struct Trace {
    /// Shape.
    pub shape: Shape,
    /// Layer after layer, pass after pass.
    pub visits: Vec<Visit>,
    /// Experts of all visits and the rows that chose them.
    pub chosen: Vec<(u32, u32)>,
}

impl Trace {
    /// Reads a trace. Errors name file and line.
    pub fn read(path: &Path) -> Result<Trace> {
        let read = || {
            let bytes = sys::read_file(path, FILE_BYTES_MAX)?;
            match std::str::from_utf8(&bytes) {
                Ok(text) => Trace::parse(text),
                Err(error) => bail!("not UTF-8 at byte {}", error.valid_up_to()),
            }
        };
        read().context(|| path.display().to_string())
    }

    /// How often each expert was chosen.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for Visit { layer, chosen, .. } in &self.visits {
            usage.make_known(*layer, self.shape.experts);
            for (e, rows) in &self.chosen[chosen.clone()] {
                usage.add((*layer, *e as usize), (*rows).into());
            }
        }
        usage
    }

    fn parse(text: &str) -> Result<Trace> {
        let mut lines = text.lines();
        let version = lines.next().unwrap_or_default();
        if version != VERSION_LINE {
            bail!("line 1: expected {VERSION_LINE:?}, found {version:?}");
        }
        let line = lines.next().unwrap_or_default();
        let Some(shape) = Shape::parse(line) else {
            bail!("line 2: expected \"layers N experts N top_k N\", found {line:?}");
        };
        let mut trace = Trace { shape, visits: Vec::new(), chosen: Vec::new() };
        for (i, line) in lines.enumerate() {
            trace.push(line).context(|| format!("line {}", i + 3))?;
        }
        Ok(trace)
    }

    /// Adds the visit of one line.
    fn push(&mut self, line: &str) -> Result<()> {
        let Shape { layers, experts, top_k } = self.shape;
        let start = self.chosen.len();
        let mut words = line.split(' ');
        let layer = number(words.next(), "a layer", 0, layers - 1)?;
        let rows = number(words.next(), "a number of rows", 1, COUNT_MAX)?;
        let mut least = 0;
        for word in words {
            let (e, count) = match word.split_once(':') {
                Some((e, count)) => (e, number(Some(count), "rows of an expert", 1, rows)?),
                None => (word, 1),
            };
            let e = number(Some(e), "an expert behind the one before", least, experts - 1)?;
            self.chosen.push((e as u32, count as u32));
            least = e + 1;
        }
        let chosen = start..self.chosen.len();
        let choices: usize = self.chosen[chosen.clone()].iter().map(|(_, n)| *n as usize).sum();
        if choices != rows * top_k {
            bail!("expected {} choices of {rows} rows, found {choices}", rows * top_k);
        }
        self.visits.push(Visit { layer, rows, chosen });
        Ok(())
    }
}

impl Shape {
    fn parse(line: &str) -> Option<Shape> {
        let words: Vec<&str> = line.split(' ').collect();
        let ["layers", layers, "experts", experts, "top_k", top_k] = words[..] else { return None };
        let [layers, experts, top_k] = [layers, experts, top_k]
            .map(|n| n.parse().ok().filter(|n| (1..=COUNT_MAX).contains(n)));
        let shape = Shape { layers: layers?, experts: experts?, top_k: top_k? };
        (shape.top_k <= shape.experts).then_some(shape)
    }
}

fn number(word: Option<&str>, what: &str, low: usize, high: usize) -> Result<usize> {
    let word = word.unwrap_or_default();
    match word.parse() {
        Ok(number) if (low..=high).contains(&number) => Ok(number),
        _ => bail!("expected {what} from {low} to {high}, found {word:?}"),
    }
}

/// Writes a trace while a model runs.
pub struct Writer {
    file: BufWriter<File>,
    path: PathBuf,
    /// Layer and rows of the visit that is not written yet; no rows when there is none.
    visit: (usize, usize),
    /// Rows of that visit that chose each expert.
    counts: Vec<u32>,
    /// Why the file is not whole.
    failure: Option<Error>,
}

impl Writer {
    /// Creates the file. Errors name it.
    pub fn create(path: &Path, shape: Shape) -> Result<Writer> {
        let file = File::create(path).context(|| path.display().to_string())?;
        let mut writer = Writer {
            file: BufWriter::new(file),
            path: path.to_path_buf(),
            visit: (0, 0),
            counts: vec![0; shape.experts],
            failure: None,
        };
        let Shape { layers, experts, top_k } = shape;
        writer.write(format_args!(
            "{VERSION_LINE}\nlayers {layers} experts {experts} top_k {top_k}\n"
        ));
        Ok(writer)
    }

    /// Adds what one row of `layer` chose to the visit of that layer, which lasts until
    /// [`Writer::end_visit`].
    pub fn add_row(&mut self, layer: usize, experts: impl Iterator<Item = u32>) {
        self.visit = (layer, self.visit.1 + 1);
        experts.for_each(|e| self.counts[e as usize] += 1);
    }

    /// Writes the visit, if there was one. What fails is said by [`Writer::finish`].
    pub fn end_visit(&mut self) {
        let (layer, rows) = std::mem::take(&mut self.visit);
        if rows == 0 {
            return;
        }
        let mut counts = std::mem::take(&mut self.counts);
        self.write(format_args!("{layer} {rows}"));
        for (e, count) in counts.iter_mut().enumerate().filter(|(_, count)| **count > 0) {
            match std::mem::take(count) {
                1 => self.write(format_args!(" {e}")),
                count => self.write(format_args!(" {e}:{count}")),
            }
        }
        self.write(format_args!("\n"));
        self.counts = counts;
    }

    /// Writes what is left. Error: some part could not be written, with the file.
    pub fn finish(mut self) -> Result<()> {
        self.end_visit();
        let flushed = self.file.flush().context(|| self.path.display().to_string());
        self.failure.map_or(flushed, Err)
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        if self.failure.is_none()
            && let Err(error) = self.file.write_fmt(text)
        {
            self.failure = Some(Error::from(error).context(self.path.display()));
        }
    }
}
