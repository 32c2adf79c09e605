//! The worker: the one thread that owns the sessions and runs one job after the other.
//!
//! Each session is a slot that remembers a conversation. A prompt continues the slot with which it
//! has most in common; one that shares less than half of that slot's last prompt, such as a request
//! for a title between two turns, takes the slot that was not used for longest instead, so that the
//! conversation stays computed. Whatever a job does, the worker lives on.

#![forbid(unsafe_code)]

use super::queue::{Event, Job, Queue};
use crate::api::{Chosen, Piece, Turn, Usage};
use crate::engine::{Engine, Session};
use crate::error::Result;
use crate::experts;
use crate::http::Refusal;
use crate::model::Observer;
use crate::sample::{Sampler, log_probabilities};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// What the worker has done so far, for others to look at while it runs.
#[derive(Clone, Copy, Default)]
pub struct Progress {
    /// Tokens of the prompt that it runs, and how many of them are done.
    pub prefill: [usize; 2],
    /// Of all jobs that were answered to the end.
    pub totals: Usage,
    /// Of the expert store.
    pub experts: experts::Counters,
}

struct Slot<'a> {
    session: Session<'a>,
    /// Tokens of its last prompt.
    prompt_tokens: usize,
    /// When it was used: a number that grows.
    used: u64,
}

/// The worker's own.
pub struct Worker<'a> {
    engine: &'a Engine,
    queue: &'a Queue,
    progress: &'a Mutex<Progress>,
    log: fn(&str),
    slots: Vec<Slot<'a>>,
    jobs: u64,
}

impl<'a> Worker<'a> {
    /// With so many slots. Error: no memory for them.
    pub fn new(
        engine: &'a Engine,
        queue: &'a Queue,
        progress: &'a Mutex<Progress>,
        log: fn(&str),
        slots: usize,
    ) -> Result<Worker<'a>> {
        let slot = |_| Ok(Slot { session: engine.session()?, prompt_tokens: 0, used: 0 });
        let slots = (0..slots).map(slot).collect::<Result<_>>()?;
        Ok(Worker { engine, queue, progress, log, slots, jobs: 0 })
    }

    /// Runs jobs until the queue is closed.
    pub fn run(mut self) {
        while let Some(job) = self.queue.next() {
            let answered = catch_unwind(AssertUnwindSafe(|| self.answer(&job)));
            let failure = match answered {
                Ok(Ok((reason, usage))) => {
                    // Counted before it is told: who got the answer finds it counted.
                    self.queue.end(|counters| counters.completed += 1);
                    job.tell(Event::Done(reason, usage));
                    continue;
                }
                Ok(Err(_)) if job.is_cancelled() => {
                    self.queue.end(|counters| counters.cancelled += 1);
                    continue;
                }
                Ok(Err(error)) => error.to_string(),
                Err(_) => {
                    // What the panic left of the sessions is not known.
                    self.slots.iter_mut().for_each(|slot| slot.session.clear());
                    "the engine failed; the server's log says more".into()
                }
            };
            (self.log)(&failure);
            self.queue.end(|counters| counters.failed += 1);
            job.tell(Event::Failed(Refusal::new(500, failure).code("engine_error")));
        }
    }

    fn share(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Runs one job; tells the connection all but the end.
    fn answer(&mut self, job: &Job) -> Result<(&'static str, Usage)> {
        let (engine, ask) = (self.engine, &job.ask);
        job.tell(Event::Started);
        let held = self.slots.iter().map(|slot| {
            let tokens = slot.session.tokens();
            (tokens, slot.prompt_tokens.min(tokens.len()), slot.used)
        });
        let chosen = choose_slot(&held.collect::<Vec<_>>(), &ask.prompt);
        self.jobs += 1;
        let Slot { session, prompt_tokens, used } = &mut self.slots[chosen];
        (*prompt_tokens, *used) = (ask.prompt.len(), self.jobs);
        let tokenizer = engine.tokenizer()?;
        let banned = engine.never_sampled();
        let mut sampler = Sampler::new(ask.params.clone(), engine.config().vocab_size, banned)?;
        let mut turn = Turn::new(ask, tokenizer);
        let mut watch = Watch::new(job, engine, self.progress);
        let start = Instant::now();
        if ask.echo {
            job.tell(Event::Piece(watch.echo(session, tokenizer.decode(&ask.prompt, false)?)?));
        }
        let (mut first_s, mut completion) = (None, [0; 2]);
        let result =
            session.generate(&ask.prompt, job.new_tokens, &mut sampler, &mut watch, |id, watch| {
                first_s.get_or_insert_with(|| start.elapsed().as_secs_f64());
                let piece = turn.push(id, watch.chosen.pop_front());
                completion[0] += 1;
                completion[1] += usize::from(turn.is_thinking());
                if !piece.is_empty() {
                    job.tell(Event::Piece(piece));
                }
                Ok(!turn.is_complete())
            });
        let (prefill, drafts) = (watch.prefill, watch.drafts);
        while let Some(note) = engine.take_mirror_end() {
            (self.log)(&note);
        }
        let all_s = start.elapsed().as_secs_f64();
        let first_s = first_s.unwrap_or(all_s);
        let cached = prefill.map_or(ask.prompt.len(), |(first, _)| first);
        let usage = Usage {
            prompt: [ask.prompt.len(), cached],
            completion,
            drafts,
            seconds: [first_s, all_s - first_s],
        };
        self.share(|progress| {
            progress.prefill = [0; 2];
            progress.totals.add(usage);
            progress.experts = engine.expert_counters();
        });
        let (last, reason) = turn.finish(result?);
        if !last.is_empty() {
            job.tell(Event::Piece(last));
        }
        Ok((reason, usage))
    }
}

/// The slot for `prompt` among those that hold these tokens, the first so many of their last
/// prompt, and were last used at that time.
fn choose_slot(held: &[(&[u32], usize, u64)], prompt: &[u32]) -> usize {
    let common = |slot: usize| {
        let pairs = held[slot].0.iter().zip(prompt);
        pairs.take_while(|(a, b)| a == b).count()
    };
    let nearest = (0..held.len()).max_by_key(|slot| (common(*slot), held[*slot].2));
    let continues = |slot: &usize| common(*slot) > 0 && common(*slot) * 2 >= held[*slot].1;
    let oldest = || (0..held.len()).min_by_key(|slot| held[*slot].2);
    nearest.filter(continues).or_else(oldest).unwrap_or(0)
}

/// Sees the passes of one job.
struct Watch<'a> {
    job: &'a Job,
    engine: &'a Engine,
    progress: &'a Mutex<Progress>,
    /// The position of the prompt that was computed first, and how many are done.
    prefill: Option<(usize, usize)>,
    /// Drafts run along, and those that were right.
    drafts: [usize; 2],
    /// The tokens chosen and not yet told, if log-probabilities are wanted.
    chosen: VecDeque<Chosen>,
}

impl<'a> Watch<'a> {
    fn new(job: &'a Job, engine: &'a Engine, progress: &'a Mutex<Progress>) -> Watch<'a> {
        let chosen = VecDeque::new();
        Watch { job, engine, progress, prefill: None, drafts: [0; 2], chosen }
    }

    /// The prompt as the beginning of the reply; its tokens, if they are wanted, cost a pass over
    /// all of it.
    fn echo(&mut self, session: &mut Session<'_>, content: String) -> Result<Piece> {
        let mut piece = Piece { content, ..Piece::default() };
        let (prompt, Some(top_n)) = (&self.job.ask.prompt, self.job.ask.logprobs) else {
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
        if layer == self.engine.config().num_layers
            && position < tokens
            && let Some((_, done)) = &mut self.prefill
        {
            *done = position + 1;
            let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
            progress.prefill = [tokens, position + 1];
        }
    }

    fn chosen(&mut self, token: u32, logits: &[f32]) {
        // A token is only chosen by logits that have probabilities.
        let weighed = self.job.ask.logprobs.map(|top_n| weigh(token, logits, top_n));
        self.chosen.extend(weighed.and_then(Result::ok));
    }

    fn drafted(&mut self, _tokens: usize, drafts: &[u32], accepted: usize) {
        self.drafts[0] += drafts.len();
        self.drafts[1] += accepted;
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
        let empty: (&[u32], usize, u64) = (&[], 0, 0);
        // Nothing is free but slot 0, then slot 1.
        assert_eq!(choose_slot(&[empty, empty], &long), 0);
        assert_eq!(choose_slot(&[(&long, 20, 1), empty], &other), 1);
        // Both hold a conversation: the later one of the two is not the one that goes on.
        let both: [(&[u32], usize, u64); 2] = [(&long, 20, 1), (&other, 10, 2)];
        assert_eq!(choose_slot(&both, &[&long[..], &[7]].concat()), 0);
        // A title shares the system turn only; it takes the older slot, though that has nothing.
        let title = [&long[..4], &[90, 91]].concat();
        assert_eq!(choose_slot(&[(&long, 20, 3), (&other, 10, 2)], &title), 1);
        assert_eq!(choose_slot(&[(&long, 20, 3), empty], &title), 1);
        // An edited last turn keeps its slot; so does a question asked again, long as the answer
        // was.
        assert_eq!(choose_slot(&both, &long[..12]), 0);
        assert_eq!(choose_slot(&[(&long, 5, 1), (&other, 10, 2)], &long[..5]), 0);
        assert_eq!(choose_slot(&[(&long, 20, 1)], &other), 0);
    }
}
