//! Saved sessions: restored equals computed anew, whatever happened to the file in between.

mod common;

use colibri::engine::{Engine, Options, Session};
use colibri::model::Unobserved;
use colibri::plan::Limit;
use colibri::sample::{Params, Sampler};
use colibri::state::{ARITHMETIC, Sessions};
use common::{GOLDEN, Random, TempDir, fixture, full_ids, new_seed, open};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// With an indexer and a draft head; with an indexer on some layers; without.
const FIXTURES: [&str; 3] = ["h_mtp", "c_shared", "a_seed"];

/// Bytes in front of the first record.
const HEADER_BYTES: usize = 56;

fn options(drafts: Option<usize>) -> Options {
    let limit = Limit::SlotsPerLayer(1000);
    Options { ctx_tokens: 128, chunk_rows: 16, limit, drafts, threads: 1, ..Options::default() }
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn advance(session: &mut Session<'_>, tokens: &[u32]) -> Vec<u32> {
    bits(session.advance(tokens, &mut Unobserved).unwrap())
}

/// What a session that never saw a file computes.
fn cold(engine: &Engine, tokens: &[u32]) -> Vec<u32> {
    advance(&mut engine.session().unwrap(), tokens)
}

fn generate(session: &mut Session<'_>, prompt: &[u32], count: usize) -> (Vec<u32>, u64) {
    let vocab = session.engine().config().vocab_size;
    let mut sampler = Sampler::new(Params::GREEDY, vocab, Vec::new()).unwrap();
    let mut ids = Vec::new();
    let push = |id, _: &mut Unobserved| {
        ids.push(id);
        Ok(true)
    };
    session.generate(prompt, count, &mut sampler, &mut Unobserved, push).unwrap();
    (ids, session.draft_counters().accepted)
}

/// The message of a restoring that must fail.
fn refusal(engine: &Engine, path: &Path) -> String {
    engine.restore(path).err().expect("a file that must be refused").to_string()
}

/// Tokens that a restoring gives, with a check that what they lead to is what a cold run computes.
fn restored_tokens(engine: &Engine, path: &Path, all: &[u32]) -> usize {
    let Some((mut session, restored)) = engine.restore(path).unwrap() else { return 0 };
    assert_eq!((session.tokens(), restored.tokens), (&all[..restored.tokens], restored.tokens));
    assert_eq!(advance(&mut session, all), cold(engine, all), "{} tokens", restored.tokens);
    restored.tokens
}

#[test]
fn restored_logits_and_text_are_those_of_a_cold_run() {
    let dir = TempDir::new("state-cold");
    for name in FIXTURES {
        let tokens = full_ids(name);
        let half = tokens.len() / 2;
        for drafts in [Some(0), Some(3), None] {
            let path = dir.0.join(format!("{}-{drafts:?}", name));
            let engine = open(&fixture(name), options(drafts));
            let mut session = engine.session().unwrap();
            let (want, want_accepted) = generate(&mut session, &tokens[..half], 20);
            let mut session = engine.session().unwrap();
            advance(&mut session, &tokens[..half - 1]);
            let saved = session.save(&path).unwrap();
            assert_eq!(saved.tokens, half - 1);
            assert_eq!(saved.bytes_written, path.metadata().unwrap().len());
            drop(session);
            // Another engine, as after a restart, with other options that must not matter.
            let other = Options { chunk_rows: 5, ctx_tokens: 90, threads: 2, ..options(drafts) };
            let engine = open(&fixture(name), other);
            let (mut session, restored) = engine.restore(&path).unwrap().unwrap();
            assert_eq!((restored.tokens, session.tokens()), (half - 1, &tokens[..half - 1]));
            assert!(restored.age < Duration::from_secs(600));
            let (ids, accepted) = generate(&mut session, &tokens[..half], 20);
            assert_eq!(ids, want, "{name}, {drafts:?}");
            // A fixed number of drafts is right as often as without the file.
            assert!(drafts.is_none() || accepted == want_accepted, "{name}: {accepted}");
            drop(session);
            let (mut session, _) = engine.restore(&path).unwrap().unwrap();
            assert_eq!(advance(&mut session, &tokens), cold(&engine, &tokens), "{name}");
        }
    }
}

/// The trained head drafts behind a restored prefix as if it had read it itself.
#[test]
fn a_trained_head_goes_on_drafting_as_before() {
    let dir = TempDir::new("state-head");
    let path = dir.0.join("s");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/demo");
    let engine = open(&demo, options(Some(2)));
    let prompt: Vec<u32> = (300..340).collect();
    let mut session = engine.session().unwrap();
    let want = generate(&mut session, &prompt, 60);
    assert!(want.1 > 5, "the head of this model is often right");
    let whole = [&prompt[..], &want.0].concat();
    let mut session = engine.session().unwrap();
    for end in [13, 14, 39] {
        advance(&mut session, &prompt[..end]);
        session.save(&path).unwrap();
    }
    drop(session);
    let (mut session, _) = engine.restore(&path).unwrap().unwrap();
    assert_eq!(generate(&mut session, &prompt, 60), want);
    // An engine without the head reads the same file; what it appends has no rows of the head, and
    // drafts then come from the text alone.
    session.save(&path).unwrap();
    drop(session);
    let plain = open(&demo, options(Some(0)));
    assert_eq!(restored_tokens(&plain, &path, &whole), 99);
    let (mut session, _) = plain.restore(&path).unwrap().unwrap();
    advance(&mut session, &whole);
    session.save(&path).unwrap();
    drop(session);
    assert_eq!(restored_tokens(&engine, &path, &whole), 100);
    let (mut session, _) = engine.restore(&path).unwrap().unwrap();
    let next = generate(&mut session, &whole, 20).0;
    assert_eq!(next, generate(&mut engine.session().unwrap(), &whole, 20).0);
    // Nothing of the file is left, and the head drafts again.
    session.clear();
    let earlier = session.draft_counters().accepted;
    let (ids, accepted) = generate(&mut session, &prompt, 60);
    assert_eq!((ids, accepted - earlier), want);
}

/// A slot of the server takes a saved timeline into the memory that it has.
#[test]
fn a_session_that_held_another_timeline_restores_in_place() {
    let dir = TempDir::new("state-place");
    for (name, drafts) in [("h_mtp", Some(3)), ("c_shared", None), ("a_seed", Some(0))] {
        let (path, missing) = (dir.0.join(name), dir.0.join("missing"));
        let engine = open(&fixture(name), options(drafts));
        let tokens = full_ids(name);
        let other: Vec<u32> = tokens.iter().rev().copied().collect();
        let mut saved = engine.session().unwrap();
        advance(&mut saved, &tokens[..9]);
        saved.save(&path).unwrap();
        let mut session = engine.session().unwrap();
        advance(&mut session, &other[..20]);
        // Neither a file that another session has nor one that is not there costs the timeline.
        assert!(session.restore(&path).unwrap_err().to_string().contains("in use"));
        assert!(session.restore(&missing).unwrap().is_none());
        assert_eq!(session.tokens(), &other[..20]);
        drop(saved);
        assert_eq!(session.restore(&path).unwrap().unwrap().tokens, 9);
        assert_eq!(session.tokens(), &tokens[..9]);
        let mut fresh = engine.session().unwrap();
        let want = generate(&mut fresh, &tokens[..12], 15).0;
        assert_eq!(generate(&mut session, &tokens[..12], 15).0, want, "{name}");
        assert_eq!(session.save(&path).unwrap().tokens, session.tokens().len());
        assert_eq!(advance(&mut session, &tokens), cold(&engine, &tokens), "{name}");
    }
}

/// Lengths of the file after each of some turns, and their tokens.
fn write_turns(engine: &Engine, path: &Path, tokens: &[u32], ends: &[usize]) -> Vec<usize> {
    let mut session = engine.session().unwrap();
    let save = |end: &usize| {
        advance(&mut session, &tokens[..*end]);
        session.save(path).unwrap();
        path.metadata().unwrap().len() as usize
    };
    ends.iter().map(save).collect()
}

/// Damages a file in every place and restores it: `damage` changes the bytes at a place and returns
/// whether they may still be a file of ours.
fn damage_everywhere(name: &str, places: fn(&[usize]) -> Vec<usize>, cut: bool) {
    let dir = TempDir::new(&format!("state-damage-{name}-{cut}"));
    let path = dir.0.join("s");
    let engine = open(&fixture(name), options(Some(1)));
    let tokens = full_ids(name);
    let ends = [3, 4, 6];
    let lengths = write_turns(&engine, &path, &tokens, &ends);
    let bytes = std::fs::read(&path).unwrap();
    for at in places(&lengths) {
        let mut damaged = bytes.clone();
        match cut {
            true => damaged.truncate(at),
            false => damaged[at] ^= 1 << (at % 8),
        }
        std::fs::write(&path, &damaged).unwrap();
        if at < HEADER_BYTES && !cut {
            let error = refusal(&engine, &path);
            assert!(error.starts_with(path.to_str().unwrap()), "byte {at}: {error}");
            continue;
        }
        let whole = lengths.iter().take_while(|length| **length <= at).count();
        let want = if whole == 0 { 0 } else { ends[whole - 1] };
        let found = engine.restore(&path).unwrap();
        assert_eq!(found.as_ref().map_or(0, |(_, r)| r.tokens), want, "byte {at}");
        // Whatever was there, the next turn is saved behind what is valid.
        if at % 29 == 0 || at < HEADER_BYTES {
            let mut session = found.map_or_else(|| engine.session().unwrap(), |(s, _)| s);
            advance(&mut session, &tokens[..8]);
            session.save(&path).unwrap();
            drop(session);
            let (session, restored) = engine.restore(&path).unwrap().unwrap();
            assert_eq!((restored.tokens, session.tokens()), (8, &tokens[..8]), "byte {at}");
            if at % 58 == 0 {
                drop(session);
                assert_eq!(restored_tokens(&engine, &path, &tokens[..12]), 8, "byte {at}");
            }
        }
    }
}

#[test]
fn a_file_cut_anywhere_leaves_what_was_whole() {
    damage_everywhere("h_mtp", |l| (0..HEADER_BYTES + 40).chain(l[1] - 3..l[2]).collect(), true);
}

#[test]
fn a_changed_byte_anywhere_is_found() {
    damage_everywhere("h_mtp", |l| (0..l[2]).collect(), false);
}

/// Turns of all kinds, restarts and torn ends, against a plain list of what must be there.
#[test]
fn turns_cuts_and_restarts_in_any_order_keep_the_timeline() {
    let dir = TempDir::new("state-turns");
    let seed = new_seed();
    println!("COLI_FUZZ_SEED={seed}");
    let mut random = Random::new(seed);
    let engine = open(&fixture("b_dsa_full"), options(None));
    let ids = full_ids("b_dsa_full");
    let path = dir.0.join("s");
    let mut session = engine.session().unwrap();
    let (mut saved, mut before): (Vec<u32>, Vec<u8>) = Default::default();
    for turn in 0..150 {
        let mut next = saved[..random.below(saved.len() + 1)].to_vec();
        let shift = random.below(ids.len());
        next.extend(ids.iter().cycle().skip(shift).take(1 + random.below(12)));
        next.truncate(60);
        advance(&mut session, &next);
        let report = session.save(&path).unwrap();
        let after = std::fs::read(&path).unwrap();
        // Either appended to, or written anew: a kill in between leaves one of both.
        let is_appended = after.starts_with(&before);
        let written = if is_appended { after.len() - before.len() } else { after.len() };
        assert_eq!((report.bytes_written as usize, report.tokens), (written, next.len()));
        let position_bytes = 4 + 4 * engine_floats(&after, &next);
        assert!(after.len() < 3 * 61 * position_bytes, "turn {turn}: {} bytes", after.len());
        (saved, before) = (next, after);
        if random.below(4) == 0 {
            drop(session);
            if random.below(2) == 0 {
                // A turn that did not come to its end.
                let noise = (0..random.below(900)).map(|_| random.next() as u8);
                std::fs::write(&path, [before.clone(), noise.collect()].concat()).unwrap();
            }
            let restored = engine.restore(&path).unwrap().unwrap();
            assert_eq!(restored.0.tokens(), saved, "turn {turn}");
            session = restored.0;
            assert_eq!(advance(&mut session, &saved), cold(&engine, &saved), "turn {turn}");
        }
    }
}

#[test]
fn files_of_others_are_refused_by_name_and_left_alone() {
    let dir = TempDir::new("state-others");
    let path = dir.0.join("s");
    let engine = open(&fixture("a_seed"), options(None));
    let tokens = &[3, 14, 15, 9, 26][..];
    write_turns(&engine, &path, tokens, &[5]);
    let good = std::fs::read(&path).unwrap();
    let refused = |engine: &Engine, bytes: &[u8], words: &str| {
        std::fs::write(&path, bytes).unwrap();
        let error = refusal(engine, &path);
        assert!(error.contains(words) && error.starts_with(path.to_str().unwrap()), "{error}");
        let mut session = engine.session().unwrap();
        advance(&mut session, tokens);
        assert_eq!(session.save(&path).unwrap_err().to_string(), error);
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "a file of others was written to");
        advance(&mut session, &tokens[..4]);
    };
    refused(
        &engine,
        b"Dear diary, today I did not back up anything, but I will tomorrow.",
        "not a",
    );
    refused(&engine, b"Dear", "not a saved session");
    let mut version = good.clone();
    version[8] = 2;
    refused(&engine, &version, "version 2; this engine reads version 1");
    refused(&open(&fixture("b_dsa_full"), options(None)), &good, "other config.json");
    // The same shape with other weights.
    let changed = TempDir::with_fixture("state-changed", "a_seed");
    let weights = changed.0.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let middle = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 2;
    bytes[middle] ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    refused(&open(&changed.0, options(None)), &good, "other weights");
    std::fs::copy(fixture("a_seed").join("model.safetensors"), &weights).unwrap();
    let moved = open(&changed.0, options(None));
    std::fs::write(&path, &good).unwrap();
    assert_eq!(restored_tokens(&moved, &path, tokens), 5, "a model that was only moved");
    // The same numbers for other words.
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/demo");
    let words = TempDir::new("state-words");
    for entry in std::fs::read_dir(&demo).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), words.0.join(entry.file_name())).unwrap();
    }
    std::fs::remove_file(&path).unwrap();
    write_turns(&open(&demo, options(None)), &path, tokens, &[5]);
    let tokenizer = std::fs::read(demo.join("tokenizer.json")).unwrap();
    std::fs::write(words.0.join("tokenizer.json"), [&tokenizer[..], b"\n"].concat()).unwrap();
    let good = std::fs::read(&path).unwrap();
    refused(&open(&words.0, options(None)), &good, "other tokenizer.json");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(refusal(&engine, &path).ends_with("expected a regular file"));
    assert!(engine.restore(&dir.0.join("none")).unwrap().is_none());
}

/// Bytes of one position of the rows, from a file's first record.
fn engine_floats(file: &[u8], tokens: &[u32]) -> usize {
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap()) as usize;
    let (count, bytes) = (word(HEADER_BYTES + 8), word(HEADER_BYTES + 16));
    assert!(!tokens.is_empty() && count > 0);
    bytes / count / 4
}

/// A file of the C engine, laid out as it documents: one position of one layer.
#[test]
fn rows_of_the_c_engine_are_not_taken_over() {
    let dir = TempDir::new("state-c");
    let path = dir.0.join(".coli_kv");
    let mut bytes = b"COLIKV1\0".to_vec();
    for word in [1i32, 8, 4, 0, 0, 256, 1, 0, 7].into_iter().chain([1; 12]) {
        bytes.extend(word.to_le_bytes());
    }
    std::fs::write(&path, &bytes).unwrap();
    let error = refusal(&open(&fixture("a_seed"), options(None)), &path);
    assert!(error.contains("written by the C engine"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
}

/// One session has the file; what it saves after the file was deleted is in a new one.
#[test]
fn two_sessions_never_write_one_file() {
    let dir = TempDir::new("state-two");
    let path = dir.0.join("s");
    let engine = open(&fixture("a_seed"), options(None));
    let tokens = full_ids("a_seed");
    let mut session = engine.session().unwrap();
    advance(&mut session, &tokens[..4]);
    session.save(&path).unwrap();
    assert!(refusal(&engine, &path).ends_with("in use by another session"));
    let mut second = engine.session().unwrap();
    advance(&mut second, &tokens[..6]);
    assert!(second.save(&path).unwrap_err().to_string().contains("in use"));
    std::fs::remove_file(&path).unwrap();
    session.save(&path).unwrap();
    drop(session);
    second.save(&path).unwrap();
    drop(second);
    assert_eq!(restored_tokens(&engine, &path, &tokens), 6);
    // More than fit the context, and a context that is just as long.
    let small = |ctx_tokens| open(&fixture("a_seed"), Options { ctx_tokens, ..options(None) });
    assert!(refusal(&small(5), &path).contains("6 tokens do not fit the context of 5"));
    assert_eq!(restored_tokens(&small(6), &path, &tokens[..6]), 6);
}

/// A prefix copied from another session, with a draft head and without.
#[test]
fn a_copied_prefix_computes_what_its_own_would() {
    for (name, drafts) in [("h_mtp", Some(3)), ("c_shared", None), ("a_seed", Some(0))] {
        let engine = open(&fixture(name), options(drafts));
        let tokens = full_ids(name);
        let mut from = engine.session().unwrap();
        generate(&mut from, &tokens[..12], 15);
        for common in [0, 1, 2, 9, 12, 20] {
            let mut prompt = from.tokens()[..common].to_vec();
            let other = (from.tokens()[common] + 1) % engine.config().vocab_size as u32;
            prompt.extend([other, 5, 6, 5, 6]);
            let mut session = engine.session().unwrap();
            generate(&mut session, &[9, 8, 7], 4);
            let copied = session.copy_prefix(&from, &prompt);
            assert!(copied <= common && copied + 1 >= common, "{name}: {copied} of {common}");
            let mut fresh = engine.session().unwrap();
            let before = session.draft_counters().accepted;
            let (ids, accepted) = generate(&mut session, &prompt, 12);
            let (want, want_accepted) = generate(&mut fresh, &prompt, 12);
            assert_eq!(ids, want, "{name}: {common} tokens");
            assert!(drafts.is_none() || accepted - before == want_accepted, "{name}: {common}");
        }
        // What is there already is not replaced by less.
        let mut session = engine.session().unwrap();
        advance(&mut session, &tokens[..10]);
        let mut short = engine.session().unwrap();
        advance(&mut short, &tokens[..4]);
        assert_eq!(session.copy_prefix(&short, &tokens), 10);
        assert_eq!(advance(&mut session, &tokens), cold(&engine, &tokens));
    }
}

/// The tokens of turn `turn` of a child: they share starts of different lengths.
fn turn_tokens(turn: usize) -> Vec<u32> {
    let mut random = Random::new(turn as u64);
    (0..4).for_each(|_| _ = random.next());
    let common = random.below(40);
    let len = common + 1 + random.below(30);
    let token = |i: usize| if i < common { i * 7 % 90 } else { (i * 5 + turn) % 90 };
    (0..len).map(|i| token(i) as u32).collect()
}

const CHILD_PATH: &str = "COLI_TEST_STATE_PATH";
const CHILD_TURN: &str = "COLI_TEST_STATE_TURN";

/// This test binary again, as a process that takes turns and saves them until it is killed.
fn child(path: &Path, turn: usize, wrapper: Option<&str>) -> Command {
    let program = std::env::current_exe().unwrap();
    let mut command = match wrapper {
        Some(script) => {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("{script}; exec \"$0\" \"$@\"")]).arg(program);
            command
        }
        None => Command::new(program),
    };
    command.args(["--exact", "takes_turns_until_it_is_killed", "--nocapture"]);
    command.env(CHILD_PATH, path).env(CHILD_TURN, turn.to_string());
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

/// Does nothing unless it is started by another test. Prints each turn once it is saved.
#[test]
fn takes_turns_until_it_is_killed() {
    let Some(path) = std::env::var_os(CHILD_PATH).map(PathBuf::from) else { return };
    let mut turn: usize = std::env::var(CHILD_TURN).unwrap().parse().unwrap();
    let engine = open(&fixture("h_mtp"), options(Some(1)));
    let mut session = match engine.restore(&path).unwrap() {
        Some((session, _)) => session,
        None => engine.session().unwrap(),
    };
    loop {
        advance(&mut session, &turn_tokens(turn));
        match session.save(&path) {
            Ok(_) => println!("saved {turn}"),
            Err(error) => {
                // The session goes on without.
                println!("failed {turn} {error}");
                let more = [turn_tokens(turn), vec![1, 2, 3]].concat();
                assert_eq!(advance(&mut session, &more), cold(&engine, &more));
                println!("went on");
                return;
            }
        }
        turn += 1;
    }
}

/// The turns that a child printed as saved; the last line may be cut.
fn saved_turns(output: &str) -> Vec<usize> {
    let lines = output.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    lines.filter_map(|line| line.trim().strip_prefix("saved ")?.parse().ok()).collect()
}

/// Two hundred kills at any time: what was reported as saved is there, and right.
#[test]
fn a_killed_process_loses_no_saved_turn() {
    let dir = TempDir::new("state-kill");
    let path = dir.0.join("s");
    let seed = new_seed();
    println!("COLI_FUZZ_SEED={seed}");
    let mut random = Random::new(seed);
    let engine = open(&fixture("h_mtp"), options(Some(1)));
    let (mut turn, mut kept) = (0, Vec::new());
    for kill in 0..200 {
        let mut process = child(&path, turn, None).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(random.below(60_000) as u64));
        process.kill().unwrap();
        let output = process.wait_with_output().unwrap();
        let saved = saved_turns(&String::from_utf8(output.stdout).unwrap());
        // The turn behind the last that was reported may be saved as well.
        let last = saved.last().map_or(turn, |last| last + 1);
        let before = saved.last().map_or(kept, |last| turn_tokens(*last));
        let found = engine.restore(&path).unwrap().map(|(session, _)| session.tokens().to_vec());
        kept = found.unwrap_or_default();
        assert!(kept == before || kept == turn_tokens(last), "kill {kill}, turn {last}");
        if !kept.is_empty() {
            let more = [&kept[..], &[4, 4]].concat();
            assert_eq!(restored_tokens(&engine, &path, &more), kept.len(), "kill {kill}");
        }
        turn = if kept == turn_tokens(last) { last + 1 } else { last };
    }
    assert!(turn > 50, "only {turn} turns: the kills came too early to tell anything");
}

/// A file that may not grow: the error names it, the turns before stay, the session goes on.
#[test]
fn a_full_drive_costs_the_turn_that_is_saved_and_no_other() {
    let dir = TempDir::new("state-full");
    let path = dir.0.join("s");
    let engine = open(&fixture("h_mtp"), options(Some(1)));
    let mut seen = 0;
    for blocks in [0, 1, 40, 100, 137, 200] {
        let _ = std::fs::remove_file(&path);
        let limit = format!("trap '' XFSZ; ulimit -f {blocks}");
        let output = child(&path, 3, Some(&limit)).output().unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        let name = path.display();
        assert!(output.contains(&format!(" {name}: File too large")), "{blocks}: {output}");
        assert!(output.contains("went on"), "{blocks}: {output}");
        let saved = saved_turns(&output);
        seen += saved.len();
        let found = engine.restore(&path).unwrap().map(|(session, _)| session.tokens().to_vec());
        let want = saved.last().map(|turn| turn_tokens(*turn));
        assert_eq!(found, want, "{blocks} blocks");
        assert!(std::fs::read_dir(&dir.0).unwrap().count() <= 1, "something is left beside it");
    }
    assert!(seen > 3, "{seen} turns fit the limits");
}

/// Random bytes as a file, and as what follows a header: an error or what was valid.
#[test]
fn no_bytes_make_restoring_panic_or_allocate_without_bound() {
    let dir = TempDir::new("state-fuzz");
    let path = dir.0.join("s");
    let seed = new_seed();
    println!("COLI_FUZZ_SEED={seed}");
    let mut random = Random::new(seed);
    let engine = open(&fixture("c_shared"), options(None));
    let sessions = Sessions::new(&dir.0, 0, engine.saved_shape().unwrap()).unwrap();
    let tokens = full_ids("c_shared");
    let lengths = write_turns(&engine, &path, &tokens, &[2, 5]);
    let good = std::fs::read(&path).unwrap();
    let large = [0, 1, 1 << 24, 0x7fff_ffff, u32::MAX, 0x8000_0000, 7];
    for round in 0..3000 {
        let kept = [0, 8, 16, HEADER_BYTES, lengths[0]][random.below(5)];
        let mut bytes = good[..kept].to_vec();
        bytes.extend((0..random.below(2000)).map(|_| random.next() as u8));
        // Sizes of a record, as a forger would choose them.
        for at in (kept..bytes.len().min(kept + 24).saturating_sub(3)).step_by(4) {
            if random.below(2) == 0 {
                let word = large[random.below(large.len())];
                bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(word));
            }
        }
        let file = dir.0.join("f.coli-kv");
        std::fs::write(&file, &bytes).unwrap();
        let found = engine.restore(&file).map(|found| found.map_or(0, |(_, r)| r.tokens));
        let want = if kept == lengths[0] { Some(2) } else { None };
        match found {
            Ok(tokens) => assert_eq!(tokens, want.unwrap_or(0), "round {round}"),
            Err(error) => assert!(want.is_none() && kept < HEADER_BYTES, "round {round}: {error}"),
        }
        sessions.find(&tokens, &[]).unwrap();
    }
}

#[test]
fn the_store_finds_the_longest_start_and_evicts_what_was_used_first() {
    let dir = TempDir::new("state-store");
    let engine = open(&fixture("a_seed"), options(None));
    let tokens = full_ids("a_seed");
    let store = |budget_bytes| {
        Sessions::new(&dir.0.join("sessions"), budget_bytes, engine.saved_shape().unwrap()).unwrap()
    };
    let sessions = store(1 << 30);
    assert_eq!(sessions.find(&tokens, &[]).unwrap(), None);
    let other = [&tokens[..3], &[1, 2, 3, 4, 5, 6]].concat();
    let mut paths = Vec::new();
    for timeline in [&tokens[..6], &tokens[..9], &other[..], &[250, 251, 252]] {
        let path = sessions.fresh();
        let mut session = engine.session().unwrap();
        advance(&mut session, timeline);
        session.save(&path).unwrap();
        paths.push(path);
        std::thread::sleep(Duration::from_millis(20));
    }
    std::fs::write(dir.0.join("sessions/notes.txt"), "mine").unwrap();
    std::fs::write(dir.0.join("sessions/0.coli-kv"), "not one").unwrap();
    assert_eq!(sessions.find(&tokens, &[]).unwrap(), Some((paths[1].clone(), 9)));
    assert_eq!(sessions.find(&other[..5], &[]).unwrap(), Some((paths[2].clone(), 5)));
    assert_eq!(sessions.find(&[99, 98], &[]).unwrap(), None);
    // One that is in use leaves the next best.
    assert_eq!(sessions.find(&tokens, &paths[1..2]).unwrap(), Some((paths[0].clone(), 6)));
    sessions.touch(&paths[0]).unwrap();
    std::fs::remove_file(dir.0.join("sessions/0.coli-kv")).unwrap();
    assert_eq!(sessions.list().unwrap()[0], paths[0]);
    assert_eq!(sessions.evict(&[]).unwrap(), Vec::<PathBuf>::new());
    // Room for the two smallest: what was used first goes, but not what is needed now.
    let bytes = |i: usize| paths[i].metadata().unwrap().len();
    let room = store(bytes(0) + bytes(1));
    assert_eq!(room.evict(&[&paths[1]]).unwrap(), [paths[2].clone(), paths[3].clone()]);
    assert_eq!(restored_tokens(&engine, &paths[1], &tokens), 9);
    assert_eq!(store(0).evict(&[]).unwrap(), [paths[1].clone(), paths[0].clone()]);
    assert!(dir.0.join("sessions/notes.txt").exists());
}

/// Rows that other arithmetic computed must not be restored: whoever changes the golden hashes
/// changes this number as well.
#[test]
fn saved_sessions_are_bound_to_the_arithmetic() {
    let names = ["b_dsa_full", "h_mtp", "k_long", "formats/int4-g64", "formats/mixed"];
    let hashes = GOLDEN.iter().filter(|(name, _)| names.contains(name)).map(|(_, hash)| hash);
    assert_eq!(hashes.clone().count(), names.len());
    let arithmetic = hashes.fold(0, |all, hash| all ^ hash);
    assert_eq!(ARITHMETIC, arithmetic, "expected {arithmetic:#018x} in src/state.rs");
}
