"""Correlation of a measure with a target, given the hyper-parameters: what is left when they are accounted for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd
from scipy import stats

from flatscope.errors import UnknownNameError
from flatscope.stats.correlation import row_pearson
from flatscope.stats.estimate import Estimate, Floats, checked_confidence, columns

EXPLAINED = 1e-10  # share of the variance that rounding alone leaves


def partial_correlation(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    parameters: Sequence[str],
    kind: Literal["pearson", "spearman"] = "spearman",
    *,
    confidence: float = 0.95,
) -> Estimate:
    """Correlation of the residuals of measure and target after least squares on the hyper-parameters.

    Numerical hyper-parameters enter linearly (by rank for "spearman"), all others as one indicator per value. The
    p-value is Student's with n − 2 − k degrees of freedom, k the rank of the controls; the interval is Fisher's, with
    the variance (1 + r²/2)/(n − k − 3) of Bonett and Wright 2000 for ranks.

    Args:
        frame: one row per network.
        measure: column of the measure.
        target: column of the generalization gap.
        parameters: columns to hold fixed.
        kind: "pearson" or "spearman".
        confidence: level of the interval.
    """
    if kind not in ("pearson", "spearman"):
        raise UnknownNameError.among(str(kind), ("pearson", "spearman"), "kind of partial correlation")
    level = checked_confidence(confidence)
    x, y, settings, dropped = columns(frame, measure, target, parameters)
    n, ranked = len(x), kind == "spearman"
    method = f"partial {kind} given {', '.join(parameters) or 'nothing'}"
    controls = _controls(settings, ranked)
    k = int(np.linalg.matrix_rank(controls)) - 1 if n else 0
    free = n - 2 - k
    if free < 1:
        note = f"{n} rows and {k} independent controls leave no degree of freedom"
        return Estimate(math.nan, n=n, method=method, dropped=dropped, note=note, confidence=level)
    left = []
    for values, name in ((x, measure), (y, target)):
        given = stats.rankdata(values) if ranked else values
        centred = given - given.mean()
        residual = centred - controls @ np.linalg.lstsq(controls, centred, rcond=None)[0]
        if (residual**2).sum() <= EXPLAINED * max((centred**2).sum(), np.finfo(np.float64).tiny):
            note = f"{name} is a function of {', '.join(parameters)}" if np.ptp(given) else f"{name} is constant"
            return Estimate(math.nan, n=n, method=method, dropped=dropped, note=note, confidence=level)
        left.append(residual)
    value = float(row_pearson(left[0], left[1]))
    low = high = math.nan
    note = "" if free > 1 else "too few rows for an interval"
    if abs(value) > 1 - EXPLAINED:
        p, note = 0.0, "a perfect fit has no interval"
    else:
        p = float(2 * stats.t.sf(abs(value) * math.sqrt(free / (1 - value**2)), free))
        if free > 1:
            spread = math.sqrt((1 + value**2 / 2 if ranked else 1.0) / (free - 1))
            reach = float(stats.norm.ppf(0.5 + level / 2)) * spread
            low, high = math.tanh(math.atanh(value) - reach), math.tanh(math.atanh(value) + reach)
    return Estimate(value, low, high, p, n, method, dropped, note, level)


def _controls(settings: pd.DataFrame, ranked: bool) -> Floats:
    """Design matrix: a constant, standardised numbers (or ranks), indicators of categories."""
    parts = [np.ones((len(settings), 1))]
    for name in settings.columns:
        column = settings[name]
        if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
            values = column.to_numpy(dtype=np.float64)
            values = stats.rankdata(values) if ranked else values
            parts.append(((values - values.mean()) / (values.std() or 1.0))[:, None])
        else:
            parts.append(pd.get_dummies(column.astype(str)).to_numpy(dtype=np.float64))
    return np.concatenate(parts, axis=1)
