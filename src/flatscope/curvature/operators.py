"""Curvature as a linear operator: exact Hessian and Gauss-Newton products, streamed over the data.

One pass over the data serves a whole block of vectors: each batch is run forward and backward once, and its
second backward is taken for all vectors together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.convolutions import FastConvolutions
from flatscope.curvature.memory import fitted
from flatscope.errors import InputError, refuse_unknown
from flatscope.guards import own_settings
from flatscope.params import Params, count, flatten, unflatten
from flatscope.samples import Batch, Inputs

BLOCK_BYTES = 512 * 2**20
BATCH_BYTES = 96 * 2**20
KEPT_BYTES = 2**30
GPU_SHARE = 8  # batches, and graphs that are kept, take this fraction of a GPU's free memory


class CurvatureOperator(ABC):
    """A symmetric p × p matrix known by its products, over some of the network's parameter tensors.

    Rows and columns are the entries of the tensors `names`, one after the other. What the first product of a batch
    computed before any vector came in is kept for the next products, as far as the memory for that (1 GiB, or an
    eighth of a GPU's free memory) goes.

    Args:
        ctx: the point in weight space; its pass counter is charged.
        names: parameter tensors to differentiate; all trainable ones by default.

    Attributes:
        names: the parameter tensors, in the order of the vector.
        size: number of their entries.

    Example:
        >>> import torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(2, 1).double(), train=(torch.eye(2), torch.zeros(2)), loss="mse")
        >>> op = fs.hessian(problem)
        >>> op.names, op.shape
        (('weight', 'bias'), (3, 3))
        >>> op.unflatten(op @ op.flatten({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}))
        {'weight': tensor([[1., 1.]], dtype=torch.float64), 'bias': tensor([2.], dtype=torch.float64)}
    """

    def __init__(self, ctx: Context, names: Iterable[str] | None = None) -> None:
        self.ctx = ctx
        self.names: tuple[str, ...] = tuple(ctx.problem.trainable if names is None else names)
        for name in self.names:
            refuse_unknown(name, ctx.params, "parameter")
        self.size = count(ctx.params[name] for name in self.names)
        self._batch_size = batch_size(ctx)
        self._kept: list[Any] = []

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        return self.size, self.size

    @property
    def device(self) -> torch.device:
        """Where products are computed and returned."""
        return self.ctx.problem.device

    @property
    def layout(self) -> dict[str, slice]:
        """Where each parameter tensor stands in a vector."""
        ends = list(accumulate(self.ctx.params[name].numel() for name in self.names))
        return {name: slice(a, b) for name, a, b in zip(self.names, [0, *ends], ends, strict=False)}

    def flatten(self, params: Params) -> Tensor:
        """A vector (p,) of tensors by name; all of `names` must be there, others are left out."""
        missing = [name for name in self.names if name not in params]
        if missing:
            raise InputError(f"tensors for {', '.join(self.names)}", f"none for {', '.join(missing)}", where="flatten")
        return flatten({name: params[name].to(self.device) for name in self.names})

    def unflatten(self, vector: Tensor) -> Params:
        """The tensors, by name and in their shapes, of which `flatten` makes this vector."""
        if vector.shape != (self.size,):
            raise InputError(f"a vector of length {self.size}", f"shape {tuple(vector.shape)}", where="unflatten")
        return unflatten(vector, {name: self.ctx.params[name] for name in self.names})

    @own_settings()  # attention's fused kernels cannot be differentiated twice
    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Products with a vector (p,) or with the columns of a matrix (p, k), in float64, averaged over samples."""
        if not isinstance(vectors, Tensor) or vectors.ndim not in (1, 2) or len(vectors) != self.size:
            got = f"shape {tuple(vectors.shape)}" if isinstance(vectors, Tensor) else type(vectors).__name__
            raise InputError(f"a tensor of vectors of length {self.size}", got, where="product")
        columns = vectors.reshape(self.size, -1).to(self.device, self.ctx.problem.dtype)  # (p, k)
        while self.ctx.problem.ranks.anywhere((total := fitted(lambda: self._sum(columns))) is None):
            if self._batch_size == 1:
                raise torch.OutOfMemoryError("a curvature product of one sample does not fit into the GPU's memory")
            self._kept.clear()
            self._batch_size = max(1, self._batch_size // 2)
        assert total is not None
        self.ctx.count("curvature", self.ctx.problem.n_train * columns.shape[1])
        (total,) = self.ctx.problem.ranks.summed([total])
        return total.div_(self.ctx.problem.n_train).reshape(vectors.shape)

    def release(self) -> None:
        """Drop what is kept between products; the next one computes it again."""
        self._kept.clear()

    def _sum(self, columns: Tensor) -> Tensor:
        """Sum over this rank's samples of the products with columns (p, k)."""
        total = torch.zeros(columns.shape, dtype=torch.float64, device=columns.device)
        keep = not self._kept and self._may_keep()
        for graph in self._kept or map(self._graph, self.ctx.share(size=self._batch_size)):
            for a, b in self._blocks(columns.shape[1]):
                total[:, a:b] += self._batch_product(graph, columns[:, a:b])
            if keep:
                self._kept.append(graph)
            del graph  # the next batch's takes its place
        return total

    def _may_keep(self) -> bool:
        """Whether the graphs of all batches fit: of some of them would not do, since a loader may shuffle."""
        most = KEPT_BYTES
        if self.ctx.effort.memory is not None:
            most = self.ctx.effort.memory // 4
        elif self.device.type == "cuda":
            most = torch.cuda.mem_get_info(self.device)[0] // GPU_SHARE
        start, stop = self.ctx.problem.ranks.share(self.ctx.problem.n_train)
        return 0 < (stop - start) * sample_bytes(self.ctx) <= most

    def to_scipy(self) -> LinearOperator:
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
    def _graph(self, batch: Batch) -> Any:
        """All of a batch's product that does not depend on the vector."""

    @abstractmethod
    def _batch_product(self, graph: Any, columns: Tensor) -> Tensor:
        """Sum over one batch's samples of the products; (p, k)."""

    def _outputs(self, inputs: Inputs, leaves: Params) -> Tensor:
        with FastConvolutions():
            return self.ctx.forward(inputs, {**self.ctx.params, **leaves})

    def _unstacked(self, columns: Tensor) -> list[Tensor]:
        """The columns as one tensor (k, *shape) per parameter."""
        values = [self.ctx.params[name] for name in self.names]
        parts = torch.split(columns, [value.numel() for value in values])
        return [part.T.reshape(-1, *value.shape) for part, value in zip(parts, values, strict=True)]

    def _stacked(self, parts: Sequence[Tensor], k: int) -> Tensor:
        """One tensor (k, *shape) per parameter as columns (p, k)."""
        return torch.cat([part.reshape(k, -1).T for part in parts])


class GradientGraph(NamedTuple):
    """A batch's gradient as a function of the parameters; only the parts of it that depend on them."""

    tensors: list[Tensor]
    gradients: dict[int, Tensor]

    @classmethod
    def of(cls, loss: Tensor, tensors: list[Tensor]) -> GradientGraph:
        """That of a number; none is left where it depends on no parameter."""
        if not loss.requires_grad:
            return cls(tensors, {})
        gradients = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
        # A gradient that does not depend on the parameters (unused, or used linearly) has no second derivative.
        return cls(tensors, {i: gradient for i, gradient in enumerate(gradients) if gradient.requires_grad})


class Hessian(CurvatureOperator):
    """Hessian of the mean training loss, by exact double backward."""

    def _graph(self, batch: Batch) -> GradientGraph:
        inputs, targets = batch
        leaves = self.ctx.leaves(self.names)
        loss = self.ctx.problem.loss(self._outputs(inputs, leaves), targets).sum()
        return GradientGraph.of(loss, list(leaves.values()))

    def _batch_product(self, graph: GradientGraph, columns: Tensor) -> Tensor:
        if not graph.gradients:
            return torch.zeros_like(columns)
        vectors = self._unstacked(columns)
        along = [vectors[i] for i in graph.gradients]
        products = batched_gradient(list(graph.gradients.values()), graph.tensors, along)
        return self._stacked(products, columns.shape[1])


class OutputGraph(NamedTuple):
    """A batch's outputs f, Jᵀu as a function of u, and the gradient of the loss as a function of the outputs."""

    tensors: list[Tensor]
    outputs: Tensor
    direction: Tensor
    pulled: dict[int, Tensor]
    leaf: Tensor
    slope: Tensor


class GaussNewton(CurvatureOperator):
    """Generalized Gauss-Newton matrix: mean over samples of Jᵀ (∇² loss) J, J the outputs' Jacobian."""

    def _graph(self, batch: Batch) -> OutputGraph | None:
        inputs, targets = batch
        leaves = self.ctx.leaves(self.names)
        tensors = list(leaves.values())
        outputs = self._outputs(inputs, leaves)
        if not outputs.requires_grad:
            return None
        # J v by the double-backward trick: d/du of (J^T u) along v, at any u; no forward-mode support needed.
        direction = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, tensors, direction, create_graph=True, materialize_grads=True)
        leaf = outputs.detach().requires_grad_()
        slope = torch.autograd.grad(self.ctx.problem.loss(leaf, targets).sum(), leaf, create_graph=True)[0]
        if not slope.requires_grad:  # a loss linear in the outputs has no curvature
            return None
        alive = {i: part for i, part in enumerate(pulled) if part.requires_grad}
        return OutputGraph(tensors, outputs, direction, alive, leaf, slope)

    def _batch_product(self, graph: OutputGraph | None, columns: Tensor) -> Tensor:
        if graph is None:
            return torch.zeros_like(columns)
        vectors = self._unstacked(columns)
        along = [vectors[i] for i in graph.pulled]
        pushed = batched_gradient(list(graph.pulled.values()), [graph.direction], along)[0]  # (k, n, C)
        curved = batched_gradient([graph.slope], [graph.leaf], [pushed.detach()])[0]  # (k, n, C)
        products = batched_gradient([graph.outputs], graph.tensors, [curved])
        return self._stacked(products, columns.shape[1])


def batched_gradient(outputs: Sequence[Tensor], inputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Vector-Jacobian products for a stack of vectors (k, ...) at once; one by one where an operation forbids it."""
    k = vectors[0].shape[0] if vectors else 1
    if not outputs:
        return [value.new_zeros(k, *value.shape) for value in inputs]
    if k > 1:
        try:
            found = torch.autograd.grad(
                outputs, inputs, vectors, retain_graph=True, allow_unused=True, is_grads_batched=True
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


def sample_bytes(ctx: Context) -> int:
    """About what the graph of one sample's gradient takes; 0 where no layer is known."""
    return 8 * (torch.finfo(ctx.problem.dtype).bits // 8) * activations(ctx)


def batch_size(ctx: Context) -> int:
    """Samples per batch: enough that calls do not cost the time, and on a CPU so few that its caches help."""
    each = sample_bytes(ctx)
    if not each:
        return ctx.problem.batch_size
    # What is as large as the weights is computed once a batch: few samples must not pay for many weights.
    weights = 16 * (torch.finfo(ctx.problem.dtype).bits // 8) * count(ctx.trainable.values())
    budget = max(BATCH_BYTES, min(KEPT_BYTES, weights))
    if ctx.problem.device.type == "cuda":
        budget = max(budget, torch.cuda.mem_get_info(ctx.problem.device)[0] // GPU_SHARE)
    if ctx.effort.memory is not None:
        budget = min(budget, ctx.effort.memory // 2)
    return max(1, min(ctx.problem.n_train, max(budget // each, 32), 4096))
