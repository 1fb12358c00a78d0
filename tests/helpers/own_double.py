"""Curvature of any network from its definition: double backward on one flat vector, differences of the gradient.

Nothing of flatscope is used. What torch's double backward gets wrong shows in the differences, which need first
derivatives only; a first derivative that is wrong shows in differences of the loss.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

TOGETHER = 64  # rows of a Hessian at once


class WrittenOut(TorchFunctionMode):
    """weight_norm as length times direction: the second derivative of torch's own function is wrong."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "_weight_norm":
            v, g, dim = (*args, *(kwargs or {}).values())
            others = [axis for axis in range(v.ndim) if axis != dim]
            return v * (g / v.square().sum(others, keepdim=True).sqrt())
        if getattr(func, "__name__", "") == "view_as_complex":  # of a slice of a vector, which may begin at odd places
            return torch.complex(*args[0].unbind(-1))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Attention by products and a softmax: fused kernels have no second derivative."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), WrittenOut():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each sample; over pixels their mean."""
    logs = outputs - outputs.logsumexp(1, keepdim=True)
    return -logs.gather(1, targets.unsqueeze(1)).squeeze(1).reshape(len(targets), -1).mean(1)


def next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each text, the mean over its tokens but for those that are -100."""
    counted = targets != -100
    logs = outputs.log_softmax(2).gather(2, targets.clamp_min(0).unsqueeze(2)).squeeze(2)
    return -(logs * counted).sum(1) / counted.sum(1)


def binary(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over labels."""
    chance = targets.reshape(outputs.shape).to(outputs.dtype)
    values = functional.softplus(outputs) - chance * outputs
    return values.reshape(len(outputs), -1).sum(1)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over outputs."""
    return (outputs - targets.to(outputs.dtype)).square().reshape(len(outputs), -1).sum(1)


LOSSES = {"cross_entropy": cross_entropy, "next_token": next_token, "bce": binary, "mse": squared}


class OwnDouble:
    """Losses of a network's samples as functions of one flat vector, and their derivatives.

    Args:
        model: a module in eval mode; copied.
        inputs: a tensor, a tuple of arguments or a dictionary of keywords, samples first.
        targets: of the samples.
        loss: a name or a function of (outputs, targets) giving one value per sample.
        dtype: float64, but for networks that name float32 themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Tensor,
        loss: str | Callable[[Tensor, Tensor], Tensor],
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.model, self.dtype = copy.deepcopy(model).to(dtype).eval(), dtype
        self.inputs, self.targets = self._cast(inputs), self._cast(targets)
        self.loss = LOSSES[loss] if isinstance(loss, str) else loss
        parameters = dict(self.model.named_parameters())
        free = [name for name, value in parameters.items() if value.requires_grad] or list(parameters)
        self.constants = {name: value.detach() for name, value in parameters.items() if name not in free}
        self.params = {name: parameters[name].detach() for name in free}
        self.everything = {**self.constants, **self.params}
        self.places, start = {}, 0
        for name, value in self.params.items():
            self.places[name] = slice(start, start + value.numel())
            start += value.numel()
        self.size = start
        self.w = torch.cat([value.reshape(-1) for value in self.params.values()])

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.dtype) if value.is_floating_point() else value
        if isinstance(value, dict):
            return {name: self._cast(part) for name, part in value.items()}
        return tuple(self._cast(part) for part in value)

    def cut(self, chosen: slice) -> Any:
        """Inputs of some samples."""
        if isinstance(self.inputs, Tensor):
            return self.inputs[chosen]
        if isinstance(self.inputs, dict):
            return {name: part[chosen] for name, part in self.inputs.items()}
        return tuple(part[chosen] for part in self.inputs)

    def named(self, w: Tensor) -> dict[str, Tensor]:
        """The parameters that a flat vector holds."""
        return {name: w[place].reshape(self.params[name].shape) for name, place in self.places.items()}

    def outputs(self, params: dict[str, Tensor] | None = None, inputs: Any = None) -> Tensor:
        inputs = self.inputs if inputs is None else inputs
        state = {**self.constants, **(self.params if params is None else params)}
        args, keywords = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        args = args if isinstance(args, tuple) else (args,)
        with plain_attention():
            made = functional_call(self.model, state, args, keywords)
        return made if isinstance(made, Tensor) else made.logits

    def losses(self, w: Tensor) -> Tensor:
        """Of all samples, (n,)."""
        return self.loss(self.outputs(self.named(w)), self.targets)

    def loss_at(self, params: dict[str, Tensor]) -> Tensor:
        """The mean loss where some parameters, frozen ones too, are others."""
        return self.loss(self.outputs({**self.everything, **params}), self.targets).mean()

    @cached_property
    def n(self) -> int:
        return len(self.targets)

    def mean_loss(self, w: Tensor) -> Tensor:
        return self.losses(w).mean()

    def gradient_at(self, w: Tensor, loss: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        w = w.detach().requires_grad_()
        value = (loss or self.mean_loss)(w)
        return torch.autograd.grad(value, w)[0].detach()

    @cached_property
    def gradient(self) -> Tensor:
        return self.gradient_at(self.w)

    @cached_property
    def gradients(self) -> Tensor:
        """Of each sample, (n, p)."""
        w = self.w.clone().requires_grad_()
        losses = self.losses(w)
        rows = [torch.autograd.grad(one, w, retain_graph=True)[0] for one in losses]
        return torch.stack(rows).detach()

    def product(self, v: Tensor) -> Tensor:
        """Hessian of the mean loss times a vector."""
        w, slope = self._slope
        if not slope.requires_grad:
            return torch.zeros_like(v)
        return torch.autograd.grad(slope, w, v, retain_graph=True)[0].detach()

    @cached_property
    def _slope(self) -> tuple[Tensor, Tensor]:
        w = self.w.clone().requires_grad_()
        return w, torch.autograd.grad(self.mean_loss(w), w, create_graph=True)[0]

    @cached_property
    def hessian(self) -> Tensor:
        """Dense, row by row; of all parameters."""
        return hessian_of(self.mean_loss, self.w)

    def block(self, name: str) -> Tensor:
        """The Hessian with respect to one parameter."""
        place = self.places[name]
        return self.hessian[place, place]

    @cached_property
    def jacobians(self) -> Tensor:
        """Derivatives of the outputs by all real inputs, (n, outputs, entries)."""
        given = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)
        given = tuple(part.clone().requires_grad_() if part.is_floating_point() else part for part in given)
        free, rows = [part for part in given if part.requires_grad], []
        for one in self.outputs(inputs=given).reshape(self.n, -1).unbind(1):
            found = torch.autograd.grad(one.sum(), free, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([part.reshape(self.n, -1) for part in found], 1))
        return torch.stack(rows, 1).detach()

    def error_of_gradient(self, seed: int = 0) -> float:
        """How far the gradient is from differences of the loss, relative, over a few random directions."""
        errors = []
        for v in self.directions(seed):
            step = 1e-5 * float(self.w.norm())
            with torch.no_grad():
                at = {k: float(self.mean_loss(self.w + k * step * v)) for k in (-2, -1, 1, 2)}
            slope = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)
            errors.append(abs(slope - float(self.gradient @ v)) / float(self.gradient.norm()))
        return largest(errors)

    def error_of_products(self, seed: int = 0, relative_step: float = 1e-5) -> float:
        """How far double backward is from central differences of the gradient, over a few random directions."""
        errors = []
        for v in self.directions(seed):
            step, exact = relative_step * float(self.w.norm()), self.product(v)
            at = {k: self.gradient_at(self.w + k * step * v) for k in (-2, -1, 1, 2)}
            slope = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)
            errors.append(float((slope - exact).norm() / exact.norm()))
        return largest(errors)

    def directions(self, seed: int, count: int = 2) -> list[Tensor]:
        """Random ones of length 1, which leave the words of padding alone: these get no gradient."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(count, self.size, generator=generator, dtype=torch.float64).to(self.dtype)
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None and f"{name}.weight" in self.places:
                width, start = module.embedding_dim, self.places[f"{name}.weight"].start
                drawn[:, start + module.padding_idx * width :][:, :width] = 0
        return list(drawn / drawn.norm(dim=1, keepdim=True))


def largest(errors: list[float]) -> float:
    """Of some numbers the largest, or not a number where one of them is none."""
    return float(torch.tensor(errors).max())


def hessian_of(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Dense Hessian of a function of one vector, many rows at once where torch can, else one by one."""
    w = at.detach().clone().requires_grad_()
    slope = torch.autograd.grad(loss(w), w, create_graph=True)[0]
    if not slope.requires_grad:
        return torch.zeros(len(w), len(w), dtype=w.dtype)
    rows, unit = [], torch.eye(len(w), dtype=w.dtype)
    together = True
    for some in unit.split(TOGETHER):
        if together:
            try:
                rows.append(torch.autograd.grad(slope, w, some, retain_graph=True, is_grads_batched=True)[0].detach())
                continue
            except RuntimeError:
                together = False
        rows += [torch.autograd.grad(slope, w, one, retain_graph=True)[0].detach()[None] for one in some]
    return torch.cat(rows)
