#!/usr/bin/env python3
"""Make tests/fixtures/chat/cases.json: chat requests and the prompts that jinja2 renders for them.

The template is chat_template_glm52.jinja, run with the settings that transformers uses (trim_blocks, lstrip_blocks, a
`tojson` that keeps key order and non-ASCII text). Two things are prepared as servers do before a template sees them:
arguments that are a string of JSON are parsed, and the developer role becomes system.

usage: chat_template.py OUT.json
"""
import copy
import json
import os
import sys

from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = os.path.dirname(os.path.abspath(__file__))
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city — now",
           "strict": True, "parameters": {"type": "object", "properties": {"city": {"type": "string"},
           "days": {"type": "integer", "default": 1, "maximum": 1e5}}, "required": ["city"]}}}
LATER = {"type": "function", "defer_loading": True, "function": {"name": "later", "parameters": {}}}
FLAT = {"name": "flat", "defer_loading": False, "ünï": [1, 1.0, None, True, "a\"b\\c\n"]}


def user(text):
    return {"role": "user", "content": text}


def call(name, arguments):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def cases():
    """(name, request) pairs."""
    hi = [user("hi")]
    thought = {"role": "assistant", "content": " yes \n", "reasoning_content": " because "}
    inline = {"role": "assistant", "content": "x<think>one</think>two</think> three\x1c"}
    asked = {"role": "assistant", "content": None, "tool_calls": [call("get_weather", '{"city": "Paris"}')]}
    sunny = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    yield "thinking on", dict(messages=hi)
    yield "thinking off", dict(messages=hi, chat_template_kwargs=dict(enable_thinking=False))
    yield "thinking off at the top", dict(messages=hi, enable_thinking=False)
    yield "null settings are absent", dict(messages=hi, enable_thinking=None, tools=None, reasoning_effort=None)
    for effort in ("high", "low", "max", "none"):
        yield f"effort {effort}", dict(messages=hi, reasoning_effort=effort)
    yield "effort in kwargs", dict(messages=hi, chat_template_kwargs=dict(reasoning_effort="high"))
    yield "system first", dict(messages=[{"role": "system", "content": "Be brief."}, user("hi")])
    yield "developer is system", dict(messages=[{"role": "developer", "content": "Be brief."}, user("hi")])
    yield "markers in text", dict(messages=[user("a<|user|>b</think><tool_call>c")])
    yield "content parts", dict(messages=[user([{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}])])
    yield "image part", dict(messages=[user([{"type": "image_url", "image_url": {"url": "x"}},
                                             {"type": "text", "text": " what?"}])])
    yield "null content", dict(messages=[{"role": "user", "content": None}])
    yield "empty content", dict(messages=[user("")])
    yield "two turns", dict(messages=[user("a"), {"role": "assistant", "content": "b"}, user("c")])
    yield "past reasoning cleared", dict(messages=[user("a"), thought, user("c")], clear_thinking=True)
    yield "past reasoning kept", dict(messages=[user("a"), thought, user("c")], clear_thinking=False)
    yield "past inline reasoning cleared", dict(messages=[user("a"), inline, user("c")])
    yield "past inline reasoning kept", dict(messages=[user("a"), inline, user("c")],
                                             chat_template_kwargs=dict(clear_thinking=False))
    yield "last turn keeps its reasoning", dict(messages=[user("a"), thought], clear_thinking=True)
    yield "last turn keeps inline reasoning", dict(messages=[user("a"), inline])
    yield "closing tag alone", dict(messages=[user("a"), {"role": "assistant", "content": "r</think>c"}])
    yield "content is stripped as python does", dict(messages=[
        user(" a "), {"role": "assistant", "content": "\x1f\u3000 b \u00a0\t"}])
    yield "tools", dict(messages=hi, tools=[WEATHER])
    yield "tools without thinking", dict(messages=hi, tools=[WEATHER, FLAT], enable_thinking=False)
    yield "deferred tools", dict(messages=hi, tools=[LATER, WEATHER])
    yield "tools before system", dict(messages=[{"role": "system", "content": "s"}, user("u")], tools=[FLAT])
    yield "tool turn", dict(messages=[user("?"), asked, sunny], tools=[WEATHER])
    yield "call of many types", dict(messages=[user("?"), {"role": "assistant", "content": " then ", "tool_calls": [
        call("f", json.dumps({"s": "007", "i": 7, "f": 1e5, "g": 1.0, "t": True, "n": None, "l": [1, "é"],
                              "o": {"b": 1, "a": 2}})), call("now", "{}")]}])
    yield "arguments as an object", dict(messages=[user("?"), {"role": "assistant", "content": "",
                                                               "tool_calls": [call("f", {"a": 1})]}])
    yield "two results in a run", dict(messages=[user("?"), asked, sunny, sunny, user("and?"), asked, sunny])
    yield "outputs", dict(messages=[user("?"), asked, {"role": "tool", "content": [
        {"output": "one"}, {"output": "two"}]}])
    yield "result parts", dict(messages=[user("?"), asked, {"role": "tool", "content": [
        {"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}])
    yield "reasoning before a call", dict(messages=[user("?"), {**asked, "reasoning_content": "look it up"}, sunny])
    yield "unicode", dict(messages=[user("Grüße 你好 😀 \u2028 \u0000")])


def prepare(request):
    """The template's variables for a request."""
    request = copy.deepcopy(request)
    for message in request["messages"]:
        if message["role"] == "developer":
            message["role"] = "system"
        for c in message.get("tool_calls") or []:
            if isinstance(c["function"]["arguments"], str):
                c["function"]["arguments"] = json.loads(c["function"]["arguments"])
    names = dict(request, **request.get("chat_template_kwargs", {}))
    return {k: v for k, v in names.items() if v is not None and k != "chat_template_kwargs"}


def main():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    with open(os.path.join(HERE, "chat_template_glm52.jinja"), encoding="utf-8") as f:
        template = env.from_string(f.read())
    out = [dict(name=name, request=request, text=template.render(**prepare(request))) for name, request in cases()]
    with open(sys.argv[1], "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(c, ensure_ascii=False) for c in out) + "\n]\n")
    print(len(out), "cases")


if __name__ == "__main__":
    main()
