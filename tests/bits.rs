//! Same bits everywhere: the logits of every fixture have one golden hash, whatever the instruction
//! set, threads, rows of a prefill chunk, expert slots and page cache, and also when decoded token
//! by token.

mod common;

use colibri::cpu::Isa;
use colibri::disk::{Direct, open_direct};
use colibri::engine::Options;
use colibri::model::Unobserved;
use colibri::plan::Limit;
use common::{all_logits, fixture, integers, open, read_json};

/// FNV-1a64 of the little-endian logits `[T, V]` of `full_ids`, per fixture: what the canonical
/// arithmetic gives. To change one is to change the output of every model: a deliberate act, with
/// its reason in the commit. `cargo test --test bits` prints the hashes that differ as lines of
/// this table; `coli logits --ref ref.json` prints the same hash.
const GOLDEN: [(&str, u64); 23] = [
    ("a_seed", 0x32ef_e728_e7d4_bd0b),
    ("b_dsa_full", 0x437f_3b4a_1a4b_bb30),
    ("c_shared", 0x4ab4_554d_ac62_400b),
    ("d_groups_norm", 0xbb86_5b00_99ce_5b77),
    ("e_odd_untied", 0x39b5_e413_e96e_210c),
    ("g_bf16_sharded", 0x1ff9_17eb_ad06_5e13),
    ("h_mtp", 0xbec3_d436_1e94_321f),
    ("i_tied_bias", 0x832c_d017_8ddd_61d8),
    ("j_legacy", 0x5ef1_29aa_2934_a89e),
    ("k_long", 0xb5f3_f292_faec_bf3d),
    ("l_f16", 0x26a6_deb0_5b3e_87c9),
    ("formats/fp8-block", 0x9f51_6e46_d7fa_1c0a),
    ("formats/hf-bf16", 0x4f8b_a07a_a4ea_3958),
    ("formats/hf-fp8", 0xcf5a_35b8_c96a_79b4),
    ("formats/hf-nvfp4", 0x9599_399d_00da_3345),
    ("formats/int2-row", 0x65ed_c736_bae8_e4d1),
    ("formats/int3-g64", 0xf5ca_e3af_f514_b4a5),
    ("formats/int4-g16", 0x5741_fce4_c853_6a74),
    ("formats/int4-g32", 0x19b7_6b19_260e_7448),
    ("formats/int4-g64", 0x7614_962c_b15a_c388),
    ("formats/int4-row", 0x72b2_4711_1ef7_598e),
    ("formats/int8-row", 0x4243_8fd0_37ee_4f14),
    ("formats/mixed", 0x8f15_b905_0e43_40cc),
];

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// Continues a hash; starts at [`FNV_OFFSET`].
fn fnv1a64(hash: u64, floats: &[f32]) -> u64 {
    let bytes = floats.iter().flat_map(|float| float.to_le_bytes());
    bytes.fold(hash, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3))
}

/// The instruction sets of this processor.
fn available() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.missing_feature().is_none()).collect()
}

fn full_ids(name: &str) -> Vec<u32> {
    integers(read_json(&fixture(name).join("ref.json")).get("full_ids").unwrap())
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
                    let options = Options { ctx_tokens, chunk_rows, limit, threads, direct, isa };
                    let engine = open(&fixture(name), options);
                    let logits = all_logits(&engine, &tokens, &mut Unobserved);
                    let hash = fnv1a64(FNV_OFFSET, &logits);
                    let how = format!("{isa}, {threads} threads, chunks of {chunk_rows}");
                    hashes.push((format!("{how}, {slots} slots"), hash));
                }
            }
        }
    }
    hashes
}

/// The hash of the logits behind each token when the timeline grows by one at a time.
fn decoded_hash(name: &str, isa: Isa) -> u64 {
    let tokens = full_ids(name);
    let (ctx_tokens, limit) = (tokens.len(), Limit::SlotsPerLayer(2));
    let direct = Direct::Off;
    let options = Options { ctx_tokens, chunk_rows: 16, limit, threads: 2, isa, direct };
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
