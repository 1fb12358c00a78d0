"""Figures 1 and 2 of Neyshabur et al. (2017): complexity of networks trained on true and on random labels.

Both figures look at the same networks.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope.stats.estimate import wilson
from flatscope_papers import intervals
from flatscope_papers.claims import NEGATIVE, POSITIVE, Claim, Estimate
from flatscope_papers.curves import bars, lines
from flatscope_papers.declaration import Analysis, Runs, study
from flatscope_papers.neyshabur2017.complexity import (
    COLOURS,
    CONVENTIONS,
    EPSILON,
    EPSILONS,
    KL,
    LEVEL,
    LEVELS,
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
    DEVIATIONS,
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
from flatscope_papers.reasons import with_reasons

AGREE = 0.95  # share of comparisons
SMALL = 0.3  # exponent of growth: ten times the samples, twice the capacity
LINES = {"true": (COLOURS[0], "o"), "random": (COLOURS[1], "s")}
FEWER = "200 steps of gradient ascent in place of 2,000 and 60 perturbed networks per noise level in place of 1,000"
RATE = (
    "the learning rate decides about sharpness, since larger steps end in flatter minima: in the first run, with 0.1, "
    "networks with random labels were 2.3 times as sharp as those with true labels on 500 images and 0.26 times on "
    "2,000; 2,000 steps of ascent gave the same order"
)
REASONS = {
    "small": {
        "most_pronounced": "few images and a narrow network of two layers; with 512 units, 500 to 2,000 images and a "
        "learning rate of 0.1 it held, by 0.20",
        "small": "sharpness goes with the learning rate and the scale of the weights, and those of VGG with folded "
        "BatchNorm are not those of a perceptron",
    }
}

LATER_1 = (
    "restated after the results were known: `higher_*` take each seed's own smallest value over sizes; numbers and "
    "limits are as before",
    "added after the results were known: `small_increase`, the paper's expectation for true labels beside `linear`; "
    "small is read as capacity at most doubling with ten times the samples (exponent 0.3), partly as at most growing "
    "with their root",
)
LATER_2 = (
    "section 2.4 speaks of bigger networks and of networks of smaller size; Figure 2 has one network and training sets "
    "of several sizes, so `large` and `small` take the size to be that of the training set",
    "restated after the results were known: `fixed` takes each seed's own smallest value over sizes; number and limits "
    "are as before",
)

CLAIMS_1 = (
    Claim(
        "zero_error",
        "Figure 1, caption",
        "the training error of every network is zero",
        "largest training error of all networks",
        "0",
        holds=(0.0, 0.0),
    ),
    *(
        Claim(
            f"higher_{name}",
            "section 2.2, Figure 1",
            f"{label} over margin is always higher with random than with true labels",
            "smallest log10(random / true) over sizes of the training set in each seed, mean over seeds",
            "higher",
            holds=POSITIVE,
        )
        for name, label in NORMS.items()
    ),
    *(
        Claim(
            f"grows_{name}",
            "Figure 1, caption",
            f"the gap between random and true labels grows with the training set: {label} over margin",
            "slope of log10(random / true) against log10(samples), mean over seeds",
            "grows",
            holds=POSITIVE,
        )
        for name, label in NORMS.items()
    ),
    Claim(
        "most_pronounced",
        "section 2.2",
        "the gap between random and true labels grows most with the training set for the ℓ2 norm and the ℓ2-path norm",
        "smaller of their two slopes minus the larger of the other two, mean over seeds",
        "most pronounced",
        holds=POSITIVE,
    ),
    Claim(
        "linear",
        "section 2.2",
        "with random labels capacity is expected to grow almost linearly with the number of samples",
        "exponent of growth with random labels, mean of the four norms, mean over seeds",
        "almost 1",
        holds=(0.8, 1.2),
        partly=POSITIVE,
    ),
    Claim(
        "small_increase",
        "section 2.2",
        "with true labels more samples are expected to need only small increases of capacity",
        "exponent of growth with true labels, mean of the four norms, mean over seeds",
        "small increases, against almost linear ones with random labels",
        holds=(-math.inf, SMALL),
        partly=(-math.inf, 0.5),
    ),
    Claim(
        "epsilon",
        "section 2.2",
        "how norms over margin compare between true and random labels hardly depends on the ε of the margin, from "
        "0.001 to 0.1",
        "share of comparisons of true with random labels that come out as with ε = 0.05",
        "almost unaffected",
        holds=(AGREE, 1.0),
        partly=(0.8, 1.0),
    ),
)


@study(
    "neyshabur2017-fig1",
    figure="Figure 1",
    title="Norms over margin with true and with random labels",
    claims=CLAIMS_1,
    stages=norm_stages,
    deviations={scale: (*words, *LATER_1) for scale, words in DEVIATIONS.items()},
    paper_cost="50 VGG networks on 10,000 to 50,000 images, of the order of 100 epochs each.",
)
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
    told = with_reasons(found, CLAIMS_1, runs.scale, REASONS.get(runs.scale, {}))
    return Analysis(points, told, lambda figure: _draw_norms(figure, points), notes)


def mean_growth(rows: pd.DataFrame, labels: str) -> float:
    """Exponent with which the four norms grow with the number of samples, their mean."""
    return float(np.mean([growth(rows, name, labels) for name in NORMS]))


def most_pronounced(rows: pd.DataFrame) -> float:
    """How far the slopes of the two ℓ2 measures lie above those of the other two."""
    slopes = {name: gap_slope(rows, name) for name in NORMS}
    return min(slopes["l2_norm"], slopes["l2_path_norm"]) - max(slopes["l1_path_norm"], slopes["spectral_norm"])


def same_order(points: pd.DataFrame, by_epsilon: list[pd.DataFrame]) -> Estimate:
    """How often true and random labels compare as at ε = 0.05, over norms, sizes, seeds and the other ε."""
    settings = points[["seed", "size", "labels"]].to_dict("records")
    parts = [frame.assign(**row) for frame, row in zip(by_epsilon, settings, strict=True)]  # type: ignore[arg-type]
    long = pd.concat(parts).melt(["seed", "size", "labels", "epsilon"], list(NORMS), "norm")
    pairs = long.pivot_table(index=["norm", "seed", "size", "epsilon"], columns="labels", values="value")
    if not set(LABELS) <= set(pairs):  # one kind of label was fitted by no network
        return intervals.share([])
    pairs = pairs.dropna()
    higher = (pairs["random"] > pairs["true"]).unstack("epsilon").reindex(columns=list(EPSILONS)).dropna()
    agree = pd.concat([higher[epsilon] == higher[EPSILON] for epsilon in EPSILONS if epsilon != EPSILON])
    found = intervals.share(agree, groups=[f"{seed}/{size}" for _, seed, size in agree.index])
    return replace(found, note="; ".join(part for part in (found.note, _within_reach(found.runs)) if part))


def _within_reach(groups: int) -> str:
    """Whether Wilson's interval of so many groups can lie where the claim holds, if all of them agree."""
    low, _ = wilson(groups, groups)
    if low >= AGREE:
        return ""
    needed = next(n for n in itertools.count(groups) if wilson(n, n)[0] >= AGREE)
    return (
        f"all of {groups} groups agreeing gives an interval from {low:.2f}, so that “reproduced” is out of reach: "
        f"{needed} groups would be needed"
    )


def _test_errors(points: pd.DataFrame) -> str:
    """How far the dependence of labels on images has been learned."""
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


CLAIMS_2 = (
    Claim(
        "large",
        "section 2.4, Figure 2 left",
        "on the larger training sets sharpness is higher with random than with true labels",
        "log10(random / true) of the sharpness on the largest training set, mean over seeds",
        "higher",
        holds=POSITIVE,
    ),
    Claim(
        "small",
        "section 2.4, Figure 2 left",
        "on the smaller training sets sharpness is lower with random than with true labels: it misorders the networks",
        "log10(random / true) of the sharpness on the smallest training set, mean over seeds",
        "lower",
        holds=NEGATIVE,
    ),
    Claim(
        "curves",
        "section 2.4, Figure 2 middle and right",
        "the curve of KL against expected sharpness is lower with true than with random labels",
        f"log10(random / true) of the KL at expected sharpness {', '.join(f'{level:g}' for level in LEVELS)}, "
        "mean over levels and sizes, mean over seeds (kl_at_…_on_grid)",
        "significantly lower",
        holds=POSITIVE,
    ),
    Claim(
        "fixed",
        "section 2.4",
        f"for an expected sharpness of {LEVEL:g} networks with random labels need a higher norm (KL) than those with "
        "true ones",
        f"smallest log10(random / true) of the KL at expected sharpness {LEVEL:g} ({KL}) over sizes of the training "
        "set in each seed, mean over seeds",
        "higher",
        holds=POSITIVE,
    ),
    Claim(
        "moves",
        "section 2.4",
        "the curve of KL against expected sharpness changes more with the number of samples when labels are random",
        f"exponent of growth of the KL at expected sharpness {LEVEL:g} ({KL}) with random labels minus that with true "
        "labels, mean over seeds",
        "significantly larger",
        holds=POSITIVE,
    ),
)


@study(
    "neyshabur2017-fig2",
    figure="Figure 2",
    title="Sharpness and the PAC-Bayes pair with true and with random labels",
    claims=CLAIMS_2,
    stages=perturbation_stages,
    deviations={"small": (*DEVIATIONS["small"], FEWER, RATE, *LATER_2), "paper": (*DEVIATIONS["paper"], *LATER_2)},
    paper_cost="the networks of neyshabur2017-fig1, and for each 2,000 steps and 19,000 forward passes of 64 images.",
)
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
    told = with_reasons(found, CLAIMS_2, runs.scale, REASONS.get(runs.scale, {}))
    levels = curves(runs, points[["size", "labels", "seed"]])
    notes = (
        CONVENTIONS,
        fit_note(points),
        label_verdicts(points, {SHARPNESS: "sharpness", KL: f"KL at expected sharpness {LEVEL:g}"}),
    )
    return Analysis(table_of(points, levels), told, lambda figure: _draw_perturbations(figure, points, levels), notes)


def _ratios(points: pd.DataFrame) -> str:
    gaps = pd.concat([log_gap(rows, SHARPNESS) for _, rows in points.groupby("seed")], axis=1).mean(axis=1)
    told = ", ".join(f"{10**gap:.2g} at {size}" for size, gap in gaps.items())
    return f"random / true by size: {told}"


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
