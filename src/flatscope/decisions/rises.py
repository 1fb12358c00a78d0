"""Rise of the loss when weights change: measured sample by sample, and how it slopes at the other end.

Every change is compared with the unchanged network on the same batch, so that differences are paired whatever the
order in which a loader gives its samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context, sample_margins
from flatscope.decisions.sample_means import SampleMeans, Uncertain
from flatscope.decisions.slopes import Steps, slopes_along, slopes_here
from flatscope.params import Params
from flatscope.samples import Batch, Inputs

Rises = Mapping[Any, Uncertain]  # "rise", "error" and "trapezoid" of every step


def measured_rises(
    ctx: Context, steps: Steps, part: str = "train", trapezoid: bool = True, buffers: Steps | None = None
) -> Rises:
    """Mean over samples of ℓ(w + Δ) − ℓ(w), of the change of the error, and of the trapezoid ½(g(w) + g(w + Δ))·Δ.

    Args:
        ctx: the point w.
        steps: the changes.
        part: "train" or "test" samples.
        trapezoid: whether it is asked for; it costs a derivative along each step, and one gradient for all of them.
        buffers: by the name of a step those that take other values with it; slopes are without them.
    """
    sums = SampleMeans()
    for batch in ctx.share(part):
        _add_batch(ctx, sums, batch, steps, trapezoid, buffers or {})
    n = ctx.problem.part(part).n
    ctx.count("forward", n * (1 + len(steps)))
    if trapezoid:
        ctx.count("tangent", n * len(steps))
        ctx.count("backward", n)
    return sums.estimates(ctx.problem.ranks)


def _add_batch(ctx: Context, sums: SampleMeans, batch: Batch, steps: Steps, trapezoid: bool, buffers: Steps) -> None:
    inputs, targets = batch
    before, wrong_before = _losses(ctx, inputs, targets, ctx.params)
    here = slopes_here(ctx, batch, steps) if trapezoid else {}
    for key, step in steps.items():
        moved = {**ctx.params, **moved_by(ctx.params, step)}
        after, wrong_after = _losses(ctx, inputs, targets, moved, buffers.get(key))
        sums.add((key, "rise"), after - before)
        if wrong_before is not None and wrong_after is not None:
            sums.add((key, "error"), wrong_after - wrong_before)
        if trapezoid:
            sums.add((key, "trapezoid"), 0.5 * (here[key] + slopes_along(ctx, batch, moved, step)))


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
