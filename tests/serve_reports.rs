//! What users of other servers reported as broken, each as the right answer of this one. Reports
//! that other tests of the server, its HTTP layer and its parts answer are not repeated here.

#![forbid(unsafe_code)]

mod common;

use colibri::engine::Options;
use colibri::json::{self, Value};
use colibri::server::Settings;
use colibri::tokenizer::{Special, Tokenizer};
use common::serve::{
    Running, at, chat, demo, int_at, options, scripted_ids, settings, streamed, text_at,
};

const CHAT: &str = "/v1/chat/completions";
const TOOL: &str = r#""tools":[{"function":{"name":"now"}}]"#;

fn content(reply: &Value) -> &str {
    text_at(reply, "choices.0.message.content")
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&demo().join("tokenizer.json")).unwrap()
}

/// A reply that explains calls is not one.
#[test]
fn prose_that_spells_a_call_is_text() {
    let tokenizer = tokenizer();
    let mut ids = tokenizer.encode("</think>", Special::Parse);
    ids.extend(tokenizer.encode("<tool_call>", Special::Text));
    ids.push(tokenizer.token_id("<|user|>").unwrap());
    let model = scripted_ids("reports-prose", &ids, None);
    let server = Running::new(&model.0, settings(), options());
    let reply = server.chat(TOOL);
    assert_eq!(content(&reply), "<tool_call>");
    assert_eq!(text_at(&reply, "choices.0.finish_reason"), "stop");
    let events = server.post(CHAT, &chat(&format!("{TOOL},\"stream\":true"))).events();
    assert_eq!(streamed(&events, "content"), content(&reply));
}

/// Two conversations that take turns: each finds its own slot again.
#[test]
fn conversations_in_turn_recompute_only_what_is_new() {
    let options = Options { sessions: 2, ..options() };
    let server = Running::new(&demo(), Settings { kv_slots: 2, ..settings() }, options);
    let turn = |system: &str, turns: usize| {
        let user = r#"{"role":"user","content":"And then?"}"#;
        let users = vec![user; turns].join(",");
        let fields = format!(
            r#""messages":[{{"role":"system","content":"{system}"}},{users}],"max_tokens":2"#
        );
        let usage = server.chat(&fields);
        let usage = at(&usage, "usage");
        [int_at(usage, "prompt_tokens"), int_at(usage, "prompt_tokens_details.cached_tokens")]
    };
    let systems =
        ["Tell of ships and of the men who sail them.", "Speak of the garden only, and briefly."];
    let firsts = systems.map(|system| turn(system, 2));
    for (system, first) in systems.into_iter().zip(firsts) {
        let [tokens, cached] = turn(system, 3);
        assert!(tokens > first[0]);
        // All but what opens the reply and the last token before it.
        assert!(cached >= first[0] - 4, "{cached} of {first:?}");
    }
}

/// Drafts of the model's own head change how often it is run, not what it says.
#[test]
fn a_server_with_drafts_says_the_same_with_fewer_passes() {
    let reply = |drafts| {
        let server = Running::new(&demo(), settings(), Options { drafts, ..options() });
        server.chat("\"max_tokens\":40")
    };
    let (without, with) = (reply(Some(0)), reply(Some(2)));
    assert_eq!(content(&without), content(&with));
    assert_eq!(int_at(&without, "timings.draft_n"), 0);
    assert!(int_at(&with, "timings.draft_n_accepted") > 0);
}

/// What fails after the status is sent is the last event; before, it is the answer.
#[test]
fn a_fault_of_the_engine_is_an_error_object_wherever_it_strikes() {
    let tokenizer = tokenizer();
    let ids = tokenizer.encode("</think>Wait, and see", Special::Parse);
    // Not one that the prompt has, too.
    let model = scripted_ids("reports-fault", &ids, Some(ids[3]));
    let server = Running::new(&model.0, settings(), options());
    let fault = (500, "engine_error".into(), "null".into());
    assert_eq!(server.post(CHAT, &chat("")).error(), fault);
    let events = server.post(CHAT, &chat("\"stream\":true")).events();
    let (last, before) = events.split_last().unwrap();
    assert_eq!(text_at(last, "error.code"), "engine_error");
    assert!(text_at(last, "error.message").contains("NaN"), "{}", json::to_compact(last));
    let said = streamed(before, "content");
    assert!(!said.is_empty() && "Wait, and see".starts_with(&said), "{said}");
    assert_eq!(server.counter("failed"), 2);
    // One token is before the fault: the server still answers.
    assert!(said.starts_with(content(&server.chat("\"max_tokens\":1"))));
}

#[test]
fn tokens_of_the_thought_are_counted_as_such_and_as_completion() {
    let server = Running::demo();
    let usage = server.chat("\"enable_thinking\":true,\"max_tokens\":4");
    assert_eq!(int_at(&usage, "usage.completion_tokens"), 4);
    assert_eq!(int_at(&usage, "usage.completion_tokens_details.reasoning_tokens"), 4);
    let total = int_at(&usage, "usage.prompt_tokens") + 4;
    assert_eq!(int_at(&usage, "usage.total_tokens"), total);
    let usage = server.chat("");
    assert_eq!(int_at(&usage, "usage.completion_tokens_details.reasoning_tokens"), 0);
}

/// Fields of other clients and servers, in every form in which they mean nothing.
#[test]
fn what_clients_add_without_meaning_does_not_matter() {
    let server = Running::demo();
    let plain = content(&server.chat("")).to_string();
    for fields in [
        r#""messages":[{"role":"user","content":[{"type":"text","text":"What is "},
            {"type":"input_text","text":"the weather?"}],"name":"u"}]"#,
        r#""verbosity":"low","prediction":{"type":"content","content":"x"},"modalities":["text"]"#,
        r#""response_format":null,"tool_choice":null,"parallel_tool_calls":null,"tools":null"#,
        r#""grammar":null,"json_schema":false,"structured_outputs":{},"guided_choice":null"#,
        r#""tool_choice":"none","tools":[{"function":{"name":"now"}}]"#,
    ] {
        assert_eq!(content(&server.chat(fields)), plain, "{fields}");
    }
}
