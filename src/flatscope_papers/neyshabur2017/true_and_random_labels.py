"""Figures 1 and 2 of Neyshabur et al. (2017): complexity of networks trained on true and on random labels.

Both figures look at the same networks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.curves import draw_error_bars, runs_as_columns
from flatscope_papers.declaration import Analysis, Runs, study
from flatscope_papers.fitting import largest_training_error
from flatscope_papers.neyshabur2017.complexity import (
    COLOURS,
    CONVENTIONS,
    EPSILON,
    EPSILONS,
    KL,
    LEVEL,
    NORMS,
    ON_GRID,
    SHARPNESS,
    bi_criteria_curves,
    draw_bi_criteria_curves,
    mean_over_seeds,
    networks_and_curves_table,
    row_of_three_panels,
)
from flatscope_papers.neyshabur2017.label_networks import (
    LABELS,
    growth_exponent_with_samples,
    label_demand_in_words,
    label_networks_table,
    label_norm_stages,
    label_perturbation_stages,
    label_training_note,
    log_ratio_of_random_to_true_labels,
    slope_of_random_to_true_ratio,
)

AGREE = 0.95  # share of comparisons
LINES = {"true": (COLOURS[0], "o"), "random": (COLOURS[1], "s")}


@study("neyshabur2017-fig1", stages=label_norm_stages)
def figure_1(runs: Runs) -> Analysis:
    """The four norms over the margin of networks fitted to true or random labels, against the number of samples."""
    points = label_networks_table(runs)
    answers = {
        "zero_error": largest_training_error(points),
        "epsilon": order_agreement_over_epsilons(points, runs.frames("epsilons")),
        "linear": mean_over_seeds(
            points, lambda rows: mean_growth_exponent_of_norms(rows, "random"), _exponents_in_words(points)
        ),
        "small_increase": mean_over_seeds(
            points, lambda rows: mean_growth_exponent_of_norms(rows, "true"), _test_errors_in_words(points)
        ),
        "most_pronounced": mean_over_seeds(points, excess_slope_of_l2_measures, _slopes_in_words(points)),
    }
    for name in NORMS:
        answers[f"higher_{name}"] = mean_over_seeds(points, functools.partial(_smallest_log_ratio, name=name))
        answers[f"grows_{name}"] = mean_over_seeds(
            points, functools.partial(slope_of_random_to_true_ratio, column=name)
        )
    notes = (CONVENTIONS, label_training_note(points), label_demand_in_words(points, NORMS))
    return Analysis(points, answers, lambda figure: _draw_norms(figure, points), notes)


def mean_growth_exponent_of_norms(rows: pd.DataFrame, labels: str) -> float:
    """Exponent with which the four norms grow with the number of samples, their mean."""
    return float(np.mean([growth_exponent_with_samples(rows, name, labels) for name in NORMS]))


def excess_slope_of_l2_measures(rows: pd.DataFrame) -> float:
    """Excess of the slopes of the two ℓ2 measures over those of the other two."""
    slopes = {name: slope_of_random_to_true_ratio(rows, name) for name in NORMS}
    return min(slopes["l2_norm"], slopes["l2_path_norm"]) - max(slopes["l1_path_norm"], slopes["spectral_norm"])


def order_agreement_over_epsilons(points: pd.DataFrame, by_epsilon: list[pd.DataFrame]) -> Answer:
    """Share of pairs of true and random labels that compare as at ε = 0.05, over norms, sizes, seeds and ε."""
    settings = points[["seed", "size", "labels"]].to_dict("records")
    parts = [frame.assign(**row) for frame, row in zip(by_epsilon, settings, strict=True)]  # type: ignore[arg-type]
    long = pd.concat(parts).melt(["seed", "size", "labels", "epsilon"], list(NORMS), "norm")
    pairs = long.pivot_table(index=["norm", "seed", "size", "epsilon"], columns="labels", values="value")
    if not set(LABELS) <= set(pairs):  # one kind of label was fitted by no network
        return intervals.share_of_cases([])
    pairs = pairs.dropna()
    higher = (pairs["random"] > pairs["true"]).unstack("epsilon").reindex(columns=list(EPSILONS)).dropna()
    agree = pd.concat([higher[epsilon] == higher[EPSILON] for epsilon in EPSILONS if epsilon != EPSILON])
    return intervals.share_of_cases(agree, groups=[f"{seed}/{size}" for _, seed, size in agree.index], least=AGREE)


def _test_errors_in_words(points: pd.DataFrame) -> str:
    """Note on how far the dependence of labels on images has been learned."""
    means = points[points["labels"] == "true"].groupby("size")["test_error"].mean()
    return f"test error with true labels: {', '.join(f'{error:.3f} at {size}' for size, error in means.items())}"


def _smallest_log_ratio(rows: pd.DataFrame, name: str) -> float:
    return float(log_ratio_of_random_to_true_labels(rows, name).min(skipna=False))


def _slopes_in_words(points: pd.DataFrame) -> str:
    slopes = {
        name: mean_over_seeds(points, functools.partial(slope_of_random_to_true_ratio, column=name)).value
        for name in NORMS
    }
    return "slopes: " + ", ".join(f"{label} {slopes[name]:.2f}" for name, label in NORMS.items())


def _exponents_in_words(points: pd.DataFrame) -> str:
    parts = []
    for name, label in NORMS.items():
        pair = [
            mean_over_seeds(points, functools.partial(growth_exponent_with_samples, column=name, labels=labels)).value
            for labels in LABELS
        ]
        parts.append(f"{label} {pair[1]:.2f} (true labels {pair[0]:.2f})")
    return "exponents: " + ", ".join(parts)


def _draw_norms(figure: Figure, points: pd.DataFrame) -> None:
    figure.set_size_inches(11.0, 2.9)
    panels: Any = figure.subplots(1, len(NORMS))
    for axes, (name, label) in zip(panels, NORMS.items(), strict=True):
        _draw_true_and_random_labels(axes, points, name)
        axes.set_title(label, fontsize=9)
    panels[0].set_ylabel("norm² / margin² (no factors of width or depth)", fontsize=8)
    panels[0].legend(fontsize=8)


def _draw_true_and_random_labels(axes: Any, points: pd.DataFrame, column: str) -> None:
    for labels, (colour, marker) in LINES.items():
        drawn = runs_as_columns(points[points["labels"] == labels], "size", column)
        draw_error_bars(axes, drawn, colour, marker=marker, ms=4, label=f"{labels} labels")
    axes.set_yscale("log")
    axes.set_xlabel("size of the training set")


@study("neyshabur2017-fig2", stages=label_perturbation_stages)
def figure_2(runs: Runs) -> Analysis:
    """Sharpness against the number of samples, and divergence against expected sharpness, for both kinds of labels."""
    points = label_networks_table(runs)
    smallest, largest = points["size"].min(), points["size"].max()
    answers = {
        "large": mean_over_seeds(
            points, lambda rows: float(log_ratio_of_random_to_true_labels(rows, SHARPNESS)[largest])
        ),
        "small": mean_over_seeds(
            points,
            lambda rows: float(log_ratio_of_random_to_true_labels(rows, SHARPNESS)[smallest]),
            _ratios_in_words(points),
        ),
        "curves": mean_over_seeds(
            points,
            lambda rows: float(
                np.nanmean([log_ratio_of_random_to_true_labels(rows, name).mean() for name in ON_GRID.values()])
            ),
        ),
        "fixed": mean_over_seeds(
            points, lambda rows: float(log_ratio_of_random_to_true_labels(rows, KL).min(skipna=False))
        ),
        "moves": mean_over_seeds(
            points,
            lambda rows: (
                growth_exponent_with_samples(rows, KL, "random") - growth_exponent_with_samples(rows, KL, "true")
            ),
        ),
    }
    levels = bi_criteria_curves(runs, points[["size", "labels", "seed"]])
    notes = (
        CONVENTIONS,
        label_training_note(points),
        label_demand_in_words(points, {SHARPNESS: "sharpness", KL: f"KL at expected sharpness {LEVEL:g}"}),
    )
    return Analysis(
        networks_and_curves_table(points, levels),
        answers,
        lambda figure: _draw_sharpness_and_noise_curves(figure, points, levels),
        notes,
    )


def _ratios_in_words(points: pd.DataFrame) -> str:
    gaps = pd.concat(
        [log_ratio_of_random_to_true_labels(rows, SHARPNESS) for _, rows in points.groupby("seed")], axis=1
    ).mean(axis=1)
    ratios = ", ".join(f"{10**gap:.2g} at {size}" for size, gap in gaps.items())
    return f"random / true by size: {ratios}"


def _draw_sharpness_and_noise_curves(figure: Figure, points: pd.DataFrame, levels: pd.DataFrame) -> None:
    left, middle, right = row_of_three_panels(figure)
    _draw_true_and_random_labels(left, points, SHARPNESS)
    left.set_ylabel("sharpness ζ, α = 5·10⁻⁴ (nats)")
    left.legend(fontsize=8)
    for axes, labels in ((middle, "true"), (right, "random")):
        draw_bi_criteria_curves(axes, levels[levels["labels"] == labels], "size")
        axes.set_title(f"{labels} labels", fontsize=9)
    right.legend(title="samples", fontsize=7, title_fontsize=7)
    right.sharex(middle)
    right.sharey(middle)
    right.autoscale()
