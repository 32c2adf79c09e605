//! `coli doctor`: all that can be wrong with a model directory and the machine, each looked at on
//! its own, so that one fault hides no other.
//!
//! The output is the C engine's, version 1, with more checks behind its own. A check passes, warns
//! of what a run survives, fails for what it does not, or is skipped with the reason. Parts that
//! several checks look at are opened once, by the code that a run opens them with; nothing is
//! written, and no weight is read without `--deep`.

#![forbid(unsafe_code)]

use super::load::{self, print_json};
use super::plan::Report;
use super::{Args, Flag, Verb, print_text};
use crate::bail;
use crate::config::Config;
use crate::engine::Options;
use crate::error::{Context, Error, Result};
use crate::json::{Value, object};
use crate::object;
use crate::safetensors::Directory;
use crate::sys;
use crate::tokenizer::Tokenizer;
use crate::weights::Weights;
use std::path::Path;

mod machine;
mod model;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "doctor",
    positional: "",
    summary: "check a model directory and this machine before a run",
    example: "coli doctor --model oracle/demo --deep",
    flags: &[
        load::MODEL_FLAGS,
        load::PLAN_FLAGS,
        &[Flag::switch("--deep", "also run the first token, and measure the drive at depth")],
        load::FLAGS,
        &[super::JSON],
    ],
    run,
};

/// From the one that matters least on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Status {
    Skip,
    Pass,
    Warn,
    Fail,
}

impl Status {
    /// What it is called in JSON, in text, and as the worst of all.
    fn words(self) -> [&'static str; 3] {
        match self {
            Status::Skip => ["skip", "skip", "ok"],
            Status::Pass => ["pass", " ok ", "ok"],
            Status::Warn => ["warn", "warn", "warning"],
            Status::Fail => ["fail", "FAIL", "error"],
        }
    }
}

/// What one check found.
#[derive(Clone)]
struct Finding {
    status: Status,
    summary: String,
    details: Vec<(&'static str, Value)>,
}

impl Finding {
    fn new(status: Status, summary: impl Into<String>) -> Finding {
        Finding { status, summary: summary.into(), details: Vec::new() }
    }

    fn pass(summary: impl Into<String>) -> Finding {
        Finding::new(Status::Pass, summary)
    }

    fn warn(summary: impl Into<String>) -> Finding {
        Finding::new(Status::Warn, summary)
    }

    fn skip(summary: impl Into<String>) -> Finding {
        Finding::new(Status::Skip, summary)
    }

    fn with(mut self, name: &'static str, detail: impl Into<Value>) -> Finding {
        self.details.push((name, detail.into()));
        self
    }
}

/// What the engine refuses, a check fails for.
impl From<Error> for Finding {
    fn from(error: Error) -> Finding {
        Finding::new(Status::Fail, error.to_string())
    }
}

/// A part of the model, or why there is none; the latter is what its own check says.
type Part<T> = std::result::Result<T, Finding>;

/// A part that the check `owner` looks at, for a check that is pointless without it.
fn needs<'a, T>(part: &'a Part<T>, owner: &str) -> Part<&'a T> {
    part.as_ref().map_err(|_| Finding::skip(format!("needs {owner}")))
}

/// What is examined.
struct Subject<'a> {
    args: &'a Args,
    dir: &'a Path,
    options: Options,
    config: Part<Config>,
    tokenizer: Part<Tokenizer>,
    directory: Part<Directory>,
    weights: Part<Weights>,
    report: Part<Report>,
}

impl Subject<'_> {
    /// Opens all parts. Error: the directory itself cannot be read.
    fn open<'a>(args: &'a Args, dir: &'a Path, options: Options) -> Part<Subject<'a>> {
        std::fs::read_dir(dir).context(|| dir.display())?;
        let file = dir.join("tokenizer.json");
        let tokenizer = || match sys::is_present(&file) {
            true => Tokenizer::load(&file),
            false => bail!("{}: missing; text needs it, ids do not", file.display()),
        };
        let config = Config::load(dir).map_err(Finding::from);
        let directory = load::directory(args).map_err(Finding::from);
        let bound = || -> Part<Weights> {
            let directory = needs(&directory, "model.shards")?;
            let config = needs(&config, "model.config")?;
            Ok(Weights::bind(directory, config).context(|| dir.display())?)
        };
        let weights = bound();
        let planned = || -> Part<Report> {
            let weights = needs(&weights, "model.tensors")?;
            let directory = needs(&directory, "model.shards")?;
            Ok(Report::new(options.clone(), needs(&config, "model.config")?, directory, weights)?)
        };
        let (report, tokenizer) = (planned(), tokenizer().map_err(Finding::from));
        Ok(Subject { args, dir, options, config, tokenizer, directory, weights, report })
    }
}

/// A check by its id; either way it ends, it ends with a finding.
type Check = (&'static str, fn(&Subject) -> Part<Finding>);

/// Every check behind `model.path`, in the order of the output.
const CHECKS: [Check; 16] = [
    ("model.config", model::config),
    ("model.tokenizer", model::tokenizer),
    ("storage.persistence", machine::persistence),
    ("engine.binary", machine::engine),
    ("accelerator.cuda", |_| Ok(Finding::skip("the processor computes everything"))),
    ("model.shards", model::shards),
    ("storage.disk", machine::disk),
    ("memory.ram", machine::ram),
    ("placement.plan", machine::placement),
    ("model.tensors", model::tensors),
    ("model.draft_head", model::draft_head),
    ("model.template", model::template),
    ("storage.speed", machine::speed),
    ("limits.files", machine::files),
    ("state.files", model::state),
    ("model.first_token", model::first_token),
];

fn run(args: &Args) -> Result<()> {
    let usage = args.required("--model").and_then(|dir| Ok((dir, load::options(args)?)));
    let (dir, options) = match usage {
        Ok(usage) => usage,
        Err(error) => {
            if args.has("--json") {
                let dir = args.get("--model").unwrap_or_default();
                let finding = Finding::from(error.clone());
                print_json(&value(dir, &[("config.arguments", finding)], Value::Null))?;
            }
            return Err(error);
        }
    };
    let subject = Subject::open(args, Path::new(dir), options);
    let path = subject.as_ref().map_or_else(Finding::clone, |_| Finding::pass("can be read"));
    let path = path.with("path", dir);
    let mut findings = vec![("model.path", path)];
    for (id, check) in CHECKS {
        let finding = needs(&subject, "model.path").and_then(check);
        findings.push((id, finding.unwrap_or_else(|finding| finding)));
        if sys::interrupted() {
            return Err(Error::interrupted());
        }
    }
    let report = subject.as_ref().ok().and_then(|subject| subject.report.as_ref().ok());
    if args.has("--json") {
        print_json(&value(dir, &findings, report.map_or(Value::Null, Report::json)))?;
    } else {
        print_text(&text(dir, &findings, report))?;
    }
    let failed = findings.iter().filter(|(_, finding)| finding.status == Status::Fail);
    match &failed.map(|(id, _)| *id).collect::<Vec<_>>()[..] {
        [] => Ok(()),
        failed => bail!("{dir}: does not hold: {}", failed.join(", ")),
    }
}

/// The word for all findings together.
fn verdict(findings: &[(&str, Finding)]) -> &'static str {
    let worst = findings.iter().map(|(_, finding)| finding.status).max();
    let [_, _, word] = worst.unwrap_or(Status::Pass).words();
    word
}

/// The schema of the C engine, version 1.
fn value(dir: &str, findings: &[(&str, Finding)], plan: Value) -> Value {
    let check = |(id, Finding { status, summary, details }): &(&str, Finding)| {
        let [status, ..] = status.words();
        let (id, summary) = ((*id).into(), summary.as_str().into());
        let mut check = vec![("id", id), ("status", status.into()), ("summary", summary)];
        check.extend((!details.is_empty()).then(|| ("details", object(details.clone()))));
        object(check)
    };
    object! {
        "schema_version": 1,
        "status": verdict(findings),
        "model": dir,
        "checks": findings.iter().map(check).collect::<Vec<_>>(),
        "plan": plan,
    }
}

/// A line for each check, then the plan.
fn text(dir: &str, findings: &[(&str, Finding)], report: Option<&Report>) -> String {
    let mut lines = vec![format!("coli doctor: {dir}")];
    for (id, finding) in findings {
        let [_, mark, _] = finding.status.words();
        lines.push(format!("[{mark}] {id:<20} {}", finding.summary));
    }
    lines.extend(report.map(Report::text).iter().flat_map(|text| text.lines().map(String::from)));
    lines.push(format!("result   {}", verdict(findings)));
    // Names out of untrusted files must not control the terminal.
    lines.iter().map(|line| line.replace(char::is_control, "\u{fffd}") + "\n").collect()
}
