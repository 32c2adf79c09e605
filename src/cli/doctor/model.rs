//! Checks of the model's own files.

#![forbid(unsafe_code)]

use super::{Finding, Part, Status, Subject, needs};
use crate::chat;
use crate::cli::info;
use crate::cli::load::{Setup, Watch, figure};
use crate::error::{Context, Result};
use crate::experts::usage::Usage;
use crate::json;
use crate::plan::gb;
use crate::sample::argmax;
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
    let (files, tensors) = (info::describe_shards(shards), directory.len());
    let summary = format!("{files}, {tensors} tensors, {}", gb(bytes));
    Ok(Finding::pass(summary).with("shards", shards).with("model_bytes", bytes))
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

/// Whether the tokenizer can write the template, which no file has a say in.
pub fn template(subject: &Subject) -> Part<Finding> {
    let tokenizer = needs(&subject.tokenizer, "model.tokenizer")?;
    Ok(match chat_ids(tokenizer) {
        Ok(_) => Finding::pass("built in (GLM-5.2); no file is read for it"),
        Err(error) => Finding::warn(format!("chats are not possible: {error}")),
    })
}

/// Whether the files that engines leave beside the model are whole.
pub fn state(subject: &Subject) -> Part<Finding> {
    let mut files = Vec::new();
    for name in info::state_files(subject.dir)? {
        let path = subject.dir.join(&name);
        let bytes = path.symlink_metadata().context(|| path.display())?.len() as usize;
        if name == ".coli_usage"
            && let Ok(config) = &subject.config
            && let Err(error) = Usage::read(&path, config.num_layers, config.n_routed_experts)
        {
            return Ok(Finding::warn(error.to_string()));
        }
        files.push(format!("{name} ({})", gb(bytes)));
    }
    match files.is_empty() {
        true => Err(Finding::skip("there are none")),
        false => Ok(Finding::pass(files.join(", "))),
    }
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
    let summary = format!("token {top} after {ids:?}, in {seconds:.1} s; load {load_seconds:.1} s");
    let found = Finding::pass(summary).with("token", top);
    Ok(found.with("seconds", figure(seconds)).with("load_seconds", figure(load_seconds)))
}
