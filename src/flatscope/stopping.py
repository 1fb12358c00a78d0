"""Means over random draws that stop when they are precise enough, and say how many draws that took.

One rule for all estimators, whatever is drawn. The spread of the draws gives a standard error with some degrees of
freedom: for single numbers one less than there are, for sums over samples or groups with draws of their own what Welch
and Satterthwaite found, so that few samples which make up a sum count as few. `student` widens the error by what these
degrees leave open. An estimate stops when this error is at most the precision asked for, and not before there are
`FREEDOM` degrees. It is looked at again only after many more draws: stopping at the first moment that looks good would
stop by luck.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from scipy.special import ndtri, stdtrit
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import NotApplicable

FREEDOM = 15  # degrees of freedom below which no error is small enough
FIRST_LOOK = FREEDOM + 1  # draws of single numbers
LEVEL = 0.975  # two-sided 95 %


def student(stderrs: Tensor, freedom: Tensor) -> Tensor:
    """Standard errors so wide that 1.96 of them to either side make Student's 95 % interval.

    Args:
        stderrs: as they follow from the spread.
        freedom: degrees of freedom of that, of the same shape.

    Example:
        >>> student(torch.ones(2), torch.tensor([5.0, 50.0])).round(decimals=2)
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
        found: list[float] = self.samples.mean(0).tolist()
        return found

    @property
    def stderrs(self) -> list[float]:
        """Standard error of each mean, widened as `student` does."""
        n = len(self.samples)
        found: list[float] = student(self.samples.std(0) / math.sqrt(n), torch.tensor(n - 1.0)).tolist()
        return found

    def precise(self, precision: float) -> bool:
        """Whether every mean has at most this relative standard error."""
        pairs = zip(self.means, self.stderrs, strict=True)
        return all(stderr <= precision * abs(mean) for mean, stderr in pairs)

    def remark(self, each: int = 1, unit: str = "draws") -> str:
        """How many draws were taken, `each` of them for every sample; and why no more."""
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
    precision = ctx.effort.precision if precision is None else precision
    found, look = Draws(torch.zeros(0, 1, dtype=torch.float64), most), FIRST_LOOK
    for block in blocks:
        rows = block.double().cpu().reshape(len(block), -1)
        found = replace(found, samples=torch.cat([found.samples, rows]) if len(found.samples) else rows)
        if len(found.samples) >= look:
            if precision and found.precise(precision):
                break
            while look <= len(found.samples):
                look *= 2
        if len(found.samples) >= most:
            break
        if 2 <= len(found.samples) < most and out_of_time(ctx):
            return replace(found, late=True)
    return found


def out_of_time(ctx: Context) -> bool:
    """Whether the measurement's deadline has passed, on any of the ranks: they must stop together."""
    deadline = ctx.effort.deadline
    return deadline is not None and ctx.problem.ranks.anywhere(time.monotonic() > deadline)


def time_limit(ctx: Context) -> Callable[[], bool] | None:
    """Whether the deadline has passed, as a question to ask again and again; None where there is no deadline."""
    return None if ctx.effort.deadline is None else partial(out_of_time, ctx)


def end_in_time(ctx: Context) -> None:
    """Give up where the time of the whole call is over in the midst of what has no value before it is done.

    Not where there are several ranks: they must give up together, and only know of each other between passes.
    """
    end = ctx.effort.end
    if end is not None and ctx.problem.ranks.size == 1 and time.monotonic() > end:
        raise NotApplicable("the time was up before it was done")


def in_rows(blocks: Iterable[Tensor], width: int) -> Iterator[Tensor]:
    """Numbers that belong together in rows (k, width), from blocks that may end within a row."""
    left = torch.zeros(0, dtype=torch.float64)
    for block in blocks:
        left = torch.cat([left, block])
        if whole := len(left) // width * width:
            yield left[:whole].reshape(-1, width)
            left = left[whole:]


def pair_means(blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Means of a draw and its mirror image, which follows it, from blocks that may end between the two."""
    return (pairs.mean(1) for pairs in in_rows(blocks, 2))
