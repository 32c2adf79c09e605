//! JSON: a strict pull reader, an ordered value tree built on it, places in a tree that errors can
//! name, and two writers.
//!
//! Owns every byte of JSON the crate reads (configs, tokenizers, safetensors headers, requests)
//! and writes. It is strict RFC 8259 and refuses: invalid UTF-8 or a byte order mark, control
//! characters in strings, lone surrogates, numbers beyond the f64 range, a key twice in one
//! object, bytes after the value, and anything beyond the caller's [`Limits`]. Integers and floats
//! stay distinct, and objects keep their order, because configs are checked and prompts are
//! rendered from them. Memory is a constant times the input; errors carry byte offset, line and
//! column.

#![forbid(unsafe_code)]

mod field;
mod reader;
mod writer;

#[cfg(test)]
mod tests;

use crate::error::Result;
pub use field::Field;
pub use reader::{Kind, Reader};
pub use writer::{float_repr, to_compact, to_python, write_str_compact};

/// A JSON value. Objects keep the order of the text and hold no key twice.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number written without fraction or exponent that fits; `-0` is 0, as in Python.
    Int(i64),
    /// An integer outside the i64 range: its digits as written, with the sign.
    BigInt(String),
    /// A number written with fraction or exponent; always finite when read.
    Float(f64),
    /// A string, escapes resolved.
    String(String),
    /// An array.
    Array(Vec<Value>),
    /// An object in the order of the text.
    Object(Vec<(String, Value)>),
}

/// What a document may cost at most; exceeding one is an error that names it.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Length of the document.
    pub max_bytes: usize,
    /// Nesting of arrays and objects; never more than [`Limits::DEPTH_CEILING`] is allowed,
    /// because the tree is built and dropped by recursion.
    pub max_depth: usize,
    /// Number of values of any kind, containers included.
    pub max_values: usize,
}

impl Limits {
    /// The nesting no caller can exceed: 512 frames fit a 2 MB thread stack many times over.
    pub const DEPTH_CEILING: usize = 512;
}

impl Default for Limits {
    /// 64 MiB, 128 levels, 4 Mi values (a tree of at most about 600 MB).
    fn default() -> Limits {
        Limits { max_bytes: 64 << 20, max_depth: 128, max_values: 4 << 20 }
    }
}

/// Reads one document into a tree. Nothing but white space may follow the value.
pub fn parse(bytes: &[u8], limits: Limits) -> Result<Value> {
    let mut reader = Reader::new(bytes, limits)?;
    let value = reader.value()?;
    reader.finish()?;
    Ok(value)
}

/// An object from its members, in order.
pub fn object(members: Vec<(&str, Value)>) -> Value {
    Value::Object(members.into_iter().map(|(key, value)| (key.to_string(), value)).collect())
}

/// An object as it is written: `object! { "id": 7, "names": names }`. A value is anything that a
/// [`Value`](crate::json::Value) can be made from.
#[macro_export]
macro_rules! object {
    ($($key:literal: $value:expr),* $(,)?) => {
        $crate::json::object(vec![$(($key, $crate::json::Value::from($value))),*])
    };
}

/// What becomes a value of one kind as it is; counts never reach 2^63.
macro_rules! values_from {
    ($($type:ty: $from:expr;)*) => {$(
        impl From<$type> for Value {
            fn from(value: $type) -> Value {
                $from(value)
            }
        }
    )*};
}

values_from! {
    bool: Value::Bool;
    f64: Value::Float;
    i32: |int| Value::Int(int as i64);
    u8: |int| Value::Int(int as i64);
    u32: |int| Value::Int(int as i64);
    u64: |int| Value::Int(int as i64);
    usize: |int| Value::Int(int as i64);
    String: Value::String;
    &str: |text: &str| Value::String(text.into());
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Value {
        value.map_or(Value::Null, T::into)
    }
}

impl<T: Into<Value>> From<Vec<T>> for Value {
    fn from(items: Vec<T>) -> Value {
        Value::Array(items.into_iter().map(T::into).collect())
    }
}

impl<T: Copy + Into<Value>> From<&[T]> for Value {
    fn from(items: &[T]) -> Value {
        Value::Array(items.iter().map(|item| (*item).into()).collect())
    }
}

impl Value {
    /// The member `key` of an object; `None` for a missing key or another kind.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.as_object()?.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The text of a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// An integer that fits; a float is never one, not even `3.0`.
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Value::Int(int) => Some(*int),
            _ => None,
        }
    }

    /// A non-negative integer that fits, up to 2^64 - 1.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Value::Int(int) => u64::try_from(*int).ok(),
            Value::BigInt(digits) => digits.parse().ok(),
            _ => None,
        }
    }

    /// Any number as the nearest finite f64.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Value::Int(int) => Some(*int as f64),
            Value::BigInt(digits) => digits.parse().ok().filter(|float: &f64| float.is_finite()),
            Value::Float(float) => Some(*float),
            _ => None,
        }
    }

    /// A boolean; no other kind counts as one.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Value::Bool(bool) => Some(*bool),
            _ => None,
        }
    }

    /// The elements of an array.
    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Value::Array(elements) => Some(elements),
            _ => None,
        }
    }

    /// The members of an object, in order.
    pub fn as_object(&self) -> Option<&[(String, Value)]> {
        match self {
            Value::Object(members) => Some(members),
            _ => None,
        }
    }

    /// Whether this is `null`.
    pub fn is_null(&self) -> bool {
        matches!(self, Value::Null)
    }

    /// The kind with its article, for error texts: "expected an integer, found a string".
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Null => "null",
            Value::Bool(_) => "a boolean",
            Value::Int(_) | Value::BigInt(_) => "an integer",
            Value::Float(_) => "a float",
            Value::String(_) => "a string",
            Value::Array(_) => "an array",
            Value::Object(_) => "an object",
        }
    }
}
