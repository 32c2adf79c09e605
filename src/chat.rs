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
use crate::json::{self, Field, Limits, Value, to_python};
use crate::tokenizer::{Special, Tokenizer};
use std::collections::HashMap;

/// Most bytes of tool lines that all the references to tools in one request may repeat.
pub const REFERENCED_BYTES_MAX: usize = 16 << 20;

/// Whether a part of this type is no text: `image`, `image_url`, `input_image`, and so on.
pub fn is_media(kind: &str) -> bool {
    let kind = kind.strip_suffix("_url").or(kind.strip_prefix("input_")).unwrap_or(kind);
    ["image", "video", "audio"].contains(&kind)
}

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
    fn read(request: &Field<'a>) -> Result<Settings<'a>> {
        let (kwargs, thinking) = (request.get("chat_template_kwargs"), request.get("thinking"));
        kwargs.members()?;
        thinking.members()?;
        let setting = |name: &str| kwargs.get(name).or(request.get(name));
        let effort = setting("reasoning_effort").string()?;
        let effort_at_top = request.get("reasoning_effort").value().and_then(Value::as_str);
        let by_effort = !matches!(effort_at_top, Some("none" | "minimal"));
        let thinks = match thinking.get("type").string()? {
            None => None,
            Some("enabled") => Some(true),
            Some("disabled") => Some(false),
            Some(_) => return Err(thinking.get("type").refused("enabled or disabled")),
        };
        let clears = thinking.get("clear_thinking").boolean()?;
        Ok(Settings {
            enable_thinking: setting("enable_thinking").boolean()?.or(thinks).unwrap_or(by_effort),
            high_effort: effort == Some("high"),
            clear_thinking: setting("clear_thinking").boolean()?.or(clears),
            tools: request.get("tools").items()?.iter().map(Tool::read).collect::<Result<_>>()?,
            shows_tools: request.get("tool_choice").value().and_then(Value::as_str) != Some("none"),
        })
    }
}

impl<'a> Tool<'a> {
    /// The line holds the inner `function` if there is one, else the tool itself, without the
    /// members that are not for the model.
    fn read(tool: &Field<'a>) -> Result<Tool<'a>> {
        let function = function_of(tool)?;
        let members = function.members()?.unwrap_or_default().iter();
        let kept = members.filter(|(key, _)| key != "defer_loading" && key != "strict");
        Ok(Tool {
            name: function.get("name").value().and_then(Value::as_str),
            line: to_python(&Value::Object(kept.cloned().collect())) + "\n",
            is_deferred: [&function, tool].iter().any(|v| is_true(v.get("defer_loading").value())),
        })
    }
}

/// The inner `function` object of a tool or a call if there is one, else the whole.
fn function_of<'a>(field: &Field<'a>) -> Result<Field<'a>> {
    field.members()?;
    let function = field.get("function").or(field.clone());
    function.members()?;
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
    let request = Field::root(request);
    request.members().context(|| "the request")?;
    let settings = Settings::read(&request)?;
    let messages = request.get("messages").items()?;
    if messages.is_empty() {
        bail!("messages: expected at least one message, found none");
    }
    let has_role = |message: &Field<'_>, role| {
        message.get("role").value().and_then(Value::as_str) == Some(role)
    };
    let last_user = messages.iter().rposition(|message| has_role(message, "user"));
    let mut renderer = Renderer::new(&settings);
    renderer.prefix();
    let mut in_tool_run = false;
    for (i, message) in messages.iter().enumerate() {
        let is_tool = has_role(message, "tool");
        if is_tool && !in_tool_run {
            renderer.prompt.control("<|observation|>");
        }
        in_tool_run = is_tool;
        renderer.message(message, last_user.is_some_and(|last| i <= last))?;
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
    fn message(&mut self, message: &Field<'_>, is_past: bool) -> Result<()> {
        message.members()?;
        let role = message.get("role");
        let marker = match role.required_string()? {
            "system" | "developer" => "<|system|>",
            "user" => "<|user|>",
            "assistant" => return self.assistant(message, is_past),
            "tool" => return self.tool_results(&message.get("content")),
            _ => return Err(role.refused("system, developer, user, assistant or tool")),
        };
        self.prompt.control(marker);
        self.prompt.text_of(&content_text(&message.get("content"))?);
        Ok(())
    }

    fn assistant(&mut self, message: &Field<'_>, is_past: bool) -> Result<()> {
        let text = content_text(&message.get("content"))?;
        let mut content = text.as_str();
        let sent_back = message.get("reasoning_content").or(message.get("reasoning")).string()?;
        let mut reasoning = sent_back.unwrap_or_default();
        if sent_back.is_none()
            && let Some((before, _)) = text.split_once("</think>")
        {
            reasoning = before.rsplit("<think>").next().unwrap_or_default();
            content = text.rsplit("</think>").next().unwrap_or_default();
        }
        let keeps = !is_past || !self.settings.clear_thinking.unwrap_or(sent_back.is_none());
        self.prompt.control("<|assistant|>");
        self.prompt.control("<think>");
        self.prompt.text_of(if keeps { reasoning } else { "" });
        self.prompt.control("</think>");
        self.prompt.text_of(strip(content));
        message.get("tool_calls").items()?.iter().try_for_each(|call| self.call(call))
    }

    /// One tool call: its name, then key and value of each argument.
    fn call(&mut self, call: &Field<'_>) -> Result<()> {
        let function = function_of(call)?;
        self.prompt.control("<tool_call>");
        self.prompt.text_of(function.get("name").required_string()?);
        for (key, value) in &arguments(&function.get("arguments"))? {
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
    fn tool_results(&mut self, content: &Field<'_>) -> Result<()> {
        let is_list = content.value().is_some_and(|value| value.as_array().is_some());
        let items = if is_list { content.items()? } else { Vec::new() };
        let first = |key| items.first().and_then(|item| item.get(key).value());
        if first("output").is_some() {
            for item in &items {
                self.tool_response(item.get("output").required_string()?);
            }
        } else if first("type").and_then(Value::as_str) == Some("tool_reference") {
            let lines = items.iter().map(|item| self.referenced_line(&item.get("name")));
            let lines = lines.collect::<Result<String>>()?;
            self.tool_response(&format!("<tools>\n{lines}</tools>"));
        } else {
            self.tool_response(&content_text(content)?);
        }
        Ok(())
    }

    fn tool_response(&mut self, text: &str) {
        self.prompt.control("<tool_response>");
        self.prompt.text_of(text);
        self.prompt.control("</tool_response>");
    }

    /// The line of the tool that a reference names.
    fn referenced_line(&mut self, name: &Field<'_>) -> Result<&'a str> {
        let Some(line) = self.line_by_name.get(name.required_string()?).copied() else {
            return Err(name.refused("the name of a tool of the request"));
        };
        self.referenced_bytes = self.referenced_bytes.saturating_add(line.len());
        if self.referenced_bytes > REFERENCED_BYTES_MAX {
            let message =
                format!("references to tools repeat more than {REFERENCED_BYTES_MAX} bytes");
            return Err(name.error(message));
        }
        Ok(line)
    }
}

/// The text of a message: a string, or the texts of its parts in order.
fn content_text(content: &Field<'_>) -> Result<String> {
    match content.value() {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(_)) => content.items()?.iter().map(part_text).collect(),
        Some(_) => Err(content.unexpected("a string or an array")),
    }
}

fn part_text<'a>(part: &Field<'a>) -> Result<&'a str> {
    if let Some(Value::String(text)) = part.value() {
        return Ok(text);
    }
    part.members()?;
    let kind = part.get("type");
    match kind.required_string()? {
        "text" | "input_text" => part.get("text").required_string(),
        media if is_media(media) => Ok(MEDIA_REMINDER),
        _ => Err(kind.refused("text or a media type")),
    }
}

/// `str.strip()` of Python: white space and the separators U+001C…U+001F, which Rust leaves.
fn strip(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
}

/// The arguments of a call. OpenAI clients send them as a string of JSON; a blank one, as some
/// send for a call without arguments, is the empty object.
fn arguments(field: &Field<'_>) -> Result<Vec<(String, Value)>> {
    let Some(Value::String(text)) = field.value() else {
        return Ok(field.members()?.unwrap_or_default().to_vec());
    };
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    match json::parse(text.as_bytes(), Limits::default()).context(|| field.path())? {
        Value::Object(members) => Ok(members),
        other => Err(field.error(format!("expected an object, found {}", other.kind()))),
    }
}
