//! One shard's header: framing, JSON, and the proof that its tensors tile the data region.
//!
//! Layout: 8 bytes of header length H, H bytes of JSON (space-padded), then the data region, to
//! whose start `data_offsets` are relative. The header is pulled through the JSON reader without
//! building a tree, so a header of many megabytes costs its own bytes plus the entries.

#![forbid(unsafe_code)]

use super::{Dtype, TENSORS_MAX};
use crate::bail;
use crate::error::{Context, Result};
use crate::json::{Limits, Reader};
use std::io::Read;

/// Longest header; the largest real ones are a few megabytes.
const HEADER_BYTES_MAX: u64 = 512 << 20;
/// Most dimensions of a tensor.
const RANK_MAX: usize = 8;
/// Longest tensor name.
const NAME_BYTES_MAX: usize = 1024;
/// Most entries of one `colibri.fmt` stamp.
const STAMPS_MAX: usize = 4096;
/// The metadata key of the format stamp: a JSON text, an object of tensor name to format name.
pub const STAMP_KEY: &str = "colibri.fmt";
/// The metadata key of a calibration file: the shape of the model that it was made with.
pub const CALIBRATION_KEY: &str = "colibri.calibration";

/// Format names a stamp may hold. Whether one fits its tensor's bytes is the resolver's question.
const STAMP_NAMES: [&str; 9] = [
    "f32",
    "int8-row",
    "int4-row",
    "int2-row",
    "int4-grouped",
    "int3-g64",
    "e8-iq3-lattice",
    "mxfp4",
    "fp8-e4m3-b128",
];

/// A tensor as its header describes it, offsets relative to the data region.
#[derive(Debug)]
pub struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Box<[usize]>,
    pub begin: u64,
    pub end: u64,
}

/// What a header says, checked against the file's length.
#[derive(Debug)]
pub struct Header {
    /// By offset.
    pub entries: Vec<Entry>,
    /// File offset of the data region.
    pub data_start: u64,
    /// Tensor name and format name, in the order of the text.
    pub stamps: Vec<(String, String)>,
    /// What [`CALIBRATION_KEY`] says.
    pub calibration: Option<String>,
}

/// Reads and checks the header of a file of `file_bytes`; nothing is allocated before the length
/// word is compared with the cap and the file.
pub fn read(mut file: impl Read, file_bytes: u64) -> Result<Header> {
    let Some(header_bytes_max) = file_bytes.checked_sub(8) else {
        bail!("expected at least 8 bytes of header length, found a file of {file_bytes} bytes");
    };
    let mut word = [0; 8];
    file.read_exact(&mut word).context(|| "header length at offset 0")?;
    let header_bytes = u64::from_le_bytes(word);
    if header_bytes > header_bytes_max {
        bail!(
            "header of {header_bytes} bytes at offset 8 reaches beyond the file of {file_bytes} \
             bytes"
        );
    }
    if header_bytes > HEADER_BYTES_MAX {
        bail!("header of {header_bytes} bytes, at most {HEADER_BYTES_MAX} allowed");
    }
    let capacity = usize::try_from(header_bytes).expect("capped above");
    let mut text = Vec::new();
    if text.try_reserve_exact(capacity).is_err() {
        bail!("no memory for a header of {header_bytes} bytes");
    }
    file.take(header_bytes).read_to_end(&mut text).context(|| "header at offset 8")?;
    if text.len() != capacity {
        bail!("header at offset 8: expected {capacity} bytes, the file gave {}", text.len());
    }
    let data_start = 8 + header_bytes;
    let (mut entries, Metadata { stamps, calibration }) = parse(&text).context(|| "header")?;
    for entry in &entries {
        check_size(entry).context(|| format!("tensor {}", entry.name))?;
    }
    entries.sort_by_key(|entry| (entry.begin, entry.end));
    check_tiling(&entries, file_bytes - data_start)?;
    Ok(Header { entries, data_start, stamps, calibration })
}

/// What is kept of `__metadata__`.
#[derive(Default)]
struct Metadata {
    stamps: Vec<(String, String)>,
    calibration: Option<String>,
}

fn parse(text: &[u8]) -> Result<(Vec<Entry>, Metadata)> {
    let limits = Limits { max_bytes: text.len(), max_depth: 16, max_values: usize::MAX };
    let mut reader = Reader::new(text, limits)?;
    let mut entries = Vec::new();
    let mut metadata = None;
    reader.object(|reader, name| {
        let at = reader.offset();
        if name == "__metadata__" {
            if metadata.replace(parse_metadata(reader).context(|| name)?).is_some() {
                return Err(reader.error_at(at, "__metadata__ occurs twice"));
            }
            return Ok(());
        }
        if name.len() > NAME_BYTES_MAX {
            let found = name.len();
            let message = format!("tensor name of {found} bytes, at most {NAME_BYTES_MAX} allowed");
            return Err(reader.error_at(at, &message));
        }
        if entries.len() == TENSORS_MAX {
            bail!("more than {TENSORS_MAX} tensors");
        }
        entries.push(parse_entry(reader, &name).context(|| format!("tensor {name}"))?);
        Ok(())
    })?;
    reader.finish()?;
    Ok((entries, metadata.unwrap_or_default()))
}

fn parse_entry(reader: &mut Reader<'_>, name: &str) -> Result<Entry> {
    let (mut dtype, mut shape, mut offsets) = (Dtype::U8, Vec::new(), [0; 2]);
    reader.fields(&["dtype", "shape", "data_offsets"], |reader, key| {
        let at = reader.offset();
        match key {
            "dtype" => {
                let text = reader.string()?;
                dtype = Dtype::parse(&text).ok_or_else(|| {
                    let shown: String = text.chars().take(40).collect();
                    reader.error_at(at, &format!("unknown dtype {shown:?}"))
                })?;
            }
            "shape" => reader.array(|reader| {
                let at = reader.offset();
                if shape.len() == RANK_MAX {
                    let message = format!("shape of more than {RANK_MAX} dimensions");
                    return Err(reader.error_at(at, &message));
                }
                let dim = reader.u64()?;
                let too_large = |_| reader.error_at(at, &format!("dimension {dim} is too large"));
                shape.push(usize::try_from(dim).map_err(too_large)?);
                Ok(())
            })?,
            "data_offsets" => offsets = parse_offsets(reader)?,
            // The format's own reader ignores further fields.
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let ([begin, end], shape) = (offsets, shape.into());
    Ok(Entry { name: name.to_string(), dtype, shape, begin, end })
}

fn parse_offsets(reader: &mut Reader<'_>) -> Result<[u64; 2]> {
    let at = reader.offset();
    let (mut pair, mut count) = ([0; 2], 0);
    reader.array(|reader| {
        let offset = reader.u64()?;
        if let Some(place) = pair.get_mut(count) {
            *place = offset;
        }
        count += 1;
        Ok(())
    })?;
    let [begin, end] = pair;
    let message = match count {
        2 if begin <= end => return Ok(pair),
        2 => format!("data_offsets begin at {begin}, after their end {end}"),
        _ => format!("expected two data_offsets, found {count}"),
    };
    Err(reader.error_at(at, &message))
}

/// Reads `__metadata__`: entropy coding is refused, and what is not kept is ignored.
fn parse_metadata(reader: &mut Reader<'_>) -> Result<Metadata> {
    let mut metadata = Metadata::default();
    reader.fields(&[], |reader, key| {
        let value = reader.string()?;
        if key == "cfse" || key.starts_with("colibri.int4-rans") {
            bail!(
                "{key} marks an entropy-coded container; restore the plain one with its own tool"
            );
        }
        if key == STAMP_KEY {
            metadata.stamps = parse_stamps(value.as_bytes()).context(|| STAMP_KEY)?;
        } else if key == CALIBRATION_KEY {
            metadata.calibration = Some(value.into_owned());
        }
        Ok(())
    })?;
    Ok(metadata)
}

/// The stamp is a JSON text inside the JSON: an object of tensor name to format name.
fn parse_stamps(text: &[u8]) -> Result<Vec<(String, String)>> {
    let limits = Limits { max_bytes: text.len(), max_depth: 1, max_values: STAMPS_MAX + 1 };
    let mut reader = Reader::new(text, limits)?;
    let mut stamps = Vec::new();
    reader.object(|reader, name| {
        let at = reader.offset();
        let format = reader.string()?;
        if format.starts_with("int4-rans") {
            bail!("tensor {name} is stamped {format:?}, an entropy-coded format that is not read");
        }
        if !STAMP_NAMES.contains(&&*format) {
            let shown: String = format.chars().take(40).collect();
            return Err(reader.error_at(at, &format!("tensor {name}: unknown format {shown:?}")));
        }
        stamps.push((name.into_owned(), format.into_owned()));
        Ok(())
    })?;
    reader.finish()?;
    Ok(stamps)
}

/// The span must be exactly what shape and dtype ask for.
fn check_size(entry: &Entry) -> Result<()> {
    let Entry { dtype, shape, begin, end, .. } = entry;
    let bits = shape
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim as u64))
        .and_then(|elements| elements.checked_mul(dtype.size_bits()));
    let Some(bits) = bits else {
        bail!("the size of {} {shape:?} overflows", dtype.name());
    };
    if bits % 8 != 0 {
        bail!("{} {shape:?} is {bits} bits, no whole number of bytes", dtype.name());
    }
    let (expected, found) = (bits / 8, end - begin);
    if found != expected {
        bail!(
            "expected {expected} bytes for {} {shape:?}, found {found} (data_offsets {begin} to \
             {end})",
            dtype.name()
        );
    }
    Ok(())
}

/// Tensors sorted by offset must cover the data region without overlap, hole or rest. Padding
/// between tensors is refused too: no known writer makes any.
fn check_tiling(entries: &[Entry], data_bytes: u64) -> Result<()> {
    let mut covered = 0;
    let mut previous = "the header";
    for entry in entries {
        let Entry { name, begin, end, .. } = entry;
        if *begin < covered {
            bail!(
                "tensor {name} begins at data offset {begin}, inside tensor {previous}, which \
                 ends at {covered}"
            );
        }
        if *begin > covered {
            bail!(
                "data offsets {covered} to {begin}, between {previous} and tensor {name}, belong \
                 to no tensor"
            );
        }
        if *end > data_bytes {
            bail!(
                "tensor {name} ends at data offset {end}, but the file holds {data_bytes} bytes \
                 of data: it is truncated"
            );
        }
        (covered, previous) = (*end, name);
    }
    if covered < data_bytes {
        bail!(
            "{} bytes after {previous}, the last tensor, belong to no tensor",
            data_bytes - covered
        );
    }
    Ok(())
}
