"""Estimates with 95 % intervals for the claims of studies: means over seeds, differences, shares, correlations.

Claims about every network ("all fit", "never above") are about an extreme that was seen: `largest_over_networks`,
`smallest_over_networks` and `holds_every_time` say so, and how large a share of such networks that covers. A minimum or
maximum of several answers needs intervals that hold for all of them at once: `joint_confidence_level`,
`smallest_answer` and `answer_farthest_from_zero`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from flatscope import InputError
from flatscope.stats import correlate, finite_pairs, wilson
from flatscope_papers.claims import Answer
from flatscope_papers.correlation_intervals import lead_of_correlations, pearson_interval, spread_of_correlations

__all__ = [
    "absolute_answer",
    "answer_farthest_from_zero",
    "correlation_with_interval",
    "difference_of_means",
    "geometric_mean_over_runs",
    "holds_every_time",
    "joint_confidence_level",
    "largest_over_networks",
    "lead_of_correlations",
    "log10_ratio_of_means",
    "mean_over_runs",
    "paired_difference",
    "share_of_cases",
    "smallest_answer",
    "smallest_over_networks",
    "spread_of_correlations",
]

LEVEL = 0.95
ANY = (-math.inf, math.inf)
COVERED = "at 95 % confidence"  # begins what a note says about networks that were not seen
Floats = np.ndarray[Any, np.dtype[np.float64]]


def mean_over_runs(
    values: Any,
    note: str = "",
    *,
    resolution: float = 0.0,
    bounds: tuple[float, float] = ANY,
    level: float = LEVEL,
) -> Answer:
    """Mean over independent runs, with Student's interval; without one for a single run.

    Args:
        values: one number per run.
        note: what a reader must know beside it.
        resolution: how finely the number is counted (an error of n samples: 1/n). The spread is taken as at least
            that of rounding to it. Without it, runs that are all alike have no interval: that they do not differ is
            not known to be more than luck.
        bounds: what the number can be; the interval is cut there.
        level: of the interval.
    """
    kept = _finite_values(values)
    if len(kept) == 0:
        return Answer(math.nan, runs=0, note=note or "no finite value")
    centre = float(kept.mean())
    if len(kept) == 1:
        return Answer(centre, runs=1, note=note)
    spread = max(0.0 if np.ptp(kept) == 0 else float(kept.std(ddof=1)), resolution / math.sqrt(12))
    if spread == 0:
        return Answer(centre, runs=len(kept), note=_join_notes(note, f"the same in all {len(kept)} runs"))
    half = float(scipy_stats.t.ppf((1 + level) / 2, len(kept) - 1)) * spread / math.sqrt(len(kept))
    low, high = max(bounds[0], centre - half), min(bounds[1], centre + half)
    return Answer(centre, min(low, centre), max(high, centre), runs=len(kept), note=note)


def geometric_mean_over_runs(values: Any, note: str = "") -> Answer:
    """Mean of the logarithms of positive numbers over independent runs, told as a number again.

    For extremes (the largest over many images) and ratios: where they are lognormal, Student's interval of the mean of
    three covers 84 %, that of their logarithms 95 %.
    """
    kept = _finite_values(values)
    if (kept <= 0).any() or len(kept) < np.size(values):
        return Answer(
            math.nan, runs=int(np.size(values)), note=_join_notes(note, "a value that is not positive and finite")
        )
    mean = mean_over_runs(np.log(kept), note)
    ends = [None if end is None else math.exp(end) for end in (mean.low, mean.high)]
    return replace(mean, value=math.exp(mean.value), low=ends[0], high=ends[1])


def difference_of_means(first: Any, second: Any, note: str = "", *, level: float = LEVEL) -> Answer:
    """Mean of `first` minus mean of `second`, independent runs, with Welch's interval."""
    a, b = _finite_values(first), _finite_values(second)
    if len(a) == 0 or len(b) == 0:
        return Answer(math.nan, runs=0, note=note or "no finite value on one side")
    gap = float(a.mean() - b.mean())
    runs = len(a) + len(b)
    if len(a) < 2 or len(b) < 2:
        return Answer(gap, runs=runs, note=note)
    if np.ptp(a) == 0 and np.ptp(b) == 0:
        return Answer(gap, runs=runs, note=_join_notes(note, "no spread over runs on either side"))
    shares = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    freedom = sum(shares) ** 2 / (shares[0] ** 2 / (len(a) - 1) + shares[1] ** 2 / (len(b) - 1))
    half = float(scipy_stats.t.ppf((1 + level) / 2, freedom) * math.sqrt(sum(shares)))
    return Answer(gap, gap - half, gap + half, runs=runs, note=note)


def log10_ratio_of_means(first: Any, second: Any, note: str = "") -> Answer:
    """Mean of log10(first) minus mean of log10(second): factors between positive quantities of any size."""
    a, b = _finite_values(first), _finite_values(second)
    if (a <= 0).any() or (b <= 0).any():
        return Answer(math.nan, runs=len(a) + len(b), note=note or "a value that is not positive")
    return difference_of_means(np.log10(a), np.log10(b), note)


def paired_difference(first: Any, second: Any, note: str = "") -> Answer:
    """Mean of first − second over runs that belong together (the same seed, the same network)."""
    return mean_over_runs(np.asarray(first, dtype=float) - np.asarray(second, dtype=float), note)


def share_of_cases(holds: Any, note: str = "", *, groups: Any = None, least: float = 0.0) -> Answer:
    """Share of cases in which something holds, with Wilson's interval.

    Args:
        holds: one truth value per case.
        note: what a reader must know beside it.
        groups: one label per case, where cases of one group depend on each other (several looks at one network).
            A group then counts as one case, as if all its looks were the same: the wider side.
        least: the share that is claimed. Where even all of so few cases would leave an interval that begins below it,
            nothing could be told, and there is no answer unless the interval ends below it.
    """
    cases = np.asarray(holds, dtype=bool)
    if len(cases) == 0:
        return Answer(math.nan, runs=0, note=note or "no cases")
    value = float(cases.mean())
    number = len(cases) if groups is None else pd.Series(np.asarray(groups)).nunique()
    if wilson(float(number), number)[0] < least <= wilson(value * number, number)[1]:
        needed = next(n for n in itertools.count(number) if wilson(float(n), n)[0] >= least)
        return Answer(
            math.nan, runs=number, note=_join_notes(note, f"{value:.0%} of {number} cases; {needed} would be needed")
        )
    if groups is None:
        low, high = wilson(float(cases.sum()), len(cases))
        return Answer(value, low, high, runs=len(cases), note=note)
    low, high = wilson(value * number, number)
    words = _join_notes(note, f"{len(cases)} cases in {number} groups")
    return Answer(value, min(low, value), max(high, value), runs=number, note=words)


def largest_over_networks(values: Any, note: str = "", of: str = "networks") -> Answer:
    """The largest value seen, for claims about every network; its range is what was seen, not an interval.

    Args:
        values: one number per network.
        note: what a reader must know beside it.
        of: what the values belong to.
    """
    return _extreme_over_networks(values, note, of, max, "higher")


def smallest_over_networks(values: Any, note: str = "", of: str = "networks") -> Answer:
    """The smallest value seen; see `largest_over_networks`."""
    return _extreme_over_networks(values, note, of, min, "lower")


def holds_every_time(holds: Any, note: str = "", of: str = "networks") -> Answer:
    """Answer to whether something held every time it was tried; if not, the share with Wilson's interval."""
    cases = np.asarray(holds, dtype=bool)
    if len(cases) == 0 or not cases.all():
        return share_of_cases(cases, note)
    words = _join_notes(note, f"{COVERED} in at least {_share_covered_in_words(len(cases))} of such {of}")
    return Answer(1.0, 1.0, 1.0, runs=len(cases), note=words, seen=of)


def joint_confidence_level(number: int) -> float:
    """The level that each of `number` intervals needs for all of them to hold at once at 95 % (Bonferroni)."""
    return 1 - (1 - LEVEL) / number


def smallest_answer(answers: Sequence[Answer]) -> Answer:
    """The smallest of several numbers whose intervals hold at once (each of `joint_confidence_level`)."""
    return _pick_answer(answers, min)


def answer_farthest_from_zero(answers: Sequence[Answer]) -> Answer:
    """The largest absolute value of several numbers whose intervals hold at once (each of `joint_confidence_level`)."""
    return _pick_answer([absolute_answer(answer) for answer in answers], max)


def absolute_answer(answer: Answer) -> Answer:
    """The absolute value; an interval across zero then begins at zero."""
    if answer.low is None or answer.high is None:
        return Answer(abs(answer.value), runs=answer.runs, note=answer.note)
    across = answer.low <= 0 <= answer.high
    ends = sorted((abs(answer.low), abs(answer.high)))
    return Answer(abs(answer.value), 0.0 if across else ends[0], ends[1], answer.runs, answer.note)


def correlation_with_interval(x: Any, y: Any, kind: str = "pearson", note: str = "") -> Answer:
    """Correlation with its interval: a studentised bootstrap for Pearson's, the jackknife for those of ranks."""
    estimate = correlate(x, y, kind)  # type: ignore[arg-type]
    words = _join_notes(note, estimate.note)
    if kind != "pearson":
        low, high = (None if math.isnan(end) else end for end in (estimate.low, estimate.high))
        return Answer(estimate.value, low, high, runs=estimate.n, note=words)
    first, second, _ = finite_pairs(x, y)
    ends = None if math.isnan(estimate.value) else pearson_interval(first, second)
    if ends is None:
        return Answer(estimate.value, runs=estimate.n, note=_join_notes(words, "no interval from these networks"))
    return Answer(estimate.value, *ends, runs=estimate.n, note=words)


def _extreme_over_networks(values: Any, note: str, of: str, pick: Callable[[Floats], float], beyond: str) -> Answer:
    kept = np.asarray(values, dtype=np.float64).ravel()
    if len(kept) == 0:
        return Answer(math.nan, runs=0, note=note or f"no {of}")
    if not np.isfinite(kept).all():  # a network without a number is no network within the range
        return Answer(math.nan, runs=len(kept), note=_join_notes(note, f"{of} without a finite value"))
    value = float(pick(kept))
    if len(kept) == 1:
        return Answer(value, runs=1, note=note)
    words = _join_notes(note, f"{COVERED} at least {_share_covered_in_words(len(kept))} of such {of} lie no {beyond}")
    return Answer(value, float(kept.min()), float(kept.max()), runs=len(kept), note=words, seen=of)


def _share_covered_in_words(n: int) -> str:
    """Share of all networks that lie within the extreme of n, whatever their distribution, at 95 % confidence."""
    return f"{math.floor(100 * (1 - LEVEL) ** (1 / n))} %"


def _pick_answer(answers: Sequence[Answer], pick: Callable[..., Any]) -> Answer:
    if not answers:
        raise InputError("at least one estimate", "none", where="intervals")
    chosen: Answer = pick(answers, key=lambda answer: answer.value)
    if any(math.isnan(answer.value) for answer in answers):
        return next(answer for answer in answers if math.isnan(answer.value))
    lows, highs = [answer.low for answer in answers], [answer.high for answer in answers]
    if None in lows or None in highs:
        return Answer(chosen.value, runs=chosen.runs, note=chosen.note)
    return Answer(chosen.value, pick(lows), pick(highs), chosen.runs, chosen.note)


def _finite_values(values: Any) -> Floats:
    numbers = np.asarray(values, dtype=np.float64).ravel()
    return numbers[np.isfinite(numbers)]


def _join_notes(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
