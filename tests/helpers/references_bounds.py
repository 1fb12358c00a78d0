"""For each bound a naive twin of the same name: the printed formula with its errata, by loops in float64.

A twin takes a `Dense` network, δ, the seed and the bound's options and gives a number or {norm: number}; where an
assumption fails it raises `AssumptionFailsError`. Those with noise are in references_bounds_noise.py. Nothing here
imports a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from references import Dense
from references_norms import l1_inf_norm, l1_path_norm, l2_norm, l2_path_norm, spectral_norm
from references_pac_bayes import dense_chain
from references_sharpness import _folded
from torch import Tensor

import flatscope as fs


class AssumptionFailsError(Exception):
    """An assumption of the bound does not hold."""


BOUND_TWINS: dict[str, Callable[..., Any]] = {}


def bound_twin(function: Callable[..., Any]) -> Callable[..., Any]:
    BOUND_TWINS[function.__name__] = function
    return function


def refuse_unless(holds: bool, what: str) -> None:
    if not holds:
        raise AssumptionFailsError(what)


def sizes_of(dense: Dense) -> dict[str, int]:
    """Number of entries of every parameter that is trained."""
    return {name: p.numel() for name, p in dense.tiny.model.named_parameters() if p.requires_grad}


def n_classes(dense: Dense) -> int:
    refuse_unless(dense.tiny.loss != "mse", "class labels")
    return max(2, dense.outputs().shape[1])


def margins_of(dense: Dense) -> list[float]:
    """Output of the label less the largest other one; of a single output, which stands for class 1 beside 0."""
    if dense.outputs().shape[1] > 1:
        return [float(m) for m in dense.margins]
    signs = [1 if int(y) == 1 else -1 for y in dense.tiny.y.flatten().tolist()]
    return [sign * float(z) for sign, z in zip(signs, dense.outputs(), strict=True)]


def margin_of(dense: Dense, epsilon: float) -> float:
    """The k-th smallest margin, k = ⌈ε n⌉."""
    ordered = sorted(margins_of(dense))
    return ordered[max(1, math.ceil(round(epsilon * len(ordered), 9))) - 1]


def wrong(outputs: Tensor, labels: Tensor) -> Tensor:
    """1 where another class has as large an output as the label's; one output counts for class 1, against it for 0."""
    if outputs.shape[1] == 1:
        outputs = torch.cat([torch.zeros_like(outputs), outputs], dim=1)
    own = outputs[torch.arange(len(labels)), labels.long()]
    larger = torch.stack([(outputs[:, k] >= own) & (labels != k) for k in range(outputs.shape[1])])
    return larger.any(0).double()


# Counting


@bound_twin
def parameter_counting(dense: Dense, delta: float, seed: int, bits: int = 32) -> float:
    """Zhang et al. (14): n = (2/ε²)(kW log 2 + log(2/δ)), for ε."""
    total = sum(sizes_of(dense).values()) * bits * math.log(2) + math.log(2 / delta)
    return math.sqrt(2 * total / len(dense.tiny.x))


@bound_twin
def covering(dense: Dense, delta: float, seed: int, radius: float = 0.0, epsilon: float = 0.01) -> float:
    """√(d log(3 G_T / ε) / n)."""
    if radius == 0:
        refuse_unless(bool(dense.tiny.initial), "weights before training")
        squares = 0.0
        for name in sizes_of(dense):
            for now, then in zip(dense.params[name].flatten(), dense.tiny.initial[name].flatten(), strict=True):
                squares += float(now - then) ** 2
        radius = math.sqrt(squares)
    refuse_unless(0 < epsilon < radius, "0 < ε < G_T")
    return math.sqrt(sum(sizes_of(dense).values()) * math.log(3 * radius / epsilon) / len(dense.tiny.x))


@bound_twin
def multitask(dense: Dense, delta: float, seed: int, tasks: int = 10, bits: int = 32) -> float:
    """(61): the last layer is the part H of each task, all before it the shared part G."""
    refuse_unless(bool(dense.tiny.layers), "a layer")
    last = f"{dense.tiny.layers[-1]}."
    specific = shared = 0.0
    for name, size in sizes_of(dense).items():
        specific += size * bits * math.log(2) * name.startswith(last)
        shared += size * bits * math.log(2) * (not name.startswith(last))
    return math.sqrt(specific + (shared + math.log(1 / delta)) / tasks) / math.sqrt(2 * len(dense.tiny.x))


@bound_twin
def robustness(dense: Dense, delta: float, seed: int, levels: int = 7) -> float:
    """(19) with cells around the first 1, 2, 4, … test inputs times labels; (K, ε(S)) by comparing all pairs."""
    tiny, k_labels = dense.tiny, n_classes(dense)
    refuse_unless(tiny.xt is not None, "test data")
    assert tiny.xt is not None
    assert tiny.yt is not None
    order = torch.randperm(len(tiny.xt), generator=fs.Context(tiny.problem(), seed=seed).generator("robustness"))
    centres = tiny.xt[order].flatten(1).tolist()
    points = torch.cat([tiny.x, tiny.xt]).flatten(1).tolist()
    labels = [int(y) for y in [*tiny.y.tolist(), *tiny.yt.tolist()]]
    outputs = torch.cat([dense.outputs(), dense.outputs(x=tiny.xt)])
    losses = [min(1.0, cross_entropy(row, y)) for row, y in zip(outputs, labels, strict=True)]
    n, values = len(tiny.x), []
    for number in range(1, levels + 1):
        count = 2 ** (number - 1)
        if count > len(centres):
            break
        cells = []
        for point, label in zip(points, labels, strict=True):
            distances = [math.dist(point, centre) for centre in centres[:count]]
            cells.append((distances.index(min(distances)), label))
        spread = 0.0
        for i in range(n):
            for j in range(len(points)):
                if cells[i] == cells[j]:
                    spread = max(spread, abs(losses[i] - losses[j]))
        weight = 6 / (math.pi**2 * number**2)
        inside = 2 * count * k_labels * math.log(2) + 2 * math.log(1 / (weight * delta))
        values.append(spread + math.sqrt(inside / n))
    return min(values)


def cross_entropy(outputs: Tensor, label: int) -> float:
    """Minus the logarithm of the label's share; one output is that of class 1 beside 0."""
    scores = [0.0, float(outputs[0])] if len(outputs) == 1 else outputs.tolist()
    return math.log(sum(math.exp(score - scores[label]) for score in scores))


# Norms


@bound_twin
def norm_capacity(
    dense: Dense,
    delta: float,
    seed: int,
    norms: tuple[str, ...] = ("l2_norm", "l1_path_norm", "l2_path_norm", "spectral_norm"),
    epsilon: float = 0.05,
) -> dict[str, float]:
    """√(capacity / n) with the printed capacities, times the largest input; by the norm that goes with each."""
    n_classes(dense)
    refuse_unless(dense.tiny.chain, "a chain")
    gamma = margin_of(dense, epsilon)
    if gamma <= 0:
        return {}
    depth, widths = len(dense.tiny.layers), 1
    for layer in dense.tiny.layers:
        widths *= len(dense.params[dense.weight_name(layer)])
    rows = dense.tiny.x.flatten(1)
    longest = max(math.sqrt(sum(v * v for v in row)) for row in rows.tolist())
    entry = max(abs(v) for row in rows.tolist() for v in row)
    known = {
        "l2_norm": (l2_norm, 4.0**depth, longest),
        "l1_path_norm": (l1_path_norm, 4.0**depth, entry),
        "l2_path_norm": (l2_path_norm, 4.0**depth * widths, longest),
        "spectral_norm": (spectral_norm, float(widths), longest),
        "l1_inf_norm": (l1_inf_norm, 1.0, entry),
    }
    values = {}
    for name in norms:
        norm, factor, largest = known[name]
        if "" in (found := norm(dense)):
            values[name] = math.sqrt(factor * found[""] ** 2 / gamma**2 * largest**2 / len(rows))
    return values


class L1(NamedTuple):
    """Of the class of networks with these ℓ1 norms: the complexity of its margins, the largest output, classes."""

    complexity: float
    supremum: float
    classes: int


def l1_of(dense: Dense) -> L1:
    """R(F_1) ≤ B_1 √(2 ln 2d / n), R(F_i) ≤ 2 B_i R(F_(i-1)); a bias is a weight from an input that is always one."""
    classes = n_classes(dense)
    refuse_unless(dense.outputs().shape[1] >= 2, "two outputs")
    chain = dense_chain(_folded(dense))
    if chain is None:
        raise AssumptionFailsError("a chain of dense layers with ReLU")
    biased = any(float(b) != 0 for _, bias in chain for b in bias)
    largest = max(abs(v) for v in dense.tiny.x.flatten().tolist())
    inputs = chain[0][0].shape[1]
    if biased:
        largest, inputs = max(largest, 1.0), inputs + 1
    norms = []
    for number, (weight, bias) in enumerate(chain, start=1):
        rows = [[*w, b] for w, b in zip(weight.tolist(), bias.tolist(), strict=True)]
        if number == len(chain) and classes == 2:
            rows = [[one - zero for zero, one in zip(*rows, strict=True)]]
        norms.append(max(sum(abs(v) for v in row) for row in rows))
        if biased and number < len(chain):  # the constant is handed on
            norms[-1] = max(norms[-1], 1.0)
    complexity, supremum = largest * norms[0] * math.sqrt(2 * math.log(2 * inputs) / len(dense.tiny.x)), largest
    for norm in norms[1:]:
        complexity *= 2 * norm
    for norm in norms:
        supremum *= norm
    return L1(complexity * (1 if classes == 2 else 2 * classes), supremum, classes)


@bound_twin
def rademacher_l1(dense: Dense, delta: float, seed: int) -> float:
    """(57), and McDiarmid's inequality."""
    return 2 * l1_of(dense).complexity + math.sqrt(math.log(1 / delta) / (2 * len(dense.tiny.x)))


@bound_twin
def margin_l1(dense: Dense, delta: float, seed: int) -> float:
    """(60) at every margin and on a grid. Its union over a grid of γ costs Σ 1/k² ≤ 2: half of δ is left."""
    own, margins, n = l1_of(dense), margins_of(dense), len(dense.tiny.x)
    refuse_unless(own.supremum > 0, "outputs that differ")
    best = math.inf
    for gamma in [*margins, 2 * own.supremum, *(own.supremum * k / 100 for k in range(1, 200))]:
        if 0 < gamma <= 2 * own.supremum:
            fraction = sum(m < gamma for m in margins) / n
            union = math.sqrt(math.log(math.log(4 * own.supremum / gamma, 2)) / n)
            tail = math.sqrt(math.log(2 / delta) / (2 * n))
            best = min(best, fraction + 4 / gamma * own.complexity + union + tail)
    return best


@bound_twin
def margin_rademacher(dense: Dense, delta: float, seed: int, constant: float = 1.0, epsilon: float = 0.05) -> float:
    """(24); b is the largest y f(x), for more than two classes a difference of two outputs."""
    own, margins, n = l1_of(dense), margins_of(dense), len(dense.tiny.x)
    gamma = margin_of(dense, epsilon)
    refuse_unless(gamma > 0, "a positive margin")
    b = own.supremum * (1 if own.classes == 2 else 2)
    inside = sum(m < gamma for m in margins) / n
    squared = 2 * math.log(n) ** 3 * own.complexity**2 / gamma**2
    return 1.01 * inside + constant * (squared + 2 * math.log(math.log(4 * b / gamma) / delta) / n)
