//! The shapes of the OpenAI API, without any input or output: what a request asks for, how the
//! tokens of a reply become text, reasoning and tool calls, and the objects that carry them.
//!
//! A request is checked as a whole before it is queued. A field of it is honoured, or refused by
//! its name, or one of those that cannot change a reply (`user`, `metadata`, …), or unknown: every
//! client adds something, so those are left alone. `null` means absent everywhere.

#![forbid(unsafe_code)]

mod form;
mod objects;
mod reply;
mod request;
mod tools;

pub use objects::{Envelope, Usage, model_object};
pub use reply::{Chosen, Piece, Turn};
pub use request::{Ask, prompt_ids, render};
pub use tools::{Call, Tools};

use crate::error::Error;
use crate::http::Refusal;
use std::hash::{BuildHasher, RandomState};

/// 400 with the message of `error`; what stands before its colon is the field at fault.
pub fn bad_request(error: Error) -> Refusal {
    let message = error.to_string();
    let field = message.split(": ").next().filter(|field| !field.contains(' '));
    let param = field.map(String::from);
    Refusal { param, ..Refusal::new(400, message) }
}

/// 16 hexadecimal digits that nobody can guess, as the standard library keys its hash maps.
pub fn random_hex() -> String {
    format!("{:016x}", RandomState::new().hash_one(0))
}
