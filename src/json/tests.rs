//! Tests of the reader and the writers. Expected texts come from RFC 8259 and from CPython.

use super::*;
use std::borrow::Cow;

fn read(text: &str) -> Result<Value> {
    parse(text.as_bytes(), Limits::default())
}

fn refusal(text: &[u8]) -> String {
    match parse(text, Limits::default()) {
        Ok(value) => panic!("accepted {:?} as {value:?}", String::from_utf8_lossy(text)),
        Err(error) => error.to_string(),
    }
}

#[test]
fn integers_and_floats_are_told_apart_by_how_they_are_written() {
    let text = "[0,-0,-0.0,7,7.0,1e2,9223372036854775807,9223372036854775808,\
                -9223372036854775809,1E-2,5e-324,1e-400]";
    let expected = [
        Value::Int(0),
        Value::Int(0),
        Value::Float(-0.0),
        Value::Int(7),
        Value::Float(7.0),
        Value::Float(100.0),
        Value::Int(i64::MAX),
        Value::BigInt("9223372036854775808".into()),
        Value::BigInt("-9223372036854775809".into()),
        Value::Float(0.01),
        Value::Float(f64::from_bits(1)),
        Value::Float(0.0),
    ];
    let value = read(text).unwrap();
    assert_eq!(value.as_array().unwrap(), expected);
    let Value::Float(zero) = value.as_array().unwrap()[2] else { unreachable!() };
    assert!(zero.is_sign_negative());
}

#[test]
fn accessors_never_convert_between_kinds() {
    let value = read(r#"{"i":3,"f":3.0,"big":18446744073709551615,"neg":-1,"s":"3"}"#).unwrap();
    let get = |key: &str| value.get(key).unwrap();
    assert_eq!(
        (get("i").as_i64(), get("i").as_u64(), get("i").as_f64()),
        (Some(3), Some(3), Some(3.0))
    );
    assert_eq!((get("f").as_i64(), get("f").as_u64(), get("f").as_f64()), (None, None, Some(3.0)));
    assert_eq!((get("big").as_i64(), get("big").as_u64()), (None, Some(u64::MAX)));
    assert_eq!((get("neg").as_u64(), get("s").as_i64(), get("s").as_f64()), (None, None, None));
    assert!(value.get("missing").is_none() && get("s").get("x").is_none());
}

#[test]
fn escapes_resolve_and_pairs_join() {
    let value = read(r#""\"\\\/\b\f\n\r\t\u0041\u00e9\uD83D\ude00é😀""#).unwrap();
    assert_eq!(value.as_str().unwrap(), "\"\\/\u{8}\u{c}\n\r\tAé😀é😀");
}

/// Inputs that RFC 8259 does not allow, or that the module refuses, with the offset of the fault.
#[test]
fn malformed_documents_are_refused_at_the_right_byte() {
    let cases: &[(&[u8], usize)] = &[
        (b"", 0),
        (b"  ", 2),
        (b"{a:1}", 1),
        (b"{", 1),
        (b"{\"a\"", 4),
        (b"{\"a\":", 5),
        (b"{\"a\":1", 6),
        (b"{\"a\":1,}", 7),
        (b"{\"a\" 1}", 5),
        (b"{,}", 1),
        (b"[1,]", 3),
        (b"[1 2]", 3),
        (b"[1}", 2),
        (b"[,1]", 1),
        (b"]", 0),
        (b"1 2", 2),
        (b"{} x", 3),
        (b"tru", 0),
        (b"truex", 4),
        (b"nul", 0),
        (b"NaN", 0),
        (b"Infinity", 0),
        (b"-Infinity", 1),
        (b"+1", 0),
        (b".5", 0),
        (b"1.", 2),
        (b"1.e3", 2),
        (b"1e", 2),
        (b"1e+", 3),
        (b"-", 1),
        (b"01", 0),
        (b"-01", 0),
        (b"0x10", 1),
        (b"1e999", 0),
        (b"[-1e400]", 1),
        (b"\"", 1),
        (b"\"abc", 4),
        (b"\"a\nb\"", 2),
        (b"\"a\x00b\"", 2),
        (b"\"\\", 2),
        (b"\"\\s\"", 2),
        (b"\"\\u12\"", 5),
        (b"\"\\u12g4\"", 5),
        (b"\"\\u+123\"", 3),
        (b"\"\\ud800\"", 1),
        (b"\"\\ud800\\u0041\"", 1),
        (b"\"\\ud800\\ud800\"", 1),
        (b"\"x\\udc00\"", 2),
        (b"'a'", 0),
        (b"\xEF\xBB\xBF1", 0),
        (b"\"\xFF\"", 1),
        (b"\"\xC0\x80\"", 1),
        (b"\"\xED\xA0\x80\"", 1),
        (b"\"\xF0\x9F\x98", 1),
        (b"[1]/*c*/", 3),
        (b"\x0b1", 0),
        ("\u{a0}1".as_bytes(), 0),
    ];
    for (text, offset) in cases {
        let message = refusal(text);
        let shown = String::from_utf8_lossy(text);
        assert!(message.contains(&format!("at byte {offset} (line ")), "{shown:?}: {message}");
    }
}

#[test]
fn error_text_says_what_was_expected_found_and_where() {
    assert_eq!(
        refusal("{\n  \"é\": tru\n}".as_bytes()),
        "expected true, found 't' at byte 10 (line 2, column 8)"
    );
    assert_eq!(
        refusal(b"{a:1}"),
        "expected a key in double quotes, found 'a' at byte 1 (line 1, column 2)"
    );
    assert_eq!(
        refusal(b"["),
        "expected a value, found the end of the text at byte 1 (line 1, column 2)"
    );
    assert_eq!(
        refusal(b"\"\\s\""),
        "expected one of \"\\/bfnrtu after the backslash, found 's' at byte 2 (line 1, column 3)"
    );
}

#[test]
fn repeated_keys_are_refused_in_small_and_large_objects() {
    assert_eq!(
        refusal(br#"{"a":1,"b":{"a":2},"a":3}"#),
        "the key \"a\" occurs twice at byte 22 (line 1, column 23)"
    );
    assert!(refusal(br#"{"a":1,"\u0061":3}"#).contains("the key \"a\" occurs twice"));
    let mut text = String::from("{");
    for i in 0..200_000 {
        text.push_str(&format!("\"k{i}\":0,"));
    }
    let valid = text.clone() + "\"last\":0}";
    assert_eq!(read(&valid).unwrap().as_object().unwrap().len(), 200_001);
    let message = refusal((text + "\"k7\":0}").as_bytes());
    assert!(message.contains("the key \"k7\" occurs twice"), "{message}");
}

#[test]
fn limits_hold_at_their_edge_and_name_themselves() {
    let limits = Limits { max_bytes: 40, max_depth: 3, max_values: 5 };
    assert!(parse(b"[[[1]],2]", limits).is_ok());
    let message = |text: &[u8]| parse(text, limits).unwrap_err().to_string();
    assert!(message(b"[[[[1]]]]").starts_with("nested deeper than the allowed 3 levels at byte 3"));
    assert!(message(b"[1,2,3,4,5]").starts_with("more than the allowed 5 values at byte 9"));
    assert_eq!(message(&[b' '; 41]), "JSON document of 41 bytes, at most 40 allowed");
    let deep = vec![b'['; 1 << 20];
    let unlimited = Limits { max_depth: usize::MAX, ..Limits::default() };
    assert!(parse(&deep, unlimited).unwrap_err().to_string().contains("allowed 512 levels"));
}

#[test]
fn pull_reader_walks_without_a_tree_and_borrows_plain_strings() {
    let text = br#" {"a":[1, "x", "\n"], "skip":{"b":[[], {}, {"c":[null,true]}]},
        "n":18446744073709551615} "#;
    let mut reader = Reader::new(text, Limits::default()).unwrap();
    let mut keys = Vec::new();
    let read = reader.object(|reader, key| {
        keys.push(key.to_string());
        match &*key {
            "a" => {
                assert_eq!(reader.peek()?, Kind::Array);
                let mut count = 0;
                reader.array(|reader| {
                    count += 1;
                    match count {
                        1 => assert_eq!(reader.number()?, Value::Int(1)),
                        2 => assert!(matches!(reader.string()?, Cow::Borrowed("x"))),
                        _ => assert!(matches!(reader.string()?, Cow::Owned(s) if s == "\n")),
                    }
                    Ok(())
                })?;
                assert_eq!(count, 3);
            }
            "n" => assert_eq!(reader.u64()?, u64::MAX),
            _ => reader.skip()?,
        }
        Ok(())
    });
    read.unwrap();
    assert_eq!(keys, ["a", "skip", "n"]);
    assert_eq!(reader.offset(), text.len() - 1);
    reader.finish().unwrap();
}

#[test]
fn fields_are_there_once() {
    let fields = |text: &str| {
        let mut reader = Reader::new(text.as_bytes(), Limits::default()).unwrap();
        reader.fields(&["a", "b"], |reader, _| reader.skip()).map_err(|error| error.to_string())
    };
    assert_eq!(fields(r#"{"b":1,"c":2,"a":3}"#), Ok(()));
    let missing = fields(r#"{"b":1,"c":2}"#).unwrap_err();
    assert_eq!(missing, "the key \"a\" is missing at byte 0 (line 1, column 1)");
    assert!(fields(r#"{"a":1,"b":2,"\u0061":3}"#).unwrap_err().contains("\"a\" occurs twice"));
}

#[test]
fn pull_reader_refuses_the_wrong_kind_with_its_position() {
    let mut reader = Reader::new(b"[1.5]", Limits::default()).unwrap();
    assert_eq!(
        reader.object(|_, _| Ok(())).unwrap_err().to_string(),
        "expected an object, found '[' at byte 0 (line 1, column 1)"
    );
    assert_eq!(
        reader.array(|reader| reader.u64().map(drop)).unwrap_err().to_string(),
        "expected an integer from 0 to 18446744073709551615, found \"1.5\" \
         at byte 1 (line 1, column 2)"
    );
    let mut unread = Reader::new(b"[1.5]", Limits::default()).unwrap();
    assert!(unread.array(|_| Ok(())).unwrap_err().to_string().starts_with("expected ',' or ']'"));
}

/// The text is CPython 3.11's `json.dumps` of the same value, with and without separators.
#[test]
fn writers_match_cpython() {
    let text = r#"{"b":[1,-2.50,1e5,true,null,{}],"a":"\u007f\u001f\t\/\"é😀\u2028","":[],
        "n":123456789012345678901234567890}"#;
    let value = read(text).unwrap();
    let python = "{\"b\": [1, -2.5, 100000.0, true, null, {}], \
                  \"a\": \"\u{7f}\\u001f\\t/\\\"é😀\u{2028}\", \"\": [], \
                  \"n\": 123456789012345678901234567890}";
    assert_eq!(to_python(&value), python);
    assert_eq!(to_compact(&value), python.replace(", ", ",").replace(": ", ":"));
    assert_eq!(read(&to_compact(&value)).unwrap(), value);
    let odd = Value::Array([f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(Value::Float).into());
    assert_eq!(to_python(&odd), "[NaN, Infinity, -Infinity]");
    assert_eq!(to_compact(&odd), "[null,null,null]");
}

/// The fixture holds `bits repr` lines printed by CPython's `repr`.
#[test]
fn float_repr_matches_cpython_on_every_golden() {
    let goldens = include_str!("../../tests/fixtures/json/float_repr.txt");
    let mut count = 0;
    for line in goldens.lines().filter(|line| !line.starts_with('#')) {
        let (bits, repr) = line.split_once(' ').unwrap();
        let float = f64::from_bits(u64::from_str_radix(bits, 16).unwrap());
        assert_eq!(float_repr(float), repr, "bits {bits}");
        count += 1;
    }
    assert!(count >= 500, "only {count} goldens");
}
