//! Replies: how they grow, each on its own session, by forward passes that several may share.
//!
//! A pass has rows of every member: the token that was chosen last and the drafts behind it, or a
//! part of the prompt. Rows of one pass share what is read of the weights and of the drive, so
//! together they take much less time than one after the other; each gets the very bits that it
//! would get alone.

#![forbid(unsafe_code)]

use super::{Engine, Finish, Session};
use crate::draft::{self, DRAFTS_MAX, Source, Times};
use crate::error::{Error, Result};
use crate::experts::Counters;
use crate::kv::Sequence;
use crate::model::{Observer, Scratch};
use crate::sample::Choose;
use std::ops::Range;
use std::slice;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// A reply that grows pass by pass.
pub struct Generation {
    /// The prompt, and the reply as far as it is chosen.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    /// Tokens of both at most.
    most_tokens: usize,
    /// Tokens of both that the caller knows.
    told: usize,
    stop_tokens: Vec<u32>,
    /// Whether its session holds nothing else any more.
    has_begun: bool,
    finish: Option<Finish>,
}

impl Generation {
    /// Continues `prompt` by at most `new_tokens` tokens.
    pub fn new(engine: &Engine, prompt: &[u32], new_tokens: usize) -> Generation {
        Generation {
            tokens: prompt.to_vec(),
            prompt_tokens: prompt.len(),
            most_tokens: prompt.len() + new_tokens,
            told: prompt.len(),
            stop_tokens: engine.stop_tokens(),
            has_begun: false,
            finish: None,
        }
    }

    /// The next token of the reply. `None` means that a pass is needed, or that the reply is at its
    /// end; a stop token ends it without being handed over.
    pub fn next_token(&mut self) -> Option<u32> {
        if self.told >= self.most_tokens {
            self.finish.get_or_insert(Finish::Length);
        }
        let token = self.tokens.get(self.told).copied().filter(|_| self.finish.is_none())?;
        if self.stop_tokens.contains(&token) {
            self.finish = Some(Finish::Stop);
            return None;
        }
        self.told += 1;
        Some(token)
    }

    /// Why it ended, once all its tokens were handed over.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }
}

/// One reply of a pass.
pub struct Member<'m, 's> {
    /// Its timeline, which nothing else changes from the first pass to the last.
    pub session: &'m mut Session<'s>,
    /// Its tokens.
    pub generation: &'m mut Generation,
    /// Chooses them. `position` of a draw is the length of the timeline before the drawn token.
    pub chooser: &'m mut dyn Choose,
    /// Sees its rows.
    pub observer: &'m mut dyn Observer,
    /// What ended it before its time.
    pub failure: Option<Error>,
}

/// What a member runs in a pass.
#[derive(Default)]
struct Rows {
    batch: Vec<u32>,
    /// Rows of `batch` behind which a token is chosen.
    wanted: Range<usize>,
    /// Position of the first of them, and its place among the rows of the pass.
    start: usize,
    first: usize,
    /// Whether a draft was wrong: what is behind it says nothing.
    is_wrong: bool,
    /// Whether these are a token of the reply and drafts behind it.
    is_step: bool,
    /// Where the drafts are from, and what it took to find them.
    source: Option<Source>,
    times: Times,
    /// Experts that had been read before that.
    misses: u64,
}

impl Rows {
    /// Its rows in the pass.
    fn places(&self) -> Range<usize> {
        self.first..self.first + self.batch.len()
    }
}

impl Engine {
    /// One forward pass over the next rows of all `members`. A prompt is run in parts, and one
    /// member's in each pass, the first that has some left. A fault ends only the members that have
    /// it: a pass that fails is run again, one member at a time.
    pub fn pass(&self, members: &mut [Member<'_, '_>]) {
        let is_alone = members.len() == 1;
        let mut prefills = 0;
        let plan = |member: &mut Member<'_, '_>| {
            let planned = member.plan(is_alone, prefills == 0);
            let rows = planned.unwrap_or_else(|error| {
                member.failure = Some(error);
                Rows::default()
            });
            prefills += usize::from(member.is_prefilling() && !rows.batch.is_empty());
            rows
        };
        let mut rows: Vec<Rows> = members.iter_mut().map(plan).collect();
        match self.run(members, &mut rows) {
            Ok(()) => {}
            Err(error) if is_alone => members[0].failure = Some(error),
            Err(error) if error.is_interrupt() => {
                members.iter_mut().for_each(|m| m.failure = Some(Error::interrupted()));
            }
            Err(_) => members.iter_mut().for_each(|member| self.pass(slice::from_mut(member))),
        }
    }

    fn run(&self, members: &mut [Member<'_, '_>], rows: &mut [Rows]) -> Result<()> {
        let (start, is_alone) = (Instant::now(), members.len() == 1);
        let (mut batch, mut observers, mut count) = (Vec::new(), Vec::new(), 0);
        for (member, rows) in members.iter_mut().zip(&mut *rows) {
            (rows.first, count) = (count, count + rows.batch.len());
            if !rows.batch.is_empty() {
                let Session { tokens, kv, .. } = &mut *member.session;
                batch.push(Sequence::new(&rows.batch, tokens.len(), kv));
                observers.push(&mut *member.observer);
            }
        }
        if count == 0 {
            return Ok(());
        }
        let mut runtime = self.runtime();
        self.model.forward(&mut batch, &mut runtime, &mut observers)?;
        let wanted = rows.iter().flat_map(|r| r.wanted.clone().map(|row| r.first + row));
        let wanted: Vec<usize> = wanted.collect();
        let mut logits = std::mem::take(&mut members[0].session.logits);
        let chosen =
            self.model.logits(wanted.into_iter(), &mut runtime, &mut logits, |place, logits| {
                let owner = rows.iter().position(|rows| rows.places().contains(&place));
                let owner = owner.expect("each row is one of a member");
                members[owner].take(place - rows[owner].first, logits, &mut rows[owner]);
                Ok(())
            });
        members[0].session.logits = logits;
        chosen?;
        let ran = || rows.iter().enumerate().filter(|(_, rows)| !rows.batch.is_empty());
        for (i, rows) in ran() {
            members[i].commit(rows, &runtime.scratch);
        }
        self.repin(count, &mut runtime);
        let counters = runtime.store.counters();
        drop(runtime);
        let pass = is_alone.then(|| start.elapsed());
        for (i, rows) in ran() {
            // Of a reply that failed nothing is known but what it has.
            if members[i].failure.is_none() {
                members[i].failure = members[i].note(rows, pass, counters).err();
            }
        }
        Ok(())
    }
}

impl Member<'_, '_> {
    /// Whether there is more to run than the token that was chosen last.
    fn is_prefilling(&self) -> bool {
        let Generation { tokens, prompt_tokens, .. } = &*self.generation;
        tokens.len() == *prompt_tokens || self.session.tokens.len() + 1 < tokens.len()
    }

    /// The rows of the next pass: none if it is at its end, or if `may_prefill` forbids them.
    fn plan(&mut self, is_alone: bool, may_prefill: bool) -> Result<Rows> {
        let Member { session, generation, chooser, .. } = self;
        if !generation.has_begun {
            session.prepare(&generation.tokens)?;
            session.truncate(session.kept(&generation.tokens, generation.tokens.len() - 1));
            chooser.start_reply(generation.prompt_tokens);
            generation.has_begun = true;
        }
        let done = session.tokens.len();
        let mut rows = Rows { start: done, ..Rows::default() };
        if self.is_prefilling() {
            let rest = &self.generation.tokens[done..];
            let count = rest.len().min(self.session.engine.options.chunk_rows);
            if may_prefill {
                rows.batch.extend_from_slice(&rest[..count]);
                rows.wanted = if count == rest.len() { count - 1..count } else { 0..0 };
            }
            return Ok(rows);
        }
        let Member { session, generation, chooser, .. } = self;
        // The last token may be drawn from a full context; it is only never fed back.
        let Some(room) = (session.kv.capacity_tokens() - done).checked_sub(1) else {
            generation.finish = Some(Finish::Length);
            return Ok(rows);
        };
        let most = room.min(generation.most_tokens - generation.tokens.len() - 1);
        // What a pass costs is shared by all, and so tells nothing of the drafts of one.
        let is_drafting = is_alone || session.engine.options.drafts.is_some();
        let most = if is_drafting { most } else { 0 };
        rows.is_step = true;
        rows.misses = session.engine.runtime().store.counters().misses;
        let forced = chooser.forced(most.min(DRAFTS_MAX))?;
        let known = generation.tokens.len();
        let found = session.guess(&mut generation.tokens, &forced, most, *chooser, &mut rows);
        generation.tokens.truncate(known);
        rows.source = found?;
        rows.wanted = 0..rows.batch.len();
        Ok(rows)
    }

    /// Takes the logits behind a row: the next token, if the row is one of the reply.
    fn take(&mut self, row: usize, logits: &[f32], rows: &mut Rows) {
        if rows.is_wrong || self.failure.is_some() {
            return;
        }
        match self.chooser.choose(logits, &self.generation.tokens) {
            Ok(token) => {
                self.observer.chosen(token, logits);
                rows.is_wrong = rows.batch.get(row + 1) != Some(&token);
                self.generation.tokens.push(token);
            }
            Err(error) => self.failure = Some(error),
        }
    }

    /// Takes the rows into the timeline, but for drafts that are wrong.
    fn commit(&mut self, rows: &Rows, scratch: &Scratch) {
        self.session.commit(&rows.batch, rows.first, scratch);
        if !rows.wanted.is_empty() {
            let chosen = self.generation.tokens.len() - 1;
            self.session.truncate(chosen);
        }
    }

    /// Takes note of rows that are committed, of the time of the pass where that is theirs, and of
    /// what was read by then.
    fn note(&mut self, rows: &Rows, pass: Option<Duration>, counters: Counters) -> Result<()> {
        if rows.is_step {
            self.note_drafts(rows, pass, counters);
        }
        // Behind every pass: also while others draft, what waits for the head stays bounded.
        self.session.follow()
    }

    fn note_drafts(&mut self, rows: &Rows, pass: Option<Duration>, counters: Counters) {
        let drafts = &rows.batch[1..];
        let wrong = rows.batch.len() + rows.start - self.session.tokens.len();
        let accepted = drafts.len() - wrong;
        self.observer.drafted(rows.start + 1, drafts, accepted);
        let reads = counters.misses - rows.misses;
        let read = Duration::from_nanos(counters.busy_ns / counters.misses.max(1));
        let times = pass.map(|pass| Times { pass, reads, read, ..rows.times });
        self.session.drafter.record(rows.source, [drafts.len(), accepted], times);
    }
}

impl Session<'_> {
    /// Continues `prompt` by at most `new_tokens` tokens. Each goes to `on_token`, which returns
    /// false to end the turn; stop tokens end it without being handed over. Drafts are run along
    /// with each token; those that would have been chosen anyway are tokens of the reply.
    pub fn generate<O: Observer>(
        &mut self,
        prompt: &[u32],
        new_tokens: usize,
        chooser: &mut dyn Choose,
        observer: &mut O,
        mut on_token: impl FnMut(u32, &mut O) -> Result<bool>,
    ) -> Result<Finish> {
        let engine = self.engine;
        let mut generation = Generation::new(engine, prompt, new_tokens);
        loop {
            while let Some(token) = generation.next_token() {
                if !on_token(token, observer)? {
                    return Ok(Finish::Stop);
                }
            }
            if let Some(finish) = generation.finish() {
                return Ok(finish);
            }
            let (session, generation) = (&mut *self, &mut generation);
            let (chooser, observer) = (&mut *chooser, &mut *observer);
            let mut member = Member { session, generation, chooser, observer, failure: None };
            engine.pass(slice::from_mut(&mut member));
            if let Some(failure) = member.failure {
                return Err(failure);
            }
        }
    }

    /// Fills the batch of `rows` with the last of `tokens`, whose others are committed, and at most
    /// `most` that may follow it, `forced` ones first; says where those are from. Guesses of the
    /// head are left behind `tokens`.
    fn guess(
        &mut self,
        tokens: &mut Vec<u32>,
        forced: &[u32],
        most: usize,
        chooser: &mut dyn Choose,
        Rows { batch, times, .. }: &mut Rows,
    ) -> Result<Option<Source>> {
        batch.push(tokens[tokens.len() - 1]);
        let has_head = self.head.is_some();
        let found = draft::look_up(tokens, most.min(DRAFTS_MAX));
        // A fixed number is the head's, where there is one, but what is forced needs no guess.
        let is_heads = has_head && self.engine.options.drafts.is_some();
        let found = if is_heads { &[] } else { found };
        for (source, found) in [(Source::Grammar, forced), (Source::Lookup, found)] {
            let count = self.drafter.count(source, found.len());
            if count > 0 {
                batch.extend_from_slice(&found[..count]);
                return Ok(Some(source));
            }
        }
        let count = if has_head { self.drafter.count(Source::Head, most) } else { 0 };
        if count == 0 {
            return Ok(None);
        }
        let start = Instant::now();
        self.engine.model.wake_head(&mut self.engine.runtime())?;
        // More than what a pass with drafts leaves was left while there were none.
        self.absorb(DRAFTS_MAX + 2)?;
        times.catching_up = start.elapsed();
        self.absorb(1)?;
        let Session { engine, kv, logits, head: Some(head), .. } = self else { return Ok(None) };
        let Engine { model, runtime, .. } = engine;
        let mut runtime = runtime.lock().unwrap_or_else(PoisonError::into_inner);
        head.input.clone_from(&head.hidden);
        for i in 0..count {
            let keeps_selection = i > 0 && model.config.index_share_for_mtp_iteration;
            model.draft(batch[i], head.rows + i, &head.input, keeps_selection, kv, &mut runtime)?;
            head.input.copy_from_slice(model.hidden(&runtime.scratch, 0));
            model.logits(0..1, &mut runtime, logits, |_, logits| {
                let token = chooser.guess(logits, tokens)?;
                tokens.push(token);
                batch.push(token);
                Ok(())
            })?;
        }
        head.assumed = Some(batch[0]);
        times.guessing = start.elapsed() - times.catching_up;
        Ok(Some(Source::Head))
    }
}
