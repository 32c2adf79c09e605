"""What `coli convert` must write, to the byte, by the encoders of formats.py.

    python convert.py SOURCE TARGET [CLASS=FORMAT …] [scales=search] [calibration=FILE]
    python convert.py --fixtures tests/fixtures        writes tests/fixtures/convert

The first converts a checkpoint. CLASS is a flag of `coli convert` without its dashes, FORMAT a
full name (int8-row) or off. Needs numpy alone, and memory for the whole checkpoint.

Fixtures: `encode.json` has small matrices in every source encoding, with ragged ends, rows of
zeros, ties and the smallest numbers, and what each of them is in every format of a container (those
in F32 also with scales that were searched for, plainly and with an importance of each column);
`a_seed.calibration` is what `coli score --calibrate` says of the reference tokens of a_seed;
`files.json` has length and FNV-1a64 of every file that some stored checkpoints become.
"""

import functools
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from formats import E2M1, E4M3, INT4_GROUPS, ceil_div, decode, encode, pack, write_safetensors
from reference import Reference, read_model, read_safetensors, widen

ROUTED = "experts"
DEFAULTS = dict.fromkeys(("attention", "dense", "shared", "io", "indexer", "mtp"), "int8-row")
DEFAULTS |= {ROUTED: "int4-g64"}
FAMILIES = {"main": "out-", "mtp": "out-mtp-", "index": "out-idx-"}
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
COPIED += ("chat_template.jinja",)
SIDECARS = ("_scale_inv", ".weight_scale", ".weight_scale_2", ".input_scale")


def family_of(name, layers):
    if name.startswith(f"model.layers.{layers}."):
        return "mtp"
    return "index" if ".indexer." in name else "main"


def class_of(name, family):
    """The flag that decides the format of a matrix; None for what stays F32."""
    kind = name.split(".")[-2]
    if kind.endswith("norm") or name.endswith("mlp.gate.weight") or not name.endswith(".weight"):
        return None
    if ".indexer." in name:
        return "indexer"
    if family == "mtp":
        return "mtp-experts" if ".mlp.experts." in name else "mtp"
    if kind in ("embed_tokens", "lm_head"):
        return "io"
    if ".mlp." in name:
        return {"experts": ROUTED, "shared_experts": "shared"}.get(name.split(".")[4], "dense")
    return {"o_proj": "o-proj", "kv_b_proj": "kv-b"}.get(kind, "attention")


def float_matrix(name, dtype, array, stored):
    """A weight of a checkpoint as float32."""
    if dtype == "F8_E4M3":
        scales = stored[name + "_scale_inv"][1].tobytes()
        return decode("fp8-e4m3-b128", *array.shape, array.tobytes(), scales)
    if dtype == "U8":
        scales, scalar = stored[name + "_scale"][1].tobytes(), float(stored[name + "_scale_2"][1])
        return decode("nvfp4", array.shape[0], 2 * array.shape[1], array.tobytes(), scales, scalar)
    return widen(dtype, array)


def search(groups, scales, top, importance=None):
    """The scale of least squared error among 49, and the largest of equals; all in float32.

    The scales are that of the largest weight, and each 31/32 of the one before. An error is the
    sum of sixteen sums: number i has the columns i, i + 16, …, one after another, each square
    times the importance of its column.
    """
    padded = np.pad(groups, ((0, 0), (0, 0), (0, -groups.shape[2] % 16)))
    padded = padded.reshape(*groups.shape[:2], -1, 16)
    counts = np.ones(groups.shape[1:], np.float32)
    if importance is not None:
        counts = np.pad(importance, (0, counts.size - len(importance))).reshape(counts.shape)
    counts = np.pad(counts, ((0, 0), (0, -groups.shape[2] % 16)))
    counts = counts.reshape(padded.shape[1:])

    def error(scale):
        scale = scale[..., None, None]
        codes = np.clip(np.rint(padded / scale), -top - 1, top).astype(np.float32)
        squares = np.square(padded - codes * scale) * counts
        lanes = np.zeros((*groups.shape[:2], 16), np.float32)
        for i in range(squares.shape[2]):
            lanes += squares[:, :, i]
        total = np.zeros(groups.shape[:2], np.float32)
        for i in range(16):
            total += lanes[..., i]
        return total

    best, least, scale = scales, error(scales), scales
    for _ in range(48):
        scale = scale * np.float32(31 / 32)
        found = error(scale)
        best, least = np.where(found < least, scale, best), np.minimum(found, least)
    return best


# --- Calibration --------------------------------------------------------------------------------

PRIOR_ROWS = 64  # so many more rows have the mean of all columns


def input_name(matrix):
    """What a calibration calls that which a matrix is multiplied with."""
    layer, _, kind = matrix.removesuffix(".weight").rpartition(".")
    if kind in ("lm_head", "down_proj"):
        return f"{layer}.{kind}.input".strip(".")
    part = {"gate_proj": "mlp", "up_proj": "mlp"}
    part |= dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa", "wk", "weights_proj"), "self_attn")
    return ".".join([*layer.split(".")[:3], part[kind], "input"]) if kind in part else None


class Recorder(Reference):
    """Remembers the squares of all inputs."""

    def record(self, x, name):
        self.squares.setdefault(name, []).append(np.square(x))

    def linear(self, x, name):
        # A layer's first matrix speaks for all that share its input; the router sees every row.
        if name.endswith(("q_a_proj", "down_proj")):
            self.record(x, input_name(name))
        elif name.endswith(".mlp.gate") or name.endswith(".mlp.gate_proj"):
            self.record(x, name.rpartition(".")[0] + ".input")
        return super().linear(x, name)

    def rms(self, x, name):
        normed = super().rms(x, name)
        if name == "model.norm.weight":
            self.record(normed, "lm_head.input")
        return normed

    def calibration(self, tokens):
        """Mean squares of each column, drawn towards those of all."""
        self.squares = {}
        self.run(tokens)
        for name, squares in self.squares.items():
            squares = np.concatenate(squares)
            sums = squares.sum(0) + PRIOR_ROWS * squares.mean()
            yield name, (sums / (len(squares) + PRIOR_ROWS)).astype("<f4")


def model_shape(config):
    names = "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"
    fields = {name: config[name] for name in names}
    fields |= {"layers": config["num_hidden_layers"], "experts": config["n_routed_experts"]}
    fields |= {"top_k": config["num_experts_per_tok"]}
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def write_calibration(model, path):
    """Of the reference tokens but the last, which nothing is predicted behind."""
    config, weights = read_model(model)
    tokens = json.loads((model / "ref.json").read_text())["full_ids"][:-1]
    means = Recorder(config, weights).calibration(tokens)
    tensors = {name: ("F32", mean.shape, mean.tobytes()) for name, mean in means}
    write_safetensors(path, tensors, {"colibri.calibration": model_shape(config)})


# --- The container ------------------------------------------------------------------------------


def container_entries(name, form, dtype, array, stored, choose):
    """The tensors of a container that one weight becomes."""
    if form is None:
        w = float_matrix(name, dtype, array, stored)
        return {name: ("F32", w.shape, w.astype("<f4").tobytes())}
    if form == "fp8-e4m3-b128":
        if dtype != "F8_E4M3":
            return {name: (dtype, array.shape, array.tobytes())}
        data, scales = array.tobytes(), stored[name + "_scale_inv"][1].tobytes()
    else:
        data, scales, _ = encode(form, float_matrix(name, dtype, array, stored), choose)
    qs = ("F32", (len(scales) // 4,), scales)
    return {name: ("U8", (len(data),), data), name + ".qs": qs}


def sizes(form, rows, cols):
    """Bytes of weights and of scales."""
    if form == "fp8-e4m3-b128":
        return rows * cols, 4 * ceil_div(rows, 128) * ceil_div(cols, 128)
    group = cols if form.endswith("-row") else int(form[6:])
    row = {"8": cols, "4": ceil_div(cols, 2), "2": ceil_div(cols, 4)}
    row["3"] = ceil_div(cols, 64) * 24
    return rows * row[form[3]], 4 * rows * ceil_div(cols, group)


def needs_stamp(form, rows, cols):
    """Whether readers, who go by sizes, would see another format or more than one width."""
    fours = ["int4-row", *(f"int4-g{group}" for group in INT4_GROUPS if group <= cols)]
    widths = [["int8-row", "fp8-e4m3-b128"], fours, ["int2-row"], ["int3-g64"]]
    seen = [[f for f in w if sizes(f, rows, cols) == sizes(form, rows, cols)] for w in widths]
    one_group = form.startswith("int4-g") and cols <= int(form[6:])
    return [w[0] for w in seen if w] != ["int4-row" if one_group else form]


def convert(source, target, changes):
    """Writes the container; returns the names of its tensor files."""
    forms = DEFAULTS | changes
    forms = {"o-proj": forms["attention"], "kv-b": forms["attention"]} | forms
    forms = {"mtp-experts": forms["mtp"]} | forms
    rule, means = {"abs-max": None, "search": search}[forms.pop("scales", "abs-max")], {}
    if "calibration" in forms:
        means = read_safetensors(forms.pop("calibration"))
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    shards = [read_safetensors(path) for path in sorted(source.glob("*.safetensors"))]
    stored = {name: tensor for shard in shards for name, tensor in shard.items()}
    files = {}
    for number, shard in enumerate(shards):
        families, stamps = {"main": {}}, {}
        for name, (dtype, array) in shard.items():
            family = family_of(name, layers)
            is_off = family == "mtp" and forms["mtp"] == "off"
            is_off |= ".indexer." in name and forms["indexer"] == "off"
            if name.endswith(SIDECARS) or is_off:
                continue
            kind = class_of(name, family) if array.ndim == 2 else None
            form = forms[kind] if kind else None
            known = means.get(input_name(name))
            choose = functools.partial(rule, importance=known[1]) if known else rule
            entries = container_entries(name, form, dtype, array, stored, choose)
            families.setdefault(family, {}).update(entries)
            shape = array.shape[0], array.shape[-1] * (2 if dtype == "U8" else 1)
            if name + ".qs" in entries and needs_stamp(form, *shape):
                assert ".experts." not in name, (name, form)
                kind = "int4-grouped" if form.startswith("int4-g") else form
                stamps.setdefault(family, {})[name] = kind
        for family, tensors in families.items():
            count = sum(name.startswith(FAMILIES[family] + "0") for name in files)
            stamp = json.dumps(stamps.get(family, {}), sort_keys=True, separators=(",", ":"))
            metadata = {"colibri.fmt": stamp} if family in stamps else None
            files[f"{FAMILIES[family]}{count:05}.safetensors"] = tensors, metadata
    target.mkdir(parents=True, exist_ok=True)
    for name, (tensors, metadata) in files.items():
        write_safetensors(target / name, tensors, metadata)
    for name in COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    return sorted(files)


# --- Fixtures -----------------------------------------------------------------------------------

ALL_FP8 = dict.fromkeys((*DEFAULTS, "mtp-experts"), "fp8-e4m3-b128")
CALIBRATION = "convert/a_seed.calibration"
CALIBRATED = {"calibration": CALIBRATION}
CASES = [
    ("h_mtp", {}),
    ("h_mtp", {"mtp": "int8-row", "mtp-experts": "int4-row", ROUTED: "int4-g16"}),
    ("h_mtp", {"mtp": "off", "indexer": "off", ROUTED: "int3-g64", "io": "int4-g32"}),
    ("g_bf16_sharded", {}),
    ("g_bf16_sharded", {"o-proj": "int4-row", "kv-b": "int4-g16", "dense": "int3-g64"}),
    ("l_f16", {ROUTED: "int4-row", "shared": "int4-row"}),
    ("e_odd_untied", {ROUTED: "int4-g16", "indexer": "int4-row"}),
    ("formats/hf-bf16", {ROUTED: "int4-row"}),
    ("formats/hf-fp8", {ROUTED: "int4-g96"}),
    ("formats/hf-fp8", ALL_FP8),
    ("formats/hf-nvfp4", {ROUTED: "int4-g16"}),
    ("h_mtp", {"scales": "search"}),
    ("g_bf16_sharded", {"o-proj": "int4-row", "dense": "int3-g64", "scales": "search"}),
    ("a_seed", {"io": "int4-g32", "dense": "int3-g64", "scales": "search"} | CALIBRATED),
]


def fnv1a64(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def file_cases(fixtures):
    for source, changes in CASES:
        with tempfile.TemporaryDirectory() as target:
            paths = {key: fixtures / changes[key] for key in CALIBRATED if key in changes}
            names = convert(fixtures / source, Path(target), changes | paths)
            data = {name: (Path(target) / name).read_bytes() for name in names}
        files = {name: [len(bytes), fnv1a64(bytes)] for name, bytes in data.items()}
        yield {"source": source, "formats": changes, "files": files}


def matrices():
    """(source encoding, rows, cols, weights, scales, scalar)"""
    rng = np.random.default_rng(5)
    for rows, cols in [(1, 1), (5, 67), (3, 130), (2, 300), (4, 48)]:
        w = (rng.standard_normal((rows, cols)) * 0.05).astype(np.float32)
        w[0] *= rng.choice([1, 20], cols)
        if rows > 1:
            # A scale of exactly 1 at 4 and 3 bits and of 2 at 8 bits: every half is a tie.
            w[1] = rng.choice(np.arange(-5, 5.5, 0.5), cols)
            w[1, 0], w[1, cols // 2] = 7, -3
        if rows > 2:
            w[2] = 0 if cols == 67 else rng.choice([1e-9, -4e-9, 0, -0.0, 1e-41], cols)
        yield "f32", rows, cols, w.astype("<f4").tobytes(), b"", 1.0
        bf16 = (w.view(np.uint32) >> 16).astype("<u2")
        yield "bf16", rows, cols, bf16.tobytes(), b"", 1.0
        yield "f16", rows, cols, w.astype("<f2").tobytes(), b"", 1.0
        codes = rng.integers(0, 256, (rows, cols)).astype(np.uint8)
        codes[np.isnan(E4M3[codes])] = 0
        scales = rng.uniform(1e-5, 1e-3, ceil_div(rows, 128) * ceil_div(cols, 128)).astype("<f4")
        yield "fp8-e4m3-b128", rows, cols, codes.tobytes(), scales.tobytes(), 1.0
        if cols % 2 == 0:
            codes = pack(rng.integers(0, len(E2M1), (rows, cols)), 4)
            scales = rng.integers(0, 127, rows * ceil_div(cols, 16)).astype(np.uint8).tobytes()
            yield "nvfp4", rows, cols, codes, scales, 0.0123


def encode_cases():
    forms = ["int8-row", "int4-row", "int3-g64", *(f"int4-g{group}" for group in INT4_GROUPS)]
    for form, rows, cols, weights, scales, scalar in matrices():
        w = decode(form, rows, cols, weights, scales, scalar)
        encoded = {to: [part.hex() for part in encode(to, w)[:2]] for to in forms}
        searched = {to: [part.hex() for part in encode(to, w, search)[:2]] for to in forms}
        importance = np.square(np.random.default_rng(cols).standard_normal(cols)).astype("<f4")
        weighing = functools.partial(search, importance=importance)
        weighed = {to: [part.hex() for part in encode(to, w, weighing)[:2]] for to in forms}
        more = {"search": searched, "importance": importance.tobytes().hex(), "weighed": weighed}
        yield {
            "format": form,
            "rows": rows,
            "cols": cols,
            "weights": weights.hex(),
            "scales": scales.hex(),
            "scalar": f"{np.float32(scalar).view(np.uint32):08x}",
            "abs-max": encoded,
        } | (more if form == "f32" else {})


def write_fixtures(fixtures):
    target = fixtures / "convert"
    target.mkdir(exist_ok=True)
    write_calibration(fixtures / "a_seed", fixtures / CALIBRATION)
    for name, cases in [("encode", encode_cases()), ("files", file_cases(fixtures))]:
        lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
        (target / f"{name}.json").write_text(f"[\n{lines}\n]\n")


def main(arguments):
    if arguments[0] == "--fixtures":
        return write_fixtures(Path(arguments[1]))
    changes = dict(change.split("=") for change in arguments[2:])
    print(*convert(Path(arguments[0]), Path(arguments[1]), changes), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
