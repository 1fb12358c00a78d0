"""`audit`: which measures change when the same function is written with other weights.

Every point computes the same function, so a measure that moves between them says something about how the network is
written and not about what it does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch

from flatscope.audit_result import COLUMNS, NOISY, Audit
from flatscope.errors import InputError, NotApplicable, refuse_unknown, refuse_unless_whole
from flatscope.isolation import own_settings
from flatscope.measuring import Options, measure
from flatscope.network.interception import refuse_if_different
from flatscope.network.normal_form import only_rearranges
from flatscope.network.passes import digits_of
from flatscope.network.units import Graph
from flatscope.problem import Problem
from flatscope.progress import progress_bar
from flatscope.reading import graph_of_problem
from flatscope.registry import Declaration, select
from flatscope.significance import SEARCH, Readings, change_over_noise, distances_between_readings
from flatscope.symmetries.folding import fold_batchnorm, has_batchnorm
from flatscope.symmetries.scaling import INNER, WAYS, applicable_ways_of_rewriting, equivalent_network
from flatscope.table import Table
from flatscope.version import __version__

# Relative change of an exact value that counts as rounding: sums over samples and layers lose some of the 16 (7)
# digits, and a rescaling by up to 25 some more.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2}
AS_THEY_ACT = "by the weights as they act, where they are computed from others"
_ALWAYS_FIXED = ("network output", "read by no layer")


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
    Weights that are computed (`weight_norm`, masks, products by `einsum`) are parameters of their own at every point.
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
        ways = [
            way
            for way in applicable_ways_of_rewriting(given.model, given.example())
            if way in ("layer", "unit", *INNER)
        ]
    points: dict[str, tuple[Problem, Table]] = {}
    rows: list[dict[str, Any]] = []
    walled: list[str] = []
    with progress_bar("Auditing", total=len(ways), lines=True) as advance:
        for number, way in enumerate(ways):
            advance(min(number, 1), note=f"{way} ({number + 1} of {len(ways)})", coming=1)
            form = _rewritten_form(given, way)
            if form not in points:
                base = given.plain if form == "plain" else given
                if form == "folded":
                    base = given.with_model(fold_batchnorm(given.model, given.example()))
                points[form] = base, measure(base, wanted, seed, options)
            base, before = points[form]
            try:
                twins, remark = _equivalent_problems(base, way, trials, seed, low, high)
                after = [measure(twin, wanted, seed, options) for twin in twins]
            except NotApplicable as wall:
                rows += [_untested_row(entry, way, str(wall)) for entry in chosen]
                walled.append(WAYS[way])
                continue
            if form == "plain" and not only_rearranges(base.model):
                remark = "; ".join(filter(None, (remark, AS_THEY_ACT)))
            rows += [_audit_row(entry, way, before, after, digits_of(base.model), remark) for entry in chosen]
    rows.sort(key=lambda row: wanted.index(row["measure"]))
    drawn = {"trials": trials, "seed": seed, "low": low, "high": high, "n_train": problem.n_train}
    seconds = round(time.perf_counter() - begun, 3)
    return Audit(pd.DataFrame(rows), {"version": __version__, **drawn, "not rescaled": walled, "seconds": seconds})


def _rewritten_form(given: Problem, way: str) -> str:
    """Form of the network that is rewritten: "folded", without BatchNorm; "plain"; or "given"."""
    if way != "batchnorm" and has_batchnorm(given.model):
        return "folded"
    return "plain" if way != "batchnorm" and given.plain is not given else "given"


def _equivalent_problems(
    base: Problem, way: str, trials: int, seed: int, low: float, high: float
) -> tuple[Iterator[Problem], str]:
    """The network with other weights and the same function, `trials` times, and what could not be moved."""
    if way == "batchnorm" and not has_batchnorm(base.model):
        raise NotApplicable("the network has no BatchNorm")
    example = base.example()
    graph = graph_of_problem(base, inner=way in INNER)

    def twins() -> Iterator[Problem]:
        for trial in range(trials):
            twin_seed = (seed * 10_007 + trial) % 2**63
            other = base.rescaled(equivalent_network(base.model, graph, example, way, low, high, twin_seed))
            for inputs, _ in base.batches():  # other samples may take another way than the example
                refuse_if_different(base.model, other.model, inputs, f"audit by {way}", ROUNDING.get(base.dtype, 1e-2))
            other.initial = base.initial
            yield other

    return twins(), _walls_in_words(graph, way)


def _walls_in_words(graph: Graph, way: str) -> str:
    """Units that cannot be rescaled, with the reason; empty where all can."""
    if way not in ("layer", "unit"):
        return ""
    reasons = [wall for wall in graph.walls if wall not in _ALWAYS_FIXED]
    reasons += [f"{weight} inside {what}" for weight, what in graph.not_covered.items()]
    return "not rescaled: " + "; ".join(reasons) if reasons else ""


def _untested_row(entry: Declaration, way: str, reason: str) -> dict[str, Any]:
    symmetry, nan = WAYS[way], math.nan
    cells = (entry.name, symmetry, nan, nan, nan, 0.0, "not tested", reason, symmetry in entry.invariant_under)
    return dict(zip(COLUMNS, cells, strict=True))


def _audit_row(
    entry: Declaration, way: str, before: Table, after: list[Table], dtype: torch.dtype, remark: str
) -> dict[str, Any]:
    """The verdict on one measure under one symmetry, with the value that shows it best."""
    sort_units = way == "permutation" and entry.per == "unit"
    places, first, _ = labelled = _values_with_places(before, entry, sort_units)
    others = [_values_with_places(table, entry, sort_units) for table in after]
    missing = next((reason for _, read, reason in (labelled, *others) if not len(read.value)), None)
    if missing is not None:
        return _untested_row(entry, way, missing or "no value")
    if any(not places.equals(theirs) for theirs, _, _ in others):
        return _untested_row(entry, way, "has values for other layers or units after the change")
    comparisons = len(first.value) * len(others)
    worst = (_largest_change(first, read, comparisons, dtype) for _, read, _ in others)
    beyond, searched, columns = max(worst, key=lambda change: change[0])
    moved, error = beyond > 1, columns["stderr"]
    if not moved and error > NOISY:
        return _untested_row(entry, way, f"an estimate with a standard error of {100 * error:.0f} % cannot tell")
    remarks = [remark] if remark else []
    if not moved and error > 0:
        remarks.append("no change beyond the error of the estimate")
    if not moved and entry.search:
        judged = f"{100 * SEARCH:g} %" if searched else "its own bracket"
        remarks.append(f"a searched maximum, judged to {judged}")
    verdict = {"verdict": "moved" if moved else "invariant"}
    return _untested_row(entry, way, "; ".join(remarks)) | columns | verdict


def _values_with_places(table: Table, entry: Declaration, sort_units: bool) -> tuple[pd.MultiIndex, Readings, str]:
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


def _largest_change(
    first: Readings, other: Readings, comparisons: int, dtype: torch.dtype
) -> tuple[float, bool, dict[str, Any]]:
    """Largest change beyond noise, whether the entry was searched, and its columns of the row."""
    scale = float(np.abs(first.value[np.isfinite(first.value)]).max(initial=0.0)) or 1.0
    exceeding = change_over_noise(
        first, other, scale=scale, rounding=ROUNDING.get(dtype, 1e-2), comparisons=comparisons
    )
    place = int(np.argmax(exceeding))
    columns = {
        "before": float(first.value[place]),
        "after": float(other.value[place]),
        "relative_change": float(distances_between_readings(first, other)[place] / scale),
        "stderr": float(np.hypot(first.stderr, other.stderr)[place] / scale),
    }
    return float(exceeding[place]), bool(first.searched[place] | other.searched[place]), columns
