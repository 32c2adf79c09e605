//! The keywords of one schema: which there are, what kinds of value they allow, their values.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::{Error, Result};
use crate::grammar::{REPEAT_MAX, UNBOUNDED};
use crate::json::Value;
use std::collections::HashSet;
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
const RESTRICTIONS: &[(u8, &[&str])] = &[
    (OBJECT, &["properties", "required", "additionalProperties"]),
    (ARRAY, &["items", "prefixItems", "minItems", "maxItems"]),
    (STRING, &["minLength", "maxLength", "pattern", "format"]),
    (INTEGER | NUMBER, &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
];

/// Keywords that say what is allowed by themselves.
const COMBINERS: &[&str] = &["$ref", "const", "enum", "anyOf", "oneOf", "allOf"];

/// Keywords without influence on what is valid, and those that hold schemas to refer to.
const ANNOTATIONS: [&[&str]; 3] = [
    &["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"],
    &["$comment", "$schema", "$id"],
    &["$defs", "definitions"],
];

fn is_annotation(key: &str) -> bool {
    ANNOTATIONS.iter().any(|keys| keys.contains(&key))
}

/// A member of an object, and where its schema is.
pub(super) struct Member<'a> {
    pub(super) name: &'a str,
    pub(super) pointer: String,
    pub(super) schema: &'a Value,
    pub(super) is_required: bool,
}

/// A schema that is an object, and where it is.
pub(super) struct Keywords<'a> {
    pub(super) pointer: String,
    pub(super) schema: &'a Value,
    members: &'a [(String, Value)],
}

impl<'a> Keywords<'a> {
    /// Refuses what is no schema, and unknown keywords.
    pub(super) fn new(pointer: &str, schema: &'a Value) -> Result<Keywords<'a>> {
        let Some(members) = schema.as_object() else {
            bail!("{pointer}: expected a schema, found {}", schema.kind());
        };
        let keywords = Keywords { pointer: pointer.into(), schema, members };
        for (key, _) in members {
            let key = key.as_str();
            let is_known = key == "type"
                || is_annotation(key)
                || COMBINERS.contains(&key)
                || RESTRICTIONS.iter().any(|(_, keys)| keys.contains(&key));
            if !is_known {
                return Err(keywords.error(key, "unsupported keyword"));
            }
            if key == "$id" && pointer != "#" {
                return Err(keywords.error(key, "supported at the root only"));
            }
        }
        for name in named(schema).unwrap_or_default() {
            let name = name.as_str().ok_or_else(|| keywords.expected("type", "names of types"))?;
            if !TYPES.iter().any(|(known, _)| *known == name) {
                return Err(keywords.error("type", format!("unknown type `{name}`")));
            }
        }
        Ok(keywords)
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.schema.get(key)
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
            if other != key && !is_type && !is_annotation(other) {
                return Err(self.error(other, format!("unsupported beside `{key}`")));
            }
        }
        Ok(self.get(key).map(|value| (key, value)))
    }

    /// The value of a keyword as `read` takes it; an error if that gives none.
    fn read<T>(
        &self,
        key: &str,
        what: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let value = self.get(key).map(|value| read(value).ok_or_else(|| self.expected(key, what)));
        value.transpose()
    }

    pub(super) fn string(&self, key: &str) -> Result<Option<&'a str>> {
        self.read(key, "a string", Value::as_str)
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<&'a [(String, Value)]>> {
        self.read(key, "an object", Value::as_object)
    }

    /// An array with at least one element; none if it is absent.
    pub(super) fn list(&self, key: &str) -> Result<&'a [Value]> {
        let list = |value: &'a Value| value.as_array().filter(|list| !list.is_empty());
        self.read(key, "an array with elements", list).map(Option::unwrap_or_default)
    }

    /// An array of strings, none if it is absent.
    pub(super) fn strings(&self, key: &str) -> Result<Vec<&'a str>> {
        let strings = |value: &'a Value| value.as_array()?.iter().map(Value::as_str).collect();
        self.read(key, "an array of strings", strings).map(Option::unwrap_or_default)
    }

    /// The members that an object may have by name: those of `properties`, then those of
    /// `required` without a property.
    pub(super) fn members(&self) -> Result<Vec<Member<'a>>> {
        let properties = self.object("properties")?.unwrap_or_default();
        let required = self.strings("required")?;
        let is_required: HashSet<&str> = required.iter().copied().collect();
        let place = self.place("properties");
        let declared = |(name, schema): &'a (String, Value)| Member {
            name,
            pointer: format!("{place}/{}", escape(name)),
            schema,
            is_required: is_required.contains(name.as_str()),
        };
        let mut members: Vec<Member<'a>> = properties.iter().map(declared).collect();
        let mut known: HashSet<&str> = members.iter().map(|member| member.name).collect();
        let schema = self.get("additionalProperties").unwrap_or(&Value::Bool(true));
        for name in required.into_iter().filter(|name| known.insert(name)) {
            if *schema == Value::Bool(false) {
                let message = format!("`{name}` is no property, and others are not allowed");
                return Err(self.error("required", message));
            }
            let pointer = self.place("additionalProperties");
            members.push(Member { name, pointer, schema, is_required: true });
        }
        Ok(members)
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
        let Some(bound) = self.read(key, "a number", Value::as_f64)? else { return Ok(None) };
        if bound.abs() >= end as f64 {
            return Err(self.error(key, format!("{bound} is unsupported: the limit is {end}")));
        }
        if bound.fract() != 0.0 && !is_integer {
            let message = format!("{bound} is unsupported: only integers are, but for integers");
            return Err(self.error(key, message));
        }
        let exact = self.get(key).and_then(Value::as_i64).map(|int| (int.into(), int.into()));
        Ok(exact.or(Some((bound.floor() as i128, bound.ceil() as i128))))
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
fn escape(key: &str) -> String {
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

/// The names of types that a schema lists.
fn named(schema: &Value) -> Option<&[Value]> {
    let named = schema.get("type")?;
    Some(named.as_array().unwrap_or(std::slice::from_ref(named)))
}

/// The values that `const` or `enum` lists.
fn constants(schema: &Value) -> Option<&[Value]> {
    let listed = schema.get("enum").and_then(Value::as_array);
    schema.get("const").map(std::slice::from_ref).or(listed)
}

/// The kinds of value that a schema allows, those of its alternatives and of its listed values
/// included; `u8::MAX` if it does not say. Without `type`, the keywords present imply it. What is
/// malformed or unknown says nothing.
pub(super) fn kinds(document: &Value, schema: &Value) -> u8 {
    kinds_within(document, schema, &mut 0)
}

fn kinds_within(document: &Value, schema: &Value, looks: &mut usize) -> u8 {
    *looks += 1;
    if *looks > LOOKS_MAX {
        return u8::MAX;
    }
    let schema = follow(document, schema);
    let bits = |name: &Value| TYPES.iter().find(|(known, _)| name.as_str() == Some(known));
    let bits = |name: &Value| bits(name).map_or(u8::MAX, |(_, bits)| *bits);
    let mut kinds = named(schema).map_or(u8::MAX, |names| any_of(names.iter().map(bits)));
    kinds &= constants(schema).map_or(u8::MAX, |values| any_of(values.iter().map(kind_of)));
    let list = |key: &str| schema.get(key).and_then(Value::as_array).unwrap_or_default();
    for alternatives in ["anyOf", "oneOf"].map(list).into_iter().filter(|list| !list.is_empty()) {
        let each = alternatives.iter().map(|schema| kinds_within(document, schema, looks));
        kinds &= any_of(each);
    }
    for schema in list("allOf") {
        kinds &= kinds_within(document, schema, looks);
    }
    let is_about = |(_, keys): &&(u8, &[&str])| keys.iter().any(|key| schema.get(key).is_some());
    match any_of(RESTRICTIONS.iter().filter(is_about).map(|(kinds, _)| *kinds)) {
        about if kinds == u8::MAX && about != 0 => about,
        _ => kinds,
    }
}

fn any_of(kinds: impl Iterator<Item = u8>) -> u8 {
    kinds.fold(0, |a, b| a | b)
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

/// Whether no value can be valid for both schemas, as far as types and constants show.
pub(super) fn differ(document: &Value, a: &Value, b: &Value) -> bool {
    /// Required members of objects that are compared.
    const MEMBERS_MAX: usize = 16;
    if kinds_or_constants_differ(document, a, b) {
        return true;
    }
    if kinds(document, a) & kinds(document, b) != OBJECT {
        return false;
    }
    let [a, b] = [a, b].map(|schema| follow(document, schema));
    let [mine, theirs] =
        [a, b].map(|schema| schema.get("required").and_then(Value::as_array).unwrap_or_default());
    mine.iter().take(MEMBERS_MAX).filter(|name| theirs.contains(name)).any(|name| {
        let properties = [a, b].map(|schema| schema.get("properties"));
        let [a, b] = properties.map(|all| all.and_then(|all| all.get(name.as_str()?)));
        a.zip(b).is_some_and(|(a, b)| kinds_or_constants_differ(document, a, b))
    })
}

fn kinds_or_constants_differ(document: &Value, a: &Value, b: &Value) -> bool {
    /// Pairs of constants that are compared; beyond, they count as equal.
    const PAIRS_MAX: usize = 1 << 16;
    if kinds(document, a) & kinds(document, b) == 0 {
        return true;
    }
    let [a, b] = [a, b].map(|schema| constants(follow(document, schema)));
    let Some((a, b)) = a.zip(b) else { return false };
    a.len() * b.len() <= PAIRS_MAX && !a.iter().any(|a| b.iter().any(|b| may_be_equal(a, b)))
}

/// Whether two values may be equal for JSON Schema: containers of one kind count as equal.
fn may_be_equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(_), Value::Array(_)) | (Value::Object(_), Value::Object(_)) => true,
        _ => a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a)),
    }
}
