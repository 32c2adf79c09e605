//! The objects of an answer: whole, or one chunk at a time.

#![forbid(unsafe_code)]

use super::{Ask, Call, Chosen, Piece, random_hex};
use crate::json::{Value, object, to_compact};
use crate::object;
use crate::tokenizer::Tokenizer;
use std::time::{SystemTime, UNIX_EPOCH};

/// What the answer to a request cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Tokens of the prompt, and how many of them were computed for an earlier request.
    pub prompt: [usize; 2],
    /// Tokens of the reply, and how many of them are reasoning.
    pub completion: [usize; 2],
    /// Drafts that were run along, and how many of them were right.
    pub drafts: [usize; 2],
    /// Seconds until the first token, and from there to the end.
    pub seconds: [f64; 2],
}

impl Usage {
    /// Adds what another answer cost.
    pub fn add(&mut self, other: Usage) {
        let counts = [&mut self.prompt, &mut self.completion, &mut self.drafts];
        for (sums, more) in counts.into_iter().zip([other.prompt, other.completion, other.drafts]) {
            (0..2).for_each(|i| sums[i] += more[i]);
        }
        (0..2).for_each(|i| self.seconds[i] += other.seconds[i]);
    }

    /// As the members of an answer: the usage, and under the names that clients of llama.cpp show
    /// the times.
    fn members(self) -> [(&'static str, Value); 2] {
        let ([prompt, cached], [completion, reasoning]) = (self.prompt, self.completion);
        let [prompt_ms, predicted_ms] = self.seconds.map(|seconds| (seconds * 1e6).round() / 1e3);
        let usage = object! {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": object! { "cached_tokens": cached },
            "completion_tokens_details": object! { "reasoning_tokens": reasoning },
        };
        let timings = object! {
            "prompt_n": prompt - cached,
            "prompt_ms": prompt_ms,
            "predicted_n": completion,
            "predicted_ms": predicted_ms,
            "cache_n": cached,
            "draft_n": self.drafts[0],
            "draft_n_accepted": self.drafts[1],
        };
        [("usage", usage), ("timings", timings)]
    }
}

fn unix_seconds() -> usize {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() as usize)
}

/// An entry of the list of models.
pub fn model_object(id: &str, ctx_tokens: usize) -> Value {
    object! {
        "id": id,
        "object": "model",
        "created": unix_seconds(),
        "owned_by": "colibri",
        "context_length": ctx_tokens,
        "max_model_len": ctx_tokens,
        "meta": object! { "n_ctx": ctx_tokens },
    }
}

/// What all objects of one answer share.
pub struct Envelope<'a> {
    tokenizer: &'a Tokenizer,
    id: String,
    created: usize,
    model: String,
    is_chat: bool,
    wants_usage: bool,
    wants_logprobs: bool,
    /// Characters of the completion's tokens so far.
    text_offset: usize,
}

impl<'a> Envelope<'a> {
    /// For the answer to `ask` by `model`, unless the client calls it otherwise.
    pub fn new(ask: &Ask, model: &str, tokenizer: &'a Tokenizer) -> Envelope<'a> {
        let kind = if ask.is_chat { "chatcmpl" } else { "cmpl" };
        Envelope {
            tokenizer,
            id: format!("{kind}-{}{}", random_hex(), random_hex()),
            created: unix_seconds(),
            model: ask.model.clone().unwrap_or_else(|| model.into()),
            is_chat: ask.is_chat,
            wants_usage: ask.include_usage,
            wants_logprobs: ask.logprobs.is_some(),
            text_offset: 0,
        }
    }

    fn wrap(&self, is_chunk: bool, rest: Vec<(&str, Value)>) -> String {
        let kind = match (self.is_chat, is_chunk) {
            (true, false) => "chat.completion",
            (true, true) => "chat.completion.chunk",
            (false, _) => "text_completion",
        };
        let mut members = vec![
            ("id", self.id.as_str().into()),
            ("object", kind.into()),
            ("created", self.created.into()),
            ("model", self.model.as_str().into()),
            ("system_fingerprint", format!("colibri-{}", crate::VERSION).as_str().into()),
        ];
        members.extend(rest);
        to_compact(&object(members))
    }

    /// The choices, of which there is one.
    fn choices(
        &self,
        (name, body): (&str, Value),
        logprobs: Value,
        finish_reason: Option<&str>,
    ) -> (&'static str, Value) {
        let choice = vec![
            ("index", 0.into()),
            (name, body),
            ("logprobs", logprobs),
            ("finish_reason", finish_reason.into()),
        ];
        ("choices", vec![object(choice)].into())
    }

    fn chunk_of(&self, body: (&str, Value), logprobs: Value, finish: Option<&str>) -> String {
        let mut members = vec![self.choices(body, logprobs, finish)];
        members.extend(self.wants_usage.then_some(("usage", Value::Null)));
        self.wrap(true, members)
    }

    /// The chunk that opens a stream: it says whose turn it is. A completion has none.
    pub fn first_chunk(&self) -> Option<String> {
        let delta = object! { "role": "assistant", "content": "" };
        self.is_chat.then(|| self.chunk_of(("delta", delta), Value::Null, None))
    }

    /// The chunk of a piece that is not empty.
    pub fn chunk(&mut self, piece: &Piece) -> String {
        let logprobs = self.logprobs(&piece.chosen);
        if !self.is_chat {
            return self.chunk_of(("text", piece.content.as_str().into()), logprobs, None);
        }
        let mut delta = reasoning_and_calls(piece, true);
        if !piece.content.is_empty() {
            delta.push(("content", piece.content.as_str().into()));
        }
        self.chunk_of(("delta", object(delta)), logprobs, None)
    }

    /// The chunks that end a stream: why it ended, and, where that was asked for, the usage.
    pub fn last_chunks(&self, finish_reason: &str, usage: Usage) -> Vec<String> {
        let body = if self.is_chat { ("delta", object! {}) } else { ("text", "".into()) };
        let mut chunks = vec![self.chunk_of(body, Value::Null, Some(finish_reason))];
        if self.wants_usage {
            let choices = [("choices", Value::Array(Vec::new()))];
            chunks.push(self.wrap(true, choices.into_iter().chain(usage.members()).collect()));
        }
        chunks
    }

    /// The whole answer.
    pub fn whole(&mut self, piece: &Piece, finish_reason: &str, usage: Usage) -> String {
        let logprobs = self.logprobs(&piece.chosen);
        let body = match self.is_chat {
            true => ("message", message(piece)),
            false => ("text", piece.content.as_str().into()),
        };
        let choices = [self.choices(body, logprobs, Some(finish_reason))];
        self.wrap(false, choices.into_iter().chain(usage.members()).collect())
    }

    fn logprobs(&mut self, chosen: &[Chosen]) -> Value {
        match (self.wants_logprobs, self.is_chat) {
            (false, _) => Value::Null,
            (true, true) => {
                let tokens: Vec<Value> = chosen.iter().map(|c| self.chat_token(c)).collect();
                object! { "content": tokens }
            }
            (true, false) => self.completion_tokens(chosen),
        }
    }

    fn bytes(&self, id: u32) -> &'a [u8] {
        self.tokenizer.token_bytes(id).unwrap_or_default()
    }

    fn chat_token(&self, chosen: &Chosen) -> Value {
        let members = |id: u32, logprob: Option<f64>| {
            let text = String::from_utf8_lossy(self.bytes(id)).into_owned();
            vec![
                ("token", text.into()),
                ("logprob", logprob.into()),
                ("bytes", self.bytes(id).into()),
            ]
        };
        let top = chosen.top.iter().map(|(id, logprob)| object(members(*id, Some(*logprob))));
        let mut token = members(chosen.id, chosen.logprob);
        token.push(("top_logprobs", top.collect::<Vec<_>>().into()));
        object(token)
    }

    /// Four lists; the offset of a token counts characters.
    fn completion_tokens(&mut self, chosen: &[Chosen]) -> Value {
        let mut lists: [Vec<Value>; 4] = Default::default();
        for Chosen { id, logprob, top } in chosen {
            let text = token_name(self.bytes(*id));
            let top = top.iter().map(|(id, p)| (token_name(self.bytes(*id)), Value::Float(*p)));
            let top = logprob.map(|_| Value::Object(top.collect()));
            lists[0].push(text.as_str().into());
            lists[1].push((*logprob).into());
            lists[2].push(top.into());
            lists[3].push(self.text_offset.into());
            self.text_offset += String::from_utf8_lossy(self.bytes(*id)).chars().count();
        }
        let names = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];
        object(names.into_iter().zip(lists.map(Value::Array)).collect())
    }
}

/// A token as a name: two parts of a character must not have the same.
fn token_name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => bytes.iter().fold("bytes:".into(), |name, byte| name + &format!("\\x{byte:02x}")),
    }
}

fn message(piece: &Piece) -> Value {
    // Next to calls, nothing is no content rather than an empty reply.
    let has_content = piece.calls.is_empty() || !piece.content.trim().is_empty();
    let content = has_content.then_some(piece.content.as_str());
    let mut members = vec![("role", "assistant".into()), ("content", content.into())];
    members.extend(reasoning_and_calls(piece, false));
    object(members)
}

/// What a piece has beside its content. Calls of a stream are numbered, so that clients can put
/// fragments together.
fn reasoning_and_calls(piece: &Piece, is_chunk: bool) -> Vec<(&'static str, Value)> {
    let call = |(index, call): &(usize, Call)| {
        let mut function = vec![("arguments", call.arguments.as_str().into())];
        let mut members = vec![("index", (*index).into())];
        members.truncate(usize::from(is_chunk));
        if !call.id.is_empty() {
            function.insert(0, ("name", call.name.as_str().into()));
            members.extend([("id", call.id.as_str().into()), ("type", "function".into())]);
        }
        members.push(("function", object(function)));
        object(members)
    };
    let mut members = Vec::new();
    if !piece.reasoning.is_empty() {
        members.push(("reasoning_content", piece.reasoning.as_str().into()));
    }
    if !piece.calls.is_empty() {
        members.push(("tool_calls", piece.calls.iter().map(call).collect::<Vec<_>>().into()));
    }
    members
}
