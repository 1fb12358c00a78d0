"""Of which parameters do the recorded layers give the gradient of each sample?

The Gauss-Newton matrix needs no linearity, only the gradients: the sum over the recorded uses of a parameter must be
all of it. A numerical check says so: for a random column it must be what autograd gives.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.coverage import find_unswept, recorded_forward
from flatscope.curvature.layer_forms import Flow, matrices, scale_gradients, vector_gradients
from flatscope.curvature.patches import weight_gradients
from flatscope.network.layers import Call

CHECKED_SAMPLES = 3
Uses = list[list[Call]]


def uses_of(calls: list[Call]) -> Uses:
    """The calls whose flow was seen, those of one weight together."""
    found: dict[tuple[str, str | None, str], list[Call]] = {}
    for call in calls:
        if call.edge is not None and not call.opaque and call.kind != "lookup":
            found.setdefault((call.weight, call.bias, call.kind), []).append(call)
    return list(found.values())


def find_unseen(ctx: Context) -> dict[str, str]:
    """{parameter: reason} for trainable parameters whose gradients the recorded layers do not give."""
    inputs, _ = next(iter(ctx.batches(size=CHECKED_SAMPLES)))
    leaves, outputs, calls = recorded_forward(ctx, inputs)
    column = torch.randn(outputs.shape, generator=ctx.generator("check of recorded gradients"), dtype=torch.float64)
    column = column.to(outputs)
    given = torch.autograd.grad(outputs, list(leaves.values()), column, retain_graph=True, allow_unused=True)
    unswept = ctx.sweep(find_unswept)
    uses = [group for group in uses_of(calls) if group[0].weight not in unswept]
    found, times = recorded_gradients(ctx, outputs, uses, column)
    tolerance = 100 * torch.finfo(outputs.dtype).eps ** 0.75
    unseen = {}
    for name, gradient in zip(leaves, given, strict=True):
        if gradient is None:  # the outputs do not depend on it
            continue
        if name in unswept:
            unseen[name] = unswept[name]
        elif name not in found:
            unseen[name] = "not the weight, bias or BatchNorm parameter of a recorded layer"
        elif times[name] > 1:
            unseen[name] = "used by layers of several kinds"
        elif float((found[name].reshape(gradient.shape) - gradient).norm()) > tolerance * float(gradient.norm()):
            unseen[name] = "also used where no layer was recorded"
    return unswept | unseen


def recorded_gradients(
    ctx: Context, outputs: Tensor, uses: Uses, column: Tensor
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Gradients of one column by parameter, summed over the samples, and the groups of uses that they come from."""
    edges = [call.edge for calls in uses for call in calls if call.edge is not None]
    if not edges:
        return {}, Counter()
    rows = iter(torch.autograd.grad(outputs, edges, column, retain_graph=True, allow_unused=True))
    found: dict[str, Tensor] = {}
    times: Counter[str] = Counter()
    for calls in uses:
        reached = [(call, s[:, None]) for call in calls if (s := next(rows)) is not None]
        if not reached:
            continue
        flow = Flow([call for call, _ in reached], [s for _, s in reached], None, None)
        parts = {} if flow.bias is None else {flow.bias: vector_gradients(flow)}
        if flow.kind == "batchnorm":
            parts[flow.weight] = scale_gradients(flow)
        else:
            parts[flow.weight] = weight_gradients(*matrices(flow, ctx.params[flow.weight]), flow.kind)
        for name, gradients in parts.items():
            times[name] += 1
            total = gradients.sum((0, 1))
            found[name] = found[name] + total if name in found else total
    return found, times
