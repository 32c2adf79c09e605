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
//! behind it, and cost a new prefill. A tool result that refers to tools repeats their lines, so a
//! small request could ask for a prompt without bound: [`REFERENCED_BYTES_MAX`] is the bound.
//!
//! Clients say one thing in several ways. A setting is taken from `chat_template_kwargs`, else
//! from the top of the request, else from `thinking`, the form of the model maker's own API.
//! A `reasoning_effort` of "none" or "minimal" at the top of the request, where OpenAI clients put
//! it, switches thinking off unless another setting speaks of it; in `chat_template_kwargs` it is
//! the template's own variable and means Max.
//! `reasoning` is read as `reasoning_content`, and `tool_choice: "none"` shows no tools.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::{Context, Result};
use crate::json::{self, Limits, Value, to_python};
use crate::tokenizer::{Special, Tokenizer};
use std::collections::HashMap;
use std::fmt::Arguments;

/// Most bytes of tool lines that all the references to tools in one request may repeat.
pub const REFERENCED_BYTES_MAX: usize = 16 << 20;

/// Types of parts that are no text.
pub const MEDIA_TYPES: [&str; 9] = [
    "image",
    "image_url",
    "input_image",
    "video",
    "video_url",
    "input_video",
    "audio",
    "audio_url",
    "input_audio",
];

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

    /// One argument of a tool call.
    fn argument(&mut self, key: &str, value: &str) {
        self.control("<arg_key>");
        self.text_of(key);
        self.control("</arg_key>");
        self.control("<arg_value>");
        self.text_of(value);
        self.control("</arg_value>");
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
    tools: Vec<Tool<'a>>,
    /// Whether the tools block is written. References to tools work either way.
    shows_tools: bool,
}

/// One tool of the request, ready to print.
struct Tool<'a> {
    name: Option<&'a str>,
    /// Its line of JSON, with the newline.
    line: String,
    /// Left out of the tools block; only a reference shows it.
    is_deferred: bool,
}

impl<'a> Settings<'a> {
    /// Null means absent everywhere.
    fn read(request: &'a Value) -> Result<Settings<'a>> {
        let kwargs = present(request, "chat_template_kwargs");
        let thinking = present(request, "thinking");
        for (value, name) in [(kwargs, "chat_template_kwargs"), (thinking, "thinking")] {
            value.map_or(Ok(()), |value| object(value, format_args!("{name}")))?;
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
        let effort_at_top = present(request, "reasoning_effort").and_then(Value::as_str);
        let by_effort = !matches!(effort_at_top, Some("none" | "minimal"));
        let (thinks, clears) = thinking.map_or(Ok((None, None)), read_thinking)?;
        let tools = array(request, format_args!("tools"), "tools")?.iter().enumerate();
        Ok(Settings {
            enable_thinking: boolean("enable_thinking")?.or(thinks).unwrap_or(by_effort),
            high_effort: effort == "high",
            clear_thinking: boolean("clear_thinking")?.or(clears),
            tools: tools.map(|(i, tool)| Tool::read(tool, i)).collect::<Result<_>>()?,
            shows_tools: request.get("tool_choice").and_then(Value::as_str) != Some("none"),
        })
    }
}

/// `enable_thinking` and `clear_thinking` of the object `thinking`.
fn read_thinking(thinking: &Value) -> Result<(Option<bool>, Option<bool>)> {
    let enable = match present(thinking, "type").map(|kind| (kind, kind.as_str())) {
        None => None,
        Some((_, Some("enabled"))) => Some(true),
        Some((_, Some("disabled"))) => Some(false),
        Some((_, Some(other))) => {
            bail!("thinking.type: expected enabled or disabled, found {}", quoted(other))
        }
        Some((other, None)) => bail!("thinking.type: expected a string, found {}", other.kind()),
    };
    let clear = match present(thinking, "clear_thinking") {
        None => None,
        Some(Value::Bool(clear)) => Some(*clear),
        Some(other) => {
            bail!("thinking.clear_thinking: expected true or false, found {}", other.kind())
        }
    };
    Ok((enable, clear))
}

impl<'a> Tool<'a> {
    /// The line holds the inner `function` if there is one, else the tool itself, without the
    /// members that are not for the model.
    fn read(tool: &'a Value, index: usize) -> Result<Tool<'a>> {
        let function = function_of(tool, format_args!("tools[{index}]"))?;
        let members = function.as_object().unwrap_or_default().iter();
        let kept = members.filter(|(key, _)| key != "defer_loading" && key != "strict");
        Ok(Tool {
            name: function.get("name").and_then(Value::as_str),
            line: to_python(&Value::Object(kept.cloned().collect())) + "\n",
            is_deferred: [function, tool].iter().any(|v| is_true(v.get("defer_loading"))),
        })
    }
}

/// The member `key`, unless it is null.
fn present<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    value.get(key).filter(|value| !value.is_null())
}

/// The elements of the member `key` of `value`, an array at `path`; none if absent or null.
fn array<'a>(value: &'a Value, path: Arguments<'_>, key: &str) -> Result<&'a [Value]> {
    match present(value, key) {
        None => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(other) => bail!("{path}: expected an array, found {}", other.kind()),
    }
}

/// Refuses anything but an object.
fn object(value: &Value, path: Arguments<'_>) -> Result<()> {
    match value {
        Value::Object(_) => Ok(()),
        other => bail!("{path}: expected an object, found {}", other.kind()),
    }
}

/// The string member `key` of the object at `path`, which cannot do without it.
fn string<'a>(value: &'a Value, path: Arguments<'_>, key: &str) -> Result<&'a str> {
    match value.get(key) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => bail!("{path}.{key}: expected a string, found {}", other.kind()),
        None => bail!("{path}.{key}: expected a string, but it is missing"),
    }
}

/// The inner `function` object of a tool or a call if there is one, else the whole.
fn function_of<'a>(value: &'a Value, path: Arguments<'_>) -> Result<&'a Value> {
    object(value, path)?;
    let Some(function) = value.get("function") else { return Ok(value) };
    object(function, format_args!("{path}.function"))?;
    Ok(function)
}

/// Truth as the template language sees it.
fn is_true(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null) => false,
        Some(Value::Bool(bool)) => *bool,
        Some(Value::Int(int)) => *int != 0,
        Some(Value::Float(float)) => *float != 0.0,
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(items)) => !items.is_empty(),
        Some(Value::Object(members)) => !members.is_empty(),
        Some(Value::BigInt(_)) => true,
    }
}

/// Renders an OpenAI chat request. Errors name the field, as in `messages[2].content[0].type`.
pub fn render(request: &Value) -> Result<Prompt> {
    object(request, format_args!("the request"))?;
    let settings = Settings::read(request)?;
    let messages = array(request, format_args!("messages"), "messages")?;
    if messages.is_empty() {
        bail!("messages: expected at least one message, found none");
    }
    let role = |message: &Value, name| message.get("role").and_then(Value::as_str) == Some(name);
    let last_user = messages.iter().rposition(|message| role(message, "user"));
    let mut renderer = Renderer::new(&settings);
    renderer.prefix();
    let mut in_tool_run = false;
    for (i, message) in messages.iter().enumerate() {
        let is_tool = role(message, "tool");
        if is_tool && !in_tool_run {
            renderer.prompt.control("<|observation|>");
        }
        in_tool_run = is_tool;
        let is_past = last_user.is_some_and(|last| i <= last);
        renderer.message(message, format_args!("messages[{i}]"), is_past)?;
    }
    let mut prompt = renderer.prompt;
    prompt.control("<|assistant|>");
    prompt.control("<think>");
    if !settings.enable_thinking {
        prompt.control("</think>");
    }
    Ok(prompt)
}

/// Writes a prompt from its start.
struct Renderer<'a> {
    settings: &'a Settings<'a>,
    /// The lines that references may show. Of tools with one name, the first.
    line_by_name: HashMap<&'a str, &'a str>,
    /// Bytes of them that references have repeated so far.
    referenced_bytes: usize,
    prompt: Prompt,
}

impl<'a> Renderer<'a> {
    fn new(settings: &'a Settings<'a>) -> Renderer<'a> {
        let named = settings.tools.iter().rev();
        let named = named.filter_map(|tool| Some((tool.name?, tool.line.as_str())));
        let prompt = Prompt { thinking: settings.enable_thinking, ..Prompt::default() };
        Renderer { settings, line_by_name: named.collect(), referenced_bytes: 0, prompt }
    }

    /// Everything before the first message.
    fn prefix(&mut self) {
        self.prompt.control("[gMASK]");
        self.prompt.control("<sop>");
        if self.settings.enable_thinking {
            self.prompt.control("<|system|>");
            let effort = if self.settings.high_effort { "High" } else { "Max" };
            self.prompt.text_of(&format!("Reasoning Effort: {effort}"));
        }
        if self.settings.shows_tools && !self.settings.tools.is_empty() {
            self.tools_block();
        }
    }

    /// The system turn that lists the tools. Its sample call consists of real markers, as the
    /// template's own text does.
    fn tools_block(&mut self) {
        let prompt = &mut self.prompt;
        prompt.control("<|system|>");
        prompt.text_of(TOOLS_HEAD);
        for tool in self.settings.tools.iter().filter(|tool| !tool.is_deferred) {
            prompt.text_of(&tool.line);
        }
        prompt.text_of(TOOLS_TAIL);
        prompt.control("<tool_call>");
        prompt.text_of("{function-name}");
        for n in 1..=2 {
            prompt.argument(&format!("{{arg-key-{n}}}"), &format!("{{arg-value-{n}}}"));
        }
        prompt.text_of("...");
        prompt.control("</tool_call>");
    }

    /// One message; `is_past` unless it is after the last user message.
    fn message(&mut self, message: &Value, path: Arguments<'_>, is_past: bool) -> Result<()> {
        object(message, path)?;
        match string(message, path, "role")? {
            "system" | "developer" => {
                self.prompt.control("<|system|>");
                self.prompt.text_of(&content_text(message, path)?);
            }
            "user" => {
                self.prompt.control("<|user|>");
                self.prompt.text_of(&content_text(message, path)?);
            }
            "assistant" => self.assistant(message, path, is_past)?,
            "tool" => self.tool_results(message, path)?,
            role => bail!(
                "{path}.role: expected system, developer, user, assistant or tool, found {}",
                quoted(role)
            ),
        }
        Ok(())
    }

    fn assistant(&mut self, message: &Value, path: Arguments<'_>, is_past: bool) -> Result<()> {
        let text = content_text(message, path)?;
        let (mut content, mut reasoning, mut sent_back) = (text.as_str(), "", false);
        let names = ["reasoning_content", "reasoning"];
        match names.iter().find_map(|name| Some((name, present(message, name)?))) {
            Some((_, Value::String(text))) => (reasoning, sent_back) = (text, true),
            Some((name, other)) => {
                bail!("{path}.{name}: expected a string, found {}", other.kind())
            }
            None => {
                if let Some((before, _)) = text.split_once("</think>") {
                    reasoning = before.rsplit("<think>").next().unwrap_or_default();
                    content = text.rsplit("</think>").next().unwrap_or_default();
                }
            }
        }
        let keeps = !is_past || !self.settings.clear_thinking.unwrap_or(!sent_back);
        self.prompt.control("<|assistant|>");
        self.prompt.control("<think>");
        self.prompt.text_of(if keeps { reasoning } else { "" });
        self.prompt.control("</think>");
        self.prompt.text_of(strip(content));
        let calls = array(message, format_args!("{path}.tool_calls"), "tool_calls")?;
        for (i, call) in calls.iter().enumerate() {
            self.call(call, format_args!("{path}.tool_calls[{i}]"))?;
        }
        Ok(())
    }

    /// One tool call: its name, then key and value of each argument.
    fn call(&mut self, call: &Value, path: Arguments<'_>) -> Result<()> {
        let function = function_of(call, path)?;
        let inner = if call.get("function").is_some() { ".function" } else { "" };
        let path = format_args!("{path}{inner}");
        self.prompt.control("<tool_call>");
        self.prompt.text_of(string(function, path, "name")?);
        for (key, value) in &arguments(function, path)? {
            match value {
                Value::String(text) => self.prompt.argument(key, text),
                other => self.prompt.argument(key, &to_python(other)),
            }
        }
        self.prompt.control("</tool_call>");
        Ok(())
    }

    /// The responses of one tool message: one per item that has an `output`, the lines of
    /// referenced tools, or the content's text.
    fn tool_results(&mut self, message: &Value, path: Arguments<'_>) -> Result<()> {
        let items = message.get("content").and_then(Value::as_array).unwrap_or_default();
        let first = items.first();
        if first.is_some_and(|item| item.get("output").is_some()) {
            for (i, item) in items.iter().enumerate() {
                let output = string(item, format_args!("{path}.content[{i}]"), "output")?;
                self.tool_response(output);
            }
            return Ok(());
        }
        let kind = first.and_then(|item| item.get("type")).and_then(Value::as_str);
        if kind == Some("tool_reference") {
            let mut text = String::from("<tools>\n");
            for (i, item) in items.iter().enumerate() {
                text += self.referenced_line(item, format_args!("{path}.content[{i}]"))?;
            }
            self.tool_response(&(text + "</tools>"));
            return Ok(());
        }
        self.tool_response(&content_text(message, path)?);
        Ok(())
    }

    fn tool_response(&mut self, text: &str) {
        self.prompt.control("<tool_response>");
        self.prompt.text_of(text);
        self.prompt.control("</tool_response>");
    }

    /// The line of the tool that a reference names.
    fn referenced_line(&mut self, item: &Value, path: Arguments<'_>) -> Result<&'a str> {
        let name = string(item, path, "name")?;
        let Some(line) = self.line_by_name.get(name).copied() else {
            bail!("{path}.name: no tool of the request is called {}", quoted(name));
        };
        self.referenced_bytes = self.referenced_bytes.saturating_add(line.len());
        if self.referenced_bytes > REFERENCED_BYTES_MAX {
            bail!("{path}: references to tools repeat more than {REFERENCED_BYTES_MAX} bytes");
        }
        Ok(line)
    }
}

/// A string of the request, for an error text.
fn quoted(text: &str) -> String {
    json::to_compact(&Value::String(text.into()))
}

/// The text of a message: a string, or the texts of its parts in order.
fn content_text(message: &Value, path: Arguments<'_>) -> Result<String> {
    match message.get("content") {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let part = |(i, part)| part_text(part, format_args!("{path}.content[{i}]"));
            parts.iter().enumerate().map(part).collect()
        }
        Some(other) => {
            bail!("{path}.content: expected a string or an array, found {}", other.kind())
        }
    }
}

fn part_text<'a>(part: &'a Value, path: Arguments<'_>) -> Result<&'a str> {
    if let Some(text) = part.as_str() {
        return Ok(text);
    }
    object(part, path)?;
    match string(part, path, "type")? {
        "text" | "input_text" => string(part, path, "text"),
        kind if MEDIA_TYPES.contains(&kind) => Ok(MEDIA_REMINDER),
        kind => bail!("{path}.type: expected text or a media type, found {}", quoted(kind)),
    }
}

/// `str.strip()` of Python: white space and the separators U+001C…U+001F, which Rust leaves.
fn strip(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
}

/// The arguments of a call. OpenAI clients send them as a string of JSON; a blank one, as some
/// send for a call without arguments, is the empty object.
fn arguments(function: &Value, path: Arguments<'_>) -> Result<Vec<(String, Value)>> {
    let parsed = match present(function, "arguments") {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(Vec::new()),
        Some(Value::String(text)) => json::parse(text.as_bytes(), Limits::default())
            .context(|| format!("{path}.arguments"))?,
        Some(other) => other.clone(),
    };
    match parsed {
        Value::Object(members) => Ok(members),
        other => bail!("{path}.arguments: expected an object, found {}", other.kind()),
    }
}
