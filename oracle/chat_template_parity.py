#!/usr/bin/env python3
"""Compares `coli render` with the GLM renderers of the package `renderers`; exit 1 on a difference.

  chat_template_parity.py --coli target/release/coli --model DIR

DIR holds a tokenizer.json. The package has renderers that mirror the templates of GLM-5.1 and
GLM-5.3, not of 5.2. The requests of tests/fixtures/chat/cases.json are compared with GLM-5.3,
except those of `differs`, each with its reason; those without reasoning with GLM-5.1 too. So this
confirms what the three versions share; it cannot confirm what 5.2 alone does, such as how it
switches thinking off.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from renderers.configs import GLM51RendererConfig, GLM53RendererConfig
from renderers.glm5 import GLM51Renderer, GLM53Renderer

from chat_template import prepare

CASES = pathlib.Path(__file__).parent.parent / "tests" / "fixtures" / "chat" / "cases.json"


class Pieces:
    """A tokenizer whose ids stand for whole strings, so that ids join to the rendered text."""

    unk_token_id = -1

    def __init__(self):
        self.pieces = []

    def convert_tokens_to_ids(self, token):
        self.pieces.append(token)
        return len(self.pieces) - 1

    def encode(self, text, add_special_tokens=False):
        assert not add_special_tokens
        return [self.convert_tokens_to_ids(text)]

    def join(self, ids):
        return "".join(self.pieces[i] for i in ids)


def items(message):
    content = message.get("content")
    return [item for item in content if isinstance(item, dict)] if isinstance(content, list) else []


def differs(request):
    """Why GLM-5.3, or the package, does something else here; None if it should be equal."""
    turns = [m for m in request["messages"] if m["role"] == "assistant"]
    sent_back = {isinstance(m.get("reasoning_content"), str) for m in turns if has_reasoning(m)}
    if request.get("enable_thinking") is False:
        return "GLM-5.3 cannot switch thinking off"
    if request.get("reasoning_effort") == "low":
        return "GLM-5.3 has a third effort"
    if any(tool.get("function", tool).get("defer_loading") or tool.get("defer_loading")
           for tool in request.get("tools") or []):
        return "the package does not leave out deferred tools"
    if any(item.get("type") != "text" for m in request["messages"] for item in items(m)):
        return "the package knows text parts only"
    if any(not isinstance(m.get("reasoning_content"), str) and
           "</think>" in text(m) and
           (text(m).count("</think>") > 1 or text(m) != text(m).strip()) for m in turns):
        return "the package strips inline reasoning, and splits at the first closing tag only"
    if "clear_thinking" not in request and len(sent_back) == 2:
        return "which turns keep their reasoning is decided turn by turn"
    calls = [call.get("function", call) for m in turns for call in m.get("tool_calls") or []]
    if any(not str(f.get("arguments") or "").strip() for f in calls):
        return "the package refuses absent or blank arguments"
    return None


def text(message):
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else content
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in parts)


def has_reasoning(message):
    return isinstance(message.get("reasoning_content"), str) or "</think>" in text(message)


def glm_5_3(request):
    keeps = any(isinstance(m.get("reasoning_content"), str) for m in request["messages"])
    effort = "high" if request.get("reasoning_effort") == "high" else "max"
    config = GLM53RendererConfig(
        clear_thinking=request.get("clear_thinking", not keeps), reasoning_effort=effort)
    pieces = Pieces()
    renderer = GLM53Renderer(pieces, config)
    return pieces.join(renderer.render_ids(
        request["messages"], tools=request.get("tools"), add_generation_prompt=True))


def glm_5_1(request):
    """GLM-5.1's prompt with what 5.2 changed put right: the effort line, and the empty think block
    of every turn without reasoning, where 5.1 writes the closing tag alone."""
    pieces = Pieces()
    config = GLM51RendererConfig(clear_thinking=False)
    ids = GLM51Renderer(pieces, config).render_ids(
        request["messages"], tools=request.get("tools"), add_generation_prompt=True)
    effort = "High" if request.get("reasoning_effort") == "high" else "Max"
    prompt = pieces.join(ids).replace("<|assistant|></think>", "<|assistant|><think></think>")
    return prompt.replace("<sop>", f"<sop><|system|>Reasoning Effort: {effort}", 1)


def coli(args, request):
    done = subprocess.run([args.coli, "render", "--model", args.model, "--json"], check=True,
                          input=json.dumps(request).encode(), stdout=subprocess.PIPE)
    return json.loads(done.stdout)["text"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--coli", required=True)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    compared, different, skipped = {"GLM-5.3": 0, "GLM-5.1": 0}, 0, 0
    for case in json.loads(CASES.read_text(encoding="utf-8")):
        request = prepare(case["request"])
        reason = differs(request)
        if reason:
            skipped += 1
            print(f"not compared: {case['name']}: {reason}")
            continue
        got = coli(args, case["request"])
        wanted = [("GLM-5.3", glm_5_3(request))]
        # 5.1 strips reasoning and prints None for null content.
        contents = [m.get("content") for m in request["messages"]]
        if None not in contents and not any(map(has_reasoning, request["messages"])):
            wanted.append(("GLM-5.1", glm_5_1(request)))
        for family, want in wanted:
            compared[family] += 1
            if got != want:
                different += 1
                print(f"{case['name']}: {family}\n  got  {got!r}\n  want {want!r}")
    print(f"compared {compared}, {different} different, {skipped} cases not compared")
    assert compared["GLM-5.3"] >= 40 and compared["GLM-5.1"] >= 20, "too few cases are compared"
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
