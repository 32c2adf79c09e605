//! Weight encodings: how many bytes a matrix takes, how its format is recognised, and how a row
//! becomes `f32`.
//!
//! A matrix is `[rows, cols]` = [output features, input features], row-major. Three families of
//! files hold them:
//!
//! * plain floats: `F32`, `BF16`, `F16`;
//! * the container: `NAME` is flat `U8` bytes, `NAME.qs` its `F32` scales, and no tag says which
//!   format it is. [`resolve`] decides by exact byte counts and refuses whatever does not fit one
//!   format exactly (an optional stamp decides the one real ambiguity);
//! * published checkpoints: FP8 E4M3 with `NAME_scale_inv`, NVFP4 with `NAME_scale` and
//!   `NAME_scale_2`.
//!
//! | format | weight bytes | scales | value |
//! |---|---|---|---|
//! | int8 row | O·I | O | q · s[o], q in −128…127 |
//! | int4 row | O·⌈I/2⌉ | O | (nibble − 8) · s[o], even column in the low nibble |
//! | int2 row | O·⌈I/4⌉ | O | (field − 2) · s[o], lowest bits first |
//! | int4 group | O·⌈I/2⌉ | O·⌈I/g⌉ | as int4, scale of column group i / g |
//! | int3 g64 | O·⌈I/64⌉·24 | O·⌈I/64⌉ | (code − 4) · s; 16 bytes of bit pairs, 8 of high bits |
//! | fp8 block | O·I | ⌈O/128⌉·⌈I/128⌉ | e4m3 · s[o/128, i/128] |
//! | nvfp4 | O·I/2 | O·I/16 e4m3 and one f32 | e2m1 · e4m3 · s2 |
//!
//! Refused by name: the E8 lattice (its weights need rotated activations), UE8M0 block scales,
//! and entropy-coded blobs.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::Result;
use crate::float::{E2M1, E4M3, bf16_to_f32, f16_to_f32, f32_at};
use std::fmt;

/// Side of an FP8 scale block, in rows and in columns.
pub const FP8_BLOCK: usize = 128;
/// Columns that share one NVFP4 block scale.
pub const NVFP4_BLOCK: usize = 16;
/// Columns that share one int3 scale; they take [`INT3_BLOCK_BYTES`].
pub const INT3_BLOCK: usize = 64;
/// Bytes of 64 int3 weights: 16 of low bit pairs, then 8 of high bits.
pub const INT3_BLOCK_BYTES: usize = 24;
/// Group sizes that a converter may have used for int4, in the order in which they are tried.
pub const INT4_GROUPS: [usize; 8] = [16, 32, 48, 64, 96, 128, 192, 256];

/// Stamp of the E8 lattice format, its bytes per 256 columns, and its tag of one float.
const LATTICE: &str = "e8-iq3-lattice";
const LATTICE_BLOCK_BYTES: usize = 98;
const LATTICE_TAG_BYTES: u64 = 4;

/// How the weights of one matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Format {
    /// Little-endian `f32`.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// Signed bytes, one scale a row.
    Int8Row,
    /// Nibbles, one scale a row.
    Int4Row,
    /// Two-bit fields, one scale a row.
    Int2Row,
    /// Nibbles, one scale per group of this many columns.
    Int4Group(usize),
    /// Three-bit codes, one scale per 64 columns.
    Int3Group64,
    /// E4M3 bytes, one `f32` scale per 128×128 block.
    Fp8Block,
    /// E2M1 nibbles, one E4M3 scale per 16 columns, one `f32` for the whole matrix.
    Nvfp4,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Format::F32 => "f32",
            Format::Bf16 => "bf16",
            Format::F16 => "f16",
            Format::Int8Row => "int8-row",
            Format::Int4Row => "int4-row",
            Format::Int2Row => "int2-row",
            Format::Int4Group(group) => return write!(f, "int4-g{group}"),
            Format::Int3Group64 => "int3-g64",
            Format::Fp8Block => "fp8-e4m3-b128",
            Format::Nvfp4 => "nvfp4",
        };
        f.write_str(name)
    }
}

impl Format {
    /// Bytes of one row of `cols` weights.
    pub const fn row_bytes(self, cols: usize) -> usize {
        match self {
            Format::F32 => cols * 4,
            Format::Bf16 | Format::F16 => cols * 2,
            Format::Int8Row | Format::Fp8Block => cols,
            Format::Int4Row | Format::Int4Group(_) | Format::Nvfp4 => cols.div_ceil(2),
            Format::Int2Row => cols.div_ceil(4),
            Format::Int3Group64 => cols.div_ceil(INT3_BLOCK) * INT3_BLOCK_BYTES,
        }
    }

    /// Whether one scale belongs to a whole row.
    pub const fn row_scaled(self) -> bool {
        matches!(self, Format::Int8Row | Format::Int4Row | Format::Int2Row)
    }

    /// Bytes of the scales of a `[rows, cols]` matrix (the NVFP4 scalar is not among them).
    pub const fn scale_bytes(self, rows: usize, cols: usize) -> usize {
        match self {
            Format::F32 | Format::Bf16 | Format::F16 => 0,
            Format::Int8Row | Format::Int4Row | Format::Int2Row => rows * 4,
            Format::Int4Group(group) => rows * cols.div_ceil(group) * 4,
            Format::Int3Group64 => rows * cols.div_ceil(INT3_BLOCK) * 4,
            Format::Fp8Block => rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK) * 4,
            Format::Nvfp4 => rows * cols.div_ceil(NVFP4_BLOCK),
        }
    }
}

/// Finds the format of a container matrix `[rows, cols]` from its byte counts.
///
/// `weight_bytes` and `scale_bytes` are the sizes of `NAME` and `NAME.qs`, `stamp` the format
/// name that the file claims for it, if any. Two cases are documented choices: a 4-bit matrix
/// whose scales fit several group sizes takes the smallest, and an 8-bit one whose `O` equals its
/// number of 128×128 blocks (the o_proj of GLM-5.2) is int8 unless stamped FP8.
///
/// Errors: sizes that no format has; sizes that formats of different widths have (it happens to
/// matrices of a few dozen columns); a stamp that names another format than the sizes do.
pub fn resolve(
    rows: usize,
    cols: usize,
    weight_bytes: u64,
    scale_bytes: u64,
    stamp: Option<&str>,
) -> Result<Format> {
    let bytes = |row_bytes: usize| (rows as u64) * row_bytes as u64;
    let fits = |format: &Format| {
        bytes(format.row_bytes(cols)) == weight_bytes
            && format.scale_bytes(rows, cols) as u64 == scale_bytes
    };
    let is_lattice = bytes(cols.div_ceil(256) * LATTICE_BLOCK_BYTES) == weight_bytes
        && scale_bytes == LATTICE_TAG_BYTES;
    if stamp == Some(LATTICE) {
        bail!("format {LATTICE} is not supported (its weights need rotated activations)");
    }
    let groups = INT4_GROUPS.into_iter().filter(|group| *group <= cols).map(Format::Int4Group);
    let mut families = [
        vec![Format::Int8Row, Format::Fp8Block],
        [Format::Int4Row].into_iter().chain(groups).collect(),
        vec![Format::Int2Row],
        vec![Format::Int3Group64],
    ];
    // A stamp narrows each family; without one the first of a family is the documented choice.
    for family in &mut families {
        family.retain(fits);
        if let Some(i) = family.iter().position(|format| stamp_of(*format) == stamp) {
            family.swap(0, i);
        }
    }
    let mut found: Vec<Format> =
        families.iter().filter_map(|family| family.first().copied()).collect();
    if stamp.is_some() && found.iter().any(|format| stamp_of(*format) == stamp) {
        found.retain(|format| stamp_of(*format) == stamp);
    }
    let format = match found[..] {
        [format] if !is_lattice || stamp.is_some() => format,
        [] if is_lattice => {
            bail!("format {LATTICE} is not supported (its weights need rotated activations)")
        }
        [] => bail!(
            "no known format of a [{rows}, {cols}] matrix has {weight_bytes} weight bytes with \
             {scale_bytes} scale bytes"
        ),
        _ => {
            let lattice = is_lattice.then(|| LATTICE.to_string());
            let names: Vec<String> =
                found.iter().map(|format| format.to_string()).chain(lattice).collect();
            bail!(
                "{weight_bytes} weight bytes with {scale_bytes} scale bytes are ambiguous for a \
                 [{rows}, {cols}] matrix: {}",
                names.join(" or ")
            )
        }
    };
    if stamp.is_some() && stamp_of(format) != stamp {
        bail!("stamped {}, but its bytes are those of {format}", stamp.unwrap_or_default());
    }
    Ok(format)
}

/// The name that a file's stamp uses for a format.
pub fn stamp_of(format: Format) -> Option<&'static str> {
    match format {
        Format::Int8Row => Some("int8-row"),
        Format::Int4Row => Some("int4-row"),
        Format::Int2Row => Some("int2-row"),
        Format::Int4Group(_) => Some("int4-grouped"),
        Format::Int3Group64 => Some("int3-g64"),
        Format::Fp8Block => Some("fp8-e4m3-b128"),
        Format::F32 | Format::Bf16 | Format::F16 | Format::Nvfp4 => None,
    }
}

/// The bytes of a matrix, borrowed: what a kernel needs to decode any row.
#[derive(Clone, Copy)]
pub struct Encoded<'a> {
    /// How `weights` and `scales` are to be read.
    pub format: Format,
    /// Output features O.
    pub rows: usize,
    /// Input features I.
    pub cols: usize,
    /// O rows of `format.row_bytes(cols)` bytes.
    pub weights: &'a [u8],
    /// `format.scale_bytes(rows, cols)` bytes.
    pub scales: &'a [u8],
    /// Factor of the whole matrix: the second scale of NVFP4, 1 elsewhere.
    pub scalar: f32,
}

impl Encoded<'_> {
    /// Decodes row `row` into `out[0..cols]`.
    ///
    /// Each value is (code as an exact `f32`) · scale, rounded once.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "a decoded row has one value per column");
        let bytes = self.row(row);
        match self.format {
            Format::F32 => {
                for (i, value) in out.iter_mut().enumerate() {
                    *value = f32_at(bytes, i);
                }
            }
            Format::Bf16 => decode_u16(bytes, out, bf16_to_f32),
            Format::F16 => decode_u16(bytes, out, f16_to_f32),
            Format::Fp8Block => {
                let blocks = out.chunks_mut(FP8_BLOCK).zip(bytes.chunks(FP8_BLOCK));
                for (block, (values, bytes)) in blocks.enumerate() {
                    let scale = self.scale(row, block * FP8_BLOCK);
                    for (value, byte) in values.iter_mut().zip(bytes) {
                        *value = E4M3[*byte as usize] * scale;
                    }
                }
            }
            Format::Nvfp4 => {
                let blocks = out.chunks_mut(NVFP4_BLOCK).zip(bytes.chunks(NVFP4_BLOCK / 2));
                for (block, (values, bytes)) in blocks.enumerate() {
                    // code · block scale is exact in f32 (2 + 4 significant bits).
                    let scale = self.nvfp4_block_scale(row, block * NVFP4_BLOCK);
                    for (i, value) in values.iter_mut().enumerate() {
                        *value = E2M1[nibble(bytes, i) as usize] * scale * self.scalar;
                    }
                }
            }
            _ => self.each_code(row, |i, code| out[i] = code as f32 * self.scale(row, i)),
        }
    }

    /// The bytes of one row.
    pub fn row(&self, row: usize) -> &[u8] {
        let row_bytes = self.format.row_bytes(self.cols);
        &self.weights[row * row_bytes..(row + 1) * row_bytes]
    }

    /// Hands the integer of every column of a row to `sink`: a value is its integer times its
    /// [`Encoded::scale`]. For NVFP4 they are twice the E2M1 values. Panics for float formats.
    ///
    /// Bits behind a ragged end are padding: writers differ in them, so they are not looked at.
    #[inline(always)]
    pub fn each_code(&self, row: usize, mut sink: impl FnMut(usize, i16)) {
        let (bytes, cols) = (self.row(row), 0..self.cols);
        match self.format {
            Format::Int8Row => cols.for_each(|i| sink(i, (bytes[i] as i8).into())),
            Format::Int4Row | Format::Int4Group(_) => {
                cols.for_each(|i| sink(i, nibble(bytes, i) as i16 - 8));
            }
            Format::Int2Row => cols.for_each(|i| sink(i, low_pair(bytes, i) as i16 - 2)),
            Format::Int3Group64 => cols.for_each(|col| {
                let (block, i) = (col / INT3_BLOCK * INT3_BLOCK_BYTES, col % INT3_BLOCK);
                let (low, high) = bytes[block..block + INT3_BLOCK_BYTES].split_at(16);
                let high = high[i / 8] >> (i % 8) & 1;
                sink(col, low_pair(low, i) as i16 + 4 * high as i16 - 4);
            }),
            Format::Nvfp4 => {
                cols.for_each(|i| sink(i, (2.0 * E2M1[nibble(bytes, i) as usize]) as i16));
            }
            Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8Block => {
                panic!("{} weights are not integers", self.format)
            }
        }
    }

    /// The scale of one weight: its row's, its group's, or its block's (1 for plain floats).
    pub fn scale(&self, row: usize, col: usize) -> f32 {
        let group =
            |columns: usize| f32_at(self.scales, row * self.cols.div_ceil(columns) + col / columns);
        match self.format {
            Format::F32 | Format::Bf16 | Format::F16 => 1.0,
            Format::Int8Row | Format::Int4Row | Format::Int2Row => f32_at(self.scales, row),
            Format::Int4Group(columns) => group(columns),
            Format::Int3Group64 => group(INT3_BLOCK),
            Format::Fp8Block => {
                let first = row / FP8_BLOCK * self.cols.div_ceil(FP8_BLOCK);
                f32_at(self.scales, first + col / FP8_BLOCK)
            }
            Format::Nvfp4 => self.nvfp4_block_scale(row, col) * (self.scalar * 0.5),
        }
    }

    fn nvfp4_block_scale(&self, row: usize, col: usize) -> f32 {
        let blocks = self.cols.div_ceil(NVFP4_BLOCK);
        E4M3[self.scales[row * blocks + col / NVFP4_BLOCK] as usize]
    }
}

/// Nibble of column `i`: the even column is the low one.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (4 * (i % 2)) & 15
}

/// Two-bit field of column `i`, lowest bits first.
fn low_pair(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 4] >> (2 * (i % 4)) & 3
}

fn decode_u16(bytes: &[u8], out: &mut [f32], convert: impl Fn(u16) -> f32) {
    for (value, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *value = convert(u16::from_le_bytes([pair[0], pair[1]]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes of GLM-5.2's matrices in each format, from the published container arithmetic.
    #[test]
    fn glm_sizes_resolve_to_their_formats() {
        let cases: [(usize, usize, u64, u64, Format); 8] = [
            (2048, 6144, 12_582_912, 8_192, Format::Int8Row),
            (2048, 6144, 6_291_456, 8_192, Format::Int4Row),
            (2048, 6144, 6_291_456, 786_432, Format::Int4Group(64)),
            (6144, 2048, 6_291_456, 393_216, Format::Int4Group(128)),
            (2048, 6144, 4_718_592, 786_432, Format::Int3Group64),
            (2048, 6144, 3_145_728, 8_192, Format::Int2Row),
            (576, 6144, 3_538_944, 960, Format::Fp8Block),
            (6144, 16384, 50_331_648, 6_291_456, Format::Int4Group(64)),
        ];
        for (rows, cols, weights, scales, want) in cases {
            assert_eq!(resolve(rows, cols, weights, scales, None).unwrap(), want);
        }
    }

    /// 48 · 128 = 6144: row scales and block scales of o_proj have the same size.
    #[test]
    fn the_o_proj_ambiguity_is_int8_unless_stamped_fp8() {
        let resolve = |stamp| resolve(6144, 16384, 100_663_296, 24_576, stamp);
        assert_eq!(resolve(None).unwrap(), Format::Int8Row);
        assert_eq!(resolve(Some("int8-row")).unwrap(), Format::Int8Row);
        assert_eq!(resolve(Some("fp8-e4m3-b128")).unwrap(), Format::Fp8Block);
        let error = resolve(Some("int4-row")).unwrap_err().to_string();
        assert!(error.contains("stamped int4-row") && error.contains("int8-row"), "{error}");
    }

    #[test]
    fn unknown_sizes_and_contradicting_stamps_are_refused() {
        // A g64 matrix must not pass as per-row int4, nor a short scale file as anything.
        for (weights, scales) in [(6_291_456, 8_188), (6_291_457, 8_192), (12_582_912, 768), (0, 0)]
        {
            let error = resolve(2048, 6144, weights, scales, None).unwrap_err().to_string();
            assert!(error.contains(&format!("{weights} weight bytes")), "{error}");
        }
        assert!(resolve(2048, 6144, 6_291_456, 8_192, Some("int8-row")).is_err());
        assert!(resolve(2048, 6144, 6_291_456, 8_192, Some("rans")).is_err());
        let lattice = resolve(2048, 6144, 2048 * 24 * 98, 4, None).unwrap_err().to_string();
        assert!(lattice.contains("e8-iq3-lattice"), "{lattice}");
        // Four scale bytes are what one row of anything has: the weight bytes decide.
        assert_eq!(resolve(1, 400, 400, 4, None).unwrap(), Format::Int8Row);
    }

    /// Sizes that two formats of different widths share: int3 against int4 and int8, int2 against
    /// int4, int8 against the lattice. A stamp decides.
    #[test]
    fn sizes_of_two_widths_are_refused_as_ambiguous() {
        for (rows, cols, weights, scales, names) in [
            (10, 48, 240, 40, ["int4-row", "int3-g64"]),
            (10, 24, 240, 40, ["int8-row", "int3-g64"]),
            (10, 2, 10, 40, ["int4-row", "int2-row"]),
            (1, 98, 98, 4, ["int8-row", "e8-iq3-lattice"]),
        ] {
            let error = resolve(rows, cols, weights, scales, None).unwrap_err().to_string();
            assert!(
                error.contains("ambiguous") && names.iter().all(|n| error.contains(n)),
                "{error}"
            );
        }
        assert_eq!(resolve(10, 48, 240, 40, Some("int3-g64")).unwrap(), Format::Int3Group64);
        assert_eq!(resolve(1, 98, 98, 4, Some("int8-row")).unwrap(), Format::Int8Row);
    }
}
