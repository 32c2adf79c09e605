//! Follows a text through a grammar, byte by byte, along all ways to read it at once.
//!
//! Each way has a node that reads the next character and a stack of nodes to return to. Ways that
//! stand at the same node differ in their stacks only, so they are kept as one: the node with the
//! *set* of its stacks. Such a set is a map from the top of a stack to the set of what may lie
//! below; equal sets are stored once, and so are states. Ambiguity therefore costs what the sets
//! differ in, not the number of stacks, and a state is a number that can be kept and returned to.
//!
//! Work is bounded: a [`Matcher`] refuses a step when the fuel of one call is used up, and stacks
//! have a greatest depth, beyond which no rule is called.

#![forbid(unsafe_code)]

use super::charset::{CharSet, Class, Partial};
use super::{Grammar, Node, RETURN};
use crate::bail;
use crate::error::Result;
use std::collections::HashMap;
use std::sync::Arc;

/// Calls inside calls; a call that ends a rule is not counted. So this is also how deep text may
/// nest, twice as deep as the JSON reader goes by default.
const STACK_DEPTH_MAX: u16 = 256;
/// Nodes and sets looked at for one token or mask. It bounds time (below a second) and what a call
/// may add to memory (about 100 MB, and much less unless the grammar was made for it).
const FUEL: u32 = 1 << 22;
/// Nodes and sets kept between calls.
const KEPT_MAX: usize = 1 << 18;
/// Steps remembered; a power of two.
const STEPS: usize = 1 << 14;

/// The state that no text continues.
pub(super) const DEAD: u32 = 0;
/// The set of no stack at all.
const EMPTY: u32 = 0;
/// The set of the empty stack alone: below it the text ends. Its one entry is no node.
const BOTTOM: u32 = 1;
const END: u32 = u32::MAX;

/// A set of stacks: what may be on top, in ascending order, and the set of what is below each.
type Stacks = Box<[(u32, u32)]>;

#[derive(Clone, Debug, Default)]
struct Sets {
    all: Vec<(Stacks, u16)>,
    numbers: HashMap<Stacks, u32>,
    unions: HashMap<(u32, u32), u32>,
    /// Entries of all sets.
    size: usize,
}

impl Sets {
    fn new() -> Sets {
        let mut sets = Sets::default();
        assert_eq!(sets.intern(Box::new([]), 0), EMPTY);
        assert_eq!(sets.intern(Box::new([(END, EMPTY)]), 0), BOTTOM);
        sets
    }

    fn intern(&mut self, stacks: Stacks, depth: u16) -> u32 {
        let number = self.all.len() as u32;
        *self.numbers.entry(stacks).or_insert_with_key(|stacks| {
            self.size += stacks.len() + 1;
            self.all.push((stacks.clone(), depth));
            number
        })
    }

    /// Puts `top` on every stack of a set; `None` if they are too deep.
    fn push(&mut self, top: u32, below: u32) -> Option<u32> {
        let depth = self.all[below as usize].1 + 1;
        (depth <= STACK_DEPTH_MAX).then(|| self.intern(Box::new([(top, below)]), depth))
    }

    /// Takes over a set of another collection; `adopted` are those taken over so far. Recursion is
    /// as deep as the stacks.
    fn adopt(&mut self, from: &Sets, set: u32, adopted: &mut HashMap<u32, u32>) -> u32 {
        if let Some(&known) = adopted.get(&set) {
            return known;
        }
        let (stacks, depth) = &from.all[set as usize];
        let adopt = |(top, below): &(u32, u32)| (*top, self.adopt(from, *below, adopted));
        let stacks = stacks.iter().map(adopt).collect();
        let number = self.intern(stacks, *depth);
        adopted.insert(set, number);
        number
    }

    /// Stacks of either set; recursion is as deep as the stacks at most. Without fuel the result
    /// means nothing.
    fn union(&mut self, a: u32, b: u32, fuel: &mut u32) -> u32 {
        match (a.min(b), a.max(b)) {
            (EMPTY, other) => return other,
            (a, b) if a == b || *fuel == 0 => return a,
            key => {
                if let Some(&known) = self.unions.get(&key) {
                    return known;
                }
            }
        }
        let depth = self.all[a as usize].1.max(self.all[b as usize].1);
        let mut entries = [&self.all[a as usize].0[..], &self.all[b as usize].0[..]].concat();
        *fuel = fuel.saturating_sub(entries.len() as u32);
        entries.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::with_capacity(entries.len());
        for (top, below) in entries {
            match merged.last_mut() {
                Some(last) if last.0 == top => last.1 = self.union(last.1, below, fuel),
                _ => merged.push((top, below)),
            }
        }
        let union = self.intern(merged.into(), depth);
        if *fuel > 0 {
            self.unions.insert((a.min(b), a.max(b)), union);
        }
        union
    }
}

/// Where all ways to read a text stand.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Ways {
    /// What is read of the next character.
    partial: Partial,
    /// The text may end.
    is_complete: bool,
    /// Nodes that read the next character, ascending, with their stacks.
    tops: Box<[(u32, u32)]>,
}

/// What is known of a state beyond [`Ways`].
#[derive(Clone, Debug, Default)]
struct Summary {
    /// Bytes below 128 that may come next.
    ascii: u128,
    /// Classes of which characters may follow in any number up to a count.
    runs: Box<[(u32, u32)]>,
}

/// A grammar with the states met so far.
#[derive(Clone, Debug)]
pub(super) struct Matcher {
    grammar: Arc<Grammar>,
    sets: Sets,
    states: Vec<(Ways, Summary)>,
    numbers: HashMap<Ways, u32>,
    /// Nodes of all states.
    size: usize,
    /// (state, byte, state after it): some of the steps made, at a place by their hash.
    steps: Vec<(u32, u8, u32)>,
    fuel: u32,
    /// Scratch of one step: the stacks with which each node is reached, and the nodes reached.
    reached: Vec<u32>,
    touched: Vec<u32>,
}

impl Matcher {
    /// A matcher and its first state.
    pub(super) fn new(grammar: Arc<Grammar>) -> Result<(Matcher, u32)> {
        let reached = vec![EMPTY; grammar.nodes.len()];
        let mut matcher = Matcher {
            grammar,
            sets: Sets::new(),
            states: Vec::new(),
            numbers: HashMap::new(),
            size: 0,
            steps: vec![(DEAD, 0, DEAD); STEPS],
            fuel: FUEL,
            reached,
            touched: Vec::new(),
        };
        let dead = matcher.intern(Partial::default(), Box::new([]), false);
        assert_eq!(dead, DEAD);
        let root = matcher.grammar.root;
        let is_complete = matcher.reach(root, BOTTOM)?;
        let start = matcher.finish(Partial::default(), is_complete);
        Ok((matcher, start))
    }

    /// Allows the work of one more call. What is not needed for `kept` is dropped first if it is
    /// much; the states then have other numbers. Returns whether that was so.
    pub(super) fn refuel(&mut self, kept: &mut [u32]) -> bool {
        self.fuel = FUEL;
        let is_full = self.size + self.sets.size > KEPT_MAX;
        if is_full {
            self.compact(kept);
        }
        is_full
    }

    fn compact(&mut self, kept: &mut [u32]) {
        let old = std::mem::replace(&mut self.sets, Sets::new());
        let states = std::mem::take(&mut self.states);
        self.numbers.clear();
        self.size = 0;
        self.steps.fill((DEAD, 0, DEAD));
        self.intern(Partial::default(), Box::new([]), false);
        let mut adopted = HashMap::new();
        for state in kept {
            let Ways { partial, is_complete, tops } = &states[*state as usize].0;
            let adopt =
                |(node, set): &(u32, u32)| (*node, self.sets.adopt(&old, *set, &mut adopted));
            let tops = tops.iter().map(adopt).collect();
            *state = self.intern(*partial, tops, *is_complete);
        }
    }

    /// Whether the text may end at a state.
    pub(super) fn is_complete(&self, state: u32) -> bool {
        self.states[state as usize].0.is_complete
    }

    /// Classes of which characters may follow at a state in any number up to a count; none within
    /// a character.
    pub(super) fn runs(&self, state: u32) -> impl Iterator<Item = (&Class, u32)> {
        let runs = self.states[state as usize].1.runs.iter();
        runs.map(|&(class, count)| (&self.grammar.classes[class as usize], count))
    }

    /// The state after one more byte.
    #[inline]
    pub(super) fn step(&mut self, state: u32, byte: u8) -> Result<u32> {
        if byte < 0x80 && self.states[state as usize].1.ascii >> byte & 1 == 0 {
            return Ok(DEAD);
        }
        let hash = (state.wrapping_mul(0x9e37_79b1) >> 16) as usize ^ usize::from(byte) << 4;
        let slot = hash % STEPS;
        let known = self.steps[slot];
        if (known.0, known.1) == (state, byte) {
            return Ok(known.2);
        }
        let after = match self.states[state as usize].0.partial.advance(byte) {
            None => DEAD,
            Some((partial, low, high)) => {
                self.read(state, partial, &|class| class.intersects(low, high))?
            }
        };
        self.steps[slot] = (state, byte, after);
        Ok(after)
    }

    /// The state after the marker of a token.
    pub(super) fn step_marker(&mut self, state: u32, token: u32) -> Result<u32> {
        let is_read = |class: &CharSet| class.markers().any(|marker| marker == token);
        self.read(state, Partial::default(), &is_read)
    }

    /// The tokens whose markers may come next at a state.
    pub(super) fn markers(&self, state: u32) -> Vec<u32> {
        let tops = self.states[state as usize].0.tops.iter();
        let class = |top: &(u32, u32)| match self.grammar.nodes[top.0 as usize] {
            Node::Char { class, .. } => Some(&self.grammar.classes[class as usize].set),
            _ => None,
        };
        let mut tokens: Vec<u32> = tops.filter_map(class).flat_map(CharSet::markers).collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    /// The state after what all nodes read whose class `is_read` says so.
    fn read(
        &mut self,
        state: u32,
        partial: Partial,
        is_read: &dyn Fn(&CharSet) -> bool,
    ) -> Result<u32> {
        let tops = self.states[state as usize].0.tops.len();
        self.fuel = self.fuel.saturating_sub(tops as u32 / 8);
        let mut is_complete = false;
        for at in 0..tops {
            let (node, stacks) = self.states[state as usize].0.tops[at];
            let Node::Char { class, next } = self.grammar.nodes[node as usize] else { continue };
            if is_read(&self.grammar.classes[class as usize].set) {
                let next = if partial.is_boundary() { next } else { node };
                is_complete |= self.reach(next, stacks)?;
            }
        }
        Ok(self.finish(partial, is_complete))
    }

    /// Reaches `node` with `stacks`, and all nodes from it that read a character. Returns whether
    /// the text may end there.
    fn reach(&mut self, node: u32, stacks: u32) -> Result<bool> {
        let grammar = &self.grammar;
        let mut is_complete = false;
        let mut pending = vec![(node, stacks)];
        while let Some((node, stacks)) = pending.pop() {
            if !grammar.can_end[node as usize] {
                continue;
            }
            let known = self.reached[node as usize];
            let all = self.sets.union(known, stacks, &mut self.fuel);
            self.fuel = self.fuel.saturating_sub(1);
            if self.fuel == 0 {
                self.finish(Partial::default(), false);
                bail!("the grammar is too ambiguous here: more than {FUEL} steps for one token");
            }
            if all == known {
                continue;
            }
            if known == EMPTY {
                self.touched.push(node);
            }
            self.reached[node as usize] = all;
            match grammar.nodes[node as usize] {
                Node::Char { .. } => {}
                Node::Split(a, b) => pending.extend([(b, stacks), (a, stacks)]),
                Node::Call { rule, next: RETURN } => {
                    pending.push((grammar.starts[rule as usize], stacks));
                }
                Node::Call { rule, next } => {
                    let called = self.sets.push(next, stacks);
                    pending.extend(called.map(|set| (grammar.starts[rule as usize], set)));
                }
                Node::Return => {
                    for &(top, below) in &self.sets.all[stacks as usize].0 {
                        match top {
                            END => is_complete = true,
                            _ => pending.push((top, below)),
                        }
                    }
                }
            }
        }
        Ok(is_complete)
    }

    /// The state of all that was reached since the last call.
    fn finish(&mut self, partial: Partial, is_complete: bool) -> u32 {
        self.touched.sort_unstable();
        let mut tops = Vec::new();
        for node in self.touched.drain(..) {
            let stacks = std::mem::replace(&mut self.reached[node as usize], EMPTY);
            if matches!(self.grammar.nodes[node as usize], Node::Char { .. }) {
                tops.push((node, stacks));
            }
        }
        if tops.is_empty() && !is_complete {
            return DEAD;
        }
        self.intern(partial, tops.into(), is_complete)
    }

    fn intern(&mut self, partial: Partial, tops: Box<[(u32, u32)]>, is_complete: bool) -> u32 {
        let ways = Ways { partial, is_complete, tops };
        if let Some(&known) = self.numbers.get(&ways) {
            return known;
        }
        let summary = self.summarize(&ways);
        self.size += ways.tops.len() + 1;
        self.numbers.insert(ways.clone(), self.states.len() as u32);
        self.states.push((ways, summary));
        self.states.len() as u32 - 1
    }

    fn summarize(&self, ways: &Ways) -> Summary {
        if !ways.partial.is_boundary() {
            return Summary::default();
        }
        let (mut runs, mut ascii) = (Vec::new(), 0);
        for &(node, _) in &ways.tops {
            let Node::Char { class, .. } = self.grammar.nodes[node as usize] else { continue };
            ascii |= self.grammar.classes[class as usize].ascii;
            let run = (class, self.grammar.runs[node as usize]);
            if run.1 > 1 && !runs.contains(&run) {
                runs.push(run);
            }
        }
        Summary { ascii, runs: runs.into() }
    }
}
