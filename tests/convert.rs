//! Conversion: the bytes of an independent converter (`oracle/convert.py`), the same bytes however
//! often it is killed, and nothing lost whatever is asked of it.

mod common;

use colibri::convert::{FILE_NAME, encode_row};
use colibri::engine::Options;
use colibri::json::Value;
use colibri::model::Unobserved;
use colibri::quant::{Encoded, Format};
use common::{
    FNV_OFFSET, GOLDEN, Random, TempDir, TestTensor, all_logits, fixture, fnv1a64, full_ids,
    new_seed, open, read_json, read_safetensors, write_safetensors,
};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// Classes of matrices, as flags.
const CLASSES: [&str; 10] = [
    "--experts",
    "--attention",
    "--o-proj",
    "--kv-b",
    "--dense",
    "--shared",
    "--io",
    "--indexer",
    "--mtp",
    "--mtp-experts",
];

/// Six BF16 shards, with indexers.
const SOURCE: &str = "g_bf16_sharded";

fn format_named(name: &str) -> Format {
    match name {
        "f32" => Format::F32,
        "bf16" => Format::Bf16,
        "f16" => Format::F16,
        "int8-row" => Format::Int8Row,
        "int4-row" => Format::Int4Row,
        "int3-g64" => Format::Int3Group64,
        "fp8-e4m3-b128" => Format::Fp8Block,
        "nvfp4" => Format::Nvfp4,
        _ => Format::Int4Group(name.strip_prefix("int4-g").unwrap().parse().unwrap()),
    }
}

fn bytes_of_hex(hex: &str) -> Vec<u8> {
    let byte = |i: usize| u8::from_str_radix(&hex[i..i + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(byte).collect()
}

fn floats_of_hex(hex: &str) -> Vec<f32> {
    let bytes = bytes_of_hex(hex);
    bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

fn string<'a>(value: &'a Value, key: &str) -> &'a str {
    value.get(key).unwrap().as_str().unwrap()
}

/// `coli convert` behind the commands `before` of a shell.
fn command(before: &str, from: &Path, to: &Path, more: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{before} exec \"$0\" \"$@\"")]);
    command.arg(env!("CARGO_BIN_EXE_coli")).arg("convert");
    command.arg("--from").arg(from).arg("--to").arg(to);
    command.args(["--keep-free", "0"]).args(more);
    command
}

fn convert(from: &Path, to: &Path, more: &[&str]) -> Output {
    command("", from, to, more).output().unwrap()
}

fn convert_well(from: &Path, to: &Path, more: &[&str]) {
    let output = convert(from, to, more);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The last line of a failed conversion.
fn refusal(output: Output) -> String {
    let notes = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{notes}");
    notes.lines().last().unwrap().to_string()
}

/// Name and content of every file but the record, which has the settings and the hashes alone.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap()).filter(|name| name != FILE_NAME);
    names.map(|name| (name.clone(), fs::read(dir.join(&name)).unwrap())).collect()
}

/// Rows in a format, by any rule.
struct Rows {
    format: Format,
    cols: usize,
    weights: Vec<u8>,
    scales: Vec<u8>,
}

impl Rows {
    fn encode(format: Format, importance: Option<&[f32]>, rows: &[Vec<f32>]) -> Rows {
        let cols = rows[0].len();
        let mut weights = vec![0xaa; rows.len() * format.row_bytes(cols)];
        let mut scales = vec![0xaa; format.scale_bytes(rows.len(), cols)];
        let weight_rows = weights.chunks_mut(format.row_bytes(cols));
        let scale_rows = scales.chunks_mut(format.scale_bytes(1, cols));
        for ((row, weights), scales) in rows.iter().zip(weight_rows).zip(scale_rows) {
            assert!(encode_row(format, importance, row, weights, scales));
        }
        Rows { format, cols, weights, scales }
    }

    fn encoded(&self) -> Encoded<'_> {
        let Rows { format, cols, weights, scales } = self;
        let rows = weights.len() / format.row_bytes(*cols);
        Encoded { format: *format, rows, cols: *cols, weights, scales, scalar: 1.0 }
    }

    fn decode(&self) -> Vec<Vec<f32>> {
        decode(&self.encoded())
    }
}

fn decode(matrix: &Encoded<'_>) -> Vec<Vec<f32>> {
    let mut rows = vec![vec![0.0; matrix.cols]; matrix.rows];
    rows.iter_mut().enumerate().for_each(|(row, values)| matrix.decode_row(row, values));
    rows
}

/// Σ importance · (w − decoded)² of each row.
fn squared_errors(rows: &[Vec<f32>], decoded: &[Vec<f32>], importance: &[f32]) -> Vec<f64> {
    let square =
        |((a, b), count): ((&f32, &f32), &f32)| (*a as f64 - *b as f64).powi(2) * *count as f64;
    let row = |(a, b): (&Vec<f32>, &Vec<f32>)| a.iter().zip(b).zip(importance).map(square).sum();
    rows.iter().zip(decoded).map(row).collect()
}

/// By the largest weight, too, within half a step; searched for, never worse than that by what was
/// searched for.
#[test]
fn every_encoding_becomes_every_format_to_the_byte_by_every_rule() {
    let cases = read_json(&fixture("convert/encode.json"));
    let mut seen = 0;
    for case in cases.as_array().unwrap() {
        let number = |key: &str| case.get(key).unwrap().as_u64().unwrap() as usize;
        let (rows, cols) = (number("rows"), number("cols"));
        let [weights, scales] = ["weights", "scales"].map(|key| bytes_of_hex(string(case, key)));
        let scalar = f32::from_bits(u32::from_str_radix(string(case, "scalar"), 16).unwrap());
        let format = format_named(string(case, "format"));
        let (weights, scales) = (&weights[..], &scales[..]);
        let source = decode(&Encoded { format, rows, cols, weights, scales, scalar });
        let known =
            case.get("importance").map_or(vec![], |hex| floats_of_hex(hex.as_str().unwrap()));
        let ones = vec![1.0; cols];
        let rules = [("abs-max", None), ("search", Some(&ones[..])), ("weighed", Some(&known[..]))];
        for (rule, importance) in rules {
            let wanted = case.get(rule).and_then(Value::as_object).unwrap_or_default();
            for (name, want) in wanted {
                let to = format_named(name);
                let want: Vec<&str> =
                    want.as_array().unwrap().iter().map(|hex| hex.as_str().unwrap()).collect();
                let got = Rows::encode(to, importance, &source);
                let case = format!("{format} [{rows}, {cols}] to {to}, {rule}");
                assert!(got.weights == bytes_of_hex(want[0]), "{case}: weights");
                assert!(got.scales == bytes_of_hex(want[1]), "{case}: scales");
                let plain = Rows::encode(to, None, &source);
                let counts = importance.unwrap_or(&ones);
                let [found, bound] =
                    [&got, &plain].map(|rows| squared_errors(&source, &rows.decode(), counts));
                // The order of a sum in f32 may turn what is nearly equal.
                assert!(found.iter().zip(&bound).all(|(a, b)| *a <= b * 1.00001), "{case}");
                for (row, decoded) in plain.decode().iter().enumerate() {
                    for (col, (value, decoded)) in source[row].iter().zip(decoded).enumerate() {
                        // Beyond half a step there are only the roundings of quotient and product.
                        let bound = plain.encoded().scale(row, col) * 0.50001;
                        let error = (value - decoded).abs();
                        assert!(error <= bound, "{case}: [{row}, {col}]: {error} > {bound}");
                    }
                }
                seen += 1;
            }
        }
    }
    assert_eq!(seen, (5 * 4 + 3) * 11 + 2 * 5 * 11, "cases");
}

/// Of weights that are normally distributed no 2ⁿ evenly spaced levels have less error than these
/// parts of the variance (J. Max, Quantizing for minimum distortion, 1960, table II). His levels
/// are halves, ours are integers and one fewer on one side, which costs some per cent.
#[test]
fn scales_that_were_searched_for_come_near_the_best_levels_of_a_normal_distribution() {
    let mut random = Random::new(5);
    let uniform = |random: &mut Random| (random.below(1 << 30) as f64 + 0.5) / (1 << 30) as f64;
    // Box and Muller's.
    let mut normal = || {
        let (a, b) = (uniform(&mut random), uniform(&mut random));
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos() * 0.02) as f32
    };
    let rows: Vec<Vec<f32>> = (0..16).map(|_| (0..6144).map(|_| normal()).collect()).collect();
    let variance: f64 = rows.iter().flatten().map(|value| (*value as f64).powi(2)).sum();
    let ones = [1.0; 6144];
    let part = |importance| {
        let decoded = Rows::encode(Format::Int4Row, importance, &rows).decode();
        let errors = squared_errors(&rows, &decoded, &ones);
        errors.iter().sum::<f64>() / variance
    };
    let (searched, plain) = (part(Some(&ones)), part(None));
    assert!((0.01154..0.0121).contains(&searched), "{searched}");
    assert!(plain > 2.0 * searched, "{plain}");
}

#[test]
fn a_weight_that_is_not_finite_is_seen_in_every_group_of_every_format() {
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (format, importance) in [
            (Format::Int8Row, None),
            (Format::Int4Row, None),
            (Format::Int4Group(16), Some(&[1.0; 99][..])),
            (Format::Int3Group64, Some(&[1.0; 99])),
        ] {
            for at in 0..99 {
                let mut row = [1.0; 99];
                row[at] = bad;
                let mut weights = vec![0; format.row_bytes(99)];
                let mut scales = vec![0; format.scale_bytes(1, 99)];
                assert!(
                    !encode_row(format, importance, &row, &mut weights, &mut scales),
                    "{format}, {at}"
                );
            }
        }
    }
}

/// Header, order, names, numbers of files and every payload; a scale that lies in another shard
/// than its weight is among them.
#[test]
fn checkpoints_become_the_files_of_an_independent_converter() {
    let cases = read_json(&fixture("convert/files.json"));
    for (i, case) in cases.as_array().unwrap().iter().enumerate() {
        let (dir, name) = (TempDir::new(&format!("convert-files-{i}")), string(case, "source"));
        let formats = case.get("formats").unwrap().as_object().unwrap().iter();
        let flags = formats.flat_map(|(class, format)| {
            let value = format.as_str().unwrap();
            let file = || fixture(value).display().to_string();
            [format!("--{class}"), if class == "calibration" { file() } else { value.into() }]
        });
        let flags: Vec<String> = flags.collect();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        convert_well(&fixture(name), &dir.0, &flags);
        let mut found = contents(&dir.0);
        assert_eq!(found.remove("config.json"), fs::read(fixture(name).join("config.json")).ok());
        let want = case.get("files").unwrap().as_object().unwrap();
        let names: Vec<&String> = want.iter().map(|(name, _)| name).collect();
        assert_eq!(found.keys().collect::<Vec<_>>(), names, "{name} {flags:?}");
        for (file, want) in want {
            let want = want.as_array().unwrap();
            let bytes = &found[file];
            let hash = bytes.iter().fold(FNV_OFFSET, |hash, byte| {
                (hash ^ *byte as u64).wrapping_mul(0x0000_0100_0000_01b3)
            });
            assert_eq!(Some(bytes.len() as u64), want[0].as_u64(), "{name} {flags:?}: {file}");
            assert_eq!(format!("{hash:016x}"), want[1].as_str().unwrap(), "{name}: {file}");
        }
    }
}

/// What keeps its weights keeps its logits, to the bit.
#[test]
fn a_pass_through_computes_the_golden_logits() {
    for name in ["formats/hf-fp8", "formats/hf-bf16", "l_f16", "h_mtp"] {
        let dir = TempDir::new(&format!("convert-logits-{}", name.replace('/', "-")));
        let flags: Vec<&str> = CLASSES.into_iter().flat_map(|class| [class, "fp8"]).collect();
        convert_well(&fixture(name), &dir.0, &flags);
        let engine = open(&dir.0, Options { ctx_tokens: 128, ..Options::default() });
        let logits = all_logits(&engine, &full_ids(name), &mut Unobserved);
        let golden = GOLDEN.iter().find(|(golden, _)| *golden == name).unwrap().1;
        assert_eq!(fnv1a64(FNV_OFFSET, &logits), golden, "{name}");
    }
}

/// The files of a directory that have their names, and what a rewrite would change of them.
fn finished(dir: &Path) -> BTreeMap<String, (u64, i64, i64, u64)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.ends_with(".safetensors") {
            let file = entry.metadata().unwrap();
            found.insert(name, (file.ino(), file.mtime(), file.mtime_nsec(), file.len()));
        }
    }
    found
}

/// Half of the conversions delete their source as they go.
#[test]
fn conversions_that_are_killed_go_on_and_rewrite_nothing() {
    let dir = TempDir::new("convert-killed");
    let (plain, to, from) = (dir.0.join("plain"), dir.0.join("to"), dir.0.join("from"));
    convert_well(&fixture(SOURCE), &plain, &[]);
    let want = contents(&plain);
    let mut random = Random::new(new_seed());
    let (mut kills, mut begun, mut completed, mut most_kills) = (0, false, 0, 0);
    let mut before = BTreeMap::new();
    while kills < 200 || begun {
        let deletes = completed % 2 == 1;
        if !begun {
            let copy = TempDir::with_fixture("convert-killed-source", SOURCE);
            let _ = (fs::remove_dir_all(&to), fs::remove_dir_all(&from));
            fs::rename(&copy.0, &from).unwrap();
            (before, begun, most_kills) = (BTreeMap::new(), true, 0);
        }
        let flags: &[&str] = if deletes { &["--delete-source"] } else { &[] };
        let mut command = command("", &from, &to, flags);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        if kills < 200 && most_kills < 40 {
            std::thread::sleep(Duration::from_micros(2_000 + random.below(40_000) as u64));
            // It may have ended.
            let _ = child.kill();
        }
        let output = child.wait_with_output().unwrap();
        let after = finished(&to);
        for (name, file) in &before {
            assert_eq!(after.get(name), Some(file), "{name} was touched");
        }
        before = after;
        match output.status.code() {
            None => (kills, most_kills) = (kills + 1, most_kills + 1),
            Some(code) => {
                assert_eq!(code, 0, "{}", String::from_utf8_lossy(&output.stderr));
                assert!(contents(&to) == want, "after {most_kills} kills");
                let sources = fs::read_dir(&from).unwrap().map(|e| e.unwrap().file_name());
                let left = sources.filter(|name| name.to_str().unwrap().ends_with(".safetensors"));
                assert_eq!(left.count(), if deletes { 0 } else { 6 }, "sources left");
                (begun, completed) = (false, completed + 1);
            }
        }
    }
    assert!(completed >= 2, "both ways");
}

#[test]
fn an_interrupted_conversion_exits_with_130_and_goes_on() {
    let dir = TempDir::new("convert-interrupted");
    let (plain, to) = (dir.0.join("plain"), dir.0.join("to"));
    convert_well(&fixture(SOURCE), &plain, &[]);
    // The signal may come too late.
    let stopped = (0..50).any(|_| {
        let _ = fs::remove_dir_all(&to);
        let mut command = command("", &fixture(SOURCE), &to, &[]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        while finished(&to).is_empty() {
            std::thread::yield_now();
        }
        let id = child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        let is_last = String::from_utf8_lossy(&output.stderr).ends_with("coli: interrupted\n");
        assert!(output.status.code() == Some(0) || is_last);
        output.status.code() == Some(130)
    });
    assert!(stopped, "no signal came in time");
    assert!(finished(&to).len() < 11);
    convert_well(&fixture(SOURCE), &to, &[]);
    assert!(contents(&to) == contents(&plain));
}

/// A limit for each file stands in for a drive that is full.
#[test]
fn a_conversion_that_finds_no_room_says_so_and_goes_on_later() {
    let dir = TempDir::new("convert-no-room");
    let (plain, to) = (dir.0.join("plain"), dir.0.join("to"));
    convert_well(&fixture(SOURCE), &plain, &[]);
    let limit = "trap '' XFSZ; ulimit -f 100;";
    let message = refusal(command(limit, &fixture(SOURCE), &to, &[]).output().unwrap());
    let file = to.join("out-00000.safetensors.partial").display().to_string();
    assert!(message.starts_with(&format!("coli: {file}: File too large")), "{message}");
    assert!(message.ends_with("make room, and run the same command again"), "{message}");
    assert!(finished(&to).is_empty());
    convert_well(&fixture(SOURCE), &to, &[]);
    assert!(contents(&to) == contents(&plain));
    let elsewhere = dir.0.join("elsewhere");
    let mut command = command("", &fixture(SOURCE), &elsewhere, &[]);
    let output = command.env_clear().args(["--dry-run"]).output().unwrap();
    assert!(output.status.success() && !elsewhere.exists(), "a dry run wrote something");
}

/// A file with one word replaced by another.
fn replace_in(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{}: {from}", path.display());
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

/// The first of the six shards, and its tensors.
fn first_shard(dir: &Path) -> (PathBuf, Vec<TestTensor>) {
    let path = dir.join("model-00001-of-00006.safetensors");
    let tensors = read_safetensors(&path);
    (path, tensors)
}

#[test]
fn another_family_is_refused_before_any_shard_is_opened() {
    let from = TempDir::with_fixture("convert-family", SOURCE);
    let to = from.0.join("to");
    replace_in(&from.0.join("config.json"), "\"glm_moe_dsa\"", "\"glm5_next\"");
    let shard = from.0.join("model-00001-of-00006.safetensors");
    fs::write(&shard, "not a shard").unwrap();
    let message = refusal(convert(&from.0, &to, &[]));
    assert!(message.contains("config.json: model_type: expected glm_moe_dsa"), "{message}");
    replace_in(&from.0.join("config.json"), "\"glm5_next\"", "\"glm_moe_dsa\"");
    let message = refusal(convert(&from.0, &to, &[]));
    assert!(message.contains("model-00001-of-00006.safetensors: header"), "{message}");
    assert!(!to.exists());
}

#[test]
fn a_source_that_is_not_whole_finite_or_a_checkpoint_is_refused_by_name() {
    let from = TempDir::with_fixture("convert-source", SOURCE);
    let to = from.0.join("to");
    let (path, mut tensors) = first_shard(&from.0);
    let whole = fs::read(&path).unwrap();
    let at = tensors.iter().position(|t| t.shape.len() == 2 && t.dtype == "BF16").unwrap();
    let (name, cols) = (tensors[at].name.clone(), tensors[at].shape[1]);
    // A NaN in row 3.
    tensors[at].bytes[2 * 3 * cols..][..2].copy_from_slice(&[0xc0, 0x7f]);
    write_safetensors(&path, &tensors);
    let message = refusal(convert(&from.0, &to, &[]));
    let why = format!("coli: tensor {name}: row 3: a weight is not finite: fetch its file again");
    assert!(message.starts_with(&why), "{message}");
    fs::remove_dir_all(&to).unwrap();
    tensors.remove(at);
    write_safetensors(&path, &tensors);
    let message = refusal(convert(&from.0, &to, &[]));
    assert!(message.contains(&format!("tensor {name} is missing")), "{message}");
    fs::write(&path, &whole).unwrap();
    convert_well(&from.0, &to, &[]);
    let message = refusal(convert(&to, &from.0.join("again"), &[]));
    assert!(message.contains("already a container: it has "), "{message}");
    fs::remove_file(from.0.join("model-00006-of-00006.safetensors")).unwrap();
    let message = refusal(convert(&from.0, &from.0.join("new"), &[]));
    assert!(message.contains("model-00006-of-00006.safetensors is missing"), "{message}");
}

/// Two groups of 64 in 130 columns, or of 48: whoever reads them back cannot know.
#[test]
fn a_format_that_readers_would_mistake_is_refused() {
    let to = TempDir::new("convert-mistaken");
    let message = refusal(convert(&fixture("formats/hf-fp8"), &to.0, &[]));
    let why = "a reader could not tell int4-g64 of a [32, 130] matrix by its size: choose \
               another format with --experts";
    assert!(
        message.contains("experts.0.down_proj.weight: ") && message.ends_with(why),
        "{message}"
    );
    let message = refusal(convert(&fixture("formats/hf-nvfp4"), &to.0, &["--experts", "fp8"]));
    assert!(message.contains("fp8 keeps what is FP8, but this is nvfp4: choose"), "{message}");
    assert!(contents(&to.0).is_empty());
}

#[test]
fn a_directory_with_other_files_is_left_alone() {
    let from = TempDir::with_fixture("convert-others-source", SOURCE);
    fs::write(from.0.join("tokenizer.json"), "{}").unwrap();
    for (name, text) in [
        ("out-00000.safetensors", "ours"),
        ("out-00003.safetensors.partial", "ours"),
        ("model.safetensors", "ours"),
        ("tokenizer.json", "[]"),
    ] {
        let to = TempDir::new("convert-others");
        fs::write(to.0.join(name), text).unwrap();
        let message = refusal(convert(&from.0, &to.0, &[]));
        let why = format!("coli: {}: already there, and not ", to.0.join(name).display());
        assert!(message.starts_with(&why), "{message}");
        assert_eq!(contents(&to.0), BTreeMap::from([(name.into(), text.into())]));
    }
    // Into the source itself; and what is nobody's business stays.
    let message = refusal(convert(&from.0, &from.0, &[]));
    assert!(message.contains("already there"), "{message}");
    let to = TempDir::new("convert-others");
    fs::write(to.0.join("notes.txt"), "mine").unwrap();
    convert_well(&from.0, &to.0, &[]);
    assert_eq!(fs::read(to.0.join("notes.txt")).unwrap(), b"mine");
    assert_eq!(fs::read(to.0.join("tokenizer.json")).unwrap(), b"{}");
}

#[test]
fn two_conversions_do_not_write_to_one_directory() {
    let to = TempDir::new("convert-two");
    let lock = fs::File::open(&to.0).unwrap();
    lock.lock().unwrap();
    let message = refusal(convert(&fixture(SOURCE), &to.0, &[]));
    assert!(message.contains("another conversion writes there: wait"), "{message}");
    assert!(contents(&to.0).is_empty());
    drop(lock);
    convert_well(&fixture(SOURCE), &to.0, &[]);
}

#[test]
fn another_request_or_source_than_was_begun_is_refused_by_name() {
    let from = TempDir::with_fixture("convert-begun", SOURCE);
    let to = from.0.join("to");
    convert_well(&from.0, &to, &[]);
    let before = finished(&to);
    for (flag, value, why) in [
        ("--experts", "int4", "--experts int4-g64, now asked for --experts int4-row"),
        ("--o-proj", "int4-g32", "--o-proj int8-row, now asked for --o-proj int4-g32"),
        ("--scales", "search", "--scales abs-max, now asked for --scales search"),
        ("--indexer", "off", "indexers on, now asked for indexers off"),
    ] {
        let message = refusal(convert(&from.0, &to, &[flag, value]));
        assert!(message.contains(&format!("begun with {why}: ask for the former")), "{message}");
    }
    // Threads decide no byte.
    convert_well(&from.0, &to, &["--threads", "1"]);
    assert_eq!(finished(&to), before);
    let last = to.join("out-00005.safetensors");
    fs::remove_file(&last).unwrap();
    let source = from.0.join("model-00006-of-00006.safetensors");
    let bytes = fs::read(&source).unwrap();
    fs::write(&source, &bytes[1..]).unwrap();
    let message = refusal(convert(&from.0, &to, &[]));
    let why = format!("expected {} bytes, found {}: it changed", bytes.len(), bytes.len() - 1);
    assert!(message.contains(&why), "{message}");
    fs::remove_file(&source).unwrap();
    let message = refusal(convert(&from.0, &to, &[]));
    assert!(message.contains("00006.safetensors, for out-00005.safetensors: No such"), "{message}");
    // As long, but other tensors.
    let at = bytes.windows(5).position(|word| word == b"BF16\"").unwrap();
    let other = [&bytes[..at], b"F16\" ", &bytes[at + 5..]].concat();
    fs::write(&source, other).unwrap();
    let message = refusal(convert(&from.0, &to, &[]));
    assert!(message.contains("00006.safetensors: other tensors than before"), "{message}");
    // What is needed no more may be gone.
    fs::write(&source, &bytes).unwrap();
    fs::remove_file(from.0.join("model-00001-of-00006.safetensors")).unwrap();
    convert_well(&from.0, &to, &[]);
    let mut after = finished(&to);
    assert_eq!(after.remove("out-00005.safetensors").unwrap().3, before["out-00005.safetensors"].3);
    assert!(after.iter().all(|(name, file)| before[name] == *file));
}

/// Inode and time of change of a directory and of everything in it.
fn untouched(dir: &Path) -> Vec<(u64, i64, i64)> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = entries.chain([dir.to_path_buf()]).collect();
    paths.sort();
    let state = |file: fs::Metadata| (file.ino(), file.mtime(), file.mtime_nsec());
    paths.iter().map(|path| state(fs::metadata(path).unwrap())).collect()
}

/// It may be read-only, its drive full, and its source gone. For the superuser, whom permissions do
/// not stop, what is there tells whether anything was written.
#[test]
fn a_finished_directory_is_not_written_to_again() {
    let from = TempDir::with_fixture("convert-finished-source", SOURCE);
    let to = TempDir::new("convert-finished");
    convert_well(&from.0, &to.0, &[]);
    let permissions = fs::metadata(&to.0).unwrap().permissions();
    fs::set_permissions(&to.0, fs::Permissions::from_mode(0o555)).unwrap();
    let before = untouched(&to.0);
    for gone in [false, true] {
        if gone {
            fs::remove_dir_all(&from.0).unwrap();
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_coli"));
        command.args(["convert", "--keep-free", "1000000", "--from"]).arg(&from.0);
        let output = command.arg("--to").arg(&to.0).output().unwrap();
        let [text, notes] = [output.stdout, output.stderr].map(|s| String::from_utf8(s).unwrap());
        assert!(output.status.success(), "{notes}");
        assert!(text.ends_with("\nnothing is left to do\n"), "{text}");
        assert_eq!(untouched(&to.0), before, "the source is gone: {gone}");
    }
    fs::set_permissions(&to.0, permissions).unwrap();
}

#[test]
fn no_source_is_deleted_whose_outputs_are_not_what_was_written() {
    let from = TempDir::with_fixture("convert-delete", SOURCE);
    let to = from.0.join("to");
    convert_well(&from.0, &to, &[]);
    let broken = to.join("out-00002.safetensors");
    let mut bytes = fs::read(&broken).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&broken, bytes).unwrap();
    let message = refusal(convert(&from.0, &to, &["--delete-source"]));
    let why = format!("coli: {}: its bytes are not those", broken.display());
    assert!(message.starts_with(&why), "{message}");
    let left = |i: usize| from.0.join(format!("model-0000{i}-of-00006.safetensors")).exists();
    assert_eq!([1, 2, 3, 4, 5, 6].map(left), [false, false, true, true, true, true]);
    fs::remove_file(&broken).unwrap();
    convert_well(&from.0, &to, &["--delete-source"]);
    let (plain, whole) = (TempDir::new("convert-delete-plain"), TempDir::new("convert-whole"));
    convert_well(&fixture(SOURCE), &plain.0, &[]);
    convert_well(&fixture(SOURCE), &whole.0, &["--dry-run"]);
    assert!(contents(&to) == contents(&plain.0) && contents(&whole.0).is_empty());
    assert!([1, 2, 3, 4, 5, 6].map(left).iter().all(|left| !left));
}

#[test]
fn room_that_shall_stay_free_is_not_used() {
    let to = TempDir::new("convert-floor");
    let mut command = Command::new(env!("CARGO_BIN_EXE_coli"));
    command.arg("convert").arg("--from").arg(fixture(SOURCE)).arg("--to").arg(&to.0);
    command.args(["--keep-free", "1000000"]);
    let message = refusal(command.output().unwrap());
    assert!(message.contains("are needed with what --keep-free keeps"), "{message}");
    // As it goes, too.
    let message = refusal(command.arg("--delete-source").output().unwrap());
    assert!(message.contains("out-00000.safetensors takes 68576 bytes and --keep"), "{message}");
    assert!(finished(&to.0).is_empty());
}

#[test]
fn a_record_that_is_none_is_refused() {
    let to = TempDir::new("convert-record");
    let path = to.0.join(FILE_NAME);
    convert_well(&fixture(SOURCE), &to.0, &[]);
    let good = fs::read_to_string(&path).unwrap();
    let mut random = Random::new(new_seed());
    let long = "9".repeat(30);
    for _ in 0..60 {
        let (at, what) = (random.below(good.len()), random.pick(&["", "x", "-", "\"", "/", &long]));
        let bad = format!("{}{what}{}", &good[..at], &good[at + 1..]);
        fs::write(&path, bad).unwrap();
        let output = convert(&fixture(SOURCE), &to.0, &["--dry-run"]);
        // A changed hash is not looked at, and the rest is refused; nothing panics.
        assert!([Some(0), Some(1)].contains(&output.status.code()), "at {at}: {what:?}");
    }
    for (from, to_word, why) in [
        ("\"format\":2", "\"format\":1", "another version began"),
        ("\"out-00000", "\"../out-00000", "not the record of a conversion"),
        ("\"source\":0", "\"source\":6", "not the record of a conversion"),
    ] {
        fs::write(&path, good.replacen(from, to_word, 1)).unwrap();
        let message = refusal(convert(&fixture(SOURCE), &to.0, &[]));
        assert!(message.contains(FILE_NAME) && message.contains(why), "{message}");
    }
}

/// The bytes of a safetensors file whose header has other words.
fn with_header(bytes: &[u8], changes: &[(&str, &str)]) -> Vec<u8> {
    let data_start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header = String::from_utf8(bytes[8..data_start].to_vec()).unwrap();
    for (from, to) in changes {
        assert!(header.contains(from), "{from}");
        header = header.replacen(from, to, 1);
    }
    let length = (header.len() as u64).to_le_bytes();
    [&length, header.as_bytes(), &bytes[data_start..]].concat()
}

#[test]
fn a_calibration_of_another_model_or_with_other_bytes_is_refused_by_name() {
    let (dir, good) = (TempDir::new("convert-calibration"), fixture("convert/a_seed.calibration"));
    let (file, to, from) = (dir.0.join("bad"), dir.0.join("to"), fixture("a_seed"));
    let bytes = fs::read(&good).unwrap();
    let ending = |value: f32| [&bytes[..bytes.len() - 4], &value.to_le_bytes()].concat();
    let narrow = [("lm_head.input", "x"), ("model.layers.0.mlp.down_proj.input", "lm_head.input")];
    for (bad, why) in [
        (with_header(&bytes, &[("layers 5", "layers 6")]), "top_k 2, not vocab_size 256, "),
        (with_header(&bytes, &[("colibri.cal", "colibri.gal")]), "not a calibration: no colibri"),
        (with_header(&bytes, &[("F32", "U32")]), "expected a vector F32, found U32 ["),
        (with_header(&bytes, &narrow), "lm_head.input: expected 128 columns, found 64"),
        (ending(-1.0), "-1 is no mean of squares"),
        (ending(f32::NAN), "NaN is no mean of squares"),
        (bytes[..bytes.len() - 4].to_vec(), "bytes of data: it is truncated"),
        (bytes[..4].to_vec(), "at least 8 bytes of header length"),
        (fs::read(from.join("config.json")).unwrap(), "reaches beyond the file"),
    ] {
        fs::write(&file, bad).unwrap();
        let flags = ["--scales", "search", "--calibration", file.to_str().unwrap()];
        let message = refusal(convert(&from, &to, &flags));
        assert!(message.contains(why), "{message}");
        let name = if why.contains("columns") { "tensor lm_head.weight" } else { "/bad: " };
        assert!(message.contains(name) && !to.exists(), "{message}");
    }
    let output = convert(&from, &to, &["--calibration", good.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Of 105 matrices, nothing is known of the embedding, of q_b, kv_b, o and wq_b in five layers, and
/// of the downs of six experts that no token chose.
#[test]
fn a_conversion_goes_on_with_the_calibration_that_it_was_begun_with() {
    let dir = TempDir::new("convert-calibrated");
    let (other, to, from) = (dir.0.join("other"), dir.0.join("to"), fixture("a_seed"));
    let good = fixture("convert/a_seed.calibration");
    let mut bytes = fs::read(&good).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&other, bytes).unwrap();
    let flags = |file: &Path| {
        ["--scales", "search", "--calibration", file.to_str().unwrap()].map(String::from)
    };
    let run = |flags: &[String]| {
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        convert(&from, &to, &flags)
    };
    let output = run(&flags(&good));
    let plan = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && plan.contains("  78 of 105 matrices by the calibration"),
        "{plan}"
    );
    let before = finished(&to);
    for flags in [&flags(&other)[..], &flags(&good)[..2]] {
        let message = refusal(run(flags));
        assert!(message.contains("begun with --scales search by "), "{message}");
    }
    assert!(run(&flags(&good)).status.success());
    assert_eq!(finished(&to), before);
}
