//! The cache of one token timeline: what attention needs of every earlier position.
//!
//! Per layer and position: the normed latent and the rotated shared key, `[kv_lora + rope]`
//! floats together; on layers with an indexer also the normed and rotated index key, `[dI]`.
//! Keys and values of the heads are never stored or rebuilt: attention works on the latent.
//! Rows are padded with zeros to whole chunks of 16 floats. Strides are fixed when the cache is
//! made, whatever lengths come later.

#![forbid(unsafe_code)]

use crate::config::Config;
use crate::error::Result;
use crate::kernels::LANES;
use crate::sys::Pages;
use std::ops::Range;

/// Consecutive positions of one timeline: its rows of a batch.
pub struct Sequence<'a> {
    /// Tokens, at least one.
    pub tokens: &'a [u32],
    /// Position of the first of them.
    pub first: usize,
    /// Its place among the rows of the batch, see [`Sequence::place`].
    pub row: usize,
    /// Holds the positions before, and has room for these.
    pub kv: &'a mut KvCache,
}

impl<'a> Sequence<'a> {
    /// The positions from `first` on.
    pub fn new(tokens: &'a [u32], first: usize, kv: &'a mut KvCache) -> Sequence<'a> {
        assert!(first + tokens.len() <= kv.capacity_tokens(), "the cache is too small");
        Sequence { tokens, first, row: 0, kv }
    }

    /// Gives each sequence of a batch its rows, one after the other; returns how many there are.
    pub fn place(batch: &mut [Sequence<'_>]) -> usize {
        batch.iter_mut().fold(0, |row, sequence| {
            sequence.row = row;
            row + sequence.tokens.len()
        })
    }

    /// Its rows of the batch.
    pub fn rows(&self) -> Range<usize> {
        self.row..self.row + self.tokens.len()
    }
}

/// Cache of all layers for up to `capacity_tokens` positions.
pub struct KvCache {
    capacity_tokens: usize,
    /// Floats of a latent row, and of an index key.
    latent_floats: usize,
    index_floats: usize,
    /// Chunks of 16 floats of the same.
    latent_chunks: usize,
    index_chunks: usize,
    /// `[layers, capacity_tokens, latent_chunks]`
    latents: Pages<[f32; LANES]>,
    /// `[layers with an indexer, capacity_tokens, index_chunks]`
    index_keys: Pages<[f32; LANES]>,
    /// Place of each layer among those with an indexer
    index_layers: Vec<Option<usize>>,
}

/// Floats of a latent row, and chunks of 16 floats of it and of an index key.
fn sizes(config: &Config) -> (usize, usize, usize) {
    let kv_dim = config.kv_lora_rank + config.qk_rope_head_dim;
    (kv_dim, kv_dim.div_ceil(LANES), config.index_head_dim.div_ceil(LANES))
}

impl KvCache {
    /// An empty cache. `has_index[layer]` tells which layers keep index keys. Positions that were
    /// never used cost address space only. Error: there is none left.
    pub fn new(config: &Config, has_index: &[bool], capacity_tokens: usize) -> Result<KvCache> {
        let (latent_floats, latent_chunks, index_chunks) = sizes(config);
        let mut indexed = 0..;
        let index_layers = has_index.iter().map(|has| has.then(|| indexed.next()).flatten());
        let index_layers: Vec<_> = index_layers.collect();
        Ok(KvCache {
            capacity_tokens,
            latent_floats,
            index_floats: config.index_head_dim,
            latent_chunks,
            index_chunks,
            latents: Pages::new(has_index.len() * capacity_tokens * latent_chunks)?,
            index_keys: Pages::new(indexed.start * capacity_tokens * index_chunks)?,
            index_layers,
        })
    }

    /// Bytes of a cache of this shape.
    pub fn bytes(config: &Config, has_index: &[bool], capacity_tokens: usize) -> usize {
        let (_, latent_chunks, index_chunks) = sizes(config);
        let indexed = has_index.iter().filter(|has| **has).count();
        let chunks = latent_chunks * has_index.len() + index_chunks * indexed;
        capacity_tokens * chunks * size_of::<[f32; LANES]>()
    }

    /// Positions that fit.
    pub fn capacity_tokens(&self) -> usize {
        self.capacity_tokens
    }

    /// Most keys that one position can attend to.
    pub fn keys_max(&self, config: &Config) -> usize {
        self.capacity_tokens.min(match self.index_keys.is_empty() {
            true => usize::MAX,
            false => config.index_topk,
        })
    }

    /// All latent rows of a layer, `[capacity_tokens, chunks]`, and the chunks of one.
    pub fn latents(&self, layer: usize) -> (&[[f32; LANES]], usize) {
        let all = self.capacity_tokens * self.latent_chunks;
        (&self.latents[layer * all..(layer + 1) * all], self.latent_chunks)
    }

    /// The latent row of `position`, to be written, padding included.
    pub fn latent_mut(&mut self, layer: usize, position: usize) -> &mut [f32] {
        let first = (layer * self.capacity_tokens + position) * self.latent_chunks;
        self.latents[first..first + self.latent_chunks].as_flattened_mut()
    }

    /// All index keys of a layer, `[capacity_tokens, chunks]`, and the chunks of one. Panics for
    /// a layer that keeps none.
    pub fn index_keys(&self, layer: usize) -> (&[[f32; LANES]], usize) {
        let all = self.capacity_tokens * self.index_chunks;
        let place = self.index_place(layer);
        (&self.index_keys[place * all..(place + 1) * all], self.index_chunks)
    }

    /// The index key of `position`, to be written, padding included. Panics as above.
    pub fn index_key_mut(&mut self, layer: usize, position: usize) -> &mut [f32] {
        let first = (self.index_place(layer) * self.capacity_tokens + position) * self.index_chunks;
        self.index_keys[first..first + self.index_chunks].as_flattened_mut()
    }

    /// Layers, that of a draft head included.
    pub fn layers(&self) -> usize {
        self.index_layers.len()
    }

    /// Floats that a layer keeps of each position.
    pub fn position_floats(&self, layer: usize) -> usize {
        self.latent_floats + self.index_layers[layer].map_or(0, |_| self.index_floats)
    }

    /// What a layer keeps of `position`, without padding: its latent row and its index key, which
    /// is empty on a layer without.
    pub fn rows(&self, layer: usize, position: usize) -> [&[f32]; 2] {
        let (latents, chunks) = self.latents(layer);
        let latent = &latents[position * chunks..].as_flattened()[..self.latent_floats];
        if self.index_layers[layer].is_none() {
            return [latent, &[]];
        }
        let (keys, chunks) = self.index_keys(layer);
        [latent, &keys[position * chunks..].as_flattened()[..self.index_floats]]
    }

    /// The same rows, to be written.
    pub fn rows_mut(&mut self, layer: usize, position: usize) -> [&mut [f32]; 2] {
        let place = |layer: usize| layer * self.capacity_tokens + position;
        let latent = &mut self.latents[place(layer) * self.latent_chunks..];
        let latent = &mut latent.as_flattened_mut()[..self.latent_floats];
        match self.index_layers[layer] {
            Some(layer) => {
                let key = &mut self.index_keys[place(layer) * self.index_chunks..];
                [latent, &mut key.as_flattened_mut()[..self.index_floats]]
            }
            None => [latent, &mut []],
        }
    }

    /// Takes the first `count` positions of a cache of the same model.
    pub fn copy_from(&mut self, from: &KvCache, count: usize) {
        for layer in 0..self.layers() {
            for position in 0..count {
                let rows = self.rows_mut(layer, position).into_iter();
                rows.zip(from.rows(layer, position)).for_each(|(to, row)| to.copy_from_slice(row));
            }
        }
    }

    fn index_place(&self, layer: usize) -> usize {
        self.index_layers[layer].expect("the layer keeps index keys")
    }
}
