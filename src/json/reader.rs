//! The pull reader: walks a document value by value without building a tree.
//!
//! It validates exactly what it passes over, so a document read through to [`Reader::finish`] was
//! valid JSON. Callers of [`Reader::object`] see to keys that occur twice themselves (they index
//! the keys anyway); [`Reader::fields`] and [`Reader::value`] refuse them. UTF-8 is checked once
//! for the whole document, after which strings without escapes are borrowed, not copied.

#![forbid(unsafe_code)]

use super::{Limits, Value};
use crate::error::{Error, Result};
use std::borrow::Cow;
use std::collections::BTreeSet;

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

/// A cursor over one JSON document.
#[derive(Debug)]
pub struct Reader<'a> {
    text: &'a str,
    /// Offset of the next unread byte.
    at: usize,
    limits: Limits,
    values: usize,
    /// Arrays and objects that are open.
    depth: usize,
}

impl<'a> Reader<'a> {
    /// A reader at the start of `bytes`. Refuses a document over the size limit or not in UTF-8.
    pub fn new(bytes: &'a [u8], limits: Limits) -> Result<Reader<'a>> {
        if bytes.len() > limits.max_bytes {
            let (found, allowed) = (bytes.len(), limits.max_bytes);
            crate::bail!("JSON document of {found} bytes, at most {allowed} allowed");
        }
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let offset = error.valid_up_to();
            let message = format!("expected UTF-8, found the byte 0x{:02x}", bytes[offset]);
            position_error(bytes, offset, &message)
        })?;
        Ok(Reader { text, at: 0, limits, values: 0, depth: 0 })
    }

    /// Byte offset of the next unread byte.
    pub fn offset(&self) -> usize {
        self.at
    }

    /// An error with `message` and the position of `offset`.
    pub fn error_at(&self, offset: usize, message: &str) -> Error {
        position_error(self.text.as_bytes(), offset, message)
    }

    /// The kind of the next value, without reading it.
    pub fn peek(&mut self) -> Result<Kind> {
        self.skip_space();
        match self.byte() {
            Some(b'{') => Ok(Kind::Object),
            Some(b'[') => Ok(Kind::Array),
            Some(b'"') => Ok(Kind::String),
            Some(b't' | b'f') => Ok(Kind::Bool),
            Some(b'n') => Ok(Kind::Null),
            Some(b'-' | b'0'..=b'9') => Ok(Kind::Number),
            _ => Err(self.expected("a value")),
        }
    }

    /// Reads an object: `member` is called behind each key, and has to read the key's value.
    pub fn object(
        &mut self,
        mut member: impl FnMut(&mut Self, Cow<'a, str>) -> Result<()>,
    ) -> Result<()> {
        self.begin(Kind::Object, "an object")?;
        self.members(b'}', "',' or '}'", |reader| {
            if reader.byte() != Some(b'"') {
                return Err(reader.expected("a key in double quotes"));
            }
            let key = reader.string_token()?;
            reader.skip_space();
            if !reader.eat(b':') {
                return Err(reader.expected("':'"));
            }
            member(reader, key)
        })
    }

    /// As [`Reader::object`], for an object whose keys nobody indexes. Refuses a key that occurs
    /// twice, and the lack of one that is `required`.
    pub fn fields(
        &mut self,
        required: &[&str],
        mut member: impl FnMut(&mut Self, &str) -> Result<()>,
    ) -> Result<()> {
        let start = self.at;
        let mut seen: BTreeSet<Cow<'a, str>> = BTreeSet::new();
        self.object(|reader, key| {
            if seen.contains(&key) {
                let message = format!("the key {} occurs twice", abridged(&key));
                return Err(reader.error_at(reader.at - 1, &message));
            }
            member(reader, &key)?;
            seen.insert(key);
            Ok(())
        })?;
        match required.iter().find(|key| !seen.contains(**key)) {
            Some(key) => Err(self.error_at(start, &format!("the key \"{key}\" is missing"))),
            None => Ok(()),
        }
    }

    /// Reads an array: `element` is called for each element, and has to read it.
    pub fn array(&mut self, element: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        self.begin(Kind::Array, "an array")?;
        self.members(b']', "',' or ']'", element)
    }

    /// Reads a string; borrowed unless it has escapes.
    pub fn string(&mut self) -> Result<Cow<'a, str>> {
        self.begin(Kind::String, "a string")?;
        self.string_token()
    }

    /// Reads a number: a [`Value::Int`], [`Value::BigInt`] or [`Value::Float`].
    pub fn number(&mut self) -> Result<Value> {
        self.begin(Kind::Number, "a number")?;
        self.number_token()
    }

    /// Reads an integer from 0 to 2^64 - 1; a float is refused.
    pub fn u64(&mut self) -> Result<u64> {
        self.begin(Kind::Number, "a non-negative integer")?;
        let start = self.at;
        self.number_token()?.as_u64().ok_or_else(|| {
            let found = abridged(&self.text[start..self.at]);
            let expected = "expected an integer from 0 to 18446744073709551615";
            self.error_at(start, &format!("{expected}, found {found}"))
        })
    }

    /// Reads `true` or `false`.
    pub fn bool(&mut self) -> Result<bool> {
        self.begin(Kind::Bool, "a boolean")?;
        let is_true = self.byte() == Some(b't');
        self.word(if is_true { "true" } else { "false" })?;
        Ok(is_true)
    }

    /// Reads `null`.
    pub fn null(&mut self) -> Result<()> {
        self.begin(Kind::Null, "null")?;
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
            Kind::Number => self.number()?,
            Kind::Array => {
                let mut elements = Vec::new();
                self.array(|reader| {
                    elements.push(reader.value()?);
                    Ok(())
                })?;
                Value::Array(elements)
            }
            Kind::Object => {
                let mut members = Vec::new();
                self.fields(&[], |reader, key| {
                    members.push((key.to_string(), reader.value()?));
                    Ok(())
                })?;
                Value::Object(members)
            }
        })
    }

    /// Reads past a whole value, validating its syntax only.
    pub fn skip(&mut self) -> Result<()> {
        match self.peek()? {
            Kind::Null => self.null(),
            Kind::Bool => self.bool().map(drop),
            Kind::Number => self.number().map(drop),
            Kind::String => self.string().map(drop),
            Kind::Array => self.array(Reader::skip),
            Kind::Object => self.object(|reader, _| reader.skip()),
        }
    }

    /// Ends the document: only white space may be left.
    pub fn finish(mut self) -> Result<()> {
        self.skip_space();
        if self.byte().is_some() {
            return Err(self.expected("the end of the document"));
        }
        Ok(())
    }

    /// Checks that the next value is of `kind`, counts it and leaves the cursor at its first byte.
    fn begin(&mut self, kind: Kind, expected: &str) -> Result<()> {
        match self.peek() {
            Ok(found) if found == kind => {}
            _ => return Err(self.expected(expected)),
        }
        self.values += 1;
        if self.values > self.limits.max_values {
            let message = format!("more than the allowed {} values", self.limits.max_values);
            return Err(self.error_at(self.at, &message));
        }
        Ok(())
    }

    /// Reads an array or object, whose bracket is at the cursor: `member` reads what is between two
    /// commas.
    fn members(
        &mut self,
        close: u8,
        expected: &str,
        mut member: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let depth_max = self.limits.max_depth.min(Limits::DEPTH_CEILING);
        if self.depth == depth_max {
            let message = format!("nested deeper than the allowed {depth_max} levels");
            return Err(self.error_at(self.at, &message));
        }
        self.depth += 1;
        self.at += 1;
        self.skip_space();
        let mut is_open = !self.eat(close);
        while is_open {
            member(self)?;
            self.skip_space();
            is_open = !self.eat(close);
            if is_open {
                if !self.eat(b',') {
                    return Err(self.expected(expected));
                }
                self.skip_space();
            }
        }
        self.depth -= 1;
        Ok(())
    }

    fn byte(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    /// Passes `byte` if it is next.
    fn eat(&mut self, byte: u8) -> bool {
        let found = self.byte() == Some(byte);
        self.at += usize::from(found);
        found
    }

    /// Passes all bytes up to the first that `is_passed` does not take; returns how many.
    fn pass(&mut self, is_passed: impl Fn(u8) -> bool) -> usize {
        let rest = &self.text.as_bytes()[self.at..];
        let count = rest.iter().position(|byte| !is_passed(*byte)).unwrap_or(rest.len());
        self.at += count;
        count
    }

    fn skip_space(&mut self) {
        self.pass(|byte| matches!(byte, b' ' | b'\n' | b'\r' | b'\t'));
    }

    fn word(&mut self, word: &str) -> Result<()> {
        if !self.text[self.at..].starts_with(word) {
            return Err(self.expected(word));
        }
        self.at += word.len();
        Ok(())
    }

    /// Reads a string whose opening quote is at the cursor.
    fn string_token(&mut self) -> Result<Cow<'a, str>> {
        self.at += 1;
        let mut string = Cow::Borrowed("");
        loop {
            let start = self.at;
            // All bytes that end a run are ASCII, so the cursor stays on character boundaries.
            self.pass(|byte| byte >= 0x20 && byte != b'"' && byte != b'\\');
            // Borrowed if it is all there is.
            string += &self.text[start..self.at];
            match self.byte() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(string);
                }
                Some(b'\\') => string.to_mut().push(self.escape()?),
                Some(_) => {
                    return Err(self.expected("a string without unescaped control characters"));
                }
                None => return Err(self.expected("the '\"' that ends the string")),
            }
        }
    }

    /// Reads one escape (or a surrogate pair of two) whose backslash is at the cursor.
    fn escape(&mut self) -> Result<char> {
        let start = self.at;
        self.at += 1;
        let plain = match self.byte() {
            Some(plain @ (b'"' | b'\\' | b'/')) => char::from(plain),
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
        if (0xD800..0xDC00).contains(&code) && self.text[self.at..].starts_with("\\u") {
            self.at += 2;
            let low = self.four_hex()?;
            if (0xDC00..0xE000).contains(&low) {
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            }
        }
        let message = || format!("expected a character, found the surrogate \\u{code:04x}");
        char::from_u32(code).ok_or_else(|| self.error_at(start, &message()))
    }

    fn four_hex(&mut self) -> Result<u32> {
        let mut code = 0;
        for _ in 0..4 {
            let digit = self.byte().and_then(|byte| char::from(byte).to_digit(16));
            code = code * 16 + digit.ok_or_else(|| self.expected("four hex digits after \\u"))?;
            self.at += 1;
        }
        Ok(code)
    }

    /// Reads a number whose first byte (`-` or a digit) is at the cursor.
    fn number_token(&mut self) -> Result<Value> {
        let start = self.at;
        self.eat(b'-');
        let has_leading_zero = self.byte() == Some(b'0');
        if self.digits()? > 1 && has_leading_zero {
            return Err(self.error_at(start, "expected a number, found a leading zero"));
        }
        let integer_end = self.at;
        if self.eat(b'.') {
            self.digits()?;
        }
        if self.eat(b'e') || self.eat(b'E') {
            let _ = self.eat(b'+') || self.eat(b'-');
            self.digits()?;
        }
        let text = &self.text[start..self.at];
        if self.at == integer_end {
            return Ok(text.parse().map_or_else(|_| Value::BigInt(text.to_string()), Value::Int));
        }
        match text.parse::<f64>() {
            Ok(float) if float.is_finite() => Ok(Value::Float(float)),
            _ => {
                let message = format!("expected a number below 1.8e308, found {}", abridged(text));
                Err(self.error_at(start, &message))
            }
        }
    }

    /// Passes at least one digit and returns how many.
    fn digits(&mut self) -> Result<usize> {
        match self.pass(|byte| byte.is_ascii_digit()) {
            0 => Err(self.expected("a digit")),
            count => Ok(count),
        }
    }

    /// The error "expected …, found …" at the cursor.
    fn expected(&self, expected: &str) -> Error {
        let found = match self.text[self.at..].chars().next() {
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
