"""Figures 16 and 17 of Zhang et al. (2017): fan-in norms and functional margins, natural and random labels, two starts.

All networks train for the same number of epochs: at a given loss the margins would be alike by construction. The
caption of Figure 17 compares random labels "than random labels"; read: than natural labels. With ten classes the
margin is the output of the label less the largest other output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from flatscope import Context, train_population
from flatscope.extend import usable_device
from flatscope.inputs import load
from flatscope.training import PopulationView, Store, builder_of, trial_of
from flatscope_papers import curves, intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.fitting import FITTED
from flatscope_papers.toml_files import settings_by_scale
from flatscope_papers.zhang2017.minima import COLOURS, LABELS

Report = Callable[[float, str], None]
STARTS = (1, 10)
QUANTILES = np.linspace(0, 1, 101)
SIZES = settings_by_scale(__name__)
RATES = {1: 0.01, 10: 5e-4}
SURE = "the weights begin ten times as large"


def norm_stages_during_training(scale: str) -> list[Stage]:
    """One unit: networks of all labels and starts train together."""
    size = SIZES[scale]
    cells = itertools.product(LABELS, STARTS, range(size["seeds"]))
    return [Stage([[_labelled_network_config(size, *cell) for cell in cells]], train_and_watch)]


def _labelled_network_config(size: Mapping[str, Any], labels: str, start: int, seed: int) -> dict[str, Any]:
    config = {
        "study": "margins",
        "kind": labels,
        "data": size["data"],
        "model": {**size["model"], "seed": seed},
        "init": {"scheme": "torch", "scale": start},
        "train": {**size["train"], "lr": RATES[start], "momentum": 0.9, "seed": seed},
    }
    return config if labels == "natural" else {**config, "labels": {"random": 1.0, "seed": 0}}


def train_and_watch(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """Train the unit's networks together; store their norms after every epoch and their margins at the end."""
    seen: list[list[dict[str, float]]] = [[] for _ in configs]
    epochs = configs[0]["train"]["epochs"]

    def after_epoch(epoch: int, view: PopulationView) -> None:
        weights = view.weights()
        for place, i in enumerate(view.active):
            seen[i].append(
                {"epoch": epoch, **unit_and_weight_norms({name: value[place] for name, value in weights.items()})}
            )
        report(epoch / epochs, f"epoch {epoch}")

    population = train_population(
        builder_of(configs[0]["model"]["name"]),
        [trial_of(config, str(i)) for i, config in enumerate(configs)],
        load(**configs[0]["data"]),
        device=usable_device(configs[0].get("device") or "cpu"),
        after_epoch=after_epoch,
        show_progress=False,
    )
    for i, config in enumerate(configs):
        margins = Context(population.problem(i)).scores().margins
        assert margins is not None  # CIFAR-10 has classes
        values = margins.double().cpu().numpy()
        last = population.histories[i].iloc[-1]
        state = population.state(i)
        product = math.prod(float(value.norm()) for value in state.values() if value.ndim > 1)
        metrics = {
            "train_loss": float(last["train_loss"]),
            "train_error": float(last["train_error"]),
            "median_margin": float(np.median(values)),
            "median_normalised_margin": float(np.median(values)) / product,
            **{f"last_{name}": value for name, value in unit_and_weight_norms(state).items()},
        }
        quantiles = pd.DataFrame({"quantile": QUANTILES, "margin": np.quantile(values, QUANTILES)})
        store.write(config, metrics, frames={"norms": pd.DataFrame(seen[i]), "margins": quantiles})


def unit_and_weight_norms(state: Mapping[str, Tensor]) -> dict[str, float]:
    """Mean ℓ1 norm of the weights into a unit, by layer and over all units, and the ℓ2 norm of all parameters."""
    rows = {name.removesuffix(".weight"): w.flatten(1).abs().sum(1) for name, w in state.items() if w.ndim > 1}
    means = {f"fan_in_{name}": float(values.mean()) for name, values in rows.items()}
    means["fan_in"] = float(torch.cat(list(rows.values())).mean())
    means["l2"] = math.sqrt(sum(float(value.double().square().sum()) for value in state.values()))
    return means


def label_comparisons(networks: pd.DataFrame, quantity: str, column: str, sign: str) -> dict[str, Answer]:
    """The numbers of `_claims`: differences per seed, turned so that the claim is that they are positive.

    A seed is that of the starting weights, alike but for their scale, and of the sample order; the images and the
    random labels are the same for all seeds.
    """
    values = networks.pivot(index="seed", columns=["labels", "start"], values=column)
    turn, sure = (1, SURE) if sign == "+" else (-1, "")
    answers = {}
    for start in STARTS:
        pair = turn * values["random", start], turn * values["natural", start]
        answers[f"{quantity}-labels-x{start}"] = intervals.paired_difference(*pair)
    for kind in LABELS:
        pair = turn * values[kind, 10], turn * values[kind, 1]
        answers[f"{quantity}-start-{kind}"] = intervals.paired_difference(*pair, sure)
    return answers


def answers_if_fitted(answers: Mapping[str, Answer], errors: Mapping[tuple[str, int], float]) -> dict[str, Answer]:
    """The answers; none where one of the networks compared was not trained until it fits: it is still on its way.

    Args:
        answers: by key of the claim, whose end says what is compared: "labels-x1", "start-random".
        errors: largest training error of the networks of each kind of labels and start.
    """
    judged = {}
    for key, answer in answers.items():
        which = key.rpartition("-")[2]
        largest = max(error for (labels, start), error in errors.items() if which in (labels, f"x{start}"))
        judged[key] = answer
        if largest > FITTED:
            words = f"up to {largest:.0%} of the training images are not fitted; {answer.value:.3g} there"
            note = "; ".join(filter(None, (words, answer.note)))
            judged[key] = Answer(math.nan, runs=answer.runs, note=note)
    return judged


def margins_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Claims and figure of the saved table: quantiles of each network's margins, and its norm."""
    del scale
    cells = table.groupby(["labels", "start", "seed"])
    wrong = pd.Series({cell: _share_below_zero(curve) for cell, curve in cells})
    networks = cells["l2"].first().rename("last_l2").reset_index()
    middle = table[np.isclose(table["quantile"], 0.5)]
    networks["median_margin"] = (
        middle.set_index(["labels", "start", "seed"])["margin"].loc[list(wrong.index)].to_numpy()
    )
    answers = {
        **label_comparisons(networks, "margin", "median_margin", "-"),
        **label_comparisons(networks, "norm", "last_l2", "+"),
    }
    errors: dict[tuple[str, int], float] = {}
    for (labels, start, _), error in zip(wrong.index, wrong, strict=True):
        errors[str(labels), int(start)] = max(float(error), errors.get((str(labels), int(start)), 0.0))
    return Analysis(table, answers_if_fitted(answers, errors), lambda figure: _draw_margins(figure, table))


def _share_below_zero(curve: pd.DataFrame) -> float:
    """The training error: the share of margins below zero, between the quantiles that are known."""
    ordered = curve.sort_values("quantile")
    return float(np.interp(0.0, ordered["margin"], ordered["quantile"], left=0.0, right=1.0))


def _norms_table(runs: Runs) -> pd.DataFrame:
    frame = runs.frame()
    return frame.rename(columns={"kind": "labels", "init.scale": "start", "model.seed": "seed"})


def _norm_notes(networks: pd.DataFrame) -> tuple[str, ...]:
    cells = list(itertools.product(LABELS, STARTS))
    parts = [networks[(networks["labels"] == labels) & (networks["start"] == start)] for labels, start in cells]
    names = [f"{labels} ×{start}" for labels, start in cells]
    words = ", ".join(f"{name}: {part['train_error'].max():.3f}" for name, part in zip(names, parts, strict=True))
    scaled = [part["median_normalised_margin"].mean() for part in parts]
    margins = ", ".join(f"{name}: {value:.3g}" for name, value in zip(names, scaled, strict=True))
    return (
        f"largest training error at the end: {words}",
        f"median margin over the product of the layers' Frobenius norms: {margins}",
    )


@study("zhang2017-fig16", stages=norm_stages_during_training)
def figure_16(runs: Runs) -> Analysis:
    """Mean ℓ1 norm of the weights into a unit after every epoch, for each layer."""
    networks, parts = _norms_table(runs), []
    for stored in runs.stored():
        config = stored.config
        parts.append(
            stored.frame("norms").assign(
                labels=config["kind"], start=config["init"]["scale"], seed=config["model"]["seed"]
            )
        )
    table = pd.concat(parts, ignore_index=True)
    answers = label_comparisons(networks, "fan-in", "last_fan_in", "+")
    return Analysis(table, answers, lambda figure: _draw_norms(figure, table), _norm_notes(networks))


def _draw_norms(figure: Figure, table: pd.DataFrame) -> None:
    figure.set_size_inches(8.6, 3.4)
    columns = [name for name in table.columns if name.startswith("fan_in_")]
    panels: Any = figure.subplots(1, len(columns))
    for axes, column in zip(np.ravel(panels), columns, strict=True):
        for labels, start in itertools.product(LABELS, STARTS):
            part = table[(table["labels"] == labels) & (table["start"] == start)]
            how = {"linestyle": "-" if start == 1 else "--", "label": f"{labels} labels, start ×{start}"}
            drawn = curves.runs_as_columns(part, "epoch", column)
            curves.draw_band(axes, drawn, COLOURS[labels], deviations=True, alpha=0.2, **how)
        axes.set_yscale("log")
        axes.set_xlabel("epoch")
        axes.set_ylabel("mean fan-in ℓ1 norm")
        axes.set_title(f"layer {column.removeprefix('fan_in_')}", fontsize=9)
    np.ravel(panels)[-1].legend(fontsize=7)


@study("zhang2017-fig17", stages=norm_stages_during_training, from_table=margins_of_table)
def figure_17(runs: Runs) -> Analysis:
    """Distribution of the functional margins of the training images, and the ℓ2 norm of the weights."""
    networks, parts = _norms_table(runs), []
    for stored in runs.stored():
        config = stored.config
        cell = {"labels": config["kind"], "start": config["init"]["scale"], "seed": config["model"]["seed"]}
        parts.append(stored.frame("margins").assign(**cell, l2=stored.metrics["last_l2"]))
    table = pd.concat(parts, ignore_index=True)
    return replace(margins_of_table(table, runs.scale), notes=_norm_notes(networks))


def _draw_margins(figure: Figure, table: pd.DataFrame) -> None:
    figure.set_size_inches(8.6, 3.4)
    panels: Any = figure.subplots(1, len(STARTS) + 1)
    for axes, start in zip(panels, STARTS, strict=False):
        for labels in LABELS:
            part = table[(table["labels"] == labels) & (table["start"] == start)]
            for number, (_, curve) in enumerate(part.groupby("seed")):
                name = f"{labels} labels" if not number else None
                axes.plot(curve["margin"], curve["quantile"], color=COLOURS[labels], lw=1, label=name)
        axes.set_xlabel("functional margin")
        axes.set_title(f"start ×{start}", fontsize=9)
    panels[0].set_ylabel("share of training images below")
    panels[0].legend(fontsize=7)
    networks = table.groupby(["labels", "start", "seed"])["l2"].first()
    for place, (labels, start) in enumerate(itertools.product(LABELS, STARTS)):
        values = networks[labels][start]
        panels[2].errorbar(place, values.mean(), yerr=values.std(), fmt="o", capsize=3, color=COLOURS[labels])
    names = [f"{labels}\n×{start}" for labels, start in itertools.product(LABELS, STARTS)]
    panels[2].set_xticks(range(len(names)), names, fontsize=7)
    panels[2].set_yscale("log")
    panels[2].set_ylabel("ℓ2 norm of all parameters")
