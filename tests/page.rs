//! The page of `coli serve`: what its policy allows is what it has, and what it is told of the
//! experts is what the model did.

#![forbid(unsafe_code)]

mod common;

use colibri::json::Value;
use colibri::model::Observer;
use colibri::server::Settings;
use common::serve::{Answer, Running, at, demo, int_at, options, post, settings};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::channel;

/// SHA-256 by FIPS 180-4, its constants from their definition: the first bits of the fractional
/// parts of the square and cube roots of the first primes.
fn sha256(message: &[u8]) -> [u8; 32] {
    let primes = (2u128..).filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0));
    let primes: Vec<u128> = primes.take(64).collect();
    // The largest r with r^power <= n·2^(32·power): 32 bits behind the point.
    let root = |n: u128, power: u32| {
        let mut root = 0u128;
        for bit in (0..36).rev().map(|bit| 1 << bit) {
            if (root + bit).pow(power) <= n << (32 * power) {
                root += bit;
            }
        }
        root as u32
    };
    let constants: Vec<u32> = primes.iter().map(|prime| root(*prime, 3)).collect();
    let mut state: Vec<u32> = primes[..8].iter().map(|prime| root(*prime, 2)).collect();
    let mut padded = [message, &[0x80]].concat();
    padded
        .resize(padded.len().next_multiple_of(64) + if padded.len() % 64 > 56 { 64 } else { 0 }, 0);
    let end = padded.len() - 8;
    padded[end..].copy_from_slice(&(8 * message.len() as u64).to_be_bytes());
    for block in padded.chunks(64) {
        let words = block.chunks(4).map(|word| u32::from_be_bytes(word.try_into().unwrap()));
        let mut w: Vec<u32> = words.collect();
        for t in 16..64 {
            let (a, b) = (w[t - 15], w[t - 2]);
            let small = a.rotate_right(7) ^ a.rotate_right(18) ^ (a >> 3);
            let large = b.rotate_right(17) ^ b.rotate_right(19) ^ (b >> 10);
            w.push(w[t - 16].wrapping_add(small).wrapping_add(w[t - 7]).wrapping_add(large));
        }
        let mut v = state.clone();
        for t in 0..64 {
            let [a, b, c, e, f, g] = [v[0], v[1], v[2], v[4], v[5], v[6]];
            let large = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
            let terms = [large, (e & f) ^ (!e & g), constants[t], w[t]];
            let first = terms.iter().fold(v[7], |sum, term| sum.wrapping_add(*term));
            let large = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
            let second = large.wrapping_add((a & b) ^ (a & c) ^ (b & c));
            v.rotate_right(1);
            v[4] = v[4].wrapping_add(first);
            v[0] = first.wrapping_add(second);
        }
        state.iter_mut().zip(v).for_each(|(sum, v)| *sum = sum.wrapping_add(v));
    }
    let bytes: Vec<u8> = state.into_iter().flat_map(u32::to_be_bytes).collect();
    bytes.try_into().unwrap()
}

fn base64(bytes: &[u8]) -> String {
    let letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let encode = |three: &[u8]| {
        let bits = (0..3).fold(0, |bits, i| bits << 8 | u32::from(*three.get(i).unwrap_or(&0)));
        let letter = |i: usize| match i <= three.len() {
            true => char::from(letters[(bits >> (18 - 6 * i)) as usize & 63]),
            false => '=',
        };
        (0..4).map(letter).collect::<String>()
    };
    bytes.chunks(3).map(encode).collect()
}

/// The value of a header, which is there once.
fn header<'a>(answer: &'a Answer, name: &str) -> &'a str {
    let lines = answer.head.lines().filter_map(|line| line.split_once(": "));
    let found: Vec<&str> = lines.filter(|(key, _)| *key == name).map(|(_, value)| value).collect();
    assert_eq!(found.len(), 1, "{name}: {}", answer.head);
    found[0]
}

/// What is between the tags of the one element `tag`.
fn inside<'a>(page: &'a str, tag: &str) -> &'a str {
    let parts: Vec<&str> = page.split(&format!("<{tag}>")).collect();
    assert_eq!(parts.len(), 2, "{tag}");
    parts[1].split(&format!("</{tag}>")).next().unwrap()
}

#[test]
fn the_page_may_run_what_it_has_and_nothing_else() {
    let abc = sha256(b"abc").map(|byte| format!("{byte:02x}")).concat();
    assert_eq!(abc, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    let server = Running::demo();
    let answer = server.get("/");
    assert_eq!((answer.status, header(&answer, "Content-Type")), (200, "text/html; charset=utf-8"));
    let policy = header(&answer, "Content-Security-Policy");
    let page = &answer.body;
    let mut want = BTreeSet::from(
        [
            "default-src 'none'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
        .map(String::from),
    );
    for tag in ["style", "script"] {
        want.insert(format!(
            "{tag}-src 'sha256-{}'",
            base64(&sha256(inside(page, tag).as_bytes()))
        ));
    }
    assert_eq!(policy.split("; ").map(String::from).collect::<BTreeSet<_>>(), want);
    assert_eq!(header(&answer, "X-Content-Type-Options"), "nosniff");
    let head = server.talk("HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    assert_eq!(header(&head, "Content-Length"), page.len().to_string());
    let post = server.post("/", "{}");
    assert_eq!((post.status, header(&post, "Allow")), (405, "GET, HEAD"));
}

#[test]
fn the_page_asks_nobody_else_and_makes_no_markup_of_text() {
    let page = Running::demo().get("/").body;
    // The name of a vocabulary, which nobody follows.
    let page = page.replace("http%3A//www.w3.org/2000/svg", "").to_lowercase();
    for word in [
        "http:",
        "https:",
        "%3a//",
        "src=",
        "url(",
        "@import",
        "<base",
        "<iframe",
        "style=\"",
        "innerhtml",
        "outerhtml",
        "insertadjacenthtml",
        "document.write",
        "eval(",
        "localstorage",
        "cookie",
    ] {
        assert!(!page.contains(word), "{word}");
    }
    let links = page.split("href=\"").skip(1);
    links.for_each(|link| assert!(link.starts_with(['#']) || link.starts_with("data:"), "{link}"));
}

#[test]
fn the_page_needs_no_key_and_no_model_but_the_experts_need_both() {
    let (sender, loaded) = channel();
    let load = move || {
        loaded.recv().unwrap();
        Ok(Arc::new(common::open(&demo(), options())))
    };
    let server = Running::loading(Settings { api_key: Some("k".into()), ..settings() }, load);
    let get = |path: &str, headers: &str| {
        let head = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{headers}\r\n");
        server.talk(&head)
    };
    let key = "Authorization: Bearer k\r\n";
    assert_eq!(get("/", "").status, 200);
    assert_eq!(get("/experts", key).error().0, 503);
    sender.send(()).unwrap();
    while get("/health", "").status == 503 {}
    assert_eq!(get("/", "").status, 200);
    assert_eq!(get("/experts", "").error(), (401, "invalid_api_key".into(), "null".into()));
    assert_eq!(get("/experts", key).status, 200);
    assert!(get("/health", "").ok().get("progress").is_none());
    assert!(get("/health", key).ok().get("progress").is_some());
    assert_eq!(server.talk(&post("/experts", "{}", key)).status, 405);
}

/// Which experts each layer chose, by the positions of its last pass and by all of them.
#[derive(Default)]
struct Choices {
    last: Vec<BTreeSet<usize>>,
    ever: Vec<BTreeSet<usize>>,
    at: usize,
}

impl Observer for Choices {
    fn hidden(&mut self, layer: usize, position: usize, _hidden: &[f32]) {
        if layer == 0 && position > self.at {
            self.at = position;
            self.last.iter_mut().for_each(BTreeSet::clear);
        }
    }

    fn routed(&mut self, layer: usize, _position: usize, route: &[(u32, f32)]) {
        for choices in [&mut self.last, &mut self.ever] {
            choices.resize(choices.len().max(layer + 1), BTreeSet::new());
            choices[layer].extend(route.iter().map(|(e, _)| *e as usize));
        }
    }
}

#[test]
fn the_map_of_the_experts_is_what_the_router_chose_and_the_disk_gave() {
    let options = colibri::engine::Options { drafts: Some(0), chunk_rows: 1, ..options() };
    let engine = Arc::new(common::open(&demo(), options));
    let shared = Arc::clone(&engine);
    let server = Running::loading(settings(), move || Ok(shared));
    while server.get("/health").status == 503 {}
    let layers = || {
        let answer = server.get("/experts").ok();
        let text = |layer: &Value| layer.as_str().unwrap().to_string();
        at(&answer, "layers").as_array().unwrap().iter().map(text).collect::<Vec<String>>()
    };
    // As its configuration has them: one dense layer, five of 16 experts.
    let empty = "0".repeat(16);
    assert_eq!(layers(), ["", &empty, &empty, &empty, &empty, &empty]);
    let mut choices = Choices::default();
    let tokens: Vec<u32> = (100..112).collect();
    engine.session().unwrap().advance(&tokens, &mut choices).unwrap();
    let layers = layers();
    let of = |layer: &str, bit: u8| {
        let digits = layer.bytes().enumerate().filter(|(_, digit)| (digit - b'0') & bit != 0);
        digits.map(|(e, _)| e).collect::<BTreeSet<usize>>()
    };
    let held: usize = layers.iter().map(|layer| of(layer, 1).len()).sum();
    for (layer, digits) in layers.iter().enumerate().skip(1) {
        assert_eq!(of(digits, 2), choices.last[layer], "layer {layer}");
        assert!(of(digits, 1).is_superset(&choices.ever[layer]), "layer {layer}");
        assert_eq!(choices.last[layer].len(), 4);
    }
    // There is room for all, so each was read once; the counters are those of the store.
    let counters = engine.expert_counters();
    assert_eq!(counters.bytes_read % held as u64, 0);
    let health = server.get("/health").ok();
    assert_eq!(int_at(&health, "progress.expert_hits"), counters.hits as i64);
    assert_eq!(int_at(&health, "progress.expert_misses"), counters.misses as i64);
    assert_eq!(counters.hits + counters.misses, 12 * 5 * 4);
    assert_eq!(int_at(&health, "progress.tokens"), 0);
    server.chat("");
    let health = server.get("/health").ok();
    assert_eq!(int_at(&health, "progress.tokens"), 16);
}
