"""Statements of Zhang et al. (2017) on random problems: Corollary 1, Propositions 2 and 3, open paths, numbers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from flatscope.training import Store
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.theory.linear import descend, largest_stable_step, logistic_descent, minimum_norm
from flatscope_papers.theory.polynomial_operator import monomials
from flatscope_papers.theory.robust_weights import (
    first_order_path_change,
    largest_robust_path_value,
    sides_of_robust_inequality,
)
from flatscope_papers.theory.sample_sizes import log10_size_ratio, multitask_gain
from flatscope_papers.toml_files import settings_by_scale

SIZES = settings_by_scale(__name__)
LAYERS, TOLERANCE = 8, 0.1  # of Section 9.6.1
TASKS = 1000  # classes of ImageNet


def statement_stages(scale: str) -> list[Stage]:
    """Random problems."""
    size = SIZES[scale]
    configs = [{"study": "statements", "seed": seed, "steps": size["steps"]} for seed in range(size["problems"])]
    return [Stage([[config] for config in configs], try_statements, 0)]


@each_trial("statements")
def try_statements(config: Config, store: Store) -> Measured:
    """One random problem for each of the statements."""
    generator = torch.Generator().manual_seed(config["seed"])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    steps, X, y = config["steps"], normal(10, 40), normal(10)
    direct, single = (
        descend(X, y, 0.9 * largest_stable_step(X, one) / 2, steps, stochastic=one) for one in (False, True)
    )
    solution = minimum_norm(X, y)
    features, labels = monomials(normal(12, 6) / 3, 2), torch.sign(normal(12))  # 28 monomials: random labels fit
    fitted = descend(features, labels, 0.9 * largest_stable_step(features) / 2, 20 * steps)
    direction = normal(5)
    margins = normal(30, 5)
    plane, normal_to = normal(30, 2), normal(2)
    classes = torch.sign(plane @ normal_to)
    apart = plane + classes[:, None] * normal_to / normal_to.norm()
    w, rho = normal(5), 0.3
    sides = sides_of_robust_inequality(w, margins, margins @ direction, rho)
    triples = torch.rand(1000, 3, generator=generator, dtype=torch.float64)
    epsilon = first_order_path_change(
        triples, torch.ones(3, dtype=torch.float64)
    ).sqrt()  # of unit changes, so that Δp = ε²
    products = triples.prod(1) / torch.tensor([largest_robust_path_value(float(one), 3) for one in epsilon])
    return Measured(
        {
            "gd": float((direct.weights - solution).norm() / solution.norm()),
            "sgd": float((single.weights - solution).norm() / solution.norm()),
            "polynomial": float((fitted.weights - fitted.limit).norm() / fitted.limit.norm()),
            "random_labels": float((torch.sign(features @ fitted.weights) != labels).double().mean()),
            "svm": logistic_descent(apart, classes, steps=10 * steps).cosines[-1],
            "printed_direction": float(sides["robust"] <= sides["ridge"]),
            "sandwich": max(sides["ridge"] / sides["robust"], sides["robust"] / sides["above"]),
            "open_path": float(products.max()),
            "below_epsilon": float((triples <= epsilon[:, None]).all(1).double().mean()),
        }
    )


@study("zhang2017-statements", stages=statement_stages)
def statements_study(runs: Runs) -> Analysis:
    """Random linear and polynomial regressions, separable classes and paths; numbers of the text computed again."""
    table = runs.frame().drop(columns=["study", "device", "key"])
    return Analysis(table, statement_answers(table), lambda figure: _draw_statements(figure, table))


def statement_answers(table: pd.DataFrame) -> dict[str, Answer]:
    """The numbers of the claims."""
    sizes = log10_size_ratio(0.1, 10_000, form="sizes")
    return {
        "minimum_norm": intervals.largest_over_networks(table[["gd", "sgd"]].max(axis=1), of="regressions"),
        "svm": intervals.smallest_over_networks(table["svm"], "approached like 1/log t only", of="problems"),
        "proposition_2": intervals.share_of_cases(table["printed_direction"] > 0, "the inequality goes the other way"),
        "sandwich": intervals.largest_over_networks(table["sandwich"], of="problems"),
        "polynomial": intervals.largest_over_networks(table["polynomial"], of="regressions"),
        "random_labels": intervals.largest_over_networks(table["random_labels"], of="regressions"),
        "open_path": intervals.largest_over_networks(table["open_path"], of="problems"),
        "open_path_weights": intervals.mean_over_runs(
            table["below_epsilon"], "Δp ≤ ε² limits the product and not each weight"
        ),
        "tolerance": Answer.exact((1 + TOLERANCE) ** LAYERS),
        "tasks": Answer.exact(
            multitask_gain(TASKS, 0.0, 1.0), "where the part of each task costs nothing: √1000 = 31.6"
        ),
        "shallow": Answer.exact(
            log10_size_ratio(0.1, 10_000), f"with the sizes that (26) comes from it is {sizes:.0f}"
        ),
    }


def _draw_statements(figure: Figure, table: pd.DataFrame) -> None:
    axes = figure.subplots()
    for place, name in enumerate(("gd", "sgd", "polynomial")):
        values = np.log10(table[name].clip(lower=1e-17))
        axes.plot(np.full(len(table), place), values, "o", ms=3)
    axes.set_xticks(range(3), ["gradient descent", "SGD", "polynomial coefficients"])
    axes.set_ylabel("log10 of the distance to the minimum-norm solution")
    axes.axhline(math.log10(1e-6), color="0.6", lw=0.8)
