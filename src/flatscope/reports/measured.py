"""Measured networks side by side: one line per measure, one cell per network."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import pandas as pd

from flatscope.formatting import options_in_words, typeset, with_error, written
from flatscope.network.units import SCALES_STOP
from flatscope.registry import Declaration, declarations
from flatscope.rows import rows_of, searched_text
from flatscope.table import Table

RESCALINGS = ("layer_scaling", "unit_scaling")
INVARIANCE_WORDS = {
    "all": ("invariant", "good"),
    "some": ("partly invariant", "fair"),
    "none": ("not invariant", "poor"),
    "unknown": ("not declared", ""),
}


class MeasuredCell(NamedTuple):
    """Value of one measure for one network, as text and number."""

    value: float  # for sorting and ratios: the number itself, or the largest of several; NaN where there is none
    text: str  # the number, or the range of several
    stderr: str = ""  # standard error as text; empty where the value is exact
    # standard error over value, with that of the samples being a draw; NaN where that has no meaning
    relative: float = math.nan
    exact: bool | None = None  # None where there is no value
    extent: str = ""  # "3 layers", "1200 samples"; empty for a network-wide value
    interval: str = ""  # "[low, high]"; empty where none is known
    reason: str = ""  # why there is no value, or a remark on it
    folded: bool = False  # whether BatchNorm was folded first

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
    cells: list[MeasuredCell | None]

    @property
    def label(self) -> str:
        """Name and the options that differ from the default."""
        return f"{self.name}[{self.options}]" if self.options else self.name

    @property
    def invariance(self) -> str:
        """Which rescalings of the same function leave the value alone: all, some, none, or unknown."""
        return (
            invariance_of_measure(self.entry)
            if self.symmetries_kept
            else "none"
            if self.entry is not None
            else "unknown"
        )

    @property
    def symmetries_kept(self) -> frozenset[str]:
        """Symmetries that leave the value alone; none where a wall keeps units from being rescaled at all."""
        if self.entry is None or any(cell is not None and SCALES_STOP in cell.reason for cell in self.cells):
            return frozenset()
        return frozenset(self.entry.invariant_under)


def invariance_of_measure(entry: Declaration | None) -> str:
    """Rescalings that leave a measure alone: "all", "some", "none" or "unknown"; only "all" lets networks be compared.

    Any rescaling of the weights that leaves the function as it is must leave a measure as it is; otherwise a
    difference between two networks can be a difference in how the same thing is written.
    """
    if entry is None:
        return "unknown"
    kept = sum(symmetry in entry.invariant_under for symmetry in RESCALINGS)
    return ("none", "some", "all")[kept]


def measure_lines(tables: Mapping[str, Table], kind: str = "measure") -> list[Line]:
    """The measures (or bounds) of all tables, in the order in which they first appear."""
    known = declarations(kind)
    frames = [table.to_frame() for table in tables.values()]
    groups = [dict(iter(frame.groupby(["measure", "options"], sort=False))) for frame in frames]
    keys = dict.fromkeys(key for group in groups for key in group)
    return [
        Line(
            str(name),
            options_in_words(str(options)),
            known.get(str(name)),
            [_cell_of_rows(g.get((name, options))) for g in groups],
        )
        for name, options in keys
    ]


class ComparisonData(NamedTuple):
    """Ratios of the other networks to the first, by measures that rank: above 1 is better.

    That is: with a better direction, invariant under rescaling, positive and different in the networks, and not in
    proportion to a measure that is there already. Of several options of one, the middle.
    """

    reference: str
    networks: list[str]
    measures: list[str]
    factors: list[list[float]]  # by measure, then network; above 1 is better
    errors: list[list[float]]  # their standard errors


def comparison_data(tables: Mapping[str, Table], left_out: Collection[str] = ()) -> ComparisonData:
    """All networks but the first against the first; without measures if there is only one network.

    Args:
        tables: by network.
        left_out: labels of measures that cannot rank these networks.
    """
    first, *others = tables
    data = ComparisonData(first, others, [], [], [])
    seen: set[tuple[str, ...]] = set()
    for line in (
        _one_line_per_measure(line for line in measure_lines(tables) if line.label not in left_out) if others else []
    ):
        cells = [cell for cell in line.cells if cell is not None and cell.value > 0 and not cell.extent]
        if len(cells) < len(tables) or not all(math.isfinite(cell.value) for cell in cells):
            continue
        reference, *compared = cells
        direction = "none" if line.entry is None else line.entry.direction
        ratios = [cell.value / reference.value for cell in compared]
        factors = ratios if direction == "higher" else [1 / ratio for ratio in ratios]
        shown = tuple(f"{factor:.7g}" for factor in factors)
        if direction == "none" or line.invariance != "all" or shown in seen or set(shown) == {"1"}:
            continue
        seen.add(shown)
        data.measures.append(line.label)
        data.factors.append(factors)
        pairs = zip(factors, compared, strict=True)
        data.errors.append([factor * math.hypot(cell.relative, reference.relative) for factor, cell in pairs])
    return data


def _one_line_per_measure(several: Iterable[Line]) -> list[Line]:
    """One line of every measure: the middle one of its options."""
    by_name: dict[str, list[Line]] = {}
    for line in several:
        by_name.setdefault(line.name, []).append(line)
    return [same[(len(same) - 1) // 2] for same in by_name.values()]


def _cell_of_rows(rows: pd.DataFrame | None) -> MeasuredCell | None:
    if rows is None:
        return None
    per_network = rows_of(rows, "network")
    return _cell_of_one_value(per_network.iloc[0]) if len(per_network) else _cell_of_several_values(rows)


def _cell_of_one_value(row: pd.Series[Any]) -> MeasuredCell:
    value, stderr = float(row["value"]), float(row["stderr"])
    low, high = float(row["low"]), float(row["high"])
    reason, folded = str(row["reason"]), bool(row["folded"])
    if math.isnan(value):
        return MeasuredCell(value, "n/a", reason=reason or "no value", folded=folded)
    searched = searched_text(row)
    text, error = (typeset(searched), "") if searched else with_error(value, stderr)
    interval = "" if math.isnan(low) and math.isnan(high) else f"[{written(low)}, {written(high)}]"
    data_stderr = float(row["data_stderr"])
    searching = (high - low) / 4 if searched else 0.0  # the interval of a search: two errors to either side
    total = math.hypot(stderr, searching, 0.0 if math.isnan(data_stderr) else data_stderr)
    relative = total / abs(value) if value else math.nan
    return MeasuredCell(value, text, error, relative, bool(row["exact"]), "", interval, reason, folded)


def _cell_of_several_values(rows: pd.DataFrame) -> MeasuredCell:
    values, n = rows["value"].dropna(), len(rows)
    what = "samples" if rows["sample"].notna().any() else "values" if rows["unit"].notna().any() else "layers"
    reason = next((str(text) for text in rows["reason"] if text), "")
    folded = bool(rows["folded"].any())
    if values.empty:
        return MeasuredCell(math.nan, "n/a", reason=reason or "no value", folded=folded)
    ends = written(float(values.min())), written(float(values.max()))
    text = ends[0] if n == 1 else " … ".join(ends)
    worst = float(rows["stderr"].max())
    error = f"≤ {written(worst, 2)}" if worst > 0 else ""
    extent = f"{written(n)} {what if n > 1 else what[:-1]}"
    exact = bool(rows["exact"].all())
    return MeasuredCell(float(values.max()), text, error, math.nan, exact, extent, reason=reason, folded=folded)


MANY = 20  # lines of a table beyond which these come first


def captions_by_measure() -> dict[str, str]:
    """{measure: its caption} of those that have one."""
    return {name: entry.caption for name, entry in declarations().items() if entry.caption}
