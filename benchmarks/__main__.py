"""`python -m benchmarks [family ...] [--gpu] [--record]`: print a table of ratios, exit 1 if a target is missed.

A family is a module of this package with `rows()` and, where it has a target on a GPU, `gpu_rows()`; one that reads no
data files says `NEEDS_DATA = False`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch

from benchmarks.timing import Row, machine

FAMILIES = ("curvature", "spectra", "population", "sharpness", "norms", "radius", "landscape")
GPU_FAMILIES: tuple[str, ...] = ("population", "sharpness", "radius", "landscape")
HEADER = ["what", "flatscope", "peer", "ratio", "target", "met", "note"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help=f"some of {', '.join(sorted({*FAMILIES, *GPU_FAMILIES}))}")
    parser.add_argument("--gpu", action="store_true", help="the rows that need a GPU")
    parser.add_argument("--record", action="store_true", help="add the table to RESULTS.md")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    names = arguments.family or (GPU_FAMILIES if arguments.gpu else FAMILIES)
    needing = [name for name in names if getattr(importlib.import_module(f"benchmarks.{name}"), "NEEDS_DATA", True)]
    if needing and "FLATSCOPE_DATA" not in os.environ:
        print("Set FLATSCOPE_DATA to a folder with CIFAR-10 (flatscope data fetch cifar10).", file=sys.stderr)
        return 2
    torch.set_num_threads(arguments.threads)
    lines = [f"## {date.today()}", "", f"`python -m benchmarks {' '.join(sys.argv[1:])}` on {machine()}", ""]
    lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    print("\n".join(lines), flush=True)
    missed = False
    for row in all_rows(arguments.family, gpu=arguments.gpu):
        lines.append("| " + " | ".join(row.cells()) + " |")
        print(lines[-1], flush=True)
        missed |= not row.met
    if arguments.record:
        path = Path(__file__).with_name("RESULTS.md")
        known = path.read_text() if path.exists() else "# Benchmark results\n"
        path.write_text(known.rstrip() + "\n\n" + "\n".join(lines) + "\n")
    return int(missed)


def all_rows(families: list[str], *, gpu: bool) -> Iterator[Row]:
    for name in families or (GPU_FAMILIES if gpu else FAMILIES):
        module = importlib.import_module(f"benchmarks.{name}")
        yield from module.gpu_rows() if gpu else module.rows()


if __name__ == "__main__":
    sys.exit(main())
