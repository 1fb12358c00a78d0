"""Means over random draws that stop when they are precise enough, and say how many draws that took."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import NotApplicable

FIRST_LOOK = 32


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
        """Standard error of each mean."""
        found: list[float] = (self.samples.std(0) / math.sqrt(len(self.samples))).tolist()
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
    first: int = FIRST_LOOK,
) -> Draws:
    """Take draws until every mean has the relative standard error that is asked for, or there are no more.

    The error is looked at only after `first`, twice, four times as many draws, …: stopping at the first moment that
    looks good would stop by luck. Where the measurement has a deadline, it ends with the draws that it has, two at
    least.

    Args:
        ctx: its effort says how precise is precise enough, and until when.
        blocks: draws, some at a time: (k,) or (k, quantities), any number of them. No more are made than are needed.
        most: how many are taken at most, but for the rest of a block.
        precision: instead of that of the effort; 0 takes all draws.
        first: draws before the first look; fewer than 32 where each is dear.
    """
    precision = ctx.effort.precision if precision is None else precision
    found, look = Draws(torch.zeros(0, 1, dtype=torch.float64), most), first
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
