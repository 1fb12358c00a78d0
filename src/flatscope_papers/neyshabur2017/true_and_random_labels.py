"""Figures 1 and 2 of Neyshabur et al. (2017): complexity of networks trained on true and on random labels.

Both figures look at the same networks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.curves import bars, lines
from flatscope_papers.declaration import Analysis, Runs, study
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
    curves,
    draw_curves,
    over_seeds,
    table_of,
    three_panels,
)
from flatscope_papers.neyshabur2017.label_networks import (
    LABELS,
    fit_note,
    gap_slope,
    growth,
    label_verdicts,
    log_gap,
    networks,
    norm_stages,
    perturbation_stages,
)

AGREE = 0.95  # share of comparisons
LINES = {"true": (COLOURS[0], "o"), "random": (COLOURS[1], "s")}


@study("neyshabur2017-fig1", stages=norm_stages)
def figure_1(runs: Runs) -> Analysis:
    """The four norms over the margin of networks fitted to true or random labels, against the number of samples."""
    points = networks(runs)
    found = {
        "zero_error": intervals.largest(points["train_error"]),
        "epsilon": same_order(points, runs.frames("epsilons")),
        "linear": over_seeds(points, lambda rows: mean_growth(rows, "random"), _exponents(points)),
        "small_increase": over_seeds(points, lambda rows: mean_growth(rows, "true"), _test_errors(points)),
        "most_pronounced": over_seeds(points, most_pronounced, _slopes(points)),
    }
    for name in NORMS:
        found[f"higher_{name}"] = over_seeds(points, lambda rows, name=name: log_gap(rows, name).min(skipna=False))  # type: ignore[misc]
        found[f"grows_{name}"] = over_seeds(points, lambda rows, name=name: gap_slope(rows, name))  # type: ignore[misc]
    notes = (CONVENTIONS, fit_note(points), label_verdicts(points, NORMS))
    return Analysis(points, found, lambda figure: _draw_norms(figure, points), notes)


def mean_growth(rows: pd.DataFrame, labels: str) -> float:
    """Exponent with which the four norms grow with the number of samples, their mean."""
    return float(np.mean([growth(rows, name, labels) for name in NORMS]))


def most_pronounced(rows: pd.DataFrame) -> float:
    """Excess of the slopes of the two ℓ2 measures over those of the other two."""
    slopes = {name: gap_slope(rows, name) for name in NORMS}
    return min(slopes["l2_norm"], slopes["l2_path_norm"]) - max(slopes["l1_path_norm"], slopes["spectral_norm"])


def same_order(points: pd.DataFrame, by_epsilon: list[pd.DataFrame]) -> Answer:
    """Share of pairs of true and random labels that compare as at ε = 0.05, over norms, sizes, seeds and ε."""
    settings = points[["seed", "size", "labels"]].to_dict("records")
    parts = [frame.assign(**row) for frame, row in zip(by_epsilon, settings, strict=True)]  # type: ignore[arg-type]
    long = pd.concat(parts).melt(["seed", "size", "labels", "epsilon"], list(NORMS), "norm")
    pairs = long.pivot_table(index=["norm", "seed", "size", "epsilon"], columns="labels", values="value")
    if not set(LABELS) <= set(pairs):  # one kind of label was fitted by no network
        return intervals.share([])
    pairs = pairs.dropna()
    higher = (pairs["random"] > pairs["true"]).unstack("epsilon").reindex(columns=list(EPSILONS)).dropna()
    agree = pd.concat([higher[epsilon] == higher[EPSILON] for epsilon in EPSILONS if epsilon != EPSILON])
    return intervals.share(agree, groups=[f"{seed}/{size}" for _, seed, size in agree.index], least=AGREE)


def _test_errors(points: pd.DataFrame) -> str:
    """Note on how far the dependence of labels on images has been learned."""
    means = points[points["labels"] == "true"].groupby("size")["test_error"].mean()
    return f"test error with true labels: {', '.join(f'{error:.3f} at {size}' for size, error in means.items())}"


def _slopes(points: pd.DataFrame) -> str:
    slopes = {name: over_seeds(points, lambda rows, name=name: gap_slope(rows, name)).value for name in NORMS}  # type: ignore[misc]
    return "slopes: " + ", ".join(f"{label} {slopes[name]:.2f}" for name, label in NORMS.items())


def _exponents(points: pd.DataFrame) -> str:
    parts = []
    for name, label in NORMS.items():
        pair = [over_seeds(points, lambda rows, c=(name, kind): growth(rows, *c)).value for kind in LABELS]  # type: ignore[misc]
        parts.append(f"{label} {pair[1]:.2f} (true labels {pair[0]:.2f})")
    return "exponents: " + ", ".join(parts)


def _draw_norms(figure: Figure, points: pd.DataFrame) -> None:
    figure.set_size_inches(11.0, 2.9)
    panels: Any = figure.subplots(1, len(NORMS))
    for axes, (name, label) in zip(panels, NORMS.items(), strict=True):
        _draw_pair(axes, points, name)
        axes.set_title(label, fontsize=9)
    panels[0].set_ylabel("norm² / margin² (no factors of width or depth)", fontsize=8)
    panels[0].legend(fontsize=8)


def _draw_pair(axes: Any, points: pd.DataFrame, column: str) -> None:
    for labels, (colour, marker) in LINES.items():
        drawn = lines(points[points["labels"] == labels], "size", column)
        bars(axes, drawn, colour, marker=marker, ms=4, label=f"{labels} labels")
    axes.set_yscale("log")
    axes.set_xlabel("size of the training set")


@study("neyshabur2017-fig2", stages=perturbation_stages)
def figure_2(runs: Runs) -> Analysis:
    """Sharpness against the number of samples, and divergence against expected sharpness, for both kinds of labels."""
    points = networks(runs)
    smallest, largest = points["size"].min(), points["size"].max()
    found = {
        "large": over_seeds(points, lambda rows: float(log_gap(rows, SHARPNESS)[largest])),
        "small": over_seeds(points, lambda rows: float(log_gap(rows, SHARPNESS)[smallest]), _ratios(points)),
        "curves": over_seeds(
            points, lambda rows: float(np.nanmean([log_gap(rows, name).mean() for name in ON_GRID.values()]))
        ),
        "fixed": over_seeds(points, lambda rows: float(log_gap(rows, KL).min(skipna=False))),
        "moves": over_seeds(points, lambda rows: growth(rows, KL, "random") - growth(rows, KL, "true")),
    }
    levels = curves(runs, points[["size", "labels", "seed"]])
    notes = (
        CONVENTIONS,
        fit_note(points),
        label_verdicts(points, {SHARPNESS: "sharpness", KL: f"KL at expected sharpness {LEVEL:g}"}),
    )
    return Analysis(table_of(points, levels), found, lambda figure: _draw_perturbations(figure, points, levels), notes)


def _ratios(points: pd.DataFrame) -> str:
    gaps = pd.concat([log_gap(rows, SHARPNESS) for _, rows in points.groupby("seed")], axis=1).mean(axis=1)
    found = ", ".join(f"{10**gap:.2g} at {size}" for size, gap in gaps.items())
    return f"random / true by size: {found}"


def _draw_perturbations(figure: Figure, points: pd.DataFrame, levels: pd.DataFrame) -> None:
    left, middle, right = three_panels(figure)
    _draw_pair(left, points, SHARPNESS)
    left.set_ylabel("sharpness ζ, α = 5·10⁻⁴ (nats)")
    left.legend(fontsize=8)
    for axes, labels in ((middle, "true"), (right, "random")):
        draw_curves(axes, levels[levels["labels"] == labels], "size")
        axes.set_title(f"{labels} labels", fontsize=9)
    right.legend(title="samples", fontsize=7, title_fontsize=7)
    right.sharex(middle)
    right.sharey(middle)
    right.autoscale()
