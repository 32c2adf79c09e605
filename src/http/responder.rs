//! Responses: whole ones with their length, streams in chunks, and never half of either.

#![forbid(unsafe_code)]

use super::request::Request;
use super::wire::Wire;
use super::{Failure, Outcome, Refusal, status_row};
use std::fmt::Write;

/// Answers one request: once, with a whole body or with a stream. Every method that writes fails
/// with [`Failure::Gone`] when the client does not take it. Answering twice is a programmer's
/// error and panics.
pub struct Responder<'a> {
    wire: &'a mut Wire,
    phase: Phase,
    /// The answer to HEAD stops after the headers.
    is_head: bool,
    is_1_1: bool,
    keep_alive: bool,
    headers: Vec<(&'static str, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Nothing is written.
    Fresh,
    /// The head and a part of the stream are written.
    Streaming,
    /// All is written.
    Done,
}

impl<'a> Responder<'a> {
    pub(super) fn new(wire: &'a mut Wire, request: &Request) -> Responder<'a> {
        let (is_head, is_1_1) = (request.method == "HEAD", request.is_1_1);
        let (phase, keep_alive, headers) = (Phase::Fresh, false, Vec::new());
        Responder { wire, phase, is_head, is_1_1, keep_alive, headers }
    }

    pub(super) fn wire(&mut self) -> &mut Wire {
        self.wire
    }

    /// Whether the connection will take another request after this answer.
    pub(super) fn set_keep_alive(&mut self, keep_alive: bool) {
        self.keep_alive = keep_alive;
    }

    /// Adds a header to the answer, whatever it will be.
    pub fn set_header(&mut self, name: &'static str, value: impl Into<String>) {
        self.headers.push((name, value.into()));
    }

    /// Whether the client has hung up, or has closed its half of the connection, which is how most
    /// hang up. Costs three calls of the system; ask between two steps of long work.
    pub fn is_gone(&mut self) -> bool {
        self.wire.is_gone()
    }

    /// Answers with a whole body.
    pub fn respond(&mut self, status: u16, content_type: &str, body: &[u8]) -> Outcome {
        let mut lines = String::new();
        // 204 has no body by definition, and must not say how long it is.
        if status != 204 {
            lines = format!("Content-Type: {content_type}\r\nContent-Length: {}\r\n", body.len());
        }
        let mut bytes = self.head(status, &lines).into_bytes();
        if !self.is_head && status != 204 {
            bytes.extend_from_slice(body);
        }
        self.phase = Phase::Streaming;
        self.wire.write_all(&bytes)?;
        self.phase = Phase::Done;
        Ok(())
    }

    /// Answers with a JSON text.
    pub fn respond_json(&mut self, status: u16, json: &str) -> Outcome {
        self.respond(status, "application/json", json.as_bytes())
    }

    /// Answers with an error object.
    pub fn refuse(&mut self, refusal: &Refusal) -> Outcome {
        self.headers.extend(refusal.headers.iter().cloned());
        self.respond_json(refusal.status, &refusal.to_json())
    }

    /// Begins a stream: the head is sent at once. An answer that takes long can be a stream of
    /// spaces and one JSON text.
    pub fn start(&mut self, status: u16, content_type: &str) -> Outcome {
        let mut lines = format!("Content-Type: {content_type}\r\n");
        if self.is_1_1 {
            lines += "Transfer-Encoding: chunked\r\n";
        } else {
            // Only the end of the connection ends this body.
            self.keep_alive = false;
        }
        let head = self.head(status, &lines);
        self.phase = Phase::Streaming;
        self.wire.write_all(head.as_bytes())
    }

    /// Begins a stream of events.
    pub fn start_events(&mut self) -> Outcome {
        self.set_header("Cache-Control", "no-cache");
        self.set_header("X-Accel-Buffering", "no");
        self.start(200, "text/event-stream")
    }

    /// Sends a part of the stream, in one write.
    pub fn write(&mut self, bytes: &[u8]) -> Outcome {
        assert_eq!(self.phase, Phase::Streaming, "write without start");
        // A chunk of no bytes would end the stream.
        if self.is_head || bytes.is_empty() {
            return Ok(());
        }
        if !self.is_1_1 {
            return self.wire.write_all(bytes);
        }
        let size = format!("{:x}\r\n", bytes.len());
        self.wire.write_all(&[size.as_bytes(), bytes, b"\r\n"].concat())
    }

    /// Sends an event; `data` is one line.
    pub fn event(&mut self, data: &str) -> Outcome {
        assert!(!data.contains(['\r', '\n']), "an event of more than one line");
        self.write(format!("data: {data}\n\n").as_bytes())
    }

    /// Sends what clients of an event stream skip, so that neither they nor what is between grow
    /// impatient.
    pub fn keep_waiting(&mut self) -> Outcome {
        self.write(b": keepalive\n\n")
    }

    /// Ends the stream. One that is not ended is cut off: the client misses the last chunk, which
    /// HTTP/1.0 does not have.
    pub fn finish(&mut self) -> Outcome {
        assert_eq!(self.phase, Phase::Streaming, "finish without start");
        if self.is_1_1 && !self.is_head {
            self.wire.write_all(b"0\r\n\r\n")?;
        }
        self.phase = Phase::Done;
        Ok(())
    }

    /// Status line and headers, with the lines that only this answer has.
    fn head(&self, status: u16, lines: &str) -> String {
        assert_eq!(self.phase, Phase::Fresh, "a second answer");
        let mut head = format!("HTTP/1.1 {status} {}\r\nServer: colibri\r\n", status_row(status).1);
        head += lines;
        for (name, value) in &self.headers {
            // A value may come from a request; whatever it is, it stays one line.
            let value: String = value.chars().filter(|c| !c.is_ascii_control()).collect();
            write!(head, "{name}: {value}\r\n").expect("a String takes all text");
        }
        head += match (self.keep_alive, self.is_1_1) {
            (false, _) => "Connection: close\r\n",
            (true, false) => "Connection: keep-alive\r\n",
            (true, true) => "",
        };
        head + "\r\n"
    }

    /// After the handler: answers for it if it did not. False when the connection is to be closed,
    /// which is then done as far as the client needs it.
    pub(super) fn conclude(mut self, outcome: Outcome) -> bool {
        let refusal = match outcome {
            Ok(()) => Some(Refusal::new(500, "the request was not answered")),
            Err(Failure::Refused(refusal)) => Some(refusal),
            Err(Failure::Gone) => None,
        };
        if let (Some(refusal), Phase::Fresh) = (refusal, self.phase) {
            self.keep_alive &= refusal.status != 500;
            let _ = self.refuse(&refusal);
        }
        if self.phase == Phase::Done && !self.keep_alive {
            self.wire.close();
        }
        self.phase == Phase::Done && self.keep_alive
    }
}
