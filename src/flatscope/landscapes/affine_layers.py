"""The first layer of many networks at once: on a straight plane its response to the data is affine in t.

X·(W + t₁D₁ + t₂D₂) = X·W + t₁ X·D₁ + t₂ X·D₂. The three responses are computed once per batch; every grid point then
adds them up instead of running the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.landscapes.directions import Plane
from flatscope.network.layers import recorded
from flatscope.network.products import LAYER_CALLS
from flatscope.network.program import Operation, Rule, watched
from flatscope.params import Params
from flatscope.samples import Inputs

Responses = dict[str, tuple[Tensor, ...]]
Layer = Callable[[Tensor, Tensor | None], Tensor]


def affine_layers(ctx: Context, plane: Plane) -> dict[str, str | None]:
    """Weight and bias names of the layers that read nothing which moves, and move on straight lines themselves."""
    leaves = {name: ctx.params[name].detach().requires_grad_() for name in plane.names}
    with torch.enable_grad(), recorded(ctx.problem.model, {**ctx.params, **leaves}) as recorder:
        ctx.problem.forward(ctx.problem.example(), {**ctx.params, **leaves})
    calls = recorder.layer_calls
    found: dict[str, str | None] = {}
    for call in calls:
        once = sum(other.weight == call.weight for other in calls) == 1
        bias_fits = call.bias is None or call.bias in plane.straight or call.bias not in plane.names
        if (
            once
            and bias_fits
            and call.weight in plane.straight
            and not (call.opaque or call.kind == "lookup" or call.input.requires_grad)
        ):
            found[call.weight] = call.bias
    return found


def responses(ctx: Context, plane: Plane, layers: Mapping[str, str | None], inputs: Inputs) -> Responses:
    """What each of these layers makes of a batch at w and along each direction."""
    dtype = ctx.problem.dtype
    found: Responses = {}

    def answer(name: str, layer: Layer, bias: Tensor | None) -> Tensor:
        base, *moves = (part.to(dtype) for part in plane.straight[name])
        shifts = plane.straight.get(layers[name] or "", ())
        results = [layer(base, bias)]
        for i, move in enumerate(moves):
            results.append(layer(move, shifts[i + 1].to(dtype) if shifts else None))
        found[name] = tuple(results)
        return results[0].clone()  # what comes next may work in place

    # Clones: a tensor that the model holds twice under two names would not tell which of them was called.
    params = {name: value.clone() if name in layers else value for name, value in ctx.params.items()}
    with watched(_answering({id(params[name]): name for name in layers}, answer)):
        ctx.forward(inputs, params)
    return found


def answered_forward(ctx: Context, inputs: Inputs, params: Params, answers: Params) -> Tensor:
    """Outputs at `params`, with the outputs of some layers, by the names of their weights, known beforehand."""
    if not answers:
        return ctx.forward(inputs, params)
    with watched(_answering({id(params[name]): name for name in answers}, lambda name, layer, bias: answers[name])):
        return ctx.forward(inputs, params)


def _answering(names: Mapping[int, str], answer: Callable[[str, Layer, Tensor | None], Tensor]) -> Rule:
    """A rule: calls of some layers are answered by a function instead.

    Args:
        names: parameter name by `id` of the weight tensor that the network is called with.
        answer: (name, the layer as a function of weight and bias, the bias it was called with) -> its output.
    """

    def follow(op: Operation) -> Any:
        if op.name not in LAYER_CALLS:
            return op.run()
        given = op.named(*LAYER_CALLS[op.name][1])
        name = names.get(id(given["weight"]))
        if name is None:
            return op.run()

        def layer(weight: Tensor, bias: Tensor | None) -> Tensor:
            result: Tensor = op.function(**{**given, "weight": weight, "bias": bias})
            return result

        return answer(name, layer, given.get("bias"))

    return follow
