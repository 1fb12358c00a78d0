"""Moved beyond noise: whether two readings of a number differ by more than their errors explain.

One rule for the audit, for comparisons and for the report. A difference is explained by rounding, by the standard
errors of two estimates, by the intervals that searches end at, and where these know of none by two searches that end at
different places. Also the interval of a proportion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri

from flatscope.errors import InputError

# Chance that standard errors alone make one of all the numbers compared look moved.
FALSE_ALARM = 1e-5
# A maximum that is searched comes out a little different from every start. What two searches may differ by where they
# say nothing of it themselves; a rescaling moves such a maximum by factors.
SEARCH = 0.05

ENDS = ("low", "high")

Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Readings:
    """Numbers with what is known about their accuracy."""

    value: Numbers  # the numbers, (n,)
    stderr: Numbers  # standard errors of estimates; 0 elsewhere
    below: Numbers  # how far below the number its interval begins; 0 where none is known
    above: Numbers  # how far above it ends
    searched: Numbers  # whether the number is what a search ended at that knows of no interval

    @classmethod
    def of(cls, rows: pd.DataFrame, bracketed: Any = False) -> Readings:
        """Rows of a `Table`, and whether low and high of those that are not exact enclose what a search looks for."""
        value, stderr = (rows[name].to_numpy(dtype=float) for name in ("value", "stderr"))
        searched_rows = ~rows["exact"].to_numpy(dtype=bool) & (stderr == 0)
        below, above = (
            np.where(searched_rows, np.abs(rows[end].to_numpy(dtype=float) - value), np.nan) for end in ENDS
        )
        known = np.isfinite(below) & np.isfinite(above) & np.asarray(bracketed, dtype=bool)
        below, above = np.where(known, below, 0.0), np.where(known, above, 0.0)
        return cls(value, stderr, below, above, searched_rows & ~known)

    @classmethod
    def one(
        cls, value: float, stderr: float = 0.0, below: float = 0.0, above: float = 0.0, searched: bool = False
    ) -> Readings:
        """A single number."""
        return cls(*(np.array([part]) for part in (value, stderr, below, above, searched)))


def change_over_noise(
    before: Readings, after: Readings, *, scale: float, rounding: float, comparisons: int = 1
) -> Numbers:
    """The change of every number over the largest change that noise explains: above 1, it moved beyond noise.

    Args:
        before: one reading.
        after: the other, of the same numbers.
        scale: size of the numbers, which rounding and search errors are relative to.
        rounding: relative difference of exact values that counts as rounding.
        comparisons: how many numbers are compared in all; the more, the larger a difference that chance explains.

    Example:
        >>> bool(change_over_noise(Readings.one(1.0, 0.1), Readings.one(1.3, 0.1), scale=1.0, rounding=1e-6)[0] > 1)
        False
        >>> bool(change_over_noise(Readings.one(1.0, 0.01), Readings.one(1.3, 0.01), scale=1.0, rounding=1e-6)[0] > 1)
        True
    """
    z = -float(ndtri(FALSE_ALARM / (2 * comparisons)))
    searched = before.searched | after.searched
    rises = after.value > before.value
    allowed = z * np.hypot(before.stderr, after.stderr)
    allowed = allowed + np.where(rises, before.above + after.below, before.below + after.above)
    allowed = allowed + scale * np.where(searched, SEARCH, rounding)
    with np.errstate(divide="ignore", invalid="ignore"):
        excesses: Numbers = distances_between_readings(before, after) / allowed
    return np.nan_to_num(excesses, nan=0.0, posinf=math.inf)  # no change and nothing allowed


def distances_between_readings(before: Readings, after: Readings) -> Numbers:
    """Distances between two readings; infinite where one of them is not a number."""
    with np.errstate(invalid="ignore"):
        distance = np.abs(after.value - before.value)
    same = after.value == before.value  # infinities too
    distances: Numbers = np.where(same, 0.0, np.nan_to_num(distance, nan=math.inf, posinf=math.inf))
    return distances


def checked_confidence(confidence: float) -> float:
    """A level strictly between 0 and 1."""
    if not 0 < confidence < 1:
        raise InputError("a level between 0 and 1", repr(confidence), where="confidence", fix="Use 0.95 for 95 %")
    return float(confidence)


def wilson(successes: float, n: float, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion; neither the successes nor the number of trials need be whole."""
    level = checked_confidence(confidence)
    if n < 0 or not 0 <= successes <= n:
        raise InputError("0 ≤ successes ≤ n", f"{successes} of {n}", where="wilson")
    if n == 0:
        return 0.0, 1.0
    z = float(ndtri(0.5 + level / 2))
    share, scale = successes / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    reach = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    low = 0.0 if successes == 0 else max(centre - reach, 0.0)
    return low, 1.0 if successes == n else min(centre + reach, 1.0)
