"""Runs `coli bench` several times and appends what it measured to a CSV file.

    python oracle/bench/record.py --csv oracle/bench/results.csv \\
        "medium /tmp/medium avx512 2 --decode 32 --prefill 32,128" \\
        "medium /tmp/medium avx2 2 --decode 32 --prefill 32,128"

Each argument is one run: LABEL DIRECTORY ISA THREADS FLAGS…, where the flags are those of
`coli bench`; `--limits` and `--json` are added. A run gives one row, and one more for every
further prompt length; only the first has the figures of decoding. Runs follow each other, and
what was measured is written before the next one starts. A flag that names a path is refused: rows
say nothing of where files lie. Needs Python's standard library alone.
"""

import argparse
import csv
import json
import shlex
import subprocess
import sys
from pathlib import Path

RUN = ["label", "machine", "isa", "threads", "flags"]
LIMITS = ["read_gbs", "int16_gmacs"]
DECODE = ["tok_s", "gbs", "of_read_limit", "attention_share", "indexer_share"]
PREFILL = ["rows", "tok_s", "gmacs", "of_int16_limit", "products_of_int16_limit", "attention_share"]


def columns():
    stretches = [("decode", DECODE), ("prefill", PREFILL)]
    return RUN + LIMITS + [f"{name}_{field}" for name, fields in stretches for field in fields]


def parse(text):
    """LABEL DIRECTORY ISA THREADS FLAGS… -> (label, words of the command line, flags)."""
    words = shlex.split(text)
    if len(words) < 4:
        sys.exit(f"expected LABEL DIRECTORY ISA THREADS FLAGS…, found {text!r}")
    label, directory, isa, threads, *flags = words
    if any("/" in word for word in [label, *flags]):
        sys.exit(f"a path would be recorded: {text!r}")
    return label, ["--model", directory, "--isa", isa, "--threads", threads, *flags], flags


def measure(coli, label, words, flags):
    """The rows of one run."""
    command = [coli, "bench", *words, "--limits", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)}: exit code {done.returncode}")
    result = json.loads(done.stdout)
    # The engine says what it really used: NAME, N threads, ISA.
    machine, threads, isa = result["machine"].rsplit(", ", 2)
    run = [label, machine, isa, threads.split()[0], shlex.join(flags)]
    run += [result["limits"][field] for field in LIMITS]
    decode = result["decode"] or {}
    for prefill in result["prefill"] or [{}]:
        yield run + [decode.get(field) for field in DECODE] + [prefill.get(f) for f in PREFILL]
        decode = {}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coli", default="target/release/coli", help="the program to measure")
    parser.add_argument("--csv", type=Path, required=True, help="file to append to")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="one quoted run")
    args = parser.parse_args()
    runs = [parse(text) for text in args.runs]
    is_new = not args.csv.exists()
    if not is_new:
        with open(args.csv, newline="") as file:
            if next(csv.reader(file), None) != columns():
                sys.exit(f"{args.csv}: its columns are not those of this script")
    with open(args.csv, "a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(columns())
        for run in runs:
            for row in measure(args.coli, *run):
                writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    main()
