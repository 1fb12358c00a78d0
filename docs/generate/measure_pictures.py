"""The picture of a measure: its value on every released network, against how well that network generalizes."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flatscope.definitions import typical_numbers
from flatscope.registry import Declaration, declarations
from flatscope.training import released_population

STOP = 0.01  # training loss at which the networks were measured, as for the usual values
COLOURS = {"cifar10": ("CIFAR-10", "#0072B2"), "fashion-mnist": ("Fashion-MNIST", "#D55E00")}
FEWEST = 50  # networks
CLOSE = 0.04  # of the axis: closer marks share a label
EDGE, MARGIN = 0.01, 1.5  # share of the networks on either side that may lie outside, and room beside the others


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
    low, high = (float(shown.quantile(share)) for share in (EDGE, 1 - EDGE))
    if low > 0 and high > low:
        axes.set_xscale("log")
        low, high = low / MARGIN, high * MARGIN
    elif high > low:
        low, high = low - (high - low) / 20, high + (high - low) / 20
    outside = int(((shown < low) | (shown > high)).sum()) if high > low else 0
    if high > low:
        _mark_demo(axes, entry, low, high)
    remarks = [f"mean over {entry.per}s"] * (entry.per != "network") + [f"{outside} lie outside"] * bool(outside)
    words = f" ({', '.join(remarks)})" if remarks else ""
    axes.set_xlabel(f"{entry.name}{words}", fontsize=11)
    axes.set_ylabel("generalization gap, %", fontsize=11)
    axes.tick_params(labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=10, loc="best", markerscale=2)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, metadata={"Software": None})
    return drawn.getvalue()


def _mark_demo(axes: Axes, entry: Declaration, low: float, high: float) -> None:
    """The two networks of the demo, as marks on the axis of values; one label where they are too close for two."""
    marks = {label: value for label, value in typical_numbers(entry.name).items() if low < value < high}
    axes.set_xlim(low, high)
    places = [axes.transAxes.inverted().transform(axes.transData.transform((value, 0)))[0] for value in marks.values()]
    if len(places) > 1 and max(places) - min(places) < CLOSE:
        marks = {"demo": next(iter(marks.values()))}
    for label, value in marks.items():
        axes.axvline(value, color="0.5", linewidth=1, linestyle=":")
        axes.annotate(
            label, (value, 1), xycoords=("data", "axes fraction"), rotation=90, fontsize=8, color="0.4", ha="right",
            va="top",
        )  # fmt: skip
