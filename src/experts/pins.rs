//! Which experts are kept in preference: the most used ones, by bytes. Refuses to hold or read
//! any.

#![forbid(unsafe_code)]

use super::ExpertId;
use super::usage::Usage;

/// A set of experts.
#[derive(Default)]
pub struct Pins {
    /// By layer and expert.
    pinned: Vec<Vec<bool>>,
    /// What had been chosen when the set was.
    before: Usage,
}

impl Pins {
    /// Takes the experts chosen most often since the last time, as many as fit into `bytes`, the
    /// first ones among those of equal use; never one that was not chosen at all.
    pub fn choose(
        &mut self,
        usage: &Usage,
        bytes: usize,
        expert_bytes: impl Fn(ExpertId) -> usize,
    ) {
        let mut recent: Vec<(u64, ExpertId)> = (usage.iter())
            .map(|(id, choices)| (choices - self.before.count(id).min(choices), id))
            .filter(|(choices, _)| *choices > 0)
            .collect();
        recent.sort_unstable_by_key(|(choices, id)| (u64::MAX - choices, *id));
        self.pinned = usage.layers().iter().map(|layer| vec![false; layer.len()]).collect();
        let mut left = bytes;
        for (_, id) in recent {
            let Some(rest) = left.checked_sub(expert_bytes(id)) else { break };
            left = rest;
            self.pinned[id.0][id.1] = true;
        }
        self.before = usage.clone();
    }

    /// Whether `id` is one of them.
    pub fn has(&self, (layer, e): ExpertId) -> bool {
        self.pinned.get(layer).and_then(|layer| layer.get(e)).is_some_and(|pinned| *pinned)
    }

    /// Those of `layer`, ascending.
    pub fn of(&self, layer: usize) -> Vec<u32> {
        let count = self.pinned.get(layer).map_or(0, Vec::len);
        (0..count as u32).filter(|e| self.has((layer, *e as usize))).collect()
    }
}
