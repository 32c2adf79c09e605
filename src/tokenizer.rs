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
use bpe::{Merges, Vocabulary};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// What becomes of the text of added tokens, like `<|user|>` or `/nothink`, in text to encode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Special {
    /// It stays text: no added token is ever made. The same as a tokenizer without added tokens.
    #[default]
    Text,
    /// It becomes the token, as `encode(text, add_special_tokens=False)` of `tokenizers` does.
    Parse,
}

/// A loaded tokenizer.json.
pub struct Tokenizer {
    /// Bytes of every token by id: the vocabulary, then the added tokens outside it.
    tokens: Vec<Arc<[u8]>>,
    /// Without the added tokens, which text must not reach.
    vocabulary: Vocabulary,
    merges: Merges,
    /// The token of each single byte.
    byte_ids: [u32; 256],
    /// A piece that is a token as a whole is that token, whatever the merges give.
    ignore_merges: bool,
    /// Ids of the added tokens, which are matched in the text itself, before it is split.
    added: HashMap<String, u32>,
    /// Of each of them, whether it is left out of decoded text on request.
    is_special: HashMap<u32, bool>,
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
        self.added.get(content).copied()
    }

    /// The bytes a token stands for; they need not be UTF-8 on their own. `None` out of range.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.tokens.get(id as usize).map(|token| &**token)
    }

    /// Whether `id` is an added token, special or not.
    pub fn is_added(&self, id: u32) -> bool {
        self.is_special.contains_key(&id)
    }

    /// Whether `id` is an added token marked special, such as a role marker.
    pub fn is_special(&self, id: u32) -> bool {
        self.is_special.get(&id) == Some(&true)
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
        while let Some((found, id)) = matcher.find(text, start) {
            self.encode_with_added(others, &text[start..found.start], ids);
            ids.push(id);
            start = found.end;
        }
        self.encode_with_added(others, &text[start..], ids);
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) {
        for piece in scanner::pieces(text) {
            let piece = piece.as_bytes();
            match self.vocabulary.get(piece).filter(|_| self.ignore_merges) {
                Some(id) => ids.push(*id),
                None => bpe::encode_piece(&self.merges, &self.byte_ids, piece, ids),
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

/// Finds added tokens: leftmost first, of those at one place the longest.
struct Matcher {
    /// Content and id, the longest first.
    members: Vec<(String, u32)>,
    /// The bytes with which a member starts.
    is_first: [bool; 256],
}

impl Matcher {
    fn new(members: Vec<(String, u32)>) -> Matcher {
        let mut is_first = [false; 256];
        for (content, _) in &members {
            is_first[usize::from(content.as_bytes()[0])] = true;
        }
        Matcher { members, is_first }
    }

    /// The first match in `text` at or after byte `from`, with the token's id.
    fn find(&self, text: &str, from: usize) -> Option<(Range<usize>, u32)> {
        let bytes = text.as_bytes();
        let mut places = (from..bytes.len()).filter(|&at| self.is_first[usize::from(bytes[at])]);
        places.find_map(|at| {
            let is_here =
                |(content, _): &&(String, u32)| bytes[at..].starts_with(content.as_bytes());
            let (content, id) = self.members.iter().find(is_here)?;
            Some((at..at + content.len(), *id))
        })
    }
}
