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
use crate::weights::ExpertSource;
use std::collections::{BTreeMap, HashMap};

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
    bytes: Vec<u8>,
    /// Key of this slot in `ExpertStore::by_use`.
    last_use: u64,
}

/// All expert memory of the process.
pub struct ExpertStore {
    budget_bytes: usize,
    held_bytes: usize,
    slots: HashMap<ExpertId, Slot>,
    /// Expert by time of last use, oldest first.
    by_use: BTreeMap<u64, ExpertId>,
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
            slots: HashMap::new(),
            by_use: BTreeMap::new(),
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

    /// The expert `id`, read from `source` if it is not in memory.
    ///
    /// A failed read leaves the store without the expert and within its budget.
    pub fn get<'a>(
        &'a mut self,
        directory: &Directory,
        id: ExpertId,
        source: &ExpertSource,
    ) -> Result<Expert<'a>> {
        self.clock += 1;
        let bytes = match self.slots.remove(&id) {
            Some(slot) => {
                self.by_use.remove(&slot.last_use);
                self.counters.hits += 1;
                slot.bytes
            }
            None => self.read(directory, source)?,
        };
        self.by_use.insert(self.clock, id);
        let slot = self.slots.entry(id).insert_entry(Slot { bytes, last_use: self.clock });
        let bytes = &slot.into_mut().bytes;
        let (gate, rest) = bytes.split_at(source.gate.bytes());
        let (up, down) = rest.split_at(source.up.bytes());
        Ok(Expert {
            gate: source.gate.encoded(gate),
            up: source.up.encoded(up),
            down: source.down.encoded(down),
        })
    }

    /// Makes room, then reads the three matrices.
    fn read(&mut self, directory: &Directory, source: &ExpertSource) -> Result<Vec<u8>> {
        let needed_bytes = source.bytes();
        let mut buffer = Vec::new();
        while self.held_bytes + needed_bytes > self.budget_bytes {
            let (_, oldest) = self.by_use.pop_first().expect("the largest expert fits the budget");
            buffer = self.slots.remove(&oldest).expect("every use has a slot").bytes;
            self.held_bytes -= buffer.len();
        }
        // The evicted buffer is reused: same-sized experts never touch the allocator.
        if buffer.len() != needed_bytes {
            drop(buffer);
            buffer = vec![0; needed_bytes];
        }
        let (gate, rest) = buffer.split_at_mut(source.gate.bytes());
        let (up, down) = rest.split_at_mut(source.up.bytes());
        source.gate.read(directory, gate)?;
        source.up.read(directory, up)?;
        source.down.read(directory, down)?;
        self.held_bytes += needed_bytes;
        self.counters.misses += 1;
        self.counters.bytes_read += needed_bytes as u64;
        Ok(buffer)
    }
}
