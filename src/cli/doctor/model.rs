//! Checks of the model's own files.

#![forbid(unsafe_code)]

use super::{Finding, Part, Status, Subject, needs};
use crate::bail;
use crate::chat;
use crate::cli::info;
use crate::cli::load::{Setup, Watch, count, float};
use crate::config::Config;
use crate::error::{Context, Result};
use crate::json::{self, Value};
use crate::plan::gb;
use crate::sample::argmax;
use crate::sys;
use crate::tokenizer::Tokenizer;
use std::time::Instant;

/// Whether config.json is one that the engine takes.
pub fn config(subject: &Subject) -> Part<Finding> {
    let config = subject.config.as_ref().map_err(Finding::clone)?;
    let (layers, experts) = (config.num_layers, config.n_routed_experts);
    Ok(Finding::pass(format!("{layers} layers, {experts} experts, hidden {}", config.hidden_size)))
}

/// Whether tokenizer.json is one, and has no more tokens than the model.
pub fn tokenizer(subject: &Subject) -> Part<Finding> {
    let tokenizer = subject.tokenizer.as_ref().map_err(Finding::clone)?;
    if let Ok(config) = &subject.config {
        let path = subject.dir.join("tokenizer.json");
        tokenizer.check_rows(config.vocab_size).context(|| path.display())?;
    }
    Ok(Finding::pass(format!("{} tokens", tokenizer.vocab_size())))
}

/// Whether all shards are there, with headers that fit them and no tensor twice.
pub fn shards(subject: &Subject) -> Part<Finding> {
    let directory = subject.directory.as_ref().map_err(Finding::clone)?;
    let (shards, bytes) = (directory.shards().len(), directory.bytes() as usize);
    let plural = if shards == 1 { "" } else { "s" };
    let summary = format!("{shards} shard{plural}, {} tensors, {}", directory.len(), gb(bytes));
    let details = vec![("shards", count(shards)), ("model_bytes", count(bytes))];
    Ok(Finding::pass(summary).with(details))
}

/// Whether every tensor of the forward pass is there, in a format and shape that it has.
pub fn tensors(subject: &Subject) -> Part<Finding> {
    let weights = subject.weights.as_ref().map_err(Finding::clone)?;
    Ok(match (weights.has_indexer, needs(&subject.config, "model.config")?.index_topk) {
        (true, _) => Finding::pass("all there, in shapes and formats that are known"),
        (false, topk) => {
            Finding::warn(format!("no indexer: attention stays dense beyond {topk} tokens"))
        }
    })
}

/// Whether a draft head can be of use.
pub fn draft_head(subject: &Subject) -> Part<Finding> {
    let directory = needs(&subject.directory, "model.shards")?;
    let format = info::draft_head_format(directory, needs(&subject.config, "model.config")?)?;
    let Some(format) = format else { return Err(Finding::skip("the model has none")) };
    Ok(match info::draft_head_warning(format) {
        Some(warning) => Finding::warn(format!("{format}: {warning}")),
        None => Finding::pass(format.to_string()),
    })
}

/// The tokens of the shortest chat.
fn chat_ids(tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let request = br#"{"messages":[{"role":"user","content":"Hi"}]}"#;
    chat::render(&json::parse(request, json::Limits::default())?)?.ids(tokenizer)
}

/// Whether the tokenizer can write the built-in template. A file with one is never read; one that
/// lacks what every GLM template writes tells that the directory is of another model.
pub fn template(subject: &Subject) -> Part<Finding> {
    let tokenizer = needs(&subject.tokenizer, "model.tokenizer")?;
    if let Err(error) = chat_ids(tokenizer) {
        return Ok(Finding::warn(format!("chats are not possible: {error}")));
    }
    let file = subject.dir.join("chat_template.jinja");
    let built_in = "built in (GLM-5.2)";
    if !sys::is_present(&file) {
        return Ok(Finding::pass(format!("{built_in}; no file is needed")));
    }
    let bytes = sys::read_file(&file, 1 << 20).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let markers = ["[gMASK]<sop>", "<|user|>", "<|assistant|>", "<think>"];
    Ok(match markers.into_iter().find(|marker| !text.contains(marker)) {
        Some(marker) => Finding::warn(format!(
            "{built_in}, but {} is another model's: it has no {marker}",
            file.display()
        )),
        None => Finding::pass(format!("{built_in}; chat_template.jinja is not read")),
    })
}

/// Whether the files that engines leave beside the model are whole.
pub fn state(subject: &Subject) -> Part<Finding> {
    let mut files = Vec::new();
    for name in info::state_files(subject.dir)? {
        let path = subject.dir.join(&name);
        let bytes = path.symlink_metadata().context(|| path.display())?.len() as usize;
        if name == ".coli_usage" {
            let config = subject.config.as_ref().ok();
            let checked = sys::read_file(&path, 16 << 20)
                .and_then(|text| check_usage(&String::from_utf8_lossy(&text), config));
            if let Err(error) = checked.context(|| path.display()) {
                return Ok(Finding::warn(error.to_string()));
            }
        }
        files.push((name, bytes));
    }
    if files.is_empty() {
        return Err(Finding::skip("there are none"));
    }
    let names: Vec<String> =
        files.iter().map(|(name, bytes)| format!("{name} ({})", gb(*bytes))).collect();
    let sizes = files.into_iter().map(|(name, bytes)| (name, count(bytes))).collect();
    let details = vec![("bytes", Value::Object(sizes))];
    Ok(Finding::pass(names.join(", ")).with(details))
}

/// A history of use is lines of `layer expert count`; the draft head's layer comes behind the
/// others. Two lines may stand before them: `-1 layers experts`, and `-2 1 hash` of the family.
fn check_usage(text: &str, config: Option<&Config>) -> Result<()> {
    for (i, line) in text.lines().enumerate() {
        let numbers: Vec<Option<i64>> =
            line.split_ascii_whitespace().map(|word| word.parse().ok()).collect();
        match numbers[..] {
            [Some(-1), Some(0..), Some(0..)] if i == 0 => {}
            [Some(-2), Some(1), Some(0..)] if i == 1 => {}
            [Some(layer @ 0..), Some(expert @ 0..), Some(0..)] => {
                let is_known = config.is_none_or(|config| {
                    layer as usize <= config.num_layers
                        && (expert as usize) < config.n_routed_experts
                });
                if !is_known {
                    bail!("line {}: the model has no expert {expert} in layer {layer}", i + 1);
                }
            }
            _ => {
                let start: String = line.chars().take(40).collect();
                bail!("line {}: expected layer, expert and count, found {start:?}", i + 1);
            }
        }
    }
    Ok(())
}

/// Whether the model computes: loads it and runs the first two tokens of any chat, or token 0.
pub fn first_token(subject: &Subject) -> Part<Finding> {
    if !subject.args.has("--deep") {
        return Err(Finding::skip("only with --deep"));
    }
    needs(&subject.report, "memory.ram")?;
    let mut ids = subject.tokenizer.as_ref().ok().and_then(|t| chat_ids(t).ok()).unwrap_or(vec![0]);
    ids.truncate(2);
    let setup = Setup::new(subject.args, ids.len())?;
    setup.check(&ids)?;
    let start = Instant::now();
    let engine = setup.open(ids.len())?;
    let load_seconds = start.elapsed().as_secs_f64();
    let mut session = engine.session()?;
    let start = Instant::now();
    let logits = session.advance(&ids, &mut Watch::new(&engine, ids.len()))?;
    let seconds = start.elapsed().as_secs_f64();
    let top = argmax(logits)?;
    if logits.iter().all(|logit| *logit == logits[0]) {
        return Ok(Finding::new(Status::Fail, format!("all logits are {}", logits[0])));
    }
    let summary = format!(
        "token {top} follows {ids:?}; loaded in {load_seconds:.1} s, computed in {seconds:.1} s"
    );
    let seconds = [("load_seconds", float(load_seconds)), ("seconds", float(seconds))];
    let top = [("token", count(top as usize))];
    Ok(Finding::pass(summary).with(top.into_iter().chain(seconds).collect()))
}
