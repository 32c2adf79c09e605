//! Requests for a reply: every field that can change it is read here, or refused.

#![forbid(unsafe_code)]

use super::{Tools, bad_request, form, random_hex};
use crate::bail;
use crate::chat::{self, Prompt};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::grammar::Constraint;
use crate::http::Refusal;
use crate::json::{Field, Value};
use crate::sample::{Choose, Params};
use crate::tokenizer::{Special, Tokenizer};

/// Fields of other servers, and of uses that are not offered, that would change a reply.
const NOT_OFFERED: &str = "audio bad_words cache_slot dry_multiplier dynatemp_range function_call \
    functions ignore_eos length_penalty logits_processors min_tokens mirostat n_probs n_predict \
    num_predict prompt_logprobs repeat_penalty stop_token_ids suffix tfs_z typical_p \
    use_beam_search web_search_options xtc_probability x_colibri_ignore_leading_stop";

/// Most stop strings.
const STOPS_MAX: usize = 16;
/// Most alternatives of a token.
const TOP_LOGPROBS_MAX: u64 = 20;
/// New tokens of a completion that does not say, as clients of that route know it.
const COMPLETION_TOKENS_DEFAULT: u64 = 16;

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
        let fields = &Field::root(request);
        let flag = |name| Ok::<_, Error>(fields.get(name).boolean()?.unwrap_or(false));
        let params = read_params(fields)?;
        params.validate(engine.config().vocab_size)?;
        let most = |name, least: bool| fields.get(name).integer(u64::from(least)..=1 << 32);
        let new_tokens = match is_chat {
            true => most("max_completion_tokens", true)?.or(most("max_tokens", true)?),
            false => Some(most("max_tokens", false)?.unwrap_or(COMPLETION_TOKENS_DEFAULT)),
        };
        let stream = flag("stream")?;
        let options = fields.get("stream_options");
        options.members()?;
        let include_usage = options.get("include_usage").boolean()?.unwrap_or(false);
        let mut ask = Ask {
            is_chat,
            model: fields.get("model").string()?.map(String::from),
            prompt: Vec::new(),
            thinking: false,
            tools: None,
            constraint: None,
            echo: !is_chat && flag("echo")?,
            params,
            new_tokens: new_tokens.map(|tokens| tokens as usize),
            stops: read_stops(&fields.get("stop"))?,
            logprobs: read_logprobs(fields, is_chat)?,
            stream,
            include_usage: stream && include_usage,
        };
        if is_chat {
            ask.tools = Tools::read(fields, tokenizer)?;
            let prompt = render(request)?;
            (ask.prompt, ask.thinking) = (prompt.ids(tokenizer)?, prompt.is_thinking());
        } else {
            ask.prompt = prompt_ids(&fields.get("prompt"), tokenizer)?;
        }
        let content = form::read(fields)?;
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
        engine.chooser(self.params.clone(), self.constraint.clone(), self.thinking)
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
    let is_given = |name: &&str| request.get(name).is_some_and(|value| !is_off(value));
    let is_many =
        |name: &&str| request.get(name).is_some_and(|n| ![Value::Null, Value::Int(1)].contains(n));
    let (name, code, what) = match NOT_OFFERED.split(' ').find(is_given) {
        Some(name) => (name, "unsupported_parameter", "this field"),
        None => match ["n", "best_of"].into_iter().find(is_many) {
            Some(name) => (name, "unsupported_value", "anything but 1"),
            None => return Ok(()),
        },
    };
    let refusal = Refusal::new(400, format!("{name}: {what} is not offered"));
    Err(refusal.code(code).param(name))
}

/// The prompt of a chat. Error, beside those of the template: a part that is no text, of which the
/// model would see nothing.
pub fn render(request: &Value) -> Result<Prompt> {
    let prompt = chat::render(request)?;
    for message in Field::root(request).get("messages").items()? {
        for part in message.get("content").items().unwrap_or_default() {
            let kind = part.get("type").value().and_then(Value::as_str).unwrap_or_default();
            if chat::is_media(kind) {
                return Err(part.error(format!("the model reads text only, found {kind}")));
            }
        }
    }
    Ok(prompt)
}

/// Whether a field that is not offered is not used either.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) | Value::Int(0) => true,
        Value::Float(number) => *number == 0.0,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

fn read_params(fields: &Field<'_>) -> Result<Params> {
    let number = |name, default| Ok::<f64, Error>(fields.get(name).number()?.unwrap_or(default));
    let temperature = number("temperature", 1.0)?;
    if !(0.0..=2.0).contains(&temperature) {
        return Err(fields.get("temperature").refused("a number from 0 to 2"));
    }
    let seed = fields.get("seed");
    let seed = match seed.value().map(|seed| seed.as_u64().or(seed.as_i64().map(|n| n as u64))) {
        None => u64::from_str_radix(&random_hex(), 16).unwrap_or_default(),
        Some(Some(seed)) => seed,
        Some(None) => return Err(seed.unexpected("an integer of 64 bits")),
    };
    let bias = fields.get("logit_bias");
    let mut logit_bias = Vec::new();
    for (token, value) in bias.members()?.unwrap_or_default() {
        match (token.parse(), value.as_f64()) {
            (Ok(token), Some(value)) => logit_bias.push((token, value)),
            _ => return Err(bias.error(format!("expected ids with numbers, found {token:?}"))),
        }
    }
    // As for vLLM, -1 is off.
    let top_k = fields.get("top_k");
    let top_k = match top_k.value() {
        Some(Value::Int(-1)) => None,
        _ => top_k.integer(0..=u32::MAX.into())?,
    };
    Ok(Params {
        temperature,
        top_p: number("top_p", 0.95)?,
        top_k: top_k.unwrap_or(0) as usize,
        min_p: number("min_p", 0.0)?,
        repetition_penalty: number("repetition_penalty", 1.0)?,
        presence_penalty: number("presence_penalty", 0.0)?,
        frequency_penalty: number("frequency_penalty", 0.0)?,
        logit_bias,
        seed,
    })
}

/// A string or several.
fn read_stops(field: &Field<'_>) -> Result<Vec<String>> {
    let stops = match field.value() {
        None => &[],
        Some(Value::Array(stops)) => &stops[..],
        Some(stop) => std::slice::from_ref(stop),
    };
    if stops.len() > STOPS_MAX {
        let found = stops.len();
        return Err(field.error(format!("expected at most {STOPS_MAX} strings, found {found}")));
    }
    let text = |stop: &Value| stop.as_str().filter(|stop| !stop.is_empty()).map(String::from);
    let texts = stops.iter().map(text).collect::<Option<Vec<_>>>();
    texts.ok_or_else(|| field.error("expected strings that are not empty"))
}

/// Chat has a switch and a number, completions a number.
fn read_logprobs(fields: &Field<'_>, is_chat: bool) -> Result<Option<usize>> {
    let count = |name| Ok(fields.get(name).integer(0..=TOP_LOGPROBS_MAX)?.map(|n| n as usize));
    if !is_chat {
        return count("logprobs");
    }
    let is_wanted = fields.get("logprobs").boolean()?.unwrap_or(false);
    let top = count("top_logprobs")?.unwrap_or(0);
    if !is_wanted && top > 0 {
        bail!("top_logprobs: expected logprobs to be true with it");
    }
    Ok(is_wanted.then_some(top))
}

/// The tokens of a raw prompt, in which markers count: a string, or token ids; either may be the
/// only element of an array. Errors: anything else, no token at all.
pub fn prompt_ids(prompt: &Field<'_>, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let ids = match prompt.value() {
        Some(Value::String(text)) => tokenizer.encode(text, Special::Parse),
        Some(Value::Array(items)) => match &items[..] {
            [Value::String(_) | Value::Array(_)] => {
                return prompt_ids(&prompt.items()?[0], tokenizer);
            }
            _ => {
                let most = tokenizer.vocab_size();
                let id = |id: &Value| Some(id.as_u64().filter(|id| *id < most as u64)? as u32);
                let ids = items.iter().map(id).collect::<Option<Vec<_>>>();
                let expected = || format!("expected one string, or token ids below {most}");
                ids.ok_or_else(|| prompt.error(expected()))?
            }
        },
        _ => return Err(prompt.unexpected("a string or an array")),
    };
    if ids.is_empty() {
        return Err(prompt.error("expected at least one token, found none"));
    }
    Ok(ids)
}
