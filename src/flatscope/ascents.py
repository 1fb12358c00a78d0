"""Ascents of the loss within a set of perturbations: where it is highest near the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import NotApplicable
from flatscope.params import Params
from flatscope.perturbation import Evaluate, Move, expanded_over_entries, flat_rows, stack_size
from flatscope.registry import Value
from flatscope.sampling import time_is_over


@dataclass(frozen=True)
class Ascent:
    """Largest losses that several ascents met, and where."""

    losses: Tensor  # the largest loss on each way, (k,)
    where: Params  # the points where they were met, stacked
    before: float  # the largest loss of all ways before the last step
    late: bool = False  # whether time ran out before all steps were taken

    @property
    def highest(self) -> float:
        """The largest loss of all ways."""
        return float(self.losses.max())

    @property
    def top(self) -> Params:
        """The point where it was met."""
        place = int(self.losses.argmax())
        return {name: value[place] for name, value in self.where.items()}

    def remark(self, loss: float) -> str:
        """Remark on the last step: its share of the whole rise from `loss`."""
        rise, ended = self.highest - loss, "; ended early, the time was up" if self.late else ""
        if not rise > 0:
            return f"no step led higher{ended}"
        return f"the last step added {max(0.0, self.highest - self.before) / rise:.1g} of it{ended}"


def rise_as_value(ctx: Context, ascent: Ascent, how: str, normalised: bool = False) -> Value:
    """The rise from the loss at the weights themselves, which lie in the set: never negative."""
    loss = ctx.scores().loss
    rise = max(0.0, ascent.highest - loss)
    if normalised:
        if loss <= -1:
            raise NotApplicable("a loss above -1, since the rise is divided by 1 + loss", f"{loss:.4g}")
        rise /= 1 + loss
    return Value(rise, low=rise, exact=False, reason=f"lower bound: {how}; {ascent.remark(loss)}")


class Region(NamedTuple):
    """A set of perturbations around zero in which the highest loss is looked for."""

    climb: Move  # gradients -> the longest uphill move that the set allows from its centre
    project: Move  # points -> nearest points of the set


def ascend(
    ctx: Context, evaluate: Evaluate, starts: Params, region: Region, sizes: Sequence[float], settled: float = 0.0
) -> Ascent:
    """Projected ascent from several starts at once: the largest loss on each way, and where it was met.

    Stops early when no point moves any more, or the time is up.

    Args:
        ctx: has the deadline.
        evaluate: stacked points -> losses (k,) and gradients with respect to the points.
        starts: stacked points of the region.
        region: what the points are kept in.
        sizes: step sizes, in units of its longest move; 2 reaches any point of the boundary from any other.
        settled: a step that moves no coordinate by more is none.
    """
    point, best, where = starts, torch.full((stack_size(starts),), -torch.inf, dtype=torch.float64), starts
    before = -torch.inf
    for size in (*sizes, None):
        losses, gradients = evaluate(point)
        before = float(best.max())
        better = losses > best  # never for NaN
        best = torch.where(better, losses, best)
        where = {
            name: torch.where(expanded_over_entries(better, value), value, where[name]) for name, value in point.items()
        }
        if size is None:
            break
        if time_is_over(ctx):
            return Ascent(best, where, before, late=True)
        uphill = region.climb(gradients)
        following = region.project({name: value + size * uphill[name] for name, value in point.items()})
        if all(bool(((value - point[name]).abs() <= settled).all()) for name, value in following.items()):
            before = float(best.max())
            break
        point = following
    return Ascent(best, where, before)


def shrinking_step_sizes(steps: int) -> tuple[float, ...]:
    """Step sizes that shrink geometrically: long ones to find the region of the maximum, short ones to settle."""
    first, last = 2.0, 0.01
    return tuple(first * (last / first) ** (i / max(1, steps - 1)) for i in range(steps))


def unit_directions(stacked: Params) -> Params:
    """Every stacked point divided by its Euclidean norm over all parameters; zero stays zero."""
    squares = torch.stack([flat_rows(value).square().sum(1) for value in stacked.values()])
    norms = squares.sum(0).sqrt()
    inverse = torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))
    return {name: value * expanded_over_entries(inverse, value) for name, value in stacked.items()}


def within_ball(radius: float) -> Region:
    """The ball of this radius."""

    def climb(gradients: Params) -> Params:
        return {name: radius * value for name, value in unit_directions(gradients).items()}

    def project(points: Params) -> Params:
        onto = climb(points)
        outside = torch.stack([flat_rows(value).square().sum(1) for value in points.values()]).sum(0).sqrt() > radius
        return {
            name: torch.where(expanded_over_entries(outside, value), onto[name], value)
            for name, value in points.items()
        }

    return Region(climb, project)


def within_box(box: Params) -> Region:
    """The box |u_i| ≤ box_i, whose longest uphill move ends in a corner."""

    def climb(gradients: Params) -> Params:
        return {name: box[name] * value.sign() for name, value in gradients.items()}

    def project(points: Params) -> Params:
        return {name: torch.minimum(torch.maximum(u, -box[name]), box[name]) for name, u in points.items()}

    return Region(climb, project)
