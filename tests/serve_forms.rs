//! Replies of `coli serve` that must have a form: content under a schema or grammar, and calls that
//! a client insists on.

#![forbid(unsafe_code)]

mod common;

use colibri::engine::Options;
use colibri::json::{self, Limits, Value};
use common::serve::{
    Answer, Running, at, chat, demo, int_at, scripted, settings, streamed, text_at,
};
use std::path::Path;

const CHAT: &str = "/v1/chat/completions";

const SHIP: &str = r##"{"type":"object","properties":{
    "name":{"type":"string","pattern":"^[a-z]{3,6}$"},
    "masts":{"type":"integer","minimum":1,"maximum":5},
    "cargo":{"type":"array","items":{"$ref":"#/$defs/good"},"maxItems":2},
    "sunk":{"type":"boolean"}},
    "required":["name","masts","cargo","sunk"],"additionalProperties":false,
    "$defs":{"good":{"enum":["tea","salt"]}}}"##;

/// Has room for the tools below.
fn serve(model: &Path) -> Running {
    let options = Options { ctx_tokens: 1024, threads: 1, ..Options::default() };
    Running::new(model, settings(), options)
}

fn content(reply: &Value) -> &str {
    text_at(reply, "choices.0.message.content")
}

fn parse(text: &str) -> Value {
    json::parse(text.as_bytes(), Limits::default()).unwrap_or_else(|e| panic!("{e}: {text}"))
}

fn assert_is_ship(text: &str) {
    let ship = parse(text);
    let keys: Vec<&str> = ship.as_object().unwrap().iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["name", "masts", "cargo", "sunk"]);
    let name = text_at(&ship, "name");
    assert!((3..=6).contains(&name.len()) && name.chars().all(|c| c.is_ascii_lowercase()));
    assert!((1..=5).contains(&int_at(&ship, "masts")), "{text}");
    let cargo = at(&ship, "cargo").as_array().unwrap();
    assert!(cargo.iter().all(|good| ["tea", "salt"].contains(&good.as_str().unwrap())), "{text}");
    assert!(cargo.len() <= 2 && at(&ship, "sunk").as_bool().is_some(), "{text}");
}

fn ship_format() -> String {
    let schema = format!("{{\"name\":\"ship\",\"strict\":true,\"schema\":{SHIP}}}");
    format!("\"response_format\":{{\"type\":\"json_schema\",\"json_schema\":{schema}}}")
}

#[test]
fn content_under_a_schema_is_valid_however_it_is_drawn() {
    let server = serve(&demo());
    let fields = ship_format() + ",\"max_tokens\":200";
    let whole = server.chat(&fields);
    assert_is_ship(content(&whole));
    assert_eq!(text_at(&whole, "choices.0.finish_reason"), "stop");
    let events = server.post(CHAT, &chat(&(fields.clone() + ",\"stream\":true"))).events();
    assert_eq!(streamed(&events, "content"), content(&whole));
    for seed in 0..4 {
        let fields = format!("{fields},\"temperature\":2,\"top_p\":1,\"seed\":{seed}");
        assert_is_ship(content(&server.chat(&fields)));
    }
}

#[test]
fn every_name_of_a_form_constrains_the_text() {
    let server = serve(&demo());
    let bad = server.post(CHAT, &chat(r#""guided_json":{"minimum":"x"}"#)).json();
    let message = text_at(&bad, "error.message");
    assert!(message.starts_with("guided_json: #/minimum"), "{message}");
    for (form, is_right) in [
        (r#""response_format":{"type":"json_object"}"#, (|t| t.starts_with('{')) as fn(&str) -> _),
        (r#""response_format":{"type":"json_object","schema":{"enum":[7]}}"#, |t| t == "7"),
        (r#""grammar":"root ::= \"ay\" | \"no\"""#, |t| t == "ay" || t == "no"),
        (r#""json_schema":{"const":[1,"a"]}"#, |t| t == r#"[1,"a"]"#),
        (r#""guided_json":"{\"type\":\"boolean\"}""#, |t| t == "true" || t == "false"),
        (r#""guided_regex":"^[0-9]{4}$""#, |t| t.len() == 4 && t.parse::<u32>().is_ok()),
        (r#""guided_choice":["\"quoted\"","naïve"]"#, |t| t == "\"quoted\"" || t == "naïve"),
        (r#""guided_grammar":"root ::= [x]{3}""#, |t| t == "xxx"),
        (r#""structured_outputs":{"regex":"a+?b\\$"}"#, |t| {
            t.starts_with('a') && t.ends_with("b$")
        }),
        (r#""structured_outputs":{"json":{"type":"null"},"grammar":null}"#, |t| t == "null"),
    ] {
        let reply = server.chat(&format!("{form},\"max_tokens\":60"));
        assert!(is_right(content(&reply)), "{form}: {}", content(&reply));
        let raw = format!("{{\"prompt\":\"It was\",\"temperature\":0,\"max_tokens\":60,{form}}}");
        let raw = server.post("/v1/completions", &raw).ok();
        assert!(is_right(text_at(&raw, "choices.0.text")), "{form}");
    }
}

#[test]
fn a_form_that_cannot_be_kept_is_refused_before_it_waits() {
    let server = serve(&demo());
    let tool = |schema: &str| {
        format!(
            r#""tool_choice":"required",
            "tools":[{{"function":{{"name":"f","parameters":{schema}}}}}]"#
        )
    };
    let format = |schema: &str| {
        format!(r#""response_format":{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}"#)
    };
    let path = "response_format.json_schema.schema";
    for (fields, param, text) in [
        (
            format(r#"{"properties":{"a":{"type":"number","multipleOf":3}}}"#),
            path,
            "#/properties/a/multipleOf: unsupported keyword",
        ),
        (format(r##"{"$ref":"#/$defs/no"}"##), path, "#/$ref"),
        (format(r#"{"type":"string","pattern":"*b"}"#), path, "#/pattern"),
        (format(r#"{"type":"string","pattern":"{3}b"}"#), path, "#/pattern"),
        (
            format(&format!(r#"{{"type":"string","pattern":"{}"}}"#, "(".repeat(10_000))),
            path,
            "#/pattern",
        ),
        (
            r#""response_format":{"type":"json_schema","json_schema":{"name":"n"}}"#.into(),
            path,
            "missing",
        ),
        (r#""response_format":{"type":"xml"}"#.into(), "response_format.type", "expected"),
        (r#""grammar":"root = 1""#.into(), "grammar", "line 1, column 6"),
        (r#""guided_choice":[1]"#.into(), "guided_choice[0]", "expected a string, found"),
        (r#""structured_outputs":{"regex":1}"#.into(), "structured_outputs.regex", "a string"),
        (
            r#""structured_outputs":{"structural_tag":"x"}"#.into(),
            "structured_outputs.structural_tag",
            "not offered",
        ),
        (
            r#""guided_regex":"a","grammar":"root ::= \"a\"""#.into(),
            "guided_regex",
            "grammar asks for one too",
        ),
        (
            tool(r#"{"properties":{"a":{"type":"array","uniqueItems":true}}}"#),
            "tools",
            "parameters of f: #/properties/a/uniqueItems: unsupported keyword",
        ),
        (tool(r#"{"anyOf":[{}]}"#), "tools", "#/anyOf"),
        (
            tool(r#"{"required":["a"],"additionalProperties":false}"#),
            "tools",
            "#/required: `a` is no property",
        ),
        (r#""tool_choice":"required""#.into(), "tool_choice", "expected tools"),
        (
            tool("{}").replace("\"required\"", r#"{"type":"function","function":{"name":"g"}}"#),
            "tool_choice",
            "no tool of the request is called",
        ),
    ] {
        let answer = server.post(CHAT, &chat(&fields));
        assert_eq!(answer.error(), (400, "null".into(), param.into()), "{fields}");
        assert!(answer.body.contains(text), "{text}: {}", answer.body);
    }
    assert_eq!(server.counter("admitted"), 0);
}

/// The thought is free, but has to end: a turn that ended within it would have content of no form.
#[test]
fn a_form_begins_behind_the_thought_and_outlives_a_turn_that_ends_in_it() {
    let fields = ship_format() + ",\"enable_thinking\":true,\"max_tokens\":200";
    let model = scripted("forms-thought", "<think>hm</think>Wait<|user|>");
    let server = serve(&model.0);
    for stream in [false, true] {
        let (reasoning, content) = if stream {
            let events = server.post(CHAT, &chat(&(fields.clone() + ",\"stream\":true"))).events();
            (streamed(&events, "reasoning_content"), streamed(&events, "content"))
        } else {
            let reply = server.chat(&fields);
            let text = |name| text_at(&reply, &format!("choices.0.message.{name}")).to_string();
            (text("reasoning_content"), text("content"))
        };
        assert_eq!(reasoning, "hm");
        assert_is_ship(&content);
    }
    let model = scripted("forms-unclosed", "<think>Paris<|user|>");
    let server = serve(&model.0);
    let reply = server.chat(&fields.replace("200", "20"));
    assert_eq!((content(&reply), text_at(&reply, "choices.0.finish_reason")), ("", "length"));
    assert!(text_at(&reply, "choices.0.message.reasoning_content").starts_with("Paris"));
}

const TOOLS: &str = r##""tools":[
    {"type":"function","function":{"name":"sail","strict":true,"parameters":{"type":"object",
        "properties":{"to":{"$ref":"#/$defs/port"},
            "knots":{"type":"integer","minimum":1,"maximum":9},
            "crew":{"type":"array","items":{"enum":["Ann","Bob"]},"minItems":1,"maxItems":2},
            "note":{"anyOf":[{"type":"string","maxLength":3},{"type":"null"}]},
            "code":{"pattern":"^00[0-9]$"}},
        "required":["to","knots","crew","code"],
        "$defs":{"port":{"type":"string","enum":["007","true","Bath \"old\""]}}}}},
    {"type":"function","function":{"name":"now"}}]"##;

/// Name and arguments of a call, which must be valid.
fn assert_is_call(name: &str, arguments: &str) {
    let arguments = parse(arguments);
    let keys: Vec<&str> = arguments.as_object().unwrap().iter().map(|(k, _)| k.as_str()).collect();
    if name == "now" {
        assert!(keys.is_empty(), "{keys:?}");
        return;
    }
    assert_eq!(name, "sail");
    let required: Vec<&str> = keys.iter().copied().filter(|key| *key != "note").collect();
    assert_eq!(required, ["to", "knots", "crew", "code"]);
    assert!(["007", "true", "Bath \"old\""].contains(&text_at(&arguments, "to")));
    assert!((1..=9).contains(&int_at(&arguments, "knots")));
    let crew = at(&arguments, "crew").as_array().unwrap();
    assert!(crew.iter().all(|name| ["Ann", "Bob"].contains(&name.as_str().unwrap())));
    assert!((1..=2).contains(&crew.len()));
    let code = text_at(&arguments, "code");
    assert!(code.len() == 3 && code.starts_with("00"), "{code}");
    if let Some(note) = arguments.get("note") {
        assert!(note.is_null() || note.as_str().unwrap().chars().count() <= 3);
    }
}

/// The calls of a whole reply.
fn calls(reply: &Value) -> Vec<(String, String)> {
    let calls = at(reply, "choices.0.message.tool_calls").as_array().unwrap().iter();
    let word = |call: &Value, path| text_at(call, path).to_string();
    calls.map(|call| (word(call, "function.name"), word(call, "function.arguments"))).collect()
}

/// The calls of a stream, put together as clients do, and the fragments of their arguments.
fn streamed_calls(answer: &Answer) -> (Vec<(String, String)>, usize) {
    let (mut calls, mut fragments) = (Vec::<(String, String)>::new(), 0);
    for event in answer.events() {
        let Some(delta) = at(&event, "choices.0.delta").get("tool_calls") else { continue };
        for call in delta.as_array().unwrap() {
            let index = int_at(call, "index") as usize;
            if let Some(name) = at(call, "function").get("name") {
                assert_eq!(index, calls.len());
                assert!(text_at(call, "id").starts_with("call_"));
                calls.push((name.as_str().unwrap().into(), String::new()));
            }
            assert_eq!(index + 1, calls.len());
            calls[index].1 += text_at(call, "function.arguments");
            fragments += 1;
        }
    }
    (calls, fragments)
}

#[test]
fn a_call_that_a_client_insists_on_comes_and_is_valid() {
    let server = serve(&demo());
    let named = r#"{"type":"function","function":{"name":"sail"}}"#;
    for seed in 0..6 {
        let fields = |choice: &str| {
            format!(
                "{TOOLS},\"tool_choice\":{choice},\"max_tokens\":150,\"temperature\":1.5,\
                 \"seed\":{seed},\"parallel_tool_calls\":false"
            )
        };
        let whole = server.chat(&fields(named));
        assert_eq!(text_at(&whole, "choices.0.finish_reason"), "tool_calls");
        assert!(at(&whole, "choices.0.message.content").is_null());
        let found = calls(&whole);
        assert_eq!((found.len(), found[0].0.as_str()), (1, "sail"));
        assert_is_call("sail", &found[0].1);
        let answer = server.post(CHAT, &chat(&(fields(named) + ",\"stream\":true")));
        let (streamed, fragments) = streamed_calls(&answer);
        assert_eq!(streamed, found);
        assert!(fragments > 4, "the arguments came in {fragments} fragments");
        let found = calls(&server.chat(&fields("\"required\"")));
        assert_eq!(found.len(), 1);
        assert_is_call(&found[0].0, &found[0].1);
    }
}

#[test]
fn a_forced_call_comes_behind_the_thought_and_once_unless_several_may() {
    let script = "<think>hm</think>Wait.<tool_call>now</tool_call><|observation|>";
    let model = scripted("forms-call", script);
    let server = serve(&model.0);
    let fields = format!("{TOOLS},\"tool_choice\":\"required\",\"max_tokens\":40");
    let reply = server.chat(&(fields.clone() + ",\"enable_thinking\":true"));
    assert_eq!(text_at(&reply, "choices.0.message.reasoning_content"), "hm");
    assert_eq!(calls(&reply), [("now".into(), "{}".into())]);
    assert!(at(&reply, "choices.0.message.content").is_null());
    // A bias that makes it call again and again: only one may be, or as many as there is room for.
    let again = fields + ",\"logit_bias\":{\"3059\":50}";
    assert!(calls(&server.chat(&again)).len() > 1);
    let once = server.chat(&(again + ",\"parallel_tool_calls\":false"));
    assert_eq!(calls(&once).len(), 1);
}

#[test]
fn with_tools_and_a_form_the_reply_is_a_call_or_has_the_form() {
    let fields = format!("{TOOLS},{},\"max_tokens\":200", ship_format());
    let model = scripted("forms-or-call", "</think><tool_call>now</tool_call><|observation|>");
    let called = serve(&model.0).chat(&fields);
    assert_eq!(calls(&called), [("now".into(), "{}".into())]);
    let model = scripted("forms-or-text", "</think>{Wait<|user|>");
    let said = serve(&model.0).chat(&fields);
    assert_is_ship(content(&said));
}

#[test]
fn a_part_that_the_model_cannot_read_is_refused_by_its_path() {
    let server = serve(&demo());
    for kind in ["image_url", "input_audio", "video_url"] {
        let body = chat(&format!(
            r#""messages":[{{"role":"system","content":"s"}},{{"role":"user","content":[
            {{"type":"text","text":"What is this?"}},
            {{"type":"{kind}","{kind}":{{"url":"x"}}}}]}}]"#
        ));
        for path in [CHAT, "/tokenize"] {
            let answer = server.post(path, &body);
            assert_eq!(answer.error(), (400, "null".into(), "messages[1].content[1]".into()));
            assert!(answer.body.contains(kind), "{}", answer.body);
        }
    }
}
