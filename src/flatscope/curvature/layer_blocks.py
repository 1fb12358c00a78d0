"""Curvature blocks of single layers as operators that cost almost nothing to multiply with.

One sweep keeps, for each exact layer, what its block is made of: for a dense layer on vectors the inputs and the
columns at its output, for other layers the per-sample gradients; a product is then two matrix products. What does
not fit in memory is written out as a matrix if it has few weights, and streamed otherwise: each product is then a
pass over the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.coverage import rows_per_sample
from flatscope.curvature.estimators import Operator
from flatscope.curvature.layer_forms import Flow, matrices
from flatscope.curvature.memory import in_batches
from flatscope.curvature.operators import GaussNewton
from flatscope.curvature.patches import weight_gradients
from flatscope.curvature.products import curvature_operator
from flatscope.curvature.sweep import acting, backpropagated, find_left_out, sweep_plan, sweep_shape
from flatscope.network.layers import Layer
from flatscope.ranks import Ranks
from flatscope.samples import Batch

DENSE_WEIGHTS = 5_000
KEPT_BYTES = 2**30
MOST_COLUMNS = 256  # with more, products are cheaper than all columns


@dataclass(frozen=True)
class Piece:
    """Columns (n, k, out) and inputs (n, in) of some samples, or their gradients (n k, p); signs of the columns."""

    rows: Tensor
    inputs: Tensor | None
    signs: Tensor | None


@dataclass
class DenseBlock:
    """A block written out."""

    matrix: Tensor
    n: int

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        return self.matrix.shape[0], self.matrix.shape[1]

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return self.matrix @ vectors.to(self.matrix)

    def add(self, piece: Piece) -> None:
        """Add the gradients of some samples."""
        signed = piece.rows if piece.signs is None else piece.rows * piece.signs.reshape(-1, 1)
        self.matrix += (signed.T @ piece.rows).double() / self.n


@dataclass
class GradientBlock:
    """mean Σ_c vec(G_c) vec(G_c)ᵀ from the kept per-sample gradients, (n k, p) a batch."""

    size: int
    n: int
    ranks: Ranks
    pieces: list[Piece] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Keep the gradients of some samples."""
        self.pieces.append(piece)

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        return self.size, self.size

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(self.size, -1)
        total = torch.zeros(columns.shape, dtype=torch.float64)
        for piece in self.pieces:
            along = piece.rows @ columns.to(piece.rows)  # (n k, vectors)
            along = along if piece.signs is None else along * piece.signs.reshape(-1, 1)
            total += (piece.rows.T @ along).double().cpu()
        (total,) = self.ranks.summed([total])
        return (total / self.n).reshape(vectors.shape)


@dataclass
class FactoredBlock:
    """mean Σ_c (s_c s_cᵀ) ⊗ (u uᵀ) of a dense layer on vectors, from its kept inputs and columns."""

    size: int
    n: int
    ranks: Ranks
    pieces: list[Piece] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Keep the inputs and columns of some samples."""
        self.pieces.append(piece)

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        return self.size, self.size

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(len(vectors), -1)
        (total,) = self.ranks.summed([torch.stack([self._product(v) for v in columns.T], dim=1)])
        return (total / self.n).reshape(vectors.shape)

    def _product(self, vector: Tensor) -> Tensor:
        """Σ_c,i s_c (s_cᵀ V u) uᵀ over this rank's samples."""
        total = torch.zeros(len(vector), dtype=torch.float64)
        for piece in self.pieces:
            u, s, signs = piece.inputs, piece.rows, piece.signs
            assert u is not None
            matrix = vector.to(u).reshape(s.shape[2], u.shape[1])  # (out, in)
            along = (s * (u @ matrix.T)[:, None]).sum(2)  # (n, k)
            along = along if signs is None else along * signs
            total += ((s * along[:, :, None]).sum(1).T @ u).reshape(-1).double().cpu()
        return total


Filled = DenseBlock | GradientBlock | FactoredBlock


def layer_blocks(ctx: Context) -> dict[str, Operator]:
    """The curvature block of every trainable layer by weight name, from one sweep over the data."""
    left_out, columns, ranks = find_left_out(ctx), ctx.sweep(sweep_shape).columns, ctx.problem.ranks
    blocks = dict(_empty_blocks(ctx, left_out))
    filled = {name: block for name, block in blocks.items() if isinstance(block, Filled)}
    if not filled:
        return blocks

    def work(batch: Batch, numbers: Tensor, width: int) -> list[tuple[str, Piece]]:
        del numbers
        return [
            (flow.weight, _piece(ctx, filled[flow.weight], flow))
            for flows in backpropagated(ctx, batch, left_out, width)
            for flow in flows
            if flow.weight in filled
        ]

    for pieces in in_batches(ctx, sweep_plan(ctx, columns), work):
        for name, piece in pieces:
            filled[name].add(piece)
    ctx.count("forward", ctx.problem.n_train)
    ctx.count("backward", ctx.problem.n_train * columns)
    for block in filled.values():
        if isinstance(block, DenseBlock):
            (block.matrix,) = ranks.summed([block.matrix])
    return blocks


def _empty_blocks(ctx: Context, left_out: dict[str, str]) -> Iterator[tuple[str, Operator]]:
    """Decide, layer by layer, how its block is kept; the small ones first have a claim on the memory."""
    k, n, ranks = ctx.sweep(sweep_shape).columns, ctx.problem.n_train, ctx.problem.ranks
    item = torch.finfo(ctx.problem.dtype).bits // 8
    layers = [layer for layer in ctx.network if layer.weight in ctx.problem.trainable]
    sizes = {layer.weight: acting(ctx, layer.weight).numel() for layer in layers}
    needs = {}
    for layer in layers:
        per_sample = (
            k * layer.output_shape[0] + layer.input_shape[0] if _on_vectors(ctx, layer) else k * sizes[layer.weight]
        )
        needs[layer.weight] = -(-n // ranks.size) * per_sample * item  # of the largest share: all decide alike
    left, kept = KEPT_BYTES, set()
    for weight, need in sorted(needs.items(), key=lambda entry: entry[1]):
        if weight not in left_out and need <= left and k <= MOST_COLUMNS:
            left -= need
            kept.add(weight)
    for layer in layers:
        weight, size = layer.weight, sizes[layer.weight]
        if weight in left_out:
            yield weight, curvature_operator(ctx, [weight])
        elif weight in kept:
            yield weight, FactoredBlock(size, n, ranks) if _on_vectors(ctx, layer) else GradientBlock(size, n, ranks)
        elif size <= DENSE_WEIGHTS and k <= MOST_COLUMNS:
            yield weight, DenseBlock(torch.zeros(size, size, dtype=torch.float64, device=ctx.problem.device), n)
        else:
            yield weight, GaussNewton(ctx, [weight])


def _on_vectors(ctx: Context, layer: Layer) -> bool:
    if ctx.sweep(rows_per_sample).get(layer.weight, 1) > 1:
        return False
    return layer.kind == "dense" and len(layer.input_shape) == 1 and layer.uses == 1


def _piece(ctx: Context, block: Filled, flow: Flow) -> Piece:
    """What one block of columns of some samples adds to a layer's block."""
    if isinstance(block, FactoredBlock):
        return Piece(flow.columns[0], flow.calls[0].input.detach(), flow.signs)
    weight = acting(ctx, flow.weight)
    u, s = matrices(flow, weight)
    return Piece(weight_gradients(u, s, flow.kind).reshape(-1, weight.numel()), None, flow.signs)
