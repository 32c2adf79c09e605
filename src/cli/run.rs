//! `coli run`: one prompt in, one reply out.
//!
//! A prompt is one user turn of the chat template, unless `--raw` or `--ids` hand over the tokens
//! themselves. Without `--json` the text is streamed, whole characters at a time.

#![forbid(unsafe_code)]

use super::load::{Setup, print_json};
use super::{Args, Flag, Verb, load, note, print_text, sampling};
use crate::chat;
use crate::draft;
use crate::engine::{Engine, Finish, Session};
use crate::error::{Context, Error, Result};
use crate::grammar::Grammar;
use crate::json::{self, Limits, Value};
use crate::object;
use crate::reply::Reply;
use crate::state::common_tokens;
use crate::sys;
use crate::tokenizer::{Special, Tokenizer};
use std::path::Path;
use std::time::Instant;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "run",
    positional: "PROMPT…",
    summary: "complete one prompt",
    example: "coli run --model oracle/demo --temp 0 -n 32 \"Tell me about the sea.\"",
    flags: &[
        load::MODEL_FLAGS,
        load::PLAN_FLAGS,
        load::FLAGS,
        load::LEARN_FLAGS,
        sampling::FLAGS,
        &[
            Flag::value("--prompt-file", "FILE", "read the prompt from a file"),
            Flag::value("--ids", "1,2,3", "the prompt as token ids"),
            Flag::switch("--raw", "no chat template; control tokens in the prompt are parsed"),
            Flag::value("--session", "FILE", "start from what it has of the prompt, and save it"),
            Flag::value("--grammar", "FILE", "GBNF that the reply must match"),
            Flag::value("--schema", "FILE", "JSON Schema that the reply must be valid for"),
            Flag::value("--trace", "FILE", "write which experts each token chose, for coli trace"),
            super::JSON,
        ],
    ],
    run,
};

/// Longest prompt file.
const PROMPT_BYTES_MAX: usize = 64 << 20;

fn run(args: &Args) -> Result<()> {
    let new_tokens = sampling::new_tokens(args)?;
    let stops = sampling::stops(args)?;
    check_usage(args)?;
    let start = Instant::now();
    let setup = Setup::new(args, 0)?;
    let params = sampling::params(args, setup.config.vocab_size)?;
    let grammar = grammar(args)?;
    let (prompt, thinking) = prompt_ids(&setup, args)?;
    setup.check(&prompt)?;
    if !stops.is_empty() {
        setup.check_text().context(|| "--stop")?;
    }
    // The last token is drawn, never fed.
    let engine = setup.open(prompt.len() + new_tokens - 1)?;
    let usage = load::open_usage(args, &engine);
    let load_s = start.elapsed().as_secs_f64();
    let tokenizer = engine.tokenizer().ok();
    let mut reply = tokenizer.map(|tokenizer| Reply::new(tokenizer, thinking, &stops));
    let mut new_ids = Vec::new();
    let show = |text: &str| if args.has("--json") { Ok(()) } else { print_text(text) };
    show(if thinking { "<think>" } else { "" })?;
    let constraint = grammar.map(|grammar| engine.constraint(grammar)).transpose()?;
    let mut chooser = engine.chooser(params, constraint, thinking)?;
    let file = args.get("--session").map(Path::new);
    let mut session = resume(&engine, file, &prompt)?;
    let mut watch = load::Watch::new(&engine, prompt.len());
    watch.keep(common_tokens(session.tokens(), &prompt));
    if let Some(file) = args.get("--trace") {
        watch.trace(Path::new(file))?;
    }
    let result = session.generate(&prompt, new_tokens, &mut *chooser, &mut watch, |id, _| {
        new_ids.push(id);
        let Some(reply) = &mut reply else { return Ok(true) };
        show(&reply.push(id))?;
        Ok(!reply.stopped())
    });
    let [prefill_s, decode_s] = watch.seconds();
    watch.clear();
    match (&result, &mut reply) {
        (Ok(finish), Some(reply)) => show(&reply.finish(*finish))?,
        (Ok(_), None) => show(&new_ids.iter().map(u32::to_string).collect::<Vec<_>>().join(","))?,
        (Err(_), _) => {}
    }
    // What is noted from here on stays on lines of its own.
    show(if result.is_err() && new_ids.is_empty() { "" } else { "\n" })?;
    load::save_usage(usage, &engine);
    // A turn that failed or was interrupted as well: what it computed need not be computed again.
    let saved = file.map_or(Ok(()), |file| session.save(file).map(|_| ()));
    // A trace that is not whole takes nothing from the reply.
    let traced = watch.end_trace();
    if let (Err(_), Err(error)) = (&result, &traced) {
        note(&format!("coli: {error}\n"));
    }
    let finish = result?;
    if args.has("--json") {
        let (prompt_tokens, drafts) = (prompt.len(), session.draft_counters());
        let seconds = [load_s, prefill_s, decode_s];
        let done = Done { prompt_tokens, new_ids, reply, finish, drafts, seconds };
        print_json(&summary(&engine, &done))?;
    }
    traced.and(saved)
}

/// The session of a file, announced, or a new one. It never changes a token of the reply: what the
/// prompt shares with it need not be computed, nothing else is taken from it.
fn resume<'a>(engine: &'a Engine, file: Option<&Path>, prompt: &[u32]) -> Result<Session<'a>> {
    let Some(file) = file else { return engine.session() };
    let Some((session, restored)) = engine.restore(file)? else { return engine.session() };
    note(&format!(
        "coli: {}, the prompt starts with {} of them; delete the file to start anew\n",
        load::resumed(file, &restored),
        common_tokens(session.tokens(), prompt)
    ));
    Ok(session)
}

/// The grammar of the flags.
fn grammar(args: &Args) -> Result<Option<Grammar>> {
    let (path, is_schema) = match (args.get("--grammar"), args.get("--schema")) {
        (None, None) => return Ok(None),
        (Some(path), None) => (path, false),
        (None, Some(path)) => (path, true),
        _ => return Err(Error::usage("expected one of --grammar and --schema")),
    };
    let text = load::read_text(path, PROMPT_BYTES_MAX)?;
    let compiled = match is_schema {
        true => json::parse(text.as_bytes(), Limits::default())
            .and_then(|schema| Grammar::from_schema(&schema)),
        false => Grammar::from_gbnf(&text),
    };
    compiled.context(|| path).map(Some)
}

/// Refuses prompts in several forms, and flags without effect.
fn check_usage(args: &Args) -> Result<()> {
    let forms = [!args.positional.is_empty(), args.has("--prompt-file"), args.has("--ids")];
    if forms.iter().filter(|given| **given).count() != 1 {
        let forms = "a PROMPT, --prompt-file or --ids";
        return Err(Error::usage(format!("expected exactly one of {forms}")));
    }
    if (args.has("--raw") || args.has("--ids")) && args.has("--think") {
        return Err(Error::usage("--think needs the chat template"));
    }
    if args.has("--raw") && args.has("--ids") {
        return Err(Error::usage("--ids are fed as they are, --raw has no effect on them"));
    }
    Ok(())
}

/// The prompt as text.
fn prompt_text(args: &Args) -> Result<String> {
    let file = args.get("--prompt-file").map(|path| load::read_text(path, PROMPT_BYTES_MAX));
    file.unwrap_or_else(|| Ok(args.positional.join(" ")))
}

/// The tokens of a prompt, and whether they end in an open think block: as given, as the text is
/// with `--raw`, or as one user turn. The tokenizer is read once more with the weights: a bad
/// prompt shall not wait for those.
fn prompt_ids(setup: &Setup<'_>, args: &Args) -> Result<(Vec<u32>, bool)> {
    if let Some(ids) = args.ids("--ids")? {
        return Ok((ids, false));
    }
    let text = prompt_text(args)?;
    setup.check_text()?;
    let tokenizer = Tokenizer::load(&setup.dir.join("tokenizer.json"))?;
    if args.has("--raw") {
        return Ok((tokenizer.encode(&text, Special::Parse), false));
    }
    let prompt = chat::render(&load::request(&[("user", &text)], args.has("--think")))?;
    Ok((prompt.ids(&tokenizer)?, prompt.is_thinking()))
}

/// A finished run.
struct Done<'a> {
    prompt_tokens: usize,
    new_ids: Vec<u32>,
    reply: Option<Reply<'a>>,
    finish: Finish,
    drafts: draft::Counters,
    /// To load, to the first new token, and from there on.
    seconds: [f64; 3],
}

/// The object that `--json` prints.
fn summary(engine: &Engine, done: &Done<'_>) -> Value {
    let [load_s, prefill_s, decode_s] = done.seconds;
    let rate =
        |tokens: usize, seconds: f64| if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
    let (reply, drafts) = (done.reply.as_ref(), done.drafts);
    let experts = engine.expert_counters();
    object! {
        "prompt_tokens": done.prompt_tokens,
        "ids": &done.new_ids[..],
        "text": reply.map(Reply::content),
        "reasoning": reply.map(Reply::reasoning),
        "finish_reason": match done.finish {
            Finish::Stop => "stop",
            Finish::Length => "length",
        },
        "drafts": object! {
            "proposed": drafts.proposed, "accepted": drafts.accepted, "forwards": drafts.forwards,
        },
        "experts": object! {
            "hits": experts.hits, "misses": experts.misses, "bytes_read": experts.bytes_read,
        },
        "timings": object! {
            "load_s": load_s,
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            "prefill_tok_s": rate(done.prompt_tokens, prefill_s),
            "decode_tok_s": rate(done.new_ids.len().saturating_sub(1), decode_s),
        },
        "peak_rss_bytes": sys::peak_rss_bytes(),
    }
}
