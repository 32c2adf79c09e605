//! A place in a document that somebody else wrote: what is there, and its path for the error when
//! that is not what it should be. `null` counts as absent, which every kind but a required one may
//! be.

#![forbid(unsafe_code)]

use super::{Value, to_compact};
use crate::error::{Error, Result};
use std::ops::RangeInclusive;

/// A value of a document, or its absence.
#[derive(Clone, Debug)]
pub struct Field<'a> {
    value: Option<&'a Value>,
    /// As in `messages[2].content`; empty for the document.
    path: String,
}

impl<'a> Field<'a> {
    /// The whole of a document.
    pub fn root(document: &'a Value) -> Field<'a> {
        Field { value: Some(document), path: String::new() }
    }

    /// The member `key`; absent, too, in what is no object.
    pub fn get(&self, key: &str) -> Field<'a> {
        let value = self.value.and_then(|value| value.get(key)).filter(|value| !value.is_null());
        let dot = if self.path.is_empty() { "" } else { "." };
        Field { value, path: format!("{}{dot}{key}", self.path) }
    }

    /// This one, or if it is absent the other.
    pub fn or(self, other: Field<'a>) -> Field<'a> {
        if self.value.is_some() { self } else { other }
    }

    /// What is there.
    pub fn value(&self) -> Option<&'a Value> {
        self.value
    }

    /// Where it is.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// An error about this place.
    pub fn error(&self, message: impl std::fmt::Display) -> Error {
        let error = Error::new(message.to_string());
        if self.path.is_empty() { error } else { error.context(&self.path) }
    }

    /// The error that something else is expected, of another kind than what is there.
    pub fn unexpected(&self, expected: &str) -> Error {
        match self.value {
            Some(value) => self.error(format!("expected {expected}, found {}", value.kind())),
            None => self.error(format!("expected {expected}, but it is missing")),
        }
    }

    /// The error that something else is expected than this very value.
    pub fn refused(&self, expected: &str) -> Error {
        let found = to_compact(self.value.unwrap_or(&Value::Null));
        self.error(format!("expected {expected}, found {found}"))
    }

    /// What `read` makes of the value if there is one; `None` from it is an error.
    fn read<T>(
        &self,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let found = self.value.map(|value| read(value).ok_or_else(|| self.unexpected(expected)));
        found.transpose()
    }

    /// `true` or `false`.
    pub fn boolean(&self) -> Result<Option<bool>> {
        self.read("true or false", Value::as_bool)
    }

    /// Any number.
    pub fn number(&self) -> Result<Option<f64>> {
        self.read("a number", Value::as_f64)
    }

    /// A string.
    pub fn string(&self) -> Result<Option<&'a str>> {
        self.read("a string", Value::as_str)
    }

    /// A string that must be there.
    pub fn required_string(&self) -> Result<&'a str> {
        self.string()?.ok_or_else(|| self.unexpected("a string"))
    }

    /// The members of an object.
    pub fn members(&self) -> Result<Option<&'a [(String, Value)]>> {
        self.read("an object", Value::as_object)
    }

    /// The elements of an array; none if it is absent.
    pub fn items(&self) -> Result<Vec<Field<'a>>> {
        let items = self.read("an array", Value::as_array)?.unwrap_or_default();
        let item = |(i, value)| Field { value: Some(value), path: format!("{}[{i}]", self.path) };
        Ok(items.iter().enumerate().map(item).collect())
    }

    /// An array of token ids; none if it is absent.
    pub fn ids(&self) -> Result<Option<Vec<u32>>> {
        let id = |item: &Field<'_>| {
            let id = item.value.and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| item.unexpected("a token id"))
        };
        self.value.map(|_| self.items()?.iter().map(id).collect()).transpose()
    }

    /// A whole number within `range`, which some clients write as 5.0.
    pub fn integer(&self, range: RangeInclusive<u64>) -> Result<Option<u64>> {
        let Some(value) = self.value else { return Ok(None) };
        let whole = |number: f64| (number.fract() == 0.0 && number >= 0.0).then_some(number as u64);
        let number = value.as_u64().or_else(|| value.as_f64().and_then(whole));
        if let Some(found) = number.filter(|found| range.contains(found)) {
            return Ok(Some(found));
        }
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        let is_number = value.as_f64().is_some();
        Err(if is_number { self.refused(&expected) } else { self.unexpected(&expected) })
    }
}
