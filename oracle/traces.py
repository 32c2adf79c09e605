#!/usr/bin/env python3
"""Synthetic routing traces for `coli trace`, the same on every machine: needs only Python.

    python oracle/traces.py --to /tmp/traces

256 experts, 8 a token, in 20 layers, each with favourites of its own. They are modelled on what was
seen in large models: 75 tokens touch 237 of 256 experts of a layer and the top four draw 4 % of the
selections (flat has 230 and 3.3 %); 45 % of the selections come again at the next token (44 % in
repeating, where 75 tokens touch 189). Each kind
is written twice, as an earlier run and as the one behind it.
"""

import argparse
import itertools
import pathlib
import random

LAYERS, EXPERTS, TOP_K = 20, 256, 8


def draw(rng, cumulative, kept=()):
    """TOP_K different experts by weight, `kept` among them."""
    chosen = set(kept)
    while len(chosen) < TOP_K:
        chosen.update(rng.choices(range(EXPERTS), cum_weights=cumulative))
    return chosen


def zipf(rng, exponent, floor=0.0):
    """Cumulative weights 1/rank^exponent + floor, ranks dealt out at random."""
    weights = [1 / (rank + 1) ** exponent + floor for rank in range(EXPERTS)]
    rng.shuffle(weights)
    return list(itertools.accumulate(weights))


def favourites(rng, experts, inside=0.9):
    """Cumulative weights that give `experts` the share `inside`, all others the rest."""
    share = [inside / len(experts), (1 - inside) / (EXPERTS - len(experts))]
    return list(itertools.accumulate(share[e not in experts] for e in range(EXPERTS)))


def flat(rng):
    popular = [zipf(rng, 0.2) for _ in range(LAYERS)]
    while True:
        yield [draw(rng, weights) for weights in popular]


def repeating(rng):
    popular = [zipf(rng, 0.2) for _ in range(LAYERS)]
    last = [()] * LAYERS
    while True:
        last = [
            draw(rng, weights, [e for e in sorted(before) if rng.random() < 0.43])
            for weights, before in zip(popular, last)
        ]
        yield last


def skewed(rng):
    popular = [zipf(rng, 0.9) for _ in range(LAYERS)]
    while True:
        yield [draw(rng, weights) for weights in popular]


def topics(rng):
    """The 40 favourites change every 300 tokens."""
    while True:
        popular = [favourites(rng, set(rng.sample(range(EXPERTS), 40))) for _ in range(LAYERS)]
        for _ in range(300):
            yield [draw(rng, weights) for weights in popular]


def alternating(rng):
    """Two sets of 32 that share nothing, 60 tokens each in turn."""
    both = [rng.sample(range(EXPERTS), 64) for _ in range(LAYERS)]
    halves = [[favourites(rng, set(b[i : i + 32]), 1.0) for b in both] for i in (0, 32)]
    while True:
        for popular in halves:
            for _ in range(60):
                yield [draw(rng, weights) for weights in popular]


def chat(rng):
    """Prompts of 100 tokens in one pass before replies of 200, one topic each, repeating."""
    while True:
        popular = [favourites(rng, set(rng.sample(range(EXPERTS), 80)), 0.7) for _ in range(LAYERS)]
        yield [[draw(rng, weights) for _ in range(100)] for weights in popular]
        last = [()] * LAYERS
        for _ in range(200):
            last = [
                draw(rng, weights, [e for e in sorted(before) if rng.random() < 0.3])
                for weights, before in zip(popular, last)
            ]
            yield last


def line(layer, rows):
    """One layer of one pass: `rows` are sets of experts."""
    counts = {}
    for e in itertools.chain.from_iterable(rows):
        counts[e] = counts.get(e, 0) + 1
    experts = (f"{e}:{n}" if n > 1 else f"{e}" for e, n in sorted(counts.items()))
    return f"{layer} {len(rows)} {' '.join(experts)}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    for kind in (flat, repeating, skewed, topics, alternating, chat):
        layers = kind(random.Random(kind.__name__))
        for name in (f"{kind.__name__}-past", kind.__name__):
            with open(args.to / f"{name}.trace", "w") as file:
                file.write(f"coli-trace 1\nlayers {LAYERS} experts {EXPERTS} top_k {TOP_K}\n")
                tokens = 0
                while tokens < args.tokens:
                    batches = [[rows] if isinstance(rows, set) else rows for rows in next(layers)]
                    file.writelines(line(layer, rows) for layer, rows in enumerate(batches))
                    tokens += len(batches[0])


if __name__ == "__main__":
    main()
