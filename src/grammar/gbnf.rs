//! GBNF text to a grammar, or to an expression of a grammar that is made otherwise.

#![forbid(unsafe_code)]

use super::Grammar;
use super::charset::CharSet;
use super::compile::{Builder, Expr};
use super::pattern::{Parser, Syntax};
use crate::bail;
use crate::error::Result;
use std::collections::HashMap;

/// What a name stands for that is not a rule of the text.
type Known<'k> = &'k dyn Fn(&str) -> Option<Expr>;

/// The names of a text.
struct Names<'k> {
    known: Known<'k>,
    /// The rules met so far.
    rules: HashMap<String, u32>,
    /// Offset at which each was first met.
    met_at: Vec<(u32, usize)>,
}

/// [`Grammar::from_gbnf`].
pub(super) fn compile(text: &str) -> Result<Grammar> {
    let mut builder = Builder::default();
    match rules(&mut builder, text)?.get("root") {
        Some(root) => builder.build(*root),
        None => bail!("the rule `root` is not defined"),
    }
}

/// Defines the rules of a text, and returns their numbers by name.
pub(super) fn rules(builder: &mut Builder, text: &str) -> Result<HashMap<String, u32>> {
    let mut parser = Parser::new(text, builder, Names::new(&|_| None))?;
    Names::skip(&mut parser);
    while parser.peek().is_some() {
        define_rule(&mut parser)?;
    }
    for (rule, offset) in &parser.syntax.met_at {
        if !parser.builder.is_defined(*rule) {
            return Err(parser.error_at(*offset, "this rule is not defined"));
        }
    }
    Ok(parser.syntax.rules)
}

/// The expression that `text` is, all of whose names are `known`.
pub(super) fn expression(builder: &mut Builder, text: &str, known: Known<'_>) -> Result<Expr> {
    Parser::new(text, builder, Names::new(known))?.alternatives()
}

fn define_rule(parser: &mut Parser<Names<'_>>) -> Result<()> {
    let start = parser.at;
    let name = identifier(parser);
    if name.is_empty() {
        return Err(parser.expected("a rule name"));
    }
    Names::skip(parser);
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

fn identifier<'a>(parser: &mut Parser<'a, Names<'_>>) -> &'a str {
    parser.take_while(|char| char.is_ascii_alphanumeric() || char == '-' || char == '_')
}

/// The number of the rule `name`, which is met at `offset`.
fn number_of(parser: &mut Parser<Names<'_>>, name: &str, offset: usize) -> Result<u32> {
    if let Some(&number) = parser.syntax.rules.get(name) {
        return Ok(number);
    }
    let number = parser.builder.declare("")?;
    parser.syntax.met_at.push((number, offset));
    parser.syntax.rules.insert(name.into(), number);
    Ok(number)
}

impl<'k> Names<'k> {
    fn new(known: Known<'k>) -> Names<'k> {
        Names { known, rules: HashMap::new(), met_at: Vec::new() }
    }
}

impl Syntax for Names<'_> {
    const IS_REGEX: bool = false;

    fn any() -> CharSet {
        CharSet::default().complement()
    }

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

    /// A name or a literal.
    fn atom(parser: &mut Parser<Self>) -> Result<Option<Expr>> {
        let start = parser.at;
        let name = identifier(parser);
        if !name.is_empty() {
            let end = parser.at;
            Self::skip(parser);
            let is_next_rule = parser.rest().starts_with("::=");
            parser.at = if is_next_rule { start } else { end };
            return match (parser.syntax.known)(name) {
                _ if is_next_rule => Ok(None),
                Some(expr) => Ok(Some(expr)),
                None => Ok(Some(Expr::Rule(number_of(parser, name, start)?))),
            };
        }
        if !parser.eat("\"") {
            return Err(parser.expected("a rule, literal, class or group"));
        }
        let mut items = Vec::new();
        loop {
            let set = match parser.next() {
                Some('"') => return Ok(Some(Expr::seq(items))),
                None | Some('\n') => return Err(parser.error_at(start, "unterminated literal")),
                Some('\\') => parser.escaped()?,
                Some(char) => char.into(),
            };
            items.push(parser.builder.class(set));
        }
    }

    fn char(parser: &mut Parser<Self>, set: CharSet) -> Result<Expr> {
        Ok(parser.builder.class(set))
    }

    fn escape(parser: &mut Parser<Self>, escape: char) -> Result<CharSet> {
        match escape {
            '"' | '\\' | '[' | ']' | '-' | '^' => Ok(escape.into()),
            'U' => parser.code_point(8),
            _ => Err(parser.unknown_escape(escape)),
        }
    }
}
