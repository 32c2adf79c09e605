//! `coli tokenize`: text to token ids and back, on standard input and output.
//!
//! Owns the forms of its input and output; the work is the tokenizer's. Input is taken whole, or
//! line by line with `--jsonl`, so that a test can compare any text, line ends included.

#![forbid(unsafe_code)]

use super::{Args, Flag, Verb};
use crate::bail;
use crate::error::{Context, Error, Result};
use crate::json::{self, Field, Limits, Value, to_compact};
use crate::object;
use crate::tokenizer::{Special, Tokenizer};
use std::io::{BufRead, BufWriter, Read, Write};
use std::path::Path;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "tokenize",
    positional: "",
    summary: "turn text on stdin into token ids, or ids into text",
    example: "echo 'Hello there' | coli tokenize --model oracle/demo",
    flags: &[&[
        super::MODEL,
        Flag::value("--special", "on|off", "whether marker text becomes control tokens (off)"),
        Flag::switch("--jsonl", "each line is a JSON string (with --decode: an array of ids)"),
        Flag::switch("--decode", "read ids, print text"),
        super::JSON,
    ]],
    run,
};

fn run(args: &Args) -> Result<()> {
    let special = match args.get("--special").unwrap_or("off") {
        "on" => Special::Parse,
        "off" => Special::Text,
        other => return Err(Error::usage(format!("--special: expected on or off, found {other}"))),
    };
    let (jsonl, decode, json) = (args.has("--jsonl"), args.has("--decode"), args.has("--json"));
    if decode && args.has("--special") {
        return Err(Error::usage("--special has no effect on --decode"));
    }
    let tokenizer = Tokenizer::load(&Path::new(args.required("--model")?).join("tokenizer.json"))?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    let options = Options { special, jsonl, decode, json };
    tokenize(&tokenizer, options, &mut std::io::stdin().lock(), &mut out)?;
    out.flush().context(|| "stdout")
}

/// What to do with the input.
#[derive(Clone, Copy, Debug, Default)]
struct Options {
    /// Whether the text of added tokens becomes those tokens.
    special: Special,
    /// Each line of the input is one JSON value, and gives one JSON object on a line.
    jsonl: bool,
    /// The input is token ids, the output text.
    decode: bool,
    /// The output is a JSON object instead of bare ids or text.
    json: bool,
}

/// Tokenizes `input` to `out`. Text in becomes `{"ids":[…]}`, or ids between spaces; ids in, bare
/// or a JSON array, become `{"text":…}`, or the text as it is. With `jsonl` a line of input is a
/// JSON string, or an array of ids to decode.
///
/// # Errors
/// Input that is not UTF-8 or not of the form asked for, ids out of range, failed reads or writes.
fn tokenize(
    tokenizer: &Tokenizer,
    options: Options,
    input: &mut dyn BufRead,
    out: &mut dyn Write,
) -> Result<()> {
    let mut bytes = Vec::new();
    if !options.jsonl {
        input.read_to_end(&mut bytes)?;
        let text = String::from_utf8(bytes).map_err(|error| {
            let offset = error.utf8_error().valid_up_to();
            Error::new(format!("the input is not UTF-8 at byte {offset}"))
        })?;
        return match (options.decode, options.json) {
            (true, json) => {
                let text = tokenizer.decode(&parse_ids(&text)?, false)?;
                if json { write_line(object! { "text": text }, out) } else { write(&text, out) }
            }
            (false, true) => {
                write_line(object! { "ids": tokenizer.encode(&text, options.special) }, out)
            }
            (false, false) => {
                let ids = tokenizer.encode(&text, options.special);
                let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
                write(&(ids.join(" ") + "\n"), out)
            }
        };
    }
    for number in 1.. {
        bytes.clear();
        let limit = Limits::default().max_bytes as u64 + 1;
        if input.take(limit).read_until(b'\n', &mut bytes)? == 0 {
            break;
        }
        let object = tokenize_line(tokenizer, options, &bytes);
        write_line(object.context(|| format!("line {number}"))?, out)?;
    }
    Ok(())
}

/// One line of JSON: a string to encode, or ids to decode.
fn tokenize_line(tokenizer: &Tokenizer, options: Options, line: &[u8]) -> Result<Value> {
    let value = json::parse(line, Limits::default())?;
    if options.decode {
        return Ok(object! { "text": tokenizer.decode(&ids_of(&value)?, false)? });
    }
    let Some(text) = value.as_str() else {
        bail!("expected a JSON string, found {}", value.kind());
    };
    Ok(object! { "ids": tokenizer.encode(text, options.special) })
}

/// Ids between spaces or line ends, or a JSON array of them.
fn parse_ids(text: &str) -> Result<Vec<u32>> {
    if text.trim_start().starts_with(['[', '{']) {
        return ids_of(&json::parse(text.as_bytes(), Limits::default())?);
    }
    let parse = |word: &str| {
        word.parse().map_err(|_| Error::new(format!("expected a token id, found {word:?}")))
    };
    text.split_ascii_whitespace().map(parse).collect()
}

/// The ids in an array, or in the member `ids` of an object.
fn ids_of(value: &Value) -> Result<Vec<u32>> {
    let field = Field::root(value);
    let field = field.get("ids").or(field);
    field.ids()?.ok_or_else(|| field.unexpected("an array of token ids"))
}

fn write(text: &str, out: &mut dyn Write) -> Result<()> {
    Ok(out.write_all(text.as_bytes())?)
}

fn write_line(object: Value, out: &mut dyn Write) -> Result<()> {
    write(&(to_compact(&object) + "\n"), out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn run(options: Options, mut input: &[u8]) -> Result<String> {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer");
        let tokenizer = Tokenizer::load(&fixture.join("tokenizer.json")).unwrap();
        let mut out = Vec::new();
        tokenize(&tokenizer, options, &mut input, &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn each_form_of_output_reads_back_as_input() {
        let text = "Call me \"Ishmael\".\n  <|user|>\n";
        for special in [Special::Text, Special::Parse] {
            for json in [false, true] {
                let options = Options { special, json, ..Default::default() };
                let ids = run(options, text.as_bytes()).unwrap();
                assert_eq!(ids.starts_with("{\"ids\":["), json);
                let back = Options { decode: true, ..Default::default() };
                assert_eq!(run(back, ids.as_bytes()).unwrap(), text);
            }
        }
        let jsonl = Options { jsonl: true, ..Default::default() };
        let rows = run(jsonl, b"\"a\\nb\"\n\"\"").unwrap();
        assert_eq!(rows.lines().nth(1), Some("{\"ids\":[]}"));
        let back = Options { decode: true, ..jsonl };
        assert_eq!(run(back, rows.as_bytes()).unwrap(), "{\"text\":\"a\\nb\"}\n{\"text\":\"\"}\n");
    }

    #[test]
    fn bad_input_is_refused_with_its_place() {
        let jsonl = Options { jsonl: true, ..Default::default() };
        let decode = Options { decode: true, ..Default::default() };
        let cases: [(Options, &[u8], &str); 5] = [
            (Default::default(), b"ab\xFF", "the input is not UTF-8 at byte 2"),
            (jsonl, b"\"a\"\n7\n", "line 2: expected a JSON string, found an integer"),
            (decode, b"1 x", "expected a token id, found \"x\""),
            (decode, b"[1, -1]", "[1]: expected a token id, found an integer"),
            (decode, b"2300", "token id 2300 is out of range"),
        ];
        for (options, input, expected) in cases {
            let error = run(options, input).unwrap_err().to_string();
            assert!(error.contains(expected), "expected {expected:?}, found {error:?}");
        }
    }
}
