//! `coli score`: how well the model predicts a text (perplexity), or which of several choices it
//! finds most likely (accuracy on a task).
//!
//! A text longer than `--window` tokens is read in windows that advance by `--stride`: the first
//! one scores all its tokens, each further one its last `stride`, so that every token is scored
//! once and, behind the first window, with at least window − stride tokens before it.
//! A choice is scored as the continuation of its context, of which the choices share the
//! computation. `acc` chooses by the sum of log-probabilities, `acc_norm` by the sum divided by the
//! choice's bytes (or ids, where it is a list of those).
//!
//! Log-probabilities are natural and the model's own. Text is only text: it cannot become control
//! tokens. GLM was trained with `[gMASK]<sop>` in front of everything, so they are put there where
//! the tokenizer has them; the output says so.

#![forbid(unsafe_code)]

use super::load::{Setup, Watch, count, object, print_json};
use super::{Args, Flag, Verb, load, print_text};
use crate::bail;
use crate::convert::Sums;
use crate::engine::{Engine, Session};
use crate::error::{Context, Error, Result};
use crate::json::{self, Limits, Value, to_compact};
use crate::sample::log_probabilities;
use crate::sys;
use crate::tokenizer::{Special, Tokenizer};
use std::path::Path;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "score",
    positional: "",
    summary: "measure the perplexity of a text, or the accuracy on tasks with choices",
    example: "coli score --model oracle/demo --text README.md --window 512",
    flags: &[
        load::MODEL_FLAGS,
        load::PLAN_FLAGS,
        load::FLAGS,
        &[super::JSON],
        &[
            Flag::value("--text", "FILE", "UTF-8 text: negative log-likelihood and perplexity"),
            Flag::value("--window", "N", "tokens the model sees at once (default: the context)"),
            Flag::value("--stride", "N", "tokens between windows (default: half of one)"),
            Flag::value("--tasks", "FILE", "or lines of {\"ctx\",\"choices\",\"gold\"}: accuracy"),
            Flag::value(CALIBRATE, "OUT", "file for convert --calibration: what --text activates"),
            Flag::switch("--no-prefix", "do not put [gMASK]<sop> in front"),
        ],
    ],
    run,
};

const CALIBRATE: &str = "--calibrate";

/// Longest text or task file.
const FILE_BYTES_MAX: usize = 256 << 20;
/// A line of a task file: its context is encoded once for each choice.
const LINE_BYTES_MAX: usize = 1 << 20;
const CHOICES_MAX: usize = 256;

fn run(args: &Args) -> Result<()> {
    match (args.get("--text"), args.get("--tasks")) {
        (Some(path), None) => score_text(args, path, &Input::new(args)?),
        (None, Some(_)) if args.has("--window") || args.has("--stride") => {
            Err(Error::usage("--window and --stride have no effect on --tasks"))
        }
        (None, Some(_)) if args.has(CALIBRATE) => {
            Err(Error::usage(format!("{CALIBRATE} needs a --text")))
        }
        (None, Some(path)) => score_tasks(args, path, &Input::new(args)?),
        _ => Err(Error::usage("expected exactly one of --text FILE and --tasks FILE")),
    }
}

/// What turns the input into tokens.
struct Input {
    tokenizer: Option<Tokenizer>,
    /// Stands in front of everything; empty when switched off or unknown.
    prefix: Vec<u32>,
}

impl Input {
    fn new(args: &Args) -> Result<Input> {
        let path = Path::new(args.required("--model")?).join("tokenizer.json");
        let tokenizer = sys::is_present(&path).then(|| Tokenizer::load(&path)).transpose()?;
        let wanted = tokenizer.as_ref().filter(|_| !args.has("--no-prefix"));
        let ids = ["[gMASK]", "<sop>"].map(|name| wanted?.token_id(name));
        Ok(Input { tokenizer, prefix: ids.into_iter().collect::<Option<_>>().unwrap_or_default() })
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.tokenizer {
            Some(tokenizer) => Ok(tokenizer.encode(text, Special::Text)),
            None => bail!("text needs a tokenizer.json in the model directory"),
        }
    }

    /// Prints the result with whether there was a prefix.
    fn print(&self, args: &Args, fields: Vec<(&str, Value)>) -> Result<()> {
        let prefix = ("prefix", Value::Bool(!self.prefix.is_empty()));
        let fields = object(fields.into_iter().chain([prefix]).collect());
        if args.has("--json") {
            return print_json(&fields);
        }
        let members = fields.as_object().unwrap_or_default().iter();
        let shown = members.filter_map(|(name, value)| match value {
            Value::Float(number) => Some(format!("{name} {number:.4}")),
            Value::Array(_) => None,
            other => Some(format!("{name} {}", to_compact(other))),
        });
        print_text(&(shown.collect::<Vec<_>>().join(" · ") + "\n"))
    }
}

/// Scores sequences, and shows how far it is.
struct Scorer<'a> {
    session: Session<'a>,
    watch: Watch<'a>,
    fed_tokens: usize,
}

impl<'a> Scorer<'a> {
    /// For sequences of `fed_tokens` in all.
    fn new(engine: &'a Engine, fed_tokens: usize) -> Result<Scorer<'a>> {
        let watch = Watch::new(engine, fed_tokens);
        Ok(Scorer { session: engine.session()?, watch, fed_tokens: 0 })
    }

    /// Σ ln p(token | tokens before it) over `tokens[first..]`; `first` is at least 1.
    fn log_likelihood(&mut self, tokens: &[u32], first: usize) -> Result<f64> {
        let (mut sum, mut position, mut top) = (0.0, first, Vec::new());
        let fed = &tokens[..tokens.len() - 1];
        self.watch.start_at(self.fed_tokens);
        self.session.logits_from(fed, first - 1, &mut self.watch, |logits| {
            sum += log_probabilities(logits, tokens[position], 0, &mut top)?;
            position += 1;
            Ok(())
        })?;
        self.fed_tokens += fed.len();
        Ok(sum)
    }
}

fn score_text(args: &Args, path: &str, input: &Input) -> Result<()> {
    let before = input.prefix.len();
    // A window holds at least one token to score and one before it.
    let (least, context) = (before.max(1) + 1, load::options(args)?.ctx_tokens);
    let most = if args.has("--ctx") { context.max(least) } else { 1 << 24 };
    let window = args.number("--window", least..=most)?.unwrap_or(context.max(least));
    // What a window holds of the text.
    let body = window - before;
    let stride = args.number("--stride", 1..=body)?.unwrap_or(body.div_ceil(2));
    let text = input.encode(&load::read_text(path, FILE_BYTES_MAX)?).context(|| path)?;
    // Without a prefix nothing stands before the first token.
    if text.len() < 1 + usize::from(before == 0) {
        bail!("{path}: no token to score");
    }
    let longest = window.min(before + text.len());
    let engine = Setup::new(args, longest)?.open(longest)?;
    let windows = || windows(text.len(), body, stride);
    let fed_tokens = windows().map(|[start, _, end]| before + end - start - 1).sum();
    let mut scorer = Scorer::new(&engine, fed_tokens)?;
    scorer.watch.calibration = args.get(CALIBRATE).map(|_| Sums::default());
    let (mut nll, mut tokens) = (0.0, 0);
    for [start, scored, end] in windows() {
        let sequence = [&input.prefix, &text[start..end]].concat();
        let first = (before + scored - start).max(1);
        if first < sequence.len() {
            nll -= scorer.log_likelihood(&sequence, first)?;
            tokens += sequence.len() - first;
        }
    }
    scorer.watch.clear();
    if let (Some(path), Some(sums)) = (args.get(CALIBRATE), &scorer.watch.calibration) {
        sums.write(Path::new(path), engine.config())?;
    }
    let ppl = Value::Float((nll / tokens as f64).exp());
    input.print(args, vec![("tokens", count(tokens)), ("nll", Value::Float(nll)), ("ppl", ppl)])
}

/// Windows over `tokens` tokens: where each starts, where those begin that it scores, and its end.
/// Each starts a stride behind the one before.
fn windows(tokens: usize, window: usize, stride: usize) -> impl Iterator<Item = [usize; 3]> {
    std::iter::successors(Some([0, 0, window.min(tokens)]), move |&[start, _, end]| {
        (end < tokens).then(|| [start + stride, end, (end + stride).min(tokens)])
    })
}

/// One line of a task file.
struct Task {
    /// What all choices have before them: the prefix and the context.
    context: Vec<u32>,
    choices: Vec<Vec<u32>>,
    /// Bytes of each choice, or ids where it is a list of those.
    lengths: Vec<usize>,
    /// The right choice.
    gold: usize,
}

impl Task {
    fn parse(line: &[u8], input: &Input, setup: &Setup<'_>) -> Result<Task> {
        let line = json::parse(line, Limits { max_bytes: LINE_BYTES_MAX, ..Limits::default() })?;
        let Some(ctx) = line.get("ctx") else { bail!("ctx: expected text or token ids") };
        let choices = line.get("choices").and_then(Value::as_array).unwrap_or_default();
        if !(2..=CHOICES_MAX).contains(&choices.len()) {
            bail!("choices: expected an array of 2 to {CHOICES_MAX}");
        }
        let gold = line.get("gold").and_then(Value::as_u64).map(|gold| gold as usize);
        let Some(gold) = gold.filter(|gold| *gold < choices.len()) else {
            bail!("gold: expected an integer below {}, the number of choices", choices.len());
        };
        let mut context = tokens(input, ctx, None)?;
        let mut task = Task { context: vec![], choices: vec![], lengths: vec![], gold };
        for (i, choice) in choices.iter().enumerate() {
            let whole = tokens(input, ctx, Some(choice)).context(|| format!("choice {i}"))?;
            let ids = choice.as_array().map(<[Value]>::len);
            task.lengths.push(ids.or(choice.as_str().map(str::len)).unwrap_or(0));
            if task.lengths[i] == 0 {
                bail!("choice {i} is empty");
            }
            // Where the end of the context merges into a choice, all choices begin before it.
            let common = whole.iter().zip(&context).take_while(|(a, b)| a == b).count();
            context.truncate(common);
            task.choices.push(whole);
        }
        task.choices.iter_mut().for_each(|choice| drop(choice.drain(..context.len())));
        task.context = [&input.prefix[..], &context].concat();
        if task.context.is_empty() {
            bail!("ctx: expected something that stands before the choices as a token of its own");
        }
        task.sequences().try_for_each(|tokens| setup.check(&tokens))?;
        Ok(task)
    }

    fn sequences(&self) -> impl Iterator<Item = Vec<u32>> {
        self.choices.iter().map(|choice| [&self.context[..], choice].concat())
    }
}

/// The tokens of a context, with a choice behind it; both are text or both are ids. Text is
/// encoded as one.
fn tokens(input: &Input, context: &Value, choice: Option<&Value>) -> Result<Vec<u32>> {
    let parts: Vec<&Value> = [context].into_iter().chain(choice).collect();
    if let Some(texts) = parts.iter().map(|part| part.as_str()).collect::<Option<Vec<_>>>() {
        return input.encode(&texts.concat());
    }
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = parts.iter().map(|part| part.as_array()?.iter().map(id).collect::<Option<Vec<_>>>());
    match ids.collect::<Option<Vec<_>>>() {
        Some(ids) => Ok(ids.concat()),
        None => bail!("expected ctx and choices that are all text, or all arrays of token ids"),
    }
}

fn score_tasks(args: &Args, path: &str, input: &Input) -> Result<()> {
    let bytes = sys::read_file(Path::new(path), FILE_BYTES_MAX).context(|| path)?;
    let setup = Setup::new(args, 0)?;
    let mut tasks = Vec::new();
    for (i, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        if !line.trim_ascii().is_empty() {
            let task = Task::parse(line, input, &setup);
            tasks.push(task.context(|| format!("{path}: line {}", i + 1))?);
        }
    }
    let lengths = || tasks.iter().flat_map(Task::sequences).map(|tokens| tokens.len());
    let Some(longest) = lengths().max() else { bail!("{path}: no tasks") };
    let engine = setup.open(longest)?;
    let mut scorer = Scorer::new(&engine, lengths().map(|tokens| tokens - 1).sum())?;
    let (mut right, mut right_by_length, mut all_sums) = (0, 0, Vec::new());
    for task in &tasks {
        let sum = |tokens: Vec<u32>| scorer.log_likelihood(&tokens, task.context.len());
        let sums = task.sequences().map(sum).collect::<Result<Vec<f64>>>()?;
        let by_length = sums.iter().zip(&task.lengths).map(|(sum, length)| sum / *length as f64);
        right += usize::from(best(sums.iter().copied()) == task.gold);
        right_by_length += usize::from(best(by_length) == task.gold);
        all_sums.push(Value::Array(sums.into_iter().map(Value::Float).collect()));
    }
    scorer.watch.clear();
    let share = |right: usize| Value::Float(right as f64 / tasks.len() as f64);
    let (acc, acc_norm) = (("acc", share(right)), ("acc_norm", share(right_by_length)));
    let sums = ("log_likelihoods", Value::Array(all_sums));
    input.print(args, vec![("n", count(tasks.len())), acc, acc_norm, sums])
}

/// Index of the largest; the lowest among equals.
fn best(values: impl DoubleEndedIterator<Item = f64> + ExactSizeIterator) -> usize {
    // Of equals max_by takes the last.
    values.enumerate().rev().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counted by hand.
    #[test]
    fn every_token_is_scored_once_however_windows_overlap() {
        let all = |tokens, window, stride| windows(tokens, window, stride).collect::<Vec<_>>();
        assert_eq!(all(10, 4, 2), [[0, 0, 4], [2, 4, 6], [4, 6, 8], [6, 8, 10]]);
        assert_eq!(all(10, 4, 4), [[0, 0, 4], [4, 4, 8], [8, 8, 10]]);
        assert_eq!(all(10, 4, 3), [[0, 0, 4], [3, 4, 7], [6, 7, 10]]);
        assert_eq!(all(9, 4, 3), [[0, 0, 4], [3, 4, 7], [6, 7, 9]]);
        assert_eq!(all(4, 4, 1), [[0, 0, 4]]);
        assert_eq!(all(3, 4, 2), [[0, 0, 3]]);
        assert_eq!(all(5, 4, 1), [[0, 0, 4], [1, 4, 5]]);
    }
}
