//! The answer to one request for a reply, as it comes from the worker: a stream of events, or one
//! object.
//!
//! While a request waits in the line nothing is written, so that it can still be refused with a
//! status. From then on something is written at least every few seconds, since clients and what is
//! between give up on silence: comments in a stream, and spaces before an object, where JSON allows
//! them. A refusal that comes after that is the object, or the last event.

#![forbid(unsafe_code)]

use super::Settings;
use super::queue::{Event, Queue};
use crate::api::{Ask, Envelope, Piece, Usage};
use crate::http::{Failure, Outcome, Refusal, Responder};
use crate::tokenizer::Tokenizer;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// How often a connection looks whether its client is still there.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Puts a request in the line and answers it. Errors: those of the line, and the client is gone.
pub fn answer(
    ask: Ask,
    new_tokens: usize,
    tokenizer: &Tokenizer,
    queue: &Queue,
    settings: &Settings,
    responder: &mut Responder,
) -> Outcome {
    let envelope = Envelope::new(&ask, &settings.model_id, tokenizer);
    let is_stream = ask.stream;
    let submitted = Instant::now();
    let ticket = queue.submit(ask, new_tokens)?;
    let mut answer = Answer {
        responder,
        envelope,
        is_stream,
        has_begun: false,
        whole: Piece::default(),
        written: submitted,
    };
    let (mut is_running, mut looked) = (false, submitted);
    loop {
        let event = ticket.events.recv_timeout(LOOK_EVERY);
        if looked.elapsed() >= LOOK_EVERY {
            looked = Instant::now();
            if answer.responder.is_gone() {
                return Err(Failure::Gone);
            }
        }
        match event {
            Ok(Event::Started) => {
                is_running = true;
                answer.started()?;
            }
            Ok(Event::Piece(piece)) => answer.piece(piece)?,
            Ok(Event::Done(reason, usage)) => return answer.done(reason, usage),
            Ok(Event::Failed(refusal)) => return answer.fail(refusal),
            Err(RecvTimeoutError::Disconnected) => {
                return answer.fail(Refusal::new(500, "the worker is gone").code("engine_error"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if is_running {
            answer.keep_waiting(settings.keepalive_time)?;
        } else if submitted.elapsed() >= settings.queue_time && ticket.time_out() {
            let waited = settings.queue_time.as_secs_f64();
            let message = format!("the request waited {waited} seconds for its turn");
            let refusal = Refusal::new(429, message).code("queue_timeout");
            return Err(refusal.header("Retry-After", "1").into());
        }
    }
}

struct Answer<'a, 'w> {
    responder: &'a mut Responder<'w>,
    envelope: Envelope<'a>,
    is_stream: bool,
    /// Whether the status is written.
    has_begun: bool,
    /// What there is of an answer that is no stream.
    whole: Piece,
    /// When something was last written.
    written: Instant,
}

impl Answer<'_, '_> {
    /// The head of a stream goes out before the prompt is run.
    fn started(&mut self) -> Outcome {
        if !self.is_stream {
            return Ok(());
        }
        self.has_begun = true;
        self.responder.start_events()?;
        self.written = Instant::now();
        self.envelope.first_chunk().map_or(Ok(()), |chunk| self.responder.event(&chunk))
    }

    fn piece(&mut self, piece: Piece) -> Outcome {
        if !self.is_stream {
            self.whole.append(piece);
            return Ok(());
        }
        self.written = Instant::now();
        self.responder.event(&self.envelope.chunk(&piece))
    }

    fn keep_waiting(&mut self, most: Duration) -> Outcome {
        if self.written.elapsed() < most {
            return Ok(());
        }
        self.written = Instant::now();
        if self.is_stream {
            return self.responder.keep_waiting();
        }
        if !self.has_begun {
            self.has_begun = true;
            self.responder.start(200, "application/json")?;
        }
        self.responder.write(b" ")
    }

    fn done(mut self, reason: &str, usage: Usage) -> Outcome {
        if !self.is_stream {
            let whole = self.envelope.whole(&self.whole, reason, usage);
            return self.object(&whole);
        }
        for chunk in self.envelope.last_chunks(reason, usage) {
            self.responder.event(&chunk)?;
        }
        self.responder.event("[DONE]")?;
        self.responder.finish()
    }

    fn fail(mut self, refusal: Refusal) -> Outcome {
        if !self.has_begun {
            return Err(refusal.into());
        }
        if !self.is_stream {
            return self.object(&refusal.to_json());
        }
        self.responder.event(&refusal.to_json())?;
        self.responder.event("[DONE]")?;
        self.responder.finish()
    }

    fn object(&mut self, json: &str) -> Outcome {
        if !self.has_begun {
            return self.responder.respond_json(200, json);
        }
        self.responder.write(json.as_bytes())?;
        self.responder.finish()
    }
}
