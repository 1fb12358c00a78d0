"""Attacks on certificates, before they are given: a pair of inputs that breaks one shows that it is none.

A search proves nothing where it finds nothing; the proof is in the rules by which constants were found. It notices
where they were applied to a network that they do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor

from flatscope.context import Context, sample_margins
from flatscope.errors import NotApplicable
from flatscope.measures.sample_kinds import kinds_of_samples
from flatscope.samples import Inputs, as_rows, map_inputs, tensors_of_inputs

SAMPLES, KINDS = 6, 6
LENGTHS = (1e-2, 1.0)  # of the moves that are tried, relative to the samples
POWERS = 3  # products with the Jacobian and its transpose
HALVINGS = 10
STEPS = 8  # towards another class
PASSES = {"sample": 400.0}  # what it takes to look for quotients, in passes of one sample
MARGIN_PASSES = {"forward": 2.0, "sample": 500.0}
TOLERANCE = 1e-6  # by which norms found by iteration may be too small
ROUNDING = 1e3  # times the accuracy of the type: how far outputs may be off
WAY_OUT = "Please report the network: an operation in it is not followed as it is"


def refuse_broken_constant(ctx: Context, log_constant: float, order: float, name: str) -> None:
    """Refuse a Lipschitz constant of the network that some pair of inputs breaks.

    Args:
        ctx: the network.
        log_constant: its logarithm.
        order: 2 or infinity, of the norms of inputs and outputs.
        name: of the constant, for the message.
    """
    quotient = ctx.cached(largest_quotient, order=order)
    if quotient > 0 and math.log(quotient) > log_constant + TOLERANCE:
        raise NotApplicable(
            f"outputs that move at most {math.exp(log_constant):.4g} times as far as the input",
            f"two inputs whose outputs are {quotient:.4g} times as far apart",
            where=name,
            fix=WAY_OUT,
        )


def refuse_broken_radius(ctx: Context, margin: float, radius: float) -> None:
    """Refuse a radius within which some sample of at least this margin changes its class."""
    inputs, targets = next(iter(ctx.batches()))
    with torch.no_grad():
        margins = sample_margins(ctx.forward(inputs), targets)
    ctx.charge_passes("forward", len(targets))
    order = torch.where(margins > margin, margins, math.inf).argsort()[:SAMPLES]
    order = order[(margins > margin)[order]]
    if not len(order) or radius == 0:
        return
    moving = _Moving(ctx, map_inputs(inputs, lambda part: part[order]))
    reach, labels = min(radius, 1e3 * moving.size) * (1 - TOLERANCE), targets[order]
    point = moving.start
    for step in range(STEPS):
        value, slope = moving.slope(point, lambda outputs: sample_margins(outputs, labels).sum())
        broken = sample_margins(value, labels) < 0
        if bool(broken.any()):
            distance = float((point - moving.start)[broken].norm(dim=1).min())
            raise NotApplicable(
                f"samples that keep their class within {radius:.4g}",
                f"one that changes it at a distance of {distance:.4g}",
                where="certified_radius",
                fix=WAY_OUT,
            )
        away = point - moving.start
        still = slope.norm(dim=1, keepdim=True) == 0
        away = away - reach * _unit_rows(torch.where(still, moving.noise(ctx, step), slope), 2)
        point = moving.start + away * (reach / away.norm(dim=1, keepdim=True).clamp_min(reach))


@torch.no_grad()
def largest_quotient(ctx: Context, order: float) -> float:
    """The largest ratio of the distances of outputs and inputs that a search finds; what may be rounding is left out.

    From samples to others, to random points near by and along the directions that stretch most; then each way is halved
    time after time, and the half kept that stretches more: it ends where the network is steepest, or jumps.
    """
    one_kind = not ctx.problem.uneven
    kinds = [ctx.problem.example(SAMPLES)] if one_kind else islice(kinds_of_samples(ctx, everything=False), KINDS)
    best = 0.0
    for inputs in kinds:
        if any(part.is_floating_point() for part in tensors_of_inputs(inputs)):
            best = max(best, _largest_quotient_of_batch(ctx, _Moving(ctx, inputs), order))
    return best


def _largest_quotient_of_batch(ctx: Context, moving: _Moving, order: float) -> float:
    start, size = moving.start, moving.size
    direction = _unit_rows(moving.noise(ctx, 0), order)
    for _ in range(POWERS):  # towards what the Jacobian stretches most
        direction = _unit_rows(moving.pulled_back(start, direction, order), order)
    ends = [start.roll(1, 0), *(start + length * size * _unit_rows(moving.noise(ctx, 1), 2) for length in LENGTHS)]
    ends += [
        start + length * size * direction / direction.norm(dim=1, keepdim=True).clamp_min(1e-300) for length in LENGTHS
    ]
    n = len(start)
    left, right = start.repeat(len(ends), 1), torch.cat(ends)
    at_left, at_right = moving.outputs(start).repeat(len(ends), 1), moving.outputs(right, copies=len(ends))
    best = float(_quotients_of_distances(left, right, at_left, at_right, order).max()) if n else 0.0
    for _ in range(HALVINGS):
        middle = (left + right) / 2
        at_middle = moving.outputs(middle, copies=len(ends))
        first = _quotients_of_distances(left, middle, at_left, at_middle, order)
        second = _quotients_of_distances(middle, right, at_middle, at_right, order)
        best = max(best, float(torch.maximum(first, second).max()))
        near = (first >= second)[:, None]
        left, right = torch.where(near, left, middle), torch.where(near, middle, right)
        at_left, at_right = torch.where(near, at_left, at_middle), torch.where(near, at_middle, at_right)
    return best


def _quotients_of_distances(left: Tensor, right: Tensor, at_left: Tensor, at_right: Tensor, order: float) -> Tensor:
    """Ratios of distances, less what may be rounding; 0 for points that are one, and where outputs are no numbers."""
    apart, far = (left - right).norm(order, dim=1), (at_left - at_right).norm(order, dim=1)
    rounding = ROUNDING * torch.finfo(left.dtype).eps * (at_left.norm(order, dim=1) + at_right.norm(order, dim=1))
    steps = ROUNDING * torch.finfo(left.dtype).eps * (left.norm(order, dim=1) + right.norm(order, dim=1))
    quotients = ((far - rounding) / apart).nan_to_num(0.0, 0.0, 0.0)
    return torch.where(apart > steps, quotients, torch.zeros_like(quotients))


def _unit_rows(rows: Tensor, order: float) -> Tensor:
    """Rows of length 1 in that norm, which stretch most along the given ones: signs where the largest entry counts."""
    if order == math.inf:
        return torch.sign(rows)
    return torch.divide(rows, rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny))


class _Moving:
    """Samples whose real numbers move: as rows (samples, all real entries)."""

    def __init__(self, ctx: Context, inputs: Inputs) -> None:
        self.ctx, self.inputs = ctx, inputs
        real = [part for part in tensors_of_inputs(inputs) if part.is_floating_point()]
        self.shapes = [part.shape[1:] for part in real]
        self.start = torch.cat([as_rows(part) for part in real], 1)
        self.size = float(self.start.norm(dim=1).mean()) or 1.0

    def noise(self, ctx: Context, step: int) -> Tensor:
        """Normal numbers for every entry."""
        generator = ctx.generator(f"attack {step}")
        return torch.randn(self.start.shape, generator=generator, dtype=torch.float64).to(self.start)

    def outputs(self, rows: Tensor, copies: int = 1) -> Tensor:
        """Outputs (rows, all) of these points, each in the place of its sample; of several copies of the samples."""
        self.ctx.charge_passes("forward", len(rows))
        return self._forward(rows, copies).reshape(len(rows), -1)

    def _forward(self, rows: Tensor, copies: int = 1) -> Tensor:
        pieces = iter(torch.split(rows, [shape.numel() for shape in self.shapes], 1))
        shapes = iter(self.shapes)

        def moved(part: Tensor) -> Tensor:
            if not part.is_floating_point():
                return torch.cat([part] * copies)
            return torch.reshape(next(pieces), (len(rows), *next(shapes)))

        return self.ctx.forward(map_inputs(self.inputs, moved))

    def slope(self, rows: Tensor, wanted: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs at these points, and the gradient of a number made of them; zero where there is none."""
        self.ctx.charge_passes("forward", len(rows))
        self.ctx.charge_passes("backward", len(rows))
        with torch.enable_grad():
            free = rows.detach().requires_grad_()
            outputs = self._forward(free)
            value = wanted(outputs)
            if not value.requires_grad:
                return outputs.detach(), torch.zeros_like(rows)
            (slope,) = torch.autograd.grad(value, free, materialize_grads=True)
        return outputs.detach(), slope.nan_to_num(0.0, 0.0, 0.0)

    def pulled_back(self, rows: Tensor, direction: Tensor, order: float) -> Tensor:
        """The gradient of how far outputs move in a direction: of their length, or of the entry that moves most."""
        step = 1e-3 * self.size * direction / direction.norm(dim=1, keepdim=True).clamp_min(1e-300)
        change = self.outputs(rows + step) - self.outputs(rows)
        if order == math.inf:
            largest = change.abs().argmax(1, keepdim=True)
            change = torch.zeros_like(change).scatter(1, largest, change.gather(1, largest).sign())
        else:
            change = _unit_rows(change, 2)
        return self.slope(rows, lambda outputs: (outputs.reshape(len(rows), -1) * change).sum())[1]
