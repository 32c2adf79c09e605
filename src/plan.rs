//! The memory plan: what a run will hold, in exact bytes, decided before anything is loaded.
//!
//! ram = resident weights + cache of the context + scratch of a batch + routed experts. The first
//! three are fixed by the model and the flags; the experts get the rest, and the plan is refused
//! when that is less than one expert, naming what would have to change.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::Result;
use crate::sys;
use crate::weights::{MATRIX_ALIGN, Mlp, Weights};

/// Share of the available memory used when no limit is given; the rest is for the system and for
/// what the allocator and the page cache hold on our behalf.
const AVAILABLE_SHARE: f64 = 0.85;

/// How much memory routed experts may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// All of it within a share of MemAvailable.
    Available,
    /// All of it within this many bytes.
    RamBytes(usize),
    /// This many expert slots per sparse layer, whatever that takes.
    SlotsPerLayer(usize),
}

/// Bytes of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Weights that stay in memory.
    pub resident_bytes: usize,
    /// Cache of one session at full context.
    pub kv_bytes: usize,
    /// Activations of one batch.
    pub scratch_bytes: usize,
    /// Budget of the expert store.
    pub expert_bytes: usize,
    /// The largest routed expert; 0 in a model without any.
    pub largest_expert_bytes: usize,
}

impl Plan {
    /// Plans a run whose session holds `kv_bytes` and whose largest batch needs `scratch_bytes`.
    pub fn new(
        weights: &Weights,
        kv_bytes: usize,
        scratch_bytes: usize,
        limit: Limit,
    ) -> Result<Plan> {
        let experts = weights.layers.iter().filter_map(|layer| match &layer.mlp {
            Mlp::Sparse(moe) => {
                Some(moe.experts.iter().map(|e| e.bytes().next_multiple_of(MATRIX_ALIGN)))
            }
            Mlp::Dense(_) => None,
        });
        let (mut largest, mut all, mut sparse_layers) = (0, 0, 0);
        for layer in experts {
            sparse_layers += 1;
            for bytes in layer {
                largest = largest.max(bytes);
                all += bytes;
            }
        }
        let mut plan = Plan {
            resident_bytes: weights.resident_bytes(),
            kv_bytes,
            scratch_bytes,
            expert_bytes: 0,
            largest_expert_bytes: largest,
        };
        let ram_bytes = match limit {
            Limit::SlotsPerLayer(slots) => {
                plan.expert_bytes = (slots * sparse_layers * largest).min(all);
                plan.total_bytes()
            }
            Limit::RamBytes(bytes) => bytes,
            Limit::Available => match sys::available_memory_bytes() {
                Some(bytes) => (bytes as f64 * AVAILABLE_SHARE) as usize,
                None => plan.fixed_bytes() + all,
            },
        };
        let needed_bytes = plan.fixed_bytes() + largest;
        if ram_bytes < needed_bytes {
            bail!(
                "the model does not fit in {} of memory: it needs at least {} ({} resident \
                 weights, {} cache of the context, {} scratch, {} for one expert); give \
                 --ram {:.1} or more, or a smaller --ctx",
                gb(ram_bytes),
                gb(needed_bytes),
                gb(plan.resident_bytes),
                gb(plan.kv_bytes),
                gb(plan.scratch_bytes),
                gb(largest),
                (needed_bytes as f64 / 1e8).ceil() / 10.0
            );
        }
        plan.expert_bytes = (ram_bytes - plan.fixed_bytes()).min(all);
        if let Some(available_bytes) = sys::available_memory_bytes()
            && plan.total_bytes() > available_bytes
        {
            bail!(
                "the plan needs {}, but {} are available: give a smaller --ram, --cap or --ctx",
                gb(plan.total_bytes()),
                gb(available_bytes)
            );
        }
        Ok(plan)
    }

    /// Everything but routed experts.
    pub fn fixed_bytes(&self) -> usize {
        self.resident_bytes + self.kv_bytes + self.scratch_bytes
    }

    /// Everything.
    pub fn total_bytes(&self) -> usize {
        self.fixed_bytes() + self.expert_bytes
    }
}

/// Bytes as gigabytes (10⁹) with one decimal; small amounts as megabytes or as they are.
pub fn gb(bytes: usize) -> String {
    if bytes < 100_000 {
        format!("{bytes} bytes")
    } else if bytes < 100_000_000 {
        format!("{:.1} MB", bytes as f64 / 1e6)
    } else {
        format!("{:.1} GB", bytes as f64 / 1e9)
    }
}
