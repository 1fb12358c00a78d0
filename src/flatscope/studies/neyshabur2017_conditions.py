"""Figures 5 to 8 of Neyshabur et al. (2017): the conditions of Theorem 1 on a deep network, learned and at random."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope.studies import intervals
from flatscope.studies.claims import Claim, Estimate
from flatscope.studies.neyshabur2017_complexity import COLOURS
from flatscope.studies.neyshabur2017_interactions import (
    CONVENTIONS,
    COST,
    DEVIATIONS,
    FLOOR,
    PANELS,
    SHARES,
    WEIGHTS,
    distributions,
    fit_note,
    histogram,
    networks,
    of_panel,
    stages,
)
from flatscope.studies.study import Analysis, Runs, study

ALIKE, ROUGHLY = (0.8, 1.25), (0.5, 2.0)  # learned / random: what counts as very similar, and as of the same order
PARAMETERS = sum((a + 1) * b for a, b in pairwise([784, *[1_000] * 10, 10]))
SHARED = "the networks of neyshabur2017-fig5; nothing is trained or measured again."
_study = functools.partial(study, stages=stages, deviations=DEVIATIONS)


def _alike(key: str, figure: int, condition: str, words: str, number: str) -> Claim:
    return Claim(
        key,
        f"appendix D, Figure {figure}",
        f"{condition} of the learned network is very similar to that of its initialization{words}",
        f"{number} learned / initial, mean over seeds",
        "very similar",
        holds=ALIKE,
        partly=ROUGHLY,
    )


CLAIMS_5 = (
    Claim(
        "mu",
        "section 4, Figure 5 left",
        "C1 holds with μ ≥ 1/4",
        "smallest μ over training images and triples of layers, learned weights, mean over seeds",
        "≥ 1/4",
        holds=(0.25, math.inf),
    ),
    Claim(
        "c2",
        "section 4, Figure 5 middle",
        "C2 holds with C₂ ≤ 5",
        f"largest C₂ over images and hidden layers, pixels in [0, 1], δ of at least {FLOOR:g} rms, mean over seeds",
        "≤ 5",
        holds=(0.0, 5.0),
    ),
    Claim(
        "c2_as_stated",
        "section 4, condition C2 of Theorem 1",
        "the same as the theorem needs it: for ‖x‖ = 1 and every δ",
        "largest C₂ over images and hidden layers, ‖x‖ = 1, any δ, mean over seeds",
        "≤ 5",
        holds=(0.0, 5.0),
    ),
    Claim(
        "c3",
        "section 4, Figure 5 right",
        "row norms are at most three times the mean of their layer",
        "largest row norm / mean row norm, learned weights, mean over seeds",
        "≤ 3",
        holds=(0.0, 3.0),
    ),
    Claim(
        "c3_as_stated",
        "section 4, condition C3",
        "C3 holds with C₃ ≤ 3",
        "largest √h ‖W‖_{2,∞} / ‖DW‖_F over images and layers, learned weights, mean over seeds",
        "≤ 3",
        holds=(0.0, 3.0),
    ),
    Claim(
        "parameters",
        "Figure 5, caption",
        "ten layers of 1,000 hidden units have more than 10,000,000 parameters",
        "weights and biases of 784-1000×10-10",
        "> 10,000,000",
        holds=(10_000_001.0, math.inf),
    ),
)


@_study(
    "neyshabur2017-fig5",
    figure="Figure 5",
    title="The conditions of Theorem 1 on a learned ten-layer network",
    claims=CLAIMS_5,
    paper_cost=COST,
)
def figure_5(runs: Runs) -> Analysis:
    """1/μ of all triples of layers, flips against the size of a perturbation, and row norms, at learned weights."""
    points = networks(runs)
    learned = points[points["weights"] == "learned"]
    shares = learned["c2_floor_pixels/share_up_to_5"].mean(), learned["c2_any_unit/share_up_to_5"].mean()
    medians = learned["c2_floor_pixels/median"].mean(), learned["c2_any_unit/median"].mean()
    found = {
        "mu": intervals.mean(learned["mu"]),
        "c2": intervals.mean(
            learned["c2_floor_pixels/max"], f"median over images {medians[0]:.3g}; up to 5 on {shares[0]:.0%} of images"
        ),
        "c2_as_stated": intervals.mean(
            learned["c2_any_unit/max"],
            f"median over images {medians[1]:.3g}; up to 5 on {shares[1]:.0%} of images; without a smallest δ the one "
            "pre-activation nearest to zero decides, and ‖x‖ = 1 shrinks them all: the figure cannot have used either",
            bounds=(0, math.inf),
        ),
        "c3": intervals.mean(learned["c3_figure"]),
        "c3_as_stated": intervals.mean(learned["c3_condition"]),
        "parameters": Estimate.exact(float(PARAMETERS), "ten hidden layers; an eleventh would be needed"),
    }
    products, curves, rows = (distributions(runs, name)["learned"] for name in ("products", "switching", "rows"))
    parts = [
        histogram(products["inverse_mu"], quantity="1/μ"),
        _mean_curve(curves).assign(quantity="share of activations that flip"),
        histogram(rows["ratio"], quantity="row norm / mean"),
        learned.assign(quantity="network"),
    ]

    def draw(figure: Figure) -> None:
        left, middle, right = _panels(figure, 3)
        _draw_histogram(left, parts[0], "condition number 1/μ", COLOURS[0])
        _draw_curves(middle, curves, COLOURS[0])
        _draw_histogram(right, parts[2], "row norm / mean of its layer", COLOURS[0])

    return _analysis(points, found, draw, parts)


CLAIMS_6 = tuple(_alike(panel, 6, "C1", f": {words}", "median 1/μ") for panel, words in PANELS.items())


@_study(
    "neyshabur2017-fig6",
    figure="Figure 6",
    title="Condition C1 at random initialization and after training",
    claims=CLAIMS_6,
    paper_cost=SHARED,
)
def figure_6(runs: Runs) -> Analysis:
    """Distribution of 1/μ over all, inner and outer triples of layers, before and after training."""
    points, products = networks(runs), distributions(runs, "products")
    found = {panel: _learned_over_initial(points, f"inverse_mu_median/{panel}") for panel in PANELS}
    both = pd.concat(products)["inverse_mu"]
    shares = {
        (which, panel): histogram(of_panel(products[which], panel)["inverse_mu"], both, weights=which, panel=panel)
        for which in WEIGHTS
        for panel in PANELS
    }

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9.5, 5.0)
        grid: Any = figure.subplots(2, 3, sharex=True, sharey="col")
        for row, (which, words) in enumerate(WEIGHTS.items()):
            for axes, (panel, title) in zip(grid[row], PANELS.items(), strict=True):
                _draw_histogram(axes, shares[which, panel], "condition number 1/μ" if row else "", COLOURS[row])
                axes.set_title(f"{words}: {title}", fontsize=8)

    parts = [*shares.values(), points.assign(panel="network")]
    return _analysis(points, found, draw, parts, _range(points, "inverse_mu_max/all", "largest 1/μ"))


CLAIMS_7 = (
    Claim(
        "curve",
        "appendix D, Figure 7",
        "the share of activations that flip is very similar for learned and random weights",
        "largest difference of the two curves over δ, mean over hidden layers, mean over seeds",
        "very similar",
        holds=(0.0, 0.1),
        partly=(0.0, 0.3),
    ),
    Claim(
        "curve_relative",
        "appendix D, Figure 7",
        "the same where a perturbation is measured against the pre-activations, which the caption leaves open",
        "largest difference of the two curves over δ / root mean square of the layer, mean over hidden layers, mean "
        "over seeds",
        "very similar",
        holds=(0.0, 0.1),
        partly=(0.0, 0.3),
    ),
    _alike("constant", 7, "C₂", "", f"largest C₂ (pixels in [0, 1], δ of at least {FLOOR:g} rms)"),
)


@_study(
    "neyshabur2017-fig7",
    figure="Figure 7",
    title="Condition C2 at random initialization and after training",
    claims=CLAIMS_7,
    paper_cost=SHARED,
)
def figure_7(runs: Runs) -> Analysis:
    """Share of activations within δ of switching against δ, before and after training."""
    points, curves = networks(runs), distributions(runs, "switching")
    gaps, notes = apart(curves), {"curve": _half(curves)}
    found = {
        **{key: intervals.mean(gaps[name], notes.get(key, ""), bounds=(0, 1)) for key, name in CURVES.items()},
        "constant": _learned_over_initial(points, "c2_floor_pixels/max"),
    }

    def draw(figure: Figure) -> None:
        panels = _panels(figure, 3)
        for axes, which in zip(panels, ("initial", "learned", "learned"), strict=True):
            _draw_curves(axes, curves[which], COLOURS[list(WEIGHTS).index(which)])
            axes.set_title(WEIGHTS[which], fontsize=9)
        panels[2].set_title("learned weights (zoomed in)", fontsize=9)
        panels[2].set_xlim(0, 0.1)
        panels[2].set_ylim(0, 0.3)

    parts = [_mean_curve(curves[which]).assign(weights=which) for which in WEIGHTS]
    constants = _range(points, "c2_floor_pixels/max", f"largest C₂ (δ of at least {FLOOR:g} rms)")
    return _analysis(points, found, draw, [*parts, points.assign(layer="network")], constants)


CURVES = dict(zip(("curve", "curve_relative"), SHARES, strict=True))


def apart(curves: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Largest difference over δ of the learned and the initial curve, each the mean over layers: a row per seed."""
    means = {which: frame.groupby(["seed", "delta"])[list(SHARES)].mean() for which, frame in curves.items()}
    return (means["learned"] - means["initial"]).abs().groupby("seed").max()


CLAIMS_8 = (
    _alike("figure", 8, "C3", ": row norm / mean row norm", "its largest value"),
    _alike("condition", 8, "C3", ": as the condition states it", "its largest value"),
)


@_study(
    "neyshabur2017-fig8",
    figure="Figure 8",
    title="Condition C3 and outputs at random initialization and after training",
    claims=CLAIMS_8,
    paper_cost=SHARED,
)
def figure_8(runs: Runs) -> Analysis:
    """Row norms over the mean of their layer, and output values, before and after training."""
    points = networks(runs)
    found = {reading: _learned_over_initial(points, f"c3_{reading}") for reading in ("figure", "condition")}
    rows, outputs = distributions(runs, "rows"), distributions(runs, "outputs")
    both = pd.concat(rows)["ratio"]
    parts = [histogram(rows[w]["ratio"], both, weights=w, quantity="row norm / mean of its layer") for w in WEIGHTS]
    parts += [histogram(outputs[w]["output"], weights=w, quantity="output") for w in WEIGHTS]

    def draw(figure: Figure) -> None:
        for number, (axes, part) in enumerate(zip(_panels(figure, 4), parts, strict=True)):
            which = part["weights"].iloc[0]
            _draw_histogram(axes, part, part["quantity"].iloc[0], COLOURS[number % 2])
            axes.set_title(WEIGHTS[which], fontsize=9)

    spread = _range(points, "output_rms", "root mean square of the outputs")
    return _analysis(points, found, draw, [*parts, points.assign(quantity="network")], spread)


def _analysis(
    points: pd.DataFrame, found: dict[str, Estimate], draw: Any, parts: list[pd.DataFrame], *notes: str
) -> Analysis:
    table = pd.concat(parts, ignore_index=True)
    return Analysis(table, found, draw, (CONVENTIONS, fit_note(points), *notes))


def _learned_over_initial(points: pd.DataFrame, column: str) -> Estimate:
    wide = points.pivot_table(index="seed", columns="weights", values=column)
    return intervals.mean(wide["learned"] / wide["initial"])


def _range(points: pd.DataFrame, column: str, name: str) -> str:
    means = points.groupby("weights")[column].mean()
    return f"{name}: {means['initial']:.3g} at random initialization, {means['learned']:.3g} learned (means over seeds)"


def _mean_curve(curves: pd.DataFrame) -> pd.DataFrame:
    return curves.groupby(["layer", "delta"], sort=False)[list(SHARES)].mean().reset_index()


def _half(curves: dict[str, pd.DataFrame]) -> str:
    """Where half of the activations have flipped: how the size of pre-activations changes in training."""
    means = {which: frame.groupby("delta")["share"].mean() for which, frame in curves.items()}
    reached = {which: float(np.interp(0.5, curve.to_numpy(), curve.index.to_numpy())) for which, curve in means.items()}
    return (
        f"half of all activations flip at δ = {reached['initial']:.2g} at random initialization and at "
        f"{reached['learned']:.2g} learned: pre-activations grow in training"
    )


def _panels(figure: Figure, count: int) -> Any:
    figure.set_size_inches(3.1 * count, 3.0)
    return figure.subplots(1, count)


def _draw_histogram(axes: Any, shares: pd.DataFrame, label: str, colour: str) -> None:
    low, high, share = (np.asarray(shares[name], float) for name in ("low", "high", "share"))
    axes.bar(low, share, width=high - low, align="edge", color=colour)
    axes.set_xlabel(label)
    axes.set_ylabel("share")


def _draw_curves(axes: Any, curves: pd.DataFrame, colour: str) -> None:
    for number, (_, line) in enumerate(_mean_curve(curves).groupby("layer", sort=False)):
        label = "hidden layers" if number == 0 else None
        axes.plot(line["delta"], line["share"], color=colour, lw=0.8, alpha=0.7, label=label)
    ends = np.array([0.0, 0.2])
    axes.plot(ends, 5 * ends, color="0.3", ls="--", lw=1, label="5 δ")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("δ (size of the perturbation)")
    axes.set_ylabel("share of activations that flip")
    axes.legend(fontsize=7)
