//! The `coli` command: arguments in, exit code out. Everything else is in the library.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    colibri::sys::end_quietly_on_closed_pipe();
    let words: Vec<String> = match std::env::args_os().skip(1).map(|w| w.into_string()).collect() {
        Ok(words) => words,
        Err(word) => {
            colibri::cli::note(&format!("coli: argument {word:?} is not valid UTF-8\n"));
            return ExitCode::from(2);
        }
    };
    match colibri::cli::main(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            colibri::cli::note_error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}
