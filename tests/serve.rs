//! `coli serve` over raw sockets: what its replies say, who is turned away, what a client that
//! leaves sets free, and that a conversation stays computed.

#![forbid(unsafe_code)]

mod common;

use colibri::engine::Options;
use colibri::json::{self, Value};
use colibri::server::Settings;
use common::TempDir;
use common::serve::{
    Answer, Running, at, chat, demo, int_at, options, post, settings, streamed, text_at,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// `coli run` on the same prompt, as JSON.
fn run(think: bool) -> Value {
    let model = demo().display().to_string();
    let mut args = vec!["run", "--model", &model, "--temp", "0", "-n", "16", "--json"];
    args.extend(think.then_some("--think"));
    let output = Command::new(env!("CARGO_BIN_EXE_coli"))
        .args(args)
        .arg("What is the weather?")
        .env("COLI_USAGE", "off")
        .output()
        .unwrap();
    json::parse(&output.stdout, json::Limits::default()).unwrap()
}

#[test]
fn whole_and_streamed_replies_are_those_of_run() {
    let server = Running::demo();
    for think in [false, true] {
        let want = run(think);
        let fields = format!("\"enable_thinking\":{think}");
        let whole = server.chat(&fields);
        assert_eq!(text_at(&whole, "object"), "chat.completion");
        assert_eq!(text_at(&whole, "choices.0.finish_reason"), "length");
        assert_eq!(at(&whole, "choices.0.message.content"), at(&want, "text"));
        assert_eq!(int_at(&whole, "usage.prompt_tokens"), int_at(&want, "prompt_tokens"));
        assert_eq!(int_at(&whole, "usage.completion_tokens"), 16);
        let reasoning = at(&whole, "choices.0.message").get("reasoning_content");
        let reasoning = reasoning.and_then(Value::as_str).unwrap_or_default();
        assert_eq!(reasoning, text_at(&want, "reasoning"));
        assert_eq!(reasoning.is_empty(), !think);
        let fields = fields + r#","stream":true,"stream_options":{"include_usage":true}"#;
        let events = server.post("/v1/chat/completions", &chat(&fields)).events();
        assert_eq!(text_at(&events[0], "choices.0.delta.role"), "assistant");
        assert_eq!(streamed(&events, "content"), text_at(&want, "text"));
        assert_eq!(streamed(&events, "reasoning_content"), reasoning);
        let [.., last, usage] = &events[..] else { panic!() };
        assert_eq!(text_at(last, "choices.0.finish_reason"), "length");
        assert!(at(usage, "choices").as_array().unwrap().is_empty());
        assert_eq!(int_at(usage, "usage.completion_tokens"), 16);
        let reasons = events.iter().filter_map(|event| {
            let choice = event.get("choices")?.as_array()?.first()?;
            choice.get("finish_reason")?.as_str()
        });
        assert_eq!(reasons.count(), 1);
    }
}

#[test]
fn usage_comes_in_a_stream_only_when_asked_for() {
    let server = Running::demo();
    let events = server.post("/v1/chat/completions", &chat("\"stream\":true")).events();
    assert!(events.iter().all(|event| event.get("usage").is_none()));
    assert!(events.iter().all(|event| !at(event, "choices").as_array().unwrap().is_empty()));
}

/// A conversation of two turns; what the second prompt has in common with the first turn.
fn second_turn(server: &Running, between: impl FnOnce()) -> (Value, i64) {
    let first = server.chat("");
    let common = int_at(&first, "usage.prompt_tokens");
    between();
    let said = json::to_compact(at(&first, "choices.0.message.content"));
    let messages = format!(
        r#""messages":[{{"role":"user","content":"What is the weather?"}},
        {{"role":"assistant","content":{said}}},{{"role":"user","content":"And the wind?"}}]"#
    );
    (server.chat(&messages), common)
}

#[test]
fn a_follow_up_turn_is_computed_from_where_it_differs() {
    let (warm, common) = second_turn(&Running::demo(), || {});
    assert!(int_at(&warm, "usage.prompt_tokens_details.cached_tokens") >= common - 1);
    let server = Running::demo();
    let other =
        "\"messages\":[{\"role\":\"system\",\"content\":\"Be brief, and be kind to all.\"}]";
    let (cold, _) = second_turn(&server, || drop(server.chat(other)));
    assert!(int_at(&cold, "usage.prompt_tokens_details.cached_tokens") < common - 1);
    assert_eq!(at(&warm, "choices.0.message"), at(&cold, "choices.0.message"));
}

/// What a server computed is there for the next one, and a reply from it is the same.
#[test]
fn conversations_outlive_the_server() {
    let dir = TempDir::new("serve-sessions");
    let keeping = |bytes| {
        let sessions = Some((dir.0.join("kept"), bytes));
        Running::new(&demo(), Settings { sessions, ..settings() }, options())
    };
    let turn = |server: &Running, words: &str| {
        let said = format!("the sea, and the wind, and {words} ").repeat(8);
        server.chat(&format!("\"messages\":[{{\"role\":\"user\",\"content\":\"{said}\"}}]"))
    };
    let cached = |value: &Value| int_at(value, "usage.prompt_tokens_details.cached_tokens");
    let first = keeping(1 << 30);
    let cold = turn(&first, "rain");
    turn(&first, "snow");
    assert!(cached(&cold) == 0 && int_at(&cold, "usage.prompt_tokens") > 60);
    drop(first);
    let second = keeping(1 << 30);
    let warm = turn(&second, "rain");
    // All but the last token, and the draft head's row before it.
    assert_eq!(cached(&warm), int_at(&warm, "usage.prompt_tokens") - 2);
    assert_eq!(at(&warm, "choices.0.message"), at(&cold, "choices.0.message"));
    drop(second);
    // No room but for the one that is in use.
    let third = keeping(1);
    turn(&third, "hail");
    drop(third);
    assert_eq!(std::fs::read_dir(dir.0.join("kept")).unwrap().count(), 1);
    assert_eq!(cached(&turn(&keeping(1), "rain")), 0);
}

/// A slot that takes the start of its prompt from another slot does not overwrite what it saved
/// before.
#[test]
fn a_slot_that_turns_to_another_conversation_keeps_the_file_of_the_last() {
    let dir = TempDir::new("serve-kept-two");
    let keeping = || {
        let sessions = Some((dir.0.join("kept"), 1 << 30));
        let options = Options { sessions: 2, ..options() };
        Running::new(&demo(), Settings { sessions, kv_slots: 2, ..settings() }, options)
    };
    let turn = |server: &Running, first: &str, then: &str| {
        let said = format!("{}{}", first.repeat(4), then.repeat(60));
        server.chat(&format!("\"messages\":[{{\"role\":\"user\",\"content\":\"{said}\"}}]"))
    };
    let server = keeping();
    let cold = turn(&server, "wind ", "wind ");
    turn(&server, "snow ", "rain ");
    // It goes to the slot of the first, and starts with the tokens of the second.
    turn(&server, "snow ", "hail ");
    drop(server);
    assert_eq!(std::fs::read_dir(dir.0.join("kept")).unwrap().count(), 3);
    let warm = turn(&keeping(), "wind ", "wind ");
    let cached = int_at(&warm, "usage.prompt_tokens_details.cached_tokens");
    assert_eq!(cached, int_at(&warm, "usage.prompt_tokens") - 2);
    assert_eq!(at(&warm, "choices.0.message"), at(&cold, "choices.0.message"));
}

#[test]
fn a_side_request_does_not_cost_the_conversation() {
    let options = Options { sessions: 2, ..options() };
    let server = Running::new(&demo(), Settings { kv_slots: 2, ..settings() }, options);
    let other =
        "\"messages\":[{\"role\":\"system\",\"content\":\"Name this talk in three words.\"}]";
    let (turn, common) = second_turn(&server, || {
        server.chat(other);
        server.chat(other);
    });
    assert!(int_at(&turn, "usage.prompt_tokens_details.cached_tokens") >= common - 1);
}

/// Different prompts, seeds and lengths, so that they join and leave each other's passes.
#[test]
fn several_replies_at_a_time_are_those_that_each_is_alone() {
    let bodies: Vec<String> = (0..12)
        .map(|i| {
            let subject = ["the sea", "Emma", "a very fine morning", "Mr. Knightley"][i % 4];
            let (tokens, seed) = (20 + 17 * (i % 3), 7 * i);
            let messages = format!("[{{\"role\":\"user\",\"content\":\"{subject} {i}\"}}]");
            format!(
                "{{\"messages\":{messages},\"max_tokens\":{tokens},\"seed\":{seed},\
                 \"temperature\":1,\"stream\":true,\"stream_options\":{{\"include_usage\":true}}}}"
            )
        })
        .collect();
    let serve = |sessions: usize, drafts| {
        let options = Options { sessions, drafts, chunk_rows: 8, ctx_tokens: 4096, ..options() };
        Running::new(&demo(), Settings { kv_slots: sessions, queue: 16, ..settings() }, options)
    };
    let path = "/v1/chat/completions";
    let text = |events: Vec<Value>| {
        let tokens = int_at(events.last().unwrap(), "usage.completion_tokens");
        (streamed(&events, "reasoning_content") + &streamed(&events, "content"), tokens)
    };
    let server = serve(1, None);
    let alone: Vec<_> = bodies.iter().map(|body| text(server.post(path, body).events())).collect();
    for drafts in [None, Some(2)] {
        let server = serve(4, drafts);
        let company = server.send("/v1/completions", &long(1));
        server.wait_for("scheduler.active", |active| active == 1);
        let together: Vec<_> = bodies.iter().map(|body| server.send(path, body)).collect();
        for (mut stream, alone) in together.into_iter().zip(&alone) {
            assert_eq!(text(Answer::read(&mut stream).events()), *alone);
        }
        // None of them ran alone.
        assert_eq!(["completed", "failed"].map(|name| server.counter(name)), [12, 0]);
        drop(company);
    }
    assert!(alone.iter().all(|(text, tokens)| text.len() > 20 && *tokens > 10), "{alone:?}");
}

/// A request that takes long: in its prompt, or in its reply.
fn long(prompt_words: usize) -> String {
    let words = "wind and sea ".repeat(prompt_words);
    format!("{{\"prompt\":\"{words}\",\"max_tokens\":3000,\"temperature\":0}}")
}

fn patient() -> Running {
    let options = Options { ctx_tokens: 4096, chunk_rows: 16, ..options() };
    Running::new(&demo(), Settings { queue: 1, ..settings() }, options)
}

#[test]
fn who_hangs_up_is_cancelled_in_prompt_reply_and_line() {
    let server = patient();
    let in_prompt = server.send("/v1/completions", &long(900));
    server.wait_for("prefill.done", |done| done > 0);
    drop(in_prompt);
    server.wait_for("scheduler.cancelled", |count| count == 1);
    let in_reply = server.send("/v1/completions", &long(1));
    server.wait_for("scheduler.admitted", |count| count == 2);
    let in_line = server.send("/v1/completions", &long(1));
    server.wait_for("scheduler.queued", |count| count == 1);
    drop(in_line);
    server.wait_for("scheduler.queued", |count| count == 0);
    drop(in_reply);
    server.wait_for("scheduler.cancelled", |count| count == 3);
    assert_eq!(text_at(&server.chat(""), "object"), "chat.completion");
    assert_eq!(["admitted", "completed", "failed"].map(|name| server.counter(name)), [3, 1, 0]);
    assert_eq!(server.stop(), 0);
}

#[test]
fn a_full_line_turns_away_with_429_and_serves_the_others() {
    let server = patient();
    let first = server.send("/v1/completions", &long(1));
    server.wait_for("scheduler.active", |active| active == 1);
    let mut second = server.send("/v1/chat/completions", &chat(""));
    server.wait_for("scheduler.queued", |count| count == 1);
    let third = server.post("/v1/chat/completions", &chat(""));
    assert_eq!(third.error(), (429, "queue_full".into(), "null".into()));
    assert!(third.head.contains("\r\nRetry-After: 1"), "{}", third.head);
    drop(first);
    Answer::read(&mut second).ok();
    assert_eq!(server.counter("rejected"), 1);
}

#[test]
fn who_waits_too_long_is_told_so() {
    let settings = Settings { queue_time: Duration::from_millis(10), ..settings() };
    let server = Running::new(&demo(), settings, Options { ctx_tokens: 4096, ..options() });
    let first = server.send("/v1/completions", &long(1));
    server.wait_for("scheduler.active", |active| active == 1);
    let second = server.post("/v1/chat/completions", &chat("\"stream\":true"));
    assert_eq!(second.error(), (429, "queue_timeout".into(), "null".into()));
    assert!(second.head.contains("\r\nRetry-After: 1"), "{}", second.head);
    assert_eq!(server.counter("timed_out"), 1);
    drop(first);
}

#[test]
fn many_disconnects_leave_a_server_that_works() {
    let server = Running::demo();
    for i in 0..60 {
        let stream = server.send("/v1/chat/completions", &chat(["", "\"stream\":true"][i % 2]));
        thread::sleep(Duration::from_millis(i as u64 % 7));
        drop(stream);
    }
    server.wait_for("scheduler.active", |active| active == 0);
    server.wait_for("scheduler.queued", |queued| queued == 0);
    assert_eq!(server.chat("").get("choices").unwrap().as_array().unwrap().len(), 1);
    assert_eq!(server.counter("failed"), 0);
}

#[test]
fn silence_is_filled_with_what_clients_skip() {
    let settings = Settings { keepalive_time: Duration::from_millis(1), ..settings() };
    let options = Options { ctx_tokens: 2048, chunk_rows: 4, ..options() };
    let server = Running::new(&demo(), settings, options);
    let body = |stream| {
        let prompt = format!("{stream} ").repeat(300);
        format!("{{\"prompt\":\"{prompt}\",\"max_tokens\":2,\"stream\":{stream}}}")
    };
    let streamed = server.post("/v1/completions", &body(true));
    assert!(streamed.body.starts_with(": keepalive\n\n"), "{}", streamed.body);
    assert!(!streamed.events().is_empty());
    let whole = server.post("/v1/completions", &body(false));
    assert!(whole.body.starts_with(' '), "{}", whole.body);
    assert_eq!(text_at(&whole.ok(), "object"), "text_completion");
}

#[test]
fn a_key_guards_all_but_the_sign_of_life() {
    let settings = Settings {
        api_key: Some("secret".into()),
        cors_origins: vec!["http://page.example".into()],
        ..settings()
    };
    let server = Running::new(&demo(), settings, options());
    for (headers, status) in [
        ("", 401),
        ("Authorization: Bearer wrong!\r\n", 401),
        ("Authorization: Basic secret\r\n", 401),
        ("Authorization: Bearer secret\r\n", 200),
    ] {
        let answer = server.talk(&post("/v1/chat/completions", &chat(""), headers));
        assert_eq!(answer.status, status, "{headers}");
        if status == 401 {
            assert_eq!(answer.error(), (401, "invalid_api_key".into(), "null".into()));
        }
        let get =
            format!("GET /health HTTP/1.1\r\nHost: any\r\nConnection: close\r\n{headers}\r\n");
        let health = server.talk(&get).ok();
        assert_eq!(text_at(&health, "status"), "ok");
        assert_eq!(health.get("scheduler").is_some(), status == 200, "{headers}");
    }
    for path in ["/v1/models", "/metrics", "/v1/nowhere"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
    let preflight = "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: any\r\nConnection: close\r\n\
                     Origin: http://page.example\r\n\
                     Access-Control-Request-Headers: authorization\r\n\r\n";
    let answer = server.talk(preflight);
    assert_eq!(answer.status, 204);
    assert!(answer.head.contains("Access-Control-Allow-Origin: http://page.example"));
    assert!(answer.head.contains("Access-Control-Allow-Headers: authorization"));
    let answer = server.talk(&preflight.replace("page.example", "other.example"));
    assert!(!answer.head.contains("Access-Control-Allow-Origin"), "{}", answer.head);
}

#[test]
fn a_false_name_of_this_machine_is_refused_by_name() {
    let get = |server: &Running, host: &str| {
        server.talk(&format!("GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
    };
    let server = Running::demo();
    let refused = get(&server, "evil.example");
    assert_eq!(refused.error().0, 403);
    assert!(refused.body.contains("evil.example") && refused.body.contains("--allowed-host"));
    for host in ["localhost", "127.0.0.1:8000", "[::1]:8000"] {
        assert_eq!(get(&server, host).status, 200, "{host}");
    }
    let settings = Settings { allowed_hosts: vec!["10.0.0.5".into()], ..settings() };
    let server = Running::new(&demo(), settings, options());
    assert_eq!(get(&server, "10.0.0.5:8000").status, 200);
}

#[test]
fn at_its_end_the_server_finishes_what_runs_and_sends_the_line_away() {
    let server = Running::new(&demo(), settings(), options());
    let mut first = server.send("/v1/completions", &long(1));
    server.wait_for("scheduler.active", |active| active == 1);
    let mut second = server.send("/v1/chat/completions", &chat(""));
    server.wait_for("scheduler.queued", |count| count == 1);
    assert_eq!(server.stop(), 0);
    assert_eq!(Answer::read(&mut second).error(), (503, "scheduler_closed".into(), "null".into()));
    assert_eq!(text_at(&Answer::read(&mut first).ok(), "object"), "text_completion");
}

#[test]
fn a_model_that_is_being_read_is_no_reason_to_wait() {
    let (sender, loaded) = std::sync::mpsc::channel();
    let load = move || {
        loaded.recv().unwrap();
        Ok(Arc::new(common::open(&demo(), options())))
    };
    let server = Running::loading(settings(), load);
    let refused = (503, "loading".into(), "null".into());
    assert_eq!(server.get("/health").error(), refused);
    assert_eq!(server.post("/v1/chat/completions", &chat("")).error(), refused);
    sender.send(()).unwrap();
    while server.get("/health").status == 503 {
        thread::sleep(Duration::from_millis(1));
    }
    server.chat("");
}

/// The program; a test that fails leaves none behind.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The program with its banner and the rest of its notes.
fn spawn(args: &[&str]) -> (Program, String, BufReader<ChildStderr>) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_coli"))
        .args(["serve", "--port", "0", "--ctx", "512", "--usage", "off", "--model"])
        .arg(demo())
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let child = Program(child);
    let mut banner = String::new();
    while !banner.contains("http://") {
        banner.clear();
        assert!(stderr.read_line(&mut banner).unwrap() > 0, "no banner");
    }
    (child, banner, stderr)
}

#[test]
fn signals_end_the_program_after_what_runs() {
    for (signal, status) in [("-TERM", 0), ("-INT", 130)] {
        let (mut child, banner, mut stderr) = spawn(&["--model-id", "tale", "--api-key", "k"]);
        for fact in ["tale", "512 tokens", "kv-slots 1, ", " MB", "queue 16", "with a key"] {
            assert!(banner.contains(fact), "{fact}: {banner}");
        }
        let address = banner.split("http://").nth(1).unwrap().split('/').next().unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        let body = chat("\"stream\":true,\"max_tokens\":200");
        let request = post("/v1/chat/completions", &body, "Authorization: Bearer k\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        // The reply has begun.
        stream.read_exact(&mut [0; 300]).unwrap();
        let kill = Command::new("kill").args([signal, &child.0.id().to_string()]).status().unwrap();
        assert!(kill.success());
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("data: [DONE]"), "{signal}: {rest}");
        assert_eq!(child.0.wait().unwrap().code(), Some(status), "{signal}");
        let mut log = String::new();
        stderr.read_to_string(&mut log).unwrap();
        assert!(!log.contains("cut off"), "{log}");
    }
}

#[test]
fn what_cannot_be_served_is_said_before_the_model_is_read() {
    let (_program, banner, _stderr) = spawn(&[]);
    let port = banner.split("http://127.0.0.1:").nth(1).unwrap().split('/').next().unwrap();
    let model = demo().display().to_string();
    let fixture = common::fixture("a_seed").display().to_string();
    for (args, status, text) in [
        (vec!["--host", "0.0.0.0", "--port", "0"], 2, "--api-key"),
        (vec!["--host", "example.com"], 2, "--host: expected an IP address"),
        (vec!["--kv-slots", "0"], 2, "--kv-slots"),
        (vec!["--api-key", "two words"], 2, "--api-key"),
        (vec!["--queue-timeout", "1000"], 2, "--queue-timeout"),
        (vec!["--port", port], 1, "listen on 127.0.0.1"),
        (vec!["--port", "0", "--model", &fixture], 1, "no tokenizer.json"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_coli"));
        command.arg("serve").args(&args);
        if !args.contains(&"--model") {
            command.args(["--model", &model]);
        }
        let output = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {stderr}");
        assert!(stderr.contains(text), "{args:?}: {stderr}");
    }
}
