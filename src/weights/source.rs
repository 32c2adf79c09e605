//! Where one matrix lies and how it is encoded: the binding of a name to checked byte spans.
//!
//! The rule for each matrix, in this order: a `NAME.qs` beside it makes it a container matrix,
//! resolved by sizes; an F8_E4M3 tensor needs `NAME_scale_inv`; a U8 tensor with `NAME_scale`
//! is NVFP4; anything else must be plain floats of exactly the expected shape.

#![forbid(unsafe_code)]

use super::read_span;
use crate::bail;
use crate::disk::read_exact_at;
use crate::error::{Context, Result};
use crate::float::f32_at;
use crate::quant::{self, Encoded, FP8_BLOCK, Format, NVFP4_BLOCK};
use crate::safetensors::{Directory, Dtype, Tensor};
use crate::sys;
use std::fmt::Display;

/// A checked range of bytes in one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index of the shard in the directory.
    pub shard: usize,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length.
    pub bytes: usize,
}

impl Span {
    /// Shard and offset of the first byte behind it.
    pub fn end(&self) -> (usize, u64) {
        (self.shard, self.offset + self.bytes as u64)
    }

    fn of(tensor: &Tensor) -> Span {
        Span { shard: tensor.shard as usize, offset: tensor.offset, bytes: tensor.bytes as usize }
    }
}

/// One matrix `[rows, cols]` on disk: format and byte spans, all sizes checked.
#[derive(Clone, Debug)]
pub struct MatrixSource {
    /// Name of the weight tensor.
    pub name: Box<str>,
    /// Output features O.
    pub rows: usize,
    /// Input features I.
    pub cols: usize,
    /// Encoding of weights and scales.
    pub format: Format,
    /// `format.row_bytes(cols) · rows` bytes.
    pub weights: Span,
    /// `format.scale_bytes(rows, cols)` bytes, unless that is 0.
    pub scales: Option<Span>,
    /// Factor of the whole matrix: the second scale of NVFP4, 1 elsewhere.
    pub scalar: f32,
}

impl MatrixSource {
    /// Resolves `name` as a `[rows, cols]` matrix. Errors name the tensor.
    pub fn bind(
        directory: &Directory,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixSource> {
        let Some(tensor) = directory.get(name) else {
            bail!("tensor {name} is missing (expected shape [{rows}, {cols}])");
        };
        resolve_source(directory, name, tensor, rows, cols)
            .context(|| format!("{}: tensor {name}", directory.shard(tensor).path.display()))
    }

    /// Bytes of weights and scales together.
    pub fn bytes(&self) -> usize {
        self.weights.bytes + self.scales.map_or(0, |span| span.bytes)
    }

    /// Reads weights, then scales, into `buffer [bytes()]`, to stay there.
    pub fn read(&self, directory: &Directory, buffer: &mut [u8]) -> Result<()> {
        let (weights, scales) = buffer.split_at_mut(self.weights.bytes);
        read_once(directory, &self.name, self.weights, weights)?;
        match self.scales {
            Some(span) => {
                read_once(directory, format_args!("scales of {}", self.name), span, scales)
            }
            None => Ok(()),
        }
    }

    /// Decodes the one row `row` into `out [cols]`, reading only that row and its scales, through
    /// `buffer`.
    pub fn read_row(
        &self,
        directory: &Directory,
        row: usize,
        out: &mut [f32],
        buffer: &mut Vec<u8>,
    ) -> Result<()> {
        assert!(row < self.rows, "row {row} of {} rows of {}", self.rows, self.name);
        let row_bytes = self.format.row_bytes(self.cols);
        let scale_bytes = self.format.scale_bytes(1, self.cols);
        buffer.resize(row_bytes + scale_bytes, 0);
        let (weights, scales) = buffer.split_at_mut(row_bytes);
        let span = self.weights.part(row * row_bytes, row_bytes);
        read_span(directory, &self.name, span, weights)?;
        // Only FP8 shares scales among rows: its block row is read as that of row 0.
        let scale_row = if self.format == Format::Fp8Block { row / FP8_BLOCK } else { row };
        if let Some(span) = self.scales {
            let span = span.part(scale_row * scale_bytes, scale_bytes);
            read_span(directory, format_args!("scales of {}", self.name), span, scales)?;
        }
        let (format, cols, scalar) = (self.format, self.cols, self.scalar);
        Encoded { format, rows: 1, cols, weights, scales, scalar }.decode_row(0, out);
        Ok(())
    }

    /// The matrix whose `bytes` were read by [`MatrixSource::read`].
    pub fn encoded<'a>(&self, bytes: &'a [u8]) -> Encoded<'a> {
        assert_eq!(bytes.len(), self.bytes(), "bytes of {}", self.name);
        let (weights, scales) = bytes.split_at(self.weights.bytes);
        self.encoded_parts(weights, scales)
    }

    /// The matrix whose weights and scales are these.
    pub fn encoded_parts<'a>(&self, weights: &'a [u8], scales: &'a [u8]) -> Encoded<'a> {
        Encoded {
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            weights,
            scales,
            scalar: self.scalar,
        }
    }
}

impl Span {
    /// `bytes` bytes from `start` within this span.
    fn part(self, start: usize, bytes: usize) -> Span {
        assert!(start + bytes <= self.bytes, "part of a span beyond its end");
        Span { shard: self.shard, offset: self.offset + start as u64, bytes }
    }
}

/// The rules of the module's first paragraph, for one tensor that exists.
fn resolve_source(
    directory: &Directory,
    name: &str,
    tensor: &Tensor,
    rows: usize,
    cols: usize,
) -> Result<MatrixSource> {
    let (mut scales, mut scalar) = (None, 1.0);
    let format = if let Some(qs) = directory.get(&format!("{name}.qs")) {
        if !matches!(tensor.dtype, Dtype::U8 | Dtype::I8) || qs.dtype != Dtype::F32 {
            let (weight, scale) = (tensor.dtype.name(), qs.dtype.name());
            bail!("expected U8 with F32 scales in .qs, found {weight} with {scale}");
        }
        scales = Some(Span::of(qs));
        // Routed experts are resolved by their sizes alone.
        let stamp = directory.stamp(name).filter(|_| !name.contains(".mlp.experts."));
        quant::resolve(rows, cols, tensor.bytes, qs.bytes, stamp)?
    } else if tensor.dtype == Dtype::F8E4m3 {
        expect_shape(tensor, &[rows, cols])?;
        let blocks = [rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)];
        scales = Some(sidecar(directory, &format!("{name}_scale_inv"), Dtype::F32, &blocks)?);
        Format::Fp8Block
    } else if tensor.dtype == Dtype::U8 {
        if directory.get(&format!("{name}_scale")).is_none() {
            bail!("U8 without scales: neither {name}.qs nor {name}_scale exists");
        }
        if !cols.is_multiple_of(2) {
            bail!("NVFP4 needs an even number of columns, found {cols}");
        }
        expect_shape(tensor, &[rows, cols / 2])?;
        let blocks = [rows, cols.div_ceil(NVFP4_BLOCK)];
        scales = Some(sidecar(directory, &format!("{name}_scale"), Dtype::F8E4m3, &blocks)?);
        scalar = nvfp4_scalar(directory, &format!("{name}_scale_2"))?;
        Format::Nvfp4
    } else {
        let vector = [cols];
        let matrix = [rows, cols];
        if let Some(stamp) = directory.stamp(name) {
            bail!("stamped {stamp}, but it has no scales in {name}.qs");
        }
        expect_shape(tensor, if rows == 1 && tensor.shape.len() == 1 { &vector } else { &matrix })?;
        match tensor.dtype {
            Dtype::F32 => Format::F32,
            Dtype::Bf16 => Format::Bf16,
            Dtype::F16 => Format::F16,
            other => bail!("dtype {} is not a weight format without scales", other.name()),
        }
    };
    let weights = Span::of(tensor);
    assert_eq!(weights.bytes, rows * format.row_bytes(cols), "bytes of {name}");
    Ok(MatrixSource { name: name.into(), rows, cols, format, weights, scales, scalar })
}

fn expect_shape(tensor: &Tensor, shape: &[usize]) -> Result<()> {
    if *tensor.shape != *shape {
        bail!("expected shape {shape:?}, found {:?}", tensor.shape);
    }
    Ok(())
}

/// Bytes that are read before the page cache is asked to forget them.
const PART_BYTES: usize = 32 << 20;
/// The page cache holds up to this much as one piece, and forgets whole pieces only.
const PIECE_BYTES: usize = 2 << 20;

/// Reads a span that will not be read again. Where experts go around the page cache, what it holds
/// of this is memory that counts as ours and that the plan does not have.
fn read_once(
    directory: &Directory,
    what: impl Display,
    span: Span,
    buffer: &mut [u8],
) -> Result<()> {
    let shard = &directory.shards()[span.shard];
    let mut offset = span.offset;
    for part in buffer.chunks_mut(PART_BYTES) {
        read_exact_at(&shard.file, &shard.path, &what, offset, part)?;
        if shard.direct.is_some() {
            let start = offset.saturating_sub(PIECE_BYTES as u64);
            sys::forget_cached(&shard.file, start, part.len() + 2 * PIECE_BYTES);
        }
        offset += part.len() as u64;
    }
    Ok(())
}

/// The scale tensor `name` with exactly this dtype and shape.
fn sidecar(directory: &Directory, name: &str, dtype: Dtype, shape: &[usize]) -> Result<Span> {
    let Some(tensor) = directory.get(name) else {
        bail!("its scales {name} are missing (expected {} {shape:?})", dtype.name());
    };
    if tensor.dtype != dtype {
        bail!("scales {name}: expected {}, found {}", dtype.name(), tensor.dtype.name());
    }
    expect_shape(tensor, shape).context(|| format!("scales {name}"))?;
    Ok(Span::of(tensor))
}

/// The second scale of NVFP4: one F32 below 1. A larger one follows the reciprocal convention of
/// other tools, where values would be divided by it.
fn nvfp4_scalar(directory: &Directory, name: &str) -> Result<f32> {
    let Some(tensor) = directory.get(name).filter(|t| t.dtype == Dtype::F32 && t.bytes == 4) else {
        bail!("its second scale {name} is missing or not one F32");
    };
    let mut bytes = [0; 4];
    read_span(directory, name, Span::of(tensor), &mut bytes)?;
    let scalar = f32_at(&bytes, 0);
    if !(scalar > 0.0 && scalar < 1.0) {
        bail!("second scale {name}: expected a number between 0 and 1, found {scalar}");
    }
    Ok(scalar)
}
