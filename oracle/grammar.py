#!/usr/bin/env python3
"""Checks src/grammar.rs with jsonschema and a matcher of its own; exit code 1 on a difference.

    python oracle/grammar.py [--cases N] [--seed S]

Run from the root, it writes random schemas and GBNF grammars to a file, lets
`cargo test --release --test grammar cases_of_the_oracle` answer it, and checks the answers:

- a schema of the supported subset compiles, and every text of a random walk is JSON that jsonschema
  finds valid;
- no text that was changed at random matches the grammar unless it is valid, too;
- a schema with something unsupported is refused by an error that names it;
- a GBNF grammar matches what a second, slow matcher of its expression matches: the texts of its
  walks, and random texts.

A walk is given up after 3000 tokens ("unfinished"): one that needs a rare ending seldom meets it.
"""

import argparse
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import jsonschema

WORDS = ["a", "b", "name", "é", "x y", 'q"', "n\n", "漢", "abc", "ab"]
PATTERNS = ["^[a-c]{1,3}$", "ab?|c", "^(x|yz)+é?$", "\\d{2}-\\d{2}$", "^\\w+@[^\\s\"]$", "^.[\\\\\"]",
            "^(?:[0-9a-f]{4}:){2}$", "^\\u00e9\\.\\/$", "^a*?b{0,2}$", "^$"]
FORMATS = {
    "date": r"\d{4}-\d\d-\d\d", "time": r"\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)",
    "date-time": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": r"\d{1,3}(\.\d{1,3}){3}",
}
UNSUPPORTED = {
    "not": {}, "if": {}, "uniqueItems": True, "patternProperties": {}, "multipleOf": 2,
    "contains": {}, "minProperties": 1, "propertyNames": {}, "dependentRequired": {},
    "unevaluatedProperties": False, "x-vendor": 1,
}


def value(rng, depth=2):
    """Any JSON value."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 7:
        return {rng.choice(WORDS): value(rng, depth - 1) for _ in range(rng.randrange(3))}
    return [None, rng.random() < 0.5, rng.randrange(-20, 200), rng.randrange(-50, 50) / 8,
            rng.choice(WORDS), rng.choice(WORDS)][kind]


def bounds(rng, integer):
    out = {}
    low, high = sorted(rng.choice([rng.randrange(-30, 30), rng.randrange(-2000, 90000)])
                       for _ in range(2))
    shift = rng.choice([0, 0, 0.5]) if integer else 0
    if rng.random() < 0.7:
        out[rng.choice(["minimum", "exclusiveMinimum"])] = low - shift
    if rng.random() < 0.7:
        out[rng.choice(["maximum", "exclusiveMaximum"])] = high + 2 + shift
    return out


def schema_of(rng, kind, depth, refs):
    if kind in ("integer", "number"):
        return {"type": kind, **(bounds(rng, kind == "integer") if rng.random() < 0.6 else {})}
    if kind == "string":
        choice = rng.randrange(4)
        out = {"type": "string"}
        if choice == 0:
            out["pattern"] = rng.choice(PATTERNS)
        elif choice == 1:
            out["format"] = rng.choice(list(FORMATS))
        elif choice == 2:
            low = rng.randrange(4)
            out.update({"minLength": low, "maxLength": low + rng.randrange(4)})
        return out
    if kind == "array":
        out = {"type": "array"}
        if rng.random() < 0.7:
            out["items"] = schema(rng, depth - 1, refs)
        if rng.random() < 0.3:
            out["prefixItems"] = [schema(rng, depth - 1, refs) for _ in range(rng.randrange(1, 3))]
        if rng.random() < 0.5:
            out["minItems"] = rng.randrange(3)
        if rng.random() < 0.5:
            out["maxItems"] = out.get("minItems", 0) + rng.randrange(3)
        if out.get("items") is False or not rng.randrange(8):
            out.pop("minItems", None)
        return out
    if kind == "object":
        names = rng.sample(WORDS, rng.randrange(5))
        out = {"type": "object",
               "properties": {name: schema(rng, depth - 1, refs) for name in names}}
        if rng.random() < 0.7:
            out["required"] = [name for name in names if rng.random() < 0.5]
        if rng.random() < 0.5:
            extra = rng.choice([False, True, schema(rng, depth - 1, refs)])
            out["additionalProperties"] = extra
            if extra is not False and rng.random() < 0.3:
                out.setdefault("required", []).append("other")
        return out
    return {"type": kind}


def schema(rng, depth=3, refs=()):
    """A schema of the supported subset that allows some value."""
    roll = rng.random()
    simple = ["integer", "number", "string", "boolean", "null"]
    kinds = simple + (["array", "object", "object"] if depth > 0 else [])
    if refs and roll < 0.1:
        return {"$ref": rng.choice(refs)}
    if roll < 0.16:
        return {"const": value(rng)}
    if roll < 0.24:
        return {"enum": [value(rng) for _ in range(rng.randrange(1, 5))]}
    if roll < 0.30 and depth > 0:
        return {"anyOf": [schema(rng, depth - 1, refs) for _ in range(rng.randrange(1, 4))]}
    if roll < 0.35 and depth > 0:
        chosen = rng.sample(["integer", "string", "boolean", "null", "array", "object"], 2)
        return {"oneOf": [schema_of(rng, kind, depth - 1, refs) for kind in chosen]}
    if roll < 0.38 and depth > 0:
        tagged = [{"type": "object", "properties": {"k": {"const": tag}, "v": schema(rng, 0, refs)},
                   "required": ["k"]} for tag in ("one", 2)]
        return {"oneOf": tagged}
    if roll < 0.41:
        return {"allOf": [schema(rng, depth - 1, refs)], "title": "t"}
    if roll < 0.44:
        return rng.choice([True, {}, {"description": "anything"}])
    if roll < 0.50:
        chosen = rng.sample(["integer", "string", "null", "boolean"], 2)
        return {"type": chosen, "default": None, **(bounds(rng, True) if rng.random() < 0.3 else {})}
    return schema_of(rng, rng.choice(kinds), depth, refs)


def document(rng):
    if rng.random() < 0.7:
        return schema(rng)
    # Definitions that may refer to themselves, through members that need not be there.
    refs = ["#/$defs/a", "#/$defs/b"]
    tree = {"type": "object", "properties": {
        "v": schema(rng, 1), "next": {"$ref": rng.choice(refs + ["#"])},
        "list": {"type": "array", "items": {"$ref": rng.choice(refs)}}}, "required": ["v"]}
    return {"type": "object", "properties": {"x": schema(rng, 2, refs), "t": {"$ref": refs[0]}},
            "$defs": {"a": tree, "b": schema(rng, 1)}}


def spoil(rng, doc):
    """Puts something unsupported somewhere; returns the keyword."""
    key = rng.choice(list(UNSUPPORTED))
    spoiled = rng.choice([
        {"type": "object", "properties": {"p": {key: UNSUPPORTED[key]}, "q": doc}},
        {"anyOf": [doc, {"type": "array", "items": {"title": "t", key: UNSUPPORTED[key]}}]},
    ])
    return key, spoiled


def literal(text):
    return lambda read, starts: {at + len(text) for at in starts if read.startswith(text, at)}


def one_of(chars):
    one = re.compile(chars)
    return lambda read, starts: {at + 1 for at in starts if one.match(read, at)}


def in_turn(parts):
    def ends(read, starts):
        for part in parts:
            starts = part(read, starts)
        return starts
    return ends


def either(parts):
    return lambda read, starts: set().union(*(part(read, starts) for part in parts))


def repeated(part, least, most):
    def ends(read, starts):
        found, count = set(), 0
        while starts and (most is None or count <= most):
            if count >= least:
                starts = starts - found
                found |= starts
            starts = part(read, starts)
            count += 1
        return found
    return ends


def gbnf(rng, depth=4):
    """An expression as GBNF, and as a function of a text and a set of places in it that gives the
    places where what begins at one of them may end. (`re` would take exponential time.)"""
    kind = rng.randrange(8 if depth else 3)
    if kind == 0:
        text = "".join(rng.choice('ab"\\é漢\n-') for _ in range(rng.randrange(3)))
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"', literal(text)
    if kind <= 2:
        text, chars = rng.choice([
            ("[a-c]", "[a-c]"), ("[^a\\n]", "[^a\\n]"), (".", "[\\s\\S]"),
            ("[é-漢\\\\-]", "[é-漢\\\\-]"), ("[\\x41\\u00e9b]", "[Aéb]")])
        return text, one_of(chars)
    if kind <= 5:
        parts = [gbnf(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
        join, combine = (" ", in_turn) if kind <= 4 else ("\n|", either)
        return f"({join.join(p[0] for p in parts)})", combine([p[1] for p in parts])
    text, part = gbnf(rng, depth - 1)
    times, *counts = rng.choice([("?", 0, 1), ("*", 0, None), ("+", 1, None), ("{2}", 2, 2),
                                 ("{1,}", 1, None), ("{0,2}", 0, 2)])
    return f"({text}){times}", repeated(part, *counts)


def change(rng, text):
    """Some edits of a text."""
    chars = list(text)
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(len(chars) + 1)
        piece = list(rng.choice(['"', "a", "1", "0", ",", "}", "]", " ", "-", ".5", "é", "null"]))
        chars[at:at + rng.randrange(3)] = rng.choice([[], piece])
    return "".join(chars)


def answers(cases):
    """What the test in tests/grammar.rs says to the cases."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = pathlib.Path(folder, "cases"), pathlib.Path(folder, "answers")
        asked.write_text("".join(json.dumps(case) + "\n" for case in cases))
        env = dict(os.environ, COLI_GRAMMAR_CASES=str(asked), COLI_GRAMMAR_OUT=str(answered))
        command = ["cargo", "test", "--offline", "--release", "--test", "grammar",
                   "cases_of_the_oracle"]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        lines = answered.read_text().split("\n")[:-1]
    assert len(lines) == len(cases), (len(lines), len(cases))
    return [json.loads(line) for line in lines]


def validator(doc):
    def full(checker, name, instance, _):
        # re.search, with \d and \w for ASCII as in ECMA-262.
        if isinstance(instance, str) and not re.search(name, instance, re.ASCII):
            yield jsonschema.ValidationError(f"{instance!r} has no {name}")

    def formatted(checker, name, instance, _):
        if isinstance(instance, str):
            bad = not re.fullmatch(FORMATS[name], instance)
            bad = bad or not checker.format_checker.conforms(instance, name)
            if bad:
                yield jsonschema.ValidationError(f"{instance!r} is no {name}")

    base = jsonschema.Draft202012Validator
    kind = jsonschema.validators.extend(base, {"pattern": full, "format": formatted})
    kind.check_schema(doc)
    return kind(doc, format_checker=base.FORMAT_CHECKER)


def is_valid(checker, text):
    try:
        return checker.is_valid(json.loads(text))
    except ValueError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    cases, notes = [], []
    for number in range(args.cases):
        case = {"seed": rng.randrange(1, 2**40), "walks": 4, "probes": []}
        roll = rng.random()
        if roll < 0.7:
            case["schema"] = document(rng)
            notes.append(("schema", validator(case["schema"])))
        elif roll < 0.8:
            key, case["schema"] = spoil(rng, schema(rng))
            notes.append(("spoiled", key))
        else:
            text, ends = gbnf(rng)
            case["gbnf"] = "root ::= " + text
            notes.append(("gbnf", lambda text, ends=ends: len(text) in ends(text, {0})))
        cases.append(case)
    first = answers(cases)
    for case, answer, (kind, _) in zip(cases, first, notes):
        made = [text for text in answer.get("texts", []) if text is not None]
        if kind != "spoiled":
            case["probes"] = made + [change(rng, text) for text in made for _ in range(4)]
            case["probes"] += ["".join(rng.choice("abA\n\"é") for _ in range(rng.randrange(5)))
                               for _ in range(10)]
    counts = dict.fromkeys(["schemas", "empty", "refused", "gbnf", "texts", "unfinished", "changed",
                            "changed and accepted", "wrong"], 0)
    for case, answer, (kind, known) in zip(cases, answers(cases), notes):
        wrong = []
        texts = answer.get("texts", [])
        counts["texts"] += len(texts)
        counts["unfinished"] += texts.count(None)
        texts = [text for text in texts if text is not None]
        probes = list(zip(case["probes"], answer.get("probes", [])))
        if kind == "spoiled":
            counts["refused"] += 1
            if known not in answer.get("error", ""):
                wrong = [f"{known} is not refused by name"]
        elif kind == "gbnf":
            counts["gbnf"] += 1
            wrong = ["error"] if "error" in answer else []
            wrong += [text for text in texts if not known(text)]
            wrong += [text for text, matches in probes if matches != known(text)]
        elif "no text matches it" in answer.get("error", ""):
            counts["empty"] += 1
        else:
            counts["schemas"] += 1
            wrong = ["error"] if "error" in answer else []
            wrong += [text for text in texts if not is_valid(known, text)]
            accepted = [text for text, matches in probes[len(texts):] if matches]
            counts["changed"] += len(probes) - len(texts)
            counts["changed and accepted"] += len(accepted)
            wrong += [text for text in accepted if not is_valid(known, text)]
            wrong += [text for text, matches in probes[:len(texts)] if not matches]
        if wrong:
            counts["wrong"] += 1
            if counts["wrong"] <= 5:
                shown = case.get("gbnf") or json.dumps(case["schema"], ensure_ascii=False)
                print(f"{kind}: {shown}\n  {answer.get('error', '')}\n  wrong: {wrong[:3]}")
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    sys.exit(1 if counts["wrong"] else 0)


main()
