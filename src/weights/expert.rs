//! Where one routed expert lies on disk, and how its bytes lie in memory after a read.
//!
//! Its six tensors are mostly neighbours: the three weights behind each other, and far away their
//! three scales. Neighbours are read together, so an expert takes two reads, or a few more where a
//! shard ends in its midst.
//!
//! A read that goes around the page cache starts and ends at multiples of [`DIRECT_ALIGN`], in the
//! file and in memory. Such an expert has room for what is read before and behind it, and its
//! bytes start wherever they do in their block.

#![forbid(unsafe_code)]

use super::MATRIX_ALIGN;
use super::source::{MatrixSource, Span};
use crate::disk::{DIRECT_ALIGN, read_direct, read_exact_at};
use crate::error::Result;
use crate::quant::Encoded;
use crate::safetensors::Directory;
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
                    let is_direct = directory.shards()[span.shard].direct.is_some();
                    let skip = if is_direct { span.offset as usize % DIRECT_ALIGN } else { 0 };
                    pieces.push(Piece { span, at: bytes, skip, first: m });
                }
            }
            let piece = pieces.last().expect("there is one now");
            places[m][part] = piece.at + piece.skip + piece.span.bytes - span.bytes;
            bytes = (piece.at + piece.skip + piece.span.bytes).next_multiple_of(align);
        }
        ExpertSource { gate, up, down, pieces: pieces.into(), places, bytes, align }
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where its memory must start: at a multiple of this.
    pub fn align(&self) -> usize {
        self.align
    }

    /// Reads it into `memory [bytes()]`. Errors, after some tries, name the first matrix of what
    /// was read together.
    pub fn read(&self, directory: &Directory, memory: &mut [u8]) -> Result<()> {
        let names = [&self.gate, &self.up, &self.down].map(|matrix| &matrix.name);
        self.pieces.iter().try_for_each(|piece| {
            let mut tries = 1;
            loop {
                match piece.read(directory, names[piece.first], memory) {
                    Err(_) if tries < TRIES => std::thread::sleep(PAUSE * tries),
                    result => return result,
                }
                tries += 1;
            }
        })
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
    fn read(&self, directory: &Directory, name: &str, memory: &mut [u8]) -> Result<()> {
        let (shard, needed) = (&directory.shards()[self.span.shard], self.skip + self.span.bytes);
        if let Some(direct) = &shard.direct {
            let (start, bytes) = (self.span.offset - self.skip as u64, needed);
            let buffer = &mut memory[self.at..][..bytes.next_multiple_of(DIRECT_ALIGN)];
            if read_direct(direct, start, buffer, needed) {
                return Ok(());
            }
        }
        // Also where the file system refuses; what is wrong with the file is said here.
        let buffer = &mut memory[self.at + self.skip..][..self.span.bytes];
        let what = format_args!("{name} and what follows it");
        read_exact_at(&shard.file, &shard.path, what, self.span.offset, buffer)
    }
}
