"""`python -m benchmarks [--record]`: run everything, print a table, exit 1 if a target is missed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch

from benchmarks import curvature
from benchmarks.timing import Row, machine

HEADER = ["what", "flatscope", "peer", "ratio", "target", "met", "note"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="add the table to RESULTS.md")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if "FLATSCOPE_DATA" not in os.environ:
        print("Set FLATSCOPE_DATA to a folder with CIFAR-10 (flatscope data fetch cifar10).", file=sys.stderr)
        return 2
    torch.set_num_threads(arguments.threads)
    lines = [f"## {date.today()}", "", f"`python -m benchmarks --threads {arguments.threads}` on {machine()}", ""]
    lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    print("\n".join(lines), flush=True)
    missed = False
    for row in all_rows():
        lines.append("| " + " | ".join(row.cells()) + " |")
        print(lines[-1], flush=True)
        missed |= not row.met
    if arguments.record:
        path = Path(__file__).with_name("RESULTS.md")
        known = path.read_text() if path.exists() else "# Benchmark results\n"
        path.write_text(known.rstrip() + "\n\n" + "\n".join(lines) + "\n")
    return int(missed)


def all_rows() -> Iterator[Row]:
    yield from curvature.rows()


if __name__ == "__main__":
    sys.exit(main())
