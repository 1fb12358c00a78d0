"""Flatness radius: how far the weights can go in a random direction before the loss or the error changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from flatscope.ascents import unit_directions
from flatscope.context import Context
from flatscope.errors import InputError, refuse_unless_whole
from flatscope.measures.losses_along_lines import LossesAlongLines, checked_objective, lines_at_once, moved_parameters
from flatscope.params import Params, count_scalars, norm
from flatscope.perturbation import measure_of_moves
from flatscope.registry import Value
from flatscope.sampling import Draws, draw_until_precise

START = 1 / 32  # of the norm of the moved weights
SUP_GROWTH = 2**0.25
SMALLEST = 1e-9  # of the first radius: a line that is outside there crosses at once
MOST_STEPS = 200


@measure_of_moves(
    symbol=r"\mathbb{E}_\delta \sup\{r : |\hat L(w + r'\delta) - \hat L(w)| \le \epsilon\ \forall r' \le r\}",
    paper="zhang2017",
    equation="Section 6.1, eq (13), Table 1",
    direction="higher",
    invariant_under={"permutation"},
    typical={"forward": 32 * 15},
    conventions="first crossing (the printed supremum jumps over bumps: kind='sup'); directions uniform on the unit "
    "sphere of the moved parameters, biases included, drawn on the device; low and high: one standard deviation over "
    "directions; no rescaling of the weights is undone",
)
def flatness_radius(
    ctx: Context,
    *,
    epsilon: float = 0.05,
    directions: int = 100,
    objective: str = "loss",
    layers: Any = None,
    kind: Literal["first", "sup"] = "first",
    tolerance: float = 1e-6,
    limit: float = 1e6,
) -> Value:
    """Mean distance in random directions at which the training loss (or error) has changed by more than epsilon.

    Along each direction radii are doubled from a 32nd of the norm of the weights (or halved, where that is too far
    already), and the crossing is then enclosed by ITP bisection. An excursion beyond epsilon that begins at r and lasts
    longer than r is never jumped over. Directions that do not cross below the limit are left out of mean and
    deviation, and counted in the remark; where none crosses, the value is infinite.

    Args:
        epsilon: change of the objective that is still called flat.
        directions: the most random directions; fewer where the mean is precise enough before.
        objective: "loss", or "error": the fraction of training samples not classified right.
        layers: which parameters move: None for all, "top" for those of the last layer, or names of layers.
        kind: "first": the first crossing; "sup": the last one below the limit, seen on a grid of ratio 1.19.
        tolerance: relative accuracy of each radius.
        limit: no direction is followed further than this.
    """
    drawn = drawn_radii(
        ctx,
        epsilon=epsilon,
        directions=directions,
        objective=objective,
        layers=layers,
        kind=kind,
        tolerance=tolerance,
        limit=limit,
        precision=ctx.effort.precision,
    )
    radii = drawn.samples[:, 0]
    crossing = radii[radii.isfinite()]
    never = len(radii) - len(crossing)
    taken = drawn.remark(unit="directions")
    remark = f"{never} of {len(radii)} directions never cross below {limit:g}" if never else ""
    if not len(crossing):
        return Value(math.inf, low=limit, high=math.inf, reason=remark)
    mean, sd = float(crossing.mean()), float(crossing.std()) if len(crossing) > 1 else math.inf
    remark = f"{remark}; mean of the others" if never else f"sd {sd:.4g} over {taken}"
    remark += f"; each radius to {tolerance:.0e} relative"
    return Value(mean, stderr=sd / math.sqrt(len(crossing)), low=mean - sd, high=mean + sd, reason=remark)


def drawn_radii(
    ctx: Context,
    *,
    epsilon: float = 0.05,
    directions: int = 100,
    objective: str = "loss",
    layers: Any = None,
    kind: Literal["first", "sup"] = "first",
    tolerance: float = 1e-6,
    limit: float = 1e6,
    precision: float = 0.0,
) -> Draws:
    """The radius of each direction, infinite where none was found below the limit; of all directions by default.

    Arguments as in `flatness_radius`; a network with BatchNorm is moved as it is.
    """
    for name, value in {"epsilon": epsilon, "limit": limit, "tolerance": tolerance}.items():
        if not 0 < value < math.inf:
            raise InputError("a positive number", repr(value), where=name)
    refuse_unless_whole(directions, "directions", least=2)
    checked_objective(ctx, objective)
    moved = moved_parameters(ctx, layers)

    def radii() -> Iterator[Tensor]:
        for stacked in unit_normals(ctx, moved, directions, ctx.effort.limits.first_look if precision else None):
            search = _Search(LossesAlongLines(ctx, stacked, objective), epsilon, limit, tolerance)
            yield search.first() if kind == "first" else search.last()

    return draw_until_precise(ctx, radii(), directions, precision)


def unit_normals(
    ctx: Context, moved: tuple[str, ...], directions: int, together: int | None = None
) -> Iterator[Params]:
    """Directions uniform on the unit sphere, stacked a block of at most `together` at a time.

    They are drawn where the network is, in single precision: on a GPU the draw would else cost more than all the rest.
    """
    device = ctx.problem.device
    generator = ctx.generator("flatness_radius")
    if device.type != "cpu":
        generator = torch.Generator(device).manual_seed(generator.initial_seed())
    # How many are drawn together does not depend on the memory there is, and so neither do the numbers.
    limits, size = ctx.effort.limits, count_scalars(ctx.params[name] for name in moved)
    group = max(1, min(limits.drawn_directions, limits.drawn_numbers // size))
    block = min(group, together or group, lines_at_once(ctx, moved))
    for start in range(0, directions, group):
        k = min(group, directions - start)
        shapes = {name: (k, *ctx.params[name].shape) for name in moved}
        drawn = {name: torch.randn(shape, generator=generator, device=device) for name, shape in shapes.items()}
        for first in range(0, k, block):
            rows = slice(first, first + block)
            yield unit_directions({name: value[rows].to(ctx.problem.dtype) for name, value in drawn.items()})


class _Search:
    """Crossings of |L(w + rδ) − L(w)| = ε on several lines at once, each line with radii of its own."""

    def __init__(self, lines: LossesAlongLines, epsilon: float, limit: float, tolerance: float) -> None:
        self.lines, self.epsilon, self.limit, self.tolerance = lines, epsilon, limit, tolerance
        self.k = len(next(iter(lines.directions.values())))
        scale = norm({name: lines.ctx.params[name] for name in lines.directions}) or 1.0
        self.start = min(START * scale, limit)
        self.base = float(lines.values(torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)))

    def excess(self, radii: Tensor, which: Tensor) -> Tensor:
        """log(|L(w + rδ) − L(w)| / ε): nearly linear in log r, since losses grow like powers; +∞ for no number."""
        change = (self.lines.values(radii, which) - self.base).abs() / self.epsilon
        return change.log().nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)

    def first(self) -> Tensor:
        """The first crossing of each line, seen while radii are doubled."""
        bracket = _Bracket(self.k)
        radii, open_ = torch.full((self.k,), self.start, dtype=torch.float64), torch.arange(self.k)
        while len(open_):
            tried = radii[open_]
            out = bracket.narrow(open_, tried, self.excess(tried, open_))
            # A line is done once it is known inside at one radius and outside at twice that, or at its end.
            following = torch.where(out, tried / 2, (2 * tried).clamp(max=self.limit))
            done = torch.where(
                out, bracket.inside[open_] > 0, bracket.outside[open_].isfinite() | (tried >= self.limit)
            )
            done |= following < SMALLEST * self.start
            radii[open_] = following
            open_ = open_[~done]
        return self._crossing_in_bracket(bracket)

    def last(self) -> Tensor:
        """The last crossing below the limit, on a grid of radii that grow by a fixed factor."""
        bracket, radius, open_ = _Bracket(self.k), self.limit, torch.arange(self.k)
        while len(open_) and radius >= SMALLEST * self.start:
            tried = torch.full((len(open_),), radius, dtype=torch.float64)
            open_ = open_[bracket.narrow(open_, tried, self.excess(tried, open_))]
            radius /= SUP_GROWTH
        return self._crossing_in_bracket(bracket)

    def _crossing_in_bracket(self, bracket: _Bracket) -> Tensor:
        """A crossing between a radius inside and one outside, by ITP: no slower than bisection, mostly far faster.

        Interpolate, truncate, project (Oliveira and Takahashi 2020) on log r, with κ₁ = 0.2 / (b − a), κ₂ = 2, n₀ = 1.
        A line without a radius inside crosses at once, one without a radius outside never does.
        """
        never, at_once = ~bracket.outside.isfinite(), bracket.inside == 0
        open_ = torch.arange(self.k)[~never & ~at_once]
        widths = (bracket.outside / bracket.inside).log()
        steps = (widths / self.tolerance).log2().ceil().clamp(min=0) + 1
        for step in range(MOST_STEPS):
            low, high = bracket.inside[open_].log(), bracket.outside[open_].log()
            wide = high - low > self.tolerance
            open_, low, high = open_[wide], low[wide], high[wide]
            if not len(open_):
                break
            f_low, f_high, half = bracket.f_inside[open_], bracket.f_outside[open_], (low + high) / 2
            straight = (f_high * low - f_low * high) / (f_high - f_low)
            straight = torch.where(f_low.isfinite() & f_high.isfinite(), straight, half)
            sign = (half - straight).sign()
            shift = torch.minimum(0.2 / widths[open_] * (high - low).square(), (half - straight).abs())
            slack = (self.tolerance / 2 * 2 ** (steps[open_] - step) - (high - low) / 2).clamp(min=0)
            truncated = straight + sign * shift
            point = torch.where((truncated - half).abs() <= slack, truncated, half - sign * slack).exp()
            bracket.narrow(open_, point, self.excess(point, open_))
        crossing = (bracket.inside * bracket.outside).sqrt()
        return torch.where(never, math.inf, torch.where(at_once, 0.0, crossing))


class _Bracket:
    """For each line the largest radius known inside and the smallest known outside, with log(change / ε) there."""

    def __init__(self, k: int) -> None:
        self.inside, self.outside = (torch.full((k,), value, dtype=torch.float64) for value in (0.0, math.inf))
        self.f_inside, self.f_outside = -self.outside, self.outside.clone()

    def narrow(self, lines: Tensor, radii: Tensor, excess: Tensor) -> Tensor:
        """Take note of what was found on some lines; whether each radius is outside."""
        out = excess > 0
        self.outside[lines[out]], self.f_outside[lines[out]] = radii[out], excess[out]
        self.inside[lines[~out]], self.f_inside[lines[~out]] = radii[~out], excess[~out]
        return out
