"""Changes of measures under rewriting of a network, as a result that is shown and saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from flatscope.charts import Bars, finite_or_nan
from flatscope.errors import refuse_unknown
from flatscope.formatting import first_of_names
from flatscope.measuring import FAILED
from flatscope.result import Result, checked_columns, plain

# Standard error of the relative change beyond which an estimate cannot tell that something stands still.
NOISY = 0.25
COLUMNS = {
    "measure": "str",
    "symmetry": "str",
    "before": "float64",
    "after": "float64",
    "relative_change": "float64",
    "stderr": "float64",
    "verdict": "str",
    "reason": "str",
    "declared": "bool",
}
# A change that an undeclared symmetry makes at the least; below it the declaration says too little.
STANDS_STILL = 1e-3
SHOWN = 6  # names in a line of the headline
CLEAR = 1e-2  # standard error with which "stands still" can be said


class Audit(Result):
    """Changes of measures when the same function is written with other weights, one row each; see `to_frame`.

    Args:
        frame: one row per measure and symmetry, with the columns of `to_frame`.
        meta: how the networks were drawn.

    Example:
        >>> import torch, flatscope as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> problem = fs.Problem(net, train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> found = fs.audit(problem, ["l2_norm", "margin"], by="unit", trials=1)
        >>> found.to_frame()[["measure", "verdict"]].to_numpy().tolist()
        [['l2_norm', 'moved'], ['margin', 'invariant']]
    """

    WORD = "audit"
    COLUMNS = COLUMNS

    def __init__(self, frame: pd.DataFrame, meta: Mapping[str, Any] | None = None) -> None:
        self._frame = checked_columns(frame, COLUMNS, "audit")
        self.meta: dict[str, Any] = plain(meta or {})

    def __len__(self) -> int:
        return len(self._frame)

    def to_frame(self) -> pd.DataFrame:
        """One row per measure and symmetry.

        `before` and `after` are the value (of the network, or of the layer, unit or sample that changed most, in the
        trial in which it did), `relative_change` the distance between them divided by the largest value of that
        measure before, `stderr` the standard error of that ratio, `declared` whether the measure is declared
        invariant under this symmetry.
        """
        return self._frame.copy()

    def chart(self) -> Bars:
        """Relative change of each measure, a series for each symmetry."""
        changes = self._frame.pivot_table("relative_change", "measure", "symmetry", sort=False, dropna=False)
        columns = {str(name): finite_or_nan(changes[name]) for name in changes}
        return Bars([str(name) for name in changes.index], columns, axis="relative change of the same function")

    @property
    def measures(self) -> list[str]:
        """Names of the audited measures."""
        return list(dict.fromkeys(self._frame["measure"]))

    @property
    def symmetries(self) -> list[str]:
        """Names of the symmetries that were tried."""
        return list(dict.fromkeys(self._frame["symmetry"]))

    def verdict(self, measure: str, symmetry: str) -> str:
        """`invariant`, `moved` or `not tested`."""
        refuse_unknown(measure, self.measures, "measure in this audit")
        refuse_unknown(symmetry, self.symmetries, "symmetry in this audit")
        rows = self._frame[(self._frame["measure"] == measure) & (self._frame["symmetry"] == symmetry)]
        return str(rows["verdict"].iloc[0])

    @property
    def disagrees(self) -> pd.DataFrame:
        """The rows in which a verdict contradicts the declaration.

        Declared invariant and moved; or not declared, and yet the value stands clearly still. An estimate too
        noisy to tell is neither.
        """
        frame = self._frame
        wrong = frame["declared"] & (frame["verdict"] == "moved")
        still = (frame["relative_change"] < STANDS_STILL) & (frame["stderr"] < CLEAR)
        modest = ~frame["declared"] & (frame["verdict"] == "invariant") & still
        return frame[wrong | modest].copy()

    def headline_lines(self) -> list[str]:
        """Which measures may compare networks, because no way of writing the function changes them, and which not."""
        frame = self._frame
        moved = list(dict.fromkeys(frame[frame["verdict"] == "moved"]["measure"]))
        tested = list(dict.fromkeys(frame[frame["verdict"] != "not tested"]["measure"]))
        kept = [name for name in tested if name not in moved]
        lines = self._lines_on_failed_measures(bool(tested))
        if not tested:
            return lines or ["Nothing could be rescaled here: rescaling is no reason to doubt a measure."]
        if moved:
            lines.append(
                f"Do not compare networks by {first_of_names(moved, SHOWN)}: the same function has other values."
            )
        if kept:
            lines.append(f"Unchanged, so fit to compare networks: {first_of_names(kept, SHOWN)}.")
        if len(self.disagrees):
            names = list(dict.fromkeys(self.disagrees["measure"]))
            lines.append(
                f"Against what they declare: {first_of_names(names, SHOWN)}. Doubt these numbers on this network."
            )
        return [*lines, "Unchanged is not yet useful: how well a measure predicts test error, fs.benchmark() says."]

    def _lines_on_failed_measures(self, some_tested: bool) -> list[str]:
        """Measures that failed, with the reason; where none was tested, also those without a value."""
        rows, walled = self._frame, self._frame["symmetry"].isin(self.meta.get("not rescaled", ()))
        failed = rows["reason"].str.startswith(FAILED)
        rows = rows[failed if some_tested else (rows["verdict"] == "not tested") & ~walled]
        reasons = rows.groupby("reason", sort=False)["measure"].unique()
        return [f"Not tested: {first_of_names(list(names), SHOWN)} ({reason})." for reason, names in reasons.items()][
            :SHOWN
        ]

    def summary(self) -> str:
        """The headline, then what changed, what did not and what could not be tried, in a few sentences."""
        lines = [
            *self.headline_lines(),
            f"The same function written with other weights, {self.meta.get('trials', '?')} draws of each kind.",
        ]
        for symmetry, rows in self._frame.groupby("symmetry", sort=False):
            words = str(symmetry).replace("_", " ")
            tested = rows[rows["verdict"] != "not tested"]
            if tested.empty:
                lines.append(f"{words}: not tested. {rows['reason'].iloc[0]}".rstrip())
                continue
            for verdict, verb in (("moved", "changed"), ("invariant", "unchanged")):
                names = tested[tested["verdict"] == verdict]["measure"].tolist()
                lines.append(f"{words}: {len(names)} of {len(tested)} measures {verb}" + _names_in_words(names))
            left = rows[rows["verdict"] == "not tested"]["measure"].tolist()
            if left:
                lines.append(f"{words}: {len(left)} have no value here" + _names_in_words(left))
        if pairs := [f"{row.measure} under {row.symmetry} ({row.verdict})" for row in self.disagrees.itertuples()]:
            lines.append("Against what they declare" + _names_in_words(pairs))
        return "\n".join(lines)

    def lines(self) -> list[list[tuple[str, bool]]]:
        """The matrix for people: per measure its name, then one cell per symmetry; True where it disagrees."""
        wrong = set(zip(self.disagrees["measure"], self.disagrees["symmetry"], strict=True))
        cells = {
            (row.measure, row.symmetry): (_verdict_cell(row), (row.measure, row.symmetry) in wrong)
            for row in self._frame.itertuples()
        }
        return [
            [(name, False), *[cells.get((name, symmetry), ("", False)) for symmetry in self.symmetries]]
            for name in self.measures
        ]

    def notes(self) -> dict[str, list[str]]:
        """Reasons why something was not tested or is to be read with care, with the measures concerned."""
        concerned: dict[tuple[str, str], list[str]] = {}
        for row in self._frame[self._frame["reason"] != ""].itertuples():
            concerned.setdefault((str(row.reason), str(row.symmetry)), []).append(str(row.measure))
        under: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for (reason, symmetry), names in concerned.items():
            under.setdefault((reason, tuple(names)), []).append(symmetry)
        return {
            reason if len(some) == len(self.symmetries) else f"{', '.join(some)}: {reason}": list(names)
            for (reason, names), some in under.items()
        }

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The matrix as text; an exclamation mark where a verdict contradicts the declaration."""
        rows = [[text + (" !" if bad else "") for text, bad in line] for line in self.lines()]
        return ["measure", *self.symmetries], rows

    def __repr__(self) -> str:
        notes = [f"{reason} ({', '.join(names)})" for reason, names in self.notes().items()]
        return "\n".join([super().__repr__(), *notes])


def _verdict_cell(row: Any) -> str:
    """The verdict with the change that led to it."""
    if row.verdict == "not tested":
        return "not tested"
    error = f" ± {row.stderr:.1g}" if row.stderr > 0 else ""
    return f"{row.verdict} {row.relative_change:.2g}{error}"


def _names_in_words(names: list[str]) -> str:
    return f": {', '.join(names)}." if names else "."
