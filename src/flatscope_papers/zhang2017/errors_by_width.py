"""Figures 3, 4 and 15 of Zhang et al. (2017): errors and their gap against the number of parameters.

The claims of Figure 3 are also those of its polynomial version, Figure 24.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import curves, intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.fitting import largest_training_error
from flatscope_papers.zhang2017.all_conv_networks import (
    SIZES,
    all_conv_stage,
    mean_per_seed,
    networks_at_end,
    networks_by_epoch,
)
from flatscope_papers.zhang2017.errors_by_size import SHARE, draw_errors

EPOCHS_15 = 30


def errors_by_width_answers(points: pd.DataFrame) -> dict[str, Answer]:
    """Estimates of `width_claims`; one row per network in `points`, all of one N."""
    over, under = points[points["W"] >= points["n"]], points[points["W"] < points["n"]]
    best = points.loc[points.groupby("seed")["test_error"].idxmin()]
    return {
        "zero_error": largest_training_error(over, _error_at_interpolation_in_words(over)),
        "not_before": intervals.mean_over_runs(mean_per_seed(under, "train_error"), bounds=SHARE),
        "no_overfitting": _change_beyond_interpolation(over, "test_error"),
        "best_at_boundary": intervals.mean_over_runs(
            np.log10(best["W"] / best["n"]), _best_width_in_words(best), resolution=_largest_width_step(points)
        ),
    }


def _change_beyond_interpolation(over: pd.DataFrame, column: str) -> Answer:
    """The largest network minus the first with as many parameters as samples, per seed."""
    first, last = (over[over["W"] == width] for width in (over["W"].min(), over["W"].max()))
    return intervals.paired_difference(mean_per_seed(last, column), mean_per_seed(first, column))


def _largest_width_step(points: pd.DataFrame) -> float:
    """The largest step of log10 W between neighbouring networks: no place can be told more finely."""
    widths = np.log10(sorted(points["W"].unique()))
    return float(np.diff(widths).max()) if len(widths) > 1 else 0.0


def _best_width_in_words(best: pd.DataFrame) -> str:
    widths = ", ".join(f"{width:,}" for width in best["W"])
    return f"lowest at W = {widths} (one per seed)"


def _error_at_interpolation_in_words(over: pd.DataFrame) -> str:
    first = over[over["W"] == over["W"].min()]
    return f"{first['train_error'].mean():.3f} at W = {first['W'].iloc[0]:,}" if len(first) else ""


def _width_stages(scale: str) -> list[Stage]:
    size = SIZES[scale]
    return [all_conv_stage(scale, [(c, size["fixed_size"]) for c in size["channels"]], train="wide_train")]


def errors_by_width_of_table(points: pd.DataFrame, scale: str) -> Analysis:
    """Claims and figure, one row per network in `points`; the same at any scale."""
    del scale
    n = float(points["n"].iloc[0])
    return Analysis(
        points,
        errors_by_width_answers(points),
        lambda figure: draw_errors(figure, points, "W", "number of parameters W", n),
    )


@study("zhang2017-fig3", stages=_width_stages, from_table=errors_by_width_of_table)
def figure_3(runs: Runs) -> Analysis:
    """All-convolutional networks with more and more channels on one training set of N samples."""
    return errors_against_parameters(runs)


def errors_against_parameters(runs: Runs) -> Analysis:
    """Errors against W for a training set of fixed N."""
    return errors_by_width_of_table(networks_at_end(runs), runs.scale)


@study("zhang2017-fig4", stages=_width_stages)
def figure_4(runs: Runs) -> Analysis:
    """The networks of Figure 3 with W on a linear axis, where those with W > N take most of the room."""
    points = networks_at_end(runs)
    n = float(points["n"].iloc[0])
    answers = {"unaffected": _change_beyond_interpolation(points[points["W"] >= n], "test_error")}

    def draw(figure: Figure) -> None:
        draw_errors(figure, points, "W", "number of parameters W", n, scale="linear")

    return Analysis(points, answers, draw)


def _width_and_size_stages(scale: str) -> list[Stage]:
    size = SIZES[scale]
    return [all_conv_stage(scale, [(c, n) for n in size["gap_sizes"] for c in size["gap_channels"]], train="gap_train")]


def generalization_gap_answers(points: pd.DataFrame) -> dict[str, Answer]:
    """Estimates of the claims of Figure 15; a difference is taken for each N and seed, then averaged over N."""
    largest = points[points["W"] == points["W"].max()]
    n_least, n_most = points["n"].min(), points["n"].max()
    over = points[points["W"] >= points["n"]]
    return {
        "anywhere": _widest_minus_narrowest(points, "gap"),
        "beyond_samples": _widest_minus_narrowest(over, "gap"),
        "expected_error": _widest_minus_narrowest(over, "test_error"),
        "more_data": intervals.paired_difference(
            mean_per_seed(largest[largest["n"] == n_most], "test_error"),
            mean_per_seed(largest[largest["n"] == n_least], "test_error"),
        ),
    }


def _widest_minus_narrowest(points: pd.DataFrame, column: str) -> Answer:
    """Largest minus smallest network for each N; only sizes that have both are counted."""
    rows, used = [], []
    for n, group in points.groupby("n"):
        if group["W"].nunique() > 1:
            ends_of = [group[group["W"] == width] for width in (group["W"].max(), group["W"].min())]
            rows.append(mean_per_seed(ends_of[0], column) - mean_per_seed(ends_of[1], column))
            used.append(f"{n:,}")
    if not rows:
        return Answer(float("nan"), runs=0, note="no training size with two such networks")
    return intervals.mean_over_runs(np.mean(rows, axis=0), f"N = {', '.join(used)}")


@study("zhang2017-fig15", stages=_width_and_size_stages)
def figure_15(runs: Runs) -> Analysis:
    """Test minus training error of networks of different widths on training sets of different sizes.

    The caption has training minus validation error; the gap is drawn with the other sign, so that it is positive.
    """
    last = EPOCHS_15 if runs.scale == "paper" else None
    points = networks_at_epoch(networks_by_epoch(runs), last)
    parts = [
        f"{words} {_widest_minus_narrowest(points, name).value:+.3f}" for name, (words, _, _) in curves.ERRORS.items()
    ]
    note = f"from the smallest to the largest network, mean over N: {', '.join(parts)}; their difference is the gap's"
    return Analysis(
        points, generalization_gap_answers(points), lambda figure: _draw_generalization_gap(figure, points), (note,)
    )


def networks_at_epoch(along: pd.DataFrame, epoch: int | None) -> pd.DataFrame:
    """Each network as it was after that epoch, or at its end if that came before (or if no epoch is given)."""
    seen = along if epoch is None else along[along["epoch"] <= epoch]
    ordered = seen.sort_values("epoch").groupby(["channels", "n", "seed"], as_index=False).last()
    return ordered.drop(columns="polynomial")


def _draw_generalization_gap(figure: Figure, points: pd.DataFrame) -> None:
    axes: Any = figure.subplots()
    for n, shade in curves.colours_from_dark_to_light(points["n"]).items():
        curves.draw_error_bars(
            axes, curves.runs_as_columns(points[points["n"] == n], "W", "gap"), shade, marker="o", label=f"{n:,}"
        )
        axes.axvline(n, color=shade, linestyle=":", linewidth=1)
    axes.set(xscale="log", xlabel="number of parameters W", ylabel="test − training error")
    axes.legend(title="training samples N (dotted: W = N)")
