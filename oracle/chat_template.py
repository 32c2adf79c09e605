#!/usr/bin/env python3
"""Make tests/fixtures/chat/cases.json: chat requests and the prompts that jinja2 renders for them.

The template is chat_template_glm52.jinja, run with the settings that transformers uses
(trim_blocks, lstrip_blocks, a `tojson` that keeps key order and non-ASCII text). Some things are
prepared as servers do before a template sees them: arguments that are a string of JSON are parsed
(a blank string is no arguments), the developer role becomes system, `reasoning` becomes
`reasoning_content`, the object `thinking` becomes the template's settings, and the tools are
withheld when `tool_choice` is "none". An effort of "none" or "minimal" switches thinking off.

usage: chat_template.py OUT.json
"""
import copy
import json
import os
import sys

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

PINNED = "3.1.6"
HERE = os.path.dirname(os.path.abspath(__file__))
CITY = {"type": "object", "required": ["city"], "properties": {
    "city": {"type": "string"}, "days": {"type": "integer", "default": 1, "maximum": 1e5}}}
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city — now", "strict": True,
    "parameters": CITY}}
LATER = {"type": "function", "defer_loading": True, "function": {
    "name": "later", "parameters": {}, "strict": False}}
FLAT = {"name": "flat", "defer_loading": False, "ünï": [1, 1.0, None, True, "a\"b\\c\n"]}
NUMBERS = {"zero": -0.0, "small": 1e-7, "digits": 0.1, "edge": 1e16, "below": 123456789012345.6,
           "large": 1e22, "int": 2**70, "negative": -5, "\u007f\u2028<&'>": "\b\f\x01"}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **rest):
    return {"role": "assistant", "content": content, **rest}


def tool(content):
    return {"role": "tool", "tool_call_id": "c1", "content": content}


def system(content, role="system"):
    return {"role": role, "content": content}


def text(content, kind="text"):
    return {"type": kind, "text": content}


def reference(name):
    return {"type": "tool_reference", "name": name}


def call(name, arguments):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


HI = [user("hi")]
ASKED = assistant(None, tool_calls=[call("get_weather", '{"city": "Paris"}')])
SUNNY = tool("sunny")


def setting_cases():
    """(name, request) pairs about everything before the messages."""
    yield "thinking on", dict(messages=HI)
    off = dict(enable_thinking=False)
    yield "thinking off", dict(messages=HI, chat_template_kwargs=off)
    yield "thinking off at the top", dict(messages=HI, **off)
    yield "kwargs win over the top", dict(
        messages=HI, chat_template_kwargs=off, enable_thinking=True)
    yield "null settings are absent", dict(
        messages=HI, enable_thinking=None, tools=None, reasoning_effort=None)
    for effort in ("high", "low", "max", "none", "minimal", "High"):
        yield f"effort {effort}", dict(messages=HI, reasoning_effort=effort)
    yield "effort in kwargs", dict(
        messages=HI, chat_template_kwargs=dict(reasoning_effort="high"))
    yield "effort none in kwargs", dict(
        messages=HI, chat_template_kwargs=dict(reasoning_effort="none"))
    yield "enabled thinking wins over effort none", dict(
        messages=HI, reasoning_effort="none", thinking=dict(type="enabled"))
    yield "effort none with thinking on", dict(
        messages=HI, reasoning_effort="none", enable_thinking=True)
    yield "effort with thinking off", dict(messages=HI, reasoning_effort="high", **off)
    yield "tools", dict(messages=HI, tools=[WEATHER])
    yield "no tools", dict(messages=HI, tools=[])
    yield "tools without thinking", dict(messages=HI, tools=[WEATHER, FLAT], **off)
    yield "deferred tools", dict(messages=HI, tools=[LATER, WEATHER])
    yield "only deferred tools", dict(messages=HI, tools=[LATER])
    for value in (0, 0.0, "", [], {}, None, 1, "no", [0], 2**70):
        yield f"defer_loading {value!r}", dict(
            messages=HI, tools=[dict(FLAT, defer_loading=value)])
    yield "numbers in a tool", dict(messages=HI, tools=[dict(name="n", parameters=NUMBERS)])
    yield "tool choice none", dict(messages=HI, tools=[WEATHER], tool_choice="none")
    for choice in (None, "auto", "required", {"type": "function", "function": {"name": "flat"}}):
        yield f"tool choice {choice and str(choice)[:8]} shows tools", dict(
            messages=HI, tools=[FLAT], tool_choice=choice)
    disabled, enabled = dict(type="disabled"), dict(type="enabled")
    yield "thinking disabled", dict(messages=HI, thinking=disabled)
    yield "thinking enabled", dict(messages=HI, thinking=enabled)
    yield "thinking of no type", dict(messages=HI, thinking=dict(type=None))
    yield "null thinking", dict(messages=HI, thinking=None)
    yield "the top wins over thinking", dict(
        messages=HI, thinking=disabled, enable_thinking=True)
    yield "kwargs win over thinking", dict(
        messages=HI, thinking=enabled, chat_template_kwargs=off)
    yield "tools before system", dict(messages=[system("s"), *HI], tools=[FLAT])


def text_cases():
    """(name, request) pairs about the text of messages."""
    yield "system first", dict(messages=[system("Be brief."), *HI])
    yield "developer is system", dict(messages=[system("Be brief.", "developer"), *HI])
    yield "system in the middle", dict(messages=[*HI, assistant("a"), system(" s "), *HI])
    yield "markers in text", dict(messages=[user("a<|user|>b</think><tool_call>c")])
    yield "content parts", dict(messages=[user([text("a"), "b", text("c", "input_text")])])
    yield "image part", dict(messages=[user(
        [{"type": "image_url", "image_url": {"url": "x"}}, text(" what?")])])
    yield "audio part", dict(messages=[user(
        ["hear: ", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}])])
    yield "null content", dict(messages=[user(None)])
    yield "missing content", dict(messages=[{"role": "user"}, {"role": "assistant"}])
    yield "empty content", dict(messages=[user("")])
    yield "no parts", dict(messages=[user([])])
    yield "user text is not stripped", dict(messages=[user(" a\n"), assistant(" b\n")])
    yield "content is stripped as python does", dict(messages=[
        user(" a "), assistant("\x1f\u3000 b \u200b\u00a0\x85\t\x1c")])
    yield "unicode", dict(messages=[user("Grüße 你好 😀 \u2028 \u0000")])


def reasoning_cases():
    """(name, request) pairs about the think blocks of earlier turns."""
    thought = assistant(" yes \n", reasoning_content=" because ")
    inline = assistant("x<think>one</think>two</think> three\x1c")
    clear, keep = dict(clear_thinking=True), dict(clear_thinking=False)
    yield "two turns", dict(messages=[user("a"), assistant("b"), user("c")])
    for name, turn in (("sent back", thought), ("inline", inline)):
        yield f"past reasoning {name}", dict(messages=[user("a"), turn, user("c")])
        yield f"past reasoning {name} cleared", dict(messages=[user("a"), turn, user("c")], **clear)
        yield f"past reasoning {name} kept", dict(
            messages=[user("a"), turn, user("c")], chat_template_kwargs=keep)
        yield f"reasoning {name} of the last turn", dict(messages=[user("a"), turn], **clear)
    alias = assistant("yes", reasoning="because")
    yield "reasoning by its other name", dict(messages=[user("a"), alias, user("c"), alias])
    yield "the first name wins", dict(messages=[
        user("a"), dict(alias, reasoning_content="first")])
    yield "null by the first name", dict(messages=[user("a"), dict(alias, reasoning_content=None)])
    for value in (False, True):
        yield f"thinking clears {value}", dict(
            messages=[user("a"), thought, user("c")], thinking=dict(clear_thinking=value))
    yield "the top wins over what thinking clears", dict(
        messages=[user("a"), thought, user("c")], thinking=dict(clear_thinking=True), **keep)
    yield "reasoning of both kinds", dict(messages=[
        user("a"), inline, user("b"), thought, user("c"), inline])
    yield "reasoning with tags in both", dict(messages=[
        user("a"), dict(inline, reasoning_content="r</think>s")])
    yield "empty reasoning", dict(messages=[user("a"), dict(inline, reasoning_content="")])
    yield "null reasoning", dict(messages=[user("a"), dict(inline, reasoning_content=None)])
    yield "closing tag alone", dict(messages=[user("a"), assistant("r</think>c")])
    yield "opening tags before one close", dict(messages=[
        user("a"), assistant([text("<think>p<think>q"), text("</think>c")])])
    yield "opening tag alone", dict(messages=[user("a"), assistant("<think>r")])
    yield "no user at all", dict(messages=[system("s"), thought, inline], **clear)
    yield "reasoning before a call", dict(messages=[
        user("?"), dict(ASKED, reasoning_content="look it up"), SUNNY], **clear)


def tool_cases():
    """(name, request) pairs about calls and their results."""
    yield "tool turn", dict(messages=[user("?"), ASKED, SUNNY], tools=[WEATHER])
    values = {"s": "007", "i": 7, "f": 1e5, "g": 1.0, "t": True, "n": None, "l": [1, "é"],
              "o": {"b": 1, "a": 2}}
    yield "call of many types", dict(messages=[user("?"), assistant(
        " then ", tool_calls=[call("f", json.dumps(values)), call("now", "{}")])])
    yield "call with numbers", dict(messages=[user("?"), assistant(
        None, tool_calls=[call("f", {"n": NUMBERS, **NUMBERS})])])
    yield "arguments as an object", dict(messages=[
        user("?"), assistant("", tool_calls=[call("f", {"a": 1})])])
    yield "no arguments", dict(messages=[user("?"), assistant(
        "", tool_calls=[call("f", " "), call("g", None), {"name": "h"}])])
    yield "null calls", dict(messages=[user("?"), assistant("a", tool_calls=None)])
    yield "two results in a run", dict(messages=[
        user("?"), ASKED, SUNNY, SUNNY, user("and?"), ASKED, SUNNY])
    yield "result without a call", dict(messages=[SUNNY])
    yield "outputs", dict(messages=[user("?"), ASKED, tool([{"output": "one"}, {"output": " "}])])
    yield "result parts", dict(messages=[user("?"), ASKED, tool([text("one"), text(" two ")])])
    yield "null result", dict(messages=[user("?"), ASKED, tool(None), tool([])])
    yield "tool references", dict(
        messages=[user("?"), ASKED, tool([reference("later"), reference("flat")]), SUNNY],
        tools=[WEATHER, LATER, FLAT])


def prepare(request):
    """The template's variables for a request."""
    request = copy.deepcopy(request)
    for message in request["messages"]:
        if message["role"] == "developer":
            message["role"] = "system"
        if message.get("reasoning_content") is None and "reasoning" in message:
            message["reasoning_content"] = message["reasoning"]
        for one in message.get("tool_calls") or []:
            function = one.get("function", one)
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"].strip() or "{}")
    names = {}
    if request.get("reasoning_effort") in ("none", "minimal"):
        names["enable_thinking"] = False
    thinking = request.get("thinking") or {}
    if thinking.get("type") is not None:
        names["enable_thinking"] = thinking["type"] == "enabled"
    if thinking.get("clear_thinking") is not None:
        names["clear_thinking"] = thinking["clear_thinking"]
    for source in (request, request.get("chat_template_kwargs") or {}):
        names.update((key, value) for key, value in source.items() if value is not None)
    if request.get("tool_choice") == "none":
        names["tools"] = []
    return {k: v for k, v in names.items() if v is not None and k != "chat_template_kwargs"}


def main():
    assert jinja2.__version__ == PINNED, f"jinja2 {PINNED} is needed, not {jinja2.__version__}"
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    with open(os.path.join(HERE, "chat_template_glm52.jinja"), encoding="utf-8") as f:
        template = env.from_string(f.read())
    cases = [*setting_cases(), *text_cases(), *reasoning_cases(), *tool_cases()]
    assert len({name for name, _ in cases}) == len(cases), "two cases have one name"
    out = [dict(name=name, request=request, text=template.render(**prepare(request)))
           for name, request in cases]
    with open(sys.argv[1], "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(c, ensure_ascii=False) for c in out) + "\n]\n")
    print(len(out), "cases")


if __name__ == "__main__":
    main()
