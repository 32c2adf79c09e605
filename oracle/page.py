#!/usr/bin/env python3
"""Uses the page of `coli serve` as a person would, in a real Chromium; exit 1 if it fails them.

  page.py --coli target/release/coli [--chromium /usr/bin/chromium] [--shots DIR]

Types, streams, stops, sets, shows a key, outlives a restart of the server; looks for breaches of
the page's own policy, for markup of a model that becomes markup, for controls without a name, for
text without contrast and for pages that are wider than their window. With --shots, pictures of a
phone and a desktop, light and dark.
"""

import argparse
import base64
import contextlib
import hashlib
import json
import pathlib
import random
import re
import subprocess
import sys
import urllib.request

from playwright.sync_api import expect, sync_playwright

DEMO = pathlib.Path(__file__).parent / "demo"
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 3, "has_touch": True}
DESKTOP = {"viewport": {"width": 1280, "height": 860}}

# What a model may say: all that the page renders, and markup that must stay text.
SAID = """## Tides, *briefly*

The sea rises and falls **twice a day**. Call `tide(hours)` for its height:

```python
def tide(hours):
    return 2.1 * cos(2 * pi * hours / 12.42)
```

1. The moon pulls on the near side more than on the middle.
2. So there are two bulges:
   - one towards the moon
   - one away from it

| place | range |
|---|---|
| open sea | 0.6 m |
| Bay of Fundy | **16 m** |

> A rising tide lifts all boats.

<img src=x onerror="document.title='broken in'"><script>document.title='broken in'</script>
snake_case_name, 2 * 3 * 4, [a link](javascript:alert(1))
"""


def check(name, holds):
    print(f"{'ok  ' if holds else 'FAIL'} {name}")
    check.failed |= not holds


check.failed = False


@contextlib.contextmanager
def served(coli, *flags, port=0):
    """The address of a server that ends with the block."""
    command = [coli, "serve", "--model", DEMO, "--port", str(port), "--usage", "off", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        banner = next(line for line in server.stderr if "http://" in line)
        yield re.search(r"http://[^/\s]+", banner)[0]
    finally:
        server.terminate()
        server.wait()


class Tab:
    """A window on the page, with all that it complained about."""

    def __init__(self, browser, url, key=None, **context):
        self.url, self.key, self.complaints, self.asked = url, key, [], []
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.on("console", lambda line: self.complaints.append(line.text))
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        self.page.on("request", lambda request: self.asked.append(request))
        self.page.goto(url)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # A server that is gone or wants a key is part of the play.
        bad = [line for line in self.complaints if not line.startswith("Failed to load resource")]
        check("no complaint in the console", bad == [])
        print(*bad, sep="\n", end="\n" if bad else "")
        hosts = {request.url.split("/")[2] for request in self.asked if "://" in request.url}
        check("nothing is asked of anybody else", hosts == {self.url.split("/")[2]})
        self.context.close()

    def set(self, **values):
        for name, value in values.items():
            field = self.page.locator(f"#settings [name={name}]")
            field.set_checked(value) if isinstance(value, bool) else field.fill(str(value))

    def say(self, text):
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def say_at_length(self):
        """Begins a reply that takes the small model many seconds: no control token ends it."""
        endless = {"logit_bias": {str(id): -100 for id in range(3036, 3072)}}
        change = lambda route: route.continue_(
            post_data=json.dumps(json.loads(route.request.post_data) | endless)
        )
        self.page.route("**/v1/chat/completions", change, times=1)
        self.page.get_by_role("button", name="New chat").click()
        self.set(max_tokens=3000, thinking=False, temperature=0, system="")
        self.say("Tell me all.")
        expect(self.last(".text")).not_to_be_empty()

    def last(self, part=""):
        return self.page.locator(f"article.assistant >> nth=-1 >> {part or ':scope'}")

    def finish(self):
        expect(self.page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)

    def request(self):
        posts = [request for request in self.asked if request.method == "POST"]
        return json.loads(posts[-1].post_data)

    def health(self):
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        request = urllib.request.Request(f"{self.url}/health", headers=headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


def policy(url):
    with urllib.request.urlopen(url) as answer:
        header, page = answer.headers["Content-Security-Policy"], answer.read().decode()
    for tag in ("style", "script"):
        inside = re.search(f"<{tag}>(.*?)</{tag}>", page, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        check(f"the hash of the {tag}", f"{tag}-src 'sha256-{digest}';" in header)


def talk(tab):
    page = tab.page
    tab.set(temperature=0, max_tokens=40, thinking=False)
    tab.say("What is the weather?")
    tab.finish()
    body = tab.request()
    check("the settings are sent", (body["temperature"], body["max_tokens"]) == (0, 40))
    whole = json.dumps(body | {"stream": False}).encode()
    with urllib.request.urlopen(f"{tab.url}/v1/chat/completions", whole) as answer:
        reply = json.load(answer)
    want, tokens = reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"]
    squeeze = " ".join
    said = tab.last(".text").inner_text()
    check("the reply is the API's", squeeze(said.split()) == squeeze(want.split()))
    check("its cost is shown", f"{tokens} tokens" in tab.last(".foot").inner_text())
    tab.set(max_tokens=300, system="Be brief.")
    page.get_by_label("Message", exact=True).fill("And")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("the wind?")
    page.keyboard.press("Enter")
    tab.finish()
    roles = [message["role"] for message in tab.request()["messages"]]
    check("a system prompt and the history", roles == ["system", "user", "assistant", "user"])
    check("a line break", tab.request()["messages"][-1]["content"] == "And\nthe wind?")
    page.get_by_role("button", name="Try again").click()
    tab.finish()
    check("a reply takes another's place", page.locator("article").count() == 4)
    page.get_by_role("button", name="New chat").click()
    tab.set(thinking=True, system="")
    tab.say("What is the weather?")
    expect(tab.last("summary")).to_have_text(re.compile("Think|Thoughts"))
    check("thoughts are folded", not tab.last(".thoughts").is_visible())
    tab.last("summary").click()
    check("and unfold", tab.last(".thoughts").is_visible())
    tab.finish()


def stop(tab):
    for way in ("Escape", "button"):
        before = tab.health()["scheduler"]["cancelled"]
        tab.say_at_length()
        lengths = {0}
        while len(lengths) < 6:
            lengths.add(len(tab.last(".text").inner_text()))
        check("the reply grows", tab.page.get_by_role("button", name="Stop").is_visible())
        if way == "Escape":
            tab.page.keyboard.press("Escape")
        else:
            tab.page.get_by_role("button", name="Stop").click()
        tab.finish()
        expect(tab.last(".foot")).to_contain_text("stopped")
        for _ in range(100):
            if tab.health()["scheduler"]["cancelled"] > before:
                break
            tab.page.wait_for_timeout(20)
        check(f"{way} stops the server, too", tab.health()["scheduler"]["cancelled"] > before)
    check("what came stays", len(tab.last(".text").inner_text()) > 0)


def panel(tab):
    page = tab.page
    expect(page.locator("#map")).to_have_attribute("aria-label", re.compile("in 6 layers"))
    with urllib.request.urlopen(f"{tab.url}/experts") as answer:
        layers = json.load(answer)["layers"]
    held = sum(digit in "13" for layer in layers for digit in layer)
    expect(page.locator("#held")).to_have_text(f"{held} of 96 in memory", timeout=5000)
    check("the map counts", held > 0)
    expect(page.locator("#speed")).to_have_text("–", timeout=15_000)
    expect(page.locator("#hits")).to_have_text(re.compile(r"^[\d.]+ %$"))
    tab.say_at_length()
    expect(page.locator("#queue")).to_have_text(re.compile("^1"), timeout=10_000)
    expect(page.locator("#speed")).not_to_have_text("–", timeout=10_000)
    page.keyboard.press("Escape")
    tab.finish()


def outlive(tab, coli):
    """A server that goes away in the middle of a reply, and comes back."""
    page = tab.page
    page.evaluate("document.title = 'the same page'")
    with served(coli, port=tab.url.split(":")[-1]):
        expect(page.locator("#notice")).to_be_hidden(timeout=15_000)
        tab.say("Still there?")
        tab.finish()
        check("it goes on after a restart", "tokens" in tab.last(".foot").inner_text())
        check("in the same page", page.title() == "the same page")
        said = page.locator("article").all_inner_texts()
        page.reload()
        page.wait_for_selector("article")
        check("a reload keeps the talk", page.locator("article").all_inner_texts() == said)
        kept = page.locator("#settings [name=max_tokens]").input_value()
        check("and the settings", kept == "400")
        page.get_by_role("button", name="New chat").click()
        check("a new chat is empty", page.locator("article").count() == 0)


def use(browser, coli):
    with served(coli, "--ctx", "4096") as url:
        policy(url)
        tab = Tab(browser, url, **DESKTOP)
        expect(tab.page.locator("body.up")).to_be_visible()
        talk(tab)
        stop(tab)
        panel(tab)
        tab.say_at_length()
    with tab:
        # The server lets the reply end, or cuts it off.
        expect(tab.page.locator("#notice")).to_contain_text("does not answer", timeout=15_000)
        tab.finish()
        tab.set(max_tokens=400)
        outlive(tab, coli)


def guard(browser, coli):
    with served(coli, "--api-key", "open-sesame") as url:
        with Tab(browser, url, key="open-sesame", **DESKTOP) as tab:
            notice = tab.page.locator("#notice")
            expect(notice).to_contain_text("API key")
            tab.set(key="wrong", max_tokens=8)
            tab.say("Hello.")
            tab.finish()
            check("a wrong key is refused", "Bearer" in tab.last(".foot .failed").inner_text())
            tab.set(key="open-sesame")
            expect(notice).to_be_hidden(timeout=10_000)
            tab.page.get_by_role("button", name="Try again").click()
            tab.finish()
            check("the right one is not", "8 tokens" in tab.last(".foot").inner_text())
            check("it is in no URL", not any("sesame" in request.url for request in tab.asked))
            kept = tab.page.evaluate("localStorage.length + document.cookie.length")
            check("it stays in this tab", kept == 0)


def play(route):
    """The server's part, with a model that says SAID."""
    path = route.request.url.split("/", 3)[3]
    if path == "v1/chat/completions":
        deltas = [{"reasoning_content": "The moon, then. "}]
        deltas += [{"content": SAID[i : i + 7]} for i in range(0, len(SAID), 7)]
        events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
        usage = {"usage": {"completion_tokens": 412}}
        timings = {"timings": {"predicted_n": 412, "predicted_ms": 49_800}}
        events += [{"choices": []} | usage | timings]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(content_type="text/event-stream", body=body + "data: [DONE]\n\n")
    elif path == "experts":
        draw = random.Random(play.looks)
        held = random.Random(1)
        row = lambda: "".join(
            str((held.random() < 0.34 * (2 - e / 128)) + 2 * (draw.random() < 1 / 32))
            for e in range(256)
        )
        route.fulfill(json={"layers": ["", "", ""] + [row() for _ in range(76)]})
    else:
        play.looks += 1
        at = play.looks
        names = ["drafts", "drafts_accepted", "expert_hits", "expert_misses", "read_bytes"]
        counts = [at * n for n in (9, 6, 3800, 1110, 2_120_000_000)]
        health = {
            "status": "ok",
            "model": "GLM-5.2",
            "context_length": 32768,
            "scheduler": {"active": 1, "queued": 2},
            "prefill": {"tokens": 0, "done": 0},
            "progress": {"tokens": 8 * at} | dict(zip(names, counts)),
        }
        route.fulfill(json=health)


play.looks = 0

# Every pair of text and what is behind it, with its contrast.
CONTRAST = """() => [...document.querySelectorAll('body *')].filter(node =>
  node.checkVisibility() && [...node.childNodes].some(child => child.nodeType === 3 &&
  child.data.trim())).map(node => {
    const parts = color => color.match(/[\\d.]+/g).map(Number);
    const light = color => parts(color).slice(0, 3).map(c => c / 255)
      .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
      .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
    let behind = node;
    while (behind && parts(getComputedStyle(behind).backgroundColor)[3] === 0)
      behind = behind.parentElement;
    const pair = [getComputedStyle(node).color, getComputedStyle(behind).backgroundColor];
    const [a, b] = pair.map(light).sort((a, b) => b - a);
    return [(a + .05) / (b + .05), node.outerHTML.slice(0, 80)];
  }).filter(([ratio]) => ratio < 4.5)"""


def picture(browser, url, shots, device, scheme):
    context = {"phone": PHONE, "desktop": DESKTOP}[device]
    with Tab(browser, url, color_scheme=scheme, **context) as tab:
        page, name = tab.page, f"{device}-{scheme}"
        expect(page.locator("body.up")).to_be_visible()
        shot = lambda what: shots and page.screenshot(path=shots / f"{name}-{what}.png")
        page.wait_for_timeout(1500)
        shot("fresh")
        play.looks = 0
        page.route("**/*", play)
        page.get_by_label("Message", exact=True).fill("Why are there two tides a day?")
        page.get_by_role("button", name="Send").click()
        tab.finish()
        foreign = page.locator(".text :is(img, script, a)").count()
        check(f"{name}: no markup of a model", foreign == 0)
        check(f"{name}: it stays text", "<img src=x" in tab.last(".text").inner_text())
        parts = ["h4 em", "strong", "pre", "ol > li ul li", "table th", "blockquote", "p code"]
        missing = [part for part in parts if not tab.last(f".text >> css={part}").count()]
        check(f"{name}: Markdown is shown {missing}", missing == [])
        page.wait_for_timeout(3000)
        page.locator("#talk").evaluate("talk => { talk.scrollTop = 0; }")
        shot("talk")
        page.locator("#talk").evaluate("talk => { talk.scrollTop = 1e6; }")
        shot("end")
        fits = "document.documentElement.scrollWidth <= innerWidth"
        check(f"{name}: as wide as its window", page.evaluate(fits))
        poor = page.evaluate(CONTRAST)
        if device == "phone":
            page.get_by_role("button", name="Panel").click()
            page.wait_for_timeout(2500)
            shot("panel")
            poor += page.evaluate(CONTRAST)
            page.keyboard.press("Escape")
            check(f"{name}: Escape closes the panel", not page.locator("#side").is_visible())
        check(f"{name}: contrast {poor}", poor == [])
        nameless = """() => [...document.querySelectorAll('button, input, textarea')].filter(node =>
            !node.labels?.length && !node.textContent.trim()).length"""
        check(f"{name}: every control has a name", page.evaluate(nameless) == 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--coli", default="target/release/coli")
    parser.add_argument("--chromium", help="the browser; default: the one that playwright installs")
    parser.add_argument("--shots", type=pathlib.Path, help="where pictures go")
    options = parser.parse_args()
    if options.shots:
        options.shots.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=options.chromium, args=["--no-sandbox"]
        )
        use(browser, options.coli)
        guard(browser, options.coli)
        with served(options.coli) as url:
            for device in ("phone", "desktop"):
                for scheme in ("light", "dark"):
                    picture(browser, url, options.shots, device, scheme)
        browser.close()
    sys.exit(check.failed)


if __name__ == "__main__":
    main()
