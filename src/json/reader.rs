//! The pull reader: walks a document value by value without building a tree.
//!
//! It validates exactly what it passes over, so a document read through to [`Reader::finish`] was
//! valid JSON. The one exception is left to callers that pull keys themselves: whether a key occurs
//! twice (they index the keys anyway); [`Reader::value`] does refuse that. UTF-8 is checked once
//! for the whole document, after which strings without escapes are borrowed, not copied.
//! Using the methods out of turn (a key in an array) is a programmer error and asserts.

#![forbid(unsafe_code)]

use super::{Limits, Value};
use crate::error::{Error, Result};
use std::borrow::Cow;

/// The kind of the next value, as its first byte shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `null`
    Null,
    /// `true` or `false`
    Bool,
    /// Integer or float.
    Number,
    /// String.
    String,
    /// `[`
    Array,
    /// `{`
    Object,
}

/// A number, integer and float kept apart by how it is written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number<'a> {
    /// Fits an i64.
    Int(i64),
    /// Does not fit: the digits as written.
    BigInt(&'a str),
    /// Written with fraction or exponent; finite.
    Float(f64),
}

/// An open array or object.
#[derive(Clone, Copy, Debug)]
struct Frame {
    is_object: bool,
    /// No member was read yet, so no comma is due.
    is_empty: bool,
}

/// A cursor over one JSON document.
#[derive(Debug)]
pub struct Reader<'a> {
    text: &'a str,
    bytes: &'a [u8],
    /// Offset of the next unread byte.
    at: usize,
    limits: Limits,
    values: usize,
    open: Vec<Frame>,
    /// The next thing in the text has to be a value.
    value_due: bool,
}

/// Keys up to this many are compared pairwise; above, they are sorted.
const PAIRWISE_KEYS_MAX: usize = 12;

impl<'a> Reader<'a> {
    /// A reader at the start of `bytes`. Refuses a document over the size limit or not in UTF-8.
    pub fn new(bytes: &'a [u8], limits: Limits) -> Result<Reader<'a>> {
        if bytes.len() > limits.max_bytes {
            let (found, allowed) = (bytes.len(), limits.max_bytes);
            crate::bail!("JSON document of {found} bytes, at most {allowed} allowed");
        }
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => {
                let offset = error.valid_up_to();
                let found = bytes.get(offset).copied().unwrap_or(0);
                return Err(position_error(
                    bytes,
                    offset,
                    &format!("expected UTF-8, found the byte 0x{found:02x}"),
                ));
            }
        };
        Ok(Reader { text, bytes, at: 0, limits, values: 0, open: Vec::new(), value_due: true })
    }

    /// Byte offset of the next unread byte.
    pub fn offset(&self) -> usize {
        self.at
    }

    /// An error with `message` and the position of `offset`.
    pub fn error_at(&self, offset: usize, message: &str) -> Error {
        position_error(self.bytes, offset, message)
    }

    /// The kind of the next value, without reading it.
    pub fn peek(&mut self) -> Result<Kind> {
        assert!(self.value_due, "peek out of turn");
        self.skip_space();
        match self.bytes.get(self.at) {
            Some(b'{') => Ok(Kind::Object),
            Some(b'[') => Ok(Kind::Array),
            Some(b'"') => Ok(Kind::String),
            Some(b't' | b'f') => Ok(Kind::Bool),
            Some(b'n') => Ok(Kind::Null),
            Some(b'-' | b'0'..=b'9') => Ok(Kind::Number),
            _ => Err(self.expected("a value")),
        }
    }

    /// Opens an object; its keys follow by [`Reader::next_key`].
    pub fn begin_object(&mut self) -> Result<()> {
        self.begin(Kind::Object, "an object")
    }

    /// Opens an array; its elements follow by [`Reader::next_element`].
    pub fn begin_array(&mut self) -> Result<()> {
        self.begin(Kind::Array, "an array")
    }

    /// The next key of the innermost object, after which its value is due; `None` closes it.
    pub fn next_key(&mut self) -> Result<Option<Cow<'a, str>>> {
        if !self.next_member(true, b'}', "',' or '}'")? {
            return Ok(None);
        }
        if self.bytes.get(self.at) != Some(&b'"') {
            return Err(self.expected("a key in double quotes"));
        }
        let key = self.string_token()?;
        self.skip_space();
        if self.bytes.get(self.at) != Some(&b':') {
            return Err(self.expected("':'"));
        }
        self.at += 1;
        self.value_due = true;
        Ok(Some(key))
    }

    /// Whether the innermost array has another element, which is then due; false closes it.
    pub fn next_element(&mut self) -> Result<bool> {
        let more = self.next_member(false, b']', "',' or ']'")?;
        self.value_due = more;
        Ok(more)
    }

    /// Reads a string; borrowed unless it has escapes.
    pub fn string(&mut self) -> Result<Cow<'a, str>> {
        self.begin_scalar(Kind::String, "a string")?;
        self.string_token()
    }

    /// Reads a number.
    pub fn number(&mut self) -> Result<Number<'a>> {
        self.begin_scalar(Kind::Number, "a number")?;
        self.number_token()
    }

    /// Reads an integer from 0 to 2^64 - 1; a float is refused.
    pub fn u64(&mut self) -> Result<u64> {
        self.begin_scalar(Kind::Number, "a non-negative integer")?;
        let start = self.at;
        let value = match self.number_token()? {
            Number::Int(int) => u64::try_from(int).ok(),
            Number::BigInt(digits) => digits.parse().ok(),
            Number::Float(_) => None,
        };
        value.ok_or_else(|| {
            let found = abridged(self.text.get(start..self.at).unwrap_or(""));
            let expected = "expected an integer from 0 to 18446744073709551615";
            self.error_at(start, &format!("{expected}, found {found}"))
        })
    }

    /// Reads `true` or `false`.
    pub fn bool(&mut self) -> Result<bool> {
        self.begin_scalar(Kind::Bool, "a boolean")?;
        if self.bytes.get(self.at) == Some(&b't') {
            self.word("true").map(|()| true)
        } else {
            self.word("false").map(|()| false)
        }
    }

    /// Reads `null`.
    pub fn null(&mut self) -> Result<()> {
        self.begin_scalar(Kind::Null, "null")?;
        self.word("null")
    }

    /// Reads a whole value into a tree; refuses a key that occurs twice in one object.
    pub fn value(&mut self) -> Result<Value> {
        Ok(match self.peek()? {
            Kind::Null => {
                self.null()?;
                Value::Null
            }
            Kind::Bool => Value::Bool(self.bool()?),
            Kind::String => Value::String(self.string()?.into_owned()),
            Kind::Number => match self.number()? {
                Number::Int(int) => Value::Int(int),
                Number::BigInt(digits) => Value::BigInt(digits.to_string()),
                Number::Float(float) => Value::Float(float),
            },
            Kind::Array => {
                self.begin_array()?;
                let mut elements = Vec::new();
                while self.next_element()? {
                    elements.push(self.value()?);
                }
                Value::Array(elements)
            }
            Kind::Object => Value::Object(self.object_tree()?),
        })
    }

    /// Reads past a whole value, validating its syntax only.
    pub fn skip(&mut self) -> Result<()> {
        let outside = self.open.len();
        loop {
            match self.peek()? {
                Kind::Null => self.null()?,
                Kind::Bool => drop(self.bool()?),
                Kind::Number => drop(self.number()?),
                Kind::String => drop(self.string()?),
                Kind::Array => self.begin_array()?,
                Kind::Object => self.begin_object()?,
            }
            loop {
                let frame = match self.open.last() {
                    Some(frame) if self.open.len() > outside => *frame,
                    _ => return Ok(()),
                };
                let more =
                    if frame.is_object { self.next_key()?.is_some() } else { self.next_element()? };
                if more {
                    break;
                }
            }
        }
    }

    /// Ends the document: only white space may be left.
    pub fn finish(mut self) -> Result<()> {
        assert!(self.open.is_empty() && !self.value_due, "finish inside the document");
        self.skip_space();
        if self.at < self.bytes.len() {
            return Err(self.expected("the end of the document"));
        }
        Ok(())
    }

    fn object_tree(&mut self) -> Result<Vec<(String, Value)>> {
        self.begin_object()?;
        let mut members: Vec<(String, Value)> = Vec::new();
        let mut ends = Vec::new();
        while let Some(key) = self.next_key()? {
            ends.push(self.at);
            members.push((key.into_owned(), self.value()?));
        }
        if let Some(again) = repeated_key(&members) {
            let key = abridged(&members[again].0);
            return Err(self.error_at(ends[again] - 1, &format!("the key {key} occurs twice")));
        }
        Ok(members)
    }

    fn begin(&mut self, kind: Kind, expected: &str) -> Result<()> {
        self.begin_scalar(kind, expected)?;
        let depth_max = self.limits.max_depth.min(Limits::DEPTH_CEILING);
        if self.open.len() >= depth_max {
            let message = format!("nested deeper than the allowed {depth_max} levels");
            return Err(self.error_at(self.at, &message));
        }
        self.at += 1;
        self.open.push(Frame { is_object: kind == Kind::Object, is_empty: true });
        Ok(())
    }

    /// Checks that the value due is of `kind`, counts it and leaves the cursor at its first byte.
    fn begin_scalar(&mut self, kind: Kind, expected: &str) -> Result<()> {
        assert!(self.value_due, "value read out of turn");
        match self.peek() {
            Ok(found) if found == kind => {}
            _ => return Err(self.expected(expected)),
        }
        self.values += 1;
        if self.values > self.limits.max_values {
            let message = format!("more than the allowed {} values", self.limits.max_values);
            return Err(self.error_at(self.at, &message));
        }
        self.value_due = false;
        Ok(())
    }

    /// Moves to the next member of the innermost container, or closes it and returns false.
    fn next_member(&mut self, is_object: bool, close: u8, expected: &str) -> Result<bool> {
        assert!(!self.value_due, "member asked for before the previous value was read");
        let frame = self.open.last_mut().expect("member asked for outside a container");
        assert!(frame.is_object == is_object, "member of the wrong container asked for");
        let was_empty = std::mem::replace(&mut frame.is_empty, false);
        self.skip_space();
        match self.bytes.get(self.at) {
            Some(&byte) if byte == close => {
                self.at += 1;
                self.open.pop();
                return Ok(false);
            }
            Some(b',') if !was_empty => {
                self.at += 1;
                self.skip_space();
            }
            _ if !was_empty => return Err(self.expected(expected)),
            _ => {}
        }
        Ok(true)
    }

    fn skip_space(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.bytes.get(self.at) {
            self.at += 1;
        }
    }

    fn word(&mut self, word: &str) -> Result<()> {
        if !self.bytes[self.at..].starts_with(word.as_bytes()) {
            return Err(self.expected(word));
        }
        self.at += word.len();
        Ok(())
    }

    /// Reads a string whose opening quote is at the cursor.
    fn string_token(&mut self) -> Result<Cow<'a, str>> {
        self.at += 1;
        let start = self.at;
        self.pass_plain();
        if self.bytes.get(self.at) == Some(&b'"') {
            let plain = &self.text[start..self.at];
            self.at += 1;
            return Ok(Cow::Borrowed(plain));
        }
        let mut string = String::from(&self.text[start..self.at]);
        loop {
            match self.bytes.get(self.at) {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(Cow::Owned(string));
                }
                Some(b'\\') => string.push(self.escape()?),
                Some(_) => {
                    return Err(self.expected("a string without unescaped control characters"));
                }
                None => return Err(self.expected("the '\"' that ends the string")),
            }
            let start = self.at;
            self.pass_plain();
            string.push_str(&self.text[start..self.at]);
        }
    }

    /// Passes the bytes that stand for themselves; stops at a quote, backslash, control or the end.
    /// All of those are ASCII, so the cursor stays on character boundaries.
    fn pass_plain(&mut self) {
        let rest = &self.bytes[self.at..];
        let special = |&byte: &u8| byte < 0x20 || byte == b'"' || byte == b'\\';
        self.at += rest.iter().position(special).unwrap_or(rest.len());
    }

    /// Reads one escape (or a surrogate pair of two) whose backslash is at the cursor.
    fn escape(&mut self) -> Result<char> {
        let start = self.at;
        self.at += 1;
        let plain = match self.bytes.get(self.at) {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => return self.unicode_escape(start),
            _ => return Err(self.expected("one of \"\\/bfnrtu after the backslash")),
        };
        self.at += 1;
        Ok(plain)
    }

    fn unicode_escape(&mut self, start: usize) -> Result<char> {
        self.at += 1;
        let mut code = self.four_hex()?;
        let is_pair = self.bytes[self.at..].starts_with(b"\\u");
        if (0xD800..0xDC00).contains(&code) && is_pair {
            self.at += 2;
            let low = self.four_hex()?;
            if (0xDC00..0xE000).contains(&low) {
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            }
        }
        char::from_u32(code).ok_or_else(|| {
            self.error_at(
                start,
                &format!("expected a character, found the surrogate \\u{code:04x}"),
            )
        })
    }

    fn four_hex(&mut self) -> Result<u32> {
        let mut code = 0;
        for _ in 0..4 {
            let digit = self.bytes.get(self.at).and_then(|&byte| char::from(byte).to_digit(16));
            code = code * 16 + digit.ok_or_else(|| self.expected("four hex digits after \\u"))?;
            self.at += 1;
        }
        Ok(code)
    }

    /// Reads a number whose first byte (`-` or a digit) is at the cursor.
    fn number_token(&mut self) -> Result<Number<'a>> {
        let start = self.at;
        if self.bytes.get(self.at) == Some(&b'-') {
            self.at += 1;
        }
        let leading_zero = self.bytes.get(self.at) == Some(&b'0');
        let integer_digits = self.digits()?;
        if leading_zero && integer_digits > 1 {
            return Err(self.error_at(start, "expected a number, found a leading zero"));
        }
        let mut is_float = false;
        if self.bytes.get(self.at) == Some(&b'.') {
            is_float = true;
            self.at += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.bytes.get(self.at) {
            is_float = true;
            self.at += 1;
            if let Some(b'+' | b'-') = self.bytes.get(self.at) {
                self.at += 1;
            }
            self.digits()?;
        }
        let text = &self.text[start..self.at];
        if !is_float {
            return Ok(text.parse().map_or(Number::BigInt(text), Number::Int));
        }
        match text.parse::<f64>() {
            Ok(float) if float.is_finite() => Ok(Number::Float(float)),
            _ => {
                let message = format!("expected a number below 1.8e308, found {}", abridged(text));
                Err(self.error_at(start, &message))
            }
        }
    }

    /// Passes at least one digit and returns how many.
    fn digits(&mut self) -> Result<usize> {
        let start = self.at;
        while let Some(b'0'..=b'9') = self.bytes.get(self.at) {
            self.at += 1;
        }
        if self.at == start {
            return Err(self.expected("a digit"));
        }
        Ok(self.at - start)
    }

    /// The error "expected …, found …" at the cursor.
    fn expected(&self, expected: &str) -> Error {
        let found = match self.text.get(self.at..).and_then(|rest| rest.chars().next()) {
            None => "the end of the text".to_string(),
            Some('"') => "a string".to_string(),
            Some(char) if char.is_control() || char == '\u{feff}' => {
                format!("the character U+{:04X}", u32::from(char))
            }
            Some(char) => format!("'{char}'"),
        };
        self.error_at(self.at, &format!("expected {expected}, found {found}"))
    }
}

/// The index of a member whose key occurred before, if any: the first such in the text for small
/// objects, some such for large ones. Sorting keeps large hostile objects at n log n.
fn repeated_key(members: &[(String, Value)]) -> Option<usize> {
    if members.len() <= PAIRWISE_KEYS_MAX {
        let is_repeat = |&i: &usize| members[..i].iter().any(|(key, _)| *key == members[i].0);
        return (1..members.len()).find(is_repeat);
    }
    let mut order: Vec<usize> = (0..members.len()).collect();
    order.sort_by(|&a, &b| members[a].0.cmp(&members[b].0).then(a.cmp(&b)));
    order.windows(2).find(|pair| members[pair[0]].0 == members[pair[1]].0).map(|pair| pair[1])
}

/// `text` quoted for a message, cut when long.
fn abridged(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((cut, _)) => format!("{:?}...", &text[..cut]),
        None => format!("{text:?}"),
    }
}

/// Appends byte offset, line and column (both from 1, the column in characters) to `message`.
fn position_error(bytes: &[u8], offset: usize, message: &str) -> Error {
    let before = &bytes[..offset.min(bytes.len())];
    let line = 1 + before.iter().filter(|&&byte| byte == b'\n').count();
    let line_start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    // Characters are counted as bytes that do not continue one.
    let column = 1 + before[line_start..].iter().filter(|&&byte| byte & 0xC0 != 0x80).count();
    Error::new(format!("{message} at byte {offset} (line {line}, column {column})"))
}
