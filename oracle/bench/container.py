"""Writes a container of random weights to measure speed with; the model says nothing.

    python oracle/bench/container.py --preset medium --to /tmp/medium
    coli info --model /tmp/medium

Formats are those of common containers: int4 with one scale a row, embedding, head and indexer
int8 with one scale a row, norms and routers F32. Codes are spread like those of a trained matrix
(normal, the largest at about four deviations), and scales keep the size of what passes through,
so that hidden values stay finite and tokens choose different experts. Every tensor is drawn from
(seed, name) alone: the bytes depend on nothing else.

| preset | model | bytes |
|---|---|---|
| medium | hidden 2048, 64 experts of width 768, 1 dense and 8 sparse layers | 1.4 GB |
| layers3 | the widths of GLM-5.2, 256 experts, 1 dense and 2 sparse layers | 10 GB |

`--indexer` adds the sparse-attention indexer to every layer; without it attention is dense. No
tokenizer is written: run it with `--ids`, or measure it with `coli bench`. Needs numpy.
"""

import argparse
import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from formats import CONFIG, tensor_shapes  # noqa: E402

HEADS = {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "kv_lora_rank": 512}
INDEX = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048}
COMMON = CONFIG | HEADS | INDEX | {"vocab_size": 8192, "num_experts_per_tok": 8}
COMMON |= {"rms_norm_eps": 1e-05, "max_position_embeddings": 202752}
PRESETS = {
    "medium": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "intermediate_size": 4096,
        "n_routed_experts": 64,
        "num_attention_heads": 16,
        "q_lora_rank": 768,
        "num_hidden_layers": 9,
    },
    "layers3": {
        "hidden_size": 6144,
        "moe_intermediate_size": 2048,
        "intermediate_size": 12288,
        "n_routed_experts": 256,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "num_hidden_layers": 3,
    },
}
SHARD_BYTES = 2_000_000_000
CODES = 1 << 16  # codes that are drawn once; a matrix picks from them
# What each layer adds to the hidden values, so that they do not grow with every layer.
ADDED = 0.5


def draws(seed, name):
    """Random numbers that depend on the seed and the name alone."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))


def code_table(bits):
    """Bytes of normally spread codes, and the deviation of one code."""
    top = 2 ** (bits - 1) - 1
    values = draws(0, "codes").standard_normal(CODES * (8 // bits)) * top / 4
    codes = np.clip(np.rint(values), -top, top).astype(np.int64)
    if bits == 8:
        return codes.astype(np.int8).view(np.uint8), codes.std()
    low, high = (codes + 8).reshape(2, CODES)
    return (low | high << 4).astype(np.uint8), codes.std()


TABLES = {bits: code_table(bits) for bits in (4, 8)}


def code_bits(name, shape):
    """Bits of a weight, 32 for a float."""
    if len(shape) == 1 or name.endswith("mlp.gate.weight"):
        return 32
    in_8_bits = name in ("model.embed_tokens.weight", "lm_head.weight") or ".indexer." in name
    return 8 if in_8_bits else 4


def floats(name, shape, seed):
    """Norms around 1, biases around 0, and routers whose logits spread by about 1."""
    values = draws(seed, name).standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return 1 + values * np.float32(0.05)
    return values * np.float32(0.02 if len(shape) == 1 else 1 / math.sqrt(shape[1]))


def codes(name, nbytes, bits, seed):
    picks = draws(seed, name).integers(0, CODES, nbytes, np.uint16)
    return TABLES[bits][0][picks]


def scales(name, shape, bits, seed):
    """One a row; a row of the matrix then maps values of size 1 to about 1."""
    size = 1 / math.sqrt(shape[1])
    if name == "model.embed_tokens.weight":
        size = 1
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        size *= ADDED
    spread = draws(seed, name + ".qs").uniform(0.8, 1.25, shape[0])
    return (size / TABLES[bits][1] * spread).astype("<f4")


def stored(name, shape, seed):
    """What files hold of one tensor: (name, dtype, shape, bytes, a function that makes it)."""
    bits = code_bits(name, shape)
    if bits == 32:
        nbytes = 4 * math.prod(shape)
        return [(name, "F32", shape, nbytes, lambda: floats(name, shape, seed))]
    nbytes = math.prod(shape) * bits // 8
    qs = name + ".qs", "F32", shape[:1], 4 * shape[0], lambda: scales(name, shape, bits, seed)
    return [(name, "U8", (nbytes,), nbytes, lambda: codes(name, nbytes, bits, seed)), qs]


def shard_header(entries):
    """The bytes before the data of `entries`, which are laid out in their order."""
    header, offset = {}, 0
    for name, dtype, shape, nbytes, _ in entries:
        offsets = [offset, offset + nbytes]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(path, entries):
    """Writes `entries` in their order, one tensor in memory at a time.

    An entry is (name, dtype, shape, bytes, a function that returns an array or yields several).
    """
    with open(path, "wb") as file:
        file.write(shard_header(entries))
        for name, _, _, nbytes, make in entries:
            before, made = file.tell(), make()
            for part in [made] if isinstance(made, np.ndarray) else made:
                file.write(np.ascontiguousarray(part).data)
            if file.tell() - before != nbytes:
                raise ValueError(f"{name}: {file.tell() - before} bytes, expected {nbytes}")
    written = sum(entry[3] for entry in entries)
    print(f"{path.name}: {len(entries)} tensors, {written / 1e9:.2f} GB", flush=True)


def shards(tensors, prefix):
    """Cuts tensors, in order of the model, into files: name -> entries, floats first."""
    files, filled = [[]], 0
    for entries in tensors:
        nbytes = sum(entry[3] for entry in entries)
        if filled + nbytes > SHARD_BYTES and files[-1]:
            files.append([])
            filled = 0
        files[-1] += entries
        filled += nbytes
    for file in files:
        file.sort(key=lambda entry: (entry[1] != "F32", entry[0]))
    return {f"{prefix}-{i:05}.safetensors": file for i, file in enumerate(files)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--to", type=Path, required=True, help="directory to write, not there yet")
    parser.add_argument("--indexer", action="store_true", help="sparse attention")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    config = COMMON | PRESETS[args.preset]
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["indexer_types"] = ["full"] * config["num_hidden_layers"]
    main_part, index_part = [], []
    for name, shape in tensor_shapes(config).items():
        part = index_part if ".indexer." in name else main_part
        part.append(stored(name, shape, args.seed))
    files = shards(main_part, "out")
    if args.indexer:
        files |= shards(index_part, "out-idx")
    args.to.mkdir(parents=True)
    (args.to / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for file, entries in files.items():
        write_shard(args.to / file, entries)


if __name__ == "__main__":
    main()
