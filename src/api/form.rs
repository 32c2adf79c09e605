//! The form that the content of a reply must have, by any of the names that clients know for it.
//!
//! `response_format` is OpenAI's, `grammar` and `json_schema` are llama.cpp's, `structured_outputs`
//! and `guided_…` are vLLM's. A request may ask for one form. What the grammar cannot promise, such
//! as a schema with a keyword that it does not know, is refused: a form is kept or not offered.

#![forbid(unsafe_code)]

use crate::error::{Context, Result};
use crate::grammar::Grammar;
use crate::json::{self, Field, Limits, Value, object};

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
pub fn read(request: &Field<'_>) -> Result<Option<Grammar>> {
    let mut forms: Vec<(&str, Field<'_>)> = Vec::new();
    let format = request.get("response_format");
    let kind = format.get("type");
    match (kind.value().and_then(Value::as_str), format.get("schema")) {
        _ if format.value().is_none() => {}
        (Some("text"), _) => {}
        (Some("json_object"), schema) if schema.value().is_some() => forms.push(("json", schema)),
        (Some("json_object"), _) => forms.push(("any_object", kind)),
        (Some("json_schema"), _) => forms.push(("json", format.get("json_schema").get("schema"))),
        _ => return Err(kind.refused("text, json_object or json_schema")),
    }
    forms.extend(FIELDS.map(|(name, kind)| (kind, request.get(name))).into_iter().filter(is_on));
    let outputs = request.get("structured_outputs");
    let kinds = outputs.members()?.unwrap_or_default().iter();
    let outputs = kinds.map(|(kind, _)| (kind.as_str(), outputs.get(kind)));
    forms.extend(outputs.filter(is_on));
    match &forms[..] {
        [] => Ok(None),
        [(kind, field)] => compile(kind, field).map(Some),
        [(_, first), (_, second), ..] => {
            let other = first.path();
            Err(second
                .error(format!("expected one form of the reply, but {other} asks for one too")))
        }
    }
}

/// Whether a form is asked for: many clients write `false` for none.
fn is_on((_, field): &(&str, Field<'_>)) -> bool {
    field.value().is_some_and(|value| *value != Value::Bool(false))
}

fn compile(kind: &str, field: &Field<'_>) -> Result<Grammar> {
    let text_schema =
        |key: &str, value: Value| Grammar::from_text_schema(&object(vec![(key, value)]));
    let string = || field.required_string();
    let grammar = match kind {
        "any_object" => Ok(Grammar::json_object()),
        "json_object" if field.boolean()?.is_some() => Ok(Grammar::json_object()),
        "json" => match field.value() {
            None => return Err(field.unexpected("a schema")),
            Some(Value::String(text)) => json::parse(text.as_bytes(), Limits::default())
                .and_then(|schema| Grammar::from_schema(&schema)),
            Some(schema) => Grammar::from_schema(schema),
        },
        "grammar" => Grammar::from_gbnf(string()?),
        "regex" => {
            // It must match all of the text, whether it says so or not.
            let pattern = string()?;
            let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
            let open = pattern.strip_suffix('$').filter(|open| !open.ends_with('\\'));
            text_schema("pattern", format!("^(?:{})$", open.unwrap_or(pattern)).into())
        }
        "choice" => {
            let texts = field.items()?;
            let texts = texts.iter().map(Field::required_string).collect::<Result<Vec<_>>>()?;
            text_schema("enum", texts.into())
        }
        _ => return Err(field.error("this form is not offered")),
    };
    grammar.context(|| field.path())
}
