"""Rankings by one measure and by all of them together, and how far the measures agree."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from flatscope.comparing.verdicts import Quantity

if TYPE_CHECKING:
    from flatscope.stats.estimate import Ranking

DRAWS = 4_000
_SURE = 0.975  # probability of being better with which a place in an order is called certain


def ranking_of_networks(quantity: Quantity, names: Sequence[str], confidence: float = 0.95) -> Ranking:
    """These networks by one measure; errors of estimator and data count, as if independent between networks.

    All networks are measured on the same samples with the same random numbers, so their errors go together and the
    differences are known better than this: the intervals are cautious.
    """
    from flatscope.stats.estimate import rank_with_uncertainty  # SciPy's statistics take as long to load as torch

    return rank_with_uncertainty(
        [quantity.value[name] for name in names],
        [quantity.total_stderr(name) for name in names],
        names,
        lower_is_better=quantity.lower_is_better,
        draws=DRAWS,
        confidence=confidence,
    )


def consensus_ranking(quantities: Sequence[Quantity], names: Sequence[str], confidence: float = 0.95) -> pd.DataFrame:
    """The networks by their mean rank over families of measures, best first.

    Measures of one family (those of one file: all path norms, all of relative flatness) say much the same, so ranks are
    averaged within a family first, and every family has one voice.
    """
    from scipy.stats import rankdata

    from flatscope.stats.estimate import rank_spread

    families = _quantities_by_family(quantities)
    drawn = np.zeros((DRAWS, len(names)))
    for family, members in enumerate(families.values()):
        for place, quantity in enumerate(members):
            spread = np.array([quantity.total_stderr(name) for name in names])
            noise = np.random.default_rng([family, place]).standard_normal((DRAWS, len(names)))
            noisy = rankdata(_lower_is_better_values(quantity, names) + spread * noise, axis=1)
            drawn += noisy / (len(members) * len(families))
    voices = np.array(list(family_ranks(quantities, names).values()))  # (families, networks)
    means, first = voices.mean(axis=0), (voices == voices.min(axis=1, keepdims=True)).sum(axis=0)
    low, high, best = rank_spread(rankdata(drawn.round(9), axis=1), confidence)
    frame = pd.DataFrame(
        {
            "name": list(names),
            "mean_rank": means,
            "rank": rankdata(means.round(9)),
            "rank_low": low,
            "rank_high": high,
            "probability_best": best,
            "families_first": first,
            "families": len(families),
        }
    )
    return frame.sort_values("rank", kind="stable", ignore_index=True)


def family_ranks(quantities: Sequence[Quantity], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Mean ranks (networks,) of every family, over its measures."""
    from scipy.stats import rankdata

    return {
        family: np.mean([rankdata(_lower_is_better_values(quantity, names)) for quantity in members], axis=0)
        for family, members in _quantities_by_family(quantities).items()
    }


def networks_in_front(quantities: Sequence[Quantity], names: Sequence[str]) -> list[str]:
    """Who has the lowest mean rank over the families; several where it is shared, none without a family."""
    voices = family_ranks(quantities, names)
    means = np.mean(list(voices.values()), axis=0).round(9) if voices else np.array([])
    return [name for name, mean in zip(names, means, strict=False) if mean == means.min()]


def close_neighbours_in_words(voices: Mapping[str, np.ndarray], names: Sequence[str]) -> list[str]:
    """Neighbours in the order by mean rank that would not be in this order without some one family, a sentence each.

    Args:
        voices: what `family_ranks` gave.
        names: the networks, in the order of its columns.
    """
    if len(voices) == 1:
        return [f"One family of measures alone ({next(iter(voices))}) makes this order."]
    total = np.sum(list(voices.values()), axis=0).round(9)
    order = np.argsort(total, kind="stable")
    sentences = []
    for one, other in itertools.pairwise(order):
        lead = total[other] - total[one]
        decisive = [family for family, ranks in voices.items() if ranks[other] - ranks[one] >= lead - 1e-9]
        if lead > 0 and decisive:
            sentences.append(
                f"{names[one]} before {names[other]} is too close to call: one family of measures more or less would "
                f"turn it round. Without {' or '.join(decisive)}, {names[one]} would not be ahead."
            )
    return sentences


def _quantities_by_family(quantities: Sequence[Quantity]) -> dict[str, list[Quantity]]:
    families: dict[str, list[Quantity]] = {}
    for quantity in quantities:
        if quantity.entry is not None:
            families.setdefault(quantity.entry.family, []).append(quantity)
    return dict(sorted(families.items()))


def _lower_is_better_values(quantity: Quantity, names: Sequence[str]) -> np.ndarray:
    """Values (networks,), lower is better."""
    return np.array([quantity.value[name] for name in names]) * (1 if quantity.lower_is_better else -1)


def places_in_words(ranking: pd.DataFrame) -> list[str]:
    """The place of each row of `consensus_ranking` in words: "1.", "tied first:", "tied for 2 to 3:"."""
    shared = ranking["rank"].map(ranking["rank"].value_counts())
    words = []
    for rank, networks in zip(ranking["rank"], shared, strict=True):
        best, worst = rank - (networks - 1) / 2, rank + (networks - 1) / 2
        tied = "tied first:" if best == 1 else f"tied for {best:g} to {worst:g}:"
        words.append(f"{rank:g}." if networks == 1 else tied)
    return words


def agreement_of_rankings(quantities: Sequence[Quantity], names: Sequence[str]) -> pd.DataFrame:
    """Kendall's tau-b between the rankings of every two measures; NaN where one does not tell networks apart."""
    return pd.DataFrame({q.label: _lower_is_better_values(q, names) for q in quantities}).corr(method="kendall")


def order_in_words(ranking: Ranking) -> str:
    """Best first: `a > b`, better for certain; `a ≳ b`, noise could turn it round; `a = b`, equal values."""
    order = np.argsort(ranking.rank, kind="stable")
    text = str(ranking.names[order[0]])
    for one, other in itertools.pairwise(order):
        sign = "=" if ranking.rank[one] == ranking.rank[other] else ">" if ranking.better[one, other] > _SURE else "≳"
        text += f" {sign} {ranking.names[other]}"
    return text
