"""Roots of the output Hessian: for each sample a matrix S with ∇²ℓ = S Sᵀ, or ∇²ℓ = S D Sᵀ with signs D.

Every number of the sweep is a sum of squares q(s_c) over the columns of S. They are made a block at a time, never as
one array for all classes; or drawn: with z of independent signs, E[q(Sz)] = Σ_c q(s_c), so one column Sz stands for
all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.curvature.hessian_products import hessian_product
from flatscope.limits import STANDARD
from flatscope.loss import Loss


@dataclass(frozen=True)
class Columns:
    """Columns of a batch, shape (k, n, *output), and their signs (k, n) where some are negative."""

    values: Tensor  # at the outputs
    column_signs: Tensor | None = None
    inner: Sequence[Tensor] = ()  # at the inputs of curved operations, where the columns have parts there

    def with_inner(self, pairs: Sequence[Tensor]) -> Columns:
        """Columns of draws with those at curved operations, of which every draw has two: a positive and a negative."""
        values = self.values
        if self.column_signs is None:  # the outputs have no negative part
            values = torch.stack([values, torch.zeros_like(values)], dim=1).flatten(0, 1)
        paired = values.reshape(-1, 2, *values.shape[1:])
        return Columns(values, _alternating(paired), pairs)

    def after(self, column: Tensor) -> Columns:
        """These columns behind one at the outputs alone, (n, *output)."""
        column_signs = self.column_signs
        if column_signs is not None:
            column_signs = torch.cat([torch.ones_like(column_signs[:1]), column_signs])
        inner = [torch.cat([torch.zeros_like(part[:1]), part]) for part in self.inner]
        return Columns(torch.cat([column[None].to(self.values), self.values]), column_signs, inner)


class Root(ABC):
    """A root of the output Hessians of a batch of samples."""

    count: int  # columns that give the whole Hessian of a sample
    width: int  # random signs that one draw takes for each sample
    per_draw: int = 1  # columns of one draw

    @abstractmethod
    def exact(self, start: int, stop: int) -> Columns:
        """Columns `start` to `stop`."""

    @abstractmethod
    def drawn(self, signs: Tensor) -> Columns:
        """Random columns from signs (draws, n, width); those of one draw stand together."""

    @abstractmethod
    def forms(self, outputs: Tensor) -> Tensor:
        """aᵀ(∇²ℓ)a for a change `a` of each sample's outputs, (n, *output) -> (n,)."""


def output_root(loss: Loss, outputs: Tensor, targets: Tensor) -> Root:
    """The root of the Hessian of each sample's loss with respect to its outputs."""
    outputs = outputs.detach()
    if loss.kind == "softmax":
        return SoftmaxRoot(loss, outputs, targets)
    if loss.kind == "logistic":
        logits, weights = loss.positions(outputs, targets)
        # σ(z) σ(−z) by logarithms: 1 − σ(z) would lose all digits of sure samples.
        spread = (0.5 * (functional.logsigmoid(logits) + functional.logsigmoid(-logits))).exp()
        return DiagonalRoot(spread * weights.sqrt(), outputs.shape)
    if loss.kind == "squared":
        flat = outputs.reshape(len(outputs), -1)
        return DiagonalRoot(torch.full_like(flat, 2**0.5), outputs.shape)
    slope = _Slope(loss, outputs, targets)
    return EigenRoot(slope) if slope.width <= STANDARD.dense_outputs else PairRoot(slope)


class SoftmaxRoot(Root):
    """Columns of a (diag(p) − ppᵀ) = a diag(√p) (I − √p√pᵀ) diag(√p) for each position of weight a: C−1 of them.

    The columns of a Householder reflection that sends √p to −e_m, without column m, are an orthonormal basis of the
    complement of √p. With m the largest class nothing cancels: 1 − p_m is never formed, so the digits survive in
    float32 when the network is sure of every sample. A fixed m, or √p∘z − p(√pᵀz), would lose them all.
    """

    def __init__(self, loss: Loss, outputs: Tensor, targets: Tensor) -> None:
        logits, weights = loss.positions(outputs, targets)  # (n, P, C), (n, P)
        self._loss, self._targets, self._shape = loss, targets, outputs.shape
        self._scale = weights.sqrt()[:, :, None]
        self._root = torch.log_softmax(logits, 2).mul_(0.5).exp_()
        self._top = self._root.argmax(2, keepdim=True)  # (n, P, 1)
        _, self._positions, self._classes = logits.shape
        self.count = self._positions * (self._classes - 1)
        self.width = self._positions * self._classes

    def exact(self, start: int, stop: int) -> Columns:
        """Columns `start` to `stop`: class by class, position after position."""
        number = torch.arange(start, min(stop, self.count), device=self._root.device)
        place, column = number // (self._classes - 1), number % (self._classes - 1)  # (k,)
        root, reflected = self._root[:, place], self._reflected(place)  # (n, k, C)
        kept = column[None, :, None] + (column[None, :, None] >= self._top[:, place])  # all classes but m, (n, k, 1)
        basis = -reflected * root.gather(2, kept)
        basis.scatter_add_(2, kept, torch.ones_like(kept, dtype=basis.dtype))
        local = root * basis * self._scale[:, place]  # (n, k, C)
        values = local.new_zeros(len(number), len(local), self._positions, self._classes)
        values[torch.arange(len(number), device=place.device), :, place] = local.transpose(0, 1)
        return self._as_outputs(values)

    def drawn(self, signs: Tensor) -> Columns:
        """All positions at once, in one column."""
        z = signs.reshape(len(signs), *self._root.shape)
        drawn = torch.empty_like(z)
        for some in self._positions_together(len(z)):
            root, top = self._root[:, some], self._top[:, some]
            part = z[:, :, some].scatter(3, top.expand(len(z), -1, -1, -1), 0.0)
            along = (root * part).sum(3, keepdim=True)  # (k, n, positions, 1)
            part -= self._reflected(some) * along
            torch.mul(part.mul_(root), self._scale[:, some], out=drawn[:, :, some])
        return self._as_outputs(drawn)

    def _reflected(self, positions: slice | Tensor) -> Tensor:
        """The vector v of the reflection over 1 + √p_m, at some positions: (n, positions, C)."""
        root, top = self._root[:, positions], self._top[:, positions]
        return (root / (1 + root.gather(2, top))).scatter_(2, top, 1.0)  # at m it is (√p_m + 1) / (1 + √p_m)

    def _positions_together(self, columns: int) -> Iterator[slice]:
        """Some positions after others: only the signs and the columns are then arrays as large as all outputs."""
        n, positions, classes = self._root.shape
        each = columns * n * classes * self._root.element_size()
        step = max(1, STANDARD.gradient_bytes // each)
        return (slice(start, start + step) for start in range(0, positions, step))

    def forms(self, outputs: Tensor) -> Tensor:
        """‖Sᵀa‖², from differences of logits: nothing cancels."""
        change = self._loss.positions(outputs, self._targets)[0]  # (n, P, C)
        total = change.new_zeros(len(change))
        for some in self._positions_together(1):
            root, there = self._root[:, some], change[:, some]
            along = (self._reflected(some) * root * there).sum(2, keepdim=True)
            parts = root * self._scale[:, some] * (there - along)
            total += parts.scatter(2, self._top[:, some], 0.0).square().sum((1, 2))
        return total

    def _as_outputs(self, values: Tensor) -> Columns:
        return Columns(self._loss.to_outputs(values, self._shape))


class DiagonalRoot(Root):
    """A Hessian that is diagonal: each output has one column of its own."""

    def __init__(self, scale: Tensor, shape: torch.Size) -> None:
        self._scale, self._shape = scale, shape  # (n, outputs)
        self.count = self.width = scale.shape[1]

    def exact(self, start: int, stop: int) -> Columns:
        """Columns `start` to `stop`."""
        number = torch.arange(start, min(stop, self.count), device=self._scale.device)
        values = self._scale.new_zeros(len(number), *self._scale.shape)
        values[torch.arange(len(number), device=number.device), :, number] = self._scale.T[number]
        return Columns(values.reshape(-1, *self._shape))

    def drawn(self, signs: Tensor) -> Columns:
        """All outputs at once, in one column."""
        return Columns((signs * self._scale).reshape(-1, *self._shape))

    def forms(self, outputs: Tensor) -> Tensor:
        """Squares of the scaled outputs."""
        return (outputs.reshape(self._scale.shape) * self._scale).square().sum(1)


class _Slope:
    """The derivative of a user's own loss at the outputs, to be differentiated once more."""

    def __init__(self, loss: Loss, outputs: Tensor, targets: Tensor) -> None:
        self.leaf = outputs.clone().requires_grad_()
        with torch.enable_grad():
            self._product = hessian_product(loss(self.leaf, targets).sum(), [self.leaf])
        self.width = self.leaf[0].numel()

    def products(self, vectors: Tensor) -> Tensor:
        """Hessian times vectors (k, n, outputs)."""
        return self._product([vectors.reshape(-1, *self.leaf.shape)])[0].reshape(vectors.shape)

    def units(self, start: int, stop: int) -> Tensor:
        """Unit vectors (k, n, outputs)."""
        unit = torch.eye(self.width, dtype=self.leaf.dtype, device=self.leaf.device)[start:stop]
        return unit[:, None, :].expand(-1, len(self.leaf), -1).contiguous()


class EigenRoot(Root):
    """Any twice-differentiable loss of few outputs: eigenvectors of the small Hessian, with the eigenvalues' signs."""

    def __init__(self, slope: _Slope) -> None:
        self._shape, self.count = slope.leaf.shape, slope.width
        self.width = slope.width
        hessians = slope.products(slope.units(0, slope.width)).permute(1, 0, 2)
        eigenvalues, eigenvectors = torch.linalg.eigh((hessians + hessians.mT) / 2)  # (n, C), (n, C, C)
        self._columns = eigenvectors * eigenvalues.abs().sqrt()[:, None, :]
        # Rounding makes zero eigenvalues slightly negative; only real ones need a sign.
        floor = eigenvalues.abs().amax(1, keepdim=True) * torch.finfo(hessians.dtype).eps * self.width
        negative = bool((eigenvalues < -floor).any())
        self._signs_of_eigenvalues = (
            torch.where(eigenvalues < 0, -1.0, 1.0).to(hessians.dtype) if negative else None
        )  # (n, C)
        self.per_draw = 2 if negative else 1

    def exact(self, start: int, stop: int) -> Columns:
        """Eigenvectors `start` to `stop`, times the roots of their eigenvalues."""
        values = self._columns[:, :, start:stop].permute(2, 0, 1)
        column_signs = None if self._signs_of_eigenvalues is None else self._signs_of_eigenvalues[:, start:stop].T
        return Columns(values.reshape(-1, *self._shape).contiguous(), column_signs)

    def drawn(self, signs: Tensor) -> Columns:
        """One column of the positive part and, where there is one, another of the negative part."""
        parts = (
            [signs]
            if self._signs_of_eigenvalues is None
            else [signs * (self._signs_of_eigenvalues > 0), signs * (self._signs_of_eigenvalues < 0)]
        )
        values = torch.stack([torch.einsum("nic,knc->kni", self._columns, part) for part in parts], dim=1)
        return Columns(values.reshape(-1, *self._shape), None if len(parts) == 1 else _alternating(values))

    def forms(self, outputs: Tensor) -> Tensor:
        """Squares along the eigenvectors."""
        squares = torch.einsum("nic,ni->nc", self._columns, outputs.reshape(len(outputs), -1)).square()
        return (squares if self._signs_of_eigenvalues is None else squares * self._signs_of_eigenvalues).sum(1)


class PairRoot(Root):
    """Any twice-differentiable loss of many outputs, by products: q(z, Hz) as a difference of two squares.

    q(z, Hz) = q((τz + Hz/τ)/2) − q((τz − Hz/τ)/2); τ² = ‖Hz‖/‖z‖ makes the two of one size.
    """

    per_draw = 2

    def __init__(self, slope: _Slope) -> None:
        self._slope = slope
        self.count, self.width = 2 * slope.width, slope.width

    def exact(self, start: int, stop: int) -> Columns:
        """Columns `start` to `stop`, two for each output."""
        first = start // 2
        pairs = self.drawn(self._slope.units(first, -(-min(stop, self.count) // 2)))
        part = slice(start - 2 * first, min(stop, self.count) - 2 * first)
        assert pairs.column_signs is not None
        return Columns(pairs.values[part], pairs.column_signs[part])

    def drawn(self, signs: Tensor) -> Columns:
        """Two columns."""
        curved = self._slope.products(signs)
        ratio = (curved.norm(dim=2, keepdim=True) / signs.norm(dim=2, keepdim=True)).sqrt()
        curved = curved / ratio.where(ratio > 0, 1.0)
        given = signs * ratio
        values = torch.stack([given + curved, given - curved], dim=1) / 2  # (k, 2, n, outputs)
        return Columns(values.reshape(-1, *self._slope.leaf.shape), _alternating(values))

    def forms(self, outputs: Tensor) -> Tensor:
        """By one product."""
        flat = outputs.reshape(1, len(outputs), -1)
        return (flat * self._slope.products(flat)).sum((0, 2))


def _alternating(values: Tensor) -> Tensor:
    """Signs (2 k, n) of columns (k, 2, n, …): +1 for the first of each draw and −1 for the second."""
    pair = torch.tensor([1.0, -1.0], dtype=values.dtype, device=values.device)
    return pair.repeat(len(values))[:, None].expand(-1, values.shape[2])
