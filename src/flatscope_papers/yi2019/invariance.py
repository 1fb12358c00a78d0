"""Theorem 3.2 and Definition 4.1 of Yi et al. (2019): flatness of weights moves under rescaling, that of paths not."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from flatscope import Problem, measure, rescale
from flatscope.training import Store, evaluate, stored_problem
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.theory.rewritten_networks import shrink_layer
from flatscope_papers.toml_files import settings_by_scale

OF_WEIGHTS = {"epsilon_flatness": "ε", "hessian_trace": "trace", "expected_flatness": "expected"}
OF_PATHS = {"psi_epsilon": "PSI-ε", "psi_trace": "PSI-trace", "psi_expected": "PSI-expected"}
EPSILON = 0.1
OPTIONS: dict[str, dict[str, Any]] = {
    "epsilon_flatness": {"epsilon": EPSILON, "relative": False},
    "expected_flatness": {"sigma": 0.05},
    "psi_epsilon": {"rule": "cyclic"},
    "psi_trace": {"rule": "cyclic"},
    "psi_expected": {"rule": "cyclic"},
}
ALPHAS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
SIZES = settings_by_scale(__name__)


def invariance_stages(scale: str) -> list[Stage]:
    """Small networks without biases, trained; then each written in many ways."""
    size = SIZES[scale]
    trained = [
        {
            "data": {"name": "digits", "train_size": size["samples"], "test_size": 100},
            "model": {"name": "mlp", "options": {"widths": [64, 12, 12, 10], "bias": False}, "seed": seed},
            "train": {"lr": 0.1, "batch_size": 20, "epochs": size["epochs"], "stop_loss": 0.01, "seed": seed},
        }
        for seed in range(size["seeds"])
    ]
    looks = [[{"network": config, "rescalings": size["rescalings"]}] for config in trained]
    return [Stage([trained], gpus=0.25), Stage(looks, measure_rewritten_networks, gpus=0.25)]


@each_trial("measuring")
def measure_rewritten_networks(config: Config, store: Store) -> Measured:
    """The six measures of one function in many ways of writing it, in float64; the trace as one layer shrinks."""
    stored = stored_problem(store, config["network"], device=config.get("device"))
    x, y = next(iter(stored.batches(size=stored.n_train)))
    problem = Problem(stored.model, train=(x, y), dtype=torch.float64)
    assert isinstance(x, Tensor)
    model, x = problem.model, x.double()
    twins: list[tuple[str, nn.Module]] = [("as trained", model)]
    twins += [(f"rescaled {seed}", rescale(model, x, seed=seed)) for seed in range(config["rescalings"])]
    twins += [(f"shrunk {layer}", shrink_layer(model, x, layer, EPSILON)) for layer in ("fc1", "fc2")]
    rows = []
    for way, twin in twins:
        table = measure(problem.with_model(twin), [*OF_WEIGHTS, *OF_PATHS], options=OPTIONS)
        rows.append({"way": way, **{name: table[name] for name in (*OF_WEIGHTS, *OF_PATHS)}})
    loss, _ = evaluate(model, x, y)
    metrics = {"loss": loss, "zeroed_rise": (loss_with_layer_zeroed(model, "fc1", x, y) - loss) / (1 + loss)}
    for alpha in ALPHAS:
        twin = rescale(model, x, factors={"fc1": alpha})
        rows.append(
            {
                "way": f"alpha {alpha:g}",
                "hessian_trace": measure(problem.with_model(twin), "hessian_trace")["hessian_trace"],
            }
        )
    return Measured(metrics, frames={"ways": pd.DataFrame(rows)})


def loss_with_layer_zeroed(model: nn.Module, layer: str, x: Tensor, y: Tensor) -> float:
    """Loss once the weights of a layer are zero."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.get_submodule(layer).parameters()).zero_()
    return evaluate(twin, x, y)[0]


def relative_changes_by_way_of_writing(ways: pd.DataFrame) -> pd.DataFrame:
    """Relative change of each measure against the network as trained: one row per other way of writing it."""
    names = [*OF_WEIGHTS, *OF_PATHS]
    others = ways[ways["way"].str.startswith(("rescaled", "shrunk"))]
    base = ways[ways["way"] == "as trained"].iloc[0]
    changes = (others[names] - base[names].astype(float)).abs() / base[names].astype(float).abs()
    return changes.assign(way=others["way"])


def slope_of_trace_against_alpha(ways: pd.DataFrame) -> float:
    """Slope of log trace against log α at the smallest α."""
    traces = ways[ways["way"].str.startswith("alpha")]["hessian_trace"].to_numpy(float)
    return float(np.log(traces[-1] / traces[-2]) / math.log(ALPHAS[-1] / ALPHAS[-2]))


@study("yi2019-invariance", stages=invariance_stages)
def invariance(runs: Runs) -> Analysis:
    """Trained networks, each written in at least twenty ways; every way computes the same function."""
    frame, parts = runs.frame(), runs.frames("ways")
    moved = pd.concat(
        [relative_changes_by_way_of_writing(part).assign(network=i) for i, part in enumerate(parts)], ignore_index=True
    )
    slopes = [slope_of_trace_against_alpha(part) for part in parts]
    table = pd.concat([part.assign(network=i) for i, part in enumerate(parts)], ignore_index=True)
    return Analysis(
        table,
        invariance_claim_answers(frame, table, moved, slopes),
        lambda figure: _draw_invariance(figure, moved, table),
    )


def invariance_claim_answers(
    frame: pd.DataFrame, table: pd.DataFrame, moved: pd.DataFrame, slopes: list[float]
) -> dict[str, Answer]:
    """The numbers of the claims."""
    random = moved[moved["way"].str.startswith("rescaled")]
    medians = random.groupby("network")[list(OF_WEIGHTS)].median()
    least = medians.median().idxmin()
    by_way = table.set_index(["network", "way"])
    shrunk, before = by_way.xs("shrunk fc1", level="way"), by_way.xs("as trained", level="way")
    ratio = shrunk["epsilon_flatness"].to_numpy(float) / frame["zeroed_rise"].to_numpy(float)
    factor = (shrunk["expected_flatness"] / before["expected_flatness"]).to_numpy(float)
    worst = moved.groupby("network")[list(OF_PATHS)].max()
    by = f"by {OF_PATHS[str(worst.max().idxmax())]}, each network in {len(moved) // len(worst)} ways"
    return {
        "weights_move": intervals.smallest_over_networks(medians[least], f"{OF_WEIGHTS[str(least)]}-flatness"),
        "paths_stay": intervals.largest_over_networks(worst.max(axis=1), by),
        "shrunk_layer": intervals.smallest_over_networks(ratio),
        "expected_shrunk": intervals.smallest_over_networks(factor),
        "trace_grows": intervals.mean_over_runs(slopes),
    }


def _draw_invariance(figure: Figure, moved: pd.DataFrame, table: pd.DataFrame) -> None:
    figure.set_size_inches(9.0, 3.8)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    labels = OF_WEIGHTS | OF_PATHS
    generator = np.random.default_rng(0)
    for place, name in enumerate(labels):
        shown = moved[name].clip(lower=1e-17)
        spread = place + 0.25 * (generator.random(len(shown)) - 0.5)
        left.semilogy(spread, shown, ".", ms=4, color="C0" if name in OF_WEIGHTS else "C1", alpha=0.6)
    left.set_xticks(range(len(labels)), [f"{word}\nflatness" for word in labels.values()], fontsize=7)
    left.set_ylabel("relative change when rescaled")
    left.axvline(2.5, color="0.7", lw=0.8)
    left.set_title("weights | path values", fontsize=9)
    sweep = table[table["way"].str.startswith("alpha")]
    for _, part in sweep.groupby("network"):
        right.loglog(ALPHAS, part["hessian_trace"], "o-", ms=3, color="C0", alpha=0.7)
    reference = sweep["hessian_trace"].max() * (np.array(ALPHAS) / ALPHAS[-1]) ** -2.0
    right.loglog(ALPHAS, reference, "--", color="0.4", label="α⁻²")
    right.legend()
    right.set_xlabel("α")
    right.set_ylabel("trace of the Hessian of the weights")
