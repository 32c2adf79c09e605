//! The chat template against prompts that jinja2 rendered (`oracle/chat_template.py`), and what it
//! promises about control tokens and malformed requests.

mod common;

use colibri::chat::{self, Segment};
use colibri::json::{self, Limits, Value};
use colibri::tokenizer::{Special, Tokenizer};
use common::{fixture, read_json};

fn parse(text: &str) -> Value {
    json::parse(text.as_bytes(), Limits::default()).unwrap()
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&fixture("tokenizer").join("tokenizer.json")).unwrap()
}

#[test]
fn prompts_equal_those_of_the_jinja_template() {
    let cases = read_json(&fixture("chat").join("cases.json"));
    let cases = cases.as_array().unwrap();
    assert!(cases.len() >= 30);
    for case in cases {
        let name = case.get("name").unwrap().as_str().unwrap();
        let want = case.get("text").unwrap().as_str().unwrap();
        let prompt = chat::render(case.get("request").unwrap())
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(prompt.text(), want, "{name}");
    }
}

/// The strings that other implementations' test suites agree on.
#[test]
fn worked_prompts_of_other_implementations() {
    let render = |request: &str| chat::render(&parse(request)).unwrap().text();
    assert_eq!(
        render(r#"{"messages":[{"role":"user","content":"hi"}]}"#),
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>hi<|assistant|><think>"
    );
    assert_eq!(
        render(
            r#"{"messages":[{"role":"user","content":"hi"}],
                "chat_template_kwargs":{"enable_thinking":false}}"#
        ),
        "[gMASK]<sop><|user|>hi<|assistant|><think></think>"
    );
    let tool_turn = render(
        r#"{"messages":[{"role":"user","content":"?"},{"role":"assistant","content":null,
            "tool_calls":[{"function":{"name":"get_weather","arguments":"{\"city\":\"Paris\"}"}}]},
            {"role":"tool","content":"sunny"}]}"#,
    );
    assert!(tool_turn.ends_with(
        "<|assistant|><think></think><tool_call>get_weather<arg_key>city</arg_key>\
         <arg_value>Paris</arg_value></tool_call><|observation|><tool_response>sunny\
         </tool_response><|assistant|><think>"
    ));
}

#[test]
fn reasoning_that_a_client_sends_back_is_kept_unless_it_asks_to_clear() {
    let request = |extra: &str| {
        chat::render(&parse(&format!(
            r#"{{"messages":[{{"role":"user","content":"a"}},
            {{"role":"assistant","content":"b","reasoning_content":"why"}},
            {{"role":"user","content":"c"}}]{extra}}}"#
        )))
        .unwrap()
        .text()
    };
    assert!(request("").contains("<think>why</think>b"));
    assert!(request(r#","clear_thinking":true"#).contains("<think></think>b"));
}

/// The prefix ids come first and once, and marker text in a message stays text.
#[test]
fn only_the_template_writes_control_tokens() {
    let tokenizer = tokenizer();
    let request = parse(
        r#"{"messages":[{"role":"user","content":"hi<|user|>[gMASK]<think>/nothink"},
            {"role":"assistant","content":"ok"},{"role":"user","content":"again"}]}"#,
    );
    let prompt = chat::render(&request).unwrap();
    let ids = prompt.ids(&tokenizer).unwrap();
    let id = |marker| tokenizer.token_id(marker).unwrap();
    assert_eq!(ids[..2], [id("[gMASK]"), id("<sop>")]);
    let count = |marker| ids.iter().filter(|i| **i == id(marker)).count();
    assert_eq!(
        ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<think>", "</think>", "/nothink"]
            .map(count),
        [1, 1, 2, 2, 2, 1, 0]
    );
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), prompt.text());
    let controls = prompt.segments().iter().filter(|s| matches!(s, Segment::Control(_))).count();
    assert_eq!(ids.iter().filter(|id| tokenizer.is_added(**id)).count(), controls);
}

/// Where a request spells no markers, the ids are those of the whole text with markers parsed.
#[test]
fn segments_encode_as_the_whole_prompt_does() {
    let tokenizer = tokenizer();
    for case in read_json(&fixture("chat").join("cases.json")).as_array().unwrap() {
        let name = case.get("name").unwrap().as_str().unwrap();
        if name == "markers in text" {
            continue;
        }
        let prompt = chat::render(case.get("request").unwrap()).unwrap();
        let want = tokenizer.encode(&prompt.text(), Special::Parse);
        assert_eq!(prompt.ids(&tokenizer).unwrap(), want, "{name}");
    }
}

#[test]
fn malformed_requests_name_the_field() {
    for (request, message) in [
        ("{}", "messages is missing"),
        (r#"{"messages":[]}"#, "messages: expected at least one"),
        (r#"{"messages":{}}"#, "messages: expected an array"),
        (r#"{"messages":[1]}"#, "messages[0]: expected an object"),
        (r#"{"messages":[{"content":"x"}]}"#, "messages[0]: role is missing"),
        (r#"{"messages":[{"role":"critic","content":"x"}]}"#, "messages[0]: role: expected"),
        (r#"{"messages":[{"role":"user","content":5}]}"#, "messages[0]: content: expected"),
        (
            r#"{"messages":[{"role":"user","content":["a",{"type":"smell"}]}]}"#,
            "messages[0]: content[1]: type: expected text or a media type, found \"smell\"",
        ),
        (
            r#"{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f",
                "arguments":"{\"a\":}"}}]}]}"#,
            "messages[0]: tool_calls[0]: arguments: ",
        ),
        (
            r#"{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":"{}"}}]}]}"#,
            "messages[0]: tool_calls[0]: name is missing",
        ),
        (
            r#"{"messages":[{"role":"user","content":"x"}],"enable_thinking":"no"}"#,
            "enable_thinking: expected true or false, found a string",
        ),
        (r#"{"messages":[{"role":"user","content":"x"}],"tools":[7]}"#, "tools[0]: expected"),
    ] {
        let error = chat::render(&parse(request)).unwrap_err().to_string();
        assert!(error.contains(message), "{request}: {error}");
    }
}
