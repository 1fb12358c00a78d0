"""Correlations within strata: among networks that share a setting, so that the setting itself cannot make or turn them.

Pooled over a setting a correlation may have the opposite sign of that within every value of it (Simpson's paradox).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import stats

from flatscope_papers.claims import Answer

LEVEL = 0.95
FEWEST_IN_STRATUM = 3
FEWEST_LEFT = 3  # degrees of freedom, below which an interval says nothing
Floats = np.ndarray[Any, np.dtype[np.float64]]
Kind = Literal["spearman", "pearson"]


def correlation_within_strata(x: Any, y: Any, strata: Any, kind: Kind = "spearman", note: str = "") -> Answer:
    """Correlation within strata, with the jackknife's interval on Fisher's scale.

    Of the ranks in each stratum over its size (of the values for Pearson's), less their mean there, pooled over the
    strata. Strata of fewer than three networks, and those in which either side is constant, have nothing to say.

    Args:
        x: one number per network.
        y: the same.
        strata: what is held fixed, one label per network.
        kind: "spearman" or "pearson".
        note: what a reader must know beside it.
    """
    groups = _finite_pairs_by_stratum(x, y, strata, kind)
    n = sum(len(group[0]) for group in groups)
    if not groups:
        nothing = "no stratum with three different networks"
        return Answer(math.nan, runs=0, note="; ".join(part for part in (nothing, note) if part))
    parts = np.array([_sums_of_products(*group, kind) for group in groups])
    value = _correlation_from_sums(parts.sum(0))
    words = "; ".join(part for part in (note, f"within {len(groups)} strata {_strata_in_words(parts)}") if part)
    freedom = n - len(groups) - 1
    if freedom < FEWEST_LEFT or abs(value) > 1 - 1e-10:
        return Answer(value, runs=n, note=f"{words}; no interval from these networks")
    each = np.array(
        [
            _correlation_from_sums(
                parts.sum(0) - parts[place] + _sums_of_products(np.delete(a, i), np.delete(b, i), kind)
            )
            for place, (a, b) in enumerate(groups)
            for i in range(len(a))
        ]
    )
    error = math.sqrt((n - 1) / n * float(((each - each.mean()) ** 2).sum()))
    reach = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * error / (1 - value**2)
    return Answer(value, math.tanh(math.atanh(value) - reach), math.tanh(math.atanh(value) + reach), n, words)


def _finite_pairs_by_stratum(x: Any, y: Any, strata: Any, kind: Kind) -> list[tuple[Floats, Floats]]:
    """Finite pairs of each stratum that has something to say."""
    frame = pd.DataFrame({"x": np.asarray(x, float), "y": np.asarray(y, float), "stratum": np.asarray(strata)})
    known = np.isfinite(frame["x"]) & np.isfinite(frame["y"])
    frame = frame.loc[known]
    pairs = [(part["x"].to_numpy(), part["y"].to_numpy()) for _, part in frame.groupby("stratum", sort=True)]
    return [(a, b) for a, b in pairs if len(a) >= FEWEST_IN_STRATUM and np.ptp(a) > 0 and np.ptp(b) > 0]


def _sums_of_products(a: Floats, b: Floats, kind: Kind) -> Floats:
    """Sums of the products ab, aa and bb of one stratum; of its ranks over their number, or of its values."""
    if kind == "spearman":
        a, b = stats.rankdata(a) / len(a), stats.rankdata(b) / len(b)
    a, b = a - a.mean(), b - b.mean()
    return np.array([a @ b, a @ a, b @ b])


def _correlation_from_sums(sums: Floats) -> float:
    together, of_a, of_b = (float(value) for value in sums)
    return max(-1.0, min(1.0, together / math.sqrt(of_a * of_b))) if of_a > 0 and of_b > 0 else 0.0


def _strata_in_words(parts: Floats) -> str:
    return ", ".join(f"{_correlation_from_sums(part):.2f}" for part in parts)
