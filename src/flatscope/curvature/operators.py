"""Curvature as a linear operator: exact Hessian and Gauss-Newton products, streamed over the data.

One pass over the data serves a whole block of vectors: each batch is run forward and backward once, and its
second backward is taken for all vectors together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.convolutions import FastConvolutions
from flatscope.curvature.memory import allowed, fitted
from flatscope.curvature.sample_groups import Parts, T, Vectors
from flatscope.curvature.second_derivative import refuse_wrong_jacobian_products, refuse_wrong_second_derivative
from flatscope.curvature.vector_jacobian import batched_gradient
from flatscope.errors import InputError, differentiated_twice, refuse_unknown
from flatscope.guards import own_settings
from flatscope.params import Params, count, flatten, unflatten
from flatscope.samples import Batch, Inputs, cut


class CurvatureOperator(ABC):
    """A symmetric p × p matrix known by its products, over some of the network's parameter tensors.

    Rows and columns are the entries of the tensors `names`, one after the other. What the first product of a batch
    computed before any vector came in is kept for the next products, as far as the memory for that goes
    (`Limits.kept_memory`).

    Args:
        ctx: the point in weight space; its pass counter is charged.
        names: parameter tensors to differentiate; all trainable ones by default.
        groups: parts of the data that may have vectors of their own (`by_groups`); no batch reaches into two.

    Attributes:
        names: the parameter tensors, in the order of the vector.
        size: number of their entries.
        groups: number of parts of the data.

    Example:
        >>> import torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(2, 1).double(), train=(torch.eye(2), torch.zeros(2)), loss="mse")
        >>> op = fs.hessian(problem)
        >>> op.names, op.shape
        (('weight', 'bias'), (3, 3))
        >>> op.unflatten(op @ op.flatten({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}))
        {'weight': tensor([[1., 1.]], dtype=torch.float64), 'bias': tensor([2.], dtype=torch.float64)}
    """

    def __init__(self, ctx: Context, names: Iterable[str] | None = None, groups: int = 1) -> None:
        self.ctx, self.groups = ctx, groups
        self.names: tuple[str, ...] = tuple(ctx.problem.trainable if names is None else names)
        for name in self.names:
            refuse_unknown(name, ctx.params, "parameter")
        self.size = count(ctx.params[name] for name in self.names)
        self._batch_size = batch_size(ctx)
        self._kept: list[tuple[int, Any]] = []  # graphs with the numbers of their groups

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        return self.size, self.size

    def summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the ranks."""
        return self.ctx.problem.ranks.summed(tensors)

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
        if vectors.is_complex():
            fix = "Take the products with the real and with the imaginary part"
            raise InputError("real vectors", str(vectors.dtype), where="product", fix=fix)
        vectors = vectors if vectors.is_floating_point() else vectors.double()
        columns = vectors.reshape(self.size, -1)  # (p, k)
        total = self._in_memory(lambda: self._sum(columns))
        self.ctx.count("curvature", self.ctx.problem.n_train * columns.shape[1])
        (total,) = self.summed([total])
        return total.div_(self.ctx.problem.n_train).reshape(vectors.shape)

    @own_settings()
    def by_groups(self, vectors: Vectors, gather: Callable[[Parts], T]) -> T:
        """Products of every group's samples with vectors of its own, each a part of the mean over all samples.

        Args:
            vectors: (p, k) by the number of the group.
            gather: what to make of the groups' numbers and products (p, k), which come one by one; only of this rank's
                samples. It may be called again where the memory did not suffice.
        """
        return self._in_memory(lambda: gather(self._products(vectors)))

    def _in_memory(self, work: Callable[[], T]) -> T:
        """The result of a pass, with batches so small that it fits."""
        while self.ctx.problem.ranks.anywhere((found := self._tried(work)) is None):
            if self._batch_size == 1:
                raise torch.OutOfMemoryError("a curvature product of one sample does not fit into the GPU's memory")
            self._kept.clear()
            self._batch_size = max(1, self._batch_size // 2)
        assert found is not None
        return found

    def _tried(self, work: Callable[[], T]) -> T | None:
        with differentiated_twice():
            return fitted(work)

    def release(self) -> None:
        """Drop what is kept between products; the next one computes it again."""
        self._kept.clear()

    def _sum(self, vectors: Tensor) -> Tensor:
        """Sum over this rank's samples of the products with columns (p, k)."""
        columns, scales = self._scaled(vectors)
        total = torch.zeros_like(columns, dtype=torch.float64)
        for _, graph in self._graphs():
            self._add(total, graph, columns)
            del graph  # only one batch's is to be held
        return total.mul_(scales)

    def _products(self, vectors: Vectors) -> Parts:
        """The products of each group of this rank's samples."""
        n, at = self.ctx.problem.n_train, -1
        columns = scales = total = torch.zeros(0)
        for group, graph in self._graphs():
            if group != at:
                if at >= 0:
                    yield at, total.mul_(scales).div_(n)
                columns, scales = self._scaled(vectors(group))
                total = torch.zeros_like(columns, dtype=torch.float64)
                if at < 0:
                    self.ctx.count("curvature", n * columns.shape[1])
                at = group
            self._add(total, graph, columns)
            del graph
        if at >= 0:
            yield at, total.mul_(scales).div_(n)

    def _scaled(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors (p, k) of length about one in the network's numbers, and powers of two that give their lengths.

        float32 cannot hold all that float64 does.
        """
        vectors = vectors.to(self.device)
        lengths = torch.linalg.vector_norm(vectors, dim=0, dtype=torch.float64)
        scales = torch.exp2(torch.where(lengths > 0, lengths, 1.0).log2().round())
        return (vectors / scales.to(vectors.dtype)).to(self.ctx.problem.dtype), scales

    def _add(self, total: Tensor, graph: Any, columns: Tensor) -> None:
        for a, b in self._blocks(columns.shape[1]):
            total[:, a:b] += self._batch_product(graph, columns[:, a:b])

    def _graphs(self) -> Iterator[tuple[int, Any]]:
        """Of all batches of this rank's samples, with the numbers of their groups."""
        if self._kept:
            yield from self._kept
            return
        kept: list[tuple[int, Any]] | None = [] if self._may_keep() else None
        n, start = self.ctx.problem.n_train, self.ctx.problem.ranks.share(self.ctx.problem.n_train)[0]
        for inputs, targets in self.ctx.share(size=self._batch_size):
            done = 0
            while done < len(targets):
                group = ((start + done + 1) * self.groups - 1) // n  # begins with sample ⌊group · n / groups⌋
                stop = min(len(targets), (group + 1) * n // self.groups - start)
                graph = self._graph((cut(inputs, done, stop), targets[done:stop]))
                if kept is not None:
                    kept.append((group, graph))
                yield group, graph
                del graph  # the next batch's takes its place
                done = stop
            start += len(targets)
        self._kept = kept or []  # of some batches it would be of no use

    def _may_keep(self) -> bool:
        """Whether the graphs of all batches fit: of some of them would not do, since a loader may shuffle."""
        most = allowed(self.ctx.effort.limits.kept_memory, self.device, self.ctx.effort.memory)
        start, stop = self.ctx.problem.ranks.share(self.ctx.problem.n_train)
        return 0 < (stop - start) * sample_bytes(self.ctx) <= most

    def to_scipy(self) -> LinearOperator:
        """The same operator for SciPy's solvers, in float64 on the CPU side."""

        def product(array: np.ndarray) -> np.ndarray:
            if np.iscomplexobj(array):
                return product(array.real) + 1j * product(array.imag)
            return (self @ torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))).cpu().numpy()

        return LinearOperator(self.shape, matvec=product, matmat=product, rmatvec=product, dtype=np.float64)

    def _blocks(self, n_columns: int) -> list[tuple[int, int]]:
        """Ranges of columns that may be differentiated together: each holds weights and activations once more."""
        item = torch.finfo(self.ctx.problem.dtype).bits // 8
        per_column = 8 * self.size + 3 * item * activations(self.ctx) * self._batch_size
        most = 2 * allowed(self.ctx.effort.limits.block_memory, self.device, self.ctx.effort.memory)
        width = max(1, min(n_columns, most // max(1, per_column)))
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

    def __init__(self, ctx: Context, names: Iterable[str] | None = None, groups: int = 1) -> None:
        refuse_wrong_second_derivative(ctx)
        super().__init__(ctx, names, groups)

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

    def __init__(self, ctx: Context, names: Iterable[str] | None = None, groups: int = 1) -> None:
        refuse_wrong_jacobian_products(ctx)
        super().__init__(ctx, names, groups)

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


def curvature_operator(ctx: Context, names: Sequence[str] | None, groups: int = 1) -> CurvatureOperator:
    """The matrix that the context asks for, over some parameters."""
    kind = GaussNewton if ctx.effort.curvature == "gauss_newton" else Hessian
    return kind(ctx, names, groups)


def sample_groups(ctx: Context) -> int:
    """How many groups the data are divided into: the same on all machines, and whatever the number of ranks."""
    limits = ctx.effort.limits
    return max(1, min(limits.most_groups, ctx.problem.n_train // limits.least_group))


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
    limits, asked = ctx.effort.limits, ctx.effort.memory
    budget = max(allowed(limits.batch_memory, ctx.problem.device), min(limits.large_batch, weights))
    if asked is not None:
        budget = min(budget, allowed(limits.batch_memory, ctx.problem.device, asked))
    return max(1, min(ctx.problem.n_train, max(budget // each, 32), 4096))
