//! Replies of one pass: each gets the bytes that it would get alone, and a fault meets only whose
//! it is.

#![forbid(unsafe_code)]

mod common;

use colibri::bail;
use colibri::engine::{Engine, Finish, Generation, Member, Options, Session};
use colibri::error::{Error, Result};
use colibri::model::{Observer, Unobserved};
use colibri::sample::{Choose, Params, Sampler};
use common::{fixture, open};

/// Chooses as a sampler does, and remembers what it saw.
struct Recorder {
    sampler: Sampler,
    logits: Vec<u32>,
    /// Fails at this token of the reply.
    fails_at: usize,
    count: usize,
}

impl Choose for Recorder {
    fn start_reply(&mut self, position: usize) {
        self.sampler.start_reply(position);
    }

    fn choose(&mut self, logits: &[f32], tokens: &[u32]) -> Result<u32> {
        if self.count == self.fails_at {
            bail!("told to fail");
        }
        self.count += 1;
        self.logits.extend(logits.iter().map(|logit| logit.to_bits()));
        self.sampler.sample(logits, tokens, None)
    }
}

/// Stops when it was asked so often.
struct Stopper(usize);

impl Observer for Stopper {
    fn interrupted(&mut self) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 == 0
    }
}

struct Reply<'e> {
    session: Session<'e>,
    generation: Generation,
    chooser: Recorder,
    tokens: Vec<u32>,
    failure: Option<Error>,
}

const NEVER: usize = usize::MAX;

impl<'e> Reply<'e> {
    fn new(engine: &'e Engine, prompt: &[u32], new_tokens: usize, seed: u64) -> Reply<'e> {
        let temperature = if seed == 0 { 0.0 } else { 1.0 };
        let params = Params { temperature, seed, ..Params::GREEDY };
        let sampler = Sampler::new(params, engine.config().vocab_size, Vec::new()).unwrap();
        Reply {
            session: engine.session().unwrap(),
            generation: Generation::new(engine, prompt, new_tokens),
            chooser: Recorder { sampler, logits: Vec::new(), fails_at: NEVER, count: 0 },
            tokens: Vec::new(),
            failure: None,
        }
    }

    fn is_running(&mut self) -> bool {
        self.tokens.extend(std::iter::from_fn(|| self.generation.next_token()));
        self.failure.is_none() && self.generation.finish().is_none()
    }
}

/// Passes over all that run, until none does.
fn run(engine: &Engine, replies: &mut [Reply<'_>]) {
    loop {
        let mut watches = [const { Unobserved }; 9];
        let running = replies.iter_mut().filter_map(|reply| reply.is_running().then_some(reply));
        let mut members: Vec<Member<'_, '_>> = (running.zip(&mut watches))
            .map(|(reply, observer)| Member {
                session: &mut reply.session,
                generation: &mut reply.generation,
                chooser: &mut reply.chooser,
                observer,
                failure: None,
            })
            .collect();
        if members.is_empty() {
            return;
        }
        engine.pass(&mut members);
        let failures: Vec<_> = members.into_iter().map(|member| member.failure).collect();
        let mut failures = failures.into_iter();
        for reply in replies
            .iter_mut()
            .filter(|reply| reply.failure.is_none() && reply.generation.finish().is_none())
        {
            reply.failure = failures.next().unwrap();
        }
    }
}

/// Prompts and lengths that differ, so that replies begin and end at different passes.
fn prompts(vocab: u32) -> [(Vec<u32>, usize, u64); 5] {
    let prompt = |count: u32, step: u32| (0..count).map(|i| (i * step + step) % vocab).collect();
    [
        (prompt(40, 7), 30, 0),
        (prompt(1, 3), 50, 5),
        (prompt(70, 11), 9, 6),
        (prompt(3, 5), 1, 0),
        (prompt(17, 13), 40, 7),
    ]
}

fn options(drafts: Option<usize>) -> Options {
    let sessions = 5;
    Options { ctx_tokens: 128, chunk_rows: 16, threads: 2, sessions, drafts, ..Options::default() }
}

#[test]
fn each_reply_has_the_logits_that_it_has_alone() {
    for (name, drafts) in [
        ("a_seed", None),
        ("b_dsa_full", Some(0)),
        ("b_dsa_full", Some(2)),
        ("h_mtp", None),
        ("h_mtp", Some(3)),
        ("formats/mixed", None),
    ] {
        let engine = open(&fixture(name), options(drafts));
        let prompts = prompts(engine.config().vocab_size as u32);
        let reply = |(prompt, count, seed): &(Vec<u32>, usize, u64)| {
            Reply::new(&engine, prompt, *count, *seed)
        };
        let mut alone: Vec<Reply<'_>> = prompts.iter().map(reply).collect();
        alone.chunks_mut(1).for_each(|one| run(&engine, one));
        let mut together: Vec<Reply<'_>> = prompts.iter().map(reply).collect();
        run(&engine, &mut together);
        for (i, (alone, together)) in alone.iter().zip(&together).enumerate() {
            assert!(together.failure.is_none());
            assert_eq!(alone.tokens, together.tokens, "{name}, {drafts:?}, reply {i}");
            assert!(!alone.chooser.logits.is_empty());
            assert!(alone.chooser.logits == together.chooser.logits, "{name}, reply {i}");
            assert_eq!(alone.generation.finish(), together.generation.finish());
        }
        assert!(together.iter().any(|reply| reply.tokens.len() == 50));
    }
}

#[test]
fn a_reply_that_fails_leaves_the_others_whole() {
    let engine = open(&fixture("h_mtp"), options(Some(2)));
    let all = prompts(engine.config().vocab_size as u32);
    let new = |i: usize| Reply::new(&engine, &all[i].0, all[i].1, all[i].2);
    let (mut alone, mut together) = ([new(0)], [new(0), new(1), new(4)]);
    run(&engine, &mut alone);
    together[1].chooser.fails_at = 7;
    // Beyond the vocabulary: no pass with it can run.
    let bad = [all[4].0.clone(), vec![u32::MAX]].concat();
    together[2].generation = Generation::new(&engine, &bad, 10);
    run(&engine, &mut together);
    assert_eq!(together[0].tokens, alone[0].tokens);
    assert!(together[0].chooser.logits == alone[0].chooser.logits);
    let failure = |i: usize| together[i].failure.as_ref().unwrap().to_string();
    assert_eq!(failure(1), "told to fail");
    assert!(failure(2).contains("token 4294967295 at position 17"), "{}", failure(2));
    // What the first of them said before it failed is there.
    assert_eq!(together[1].tokens.len(), 7);
}

#[test]
fn a_pass_ends_early_only_if_nobody_waits_for_it() {
    let engine = open(&fixture("a_seed"), options(None));
    let vocab = engine.config().vocab_size as u32;
    for (asked, is_stopped) in [([1, 1], true), ([2, 1], true), ([NEVER, 1], false)] {
        let mut replies = [0, 4].map(|i| {
            let (prompt, count, seed) = &prompts(vocab)[i];
            Reply::new(&engine, prompt, *count, *seed)
        });
        let mut stoppers = asked.map(Stopper);
        let members = replies.iter_mut().zip(&mut stoppers).map(|(reply, observer)| Member {
            session: &mut reply.session,
            generation: &mut reply.generation,
            chooser: &mut reply.chooser,
            observer,
            failure: None,
        });
        let mut members: Vec<_> = members.collect();
        engine.pass(&mut members);
        let failures = members.iter().filter(|member| member.failure.is_some()).count();
        assert_eq!(failures, if is_stopped { 2 } else { 0 });
        let done = members[0].session.tokens().len();
        assert_eq!(done > 0, !is_stopped);
        assert_eq!(replies[0].generation.finish(), None::<Finish>);
    }
}
