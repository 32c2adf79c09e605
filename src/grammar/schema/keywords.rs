//! The keywords of one schema: which there are, what kinds of value they allow, their values.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::{Error, Result};
use crate::grammar::{REPEAT_MAX, UNBOUNDED};
use crate::json::Value;
use std::fmt::Display;

/// Kinds of value, as bits.
pub(super) const NULL: u8 = 1;
pub(super) const BOOLEAN: u8 = 2;
pub(super) const INTEGER: u8 = 4;
/// A number that is no integer.
pub(super) const NUMBER: u8 = 8;
pub(super) const STRING: u8 = 16;
pub(super) const ARRAY: u8 = 32;
pub(super) const OBJECT: u8 = 64;

const TYPES: &[(&str, u8)] = &[
    ("null", NULL),
    ("boolean", BOOLEAN),
    ("integer", INTEGER),
    ("number", INTEGER | NUMBER),
    ("string", STRING),
    ("array", ARRAY),
    ("object", OBJECT),
];

/// Keywords that restrict values of some kinds only.
const RESTRICTIONS: &[(&str, u8)] = &[
    ("properties", OBJECT),
    ("required", OBJECT),
    ("additionalProperties", OBJECT),
    ("items", ARRAY),
    ("prefixItems", ARRAY),
    ("minItems", ARRAY),
    ("maxItems", ARRAY),
    ("minLength", STRING),
    ("maxLength", STRING),
    ("pattern", STRING),
    ("format", STRING),
    ("minimum", INTEGER | NUMBER),
    ("maximum", INTEGER | NUMBER),
    ("exclusiveMinimum", INTEGER | NUMBER),
    ("exclusiveMaximum", INTEGER | NUMBER),
];

/// Keywords that say what is allowed by themselves.
const COMBINERS: &[&str] = &["$ref", "const", "enum", "anyOf", "oneOf", "allOf"];

/// Keywords without influence on what is valid, and those that hold schemas to refer to.
const ANNOTATIONS: &[&str] = &[
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
    "$id",
    "$defs",
    "definitions",
];

/// A schema that is an object, and where it is.
pub(super) struct Keywords<'a> {
    pub(super) pointer: String,
    members: &'a [(String, Value)],
}

impl<'a> Keywords<'a> {
    /// Refuses what is no schema, and unknown keywords.
    pub(super) fn new(pointer: &str, schema: &'a Value) -> Result<Keywords<'a>> {
        let Some(members) = schema.as_object() else {
            bail!("{pointer}: expected a schema, found {}", schema.kind());
        };
        let keywords = Keywords { pointer: pointer.into(), members };
        for (key, _) in members {
            let key = key.as_str();
            let is_known = key == "type"
                || ANNOTATIONS.contains(&key)
                || COMBINERS.contains(&key)
                || RESTRICTIONS.iter().any(|(name, _)| *name == key);
            if !is_known {
                return Err(keywords.error(key, "unsupported keyword"));
            }
            if key == "$id" && pointer != "#" {
                return Err(keywords.error(key, "supported at the root only"));
            }
        }
        Ok(keywords)
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.members.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The pointer of a keyword.
    pub(super) fn place(&self, key: &str) -> String {
        format!("{}/{}", self.pointer, escape(key))
    }

    pub(super) fn error(&self, key: &str, message: impl Display) -> Error {
        Error::new(format!("{}: {message}", self.place(key)))
    }

    pub(super) fn expected(&self, key: &str, what: &str) -> Error {
        let found = self.get(key).map_or("nothing", Value::kind);
        self.error(key, format!("expected {what}, found {found}"))
    }

    /// The keyword that decides alone, if there is one; an error if another does too.
    pub(super) fn combiner(&self) -> Result<Option<(&'static str, &'a Value)>> {
        let Some(&key) = COMBINERS.iter().find(|key| self.get(key).is_some()) else {
            return Ok(None);
        };
        for (other, _) in self.members {
            let is_type = other == "type" && ["const", "enum"].contains(&key);
            if other != key && !is_type && !ANNOTATIONS.contains(&other.as_str()) {
                return Err(self.error(other, format!("unsupported beside `{key}`")));
            }
        }
        Ok(self.get(key).map(|value| (key, value)))
    }

    /// The kinds that `type` allows or, without it, that the keywords are about; `None` for any.
    pub(super) fn kinds(&self) -> Result<Option<u8>> {
        let Some(declared) = self.get("type") else {
            let is_about = |key: &String| RESTRICTIONS.iter().find(|(name, _)| name == key);
            let about = self.members.iter().filter_map(|(key, _)| is_about(key));
            return Ok(about.map(|(_, kinds)| *kinds).reduce(|a, b| a | b));
        };
        let mut kinds = 0;
        for name in declared.as_array().unwrap_or(std::slice::from_ref(declared)) {
            let name = name.as_str().ok_or_else(|| self.expected("type", "names of types"))?;
            let Some((_, kind)) = TYPES.iter().find(|(known, _)| *known == name) else {
                return Err(self.error("type", format!("unknown type `{name}`")));
            };
            kinds |= kind;
        }
        Ok(Some(kinds))
    }

    pub(super) fn string(&self, key: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.expected(key, "a string"))
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<&'a [(String, Value)]>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_object().map(Some).ok_or_else(|| self.expected(key, "an object"))
    }

    /// An array with at least one element.
    pub(super) fn list(&self, key: &str) -> Result<&'a [Value]> {
        let list = self.get(key).and_then(Value::as_array).filter(|list| !list.is_empty());
        list.ok_or_else(|| self.expected(key, "an array with elements"))
    }

    /// An array of strings, none if it is absent.
    pub(super) fn strings(&self, key: &str) -> Result<Vec<&'a str>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let strings = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        strings.ok_or_else(|| self.expected(key, "an array of strings"))
    }

    /// A least and a greatest count: 0 and [`UNBOUNDED`] if absent.
    pub(super) fn counts(&self, min_key: &str, max_key: &str) -> Result<(u32, u32)> {
        let count = |key: &str, absent| match self.get(key) {
            None => Ok(absent),
            Some(value) => match value.as_u64() {
                Some(count) if count <= u64::from(REPEAT_MAX) => Ok(count as u32),
                Some(count) => Err(self.error(key, format!("{count}, at most {REPEAT_MAX}"))),
                None => Err(self.expected(key, "a count")),
            },
        };
        let (min, max) = (count(min_key, 0)?, count(max_key, UNBOUNDED)?);
        if min > max {
            return Err(self.error(min_key, format!("{min} is above `{max_key}`, {max}")));
        }
        Ok((min, max))
    }

    /// The greatest integer up to a bound and the least from it on. The bound is below `end` in
    /// magnitude and, unless it is about integers, an integer itself.
    pub(super) fn bound(
        &self,
        key: &str,
        end: i128,
        is_integer: bool,
    ) -> Result<Option<(i128, i128)>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let bound = value.as_f64().ok_or_else(|| self.expected(key, "a number"))?;
        if bound.abs() >= end as f64 {
            return Err(self.error(key, format!("{bound} is unsupported: the limit is {end}")));
        }
        if bound.fract() != 0.0 && !is_integer {
            let message = format!("{bound} is unsupported: only integers are, but for integers");
            return Err(self.error(key, message));
        }
        let whole = value.as_i64().map(|int| (i128::from(int), i128::from(int)));
        Ok(whole.or(Some((bound.floor() as i128, bound.ceil() as i128))))
    }
}

/// The kind of a value, as a bit.
pub(super) fn kind_of(value: &Value) -> u8 {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Int(_) | Value::BigInt(_) => INTEGER,
        Value::Float(float) if float.fract() == 0.0 => INTEGER,
        Value::Float(_) => NUMBER,
        Value::String(_) => STRING,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
    }
}

/// A key as a JSON pointer writes it.
pub(super) fn escape(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// The value that `reference` points to within the document.
pub(super) fn resolve<'a>(document: &'a Value, reference: &str) -> Result<&'a Value> {
    let unsupported = || {
        let message = "only references within the document, as #/$defs/name, are supported";
        Error::new(format!("`{reference}`: {message}"))
    };
    let path = reference.strip_prefix('#').ok_or_else(unsupported)?;
    if !(path.is_empty() || path.starts_with('/')) || path.contains('%') {
        return Err(unsupported());
    }
    let mut value = document;
    for key in path.split('/').skip(1) {
        let key = key.replace("~1", "/").replace("~0", "~");
        let next = match value {
            Value::Array(list) => key.parse().ok().and_then(|at: usize| list.get(at)),
            _ => value.get(&key),
        };
        let Some(next) = next else { bail!("`{reference}`: there is no `{key}`") };
        value = next;
    }
    Ok(value)
}

/// Schemas that are looked at for one value; what is behind them counts as not said.
const LOOKS_MAX: usize = 256;

/// The kinds of value that a schema allows, those of its alternatives and of its listed values
/// included; `u8::MAX` if it does not say. What is malformed or unknown says nothing.
pub(super) fn kinds(document: &Value, schema: &Value) -> u8 {
    kinds_within(document, schema, &mut 0)
}

fn kinds_within(document: &Value, schema: &Value, looks: &mut usize) -> u8 {
    *looks += 1;
    if *looks > LOOKS_MAX {
        return u8::MAX;
    }
    let schema = follow(document, schema);
    let list = |key: &str| schema.get(key).and_then(Value::as_array).unwrap_or_default();
    let types = schema.get("type").into_iter();
    let types = types.flat_map(|named| named.as_array().unwrap_or(std::slice::from_ref(named)));
    let bit = |name: &Value| TYPES.iter().find(|(known, _)| name.as_str() == Some(known));
    let mut kinds = types.filter_map(bit).map(|(_, bits)| *bits).reduce(|a, b| a | b);
    let mut narrow = |found: Option<u8>| kinds = found.map(|f| f & kinds.unwrap_or(f)).or(kinds);
    narrow(list("enum").iter().chain(schema.get("const")).map(kind_of).reduce(|a, b| a | b));
    for key in ["anyOf", "oneOf"] {
        let each = list(key).iter().map(|schema| kinds_within(document, schema, looks));
        narrow(each.reduce(|a, b| a | b).filter(|found| *found != u8::MAX));
    }
    for schema in list("allOf") {
        narrow(Some(kinds_within(document, schema, looks)).filter(|found| *found != u8::MAX));
    }
    let about = RESTRICTIONS.iter().filter(|(name, _)| schema.get(name).is_some());
    kinds.or(about.map(|(_, bits)| *bits).reduce(|a, b| a | b)).unwrap_or(u8::MAX)
}

/// The schema that `schema` refers to, if it is a reference.
fn follow<'a>(document: &'a Value, mut schema: &'a Value) -> &'a Value {
    /// More references in a row are not followed.
    const HOPS_MAX: usize = 16;
    for _ in 0..HOPS_MAX {
        let target = schema.get("$ref").and_then(Value::as_str);
        let Some(target) = target.and_then(|target| resolve(document, target).ok()) else { break };
        schema = target;
    }
    schema
}

/// What is known of the values that a schema allows.
struct Shape<'a> {
    kinds: u8,
    constants: Option<&'a [Value]>,
    schema: &'a Value,
}

fn shape<'a>(document: &'a Value, schema: &'a Value) -> Shape<'a> {
    let schema = follow(document, schema);
    let mut shape = Shape { kinds: u8::MAX, constants: None, schema };
    if schema.as_bool() == Some(false) {
        shape.kinds = 0;
    }
    // What is malformed is found when the schema itself is compiled.
    let Ok(keywords) = Keywords::new("#", schema) else { return shape };
    let constants = match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, values) => values.and_then(Value::as_array),
    };
    let is_combined = COMBINERS.iter().any(|key| schema.get(key).is_some());
    shape.kinds = match constants {
        Some(values) => values.iter().fold(0, |kinds, value| kinds | kind_of(value)),
        None if is_combined => u8::MAX,
        None => keywords.kinds().ok().flatten().unwrap_or(u8::MAX),
    };
    shape.constants = constants;
    shape
}

/// Whether no value can be valid for both schemas, as far as types and constants show.
pub(super) fn differ(document: &Value, a: &Value, b: &Value) -> bool {
    /// Required members of objects that are compared.
    const MEMBERS_MAX: usize = 16;
    let (a, b) = (shape(document, a), shape(document, b));
    if kinds_and_constants_differ(&a, &b) {
        return true;
    }
    if a.kinds & b.kinds != OBJECT {
        return false;
    }
    let required = |shape: &Shape<'_>, name: &str| {
        let list = shape.schema.get("required").and_then(Value::as_array);
        list.is_some_and(|list| list.iter().any(|member| member.as_str() == Some(name)))
    };
    fn property<'a>(document: &'a Value, object: &Shape<'a>, name: &str) -> Option<Shape<'a>> {
        Some(shape(document, object.schema.get("properties")?.get(name)?))
    }
    let names = a.schema.get("required").and_then(Value::as_array).unwrap_or_default();
    names.iter().take(MEMBERS_MAX).filter_map(Value::as_str).any(|name| {
        let members = property(document, &a, name).zip(property(document, &b, name));
        required(&b, name) && members.is_some_and(|(a, b)| kinds_and_constants_differ(&a, &b))
    })
}

fn kinds_and_constants_differ(a: &Shape<'_>, b: &Shape<'_>) -> bool {
    /// Pairs of constants that are compared; beyond, they count as equal.
    const PAIRS_MAX: usize = 1 << 16;
    if a.kinds & b.kinds == 0 {
        return true;
    }
    let (Some(a), Some(b)) = (a.constants, b.constants) else { return false };
    a.len() * b.len() <= PAIRS_MAX && !a.iter().any(|a| b.iter().any(|b| may_be_equal(a, b)))
}

/// Whether two values may be equal for JSON Schema: containers of one kind count as equal.
fn may_be_equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(_), Value::Array(_)) | (Value::Object(_), Value::Object(_)) => true,
        _ => a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a)),
    }
}
