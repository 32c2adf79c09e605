//! `coli oracle`: proves the engine against a reference: teacher forcing, greedy decoding and,
//! where given, every logit.
//!
//! Teacher forcing runs `full_ids` once and compares the argmax at every position with `tf_pred`.
//! Greedy decoding starts from `prompt_ids` and must reproduce the rest of `full_ids` token by
//! token, through the cache. The exit code is 0 only if everything holds.

#![forbid(unsafe_code)]

use super::load::{Setup, print_json};
use super::print_text;
use super::{Args, Flag, Verb, load};
use crate::bail;
use crate::engine::Engine;
use crate::error::{Context, Error, Result};
use crate::float::f32_at;
use crate::json::{self, Field, Limits};
use crate::object;
use crate::sample::argmax;
use crate::sys;
use std::path::{Path, PathBuf};

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "oracle",
    positional: "",
    summary: "check the engine against a reference: teacher forcing, greedy, logits",
    example: "coli oracle --model tests/fixtures/a_seed --logits \
              tests/fixtures/a_seed/logits_cfgeps.f32",
    flags: &[
        load::MODEL_FLAGS,
        load::PLAN_FLAGS,
        load::FLAGS,
        &[super::JSON],
        &[
            Flag::value("--ref", "FILE", "prompt_ids, full_ids, tf_pred (default: MODEL/ref.json)"),
            Flag::value("--logits", "FILE", "raw little-endian f32 [T, V] to compare with"),
            Flag::value("--tolerance", "X", "largest |Δlogit| that holds (default 1e-4)"),
        ],
    ],
    run,
};

/// A reference file.
pub struct Reference {
    /// The prompt.
    pub prompt_ids: Vec<u32>,
    /// The prompt and its greedy continuation.
    pub full_ids: Vec<u32>,
    /// Argmax at every position of `full_ids`.
    pub tf_pred: Vec<u32>,
}

impl Reference {
    /// Reads and checks the file; other keys are ignored.
    pub fn read(path: &Path) -> Result<Reference> {
        let parse = || {
            let bytes = sys::read_file(path, Limits::default().max_bytes)?;
            let value = json::parse(&bytes, Limits::default())?;
            let ids = |key| {
                let ids = Field::root(&value).get(key);
                ids.ids()?.ok_or_else(|| ids.unexpected("an array of token ids"))
            };
            let [prompt_ids, full_ids, tf_pred] =
                [ids("prompt_ids")?, ids("full_ids")?, ids("tf_pred")?];
            let (full, predicted) = (full_ids.len(), tf_pred.len());
            if full != predicted {
                bail!("tf_pred has {predicted} entries, full_ids {full}");
            }
            if prompt_ids.is_empty() || !full_ids.starts_with(&prompt_ids) {
                bail!("prompt_ids is not the beginning of full_ids");
            }
            Ok(Reference { prompt_ids, full_ids, tf_pred })
        };
        parse().context(|| path.display())
    }
}

/// Difference of two sets of logits.
#[derive(Clone, Copy, Default)]
struct Difference {
    max_abs: f64,
    square_sum: f64,
    count: usize,
}

impl Difference {
    fn rms(&self) -> f64 {
        (self.square_sum / self.count.max(1) as f64).sqrt()
    }
}

fn run(args: &Args) -> Result<()> {
    let default_ref = || Path::new(args.get("--model").unwrap_or_default()).join("ref.json");
    let path = args.get("--ref").map_or_else(default_ref, PathBuf::from);
    let tolerance = args.number("--tolerance", 0.0..=1e9)?.unwrap_or(1e-4);
    args.required("--model")?;
    if args.has("--tolerance") && !args.has("--logits") {
        return Err(Error::usage("--tolerance has no effect without --logits"));
    }
    let reference = Reference::read(&path)?;
    let tokens = reference.full_ids.len();
    let setup = Setup::new(args, tokens)?;
    setup.check(&reference.full_ids)?;
    let shape = [tokens, setup.config.vocab_size];
    let gold = args.get("--logits").map(|path| read_logits(path, shape)).transpose()?;
    let engine = setup.open(tokens)?;
    let (forced, difference) = teacher_forcing(&engine, &reference, gold.as_deref())?;
    let greedy = greedy(&engine, &reference)?;
    let (forced_total, greedy_total) =
        (reference.tf_pred.len(), reference.full_ids.len() - reference.prompt_ids.len());
    let checks = [
        ("teacher forcing", forced == forced_total),
        ("greedy", greedy == greedy_total),
        ("logits", difference.is_none_or(|d| d.max_abs <= tolerance)),
    ];
    let failed: Vec<&str> =
        checks.iter().filter(|(_, holds)| !holds).map(|(name, _)| *name).collect();
    if args.has("--json") {
        print_json(&object! {
            "teacher_forcing": object! { "matched": forced, "total": forced_total },
            "greedy": object! { "matched": greedy, "total": greedy_total },
            "logits": difference.map(|d| object! { "max_abs": d.max_abs, "rms": d.rms() }),
            "pass": failed.is_empty(),
        })?;
    } else {
        let logits = difference.map_or(String::new(), |d| {
            format!(" · max|Δlogit| {:.1e} · rms {:.1e}", d.max_abs, d.rms())
        });
        print_text(&format!(
            "teacher-forcing {forced}/{forced_total} · greedy {greedy}/{greedy_total}{logits}\n"
        ))?;
    }
    if !failed.is_empty() {
        bail!("{}: the engine does not match: {}", path.display(), failed.join(", "));
    }
    Ok(())
}

fn read_logits(path: &str, [tokens, vocab]: [usize; 2]) -> Result<Vec<f32>> {
    let expected = tokens * vocab * 4;
    let bytes = sys::read_file(Path::new(path), expected).context(|| path)?;
    if bytes.len() != expected {
        let found = bytes.len();
        bail!("{path}: expected {expected} bytes (f32 [{tokens}, {vocab}]), found {found}");
    }
    let logits: Vec<f32> = (0..tokens * vocab).map(|i| f32_at(&bytes, i)).collect();
    // A difference from NaN compares with nothing, and so would pass any tolerance.
    if let Some(i) = logits.iter().position(|logit| !logit.is_finite()) {
        bail!("{path}: logit {} of position {} is {}", i % vocab, i / vocab, logits[i]);
    }
    Ok(logits)
}

/// Positions whose argmax is the reference's, and the difference from `gold` if there is one.
fn teacher_forcing(
    engine: &Engine,
    reference: &Reference,
    gold: Option<&[f32]>,
) -> Result<(usize, Option<Difference>)> {
    let (mut matched, mut position) = (0, 0);
    let mut difference = gold.map(|_| Difference::default());
    let mut watch = load::Watch::new(engine, reference.full_ids.len());
    engine.session()?.logits_of_all(&reference.full_ids, &mut watch, |logits| {
        matched += usize::from(argmax(logits)? == reference.tf_pred[position]);
        if let (Some(d), Some(gold)) = (&mut difference, gold) {
            let gold = &gold[position * logits.len()..(position + 1) * logits.len()];
            for (a, b) in logits.iter().zip(gold) {
                let delta = *a as f64 - *b as f64;
                d.max_abs = d.max_abs.max(delta.abs());
                d.square_sum += delta * delta;
                d.count += 1;
            }
        }
        position += 1;
        Ok(())
    })?;
    watch.clear();
    Ok((matched, difference))
}

/// Tokens of the greedy continuation that equal the reference's, until the first that differs.
fn greedy(engine: &Engine, reference: &Reference) -> Result<usize> {
    let mut tokens = reference.prompt_ids.clone();
    let mut session = engine.session()?;
    let mut watch = load::Watch::new(engine, tokens.len());
    while tokens.len() < reference.full_ids.len() {
        let next = argmax(session.advance(&tokens, &mut watch)?)?;
        if next != reference.full_ids[tokens.len()] {
            break;
        }
        tokens.push(next);
    }
    watch.clear();
    Ok(tokens.len() - reference.prompt_ids.len())
}
