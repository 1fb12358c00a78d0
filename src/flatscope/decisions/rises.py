"""Rise of the loss when weights change: measured sample by sample, and how it slopes at the other end.

Every change is compared with the unchanged network on the same batch, so that differences are paired whatever the
order in which a loader gives its samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad as untyped_forward_ad

from flatscope.context import Context, sample_margins
from flatscope.decisions.sample_means import SampleMeans, Uncertain
from flatscope.params import Params
from flatscope.samples import Batch, Inputs

forward_ad: Any = untyped_forward_ad
Steps = Mapping[Any, Params]  # by a name of the step: Δ of every parameter that moves
Rises = Mapping[Any, Uncertain]  # "rise", "error" and "trapezoid" of every step


def measured_rises(
    ctx: Context, steps: Steps, part: str = "train", trapezoid: bool = True, buffers: Steps | None = None
) -> Rises:
    """Mean over samples of ℓ(w + Δ) − ℓ(w), of the change of the error, and of the trapezoid ½(g(w) + g(w + Δ))·Δ.

    Args:
        ctx: the point w.
        steps: the changes.
        part: "train" or "test" samples.
        trapezoid: whether it is asked for; it costs two derivatives along each step.
        buffers: by the name of a step those that take other values with it; slopes are without them.
    """
    sums = SampleMeans()
    for batch in ctx.share(part):
        _add_batch(ctx, sums, batch, steps, trapezoid, buffers or {})
    n, derivatives = ctx.problem.part(part).n, 2 * len(steps) if trapezoid else 0
    ctx.count("forward", n * (1 + len(steps)))
    ctx.count("tangent", n * derivatives)
    return sums.estimates(ctx.problem.ranks)


def _add_batch(ctx: Context, sums: SampleMeans, batch: Batch, steps: Steps, trapezoid: bool, buffers: Steps) -> None:
    inputs, targets = batch
    before, wrong_before = _losses(ctx, inputs, targets, ctx.params)
    for key, step in steps.items():
        moved = {**ctx.params, **moved_by(ctx.params, step)}
        after, wrong_after = _losses(ctx, inputs, targets, moved, buffers.get(key))
        sums.add((key, "rise"), after - before)
        if wrong_before is not None and wrong_after is not None:
            sums.add((key, "error"), wrong_after - wrong_before)
        if trapezoid:
            ends = [slopes_along(ctx, batch, params, step) for params in (ctx.params, moved)]
            sums.add((key, "trapezoid"), 0.5 * (ends[0] + ends[1]))


def moved_by(params: Params, step: Params) -> Params:
    """The parameters that move, at their new place."""
    return {name: params[name] + delta.to(params[name]) for name, delta in step.items()}


def _losses(
    ctx: Context, inputs: Inputs, targets: Tensor, params: Params, buffers: Params | None = None
) -> tuple[Tensor, Tensor | None]:
    """Losses of the samples, and 1 for every wrong one."""
    with torch.no_grad():
        outputs = ctx.problem.forward(inputs, params, {**ctx.problem.buffers, **(buffers or {})})
        losses = ctx.problem.loss(outputs, targets).double()
        if not ctx.problem.classification:
            return losses, None
        return losses, (~(sample_margins(outputs, targets) > 0)).double()  # NaN is no margin


def slopes_along(ctx: Context, batch: Batch, params: Params, step: Params) -> Tensor:
    """g_i·Δ of every sample: in forward mode, or by two backward passes where an operation has none."""
    try:
        return _by_tangents(ctx, batch, params, step)
    except (NotImplementedError, RuntimeError) as problem:
        if "forward" not in str(problem) and "jvp" not in str(problem):
            raise
    return _by_two_backward_passes(ctx, batch, params, step)


def _by_tangents(ctx: Context, batch: Batch, params: Params, step: Params) -> Tensor:
    inputs, targets = batch
    with torch.no_grad(), forward_ad.dual_level():
        dual: dict[str, Any] = {
            name: forward_ad.make_dual(params[name].detach(), delta.to(params[name])) for name, delta in step.items()
        }
        losses = ctx.problem.loss(ctx.forward(inputs, {**params, **dual}), targets)
        tangent = forward_ad.unpack_dual(losses).tangent
    return torch.zeros_like(losses, dtype=torch.float64) if tangent is None else tangent.double()


def _by_two_backward_passes(ctx: Context, batch: Batch, params: Params, step: Params) -> Tensor:
    inputs, targets = batch
    with torch.enable_grad():
        leaves = {name: params[name].detach().requires_grad_() for name in step}
        losses = ctx.problem.loss(ctx.forward(inputs, {**params, **leaves}), targets)
        shares = torch.ones_like(losses, requires_grad=True)
        gradients = torch.autograd.grad(
            losses, list(leaves.values()), shares, create_graph=True, materialize_grads=True
        )
        total = sum((g * d.to(g)).sum() for g, d in zip(gradients, step.values(), strict=True))
        if not isinstance(total, Tensor) or not total.requires_grad:
            return torch.zeros_like(losses, dtype=torch.float64)
        (slopes,) = torch.autograd.grad(total, shares, materialize_grads=True)
    return slopes.double()
