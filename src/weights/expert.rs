//! Where one routed expert lies on disk, and how its bytes lie in memory after a read.
//!
//! Its six tensors are mostly neighbours: the three weights behind each other, and far away their
//! three scales. Neighbours are read together, so an expert takes two reads, or a few more where a
//! shard ends in its midst.
//!
//! A read that goes around the page cache starts and ends at multiples of [`DIRECT_ALIGN`], in the
//! file and in memory. Such an expert has room for what is read before and behind it, and its
//! bytes start wherever they do in their block.
//!
//! Where the container has mirrors, a hash of the expert decides which copy it is read from; what a
//! mirror fails to give is read from the shard itself.

#![forbid(unsafe_code)]

use super::MATRIX_ALIGN;
use super::source::{MatrixSource, Span};
use crate::disk::{DIRECT_ALIGN, read_direct, read_exact_at};
use crate::error::Result;
use crate::quant::Encoded;
use crate::safetensors::{Directory, Shard};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::time::Duration;

/// Tries of a read that fails: a drive that is reset, or a network file system that hangs for a
/// moment, comes back.
const TRIES: u32 = 3;
/// Pause before the second try; twice that before the third.
const PAUSE: Duration = Duration::from_millis(20);

/// Where one routed expert lies.
pub struct ExpertSource {
    /// `[I, D]`
    pub gate: MatrixSource,
    /// `[I, D]`
    pub up: MatrixSource,
    /// `[D, I]`
    pub down: MatrixSource,
    pieces: Box<[Piece]>,
    /// Where weights and scales of gate, up and down lie in memory.
    places: [[usize; 2]; 3],
    bytes: usize,
    align: usize,
    /// Of layer and expert; decides which copy is read.
    hash: u64,
}

/// Neighbouring bytes that are read together.
#[derive(Debug)]
struct Piece {
    span: Span,
    /// Where in memory the read starts.
    at: usize,
    /// Bytes that the read has before the span.
    skip: usize,
    /// The matrix (gate, up, down) whose weights or scales come first.
    first: usize,
}

/// How far the reading of an expert is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    piece: usize,
    /// Of that piece, from the start of its read.
    bytes: usize,
}

/// One routed expert in memory: gate, up and down as stored.
pub struct Expert<'a> {
    /// `[I, D]`
    pub gate: Encoded<'a>,
    /// `[I, D]`
    pub up: Encoded<'a>,
    /// `[D, I]`
    pub down: Encoded<'a>,
}

impl ExpertSource {
    /// Puts the three matrices together.
    pub fn new(
        directory: &Directory,
        gate: MatrixSource,
        up: MatrixSource,
        down: MatrixSource,
    ) -> ExpertSource {
        let mut spans = Vec::new();
        for (m, matrix) in [&gate, &up, &down].into_iter().enumerate() {
            spans.push((matrix.weights, [m, 0]));
            spans.extend(matrix.scales.map(|scales| (scales, [m, 1])));
        }
        spans.sort_by_key(|(span, _)| (span.shard, span.offset));
        let align = if directory.is_direct() { DIRECT_ALIGN } else { MATRIX_ALIGN };
        let (mut pieces, mut places, mut bytes) = (Vec::<Piece>::new(), [[0; 2]; 3], 0);
        for (span, [m, part]) in spans {
            match pieces.last_mut() {
                Some(last) if last.span.end() == (span.shard, span.offset) => {
                    last.span.bytes += span.bytes;
                }
                _ => {
                    let is_direct = directory.is_shard_direct(span.shard);
                    let skip = if is_direct { span.offset as usize % DIRECT_ALIGN } else { 0 };
                    pieces.push(Piece { span, at: bytes, skip, first: m });
                }
            }
            let piece = pieces.last().expect("there is one now");
            places[m][part] = piece.at + piece.skip + piece.span.bytes - span.bytes;
            bytes = (piece.at + piece.skip + piece.span.bytes).next_multiple_of(align);
        }
        // The name has both numbers.
        let mut hasher = DefaultHasher::new();
        gate.name.hash(&mut hasher);
        let (pieces, hash) = (pieces.into(), hasher.finish());
        ExpertSource { gate, up, down, pieces, places, bytes, align, hash }
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where its memory must start: at a multiple of this.
    pub fn align(&self) -> usize {
        self.align
    }

    /// Reads on into `memory [bytes()]`, at most about `bytes_max` bytes (a multiple of
    /// [`DIRECT_ALIGN`]); true when the expert is complete. Errors, after some tries, name the
    /// first matrix of what was read together.
    pub fn read_on(
        &self,
        directory: &Directory,
        memory: &mut [u8],
        progress: &mut Progress,
        bytes_max: usize,
    ) -> Result<bool> {
        let names = [&self.gate, &self.up, &self.down].map(|matrix| &matrix.name);
        let piece = &self.pieces[progress.piece];
        let source = (self.hash, &**names[piece.first]);
        let mut tries = 1;
        loop {
            match piece.read(directory, source, memory, progress.bytes, bytes_max) {
                Ok(bytes) => progress.bytes = bytes,
                Err(_) if tries < TRIES => {
                    std::thread::sleep(PAUSE * tries);
                    tries += 1;
                    continue;
                }
                Err(error) => return Err(error),
            }
            if progress.bytes == piece.needed_bytes() {
                *progress = Progress { piece: progress.piece + 1, bytes: 0 };
            }
            return Ok(progress.piece == self.pieces.len());
        }
    }

    /// The expert whose `memory` was read.
    pub fn expert<'a>(&self, memory: &'a [u8]) -> Expert<'a> {
        let encoded = |m: usize, matrix: &MatrixSource| {
            let [weights, scales] = self.places[m];
            let scale_bytes = matrix.scales.map_or(0, |span| span.bytes);
            let weights = &memory[weights..weights + matrix.weights.bytes];
            matrix.encoded_parts(weights, &memory[scales..scales + scale_bytes])
        };
        Expert {
            gate: encoded(0, &self.gate),
            up: encoded(1, &self.up),
            down: encoded(2, &self.down),
        }
    }
}

impl Piece {
    /// Bytes from the start of its read to the end of the span.
    fn needed_bytes(&self) -> usize {
        self.skip + self.span.bytes
    }

    /// Reads on, behind the first `done` of the bytes needed; returns how many there are then. A
    /// read that fails on a mirror is the shard's own.
    fn read(
        &self,
        directory: &Directory,
        (hash, name): (u64, &str),
        memory: &mut [u8],
        done: usize,
        bytes_max: usize,
    ) -> Result<usize> {
        let part = done..self.needed_bytes().min(done.saturating_add(bytes_max));
        if let Some((mirror, copy)) = directory.route(self.span.shard, hash) {
            match self.read_from(copy, name, memory, part.clone()) {
                Err(error) => mirror.count_failure(&error),
                Ok(()) => return Ok(part.end),
            }
        }
        let end = part.end;
        self.read_from(&directory.shards()[self.span.shard], name, memory, part)?;
        Ok(end)
    }

    /// Reads the bytes `part`, counted from the start of the read.
    fn read_from(
        &self,
        shard: &Shard,
        name: &str,
        memory: &mut [u8],
        part: Range<usize>,
    ) -> Result<()> {
        let Range { start, end } = part;
        let offset = self.span.offset - self.skip as u64;
        let memory = &mut memory[self.at..];
        if let Some(direct) = &shard.direct {
            let buffer = &mut memory[start..end.next_multiple_of(DIRECT_ALIGN)];
            if read_direct(direct, offset + start as u64, buffer, end - start) {
                return Ok(());
            }
        }
        // Also where the file system refuses; what is wrong with the file is said here.
        let start = start.max(self.skip);
        let what = format_args!("{name} and what follows it");
        let at = offset + start as u64;
        read_exact_at(&shard.file, &shard.path, what, at, &mut memory[start..end])
    }
}
