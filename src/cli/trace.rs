//! `coli trace`: a recorded routing trace against every rule of eviction, at several budgets.

#![forbid(unsafe_code)]

use super::load::print_json;
use super::{Args, Flag, Verb, print_text};
use crate::error::{Error, Result};
use crate::experts::replay::{EVICTIONS, Past, hit_rate};
use crate::experts::trace::Trace;
use crate::json::Value;
use crate::object;
use std::path::Path;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "trace",
    positional: "FILE…",
    summary: "replay routing traces of run --trace against every eviction rule",
    example: "coli trace --slots 4,8 tests/fixtures/small.trace",
    flags: &[&[
        Flag::value("--slots", "N,N…", "slots per layer (default 5, 10, 20, 40 % of its experts)"),
        Flag::value("--past", "FILE", "trace of an earlier run, for the rules that learn"),
        Flag::value("--pin", "PERCENT", "share of the slots that its most used experts keep"),
        super::JSON,
    ]],
    run,
};

/// Percent of all experts.
const PERCENTS: [usize; 4] = [5, 10, 20, 40];

fn run(args: &Args) -> Result<()> {
    if args.positional.is_empty() {
        return Err(Error::usage("expected the files of some traces"));
    }
    let slots = args.ids("--slots")?;
    if slots.iter().flatten().any(|slots| *slots == 0) {
        return Err(Error::usage("--slots: expected at least 1"));
    }
    let past = past(args)?;
    let mut rows = Vec::new();
    for file in &args.positional {
        let trace = Trace::read(Path::new(file))?;
        let slots = slots.clone().unwrap_or_else(|| {
            PERCENTS.map(|p| (trace.shape.experts * p).div_ceil(100) as u32).to_vec()
        });
        for slots in slots {
            let rate = |(_, eviction): &(_, _)| hit_rate(&trace, slots as usize, *eviction, &past);
            rows.push((file.as_str(), slots as usize, EVICTIONS.iter().map(rate).collect()));
        }
    }
    if args.has("--json") { print_json(&json(&rows)) } else { print_text(&text(&rows)) }
}

/// What the rules know before the first visit.
fn past(args: &Args) -> Result<Past> {
    let pinned = args.number("--pin", 0.0..=100.0)?.unwrap_or(0.0) / 100.0;
    let Some(file) = args.get("--past") else {
        if args.has("--pin") {
            return Err(Error::usage("--pin needs a --past"));
        }
        return Ok(Past::default());
    };
    Ok(Past { usage: Trace::read(Path::new(file))?.usage(), pinned })
}

/// A line for each trace and budget: the share of hits by each rule, in percent.
fn text(rows: &[(&str, usize, Vec<f64>)]) -> String {
    let mut text = String::from("slots");
    EVICTIONS.iter().for_each(|(name, _)| text += &format!(" {name:>9}"));
    let mut last = "";
    for (file, slots, rates) in rows {
        if *file != last {
            text += &format!("\n{file}");
        }
        last = file;
        text += &format!("\n{slots:>5}");
        rates.iter().for_each(|rate| text += &format!(" {:>9.2}", 100.0 * rate));
    }
    text + "\n"
}

fn json(rows: &[(&str, usize, Vec<f64>)]) -> Value {
    let row = |(file, slots, rates): &(&str, usize, Vec<f64>)| {
        let rates = EVICTIONS.iter().zip(rates);
        let rates = rates.map(|((name, _), rate)| (name.to_string(), Value::Float(*rate)));
        let rates = Value::Object(rates.collect());
        object! { "file": *file, "slots_per_layer": *slots, "hit_rates": rates }
    };
    object! { "replays": rows.iter().map(row).collect::<Vec<_>>() }
}
