"""One measure with one set of options over all networks: the numbers that a ranking is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from flatscope.formatting import labelled
from flatscope.noise import Readings
from flatscope.registry import Declaration, declarations
from flatscope.table import Table

_KEYS = ["measure", "options"]


@dataclass(frozen=True)
class Quantity:
    """A network-wide measure, with a value for every network.

    Attributes:
        measure: its name.
        options: options that differ from the default, as JSON.
        entry: its declaration; None for a measure that is not known here.
        value: by network; NaN where there is none.
        stderr: standard error of the estimator, by network.
        data_stderr: standard error from the samples being a draw; 0 where not known.
        width: half the interval that an exact value's solver vouches for.
        searched: whether the value is what a search ended at.
        reason: why some network has no value.
    """

    measure: str
    options: str
    entry: Declaration | None
    value: Mapping[str, float]
    stderr: Mapping[str, float]
    data_stderr: Mapping[str, float]
    width: Mapping[str, float]
    searched: Mapping[str, bool]
    reason: str = ""

    @property
    def names(self) -> list[str]:
        """The networks."""
        return list(self.value)

    @property
    def label(self) -> str:
        """Name and options, as people write them."""
        return labelled(self.measure, self.options)

    @property
    def lower_is_better(self) -> bool:
        """Direction of the declaration."""
        return self.entry is None or self.entry.direction != "higher"

    def read(self, name: str) -> Readings:
        """The value of one network with its accuracy."""
        return Readings.one(self.value[name], self.stderr[name], self.width[name], self.searched[name])

    def total_stderr(self, name: str) -> float:
        """Errors of estimator and data together, as if they were independent."""
        return math.hypot(self.stderr[name], self.data_stderr[name])


def quantities(tables: Mapping[str, Table]) -> Iterator[Quantity]:
    """The network-wide values of all tables, in the order in which they first appear."""
    known = declarations()
    rows: dict[str, dict[tuple[str, str], pd.Series[Any]]] = {}
    for name, table in tables.items():
        frame = table.to_frame()
        frame = frame[(frame["layer"] == "") & frame["unit"].isna() & frame["sample"].isna()]
        first = frame.drop_duplicates(_KEYS)
        rows[name] = {(str(row["measure"]), str(row["options"])): row for _, row in first.iterrows()}
    for measure, options in dict.fromkeys(key for found in rows.values() for key in found):
        entry = known.get(measure)
        if entry is not None and entry.per != "network":
            continue  # a refusal of a measure per layer or sample: there is nothing to rank
        found = {name: rows[name].get((measure, options)) for name in tables}
        yield Quantity(
            measure,
            options,
            entry,
            value={name: _number(row, "value", math.nan) for name, row in found.items()},
            stderr={name: _number(row, "stderr", 0.0) for name, row in found.items()},
            data_stderr={name: _number(row, "data_stderr", 0.0) for name, row in found.items()},
            width={name: _width(row) for name, row in found.items()},
            searched={name: _searched(row) for name, row in found.items()},
            reason=next((reason for row in found.values() if (reason := _refusal(row))), ""),
        )


def _number(row: pd.Series[Any] | None, column: str, otherwise: float) -> float:
    value = otherwise if row is None else float(row[column])
    return otherwise if math.isnan(value) else value


def _width(row: pd.Series[Any] | None) -> float:
    if row is None or not row["exact"]:
        return 0.0
    width = (float(row["high"]) - float(row["low"])) / 2
    return width if math.isfinite(width) else 0.0


def _searched(row: pd.Series[Any] | None) -> bool:
    return row is not None and not row["exact"] and float(row["stderr"]) == 0


def _refusal(row: pd.Series[Any] | None) -> str:
    return str(row["reason"]) if row is not None and math.isnan(float(row["value"])) else ""
