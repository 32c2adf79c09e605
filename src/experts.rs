//! The expert store: routed experts are read from disk when a token needs them and kept in
//! memory under one byte budget, least recently used evicted first.
//!
//! The budget is a wall: all experts live in one range of memory of that size, each in a place of
//! exactly its own size, and room is made before a read starts. One range also means large pages
//! throughout, and experts that do not all start at the same distance from a page's edge. What is
//! cached decides speed only; an expert's bytes are the same from cache and from disk.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::Result;
use crate::quant::Encoded;
use crate::safetensors::Directory;
use crate::sys::Pages;
use crate::weights::{ExpertSource, MATRIX_ALIGN};

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
    /// Where it lies in the arena.
    start: usize,
    bytes: usize,
    /// Value of the clock when it was last asked for.
    last_use: u64,
}

/// All expert memory of the process.
pub struct ExpertStore {
    /// Memory of the size of the budget; what was never used costs nothing.
    arena: Pages,
    held_bytes: usize,
    /// In the order of the arena.
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
            arena: Pages::new(budget_bytes)?,
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
            let bytes = sources[e].bytes();
            let Some((place, start)) = self.make_room(bytes, begin) else {
                assert!(count > 0, "the largest expert fits the budget");
                return Ok(count);
            };
            read(directory, &sources[e], &mut self.arena[start..start + bytes])?;
            self.held_bytes += bytes;
            self.counters.misses += 1;
            self.counters.bytes_read += bytes as u64;
            let slot = Slot { id: (layer, e), start, bytes, last_use: self.clock };
            self.slots.insert(place, slot);
            self.renumber(place);
        }
        Ok(wanted.len())
    }

    /// The expert `id`, which must have been loaded; `source` is where it came from.
    pub fn expert(&self, id: ExpertId, source: &ExpertSource) -> Expert<'_> {
        let place = self.places[id.0][id.1].expect("the expert is loaded");
        let Slot { start, bytes, .. } = self.slots[place as usize];
        let (gate, rest) = self.arena[start..start + bytes].split_at(source.gate.bytes());
        let (up, down) = rest.split_at(source.up.bytes());
        Expert {
            gate: source.gate.encoded(gate),
            up: source.up.encoded(up),
            down: source.down.encoded(down),
        }
    }

    /// Evicts the least recently used experts, none used after `begin`, until `bytes` fit into a
    /// gap. Returns the index that a slot there will have, and where it starts; `None` when it
    /// cannot be done.
    fn make_room(&mut self, bytes: usize, begin: u64) -> Option<(usize, usize)> {
        loop {
            if let Some(gap) = self.gap(bytes) {
                return Some(gap);
            }
            // A miss costs a read of megabytes: looking at all slots is nothing beside it.
            let (oldest, slot) = self.slots.iter().enumerate().min_by_key(|(_, s)| s.last_use)?;
            if slot.last_use > begin {
                return None;
            }
            let slot = self.slots.remove(oldest);
            self.places[slot.id.0][slot.id.1] = None;
            self.held_bytes -= slot.bytes;
            self.renumber(oldest);
        }
    }

    /// The first gap of `bytes`: the index of the slot behind it, and where it starts.
    fn gap(&self, bytes: usize) -> Option<(usize, usize)> {
        let mut start = 0;
        for (i, slot) in self.slots.iter().enumerate() {
            if slot.start >= start + bytes {
                return Some((i, start));
            }
            start = (slot.start + slot.bytes).next_multiple_of(MATRIX_ALIGN);
        }
        (start + bytes <= self.arena.len()).then_some((self.slots.len(), start))
    }

    /// Corrects the places of the slots from index `first` on.
    fn renumber(&mut self, first: usize) {
        for (i, slot) in self.slots.iter().enumerate().skip(first) {
            self.places[slot.id.0][slot.id.1] = Some(i as u32);
        }
    }
}

/// Reads the three matrices into `buffer`.
fn read(directory: &Directory, source: &ExpertSource, buffer: &mut [u8]) -> Result<()> {
    let (gate, rest) = buffer.split_at_mut(source.gate.bytes());
    let (up, down) = rest.split_at_mut(source.up.bytes());
    source.gate.read(directory, gate)?;
    source.up.read(directory, up)?;
    source.down.read(directory, down)
}
