#!/usr/bin/env python3
"""Talks to `coli serve` with openai-python as a program would; exit 1 if an answer is not right.

  clients.py --coli target/release/coli

Whole and streamed replies, reasoning, errors and their retries, a reply that is abandoned, and
the key, with the small model of oracle/demo; it understands no question, but what it is made to
write in a form must be valid, as pydantic and jsonschema see it. Tool calls of its own choice with a
model that is made for it here: its layers add nothing and its head knows which token follows which,
so it says one thing.
"""

import argparse
import contextlib
import json
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import typing
import urllib.request

import jsonschema
import openai
import pydantic

ROOT = pathlib.Path(__file__).parent.parent
DEMO = ROOT / "oracle" / "demo"
FIXTURE = ROOT / "tests" / "fixtures" / "a_seed"

SEA = [{"role": "user", "content": "What is the weather?"}]
PLAIN = {"temperature": 0, "max_tokens": 24, "extra_body": {"enable_thinking": False}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a code.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
    },
}


class Port(pydantic.BaseModel):
    name: typing.Literal["007", "Bath", 'Old "B"']
    depth: int = pydantic.Field(ge=-5, le=12)


class Voyage(pydantic.BaseModel):
    """A voyage, with most of what pydantic writes into schemas."""

    start: Port
    ends: list[Port] = pydantic.Field(min_length=1, max_length=2)
    ship: str = pydantic.Field(pattern="^[A-Z][a-z]{1,5}$")
    cargo: typing.Literal["tea", "salt", 3] | None
    load: float = pydantic.Field(ge=0, le=90)
    lost: bool


@contextlib.contextmanager
def served(coli, model, *flags):
    """A client of a server that ends with the block."""
    command = [coli, "serve", "--model", model, "--port", "0", "--ctx", "2048", "--usage", "off"]
    server = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
    try:
        banner = next(line for line in server.stderr if "http://" in line)
        url = re.search(r"http://\S+", banner)[0]
        yield openai.OpenAI(base_url=url, api_key="key")
    finally:
        server.terminate()
        server.wait()


def health(client):
    with urllib.request.urlopen(f"{client.base_url}health") as answer:
        return json.load(answer)["scheduler"]


def ids_of(coli, text):
    command = [coli, "tokenize", "--model", DEMO, "--special", "on", "--json"]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=True)
    return json.loads(done.stdout)["ids"]


def scripted(coli, directory, script):
    """A model in which each token of the script is followed by the next, and by nothing else."""
    ids = ids_of(coli, script)
    assert len(set(ids)) == len(ids), "a token is in the script twice"
    rows = 3072
    config = json.loads((FIXTURE / "config.json").read_text())
    config |= {"vocab_size": rows, "eos_token_id": 3036}
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(DEMO / "tokenizer.json", directory)
    data = (FIXTURE / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, payload, out = json.loads(data[8 : 8 + size]), data[8 + size :], bytearray()
    header.pop("__metadata__", None)
    width = config["hidden_size"]
    place = {token: i for i, token in enumerate(ids)}
    embed, head = [bytearray(4 * rows * width) for _ in range(2)]
    for row in range(rows):
        struct.pack_into("<f", embed, 4 * (row * width + place.get(row, width - 1)), 1)
    for before, after in [*zip(ids, ids[1:]), (None, 3036)]:
        struct.pack_into("<f", head, 4 * (after * width + place.get(before, width - 1)), 1)
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        content = payload[begin:end]
        if "o_proj" in name or "down_proj" in name:
            content = bytes(end - begin)
        if name == "model.norm.weight":
            content = struct.pack("<f", 1) * width
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            content, tensor["shape"] = (embed if "embed" in name else head), [rows, width]
        tensor["data_offsets"] = [len(out), len(out) + len(content)]
        out += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + out)


def check(name, holds):
    print(f"{'ok  ' if holds else 'FAIL'} {name}")
    check.failed |= not holds


check.failed = False


def speak(client):
    whole = client.chat.completions.create(model="demo", messages=SEA, **PLAIN)
    text = whole.choices[0].message.content
    check("whole reply", bool(text) and whole.choices[0].finish_reason == "length")
    check("usage", whole.usage.total_tokens == whole.usage.prompt_tokens + 24)
    stream = client.chat.completions.create(
        model="demo", messages=SEA, stream=True, stream_options={"include_usage": True}, **PLAIN
    )
    chunks = list(stream)
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    check("streamed reply is the whole one", said == text)
    check("usage of a stream", chunks[-1].usage.completion_tokens == 24)
    cached = chunks[-1].usage.prompt_tokens_details.cached_tokens
    check("the prompt is not computed twice", cached >= whole.usage.prompt_tokens - 2)
    # The helper raises when the limit ends a reply, so a stop string does.
    word = text.split()[3]
    request = {"model": "demo", "messages": SEA, "stop": [word], **PLAIN}
    with client.chat.completions.stream(**request) as helper:
        final = helper.get_final_completion().choices[0]
    check("the stream helper", final.message.content == text[: text.index(word)])
    check("a stop string", final.finish_reason == "stop")
    thinking = client.chat.completions.create(
        model="demo", messages=SEA, temperature=0, max_tokens=8
    )
    check("reasoning apart", bool(thinking.choices[0].message.model_extra["reasoning_content"]))
    raw = client.completions.create(model="demo", prompt="It was a fine", max_tokens=4, echo=True)
    check("completion", raw.choices[0].text.startswith("It was a fine"))
    check("models", [model.id for model in client.models.list()] == ["demo"])


def valid(schema, text):
    try:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    except (jsonschema.ValidationError, json.JSONDecodeError) as error:
        print(text, error)
        return False
    return True


def shape(client):
    drawn = PLAIN | {"temperature": 1.3, "max_tokens": 400}
    schema = Voyage.model_json_schema()
    for seed in range(8):
        request = {"model": "demo", "messages": SEA, "seed": seed, **drawn}
        parsed = client.chat.completions.parse(response_format=Voyage, **request)
        message = parsed.choices[0].message
        check(f"parsed {seed}", isinstance(message.parsed, Voyage))
        check(f"valid {seed}", valid(schema, message.content))
        tool = openai.pydantic_function_tool(Voyage, name="sail")
        forced = {"tools": [tool], "parallel_tool_calls": False, **request}
        for choice in ("required", {"type": "function", "function": {"name": "sail"}}):
            whole = client.chat.completions.parse(tool_choice=choice, **forced).choices[0]
            function = whole.message.tool_calls[0].function
            check(f"called {seed}", isinstance(function.parsed_arguments, Voyage))
            check(f"valid call {seed}", valid(schema, function.arguments))
            with client.chat.completions.stream(tool_choice=choice, **forced) as helper:
                final = helper.get_final_completion().choices[0]
            streamed = final.message.tool_calls[0].function
            check(f"streamed {seed}", streamed.arguments == function.arguments)
            check(f"finish {seed}", whole.finish_reason == final.finish_reason == "tool_calls")
    request = {"model": "demo", "messages": SEA, **PLAIN, "max_tokens": 400}
    thinking = request | {"extra_body": {"enable_thinking": True, "logit_bias": {"3058": 9}}}
    reply = client.chat.completions.parse(response_format=Voyage, **thinking).choices[0].message
    check("a form behind a thought", isinstance(reply.parsed, Voyage))
    anything = client.chat.completions.create(response_format={"type": "json_object"}, **request)
    text, cut = anything.choices[0].message.content, anything.choices[0].finish_reason == "length"
    check("any object", text.startswith("{") and (cut or isinstance(json.loads(text), dict)))
    bad = {"name": "n", "schema": {"properties": {"a": {"not": {}}}}}
    try:
        client.chat.completions.create(
            response_format={"type": "json_schema", "json_schema": bad}, **request
        )
        check("an unsupported keyword is refused", False)
    except openai.BadRequestError as error:
        check("an unsupported keyword is refused", "#/properties/a/not" in error.message)


def refuse(client):
    try:
        client.chat.completions.create(model="demo", messages=SEA, n=2)
        check("n=2 is refused", False)
    except openai.BadRequestError as error:
        check("n=2 is refused", (error.code, error.param) == ("unsupported_value", "n"))
    try:
        client.completions.create(model="demo", prompt="word " * 4000)
        check("a long prompt is refused", False)
    except openai.BadRequestError as error:
        check("a long prompt is refused", error.code == "context_length_exceeded")


def abandon(client):
    stream = client.chat.completions.create(
        model="demo", messages=SEA, stream=True, temperature=0, max_tokens=1900
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while health(client)["cancelled"] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    check("an abandoned reply is cancelled", health(client)["cancelled"] == 1)
    again = client.chat.completions.create(model="demo", messages=SEA, **PLAIN)
    check("the next request is served", bool(again.choices[0].message.content))


def call(client):
    request = {"model": "m", "messages": SEA, "tools": [TOOL], **PLAIN}
    whole = client.chat.completions.create(**request).choices[0]
    function = whole.message.tool_calls[0].function
    right = ("look_up", '{"code":"42"}')
    check("tool call", (function.name, function.arguments) == right)
    check("its finish", whole.finish_reason == "tool_calls" and whole.message.content == "Wait.")
    with client.chat.completions.stream(**request) as helper:
        final = helper.get_final_completion().choices[0]
    function = final.message.tool_calls[0].function
    check("streamed tool call", (function.name, function.arguments) == right)
    history = [
        *SEA,
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "sunny"},
    ]
    after = client.chat.completions.create(**(request | {"messages": history}))
    check("the call and its result as history", after.usage.prompt_tokens > 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--coli", default="target/release/coli")
    coli = parser.parse_args().coli
    with served(coli, DEMO) as client:
        speak(client)
        shape(client)
        refuse(client)
        abandon(client)
    with served(coli, DEMO, "--api-key", "another") as client:
        try:
            client.models.list()
            check("a wrong key is refused", False)
        except openai.AuthenticationError as error:
            check("a wrong key is refused", error.code == "invalid_api_key")
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        script = (
            "</think>Wait.<tool_call>look_up<arg_key>code</arg_key><arg_value>42</arg_value>"
            "</tool_call><|observation|>"
        )
        scripted(coli, directory, script)
        with served(coli, directory) as client:
            call(client)
    sys.exit(check.failed)


if __name__ == "__main__":
    main()
