"""A ranking of checkpoints, and how sure it is when every value has a standard error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from flatscope.errors import InputError
from flatscope.noise import checked_confidence
from flatscope.stats.estimate import Floats, as_numbers


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
        raise InputError(
            "finite values and standard errors from 0 up",
            "NaN, infinity or a negative error",
            where="values, stderr",
            fix="Leave out the candidates that have no value",
        )
    if draws < 1:
        raise InputError("at least 1", repr(draws), where="draws")
    badness = given if lower_is_better else -given
    noise = np.random.default_rng(seed).standard_normal((draws, len(given)))
    drawn = stats.rankdata(badness + spread * noise, axis=1)  # (draws, candidates)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0, method="closest_observation")
    first = drawn == drawn.min(axis=1, keepdims=True)
    best = (first / first.sum(axis=1, keepdims=True)).mean(axis=0)
    apart = badness[None, :] - badness[:, None]  # positive where the row is better
    size = np.hypot(spread[None, :], spread[:, None])
    np.fill_diagonal(size, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        better = np.where(size > 0, stats.norm.cdf(apart / size), (np.sign(apart) + 1) / 2)
    return Ranking(called, given, spread, stats.rankdata(badness), low, high, best, better, level)
