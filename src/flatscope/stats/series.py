"""The mean of a series whose neighbours go along with each other, as values along a training do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

from flatscope.noise import checked_confidence
from flatscope.stats.estimate import Estimate, Floats, as_numbers

LEAST = 4  # independent values below which an interval says nothing


def mean_of_series(values: Any, confidence: float = 0.95) -> Estimate:
    """Mean of a series in its order, with an interval that takes the correlation of neighbours into account.

    Student's interval with as many values as the series is worth: their number over the autocorrelation time, which is
    summed up to where pairs of autocorrelations stop being positive (Geyer 1992), and is at least 1.

    Args:
        values: numbers in the order in which they came; missing and infinite ones are left out.
        confidence: level of the interval.

    Example:
        >>> found = mean_of_series([2.0, 2.1, 1.9, 2.0, 2.1, 1.9, 2.0, 2.0])
        >>> round(found.value, 2), found.n, found.low < 2 < found.high
        (2.0, 8, True)
    """
    checked_confidence(confidence)
    given = as_numbers(values, "values")
    kept = given[np.isfinite(given)]
    n, dropped, method = len(kept), len(given) - len(kept), "mean of a correlated series"
    if n == 0:
        return Estimate(math.nan, n=0, method=method, dropped=dropped, note="no finite value", confidence=confidence)
    mean, worth = float(kept.mean()), n / autocorrelation_time(kept)
    if worth < LEAST:
        note = f"worth {worth:.1f} independent values: too few for an interval"
        return Estimate(mean, n=n, method=method, dropped=dropped, note=note, confidence=confidence)
    # The variance about their own mean of values that go together is too small by that much.
    variance = float(kept.var()) * worth / (worth - 1)
    half = float(stats.t.ppf((1 + confidence) / 2, worth - 1)) * math.sqrt(variance / worth)
    method += f", worth {worth:.1f} independent values"
    return Estimate(mean, mean - half, mean + half, n=n, method=method, dropped=dropped, confidence=confidence)


def autocorrelation_time(values: Floats) -> float:
    """How many neighbours count as one value: 1 for independent values, and for those that swing back and forth."""
    n, centred = len(values), values - values.mean()
    power = float(centred @ centred)
    if not power > 0:
        return 1.0
    correlations = np.array([float(centred[: n - k] @ centred[k:]) / power for k in range(n)])
    pairs = correlations[: n - n % 2].reshape(-1, 2).sum(1)  # (n/2,): lags 0 and 1, 2 and 3, …
    ends = np.flatnonzero(pairs <= 0)
    positive = pairs[: ends[0] if len(ends) else len(pairs)]
    summed = 2 * float(np.minimum.accumulate(positive).sum()) - 1
    # Correlations about a short series' own mean come out too small; that of neighbours is corrected (Kendall 1954).
    first = min(float(correlations[1:2].sum()) * (1 + 3 / n) + 1 / n, 1 - 1 / n)
    return max(1.0, summed, (1 + first) / (1 - first))
