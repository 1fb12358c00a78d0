"""Sums over the diagonal of an operator from random products, with standard errors that can be trusted.

The operator is a mean over samples. Each group of samples has random vectors of its own: of G groups that are alike
one pass over the data then tells as much as G passes with the same vector everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from flatscope.curvature.memory import allowed
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.symmetric_operator import Parts, SymmetricOperator
from flatscope.isolation import coarse_products
from flatscope.limits import STANDARD, Limits
from flatscope.progress import tell
from flatscope.sampling import TIME_IS_UP, Sampler, degrees_of_freedom, relative_error, sample_until, student_stderrs

PRODUCTS = "products with random vectors"
Key = tuple[str, str]  # parameter, quantity
Readings = dict[Key, Tensor]
TRACE: Key = ("", "trace")


class DiagonalQuantities:
    """Sums over the diagonal of a matrix that are wanted: of every matrix its trace, more in subclasses.

    Args:
        matrix: the matrix.
    """

    def __init__(self, matrix: SymmetricOperator) -> None:
        self.matrix = matrix

    def read(self, diagonal: Tensor) -> Readings:
        """Values (units, k) that are wanted of k diagonals (p, k), linear in these."""
        return {TRACE: diagonal.sum(0, keepdim=True)}

    def has_row(self, name: str) -> bool:
        """True where values of a parameter, or of the network ("") are wanted with a precision."""
        return not name

    def diagonal(self, width: int) -> Iterator[Tensor]:
        """The diagonal by one product for each direction, so many at a time."""
        unit = torch.eye(self.matrix.size, dtype=torch.float64, device=self.matrix.device)
        for some in torch.split(unit, width, dim=1):
            yield (some * (self.matrix @ some).to(some)).sum(0)


@dataclass
class DiagonalSums:
    """Sums over the diagonal of an operator."""

    values: Readings = field(default_factory=dict)  # (units,) by (parameter, quantity)
    stderrs: Readings = field(default_factory=dict)  # their standard errors
    directions: int = 0  # entries of the diagonal
    products: int = 0  # those that were taken
    exact: bool = True  # whether every direction was multiplied out
    missed: str = ""  # why the draws ended before every value was as precise as asked for; empty where all are
    coarse: bool = False  # whether most draws are by coarse products, whose bias the errors then hold


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
        """Standard errors of these sums, independent groups, widened by `student_stderrs`; infinite for one column."""
        if self.n < 2:
            return {key: deviations.sum(0) + math.inf for key, deviations in self._deviations.items()}
        pairs = self.n * (self.n - 1)
        return {
            key: student_stderrs((deviations.sum(0) / pairs).sqrt(), self.freedom(key))
            for key, deviations in self._deviations.items()
        }

    def freedom(self, key: Key) -> Tensor:
        """Degrees of freedom of a value's error, over the groups by which it varies, (units,)."""
        deviations = self._deviations[key]
        return degrees_of_freedom(deviations.sum(0), deviations.square().sum(0) / (self.n + 1))


@dataclass(frozen=True)
class Asked:
    """Precision, and limits of work, to which sums over a diagonal are asked for.

    Attributes:
        precision: stop when the largest relative standard error is below it; 0 for exact values.
        most_products: give up there.
        offsets: known parts of the network's values, which the precision counts in, and their standard errors: less
            than these is not asked for.
        late: whether the time is up; None where there is no limit.
        few: so many directions are taken one by one, which is exact; `Limits.few_directions` by default.
        coarse: whether draws may be by coarse products (TF32), where these are found to be good enough.
    """

    precision: float
    most_products: int
    offsets: Mapping[Key, tuple[float, float]] = field(default_factory=dict)
    late: Callable[[], bool] | None = None
    few: int | None = None
    coarse: bool = False


def diagonal_sums(wanted: DiagonalQuantities, signs: Signs, asked: Asked, limits: Limits = STANDARD) -> DiagonalSums:
    """Sums over the diagonal of a matrix to a relative standard error, all from the same products.

    With random signs ζ, ζ∘Aζ has the diagonal as its mean (Hutchinson, 1990). If draws show that many more are needed,
    their products span the directions of the large eigenvalues: with Q an orthonormal basis of them, the diagonal of
    A − (I−QQᵀ)A(I−QQᵀ) is known from AQ, and only that of the rest is left to draws (Hutch++ of Meyer, Musco, Musco and
    Woodruff, 2021, for all sums at once). Few directions, or fewer than the draws would need, are multiplied out
    instead: exact.

    Args:
        wanted: the sums, and the matrix.
        signs: the random stream.
        asked: how precisely, and with how many products.
        limits: numbers that decide between these ways.
    """
    size = wanted.matrix.size
    if not size:
        return DiagonalSums()
    sampler = HutchinsonDraws(wanted, signs, asked, limits)
    few = min(limits.few_directions if asked.few is None else asked.few, asked.most_products)
    if size <= few or (asked.precision <= 0 and size <= limits.most_directions):
        exact = sampler.multiplied_out()
        if exact is not None:
            return exact
    return sample_until(sampler, asked.precision)


def cheaper_one_by_one(directions: int, needed: float, most_products: int) -> bool:
    """True where a product for every direction costs no more than the draws needed, nor than is allowed."""
    return directions <= min(needed, most_products)


class HutchinsonDraws(Sampler[DiagonalSums]):
    """Random products that estimate sums over a diagonal, with Hutch++ deflation where many are needed.

    Args:
        wanted: the sums, and the matrix.
        signs: the random stream.
        asked: see `diagonal_sums`.
        limits: the same.
    """

    unit = PRODUCTS

    def __init__(self, wanted: DiagonalQuantities, signs: Signs, asked: Asked, limits: Limits) -> None:
        self._wanted, self._signs, self._asked, self._limits = wanted, signs, asked, limits
        self._operator = operator = wanted.matrix
        self._size = size = operator.size
        self._keys = list(wanted.read(torch.zeros(size, 1, device=operator.device)))
        self._late = asked.late or bool
        at_once = limits.hurried_products if asked.late else limits.first_look
        self._block = max(1, min(at_once, allowed(limits.block_memory, operator.device) // (8 * size)))
        self.first_look = max(2, -(-limits.first_look // operator.groups))
        self._may_deflate = asked.precision > 0 and 8 * size * limits.first_look <= allowed(
            limits.kept_memory, operator.device
        )
        self._products = self._next = 0  # all that were taken, and the number of the next draw
        self._kept: list[Tensor] = []  # products for a deflation
        self._basis: Tensor | None = None  # of the directions that a deflation took out
        self._known: Readings = {}  # what these give
        self.spread = Spread()
        self._coarse: bool | None = None if asked.coarse and asked.precision > 0 else False  # None: not yet known
        self._bias: Readings = {}  # of coarse products, in size

    @property
    def most(self) -> float:
        """Draws since the last deflation, and as many more as products are left."""
        return self.taken + self._asked.most_products - self._products

    @property
    def limit(self) -> str:
        """The products that are allowed."""
        return f"{self._asked.most_products:,} products"

    def draw_until(self, number: int) -> str:
        """Take products with random signs, kept for a deflation as long as there are few."""
        keep = self._may_deflate and self.taken < self._limits.first_look
        count = number - self.taken if not self.taken else min(number, int(self.most)) - self.taken
        self._take(max(1, count), keep)
        self.taken = self.spread.n
        return TIME_IS_UP if self._late() else ""

    def relative_errors(self, precision: float) -> list[float]:
        """Relative standard error of every value that has a row; 0 where the draws' is below that of its known part."""
        spread, found = self.spread, []
        values, stderrs = spread.values(self._known), self._stderrs()
        for key in (key for key in values if self._wanted.has_row(key[0])):
            known, least = self._asked.offsets.get(key, (0.0, 0.0))
            close = precision > 0 and bool((stderrs[key] <= least).all())
            freedom = spread.freedom(key)
            relative = relative_error(values[key], stderrs[key], known, freedom, precision, self._limits)
            found.append(0.0 if close else relative)
        return found

    def exact(self, needed: float) -> DiagonalSums | None:
        """A product for every direction, where that is no more than are needed, and no more than allowed."""
        cheaper = cheaper_one_by_one(self._size, needed, self._asked.most_products)
        return self.multiplied_out() if cheaper else None

    def multiplied_out(self) -> DiagonalSums | None:
        """All directions one by one; None where the time was up before."""
        parts = []
        for part in self._wanted.diagonal(self._block):
            parts.append(part)
            if self._late() and sum(map(len, parts)) < self._size:
                return None
        values = {key: part[:, 0].cpu() for key, part in self._wanted.read(torch.cat(parts)[:, None]).items()}
        nothing = {key: torch.zeros_like(part) for key, part in values.items()}
        return DiagonalSums(values, nothing, self._size, self._size + self._products)

    def hopeless(self, imprecise: int, reachable: int) -> bool:
        """True where no value is within reach, once there are enough draws or a deflation has been tried."""
        del imprecise
        settled = self.taken * self._operator.groups >= self._limits.first_look
        return not reachable and settled and not self._may_deflate

    def improve(self, needed: float) -> bool:
        """Deflate, once, where the products that this takes are few beside those that are needed."""
        first = self._limits.first_look
        enough = self.taken >= first and needed > self._limits.deflation_gain * first
        if self._may_deflate and enough and self._products + 2 * first <= self._asked.most_products:
            self._deflate()
            self.taken, self._may_deflate = 0, False
        return False

    def result(self, ended: str) -> DiagonalSums:
        """The estimate."""
        values = {key: value.cpu() for key, value in self.spread.values(self._known).items()}
        stderrs = {key: value.cpu() for key, value in self._stderrs().items()}
        return DiagonalSums(values, stderrs, self._size, self._products, False, ended, bool(self._coarse))

    def _stderrs(self) -> Readings:
        """Standard errors, with what coarse products may be off."""
        stderrs = self.spread.stderrs
        return {key: torch.hypot(part, self._bias[key]) for key, part in stderrs.items()} if self._bias else stderrs

    def _take(self, count: int, keep: bool) -> None:
        """Take some draws, two at least whatever the time; their products are kept where a deflation may come."""
        last = self._next + count
        while self._next < last and not (self.spread.n > 1 and self._late()):
            if self._coarse is None and self.spread.n:
                self._compare_with_coarse()
            width = self._block if self._coarse is not None else min(self._block, self._limits.compared_draws)
            some = range(self._next, min(self._next + width, last))
            with coarse_products() if self._coarse else nullcontext():
                readings, product = self._summed(some, keep)
            self.spread.add(readings)
            if self._coarse is None:
                self._compared = some, readings
            if keep:
                self._kept.append(product)
            self._next = some.stop
            tell(self._next, None, PRODUCTS)

    def _summed(self, some: range, keep: bool) -> tuple[Readings, Tensor]:
        """Readings of some draws in every group, and the sum of their products if these are to be kept."""
        gather = partial(self._gathered, some, keep)
        *readings, product = self._operator.by_groups(partial(self._vectors, some), gather)
        self._products += len(some)
        return dict(zip(self._keys, readings, strict=True)), product

    def _compare_with_coarse(self) -> None:
        """Go on with coarse products where their bias is small beside the precision that is asked for.

        From draws in full the same ones are taken coarsely; their differences have the bias as their mean.
        """
        some, full = self._compared
        with coarse_products():
            coarse, _ = self._summed(some, keep=False)
        totals = self.spread.values(self._known)
        bias: Readings = {}
        for key, part in coarse.items():
            off = (part - full[key]).movedim(1, 0).flatten(1)  # (units, groups · draws)
            groups, draws = len(part), part.shape[2]
            spread = off.std(1) * (groups / draws) ** 0.5 if off.shape[1] > 1 else torch.zeros_like(off[:, 0])
            bias[key] = off.sum(1).abs() / draws + 2 * spread
        wanted = self._asked.precision / 3
        rows = [key for key in bias if self._wanted.has_row(key[0])]
        self._coarse = all(bool(bias[key].norm() <= wanted * totals[key].norm()) for key in rows)
        if self._coarse:
            self._bias = bias

    def _vectors(self, some: range, group: int) -> Tensor:
        return self._rest(self._drawn(some, group))

    def _drawn(self, some: range, group: int) -> Tensor:
        """Signs (p, k) of a group of samples."""
        number = torch.tensor([group], device=self._operator.device)
        return self._signs.draw(number, some, self._operator.size, torch.float64)[:, 0].T

    def _gathered(self, some: range, keep: bool, parts: Parts) -> list[Tensor]:
        """Readings (groups, units, k) of the groups' products, and if it is to be kept the sum of these (p, k)."""
        operator, read = self._operator, self._wanted.read
        nothing = torch.zeros(operator.size, len(some), dtype=torch.float64, device=operator.device)
        found = {key: part.new_zeros(operator.groups, *part.shape) for key, part in read(nothing).items()}
        total = nothing if keep else nothing[:0]
        for group, product in parts:
            rest = self._rest(product)
            for key, part in read(self._drawn(some, group) * rest).items():
                found[key][group] = part
            if keep:
                total += rest
        return [*(found[key] for key in self._keys), total]

    def _deflate(self) -> None:
        """Take the span of the kept products out of all later probes (Hutch++), and start the draws again."""
        basis = torch.linalg.qr(torch.cat(self._kept, dim=1))[0]  # (p, s)
        self._kept.clear()
        curved = torch.cat([self._operator @ part for part in torch.split(basis, self._block, dim=1)], dim=1)
        core = basis.T @ curved
        diagonal = (basis * (2 * curved - basis @ core)).sum(1, keepdim=True)
        self._basis, self._known, self.spread = basis, self._wanted.read(diagonal), Spread()
        self._products += basis.shape[1]

    def _rest(self, vectors: Tensor) -> Tensor:
        """Vectors without their part in the basis."""
        if self._basis is None:
            return vectors
        return vectors - self._basis @ (self._basis.T @ vectors)
