"""What the engine's rounding costs: its logits against float64 arithmetic on the same weights.

    python oracle/quality.py --coli target/release/coli oracle/demo README.md …

Each text is cut into sequences of 512 tokens. reference.py evaluates the decoded weights of the
container in float64; the engine runs the container, whose products have 16-bit activations, and
the same weights written as F32, whose products have float32 ones: the second row of figures is
what float32 alone costs. KL is KL(exact || engine) in nats at each position. Needs numpy.
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
from reference import Reference

SEQUENCE = 512


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def engine_logits(coli, model, ids, out):
    words = ["--model", model, "--ids", ",".join(map(str, ids)), "--out", out]
    subprocess.run([coli, "logits", *words], stdout=subprocess.DEVNULL, check=True)
    return np.fromfile(out, "<f4").reshape(len(ids), -1).astype(np.float64)


def compare(exact, ours):
    """KL, |Δlogit| and whether the top token is the same, for each position."""
    p, q = log_softmax(exact), log_softmax(ours)
    kl = (np.exp(p) * (p - q)).sum(-1)
    return kl, np.abs(exact - ours).max(-1), exact.argmax(-1) == ours.argmax(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coli", default="target/release/coli", help="the engine")
    parser.add_argument("model", type=Path, help="container")
    parser.add_argument("text", nargs="+", type=Path, help="UTF-8 text")
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    weights = read_container(args.model, lambda name: matrix_shape(config, name))
    exact = Reference(config, weights)
    with tempfile.TemporaryDirectory() as directory:
        plain, out = Path(directory), Path(directory) / "logits.f32"
        shutil.copy(args.model / "config.json", plain)
        tensors = {name: plain_f32(w)[0] for name, w in weights.items()}
        write_safetensors(plain / "model.safetensors", tensors)
        for path in args.text:
            command = [args.coli, "tokenize", "--model", args.model, "--json"]
            done = subprocess.run(command, input=path.read_bytes(), capture_output=True, check=True)
            ids = json.loads(done.stdout)["ids"]
            found = {"16-bit": [], "float32": []}
            for start in range(0, len(ids), SEQUENCE):
                part = ids[start : start + SEQUENCE]
                want = exact.run(part)["logits"]
                for row, model in zip(found.values(), (args.model, plain)):
                    row.append(compare(want, engine_logits(args.coli, model, part, out)))
            print(f"{path.name}: {len(ids)} tokens")
            for name, rows in found.items():
                kl, difference, same = (np.concatenate(parts) for parts in zip(*rows))
                kls = f"KL mean {kl.mean():.1e}, median {np.median(kl):.1e}, max {kl.max():.1e}"
                print(
                    f"  {name:7}  {kls}; max |Δlogit| {difference.max():.1e};"
                    f" same top {same.sum()}/{same.size}"
                )


if __name__ == "__main__":
    main()
