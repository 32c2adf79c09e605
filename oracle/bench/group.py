"""Turns a container's int4 matrices with one scale a row into int4 with one per 64 columns.

    python oracle/bench/group.py --from /tmp/medium --to /tmp/medium-g64
    coli info --model /tmp/medium-g64

For measuring, not for use: codes stay as they are, and the scale of a row becomes one a group,
each times a factor in [0.8, 1.25] drawn from the tensor's name, so that groups differ. int8 and
float tensors are copied, and so are an MTP layer and int4 matrices no wider than a group. The
config and the tokenizer's files are copied too. Refused: a tensor whose sizes are of no per-row
format, and shards stamped with formats, because the stamps would be wrong afterwards.

Works shard by shard and in parts of a tensor; memory does not grow with the model. Needs numpy.
"""

import argparse
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np

from container import draws, write_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from formats import tensor_shapes  # noqa: E402
from reference import indexer_kinds  # noqa: E402

GROUP = 64
PART_BYTES = 16 << 20
COPIED = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]


def read_header(path):
    """The tensors of a shard, and where their data starts."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    if "colibri.fmt" in header.pop("__metadata__", {}):
        raise ValueError(f"{path}: stamped with formats, which is not handled")
    return header, 8 + header_bytes


def read_parts(path, start, nbytes):
    """Yields a range of a file in parts."""
    with open(path, "rb") as file:
        file.seek(start)
        while nbytes > 0:
            part = np.fromfile(file, np.uint8, min(nbytes, PART_BYTES))
            if part.size == 0:
                raise ValueError(f"{path}: ends {nbytes} bytes early")
            nbytes -= part.size
            yield part


def group_scales(path, start, name, rows, groups):
    """The scales [rows · groups] made from those of the rows."""
    with open(path, "rb") as file:
        file.seek(start)
        row_scales = np.fromfile(file, "<f4", rows)
    factors = draws(GROUP, name).uniform(0.8, 1.25, (rows, groups))
    return (row_scales[:, None] * factors).astype("<f4")


def is_int4_row(name, shape, weight_bytes, scale_bytes):
    """Whether sizes say int4 with one scale a row; int8 is the only other thing they may say."""
    rows, cols = shape
    if scale_bytes != 4 * rows or weight_bytes not in (rows * cols, rows * -(-cols // 2)):
        sizes = f"{weight_bytes} bytes of weights and {scale_bytes} of scales"
        raise ValueError(f"{name}: {sizes} are no per-row int4 or int8 matrix {list(shape)}")
    return weight_bytes != rows * cols


def convert(path, target, shapes, sizes):
    """One shard. `sizes` has the bytes of every tensor of the directory."""
    header, data_start = read_header(path)
    entries = []
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        matrix = name.removesuffix(".qs")
        nbytes, start = end - begin, data_start + begin
        make = partial(read_parts, path, start, nbytes)
        shape = entry["shape"]
        if matrix != name and matrix in shapes:
            rows, cols = shapes[matrix]
            groups = -(-cols // GROUP)
            if is_int4_row(matrix, (rows, cols), sizes[matrix], nbytes) and groups > 1:
                shape, nbytes = [rows * groups], 4 * rows * groups
                make = partial(group_scales, path, start, name, rows, groups)
        entries.append((name, entry["dtype"], shape, nbytes, make))
    write_shard(target, entries)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="source", type=Path, required=True, help="container")
    parser.add_argument("--to", type=Path, required=True, help="directory to write, not there yet")
    args = parser.parse_args()
    config = json.loads((args.source / "config.json").read_text())
    shapes = tensor_shapes(config | {"indexer_types": indexer_kinds(config)})
    paths = sorted(args.source.glob("*.safetensors"))
    sizes = {}
    for path in paths:
        for name, entry in read_header(path)[0].items():
            begin, end = entry["data_offsets"]
            sizes[name] = end - begin
    args.to.mkdir(parents=True)
    for file in COPIED:
        if (args.source / file).exists():
            shutil.copyfile(args.source / file, args.to / file)
    for path in paths:
        convert(path, args.to / path.name, shapes, sizes)


if __name__ == "__main__":
    main()
