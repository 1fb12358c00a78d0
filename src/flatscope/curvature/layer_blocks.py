"""Hessian blocks of single layers as operators that cost almost nothing to multiply with.

One sweep keeps, for each exact layer, what its block is made of: for a dense layer on vectors the inputs and the
columns at its output (a product is then two small matrix products), for a layer of few weights the block itself.
What fits neither way is streamed: each product is then a pass over the data.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.estimators import Operator
from flatscope.curvature.factors import n_columns
from flatscope.curvature.operators import GaussNewton, Hessian
from flatscope.curvature.patches import input_matrix, output_matrix, weight_gradients
from flatscope.curvature.sweep import Flow, backpropagated, batch_size, exact_sweep

DENSE_WEIGHTS = 5_000
KEPT_BYTES = 2**30


@dataclass
class DenseBlock:
    """A block small enough to be written out."""

    matrix: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        return self.matrix.shape[0], self.matrix.shape[1]

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return self.matrix @ vectors.to(self.matrix)


@dataclass
class FactoredBlock:
    """mean Σ_c (s_c s_cᵀ) ⊗ (u uᵀ) of a dense layer on vectors."""

    inputs: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    signs: list[Tensor | None] = field(default_factory=list)
    n: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        size = self.inputs[0].shape[1] * self.columns[0].shape[2]
        return size, size

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(len(vectors), -1)
        return torch.stack([self._product(v) for v in columns.T], dim=1).reshape(vectors.shape)

    def _product(self, vector: Tensor) -> Tensor:
        """Σ_c,i s_c (s_cᵀ V u) uᵀ."""
        total = torch.zeros(len(vector), dtype=torch.float64)
        for u, s, signs in zip(self.inputs, self.columns, self.signs, strict=True):
            matrix = vector.to(u).reshape(s.shape[2], u.shape[1])  # (out, in)
            along = (s * (u @ matrix.T)[:, None]).sum(2)  # (n, k)
            along = along if signs is None else along * signs
            total += (torch.einsum("nko,nk->no", s, along).T @ u).reshape(-1).double().cpu()
        return total / self.n


def layer_blocks(ctx: Context) -> dict[str, Operator]:
    """The Hessian block of every trainable layer by weight name, from one sweep over the data."""
    curved = ctx.sweep(exact_sweep).curved
    layers = [layer for layer in ctx.network if layer.weight in ctx.problem.trainable]
    blocks: dict[str, Operator] = {}
    sizes = {layer.weight: ctx.params[layer.weight].numel() for layer in layers}
    kept = _to_keep(ctx, curved)
    for layer in layers:
        if layer.weight in curved:
            blocks[layer.weight] = Hessian(ctx, [layer.weight])
        elif layer.weight in kept:
            blocks[layer.weight] = FactoredBlock(n=ctx.problem.n_train)
        elif sizes[layer.weight] <= DENSE_WEIGHTS:
            size = sizes[layer.weight]
            blocks[layer.weight] = DenseBlock(torch.zeros(size, size, dtype=torch.float64, device=ctx.problem.device))
        else:
            blocks[layer.weight] = GaussNewton(ctx, [layer.weight])
    k = n_columns(ctx.problem.loss, ctx.problem.n_outputs)
    if any(isinstance(block, DenseBlock | FactoredBlock) for block in blocks.values()):
        for batch in ctx.batches(size=batch_size(ctx, k)):
            for flow in backpropagated(ctx, batch, curved):
                _add(ctx, blocks.get(flow.call.weight), flow)
            ctx.count("forward", len(batch[1]))
            ctx.count("backward", len(batch[1]) * k)
    return blocks


def _to_keep(ctx: Context, curved: dict[str, str]) -> set[str]:
    """Dense layers on vectors whose factors are smaller than their block, largest gain first, within the budget."""
    k = n_columns(ctx.problem.loss, ctx.problem.n_outputs)
    item = torch.finfo(ctx.problem.dtype).bits // 8
    budget, kept = KEPT_BYTES, set()
    for layer in ctx.network:
        if layer.weight in curved or layer.kind != "dense" or len(layer.input_shape) != 1:
            continue
        need = ctx.problem.n_train * (k * layer.output_shape[0] + layer.input_shape[0]) * item
        small = ctx.params[layer.weight].numel() <= DENSE_WEIGHTS // 4  # then writing it out costs less
        if not small and need <= budget:
            budget -= need
            kept.add(layer.weight)
    return kept


def _add(ctx: Context, block: Operator | None, flow: Flow) -> None:
    call, x, s, signs = flow.call, flow.x, flow.s, flow.signs
    if isinstance(block, FactoredBlock):
        block.inputs.append(x)
        block.columns.append(s)
        block.signs.append(signs)
    elif isinstance(block, DenseBlock):
        weight = ctx.params[call.weight]
        u = input_matrix(x, weight, call.kind, call.settings)
        out = output_matrix(s, weight, call.kind, call.settings)
        gradients = weight_gradients(u, out, call.kind).reshape(-1, weight.numel())  # (n k, p)
        signed = gradients if signs is None else gradients * signs.reshape(-1, 1)
        block.matrix += (signed.T @ gradients).double() / ctx.problem.n_train
