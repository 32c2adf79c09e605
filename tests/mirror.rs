//! A container whose shards lie in several directories, and one with copies on other drives: the
//! same bits, and no word but a clear one when something does not fit together.

mod common;

use colibri::disk::Direct;
use colibri::engine::{Engine, Options};
use colibri::model::Unobserved;
use colibri::plan::Limit;
use common::{FNV_OFFSET, GOLDEN, TempDir, all_logits, fnv1a64, full_ids};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Six shards; the experts of four layers.
const SHARDED: &str = "g_bf16_sharded";

fn shard(number: usize) -> String {
    format!("model-0000{number}-of-00006.safetensors")
}

fn options() -> Options {
    // One slot: every expert is read again and again.
    Options { ctx_tokens: 128, limit: Limit::SlotsPerLayer(1), ..Options::default() }
}

/// Fails unless `engine` gives the logits that the fixture has when it lies in one directory.
fn assert_golden(engine: &Engine, how: &str) {
    let logits = all_logits(engine, &full_ids(SHARDED), &mut Unobserved);
    let golden = GOLDEN.iter().find(|(name, _)| *name == SHARDED).unwrap().1;
    assert_eq!(fnv1a64(FNV_OFFSET, &logits), golden, "{how}");
}

/// The fixture with its shards moved to further directories: those in `places[0]` to the first.
fn split(name: &str, places: &[&[usize]]) -> (TempDir, Vec<TempDir>) {
    let first = TempDir::with_fixture(name, SHARDED);
    let more = places.iter().enumerate().map(|(i, numbers)| {
        let dir = TempDir::new(&format!("{name}-{i}"));
        for number in *numbers {
            std::fs::rename(first.0.join(shard(*number)), dir.0.join(shard(*number))).unwrap();
        }
        dir
    });
    let more = more.collect();
    (first, more)
}

fn paths(dirs: &[TempDir]) -> Vec<PathBuf> {
    dirs.iter().map(|dir| dir.0.clone()).collect()
}

fn open(dir: &Path, options: Options) -> Result<Engine, String> {
    Engine::open(dir, options, |_, _| {}).map_err(|error| error.to_string())
}

#[test]
fn shards_in_several_directories_are_one_model() {
    let cases: [&[&[usize]]; 3] = [&[&[2, 5]], &[&[1, 6], &[3]], &[&[1, 2, 3], &[4, 5, 6]]];
    for (i, places) in cases.into_iter().enumerate() {
        let (first, more) = split(&format!("split-{i}"), places);
        for direct in [Direct::Auto, Direct::Off] {
            let options = Options { model_dirs: paths(&more), direct, ..options() };
            assert_golden(&open(&first.0, options).unwrap(), &format!("{places:?}"));
        }
    }
}

#[test]
fn a_shard_in_two_directories_is_refused_with_both() {
    let (first, more) = split("twice", &[&[2, 5]]);
    std::fs::copy(more[0].0.join(shard(5)), first.0.join(shard(5))).unwrap();
    let options = Options { model_dirs: paths(&more), ..options() };
    let error = open(&first.0, options).err().unwrap();
    let place = first.0.join(shard(5));
    assert_eq!(error, format!("{}: also in {}", place.display(), more[0].0.display()));
}

#[test]
fn a_gap_in_the_union_is_named_and_none_in_a_part_is() {
    let (first, more) = split("gap", &[&[2, 5], &[3]]);
    std::fs::remove_file(more[0].0.join(shard(5))).unwrap();
    let options = Options { model_dirs: paths(&more), ..options() };
    let error = open(&first.0, options).err().unwrap();
    let [a, b, c] = [&first, &more[0], &more[1]].map(|dir| dir.0.display().to_string());
    let (five, six) = (shard(5), shard(6));
    assert_eq!(error, format!("{a}, {b}, {c}: shards: {five} is missing; {six} is there"));
}

#[test]
fn a_further_directory_that_is_missing_or_has_no_shard_is_named() {
    let (first, mut more) = split("none", &[&[2]]);
    more.push(TempDir::new("none-empty"));
    let options = || Options { model_dirs: paths(&more), ..options() };
    let empty = more[1].0.display();
    let error = open(&first.0, options()).err().unwrap();
    assert_eq!(error, format!("{empty}: no .safetensors file in this directory"));
    std::fs::remove_dir(&more[1].0).unwrap();
    let error = open(&first.0, options()).err().unwrap();
    assert!(error.starts_with(&format!("{empty}: No such file")), "{error}");
}

/// `coli VERB --model DIR` with `flags`, and no variables but `env`.
fn coli(verb: &[&str], dir: &Path, flags: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coli"));
    command.args(verb).arg("--model").arg(dir).args(flags);
    command.env_remove("COLI_MODEL_DIRS").env_remove("COLI_MODEL_MIRROR");
    command.envs(env.iter().copied()).output().unwrap()
}

#[test]
fn every_verb_that_opens_a_model_finds_split_shards() {
    let (first, more) = split("verbs", &[&[1, 2, 3], &[4, 5, 6]]);
    let [a, b] = [0, 1].map(|i| more[i].0.to_str().unwrap());
    let reference = common::fixture(SHARDED).join("ref.json");
    let reference = reference.to_str().unwrap();
    let bench = ["bench", "--decode", "1", "--prefill", "1", "--rounds", "1"];
    let verbs: [&[&str]; 7] = [
        &["info"],
        &["plan"],
        &["iobench", "--block-mb", "1"],
        &["logits", "--ids", "1,2"],
        &["run", "--ids", "1,2", "-n", "1"],
        &["oracle", "--ref", reference],
        &bench,
    ];
    for verb in verbs {
        let output = coli(verb, &first.0, &["--model-dirs", &format!("{a},{b}")], &[]);
        let error = String::from_utf8(output.stderr).unwrap();
        // The shards are smaller than a block: they were found.
        let is_done = if verb[0] == "iobench" { error.contains("one block") } else { error == "" };
        assert!(is_done, "{verb:?}: {error}");
    }
    let separators = format!("{a};{b};");
    let output = coli(&["info"], &first.0, &[], &[("COLI_MODEL_DIRS", &separators)]);
    assert!(output.status.success(), "{output:?}");
    let output = coli(&["info"], &first.0, &["--model-dirs", a, "--model-dirs", b], &[]);
    assert!(output.status.success(), "{output:?}");
}
