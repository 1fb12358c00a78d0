"""Curvature as a linear operator: exact Hessian and Gauss-Newton products, streamed over the data.

One pass over the data serves a whole block of vectors: each batch is run forward and backward once, and its
second backward is taken for all vectors together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import InputError, UnknownNameError
from flatscope.guards import precise_math
from flatscope.params import Params, count
from flatscope.samples import Batch

BLOCK_BYTES = 512 * 2**20
BATCH_BYTES = 256 * 2**20


class CurvatureOperator(ABC):
    """A symmetric p × p matrix known by its products, over some of the network's parameter tensors.

    Args:
        ctx: the point in weight space; its pass counter is charged.
        names: parameter tensors to differentiate; all trainable ones by default.
    """

    def __init__(self, ctx: Context, names: Iterable[str] | None = None) -> None:
        self.ctx = ctx
        self.names: tuple[str, ...] = tuple(ctx.problem.trainable if names is None else names)
        for name in self.names:
            if name not in ctx.params:
                raise UnknownNameError.among(name, ctx.params, "parameter")
        self.size = count(ctx.params[name] for name in self.names)
        self._batch_size = batch_size(ctx)

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        return self.size, self.size

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Products with a vector (p,) or with the columns of a matrix (p, k), in float64, averaged over samples."""
        if vectors.shape[0] != self.size or vectors.ndim > 2:
            raise InputError(f"vectors of length {self.size}", f"shape {tuple(vectors.shape)}", where="product")
        columns = vectors.reshape(self.size, -1).to(self.ctx.problem.device, self.ctx.problem.dtype)  # (p, k)
        total = torch.zeros(columns.shape, dtype=torch.float64, device=columns.device)
        with precise_math():  # attention's fused kernels cannot be differentiated twice
            for batch in self.ctx.share(size=self._batch_size):
                for start, stop in self._blocks(columns.shape[1]):
                    total[:, start:stop] += self._batch_product(batch, columns[:, start:stop])
        self.ctx.count("curvature", self.ctx.problem.n_train * columns.shape[1])
        (total,) = self.ctx.problem.ranks.summed([total])
        return (total / self.ctx.problem.n_train).reshape(vectors.shape)

    def as_linear_operator(self) -> LinearOperator:
        """The same operator for SciPy's solvers, in float64 on the CPU side."""

        def product(array: np.ndarray) -> np.ndarray:
            return (self @ torch.from_numpy(np.ascontiguousarray(array))).cpu().numpy()

        return LinearOperator(self.shape, matvec=product, matmat=product, rmatvec=product, dtype=np.float64)

    def _blocks(self, n_columns: int) -> list[tuple[int, int]]:
        """Ranges of columns that may be differentiated together: each holds weights and activations once more."""
        item = torch.finfo(self.ctx.problem.dtype).bits // 8
        per_column = 8 * self.size + 3 * item * activations(self.ctx) * self._batch_size
        width = max(1, min(n_columns, BLOCK_BYTES // max(1, per_column)))
        return [(start, min(start + width, n_columns)) for start in range(0, n_columns, width)]

    @abstractmethod
    def _batch_product(self, batch: Batch, columns: Tensor) -> Tensor:
        """Sum over one batch's samples of the products; (p, k)."""

    def _leaves(self) -> Params:
        return {name: self.ctx.params[name].detach().requires_grad_() for name in self.names}

    def _unstacked(self, columns: Tensor) -> list[Tensor]:
        """The columns as one tensor (k, *shape) per parameter."""
        parts, start = [], 0
        for name in self.names:
            value = self.ctx.params[name]
            parts.append(columns[start : start + value.numel()].T.reshape(-1, *value.shape))
            start += value.numel()
        return parts

    def _stacked(self, parts: Sequence[Tensor], k: int) -> Tensor:
        """One tensor (k, *shape) per parameter as columns (p, k)."""
        return torch.cat([part.reshape(k, -1).T for part in parts])


class Hessian(CurvatureOperator):
    """Hessian of the mean training loss, by exact double backward."""

    def _batch_product(self, batch: Batch, columns: Tensor) -> Tensor:
        inputs, targets = batch
        leaves = self._leaves()
        tensors = list(leaves.values())
        loss = self.ctx.problem.loss(self.ctx.forward(inputs, {**self.ctx.params, **leaves}), targets).sum()
        if not loss.requires_grad:  # none of these parameters is used
            return torch.zeros_like(columns)
        gradients = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
        # A gradient that does not depend on the parameters (unused, or used linearly) has no second derivative.
        alive = [i for i, gradient in enumerate(gradients) if gradient.requires_grad]
        vectors = self._unstacked(columns)
        products = batched_gradient([gradients[i] for i in alive], tensors, [vectors[i] for i in alive])
        return self._stacked(products, columns.shape[1])


class GaussNewton(CurvatureOperator):
    """Generalized Gauss-Newton matrix: mean over samples of Jᵀ (∇² loss) J, J the outputs' Jacobian."""

    def _batch_product(self, batch: Batch, columns: Tensor) -> Tensor:
        inputs, targets = batch
        leaves = self._leaves()
        tensors = list(leaves.values())
        outputs = self.ctx.forward(inputs, {**self.ctx.params, **leaves})
        if not outputs.requires_grad:
            return torch.zeros_like(columns)
        # J v by the double-backward trick: d/du of (J^T u) along v, at any u; no forward-mode support needed.
        dummy = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, tensors, dummy, create_graph=True, materialize_grads=True)
        alive = [i for i, part in enumerate(pulled) if part.requires_grad]
        vectors = self._unstacked(columns)
        pushed = batched_gradient([pulled[i] for i in alive], [dummy], [vectors[i] for i in alive])[0]  # (k, n, C)
        leaf = outputs.detach().requires_grad_()
        slope = torch.autograd.grad(self.ctx.problem.loss(leaf, targets).sum(), leaf, create_graph=True)[0]
        if not slope.requires_grad:  # a loss linear in the outputs has no curvature
            return torch.zeros_like(columns)
        curved = batched_gradient([slope], [leaf], [pushed.detach()])[0]  # (k, n, C)
        products = batched_gradient([outputs], tensors, [curved])
        return self._stacked(products, columns.shape[1])


def batched_gradient(outputs: Sequence[Tensor], inputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Vector-Jacobian products for a stack of vectors (k, ...) at once; one by one where an operation forbids it."""
    k = vectors[0].shape[0] if vectors else 1
    if not outputs:
        return [value.new_zeros(k, *value.shape) for value in inputs]
    if k > 1:
        try:
            found = torch.autograd.grad(
                outputs,
                inputs,
                vectors,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
            return [
                value.new_zeros(k, *value.shape) if part is None else part
                for part, value in zip(found, inputs, strict=True)
            ]
        except RuntimeError as problem:  # no batching rule for some operation's double backward
            if "vmap" not in str(problem) and "batching" not in str(problem):
                raise
    rows = [
        torch.autograd.grad(outputs, inputs, [v[i] for v in vectors], retain_graph=True, materialize_grads=True)
        for i in range(k)
    ]
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


def activations(ctx: Context) -> int:
    """Numbers that one sample leaves behind in the layers' inputs and outputs."""
    return sum(math.prod(layer.input_shape) + math.prod(layer.output_shape) for layer in ctx.network)


def batch_size(ctx: Context) -> int:
    """Samples per batch: small networks take many at once, since calls and not arithmetic cost the time there."""
    item = torch.finfo(ctx.problem.dtype).bits // 8
    fitting = BATCH_BYTES // max(1, 8 * item * activations(ctx))
    return max(1, min(ctx.problem.n_train, max(fitting, 32), 4096)) if ctx.network.layers else ctx.problem.batch_size
