//! `coli doctor`: each fault is found by its own check, which names the file, and hides no other.

mod common;

use colibri::json::{self, Limits, Value};
use common::{TempDir, TestTensor};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Ids of all checks, in order.
const IDS: [&str; 17] = [
    "model.path",
    "model.config",
    "model.tokenizer",
    "storage.persistence",
    "engine.binary",
    "accelerator.cuda",
    "model.shards",
    "storage.disk",
    "memory.ram",
    "placement.plan",
    "model.tensors",
    "model.draft_head",
    "model.template",
    "storage.speed",
    "limits.files",
    "state.files",
    "model.first_token",
];

fn program() -> PathBuf {
    env!("CARGO_BIN_EXE_coli").into()
}

fn doctor(program: &Path, dir: &Path, flags: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.arg("doctor").arg("--model").arg(dir).args(flags);
    for name in ["COLI_MODEL", "CTX", "RAM_GB"] {
        command.env_remove(name);
    }
    command
}

/// What `doctor --json` said; its exit code and status fit its checks.
#[derive(Debug)]
struct Report(Value);

impl Report {
    fn of(dir: &Path, flags: &[&str]) -> Report {
        let mut command = doctor(&program(), dir, &[&["--json"], flags].concat());
        Report::from(command.output().unwrap())
    }

    fn from(output: Output) -> Report {
        let report = Report(json::parse(&output.stdout, Limits::default()).unwrap());
        let checks = report.0.get("checks").unwrap().as_array().unwrap();
        let ids: Vec<_> = checks.iter().map(|c| c.get("id").unwrap().as_str().unwrap()).collect();
        assert_eq!(ids, IDS);
        let has = |status| IDS.iter().any(|id| report.check(id).0 == status);
        let (code, word) = match (has("fail"), has("warn")) {
            (true, _) => (1, "error"),
            (_, true) => (0, "warning"),
            _ => (0, "ok"),
        };
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert_eq!(report.0.get("status").unwrap().as_str(), Some(word));
        assert_eq!(report.0.get("schema_version").unwrap().as_u64(), Some(1));
        report
    }

    /// Status and summary of one check.
    fn check(&self, id: &str) -> (&str, &str) {
        let checks = self.0.get("checks").unwrap().as_array().unwrap();
        let check = checks.iter().find(|c| c.get("id").unwrap().as_str() == Some(id)).unwrap();
        let word = |key| check.get(key).unwrap().as_str().unwrap();
        (word("status"), word("summary"))
    }

    /// Ids of all checks that fail.
    fn failed(&self) -> Vec<&str> {
        IDS.into_iter().filter(|id| self.check(id).0 == "fail").collect()
    }

    /// An integer among the details of a check.
    fn detail(&self, id: &str, key: &str) -> u64 {
        let checks = self.0.get("checks").unwrap().as_array().unwrap();
        let check = checks.iter().find(|c| c.get("id").unwrap().as_str() == Some(id)).unwrap();
        check.get("details").unwrap().get(key).unwrap().as_u64().unwrap()
    }
}

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/demo")
}

/// A copy of the small model that speaks.
fn demo_copy(name: &str) -> TempDir {
    let dir = TempDir::new(&format!("doctor-{name}"));
    for entry in std::fs::read_dir(demo()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.0.join(path.file_name().unwrap())).unwrap();
    }
    dir
}

#[test]
fn a_sound_model_passes_and_its_plan_is_that_of_coli_plan() {
    let report = Report::of(&demo(), &["--deep", "--cap", "4"]);
    assert_eq!(report.failed(), [""; 0]);
    for id in ["model.tensors", "model.tokenizer", "model.draft_head", "model.template"] {
        assert_eq!(report.check(id).0, "pass", "{:?}", report.check(id));
    }
    assert_eq!(report.detail("model.shards", "shards"), 3);
    assert_eq!(report.detail("memory.ram", "cache_slots_per_layer"), 4);
    assert_eq!(report.detail("limits.files", "needed"), 2 * 3 + 16);
    let mut command = Command::new(program());
    command.args(["plan", "--json", "--cap", "4", "--model"]).arg(demo());
    let output = command.env_remove("CTX").env_remove("RAM_GB").output().unwrap();
    let plan = json::parse(&output.stdout, Limits::default()).unwrap();
    for key in ["model", "plan", "classes", "warnings"] {
        assert_eq!(report.0.get("plan").unwrap().get(key), plan.get(key), "{key}");
    }
    let text = doctor(&program(), &demo(), &[]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("\n[ ok ] model.tensors "), "{text}");
    assert!(text.contains("\n[skip] model.first_token "), "{text}");
    assert!(text.lines().any(|line| line.starts_with("RAM ")), "{text}");
    assert!(text.lines().last().unwrap().starts_with("result   "), "{text}");
}

/// What is broken, how, the check that fails, and what it has to say.
type Fault = (&'static str, fn(&Path), &'static str, &'static str);

#[test]
fn each_fault_of_the_files_fails_its_own_check_which_names_it() {
    let faults: [Fault; 7] = [
        (
            "removed",
            |dir| remove(dir, "out-00000.safetensors"),
            "model.tensors",
            "layernorm.weight is missing",
        ),
        ("truncated", truncate, "model.shards", "out-mtp-00000.safetensors"),
        ("duplicate", duplicate, "model.shards", "out-00000.safetensors"),
        ("gap", gap, "model.shards", "out-00001.safetensors is missing"),
        ("misshapen", misshapen, "model.tensors", "out-00000.safetensors: tensor model.norm"),
        ("config", other_family, "model.config", "config.json: model_type"),
        ("tokenizer", |dir| remove(dir, "tokenizer.json"), "model.tokenizer", "tokenizer.json"),
    ];
    for (name, break_it, id, words) in faults {
        let dir = demo_copy(name);
        break_it(&dir.0);
        let report = Report::of(&dir.0, &[]);
        assert!(report.check(id).1.contains(words), "{name}: {:?}", report.check(id));
        assert_eq!(report.failed(), [id], "{name}");
        assert_eq!(report.check("storage.persistence").0, "pass", "{name}");
        assert_eq!(report.0.get("plan").unwrap().is_null(), id != "model.tokenizer", "{name}");
    }
}

fn remove(dir: &Path, file: &str) {
    std::fs::remove_file(dir.join(file)).unwrap();
}

fn truncate(dir: &Path) {
    let path = dir.join("out-mtp-00000.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
}

fn norm() -> TestTensor {
    TestTensor {
        name: "model.norm.weight".into(),
        dtype: "F32",
        shape: vec![2, 128],
        bytes: vec![0; 1024],
    }
}

fn duplicate(dir: &Path) {
    common::write_safetensors(&dir.join("extra.safetensors"), &[norm()]);
}

fn gap(dir: &Path) {
    common::write_safetensors(&dir.join("out-00002.safetensors"), &[]);
}

fn misshapen(dir: &Path) {
    let path = dir.join("out-00000.safetensors");
    let mut tensors = common::read_safetensors(&path);
    *tensors.iter_mut().find(|tensor| tensor.name == "model.norm.weight").unwrap() = norm();
    common::write_safetensors(&path, &tensors);
}

fn replace(path: &Path, from: &str, to: &str) {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} in {}", path.display());
    std::fs::write(path, text.replacen(from, to, 1)).unwrap();
}

fn other_family(dir: &Path) {
    replace(&dir.join("config.json"), "\"glm_moe_dsa\"", "\"another\"");
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_model_fails() {
    let dir = TempDir::with_fixture("doctor-rows", "a_seed");
    let file = "tokenizer.json";
    std::fs::copy(common::fixture("tokenizer").join(file), dir.0.join(file)).unwrap();
    let report = Report::of(&dir.0, &[]);
    assert_eq!(report.failed(), ["model.tokenizer"]);
    let words = "tokenizer.json: has 2300 tokens, but the model has rows for 256";
    assert!(report.check("model.tokenizer").1.ends_with(words), "{report:?}");
}

#[test]
fn what_a_run_survives_is_a_warning() {
    let dir = demo_copy("warnings");
    // No template can be written without its tokens.
    replace(&dir.0.join("tokenizer.json"), "<|assistant|>", "<|helper|>");
    let path = dir.0.join("out-idx-00000.safetensors");
    std::fs::remove_file(path).unwrap();
    let report = Report::of(&dir.0, &[]);
    assert_eq!(report.failed(), [""; 0]);
    for (id, words) in [("model.template", "<|assistant|>"), ("model.tensors", "no indexer")] {
        let (status, summary) = report.check(id);
        assert_eq!((status, summary.contains(words)), ("warn", true), "{id}: {summary}");
    }
}

#[test]
fn a_damaged_history_of_use_is_named_by_its_line() {
    let dir = demo_copy("state");
    let usage = dir.0.join(".coli_usage");
    std::fs::write(dir.0.join(".coli_kv"), "COLIKV1\0").unwrap();
    for (text, line) in [
        ("1 0 5\n6 15 1\n", None),
        ("-1 6 16\n-2 1 3815245270\n1 0 5\n", None),
        ("-1 6 16\n-2 1 4294967295\n1 0 5\n", Some("line 2")),
        ("", None),
        ("1 0 5\n-1 6 17\n", Some("line 2")),
        ("1 0 5\n1 1\n", Some("line 2")),
        ("1 0 5 1\n", Some("line 1")),
        ("1 0 5\n\n1 x 5\n", Some("line 2")),
        ("1 0 99999999999999999999\n", Some("line 1")),
    ] {
        std::fs::write(&usage, text).unwrap();
        let report = Report::of(&dir.0, &[]);
        let (status, summary) = report.check("state.files");
        let Some(line) = line else {
            assert_eq!(status, "pass", "{text:?}: {summary}");
            let names = format!(".coli_kv (8 bytes), .coli_usage ({} bytes)", text.len());
            assert_eq!(summary, names);
            continue;
        };
        assert_eq!(status, "warn", "{text:?}: {summary}");
        assert!(summary.contains(&format!(".coli_usage: {line}")), "{text:?}: {summary}");
    }
}

/// Root may write anywhere; so another user looks, with a program that it can reach.
#[test]
fn a_directory_that_cannot_be_written_is_a_warning() {
    let dir = demo_copy("read-only");
    let copy = dir.0.join("coli");
    // By a process of its own: a file that this one has open for writing, or another test's child
    // still has, cannot be run.
    assert!(Command::new("cp").arg(program()).arg(&copy).status().unwrap().success());
    std::fs::set_permissions(&dir.0, std::fs::Permissions::from_mode(0o555)).unwrap();
    let mut command = doctor(&copy, &dir.0, &["--json"]);
    if std::fs::metadata("/proc/self").unwrap().uid() == 0 {
        command.uid(65534);
    }
    let report = Report::from(command.output().unwrap());
    std::fs::set_permissions(&dir.0, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (status, summary) = report.check("storage.persistence");
    assert_eq!((status, summary.contains("read-only")), ("warn", true), "{summary}");
}

#[test]
fn too_little_memory_fails_with_the_number_that_would_do() {
    let report = Report::of(&demo(), &["--ram", "0.001"]);
    assert_eq!(report.failed(), ["memory.ram"]);
    assert!(
        report.check("memory.ram").1.contains("give --ram "),
        "{:?}",
        report.check("memory.ram")
    );
    assert_eq!(report.check("placement.plan"), ("skip", "needs memory.ram"));
    assert!(report.0.get("plan").unwrap().is_null());
}

#[test]
fn a_directory_that_is_not_there_is_one_failure() {
    let report = Report::of(Path::new("does/not/exist"), &["--deep"]);
    assert_eq!(report.failed(), ["model.path"]);
    assert!(report.check("model.path").1.contains("does/not/exist: "));
    for id in &IDS[1..] {
        assert_eq!(report.check(id), ("skip", "needs model.path"), "{id}");
    }
}

#[test]
fn wrong_arguments_are_one_check_and_exit_code_2() {
    let output = doctor(&program(), &demo(), &["--json", "--ctx", "0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let value = json::parse(&output.stdout, Limits::default()).unwrap();
    let [check] = value.get("checks").unwrap().as_array().unwrap() else { panic!("{value:?}") };
    assert_eq!(check.get("id").unwrap().as_str(), Some("config.arguments"));
    assert_eq!(check.get("status").unwrap().as_str(), Some("fail"));
    assert!(value.get("plan").unwrap().is_null());
    let output = doctor(&program(), &demo(), &["--ctx", "0"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
}

/// Such a model answers every prompt with one token for ever.
#[test]
fn a_first_token_that_says_nothing_fails_only_when_it_is_run() {
    let dir = TempDir::with_fixture("doctor-zero-head", "e_odd_untied");
    let path = dir.0.join("model.safetensors");
    let mut tensors = common::read_safetensors(&path);
    let head = tensors.iter_mut().find(|tensor| tensor.name == "lm_head.weight").unwrap();
    head.bytes.fill(0);
    common::write_safetensors(&path, &tensors);
    let failed = |flags| {
        let report = Report::of(&dir.0, flags);
        let failed = report.failed().into_iter().filter(|id| *id != "model.tokenizer");
        failed.map(String::from).collect::<Vec<_>>()
    };
    assert_eq!(failed(&[]), [""; 0]);
    assert_eq!(failed(&["--deep"]), ["model.first_token"]);
}

/// One more shard of 128 MiB, which takes no room on disk.
#[test]
fn a_large_shard_is_read_to_measure_its_drive() {
    let dir = demo_copy("speed");
    let header = r#"{"large":{"dtype":"U8","shape":[134217728],"data_offsets":[0,134217728]}} "#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    let path = dir.0.join("large.safetensors");
    std::fs::write(&path, &bytes).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(bytes.len() as u64 + (128 << 20)).unwrap();
    for (flags, is_deep) in [(&[][..], false), (&["--deep"], true)] {
        let report = Report::of(&dir.0, flags);
        let (status, summary) = report.check("storage.speed");
        assert!(status == "pass" || status == "warn", "{status}: {summary}");
        assert!(summary.contains(" GB/s buffered"), "{summary}");
        assert_eq!(summary.contains("8 in flight"), is_deep, "{summary}");
    }
}

/// Six shards, three streams and what else is open; the soft limit is raised, the hard one named.
#[test]
fn a_low_limit_of_open_files_is_raised_or_named() {
    let model = common::fixture("g_bf16_sharded");
    let info = |limit: &str| {
        let script = format!("ulimit {limit} && exec \"$0\" info --model \"$1\"");
        Command::new("sh").args(["-c", &script]).arg(program()).arg(&model).output().unwrap()
    };
    let raised = info("-Sn 9");
    assert!(raised.status.success(), "{raised:?}");
    let refused = info("-n 12");
    assert_eq!(refused.status.code(), Some(1));
    let error = String::from_utf8(refused.stderr).unwrap();
    for words in ["g_bf16_sharded: ", "the limit is 12: ", "ulimit -n "] {
        assert!(error.contains(words), "{error}");
    }
}
