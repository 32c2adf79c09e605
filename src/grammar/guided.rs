//! Sampling under a grammar: the sampler chooses among the tokens that may come next.

#![forbid(unsafe_code)]

use super::Constraint;
use crate::bail;
use crate::error::Result;
use crate::sample::{Choose, Sampler};
use crate::tokenizer::{Special, Tokenizer};

/// A sampler whose every text matches a grammar, from the first token on.
pub struct Guided<'a> {
    sampler: Sampler,
    constraint: Constraint,
    tokenizer: &'a Tokenizer,
    /// Tokens that end the text.
    ends: Vec<u32>,
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
        Guided { sampler, constraint, tokenizer, ends, allowed: Vec::new() }
    }
}

impl Choose for Guided<'_> {
    fn start_reply(&mut self, position: usize) {
        self.sampler.start_reply(position);
    }

    /// Errors, beside the sampler's: a grammar that is too ambiguous here, or rules so deep that
    /// no token can go on.
    fn choose(&mut self, logits: &[f32], tokens: &[u32]) -> Result<u32> {
        self.allowed.clear();
        self.allowed.extend_from_slice(self.constraint.allowed()?.words());
        if self.constraint.is_complete() {
            for end in self.ends.iter().map(|end| *end as usize) {
                if self.allowed.len() <= end / 64 {
                    self.allowed.resize(end / 64 + 1, 0);
                }
                self.allowed[end / 64] |= 1 << (end % 64);
            }
        }
        let token = self.sampler.sample(logits, tokens, Some(&self.allowed))?;
        if self.ends.contains(&token) {
            return Ok(token);
        }
        match self.tokenizer.token_bytes(token) {
            Some(bytes) if self.constraint.accept(bytes)? => Ok(token),
            _ => bail!("token {token} was allowed by the grammar but does not match it"),
        }
    }

    fn forced(&mut self, most: usize) -> Result<Vec<u32>> {
        // Few tokens have more than four bytes each.
        let bytes = self.constraint.forced(4 * most)?;
        let text = match std::str::from_utf8(&bytes) {
            Ok(text) => text,
            Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default(),
        };
        let mut tokens = self.tokenizer.encode(text, Special::Text);
        tokens.truncate(most);
        Ok(tokens)
    }
}
