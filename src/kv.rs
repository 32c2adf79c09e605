//! The cache of one token timeline: what attention needs of every earlier position.
//!
//! Per layer and position: the normed latent and the rotated shared key, `[kv_lora + rope]`
//! floats together; on layers with an indexer also the normed and rotated index key, `[dI]`.
//! Keys and values of the heads are never stored or rebuilt: attention works on the latent.
//! Rows are padded with zeros to whole chunks of 16 floats. Strides are fixed when the cache is
//! made, whatever lengths come later.

#![forbid(unsafe_code)]

use crate::config::Config;
use crate::kernels::LANES;

/// Cache of all layers for up to `capacity_tokens` positions.
pub struct KvCache {
    capacity_tokens: usize,
    /// Chunks of 16 floats of a latent row, and of an index key.
    latent_chunks: usize,
    index_chunks: usize,
    /// Per layer `[capacity_tokens, latent_chunks]`
    latents: Vec<Vec<[f32; LANES]>>,
    /// Per layer `[capacity_tokens, index_chunks]`; empty where there is no indexer
    index_keys: Vec<Vec<[f32; LANES]>>,
}

/// Chunks of 16 floats of a latent row and of an index key.
fn chunks(config: &Config) -> (usize, usize) {
    let kv_dim = config.kv_lora_rank + config.qk_rope_head_dim;
    (kv_dim.div_ceil(LANES), config.index_head_dim.div_ceil(LANES))
}

impl KvCache {
    /// An empty cache. `has_index[layer]` tells which layers keep index keys. The memory is
    /// zeroed lazily by the system, so unused positions cost nothing.
    pub fn new(config: &Config, has_index: &[bool], capacity_tokens: usize) -> KvCache {
        let (latent_chunks, index_chunks) = chunks(config);
        let rows = |chunks: usize| vec![[0.0; LANES]; capacity_tokens * chunks];
        KvCache {
            capacity_tokens,
            latent_chunks,
            index_chunks,
            latents: has_index.iter().map(|_| rows(latent_chunks)).collect(),
            index_keys: has_index.iter().map(|has| rows(index_chunks * *has as usize)).collect(),
        }
    }

    /// Bytes of a cache of this shape.
    pub fn bytes(config: &Config, has_index: &[bool], capacity_tokens: usize) -> usize {
        let (latent_chunks, index_chunks) = chunks(config);
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
        let has_index = self.index_keys.iter().any(|keys| !keys.is_empty());
        self.capacity_tokens.min(if has_index { config.index_topk } else { usize::MAX })
    }

    /// All latent rows of a layer, `[capacity_tokens, chunks]`, and the chunks of one.
    pub fn latents(&self, layer: usize) -> (&[[f32; LANES]], usize) {
        (&self.latents[layer], self.latent_chunks)
    }

    /// The latent row of `position`, to be written, padding included.
    pub fn latent_mut(&mut self, layer: usize, position: usize) -> &mut [f32] {
        let first = position * self.latent_chunks;
        self.latents[layer][first..first + self.latent_chunks].as_flattened_mut()
    }

    /// All index keys of a layer, `[capacity_tokens, chunks]`, and the chunks of one.
    pub fn index_keys(&self, layer: usize) -> (&[[f32; LANES]], usize) {
        (&self.index_keys[layer], self.index_chunks)
    }

    /// The index key of `position`, to be written, padding included.
    pub fn index_key_mut(&mut self, layer: usize, position: usize) -> &mut [f32] {
        let first = position * self.index_chunks;
        self.index_keys[layer][first..first + self.index_chunks].as_flattened_mut()
    }
}
