"""Converts a small BF16 checkpoint with an MTP layer to the container in oracle/demo.

    python demo.py SOURCE oracle/demo     converts
    python demo.py --check oracle/demo    evaluates the container with reference.py

The container is of the recommended kind: attention, dense and shared MLPs, indexer, embedding
and head int8 with one scale a row, routed experts int4 with one scale per 64 columns, norms and
routers F32. Layer num_hidden_layers is the MTP layer; it and the indexers of the main layers go
into files of their own, as converters do it. Two liberties keep the whole below 10 MB: routed
experts of the MTP layer are int4 as all others, and tokenizer.json loses its indentation.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from formats import container_tensors, decode, resolve, write_safetensors
from reference import Reference, read_model, read_safetensors, widen

FORMS = {"float": "f32", "io": "int8-row", "resident": "int8-row", "expert": "int4-g64"}
MTP_FILE = "out-mtp-00000.safetensors"
COPIED = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")
# Each word is one token of the model's vocabulary when a space precedes it.
SENTENCE = (
    "She was very happy to see her sister again , and they had been so long in the room that"
    " every thing she could say was said before Mr . Knightley came into it"
)


def file_of(name, layers):
    """The shard of a tensor; `.qs` tensors follow their weights."""
    if name.startswith(f"model.layers.{layers}."):
        return MTP_FILE
    return "out-idx-00000.safetensors" if ".indexer." in name else "out-00000.safetensors"


def convert(source, target):
    config, weights = read_model(source)
    layers = config["num_hidden_layers"]
    tensors = {}
    for name, w in weights.items():
        tensors |= container_tensors({name: w}, FORMS)[0]
    target.mkdir(parents=True, exist_ok=True)
    shards = {}
    for name, tensor in tensors.items():
        shards.setdefault(file_of(name, layers), {})[name] = tensor
    for file, part in shards.items():
        write_safetensors(target / file, part)
    for file in COPIED:
        shutil.copyfile(source / file, target / file)
        (target / file).chmod(0o644)
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    text = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    (target / "tokenizer.json").write_text(text + "\n", "utf-8")
    for path in sorted(target.iterdir()):
        print(f"{path.stat().st_size:9} {path.name}")
    print(f"{sum(path.stat().st_size for path in target.iterdir()):9} in all")


def read_container(directory, shapes):
    """Every tensor decoded. `shapes` gives the [O, I] of those that are stored flat."""
    stored = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored |= read_safetensors(path)
    weights = {}
    for name, (dtype, array) in stored.items():
        if name.endswith(".qs"):
            continue
        if name + ".qs" not in stored:
            weights[name] = widen(dtype, array)
            continue
        scales = stored[name + ".qs"][1]
        form = resolve(*shapes(name), array.nbytes, scales.nbytes)
        weights[name] = decode(form, *shapes(name), array.tobytes(), scales.tobytes())
    return weights


def matrix_shape(config, name):
    """[O, I] of a matrix of the model."""
    c, hidden, kind = config, config["hidden_size"], name.split(".")[-2]
    q_lora, kv_lora, heads = c["q_lora_rank"], c["kv_lora_rank"], c["num_attention_heads"]
    nope, rope, values = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    width = c["moe_intermediate_size"] if "experts" in name else c["intermediate_size"]
    return {
        "embed_tokens": (c["vocab_size"], hidden),
        "lm_head": (c["vocab_size"], hidden),
        "q_a_proj": (q_lora, hidden),
        "q_b_proj": (heads * (nope + rope), q_lora),
        "kv_a_proj_with_mqa": (kv_lora + rope, hidden),
        "kv_b_proj": (heads * (nope + values), kv_lora),
        "o_proj": (hidden, heads * values),
        "wq_b": (c["index_n_heads"] * c["index_head_dim"], q_lora),
        "wk": (c["index_head_dim"], hidden),
        "weights_proj": (c["index_n_heads"], hidden),
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
        "eh_proj": (hidden, 2 * hidden),
    }[kind]


def perplexity(model, tokens):
    logits = model.run(tokens)["logits"]
    logits -= logits.max(-1, keepdims=True)
    chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(np.exp(-np.mean([chances[t, tokens[t + 1]] for t in range(len(tokens) - 1)])))


def check(directory):
    """A sentence must be far likelier than the same words backwards."""
    config = json.loads((directory / "config.json").read_text())
    weights = read_container(directory, lambda name: matrix_shape(config, name))
    tokenizer = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    words = [word if word in ",." else "\u0120" + word for word in SENTENCE.split()]
    tokens = [vocabulary[word] for word in words]
    model = Reference(config, weights)
    forwards, backwards = perplexity(model, tokens), perplexity(model, tokens[::-1])
    print(f"perplexity of {len(tokens)} tokens: {forwards:.1f}, backwards {backwards:.1f}")
    return 0 if forwards * 10 < backwards else 1


def main(arguments):
    if arguments[0] == "--check":
        return check(Path(arguments[1]))
    return convert(*map(Path, arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
