//! Calls of tools as the model writes them, for grammars and for readers of what came of it.
//!
//! A call is a marker, the name, for each argument its key and its value between markers, and a
//! last marker. A value is text where the tool's schema allows a string, and may be `null` if it
//! allows that too; where it allows no string it is JSON. So which of the two a value is never
//! depends on what it looks like, and `007` stays what it is.

#![forbid(unsafe_code)]

use super::keywords::{self, Keywords, Member, STRING};
use super::{Compiler, Form};
use crate::error::{Context, Result};
use crate::grammar::compile::{Builder, Expr};
use crate::grammar::values::Json;
use crate::grammar::{Grammar, UNBOUNDED};
use crate::json::{self, Limits, Value};

/// The markers of a call, each with the one that ends its part.
#[derive(Clone, Copy, Debug)]
pub struct CallForm {
    /// Around a call.
    pub call: [u32; 2],
    /// Around the name of an argument.
    pub key: [u32; 2],
    /// Around its value.
    pub value: [u32; 2],
}

/// A function that can be called.
#[derive(Clone, Debug)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The schema of its arguments, an object's; null if it has none.
    pub parameters: Value,
}

/// What is said of an argument of which nothing is said.
static ANYTHING: Value = Value::Bool(true);

/// The schema of the argument `name`, which is a part of `parameters`.
fn schema_of<'a>(parameters: &'a Value, name: &str) -> &'a Value {
    let declared = parameters.get("properties").and_then(|properties| properties.get(name));
    declared.or_else(|| parameters.get("additionalProperties")).unwrap_or(&ANYTHING)
}

/// The value of the argument `name`, from its text. Where the schema says nothing, or nothing that
/// fits, what reads as JSON of an allowed kind is that, the rest text.
pub fn read_argument(parameters: &Value, name: &str, text: String) -> Value {
    let kinds = keywords::kinds(parameters, schema_of(parameters, name));
    let parsed = json::parse(text.trim().as_bytes(), Limits::default()).ok();
    match parsed.filter(|value| keywords::kind_of(value) & kinds != 0) {
        Some(Value::Null) => Value::Null,
        Some(value) if kinds == u8::MAX || kinds & STRING == 0 => value,
        _ => Value::String(text),
    }
}

/// [`Grammar::from_calls`].
pub(in crate::grammar) fn compile(
    tools: &[Tool],
    form: &CallForm,
    repeats: bool,
) -> Result<Grammar> {
    let mut json = Json::new();
    let mut calls = Vec::new();
    for tool in tools {
        let arguments = arguments(&mut json, &tool.parameters, form);
        let arguments = arguments.context(|| format!("parameters of {}", tool.name))?;
        let name = json.builder.literal(&tool.name);
        calls.push(Expr::seq([name, arguments]));
    }
    let call = json.builder.any_of(calls);
    let call = between(&mut json.builder, form.call, call);
    let call = call.repeat(1, if repeats { UNBOUNDED } else { 1 });
    let root = json.builder.declare("calls")?;
    json.builder.define(root, None, call);
    json.builder.build(root)
}

fn between(builder: &mut Builder, pair: [u32; 2], inner: Expr) -> Expr {
    Expr::seq([builder.marker(pair[0]), inner, builder.marker(pair[1])])
}

/// The arguments of one tool: declared ones in their order, then required ones of which no more is
/// known.
fn arguments(json: &mut Json, parameters: &Value, form: &CallForm) -> Result<Expr> {
    if parameters.is_null() {
        return Ok(Expr::empty());
    }
    let keywords = Keywords::new("#", parameters)?;
    if let Some((key, _)) = keywords.combiner()? {
        return Err(keywords.error(key, "unsupported here: expected `properties`"));
    }
    let mut compiler = Compiler::new(json, parameters)?;
    let mut all = Vec::new();
    for Member { name, pointer, schema, is_required } in keywords.members()? {
        let kinds = keywords::kinds(parameters, schema);
        let way = if kinds & STRING == 0 { Form::Json } else { Form::Text };
        let value = Expr::Rule(compiler.rule(way, pointer, schema)?);
        let builder = &mut compiler.json.builder;
        let key = builder.literal(name);
        let key = between(builder, form.key, key);
        let value = between(builder, form.value, value);
        let argument = builder.rule(name, Expr::seq([key, value]))?;
        all.push(if is_required { argument } else { argument.optional() });
    }
    compiler.define_pending()?;
    Ok(Expr::seq(all))
}
