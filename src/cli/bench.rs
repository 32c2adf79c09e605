//! `coli bench`: how fast the model runs, as shares of what this machine can do at most.
//!
//! Limits and model are measured in turns, several rounds in one run, and medians are reported:
//! on a busy machine both slow down together, so their ratio says more than any figure alone.
//! The first round only warms up, so experts that fit the cache are read before it counts.

#![forbid(unsafe_code)]

use super::load::{Setup, count, float, object, print_json};
use super::{Args, Flag, Verb, iobench, load, oracle, print_text};
use crate::bail;
use crate::engine::{Engine, Session};
use crate::error::Result;
use crate::experts::READS_MAX;
use crate::json::Value;
use crate::model::Unobserved;
use crate::ops::{Compute, Tally};
use crate::sys;
use std::path::Path;
use std::time::Instant;

mod limits;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "bench",
    positional: "",
    summary: "measure decode and prefill, as shares of what this machine can do",
    example: "coli bench --model oracle/demo --prefill 128 --limits",
    flags: &[
        load::MODEL_FLAGS,
        load::PLAN_FLAGS,
        load::FLAGS,
        &[super::JSON],
        &[
            Flag::value("--decode", "N", "tokens to decode per round (default 32, 0 for none)"),
            Flag::value("--depth", "N", "tokens of context before the first decoded one"),
            Flag::value("--prefill", "N,N", "rows of prompts (default 128, 0 for none)"),
            Flag::value("--rounds", "N", "rounds after the first, which warms up (default 5)"),
            Flag::value("--ref", "FILE", "token ids from a reference file, instead of random ones"),
            Flag::switch("--cold", "also decode with all experts evicted, and measure the drive"),
            Flag::switch("--limits", "measure memory, multiply-adds and disk, and report shares"),
        ],
    ],
    run,
};

/// What to measure.
struct Course {
    decode: usize,
    depth: usize,
    prefill: Vec<usize>,
    rounds: usize,
    cold: bool,
}

/// Medians of the rounds.
#[derive(Default)]
struct Round {
    read_gbs: f64,
    int16_gmacs: f64,
    f32_gflops: f64,
    decode: Option<Measured>,
    prefill: Vec<Measured>,
    cold: Option<Cold>,
}

/// Decoding that begins without any expert in memory.
#[derive(Clone, Copy)]
struct Cold {
    measured: Measured,
    /// Experts that were read, and all the time in which some read was under way.
    bytes: u64,
    busy_s: f64,
    /// What the drive gives at the best number of reads in flight.
    limit_gbs: f64,
}

impl Cold {
    fn gbs(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.measured.seconds
    }
}

/// One measured stretch of tokens.
#[derive(Clone, Copy)]
struct Measured {
    tokens: usize,
    seconds: f64,
    tally: Tally,
}

impl Measured {
    fn tok_s(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
    fn weight_gbs(&self) -> f64 {
        self.tally.weight_bytes as f64 / 1e9 / self.seconds
    }
    fn gmacs(&self) -> f64 {
        self.tally.macs as f64 / 1e9 / self.seconds
    }
}

fn run(args: &Args) -> Result<()> {
    let number = |name: &str, default: usize| -> Result<usize> {
        Ok(args.number(name, 0..=1 << 20)?.unwrap_or(default))
    };
    let prompts = args.ids("--prefill")?.unwrap_or(vec![128]);
    let course = Course {
        decode: number("--decode", 32)?,
        depth: number("--depth", 0)?,
        prefill: prompts.iter().map(|n| *n as usize).filter(|rows| *rows > 0).collect(),
        rounds: number("--rounds", 5)?.max(1),
        cold: args.has("--cold"),
    };
    let longest = course.prefill.iter().copied().max().unwrap_or(0);
    let tokens = longest.max(course.depth + course.decode);
    let mut setup = Setup::new(args, tokens)?;
    if course.cold {
        setup.read_direct();
    }
    let ids = token_ids(args.get("--ref"), setup.config.vocab_size, tokens)?;
    setup.check(&ids)?;
    let shard = load::directory(args)?.largest_shard().path.clone();
    let engine = setup.open(tokens)?;
    let with_limits = args.has("--limits");
    let mut memory = with_limits.then(limits::Memory::new).transpose()?;
    let options = engine.options();
    let mut compute = Compute::new(options.threads, options.isa);
    // Keeps its context: only the first round has to read it.
    let mut session = engine.session()?;
    let mut rounds = Vec::new();
    for i in 0..=course.rounds {
        let mut round = Round::default();
        if let Some(memory) = &mut memory {
            round.read_gbs = memory.read_gbs(&mut compute);
        }
        if course.decode > 0 {
            round.decode = Some(decode(&engine, &mut session, &course, &ids)?);
        }
        if with_limits {
            round.int16_gmacs = limits::int16_gmacs(&mut compute);
            round.f32_gflops = limits::f32_gflops(&mut compute);
        }
        for rows in &course.prefill {
            round.prefill.push(prefill(&engine, &ids[..*rows])?);
        }
        if course.cold {
            let limit_gbs = best_disk_gbs(&shard)?;
            round.cold = Some(cold(&engine, &mut session, (&course, &ids), limit_gbs)?);
        }
        if i > 0 {
            rounds.push(round);
        }
    }
    let disk = if with_limits { disk_limit(&shard)? } else { None };
    report(args, &compute, &rounds, disk)
}

/// What the drive gives at the depth at which the engine reads; `None` for a small file.
fn disk_limit(path: &Path) -> Result<Option<iobench::Speed>> {
    if path.metadata()?.len() < BLOCK_BYTES as u64 {
        return Ok(None);
    }
    let direct = iobench::measure(path, true, BLOCK_BYTES, READS, READS_MAX)?;
    match direct {
        Some(speed) => Ok(Some(speed)),
        None => iobench::measure(path, false, BLOCK_BYTES, READS, READS_MAX),
    }
}

/// Block and number of the reads that measure the drive.
const BLOCK_BYTES: usize = 8 << 20;
const READS: usize = 64;

/// The best of some depths, around the page cache.
fn best_disk_gbs(path: &Path) -> Result<f64> {
    let mut best: f64 = 0.0;
    for queue in [1, 2, 4, 8] {
        let speed = iobench::measure(path, true, BLOCK_BYTES, READS, queue)?;
        best = best.max(speed.map_or(0.0, |speed| speed.gbs));
    }
    Ok(best)
}

/// Decodes as [`decode`] does, behind the same context but without any expert.
fn cold(
    engine: &Engine,
    session: &mut Session<'_>,
    (course, ids): (&Course, &[u32]),
    limit_gbs: f64,
) -> Result<Cold> {
    engine.forget_experts();
    let before = engine.expert_counters();
    let measured = decode(engine, session, course, ids)?;
    let after = engine.expert_counters();
    let busy_s = (after.busy_ns - before.busy_ns) as f64 / 1e9;
    Ok(Cold { measured, bytes: after.bytes_read - before.bytes_read, busy_s, limit_gbs })
}

/// The ids of a reference, or a fixed random sequence (the same on every machine).
fn token_ids(reference: Option<&str>, vocab: usize, count: usize) -> Result<Vec<u32>> {
    if let Some(path) = reference {
        let ids = oracle::Reference::read(Path::new(path))?.full_ids;
        if ids.len() < count {
            bail!("{path}: has {} tokens, {count} are needed", ids.len());
        }
        return Ok(ids[..count].to_vec());
    }
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % vocab as u64) as u32
    };
    Ok((0..count).map(|_| draw()).collect())
}

/// Decodes token by token behind `depth` tokens of context.
fn decode(
    engine: &Engine,
    session: &mut Session<'_>,
    course: &Course,
    ids: &[u32],
) -> Result<Measured> {
    if session.tokens().len() < course.depth {
        session.advance(&ids[..course.depth], &mut Unobserved)?;
    }
    engine.take_tally();
    let start = Instant::now();
    for end in course.depth + 1..=course.depth + course.decode {
        session.advance(&ids[..end], &mut Unobserved)?;
    }
    measured(engine, course.decode, start)
}

fn prefill(engine: &Engine, ids: &[u32]) -> Result<Measured> {
    let mut session: Session<'_> = engine.session()?;
    engine.take_tally();
    let start = Instant::now();
    session.advance(ids, &mut Unobserved)?;
    measured(engine, ids.len(), start)
}

fn measured(engine: &Engine, tokens: usize, start: Instant) -> Result<Measured> {
    Ok(Measured { tokens, seconds: start.elapsed().as_secs_f64(), tally: engine.take_tally() })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The processor's name, and how it is used.
fn machine(compute: &Compute) -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let name = name.map_or("unknown processor", |(_, name)| name);
    let (threads, isa) = (compute.pool.threads(), compute.arithmetic.isa());
    format!("{name}, {threads} threads, {isa}")
}

fn report(
    args: &Args,
    compute: &Compute,
    rounds: &[Round],
    disk: Option<iobench::Speed>,
) -> Result<()> {
    let of = |f: &dyn Fn(&Round) -> f64| median(rounds.iter().map(f).collect());
    let with_limits = args.has("--limits");
    let share = |value: f64| if with_limits { float(value) } else { Value::Null };
    let limits = with_limits.then(|| {
        object(vec![
            ("read_gbs", float(of(&|r| r.read_gbs))),
            ("int16_gmacs", float(of(&|r| r.int16_gmacs))),
            ("f32_gflops", float(of(&|r| r.f32_gflops))),
            ("disk_gbs", disk.as_ref().map_or(Value::Null, |disk| float(disk.gbs))),
            ("disk_is_direct", disk.as_ref().map_or(Value::Null, |d| Value::Bool(d.is_direct))),
        ])
    });
    let decode = rounds[0].decode.map(|first| {
        let of = |f: &dyn Fn(&Measured) -> f64| of(&|r| r.decode.as_ref().map_or(0.0, f));
        let bytes = first.tally.weight_bytes as usize / first.tokens;
        let ratio = |r: &Round| r.decode.map_or(0.0, |d| d.weight_gbs()) / r.read_gbs;
        object(vec![
            ("tok_s", float(of(&Measured::tok_s))),
            ("weight_bytes_per_token", count(bytes)),
            ("gbs", float(of(&Measured::weight_gbs))),
            ("of_read_limit", share(median(rounds.iter().map(ratio).collect()))),
            ("products_share", float(of(&|m| m.tally.product_s / m.seconds))),
            ("attention_share", float(of(&|m| m.tally.attention_s / m.seconds))),
            ("indexer_share", float(of(&|m| m.tally.indexer_s / m.seconds))),
        ])
    });
    let prefill = (0..rounds[0].prefill.len()).map(|i| {
        let of = |f: &dyn Fn(&Measured) -> f64| of(&|r| f(&r.prefill[i]));
        let in_products = |m: &Measured| m.tally.macs as f64 / 1e9 / m.tally.product_s;
        let limit = |f: &dyn Fn(&Measured) -> f64| {
            median(rounds.iter().map(|r| f(&r.prefill[i]) / r.int16_gmacs).collect())
        };
        object(vec![
            ("rows", count(rounds[0].prefill[i].tokens)),
            ("tok_s", float(of(&Measured::tok_s))),
            ("gmacs", float(of(&Measured::gmacs))),
            ("of_int16_limit", share(limit(&Measured::gmacs))),
            ("products_gmacs", float(of(&in_products))),
            ("products_of_int16_limit", share(limit(&in_products))),
            ("attention_share", float(of(&|m| m.tally.attention_s / m.seconds))),
        ])
    });
    let cold = rounds[0].cold.map(|_| {
        let of = |f: &dyn Fn(&Cold) -> f64| of(&|r| r.cold.as_ref().map_or(0.0, f));
        object(vec![
            ("tok_s", float(of(&|c| c.measured.tok_s()))),
            ("disk_gbs", float(of(&Cold::gbs))),
            ("disk_limit_gbs", float(of(&|c| c.limit_gbs))),
            ("of_disk_limit", float(of(&|c| c.gbs() / c.limit_gbs))),
            ("disk_busy", float(of(&|c| c.busy_s / c.measured.seconds))),
        ])
    });
    let result = object(vec![
        ("machine", Value::String(machine(compute))),
        ("limits", limits.unwrap_or(Value::Null)),
        ("decode", decode.unwrap_or(Value::Null)),
        ("prefill", Value::Array(prefill.collect())),
        ("cold", cold.unwrap_or(Value::Null)),
        ("peak_rss_bytes", count(sys::peak_rss_bytes())),
    ]);
    if args.has("--json") { print_json(&result) } else { print_text(&plain(&result, 0)) }
}

/// The same figures, one a line, indented by their place.
fn plain(value: &Value, depth: usize) -> String {
    let mut text = String::new();
    let Value::Object(fields) = value else { return text };
    for (name, value) in fields {
        let indent = "  ".repeat(depth);
        match value {
            Value::Null => {}
            Value::Object(_) => text += &format!("{indent}{name}\n{}", plain(value, depth + 1)),
            Value::Array(items) => {
                for item in items {
                    text += &format!("{indent}{name}\n{}", plain(item, depth + 1));
                }
            }
            Value::String(string) => text += &format!("{indent}{name}: {string}\n"),
            other => {
                text += &format!("{indent}{name}: {}\n", crate::json::to_compact(other));
            }
        }
    }
    text
}
