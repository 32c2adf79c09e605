//! Positional reads that either fill the buffer or say exactly what was missing.
//!
//! One read call may return early (it is capped near 2 GiB, and signals interrupt it); the loop
//! here goes on until the buffer is full. A file that ends too soon is its own error with file,
//! tensor, offset, wanted and got: it is never reported as whatever the OS said last.
//!
//! A drive is fast only with many reads in flight: [`Readers`] are the threads that wait for it.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::{Context, Result};
use std::collections::VecDeque;
use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

mod choose;
pub use choose::{Direct, PROBE_BYTES_MIN, prepare, probe};

/// Something that can be read at an offset without moving a cursor.
pub trait ReadAt {
    /// Reads up to `buffer.len()` bytes at `offset`; 0 means the end of the file.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, offset)
    }
}

/// Fills `buffer` from `offset` of `file`.
///
/// `path` and `what` (usually the tensor's name) are for the error: an OS failure, or the file
/// ending before the buffer is full.
pub fn read_exact_at(
    file: &impl ReadAt,
    path: &Path,
    what: impl Display,
    offset: u64,
    buffer: &mut [u8],
) -> Result<()> {
    let mut got = 0;
    while got < buffer.len() {
        match file.read_at(&mut buffer[got..], offset + got as u64) {
            Ok(0) => bail!(
                "{}: {what}: the file ends too soon: wanted {} bytes at offset {offset}, got {got}",
                path.display(),
                buffer.len()
            ),
            Ok(count) => got += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                return Err(error).context(|| {
                    format!("{}: {what}: read at offset {}", path.display(), offset + got as u64)
                });
            }
        }
    }
    Ok(())
}

/// Where reads around the page cache start and end, in the file and in memory: a multiple of the
/// block size of any drive in use.
pub const DIRECT_ALIGN: usize = 4096;

/// O_DIRECT of Linux on x86-64 and 64-bit ARM: reads go around the page cache.
#[cfg(target_arch = "x86_64")]
const DIRECT: i32 = 0x4000;
#[cfg(not(target_arch = "x86_64"))]
const DIRECT: i32 = 0x10000;

/// Opens `path` for reads around the page cache. Error: the file system has none, or others.
pub fn open_direct(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(DIRECT).open(path)
}

/// Reads from `offset` of a file that [`open_direct`] opened into `buffer`, both aligned; false
/// when the system refuses or fewer than `needed` bytes come. (The rest may lie behind the end of
/// the file.)
pub fn read_direct(file: &impl ReadAt, offset: u64, buffer: &mut [u8], needed: usize) -> bool {
    let mut got = 0;
    while got < needed {
        match file.read_at(&mut buffer[got..], offset + got as u64) {
            Ok(count) if count > 0 => got += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return false,
        }
    }
    true
}

/// Threads that wait for the disk. Jobs start in the order in which they came, those that can wait
/// behind all others and few at a time; results are taken in the order in which they ended.
///
/// A job is done in steps, and is told each time whether it can wait. One that can gives way
/// between two steps as soon as another is there that cannot.
pub struct Readers<T> {
    queue: Arc<Queue<T>>,
    threads: Vec<JoinHandle<()>>,
}

/// Does a step of its work, told whether it can wait; `None` while more is to be done.
type Job<T> = Box<dyn FnMut(bool) -> Option<T> + Send>;

/// Jobs that can wait which run at a time: a drive is nearly as fast with two reads in flight as
/// with many, and a job that cannot wait still finds a free thread.
const LATER_MAX: usize = 2;

struct Jobs<T> {
    now: VecDeque<Job<T>>,
    /// Jobs that can wait, with what they are called.
    later: VecDeque<(u64, Job<T>)>,
    /// Of those, which are in a step; and whether they must not wait any more.
    later_running: Vec<(u64, bool)>,
    /// Threads that are in a step, and since when some are.
    running: usize,
    busy_since: Instant,
    /// Time before that in which some were.
    busy: Duration,
    /// The threads are to end.
    stop: bool,
}

struct Queue<T> {
    jobs: Mutex<Jobs<T>>,
    more: Condvar,
    results: Mutex<VecDeque<thread::Result<T>>>,
    ended: Condvar,
}

impl<T: Send + 'static> Readers<T> {
    /// Starts `count` threads. Error: the system gives none.
    pub fn new(count: usize) -> Result<Readers<T>> {
        let queue = Arc::new(Queue {
            jobs: Mutex::new(Jobs {
                now: VecDeque::new(),
                later: VecDeque::new(),
                later_running: Vec::new(),
                running: 0,
                busy_since: Instant::now(),
                busy: Duration::ZERO,
                stop: false,
            }),
            more: Condvar::new(),
            results: Mutex::default(),
            ended: Condvar::new(),
        });
        let mut threads = Vec::new();
        for i in 0..count {
            let queue = Arc::clone(&queue);
            let thread = thread::Builder::new().name(format!("coli-read-{i}"));
            let started = thread.spawn(move || queue.work());
            match started {
                Ok(thread) => threads.push(thread),
                Err(error) if threads.is_empty() => {
                    bail!("cannot start a thread that reads: {error}");
                }
                Err(_) => break,
            }
        }
        Ok(Readers { queue, threads })
    }

    /// Leaves a job to the threads.
    pub fn submit(&self, job: impl FnMut(bool) -> Option<T> + Send + 'static) {
        lock(&self.queue.jobs).now.push_back(Box::new(job));
        self.queue.more.notify_one();
    }

    /// Leaves a job to the threads that can wait; `name` is for the two methods below.
    pub fn submit_later(&self, name: u64, job: impl FnMut(bool) -> Option<T> + Send + 'static) {
        lock(&self.queue.jobs).later.push_back((name, Box::new(job)));
        self.queue.more.notify_one();
    }

    /// Lets a job wait no longer, if it is one that can.
    pub fn hurry(&self, name: u64) {
        let mut jobs = lock(&self.queue.jobs);
        if let Some(running) = jobs.later_running.iter_mut().find(|(later, _)| *later == name) {
            running.1 = true;
        } else if let Some(at) = jobs.later.iter().position(|(later, _)| *later == name) {
            let (_, job) = jobs.later.remove(at).expect("it was found");
            jobs.now.push_back(job);
            self.queue.more.notify_one();
        }
    }

    /// Forgets the jobs that can wait, are in no step, and are not to be kept; returns their names.
    pub fn forget_later(&self, keep: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut forgotten = Vec::new();
        lock(&self.queue.jobs).later.retain(|(name, _)| {
            let is_kept = keep(*name);
            forgotten.extend((!is_kept).then_some(*name));
            is_kept
        });
        forgotten
    }

    /// Time so far in which some job was in a step.
    pub fn busy(&self) -> Duration {
        let jobs = lock(&self.queue.jobs);
        jobs.busy + if jobs.running > 0 { jobs.busy_since.elapsed() } else { Duration::ZERO }
    }

    /// The result of a job that ended, if there is one. A job's panic goes on here.
    pub fn try_take(&self) -> Option<T> {
        let result = lock(&self.queue.results).pop_front()?;
        Some(result.unwrap_or_else(|payload| resume_unwind(payload)))
    }

    /// The result of the next job that ends. The caller knows that there is one.
    pub fn take(&self) -> T {
        let mut results = lock(&self.queue.results);
        loop {
            if let Some(result) = results.pop_front() {
                return result.unwrap_or_else(|payload| resume_unwind(payload));
            }
            results = self.queue.ended.wait(results).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Jobs<T> {
    /// A job to do a step of; with its name if it can wait.
    fn start(&mut self) -> Option<(Option<u64>, Job<T>)> {
        let mut next = self.now.pop_front().map(|job| (None, job));
        if next.is_none() && self.later_running.len() < LATER_MAX {
            let (name, job) = self.later.pop_front()?;
            self.later_running.push((name, false));
            next = Some((Some(name), job));
        }
        if next.is_some() && self.running == 0 {
            self.busy_since = Instant::now();
        }
        self.running += next.is_some() as usize;
        next
    }

    /// Ends the step of a job, which goes on if it is given.
    fn end(&mut self, name: Option<u64>, job: Option<Job<T>>) {
        self.running -= 1;
        if self.running == 0 {
            self.busy += self.busy_since.elapsed();
        }
        let at = self.later_running.iter().position(|(running, _)| Some(*running) == name);
        let is_hurried = at.is_some_and(|at| self.later_running.swap_remove(at).1);
        match (job, name) {
            (Some(job), Some(name)) if !is_hurried => self.later.push_front((name, job)),
            (Some(job), _) => self.now.push_front(job),
            (None, _) => {}
        }
    }
}

impl<T> Queue<T> {
    /// The life of one thread.
    fn work(&self) {
        let mut jobs = lock(&self.jobs);
        while !jobs.stop {
            let Some((name, mut job)) = jobs.start() else {
                jobs = self.more.wait(jobs).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(jobs);
            let step = catch_unwind(AssertUnwindSafe(|| job(name.is_some()))).transpose();
            jobs = lock(&self.jobs);
            jobs.end(name, step.is_none().then_some(job));
            // Not before the end: whoever has the result may give another job the same name.
            if let Some(result) = step {
                lock(&self.results).push_back(result);
                self.ended.notify_one();
            }
            // Another thread may have left the next one alone.
            if name.is_some() && !jobs.later.is_empty() {
                self.more.notify_one();
            }
        }
    }
}

impl<T> Drop for Readers<T> {
    fn drop(&mut self) {
        lock(&self.queue.jobs).stop = true;
        self.queue.more.notify_all();
        for thread in self.threads.drain(..) {
            // Panics of jobs were caught; a thread has nothing else to report.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    /// Returns at most 7 bytes a call and is interrupted before each of them.
    struct Choppy<'a> {
        bytes: &'a [u8],
        interrupt: Cell<bool>,
    }

    impl ReadAt for Choppy<'_> {
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
            if self.interrupt.replace(!self.interrupt.get()) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let rest = self.bytes.get(offset as usize..).unwrap_or_default();
            let count = rest.len().min(buffer.len()).min(7);
            buffer[..count].copy_from_slice(&rest[..count]);
            Ok(count)
        }
    }

    #[test]
    fn short_and_interrupted_reads_are_continued() {
        let bytes: Vec<u8> = (0..100).collect();
        let file = Choppy { bytes: &bytes, interrupt: Cell::new(true) };
        let mut buffer = [0; 96];
        read_exact_at(&file, Path::new("x"), "t", 3, &mut buffer).unwrap();
        assert_eq!(buffer[..], bytes[3..99]);
    }

    #[test]
    fn a_truncated_file_names_file_tensor_offset_and_counts() {
        let file = Choppy { bytes: &[1; 50], interrupt: Cell::new(false) };
        let mut buffer = [0; 96];
        let error = read_exact_at(&file, Path::new("out-00001.safetensors"), "w", 10, &mut buffer);
        assert_eq!(
            error.unwrap_err().to_string(),
            "out-00001.safetensors: w: the file ends too soon: wanted 96 bytes at offset 10, \
             got 40"
        );
    }

    #[test]
    fn an_os_error_keeps_its_own_text() {
        struct Broken;
        impl ReadAt for Broken {
            fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<usize> {
                Err(io::Error::new(io::ErrorKind::PermissionDenied, "not yours"))
            }
        }
        let error = read_exact_at(&Broken, Path::new("f"), "w", 5, &mut [0; 4]).unwrap_err();
        assert_eq!(error.to_string(), "f: w: read at offset 5: not yours");
    }

    #[test]
    fn readers_do_every_job_once_and_several_at_a_time() {
        let readers = Readers::new(3).unwrap();
        let together = Arc::new(std::sync::Barrier::new(3));
        for i in 0..30 {
            let together = Arc::clone(&together);
            readers.submit(move |_| {
                // Three jobs must be running, or none of them ever ends.
                together.wait();
                Some(i)
            });
        }
        let mut ended: Vec<i32> = (0..30).map(|_| readers.take()).collect();
        ended.sort();
        assert_eq!(ended, (0..30).collect::<Vec<_>>());
        assert!(readers.try_take().is_none());
    }

    /// While the one thread is held up, five jobs queue: two of them can wait.
    #[test]
    fn jobs_that_can_wait_do_unless_they_are_hurried_or_forgotten() {
        let readers = Readers::new(1).unwrap();
        let gate = Arc::new(std::sync::Barrier::new(2));
        let theirs = Arc::clone(&gate);
        readers.submit(move |_| {
            theirs.wait();
            Some(0)
        });
        readers.submit_later(10, |_| Some(10));
        readers.submit_later(11, |_| Some(11));
        readers.submit_later(12, |_| Some(12));
        readers.submit(|_| Some(1));
        readers.submit(|_| Some(2));
        readers.hurry(11);
        assert_eq!(readers.queue.jobs.lock().unwrap().later.len(), 2);
        gate.wait();
        assert_eq!([0; 6].map(|_| readers.take()), [0, 1, 2, 11, 10, 12]);

        let theirs = Arc::clone(&gate);
        readers.submit(move |_| {
            theirs.wait();
            Some(0)
        });
        readers.submit_later(13, |_| Some(13));
        readers.submit_later(14, |_| Some(14));
        assert_eq!(readers.forget_later(|name| name == 14), [13]);
        readers.submit(|_| Some(3));
        gate.wait();
        assert_eq!([0; 3].map(|_| readers.take()), [0, 3, 14]);
        assert!(readers.try_take().is_none());
    }

    /// Three steps of a job that can wait. Before the second, another job comes that cannot; before
    /// the third, it is hurried, and what comes then does not overtake it.
    #[test]
    fn a_job_that_can_wait_gives_way_between_its_steps() {
        let readers = Arc::new(Readers::new(1).unwrap());
        let (theirs, mut step, mut told) = (Arc::clone(&readers), 0, Vec::new());
        readers.submit_later(7, move |can_wait| {
            step += 1;
            told.push(can_wait);
            match step {
                1 => theirs.submit(|_| Some(vec![])),
                2 => {
                    theirs.hurry(7);
                    theirs.submit(|_| Some(vec![false]));
                }
                _ => return Some(std::mem::take(&mut told)),
            }
            None
        });
        let order = [0; 3].map(|_| readers.take());
        assert_eq!(order, [vec![], vec![true, true, false], vec![false]]);
        assert!(readers.busy() > Duration::ZERO);
    }

    /// Whoever has its result may ask for the same again at once, and hurry that. Another thread
    /// makes the readers wait for their turn to note the end.
    #[test]
    fn a_job_whose_result_is_there_no_longer_counts_as_running() {
        let readers = Readers::new(2).unwrap();
        let is_over = AtomicBool::new(false);
        let mut running = 0;
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    readers.busy();
                }
            });
            for i in 0..2000 {
                readers.submit_later(7, move |_| Some(i));
                assert_eq!(readers.take(), i);
                running += lock(&readers.queue.jobs).later_running.len();
            }
            is_over.store(true, Relaxed);
        });
        assert_eq!(running, 0);
    }

    #[test]
    fn a_panic_in_a_job_reaches_whoever_takes_its_result() {
        let readers = Readers::new(1).unwrap();
        readers.submit(|_| panic!("the drive is gone"));
        readers.submit(|_| Some(5));
        let payload = catch_unwind(AssertUnwindSafe(|| readers.take())).unwrap_err();
        assert_eq!(payload.downcast_ref::<&str>(), Some(&"the drive is gone"));
        assert_eq!(readers.take(), 5);
        // Jobs that nobody waits for do not hang the end.
        (0..100).for_each(|_| readers.submit(|_| Some(0)));
    }

    /// 100 bytes from a file of 130, in blocks of 64: the second block is half behind the end.
    #[test]
    fn a_direct_read_may_end_with_the_file_but_not_before_what_is_needed() {
        let bytes: Vec<u8> = (0..130).collect();
        let file = Choppy { bytes: &bytes, interrupt: Cell::new(false) };
        let mut buffer = [0; 128];
        assert!(read_direct(&file, 64, &mut buffer, 66));
        assert_eq!(buffer[..66], bytes[64..130]);
        assert!(!read_direct(&file, 64, &mut buffer, 67));
    }
}
