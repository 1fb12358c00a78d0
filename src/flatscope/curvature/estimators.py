"""Sums over the diagonal of an operator from random products, with standard errors that can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from flatscope.curvature.signs import Signs

# So few directions are always taken one by one, which is exact.
FEW = 512
# And no more than so many, even where exact values are asked for.
MOST_EXACT = 16_384
FIRST_LOOK = 16
HURRIED = 2  # products at a time where there is a deadline
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


class DiagonalOperator(Operator, Protocol):
    """A symmetric matrix whose diagonal is added up to several values at once."""

    device: torch.device

    def entries(self, block: int) -> Iterator[Tensor]:
        """The diagonal by one product per direction, some at a time."""
        ...

    def read(self, entries: Tensor) -> Readings:
        """Values (units, k) from entries of the diagonal (p, k): linear."""
        ...

    def has_row(self, name: str) -> bool:
        """Whether the values of that name are asked for with a precision."""
        ...


class WholeDiagonal:
    """An operator whose diagonal is read as one number, the trace.

    Args:
        operator: symmetric.
        device: where it multiplies.
    """

    KEY: Key = ("", "trace")

    def __init__(self, operator: Operator, device: torch.device | str = "cpu") -> None:
        self._operator, self.device, self.shape = operator, torch.device(device), operator.shape

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return self._operator @ vectors

    def entries(self, block: int) -> Iterator[Tensor]:
        """Unit vectors, some at a time."""
        for unit in torch.split(torch.eye(self.shape[0], dtype=torch.float64, device=self.device), block, dim=1):
            yield (unit * (self._operator @ unit).to(unit)).sum(0)

    def read(self, entries: Tensor) -> Readings:
        """Their sum."""
        return {self.KEY: entries.sum(0, keepdim=True)}

    def has_row(self, name: str) -> bool:
        """The one value has."""
        return not name


@dataclass
class DiagonalSums:
    """Sums over the diagonal of an operator."""

    values: Readings = field(default_factory=dict)  # (units,) by (parameter, quantity)
    stderrs: Readings = field(default_factory=dict)  # their standard errors
    directions: int = 0  # entries of the diagonal
    products: int = 0  # those that were taken
    exact: bool = True  # whether every direction was multiplied out
    missed: str = ""  # why the draws ended before every value was as precise as asked for; empty where all are


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
    offsets: dict[Key, tuple[float, float]],
    over: Callable[[], bool] | None = None,
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
        offsets: known parts of the network's values, which the precision counts in, and their standard errors: less
            than these is not asked for.
        over: whether the time is up; None where there is no limit.
    """
    size = operator.shape[0]
    if not size:
        return DiagonalSums()
    block = max(1, min(HURRIED if over else FIRST_LOOK, BLOCK_BYTES // (8 * size)))
    late = over or bool
    if size <= min(FEW, most_products) or (precision <= 0 and size <= MOST_EXACT):
        exact = _multiplied_out(operator, size, block, late)
        if exact is not None:
            return exact
    draws = ProductDraws(operator, signs, block, late)
    keep = precision > 0 and 8 * size * FIRST_LOOK <= SKETCH_BYTES
    products = draws.take(FIRST_LOOK, keep=keep)
    look, deflated, missed = FIRST_LOOK, False, ""
    while True:
        values, stderrs = draws.spread.values(draws.known), draws.spread.stderrs
        errors = _errors(operator, values, stderrs, offsets, precision)
        error = max(errors, default=0.0)
        if error <= precision:
            break
        needed = look * (error / precision) ** 2 if precision > 0 else math.inf
        if not late() and cheaper_one_by_one(size, needed, most_products):
            exact = _multiplied_out(operator, size, block, late, products)
            if exact is not None:
                return exact
        if products >= most_products or late():
            missed = "stopped by the time limit" if late() else f"at most {most_products:,} products"
            break
        pending = [error for error in errors if error > precision]
        if (deflated or not keep) and not within_reach(pending, look, precision, most_products - products + look):
            missed = f"it takes more than {most_products:,} products"
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

    def __init__(self, operator: DiagonalOperator, signs: Signs, block: int, late: Callable[[], bool]) -> None:
        self._operator, self._signs, self._block, self._late = operator, signs, block, late
        self._next = 0
        self._kept: list[Tensor] = []
        self._basis: Tensor | None = None
        self.known: Readings = {}
        self.spread = Spread()

    def take(self, count: int, keep: bool = False) -> int:
        """Take some draws, two at least whatever the time; the number of products."""
        size, one = self._operator.shape[0], torch.zeros(1, dtype=torch.long, device=self._operator.device)
        first, last = self._next, self._next + count
        while self._next < last and not (self.spread.n > 1 and self._late()):
            some = range(self._next, min(self._next + self._block, last))
            z = self._signs.draw(one, some, size, torch.float64)[:, 0].T  # (p, k)
            product = self._rest(self._operator @ self._rest(z))
            self.spread.add(self._operator.read(z * product))
            if keep:
                self._kept.append(product)
            self._next = some.stop
        return self._next - first

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


def _multiplied_out(
    operator: DiagonalOperator, size: int, block: int, late: Callable[[], bool], spent: int = 0
) -> DiagonalSums | None:
    """All directions one by one; None where the time was up before."""
    parts = []
    for part in operator.entries(block):
        parts.append(part)
        if late() and sum(map(len, parts)) < size:
            return None
    values = {key: part[:, 0].cpu() for key, part in operator.read(torch.cat(parts)[:, None]).items()}
    return DiagonalSums(values, {key: torch.zeros_like(part) for key, part in values.items()}, size, size + spent)


def _errors(
    operator: DiagonalOperator,
    values: Readings,
    stderrs: Readings,
    offsets: dict[Key, tuple[float, float]],
    precision: float,
) -> list[float]:
    """The relative standard errors of the values that have a row."""
    found = []
    for key in (key for key in values if operator.has_row(key[0])):
        known, least = offsets.get(key, (0.0, 0.0))
        close = precision > 0 and bool((stderrs[key] <= least).all())
        found.append(0.0 if close else relative_error(values[key], stderrs[key], known))
    return found


def within_reach(errors: Iterable[float], look: int, wanted: float, most: int) -> list[float]:
    """Of the relative errors after so many draws those that the most draws may bring down to what is wanted.

    A value that is hardly told from zero may be larger than it looks: by two of its standard errors, say.
    """
    return [error for error in errors if look * (error / (1 + 2 * error)) ** 2 <= most * wanted**2]


def relative_error(values: Tensor, stderrs: Tensor, known: float = 0.0) -> float:
    """Relative standard error of the largest of some units' values, to which a known part is added."""
    top = values.abs().argmax()
    value, error = abs(float(values.flatten()[top]) + known), float(stderrs.flatten()[top])
    if not error > 0:
        return 0.0
    return error / value if value > 0 else math.inf
