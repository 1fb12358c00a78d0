"""Which parameters the sweep covers exactly, and one forward pass with every layer's call recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.linearity import curved_parameters, reached_parameters
from flatscope.curvature.probe import disagreeing_parameters
from flatscope.network.layers import Call, recorded
from flatscope.params import Params
from flatscope.samples import Inputs


def find_curved(ctx: Context) -> dict[str, str]:
    """{parameter: reason} for trainable parameters whose block the sweep cannot give: by graph, then by probe."""
    leaves, outputs, calls = recorded_forward(ctx, ctx.problem.example())
    curved = curved_parameters(outputs, leaves, calls)
    seen = {call.weight for call in calls} | {call.bias for call in calls if call.bias}
    for name in reached_parameters(outputs, leaves):  # what the outputs do not depend on has no curvature
        if name not in seen:
            curved.setdefault(name, "not the weight, bias or BatchNorm parameter of a recorded layer")
    curved |= disagreeing_parameters(ctx, curved)
    return {name: curved[name] for name in ctx.problem.trainable if name in curved}


def recorded_forward(ctx: Context, inputs: Inputs) -> tuple[Params, Tensor, list[Call]]:
    """Run the network forward with every layer on its own view of its input; leaves, outputs, calls."""
    leaves = {name: ctx.params[name].detach().requires_grad_() for name in ctx.problem.trainable}
    params = {**ctx.params, **leaves}
    with torch.enable_grad(), recorded(ctx.problem, params, isolate=True) as recorder:
        outputs = ctx.problem.forward(inputs, params)
    return leaves, outputs, recorder.calls
