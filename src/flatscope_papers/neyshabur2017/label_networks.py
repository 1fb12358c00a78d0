"""The networks behind Figures 1 and 2 of Neyshabur et al. (2017): fitted to true or to random labels.

The stop rule is the paper's, a level of the cross-entropy on the whole training set in eval mode, so that all networks
are compared where they fit their labels equally well.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from flatscope_papers.declaration import Runs, Stage
from flatscope_papers.neyshabur2017.complexity import (
    EPSILONS,
    measured,
    norm_stage,
    perturbation_stage,
    slope,
    verdict_note,
)
from flatscope_papers.neyshabur2017.desiderata import desiderata
from flatscope_papers.toml_files import grid

LABELS = {"true": 0.0, "random": 1.0}
SIZES = grid(__name__)


def network(size: Mapping[str, Any], samples: int, labels: str, seed: int) -> dict[str, Any]:
    """A training run; images, labels, starting weights and sample order all depend on the seed."""
    return {
        "data": {**size["data"], "train_size": samples, "seed": seed},
        "labels": {"random": LABELS[labels], "seed": seed},
        "model": {**size["model"], "seed": seed},
        "train": {**size["train"], "batch_size": 64, "seed": seed},
    }


def training(scale: str) -> list[list[dict[str, Any]]]:
    """One unit per size and seed: true and random labels train together."""
    size = SIZES[scale]
    return [
        [network(size, samples, labels, seed) for labels in LABELS]
        for samples, seed in itertools.product(size["samples"], range(size["seeds"]))
    ]


def norm_stages(scale: str) -> list[Stage]:
    """Train, then the norms."""
    units = training(scale)
    return [Stage(units), norm_stage(units, EPSILONS)]


def perturbation_stages(scale: str) -> list[Stage]:
    """The same networks, then what perturbations of their weights do."""
    units = training(scale)
    return [Stage(units), perturbation_stage(units, SIZES[scale]["perturbations"])]


def networks(runs: Runs) -> pd.DataFrame:
    """One row per network: size, labels, seed, how it was fitted, and what was measured."""
    found = measured(runs, {"data.train_size": "size", "labels.random": "labels", "train.seed": "seed"})
    return found.assign(labels=["random" if share else "true" for share in found["labels"]])


def log_gap(rows: pd.DataFrame, column: str) -> pd.Series[float]:
    """log10(random / true) by training-set size, for one seed."""
    wide = np.log10(rows.pivot_table(index="size", columns="labels", values=column, dropna=False))
    gap: pd.Series[float] = wide["random"] - wide["true"]
    return gap


def gap_slope(rows: pd.DataFrame, column: str) -> float:
    """Decades by which random / true grows per decade of samples."""
    gap = log_gap(rows, column)
    return slope(gap.index, gap)


def growth(rows: pd.DataFrame, column: str, labels: str) -> float:
    """Exponent with which a measure grows with the number of samples."""
    chosen = rows[rows["labels"] == labels]
    return slope(chosen["size"], np.log10(chosen[column]))


def fit_note(points: pd.DataFrame) -> str:
    """Note on how the networks were fitted."""
    return (
        f"{len(points)} networks, training cross-entropy {points['train_loss'].max():.2g} or less, "
        f"test error {points[points['labels'] == 'true']['test_error'].mean():.3f} with true and "
        f"{points[points['labels'] == 'random']['test_error'].mean():.3f} with random labels (means)"
    )


def label_verdicts(points: pd.DataFrame, columns: Mapping[str, str]) -> str:
    """Demand (i) for these measures, network by network."""
    ordered = points.sort_values(["size", "seed"])
    sides = {
        labels: {label: ordered[ordered["labels"] == labels][name].tolist() for name, label in columns.items()}
        for labels in LABELS
    }
    return verdict_note(desiderata(true_labels=sides["true"], random_labels=sides["random"]))
