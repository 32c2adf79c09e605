//! The tokenizer against the `tokenizers` library, and against what has gone wrong elsewhere.
//!
//! Goldens are made by `oracle/tokenizer.py` from that library for a small tokenizer in GLM's
//! layout (tests/fixtures/tokenizer). The tests named after a failure give one that users of other
//! engines reported.

use colibri::json::{self, Limits, Value, to_compact};
use colibri::tokenizer::{Decoder, Special, Tokenizer};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer").join(name)
}

fn read_json(name: &str) -> Value {
    json::parse(&std::fs::read(fixture(name)).unwrap(), Limits::default()).unwrap()
}

/// The small tokenizer: 2,264 tokens and GLM-5.2's 36 added ones.
fn small() -> Tokenizer {
    Tokenizer::load(&fixture("tokenizer.json")).unwrap()
}

fn rows<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value.get(key).and_then(Value::as_str).unwrap()
}

/// A tokenizer.json in GLM's layout: single bytes have the ids 0 to 255, then come `tokens`.
/// `merges` and `added` are JSON.
fn toy(tokens: &[&str], merges: &str, added: &str, ignore_merges: bool) -> String {
    let mut document = read_json("tokenizer.json");
    let bytes = rows_of_bytes(&document);
    let names = bytes.iter().map(String::as_str).chain(tokens.iter().copied());
    let vocab = names.enumerate().map(|(id, token)| (token.to_string(), Value::Int(id as i64)));
    let parse = |text: &str| json::parse(text.as_bytes(), Limits::default()).unwrap();
    let vocab = Value::Object(vocab.collect());
    set(&mut document, "added_tokens", parse(added));
    let model = member(&mut document, "model");
    set(model, "vocab", vocab);
    set(model, "merges", parse(merges));
    set(model, "ignore_merges", Value::Bool(ignore_merges));
    to_compact(&document)
}

/// How the small tokenizer spells each byte: bytes are decoded, so nothing is assumed about it.
fn rows_of_bytes(document: &Value) -> Vec<String> {
    let tokenizer = small();
    let vocab = document.get("model").and_then(|model| model.get("vocab")).unwrap();
    let mut names = vec![String::new(); 256];
    for (name, id) in vocab.as_object().unwrap() {
        if let Some(&[byte]) = tokenizer.token_bytes(id.as_u64().unwrap() as u32) {
            names[usize::from(byte)] = name.clone();
        }
    }
    names
}

fn member<'a>(value: &'a mut Value, key: &str) -> &'a mut Value {
    let Value::Object(members) = value else { panic!("no object") };
    &mut members.iter_mut().find(|(name, _)| name == key).unwrap().1
}

fn set(value: &mut Value, key: &str, new: Value) {
    *member(value, key) = new;
}

fn from_text(document: &str) -> Tokenizer {
    Tokenizer::from_bytes(document.as_bytes()).unwrap()
}

fn refusal(document: &str) -> String {
    match Tokenizer::from_bytes(document.as_bytes()) {
        Ok(_) => panic!("accepted: {:.300}", document),
        Err(error) => error.to_string(),
    }
}

#[test]
fn ids_equal_those_of_the_library() {
    let (tokenizer, goldens) = (small(), read_json("encode.json"));
    let goldens = goldens.as_array().unwrap();
    assert!(goldens.len() > 500);
    for golden in goldens {
        let text = text(golden, "text");
        for (special, key) in [(Special::Parse, "on"), (Special::Text, "off")] {
            let expected = ids(golden.get(key).unwrap());
            assert_eq!(tokenizer.encode(text, special), expected, "{special:?} {text:?}");
            if special == Special::Text {
                assert_eq!(tokenizer.decode(&expected, true).unwrap(), text);
            }
        }
    }
}

#[test]
fn decoded_text_equals_that_of_the_library() {
    let (tokenizer, goldens) = (small(), read_json("decode.json"));
    for golden in goldens.as_array().unwrap() {
        let ids = ids(golden.get("ids").unwrap());
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text(golden, "all"), "{ids:?}");
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text(golden, "skipped"), "{ids:?}");
    }
}

/// Merge order against id order, whole words, added tokens that overlap: as the library does.
#[test]
fn toy_vocabularies_equal_those_of_the_library() {
    let toys = read_json("toys.json");
    for toy_golden in toys.as_array().unwrap() {
        let tokens: Vec<&str> =
            rows(toy_golden, "tokens").iter().map(|token| token.as_str().unwrap()).collect();
        let part = |key: &str| to_compact(toy_golden.get(key).unwrap());
        let ignore_merges = toy_golden.get("ignore_merges").and_then(Value::as_bool).unwrap();
        let tokenizer = from_text(&toy(&tokens, &part("merges"), &part("added"), ignore_merges));
        for case in rows(toy_golden, "cases") {
            let text = text(case, "text");
            let label = format!("{} {text:?}", part("tokens"));
            assert_eq!(
                tokenizer.encode(text, Special::Parse),
                ids(case.get("on").unwrap()),
                "{label}"
            );
            assert_eq!(
                tokenizer.encode(text, Special::Text),
                ids(case.get("off").unwrap()),
                "{label}"
            );
        }
        for (at, decoded) in rows(toy_golden, "decoded").iter().enumerate() {
            let id = 256 + at as u32;
            assert_eq!(tokenizer.decode(&[id], false).unwrap(), decoded.as_str().unwrap());
        }
    }
}

/// Report 23: another family's split rule gives garbage from a right model.
#[test]
fn digits_contractions_and_line_ends_are_split_by_glms_rule() {
    let tokenizer = small();
    let split = |text: &str| -> Vec<String> {
        colibri::tokenizer::scanner::pieces(text).map(str::to_string).collect()
    };
    assert_eq!(split("12345"), ["123", "45"]);
    assert_eq!(split("I'LL"), ["I", "'LL"]);
    assert_eq!(split("a.b\n\n"), ["a", ".b", "\n\n"]);
    assert_eq!(split("日本。語"), ["日本", "。語"]);
    assert_eq!(split("a\u{a0}b"), ["a", "\u{a0}b"]);
    // No token spans two pieces, so ids of the whole are those of the pieces.
    let text = "In 1851, 12345 I'LL a.b\n\n日本\u{a0}b";
    let apart: Vec<u32> =
        split(text).iter().flat_map(|piece| tokenizer.encode(piece, Special::Text)).collect();
    assert_eq!(tokenizer.encode(text, Special::Text), apart);
    let other = std::fs::read_to_string(fixture("tokenizer.json")).unwrap();
    let other = other.replace(r"\\p{N}{1,3}", r"\\p{N}");
    assert!(refusal(&other).contains("pre_tokenizer.pretokenizers[0].pattern is not implemented"));
}

/// Report 24: a marker after punctuation was not seen; indented code was split differently.
#[test]
fn markers_are_found_anywhere_and_a_space_run_leaves_its_last_one() {
    let tokenizer = small();
    let user = tokenizer.token_id("<|user|>").unwrap();
    let found = tokenizer.encode("ok.<|user|>", Special::Parse);
    assert_eq!(found.iter().filter(|&&id| id == user).count(), 1);
    assert_eq!(found.last(), Some(&user));
    let code = tokenizer.encode("    return x", Special::Text);
    let parts = ["   ", " return", " x"].map(|piece| tokenizer.encode(piece, Special::Text));
    assert_eq!(code, parts.concat());
}

/// Report 25: a word that is in the vocabulary was split by the merges.
#[test]
fn whole_words_come_before_merges_only_if_the_file_says_so() {
    let document = |ignore_merges| toy(&["ab", "abc"], r#"["a b"]"#, "[]", ignore_merges);
    assert_eq!(from_text(&document(true)).encode("abc", Special::Text), [257]);
    assert_eq!(from_text(&document(false)).encode("abc", Special::Text), [256, 99]);
    let tokenizer = small();
    for word in [" Leviathans", "参考"] {
        assert_eq!(tokenizer.encode(word, Special::Text).len(), 1, "{word}");
    }
}

/// Report 27: one of the two spellings of merges failed to load.
#[test]
fn both_spellings_of_merges_give_the_same_ids() {
    let tokens = ["ab", "abĠ", "\\\\\""];
    let strings = toy(&tokens, r#"["a b", "ab Ġ", "\\\\ \""]"#, "[]", false);
    let pairs = toy(&tokens, r#"[["a", "b"], ["ab", "Ġ"], ["\\\\", "\""]]"#, "[]", false);
    assert!(refusal(&strings).contains(r#"model.merges[2]: "\\\\" is not in the vocabulary"#));
    assert_eq!(refusal(&strings), refusal(&pairs));
    let tokens = ["ab", "aba", "\\\""];
    let strings = toy(&tokens, r##"["#version 0.2", "a b", "ab a", "\\ \""]"##, "[]", false);
    let pairs = toy(&tokens, r#"[["a", "b"], ["ab", "a"], ["\\", "\""]]"#, "[]", false);
    for document in [strings, pairs] {
        let ids = from_text(&document).encode("ababa \\\"", Special::Text);
        assert_eq!(ids, [256, 257, 32, 258]);
    }
}

/// Report 30: text from a user made a role marker.
#[test]
fn text_never_becomes_an_added_token_unless_asked() {
    let tokenizer = small();
    let user = tokenizer.token_id("<|user|>").unwrap();
    assert_eq!(tokenizer.encode("<|user|>", Special::Parse), [user]);
    let markers = "hi<|user|> <think>a/nothinkb</think>[gMASK]<sop><tool_call></arg_value>";
    let ids = tokenizer.encode(markers, Special::default());
    assert!(ids.iter().all(|&id| !tokenizer.is_added(id)), "{ids:?}");
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), markers);
    // Nor one whose content is a word of the vocabulary.
    let added = r#"[{"id":256,"content":"/no","single_word":false,"lstrip":false,"rstrip":false,
        "normalized":false,"special":true}]"#;
    let tokenizer = from_text(&toy(&["/no"], "[]", added, true));
    assert_eq!(tokenizer.encode("/no", Special::Parse), [256]);
    assert_eq!(tokenizer.encode("/no", Special::Text), [47, 110, 111]);
}

/// What a client sees of `portions`: all text that a streaming decoder gives out.
fn stream(portions: &[&[u8]]) -> String {
    let mut decoder = Decoder::new();
    let mut text = String::new();
    for portion in portions {
        text.push_str(decoder.push(portion));
    }
    text + decoder.finish()
}

/// Report 40: an emoji became replacement characters, as each token was decoded on its own.
#[test]
fn an_emoji_in_parts_comes_out_whole() {
    let emoji = "🐋".as_bytes();
    for parts in [&[2, 2][..], &[1, 1, 1, 1], &[3, 1], &[1, 3]] {
        let mut decoder = Decoder::new();
        let mut rest = emoji;
        for (at, &len) in parts.iter().enumerate() {
            let (part, others) = rest.split_at(len);
            rest = others;
            let expected = if at + 1 == parts.len() { "🐋" } else { "" };
            assert_eq!(decoder.push(part), expected, "{parts:?}");
        }
        assert_eq!(decoder.finish(), "");
    }
    let tokenizer = from_text(&toy(&[], "[]", "[]", true));
    let ids = tokenizer.encode("🐋", Special::Text);
    assert_eq!(ids, [0xF0, 0x9F, 0x90, 0x8B]);
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "🐋");
}

/// Report 41: a text that ends inside a character.
#[test]
fn half_a_character_at_the_end_is_one_replacement() {
    let mut decoder = Decoder::new();
    assert_eq!(decoder.push(b"ab\xF0\x9F\x90"), "ab");
    assert_eq!(decoder.finish(), "\u{fffd}");
    assert_eq!(decoder.finish(), "");
    assert_eq!(decoder.push(b"\x8B"), "\u{fffd}");
}

/// Report 42: an invalid byte failed the stream.
#[test]
fn an_invalid_byte_is_replaced_and_the_text_goes_on() {
    assert_eq!(stream(&[b"\xFF", b" a"]), "\u{fffd} a");
    let mut decoder = Decoder::new();
    assert_eq!(decoder.push(b"\xFF"), "\u{fffd}", "nothing that follows can repair it");
    assert_eq!(decoder.push(b"\xE2\x82"), "");
    assert_eq!(decoder.push(b" a"), "\u{fffd} a");
}

struct Random(u64);

impl Random {
    fn below(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 33) % below as u64) as usize
    }
}

#[test]
fn streamed_text_is_that_of_one_lossy_decoding_however_divided() {
    let seed = 0x5EED_0001;
    let mut random = Random(seed);
    let units: [&[u8]; 12] = [
        b"a",
        "é".as_bytes(),
        "€".as_bytes(),
        "🐋".as_bytes(),
        b"\xFF",
        b"\x80",
        b"\xC3",
        b"\xE2\x82",
        b"\xF0\x9F\x90",
        b"\xED\xA0\x80",
        b"\xC0\xAF",
        b"\xF4\x90\x80\x80",
    ];
    for case in 0..20_000 {
        let bytes: Vec<u8> =
            (0..random.below(8)).flat_map(|_| units[random.below(units.len())]).copied().collect();
        let (mut portions, mut rest) = (Vec::new(), bytes.as_slice());
        while !rest.is_empty() {
            let (portion, others) = rest.split_at(random.below(4).min(rest.len()));
            portions.push(portion);
            rest = others;
        }
        let expected = String::from_utf8_lossy(&bytes);
        assert_eq!(stream(&portions), expected, "seed {seed:#x}, case {case}, {portions:x?}");
    }
}

#[test]
fn flags_of_added_tokens_are_read_from_the_file() {
    let tokenizer = small();
    assert_eq!(tokenizer.vocab_size(), 2264 + 36);
    let first = tokenizer.token_id("<|endoftext|>").unwrap();
    assert_eq!(first, 2264);
    for (content, special) in [("<|user|>", true), ("/nothink", true), ("<think>", false)] {
        let id = tokenizer.token_id(content).unwrap();
        assert!(tokenizer.is_added(id));
        assert_eq!(tokenizer.is_special(id), special, "{content}");
        assert_eq!(tokenizer.token_bytes(id), Some(content.as_bytes()));
    }
    assert_eq!(tokenizer.token_id("the"), None);
    assert!(!tokenizer.is_added(first - 1) && !tokenizer.is_special(first + 36));
}

#[test]
fn an_id_out_of_range_is_named_with_the_range() {
    let error = small().decode(&[0, 2300], true).unwrap_err().to_string();
    assert_eq!(error, "token id 2300 is out of range: the tokenizer has 2300 tokens, from 0");
}

/// A megabyte as one piece; quadratic merging or scanning would take minutes.
#[test]
fn a_megabyte_without_a_boundary_takes_no_quadratic_time() {
    let (tokenizer, start) = (small(), Instant::now());
    for unit in ["a", " ", "\n", "-", "漢", "e\u{301}"] {
        let text = unit.repeat(1_000_000 / unit.len());
        let ids = tokenizer.encode(&text, Special::Parse);
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
    }
    let markers = "<|user".repeat(170_000);
    assert_eq!(
        tokenizer.decode(&tokenizer.encode(&markers, Special::Parse), true).unwrap(),
        markers
    );
    // Milliseconds each; the bound leaves room for a slow machine under load.
    assert!(start.elapsed() < Duration::from_secs(60), "took {:?}", start.elapsed());
}

/// What would change ids or text and is not implemented is refused by its name.
#[test]
fn what_is_not_implemented_is_refused_by_name() {
    let document = toy(&["ab"], r#"["a b"]"#, "[]", true);
    let cases = [
        (r#""normalizer":null"#, r#""normalizer":{"type":"NFC"}"#, "normalizer is not implemented"),
        (
            r#""truncation":null"#,
            r#""truncation":{"max_length":4}"#,
            "truncation is not implemented",
        ),
        (r#""type":"BPE""#, r#""type":"WordPiece""#, "found \"WordPiece\""),
        (r#""byte_fallback":false"#, r#""byte_fallback":true"#, "byte_fallback is not implemented"),
        (r#""unk_token":null"#, r#""unk_token":"<unk>""#, "unk_token is not implemented"),
        (r#""dropout":null"#, r#""dropout":0.5"#, "dropout is not implemented"),
        (r#""end_of_word_suffix":null"#, r#""end_of_word_suffix":"</w>""#, "found \"</w>\""),
        (r#""decoder":{"type":"ByteLevel""#, r#""decoder":{"type":"Fuse""#, "found \"Fuse\""),
        (r#""behavior":"Isolated""#, r#""behavior":"Removed""#, "found \"Removed\""),
        (r#""invert":false"#, r#""invert":true"#, "[0].invert is not implemented"),
        (r#""use_regex":false"#, r#""use_regex":true"#, "[1].use_regex is not implemented"),
        (r#""type":"Sequence""#, r#""type":"Metaspace""#, "found \"Metaspace\""),
        (r#""version":"1.0""#, r#""version":"2.0""#, "version is not implemented"),
        (r#""fuse_unk":false"#, r#""new_rule":1"#, "unknown field \"new_rule\""),
        (r#""version":"1.0""#, r#""new_rule":1"#, "unknown field \"new_rule\""),
    ];
    for (old, new, expected) in cases {
        assert!(document.contains(old), "{old}");
        let error = refusal(&document.replacen(old, new, 1));
        assert!(error.contains(expected), "{new}: {error}");
    }
}

#[test]
fn vocabulary_merges_and_added_tokens_must_agree() {
    let toy = |tokens: &[&str], merges: &str, added: &str| toy(tokens, merges, added, true);
    let added = |id: u32, content: &str, flag: &str| {
        let flags = ["single_word", "lstrip", "rstrip", "normalized", "special"]
            .map(|name| format!("\"{name}\":{}", name == flag));
        format!(r#"{{"id":{id},"content":"{content}",{}}}"#, flags.join(","))
    };
    let document = toy(&["ab"], r#"["a b"]"#, "[]");
    let cases = [
        (document.replace("\"ab\":256", "\"ab\":257"), "257 tokens have the ids from 0 up"),
        (
            document.replace("\"ab\":256", "\"ab\":97"),
            "the id 97 is given to both \"a\" and \"ab\"",
        ),
        (document.replace("\"ab\":256", "\"a\":256"), "occurs twice, with the ids 97 and 256"),
        (document.replace("\"ab\":256", "\"ab\":-1"), "expected"),
        (document.replace("\"ab\":256", "\"ab\":256.0"), "expected an integer"),
        (document.replace("\"ab\":256", "\"ab\":\"256\""), "expected a non-negative integer"),
        (
            document.replace("\"ab\":256", "\"ab\":4294967295"),
            "token id 4294967295 is out of range",
        ),
        (document.replace("\"ab\":256", "\"日\":256"), "the character '日' stands for no byte"),
        (document.replace("\"b\":98", "\"ba\":98"), "no token for the single byte 0x62"),
        (toy(&["ab"], r#"["a b", "a b"]"#, "[]"), "[1]: the pair \"a\" \"b\" occurs twice"),
        (toy(&["ab"], r#"["a c"]"#, "[]"), "model.merges[0]: \"ac\" is not in the vocabulary"),
        (toy(&["ab"], r#"["a  b"]"#, "[]"), "expected two tokens with one space"),
        (toy(&["ab"], r#"["a b", ["a", "b"]]"#, "[]"), "both as strings and as pairs"),
        (toy(&["ab"], r#"[["a", "b", "c"]]"#, "[]"), "expected a pair of tokens, found 3"),
        (toy(&[], "[]", &format!("[{}]", added(257, "<c>", ""))), "is 257, by its place it is 256"),
        (
            toy(&[], "[]", &format!("[{}]", added(256, "", ""))),
            "content has 0 bytes, expected 1 to 1024",
        ),
        (toy(&[], "[]", &format!("[{}]", added(256, &"x".repeat(1025), ""))), "has 1025 bytes"),
        (toy(&[], "[]", &format!("[{}]", added(97, "a", ""))), "no token for the single byte 0x61"),
        (
            toy(&[], "[]", &format!("[{}]", added(256, "<c>", "lstrip"))),
            "lstrip is not implemented",
        ),
        (toy(&[], "[]", &format!("[{}]", added(256, "<c>", "rstrip"))), "rstrip is not"),
        (toy(&[], "[]", &format!("[{}]", added(256, "c", "single_word"))), "single_word is not"),
        (
            toy(&[], "[]", &format!("[{},{}]", added(256, "<c>", ""), added(257, "<c>", ""))),
            "added_tokens: \"<c>\" occurs twice",
        ),
        (
            toy(&["ab"], r#"["a b"]"#, &format!("[{}]", added(256, "ab", ""))),
            "model.merges[0]: \"ab\" is not in the vocabulary",
        ),
        (document.replace("\"merges\"", "\"model_type\""), "unknown field \"model_type\""),
        (document.replacen("\"version\"", "\"normalizer\"", 1), "normalizer"),
        (String::new(), "found the end of the text"),
    ];
    for (document, expected) in cases {
        let error = refusal(&document);
        assert!(error.contains(expected), "expected {expected:?}, found {error:?}");
    }
    let error = Tokenizer::load(&fixture("missing.json")).err().unwrap().to_string();
    assert!(error.contains("missing.json: "), "{error}");
}

/// A few bytes of a file changed, cut, repeated or put in.
fn damage_bytes(bytes: &mut Vec<u8>, random: &mut Random) {
    let snippets: [&[u8]; 14] = [
        b"null",
        b"{}",
        b"[]",
        b"\"\"",
        b"-1",
        b"1e9",
        b"4294967296",
        b"\"ab\"",
        b",",
        b"}",
        b"]",
        b"\\u0000",
        b"\xFF",
        b"\"a b\"",
    ];
    let at = random.below(bytes.len());
    match random.below(6) {
        0 => bytes[at] = random.below(256) as u8,
        1 => bytes[at] ^= 1 << random.below(8),
        2 => drop(bytes.splice(at..at, snippets[random.below(14)].iter().copied())),
        3 => drop(bytes.drain(at..(at + random.below(40)).min(bytes.len()))),
        4 => {
            let from = random.below(bytes.len());
            let part = bytes[from..(from + random.below(40)).min(bytes.len())].to_vec();
            drop(bytes.splice(at..at, part));
        }
        _ => bytes.truncate(at.max(1)),
    }
}

/// One value somewhere in the tree replaced, removed or repeated: the result is valid JSON.
fn damage_tree(value: &mut Value, random: &mut Random) {
    let go_on = random.below(8) > 0;
    match value {
        Value::Array(elements) if go_on && !elements.is_empty() => {
            let at = random.below(elements.len());
            match random.below(8) {
                0 => drop(elements.remove(at)),
                1 => elements.push(elements[at].clone()),
                2 => elements.swap(0, at),
                _ => damage_tree(&mut elements[at], random),
            }
        }
        Value::Object(members) if go_on && !members.is_empty() => {
            let at = random.below(members.len());
            match random.below(12) {
                0 => drop(members.remove(at)),
                1 => members.push(members[at].clone()),
                2 => members[at].0.push('Ġ'),
                3 => members.rotate_left(at),
                _ => damage_tree(&mut members[at].1, random),
            }
        }
        Value::Bool(bool) if go_on => *bool = !*bool,
        Value::Int(int) if go_on => *int += random.below(3) as i64 - 1,
        Value::String(string) if go_on => {
            let char = ["a", "b", " ", "Ġ", "日", "\u{0}"][random.below(6)];
            string.insert_str(if random.below(2) == 0 { 0 } else { string.len() }, char);
        }
        _ => {
            let texts =
                ["null", "true", "-1", "256", "4294967296", "1.5", "\"\"", "\"a b\"", "[]", "{}"];
            let text = texts[random.below(texts.len())];
            *value = json::parse(text.as_bytes(), Limits::default()).unwrap();
        }
    }
}

/// Damaged files give a tokenizer or an error, and such a tokenizer still gives text back.
#[test]
fn damaged_files_never_panic() {
    let seed = 0x5EED_0002;
    let mut random = Random(seed);
    let added = r#"[{"id":259,"content":"<c>","single_word":false,"lstrip":false,"rstrip":false,
        "normalized":false,"special":true}]"#;
    let original = toy(&["ab", "aba", "Ġa"], r#"["a b", "ab a", "Ġ a"]"#, added, false);
    let tree = json::parse(original.as_bytes(), Limits::default()).unwrap();
    let mut accepted = 0;
    for case in 0..8000 {
        let mut bytes = original.clone().into_bytes();
        if case % 2 == 0 {
            (0..1 + random.below(3)).for_each(|_| damage_bytes(&mut bytes, &mut random));
        } else {
            let mut tree = tree.clone();
            (0..1 + random.below(2)).for_each(|_| damage_tree(&mut tree, &mut random));
            bytes = to_compact(&tree).into_bytes();
        }
        let outcome = std::panic::catch_unwind(|| {
            let Ok(tokenizer) = Tokenizer::from_bytes(&bytes) else { return false };
            let text = "abab a<c> \u{e9}\n\n12345";
            for special in [Special::Parse, Special::Text] {
                let ids = tokenizer.encode(text, special);
                assert!(tokenizer.decode(&ids, false).is_ok_and(|decoded| decoded == text));
            }
            true
        });
        match outcome {
            Ok(works) => accepted += usize::from(works),
            Err(_) => panic!("seed {seed:#x}, case {case}: {}", String::from_utf8_lossy(&bytes)),
        }
    }
    assert!(accepted > 500, "only {accepted} of the damaged files still load: little is tested");
}
