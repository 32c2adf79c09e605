//! Grammars: what they accept, what they refuse to compile, and that all they let through is valid.

#![forbid(unsafe_code)]

mod common;

use colibri::grammar::{CallForm, Constraint, Grammar, Tool, Vocabulary, read_argument};
use colibri::json::{self, Limits, Reader, Value};
use common::{Random, fixture, fuzz, new_seed, read_json};
use std::io::Write;
use std::sync::Arc;

/// Every byte, then tokens that go across what a grammar tells apart or split a character.
fn tokens() -> Vec<Vec<u8>> {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    let longer = [
        "{\"", "\":", "\",", "\", \"", "\"}", "},", "[{", "]", "}]", ": ", "\n  ", "true", "false",
        "null", "12", "007", "-1", "1.5", "e1", "ab", "abc", "a\"", "\\u00", "\\n", "a\"b", "é",
        "漢字", "漢\"", "😀", "\u{7f}", "  ", "name", "\"a\"", ", ", "1, ",
    ];
    tokens.extend(longer.map(|token| token.as_bytes().to_vec()));
    // The end of é with a quote, the beginning of 漢 after one, the middle of 😀.
    tokens.extend([&b"\xa9\""[..], b"\"\xe6\xbc", b"\x9f\x98"].map(<[u8]>::to_vec));
    tokens
}

fn vocabulary() -> Arc<Vocabulary> {
    let tokens = tokens();
    let tokens = tokens.iter().enumerate().map(|(id, bytes)| (id as u32, bytes.as_slice()));
    Arc::new(Vocabulary::new(tokens))
}

fn constraint(grammar: Grammar) -> Constraint {
    Constraint::new(Arc::new(grammar), vocabulary()).unwrap()
}

fn gbnf(text: &str) -> Constraint {
    constraint(Grammar::from_gbnf(text).unwrap_or_else(|e| panic!("{text}: {e}")))
}

fn parse(text: &str) -> Value {
    json::parse(text.as_bytes(), Limits::default()).unwrap()
}

fn schema(text: &str) -> Constraint {
    constraint(Grammar::from_schema(&parse(text)).unwrap_or_else(|e| panic!("{text}: {e}")))
}

/// Whether the whole of `text` matches; read byte by byte, so that every split is met.
fn matches(constraint: &mut Constraint, text: &[u8]) -> bool {
    let mut read = 0;
    for byte in text {
        if !constraint.accept(&[*byte]).unwrap() {
            break;
        }
        read += 1;
    }
    let matches = read == text.len() && constraint.is_complete();
    constraint.rollback(read);
    matches
}

/// Texts that match and texts that do not.
fn check(name: &str, mut constraint: Constraint, good: &[&str], bad: &[&str]) {
    for text in good {
        assert!(matches(&mut constraint, text.as_bytes()), "{name}: refuses {text:?}");
    }
    for text in bad {
        assert!(!matches(&mut constraint, text.as_bytes()), "{name}: accepts {text:?}");
    }
}

#[test]
fn gbnf_matches_what_its_operators_say() {
    let table: &[(&str, &[&str], &[&str])] = &[
        ("root ::= \"abc\"", &["abc"], &["", "ab", "abcd", "abd"]),
        ("root ::= \"\"", &[""], &["a"]),
        ("root ::= \"a\" | \"bc\" |", &["a", "bc", ""], &["b", "abc", "aa"]),
        ("root ::= \"a\"? \"b\"* \"c\"+", &["c", "ac", "bbcc"], &["", "a", "ab", "aac", "cb"]),
        ("root ::= [ab]{2}", &["ab", "bb"], &["a", "aba", ""]),
        ("root ::= [ab]{2,}", &["ab", "bbaab"], &["a", ""]),
        ("root ::= \"ab\"{1,3}", &["ab", "abab", "ababab"], &["", "a", "abababab"]),
        ("root ::= \"a\"{0,0} \"b\"", &["b"], &["ab"]),
        ("root ::= [a-cx_-]*", &["abcx_-"], &["d", "w"]),
        ("root ::= [^a-c]", &["d", "\n", "é", "😀"], &["a", "b", "", "dd"]),
        ("root ::= .", &["a", "\n", "漢", "\u{10ffff}"], &["", "ab"]),
        ("root ::= [α-ω]+ [😀-😂]", &["αβω😁"], &["a😀", "αβ", "α😃"]),
        ("root ::= (\"a\" | \"b\" (\"c\" | \"d\"))+ ", &["abcbda"], &["abc|", "ab"]),
        ("root ::= a-1 b_2\na-1 ::= \"x\"\nb_2 ::= \"y\" # end", &["xy"], &["x", "xy#"]),
        (
            "# first\nroot ::= # the start\n  \"a\" |\n  \"b\"\n  | (\n \"c\" )",
            &["a", "c"],
            &["ab"],
        ),
        ("root ::= \"a\" root \"b\" | \"\"", &["", "ab", "aaabbb"], &["a", "aab", "ba", "abab"]),
        ("root ::= \"a\" root | \"a\"", &["a", "aaaa"], &["", "b"]),
        ("root ::= (\"a\"? \"b\"?)* \"c\"", &["c", "abbac"], &["ab", "cc"]),
        ("root ::= e e \"a\"\ne ::= \"\" | e2\ne2 ::= \"\"", &["a"], &["", "aa"]),
        ("root ::= \"a\" never | \"b\"\nnever ::= \"c\" never", &["b"], &["a", "ac"]),
    ];
    for (text, good, bad) in table {
        check(text, gbnf(text), good, bad);
    }
}

#[test]
fn gbnf_escapes_stand_for_their_characters() {
    let table = [
        (r#"\n"#, "\n"),
        (r#"\r"#, "\r"),
        (r#"\t"#, "\t"),
        (r#"\""#, "\""),
        (r#"\\"#, "\\"),
        (r#"\["#, "["),
        (r#"\]"#, "]"),
        (r#"\-"#, "-"),
        (r#"\^"#, "^"),
        (r#"\x41"#, "A"),
        (r#"\xe9"#, "é"),
        (r#"\u6f22"#, "漢"),
        (r#"\U0001F600"#, "😀"),
    ];
    for (escape, char) in table {
        for text in [format!("root ::= \"{escape}\""), format!("root ::= [{escape}]")] {
            check(&text, gbnf(&text), &[char], &["", "z", escape]);
        }
        let negated = format!("root ::= [^{escape}]");
        check(&negated, gbnf(&negated), &["z"], &[char]);
    }
}

#[test]
fn malformed_gbnf_is_refused_with_its_place() {
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(65), ")".repeat(65));
    let large = format!("root ::= \"{}\"", "a".repeat(300_000));
    let table = [
        ("", "`root` is not defined"),
        ("a ::= \"x\"", "`root` is not defined"),
        ("root ::= a", "line 1, column 10: this rule is not defined"),
        ("root ::= \"x\"\n  root ::= \"y\"", "line 2, column 3: rule `root` is defined twice"),
        ("root ::= \"abc", "line 1, column 10: unterminated literal"),
        ("root ::= \"abc\n\"", "line 1, column 10: unterminated literal"),
        ("root ::= [abc", "line 1, column 10: unterminated class"),
        (
            "root ::= (\"a\"\n",
            "line 2, column 1: expected ')' for the group opened at line 1, column 10",
        ),
        ("root ::= (\"a\" b ::= \"c\")", "expected ')'"),
        ("root ::= \"a\")", "column 13: expected a rule name, found ')'"),
        ("root = \"a\"", "column 6: expected '::='"),
        ("root ::= \"a\"{3,2}", "column 13: repetition {3,2} is backwards"),
        ("root ::= \"a\"{x}", "column 14: expected a count, found 'x'"),
        ("root ::= \"a\"{1", "expected '}'"),
        ("root ::= \"a\"{999999999}", "column 14: a repetition of 999999999"),
        ("root ::= \"a\"**", "column 14: expected a rule, literal, class or group, found '*'"),
        ("root ::= [z-a]", "column 11: the range z-a is backwards"),
        ("root ::= []", "column 10: a class without characters"),
        ("root ::= \"\\q\"", "column 11: unsupported escape \\q"),
        ("root ::= \"\\x4\"", "expected 2 hexadecimal digits"),
        ("root ::= \"\\ud800\"", "column 11: U+d800 is no character"),
        ("root ::= \"\\U00110000\"", "U+00110000 is no character"),
        ("root ::= root \"a\" | \"b\"", "line 1, column 1: rule `root`: left recursion"),
        ("root ::= a\na ::= b \"x\"\nb ::= a | \"y\"", "left recursion"),
        ("root ::= e root \"a\" | \"b\"\ne ::= \"x\"?", "rule `root`: left recursion"),
        ("root ::= (\"x\"* root)? \"b\"", "rule `root`: left recursion"),
        ("root ::= \"a\" root", "rule `root`: no text matches it"),
        ("root ::= ((\"a\"{1000}){1000}){1000}", "expands to more than"),
        (deep.as_str(), "more than 64 nested groups"),
        (large.as_str(), "300011 bytes, at most 262144"),
    ];
    for (text, want) in table {
        let error = Grammar::from_gbnf(text).err().unwrap_or_else(|| panic!("accepts {text}"));
        assert!(error.to_string().contains(want), "{text}\n found: {error}\n want: {want}");
    }
}

#[test]
fn nested_text_is_followed_to_the_depth_limit_and_no_further() {
    let mut nested = gbnf("root ::= \"(\" root \")\" | \"x\"");
    for depth in 0..256 {
        assert!(nested.accept(b"(").unwrap(), "at depth {depth}");
    }
    assert!(!nested.accept(b"(").unwrap(), "beyond the limit");
    assert!(nested.accept(b"x").unwrap());
    assert_eq!(nested.forced(1000, |_| Vec::new()).unwrap(), vec![b')'; 256]);
    // Recursion at the end of a rule is a loop, and has no depth.
    let mut list = gbnf("root ::= \"a\" rest\nrest ::= \",a\" rest | \"\"");
    list.accept(b"a").unwrap();
    assert!((0..10_000).all(|_| list.accept(b",a").unwrap()) && list.is_complete());
}

/// Two ways at each of 200 characters are 2^200 stacks; they must cost no more than 200.
#[test]
fn ambiguity_does_not_multiply() {
    let mut pairs = gbnf("root ::= \"a\" root \"b\" | \"a\" root \"b\" \"\" | [a] root [b] | \"\"");
    let mut ends = gbnf("root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"\"");
    for constraint in [&mut pairs, &mut ends] {
        for count in 0..200 {
            assert!(constraint.accept(b"a").unwrap(), "{count}");
        }
        for count in 0..200 {
            assert!(!constraint.is_complete() && constraint.accept(b"b").unwrap(), "{count}");
        }
        assert!(constraint.is_complete() && constraint.allowed().unwrap().count() == 0);
    }
    let mut sums = gbnf("root ::= s\ns ::= \"a\" s s | \"a\"");
    (0..200).for_each(|count| assert!(sums.accept(b"a").unwrap(), "{count}"));
}

/// More states than are kept: those that can be returned to must survive.
#[test]
fn a_long_text_outlives_the_states_that_are_kept() {
    let mut long = gbnf("root ::= \"(\" root \")\" | ([a-z] | [0-9]){100000} \"!\"");
    assert!(long.accept(b"(((").unwrap());
    for count in 0..999 {
        assert!(long.accept("abcdefghi0".repeat(10).as_bytes()).unwrap(), "{count}");
    }
    assert!(long.accept(&[b'x'; 99]).unwrap());
    for _ in 0..2 {
        assert!(long.allowed().unwrap().contains(u32::from(b'x')));
        assert!(long.accept(b"y").unwrap());
        assert_eq!(long.forced(9, |_| Vec::new()).unwrap(), b"!)))");
        assert!(!long.accept(b"y").unwrap());
        long.rollback(1);
    }
    long.rollback(200);
    assert!(long.accept(&[b'z'; 99]).unwrap() && !long.accept(b"!").unwrap());
}

#[test]
fn a_grammar_too_ambiguous_to_follow_is_refused_in_time() {
    let alternatives = ["\"a\""; 60_000].join("|");
    let mut constraint = gbnf(&format!("root ::= a{{1000}}\na ::= {alternatives}"));
    assert!(constraint.accept(b"aa").unwrap());
    let error = constraint.accept(&[b'a'; 100]).unwrap_err().to_string();
    assert!(error.contains("too ambiguous here"), "{error}");
    assert!(constraint.accept(b"a").unwrap(), "the error changed the state");
}

/// The mask of the tree walk must be what accepting each token by itself says.
#[test]
fn a_mask_holds_exactly_the_tokens_that_are_accepted() {
    let grammars = [
        gbnf("root ::= \"é\"* [^a]{3} (\"漢字\" | .)*"),
        gbnf("root ::= [a-z]{0,4} \"\\\"\" [^\"]{1,3} \"\\\"\""),
        constraint(Grammar::json_object()),
        schema(r#"{"properties":{"name":{"maxLength":3},"b":{"type":"number"}}}"#),
        schema(r#"{"additionalProperties":{"items":{"pattern":"^[^a]+é?$"}},"properties":{}}"#),
    ];
    let tokens = tokens();
    let mut random = Random::new(7);
    for (number, mut constraint) in grammars.into_iter().enumerate() {
        for step in 0..60 {
            let allowed = constraint.allowed().unwrap().clone();
            for (id, bytes) in tokens.iter().enumerate() {
                let is_accepted = constraint.accept(bytes).unwrap();
                constraint.rollback(usize::from(is_accepted));
                let has = allowed.contains(id as u32);
                assert_eq!(has, is_accepted, "grammar {number}, step {step}, token {bytes:?}");
            }
            let members: Vec<_> =
                (0..tokens.len()).filter(|id| allowed.contains(*id as u32)).collect();
            assert_eq!(members.len(), allowed.count());
            let Some(count) = (!members.is_empty()).then_some(members.len()) else { break };
            assert!(constraint.accept(&tokens[members[random.below(count)]]).unwrap());
        }
    }
}

#[test]
fn rollback_restores_the_state_and_forced_bytes_end_at_a_choice() {
    let mut constraint =
        schema(r#"{"properties":{"name":{"enum":["x1","x2"]}},"required":["name"]}"#);
    assert!(constraint.accept(b"{\"").unwrap());
    assert_eq!(constraint.forced(100, |_| Vec::new()).unwrap(), b"name\":");
    assert_eq!(constraint.forced(2, |_| Vec::new()).unwrap(), b"na");
    let before = constraint.allowed().unwrap().clone();
    assert!(constraint.accept(b"name").unwrap());
    assert!(constraint.accept(b"\":\"x").unwrap());
    assert!(!constraint.accept(b"3").unwrap(), "not in the enumeration");
    let mut clone = constraint.clone();
    constraint.rollback(2);
    assert_eq!(*constraint.allowed().unwrap(), before);
    assert!(clone.accept(b"2\"}").unwrap() && clone.is_complete() && !constraint.is_complete());
    assert_eq!(clone.forced(9, |_| Vec::new()).unwrap(), b"");
}

/// How the scripts below write markers; their tokens are beyond the vocabulary.
const MARKERS: &str = "⟦⟧⟨⟩‹›";
const FIRST_MARKER: u32 = 900;

fn calls(tools: &[(&str, &str)], repeats: bool) -> Grammar {
    let tool = |(name, parameters): &(&str, &str)| Tool {
        name: name.to_string(),
        parameters: parse(parameters),
    };
    let tools: Vec<Tool> = tools.iter().map(tool).collect();
    let pair = |at| [FIRST_MARKER + at, FIRST_MARKER + at + 1];
    let form = CallForm { call: pair(0), key: pair(2), value: pair(4) };
    Grammar::from_calls(&tools, &form, repeats).unwrap()
}

/// Whether a script matches; a marker is allowed exactly where it is accepted.
fn follows(grammar: Grammar, script: &str) -> bool {
    let mut constraint = constraint(grammar);
    let is_read = |char: char| {
        let Some(at) = MARKERS.chars().position(|marker| marker == char) else {
            return constraint.accept(char.to_string().as_bytes()).unwrap();
        };
        let token = FIRST_MARKER + at as u32;
        let is_allowed = constraint.allowed().unwrap().contains(token);
        assert_eq!(constraint.accept_marker(token).unwrap(), is_allowed, "{script}: {char}");
        is_allowed
    };
    script.chars().all(is_read) && constraint.is_complete()
}

#[test]
fn calls_have_their_markers_and_arguments_of_the_declared_kind() {
    let sail = r##"{"type":"object","properties":{"to":{"$ref":"#/$defs/port"},
        "knots":{"type":["integer","null"],"maximum":9},
        "tags":{"type":"array","items":{"enum":["a"]}},
        "note":{"type":["string","null"],"minLength":2},"any":{}},
        "required":["to","more"],"additionalProperties":{"type":"boolean"},
        "$defs":{"port":{"enum":["007","old \"B\"",7]}}}"##;
    let tools = [("sail", sail), ("now", "null")];
    let (to, more) = ("⟨to⟩‹007›", "⟨more⟩‹true›");
    for (script, is_right) in [
        ("⟦now⟧".to_string(), true),
        ("⟦now⟧⟦now⟧".into(), true),
        (format!("⟦sail{to}{more}⟧"), true),
        (format!("⟦sail⟨to⟩‹old \"B\"›{more}⟧"), true),
        (format!("⟦sail{to}⟨knots⟩‹null›⟨tags⟩‹[\"a\"]›⟨note⟩‹no⟦?›⟨any⟩‹›{more}⟧"), false),
        (format!("⟦sail{to}⟨knots⟩‹-7›⟨tags⟩‹[\"a\"]›⟨note⟩‹\"n›⟨any⟩‹a\n›{more}⟧"), true),
        (format!("⟦sail{to}⟨note⟩‹null›{more}⟧"), true),
        // Neither an order nor a kind that the schema does not have.
        (format!("⟦sail{more}{to}⟧"), false),
        (format!("⟦sail⟨to⟩‹7›{more}⟧"), false),
        (format!("⟦sail⟨to⟩‹\"007\"›{more}⟧"), false),
        (format!("⟦sail{to}⟨knots⟩‹10›{more}⟧"), false),
        (format!("⟦sail{to}⟨knots⟩‹ten›{more}⟧"), false),
        (format!("⟦sail{to}⟨tags⟩‹a›{more}⟧"), false),
        (format!("⟦sail{to}⟨note⟩‹n›{more}⟧"), false),
        (format!("⟦sail{to}⟨more⟩‹yes›⟧"), false),
        (format!("⟦sail{to}⟧"), false),
        ("⟦now".into(), false),
        ("now".into(), false),
        ("⟦now⟧.".into(), false),
        (" ⟦now⟧".into(), false),
        ("⟦⟧".into(), false),
        ("".into(), false),
    ] {
        assert_eq!(follows(calls(&tools, true), &script), is_right, "{script}");
    }
    assert!(!follows(calls(&tools, false), "⟦now⟧⟦now⟧"));
    // What is written comes back as what it was.
    let sail = parse(sail);
    for (name, text, value) in [
        ("to", "007", "\"007\""),
        ("to", "7", "\"7\""),
        ("knots", " 7\n", "7"),
        ("tags", "[\"a\"]", "[\"a\"]"),
        ("note", "null", "null"),
        ("note", "42", "\"42\""),
        ("more", "true", "true"),
        ("any", "[1]", "[1]"),
        ("any", "[1", "\"[1\""),
    ] {
        assert_eq!(read_argument(&sail, name, text.into()), parse(value), "{name} {text}");
    }
}

#[test]
fn either_of_two_grammars_is_followed_and_a_marker_is_forced_as_text_is() {
    let either =
        || Grammar::from_gbnf("root ::= \"a\" [0-9]+").unwrap().or(calls(&[("f", "null")], false));
    for (script, is_right) in
        [("a12", true), ("⟦f⟧", true), ("a", false), ("a⟦f⟧", false), ("⟦f⟧1", false), ("f", false)]
    {
        assert_eq!(follows(either(), script), is_right, "{script}");
    }
    let spell =
        |token| MARKERS.chars().nth((token - FIRST_MARKER) as usize).unwrap().to_string().into();
    let mut constraint = constraint(either());
    assert_eq!(constraint.forced(99, spell).unwrap(), b"");
    assert!(constraint.accept_marker(FIRST_MARKER).unwrap());
    assert_eq!(constraint.forced(99, spell).unwrap(), "f⟧".as_bytes());
    constraint.rollback(1);
    assert!(constraint.accept(b"a").unwrap());
}

/// tests/fixtures/grammar/schemas.json was written by hand: texts that each schema's grammar
/// matches, and texts that it does not.
#[test]
fn schemas_match_valid_json_and_nothing_else() {
    let table = read_json(&fixture("grammar").join("schemas.json"));
    for row in table.as_array().unwrap() {
        let schema = row.get("schema").unwrap();
        let text = json::to_compact(schema);
        let grammar = Grammar::from_schema(schema).unwrap_or_else(|e| panic!("{text}: {e}"));
        let list = |key: &str| row.get(key).unwrap().as_array().unwrap().iter();
        let [good, bad] =
            ["good", "bad"].map(|key| list(key).map(|t| t.as_str().unwrap()).collect());
        let (good, bad): (Vec<&str>, Vec<&str>) = (good, bad);
        // The table itself: what shall match is JSON.
        good.iter().for_each(|text| drop(parse(text)));
        check(&text, constraint(grammar), &good, &bad);
    }
    check(
        "any object",
        constraint(Grammar::json_object()),
        &["{}", "{\"a\": {\"b\":[1, {}]}}", "{\n    \"a\":1,\n    \"b\":2\n}"],
        &["[]", "1", "{\"a\"}", "{\"a\":1,}", "{\n\n}x", "{\"a\":\n1}"],
    );
}

#[test]
fn schemas_beyond_the_subset_are_refused_with_their_pointer() {
    let table = [
        ("1", "#: expected a schema, found an integer"),
        (r#"{"not":{}}"#, "#/not: unsupported keyword"),
        (r#"{"if":{}}"#, "#/if: unsupported keyword"),
        (r#"{"uniqueItems":true}"#, "#/uniqueItems: unsupported keyword"),
        (r#"{"properties":{"a/b":{"multipleOf":2}}}"#, "#/properties/a~1b/multipleOf: unsupported"),
        (r#"{"patternProperties":{}}"#, "#/patternProperties: unsupported keyword"),
        (r#"{"nullable":true}"#, "#/nullable: unsupported keyword"),
        (r#"{"items":[{}]}"#, "#/items: expected a schema, found an array"),
        (r#"{"items":{"items":{"$id":"x"}}}"#, "#/items/items/$id: supported at the root only"),
        (r#"{"type":"text"}"#, "#/type: unknown type `text`"),
        (r#"{"type":[1]}"#, "#/type: expected names of types"),
        (r#"{"type":[]}"#, "#: no text matches it"),
        (r#"{"minLength":3,"maxLength":2}"#, "#/minLength: 3 is above `maxLength`, 2"),
        (r#"{"minLength":-1}"#, "#/minLength: expected a count, found an integer"),
        (r#"{"maxItems":99999999}"#, "#/maxItems: 99999999, at most 131072"),
        (r#"{"pattern":"a","minLength":1}"#, "#/minLength: unsupported beside `pattern`"),
        (r#"{"format":"date","maxLength":1}"#, "#/maxLength: unsupported beside `format`"),
        (r#"{"format":"date","pattern":"a"}"#, "#/format: unsupported beside `pattern`"),
        (r#"{"format":"email"}"#, "#/format: `email` is unsupported"),
        (r#"{"pattern":"a(?=b)"}"#, "#/pattern: line 1, column 2: only plain groups"),
        (r#"{"pattern":"(a)\\1"}"#, "column 4: unsupported escape \\1"),
        (r#"{"pattern":"\\bword"}"#, "column 1: unsupported escape \\b"),
        (r#"{"pattern":"\\p{L}"}"#, "unsupported escape \\p"),
        (r#"{"pattern":"a^b"}"#, "column 2: '^' is supported at the start"),
        (
            r#"{"pattern":"(a$)"}"#,
            "expected ')' for the group opened at line 1, column 1, found '$'",
        ),
        (r#"{"pattern":"a$b"}"#, "column 3: expected the end of the pattern"),
        (r#"{"pattern":"[z-a]"}"#, "the range z-a is backwards"),
        (r#"{"pattern":"a**"}"#, "expected a character, found '*'"),
        (r#"{"type":"number","minimum":0.5}"#, "#/minimum: 0.5 is unsupported"),
        (r#"{"type":"number","maximum":1e9}"#, "#/maximum: 1000000000 is unsupported"),
        (r#"{"type":"integer","exclusiveMaximum":true}"#, "#/exclusiveMaximum: expected a number"),
        (r#"{"type":"integer","minimum":2,"maximum":1}"#, "#: no text matches it"),
        (r#"{"enum":[]}"#, "#/enum: expected an array with elements"),
        (r#"{"type":"string","enum":[1]}"#, "#: no text matches it"),
        (r#"{"enum":["a"],"maxLength":1}"#, "#/maxLength: unsupported beside `enum`"),
        (r#"{"anyOf":[{}],"type":"object"}"#, "#/type: unsupported beside `anyOf`"),
        (r#"{"anyOf":[{}],"oneOf":[{}]}"#, "#/oneOf: unsupported beside `anyOf`"),
        (r#"{"allOf":[{},{}]}"#, "#/allOf: only one schema is supported"),
        (r#"{"oneOf":[{"type":"integer"},{"type":"number"}]}"#, "#/oneOf: alternatives 0 and 1"),
        (r#"{"oneOf":[{"const":1},{"const":1.0}]}"#, "#/oneOf: alternatives 0 and 1"),
        (r#"{"oneOf":[{"type":"object"},{"type":"object"}]}"#, "#/oneOf: alternatives 0 and 1"),
        (r##"{"$ref":"#/$defs/a"}"##, "#/$ref: `#/$defs/a`: there is no `$defs`"),
        (r#"{"$ref":"http://x/y"}"#, "#/$ref: `http://x/y`: only references within the document"),
        (r##"{"$ref":"#"}"##, "#: left recursion"),
        (r##"{"properties":{"a":{"$ref":"#"}},"required":["a"]}"##, "#: no text matches it"),
        (r#"{"additionalProperties":false,"required":["a"]}"#, "#/required: `a` is no property"),
        (r#"{"required":"a"}"#, "#/required: expected an array of strings"),
        (r#"{"properties":[]}"#, "#/properties: expected an object, found an array"),
        (r#"{"minItems":131072,"items":{"minItems":131072}}"#, "expands to more than"),
    ];
    for (text, want) in table {
        let result = Grammar::from_schema(&parse(text));
        let error = result.err().unwrap_or_else(|| panic!("accepts {text}")).to_string();
        assert!(!error.starts_with("schema: "), "the caller has named it: {error}");
        assert!(error.contains(want), "{text}\n found: {error}\n want: {want}");
    }
}

/// A random text of tokens that the masks allow: ends sooner or later, because what closes is
/// preferred. `None` if it does not.
fn walk(constraint: &mut Constraint, tokens: &[Vec<u8>], random: &mut Random) -> Option<Vec<u8>> {
    const STEPS_MAX: usize = 3000;
    let mut text = Vec::new();
    for step in 0..STEPS_MAX {
        if constraint.is_complete() && (random.below(3) == 0 || step > STEPS_MAX / 4) {
            return Some(text);
        }
        let allowed = constraint.allowed().unwrap();
        let mut choices: Vec<usize> =
            (0..tokens.len()).filter(|id| allowed.contains(*id as u32)).collect();
        if choices.is_empty() {
            return constraint.is_complete().then_some(text);
        }
        if random.below(4) == 0 || step > STEPS_MAX / 8 {
            let is_closing = |id: &usize| matches!(tokens[*id][..], [b'"' | b']' | b'}']);
            let closing: Vec<usize> = choices.iter().copied().filter(is_closing).collect();
            choices = if closing.is_empty() { choices } else { closing };
        }
        let token = &tokens[choices[random.below(choices.len())]];
        assert!(constraint.accept(token).unwrap(), "allowed, but not accepted: {token:?}");
        text.extend_from_slice(token);
    }
    None
}

/// Checks that the text is one JSON value. (No reader of trees: keys may occur twice.)
fn assert_json(text: &[u8]) {
    let mut reader = Reader::new(text, Limits { max_depth: 512, ..Limits::default() }).unwrap();
    reader.skip().and_then(|()| reader.finish()).unwrap_or_else(|e| {
        panic!("{e}: {}", String::from_utf8_lossy(text));
    });
}

#[test]
fn random_walks_end_in_valid_values() {
    type Predicate = fn(&Value) -> bool;
    fn int(value: &Value, key: &str) -> i64 {
        value.get(key).and_then(Value::as_i64).unwrap_or(i64::MIN)
    }
    let cases: &[(&str, Predicate)] = &[
        (
            r#"{"type":"object","properties":{"name":{"type":"string","minLength":1,"maxLength":4},
                "age":{"type":"integer","minimum":0,"maximum":130}},"required":["name","age"]}"#,
            |value| {
                let name = value.get("name").and_then(Value::as_str).unwrap();
                value.as_object().unwrap().len() == 2
                    && (1..=4).contains(&name.chars().count())
                    && (0..=130).contains(&int(value, "age"))
            },
        ),
        (
            r#"{"type":"array","minItems":2,"maxItems":4,"items":{"enum":["red","green",3]}}"#,
            |value| {
                let list = value.as_array().unwrap();
                let known =
                    [Value::String("red".into()), Value::String("green".into()), Value::Int(3)];
                (2..=4).contains(&list.len()) && list.iter().all(|item| known.contains(item))
            },
        ),
        (
            r##"{"$ref":"#/$defs/tree","$defs":{"tree":{"type":"object",
                "additionalProperties":false,
                "properties":{"n":{"type":"integer"},"sub":{"type":"array",
                "items":{"$ref":"#/$defs/tree"}}},"required":["n"]}}}"##,
            |value| {
                fn is_tree(value: &Value) -> bool {
                    let sub = value.get("sub").map_or(Some(&[][..]), Value::as_array);
                    value.get("n").and_then(Value::as_i64).is_some()
                        && sub.is_some_and(|list| list.iter().all(is_tree))
                }
                is_tree(value)
            },
        ),
        (
            r#"{"anyOf":[{"type":"null"},{"type":"number","exclusiveMinimum":-1,"maximum":2},
                {"type":"string","pattern":"^[ab]{2,3}(é|漢)?$"}]}"#,
            |value| match value {
                Value::Null => true,
                Value::String(text) => {
                    let rest = text.trim_start_matches(['a', 'b']);
                    (2..=3).contains(&(text.len() - rest.len())) && ["", "é", "漢"].contains(&rest)
                }
                _ => value.as_f64().is_some_and(|number| number > -1.0 && number <= 2.0),
            },
        ),
    ];
    let seed = new_seed();
    println!("COLI_FUZZ_SEED={seed}");
    let (mut random, tokens) = (Random::new(seed), tokens());
    for (text, is_valid) in cases {
        let start = schema(text);
        for _ in 0..200 {
            let made = walk(&mut start.clone(), &tokens, &mut random).expect("the walk ends");
            let made = String::from_utf8(made).expect("UTF-8");
            assert!(is_valid(&parse(&made)), "seed {seed}: {text} gave {made}");
        }
    }
    let start = constraint(Grammar::json_object());
    for _ in 0..200 {
        let made = walk(&mut start.clone(), &tokens, &mut random).expect("the walk ends");
        assert!(made.starts_with(b"{"), "seed {seed}");
        assert_json(&made);
    }
}

/// Pieces of which random grammars are made.
const GBNF_PIECES: &[&str] = &[
    "root",
    " ::= ",
    "a",
    "b",
    "\"",
    "\"x\"",
    "\\",
    "\\n",
    "\\x4",
    "\\u00e9",
    "[",
    "]",
    "[a-z]",
    "[^",
    "-",
    "(",
    ")",
    "|",
    "?",
    "*",
    "+",
    "{",
    "}",
    "{2,3}",
    "{0,}",
    "{1000}",
    ",",
    "\n",
    "#",
    ".",
    " ",
    "é",
    "root ::= a b\n",
    "a ::= \"y\"?\n",
    "b ::= [0-9]* a\n",
    "\u{0}",
    "9",
];

/// Accepts the grammar or refuses it with a message, then asks for some masks.
fn try_grammar(grammar: colibri::error::Result<Grammar>, vocabulary: &Arc<Vocabulary>) {
    let grammar = match grammar {
        Ok(grammar) => Arc::new(grammar),
        Err(error) => return assert!(error.to_string().len() > 10),
    };
    let mut constraint = Constraint::new(grammar, vocabulary.clone()).unwrap();
    let tokens = tokens();
    for step in 0..20 {
        let allowed = constraint.allowed().unwrap();
        let is_allowed = |id: &usize| allowed.contains((*id % tokens.len()) as u32);
        let Some(id) = (step * 7..step * 7 + tokens.len()).find(is_allowed) else {
            return assert!(constraint.is_complete(), "neither ends nor goes on");
        };
        assert!(constraint.accept(&tokens[id % tokens.len()]).unwrap());
        constraint.forced(10, |_| Vec::new()).unwrap();
    }
}

#[test]
fn random_gbnf_gives_a_grammar_or_an_error() {
    let vocabulary = vocabulary();
    let make = |random: &mut Random| {
        let mut text = Vec::new();
        if random.below(2) == 0 {
            text.extend_from_slice(b"root ::= a b\na ::= \"y\"?\nb ::= [0-9]* a\n");
        }
        for _ in 0..random.below(40) {
            text.extend_from_slice(random.pick(GBNF_PIECES).as_bytes());
        }
        String::from_utf8(text).unwrap().into_bytes()
    };
    fuzz("gbnf", 20_000, make, |text| {
        try_grammar(Grammar::from_gbnf(std::str::from_utf8(text).unwrap()), &vocabulary);
    });
}

/// Random JSON whose keys are keywords of schemas.
fn random_schema(random: &mut Random, depth: usize, out: &mut String) {
    const WORDS: &[&str] = &[
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
        "title",
        "#",
        "#/$defs/a",
        "#/properties/a",
        "a",
        "string",
        "integer",
        "number",
        "object",
        "array",
        "null",
        "date",
        "^[a-c]+$",
        "a|b{2}",
        "uuid",
        "(x",
    ];
    match random.below(if depth == 0 { 4 } else { 9 }) {
        0 => out.push_str(random.pick(&["true", "false", "null", "0", "2", "-1", "1.5", "1e300"])),
        1..4 => json::write_str_compact(out, random.pick(WORDS)),
        4 => {
            out.push('[');
            for at in 0..random.below(4) {
                out.push_str(if at > 0 { "," } else { "" });
                random_schema(random, depth - 1, out);
            }
            out.push(']');
        }
        _ => {
            let mut keys: Vec<&str> = (0..random.below(5)).map(|_| random.pick(WORDS)).collect();
            keys.sort_unstable();
            keys.dedup();
            out.push('{');
            for (at, key) in keys.iter().enumerate() {
                out.push_str(if at > 0 { "," } else { "" });
                json::write_str_compact(out, key);
                out.push(':');
                random_schema(random, depth - 1, out);
            }
            out.push('}');
        }
    }
}

#[test]
fn random_schemas_give_a_grammar_or_an_error() {
    let vocabulary = vocabulary();
    let make = |random: &mut Random| {
        let mut text = String::new();
        random_schema(random, 5, &mut text);
        text.into_bytes()
    };
    fuzz("schema", 20_000, make, |text| {
        let schema = json::parse(text, Limits::default()).unwrap();
        try_grammar(Grammar::from_schema(&schema), &vocabulary);
    });
}

/// For oracle/grammar.py: COLI_GRAMMAR_CASES names a file with a case a line,
/// `{"schema":…|"gbnf":…, "seed":N, "walks":N, "probes":[text…]}`; what the walks made, or the
/// error, and which probes match are written to the file COLI_GRAMMAR_OUT names.
#[test]
fn cases_of_the_oracle_are_answered() {
    let Some(cases) = std::env::var_os("COLI_GRAMMAR_CASES") else { return };
    let out = std::env::var_os("COLI_GRAMMAR_OUT").expect("COLI_GRAMMAR_OUT");
    let mut out = std::io::BufWriter::new(std::fs::File::create(out).unwrap());
    let (vocabulary, tokens) = (vocabulary(), tokens());
    for case in std::fs::read_to_string(cases).unwrap().lines() {
        let case = parse(case);
        let grammar = match case.get("gbnf").and_then(Value::as_str) {
            Some(text) => Grammar::from_gbnf(text),
            None => Grammar::from_schema(case.get("schema").unwrap()),
        };
        let answer = match grammar {
            Err(error) => vec![("error".into(), Value::String(error.to_string()))],
            Ok(grammar) => {
                let start = Constraint::new(Arc::new(grammar), vocabulary.clone()).unwrap();
                let mut random = Random::new(case.get("seed").unwrap().as_u64().unwrap());
                let texts = (0..case.get("walks").unwrap().as_i64().unwrap()).map(|_| {
                    let text = walk(&mut start.clone(), &tokens, &mut random);
                    text.map_or(Value::Null, |text| Value::String(String::from_utf8(text).unwrap()))
                });
                let texts = texts.collect();
                let probes = case.get("probes").unwrap().as_array().unwrap().iter();
                let probes = probes.map(|probe| {
                    let mut constraint = start.clone();
                    let text = probe.as_str().unwrap().as_bytes();
                    let is_accepted = text.is_empty() || constraint.accept(text).unwrap();
                    Value::Bool(is_accepted && constraint.is_complete())
                });
                vec![
                    ("texts".into(), Value::Array(texts)),
                    ("probes".into(), Value::Array(probes.collect())),
                ]
            }
        };
        writeln!(out, "{}", json::to_compact(&Value::Object(answer))).unwrap();
    }
}
