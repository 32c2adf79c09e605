//! The expert store: routed experts are read from disk when a token needs them and kept in
//! memory under one byte budget, evicted when the policy expects not to need them for longest.
//!
//! The budget is a wall: all experts live in one range of memory of that size, each in a place of
//! exactly its own size, and room is made before a read starts. One range also means large pages
//! throughout, and experts that do not all start at the same distance from a page's edge. What is
//! cached decides speed only; an expert's bytes are the same from cache and from disk.
//!
//! Reads happen behind the caller's back, several at a time: it asks for all that a layer wants,
//! computes with what is present, and takes the others as they arrive. What a later layer is likely
//! to want is read behind all that, and never in its place.

#![forbid(unsafe_code)]

use crate::bail;
use crate::disk::Readers;
use crate::error::{Error, Result};
use crate::safetensors::Directory;
use crate::sys::{Arena, Region};
use crate::weights::{Expert, ExpertSource, Progress};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

mod pins;
pub mod policy;
pub mod replay;
pub mod trace;
pub mod usage;
pub mod view;
use pins::Pins;
use policy::{Policy, Rule};
use usage::Usage;
use view::View;

/// Reads in flight. One expert is megabytes, which the system cuts into many requests.
pub const READS_MAX: usize = 4;

/// One step of a read that can wait: what is asked for meanwhile waits a millisecond at most.
const STEP_BYTES: usize = 2 << 20;

/// (layer, expert index)
pub type ExpertId = (usize, usize);

/// What the store has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests answered from memory.
    pub hits: u64,
    /// Requests that had to read.
    pub misses: u64,
    /// Bytes read from disk, to the end of each block.
    pub bytes_read: u64,
    /// Time in which at least one read was under way, in nanoseconds.
    pub busy_ns: u64,
}

struct Slot {
    id: ExpertId,
    /// `None` while it is being read.
    memory: Option<Region>,
    bytes: usize,
    /// The layer in work chose it and has not asked yet, or a later one is likely to choose it.
    is_due: bool,
    /// Asked for and not yet given up: it stays.
    is_wanted: bool,
    /// Its read began for an earlier request or on a guess: if that fails, it is tried for whoever
    /// wants it now.
    is_older: bool,
}

/// A read that ended.
struct Arrival {
    source: Source,
    memory: Region,
    result: Result<()>,
}

/// Which expert, and where it comes from.
#[derive(Clone)]
struct Source {
    id: ExpertId,
    directory: Arc<Directory>,
    experts: Arc<[ExpertSource]>,
}

impl Source {
    /// The job that reads it into `memory`, wherever that runs.
    fn into_job(self, memory: Region) -> impl FnMut(bool) -> Option<Arrival> {
        let (mut memory, mut progress) = (Some(memory), Progress::default());
        move |can_wait| {
            let bytes_max = if can_wait { STEP_BYTES } else { usize::MAX };
            let expert = &self.experts[self.id.1];
            let room = memory.as_mut().expect("a job that ended has no further step");
            let read = || expert.read_on(&self.directory, room, &mut progress, bytes_max);
            // Whoever waits for a result gets one.
            let result = match catch_unwind(AssertUnwindSafe(read)) {
                Ok(Ok(false)) => return None,
                Ok(read) => read.map(|_| ()),
                Err(_) => Err(Error::new(format!("{}: the read panicked", expert.gate.name))),
            };
            Some(Arrival { source: self.clone(), memory: memory.take()?, result })
        }
    }
}

/// What the job that reads an expert is called.
fn name((layer, e): ExpertId) -> u64 {
    (layer as u64) << 32 | e as u64
}

/// The expert of a job's name.
fn id_of(name: u64) -> ExpertId {
    ((name >> 32) as usize, name as u32 as usize)
}

/// All expert memory of the process.
pub struct ExpertStore {
    /// Memory of the size of the budget; what was never used costs nothing.
    arena: Arena,
    readers: Readers<Arrival>,
    held_bytes: usize,
    slots: Vec<Slot>,
    /// Per layer and expert the index of its slot.
    places: Vec<Vec<Option<u32>>>,
    policy: Policy,
    usage: Usage,
    pins: Pins,
    /// For others to look at.
    view: Arc<View>,
    counters: Counters,
    /// Whether the disk was waited for.
    has_waited: bool,
    /// Why a wanted expert did not come.
    failure: Option<Error>,
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
            arena: Arena::new(budget_bytes)?,
            readers: Readers::new(READS_MAX)?,
            held_bytes: 0,
            slots: Vec::new(),
            places: Vec::new(),
            policy: Policy::new(Rule::default()),
            usage: Usage::default(),
            pins: Pins::default(),
            view: Arc::default(),
            counters: Counters::default(),
            has_waited: false,
            failure: None,
        })
    }

    /// Requests and bytes so far, and how long the disk was busy.
    pub fn counters(&self) -> Counters {
        Counters { busy_ns: self.readers.busy().as_nanos() as u64, ..self.counters }
    }

    /// Shows from now on what it holds; nothing has been read yet.
    pub fn show(&mut self, view: Arc<View>) {
        self.view = view;
    }

    /// Whether the disk was waited for since this was last asked.
    pub fn take_waited(&mut self) -> bool {
        std::mem::take(&mut self.has_waited)
    }

    /// Bytes of experts in memory now, those being read included; never above the budget.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Gives up all experts that were asked for: from now on they may be evicted.
    pub fn give_up_all(&mut self) {
        self.slots.iter_mut().for_each(|slot| (slot.is_wanted, slot.is_due) = (false, false));
        self.failure = None;
    }

    /// Evicts every expert that can be: the next ones are read as if none had ever been.
    pub fn forget_all(&mut self) {
        self.settle();
        (0..self.slots.len()).rev().for_each(|place| drop(self.remove(place)));
    }

    /// Gives up and ends all that is asked for or expected.
    fn settle(&mut self) {
        self.give_up_all();
        self.forget_expected(|_| false);
        while self.slots.iter().any(|slot| slot.memory.is_none()) {
            self.collect(true);
        }
    }

    /// The last `bytes` of its memory, which it does without until they are dropped: experts there
    /// are evicted. Error: it has no such room.
    pub fn lend(&mut self, bytes: usize, align: usize) -> Result<Region> {
        self.settle();
        for place in (0..self.slots.len()).rev() {
            let memory = self.slots[place].memory.as_ref().expect("nothing is being read");
            if self.arena.is_in_end(memory, bytes, align) {
                self.remove(place);
            }
        }
        match self.arena.take_end(bytes, align) {
            Some(region) => Ok(region),
            None => bail!("{bytes} bytes do not fit beside the routed experts"),
        }
    }

    /// Begins a layer of `experts` of which `rows` rows chose some: each of those in ascending
    /// order, with the number of rows that chose it. Gives up all that was asked for before.
    pub fn visit(
        &mut self,
        layer: usize,
        experts: usize,
        rows: usize,
        chosen: impl Iterator<Item = (u32, usize)> + Clone,
    ) {
        self.give_up_all();
        self.make_places(layer, experts);
        self.policy.visit(layer, rows, chosen.clone());
        self.view.choose(layer, chosen.clone().map(|(e, _)| e));
        for (e, count) in chosen {
            self.usage.add((layer, e as usize), count as u64);
            if let Some(place) = self.places[layer][e as usize] {
                self.slots[place as usize].is_due = true;
            }
        }
    }

    /// What was chosen so far, in earlier runs too if they were made known.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Makes known what earlier runs chose, where each row of a layer chose `top_k`.
    pub fn learn(&mut self, usage: Usage, top_k: usize) {
        for (layer, choices) in usage.layers().iter().enumerate().filter(|(_, c)| !c.is_empty()) {
            self.make_places(layer, choices.len());
            self.policy.learn(layer, choices, top_k);
        }
        self.usage = usage;
    }

    /// Pins the most used experts that fit into `bytes`, by what was chosen since this was last
    /// called: they are evicted after all others. Nothing is read for it; those that are no longer
    /// pinned just stay as long as they may. `expert_bytes` has the sizes by layer.
    pub fn pin(&mut self, bytes: usize, expert_bytes: impl Fn(ExpertId) -> usize) {
        self.pins.choose(&self.usage, bytes, expert_bytes);
    }

    /// Reads the pinned experts of `layer`, as far as there is room; no request is counted.
    pub fn preload(
        &mut self,
        directory: &Arc<Directory>,
        layer: usize,
        sources: &Arc<[ExpertSource]>,
    ) -> Result<()> {
        let pinned = self.pins.of(layer);
        let before = self.counters;
        let count = self.ask(directory, layer, &pinned, sources);
        while !pinned[..count].iter().all(|e| self.is_present((layer, *e as usize))) {
            self.receive(true)?;
        }
        self.counters = Counters { bytes_read: self.counters.bytes_read, ..before };
        self.give_up(layer, &pinned[..count]);
        Ok(())
    }

    /// Gives up some of a layer's.
    pub fn give_up(&mut self, layer: usize, experts: &[u32]) {
        for e in experts {
            if let Some(place) = self.places[layer][*e as usize] {
                let slot = &mut self.slots[place as usize];
                (slot.is_wanted, slot.is_due) = (false, false);
            }
        }
        self.view.count(self.counters());
    }

    /// Asks for the experts `wanted` of `layer`, as many from the first on as fit beside all that
    /// is wanted already; returns how many. Those that are absent are read from now on, and all of
    /// them stay until they are given up. `sources` has all experts of the layer.
    pub fn ask(
        &mut self,
        directory: &Arc<Directory>,
        layer: usize,
        wanted: &[u32],
        sources: &Arc<[ExpertSource]>,
    ) -> usize {
        self.make_places(layer, sources.len());
        for (count, e) in wanted.iter().map(|e| *e as usize).enumerate() {
            if let Some(place) = self.places[layer][e] {
                let slot = &mut self.slots[place as usize];
                if slot.memory.is_none() {
                    self.readers.hurry(name((layer, e)));
                    slot.is_older |= !slot.is_wanted;
                }
                self.counters.hits += (!slot.is_wanted && slot.memory.is_some()) as u64;
                self.counters.misses += (!slot.is_wanted && slot.memory.is_none()) as u64;
                slot.is_wanted = true;
                continue;
            }
            let Some(memory) = self.make_room(&sources[e], true) else { return count };
            self.counters.misses += 1;
            self.read(directory, (layer, e), sources, memory, true);
        }
        wanted.len()
    }

    /// Reads the experts that `layer` is likely to want, behind all that is wanted now or was
    /// expected before, and as far as there is room.
    pub fn expect(
        &mut self,
        directory: &Arc<Directory>,
        layer: usize,
        likely: &[u32],
        sources: &Arc<[ExpertSource]>,
    ) {
        self.make_places(layer, sources.len());
        for e in likely.iter().map(|e| *e as usize) {
            if let Some(place) = self.places[layer][e] {
                // Not to be evicted for the others.
                self.slots[place as usize].is_due = true;
            }
        }
        for e in likely.iter().map(|e| *e as usize) {
            if self.places[layer][e].is_none() {
                let Some(memory) = self.make_room(&sources[e], false) else { return };
                self.read(directory, (layer, e), sources, memory, false);
            }
        }
    }

    /// Forgets what is expected, not wanted, not yet wholly read, and not to be kept.
    pub fn forget_expected(&mut self, keep: impl Fn(ExpertId) -> bool) {
        for name in self.readers.forget_later(|name| keep(id_of(name))) {
            let (layer, e) = id_of(name);
            let place = self.places[layer][e].expect("what is to be read has a slot");
            self.remove(place as usize);
        }
    }

    fn make_places(&mut self, layer: usize, experts: usize) {
        if self.places.len() <= layer {
            self.places.resize_with(layer + 1, Vec::new);
        }
        if self.places[layer].len() < experts {
            self.places[layer].resize(experts, None);
        }
        self.policy.make_known(layer, experts);
        self.usage.make_known(layer, experts);
    }

    /// Gives the expert `id` a slot and leaves its reading to the threads.
    fn read(
        &mut self,
        directory: &Arc<Directory>,
        id: ExpertId,
        sources: &Arc<[ExpertSource]>,
        memory: Region,
        is_wanted: bool,
    ) {
        let (layer, e) = id;
        let bytes = sources[e].bytes();
        self.held_bytes += bytes;
        self.places[layer][e] = Some(self.slots.len() as u32);
        let (is_due, is_older) = (!is_wanted, false);
        self.slots.push(Slot { id, memory: None, bytes, is_due, is_wanted, is_older });
        let (directory, experts) = (Arc::clone(directory), Arc::clone(sources));
        let source = Source { id, directory, experts };
        let job = source.into_job(memory);
        match is_wanted {
            true => self.readers.submit(job),
            false => self.readers.submit_later(name(id), job),
        }
    }

    /// Takes what has been read since; with `wait`, waits for one more read, of which there must
    /// be some. Error: a read of a wanted expert failed; the store is without it and goes on.
    pub fn receive(&mut self, wait: bool) -> Result<()> {
        if self.failure.is_none() {
            self.collect(wait);
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    fn collect(&mut self, wait: bool) {
        let mut arrival = self.readers.try_take();
        if arrival.is_none() && wait {
            self.has_waited = true;
            arrival = Some(self.readers.take());
        }
        while let Some(Arrival { source, memory, result }) = arrival {
            let id = source.id;
            let place = self.places[id.0][id.1].expect("what is being read has a slot") as usize;
            match result {
                Ok(()) => {
                    self.counters.bytes_read += memory.len() as u64;
                    self.slots[place].memory = Some(memory);
                    self.view.hold(id, true);
                }
                Err(_) if self.slots[place].is_wanted && self.slots[place].is_older => {
                    self.slots[place].is_older = false;
                    self.readers.submit(source.into_job(memory));
                }
                Err(error) => {
                    if self.remove(place).is_wanted {
                        self.failure.get_or_insert(error);
                    }
                }
            }
            arrival = self.readers.try_take();
        }
    }

    /// Whether an expert that was asked for is in memory.
    pub fn is_present(&self, (layer, e): ExpertId) -> bool {
        self.places[layer][e].is_some_and(|place| self.slots[place as usize].memory.is_some())
    }

    /// The expert `id`, which must be present; `source` is where it came from.
    pub fn expert(&self, id: ExpertId, source: &ExpertSource) -> Expert<'_> {
        let place = self.places[id.0][id.1].expect("the expert was asked for");
        source.expert(self.slots[place as usize].memory.as_deref().expect("the expert is present"))
    }

    /// How soon a slot is evicted: the largest first.
    fn wait(&self, slot: &Slot) -> f32 {
        match (slot.is_due, self.pins.has(slot.id)) {
            (true, _) => -2.0,
            (false, true) => -1.0,
            (false, false) => self.policy.wait(slot.id),
        }
    }

    /// Evicts the experts with the longest wait that nobody wants, until one fits into a gap.
    /// `None` when it cannot be done; without `wait`, also when it cannot be done at once.
    fn make_room(&mut self, source: &ExpertSource, wait: bool) -> Option<Region> {
        loop {
            if let Some(memory) = self.arena.take(source.bytes(), source.align()) {
                return Some(memory);
            }
            // A miss costs a read of megabytes: looking at all slots is nothing beside it.
            let idle = self.slots.iter().enumerate().filter(|(_, slot)| !slot.is_wanted);
            let present = idle.clone().filter(|(_, slot)| slot.memory.is_some());
            let waits = present.map(|(place, slot)| (self.wait(slot), place));
            match waits.max_by(|a, b| a.0.total_cmp(&b.0)) {
                Some((_, place)) => drop(self.remove(place)),
                // Expected, or left behind by a request that failed: nobody waits for the result.
                None if wait && idle.count() > 0 => {
                    self.forget_expected(|_| false);
                    if self.slots.iter().any(|slot| !slot.is_wanted) {
                        self.collect(true);
                    }
                }
                None => return None,
            }
        }
    }

    /// Takes a slot away.
    fn remove(&mut self, place: usize) -> Slot {
        let slot = self.slots.swap_remove(place);
        self.places[slot.id.0][slot.id.1] = None;
        if let Some(moved) = self.slots.get(place) {
            self.places[moved.id.0][moved.id.1] = Some(place as u32);
        }
        self.held_bytes -= slot.bytes;
        self.view.hold(slot.id, false);
        slot
    }
}
