"""Figures 1 and 2 of Yi et al. (2019) and Lemma 5.1: which paths are a basis, counted on networks small enough."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from flatscope import BasisPaths
from flatscope.extend import Params
from flatscope.training import Store
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.theory.path_matrix import (
    Path,
    all_paths,
    basis_paths,
    lemma_exponents,
    path_matrix,
    path_sum,
    path_values,
)
from flatscope_papers.toml_files import settings_by_scale

SIZES = settings_by_scale(__name__)


def path_count_stages(scale: str) -> list[Stage]:
    """One configuration per width and number of weight matrices."""
    widths, layers = SIZES[scale]["widths"], SIZES[scale]["layers"]
    configs = [
        {"study": "basis paths", "width": width, "layers": number, "seed": 0}
        for width, number in itertools.product(widths, layers)
    ]
    return [Stage([configs], count_paths, 0)]


def random_bias_free_network(widths: list[int], seed: int) -> nn.Sequential:
    """Dense layers without biases, weights away from zero and of both signs, in float64."""
    generator = torch.Generator().manual_seed(seed)
    modules: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layer = nn.Linear(before, after, bias=False, dtype=torch.float64)
        size = 0.3 + torch.rand(after, before, generator=generator, dtype=torch.float64)
        sign = torch.randint(0, 2, (after, before), generator=generator) * 2 - 1
        with torch.no_grad():
            layer.weight.copy_(size * sign)
        modules += [layer, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


@each_trial("paths")
def count_paths(config: Config, store: Store) -> Measured:
    """Counts, ranks and identities of the path values of one network per configuration."""
    width, layers = config["width"], config["layers"]
    model = random_bias_free_network([width] * (layers + 1), config["seed"])
    generator = torch.Generator().manual_seed(config["seed"] + 1)
    x = torch.randn(20, width, generator=generator, dtype=torch.float64)
    paths = BasisPaths(model, x, "diagonal")
    params, everything = paths.params, all_paths(paths.graph, paths.params)
    on, off = (paths_with_at_most_one_skeleton_weight(everything, width, skeleton) for skeleton in (True, False))
    basis = set(basis_paths(paths))
    others = [path for path in everything if path not in basis]
    exponents = lemma_exponents(paths, everything).double()
    degrees = lemma_exponents(paths, others).clamp_min(0).sum(1)
    log, sign = paths.log_values()
    moved = sign * log.exp() * (1 + 0.1 * torch.rand(paths.count, generator=generator, dtype=torch.float64))
    metrics = {
        "paths": len(everything),
        "basis": sum(value.numel() for value in params.values()) - width * (layers - 1),
        "rank": _rank_of_path_matrix(everything, params),
        "printed": len(on),
        "corrected": len(off),
        "corrected_rank": _rank_of_path_matrix(off, params),
        "degree": int(degrees.max()),
        "lemma_error": _relative_difference(lemma_values(exponents, log, sign), path_values(everything, params)),
        "sum_error": _relative_difference(path_sum(paths, x, everything), model(x).detach()),
        "inverse_error": _relative_difference(paths.values_of(paths.params_of(moved)), moved),
        "figure_1_error": figure_1_error(config["seed"]),
    }
    return Measured(metrics)


def paths_with_at_most_one_skeleton_weight(paths: list[Path], width: int, skeleton: bool) -> list[Path]:
    """Paths with at most one weight that is (or is not) on the diagonal."""
    return [path for path in paths if sum((entry // width == entry % width) == skeleton for _, entry in path) <= 1]


def lemma_values(exponents: Tensor, log: Tensor, sign: Tensor) -> Tensor:
    """Products of basis-path values with these exponents."""
    odd = exponents.remainder(2).double() @ (sign < 0).double()
    return (1 - 2 * odd.remainder(2)) * (exponents @ log).exp()


def figure_1_error(seed: int) -> float:
    """Relative error of v_4 = v_2 v_3 / v_1 in the network of Figure 1: two inputs, one hidden node, two outputs."""
    first, last = (value.detach() for value in random_bias_free_network([2, 1, 2], seed).parameters())
    v1, v2, v3, v4 = (float(last[k, 0] * first[0, i]) for i, k in itertools.product(range(2), range(2)))
    return abs(v2 * v3 / v1 - v4) / abs(v4)


def _rank_of_path_matrix(paths: list[Path], params: Params) -> int:
    return int(torch.linalg.matrix_rank(path_matrix(paths, params)))


def _relative_difference(value: Tensor, due: Tensor) -> float:
    return float((value - due).abs().max() / due.abs().max())


@study("yi2019-basis-paths", stages=path_count_stages)
def basis_paths_study(runs: Runs) -> Analysis:
    """All paths of small networks written out: their number, their rank, and what the basis says about the rest."""
    table = runs.frame().drop(columns=["study", "seed", "device", "key"])
    return Analysis(table, path_count_answers(table), lambda figure: _draw_path_counts(figure, table))


def path_count_answers(table: pd.DataFrame) -> dict[str, Answer]:
    """The numbers of the claims."""
    hidden = (table["layers"] - 1) * table["width"]
    independent = (table["corrected"] == table["basis"]) & (table["corrected_rank"] == table["basis"])
    wrong = table[table["printed"] != table["basis"]]
    ends = ", ".join(f"{row['printed']:.0f} for {row['basis']:.0f}" for _, row in wrong.head(2).iterrows())
    return {
        "dependent": intervals.largest_over_networks(table["figure_1_error"]),
        "path_sum": intervals.largest_over_networks(table["sum_error"]),
        "count": Answer.exact(float((table["rank"] - table["basis"]).abs().max()), f"{len(table)} networks"),
        "at_most_one_skeleton": _answer_without_interval(
            table["printed"] == table["basis"],
            f"{ends} …: 'skeleton' stands where 'non-skeleton' is meant; with two nodes it is the same" if ends else "",
        ),
        "at_most_one_other": _answer_without_interval(independent),
        "bijection": intervals.largest_over_networks(table["inverse_error"]),
        "lemma": intervals.largest_over_networks(table["lemma_error"]),
        "degrees": _answer_without_interval(table["degree"] == table["layers"]),
        "others": _answer_without_interval(
            table["paths"] - table["basis"] == hidden, "(L − 1) d₁ is the number of hidden nodes H, not of such paths"
        ),
    }


def _answer_without_interval(holds: pd.Series, note: str = "") -> Answer:
    """Counting leaves nothing to chance."""
    return Answer.exact(float(holds.mean()), note="; ".join(part for part in (f"{len(holds)} networks", note) if part))


def _draw_path_counts(figure: Figure, table: pd.DataFrame) -> None:
    figure.set_size_inches(8.0, 3.8)
    axes = figure.subplots()
    places = np.arange(len(table))
    styles = {
        "paths": ("^", "C7", "all paths"),
        "printed": ("s", "C1", "at most one skeleton weight (as printed)"),
        "corrected": ("o", "C0", "at most one other weight"),
    }
    for name, (marker, colour, words) in styles.items():
        axes.semilogy(places, table[name], marker, color=colour, ms=6, label=words)
    axes.semilogy(places, table["basis"], "_", color="k", ms=16, label="m − H")
    labels = [f"{width}×{layers}" for width, layers in zip(table["width"], table["layers"], strict=True)]
    axes.set_xticks(places, labels)
    axes.set_xlabel("width × weight matrices")
    axes.set_ylabel("number of paths")
    axes.set_ylim(1, 10 ** math.ceil(math.log10(2 * float(table["paths"].max()))))
    axes.legend(fontsize=8)
