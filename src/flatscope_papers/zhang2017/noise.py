"""Figure 5 of Zhang et al. (2017): is the gradient noise of mini-batches Gaussian where training has converged?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope import Context
from flatscope.sweeps.store import Store
from flatscope.sweeps.stored_networks import stored_problem
from flatscope_papers import intervals
from flatscope_papers.claims import POSITIVE, Claim
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.reasons import with_reasons
from flatscope_papers.theory.gradient_noise import noise_at

PRINTED_ERROR = 0.000965
SHOWN = 8  # components in the figure
BLUE, ORANGE = "#0072B2", "#D55E00"
SIZES: Mapping[str, dict[str, Any]] = {
    "smoke": {
        "data": {"name": "flatscope_papers.smoke_data:digits_as_cifar10", "train_size": 40, "test_size": 0},
        "model": {"name": "all_conv", "options": {"channels": 4}},
        "train": {"lr": 0.02, "batch_size": 20, "epochs": 3},
        "look": {"batches": [1, 20], "components": 10, "draws": 40},
        "seeds": 2,
    },
    "small": {
        "data": {"name": "cifar10", "train_size": 500, "test_size": 0},
        "model": {"name": "all_conv", "options": {"channels": 16}},
        "train": {"lr": 0.02, "batch_size": 50, "epochs": 150, "stop_loss": 0.02, "evaluate_every": 5},
        "look": {"batches": [1, 10, 50, 250], "components": 100, "draws": 500},
        "seeds": 3,
    },
    "paper": {
        "data": {"name": "cifar10", "test_size": 0},
        "model": {"name": "all_conv", "options": {"channels": 38}},
        "train": {"lr": 0.01, "batch_size": 100, "epochs": 300, "lr_decay": 0.98, "stop_loss": 0.005},
        "look": {"batches": [1, 10, 100, 1000], "components": 100, "draws": 500},
        "seeds": 5,
    },
}


def stages(scale: str) -> list[Stage]:
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


CLAIMS = (
    Claim(
        "gaussian",
        "section 5.1, Figure 5",
        "components of mini-batch gradients are approximately Gaussian in the asymptotic regime",
        "share of components that D'Agostino's test (Holm's correction, 5 %) accepts, at the batch of training",
        "approximately Gaussian",
        holds=(0.9, 1.0),
        partly=(0.5, 1.0),
    ),
    Claim(
        "centre",
        "Figure 5",
        "the average of the gradients over mini-batches, the gradient of the full loss, is very small",
        "its norm over the root of the trace of the mini-batches' covariance",
        "very small",
        holds=(0.0, 0.1),
        partly=(0.0, 0.5),
    ),
    Claim(
        "batch",
        "Figure 5",
        "mini-batches must not be too small for the components of their gradients to be Gaussian",
        "share of Gaussian components at the batch of training, less the same for single samples",
        "not too small",
        holds=POSITIVE,
    ),
    Claim(
        "large_batch",
        "Figure 5",
        "mini-batches must not be too large for the components of their gradients to be Gaussian",
        "share of Gaussian components at the batch of training, less the same at the largest batch looked at",
        "not too large",
        holds=POSITIVE,
    ),
)
FEW_LEFT = (
    "a network that fits its samples has a gradient made of a few samples that still have a loss: their pulls do "
)
FEW_LEFT += "not cancel, so that the mean is not small beside the noise"
LIMIT = (
    "a mean of more samples drawn independently is nearer to a Gaussian, by the central limit theorem that the paper "
)
LIMIT += "cites; only a batch of all samples, without replacement, has no noise at all"
SINGLE = "the paper names neither network nor data: the all-convolutional network on CIFAR-10, momentum 0.9"


@study(
    "zhang2017-fig5",
    figure="Figure 5",
    title="Histograms of components of mini-batch gradients after training",
    claims=CLAIMS,
    stages=stages,
    deviations={
        "small": (SINGLE, "500 images, until the loss is 0.02: a training error of 0.000965 cannot be had with so few"),
        "paper": (
            SINGLE,
            "38 channels (50,664 weights), so that the 50,000 images can be fitted; until the loss is 0.005",
        ),
    },
    paper_cost="5 networks of 50,664 weights, up to 300 epochs of 50,000 images.",
)
def figure_5(runs: Runs) -> Analysis:
    """Mini-batch gradients at fixed weights: histograms of some components beside Gaussians of the same moments."""
    found = runs.stored()
    own = [stored.config["network"]["train"]["batch_size"] for stored in found]
    tables = [stored.frame("batches").set_index("batch") for stored in found]
    here = [table.loc[batch] for table, batch in zip(tables, own, strict=True)]
    alone, largest = [table.loc[1] for table in tables], [table.loc[table.index.max()] for table in tables]
    kurtosis = float(np.median([row["median_kurtosis"] for row in here]))
    note = (
        f"median excess kurtosis {kurtosis:.2g} (κ/b, exact): a few samples that still have a loss make up the gradient"
    )
    estimates = {
        "gaussian": intervals.mean([row["gaussian"] for row in here], note, bounds=(0, 1)),
        "centre": intervals.mean([row["signal"] for row in here], bounds=(0, math.inf)),
        "batch": intervals.paired_difference([r["gaussian"] for r in here], [r["gaussian"] for r in alone]),
        "large_batch": intervals.paired_difference([r["gaussian"] for r in here], [r["gaussian"] for r in largest]),
    }
    errors = ", ".join(f"{stored.metrics['train_error']:.4f}" for stored in found)
    parts = [stored.frame("batches").assign(network=number) for number, stored in enumerate(found)]
    return Analysis(
        pd.concat(parts, ignore_index=True),
        with_reasons(estimates, CLAIMS, runs.scale, {"centre": FEW_LEFT, "large_batch": LIMIT}),
        lambda figure: _draw(figure, found[0].frame("components"), found[0].metrics["train_error"], own[0]),
        (f"training errors {errors}",),
    )


def _draw(figure: Figure, components: pd.DataFrame, error: float, batch: int) -> None:
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
