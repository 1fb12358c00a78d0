"""The page of speed: the recorded results, and above them a picture of the comparisons with other tools."""

from __future__ import annotations

import io
import re
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
PICTURE = "images/benchmarks.svg"
INTRODUCTION = f"""# Speed

How fast flatscope is beside other tools, on the machine that each section names. `make bench` runs them again.

![How many times faster than each peer]({PICTURE})

The picture shows the rows below that compare with a peer, the same result asked of both; left of the line at 1
flatscope is slower.
"""


def page() -> str:
    """The recorded results with an introduction."""
    return RESULTS.read_text(encoding="utf-8").replace("# Benchmark results\n", INTRODUCTION, 1)


def pictures() -> dict[str, bytes]:
    """The picture, drawn from the tables."""
    rows = [row for row in _ratios(RESULTS.read_text(encoding="utf-8")) if row[1] > 0]
    figure = Figure(figsize=(9, 0.34 * len(rows) + 0.9), layout="constrained")
    axes = figure.subplots()
    labels = [what if len(what) <= 70 else what[:68] + "…" for what, _ in rows]
    axes.barh(range(len(rows)), [ratio - 1 for _, ratio in rows], left=1, color="#4051b5", height=0.6)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="0.4", linewidth=1)
    for place, (_, ratio) in enumerate(rows):
        axes.annotate(
            f"{ratio:.3g}×", (max(ratio, 1), place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.margins(x=0.15)
    axes.set_xlabel("times faster (log scale)", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return {PICTURE: drawn.getvalue()}


def _ratios(text: str) -> list[tuple[str, float]]:
    """What was compared and the ratio, of every table that has both columns; the first mention of each counts."""
    found: dict[str, float] = {}
    columns: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
        elif {"what", "peer", "ratio"} <= set(columns) and len(cells) == len(columns):
            row = dict(zip(columns, cells, strict=True))
            number = re.match(r"([\d.,]+)×", row["ratio"])
            if number:
                found.setdefault(row["what"], float(number[1].replace(",", "")))
    return list(found.items())
