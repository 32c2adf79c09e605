//! A recorded routing trace against caches of experts: how often each rule would have had what was
//! asked for. Refuses to know bytes: all experts are of one size here.
//!
//! Experts of a visit are taken in ascending order, as many at a time as one pass of the engine
//! computes; those stay until they are computed, and the others that the visit chose are not
//! evicted before their turn.

#![forbid(unsafe_code)]

use super::ExpertId;
use super::pins::Pins;
use super::policy::{Policy, Rule};
use super::trace::{Trace, Visit};
use super::usage::Usage;

/// Rows that the engine computes at a time.
const TURN_ROWS: usize = 256;

/// A rule to evict by.
#[derive(Clone, Copy)]
pub enum Eviction {
    /// The least recently used of the layer, whose slots are its own.
    LayerLru,
    /// The least recently used.
    Lru,
    /// The longest wait.
    Wait(Rule),
    /// What is needed last, by looking ahead: no rule evicts better.
    Clairvoyant,
}

/// Every rule, with its name. The two that count are the engine's, without and with distance.
pub const EVICTIONS: [(&str, Eviction); 11] = [
    ("layer-lru", Eviction::LayerLru),
    ("lru", Eviction::Lru),
    ("slow", wait(Some(0.0), false)),
    ("slow+d", wait(Some(0.0), true)),
    ("mix-0.5", wait(Some(0.5), false)),
    ("mix-0.5+d", wait(Some(0.5), true)),
    ("fast", wait(Some(1.0), false)),
    ("fast+d", wait(Some(1.0), true)),
    ("count", wait(None, false)),
    ("count+d", wait(None, true)),
    ("optimum", Eviction::Clairvoyant),
];

const fn wait(lately: Option<f32>, has_distance: bool) -> Eviction {
    Eviction::Wait(Rule { lately, has_distance })
}

/// Share of the requests that a cache of `slots` in each sparse layer (or of as many in all) would
/// have answered, a request being an expert that some row of a visit chose.
pub fn hit_rate(trace: &Trace, slots: usize, eviction: Eviction, past: &Past) -> f64 {
    Cache::new(trace, slots, eviction, past).run(trace)
}

/// What an earlier run left to the rules that wait.
#[derive(Default)]
pub struct Past {
    /// What it chose.
    pub usage: Usage,
    /// Share of the slots whose experts are pinned by it.
    pub pinned: f64,
}

struct Cache {
    eviction: Eviction,
    policy: Policy,
    pins: Pins,
    /// Experts of a layer.
    experts: usize,
    /// Slots of one layer, or of all.
    capacity: usize,
    /// What is in memory, by layer where the slots are; else all in the first.
    held: Vec<Vec<ExpertId>>,
    /// By layer and expert.
    states: Vec<State>,
}

#[derive(Clone, Copy, Default)]
struct State {
    is_held: bool,
    /// Chosen by the visit and not computed yet.
    is_due: bool,
    /// Last visit that chose it.
    last: usize,
    /// Next visit that does.
    next: usize,
}

impl Cache {
    fn new(trace: &Trace, slots: usize, eviction: Eviction, past: &Past) -> Cache {
        let shape = trace.shape;
        let rule = if let Eviction::Wait(rule) = eviction { rule } else { Rule::default() };
        let mut policy = Policy::new(rule);
        let mut layers: Vec<usize> = trace.visits.iter().map(|visit| visit.layer).collect();
        layers.sort_unstable();
        layers.dedup();
        layers.iter().for_each(|layer| policy.make_known(*layer, shape.experts));
        let mut pins = Pins::default();
        let is_split = matches!(eviction, Eviction::LayerLru);
        let capacity = if is_split { slots } else { slots * layers.len() };
        if matches!(eviction, Eviction::Wait(_)) {
            pins.choose(&past.usage, (capacity as f64 * past.pinned) as usize, |_| 1);
            let learned = past.usage.layers().iter().enumerate().filter(|(_, l)| !l.is_empty());
            learned.for_each(|(layer, choices)| policy.learn(layer, choices, shape.top_k));
        }
        Cache {
            eviction,
            policy,
            pins,
            experts: shape.experts,
            capacity,
            held: vec![Vec::new(); if is_split { shape.layers } else { 1 }],
            states: vec![State::default(); shape.layers * shape.experts],
        }
    }

    fn run(&mut self, trace: &Trace) -> f64 {
        let next = next_visits(trace);
        let (mut hits, mut requests) = (0, 0);
        for (now, visit) in trace.visits.iter().enumerate() {
            let chosen = &trace.chosen[visit.chosen.clone()];
            let counts = chosen.iter().map(|(e, count)| (*e, *count as usize));
            self.policy.visit(visit.layer, visit.rows, counts);
            for ((e, _), next) in chosen.iter().zip(&next[visit.chosen.clone()]) {
                let state = &mut self.states[visit.layer * self.experts + *e as usize];
                hits += state.is_held as usize;
                *state = State { is_due: true, last: now, next: *next, ..*state };
            }
            requests += chosen.len();
            self.serve(visit, chosen);
        }
        hits as f64 / requests.max(1) as f64
    }

    /// Brings the chosen experts in, turn by turn.
    fn serve(&mut self, visit: &Visit, chosen: &[(u32, u32)]) {
        let mut first = 0;
        while first < chosen.len() {
            let mut rows = 0;
            let within = |(_, count): &&(u32, u32)| {
                rows += *count as usize;
                rows <= TURN_ROWS
            };
            let count = chosen[first..].iter().take_while(within).count().max(1);
            let turn = &chosen[first..first + count.min(self.capacity)];
            self.make_room(visit, turn);
            for (e, _) in turn {
                let id = (visit.layer, *e as usize);
                let state = &mut self.states[visit.layer * self.experts + id.1];
                if !std::mem::replace(&mut state.is_held, true) {
                    let set = if self.held.len() == 1 { 0 } else { visit.layer };
                    self.held[set].push(id);
                }
            }
            for (e, _) in turn {
                self.states[visit.layer * self.experts + *e as usize].is_due = false;
            }
            first += turn.len();
        }
    }

    /// Evicts as many as the turn needs.
    fn make_room(&mut self, visit: &Visit, turn: &[(u32, u32)]) {
        let state = |(layer, e): ExpertId| layer * self.experts + e;
        let absent =
            turn.iter().filter(|(e, _)| !self.states[state((visit.layer, *e as usize))].is_held);
        let set = if self.held.len() == 1 { 0 } else { visit.layer };
        let surplus = (self.held[set].len() + absent.count()).saturating_sub(self.capacity);
        if surplus == 0 {
            return;
        }
        let wait = |id: ExpertId| {
            let State { is_due, last, next, .. } = self.states[state(id)];
            let wait = match self.eviction {
                Eviction::LayerLru | Eviction::Lru => -(last as f64),
                Eviction::Wait(_) if self.pins.has(id) => f64::MIN,
                Eviction::Wait(_) => self.policy.wait(id) as f64,
                Eviction::Clairvoyant => next as f64,
            };
            if is_due { f64::NEG_INFINITY } else { wait }
        };
        let mut waits: Vec<(f64, ExpertId)> =
            self.held[set].iter().map(|id| (wait(*id), *id)).collect();
        // Of equals the lower goes first, as it was asked for first.
        waits.select_nth_unstable_by(surplus - 1, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let (out, left) = waits.split_at(surplus);
        for (_, (layer, e)) in out {
            self.states[layer * self.experts + e].is_held = false;
        }
        self.held[set] = left.iter().map(|(_, id)| *id).collect();
    }
}

/// For every choice the next visit that makes it again; `usize::MAX` when none does.
fn next_visits(trace: &Trace) -> Vec<usize> {
    let mut next = vec![usize::MAX; trace.chosen.len()];
    let mut seen = vec![usize::MAX; trace.shape.layers * trace.shape.experts];
    for (i, visit) in trace.visits.iter().enumerate().rev() {
        for at in visit.chosen.clone() {
            let seen = &mut seen[visit.layer * trace.shape.experts + trace.chosen[at].0 as usize];
            next[at] = std::mem::replace(seen, i);
        }
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::trace::Shape;

    /// One expert a row; layer and expert of each visit.
    fn trace(layers: usize, visits: &[(usize, u32)]) -> Trace {
        let shape = Shape { layers, experts: 8, top_k: 1 };
        let visit = |(i, layer)| Visit { layer, rows: 1, chosen: i..i + 1 };
        Trace {
            shape,
            visits: visits.iter().map(|(layer, _)| *layer).enumerate().map(visit).collect(),
            chosen: visits.iter().map(|(_, e)| (*e, 1)).collect(),
        }
    }

    /// The requests 1 2 3 1 2 4 1 2 3 with room for two. Used last stays: never a hit. Knowing the
    /// future: 3 evicts 2, as 1 comes first; 1 hits; 2 evicts 3, and 4 evicts 2 again; 1 hits. With
    /// room for three, used last: 1 and 2 hit, 4 evicts 3, 1 and 2 hit, 3 misses: 4; knowing the
    /// future: the same, as 4 never comes again.
    #[test]
    fn one_layer_counts_the_hits_that_a_person_counts() {
        let trace = trace(1, &[1, 2, 3, 1, 2, 4, 1, 2, 3].map(|e| (0, e)));
        for (slots, eviction, hits) in [
            (2, Eviction::Lru, 0),
            (2, Eviction::LayerLru, 0),
            (2, Eviction::Clairvoyant, 2),
            (3, Eviction::Lru, 4),
            (3, Eviction::Clairvoyant, 4),
            (8, Eviction::Lru, 5),
        ] {
            assert_eq!(
                hit_rate(&trace, slots, eviction, &Past::default()),
                hits as f64 / 9.0,
                "{slots} slots"
            );
        }
    }
}
