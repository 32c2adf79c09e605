//! What a request to `coli serve` may say: every field that changes the reply, those that are
//! refused by name, and the forms that a reply takes.

#![forbid(unsafe_code)]

mod common;

use colibri::engine::Options;
use colibri::json::{self, Value};
use colibri::server::Settings;
use common::serve::{
    Running, at, chat, demo, int_at, options, scripted, settings, streamed, text_at,
};
use std::sync::Mutex;

const CHAT: &str = "/v1/chat/completions";

fn content(reply: &Value) -> &str {
    text_at(reply, "choices.0.message.content")
}

fn finish_reason(reply: &Value) -> &str {
    text_at(reply, "choices.0.finish_reason")
}

#[test]
fn fields_that_are_not_honoured_are_refused_by_name() {
    let server = Running::demo();
    for (fields, code, param) in [
        (r#""n":2"#, "unsupported_value", "n"),
        (r#""functions":[{"name":"f"}]"#, "unsupported_parameter", "functions"),
        (r#""suffix":"x""#, "unsupported_parameter", "suffix"),
        (r#""ignore_eos":true"#, "unsupported_parameter", "ignore_eos"),
        (r#""repeat_penalty":1.1"#, "unsupported_parameter", "repeat_penalty"),
        (r#""tool_choice":{"type":"function"}"#, "null", "tool_choice"),
        (r#""tool_choice":"perhaps""#, "null", "tool_choice"),
        (r#""tool_choice":1"#, "null", "tool_choice"),
        (r#""temperature":2.5"#, "null", "temperature"),
        (r#""temperature":"hot""#, "null", "temperature"),
        (r#""top_p":0"#, "null", "top_p"),
        (r#""top_k":-2"#, "null", "top_k"),
        (r#""min_p":2"#, "null", "min_p"),
        (r#""repetition_penalty":0"#, "null", "repetition_penalty"),
        (r#""presence_penalty":3"#, "null", "presence_penalty"),
        (r#""frequency_penalty":-3"#, "null", "frequency_penalty"),
        (r#""seed":1.5"#, "null", "seed"),
        (r#""logit_bias":{"sea":1}"#, "null", "logit_bias"),
        (r#""logit_bias":{"999999":1}"#, "null", "logit_bias"),
        (r#""logit_bias":{"1":"much"}"#, "null", "logit_bias"),
        (r#""logit_bias":{"1":101}"#, "null", "logit_bias"),
        (r#""max_tokens":0"#, "null", "max_tokens"),
        (r#""max_completion_tokens":-5"#, "null", "max_completion_tokens"),
        (r#""max_tokens":"ten""#, "null", "max_tokens"),
        (r#""stop":"""#, "null", "stop"),
        (r#""stop":[1]"#, "null", "stop"),
        (r#""top_logprobs":3"#, "null", "top_logprobs"),
        (r#""logprobs":true,"top_logprobs":21"#, "null", "top_logprobs"),
        (r#""stream":"yes""#, "null", "stream"),
        (r#""stream_options":true"#, "null", "stream_options"),
        (r#""model":7"#, "null", "model"),
        (r#""reasoning_effort":3"#, "null", "reasoning_effort"),
        (r#""enable_thinking":"no""#, "null", "enable_thinking"),
        (r#""tools":{}"#, "null", "tools"),
        (r#""tools":[{"function":{}}]"#, "null", "tools[0].function.name"),
        (r#""parallel_tool_calls":1"#, "null", "parallel_tool_calls"),
        (r#""guided_choice":[]"#, "null", "guided_choice"),
        (r#""grammar":"""#, "null", "grammar"),
        (r#""messages":[]"#, "null", "messages"),
        (r#""messages":[{"role":"function","content":""}]"#, "null", "messages[0].role"),
        (r#""messages":[{"role":"user","content":1}]"#, "null", "messages[0].content"),
    ] {
        let answer = server.post(CHAT, &chat(fields));
        assert_eq!(answer.status, 400, "{fields}");
        assert_eq!(answer.error(), (400, code.into(), param.into()), "{fields}");
    }
    for (fields, found) in [(r#""top_k":-2"#, "found -2"), (r#""top_k":1.5"#, "found 1.5")] {
        let answer = server.post(CHAT, &chat(fields));
        assert!(text_at(&answer.json(), "error.message").ends_with(found), "{fields}");
    }
    assert_eq!(server.counter("admitted"), 0);
    let neutral = r#""n":1,"functions":null,"suffix":"","ignore_eos":false,"stop":null,"seed":null,
        "logit_bias":null,"tools":[],"tool_choice":"auto","response_format":{"type":"text"},
        "stream":false,"stream_options":null,"top_k":-1,"user":"u","metadata":{},"store":false,
        "service_tier":"auto","prompt_cache_key":"k","something_new":[1]"#;
    assert_eq!(content(&server.chat(neutral)), content(&server.chat("")));
}

#[test]
fn every_refusal_has_the_same_shape() {
    let server = Running::demo();
    let get =
        |path: &str| format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    let deep = format!("{{\"messages\":{}", "[".repeat(100_000));
    let unknown = format!("{{\"other\":{}", "[".repeat(100_000));
    let post = |body: &str| common::serve::post(CHAT, body, "");
    for (request, status, code) in [
        (get("/v1/nowhere") + "\r\n", 404, "not_found"),
        (get("/v1/models/other") + "\r\n", 404, "model_not_found"),
        (get(CHAT) + "\r\n", 405, "method_not_allowed"),
        (get("/") + "Content-Length: x\r\n\r\n", 400, "null"),
        (get("/") + "Host: other\r\n\r\n", 400, "null"),
        (common::serve::post("/v1/models", "{}", ""), 405, "method_not_allowed"),
        (
            format!(
                "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000000\r\n\r\n"
            ),
            413,
            "request_too_large",
        ),
        (post(""), 400, "null"),
        (post("{"), 400, "null"),
        (post("[]"), 400, "null"),
        (post("{\"a\":1,\"a\":2}"), 400, "null"),
        (post(&deep), 400, "null"),
        (post(&unknown), 400, "null"),
    ] {
        let (found, found_code, _) = server.talk(&request).error();
        assert_eq!((found, found_code.as_str()), (status, code), "{}", &request[..60]);
    }
    assert!(server.talk(&(get(CHAT) + "\r\n")).head.contains("\r\nAllow: POST"));
    assert!(!content(&server.chat("")).is_empty());
}

#[test]
fn a_prompt_beyond_the_context_is_refused_with_both_numbers() {
    let server = Running::new(&demo(), settings(), Options { ctx_tokens: 64, ..options() });
    let ids = vec!["5"; 100].join(",");
    let body = format!("{{\"prompt\":[{ids}],\"max_tokens\":7}}");
    let answer = server.post("/v1/completions", &body);
    let refused = (400, "context_length_exceeded".into(), "prompt".into());
    assert_eq!(answer.error(), refused);
    let message = answer.json();
    let message = text_at(&message, "error.message");
    let want = "the context holds 64 tokens, but the prompt has 100, and 7 more are requested; \
                shorten the prompt, or start the server with a larger --ctx";
    assert_eq!(message, want);
    assert_eq!(server.counter("admitted"), 0);
    // One that fits is answered as far as there is room: the last token needs no place.
    let ids = vec!["5"; 60].join(",");
    let body = format!("{{\"prompt\":[{ids}],\"max_tokens\":700,\"logit_bias\":{{\"7\":100}}}}");
    let reply = server.post("/v1/completions", &body).ok();
    assert_eq!((finish_reason(&reply), int_at(&reply, "usage.completion_tokens")), ("length", 5));
}

#[test]
fn the_newer_name_of_the_limit_wins() {
    let server = Running::demo();
    for (fields, tokens) in [
        (r#""max_tokens":3"#, 3),
        (r#""max_completion_tokens":4"#, 4),
        (r#""max_completion_tokens":5,"max_tokens":2"#, 5),
        (r#""max_completion_tokens":null,"max_tokens":2"#, 2),
    ] {
        let reply = server.chat(fields);
        assert_eq!(int_at(&reply, "usage.completion_tokens"), tokens, "{fields}");
        assert_eq!(finish_reason(&reply), "length");
    }
}

#[test]
fn a_seed_repeats_a_draw_and_another_one_does_not() {
    let server = Running::demo();
    let draw = |seed: &str| {
        let fields = format!("\"temperature\":1,\"top_p\":1,\"seed\":{seed},\"max_tokens\":12");
        content(&server.chat(&fields)).to_string()
    };
    assert_eq!(draw("7"), draw("7"));
    assert_ne!(draw("7"), draw("8"));
    assert_ne!(draw("null"), draw("null"));
    assert_ne!(draw("-1"), draw("7"));
}

#[test]
fn sampling_fields_reach_the_sampler() {
    let server = Running::demo();
    let greedy = content(&server.chat("")).to_string();
    let biased = server.chat(r#""logit_bias":{"300":100}"#);
    let one = server.post("/detokenize", r#"{"tokens":[300]}"#).ok();
    assert_eq!(content(&biased), text_at(&one, "content").repeat(16));
    assert_ne!(content(&server.chat(r#""repetition_penalty":5"#)), greedy);
    let twice = server.chat(r#""logit_bias":{"300":50,"301":49},"presence_penalty":2"#);
    assert_ne!(content(&twice), text_at(&one, "content").repeat(16));
    for fields in [r#""temperature":2,"top_k":1"#, r#""temperature":2,"min_p":1"#] {
        assert_eq!(content(&server.chat(fields)), greedy, "{fields}");
    }
}

#[test]
fn log_probabilities_are_those_of_the_tokens_of_the_content() {
    let server = Running::demo();
    let fields = r#""logprobs":true,"top_logprobs":2,"max_tokens":6"#;
    let whole = server.chat(fields);
    let tokens = at(&whole, "choices.0.logprobs.content").as_array().unwrap();
    assert_eq!(tokens.len(), 6);
    let text: String = tokens.iter().map(|token| text_at(token, "token")).collect();
    assert_eq!(text, content(&whole));
    for token in tokens {
        // Greedy: the token is the best one.
        assert_eq!(at(token, "logprob"), at(token, "top_logprobs.0.logprob"));
        assert!(at(token, "top_logprobs.1.logprob").as_f64() <= at(token, "logprob").as_f64());
        assert!(at(token, "logprob").as_f64().unwrap() < 0.0);
    }
    let stream = server.post(CHAT, &chat(&(fields.to_string() + ",\"stream\":true"))).events();
    let lists = stream.iter().filter_map(|event| {
        event.get("choices")?.as_array()?.first()?.get("logprobs")?.get("content")?.as_array()
    });
    assert_eq!(&lists.flatten().cloned().collect::<Vec<_>>(), tokens);
}

#[test]
fn a_completion_echoes_its_prompt_and_weighs_it() {
    let server = Running::demo();
    let body = |more: &str| format!("{{\"prompt\":\"It was a fine\",\"temperature\":0{more}}}");
    let post = |more: &str| server.post("/v1/completions", &body(more)).ok();
    let plain = post(",\"max_tokens\":4");
    let echoed = post(",\"max_tokens\":4,\"echo\":true,\"logprobs\":1");
    let text = format!("It was a fine{}", text_at(&plain, "choices.0.text"));
    assert_eq!(text_at(&echoed, "choices.0.text"), text);
    let list = |name: &str| {
        at(&echoed, &format!("choices.0.logprobs.{name}")).as_array().unwrap().to_vec()
    };
    assert!(list("token_logprobs")[0].is_null() && list("top_logprobs")[0].is_null());
    assert_eq!(list("token_logprobs").len(), 8);
    let tokens = list("tokens");
    let tokens: Vec<&str> = tokens.iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(tokens.concat(), text);
    assert_eq!(list("text_offset")[3], Value::Int("It was a".len() as i64));
    // What the prompt alone weighs does not depend on what follows it.
    let scored = post(",\"max_tokens\":0,\"echo\":true,\"logprobs\":0");
    let scored = at(&scored, "choices.0.logprobs.token_logprobs").as_array().unwrap();
    assert_eq!(scored, &list("token_logprobs")[..4]);
    let ids = server.post("/tokenize", "{\"content\":\"It was a fine\"}").ok();
    let ids = json::to_compact(at(&ids, "tokens"));
    for prompt in [ids.clone(), format!("[{ids}]"), "[\"It was a fine\"]".into()] {
        let body = format!("{{\"prompt\":{prompt},\"temperature\":0,\"max_tokens\":4}}");
        let reply = server.post("/v1/completions", &body).ok();
        assert_eq!(at(&reply, "choices.0.text"), at(&plain, "choices.0.text"), "{prompt}");
    }
    for (fields, param) in [
        ("", "prompt"),
        ("\"prompt\":\"\"", "prompt"),
        ("\"prompt\":[\"a\",\"b\"]", "prompt"),
        ("\"prompt\":[99999]", "prompt"),
        ("\"prompt\":\"a\",\"logprobs\":true", "logprobs"),
        ("\"prompt\":\"a\",\"best_of\":2", "best_of"),
    ] {
        let answer = server.post("/v1/completions", &format!("{{{fields}}}"));
        let (status, _, found) = answer.error();
        assert_eq!((status, found.as_str()), (400, param), "{fields}");
    }
}

#[test]
fn small_routes_answer() {
    let server = Running::demo();
    for path in ["/v1/models", "/models", "/v1//models/"] {
        let models = server.get(path).ok();
        assert_eq!(text_at(&models, "data.0.id"), "demo", "{path}");
        assert_eq!(int_at(&models, "data.0.context_length"), 512);
    }
    assert_eq!(text_at(&server.get("/v1/models/demo").ok(), "object"), "model");
    assert_eq!(server.get("/").status, 200);
    assert_eq!(text_at(&server.chat("\"model\":\"mine\""), "model"), "mine");
    let chat_ids = server.post("/tokenize", &chat("")).ok();
    let usage = server.chat("");
    assert_eq!(at(&chat_ids, "count"), at(&usage, "usage.prompt_tokens"));
    let text = "Grüße <|user|> 😀";
    let body = json::to_compact(&json::object(vec![("prompt", text.into())]));
    let ids = server.post("/v1/tokenize", &body).ok();
    assert!(json::to_compact(&ids).contains("3043"));
    let back = server.post("/detokenize", &json::to_compact(&ids)).ok();
    assert_eq!(text_at(&back, "content"), text);
    let plain = body.replace('}', ",\"parse_special\":false}");
    assert!(!json::to_compact(&server.post("/tokenize", &plain).ok()).contains("3043"));
    assert_eq!(server.post("/detokenize", "{\"tokens\":[99999]}").error().0, 400);
    assert_eq!(server.post("/tokenize", "{}").error().0, 400);
    let metrics = server.get("/metrics").body;
    for line in ["coli_requests_total{outcome=\"completed\"} 2", "coli_completion_tokens_total 32"]
    {
        assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
    }
}

/// A stop string that spans tokens ends the engine's work, not only the text.
#[test]
fn a_stop_string_ends_the_reply_and_the_work() {
    let server = Running::demo();
    let whole = server.chat("");
    let text = content(&whole);
    let cut = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let stop = json::to_compact(&text[cut..cut + 5].into());
    let end = text.find(&text[cut..cut + 5]).unwrap();
    for stop in [stop.clone(), format!("[\"never to be seen\",{stop}]")] {
        let reply = server.chat(&format!("\"stop\":{stop}"));
        assert_eq!((content(&reply), finish_reason(&reply)), (&text[..end], "stop"));
        assert!(int_at(&reply, "usage.completion_tokens") < 16);
        let stream = chat(&format!("\"stop\":{stop},\"stream\":true"));
        assert_eq!(streamed(&server.post(CHAT, &stream).events(), "content"), text[..end]);
    }
}

const TOOLS: &str = r#""tools":[{"type":"function","function":{"name":"look_up","parameters":
    {"type":"object","properties":{"code":{"type":"string"}}}}}]"#;

/// The calls of a stream, put together as clients do; each is there once, with its number.
fn streamed_calls(events: &[Value]) -> Vec<(i64, String, String)> {
    let deltas = events.iter().filter_map(|event| {
        event.get("choices")?.as_array()?.first()?.get("delta")?.get("tool_calls")?.as_array()
    });
    let call = |call: &Value| {
        assert_eq!(text_at(call, "type"), "function");
        assert!(text_at(call, "id").starts_with("call_"));
        let word = |path| text_at(call, path).to_string();
        (int_at(call, "index"), word("function.name"), word("function.arguments"))
    };
    deltas.flatten().map(call).collect()
}

#[test]
fn a_call_of_a_tool_becomes_an_object_with_typed_arguments() {
    let script = "<think>hm</think>Wait.<tool_call>look_up<arg_key>code</arg_key>\
                  <arg_value>42</arg_value></tool_call><|observation|>";
    let model = scripted("serve-call", script);
    let server = Running::new(&model.0, settings(), options());
    let fields = format!("{TOOLS},\"max_tokens\":40");
    let whole = server.chat(&fields);
    assert_eq!(finish_reason(&whole), "tool_calls", "{}", json::to_compact(&whole));
    assert_eq!(content(&whole), "Wait.");
    let message = at(&whole, "choices.0.message");
    assert_eq!(text_at(message, "tool_calls.0.function.name"), "look_up");
    assert_eq!(text_at(message, "tool_calls.0.function.arguments"), r#"{"code":"42"}"#);
    assert_eq!(text_at(message, "tool_calls.0.type"), "function");
    assert!(at(message, "tool_calls.0").get("index").is_none());
    let fields = fields + ",\"enable_thinking\":true,\"stream\":true";
    let events = server.post(CHAT, &chat(&fields)).events();
    assert_eq!(streamed(&events, "reasoning_content"), "hm");
    assert_eq!(streamed(&events, "content"), "Wait.");
    let want = (0, "look_up".into(), r#"{"code":"42"}"#.into());
    assert_eq!(streamed_calls(&events), [want]);
    assert_eq!(finish_reason(events.last().unwrap()), "tool_calls");
    // Cut off within the call there is none.
    let cut = server.chat(&format!("{TOOLS},\"max_tokens\":6"));
    assert_eq!((content(&cut), finish_reason(&cut)), ("Wait.", "length"));
    assert!(at(&cut, "choices.0.message").get("tool_calls").is_none());
    // Who offers no tools gets no calls.
    let text = content(&server.chat("\"max_tokens\":40")).to_string();
    assert!(text.starts_with("Wait.") && text.contains("42"), "{text}");
}

#[test]
fn a_call_without_arguments_or_without_its_end_is_the_same_in_both_modes() {
    for (name, script) in
        [("end", "now</tool_call><|observation|>"), ("open", "now<|observation|>")]
    {
        let script = format!("</think><tool_call>{script}");
        let model = scripted(&format!("serve-now-{name}"), &script);
        let server = Running::new(&model.0, settings(), options());
        let fields = r#""tools":[{"function":{"name":"now"}}]"#;
        let whole = server.chat(fields);
        let message = at(&whole, "choices.0.message");
        assert!(at(message, "content").is_null());
        assert_eq!(text_at(message, "tool_calls.0.function.arguments"), "{}");
        let stream = chat(&format!("{fields},\"stream\":true"));
        let events = server.post(CHAT, &stream).events();
        assert_eq!(streamed_calls(&events), [(0, "now".into(), "{}".into())], "{name}");
    }
}

#[test]
fn what_only_looks_like_a_call_is_text() {
    let model = scripted("serve-no-call", "</think><tool_call>{1}</tool_call><|user|>");
    static LOG: Mutex<String> = Mutex::new(String::new());
    let log = |text: &str| LOG.lock().unwrap().push_str(text);
    let server = Running::new(&model.0, Settings { log, ..settings() }, options());
    let reply = server.chat(TOOLS);
    assert_eq!(content(&reply), "<tool_call>{1}</tool_call>");
    assert_eq!(finish_reason(&reply), "stop");
    let log = LOG.lock().unwrap();
    assert!(log.contains("a tool call") && log.ends_with(r#": "{1}""#), "{log}");
}

/// It was no reasoning if the model ended its turn without closing it.
#[test]
fn a_reply_that_never_ends_its_thought_is_the_content() {
    let model = scripted("serve-unclosed", "<think>Paris it is<|user|>");
    let server = Running::new(&model.0, settings(), options());
    let reply = server.chat("\"enable_thinking\":true");
    assert_eq!(content(&reply), "Paris it is");
    assert!(at(&reply, "choices.0.message").get("reasoning_content").is_none());
    let stream = server.post(CHAT, &chat("\"enable_thinking\":true,\"stream\":true")).events();
    assert_eq!(streamed(&stream, "content"), "Paris it is");
}

/// A character of several tokens is never sent in halves.
#[test]
fn characters_arrive_whole() {
    let model = scripted("serve-utf8", "</think>a😀b<|user|>");
    let server = Running::new(&model.0, settings(), options());
    let stream = server.post(CHAT, &chat("\"stream\":true")).events();
    assert_eq!(streamed(&stream, "content"), "a😀b");
    let pieces = server.chat("\"logprobs\":true");
    let tokens = at(&pieces, "choices.0.logprobs.content").as_array().unwrap();
    let bytes = tokens.iter().flat_map(|token| at(token, "bytes").as_array().unwrap());
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
    assert_eq!(bytes, "a😀b".as_bytes());
    assert!(tokens.len() > 3, "the character is one token");
}
