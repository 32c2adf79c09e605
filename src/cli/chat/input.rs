//! What the person at the terminal, or a script, says: lines to messages and commands.
//!
//! The terminal edits its lines itself. A message of several lines is a paste (the terminal marks
//! it, once asked to), lines that end in a backslash, or a block between `"""` and `"""`. A line
//! that starts with `/` is a command, `//` a message that starts with `/`; neither is looked for
//! inside of several lines. Where stdin is no terminal the same holds, without prompts.

#![forbid(unsafe_code)]

use crate::cli::note;
use crate::error::{Context, Error, Result};
use crate::sys;
use std::io::{BufRead, BufReader, Read};

/// Longest message.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// The terminal hands over this many bytes of a line, and drops the rest without a word.
const TERMINAL_LINE_BYTES_MAX: usize = 4095;

/// Lines that follow one another faster than this were not typed.
const PASTE_GAP_MS: i32 = 100;

const PASTE_ON: &str = "\x1b[?2004h";
const PASTE_OFF: &str = "\x1b[?2004l";
const PASTE_START: &str = "\x1b[200~";
const PASTE_END: &str = "\x1b[201~";
const BLOCK: &str = "\"\"\"";

/// Other names of commands, as the C engine has them.
const ALIASES: [(&str, &str); 4] =
    [(":reset", "/reset"), (":more", "/more"), (":q", "/quit"), (":quit", "/quit")];

/// What was said.
#[derive(Debug, PartialEq, Eq)]
pub enum Entry {
    /// For the model.
    Message(String),
    /// `/name` and what follows it.
    Command(String, String),
    /// Neither, and why.
    Refused(String),
    /// The input has ended.
    End,
}

/// Reads entries.
pub struct Input<R: Read> {
    reader: BufReader<R>,
    /// [`sys::wait_for_stdin`], if that is what is read.
    wait: fn(i32) -> bool,
    /// A person types, who is shown prompts.
    on_terminal: bool,
    /// Why what is being read cannot be used.
    refused: Option<String>,
}

impl<R: Read> Input<R> {
    /// Reads from `source`; `wait` tells when there is something, as [`sys::wait_for_stdin`] does.
    pub fn new(source: R, wait: fn(i32) -> bool, on_terminal: bool) -> Input<R> {
        Input { reader: BufReader::new(source), wait, on_terminal, refused: None }
    }

    /// The next entry; empty lines are none. Errors: SIGINT before it began, or input that cannot
    /// be read.
    pub fn entry(&mut self) -> Result<Entry> {
        loop {
            self.ask(&format!("{PASTE_ON}> "));
            let text = self.text();
            self.ask(PASTE_OFF);
            let text = text?;
            if let Some(why) = self.refused.take() {
                return Ok(Entry::Refused(why));
            }
            match text {
                Some(text) if text.trim().is_empty() => {}
                Some(text) => return Ok(parse(text)),
                None => return Ok(Entry::End),
            }
        }
    }

    fn ask(&self, text: &str) {
        if self.on_terminal {
            note(text);
        }
    }

    /// All lines of an entry, a block with its quotes. SIGINT behind the first takes them back.
    fn text(&mut self) -> Result<Option<String>> {
        let Some(mut text) = self.line()? else { return Ok(None) };
        let is_block = text.starts_with(BLOCK);
        while self.refused.is_none() {
            let end = text.trim_end();
            let is_open = is_block && (end.len() < 2 * BLOCK.len() || !end.ends_with(BLOCK));
            let in_paste = text.rfind(PASTE_START) > text.rfind(PASTE_END);
            let goes_on = !is_block && !in_paste && text.ends_with('\\');
            if !(is_open || in_paste || goes_on) {
                break;
            }
            if goes_on {
                text.pop();
            }
            self.ask(if in_paste { "" } else { "… " });
            match self.line() {
                Ok(Some(line)) => text = text + "\n" + &line,
                Ok(None) => break,
                Err(_) if self.on_terminal && sys::interrupted() => {
                    sys::clear_interrupt();
                    return Ok(Some(String::new()));
                }
                Err(error) => return Err(error),
            }
            if text.len() > MESSAGE_BYTES_MAX {
                self.refused = Some(format!("a message has at most {MESSAGE_BYTES_MAX} bytes"));
            }
        }
        Ok(Some(text.replace(PASTE_START, "").replace(PASTE_END, "")))
    }

    /// The next line without its end; `None` when there is no more.
    fn line(&mut self) -> Result<Option<String>> {
        if self.reader.buffer().is_empty() && !sys::interrupted() {
            (self.wait)(-1);
        }
        if sys::interrupted() {
            self.ask("\n");
            return Err(Error::interrupted());
        }
        let mut bytes = Vec::new();
        let mut bounded = self.reader.by_ref().take(MESSAGE_BYTES_MAX as u64 + 1);
        bounded.read_until(b'\n', &mut bytes).context(|| "stdin")?;
        if bytes.is_empty() {
            return Ok(None);
        }
        if self.on_terminal && bytes.len() > TERMINAL_LINE_BYTES_MAX {
            // The end of a paste is lost with the line's: what waits is the rest of it.
            while (self.wait)(PASTE_GAP_MS) && self.reader.read_until(b'\n', &mut bytes)? > 0 {}
            self.refused = Some(format!(
                "nothing was sent: the terminal cuts lines at {TERMINAL_LINE_BYTES_MAX} bytes"
            ));
            return Ok(Some(String::new()));
        }
        let line = String::from_utf8(bytes).unwrap_or_else(|error| {
            let place = error.utf8_error().valid_up_to();
            self.refused = Some(format!("input: not UTF-8 at byte {place} of a line"));
            String::new()
        });
        let line = line.strip_suffix('\n').unwrap_or(&line);
        Ok(Some(line.strip_suffix('\r').unwrap_or(line).to_string()))
    }
}

/// What a text means.
fn parse(text: String) -> Entry {
    if let Some(block) = text.strip_prefix(BLOCK) {
        let block = block.trim_end();
        let block = block.strip_suffix(BLOCK).unwrap_or(block);
        return Entry::Message(block.trim_matches('\n').to_string());
    }
    if text.contains('\n') {
        return Entry::Message(text);
    }
    let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((&text, ""));
    let alias = ALIASES.iter().find(|(alias, _)| *alias == name);
    let name = alias.map_or(name, |(_, name)| name);
    match name.strip_prefix('/') {
        None => Entry::Message(text),
        Some(after) if after.starts_with('/') => Entry::Message(text[1..].to_string()),
        Some(_) => Entry::Command(name.to_string(), rest.trim().to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(text: &str) -> Vec<Entry> {
        let mut input = Input::new(text.as_bytes(), |_| true, false);
        let mut next = || Some(input.entry().unwrap()).filter(|entry| *entry != Entry::End);
        std::iter::from_fn(&mut next).collect()
    }

    fn messages(texts: &[&str]) -> Vec<Entry> {
        texts.iter().map(|text| Entry::Message(text.to_string())).collect()
    }

    #[test]
    fn lines_are_messages_and_the_last_needs_no_end() {
        assert_eq!(entries("one\r\n\n  \ntwo é\nthree"), messages(&["one", "two é", "three"]));
        assert_eq!(entries("\n"), []);
    }

    #[test]
    fn several_lines_are_one_message_as_paste_block_or_continuation() {
        let pasted = "say \x1b[200~a\n\nb\\\n/quit\x1b[201~ now\nnext";
        assert_eq!(entries(pasted), messages(&["say a\n\nb\\\n/quit now", "next"]));
        let block = "\"\"\"\n/a\n\n  b\\\n\"\"\"\nnext\n\"\"\"x\"\"\"\n\"\"\"open\nend";
        assert_eq!(entries(block), messages(&["/a\n\n  b\\", "next", "x", "open\nend"]));
        assert_eq!(entries("a\\\nb\\\nc\nd\\"), messages(&["a\nb\nc", "d"]));
        // Two pastes in one message.
        let twice = "\x1b[200~a\nb\x1b[201~\x1b[200~c\nd\x1b[201~\n";
        assert_eq!(entries(twice), messages(&["a\nbc\nd"]));
    }

    #[test]
    fn only_a_line_of_its_own_is_a_command() {
        let command = |name: &str, rest: &str| Entry::Command(name.into(), rest.into());
        assert_eq!(entries("/save  a b \n"), [command("/save", "a b")]);
        assert_eq!(entries(":q"), [command("/quit", "")]);
        assert_eq!(entries("\x1b[200~/load x\x1b[201~\n"), [command("/load", "x")]);
        assert_eq!(entries("//etc/fstab?\n:) hi"), messages(&["/etc/fstab?", ":) hi"]));
        assert_eq!(entries("/undo\\\nx\n"), messages(&["/undo\nx"]));
    }

    #[test]
    fn bytes_that_are_no_text_are_refused_with_their_place_and_the_next_line_is_read() {
        let mut input = Input::new(&b"ab\xff\nc\n"[..], |_| true, false);
        let why = Entry::Refused("input: not UTF-8 at byte 2 of a line".into());
        assert_eq!(input.entry().unwrap(), why);
        assert_eq!(input.entry().unwrap(), Entry::Message("c".into()));
    }
}
