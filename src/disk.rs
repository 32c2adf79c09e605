//! Positional reads that either fill the buffer or say exactly what was missing.
//!
//! One read call may return early (it is capped near 2 GiB, and signals interrupt it); the loop
//! here goes on until the buffer is full. A file that ends too soon is its own error with file,
//! tensor, offset, wanted and got: it is never reported as whatever the OS said last.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::{Context, Result};
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

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

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

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
}
