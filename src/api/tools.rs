//! Tool calls: from the tokens between the model's markers to a name and JSON arguments.
//!
//! A call is `<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` for each
//! argument, then `</tool_call>`. Markers are found by token id, so text that spells them out makes
//! no call. The schema of the tool says what a value is ([`read_argument`]). A reply that must call
//! has a grammar that knows the same form.

#![forbid(unsafe_code)]

use super::random_hex;
use crate::bail;
use crate::error::{Context, Result};
use crate::grammar::{CallForm, Grammar, Tool, read_argument};
use crate::json::{Field, Value, to_compact};
use crate::tokenizer::Tokenizer;
use std::collections::HashSet;
use std::ops::Range;

/// What a reply may call.
pub struct Tools {
    declared: Vec<Tool>,
    /// Those that a forced call may name.
    callable: Range<usize>,
    /// The markers.
    pub form: CallForm,
    /// Whether the reply must be calls.
    pub must_call: bool,
    /// Whether one reply may hold several calls.
    pub parallel: bool,
}

/// `tool_choice`.
#[derive(PartialEq)]
enum Choice<'a> {
    None,
    Auto,
    Required,
    Named(&'a str),
}

fn read_choice<'a>(choice: &Field<'a>) -> Result<Choice<'a>> {
    match choice.value() {
        None => Ok(Choice::Auto),
        Some(Value::String(word)) if word == "auto" => Ok(Choice::Auto),
        Some(Value::String(word)) if word == "none" => Ok(Choice::None),
        Some(Value::String(word)) if word == "required" => Ok(Choice::Required),
        Some(_) => match choice.get("function").or(choice.clone()).get("name").value() {
            Some(Value::String(name)) => Ok(Choice::Named(name)),
            _ => Err(choice.error("expected auto, none, required or a named function")),
        },
    }
}

/// A call, or one more part of its arguments: that has neither id nor name.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// `call_` and 24 hexadecimal digits.
    pub id: String,
    /// The function.
    pub name: String,
    /// A JSON object, or a part of one.
    pub arguments: String,
}

impl Tools {
    /// The tools of a request; `None` if it has none, or does not want them called. Errors name
    /// the field.
    pub fn read(request: &Field<'_>, tokenizer: &Tokenizer) -> Result<Option<Tools>> {
        let (mut declared, mut names) = (Vec::new(), HashSet::new());
        for tool in request.get("tools").items()? {
            let function = tool.get("function").or(tool);
            let name = function.get("name");
            match name.value().and_then(Value::as_str).filter(|name| is_name(name)) {
                // Of two with one name the first counts, as for references in the prompt.
                Some(text) if names.insert(text) => {
                    let parameters = function.get("parameters").value();
                    let parameters = parameters.cloned().unwrap_or(Value::Null);
                    declared.push(Tool { name: text.into(), parameters });
                }
                Some(_) => {}
                None => return Err(name.error("expected letters, digits and ._-")),
            }
        }
        let parallel = request.get("parallel_tool_calls").boolean()?.unwrap_or(true);
        let choice = read_choice(&request.get("tool_choice"))?;
        let must_call = matches!(choice, Choice::Required | Choice::Named(_));
        if choice == Choice::None || (declared.is_empty() && !must_call) {
            return Ok(None);
        }
        let callable = match choice {
            Choice::Named(name) => {
                match declared.iter().position(|tool: &Tool| tool.name == name) {
                    Some(at) => at..at + 1,
                    None => bail!("tool_choice: no tool of the request is called {name:?}"),
                }
            }
            _ if declared.is_empty() => bail!("tool_choice: expected tools to choose from"),
            _ => 0..declared.len(),
        };
        let pair = |name: &str| {
            let open = tokenizer.token_id(&format!("<{name}>"))?;
            Some([open, tokenizer.token_id(&format!("</{name}>"))?])
        };
        let pairs = (pair("tool_call"), pair("arg_key"), pair("arg_value"));
        let (Some(call), Some(key), Some(value)) = pairs else {
            bail!("tools: the tokenizer has no markers for calls");
        };
        let parallel = parallel && !matches!(choice, Choice::Named(_));
        let form = CallForm { call, key, value };
        Ok(Some(Tools { declared, callable, form, must_call, parallel }))
    }

    /// What the reply is if it consists of calls. Error: a schema that has no grammar.
    pub fn grammar(&self) -> Result<Grammar> {
        let callable = &self.declared[self.callable.clone()];
        Grammar::from_calls(callable, &self.form, self.parallel).context(|| "tools")
    }

    /// The call whose tokens between the markers are `ids`; `None` if they do not have the form.
    /// Without its end a call counts if nothing is cut off: its last argument is complete, or it
    /// has none and the tool takes none.
    pub fn parse(&self, ids: &[u32], is_ended: bool, tokenizer: &Tokenizer) -> Option<Call> {
        let text = |ids: &[u32]| tokenizer.decode(ids, true).ok();
        let start = ids.iter().position(|id| *id == self.form.key[0]).unwrap_or(ids.len());
        let name = text(&ids[..start])?.trim().to_string();
        if !is_name(&name) {
            return None;
        }
        let tool = self.declared.iter().find(|tool| tool.name == name);
        let parameters = tool.map_or(&Value::Null, |tool| &tool.parameters);
        let mut rest = &ids[start..];
        let mut arguments: Vec<(String, Value)> = Vec::new();
        while let Some((key, after)) = self.between(rest, self.form.key) {
            let (value, after) = self.between(skip_blank(after, tokenizer), self.form.value)?;
            let key = text(key)?.trim().to_string();
            let value = read_argument(parameters, &key, text(value)?);
            // Said twice, the last one counts: an object has no key twice.
            arguments.retain(|(earlier, _)| *earlier != key);
            arguments.push((key, value));
            rest = skip_blank(after, tokenizer);
        }
        let has_members = |value: &Value| value.as_object().is_some_and(|m| !m.is_empty());
        let takes_none =
            || tool.is_some() && !parameters.get("properties").is_some_and(has_members);
        if !rest.is_empty() || !(is_ended || !arguments.is_empty() || takes_none()) {
            return None;
        }
        let id = random_hex() + &random_hex()[..8];
        Some(Call {
            id: format!("call_{id}"),
            name,
            arguments: to_compact(&Value::Object(arguments)),
        })
    }

    /// What stands between the two markers with which `ids` begins, and what follows them. A
    /// marker within says that one is missing.
    fn between<'a>(&self, ids: &'a [u32], pair: [u32; 2]) -> Option<(&'a [u32], &'a [u32])> {
        let rest = ids.strip_prefix(&[pair[0]])?;
        let CallForm { key, value, .. } = self.form;
        let is_marker = |id: &u32| key.contains(id) || value.contains(id);
        let end = rest.iter().position(is_marker)?;
        (rest[end] == pair[1]).then(|| (&rest[..end], &rest[end + 1..]))
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
}

/// Without the white space at the start.
fn skip_blank<'a>(ids: &'a [u32], tokenizer: &Tokenizer) -> &'a [u32] {
    let is_blank = |id: &u32| tokenizer.token_bytes(*id).is_some_and(|b| b.trim_ascii().is_empty());
    &ids[ids.iter().take_while(|id| is_blank(id)).count()..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::{self, Limits};
    use crate::tokenizer::Special;
    use std::hash::{BuildHasher, RandomState};
    use std::path::Path;

    fn tokenizer() -> Tokenizer {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        Tokenizer::load(&root.join("tests/fixtures/tokenizer/tokenizer.json")).unwrap()
    }

    fn tools(schemas: &str) -> Tools {
        let request = json::parse(schemas.as_bytes(), Limits::default()).unwrap();
        Tools::read(&Field::root(&request), &tokenizer()).unwrap().unwrap()
    }

    /// Name and arguments of the call between the markers.
    fn call(tools: &Tools, text: &str, is_ended: bool) -> Option<(String, String)> {
        let tokenizer = tokenizer();
        let call = tools.parse(&tokenizer.encode(text, Special::Parse), is_ended, &tokenizer)?;
        assert!(call.id.starts_with("call_") && call.id.len() == 29, "{}", call.id);
        Some((call.name, call.arguments))
    }

    fn argument(key: &str, value: &str) -> String {
        format!("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>")
    }

    #[test]
    fn the_schema_decides_what_a_value_is() {
        let tools = tools(
            r##"{"tools":[{"function":{"name":"f","parameters":{"properties":{
            "text":{"type":"string"},"count":{"type":"integer"},"ratio":{"type":"number"},
            "on":{"type":"boolean"},"list":{"type":"array"},"kind":{"enum":["1","2"]},
            "maybe":{"anyOf":[{"type":"string"},{"type":"null"}]},
            "both":{"type":["integer","null"]},
            "named":{"allOf":[{"$ref":"#/$defs/n"}]}},"$defs":{"n":{"enum":["1"]}}}}}]}"##,
        );
        for (key, value, want) in [
            ("text", "007", "\"007\""),
            ("text", "true", "\"true\""),
            ("text", " a\n<b> ", "\" a\\n<b> \""),
            ("count", "42", "42"),
            ("count", "true", "\"true\""),
            ("count", "4.5", "\"4.5\""),
            ("count", "many", "\"many\""),
            ("ratio", "42", "42"),
            ("ratio", "0.5", "0.5"),
            ("on", "true", "true"),
            ("list", "[1, \"a\"]", "[1,\"a\"]"),
            ("kind", "1", "\"1\""),
            ("named", "1", "\"1\""),
            ("maybe", "5", "\"5\""),
            ("maybe", "null", "null"),
            ("both", "null", "null"),
            ("undeclared", "42", "42"),
            ("undeclared", "plain words", "\"plain words\""),
        ] {
            let got = call(&tools, &("f".to_string() + &argument(key, value)), true);
            let want = Some(("f".into(), format!("{{\"{key}\":{want}}}")));
            assert_eq!(got, want, "{key} {value}");
        }
    }

    /// `COLI_FUZZ_SEED=<number>` repeats a run.
    #[test]
    fn whatever_a_model_writes_is_a_whole_call_or_none() {
        let given = std::env::var("COLI_FUZZ_SEED").ok().and_then(|text| text.parse().ok());
        let seed: u64 = given.unwrap_or_else(|| RandomState::new().hash_one(0)) | 1;
        let (tokenizer, mut state, mut calls) = (tokenizer(), seed, 0);
        let tools = tools(r#"{"tools":[{"name":"f","parameters":{"properties":{"a":{}}}}]}"#);
        let parts =
            ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "f", "a", " ", "[1,{", "é"];
        let parts = parts.map(|part| tokenizer.encode(part, Special::Parse));
        for case in 0..50_000 {
            let mut ids = parts[4].clone();
            for part in 0..case % 12 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                // Mostly in an order that makes a call.
                let likely = [0, 5, 1, 2, 7, 3][part % 6];
                let any = (state >> 33) as usize % parts.len();
                ids.extend(&parts[if state % 4 == 0 { any } else { likely }]);
            }
            let Some(call) = tools.parse(&ids, state % 2 == 0, &tokenizer) else { continue };
            calls += 1;
            let arguments = json::parse(call.arguments.as_bytes(), Limits::default());
            assert!(arguments.is_ok_and(|a| a.as_object().is_some()), "COLI_FUZZ_SEED={seed}");
            let opened = ids.iter().filter(|id| **id == tools.form.key[0]).count();
            let closed = ids.iter().filter(|id| **id == tools.form.value[1]).count();
            assert_eq!(opened, closed, "COLI_FUZZ_SEED={seed} case {case}: {ids:?}");
        }
        assert!(calls > 1000, "COLI_FUZZ_SEED={seed}: {calls} calls");
    }

    #[test]
    fn a_call_counts_only_when_nothing_of_it_is_missing() {
        let tools = tools(
            r#"{"tools":[{"function":{"name":"now"}},
            {"name":"f","parameters":{"properties":{"a":{}, "b":{}}}}]}"#,
        );
        let some = |name: &str, arguments: &str| Some((name.to_string(), arguments.to_string()));
        let (a, b) = (argument("a", "1"), argument("b", "2"));
        assert_eq!(call(&tools, "now", true), some("now", "{}"));
        assert_eq!(call(&tools, " now\n", false), some("now", "{}"));
        assert_eq!(call(&tools, &format!("f{a}\n{b}\n"), true), some("f", r#"{"a":1,"b":2}"#));
        assert_eq!(call(&tools, &format!("f{a}{b}{a}"), true), some("f", r#"{"b":2,"a":1}"#));
        assert_eq!(call(&tools, &format!("f{a}"), false), some("f", r#"{"a":1}"#));
        // It may have wanted arguments, or more of the name.
        assert_eq!(call(&tools, "f", false), None);
        assert_eq!(call(&tools, "unknown", false), None);
        for text in [
            "",
            " ",
            "{\"name\":\"f\",\"arguments\":{}}",
            "f<arg_key>a</arg_key>",
            "f<arg_key>a</arg_key><arg_value>1",
            "f<arg_key>a",
            "f<arg_value>1</arg_value>",
            "f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value>",
            "f<arg_key>a</arg_key>b<arg_value>1</arg_value>",
        ] {
            assert_eq!(call(&tools, text, true), None, "{text}");
            assert_eq!(call(&tools, text, false), None, "{text}");
        }
        assert_eq!(call(&tools, &format!("f{a}and so on"), true), None);
    }
}
