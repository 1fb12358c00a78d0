"""Rankings by one measure and by all of them together, and how far the measures agree."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from flatscope.comparing.quantities import Quantity

if TYPE_CHECKING:
    from flatscope.stats.ranking import Ranking

DRAWS = 4_000
_SURE = 0.975  # probability of being better with which a place in an order is called certain


def ranked(quantity: Quantity, names: Sequence[str], confidence: float = 0.95) -> Ranking:
    """These networks by one measure; errors of estimator and data count, as if independent between networks.

    All networks are measured on the same samples with the same random numbers, so their errors go together and the
    differences are known better than this: the intervals are cautious.
    """
    from flatscope.stats.ranking import rank_with_uncertainty  # SciPy's statistics take as long to load as torch

    return rank_with_uncertainty(
        [quantity.value[name] for name in names],
        [quantity.total_stderr(name) for name in names],
        names,
        lower_is_better=quantity.lower_is_better,
        draws=DRAWS,
        confidence=confidence,
    )


def consensus(found: Sequence[Quantity], names: Sequence[str], confidence: float = 0.95) -> pd.DataFrame:
    """The networks by their mean rank over families of measures, best first.

    Measures of one family (those of one file: all path norms, all of relative flatness) say much the same, so ranks are
    averaged within a family first, and every family has one voice.
    """
    from scipy.stats import rankdata

    families = sorted({quantity.entry.family for quantity in found if quantity.entry is not None})
    drawn = np.zeros((DRAWS, len(names)))
    means = np.zeros(len(names))
    first = np.zeros(len(names))
    for number, family in enumerate(families):
        members = [quantity for quantity in found if quantity.entry is not None and quantity.entry.family == family]
        own = np.zeros(len(names))
        for place, quantity in enumerate(members):
            values = np.array([quantity.value[name] for name in names]) * (1 if quantity.lower_is_better else -1)
            spread = np.array([quantity.total_stderr(name) for name in names])
            noise = np.random.default_rng([number, place]).standard_normal((DRAWS, len(names)))
            drawn += rankdata(values + spread * noise, axis=1) / (len(members) * len(families))
            own += rankdata(values) / len(members)
        means += own / len(families)
        first += own == own.min()
    ranks = rankdata(drawn.round(9), axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(ranks, [tail, 1 - tail], axis=0, method="closest_observation")
    best = ranks == ranks.min(axis=1, keepdims=True)
    frame = pd.DataFrame(
        {
            "name": list(names),
            "mean_rank": means,
            "rank": rankdata(means.round(9)),
            "rank_low": low,
            "rank_high": high,
            "probability_best": (best / best.sum(axis=1, keepdims=True)).mean(axis=0),
            "families_first": first.astype(int),
            "families": len(families),
        }
    )
    return frame.sort_values("rank", kind="stable", ignore_index=True)


def places(ranking: pd.DataFrame) -> list[str]:
    """The place of each row of `consensus` in words: "1.", "tied first:", "tied for 2 to 3:"."""
    shared = ranking["rank"].map(ranking["rank"].value_counts())
    words = []
    for rank, networks in zip(ranking["rank"], shared, strict=True):
        best, worst = rank - (networks - 1) / 2, rank + (networks - 1) / 2
        tied = "tied first:" if best == 1 else f"tied for {best:g} to {worst:g}:"
        words.append(f"{rank:g}." if networks == 1 else tied)
    return words


def tie_text(ranking: pd.DataFrame) -> str:
    """That the first place is shared, in a sentence; empty where it is not."""
    first = ranking[ranking["rank"] == ranking["rank"].min()]
    if len(first) < 2:
        return ""
    names = f"{', '.join(first['name'][:-1])} and {first['name'].iloc[-1]}"
    if first["families_first"].nunique() == 1:
        return f"The families of measures split evenly between {names}: together they prefer none."
    return f"The mean ranks of {names} are equal: together the measures prefer none."


def agreement(found: Sequence[Quantity], names: Sequence[str]) -> pd.DataFrame:
    """Kendall's tau-b between the rankings of every two measures; NaN where one does not tell networks apart."""
    from flatscope.stats.correlation import correlate

    badness = {q.label: [q.value[name] * (1 if q.lower_is_better else -1) for name in names] for q in found}
    labels = list(badness)
    matrix = np.eye(len(labels))
    for row, one in enumerate(labels):
        for column, other in enumerate(labels[:row]):
            tau = correlate(badness[one], badness[other], "kendall", resamples=0).value
            matrix[row, column] = matrix[column, row] = tau
    return pd.DataFrame(matrix, index=labels, columns=labels)


def order_text(ranking: Ranking) -> str:
    """Best first: `a > b`, better for certain; `a ≳ b`, noise could turn it round; `a = b`, equal values."""
    order = np.argsort(ranking.rank, kind="stable")
    text = str(ranking.names[order[0]])
    for one, other in itertools.pairwise(order):
        sign = "=" if ranking.rank[one] == ranking.rank[other] else ">" if ranking.better[one, other] > _SURE else "≳"
        text += f" {sign} {ranking.names[other]}"
    return text
