//! What GBNF and regular expressions write alike: alternatives of sequences of repeated atoms,
//! groups, classes of characters, and most escapes.

#![forbid(unsafe_code)]

use super::charset::CharSet;
use super::compile::{Builder, Expr};
use super::{NESTING_MAX, REPEAT_MAX, TEXT_BYTES_MAX, UNBOUNDED};
use crate::bail;
use crate::error::{Error, Result};

/// Where the two languages differ.
pub(super) trait Syntax: Sized {
    /// Whether groups may open with `(?:`, and a `?` behind a repetition has no other meaning.
    const IS_REGEX: bool;
    /// The characters that `.` stands for.
    fn any() -> CharSet;
    /// Skips what may stand between two items.
    fn skip(parser: &mut Parser<Self>);
    /// An atom that the other language does not have, its first character not yet read; `None`
    /// where a sequence ends.
    fn atom(parser: &mut Parser<Self>) -> Result<Option<Expr>>;
    /// A character of `set`.
    fn char(parser: &mut Parser<Self>, set: CharSet) -> Result<Expr>;
    /// The characters of an escape that the other language does not have, which starts with
    /// `escape`; that is behind a backslash and read.
    fn escape(parser: &mut Parser<Self>, escape: char) -> Result<CharSet>;
}

/// A cursor over the text of a grammar or pattern.
pub(super) struct Parser<'a, S> {
    text: &'a str,
    /// Byte offset of the next character.
    pub(super) at: usize,
    depth: usize,
    pub(super) builder: &'a mut Builder,
    pub(super) syntax: S,
}

impl<'a, S: Syntax> Parser<'a, S> {
    pub(super) fn new(text: &'a str, builder: &'a mut Builder, syntax: S) -> Result<Self> {
        if text.len() > TEXT_BYTES_MAX {
            bail!("{} bytes, at most {TEXT_BYTES_MAX} are allowed", text.len());
        }
        Ok(Parser { text, at: 0, depth: 0, builder, syntax })
    }

    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    pub(super) fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    pub(super) fn next(&mut self) -> Option<char> {
        let char = self.peek()?;
        self.at += char.len_utf8();
        Some(char)
    }

    /// Reads `expected` if it is next.
    pub(super) fn eat(&mut self, expected: &str) -> bool {
        let found = self.rest().starts_with(expected);
        self.at += if found { expected.len() } else { 0 };
        found
    }

    /// Reads the longest run of characters that `is_member` accepts.
    pub(super) fn take_while(&mut self, is_member: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let length = rest.find(|char| !is_member(char)).unwrap_or(rest.len());
        self.at += length;
        &rest[..length]
    }

    /// Line and column of `offset`, both from 1, columns in characters.
    pub(super) fn position(&self, offset: usize) -> String {
        let before = &self.text[..offset];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let column = before[line_start..].chars().count() + 1;
        format!("line {}, column {column}", before.matches('\n').count() + 1)
    }

    pub(super) fn error_at(&self, offset: usize, message: impl std::fmt::Display) -> Error {
        Error::new(format!("{}: {message}", self.position(offset)))
    }

    /// An error here that names what is next.
    pub(super) fn expected(&self, what: &str) -> Error {
        let found = self.peek().map_or("the end".into(), |char| format!("{char:?}"));
        self.error_at(self.at, format!("expected {what}, found {found}"))
    }

    pub(super) fn alternatives(&mut self) -> Result<Expr> {
        let mut all = vec![self.sequence()?];
        while self.eat("|") {
            all.push(self.sequence()?);
        }
        Ok(self.builder.any_of(all))
    }

    pub(super) fn sequence(&mut self) -> Result<Expr> {
        let mut items = Vec::new();
        loop {
            S::skip(self);
            let Some(atom) = self.atom()? else { return Ok(Expr::seq(items)) };
            S::skip(self);
            items.push(match self.repetition()? {
                Some((min, max)) => atom.repeat(min, max),
                None => atom,
            });
        }
    }

    /// The atom that starts here; `None` where a sequence ends.
    fn atom(&mut self) -> Result<Option<Expr>> {
        let start = self.at;
        let set = match self.peek() {
            None | Some('|' | ')') => return Ok(None),
            _ if self.eat("(") => return self.group(start).map(Some),
            _ if self.eat("[") => self.class(start)?,
            _ if self.eat(".") => S::any(),
            _ => return S::atom(self),
        };
        S::char(self, set).map(Some)
    }

    /// A group after its opening, which started at `start`.
    fn group(&mut self, start: usize) -> Result<Expr> {
        if S::IS_REGEX && !self.eat("?:") && self.peek() == Some('?') {
            return Err(self.error_at(start, "only plain groups and (?: are supported"));
        }
        if self.depth == NESTING_MAX {
            return Err(self.error_at(start, format!("more than {NESTING_MAX} nested groups")));
        }
        self.depth += 1;
        let inner = self.alternatives()?;
        self.depth -= 1;
        if self.eat(")") {
            return Ok(inner);
        }
        let opened = self.position(start);
        Err(self.expected(&format!("')' for the group opened at {opened}")))
    }

    /// Least and greatest count of the repetition that follows an atom, if one does.
    fn repetition(&mut self) -> Result<Option<(u32, u32)>> {
        let start = self.at;
        let (min, max) = match self.peek() {
            _ if self.eat("?") => (0, 1),
            _ if self.eat("*") => (0, UNBOUNDED),
            _ if self.eat("+") => (1, UNBOUNDED),
            _ if self.eat("{") => {
                let min = self.count()?;
                let max = match self.eat(",") {
                    true if self.peek() == Some('}') => UNBOUNDED,
                    true => self.count()?,
                    false => min,
                };
                if !self.eat("}") {
                    return Err(self.expected("'}' after the counts of a repetition"));
                }
                (min, max)
            }
            _ => return Ok(None),
        };
        if min > max {
            return Err(self.error_at(start, format!("repetition {{{min},{max}}} is backwards")));
        }
        if S::IS_REGEX {
            self.eat("?");
        }
        Ok(Some((min, max)))
    }

    fn count(&mut self) -> Result<u32> {
        let start = self.at;
        let digits = self.take_while(|char| char.is_ascii_digit());
        if digits.is_empty() {
            return Err(self.expected("a count"));
        }
        let count = digits.parse().ok().filter(|count| *count <= REPEAT_MAX);
        let message = || format!("a repetition of {digits}, at most {REPEAT_MAX} are allowed");
        count.ok_or_else(|| self.error_at(start, message()))
    }

    /// A class after its `[`, which was at `start`.
    fn class(&mut self, start: usize) -> Result<CharSet> {
        let is_negated = self.eat("^");
        let mut sets = Vec::new();
        while !self.eat("]") {
            let from = self.at;
            let low = self.class_atom(start)?;
            // A minus that is last in the class is a character.
            if !self.rest().starts_with('-') || self.rest().starts_with("-]") {
                sets.push(low);
                continue;
            }
            self.next();
            let high = self.class_atom(start)?;
            match (low.single(), high.single()) {
                (Some(low), Some(high)) if low <= high => sets.push(CharSet::range(low, high)),
                _ => {
                    let range = &self.text[from..self.at];
                    return Err(self.error_at(from, format!("the range {range} is backwards")));
                }
            }
        }
        let set = CharSet::union(&sets);
        let set = if is_negated { set.complement() } else { set };
        if set.is_empty() {
            return Err(self.error_at(start, "a class without characters"));
        }
        Ok(set)
    }

    fn class_atom(&mut self, start: usize) -> Result<CharSet> {
        match self.next() {
            None | Some('\n') => Err(self.error_at(start, "unterminated class")),
            Some('\\') => self.escaped(),
            Some(char) => Ok(char.into()),
        }
    }

    /// The characters of an escape after its backslash.
    pub(super) fn escaped(&mut self) -> Result<CharSet> {
        let start = self.at - 1;
        match self.next() {
            None => Err(self.error_at(start, "a backslash at the end")),
            Some('n') => Ok('\n'.into()),
            Some('r') => Ok('\r'.into()),
            Some('t') => Ok('\t'.into()),
            Some('x') => self.code_point(2),
            Some('u') => self.code_point(4),
            Some(escape) => S::escape(self, escape),
        }
    }

    /// The character whose code point is written in the next `digits` hexadecimal digits, of an
    /// escape of two characters that are read. In `\u{H…}` of regular expressions there may be any
    /// number of them.
    pub(super) fn code_point(&mut self, digits: usize) -> Result<CharSet> {
        let start = self.at - 2;
        let is_braced = S::IS_REGEX && digits == 4 && self.eat("{");
        let length = self.rest().bytes().take_while(u8::is_ascii_hexdigit).count();
        let hex = &self.rest()[..if is_braced { length } else { length.min(digits) }];
        self.at += hex.len();
        if !(if is_braced { self.eat("}") } else { hex.len() == digits }) {
            return Err(self.expected(&format!("{digits} hexadecimal digits")));
        }
        match u32::from_str_radix(hex, 16).ok().and_then(char::from_u32) {
            Some(char) => Ok(char.into()),
            None => Err(self.error_at(start, format!("U+{hex} is no character"))),
        }
    }

    pub(super) fn unknown_escape(&self, escape: char) -> Error {
        let start = self.at - escape.len_utf8() - 1;
        self.error_at(start, format!("unsupported escape \\{escape}"))
    }
}
