//! Every weight encoding against values from elsewhere: single rows against a decoder that was
//! written from the layout tables, and whole models, one per encoding, against the float64
//! evaluation of their decoded weights (`oracle/formats.py`, `oracle/reference.py`).

mod common;

use colibri::engine::{Engine, Options};
use colibri::json::Value;
use colibri::kernels::Order;
use colibri::model::Unobserved;
use colibri::plan::Limit;
use colibri::quant::{Encoded, Format};
use colibri::safetensors::Directory;
use colibri::sample::argmax;
use colibri::weights::{Mlp, Weights};
use common::{Trace, all_logits, difference, fixture, integers, open, read_floats, read_json};
use std::collections::BTreeSet;

/// What 16-bit activations may move a logit of these small models, against float64 sums.
const MAX_ABS: f64 = 1e-3;
/// The same where all weights are floats: sums in float32 are all that rounds.
const MAX_ABS_FLOATS: f64 = 1e-4;
/// What the fixtures' generator asks of every router and index cut: no rounding can turn one, so
/// no choice may differ.
const CUT_MIN: f64 = 3e-4;

fn format_named(name: &str) -> Format {
    match name {
        "f32" => Format::F32,
        "bf16" => Format::Bf16,
        "f16" => Format::F16,
        "int8-row" => Format::Int8Row,
        "int4-row" => Format::Int4Row,
        "int2-row" => Format::Int2Row,
        "int3-g64" => Format::Int3Group64,
        "fp8-e4m3-b128" => Format::Fp8Block,
        "nvfp4" => Format::Nvfp4,
        _ => Format::Int4Group(name.strip_prefix("int4-g").unwrap().parse().unwrap()),
    }
}

fn bytes_of_hex(hex: &str) -> Vec<u8> {
    assert!(hex.len().is_multiple_of(2));
    let byte = |i: usize| u8::from_str_radix(&hex[i..i + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(byte).collect()
}

fn bits_of_hex(hex: &str) -> u32 {
    u32::from_str_radix(hex, 16).unwrap()
}

/// All rows, one after another.
fn decode_all(matrix: &Encoded<'_>) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows * matrix.cols];
    for (row, out) in values.chunks_exact_mut(matrix.cols).enumerate() {
        matrix.decode_row(row, out);
    }
    values
}

#[test]
fn every_code_of_every_format_decodes_to_the_same_bits() {
    let goldens = read_json(&fixture("formats/decode.json"));
    let mut seen = BTreeSet::new();
    for golden in goldens.as_array().unwrap() {
        let text = |key: &str| golden.get(key).unwrap().as_str().unwrap();
        let number = |key: &str| golden.get(key).unwrap().as_u64().unwrap() as usize;
        let (format, rows, cols) = (format_named(text("format")), number("rows"), number("cols"));
        let (weights, scales) =
            (bytes_of_hex(text("weights_hex")), bytes_of_hex(text("scales_hex")));
        let case = format!("{format} [{rows}, {cols}]");
        assert_eq!(weights.len(), rows * format.row_bytes(cols), "{case}: weight bytes");
        assert_eq!(scales.len(), format.scale_bytes(rows, cols), "{case}: scale bytes");
        let scalar = f32::from_bits(bits_of_hex(text("scalar")));
        let (weights, scales) = (&weights[..], &scales[..]);
        let got = decode_all(&Encoded { format, rows, cols, weights, scales, scalar });
        let want: Vec<u32> = text("values").split(' ').map(bits_of_hex).collect();
        assert_eq!(got.len(), want.len(), "{case}");
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let want = f32::from_bits(want);
            let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            assert!(same, "{case}: row {}, column {}: {got}, not {want}", i / cols, i % cols);
        }
        seen.insert(format);
    }
    let groups = [16, 32, 48, 64].map(Format::Int4Group);
    let others = ["f32", "bf16", "f16", "int8-row", "int4-row", "int2-row", "int3-g64", "nvfp4"];
    let mut all: BTreeSet<Format> = others.into_iter().map(format_named).chain(groups).collect();
    all.insert(Format::Fp8Block);
    assert_eq!(seen, all, "formats with a golden");
}

/// Worked by hand from the layout tables.
#[test]
fn the_smallest_rows_decode_as_written() {
    let scale = 0.5f32.to_le_bytes();
    let check = |format: Format, cols: usize, weights: &[u8], want: &[f32]| {
        let matrix = Encoded { format, rows: 1, cols, weights, scales: &scale, scalar: 1.0 };
        assert_eq!(decode_all(&matrix), want, "{format}");
    };
    check(Format::Int8Row, 3, &[0x80, 0x7f, 0xff], &[-64.0, 63.5, -0.5]);
    // Even column in the low nibble; the high nibble behind an odd end is padding.
    check(Format::Int4Row, 3, &[0xf0, 0xf9], &[-4.0, 3.5, 0.5]);
    check(Format::Int2Row, 5, &[0b11_10_01_00, 0b01], &[-1.0, -0.5, 0.0, 0.5, -0.5]);
    let mut int3 = [0; 24];
    int3[0] = 0b11_10_01_00;
    int3[16] = 0b1010;
    check(Format::Int3Group64, 4, &int3, &[-2.0, 0.5, -1.0, 1.5]);
    check(Format::Fp8Block, 3, &[0x7e, 0x01, 0xb8], &[224.0, 0.5 / 512.0, -0.5]);
    let nvfp4 = Encoded {
        format: Format::Nvfp4,
        rows: 1,
        cols: 4,
        weights: &[0x72, 0x1f],
        scales: &[0x40],
        scalar: 0.25,
    };
    assert_eq!(decode_all(&nvfp4), [0.5, 3.0, -3.0, 0.25], "block scale 2, scalar 1/4");
}

/// Blocks both ways: row-major, 128 rows by 128 columns, ragged at both ends.
#[test]
fn fp8_scales_are_those_of_the_block() {
    let (rows, cols) = (129, 257);
    let weights = vec![0x38; rows * cols]; // 1.0
    let scales: Vec<u8> = (1..=6).flat_map(|scale| (scale as f32).to_le_bytes()).collect();
    let (weights, scales, format) = (&weights[..], &scales[..], Format::Fp8Block);
    let values = decode_all(&Encoded { format, rows, cols, weights, scales, scalar: 1.0 });
    for (row, col, want) in [
        (0, 0, 1.0),
        (127, 127, 1.0),
        (0, 128, 2.0),
        (127, 255, 2.0),
        (0, 256, 3.0),
        (128, 0, 4.0),
        (128, 127, 4.0),
        (128, 255, 5.0),
        (128, 256, 6.0),
    ] {
        assert_eq!(values[row * cols + col], want, "row {row}, column {col}");
    }
}

/// The formats that the model's matrices were recognised as: residents, then experts.
fn formats_of(engine: &Engine, name: &str) -> (BTreeSet<Format>, BTreeSet<Format>) {
    let directory = Directory::open(&fixture(name)).unwrap();
    let weights = Weights::bind(&directory, engine.config()).unwrap();
    let residents = weights.resident().iter().map(|matrix| matrix.source.format).collect();
    let mut experts = BTreeSet::new();
    for layer in &weights.layers {
        let Mlp::Sparse(moe) = &layer.mlp else { continue };
        for expert in moe.experts.iter() {
            experts.extend([&expert.gate, &expert.up, &expert.down].map(|source| source.format));
        }
    }
    (residents, experts)
}

/// Formats seen, tokens, logits, experts and keys of one fixture.
fn check_fixture(name: &str, residents: &[&str], experts: &[&str]) {
    let name = &format!("formats/{name}");
    let dir = fixture(name);
    let options = Options {
        ctx_tokens: 64,
        chunk_rows: 16,
        limit: Limit::SlotsPerLayer(1),
        ..Options::default()
    };
    let engine = open(&dir, options);
    let named = |names: &[&str]| names.iter().map(|n| format_named(n)).collect::<BTreeSet<_>>();
    assert_eq!(formats_of(&engine, name), (named(residents), named(experts)), "{name}: formats");
    let reference = read_json(&dir.join("ref.json"));
    let field = |key: &str| integers(reference.get(key).unwrap());
    let (full, mut tokens, predicted) = (field("full_ids"), field("prompt_ids"), field("tf_pred"));
    for cut in ["router_min", "index_min"] {
        let margin = reference.get("cuts").unwrap().get(cut).and_then(Value::as_f64).unwrap();
        assert!(margin > CUT_MIN, "{name}: {cut} is {margin}: choices could differ by rounding");
    }

    let mut trace = Trace::read(&dir, engine.config());
    let logits = all_logits(&engine, &full, &mut trace);
    trace.assert_complete(full.len());
    let vocab = engine.config().vocab_size;
    let got: Vec<u32> = logits.chunks_exact(vocab).map(|row| argmax(row).unwrap()).collect();
    assert_eq!(got, predicted, "{name}: teacher forcing");
    let (max, rms) = difference(&logits, &read_floats(&dir.join("logits_gold.f32")));
    println!("{name}: max {max:.2e} rms {rms:.2e}");
    let all_formats = residents.iter().chain(experts).map(|format| format_named(format));
    let has_integers = all_formats.into_iter().any(|format| Order::of(format, 1).is_some());
    let bound = if has_integers { MAX_ABS } else { MAX_ABS_FLOATS };
    assert!(max <= bound, "{name}: max {max:.2e}, rms {rms:.2e}");

    let mut session = engine.session().unwrap();
    while tokens.len() < full.len() {
        tokens.push(argmax(session.advance(&tokens, &mut Unobserved).unwrap()).unwrap());
    }
    assert_eq!(tokens, full, "{name}: greedy");
}

// The router of a container is F32, and a matrix of at most one group a row is a per-row one.

#[test]
fn int8_row_container_matches() {
    check_fixture("int8-row", &["f32", "int8-row"], &["int8-row"]);
}

#[test]
fn int4_row_container_of_odd_widths_matches() {
    check_fixture("int4-row", &["f32", "int4-row"], &["int4-row"]);
}

#[test]
fn int2_row_container_matches() {
    check_fixture("int2-row", &["f32", "int2-row"], &["int2-row"]);
}

#[test]
fn int4_groups_of_16_match() {
    check_fixture("int4-g16", &["f32", "int4-g16"], &["int4-g16"]);
}

#[test]
fn int4_groups_of_32_match() {
    let both = ["int4-row", "int4-g32"];
    check_fixture("int4-g32", &["f32", "int4-row", "int4-g32"], &both);
}

#[test]
fn int4_groups_of_64_match() {
    let both = ["int4-row", "int4-g64"];
    check_fixture("int4-g64", &["f32", "int4-row", "int4-g64"], &both);
}

#[test]
fn int3_groups_of_64_match() {
    check_fixture("int3-g64", &["f32", "int3-g64"], &["int3-g64"]);
}

/// Stamped residents, unstamped experts, and BF16 for what the source did not quantize.
#[test]
fn fp8_passed_through_to_a_container_matches() {
    check_fixture("fp8-block", &["bf16", "fp8-e4m3-b128"], &["fp8-e4m3-b128"]);
}

/// Shards as conversions leave them: one cut inside an expert, one empty, one for the indexer.
#[test]
fn int8_residents_with_int4_experts_in_shards_match() {
    check_fixture("mixed", &["f32", "int8-row"], &["int4-row", "int4-g64"]);
}

#[test]
fn published_bf16_matches() {
    check_fixture("hf-bf16", &["bf16"], &["bf16"]);
}

#[test]
fn published_fp8_with_ragged_blocks_matches() {
    check_fixture("hf-fp8", &["bf16", "fp8-e4m3-b128"], &["fp8-e4m3-b128"]);
}

/// kv_b_proj has an odd width there and is BF16.
#[test]
fn published_nvfp4_matches() {
    check_fixture("hf-nvfp4", &["bf16", "nvfp4"], &["nvfp4"]);
}

/// Every directory of fixtures is looked at by a test above.
#[test]
fn no_fixture_is_forgotten() {
    let entries = std::fs::read_dir(fixture("formats")).unwrap();
    let directories = entries.filter(|entry| entry.as_ref().unwrap().path().is_dir()).count();
    assert_eq!(directories, 12);
}
