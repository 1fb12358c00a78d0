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
from collections.abc import Mapping
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
from flatscope_papers.stratified import within
from flatscope_papers.toml_files import grid

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
SIZES = grid(__name__)


def stages(scale: str) -> list[Stage]:
    """All measures of the four figures at once, along training where the scale says after which epochs."""
    size = SIZES[scale]
    units = [[_config(size, batch, rate, seed) for seed in range(size["seeds"])] for batch, rate in size["rates"]]
    if "looks" in size:
        return [Stage([[config for unit in units for config in unit]], train_and_follow)]
    return [Stage(units, gpus=0.25)]


def _config(size: Mapping[str, Any], batch: int, rate: float, seed: int) -> dict[str, Any]:
    follow = (
        {"epochs": size["looks"], "measures": list(PER_LAYER), "layers": [*LAYERS, OUTPUT]} if "looks" in size else {}
    )
    own = {"follow": follow} if follow else {"measures": list(PER_LAYER)}
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
        **own,
    }


def look_table(runs: Runs) -> pd.DataFrame:
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


def networks(runs: Runs) -> pd.DataFrame:
    """One row per network that the paper would have kept: settings, gap, measures."""
    seen = look_table(runs)
    limit = math.inf if runs.scale == "smoke" else LARGEST_LOSS
    kept: pd.DataFrame = seen[(seen["epoch"] == seen["epoch"].max()) & (seen["train_loss"] <= limit)]
    plain = ["train.batch_size", "train.seed", "train_loss", "test_loss", "gap"]
    return kept[[*plain, *EVERY_LAYER, *PER_NETWORK]].reset_index(drop=True)


def along_training(runs: Runs, columns: Mapping[str, str]) -> pd.DataFrame:
    """The correlations after every epoch that was looked at, and of networks at or below lower losses."""
    seen = look_table(runs)
    return stop_rules.correlations(seen, list(columns), stop_rules.rules(seen, LIMITS))


def _columns(measure: str) -> dict[str, str]:
    return {f"{measure}/{layer}": f"{SYMBOLS[measure]}, layer {n}" for n, layer in enumerate(LAYERS, start=1)}


def _layer_analysis(runs: Runs, measure: str) -> Analysis:
    columns = _columns(measure)
    return layers_of_table(_table(runs, columns), runs.scale, measure)


def _table(runs: Runs, columns: Mapping[str, str]) -> pd.DataFrame:
    """The networks that the paper would have kept, and below them the correlations by every rule."""
    points, along = networks(runs), along_training(runs, columns)
    return pd.concat([points.assign(kind="network"), along.assign(kind="correlation")], ignore_index=True)


def _parts(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Networks and correlations of a saved table; the first ones had networks alone."""
    if "kind" not in table:
        return table, table.iloc[:0]
    points, along = (table[table["kind"] == kind].reset_index(drop=True) for kind in ("network", "correlation"))
    return points, along


def layers_of_table(table: pd.DataFrame, scale: str, measure: str) -> Analysis:
    """Claims, figure and notes of one measure of the four hidden layers."""
    (points, along), columns = _parts(table), _columns(measure)
    judged = converged(points, scale)
    found = {
        column.split("/")[1]: intervals.correlation(
            judged[column], judged["gap"], note=otherwise(points, judged, column)
        )
        for column in columns
    }
    spread = intervals.spread_of_correlations(judged, list(columns), "gap")
    left_open = f"the limit is {SPREAD}{TOO_FEW}" if _open(spread, SPREAD) else ""
    found["spread"] = dataclasses.replace(spread, note=_joined(spread.note, left_open))
    return Analysis(table, found, lambda figure: _draw(figure, points, columns, along))


def converged(points: pd.DataFrame, scale: str) -> pd.DataFrame:
    """The networks that are judged; at other scales than the paper's all that it would have kept."""
    return points[points["train_loss"] <= CONVERGED] if scale == "paper" else points


def otherwise(points: pd.DataFrame, judged: pd.DataFrame, column: str) -> str:
    """The correlation by other choices: the paper's networks, ranks, another limit, and within one batch size."""
    gap, parts = "gap", []
    if len(judged) < len(points):
        kept = f"with all {len(points)} networks up to a loss of {LARGEST_LOSS} {points[column].corr(points[gap]):.2f}"
        parts.append(f"{kept}, by rank {points[column].corr(points[gap], method='spearman'):.2f}")
        lower = points[points["train_loss"] <= 0.01]
        parts.append(f"up to 0.01 {lower[column].corr(lower[gap]):.2f}")
    parts.append(f"by rank {judged[column].corr(judged[gap], method='spearman'):.2f}")
    inside = within(judged[column], judged[gap], judged["train.batch_size"])
    if not math.isnan(inside.value):
        parts.append(f"by rank within batch sizes {inside.value:.2f}")
    return "; ".join(parts)


def _draw(figure: Figure, points: pd.DataFrame, columns: Mapping[str, str], along: pd.DataFrame) -> None:
    figure.set_size_inches(9.0, 5.4)
    halves: Any = figure.subfigures(2, 1)
    _scatter(halves[0], points, columns)
    if len(along):
        stop_rules.draw_along(halves[1].subplots(), along, columns)


def _scatter(figure: Any, points: pd.DataFrame, columns: Mapping[str, str]) -> None:
    shades = {batch: place for place, batch in enumerate(sorted(points["train.batch_size"].unique()))}
    panels: Any = figure.subplots(1, len(columns), sharey=True)
    for axes, (column, label) in zip(np.ravel(panels), columns.items(), strict=True):
        colours = [shades[batch] for batch in points["train.batch_size"]]
        axes.scatter(points[column], points["gap"], c=colours, cmap="viridis", s=12)
        axes.set_xlabel(label)
        axes.set_title(f"r = {intervals.correlation(points[column], points['gap']).value:.2f}", fontsize=9)
    np.ravel(panels)[0].set_ylabel("test − training loss")
    figure.suptitle("brighter: larger batch", fontsize=8)


def kappa_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Figure 3 of a saved table."""
    return layers_of_table(table, scale, "kappa_trace")


def rho_sum_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Figure 4 of a saved table."""
    return layers_of_table(table, scale, "rho_layer_sum")


def rho_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Figure 5 of a saved table."""
    return layers_of_table(table, scale, "rho")


def network_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Figure 6 of a saved table."""
    points, along = _parts(table)
    return Analysis(
        table, lead_found(converged(points, scale)), lambda figure: _draw(figure, points, PER_NETWORK, along)
    )


@study("petzka2019-fig3", stages=stages, from_table=kappa_of_table)
def figure_3(runs: Runs) -> Analysis:
    """κ_τ of the four hidden layers of 784-50-50-50-30-10 networks against test minus training loss."""
    return _layer_analysis(runs, "kappa_trace")


@study("petzka2019-fig4", stages=stages, from_table=rho_sum_of_table)
def figure_4(runs: Runs) -> Analysis:
    """ρ_σ (sum over neurons) of the four hidden layers, the same networks as Figure 3."""
    return _layer_analysis(runs, "rho_layer_sum")


@study("petzka2019-fig5", stages=stages, from_table=rho_of_table)
def figure_5(runs: Runs) -> Analysis:
    """ρ (largest neuron) of the four hidden layers, the same networks as Figure 3."""
    return _layer_analysis(runs, "rho")


@study("petzka2019-fig6", stages=stages, from_table=network_of_table)
def figure_6(runs: Runs) -> Analysis:
    """κ_τ^max, κ_τ^Σ, ρ^max and ρ^Σ against the gap, and whether each beats all of Figures 3 to 5."""
    return network_of_table(_table(runs, PER_NETWORK), runs.scale)


def lead_found(points: pd.DataFrame) -> dict[str, Answer]:
    """By how much each measure of the network leads all layer-wise and neuron-wise ones of the hidden layers."""
    found = {}
    for name in PER_NETWORK:
        lead = intervals.lead_of_correlations(points, name, EVERY_LAYER, "gap")
        words = _joined(lead.note, _why_close(points, name, lead), _hidden_alone(points, name, lead))
        found[name] = dataclasses.replace(lead, note=words)
    return found


def _layers_of(name: str) -> list[str]:
    """Columns of the hidden layers that a measure of the whole network is made of."""
    return [f"{MADE_OF[name]}/{layer}" for layer in LAYERS]


def _hidden_alone(points: pd.DataFrame, name: str, lead: Answer) -> str:
    """The same lead if the measure of the network leaves the output matrix out."""
    if math.isnan(lead.value):
        return ""
    layers = points[_layers_of(name)]
    own = (layers.max(axis=1) if name.endswith("max") else layers.sum(axis=1)).corr(points["gap"])
    ahead = own - layers.corrwith(points["gap"]).max()
    return f"over the four hidden layers alone {own:.2f}, a lead of {ahead:.3f}"


def _why_close(points: pd.DataFrame, name: str, lead: Answer) -> str:
    """Reason why a measure of the whole network hardly leads: one layer is all of it, or too few networks."""
    if math.isnan(lead.value):
        return ""
    for number, column in enumerate(_layers_of(name), start=1):
        if np.allclose(points[name], points[column], rtol=1e-6):
            return f"layer {number} is the largest in all {len(points)} networks, so that this can only tie with it"
    own, theirs = points[name].corr(points["gap"]), points[EVERY_LAYER].corrwith(points["gap"])
    measure, layer = EVERY_LAYER[int(np.argmax(theirs))].split("/")
    words = f"{own:.2f} against {theirs.max():.2f} of {SYMBOLS[measure]} of layer {LAYERS.index(layer) + 1}"
    return words + (TOO_FEW if _open(lead, 0.0) else "")


def _open(answer: Answer, limit: float) -> bool:
    return answer.low is not None and answer.high is not None and answer.low <= limit <= answer.high


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
