"""Figure 3 of Neyshabur et al. (2017): global minima of one training set that generalize differently.

Networks are trained on a set S with true labels and a confusion set with random ones; each that fits both is a global
minimum for S. Measures are taken on S alone, whose margin the paper speaks of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.neyshabur2017 import complexity
from flatscope_papers.neyshabur2017.desiderata import desiderata
from flatscope_papers.neyshabur2017.label_networks import SIZES as LABEL_SIZES
from flatscope_papers.toml_files import settings_by_scale

SIZES = settings_by_scale(__name__)
FEWER = {"steps": 100, "draws": 40, "alphas": (0.005, 0.01, 0.018, 0.032, 0.056, 0.1)}


def confusion_stages(scale: str) -> list[Stage]:
    """One unit per seed; then norms, then perturbations, both on the true-labelled part."""
    usual, size = LABEL_SIZES[scale], SIZES[scale]
    seeds = range(size.get("seeds", usual["seeds"]))
    units = [[_confusion_network_config(usual, size, k, seed) for k in size["confused"]] for seed in seeds]
    settings = FEWER if scale == "small" else size.get("perturbations", usual["perturbations"])
    first = size["true"]
    return [
        Stage(units),
        complexity.norm_stage(units, first=first),
        complexity.perturbation_stage(units, settings, first=first),
    ]


def _confusion_network_config(
    usual: Mapping[str, Any], size: Mapping[str, Any], confused: int, seed: int
) -> dict[str, Any]:
    drawn = {"train_size": size["true"] + max(size["confused"]), "test_size": size.get("test"), "seed": seed}
    return {
        "data": {**usual["data"], **drawn},
        "labels": {"confusion": confused, "true_size": size["true"], "seed": seed},
        "model": {**size.get("model", usual["model"]), "seed": seed},
        "train": {**size.get("train", usual["train"]), "batch_size": 64, "seed": seed},
    }


def confusion_networks_table(runs: Runs) -> pd.DataFrame:
    """One row per network: size of the confusion set, seed, errors, measures."""
    networks = complexity.measured_networks(runs, {"labels.confusion": "confused", "train.seed": "seed"})
    return networks.rename(columns={"error": "true_part_error", "loss": "true_part_loss"})


@study("neyshabur2017-fig3", stages=confusion_stages)
def figure_3(runs: Runs) -> Analysis:
    """Errors, measures and bi-criteria curves of networks that fit S and a growing set of random labels."""
    points = confusion_networks_table(runs)
    answers = {
        "zero_error": intervals.largest_over_networks(points[["train_error", "true_part_error"]].max(axis=1)),
        "test_error": rank_correlation_of_test_error(points),
        "sharpness": intervals.correlation_with_interval(
            points[complexity.SHARPNESS], points["test_error"], "spearman", _factors_of_measures_in_words(points)
        ),
        "kl": intervals.correlation_with_interval(points[complexity.KL], points["test_error"], "spearman"),
    }
    for name in complexity.NORMS:
        answers[f"follows_{name}"] = intervals.correlation_with_interval(points[name], points["test_error"], "spearman")
    columns = {**complexity.NORMS, complexity.SHARPNESS: "sharpness", complexity.KL: f"KL at {complexity.LEVEL:g}"}
    table = desiderata(
        solutions={label: points[name].tolist() for name, label in columns.items()},
        solution_test_errors=points["test_error"].tolist(),
    )
    levels = complexity.bi_criteria_curves(runs, points[["confused", "seed"]])

    def draw(figure: Figure) -> None:
        _, _, right = complexity.draw_errors_measures_and_curves(
            figure, points, levels, "confused", "size of the set with random labels"
        )
        right.legend(title="random labels", fontsize=7, title_fontsize=7)

    return Analysis(
        complexity.networks_and_curves_table(points, levels),
        answers,
        draw,
        (complexity.CONVENTIONS, complexity.desiderata_note(table)),
    )


def rank_correlation_of_test_error(points: pd.DataFrame) -> Answer:
    """Rank correlation of the test error with the size of the confusion set within a seed, mean over seeds."""
    means, sizes = points.groupby("confused")["test_error"].mean(), points["confused"].nunique()
    return complexity.mean_over_seeds(
        points,
        lambda rows: float(np.asarray(rows[["confused", "test_error"]].corr("spearman"))[0, 1]),
        f"mean test error {means.iloc[0]:.3f} without, {means.iloc[-1]:.3f} with the largest confusion set",
        resolution=12 / (sizes**3 - sizes),  # the steps of a rank correlation of so many
        bounds=(-1, 1),
    )


def _factors_of_measures_in_words(points: pd.DataFrame) -> str:
    """By how much measures change, which a rank correlation does not see."""
    means = points.groupby("confused")[[complexity.SHARPNESS, *complexity.NORMS]].mean()
    factors = (means.iloc[-1] / means.iloc[0]).to_numpy(float)
    return (
        f"from no to the largest confusion set sharpness changes by a factor of {factors[0]:.2f}, the norms by "
        f"{factors[1:].min():.0f} to {factors[1:].max():.0f}"
    )
