//! Same bits everywhere: the logits of every fixture have one golden hash, whatever the instruction
//! set, threads, rows of a prefill chunk and expert slots, and also when decoded token by token.

mod common;

use colibri::cpu::Isa;
use colibri::engine::Options;
use colibri::model::Unobserved;
use colibri::plan::Limit;
use common::{all_logits, fixture, integers, open, read_json};

/// FNV-1a64 of the little-endian logits `[T, V]` of `full_ids`, per fixture: what the canonical
/// arithmetic gives. To change one is to change the output of every model: a deliberate act, with
/// its reason in the commit. `cargo test --test bits` prints the hashes that differ as lines of
/// this table; `coli logits --ref ref.json` prints the same hash.
const GOLDEN: [(&str, u64); 23] = [
    ("a_seed", 0xf30d_b670_c793_d530),
    ("b_dsa_full", 0x1b80_2c80_e844_7c83),
    ("c_shared", 0x9de8_7750_d538_21b9),
    ("d_groups_norm", 0xdfb0_1dc9_331f_6285),
    ("e_odd_untied", 0xf178_d0a7_dd4d_7f72),
    ("g_bf16_sharded", 0x4abd_cb72_5248_924c),
    ("h_mtp", 0x43d0_2912_7dd8_a21c),
    ("i_tied_bias", 0xa94c_6ab0_c57a_ee1f),
    ("j_legacy", 0x8329_4e53_8892_7ad7),
    ("k_long", 0x4219_5ae3_2db6_7ddb),
    ("l_f16", 0x1b4f_e7f4_efa3_46cc),
    ("formats/fp8-block", 0x7500_b9e9_ed26_4172),
    ("formats/hf-bf16", 0x580c_7cd6_c20e_fc9b),
    ("formats/hf-fp8", 0x78c3_d909_602f_32c2),
    ("formats/hf-nvfp4", 0x8471_416b_ede2_5d75),
    ("formats/int2-row", 0xa30e_fdca_3e34_5cf7),
    ("formats/int3-g64", 0x90cb_63e1_bfb1_d1ce),
    ("formats/int4-g16", 0xd6f3_a3be_bcaf_5ebc),
    ("formats/int4-g32", 0x865a_48b4_8781_c473),
    ("formats/int4-g64", 0x05a2_56b4_4d1b_e608),
    ("formats/int4-row", 0x0ed6_c832_c59e_475b),
    ("formats/int8-row", 0x9b3f_7b49_efc3_0f66),
    ("formats/mixed", 0x2d5a_dec1_8cc3_74c8),
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
                for slots in [1, 1000] {
                    let limit = Limit::SlotsPerLayer(slots);
                    let ctx_tokens = tokens.len();
                    let options = Options { ctx_tokens, chunk_rows, limit, threads, isa };
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
    let options = Options { ctx_tokens, chunk_rows: 16, limit, threads: 2, isa };
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
