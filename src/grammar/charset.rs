//! Sets of characters, and characters of which only some bytes have been read. A token that no text
//! spells, such as `<tool_call>`, counts as one character behind the last of Unicode.

#![forbid(unsafe_code)]

/// Code points in ascending, disjoint, non-adjacent inclusive ranges, never a surrogate; then
/// markers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct CharSet(Vec<(u32, u32)>);

const SURROGATES: (u32, u32) = (0xd800, 0xdfff);
const LAST: u32 = 0x10_ffff;
/// The marker of token 0; those of others follow. No bytes of a character reach so far.
const MARKERS: u32 = 1 << 21;

impl CharSet {
    /// The union of inclusive ranges.
    fn new(mut ranges: Vec<(u32, u32)>) -> CharSet {
        ranges.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::new();
        for (low, high) in ranges {
            // A range across the surrogates becomes the parts before and behind them.
            for (low, high) in
                [(low, high.min(SURROGATES.0 - 1)), (low.max(SURROGATES.1 + 1), high)]
            {
                match merged.last_mut() {
                    _ if low > high => {}
                    Some(last) if low <= last.1 + 1 => last.1 = last.1.max(high),
                    _ => merged.push((low, high)),
                }
            }
        }
        CharSet(merged)
    }

    /// The code points from `low` to `high`.
    pub(super) fn range(low: u32, high: u32) -> CharSet {
        CharSet::new(vec![(low, high)])
    }

    /// The ranges whose first and last characters are in `ends`, one behind the other.
    pub(super) fn ranges(ends: &str) -> CharSet {
        let ends: Vec<u32> = ends.chars().map(u32::from).collect();
        CharSet::new(ends.as_chunks::<2>().0.iter().map(|[low, high]| (*low, *high)).collect())
    }

    /// The characters of `text`.
    pub(super) fn of(text: &str) -> CharSet {
        CharSet::new(text.chars().map(|char| (char as u32, char as u32)).collect())
    }

    /// The characters that a JSON string cannot hold as themselves.
    pub(super) fn escaped_in_json() -> CharSet {
        CharSet::ranges("\0\u{1f}\"\"\\\\")
    }

    /// The marker of a token.
    pub(super) fn marker(token: u32) -> CharSet {
        CharSet(vec![(MARKERS + token, MARKERS + token)])
    }

    /// The tokens whose markers are members.
    pub(super) fn markers(&self) -> impl Iterator<Item = u32> {
        let at = self.0.partition_point(|range| range.1 < MARKERS);
        self.0[at..].iter().flat_map(|&(low, high)| low - MARKERS..=high - MARKERS)
    }

    /// Every character that is not in the set, markers left aside.
    pub(super) fn complement(&self) -> CharSet {
        let members = self.0.iter().filter(|range| range.0 < MARKERS);
        let starts = [0].into_iter().chain(members.clone().map(|range| range.1 + 1));
        let ends = members.map(|range| range.0).chain([LAST + 1]);
        let gaps = starts.zip(ends).filter(|(start, end)| start < end);
        CharSet::new(gaps.map(|(start, end)| (start, end - 1)).collect())
    }

    /// The characters in any of the sets.
    pub(super) fn union(sets: &[CharSet]) -> CharSet {
        CharSet::new(sets.iter().flat_map(|set| &set.0).copied().collect())
    }

    /// The characters that are not in `other`.
    pub(super) fn minus(&self, other: &CharSet) -> CharSet {
        CharSet::union(&[self.complement(), other.clone()]).complement()
    }

    /// The only member, if there is exactly one.
    pub(super) fn single(&self) -> Option<u32> {
        match self.0[..] {
            [(low, high)] if low == high => Some(low),
            _ => None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The members up to `last`.
    pub(super) fn up_to(&self, last: u32) -> impl Iterator<Item = char> {
        let ranges = self.0.iter().map(move |&(low, high)| low..=high.min(last));
        ranges.flatten().filter_map(char::from_u32)
    }

    /// Whether some member is in `low..=high`.
    pub(super) fn intersects(&self, low: u32, high: u32) -> bool {
        let at = self.0.partition_point(|range| range.1 < low);
        self.0.get(at).is_some_and(|range| range.0 <= high)
    }
}

impl From<char> for CharSet {
    fn from(char: char) -> CharSet {
        CharSet::range(char.into(), char.into())
    }
}

/// A set of characters as the matcher wants it.
#[derive(Debug)]
pub(super) struct Class {
    pub(super) set: CharSet,
    /// Bit b: the character b, below 128, is a member.
    pub(super) ascii: u128,
    /// Every character from 128 on is a member.
    pub(super) all_above_ascii: bool,
}

impl Class {
    pub(super) fn new(set: CharSet) -> Class {
        let ascii = set.up_to(127).fold(0, |bits, char| bits | 1 << char as u32);
        let above = CharSet::range(128, LAST);
        Class { ascii, all_above_ascii: above.minus(&set).is_empty(), set }
    }
}

/// The bytes read of a character that is not complete; none at the boundary of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Partial {
    /// Payload bits read.
    bits: u32,
    /// Bytes of the whole character.
    length: u8,
    /// Bytes to come.
    left: u8,
}

impl Partial {
    pub(super) fn is_boundary(self) -> bool {
        self.left == 0
    }

    /// What is read after one more byte, with the least and the greatest code point it may become
    /// (a single one at a boundary); `None` if UTF-8 has no such byte here.
    pub(super) fn advance(self, byte: u8) -> Option<(Partial, u32, u32)> {
        let value = u32::from(byte);
        let next = match (self.left, byte) {
            (0, 0..=0x7f) => return Some((Partial::default(), value, value)),
            (0, 0xc2..=0xdf) => Partial { bits: value & 0x1f, length: 2, left: 1 },
            (0, 0xe0..=0xef) => Partial { bits: value & 0x0f, length: 3, left: 2 },
            (0, 0xf0..=0xf4) => Partial { bits: value & 0x07, length: 4, left: 3 },
            (1.., 0x80..=0xbf) => {
                Partial { bits: self.bits << 6 | value & 0x3f, left: self.left - 1, ..self }
            }
            _ => return None,
        };
        // Characters below the first of this length would be encoded overlong.
        let first = [0, 0, 0x80, 0x800, 0x1_0000][usize::from(next.length)];
        let shift = 6 * u32::from(next.left);
        let low = (next.bits << shift).max(first);
        let high = next.bits << shift | ((1 << shift) - 1);
        let next = if next.left == 0 { Partial::default() } else { next };
        (low <= high.min(LAST)).then_some((next, low, high))
    }
}
