"""What a complexity measure must do to explain generalization: the three demands of Neyshabur et al. 2017, Section 1.

(i) It is lower for networks trained on true labels than on random ones. (ii) It falls as width grows when the test
error does. (iii) Among networks without training error it orders them as their test errors do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pandas as pd

from flatscope.errors import InputError

DEMANDS = ("true below random labels", "falls with width", "orders zero-error solutions")
Values = Mapping[str, Sequence[float]]


def desiderata(
    *,
    true_labels: Values | None = None,
    random_labels: Values | None = None,
    by_width: Values | None = None,
    width_test_errors: Sequence[float] = (),
    solutions: Values | None = None,
    solution_test_errors: Sequence[float] = (),
) -> pd.DataFrame:
    """A verdict per measure and demand.

    Args:
        true_labels: {measure: values}, one per network trained on true labels; higher means more complex.
        random_labels: the same for random labels, network by network (the same size and training set).
        by_width: {measure: values} of networks ordered by growing width.
        width_test_errors: their test errors.
        solutions: {measure: values} of networks without training error on the same data.
        solution_test_errors: their test errors.

    Returns:
        Columns measure, demand, statistic, verdict ("met", "partly", "not met", "not judged") and reason. The statistic
        is the fraction of pairs that agree for (i) and (ii), and Kendall's rank correlation for (iii).
    """
    rows: list[dict[str, object]] = []
    for name, values in (true_labels or {}).items():
        others = (random_labels or {}).get(name, ())
        pairs = [(a, b) for a, b in _pairs_by_seed(values, others, name) if not (math.isnan(a) or math.isnan(b))]
        rows.append(_demand_row(name, DEMANDS[0], [a < b for a, b in pairs], "no pair of networks has a value"))
    for name, values in (by_width or {}).items():
        points = _pairs_by_seed(values, width_test_errors, name)
        steps = [
            second[0] < first[0]
            for first, second in pairwise(points)
            if second[1] < first[1] and not (math.isnan(first[0]) or math.isnan(second[0]))
        ]
        rows.append(_demand_row(name, DEMANDS[1], steps, "the test error falls nowhere"))
    for name, values in (solutions or {}).items():
        rows.append(
            _ordering_row(name, [p for p in _pairs_by_seed(values, solution_test_errors, name) if not math.isnan(p[0])])
        )
    return pd.DataFrame(rows, columns=["measure", "demand", "statistic", "verdict", "reason"])


def _pairs_by_seed(values: Sequence[float], others: Sequence[float], name: str) -> list[tuple[float, float]]:
    if len(values) != len(others):
        raise InputError(
            "as many values as networks", f"{len(values)} and {len(others)}", where=f"desiderata of {name}"
        )
    return [(float(a), float(b)) for a, b in zip(values, others, strict=True)]


def _demand_row(name: str, demand: str, agree: list[bool], missing: str) -> dict[str, object]:
    if not agree:
        return {"measure": name, "demand": demand, "statistic": math.nan, "verdict": "not judged", "reason": missing}
    fraction = sum(agree) / len(agree)
    verdict = "met" if fraction == 1 else "partly" if fraction > 0.5 else "not met"
    reason = f"{sum(agree)} of {len(agree)}"
    return {"measure": name, "demand": demand, "statistic": fraction, "verdict": verdict, "reason": reason}


def _ordering_row(name: str, points: list[tuple[float, float]]) -> dict[str, object]:
    if len({error for _, error in points}) < 3:
        reason = "fewer than three test errors"
        return {"measure": name, "demand": DEMANDS[2], "statistic": math.nan, "verdict": "not judged", "reason": reason}
    from scipy.stats import kendalltau  # takes a second to load, and few ask for it

    correlation = kendalltau([value for value, _ in points], [error for _, error in points])
    tau, chance = float(correlation.statistic), float(correlation.pvalue)
    if math.isnan(tau):  # all values are equal: they order nothing
        tau, chance = 0.0, 1.0
    verdict = "met" if tau > 0 and chance < 0.05 else "partly" if tau > 0 else "not met"
    reason = f"Kendall's tau over {len(points)} networks, p = {chance:.2g}"
    return {"measure": name, "demand": DEMANDS[2], "statistic": tau, "verdict": verdict, "reason": reason}
