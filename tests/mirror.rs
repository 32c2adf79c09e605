//! A container whose shards lie in several directories, and one with copies on other drives: the
//! same bits, and no word but a clear one when something does not fit together.

mod common;

use colibri::config::Config;
use colibri::disk::{Direct, open_direct, prepare};
use colibri::engine::{Engine, Options};
use colibri::model::Unobserved;
use colibri::plan::Limit;
use colibri::safetensors::Directory;
use colibri::sys::Pages;
use colibri::weights::{ExpertSource, Mlp, Progress, Weights};
use common::{FNV_OFFSET, GOLDEN, TempDir, all_logits, fixture, fnv1a64, full_ids};
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
    let reference = fixture(SHARDED).join("ref.json");
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
        let is_done =
            if verb[0] == "iobench" { error.contains("one block") } else { error.is_empty() };
        assert!(is_done, "{verb:?}: {error}");
    }
    let separators = format!("{a};{b};");
    let output = coli(&["info"], &first.0, &[], &[("COLI_MODEL_DIRS", &separators)]);
    assert!(output.status.success(), "{output:?}");
    let output = coli(&["info"], &first.0, &["--model-dirs", a, "--model-dirs", b], &[]);
    assert!(output.status.success(), "{output:?}");
}

/// A directory with copies of the shards `numbers`.
fn mirror(name: &str, numbers: &[usize]) -> TempDir {
    let dir = TempDir::new(name);
    for number in numbers {
        std::fs::copy(fixture(SHARDED).join(shard(*number)), dir.0.join(shard(*number))).unwrap();
    }
    dir
}

const ALL: [usize; 6] = [1, 2, 3, 4, 5, 6];

/// The ways to read that the file system of the fixtures has.
fn ways() -> Vec<Direct> {
    let has_direct = open_direct(&fixture(SHARDED).join(shard(1))).is_ok();
    [Direct::On, Direct::Off].into_iter().filter(|way| has_direct || *way == Direct::Off).collect()
}

fn open_mirrored(mirrors: &[TempDir], direct: Direct) -> Engine {
    open(&fixture(SHARDED), Options { mirrors: paths(mirrors), direct, ..options() }).unwrap()
}

/// Cuts a file in the midst of its data.
fn cut(path: &Path) {
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
}

/// The share of a mirror is counted by the bytes of its shards: 121,328 + 150,416 of 723,256, and
/// half of those.
#[test]
fn mirrors_change_no_bit_and_are_counted() {
    for direct in ways() {
        let mirrors = [mirror("full", &ALL), mirror("partial", &[2, 5])];
        let engine = open_mirrored(&mirrors[..1], direct);
        let full = mirrors[0].0.display();
        let note = format!("mirror {full}: 6 of 6 shards, 50 % of the reads");
        assert_eq!(engine.reading_note(), Some(&*note));
        assert_golden(&engine, &note);

        let engine = open_mirrored(&mirrors[1..], direct);
        let partial = mirrors[1].0.display();
        let note = format!("mirror {partial}: 2 of 6 shards, 19 % of the reads");
        assert_eq!(engine.reading_note(), Some(&*note));
        assert_golden(&engine, &note);

        let engine = open_mirrored(&mirrors, direct);
        assert_golden(&engine, "both");
        assert_eq!(engine.take_mirror_end(), None);
    }
}

#[test]
fn a_file_that_is_no_copy_is_named_and_not_used() {
    let mirrors = [mirror("no-copy", &[3, 4, 5, 6])];
    let path = |number| mirrors[0].0.join(shard(number));
    // The last byte of a header of 4200.
    let mut bytes = std::fs::read(path(5)).unwrap();
    bytes[8 + 4200 - 1] ^= 1;
    std::fs::write(path(5), bytes).unwrap();
    let note = |engine: &Engine| engine.reading_note().unwrap().to_string();
    let engine = open_mirrored(&mirrors, Direct::Off);
    let primary = fixture(SHARDED).join(shard(5));
    let why = format!(
        "; not used: {}: its header differs from that of {} at byte 4207",
        path(5).display(),
        primary.display()
    );
    assert!(note(&engine).ends_with(&why), "{}", note(&engine));
    assert!(note(&engine).contains(": 3 of 6 shards, "), "{}", note(&engine));
    assert_golden(&engine, "a header that differs");
    // One that is too short, and one that is no file.
    cut(&path(3));
    std::fs::remove_file(path(4)).unwrap();
    std::fs::create_dir(path(4)).unwrap();
    std::fs::copy(fixture(SHARDED).join(shard(5)), path(5)).unwrap();
    let engine = open_mirrored(&mirrors, Direct::Off);
    let three = fixture(SHARDED).join(shard(3));
    let why = format!("{}: expected the 139520 bytes of {}", path(3).display(), three.display());
    let why = format!("; not used: {why}, found 69760 (and 1 more)");
    assert!(note(&engine).ends_with(&why), "{}", note(&engine));
    assert_golden(&engine, "files that are no copies");
}

/// A drive that is not mounted is an empty directory, or none.
#[test]
fn a_mirror_that_is_gone_leaves_everything_to_the_shards() {
    let mirrors = [mirror("gone", &[])];
    let note = format!("mirror {}: 0 of 6 shards, 0 % of the reads", mirrors[0].0.display());
    for _ in 0..2 {
        let engine = open_mirrored(&mirrors, Direct::Off);
        assert_eq!(engine.reading_note(), Some(&*note));
        assert_golden(&engine, "no mirror");
        let _ = std::fs::remove_dir(&mirrors[0].0);
    }
}

#[test]
fn a_mirror_that_fails_while_it_is_used_costs_no_bit_and_is_given_up() {
    for direct in ways() {
        let mirrors = [mirror("cut", &ALL)];
        let engine = open_mirrored(&mirrors, direct);
        ALL.iter().for_each(|number| cut(&mirrors[0].0.join(shard(*number))));
        assert_golden(&engine, "a mirror that was cut");
        let end = engine.take_mirror_end().unwrap();
        let path = mirrors[0].0.display();
        let begin = format!("mirror {path} is no longer used: 3 reads failed: {path}/model-0000");
        assert!(end.starts_with(&begin) && end.contains("ends too soon"), "{end}");
        assert_eq!(engine.take_mirror_end(), None);
    }
}

/// The routed experts of the fixture, read into memory of their own; `None` where that failed.
fn read_experts(directory: &Directory, weights: &Weights) -> Vec<Option<Vec<Vec<u8>>>> {
    let read = |source: &ExpertSource| {
        let mut memory = Pages::<u8>::new(source.bytes()).unwrap();
        let mut progress = Progress::default();
        while !source.read_on(directory, &mut memory, &mut progress, 4096).ok()? {}
        let expert = source.expert(&memory);
        Some([expert.gate, expert.up, expert.down].map(|m| m.weights.to_vec()).to_vec())
    };
    let experts = weights.layers.iter().flat_map(|layer| match &layer.mlp {
        Mlp::Sparse(moe) => &moe.experts[..],
        Mlp::Dense(_) => &[],
    });
    experts.map(read).collect()
}

/// The shards are cut after they were opened: what is read of them now, a mirror has given.
#[test]
fn reads_go_to_the_drives_in_proportion_to_their_speed() {
    let mut first_read = None;
    // Drives differ in whether they can be read around the page cache.
    for [shards_direct, copies_direct] in [[false; 2], [true; 2], [true, false], [false, true]] {
        let first = TempDir::with_fixture("cut-first", SHARDED);
        let copies = mirror("fast", &ALL);
        let config = Config::load(&first.0).unwrap();
        let mut directory = Directory::open(&first.0).unwrap();
        directory.add_mirror(&copies.0);
        directory.add_direct(|path| {
            let is_copy = path.starts_with(&copies.0);
            let is_direct = if is_copy { copies_direct } else { shards_direct };
            if is_direct { open_direct(path) } else { Err(std::io::ErrorKind::Unsupported.into()) }
        });
        let weights = Weights::bind(&directory, &config).unwrap();
        let experts = read_experts(&directory, &weights);
        assert!(experts.iter().all(Option::is_some));
        let whole = first_read.get_or_insert(experts);
        for number in ALL {
            let file = std::fs::OpenOptions::new().write(true).open(first.0.join(shard(number)));
            file.unwrap().set_len(8192).unwrap();
        }
        let count = |directory: &Directory| {
            let experts = read_experts(directory, &weights);
            let came = experts.iter().zip(&*whole).filter(|(expert, _)| expert.is_some());
            came.map(|(expert, whole)| assert!(expert == whole, "other bytes")).count()
        };
        let equal = count(&directory);
        assert!((whole.len() / 5..whole.len() * 4 / 5).contains(&equal), "{equal} of the mirror");
        directory.files_mut().take(6).for_each(|shard| shard.gbs = 0.0);
        assert_eq!(count(&directory), whole.len());
        directory.files_mut().for_each(|file| file.gbs = 0.5);
        directory.files_mut().take(6).for_each(|shard| shard.gbs = 1.5);
        let hashes = (0..1000).map(|i| i * (u64::MAX / 1000));
        let mirrored = hashes.filter(|hash| directory.route(3, *hash).is_some()).count();
        assert!((249..=251).contains(&mirrored), "{mirrored} of 1000");
    }
}

/// A shard of 100 MiB, all of it a hole, is large enough for a probe.
#[test]
fn drives_of_a_mirrored_container_are_probed_and_no_others() {
    let dirs = ["probe", "probe-copy"].map(TempDir::new);
    for dir in &dirs {
        let bytes = 100 << 20;
        let header =
            format!(r#"{{"a":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
        let path = dir.0.join("a.safetensors");
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat())
            .unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(8 + header.len() as u64 + bytes).unwrap();
    }
    let mut directory = Directory::open(&dirs[0].0).unwrap();
    assert_eq!(prepare(&mut directory, Direct::Off).unwrap(), None);
    let speeds = |directory: &mut Directory| directory.files_mut().map(|file| file.gbs).collect();
    let unprobed: Vec<f64> = speeds(&mut directory);
    assert_eq!(unprobed, [1.0]);
    directory.add_mirror(&dirs[1].0);
    let note = prepare(&mut directory, Direct::Off).unwrap().unwrap();
    let [shard, copy] = speeds(&mut directory)[..] else { panic!("one shard and one copy") };
    assert!(shard > 1e-3 && copy > 1e-3 && shard != 1.0 && copy != 1.0, "{shard} {copy}");
    let percent = (100.0 * copy / (shard + copy)).round();
    let path = dirs[1].0.display();
    assert_eq!(note, format!("mirror {path}: 1 of 1 shards, {percent} % of the reads"));
    let note = prepare(&mut directory, Direct::Auto).unwrap().unwrap();
    assert!(note.starts_with("experts are read ") && note.contains("; mirror "), "{note}");
}
