"""For each measure a naive dense twin of the same name. Loops and full Hessians; imports no measure.

A twin takes a `Dense` network and the measure's options and gives a float, {layer: value}, or a 1-D tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from networks import Tiny
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

TOGETHER = 250  # copies of a tiny network that are evaluated at a time


class Dense:
    """A tiny network with everything written out."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        self.params = {name: value.detach().clone() for name, value in tiny.model.named_parameters()}
        self._hessians: dict[str, Tensor] = {}
        self._attends = any(isinstance(module, nn.MultiheadAttention) for module in tiny.model.modules())

    def weight_name(self, layer: str) -> str:
        return layer if layer in self.params else f"{layer}.weight"

    def outputs(self, params: dict[str, Tensor] | None = None, x: Tensor | None = None) -> Tensor:
        given = self.tiny.model, params or self.params, (self.tiny.x if x is None else x,)
        if not self._attends:
            return functional_call(*given)
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                return functional_call(*given)
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)

    def loss(self, params: dict[str, Tensor] | None = None) -> Tensor:
        outputs, targets = self.outputs(params), self.tiny.y
        if self.tiny.loss == "mse":
            return ((outputs - targets) ** 2).sum(1).mean()
        if self.tiny.loss == "cross_entropy":
            return (torch.logsumexp(outputs, 1) - outputs[torch.arange(len(targets)), targets]).mean()
        return self.tiny.loss(outputs, targets).mean()

    def loss_of(self, vector: Tensor, names: list[str]) -> Tensor:
        params, start = dict(self.params), 0
        for name in names:
            size = params[name].numel()
            params[name] = vector[start : start + size].reshape(params[name].shape)
            start += size
        return self.loss(params)

    def losses_of(self, vectors: Tensor, names: list[str]) -> Tensor:
        """`loss_of` each row, many rows at a time."""
        with torch.no_grad():
            found: Tensor = vmap(lambda vector: self.loss_of(vector, names), chunk_size=TOGETHER)(vectors)
        return found

    def vector(self, names: list[str]) -> Tensor:
        return torch.cat([self.params[name].reshape(-1) for name in names])

    def hessian_of(self, names: list[str]) -> Tensor:
        key = ",".join(names)
        if key not in self._hessians:
            self._hessians[key] = self._hessian_of(names)
        return self._hessians[key]

    def _hessian_of(self, names: list[str]) -> Tensor:
        vector = self.vector(names)
        return torch.autograd.functional.hessian(lambda v: self.loss_of(v, names), vector, vectorize=True)

    @property
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


@lru_cache(maxsize=32)
def dense(name: str, build: Callable[[], Tiny]) -> Dense:
    """The written-out network of that builder, kept so that its Hessians are computed once."""
    return Dense(build())


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


def folded_weight(dense: Dense, layer: str) -> Tensor:
    """The layer's weight, rows times the scale of a BatchNorm that stands right behind it."""
    weight = dense.params[dense.weight_name(layer)]
    modules = dict(dense.tiny.model.named_modules())
    names = list(modules)
    behind = modules.get(names[names.index(layer) + 1]) if layer in names and layer != names[-1] else None
    if not isinstance(behind, nn.modules.batchnorm._BatchNorm):
        return weight
    scale = behind.weight.detach() / (behind.running_var + behind.eps).sqrt()
    return torch.stack([row * factor for row, factor in zip(weight, scale, strict=True)])


@twin
def l2_norm(dense: Dense) -> dict[str, float]:
    norms = {}
    for layer in dense.tiny.layers:
        norms[layer] = math.sqrt(sum(w * w for w in folded_weight(dense, layer).flatten().tolist()))
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


def _norm2(dense: Dense, layer: str) -> float:
    return float(dense.params[dense.weight_name(layer)].square().sum())


@twin
def layer_trace(dense: Dense, **options: Any) -> dict[str, float]:
    return {layer: float(dense.layer_hessian(layer).trace()) for layer in dense.tiny.layers}


@twin
def layer_max_eigenvalue(dense: Dense, **options: Any) -> dict[str, float]:
    return {layer: float(torch.linalg.eigvalsh(dense.layer_hessian(layer))[-1]) for layer in dense.tiny.layers}


@twin
def hessian_max_eigenvalue(dense: Dense, **options: Any) -> float:
    return float(torch.linalg.eigvalsh(dense.hessian)[-1])


@twin
def hessian_min_eigenvalue(dense: Dense, **options: Any) -> float:
    return float(torch.linalg.eigvalsh(dense.hessian)[0])


@twin
def kappa(dense: Dense, **options: Any) -> dict[str, float]:
    return {layer: _norm2(dense, layer) * value for layer, value in layer_max_eigenvalue(dense).items()}


@twin
def kappa_max(dense: Dense, **options: Any) -> float:
    return max(kappa(dense).values())


@twin
def kappa_sum(dense: Dense, **options: Any) -> float:
    return sum(kappa(dense).values())


@twin
def kappa_trace(dense: Dense, **options: Any) -> dict[str, float]:
    return {layer: _norm2(dense, layer) * value for layer, value in layer_trace(dense).items()}


@twin
def kappa_trace_max(dense: Dense, **options: Any) -> float:
    return max(kappa_trace(dense).values())


@twin
def kappa_trace_sum(dense: Dense, **options: Any) -> float:
    return sum(kappa_trace(dense).values())


@twin
def rho_unit(dense: Dense, reading: str = "column") -> dict[str, Tensor]:
    """wᵀHw with w a column (or row) of the layer embedded in zeros; an input channel of a grouped layer by group."""
    result = {}
    for layer in dense.tiny.layers:
        weight, hessian = dense.params[dense.weight_name(layer)], dense.layer_hessian(layer)
        module = dict(dense.tiny.model.named_modules()).get(layer)
        groups = getattr(module, "groups", 1)
        values = []
        rows, columns = weight.shape[0], weight.shape[1] * groups
        for unit in range(columns if reading == "column" else rows):
            masked = torch.zeros_like(weight)
            if reading == "row":
                masked[unit] = weight[unit]
            else:
                group, inside = divmod(unit, weight.shape[1])
                own = slice(group * rows // groups, (group + 1) * rows // groups)
                masked[own, inside] = weight[own, inside]
            vector = masked.flatten()
            values.append(vector @ hessian @ vector)
        result[layer] = torch.stack(values)
    return result


@twin
def rho(dense: Dense, **options: Any) -> dict[str, float]:
    return {layer: float(values.max()) for layer, values in rho_unit(dense, **options).items()}


@twin
def rho_layer_sum(dense: Dense, **options: Any) -> dict[str, float]:
    return {layer: float(values.sum()) for layer, values in rho_unit(dense, **options).items()}


@twin
def rho_max(dense: Dense, **options: Any) -> float:
    return max(rho(dense, **options).values())


@twin
def rho_sum(dense: Dense, **options: Any) -> float:
    return sum(rho_layer_sum(dense, **options).values())


@twin
def relative_flatness(dense: Dense, **options: Any) -> dict[str, float]:
    result = {}
    for layer in dense.tiny.layers:
        weight = dense.params[dense.weight_name(layer)]
        rows = weight.reshape(len(weight), -1)
        out, q = rows.shape
        blocks = dense.layer_hessian(layer).reshape(out, q, out, q)
        total = 0.0
        for s in range(out):
            for t in range(out):
                total += float(rows[s] @ rows[t]) * float(blocks[s, :, t, :].trace())
        result[layer] = total
    return result
