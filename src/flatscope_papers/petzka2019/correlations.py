"""Figure 1 of Petzka et al. (2019): relative flatness of one layer of LeNet-5 against the generalization gap.

The paper calls its layer 5 "the last hidden layer"; the authors' released script measures the matrix 84→10, which is
judged. The matrix 120→84, which makes the last hidden layer, is shown beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, study
from flatscope_papers.petzka2019 import lenet, stop_rules
from flatscope_papers.petzka2019.stop_rules import (
    ENOUGH,
    Rule,
    correlation_answer_at_rule,
    networks_judged_at_rule,
    sign_change_epochs_in_words,
)
from flatscope_papers.stratified import correlation_within_strata

TRACE, TOP = "kappa_trace/fc3", "kappa/fc3"
NOW, FORMER = "accuracy of at least 15 %", "loss below chance"
KINDS = {
    "pearson": "Pearson",
    "spearman": "Spearman",
    "within_batch": "within batch sizes",
    "within_init": "within initialisations",
    "given_loss": "given the training loss",
}


def figure_1_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Claims and figure of a saved table: its correlations as they are, its looks again."""
    along, looked = (table[table["kind"] == kind].dropna(axis="columns", how="all") for kind in ("correlation", "look"))
    return _figure_1_analysis(lenet.looks_with_gaps(looked, scale), along, scale, table)


@study("petzka2019-fig1", stages=lenet.lenet_stages, from_table=figure_1_of_table)
def figure_1(runs: Runs) -> Analysis:
    """κ and κ_τ of LeNet-5's layer 5 against the generalization error, as a function of the stop rule.

    Four initialisations, four batch sizes, nine seeds; every network is looked at after a list of epochs, and when its
    mini-batch losses first fall below a list of limits.
    """
    seen = lenet.lenet_look_table(runs)
    along = correlations_of_lenet_along_training(seen)
    table = pd.concat(
        [along.assign(kind="correlation"), looks_to_five_digits(seen).assign(kind="look")], ignore_index=True
    )
    analysis = _figure_1_analysis(seen, along, runs.scale, table)
    return replace(analysis, notes=(*lenet.lenet_training_notes(seen, runs), *analysis.notes))


def _figure_1_analysis(seen: pd.DataFrame, along: pd.DataFrame, scale: str, table: pd.DataFrame) -> Analysis:
    looks, trained = lenet.looks_by_reading_of_variance(seen)["σ = 0.1"], lenet.number_of_judged_networks(scale)
    fallen = lenet.event_looks(seen)
    at_loss = fallen if len(fallen) else looks
    low, lower = (lenet.stop_rule_in_looks(at_loss, rule) for rule in lenet.RULES[:2])
    last = Rule("epoch", lenet.SIZES["paper"]["looks"][-1] if scale == "paper" else int(looks["epoch"].max()))
    judged = along[(along["reading"] == "σ = 0.1") & along["variant"].isin([lenet.JUDGED, *at_loss["variant"]])]
    judged = judged[judged["exclusion"] == NOW] if "exclusion" in judged else judged
    answers = {
        "trace": correlation_answer_at_rule(at_loss, low, trained, TRACE),
        "trace_lower_loss": correlation_answer_at_rule(at_loss, lower, trained, TRACE),
        "trace_gradient": correlation_answer_at_rule(looks, lenet.RULES[2], trained, TRACE),
        "trace_last_epoch": correlation_answer_at_rule(looks, last, trained, TRACE),
        "trace_within": correlation_within_batch_sizes(looks, last, trained, TRACE),
        "trace_common": correlation_answer_at_rule(looks, Rule("epoch", int(looks["epoch"].max())), trained, TRACE),
        **extreme_correlations_over_epochs(judged, trained),
        "eigenvalue": correlation_answer_at_rule(at_loss, low, trained, TOP),
        "stronger": excess_correlation_of_kappa_trace(at_loss, low, trained),
    }
    turns = [
        f"κ_τ of {name}: {sign_change_epochs_in_words(judged, f'kappa_trace/{layer}')}"
        for layer, name in lenet.LAYERS.items()
    ]
    return Analysis(table, answers, lambda figure: _draw_figure_1(figure, looks, judged), notes=tuple(turns))


def correlation_within_batch_sizes(seen: pd.DataFrame, rule: Rule, trained: int, column: str) -> Answer:
    """Pearson's correlation with the gap within batch sizes, pooled over them, where the rule stops the networks."""
    points, missing = networks_judged_at_rule(seen, rule, trained)
    if missing:
        return Answer(math.nan, runs=len(points), note=missing)
    pooled = f"pooled over batch sizes {points[column].corr(points['gap']):.2f}"
    return correlation_within_strata(points[column], points["gap"], points["batch"], "pearson", pooled)


def extreme_correlations_over_epochs(along: pd.DataFrame, trained: int) -> dict[str, Answer]:
    """The highest and the lowest correlation of κ_τ over the epochs at which nearly all networks are there."""
    of_trace = along[(along["measure"] == TRACE) & (along["target"] == "gap") & along["rule"].str.startswith("epoch")]
    enough = of_trace[of_trace["networks"] >= ENOUGH * trained]
    if enough.empty:
        return {name: Answer(math.nan, runs=0, note="no epoch with enough networks") for name in ("highest", "lowest")}
    ordered = enough.sort_values("pearson", kind="stable")
    return {
        "highest": _answer_of_correlation_row(ordered.iloc[-1]),
        "lowest": _answer_of_correlation_row(ordered.iloc[0]),
    }


def _answer_of_correlation_row(row: pd.Series) -> Answer:
    words = f"after {row['rule']}; by rank {row['spearman']:.2f}, within batch sizes {row['within_batch']:.2f}"
    low, high = (None if pd.isna(row[end]) else float(row[end]) for end in ("low", "high"))
    return Answer(float(row["pearson"]), low, high, int(row["networks"]), words)


def looks_to_five_digits(seen: pd.DataFrame) -> pd.DataFrame:
    """The looks to five digits, without what is the difference of two columns: a small file."""
    kept = seen.drop(columns=[*stop_rules.TARGETS, "former"])
    return frame_to_five_digits(kept)


def frame_to_five_digits(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with its numbers to five digits."""
    rounded, numbers = frame.copy(), frame.select_dtypes("float")
    rounded[numbers.columns] = numbers.map(lambda value: float(f"{value:.5g}"))
    return rounded


def correlations_of_lenet_along_training(seen: pd.DataFrame) -> pd.DataFrame:
    """The correlations of every variant, reading and exclusion at every rule."""
    parts = []
    for variant, (exclusion, there) in itertools.product(
        seen["variant"].unique(), looks_by_exclusion_rule(seen).items()
    ):
        for reading, rows in lenet.looks_by_reading_of_variance(there, variant).items():
            fallen = rows["below"].notna()
            first = () if fallen.all() else lenet.RULES  # looks at limits alone say nothing of other rules
            events = lenet.EVENTS if fallen.any() else ()
            correlations = stop_rules.correlations_by_stop_rule(
                rows, lenet.COLUMNS, stop_rules.stop_rules(rows, (*first, *events))
            )
            parts.append(correlations.assign(variant=variant, reading=reading, exclusion=exclusion))
    return frame_to_five_digits(pd.concat(parts, ignore_index=True))


def looks_by_exclusion_rule(seen: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The looks that count, and beside them those that the first rule left: without losses at or above chance."""
    return {NOW: seen, FORMER: seen[seen["former"]]} if not seen["former"].all() else {NOW: seen}


def excess_correlation_of_kappa_trace(seen: pd.DataFrame, rule: Rule, trained: int) -> Answer:
    """Correlation of κ_τ minus the absolute one of κ: positive only where κ_τ correlates in the paper's direction."""
    points, missing = networks_judged_at_rule(seen, rule, trained)
    if missing:
        return Answer(math.nan, runs=len(points), note=missing)
    # The largest of r and −r is |r|, and the interval then holds for both signs at once.
    lead = intervals.lead_of_correlations(points.assign(turned=-points[TOP]), TRACE, [TOP, "turned"], "gap")
    of_trace, of_top = (points[column].corr(points["gap"]) for column in (TRACE, TOP))
    return replace(lead, note=f"{of_trace:.2f} of κ_τ, {of_top:.2f} of κ")


MARKERS = dict(zip(lenet.INITS, "os^Dv", strict=True))


def _draw_figure_1(figure: Figure, seen: pd.DataFrame, along: pd.DataFrame) -> None:
    """κ_τ of 84→10 against the epoch, with its highest and lowest; below it all measures of both layers."""
    figure.set_size_inches(7.0, 7.6)
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.15, 1.0))
    above, below = halves
    curve, points = above.subplots(1, 2, width_ratios=(1.9, 1.0))
    of_trace = along[along["measure"] == TRACE]
    for number, (value, label) in enumerate(KINDS.items()):
        line = of_trace[of_trace["target"] == "gap"]
        stop_rules.draw_correlation_line(curve, line, value, f"C{number}", label, band=value == "pearson")
    stop_rules.label_correlation_panel(curve, along)
    curve.axhline(0.91, color="0.5", lw=0.8, ls=":")
    curve.text(1.0, 0.93, "0.91 in the paper", fontsize=7, va="bottom")
    _mark_extreme_correlations(curve, of_trace)
    curve.set_title("κ_τ of 84→10: correlation with test − training loss", fontsize=9)
    draw_measure_against_gap(points, seen[seen["epoch"] == seen["epoch"].max()], {TRACE: "κ_τ of 84→10"})
    for axes, (layer, name) in zip(below.subplots(1, 2, sharey=True), lenet.LAYERS.items(), strict=True):
        stop_rules.draw_correlations_along_training(
            axes, along, {f"{measure}/{layer}": label for measure, label in lenet.MEASURES.items()}
        )
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("epoch, and the first looks below a limit")
    curve.set_xlabel("epoch, and the first looks below a limit")


def _mark_extreme_correlations(axes: Any, of_trace: pd.DataFrame) -> None:
    """The highest and the lowest correlation over the epochs, written beside their points."""
    line = of_trace[(of_trace["target"] == "gap") & of_trace["rule"].str.startswith("epoch")]
    if line.empty:
        return
    ordered = line.sort_values("pearson", kind="stable")
    for row in (ordered.iloc[-1], ordered.iloc[0]):
        epoch, value = float(str(row["rule"]).split()[1]), float(row["pearson"])
        axes.plot(epoch, value, "o", color="C0", ms=5)
        words = f"{value:+.2f}, epoch {epoch:g}".replace("-", "−")
        above = 8 if value > 0 else -14
        axes.annotate(words, (epoch, value), xytext=(0, above), textcoords="offset points", ha="center", fontsize=7)


def draw_measure_against_gap(axes: Any, points: pd.DataFrame, column: Mapping[str, str]) -> None:
    """The networks at one moment, as in the paper: brighter for larger batches."""
    [(name, label)] = column.items()
    shades = {batch: place for place, batch in enumerate(sorted(points["batch"].unique()))}
    for init, rows in points.groupby("init"):
        style = {"cmap": "viridis", "vmin": 0, "vmax": max(len(shades) - 1, 1), "s": 12, "marker": MARKERS[str(init)]}
        axes.scatter(rows[name], rows["gap"], c=[shades[batch] for batch in rows["batch"]], label=init, **style)
    axes.set_xlabel(label)
    axes.set_ylabel("test − training loss")
    r = points[name].corr(points["gap"])
    axes.set_title(f"after epoch {int(points['epoch'].max())}: r = {r:.2f}; brighter: larger batch", fontsize=8)
    axes.legend(fontsize=6)
