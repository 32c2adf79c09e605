//! The objects of an answer: whole, or one chunk at a time.

#![forbid(unsafe_code)]

use super::{Ask, Call, Chosen, Piece, random_hex};
use crate::json::{Value, object, to_compact};
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
        for (sums, counts) in counts.into_iter().zip([other.prompt, other.completion, other.drafts])
        {
            (0..2).for_each(|i| sums[i] += counts[i]);
        }
        (0..2).for_each(|i| self.seconds[i] += other.seconds[i]);
    }

    fn to_json(self) -> Value {
        let ([prompt, cached], [completion, reasoning]) = (self.prompt, self.completion);
        object(vec![
            ("prompt_tokens", prompt.into()),
            ("completion_tokens", completion.into()),
            ("total_tokens", (prompt + completion).into()),
            ("prompt_tokens_details", object(vec![("cached_tokens", cached.into())])),
            ("completion_tokens_details", object(vec![("reasoning_tokens", reasoning.into())])),
        ])
    }

    /// Under the names that clients of llama.cpp show.
    fn timings(self) -> Value {
        let ms = |seconds: f64| Value::Float((seconds * 1e6).round() / 1e3);
        object(vec![
            ("prompt_n", (self.prompt[0] - self.prompt[1]).into()),
            ("prompt_ms", ms(self.seconds[0])),
            ("predicted_n", self.completion[0].into()),
            ("predicted_ms", ms(self.seconds[1])),
            ("cache_n", self.prompt[1].into()),
            ("draft_n", self.drafts[0].into()),
            ("draft_n_accepted", self.drafts[1].into()),
        ])
    }
}

fn unix_seconds() -> usize {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() as usize)
}

/// An entry of the list of models.
pub fn model_object(id: &str, ctx_tokens: usize) -> Value {
    object(vec![
        ("id", id.into()),
        ("object", "model".into()),
        ("created", unix_seconds().into()),
        ("owned_by", "colibri".into()),
        ("context_length", ctx_tokens.into()),
        ("max_model_len", ctx_tokens.into()),
        ("meta", object(vec![("n_ctx", ctx_tokens.into())])),
    ])
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

    fn choice(&self, body: (&str, Value), logprobs: Value, finish_reason: Option<&str>) -> Value {
        Value::Array(vec![object(vec![
            ("index", 0.into()),
            body,
            ("logprobs", logprobs),
            ("finish_reason", finish_reason.into()),
        ])])
    }

    fn chunk_of(&self, body: (&str, Value), logprobs: Value, finish: Option<&str>) -> String {
        let mut members = vec![("choices", self.choice(body, logprobs, finish))];
        if self.wants_usage {
            members.push(("usage", Value::Null));
        }
        self.wrap(true, members)
    }

    /// The chunk that opens a stream: it says whose turn it is. A completion has none.
    pub fn first_chunk(&self) -> Option<String> {
        let delta = object(vec![("role", "assistant".into()), ("content", "".into())]);
        self.is_chat.then(|| self.chunk_of(("delta", delta), Value::Null, None))
    }

    /// The chunk of a piece that is not empty.
    pub fn chunk(&mut self, piece: &Piece) -> String {
        let logprobs = self.logprobs(&piece.chosen);
        if !self.is_chat {
            return self.chunk_of(("text", piece.content.as_str().into()), logprobs, None);
        }
        let mut delta = Vec::new();
        for (name, text) in [("reasoning_content", &piece.reasoning), ("content", &piece.content)] {
            if !text.is_empty() {
                delta.push((name, text.as_str().into()));
            }
        }
        if !piece.calls.is_empty() {
            delta.push(("tool_calls", calls(&piece.calls, true)));
        }
        self.chunk_of(("delta", object(delta)), logprobs, None)
    }

    /// The chunks that end a stream: why it ended, and, where that was asked for, the usage.
    pub fn last_chunks(&self, finish_reason: &str, usage: Usage) -> Vec<String> {
        let body = if self.is_chat { ("delta", object(vec![])) } else { ("text", "".into()) };
        let mut chunks = vec![self.chunk_of(body, Value::Null, Some(finish_reason))];
        if self.wants_usage {
            let choices = ("choices", Value::Array(Vec::new()));
            let usage = [("usage", usage.to_json()), ("timings", usage.timings())];
            chunks.push(self.wrap(true, [choices].into_iter().chain(usage).collect()));
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
        let choices = self.choice(body, logprobs, Some(finish_reason));
        let usage = [("usage", usage.to_json()), ("timings", usage.timings())];
        self.wrap(false, [("choices", choices)].into_iter().chain(usage).collect())
    }

    fn logprobs(&mut self, chosen: &[Chosen]) -> Value {
        match (self.wants_logprobs, self.is_chat) {
            (false, _) => Value::Null,
            (true, true) => {
                let tokens = chosen.iter().map(|chosen| self.chat_token(chosen)).collect();
                object(vec![("content", Value::Array(tokens))])
            }
            (true, false) => self.completion_tokens(chosen),
        }
    }

    fn bytes(&self, id: u32) -> &'a [u8] {
        self.tokenizer.token_bytes(id).unwrap_or_default()
    }

    fn chat_token(&self, chosen: &Chosen) -> Value {
        let members = |id: u32, logprob: Option<f64>| {
            let bytes = self.bytes(id);
            let numbers = bytes.iter().map(|byte| Value::Int((*byte).into())).collect();
            vec![
                ("token", String::from_utf8_lossy(bytes).as_ref().into()),
                ("logprob", logprob.map_or(Value::Null, Value::Float)),
                ("bytes", Value::Array(numbers)),
            ]
        };
        let top = chosen.top.iter().map(|(id, logprob)| object(members(*id, Some(*logprob))));
        let mut token = members(chosen.id, chosen.logprob);
        token.push(("top_logprobs", Value::Array(top.collect())));
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
            lists[1].push(logprob.map_or(Value::Null, Value::Float));
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
    if !piece.reasoning.is_empty() {
        members.push(("reasoning_content", piece.reasoning.as_str().into()));
    }
    if !piece.calls.is_empty() {
        members.push(("tool_calls", calls(&piece.calls, false)));
    }
    object(members)
}

/// Calls; those of a stream are numbered, so that clients can put fragments together.
fn calls(calls: &[(usize, Call)], is_chunk: bool) -> Value {
    let one = |(index, call): &(usize, Call)| {
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
    Value::Array(calls.iter().map(one).collect())
}
