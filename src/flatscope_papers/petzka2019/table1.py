"""Table 1 of Petzka et al. (2019) with Theorems 2 and 3: which measure stays when a network is rewritten."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from flatscope import Context, Problem, measure, rescale
from flatscope.training import Store, stored_problem
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.toml_files import settings_by_scale

OF_HESSIAN = {"layer_max_eigenvalue": "λ_max", "layer_trace": "Tr"}
OF_LAYERS = {
    "kappa": "κ",
    "kappa_trace": "κ_τ",
    "kappa_max": "κ^max",
    "kappa_sum": "κ^Σ",
    "kappa_trace_max": "κ_τ^max",
    "kappa_trace_sum": "κ_τ^Σ",
}
OF_NEURONS = {"rho_unit": "ρ(j)", "rho": "ρ", "rho_layer_sum": "ρ_σ", "rho_max": "ρ^max", "rho_sum": "ρ^Σ"}
MEASURES = OF_HESSIAN | OF_LAYERS | OF_NEURONS
OVER_LAYERS = {  # the measure and the option that give the paper's measures of the network
    "kappa_max": ("kappa", "max"),
    "kappa_sum": ("kappa", "sum"),
    "kappa_trace_max": ("kappa_trace", "max"),
    "rho_max": ("rho", "max"),
}
WAYS: Mapping[str, dict[str, Any]] = {
    "layer": {"by": "layer", "low": 5.0, "high": 25.0},  # factors of the paper's section 3
    "neuron": {"by": "unit", "low": 0.2, "high": 5.0},
}
SIZES = settings_by_scale(__name__)


def table_1_stages(scale: str) -> list[Stage]:
    """Small networks, trained; then each written in many ways."""
    size = SIZES[scale]
    trained = [
        {
            "data": {"name": "digits", "train_size": size["samples"], "test_size": 100, "flatten": True},
            "model": {"name": "mlp", "options": {"widths": [64, 12, 12, 10]}, "seed": seed},
            "train": {"lr": 0.1, "batch_size": 20, "epochs": size["epochs"], "stop_loss": 0.01, "seed": seed},
        }
        for seed in range(size["seeds"])
    ]
    # Each network has factors of its own: λ_max and Tr change by the square of a factor, alike in every network.
    looks = [
        [{"network": config, "ways": WAYS, "number": size["ways"], "seed": seed}] for seed, config in enumerate(trained)
    ]
    return [Stage([trained], gpus=0.25), Stage(looks, measure_rewritten_networks, gpus=0.25)]


@each_trial("measuring")
def measure_rewritten_networks(config: Config, store: Store) -> Measured:
    """Largest relative change of every measure over ways of writing a network, in float64."""
    stored = stored_problem(store, config["network"], device=config.get("device"))
    x, y = next(iter(stored.batches(size=stored.n_train)))
    assert isinstance(x, Tensor)
    problem = Problem(stored.model, train=(x, y), dtype=torch.float64)
    x = x.double()
    before, rows = _measure_values(problem), []
    for way, drawn in config["ways"].items():
        for draw in range(config["number"]):
            seed = config["seed"] * config["number"] + draw
            after = _measure_values(problem.with_model(rescale(problem.model, x, seed=seed, **drawn)))
            rows += [{"way": way, "draw": draw, **moved} for moved in relative_changes_by_rewriting(before, after)]
    return Measured(
        {"weights_alone": output_change_without_bias_scaling(problem.model, x)}, frames={"changes": pd.DataFrame(rows)}
    )


def _measure_values(problem: Problem) -> pd.DataFrame:
    ctx, tables = Context(problem), []
    for name in MEASURES:
        measured, form = OVER_LAYERS.get(name, (name, ""))
        options = {measured: {"form": form}} if form else {}
        tables.append(measure(problem, measured, options=options, context=ctx).to_frame().assign(measure=name))
    return pd.concat(tables, ignore_index=True)[["measure", "layer", "unit", "value"]]


def relative_changes_by_rewriting(before: pd.DataFrame, after: pd.DataFrame) -> list[dict[str, Any]]:
    """Relative change of each measure: the largest over layers, within a layer against its largest value."""
    both = before.assign(after=after["value"].to_numpy(float))
    both["moved"], both["size"] = (both["after"] - both["value"]).abs(), both["value"].abs()
    places = both.groupby(["measure", "layer"], dropna=False)[["moved", "size"]].max()
    largest = (places["moved"] / places["size"]).groupby("measure").max()
    return [{"measure": name, "change": float(value)} for name, value in largest.items()]


def output_change_without_bias_scaling(model: nn.Module, x: Tensor, factor: float = 10.0) -> float:
    """Relative change of the outputs if the first weight is multiplied and the last divided, and no bias touched."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        weights = [value for value in twin.parameters() if value.ndim > 1]
        weights[0].mul_(factor)
        weights[-1].div_(factor)
        outputs = model(x)
        return float((twin(x) - outputs).norm() / outputs.norm())


@study("petzka2019-table1", stages=table_1_stages)
def table_1(runs: Runs) -> Analysis:
    """Trained networks, each written in many ways that compute the same function, by layers and by neurons."""
    frame, parts = runs.frame(), runs.frames("changes")
    moved = pd.concat([part.assign(network=i) for i, part in enumerate(parts)], ignore_index=True)
    return Analysis(moved, table_1_answers(moved, frame["weights_alone"]), lambda figure: _draw_table_1(figure, moved))


def table_1_answers(moved: pd.DataFrame, alone: Any) -> dict[str, Answer]:
    """The numbers of the claims."""

    def worst(names: Mapping[str, str], ways: tuple[str, ...]) -> Answer:
        chosen = moved[moved["measure"].isin(list(names)) & moved["way"].isin(ways)]
        name = str(chosen.groupby("measure")["change"].max().idxmax())
        return intervals.largest_over_networks(chosen.groupby("network")["change"].max(), f"by {names[name]}")

    def least(names: Mapping[str, str], way: str) -> Answer:
        chosen = moved[moved["measure"].isin(list(names)) & (moved["way"] == way)]
        medians = chosen.groupby(["network", "measure"])["change"].median().unstack()
        return intervals.smallest_over_networks(medians.min(axis=1))

    pair = {name: OF_LAYERS[name] for name in ("kappa", "kappa_trace")}
    return {
        "layers_kept": worst(OF_LAYERS, ("layer",)),
        "neurons_kept": worst(OF_NEURONS, ("layer", "neuron")),
        "not_by_neurons": least(pair, "neuron"),
        "hessian_moves": least(OF_HESSIAN, "layer"),
        "weights_alone": intervals.largest_over_networks(alone, "equation (2) has biases: they must be scaled as well"),
    }


def _draw_table_1(figure: Figure, moved: pd.DataFrame) -> None:
    figure.set_size_inches(9.0, 3.8)
    axes = figure.subplots()
    generator = np.random.default_rng(0)
    for side, (way, colour, marker) in enumerate((("layer", "C0", "o"), ("neuron", "C1", "s"))):
        for place, name in enumerate(MEASURES):
            shown = moved[(moved["way"] == way) & (moved["measure"] == name)]["change"].clip(lower=1e-17)
            spread = place + 0.3 * (side - 0.5) + 0.15 * (generator.random(len(shown)) - 0.5)
            axes.semilogy(
                spread,
                shown,
                marker,
                ms=3,
                color=colour,
                alpha=0.5,
                rasterized=True,
                label=f"{way}s rescaled" if place == 0 else None,
            )
    axes.set_xticks(range(len(MEASURES)), list(MEASURES.values()))
    for border in (len(OF_HESSIAN), len(OF_HESSIAN | OF_LAYERS)):
        axes.axvline(border - 0.5, color="0.7", lw=0.8)
    axes.set_ylabel("relative change")
    axes.legend(fontsize=8, loc="center right")
