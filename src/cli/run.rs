//! `coli run`: one prompt in, one reply out.
//!
//! A prompt is one user turn of the chat template, unless `--raw` or `--ids` hand over the tokens
//! themselves. Without `--json` the text is streamed, whole characters at a time.

#![forbid(unsafe_code)]

use super::load::{Setup, count, ids, object, print_json};
use super::{Args, Flag, Verb, load, note, print_text, sampling};
use crate::bail;
use crate::chat;
use crate::draft;
use crate::engine::{Engine, Finish, Session};
use crate::error::{Context, Error, Result};
use crate::grammar::{Grammar, Guided};
use crate::json::{self, Limits, Value};
use crate::reply::Reply;
use crate::sample::{Choose, Params, Sampler};
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
            Flag::value(
                "--session",
                "FILE",
                "start from what it has of the prompt, and save to it",
            ),
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
    if !stops.is_empty() && !sys::is_present(&setup.dir.join("tokenizer.json")) {
        bail!("--stop needs a tokenizer.json in the model directory");
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
    let mut chooser = chooser(&engine, params, grammar)?;
    let file = args.get("--session").map(Path::new);
    let mut session = resume(&engine, file, &prompt)?;
    let mut watch = load::Watch::new(&engine, prompt.len());
    watch.keep(common_tokens(session.tokens(), &prompt));
    if let Some(file) = args.get("--trace") {
        watch.trace(Path::new(file))?;
    }
    let start = Instant::now();
    let mut first_s = None;
    let result = session.generate(&prompt, new_tokens, &mut *chooser, &mut watch, |id, watch| {
        if first_s.is_none() {
            watch.clear();
        }
        first_s.get_or_insert_with(|| start.elapsed().as_secs_f64());
        new_ids.push(id);
        let Some(reply) = &mut reply else { return Ok(true) };
        show(&reply.push(id))?;
        Ok(!reply.stopped())
    });
    watch.clear();
    load::save_usage(usage, &engine);
    // A turn that failed or was interrupted as well: what it computed need not be computed again.
    let saved = file.map_or(Ok(()), |file| session.save(file).map(|_| ()));
    // What was said before a failure stays on lines of its own.
    show(if result.is_err() && !new_ids.is_empty() { "\n" } else { "" })?;
    // A trace that is not whole takes nothing from the reply.
    let traced = watch.end_trace();
    if let (Err(_), Err(error)) = (&result, &traced) {
        note(&format!("coli: {error}\n"));
    }
    let finish = result?;
    let total_s = start.elapsed().as_secs_f64();
    let prefill_s = first_s.unwrap_or(total_s);
    if let Some(reply) = &mut reply {
        show(&reply.finish(finish))?;
    }
    let timings = Timings { load_s, prefill_s, decode_s: total_s - prefill_s };
    let (prompt_tokens, drafts) = (prompt.len(), session.draft_counters());
    let done = Done { prompt_tokens, new_ids, reply, finish, drafts, timings };
    print_done(args, &engine, &done).and(traced).and(saved)
}

/// What is printed behind the text of the reply, or instead of it.
fn print_done(args: &Args, engine: &Engine, done: &Done<'_>) -> Result<()> {
    if args.has("--json") {
        return print_json(&summary(engine, done));
    }
    if done.reply.is_none() {
        let ids: Vec<String> = done.new_ids.iter().map(u32::to_string).collect();
        print_text(&ids.join(","))?;
    }
    print_text("\n")
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
    let read = |path: &str| sys::read_file(Path::new(path), PROMPT_BYTES_MAX);
    let compiled = |path: &str, compile: fn(&[u8]) -> Result<Grammar>| {
        read(path).and_then(|bytes| compile(&bytes)).context(|| path).map(Some)
    };
    match (args.get("--grammar"), args.get("--schema")) {
        (None, None) => Ok(None),
        (Some(path), None) => compiled(path, |bytes| match std::str::from_utf8(bytes) {
            Ok(text) => Grammar::from_gbnf(text),
            Err(error) => bail!("not UTF-8 at byte {}", error.valid_up_to()),
        }),
        (None, Some(path)) => {
            compiled(path, |bytes| Grammar::from_schema(&json::parse(bytes, Limits::default())?))
        }
        _ => Err(Error::usage("expected one of --grammar and --schema")),
    }
}

/// What chooses the tokens of the reply.
fn chooser<'a>(
    engine: &'a Engine,
    params: Params,
    grammar: Option<Grammar>,
) -> Result<Box<dyn Choose + 'a>> {
    let sampler = Sampler::new(params, engine.config().vocab_size, engine.never_sampled())?;
    let Some(grammar) = grammar else { return Ok(Box::new(sampler)) };
    let (constraint, ends) = (engine.constraint(grammar)?, engine.stop_tokens());
    Ok(Box::new(Guided::new(sampler, constraint, engine.tokenizer()?, ends)))
}

/// Refuses prompts in several forms, and flags without effect.
fn check_usage(args: &Args) -> Result<()> {
    let forms = [!args.positional.is_empty(), args.has("--prompt-file"), args.has("--ids")];
    if forms.iter().filter(|given| **given).count() != 1 {
        let forms = "a PROMPT, --prompt-file or --ids";
        return Err(Error::usage(format!("expected exactly one of {forms}")));
    }
    if args.has("--think") && (args.has("--grammar") || args.has("--schema")) {
        return Err(Error::usage("--think comes before the reply, which the grammar starts with"));
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
    let file = setup.dir.join("tokenizer.json");
    if !sys::is_present(&file) {
        bail!("{}: no tokenizer.json; without it a prompt is given as --ids", setup.dir.display());
    }
    let tokenizer = Tokenizer::load(&file)?;
    if args.has("--raw") {
        return Ok((tokenizer.encode(&text, Special::Parse), false));
    }
    let prompt = chat::render(&load::request(&[("user", &text)], args.has("--think")))?;
    Ok((prompt.ids(&tokenizer)?, prompt.is_thinking()))
}

/// Wall-clock seconds of the three phases.
struct Timings {
    load_s: f64,
    prefill_s: f64,
    decode_s: f64,
}

/// A finished run.
struct Done<'a> {
    prompt_tokens: usize,
    new_ids: Vec<u32>,
    reply: Option<Reply<'a>>,
    finish: Finish,
    drafts: draft::Counters,
    timings: Timings,
}

/// The object that `--json` prints.
fn summary(engine: &Engine, done: &Done<'_>) -> Value {
    let (new_tokens, timings) = (done.new_ids.len(), &done.timings);
    let text = |part: fn(&Reply<'_>) -> String| {
        done.reply.as_ref().map_or(Value::Null, |reply| Value::String(part(reply)))
    };
    let rate = |tokens: usize, seconds: f64| {
        Value::Float(if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 })
    };
    let finish = match done.finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    };
    let counters = engine.expert_counters();
    let drafts = vec![
        ("proposed", count(done.drafts.proposed as usize)),
        ("accepted", count(done.drafts.accepted as usize)),
        ("forwards", count(done.drafts.forwards as usize)),
    ];
    object(vec![
        ("prompt_tokens", count(done.prompt_tokens)),
        ("ids", ids(&done.new_ids)),
        ("text", text(|reply| reply.content().to_string())),
        ("reasoning", text(|reply| reply.reasoning().to_string())),
        ("finish_reason", Value::String(finish.into())),
        ("drafts", object(drafts)),
        (
            "experts",
            object(vec![
                ("hits", count(counters.hits as usize)),
                ("misses", count(counters.misses as usize)),
                ("bytes_read", count(counters.bytes_read as usize)),
            ]),
        ),
        (
            "timings",
            object(vec![
                ("load_s", Value::Float(timings.load_s)),
                ("prefill_s", Value::Float(timings.prefill_s)),
                ("decode_s", Value::Float(timings.decode_s)),
                ("prefill_tok_s", rate(done.prompt_tokens, timings.prefill_s)),
                ("decode_tok_s", rate(new_tokens.saturating_sub(1), timings.decode_s)),
            ]),
        ),
        ("peak_rss_bytes", count(sys::peak_rss_bytes())),
    ])
}
