"""Curvature blocks of all layers, multiplied with a vector for each of them at once.

The columns of the sweep at a layer's output and the layer's inputs give its Gauss-Newton block: of a vector V the
columns' parts a_c = Σ_t s_cᵀ V u, and of these the product Σ_c,t a_c s_c uᵀ. One pass over the data serves all layers.
What fits in memory is kept from the first pass, as it is or as per-sample gradients, whichever is smaller; the block
of a few weights is written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.coverage import rows_per_sample
from flatscope.curvature.memory import allowed, in_batches
from flatscope.curvature.operators import CurvatureOperator, GaussNewton, curvature_operator
from flatscope.curvature.patches import weight_gradients, weighted_inputs
from flatscope.curvature.per_sample_gradients import Flow, matrices
from flatscope.curvature.route import find_not_covered
from flatscope.curvature.sweep import backpropagated, sweep_plan, sweep_shape
from flatscope.network.layers import Layer
from flatscope.params import Params, add_to
from flatscope.samples import Batch

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Part of a layer's block from some samples: inputs (n, g, features, t) and columns (n, k, g, rows, t).

    Or in place of both the gradients of each sample and column, (n, k, p).
    """

    kind: str
    inputs: Tensor | None
    columns: Tensor
    column_signs: Tensor | None

    def product(self, vectors: Tensor) -> Tensor:
        """With the columns of (p, m), summed over samples: (p, m)."""
        if self.inputs is None:
            rows = self.columns.flatten(0, 1)
            along = rows @ vectors
            return rows.T @ (along if self.column_signs is None else along * self.column_signs.reshape(-1, 1))
        return torch.stack([self._single(vector) for vector in vectors.T], dim=1)

    def _single(self, vector: Tensor) -> Tensor:
        u, s = self.inputs, self.columns
        assert u is not None
        moved = weighted_inputs(u, vector, self.kind)
        along = s.flatten(2) @ moved.flatten(1)[:, :, None]  # (n, k, 1)
        if self.column_signs is not None:
            along = along * self.column_signs[:, :, None]
        joined = (along.mT @ s.flatten(2)).reshape(moved.shape)  # Σ_c a_c s_c
        pairs = "ngrt,ngft->gfr" if self.kind == "transposed" else "ngrt,ngft->grf"
        return torch.einsum(pairs, joined, u).reshape(-1)


class LayerBlocks:
    """The curvature block of every trainable layer.

    Args:
        ctx: the network.

    Attributes:
        sizes: number of weights of each, by the name of its weight.
        own: those that columns do not give, or not cheaply, as matrices of their own.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx, not_covered = ctx, find_not_covered(ctx)
        layers = [layer for layer in ctx.network if layer.weight in ctx.problem.trainable]
        self.sizes = {layer.weight: ctx.params[layer.weight].numel() for layer in layers}
        self._columns, limits = sweep_shape(ctx).columns, ctx.effort.limits
        self.own: dict[str, CurvatureOperator] = {}
        self._kept: dict[str, list[Piece]] = {}
        self._written: Params = {}
        needs = {layer.weight: self._bytes(layer) for layer in layers}
        # All ranks must decide alike, so several do not ask what is free on each.
        device = ctx.problem.device if ctx.problem.ranks.size == 1 else torch.device("cpu")
        left = allowed(limits.kept_memory, device, ctx.effort.memory)
        for name, need in sorted(needs.items(), key=lambda entry: entry[1]):  # the small ones have the first claim
            if name in not_covered:
                self.own[name] = curvature_operator(ctx, [name])
            elif self._columns <= limits.most_block_columns and need <= left:
                left -= need
                self._kept[name] = []
            elif self._columns <= limits.most_block_columns and (size := self.sizes[name]) <= limits.dense_weights:
                self._written[name] = torch.zeros(size, size, dtype=torch.float64, device=ctx.problem.device)
        elsewhere = self.own | self._kept | self._written
        streamed = [name for name in self.sizes if name not in elsewhere]  # in the same order on all ranks
        if self._columns > limits.columns_per_layer * len(streamed):
            self.own |= {name: GaussNewton(ctx, [name]) for name in streamed}
        self._fill()

    def products(self, vectors: Params) -> Params:
        """With a vector (p,), or columns (p, m), of each of some layers that are not `own`; in float64."""
        found = {name: self._written[name] @ v.double() for name, v in vectors.items() if name in self._written}
        totals = {
            name: torch.zeros(vector.reshape(len(vector), -1).shape, dtype=torch.float64, device=vector.device)
            for name, vector in vectors.items()
            if name not in found
        }
        given = {name: vectors[name].reshape(total.shape).to(self._ctx.problem.dtype) for name, total in totals.items()}
        for name in self._kept.keys() & totals.keys():
            for piece in self._kept[name]:
                totals[name] += piece.product(given[name])

        def work(batch: Batch, numbers: Tensor, width: int) -> Params:
            shares: Params = {}
            for name, piece in self._pieces(batch, numbers, given.keys() - self._kept.keys(), width):
                add_to(shares, name, piece.product(given[name]).double())
            return shares

        if totals.keys() - self._kept.keys():
            for shares in self._passed(work):
                for name, share in shares.items():
                    totals[name] += share
        summed = self._ctx.problem.ranks.summed(list(totals.values()))
        means = [total / self._ctx.problem.n_train for total in summed]
        return found | {name: mean.reshape(vectors[name].shape) for name, mean in zip(totals, means, strict=True)}

    def _fill(self) -> None:
        """Keep and write out what is to be, in one pass."""
        filled = self._kept.keys() | self._written.keys()
        if not filled:
            return

        def work(batch: Batch, numbers: Tensor, width: int) -> list[tuple[str, Piece]]:
            return list(self._pieces(batch, numbers, filled, width))

        for pieces in self._passed(work):
            for name, piece in pieces:
                if name in self._kept:
                    self._kept[name].append(piece)
                else:
                    self._written[name] += piece.product(torch.eye(self.sizes[name]).to(piece.columns))
        summed = self._ctx.problem.ranks.summed(list(self._written.values()))
        self._written = {
            name: total / self._ctx.problem.n_train for name, total in zip(self._written, summed, strict=True)
        }

    def _passed(self, work: Callable[[Batch, Tensor, int], T]) -> Iterator[T]:
        """One pass over the data with all columns."""
        yield from in_batches(self._ctx, sweep_plan(self._ctx, self._columns), work)
        self._ctx.charge_passes("forward", self._ctx.problem.n_train)
        self._ctx.charge_passes("backward", self._ctx.problem.n_train * self._columns)

    def _pieces(self, batch: Batch, numbers: Tensor, names: Collection[str], width: int) -> Iterator[tuple[str, Piece]]:
        """Pieces of some layers' blocks from the samples of a batch."""
        others = self._ctx.params.keys() - set(names)
        for flows in backpropagated(self._ctx, batch, numbers, others, width):
            for flow in flows:
                if flow.weight in names:
                    yield flow.weight, self._piece(flow)

    def _piece(self, flow: Flow) -> Piece:
        weight = self._ctx.params[flow.weight]
        u, s = matrices(flow, weight)
        gradients = len(u) * s.shape[1] * weight.numel() <= u.numel() + s.numel()
        if gradients or flow.weight in self._written:
            return Piece(flow.kind, None, weight_gradients(u, s, flow.kind).flatten(2), flow.column_signs)
        return Piece(flow.kind, u, s, flow.column_signs)

    def _bytes(self, layer: Layer) -> int:
        """Bytes of a layer's pieces from the largest rank's share of the samples: all ranks decide alike."""
        weight, k = self._ctx.params[layer.weight], self._columns
        rows, features = len(weight), weight[0].numel()
        if layer.input_first:
            positions, u, s = math.prod(layer.input_shape) // rows, rows, layer.groups * features
        else:
            positions, u, s = math.prod(layer.output_shape) // rows, layer.groups * features, rows
        positions *= layer.uses * rows_per_sample(self._ctx).get(layer.weight, 1)
        each = min(positions * (u + k * s), k * weight.numel())
        share = -(-self._ctx.problem.n_train // self._ctx.problem.ranks.size)
        return share * each * (torch.finfo(self._ctx.problem.dtype).bits // 8)
