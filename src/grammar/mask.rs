//! Which tokens may come next: the vocabulary as a tree, walked with a matcher.
//!
//! Three things keep the walk short. A byte that cannot follow cuts off all tokens that go on with
//! it. Where characters may follow in a run, as within a JSON string, each subtree knows whether
//! its tokens consist of such characters, and is taken whole. And a mask is kept with its state.

#![forbid(unsafe_code)]

use super::Grammar;
use super::charset::Class;
use super::matcher::{DEAD, Matcher};
use crate::error::Result;
use std::collections::HashMap;
use std::sync::Arc;

/// Masks kept; a mask of GLM's vocabulary takes 19 kB.
const MASKS_MAX: usize = 256;
/// Tokens that can be taken back, more than any draft is long.
const TRAIL_MAX: usize = 256;

/// A byte that tokens with a common beginning share, in a tree stored depth first.
#[derive(Clone, Copy, Debug, Default)]
struct TrieNode {
    /// Bit b: byte b is in some token here or below, from this node on.
    ascii: u128,
    /// The node after the last one below this.
    end: u32,
    /// How many tokens come before this node; its own come first of those below it.
    first: u32,
    /// Most characters of a token from this node on; a cut one counts.
    height: u32,
    /// Bytes from the root, from 1 on.
    depth: u32,
    byte: u8,
    above_ascii: AboveAscii,
}

/// Bytes from 128 on in the tokens at a node and below, read from this node on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum AboveAscii {
    #[default]
    None,
    /// UTF-8, whose last character may be cut.
    Characters,
    /// Not UTF-8, as where a token begins within a character.
    Other,
}

/// The tokens of a tokenizer by their bytes; built once, shared.
#[derive(Debug)]
pub struct Vocabulary {
    /// The last node stands behind the tree.
    nodes: Vec<TrieNode>,
    /// Tokens in the order of the tree.
    tokens: Vec<u32>,
    /// One more than the greatest id.
    size: usize,
}

impl Vocabulary {
    /// The tokens that text may consist of, with their bytes. Markers must be left out: a grammar
    /// names the few that it wants, and an end of sequence is none of them; see
    /// [`Constraint::is_complete`]. Empty tokens are never allowed, because they lead nowhere.
    pub fn new<'a>(tokens: impl Iterator<Item = (u32, &'a [u8])>) -> Vocabulary {
        let mut tokens: Vec<(&[u8], u32)> = tokens.map(|(id, bytes)| (bytes, id)).collect();
        tokens.retain(|(bytes, _)| !bytes.is_empty());
        tokens.sort_unstable();
        let size = tokens.iter().map(|(_, id)| *id as usize + 1).max().unwrap_or(0);
        let mut nodes: Vec<TrieNode> = Vec::new();
        let mut path: Vec<usize> = Vec::new();
        let mut previous: &[u8] = &[];
        for (rank, (bytes, _)) in tokens.iter().enumerate() {
            let shared = previous.iter().zip(*bytes).take_while(|(a, b)| a == b).count();
            close(&mut nodes, &mut path, shared);
            for &byte in &bytes[shared..] {
                path.push(nodes.len());
                let (first, depth) = (rank as u32, path.len() as u32);
                nodes.push(TrieNode { first, depth, byte, ..TrieNode::default() });
            }
            summarize(&mut nodes, &path, bytes);
            previous = bytes;
        }
        close(&mut nodes, &mut path, 0);
        nodes.push(TrieNode { first: tokens.len() as u32, ..TrieNode::default() });
        Vocabulary { nodes, tokens: tokens.into_iter().map(|(_, id)| id).collect(), size }
    }
}

/// Ends the nodes of `path` behind the first `kept`.
fn close(nodes: &mut [TrieNode], path: &mut Vec<usize>, kept: usize) {
    let end = nodes.len() as u32;
    path.drain(kept..).for_each(|node| nodes[node].end = end);
}

/// Adds a token to what its nodes know of the tokens below them.
fn summarize(nodes: &mut [TrieNode], path: &[usize], bytes: &[u8]) {
    let (mut ascii, mut above_ascii, mut chars) = (0u128, AboveAscii::None, 0);
    // Whether the bytes from a place on are UTF-8, but for a cut at the end.
    let mut is_utf8 = vec![true; bytes.len() + 1];
    for (at, &byte) in bytes.iter().enumerate().rev() {
        if byte < 0x80 {
            ascii |= 1 << byte;
            is_utf8[at] = is_utf8[at + 1];
        } else {
            let length = if byte < 0xe0 { 2 } else { 3 + usize::from(byte >= 0xf0) };
            let end = (at + length).min(bytes.len());
            let is_char = match std::str::from_utf8(&bytes[at..end]) {
                Ok(_) => true,
                Err(error) => error.valid_up_to() == 0 && error.error_len().is_none(),
            };
            is_utf8[at] = is_char && is_utf8[end];
            above_ascii = AboveAscii::Characters;
        }
        let node = &mut nodes[path[at]];
        node.ascii |= ascii;
        // All but the bytes that continue a character.
        chars += u32::from(byte & 0xc0 != 0x80);
        node.height = node.height.max(chars);
        let here = if is_utf8[at] { above_ascii } else { AboveAscii::Other };
        node.above_ascii = node.above_ascii.max(here);
    }
}

/// Whether every token at a node and below consists of characters of `class`, `count` at most.
fn is_within(node: &TrieNode, (class, count): (&Class, u32)) -> bool {
    node.ascii & !class.ascii == 0
        && node.height <= count
        && match node.above_ascii {
            AboveAscii::None => true,
            AboveAscii::Characters => class.all_above_ascii,
            AboveAscii::Other => false,
        }
}

/// A set of tokens: a bit for each id up to the greatest of the vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSet(Vec<u64>);

impl TokenSet {
    /// Whether `token` is in the set; no id beyond the vocabulary is.
    pub fn contains(&self, token: u32) -> bool {
        self.0.get(token as usize / 64).is_some_and(|word| word >> (token % 64) & 1 == 1)
    }

    /// Token t is bit t % 64 of word t / 64.
    pub fn words(&self) -> &[u64] {
        &self.0
    }

    /// The number of tokens in the set.
    pub fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    fn insert(&mut self, token: u32) {
        let word = token as usize / 64;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (token % 64);
    }
}

/// A text that is being generated, and what may follow. A clone is independent but copies what is
/// cached; to try tokens, accept them and [`Constraint::rollback`].
#[derive(Clone, Debug)]
pub struct Constraint {
    matcher: Matcher,
    vocabulary: Arc<Vocabulary>,
    /// The states before the last tokens and, last, the one now.
    trail: Vec<u32>,
    masks: HashMap<u32, TokenSet>,
}

impl Constraint {
    /// At the beginning of a text.
    ///
    /// # Errors
    /// A grammar so ambiguous that its first state is too much work.
    pub fn new(grammar: Arc<Grammar>, vocabulary: Arc<Vocabulary>) -> Result<Constraint> {
        let (matcher, start) = Matcher::new(grammar)?;
        Ok(Constraint { matcher, vocabulary, trail: vec![start], masks: HashMap::new() })
    }

    /// The tokens that may come next. With a vocabulary that has every byte as a token it is empty
    /// only where nothing but the end may come, or at the greatest depth of nested rules.
    ///
    /// # Errors
    /// A grammar so ambiguous here that the mask is too much work.
    pub fn allowed(&mut self) -> Result<&TokenSet> {
        self.refuel();
        let state = self.state();
        if !self.masks.contains_key(&state) {
            if self.masks.len() == MASKS_MAX {
                self.masks.clear();
            }
            let mask = self.mask(state)?;
            self.masks.insert(state, mask);
        }
        Ok(&self.masks[&state])
    }

    /// Appends the bytes of a token; `false`, and nothing is changed, if they may not come next.
    ///
    /// # Errors
    /// A grammar so ambiguous here that the token is too much work; nothing is changed.
    pub fn accept(&mut self, bytes: &[u8]) -> Result<bool> {
        self.refuel();
        let step = |state, byte: &u8| self.matcher.step(state, *byte);
        let state = bytes.iter().try_fold(*self.trail.last().expect("a state"), step)?;
        Ok(self.enter(state))
    }

    /// Appends a marker, as [`Constraint::accept`] appends text.
    ///
    /// # Errors
    /// As there.
    pub fn accept_marker(&mut self, token: u32) -> Result<bool> {
        self.refuel();
        let state = self.matcher.step_marker(self.state(), token)?;
        Ok(self.enter(state))
    }

    fn enter(&mut self, state: u32) -> bool {
        if state == DEAD {
            return false;
        }
        if self.trail.len() > TRAIL_MAX {
            self.trail.remove(0);
        }
        self.trail.push(state);
        true
    }

    /// Takes back the last `tokens` calls of [`Constraint::accept`] that gave `true`; at most 256
    /// can be, and a greater number is a programmer's error.
    pub fn rollback(&mut self, tokens: usize) {
        assert!(tokens < self.trail.len(), "rollback of more than was accepted or is kept");
        self.trail.truncate(self.trail.len() - tokens);
    }

    /// Whether the text may end here, so that an end of sequence may be chosen.
    pub fn is_complete(&self) -> bool {
        self.matcher.is_complete(self.state())
    }

    /// The bytes that must come next, some `bytes_max`: while there is one way only to go on, and
    /// the text may not end. A marker is spelled as `spell` says.
    ///
    /// # Errors
    /// A grammar so ambiguous here that it is too much work.
    pub fn forced(&mut self, bytes_max: usize, spell: impl Fn(u32) -> Vec<u8>) -> Result<Vec<u8>> {
        self.refuel();
        let mut forced = Vec::new();
        let mut state = self.state();
        while forced.len() < bytes_max && !self.matcher.is_complete(state) {
            let mut ways = Vec::new();
            for token in self.matcher.markers(state) {
                ways.push((spell(token), self.matcher.step_marker(state, token)?));
            }
            for byte in 0..=u8::MAX {
                let after = self.matcher.step(state, byte)?;
                ways.extend((after != DEAD).then(|| (vec![byte], after)));
                if ways.len() > 1 {
                    return Ok(forced);
                }
            }
            let Some((bytes, after)) = ways.pop() else { break };
            forced.extend(bytes);
            state = after;
        }
        Ok(forced)
    }

    fn state(&self) -> u32 {
        *self.trail.last().expect("the trail begins with the first state")
    }

    fn refuel(&mut self) {
        if self.matcher.refuel(&mut self.trail) {
            self.masks.clear();
        }
    }

    fn mask(&mut self, state: u32) -> Result<TokenSet> {
        let allowed = self.walk(state)?;
        let tokens = &self.vocabulary.tokens;
        let mut set = TokenSet(vec![0; self.vocabulary.size.div_ceil(64)]);
        for (start, end) in allowed {
            tokens[start as usize..end as usize].iter().for_each(|token| set.insert(*token));
        }
        self.matcher.markers(state).into_iter().for_each(|token| set.insert(token));
        Ok(set)
    }

    /// The tokens that may follow `state`, as ranges in the order of the tree.
    fn walk(&mut self, state: u32) -> Result<Vec<(u32, u32)>> {
        let nodes = &self.vocabulary.nodes;
        let mut allowed: Vec<(u32, u32)> = Vec::new();
        let mut allow = |start: u32, end: u32| match allowed.last_mut() {
            _ if start == end => {}
            Some(last) if last.1 == start => last.1 = end,
            _ => allowed.push((start, end)),
        };
        // The states before the node at hand: path[d] after d bytes.
        let mut path = vec![state];
        let mut at = 0;
        while at + 1 < nodes.len() {
            let node = &nodes[at];
            path.truncate(node.depth as usize);
            let before = path[path.len() - 1];
            let end = node.end as usize;
            if self.matcher.runs(before).any(|run| is_within(node, run)) {
                allow(node.first, nodes[end].first);
                at = end;
                continue;
            }
            let after = self.matcher.step(before, node.byte)?;
            if after == DEAD {
                at = end;
                continue;
            }
            allow(node.first, nodes[at + 1].first);
            path.push(after);
            at += 1;
        }
        Ok(allowed)
    }
}
