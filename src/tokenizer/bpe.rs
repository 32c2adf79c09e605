//! Byte-pair encoding of one piece: the vocabulary by bytes, the merges by pair, the merging.
//!
//! Owns the two lookup tables and the rule that the merge listed earliest is applied first, and of
//! equal ones the leftmost. Short pieces are merged in an array by scanning for the best pair;
//! long ones with a heap, so that a megabyte of one letter costs n log n. The tables have a fast
//! hash that is seeded per process: a vocabulary made to collide cannot be prepared in advance.

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

/// Pieces up to this many bytes are merged by scanning, which is quadratic but without a heap;
/// the two ways cost the same at about this length.
const SCAN_BYTES_MAX: usize = 64;

/// No token: no merge, or a symbol that was merged into its left neighbour.
const NONE: u32 = u32::MAX;

/// Token ids by token bytes.
pub type Vocabulary = HashMap<Arc<[u8]>, u32, Seeded>;

/// What two adjacent tokens become.
#[derive(Clone, Copy)]
pub struct Merge {
    /// Place in the list of merges: lower goes first.
    pub rank: u32,
    /// The token they become.
    pub id: u32,
}

/// Merges by the pair of token ids.
pub type Merges = HashMap<(u32, u32), Merge, Seeded>;

/// The hash of both tables.
#[derive(Clone, Copy)]
pub struct Seeded(u64);

impl Seeded {
    /// With a seed of its own.
    pub fn new() -> Seeded {
        Seeded(RandomState::new().hash_one(0u64))
    }
}

impl BuildHasher for Seeded {
    type Hasher = Mixer;

    fn build_hasher(&self) -> Mixer {
        Mixer(self.0)
    }
}

/// Takes eight bytes at a time. Padding is no ambiguity: slices are hashed behind their length.
pub struct Mixer(u64);

impl Mixer {
    /// Both halves of the 128-bit product, folded: every input bit reaches every output bit.
    fn mix(&mut self, word: u64) {
        /// An odd constant with about as many ones as zeros: the golden ratio as 64 fraction bits.
        const MULTIPLIER: u128 = 0x9E37_79B9_7F4A_7C15;
        let product = u128::from(self.0 ^ word) * MULTIPLIER;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        let (chunks, tail) = bytes.as_chunks::<8>();
        chunks.iter().for_each(|chunk| self.mix(u64::from_le_bytes(*chunk)));
        self.mix(tail.iter().fold(0, |word, &byte| word << 8 | u64::from(byte)));
    }

    fn write_u32(&mut self, number: u32) {
        self.mix(u64::from(number));
    }

    fn write_usize(&mut self, length: usize) {
        self.mix(length as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
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
        merges.get(&pair).copied().unwrap_or(NO_MERGE)
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
        let merge = merges.get(&(left, right))?;
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
            let at_merge = |at: usize| merges.get(&(ids[at], ids[at + 1])).map(|merge| (merge, at));
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
            let mut merges = Merges::with_hasher(Seeded::new());
            while !pairs.is_empty() {
                let (left, right, id) = pairs.swap_remove(random(pairs.len()));
                let rank = pairs.len() as u32;
                merges.entry((left, right)).or_insert(Merge { rank, id });
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
