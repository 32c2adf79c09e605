//! The program as its users meet it: exit codes, streams, help texts and machine-readable output.

mod common;

use colibri::json::{self, Limits, Value};
use common::{TempDir, fixture};
use std::io::{Read, Write};
use std::process::{Command, Output, Stdio};

/// Runs `coli` without the environment's own settings.
fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coli"));
    command.args(args);
    for name in ["COLI_MODEL", "COLI_MODEL_DIRS", "COLI_MODEL_MIRROR", "CTX", "RAM_GB", "NGEN"]
        .into_iter()
        .chain(["PIN_GB", "USAGE_SAVE", "DRAFT"])
    {
        command.env_remove(name);
    }
    // Models that tests share stay as they are.
    command.env("COLI_USAGE", "off");
    command
}

fn coli(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn with_stdin(args: &[&str], input: &[u8]) -> Output {
    let mut child = command(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

fn model(name: &str) -> String {
    fixture(name).display().to_string()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Stdout as exactly one JSON object and a newline.
fn one_object(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    let line = text(&output.stdout).strip_suffix('\n').unwrap();
    assert!(!line.contains('\n'), "more than one line: {line}");
    let value = json::parse(line.as_bytes(), Limits::default()).unwrap();
    assert!(value.as_object().is_some());
    value
}

#[test]
fn help_and_version_exist_everywhere_and_every_verb_shows_an_example() {
    let help = coli(&["--help"]);
    assert!(help.status.success() && help.stderr.is_empty());
    assert_eq!(text(&coli(&["--version"]).stdout), format!("coli {}\n", colibri::VERSION));
    for verb in colibri::cli::VERBS {
        assert!(text(&help.stdout).contains(verb.name));
        let help = coli(&[verb.name, "--help"]);
        assert_eq!(help, coli(&["help", verb.name]), "two help texts of {}", verb.name);
        let stdout = text(&help.stdout);
        assert!(help.status.success());
        assert!(!stdout.contains(") ("), "two brackets in a row: {stdout}");
        assert!(stdout.contains("example:"), "{}", verb.name);
        let has_model = !["trace", "convert"].contains(&verb.name);
        assert_eq!(stdout.contains("--model DIR"), has_model, "{}", verb.name);
    }
}

#[test]
fn wrong_usage_exits_with_2_and_leaves_stdout_empty() {
    let model = model("a_seed");
    let cases: [&[&str]; 18] = [
        &[],
        &["run", "--model", &model, "--ids", "1", "--logit-bias", "5"],
        &["run", "--model", &model, "--ids", "1", "--logit-bias", "5:1,x:1"],
        &["run", "--model", &model, "--ids", "1", "--presence-penalty", "3"],
        &["frobnicate"],
        &["run", "--modle", &model, "hi"],
        &["score", "hi"],
        &["run", "--model", &model],
        &["run", "--model", &model, "--ids", "1", "hi"],
        &["run", "--model", &model, "--temp", "hot", "hi"],
        &["run", "--model", &model, "--ids", "1,x"],
        &["logits", "--model", &model],
        &["logits", "--model", &model, "--ids", "1", "--ref", "ref.json"],
        &["oracle", "--model", &model, "--tolerance", "1"],
        &["run", "--model", &model, "--raw", "--think", "--prompt-file", "prompt.txt"],
        &["run", "--model", &model, "--ids", "1", "--stop", "a", "--stop", ""],
        &["run", "--model", &model, "--ids", "1", "--direct", "maybe"],
        &["help", "frobnicate"],
    ];
    for args in cases {
        let output = coli(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty() && text(&output.stderr).starts_with("coli: "));
    }
    let output = command(&["info", "--model", "a\x1b[2Jb"]).output().unwrap();
    assert!(!output.stderr.contains(&0x1b), "{output:?}");
    let output = command(&["run", "--model", &model, "--ids", "1"]).env("CTX", "many").output();
    assert!(text(&output.unwrap().stderr).contains("CTX: expected a number from 1 to"));
    let cases: [(&[&str], &str); 4] = [
        (
            &["run", "--model", &model, "--ids", "1", "--logit-bias", "3:1, 256:1"],
            "coli: run: --logit-bias: expected token ids below 256, found 256\n",
        ),
        (&["run", "--modle", &model], "coli: run: unknown flag --modle, did you mean --model?\n"),
        (
            &["run", "--model", &model, "--ids", "1", "--top-p", "0"],
            "coli: run: --top-p: expected a number above 0 and at most 1, found 0\n",
        ),
        (&["logits", "--model", &model], "--ids 3,14,159 --out"),
    ];
    for (args, expected) in cases {
        let error = coli(args);
        assert!(text(&error.stderr).contains(expected), "{args:?}: {error:?}");
    }
}

#[test]
fn failures_exit_with_1_and_name_the_file() {
    let output = coli(&["info", "--model", "does/not/exist"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("does/not/exist/config.json"), "{output:?}");
    // A shard that cannot be opened: a dangling link, which no privilege can read.
    let dir = TempDir::with_fixture("dangling", "a_seed");
    std::os::unix::fs::symlink("nowhere", dir.0.join("out-00001.safetensors")).unwrap();
    let output = coli(&["info", "--model", &dir.0.display().to_string()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("out-00001.safetensors"), "{output:?}");
    // The same for files that are optional: a link to nowhere is not an absent file.
    for file in ["tokenizer.json", "generation_config.json"] {
        let dir = TempDir::with_fixture(&format!("dangling-{file}"), "a_seed");
        std::os::unix::fs::symlink("nowhere", dir.0.join(file)).unwrap();
        let output = coli(&["info", "--model", &dir.0.display().to_string()]);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains(file), "{output:?}");
    }
    // Text without a tokenizer.
    let output = coli(&["run", "--model", &model("a_seed"), "hi"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no tokenizer.json"), "{output:?}");
}

#[test]
fn oracle_passes_on_the_reference_and_fails_on_another() {
    let gold = fixture("a_seed").join("logits_cfgeps.f32").display().to_string();
    let args = ["oracle", "--model", &model("a_seed"), "--logits", &gold, "--tolerance", "1e-5"];
    let output = coli(&args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("teacher-forcing 32/32 · greedy 20/20 · max|Δlogit|"));

    // One wrong prediction, or logits of another evaluation, and the check does not hold.
    let dir = TempDir::new("oracle");
    let wrong = dir.0.join("ref.json");
    let reference = std::fs::read_to_string(fixture("a_seed").join("ref.json")).unwrap();
    std::fs::write(&wrong, reference.replace("\"tf_pred\": [139,", "\"tf_pred\": [138,")).unwrap();
    let wrong = wrong.display().to_string();
    let output = coli(&["oracle", "--model", &model("a_seed"), "--ref", &wrong, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let value = json::parse(&output.stdout, Limits::default()).unwrap();
    assert!(text(&output.stderr).ends_with("the engine does not match: teacher forcing\n"));
    let forced = value.get("teacher_forcing").unwrap();
    assert_eq!(forced.get("matched").unwrap().as_u64(), Some(31));
    assert_eq!(value.get("pass").unwrap().as_bool(), Some(false));
    let other = fixture("a_seed").join("logits_gold.f32").display().to_string();
    let args = ["oracle", "--model", &model("a_seed"), "--logits", &other, "--tolerance", "1e-5"];
    let output = coli(&args);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).ends_with("the engine does not match: logits\n"));
}

/// FNV-1a computed here over the file, and the file's size.
#[test]
fn logits_prints_the_hash_of_the_bytes_that_it_wrote() {
    let dir = TempDir::new("logits");
    let out = dir.0.join("logits.f32").display().to_string();
    let args = ["logits", "--model", &model("e_odd_untied"), "--ids", "5,6,7", "--out", &out];
    let value = one_object(&coli(&args));
    let bytes = std::fs::read(&out).unwrap();
    assert_eq!(bytes.len(), 3 * 251 * 4);
    assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 1, "something else is left");
    let hash = bytes.iter().fold(0xcbf29ce484222325u64, |hash, byte| {
        (hash ^ *byte as u64).wrapping_mul(0x100000001b3)
    });
    assert_eq!(value.get("fnv1a64").unwrap().as_str(), Some(format!("{hash:016x}").as_str()));
    assert_eq!(value.get("tokens").unwrap().as_u64(), Some(3));
}

/// A directory that holds config.json alone: with its first weight the last case fails.
#[test]
fn bad_input_is_refused_before_any_weight_is_looked_for() {
    let dir = TempDir::new("no-weights");
    std::fs::copy(fixture("a_seed").join("config.json"), dir.0.join("config.json")).unwrap();
    let short = dir.0.join("short.f32");
    std::fs::write(&short, [0; 12]).unwrap();
    let reference = fixture("a_seed").join("ref.json").display().to_string();
    let (short, out) = (short.display().to_string(), dir.0.join("none/out").display().to_string());
    let cases: [(&[&str], &str); 9] = [
        (&["run", "hi"], "no tokenizer.json"),
        (&["run", "--ids", "7", "--stop", "x"], "--stop: "),
        (&["run", "--ids", "7,256"], "token 256 at position 1: expected an id below 256"),
        (&["run", "--ids", "7,8,9", "--ctx", "2"], "3 tokens do not fit the context of 2"),
        (&["logits", "--ids", "300"], "token 300 at position 0"),
        (&["logits", "--ids", "1", "--out", &out], "No such file or directory"),
        (&["logits", "--ids", "1", "--out", "/dev/full"], "/dev/full: expected a regular file"),
        (&["oracle", "--ref", &reference, "--logits", &short], "expected 32768 bytes"),
        (&["run", "--ids", "7"], "no .safetensors file"),
    ];
    for (args, expected) in cases {
        let output = coli(&[args, &["--model", &dir.0.display().to_string()]].concat());
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(text(&output.stderr).contains(expected), "{args:?}: {output:?}");
    }
}

/// The output head is as large as floats get: its logits are not finite.
#[test]
fn logits_that_fail_leave_no_file_and_an_older_one_as_it_was() {
    let dir = TempDir::with_fixture("infinite", "a_seed");
    let path = dir.0.join("model.safetensors");
    let mut tensors = common::read_safetensors(&path);
    let head = tensors.iter_mut().find(|tensor| tensor.name == "lm_head.weight").unwrap();
    head.bytes.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&f32::MAX.to_le_bytes()));
    common::write_safetensors(&path, &tensors);
    let out = TempDir::new("infinite-out");
    let file = out.0.join("logits.f32");
    let names = || std::fs::read_dir(&out.0).unwrap().map(|e| e.unwrap().file_name());
    let model = dir.0.display().to_string();
    let args = ["logits", "--model", &model, "--ids", "1", "--out", &file.display().to_string()];
    for older in [None, Some("older")] {
        older.into_iter().for_each(|text| std::fs::write(&file, text).unwrap());
        let output = coli(&args);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("the logit of token"), "{output:?}");
        assert_eq!(names().count(), older.iter().count());
        assert_eq!(std::fs::read_to_string(&file).ok().as_deref(), older);
    }
}

#[test]
fn run_on_ids_reproduces_the_reference_and_counts_what_it_did() {
    let reference = common::read_json(&fixture("a_seed").join("ref.json"));
    let full = common::integers(reference.get("full_ids").unwrap());
    let prompt: Vec<String> = full[..12].iter().map(u32::to_string).collect();
    let args =
        ["run", "--model", &model("a_seed"), "--ids", &prompt.join(","), "-n", "20", "--temp", "0"];
    let plain = coli(&args);
    let want: Vec<String> = full[12..].iter().map(u32::to_string).collect();
    assert_eq!(text(&plain.stdout), want.join(",") + "\n");
    let value = one_object(&coli(&[&args[..], &["--json"]].concat()));
    assert_eq!(common::integers(value.get("ids").unwrap()), full[12..]);
    assert_eq!(value.get("finish_reason").unwrap().as_str(), Some("length"));
    assert_eq!(value.get("prompt_tokens").unwrap().as_u64(), Some(12));
    assert!(value.get("experts").unwrap().get("misses").unwrap().as_u64() > Some(0));
    assert!(value.get("peak_rss_bytes").unwrap().as_u64() > Some(1_000_000));
}

/// The configured end-of-sequence id is what the model says first: the turn ends at once, with
/// nothing of it in the reply. Ids of generation_config.json count as well.
#[test]
fn every_stop_id_ends_the_turn_and_never_reaches_the_reply() {
    let reference = common::read_json(&fixture("a_seed").join("ref.json"));
    let full = common::integers(reference.get("full_ids").unwrap());
    let prompt: Vec<String> = full[..12].iter().map(u32::to_string).collect();
    let config = std::fs::read_to_string(fixture("a_seed").join("config.json")).unwrap();
    for (file, stop, replied) in [
        ("config.json", full[12], 0),
        ("config.json", full[14], 2),
        ("generation_config.json", full[13], 1),
    ] {
        let dir = TempDir::with_fixture(&format!("stop-{stop}"), "a_seed");
        let eos = format!("\"eos_token_id\": [1, {stop}]");
        let changed = match file {
            "config.json" => config.replace("\"eos_token_id\": 1", &eos),
            _ => format!("{{{eos}}}"),
        };
        std::fs::write(dir.0.join(file), changed).unwrap();
        let dir = dir.0.display().to_string();
        let args = ["run", "--model", &dir, "--ids", &prompt.join(","), "--temp", "0", "--json"];
        let value = one_object(&coli(&args));
        assert_eq!(value.get("finish_reason").unwrap().as_str(), Some("stop"));
        assert_eq!(common::integers(value.get("ids").unwrap()), full[12..12 + replied]);
    }
}

/// Whatever their order, the text that is complete first ends the reply.
/// The reply of a run that starts from a saved session, and of one whose file is of another model.
#[test]
fn a_session_is_announced_and_changes_no_token() {
    let dir = TempDir::new("cli-session");
    let path = dir.0.join("s");
    let path = path.to_str().unwrap();
    let run = |name: &str, ids: &str, rest: &[&str]| {
        let model = model(name);
        let args = ["run", "--model", &model, "--temp", "0", "-n", "6", "--ids", ids];
        coli(&[&args[..], rest].concat())
    };
    let first = run("b_dsa_full", "1,2,3,4", &["--session", path]);
    assert!(first.status.success() && first.stderr.is_empty(), "{}", text(&first.stderr));
    let prompt = format!("1,2,3,4,{},9", text(&first.stdout).trim());
    let second = run("b_dsa_full", &prompt, &["--session", path]);
    assert_eq!(second.stdout, run("b_dsa_full", &prompt, &[]).stdout);
    // The last token of a reply is drawn and never fed.
    let announced = text(&second.stderr);
    let words =
        ["resumes 9 tokens saved ", " ago, the prompt starts with 9 of them; delete the file"];
    assert!(words.iter().all(|words| announced.contains(words)), "{announced}");
    assert!(announced.contains(path), "{announced}");
    let other = run("a_seed", &prompt, &["--session", path]);
    assert_eq!((other.status.code(), text(&other.stdout)), (Some(1), ""));
    assert!(text(&other.stderr).contains("saved with other config.json"));
    // What cannot be saved is said behind the whole reply.
    let nowhere = run("b_dsa_full", &prompt, &["--session", "/nowhere/s"]);
    assert_eq!((nowhere.status.code(), &nowhere.stdout), (Some(1), &second.stdout));
    assert!(text(&nowhere.stderr).contains("/nowhere/s: "), "{}", text(&nowhere.stderr));
}

#[test]
fn each_of_several_stop_texts_ends_the_reply() {
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/demo");
    let demo = demo.display().to_string();
    let args = ["run", "--model", &demo, "--raw", "--temp", "0", "-n", "16", "It was"];
    let whole = coli(&args);
    let words: Vec<&str> = text(&whole.stdout).split_whitespace().collect();
    let (early, late) = (words[2], words[words.len() - 2]);
    let want = &text(&whole.stdout)[..text(&whole.stdout).find(early).unwrap()];
    for stops in [["--stop", early, "--stop", late], ["--stop", late, "--stop", early]] {
        let stopped = coli(&[&args[..], &stops].concat());
        assert_eq!(text(&stopped.stdout), format!("{want}\n"), "{stops:?} in {words:?}");
    }
}

#[test]
fn the_same_seed_draws_the_same_tokens() {
    let run = |seed: &str| {
        let args = ["run", "--model", &model("b_dsa_full"), "--ids", "1,2,3", "-n", "24"];
        text(&coli(&[&args[..], &["--temp", "1.5", "--seed", seed]].concat()).stdout).to_string()
    };
    assert_eq!(run("7"), run("7"));
    assert_ne!(run("7"), run("8"));
}

/// Only tokens as likely as the best are left: the draw is the greedy one. Without it, it is not.
#[test]
fn min_p_of_one_leaves_the_best_token_alone() {
    let model = model("b_dsa_full");
    let args = ["run", "--model", &model, "--ids", "1,2,3", "-n", "24", "--seed", "7", "--temp"];
    let run = |rest: &[&str]| text(&coli(&[&args[..], rest].concat()).stdout).to_string();
    assert_eq!(run(&["1.5", "--min-p", "1"]), run(&["0"]));
    assert_ne!(run(&["1.5"]), run(&["0"]));
}

/// Greedy text repeats itself; each penalty alone ends that. A prompt of twenty times token 5 takes
/// nothing from its logit, twenty of them in the reply take 40: more than the bias over token 7.
#[test]
fn penalties_and_biases_change_what_is_chosen() {
    let run = |prompt: &str, rest: &[&str]| {
        let model = model("b_dsa_full");
        let args = ["run", "--model", &model, "--ids", prompt, "--temp", "0"];
        let output = coli(&[&args[..], rest].concat());
        let ids = text(&output.stdout).trim().split(',').map(|id| id.parse().unwrap());
        ids.collect::<Vec<u32>>()
    };
    let repeats = |rest: &[&str]| {
        let mut ids = run("5,5,5", &[&["-n", "12"][..], rest].concat());
        ids.sort_unstable();
        ids.windows(2).any(|pair| pair[0] == pair[1])
    };
    assert!(repeats(&[]));
    for flag in ["--repetition-penalty", "--presence-penalty", "--frequency-penalty"] {
        assert!(!repeats(&[flag, "2"]), "{flag}");
    }
    let prompt = ["5"; 20].join(",");
    let bias = ["--logit-bias", "5:60, 7:40", "-n", "20"];
    assert_eq!(run(&prompt, &bias), [5; 20]);
    let fewer = run(&prompt, &[&bias[..], &["--frequency-penalty", "2"]].concat());
    assert!(fewer[0] == 5 && fewer.contains(&7), "{fewer:?}");
}

/// The signal comes when the first piece of text has; thousands of tokens are still to come.
#[test]
fn an_interrupted_run_ends_its_line_and_exits_with_130() {
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/demo");
    let demo = demo.display().to_string();
    let args = ["run", "--model", &demo, "--raw", "--temp", "0", "-n", "4000", "It was"];
    let mut child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert_eq!(text(&output.stderr), "coli: interrupted\n");
    assert!(output.stdout.ends_with(b"\n"));
}

#[test]
fn tokenize_reads_stdin_and_decodes_its_own_output() {
    let model = model("tokenizer");
    let line = "Grüße, 1234 <|user|> 😀\n";
    let ids = with_stdin(&["tokenize", "--model", &model], line.as_bytes());
    assert!(ids.status.success());
    let back = with_stdin(&["tokenize", "--model", &model, "--decode"], &ids.stdout);
    assert_eq!(text(&back.stdout), line);
    let bad = with_stdin(&["tokenize", "--model", &model], b"a\xffb");
    assert_eq!(bad.status.code(), Some(1));
    assert!(text(&bad.stderr).contains("not UTF-8 at byte 1"), "{bad:?}");
}

/// A reference that is not a number passes no check, whatever the tolerance.
#[test]
fn oracle_refuses_a_reference_that_is_not_finite() {
    let dir = TempDir::new("nan");
    let gold = dir.0.join("gold.f32");
    let mut bytes = std::fs::read(fixture("a_seed").join("logits_gold.f32")).unwrap();
    bytes[4 * 256 + 8..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&gold, bytes).unwrap();
    let gold = gold.display().to_string();
    let args = ["oracle", "--model", &model("a_seed"), "--logits", &gold, "--tolerance", "1e9"];
    let output = coli(&args);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("logit 2 of position 1 is NaN"), "{output:?}");
}

/// A full disk behind stdout or stderr is an exit code, never a panic.
#[test]
fn a_full_disk_behind_the_output_is_not_a_panic() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let model = model("a_seed");
    let cases: [&[&str]; 5] = [
        &["--help"],
        &["info", "--model", &model],
        &["oracle", "--model", &model],
        &["run", "--model", &model, "--ids", "1", "-n", "2"],
        &["logits", "--model", &model, "--ids", "1"],
    ];
    for args in cases {
        let output = command(args).stdout(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(text(&output.stderr).starts_with("coli: stdout: "), "{args:?}: {output:?}");
    }
    let status = command(&["run", "--bogus"]).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(2));
}

/// Pipes and devices in place of files are refused before they block or fill the memory.
#[test]
fn files_that_are_not_regular_are_refused() {
    for file in ["tokenizer.json", "config.json", "ref.json"] {
        let dir = TempDir::with_fixture(&format!("device-{file}"), "a_seed");
        let path = dir.0.join(file);
        let _ = std::fs::remove_file(&path);
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        let output = coli(&["oracle", "--model", &dir.0.display().to_string()]);
        assert_eq!(output.status.code(), Some(1), "{file}");
        let error = text(&output.stderr);
        assert!(error.contains(file) && error.contains("expected a regular file"), "{error}");
    }
}

/// What the template alone may write is banned, what ends a turn never is.
#[test]
fn template_tokens_are_banned_and_stop_tokens_are_not() {
    let dir = TempDir::with_fixture("banned", "a_seed");
    let config = std::fs::read_to_string(dir.0.join("config.json")).unwrap();
    let changed = config.replace("\"eos_token_id\": 1", "\"eos_token_id\": [255, 3]");
    std::fs::write(dir.0.join("config.json"), changed).unwrap();
    let engine = colibri::engine::Engine::open(&dir.0, Default::default(), |_, _| {}).unwrap();
    assert_eq!(engine.stop_tokens(), [255, 3]);
    assert!(engine.never_sampled().is_empty());
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/demo");
    let engine = colibri::engine::Engine::open(&demo, Default::default(), |_, _| {}).unwrap();
    let tokenizer = engine.tokenizer().unwrap();
    let banned = engine.never_sampled();
    let id = |marker| tokenizer.token_id(marker).unwrap();
    for marker in ["[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<tool_response>"] {
        assert!(banned.contains(&id(marker)), "{marker}");
    }
    for marker in ["<|user|>", "<|endoftext|>", "<|observation|>", "</think>", "<tool_call>"] {
        assert!(!banned.contains(&id(marker)), "{marker}");
    }
    assert!(engine.stop_tokens().contains(&id("<|observation|>")));
}

/// `h_mtp` with its head's input projection as one scale a row at 4 bits, then at 8.
#[test]
fn info_and_doctor_warn_of_a_draft_head_with_four_bits_a_row() {
    for (bits, warns) in [(4, true), (8, false)] {
        let dir = TempDir::with_fixture(&format!("head-{bits}"), "h_mtp");
        let path = dir.0.join("model.safetensors");
        let mut tensors = common::read_safetensors(&path);
        let name = "model.layers.4.eh_proj.weight";
        let head = tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
        let weight_bytes = head.shape[0] * head.shape[1] * bits / 8;
        let rows = head.shape[0];
        (head.dtype, head.shape, head.bytes) = ("U8", vec![weight_bytes], vec![8; weight_bytes]);
        tensors.push(common::TestTensor {
            name: format!("{name}.qs"),
            dtype: "F32",
            shape: vec![rows],
            bytes: vec![0; rows * 4],
        });
        common::write_safetensors(&path, &tensors);
        let output = coli(&["info", "--model", &dir.0.display().to_string()]);
        assert!(output.status.success(), "{output:?}");
        let head = text(&output.stdout).lines().find(|line| line.contains("draft head")).unwrap();
        assert_eq!(head.contains("warning"), warns, "{head}");
        assert!(head.contains(&format!("int{bits}-row")), "{head}");
        assert!(text(&output.stdout).contains("built in (GLM-5.2)"));
        let output = coli(&["doctor", "--model", &dir.0.display().to_string()]);
        let head = if warns { "[warn] model.draft_head" } else { "[ ok ] model.draft_head" };
        assert!(text(&output.stdout).contains(head), "{output:?}");
    }
}

/// Sizes from the files' own headers: nothing in them may be missing from the classes.
#[test]
fn the_classes_of_info_hold_every_tensor_and_every_byte() {
    let mut seen = std::collections::BTreeSet::new();
    for name in ["a_seed", "g_bf16_sharded", "h_mtp", "i_tied_bias", "formats/mixed"] {
        let value = one_object(&coli(&["info", "--json", "--model", &model(name)]));
        let (mut tensors, mut bytes) = (0, 0);
        for entry in std::fs::read_dir(fixture(name)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                let file = std::fs::read(&path).unwrap();
                let header = u64::from_le_bytes(file[..8].try_into().unwrap());
                let parsed = json::parse(&file[8..8 + header as usize], Limits::default()).unwrap();
                let keys = parsed.as_object().unwrap().iter();
                tensors += keys.filter(|(key, _)| key != "__metadata__").count() as u64;
                bytes += file.len() as u64 - 8 - header;
            }
        }
        let classes = value.get("classes").unwrap().as_array().unwrap();
        let sum = |key: &str| classes.iter().map(|c| c.get(key).unwrap().as_u64().unwrap()).sum();
        assert_eq!((sum("tensors"), sum("bytes")), (tensors, bytes), "{name}");
        assert_eq!(value.get("bytes").unwrap().as_u64(), Some(bytes), "{name}");
        seen.extend(classes.iter().map(|c| c.get("class").unwrap().as_str().unwrap().to_string()));
    }
    for class in ["norm", "bias", "mtp layer", "router", "embedding and head"] {
        assert!(seen.contains(class), "no {class} in {seen:?}");
    }
    let plain = coli(&["info", "--model", &model("a_seed")]);
    assert!(text(&plain.stdout).starts_with("1 shard, "), "{plain:?}");
}

/// Integers at these paths of an object, `.` between the keys.
fn figures<const N: usize>(value: &Value, paths: [&str; N]) -> [u64; N] {
    paths.map(|path| {
        let found = path.split('.').try_fold(value, |value, key| value.get(key));
        found.and_then(Value::as_u64).unwrap_or_else(|| panic!("no integer at {path}"))
    })
}

/// `c_shared`, counted by hand as in the test of the plan: f32; 106,752 bytes resident, 576 of
/// cache for a token, 4 layers of 6 experts of 2304 bytes.
#[test]
fn plan_shows_the_bytes_that_a_person_counts() {
    let model = model("c_shared");
    let args = ["plan", "--model", &model, "--ctx", "100", "--cap", "2", "--chunk", "16"];
    let value = one_object(&coli(&[&args[..], &["--threads", "1", "--json"]].concat()));
    let file = std::fs::metadata(fixture("c_shared").join("model.safetensors")).unwrap().len();
    let names = ["shards", "model_bytes", "expert_bytes", "expert_count", "expert_layers"];
    let got = figures(value.get("model").unwrap(), names);
    assert_eq!(got, [1, file, 4 * 6 * 2304, 24, 4]);
    let names = ["model.typical_expert_bytes", "model.per_cap_bytes", "model.dense_bytes"];
    let info = one_object(&coli(&["info", "--json", "--model", &model]));
    let [all] = figures(&info, ["bytes"]);
    assert_eq!(figures(&value, names), [2304, 4 * 2304, all - 4 * 6 * 2304]);
    assert_eq!(value.get("classes"), info.get("classes"));
    let names = ["resident_bytes", "kv_bytes", "expert_bytes", "slots_per_layer", "scratch_bytes"];
    let [resident, kv, expert, slots, scratch] = figures(value.get("plan").unwrap(), names);
    assert_eq!((resident, kv, expert, slots), (106_752, 57_600, 2 * 4 * 2304, 2));
    let [total, ram] = figures(value.get("plan").unwrap(), ["total_bytes", "ram_bytes"]);
    assert_eq!((total, ram), (resident + kv + scratch + expert, total));
    let names = ["dense_bytes", "runtime_bytes", "expert_cache_bytes", "cache_slots_per_layer"];
    let tiers = value.get("tiers").unwrap();
    assert_eq!(figures(tiers.get("ram").unwrap(), names), [resident, kv + scratch, expert, 2]);
    let cold = figures(tiers, ["ram.warm_expert_bytes", "disk.cold_expert_bytes"]);
    assert_eq!(cold, [2 * 4 * 2304, 4 * 4 * 2304]);
    assert_eq!(figures(tiers, ["vram.budget_bytes", "vram.expert_capacity"]), [0, 0]);
    assert!(tiers.get("vram").unwrap().get("devices").unwrap().as_array().unwrap().is_empty());
    let bottleneck = value.get("expected_bottleneck").unwrap();
    assert_eq!(bottleneck.as_str(), Some("disk expert misses"));
    assert_eq!(value.get("warnings").unwrap().as_array().unwrap().len(), 1);
    assert_eq!(figures(&value, ["version"]), [2]);
    // All of it in memory; the experts that only a draft head has are counted as well.
    let value = one_object(&coli(&["plan", "--model", &model, "--json"]));
    assert_eq!(figures(&value, ["tiers.disk.cold_expert_bytes", "plan.slots_per_layer"]), [0, 6]);
    assert!(value.get("warnings").unwrap().as_array().unwrap().is_empty());
    let value = one_object(&coli(&["plan", "--model", &self::model("h_mtp"), "--json"]));
    let tensors = common::read_safetensors(&fixture("h_mtp").join("model.safetensors"));
    let experts = |prefix: &str| tensors.iter().filter(|t| t.name.starts_with(prefix)).count() / 3;
    let layers = (0..=4).map(|layer| experts(&format!("model.layers.{layer}.mlp.experts.")));
    let layers: Vec<usize> = layers.filter(|experts| *experts > 0).collect();
    assert!(experts("model.layers.4.mlp.experts.") > 0);
    let want = [layers.iter().sum::<usize>() as u64, layers.len() as u64];
    assert_eq!(figures(&value, ["model.expert_count", "model.expert_layers"]), want);
    let plain = coli(&args);
    assert!(plain.status.success(), "{plain:?}");
    for start in ["policy ", "model ", "disk ", "RAM ", "VRAM ", "limit ", "warn "] {
        assert!(text(&plain.stdout).lines().any(|line| line.starts_with(start)), "{plain:?}");
    }
}

/// The flags that a refusal names are taken at their word, to the byte and to the token.
#[test]
fn a_refused_plan_names_the_least_ram_and_the_largest_ctx() {
    let model = model("c_shared");
    let args = |verb| [verb, "--model", &*model, "--chunk", "16", "--threads", "1"];
    let plan =
        |ram: &str, ctx: &str| coli(&[&args("plan")[..], &["--ram", ram, "--ctx", ctx]].concat());
    let refused = plan("0.01", "100000");
    assert_eq!((refused.status.code(), refused.stdout.len()), (Some(1), 0), "{refused:?}");
    let error = text(&refused.stderr);
    let number = |flag: &str| {
        let rest = &error[error.find(flag).unwrap() + flag.len()..];
        rest.split_whitespace().next().unwrap().to_string()
    };
    let (ram, ctx) = (number("--ram "), number("--ctx "));
    assert!(plan(&ram, "100000").status.success(), "{error}");
    let less = format!("{:.9}", (ram.parse::<f64>().unwrap() * 1e9 - 1.0) / 1e9);
    assert_eq!(plan(&less, "100000").status.code(), Some(1), "{less}: {error}");
    assert!(plan("0.01", &ctx).status.success(), "{error}");
    let more = (ctx.parse::<u32>().unwrap() + 1).to_string();
    assert_eq!(plan("0.01", &more).status.code(), Some(1), "{more}: {error}");
    // A run is refused by the same words, before it reads a weight.
    let rest = ["--ram", "0.01", "--ctx", "100000", "--ids", "1"];
    assert_eq!(text(&coli(&[&args("run")[..], &rest].concat()).stderr), error);
}

/// `b_dsa_full` without its indexer, whose index_topk is 8. What counts is what is fed: the prompt
/// and all new tokens but the last.
#[test]
fn dense_attention_is_noted_only_where_the_run_exceeds_index_topk() {
    let dir = TempDir::with_fixture("dense", "b_dsa_full");
    let path = dir.0.join("model.safetensors");
    let mut tensors = common::read_safetensors(&path);
    tensors.retain(|tensor| !tensor.name.contains(".indexer."));
    common::write_safetensors(&path, &tensors);
    let model = dir.0.display().to_string();
    for (new_tokens, notes) in [("6", false), ("7", true)] {
        let output = coli(&["run", "--model", &model, "--ids", "1,2,3", "-n", new_tokens]);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(text(&output.stderr).contains("no indexer tensors"), notes, "{output:?}");
    }
}

/// A reader that goes away early is not an error worth a word.
/// A file of 3 MiB has three blocks of one; each row names its way, and one shorter than a block is
/// refused.
#[test]
fn iobench_measures_every_way_and_depth_that_is_asked_for() {
    let dir = TempDir::new("iobench");
    let path = dir.0.join("blocks");
    std::fs::write(&path, vec![1; 3 << 20]).unwrap();
    let file = path.to_str().unwrap();
    let flags = ["--block-mb", "1", "--reads", "5", "--queue", "1,3", "--json"];
    let output = coli(&[&["iobench", file], &flags[..]].concat());
    let object = one_object(&output);
    let Some(Value::Array(rows)) = object.get("rows") else { panic!("no rows: {object:?}") };
    let buffered =
        |row: &&Value| matches!(row.get("mode"), Some(Value::String(m)) if m == "buffered");
    assert_eq!(rows.iter().filter(buffered).count(), 2);
    let output = coli(&["iobench", file, "--block-mb", "4"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("shorter than one block of 4194304 bytes"));
    let output = coli(&["iobench", file, "--queue", "0"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_closed_pipe_is_a_quiet_end() {
    let mut child =
        command(&["run", "--help"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    child.wait().unwrap();
    assert_eq!(stderr, "");
}

#[test]
fn a_checkout_speaks_without_being_given_a_model() {
    let args = ["run", "--raw", "--temp", "0", "-n", "8", "--usage", "off", "Emma was"];
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let start = |dir: &std::path::Path| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_coli"));
        program.args(args).env_remove("COLI_MODEL").current_dir(dir).output().unwrap()
    };
    let here = start(root);
    assert!(here.status.success());
    assert!(text(&here.stderr).contains("no --model is given: the small one in oracle/demo"));
    let demo = root.join("oracle/demo").display().to_string();
    let named = coli(&[&args[..], &["--model", &demo]].concat());
    assert_eq!(text(&here.stdout), text(&named.stdout));
    let elsewhere = start(&root.join("src"));
    assert_eq!(elsewhere.status.code(), Some(2));
    assert!(text(&elsewhere.stderr).contains("--model is required"));
}

#[test]
fn a_schema_holds_behind_the_thought_only() {
    let model = common::serve::scripted("think-schema", "<think>hm</think>Wait.<|user|>");
    let schema = model.0.join("schema.json");
    std::fs::write(&schema, "{\"const\":7}").unwrap();
    let [dir, schema] = [&model.0, &schema].map(|path| path.display().to_string());
    let args = ["run", "--model", &dir, "--think", "--temp", "0", "--json", "--schema", &schema];
    let value = one_object(&coli(&[&args[..], &["Hi"]].concat()));
    assert_eq!(value.get("reasoning").and_then(Value::as_str), Some("hm"));
    assert_eq!(value.get("text").and_then(Value::as_str), Some("7"));
}
