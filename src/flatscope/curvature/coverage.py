"""Which parameters the sweep covers exactly, and one forward pass with every layer's call recorded.

The Gauss-Newton matrix needs no linearity, only the gradients: the sum over the recorded uses of a parameter must be
all of it. A numerical check says so: for a random column it must be what autograd gives.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.bends import BendRecorder, find_bends
from flatscope.curvature.layer_forms import Flow, matrices, scale_gradients, vector_gradients
from flatscope.curvature.patches import weight_gradients
from flatscope.curvature.probe import disagreeing_parameters
from flatscope.network.layers import Call, by_samples, recorded
from flatscope.network.operations import Choices, Linearity
from flatscope.network.program import watched
from flatscope.params import Params
from flatscope.samples import Inputs, cut, parts_of


def find_unswept(ctx: Context) -> dict[str, str]:
    """{parameter: reason} for trainable parameters whose per-sample gradients the sweep cannot form."""
    inputs = ctx.problem.example()
    _, _, calls = recorded_forward(ctx, inputs)
    reached = ctx.sweep(_linearity)[1]
    mixed = _mixing_samples(ctx, inputs, calls)
    found: dict[str, str] = {}
    for call in calls:
        for name in (call.weight, call.bias):
            if name is None:
                continue
            if call.edge is None and name in reached:
                found.setdefault(name, "used inside an operation that cannot be followed")
            if call.kind == "lookup":
                found.setdefault(name, "a lookup")
            if call.opaque:
                found.setdefault(name, "used through a view of it")
            if call.weight in mixed:
                found.setdefault(name, "its input does not have the samples as its first axis")
    seen = {name for call in calls for name in (call.weight, call.bias)}
    for name in reached - seen:  # what the outputs do not depend on has no curvature
        found.setdefault(name, "not the weight, bias or BatchNorm parameter of a layer")
    found |= dict.fromkeys(_passed_by_some(ctx), "not every sample passes it")
    return {name: found[name] for name in ctx.problem.trainable if name in found}


def find_curved(ctx: Context, bends: bool = False) -> dict[str, str]:
    """{parameter: reason} for trainable parameters whose Hessian block the sweep does not give.

    By the program, then by what the sweep can form at all, then by a numerical probe.

    Args:
        ctx: the network.
        bends: whether the sweep also has columns at curved operations.
    """
    _, _, calls = recorded_forward(ctx, ctx.problem.example())
    curved = {} if bends else dict(ctx.sweep(_linearity)[0])
    uses = Counter(name for call in calls for name in (call.weight, call.bias) if name)
    for name, times in uses.items():
        if times > 1:
            curved.setdefault(name, f"{name} is used {times} times")
    curved = {**ctx.sweep(find_unswept), **curved}
    curved |= disagreeing_parameters(ctx, curved, ctx.sweep(find_bends) if bends else None)
    return {name: curved[name] for name in ctx.problem.trainable if name in curved}


def _linearity(ctx: Context) -> tuple[dict[str, str], set[str]]:
    """Parameters in which the outputs are not piecewise linear, with reasons, and those that they depend on at all."""
    leaves = {name: ctx.params[name].detach().requires_grad_() for name in ctx.problem.trainable}
    following = Linearity(leaves)
    with torch.enable_grad(), watched(following.follow):
        outputs = ctx.problem.forward(ctx.problem.example(), {**ctx.params, **leaves})
    return following.curved, following.reached(outputs)


def recorded_forward(
    ctx: Context, inputs: Inputs, bends: BendRecorder | None = None
) -> tuple[Params, Tensor, list[Call]]:
    """Run the network forward with every layer on its own view of its input; leaves, outputs, calls."""
    leaves = {name: ctx.params[name].detach().requires_grad_() for name in ctx.problem.trainable}
    params = {**ctx.params, **leaves}
    own_views = watched(bends.follow) if bends else nullcontext()
    with torch.enable_grad(), recorded(ctx.problem.model, params, isolate=True) as recorder, own_views:
        outputs = ctx.problem.forward(inputs, params)
    return leaves, outputs, recorder.calls


def rows_per_sample(ctx: Context) -> dict[str, int]:
    """{weight: rows of its input for each sample}: 1, or the positions of a sequence that was flattened into rows."""
    inputs = ctx.problem.example()
    n = len(parts_of(inputs)[0])
    return {call.weight: max(1, len(call.input) // n) for call in recorded_forward(ctx, inputs)[2]}


def _mixing_samples(ctx: Context, inputs: Inputs, calls: list[Call]) -> set[str]:
    """Weights whose input has other rows than the samples, found by running each sample by itself.

    The sweep sums gradients over everything but the first axis: that has to be the samples, in their order.
    """
    n = len(parts_of(inputs)[0])
    calls = [by_samples(call, n) for call in calls]
    mixed = {call.weight for call in calls if len(call.input) != n}
    rounding = 1e3 * torch.finfo(ctx.problem.dtype).eps
    for i in range(n):
        alone = [by_samples(call, 1) for call in recorded_forward(ctx, cut(inputs, i, i + 1))[2]]
        if [call.weight for call in alone] != [call.weight for call in calls]:
            return {call.weight for call in calls}  # which layers run depends on the samples
        for call, other in zip(calls, alone, strict=True):
            if call.weight not in mixed and other.input.is_floating_point():
                row, single = call.input[i : i + 1].detach(), other.input.detach()
                scale = float(call.input.detach().abs().max()) or 1.0
                if row.shape != single.shape or float((row - single).abs().max()) > rounding * scale:
                    mixed.add(call.weight)
    return mixed


def _passed_by_some(ctx: Context) -> set[str]:
    """Weights and biases that not every sample passes, from one pass over the data where values decide anything."""
    choices = Choices()
    with torch.no_grad(), watched(choices.follow):
        ctx.problem.forward(ctx.problem.example())
    if not choices.found:
        return set()
    some: set[str] = set()
    first: set[str] | None = None
    rows: dict[str, float] = {}  # of each weight's input, for each sample
    with torch.no_grad():
        for inputs, targets in ctx.batches():
            with recorded(ctx.problem.model, ctx.params) as recorder:
                ctx.forward(inputs)
            names = {name for call in recorder.calls for name in (call.weight, call.bias) if name}
            shares = [(call, len(call.input) / len(targets)) for call in recorder.calls]
            uneven = [call for call, share in shares if rows.setdefault(call.weight, share) != share]
            some |= {name for call in uneven for name in (call.weight, call.bias) if name}
            first = names if first is None else first
            some |= names ^ first
    ctx.count("forward", ctx.problem.n_train)
    return some


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
