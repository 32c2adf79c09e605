"""Writes tests/fixtures/formats: one tiny model per weight encoding, and decode goldens.

Every model is random, is encoded, is *decoded again from the bytes just encoded* by the plain
decoder below, and is evaluated on those decoded weights by reference.py in float64. So the
stored logits are those of the encoded model, and an engine must reproduce them however coarse
the encoding is. The decoder is written from the layout tables and shares nothing with the
encoders but the block sizes.

    python formats.py tests/fixtures/formats

Deterministic: the same numpy gives the same files. Nothing else is needed and nothing fetched.

Shapes are chosen so that most rows end inside a group, a block or a byte. An encoding of a
container is recognised by sizes alone, so `resolve` asserts for every matrix that these sizes
mean the encoding that was written.
"""

import json
import math
import sys
from itertools import count
from pathlib import Path

import numpy as np

from reference import Reference

TOKENS, PROMPT = 24, 16
# What a seed must give: no decision so close that float32 rounding could turn it.
GAP_MIN, CUT_MIN = 5e-3, 3e-4
INT4_GROUPS = (16, 32, 48, 64, 96, 128, 192, 256)


def ceil_div(a, b):
    return -(-a // b)


# --- Numbers of few bits, as tables of exact values ---------------------------------------------


def e4m3(code):
    """FP8: 1 sign, 4 exponent (bias 7), 3 mantissa bits. No infinity; 0x7f and 0xff are NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3 = np.array([e4m3(code) for code in range(256)])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nearest(table, values):
    """The code whose value is nearest."""
    return np.nanargmin(np.abs(table - values[..., None]), -1).astype(np.uint8)


def plain_bf16(w):
    """`w` rounded to the nearest bfloat16, ties to even: as a BF16 tensor, and widened again."""
    bits = np.ascontiguousarray(w, np.float32).view(np.uint32).astype(np.uint64)
    bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    widened = (bits.astype(np.uint32) << 16).view(np.float32)
    return ("BF16", w.shape, bits.tobytes()), widened


def plain_f32(w):
    return ("F32", w.shape, np.asarray(w, "<f4").tobytes()), w


# --- Decoder: one formula a format, for arrays of row numbers r and column numbers c ------------


def decode(form, rows, cols, weights, scales, scalar=1.0):
    """The float32 matrix that the bytes `weights` and `scales` stand for.

    Each product is exact in float64 and then rounded to float32 once.
    """
    w = np.frombuffer(weights, np.uint8).astype(np.int64)
    s = np.frombuffer(scales, "u1" if form == "nvfp4" else "<f4")
    r, c = np.arange(rows)[:, None], np.arange(cols)[None, :]
    if form in ("bf16", "f16", "f32"):
        plain = np.frombuffer(weights, {"bf16": "<u2", "f16": "<f2", "f32": "<f4"}[form])
        if form == "bf16":
            plain = (plain.astype("<u4") << 16).view("<f4")
        return plain.astype(np.float32).reshape(rows, cols)
    if form == "int8-row":
        byte = w[r * cols + c]
        code, scale = byte - 256 * (byte >= 128), s[r + 0 * c]
    elif form == "int4-row" or form.startswith("int4-g"):
        code = (w[r * ceil_div(cols, 2) + c // 2] >> 4 * (c % 2) & 15) - 8
        group = cols if form == "int4-row" else int(form[6:])
        scale = s[r * ceil_div(cols, group) + c // group]
    elif form == "int2-row":
        code = (w[r * ceil_div(cols, 4) + c // 4] >> 2 * (c % 4) & 3) - 2
        scale = s[r + 0 * c]
    elif form == "int3-g64":
        block = (r * ceil_div(cols, 64) + c // 64) * 24
        low = w[block + c % 64 // 4] >> 2 * (c % 4) & 3
        high = w[block + 16 + c % 64 // 8] >> c % 8 & 1
        code = low + 4 * high - 4
        scale = s[r * ceil_div(cols, 64) + c // 64]
    elif form == "fp8-e4m3-b128":
        code = E4M3[w[r * cols + c]]
        scale = s[r // 128 * ceil_div(cols, 128) + c // 128]
    elif form == "nvfp4":
        code = E2M1[w[r * ceil_div(cols, 2) + c // 2] >> 4 * (c % 2) & 15]
        scale = E4M3[s[r * ceil_div(cols, 16) + c // 16]] * np.float64(np.float32(scalar))
    else:
        raise ValueError(form)
    with np.errstate(over="ignore"):
        return (code * scale.astype(np.float64)).astype(np.float32)


# --- Encoders: (weight bytes, scale bytes, scalar) ----------------------------------------------


def integer_codes(w, group, bits, choose=None):
    """Codes [O, I] and scales [O, groups] of the symmetric integer quantizer.

    `choose` has the last word on the scales: (groups, scales, top) to scales.
    """
    rows, cols = w.shape
    top = 2 ** (bits - 1) - 1
    padded = np.zeros((rows, ceil_div(cols, group) * group), np.float32)
    padded[:, :cols] = w
    padded = padded.reshape(rows, -1, group)
    scales = np.maximum(np.abs(padded).max(-1) / np.float32(top), np.float32(1e-8))
    scales = choose(padded, scales, top) if choose else scales
    codes = np.clip(np.rint(padded / scales[..., None]), -top - 1, top).astype(np.int64)
    return codes.reshape(rows, -1)[:, :cols], scales.astype("<f4")


def pack(codes, bits, padding=0):
    """Rows of `bits`-wide codes, lowest bits first, each row to a whole byte."""
    per_byte = 8 // bits
    ragged = -codes.shape[1] % per_byte
    codes = np.pad(codes, ((0, 0), (0, ragged)), constant_values=padding)
    codes = codes.reshape(codes.shape[0], -1, per_byte)
    return (codes << np.arange(per_byte) * bits).sum(-1).astype(np.uint8).tobytes()


def pack_int3(codes, padding=4):
    """24 bytes per 64 codes 0…7: 16 of low bit pairs, 8 of high bits."""
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 64)), constant_values=padding)
    blocks = codes.reshape(-1, 64)
    low = np.frombuffer(pack(blocks & 3, 2), np.uint8).reshape(-1, 16)
    high = np.frombuffer(pack(blocks >> 2, 1), np.uint8).reshape(-1, 8)
    return np.concatenate([low, high], 1).tobytes()


def encode_fp8(w):
    rows, cols = w.shape
    scales = np.empty((ceil_div(rows, 128), ceil_div(cols, 128)), "<f4")
    codes = np.empty((rows, cols), np.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            scales[i, j] = max(np.abs(w[block]).max() / 448, 1e-8)
            codes[block] = nearest(E4M3, w[block] / np.float64(scales[i, j]))
    return codes.tobytes(), scales.tobytes(), 1.0


def encode_nvfp4(w):
    rows, cols = w.shape
    padded = np.zeros((rows, ceil_div(cols, 16) * 16))
    padded[:, :cols] = w
    padded = padded.reshape(rows, -1, 16)
    scalar = np.float32(np.abs(w).max() / (6 * 448))
    scales = nearest(E4M3[:127], np.abs(padded).max(-1) / 6 / scalar)
    step = np.where(E4M3[scales] == 0, 1, E4M3[scales]) * scalar
    codes = nearest(E2M1, padded / step[..., None]).reshape(rows, -1)[:, :cols]
    return pack(codes.astype(np.int64), 4), scales.tobytes(), float(scalar)


def encode(form, w, choose=None):
    """(weight bytes, scale bytes, scalar) of the float32 matrix `w`; see `integer_codes`."""
    if form == "fp8-e4m3-b128":
        return encode_fp8(w)
    if form == "nvfp4":
        return encode_nvfp4(w)
    bits = int(form[3])
    group = w.shape[1] if form.endswith("-row") else int(form[6:])
    codes, scales = integer_codes(w, group, bits, choose)
    if bits == 8:
        return codes.astype(np.int8).tobytes(), scales.tobytes(), 1.0
    codes = codes + 2 ** (bits - 1)
    packed = pack_int3(codes) if bits == 3 else pack(codes, bits)
    return packed, scales.tobytes(), 1.0


def resolve(rows, cols, weight_bytes, scale_bytes):
    """The format that a container reader must see in these sizes. Stamps not considered."""
    if weight_bytes == rows * cols:
        blocks = ceil_div(rows, 128) * ceil_div(cols, 128)
        assert blocks != rows, "row scales and block scales have the same size"
        return {4 * rows: "int8-row", 4 * blocks: "fp8-e4m3-b128"}[scale_bytes]
    if weight_bytes == rows * ceil_div(cols, 2):
        if scale_bytes == 4 * rows:
            return "int4-row"
        groups = (g for g in INT4_GROUPS if g <= cols)
        return f"int4-g{next(g for g in groups if scale_bytes == 4 * rows * ceil_div(cols, g))}"
    if weight_bytes == rows * ceil_div(cols, 4):
        assert scale_bytes == 4 * rows
        return "int2-row"
    assert weight_bytes == rows * ceil_div(cols, 64) * 24
    assert scale_bytes == 4 * rows * ceil_div(cols, 64)
    return "int3-g64"


# --- Files --------------------------------------------------------------------------------------

PLAIN = {"f32": plain_f32, "bf16": plain_bf16}
ELEMENT_BYTES = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}


def write_safetensors(path, tensors, metadata=None):
    """`tensors`: name -> (dtype, shape, bytes). Widest elements first, then by name."""
    order = sorted(tensors, key=lambda name: (-ELEMENT_BYTES[tensors[name][0]], name))
    header, offset = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name in order:
        dtype, shape, data = tensors[name]
        assert len(data) == math.prod(shape) * ELEMENT_BYTES[dtype], name
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(tensors[name][2])


def container_class(name, w):
    """Which of a container's rules stores a tensor: float, io, expert or resident."""
    if w.ndim != 2 or name.endswith(("norm.weight", "mlp.gate.weight")):
        return "float"
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return "io"
    return "expert" if ".mlp.experts." in name else "resident"


def container_tensors(weights, forms):
    """Encodes a model as container tensors; `forms` maps a class to its format.

    Returns the tensors, the decoded model and the format of each quantized tensor.
    """
    tensors, decoded, used = {}, {}, {}
    for name, w in weights.items():
        form = forms[container_class(name, w)]
        if form in PLAIN:
            form = "f32" if name.endswith("e_score_correction_bias") else form
            tensors[name], decoded[name] = PLAIN[form](w)
            continue
        data, scales, _ = encode(form, w)
        decoded[name] = decode(form, *w.shape, data, scales)
        used[name] = resolve(*w.shape, len(data), len(scales))
        # One group a row is the same thing as a row, and is seen as that.
        one_group = form.startswith("int4-g") and w.shape[1] <= int(form[6:])
        assert used[name] == ("int4-row" if one_group else form), (name, w.shape, used[name])
        tensors[name] = "U8", (len(data),), data
        tensors[name + ".qs"] = "F32", (len(scales) // 4,), scales
    return tensors, decoded, used


def write_container(directory, weights, forms, stamped=False, shards=False):
    tensors, decoded, used = container_tensors(weights, forms)
    experts = [form for name, form in used.items() if ".experts." in name]
    assert forms["expert"] in experts, "no expert shows the format"
    metadata = None
    if stamped:
        stamps = {n: form for n, form in used.items() if container_class(n, weights[n]) != "expert"}
        metadata = {"colibri.fmt": json.dumps(stamps)}
    if not shards:
        write_safetensors(directory / "out-00000.safetensors", tensors, metadata)
        return decoded
    # As a conversion in shards leaves it: cut inside an expert, one shard without tensors,
    # the indexer in files of its own.
    of_index = {name: t for name, t in tensors.items() if ".indexer." in name}
    main = {name: t for name, t in tensors.items() if ".indexer." not in name}
    cut = "model.layers.1.mlp.experts.2.gate_proj.weight"
    write_safetensors(
        directory / "out-00000.safetensors", {n: t for n, t in main.items() if n < cut}
    )
    write_safetensors(directory / "out-00001.safetensors", {})
    assert (directory / "out-00001.safetensors").stat().st_size == 16
    write_safetensors(
        directory / "out-00002.safetensors", {n: t for n, t in main.items() if n >= cut}
    )
    write_safetensors(directory / "out-idx-00000.safetensors", of_index)
    return decoded


def published_form(kind, name, w):
    """How a published checkpoint of this kind stores a tensor."""
    if name.endswith("e_score_correction_bias"):
        return "f32"
    kept = name.endswith(("norm.weight", "norm.bias", "mlp.gate.weight", "weights_proj.weight"))
    if kind == "bf16" or w.ndim == 1 or kept or container_class(name, w) == "io":
        return "bf16"
    # NVFP4 packs two columns a byte: a matrix of odd width stays as it was.
    return "bf16" if kind == "nvfp4" and w.shape[1] % 2 else kind


def write_published(directory, weights, kind):
    """A checkpoint as published: 2-D shapes, sidecars, two shards and their index."""
    tensors, decoded = {}, {}
    for name, w in weights.items():
        form = published_form(kind, name, w)
        if form in PLAIN:
            tensors[name], decoded[name] = PLAIN[form](w)
            continue
        rows, cols = w.shape
        data, scales, scalar = encode(form, w)
        decoded[name] = decode(form, rows, cols, data, scales, scalar)
        if form == "nvfp4":
            assert 0 < scalar < 1
            tensors[name] = "U8", (rows, cols // 2), data
            tensors[name + "_scale"] = "F8_E4M3", (rows, ceil_div(cols, 16)), scales
            tensors[name + "_scale_2"] = "F32", (), np.float32(scalar).tobytes()
            # An activation scale, which weight-only readers must pass over.
            input_scale = name.removesuffix("weight") + "input_scale"
            tensors[input_scale] = "F32", (), np.float32(0.015625).tobytes()
        else:
            tensors[name] = "F8_E4M3", (rows, cols), data
            shape = (ceil_div(rows, 128), ceil_div(cols, 128))
            tensors[name + "_scale_inv"] = "F32", shape, scales
    names = sorted(tensors)
    where = {}
    for k, part in enumerate([names[: len(names) // 2], names[len(names) // 2 :]]):
        file = f"model-{k + 1:05}-of-00002.safetensors"
        write_safetensors(directory / file, {n: tensors[n] for n in part}, {"format": "pt"})
        where |= {name: file for name in part}
    size = sum(len(data) for _, _, data in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    text = json.dumps(index, separators=(",", ":"))
    (directory / "model.safetensors.index.json").write_text(text)
    return decoded


# --- Random models ------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "float32",
    "attention_bias": False,
    "eos_token_id": None,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 56,
    "index_head_dim": 12,
    "index_n_heads": 8,
    "index_topk": 8,
    "indexer_types": ["full", "full", "shared"],
    "intermediate_size": 44,
    "kv_lora_rank": 25,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 22,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "q_lora_rank": 36,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 18,
    "vocab_size": 64,
}
# Rows of one group of 64 and a ragged second one, where no smaller group size has as many.
WIDE = {"hidden_size": 104, "moe_intermediate_size": 14, "intermediate_size": 100}
WIDE |= {"n_routed_experts": 3, "q_lora_rank": 34, "v_head_dim": 50, "vocab_size": 40}
# More than 128 rows, or columns, or both in turn: several scale blocks, the last one ragged.
TALL = {"hidden_size": 32, "intermediate_size": 140, "moe_intermediate_size": 130}
TALL |= {"n_routed_experts": 3, "num_hidden_layers": 2, "indexer_types": ["full", "full"]}
TALL |= {"q_lora_rank": 20, "qk_nope_head_dim": 60, "v_head_dim": 70, "kv_lora_rank": 16}
TALL |= {"vocab_size": 40}
ODD = {"hidden_size": 57, "moe_intermediate_size": 23, "intermediate_size": 45}
SHORT = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "vocab_size": 40}


def tensor_shapes(c):
    """Name -> shape of every tensor of the main model."""
    hidden, heads, rope = c["hidden_size"], c["num_attention_heads"], c["qk_rope_head_dim"]
    q_lora, kv_lora, nope = c["q_lora_rank"], c["kv_lora_rank"], c["qk_nope_head_dim"]
    values, index_dim, index_heads = c["v_head_dim"], c["index_head_dim"], c["index_n_heads"]
    shapes = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden),
        "lm_head.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }

    def ffn(prefix, width):
        shapes[prefix + "gate_proj.weight"] = width, hidden
        shapes[prefix + "up_proj.weight"] = width, hidden
        shapes[prefix + "down_proj.weight"] = hidden, width

    for layer, kind in enumerate(c["indexer_types"]):
        attention = f"model.layers.{layer}.self_attn."
        shapes |= {
            f"model.layers.{layer}.input_layernorm.weight": (hidden,),
            f"model.layers.{layer}.post_attention_layernorm.weight": (hidden,),
            attention + "q_a_proj.weight": (q_lora, hidden),
            attention + "q_a_layernorm.weight": (q_lora,),
            attention + "q_b_proj.weight": (heads * (nope + rope), q_lora),
            attention + "kv_a_proj_with_mqa.weight": (kv_lora + rope, hidden),
            attention + "kv_a_layernorm.weight": (kv_lora,),
            attention + "kv_b_proj.weight": (heads * (nope + values), kv_lora),
            attention + "o_proj.weight": (hidden, heads * values),
        }
        if kind == "full":
            shapes |= {
                attention + "indexer.wq_b.weight": (index_heads * index_dim, q_lora),
                attention + "indexer.wk.weight": (index_dim, hidden),
                attention + "indexer.k_norm.weight": (index_dim,),
                attention + "indexer.k_norm.bias": (index_dim,),
                attention + "indexer.weights_proj.weight": (index_heads, hidden),
            }
        mlp = f"model.layers.{layer}.mlp."
        if layer < c["first_k_dense_replace"]:
            ffn(mlp, c["intermediate_size"])
            continue
        shapes[mlp + "gate.weight"] = c["n_routed_experts"], hidden
        shapes[mlp + "gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for expert in range(c["n_routed_experts"]):
            ffn(f"{mlp}experts.{expert}.", c["moe_intermediate_size"])
        ffn(mlp + "shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"])
    return shapes


def random_model(config, seed):
    """Every tensor non-trivial: norms around 1, biases around 0, rows of uneven size."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in sorted(tensor_shapes(config).items()):
        values = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif len(shape) == 1:
            values = 0.1 * values
        elif name != "model.embed_tokens.weight":
            values *= np.exp(0.3 * rng.standard_normal((shape[0], 1))) / np.sqrt(shape[1])
        weights[name] = values.astype(np.float32)
    prompt = rng.integers(0, config["vocab_size"], PROMPT).tolist()
    return weights, prompt


def continue_greedily(config, weights, tokens):
    """Runs to TOKENS tokens. The result of the last run, and the tokens."""
    tokens = list(tokens)
    while True:
        result = Reference(config, weights).run(tokens)
        if len(tokens) == TOKENS:
            return result, tokens
        tokens.append(int(result["logits"][-1].argmax()))


def write_fixture(root, name, changes, write, seed_from=1):
    """Writes one directory from the first seed that comes near no tie."""
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    config = CONFIG | changes
    for seed in count(seed_from):
        weights, prompt = random_model(config, seed)
        decoded = write(directory, weights)
        result, tokens = continue_greedily(config, decoded, prompt)
        top = np.sort(result["logits"], -1)
        gap = float((top[:, -1] - top[:, -2]).min())
        cuts = {key: float(result[key]) for key in ("router_min", "index_min")}
        if gap > GAP_MIN and min(cuts.values()) > CUT_MIN:
            break
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    result["logits"].astype("<f4").tofile(directory / "logits_gold.f32")
    reference = {
        "prompt_ids": prompt,
        "full_ids": tokens,
        "tf_pred": result["logits"].argmax(-1).tolist(),
        "vocab": config["vocab_size"],
        "seed": seed,
        "gap_min": gap,
        "cuts": cuts,
    }
    (directory / "ref.json").write_text(json.dumps(reference) + "\n")
    trace = {key: result[key] for key in ("router", "indexer_selected")}
    (directory / "trace.json").write_text(json.dumps(trace, separators=(",", ":")) + "\n")
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{name}: seed {seed}, {size} bytes, gap {gap:.1e}, cuts {cuts}")


def write_fixtures(root):
    def container(form, **options):
        forms = {"float": "f32", "io": form, "resident": form, "expert": form}
        forms |= options.pop("forms", {})
        return lambda directory, weights: write_container(directory, weights, forms, **options)

    def published(kind):
        return lambda directory, weights: write_published(directory, weights, kind)

    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    fp8 = {"quantization_config": fp8 | {"weight_block_size": [128, 128]}}
    nvfp4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    bf16 = ODD | SHORT | {"dtype": "bfloat16", "n_routed_experts": 3, "intermediate_size": 25}
    bf16 |= {"q_lora_rank": 30}
    mixed = {"io": "int8-row", "resident": "int8-row"}
    narrow = WIDE | SHORT | {"v_head_dim": 30}
    # A pass-through of published FP8 keeps what was not FP8 as BF16.
    passed = {"float": "bf16", "io": "bf16"}
    write_fixture(root, "int8-row", ODD | SHORT, container("int8-row"))
    write_fixture(root, "int4-row", ODD, container("int4-row"))
    write_fixture(root, "int2-row", ODD, container("int2-row"))
    write_fixture(root, "int4-g16", SHORT, container("int4-g16"))
    write_fixture(root, "int4-g32", {}, container("int4-g32"))
    write_fixture(root, "int4-g64", WIDE | SHORT, container("int4-g64"))
    write_fixture(root, "int3-g64", WIDE | SHORT, container("int3-g64"))
    write_fixture(root, "fp8-block", TALL, container("fp8-e4m3-b128", forms=passed, stamped=True))
    write_fixture(root, "mixed", narrow, container("int4-g64", forms=mixed, shards=True))
    write_fixture(root, "hf-bf16", bf16, published("bf16"))
    write_fixture(root, "hf-fp8", TALL | fp8, published("fp8-e4m3-b128"))
    write_fixture(root, "hf-nvfp4", SHORT | nvfp4, published("nvfp4"))


# --- Decode goldens -----------------------------------------------------------------------------


def golden(form, rows, cols, weights, scales, scalar=1.0):
    values = decode(form, rows, cols, weights, scales, scalar)
    return {
        "format": form,
        "rows": rows,
        "cols": cols,
        "weights_hex": weights.hex(),
        "scales_hex": scales.hex(),
        "scalar": f"{np.float32(scalar).view(np.uint32):08x}",
        "values": " ".join(f"{bits:08x}" for bits in values.view(np.uint32).ravel()),
    }


def decode_goldens():
    """Every code of every format, ragged ends, and both paddings that writers leave there."""
    rng = np.random.default_rng(2)

    def scales(n):
        # Ordinary ones, the smallest a quantizer writes, and one that is no power of two.
        ordinary = rng.uniform(0.001, 0.1, n).astype("<f4")
        ordinary[-1] = 1e-8
        ordinary[0] = np.float32(1 / 7)
        return ordinary.tobytes()

    def every(n, rows, cols):
        # 5 is odd, so its multiples visit every code; neighbours differ in several bits.
        return (np.arange(rows * cols) * 5 % n).reshape(rows, cols)

    cases = []

    def add(*case):
        cases.append(golden(*case))

    add("int8-row", 2, 131, np.arange(262).astype(np.uint8).tobytes(), scales(2))
    for cols, padding in [(32, 0), (33, 0), (33, 8), (33, 15), (1, 8)]:
        add("int4-row", 3, cols, pack(every(16, 3, cols), 4, padding), scales(3))
    for cols, padding in [(16, 0), (17, 0), (18, 3), (19, 2), (1, 1)]:
        add("int2-row", 3, cols, pack(every(4, 3, cols), 2, padding), scales(3))
    for group, cols, padding in [(16, 35, 0), (16, 35, 8), (32, 65, 8), (64, 100, 0), (48, 97, 8)]:
        weights = pack(every(16, 2, cols), 4, padding)
        add(f"int4-g{group}", 2, cols, weights, scales(2 * ceil_div(cols, group)))
    for cols, padding in [(64, 0), (67, 0), (67, 4), (67, 7), (7, 4), (130, 0)]:
        weights = pack_int3(every(8, 2, cols), padding)
        add("int3-g64", 2, cols, weights, scales(2 * ceil_div(cols, 64)))
    # All 256 codes: zeros of both signs, subnormals, ±448, both NaN. Then several blocks.
    codes = np.arange(258).astype(np.uint8).tobytes()
    add("fp8-e4m3-b128", 2, 129, codes, np.array([1, 1 / 3], "<f4").tobytes())
    codes = (np.arange(130 * 2) * 7).astype(np.uint8).tobytes()
    add("fp8-e4m3-b128", 130, 2, codes, scales(2))
    # Subnormal results: the product must be rounded as float32 rounds, not flushed.
    tiny = np.array([3e-39, 1e-38], "<f4").tobytes()
    add("fp8-e4m3-b128", 1, 129, codes[:129], tiny)
    add("int8-row", 2, 3, bytes([128, 127, 1, 255, 0, 3]), tiny)
    # All 16 codes under scales of every kind: zero, subnormal, 448, negative, NaN.
    block_scales = bytes([0x00, 0x01, 0x7E, 0x38, 0xB9, 0x7F, 0x08, 0x45])
    add("nvfp4", 2, 64, pack(every(16, 2, 64), 4), block_scales, 0.0123)
    add("nvfp4", 2, 24, pack(every(16, 2, 24), 4), bytes([0x38, 0x31, 0x50, 0x07]), 1 / 2688)
    # Plain floats: infinities, subnormals, both zeros, the largest finite, a NaN.
    bf16 = np.array([0x3F80, 0x8000, 0x0001, 0x7F80, 0xFF7F, 0x7FC0, 0x4049, 0xBEAB], "<u2")
    add("bf16", 2, 4, bf16.tobytes(), b"")
    f16 = np.array([0x3C00, 0x8000, 0x0001, 0x7C00, 0xFBFF, 0x7E00, 0x03FF, 0xB555], "<u2")
    add("f16", 2, 4, f16.tobytes(), b"")
    f32 = np.array([0x3F800000, 0x80000000, 1, 0x7F800000, 0xFF7FFFFF, 0x7FC00000], "<u4")
    add("f32", 2, 3, f32.tobytes(), b"")
    return cases


def main(root):
    root.mkdir(parents=True, exist_ok=True)
    cases = decode_goldens()
    lines = ",\n".join(json.dumps(case) for case in cases)
    (root / "decode.json").write_text(f"[\n{lines}\n]\n")
    write_fixtures(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
