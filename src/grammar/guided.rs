//! Sampling under a grammar: the sampler chooses among the tokens that may come next.
//!
//! A reply may begin with a thought, which is free but must be ended: a turn that ended within it
//! would have no text of the grammar at all.

#![forbid(unsafe_code)]

use super::Constraint;
use crate::bail;
use crate::error::Result;
use crate::sample::{Choose, Sampler};
use crate::tokenizer::{Special, Tokenizer};

/// A sampler whose every text matches a grammar, from the first token on or behind a thought.
pub struct Guided<'a> {
    sampler: Sampler,
    constraint: Constraint,
    tokenizer: &'a Tokenizer,
    /// Tokens that end the text.
    ends: Vec<u32>,
    /// The token behind which the text starts; `None` once it has started.
    start_after: Option<u32>,
    /// Bit set of the tokens that may come next.
    allowed: Vec<u64>,
}

impl<'a> Guided<'a> {
    /// `ends` may come where the text is complete, and only there.
    pub fn new(
        sampler: Sampler,
        constraint: Constraint,
        tokenizer: &'a Tokenizer,
        ends: Vec<u32>,
    ) -> Guided<'a> {
        Guided { sampler, constraint, tokenizer, ends, start_after: None, allowed: Vec::new() }
    }

    /// Lets the text start behind the first `token` only, if there is one to wait for.
    pub fn after(self, token: Option<u32>) -> Guided<'a> {
        Guided { start_after: token, ..self }
    }
}

impl Choose for Guided<'_> {
    fn start_reply(&mut self, position: usize) {
        self.sampler.start_reply(position);
    }

    fn guess(&mut self, logits: &[f32], tokens: &[u32]) -> Result<u32> {
        self.sampler.guess(logits, tokens)
    }

    /// Errors, beside the sampler's: a grammar that is too ambiguous here, or rules so deep that
    /// no token can go on.
    fn choose(&mut self, logits: &[f32], tokens: &[u32]) -> Result<u32> {
        let is_thought = self.start_after.is_some();
        self.allowed.clear();
        if !is_thought {
            self.allowed.extend_from_slice(self.constraint.allowed()?.words());
        }
        let rest = if is_thought { !0 } else { 0 };
        self.allowed.resize(self.allowed.len().max(logits.len().div_ceil(64)), rest);
        let may_end = !is_thought && self.constraint.is_complete();
        for end in &self.ends {
            let bit = 1 << (end % 64);
            if let Some(word) = self.allowed.get_mut(*end as usize / 64) {
                *word = if may_end { *word | bit } else { *word & !bit };
            }
        }
        let token = self.sampler.sample(logits, tokens, Some(&self.allowed))?;
        if is_thought {
            self.start_after = self.start_after.filter(|start| *start != token);
            return Ok(token);
        }
        let is_right = self.ends.contains(&token)
            || match self.tokenizer.token_bytes(token) {
                _ if self.tokenizer.is_added(token) => self.constraint.accept_marker(token)?,
                Some(bytes) => self.constraint.accept(bytes)?,
                None => false,
            };
        if !is_right {
            bail!("token {token} was allowed by the grammar but does not match it");
        }
        Ok(token)
    }

    fn forced(&mut self, most: usize) -> Result<Vec<u32>> {
        if self.start_after.is_some() {
            return Ok(Vec::new());
        }
        let spell = |token| self.tokenizer.token_bytes(token).unwrap_or_default().to_vec();
        // Few tokens have more than four bytes each.
        let bytes = self.constraint.forced(4 * most, spell)?;
        let text = match std::str::from_utf8(&bytes) {
            Ok(text) => text,
            Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default(),
        };
        // Text that spells a marker makes a wrong draft, which does no harm.
        let mut tokens = self.tokenizer.encode(text, Special::Parse);
        tokens.truncate(most);
        Ok(tokens)
    }
}
