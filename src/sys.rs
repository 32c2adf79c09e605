//! What is asked of the operating system beyond plain `std`: signals, what `/proc` says about
//! memory, and whole files that are read with a bound.
//!
//! This file holds every `extern "C"` of the crate.

use crate::bail;
use crate::error::Result;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

const SIGINT: i32 = 2;
const SIGPIPE: i32 = 13;
const SIG_DFL: usize = 0;

unsafe extern "C" {
    fn signal(signal: i32, handler: usize) -> usize;
}

extern "C" fn on_interrupt(_signal: i32) {
    INTERRUPTED.store(true, Ordering::Relaxed);
    // SAFETY: signal(2) is async-signal-safe, and SIG_DFL needs no handler to stay alive. The
    // next SIGINT then ends the process at once, should the clean stop hang.
    unsafe { signal(SIGINT, SIG_DFL) };
}

/// From now on the first SIGINT only sets the flag that [`interrupted`] reads.
pub fn catch_interrupts() {
    let handler = on_interrupt as extern "C" fn(i32);
    // SAFETY: the handler is a static function with the C signature that signal(2) asks for, and
    // it only stores to an atomic and calls signal(2).
    unsafe { signal(SIGINT, handler as usize) };
}

/// Whether SIGINT has arrived.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Lets a closed pipe end the process quietly, as command-line tools do (`coli … | head`).
/// `std` ignores SIGPIPE otherwise, and every print would have to fail instead.
pub fn end_quietly_on_closed_pipe() {
    // SAFETY: SIG_DFL is a valid disposition for SIGPIPE; no handler is installed.
    unsafe { signal(SIGPIPE, SIG_DFL) };
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

/// Memory that can be used without swapping, in bytes: MemAvailable. `None` where there is no
/// such figure.
pub fn available_memory_bytes() -> Option<usize> {
    kib_field(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// Largest resident set of this process so far, in bytes (VmHWM); 0 where unknown.
pub fn peak_rss_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    kib_field(&status, "VmHWM:").unwrap_or(0)
}

/// The value of a `Name:   123 kB` line, in bytes.
fn kib_field(text: &str, name: &str) -> Option<usize> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: usize = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_fields_are_read_in_kib() {
        let text = "MemTotal:       16384 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(kib_field(text, "MemAvailable:"), Some(2048 * 1024));
        assert_eq!(kib_field(text, "SwapFree:"), None);
        assert_eq!(kib_field("VmHWM: x kB", "VmHWM:"), None);
        assert!(peak_rss_bytes() > 100_000);
    }
}
