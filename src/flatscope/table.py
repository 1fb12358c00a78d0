"""Table: one row per measured number, with its error, its cost and how it was obtained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from flatscope.charts import Bars, finite_or_nan
from flatscope.errors import InputError, UnknownNameError, refuse_unknown
from flatscope.formatting import measure_label, readable_number
from flatscope.headlines import table_headline
from flatscope.registry import declarations
from flatscope.result import Result, checked_columns, columns_of, plain, reading
from flatscope.rows import rows_of, searched_text

COLUMNS: dict[str, str] = {
    "measure": "str",
    "options": "str",
    "layer": "str",
    "unit": "Int64",
    "sample": "Int64",
    "value": "float64",
    "stderr": "float64",
    "data_stderr": "float64",
    "low": "float64",
    "high": "float64",
    "exact": "bool",
    "folded": "bool",
    "reason": "str",
    "passes": "float64",
    "seconds": "float64",
    "seed": "int64",
    "dtype": "str",
    "version": "str",
}
HEADER = ("measure", "layer", "value", "± s.e.", "exact", "remark")
BOUND_COLUMNS: dict[str, str] = {"vacuous": "bool", "assumptions": "str", "confidence": "float64"}


class Table(Result):
    """Measured numbers in long form; see `to_frame` for the columns.

    Args:
        rows: dictionaries with the columns' names, or a frame that has them.
        meta: provenance: versions, device, time, command. Kept by every file format.
        look: gives what else belongs to it, and is called when somebody asks for any of it.

    Example:
        >>> import torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> table = fs.measure(problem, ["parameter_count", "kappa_trace"])
        >>> table["parameter_count"], table.names
        (8.0, ['parameter_count', 'kappa_trace'])
    """

    WORD = "table"
    COLUMNS = COLUMNS | BOUND_COLUMNS

    def __init__(
        self,
        rows: pd.DataFrame | Iterable[Mapping[str, Any]],
        meta: Mapping[str, Any] | None = None,
        look: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        if isinstance(rows, pd.DataFrame):
            types = COLUMNS | BOUND_COLUMNS if "vacuous" in rows.columns else COLUMNS
            self._frame = checked_columns(rows, types, "table")
        else:
            rows = list(rows)
            types = COLUMNS | BOUND_COLUMNS if any("vacuous" in row for row in rows) else COLUMNS
            self._frame = columns_of(rows, types, "table")
        for options in set(self._frame["options"]) - {""}:
            with reading("options as a JSON object", f"table, options {options!r:.80}"):
                dict(json.loads(options))
        self._meta: dict[str, Any] = plain(meta or {})
        self._look = look

    @property
    def meta(self) -> dict[str, Any]:
        """Provenance, and what is known of the network, which is looked at now if it was not yet."""
        if self._look is not None:
            self._meta |= plain(self._look())
            self._look = None
        return self._meta

    @meta.setter
    def meta(self, given: dict[str, Any]) -> None:
        self._meta, self._look = given, None

    def __getstate__(self) -> dict[str, Any]:
        """The table as it is when all of it is known."""
        return {"_frame": self._frame, "_meta": self.meta, "_look": None}

    def __len__(self) -> int:
        return len(self._frame)

    def __contains__(self, name: object) -> bool:
        return name in set(self._frame["measure"])

    def __getitem__(self, name: str) -> float:
        """The one network-wide value of that measure, whatever its options; NaN if it had none."""
        return float(self._network_row(name)["value"])

    def headline_lines(self) -> list[str]:
        """Sentences: is it a minimum, how flat by what no rescaling changes, what that is worth, what to do next."""
        return table_headline(self._frame, self.meta)

    @property
    def names(self) -> list[str]:
        """Names of the measures, in the order in which they were computed."""
        return list(dict.fromkeys(self._frame["measure"]))

    def layer(self, name: str) -> dict[str, float]:
        """Value by layer, in forward order."""
        rows = self._rows(name, "layer", "value per layer", "layer")
        _refuse_several_values(name, rows, rows["layer"])
        return dict(zip(rows["layer"], rows["value"].astype(float), strict=True))

    def units(self, name: str, layer: str) -> Tensor:
        """Values of the units of one layer, 1-D, float64."""
        rows = self._rows(name, "unit", "value per unit", "units")
        refuse_unknown(layer, list(dict.fromkeys(rows["layer"])), f"layer of {name}")
        rows = rows[rows["layer"] == layer].sort_values("unit")
        _refuse_several_values(name, rows, rows["unit"])
        return torch.tensor(rows["value"].to_numpy(dtype="float64"))

    def samples(self, name: str) -> Tensor:
        """Values of the samples in the order of the data, 1-D, float64."""
        rows = self._rows(name, "sample", "value per sample", "samples").sort_values("sample")
        _refuse_several_values(name, rows, rows["sample"])
        return torch.tensor(rows["value"].to_numpy(dtype="float64"))

    def stderr(self, name: str, layer: str | None = None) -> float:
        """Standard error of the estimator; 0.0 where the value is exact."""
        if layer is None:
            return float(self._network_row(name)["stderr"])
        rows = self._rows(name)
        rows = rows[(rows["layer"] == layer) & rows["unit"].isna()]
        if rows.empty:
            raise self._no_value_error(name, f"value for layer {layer}", "stderr")
        _refuse_several_values(name, rows, rows["layer"])
        return float(rows["stderr"].iloc[0])

    def reason(self, name: str) -> str:
        """Why a measure has no value, or a remark on it; empty when there is nothing to say."""
        return str(self._rows(name)["reason"].iloc[0])

    def one_each(self) -> dict[str, float]:
        """One number per measure: that of the network, else the mean over its layers, units or samples."""
        numbers = {}
        for name, rows in self._frame.groupby("measure", sort=False):
            whole = rows_of(rows, "network")
            numbers[str(name)] = float((whole if len(whole) else rows)["value"].mean())
        return numbers

    def to_frame(self) -> pd.DataFrame:
        """A copy as a pandas frame, one row per number."""
        return self._frame.copy()

    def chart(self) -> Bars:
        """Values of the network with their errors; where there are none, those of the layers."""
        whole = rows_of(self._frame, "network")
        rows = (whole if len(whole) else rows_of(self._frame, "layer")).dropna(subset="value")
        labels = [
            " ".join(filter(None, [measure_label(str(row["measure"]), str(row["options"])), str(row["layer"])]))
            for row in rows.to_dict("records")
        ]
        return Bars(labels, {"value": finite_or_nan(rows["value"])}, {"value": finite_or_nan(rows["stderr"])})

    @classmethod
    def parquet_key(cls) -> bytes:
        """The first result that was ever saved has the shortest key."""
        return b"flatscope"

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Printed table: one line per layer, units and samples summarised."""
        return list(HEADER), self.lines()

    def lines(self) -> list[list[str]]:
        """Printed rows: measure with options, layer, value, standard error, exact or not, remark."""
        result = []
        frame = self._frame.assign(many=self._frame["unit"].notna() | self._frame["sample"].notna())
        for (name, options, layer, many), rows in frame.groupby(["measure", "options", "layer", "many"], sort=False):
            row = rows.iloc[0]
            shown = measure_label(str(name), str(options))
            if many and len(rows) > 1:
                of = "values" if rows["unit"].notna().all() else "samples"
                low, high = readable_number(rows["value"].min()), readable_number(rows["value"].max())
                value = f"{low} … {high} ({len(rows)} {of})"
            else:
                value = searched_text(row) or readable_number(float(row["value"]))
            stderr = readable_number(float(row["stderr"])) if row["stderr"] > 0 else ""
            exact = "exact" if row["exact"] else "estimate"
            vacuous = "vacuous" if row.get("vacuous", False) and value != "n/a" else ""
            remark = "; ".join(part for part in (vacuous, str(row["reason"])) if part)
            result.append([shown, str(layer), value, stderr, "" if value == "n/a" else exact, remark])
        return result

    def _rows(self, name: str, level: str = "", what: str = "", where: str = "") -> pd.DataFrame:
        """All rows of a measure, or those of a level, of which there must be some."""
        rows = self._frame[self._frame["measure"] == name]
        if rows.empty:
            unknown = UnknownNameError.among(name, self.names, "measure in this table")
            if name in declarations():
                call = f"fs.measure(problem, [{name!r}])"
                way = {
                    "layer": f".layer({name!r})",
                    "unit": f".units({name!r}, layer)",
                    "sample": f".samples({name!r})",
                }
                unknown.fix = f"It was not asked for: {call}{way.get(level, f'[{name!r}]')} gives it"
            raise unknown
        matching = rows_of(rows, level) if level else rows
        if matching.empty:
            raise self._no_value_error(name, what, where)
        return matching

    def _network_row(self, name: str) -> pd.Series[Any]:
        rows = self._rows(name, "network", "network-wide value", "table")
        _refuse_several_values(name, rows, rows["layer"])
        return rows.iloc[0]

    def _no_value_error(self, name: str, what: str, where: str) -> InputError:
        reason = self.reason(name)
        doors = {
            "table": "table[name]",
            "layer": ".layer(name)",
            "units": ".units(name, layer)",
            "samples": ".samples(name)",
        }
        others = ", ".join(way for key, way in doors.items() if key not in where)
        fix = reason or f"Its values are of other places: {others}"
        return InputError(f"a {what} of {name}", "none in this table", where=where, fix=fix)


def _refuse_several_values(name: str, rows: pd.DataFrame, places: pd.Series[Any]) -> None:
    """Refuse to choose where one place has several values, of several options."""
    if places.duplicated().any():
        got = f"{len(rows)} ({'; '.join(dict.fromkeys(rows['options']))})"
        raise InputError(f"one value of {name}", got, "table", "Read them from to_frame()")


def options_text(options: Mapping[str, Any]) -> str:
    """Options as canonical JSON; empty when there are none."""
    return json.dumps(dict(options), sort_keys=True, default=str) if options else ""
