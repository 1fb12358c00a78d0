"""Conjecture 1 of Zhang et al. (2017), and remarks of its sections 1 and 2.2: torus, one pass, nearest neighbours.

Networks are trained to zero error on labels of which a share is random. The conjecture ties three things together: how
flat the minimum is, how far samples are from the boundary of their class, and the expected error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from sklearn.neighbors import KNeighborsClassifier
from torch.nn import functional

from flatscope import SGLD
from flatscope.inputs import load
from flatscope.training import Store, build, evaluate, stored_problem, tables_of, train_and_measure
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.stratified import correlation_within_strata
from flatscope_papers.toml_files import settings_by_scale

SIZES = settings_by_scale(__name__)
TEST_SIZE = 360
LAST = 0.2  # share of the one pass whose samples are looked at before they are used
RANDOM = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of labels that are drawn at random


def conjecture_stages(scale: str) -> list[Stage]:
    """Networks with more and more random labels; their radii and margins; the remarks."""
    size = SIZES[scale]
    units = [
        [_conjecture_network_config(size, share, seed) for seed in range(size["seeds"])]
        for share in RANDOM[:: size["skip"]]
    ]
    options = {"flatness_radius": size["radius"], "geometric_margin": size["margin"]}
    looks = [
        [{"study": "conjecture 1", "network": one, "measures": [*options], "measure_options": options}]
        for unit in units
        for one in unit
    ]
    remarks = [
        [{"study": "remarks", "data": size["data"], "seed": seed, "epochs": size["passes"]}]
        for seed in range(size["seeds"])
    ]
    return [Stage(units, train_and_measure), Stage(remarks, try_remarks, 0), Stage(looks, look_at_minimum, 0)]


def _conjecture_network_config(size: Mapping[str, Any], share: float, seed: int) -> dict[str, Any]:
    config = {
        "data": size["data"],
        "model": {"name": "mlp", "options": {"widths": [64, size["width"], 10]}, "seed": seed},
        "train": {
            "lr": 0.1,
            "momentum": 0.9,
            "batch_size": 50,
            "epochs": size["epochs"],
            "stop_loss": size.get("loss", 0.01),
            "seed": seed,
        },
    }
    return config | ({"labels": {"random": share, "seed": seed}} if share else {})


@each_trial("radius and margin")
def look_at_minimum(config: Config, store: Store) -> Measured:
    """Flatness radius and the median geometric margin of the training samples of one network."""
    problem = stored_problem(store, config["network"])
    [table] = tables_of(problem, config)
    margins = table.samples("geometric_margin").double().numpy()
    metrics = {"radius": table["flatness_radius"], "margin": float(np.median(margins[np.isfinite(margins)]))}
    trained = store.read(config["network"]).metrics
    metrics |= {name: trained[name] for name in ("train_loss", "train_error", "test_error")}
    return Measured(metrics | {"random": config["network"].get("labels", {}).get("random", 0.0)})


@each_trial("remarks")
def try_remarks(config: Config, store: Store) -> Measured:
    """SGD with and without a torus for its weights, one pass over the samples, and the nearest neighbour."""
    data = load(**config["data"])
    assert data.test is not None
    metrics: dict[str, float] = {}
    for name, projection, epochs in (
        ("plain", None, config["epochs"]),
        ("torus", ("torus", -math.pi, math.pi), config["epochs"]),
        ("one_pass", None, 1),
    ):
        model = build("mlp", seed=config["seed"], widths=(64, 64, 10))
        optimizer = SGLD(model.parameters(), lr=0.1, temperature=0.0, projection=projection)
        generator = torch.Generator().manual_seed(config["seed"])
        x, y = data.train
        before = []  # losses of samples that no step has used yet
        for _ in range(epochs):
            for chosen in torch.split(torch.randperm(len(x), generator=generator), 10):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x[chosen]), y[chosen])
                before.append(float(loss.detach()))
                torch.autograd.backward(loss)
                optimizer.step()
        test_loss, metrics[f"{name}_error"] = evaluate(model.eval(), *data.test)
    last = before[-math.ceil(LAST * len(before)) :]
    metrics["one_pass"] = float(np.mean(last)) - test_loss
    nearest = KNeighborsClassifier(1).fit(*(part.numpy() for part in data.train))
    for part, samples in (("train", data.train), ("test", data.test)):
        metrics[f"nearest_{part}"] = 1 - float(nearest.score(*(value.numpy() for value in samples)))
    return Measured(metrics)


def conjecture_of_table(both: pd.DataFrame, scale: str) -> Analysis:
    """Claims and figure of the saved table, which has networks and remarks one below the other."""
    del scale
    table = both[both["kind"] == "network"].dropna(axis="columns", how="all").reset_index(drop=True)
    return Analysis(
        both, conjecture_answers(table, both[both["kind"] == "remark"]), lambda figure: _draw_conjecture(figure, table)
    )


@study("zhang2017-conjecture1", stages=conjecture_stages, from_table=conjecture_of_table)
def conjecture_study(runs: Runs) -> Analysis:
    """Networks that fit labels of which a share is random: flatness radius, geometric margin and test error."""
    points, remarks = runs.frame(-1), runs.frame(1)
    fitted = points[points["train_error"] == 0] if runs.scale != "smoke" else points
    table = fitted[["random", "radius", "margin", "train_loss", "test_error"]].reset_index(drop=True)
    rows = remarks[["plain_error", "torus_error", "one_pass", "nearest_train", "nearest_test"]]
    both = pd.concat([table.assign(kind="network"), rows.assign(kind="remark")], ignore_index=True)
    notes = (f"{len(points) - len(table)} of {len(points)} networks did not fit their labels and are left out",)
    return replace(conjecture_of_table(both, runs.scale), notes=notes)


def conjecture_answers(table: pd.DataFrame, remarks: pd.DataFrame) -> dict[str, Answer]:
    """The numbers of the claims."""
    natural, random = (table[table["random"] == share] for share in (0.0, 1.0))
    return {
        "radius": intervals.log10_ratio_of_means(natural["radius"], random["radius"]),
        "margin": intervals.log10_ratio_of_means(natural["margin"], random["margin"]),
        "together": _rank_correlation_within_label_shares(table, "radius", "margin"),
        "error": _rank_correlation_within_label_shares(table, "margin", "test_error"),
        "torus": intervals.mean_over_runs(remarks["torus_error"] - remarks["plain_error"], resolution=1 / TEST_SIZE),
        "one_pass": intervals.mean_over_runs(remarks["one_pass"]),
        "nearest_train": intervals.largest_over_networks(remarks["nearest_train"]),
        "nearest_gap": intervals.mean_over_runs(
            remarks["nearest_test"] - remarks["nearest_train"], resolution=1 / TEST_SIZE
        ),
    }


def _rank_correlation_within_label_shares(table: pd.DataFrame, one: str, other: str) -> Answer:
    """Rank correlation among networks with one share of random labels; pooled, the share alone would make it."""
    pooled = table[one].corr(table[other], method="spearman")
    return correlation_within_strata(
        table[one], table[other], table["random"], note=f"pooled over all shares {pooled:.2f}"
    )


def _draw_conjecture(figure: Figure, table: pd.DataFrame) -> None:
    figure.set_size_inches(8.0, 3.4)
    panels: Any = figure.subplots(1, 2)
    for axes, (x, y) in zip(panels, (("radius", "margin"), ("margin", "test_error")), strict=True):
        shown = axes.scatter(table[x], table[y], c=table["random"], cmap="viridis", s=16)
        axes.set_xlabel({"radius": "flatness radius", "margin": "geometric margin (median)"}[x])
        axes.set_ylabel({"margin": "geometric margin (median)", "test_error": "test error"}[y])
    figure.colorbar(shown, ax=panels[1], label="share of random labels")
