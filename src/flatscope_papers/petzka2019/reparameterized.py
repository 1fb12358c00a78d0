"""Figure 2 of Petzka et al. (2019): what a layer-wise reparameterization leaves of the correlations.

As in the authors' released script, the matrix 84→10 of each network is multiplied by a whole number from 5 to 25, and
the layer before it divided, bias included. κ, κ_τ and ρ stay, trace and largest eigenvalue of 84→10 are divided by the
square of the number: measured on some images at every look (`moved`), and a law for the values on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, as_it_is, study
from flatscope_papers.petzka2019 import stop_rules
from flatscope_papers.petzka2019.followed_networks import law
from flatscope_papers.petzka2019.lenet import (
    COLUMNS,
    JUDGED,
    MEASURES,
    RULES,
    SIZES,
    event_looks,
    judged_number,
    look_table,
    readings,
    rule_seen,
    stages,
    summary_notes,
    with_gaps,
)
from flatscope_papers.petzka2019.stop_rules import Rule, judged_at

OF_OUTPUT = [column for column in COLUMNS if column.endswith("/fc3")]
OF_HESSIAN = ("layer_trace", "layer_max_eigenvalue")
WEAK = 0.3  # up to here a correlation is "very weak"


def answers_of(seen: pd.DataFrame, scale: str) -> dict[str, Answer]:
    """The numbers of all claims: at a training loss of 0.1, and at the last epoch."""
    own, trained = readings(seen)["σ = 0.1"], judged_number(scale)
    fallen = event_looks(seen)
    at_loss = fallen if len(fallen) else own
    early = judged_at(at_loss, rule_seen(at_loss, RULES[0]), trained)
    last = judged_at(
        own, Rule("epoch", SIZES["paper"]["looks"][-1] if scale == "paper" else own["epoch"].max()), trained
    )
    found = rewritten_found(*early) | {"invariant": moved(seen)}
    at_end = rewritten_found(*last)
    return found | {f"{key}_last": at_end[key] for key in ("hessian_trace", "hessian_eigenvalue")}


def figure_2_of_looks(table: pd.DataFrame, scale: str) -> Analysis:
    """The claims from the looks of Figure 1; the figure needs the correlations and stays as it is."""
    looked = table[table["kind"] == "look"].dropna(axis="columns", how="all")
    return Analysis(table, answers_of(with_gaps(looked, scale), scale), as_it_is)


@study("petzka2019-fig2", stages=stages, from_table=figure_2_of_looks, table_of="petzka2019-fig1")
def figure_2(runs: Runs) -> Analysis:
    """Correlations after the output matrix was multiplied by a number from 5 to 25, the layer before divided."""
    seen = look_table(runs)
    own = readings(seen)["σ = 0.1"]
    both = {"before": own, "after": rewritten(own)}
    along = pd.concat(
        [
            stop_rules.correlations(rows, OF_OUTPUT, stop_rules.rules(rows, RULES)).assign(when=when)
            for when, rows in both.items()
        ],
        ignore_index=True,
    )
    return Analysis(
        along,
        answers_of(seen, runs.scale),
        lambda figure: _draw(figure, along),
        notes=(f"the judged networks are those of {JUDGED}, σ = 0.1", *summary_notes(seen, runs)),
    )


def rewritten(seen: pd.DataFrame) -> pd.DataFrame:
    """The same networks after the reparameterization."""
    columns = [column for column in COLUMNS if column in seen]
    return seen.assign(**{name: seen[name] * [law(name, factor) for factor in seen["factor"]] for name in columns})


def moved(seen: pd.DataFrame) -> Answer:
    """Changes of κ, κ_τ and ρ, and of Tr and λ_max from their law: the largest of each network."""
    return intervals.largest(seen.groupby("network")["moved"].max().dropna())


def rewritten_found(points: pd.DataFrame, missing: str = "") -> dict[str, Answer]:
    """The numbers of the claims about trace and eigenvalue, from the networks before the reparameterization."""
    ways: dict[str, tuple[Callable[..., Answer], str]] = {
        "hessian_trace": (_left, OF_HESSIAN[0]),
        "hessian_eigenvalue": (_left, OF_HESSIAN[1]),
        "trace_drops": (_drop, OF_HESSIAN[0]),
        "eigenvalue_drops": (_drop, OF_HESSIAN[1]),
    }
    if missing:
        return {key: Answer(math.nan, runs=len(points), note=missing) for key in ways}
    return {key: way(points, f"{measure}/fc3") for key, (way, measure) in ways.items()}


def _left(points: pd.DataFrame, column: str) -> Answer:
    """|r| after the reparameterization."""
    after = rewritten(points)
    found = intervals.correlation(after[column], points["gap"])
    return replace(intervals.absolute(found), note=_lost(points, after, column))


def _drop(points: pd.DataFrame, column: str) -> Answer:
    """|r| before minus |r| after."""
    after = rewritten(points)
    both = points.assign(after=after[column])
    found = intervals.lead_of_correlations(both, column, ["after"], "gap", of_size=True)
    return replace(found, note=_lost(points, after, column))


def _lost(points: pd.DataFrame, after: pd.DataFrame, column: str) -> str:
    """Both correlations, and what is to be said of the one that the reparameterization could take away."""
    before, now = (frame[column].corr(points["gap"]) for frame in (points, after))
    told = f"r = {before:.2f} before, {now:.2f} after"
    if abs(before) <= WEAK:
        return f"{told}: very weak before it as well, so that there was little to take away"
    return f"{told}: before it of the wrong sign" if before < 0 else told


def _draw(figure: Figure, along: pd.DataFrame) -> None:
    figure.set_size_inches(9.5, 3.6)
    panels: Any = figure.subplots(1, 2, sharey=True)
    for axes, when in zip(panels, ("before", "after"), strict=True):
        lines = {f"{measure}/fc3": label for measure, label in MEASURES.items()}
        stop_rules.draw_along(axes, along[along["when"] == when], lines)
        axes.set_title(f"84→10, {when} the reparameterization", fontsize=8)
