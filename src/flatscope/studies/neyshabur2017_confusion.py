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
from flatscope.studies import intervals
from flatscope.studies.claims import POSITIVE, Claim, Estimate
from flatscope.studies.neyshabur2017_complexity import (
    CONVENTIONS,
    EPSILON,
    KL,
    LEVEL,
    NORMS,
    NORMS_WORK,
    PERTURBATIONS_WORK,
    SHARPNESS,
    curves,
    draw_curves,
    draw_lines,
    draw_relative,
    over_seeds,
    three_panels,
    verdict_note,
)
from flatscope.studies.neyshabur2017_label_networks import SIZES as LABEL_SIZES
from flatscope.studies.study import Analysis, Runs, Stage, study

SMALL_MODEL = {"name": "two_layer", "options": {"hidden": 128}}
TRACKS = 0.5  # a rank correlation from which on a measure counts as following the test error
SIZES: Mapping[str, dict[str, Any]] = {
    "smoke": {"true": 30, "confused": (0, 15, 30), "test": 60},
    "small": {"true": 1_000, "confused": (0, 250, 500, 1_000), "test": 2_000, "model": SMALL_MODEL},
    "paper": {"true": 10_000, "confused": (0, 1_000, 2_000, 3_000, 4_000, 5_000), "test": None},
}
FEWER = {"steps": 100, "draws": 40, "alphas": (0.005, 0.01, 0.018, 0.032, 0.056, 0.1)}


def stages(scale: str) -> list[Stage]:
    """One unit per seed; then norms, then perturbations, both on the true-labelled part."""
    usual, size = LABEL_SIZES[scale], SIZES[scale]
    units = [[_network(usual, size, k, seed) for k in size["confused"]] for seed in range(usual["seeds"])]
    settings = FEWER if scale == "small" else usual["perturbations"]
    shared = {"first": size["true"]}
    return [
        Stage(units),
        Stage(
            [[{"network": c, **shared, "norms": {"epsilons": [EPSILON]}} for c in u] for u in units], NORMS_WORK, 0.25
        ),
        Stage(
            [[{"network": c, **shared, "perturbations": settings} for c in u] for u in units], PERTURBATIONS_WORK, 0.5
        ),
    ]


def _network(usual: Mapping[str, Any], size: Mapping[str, Any], confused: int, seed: int) -> dict[str, Any]:
    drawn = {"train_size": size["true"] + max(size["confused"]), "test_size": size["test"], "seed": seed}
    return {
        "data": {**usual["data"], **drawn},
        "labels": {"confusion": confused, "true_size": size["true"], "seed": seed},
        "model": {**size.get("model", usual["model"]), "seed": seed},
        "train": {**usual["train"], "batch_size": 64, "seed": seed},
    }


def networks(runs: Runs) -> pd.DataFrame:
    """One row per network: size of the confusion set, seed, errors, measures."""
    trained, normed, perturbed = (runs.frame(stage) for stage in range(3))
    return pd.DataFrame(
        {
            "confused": trained["labels.confusion"],
            "seed": trained["train.seed"],
            "train_error": trained["train_error"],
            "true_part_error": normed["error"],
            "test_error": trained["test_error"],
            "train_loss": trained["train_loss"],
            "epochs": trained["epochs"],
            **{name: normed[name] for name in NORMS},
            SHARPNESS: perturbed[SHARPNESS],
            KL: perturbed[KL],
        }
    )


CLAIMS = (
    Claim(
        "zero_error",
        "section 3, Figure 3 left",
        "every network has zero error on the training and on the confusion set",
        "largest error on both sets together",
        "0",
        holds=(0.0, 0.0),
    ),
    Claim(
        "test_error",
        "section 3, Figure 3 left",
        "the test error rises with the size of the confusion set",
        "rank correlation (Spearman) of the test error with that size within a seed, mean over seeds",
        "rises",
        holds=(0.8, 1.0),
        partly=POSITIVE,
    ),
    *(
        Claim(
            f"follows_{name}",
            "section 3, Figure 3 middle",
            f"{label} over margin is predictive of the test error",
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
        "sharpness behaves poorly: it does not follow the test error",
        "rank correlation (Spearman) with the test error over networks",
        "poor behaviour",
        holds=(-1.0, TRACKS),
    ),
    Claim(
        "kl",
        "section 3, Figure 3 right",
        "at a fixed expected sharpness, networks with a higher test error have higher norms",
        f"rank correlation (Spearman) of the KL at expected sharpness {LEVEL:g} with the test error over networks",
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
            "learning rate 0.1 in place of 0.01 and stop at a cross-entropy of 1e-3 in place of 1e-4; three seeds",
            "100 steps of ascent in place of 2,000 and 40 perturbed networks per noise level in place of 1,000",
            "measures are taken on the true-labelled part: the paper does not say on which",
        ),
        "paper": (
            "confusion sets of 0 to 5,000 images and five seeds: the paper states neither",
            "measures are taken on the true-labelled part: the paper does not say on which",
        ),
    },
    paper_cost="30 VGG networks on 10,000 to 15,000 images, of the order of 100 epochs each: a few hours on one "
    "H200 by arithmetic; not timed.",
)
def figure_3(runs: Runs) -> Analysis:
    """Errors, measures and bi-criteria curves of networks that fit S and a growing set of random labels."""
    points = networks(runs)
    largest = float(points[["train_error", "true_part_error"]].to_numpy().max())
    found = {
        "zero_error": Estimate.exact(largest, f"over {len(points)} networks"),
        "test_error": over_seeds(
            points,
            lambda rows: float(np.asarray(rows[["confused", "test_error"]].corr("spearman"))[0, 1]),
            _rise(points),
        ),
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
    lines = curves(runs.stored(2), points[["confused", "seed"]])
    everything = pd.concat([points.assign(kind="network"), lines.assign(kind="noise level")], ignore_index=True)
    return Analysis(
        everything,
        found,
        lambda figure: _draw(figure, points, lines),
        (CONVENTIONS, verdict_note(table)),
    )


def _rise(points: pd.DataFrame) -> str:
    means = points.groupby("confused")["test_error"].mean()
    return f"mean test error {means.iloc[0]:.3f} without, {means.iloc[-1]:.3f} with the largest confusion set"


def _factors(points: pd.DataFrame) -> str:
    """By how much measures change, which a rank correlation does not see."""
    means = points.groupby("confused")[[SHARPNESS, *NORMS]].mean()
    factors = (means.iloc[-1] / means.iloc[0]).to_numpy(float)
    return (
        f"from no to the largest confusion set sharpness changes by a factor of {factors[0]:.2f}, the norms by "
        f"{factors[1:].min():.0f} to {factors[1:].max():.0f}"
    )


def _draw(figure: Figure, points: pd.DataFrame, lines: pd.DataFrame) -> None:
    left, middle, right = three_panels(figure)
    draw_lines(left, points, "confused", {"train_error": "training error", "test_error": "test error"}, log=False)
    left.set_ylabel("error (share of images)")
    draw_relative(middle, points, "confused", {**NORMS, SHARPNESS: "sharpness"})
    for axes in (left, middle):
        axes.set_xlabel("size of the set with random labels")
        axes.legend(fontsize=7)
    draw_curves(right, lines, "confused")
    right.legend(title="random labels", fontsize=7, title_fontsize=7)
