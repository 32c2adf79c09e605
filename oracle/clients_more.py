#!/usr/bin/env python3
"""Talks to `coli serve` as many programs do; exit 1 if an answer is not right.

  clients_more.py --coli target/release/coli [--node DIR] [--record DIR]

LangChain, litellm, `llm` and curl; with --node, openai-node and the AI SDK: DIR is a copy of
clients_node in which `npm install` was run. With --record, what they send goes to DIR, one file for
each request, its bytes as they came, but for the Host: tests/fixtures/clients has some of them.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import threading

# Else it asks for prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from langchain_openai import ChatOpenAI

from clients import DEMO, SEA, check, health, scripted, served

litellm.suppress_debug_info = True

PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "enum": ["42", "43"]}},
    "required": ["code"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks up a code.", "parameters": PARAMETERS},
}
NAMED = {"type": "function", "function": {"name": "look_up"}}
FORM = {
    "title": "sea",
    "description": "The state of the sea.",
    "type": "object",
    "properties": {"mood": {"enum": ["calm", "wild"]}, "deep": {"type": "boolean"}},
    "required": ["mood", "deep"],
    "additionalProperties": False,
}
OFF = {"enable_thinking": False}


class Recorder:
    """Stands between clients and a server, and keeps what the clients send."""

    def __init__(self, url, directory):
        self.host, port = re.match(r"http://([^:]+):(\d+)", url).groups()
        self.port, self.directory, self.client = int(port), directory, "client"
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client = self.listener.accept()[0]
            server = socket.create_connection((self.host, self.port))
            for task in [(self.requests, client, server), (self.answers, server, client)]:
                threading.Thread(target=task[0], args=task[1:], daemon=True).start()

    def requests(self, client, server):
        sent = b""
        while piece := receive(client):
            sent += piece
            server.sendall(piece)
            while request := first_request(sent):
                sent = sent[len(request) :]
                self.keep(request)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def answers(self, server, client):
        with contextlib.suppress(OSError):
            while piece := receive(server):
                client.sendall(piece)
            client.shutdown(socket.SHUT_RDWR)

    def keep(self, request):
        request = re.sub(rb"(?mi)^(host: ).*\r$", rb"\1localhost\r", request, count=1)
        number = len(list(self.directory.iterdir()))
        (self.directory / f"{number:03}-{self.client}.http").write_bytes(request)


def receive(connection):
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


def first_request(data):
    """The first whole request of what was sent, if there is one."""
    head, separator, rest = data.partition(b"\r\n\r\n")
    if not separator:
        return None
    chunked = re.search(rb"(?mi)^transfer-encoding: *chunked", head)
    length = re.search(rb"(?mi)^content-length: *(\d+)", head)
    if chunked:
        end = rest.find(b"0\r\n\r\n")
        size = end + 5 if end >= 0 else len(rest) + 1
    else:
        size = int(length[1]) if length else 0
    whole = len(head) + 4 + size
    return data[:whole] if len(data) >= whole else None


def holds(name, test):
    """A check that fails, too, when it raises."""
    try:
        check(name, bool(test()))
    except Exception as error:
        check(f"{name}: {type(error).__name__}: {str(error)[:200]}", False)


def langchain(demo, caller):
    def model(url, **more):
        return ChatOpenAI(
            base_url=f"{url}/v1", api_key="key", model="demo", temperature=0, extra_body=OFF, **more
        )

    plain = model(demo, max_tokens=24)
    whole = plain.invoke("What is the weather?")
    holds("LangChain: whole reply", lambda: whole.usage_metadata["output_tokens"] == 24)
    pieces = [chunk.content for chunk in plain.stream("What is the weather?")]
    holds("LangChain: streamed reply", lambda: "".join(pieces) == whole.content and len(pieces) > 3)
    tools = model(caller).bind_tools([TOOL])
    said = tools.invoke("Look up the code.")
    holds("LangChain: tool call", lambda: said.tool_calls[0]["args"] == {"code": "42"})
    turn = [("human", "Look up the code."), said]
    result = {"role": "tool", "tool_call_id": said.tool_calls[0]["id"], "content": "sunny"}
    holds("LangChain: its result", lambda: tools.invoke([*turn, result]).usage_metadata)

    def named():
        forced = model(demo, max_tokens=64).bind_tools([TOOL], tool_choice="look_up")
        return forced.invoke("Hello.").tool_calls[0]["args"]["code"] in ("42", "43")

    holds("LangChain: a named tool", named)
    for method in ("json_schema", "function_calling"):

        def structured():
            formed = model(demo, max_tokens=64).with_structured_output(FORM, method=method)
            answer = formed.invoke("How is the sea?")
            return answer["mood"] in ("calm", "wild") and isinstance(answer["deep"], bool)

        holds(f"LangChain: structured output by {method}", structured)


def lite(demo, caller):
    def ask(url=demo, **more):
        request = {"max_tokens": 24, "messages": SEA, "extra_body": OFF, "num_retries": 0} | more
        return litellm.completion(
            model="openai/demo", api_base=f"{url}/v1", api_key="key", temperature=0, **request
        )

    whole = ask()
    text = whole.choices[0].message.content
    holds("litellm: whole reply", lambda: text and whole.usage.completion_tokens == 24)
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    holds("litellm: streamed reply is the whole one", lambda: said == text)
    thoughts = ask(extra_body={}, max_tokens=4).choices[0].message
    holds("litellm: reasoning apart", lambda: thoughts.reasoning_content and not thoughts.content)
    call = ask(caller, tools=[TOOL]).choices[0]
    given = call.message.tool_calls[0].function.arguments
    holds("litellm: tool call", lambda: json.loads(given) == {"code": "42"})

    def named():
        answer = ask(tools=[TOOL], tool_choice=NAMED, max_tokens=64).choices[0].message
        return json.loads(answer.tool_calls[0].function.arguments)["code"] in ("42", "43")

    holds("litellm: a named tool", named)

    def structured(form):
        answer = ask(response_format=form, max_tokens=64).choices[0].message.content
        return set(json.loads(answer)) == {"mood", "deep"}

    schema = {"name": "sea", "schema": FORM, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    holds("litellm: structured output", lambda: structured(form))


def llm(_, caller):
    with tempfile.TemporaryDirectory() as name:
        known = (
            f"- model_id: caller\n  model_name: caller\n  api_base: {caller}/v1\n"
            "  supports_schema: true\n  supports_tools: true\n"
        )
        (pathlib.Path(name) / "extra-openai-models.yaml").write_text(known)

        def run(*words):
            program = pathlib.Path(sys.executable).parent / "llm"
            command = [program, *words, "--key", "key", "--no-log"]
            environment = os.environ | {"LLM_USER_PATH": name}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr.strip())
            return done.stdout.strip()

        for how in ([], ["--no-stream"]):
            holds(f"llm {how}: reply", lambda: run("-m", "caller", "Hi.", *how)[:5] == "Wait.")

        def structured():
            answer = run("-m", "caller", "How is it?", "--schema", json.dumps(FORM))
            return set(json.loads(answer)) == {"mood", "deep"}

        holds("llm: structured output", structured)


def curl(demo, _):
    body = {"messages": SEA, "max_tokens": 24, "temperature": 0} | OFF

    def run(body, *flags):
        command = ["curl", "-sS", f"{demo}/v1/chat/completions", "-d", "@-", *flags]
        done = subprocess.run(command, input=json.dumps(body).encode(), capture_output=True)
        return done.stdout.decode()

    whole = json.loads(run(body))["choices"][0]["message"]["content"]
    for flags in (["-H", "Transfer-Encoding: chunked"], ["--http1.0"], ["--http2"]):
        again = json.loads(run(body, *flags))["choices"][0]["message"]["content"]
        check(f"curl {flags[-1]}", again == whole)
    events = run(body | {"stream": True}, "-N").split("\n\n")
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events[:-2]]
    check("curl: stream", "".join(delta.get("content", "") for delta in deltas) == whole)
    check("curl: its end", events[-2:] == ["data: [DONE]", ""])
    large = body | {"messages": [{"role": "user", "content": "sea " * 300_000}]}
    answer = run(large, "--max-time", "20")
    check("curl: a megabyte", json.loads(answer)["error"]["code"] == "context_length_exceeded")


def node(directory):
    def run(demo, caller, server):
        command = ["node", directory / "clients.mjs", demo, caller, server]
        check("all of Node's", subprocess.run(command).returncode == 0)

    return run


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--coli", default="target/release/coli")
    parser.add_argument("--node", type=pathlib.Path, help="clients_node with its packages")
    parser.add_argument("--record", type=pathlib.Path, help="where requests go")
    options = parser.parse_args()
    script = (
        "<think></think>Wait.<tool_call>look_up<arg_key>code</arg_key><arg_value>42</arg_value>"
        "</tool_call><|observation|>"
    )
    with tempfile.TemporaryDirectory() as name:
        scripted(options.coli, pathlib.Path(name), script)
        with served(options.coli, DEMO) as demo, served(options.coli, name) as caller:
            servers = [str(client.base_url).removesuffix("/v1/") for client in (demo, caller)]
            urls, recorders = servers, []
            if options.record:
                options.record.mkdir(parents=True, exist_ok=True)
                recorders = [Recorder(url, options.record) for url in servers]
                urls = [recorder.url for recorder in recorders]
            for talk in (langchain, lite, llm, curl):
                for recorder in recorders:
                    recorder.client = talk.__name__
                talk(*urls)
            if options.node:
                for recorder in recorders:
                    recorder.client = "node"
                node(options.node)(*urls, servers[0])
            check("no fault of the engine", health(demo)["failed"] == 0)
    sys.exit(check.failed)


if __name__ == "__main__":
    main()
