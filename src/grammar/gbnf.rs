//! GBNF text to a grammar.

#![forbid(unsafe_code)]

use super::Grammar;
use super::charset::CharSet;
use super::compile::{Builder, Expr};
use super::pattern::{Parser, Syntax};
use crate::bail;
use crate::error::{Context, Result};
use std::collections::HashMap;

/// The rules met so far.
#[derive(Default)]
struct Rules {
    numbers: HashMap<String, u32>,
    /// Offset at which each was first met.
    met_at: Vec<usize>,
}

/// [`Grammar::from_gbnf`].
pub(super) fn compile(text: &str) -> Result<Grammar> {
    compile_rules(text).context(|| "grammar")
}

fn compile_rules(text: &str) -> Result<Grammar> {
    let mut builder = Builder::default();
    let mut parser = Parser::new(text, &mut builder, Rules::default())?;
    loop {
        Rules::skip(&mut parser);
        if parser.peek().is_none() {
            break;
        }
        define_rule(&mut parser)?;
    }
    let Rules { numbers, met_at } = &parser.syntax;
    for (number, offset) in met_at.iter().enumerate() {
        if !parser.builder.is_defined(number as u32) {
            return Err(parser.error_at(*offset, "this rule is not defined"));
        }
    }
    let Some(&root) = numbers.get("root") else { bail!("the rule `root` is not defined") };
    builder.build(root)
}

fn define_rule(parser: &mut Parser<Rules>) -> Result<()> {
    let start = parser.offset();
    let name = identifier(parser);
    if name.is_empty() {
        return Err(parser.expected("a rule name"));
    }
    Rules::skip(parser);
    if !parser.eat("::=") {
        return Err(parser.expected("'::='"));
    }
    let rule = number_of(parser, name, start)?;
    let expr = parser.alternatives()?;
    if parser.builder.is_defined(rule) {
        return Err(parser.error_at(start, format!("rule `{name}` is defined twice")));
    }
    let place = format!("{}: rule `{name}`", parser.position(start));
    parser.builder.define(rule, Some(place), expr);
    Ok(())
}

fn identifier<'a>(parser: &mut Parser<'a, Rules>) -> &'a str {
    parser.take_while(|char| char.is_ascii_alphanumeric() || char == '-' || char == '_')
}

/// The number of the rule `name`, which is met at `offset`.
fn number_of(parser: &mut Parser<Rules>, name: &str, offset: usize) -> Result<u32> {
    if let Some(&number) = parser.syntax.numbers.get(name) {
        return Ok(number);
    }
    let number = parser.builder.declare("")?;
    parser.syntax.met_at.push(offset);
    parser.syntax.numbers.insert(name.into(), number);
    Ok(number)
}

/// A literal after its opening quote, which was at `start`.
fn literal(parser: &mut Parser<Rules>, start: usize) -> Result<Expr> {
    let mut items = Vec::new();
    loop {
        let set = match parser.next() {
            Some('"') => return Ok(Expr::seq(items)),
            None | Some('\n') => return Err(parser.error_at(start, "unterminated literal")),
            Some('\\') => parser.escaped()?,
            Some(char) => CharSet::of(char.encode_utf8(&mut [0; 4])),
        };
        items.push(parser.builder.class(set));
    }
}

impl Syntax for Rules {
    const HAS_LAZY: bool = false;

    /// White space and comments.
    fn skip(parser: &mut Parser<Self>) {
        loop {
            parser.take_while(|char| matches!(char, ' ' | '\t' | '\r' | '\n'));
            if !parser.eat("#") {
                return;
            }
            parser.take_while(|char| char != '\n');
        }
    }

    fn atom(parser: &mut Parser<Self>) -> Result<Option<Expr>> {
        let start = parser.offset();
        let name = identifier(parser);
        if !name.is_empty() {
            let end = parser.offset();
            Self::skip(parser);
            if parser.rest().starts_with("::=") {
                parser.rewind(start);
                return Ok(None);
            }
            parser.rewind(end);
            return Ok(Some(Expr::Rule(number_of(parser, name, start)?)));
        }
        let set = match parser.peek() {
            None | Some('|' | ')') => return Ok(None),
            Some('"') => {
                parser.next();
                return literal(parser, start).map(Some);
            }
            Some('(') => {
                parser.next();
                return parser.group(start).map(Some);
            }
            Some('[') => {
                parser.next();
                parser.class(start)?
            }
            Some('.') => {
                parser.next();
                CharSet::new(Vec::new()).complement()
            }
            Some(_) => return Err(parser.expected("a rule, literal, class or group")),
        };
        if set.is_empty() {
            return Err(parser.error_at(start, "a class without characters"));
        }
        Ok(Some(parser.builder.class(set)))
    }

    fn escape(parser: &mut Parser<Self>, escape: char) -> Result<CharSet> {
        match escape {
            '"' | '\\' | '[' | ']' | '-' | '^' => Ok(CharSet::of(escape.encode_utf8(&mut [0; 4]))),
            'x' => parser.code_point(2),
            'u' => parser.code_point(4),
            'U' => parser.code_point(8),
            _ => Err(parser.unknown_escape(escape)),
        }
    }
}
