//! Files of the C engine of the same name, `.coli_kv`. Their rows were computed in another order of
//! operations and are never taken over; their tokens can be fed again.
//!
//! Layout: `COLIKV1` and a zero; eight i32: layers, latent width, rotary width, index key width or
//! 0, layers with index keys, vocabulary, records, 0; then records of one position each: token,
//! latent and rotary key per layer, index keys, all of four bytes.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::Result;
use std::fs::File;
use std::os::unix::fs::FileExt;

const MAGIC: &[u8; 8] = b"COLIKV1\0";
const HEADER_BYTES: u64 = 40;
/// Largest number of the header: sizes of a record stay far from overflow.
const FIELD_MAX: i32 = 1 << 24;

/// The error for a file that is not ours.
pub(super) fn refuse<T>(file: &File) -> Result<T> {
    let Some(tokens) = tokens_of_c_engine(file)? else { bail!("not a saved session") };
    bail!(
        "written by another engine: its rows are not the ones this engine computes; the text of \
         its {} tokens can be fed again",
        tokens.len()
    )
}

/// The tokens of a `.coli_kv` file, as far as whole records go; `None` if it is no such file.
pub fn tokens_of_c_engine(file: &File) -> Result<Option<Vec<u32>>> {
    let file_bytes = file.metadata()?.len();
    let mut header = [0; HEADER_BYTES as usize];
    if file_bytes < HEADER_BYTES {
        return Ok(None);
    }
    file.read_exact_at(&mut header, 0)?;
    if !header.starts_with(MAGIC) {
        return Ok(None);
    }
    let mut fields = [0; 8];
    for (field, word) in fields.iter_mut().zip(header[8..].as_chunks::<4>().0) {
        let value = i32::from_le_bytes(*word);
        if !(0..=FIELD_MAX).contains(&value) {
            return Ok(None);
        }
        *field = value as u64;
    }
    let [layers, latent, rotary, index, index_layers, _, records, _] = fields;
    let record_bytes = 4 * (1 + layers * (latent + rotary) + index_layers * index);
    let whole = (file_bytes - HEADER_BYTES) / record_bytes;
    let mut tokens = Vec::new();
    for i in 0..records.min(whole) {
        let mut word = [0; 4];
        file.read_exact_at(&mut word, HEADER_BYTES + i * record_bytes)?;
        tokens.push(u32::from_le_bytes(word));
    }
    Ok(Some(tokens))
}
