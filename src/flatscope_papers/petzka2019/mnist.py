"""Figures 3 to 6 of Petzka et al. (2019), appendix C: MNIST networks with four hidden layers, every relative flatness.

The paper drops networks with a training loss above 0.07, so it did not stop at a level of the loss: here, too, all
networks train for the same number of epochs, and those above 0.07 are dropped. That keeps networks of the largest batch
which have not converged and make the correlations what they are, so that those at a loss of 0.003 are judged; beside
them stand the paper's choice, ranks, other limits, and what is left within one batch size.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.petzka2019 import stop_rules
from flatscope_papers.petzka2019.followed_networks import train_and_follow
from flatscope_papers.petzka2019.stop_rules import Rule
from flatscope_papers.stratified import correlation_within_strata
from flatscope_papers.toml_files import settings_by_scale

LARGEST_LOSS, CONVERGED = 0.07, 0.003  # training losses: up to where the paper keeps networks, and what is judged
LAYERS, OUTPUT = ("fc1", "fc2", "fc3", "fc4"), "fc5"
LIMITS = tuple(Rule("train_loss", limit) for limit in (0.07, 0.03, 0.01, 0.003, 0.001))
PER_LAYER = ("kappa_trace", "rho_layer_sum", "rho")
PER_NETWORK = {"kappa_trace_max": "κ_τ^max", "kappa_trace_sum": "κ_τ^Σ", "rho_max": "ρ^max", "rho_sum": "ρ^Σ"}
SYMBOLS = {"kappa_trace": "κ_τ", "rho_layer_sum": "ρ_σ", "rho": "ρ"}
MADE_OF = {
    "kappa_trace_max": "kappa_trace",
    "kappa_trace_sum": "kappa_trace",
    "rho_max": "rho",
    "rho_sum": "rho_layer_sum",
}
EVERY_LAYER = [f"{measure}/{layer}" for measure, layer in itertools.product(PER_LAYER, LAYERS)]
SPREAD = 0.1  # between "slightly" and "considerably"
TOO_FEW = ": too few networks to tell"
WIDTHS = (50, 50, 50, 30)
SIZES = settings_by_scale(__name__)


def mnist_stages(scale: str) -> list[Stage]:
    """All measures of the four figures at once, along training where the scale says after which epochs."""
    size = SIZES[scale]
    units = [[_mnist_config(size, batch, rate, seed) for seed in range(size["seeds"])] for batch, rate in size["rates"]]
    if "looks" in size:
        return [Stage([[config for unit in units for config in unit]], train_and_follow)]
    return [Stage(units, gpus=0.25)]


def _mnist_config(size: Mapping[str, Any], batch: int, rate: float, seed: int) -> dict[str, Any]:
    follow = (
        {"epochs": size["looks"], "measures": list(PER_LAYER), "layers": [*LAYERS, OUTPUT]} if "looks" in size else {}
    )
    looked_at = {"follow": follow} if follow else {"measures": list(PER_LAYER)}
    return {
        "data": size["data"],
        "model": {"name": "mlp", "options": {"widths": [784, *WIDTHS, 10]}, "seed": seed},
        "init": "xavier_normal",
        "train": {
            "lr": rate,
            "batch_size": batch,
            "epochs": size["epochs"],
            "seed": seed,
            "evaluate_every": 20,
        },
        **looked_at,
    }


def mnist_look_table(runs: Runs) -> pd.DataFrame:
    """One row per network and look, at its end alone where it was not followed: settings, gaps, measures."""
    parts = []
    for number, stored in enumerate(runs.stored()):
        train = stored.config["train"]
        if "follow" in stored.config:
            part = stored.frame("followed")
        else:
            part = pd.DataFrame([dict(stored.metrics)]).rename(columns={"epochs": "epoch"})
            part = part[~part["diverged"].astype(bool)]
        for name, of in MADE_OF.items() if len(part) else ():
            layers = part[[f"{of}/{layer}" for layer in (*LAYERS, OUTPUT)]]
            part = part.assign(**{name: layers.max(axis=1) if name.endswith("max") else layers.sum(axis=1)})
        settings = {
            "network": number,
            "init": "xavier_normal",
            "batch": train["batch_size"],
            "train.seed": train["seed"],
        }
        parts.append(part.assign(**settings, **{"train.batch_size": train["batch_size"]}))
    seen = pd.concat([part for part in parts if len(part)], ignore_index=True)
    for target, of in (("gap", "loss"), ("error_gap", "error")):
        seen[target] = seen[f"test_{of}"] - seen[f"train_{of}"]
    return seen


def mnist_networks_table(runs: Runs) -> pd.DataFrame:
    """One row per network that the paper would have kept: settings, gap, measures."""
    seen = mnist_look_table(runs)
    limit = math.inf if runs.scale == "smoke" else LARGEST_LOSS
    kept: pd.DataFrame = seen[(seen["epoch"] == seen["epoch"].max()) & (seen["train_loss"] <= limit)]
    plain = ["train.batch_size", "train.seed", "train_loss", "test_loss", "gap"]
    return kept[[*plain, *EVERY_LAYER, *PER_NETWORK]].reset_index(drop=True)


def correlations_of_mnist_along_training(runs: Runs, columns: Mapping[str, str]) -> pd.DataFrame:
    """The correlations after every epoch that was looked at, and of networks at or below lower losses."""
    seen = mnist_look_table(runs)
    return stop_rules.correlations_by_stop_rule(seen, list(columns), stop_rules.stop_rules(seen, LIMITS))


def _columns_of_hidden_layers(measure: str) -> dict[str, str]:
    return {f"{measure}/{layer}": f"{SYMBOLS[measure]}, layer {n}" for n, layer in enumerate(LAYERS, start=1)}


def _layer_analysis(runs: Runs, measure: str) -> Analysis:
    columns = _columns_of_hidden_layers(measure)
    return hidden_layers_analysis_of_table(_networks_and_correlations_table(runs, columns), runs.scale, measure)


def _networks_and_correlations_table(runs: Runs, columns: Mapping[str, str]) -> pd.DataFrame:
    """The networks that the paper would have kept, and below them the correlations by every rule."""
    points, along = mnist_networks_table(runs), correlations_of_mnist_along_training(runs, columns)
    return pd.concat([points.assign(kind="network"), along.assign(kind="correlation")], ignore_index=True)


def _split_networks_and_correlations(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Networks and correlations of a saved table; the first ones had networks alone."""
    if "kind" not in table:
        return table, table.iloc[:0]
    points, along = (table[table["kind"] == kind].reset_index(drop=True) for kind in ("network", "correlation"))
    return points, along


def hidden_layers_analysis_of_table(table: pd.DataFrame, scale: str, measure: str) -> Analysis:
    """Claims, figure and notes of one measure of the four hidden layers."""
    (points, along), columns = _split_networks_and_correlations(table), _columns_of_hidden_layers(measure)
    judged = converged_networks(points, scale)
    lost = _batch_sizes_without_networks(judged, scale)
    answers = {
        column.split("/")[1]: intervals.correlation_with_interval(
            judged[column], judged["gap"], note=correlation_by_other_choices(points, judged, column)
        )
        for column in columns
    }
    spread = intervals.spread_of_correlations(judged, list(columns), "gap")
    left_open = f"the limit is {SPREAD}{TOO_FEW}" if _is_undecided(spread, SPREAD) else ""
    answers["spread"] = dataclasses.replace(spread, note=_join_sentences(spread.note, left_open))
    answers = {key: _untested_where_networks_were_lost(answer, lost) for key, answer in answers.items()}
    return Analysis(table, answers, lambda figure: _draw_measures_and_correlations(figure, points, columns, along))


def converged_networks(points: pd.DataFrame, scale: str) -> pd.DataFrame:
    """The networks that are judged; at other scales than the paper's all that it would have kept."""
    return points[points["train_loss"] <= CONVERGED] if scale == "paper" else points


def _batch_sizes_without_networks(judged: pd.DataFrame, scale: str) -> list[int]:
    """Batch sizes of which no network is judged, none of which the paper's experiment is without."""
    return sorted({batch for batch, _ in SIZES[scale]["rates"]} - set(judged["train.batch_size"].astype(int)))


def _untested_where_networks_were_lost(answer: Answer, lost: Sequence[int]) -> Answer:
    """The answer; no number where a batch size has no network left: different batch sizes are how minima are made."""
    if not lost or math.isnan(answer.value):
        return answer
    sizes = " and ".join(f"{batch:,}" for batch in lost)
    words = (
        f"no network of batch {sizes} came to a loss of {CONVERGED} in the epochs it had; {answer.value:.2f} without"
    )
    return Answer(math.nan, runs=answer.runs, note=_join_sentences(words, answer.note))


def correlation_by_other_choices(points: pd.DataFrame, judged: pd.DataFrame, column: str) -> str:
    """The correlation by other choices: the paper's networks, ranks, another limit, and within one batch size."""
    gap, parts = "gap", []
    if len(judged) < len(points):
        kept = f"with all {len(points)} networks up to a loss of {LARGEST_LOSS} {points[column].corr(points[gap]):.2f}"
        parts.append(f"{kept}, by rank {points[column].corr(points[gap], method='spearman'):.2f}")
        lower = points[points["train_loss"] <= 0.01]
        parts.append(f"up to 0.01 {lower[column].corr(lower[gap]):.2f}")
    parts.append(f"by rank {judged[column].corr(judged[gap], method='spearman'):.2f}")
    inside = correlation_within_strata(judged[column], judged[gap], judged["train.batch_size"])
    if not math.isnan(inside.value):
        parts.append(f"by rank within batch sizes {inside.value:.2f}")
    return "; ".join(parts)


def _draw_measures_and_correlations(
    figure: Figure, points: pd.DataFrame, columns: Mapping[str, str], along: pd.DataFrame
) -> None:
    figure.set_size_inches(9.0, 5.4)
    halves: Any = figure.subfigures(2, 1)
    _draw_measures_against_gap(halves[0], points, columns)
    if len(along):
        stop_rules.draw_correlations_along_training(halves[1].subplots(), along, columns)


def _draw_measures_against_gap(figure: Any, points: pd.DataFrame, columns: Mapping[str, str]) -> None:
    shades = {batch: place for place, batch in enumerate(sorted(points["train.batch_size"].unique()))}
    panels: Any = figure.subplots(1, len(columns), sharey=True)
    for axes, (column, label) in zip(np.ravel(panels), columns.items(), strict=True):
        colours = [shades[batch] for batch in points["train.batch_size"]]
        axes.scatter(points[column], points["gap"], c=colours, cmap="viridis", s=12)
        axes.set_xlabel(label)
        axes.set_title(
            f"r = {intervals.correlation_with_interval(points[column], points['gap']).value:.2f}", fontsize=9
        )
    np.ravel(panels)[0].set_ylabel("test − training loss")
    figure.suptitle("brighter: larger batch", fontsize=8)


def kappa_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Figure 3 of a saved table."""
    return hidden_layers_analysis_of_table(table, scale, "kappa_trace")


def rho_sum_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Figure 4 of a saved table."""
    return hidden_layers_analysis_of_table(table, scale, "rho_layer_sum")


def rho_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Figure 5 of a saved table."""
    return hidden_layers_analysis_of_table(table, scale, "rho")


def network_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Figure 6 of a saved table."""
    points, along = _split_networks_and_correlations(table)
    judged = converged_networks(points, scale)
    return Analysis(
        table,
        {
            key: _untested_where_networks_were_lost(answer, _batch_sizes_without_networks(judged, scale))
            for key, answer in lead_of_network_measures(judged).items()
        },
        lambda figure: _draw_measures_and_correlations(figure, points, PER_NETWORK, along),
    )


@study("petzka2019-fig3", stages=mnist_stages, from_table=kappa_of_table)
def figure_3(runs: Runs) -> Analysis:
    """κ_τ of the four hidden layers of 784-50-50-50-30-10 networks against test minus training loss."""
    return _layer_analysis(runs, "kappa_trace")


@study("petzka2019-fig4", stages=mnist_stages, from_table=rho_sum_of_table)
def figure_4(runs: Runs) -> Analysis:
    """ρ_σ (sum over neurons) of the four hidden layers, the same networks as Figure 3."""
    return _layer_analysis(runs, "rho_layer_sum")


@study("petzka2019-fig5", stages=mnist_stages, from_table=rho_of_table)
def figure_5(runs: Runs) -> Analysis:
    """ρ (largest neuron) of the four hidden layers, the same networks as Figure 3."""
    return _layer_analysis(runs, "rho")


@study("petzka2019-fig6", stages=mnist_stages, from_table=network_of_table)
def figure_6(runs: Runs) -> Analysis:
    """κ_τ^max, κ_τ^Σ, ρ^max and ρ^Σ against the gap, and whether each beats all of Figures 3 to 5."""
    return network_of_table(_networks_and_correlations_table(runs, PER_NETWORK), runs.scale)


def lead_of_network_measures(points: pd.DataFrame) -> dict[str, Answer]:
    """By how much each measure of the network leads all layer-wise and neuron-wise ones of the hidden layers."""
    leads = {}
    for name in PER_NETWORK:
        lead = intervals.lead_of_correlations(points, name, EVERY_LAYER, "gap")
        words = _join_sentences(
            lead.note,
            _reason_for_small_lead(points, name, lead),
            _lead_without_output_layer_in_words(points, name, lead),
        )
        leads[name] = dataclasses.replace(lead, note=words)
    return leads


def _hidden_columns_of_network_measure(name: str) -> list[str]:
    """Columns of the hidden layers that a measure of the whole network is made of."""
    return [f"{MADE_OF[name]}/{layer}" for layer in LAYERS]


def _lead_without_output_layer_in_words(points: pd.DataFrame, name: str, lead: Answer) -> str:
    """The same lead if the measure of the network leaves the output matrix out."""
    if math.isnan(lead.value):
        return ""
    layers = points[_hidden_columns_of_network_measure(name)]
    own = (layers.max(axis=1) if name.endswith("max") else layers.sum(axis=1)).corr(points["gap"])
    ahead = own - layers.corrwith(points["gap"]).max()
    return f"over the four hidden layers alone {own:.2f}, a lead of {ahead:.3f}"


def _reason_for_small_lead(points: pd.DataFrame, name: str, lead: Answer) -> str:
    """Reason why a measure of the whole network hardly leads: one layer is all of it, or too few networks."""
    if math.isnan(lead.value):
        return ""
    for number, column in enumerate(_hidden_columns_of_network_measure(name), start=1):
        if np.allclose(points[name], points[column], rtol=1e-6):
            return f"layer {number} is the largest in all {len(points)} networks, so that this can only tie with it"
    own, theirs = points[name].corr(points["gap"]), points[EVERY_LAYER].corrwith(points["gap"])
    measure, layer = EVERY_LAYER[int(np.argmax(theirs))].split("/")
    words = f"{own:.2f} against {theirs.max():.2f} of {SYMBOLS[measure]} of layer {LAYERS.index(layer) + 1}"
    return words + (TOO_FEW if _is_undecided(lead, 0.0) else "")


def _is_undecided(answer: Answer, limit: float) -> bool:
    return answer.low is not None and answer.high is not None and answer.low <= limit <= answer.high


def _join_sentences(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
