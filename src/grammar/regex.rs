//! Regular expressions of JSON Schema's `pattern`: the part of ECMA-262 (flag `u`) that a grammar
//! can follow.
//!
//! An expression matches the value of a string; the grammar must match how that is written: in
//! plain text every character as itself, in JSON too, except those that it escapes, each in one
//! way.
//! Supported are characters, escapes of one (`\n \t \r \f \v \0 \xHH \uHHHH \u{H…}`, syntax
//! characters), `\d \w \s` and their opposites, `.`, classes, groups, alternatives, repetitions,
//! and `^` and `$` at the ends of the outermost alternatives. The rest is refused by name.

#![forbid(unsafe_code)]

use super::UNBOUNDED;
use super::charset::CharSet;
use super::compile::{Builder, Expr};
use super::pattern::{Parser, Syntax};
use super::schema::Form;
use crate::error::Result;
use crate::json;
use std::collections::HashMap;

struct Regex {
    form: Form,
    /// The rule for those characters of a set that JSON escapes, for each such set met.
    escaped: HashMap<CharSet, Expr>,
}

/// First and last character of each range that `\d`, `\w` and `\s` have.
const DIGITS: &str = "09";
const WORD: &str = "09AZ__az";
const SPACE: &str = "\t\r  \u{a0}\u{a0}\u{1680}\u{1680}\u{2000}\u{200a}\u{2028}\u{2029}\
                     \u{202f}\u{202f}\u{205f}\u{205f}\u{3000}\u{3000}\u{feff}\u{feff}";

/// The characters of a string, between its quotes if it is JSON, whose value has a match of `text`.
pub(super) fn compile(builder: &mut Builder, text: &str, form: Form) -> Result<Expr> {
    let syntax = Regex { form, escaped: HashMap::new() };
    let mut parser = Parser::new(text, builder, syntax)?;
    let anything = CharSet::default().complement();
    let anything = Regex::char(&mut parser, anything)?.repeat(0, UNBOUNDED);
    let mut alternatives = Vec::new();
    loop {
        let before = if parser.eat("^") { Expr::empty() } else { anything.clone() };
        let body = parser.sequence()?;
        let behind = if parser.eat("$") { Expr::empty() } else { anything.clone() };
        alternatives.push(Expr::seq([before, body, behind]));
        if !parser.eat("|") {
            break;
        }
    }
    match parser.peek() {
        None => Ok(parser.builder.any_of(alternatives)),
        Some(_) => Err(parser.expected("the end of the pattern")),
    }
}

impl Syntax for Regex {
    const IS_REGEX: bool = true;

    fn any() -> CharSet {
        CharSet::of("\n\r\u{2028}\u{2029}").complement()
    }

    fn skip(_: &mut Parser<Self>) {}

    fn atom(parser: &mut Parser<Self>) -> Result<Option<Expr>> {
        let start = parser.at;
        let set = match parser.peek() {
            None | Some('$') => return Ok(None),
            Some('^') => {
                let message = "'^' is supported at the start of the pattern only";
                return Err(parser.error_at(start, message));
            }
            Some('*' | '+' | '?' | '{' | '}' | ']') => return Err(parser.expected("a character")),
            _ if parser.eat("\\") => parser.escaped()?,
            Some(char) => {
                parser.next();
                char.into()
            }
        };
        Self::char(parser, set).map(Some)
    }

    /// As it is written in a string.
    fn char(parser: &mut Parser<Self>, set: CharSet) -> Result<Expr> {
        if parser.syntax.form == Form::Text {
            return Ok(parser.builder.class(set));
        }
        let plain = set.minus(&CharSet::escaped_in_json());
        let escaped = set.minus(&plain);
        let plain = parser.builder.class(plain);
        if escaped.is_empty() {
            return Ok(plain);
        }
        if !parser.syntax.escaped.contains_key(&escaped) {
            let mut alternatives = Vec::new();
            for char in escaped.up_to(0x5c) {
                let mut text = String::new();
                json::write_str_compact(&mut text, char.encode_utf8(&mut [0; 4]));
                alternatives.push(parser.builder.literal(&text[1..text.len() - 1]));
            }
            let rule = parser.builder.rule("escaped characters", Expr::Alt(alternatives))?;
            parser.syntax.escaped.insert(escaped.clone(), rule);
        }
        Ok(Expr::Alt(vec![plain, parser.syntax.escaped[&escaped].clone()]))
    }

    fn escape(parser: &mut Parser<Self>, escape: char) -> Result<CharSet> {
        let ranges = match escape {
            'd' | 'D' => DIGITS,
            'w' | 'W' => WORD,
            's' | 'S' => SPACE,
            'f' => "\u{c}\u{c}",
            'v' => "\u{b}\u{b}",
            '0' if !parser.peek().is_some_and(|char| char.is_ascii_digit()) => "\0\0",
            _ if escape.is_ascii_punctuation() => return Ok(escape.into()),
            _ => return Err(parser.unknown_escape(escape)),
        };
        let set = CharSet::ranges(ranges);
        Ok(if escape.is_ascii_uppercase() { set.complement() } else { set })
    }
}
