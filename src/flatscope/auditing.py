"""`audit`: which measures change when the same function is written with other weights.

Every point computes the same function, so a measure that moves between them says something about how the network is
written and not about what it does.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from flatscope.errors import InputError, NotApplicable, refuse_unknown, refuse_unless_whole
from flatscope.guards import own_settings
from flatscope.measuring import Options, measure
from flatscope.network.tracing import trace
from flatscope.network.units import Graph
from flatscope.noise import SEARCH, Readings, changes, excess
from flatscope.params import Params
from flatscope.problem import Problem
from flatscope.registry import Declaration, select
from flatscope.symmetries.audit import COLUMNS, Audit
from flatscope.symmetries.folding import fold_batchnorm, has_batchnorm
from flatscope.symmetries.scaling import (
    permuted_params,
    random_permutation,
    random_scales,
    rescaled_params,
    with_weights,
)
from flatscope.table import Table
from flatscope.version import __version__

SYMMETRY_OF = {
    "layer": "layer_scaling",
    "unit": "unit_scaling",
    "permutation": "permutation",
    "batchnorm": "batchnorm_scaling",
}
# Relative change of an exact value that counts as rounding: sums over samples and layers lose some of the 16 (7)
# digits, and a rescaling by up to 25 some more.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2}
# Standard error of the relative change beyond which an estimate cannot tell that something stands still.
NOISY = 0.25
_ALWAYS_FIXED = ("network output", "read by no layer")


@own_settings()
def audit(
    problem: Problem,
    names: str | Iterable[str] | None = None,
    by: str | Iterable[str] = ("layer", "unit"),
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
        names: names or globs of measures; None: every one that is not "long"; "all": every one.
        by: what to draw: "layer" (a factor per layer), "unit" (a factor per unit), "permutation" (units change
            places), "batchnorm" (a factor per channel on scale and shift of each BatchNorm).
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
    ways = [by] if isinstance(by, str) else list(by)
    for way in ways:
        refuse_unknown(way, SYMMETRY_OF, "symmetry to audit")
    refuse_unless_whole(trials, "trials")
    chosen, begun = select(names), time.perf_counter()
    wanted = [entry.name for entry in chosen]
    given = in_double(problem)
    points: dict[bool, tuple[Problem, Table]] = {}
    rows: list[dict[str, Any]] = []
    for way in ways:
        folding = way != "batchnorm" and has_batchnorm(given.model)
        if folding not in points:
            base = given.with_model(fold_batchnorm(given.model, given.example())) if folding else given
            points[folding] = base, measure(base, wanted, seed, options)
        base, before = points[folding]
        drawing = _Drawing(way, trials, seed, low, high)
        try:
            after = [measure(twin, wanted, seed, options) for twin in drawing.twins(base)]
        except NotApplicable as wall:
            rows += [_untested(entry, way, str(wall)) for entry in chosen]
            continue
        rows += [_row(entry, way, before, after, base.dtype, drawing.remark) for entry in chosen]
    order = {name: place for place, name in enumerate(wanted)}
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).sort_values("measure", key=lambda c: c.map(order), kind="stable")
    return Audit(
        frame,
        {
            "version": __version__,
            "trials": trials,
            "seed": seed,
            "low": low,
            "high": high,
            "n_train": problem.n_train,
            "seconds": round(time.perf_counter() - begun, 3),
        },
    )


def in_double(problem: Problem) -> Problem:
    """The same problem in float64, where the device has it."""
    if problem.dtype == torch.float64 or problem.device.type == "mps":
        return problem
    other = copy.copy(problem)
    other.dtype = torch.float64
    double = other.with_model(problem.model)
    if problem.initial is not None:
        double.initial = {name: value.double() for name, value in problem.initial.items()}
    return double


@dataclass
class _Drawing:
    """Random networks of one kind with the function of a given one, and what could not be moved."""

    way: str
    trials: int
    seed: int
    low: float
    high: float
    remark: str = ""

    def twins(self, base: Problem) -> Iterator[Problem]:
        """The given network with other weights, `trials` times; refused where a wall forbids it."""
        if self.way == "batchnorm" and not has_batchnorm(base.model):
            raise NotApplicable("the network has no BatchNorm")
        example = base.example()
        graph = trace(base.model, example)
        self.remark = _walls(graph, self.way)
        for trial in range(self.trials):
            changed = self._params(graph, base.params, (self.seed * 10_007 + trial) % 2**63)
            other = base.with_model(with_weights(base.model, changed, example, f"audit by {self.way}"))
            other.initial = base.initial
            yield other

    def _params(self, graph: Graph, params: Params, seed: int) -> Params:
        if self.way == "permutation":
            return permuted_params(graph, params, random_permutation(graph, seed))
        return rescaled_params(graph, params, random_scales(graph, self.way, self.low, self.high, seed))


def _walls(graph: Graph, way: str) -> str:
    """What kept some of the units from being moved; empty where nothing did."""
    if way in ("permutation", "batchnorm"):
        return ""
    reasons = [wall for wall in graph.walls if wall not in _ALWAYS_FIXED]
    reasons += [f"{weight} inside {what}" for weight, what in graph.unfollowed.items()]
    return "not rescaled: " + "; ".join(reasons) if reasons else ""


def _untested(entry: Declaration, way: str, reason: str) -> dict[str, Any]:
    symmetry = SYMMETRY_OF[way]
    return {
        "measure": entry.name,
        "symmetry": symmetry,
        "before": math.nan,
        "after": math.nan,
        "relative_change": math.nan,
        "stderr": 0.0,
        "verdict": "not tested",
        "reason": reason,
        "declared": symmetry in entry.invariant_under,
    }


def _row(
    entry: Declaration, way: str, before: Table, after: list[Table], dtype: torch.dtype, remark: str
) -> dict[str, Any]:
    """The verdict on one measure under one symmetry, with the value that shows it best."""
    sort_units = way == "permutation" and entry.per == "unit"
    first = _Values.of(before, entry, sort_units)
    others = [_Values.of(table, entry, sort_units) for table in after]
    missing = next((values.reason for values in (first, *others) if not len(values.read.value)), None)
    if missing is not None:
        return _untested(entry, way, missing or "no value")
    if any(not first.places.equals(values.places) for values in others):
        return _untested(entry, way, "has values for other layers or units after the change")
    comparisons = len(first.read.value) * len(others)
    worst = max((_worst(first.read, v.read, comparisons, dtype) for v in others), key=lambda change: change.excess)
    if not worst.moved and worst.stderr > NOISY:
        return _untested(entry, way, f"an estimate with a standard error of {100 * worst.stderr:.0f} % cannot tell")
    remarks = [remark] if remark else []
    if not worst.moved and worst.stderr > 0:
        remarks.append("no change beyond the error of the estimate")
    if not worst.moved and worst.searched:
        remarks.append(f"a searched maximum, judged to {100 * SEARCH:g} %")
    return _untested(entry, way, "; ".join(remarks)) | {
        "before": worst.before,
        "after": worst.after,
        "relative_change": worst.relative,
        "stderr": worst.stderr,
        "verdict": "moved" if worst.moved else "invariant",
    }


@dataclass(frozen=True)
class _Values:
    """The numbers of one measure at one point, and where they stand."""

    places: pd.MultiIndex
    read: Readings
    reason: str

    @classmethod
    def of(cls, table: Table, entry: Declaration, sort_units: bool) -> _Values:
        """The rows of a measure; of a network-wide one the network's value alone, whose factors may well move."""
        frame = table.to_frame()
        frame = frame[frame["measure"] == entry.name]
        if entry.per == "network":
            frame = frame[frame["layer"] == ""]
        reason = next((str(text) for text in frame["reason"] if text), "")
        frame = frame[frame["value"].notna()]
        if sort_units:  # which unit stands where is all that a permutation changes
            frame = frame.sort_values(["layer", "options", "value"], kind="stable")
            frame = frame.assign(unit=frame.groupby(["layer", "options"]).cumcount())
        places = pd.MultiIndex.from_frame(frame[["layer", "options", "unit", "sample"]].astype("string"))
        return cls(places, Readings.of(frame), reason)


@dataclass(frozen=True)
class _Change:
    before: float
    after: float
    relative: float
    stderr: float
    excess: float
    searched: bool

    @property
    def moved(self) -> bool:
        return self.excess > 1


def _worst(first: Readings, other: Readings, comparisons: int, dtype: torch.dtype) -> _Change:
    """The entry whose change exceeds most what rounding, estimation and search can explain."""
    scale = float(np.abs(first.value[np.isfinite(first.value)]).max(initial=0.0)) or 1.0
    exceeding = excess(first, other, scale=scale, rounding=ROUNDING.get(dtype, 1e-2), comparisons=comparisons)
    place = int(np.argmax(exceeding))
    return _Change(
        before=float(first.value[place]),
        after=float(other.value[place]),
        relative=float(changes(first, other)[place] / scale),
        stderr=float(np.hypot(first.stderr, other.stderr)[place] / scale),
        excess=float(exceeding[place]),
        searched=bool(first.searched[place] | other.searched[place]),
    )
