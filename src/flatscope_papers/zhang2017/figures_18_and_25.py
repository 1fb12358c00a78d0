"""Figures 18 and 25 of Zhang et al. (2017): what their diagrams count, counted.

Both figures are drawings of networks. What the captions and the text around them say in numbers is exact, so each
claim is decided by counting: paths of the binary tree, monomials, independent polynomials, units and levels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flatscope.training import Store
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.theory.polynomial_operator import BinaryTree, monomials, ridge_rank

INPUTS, DEGREE = 8, 10
SMALL = (3, 4)  # inputs and degree of the polynomials whose rank is computed
BLUE = "#0072B2"

Support = frozenset[tuple[int, ...]]


@each_trial("counting")
def count(config: Config, store: Store) -> Measured:
    """Count everything that the two figures and the text around them name."""
    d, k = config["inputs"], config["degree"]
    tree = BinaryTree(round(math.log2(d)))
    metrics = {
        "paths_one_unit": path_count(tree),
        "paths_two_units": path_count(BinaryTree(round(math.log2(d)), units=2)),
        "monomials": sum(1 for _ in monomial_exponents(d, k)),
        "levels": len(tree.weights),
        "nodes": sum(len(weight) for weight in tree.weights),
        "homogeneous": sum(1 for chosen in monomial_exponents(d, k) if sum(chosen) == k),
        "composed_degree": degree_of_composition(k, 2),
        **ridge_function_ranks(*SMALL),
    }
    supports = pd.DataFrame({"inputs": n, "tree": len(tree_support(n)), "full": math.comb(2 * n, n)} for n in (2, 4, 8))
    return Measured(metrics, frames={"supports": supports})


def path_count(tree: BinaryTree) -> int:
    """Paths from the inputs to the output."""
    return count_live_paths(tree_with_unit_weights(tree))


def tree_with_unit_weights(tree: BinaryTree) -> BinaryTree:
    """The tree with all its weights put to one."""
    with torch.no_grad():
        for weight in tree.weights:
            weight.fill_(1.0)
    return tree


def count_live_paths(tree: BinaryTree) -> int:
    """Paths without a weight of zero, if all other weights are one: what comes out if every input is one."""
    with torch.no_grad():
        return round(float(tree(torch.ones(1, 2 ** len(tree.weights)))))


def paths_lost_by_unit(inputs: int) -> list[int]:
    """Of each unit of the tree with one unit per node: the paths that are lost when its two weights are put to zero."""
    depth = round(math.log2(inputs))
    lost = []
    for level in range(depth):
        for unit in range(len(BinaryTree(depth).weights[level])):
            tree = tree_with_unit_weights(BinaryTree(depth))
            with torch.no_grad():
                tree.weights[level][unit] = 0.0
            lost.append(inputs - count_live_paths(tree))
    return lost


def monomial_exponents(variables: int, degree: int) -> Iterable[tuple[int, ...]]:
    """Exponents of every monomial of at most that degree."""
    if variables == 0:
        yield ()
        return
    for first in range(degree + 1):
        for rest in monomial_exponents(variables - 1, degree - first):
            yield (first, *rest)


def degree_of_composition(degree: int, layers: int) -> int:
    """Degree of t ↦ p(p(…)) for p of the given degree with coefficients of one, multiplied out."""
    base = np.polynomial.Polynomial(np.ones(degree + 1))
    composed = base
    for _ in range(layers - 1):
        composed = base(composed)
    return int(composed.degree())


def ridge_function_ranks(dimension: int, degree: int) -> dict[str, int]:
    """Numbers of independent functions (⟨w, x⟩ + b)^k, and ⟨w, x⟩^k, with enough directions or one less.

    An offset b is one more coordinate whose input is always one: (⟨w, x⟩ + b)^k is homogeneous in d + 1 variables.
    """
    with_offset, without = math.comb(dimension + degree, degree), math.comb(dimension - 1 + degree, degree)
    points = torch.randn(2 * with_offset, dimension, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {
        "ridge_with_offset": ridge_rank(dimension + 1, degree, with_offset),
        "ridge_with_offset_one_less": ridge_rank(dimension + 1, degree, with_offset - 1),
        "ridge_without_offset": ridge_rank(dimension, degree, 2 * with_offset),
        "dimension_up_to_degree": int(torch.linalg.matrix_rank(monomials(points, degree), rtol=1e-10)),
        "dimension_of_degree": int(torch.linalg.matrix_rank(monomials(points, degree, homogeneous=True), rtol=1e-10)),
        "expected_with_offset": with_offset,
        "expected_without": without,
    }


def tree_support(inputs: int) -> Support:
    """Monomials of a binary tree whose nodes are polynomials of degree two, of two variables, with all coefficients."""
    if inputs == 1:
        return frozenset({(1,)})
    half = tree_support(inputs // 2)
    left = [frozenset(m + (0,) * (inputs // 2) for m in half), frozenset((0,) * (inputs // 2) + m for m in half)]
    support: set[tuple[int, ...]] = {(0,) * inputs} | left[0] | left[1]
    for first, second in itertools.combinations_with_replacement(left, 2):
        support |= {tuple(a + b for a, b in zip(m, n, strict=True)) for m in first for n in second}
    return frozenset(support)


def counting_stages(scale: str) -> list[Stage]:
    """One trial, the same at every scale."""
    return [Stage([[{"study": "counts", "inputs": INPUTS, "degree": DEGREE}]], count, 0)]


@study("zhang2017-fig25", stages=counting_stages)
def figure_25(runs: Runs) -> Analysis:
    """Paths, monomials, levels, nodes and ranks of the networks drawn in Figures 18 and 25, counted one by one."""
    (stored,) = runs.stored()
    m, supports = stored.metrics, stored.frame("supports").set_index("inputs")
    less = f"one direction less spans {m['ridge_with_offset_one_less']}"
    tree, full = supports["tree"], supports["full"]
    answers = {
        "paths": Answer.exact(m["paths_one_unit"]),
        "paths2": Answer.exact(m["paths_two_units"]),
        "switched": Answer.exact(min(paths_lost_by_unit(INPUTS))),
        "monomials": Answer.exact(m["monomials"]),
        "units": Answer.exact(m["ridge_with_offset"], less),
        "levels": Answer.exact(m["levels"]),
        "nodes": Answer.exact(m["nodes"]),
        "degree": Answer.exact(
            m["composed_degree"],
            "degrees multiply: 10^l, not 10 × l; the same slip as in zhang2017-fig21, counted there as well",
        ),
        "dimension": Answer.exact(
            m["dimension_up_to_degree"],
            "the printed count is that of the homogeneous polynomials; Figure 25 has C(d+k, k)",
        ),
        "power": Answer.exact(m["dimension_of_degree"], "homogeneous polynomials have dimension C(d − 1 + i, i)"),
        "locality": Answer.exact(float(tree[8] / full[8]), f"{tree[8]:,} of {full[8]:,}"),
        "sparse": Answer.exact(
            float(tree[8] / tree[4]),
            f"{tree[4]} of {full[4]} monomials with 4 inputs, {tree[8]:,} of {full[8]:,} with 8: sparse, but it is the "
            "number of weights, not of monomials, that grows linearly",
        ),
    }
    table = pd.DataFrame({"quantity": list(m), "count": list(m.values())})
    return Analysis(table, answers, lambda figure: _draw_trees(figure, m))


def _draw_trees(figure: Figure, m: dict[str, Any]) -> None:
    figure.set_size_inches(8.0, 3.6)
    shallow, tree = figure.subplots(1, 2)
    _draw_tree_edges(
        shallow, [[(x, 0.0) for x in range(INPUTS)], [(x, 1.0) for x in range(INPUTS)], [(3.5, 2.0)]], full=True
    )
    shallow.set_title(f"a) shallow: N = {m['monomials']:,} units of degree {DEGREE}", fontsize=9)
    shallow.text(3.5, 0.83, "…", ha="center", fontsize=14)
    levels = [[(x, 0.0) for x in np.arange(INPUTS, dtype=float)]]
    while len(levels[-1]) > 1:
        below = levels[-1]
        levels.append([((a[0] + b[0]) / 2, a[1] + 1) for a, b in zip(below[::2], below[1::2], strict=True)])
    _draw_tree_edges(tree, levels, full=False)
    words = f"b) tree: {m['levels']} levels, {m['nodes']} nodes, {m['paths_one_unit']} paths"
    tree.set_title(f"{words}\n(two units per node: {m['paths_two_units']} paths)", fontsize=9)
    for axes in (shallow, tree):
        axes.set_axis_off()
        for x in range(INPUTS):
            axes.text(x, -0.28, f"$x_{x + 1}$", ha="center", fontsize=8)


def _draw_tree_edges(axes: Axes, levels: list[list[tuple[float, float]]], *, full: bool) -> None:
    for below, above in itertools.pairwise(levels):
        for number, (x, y) in enumerate(below):
            for u, v in above if full else [above[number // 2]]:
                axes.plot([x, u], [y, v], color="0.75", lw=0.6, zorder=1)
    for x, y in itertools.chain.from_iterable(levels):
        axes.plot(x, y, "o", color=BLUE, ms=7, zorder=2)
