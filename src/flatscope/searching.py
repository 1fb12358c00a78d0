"""The largest loss in a set of perturbations: many short ascents, of which the best go on, and how far they agree.

Ascents begin along the gradient, and along gradients in which every sample has a random weight: those go along with the
units when they change places, and with their scales where the set does, so that the same function is searched in the
same way however it is written. The distance between the ends of the ascents is the error of the search.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from flatscope.ascents import Ascent, Region, ascend, rise_as_value, shrinking_step_sizes
from flatscope.context import Context
from flatscope.params import Params
from flatscope.perturbation import Evaluate, joined_stacks, loss_and_gradient, random_normal
from flatscope.registry import Value

BEGUN = 3  # short ascents for each that is taken to the end, beside that along the gradient
SHORT = (0.2, 0.4)  # of the steps: after so many the better ones are chosen, and after so many the best
WAVES = 64  # of random weights as a function of a sample's place among the losses
ALIKE = 0.95  # cosine of two perturbations that are on the way to one place
# Of the rise: what a search may miss though all its ascents end alike. Of twelve seeds on six networks some ended 6 %
# below others without a sign of it.
AGREE = 0.1


def number_of_further_starts(restarts: int) -> int:
    """Number of ascents that begin beside that along the gradient; `restarts` of them are taken to the end."""
    return 0 if restarts == 1 else BEGUN * restarts


def uphill_directions(ctx: Context, stream: str, many: int) -> Params:
    """The gradient, and stacked below it as many gradients in which the samples have random weights: float64.

    Every third has a random half of the samples, the others normal weights: random functions of the place of a sample
    among all by its loss, so that neither their order nor copies of them matter. A random direction where no sample has
    a gradient.
    """
    along = {name: value.double()[None] for name, value in ctx.gradient().items()}
    if not many:
        return along
    generator, n, at = ctx.generator(stream), ctx.problem.n_train, ctx.trainable
    weights = torch.randn(many, WAVES, generator=generator, dtype=torch.float64) @ _cosines_by_loss_rank(
        ctx.scores().losses
    )
    weights[::3] = (weights[::3] > 0).double()
    totals = {name: value.new_zeros(many, *value.shape[1:]) for name, value in along.items()}
    seen = 0
    for inputs, targets in ctx.batches():
        batch_weights = weights[:, seen : seen + len(targets)].to(targets.device)
        seen += len(targets)
        for row in range(many):
            for name, gradient in loss_and_gradient(ctx, (inputs, targets), at, batch_weights[row])[1].items():
                totals[name][row] += gradient
    for kind in ("forward", "backward"):
        ctx.charge_passes(kind, many * n)
    nowhere = ~torch.stack([value.reshape(many, -1).any(1).cpu() for value in totals.values()]).any(0)
    if bool(nowhere.any()):
        drawn = random_normal(ctx, generator, at, many)
        for name, value in totals.items():
            value[nowhere.to(value.device)] = drawn[name][nowhere.to(value.device)]
    return joined_stacks([along, totals])


def _cosines_by_loss_rank(losses: Tensor) -> Tensor:
    """Cosines of the places of samples by their losses, from 0 to 1; equal losses share theirs: (waves, n)."""
    rounded = (losses / losses.abs().max().clamp_min(torch.finfo(losses.dtype).tiny) * 1e6).round()
    ordered = rounded.sort().values
    below, upto = (torch.searchsorted(ordered, rounded, right=right) for right in (False, True))
    places = (below + upto) / (2 * len(losses))
    return (math.pi * torch.arange(1, WAVES + 1, dtype=torch.float64)[:, None] * places).cos()


def highest_loss_by_ascents(
    ctx: Context, evaluate: Evaluate, starts: Params, region: Region, restarts: int, steps: int
) -> Ascent:
    """The largest loss met by ascents from all starts, of which the better ones go on, and the best to the end.

    Args:
        ctx: has the deadline.
        evaluate: stacked points -> losses (k,) and gradients with respect to the points.
        starts: stacked points of the region.
        region: what the points are kept in.
        restarts: ascents that are taken to the end.
        steps: of each of them, from its start.
    """
    sizes, going = shrinking_step_sizes(steps), starts
    many = len(next(iter(starts.values())))
    if many <= restarts:
        return ascend(ctx, evaluate, starts, region, sizes)
    halfway = max(restarts, math.ceil(math.sqrt(many * restarts)))
    first, second = (math.ceil(share * steps) for share in SHORT)
    for kept, part in ((halfway, sizes[:first]), (restarts, sizes[first:second])):
        short = ascend(ctx, evaluate, going, region, part)
        if short.late:
            return short
        best = best_distinct_ascents(short, kept)
        going = {name: value[best.to(value.device)] for name, value in short.where.items()}
    return ascend(ctx, evaluate, going, region, sizes[second:])


def best_distinct_ascents(ascent: Ascent, kept: int) -> Tensor:
    """Numbers of the highest ways that do not lead to the same place, and then of the highest others: (kept,)."""
    flat = [value.reshape(len(value), -1) for value in ascent.where.values()]
    products = torch.stack([(value @ value.T).cpu() for value in flat]).sum(0)
    lengths = products.diagonal().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    alike = products / lengths[:, None] / lengths > ALIKE
    chosen: list[int] = []
    order = ascent.losses.argsort(descending=True).tolist()
    for place in order:
        if not alike[place, chosen].any():
            chosen.append(place)
    return torch.tensor([*chosen, *(place for place in order if place not in chosen)][:kept])


def bracketed_rise(ctx: Context, ascent: Ascent, how: str, normalised: bool = False) -> Value:
    """The rise from the loss at the weights, as `rise_as_value`, with an upper guess of the maximum.

    Low is what was found. High is above it by as much as the ends of the ascents are apart, and `AGREE` at the least;
    there is none where a single ascent, or one that ran out of time, has nothing to compare with.
    """
    value = rise_as_value(ctx, ascent, how, normalised)
    rise = ascent.highest - ctx.scores().loss
    if len(ascent.losses) == 1 or ascent.late or not rise > 0:
        return value
    apart = (ascent.highest - float(ascent.losses.min())) / rise
    return replace(value, high=float(value.value) * (1 + max(AGREE, min(apart, 1.0))))
