"""`audit`: which measures change when the same function is written with other weights.

Every point computes the same function, so a measure that moves between them says something about how the network is
written and not about what it does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from flatscope.charts import Bars, finite_or_nan
from flatscope.errors import InputError, NotApplicable, refuse_unknown, refuse_unless_whole
from flatscope.formatting import some_of
from flatscope.isolation import own_settings
from flatscope.measuring import FAILED, Options, measure
from flatscope.network.passes import digits_of
from flatscope.network.units import Graph
from flatscope.problem import Problem
from flatscope.progress import progress
from flatscope.reading import graph_of_problem
from flatscope.registry import Declaration, select
from flatscope.result import Result, checked_columns, plain
from flatscope.significance import SEARCH, Readings, changes, excess
from flatscope.symmetries.folding import fold_batchnorm, has_batchnorm
from flatscope.symmetries.scaling import INNER, WAYS, drawn, ways_of
from flatscope.table import Table
from flatscope.version import __version__

# Relative change of an exact value that counts as rounding: sums over samples and layers lose some of the 16 (7)
# digits, and a rescaling by up to 25 some more.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2}
# Standard error of the relative change beyond which an estimate cannot tell that something stands still.
NOISY = 0.25
_ALWAYS_FIXED = ("network output", "read by no layer")
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
        lines = self._failed_lines(bool(tested))
        if not tested:
            return lines or ["Nothing could be rescaled here: rescaling is no reason to doubt a measure."]
        if moved:
            lines.append(f"Do not compare networks by {some_of(moved, SHOWN)}: the same function has other values.")
        if kept:
            lines.append(f"Unchanged, so fit to compare networks: {some_of(kept, SHOWN)}.")
        if len(self.disagrees):
            names = list(dict.fromkeys(self.disagrees["measure"]))
            lines.append(f"Against what they declare: {some_of(names, SHOWN)}. Doubt these numbers on this network.")
        return [*lines, "Unchanged is not yet useful: how well a measure predicts test error, fs.benchmark() says."]

    def _failed_lines(self, some_tested: bool) -> list[str]:
        """Measures that failed, with the reason; where none was tested, also those without a value."""
        rows, walled = self._frame, self._frame["symmetry"].isin(self.meta.get("not rescaled", ()))
        failed = rows["reason"].str.startswith(FAILED)
        rows = rows[failed if some_tested else (rows["verdict"] == "not tested") & ~walled]
        reasons = rows.groupby("reason", sort=False)["measure"].unique()
        return [f"Not tested: {some_of(list(names), SHOWN)} ({reason})." for reason, names in reasons.items()][:SHOWN]

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
                found = tested[tested["verdict"] == verdict]["measure"].tolist()
                lines.append(f"{words}: {len(found)} of {len(tested)} measures {verb}" + _listed(found))
            left = rows[rows["verdict"] == "not tested"]["measure"].tolist()
            if left:
                lines.append(f"{words}: {len(left)} have no value here" + _listed(left))
        if pairs := [f"{row.measure} under {row.symmetry} ({row.verdict})" for row in self.disagrees.itertuples()]:
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


@own_settings()
def audit(
    problem: Problem,
    names: str | Iterable[str] | None = None,
    by: str | Iterable[str] | None = None,
    trials: int = 3,
    seed: int = 0,
    *,
    options: Options | None = None,
    low: float = 0.2,
    high: float = 5.0,
) -> Audit:
    """Rewrite the network's weights without changing its function, and measure again.

    BatchNorm is folded first, and the first point is the folded network (for `by="batchnorm"`: the network as it is).
    Everything is computed in float64, so that rounding does not pass for a change.

    Args:
        problem: model, data, loss.
        names: names or globs of measures; None: the core set; "standard": all that are not "long"; "all": every one.
        by: what to draw: "layer" (a factor per layer), "unit" (a factor per unit), "permutation" (units change
            places), "batchnorm" (a factor per channel on scale and shift of each BatchNorm), "attention" (a factor per
            dimension of a head on queries, its inverse on keys), "norm" (a factor per channel on scale and shift of
            each other normalisation). None: "layer" and "unit", and the last two where the network has any.
        trials: networks to draw of each kind.
        seed: of the draws and of the measures' own random streams, which are the same at every point.
        options: {measure: {option: value}}.
        low: smallest factor; factors are log-uniform.
        high: largest factor.

    Returns:
        Per measure and symmetry the largest relative change and a verdict: invariant, moved, or not tested.

    Example:
        >>> import torch, flatscope as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
        >>> problem = fs.Problem(net, train=(torch.eye(4), torch.tensor([0, 1, 2, 0])))
        >>> found = fs.audit(problem, ["l2_norm", "l1_path_norm"], by="unit")
        >>> found.verdict("l2_norm", "unit_scaling"), found.verdict("l1_path_norm", "unit_scaling")
        ('moved', 'invariant')
    """
    if not isinstance(problem, Problem):
        raise InputError("a Problem", type(problem).__name__, "audit", "Make one: Problem(model, train=(x, y))")
    ways = [by] if isinstance(by, str) else list(by or ())
    for way in ways:
        refuse_unknown(way, WAYS, "symmetry to audit")
    refuse_unless_whole(trials, "trials")
    chosen, begun = select(names), time.perf_counter()
    wanted = [entry.name for entry in chosen]
    given = problem.in_double()
    if by is None:
        ways = [way for way in ways_of(given.model, given.example()) if way in ("layer", "unit", *INNER)]
    points: dict[str, tuple[Problem, Table]] = {}
    rows: list[dict[str, Any]] = []
    walled: list[str] = []
    with progress("Auditing", total=len(ways), lines=True) as advance:
        for number, way in enumerate(ways):
            advance(min(number, 1), note=f"{way} ({number + 1} of {len(ways)})", coming=1)
            form = _form(given, way)
            if form not in points:
                base = given.plain if form == "plain" else given
                if form == "folded":
                    base = given.with_model(fold_batchnorm(given.model, given.example()))
                points[form] = base, measure(base, wanted, seed, options)
            base, before = points[form]
            try:
                twins, remark = _twins(base, way, trials, seed, low, high)
                after = [measure(twin, wanted, seed, options) for twin in twins]
            except NotApplicable as wall:
                rows += [_untested(entry, way, str(wall)) for entry in chosen]
                walled.append(WAYS[way])
                continue
            rows += [_row(entry, way, before, after, digits_of(base.model), remark) for entry in chosen]
    rows.sort(key=lambda row: wanted.index(row["measure"]))
    drawn = {"trials": trials, "seed": seed, "low": low, "high": high, "n_train": problem.n_train}
    seconds = round(time.perf_counter() - begun, 3)
    return Audit(pd.DataFrame(rows), {"version": __version__, **drawn, "not rescaled": walled, "seconds": seconds})


def _form(given: Problem, way: str) -> str:
    """Form of the network that is rewritten: "folded", without BatchNorm; "plain"; or "given"."""
    if way != "batchnorm" and has_batchnorm(given.model):
        return "folded"
    return "plain" if way in INNER and given.plain is not given else "given"


def _twins(base: Problem, way: str, trials: int, seed: int, low: float, high: float) -> tuple[Iterator[Problem], str]:
    """The network with other weights and the same function, `trials` times, and what could not be moved."""
    if way == "batchnorm" and not has_batchnorm(base.model):
        raise NotApplicable("the network has no BatchNorm")
    example = base.example()
    graph = graph_of_problem(base, inner=way in INNER)

    def twins() -> Iterator[Problem]:
        for trial in range(trials):
            own = (seed * 10_007 + trial) % 2**63
            other = base.rescaled(drawn(base.model, graph, example, way, low, high, own))
            other.initial = base.initial
            yield other

    return twins(), _walls(graph, way)


def _walls(graph: Graph, way: str) -> str:
    """Units that cannot be rescaled, with the reason; empty where all can."""
    if way not in ("layer", "unit"):
        return ""
    reasons = [wall for wall in graph.walls if wall not in _ALWAYS_FIXED]
    reasons += [f"{weight} inside {what}" for weight, what in graph.not_covered.items()]
    return "not rescaled: " + "; ".join(reasons) if reasons else ""


def _untested(entry: Declaration, way: str, reason: str) -> dict[str, Any]:
    symmetry, nan = WAYS[way], math.nan
    cells = (entry.name, symmetry, nan, nan, nan, 0.0, "not tested", reason, symmetry in entry.invariant_under)
    return dict(zip(COLUMNS, cells, strict=True))


def _row(
    entry: Declaration, way: str, before: Table, after: list[Table], dtype: torch.dtype, remark: str
) -> dict[str, Any]:
    """The verdict on one measure under one symmetry, with the value that shows it best."""
    sort_units = way == "permutation" and entry.per == "unit"
    places, first, _ = found = _values(before, entry, sort_units)
    others = [_values(table, entry, sort_units) for table in after]
    missing = next((reason for _, read, reason in (found, *others) if not len(read.value)), None)
    if missing is not None:
        return _untested(entry, way, missing or "no value")
    if any(not places.equals(theirs) for theirs, _, _ in others):
        return _untested(entry, way, "has values for other layers or units after the change")
    comparisons = len(first.value) * len(others)
    worst = (_worst(first, read, comparisons, dtype) for _, read, _ in others)
    beyond, searched, columns = max(worst, key=lambda change: change[0])
    moved, error = beyond > 1, columns["stderr"]
    if not moved and error > NOISY:
        return _untested(entry, way, f"an estimate with a standard error of {100 * error:.0f} % cannot tell")
    remarks = [remark] if remark else []
    if not moved and error > 0:
        remarks.append("no change beyond the error of the estimate")
    if not moved and entry.search:
        judged = f"{100 * SEARCH:g} %" if searched else "its own bracket"
        remarks.append(f"a searched maximum, judged to {judged}")
    verdict = {"verdict": "moved" if moved else "invariant"}
    return _untested(entry, way, "; ".join(remarks)) | columns | verdict


def _values(table: Table, entry: Declaration, sort_units: bool) -> tuple[pd.MultiIndex, Readings, str]:
    """Labels of a measure's numbers, the numbers, and the reason where there are none."""
    frame = table.to_frame()
    frame = frame[frame["measure"] == entry.name]
    if entry.per == "network":  # its factors by layer may well move
        frame = frame[frame["layer"] == ""]
    reason = next((str(text) for text in frame["reason"] if text), "")
    frame = frame[frame["value"].notna()]
    if sort_units:  # which unit stands where is all that a permutation changes
        frame = frame.sort_values(["layer", "options", "value"], kind="stable")
        frame = frame.assign(unit=frame.groupby(["layer", "options"]).cumcount())
    places = pd.MultiIndex.from_frame(frame[["layer", "options", "unit", "sample"]].astype("string"))
    return places, Readings.of(frame, entry.bracketed), reason


def _worst(
    first: Readings, other: Readings, comparisons: int, dtype: torch.dtype
) -> tuple[float, bool, dict[str, Any]]:
    """Largest change beyond noise, whether the entry was searched, and its columns of the row."""
    scale = float(np.abs(first.value[np.isfinite(first.value)]).max(initial=0.0)) or 1.0
    exceeding = excess(first, other, scale=scale, rounding=ROUNDING.get(dtype, 1e-2), comparisons=comparisons)
    place = int(np.argmax(exceeding))
    columns = {
        "before": float(first.value[place]),
        "after": float(other.value[place]),
        "relative_change": float(changes(first, other)[place] / scale),
        "stderr": float(np.hypot(first.stderr, other.stderr)[place] / scale),
    }
    return float(exceeding[place]), bool(first.searched[place] | other.searched[place]), columns


def _cell(row: Any) -> str:
    """The verdict with the change that led to it."""
    if row.verdict == "not tested":
        return "not tested"
    error = f" ± {row.stderr:.1g}" if row.stderr > 0 else ""
    return f"{row.verdict} {row.relative_change:.2g}{error}"


def _listed(names: list[str]) -> str:
    return f": {', '.join(names)}." if names else "."
