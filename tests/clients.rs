//! What clients really send, byte for byte as `oracle/clients_more.py` recorded it, and whether
//! they get what they wait for. The host's name is the only thing that was changed.

#![forbid(unsafe_code)]

mod common;

use colibri::json::{self, Value};
use common::serve::{
    Answer, Running, at, demo, int_at, options, scripted, settings, streamed, text_at,
};
use std::collections::BTreeSet;
use std::io::{Read, Write};

/// A model that calls look_up(code: "42"), with and without thinking.
const CALL: &str = "<think></think>Wait.<tool_call>look_up<arg_key>code</arg_key>\
                    <arg_value>42</arg_value></tool_call><|observation|>";

/// Every recorded request with its name and what is in its body, if `is_wanted` says so.
fn requests(is_wanted: impl Fn(&Value) -> bool) -> Vec<(String, Vec<u8>, Value)> {
    let mut requests = Vec::new();
    for entry in std::fs::read_dir(common::fixture("clients")).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        // Without the sizes of chunks, if it has some.
        let start = bytes.iter().position(|byte| *byte == b'{').unwrap();
        let end = bytes.iter().rposition(|byte| *byte == b'}').unwrap();
        let body = json::parse(&bytes[start..=end], json::Limits::default()).unwrap();
        if is_wanted(&body) {
            requests.push((path.file_stem().unwrap().display().to_string(), bytes, body));
        }
    }
    requests
}

/// Whether the reply is to have a form: a named tool, or a schema.
fn is_formed(body: &Value) -> bool {
    body.get("response_format").is_some()
        || body.get("tool_choice").is_some_and(|choice| choice.as_object().is_some())
}

/// Sends the bytes and, on the same connection, one more request: clients keep it open.
fn replay(server: &Running, bytes: &[u8]) -> Answer {
    let mut stream = server.connect();
    let next = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(&[bytes, next].concat()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let second = text.rfind("HTTP/1.1 200 OK\r\n").unwrap();
    assert!(text[second..].contains("\"status\":\"ok\""), "{text}");
    Answer::parse(&text[..second])
}

/// Content and the arguments of calls, after a look at what clients rely on beside them.
fn reply(name: &str, body: &Value, answer: &Answer) -> (String, Vec<String>) {
    let is_stream = body.get("stream").and_then(Value::as_bool) == Some(true);
    let arguments = |message: &Value| {
        let calls = message.get("tool_calls").and_then(Value::as_array).unwrap_or_default();
        let texts = calls.iter().filter(|call| !text_at(call, "function.arguments").is_empty());
        texts.map(|call| text_at(call, "function.arguments").to_string()).collect::<Vec<String>>()
    };
    if !is_stream {
        let whole = answer.ok();
        assert_eq!(text_at(&whole, "object"), "chat.completion", "{name}");
        assert_eq!(text_at(&whole, "choices.0.message.role"), "assistant", "{name}");
        let sum = int_at(&whole, "usage.prompt_tokens") + int_at(&whole, "usage.completion_tokens");
        assert_eq!(int_at(&whole, "usage.total_tokens"), sum, "{name}");
        let message = at(&whole, "choices.0.message");
        let calls = arguments(message);
        let reason = text_at(&whole, "choices.0.finish_reason");
        assert_eq!(reason == "tool_calls", !calls.is_empty(), "{name}");
        let content = message.get("content").and_then(Value::as_str).unwrap_or_default();
        return (content.to_string(), calls);
    }
    let events = answer.events();
    assert_eq!(text_at(&events[0], "choices.0.delta.role"), "assistant", "{name}");
    let asks = body.get("stream_options").is_some();
    assert_eq!(events.iter().any(|event| event.get("usage").is_some()), asks, "{name}");
    let choices =
        events.iter().filter(|event| !at(event, "choices").as_array().unwrap().is_empty());
    let deltas: Vec<&Value> = choices.map(|event| at(event, "choices.0.delta")).collect();
    // The helpers of clients put calls together by their index.
    let indices = deltas.iter().filter_map(|delta| delta.get("tool_calls"));
    indices.for_each(|calls| assert_eq!(int_at(calls, "0.index"), 0, "{name}"));
    (streamed(&events, "content"), deltas.into_iter().flat_map(arguments).collect())
}

#[test]
fn what_clients_send_is_answered_as_they_need_it() {
    let caller = scripted("clients", CALL);
    let caller = Running::new(&caller.0, settings(), options());
    let demo = Running::new(&demo(), settings(), options());
    let requests = requests(|body| !is_formed(body));
    let mut said = BTreeSet::new();
    for (name, bytes, body) in &requests {
        let calls = body.get("tools").is_some();
        let answer = replay(if calls { &caller } else { &demo }, bytes);
        let (content, arguments) = reply(name, body, &answer);
        match calls {
            true => assert_eq!(
                (content.as_str(), arguments.concat().as_str()),
                ("Wait.", r#"{"code":"42"}"#)
            ),
            false => assert!(arguments.is_empty(), "{name}"),
        }
        if text_at(body, "messages.0.content").contains("the sea") && !calls {
            said.insert(content);
        }
    }
    assert_eq!(requests.len(), 8);
    // The same question at temperature 0, however it was put.
    assert_eq!(said.len(), 1, "{said:?}");
}

#[test]
fn a_form_that_a_client_prescribes_is_kept() {
    let demo = Running::new(&demo(), settings(), options());
    let requests = requests(is_formed);
    for (name, bytes, body) in &requests {
        let (content, arguments) = reply(name, body, &replay(&demo, bytes));
        let text = if arguments.is_empty() { content } else { arguments.concat() };
        let made = json::parse(text.as_bytes(), json::Limits::default()).unwrap();
        match body.get("tool_choice") {
            Some(_) => assert!(["42", "43"].contains(&text_at(&made, "code")), "{name}: {text}"),
            None => {
                assert!(["calm", "wild"].contains(&text_at(&made, "mood")), "{name}: {text}");
                assert!(at(&made, "deep").as_bool().is_some(), "{name}: {text}");
            }
        }
    }
    assert_eq!(requests.len(), 4);
}
