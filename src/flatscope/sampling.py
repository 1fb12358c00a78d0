"""Draw until precise: one loop for all estimators, and the standard errors by which it stops.

Whatever is drawn (random columns, products with random signs, perturbations, noise on inputs), `sample_until` asks the
same questions after each look: is every value precise, is there an exact way that costs no more, is what is still
imprecise out of reach, is the time up? The spread of the draws gives a standard error with some degrees of freedom: for
single numbers one less than there are, for sums over samples or groups with draws of their own what Welch and
Satterthwaite found, so that few samples which make up a sum count as few. `student_stderrs` widens the error by what
these degrees leave open. No estimate stops before there are `Limits.least_freedom` of them.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import torch
from scipy.special import ndtri, stdtrit
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import NotApplicable
from flatscope.limits import STANDARD, Limits
from flatscope.progress import tell

T = TypeVar("T")

LEVEL = 0.975  # two-sided 95 %
TIME_IS_UP = "stopped by the time limit"


class Sampler(ABC, Generic[T]):
    """Independent draws whose means are wanted, and what other ways there are to them.

    Attributes:
        first_look: draws before errors are looked at.
        taken: draws so far.
        unit: what one is called, in the plural.
    """

    first_look: int = 2
    taken: int = 0
    unit: str = "draws"

    @property
    def most(self) -> float:
        """The most draws; infinite where an exact way ends them."""
        return math.inf

    @property
    def limit(self) -> str:
        """That in words."""
        return f"{self.most:,.0f} draws"

    @abstractmethod
    def draw_until(self, number: int) -> str:
        """Take draws until there are so many, perhaps a few more; returns why it stopped before, or an empty string."""

    @abstractmethod
    def relative_errors(self, precision: float) -> list[float]:
        """Relative standard errors of the values; larger than `precision` while one cannot be relied on."""

    @abstractmethod
    def result(self, ended: str) -> T:
        """The estimate, and why it is less precise than asked for; empty where it is not."""

    def exact(self, needed: float) -> T | None:
        """The values without error, where that costs no more than the draws that are needed."""
        del needed
        return None

    def hopeless(self, imprecise: int, reachable: int) -> bool:
        """True if too few of the imprecise values can become precise for the draws to go on."""
        del imprecise, reachable
        return False

    def improve(self, needed: float) -> bool:
        """Change to better draws of the same values; True where the draws so far are given up."""
        del needed
        return False

    def next_look(self, needed: float) -> int:
        """Number of draws at which errors are looked at again: twice as many."""
        del needed
        return max(self.first_look, 2 * self.taken)


def sample_until(sampler: Sampler[T], precision: float) -> T:
    """Draw until every value has the relative standard error that is asked for, or something ends it.

    Args:
        sampler: the draws.
        precision: the largest relative standard error.
    """
    ended = sampler.draw_until(sampler.first_look)
    while imprecise := [error for error in sampler.relative_errors(precision) if not error <= precision]:
        if ended:
            return sampler.result(ended)
        needed = draws_needed(sampler.taken, imprecise, precision)
        tell(sampler.taken, min(needed, sampler.most), sampler.unit)
        exact = sampler.exact(needed)
        if exact is not None:
            return exact
        reachable = errors_within_reach(imprecise, sampler.taken, precision, sampler.most)
        if sampler.taken >= sampler.most:
            return sampler.result(f"not reached within {sampler.limit}")
        if sampler.hopeless(len(imprecise), len(reachable)):
            tried = f"{sampler.taken:,} {sampler.unit}"
            return sampler.result(
                f"stopped after {tried}: {sampler.limit}, the most allowed, are too few for most values"
            )
        if not sampler.improve(needed):
            ended = sampler.draw_until(sampler.next_look(draws_needed(sampler.taken, reachable, precision)))
    return sampler.result("")


def draws_needed(taken: int, errors: Iterable[float], precision: float) -> float:
    """Draws after which the largest of some relative errors would be at the precision, if it falls with their root."""
    largest = max(errors, default=precision)
    return taken * (largest / precision) ** 2 if precision > 0 else math.inf


def errors_within_reach(errors: Iterable[float], look: int, wanted: float, most: float) -> list[float]:
    """Of the relative errors after so many draws those that the most draws may bring down to what is wanted.

    A value that is hardly told from zero may be larger than it looks: by two of its standard errors, say.
    """
    if most == math.inf:
        return list(errors)
    return [error for error in errors if look * (error / (1 + 2 * error)) ** 2 <= most * wanted**2]


def relative_error(
    values: Tensor,
    stderrs: Tensor,
    known: float = 0.0,
    freedom: Tensor | None = None,
    wanted: float = 0.0,
    limits: Limits = STANDARD,
) -> float:
    """Relative standard error of the largest of some units' values, to which a known part is added.

    Args:
        values: of the units.
        stderrs: of these.
        known: the part.
        freedom: their degrees of freedom. Of too few an error is never small enough: it is given as that from which as
            many draws more seem to be needed as bring them to `Limits.least_freedom`.
        wanted: what is small enough.
        limits: how many degrees are enough.
    """
    top, least = values.abs().argmax(), limits.least_freedom
    value, error = abs(float(values.flatten()[top]) + known), float(stderrs.flatten()[top])
    if not error > 0:
        return 0.0
    relative = error / value if value > 0 else math.inf
    known_by = float(least) if freedom is None else max(1.0, float(freedom.flatten()[top]))
    return max(relative, wanted * math.sqrt(1.001 * least / known_by)) if known_by < least else relative


def degrees_of_freedom(spread: Tensor, squares: Tensor) -> Tensor:
    """Degrees of freedom of a sum of variances (Welch, 1938; Satterthwaite, 1946), of one n − 1.

    The square of a sum that is itself drawn is too large by two degrees on average.

    Args:
        spread: Σ d_i of the sums of squared deviations from each one's own mean.
        squares: Σ d_i² / (n_i + 1) over these, n_i numbers each.
    """
    return spread.square() / squares.clamp_min(torch.finfo(torch.float64).tiny) - 2


def student_stderrs(stderrs: Tensor, freedom: Tensor) -> Tensor:
    """Standard errors so wide that 1.96 of them to either side make Student's 95 % interval.

    Args:
        stderrs: as they follow from the spread.
        freedom: degrees of freedom of that, of the same shape.

    Example:
        >>> student_stderrs(torch.ones(2), torch.tensor([5.0, 50.0])).round(decimals=2)
        tensor([1.3100, 1.0200])
    """
    degrees = freedom.clamp(1.0, 1e6).double().cpu().numpy()
    return stderrs * torch.as_tensor(stdtrit(degrees, LEVEL) / ndtri(LEVEL)).to(stderrs)


@dataclass(frozen=True)
class Draws:
    """Independent draws of one or several quantities."""

    samples: Tensor  # (draws, quantities), float64
    most: int  # how many draws there might have been
    late: bool = False  # whether time ran out before

    @property
    def means(self) -> list[float]:
        """Mean of each quantity."""
        means: list[float] = self.samples.mean(0).tolist()
        return means

    @property
    def stderrs(self) -> list[float]:
        """Standard error of each mean, widened as `student_stderrs` does."""
        n = len(self.samples)
        stderrs: list[float] = student_stderrs(self.samples.std(0) / math.sqrt(n), torch.tensor(n - 1.0)).tolist()
        return stderrs

    def precise(self, precision: float) -> bool:
        """True if every mean has at most this relative standard error."""
        pairs = zip(self.means, self.stderrs, strict=True)
        return all(stderr <= precision * abs(mean) for mean, stderr in pairs)

    def remark(self, each: int = 1, unit: str = "draws") -> str:
        """Remark on the number of draws, `each` of them for every sample, and why no more."""
        taken, most = each * len(self.samples), each * self.most
        if taken == most:
            return f"{taken:,} {unit}"
        return f"{taken:,} of {most:,} {unit}" + (": the time was up" if self.late else "")


def draw_until_precise(
    ctx: Context,
    blocks: Iterable[Tensor],
    most: int,
    precision: float | None = None,
) -> Draws:
    """Take draws until every mean has the relative standard error that is asked for, or there are no more.

    The error is looked at after 16, 32, 64, … draws. Where the measurement has a deadline, it ends with the draws that
    it has, two at least.

    Args:
        ctx: its effort says how precise is precise enough, and until when.
        blocks: draws, some at a time: (k,) or (k, quantities), any number of them. No more are made than are needed.
        most: how many are taken at most, but for the rest of a block.
        precision: instead of that of the effort; 0 takes all draws.
    """
    wanted = ctx.effort.precision if precision is None else precision
    return sample_until(BlockDraws(blocks, most, partial(time_is_over, ctx), ctx.effort.limits), wanted)


class BlockDraws(Sampler[Draws]):
    """Draws that come in blocks of any length; plain means.

    Args:
        blocks: the draws, (k,) or (k, quantities).
        most: how many are taken at most, but for the rest of a block.
        late: whether the time is up.
        limits: after how many they are first looked at.
    """

    def __init__(self, blocks: Iterable[Tensor], most: int, late: Callable[[], bool], limits: Limits) -> None:
        self._blocks, self._most, self._late = iter(blocks), most, late
        self.first_look = limits.first_look
        self._draws = Draws(torch.zeros(0, 1, dtype=torch.float64), most)

    @property
    def most(self) -> float:
        """As many as were allowed."""
        return self._most

    def draw_until(self, number: int) -> str:
        """Take blocks of draws until there are so many, or none are left."""
        while self.taken < min(number, self._most):
            if self.taken >= 2 and self._late():
                return TIME_IS_UP
            block = next(self._blocks, None)
            if block is None:
                return "there are no more draws"
            rows = block.double().cpu().reshape(len(block), -1)
            self._draws = replace(self._draws, samples=torch.cat([self._draws.samples, rows]) if self.taken else rows)
            self.taken = len(self._draws.samples)
        return ""

    def relative_errors(self, precision: float) -> list[float]:
        """Relative standard error of every mean; infinite before the first look, and where all draws are wanted."""
        if precision <= 0 or self.taken < self.first_look:
            return [math.inf]
        pairs = zip(self._draws.means, self._draws.stderrs, strict=True)
        return [stderr / abs(mean) if mean else math.inf if stderr else 0.0 for mean, stderr in pairs]

    def next_look(self, needed: float) -> int:
        """The next of 16, 32, 64, … draws."""
        del needed
        look = self.first_look
        while look <= self.taken:
            look *= 2
        return look

    def result(self, ended: str) -> Draws:
        """All draws."""
        return replace(self._draws, late=ended == TIME_IS_UP)


def time_is_over(ctx: Context) -> bool:
    """True if the measurement's deadline has passed, on any of the ranks: they must stop together."""
    deadline = ctx.effort.deadline
    return deadline is not None and ctx.problem.ranks.anywhere(time.monotonic() > deadline)


def time_limit(ctx: Context) -> Callable[[], bool] | None:
    """Function that tells whether the deadline has passed; None without a deadline."""
    return None if ctx.effort.deadline is None else partial(time_is_over, ctx)


def refuse_out_of_time(ctx: Context) -> None:
    """Give up where the time of the whole call is over in the midst of what has no value before it is done.

    Not where there are several ranks: they must give up together, and only know of each other between passes.
    """
    end = ctx.effort.end
    if end is not None and ctx.problem.ranks.size == 1 and time.monotonic() > end:
        raise NotApplicable("the time was up before it was done")


def rows_from_blocks(blocks: Iterable[Tensor], width: int) -> Iterator[Tensor]:
    """Numbers that belong together in rows (k, width), from blocks that may end within a row."""
    left = torch.zeros(0, dtype=torch.float64)
    for block in blocks:
        left = torch.cat([left, block])
        if whole := len(left) // width * width:
            yield left[:whole].reshape(-1, width)
            left = left[whole:]


def pair_means(blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Means of a draw and its mirror image, which follows it, from blocks that may end between the two."""
    return (pairs.mean(1) for pairs in rows_from_blocks(blocks, 2))
