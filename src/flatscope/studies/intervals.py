"""Estimates with 95 % intervals for the claims of studies: means over seeds, differences, shares, correlations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from flatscope.stats.correlation import correlate
from flatscope.stats.proportions import wilson
from flatscope.studies.claims import Estimate

LEVEL = 0.95
Floats = np.ndarray[Any, np.dtype[np.float64]]


def mean(values: Any, note: str = "") -> Estimate:
    """Mean over independent runs, with Student's interval; without one for a single run."""
    kept = _finite(values)
    if len(kept) == 0:
        return Estimate(math.nan, runs=0, note=note or "no finite value")
    centre = float(kept.mean())
    if len(kept) == 1:
        return Estimate(centre, runs=1, note=note)
    half = float(scipy_stats.t.ppf((1 + LEVEL) / 2, len(kept) - 1) * kept.std(ddof=1) / math.sqrt(len(kept)))
    return Estimate(centre, centre - half, centre + half, runs=len(kept), note=note)


def difference(first: Any, second: Any, note: str = "") -> Estimate:
    """Mean of `first` minus mean of `second`, independent runs, with Welch's interval."""
    a, b = _finite(first), _finite(second)
    if len(a) == 0 or len(b) == 0:
        return Estimate(math.nan, runs=0, note=note or "no finite value on one side")
    gap = float(a.mean() - b.mean())
    runs = len(a) + len(b)
    if len(a) < 2 or len(b) < 2:
        return Estimate(gap, runs=runs, note=note)
    if a.std() == 0 and b.std() == 0:
        return Estimate(gap, gap, gap, runs=runs, note=note or "no spread over runs")
    interval = scipy_stats.ttest_ind(a, b, equal_var=False).confidence_interval(LEVEL)
    return Estimate(gap, float(interval.low), float(interval.high), runs=runs, note=note)


def log_ratio(first: Any, second: Any, note: str = "") -> Estimate:
    """Mean of log10(first) minus mean of log10(second): factors between positive quantities of any size."""
    a, b = _finite(first), _finite(second)
    if (a <= 0).any() or (b <= 0).any():
        return Estimate(math.nan, runs=len(a) + len(b), note=note or "a value that is not positive")
    return difference(np.log10(a), np.log10(b), note)


def paired_difference(first: Any, second: Any, note: str = "") -> Estimate:
    """Mean of first − second over runs that belong together (the same seed, the same network)."""
    return mean(np.asarray(first, dtype=float) - np.asarray(second, dtype=float), note)


def share(holds: Any, note: str = "") -> Estimate:
    """Share of cases in which something holds, with Wilson's interval."""
    cases = np.asarray(holds, dtype=bool)
    if len(cases) == 0:
        return Estimate(math.nan, runs=0, note=note or "no cases")
    low, high = wilson(float(cases.sum()), len(cases))
    return Estimate(float(cases.mean()), low, high, runs=len(cases), note=note)


def correlation(x: Any, y: Any, kind: str = "pearson", note: str = "") -> Estimate:
    """Correlation with its BCa bootstrap interval."""
    found = correlate(x, y, kind)  # type: ignore[arg-type]
    low, high = (None if math.isnan(end) else end for end in (found.low, found.high))
    words = "; ".join(part for part in (note, found.note) if part)
    return Estimate(found.value, low, high, runs=found.n, note=words)


def of_correlations(
    frame: pd.DataFrame,
    columns: Sequence[str],
    target: str,
    statistic: Callable[[Floats], float],
    resamples: int = 1_000,
) -> Estimate:
    """A function of several Pearson correlations with one target; rows are resampled together, as they depend.

    Args:
        frame: one row per network.
        columns: the measures.
        target: what each is correlated with.
        statistic: of the correlations, in the order of `columns`.
        resamples: bootstrap resamples behind the percentile interval.
    """
    values = np.stack([frame[name].to_numpy(float) for name in (*columns, target)])
    n = values.shape[1]
    if n < 4:
        return Estimate(math.nan, runs=n, note="fewer than four networks")
    generator = np.random.default_rng(0)

    def once(drawn: Floats) -> float:
        with np.errstate(invalid="ignore", divide="ignore"):  # a resample may be constant: it counts for nothing
            table: Any = np.corrcoef(drawn)
            return float(statistic(table[:-1, -1]))

    draws = np.array([once(values[:, generator.integers(n, size=n)]) for _ in range(resamples)])
    if np.isnan(draws).all():
        return Estimate(once(values), runs=n, note="no resample with spread")
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return Estimate(once(values), float(low), float(high), runs=n)


def _finite(values: Any) -> Floats:
    numbers = np.asarray(values, dtype=np.float64).ravel()
    return numbers[np.isfinite(numbers)]
