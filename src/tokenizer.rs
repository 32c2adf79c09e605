//! Byte-level BPE exactly as Hugging Face `tokenizers` does it for GLM's tokenizer.json.
//!
//! Owns text → ids and ids → text. The one layout it implements is GLM's: added tokens, the split
//! rule of [`scanner`], byte-level BPE; [`load`] refuses any other by name. Whether marker text
//! such as `<|user|>` becomes a control token is the caller's explicit choice ([`Special`]), so
//! that text from users cannot forge one. A [`Tokenizer`] is immutable and shared by threads.

#![forbid(unsafe_code)]

mod bpe;
mod decoder;
mod load;
pub mod scanner;

pub use decoder::Decoder;

use crate::bail;
use crate::error::Result;
use bpe::{Arena, Merges, Vocabulary};

/// What becomes of the text of added tokens, like `<|user|>` or `/nothink`, in text to encode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Special {
    /// It stays text: no added token is ever made. The same as a tokenizer without added tokens.
    #[default]
    Text,
    /// It becomes the token, as `encode(text, add_special_tokens=False)` of `tokenizers` does.
    Parse,
}

/// A token that is matched in the text itself, before the text is split.
struct Added {
    content: String,
    id: u32,
    /// Left out of decoded text on request.
    special: bool,
}

/// A loaded tokenizer.json.
pub struct Tokenizer {
    /// Bytes of every token by id: the vocabulary, then the added tokens outside it.
    tokens: Arena,
    vocabulary: Vocabulary,
    merges: Merges,
    /// The token of each single byte.
    byte_ids: [u32; 256],
    /// A piece that is a token as a whole is that token, whatever the merges give.
    ignore_merges: bool,
    /// In ascending order of content.
    added: Vec<Added>,
    /// Positions in `added`, in ascending order of id.
    added_by_id: Vec<usize>,
    /// Whether some added token is in the vocabulary too, where text must not reach it.
    added_in_vocabulary: bool,
    /// Those matched in raw text, then those matched in what is left between them.
    matchers: [Matcher; 2],
}

impl Tokenizer {
    /// The number of ids; they are 0 up to it. (The embedding may have more, padded, rows.)
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    /// Refuses a tokenizer with more ids than the model has `rows` for.
    pub fn check_rows(&self, rows: usize) -> Result<()> {
        let tokens = self.vocab_size();
        if tokens > rows {
            bail!("has {tokens} tokens, but the model has rows for {rows}");
        }
        Ok(())
    }

    /// The id of the added token with this exact content.
    pub fn token_id(&self, content: &str) -> Option<u32> {
        let at = self.added.binary_search_by(|added| added.content.as_str().cmp(content)).ok()?;
        Some(self.added[at].id)
    }

    /// The bytes a token stands for; they need not be UTF-8 on their own. `None` out of range.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.tokens.get(id as usize)
    }

    /// Whether `id` is an added token, special or not.
    pub fn is_added(&self, id: u32) -> bool {
        self.added_at(id).is_some()
    }

    /// Whether `id` is an added token marked special, such as a role marker.
    pub fn is_special(&self, id: u32) -> bool {
        self.added_at(id).is_some_and(|added| added.special)
    }

    fn added_at(&self, id: u32) -> Option<&Added> {
        let at = self.added_by_id.binary_search_by_key(&id, |&at| self.added[at].id).ok()?;
        self.added.get(self.added_by_id[at])
    }

    /// The ids of `text`. Nothing is put before or after them.
    pub fn encode(&self, text: &str, special: Special) -> Vec<u32> {
        // English prose has more than four bytes a token; other text grows the vector.
        let mut ids = Vec::with_capacity(text.len() / 4 + 1);
        match special {
            Special::Text => self.encode_plain(text, &mut ids),
            Special::Parse => self.encode_with_added(&self.matchers, text, &mut ids),
        }
        ids
    }

    /// Splits out the added tokens of the first matcher; what is between them goes to the others.
    fn encode_with_added(&self, matchers: &[Matcher], text: &str, ids: &mut Vec<u32>) {
        let Some((matcher, others)) = matchers.split_first() else {
            return self.encode_plain(text, ids);
        };
        let mut start = 0;
        while let Some(found) = matcher.find(&self.added, text, start) {
            self.encode_with_added(others, &text[start..found.start], ids);
            ids.push(found.id);
            start = found.end;
        }
        self.encode_with_added(others, &text[start..], ids);
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) {
        for piece in scanner::pieces(text) {
            let piece = piece.as_bytes();
            let whole = match self.ignore_merges {
                true => self.vocabulary.get(&self.tokens, piece),
                false => None,
            };
            match whole {
                Some(id) if !self.added_in_vocabulary || !self.is_added(id) => ids.push(id),
                _ => bpe::encode_piece(&self.merges, &self.byte_ids, piece, ids),
            }
        }
    }

    /// The text of `ids`, each byte sequence that is not UTF-8 replaced by U+FFFD. `skip_special`
    /// leaves out the special tokens (added tokens that are not special stay, as `<think>` does).
    ///
    /// # Errors
    /// An id out of range.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let mut bytes = Vec::new();
        for &id in ids {
            let Some(token) = self.token_bytes(id) else {
                bail!(
                    "token id {id} is out of range: the tokenizer has {} tokens, from 0",
                    self.vocab_size()
                );
            };
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(token);
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// An added token found in a text.
struct Found {
    start: usize,
    end: usize,
    id: u32,
}

/// Finds added tokens: leftmost first, of those at one place the longest.
struct Matcher {
    /// Positions in `Tokenizer::added` of the tokens to find, ascending, so by content.
    members: Vec<usize>,
    /// The bytes with which a member starts.
    is_first: [bool; 256],
}

impl Matcher {
    fn new(added: &[Added], members: Vec<usize>) -> Matcher {
        let mut is_first = [false; 256];
        for &member in &members {
            is_first[usize::from(added[member].content.as_bytes()[0])] = true;
        }
        Matcher { members, is_first }
    }

    /// The first match in `text` at or after byte `from`.
    fn find(&self, added: &[Added], text: &str, from: usize) -> Option<Found> {
        if self.members.is_empty() {
            return None;
        }
        let bytes = text.as_bytes();
        let mut start = from;
        loop {
            start += bytes[start..].iter().position(|&byte| self.is_first[usize::from(byte)])?;
            if let Some((end, id)) = self.longest_at(added, bytes, start) {
                return Some(Found { start, end, id });
            }
            start += 1;
        }
    }

    /// End and id of the longest member at `start`: the sorted members that go on as the text does
    /// are narrowed byte by byte; the shortest of them is first.
    fn longest_at(&self, added: &[Added], bytes: &[u8], start: usize) -> Option<(usize, u32)> {
        let mut members = self.members.as_slice();
        let mut longest = None;
        for (depth, &byte) in bytes[start..].iter().enumerate() {
            let at_depth = |member: &usize| added[*member].content.as_bytes()[depth];
            let first = members.partition_point(|member| at_depth(member) < byte);
            members = &members[first..];
            members = &members[..members.partition_point(|member| at_depth(member) == byte)];
            let Some(&shortest) = members.first() else { break };
            if added[shortest].content.len() == depth + 1 {
                longest = Some((start + depth + 1, added[shortest].id));
                members = &members[1..];
            }
        }
        longest
    }
}
