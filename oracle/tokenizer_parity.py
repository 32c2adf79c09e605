#!/usr/bin/env python3
"""Compares `coli tokenize` with the `tokenizers` library, string by string; exit 1 if any differs.

  tokenizer_parity.py --coli target/release/coli --model DIR [--strings N] [--seed S] [FILE...]

DIR holds a tokenizer.json (`tokenizer.py real DIR/tokenizer.json` makes the real one). Strings are
random and adversarial; every FILE is compared as one text and line by line. Both treatments of
added tokens are compared: `--special on` with the library, `--special off` with the library
without added tokens. Ids made are also decoded again by both, as are random ids.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys

import tokenizers

from tokenizer import ADDED, PINNED, load, random_text, readable_tokens, without_added

BATCH = 20_000


class Coli:
    """`coli tokenize --jsonl` on batches of lines."""

    def __init__(self, binary, model):
        self.command = [binary, "tokenize", "--model", model, "--jsonl"]

    def run(self, rows, *flags):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        done = subprocess.run(self.command + list(flags), input=lines.encode(), check=True,
                              stdout=subprocess.PIPE)
        out = [json.loads(line) for line in done.stdout.decode().split("\n") if line]
        assert len(out) == len(rows), (len(out), len(rows))
        return out


def adversarial(vocabulary, rng):
    """What makes a scan or a merge slow or ambiguous: long repeats, and ties around them."""
    units = ["a", "aa", "ab", "aab", " ", "  a", "\n", " \n", "\r\n", "\t", "0", "12", "'", "'s",
             "'ll", "é", "e\u0301", "漢", "한국", "😀", "\u00a0", "<", "<|", "<|user|>", "/nothink",
             "[", "-", "=", "_", "A", "xX", ".\n", "!", "\u3000\n", "ſ", "'ſ"]
    for unit in units:
        for count in (2, 3, 7, 31, 32, 33, 63, 64, 65, 66, 129, 1000, 5000):
            for left, right in (("", ""), ("b", "b"), (" ", ""), ("", " x"), ("\n", "1")):
                yield left + unit * count + right
    for word in vocabulary:
        yield word
        yield " " + word
        yield word + rng.choice(vocabulary)


class Comparison:
    def __init__(self, coli, tokenizer):
        self.coli, self.on, self.off = coli, load(tokenizer), without_added(tokenizer)
        self.strings = self.bytes = self.decoded = self.different = 0

    def report(self, what, wanted, found, source):
        self.different += 1
        if self.different <= 10:
            print(f"DIFFERENT {what}: {source!r:.300}\n  expected {wanted!r:.300}\n"
                  f"  found    {found!r:.300}")

    def texts(self, texts):
        for flag, hf in (("on", self.on), ("off", self.off)):
            wanted = [one.ids for one in hf.encode_batch(texts, add_special_tokens=False)]
            for text, ids, row in zip(texts, wanted, self.coli.run(texts, "--special", flag)):
                if row["ids"] != ids:
                    self.report(f"--special {flag}", ids, row["ids"], text)
        self.strings += len(texts)
        self.bytes += sum(len(text.encode()) for text in texts)
        self.ids(wanted)

    def ids(self, rows):
        wanted = self.on.decode_batch(rows, skip_special_tokens=False)
        for ids, text, row in zip(rows, wanted, self.coli.run(rows, "--decode")):
            if row["text"] != text:
                self.report("--decode", text, row["text"], ids)
        self.decoded += len(rows)


def batches(items):
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def main():
    assert tokenizers.__version__ == PINNED, tokenizers.__version__
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--coli", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--strings", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    args = parser.parse_args()
    path = pathlib.Path(args.model, "tokenizer.json")
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    comparison = Comparison(Coli(args.coli, args.model), tokenizer)
    rng = random.Random(args.seed)
    vocabulary = readable_tokens(tokenizer["model"]["vocab"])
    size = len(tokenizer["model"]["vocab"]) + len(ADDED)

    for batch in batches(random_text(rng, vocabulary) for _ in range(args.strings)):
        comparison.texts(batch)
        comparison.ids([[rng.randrange(size) for _ in range(rng.randint(1, 8))] for _ in batch])
    print(f"random: {comparison.strings} strings, different {comparison.different}", flush=True)
    before = comparison.strings
    for batch in batches(adversarial(vocabulary, rng)):
        comparison.texts(batch)
    print(f"adversarial: {comparison.strings - before} strings, different {comparison.different}",
          flush=True)
    before = comparison.bytes
    for file in args.files:
        text = file.read_text(encoding="utf-8", errors="replace")
        comparison.texts([text])
        comparison.texts(text.splitlines(keepends=True) or [""])
    print(f"files: {(comparison.bytes - before) / 2e6:.1f} MB, whole and by line, "
          f"different {comparison.different}")
    print(f"all: {comparison.strings} strings, {comparison.bytes} bytes, twice; "
          f"{comparison.decoded} id lists decoded; {comparison.different} different")
    sys.exit(comparison.different > 0)


if __name__ == "__main__":
    main()
