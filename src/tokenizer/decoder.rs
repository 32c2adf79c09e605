//! Text from tokens as they come: never half a character.
//!
//! Owns the bytes that may yet become a character, three at most. What comes out, all calls taken
//! together, is the text that one lossy decoding of all the bytes gives, however they are divided.

#![forbid(unsafe_code)]

/// Turns bytes that arrive in portions into text.
#[derive(Clone, Debug, Default)]
pub struct Decoder {
    /// The start of a character whose end has not come.
    held: Vec<u8>,
    /// What the last call returned; kept to be reused.
    text: String,
}

impl Decoder {
    /// A decoder that holds nothing.
    pub fn new() -> Decoder {
        Decoder::default()
    }

    /// Takes the bytes of a token; returns the text that is certain now, often none. Bytes that can
    /// be in no character become U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> &str {
        self.text.clear();
        self.held.extend_from_slice(bytes);
        let mut at = 0;
        for chunk in self.held.utf8_chunks() {
            self.text.push_str(chunk.valid());
            at += chunk.valid().len();
            let invalid = chunk.invalid();
            if invalid.is_empty() {
                break;
            }
            let is_last = at + invalid.len() == self.held.len();
            if is_last && may_go_on(invalid) {
                break;
            }
            self.text.push(char::REPLACEMENT_CHARACTER);
            at += invalid.len();
        }
        self.held.drain(..at);
        &self.text
    }

    /// Ends the text: the bytes still held become U+FFFD. The decoder can then be used again.
    pub fn finish(&mut self) -> &str {
        self.text.clear();
        self.text.push_str(&String::from_utf8_lossy(&self.held));
        self.held.clear();
        &self.text
    }
}

/// Whether `bytes`, which are no character, are the start of one.
fn may_go_on(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
