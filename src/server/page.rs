//! The page: a chat and a look at what the server does, as one file without anything from
//! elsewhere.
//!
//! Text of a model ends up in it, so the browser is told to run and to load nothing but what is
//! here: the style and the script by their hashes, requests to this server, and no text as markup.

#![forbid(unsafe_code)]

use crate::http::{Outcome, Responder};

const PAGE: &str = include_str!("page.html");

/// What the page may do. The hashes are those of what is between the tags; a test has the right
/// ones when the page changes.
const POLICY: &str = "default-src 'none'; \
    style-src 'sha256-5GmHP/I4zhlCUliCsZwxMfPye8vdrujdkbrltzp6YBc='; \
    script-src 'sha256-vn5+nKNJBAhR16gAgWtz71Jr2nx/9/6oYm/tOOpenKg='; \
    connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// Answers with the page.
pub fn respond(responder: &mut Responder) -> Outcome {
    responder.set_header("Content-Security-Policy", POLICY);
    responder.set_header("Referrer-Policy", "no-referrer");
    responder.set_header("X-Content-Type-Options", "nosniff");
    // Each start of the server may bring another page.
    responder.set_header("Cache-Control", "no-cache");
    responder.respond(200, "text/html; charset=utf-8", PAGE.as_bytes())
}
