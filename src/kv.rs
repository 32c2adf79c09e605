//! The cache of one token timeline: what attention needs of every earlier position.
//!
//! Per layer and position: the normed latent and the rotated shared key, `[kv_lora + rope]`
//! floats together; on layers with an indexer also the normed and rotated index key, `[dI]`.
//! Keys and values of the heads are never stored or rebuilt: attention works on the latent.
//! Strides are fixed when the cache is made, whatever lengths come later.

#![forbid(unsafe_code)]

use crate::config::Config;

/// Cache of all layers for up to `capacity_tokens` positions.
pub struct KvCache {
    capacity_tokens: usize,
    kv_dim: usize,
    index_dim: usize,
    /// Per layer `[capacity_tokens, kv_lora + rope]`
    latents: Vec<Vec<f32>>,
    /// Per layer `[capacity_tokens, dI]`; empty where there is no indexer
    index_keys: Vec<Vec<f32>>,
}

impl KvCache {
    /// An empty cache. `has_index[layer]` tells which layers keep index keys. The memory is
    /// zeroed lazily by the system, so unused positions cost nothing.
    pub fn new(config: &Config, has_index: &[bool], capacity_tokens: usize) -> KvCache {
        let kv_dim = config.kv_lora_rank + config.qk_rope_head_dim;
        let index_dim = config.index_head_dim;
        let index_keys = |has_index: &bool| match has_index {
            true => vec![0.0; capacity_tokens * index_dim],
            false => Vec::new(),
        };
        KvCache {
            capacity_tokens,
            kv_dim,
            index_dim,
            latents: has_index.iter().map(|_| vec![0.0; capacity_tokens * kv_dim]).collect(),
            index_keys: has_index.iter().map(index_keys).collect(),
        }
    }

    /// Bytes of a cache of this shape.
    pub fn bytes(config: &Config, has_index: &[bool], capacity_tokens: usize) -> usize {
        let kv_dim = config.kv_lora_rank + config.qk_rope_head_dim;
        let indexed = has_index.iter().filter(|has| **has).count();
        capacity_tokens * 4 * (kv_dim * has_index.len() + config.index_head_dim * indexed)
    }

    /// Positions that fit.
    pub fn capacity_tokens(&self) -> usize {
        self.capacity_tokens
    }

    /// The row `[kv_lora + rope]` of `position`, to be written.
    pub fn latent_mut(&mut self, layer: usize, position: usize) -> &mut [f32] {
        &mut self.latents[layer][position * self.kv_dim..(position + 1) * self.kv_dim]
    }

    /// The row `[kv_lora + rope]` of `position`.
    pub fn latent(&self, layer: usize, position: usize) -> &[f32] {
        &self.latents[layer][position * self.kv_dim..(position + 1) * self.kv_dim]
    }

    /// The index key `[dI]` of `position`, to be written.
    pub fn index_key_mut(&mut self, layer: usize, position: usize) -> &mut [f32] {
        &mut self.index_keys[layer][position * self.index_dim..(position + 1) * self.index_dim]
    }

    /// The index key `[dI]` of `position`.
    pub fn index_key(&self, layer: usize, position: usize) -> &[f32] {
        &self.index_keys[layer][position * self.index_dim..(position + 1) * self.index_dim]
    }
}
