//! `coli chat` out of a pipe: its replies are those of `coli run` on the same tokens.
//!
//! `oracle/chat_pty.py` checks what only a terminal shows.

mod common;

use colibri::chat::render;
use colibri::json::{self, Limits, Value, to_compact};
use colibri::tokenizer::Tokenizer;
use common::{TempDir, integers};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/demo")
}

/// Starts `coli VERB` on the demo model, greedy, without the environment's own settings.
fn start(verb: &str, args: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coli"));
    command.arg(verb).arg("--model").arg(demo()).args(["--temp", "0"]).args(args);
    for name in ["COLI_MODEL_DIRS", "COLI_MODEL_MIRROR", "CTX", "RAM_GB", "NGEN", "PIN_GB", "DRAFT"]
    {
        command.env_remove(name);
    }
    // Models that tests share stay as they are.
    command.env("COLI_USAGE", "off").stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn chat(args: &[&str], input: &str) -> Output {
    let mut child = start("chat", args);
    // It may end before it has read everything.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// What a chat printed that went well.
fn said(args: &[&str], input: &str) -> String {
    let output = chat(args, input);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).to_string()
}

/// Token ids of a request of messages, each a role and its text.
fn rendered(messages: &[(&str, &str)], thinks: bool) -> Vec<u32> {
    let string = |text: &str| to_compact(&Value::String(text.into()));
    let message = |(role, text): &(&str, &str)| {
        format!("{{\"role\":{},\"content\":{}}}", string(role), string(text))
    };
    let messages: Vec<String> = messages.iter().map(message).collect();
    let messages = messages.join(",");
    let request = format!("{{\"messages\":[{messages}],\"enable_thinking\":{thinks}}}");
    let request = json::parse(request.as_bytes(), Limits::default()).unwrap();
    let tokenizer = Tokenizer::load(&demo().join("tokenizer.json")).unwrap();
    render(&request).unwrap().ids(&tokenizer).unwrap()
}

/// Token ids and text of `coli run` behind these tokens.
fn reply_to(ids: &[u32], count: &str) -> (Vec<u32>, String) {
    let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
    let child = start("run", &["--ids", &ids.join(","), "-n", count, "--json"]);
    let output = child.wait_with_output().unwrap();
    let value = json::parse(output.stdout.trim_ascii_end(), Limits::default()).unwrap();
    let text = value.get("text").unwrap().as_str().unwrap().to_string();
    (integers(value.get("ids").unwrap()), text)
}

/// Each turn stands behind the tokens of all turns before it; thinking off is `[gMASK]<sop>` before
/// the first message, which later ones do not repeat.
#[test]
fn a_reply_is_that_of_run_on_all_tokens_before_it() {
    let first = rendered(&[("system", "Be <|user|> brief."), ("user", "Hello")], false);
    let (said_first, text_first) = reply_to(&first, "9");
    let (said_more, text_more) = reply_to(&[&first[..], &said_first].concat(), "9");
    let turn = &rendered(&[("user", "one\n/two")], false)[2..];
    let (_, text_second) = reply_to(&[&first[..], &said_first, &said_more, turn].concat(), "9");
    let args = ["-n", "9", "--system", "Be <|user|> brief."];
    let got = said(&args, "Hello\n/more\n\"\"\"\none\n/two\n\"\"\"\n");
    assert_eq!(got, format!("{text_first}\n{text_more}\n{text_second}\n"));
    // What was dropped leaves no trace, and the first message brings the system's again.
    let again = said(&args, "Other words\n:more\n/undo\nHello");
    assert!(again.ends_with(&format!("\n{text_first}\n")), "{again}");
}

/// A reply that was cut while it thought is closed before the next message.
#[test]
fn reasoning_that_was_cut_is_closed_by_the_next_turn() {
    let first = rendered(&[("user", "What is the weather?")], true);
    let (thought, text) = reply_to(&first, "2");
    let tokenizer = Tokenizer::load(&demo().join("tokenizer.json")).unwrap();
    let close = tokenizer.token_id("</think>").unwrap();
    assert!(!thought.contains(&close), "the model thinks too little for this test");
    let all = rendered(&[("user", "Think.")], true);
    let turn = all.iter().rposition(|id| *id == tokenizer.token_id("<|user|>").unwrap()).unwrap();
    let (_, second) = reply_to(&[&first[..], &thought, &[close], &all[turn..]].concat(), "2");
    let got = said(&["--think", "-n", "2"], "What is the weather?\nThink.\n");
    // A thought that ends at once is told apart by a line break.
    let second = second.replace("</think>", "</think>\n");
    assert_eq!(got, format!("<think>{text}\n<think>{second}\n"));
}

/// Notes go to stderr, and a script gets none that it did not ask for.
#[test]
fn a_script_sees_no_prompt_and_no_figures_but_those_of_stats() {
    let output = chat(&["-n", "3", "--stop", "zzz"], "Hello\n");
    assert_eq!(text(&output.stderr), "[cut at 3 tokens (-n): /more goes on]\n");
    let output = chat(&["-n", "3"], "Hello\n/stats\n/quit\nnever read\n");
    let notes = text(&output.stderr);
    assert!(notes.contains("\n[3 tokens, ") && notes.contains(" of 4096]\n"), "{notes}");
    assert_eq!(output.stdout.iter().filter(|byte| **byte == b'\n').count(), 1);
}

#[test]
fn what_goes_wrong_ends_a_script_and_says_what_to_do() {
    let cases: [(&[&str], &str, i32, &str); 9] = [
        (&["--system", "a", "--system-file", "b"], "", 2, "exclude each other"),
        (&["--json"], "", 2, "unknown flag --json"),
        (&["--repin", "5"], "", 2, "--repin needs a --pin"),
        (&[], "/mor\n", 1, "unknown command /mor, did you mean /more?"),
        (&[], "/etc/fstab?\n", 1, "// starts a message with /"),
        (&[], "/undo now\n", 1, "/undo takes nothing behind it, found \"now\""),
        (&[], "/load\n", 1, "/load needs a FILE"),
        (&[], "/more\n", 1, "nothing was said that could go on"),
        (&["--ctx", "9"], "Many more words than fit in.\n", 1, "do not fit the context of 9"),
    ];
    for (args, input, code, wanted) in cases {
        let output = chat(args, input);
        assert_eq!(output.status.code(), Some(code), "{input}{args:?}");
        assert!(text(&output.stderr).contains(wanted), "{input}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty(), "{input}");
    }
}

/// The context holds the message and 4 tokens; the last one is drawn and never fed.
#[test]
fn a_full_context_ends_the_reply_and_refuses_the_next_message_unsaid() {
    let ids = rendered(&[("user", "Hello")], false);
    let ctx = (ids.len() + 4).to_string();
    let output = chat(&["--ctx", &ctx], "Hello\n/undo\nHello\nmore\n");
    let (_, reply) = reply_to(&ids, "5");
    assert_eq!(text(&output.stdout), format!("{reply}\n{reply}\n"));
    let notes = text(&output.stderr);
    assert!(notes.contains(&format!("the context of {ctx} tokens is full")), "{notes}");
    assert!(notes.contains("the message was not sent"), "{notes}");
    assert_eq!(output.status.code(), Some(1));
}

/// The saved tokens are all that were said, and what goes on behind them is what would have without
/// the file; a saved state of `coli run` without any message is no conversation.
#[test]
fn a_saved_conversation_goes_on_where_it_was_and_is_announced() {
    let dir = TempDir::new("chat-session");
    let [a, b, raw] = ["a", "b", "raw"].map(|name| dir.0.join(name).display().to_string());
    let whole = said(&["-n", "7"], "Hello\nAgain\n/more\n");
    let input = format!("Hello\n/save {b}\nElse\n/load {b}\nAgain\n");
    let output = chat(&["-n", "7", "--session", &a], &input);
    let lines: Vec<&str> = text(&output.stdout).split('\n').collect();
    let tokens = rendered(&[("user", "Hello")], false).len() + 7;
    let notes = text(&output.stderr);
    assert!(notes.contains(&format!("resumes {tokens} tokens saved ")), "{notes}");
    let output = chat(&["-n", "7", "--session", &a, "--system", "x"], "/more\n");
    assert_eq!(format!("{}\n{}\n{}", lines[0], lines[2], text(&output.stdout)), whole);
    let notes = text(&output.stderr);
    assert!(notes.starts_with(&format!("[{a}: resumes ")), "{notes}");
    assert!(notes.contains("--system, which counts from /reset on"), "{notes}");
    let run = start("run", &["--ids", "5,6,7", "-n", "1", "--session", &raw]);
    assert!(run.wait_with_output().unwrap().status.success());
    let output = chat(&["--session", &raw], "");
    assert!(text(&output.stderr).contains("no conversation"), "{output:?}");
    assert_eq!(output.status.code(), Some(1));
}

/// The signal comes when the first piece of text has; thousands of tokens are still to come.
#[test]
fn an_interrupted_script_saves_what_was_said_and_exits_with_130() {
    let dir = TempDir::new("chat-interrupt");
    let file = dir.0.join("saved").display().to_string();
    let mut child = start("chat", &["-n", "3900", "--session", &file]);
    child.stdin.as_mut().unwrap().write_all(b"Hello\nnever answered\n").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let output = chat(&["-n", "4", "--session", &file], "/more\n");
    let notes = text(&output.stderr);
    let tokens = notes.split("resumes ").nth(1).unwrap().split(' ').next().unwrap();
    let ids = rendered(&[("user", "Hello")], false);
    let count = tokens.parse::<usize>().unwrap() - ids.len();
    assert!((1..3900).contains(&count), "{notes}");
    let (before, _) = reply_to(&ids, &count.to_string());
    let (_, more) = reply_to(&[&ids[..], &before].concat(), "4");
    assert_eq!(text(&output.stdout), more + "\n");
}
