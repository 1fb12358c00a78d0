"""Curvature as a linear operator: exact Hessian and Gauss-Newton products, streamed over the data.

One pass over the data serves a whole block of vectors: each batch is run forward and backward once, and its
second backward is taken for all vectors together.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.coarse_search import has_coarse_products
from flatscope.curvature.convolutions import FastConvolutions
from flatscope.curvature.estimators import TRACE, Asked, DiagonalQuantities, diagonal_sums
from flatscope.curvature.hessian_products import Product, gauss_newton_product, hessian_product
from flatscope.curvature.linear_systems import Solution, solved
from flatscope.curvature.memory import allowed, fitted
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.replayed_products import ReplayedProduct, capturer_for
from flatscope.curvature.second_derivative import refuse_wrong_jacobian_products, refuse_wrong_second_derivative
from flatscope.curvature.symmetric_operator import Gather, Parts, SymmetricOperator, Vectors
from flatscope.errors import InputError, differentiated_twice, refuse_unknown
from flatscope.formatting import first_of_names
from flatscope.isolation import own_settings
from flatscope.limits import STANDARD
from flatscope.params import Params, count_scalars, flatten, unflatten
from flatscope.samples import Batch, slice_inputs

BatchLoss = Callable[[Tensor], Tensor]  # outputs of a batch to the sum of its samples' losses


class Trace(NamedTuple):
    """A trace, its standard error (0 where it is exact) and the products that it took."""

    value: float
    stderr: float
    products: int


class CurvatureOperator(SymmetricOperator):
    """A matrix of curvature over some of the network's parameter tensors: a mean over samples.

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

    CONVEX: ClassVar = False  # whether no eigenvalue is negative, for a loss that is convex in the outputs

    def __init__(self, ctx: Context, names: Iterable[str] | None = None, groups: int = 1) -> None:
        self.ctx = ctx
        self.names: tuple[str, ...] = tuple(ctx.problem.trainable if names is None else names)
        for name in self.names:
            refuse_unknown(name, ctx.params, "parameter")
        super().__init__(count_scalars(ctx.params[name] for name in self.names), ctx.problem.device, groups)
        self._batch_size = batch_size(ctx)
        self._kept: list[tuple[int, Product]] = []  # of every batch, with the number of its group
        self._capturer = capturer_for(ctx.problem.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {first_of_names(self.names, 3)}: {self.size:,} × {self.size:,}"

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
            fix = "`op.to_scipy()` takes NumPy's arrays, `op.flatten` makes a vector of tensors by name"
            raise InputError(f"a tensor of vectors of length {self.size}", got, where="product", fix=fix)
        if vectors.is_complex():
            fix = "Take the products with the real and with the imaginary part"
            raise InputError("real vectors", str(vectors.dtype), where="product", fix=fix)
        vectors = vectors.detach() if vectors.is_floating_point() else vectors.double()
        columns = vectors.reshape(self.size, -1)  # (p, k)
        (total,) = self.by_groups(lambda _: columns, partial(self._added, columns.shape[1]))
        return total.reshape(vectors.shape)

    def solve(
        self, v: Tensor | Params, damping: float = 0.0, *, tolerance: float = 1e-6, most_products: int = 1000
    ) -> Solution:
        """The x of (A + damping · I) x = v: by conjugate gradients for Gauss-Newton, by MINRES for the Hessian.

        Args:
            v: a vector (p,), or tensors by name.
            damping: added to the diagonal.
            tolerance: relative residual to end at; float32 products seldom get below 1e-6.
            most_products: give up there; the solution then says so.

        Returns:
            x with its residual, and a direction of negative curvature where one was met.
        """
        vector = v if isinstance(v, Tensor) or not isinstance(v, Mapping) else self.flatten(dict(v))
        eps = torch.finfo(self.ctx.problem.dtype).eps
        return solved(self, vector, damping, tolerance, most_products, convex=self.CONVEX, eps=eps)

    def trace(self, precision: float = 0.02, *, most_products: int = STANDARD.most_products, seed: int = 0) -> Trace:
        """The trace with its standard error: exact for few entries, else from products with random signs.

        On a GPU most of them are in TF32 where two in full say that this is good enough; the error holds what is left.

        Args:
            precision: relative standard error to end at; 0 for one product an entry.
            most_products: give up there, with the error that was reached.
            seed: of the random signs.
        """
        limits = self.ctx.effort.limits
        asked = Asked(precision, most_products, coarse=has_coarse_products(self.ctx))
        signs = Signs(seed, "trace of an operator")
        found = diagonal_sums(DiagonalQuantities(self), signs, asked, limits)
        value, stderr = float(found.values[TRACE].sum()), float(found.stderrs[TRACE].sum())
        return Trace(value, 0.0 if found.exact else stderr, found.products)

    def _added(self, k: int, parts: Parts) -> list[Tensor]:
        """The groups' products in one, (p, k)."""
        total = None
        for _, part in parts:
            total = part if total is None else total.add_(part)
        return [torch.zeros(self.size, k, dtype=torch.float64, device=self.device) if total is None else total]

    @own_settings()
    def by_groups(self, vectors: Vectors, gather: Gather) -> list[Tensor]:
        """Sums over the ranks of what is gathered from products of every group with vectors of its own."""
        return self.ctx.problem.ranks.summed(self._of_this_rank(vectors, gather))

    def _of_this_rank(self, vectors: Vectors, gather: Gather) -> Sequence[Tensor]:
        """Tensors gathered in one pass, with batches so small that it fits."""
        while self.ctx.problem.ranks.anywhere((found := self._tried(vectors, gather)) is None):
            if self._batch_size == 1:
                raise torch.OutOfMemoryError("a curvature product of one sample does not fit into the GPU's memory")
            self._kept.clear()
            self._batch_size = max(1, self._batch_size // 2)
        assert found is not None
        return found

    def _tried(self, vectors: Vectors, gather: Gather) -> Sequence[Tensor] | None:
        with differentiated_twice():
            return fitted(lambda: gather(self._products(vectors)))

    def release(self) -> None:
        """Drop what is kept between products; the next one computes it again."""
        self._kept.clear()

    def _products(self, vectors: Vectors) -> Parts:
        """The products of each group of this rank's samples."""
        n, group = self.ctx.problem.n_train, -1
        columns = scales = total = torch.zeros(0)
        for number, product in self._batch_products():
            if number != group:
                if group >= 0:
                    yield group, total.mul_(scales).div_(n)
                columns, scales = self._scaled(vectors(number))
                total = torch.zeros_like(columns, dtype=torch.float64)
                if group < 0:
                    self.ctx.charge_passes("curvature", n * columns.shape[1])
                group = number
            for part in self._blocks(columns.shape[1]):
                total[:, part] += self._stacked(product(self._unstacked(columns[:, part])))
            del product  # only one batch's graph is to be held
        if group >= 0:
            yield group, total.mul_(scales).div_(n)

    def _scaled(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors (p, k) of length about one in the network's numbers, and powers of two that give their lengths.

        float32 cannot hold all that float64 does.
        """
        vectors = vectors.to(self.device)
        lengths = torch.linalg.vector_norm(vectors, dim=0, dtype=torch.float64)
        scales = torch.exp2(torch.where(lengths > 0, lengths, 1.0).log2().round())
        return (vectors / scales.to(vectors.dtype)).to(self.ctx.problem.dtype), scales

    def _batch_products(self) -> Iterator[tuple[int, Product]]:
        """Of all batches of this rank's samples, with the numbers of their groups."""
        if self._kept:
            yield from self._kept
            return
        kept: list[tuple[int, Product]] | None = [] if self._may_keep() else None
        n, start = self.ctx.problem.n_train, self.ctx.problem.ranks.share(self.ctx.problem.n_train)[0]
        for inputs, targets in self.ctx.share(size=self._batch_size):
            done = 0
            while done < len(targets):
                group = ((start + done + 1) * self.groups - 1) // n  # begins with sample ⌊group · n / groups⌋
                stop = min(len(targets), (group + 1) * n // self.groups - start)
                make = partial(self._product_of, (slice_inputs(inputs, done, stop), targets[done:stop]))
                product = make() if kept is None else self._kept_product(make)
                if kept is not None:
                    kept.append((group, product))
                yield group, product
                del product  # the next batch's takes its place
                done = stop
            start += len(targets)
        self._kept = kept or []  # of some batches it would be of no use

    def _kept_product(self, make: Callable[[], Product]) -> Product:
        """A batch's product that comes again and again: on a GPU replayed as a CUDA graph as soon as that pays."""
        if self._capturer is None:
            return make()
        return ReplayedProduct(make, self._capturer, self.ctx.effort.limits)

    def _may_keep(self) -> bool:
        """True where the graphs of all batches fit: of some of them would not do, since a loader may shuffle."""
        most = allowed(self.ctx.effort.limits.kept_memory, self.device, self.ctx.effort.memory)
        start, stop = self.ctx.problem.ranks.share(self.ctx.problem.n_train)
        return 0 < (stop - start) * sample_bytes(self.ctx) <= most

    def _blocks(self, n_columns: int) -> list[slice]:
        """Columns that may be differentiated together: each holds weights and activations once more."""
        if n_columns == 1:
            return [slice(0, 1)]  # what is free on a GPU takes longer to ask than a small product
        item = torch.finfo(self.ctx.problem.dtype).bits // 8
        per_column = 8 * self.size + 3 * item * activations(self.ctx) * self._batch_size
        most = 2 * allowed(self.ctx.effort.limits.block_memory, self.device, self.ctx.effort.memory)
        width = max(1, most // max(1, per_column))
        return [slice(start, start + width) for start in range(0, n_columns, width)]

    @abstractmethod
    def _batch_product(self, outputs: Tensor, params: list[Tensor], loss: BatchLoss) -> Product:
        """Sum over a batch's samples of the products, as a function of the vectors.

        Args:
            outputs: of the network, with a graph.
            params: the tensors by which they are differentiated.
            loss: the batch's loss as a function of the outputs, summed over samples.
        """

    def _product_of(self, batch: Batch) -> Product:
        """All of a batch's product that does not depend on the vector, in its graph."""
        inputs, targets = batch
        leaves = self.ctx.leaves(self.names)
        with torch.enable_grad():
            with FastConvolutions():
                outputs = self.ctx.forward(inputs, {**self.ctx.params, **leaves})
            loss = self.ctx.problem.loss
            return self._batch_product(outputs, list(leaves.values()), lambda found: loss(found, targets).sum())

    def _unstacked(self, columns: Tensor) -> list[Tensor]:
        """The columns as one tensor (k, *shape) per parameter."""
        values = [self.ctx.params[name] for name in self.names]
        parts = torch.split(columns, [value.numel() for value in values])
        return [part.T.reshape(-1, *value.shape) for part, value in zip(parts, values, strict=True)]

    def _stacked(self, parts: Sequence[Tensor]) -> Tensor:
        """One tensor (k, *shape) per parameter as columns (p, k)."""
        return torch.cat([part.flatten(1).T if part.ndim > 1 else part[None] for part in parts])


class Hessian(CurvatureOperator):
    """Hessian of the mean training loss, by exact double backward."""

    def __init__(self, ctx: Context, names: Iterable[str] | None = None, groups: int = 1) -> None:
        refuse_wrong_second_derivative(ctx)
        super().__init__(ctx, names, groups)

    def _batch_product(self, outputs: Tensor, params: list[Tensor], loss: BatchLoss) -> Product:
        return hessian_product(loss(outputs), params)


class GaussNewton(CurvatureOperator):
    """Generalized Gauss-Newton matrix: mean over samples of Jᵀ (∇² loss) J, J the outputs' Jacobian."""

    CONVEX = True

    def __init__(self, ctx: Context, names: Iterable[str] | None = None, groups: int = 1) -> None:
        refuse_wrong_jacobian_products(ctx)
        super().__init__(ctx, names, groups)

    def _batch_product(self, outputs: Tensor, params: list[Tensor], loss: BatchLoss) -> Product:
        return gauss_newton_product(outputs, params, loss)


class BeyondGaussNewton(Hessian):
    """Σ ∂ℓ/∂f_c ∇²f_c, averaged over samples: the Hessian without its Gauss-Newton part."""

    def _batch_product(self, outputs: Tensor, params: list[Tensor], loss: BatchLoss) -> Product:
        leaf = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(leaf), leaf)
        return hessian_product((outputs * slope).sum(), params)


def curvature_operator(ctx: Context, names: Sequence[str] | None, groups: int = 1) -> CurvatureOperator:
    """The matrix that the context asks for, over some parameters."""
    kind = GaussNewton if ctx.effort.curvature == "gauss_newton" else Hessian
    return kind(ctx, names, groups)


def sample_groups(ctx: Context) -> int:
    """Number of groups that the data are divided into: the same whatever the number of ranks."""
    limits, work = ctx.effort.limits, max(1.0, multiplications(ctx))
    least = limits.gpu_group_work if ctx.problem.device.type == "cuda" else limits.group_work
    # What is as large as the weights is computed once a group: few samples must not pay for many weights.
    least = max(least, limits.least_group * count_scalars(ctx.trainable.values()))
    samples = min(limits.least_group, math.ceil(least / work))
    return max(1, min(limits.most_groups, ctx.problem.n_train // samples))


def multiplications(ctx: Context) -> float:
    """Multiplications of one sample's forward pass, in the layers."""
    total = 0.0
    for layer in ctx.network:
        weight = ctx.params[layer.weight]
        shape = layer.input_shape if layer.input_first else layer.output_shape
        total += weight.numel() * layer.uses * max(1, math.prod(shape) // len(weight))
    return total


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
    weights = 16 * (torch.finfo(ctx.problem.dtype).bits // 8) * count_scalars(ctx.trainable.values())
    limits, asked = ctx.effort.limits, ctx.effort.memory
    budget = max(allowed(limits.batch_memory, ctx.problem.device), min(limits.large_batch, weights))
    if asked is not None:
        budget = min(budget, allowed(limits.batch_memory, ctx.problem.device, asked))
    n = ctx.problem.n_train
    fitting = max(1, min(n, max(budget // each, limits.least_batch), limits.most_batch))
    # Batches of one size: a small one at the end would read all weights for few samples.
    batches = -(-n // fitting) if asked is not None else max(1, round(n / fitting))
    return -(-n // batches)
