"""Intervals of Pearson correlations, of one and of how far several with one target are apart.

All are studentised bootstraps, rows resampled together. BCa covers 86 to 95 % where 95 are asked for, at the numbers
of networks that studies have (12 to 144; normal, lognormal and heavy-tailed samples); this covers 90 to 97 %.

The percentile interval of "largest minus smallest" is no interval for it: among equal correlations the largest of a
resample lies above the smallest again and again, so it never reaches down to zero and may leave out its own value.
Here all differences get intervals that hold at once (bootstrap of the largest studentised deviation), and the
extreme's interval follows from them; it always contains the value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from flatscope_papers.claims import Answer

LEVEL = 0.95
FEWEST = 4
SAME = 1e-12  # differences of this size are rounding
Floats = np.ndarray[Any, np.dtype[np.float64]]


def pearson_interval(x: Floats, y: Floats, *, resamples: int = 2_000) -> tuple[float, float] | None:
    """Ends of the interval of a correlation, on Fisher's scale, where its spread hardly depends on its size.

    Args:
        x: one number per network, without gaps.
        y: the same.
        resamples: of the networks.

    Returns:
        None where there is none: fewer than four networks, or no spread left around a line.
    """
    if len(x) < FEWEST:
        return None
    values = np.stack([x, y])
    (correlation,), (error,) = _correlations_with_last_row(values)
    drawn = np.random.default_rng(0).integers(len(x), size=(resamples, len(x)))
    again, errors = (part[:, 0] for part in _correlations_with_last_row(np.moveaxis(values[:, drawn], 0, 1)))
    with np.errstate(divide="ignore", invalid="ignore"):  # resamples on a line or without spread: infinitely far off
        here, there = np.arctanh(correlation), np.arctanh(again)
        ratio = np.abs(there - here) * (1 - again**2) / errors
        factor = float(np.quantile(np.where(np.isnan(ratio), np.inf, ratio), LEVEL))
        reach = factor * error / (1 - correlation**2)
    if not math.isfinite(reach) or not reach > 0:
        return None
    return math.tanh(here - reach), math.tanh(here + reach)


def spread_of_correlations(
    frame: pd.DataFrame, columns: Sequence[str], target: str, *, resamples: int = 2_000
) -> Answer:
    """The largest difference between any two Pearson correlations with `target`.

    Args:
        frame: one row per network.
        columns: the measures, two or more.
        target: what each is correlated with.
        resamples: of the rows.
    """
    pairs = list(itertools.combinations(range(len(columns)), 2))
    values, dropped = _rows_without_gaps(frame, [*columns, target])
    gaps, reach = _simultaneous_intervals(values, pairs, resamples)
    apart = np.abs(gaps)
    ends = (max(0.0, float((apart - reach).max())), min(2.0, float((apart + reach).max())))
    return _correlation_answer(float(apart.max()), ends, values.shape[1], dropped)


def lead_of_correlations(
    frame: pd.DataFrame,
    first: str,
    others: Sequence[str],
    target: str,
    *,
    of_size: bool = False,
    resamples: int = 2_000,
) -> Answer:
    """The Pearson correlation of `first` with `target` minus the largest among `others`.

    Args:
        frame: one row per network.
        first: the measure that is to lead.
        others: those it is compared with; with one of them this is the difference of two dependent correlations.
        target: what each is correlated with.
        of_size: compare absolute correlations.
        resamples: of the rows.
    """
    pairs = [(0, other) for other in range(1, len(others) + 1)]
    values, dropped = _rows_without_gaps(frame, [first, *others, target])
    if of_size and values.shape[1] >= FEWEST:
        together = (values[:-1] - values[:-1].mean(axis=1, keepdims=True)) @ values[-1]
        values[:-1] *= np.where(together < 0, -1.0, 1.0)[:, None]
    gaps, reach = _simultaneous_intervals(values, pairs, resamples)
    ends = (max(-2.0, float((gaps - reach).min())), min(2.0, float((gaps + reach).min())))
    return _correlation_answer(float(gaps.min()), ends, values.shape[1], dropped)


def _rows_without_gaps(frame: pd.DataFrame, columns: Sequence[str]) -> tuple[Floats, int]:
    """The columns as rows of an array, without networks that lack one of them."""
    values = np.stack([frame[name].to_numpy(np.float64) for name in columns])
    kept = values[:, np.isfinite(values).all(axis=0)]
    return kept, values.shape[1] - kept.shape[1]


def _correlation_answer(value: float, ends: tuple[float, float], n: int, dropped: int) -> Answer:
    words = [f"{dropped} networks without a value left out"] if dropped else []
    if math.isnan(value):
        return Answer(value, runs=n, note="; ".join([*words, "fewer than four networks"]))
    if not all(math.isfinite(end) for end in ends):
        return Answer(value, runs=n, note="; ".join([*words, "resamples without spread: no interval"]))
    return Answer(value, *ends, runs=n, note="; ".join(words))


def _simultaneous_intervals(values: Floats, pairs: Sequence[tuple[int, int]], resamples: int) -> tuple[Floats, Floats]:
    """Differences of correlations and the half-widths within which all of them lie at once in 95 % of samples."""
    n = values.shape[1]
    if n < FEWEST:
        nothing = np.full(len(pairs), math.nan)
        return nothing, nothing
    gaps, errors = _correlation_differences(values, pairs)
    drawn = np.random.default_rng(0).integers(n, size=(resamples, n))
    again, their_errors = _correlation_differences(np.moveaxis(values[:, drawn], 0, 1), pairs)
    off = np.abs(again - gaps)
    off[off < SAME] = 0.0  # one measure twice: nothing to be wrong about
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample without spread counts as infinitely far off
        ratio = np.where(off == 0.0, 0.0, off / their_errors)
    factor = float(np.quantile(ratio.max(axis=1), LEVEL, method="higher"))  # between infinities nothing can be taken
    # Multiplied only where there is an error: infinity times none would be no number.
    return gaps, np.multiply(factor, errors, out=np.zeros_like(errors), where=errors > 0)


def _correlation_differences(values: Floats, pairs: Sequence[tuple[int, int]]) -> tuple[Floats, Floats]:
    """Differences of correlations with the last row, and their standard errors."""
    correlations, influence = _influence_on_correlations(values)
    one, other = (list(side) for side in zip(*pairs, strict=True))
    return correlations[..., one] - correlations[..., other], _standard_errors_of_influence(
        influence[..., one, :] - influence[..., other, :]
    )


def _correlations_with_last_row(values: Floats) -> tuple[Floats, Floats]:
    """Correlations with the last row, and their standard errors."""
    correlations, influence = _influence_on_correlations(values)
    return correlations, _standard_errors_of_influence(influence)


def _influence_on_correlations(values: Floats) -> tuple[Floats, Floats]:
    """Correlations with the last row, and what each sample contributes to them, to first order."""
    centred = values - values.mean(axis=-1, keepdims=True)
    size = np.sqrt((centred**2).mean(axis=-1, keepdims=True))
    scaled = np.divide(centred, size, out=np.zeros_like(centred), where=size > 0)
    x, y = scaled[..., :-1, :], scaled[..., -1:, :]
    correlations = np.clip((x * y).mean(axis=-1), -1, 1)
    return correlations, x * y - correlations[..., None] / 2 * (x**2 + y**2)


def _standard_errors_of_influence(influence: Floats) -> Floats:
    errors: Floats = np.sqrt((influence**2).mean(axis=-1) / (influence.shape[-1] - 1))
    return errors
