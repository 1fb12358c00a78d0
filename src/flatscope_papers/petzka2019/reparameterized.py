"""Figure 2 of Petzka et al. (2019): what a layer-wise reparameterization leaves of the correlations.

As in the authors' released script, the matrix 84→10 of each network is multiplied by a whole number from 5 to 25, and
the layer before it divided, bias included. κ, κ_τ and ρ stay, trace and largest eigenvalue of 84→10 are divided by the
square of the number: measured on some images at every look (`change_by_reparameterization`), and a law for the values
on all of them.
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
from flatscope_papers.declaration import Analysis, Runs, keep_saved_figure, study
from flatscope_papers.petzka2019 import lenet, stop_rules
from flatscope_papers.petzka2019.followed_networks import predicted_factor_of_layer_measure
from flatscope_papers.petzka2019.stop_rules import Rule, networks_judged_at_rule

OF_OUTPUT = [column for column in lenet.COLUMNS if column.endswith("/fc3")]
OF_HESSIAN = ("layer_trace", "layer_max_eigenvalue")
WEAK = 0.3  # up to here a correlation is "very weak"


def reparameterization_answers(seen: pd.DataFrame, scale: str) -> dict[str, Answer]:
    """The numbers of all claims: at a training loss of 0.1, and at the last epoch."""
    looks, trained = lenet.looks_by_reading_of_variance(seen)["σ = 0.1"], lenet.number_of_judged_networks(scale)
    fallen = lenet.event_looks(seen)
    at_loss = fallen if len(fallen) else looks
    early = networks_judged_at_rule(at_loss, lenet.stop_rule_in_looks(at_loss, lenet.RULES[0]), trained)
    last = networks_judged_at_rule(
        looks, Rule("epoch", lenet.SIZES["paper"]["looks"][-1] if scale == "paper" else looks["epoch"].max()), trained
    )
    answers = trace_and_eigenvalue_answers(*early) | {"invariant": change_by_reparameterization(seen)}
    at_end = trace_and_eigenvalue_answers(*last)
    return answers | {f"{key}_last": at_end[key] for key in ("hessian_trace", "hessian_eigenvalue")}


def figure_2_of_looks(table: pd.DataFrame, scale: str) -> Analysis:
    """The claims from the looks of Figure 1; the figure needs the correlations and stays as it is."""
    looked = table[table["kind"] == "look"].dropna(axis="columns", how="all")
    return Analysis(table, reparameterization_answers(lenet.looks_with_gaps(looked, scale), scale), keep_saved_figure)


@study("petzka2019-fig2", stages=lenet.lenet_stages, from_table=figure_2_of_looks, table_of="petzka2019-fig1")
def figure_2(runs: Runs) -> Analysis:
    """Correlations after the output matrix was multiplied by a number from 5 to 25, the layer before divided."""
    seen = lenet.lenet_look_table(runs)
    looks = lenet.looks_by_reading_of_variance(seen)["σ = 0.1"]
    both = {"before": looks, "after": predicted_looks_after_reparameterization(looks)}
    along = pd.concat(
        [
            stop_rules.correlations_by_stop_rule(rows, OF_OUTPUT, stop_rules.stop_rules(rows, lenet.RULES)).assign(
                when=when
            )
            for when, rows in both.items()
        ],
        ignore_index=True,
    )
    return Analysis(
        along,
        reparameterization_answers(seen, runs.scale),
        lambda figure: _draw_figure_2(figure, along),
        notes=(f"the judged networks are those of {lenet.JUDGED}, σ = 0.1", *lenet.lenet_training_notes(seen, runs)),
    )


def predicted_looks_after_reparameterization(seen: pd.DataFrame) -> pd.DataFrame:
    """The same networks after the reparameterization."""
    columns = [column for column in lenet.COLUMNS if column in seen]
    return seen.assign(
        **{
            name: seen[name] * [predicted_factor_of_layer_measure(name, factor) for factor in seen["factor"]]
            for name in columns
        }
    )


def change_by_reparameterization(seen: pd.DataFrame) -> Answer:
    """Changes of κ, κ_τ and ρ, and of Tr and λ_max from their law: the largest of each network."""
    return intervals.largest_over_networks(seen.groupby("network")["moved"].max().dropna())


def trace_and_eigenvalue_answers(points: pd.DataFrame, missing: str = "") -> dict[str, Answer]:
    """The numbers of the claims about trace and eigenvalue, from the networks before the reparameterization."""
    ways: dict[str, tuple[Callable[..., Answer], str]] = {
        "hessian_trace": (_correlation_after_reparameterization, OF_HESSIAN[0]),
        "hessian_eigenvalue": (_correlation_after_reparameterization, OF_HESSIAN[1]),
        "trace_drops": (_correlation_lost, OF_HESSIAN[0]),
        "eigenvalue_drops": (_correlation_lost, OF_HESSIAN[1]),
    }
    if missing:
        return {key: Answer(math.nan, runs=len(points), note=missing) for key in ways}
    return {key: way(points, f"{measure}/fc3") for key, (way, measure) in ways.items()}


def _correlation_after_reparameterization(points: pd.DataFrame, column: str) -> Answer:
    """|r| after the reparameterization."""
    after = predicted_looks_after_reparameterization(points)
    correlation = intervals.correlation_with_interval(after[column], points["gap"])
    return replace(intervals.absolute_answer(correlation), note=_correlation_lost_in_words(points, after, column))


def _correlation_lost(points: pd.DataFrame, column: str) -> Answer:
    """|r| before minus |r| after."""
    after = predicted_looks_after_reparameterization(points)
    both = points.assign(after=after[column])
    lead = intervals.lead_of_correlations(both, column, ["after"], "gap", of_size=True)
    return replace(lead, note=_correlation_lost_in_words(points, after, column))


def _correlation_lost_in_words(points: pd.DataFrame, after: pd.DataFrame, column: str) -> str:
    """Both correlations, and what is to be said of the one that the reparameterization could take away."""
    before, now = (frame[column].corr(points["gap"]) for frame in (points, after))
    correlations = f"r = {before:.2f} before, {now:.2f} after"
    if abs(before) <= WEAK:
        return f"{correlations}: very weak before it as well, so that there was little to take away"
    return f"{correlations}: before it of the wrong sign" if before < 0 else correlations


def _draw_figure_2(figure: Figure, along: pd.DataFrame) -> None:
    figure.set_size_inches(9.5, 3.6)
    panels: Any = figure.subplots(1, 2, sharey=True)
    for axes, when in zip(panels, ("before", "after"), strict=True):
        lines = {f"{measure}/fc3": label for measure, label in lenet.MEASURES.items()}
        stop_rules.draw_correlations_along_training(axes, along[along["when"] == when], lines)
        axes.set_title(f"84→10, {when} the reparameterization", fontsize=8)
