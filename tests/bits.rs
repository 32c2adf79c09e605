//! Same bits everywhere: the logits of every fixture have one golden hash, whatever the instruction
//! set, threads, rows of a prefill chunk, expert slots and page cache, whatever was learned, pinned
//! and mirrored, and also when decoded token by token.

mod common;

use colibri::cpu::Isa;
use colibri::disk::{Direct, open_direct};
use colibri::engine::{Engine, Options};
use colibri::model::Unobserved;
use colibri::plan::Limit;
use colibri::safetensors::Directory;
use colibri::weights::Weights;
use common::{FNV_OFFSET, GOLDEN, TempDir, all_logits, fixture, fnv1a64, full_ids, open};

/// The instruction sets of this processor.
fn available() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.missing_feature().is_none()).collect()
}

/// What the longer fixtures leave to the short ones and, for 2 threads, to decoding: a row at a
/// time on several threads, where nearly all of the time goes into waking them.
fn is_skipped(tokens: usize, threads: usize, chunk_rows: usize) -> bool {
    tokens > 24 && chunk_rows == 1 && threads > 1
}

/// Reads around the page cache, where the file system of the fixtures has them.
fn reads_around_cache() -> Direct {
    let file = fixture("a_seed").join("model.safetensors");
    if open_direct(&file).is_ok() { Direct::On } else { Direct::Off }
}

/// Every way to compute a fixture, and the hash that each of them gives.
fn hashes(name: &str) -> Vec<(String, u64)> {
    let tokens = full_ids(name);
    let mut hashes = Vec::new();
    for isa in available() {
        for threads in [1, 2, 3] {
            for chunk_rows in [1, 7, 64, tokens.len()] {
                if is_skipped(tokens.len(), threads, chunk_rows) {
                    println!("{name}: skips chunks of 1 on {isa} with {threads} threads");
                    continue;
                }
                for (slots, direct) in [(1, reads_around_cache()), (1000, Direct::Off)] {
                    let limit = Limit::SlotsPerLayer(slots);
                    let ctx_tokens = tokens.len();
                    let options = Options {
                        ctx_tokens,
                        chunk_rows,
                        limit,
                        threads,
                        direct,
                        isa,
                        ..Options::default()
                    };
                    let engine = open(&fixture(name), options);
                    let logits = all_logits(&engine, &tokens, &mut Unobserved);
                    let hash = fnv1a64(FNV_OFFSET, &logits);
                    let how = format!("{isa}, {threads} threads, chunks of {chunk_rows}");
                    hashes.push((format!("{how}, {slots} slots"), hash));
                }
            }
        }
    }
    hashes.extend(learned_hashes(name, &tokens));
    hashes
}

/// Reads from a mirror into one slot a layer, with drafts where there is a head; then with what
/// that run learned, as many pins by it as there may be, and others every few tokens.
fn learned_hashes(name: &str, tokens: &[u32]) -> [(String, u64); 2] {
    let dir = TempDir::new(&format!("bits-{}", name.replace('/', "-")));
    let usage = dir.0.join("usage");
    let mirrored = Options {
        mirrors: vec![fixture(name)],
        ctx_tokens: tokens.len(),
        chunk_rows: 5,
        limit: Limit::SlotsPerLayer(1),
        threads: 2,
        direct: reads_around_cache(),
        drafts: Some(3),
        ..Options::default()
    };
    let hash = |engine: &Engine| fnv1a64(FNV_OFFSET, &all_logits(engine, tokens, &mut Unobserved));
    let first = open(&fixture(name), mirrored.clone());
    let first_hash = hash(&first);
    first.save_usage(&usage).unwrap();
    let limit = Limit::SlotsPerLayer(5);
    let mut pinned = Options { limit, repin_tokens: 7, direct: Direct::Off, ..mirrored };
    let weights = Weights::bind(&Directory::open(&fixture(name)).unwrap(), first.config()).unwrap();
    let plan = pinned.plan(first.config(), &weights, None).unwrap();
    let expert_bytes = plan.largest_expert_bytes;
    pinned.pin_bytes = plan.expert_bytes - first.config().top_k * expert_bytes;
    let fits = pinned.pin_bytes >= expert_bytes;
    let second = open(&fixture(name), pinned);
    second.load_usage(&usage).unwrap();
    assert!(!fits || second.expert_counters().bytes_read > 0, "{name}: nothing was pinned");
    [("mirrored".into(), first_hash), ("learned and pinned".into(), hash(&second))]
}

/// The hash of the logits behind each token when the timeline grows by one at a time.
fn decoded_hash(name: &str, isa: Isa) -> u64 {
    let tokens = full_ids(name);
    let (ctx_tokens, limit) = (tokens.len(), Limit::SlotsPerLayer(2));
    let (chunk_rows, threads, direct) = (16, 2, Direct::Off);
    let options =
        Options { ctx_tokens, chunk_rows, limit, threads, isa, direct, ..Options::default() };
    let engine = open(&fixture(name), options);
    let mut session = engine.session().unwrap();
    (1..=tokens.len()).fold(FNV_OFFSET, |hash, end| {
        fnv1a64(hash, session.advance(&tokens[..end], &mut Unobserved).unwrap())
    })
}

/// Fails with every hash that is not the golden one.
fn check(fixtures: impl Fn(&str) -> bool, hashes: impl Fn(&str) -> Vec<(String, u64)>) {
    let mut findings = String::new();
    for (name, golden) in GOLDEN.into_iter().filter(|(name, _)| fixtures(name)) {
        let start = std::time::Instant::now();
        let hashes = hashes(name);
        println!("{name}: {} ways in {:.1} s", hashes.len(), start.elapsed().as_secs_f64());
        for (how, hash) in hashes.into_iter().filter(|(_, hash)| *hash != golden) {
            findings += &format!("(\"{name}\", 0x{hash:016x}), // {how}\n");
        }
    }
    assert!(findings.is_empty(), "logits that are not the golden ones:\n{findings}");
}

#[test]
fn float_models_have_one_hash_however_they_are_computed() {
    check(|name| !name.contains('/') && name != "k_long", hashes);
}

#[test]
fn quantized_models_have_one_hash_however_they_are_computed() {
    check(|name| name.contains('/'), hashes);
}

/// 600 tokens through a selection of 32.
#[test]
fn a_long_sequence_has_one_hash_however_it_is_computed() {
    check(|name| name == "k_long", hashes);
}

#[test]
fn decoding_token_by_token_gives_the_bits_of_a_prefill() {
    let hashes = |name: &str| {
        let hash = |isa: Isa| (format!("{isa}, decoded"), decoded_hash(name, isa));
        available().into_iter().map(hash).collect()
    };
    check(|_| true, hashes);
}

#[test]
fn every_fixture_with_a_reference_has_a_golden_hash() {
    let with_reference = |dir: &str| {
        let entries = std::fs::read_dir(fixture(dir)).unwrap();
        entries.filter(|e| e.as_ref().unwrap().path().join("ref.json").exists()).count()
    };
    assert_eq!(with_reference("") + with_reference("formats"), GOLDEN.len());
    assert_eq!(fnv1a64(FNV_OFFSET, &[]), FNV_OFFSET);
    // The published vector of the four bytes "abcd".
    assert_eq!(fnv1a64(FNV_OFFSET, &[f32::from_le_bytes(*b"abcd")]), 0xfc17_9f83_ee07_24dd);
}
