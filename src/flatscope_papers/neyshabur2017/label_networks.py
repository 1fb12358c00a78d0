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
    desiderata_note,
    log_log_slope,
    measured_networks,
    norm_stage,
    perturbation_stage,
)
from flatscope_papers.neyshabur2017.desiderata import desiderata
from flatscope_papers.toml_files import settings_by_scale

LABELS = {"true": 0.0, "random": 1.0}
SIZES = settings_by_scale(__name__)


def label_network_config(size: Mapping[str, Any], samples: int, labels: str, seed: int) -> dict[str, Any]:
    """A training run; images, labels, starting weights and sample order all depend on the seed."""
    return {
        "data": {**size["data"], "train_size": samples, "seed": seed},
        "labels": {"random": LABELS[labels], "seed": seed},
        "model": {**size["model"], "seed": seed},
        "train": {**size["train"], "batch_size": 64, "seed": seed},
    }


def label_training_units(scale: str) -> list[list[dict[str, Any]]]:
    """One unit per size and seed: true and random labels train together."""
    size = SIZES[scale]
    return [
        [label_network_config(size, samples, labels, seed) for labels in LABELS]
        for samples, seed in itertools.product(size["samples"], range(size["seeds"]))
    ]


def label_norm_stages(scale: str) -> list[Stage]:
    """Train, then the norms."""
    units = label_training_units(scale)
    return [Stage(units), norm_stage(units, EPSILONS)]


def label_perturbation_stages(scale: str) -> list[Stage]:
    """The same networks, then what perturbations of their weights do."""
    units = label_training_units(scale)
    return [Stage(units), perturbation_stage(units, SIZES[scale]["perturbations"])]


def label_networks_table(runs: Runs) -> pd.DataFrame:
    """One row per network: size, labels, seed, how it was fitted, and what was measured."""
    networks = measured_networks(runs, {"data.train_size": "size", "labels.random": "labels", "train.seed": "seed"})
    return networks.assign(labels=["random" if share else "true" for share in networks["labels"]])


def log_ratio_of_random_to_true_labels(rows: pd.DataFrame, column: str) -> pd.Series[float]:
    """log10(random / true) by training-set size, for one seed."""
    wide = np.log10(rows.pivot_table(index="size", columns="labels", values=column, dropna=False))
    gap: pd.Series[float] = wide["random"] - wide["true"]
    return gap


def slope_of_random_to_true_ratio(rows: pd.DataFrame, column: str) -> float:
    """Decades by which random / true grows per decade of samples."""
    gap = log_ratio_of_random_to_true_labels(rows, column)
    return log_log_slope(gap.index, gap)


def growth_exponent_with_samples(rows: pd.DataFrame, column: str, labels: str) -> float:
    """Exponent with which a measure grows with the number of samples."""
    chosen = rows[rows["labels"] == labels]
    return log_log_slope(chosen["size"], np.log10(chosen[column]))


def label_training_note(points: pd.DataFrame) -> str:
    """Note on how the networks were fitted."""
    return (
        f"{len(points)} networks, training cross-entropy {points['train_loss'].max():.2g} or less, "
        f"test error {points[points['labels'] == 'true']['test_error'].mean():.3f} with true and "
        f"{points[points['labels'] == 'random']['test_error'].mean():.3f} with random labels (means)"
    )


def label_demand_in_words(points: pd.DataFrame, columns: Mapping[str, str]) -> str:
    """Demand (i) for these measures, network by network."""
    ordered = points.sort_values(["size", "seed"])
    sides = {
        labels: {label: ordered[ordered["labels"] == labels][name].tolist() for name, label in columns.items()}
        for labels in LABELS
    }
    return desiderata_note(desiderata(true_labels=sides["true"], random_labels=sides["random"]))
