"""`python -m benchmarks.growth [gpu.json]`: time and memory against the size of the problem, as a picture.

Reads the lines that `benchmarks.gpu` has written for its rows of growth, keeps them in `growth.json` beside this file,
and draws `docs/images/growth.png`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
KEPT, PICTURE = HERE / "growth.json", HERE.parent / "docs/images/growth.png"
# Rows of `benchmarks.gpu` by the beginning of their names, and what grows in them.
AXES = {
    "classes": "classes\nResNet-18, 1,000 images",
    "parameters": "parameters, × 2.8 million\nResNet-18, 1,000 images",
    "samples": "images\nResNet-18, 10 classes",
    "length": "tokens of a text\nGPT of 3.7 million parameters, 16 texts",
    "words": "words of a vocabulary\nGPT, 16 texts of 256 words",
}
FIELDS = ("seconds", "above_start_gib", "limit_s", "largest_relative_error", "passes")


def read(path: Path) -> dict[str, dict[str, object]]:
    """{row: what is drawn of it} of the rows of growth."""
    found = {}
    for line in path.read_text().splitlines():
        stage = json.loads(line)
        name = str(stage["row"])
        if stage["stage"] == "flatscope" and name.partition("-")[0] in AXES:
            found[name] = {field: stage[field] for field in FIELDS if field in stage}
    return found


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    """Two rows of panels: seconds above, memory below."""
    drawn = {kind: label for kind, label in AXES.items() if any(name.startswith(f"{kind}-") for name in rows)}
    figure, panels = plt.subplots(2, len(drawn), figsize=(13, 5), sharex="col", sharey="row", layout="constrained")
    for column, (kind, label) in enumerate(drawn.items()):
        sizes = sorted(int(name.partition("-")[2]) for name in rows if name.startswith(f"{kind}-"))
        chosen = [rows[f"{kind}-{size}"] for size in sizes]
        for panel, field in zip(panels[:, column], ("seconds", "above_start_gib"), strict=True):
            panel.loglog(sizes, [row[field] for row in chosen], "o-", color="#1f5f8b")
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        panels[1, column].set_xlabel(label)
    panels[0, 0].set_ylabel("seconds")
    panels[1, 0].set_ylabel("GiB of GPU memory")
    for panel, ticks in zip(panels[:, 0], ((1, 3, 10, 30), (3, 10, 30, 100)), strict=True):
        panel.set_yticks(ticks, [str(tick) for tick in ticks])
    figure.suptitle("Traces, κ, ρ and relative flatness of every layer to 2 % on one H200")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    if len(sys.argv) > 1:
        KEPT.write_text(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n")
    draw(json.loads(KEPT.read_text()), PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
