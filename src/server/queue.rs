//! The line in front of the worker: first come, first served, with an end.
//!
//! A request waits as a [`Job`]; its connection holds the [`Ticket`] and hears of it through
//! events. Dropping the ticket, as a connection does whose client has hung up, takes the job out of
//! the line, or makes the worker stop within one layer.

#![forbid(unsafe_code)]

use crate::api::{Ask, Piece, Usage};
use crate::http::Refusal;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What becomes of a job, in this order: it starts, pieces of its reply, and one of the others.
pub enum Event {
    /// The worker has it.
    Started,
    /// The reply goes on.
    Piece(Piece),
    /// The reply is whole: its `finish_reason` and cost.
    Done(&'static str, Usage),
    /// There will be no reply, or no rest of it.
    Failed(Refusal),
}

/// A request that waits for its reply.
pub struct Job {
    /// What is asked for.
    pub ask: Arc<Ask>,
    /// Most new tokens.
    pub new_tokens: usize,
    number: u64,
    is_cancelled: Arc<AtomicBool>,
    events: Sender<Event>,
}

impl Job {
    /// Whether nobody waits for the reply any more.
    pub fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Relaxed)
    }

    /// Tells the connection, if it still listens.
    pub fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }
}

/// How many requests met which end since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Taken by the worker.
    pub admitted: u64,
    /// Answered to the end.
    pub completed: u64,
    /// Not answered by a fault of the engine.
    pub failed: u64,
    /// Turned away because the line was full.
    pub rejected: u64,
    /// Sent away because they waited too long.
    pub timed_out: u64,
    /// Left by their clients.
    pub cancelled: u64,
}

impl Counters {
    /// Each with its name.
    pub fn named(self) -> [(&'static str, u64); 6] {
        [
            ("admitted", self.admitted),
            ("completed", self.completed),
            ("failed", self.failed),
            ("rejected", self.rejected),
            ("timed_out", self.timed_out),
            ("cancelled", self.cancelled),
        ]
    }
}

/// How it stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Jobs that wait.
    pub queued: usize,
    /// Jobs that the worker has.
    pub active: usize,
    /// The ends of all before.
    pub counters: Counters,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    active: usize,
    is_closed: bool,
    last_number: u64,
    counters: Counters,
}

/// The line.
pub struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    most_active: usize,
    most_waiting: usize,
}

/// A place in the line, and behind it.
pub struct Ticket<'a> {
    queue: &'a Queue,
    number: u64,
    is_cancelled: Arc<AtomicBool>,
    /// What becomes of the job.
    pub events: Receiver<Event>,
}

impl Queue {
    /// A line that `most_waiting` can wait in, behind `most_active` jobs that the worker takes.
    pub fn new(most_active: usize, most_waiting: usize) -> Queue {
        Queue { state: Mutex::default(), changed: Condvar::new(), most_active, most_waiting }
    }

    /// The state is whole between any two statements, whoever panicked.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a job at the end. Errors: 429 if the line is full, 503 if it is closed.
    pub fn submit(&self, ask: Ask, new_tokens: usize) -> Result<Ticket<'_>, Refusal> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(shutting_down());
        }
        let before = state.active + state.waiting.len();
        if before >= self.most_active + self.most_waiting {
            state.counters.rejected += 1;
            let waiting = before.saturating_sub(self.most_active);
            let message = format!("{waiting} requests wait already");
            let refusal = Refusal::new(429, message).code("queue_full");
            return Err(refusal.header("Retry-After", "1"));
        }
        state.last_number += 1;
        let (number, is_cancelled) = (state.last_number, Arc::new(AtomicBool::new(false)));
        let (sender, events) = channel();
        let cancel = Arc::clone(&is_cancelled);
        let ask = Arc::new(ask);
        let job = Job { ask, new_tokens, number, is_cancelled: cancel, events: sender };
        state.waiting.push_back(job);
        self.changed.notify_all();
        Ok(Ticket { queue: self, number, is_cancelled, events })
    }

    /// The first job of the line. If there is none it `waits` for one, or returns `None`, as it
    /// does once the line is closed.
    pub fn next(&self, waits: bool) -> Option<Job> {
        let mut state = self.lock();
        while !state.is_closed {
            if let Some(job) = state.waiting.pop_front() {
                state.active += 1;
                state.counters.admitted += 1;
                return Some(job);
            }
            if !waits {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// The worker is done with a job of [`Queue::next`]; `count` notes its end.
    pub fn end(&self, count: impl FnOnce(&mut Counters)) {
        let mut state = self.lock();
        state.active -= 1;
        count(&mut state.counters);
    }

    /// Sends all away who wait, and lets nobody in any more.
    pub fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.waiting.drain(..).for_each(|job| job.tell(Event::Failed(shutting_down())));
        self.changed.notify_all();
    }

    /// How it stands.
    pub fn standing(&self) -> Standing {
        let State { waiting, active, counters, .. } = &*self.lock();
        Standing { queued: waiting.len(), active: *active, counters: *counters }
    }

    /// Takes a job out of the line; false if it is not in it.
    fn withdraw(&self, number: u64, count: impl FnOnce(&mut Counters)) -> bool {
        let mut state = self.lock();
        let place = state.waiting.iter().position(|job| job.number == number);
        if let Some(place) = place {
            state.waiting.remove(place);
            count(&mut state.counters);
        }
        place.is_some()
    }
}

impl Ticket<'_> {
    /// Gives up waiting. False if it was too late: the worker has the job.
    pub fn time_out(&self) -> bool {
        self.queue.withdraw(self.number, |counters| counters.timed_out += 1)
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.is_cancelled.store(true, Relaxed);
        self.queue.withdraw(self.number, |counters| counters.cancelled += 1);
    }
}

fn shutting_down() -> Refusal {
    Refusal::new(503, "the server is shutting down").code("scheduler_closed")
}
