//! The hash that proves records, and streams that compute it on the way.

#![forbid(unsafe_code)]

use crate::error::Result;
use std::io::{Read, Write};

/// Bytes that are read or written at once.
pub const BUFFER_BYTES: usize = 1 << 18;

/// Odd, with its ones well spread.
const FACTOR: u64 = 0xd6e8_feb8_6659_fd93;

/// Hash of words of 32 bits. Each step is a bijection of state and word: one changed word always
/// changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hash(pub u64);

impl Hash {
    /// Of nothing.
    pub const START: Hash = Hash(0x9e37_79b9_7f4a_7c15);

    /// Takes bytes as words, the last padded with zeros.
    pub fn add(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<4>();
        let mut last = [0; 4];
        last[..rest.len()].copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(&last);
        for word in words.iter().chain(last) {
            let mixed = self.0 ^ u64::from(u32::from_le_bytes(*word));
            self.0 = mixed.wrapping_mul(FACTOR).rotate_left(29);
        }
    }
}

/// A stream whose bytes are hashed.
pub struct Hashed<T> {
    /// The stream.
    pub inner: T,
    /// Of all bytes so far.
    pub hash: Hash,
    buffer: Vec<u8>,
}

impl<T> Hashed<T> {
    /// Continues `hash`.
    pub fn new(inner: T, hash: Hash) -> Hashed<T> {
        Hashed { inner, hash, buffer: Vec::new() }
    }
}

impl<R: Read> Hashed<R> {
    /// The next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Result<&[u8]> {
        self.buffer.resize(count, 0);
        self.inner.read_exact(&mut self.buffer)?;
        self.hash.add(&self.buffer);
        Ok(&self.buffer)
    }

    /// The next `N` numbers.
    pub fn longs<const N: usize>(&mut self) -> Result<[u64; N]> {
        let longs = self.bytes(8 * N)?.as_chunks::<8>().0;
        Ok(std::array::from_fn(|i| u64::from_le_bytes(longs[i])))
    }

    /// The next `count` tokens.
    pub fn tokens(&mut self, count: usize) -> Result<Vec<u32>> {
        let words = self.bytes(4 * count)?.as_chunks::<4>().0;
        Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    /// Bytes that only count for the hash.
    pub fn skip(&mut self, mut count: u64) -> Result<()> {
        while count > 0 {
            let part = count.min(BUFFER_BYTES as u64);
            self.bytes(part as usize)?;
            count -= part;
        }
        Ok(())
    }

    /// Whether the hash so far follows.
    pub fn ends_in_hash(&mut self) -> Result<bool> {
        let expected = self.hash.0;
        Ok(self.longs()? == [expected])
    }
}

impl<W: Write> Hashed<W> {
    /// Writes numbers.
    pub fn put<const N: usize>(
        &mut self,
        numbers: impl IntoIterator<Item = [u8; N]>,
    ) -> Result<()> {
        self.buffer.clear();
        self.buffer.extend(numbers.into_iter().flatten());
        self.hash.add(&self.buffer);
        Ok(self.inner.write_all(&self.buffer)?)
    }

    /// Writes 64-bit numbers.
    pub fn put_longs(&mut self, longs: &[u64]) -> Result<()> {
        self.put(longs.iter().map(|long| long.to_le_bytes()))
    }

    /// Writes floats.
    pub fn put_floats(&mut self, row: &[f32]) -> Result<()> {
        self.put(row.iter().map(|float| float.to_le_bytes()))
    }

    /// Writes the hash so far.
    pub fn put_hash(&mut self) -> Result<()> {
        self.put_longs(&[self.hash.0])
    }
}
