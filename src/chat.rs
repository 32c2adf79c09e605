//! GLM-5.2's chat template, owned in code: an OpenAI chat request to the prompt that is fed.
//!
//! A prompt is a list of [`Segment`]s: markers that the template writes, and text that came from
//! the request. Only the template can write a marker. Text is encoded with added tokens switched
//! off, so the literal `<|user|>` in a message stays eight characters of text.
//!
//! The rules, with no newline anywhere except inside the tools block:
//!
//! 1. `[gMASK]<sop>`
//! 2. unless `enable_thinking` is false: `<|system|>Reasoning Effort: High` if `reasoning_effort`
//!    is "high", else `… Max`.
//! 3. with tools: a system turn that lists them, one line of JSON each (`json.dumps` spacing, keys
//!    in the client's order, without `strict` and `defer_loading`; deferred tools are left out).
//! 4. each message: `<|system|>`, `<|user|>` and their text; `<|assistant|>` with its think block,
//!    stripped content and tool calls; `<|observation|>` once per run of tool messages, then one
//!    `<tool_response>` each.
//! 5. `<|assistant|><think>`, or `<|assistant|><think></think>` with thinking off.
//!
//! Choices where the template cannot be seen or is known to be wrong: `null` content is empty
//! (the template prints `None`); the `developer` role is a system turn; a role that the template
//! would skip silently is refused; media parts become [`MEDIA_REMINDER`]. Reasoning of earlier
//! turns is dropped as the template does, except that a client which sends `reasoning_content`
//! back keeps it unless it asks for `clear_thinking`: dropping it would change the whole prompt
//! behind it, and cost a new prefill.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::{Context, Result};
use crate::json::{self, Limits, Value, to_python};
use crate::tokenizer::{Special, Tokenizer};

/// What stands in for an image, video or audio part.
pub const MEDIA_REMINDER: &str = "<reminder>You are unable to process this multimodal content \
                                  because you don't have multimodal input ability.</reminder>";

const TOOLS_HEAD: &str = "\n# Tools\n\nYou may call one or more functions to assist with the user \
                          query.\n\nYou are provided with function signatures within \
                          <tools></tools> XML tags:\n<tools>\n";
const TOOLS_TAIL: &str = "</tools>\n\nFor each function call, output the function name and \
                          arguments within the following XML format:\n";

/// A piece of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// A marker that the template writes: exactly one added token.
    Control(&'static str),
    /// Text; never a marker, whatever it spells.
    Text(String),
}

/// A rendered prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    segments: Vec<Segment>,
    thinking: bool,
}

impl Prompt {
    fn control(&mut self, marker: &'static str) {
        self.segments.push(Segment::Control(marker));
    }

    /// Neighbouring texts are one segment: the tokenizer must see them as one.
    fn text_of(&mut self, text: &str) {
        match self.segments.last_mut() {
            Some(Segment::Text(last)) => last.push_str(text),
            _ if text.is_empty() => {}
            _ => self.segments.push(Segment::Text(text.into())),
        }
    }

    /// The pieces, in order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Whether the prompt ends inside an open think block.
    pub fn is_thinking(&self) -> bool {
        self.thinking
    }

    /// The prompt as one string, as a person would read it.
    pub fn text(&self) -> String {
        let piece = |segment: &Segment| match segment {
            Segment::Control(marker) => marker.to_string(),
            Segment::Text(text) => text.clone(),
        };
        self.segments.iter().map(piece).collect()
    }

    /// The tokens. Errors: a tokenizer that lacks a marker.
    pub fn ids(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for segment in &self.segments {
            match segment {
                Segment::Control(marker) => match tokenizer.token_id(marker) {
                    Some(id) => ids.push(id),
                    None => bail!("the tokenizer has no token {marker}, which the template needs"),
                },
                Segment::Text(text) => ids.extend(tokenizer.encode(text, Special::Text)),
            }
        }
        Ok(ids)
    }
}

/// What the request says about the template, beside its messages.
struct Settings<'a> {
    enable_thinking: bool,
    high_effort: bool,
    clear_thinking: Option<bool>,
    tools: &'a [Value],
}

impl<'a> Settings<'a> {
    /// Each setting may stand in `chat_template_kwargs` or at the top; null means absent.
    fn read(request: &'a Value) -> Result<Settings<'a>> {
        let kwargs = present(request, "chat_template_kwargs");
        if let Some(kwargs) = kwargs.filter(|kwargs| kwargs.as_object().is_none()) {
            bail!("chat_template_kwargs: expected an object, found {}", kwargs.kind());
        }
        let setting = |name: &str| {
            kwargs.and_then(|kwargs| present(kwargs, name)).or_else(|| present(request, name))
        };
        let boolean = |name: &str| match setting(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => bail!("{name}: expected true or false, found {}", other.kind()),
        };
        let effort = match setting("reasoning_effort") {
            None => "",
            Some(Value::String(effort)) => effort,
            Some(other) => bail!("reasoning_effort: expected a string, found {}", other.kind()),
        };
        Ok(Settings {
            enable_thinking: boolean("enable_thinking")?.unwrap_or(true),
            high_effort: effort == "high",
            clear_thinking: boolean("clear_thinking")?,
            tools: present(request, "tools").map_or(Ok(&[][..]), |v| array(v, "tools"))?,
        })
    }
}

/// The member `key`, unless it is null.
fn present<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    value.get(key).filter(|value| !value.is_null())
}

fn array<'a>(value: &'a Value, name: &str) -> Result<&'a [Value]> {
    match value.as_array() {
        Some(items) => Ok(items),
        None => bail!("{name}: expected an array, found {}", value.kind()),
    }
}

fn string<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    match value.get(key) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => bail!("{key}: expected a string, found {}", other.kind()),
        None => bail!("{key} is missing"),
    }
}

/// Renders an OpenAI chat request. Errors name the field, as in `messages[2].content[0].type`.
pub fn render(request: &Value) -> Result<Prompt> {
    let settings = Settings::read(request)?;
    let Some(messages) = present(request, "messages") else { bail!("messages is missing") };
    let messages = array(messages, "messages")?;
    if messages.is_empty() {
        bail!("messages: expected at least one message, found none");
    }
    let mut prompt = Prompt { thinking: settings.enable_thinking, ..Prompt::default() };
    prompt.control("[gMASK]");
    prompt.control("<sop>");
    if settings.enable_thinking {
        prompt.control("<|system|>");
        let effort = if settings.high_effort { "High" } else { "Max" };
        prompt.text_of(&format!("Reasoning Effort: {effort}"));
    }
    if !settings.tools.is_empty() {
        render_tools(&mut prompt, settings.tools)?;
    }
    let role = |message: &Value| message.get("role").and_then(Value::as_str).map(String::from);
    let last_user = messages.iter().rposition(|m| role(m).as_deref() == Some("user"));
    let mut in_tool_run = false;
    for (i, message) in messages.iter().enumerate() {
        let is_past = last_user.is_some_and(|last| i <= last);
        let is_tool = role(message).as_deref() == Some("tool");
        if is_tool && !in_tool_run {
            prompt.control("<|observation|>");
        }
        in_tool_run = is_tool;
        render_message(&mut prompt, message, &settings, is_past)
            .map_err(|error| error.context(format!("messages[{i}]")))?;
    }
    prompt.control("<|assistant|>");
    prompt.control("<think>");
    if !settings.enable_thinking {
        prompt.control("</think>");
    }
    Ok(prompt)
}

/// The system turn that lists the tools. Its sample call consists of real markers, as the
/// template's own text does.
fn render_tools(prompt: &mut Prompt, tools: &[Value]) -> Result<()> {
    prompt.control("<|system|>");
    prompt.text_of(TOOLS_HEAD);
    for (i, tool) in tools.iter().enumerate() {
        let function = tool_function(tool).context(|| format!("tools[{i}]"))?;
        if !is_true(function.get("defer_loading")) && !is_true(tool.get("defer_loading")) {
            prompt.text_of(&(tool_line(function) + "\n"));
        }
    }
    prompt.text_of(TOOLS_TAIL);
    prompt.control("<tool_call>");
    prompt.text_of("{function-name}");
    for n in 1..=2 {
        prompt.control("<arg_key>");
        prompt.text_of(&format!("{{arg-key-{n}}}"));
        prompt.control("</arg_key>");
        prompt.control("<arg_value>");
        prompt.text_of(&format!("{{arg-value-{n}}}"));
        prompt.control("</arg_value>");
    }
    prompt.text_of("...");
    prompt.control("</tool_call>");
    Ok(())
}

/// The inner `function` object of a tool if there is one, else the tool itself.
fn tool_function(tool: &Value) -> Result<&Value> {
    let function = tool.get("function").unwrap_or(tool);
    if function.as_object().is_none() {
        bail!("expected an object, found {}", function.kind());
    }
    Ok(function)
}

/// One line of JSON for a tool, without the members that are not for the model.
fn tool_line(function: &Value) -> String {
    let members = function.as_object().unwrap_or_default().iter();
    let kept = members.filter(|(key, _)| key != "defer_loading" && key != "strict");
    to_python(&Value::Object(kept.cloned().collect()))
}

/// Truth as the template language sees it, for a flag.
fn is_true(value: Option<&Value>) -> bool {
    !matches!(value, None | Some(Value::Null | Value::Bool(false) | Value::Int(0)))
}

fn render_message(
    prompt: &mut Prompt,
    message: &Value,
    settings: &Settings<'_>,
    is_past: bool,
) -> Result<()> {
    if message.as_object().is_none() {
        bail!("expected an object, found {}", message.kind());
    }
    match string(message, "role")? {
        "system" | "developer" => {
            prompt.control("<|system|>");
            prompt.text_of(&content_text(message)?);
        }
        "user" => {
            prompt.control("<|user|>");
            prompt.text_of(&content_text(message)?);
        }
        "assistant" => render_assistant(prompt, message, settings, is_past)?,
        "tool" => render_tool_results(prompt, message, settings)?,
        role => bail!(
            "role: expected system, developer, user, assistant or tool, found {}",
            json::to_compact(&Value::String(role.into()))
        ),
    }
    Ok(())
}

/// The text of a message: a string, or the texts of its parts in order.
fn content_text(message: &Value) -> Result<String> {
    match message.get("content") {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let part = |(i, part)| part_text(part).context(|| format!("content[{i}]"));
            parts.iter().enumerate().map(part).collect()
        }
        Some(other) => bail!("content: expected a string or an array, found {}", other.kind()),
    }
}

fn part_text(part: &Value) -> Result<String> {
    if let Some(text) = part.as_str() {
        return Ok(text.into());
    }
    if part.as_object().is_none() {
        bail!("expected an object, found {}", part.kind());
    }
    match string(part, "type")? {
        "text" => Ok(string(part, "text")?.into()),
        "image" | "image_url" | "video" | "video_url" | "input_audio" | "audio_url" => {
            Ok(MEDIA_REMINDER.into())
        }
        kind => bail!(
            "type: expected text or a media type, found {}",
            json::to_compact(&Value::String(kind.into()))
        ),
    }
}

fn render_assistant(
    prompt: &mut Prompt,
    message: &Value,
    settings: &Settings<'_>,
    is_past: bool,
) -> Result<()> {
    let mut content = content_text(message)?;
    let (mut reasoning, mut sent_back) = (None, false);
    match present(message, "reasoning_content") {
        Some(Value::String(text)) => (reasoning, sent_back) = (Some(text.clone()), true),
        Some(other) => bail!("reasoning_content: expected a string, found {}", other.kind()),
        None => {
            if let Some((before, _)) = content.split_once("</think>") {
                let start = before.rfind("<think>").map_or(0, |at| at + "<think>".len());
                reasoning = Some(before[start..].to_string());
                let end = content.rfind("</think>").map_or(0, |at| at + "</think>".len());
                content.drain(..end);
            }
        }
    }
    let keeps = !is_past || !settings.clear_thinking.unwrap_or(!sent_back);
    prompt.control("<|assistant|>");
    prompt.control("<think>");
    prompt.text_of(reasoning.filter(|_| keeps).as_deref().unwrap_or_default());
    prompt.control("</think>");
    prompt.text_of(strip(&content));
    let calls = present(message, "tool_calls").map_or(Ok(&[][..]), |v| array(v, "tool_calls"))?;
    for (i, call) in calls.iter().enumerate() {
        render_call(prompt, call).context(|| format!("tool_calls[{i}]"))?;
    }
    Ok(())
}

/// `str.strip()` of Python: white space and the separators U+001C…U+001F, which Rust leaves.
fn strip(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
}

/// One tool call: its name, then key and value of each argument.
fn render_call(prompt: &mut Prompt, call: &Value) -> Result<()> {
    let function = tool_function(call)?;
    prompt.control("<tool_call>");
    prompt.text_of(string(function, "name")?);
    for (key, value) in &arguments(function)? {
        prompt.control("<arg_key>");
        prompt.text_of(key);
        prompt.control("</arg_key>");
        prompt.control("<arg_value>");
        match value {
            Value::String(text) => prompt.text_of(text),
            other => prompt.text_of(&to_python(other)),
        }
        prompt.control("</arg_value>");
    }
    prompt.control("</tool_call>");
    Ok(())
}

/// The arguments of a call. OpenAI clients send them as a string of JSON.
fn arguments(function: &Value) -> Result<Vec<(String, Value)>> {
    let parsed = match present(function, "arguments") {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(Vec::new()),
        Some(Value::String(text)) => {
            json::parse(text.as_bytes(), Limits::default()).context(|| "arguments")?
        }
        Some(other) => other.clone(),
    };
    match parsed {
        Value::Object(members) => Ok(members),
        other => bail!("arguments: expected an object, found {}", other.kind()),
    }
}

/// The responses of one tool message: one per item that has an `output`, the lines of referenced
/// tools, or the content's text.
fn render_tool_results(
    prompt: &mut Prompt,
    message: &Value,
    settings: &Settings<'_>,
) -> Result<()> {
    let items = message.get("content").and_then(Value::as_array).unwrap_or_default();
    let first = items.first();
    if first.is_some_and(|item| item.get("output").is_some()) {
        for (i, item) in items.iter().enumerate() {
            let output = string(item, "output").context(|| format!("content[{i}]"))?;
            tool_response(prompt, output);
        }
        return Ok(());
    }
    let kind = first.and_then(|item| item.get("type")).and_then(Value::as_str);
    if kind == Some("tool_reference") {
        let mut text = String::from("<tools>\n");
        for (i, item) in items.iter().enumerate() {
            let line = referenced_tool(item, settings).context(|| format!("content[{i}]"))?;
            text += &(line + "\n");
        }
        tool_response(prompt, &(text + "</tools>"));
        return Ok(());
    }
    tool_response(prompt, &content_text(message)?);
    Ok(())
}

fn tool_response(prompt: &mut Prompt, text: &str) {
    prompt.control("<tool_response>");
    prompt.text_of(text);
    prompt.control("</tool_response>");
}

/// The line of the tool that a reference names.
fn referenced_tool(item: &Value, settings: &Settings<'_>) -> Result<String> {
    let name = string(item, "name")?;
    let named = |tool: &&Value| {
        tool_function(tool).is_ok_and(|f| f.get("name").and_then(Value::as_str) == Some(name))
    };
    match settings.tools.iter().find(named) {
        Some(tool) => Ok(tool_line(tool_function(tool)?)),
        None => bail!("name: no tool of the request is called {name:?}"),
    }
}
