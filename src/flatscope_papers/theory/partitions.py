"""Robustness on a partition of the inputs: how much the loss differs between samples that share a cell and a label.

(K, ε(S))-robustness of Zhang et al. 2017, Definition 3, eq (17), with cells of X × Y. What is reported is the largest
difference among the samples at hand: a lower bound of ε(S), which is defined over whole cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flatscope import Context
from flatscope.errors import InputError, NotApplicable
from flatscope.generalization_bounds.classical import input_vectors, spread_by_sample


class Partition(Protocol):
    """Cells of the input space."""

    def cells(self, x: Tensor) -> Tensor:
        """A number for the cell of each row: (n, d) -> (n,) of integers, or (n, m) if a cell has several."""
        ...

    def count(self, dimension: int) -> float:
        """Number of cells, with samples in them or not."""
        ...


@dataclass(frozen=True)
class Grid:
    """Cubes of a given side on [low, high]^d; what lies outside belongs to the outermost cube."""

    side: float
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        """Refuse cubes that do not exist."""
        if not (0 < self.side < math.inf and self.low < self.high):
            raise InputError("a positive side and low below high", repr(self), where="Grid")

    @property
    def per_axis(self) -> int:
        """Cubes along one axis."""
        return max(1, math.ceil((self.high - self.low) / self.side - 1e-9))

    def cells(self, x: Tensor) -> Tensor:
        """Place along each axis."""
        return ((x - self.low) / self.side).floor().clamp(0, self.per_axis - 1).long()

    def count(self, dimension: int) -> float:
        """(high - low) / side to the power of the dimension."""
        log2 = dimension * math.log2(self.per_axis)
        return float(self.per_axis**dimension) if log2 < 1023 else math.inf


@dataclass(frozen=True, eq=False)
class NearestCentre:
    """Each input belongs to the nearest of some centres (k, d): Voronoi cells."""

    centres: Tensor

    def cells(self, x: Tensor) -> Tensor:
        """Number of the nearest centre."""
        return torch.cdist(x, self.centres.to(x)).argmin(1)

    def count(self, dimension: int) -> float:
        """Number of centres."""
        return float(len(self.centres))


def greedy_cover(x: Tensor, radius: float) -> NearestCentre:
    """Centres among the rows of x so that each row is within `radius` of one: at least the covering number of x.

    Always the row that is furthest from all centres so far becomes the next one. Since centres are more than `radius`
    apart, they are no more than a cover by balls of half that radius needs.
    """
    if not 0 <= radius < math.inf or x.ndim != 2 or not len(x):
        raise InputError("rows of numbers and a radius from 0 up", f"{tuple(x.shape)}, {radius}", where="greedy_cover")
    points = x.double()
    chosen, distance = [0], (points - points[0]).norm(dim=1)
    while float(distance.max()) > radius:
        chosen.append(int(distance.argmax()))
        distance = torch.minimum(distance, (points - points[chosen[-1]]).norm(dim=1))
    return NearestCentre(points[chosen])


def k_means(x: Tensor, k: int, seed: int = 0) -> NearestCentre:
    """Centres, k of them, that are near to the rows of x, by Lloyd's algorithm (scikit-learn)."""
    from sklearn.cluster import KMeans

    if not 1 <= k <= len(x):
        raise InputError(f"1 to {len(x)} centres", str(k), where="k_means")
    fitted = KMeans(n_clusters=k, n_init=1, random_state=seed).fit(x.double().cpu().numpy())
    return NearestCentre(torch.from_numpy(fitted.cluster_centers_))


@dataclass(frozen=True)
class PartitionRobustness:
    """Robustness on one partition.

    Attributes:
        cells: K, cells of the inputs times the labels.
        occupied: those that hold a training sample.
        spread: largest |V(s) − V(z)| of a training sample s and any sample z of its cell.
        mean_spread: the same, largest within each occupied cell, averaged over training samples.
        alone: training samples that share their cell with no other: they say nothing about the spread.
    """

    cells: float
    occupied: int
    spread: float
    mean_spread: float
    alone: int


def partition_robustness(ctx: Context, partition: Partition, *, largest: float = math.inf) -> PartitionRobustness:
    """Robustness of the network on a partition: K, and ε(S) as far as training and test samples show it.

    Args:
        ctx: the network; test samples count where there are any.
        partition: cells of the inputs as vectors. For a bound it must not depend on the training samples.
        largest: losses are clipped at this, as a bound that needs them bounded asks for.
    """
    if not ctx.problem.classification:
        raise NotApplicable(ctx.problem.no_classes)
    keys, losses, dimension = list[Tensor](), list[Tensor](), 0
    with torch.no_grad():
        for part in ("train", "test") if ctx.problem.test is not None else ("train",):
            for inputs, targets in ctx.batches(part):
                x = input_vectors(inputs)
                dimension = dimension or x.shape[1]
                if x.shape[1] != dimension:
                    raise NotApplicable("inputs of one shape")
                cells = partition.cells(x).reshape(len(x), -1)
                keys.append(torch.cat([cells, targets[:, None].to(cells)], dim=1).cpu())
                losses.append(ctx.problem.loss(ctx.forward(inputs), targets).double().clamp(max=largest).cpu())
                ctx.charge_passes("forward", len(targets))
    _, cell = torch.unique(torch.cat(keys), dim=0, return_inverse=True)
    spreads = spread_by_sample(cell, torch.cat(losses), ctx.problem.n_train)
    training_cells = cell[: ctx.problem.n_train]
    size = torch.bincount(cell)
    return PartitionRobustness(
        cells=partition.count(dimension) * ctx.problem.n_classes,
        occupied=len(training_cells.unique()),
        spread=float(spreads.max()),
        mean_spread=float(spreads.mean()),
        alone=int((size[training_cells] == 1).sum()),
    )
