//! The expert store: routed experts are read from disk when a token needs them and kept in
//! memory under one byte budget, least recently used evicted first.
//!
//! The budget is a wall: room is made before a read starts, so the bytes held never exceed it,
//! not even for a moment. What is cached decides speed only; an expert's bytes are the same from
//! cache and from disk.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::Result;
use crate::quant::Encoded;
use crate::safetensors::Directory;
use crate::sys::Pages;
use crate::weights::ExpertSource;

/// (layer, expert index)
pub type ExpertId = (usize, usize);

/// What the store has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests answered from memory.
    pub hits: u64,
    /// Requests that had to read.
    pub misses: u64,
    /// Bytes read from disk.
    pub bytes_read: u64,
}

/// One routed expert in memory: gate, up and down as stored.
pub struct Expert<'a> {
    /// `[I, D]`
    pub gate: Encoded<'a>,
    /// `[I, D]`
    pub up: Encoded<'a>,
    /// `[D, I]`
    pub down: Encoded<'a>,
}

struct Slot {
    id: ExpertId,
    bytes: Pages,
    /// Value of the clock when it was last asked for.
    last_use: u64,
}

/// All expert memory of the process.
pub struct ExpertStore {
    budget_bytes: usize,
    held_bytes: usize,
    slots: Vec<Slot>,
    /// Per layer and expert the index of its slot.
    places: Vec<Vec<Option<u32>>>,
    clock: u64,
    counters: Counters,
}

impl ExpertStore {
    /// A store that holds at most `budget_bytes`. `largest_bytes` is the size of the largest
    /// expert: a budget below it could not run the model and is refused.
    pub fn new(budget_bytes: usize, largest_bytes: usize) -> Result<ExpertStore> {
        if budget_bytes < largest_bytes {
            bail!(
                "{budget_bytes} bytes are left for routed experts, but one takes {largest_bytes}"
            );
        }
        Ok(ExpertStore {
            budget_bytes,
            held_bytes: 0,
            slots: Vec::new(),
            places: Vec::new(),
            clock: 0,
            counters: Counters::default(),
        })
    }

    /// Requests and bytes so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes of experts in memory now; never above the budget.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Brings the experts `wanted` of `layer` into memory, as many from the first on as fit
    /// together, at least one; returns how many. `sources` has all experts of the layer.
    ///
    /// A failed read leaves the store without that expert and within its budget.
    pub fn load(
        &mut self,
        directory: &Directory,
        layer: usize,
        wanted: &[u32],
        sources: &[ExpertSource],
    ) -> Result<usize> {
        if self.places.len() <= layer {
            self.places.resize_with(layer + 1, Vec::new);
        }
        if self.places[layer].len() < sources.len() {
            self.places[layer].resize(sources.len(), None);
        }
        let begin = self.clock;
        for (count, e) in wanted.iter().map(|e| *e as usize).enumerate() {
            self.clock += 1;
            if let Some(place) = self.places[layer][e] {
                self.slots[place as usize].last_use = self.clock;
                self.counters.hits += 1;
                continue;
            }
            let needed_bytes = sources[e].bytes();
            let Some(reusable) = self.make_room(needed_bytes, begin) else {
                assert!(count > 0, "the largest expert fits the budget");
                return Ok(count);
            };
            let bytes = read(directory, &sources[e], reusable)?;
            self.held_bytes += needed_bytes;
            self.counters.misses += 1;
            self.counters.bytes_read += needed_bytes as u64;
            self.places[layer][e] = Some(self.slots.len() as u32);
            self.slots.push(Slot { id: (layer, e), bytes, last_use: self.clock });
        }
        Ok(wanted.len())
    }

    /// The expert `id`, which must have been loaded; `source` is where it came from.
    pub fn expert(&self, id: ExpertId, source: &ExpertSource) -> Expert<'_> {
        let place = self.places[id.0][id.1].expect("the expert is loaded");
        let bytes = &self.slots[place as usize].bytes;
        let (gate, rest) = bytes.split_at(source.gate.bytes());
        let (up, down) = rest.split_at(source.up.bytes());
        Expert {
            gate: source.gate.encoded(gate),
            up: source.up.encoded(up),
            down: source.down.encoded(down),
        }
    }

    /// Evicts the least recently used experts, none used after `begin`, until `bytes` fit.
    /// Returns the memory of the last one, if any; `None` when it cannot be done.
    fn make_room(&mut self, bytes: usize, begin: u64) -> Option<Option<Pages>> {
        let mut reusable = None;
        while self.held_bytes + bytes > self.budget_bytes {
            // A miss costs a read of megabytes: looking at all slots is nothing beside it.
            let (oldest, slot) = self.slots.iter().enumerate().min_by_key(|(_, s)| s.last_use)?;
            if slot.last_use > begin {
                return None;
            }
            let slot = self.slots.swap_remove(oldest);
            if let Some(moved) = self.slots.get(oldest) {
                self.places[moved.id.0][moved.id.1] = Some(oldest as u32);
            }
            self.places[slot.id.0][slot.id.1] = None;
            self.held_bytes -= slot.bytes.len();
            reusable = Some(slot.bytes);
        }
        Some(reusable)
    }
}

/// Reads the three matrices, into `reusable` if it has the right size.
fn read(directory: &Directory, source: &ExpertSource, reusable: Option<Pages>) -> Result<Pages> {
    let mut buffer = match reusable.filter(|pages| pages.len() == source.bytes()) {
        Some(pages) => pages,
        None => Pages::new(source.bytes())?,
    };
    let (gate, rest) = buffer.split_at_mut(source.gate.bytes());
    let (up, down) = rest.split_at_mut(source.up.bytes());
    source.gate.read(directory, gate)?;
    source.up.read(directory, up)?;
    source.down.read(directory, down)?;
    Ok(buffer)
}
