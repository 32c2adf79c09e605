"""What each format of weights costs: the table of the README's section on quality.

    python oracle/quality_report.py BF16_CHECKPOINT TEXT CALIBRATION [--coli target/release/coli]

Converts the checkpoint to every format by both rules for scales, and by the search with what the
checkpoint activates on the text CALIBRATION, and scores the text with `coli score`. KL is
KL(BF16 || format) in nats a token, over the first 4096 tokens in sequences of 512: it tells apart
what differs by less than the luck of one text. Then the model goes on after eight beginnings of
paragraphs, with two drafts a pass. Norms and routers are F32 in all containers. Weights in BF16
meet float32 activations, integers 16-bit ones; the last row is the recommended container with its
weights as F32, so that what is between it and the row of the container is what 16-bit activations
cost. Needs numpy.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from demo import matrix_shape, read_container
from formats import plain_f32, write_safetensors
from quality import SEQUENCE, engine_logits, log_softmax

REST = ("attention", "dense", "shared", "io", "indexer", "mtp")
# Experts of the main layers, everything else.
FORMATS = [
    ("int8", "int8"),
    ("int4-g32", "int8"),
    ("int4-g64", "int8"),
    ("int4-g128", "int8"),
    ("int4", "int8"),
    ("int3", "int8"),
    ("int4-g32", "int4-g32"),
    ("int4-g64", "int4-g64"),
    ("int4", "int4"),
    ("int3", "int3"),
]
RECOMMENDED = ("int4-g64", "int8")
KL_TOKENS = 4096
PROMPTS, PROMPT_WORDS, NEW_TOKENS = 8, 24, 96


def coli(binary, verb, *words):
    done = subprocess.run(
        [binary, verb, *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def prompts(text):
    """Beginnings of long paragraphs, evenly spread."""
    long = [p.split() for p in text.split("\n\n") if len(p.split()) > 2 * PROMPT_WORDS]
    chosen = [long[i * len(long) // PROMPTS] for i in range(PROMPTS)]
    return ["[gMASK]<sop>" + " ".join(words[:PROMPT_WORDS]) for words in chosen]


def predictions(binary, model, ids):
    """ln p of every token at every position, [T, V]."""
    with tempfile.NamedTemporaryFile() as out:
        parts = [ids[start : start + SEQUENCE] for start in range(0, len(ids), SEQUENCE)]
        logits = [engine_logits(binary, model, part, out.name) for part in parts]
    return log_softmax(np.concatenate(logits))


def measure(binary, model, text, starts):
    """Bytes, perplexity, and tokens a pass with two drafts, greedy and at temperature 0.8."""
    flags = ["--model", model, "--json"]
    score = json.loads(coli(binary, "score", *flags, "--text", text, "--window", SEQUENCE))
    rates = []
    for temperature in ("0", "0.8"):
        tokens = forwards = 0
        for seed, start in enumerate(starts):
            how = ["--raw", "--draft", 2, "-n", NEW_TOKENS, "--usage", "off"]
            how += ["--temp", temperature, "--seed", seed]
            reply = json.loads(coli(binary, "run", *flags, *how, start))
            tokens += len(reply["ids"])
            forwards += reply["drafts"]["forwards"]
        rates.append(tokens / forwards)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return size, score["ppl"], *rates


def as_floats(model, target):
    """The same weights as F32."""
    config = json.loads((model / "config.json").read_text())
    weights = read_container(model, lambda name: matrix_shape(config, name))
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors", ".coli*"))
    tensors = {name: plain_f32(w)[0] for name, w in weights.items()}
    write_safetensors(target / "model.safetensors", tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="BF16")
    parser.add_argument("text", type=Path, help="UTF-8, none of which was trained on")
    parser.add_argument("calibration", type=Path, help="UTF-8, another text")
    parser.add_argument("--coli", default="target/release/coli", help="the engine")
    args = parser.parse_args()
    starts = prompts(args.text.read_text("utf-8"))
    tokenize = [args.coli, "tokenize", "--model", args.checkpoint, "--json"]
    done = subprocess.run(tokenize, input=args.text.read_bytes(), capture_output=True, check=True)
    ids = json.loads(done.stdout)["ids"][:KL_TOKENS]
    exact, exact_ppl = predictions(args.coli, args.checkpoint, ids), None
    print("| experts | rest | scales | MB | perplexity | | KL | tokens a pass, greedy | at 0.8 |")
    print("|---|---|---|---|---|---|---|---|---|")

    def row(label, model):
        nonlocal exact_ppl
        size, ppl, greedy, sampled = measure(args.coli, model, args.text, starts)
        exact_ppl = exact_ppl or ppl
        kl = (np.exp(exact) * (exact - predictions(args.coli, model, ids))).sum(-1).mean()
        cells = [*label, f"{size / 1e6:.2f}", f"{ppl:.3f}", f"{100 * (ppl / exact_ppl - 1):+.2f} %"]
        cells += [f"{kl:.6f}", f"{greedy:.2f}", f"{sampled:.2f}"]
        print("|", " | ".join(cells), "|", flush=True)

    row(("BF16", "BF16", "–"), args.checkpoint)
    with tempfile.TemporaryDirectory() as directory:
        target, floats = Path(directory, "container"), Path(directory, "floats")
        means = Path(directory, "calibration")
        words = ["--model", args.checkpoint, "--text", args.calibration, "--window", SEQUENCE]
        coli(args.coli, "score", *words, "--calibrate", means)
        rules = {"abs-max": ["abs-max"], "search": ["search"]}
        rules |= {"calibrated": ["search", "--calibration", means]}
        for experts, rest in FORMATS:
            for scales, rule in rules.items():
                flags = ["--experts", experts, "--keep-free", 0, "--scales", *rule]
                flags += [word for kind in REST for word in ("--" + kind, rest)]
                coli(args.coli, "convert", "--from", args.checkpoint, "--to", target, *flags)
                row((experts, rest, scales), target)
                if ((experts, rest), scales) == (RECOMMENDED, "abs-max"):
                    as_floats(target, floats)
                shutil.rmtree(target)
        row((*RECOMMENDED, "abs-max, as F32"), floats)


if __name__ == "__main__":
    main()
