"""Audit: the verdicts, as a frame, for people, and in files."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any, Self

import pandas as pd

from flatscope.errors import refuse_unknown
from flatscope.results import Result, checked_columns, plain

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
CLEAR = 1e-2  # standard error with which "stands still" can be said


class Audit(Result):
    """What happened to each measure when the same function was written with other weights; see `to_frame`.

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

    @classmethod
    def _from_rows(cls, frame: pd.DataFrame, head: Any) -> Self:
        return cls(frame, head)

    def to_frame(self) -> pd.DataFrame:
        """One row per measure and symmetry.

        `before` and `after` are the value (of the network, or of the layer, unit or sample that changed most, in the
        trial in which it did), `relative_change` the distance between them divided by the largest value of that
        measure before, `stderr` the standard error of that ratio, `declared` whether the measure is declared
        invariant under this symmetry.
        """
        return self._frame.copy()

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

    def summary(self) -> str:
        """What moved, what stood still and what could not be tried, in a few sentences."""
        lines = [f"The same function written with other weights, {self.meta.get('trials', '?')} draws of each kind."]
        for symmetry, rows in self._frame.groupby("symmetry", sort=False):
            words = str(symmetry).replace("_", " ")
            tested = rows[rows["verdict"] != "not tested"]
            if tested.empty:
                lines.append(f"{words}: not tested. {rows['reason'].iloc[0]}".rstrip())
                continue
            for verdict, verb in (("moved", "move"), ("invariant", "stand still")):
                found = tested[tested["verdict"] == verdict]["measure"].tolist()
                lines.append(f"{words}: {len(found)} of {len(tested)} measures {verb}" + _listed(found))
            left = rows[rows["verdict"] == "not tested"]["measure"].tolist()
            if left:
                lines.append(f"{words}: {len(left)} have no value here" + _listed(left))
        wrong = self.disagrees
        if len(wrong):
            pairs = [
                f"{m} under {s} ({v})"
                for m, s, v in zip(wrong["measure"], wrong["symmetry"], wrong["verdict"], strict=True)
            ]
            lines.append("Against what they declare" + _listed(pairs))
        return "\n".join(lines)

    def lines(self) -> list[list[tuple[str, bool]]]:
        """The matrix for people: per measure its name, then one cell per symmetry; True where it disagrees."""
        wrong = set(zip(self.disagrees["measure"], self.disagrees["symmetry"], strict=True))
        cells = {
            (row.measure, row.symmetry): (_cell(row), (row.measure, row.symmetry) in wrong)
            for row in self._frame.itertuples()
        }
        return [
            [(name, False), *[cells.get((name, symmetry), ("", False)) for symmetry in self.symmetries]]
            for name in self.measures
        ]

    def notes(self) -> dict[str, list[str]]:
        """Reasons why something was not tested or is to be read with care, with the measures concerned."""
        found: dict[str, list[str]] = {}
        for row in self._frame[self._frame["reason"] != ""].itertuples():
            names = found.setdefault(f"{row.symmetry}: {row.reason}", [])
            names.append(str(row.measure))
        return found

    def gaps(self) -> list[str]:
        """Why cells say "not tested": a sentence per symmetry and reason, with the measures where it is not all."""
        found = []
        for symmetry, rows in self._frame.groupby("symmetry", sort=False):
            words = str(symmetry).replace("_", " ")
            for reason, left in rows[rows["verdict"] == "not tested"].groupby("reason", sort=False):
                names = "" if len(left) == len(rows) else f" ({', '.join(left['measure'])})"
                found.append(f"{words} not tested{names}: {reason!s}")
        return found

    def to_html(self) -> str:
        """The matrix as an HTML table; red where a verdict contradicts the declaration."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in ("measure", *self.symmetries))
        body = ""
        for line in self.lines():
            cells = "".join(
                f'<td style="color:#c00;font-weight:bold">{html.escape(text)}</td>'
                if bad
                else f"<td>{html.escape(text)}</td>"
                for text, bad in line
            )
            body += f"<tr>{cells}</tr>\n"
        return f'<table class="flatscope"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The matrix as text; an exclamation mark where a verdict contradicts the declaration."""
        rows = [[text + (" !" if bad else "") for text, bad in line] for line in self.lines()]
        return ["measure", *self.symmetries], rows

    def __repr__(self) -> str:
        return "\n".join([super().__repr__(), *self.gaps()])


def _cell(row: Any) -> str:
    """The verdict with the change that led to it."""
    if row.verdict == "not tested":
        return "not tested"
    error = f" ± {row.stderr:.1g}" if row.stderr > 0 else ""
    return f"{row.verdict} {row.relative_change:.2g}{error}"


def _listed(names: list[str]) -> str:
    return f": {', '.join(names)}." if names else "."
