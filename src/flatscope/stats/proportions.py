"""Proportions with Wilson intervals, and p-values of many tests at once (Holm 1979)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

from flatscope.errors import InputError
from flatscope.stats.estimate import Floats, as_numbers, checked_confidence


def wilson(successes: float, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion; halves (ties) are allowed among the successes."""
    level = checked_confidence(confidence)
    if n < 0 or not 0 <= successes <= n:
        raise InputError("0 ≤ successes ≤ n", f"{successes} of {n}", where="wilson")
    if n == 0:
        return 0.0, 1.0
    z = float(stats.norm.ppf(0.5 + level / 2))
    share, scale = successes / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    reach = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    low = 0.0 if successes == 0 else max(centre - reach, 0.0)
    return low, 1.0 if successes == n else min(centre + reach, 1.0)


def holm(p: Any) -> Floats:
    """Holm's adjusted p-values: all rejections at level α together are wrong with probability at most α.

    Missing p-values (NaN) stay missing and do not count as tests.
    """
    given = as_numbers(p, "p")
    tested = np.flatnonzero(~np.isnan(given))
    if ((given[tested] < 0) | (given[tested] > 1)).any():
        raise InputError("p-values from 0 to 1", f"{given[tested].min()} to {given[tested].max()}", where="p")
    adjusted = np.full(len(given), math.nan)
    order = tested[np.argsort(given[tested], kind="stable")]
    steps = given[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0) if len(order) else steps
    return adjusted
