"""Sums over the diagonal of an operator from random products, with standard errors that can be trusted.

The operator is a mean over samples. Each group of samples has random vectors of its own: of G groups that are alike
one pass over the data then tells as much as G passes with the same vector everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from flatscope.curvature.grouped import DiagonalOperator, Key, Parts, Readings
from flatscope.curvature.signs import Signs
from flatscope.stopping import FIRST_LOOK, FREEDOM, student

# So few directions are taken one by one, which is exact.
FEW = 512
# And no more than so many, even where exact values are asked for.
MOST_EXACT = 16_384
HURRIED = 2  # products at a time where there is a deadline
SKETCH_BYTES = 2**30
BLOCK_BYTES = 2**28


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
    """Sums over groups of the means of readings, which come block by block, and their standard errors."""

    def __init__(self) -> None:
        self.n = 0
        self._means: Readings = {}
        self._deviations: Readings = {}

    def add(self, readings: Readings) -> None:
        """Let in k columns of every group's values, (groups, units, k)."""
        for key, part in readings.items():
            k, mean = part.shape[2], part.mean(2)
            deviations = (part - mean[..., None]).square().sum(2)
            if self.n:
                moved = mean - self._means[key]
                deviations += self._deviations[key] + moved.square() * (self.n * k / (self.n + k))
                mean = self._means[key] + moved * (k / (self.n + k))
            self._means[key], self._deviations[key] = mean, deviations
        self.n += k

    def values(self, known: Readings) -> Readings:
        """The sums of means, with what is known beforehand added."""
        sums = {key: mean.sum(0) for key, mean in self._means.items()}
        return {key: value + known[key][:, 0] if known else value for key, value in sums.items()}

    @property
    def stderrs(self) -> Readings:
        """Standard errors of these sums, groups being independent, widened by `student`; infinite for one column."""
        if self.n < 2:
            return {key: deviations.sum(0) + math.inf for key, deviations in self._deviations.items()}
        pairs = self.n * (self.n - 1)
        return {
            key: student((deviations.sum(0) / pairs).sqrt(), self.freedom(key))
            for key, deviations in self._deviations.items()
        }

    def freedom(self, key: Key) -> Tensor:
        """Degrees of freedom of a value's error, over the groups by which it varies, (units,)."""
        deviations = self._deviations[key]
        return degrees(deviations.sum(0), deviations.square().sum(0) / (self.n + 1))


def diagonal_sums(
    operator: DiagonalOperator,
    signs: Signs,
    *,
    precision: float,
    most_products: int,
    offsets: dict[Key, tuple[float, float]],
    over: Callable[[], bool] | None = None,
    few: int | None = None,
) -> DiagonalSums:
    """Sums over the diagonal of an operator to a relative standard error, all from the same products.

    With random signs ζ, ζ∘Aζ has the diagonal as its mean. If draws show that many more are needed, their
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
        few: so many directions are taken one by one, which is exact; 512 by default.
    """
    size = operator.shape[0]
    if not size:
        return DiagonalSums()
    block = max(1, min(HURRIED if over else FIRST_LOOK, BLOCK_BYTES // (8 * size)))
    late = over or bool
    if size <= min(FEW if few is None else few, most_products) or (precision <= 0 and size <= MOST_EXACT):
        exact = _multiplied_out(operator, size, block, late)
        if exact is not None:
            return exact
    draws = ProductDraws(operator, signs, block, late)
    keep = precision > 0 and 8 * size * FIRST_LOOK <= SKETCH_BYTES
    first = max(2, -(-FIRST_LOOK // operator.groups))
    products = draws.take(first, keep=keep)
    look, deflated, missed = first, False, ""
    while True:
        values, stderrs = draws.spread.values(draws.known), draws.spread.stderrs
        errors = _errors(operator, draws.spread, values, stderrs, offsets, precision)
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
        known_well = (deflated or not keep) and look * operator.groups >= FIRST_LOOK
        if known_well and not within_reach(pending, look, precision, most_products - products + look):
            missed = f"it takes more than {most_products:,} products"
            break
        worth = look >= FIRST_LOOK and needed > 4 * FIRST_LOOK and products + 2 * FIRST_LOOK <= most_products
        if keep and not deflated and worth:
            products += draws.deflate()
            look, deflated = 0, True
        following = max(first, 2 * look)
        sketched = keep and not deflated and look < FIRST_LOOK
        products += draws.take(max(1, min(following - look, most_products - products)), keep=sketched)
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
        first, last = self._next, self._next + count
        while self._next < last and not (self.spread.n > 1 and self._late()):
            some = range(self._next, min(self._next + self._block, last))
            readings, product = self._operator.by_groups(
                partial(self._vectors, some), partial(self._gathered, some, keep)
            )
            *parts, product = self._operator.summed([*readings.values(), product])
            self.spread.add(dict(zip(readings, parts, strict=True)))
            if keep:
                self._kept.append(product)
            self._next = some.stop
        return self._next - first

    def _vectors(self, some: range, group: int) -> Tensor:
        return self._rest(self._drawn(some, group))

    def _drawn(self, some: range, group: int) -> Tensor:
        """Signs (p, k) of a group of samples."""
        number = torch.tensor([group], device=self._operator.device)
        return self._signs.draw(number, some, self._operator.shape[0], torch.float64)[:, 0].T

    def _gathered(self, some: range, keep: bool, parts: Parts) -> tuple[Readings, Tensor]:
        """Readings (groups, units, k) of the groups' products, and if it is to be kept the sum of these (p, k)."""
        operator = self._operator
        nothing = torch.zeros(operator.shape[0], len(some), dtype=torch.float64, device=operator.device)
        found = {key: part.new_zeros(operator.groups, *part.shape) for key, part in operator.read(nothing).items()}
        total = nothing if keep else nothing[:0]
        for group, product in parts:
            rest = self._rest(product)
            for key, part in operator.read(self._drawn(some, group) * rest).items():
                found[key][group] = part
            if keep:
                total += rest
        return found, total

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
    spread: Spread,
    values: Readings,
    stderrs: Readings,
    offsets: dict[Key, tuple[float, float]],
    precision: float,
) -> list[float]:
    """The relative standard errors of the values that have a row; so large where they are unsure that draws go on."""
    found = []
    for key in (key for key in values if operator.has_row(key[0])):
        known, least = offsets.get(key, (0.0, 0.0))
        close = precision > 0 and bool((stderrs[key] <= least).all())
        freedom = spread.freedom(key)
        found.append(0.0 if close else relative_error(values[key], stderrs[key], known, freedom, precision))
    return found


def within_reach(errors: Iterable[float], look: int, wanted: float, most: int) -> list[float]:
    """Of the relative errors after so many draws those that the most draws may bring down to what is wanted.

    A value that is hardly told from zero may be larger than it looks: by two of its standard errors, say.
    """
    return [error for error in errors if look * (error / (1 + 2 * error)) ** 2 <= most * wanted**2]


def relative_error(
    values: Tensor, stderrs: Tensor, known: float = 0.0, freedom: Tensor | None = None, wanted: float = 0.0
) -> float:
    """Relative standard error of the largest of some units' values, to which a known part is added.

    Args:
        values: of the units.
        stderrs: of these.
        known: the part.
        freedom: their degrees of freedom. Of too few an error is never small enough: it is given as that from which as
            many draws more seem to be needed as bring them to `FREEDOM`.
        wanted: what is small enough.
    """
    top = values.abs().argmax()
    value, error = abs(float(values.flatten()[top]) + known), float(stderrs.flatten()[top])
    if not error > 0:
        return 0.0
    relative = error / value if value > 0 else math.inf
    known_by = float(FREEDOM) if freedom is None else max(1.0, float(freedom.flatten()[top]))
    return max(relative, wanted * math.sqrt(1.001 * FREEDOM / known_by)) if known_by < FREEDOM else relative


def degrees(spread: Tensor, squares: Tensor) -> Tensor:
    """Degrees of freedom of a sum of variances (Welch, 1938; Satterthwaite, 1946), of one n − 1.

    The square of a sum that is itself drawn is too large by two degrees on average.

    Args:
        spread: Σ d_i of the sums of squared deviations from each one's own mean.
        squares: Σ d_i² / (n_i + 1) over these, n_i numbers each.
    """
    return spread.square() / squares.clamp_min(torch.finfo(torch.float64).tiny) - 2
