//! `coli bench`: how fast the model runs, as shares of what this machine can do at most.
//!
//! Limits and model are measured in turns, several rounds in one run, and medians are reported:
//! on a busy machine both slow down together, so their ratio says more than any figure alone.
//! The first round only warms up, so experts that fit the cache are read before it counts.

#![forbid(unsafe_code)]

use super::load::{Setup, figure, print_json};
use super::{Args, Flag, Verb, iobench, load, oracle, print_text};
use crate::bail;
use crate::engine::{Engine, Session};
use crate::error::Result;
use crate::json::{Value, to_compact};
use crate::model::Unobserved;
use crate::object;
use crate::ops::{Compute, Tally};
use crate::sys;
use std::path::{Path, PathBuf};
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

/// What to measure, and on what.
struct Bench<'a> {
    engine: &'a Engine,
    ids: Vec<u32>,
    decode: usize,
    depth: usize,
    prefill: Vec<usize>,
    /// The file that measures the drive.
    shard: PathBuf,
}

/// Figures of one kind by their names; of several rounds, in the same order.
type Figures = Vec<(&'static str, f64)>;

/// What one round measured. A share of a limit that was not measured is not a number.
#[derive(Default)]
struct Round {
    limits: Figures,
    decode: Figures,
    prefill: Vec<Figures>,
    cold: Figures,
}

fn run(args: &Args) -> Result<()> {
    let number = |name: &str, default: usize| -> Result<usize> {
        Ok(args.number(name, 0..=1 << 20)?.unwrap_or(default))
    };
    let (decode, depth) = (number("--decode", 32)?, number("--depth", 0)?);
    let prompts = args.ids("--prefill")?.unwrap_or(vec![128]);
    let prefill: Vec<usize> = prompts.iter().map(|n| *n as usize).filter(|n| *n > 0).collect();
    let (rounds, is_cold) = (number("--rounds", 5)?.max(1), args.has("--cold"));
    let tokens = prefill.iter().copied().fold(depth + decode, usize::max);
    let mut setup = Setup::new(args, tokens)?;
    if is_cold {
        setup.read_direct();
    }
    let ids = token_ids(args.get("--ref"), setup.config.vocab_size, tokens)?;
    setup.check(&ids)?;
    let shard = load::directory(args)?.largest_shard().path.clone();
    let engine = &setup.open(tokens)?;
    let bench = Bench { engine, ids, decode, depth, prefill, shard };
    let mut limits = args.has("--limits").then(limits::Limits::new).transpose()?;
    let mut compute = Compute::new(engine.options().threads, engine.options().isa);
    // Keeps its context: only the first round has to read it.
    let mut session = engine.session()?;
    let disk_gbs = if limits.is_some() { bench.disk_gbs()? } else { f64::NAN };
    let mut measured = Vec::new();
    for _ in 0..=rounds {
        let (mut round, mut speeds) = (Round::default(), [f64::NAN; 3]);
        if let Some(limits) = &mut limits {
            speeds = limits.measure(&mut compute);
            let names = ["read_gbs", "int16_gmacs", "f32_gflops"];
            let of_drive = [("disk_gbs", disk_gbs)];
            round.limits = names.into_iter().zip(speeds).chain(of_drive).collect();
        }
        let [read_gbs, int16_gmacs, _] = speeds;
        if decode > 0 {
            round.decode = bench.decode(&mut session, read_gbs)?;
        }
        let prefill = bench.prefill.iter().map(|rows| bench.prefill(*rows, int16_gmacs));
        round.prefill = prefill.collect::<Result<_>>()?;
        if is_cold {
            round.cold = bench.cold(&mut session)?;
        }
        measured.push(round);
    }
    let rounds = &measured[1..];
    let prefill = 0..bench.prefill.len();
    let prefill = prefill.map(|i| medians(rounds, |round| &round.prefill[i]));
    let result = object! {
        "machine": machine(&compute),
        "limits": medians(rounds, |round| &round.limits),
        "decode": medians(rounds, |round| &round.decode),
        "prefill": prefill.collect::<Vec<_>>(),
        "cold": medians(rounds, |round| &round.cold),
        "peak_rss_bytes": sys::peak_rss_bytes(),
    };
    if args.has("--json") { print_json(&result) } else { print_text(&plain(&result, 0)) }
}

impl Bench<'_> {
    /// Decodes token by token behind `depth` tokens of context; returns what that took.
    fn decode_timed(&self, session: &mut Session<'_>) -> Result<(f64, Tally)> {
        if session.tokens().len() < self.depth {
            session.advance(&self.ids[..self.depth], &mut Unobserved)?;
        }
        self.timed(|| {
            (self.depth + 1..=self.depth + self.decode)
                .try_for_each(|end| session.advance(&self.ids[..end], &mut Unobserved).map(drop))
        })
    }

    fn timed(&self, work: impl FnOnce() -> Result<()>) -> Result<(f64, Tally)> {
        self.engine.take_tally();
        let start = Instant::now();
        work()?;
        Ok((start.elapsed().as_secs_f64(), self.engine.take_tally()))
    }

    fn decode(&self, session: &mut Session<'_>, read_gbs: f64) -> Result<Figures> {
        let (seconds, tally) = self.decode_timed(session)?;
        let gbs = tally.weight_bytes as f64 / 1e9 / seconds;
        Ok(vec![
            ("tok_s", self.decode as f64 / seconds),
            ("weight_bytes_per_token", (tally.weight_bytes / self.decode as u64) as f64),
            ("gbs", gbs),
            ("of_read_limit", gbs / read_gbs),
            ("products_share", tally.product_s / seconds),
            ("attention_share", tally.attention_s / seconds),
            ("indexer_share", tally.indexer_s / seconds),
        ])
    }

    fn prefill(&self, rows: usize, int16_gmacs: f64) -> Result<Figures> {
        let mut session = self.engine.session()?;
        let (seconds, tally) =
            self.timed(|| session.advance(&self.ids[..rows], &mut Unobserved).map(drop))?;
        let [gmacs, products_gmacs] =
            [seconds, tally.product_s].map(|seconds| tally.macs as f64 / 1e9 / seconds);
        Ok(vec![
            ("rows", rows as f64),
            ("tok_s", rows as f64 / seconds),
            ("gmacs", gmacs),
            ("of_int16_limit", gmacs / int16_gmacs),
            ("products_gmacs", products_gmacs),
            ("products_of_int16_limit", products_gmacs / int16_gmacs),
            ("attention_share", tally.attention_s / seconds),
        ])
    }

    /// Decodes behind the same context, but begins without any expert in memory.
    fn cold(&self, session: &mut Session<'_>) -> Result<Figures> {
        let limit_gbs = self.disk_gbs()?;
        self.engine.forget_experts();
        let before = self.engine.expert_counters();
        let (seconds, _) = self.decode_timed(session)?;
        let after = self.engine.expert_counters();
        let gbs = (after.bytes_read - before.bytes_read) as f64 / 1e9 / seconds;
        Ok(vec![
            ("tok_s", self.decode as f64 / seconds),
            ("disk_gbs", gbs),
            ("disk_limit_gbs", limit_gbs),
            ("of_disk_limit", gbs / limit_gbs),
            // All the time in which some read was under way.
            ("disk_busy", (after.busy_ns - before.busy_ns) as f64 / 1e9 / seconds),
        ])
    }

    /// What the drive gives at the best of some depths, around the page cache; not a number where
    /// the file system has no such reads, or the file is small.
    fn disk_gbs(&self) -> Result<f64> {
        let mut best = f64::NAN;
        if self.shard.metadata()?.len() >= BLOCK_BYTES as u64 {
            for queue in [1, 2, 4, 8] {
                let speed = iobench::measure(&self.shard, true, BLOCK_BYTES, READS, queue)?;
                best = speed.map_or(best, |speed| speed.gbs.max(best));
            }
        }
        Ok(best)
    }
}

/// Block and number of the reads that measure the drive.
const BLOCK_BYTES: usize = 8 << 20;
const READS: usize = 64;

/// The ids of a reference, or a fixed random sequence (the same on every machine).
fn token_ids(reference: Option<&str>, vocab: usize, count: usize) -> Result<Vec<u32>> {
    if let Some(path) = reference {
        let mut ids = oracle::Reference::read(Path::new(path))?.full_ids;
        if ids.len() < count {
            bail!("{path}: has {} tokens, {count} are needed", ids.len());
        }
        ids.truncate(count);
        return Ok(ids);
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

/// The processor's name, and how it is used.
fn machine(compute: &Compute) -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let name = name.map_or("unknown processor", |(_, name)| name);
    let (threads, isa) = (compute.pool.threads(), compute.arithmetic.isa());
    format!("{name}, {threads} threads, {isa}")
}

/// The median of each figure over the rounds; null if there are none.
fn medians(rounds: &[Round], part: impl Fn(&Round) -> &Figures) -> Value {
    let median = |(i, (name, _)): (usize, &(&str, f64))| {
        let mut values: Vec<f64> = rounds.iter().map(|round| part(round)[i].1).collect();
        values.sort_by(f64::total_cmp);
        (name.to_string(), figure(values[values.len() / 2]))
    };
    let medians: Vec<_> = part(&rounds[0]).iter().enumerate().map(median).collect();
    if medians.is_empty() { Value::Null } else { Value::Object(medians) }
}

/// The same figures, one a line, indented by their place.
fn plain(value: &Value, depth: usize) -> String {
    let indent = "  ".repeat(depth);
    let line = |(name, value): &(String, Value)| match value {
        Value::Null => String::new(),
        Value::Object(_) => format!("{indent}{name}\n{}", plain(value, depth + 1)),
        Value::Array(items) => {
            items.iter().map(|item| format!("{indent}{name}\n{}", plain(item, depth + 1))).collect()
        }
        Value::String(string) => format!("{indent}{name}: {string}\n"),
        other => format!("{indent}{name}: {}\n", to_compact(other)),
    };
    value.as_object().unwrap_or_default().iter().map(line).collect()
}
