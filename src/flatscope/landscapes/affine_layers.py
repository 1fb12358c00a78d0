"""The first layer of many networks at once: on a straight plane its response to the data is affine in t.

X·(W + t₁D₁ + t₂D₂) = X·W + t₁ X·D₁ + t₂ X·D₂. The three responses are computed once per batch; every grid point then
adds them up instead of running the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flatscope.context import Context
from flatscope.landscapes.planes import Plane
from flatscope.network.layers import CONVOLUTIONS, DENSE, TRANSPOSED, recorded
from flatscope.params import Params
from flatscope.samples import Inputs

Responses = dict[str, tuple[Tensor, ...]]
Layer = Callable[[Tensor, Tensor | None], Tensor]
_LAYERS = frozenset((*DENSE, *CONVOLUTIONS, *TRANSPOSED))


def affine_layers(ctx: Context, chart: Plane) -> dict[str, str | None]:
    """Weight and bias names of the layers that read nothing which moves, and move on straight lines themselves."""
    leaves = {name: ctx.params[name].detach().requires_grad_() for name in chart.names}
    with torch.enable_grad(), recorded(ctx.problem, {**ctx.params, **leaves}) as recorder:
        ctx.problem.forward(ctx.problem.example(), {**ctx.params, **leaves})
    calls = recorder.layer_calls
    found: dict[str, str | None] = {}
    for call in calls:
        once = sum(other.weight == call.weight for other in calls) == 1
        bias_fits = call.bias is None or call.bias in chart.straight or call.bias not in chart.names
        if once and bias_fits and call.weight in chart.straight and not (call.opaque or call.input.requires_grad):
            found[call.weight] = call.bias
    return found


def responses(ctx: Context, chart: Plane, layers: Mapping[str, str | None], inputs: Inputs) -> Responses:
    """What each of these layers makes of a batch at w and along each direction."""
    dtype = ctx.problem.dtype
    found: Responses = {}

    def answer(name: str, layer: Layer, bias: Tensor | None) -> Tensor:
        base, *moves = (part.to(dtype) for part in chart.straight[name])
        shifts = chart.straight.get(layers[name] or "", ())
        results = [layer(base, bias)]
        for i, move in enumerate(moves):
            results.append(layer(move, shifts[i + 1].to(dtype) if shifts else None))
        found[name] = tuple(results)
        return results[0].clone()  # what comes next may work in place

    # Clones: a tensor that the model holds twice under two names would not tell which of them was called.
    params = {name: value.clone() if name in layers else value for name, value in ctx.params.items()}
    with Answering({id(params[name]): name for name in layers}, answer):
        ctx.forward(inputs, params)
    return found


def answered_forward(ctx: Context, inputs: Inputs, params: Params, answers: Params) -> Tensor:
    """Outputs at `params`, with the outputs of some layers, by the names of their weights, known beforehand."""
    if not answers:
        return ctx.forward(inputs, params)
    with Answering({id(params[name]): name for name in answers}, lambda name, layer, bias: answers[name]):
        return ctx.forward(inputs, params)


class Answering(TorchFunctionMode):
    """Inside a `with` block, calls of some layers are answered by a function instead.

    Args:
        names: parameter name by `id` of the weight tensor that the network is called with.
        answer: (name, the layer as a function of weight and bias, the bias it was called with) -> its output.
    """

    def __init__(self, names: Mapping[int, str], answer: Callable[[str, Layer, Tensor | None], Tensor]) -> None:
        super().__init__()
        self._names, self._answer = names, answer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass every other call on."""
        kwargs = kwargs or {}
        if func not in _LAYERS:
            return func(*args, **kwargs)
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        name = self._names.get(id(given["weight"]))
        if name is None:
            return func(*args, **kwargs)
        rest = {key: value for key, value in kwargs.items() if key not in ("input", "weight", "bias")}

        def layer(weight: Tensor, bias: Tensor | None) -> Tensor:
            result: Tensor = func(given["input"], weight, bias, *args[3:], **rest)
            return result

        return self._answer(name, layer, given.get("bias"))
