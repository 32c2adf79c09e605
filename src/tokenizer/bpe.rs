//! Byte-pair encoding of one piece: the vocabulary by bytes, the merges by pair, the merging.
//!
//! Owns the two lookup tables and the rule that the merge listed earliest is applied first, and of
//! equal ones the leftmost. Short pieces are merged in an array by scanning for the best pair;
//! long ones with a heap, so that a megabyte of one letter costs n log n. Tables are open-addressed
//! with a hash seeded per process: a vocabulary made to collide cannot be prepared in advance.

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::{BuildHasher, RandomState};

/// Pieces up to this many bytes are merged by scanning, which is quadratic but without a heap;
/// the two ways cost the same at about this length.
const SCAN_BYTES_MAX: usize = 64;

/// No token: an empty table slot, or a symbol that was merged into its left neighbour.
const NONE: u32 = u32::MAX;

/// Strings of bytes in one allocation, by index.
#[derive(Default)]
pub struct Arena {
    bytes: Vec<u8>,
    /// End of each string; it starts where the one before ends.
    ends: Vec<usize>,
}

impl Arena {
    /// Appends a string.
    pub fn push(&mut self, string: &[u8]) {
        self.bytes.extend_from_slice(string);
        self.ends.push(self.bytes.len());
    }

    /// The number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// The string at `index`.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        self.bytes.get(start..end)
    }
}

/// Token ids by token bytes.
pub struct Vocabulary {
    /// Half of the hash, to compare before the bytes, and the id; a power of two of them.
    slots: Vec<(u32, u32)>,
    seed: u64,
}

impl Vocabulary {
    /// An empty table for `count` tokens, at most half full.
    pub fn with_capacity(count: usize) -> Vocabulary {
        let slots = vec![(0, NONE); (count.max(8) * 2).next_power_of_two()];
        Vocabulary { slots, seed: RandomState::new().hash_one(0u64) }
    }

    /// Enters token `id` of `tokens`. Returns the id already there for the same bytes, if any.
    pub fn insert(&mut self, tokens: &Arena, id: u32) -> Option<u32> {
        let bytes = tokens.get(id as usize).expect("the token is in the arena");
        match self.find(tokens, bytes) {
            Ok(present) => Some(present),
            Err((slot, tag)) => {
                self.slots[slot] = (tag, id);
                None
            }
        }
    }

    /// The id of the token that is exactly `bytes`.
    pub fn get(&self, tokens: &Arena, bytes: &[u8]) -> Option<u32> {
        self.find(tokens, bytes).ok()
    }

    /// The id, or the free slot and the tag under which to enter it.
    fn find(&self, tokens: &Arena, bytes: &[u8]) -> Result<u32, (usize, u32)> {
        let hash = hash_bytes(bytes, self.seed);
        let (mask, tag) = (self.slots.len() - 1, (hash >> 32) as u32);
        let mut slot = hash as usize & mask;
        loop {
            let (found, id) = self.slots[slot];
            if id == NONE {
                return Err((slot, tag));
            }
            if found == tag && tokens.get(id as usize) == Some(bytes) {
                return Ok(id);
            }
            slot = (slot + 1) & mask;
        }
    }
}

/// What two adjacent tokens become.
#[derive(Clone, Copy)]
struct Merge {
    /// Place in the list of merges: lower goes first.
    rank: u32,
    id: u32,
}

/// Merges by the pair of token ids.
pub struct Merges {
    /// Left and right id, what they become; a power of two of them, at most 3/4 full.
    slots: Vec<(u32, u32, Merge)>,
    seed: u64,
}

impl Merges {
    /// An empty table for `count` merges.
    pub fn with_capacity(count: usize) -> Merges {
        let empty = (NONE, NONE, Merge { rank: 0, id: NONE });
        let slots = vec![empty; (count.max(8) / 3 * 4 + 4).next_power_of_two()];
        Merges { slots, seed: RandomState::new().hash_one(0u64) }
    }

    /// Enters the merge of `left` and `right` into `id`. Returns false if the pair has one already.
    #[must_use]
    pub fn insert(&mut self, left: u32, right: u32, rank: u32, id: u32) -> bool {
        match self.find(left, right) {
            Ok(_) => false,
            Err(slot) => {
                self.slots[slot] = (left, right, Merge { rank, id });
                true
            }
        }
    }

    fn get(&self, left: u32, right: u32) -> Option<Merge> {
        self.find(left, right).ok()
    }

    fn find(&self, left: u32, right: u32) -> Result<Merge, usize> {
        let mask = self.slots.len() - 1;
        let pair = u64::from(left) << 32 | u64::from(right);
        let mut slot = mix(pair ^ self.seed, MULTIPLIER) as usize & mask;
        loop {
            let (found_left, found_right, merge) = self.slots[slot];
            if merge.id == NONE {
                return Err(slot);
            }
            if found_left == left && found_right == right {
                return Ok(merge);
            }
            slot = (slot + 1) & mask;
        }
    }
}

/// An odd constant with about as many ones as zeros: the golden ratio as 64 fraction bits.
const MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;

/// Both halves of the 128-bit product, folded: every input bit reaches every output bit.
fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// A hash of `bytes`, eight at a time; the length takes part, so padding is no ambiguity.
fn hash_bytes(bytes: &[u8], seed: u64) -> u64 {
    let mut hash = seed ^ bytes.len() as u64;
    let (chunks, tail) = bytes.as_chunks::<8>();
    for chunk in chunks {
        hash = mix(hash ^ u64::from_le_bytes(*chunk), MULTIPLIER);
    }
    let tail = tail.iter().fold(0, |word, &byte| word << 8 | u64::from(byte));
    mix(hash ^ tail, MULTIPLIER)
}

/// A symbol of a long piece: a token in a doubly linked list over the piece's bytes.
#[derive(Clone, Copy)]
struct Symbol {
    /// [`NONE`] once it was merged away.
    id: u32,
    /// Index of the left neighbour; the first symbol has itself.
    left: usize,
    /// Index of the right neighbour; `symbols.len()` for none.
    right: usize,
}

/// A merge that was possible when entered: rank, position of the left symbol, both ids, result.
type Candidate = Reverse<(u32, usize, u32, u32, u32)>;

/// Appends the ids of `piece` to `ids`. `byte_ids` has the token of each single byte.
pub fn encode_piece(merges: &Merges, byte_ids: &[u32; 256], piece: &[u8], ids: &mut Vec<u32>) {
    if piece.len() <= SCAN_BYTES_MAX {
        merge_by_scan(merges, byte_ids, piece, ids);
    } else {
        merge_by_heap(merges, byte_ids, piece, ids);
    }
}

/// Works in place at the end of `ids`.
fn merge_by_scan(merges: &Merges, byte_ids: &[u32; 256], piece: &[u8], ids: &mut Vec<u32>) {
    const NO_MERGE: Merge = Merge { rank: u32::MAX, id: NONE };
    let base = ids.len();
    ids.extend(piece.iter().map(|&byte| byte_ids[usize::from(byte)]));
    let mut count = piece.len();
    // The merge of each symbol with the next.
    let mut possible = [NO_MERGE; SCAN_BYTES_MAX];
    let merge_at = |ids: &[u32], at: usize| {
        let pair = (ids[base + at], ids[base + at + 1]);
        merges.get(pair.0, pair.1).unwrap_or(NO_MERGE)
    };
    for at in 1..count {
        possible[at - 1] = merge_at(ids, at - 1);
    }
    while count > 1 {
        let best = (0..count - 1).min_by_key(|&at| possible[at].rank).expect("a pair is left");
        if possible[best].id == NONE {
            break;
        }
        ids[base + best] = possible[best].id;
        ids.remove(base + best + 1);
        possible.copy_within(best + 1..count - 1, best);
        count -= 1;
        if best + 1 < count {
            possible[best] = merge_at(ids, best);
        }
        if best > 0 {
            possible[best - 1] = merge_at(ids, best - 1);
        }
    }
}

/// The same by a heap of candidates; one that no longer matches its symbols is passed over.
fn merge_by_heap(merges: &Merges, byte_ids: &[u32; 256], piece: &[u8], ids: &mut Vec<u32>) {
    let count = piece.len();
    let symbol = |(at, &byte): (usize, &u8)| {
        let id = byte_ids[usize::from(byte)];
        Symbol { id, left: at.saturating_sub(1), right: at + 1 }
    };
    let mut symbols: Vec<Symbol> = piece.iter().enumerate().map(symbol).collect();
    let candidate = |at: usize, left: u32, right: u32| -> Option<Candidate> {
        let merge = merges.get(left, right)?;
        Some(Reverse((merge.rank, at, left, right, merge.id)))
    };
    let adjacent = symbols.windows(2).enumerate();
    let mut heap: BinaryHeap<Candidate> =
        adjacent.filter_map(|(at, pair)| candidate(at, pair[0].id, pair[1].id)).collect();
    while let Some(Reverse((_, at, left, right, id))) = heap.pop() {
        let next = symbols[at].right;
        if symbols[at].id != left || next == count || symbols[next].id != right {
            continue;
        }
        let after = symbols[next].right;
        symbols[next].id = NONE;
        symbols[at].id = id;
        symbols[at].right = after;
        if after < count {
            symbols[after].left = at;
            heap.extend(candidate(at, id, symbols[after].id));
        }
        if at > 0 {
            let before = symbols[at].left;
            heap.extend(candidate(before, symbols[before].id, id));
        }
    }
    ids.extend(symbols.iter().map(|symbol| symbol.id).filter(|&id| id != NONE));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule as it is stated: look at all pairs, merge the best, start again.
    fn merge_plainly(merges: &Merges, byte_ids: &[u32; 256], piece: &[u8]) -> Vec<u32> {
        let mut ids: Vec<u32> = piece.iter().map(|&byte| byte_ids[usize::from(byte)]).collect();
        loop {
            let at_merge = |at: usize| merges.get(ids[at], ids[at + 1]).map(|merge| (merge, at));
            let possible = (1..ids.len()).filter_map(|at| at_merge(at - 1));
            let Some((merge, at)) = possible.min_by_key(|(merge, at)| (merge.rank, *at)) else {
                return ids;
            };
            ids.splice(at..at + 2, [merge.id]);
        }
    }

    /// Random merges over three letters, in random order, so that ranks and ids disagree.
    #[test]
    fn heap_and_scan_merge_as_the_plain_rule_does() {
        let mut state = 0x0123_4567_89AB_CDEF_u64;
        let mut random = move |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as usize % below
        };
        let byte_ids: [u32; 256] = std::array::from_fn(|byte| byte as u32);
        for case in 0..400 {
            let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
            let mut pairs = Vec::new();
            for _ in 0..40 {
                let pick = |at: usize| if at < 3 { b'a' as usize + at } else { 253 + at };
                let known = tokens.len() - 256 + 3;
                let (left, right) = (pick(random(known)), pick(random(known)));
                let merged = [tokens[left].as_slice(), &tokens[right]].concat();
                let id = tokens.iter().position(|token| *token == merged);
                let id = id.unwrap_or(tokens.len());
                if id == tokens.len() {
                    tokens.push(merged);
                }
                pairs.push((left as u32, right as u32, id as u32));
            }
            let mut merges = Merges::with_capacity(pairs.len());
            while !pairs.is_empty() {
                let (left, right, id) = pairs.swap_remove(random(pairs.len()));
                let _repeated = merges.insert(left, right, pairs.len() as u32, id);
            }
            for len in [0, 1, 2, 3, 8, 20, 64, 65, 200] {
                let piece: Vec<u8> = (0..len).map(|_| b'a' + random(3) as u8).collect();
                let expected = merge_plainly(&merges, &byte_ids, &piece);
                let mut heap = Vec::new();
                merge_by_heap(&merges, &byte_ids, &piece, &mut heap);
                assert_eq!(heap, expected, "heap, case {case}, {piece:?}");
                if len <= SCAN_BYTES_MAX {
                    let mut scan = Vec::new();
                    merge_by_scan(&merges, &byte_ids, &piece, &mut scan);
                    assert_eq!(scan, expected, "scan, case {case}, {piece:?}");
                }
            }
        }
    }
}
