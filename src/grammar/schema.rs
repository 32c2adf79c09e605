//! JSON Schema to a grammar of JSON, or of the plain text that stands for a string.
//!
//! The grammar matches a part of what the schema allows, never more:
//!
//! - Members come in the order of `properties`, then those of `required` without a property, then
//!   others, which `additionalProperties` must ask for: where it is absent there are none, unless
//!   `properties` is absent too. The keys of others are written without escapes; that no two of
//!   them are equal is beyond a grammar.
//! - Elements behind `prefixItems` need `items`, or a `minItems` that asks for them.
//! - White space: none or one space after `:`; none, one space, or a line break and up to 32
//!   spaces after `{`, `[` and `,` and before `}` and `]`. So it cannot run away.
//! - Numbers have at most 18 digits before the point, 16 behind it and 2 in the exponent. With a
//!   bound, which must be an integer below 10⁹ in magnitude, they have no exponent, at most 6
//!   digits behind the point and zeros behind those, and stay below 10⁹ in magnitude on the other
//!   side, too. Integers stay below 10¹⁸.
//! - Strings with `pattern` or `format`, keys, and the values of `const` and `enum` are written in
//!   one way each. Days of `format` exist in every year; seconds end at 59.
//! - Without `type`, the keywords present imply it.
//!
//! Beside `$ref`, `const`, `enum`, `anyOf`, `oneOf` and `allOf` (of one) only annotations may
//! stand, and `type` beside `const` and `enum`. Alternatives of `oneOf` must differ in type, in
//! constants, or in a required member that does. A keyword unknown here is refused, by its JSON
//! pointer.

#![forbid(unsafe_code)]

use super::charset::CharSet;
use super::compile::Expr;
use super::values::{INTEGER_END, Json, NUMBER_END};
use super::{Grammar, TEXT_BYTES_MAX, UNBOUNDED, regex};
use crate::bail;
use crate::error::{Context, Result};
use crate::json::{self, Value};
use std::collections::HashMap;

pub(super) mod calls;
mod keywords;

use keywords::{
    ARRAY, BOOLEAN, INTEGER, Keywords, Member, NULL, NUMBER, OBJECT, STRING, differ, resolve,
};

/// Longest name of a property beside others, which is spelled out to be told from them.
const NAME_CHARS_MAX: usize = 256;
/// Most alternatives of `oneOf`, each of which is compared with each.
const ONE_OF_MAX: usize = 128;
const DATE: &str = "[1-9]\\d{3}-((0[1-9]|1[0-2])-(0[1-9]|1\\d|2[0-8])|(0[13-9]|1[0-2])-(29|30)\
                    |(0[13578]|1[02])-31)";
const TIME: &str =
    "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,9})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)";
const UUID: &str = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}";
const OCTET: &str = "(\\d|[1-9]\\d|1\\d\\d|2[0-4]\\d|25[0-5])";

/// A member of an object, as GBNF.
const PAIR: &str = r#"key ":" " "? value"#;

/// How a value is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Form {
    /// As JSON.
    Json,
    /// A string as its characters, null as `null`, and nothing else.
    Text,
}

/// [`Grammar::from_schema`] and [`Grammar::from_text_schema`].
pub(super) fn compile(schema: &Value, form: Form) -> Result<Grammar> {
    let mut json = Json::new();
    let mut compiler = Compiler::new(&mut json, schema)?;
    let root = compiler.rule(form, "#".into(), schema)?;
    compiler.define_pending()?;
    json.builder.build(root)
}

/// [`Grammar::json_object`].
pub(super) fn json_object() -> Grammar {
    let json = Json::new();
    let root = json.rule("object");
    json.builder.build(root).expect("a fixed grammar compiles")
}

struct Compiler<'a, 'j> {
    json: &'j mut Json,
    document: &'a Value,
    /// The rule of each schema that was met, by how it is written and its pointer.
    rules: HashMap<(Form, String), u32>,
    /// Rules to define.
    pending: Vec<(u32, Form, String, &'a Value)>,
}

impl<'a, 'j> Compiler<'a, 'j> {
    fn new(json: &'j mut Json, document: &'a Value) -> Result<Compiler<'a, 'j>> {
        let bytes = json::to_compact(document).len();
        if bytes > TEXT_BYTES_MAX {
            bail!("{bytes} bytes, at most {TEXT_BYTES_MAX} are allowed");
        }
        Ok(Compiler { json, document, rules: HashMap::new(), pending: Vec::new() })
    }

    /// Not by recursion: references may form long chains.
    fn define_pending(&mut self) -> Result<()> {
        while let Some((rule, form, pointer, schema)) = self.pending.pop() {
            let expr = self.schema(form, &pointer, schema)?;
            self.json.builder.define(rule, None, expr);
        }
        Ok(())
    }

    /// What the schema at `pointer` allows, as JSON.
    fn subschema(&mut self, pointer: String, schema: &'a Value) -> Result<Expr> {
        self.rule(Form::Json, pointer, schema).map(Expr::Rule)
    }

    /// The rule of the schema at `pointer`.
    fn rule(&mut self, form: Form, pointer: String, schema: &'a Value) -> Result<u32> {
        let key = (form, pointer);
        if let Some(&rule) = self.rules.get(&key) {
            return Ok(rule);
        }
        let rule = self.json.builder.declare(key.1.as_str())?;
        self.pending.push((rule, form, key.1.clone(), schema));
        self.rules.insert(key, rule);
        Ok(rule)
    }

    /// What a schema allows that says nothing.
    fn any(&mut self, form: Form) -> Expr {
        self.json.expr(if form == Form::Json { "value" } else { ".*" }, &[])
    }

    fn schema(&mut self, form: Form, pointer: &str, schema: &'a Value) -> Result<Expr> {
        match schema {
            Value::Bool(true) => return Ok(self.any(form)),
            Value::Bool(false) => return Ok(self.json.builder.any_of(Vec::new())),
            _ => {}
        }
        let keywords = Keywords::new(pointer, schema)?;
        if let Some(expr) = self.combined(form, &keywords)? {
            return Ok(expr);
        }
        let mut kinds = keywords::kinds(self.document, schema);
        if kinds == u8::MAX {
            return Ok(self.any(form));
        }
        if form == Form::Text {
            kinds &= STRING | NULL;
        }
        let mut alternatives = Vec::new();
        for (kind, word) in [(BOOLEAN, "true"), (BOOLEAN, "false"), (NULL, "null")] {
            alternatives.extend((kinds & kind != 0).then(|| self.json.builder.literal(word)));
        }
        if kinds & OBJECT != 0 {
            alternatives.push(self.object(&keywords)?);
        }
        if kinds & ARRAY != 0 {
            alternatives.push(self.array(&keywords)?);
        }
        if kinds & STRING != 0 {
            alternatives.push(self.string(form, &keywords)?);
        }
        if kinds & (INTEGER | NUMBER) != 0 {
            alternatives.push(self.number(&keywords, kinds & NUMBER == 0)?);
        }
        Ok(self.json.builder.any_of(alternatives))
    }

    /// What a schema allows that is a reference, a list of values or a combination of schemas.
    fn combined(&mut self, form: Form, keywords: &Keywords<'a>) -> Result<Option<Expr>> {
        let Some((key, value)) = keywords.combiner()? else { return Ok(None) };
        let expr = match key {
            "$ref" => {
                let target = value.as_str().ok_or_else(|| keywords.expected(key, "a string"))?;
                let found = resolve(self.document, target);
                let schema = found.context(|| keywords.place(key))?;
                Expr::Rule(self.rule(form, target.into(), schema)?)
            }
            "const" => self.constants(form, keywords, std::slice::from_ref(value))?,
            "enum" => self.constants(form, keywords, keywords.list(key)?)?,
            _ => {
                let schemas = keywords.list(key)?;
                if key == "allOf" && schemas.len() > 1 {
                    return Err(keywords.error(key, "only one schema is supported"));
                }
                if key == "oneOf" {
                    self.check_disjoint(keywords, schemas)?;
                }
                let place = keywords.place(key);
                let mut alternatives = Vec::new();
                for (at, schema) in schemas.iter().enumerate() {
                    let rule = self.rule(form, format!("{place}/{at}"), schema)?;
                    alternatives.push(Expr::Rule(rule));
                }
                self.json.builder.any_of(alternatives)
            }
        };
        Ok(Some(expr))
    }

    fn check_disjoint(&self, keywords: &Keywords<'a>, schemas: &[Value]) -> Result<()> {
        if schemas.len() > ONE_OF_MAX {
            let message = format!("more than {ONE_OF_MAX} alternatives");
            return Err(keywords.error("oneOf", message));
        }
        for (at, schema) in schemas.iter().enumerate() {
            let same = schemas[..at].iter().position(|other| !differ(self.document, schema, other));
            if let Some(same) = same {
                let message = format!(
                    "alternatives {same} and {at} differ neither in type nor in constants, \
                     so a value may match both: unsupported"
                );
                return Err(keywords.error("oneOf", message));
            }
        }
        Ok(())
    }

    fn constants(&mut self, form: Form, keywords: &Keywords<'a>, values: &[Value]) -> Result<Expr> {
        let kinds = keywords::kinds(self.document, keywords.schema);
        let values = values.iter().filter(|value| keywords::kind_of(value) & kinds != 0);
        let literal = |value: &Value| match (form, value) {
            (Form::Text, Value::String(text)) => Some(self.json.builder.literal(text)),
            (Form::Json, _) | (_, Value::Null) => {
                Some(self.json.builder.literal(&json::to_compact(value)))
            }
            _ => None,
        };
        let values = values.filter_map(literal).collect();
        Ok(self.json.builder.any_of(values))
    }

    fn object(&mut self, keywords: &Keywords<'a>) -> Result<Expr> {
        let others = match keywords.get("additionalProperties") {
            None if keywords.get("properties").is_none() => Some(self.any(Form::Json)),
            None | Some(Value::Bool(false)) => None,
            Some(schema) => Some(self.subschema(keywords.place("additionalProperties"), schema)?),
        };
        let members = keywords.members()?;
        // Back to front: what may follow the first member or, with a comma, any other.
        let (mut first, mut rest) = (Expr::empty(), Expr::empty());
        if let Some(value) = others {
            let key = self.other_key(keywords, &members)?;
            let pair = self.json.expr(PAIR, &[("key", &key), ("value", &value)]);
            let pair = self.json.builder.rule(&keywords.pointer, pair)?;
            first = self.json.expr(r#"(pair ("," space pair)*)?"#, &[("pair", &pair)]);
            rest = self.json.expr(r#"("," space pair)*"#, &[("pair", &pair)]);
        }
        for Member { name, pointer, schema, is_required } in members.into_iter().rev() {
            let value = self.subschema(pointer, schema)?;
            let key = self.json.builder.literal(&json::to_compact(&Value::String(name.into())));
            let pair = self.json.expr(PAIR, &[("key", &key), ("value", &value)]);
            let pair = self.json.builder.rule(&keywords.pointer, pair)?;
            let texts = match is_required {
                true => ["pair rest", r#""," space pair rest"#],
                false => ["pair rest | first", r#"("," space pair)? rest"#],
            };
            let parts = [("pair", &pair), ("first", &first), ("rest", &rest)];
            let ways = texts.map(|text| {
                let expr = self.json.expr(text, &parts);
                self.json.builder.rule(&keywords.pointer, expr)
            });
            let [from_here, after] = ways;
            (first, rest) = (from_here?, after?);
        }
        Ok(self.json.expr(r#""{" space members space "}""#, &[("members", &first)]))
    }

    /// A key, with its quotes, that is none of `members`.
    fn other_key(&mut self, keywords: &Keywords, members: &[Member<'_>]) -> Result<Expr> {
        // A name that JSON escapes cannot be written as these keys are.
        let is_plain = |name: &&str| json::to_compact(&(*name).into()).len() == name.len() + 2;
        let names = members.iter().map(|member| member.name).filter(is_plain);
        let mut names: Vec<Vec<char>> = names.map(|name| name.chars().collect()).collect();
        if names.iter().any(|name| name.len() > NAME_CHARS_MAX) {
            let message =
                format!("a name has more than {NAME_CHARS_MAX} characters, and others are allowed");
            return Err(keywords.error("properties", message));
        }
        names.sort_unstable();
        let rest = self.none_of(&names, 0);
        Ok(self.json.expr(r#"["] rest"#, &[("rest", &rest)]))
    }

    /// The rest of a key that is none of `names`, and its quote, behind `read` characters, which
    /// all of them have in common. They are sorted.
    fn none_of(&mut self, names: &[Vec<char>], read: usize) -> Expr {
        let ended = names.partition_point(|name| name.len() == read);
        let mut ways = Vec::new();
        let mut continued = CharSet::escaped_in_json();
        for group in names[ended..].chunk_by(|a, b| a[read] == b[read]) {
            let char = CharSet::from(group[0][read]);
            let rest = self.none_of(group, read + 1);
            continued = CharSet::union(&[continued, char.clone()]);
            ways.push(Expr::seq([self.json.builder.class(char), rest]));
        }
        let other = self.json.builder.class(continued.complement());
        let text = if ended == 0 { r#"(other plain*)? ["]"# } else { r#"other plain* ["]"# };
        ways.push(self.json.expr(text, &[("other", &other)]));
        self.json.builder.any_of(ways)
    }

    fn array(&mut self, keywords: &Keywords<'a>) -> Result<Expr> {
        let (min, max) = keywords.counts("minItems", "maxItems")?;
        let prefix = keywords.list("prefixItems")?;
        let prefix = &prefix[..prefix.len().min(max as usize)];
        let place = keywords.place("prefixItems");
        let item = match keywords.get("items") {
            Some(schema) => self.subschema(keywords.place("items"), schema)?,
            None if prefix.is_empty() || prefix.len() < min as usize => self.any(Form::Json),
            None => self.json.builder.any_of(Vec::new()),
        };
        let mut first = Vec::new();
        for (at, schema) in prefix.iter().enumerate() {
            first.push(self.subschema(format!("{place}/{at}"), schema)?);
        }
        if first.is_empty() && max > 0 {
            first.push(item.clone());
        }
        let count = first.len() as u32;
        let max = if max == UNBOUNDED { max } else { max - count };
        // Back to front: each element with what may follow it.
        let mut rest = self.json.expr(r#""," space item"#, &[("item", &item)]);
        rest = rest.repeat(min.saturating_sub(count), max);
        for (at, item) in first.into_iter().enumerate().rev() {
            let text = if at == 0 { "item rest" } else { r#""," space item rest"# };
            rest = self.json.expr(text, &[("item", &item), ("rest", &rest)]);
            rest = if at as u32 >= min { rest.optional() } else { rest };
            rest = self.json.builder.rule(&keywords.pointer, rest)?;
        }
        Ok(self.json.expr(r#""[" space items space "]""#, &[("items", &rest)]))
    }

    fn string(&mut self, form: Form, keywords: &Keywords<'a>) -> Result<Expr> {
        let characters = self.characters(form, keywords)?;
        let text = if form == Form::Json { r#"["] characters ["]"# } else { "characters" };
        Ok(self.json.expr(text, &[("characters", &characters)]))
    }

    fn characters(&mut self, form: Form, keywords: &Keywords<'a>) -> Result<Expr> {
        let (min, max) = keywords.counts("minLength", "maxLength")?;
        let format = match keywords.string("format")? {
            None => None,
            Some("date") => Some(DATE.to_string()),
            Some("time") => Some(TIME.to_string()),
            Some("date-time") => Some(format!("{DATE}T{TIME}")),
            Some("uuid") => Some(UUID.to_string()),
            Some("ipv4") => Some(format!("({OCTET}\\.){{3}}{OCTET}")),
            Some(other) => {
                return Err(keywords.error("format", format!("`{other}` is unsupported")));
            }
        };
        let pattern = keywords.string("pattern")?.map(str::to_string);
        let (key, pattern) = match (pattern, format) {
            (None, None) => {
                let char = if form == Form::Json { r#"plain | "\\" escape"# } else { "." };
                return Ok(self.json.expr(char, &[]).repeat(min, max));
            }
            (Some(pattern), None) => ("pattern", pattern),
            (None, Some(format)) => ("format", format!("^{format}$")),
            (Some(_), Some(_)) => {
                return Err(keywords.error("format", "unsupported beside `pattern`"));
            }
        };
        if let Some(bound) = ["minLength", "maxLength"].iter().find(|b| keywords.get(b).is_some()) {
            return Err(keywords.error(bound, format!("unsupported beside `{key}`")));
        }
        regex::compile(&mut self.json.builder, &pattern, form).context(|| keywords.place(key))
    }

    fn number(&mut self, keywords: &Keywords<'a>, is_integer: bool) -> Result<Expr> {
        let end = if is_integer { INTEGER_END } else { NUMBER_END };
        let mut bounds = [None; 4];
        for (bound, key) in
            bounds.iter_mut().zip(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"])
        {
            *bound = keywords.bound(key, end, is_integer)?;
        }
        let [min, above, max, below] = bounds;
        if bounds == [None; 4] {
            return Ok(self.json.expr(if is_integer { r#""-"? integer"# } else { "number" }, &[]));
        }
        // Each bound as the greatest integer up to it and the least from it on: for a number they
        // are the same.
        let lows = [min.map(|bound| bound.1), above.map(|bound| bound.0 + 1)];
        let highs = [max.map(|bound| bound.0), below.map(|bound| bound.1 - 1)];
        let low = lows.into_iter().flatten().max().unwrap_or(1 - end);
        let high = highs.into_iter().flatten().min().unwrap_or(end - 1);
        let whole = self.json.integers(low, high);
        if is_integer {
            return Ok(whole);
        }
        let low = [min, above].into_iter().flatten().max().map_or(1 - end, |bound| bound.0);
        let high = [max, below].into_iter().flatten().min().map_or(end - 1, |bound| bound.0);
        let others = self.json.fractions(low, high);
        let parts = [("whole", &whole), ("others", &others)];
        Ok(self.json.expr(r#"whole ("." "0"{1,6})? | others"#, &parts))
    }
}
