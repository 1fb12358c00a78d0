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

from flatscope.measures.desiderata import desiderata
from flatscope_papers import intervals
from flatscope_papers.claims import POSITIVE, Claim, Estimate
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.neyshabur2017.complexity import (
    CONVENTIONS,
    KL,
    LEVEL,
    NORMS,
    SHARPNESS,
    curves,
    draw_against,
    measured,
    norm_stage,
    over_seeds,
    perturbation_stage,
    table_of,
    verdict_note,
)
from flatscope_papers.neyshabur2017.label_networks import SIZES as LABEL_SIZES
from flatscope_papers.reasons import with_reasons

FASTER = {"lr": 0.1, "momentum": 0.9, "epochs": 1_500, "stop_loss": 1e-3, "evaluate_every": 5}
TRACKS = 0.5  # a rank correlation from which on a measure counts as following the test error
SIZES: Mapping[str, dict[str, Any]] = {
    "smoke": {"true": 30, "confused": (0, 15, 30), "test": 60},
    "small": {"true": 1_000, "confused": (0, 250, 500, 1_000), "test": 2_000, "train": FASTER},
    "paper": {"true": 10_000, "confused": (0, 1_000, 2_000, 3_000, 4_000, 5_000), "test": None},
}
REASONS = {
    "small": {"sharpness": "ranks of twelve networks, whose interval reaches across the limit; it hardly changes"}
}
FEWER = {"steps": 100, "draws": 40, "alphas": (0.005, 0.01, 0.018, 0.032, 0.056, 0.1)}


def stages(scale: str) -> list[Stage]:
    """One unit per seed; then norms, then perturbations, both on the true-labelled part."""
    usual, size = LABEL_SIZES[scale], SIZES[scale]
    units = [[_network(usual, size, k, seed) for k in size["confused"]] for seed in range(usual["seeds"])]
    settings = FEWER if scale == "small" else usual["perturbations"]
    first = size["true"]
    return [Stage(units), norm_stage(units, first=first), perturbation_stage(units, settings, first=first)]


def _network(usual: Mapping[str, Any], size: Mapping[str, Any], confused: int, seed: int) -> dict[str, Any]:
    drawn = {"train_size": size["true"] + max(size["confused"]), "test_size": size["test"], "seed": seed}
    return {
        "data": {**usual["data"], **drawn},
        "labels": {"confusion": confused, "true_size": size["true"], "seed": seed},
        "model": {**usual["model"], "seed": seed},
        "train": {**size.get("train", usual["train"]), "batch_size": 64, "seed": seed},
    }


def networks(runs: Runs) -> pd.DataFrame:
    """One row per network: size of the confusion set, seed, errors, measures."""
    found = measured(runs, {"labels.confusion": "confused", "train.seed": "seed"})
    return found.rename(columns={"error": "true_part_error", "loss": "true_part_loss"})


CLAIMS = (
    Claim(
        "zero_error",
        "section 3, Figure 3 left",
        "every network has zero error on its training set and on the confusion set of images with random labels",
        "largest error on both sets together",
        "0",
        holds=(0.0, 0.0),
    ),
    Claim(
        "test_error",
        "section 3, Figure 3 left",
        "the test error rises with the size of the confusion set, images with random labels that are fitted as well",
        "rank correlation (Spearman) of the test error with that size within a seed, mean over seeds",
        "rises",
        holds=(0.8, 1.0),
        partly=POSITIVE,
    ),
    *(
        Claim(
            f"follows_{name}",
            "section 3, Figure 3 middle",
            f"{label} over margin is predictive of the test error of networks that fit the same training set",
            "rank correlation (Spearman) with the test error over networks",
            "predictive",
            holds=(TRACKS, 1.0),
            partly=POSITIVE,
        )
        for name, label in NORMS.items()
    ),
    Claim(
        "sharpness",
        "section 3, Figure 3 middle",
        "sharpness behaves poorly: it does not follow the test error of networks that fit the same training set",
        "rank correlation (Spearman) with the test error over networks",
        "poor behaviour",
        holds=(-1.0, TRACKS),
    ),
    Claim(
        "kl",
        "section 3, Figure 3 right",
        "at a fixed expected sharpness, networks with a higher test error have higher norms (KL)",
        f"rank correlation (Spearman) of the KL at expected sharpness {LEVEL:g} ({KL}) with the test error over "
        "networks",
        "higher",
        holds=(TRACKS, 1.0),
        partly=POSITIVE,
    ),
)


@study(
    "neyshabur2017-fig3",
    figure="Figure 3",
    title="Global minima with poor generalization: a confusion set with random labels",
    claims=CLAIMS,
    stages=stages,
    deviations={
        "small": (
            "a 784-128-10 network (no BatchNorm, no dropout) on 1,000 MNIST images with true labels and up to 1,000 "
            "with random ones, pixels in [0, 1], in place of VGG on CIFAR-10",
            "learning rate 0.1 in place of 0.01, which levels sharpness (see neyshabur2017-fig2), and stop at a "
            "cross-entropy of 1e-3 in place of 1e-4; three seeds",
            "100 steps of ascent in place of 2,000 and 40 perturbed networks per noise level in place of 1,000",
            "measures are taken on the true-labelled part: the paper does not say on which",
        ),
        "paper": (
            "confusion sets of 0 to 5,000 images and five seeds: the paper states neither",
            "measures are taken on the true-labelled part: the paper does not say on which",
        ),
    },
    paper_cost="30 VGG networks on 10,000 to 15,000 images, of the order of 100 epochs each.",
)
def figure_3(runs: Runs) -> Analysis:
    """Errors, measures and bi-criteria curves of networks that fit S and a growing set of random labels."""
    points = networks(runs)
    found = {
        "zero_error": intervals.largest(points[["train_error", "true_part_error"]].max(axis=1)),
        "test_error": rise(points),
        "sharpness": intervals.correlation(points[SHARPNESS], points["test_error"], "spearman", _factors(points)),
        "kl": intervals.correlation(points[KL], points["test_error"], "spearman"),
    }
    for name in NORMS:
        found[f"follows_{name}"] = intervals.correlation(points[name], points["test_error"], "spearman")
    columns = {**NORMS, SHARPNESS: "sharpness", KL: f"KL at {LEVEL:g}"}
    table = desiderata(
        solutions={label: points[name].tolist() for name, label in columns.items()},
        solution_test_errors=points["test_error"].tolist(),
    )
    told = with_reasons(found, CLAIMS, runs.scale, REASONS.get(runs.scale, {}))
    levels = curves(runs, points[["confused", "seed"]])

    def draw(figure: Figure) -> None:
        _, _, right = draw_against(figure, points, levels, "confused", "size of the set with random labels")
        right.legend(title="random labels", fontsize=7, title_fontsize=7)

    return Analysis(table_of(points, levels), told, draw, (CONVENTIONS, verdict_note(table)))


def rise(points: pd.DataFrame) -> Estimate:
    """Rank correlation of the test error with the size of the confusion set within a seed, mean over seeds."""
    means, sizes = points.groupby("confused")["test_error"].mean(), points["confused"].nunique()
    return over_seeds(
        points,
        lambda rows: float(np.asarray(rows[["confused", "test_error"]].corr("spearman"))[0, 1]),
        f"mean test error {means.iloc[0]:.3f} without, {means.iloc[-1]:.3f} with the largest confusion set",
        resolution=12 / (sizes**3 - sizes),  # the steps of a rank correlation of so many
        bounds=(-1, 1),
    )


def _factors(points: pd.DataFrame) -> str:
    """By how much measures change, which a rank correlation does not see."""
    means = points.groupby("confused")[[SHARPNESS, *NORMS]].mean()
    factors = (means.iloc[-1] / means.iloc[0]).to_numpy(float)
    return (
        f"from no to the largest confusion set sharpness changes by a factor of {factors[0]:.2f}, the norms by "
        f"{factors[1:].min():.0f} to {factors[1:].max():.0f}"
    )
