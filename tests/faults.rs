//! What breaks under a running engine: shards that are cut or cannot be read, disks that are full,
//! writers that are killed, threads that cannot start. One error says what happened, nothing hangs,
//! and what was whole before stays so.

mod common;

use colibri::config::Config;
use colibri::disk::{Direct, open_direct};
use colibri::engine::{Options, Session};
use colibri::error::Result;
use colibri::experts::usage::Usage;
use colibri::experts::{ExpertId, ExpertStore};
use colibri::model::Observer;
use colibri::plan::Limit;
use colibri::safetensors::Directory;
use colibri::sample::{Params, Sampler};
use colibri::weights::{Moe, Weights};
use common::{Random, TempDir, TestTensor, fixture, full_ids, new_seed, open, read_safetensors};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// The drafts of each pass.
#[derive(Default)]
struct Drafted(Vec<Vec<u32>>);

impl Observer for Drafted {
    fn drafted(&mut self, _tokens: usize, drafts: &[u32], _accepted: usize) {
        self.0.push(drafts.to_vec());
    }
}

/// Greedy tokens behind `prompt`, and the drafts on the way; `each` is called with their number.
fn generate(
    session: &mut Session<'_>,
    prompt: &[u32],
    count: usize,
    each: impl Fn(usize),
) -> Result<(Vec<u32>, Vec<Vec<u32>>)> {
    let vocab = session.engine().config().vocab_size;
    let mut sampler = Sampler::new(Params::GREEDY, vocab, Vec::new()).unwrap();
    let (mut ids, mut drafted) = (Vec::new(), Drafted::default());
    session.generate(prompt, count, &mut sampler, &mut drafted, |id, _| {
        ids.push(id);
        each(ids.len());
        Ok(true)
    })?;
    Ok((ids, drafted.0))
}

/// The reference's prompt has 48 tokens, its greedy reply 24. The file has the embedding first, a
/// row of 256 bytes each, then the layers, and the experts of the draft head last; nearly nothing
/// of it stays in memory. The session goes on, and its drafts are those of a fresh one.
#[test]
fn a_shard_that_is_cut_in_the_midst_of_a_reply_ends_that_reply_alone() {
    const EMBEDDING: u64 = 18_560 + 24_576;
    let dir = TempDir::with_fixture("cut", "h_mtp");
    let path = dir.0.join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let ids = full_ids("h_mtp");
    let (prompt, reply) = ids.split_at(48);
    let eighth = whole.len() as u64 / 8;
    let (experts, embedding) = (".mlp.experts.", ": model.embed_tokens.weight");
    for direct in [Direct::Auto, Direct::Off] {
        let limit = Limit::SlotsPerLayer(1);
        let (ctx_tokens, chunk_rows, drafts) = (96, 3, Some(3));
        let options =
            Options { ctx_tokens, chunk_rows, limit, drafts, direct, ..Options::default() };
        let engine = open(&dir.0, options);
        for (told, bytes, tensor) in [
            // The draft head is read when it is first needed.
            (1, 3 * eighth, "draft head: "),
            (4, 5 * eighth, experts),
            (9, 6 * eighth, experts),
            (2, 7 * eighth, experts),
            (7, 7 * eighth, experts),
            // Before the first draft the head is handed the prompt, three tokens a batch. The
            // second batch has the tokens 89 and 92.
            (1, EMBEDDING + 256 * 89, embedding),
            // It is as far as the reply and begins to draft.
            (4, 0, embedding),
        ] {
            let mut session = engine.session().unwrap();
            let cut = |count| {
                if count == told {
                    let file = OpenOptions::new().write(true).open(&path).unwrap();
                    file.set_len(bytes).unwrap();
                }
            };
            let error = generate(&mut session, prompt, reply.len(), cut).unwrap_err().to_string();
            for part in ["/model.safetensors: ", tensor, ": wanted ", " bytes at offset ", ", got "]
            {
                assert!(error.contains(part), "{part:?} in {error}");
            }
            assert!(!error.contains('\n'), "{error}");
            std::fs::write(&path, &whole).unwrap();
            let (prompt, left) = (&ids[..48 + told], &reply[told..]);
            let again = generate(&mut session, prompt, left.len(), |_| ()).unwrap();
            let mut fresh = engine.session().unwrap();
            let fresh = generate(&mut fresh, prompt, left.len(), |_| ()).unwrap();
            assert_eq!((again.0.as_slice(), again.1), (left, fresh.1), "{bytes} after {told}");
        }
    }
}

/// The shards of a sparse model and the tensors in them, for tests that work with a store.
struct Model {
    directory: Arc<Directory>,
    weights: Weights,
    tensors: Vec<TestTensor>,
}

impl Model {
    fn open(name: &str, is_direct: bool) -> Model {
        let dir = fixture(name);
        let mut directory = Directory::open(&dir).unwrap();
        if is_direct {
            directory.add_direct(open_direct);
        }
        let weights = Weights::bind(&directory, &Config::load(&dir).unwrap()).unwrap();
        let files = directory.shards().iter().flat_map(|shard| read_safetensors(&shard.path));
        Model { tensors: files.collect(), directory: Arc::new(directory), weights }
    }

    fn layers(&self) -> Vec<(usize, &Moe)> {
        self.weights.sparse_layers().collect()
    }

    /// Fails unless an expert that is present has the bytes of the file.
    fn check(&self, store: &ExpertStore, (layer, e): ExpertId) {
        let (_, moe) = self.weights.sparse_layers().find(|(index, _)| *index == layer).unwrap();
        let expert = store.expert((layer, e), &moe.experts[e]);
        for (part, matrix) in [("gate", expert.gate), ("up", expert.up), ("down", expert.down)] {
            let name = format!("model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight");
            let want = self.tensors.iter().find(|tensor| tensor.name == name).unwrap();
            assert!(matrix.weights == &want.bytes[..], "{name}");
        }
    }
}

/// A file that is open for writing alone cannot be read; one shard in place of six makes the read
/// panic. Either way one request fails, and the store has neither lost an expert nor memory.
#[test]
fn a_read_that_fails_or_panics_is_an_error_of_its_request_and_leaves_a_whole_store() {
    let model = Model::open("g_bf16_sharded", false);
    let mut unreadable = Directory::open(&fixture("g_bf16_sharded")).unwrap();
    unreadable.files_mut().for_each(|shard| {
        shard.file = OpenOptions::new().write(true).open("/dev/null").unwrap();
    });
    let one_shard = Directory::open(&fixture("a_seed")).unwrap();
    let (layer, moe) = *model.layers().last().unwrap();
    let bytes = moe.experts[0].bytes();
    for (directory, parts) in [
        (unreadable, ["-of-00006.safetensors: model.layers.", "read at offset ", "descriptor"]),
        (one_shard, ["model.layers.", ".mlp.experts.", ": the read panicked"]),
    ] {
        let directory = Arc::new(directory);
        let mut store = ExpertStore::new(2 * bytes, bytes).unwrap();
        for _ in 0..3 {
            store.visit(layer, moe.experts.len(), 1, [(1, 1)].into_iter());
            assert_eq!(store.ask(&directory, layer, &[1], &moe.experts), 1);
            let error = store.receive(true).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
            // One that fails on a guess is nobody's error.
            store.expect(&directory, layer, &[2], &moe.experts);
            store.forget_all();
            assert_eq!(store.held_bytes(), 0);
        }
        assert_eq!(store.ask(&model.directory, layer, &[2, 1], &moe.experts), 2);
        while !(store.is_present((layer, 1)) && store.is_present((layer, 2))) {
            store.receive(true).unwrap();
        }
        [1, 2].into_iter().for_each(|e| model.check(&store, (layer, e)));
    }
}

/// A store and what was asked of it.
struct Asked<'a> {
    model: &'a Model,
    store: ExpertStore,
    budget_bytes: usize,
    wanted: BTreeSet<ExpertId>,
}

impl Asked<'_> {
    /// Does one random thing.
    fn step(&mut self, random: &mut Random) {
        let Asked { model, store, wanted, .. } = self;
        let layers = model.layers();
        let (layer, moe) = layers[random.below(layers.len())];
        let count = moe.experts.len();
        let some: Vec<u32> = (0..count as u32).filter(|_| random.below(3) == 0).collect();
        match random.below(9) {
            0 => {
                store.visit(layer, count, 3, some.iter().map(|e| (*e, 1)));
                wanted.clear();
            }
            1 | 2 => {
                let asked = store.ask(&model.directory, layer, &some, &moe.experts);
                wanted.extend(some[..asked].iter().map(|e| (layer, *e as usize)));
            }
            3 | 4 => store.expect(&model.directory, layer, &some, &moe.experts),
            5 => store.forget_expected(|(_, e)| some.contains(&(e as u32))),
            6 => {
                let is_given_up = |(at, e): &ExpertId| *at == layer && some.contains(&(*e as u32));
                let some: Vec<ExpertId> = wanted.iter().copied().filter(is_given_up).collect();
                for (layer, e) in some {
                    wanted.remove(&(layer, e));
                    store.give_up(layer, &[e as u32]);
                }
            }
            7 => {
                let bytes = random.below(self.budget_bytes);
                store.pin(bytes, |(layer, e)| {
                    let moe = layers.iter().find(|(index, _)| *index == layer);
                    moe.map_or(0, |(_, moe)| moe.experts[e].bytes())
                });
            }
            _ => store.receive(false).unwrap(),
        }
    }

    /// Waits for all that is wanted and looks at its bytes.
    fn receive_all(&mut self) {
        while !self.wanted.iter().all(|id| self.store.is_present(*id)) {
            self.store.receive(true).unwrap();
            assert!(self.store.held_bytes() <= self.budget_bytes);
        }
        self.wanted.iter().for_each(|id| self.model.check(&self.store, *id));
    }
}

/// Experts of two sizes, stores from one expert to nearly all, and every operation in any order.
#[test]
fn a_thousand_budgets_hold_what_is_wanted_and_nothing_too_much() {
    let seed = new_seed();
    println!("COLI_FUZZ_SEED={seed}");
    let mut random = Random::new(seed);
    let models = [("formats/mixed", false), ("formats/mixed", true), ("d_groups_norm", true)]
        .map(|(name, is_direct)| Model::open(name, is_direct));
    for _ in 0..1000 {
        let model = &models[random.below(models.len())];
        let layers = model.layers();
        let experts = || layers.iter().flat_map(|(_, moe)| moe.experts.iter());
        let largest_bytes = experts().map(|expert| expert.bytes()).max().unwrap();
        let all_bytes: usize = experts().map(|expert| expert.bytes()).sum();
        let budget_bytes = largest_bytes + random.below(all_bytes - largest_bytes);
        let store = ExpertStore::new(budget_bytes, largest_bytes).unwrap();
        let mut asked = Asked { model, store, budget_bytes, wanted: BTreeSet::new() };
        for _ in 0..random.below(24) {
            let here = asked.wanted.iter().copied().filter(|id| asked.store.is_present(*id));
            let here: Vec<ExpertId> = here.collect();
            asked.step(&mut random);
            let stays = |id: &ExpertId| !asked.wanted.contains(id) || asked.store.is_present(*id);
            assert!(here.iter().all(stays), "a wanted expert was evicted");
            assert!(asked.store.held_bytes() <= budget_bytes);
            if random.below(3) == 0 {
                asked.receive_all();
            }
        }
        asked.receive_all();
        // Nothing is left behind: as many fit as into a new store.
        asked.store.forget_all();
        assert_eq!(asked.store.held_bytes(), 0);
        let (layer, moe) = layers[random.below(layers.len())];
        let all: Vec<u32> = (0..moe.experts.len() as u32).collect();
        let count = asked.store.ask(&model.directory, layer, &all, &moe.experts);
        let ends = moe.experts.iter().scan(0, |end, expert| {
            *end += expert.bytes();
            Some(*end)
        });
        assert_eq!(count, ends.take_while(|end| *end <= budget_bytes).count());
    }
}

/// `coli run` on `c_shared` with further words, behind the commands `before` of a shell.
fn run(before: &str, more: &[&str]) -> Output {
    let mut command = Command::new("sh");
    for name in ["COLI_USAGE", "USAGE_SAVE", "PIN_GB"] {
        command.env_remove(name);
    }
    let words = ["run", "--ids", "1,2,3", "--temp", "0", "-n", "6", "--model"];
    command.args(["-c", &format!("{before} exec \"$0\" \"$@\"")]);
    command.arg(env!("CARGO_BIN_EXE_coli")).args(words).arg(fixture("c_shared")).args(more);
    command.output().unwrap()
}

/// What `run` printed, and its notes.
fn texts(output: &Output) -> [&str; 2] {
    [&output.stdout, &output.stderr].map(|bytes| std::str::from_utf8(bytes).unwrap())
}

/// The reply of a run without any fault.
fn plain_reply() -> String {
    let output = run("", &["--usage", "off"]);
    let [reply, notes] = texts(&output);
    assert_eq!((output.status.code(), notes), (Some(0), ""));
    assert_eq!(reply.split(',').count(), 6, "{reply}");
    reply.to_string()
}

/// A limit of no bytes for each file stands in for a disk that is full; pipes have none.
#[test]
fn a_usage_file_that_finds_no_room_is_noted_and_stays_as_it_was() {
    let dir = TempDir::new("no-room");
    let file = dir.0.join("usage");
    let name = file.to_str().unwrap();
    let reply = plain_reply();
    for _ in 0..2 {
        assert_eq!(texts(&run("", &["--usage", name])), [&*reply, ""]);
    }
    let before = std::fs::read(&file).unwrap();
    let output = run("trap '' XFSZ; ulimit -f 0;", &["--usage", name]);
    let [printed, notes] = texts(&output);
    assert_eq!((printed, output.status.code()), (&*reply, Some(0)), "{notes}");
    assert!(notes.starts_with(&format!("coli: {name}: File too large")), "{notes}");
    assert!(notes.ends_with("; what was learned is lost\n") && notes.lines().count() == 1);
    assert!(std::fs::read(&file).unwrap() == before);
    assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 1, "a file was left behind");
}

/// Asked for and not there: the run fails, but not before its reply is told.
#[test]
fn a_trace_that_finds_no_room_takes_nothing_from_the_reply() {
    let dir = TempDir::new("no-trace");
    let file = dir.0.join("run.trace");
    let reply = plain_reply();
    let limit = "trap '' XFSZ; ulimit -f 0;";
    for (before, name, why) in
        [("", "/dev/full", "No space left"), (limit, file.to_str().unwrap(), "File too large")]
    {
        let output = run(before, &["--usage", "off", "--trace", name]);
        let [printed, notes] = texts(&output);
        assert_eq!((printed, output.status.code()), (&*reply, Some(1)), "{notes}");
        assert!(notes.starts_with(&format!("coli: {name}: {why}")), "{notes}");
        assert_eq!(notes.lines().count(), 1, "{notes}");
        let output = run(before, &["--usage", "off", "--trace", name, "--json"]);
        let ids = format!("\"ids\":[{}]", reply.trim());
        let printed = texts(&output)[0].replace(' ', "");
        assert!(printed.contains(&ids) && output.status.code() == Some(1), "{printed}");
    }
}

#[test]
fn a_usage_file_that_is_none_is_noted_at_once_and_left_alone() {
    let dir = TempDir::new("odd-usage");
    let [folder, pipe, hole] = ["folder", "pipe", "hole"].map(|name| dir.0.join(name));
    std::fs::create_dir(&folder).unwrap();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    File::create(&hole).unwrap().set_len(1 << 30).unwrap();
    let reply = plain_reply();
    for (path, why) in [
        (&folder, "expected a regular file"),
        (&pipe, "expected a regular file"),
        (&hole, "expected at most 8388608 bytes, found 1073741824"),
    ] {
        let name = path.to_str().unwrap();
        let output = run("", &["--usage", name]);
        let [printed, notes] = texts(&output);
        assert_eq!((printed, output.status.code()), (&*reply, Some(0)), "{notes}");
        let note = format!("coli: {name}: {why}; the run goes on without, and leaves");
        assert!(notes.starts_with(&note) && notes.lines().count() == 1, "{notes}");
    }
    assert_eq!(std::fs::metadata(&hole).unwrap().len(), 1 << 30);
}

/// The runtime gives every thread the stack that this variable says: more than there is.
#[test]
fn a_reader_that_cannot_start_is_an_error_and_no_wait() {
    let output = run("RUST_MIN_STACK=1000000000000000000", &["--usage", "off"]);
    let [printed, notes] = texts(&output);
    assert_eq!((printed, output.status.code()), ("", Some(1)), "{notes}");
    assert!(notes.starts_with("coli: cannot start a thread that reads: "), "{notes}");
}

const WRITES: &str = "COLI_TEST_WRITES";
/// Some hundred kilobytes as text.
const SHAPE: (usize, usize) = (78, 256);

/// A usage file in which every expert of every layer has the same number of choices.
fn write_usage(path: &Path, choices: u64) {
    let (layers, experts) = SHAPE;
    let mut usage = Usage::default();
    for layer in 0..layers {
        usage.make_known(layer, experts);
        (0..experts).for_each(|e| usage.add((layer, e), choices));
    }
    usage.write(path, layers, experts).unwrap();
}

/// Two writers at a time, which are this test again, are killed at any moment: every file that is
/// found is one that was written, and whatever they leave behind is one file at most.
#[test]
fn writers_that_are_killed_leave_a_whole_usage_file() {
    if let Some(path) = std::env::var_os(WRITES) {
        for choices in 1.. {
            write_usage(Path::new(&path), choices);
        }
    }
    let dir = TempDir::new("killed");
    let path = dir.0.join("usage");
    write_usage(&path, 1);
    let start = || -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "writers_that_are_killed_leave_a_whole_usage_file"]);
        command.env(WRITES, &path).stdout(Stdio::null()).spawn().unwrap()
    };
    let mut random = Random::new(new_seed());
    let mut writers = [start(), start()];
    let mut found = BTreeSet::new();
    for kill in 0..50 {
        std::thread::sleep(Duration::from_micros(10_000 + random.below(30_000) as u64));
        let writer = &mut writers[kill % 2];
        writer.kill().unwrap();
        let status = writer.wait().unwrap();
        assert_eq!(status.code(), None, "a writer ended by itself");
        *writer = start();
        let usage = Usage::read(&path, SHAPE.0, SHAPE.1).unwrap();
        let choices = usage.count((0, 0));
        assert!(choices > 0 && usage.iter().all(|(_, count)| count == choices));
        assert_eq!(usage.iter().count(), SHAPE.0 * SHAPE.1);
        found.insert(choices);
        let files = std::fs::read_dir(&dir.0).unwrap().count();
        assert!(files <= 2, "{files} files");
    }
    for mut writer in writers {
        writer.kill().unwrap();
        writer.wait().unwrap();
    }
    assert!(found.len() > 1, "nothing was ever written");
    // The next one waits for nobody and leaves nothing.
    write_usage(&path, 3);
    assert_eq!(Usage::read(&path, SHAPE.0, SHAPE.1).unwrap().count((77, 255)), 3);
    assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 1);
}
