"""Figure 1 of Petzka et al. (2019): relative flatness of one layer of LeNet-5 against the generalization gap.

The paper calls its layer 5 "the last hidden layer"; the authors' released script measures the matrix 84→10, which is
judged. The matrix 120→84, which makes the last hidden layer, is shown beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, study
from flatscope_papers.petzka2019 import stop_rules
from flatscope_papers.petzka2019.lenet import (
    COLUMNS,
    INITS,
    JUDGED,
    LAYERS,
    MEASURES,
    RULES,
    SIZES,
    judged_networks,
    looks,
    readings,
    stages,
    summary_notes,
)
from flatscope_papers.petzka2019.stop_rules import Rule, answer_at, judged_at, turn

TRACE, TOP = "kappa_trace/fc3", "kappa/fc3"
KINDS = {
    "pearson": "Pearson",
    "spearman": "Spearman",
    "within_batch": "within batch sizes",
    "within_init": "within initialisations",
    "given_loss": "given the training loss",
}


@study("petzka2019-fig1", stages=stages)
def figure_1(runs: Runs) -> Analysis:
    """κ and κ_τ of LeNet-5's layer 5 against the generalization error, as a function of the stop rule.

    Four initialisations, four batch sizes, nine seeds; every network is looked at after a list of epochs.
    """
    seen = looks(runs)
    own, trained = readings(seen)["σ = 0.1"], judged_networks(runs)
    low, lower, gradient = RULES
    last = Rule("epoch", SIZES["paper"]["looks"][-1] if runs.scale == "paper" else int(own["epoch"].max()))
    found = {
        "trace": answer_at(own, low, trained, TRACE),
        "trace_lower_loss": answer_at(own, lower, trained, TRACE),
        "trace_gradient": answer_at(own, gradient, trained, TRACE),
        "trace_last_epoch": answer_at(own, last, trained, TRACE),
        "trace_common": answer_at(own, Rule("epoch", int(own["epoch"].max())), trained, TRACE),
        "eigenvalue": answer_at(own, low, trained, TOP),
        "stronger": stronger(own, low, trained),
    }
    along = along_training(seen)
    judged = along[(along["variant"] == JUDGED) & (along["reading"] == "σ = 0.1")]
    turns = [f"κ_τ of {name}: {turn(judged, f'kappa_trace/{layer}')}" for layer, name in LAYERS.items()]
    parts = [along.assign(kind="correlation"), in_brief(seen).assign(kind="look")]
    return Analysis(
        pd.concat(parts, ignore_index=True),
        found,
        lambda figure: _draw(figure, own, judged),
        notes=(*summary_notes(seen, runs), *turns),
    )


def in_brief(seen: pd.DataFrame) -> pd.DataFrame:
    """The looks to five digits, without what is the difference of two columns: a small file."""
    kept = seen.drop(columns=list(stop_rules.TARGETS))
    numbers = kept.select_dtypes("float")
    kept[numbers.columns] = numbers.map(lambda value: float(f"{value:.5g}"))
    return kept


def along_training(seen: pd.DataFrame) -> pd.DataFrame:
    """The correlations of every variant and reading at every rule."""
    parts = []
    for variant in seen["variant"].unique():
        for reading, rows in readings(seen, variant).items():
            found = stop_rules.correlations(rows, COLUMNS, stop_rules.rules(rows, RULES))
            parts.append(found.assign(variant=variant, reading=reading))
    return pd.concat(parts, ignore_index=True)


def stronger(seen: pd.DataFrame, rule: Rule, trained: int) -> Answer:
    """Correlation of κ_τ minus the absolute one of κ: positive only where κ_τ correlates in the paper's direction."""
    points, missing = judged_at(seen, rule, trained)
    if missing:
        return Answer(math.nan, runs=len(points), note=missing)
    # The largest of r and −r is |r|, and the interval then holds for both signs at once.
    found = intervals.lead_of_correlations(points.assign(turned=-points[TOP]), TRACE, [TOP, "turned"], "gap")
    of_trace, of_top = (points[column].corr(points["gap"]) for column in (TRACE, TOP))
    return replace(found, note=f"{of_trace:.2f} of κ_τ, {of_top:.2f} of κ")


MARKERS = dict(zip(INITS, "os^Dv", strict=True))


def _draw(figure: Figure, seen: pd.DataFrame, along: pd.DataFrame) -> None:
    """Correlations against the epoch for both layers, for κ_τ of 84→10 in every way, and the scatter at its end."""
    figure.set_size_inches(9.5, 6.6)
    panels: Any = figure.subplots(2, 2)
    for axes, (layer, name) in zip(panels[0], LAYERS.items(), strict=True):
        stop_rules.draw_along(axes, along, {f"{measure}/{layer}": label for measure, label in MEASURES.items()})
        axes.set_title(f"{name}: Pearson correlation with test − training loss", fontsize=8)
    panels[0, 0].axhline(0.91, color="0.5", lw=0.8, ls=":")
    of_trace = along[along["measure"] == TRACE]
    for number, (value, label) in enumerate(KINDS.items()):
        stop_rules.draw_line(panels[1, 0], of_trace[of_trace["target"] == "gap"], value, f"C{number}", label)
    stop_rules.draw_line(
        panels[1, 0], of_trace[of_trace["target"] == "error_gap"], "pearson", "0.3", "gap of the error"
    )
    stop_rules.finish(panels[1, 0], along)
    panels[1, 0].set_title("κ_τ of 84→10, looked at in other ways", fontsize=8)
    scatter(panels[1, 1], seen[seen["epoch"] == seen["epoch"].max()], {TRACE: "κ_τ of 84→10"})


def scatter(axes: Any, points: pd.DataFrame, column: Mapping[str, str]) -> None:
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
