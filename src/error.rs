//! The one error type of the crate.
//!
//! An [`Error`] is a chain of plain sentences, outermost context first: what was being done, to
//! which file, tensor or field, and finally what was expected and what was found. It is for the
//! person at the terminal or the HTTP client, never for control flow, except for two questions
//! that callers do ask: was it the usage that was wrong (exit code 2), and did the user interrupt.
//! Programmer errors are assertions and never become an `Error`.

#![forbid(unsafe_code)]

use std::fmt;

/// Result with the crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What kind of failure it was, as far as anyone has to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The operation failed, or its input was bad. Exit code 1.
    Failed,
    /// The command line itself was wrong. Exit code 2.
    Usage,
    /// The user asked to stop (SIGINT). Exit code 130.
    Interrupted,
}

/// An operator error: a message with its context, outermost first.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    /// `context: context: cause`, ready to print.
    message: String,
    kind: Kind,
}

impl Error {
    /// An error with a message that says what was expected and what was found.
    pub fn new(message: impl Into<String>) -> Error {
        Error { message: message.into(), kind: Kind::Failed }
    }

    /// Wrong usage of the command line: exit code 2.
    pub fn usage(message: impl Into<String>) -> Error {
        Error { message: message.into(), kind: Kind::Usage }
    }

    /// The user interrupted the work.
    pub fn interrupted() -> Error {
        Error { message: "interrupted".into(), kind: Kind::Interrupted }
    }

    /// Whether it is such an interruption.
    pub fn is_interrupt(&self) -> bool {
        matches!(self.kind, Kind::Interrupted)
    }

    /// Puts `context` (a file, tensor, field or step) in front of the message.
    pub fn context(self, context: impl fmt::Display) -> Error {
        Error { message: format!("{context}: {}", self.message), kind: self.kind }
    }

    /// The exit code of the process that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self.kind {
            Kind::Failed => 1,
            Kind::Usage => 2,
            Kind::Interrupted => 130,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Same text as `Display`, so that a failed test shows the sentence itself.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Error {
        Error::new(error.to_string())
    }
}

/// Adds context to the error of a `Result` of any kind that converts to [`Error`].
pub trait Context<T> {
    /// Puts what `context` returns in front of the error's message; not called on success.
    fn context<C: fmt::Display>(self, context: impl FnOnce() -> C) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for std::result::Result<T, E> {
    fn context<C: fmt::Display>(self, context: impl FnOnce() -> C) -> Result<T> {
        self.map_err(|error| error.into().context(context()))
    }
}

/// Returns early with an [`Error`] made from a format string.
#[macro_export]
macro_rules! bail {
    ($($arg:tt)*) => { return Err($crate::error::Error::new(format!($($arg)*))) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_stands_in_front_and_keeps_the_exit_code() {
        let error = Error::usage("no such flag").context("run");
        assert_eq!(error.to_string(), "run: no such flag");
        assert_eq!(error.exit_code(), 2);
        let io: std::result::Result<(), _> =
            Err(std::io::Error::new(std::io::ErrorKind::NotFound, "gone"));
        assert_eq!(io.context(|| "config.json").unwrap_err().to_string(), "config.json: gone");
    }
}
