//! The worker: the one thread that owns the sessions and runs the jobs, several at a time.
//!
//! Each session is a slot that remembers a conversation. A prompt continues the slot with which it
//! has most in common; one that shares less than half of that slot's last prompt, such as a request
//! for a title between two turns, takes the slot that was not used for longest instead, so that the
//! conversation stays computed. What any slot has of the beginning is copied, not computed anew.
//!
//! Each slot runs one job at a time, and all jobs that run share each forward pass. Whatever a job
//! does, the worker lives on, and so do the others.

#![forbid(unsafe_code)]

use super::Settings;
use super::kept::Kept;
use super::queue::{Event, Job, Queue};
use crate::api::{Chosen, Piece, Turn, Usage};
use crate::engine::{Engine, Finish, Generation, Member, Session};
use crate::error::{Error, Result};
use crate::http::Refusal;
use crate::model::Observer;
use crate::sample::{Choose, log_probabilities};
use crate::state::common_tokens;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two lines of the log about one prompt.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// What is told of a panic.
const PANICKED: &str = "the engine failed; the server's log says more";

/// What the worker has done so far, for others to look at while it runs.
#[derive(Clone, Copy, Default)]
pub struct Progress {
    /// Tokens of the prompt that it runs, and how many of them are done.
    pub prefill: [usize; 2],
    /// Of all jobs that were answered to the end.
    pub totals: Usage,
    /// Tokens told in all, by a job that runs, too.
    pub tokens: usize,
    /// Drafts run along in all, and those that were right.
    pub drafts: [usize; 2],
}

#[derive(Clone, Copy)]
struct Shared<'a> {
    engine: &'a Engine,
    progress: &'a Mutex<Progress>,
    log: fn(&str),
}

impl Shared<'_> {
    fn share(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

struct Slot<'a> {
    session: Session<'a>,
    /// Tokens of its last prompt.
    prompt_tokens: usize,
    /// Number of its last job, and so the order in which slots were used.
    used: u64,
    /// Where its session is saved.
    file: Option<PathBuf>,
    running: Option<Running<'a>>,
}

/// The worker's own.
pub struct Worker<'a> {
    shared: Shared<'a>,
    queue: &'a Queue,
    kept: Option<Kept>,
    slots: Vec<Slot<'a>>,
    jobs: u64,
}

impl<'a> Worker<'a> {
    /// Errors: no memory for the slots, no directory for saved sessions.
    pub fn new(
        engine: &'a Engine,
        queue: &'a Queue,
        progress: &'a Mutex<Progress>,
        settings: &Settings,
    ) -> Result<Worker<'a>> {
        let slot = |_| {
            let session = engine.session()?;
            Ok(Slot { session, prompt_tokens: 0, used: 0, file: None, running: None })
        };
        let slots = (0..settings.kv_slots).map(slot).collect::<Result<_>>()?;
        let log = settings.log;
        let kept = settings.sessions.as_ref();
        let kept = kept.map(|(dir, bytes)| Kept::new(engine, dir, *bytes, log)).transpose()?;
        Ok(Worker { shared: Shared { engine, progress, log }, queue, kept, slots, jobs: 0 })
    }

    /// Runs jobs until the queue is closed and those that run are at their ends.
    pub fn run(mut self) {
        loop {
            let running = self.slots.iter().filter(|slot| slot.running.is_some()).count();
            if running < self.slots.len() {
                match self.queue.next(running == 0) {
                    Some(job) => {
                        let job = Arc::new(job);
                        if !self.guarded(|worker| worker.begin(&job)) {
                            job.fail(PANICKED, self.queue, self.shared.log);
                        }
                        continue;
                    }
                    None if running == 0 => return,
                    None => {}
                }
            }
            self.guarded(Worker::step);
        }
    }

    /// Whether there was no panic. One ends all jobs that run: what it left of the sessions is not
    /// known.
    fn guarded(&mut self, work: impl FnOnce(&mut Worker<'a>)) -> bool {
        if catch_unwind(AssertUnwindSafe(|| work(self))).is_ok() {
            return true;
        }
        for slot in &mut self.slots {
            slot.session.clear();
            if let Some(running) = slot.running.take() {
                running.job.fail(PANICKED, self.queue, self.shared.log);
            }
        }
        false
    }

    /// Gives the job a slot.
    fn begin(&mut self, job: &Arc<Job>) {
        job.tell(Event::Started);
        let held = self.slots.iter().map(|slot| {
            let tokens = slot.session.tokens();
            let is_free = slot.running.is_none();
            (tokens, slot.prompt_tokens.min(tokens.len()), is_free.then_some(slot.used))
        });
        let prompt = &job.ask.prompt;
        let (chosen, nearest) = choose_slot(&held.collect::<Vec<_>>(), prompt);
        let slot = &mut self.slots[chosen];
        Kept::let_go(&mut slot.session, &mut slot.file, prompt);
        if let Ok([slot, nearest]) = self.slots.get_disjoint_mut([chosen, nearest]) {
            slot.session.copy_prefix(&nearest.session, prompt);
        }
        self.jobs += 1;
        let others = self.slots.iter().enumerate().filter(|(index, _)| *index != chosen);
        let in_use: Vec<PathBuf> = others.filter_map(|(_, slot)| slot.file.clone()).collect();
        let slot = &mut self.slots[chosen];
        if let Some(kept) = &self.kept {
            kept.restore(&mut slot.session, &mut slot.file, prompt, &in_use);
        }
        (slot.prompt_tokens, slot.used) = (prompt.len(), self.jobs);
        match Running::new(job, self.shared, &mut slot.session) {
            Ok(running) => slot.running = Some(running),
            Err(error) => job.fail_or_leave(&error, self.queue, self.shared.log),
        }
    }

    /// Saves the session of a job that is at its end.
    fn save(&mut self, number: u64) {
        let Some(kept) = &self.kept else { return };
        let in_use: Vec<PathBuf> = self.slots.iter().filter_map(|slot| slot.file.clone()).collect();
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.used == number) {
            kept.save(&mut slot.session, &mut slot.file, &in_use);
        }
    }

    /// One forward pass of all jobs that run.
    fn step(&mut self) {
        let mut members: Vec<(u64, Member<'_, 'a>)> = Vec::new();
        for Slot { session, used, running, .. } in &mut self.slots {
            let Some(running) = running else { continue };
            let Running { generation, chooser, watch, .. } = running;
            let (chooser, failure) = (&mut **chooser, None);
            members
                .push((*used, Member { session, generation, chooser, observer: watch, failure }));
        }
        // Prompts are run in the order in which they came.
        members.sort_by_key(|(number, _)| *number);
        let (numbers, mut members): (Vec<u64>, Vec<Member<'_, 'a>>) = members.into_iter().unzip();
        self.shared.engine.pass(&mut members);
        let failures: Vec<Option<Error>> = members.into_iter().map(|m| m.failure).collect();
        while let Some(note) = self.shared.engine.take_mirror_end() {
            (self.shared.log)(&note);
        }
        for (number, failure) in numbers.into_iter().zip(failures) {
            let slot = self.slots.iter_mut().find(|slot| slot.used == number);
            let Some(slot) = slot else { continue };
            let Some(mut running) = slot.running.take() else { continue };
            let finish = failure.map_or_else(|| running.tell(), Err);
            match finish {
                Ok(None) => slot.running = Some(running),
                finish => {
                    running.end(finish, self.queue);
                    self.save(number);
                }
            }
        }
    }
}

/// The slot for `prompt` among those that hold these tokens, the first so many of their last
/// prompt, and were last used at that time, which a busy one does not tell; and the slot that has
/// most of it. One at least is free.
fn choose_slot(held: &[(&[u32], usize, Option<u64>)], prompt: &[u32]) -> (usize, usize) {
    let common = |slot: usize| common_tokens(held[slot].0, prompt);
    let all = 0..held.len();
    let free = || all.clone().filter(|slot| held[*slot].2.is_some());
    let nearest = free().max_by_key(|slot| (common(*slot), held[*slot].2));
    let continues = |slot: &usize| common(*slot) > 0 && common(*slot) * 2 >= held[*slot].1;
    let oldest = || free().min_by_key(|slot| held[*slot].2);
    let chosen = nearest.filter(continues).or_else(oldest).unwrap_or(0);
    (chosen, all.max_by_key(|slot| common(*slot)).unwrap_or(0))
}

/// A job that has a slot.
struct Running<'a> {
    job: Arc<Job>,
    shared: Shared<'a>,
    generation: Generation,
    chooser: Box<dyn Choose + 'a>,
    watch: Watch<'a>,
    turn: Turn<'a>,
    start: Instant,
    /// Seconds to the first token.
    first_s: Option<f64>,
    /// Tokens told, and those of them that are thoughts.
    completion: [usize; 2],
}

impl<'a> Running<'a> {
    /// Ready for its first pass; an echo is told. Errors: those of the sampler and of the echo.
    fn new(job: &Arc<Job>, shared: Shared<'a>, session: &mut Session<'a>) -> Result<Running<'a>> {
        let (engine, ask) = (shared.engine, &job.ask);
        let (start, tokenizer) = (Instant::now(), engine.tokenizer()?);
        let chooser = ask.chooser(engine)?;
        let mut watch = Watch::new(job, shared);
        if ask.echo {
            job.tell(Event::Piece(watch.echo(session, tokenizer.decode(&ask.prompt, false)?)?));
        }
        Ok(Running {
            job: Arc::clone(job),
            shared,
            generation: Generation::new(engine, &ask.prompt, job.new_tokens),
            chooser,
            watch,
            turn: Turn::new(Arc::clone(ask), tokenizer, shared.log),
            start,
            first_s: None,
            completion: [0; 2],
        })
    }

    /// Tells the tokens of the last pass; says whether it is at its end.
    fn tell(&mut self) -> Result<Option<Finish>> {
        if self.job.is_cancelled() {
            return Err(Error::interrupted());
        }
        while let Some(id) = self.generation.next_token() {
            self.first_s.get_or_insert_with(|| self.start.elapsed().as_secs_f64());
            let piece = self.turn.push(id, self.watch.chosen.pop_front());
            self.completion[0] += 1;
            self.shared.share(|progress| progress.tokens += 1);
            self.completion[1] += usize::from(self.turn.is_thinking());
            if !piece.is_empty() {
                self.job.tell(Event::Piece(piece));
            }
            if self.turn.is_complete() {
                return Ok(Some(Finish::Stop));
            }
        }
        Ok(self.generation.finish())
    }

    /// Tells the end, and what it cost.
    fn end(self, finish: Result<Option<Finish>>, queue: &Queue) {
        let Running { job, shared, watch, mut turn, start, completion, .. } = self;
        let all_s = start.elapsed().as_secs_f64();
        let first_s = self.first_s.unwrap_or(all_s);
        let prompt_tokens = job.ask.prompt.len();
        let cached = watch.prefill.map_or(prompt_tokens, |(first, _)| first);
        let usage = Usage {
            prompt: [prompt_tokens, cached],
            completion,
            drafts: watch.drafts,
            seconds: [first_s, all_s - first_s],
        };
        shared.share(|progress| {
            progress.prefill = [0; 2];
            progress.totals.add(usage);
        });
        let finish = match finish {
            Ok(finish) => finish.unwrap_or(Finish::Length),
            Err(error) => return job.fail_or_leave(&error, queue, shared.log),
        };
        let (last, reason) = turn.finish(finish);
        if !last.is_empty() {
            job.tell(Event::Piece(last));
        }
        // Counted before it is told: who got the answer finds it counted.
        queue.end(|counters| counters.completed += 1);
        job.tell(Event::Done(reason, usage));
    }
}

impl Job {
    fn fail_or_leave(&self, error: &Error, queue: &Queue, log: fn(&str)) {
        if self.is_cancelled() {
            return queue.end(|counters| counters.cancelled += 1);
        }
        self.fail(&error.to_string(), queue, log);
    }

    fn fail(&self, failure: &str, queue: &Queue, log: fn(&str)) {
        log(failure);
        queue.end(|counters| counters.failed += 1);
        self.tell(Event::Failed(Refusal::new(500, failure).code("engine_error")));
    }
}

/// Sees the passes of one job.
struct Watch<'a> {
    job: Arc<Job>,
    shared: Shared<'a>,
    /// The position of the prompt that was computed first, and how many are done.
    prefill: Option<(usize, usize)>,
    logged: Instant,
    /// Drafts run along, and those that were right.
    drafts: [usize; 2],
    /// The tokens chosen and not yet told, if log-probabilities are wanted.
    chosen: VecDeque<Chosen>,
}

impl<'a> Watch<'a> {
    fn new(job: &Arc<Job>, shared: Shared<'a>) -> Watch<'a> {
        let (job, logged, chosen) = (Arc::clone(job), Instant::now(), VecDeque::new());
        Watch { job, shared, prefill: None, logged, drafts: [0; 2], chosen }
    }

    /// The prompt as the beginning of the reply; its tokens, if they are wanted, cost a pass over
    /// all of it.
    fn echo(&mut self, session: &mut Session<'_>, content: String) -> Result<Piece> {
        let mut piece = Piece { content, ..Piece::default() };
        let job = Arc::clone(&self.job);
        let (prompt, Some(top_n)) = (&job.ask.prompt, job.ask.logprobs) else {
            return Ok(piece);
        };
        piece.chosen.push(Chosen { id: prompt[0], logprob: None, top: Vec::new() });
        let mut next = prompt[1..].iter();
        session.logits_from(prompt, 0, self, |logits| {
            if let Some(id) = next.next() {
                piece.chosen.push(weigh(*id, logits, top_n)?);
            }
            Ok(())
        })?;
        Ok(piece)
    }
}

fn weigh(id: u32, logits: &[f32], top_n: usize) -> Result<Chosen> {
    let mut top = Vec::new();
    let logprob = Some(log_probabilities(logits, id, top_n, &mut top)?);
    Ok(Chosen { id, logprob, top })
}

impl Observer for Watch<'_> {
    fn hidden(&mut self, layer: usize, position: usize, _hidden: &[f32]) {
        let tokens = self.job.ask.prompt.len();
        if layer == 0 && self.prefill.is_none() {
            self.prefill = Some((position, position));
        }
        // Only the last layer tells that a position is done.
        if layer == self.shared.engine.config().num_layers
            && position < tokens
            && let Some((_, done)) = &mut self.prefill
        {
            *done = position + 1;
            self.shared.share(|progress| progress.prefill = [tokens, position + 1]);
            if self.logged.elapsed() >= LOG_EVERY {
                self.logged = Instant::now();
                (self.shared.log)(&format!("prompt: {} of {tokens} tokens", position + 1));
            }
        }
    }

    fn chosen(&mut self, token: u32, logits: &[f32]) {
        // A token is only chosen by logits that have probabilities.
        let weighed = self.job.ask.logprobs.map(|top_n| weigh(token, logits, top_n));
        self.chosen.extend(weighed.and_then(Result::ok));
    }

    fn drafted(&mut self, _tokens: usize, drafts: &[u32], accepted: usize) {
        let counts = [drafts.len(), accepted];
        let add = |sums: &mut [usize; 2]| sums.iter_mut().zip(counts).for_each(|(s, n)| *s += n);
        add(&mut self.drafts);
        self.shared.share(|progress| add(&mut progress.drafts));
    }

    fn interrupted(&mut self) -> bool {
        self.job.is_cancelled()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_finds_its_conversation_and_a_side_request_leaves_it_alone() {
        let long: Vec<u32> = (0..20).collect();
        let other: Vec<u32> = (50..60).collect();
        let empty: (&[u32], usize, Option<u64>) = (&[], 0, Some(0));
        // Nothing is free but slot 0, then slot 1.
        assert_eq!(choose_slot(&[empty, empty], &long).0, 0);
        assert_eq!(choose_slot(&[(&long, 20, Some(1)), empty], &other).0, 1);
        assert_eq!(choose_slot(&[(&long, 20, None), empty], &long), (1, 0));
        // Both hold a conversation: the later one of the two is not the one that goes on.
        let both: [(&[u32], usize, Option<u64>); 2] = [(&long, 20, Some(1)), (&other, 10, Some(2))];
        assert_eq!(choose_slot(&both, &[&long[..], &[7]].concat()), (0, 0));
        // A title shares the system turn only; it takes the older slot, though that has nothing,
        // and copies what they share.
        let title = [&long[..4], &[90, 91]].concat();
        assert_eq!(choose_slot(&[(&long, 20, Some(3)), (&other, 10, Some(2))], &title), (1, 0));
        assert_eq!(choose_slot(&[(&long, 20, Some(3)), empty], &title), (1, 0));
        // An edited last turn keeps its slot; so does a question asked again, long as the answer
        // was.
        assert_eq!(choose_slot(&both, &long[..12]).0, 0);
        let short = [(&long[..], 5, Some(1)), (&other[..], 10, Some(2))];
        assert_eq!(choose_slot(&short, &long[..5]).0, 0);
        assert_eq!(choose_slot(&[(&long, 20, Some(1))], &other).0, 0);
    }
}
