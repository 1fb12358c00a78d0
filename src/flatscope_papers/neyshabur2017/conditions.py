"""Figures 5 to 8 of Neyshabur et al. (2017): the conditions of Theorem 1 on a deep network, learned and at random."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, study
from flatscope_papers.neyshabur2017.complexity import COLOURS
from flatscope_papers.neyshabur2017.deep_networks import (
    CONVENTIONS,
    FLOOR,
    PANELS,
    SHARES,
    WEIGHTS,
    deep_network_stages,
    deep_networks_table,
    frames_by_kind_of_weights,
    histogram_table,
    training_note,
    triples_of_panel,
)
from flatscope_papers.neyshabur2017.overlap import (
    histograms_by_weights_and_seed,
    learned_initial_overlap,
    middle_nine_tenths_in_words,
)

PARAMETERS = sum((a + 1) * b for a, b in pairwise([784, *[1_000] * 10, 10]))


@study("neyshabur2017-fig5", stages=deep_network_stages)
def figure_5(runs: Runs) -> Analysis:
    """1/μ of all triples of layers, flips against the size of a perturbation, and row norms, at learned weights."""
    points = deep_networks_table(runs)
    learned = points[points["weights"] == "learned"]
    shares = learned["c2_floor_pixels/share_up_to_5"].mean(), learned["c2_any_unit/share_up_to_5"].mean()
    medians = learned["c2_floor_pixels/median"].mean(), learned["c2_any_unit/median"].mean()
    answers = {
        "mu": intervals.geometric_mean_over_runs(learned["mu"]),
        "c2": intervals.geometric_mean_over_runs(
            learned["c2_floor_pixels/max"], f"median over images {medians[0]:.3g}; up to 5 on {shares[0]:.0%} of images"
        ),
        "c2_as_stated": intervals.geometric_mean_over_runs(
            learned["c2_any_unit/max"],
            f"median over images {medians[1]:.3g}; up to 5 on {shares[1]:.0%} of images; without a smallest δ the one "
            "pre-activation nearest to zero decides, and ‖x‖ = 1 shrinks them all: the figure cannot have used either",
        ),
        "c3": intervals.geometric_mean_over_runs(learned["c3_figure"]),
        "c3_as_stated": intervals.geometric_mean_over_runs(learned["c3_condition"]),
        "parameters": Answer.exact(float(PARAMETERS), "ten hidden layers; an eleventh would be needed"),
    }
    products, curves, rows = (
        frames_by_kind_of_weights(runs, name)["learned"] for name in ("products", "switching", "rows")
    )
    parts = [
        histogram_table(products["inverse_mu"], quantity="1/μ"),
        _mean_flip_curve(curves).assign(quantity="share of activations that flip"),
        histogram_table(rows["ratio"], quantity="row norm / mean"),
        learned.assign(quantity="network"),
    ]

    def draw(figure: Figure) -> None:
        left, middle, right = _row_of_panels(figure, 3)
        _draw_histogram(left, parts[0], "condition number 1/μ", COLOURS[0])
        _draw_flip_curves(middle, curves, COLOURS[0])
        _draw_histogram(right, parts[2], "row norm / mean of its layer", COLOURS[0])

    return _conditions_analysis(points, answers, draw, parts)


@study("neyshabur2017-fig6", stages=deep_network_stages)
def figure_6(runs: Runs) -> Analysis:
    """Distribution of 1/μ over all, inner and outer triples of layers, before and after training."""
    points, products = deep_networks_table(runs), frames_by_kind_of_weights(runs, "products")
    answers = {panel: _ratio_of_learned_to_initial(points, f"inverse_mu_median/{panel}") for panel in PANELS}
    both = pd.concat(products)["inverse_mu"]
    shares, by_seed = {}, []
    for panel in PANELS:
        values = {which: triples_of_panel(frame, panel) for which, frame in products.items()}
        for which in WEIGHTS:
            shares[which, panel] = histogram_table(values[which]["inverse_mu"], both, weights=which, panel=panel)
        each = histograms_by_weights_and_seed(values, "inverse_mu", both)
        by_seed += [part.assign(panel=panel) for part in each.values()]
        answers[f"distribution_{panel}"] = learned_initial_overlap(
            each, middle_nine_tenths_in_words(values, "inverse_mu")
        )

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9.5, 5.0)
        grid: Any = figure.subplots(2, 3, sharex=True, sharey="col")
        for row, (which, words) in enumerate(WEIGHTS.items()):
            for axes, (panel, title) in zip(grid[row], PANELS.items(), strict=True):
                _draw_histogram(axes, shares[which, panel], "condition number 1/μ" if row else "", COLOURS[row])
                axes.set_title(f"{words}: {title}", fontsize=8)
        for axes, panel in zip(grid[1], PANELS, strict=True):
            overlap_in_words = f"overlap with\nthe above {answers[f'distribution_{panel}'].value:.2f}"
            axes.text(0.97, 0.95, overlap_in_words, transform=axes.transAxes, ha="right", va="top", fontsize=8)

    parts = [*shares.values(), *by_seed, points.assign(panel="network")]
    shown = (
        f"The figure shows (all triples): the learned median is {answers['all'].value:.2f} of the initial one, while "
        f"the histograms have {answers['distribution_all'].value:.0%} of their area in common; "
        f"{middle_nine_tenths_in_words(products, 'inverse_mu')}"
    )
    return _conditions_analysis(
        points, answers, draw, parts, shown, _range_in_words(points, "inverse_mu_max/all", "largest 1/μ")
    )


@study("neyshabur2017-fig7", stages=deep_network_stages)
def figure_7(runs: Runs) -> Analysis:
    """Share of activations within δ of switching against δ, before and after training."""
    points, curves = deep_networks_table(runs), frames_by_kind_of_weights(runs, "switching")
    gaps, notes = (
        largest_distance_of_curves(curves),
        {key: layer_with_largest_distance(curves, name) for key, name in CURVES.items()},
    )
    notes["curve"] += f"; {_noise_at_half_flips_in_words(curves)}"
    answers = {
        **{key: intervals.mean_over_runs(gaps[name], notes[key], bounds=(0, 1)) for key, name in CURVES.items()},
        "constant": _ratio_of_learned_to_initial(points, "c2_floor_pixels/max"),
    }

    def draw(figure: Figure) -> None:
        panels = _row_of_panels(figure, 3)
        for axes, which in zip(panels, ("initial", "learned", "learned"), strict=True):
            _draw_flip_curves(axes, curves[which], COLOURS[list(WEIGHTS).index(which)])
            axes.set_title(WEIGHTS[which], fontsize=9)
        panels[2].set_title("learned weights (zoomed in)", fontsize=9)
        panels[2].set_xlim(0, 0.1)
        panels[2].set_ylim(0, 0.3)

    parts = [_mean_flip_curve(curves[which]).assign(weights=which) for which in WEIGHTS]
    for which in WEIGHTS:  # what the claims compare
        means = curves[which].groupby(["seed", "delta"])[list(SHARES)].mean().reset_index()
        parts.append(means.assign(layer="mean of hidden layers", weights=which))
    constants = _range_in_words(points, "c2_floor_pixels/max", f"largest C₂ (δ of at least {FLOOR:g} rms)")
    return _conditions_analysis(points, answers, draw, [*parts, points.assign(layer="network")], constants)


CURVES = dict(zip(("curve", "curve_relative"), SHARES, strict=True))


def largest_distance_of_curves(curves: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Largest difference over δ of the learned and the initial curve, each the mean over layers: a row per seed."""
    means = {which: frame.groupby(["seed", "delta"])[list(SHARES)].mean() for which, frame in curves.items()}
    return (means["learned"] - means["initial"]).abs().groupby("seed").max()


def layer_with_largest_distance(curves: dict[str, pd.DataFrame], name: str) -> str:
    """The largest difference of each hidden layer's own two curves, before any averaging over layers."""
    values = {which: frame.set_index(["seed", "layer", "delta"])[name] for which, frame in curves.items()}
    largest = (values["learned"] - values["initial"]).abs().groupby(["layer", "seed"]).max()
    means = largest.groupby("layer").mean()
    return (
        f"layer by layer the largest difference is {means.mean():.2g} on average over layers and {means.max():.2g} in "
        f"the worst, {means.idxmax()} (means over seeds; largest of all {largest.max():.2g})"
    )


@study("neyshabur2017-fig8", stages=deep_network_stages)
def figure_8(runs: Runs) -> Analysis:
    """Row norms over the mean of their layer, and output values, before and after training."""
    points = deep_networks_table(runs)
    answers = {reading: _ratio_of_learned_to_initial(points, f"c3_{reading}") for reading in ("figure", "condition")}
    rows, outputs = frames_by_kind_of_weights(runs, "rows"), frames_by_kind_of_weights(runs, "outputs")
    both = pd.concat(rows)["ratio"]
    parts = [
        histogram_table(rows[w]["ratio"], both, weights=w, quantity="row norm / mean of its layer") for w in WEIGHTS
    ]
    parts += [histogram_table(outputs[w]["output"], weights=w, quantity="output") for w in WEIGHTS]
    each = histograms_by_weights_and_seed(rows, "ratio", both)
    answers["distribution"] = learned_initial_overlap(each, middle_nine_tenths_in_words(rows, "ratio"))
    by_seed = [part.assign(quantity=parts[0]["quantity"].iloc[0]) for part in each.values()]

    def draw(figure: Figure) -> None:
        for number, (axes, part) in enumerate(zip(_row_of_panels(figure, 4), parts, strict=True)):
            which = part["weights"].iloc[0]
            _draw_histogram(axes, part, part["quantity"].iloc[0], COLOURS[number % 2])
            axes.set_title(WEIGHTS[which], fontsize=9)

    spread = _range_in_words(points, "output_rms", "root mean square of the outputs")
    return _conditions_analysis(points, answers, draw, [*parts, *by_seed, points.assign(quantity="network")], spread)


def _conditions_analysis(
    points: pd.DataFrame, answers: dict[str, Answer], draw: Any, parts: list[pd.DataFrame], *notes: str
) -> Analysis:
    table = pd.concat(parts, ignore_index=True)
    return Analysis(table, answers, draw, (CONVENTIONS, training_note(points), *notes))


def _ratio_of_learned_to_initial(points: pd.DataFrame, column: str) -> Answer:
    wide = points.pivot_table(index="seed", columns="weights", values=column)
    return intervals.geometric_mean_over_runs(wide["learned"] / wide["initial"])


def _range_in_words(points: pd.DataFrame, column: str, name: str) -> str:
    means = points.groupby("weights")[column].mean()
    return f"{name}: {means['initial']:.3g} at random initialization, {means['learned']:.3g} learned (means over seeds)"


def _mean_flip_curve(curves: pd.DataFrame) -> pd.DataFrame:
    return curves.groupby(["layer", "delta"], sort=False)[list(SHARES)].mean().reset_index()


def _noise_at_half_flips_in_words(curves: dict[str, pd.DataFrame]) -> str:
    """Sentence on the noise at which half of all activations flip, before and after training."""
    means = {which: frame.groupby("delta")["share"].mean() for which, frame in curves.items()}
    reached = {which: float(np.interp(0.5, curve.to_numpy(), curve.index.to_numpy())) for which, curve in means.items()}
    return (
        f"half of all activations flip at δ = {reached['initial']:.2g} at random initialization and at "
        f"{reached['learned']:.2g} learned: pre-activations grow in training"
    )


def _row_of_panels(figure: Figure, count: int) -> Any:
    figure.set_size_inches(3.1 * count, 3.0)
    return figure.subplots(1, count)


def _draw_histogram(axes: Any, shares: pd.DataFrame, label: str, colour: str) -> None:
    low, high, share = (np.asarray(shares[name], float) for name in ("low", "high", "share"))
    axes.bar(low, share, width=high - low, align="edge", color=colour)
    axes.set_xlabel(label)
    axes.set_ylabel("share")


def _draw_flip_curves(axes: Any, curves: pd.DataFrame, colour: str) -> None:
    for number, (_, line) in enumerate(_mean_flip_curve(curves).groupby("layer", sort=False)):
        label = "hidden layers" if number == 0 else None
        axes.plot(line["delta"], line["share"], color=colour, lw=0.8, alpha=0.7, label=label)
    ends = np.array([0.0, 0.2])
    axes.plot(ends, 5 * ends, color="0.3", ls="--", lw=1, label="5 δ")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("δ (size of the perturbation)")
    axes.set_ylabel("share of activations that flip")
    axes.legend(fontsize=7)
