#!/usr/bin/env python3
"""Drives `coli chat` through a real pseudo-terminal and checks what a person would see.

What pipes cannot show: prompts, pastes, styles, progress, and Ctrl-C in the middle of a prompt, in
the middle of a reply and at the prompt. Replies at temperature 0 must be those of `coli run` on the
same tokens. Needs nothing beyond Python.

    cargo build --release --offline
    python3 oracle/chat_pty.py target/release/coli
"""

import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import termios
import time

MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo")
ENV = {**os.environ, "COLI_USAGE": "off", "TERM": "xterm", "NO_COLOR": ""}
PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
PROMPT = PASTE_ON + "> "
SECONDS_MAX = 120
IUTF8 = 0o40000


def coli(*words, stdin=""):
    done = subprocess.run([COLI, *words], input=stdin, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rendered(*messages, think=False):
    """Token ids of a request."""
    messages = [{"role": role, "content": text} for role, text in messages]
    request = json.dumps({"messages": messages, "enable_thinking": think})
    return coli("render", "--model", MODEL, "--json", stdin=request)["ids"]


def behind(ids, text):
    """Token ids of a conversation to which `text` is added."""
    # A request with thinking off starts with [gMASK]<sop>.
    return ids + rendered(("user", text))[2:]


def reply_to(ids, count):
    """Token ids and text of what `coli run` says."""
    words = ["--ids", ",".join(map(str, ids)), "-n", str(count), "--temp", "0", "--json"]
    done = coli("run", "--model", MODEL, *words)
    return done["ids"], done["text"]


def plain(text):
    """What stays on the screen: without progress, styles and the terminal's own line ends."""
    text = re.sub(r"\r\x1b\[K[a-z]+ \d+ % \([^)]*\), \d+ s left", "", text).replace("\r\x1b[K", "")
    return re.sub(r"\x1b\[\d*m", "", text).replace("\r\n", "\n")


class Chat:
    """A `coli chat` on a terminal of its own."""

    def __init__(self, *words, **env):
        words = [COLI, "chat", "--model", MODEL, "--temp", "0", *words]
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.execve(COLI, words, {**ENV, **env})
        # As terminals that show UTF-8 set it: the erase key takes whole characters.
        modes = termios.tcgetattr(self.terminal)
        modes[0] |= IUTF8
        termios.tcsetattr(self.terminal, termios.TCSANOW, modes)
        self.greeting = plain(self.until(PROMPT))

    def until(self, mark):
        """Everything up to and with `mark`."""
        text, end = b"", time.monotonic() + SECONDS_MAX
        while mark.encode() not in text:
            ready, _, _ = select.select([self.terminal], [], [], end - time.monotonic())
            assert ready, f"{mark!r} did not come, but {text!r}"
            text += os.read(self.terminal, 1 << 16)
        self.raw = text.decode()
        return self.raw

    def type(self, text):
        data = text.encode()
        while data:
            data = data[os.write(self.terminal, data[:1024]):]

    def line(self, text):
        """Sends a line; what is on the screen behind it, up to the next prompt."""
        self.type(text + "\n")
        shown = self.until(PROMPT)
        assert PASTE_OFF in shown, "the paste mode is still on behind a line"
        return plain(shown[shown.index(PASTE_OFF) + len(PASTE_OFF):].removesuffix(PROMPT))

    def reply(self, text):
        """Sends a line; the reply without the notes behind it, and the notes."""
        shown = self.line(text)
        parts = re.fullmatch(r"(?s)(.*?)\n((?:\[[^\n]*\]\n)+)", shown)
        assert parts, f"not a reply with its notes: {shown!r}"
        return parts.groups()

    def end(self, keys):
        """Sends keys that end the program; its exit code."""
        self.type(keys)
        try:
            while os.read(self.terminal, 1 << 16):
                pass
        except OSError:
            pass
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def check_turns():
    """Messages, /more, /undo, /save, /load, /reset, aliases and mistakes."""
    first, second = "What is the weather?", "And the land?"
    ids = rendered(("system", "Be brief."), ("user", first))
    reply, text = reply_to(ids, 4)
    more, more_text = reply_to(ids + reply, 4)
    next_ids = behind(ids + reply + more, second)
    _, next_text = reply_to(next_ids, 4)
    with tempfile.TemporaryDirectory() as directory:
        file = os.path.join(directory, "saved")
        chat = Chat("--system", "Be brief.", "-n", "4", "--ctx", "512")
        assert "context 512 tokens, thinking off; /help" in chat.greeting, chat.greeting
        shown, notes = chat.reply(first)
        assert shown == text and "cut at 4 tokens" in notes, (shown, notes)
        for figure in [r"4 tokens, [\d.]+ tok/s", rf"prompt {len(ids)} tokens in",
                       r"experts \d+ % from memory, [\d.]+ \w+ read", r"drafts \d+ of \d+",
                       rf"memory [\d.]+ \w+ at most · context {len(ids) + 4} of 512\]"]:
            assert re.search(figure, notes), (figure, notes)
        assert chat.reply("/more")[0] == more_text
        assert f"has {len(ids) + 8} tokens" in chat.line(f"/save {file}")
        assert chat.reply(second)[0] == next_text
        assert f"{len(ids) + 8} tokens remain" in chat.line("/undo")
        assert chat.reply(second)[0] == next_text
        assert "0 tokens remain" in chat.line("/undo") + chat.line("/undo")
        assert "nothing was said that could be dropped" in chat.line("/undo")
        assert "nothing was said that could go on" in chat.line(":more")
        assert f"resumes {len(ids) + 8} tokens saved" in chat.line(f"/load {file}")
        shown, notes = chat.reply(second)
        # The last token of the reply and the new turn; all else came out of the file.
        read = int(re.search(r"prompt (\d+) tokens", notes)[1])
        assert shown == next_text and read <= len(next_ids) - len(ids) - 8 + 1, (shown, notes)
        assert "a new conversation" in chat.line(":reset")
        assert chat.reply(first)[0] == text
        assert "did you mean /more?" in chat.line("/mor") and "// starts" in chat.line("/etc")
        assert "/save needs a FILE" in chat.line("/save")
        assert "no saved conversation" in chat.line("/load /nowhere/at-all")
        assert "saved one" in chat.line("/help") and "tok/s" in chat.line("/stats")
        assert chat.end(":q\n") == 0

        chat = Chat("-n", "4", "--session", file)
        assert re.search(r"resumes \d+ tokens saved \d+ \w+ ago", chat.greeting), chat.greeting
        assert "deleting the file" in chat.greeting
        assert chat.reply(second)[0] == next_text
        assert chat.end("\x04") == 0
        chat = Chat("-n", "4", "--session", file)
        assert f"resumes {len(next_ids) + 4} tokens" in chat.greeting, chat.greeting
        assert chat.end("/quit\n") == 0


def check_lines():
    """Pastes, blocks, lines that go on, and messages that look like commands."""
    chat = Chat("-n", "8")
    for typed, message in [
        ("Say \x1b[200~one\n/two\n\nthree\\\x1b[201~ now", "Say one\n/two\n\nthree\\ now"),
        ('"""\none\n  two\n"""', "one\n  two"),
        ("one\\\ntwo", "one\ntwo"),
        ("//etc/fstab?", "/etc/fstab?"),
        ("Grüße\x7f\x7fsse", "Grüsse"),
    ]:
        _, text = reply_to(rendered(("user", message)), 8)
        shown = chat.reply(typed)[0]
        assert shown == text, (typed, shown, text)
        chat.line("/reset")
    # Ctrl-C takes back what has several lines, and the program goes on.
    chat.type("one\\\n")
    chat.until("… ")
    chat.type("\x03")
    chat.until(PROMPT)
    assert chat.end("\x03") == 130


def check_interrupts():
    """Ctrl-C in a prompt and in a reply: what was done stays, and goes on."""
    text = "\n".join(f"{n}. " + "It was a fine morning in May. " * 3 for n in range(60))
    ids = rendered(("user", text))
    _, reply = reply_to(ids, 8)
    chat = Chat("-n", "8", "--chunk", "4", "--threads", "1")
    chat.type(f"\x1b[200~{text}\x1b[201~\n")
    shown = chat.until("running 3")
    assert re.search(rf"running \d+ % \({len(ids)} tokens\), \d+ s left", shown), shown
    chat.type("\x03")
    stopped = plain(chat.until(PROMPT))
    assert "stopped: /more goes on" in stopped, stopped
    before = int(re.search(r"\[0 tokens.*prompt (\d+) tokens", stopped)[1])
    shown, notes = chat.reply("/more")
    behind_it = int(re.search(r"prompt (\d+) tokens", notes)[1])
    assert shown == reply, (shown, reply)
    # What was read before is not read again, but for the last row where there is a draft head.
    assert before > 0 and before + behind_it - len(ids) in (0, 1), (before, behind_it, len(ids))
    assert chat.end("\x04") == 0

    # A text of which the model makes no end.
    text = "Describe the sea and the whale."
    ids = rendered(("user", text))
    long = reply_to(ids, 3000)[1]
    with tempfile.TemporaryDirectory() as directory:
        file = os.path.join(directory, "saved")
        chat = Chat("-n", "3000", "--threads", "1", "--session", file)
        chat.type(f"{text}\n")
        shown = plain(chat.until("the whale, the whale")).split(PASTE_OFF)[1]
        assert long.startswith(shown) and len(shown) < len(long), shown
        chat.type("\x03")
        # The terminal drops output that it has not shown yet, so what is on the screen has a gap.
        notes = plain(chat.until(PROMPT))
        assert "stopped: /more goes on" in notes, notes
        count = int(re.search(r"\[(\d+) tokens, ", notes)[1])
        assert "0 tokens remain" in chat.line("/undo")
        assert chat.end("\x03") == 130
        chat = Chat("-n", "8", "--session", file)
        assert f"resumes {len(ids) + count} tokens" in chat.greeting, (chat.greeting, count)
        said, _ = reply_to(ids, count)
        assert chat.reply("/more")[0] == reply_to(ids + said, 8)[1]
        assert chat.end("\x04") == 0


def check_context():
    """A full context: said with what to do, and nothing is lost."""
    ids = rendered(("user", "Hello"))
    room = len(ids) + 20
    chat = Chat("-n", "500", "--ctx", str(room))
    notes = chat.reply("Hello")[1]
    assert f"the context of {room} tokens is full: /undo or /reset" in notes, notes
    assert "not sent" in chat.line("Again?") and "is full" in chat.line("/more")
    assert "0 tokens remain" in chat.line("/undo")
    text = chat.line("Again? " * 40)
    assert "the message was not sent" in text and "of which 0 are used" in text, text
    assert chat.reply("Hello")[0] == reply_to(ids, 21)[1]
    assert "at 4095 bytes" in chat.line("a" * 5000)
    assert "at 4095 bytes" in chat.line(f"\x1b[200~one\n{'a' * 5000}\x1b[201~")
    assert "at 4095 bytes" in chat.line(f"\x1b[200~{'a' * 5000}\ntwo\nthree\x1b[201~")
    assert "0 tokens remain" in chat.line("/undo")
    assert chat.end("\x04") == 0


def check_looks():
    """Reasoning is dimmed, or marked where colours are not wanted."""
    question = "What is the weather?"
    _, text = reply_to(rendered(("user", question), think=True), 60)
    thought, answer = text.split("</think>")
    assert thought and answer, text
    chat = Chat("--think", "-n", "60")
    assert chat.reply(question)[0] == f"{thought}\n\n{answer}"
    styled = chat.raw.replace("\r\n", "\n")
    assert f"\x1b[2m{thought}\x1b[0m\n\n{answer}" in styled, styled
    assert chat.end("\x04") == 0
    chat = Chat("--think", "-n", "60", NO_COLOR="1")
    assert chat.reply(question)[0] == f"<think>{thought}</think>\n{answer}"
    assert not re.search(r"\x1b\[\d*m", chat.raw), chat.raw
    assert chat.end("\x04") == 0


if __name__ == "__main__":
    COLI = os.path.abspath(sys.argv[1])
    for check in [check_turns, check_lines, check_interrupts, check_context, check_looks]:
        check()
        print(f"{check.__name__}: ok", flush=True)
