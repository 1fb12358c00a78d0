"""Where a stop rule ends each network, and how the correlations of Petzka et al. (2019) depend on the rule.

The paper trains "until convergence" and "until the error is small", which may mean anything. Networks are therefore
looked at after a list of epochs, and every correlation is a function of the rule: after a common epoch, or at the first
look at which the training loss, or the gradient, is below a limit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from flatscope.stats import partial_correlation
from flatscope_papers import intervals
from flatscope_papers.claims import Answer

ENOUGH = 0.9  # share of the networks that must get to a rule before anything is judged there
TARGETS = {"gap": "test − training loss", "error_gap": "test − training error"}
HELD = {"within_batch": "batch", "within_init": "init", "given_loss": "train_loss"}


@dataclass(frozen=True)
class Rule:
    """After an epoch, or at the first look with a number at or below a limit."""

    column: str  # "epoch", "train_loss", "gradient"; "below": the mean of an epoch's mini-batch losses
    limit: float

    @property
    def name(self) -> str:
        """In words."""
        words = {"train_loss": "loss", "below": "mini-batch loss"}.get(self.column, self.column)
        return f"{words} {self.limit:g}"

    def stops(self, looks: pd.DataFrame) -> pd.DataFrame:
        """One row per network that it stops, of a frame with one per network and look."""
        if self.column == "epoch":
            return looks[looks["epoch"] == self.limit]
        reached = looks[looks[self.column] <= self.limit].sort_values(["network", "epoch"], kind="stable")
        return reached.drop_duplicates("network")


def stop_rules(looks: pd.DataFrame, limits: Iterable[Rule] = ()) -> list[Rule]:
    """Every epoch after which half of the networks or more were looked at, then those of `limits`."""
    there = looks.groupby("epoch")["network"].nunique()
    common = there.index[there >= looks["network"].nunique() / 2]
    return [*(Rule("epoch", int(epoch)) for epoch in sorted(common)), *limits]


def correlations_by_stop_rule(looks: pd.DataFrame, columns: Sequence[str], at: Sequence[Rule]) -> pd.DataFrame:
    """One row per rule, measure and target: Pearson (with an interval for the loss), by rank, with something held.

    Args:
        looks: one row per network and look: `network`, `batch`, `init`, `epoch`, `train_loss`, the targets, measures.
        columns: the measures.
        at: the rules.
    """
    rows = []
    for rule in at:
        points = rule.stops(looks)
        for column in columns:
            for target in TARGETS:
                known = points[np.isfinite(points[column]) & np.isfinite(points[target])]
                if known[[column, target]].nunique().min() < 4:
                    continue
                row = {"rule": rule.name, "measure": column, "target": target, "networks": len(known)}
                row["pearson"] = float(known[column].corr(known[target]))
                if target == "gap":
                    pearson = intervals.correlation_with_interval(known[column], known[target])
                    row |= {"low": pearson.low, "high": pearson.high}
                row["spearman"] = float(known[column].corr(known[target], method="spearman"))
                rows.append(
                    row
                    | {
                        name: correlation_holding_setting_fixed(known, column, held, target)
                        for name, held in HELD.items()
                    }
                )
    return pd.DataFrame(rows)


def correlation_holding_setting_fixed(points: pd.DataFrame, column: str, held: str, target: str = "gap") -> float:
    """Pearson's correlation with the batch size, the initialisation or the training loss held fixed."""
    fixed = points[held].astype(str) if held in ("batch", "init") else points[held]
    frame = pd.DataFrame({"measure": points[column], "target": points[target], "held": fixed})
    return partial_correlation(frame, "measure", "target", ["held"], "pearson").value


def networks_judged_at_rule(looks: pd.DataFrame, rule: Rule, trained: int) -> tuple[pd.DataFrame, str]:
    """The networks where the rule stops them, and why nothing can be judged there, if so.

    Args:
        looks: one row per network and look.
        rule: the rule.
        trained: how many networks there are, those that were lost included.
    """
    points = rule.stops(looks)
    if len(points) >= ENOUGH * trained:
        return points, ""
    until = int(looks["epoch"].max()) if len(looks) else 0
    return points, f"{len(points)} of {trained} networks came to {rule.name} in {until} epochs"


def correlation_answer_at_rule(looks: pd.DataFrame, rule: Rule, trained: int, column: str) -> Answer:
    """Pearson's correlation of a measure with the gap where the rule stops the networks; no number if too few."""
    points, missing = networks_judged_at_rule(looks, rule, trained)
    if missing:
        of_some = f"; over these it is {points[column].corr(points['gap']):.2f}" if len(points) > 3 else ""
        return Answer(math.nan, runs=len(points), note=missing + of_some)
    return intervals.correlation_with_interval(
        points[column], points["gap"], note=partial_correlations_in_words(points, column)
    )


def partial_correlations_in_words(points: pd.DataFrame, column: str) -> str:
    """The same by rank, with each setting and the training loss held fixed, and for the gap of the error."""
    ranked = points[column].corr(points["gap"], method="spearman")
    held = [
        f"{name.replace('_', ' ')} {correlation_holding_setting_fixed(points, column, what):.2f}"
        for name, what in HELD.items()
    ]
    errors = f"against the gap of the error {points[column].corr(points['error_gap']):.2f}"
    return "; ".join([f"by rank {ranked:.2f}", *held, errors])


def sign_change_epochs_in_words(along: pd.DataFrame, column: str) -> str:
    """Epochs at which the correlation with the gap changes its sign, in words."""
    line = along[(along["measure"] == column) & (along["target"] == "gap") & along["rule"].str.startswith("epoch")]
    values = dict(zip(line["rule"].str.split().str[1].astype(int), line["pearson"], strict=True))
    signs = [epoch for before, epoch in itertools.pairwise(values) if values[before] * values[epoch] < 0]
    known = {epoch: value for epoch, value in values.items() if math.isfinite(value)}
    if not known:
        return "no correlation"
    shown = dict.fromkeys(
        [min(known), max(known, key=known.__getitem__), min(known, key=known.__getitem__), max(known)]
    )
    ends = ", ".join(f"{values[epoch]:.2f} after epoch {epoch}" for epoch in sorted(shown))
    return f"{ends}; " + (f"the sign turns by epoch {', '.join(map(str, signs))}" if signs else "its sign never turns")


def draw_correlations_along_training(
    axes: Any, along: pd.DataFrame, lines: Mapping[str, str], *, value: str = "pearson"
) -> None:
    """Correlation with the gap against the epoch, and at the other rules to the right of it.

    Args:
        axes: where to draw.
        along: as `correlations_by_stop_rule` gives it.
        lines: label by measure.
        value: which correlation.
    """
    for number, (column, label) in enumerate(lines.items()):
        line = along[(along["measure"] == column) & (along["target"] == "gap")]
        draw_correlation_line(axes, line, value, f"C{number}", label, band=number == 0 and value == "pearson")
    label_correlation_panel(axes, along)


def draw_correlation_line(
    axes: Any, line: pd.DataFrame, value: str, colour: str, label: str, *, band: bool = False
) -> None:
    """One correlation against the epoch; at the other rules as a marker."""
    of_epochs = line["rule"].str.startswith("epoch")
    epochs = line[of_epochs]
    places = epochs["rule"].str.split().str[1].astype(float)
    marker = "o" if len(epochs) < 3 else ""  # a line of many shows them by itself, in a smaller file
    axes.plot(places, epochs[value], color=colour, marker=marker, ms=2.5, lw=1.2, label=label)
    if band:
        low, high = (epochs[end].astype(float) for end in ("low", "high"))
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    rest = line[~of_epochs]
    axes.plot(places.max() * 1.5 ** np.arange(1, len(rest) + 1), rest[value], color=colour, marker="D", ms=4, lw=0)


def label_correlation_panel(axes: Any, along: pd.DataFrame) -> None:
    """Scale and labels of a panel of correlations: epochs, and to the right of them the other rules."""
    rules_seen = list(along["rule"].unique())
    epochs = [float(rule.split()[1]) for rule in rules_seen if rule.startswith("epoch")]
    rest = [rule for rule in rules_seen if not rule.startswith("epoch")]
    marked = [epoch for epoch in epochs if str(int(epoch)).rstrip("0") in ("1", "2", "5") or epoch == max(epochs)]
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(
        [*marked, *(max(epochs) * 1.5**number for number in range(1, len(rest) + 1))],
        [*(f"{epoch:g}" for epoch in marked), *rest],
        rotation=60,
        fontsize=6,
    )
    axes.axhline(0, color="0.7", lw=0.6)
    axes.set_ylim(-1.05, 1.05)
    axes.set_xlabel("epoch; first look with a training loss, or gradient, of at most")
    axes.set_ylabel("correlation with the gap")
    axes.legend(fontsize=6)
