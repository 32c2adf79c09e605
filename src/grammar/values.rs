//! How a grammar writes JSON: white space, strings, numbers, and values of any kind.

#![forbid(unsafe_code)]

use super::compile::{Builder, Expr};
use super::gbnf;
use std::collections::HashMap;

/// The rules that any JSON needs. Of numbers, it bounds the digits before the point, behind it and
/// in the exponent; of white space, the spaces after a line break. A surrogate is written in a pair
/// only, which is one character.
const RULES: &str = r#"
    space ::= | " " | "\n" " "{0,32}
    plain ::= [^\x00-\x1f"\\]
    hex ::= [0-9a-fA-F]
    escape ::= ["\\/bfnrt] | "u" (
        [0-9abcefABCEF] hex{3} | [dD] [0-7] hex{2} |
        [dD] [89abAB] hex{2} "\\u" [dD] [c-fC-F] hex{2} )
    string ::= "\"" (plain | "\\" escape)* "\""
    integer ::= "0" | [1-9] [0-9]{0,17}
    number ::= "-"? integer ("." [0-9]{1,16})? ([eE] [+-]? [0-9]{1,2})?
    value ::= object | array | string | number | "true" | "false" | "null"
    array ::= "[" space (value ("," space value)*)? space "]"
    pair ::= string ":" " "? value
    object ::= "{" space (pair ("," space pair)*)? space "}"
"#;
/// Bounds of integers are below this in magnitude, so that an i64 holds every integer.
pub(super) const INTEGER_END: i128 = 10i128.pow(18);
/// Bounds of other numbers are below this. With six digits behind the point, no two numbers that
/// are written differently, zeros at the end aside, become one f64, so a number within its bounds
/// is read as one.
pub(super) const NUMBER_END: i128 = 10i128.pow(9);

/// The rules of [`RULES`], and the builder that has them.
pub(super) struct Json {
    pub(super) builder: Builder,
    rules: HashMap<String, u32>,
}

impl Json {
    pub(super) fn new() -> Json {
        let mut builder = Builder::default();
        let rules = gbnf::rules(&mut builder, RULES).expect("the rules are right");
        Json { builder, rules }
    }

    /// The number of a rule of [`RULES`].
    pub(super) fn rule(&self, name: &str) -> u32 {
        self.rules[name]
    }

    /// The expression that `text`, GBNF, is. Its names are those of `parts` and of [`RULES`].
    pub(super) fn expr(&mut self, text: &str, parts: &[(&str, &Expr)]) -> Expr {
        let Json { builder, rules } = self;
        let known = |name: &str| match parts.iter().find(|(part, _)| *part == name) {
            Some((_, expr)) => Some((*expr).clone()),
            None => Some(Expr::Rule(rules[name])),
        };
        gbnf::expression(builder, text, &known).expect("the text is right")
    }

    /// The integers of `low..=high`.
    pub(super) fn integers(&mut self, low: i128, high: i128) -> Expr {
        let positive = self.magnitudes(low.max(0), high);
        let negative = self.magnitudes((-high).max(1), -low);
        self.expr(r#"positive | "-" negative"#, &[("positive", &positive), ("negative", &negative)])
    }

    /// Numbers with a fraction that is not 0, above `low` and below `high`.
    pub(super) fn fractions(&mut self, low: i128, high: i128) -> Expr {
        let positive = self.magnitudes(low.max(0), high - 1);
        let negative = self.magnitudes((-high).max(0), -low - 1);
        self.expr(
            r#"(positive | "-" negative) "." [0-9]{0,5} [1-9] "0"{0,5}"#,
            &[("positive", &positive), ("negative", &negative)],
        )
    }

    /// The integers of `low..=high`, none below 0, by their number of digits.
    fn magnitudes(&mut self, mut low: i128, high: i128) -> Expr {
        let mut alternatives = Vec::new();
        while low <= high {
            let digits = low.to_string();
            let last = high.min(10i128.pow(digits.len() as u32) - 1);
            alternatives.push(self.expr(&between(&digits, &last.to_string()), &[]));
            low = last + 1;
        }
        self.builder.any_of(alternatives)
    }
}

/// The numbers from `low` to `high`, digits of the same length, as GBNF.
fn between(low: &str, high: &str) -> String {
    if low.chars().all(|digit| digit == '0') && high.chars().all(|digit| digit == '9') {
        return format!("[0-9]{{{}}}", low.len());
    }
    let ((first, low), (last, high)) = (low.split_at(1), high.split_at(1));
    if first == last {
        return format!("\"{first}\" {}", between(low, high));
    }
    let count = low.len();
    let low = between(low, &"9".repeat(count));
    let high = between(&"0".repeat(count), high);
    // The digits between them, with anything behind.
    let (after, before) = (first.as_bytes()[0] + 1, last.as_bytes()[0] - 1);
    let inner = match after <= before {
        true => format!(" | [{}-{}] [0-9]{{{count}}}", char::from(after), char::from(before)),
        false => String::new(),
    };
    format!("(\"{first}\" {low} | \"{last}\" {high}{inner})")
}
