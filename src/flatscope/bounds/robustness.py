"""Bounds by robustness: how much the loss differs between samples that lie in one cell of a partition."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable
from flatscope.registry import Value, bound
from flatscope.samples import parts_of

BYTES = 256 * 2**20  # of distances that are held at once


def robust_gap(spread: float, cells: float, largest: float, n: int, delta: float, log_weight: float = 0.0) -> float:
    """ε(S) + M √((2K log 2 + 2 log(1/πδ)) / n): Zhang et al. 2017, eq (18), and a term of (19).

    Args:
        spread: ε(S), the largest difference of losses within a cell.
        cells: K.
        largest: M, the largest loss.
        n: number of samples.
        delta: the bound holds with probability at least 1 - delta.
        log_weight: log(1/π) of the partition among those that were tried; 0 for a single one.
    """
    if spread < 0 or cells < 1 or largest < 0 or n < 1 or not 0 < delta < 1 or log_weight < 0:
        raise InputError(
            "ε ≥ 0, K ≥ 1, M ≥ 0, samples, 0 < delta < 1, a weight of at most 1",
            f"{spread}, {cells}, {largest}, {n}, {delta}, {log_weight}",
            where="robust_gap",
        )
    return spread + largest * math.sqrt((2 * cells * math.log(2) + 2 * (math.log(1 / delta) + log_weight)) / n)


def log_weight(index: int) -> float:
    """log(1/π) of the k-th of countably many partitions, π = 6 / (π² k²): 2 log k + log(π²/6)."""
    if index < 1:
        raise InputError("partitions numbered from 1", str(index), where="log_weight")
    return 2 * math.log(index) + math.log(math.pi**2 / 6)


@dataclass(frozen=True)
class Partition:
    """One of the partitions tried: its number, cells K and spread ε(S)."""

    index: int
    cells: float
    spread: float


def best_gap(partitions: Iterable[Partition], largest: float, n: int, delta: float) -> tuple[float, Partition]:
    """The smallest value of (19) over partitions, and where it is."""
    found = [(robust_gap(p.spread, p.cells, largest, n, delta, log_weight(p.index)), p) for p in partitions]
    if not found:
        raise InputError("at least one partition", "none", where="robustness")
    return min(found, key=lambda pair: pair[0])


def dyadic_grid(index: int, dimension: int, classes: int = 1) -> float:
    """Cells of the grid of side 2^(-k) on [0, 1]^d, times the classes: cells must separate labels as well."""
    if index < 1 or dimension < 1 or classes < 1:
        raise InputError("numbers from 1", f"{index}, {dimension}, {classes}", where="dyadic_grid")
    log2 = index * dimension + math.log2(classes)
    return 2.0**log2 if log2 < 1023 else math.inf


@bound(
    symbol=r"\min_C\ \epsilon_C(S) + \sqrt{\tfrac{2 K_C \log 2 + 2\log(1/(\pi(C)\delta))}{n}}",
    paper="zhang2017",
    equation="Theorems 1 and 2, eq (18), (19)",
    assumptions=(
        "loss in [0, 1]: clipped at 1 (so by construction)",
        "partitions independent of the training sample: cells around test inputs, times the labels",
        "NOT CERTIFIED: ε(S) is the largest difference seen among training and test samples, not over whole cells",
        "samples drawn independently (cannot be checked)",
    ),
    needs={"test", "classes"},
    cost="sweep",
)
def robustness(ctx: Context, *, delta: float, levels: int = 7) -> Value:
    """Gap by how much the clipped loss differs between samples of one cell; the best of several partitions.

    The k-th partition has a cell around each of the first 2^(k-1) test inputs, in an order drawn at random, for each
    label. Coarse ones have few cells and large differences.

    Args:
        ctx: the network.
        delta: the bound holds with probability at least 1 - delta.
        levels: number of partitions.
    """
    if levels < 1:
        raise InputError("at least one partition", str(levels), where="levels")
    (x, y, losses), (xt, yt, test_losses) = (ctx.sweep(_gathered, part=part) for part in ("train", "test"))
    classes, n = ctx.problem.n_outputs, len(y)
    order = torch.randperm(len(yt), generator=ctx.generator("robustness"))
    centres = xt[order]
    everyone, labels, all_losses = torch.cat([x, xt]), torch.cat([y, yt]), torch.cat([losses, test_losses])
    partitions = []
    for index in range(1, levels + 1):
        chosen = centres[: 2 ** (index - 1)]
        if len(chosen) < 2 ** (index - 1):
            break
        cell = _nearest(everyone, chosen) * classes + labels
        partitions.append(Partition(index, len(chosen) * classes, _spread(cell, all_losses, n)))
    value, best = best_gap(partitions, 1.0, n, delta)
    return Value(value, reason=f"K = {best.cells:g}, ε(S) = {best.spread:.4g}, partition {best.index}")


def _gathered(ctx: Context, part: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs as vectors, labels and clipped losses of one part, on the CPU, read in one pass."""
    inputs, labels, losses = [], [], []
    with torch.no_grad():
        for given, targets in ctx.batches(part):
            if len(parts_of(given)) != 1:
                raise NotApplicable("a network with one input", f"{len(parts_of(given))} inputs")
            outputs = ctx.forward(given)
            ctx.count("forward", len(targets))
            inputs.append(parts_of(given)[0].flatten(1).cpu())
            labels.append(targets.cpu())
            losses.append(ctx.problem.loss(outputs, targets).double().clamp(0, 1).cpu())
    if len({rows.shape[1] for rows in inputs}) > 1:
        raise NotApplicable("inputs of one shape")
    return torch.cat(inputs).double(), torch.cat(labels), torch.cat(losses)


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    size = max(1, BYTES // (8 * len(centres)))
    return torch.cat([torch.cdist(block, centres).argmin(1) for block in torch.split(points, size)])


def _spread(cell: Tensor, losses: Tensor, n_train: int) -> float:
    """Largest difference between a training sample's loss and that of any sample in its cell."""
    n_cells = int(cell.max()) + 1

    def extreme(which: slice, how: str) -> Tensor:
        start = torch.full((n_cells,), -math.inf if how == "amax" else math.inf, dtype=torch.float64)
        return start.scatter_reduce(0, cell[which], losses[which], how)

    own, every = slice(0, n_train), slice(None)
    up = extreme(every, "amax") - extreme(own, "amin")
    down = extreme(own, "amax") - extreme(every, "amin")
    return max(0.0, float(torch.maximum(up, down).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max()))
