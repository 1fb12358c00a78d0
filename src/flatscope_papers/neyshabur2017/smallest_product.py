"""Section 2.2 of Neyshabur et al. (2017): the path norm as the smallest product of layer norms over rescalings."""

from __future__ import annotations

import math

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from flatscope import Problem, measure
from flatscope.training import Store, build
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.toml_files import settings_by_scale

SIZES = settings_by_scale(__name__)
WIDTHS = (4, 6, 5, 3)
NORM = "l2_path_norm"  # of order p by its option


def smallest_product_stages(scale: str) -> list[Stage]:
    """Random networks."""
    size = SIZES[scale]
    configs = [
        {"study": "smallest product", "seed": seed, "p": p, "draws": size["draws"]}
        for seed in range(size["networks"])
        for p in (1.0, 2.0)
    ]
    return [Stage([[config] for config in configs], products, 0)]


@each_trial("products")
def products(config: Config, store: Store) -> Measured:
    """Products of ℓ_{p,∞} norms of one random network over rescalings, beside its path norms."""
    p, generator = config["p"], torch.Generator().manual_seed(config["seed"])
    model = build("mlp", seed=config["seed"], widths=WIDTHS, bias=False).double()
    weights = [value.detach() for value in model.parameters()]
    problem = Problem(model, train=(torch.randn(4, WIDTHS[0], dtype=torch.float64), torch.zeros(4, dtype=torch.long)))
    norms = {
        outputs: measure(problem, NORM, options={NORM: {"p": p, "outputs": outputs}})[NORM]
        for outputs in ("sum", "max")
    }
    drawn = [
        product_of_largest_unit_norms(
            rescaled_weights(weights, [torch.randn(len(w), generator=generator).double().exp() for w in weights[:-1]]),
            p,
        )
        for _ in range(config["draws"])
    ]
    return Measured(
        {
            "least_drawn": min(drawn) / norms["max"],
            "greedy": product_of_largest_unit_norms(weights_with_smallest_product(weights, p), p) / norms["max"],
            "all_outputs": norms["sum"] / norms["max"],
        }
    )


def product_of_largest_unit_norms(weights: list[Tensor], p: float) -> float:
    """Product over the layers of the largest ℓp norm of the weights into a unit."""
    return math.prod(float(w.norm(p, dim=1).max()) for w in weights)


def rescaled_weights(weights: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
    """The same function, each hidden unit's incoming weights times its factor, its outgoing ones over it."""
    moved = [w.clone() for w in weights]
    for layer, factor in enumerate(factors):
        moved[layer] *= factor[:, None]
        moved[layer + 1] /= factor
    return moved


def weights_with_smallest_product(weights: list[Tensor], p: float) -> list[Tensor]:
    """Every hidden unit in turn with incoming weights of norm one: where the product is smallest."""
    moved = [w.clone() for w in weights]
    for layer in range(len(moved) - 1):
        norms = moved[layer].norm(p, dim=1)
        moved[layer] /= norms[:, None]
        moved[layer + 1] *= norms
    return moved


@study("neyshabur2017-smallest-product", stages=smallest_product_stages)
def smallest_product(runs: Runs) -> Analysis:
    """Random networks of three layers, under random rescalings and the one that makes the product smallest."""
    table = runs.frame()[["seed", "p", "least_drawn", "greedy", "all_outputs"]]
    return Analysis(table, smallest_product_answers(table), lambda figure: _draw_smallest_product(figure, table))


def smallest_product_answers(table: pd.DataFrame) -> dict[str, Answer]:
    """The numbers of the claims."""
    return {
        "never_below": intervals.smallest_over_networks(table["least_drawn"]),
        "attained": intervals.largest_over_networks((table["greedy"] - 1).abs()),
        "all_outputs": intervals.smallest_over_networks(
            table["all_outputs"], "the norm over the paths to all outputs is larger"
        ),
    }


def _draw_smallest_product(figure: Figure, table: pd.DataFrame) -> None:
    axes = figure.subplots()
    for place, column in enumerate(("greedy", "least_drawn", "all_outputs")):
        axes.semilogy([place] * len(table), table[column], "o", ms=3)
    axes.set_xticks(range(3), ["smallest product", "best random rescaling", "path norm of all outputs"])
    axes.set_ylabel("over the path norm of the largest output")
