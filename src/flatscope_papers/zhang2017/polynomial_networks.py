"""Figures 21 to 24 of Zhang et al. (2017): the same networks with a polynomial of degree 10 in place of every ReLU.

Beyond the interval of its fit a polynomial of degree 10 explodes, and networks that use it there diverge or stay at
chance. So it is constant beyond [−5, 5]; the paper does not say how it trained its polynomial networks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from flatscope.training import build
from flatscope_papers import curves, intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.theory.polynomial import PolynomialActivation, polynomial_twin
from flatscope_papers.zhang2017.all_conv_networks import SIZES, all_conv_stage, networks_at_end, networks_by_epoch
from flatscope_papers.zhang2017.errors_by_size import (
    error_curve_answers,
    errors_by_size_analysis,
    natural_labels_of_table,
    random_labels_of_table,
)
from flatscope_papers.zhang2017.errors_by_width import errors_by_width_of_table

RADIUS, DEGREE = 5.0, 10


def _largest_size_stages(scale: str) -> list[Stage]:
    size = SIZES[scale]
    networks = [(size["base"], size["train_sizes"][-1])]
    both = [
        unit for polynomial in (False, True) for unit in all_conv_stage(scale, networks, polynomial=polynomial).units
    ]
    return [Stage(both, gpus=0.25)]


def degree_of_polynomial_network() -> int:
    """Degree of the network with polynomials in place of its ReLUs and no clip: a product, not a sum."""
    twin = polynomial_twin(build("all_conv", channels=2), torch.zeros(2, 3, 32, 32), degree=DEGREE, radius=RADIUS)
    assert twin.degree is not None  # nothing but polynomials is left
    return twin.degree


def operation_overhead_of_polynomials(channels: int = 16, side: int = 32) -> float:
    """Share by which polynomials of degree 10 raise the operations of a forward pass of the paper's network.

    A multiplication and an addition per weight and output of a convolution, one comparison per ReLU, ten
    multiplications and ten additions (Horner's rule) per polynomial.
    """
    network = build("all_conv", channels=channels, input_shape=(3, side, side))
    outputs = {"convolutions": 0, "activations": 0}

    def count(module: nn.Module, _: Any, output: Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            outputs["convolutions"] += 2 * output.numel() * module.weight[0].numel()
        elif isinstance(module, nn.ReLU):
            outputs["activations"] += output.numel()

    hooks = [part.register_forward_hook(count) for part in network.modules()]
    with torch.no_grad():
        network(torch.zeros(1, 3, side, side))
    for hook in hooks:
        hook.remove()
    relus = outputs["activations"]
    return relus * (2 * DEGREE - 1) / (outputs["convolutions"] + relus)


def polynomial_similarity_answers(along: pd.DataFrame) -> dict[str, Answer]:
    """Estimates of the claims of Figure 21 from curves with columns polynomial, seed, epoch and the errors."""
    last = along.sort_values("epoch").groupby(["polynomial", "seed"]).last()
    differences = {
        key: intervals.paired_difference(last.loc[True, name], last.loc[False, name])
        for key, name in (("training", "train_error"), ("testing", "test_error"))
    }
    note = "degrees multiply when polynomials are composed: 10^l, so the printed 10·l is a slip"
    counted = "counted by Horner's rule; most of it in the first layer, whose units have 27 weights each"
    return {
        **differences,
        "degree": Answer.exact(float(degree_of_polynomial_network()), note),
        "overhead": Answer.exact(operation_overhead_of_polynomials(), counted),
    }


@study("zhang2017-fig21", stages=_largest_size_stages)
def figure_21(runs: Runs) -> Analysis:
    """The network of Figure 1 on its largest training set: ReLU and polynomial from the same starting weights."""
    along = networks_by_epoch(runs)
    return Analysis(along, polynomial_similarity_answers(along), lambda figure: _draw_figure_21(figure, along))


def _draw_figure_21(figure: Figure, along: pd.DataFrame) -> None:
    figure.set_size_inches(8.4, 3.6)
    panels: Any = figure.subplots(1, 2)
    x = torch.linspace(-7, 7, 400, dtype=torch.float64)
    for outside, style, words in (("clip", "-", "degree 10, as trained"), ("polynomial", ":", "degree 10, unclipped")):
        fitted = PolynomialActivation(-RADIUS, RADIUS, DEGREE, outside, dtype=torch.float64)
        panels[0].plot(x, fitted(x), style, color=curves.TEST, label=words)
    panels[0].plot(x, x.clamp_min(0), "--", color="black", linewidth=1, label="ReLU")
    panels[0].set(ylim=(-0.5, 7), xlabel="pre-activation", ylabel="activation")
    panels[0].legend()
    for polynomial, style in ((False, "--"), (True, "-")):
        kind = "polynomial" if polynomial else "ReLU"
        for name, (words, colour, _) in curves.ERRORS.items():
            drawn = curves.runs_as_columns(along[along["polynomial"] == polynomial], "epoch", name, carry=True)
            curves.draw_band(panels[1], drawn, colour, alpha=0.12, linestyle=style, label=f"{kind}, {words}")
    panels[1].set(xlabel="epoch", ylabel="error (share of samples)")
    panels[1].legend()


def _natural_label_stages(scale: str) -> list[Stage]:
    size = SIZES[scale]
    return [all_conv_stage(scale, [(size["base"], n) for n in size["train_sizes"]], polynomial=True)]


def _random_label_stages(scale: str) -> list[Stage]:
    size = SIZES[scale]
    networks = [(size["base"], n) for n in size["train_sizes"]]
    return [all_conv_stage(scale, networks, random=True, polynomial=True)]


def _stages_by_width(scale: str) -> list[Stage]:
    size = SIZES[scale]
    return [
        all_conv_stage(scale, [(c, size["fixed_size"]) for c in size["channels"]], polynomial=True, train="wide_train")
    ]


def figure_22_of_table(points: pd.DataFrame, scale: str) -> Analysis:
    """The claims of Figure 1 and one more."""
    analysis = natural_labels_of_table(points, scale)
    return replace(analysis, answers={**analysis.answers, "more_data": error_curve_answers(points)["more_data"]})


def figure_24_of_table(points: pd.DataFrame, scale: str) -> Analysis:
    """The claims of Figure 3 but for the place of the best test error."""
    analysis = errors_by_width_of_table(points, scale)
    known = {key: value for key, value in analysis.answers.items() if key != "best_at_boundary"}
    return replace(analysis, answers=known)


@study("zhang2017-fig22", stages=_natural_label_stages, from_table=figure_22_of_table)
def figure_22(runs: Runs) -> Analysis:
    """Figure 1 with polynomials of degree 10 in place of the ReLUs."""
    return figure_22_of_table(networks_at_end(runs), runs.scale)


@study("zhang2017-fig23", stages=_random_label_stages, from_table=random_labels_of_table)
def figure_23(runs: Runs) -> Analysis:
    """Figure 2 with polynomials of degree 10 in place of the ReLUs."""
    return errors_by_size_analysis(runs, random=True)


@study("zhang2017-fig24", stages=_stages_by_width, from_table=figure_24_of_table)
def figure_24(runs: Runs) -> Analysis:
    """Figure 3 with polynomials of degree 10 in place of the ReLUs."""
    return figure_24_of_table(networks_at_end(runs), runs.scale)
