"""Figure 1 of Petzka et al. (2019): relative flatness of one layer of LeNet-5 against the generalization gap.

The paper calls its layer 5 "the last hidden layer", which two matrices may be: the fifth, which makes the outputs from
that layer, and the fourth, which makes the layer itself. Every claim about it is judged for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from flatscope.stats import Estimate, partial_correlation
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, study
from flatscope_papers.petzka2019.lenet import INITS, RULE, at_rule, correlations, followed, stages, summary_notes

FAR_OUT = 3  # networks that may decide a correlation by themselves
FEWEST = 8  # networks, below which nothing is held fixed
MATRICES = {"fc3": "output matrix", "fc2": "last hidden matrix"}  # the two readings of layer 5


@study("petzka2019-fig1", stages=stages)
def figure_1(runs: Runs) -> Analysis:
    """κ and κ_τ of LeNet-5's layer 5 against the generalization error.

    Four initialisations, four batch sizes, nine seeds; each network is followed along training, and the correlation
    is shown as a function of the stop rule.
    """
    seen = followed(runs)
    points = at_rule(seen, RULE)
    found = {
        "trace": _with_settings(points, "before/kappa_trace/fc3"),
        "trace_hidden": _with_settings(points, "before/kappa_trace/fc2"),
        "eigenvalue": _with_ranks(points, "before/kappa/fc3"),
        "stronger": stronger(points, "fc3"),
        "eigenvalue_hidden": _with_ranks(points, "before/kappa/fc2"),
        "stronger_hidden": stronger(points, "fc2"),
    }
    if found["trace"].value < 0.5 < found["trace_hidden"].value:
        held = _holding(points, "before/kappa_trace/fc2", "train_loss").value
        reason = (
            "likeliest reason: 'layer 5' may be the last hidden matrix, for which the same is "
            f"{found['trace_hidden'].value:.2f} (with the training loss held fixed {held:.2f})"
        )
        found["trace"] = replace(found["trace"], note=f"{found['trace'].note}; {reason}")
    columns = {"before/kappa_trace/fc3": "κ_τ⁵", "before/kappa/fc3": "κ⁵", "before/kappa_trace/fc2": "κ_τ, fc2"}
    along = correlations(seen)
    passed = seen.drop(columns=[name for name in seen.columns if name.startswith("after/")])
    parts = [points.assign(kind="network"), along.assign(kind="correlation"), passed.assign(kind="along training")]
    return Analysis(
        pd.concat(parts, ignore_index=True),
        found,
        lambda figure: draw(figure, points, along, columns, "before"),
        notes=(*summary_notes(seen, runs), *_confounds(points)),
    )


def _with_ranks(points: pd.DataFrame, column: str) -> Answer:
    """Pearson's, with what a few networks far out make of it: Spearman's, and without the largest values."""
    ranked = intervals.correlation(points[column], points["gap"], "spearman")
    ends = "" if ranked.low is None else f" [{ranked.low:.2f}, {ranked.high:.2f}]"
    rest = points.nsmallest(len(points) - FAR_OUT, column)
    without = intervals.correlation(rest[column], rest["gap"]).value
    note = f"by rank {ranked.value:.2f}{ends}; without the {FAR_OUT} largest values {without:.2f}"
    return intervals.correlation(points[column], points["gap"], note=note)


def _with_settings(points: pd.DataFrame, column: str) -> Answer:
    """Pearson's, with what else may have made it: ranks, the training loss at the stop, and the batch sizes."""
    found = _with_ranks(points, column)
    if len(points) < FEWEST:
        return found
    return replace(found, note=f"{found.note}; {settings_note(points, column)}")


def settings_note(points: pd.DataFrame, column: str) -> str:
    """What is left of a correlation with the training loss held fixed, without the largest batches, in each size."""
    largest = points["batch"].max()
    rest = points[points["batch"] < largest]
    within = ", ".join(f"{batch}: {rows[column].corr(rows['gap']):.2f}" for batch, rows in points.groupby("batch"))
    return (
        f"with the training loss held fixed {_holding(points, column, 'train_loss').value:.2f} (the gap against the "
        f"training loss {points['train_loss'].corr(points['gap']):.2f}); without batch size {largest} "
        f"{rest[column].corr(rest['gap']):.2f}; within batch sizes {within}"
    )


def stronger(points: pd.DataFrame, layer: str) -> Answer:
    """Correlation of κ_τ minus the absolute one of κ: positive only where κ_τ correlates in the paper's direction."""
    trace, top = f"before/kappa_trace/{layer}", f"before/kappa/{layer}"
    # The largest of r and −r is |r|, and the interval then holds for both signs at once.
    found = intervals.lead_of_correlations(points.assign(turned=-points[top]), trace, [top, "turned"], "gap")
    of_trace, of_top = (points[column].corr(points["gap"]) for column in (trace, top))
    return replace(found, note=f"{of_trace:.2f} of κ_τ, {of_top:.2f} of κ")


def _holding(points: pd.DataFrame, column: str, held: str) -> Estimate:
    frame = points.rename(columns={column: "measure"}).assign(batch=points["batch"].astype(str))
    return partial_correlation(frame, "measure", "gap", [held], "pearson")


def _confounds(points: pd.DataFrame) -> tuple[str, ...]:
    """What else moves with κ_τ: the training loss at the stop (p(1 − p) shrinks with it), and the batch size."""
    if len(points) < FEWEST:
        return ()
    settings = {"train_loss": "the training loss", "batch": "the batch size", "init": "the initialisation"}
    notes = []
    for layer, name in MATRICES.items():
        words = []
        for held, of in settings.items():
            found = _holding(points, f"before/kappa_trace/{layer}", held)
            words.append(f"{of} {found.value:.2f} [{found.low:.2f}, {found.high:.2f}]")
        notes.append(f"Pearson correlation of κ_τ of the {name} with the gap, holding fixed: {'; '.join(words)}")
    return tuple(notes)


MARKERS = dict(zip(INITS, "os^D", strict=True))


def draw(figure: Figure, points: pd.DataFrame, along: pd.DataFrame, columns: Mapping[str, str], when: str) -> None:
    """Scatter panels as in the paper (brighter for larger batches), and the correlation at every stop rule."""
    figure.set_size_inches(9.0, 6.0)
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.2, 1))
    top, bottom = halves
    shades = {batch: place for place, batch in enumerate(sorted(points["batch"].unique()))}
    for axes, (column, label) in zip(top.subplots(1, len(columns), sharey=True), columns.items(), strict=True):
        for init in points["init"].unique():
            rows = points[points["init"] == init]
            colours = [shades[batch] for batch in rows["batch"]]
            style = {"cmap": "viridis", "vmin": 0, "vmax": max(len(shades) - 1, 1), "s": 12, "marker": MARKERS[init]}
            axes.scatter(rows[column], rows["gap"], c=colours, label=init, **style)
        axes.set_xscale("log")
        if points[column].max() < 30 * points[column].min():  # powers of ten are too few, and labels of all too many
            narrow = points[column].max() < 5 * points[column].min()
            axes.xaxis.set_major_locator(MaxNLocator(4) if narrow else LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
        straight, ranked = (intervals.correlation(points[column], points["gap"], k) for k in ("pearson", "spearman"))
        axes.set_title(f"r = {straight.value:.2f}, by rank {ranked.value:.2f}", fontsize=8)
    top.axes[0].set_ylabel("test − training loss")
    top.axes[-1].legend(fontsize=6)
    top.suptitle(
        f"stopped at {RULE.replace('loss', 'training loss')} or at the end; brighter: larger batch; r of the values, "
        "not of their logarithms",
        fontsize=8,
    )
    _draw_rules(bottom.subplots(1, 1), along[along["when"] == when], columns)


def _draw_rules(axes: Any, along: pd.DataFrame, columns: Mapping[str, str]) -> None:
    rules = sorted(along["rule"].unique(), key=_place)
    styles = {"momentum": "-", "plain": "--"}
    for colour, (column, label) in enumerate(columns.items()):
        _, measure, layer = column.split("/")
        for variant, style in styles.items():
            chosen = (along["variant"] == variant) & (along["measure"] == measure) & (along["layer"] == layer)
            line = along[chosen].set_index("rule").reindex(rules)
            if line["pearson"].isna().all():
                continue
            places = np.arange(len(rules))
            axes.plot(places, line["pearson"], style, marker="o", ms=3, color=f"C{colour}", label=f"{label}, {variant}")
            if variant == "momentum":
                low, high = line["pearson_low"].astype(float), line["pearson_high"].astype(float)
                axes.fill_between(places, low, high, color=f"C{colour}", alpha=0.12)
    axes.axhline(0.91, color="0.5", lw=0.8)
    axes.annotate("0.91", (0, 0.91), fontsize=7, color="0.4", va="bottom")
    counts = along[along["variant"] == "momentum"].groupby("rule")["networks"].max()
    names = [f"{rule}\n({int(counts.get(rule, 0))})" for rule in rules]
    axes.set_xticks(np.arange(len(rules)), names, rotation=30, ha="right", fontsize=7)
    axes.set_ylim(-1.05, 1.05)
    axes.set_ylabel("Pearson correlation")
    axes.set_xlabel(
        "stop rule: training loss, epoch, no new lowest loss in five epochs, last epoch (networks with momentum)"
    )
    axes.legend(fontsize=6, ncol=2)


def _place(rule: str) -> tuple[int, float]:
    """Losses from high to low, then epochs, then the end."""
    kind, _, value = rule.partition(" ")
    return {"loss": 0, "epoch": 1, "settled": 2}.get(kind, 3), (-float(value) if kind == "loss" else float(value or 0))
