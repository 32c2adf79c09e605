//! Fuzz-style tests of the parsers of untrusted bytes: JSON, safetensors headers, config.json.
//!
//! Every run draws a new seed and prints it; `COLI_FUZZ_SEED=<number>` repeats a run. A case that
//! panics or takes too long fails with its seed, number and input. Accepted input is held to what
//! the parser promises about it, so a check that wrongly lets something through fails too.

#![forbid(unsafe_code)]

mod common;

use colibri::config::{Config, IndexerKind};
use colibri::json::{self, Limits, Reader, Value};
use colibri::safetensors::Directory;
use common::{Random, fuzz};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;

/// Tokens that JSON parsers stumble over.
const TOKENS: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "\\u",
    "\\ud800",
    "\\udc00",
    "\\u0000",
    "null",
    "true",
    "false",
    "0",
    "-",
    "-0",
    "1e",
    "1e400",
    "-1e-400",
    ".5",
    "01",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "4294967296",
    "1.0",
    "[[[[[[[[",
    "{\"a\":",
    "\"\":",
    " ",
    "\n",
    "\t",
    "\u{0}",
    "\u{7f}",
    "\u{feff}",
    "é",
    "😀",
    "{}",
    "[]",
    "\"a\":1,\"a\":1",
];

/// One to eight edits of a valid text: bit flips, cuts, copies, tokens and numbers replaced.
fn mutate(random: &mut Random, valid: &[u8]) -> Vec<u8> {
    let mut text = valid.to_vec();
    for _ in 0..1 + random.below(8) {
        let at = random.below(text.len() + 1);
        let length = random.below(12).min(text.len() - at);
        match random.below(6) {
            0 if at < text.len() => text[at] ^= 1 << random.below(8),
            1 if at < text.len() => text[at] = random.next() as u8,
            2 => drop(text.drain(at..at + length)),
            3 => {
                let copy = text[at..at + length].to_vec();
                let to = random.below(text.len() + 1);
                text.splice(to..to, copy);
            }
            4 => replace_number(random, &mut text, at),
            _ => {
                let token = random.pick(TOKENS);
                text.splice(at..at, token.bytes());
            }
        }
    }
    if random.below(8) == 0 {
        text.truncate(random.below(text.len() + 1));
    }
    text
}

/// Replaces the first run of digits after `at` with a token.
fn replace_number(random: &mut Random, text: &mut Vec<u8>, at: usize) {
    let is_digit = |byte: &u8| byte.is_ascii_digit();
    let Some(start) = text[at..].iter().position(is_digit).map(|found| at + found) else { return };
    let end = start + text[start..].iter().take_while(|byte| is_digit(byte)).count();
    let token = random.pick(TOKENS);
    text.splice(start..end, token.bytes());
}

fn random_bytes(random: &mut Random, length_max: usize) -> Vec<u8> {
    let ascii = random.below(2) == 0;
    let byte = |random: &mut Random| random.next() as u8 & if ascii { 0x7F } else { 0xFF };
    (0..random.below(length_max)).map(|_| byte(random)).collect()
}

/// A random value that the writers can write and the reader must read back.
fn random_value(random: &mut Random, depth: usize) -> Value {
    match random.below(if depth == 0 { 6 } else { 8 }) {
        0 => Value::Null,
        1 => Value::Bool(random.below(2) == 0),
        2 => Value::Int(random.next() as i64 >> random.below(64)),
        3 => Value::BigInt(format!("-{}", u64::MAX - random.next() % 1000)),
        4 => match f64::from_bits(random.next()) {
            float if float.is_finite() => Value::Float(float),
            _ => Value::Float(0.5),
        },
        5 => Value::String(random_text(random)),
        6 => Value::Array((0..random.below(6)).map(|_| random_value(random, depth - 1)).collect()),
        _ => {
            // The dash keeps the keys distinct: 1 with text "0" is not 10.
            let member = |random: &mut Random, index| {
                (format!("{index}-{}", random_text(random)), random_value(random, depth - 1))
            };
            Value::Object((0..random.below(20)).map(|index| member(random, index)).collect())
        }
    }
}

fn random_text(random: &mut Random) -> String {
    let char = |random: &mut Random| {
        let bits = [7, 8, 16, 21][random.below(4)];
        char::from_u32(random.next() as u32 % (1 << bits)).unwrap_or('\u{fffd}')
    };
    (0..random.below(10)).map(|_| char(random)).collect()
}

const LIMITS: Limits = Limits { max_bytes: 16 << 20, max_depth: 40, max_values: 1 << 20 };

/// What holds for any bytes: acceptance agrees with `skip`, and what is accepted survives both
/// writers.
fn check_json(text: &[u8]) {
    let skipped = Reader::new(text, LIMITS).and_then(|mut reader| {
        reader.skip()?;
        reader.finish()
    });
    match json::parse(text, LIMITS) {
        Ok(value) => {
            skipped.unwrap();
            for written in [json::to_compact(&value), json::to_python(&value)] {
                assert_eq!(json::parse(written.as_bytes(), LIMITS).unwrap(), value);
            }
        }
        // `skip` does not look for repeated keys; anything else it must refuse the same way.
        Err(error) if error.to_string().contains("occurs twice") => {}
        Err(error) => assert_eq!(skipped.unwrap_err(), error),
    }
}

#[test]
fn json_survives_mutations_and_random_bytes() {
    let valid = br#" {"a": [1, -2.5e-3, true, null, "x\n\u00e9\ud83d\ude00"], "b": {"": [[], {}]},
        "big": 123456789012345678901234567890, "c": "plain"} "#;
    check_json(valid);
    fuzz("json mutations", 20_000, |random| mutate(random, valid), check_json);
    fuzz("json bytes", 10_000, |random| random_bytes(random, 60), check_json);
    let tokens = |random: &mut Random| {
        let tokens: Vec<&str> = (0..random.below(30)).map(|_| random.pick(TOKENS)).collect();
        tokens.concat().into_bytes()
    };
    fuzz("json tokens", 20_000, tokens, check_json);
}

#[test]
fn json_reads_back_what_it_wrote_and_no_prefix_of_it() {
    let make = |random: &mut Random| {
        json::to_python(&Value::Array(vec![random_value(random, 5)])).into_bytes()
    };
    fuzz("json values", 3_000, make, |text| {
        check_json(text);
        json::parse(text, LIMITS).unwrap();
        for length in (0..text.len()).step_by(1 + text.len() / 20) {
            json::parse(&text[..length], LIMITS).unwrap_err();
        }
    });
}

/// A two-tensor file with metadata and a stamp.
fn valid_shard() -> Vec<u8> {
    let header = br#"{"__metadata__":{"format":"pt","colibri.fmt":"{\"b.weight\":\"int8-row\"}"},
        "a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},
        "b.weight":{"dtype":"U8","shape":[12],"data_offsets":[16,28]},
        "b.weight.qs":{"dtype":"F32","shape":[1],"data_offsets":[28,32]}}  "#;
    with_length_word(header, 32)
}

fn with_length_word(header: &[u8], data_bytes: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.resize(file.len() + data_bytes, 7);
    file
}

/// A directory with one shard, rewritten per case and removed at the end.
struct ShardDir {
    path: PathBuf,
    shard: File,
}

impl ShardDir {
    fn new(name: &str) -> ShardDir {
        let path = std::env::temp_dir().join(format!("colibri-fuzz-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let shard = File::create(path.join("model.safetensors")).unwrap();
        ShardDir { path, shard }
    }

    /// Opens `file` as the only shard; what opened must tile the file exactly.
    fn open(&self, file: &[u8]) -> colibri::error::Result<()> {
        // Overwritten in place: truncating to nothing first makes some file systems flush.
        (&self.shard).seek(SeekFrom::Start(0)).unwrap();
        (&self.shard).write_all(file).unwrap();
        self.shard.set_len(file.len() as u64).unwrap();
        let directory = Directory::open(&self.path)?;
        let header_bytes = u64::from_le_bytes(file[..8].try_into().unwrap());
        let mut covered = 8 + header_bytes;
        for (name, tensor) in directory.iter() {
            assert_eq!(tensor.offset, covered, "{name}");
            let bits = tensor.shape.iter().map(|&dim| dim as u64).product::<u64>();
            assert_eq!(tensor.bytes * 8, bits * tensor.dtype.size_bits(), "{name}");
            assert_eq!(directory.get(name), Some(tensor));
            covered += tensor.bytes;
        }
        assert_eq!(covered, file.len() as u64);
        Ok(())
    }
}

impl Drop for ShardDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[test]
fn safetensors_survives_mutations_and_random_bytes() {
    let valid = valid_shard();
    let dir = ShardDir::new("mutations");
    dir.open(&valid).unwrap();
    let check = |file: &[u8]| drop(dir.open(file));
    fuzz("safetensors file", 4_000, |random| mutate(random, &valid), check);
    // With a right length word, mutations reach the JSON and the offset checks behind it.
    let header = &valid[8..valid.len() - 32];
    let make = |random: &mut Random| with_length_word(&mutate(random, header), 32);
    fuzz("safetensors header", 8_000, make, check);
    fuzz("safetensors bytes", 2_000, |random| random_bytes(random, 80), check);
}

#[test]
fn safetensors_of_any_other_length_are_refused() {
    let valid = valid_shard();
    let dir = ShardDir::new("lengths");
    for length in 0..valid.len() {
        assert!(dir.open(&valid[..length]).is_err(), "accepted a cut at {length}");
    }
    let mut longer = valid;
    longer.push(0);
    assert!(dir.open(&longer).is_err(), "accepted a trailing byte");
}

/// What a config that was accepted promises to the layers above it.
fn check_config(text: &[u8]) {
    let Ok(value) = json::parse(text, LIMITS) else { return };
    let Ok(config) = Config::from_json(&value) else { return };
    assert_eq!(value.get("model_type").and_then(Value::as_str), Some("glm_moe_dsa"));
    assert_eq!((config.indexer.len(), config.mlp.len()), (config.num_layers, config.num_layers));
    assert!(config.indexer.first() == Some(&IndexerKind::Full));
    let group_experts = config.n_routed_experts / config.n_group;
    assert!(config.top_k >= 1 && config.top_k <= config.topk_group * group_experts);
    assert_eq!(group_experts * config.n_group, config.n_routed_experts);
    assert!(config.topk_group <= config.n_group);
    assert!(config.qk_rope_head_dim % 2 == 0 && config.qk_rope_head_dim <= config.index_head_dim);
    assert!(config.rms_norm_eps > 0.0 && config.rope_theta >= 1.0);
    assert!(config.routed_scaling_factor.is_finite());
    let widest = config.hidden_size.max(config.intermediate_size).max(config.vocab_size);
    assert!(config.num_heads * config.qk_head_dim() < 1 << 32 && widest < 1 << 32);
}

#[test]
fn config_survives_mutations() {
    let valid = br#"{"model_type":"glm_moe_dsa","vocab_size":96,"hidden_size":64,"n_group":4,
        "intermediate_size":80,"moe_intermediate_size":16,"num_hidden_layers":5,"topk_group":2,
        "num_attention_heads":4,"num_key_value_heads":4,"n_routed_experts":16,"q_lora_rank":48,
        "n_shared_experts":2,"num_experts_per_tok":4,"kv_lora_rank":32,"qk_nope_head_dim":12,
        "qk_rope_head_dim":8,"v_head_dim":16,"index_topk":8,"index_head_dim":16,"head_dim":8,
        "index_n_heads":12,"norm_topk_prob":true,"routed_scaling_factor":2.5,"eos_token_id":[1,2],
        "rms_norm_eps":1e-06,"rope_parameters":{"rope_theta":10000.0,"rope_type":"default"},
        "mlp_layer_types":["dense","dense","sparse","sparse","sparse"],
        "indexer_types":["full","shared","full","shared","full"],"index_topk_pattern":"FSSFS",
        "quantization_config":{"quant_method":"fp8","weight_block_size":[128,128]}}"#;
    let value = json::parse(valid, LIMITS).unwrap();
    Config::from_json(&value).unwrap();
    fuzz("config", 20_000, |random| mutate(random, valid), check_config);
    // Valid JSON with members dropped or replaced reaches the field checks every time.
    let make = |random: &mut Random| {
        let Value::Object(mut members) = value.clone() else { unreachable!() };
        for _ in 0..1 + random.below(3) {
            let index = random.below(members.len());
            match random.below(3) {
                0 => drop(members.swap_remove(index)),
                1 => members[index].1 = Value::Int(random.next() as i64 >> random.below(64)),
                _ => members[index].1 = random_value(random, 2),
            }
        }
        json::to_compact(&Value::Object(members)).into_bytes()
    };
    fuzz("config fields", 20_000, make, check_config);
}
