"""Trace of an operator from random products, with a standard error that can be trusted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from flatscope.curvature.signs import Signs
from flatscope.errors import InputError, NumericalWarning

# So few directions are always taken one by one, which is exact.
FEW = 512
MULTIPLIED_OUT = 1024
# And no more than so many, even where exact values are asked for.
MOST_EXACT = 16_384
COLUMNS = 32
FIRST_LOOK = 16
SKETCH_BYTES = 2**30
BLOCK_BYTES = 2**28

Key = tuple[str, str]
Readings = dict[Key, Tensor]


class Operator(Protocol):
    """Anything symmetric that can be multiplied with columns (p, k)."""

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        ...

    def __matmul__(self, vectors: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class TraceEstimate:
    """A number with the standard error of its estimator and the products it took."""

    value: float
    stderr: float
    products: int
    exact: bool
    converged: bool


def trace(
    operator: Operator,
    generator: torch.Generator,
    *,
    accuracy: float = 0.01,
    sketch: int = 16,
    most_products: int = 1024,
    block: int = 16,
    offset: float = 0.0,
) -> TraceEstimate:
    """Trace to a requested relative standard error (Hutch++ with sequential stopping).

    A sketch catches the few large eigenvalues exactly: tr(QᵀAQ) with Q an orthonormal basis of A applied to
    random signs. The rest, (I−QQᵀ)A(I−QQᵀ), is estimated with independent random signs; their spread is the
    standard error. It is looked at only after 32, 64, 128, … signs: stopping at the first moment that looks good
    would stop by luck. A matrix of at most 1,024 columns is multiplied out instead if `most_products` allows: exact.

    Args:
        operator: symmetric matrix.
        generator: random signs are drawn from it on the CPU.
        accuracy: stop when the standard error is below this fraction of the absolute value.
        sketch: columns of Q; 0 gives plain Hutchinson.
        most_products: give up there, with a warning and `converged=False`.
        block: columns multiplied together.
        offset: a known part of the whole: accuracy is asked of `offset + trace`, the trace alone is returned.
    """
    size = operator.shape[0]
    first_look = 32
    if accuracy <= 0 or most_products < 1 or sketch < 0 or block < 1:
        raise InputError(
            "positive accuracy, products and block", f"{accuracy}, {most_products}, {block}", where="trace"
        )
    if size <= min(MULTIPLIED_OUT, most_products):
        return TraceEstimate(_trace_of_columns(operator, torch.eye(size, dtype=torch.float64)), 0.0, size, True, True)
    basis = torch.zeros(size, 0, dtype=torch.float64)
    top = 0.0
    if sketch:
        basis = torch.linalg.qr((operator @ _signs(size, sketch, generator)).cpu())[0]  # (p, sketch)
        top = _trace_of_columns(operator, basis)
    samples = torch.zeros(0, dtype=torch.float64)
    products, look = 2 * sketch, first_look
    while True:
        wanted = min(look, max(2, most_products - 2 * sketch))
        while len(samples) < wanted:
            signs = _signs(size, min(block, wanted - len(samples)), generator)
            rest = signs - basis @ (basis.T @ signs)  # (p, k)
            samples = torch.cat([samples, (rest * (operator @ rest).cpu()).sum(0)])
            products += rest.shape[1]
        value = top + float(samples.mean())
        stderr = float(samples.std()) / math.sqrt(len(samples))
        if stderr <= accuracy * abs(offset + value):
            return TraceEstimate(value, stderr, products, False, True)
        if products >= most_products:
            warnings.warn(
                f"trace: standard error {stderr:.2g} of {value:.4g} after {products} products, asked for "
                f"{accuracy:.2g} relative; raise most_products",
                NumericalWarning,
                stacklevel=2,
            )
            return TraceEstimate(value, stderr, products, False, False)
        look *= 2


def _signs(size: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (size, columns), generator=generator, dtype=torch.float64) * 2 - 1


def _trace_of_columns(operator: Operator, columns: Tensor) -> float:
    parts = torch.split(columns, COLUMNS, dim=1)  # all at once they would take more memory, and no less time
    return sum(float((part * (operator @ part).cpu()).sum()) for part in parts)


class DiagonalOperator(Operator, Protocol):
    """A symmetric matrix whose diagonal is added up to several values at once."""

    device: torch.device

    def diagonal(self, block: int) -> Tensor:
        """The whole diagonal by one product per direction, (p, 1)."""
        ...

    def read(self, entries: Tensor) -> Readings:
        """Values (units, k) from entries of the diagonal (p, k): linear."""
        ...

    def has_row(self, name: str) -> bool:
        """Whether the values of that name are asked for with a precision."""
        ...


@dataclass
class DiagonalSums:
    """Sums over the diagonal of an operator.

    Attributes:
        values: (units,) by (parameter, quantity).
        stderrs: their standard errors.
        directions: entries of the diagonal.
        products: those that were taken.
        exact: whether every direction was multiplied out.
        missed: why the estimate ended before the precision was reached; empty where it was.
    """

    values: Readings = field(default_factory=dict)
    stderrs: Readings = field(default_factory=dict)
    directions: int = 0
    products: int = 0
    exact: bool = True
    missed: str = ""


class Spread:
    """Mean and standard error of the columns of readings, which come block by block."""

    def __init__(self) -> None:
        self.n = 0
        self._means: Readings = {}
        self._deviations: Readings = {}

    def add(self, readings: Readings) -> None:
        """Let in k columns of every value, (units, k)."""
        for key, part in readings.items():
            k, mean = part.shape[1], part.mean(1)
            deviations = (part - mean[:, None]).square().sum(1)
            if self.n:
                moved = mean - self._means[key]
                deviations += self._deviations[key] + moved.square() * (self.n * k / (self.n + k))
                mean = self._means[key] + moved * (k / (self.n + k))
            self._means[key], self._deviations[key] = mean, deviations
        self.n += k

    def values(self, known: Readings) -> Readings:
        """The means, with what is known beforehand added."""
        return {key: mean + known[key][:, 0] if known else mean for key, mean in self._means.items()}

    @property
    def stderrs(self) -> Readings:
        """Standard errors of the means; infinite for a single column."""
        freedom = self.n * (self.n - 1) if self.n > 1 else 0.0
        return {key: (d / freedom).sqrt() if freedom else d + math.inf for key, d in self._deviations.items()}


def diagonal_sums(
    operator: DiagonalOperator,
    signs: Signs,
    *,
    precision: float,
    most_products: int,
    offsets: dict[Key, float],
    over: Callable[[], bool],
) -> DiagonalSums:
    """Sums over the diagonal of an operator to a relative standard error, all from the same products.

    With random signs ζ, ζ∘Aζ has the diagonal as its mean. If the first draws show that many more are needed, their
    products span the directions of the large eigenvalues: with Q an orthonormal basis of them, the diagonal of
    A − (I−QQᵀ)A(I−QQᵀ) is known from AQ, and only that of the rest is left to draws (Hutch++ for all sums at once).
    Few directions, or fewer than the draws would need, are multiplied out instead: exact.

    Args:
        operator: the matrix, and how its diagonal is read.
        signs: the random stream.
        precision: stop when the largest relative standard error is below it; 0 for exact values.
        most_products: give up there.
        offsets: known parts of the network's values, which the precision counts in.
        over: whether the time is up.
    """
    size = operator.shape[0]
    if not size:
        return DiagonalSums()
    block = max(1, min(FIRST_LOOK, BLOCK_BYTES // (8 * size)))
    if size <= min(FEW, most_products) or (precision <= 0 and size <= MOST_EXACT):
        return _multiplied_out(operator, size, block)
    draws = ProductDraws(operator, signs, block)
    keep = precision > 0 and 8 * size * FIRST_LOOK <= SKETCH_BYTES
    products = draws.take(FIRST_LOOK, keep=keep)
    look, deflated, missed = FIRST_LOOK, False, ""
    while True:
        values, stderrs = draws.spread.values(draws.known), draws.spread.stderrs
        error = _worst(operator, values, stderrs, offsets)
        if error <= precision:
            break
        needed = look * (error / precision) ** 2 if precision > 0 else math.inf
        if cheaper_one_by_one(size, needed, most_products):
            return _multiplied_out(operator, size, block, products)
        if products >= most_products or over():
            missed = f"{precision:.2g} relative not reached in {products} products"
            break
        if keep and not deflated and needed > 4 * FIRST_LOOK and products + 2 * FIRST_LOOK <= most_products:
            products += draws.deflate()
            look, deflated = 0, True
        following = max(FIRST_LOOK, 2 * look)
        products += draws.take(max(1, min(following - look, most_products - products)))
        look = draws.spread.n
    values = {key: value.cpu() for key, value in values.items()}
    return DiagonalSums(values, {key: value.cpu() for key, value in stderrs.items()}, size, products, False, missed)


def cheaper_one_by_one(directions: int, needed: float, most_products: int) -> bool:
    """Whether a product for every direction costs no more than the draws that are needed, and no more than allowed."""
    return directions <= min(needed, most_products)


class ProductDraws:
    """Random products of an operator, with the directions of its large eigenvalues taken out if asked for."""

    def __init__(self, operator: DiagonalOperator, signs: Signs, block: int) -> None:
        self._operator, self._signs, self._block = operator, signs, block
        self._next = 0
        self._kept: list[Tensor] = []
        self._basis: Tensor | None = None
        self.known: Readings = {}
        self.spread = Spread()

    def take(self, count: int, keep: bool = False) -> int:
        """Take some draws; the number of products."""
        size, one = self._operator.shape[0], torch.zeros(1, dtype=torch.long, device=self._operator.device)
        for start in range(self._next, self._next + count, self._block):
            some = range(start, min(start + self._block, self._next + count))
            z = self._signs.draw(one, some, size, torch.float64)[:, 0].T  # (p, k)
            product = self._rest(self._operator @ self._rest(z))
            self.spread.add(self._operator.read(z * product))
            if keep:
                self._kept.append(product)
        self._next += count
        return count

    def deflate(self) -> int:
        """Take out what the kept products span, and begin anew; the number of products."""
        basis = torch.linalg.qr(torch.cat(self._kept, dim=1))[0]  # (p, s)
        self._kept.clear()
        curved = torch.cat([self._operator @ part for part in torch.split(basis, self._block, dim=1)], dim=1)
        core = basis.T @ curved
        diagonal = (basis * (2 * curved - basis @ core)).sum(1, keepdim=True)
        self._basis, self.known, self.spread = basis, self._operator.read(diagonal), Spread()
        return int(basis.shape[1])

    def _rest(self, vectors: Tensor) -> Tensor:
        """Vectors without their part in the basis."""
        if self._basis is None:
            return vectors
        return vectors - self._basis @ (self._basis.T @ vectors)


def _multiplied_out(operator: DiagonalOperator, size: int, block: int, spent: int = 0) -> DiagonalSums:
    values = {key: part[:, 0].cpu() for key, part in operator.read(operator.diagonal(block)).items()}
    return DiagonalSums(values, {key: torch.zeros_like(part) for key, part in values.items()}, size, size + spent)


def _worst(operator: DiagonalOperator, values: Readings, stderrs: Readings, offsets: dict[Key, float]) -> float:
    """The largest relative standard error of a value that has a row; of units that of the largest."""
    worst = 0.0
    for key, part in values.items():
        if operator.has_row(key[0]):
            top = part.abs().argmax()
            value, error = abs(float(part[top]) + offsets.get(key, 0.0)), float(stderrs[key][top])
            if error > 0:
                worst = max(worst, error / value if value > 0 else math.inf)
    return worst
