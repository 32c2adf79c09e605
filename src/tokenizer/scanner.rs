//! The split rule of GLM's pre-tokenizer as one forward scan.
//!
//! Owns the equivalent of [`SPLIT_PATTERN`], the only split rule accepted: the alternatives are
//! tried left to right at each position, and every piece starts where the last one ended. The scan
//! looks ahead by at most two characters, except over a run of white space, which is passed at most
//! twice. Letters and numbers are those of [`crate::unicode`]; white space is
//! `char::is_whitespace`, which holds the same 25 characters as the rule's `\s`.

#![forbid(unsafe_code)]

use crate::unicode::{is_letter, is_number};

/// The split rule as tokenizer.json spells it.
pub const SPLIT_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// What the rule distinguishes in a character.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Number,
    /// Carriage return or line feed; white space too.
    Newline,
    /// White space other than [`Class::Newline`].
    Space,
    Other,
}

/// The classes of the ASCII characters.
const ASCII_CLASSES: [Class; 128] = {
    let mut classes = [Class::Other; 128];
    let mut byte = 0u8;
    while byte < 128 {
        classes[byte as usize] = match byte {
            b'A'..=b'Z' | b'a'..=b'z' => Class::Letter,
            b'0'..=b'9' => Class::Number,
            b'\n' | b'\r' => Class::Newline,
            b'\t' | 0x0B | 0x0C | b' ' => Class::Space,
            _ => Class::Other,
        };
        byte += 1;
    }
    classes
};

/// Iterator over the pieces of a text; together they are the text.
pub struct Pieces<'t> {
    text: &'t str,
    start: usize,
}

/// Splits `text` into the pieces that are tokenized on their own.
pub fn pieces(text: &str) -> Pieces<'_> {
    Pieces { text, start: 0 }
}

impl<'t> Iterator for Pieces<'t> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        if self.start == self.text.len() {
            return None;
        }
        let end = piece_end(self.text, self.start);
        assert!(end > self.start, "a piece is never empty");
        let piece = &self.text[self.start..end];
        self.start = end;
        Some(piece)
    }
}

/// The class and length in bytes of the character at `at`; `None` at the end of `text`.
fn class_at(text: &str, at: usize) -> Option<(Class, usize)> {
    let byte = *text.as_bytes().get(at)?;
    if let Some(&class) = ASCII_CLASSES.get(usize::from(byte)) {
        return Some((class, 1));
    }
    let char = text[at..].chars().next()?;
    let class = if is_letter(char) {
        Class::Letter
    } else if is_number(char) {
        Class::Number
    } else if char.is_whitespace() {
        Class::Space
    } else {
        Class::Other
    };
    Some((class, char.len_utf8()))
}

/// The end of the longest run from `at` whose characters' classes `accept` takes.
fn run_end(text: &str, mut at: usize, accept: impl Fn(Class) -> bool) -> usize {
    while let Some((class, len)) = class_at(text, at) {
        if !accept(class) {
            break;
        }
        at += len;
    }
    at
}

/// The end of the piece that starts at `start`, which is inside `text`.
fn piece_end(text: &str, start: usize) -> usize {
    let Some((class, len)) = class_at(text, start) else { return start };
    let is_letter = |class| class == Class::Letter;
    // (?i:'s|'t|'re|'ve|'m|'ll|'d)
    if let Some(end) = contraction_end(text.as_bytes(), start) {
        return end;
    }
    // [^\r\n\p{L}\p{N}]?\p{L}+
    let after = start + len;
    match class {
        Class::Letter => return run_end(text, after, is_letter),
        Class::Space | Class::Other => {
            let end = run_end(text, after, is_letter);
            if end > after {
                return end;
            }
        }
        Class::Number | Class::Newline => {}
    }
    // \p{N}{1,3}
    if class == Class::Number {
        return number_end(text, after);
    }
    // ` ?[^\s\p{L}\p{N}]+[\r\n]*`
    let others = if text.as_bytes()[start] == b' ' { after } else { start };
    let end = run_end(text, others, |class| class == Class::Other);
    if end > others {
        return run_end(text, end, |class| class == Class::Newline);
    }
    space_end(text, start)
}

/// The end of a contraction at `start`, if there is one. Case folding is Unicode's, whose only
/// addition to ASCII among these letters is U+017F (bytes C5 BF), the long s.
fn contraction_end(bytes: &[u8], start: usize) -> Option<usize> {
    if bytes[start] != b'\'' {
        return None;
    }
    let after = start + 1;
    match bytes.get(after)?.to_ascii_lowercase() {
        b's' | b't' | b'm' | b'd' => Some(after + 1),
        0xC5 if bytes.get(after + 1) == Some(&0xBF) => Some(after + 2),
        first => match (first, bytes.get(after + 1)?.to_ascii_lowercase()) {
            (b'r' | b'v', b'e') | (b'l', b'l') => Some(after + 2),
            _ => None,
        },
    }
}

/// The end of a number piece, of which one digit ended at `at`: three digits at most.
fn number_end(text: &str, mut at: usize) -> usize {
    for _ in 1..3 {
        match class_at(text, at) {
            Some((Class::Number, len)) => at += len,
            _ => break,
        }
    }
    at
}

/// The end of a white space piece: `\s*[\r\n]+|\s+(?!\S)|\s+`. A run that holds a line end goes up
/// to its last one; another leaves its last character to what follows, if it has more than one.
fn space_end(text: &str, start: usize) -> usize {
    let (mut end, mut last_start, mut newline_end) = (start, start, None);
    while let Some((class @ (Class::Newline | Class::Space), len)) = class_at(text, end) {
        last_start = end;
        end += len;
        if class == Class::Newline {
            newline_end = Some(end);
        }
    }
    match newline_end {
        Some(newline_end) => newline_end,
        None if end < text.len() && last_start > start => last_start,
        None => end,
    }
}

#[cfg(test)]
mod tests {
    use super::pieces;

    /// Pieces as the `tokenizers` library gives them for the same rule.
    #[test]
    fn pieces_are_those_of_the_regular_expression() {
        let cases: &[(&str, &[&str])] = &[
            ("", &[]),
            ("12345", &["123", "45"]),
            ("1\u{ff12}\u{663}\u{664}", &["1\u{ff12}\u{663}", "\u{664}"]),
            ("I'LL don't", &["I", "'LL", " don", "'t"]),
            ("it'\u{17f}x", &["it", "'\u{17f}", "x"]),
            ("it\u{2019}s", &["it", "\u{2019}s"]),
            ("'ra 'r '", &["'ra", " '", "r", " '"]),
            ("e\u{301}e", &["e", "\u{301}e"]),
            ("\u{24d0}b", &["\u{24d0}b"]),
            ("   a", &["  ", " a"]),
            (" \r\n\r\n b", &[" \r\n\r\n", " b"]),
            ("!!\n\n x", &["!!\n\n", " x"]),
            ("a\u{85}b", &["a", "\u{85}b"]),
            ("\u{a0}\u{a0}1", &["\u{a0}", "\u{a0}", "1"]),
            ("a \n", &["a", " \n"]),
            ("a  ", &["a", "  "]),
            ("\t\t x", &["\t\t", " x"]),
        ];
        for (text, expected) in cases {
            assert_eq!(pieces(text).collect::<Vec<_>>(), *expected, "{text:?}");
        }
    }
}
