"""Claims that networks fit their training samples: a network that was not trained until it does says nothing.

That one can be fitted is shown by its being fitted. That it was not, within a budget of steps, shows the budget.
"""

from __future__ import annotations

import math

import pandas as pd

from flatscope_papers import intervals
from flatscope_papers.claims import Answer

FITTED = 0.01  # training error up to which a network counts as fitted, as in the claims' ranges


def largest_error(networks: pd.DataFrame, note: str = "") -> Answer:
    """The largest training error; no number where a network was left unfitted.

    Args:
        networks: one row per network, with `train_error`.
        note: what a reader must know beside it.
    """
    errors = networks["train_error"]
    left = int((errors > FITTED).sum())
    if not left:
        return intervals.largest(errors, note)
    words = f"{left} of {len(errors)} networks were not trained until they fit: errors up to {errors.max():.3f}"
    return Answer(math.nan, runs=len(errors), note="; ".join(part for part in (words, note) if part))


def gaps_by_size(points: pd.DataFrame) -> str:
    """Test minus training error by the number of samples, in words."""
    means = points.groupby("n")["gap"].mean()
    return "apart by " + ", ".join(f"{gap:.3f} with {n:,} samples" for n, gap in means.items())
