"""Hessian blocks of single layers as operators that cost almost nothing to multiply with.

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
from flatscope.curvature.estimators import Operator
from flatscope.curvature.factors import n_columns
from flatscope.curvature.operators import GaussNewton, Hessian
from flatscope.curvature.patches import input_matrix, output_matrix, weight_gradients
from flatscope.curvature.sweep import Flow, backpropagated, batch_size, exact_sweep, smaller_until_it_fits
from flatscope.network.layers import Layer
from flatscope.ranks import Ranks

DENSE_WEIGHTS = 5_000
KEPT_BYTES = 2**30


@dataclass
class DenseBlock:
    """A block written out."""

    matrix: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        return self.matrix.shape[0], self.matrix.shape[1]

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return self.matrix @ vectors.to(self.matrix)

    def add(self, gradients: Tensor, signs: Tensor | None, n: int) -> None:
        """Add the gradients (n k, p) of a batch."""
        signed = gradients if signs is None else gradients * signs.reshape(-1, 1)
        self.matrix += (signed.T @ gradients).double() / n


@dataclass
class GradientBlock:
    """mean Σ_c vec(G_c) vec(G_c)ᵀ from the kept per-sample gradients, (n k, p) a batch."""

    size: int
    n: int
    ranks: Ranks
    gradients: list[Tensor] = field(default_factory=list)
    signs: list[Tensor | None] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        return self.size, self.size

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(self.size, -1)
        total = torch.zeros(columns.shape, dtype=torch.float64)
        for rows, signs in zip(self.gradients, self.signs, strict=True):
            along = rows @ columns.to(rows)  # (n k, vectors)
            along = along if signs is None else along * signs.reshape(-1, 1)
            total += (rows.T @ along).double().cpu()
        (total,) = self.ranks.summed([total])
        return (total / self.n).reshape(vectors.shape)


@dataclass
class FactoredBlock:
    """mean Σ_c (s_c s_cᵀ) ⊗ (u uᵀ) of a dense layer on vectors, from its kept inputs and columns."""

    size: int
    n: int
    ranks: Ranks
    inputs: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    signs: list[Tensor | None] = field(default_factory=list)

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
        for u, s, signs in zip(self.inputs, self.columns, self.signs, strict=True):
            matrix = vector.to(u).reshape(s.shape[2], u.shape[1])  # (out, in)
            along = (s * (u @ matrix.T)[:, None]).sum(2)  # (n, k)
            along = along if signs is None else along * signs
            total += ((s * along[:, :, None]).sum(1).T @ u).reshape(-1).double().cpu()
        return total


def layer_blocks(ctx: Context) -> dict[str, Operator]:
    """The Hessian block of every trainable layer by weight name, from one sweep over the data."""
    k = n_columns(ctx.problem.loss, ctx.problem.n_outputs)
    curved, ranks = ctx.sweep(exact_sweep).curved, ctx.problem.ranks
    blocks = smaller_until_it_fits(batch_size(ctx, k), lambda size: _filled_blocks(ctx, size, curved), ranks)
    if any(isinstance(block, DenseBlock | GradientBlock | FactoredBlock) for block in blocks.values()):
        ctx.count("forward", ctx.problem.n_train)
        ctx.count("backward", ctx.problem.n_train * k)
    for block in blocks.values():
        if isinstance(block, DenseBlock):
            (block.matrix,) = ranks.summed([block.matrix])
    return blocks


def _filled_blocks(ctx: Context, size: int, curved: dict[str, str]) -> dict[str, Operator]:
    """The blocks with this rank's samples in them."""
    blocks = dict(_empty_blocks(ctx, curved))
    if any(isinstance(block, DenseBlock | GradientBlock | FactoredBlock) for block in blocks.values()):
        for batch in ctx.share(size=size):
            for flow in backpropagated(ctx, batch, curved):
                _add(ctx, blocks.get(flow.call.weight), flow)
    return blocks


def _empty_blocks(ctx: Context, curved: dict[str, str]) -> Iterator[tuple[str, Operator]]:
    """Decide, layer by layer, how its block is kept; the small ones first have a claim on the memory."""
    k, n, ranks = n_columns(ctx.problem.loss, ctx.problem.n_outputs), ctx.problem.n_train, ctx.problem.ranks
    item = torch.finfo(ctx.problem.dtype).bits // 8
    layers = [layer for layer in ctx.network if layer.weight in ctx.problem.trainable]
    sizes = {layer.weight: ctx.params[layer.weight].numel() for layer in layers}
    needs = {}
    for layer in layers:
        per_sample = k * layer.output_shape[0] + layer.input_shape[0] if _on_vectors(layer) else k * sizes[layer.weight]
        needs[layer.weight] = -(-n // ranks.size) * per_sample * item  # of the largest share: all decide alike
    left, kept = KEPT_BYTES, set()
    for weight, need in sorted(needs.items(), key=lambda entry: entry[1]):
        if weight not in curved and need <= left:
            left -= need
            kept.add(weight)
    for layer in layers:
        weight, size = layer.weight, sizes[layer.weight]
        if weight in curved:
            yield weight, Hessian(ctx, [weight])
        elif weight in kept:
            yield weight, FactoredBlock(size, n, ranks) if _on_vectors(layer) else GradientBlock(size, n, ranks)
        elif size <= DENSE_WEIGHTS:
            yield weight, DenseBlock(torch.zeros(size, size, dtype=torch.float64, device=ctx.problem.device))
        else:
            yield weight, GaussNewton(ctx, [weight])


def _on_vectors(layer: Layer) -> bool:
    return layer.kind == "dense" and len(layer.input_shape) == 1


def _add(ctx: Context, block: Operator | None, flow: Flow) -> None:
    if isinstance(block, FactoredBlock):
        block.inputs.append(flow.x)
        block.columns.append(flow.s)
        block.signs.append(flow.signs)
    elif isinstance(block, GradientBlock | DenseBlock):
        call, weight = flow.call, ctx.params[flow.call.weight]
        u = input_matrix(flow.x, weight, call.kind, call.settings)
        s = output_matrix(flow.s, weight, call.kind, call.settings)
        gradients = weight_gradients(u, s, call.kind).reshape(-1, weight.numel())  # (n k, p)
        if isinstance(block, DenseBlock):
            block.add(gradients, flow.signs, ctx.problem.n_train)
        else:
            block.gradients.append(gradients)
            block.signs.append(flow.signs)
