"""Figures 1, 2, 13 and 14 of Zhang et al. (2017): errors against the number of training samples, and along training.

The claims of Figures 1 and 2 are also those of their polynomial versions, Figures 22 and 23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import curves, intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.fitting import gaps_by_size, largest_training_error
from flatscope_papers.zhang2017.all_conv_networks import (
    SIZES,
    all_conv_stage,
    mean_per_seed,
    networks_at_end,
    networks_by_epoch,
    parameter_count_of_all_conv,
)

CHANCE = 0.9
SHARE = (0.0, 1.0)


def errors_by_size_analysis(runs: Runs, *, random: bool) -> Analysis:
    """Errors against N for a network of fixed W; claims of natural or of random labels."""
    return (random_labels_of_table if random else natural_labels_of_table)(networks_at_end(runs), runs.scale)


def natural_labels_of_table(points: pd.DataFrame, scale: str) -> Analysis:
    """Claims and figure of natural labels, one row per network in `points`; the same at any scale."""
    del scale
    return _errors_by_size_of_table(points, natural_label_answers(points))


def random_labels_of_table(points: pd.DataFrame, scale: str) -> Analysis:
    """The same of random labels."""
    del scale
    return _errors_by_size_of_table(points, random_label_answers(points))


def _errors_by_size_of_table(points: pd.DataFrame, answers: dict[str, Answer]) -> Analysis:
    width = int(points["W"].iloc[0])
    return Analysis(
        points, answers, lambda figure: draw_errors(figure, points, "n", "number of training samples N", width)
    )


def natural_label_answers(points: pd.DataFrame) -> dict[str, Answer]:
    """Estimates of `natural_claims`; one row per network in `points`, a pair of errors in each."""
    few, most = fewest_and_most_samples(points)
    return {
        "fitted": largest_training_error(few, worst_training_size_in_words(few)),
        "good_test_error": intervals.mean_over_runs(
            mean_per_seed(few, "test_error") - CHANCE,
            (f"a test error of {mean_per_seed(few, 'test_error').mean():.3f}, chance is {CHANCE}"),
        ),
        "no_generalization": intervals.mean_over_runs(mean_per_seed(few, "gap")),
        "gap_closes": intervals.paired_difference(mean_per_seed(most, "gap"), mean_per_seed(few, "gap")),
        "generalizes": intervals.mean_over_runs(mean_per_seed(most, "gap"), gaps_by_size(points)),
    }


def random_label_answers(points: pd.DataFrame) -> dict[str, Answer]:
    """Estimates of `random_claims`."""
    few, most = fewest_and_most_samples(points)
    return {
        "chance": intervals.mean_over_runs(mean_per_seed(points, "test_error"), bounds=SHARE),
        "fitted": largest_training_error(few, worst_training_size_in_words(few)),
        "rises": intervals.paired_difference(mean_per_seed(most, "train_error"), mean_per_seed(few, "train_error")),
        "reaches_chance": intervals.mean_over_runs(mean_per_seed(most, "gap")),
    }


def fewest_and_most_samples(points: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Networks with fewer samples than parameters, and those with the most samples."""
    return points[points["n"] < points["W"]], points[points["n"] == points["n"].max()]


def worst_training_size_in_words(few: pd.DataFrame) -> str:
    """Which training size leaves the largest training error."""
    errors = few.groupby("n")["train_error"].mean()
    return f"largest at N = {errors.idxmax()}: {errors.max():.3f}" if len(errors) else ""


def draw_errors(figure: Figure, points: pd.DataFrame, by: str, label: str, line: float, scale: str = "log") -> None:
    """Training and test error against N or W: means, seeds as dots, and a line where both are equal."""
    axes = figure.subplots()
    for name, (words, colour, marker) in curves.ERRORS.items():
        curves.draw_runs_as_dots(axes, curves.runs_as_columns(points, by, name), colour, marker=marker, label=words)
    axes.axvline(line, color="grey", linestyle="--", linewidth=1, label=f"N = W = {line:,.0f}")
    axes.set(xscale=scale, ylim=(-0.03, 1.0), xlabel=label, ylabel="error (share of samples)")
    axes.legend()


def draw_error_curves(figure: Figure, along: pd.DataFrame) -> None:
    """Training and test error along training, one curve per training size, mean and range over seeds."""
    panels = train_and_test_panels(figure)
    for axes, name in zip(panels, curves.ERRORS, strict=True):
        for n, shade in curves.colours_from_dark_to_light(along["n"]).items():
            drawn = curves.runs_as_columns(along[along["n"] == n], "epoch", name, carry=True)
            # Its end as a dot: a network may be done when first looked at.
            curves.draw_band(axes, drawn, shade, label=f"{n:,}", marker="o", markersize=4, markevery=[-1])
        axes.set(xscale="log", ylim=(-0.03, 1.0))
    panels[1].legend(title="training samples", fontsize=8)


def train_and_test_panels(figure: Figure, titles: tuple[str, str] = ("training error", "test error")) -> Any:
    """Training error on the left, test error on the right, against epochs."""
    figure.set_size_inches(8.4, 3.6)
    panels: Any = figure.subplots(1, 2, sharey=True)
    for axes, title in zip(panels, titles, strict=True):
        axes.set(xlabel="epoch", title=title)
    panels[0].set_ylabel("error (share of samples)")
    return panels


def _stages_by_size(channels: str, *, random: bool = False, train: str = "train") -> Callable[[str], list[Stage]]:
    def stages(scale: str) -> list[Stage]:
        size = SIZES[scale]
        return [all_conv_stage(scale, [(size[channels], n) for n in size["train_sizes"]], random=random, train=train)]

    return stages


@study("zhang2017-fig1", stages=_stages_by_size("base"), from_table=natural_labels_of_table)
def figure_1(runs: Runs) -> Analysis:
    """One all-convolutional network of W parameters, trained on subsets of CIFAR-10 below and above W samples."""
    return errors_by_size_analysis(runs, random=False)


@study("zhang2017-fig2", stages=_stages_by_size("base", random=True), from_table=random_labels_of_table)
def figure_2(runs: Runs) -> Analysis:
    """The network of Figure 1 on subsets whose labels are all drawn at random."""
    return errors_by_size_analysis(runs, random=True)


def error_curve_answers(points: pd.DataFrame) -> dict[str, Answer]:
    """Estimates of `curve_claims` from the last epoch of each network."""
    least, most = (points[points["n"] == n] for n in (points["n"].min(), points["n"].max()))
    return {
        "overfits": intervals.paired_difference(mean_per_seed(least, "gap"), mean_per_seed(most, "gap")),
        "little_generalization": intervals.mean_over_runs(mean_per_seed(least, "gap")),
        "more_data": intervals.paired_difference(mean_per_seed(most, "test_error"), mean_per_seed(least, "test_error")),
    }


def errors_along_training(runs: Runs) -> Analysis:
    """Errors along training, one curve per training size."""
    along = networks_by_epoch(runs)
    return Analysis(along, error_curve_answers(networks_at_end(runs)), lambda figure: draw_error_curves(figure, along))


@study("zhang2017-fig13", stages=_stages_by_size("base"))
def figure_13(runs: Runs) -> Analysis:
    """The networks of Figure 1 along training; the paper does not state the network of this figure."""
    return errors_along_training(runs)


@study("zhang2017-fig14", stages=_stages_by_size("large", train="wide_train"))
def figure_14(runs: Runs) -> Analysis:
    """As Figure 13 with more channels; the paper does not state how many."""
    analysis = errors_along_training(runs)
    count = parameter_count_of_all_conv(runs.scale, SIZES[runs.scale]["large"])
    return Analysis(analysis.table, analysis.answers, analysis.draw, (f"{count:,} parameters",))
