"""How far the training loss falls by one step down its gradient: is this a minimum at all?

A gradient norm has no scale: weights that are rescaled without changing the function, or targets in other units, change
it by any factor. The fall of the loss has one: what training has won over outputs that do not depend on the inputs. It
is measured, not predicted, along two directions: the gradient g itself, and w²g, which moves every weight in proportion
to itself and so gives the same loss for every way of rescaling a ReLU network. The larger fall counts.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import NotApplicable
from flatscope.loss import IGNORED, Loss
from flatscope.network_summary import SETTLED
from flatscope.params import Params
from flatscope.samples import tensors_of_inputs

FIRST_SHARE = 0.1  # of the constant's loss: what the first step would win if the loss were a straight line
MOST_STEPS = 6  # evaluations of the loss along a direction
NEAR = 1.5  # a step within this factor of the best one that a parabola knows of is the best one
LEAST_CHANCE = 1e-12
ALONG_WEIGHTS = 0.5  # share of the squared gradient that points along the weights, where weight decay may be the cause
Length = Callable[[float], float]


@dataclass(frozen=True)
class Fall:
    """Fall of the loss by one step down the gradient.

    Attributes:
        loss: mean training loss.
        constant: that of the best outputs that do not depend on the inputs; NaN where it is not known.
        fall: the largest fall of the loss that was found.
        decay: weight decay that would explain what is left of the gradient; 0 where none does.
    """

    loss: float
    constant: float
    fall: float
    decay: float = 0.0


def fall_by_gradient_step(ctx: Context) -> Fall:
    """The fall of the loss by one step down the gradient, from about ten forward passes over the training data."""
    return ctx.cached(_compute_fall)


def _compute_fall(ctx: Context) -> Fall:
    begun = time.monotonic()
    loss, constant = _loss_and_constant_loss(ctx)
    if ctx.effort.end is not None and time.monotonic() + 2 * MOST_STEPS * (time.monotonic() - begun) > ctx.effort.end:
        raise NotApplicable("time for ten passes over the training data")
    scale = constant if constant > 0 else loss
    if loss == 0:
        return Fall(loss, constant, 0.0)
    if not (loss > 0 and scale > 0 and math.isfinite(loss)):
        raise NotApplicable("a loss that is never negative", f"{loss:.3g}: a fall has nothing to be measured against")
    gradient = ctx.gradient()

    def plain(step: float, along: Params) -> float:
        return _mean_loss(ctx, _weights_after_step(ctx, along, step))

    found = Fall(loss, constant, _largest_fall(ctx, gradient, loss, scale, plain))
    if not found.fall / scale > SETTLED:
        return found
    strength, rest = _gradient_without_weight_decay(ctx, gradient)
    if not strength > 0:
        return found
    weights = [value for value in ctx.trainable.values() if value.ndim > 1]
    size = sum(float(value.double().square().sum()) for value in weights)

    def decayed(step: float, along: Params) -> float:
        moved = _weights_after_step(ctx, along, step)
        there = sum(float(moved[name].double().square().sum()) for name in along if moved[name].ndim > 1)
        return _mean_loss(ctx, moved) + strength / 2 * (there - size)

    fall = _largest_fall(ctx, rest, loss, scale, decayed)
    return Fall(loss, constant, found.fall, strength if fall / scale <= SETTLED else 0.0)


def _loss_after_step(after: Callable[[float, Params], float], along: Params, step: float) -> float:
    return after(step, along)


def _largest_fall(
    ctx: Context, gradient: Params, loss: float, scale: float, after: Callable[[float, Params], float]
) -> float:
    """The larger fall of the two directions."""
    relative = {name: value * ctx.params[name].double().square() for name, value in gradient.items()}
    falls = [0.0]
    for along in (gradient, relative):
        slope = sum(float((gradient[name] * along[name]).sum()) for name in along)
        if slope > 0 and math.isfinite(slope):
            along_it = functools.partial(_loss_after_step, after, along)
            falls.append(loss - _lowest_loss_along_direction(along_it, loss, slope, scale))
    return max(falls)


def _lowest_loss_along_direction(after: Length, loss: float, slope: float, scale: float) -> float:
    """The lowest loss along a direction, by parabolas through the last step and the slope at the start."""
    step, lowest = FIRST_SHARE * scale / slope, loss
    for _ in range(MOST_STEPS):
        there = after(step)
        if not math.isfinite(there):
            step /= 10
            continue
        lowest = min(lowest, there)
        bend = 2 * (there - loss + slope * step) / step**2
        best = slope / bend if bend > 0 else 4 * step
        if step / NEAR <= best <= step * NEAR:
            break
        step = min(max(best, step / 100), step * 4)
    return lowest


def _weights_after_step(ctx: Context, along: Params, step: float) -> Params:
    return {**ctx.params, **{n: (ctx.params[n].double() - step * v).to(ctx.params[n].dtype) for n, v in along.items()}}


def _mean_loss(ctx: Context, params: Params) -> float:
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for inputs, targets in ctx.share():
            total += ctx.problem.loss(ctx.forward(inputs, params), targets).double().sum().cpu()
    ctx.charge_passes("forward", ctx.problem.n_train)
    return float(ctx.problem.ranks.summed([total])[0]) / ctx.problem.n_train


def _gradient_without_weight_decay(ctx: Context, gradient: Params) -> tuple[float, Params]:
    """The weight decay λ of matrices that leaves least of g + λw, and what it leaves; 0 where that is most of g."""
    weights = {name: value.double() for name, value in ctx.trainable.items() if value.ndim > 1}
    size = sum(float(value.square().sum()) for value in weights.values())
    along = -sum(float((gradient[name] * value).sum()) for name, value in weights.items())
    whole = sum(float(value.square().sum()) for value in gradient.values())
    strength = along / size if size > 0 else 0.0
    if not (strength > 0 and strength * along >= ALONG_WEIGHTS * whole):
        return 0.0, {}
    return strength, {n: v + strength * weights[n] if n in weights else v for n, v in gradient.items()}


def _loss_and_constant_loss(ctx: Context) -> tuple[float, float]:
    """The mean training loss of the network, and of the best constant outputs (NaN where there are none).

    Where time is short the loss is computed again: how long that takes tells what ten passes more would take.
    """
    loss = ctx.scores().loss if ctx.effort.end is None else _mean_loss(ctx, ctx.params)
    problem, total = ctx.problem, torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        example = problem.example(1)
        one = ctx.forward(example)
        try:
            outputs_there = _best_constant(ctx, one.shape[1:])
        except (RuntimeError, ValueError, IndexError):  # targets of a user's own loss may be anything
            outputs_there = None
        for inputs, targets in ctx.share() if outputs_there is not None else ():
            is_alike = [part.shape[1:] for part in tensors_of_inputs(inputs)] == [
                part.shape[1:] for part in tensors_of_inputs(example)
            ]
            shape = (len(targets), *one.shape[1:]) if is_alike else ctx.forward(inputs).shape
            try:
                total += problem.loss(outputs_there.to(one).expand(shape), targets).double().sum().cpu()  # type: ignore[union-attr]
            except RuntimeError:
                outputs_there = None
                break
    constant = float(problem.ranks.summed([total])[0]) / problem.n_train
    return loss, constant if outputs_there is not None else math.nan


def _best_constant(ctx: Context, shape: torch.Size) -> Tensor | None:
    """Outputs of one sample that do best for all: frequencies of the classes, or means of the targets."""
    total, n = None, 0.0
    for _, targets in ctx.share():
        summed, counted = _sum_of_targets(ctx.problem.loss, targets, shape)
        total, n = summed if total is None else total + summed, n + counted
    if total is None:
        return None
    *sums, count = ctx.problem.ranks.summed([total, torch.tensor(n, dtype=torch.float64)])
    mean = sums[0] / float(count)
    kind = ctx.problem.loss.kind
    classes = kind == "softmax" or (kind == "own" and _are_classes(targets, shape))
    if classes:
        mean = mean.clamp_min(LEAST_CHANCE).log()
    elif kind == "logistic":
        mean = torch.logit(mean, eps=LEAST_CHANCE)
    return mean[None]


def _are_classes(targets: Tensor, shape: torch.Size) -> bool:
    return not targets.is_floating_point() and targets.ndim == 1 and len(shape) == 1 and shape[0] > 1


def _sum_of_targets(loss: Loss, targets: Tensor, shape: torch.Size) -> tuple[Tensor, float]:
    """Sum of the targets in the form of one sample's outputs, and of how many it is."""
    targets = targets.detach().cpu()
    if loss.kind == "softmax":
        last = loss.name == "next_token"
        axis = len(shape) - 1 if last else 0
        form = [1] * len(shape)
        form[axis] = shape[axis]
        if targets.is_floating_point():
            flat = targets.double().movedim(axis + 1, -1).reshape(-1, shape[axis])
            return flat.sum(0).reshape(form), float(len(flat))
        counted = targets[targets != (loss.ignored if loss.ignored is not None else IGNORED)]
        return torch.bincount(counted, minlength=shape[axis]).double().reshape(form), float(len(counted))
    if _are_classes(targets, shape):
        return torch.bincount(targets, minlength=shape[0]).double(), float(len(targets))
    return targets.double().reshape(len(targets), *shape).sum(0), float(len(targets))
