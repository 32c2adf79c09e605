"""Writes a container of GLM-5.2 at full size whose files are almost all holes.

    python oracle/hollow.py --to /tmp/hollow
    coli run --model /tmp/hollow --temp 0 -n 4 --ids 1,2,3          # gives 4,5,6,7

Names, shapes, types, offsets, files and config.json are those of a real container, 384 GB in all;
on disk it takes half a gigabyte, on a file system with sparse files. So everything whose cost
grows with the size of the model can be tried without the model: opening, binding, the memory
plan, the store of experts, eviction. A hole costs no time of the disk, and a product with zeros
as much as any other.

| tensors | real data |
|---|---|
| embedding, output head | the rows of ids 0…999; the head's row n+1 is the embedding of n |
| norms, routers, router biases | all: ones, and random ones that choose experts by token |
| eh_proj of the MTP layer | the embedding half passes, the hidden half does not |
| all other matrices | none: codes and scales are holes, and a scale of 0 gives 0 |

No layer changes a hidden value then, and the token after n is n+1 (0 after 999): for the main
model whatever the context, and for the draft head too. A token's experts depend on the token and
the layer alone. Ids above 999 have a zero embedding: give `--ids` below 1000. There is no
tokenizer.

| `--format` | matrices of layers 0…77 | an expert |
|---|---|---|
| int4-row | int4, one scale a row (the common container) | 18,915,328 bytes |
| int4-g64 | int4, a scale per 64 columns | 21,233,664 bytes |

Embedding, head and the whole MTP layer (index 78) are int8 with one scale a row in both, routers,
norms and biases F32. `--indexer` adds the sparse-attention indexer of the 21 full layers, int8;
its scores are all zero. Weights are 1-D U8, scales 1-D F32 named `.qs`; a file holds F32 first,
then U8, each by name, behind a header padded to 8 bytes.

The files are cut as a converter leaves them: each is what it makes of one shard of the published
FP8 checkpoint, whose 141 shards hold up to 5 GiB in byte order of names. So an expert's three
matrices may lie in two files, one file (`out-00136`) has no tensor, and layer 78, which three
shards hold, gives three `out-mtp-` files. Needs numpy.
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import numpy as np

from bench.container import TABLES, codes, draws, shard_header
from formats import CONFIG, ceil_div, tensor_shapes
from reference import indexer_kinds

SPARSE_FROM, LAYERS = 3, 78
GLM_5_2 = CONFIG | {
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": SPARSE_FROM,
    "head_dim": 192,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_rope_interleave": True,
    "indexer_types": None,  # set below, by the rule of the three fields above
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * SPARSE_FROM + ["sparse"] * (LAYERS - SPARSE_FROM),
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
GLM_5_2["indexer_types"] = indexer_kinds(GLM_5_2)

SOURCE_SHARD_BYTES = 5 << 30
MTP = f"model.layers.{LAYERS}."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
REAL_IDS = 1000
SEED = 1


def all_shapes():
    """Name -> shape of every tensor, the MTP layer and all indexers included."""
    hidden = GLM_5_2["hidden_size"]
    shapes = tensor_shapes(GLM_5_2 | {"indexer_types": GLM_5_2["indexer_types"] + ["full"]})
    shapes[MTP + "eh_proj.weight"] = hidden, 2 * hidden
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        shapes[f"{MTP}{norm}.weight"] = (hidden,)
    return shapes


def source_sizes(name, shape):
    """Bytes of a tensor in the FP8 checkpoint, and of its block scales, which sort behind it."""
    if name.endswith("e_score_correction_bias"):
        return [4 * math.prod(shape)]
    in_bf16 = ("mlp.gate.weight", "eh_proj.weight", "weights_proj.weight", EMBEDDING, HEAD)
    if len(shape) == 1 or name.endswith(in_bf16):
        return [2 * math.prod(shape)]
    return [math.prod(shape), 4 * ceil_div(shape[0], 128) * ceil_div(shape[1], 128)]


def source_shards(shapes):
    """The names in each shard of the FP8 checkpoint."""
    shards, filled = [[]], 0
    for name in sorted(shapes):
        for part, nbytes in enumerate(source_sizes(name, shapes[name])):
            if filled + nbytes > SOURCE_SHARD_BYTES:
                shards.append([])
                filled = 0
            filled += nbytes
            if part == 0:
                shards[-1].append(name)
    return shards


def container_files(shapes, with_indexer):
    """File name -> names of its tensors, without scales."""
    files = {}
    passes = {
        "out": lambda name: not name.startswith(MTP) and ".indexer." not in name,
        "out-mtp": lambda name: name.startswith(MTP) and ".indexer." not in name,
        "out-idx": lambda name: not name.startswith(MTP) and ".indexer." in name,
    }
    if not with_indexer:
        del passes["out-idx"]
    for prefix, keeps in passes.items():
        kept = [list(filter(keeps, names)) for names in source_shards(shapes)]
        # The main pass leaves a file even of a shard that it takes nothing from.
        kept = [names for names in kept if names or prefix == "out"]
        files |= {f"{prefix}-{i:05}.safetensors": names for i, names in enumerate(kept)}
    return files


def ones(n):
    return np.ones(n, "<f4")


def floats(name, shape):
    """Real data of an F32 tensor: [(first byte, array)]."""
    if name.endswith("norm.weight"):
        return [(0, ones(shape[0]))]
    if name.endswith("k_norm.bias"):
        return []
    # Router logits spread by about 1, biases by much less: neither decides alone.
    size = 0.02 if len(shape) == 1 else 1 / math.sqrt(shape[1])
    return [(0, draws(SEED, name).standard_normal(shape, np.float32) * np.float32(size))]


def matrix(name, shape):
    """Real data of a matrix and of its scales: [(first byte, array)] each."""
    hidden = GLM_5_2["hidden_size"]
    if name == MTP + "eh_proj.weight":
        one = np.ones(1, np.uint8)
        return [(row * (2 * hidden + 1), one) for row in range(hidden)], [(0, ones(hidden))]
    if name not in (EMBEDDING, HEAD):
        return [], []
    rows = codes("ids", REAL_IDS * hidden, 8, SEED).reshape(REAL_IDS, hidden)
    scale = np.float32(1 / TABLES[8][1])  # embeddings of size 1
    if name == HEAD:
        rows, scale = np.roll(rows, 1, 0), scale / np.float32(math.sqrt(hidden))
    return [(0, rows)], [(0, ones(REAL_IDS) * scale)]


def stored(name, shape, form):
    """What a file holds of one tensor: (name, dtype, shape, bytes, a function of real data)."""
    if len(shape) == 1 or name.endswith("mlp.gate.weight"):
        return [(name, "F32", shape, 4 * math.prod(shape), lambda: floats(name, shape))]
    rows, cols = shape
    in_8_bits = name in (EMBEDDING, HEAD) or name.startswith(MTP) or ".indexer." in name
    nbytes = rows * cols if in_8_bits else rows * ceil_div(cols, 2)
    scales = rows if in_8_bits or form == "int4-row" else rows * ceil_div(cols, 64)
    return [
        (name, "U8", (nbytes,), nbytes, lambda: matrix(name, shape)[0]),
        (name + ".qs", "F32", (scales,), 4 * scales, lambda: matrix(name, shape)[1]),
    ]


def write_hollow(path, entries):
    """Writes the header and what is real of `entries`, and nothing between. Returns the bytes."""
    with open(path, "wb") as file:
        file.write(shard_header(entries))
        start = file.tell()
        for _, _, _, nbytes, real in entries:
            for first, array in real():
                file.seek(start + first)
                file.write(np.ascontiguousarray(array).data)
            start += nbytes
        file.truncate(start)
    return start


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="directory to write, not there yet")
    parser.add_argument("--format", choices=["int4-row", "int4-g64"], default="int4-row")
    parser.add_argument("--indexer", action="store_true", help="sparse attention")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to copy")
    args = parser.parse_args()
    args.to.mkdir(parents=True)
    (args.to / "config.json").write_text(json.dumps(GLM_5_2, indent=1) + "\n")
    if args.tokenizer:
        shutil.copy(args.tokenizer, args.to / "tokenizer.json")
    shapes, totals = all_shapes(), {}
    for file, names in container_files(shapes, args.indexer).items():
        entries = [entry for name in names for entry in stored(name, shapes[name], args.format)]
        entries.sort(key=lambda entry: (entry[1] != "F32", entry[0]))
        total = totals.setdefault(file.rpartition("-")[0], [0, 0, 0])
        for i, more in enumerate((1, len(entries), write_hollow(args.to / file, entries))):
            total[i] += more
    for prefix, (files, tensors, nbytes) in totals.items():
        print(f"{prefix}: {files} files, {tensors} tensors, {nbytes} bytes")


if __name__ == "__main__":
    main()
