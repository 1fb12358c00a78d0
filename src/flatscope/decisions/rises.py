"""Rise of the loss when weights change: measured sample by sample, and how it slopes at the other end.

Every change is compared with the unchanged network on the same batch, so that differences are paired whatever the
order in which a loader gives its samples. Where several changes are measured, the unchanged network's pass is
remembered: what comes before the changed weight is not run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context, sample_margins
from flatscope.curvature.memory import allowed
from flatscope.decisions.sample_means import SampleMeans, Uncertain
from flatscope.decisions.slopes import Steps, slopes_along, slopes_at_weights
from flatscope.errors import NotApplicable
from flatscope.network.incremental_pass import IncrementalPass
from flatscope.params import Params
from flatscope.samples import Batch, Inputs, slice_inputs, tensors_of_inputs
from flatscope.sampling import time_is_over

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
    sums, several = SampleMeans(), len(steps) > 1 and not buffers
    remembered = remembered_size(ctx, part) if several else 0
    size = remembered or ctx.problem.batch_size
    for inputs, targets in ctx.share(part, size=size):
        for start in range(0, len(targets), size):
            batch = slice_inputs(inputs, start, start + size), targets[start : start + size]
            _add_rises_of_batch(ctx, sums, batch, steps, trapezoid, buffers or {}, remembered > 0)
    n = ctx.problem.part(part).n
    ctx.charge_passes("forward", n * (1 + len(steps)))
    if trapezoid:
        ctx.charge_passes("tangent", n * len(steps))
        ctx.charge_passes("backward", n)
    return sums.estimates(ctx.problem.ranks)


def measured_rises_in_time(ctx: Context, steps: Steps, **words: Any) -> Rises:
    """As `measured_rises`; none where the time is up before they are done."""
    try:
        return {} if time_is_over(ctx) else measured_rises(ctx, steps, **words)
    except NotApplicable:
        if not time_is_over(ctx):
            raise
        return {}


def remembered_size(ctx: Context, part: str) -> int:
    """Samples of a batch whose pass can be remembered; 0 where not even one can."""
    inputs, targets = next(iter(ctx.batches(part, size=2)))
    probe = _remembered_pass(ctx, inputs)
    if not probe.shared:
        return 0
    held = probe.bytes - sum(value.nbytes for value in ctx.params.values())
    most = allowed(ctx.effort.limits.kept_memory, ctx.problem.device, ctx.effort.memory)
    return min(ctx.problem.batch_size, most * len(targets) // max(1, held))


def _remembered_pass(ctx: Context, inputs: Inputs) -> IncrementalPass:
    given = [*ctx.problem.buffers.values(), *tensors_of_inputs(inputs)]
    return IncrementalPass(partial(ctx.forward, inputs), ctx.params, given)


def _add_rises_of_batch(
    ctx: Context, sums: SampleMeans, batch: Batch, steps: Steps, trapezoid: bool, buffers: Steps, remember: bool
) -> None:
    inputs, targets = batch
    remembered = _remembered_pass(ctx, inputs) if remember else None
    run = remembered.again if remembered else partial(ctx.forward, inputs)
    with torch.no_grad():
        before, wrong_before = _losses_and_errors(ctx, remembered.outputs if remembered else run(ctx.params), targets)
    here = slopes_at_weights(ctx, batch, steps) if trapezoid else {}
    for key, step in steps.items():
        moved = {**ctx.params, **parameters_moved_by(ctx.params, step)}
        with torch.no_grad():
            there = {**ctx.problem.buffers, **buffers[key]} if key in buffers else None
            outputs = run(moved) if there is None else ctx.problem.forward(inputs, moved, there)
            after, wrong_after = _losses_and_errors(ctx, outputs, targets)
        sums.add((key, "rise"), after - before)
        if wrong_before is not None and wrong_after is not None:
            sums.add((key, "error"), wrong_after - wrong_before)
        if trapezoid:
            sums.add((key, "trapezoid"), 0.5 * (here[key] + slopes_along(ctx.problem.loss, run, targets, moved, step)))


def parameters_moved_by(params: Params, step: Params) -> Params:
    """The parameters that move, at their new place."""
    return {name: params[name] + delta.to(params[name]) for name, delta in step.items()}


def _losses_and_errors(ctx: Context, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Losses of the samples, and 1 for every wrong one."""
    losses = ctx.problem.loss(outputs, targets).double()
    if not ctx.problem.classification:
        return losses, None
    return losses, (~(sample_margins(outputs, targets) > 0)).double()  # NaN is no margin
