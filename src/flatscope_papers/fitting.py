"""Claims that networks fit their training samples: a network that was not trained until it does says nothing.

That one can be fitted is shown by its being fitted. That it was not, within a budget of steps, shows the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import pandas as pd

from flatscope_papers import intervals
from flatscope_papers.claims import Answer

FITTED = 0.01  # training error up to which a network counts as fitted, as in the claims' ranges


def largest_training_error(networks: pd.DataFrame, note: str = "") -> Answer:
    """The largest training error; no number where a network was left unfitted.

    Args:
        networks: one row per network, with `train_error`.
        note: what a reader must know beside it.
    """
    errors = networks["train_error"]
    left = int((errors > FITTED).sum())
    if not left:
        return intervals.largest_over_networks(errors, note)
    words = f"{left} of {len(errors)} networks were not trained until they fit: errors up to {errors.max():.3f}"
    return Answer(math.nan, runs=len(errors), note="; ".join(part for part in (words, note) if part))


def notes_on_unfitted_networks(networks: pd.DataFrame) -> dict[tuple[str, ...], str]:
    """Note on each kind of networks that were not trained until they fit, indexed by kind."""
    left: dict[tuple[str, ...], str] = {}
    for kind, error in networks["train_error"].groupby(level=[0, 1]).max().items():
        if error > FITTED:
            names = tuple(map(str, kind if isinstance(kind, tuple) else (kind,)))
            left[names] = f"{' '.join(names)} labels were not trained until they fit: errors up to {error:.3f}"
    return left


def answer_if_networks_fitted(
    answer: Answer, kinds: Iterable[tuple[str, ...]], left: Mapping[tuple[str, ...], str]
) -> Answer:
    """The answer; no number where it is about kinds of networks that were left unfitted.

    Args:
        answer: as it is if they fit.
        kinds: that it is about.
        left: as `notes_on_unfitted_networks` gives it.
    """
    words = [left[kind] for kind in kinds if kind in left]
    if not words:
        return answer
    number = f"{answer.value:.3g} there"
    return Answer(math.nan, runs=answer.runs, note="; ".join(filter(None, [*words, number, answer.note])))


def gaps_by_size(points: pd.DataFrame) -> str:
    """Test minus training error by the number of samples, in words."""
    means = points.groupby("n")["gap"].mean()
    return "apart by " + ", ".join(f"{gap:.3f} with {n:,} samples" for n, gap in means.items())
