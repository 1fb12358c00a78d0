"""The picture of a measure: its value on every released network, against how well that network generalizes."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope.definitions import typical_numbers
from flatscope.registry import Declaration, declarations
from flatscope.training import released_population

STOP = 0.01  # training loss at which the networks were measured, as for the usual values
COLOURS = {"cifar10": ("CIFAR-10", "#0072B2"), "fashion-mnist": ("Fashion-MNIST", "#D55E00")}
FEWEST = 50  # networks


@functools.cache
def _population() -> pd.DataFrame:
    population, _ = released_population()
    return population[(population["stop"] == STOP) & population["reached"]]


def picture_of(entry: Declaration) -> str:
    """The file of a measure's picture, beside its page; empty where too few networks have a value."""
    frame = _population()
    known = entry.name in frame and frame[entry.name].replace([np.inf, -np.inf], np.nan).notna().sum() >= FEWEST
    return f"{entry.name}.png" if known else ""


def pictures() -> Iterator[tuple[str, bytes]]:
    """Path inside the documentation, and content, of the pictures of all measures that have one."""
    for entry in declarations().values():
        if name := picture_of(entry):
            yield f"measures/{name}", _drawn(entry)


def _drawn(entry: Declaration) -> bytes:
    frame = _population()
    figure = Figure(figsize=(6.4, 3.5), layout="constrained")
    axes = figure.subplots()
    values = frame[entry.name].astype(float)
    shown = values.replace([np.inf, -np.inf], np.nan).dropna()
    for name, (label, colour) in COLOURS.items():
        rows = frame.loc[shown.index][frame.loc[shown.index, "data"] == name]
        axes.scatter(shown[rows.index], 100 * rows["gap"], s=9, alpha=0.45, color=colour, linewidths=0, label=label)
    if shown.min() > 0:
        axes.set_xscale("log")
        _mark_demo(axes, entry)
    else:
        axes.set_xscale("symlog", linthresh=max(float(shown.abs().quantile(0.1)), 1e-12))
    mean = "" if entry.per == "network" else f" (mean over {entry.per}s)"
    axes.set_xlabel(f"{entry.name}{mean}", fontsize=11)
    axes.set_ylabel("generalization gap, %", fontsize=11)
    axes.tick_params(labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=10, loc="best", markerscale=2)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, metadata={"Software": None})
    return drawn.getvalue()


def _mark_demo(axes: object, entry: Declaration) -> None:
    """The two networks of the demo, as marks on the axis of values."""
    for label, value in typical_numbers(entry.name).items():
        if value > 0:
            axes.axvline(value, color="0.5", linewidth=1, linestyle=":")  # type: ignore[attr-defined]
            axes.annotate(  # type: ignore[attr-defined]
                label, (value, 1), xycoords=("data", "axes fraction"), rotation=90, fontsize=8, color="0.4",
                ha="right", va="top",
            )  # fmt: skip
