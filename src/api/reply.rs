//! A reply as it grows: tokens to pieces of reasoning, content and tool calls, each of which can
//! be sent as soon as it is there.

#![forbid(unsafe_code)]

use super::{Ask, Call};
use crate::engine::Finish;
use crate::reply::Reply;
use crate::tokenizer::Tokenizer;
use std::sync::Arc;

/// Characters of what is no call that the log repeats.
const LOGGED_CHARS_MAX: usize = 200;

/// A token with the model's own log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// The token.
    pub id: u32,
    /// Its logarithm; `None` for a prompt's first token, which nothing predicts.
    pub logprob: Option<f64>,
    /// The most likely tokens at its place, the best first.
    pub top: Vec<(u32, f64)>,
}

/// A part of a reply.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// What the model thinks.
    pub reasoning: String,
    /// What it says.
    pub content: String,
    /// What it calls, whole or in parts, with the place of each call among those of the reply.
    pub calls: Vec<(usize, Call)>,
    /// The tokens of the content, where that was asked for.
    pub chosen: Vec<Chosen>,
    /// Whether all reasoning so far turned out to be the content, which this piece has.
    pub was_no_reasoning: bool,
}

impl Piece {
    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        *self == Piece::default()
    }

    /// Puts the piece that follows behind this one.
    pub fn append(&mut self, next: Piece) {
        if next.was_no_reasoning {
            self.reasoning.clear();
        }
        self.reasoning += &next.reasoning;
        self.content += &next.content;
        self.calls.extend(next.calls);
        self.chosen.extend(next.chosen);
    }
}

/// The reply to one request.
pub struct Turn<'a> {
    ask: Arc<Ask>,
    tokenizer: &'a Tokenizer,
    /// Takes what an operator should know.
    log: fn(&str),
    reply: Reply<'a>,
    /// Tokens of the call that is being made.
    call: Option<Vec<u32>>,
    /// Bytes of its arguments that are part of earlier pieces.
    told_arguments: usize,
    calls: usize,
    /// Bytes of reasoning and content that are part of earlier pieces.
    told: [usize; 2],
    /// Tokens of content whose text is still held back.
    chosen: Vec<Chosen>,
}

impl<'a> Turn<'a> {
    /// An empty reply to `ask`.
    pub fn new(ask: Arc<Ask>, tokenizer: &'a Tokenizer, log: fn(&str)) -> Turn<'a> {
        let reply = Reply::new(tokenizer, ask.thinking, &ask.stops);
        Turn {
            ask,
            tokenizer,
            log,
            reply,
            call: None,
            told_arguments: 0,
            calls: 0,
            told: [0; 2],
            chosen: Vec::new(),
        }
    }

    /// Takes a token and returns what can be sent.
    pub fn push(&mut self, id: u32, chosen: Option<Chosen>) -> Piece {
        let tools = self.ask.tools.as_ref();
        let Some(tools) = tools.filter(|_| !self.reply.is_thinking()) else {
            return self.text(id, chosen);
        };
        let Some(mut ids) = self.call.take() else {
            if id != tools.form.call[0] {
                return self.text(id, chosen);
            }
            self.call = Some(Vec::new());
            return Piece::default();
        };
        if id != tools.form.call[1] {
            ids.push(id);
            // A call that is not forced may still turn out to be text, until it is whole.
            let is_part = self.ask.stream && tools.must_call && id == tools.form.value[1];
            let part = is_part.then(|| tools.parse(&ids, false, self.tokenizer)).flatten();
            self.call = Some(ids);
            return part.map_or(Piece::default(), |call| self.called(call, false));
        }
        match tools.parse(&ids, true, self.tokenizer) {
            Some(call) => self.called(call, true),
            None => {
                self.as_text(&ids);
                self.text(id, None)
            }
        }
    }

    /// What is new of a call. Its arguments so far are those of the whole call but for the brace.
    fn called(&mut self, mut call: Call, is_whole: bool) -> Piece {
        let end = call.arguments.len() - usize::from(!is_whole);
        call.arguments = call.arguments[self.told_arguments..end].into();
        if self.told_arguments > 0 {
            (call.id, call.name) = Default::default();
        }
        let calls = vec![(self.calls, call)];
        self.told_arguments = if is_whole { 0 } else { end };
        self.calls += usize::from(is_whole);
        Piece { calls, ..self.rest() }
    }

    /// Marker and tokens of what is no call after all.
    fn as_text(&mut self, ids: &[u32]) {
        let text = self.tokenizer.decode(ids, false).unwrap_or_default();
        let text: String = text.chars().take(LOGGED_CHARS_MAX).collect();
        (self.log)(&format!("a tool call that has not the form of one is sent as text: {text:?}"));
        let marker = self.ask.tools.iter().map(|tools| tools.form.call[0]);
        marker.chain(ids.iter().copied()).for_each(|id| drop(self.reply.push(id)));
    }

    fn text(&mut self, id: u32, chosen: Option<Chosen>) -> Piece {
        if !self.reply.is_thinking() {
            self.chosen.extend(chosen);
        }
        self.reply.push(id);
        self.rest()
    }

    /// What was added since the last piece.
    fn rest(&mut self) -> Piece {
        let (reasoning, content) = (self.reply.reasoning(), self.reply.content());
        let reasoning = reasoning.get(self.told[0]..).unwrap_or_default().to_string();
        let content = content[self.told[1]..].to_string();
        self.told[0] += reasoning.len();
        self.told[1] += content.len();
        let chosen = match content.is_empty() {
            true => Vec::new(),
            false => std::mem::take(&mut self.chosen),
        };
        Piece { reasoning, content, chosen, ..Piece::default() }
    }

    /// Whether the next token belongs to the reasoning.
    pub fn is_thinking(&self) -> bool {
        self.reply.is_thinking()
    }

    /// Whether a stop string, or the only call that is wanted, has ended the reply.
    pub fn is_complete(&self) -> bool {
        let is_last = self.ask.tools.as_ref().is_some_and(|tools| !tools.parallel);
        self.reply.stopped() || (is_last && self.calls > 0)
    }

    /// Ends the reply; returns its last piece and its `finish_reason`. A call that the limit cut
    /// off is dropped; one that the model left open counts if it has the form, and is text if not.
    pub fn finish(&mut self, finish: Finish) -> (Piece, &'static str) {
        let mut last = Piece::default();
        if let Some(ids) = self.call.take().filter(|_| finish == Finish::Stop) {
            let tools = self.ask.tools.as_ref();
            match tools.and_then(|tools| tools.parse(&ids, false, self.tokenizer)) {
                Some(call) => last = self.called(call, true),
                None => self.as_text(&ids),
            }
        }
        self.reply.finish(finish);
        last.append(self.rest());
        last.chosen.append(&mut self.chosen);
        last.was_no_reasoning = self.reply.is_thinking() && finish == Finish::Stop;
        let reason = match finish {
            Finish::Length => "length",
            Finish::Stop if self.calls > 0 => "tool_calls",
            Finish::Stop => "stop",
        };
        (last, reason)
    }
}
