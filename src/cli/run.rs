//! `coli run`: one prompt in, one reply out.
//!
//! A prompt is one user turn of the chat template, unless `--raw` or `--ids` hand over the tokens
//! themselves. Without `--json` the text is streamed, whole characters at a time.

#![forbid(unsafe_code)]

use super::load::{Setup, count, ids, object, print_json};
use super::{Args, Flag, Verb, load, note, print_text};
use crate::bail;
use crate::chat;
use crate::draft;
use crate::engine::{Engine, Finish, Restored, Session};
use crate::error::{Context, Error, Result};
use crate::experts::usage;
use crate::grammar::{Grammar, Guided};
use crate::json::{self, Limits, Value};
use crate::reply::Reply;
use crate::sample::{Choose, Params, Sampler};
use crate::state::common_tokens;
use crate::sys;
use crate::tokenizer::{Special, Tokenizer};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

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
        &[
            Flag::value("--prompt-file", "FILE", "read the prompt from a file"),
            Flag::value("--ids", "1,2,3", "the prompt as token ids"),
            Flag::switch("--raw", "no chat template; control tokens in the prompt are parsed"),
            Flag::switch("--think", "let the model think first (default: thinking is off)"),
            Flag::value("-n", "N", "at most N new tokens (default 256)").or_env("NGEN"),
            Flag::value("--temp", "X", "temperature, 0 is greedy (default 1)"),
            Flag::value("--top-p", "X", "nucleus of the distribution (default 0.95)"),
            Flag::value("--top-k", "N", "only the N best tokens (default 0: all)"),
            Flag::value("--min-p", "X", "only tokens this likely against the best (default 0)"),
            Flag::value(
                "--repetition-penalty",
                "X",
                "divides logits of all tokens so far (default 1)",
            ),
            Flag::value("--presence-penalty", "X", "taken from those in the reply (default 0)"),
            Flag::value("--frequency-penalty", "X", "the same, each time it is there (default 0)"),
            Flag::value("--logit-bias", "ID:X,…", "added to the logits of these tokens"),
            Flag::value("--grammar", "FILE", "GBNF that the reply must match"),
            Flag::value("--schema", "FILE", "JSON Schema that the reply must be valid for"),
            Flag::value(
                "--session",
                "FILE",
                "start from what it holds of the prompt, and save to it",
            ),
            Flag::value("--seed", "N", "seed of all draws (default: from the clock)"),
            Flag::value("--stop", "TEXT", "end before this text; may be given several times")
                .repeated(),
            Flag::value(
                "--usage",
                "FILE",
                "which experts were used, learned from run to run; off: no",
            )
            .or_env("COLI_USAGE"),
            load::PIN,
            Flag::value(
                "--repin",
                "N",
                "choose what is pinned anew after N tokens (default 0: never)",
            ),
            Flag::value("--trace", "FILE", "write which experts each token chose, for coli trace"),
        ],
    ],
    run,
};

/// Longest prompt file.
const PROMPT_BYTES_MAX: usize = 64 << 20;

/// New tokens when `-n` does not say.
const NEW_TOKENS_DEFAULT: usize = 256;

fn run(args: &Args) -> Result<()> {
    let new_tokens = args.number("-n", 1..=1usize << 24)?.unwrap_or(NEW_TOKENS_DEFAULT);
    let stops = args.all("--stop");
    check_usage(args)?;
    let start = Instant::now();
    let setup = Setup::new(args, 0)?;
    let params = params(args, setup.config.vocab_size)?;
    let grammar = grammar(args)?;
    let (prompt, thinking) = match args.ids("--ids")? {
        Some(ids) => (ids, false),
        None => prompt_ids(&setup, args)?,
    };
    setup.check(&prompt)?;
    if !stops.is_empty() && !sys::is_present(&setup.dir.join("tokenizer.json")) {
        bail!("--stop needs a tokenizer.json in the model directory");
    }
    // The last token is drawn, never fed.
    let engine = setup.open(prompt.len() + new_tokens - 1)?;
    let usage = open_usage(args, &engine);
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
    save_usage(usage, &engine);
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
    let Some((session, Restored { tokens, age })) = engine.restore(file)? else {
        return engine.session();
    };
    let units = [("days", 86_400), ("hours", 3600), ("minutes", 60), ("seconds", 1)];
    let fits = |(_, seconds): &&(&str, u64)| age.as_secs() >= 2 * seconds;
    let (unit, seconds) = units.iter().find(fits).unwrap_or(&units[3]);
    let (age, common) = (age.as_secs() / seconds, common_tokens(session.tokens(), prompt));
    note(&format!(
        "coli: {}: resumes {tokens} tokens saved {age} {unit} ago, the prompt starts with {common} \
         of them; delete the file to start anew\n",
        file.display()
    ));
    Ok(session)
}

/// Starts from what earlier runs learned; returns the file to write what this one adds.
fn open_usage(args: &Args, engine: &Engine) -> Option<PathBuf> {
    let path = match args.get("--usage") {
        Some("off") => return None,
        Some(file) => file.into(),
        None => Path::new(args.get("--model")?).join(usage::FILE_NAME),
    };
    if let Err(error) = engine.load_usage(&path) {
        note(&format!("coli: {error}; the run goes on without, and leaves the file alone\n"));
        return None;
    }
    // As for the C engine: the file is only read.
    (std::env::var("USAGE_SAVE").as_deref() != Ok("0")).then_some(path)
}

/// Writes what was learned; a run does not fail by it.
fn save_usage(file: Option<PathBuf>, engine: &Engine) {
    let saved = file.map_or(Ok(()), |file| engine.save_usage(&file));
    saved.unwrap_or_else(|error| note(&format!("coli: {error}; what was learned is lost\n")));
}

/// Sampling parameters of the flags.
fn params(args: &Args, vocab_size: usize) -> Result<Params> {
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let params = Params {
        temperature: args.number("--temp", 0.0..=100.0)?.unwrap_or(1.0),
        top_p: args.number("--top-p", 0.0..=1.0)?.unwrap_or(0.95),
        top_k: args.number("--top-k", 0..=usize::MAX)?.unwrap_or(0),
        min_p: args.number("--min-p", 0.0..=1.0)?.unwrap_or(0.0),
        repetition_penalty: args.number("--repetition-penalty", 0.01..=100.0)?.unwrap_or(1.0),
        presence_penalty: args.number("--presence-penalty", -2.0..=2.0)?.unwrap_or(0.0),
        frequency_penalty: args.number("--frequency-penalty", -2.0..=2.0)?.unwrap_or(0.0),
        logit_bias: logit_bias(args)?,
        seed: args.number("--seed", 0..=u64::MAX)?.unwrap_or_else(clock),
    };
    // What the ranges of the flags let pass: a top_p of 0, a bias.
    let checked = params.validate(vocab_size);
    checked.map_err(|error| Error::usage(format!("--{error}").replace('_', "-")))?;
    Ok(params)
}

/// Pairs of token id and bias between commas.
fn logit_bias(args: &Args) -> Result<Vec<(u32, f64)>> {
    let pair = |text: &str| {
        let numbers =
            text.split_once(':').map(|(id, bias)| (id.trim().parse(), bias.trim().parse()));
        match numbers {
            Some((Ok(id), Ok(bias))) => Ok((id, bias)),
            _ => Err(Error::usage(format!("--logit-bias: expected id:bias, found {text:?}"))),
        }
    };
    args.get("--logit-bias").map_or(Ok(Vec::new()), |text| text.split(',').map(pair).collect())
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
    if (args.has("--raw") || args.has("--ids")) && args.has("--think") {
        return Err(Error::usage("--think needs the chat template"));
    }
    if args.has("--raw") && args.has("--ids") {
        return Err(Error::usage("--ids are fed as they are, --raw has no effect on them"));
    }
    if args.has("--repin") && !args.has("--pin") {
        return Err(Error::usage("--repin needs a --pin"));
    }
    if args.has("--think") && (args.has("--grammar") || args.has("--schema")) {
        return Err(Error::usage("--think comes before the reply, which the grammar starts with"));
    }
    if args.all("--stop").iter().any(String::is_empty) {
        return Err(Error::usage("--stop: expected a text, found none"));
    }
    Ok(())
}

/// The prompt as text.
fn prompt_text(args: &Args) -> Result<String> {
    let file = args.get("--prompt-file").map(|path| load::read_text(path, PROMPT_BYTES_MAX));
    file.unwrap_or_else(|| Ok(args.positional.join(" ")))
}

/// The tokens of a prompt, and whether they end in an open think block: rendered as one user turn,
/// or as it stands with `--raw`. The tokenizer is read once more with the weights: a bad prompt
/// shall not wait for those.
fn prompt_ids(setup: &Setup<'_>, args: &Args) -> Result<(Vec<u32>, bool)> {
    let text = prompt_text(args)?;
    let file = setup.dir.join("tokenizer.json");
    if !sys::is_present(&file) {
        bail!("{}: no tokenizer.json; without it a prompt is given as --ids", setup.dir.display());
    }
    let tokenizer = Tokenizer::load(&file)?;
    if args.has("--raw") {
        return Ok((tokenizer.encode(&text, Special::Parse), false));
    }
    let message =
        object(vec![("role", Value::String("user".into())), ("content", Value::String(text))]);
    let request = object(vec![
        ("messages", Value::Array(vec![message])),
        ("enable_thinking", Value::Bool(args.has("--think"))),
    ]);
    let prompt = chat::render(&request)?;
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
