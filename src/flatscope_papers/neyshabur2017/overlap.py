"""Distributions before and after training, as Figures 6 and 8 of Neyshabur et al. (2017) show them: what they share."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.neyshabur2017.deep_networks import WEIGHTS, histogram_table

# Two bell curves overlap by 0.9 if they lie a quarter of a standard deviation apart, or if one is 1.23 times as wide;
# by 0.75 if they lie 0.64 apart, or if one is 1.7 times as wide.

Histograms = Mapping[tuple[str, int], pd.DataFrame]


def histograms_by_weights_and_seed(values: Mapping[str, pd.DataFrame], column: str, over: Any) -> Histograms:
    """Histograms by kind of weights and seed, all over the same bins."""
    return {
        (which, int(str(seed))): histogram_table(rows[column], over, weights=which, seed=seed)
        for which, frame in values.items()
        for seed, rows in frame.groupby("seed")
    }


def histogram_overlap(first: pd.DataFrame, second: pd.DataFrame) -> float:
    """Share that two histograms over the same bins have in common: 1 minus their total variation."""
    return float(np.minimum(first["share"].to_numpy(), second["share"].to_numpy()).sum())


def learned_initial_overlap(each: Histograms, note: str = "") -> Answer:
    """Overlap of a network's learned with its initial histogram; beside it, that of one network with another.

    The latter is as much as chance leaves: histograms of finitely many values differ even where the law is the same.
    """
    seeds = sorted({seed for _, seed in each})
    overlaps = [histogram_overlap(each["learned", seed], each["initial", seed]) for seed in seeds]
    pairs = list(combinations(seeds, 2))
    others = [np.mean([histogram_overlap(each[which, a], each[which, b]) for a, b in pairs]) for which in WEIGHTS]
    chance = f"two initializations overlap by {others[0]:.2f}, two learned networks by {others[1]:.2f}" if pairs else ""
    return intervals.mean_over_runs(overlaps, "; ".join(part for part in (chance, note) if part), bounds=(0, 1))


def middle_nine_tenths_in_words(values: Mapping[str, pd.DataFrame], column: str) -> str:
    """Interval of nine tenths of the values, before and after training."""
    ends = {which: frame[column].quantile([0.05, 0.95]).to_numpy() for which, frame in values.items()}
    parts = [f"{ends[which][0]:.3g} to {ends[which][1]:.3g} ({words})" for which, words in WEIGHTS.items()]
    return f"nine tenths of the values lie from {' and from '.join(parts)}"
