//! The work itself: blocks of rows pass from the reading thread to the encoding one, which shares
//! them out to its pool, and on to the writer.
//!
//! Buffers go round, so memory is bounded and the slowest of the three sets the pace. A stage that
//! fails drops its ends of the channels, at which the others stop; what the writer says comes
//! first, because it is nearest to what is kept.

#![forbid(unsafe_code)]

use super::Request;
use super::encode::{Scales, encode_row};
use super::manifest::SourceFile;
use super::plan::{Output, Plan, Tensor};
use super::writer::{Event, Writer};
use crate::bail;
use crate::disk::read_exact_at;
use crate::error::{Context, Error, Result};
use crate::pool::Pool;
use crate::quant::Encoded;
use crate::sys;
use std::collections::BTreeMap;
use std::fs::File;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

/// Rows of a block are a multiple of this: whole FP8 blocks, and whole words of a hash even where
/// a row of weights is one byte.
const BLOCK_ROWS: usize = 256;
/// About as many source bytes as a block has.
const BLOCK_BYTES: usize = 8 << 20;
/// Blocks on their way between two stages.
const BLOCKS: usize = 3;
/// Weights that one thread encodes at a time.
const PART_WEIGHTS: usize = 1 << 16;

/// Some rows of a tensor: weights, then scales, as the source or as the output has them.
pub struct Rows<'a> {
    /// Where they go.
    pub output: &'a Output,
    /// What they are of.
    pub tensor: &'a Tensor,
    /// The first of them.
    pub first: usize,
    /// How many.
    pub rows: usize,
    /// Their bytes.
    pub bytes: Vec<u8>,
}

/// What passes from stage to stage.
pub enum Message<'a> {
    /// Rows of the current output.
    Rows(Rows<'a>),
    /// The current output has all its rows.
    End(&'a Output),
}

/// Does what is planned. `on_event` hears of it; SIGINT stops it between two blocks. Errors name
/// the file, and the tensor where it is one's.
pub fn run(plan: Plan, request: &Request, on_event: impl FnMut(Event<'_>)) -> Result<()> {
    let Plan { manifest, outputs, begun } = plan;
    let sources = manifest.sources.clone();
    let mut writer = Writer::new(request, manifest, begun, on_event)?;
    let Some(repo) = &request.repo else {
        return convert(&outputs, &sources, request, &mut writer);
    };
    // One after another: what an output is made of is there only until it is finished.
    for output in outputs.chunks(1) {
        for shard in output[0].shards() {
            let on_bytes = &mut |bytes| (writer.on_event)(Event::Fetched(bytes));
            repo.fetch(request, &sources[shard].name, on_bytes)?;
        }
        convert(output, &sources, request, &mut writer)?;
    }
    if sys::is_present(&request.from) {
        std::fs::remove_dir_all(&request.from).context(|| request.from.display())?;
    }
    Ok(())
}

/// Makes these outputs of source files that are there.
fn convert<F: FnMut(Event<'_>)>(
    outputs: &[Output],
    sources: &[SourceFile],
    request: &Request,
    writer: &mut Writer<'_, F>,
) -> Result<()> {
    thread::scope(|scope| {
        let (read, rows) = channel();
        let (encoded, blocks) = channel();
        let (free_in, next_in) = buffers();
        let (free_out, next_out) = buffers();
        let reader = scope.spawn(move || read_all(outputs, sources, request, &next_in, &read));
        let encoder = scope.spawn(move || {
            let mut encoder = Encoder::new(request);
            encoder.run(rows, (&free_in, &next_out), &encoded)
        });
        let written = writer.run(blocks, free_out);
        let encoded = encoder.join().unwrap_or_else(|panic| resume_unwind(panic));
        let read = reader.join().unwrap_or_else(|panic| resume_unwind(panic));
        written.and(encoded).and(read)
    })
}

/// Buffers to go round: where they are given back, and where the next one comes from.
fn buffers() -> (Sender<Vec<u8>>, Receiver<Vec<u8>>) {
    let (free, next) = channel();
    (0..BLOCKS).for_each(|_| free.send(Vec::new()).expect("its other end is here"));
    (free, next)
}

/// First rows and numbers of rows of the blocks of a tensor.
fn blocks(tensor: &Tensor) -> impl Iterator<Item = (usize, usize)> {
    let source = &tensor.source;
    let row_bytes = source.format.row_bytes(source.cols).max(1);
    let step = (BLOCK_BYTES / row_bytes / BLOCK_ROWS).max(1) * BLOCK_ROWS;
    let rows = if source.cols == 0 { 0 } else { source.rows };
    (0..rows).step_by(step).map(move |first| (first, step.min(rows - first)))
}

/// The source files that are open.
struct Files<'a> {
    sources: &'a [SourceFile],
    from: &'a Path,
    open: BTreeMap<usize, (PathBuf, File)>,
}

impl Files<'_> {
    fn get(&mut self, shard: usize) -> Result<&(PathBuf, File)> {
        if !self.open.contains_key(&shard) {
            let path = self.from.join(&self.sources[shard].name);
            let file = File::open(&path).context(|| path.display())?;
            self.open.insert(shard, (path, file));
        }
        Ok(&self.open[&shard])
    }

    /// Reads rows of a tensor and their scales into `bytes`.
    fn read(
        &mut self,
        tensor: &Tensor,
        first: usize,
        rows: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        let source = &tensor.source;
        let row_bytes = source.format.row_bytes(source.cols);
        // The first row starts a block of scales, so that those before it are whole.
        let scales = |rows| source.format.scale_bytes(rows, source.cols);
        bytes.resize(rows * row_bytes + scales(rows), 0);
        let (weights, scale_bytes) = bytes.split_at_mut(rows * row_bytes);
        let (path, file) = self.get(source.weights.shard)?;
        let offset = source.weights.offset + (first * row_bytes) as u64;
        read_exact_at(file, path, &source.name, offset, weights)?;
        if let Some(span) = source.scales {
            let (path, file) = self.get(span.shard)?;
            let what = format_args!("scales of {}", source.name);
            read_exact_at(file, path, what, span.offset + scales(first) as u64, scale_bytes)?;
        }
        Ok(())
    }
}

fn read_all<'a>(
    outputs: &'a [Output],
    sources: &[SourceFile],
    request: &Request,
    next: &Receiver<Vec<u8>>,
    read: &Sender<Message<'a>>,
) -> Result<()> {
    for output in outputs {
        let mut files = Files { sources, from: &request.from, open: BTreeMap::new() };
        for tensor in &output.tensors {
            for (first, rows) in blocks(tensor) {
                // Another stage stopped, and says why.
                let Ok(mut bytes) = next.recv() else { return Ok(()) };
                files.read(tensor, first, rows, &mut bytes)?;
                if read.send(Message::Rows(Rows { output, tensor, first, rows, bytes })).is_err() {
                    return Ok(());
                }
            }
        }
        for (shard, (_, file)) in &files.open {
            sys::forget_cached(file, 0, sources[*shard].bytes as usize);
        }
        if read.send(Message::End(output)).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// What one thread needs to encode a row.
#[derive(Default)]
struct Scratch {
    row: Vec<f32>,
    /// A row with a value that is not finite.
    bad_row: Option<usize>,
}

/// The encoding stage.
struct Encoder<'a> {
    pool: Pool,
    request: &'a Request,
    /// What columns count for that nothing is known of.
    ones: Vec<f32>,
    scratch: Vec<Scratch>,
}

impl Encoder<'_> {
    fn new(request: &Request) -> Encoder<'_> {
        let pool = Pool::new(request.threads);
        let scratch = (0..pool.threads()).map(|_| Scratch::default()).collect();
        Encoder { pool, request, ones: Vec::new(), scratch }
    }

    fn run<'a>(
        &mut self,
        rows: Receiver<Message<'a>>,
        (free, next): (&Sender<Vec<u8>>, &Receiver<Vec<u8>>),
        encoded: &Sender<Message<'a>>,
    ) -> Result<()> {
        for message in rows {
            let message = match message {
                Message::Rows(read) => {
                    let Ok(mut bytes) = next.recv() else { return Ok(()) };
                    self.encode(&read, &mut bytes)?;
                    // The reader may have ended.
                    let _ = free.send(read.bytes);
                    Message::Rows(Rows { bytes, ..read })
                }
                end => end,
            };
            if encoded.send(message).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Rows as the source has them to rows as the output does.
    fn encode(&mut self, read: &Rows<'_>, out: &mut Vec<u8>) -> Result<()> {
        let Rows { tensor, first, rows, bytes, .. } = read;
        let (source, format, rows) = (&tensor.source, tensor.format, *rows);
        if format == source.format {
            out.clear();
            out.extend_from_slice(bytes);
            return Ok(());
        }
        let cols = source.cols;
        let calibration = self.request.calibration.as_ref();
        let known = calibration.map(|known| known.importance(&source.name, cols)).transpose()?;
        self.ones.resize(cols.max(self.ones.len()), 1.0);
        let importance = known.flatten().unwrap_or(&self.ones[..cols]);
        let importance = (self.request.scales == Scales::Search).then_some(importance);
        let (weights, scales) = bytes.split_at(rows * source.format.row_bytes(cols));
        let (from, scalar) = (source.format, source.scalar);
        let matrix = Encoded { format: from, rows, cols, weights, scales, scalar };
        let (row_bytes, scale_bytes) = (format.row_bytes(cols), format.scale_bytes(1, cols));
        out.resize(rows * (row_bytes + scale_bytes), 0);
        let (mut weights, mut scales) = out.split_at_mut(rows * row_bytes);
        let part_rows = (PART_WEIGHTS / cols).max(1);
        let mut parts = Vec::new();
        for first in (0..rows).step_by(part_rows) {
            let count = part_rows.min(rows - first);
            let weights = weights.split_off_mut(..count * row_bytes);
            let scales = scales.split_off_mut(..count * scale_bytes);
            parts.push(weights.zip(scales).expect("room for all rows"));
        }
        let cuts: Vec<usize> = (0..=parts.len()).collect();
        let work = |part: usize, bytes: &mut [(&mut [u8], &mut [u8])], scratch: &mut Scratch| {
            let (weights, scales) = &mut bytes[0];
            scratch.row.resize(cols, 0.0);
            for (i, weights) in weights.chunks_exact_mut(row_bytes).enumerate() {
                let row = part * part_rows + i;
                let scales = &mut scales[i * scale_bytes..(i + 1) * scale_bytes];
                matrix.decode_row(row, &mut scratch.row);
                if !encode_row(format, importance, &scratch.row, weights, scales) {
                    scratch.bad_row = Some(row);
                }
            }
        };
        self.pool.share(rows * cols, &mut parts, &cuts, &mut self.scratch, work);
        if let Some(row) = self.scratch.iter().find_map(|scratch| scratch.bad_row) {
            bail!(
                "tensor {}: row {}: a weight is not finite: fetch its file again, it may be broken",
                source.name,
                first + row
            );
        }
        Ok(())
    }
}

/// What the first block of the largest tensor took.
pub struct Speed {
    /// Source bytes a second, of one read.
    pub read_bytes_s: f64,
    /// The same of encoding, on all threads.
    pub encode_bytes_s: f64,
}

/// Reads and encodes one block, for an estimate; `None` when nothing is left to do.
pub fn probe(plan: &Plan, request: &Request) -> Result<Option<Speed>> {
    let all =
        plan.outputs.iter().flat_map(|output| output.tensors.iter().map(move |t| (output, t)));
    let Some((output, tensor)) = all.max_by_key(|(_, tensor)| tensor.source.bytes()) else {
        return Ok(None);
    };
    let Some((first, rows)) = blocks(tensor).next() else { return Ok(None) };
    let (sources, from) = (&plan.manifest.sources[..], &request.from);
    let mut files = Files { sources, from, open: BTreeMap::new() };
    let mut bytes = Vec::new();
    let start = Instant::now();
    files.read(tensor, first, rows, &mut bytes)?;
    let read_s = start.elapsed().as_secs_f64();
    let count = bytes.len() as f64;
    let mut encoder = Encoder::new(request);
    let read = Rows { output, tensor, first, rows, bytes };
    let mut out = Vec::new();
    // Once for the pages of the buffers.
    encoder.encode(&read, &mut out)?;
    let start = Instant::now();
    encoder.encode(&read, &mut out)?;
    let encode_s = start.elapsed().as_secs_f64();
    Ok(Some(Speed { read_bytes_s: count / read_s, encode_bytes_s: count / encode_s }))
}

/// Stops the writer once SIGINT arrived.
pub fn check_interrupt() -> Result<()> {
    if sys::interrupted() { Err(Error::interrupted()) } else { Ok(()) }
}
