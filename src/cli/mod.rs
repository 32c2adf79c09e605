//! The command line: verbs, their flags, and the rules that hold for all of them.
//!
//! Results go to stdout and nothing else does; notes and progress go to stderr. Each verb is one
//! file with a [`Verb`] that lists every flag it reads: a flag that is not in the list is refused
//! with the nearest one that is, so no flag can be accepted and ignored.

#![forbid(unsafe_code)]

use crate::error::{Context, Error, Result};
use crate::sys;
use std::io::Write;
use std::path::Path;
use std::str::FromStr;

mod bench;
mod chat;
mod convert;
mod doctor;
mod info;
mod iobench;
mod load;
mod logits;
mod oracle;
mod plan;
mod render;
mod run;
mod sampling;
mod score;
mod serve;
mod tokenize;
mod trace;

/// One flag of a verb.
pub struct Flag {
    /// With its dashes: `--ctx`.
    pub name: &'static str,
    /// What its value is called in the help text; `None` for a switch.
    pub value: Option<&'static str>,
    /// Environment variable that stands in when the flag is absent.
    pub env: Option<&'static str>,
    /// Whether it may be given more than once.
    pub repeats: bool,
    /// One line.
    pub help: &'static str,
}

impl Flag {
    /// A flag that takes a value.
    pub const fn value(name: &'static str, value: &'static str, help: &'static str) -> Flag {
        Flag { name, value: Some(value), env: None, repeats: false, help }
    }

    /// A switch.
    pub const fn switch(name: &'static str, help: &'static str) -> Flag {
        Flag { name, value: None, env: None, repeats: false, help }
    }

    /// The same flag with an environment variable as fallback.
    pub const fn or_env(mut self, env: &'static str) -> Flag {
        self.env = Some(env);
        self
    }

    /// The same flag, which may be given more than once.
    pub const fn repeated(mut self) -> Flag {
        self.repeats = true;
        self
    }
}

/// `--model`, which every verb takes.
const MODEL: Flag =
    Flag::value("--model", "DIR", "directory with config.json, tokenizer and safetensors")
        .or_env("COLI_MODEL");
/// The small model of a checkout, from its top directory.
const DEMO: &str = "oracle/demo";
/// Verbs that take it where they are given no other.
const SPEAKING: [&str; 3] = ["run", "chat", "serve"];
/// `--json`, which most verbs take.
const JSON: Flag = Flag::switch("--json", "print exactly one JSON object");

/// One verb of the program.
pub struct Verb {
    /// As typed.
    pub name: &'static str,
    /// Positional arguments, as shown in the usage line; empty when there are none.
    pub positional: &'static str,
    /// One line for the list of verbs.
    pub summary: &'static str,
    /// A command that works as it stands.
    pub example: &'static str,
    /// Every flag that the verb reads, in groups.
    pub flags: &'static [&'static [Flag]],
    /// Does the work.
    pub run: fn(&Args) -> Result<()>,
}

/// Every verb, in the order of the help text.
pub const VERBS: &[&Verb] = &[
    &run::VERB,
    &chat::VERB,
    &oracle::VERB,
    &logits::VERB,
    &tokenize::VERB,
    &render::VERB,
    &score::VERB,
    &serve::VERB,
    &convert::VERB,
    &info::VERB,
    &plan::VERB,
    &doctor::VERB,
    &bench::VERB,
    &iobench::VERB,
    &trace::VERB,
];

/// Parsed arguments of one verb.
#[derive(Default)]
pub struct Args {
    /// Name, value, and where the value came from when that is not the flag itself.
    flags: Vec<(&'static str, String, Option<&'static str>)>,
    /// Arguments that are not flags.
    pub positional: Vec<String>,
}

impl Args {
    /// Reads `words` by the verb's table. Errors are usage errors.
    fn parse(verb: &Verb, words: &[String]) -> Result<Args> {
        let mut args = Args::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            if word == "--" {
                args.positional.extend(words.by_ref().cloned());
                break;
            }
            if !word.starts_with('-') || word.len() == 1 {
                args.positional.push(word.clone());
                continue;
            }
            let (name, inline) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_string())),
                None => (word.as_str(), None),
            };
            let Some(flag) = verb.flags.iter().copied().flatten().find(|flag| flag.name == name)
            else {
                return Err(unknown_flag(verb, name));
            };
            let value = match (flag.value, inline) {
                (None, None) => String::new(),
                (None, Some(_)) => return Err(Error::usage(format!("{name} takes no value"))),
                (Some(_), Some(value)) => value,
                (Some(kind), None) => words
                    .next()
                    .cloned()
                    .ok_or_else(|| Error::usage(format!("{name} needs a value: {kind}")))?,
            };
            if !flag.repeats && args.has(name) {
                return Err(Error::usage(format!("{name} is given twice")));
            }
            args.flags.push((flag.name, value, None));
        }
        if verb.positional.is_empty()
            && let Some(extra) = args.positional.first()
        {
            return Err(Error::usage(format!("unexpected argument {extra:?}")));
        }
        for flag in verb.flags.iter().copied().flatten() {
            let value = flag.env.and_then(|env| std::env::var(env).ok());
            if let Some(value) = value.filter(|value| !value.is_empty())
                && args.get(flag.name).is_none()
            {
                args.flags.push((flag.name, value, flag.env));
            }
        }
        if SPEAKING.contains(&verb.name)
            && !args.has("--model")
            && sys::is_present(&Path::new(DEMO).join("config.json"))
        {
            note(&format!("coli: no --model is given: the small one in {DEMO} speaks\n"));
            args.flags.push(("--model", DEMO.into(), None));
        }
        Ok(args)
    }

    /// The value of a flag, and the name to use in an error about it.
    fn given(&self, name: &str) -> Option<(&str, &'static str)> {
        let (flag, value, env) = self.flags.iter().find(|(flag, ..)| *flag == name)?;
        Some((value, env.unwrap_or(flag)))
    }

    /// The value of a flag; a switch that was given has an empty one.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.given(name).map(|(value, _)| value)
    }

    /// Every value of a flag that may be given more than once.
    pub fn all(&self, name: &str) -> Vec<String> {
        let values = self.flags.iter().filter(|(flag, ..)| *flag == name);
        values.map(|(_, value, _)| value.clone()).collect()
    }

    /// Whether a switch (or any flag) was given.
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// The value of a flag that the verb cannot do without.
    pub fn required(&self, name: &str) -> Result<&str> {
        self.get(name).ok_or_else(|| Error::usage(format!("{name} is required")))
    }

    /// A number within `range`, or `None` when the flag is absent.
    pub fn number<T>(&self, name: &str, range: std::ops::RangeInclusive<T>) -> Result<Option<T>>
    where
        T: FromStr + PartialOrd + std::fmt::Display,
    {
        let Some((text, source)) = self.given(name) else { return Ok(None) };
        match text.trim().parse::<T>() {
            Ok(number) if range.contains(&number) => Ok(Some(number)),
            _ => {
                let (low, high) = range.into_inner();
                let wanted = format!("expected a number from {low} to {high}, found {text:?}");
                Err(Error::usage(format!("{source}: {wanted}")))
            }
        }
    }

    /// Comma-separated token ids.
    pub fn ids(&self, name: &str) -> Result<Option<Vec<u32>>> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let ids = text.split(',').map(|id| id.trim().parse().map_err(|_| id));
        ids.collect::<std::result::Result<Vec<u32>, _>>()
            .map(Some)
            .map_err(|id| Error::usage(format!("{name}: expected token ids, found {id:?}")))
    }
}

/// Runs the program with `words` (without the program's own name).
pub fn main(words: &[String]) -> Result<()> {
    let Some(first) = words.first() else {
        return Err(Error::usage(format!("no verb given\n\n{}", overview())));
    };
    match (first.as_str(), words.get(1)) {
        ("help", Some(name)) => return print_text(&help(verb(name)?)),
        ("--help" | "-h" | "help", _) => return print_text(&overview()),
        ("--version" | "-V", _) => return print_text(&format!("coli {}\n", crate::VERSION)),
        _ => {}
    }
    let verb = verb(first)?;
    if words[1..].iter().take_while(|word| *word != "--").any(|w| w == "--help" || w == "-h") {
        return print_text(&help(verb));
    }
    let done = Args::parse(verb, &words[1..]).and_then(|args| (verb.run)(&args));
    done.map_err(|error| if error.exit_code() == 2 { error.context(verb.name) } else { error })
}

/// The verb of this name.
fn verb(name: &str) -> Result<&'static Verb> {
    if let Some(verb) = VERBS.iter().find(|verb| verb.name == name) {
        return Ok(verb);
    }
    let (kind, flags) = match name.starts_with('-') {
        true => ("flag", &["--help", "--version"][..]),
        false => ("verb", &["help"][..]),
    };
    let names = VERBS.iter().map(|verb| verb.name).chain(flags.iter().copied());
    let hint = hint(name, names);
    Err(Error::usage(format!("unknown {kind} {name:?}{hint} (see coli --help)")))
}

/// Text to stdout, at once; a full disk behind it is an error, not a panic.
fn print_text(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context(|| "stdout")
}

/// A note to stderr. Where nobody can read it, it is lost without harm.
pub fn note(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// An error, as a note.
pub fn note_error(error: &Error) {
    // Names out of untrusted files must not control the terminal.
    let is_unsafe = |c: char| c.is_control() && c != '\n';
    note(&format!("coli: {}\n", error.to_string().replace(is_unsafe, "\u{fffd}")));
}

/// The program's own help text.
fn overview() -> String {
    let mut text = String::from(
        "coli runs GLM-5.2 from its safetensors; the routed experts stay on disk.\n\n\
         usage: coli VERB [FLAGS]\n\nverbs:\n",
    );
    for verb in VERBS {
        text += &format!("  {:<10} {}\n", verb.name, verb.summary);
    }
    text += "\ncoli VERB --help lists the flags of a verb, with an example.\n";
    text + "exit codes: 0 success, 1 failed, 2 wrong usage, 130 interrupted\n"
}

/// The help text of one verb.
fn help(verb: &Verb) -> String {
    let positional = if verb.positional.is_empty() { "" } else { " " };
    let mut text = format!(
        "{}\n\nusage: coli {} [FLAGS]{positional}{}\n\nflags:\n",
        verb.summary, verb.name, verb.positional
    );
    for flag in verb.flags.iter().copied().flatten() {
        let name = flag.value.map_or(flag.name.into(), |value| format!("{} {value}", flag.name));
        let help = match (flag.env, flag.help.strip_suffix(')')) {
            (None, _) => flag.help.to_string(),
            (Some(env), None) => format!("{} (or ${env})", flag.help),
            (Some(env), Some(open)) => format!("{open}, or ${env})"),
        };
        text += &format!("  {name:<18} {help}\n");
    }
    text + &format!("\nexample:\n  {}\n", verb.example)
}

fn unknown_flag(verb: &Verb, name: &str) -> Error {
    let names = verb.flags.iter().copied().flatten().map(|flag| flag.name);
    Error::usage(format!("unknown flag {name}{}", hint(name, names)))
}

/// `, did you mean …?` with the nearest candidate, if one is near: at most two changes away, and
/// fewer than half of the word's letters, or one is the beginning of the other.
fn hint<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> String {
    let near = candidates.filter_map(|candidate| {
        let distance = edit_distance(word, candidate);
        let begins = candidate.starts_with(word) || word.starts_with(candidate);
        let is_near = begins || (distance <= 2 && distance * 2 < word.len());
        is_near.then_some((distance, candidate))
    });
    near.min().map_or(String::new(), |(_, name)| format!(", did you mean {name}?"))
}

/// Insertions, deletions and replacements from `a` to `b`.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.chars().count()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(String::from).collect()
    }

    const TEST: Verb = Verb {
        name: "test",
        positional: "",
        summary: "",
        example: "",
        flags: &[&[Flag::value("--ctx", "N", ""), JSON]],
        run: |_| Ok(()),
    };

    #[test]
    fn unknown_flags_are_refused_with_the_nearest_known_one() {
        let error = Args::parse(&TEST, &words("--ctxx 5")).err().unwrap();
        assert_eq!(error.to_string(), "unknown flag --ctxx, did you mean --ctx?");
        assert_eq!(error.exit_code(), 2);
        for (typed, expected) in [
            ("logit", "unknown verb \"logit\", did you mean logits? (see coli --help)"),
            ("--verison", "unknown flag \"--verison\", did you mean --version? (see coli --help)"),
            ("sing", "unknown verb \"sing\" (see coli --help)"),
            ("help lgits", "unknown verb \"lgits\", did you mean logits? (see coli --help)"),
            ("run --temperature 1", "run: unknown flag --temperature, did you mean --temp?"),
            ("run --max-tokens 1", "run: unknown flag --max-tokens"),
            ("run -x", "run: unknown flag -x"),
        ] {
            assert_eq!(main(&words(typed)).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn values_are_checked_for_presence_range_and_repetition() {
        for bad in ["--ctx", "--ctx 4 --ctx 5", "--json=1", "stray"] {
            assert!(Args::parse(&TEST, &words(bad)).is_err(), "{bad}");
        }
        let args = Args::parse(&TEST, &words("--ctx=9 --json")).unwrap();
        assert_eq!(args.number("--ctx", 1..=10usize).unwrap(), Some(9));
        assert!(args.has("--json"));
        let error = args.number("--ctx", 1..=8usize).unwrap_err().to_string();
        assert_eq!(error, "--ctx: expected a number from 1 to 8, found \"9\"");
    }

    #[test]
    fn edit_distance_counts_single_changes() {
        assert_eq!(edit_distance("--ctx", "--ctx"), 0);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("", "abc"), 3);
    }
}
