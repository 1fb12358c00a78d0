"""Slopes of the loss along changes of weights, sample by sample: at these weights, and where a change ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad as untyped_forward_ad

from flatscope.context import Context
from flatscope.curvature.memory import fitted
from flatscope.curvature.patches import moved_outputs
from flatscope.curvature.per_sample_gradients import Flow
from flatscope.curvature.route import find_not_covered
from flatscope.curvature.sweep import gradient_flows, sweep_plan
from flatscope.errors import NotApplicable
from flatscope.params import Params
from flatscope.samples import Batch, slice_inputs

forward_ad: Any = untyped_forward_ad
Loss = Callable[[Tensor, Tensor], Tensor]  # of every sample
Run = Callable[[Params], Tensor]
Steps = Mapping[Any, Params]  # by a name of the step: Δ of every parameter that moves


def gradient_products_with_steps(
    ctx: Context, flow: Flow, of_weight: Mapping[str, list[Hashable]], steps: Steps
) -> Iterator[tuple[Hashable, Tensor]]:
    """⟨G, Δ⟩ of every sample and column, (n, k) in float64, for each change of a flow's weight.

    Args:
        ctx: the network.
        flow: what columns send through a layer.
        of_weight: names of the changes of each weight.
        steps: the changes, of one weight each.
    """
    if flow.weight not in of_weight or flow.kind == "batchnorm":
        return
    keys = of_weight[flow.weight]
    moves = torch.stack([steps[key][flow.weight] for key in keys])
    total: Tensor | float = 0.0
    for use, cotangents in zip(flow.uses, flow.cotangents, strict=True):
        x = use.input.detach()
        moved = moved_outputs(x, moves.to(x), use.kind, use.settings)  # (n, several, …)
        total = total + cotangents.flatten(2) @ moved.mT
    yield from zip(keys, total.double().unbind(2), strict=True)  # type: ignore[union-attr]


def steps_by_weight(steps: Steps) -> dict[str, list[Hashable]]:
    """Names of the changes of each weight; these move one weight each."""
    names: dict[str, list[Hashable]] = {}
    for key, step in steps.items():
        names.setdefault(next(iter(step)), []).append(key)
    return names


def slopes_at_weights(ctx: Context, batch: Batch, steps: Steps) -> dict[Any, Tensor]:
    """g_i·Δ of every sample at the context's weights, by step.

    One backward pass serves all steps that move one weight of a layer each; others take a derivative along them.
    """
    trainable = set(ctx.problem.trainable) - find_not_covered(ctx, "gauss_newton").keys()
    seen = {key: step for key, step in steps.items() if len(step) == 1 and trainable >= step.keys()}
    try:
        slopes = _slopes_by_sample_gradients(ctx, batch, seen) if seen else {}
    except NotApplicable:  # values of the samples decide how a layer is used
        slopes = {}
    inputs, targets = batch
    for key in steps.keys() - slopes.keys():
        slopes[key] = slopes_along(ctx.problem.loss, partial(ctx.forward, inputs), targets, ctx.params, steps[key])
    return slopes


def _slopes_by_sample_gradients(ctx: Context, batch: Batch, steps: Steps) -> dict[Any, Tensor]:
    """Slopes from the gradients of single samples, which the layers' inputs and outputs give."""
    (inputs, targets), of_weight = batch, steps_by_weight(steps)
    others, size = ctx.params.keys() - of_weight.keys(), sweep_plan(ctx, 1).samples

    def slopes(start: int, stop: int) -> dict[Any, Tensor]:
        samples = slice_inputs(inputs, start, stop), targets[start:stop]
        sums = {key: torch.zeros(stop - start, dtype=torch.float64, device=targets.device) for key in steps}
        for flow in gradient_flows(ctx, samples, others):
            for key, along in gradient_products_with_steps(ctx, flow, of_weight, steps):
                sums[key] += along[:, 0]
        return sums

    parts, start = [], 0
    while start < len(targets):
        stop = min(start + size, len(targets))
        part = fitted(lambda: slopes(start, stop))  # noqa: B023  called at once
        if part is None and size == 1:
            raise torch.OutOfMemoryError("the memory does not suffice for the gradient of one sample")
        if part is None:
            size = max(1, size // 2)
            continue
        parts.append(part)
        start = stop
    return {key: torch.cat([part[key] for part in parts]) for key in steps}


def slopes_along(loss: Loss, run: Run, targets: Tensor, params: Params, step: Params) -> Tensor:
    """g_i·Δ of every sample: in forward mode, or by two backward passes where an operation has none.

    Args:
        loss: of the samples.
        run: outputs at weights.
        targets: of the samples.
        params: the weights.
        step: Δ of those that move.
    """
    try:
        return _slopes_in_forward_mode(loss, run, targets, params, step)
    except (NotImplementedError, RuntimeError) as problem:
        if "forward" not in str(problem) and "jvp" not in str(problem):
            raise
    return _slopes_by_two_backward_passes(loss, run, targets, params, step)


def _slopes_in_forward_mode(loss: Loss, run: Run, targets: Tensor, params: Params, step: Params) -> Tensor:
    with torch.no_grad(), forward_ad.dual_level():
        dual: dict[str, Any] = {
            name: forward_ad.make_dual(params[name].detach(), delta.to(params[name])) for name, delta in step.items()
        }
        losses = loss(run({**params, **dual}), targets)
        tangent = forward_ad.unpack_dual(losses).tangent
    return torch.zeros_like(losses, dtype=torch.float64) if tangent is None else tangent.double()


def _slopes_by_two_backward_passes(loss: Loss, run: Run, targets: Tensor, params: Params, step: Params) -> Tensor:
    with torch.enable_grad():
        leaves = {name: params[name].detach().requires_grad_() for name in step}
        losses = loss(run({**params, **leaves}), targets)
        shares = torch.ones_like(losses, requires_grad=True)
        gradients = torch.autograd.grad(
            losses, list(leaves.values()), shares, create_graph=True, materialize_grads=True
        )
        total = sum((g * d.to(g)).sum() for g, d in zip(gradients, step.values(), strict=True))
        if not isinstance(total, Tensor) or not total.requires_grad:
            return torch.zeros_like(losses, dtype=torch.float64)
        (slopes,) = torch.autograd.grad(total, shares, materialize_grads=True)
    return slopes.double()
