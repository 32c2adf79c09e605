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

const DIGITS: &[(u32, u32)] = &[(0x30, 0x39)];
const WORD: &[(u32, u32)] = &[(0x30, 0x39), (0x41, 0x5a), (0x5f, 0x5f), (0x61, 0x7a)];
const SPACE: &[(u32, u32)] = &[
    (0x09, 0x0d),
    (0x20, 0x20),
    (0xa0, 0xa0),
    (0x1680, 0x1680),
    (0x2000, 0x200a),
    (0x2028, 0x2029),
    (0x202f, 0x202f),
    (0x205f, 0x205f),
    (0x3000, 0x3000),
    (0xfeff, 0xfeff),
];

/// The characters of a string, between its quotes if it is JSON, whose value has a match of `text`.
pub(super) fn compile(builder: &mut Builder, text: &str, form: Form) -> Result<Expr> {
    let syntax = Regex { form, escaped: HashMap::new() };
    let mut parser = Parser::new(text, builder, syntax)?;
    let anything = CharSet::new(Vec::new()).complement();
    let anything = one_of(&mut parser, anything)?.repeat(0, UNBOUNDED);
    let mut alternatives = Vec::new();
    loop {
        let is_open = !parser.eat("^");
        let body = parser.sequence()?;
        let is_closed = parser.eat("$");
        let mut items = Vec::new();
        items.extend(is_open.then(|| anything.clone()));
        items.push(body);
        items.extend((!is_closed).then(|| anything.clone()));
        alternatives.push(Expr::seq(items));
        if !parser.eat("|") {
            break;
        }
    }
    match parser.peek() {
        None => Ok(parser.builder.any_of(alternatives)),
        Some(_) => Err(parser.expected("the end of the pattern")),
    }
}

/// A character of `set` as it is written in a string.
fn one_of(parser: &mut Parser<Regex>, set: CharSet) -> Result<Expr> {
    if parser.syntax.form == Form::Text {
        return Ok(parser.builder.class(set));
    }
    let escaped = CharSet::new(vec![(0, 0x1f), (0x22, 0x22), (0x5c, 0x5c)]);
    let plain = set.minus(&escaped);
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

impl Syntax for Regex {
    const HAS_LAZY: bool = true;

    fn skip(_: &mut Parser<Self>) {}

    fn atom(parser: &mut Parser<Self>) -> Result<Option<Expr>> {
        let start = parser.offset();
        let set = match parser.peek() {
            None | Some('|' | ')' | '$') => return Ok(None),
            Some('^') => {
                let message = "'^' is supported at the start of the pattern only";
                return Err(parser.error_at(start, message));
            }
            Some('*' | '+' | '?' | '{' | '}' | ']') => return Err(parser.expected("a character")),
            Some('(') => {
                parser.next();
                if !parser.eat("?:") && parser.peek() == Some('?') {
                    let message = "only plain groups and (?: are supported";
                    return Err(parser.error_at(start, message));
                }
                return parser.group(start).map(Some);
            }
            Some(char) => {
                parser.next();
                match char {
                    '[' => parser.class(start)?,
                    '\\' => parser.escaped()?,
                    '.' => CharSet::of("\n\r\u{2028}\u{2029}").complement(),
                    _ => CharSet::of(char.encode_utf8(&mut [0; 4])),
                }
            }
        };
        one_of(parser, set).map(Some)
    }

    fn escape(parser: &mut Parser<Self>, escape: char) -> Result<CharSet> {
        let start = parser.offset() - 2;
        let named = match escape {
            'd' | 'D' => DIGITS,
            'w' | 'W' => WORD,
            's' | 'S' => SPACE,
            'f' => return Ok(CharSet::of("\u{c}")),
            'v' => return Ok(CharSet::of("\u{b}")),
            '0' if !parser.peek().is_some_and(|char| char.is_ascii_digit()) => {
                return Ok(CharSet::of("\0"));
            }
            'x' => return parser.code_point(2),
            'u' if parser.eat("{") => {
                let hex = parser.take_while(|char| char.is_ascii_hexdigit());
                if !parser.eat("}") {
                    return Err(parser.expected("'}' after a code point"));
                }
                return parser.char_of(start, hex);
            }
            'u' => return parser.code_point(4),
            _ if escape.is_ascii_punctuation() => {
                return Ok(CharSet::of(escape.encode_utf8(&mut [0; 4])));
            }
            _ => return Err(parser.unknown_escape(escape)),
        };
        let set = CharSet::new(named.to_vec());
        Ok(if escape.is_ascii_uppercase() { set.complement() } else { set })
    }
}
