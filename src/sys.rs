//! What is asked of the operating system beyond plain `std`: signals, memory in large pages, what
//! `/proc` says about our memory, room on a file system, the limit of open files, and whole files
//! that are read with a bound.
//!
//! This file holds every `extern "C"` of the crate.

use crate::bail;
use crate::error::Result;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static TERMINATED: AtomicBool = AtomicBool::new(false);

const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;
const SIGPIPE: i32 = 13;
const SIG_DFL: usize = 0;

const PROT_READ_WRITE: i32 = 3;
const MAP_PRIVATE_ANONYMOUS: i32 = 0x22;
const MADV_HUGEPAGE: i32 = 14;
const POSIX_FADV_DONTNEED: i32 = 4;

const POLLIN: i16 = 1;

const W_OK: i32 = 2;
const RLIMIT_NOFILE: i32 = 7;

unsafe extern "C" {
    fn signal(signal: i32, handler: usize) -> usize;
    fn mmap(addr: *mut u8, bytes: usize, prot: i32, flags: i32, fd: i32, offset: i64) -> *mut u8;
    fn munmap(addr: *mut u8, bytes: usize) -> i32;
    fn madvise(addr: *mut u8, bytes: usize, advice: i32) -> i32;
    fn posix_fadvise(file: i32, offset: i64, bytes: i64, advice: i32) -> i32;
    fn poll(files: *mut PollFd, count: u64, milliseconds: i32) -> i32;
    fn access(path: *const c_char, mode: i32) -> i32;
    fn statvfs(path: *const c_char, buffer: *mut [u64; STATVFS_WORDS]) -> i32;
    fn getrlimit(resource: i32, limit: *mut [u64; 2]) -> i32;
    fn setrlimit(resource: i32, limit: *const [u64; 2]) -> i32;
}

extern "C" fn on_signal(number: i32) {
    let flag = if number == SIGTERM { &TERMINATED } else { &INTERRUPTED };
    flag.store(true, Ordering::Relaxed);
    // SAFETY: signal(2) is async-signal-safe, and SIG_DFL needs no handler to stay alive. The
    // next signal then ends the process at once, should the clean stop hang.
    unsafe { signal(number, SIG_DFL) };
}

fn catch(number: i32) {
    let handler = on_signal as extern "C" fn(i32);
    // SAFETY: the handler is a static function with the C signature that signal(2) asks for, and
    // it only stores to an atomic and calls signal(2).
    unsafe { signal(number, handler as usize) };
}

/// From now on the first SIGINT only sets the flag that [`interrupted`] reads.
pub fn catch_interrupts() {
    catch(SIGINT);
}

/// From now on the first SIGTERM only sets the flag that [`terminated`] reads.
pub fn catch_terminations() {
    catch(SIGTERM);
}

/// Whether SIGINT has arrived.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Forgets a SIGINT that has arrived: the next one only sets the flag again.
pub fn clear_interrupt() {
    INTERRUPTED.store(false, Ordering::Relaxed);
    catch_interrupts();
}

/// `struct pollfd`.
#[repr(C)]
struct PollFd {
    file: i32,
    wanted: i16,
    found: i16,
}

/// Whether standard input has something to read, or has ended, within so many milliseconds; −1
/// waits without end. A signal ends the wait too: reading itself would go on waiting.
pub fn wait_for_stdin(milliseconds: i32) -> bool {
    let mut file = PollFd { file: 0, wanted: POLLIN, found: 0 };
    // SAFETY: one structure, which poll(2) only reads and writes while it runs.
    unsafe { poll(&mut file, 1, milliseconds) > 0 }
}

/// Whether SIGTERM has arrived.
pub fn terminated() -> bool {
    TERMINATED.load(Ordering::Relaxed)
}

/// Lets a closed pipe end the process quietly, as command-line tools do (`coli … | head`).
/// `std` ignores SIGPIPE otherwise, and every print would have to fail instead.
pub fn end_quietly_on_closed_pipe() {
    // SAFETY: SIG_DFL is a valid disposition for SIGPIPE; no handler is installed.
    unsafe { signal(SIGPIPE, SIG_DFL) };
}

/// Size and alignment of a large page. Streaming weights through them is a third faster than
/// through pages of 4 KiB, whose table entries miss the cache.
const LARGE_PAGE: usize = 2 << 20;

/// Zeroed memory straight from the system, which takes it back when dropped. Pages that were never
/// written cost nothing.
pub struct Pages<T: Plain = u8> {
    mapping: *mut u8,
    mapping_bytes: usize,
    start: *mut T,
    count: usize,
}

/// Elements of [`Pages`].
///
/// # Safety
/// Zeros are a value, there is nothing to drop, and the alignment is below that of a page.
// SAFETY: says what implementors promise.
pub unsafe trait Plain: Copy {}
// SAFETY: an integer.
unsafe impl Plain for u8 {}
// SAFETY: floats, of 4 bytes' alignment.
unsafe impl Plain for [f32; 16] {}

// SAFETY: a mapping belongs to the process, not to a thread, and `Pages` is its only owner.
unsafe impl<T: Plain + Send> Send for Pages<T> {}
// SAFETY: a shared reference only reads.
unsafe impl<T: Plain + Sync> Sync for Pages<T> {}

impl<T: Plain> Pages<T> {
    /// `count` zeros, in large pages as far as they fill them and the system has any. Error: the
    /// system has no address space left for them.
    pub fn new(count: usize) -> Result<Pages<T>> {
        let bytes = count * size_of::<T>();
        let mapping_bytes = bytes.max(1) + if bytes >= LARGE_PAGE { LARGE_PAGE } else { 0 };
        let null = std::ptr::null_mut();
        let flags = MAP_PRIVATE_ANONYMOUS;
        // SAFETY: a private anonymous mapping at an address of the system's choice touches no
        // memory that exists.
        let mapping = unsafe { mmap(null, mapping_bytes, PROT_READ_WRITE, flags, -1, 0) };
        if mapping as isize == -1 {
            let error = std::io::Error::last_os_error();
            bail!("cannot reserve {bytes} bytes of memory: {error}");
        }
        let mut start = mapping;
        if bytes >= LARGE_PAGE {
            start = mapping.wrapping_add(mapping.align_offset(LARGE_PAGE));
            // SAFETY: the range lies inside the new mapping. Advice changes no contents, and a
            // system that does not take it works as well.
            unsafe { madvise(start, bytes, MADV_HUGEPAGE) };
        }
        Ok(Pages { mapping, mapping_bytes, start: start.cast(), count })
    }
}

impl<T: Plain> std::ops::Deref for Pages<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `count` elements from `start` on lie inside the mapping, which lives as long as
        // `self` and is initialized (zeros, or what was written through `deref_mut`).
        unsafe { std::slice::from_raw_parts(self.start, self.count) }
    }
}

impl<T: Plain> std::ops::DerefMut for Pages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `&mut self` is the only way to it.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.count) }
    }
}

impl<T: Plain> Drop for Pages<T> {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `new` made; no reference into it outlives `self`.
        unsafe { munmap(self.mapping, self.mapping_bytes) };
    }
}

/// Memory of a fixed size of which parts are handed out, each to one owner at a time.
pub struct Arena(Arc<Shared>);

struct Shared {
    pages: Pages,
    /// Start and end of every part that has an owner.
    taken: Mutex<BTreeMap<usize, usize>>,
}

/// A part of an [`Arena`], returned to it when dropped. Holds whatever was there before.
pub struct Region {
    arena: Arc<Shared>,
    start: usize,
    bytes: usize,
}

impl Arena {
    /// Reserves the memory; what is never used costs nothing. Errors: as [`Pages::new`].
    pub fn new(bytes: usize) -> Result<Arena> {
        Ok(Arena(Arc::new(Shared { pages: Pages::new(bytes)?, taken: Mutex::default() })))
    }

    /// The first gap of `bytes` that starts at a multiple of `align`, if there is one.
    pub fn take(&self, bytes: usize, align: usize) -> Option<Region> {
        let mut taken = self.0.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let mut start = 0;
        for (taken_start, taken_end) in taken.iter() {
            if *taken_start >= start + bytes {
                break;
            }
            start = taken_end.next_multiple_of(align);
        }
        if start + bytes > self.0.pages.count {
            return None;
        }
        taken.insert(start, start + bytes);
        Some(Region { arena: Arc::clone(&self.0), start, bytes })
    }

    /// The last `bytes`, from a multiple of `align` on, if nobody has any of them.
    pub fn take_end(&self, bytes: usize, align: usize) -> Option<Region> {
        let mut taken = self.0.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let start = self.end_start(bytes, align)?;
        if taken.last_key_value().is_some_and(|(_, taken_end)| *taken_end > start) {
            return None;
        }
        taken.insert(start, start + bytes);
        Some(Region { arena: Arc::clone(&self.0), start, bytes })
    }

    /// Whether a part is in the way of [`Arena::take_end`].
    pub fn is_in_end(&self, region: &Region, bytes: usize, align: usize) -> bool {
        let start = self.end_start(bytes, align);
        start.is_none_or(|start| region.start + region.bytes > start)
    }

    fn end_start(&self, bytes: usize, align: usize) -> Option<usize> {
        Some(self.0.pages.count.checked_sub(bytes)? / align * align)
    }
}

impl std::ops::Deref for Region {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let start = self.arena.pages.start.wrapping_add(self.start);
        // SAFETY: `Arena::take` found the range inside the pages, which live as long as `arena`
        // and are initialized, and noted it as taken: no other region overlaps it, and the pages
        // themselves are never dereferenced.
        unsafe { std::slice::from_raw_parts(start, self.bytes) }
    }
}

impl std::ops::DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.arena.pages.start.wrapping_add(self.start);
        // SAFETY: as above, and `&mut self` is the only way to this range.
        unsafe { std::slice::from_raw_parts_mut(start, self.bytes) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let mut taken = self.arena.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.remove(&self.start);
    }
}

/// Whether there is anything at `path`: a file that cannot be read is present, and so is a link
/// to nowhere. Reading it then says what is wrong.
pub fn is_present(path: &Path) -> bool {
    !matches!(path.symlink_metadata(), Err(error) if error.kind() == ErrorKind::NotFound)
}

/// Reads a whole regular file of at most `bytes_max` bytes. Anything else (a pipe, a device, a
/// longer file) is refused before it can block or fill the memory. The error lacks the path.
pub fn read_file(path: &Path, bytes_max: usize) -> Result<Vec<u8>> {
    // Looked at before it is opened: opening a pipe without a writer would block.
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        bail!("expected a regular file");
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > bytes_max {
        bail!("expected at most {bytes_max} bytes, found {}", metadata.len());
    }
    Ok(bytes)
}

/// `struct statvfs` of 64-bit Linux as words: fourteen of them are used, by glibc as by musl.
const STATVFS_WORDS: usize = 32;

/// Bytes that this user may still write on the file system of `path`; `None` where it does not say.
pub fn disk_free_bytes(path: &Path) -> Option<u64> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut words = [0; STATVFS_WORDS];
    // SAFETY: the path ends in a zero, and the structure is smaller than the words behind it.
    if unsafe { statvfs(path.as_ptr(), &mut words) } != 0 {
        return None;
    }
    let [_, fragment_bytes, _, _, available_fragments, ..] = words;
    fragment_bytes.checked_mul(available_fragments)
}

/// Whether this user may write to `path`.
pub fn is_writable(path: &Path) -> bool {
    let path = CString::new(path.as_os_str().as_bytes());
    // SAFETY: the path ends in a zero; nothing is written through it.
    path.is_ok_and(|path| unsafe { access(path.as_ptr(), W_OK) } == 0)
}

/// Makes room for `more` open files beside those that are open: raises the soft limit of this
/// process as far as that takes. Returns the limit. Error: the hard limit is lower.
pub fn raise_file_limit(more: usize) -> Result<u64> {
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let needed = (open + more) as u64;
    let mut limits = [0; 2];
    // SAFETY: `struct rlimit` of 64-bit Linux is two words, the soft and the hard limit.
    if unsafe { getrlimit(RLIMIT_NOFILE, &mut limits) } != 0 {
        bail!("the limit of open files: {}", std::io::Error::last_os_error());
    }
    let [soft, hard] = limits;
    if needed <= soft {
        return Ok(soft);
    }
    // SAFETY: as above; setrlimit(2) only reads it.
    if needed > hard || unsafe { setrlimit(RLIMIT_NOFILE, &[needed, hard]) } != 0 {
        bail!(
            "{needed} open files are needed, the limit is {hard}: raise it with ulimit -n {needed}"
        );
    }
    Ok(needed)
}

/// Lets the page cache drop these bytes of a file: they will not be read again, and until then
/// count as memory that this process holds.
pub fn forget_cached(file: &File, offset: u64, bytes: usize) {
    // SAFETY: the descriptor is open as long as `file` is borrowed. Advice changes no contents, and
    // a system that does not take it only keeps the pages.
    unsafe { posix_fadvise(file.as_raw_fd(), offset as i64, bytes as i64, POSIX_FADV_DONTNEED) };
}

/// Replaces a file by `bytes`, as one step: whatever happens, the old file or the new one is there.
/// The new one is written as `NAME.tmp`: a writer that is killed leaves no more than that behind,
/// and the next one uses it. The error lacks the path.
pub fn replace_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".tmp");
    let new = path.with_file_name(name);
    let mut file = create_locked(&new)?;
    let replaced = file.set_len(0).and_then(|()| {
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&new, path)
    });
    if replaced.is_err() {
        // It may not even exist.
        let _ = std::fs::remove_file(&new);
    }
    Ok(replaced?)
}

/// Opens the file at `path`, maybe a new one, for one writer: others wait until it is closed.
fn create_locked(path: &Path) -> std::io::Result<File> {
    let identity = |file: Metadata| (file.dev(), file.ino());
    loop {
        let file = File::options().write(true).create(true).truncate(false).open(path)?;
        file.lock()?;
        // The writer before may have renamed what was opened here; then it is no longer ours.
        let opened = identity(file.metadata()?);
        if std::fs::metadata(path).is_ok_and(|found| identity(found) == opened) {
            return Ok(file);
        }
    }
}

/// Bytes that drives delivered for this process so far, where the system says so.
pub fn drive_bytes_read() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok())
}

/// Largest resident set of this process so far, in bytes (VmHWM); 0 where unknown.
pub fn peak_rss_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    kib_field(&status, "VmHWM:").unwrap_or(0)
}

/// The value of a `Name:   123 kB` line, in bytes.
pub fn kib_field(text: &str, name: &str) -> Option<usize> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: usize = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_zeroed_aligned_and_writable_to_the_last_byte() {
        for bytes in [0, 1, 5000, LARGE_PAGE, 3 * LARGE_PAGE + 17] {
            let mut pages = Pages::new(bytes).unwrap();
            assert_eq!((pages.len(), pages.iter().any(|byte| *byte != 0)), (bytes, false));
            if let Some(last) = pages.last_mut() {
                *last = 7;
            }
            assert!(bytes < LARGE_PAGE || (pages.as_ptr() as usize).is_multiple_of(LARGE_PAGE));
        }
        let error = Pages::<u8>::new(1 << 60).err().unwrap().to_string();
        assert!(error.contains("cannot reserve 1152921504606846976 bytes"), "{error}");
    }

    #[test]
    fn parts_of_an_arena_never_overlap_and_come_back() {
        let arena = Arena::new(1000).unwrap();
        let mut parts: Vec<_> = (0..3).map(|_| arena.take(250, 64).unwrap()).collect();
        for (i, part) in parts.iter_mut().enumerate() {
            part.fill(i as u8 + 1);
        }
        let starts: Vec<usize> = parts.iter().map(|part| part.start).collect();
        assert_eq!(starts, [0, 256, 512]);
        // 238 bytes are left behind the third, and none between them.
        assert!(arena.take(239, 1).is_none());
        assert_eq!(arena.take(232, 64).unwrap().start, 768);
        for (i, part) in parts.iter().enumerate() {
            assert!(part.iter().all(|byte| *byte == i as u8 + 1), "part {i}");
        }
        // The gap of the second takes what fits it, at the alignment that is asked for.
        drop(parts.remove(1));
        assert!(arena.take(257, 64).is_none());
        assert_eq!(arena.take(100, 128).unwrap().start, 256);
        assert_eq!(arena.take(256, 64).unwrap().start, 256);
    }

    /// A part outlives the handle of its arena.
    #[test]
    fn an_arena_lives_as_long_as_its_parts() {
        let mut part = Arena::new(1 << 16).unwrap().take(1 << 16, 4096).unwrap();
        part.fill(9);
        assert_eq!(part.iter().map(|byte| *byte as usize).sum::<usize>(), 9 << 16);
    }

    /// `df` divides by 1024 and rounds up; others write to the same file system meanwhile.
    #[test]
    fn free_space_is_what_df_says() {
        let root = Path::new("/");
        let df = std::process::Command::new("df").args(["-P", "-k", "/"]).output().unwrap();
        let text = String::from_utf8(df.stdout).unwrap();
        let kib: f64 =
            text.lines().nth(1).unwrap().split_whitespace().nth(3).unwrap().parse().unwrap();
        let free = disk_free_bytes(root).unwrap() as f64 / 1024.0;
        assert!((free - kib).abs() <= 0.1 * kib + 1e5, "{free} KiB, df says {kib}");
        assert_eq!(disk_free_bytes(Path::new("/nowhere")), None);
        assert_eq!(disk_free_bytes(Path::new("a\0b")), None);
        assert!(is_writable(&std::env::temp_dir()) && !is_writable(Path::new("/nowhere")));
    }

    #[test]
    fn proc_fields_are_read_in_kib() {
        let text = "MemTotal:       16384 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(kib_field(text, "MemAvailable:"), Some(2048 * 1024));
        assert_eq!(kib_field(text, "SwapFree:"), None);
        assert_eq!(kib_field("VmHWM: x kB", "VmHWM:"), None);
        assert!(peak_rss_bytes() > 100_000);
    }
}
