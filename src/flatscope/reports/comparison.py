"""Several tables side by side: one line per measure, one cell per network, ready to be shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd

from flatscope.formatting import options_words, with_error, written
from flatscope.registry import Declaration, declarations
from flatscope.table import Table

RESCALINGS = ("layer_scaling", "unit_scaling")


class Cell(NamedTuple):
    """What one network has for one measure.

    Attributes:
        value: for sorting and ratios: the number itself, or the largest of several; NaN where there is none.
        text: the number, or the range of several.
        stderr: standard error as text; empty where the value is exact.
        relative: standard error over value; NaN where that has no meaning.
        exact: None where there is no value.
        extent: "3 layers", "1200 samples"; empty for a network-wide value.
        interval: "[low, high]"; empty where none is known.
        reason: why there is no value, or a remark on it.
        folded: whether BatchNorm was folded first.
    """

    value: float
    text: str
    stderr: str = ""
    relative: float = math.nan
    exact: bool | None = None
    extent: str = ""
    interval: str = ""
    reason: str = ""
    folded: bool = False

    @property
    def sort_key(self) -> str:
        """The value as JavaScript reads numbers; empty where there is none."""
        if math.isinf(self.value):
            return "Infinity" if self.value > 0 else "-Infinity"
        return "" if math.isnan(self.value) else repr(self.value)


class Line(NamedTuple):
    """One measure with one set of options, over all networks; a cell is None where it was not asked for."""

    name: str
    options: str
    entry: Declaration | None
    cells: list[Cell | None]

    @property
    def label(self) -> str:
        """Name and the options that differ from the default."""
        return f"{self.name}[{self.options}]" if self.options else self.name

    @property
    def standing(self) -> str:
        """Which rescalings of the same function leave the value alone: all, some, none, or unknown."""
        return standing(self.entry)


def standing(entry: Declaration | None) -> str:
    """Whether values of different networks may be compared: "all", "some", "none" or "unknown".

    Any rescaling of the weights that leaves the function as it is must leave a measure as it is; otherwise a
    difference between two networks can be a difference in how the same thing is written.
    """
    if entry is None:
        return "unknown"
    kept = sum(symmetry in entry.invariant_under for symmetry in RESCALINGS)
    return ("none", "some", "all")[kept]


def lines(tables: Mapping[str, Table], kind: str = "measure") -> list[Line]:
    """The measures (or bounds) of all tables, in the order in which they first appear."""
    known = declarations(kind)
    frames = [table.to_frame() for table in tables.values()]
    groups = [dict(iter(frame.groupby(["measure", "options"], sort=False))) for frame in frames]
    keys = dict.fromkeys(key for group in groups for key in group)
    return [
        Line(
            str(name),
            options_words(str(options)),
            known.get(str(name)),
            [_cell(g.get((name, options))) for g in groups],
        )
        for name, options in keys
    ]


def _cell(rows: pd.DataFrame | None) -> Cell | None:
    if rows is None:
        return None
    per_network = rows[(rows["layer"] == "") & rows["unit"].isna() & rows["sample"].isna()]
    if len(per_network):
        return _single(per_network.iloc[0])
    return _several(rows)


def _single(row: pd.Series[Any]) -> Cell:
    value, stderr = float(row["value"]), float(row["stderr"])
    low, high = float(row["low"]), float(row["high"])
    reason, folded = str(row["reason"]), bool(row["folded"])
    if math.isnan(value):
        return Cell(value, "n/a", reason=reason or "no value", folded=folded)
    text, error = with_error(value, stderr)
    interval = "" if math.isnan(low) and math.isnan(high) else f"[{written(low)}, {written(high)}]"
    relative = stderr / abs(value) if value else math.nan
    return Cell(value, text, error, relative, bool(row["exact"]), "", interval, reason, folded)


def _several(rows: pd.DataFrame) -> Cell:
    values, n = rows["value"].dropna(), len(rows)
    what = "samples" if rows["sample"].notna().any() else "units" if rows["unit"].notna().any() else "layers"
    reason = next((str(text) for text in rows["reason"] if text), "")
    folded = bool(rows["folded"].any())
    if values.empty:
        return Cell(math.nan, "n/a", reason=reason or "no value", folded=folded)
    text = (
        written(float(values.min())) if n == 1 else f"{written(float(values.min()))} … {written(float(values.max()))}"
    )
    worst = float(rows["stderr"].max())
    error = f"≤ {written(worst, 2)}" if worst > 0 else ""
    extent = f"{written(n)} {what if n > 1 else what[:-1]}"
    exact = bool(rows["exact"].all())
    return Cell(float(values.max()), text, error, math.nan, exact, extent, reason=reason, folded=folded)
