"""Atlas: the correlation of every measure with the generalization gap, as a function of when training stops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from flatscope.charts import Curves
from flatscope.errors import InputError, refuse_unknown
from flatscope.formatting import first_of_names, readable_number
from flatscope.result import DRAWN, Result, checked_columns, plain
from flatscope.significance import checked_confidence

AXES = {"epoch": "epoch", "train_loss": "training loss", "train_accuracy": "training accuracy"}
MANY = {"epoch": "epochs", "train_loss": "training losses", "train_accuracy": "training accuracies"}
KINDS = {"pearson": "Pearson’s correlation", "spearman": "Spearman’s correlation", "kendall": "Kendall’s tau"}
MOST_NAMED = 4  # measures in a line of the headline
KEY = ["measure", "axis", "scope", "kind"]  # what tells curves apart
COLUMNS = {
    "measure": "str", "kind": "str", "scope": "str", "axis": "str", "at": "float64", "value": "float64",
    "low": "float64", "high": "float64", "band_low": "float64", "band_high": "float64",
    "n": "int64", "networks": "int64", "median_epoch": "float64", "median_loss": "float64",
}  # fmt: skip


class CurvePoint(NamedTuple):
    """A point of a curve; see `Atlas.to_frame`."""

    at: float
    value: float
    low: float
    high: float
    band_low: float
    band_high: float
    n: int
    networks: int
    median_epoch: float
    median_loss: float

    @property
    def settled(self) -> int:
        """The sign of the correlation where the band that holds for all points leaves no doubt, else 0."""
        return int(self.band_low > 0) - int(self.band_high < 0)


class Atlas(Result):
    """Curves of correlations along training.

    Args:
        frame: one row per measure, kind of correlation, scope, axis and point; see `to_frame`.
        meta: provenance, target, networks, level of the intervals.

    Example:
        >>> import numpy, pandas as pd, flatscope as fs
        >>> draw = numpy.random.default_rng(0).normal
        >>> rows = [{"network": k, "epoch": e, "gap": g, "margin": (5 - e) * g + draw()}
        ...         for k, g in enumerate(draw(size=40)) for e in (1, 9)]
        >>> found = fs.atlas(pd.DataFrame(rows), kinds=["spearman"], resamples=200)
        >>> found.turns("margin")
        [(1.0, 9.0)]
    """

    WORD = "atlas"
    ENDINGS = (".parquet", ".json", ".md", ".csv", *DRAWN)
    COLUMNS = COLUMNS

    def __init__(self, frame: pd.DataFrame, meta: Mapping[str, Any] | None = None) -> None:
        self._frame = checked_columns(frame, COLUMNS, "atlas")
        for column, known in (("axis", AXES), ("kind", KINDS)):
            for name in self._frame[column].unique():
                refuse_unknown(name, known, f"{column} of an atlas")
        self.meta: dict[str, Any] = plain(meta or {})
        self.confidence = checked_confidence(float(self.meta.get("confidence", 0.95)))
        self._names = {column: [str(name) for name in self._frame[column].unique()] for column in KEY}
        self._curves: dict[tuple[str, ...], list[CurvePoint]] = {}
        columns = [self._frame[name].tolist() for name in (*KEY, *CurvePoint._fields)]
        for row in zip(*columns, strict=True):
            self._curves.setdefault(row[: len(KEY)], []).append(CurvePoint(*row[len(KEY) :]))
        places = {(key[1], tuple(point.at for point in curve)) for key, curve in self._curves.items()}
        complete = len(self._curves) == math.prod(len(names) for names in self._names.values())
        if not self._curves or not complete or len(places) > len(self._names["axis"]):
            raise InputError("the same points for all curves of an axis", "others, or none", where="atlas")

    def to_frame(self) -> pd.DataFrame:
        """One row per curve and point, in the order of training.

        `scope` says over which networks, `axis` what `at` is a value of. `low` and `high` are the interval of a point
        by itself, `band_low` and `band_high` that which holds for all measures and points of one kind, scope and axis
        together. `n` of `networks` are there, after `median_epoch` epochs and at the loss `median_loss`.
        """
        return self._frame.copy()

    def chart(self) -> Curves:
        """The curve of each measure over the first scope, axis and kind."""
        scope, axis, kind = (self.names(column)[0] for column in ("scope", "axis", "kind"))
        curves = {}
        for measure in self.names("measure"):
            points = self.curve(measure, axis, scope, kind)
            curves[measure] = ([point.at for point in points], [point.value for point in points])
        return Curves(curves, axis, f"{kind} with {self.meta.get('target', 'the target')}", {"none": 0.0})

    def names(self, column: str) -> list[str]:
        """Values of `measure`, `kind`, `scope` or `axis`, in order."""
        refuse_unknown(column, KEY, "column with names")
        return list(self._names[column])

    def curve(self, measure: str, axis: str = "", scope: str = "", kind: str = "") -> list[CurvePoint]:
        """The points of one curve; by default over epochs, all networks, the first kind of correlation."""
        return self._curves[self._curve_key(measure, axis, scope, kind)]

    def _curve_key(self, *names: str) -> tuple[str, ...]:
        """Values that were asked for, the first of its kind where nothing was."""
        key = tuple(name or self._names[column][0] for column, name in zip(KEY, names, strict=True))
        for column, name in zip(KEY, key, strict=True):
            refuse_unknown(name, self._names[column], f"{column} of this atlas")
        return key

    def turns(self, measure: str, axis: str = "", scope: str = "", kind: str = "") -> list[tuple[float, float]]:
        """Between which points the sign changes, where the band excludes zero on both sides; see `curve`."""
        settled = [point for point in self.curve(measure, axis, scope, kind) if point.settled]
        return [(a.at, b.at) for a, b in itertools.pairwise(settled) if a.settled != b.settled]

    def sentence(self, measure: str, axis: str = "", scope: str = "", kind: str = "") -> str:
        """Sentence on the begin, the changes of sign and the end of a curve."""
        _, along, _, which = self._curve_key(measure, axis, scope, kind)
        known = [point for point in self.curve(measure, axis, scope, kind) if not math.isnan(point.value)]
        if not known:
            return f"{measure}: {KINDS[which]} has no value: too few networks, or nothing varies."
        begins, ends = (
            f"{estimate_with_interval(point)} at {axis_value_in_words(along, point.at)}"
            for point in (known[0], known[-1])
        )
        if len(known) == 1:
            return f"{measure}: {KINDS[which]} {begins}, the only point."
        turns = self.turns(measure, axis, scope, kind)
        words = ", ".join(
            f"turns between {places_between_in_words(along, a, b)}{_place_of_zero_crossing(along, known, a, b)}"
            for a, b in turns
        )
        if not turns:
            words = "keeps its sign" if known[0].settled and known[-1].settled else "no settled turn"
        return f"{measure}: {KINDS[which]} {begins}, {words}, {ends}."

    def headline_lines(self) -> list[str]:
        """Sentences on how many measures change the sign of their correlation in training, and what follows."""
        names = self.names("measure")
        turning = [name for name in names if self.turns(name)]
        sign = [name for name in names if name not in turning and any(point.settled for point in self.curve(name))]
        lines = (
            [f"The correlation of {first_of_names(turning, MOST_NAMED)} changes its sign in training."]
            if turning
            else []
        )
        if sign:
            lines.append(f"{first_of_names(sign, MOST_NAMED)}: clearly of one sign somewhere, and it never turns.")
        if not (turning or sign):
            lines.append("No correlation is clear at any point: more networks, or none of these measures.")
        advice = "Next: compare networks at one training loss; a correlation read at another may have the other sign."
        return [
            *lines,
            advice if turning else "Next: these are correlations among these networks; check them on others.",
        ]

    def summary(self) -> str:
        """The headline, then a sentence for every measure, over the epochs and all networks."""
        return "\n".join([*self.headline_lines(), *(self.sentence(measure) for measure in self.names("measure"))])

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Every measure over the epochs and all networks: the first point, where it turns, the last."""
        axis, rows = self._names["axis"][0], []
        for measure in self.names("measure"):
            first, last = (self.curve(measure)[end] for end in (0, -1))
            turned = "; ".join(places_between_in_words(axis, a, b) for a, b in self.turns(measure)) or "no"
            rows.append(
                [
                    measure,
                    f"{estimate_with_interval(first)}, n = {first.n}",
                    turned,
                    f"{estimate_with_interval(last)}, n = {last.n}",
                ]
            )
        return [
            "measure",
            axis_value_in_words(axis, first.at),
            "turns between",
            axis_value_in_words(axis, last.at),
        ], rows


def signed_number(value: float) -> str:
    """`+0.71`."""
    return "n/a" if math.isnan(value) else f"{value:+.2f}".replace("-", "−")


def interval_in_words(point: CurvePoint) -> str:
    """`[−0.61, −0.42]`, or nothing."""
    return "" if math.isnan(point.low) else f"[{point.low:.2f}, {point.high:.2f}]".replace("-", "−")


def estimate_with_interval(point: CurvePoint) -> str:
    """`−0.52 [−0.61, −0.42]`."""
    return f"{signed_number(point.value)} {interval_in_words(point)}".strip()


def level_in_words(axis: str, at: float) -> str:
    """A value of an axis: 0.05, 99.5 %, 150."""
    return f"{100 * at:.6g}\N{NO-BREAK SPACE}%" if axis == "train_accuracy" else readable_number(at, 3)


def axis_value_in_words(axis: str, at: float) -> str:
    """`epoch 150`, `training loss 0.1`."""
    return f"{AXES[axis]} {level_in_words(axis, at)}"


def places_between_in_words(axis: str, first: float, last: float) -> str:
    """`epochs 40 and 160`."""
    return f"{MANY[axis]} {level_in_words(axis, first)} and {level_in_words(axis, last)}"


def _place_of_zero_crossing(axis: str, known: Sequence[CurvePoint], first: float, last: float) -> str:
    """Place at which the curve itself crosses zero between two points, if it does so once."""
    inside = [point for point in known if min(first, last) <= point.at <= max(first, last)]
    crossed = [(a, b) for a, b in itertools.pairwise(inside) if a.value * b.value < 0]
    if len(crossed) != 1:
        return ""
    a, b = crossed[0]
    at = a.at + a.value / (a.value - b.value) * (b.at - a.at)
    return f" (zero near {level_in_words(axis, round(at) if axis == 'epoch' else float(f'{at:.2g}'))})"
