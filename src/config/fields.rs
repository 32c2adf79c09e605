//! Typed access to the fields of a config object; every error names the field, what was expected
//! and what was found. `null` counts as absent, as in the files that Python writes.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::{Error, Result};
use crate::json::{Value, to_compact};
use std::ops::RangeInclusive;

/// Characters of a bad value that an error repeats.
const SHOWN_CHARS_MAX: usize = 60;

/// The fields of one JSON object.
#[derive(Clone, Copy)]
pub struct Fields<'a> {
    object: &'a Value,
    /// Put before a field's name in errors: empty, or the outer field and a dot.
    path: &'static str,
}

impl<'a> Fields<'a> {
    /// The fields of `object`, which has to be one.
    pub fn new(object: &'a Value, path: &'static str) -> Result<Fields<'a>> {
        if object.as_object().is_none() {
            let name = if path.is_empty() { "config" } else { path.trim_end_matches('.') };
            bail!("{name}: expected an object, found {}", shown(object));
        }
        Ok(Fields { object, path })
    }

    /// All fields, in order.
    pub fn all(&self) -> &'a [(String, Value)] {
        self.object.as_object().expect("checked by new")
    }

    /// The value of a field that is present and not null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// The error that `name` is not what it should be.
    pub fn unexpected(&self, name: &str, expected: &str, found: &Value) -> Error {
        Error::new(format!("{}{name}: expected {expected}, found {}", self.path, shown(found)))
    }

    /// An optional integer within `range`.
    pub fn integer(&self, name: &str, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let found = value.as_u64().and_then(|int| usize::try_from(int).ok());
        match found.filter(|int| range.contains(int)) {
            Some(int) => Ok(Some(int)),
            None => {
                let expected = format!("an integer from {} to {}", range.start(), range.end());
                Err(self.unexpected(name, &expected, value))
            }
        }
    }

    /// A required integer within `range`.
    pub fn required(&self, name: &str, range: RangeInclusive<usize>) -> Result<usize> {
        let (low, high) = (*range.start(), *range.end());
        self.integer(name, range)?.ok_or_else(|| {
            let path = self.path;
            Error::new(format!("{path}{name} is missing; expected an integer from {low} to {high}"))
        })
    }

    /// An optional number within `range`; integers count.
    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64().filter(|float| range.contains(float)) {
            Some(float) => Ok(Some(float)),
            None => {
                let expected = format!("a number from {:e} to {:e}", range.start(), range.end());
                Err(self.unexpected(name, &expected, value))
            }
        }
    }

    /// An optional boolean; numbers do not count.
    pub fn boolean(&self, name: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let found = value.as_bool().ok_or_else(|| self.unexpected(name, "true or false", value));
        found.map(Some)
    }

    /// Refuses a field that is present with any other value than `only`.
    pub fn fixed(&self, name: &str, only: &Value) -> Result<()> {
        match self.get(name) {
            Some(value) if value != only => {
                let expected = format!("{} (no other is implemented)", to_compact(only));
                Err(self.unexpected(name, &expected, value))
            }
            _ => Ok(()),
        }
    }

    /// An optional list of exactly `count` words, each translated by `parse`; `words` says which
    /// ones it knows.
    pub fn words<T>(
        &self,
        name: &str,
        count: usize,
        words: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let Some(elements) = value.as_array() else {
            return Err(self.unexpected(name, &format!("a list of {words}"), value));
        };
        let (path, found) = (self.path, elements.len());
        if found != count {
            bail!("{path}{name}: expected {count} entries, one per layer, found {found}");
        }
        let mut parsed = Vec::with_capacity(count);
        for (index, element) in elements.iter().enumerate() {
            match element.as_str().and_then(&parse) {
                Some(word) => parsed.push(word),
                None => {
                    let name = format!("{name}[{index}]");
                    return Err(self.unexpected(&name, words, element));
                }
            }
        }
        Ok(Some(parsed))
    }
}

/// A value for an error text: scalars as written, cut when long; containers by kind.
fn shown(value: &Value) -> String {
    if value.as_array().is_some() || value.as_object().is_some() {
        return value.kind().to_string();
    }
    let text = to_compact(value);
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}
