//! The form that the content of a reply must have, by any of the names that clients know for it.
//!
//! `response_format` is OpenAI's, `grammar` and `json_schema` are llama.cpp's, `structured_outputs`
//! and `guided_…` are vLLM's. A request may ask for one form. What the grammar cannot promise, such
//! as a schema with a keyword that it does not know, is refused: a form is kept or not offered.

#![forbid(unsafe_code)]

use super::request::is_off;
use crate::bail;
use crate::error::{Context, Result};
use crate::grammar::Grammar;
use crate::json::{self, Limits, Value, object};

/// Fields and the kind of form that each holds.
const FIELDS: [(&str, &str); 6] = [
    ("grammar", "grammar"),
    ("json_schema", "json"),
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
];

/// The grammar of the form that a request asks for. Errors name the field, and in a schema the
/// keyword by its JSON pointer.
pub fn read(request: &Value) -> Result<Option<Grammar>> {
    let any_object = Value::Bool(true);
    let given = |name: &str| request.get(name).filter(|value| !is_off(value));
    let mut forms: Vec<(String, &str, &Value)> = Vec::new();
    if let Some(format) = given("response_format") {
        match (format.get("type").and_then(Value::as_str), format.get("schema")) {
            (Some("text"), _) => {}
            (Some("json_object"), None) => {
                forms.push(("response_format".into(), "json_object", &any_object));
            }
            (Some("json_object"), Some(schema)) => {
                forms.push(("response_format.schema".into(), "json", schema));
            }
            (Some("json_schema"), _) => {
                let schema = format.get("json_schema").and_then(|format| format.get("schema"));
                let path = "response_format.json_schema.schema";
                let Some(schema) = schema else { bail!("{path}: expected, but missing") };
                forms.push((path.into(), "json", schema));
            }
            _ => bail!("response_format.type: expected text, json_object or json_schema"),
        }
    }
    let fields = FIELDS.into_iter().filter_map(|(name, kind)| Some((name, kind, given(name)?)));
    forms.extend(fields.map(|(name, kind, value)| (name.to_string(), kind, value)));
    if let Some(outputs) = given("structured_outputs") {
        let Some(members) = outputs.as_object() else {
            bail!("structured_outputs: expected an object, found {}", outputs.kind());
        };
        let members = members.iter().filter(|(_, value)| !is_off(value));
        forms.extend(
            members
                .map(|(kind, value)| (format!("structured_outputs.{kind}"), kind.as_str(), value)),
        );
    }
    match &forms[..] {
        [] => Ok(None),
        [(path, kind, value)] => compile(kind, value).context(|| path).map(Some),
        [(first, ..), (second, ..), ..] => {
            bail!("{second}: expected one form of the reply, but {first} asks for one too")
        }
    }
}

fn compile(kind: &str, value: &Value) -> Result<Grammar> {
    let text_schema =
        |key: &str, value: Value| Grammar::from_text_schema(&object(vec![(key, value)]));
    match (kind, value) {
        ("json", Value::String(text)) => {
            Grammar::from_schema(&json::parse(text.as_bytes(), Limits::default())?)
        }
        ("json", schema) => Grammar::from_schema(schema),
        ("json_object", Value::Bool(true)) => Ok(Grammar::json_object()),
        ("grammar", Value::String(text)) => Grammar::from_gbnf(text),
        ("regex", Value::String(pattern)) => {
            // It must match all of the text, whether it says so or not.
            let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
            let open = pattern.strip_suffix('$').filter(|open| !open.ends_with('\\'));
            let pattern = format!("^(?:{})$", open.unwrap_or(pattern));
            text_schema("pattern", pattern.as_str().into())
        }
        ("choice", Value::Array(texts)) if texts.iter().all(|text| text.as_str().is_some()) => {
            text_schema("enum", value.clone())
        }
        ("json_object" | "grammar" | "regex" | "choice", _) => {
            let expected = match kind {
                "json_object" => "true",
                "choice" => "an array of strings",
                _ => "a string",
            };
            bail!("expected {expected}, found {}", value.kind())
        }
        _ => bail!("this form is not offered"),
    }
}
