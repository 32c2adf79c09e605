//! Requests for a reply: every field that can change it is read here, or refused.

#![forbid(unsafe_code)]

use super::{Tools, bad_request, form, random_hex};
use crate::bail;
use crate::chat::{self, Prompt};
use crate::engine::Engine;
use crate::error::{Context, Error, Result};
use crate::grammar::{Constraint, Guided};
use crate::http::Refusal;
use crate::json::{Value, to_compact};
use crate::sample::{Choose, Params, Sampler};
use crate::tokenizer::{Special, Tokenizer};
use std::ops::RangeInclusive;

/// Fields of other servers, and of uses that are not offered, that would change a reply.
const NOT_OFFERED: [&str; 25] = [
    "audio",
    "bad_words",
    "cache_slot",
    "dry_multiplier",
    "dynatemp_range",
    "function_call",
    "functions",
    "ignore_eos",
    "length_penalty",
    "logits_processors",
    "min_tokens",
    "mirostat",
    "n_probs",
    "n_predict",
    "num_predict",
    "prompt_logprobs",
    "repeat_penalty",
    "stop_token_ids",
    "suffix",
    "tfs_z",
    "typical_p",
    "use_beam_search",
    "web_search_options",
    "xtc_probability",
    "x_colibri_ignore_leading_stop",
];

/// Most stop strings.
const STOPS_MAX: usize = 16;
/// Most alternatives of a token.
const TOP_LOGPROBS_MAX: usize = 20;
/// New tokens of a completion that does not say, as clients of that route know it.
const COMPLETION_TOKENS_DEFAULT: usize = 16;

/// A request, checked.
pub struct Ask {
    /// Chat, or the completion of a raw prompt.
    pub is_chat: bool,
    /// The name that the client gave the model.
    pub model: Option<String>,
    /// Tokens of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Whether the prompt ends inside an open think block.
    pub thinking: bool,
    /// What the model may call.
    pub tools: Option<Tools>,
    /// What the reply must match, behind its thought.
    constraint: Option<Constraint>,
    /// Whether the prompt is part of the reply.
    pub echo: bool,
    /// How tokens are chosen.
    pub params: Params,
    /// Most new tokens, if the client says.
    pub new_tokens: Option<usize>,
    /// Texts that end the reply.
    pub stops: Vec<String>,
    /// Alternatives of each token, if log-probabilities are wanted.
    pub logprobs: Option<usize>,
    /// Whether the reply is a stream of events.
    pub stream: bool,
    /// Whether such a stream ends with the usage.
    pub include_usage: bool,
}

impl Ask {
    /// Reads the body of a request. Errors: 400 with the field.
    pub fn read(
        request: &Value,
        is_chat: bool,
        engine: &Engine,
    ) -> std::result::Result<Ask, Refusal> {
        if request.as_object().is_none() {
            return Err(Refusal::new(400, format!("expected an object, found {}", request.kind())));
        }
        refuse_not_offered(request)?;
        Ask::read_fields(request, is_chat, engine).map_err(bad_request)
    }

    fn read_fields(request: &Value, is_chat: bool, engine: &Engine) -> Result<Ask> {
        let tokenizer = engine.tokenizer()?;
        let fields = Fields { object: request, path: "" };
        let params = read_params(&fields)?;
        params.validate(engine.config().vocab_size)?;
        let most = if is_chat { "max_completion_tokens" } else { "max_tokens" };
        let new_tokens = match fields.integer(most, u64::from(is_chat)..=1 << 32)? {
            None if is_chat => fields.integer("max_tokens", 1..=1 << 32)?,
            None => Some(COMPLETION_TOKENS_DEFAULT as u64),
            given => given,
        };
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let options = fields.member("stream_options")?;
        let include_usage = options.boolean("include_usage")?.unwrap_or(false);
        let mut ask = Ask {
            is_chat,
            model: fields.string("model")?.map(String::from),
            prompt: Vec::new(),
            thinking: false,
            tools: None,
            constraint: None,
            echo: !is_chat && fields.boolean("echo")?.unwrap_or(false),
            params,
            new_tokens: new_tokens.map(|tokens| tokens as usize),
            stops: read_stops(&fields)?,
            logprobs: read_logprobs(&fields, is_chat)?,
            stream,
            include_usage: stream && include_usage,
        };
        if is_chat {
            ask.tools = Tools::read(request, tokenizer)?;
            let prompt = render(request)?;
            (ask.prompt, ask.thinking) = (prompt.ids(tokenizer)?, prompt.is_thinking());
        } else {
            let Some(prompt) = fields.get("prompt") else { bail!("prompt: expected, but missing") };
            ask.prompt = prompt_ids(prompt, tokenizer).context(|| "prompt")?;
        }
        let content = form::read(request)?;
        let grammar = match (&ask.tools, content) {
            (Some(tools), _) if tools.must_call => Some(tools.grammar()?),
            (Some(tools), Some(content)) => Some(content.or(tools.grammar()?)),
            (_, content) => content,
        };
        ask.constraint = grammar.map(|grammar| engine.constraint(grammar)).transpose()?;
        Ok(ask)
    }

    /// What chooses the tokens of the reply.
    pub fn chooser<'a>(&self, engine: &'a Engine) -> Result<Box<dyn Choose + 'a>> {
        let (vocab_size, banned) = (engine.config().vocab_size, engine.never_sampled());
        let sampler = Sampler::new(self.params.clone(), vocab_size, banned)?;
        let Some(constraint) = self.constraint.clone() else { return Ok(Box::new(sampler)) };
        let tokenizer = engine.tokenizer()?;
        let end_think = tokenizer.token_id("</think>").filter(|_| self.thinking);
        let guided = Guided::new(sampler, constraint, tokenizer, engine.stop_tokens());
        Ok(Box::new(guided.after(end_think)))
    }

    /// Most new tokens with a context of `ctx_tokens`: as many as were asked for and fit, where the
    /// last one needs no place. Error: 400 if the prompt itself does not fit.
    pub fn fit(&self, ctx_tokens: usize) -> std::result::Result<usize, Refusal> {
        let (prompt, wanted) = (self.prompt.len(), self.new_tokens);
        if prompt <= ctx_tokens {
            return Ok(wanted.unwrap_or(usize::MAX).min(ctx_tokens + 1 - prompt));
        }
        let more = wanted.map_or(String::new(), |n| format!(", and {n} more are requested"));
        let message = format!(
            "the context holds {ctx_tokens} tokens, but the prompt has {prompt}{more}; \
             shorten the prompt, or start the server with a larger --ctx"
        );
        let param = if self.is_chat { "messages" } else { "prompt" };
        Err(Refusal::new(400, message).code("context_length_exceeded").param(param))
    }
}

/// Refuses what would change the reply and is not honoured.
fn refuse_not_offered(request: &Value) -> std::result::Result<(), Refusal> {
    let given = |name: &&str| request.get(name).is_some_and(|value| !is_off(value));
    let is_many = |name: &&str| {
        request.get(name).is_some_and(|value| !value.is_null() && *value != Value::Int(1))
    };
    let refuse = |name: &str, code, what: &str| {
        let refusal = Refusal::new(400, format!("{name}: {what} is not offered"));
        Err(refusal.code(code).param(name))
    };
    if let Some(name) = NOT_OFFERED.into_iter().find(given) {
        return refuse(name, "unsupported_parameter", "this field");
    }
    match ["n", "best_of"].into_iter().find(is_many) {
        Some(name) => refuse(name, "unsupported_value", "anything but 1"),
        None => Ok(()),
    }
}

/// The prompt of a chat. Error, beside those of the template: a part that is no text, of which the
/// model would see nothing.
pub fn render(request: &Value) -> Result<Prompt> {
    let messages = request.get("messages").and_then(Value::as_array).unwrap_or_default();
    for (i, message) in messages.iter().enumerate() {
        let parts = message.get("content").and_then(Value::as_array).unwrap_or_default();
        for (j, part) in parts.iter().enumerate() {
            let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
            if chat::MEDIA_TYPES.contains(&kind) {
                bail!("messages[{i}].content[{j}]: the model reads text only, found {kind}");
            }
        }
    }
    chat::render(request)
}

/// Whether a field that is not offered is not used either.
pub(super) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) | Value::Int(0) => true,
        Value::Float(number) => *number == 0.0,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

fn read_params(fields: &Fields<'_>) -> Result<Params> {
    let number =
        |name: &str, default| -> Result<f64> { Ok(fields.number(name)?.unwrap_or(default)) };
    let temperature = number("temperature", 1.0)?;
    if !(0.0..=2.0).contains(&temperature) {
        bail!("temperature: expected a number from 0 to 2, found {temperature}");
    }
    let seed = match fields.get("seed").map(|seed| (seed, seed.as_i64(), seed.as_u64())) {
        None => u64::from_str_radix(&random_hex(), 16).unwrap_or_default(),
        Some((_, Some(seed), _)) => seed as u64,
        Some((_, _, Some(seed))) => seed,
        Some((other, ..)) => bail!("seed: expected an integer of 64 bits, found {}", other.kind()),
    };
    let mut logit_bias = Vec::new();
    for (token, bias) in fields.member("logit_bias")?.object.as_object().unwrap_or_default() {
        match (token.parse(), bias.as_f64()) {
            (Ok(token), Some(bias)) => logit_bias.push((token, bias)),
            (Err(_), _) => bail!("logit_bias: expected token ids as keys, found {token:?}"),
            _ => bail!("logit_bias: expected a number for {token}, found {}", bias.kind()),
        }
    }
    Ok(Params {
        temperature,
        top_p: number("top_p", 0.95)?,
        top_k: fields.integer("top_k", 0..=u64::from(u32::MAX))?.unwrap_or(0) as usize,
        min_p: number("min_p", 0.0)?,
        repetition_penalty: number("repetition_penalty", 1.0)?,
        presence_penalty: number("presence_penalty", 0.0)?,
        frequency_penalty: number("frequency_penalty", 0.0)?,
        logit_bias,
        seed,
    })
}

/// A string or several.
fn read_stops(fields: &Fields<'_>) -> Result<Vec<String>> {
    let stops = match fields.get("stop") {
        None => &[],
        Some(Value::Array(stops)) => &stops[..],
        Some(stop) => std::slice::from_ref(stop),
    };
    if stops.len() > STOPS_MAX {
        bail!("stop: expected at most {STOPS_MAX} strings, found {}", stops.len());
    }
    let text = |stop: &Value| stop.as_str().filter(|stop| !stop.is_empty()).map(String::from);
    let expected = || Error::new("stop: expected strings that are not empty");
    stops.iter().map(|stop| text(stop).ok_or_else(expected)).collect()
}

/// Chat has a switch and a number, completions a number.
fn read_logprobs(fields: &Fields<'_>, is_chat: bool) -> Result<Option<usize>> {
    let top = 0..=TOP_LOGPROBS_MAX as u64;
    if !is_chat {
        return Ok(fields.integer("logprobs", top)?.map(|top| top as usize));
    }
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let count = fields.integer("top_logprobs", top)?;
    if !wanted && count.is_some_and(|count| count > 0) {
        bail!("top_logprobs: expected logprobs to be true with it");
    }
    Ok(wanted.then_some(count.unwrap_or(0) as usize))
}

/// The tokens of a raw prompt, in which markers count: a string, or token ids; either may be the
/// only element of an array. Errors: anything else, no token at all.
pub fn prompt_ids(prompt: &Value, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let id = |id: &Value| {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        id.filter(|id| (*id as usize) < tokenizer.vocab_size())
    };
    let ids = match prompt {
        Value::String(text) => tokenizer.encode(text, Special::Parse),
        Value::Array(items) => match &items[..] {
            [inner @ (Value::String(_) | Value::Array(_))] => {
                return prompt_ids(inner, tokenizer);
            }
            _ => match items.iter().map(id).collect::<Option<Vec<_>>>() {
                Some(ids) => ids,
                None => bail!("expected one string, or token ids below {}", tokenizer.vocab_size()),
            },
        },
        other => bail!("expected a string or an array, found {}", other.kind()),
    };
    if ids.is_empty() {
        bail!("expected at least one token, found none");
    }
    Ok(ids)
}

/// The members of an object, by kind; null is absent. Errors name the member.
struct Fields<'a> {
    object: &'a Value,
    /// What stands before a name.
    path: &'static str,
}

impl<'a> Fields<'a> {
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// A member if it is there, as `read` takes it.
    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => bail!("{}{name}: expected {expected}, found {}", self.path, value.kind()),
        }
    }

    fn boolean(&self, name: &str) -> Result<Option<bool>> {
        self.read(name, "true or false", Value::as_bool)
    }

    fn number(&self, name: &str) -> Result<Option<f64>> {
        self.read(name, "a number", Value::as_f64)
    }

    fn string(&self, name: &str) -> Result<Option<&'a str>> {
        self.read(name, "a string", Value::as_str)
    }

    /// A whole number, which some clients write as 5.0.
    fn integer(&self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>> {
        let (low, high) = (range.start(), range.end());
        let whole = |number: f64| (number.fract() == 0.0 && number >= 0.0).then_some(number as u64);
        let number = |value: &Value| value.as_u64().or_else(|| value.as_f64().and_then(whole));
        let Some(value) = self.get(name) else { return Ok(None) };
        if let Some(found) = number(value).filter(|found| range.contains(found)) {
            return Ok(Some(found));
        }
        let found = match value.as_f64() {
            Some(_) => to_compact(value),
            None => value.kind().to_string(),
        };
        bail!("{}{name}: expected an integer from {low} to {high}, found {found}", self.path)
    }

    /// The members of a member; none if it is absent.
    fn member(&self, name: &'static str) -> Result<Fields<'a>> {
        let object = self.read(name, "an object", |v| v.as_object().map(|_| v))?;
        Ok(Fields { object: object.unwrap_or(&Value::Null), path: "" })
    }
}
