//! One reply as it grows: tokens to whole characters, split into reasoning and content, with
//! stop strings held back.
//!
//! The split is made by token id, never by text, and looks at the current turn only: prose that
//! spells out `</think>` cannot end the reasoning, and what earlier turns did is irrelevant. A
//! reply whose reasoning was never closed is content if the model stopped by itself (it answered
//! without thinking), and reasoning if it was cut off. Control tokens have no text.

#![forbid(unsafe_code)]

use crate::engine::Finish;
use crate::stop::StopScanner;
use crate::tokenizer::{Decoder, Tokenizer};

/// Text of the reply so far.
pub struct Reply<'a> {
    tokenizer: &'a Tokenizer,
    decoder: Decoder,
    scanner: StopScanner,
    /// The token that closes the think block that the prompt left open; `None` once closed.
    end_think: Option<u32>,
    thinking: bool,
    reasoning: String,
    content: String,
}

impl<'a> Reply<'a> {
    /// An empty reply. `thinking` tells that the prompt ended inside an open think block.
    pub fn new(tokenizer: &'a Tokenizer, thinking: bool, stops: &[String]) -> Reply<'a> {
        Reply {
            tokenizer,
            decoder: Decoder::new(),
            scanner: StopScanner::new(stops),
            end_think: tokenizer.token_id("</think>"),
            thinking,
            reasoning: String::new(),
            content: String::new(),
        }
    }

    /// Takes one token and returns the text that it made safe to show. The end of the reasoning
    /// is marked there, though neither part contains the marker.
    pub fn push(&mut self, id: u32) -> String {
        if self.thinking && Some(id) == self.end_think {
            // A character that the block leaves unfinished is flushed on its own side.
            let rest = self.decoder.finish().to_string();
            self.reasoning.push_str(&rest);
            self.thinking = false;
            return rest + "</think>\n";
        }
        if self.tokenizer.is_special(id) {
            return String::new();
        }
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        let text = self.decoder.push(bytes).to_string();
        self.add(text)
    }

    /// Stop strings end content only: reasoning may mention them.
    fn add(&mut self, text: String) -> String {
        if self.thinking {
            self.reasoning.push_str(&text);
            return text;
        }
        let safe = self.scanner.push(&text);
        self.content.push_str(&safe);
        safe
    }

    /// Whether the next token belongs to the reasoning.
    pub fn is_thinking(&self) -> bool {
        self.thinking
    }

    /// Whether a stop string was completed.
    pub fn stopped(&self) -> bool {
        self.scanner.stopped()
    }

    /// Ends the reply and returns the last text to show.
    pub fn finish(&mut self, finish: Finish) -> String {
        let rest = self.decoder.finish().to_string();
        let mut last = self.add(rest);
        let held = self.scanner.finish();
        self.content.push_str(&held);
        last.push_str(&held);
        if self.thinking && finish == Finish::Stop {
            self.content = std::mem::take(&mut self.reasoning);
        }
        last
    }

    /// What the model thought.
    pub fn reasoning(&self) -> &str {
        &self.reasoning
    }

    /// What the model said.
    pub fn content(&self) -> &str {
        &self.content
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Special;
    use std::path::Path;

    fn tokenizer() -> Tokenizer {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        Tokenizer::load(&root.join("tests/fixtures/tokenizer/tokenizer.json")).unwrap()
    }

    /// (shown, reasoning, content) of a scripted reply whose markers are real tokens.
    fn reply(script: &str, thinking: bool, stop: &str, finish: Finish) -> [String; 3] {
        let tokenizer = tokenizer();
        let mut reply = Reply::new(&tokenizer, thinking, &[stop.to_string()]);
        let mut shown = String::new();
        for id in tokenizer.encode(script, Special::Parse) {
            shown += &reply.push(id);
        }
        shown += &reply.finish(finish);
        [shown, reply.reasoning().to_string(), reply.content().to_string()]
    }

    #[test]
    fn an_unclosed_block_is_content_if_stopped_and_reasoning_if_cut() {
        assert_eq!(reply("Paris.", true, "", Finish::Stop), ["Paris.", "", "Paris."]);
        assert_eq!(reply("Paris.", true, "", Finish::Length), ["Paris.", "Paris.", ""]);
    }

    #[test]
    fn the_closing_token_splits_once_and_has_no_text() {
        let got = reply("hm é</think>so</think>!", true, "", Finish::Stop);
        assert_eq!(got, ["hm é</think>\nso</think>!", "hm é", "so</think>!"]);
        assert_eq!(reply("a", false, "", Finish::Length), ["a", "", "a"]);
    }

    #[test]
    fn stop_strings_and_control_tokens_never_show() {
        let got = reply("END</think>a E<|assistant|>ND b", true, "END", Finish::Stop);
        assert_eq!(got, ["END</think>\na ", "END", "a "]);
        assert_eq!(reply("a EN", false, "END", Finish::Length), ["a EN", "", "a EN"]);
    }
}
