"""Figure 5 of Zhang et al. (2017): is the gradient noise of mini-batches Gaussian where training has converged?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope import Context
from flatscope.training import Store, stored_problem
from flatscope_papers import intervals
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.theory.mini_batch_noise import noise_at
from flatscope_papers.toml_files import settings_by_scale

PRINTED_ERROR = 0.000965
SHOWN = 8  # components in the figure
BLUE, ORANGE = "#0072B2", "#D55E00"
SIZES = settings_by_scale(__name__)


def gradient_component_stages(scale: str) -> list[Stage]:
    """The networks, then their gradients."""
    size = SIZES[scale]
    networks = [
        {
            "data": size["data"],
            "model": {**size["model"], "seed": seed},
            "train": {**size["train"], "momentum": 0.9, "seed": seed},
        }
        for seed in range(size["seeds"])
    ]
    looks = [[{"study": "gradient noise", "network": network, **size["look"]}] for network in networks]
    return [Stage([networks]), Stage(looks, look_at_noise, 0.5)]


@each_trial("gradient noise")
def look_at_noise(config: Config, store: Store) -> Measured:
    """Mini-batch gradients of a stored network: tests of normality at every batch size, and some of the components."""
    problem = stored_problem(store, config["network"], device=config.get("device"))
    context = Context(problem)
    noise = noise_at(context, config["components"])
    batch, draws = config["network"]["train"]["batch_size"], config["draws"]
    rows = []
    for size in config["batches"]:
        tested = noise.normality(size, draws)
        kurtosis = noise.kurtosis(size)[noise.components]
        rows.append(
            {
                "batch": size,
                "gaussian": 1 - tested.share_rejected,
                "median_kurtosis": float(kurtosis.nanmedian()),
                "signal": float(noise.mean.norm()) / math.sqrt(noise.covariance_trace(size)),
            }
        )
    drawn = noise.mini_batches(batch, draws)
    varying = (drawn.std(0) > 0).nonzero()[:SHOWN, 0]
    names = [f"w{int(noise.components[place])}" for place in varying]
    shown = pd.DataFrame(drawn[:, varying].numpy(), columns=names)
    metrics = {"train_error": context.scores().error, "gradient_norm": float(noise.mean.norm())}
    return Measured(metrics, frames={"batches": pd.DataFrame(rows), "components": shown})


@study("zhang2017-fig5", stages=gradient_component_stages)
def figure_5(runs: Runs) -> Analysis:
    """Mini-batch gradients at fixed weights: histograms of some components beside Gaussians of the same moments."""
    gradients = runs.stored()
    batch_sizes = [stored.config["network"]["train"]["batch_size"] for stored in gradients]
    tables = [stored.frame("batches").set_index("batch") for stored in gradients]
    here = [table.loc[batch] for table, batch in zip(tables, batch_sizes, strict=True)]
    alone, largest = [table.loc[1] for table in tables], [table.loc[table.index.max()] for table in tables]
    kurtosis = float(np.median([row["median_kurtosis"] for row in here]))
    note = (
        f"median excess kurtosis {kurtosis:.2g} (κ/b, exact): a few samples that still have a loss make up the gradient"
    )
    answers = {
        "gaussian": intervals.mean_over_runs([row["gaussian"] for row in here], note, bounds=(0, 1)),
        "centre": intervals.mean_over_runs([row["signal"] for row in here], bounds=(0, math.inf)),
        "batch": intervals.paired_difference([r["gaussian"] for r in here], [r["gaussian"] for r in alone]),
        "large_batch": intervals.paired_difference([r["gaussian"] for r in here], [r["gaussian"] for r in largest]),
    }
    errors = ", ".join(f"{stored.metrics['train_error']:.4f}" for stored in gradients)
    parts = [stored.frame("batches").assign(network=number) for number, stored in enumerate(gradients)]
    return Analysis(
        pd.concat(parts, ignore_index=True),
        answers,
        lambda figure: _draw_gradient_components(
            figure, gradients[0].frame("components"), gradients[0].metrics["train_error"], batch_sizes[0]
        ),
        (f"training errors {errors}",),
    )


def _draw_gradient_components(figure: Figure, components: pd.DataFrame, error: float, batch: int) -> None:
    figure.set_size_inches(9.0, 4.2)
    figure.suptitle(f"Training error: {error:.6f} (paper: {PRINTED_ERROR}); mini-batches of {batch}", fontsize=10)
    panels: Any = figure.subplots(2, SHOWN // 2)
    for axes in np.ravel(panels)[len(components.columns) :]:
        axes.set_axis_off()
    for axes, name in zip(np.ravel(panels), components.columns, strict=False):
        values = components[name].to_numpy()
        axes.hist(values, bins=30, density=True, color=BLUE, alpha=0.5)
        grid = np.linspace(values.min(), values.max(), 200)
        width = values.std()
        axes.plot(
            grid, np.exp(-0.5 * ((grid - values.mean()) / width) ** 2) / (width * math.sqrt(2 * math.pi)), color=ORANGE
        )
        axes.set_xlabel(f"∂V/∂{name}", fontsize=8)
        axes.tick_params(labelsize=6)
        axes.set_yticks([])
        axes.set_ylabel("density", fontsize=7)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
