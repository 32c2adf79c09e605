//! How a grammar writes JSON: white space, strings, numbers, and values of any kind.

#![forbid(unsafe_code)]

use super::UNBOUNDED;
use super::charset::CharSet;
use super::compile::{Builder, Expr};
use crate::error::Result;

/// Most spaces after a line break.
const INDENT_MAX: u32 = 32;
/// Digits before the point, behind it and in the exponent.
const DIGITS_MAX: (u32, u32, u32) = (18, 16, 2);
/// Bounds of integers are below this in magnitude, so that an i64 holds every integer.
pub(super) const INTEGER_END: i128 = 10i128.pow(18);
/// Bounds of other numbers are below this. With six digits behind the point, no two numbers that
/// are written differently become one f64, so a number within its bounds is read as one.
pub(super) const NUMBER_END: i128 = 10i128.pow(9);
const FRACTION_DIGITS_MAX: u32 = 6;

/// The rules that any JSON needs, and the builder that has them.
pub(super) struct Json {
    pub(super) builder: Builder,
    /// Optional white space that is no single space, and optional white space between elements.
    space: Expr,
    /// One character of a string, escaped or not.
    pub(super) char: Expr,
    string: Expr,
    /// The digits of an integer without sign, then a fraction, then an exponent.
    number: [Expr; 3],
    /// Any value, and any object.
    pub(super) any: Expr,
    pub(super) any_object: Expr,
}

impl Json {
    pub(super) fn new() -> Result<Json> {
        let mut builder = Builder::default();
        let indent = builder.one_of(" ").repeat(0, INDENT_MAX);
        let line_break = Expr::seq([builder.one_of("\n"), indent]);
        let space = Expr::Alt(vec![Expr::empty(), builder.one_of(" "), line_break]);
        let space = builder.rule("white space", space)?;
        let char = char(&mut builder)?;
        let quote = builder.one_of("\"");
        let string = Expr::seq([quote.clone(), char.clone().repeat(0, UNBOUNDED), quote]);
        let string = builder.rule("string", string)?;
        let number = number(&mut builder);
        let any = Expr::Rule(builder.declare("any value")?);
        let any_object = Expr::Rule(builder.declare("any object")?);
        let mut json = Json { builder, space, char, string, number, any, any_object };
        let pair = json.pair(json.string.clone(), json.any.clone());
        let members = json.list(pair);
        let object = json.enclosed("{", members.optional(), "}");
        let elements = json.list(json.any.clone());
        let mut kinds = vec![
            json.any_object.clone(),
            json.enclosed("[", elements.optional(), "]"),
            json.string.clone(),
            json.any_number(),
        ];
        kinds.extend(["true", "false", "null"].map(|word| json.builder.literal(word)));
        for (rule, expr) in [(&json.any, Expr::Alt(kinds)), (&json.any_object, object)] {
            let Expr::Rule(rule) = rule else { unreachable!("declared as rules") };
            json.builder.define(*rule, None, expr);
        }
        Ok(json)
    }

    /// Between brackets, with white space.
    pub(super) fn enclosed(&mut self, open: &str, inner: Expr, close: &str) -> Expr {
        let (open, close) = (self.builder.literal(open), self.builder.literal(close));
        Expr::seq([open, self.space.clone(), inner, self.space.clone(), close])
    }

    /// A comma with white space, then `item`.
    pub(super) fn next(&mut self, item: Expr) -> Expr {
        Expr::seq([self.builder.one_of(","), self.space.clone(), item])
    }

    /// One `item` or more, with commas between.
    pub(super) fn list(&mut self, item: Expr) -> Expr {
        let next = self.next(item.clone()).repeat(0, UNBOUNDED);
        Expr::seq([item, next])
    }

    /// A member of an object.
    pub(super) fn pair(&mut self, key: Expr, value: Expr) -> Expr {
        let space = self.builder.one_of(" ").optional();
        Expr::seq([key, self.builder.one_of(":"), space, value])
    }

    pub(super) fn quoted(&mut self, inner: Expr) -> Expr {
        let quote = self.builder.one_of("\"");
        Expr::seq([quote.clone(), inner, quote])
    }

    /// The characters that stand for themselves in a string, without `others`.
    pub(super) fn plain_char(&mut self, others: &CharSet) -> Expr {
        self.builder.class(plain().minus(others))
    }

    /// Any character at all.
    pub(super) fn any_char(&mut self) -> Expr {
        self.builder.class(CharSet::of("").complement())
    }

    /// A number without bounds.
    pub(super) fn any_number(&mut self) -> Expr {
        let [integer, fraction, exponent] = self.number.clone();
        let minus = self.builder.one_of("-").optional();
        Expr::seq([minus, integer, fraction.optional(), exponent.optional()])
    }

    /// An integer without bounds.
    pub(super) fn any_integer(&mut self) -> Expr {
        Expr::seq([self.builder.one_of("-").optional(), self.number[0].clone()])
    }

    /// The integers of `low..=high`.
    pub(super) fn integers(&mut self, low: i128, high: i128) -> Expr {
        let mut alternatives = self.magnitudes(low.max(0), high);
        let negative = self.magnitudes((-high).max(1), -low);
        alternatives.push(self.negative(negative));
        self.builder.any_of(alternatives)
    }

    /// Numbers with a fraction that is not 0, above `low` and below `high`.
    pub(super) fn fractions(&mut self, low: i128, high: i128) -> Expr {
        let positive = self.magnitudes(low.max(0), high - 1);
        let negative = self.magnitudes((-high).max(0), -low - 1);
        let whole = [self.builder.any_of(positive), self.negative(negative)];
        let whole = self.builder.any_of(whole.into());
        let mut fraction = self.digits(1, 9);
        for more in 1..FRACTION_DIGITS_MAX {
            let rest = self.digits(0, 9).repeat(0, more);
            let zero = Expr::seq([self.digits(0, 0), fraction]);
            fraction = Expr::Alt(vec![Expr::seq([self.digits(1, 9), rest]), zero]);
        }
        Expr::seq([whole, self.builder.one_of("."), fraction])
    }

    /// Nothing, or a fraction that is 0.
    pub(super) fn zero_fraction(&mut self) -> Expr {
        Expr::seq([self.builder.one_of("."), self.digits(0, 0).repeat(1, FRACTION_DIGITS_MAX)])
            .optional()
    }

    fn negative(&mut self, magnitudes: Vec<Expr>) -> Expr {
        let magnitude = self.builder.any_of(magnitudes);
        Expr::seq([self.builder.one_of("-"), magnitude])
    }

    /// The integers of `low..=high`, none below 0, by their number of digits.
    fn magnitudes(&mut self, mut low: i128, high: i128) -> Vec<Expr> {
        let mut alternatives = Vec::new();
        while low <= high {
            let digits = low.to_string();
            let last = high.min(10i128.pow(digits.len() as u32) - 1);
            alternatives.push(self.between(digits.as_bytes(), last.to_string().as_bytes()));
            low = last + 1;
        }
        alternatives
    }

    /// The numbers from `low` to `high`, digits of the same length.
    fn between(&mut self, low: &[u8], high: &[u8]) -> Expr {
        let count = low.len() as u32;
        if low.iter().all(|digit| *digit == b'0') && high.iter().all(|digit| *digit == b'9') {
            return if count == 0 { Expr::empty() } else { self.digits(0, 9).repeat(count, count) };
        }
        let (first, last) = (low[0] - b'0', high[0] - b'0');
        if first == last {
            return Expr::seq([self.digits(first, last), self.between(&low[1..], &high[1..])]);
        }
        let rest = count - 1;
        let nines = vec![b'9'; low.len() - 1];
        let zeros = vec![b'0'; low.len() - 1];
        let mut alternatives = vec![
            Expr::seq([self.digits(first, first), self.between(&low[1..], &nines)]),
            Expr::seq([self.digits(last, last), self.between(&zeros, &high[1..])]),
        ];
        if first + 1 < last {
            let any = self.digits(0, 9).repeat(rest, rest);
            alternatives.push(Expr::seq([self.digits(first + 1, last - 1), any]));
        }
        Expr::Alt(alternatives)
    }

    fn digits(&mut self, low: u8, high: u8) -> Expr {
        digits(&mut self.builder, low, high)
    }
}

/// The characters that stand for themselves in a string.
fn plain() -> CharSet {
    CharSet::new(vec![(0, 0x1f), (0x22, 0x22), (0x5c, 0x5c)]).complement()
}

/// A digit from `low` to `high`.
fn digits(builder: &mut Builder, low: u8, high: u8) -> Expr {
    builder.class(CharSet::new(vec![(0x30 + u32::from(low), 0x30 + u32::from(high))]))
}

/// A character of a string. Surrogates are written in pairs only, and a pair is one character.
fn char(builder: &mut Builder) -> Result<Expr> {
    let hex = builder.one_of("0123456789abcdefABCDEF");
    let hex = |count: u32| hex.clone().repeat(count, count);
    let mut surrogate = |second: &str| Expr::seq([builder.one_of("dD"), builder.one_of(second)]);
    let (high, low) = (surrogate("89abAB"), surrogate("cdefCDEF"));
    let other_d = surrogate("01234567");
    let pair = Expr::seq([high, hex(2), builder.literal("\\u"), low, hex(2)]);
    let not_d = Expr::seq([builder.one_of("0123456789abcefABCEF"), hex(3)]);
    let code = Expr::Alt(vec![not_d, Expr::seq([other_d, hex(2)]), pair]);
    let code = Expr::seq([builder.one_of("u"), code]);
    let escape = Expr::Alt(vec![builder.one_of("\"\\/bfnrt"), code]);
    let escape = builder.rule("escape", escape)?;
    let escaped = Expr::seq([builder.one_of("\\"), escape]);
    Ok(Expr::Alt(vec![builder.class(plain()), escaped]))
}

/// [`Json::number`].
fn number(builder: &mut Builder) -> [Expr; 3] {
    let (before, behind, exponent) = DIGITS_MAX;
    let (first, any) = (digits(builder, 1, 9), digits(builder, 0, 9));
    let integer = Expr::seq([first, any.clone().repeat(0, before - 1)]);
    let integer = Expr::Alt(vec![builder.one_of("0"), integer]);
    let fraction = Expr::seq([builder.one_of("."), any.clone().repeat(1, behind)]);
    let sign = builder.one_of("+-").optional();
    [integer, fraction, Expr::seq([builder.one_of("eE"), sign, any.repeat(1, exponent)])]
}
