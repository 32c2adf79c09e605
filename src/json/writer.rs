//! The two writers: compact for files and the wire, Python's spacing for prompts.
//!
//! Chat templates render tool schemas with `json.dumps(v, ensure_ascii=False)`, and one different
//! byte is a different prompt, so [`to_python`] reproduces CPython exactly, floats included.

#![forbid(unsafe_code)]

use super::Value;
use std::fmt::Write;

/// The separators of one style.
struct Style {
    item: &'static str,
    key: &'static str,
    /// CPython writes `NaN` and `Infinity`; JSON has no such thing, so compact text says `null`.
    non_finite_words: bool,
}

/// Without any space: `{"a":[1,2.5]}`. A float that is not finite becomes `null`.
pub fn to_compact(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value, &Style { item: ",", key: ":", non_finite_words: false });
    out
}

/// As CPython's `json.dumps(value, ensure_ascii=False)`: `{"a": [1, 2.5]}`.
pub fn to_python(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value, &Style { item: ", ", key: ": ", non_finite_words: true });
    out
}

/// Appends `text` as a JSON string: quotes, backslash and controls escaped, the rest verbatim.
/// (Both styles agree on strings.)
pub fn write_str_compact(out: &mut String, text: &str) {
    out.push('"');
    let mut plain_start = 0;
    for (at, byte) in text.bytes().enumerate() {
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            continue;
        }
        out.push_str(&text[plain_start..at]);
        plain_start = at + 1;
        match byte {
            b'"' => out.push_str("\\\""),
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            0x08 => out.push_str("\\b"),
            0x0c => out.push_str("\\f"),
            control => write!(out, "\\u{control:04x}").expect("a String takes all text"),
        }
    }
    out.push_str(&text[plain_start..]);
    out.push('"');
}

/// A finite float as CPython's `repr` writes it: the shortest digits that read back as the same
/// f64, as `1.0`, `100000.0`, `1e+16` or `1e-05`; exponent form below 1e-4 and from 1e16 on.
/// Others are `nan`, `inf` and `-inf`.
pub fn float_repr(float: f64) -> String {
    if !float.is_finite() {
        let word = if float.is_nan() { "nan" } else { "inf" };
        return if float == f64::NEG_INFINITY { "-inf".into() } else { word.into() };
    }
    // Rust's exponent form has as few digits as CPython's: "-1.25e-7". When two such decimals are
    // equally near, Rust takes the upper one and CPython the even one, as rounding to that many
    // digits does; but next to a power of two the rounded decimal may read back as another float.
    let shortest = format!("{float:e}");
    let (mantissa, exponent) = shortest.split_once('e').expect("exponent form has an e");
    let exponent: i32 = exponent.parse().expect("the exponent is a small integer");
    let behind = mantissa.bytes().filter(u8::is_ascii_digit).count() - 1;
    let or_shortest = |rounded: String, shortest: String| match rounded.parse() == Ok(float) {
        true => rounded,
        false => shortest,
    };
    if (-4..16).contains(&exponent) {
        // There is always a digit on both sides of the point.
        let behind = (behind as i32 - exponent).max(1) as usize;
        return or_shortest(format!("{float:.behind$}"), format!("{float:?}"));
    }
    let chosen = or_shortest(format!("{float:.behind$e}"), shortest);
    let (mantissa, exponent) = chosen.split_once('e').expect("exponent form has an e");
    let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
    format!("{mantissa}e{sign}{digits:0>2}")
}

fn write_value(out: &mut String, value: &Value, style: &Style) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Int(int) => write!(out, "{int}").expect("a String takes all text"),
        Value::BigInt(digits) => out.push_str(digits),
        Value::Float(float) => write_float(out, *float, style),
        Value::String(text) => write_str_compact(out, text),
        Value::Array(elements) => {
            out.push('[');
            for (index, element) in elements.iter().enumerate() {
                if index > 0 {
                    out.push_str(style.item);
                }
                write_value(out, element, style);
            }
            out.push(']');
        }
        Value::Object(members) => {
            out.push('{');
            for (index, (key, member)) in members.iter().enumerate() {
                if index > 0 {
                    out.push_str(style.item);
                }
                write_str_compact(out, key);
                out.push_str(style.key);
                write_value(out, member, style);
            }
            out.push('}');
        }
    }
}

fn write_float(out: &mut String, float: f64, style: &Style) {
    if float.is_finite() {
        out.push_str(&float_repr(float));
    } else if !style.non_finite_words {
        out.push_str("null");
    } else if float.is_nan() {
        out.push_str("NaN");
    } else {
        out.push_str(if float > 0.0 { "Infinity" } else { "-Infinity" });
    }
}
