//! The bytes of one connection: buffered reads and whole writes, each within a time.

#![forbid(unsafe_code)]

use super::{Failure, Outcome, Refusal};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most bytes that one read takes from the socket.
const READ_BYTES: usize = 16 << 10;

/// Most bytes of further requests that are taken in while one is being answered.
const PIPELINED_BYTES_MAX: usize = 64 << 10;

/// Bytes that the client must take within the write time.
const WRITE_BYTES: usize = 64 << 10;

/// What is read and thrown away after the last answer, in time and in bytes: closing a socket with
/// unread bytes resets it, and the client may lose the answer.
const LINGER_TIME: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 4 << 20;

/// A socket with the bytes that were read and not yet used.
pub struct Wire {
    stream: Arc<TcpStream>,
    buffer: Vec<u8>,
    /// Bytes of the buffer that are used.
    start: usize,
    write_time: Duration,
}

impl Wire {
    pub fn new(stream: Arc<TcpStream>, write_time: Duration) -> Wire {
        Wire { stream, buffer: Vec::new(), start: 0, write_time }
    }

    /// Bytes read and not yet used.
    pub fn pending(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    /// Waits for more bytes. Errors: the client is gone; 408 at the deadline.
    pub fn fill(&mut self, deadline: Instant) -> Outcome {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Refusal::new(408, "the request did not arrive in time").into());
            }
            self.stream.set_read_timeout(Some(left)).map_err(|_| Failure::Gone)?;
            match self.read_once() {
                Ok(0) => return Err(Failure::Gone),
                Ok(_) => return Ok(()),
                Err(error) if is_passing(&error) => {}
                Err(_) => return Err(Failure::Gone),
            }
        }
    }

    fn read_once(&mut self) -> io::Result<usize> {
        let mut piece = [0; READ_BYTES];
        let count = (&*self.stream).read(&mut piece)?;
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(&piece[..count]);
        Ok(count)
    }

    /// The next line without its CRLF, with U+FFFD for what is not UTF-8. Errors: those of
    /// [`Wire::fill`]; `too_long` above `bytes_max`; 400 for a line that ends with LF alone.
    pub fn line(
        &mut self,
        bytes_max: usize,
        deadline: Instant,
        too_long: impl Fn() -> Refusal,
    ) -> Outcome<String> {
        loop {
            let pending = self.pending();
            let end = pending.iter().position(|byte| *byte == b'\n');
            if end.unwrap_or(pending.len()) > bytes_max {
                return Err(too_long().into());
            }
            let Some(end) = end else {
                self.fill(deadline)?;
                continue;
            };
            let Some(line) = pending[..end].strip_suffix(b"\r") else {
                return Err(Refusal::new(400, "expected lines that end with CR LF").into());
            };
            let line = String::from_utf8_lossy(line).into_owned();
            self.start += end + 1;
            return Ok(line);
        }
    }

    /// Appends exactly `count` bytes to `bytes`. Errors: those of [`Wire::fill`].
    pub fn take(&mut self, mut count: usize, bytes: &mut Vec<u8>, deadline: Instant) -> Outcome {
        loop {
            let now = count.min(self.pending().len());
            bytes.extend_from_slice(&self.pending()[..now]);
            self.start += now;
            count -= now;
            if count == 0 {
                return Ok(());
            }
            self.fill(deadline)?;
        }
    }

    /// Whether the client has hung up, found out without waiting. Bytes of further requests stay
    /// in the buffer.
    pub fn is_gone(&mut self) -> bool {
        if self.stream.set_nonblocking(true).is_err() {
            return true;
        }
        let mut gone = false;
        while !gone && self.pending().len() < PIPELINED_BYTES_MAX {
            match self.read_once() {
                Ok(count) => gone = count == 0,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    gone = error.kind() != ErrorKind::WouldBlock;
                    break;
                }
            }
        }
        self.stream.set_nonblocking(false).is_err() || gone
    }

    /// Writes all bytes. Error: the client is gone, or too slow.
    pub fn write_all(&mut self, bytes: &[u8]) -> Outcome {
        for mut piece in bytes.chunks(WRITE_BYTES) {
            let deadline = Instant::now() + self.write_time;
            while !piece.is_empty() {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() || self.stream.set_write_timeout(Some(left)).is_err() {
                    return Err(Failure::Gone);
                }
                match (&*self.stream).write(piece) {
                    Ok(0) => return Err(Failure::Gone),
                    Ok(count) => piece = &piece[count..],
                    Err(error) if is_passing(&error) => {}
                    Err(_) => return Err(Failure::Gone),
                }
            }
        }
        Ok(())
    }

    /// Ends the connection such that the client gets all that was written.
    pub fn close(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Write);
        let deadline = Instant::now() + LINGER_TIME;
        let mut dropped = 0;
        while dropped < LINGER_BYTES {
            self.start = self.buffer.len();
            if self.fill(deadline).is_err() {
                return;
            }
            dropped += self.pending().len();
        }
    }
}

/// Whether an error only says that nothing has happened yet.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
