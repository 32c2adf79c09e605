//! A fixed set of threads that work through the parts of one stage at a time.
//!
//! The caller is one of the workers, so one thread means no other thread exists. A stage is a
//! slice cut into parts; every part is handed to exactly one worker as a `&mut` slice, and the
//! call returns when all are done. Which worker computes a part never shows in its result.
//!
//! The caller waits for no worker that has not begun: it does all that is left, and closes the
//! stage. Else a worker that the scheduler wakes late, or on the caller's own core, would hold up
//! every stage.
//!
//! Between stages a worker spins for a moment, because the next stage of a forward pass follows
//! within microseconds, and then parks: an idle engine uses no CPU. Threads are not pinned, so two
//! processes on one machine share its cores as the scheduler likes. A panic in any worker reaches
//! the caller of the stage; the pool stays usable.

use std::any::Any;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a worker spins for the next stage, and the caller for the last part of this one,
/// before they let the scheduler have the core. Stages of a decode step follow each other within
/// tens of microseconds; parking and waking costs about as much.
const SPIN: Duration = Duration::from_micros(60);

/// Multiply-adds from which on a stage is shared: about 2 microseconds on one thread.
const SHARED_MACS: usize = 1 << 16;

/// A stage as the workers see it: called with the index of the worker.
type Job = dyn Fn(usize) + Sync;

/// What the caller and the workers share.
struct Shared {
    /// The number of the current stage in steps of [`STAGE`], whether it is [`OPEN`], and below
    /// that the workers inside.
    gate: AtomicUsize,
    /// The current stage, valid while the gate is open or a worker is inside.
    job: Mutex<Option<JobPointer>>,
    /// The caller, when it waits without spinning.
    caller: Mutex<Option<Thread>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

/// Bit of the gate: workers may still go in.
const OPEN: usize = 1 << 16;
/// Step of the gate from one stage to the next.
const STAGE: usize = OPEN << 1;

/// Workers inside a gate.
fn inside(gate: usize) -> usize {
    gate % OPEN
}

#[derive(Clone, Copy)]
struct JobPointer(*const Job);

// SAFETY: the pointee is Sync, and `Pool::run` keeps it alive until every worker is done with it.
unsafe impl Send for JobPointer {}

/// The threads of one engine.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One stage at a time.
    busy: Mutex<()>,
    /// Per worker the next part of its own share.
    next: Vec<Counter>,
}

/// A counter on its own cache line.
#[repr(align(64))]
#[derive(Default)]
struct Counter(AtomicUsize);

impl Pool {
    /// A pool of `threads` workers, the caller among them. Errors: none started (the system
    /// refuses); the pool then works with those it has.
    pub fn new(threads: usize) -> Pool {
        assert!(threads > 0, "a pool has at least the caller");
        let shared = Arc::new(Shared {
            gate: AtomicUsize::new(0),
            job: Mutex::new(None),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let mut workers = Vec::new();
        for worker in 1..threads {
            let theirs = Arc::clone(&shared);
            let started = thread::Builder::new()
                .name(format!("coli-{worker}"))
                .spawn(move || work(&theirs, worker));
            match started {
                Ok(handle) => workers.push(handle),
                Err(_) => break,
            }
        }
        let next = (0..=workers.len()).map(|_| Counter::default()).collect();
        Pool { shared, workers, busy: Mutex::new(()), next }
    }

    /// Workers, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(i, part i of data, scratch of the worker)` for every part: part i is
    /// `data[cuts[i]..cuts[i + 1]]`. The cuts ascend from 0 to the length of `data`; there is one
    /// scratch per thread. Each worker starts with a contiguous share of the parts, in ascending
    /// order, and then helps the others with theirs.
    pub fn for_each_part<T: Send, S: Send>(
        &self,
        data: &mut [T],
        cuts: &[usize],
        scratch: &mut [S],
        f: impl Fn(usize, &mut [T], &mut S) + Sync,
    ) {
        let parts = cuts.len().saturating_sub(1);
        if parts == 0 {
            assert!(data.is_empty(), "data without parts");
            return;
        }
        assert!(cuts.is_sorted() && cuts[0] == 0, "cuts ascend from 0");
        assert_eq!(cuts[parts], data.len(), "the last cut is the end");
        let threads = self.threads();
        assert!(scratch.len() >= threads, "a scratch for each of {threads} threads");
        if threads == 1 || parts == 1 {
            for i in 0..parts {
                f(i, &mut data[cuts[i]..cuts[i + 1]], &mut scratch[0]);
            }
            return;
        }
        let _one_stage = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let share = |worker: usize| parts * worker / threads;
        for (worker, next) in self.next.iter().enumerate() {
            next.0.store(share(worker), Ordering::Relaxed);
        }
        let (data, scratch) = (Base(data.as_mut_ptr()), Base(scratch.as_mut_ptr()));
        self.run(&|worker| {
            // SAFETY: `run` calls this at most once per worker index, each below the asserted
            // length of `scratch`, and returns before the borrow of `scratch` ends: no other
            // reference to this element exists.
            let scratch = unsafe { &mut *scratch.at(worker) };
            for owner in (0..threads).map(|i| (worker + i) % threads) {
                loop {
                    let i = self.next[owner].0.fetch_add(1, Ordering::Relaxed);
                    if i >= share(owner + 1) {
                        break;
                    }
                    let length = cuts[i + 1] - cuts[i];
                    // SAFETY: the cuts ascend and end at the length of `data` (asserted), so the
                    // range lies inside it and parts do not overlap; the counters give each i to
                    // one worker only, and `run` returns before the borrow of `data` ends.
                    let part = unsafe { std::slice::from_raw_parts_mut(data.at(cuts[i]), length) };
                    f(i, part, scratch);
                }
            }
        });
    }

    /// [`Pool::for_each_part`], on the calling thread alone when all parts together are `macs`
    /// multiply-adds that take less time than waking another thread. On a busy machine that may be
    /// milliseconds, thousands of times in a small model.
    pub fn share<T: Send, S: Send>(
        &self,
        macs: usize,
        data: &mut [T],
        cuts: &[usize],
        scratch: &mut [S],
        f: impl Fn(usize, &mut [T], &mut S) + Sync,
    ) {
        if macs >= SHARED_MACS {
            return self.for_each_part(data, cuts, scratch, f);
        }
        for (i, cut) in cuts.windows(2).enumerate() {
            f(i, &mut data[cut[0]..cut[1]], &mut scratch[0]);
        }
    }

    /// Runs `job(worker)` on the caller, and once on every worker that comes before the caller is
    /// done; waits for those. Any one of them does all that the others leave.
    fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased. Workers use the pointer between going in, which they
        // can while the gate is open, and going out, and this call does not return (nor unwind)
        // before the gate is closed and nobody is inside, so the job outlives every use.
        let job: &'static Job = unsafe { std::mem::transmute(job) };
        *lock(&shared.job) = Some(JobPointer(job));
        shared.gate.fetch_add(STAGE | OPEN, Ordering::Release);
        self.workers.iter().for_each(|worker| worker.thread().unpark());
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        shared.gate.fetch_sub(OPEN, Ordering::AcqRel);
        self.wait();
        let theirs = lock(&shared.panic).take();
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }

    /// Waits until no worker is inside.
    fn wait(&self) {
        let shared = &*self.shared;
        let running = || inside(shared.gate.load(Ordering::Acquire)) > 0;
        if spin_while(running) {
            return;
        }
        *lock(&shared.caller) = Some(thread::current());
        while running() {
            thread::park();
        }
        *lock(&shared.caller) = None;
    }
}

/// A pointer to the first element of a slice that workers take disjoint parts of.
#[derive(Clone, Copy)]
struct Base<T>(*mut T);

// SAFETY: workers only make disjoint references from it, of a type that may be sent.
unsafe impl<T: Send> Sync for Base<T> {}

impl<T> Base<T> {
    /// The element `offset`, not beyond the end of the slice.
    fn at(&self, offset: usize) -> *mut T {
        // A plain pointer: what may be made of it is argued where it is.
        self.0.wrapping_add(offset)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.gate.fetch_add(STAGE, Ordering::Release);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches every panic of a job, so it has nothing to report here.
            let _ = worker.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Spins while `condition` holds, but not longer than [`SPIN`]; returns whether it ended.
fn spin_while(condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            if !condition() {
                return true;
            }
            spin_loop();
        }
        if start.elapsed() > SPIN {
            return false;
        }
    }
}

/// The life of one worker.
fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        let stage = || shared.gate.load(Ordering::Acquire) / STAGE;
        let waits = || stage() == seen;
        if !spin_while(waits) {
            while waits() {
                thread::park();
            }
        }
        seen = stage();
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        let enter = |gate: usize| {
            let is_open = gate / STAGE == seen && gate & OPEN != 0;
            is_open.then_some(gate + 1)
        };
        if shared.gate.fetch_update(Ordering::AcqRel, Ordering::Acquire, enter).is_err() {
            continue;
        }
        let job = lock(&shared.job).expect("a stage has a job");
        // SAFETY: this worker went in while the gate was open: `Pool::run` waits until it goes out.
        let job: &Job = unsafe { &*job.0 };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(worker))) {
            lock(&shared.panic).get_or_insert(payload);
        }
        let gate = shared.gate.fetch_sub(1, Ordering::AcqRel);
        if inside(gate) == 1
            && let Some(caller) = &*lock(&shared.caller)
        {
            caller.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_computed_once_for_any_number_of_threads() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            let mut scratch = vec![0usize; threads];
            for parts in [0, 1, 2, 7, 100] {
                let cuts: Vec<usize> = (0..=parts).map(|i| i * (i + 1) / 2).collect();
                let mut data = vec![0u32; *cuts.last().unwrap()];
                pool.for_each_part(&mut data, &cuts, &mut scratch, |i, part, count| {
                    part.iter_mut().for_each(|x| *x += 1 + i as u32);
                    *count += part.len();
                });
                for i in 0..parts {
                    assert!(data[cuts[i]..cuts[i + 1]].iter().all(|x| *x == 1 + i as u32));
                }
            }
            assert_eq!(scratch.iter().sum::<usize>(), 1 + 3 + 28 + 5050);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3);
        let (mut data, cuts) = ([0u8; 40], (0..=40).collect::<Vec<_>>());
        let mut scratch = [(); 3];
        for bad in [0, 39] {
            let stage = AssertUnwindSafe(|| {
                pool.for_each_part(&mut data, &cuts, &mut scratch, |i, _, ()| {
                    assert!(i != bad, "part {bad} fails");
                });
            });
            let payload = catch_unwind(stage).unwrap_err();
            assert_eq!(payload.downcast_ref::<String>().unwrap(), &format!("part {bad} fails"));
            pool.for_each_part(&mut data, &cuts, &mut scratch, |i, x, ()| x[0] = i as u8);
            assert!((0..40).all(|i| data[i] == i as u8));
        }
    }

    /// Parked workers, and a caller that has to wait longer than it spins.
    #[test]
    fn idle_workers_wake_and_slow_parts_are_waited_for() {
        let pool = Pool::new(2);
        let (mut data, mut scratch) = ([0u8; 2], [(), ()]);
        for _ in 0..3 {
            thread::sleep(5 * SPIN);
            pool.for_each_part(&mut data, &[0, 1, 2], &mut scratch, |_, x, ()| {
                thread::sleep(3 * SPIN);
                x[0] += 1;
            });
        }
        assert_eq!(data, [3, 3]);
    }
}
