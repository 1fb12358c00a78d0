"""What every statistic returns: a number with its interval, p-value and sample size; how samples are cleaned.

Also a ranking of checkpoints, how sure it is when every value has a standard error, and the mean of a series whose
neighbours go along with each other, as values along a training do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from flatscope.errors import InputError, UnknownNameError, refuse_unless_whole
from flatscope.formatting import readable_number
from flatscope.significance import checked_confidence

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
WAVES, LEAST_LENGTH = 4, 8  # of a series: slowest waves that its mean is judged by; fewer values say nothing


@dataclass(frozen=True)
class Estimate:
    """A statistic with its uncertainty; NaN where there is no number, and then `note` says why.

    Attributes:
        value: the statistic.
        low: lower end of the interval.
        high: upper end of the interval.
        p: two-sided p-value of "no association".
        n: samples (or groups, pairs, cells) it was computed from.
        method: what was computed and how.
        dropped: samples left out because a value was missing or infinite.
        note: why something is NaN or should be read with care.
        confidence: level of the interval.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    n: int = 0
    method: str = ""
    dropped: int = 0
    note: str = ""
    confidence: float = 0.95

    def __str__(self) -> str:
        """`0.62 [0.31, 0.81] (95 %), p = 0.0012, n = 36, spearman (...)`."""
        text = readable_number(self.value, 3)
        if not math.isnan(self.low):
            text += f" [{readable_number(self.low, 3)}, {readable_number(self.high, 3)}] ({100 * self.confidence:g} %)"
        if not math.isnan(self.p):
            text += f", p = {readable_number(self.p, 2)}"
        text += f", n = {self.n}"
        text += f" ({self.dropped} dropped)" if self.dropped else ""
        return text + (f", {self.method}" if self.method else "") + (f"; {self.note}" if self.note else "")


def as_numbers(values: Any, where: str) -> Floats:
    """A list, array, tensor or column as a 1-D float64 array."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as problem:
        raise InputError("numbers", type(values).__name__, where=where) from problem
    if array.ndim != 1:
        raise InputError("one number per sample", f"an array of shape {array.shape}", where=where)
    return array


def finite_pairs(x: Any, y: Any) -> tuple[Floats, Floats, int]:
    """Both variables where both are finite, and how many samples that leaves out."""
    first, second = as_numbers(x, "x"), as_numbers(y, "y")
    if len(first) != len(second):
        raise InputError("as many x as y", f"{len(first)} and {len(second)}", where="x, y")
    kept = np.isfinite(first) & np.isfinite(second)
    return first[kept], second[kept], int((~kept).sum())


def finite_columns(
    frame: pd.DataFrame, measure: str, target: str, parameters: Sequence[str]
) -> tuple[Floats, Floats, pd.DataFrame, int]:
    """Measure, target and hyper-parameters of the rows that have them all, and how many rows that leaves out."""
    if isinstance(parameters, str):
        raise InputError("a list of columns", repr(parameters), where="parameters")
    for name in (measure, target, *parameters):
        if name not in frame.columns:
            raise UnknownNameError.among(str(name), [str(column) for column in frame.columns], "column")
    x, y = as_numbers(frame[measure], measure), as_numbers(frame[target], target)
    settings = frame[list(parameters)]
    kept = np.isfinite(x) & np.isfinite(y) & ~settings.isna().any(axis=1).to_numpy()
    return x[kept], y[kept], settings[kept], int((~kept).sum())


def coded_settings(settings: pd.DataFrame) -> Codes:
    """Each column's values numbered in their order where they have one: (rows, columns)."""
    codes = np.zeros(settings.shape, dtype=np.int64)
    for place, name in enumerate(settings.columns):
        column = settings[name]
        ordered = pd.api.types.is_numeric_dtype(column)
        codes[:, place] = pd.factorize(column if ordered else column.astype(str), sort=True)[0]
    return codes


LARGEST = np.iinfo(np.int64).max


def group_numbers(codes: Codes) -> Codes:
    """One number per distinct row: rows with the same number agree in every column."""
    numbers = np.zeros(len(codes), dtype=np.int64)
    if not len(codes):
        return numbers
    sizes = codes.max(axis=0) + 1
    for column, size in zip(
        codes.T, sizes.tolist(), strict=True
    ):  # rows as numbers: distinct ones are found far sooner
        if numbers.max() >= LARGEST // size:
            numbers = np.unique(numbers, return_inverse=True)[1].astype(np.int64)
        numbers = numbers * size + column
    return np.unique(numbers, return_inverse=True)[1].astype(np.int64)


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


@dataclass(frozen=True)
class Ranking:
    """Rank of each candidate by its value, with what noise in the values leaves of it.

    Attributes:
        names: the candidates, in the order given.
        values: their values.
        stderr: their standard errors.
        rank: 1 is best; equal values share the mean of their ranks.
        low: lower end of the rank interval.
        high: upper end of the rank interval.
        best: probability of being the best.
        better: [i, j]: probability that i is better than j.
        confidence: level of the rank intervals.
    """

    names: tuple[str, ...]
    values: Floats
    stderr: Floats
    rank: Floats
    low: Floats
    high: Floats
    best: Floats
    better: Floats
    confidence: float

    def to_frame(self) -> pd.DataFrame:
        """One row per candidate, best first."""
        frame = pd.DataFrame(
            {
                "name": list(self.names),
                "value": self.values,
                "stderr": self.stderr,
                "rank": self.rank,
                "rank_low": self.low,
                "rank_high": self.high,
                "probability_best": self.best,
            }
        )
        return frame.sort_values("rank", kind="stable", ignore_index=True)

    def __str__(self) -> str:
        """One line per candidate, best first."""
        rows = self.to_frame().itertuples(index=False)
        return "\n".join(
            f"{r.rank:g}. {r.name}: {r.value:.4g} ± {r.stderr:.2g}, rank {r.rank_low:g} to {r.rank_high:g} "
            f"({100 * self.confidence:g} %), best with probability {r.probability_best:.2f}"
            for r in rows
        )


def rank_with_uncertainty(
    values: Any,
    stderr: Any = 0.0,
    names: Sequence[str] | None = None,
    *,
    lower_is_better: bool = True,
    draws: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Ranking:
    """Rank values that are known up to independent normal errors.

    Pairwise probabilities are exact; rank intervals and the probability of being best come from `draws` draws. Values
    that are equal and exact share what there is: ½ against each other, equal parts of being best.

    Args:
        values: one number per candidate, all finite.
        stderr: one standard error per candidate, or one for all.
        names: what to call them; numbers by default.
        lower_is_better: a small value is good (sharpness); False where a large one is (margin).
        draws: of all values together.
        confidence: level of the rank intervals.
        seed: of the draws.
    """
    level = checked_confidence(confidence)
    given = as_numbers(values, "values")
    spread = as_numbers(np.broadcast_to(np.asarray(stderr, dtype=np.float64), given.shape), "stderr")
    called = tuple(str(i) for i in range(len(given))) if names is None else tuple(names)
    if len(given) == 0 or len(called) != len(given) or len(set(called)) != len(called):
        raise InputError(
            f"{len(given) or 'some'} different names", f"{len(set(called))} for {len(given)}", where="names"
        )
    if not np.isfinite(given).all() or not np.isfinite(spread).all() or (spread < 0).any():
        got = "NaN, infinity or a negative error"
        fix = "Leave out the candidates that have no value"
        raise InputError("finite values and standard errors from 0 up", got, "values, stderr", fix)
    refuse_unless_whole(draws, "draws")
    badness = given if lower_is_better else -given
    noise = np.random.default_rng(seed).standard_normal((draws, len(given)))
    drawn = stats.rankdata(badness + spread * noise, axis=1)  # (draws, candidates)
    low, high, best = rank_spread(drawn, level)
    apart = badness[None, :] - badness[:, None]  # positive where the row is better
    size = np.hypot(spread[None, :], spread[:, None])
    np.fill_diagonal(size, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        better = np.where(size > 0, stats.norm.cdf(apart / size), (np.sign(apart) + 1) / 2)
    return Ranking(called, given, spread, stats.rankdata(badness), low, high, best, better, level)


def rank_spread(drawn: Floats, level: float) -> tuple[Floats, Floats, Floats]:
    """Ends of the interval of each candidate's rank, and its chance to be best, from ranks (draws, candidates)."""
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0, method="closest_observation")
    first = drawn == drawn.min(axis=1, keepdims=True)
    return low, high, (first / first.sum(axis=1, keepdims=True)).mean(axis=0)


def mean_of_series(values: Any, confidence: float = 0.95) -> Estimate:
    """Mean of a series in its order, with an interval that takes the correlation of neighbours into account.

    How far the mean is off is read off the slowest waves in the series: half a wave over its whole length, one wave,
    one and a half, two. Each is a draw of the mean's own error, up to what an autoregression of the first order takes
    off a wave that is shorter than the memory of the series; so the interval is Student's with four degrees of freedom
    (Müller 2007), and never narrower than that of independent values. Of 95 % it covers 92 to 97 % of autoregressions
    of the first order that are ten times as long as their memory, 90 % where they are twice as long; more where values
    swing back and forth, less where slow waves hide under faster noise.

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
    n, method = len(kept), f"mean of a correlated series, by its {WAVES} slowest waves"
    blank = Estimate(math.nan, n=n, method=method, dropped=len(given) - n, confidence=confidence)
    if n == 0:
        return replace(blank, note="no finite value")
    mean = float(kept.mean())
    if n < LEAST_LENGTH:
        return replace(blank, value=mean, note=f"no interval from fewer than {LEAST_LENGTH} values")
    centred, memory = kept - mean, _autocorrelation(kept)
    frequencies = np.pi * np.arange(1, WAVES + 1) / n
    waves = np.cos(frequencies[:, None] * (np.arange(n) + 0.5)) @ centred * math.sqrt(2 / n)
    # Power of an autoregression at these frequencies over that at frequency 0, which the mean has.
    share = (1 - memory) ** 2 / (1 - 2 * memory * np.cos(frequencies) + memory**2)
    half = float(stats.t.ppf((1 + confidence) / 2, WAVES) * np.sqrt((waves**2 / share).mean() / n))
    half = max(half, float(stats.t.ppf((1 + confidence) / 2, n - 1)) * float(kept.std(ddof=1)) / math.sqrt(n))
    return replace(blank, value=mean, low=mean - half, high=mean + half)


def _autocorrelation(values: Floats) -> float:
    """Correlation of neighbours, corrected for the mean being the series' own, and one standard error more.

    Between 0 and the largest that a series of this length can tell from 1.
    """
    n, centred = len(values), values - values.mean()
    power = float(centred @ centred)
    if not power > 0:
        return 0.0
    first = float(centred[:-1] @ centred[1:]) / power
    first += (1 + 3 * first) / n  # Kendall 1954
    error = math.sqrt(max(1 - min(first, 1.0) ** 2, 1 / n) / n)
    return min(max(first + error, 0.0), 1 - 1 / n)
