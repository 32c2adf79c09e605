//! What runs learn and what is pinned by it: the file's life, the budget whatever is pinned, and
//! the bits, which nothing of it changes. Traces of routing and their replay.

mod common;

use colibri::config::Config;
use colibri::engine::Options;
use colibri::experts::ExpertStore;
use colibri::experts::trace::Trace;
use colibri::experts::usage::Usage;
use colibri::model::Unobserved;
use colibri::plan::Limit;
use colibri::safetensors::Directory;
use colibri::weights::Weights;
use common::{TempDir, all_logits, fixture, integers, open, read_json};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

/// `coli` with the words of `line`, MODEL being `dir`.
fn coli(dir: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coli"));
    for name in ["COLI_USAGE", "USAGE_SAVE", "PIN_GB"] {
        command.env_remove(name);
    }
    let dir = dir.display().to_string();
    let words = line.split(' ').map(|word| word.replace("MODEL", &dir));
    command.args(words.collect::<Vec<_>>()).output().unwrap()
}

/// The same, which must succeed: its stdout, and what it notes.
fn run(dir: &Path, line: &str) -> (String, String) {
    let output = coli(dir, line);
    let [out, notes] = [output.stdout, output.stderr].map(|b| String::from_utf8(b).unwrap());
    assert!(output.status.success(), "{line}: {notes}");
    (out, notes)
}

const RUN: &str = "run --model MODEL --ids 1,2,3,4,5 --temp 0 -n 4";

/// Eight positions are fed: five of the prompt and three of the reply.
#[test]
fn every_run_adds_each_choice_to_the_file_once() {
    let dir = TempDir::with_fixture("usage", "c_shared");
    let config = Config::load(&dir.0).unwrap();
    let file = dir.0.join(".coli_usage");
    let counts = |runs: u64| {
        let usage = Usage::read(&file, config.num_layers, config.n_routed_experts).unwrap();
        let all: u64 = usage.iter().map(|(_, choices)| choices).sum();
        assert_eq!(all, runs * 8 * 4 * config.top_k as u64, "{runs} runs");
        usage.iter().collect::<Vec<_>>()
    };
    let (first_out, notes) = run(&dir.0, RUN);
    assert_eq!(notes, "");
    let first = counts(1);
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.starts_with("-1 6 6\n-2 1 3815245270\n2 0 "), "{text}");
    assert!(!text.contains(" 0\n"), "{text}");
    // Again, with what was learned, with pins that change: twice the counts and the same tokens.
    let pinned = format!("{RUN} --cap 2 --pin 0.000009 --repin 2");
    assert_eq!(run(&dir.0, &pinned), (first_out, String::new()));
    for ((id, once), (again, twice)) in first.iter().zip(counts(2)) {
        assert_eq!((*id, 2 * once), (again, twice));
    }
    run(&dir.0, &format!("{RUN} --usage off"));
    counts(2);
    let names = std::fs::read_dir(&dir.0).unwrap().map(|e| e.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().ends_with(".tmp")));
}

#[test]
fn a_file_that_is_not_this_models_is_named_and_left_alone() {
    let dir = TempDir::with_fixture("usage-other", "c_shared");
    let file = dir.0.join(".coli_usage");
    for (text, part) in [
        ("-1 6 8\n2 0 4\n", "line 1: of another model: expected -1 6 6, found 6 8"),
        ("2 0 4\n2 1", "line 2: expected three integers, found \"2 1\""),
    ] {
        std::fs::write(&file, text).unwrap();
        let (_, notes) = run(&dir.0, RUN);
        assert!(notes.contains(".coli_usage: ") && notes.contains(part), "{notes}");
        assert_eq!(notes.lines().count(), 1, "{notes}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    }
}

#[test]
fn where_nothing_can_be_written_a_run_ends_well_with_one_note() {
    let (_, notes) = run(&fixture("c_shared"), &format!("{RUN} --usage /proc/self/usage"));
    assert!(notes.contains("/proc/self/usage: ") && notes.contains("is lost"), "{notes}");
    assert_eq!(notes.lines().count(), 1, "{notes}");
}

/// `c_shared`: slots for 8 experts of 2304 bytes, of which a layer needs top_k.
#[test]
fn pins_that_squeeze_out_a_layers_experts_are_refused_with_the_number_that_fits() {
    let top_k = Config::load(&fixture("c_shared")).unwrap().top_k;
    let most = format!("0.0000{:05}", (8 - top_k) * 2304);
    let most = most.trim_end_matches('0');
    let plan =
        |gb: &str| coli(&fixture("c_shared"), &format!("plan --model MODEL --cap 2 --pin {gb}"));
    let refused = plan("0.00002");
    assert_eq!(refused.status.code(), Some(1));
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(error.contains(&format!("give --pin {most} or less")), "{error}");
    assert!(plan(most).status.success());
}

/// A thousand times other pins, in stores of all sizes: what is wanted is there, and what is there
/// fits.
#[test]
fn pins_never_exceed_the_budget_or_displace_what_is_wanted() {
    let dir = fixture("d_groups_norm");
    let config = Config::load(&dir).unwrap();
    let directory = Arc::new(Directory::open(&dir).unwrap());
    let weights = Weights::bind(&directory, &config).unwrap();
    let layers: Vec<_> = weights.sparse_layers().collect();
    let expert_bytes = layers[0].1.experts[0].bytes();
    let mut seed = 7u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    for _ in 0..25 {
        let budget_bytes = expert_bytes + random(8 * expert_bytes);
        let mut store = ExpertStore::new(budget_bytes, expert_bytes).unwrap();
        for _ in 0..40 {
            store.pin(random(10 * expert_bytes), |_| expert_bytes);
            let (layer, moe) = layers[random(layers.len())];
            if random(4) == 0 {
                store.preload(&directory, layer, &moe.experts).unwrap();
            }
            let wanted: Vec<u32> =
                (0..moe.experts.len() as u32).filter(|_| random(3) == 0).collect();
            let chosen = wanted.iter().map(|e| (*e, 1));
            store.visit(layer, moe.experts.len(), 2, chosen);
            let count = store.ask(&directory, layer, &wanted, &moe.experts);
            let fit = budget_bytes / expert_bytes;
            assert_eq!(count, wanted.len().min(fit), "of {wanted:?}, with room for {fit}");
            while !wanted[..count].iter().all(|e| store.is_present((layer, *e as usize))) {
                store.receive(true).unwrap();
                assert!(store.held_bytes() <= budget_bytes);
            }
            assert!(store.held_bytes() <= budget_bytes);
        }
    }
}

/// All experts in memory, against two a layer with pins that change and with a past.
#[test]
fn logits_are_the_same_bits_whatever_is_learned_or_pinned() {
    let dir = TempDir::new("pinned-bits");
    let file = dir.0.join("usage");
    for name in ["c_shared", "b_dsa_full"] {
        let tokens = integers(read_json(&fixture(name).join("ref.json")).get("full_ids").unwrap());
        let options = |slots| {
            let limit = Limit::SlotsPerLayer(slots);
            Options { ctx_tokens: tokens.len(), chunk_rows: 3, limit, ..Options::default() }
        };
        let plain = open(&fixture(name), options(1000));
        let want = all_logits(&plain, &tokens, &mut Unobserved);
        let _ = std::fs::remove_file(&file);
        plain.save_usage(&file).unwrap();
        let pinned = Options { pin_bytes: 3000, repin_tokens: 4, ..options(4) };
        let engine = open(&fixture(name), pinned);
        engine.load_usage(&file).unwrap();
        assert!(all_logits(&engine, &tokens, &mut Unobserved) == want, "{name}");
        assert!(engine.expert_counters().misses > 0, "{name}: nothing was evicted");
    }
}

/// The trace of a run has what the fixture's reference says that the router chose.
#[test]
fn a_trace_has_every_choice_of_a_run() {
    let dir = TempDir::new("trace");
    let file = dir.0.join("run.trace");
    let ids: Vec<u32> = (1..=9).collect();
    let list: Vec<String> = ids.iter().map(u32::to_string).collect();
    let line = format!(
        "run --model MODEL --ids {} --temp 0 -n 3 --chunk 4 --usage {} --trace {}",
        list.join(","),
        dir.0.join("usage").display(),
        file.display()
    );
    run(&fixture("c_shared"), &line);
    let trace = Trace::read(&file).unwrap();
    let config = Config::load(&fixture("c_shared")).unwrap();
    let usage =
        Usage::read(&dir.0.join("usage"), config.num_layers, config.n_routed_experts).unwrap();
    // Prompt rows in passes of 4, 4 and 1, then two tokens that are fed back.
    let rows: Vec<usize> = trace.visits.iter().map(|visit| visit.rows).collect();
    assert_eq!(rows, [[4; 4], [4; 4], [1; 4], [1; 4], [1; 4]].concat());
    let layers: Vec<usize> = trace.visits.iter().map(|visit| visit.layer).collect();
    assert_eq!(layers, [2, 3, 4, 5].repeat(5));
    // Both saw the same choices, on different ways.
    assert_eq!(trace.usage(), usage);
    let full = coli(&fixture("c_shared"), &format!("{RUN} --usage off --trace /dev/full"));
    assert_eq!(full.status.code(), Some(1));
    let error = String::from_utf8(full.stderr).unwrap();
    assert!(error.contains("/dev/full: "), "{error}");
}

#[test]
fn a_note_behind_the_reply_has_a_line_of_its_own() {
    let program = env!("CARGO_BIN_EXE_coli");
    let dir = fixture("c_shared").display().to_string();
    let line = format!("{program} {RUN} --usage MODEL/none/usage 2>&1").replace("MODEL", &dir);
    let output = Command::new("sh").args(["-c", &line]).output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    let lost = shown.lines().find(|line| line.contains("is lost"));
    assert!(lost.is_some_and(|line| line.starts_with("coli: ")), "{shown}");
}

/// By hand, 16 requests: layer 1 asks for 0 1 four times, layer 2 for 2 3 | 4 5 | 2 3 | 4 5. With
/// three slots in each, layer 1 hits 6 times, and layer 2 has 3 4 5, hits 3, has 2 3 5 and hits 5.
/// Six slots for both hold all six experts.
#[test]
fn a_replay_counts_the_hits_that_a_person_counts() {
    let (out, _) = run(Path::new("."), "trace --slots 3 --json tests/fixtures/small.trace");
    let printed = colibri::json::parse(out.as_bytes(), Default::default()).unwrap();
    let replay = &printed.get("replays").unwrap().as_array().unwrap()[0];
    let rates = replay.get("hit_rates").unwrap();
    let rate = |name: &str| rates.get(name).unwrap().as_f64().unwrap();
    let found = ["layer-lru", "lru", "count+d", "optimum"].map(rate);
    assert_eq!(found, [8.0 / 16.0, 10.0 / 16.0, 10.0 / 16.0, 10.0 / 16.0]);
    for (text, part) in [
        ("coli-trace 2\n", "line 1: expected \"coli-trace 1\""),
        ("coli-trace 1\nlayers 3 experts 6\n", "line 2: expected \"layers N"),
        ("coli-trace 1\nlayers 3 experts 6 top_k 2\n3 1 0 1\n", "line 3: expected a layer from 0"),
        ("coli-trace 1\nlayers 3 experts 6 top_k 2\n1 1 1 1\n", "line 3: expected an expert"),
        ("coli-trace 1\nlayers 3 experts 6 top_k 2\n1 2 0 1\n", "line 3: expected 4 choices"),
        ("coli-trace 1\nlayers 3 experts 6 top_k 2\n1 1 0:2\n", "line 3: expected rows of an"),
    ] {
        let dir = TempDir::new("bad-trace");
        let file = dir.0.join("bad.trace");
        std::fs::write(&file, text).unwrap();
        let error = Trace::read(&file).unwrap_err().to_string();
        assert!(error.contains("bad.trace: ") && error.contains(part), "{error}");
    }
}
