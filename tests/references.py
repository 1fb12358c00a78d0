"""For each measure a naive dense twin of the same name. Loops and full Hessians; imports no measure.

A twin takes a `Dense` network and the measure's options and gives a float, {layer: value}, or a 1-D tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from networks import Tiny
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel


class Dense:
    """A tiny network with everything written out."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        self.params = {name: value.detach().clone() for name, value in tiny.model.named_parameters()}

    def weight_name(self, layer: str) -> str:
        return layer if layer in self.params else f"{layer}.weight"

    def outputs(self, params: dict[str, Tensor] | None = None, x: Tensor | None = None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return functional_call(self.tiny.model, params or self.params, (self.tiny.x if x is None else x,))

    def loss(self, params: dict[str, Tensor] | None = None) -> Tensor:
        """Mean over samples, one at a time."""
        outputs = self.outputs(params)
        total = outputs.new_zeros(())
        for row, target in zip(outputs, self.tiny.y, strict=True):
            if self.tiny.loss == "mse":
                total = total + ((row - target) ** 2).sum()
            elif self.tiny.loss == "cross_entropy":
                total = total + torch.logsumexp(row, 0) - row[target]
            else:
                total = total + self.tiny.loss(row[None], target[None])[0]
        return total / len(outputs)

    def loss_of(self, vector: Tensor, names: list[str]) -> Tensor:
        params, start = dict(self.params), 0
        for name in names:
            size = params[name].numel()
            params[name] = vector[start : start + size].reshape(params[name].shape)
            start += size
        return self.loss(params)

    def vector(self, names: list[str]) -> Tensor:
        return torch.cat([self.params[name].reshape(-1) for name in names])

    def hessian_of(self, names: list[str]) -> Tensor:
        return torch.autograd.functional.hessian(lambda v: self.loss_of(v, names), self.vector(names))

    @cached_property
    def hessian(self) -> Tensor:
        return self.hessian_of(list(self.params))

    def layer_hessian(self, layer: str) -> Tensor:
        return self.hessian_of([self.weight_name(layer)])

    @property
    def margins(self) -> Tensor:
        found = []
        for row, target in zip(self.outputs(), self.tiny.y.tolist(), strict=True):
            found.append(row[target] - max(value for k, value in enumerate(row) if k != target))
        return torch.stack(found)


Twin = Callable[..., Any]
TWINS: dict[str, Twin] = {}


def twin(function: Twin) -> Twin:
    TWINS[function.__name__] = function
    return function


@twin
def parameter_count(dense: Dense) -> float:
    return float(sum(math.prod(value.shape) for value in dense.params.values()))


@twin
def functional_margin(dense: Dense) -> Tensor:
    return dense.margins


@twin
def margin(dense: Dense, epsilon: float = 0.05) -> float:
    ordered = sorted(dense.margins.tolist())
    below = 1
    while below < epsilon * len(ordered) - 1e-9:
        below += 1
    return ordered[below - 1]


@twin
def l2_norm(dense: Dense) -> dict[str, float]:
    norms = {layer: math.sqrt(sum(w * w for w in dense.params[dense.weight_name(layer)].flatten().tolist())) for layer in dense.tiny.layers}
    product = 1.0
    for value in norms.values():
        product *= value
    return ({"": product} if dense.tiny.chain else {}) | norms


@twin
def gradient_norm(dense: Dense) -> float:
    names = list(dense.params)
    gradient = torch.autograd.functional.jacobian(lambda v: dense.loss_of(v, names), dense.vector(names))
    return float(gradient.norm())


@twin
def hessian_trace(dense: Dense, **options: Any) -> float:
    return float(dense.hessian.trace())
