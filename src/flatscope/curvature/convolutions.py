"""Convolutions whose second derivatives are as fast as their first.

A convolution is bilinear, so ⟨g, conv(x, w)⟩ is trilinear in g, x and w: all its derivatives of any order are one of
three maps, the convolution itself, its gradient by the input and its gradient by the weight. PyTorch has fast kernels
for the three, but writes the second derivative by the weight as a convolution with the outputs as a huge kernel,
for which there is none: on a CPU half of the time of a Hessian product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TRANSPOSED = {torch.conv1d: False, torch.conv2d: False, torch.conv3d: False} | {
    torch.conv_transpose1d: True,
    torch.conv_transpose2d: True,
    torch.conv_transpose3d: True,
}


class Geometry(NamedTuple):
    """Settings of a convolution, in the order of the kernels' arguments."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


class FastConvolutions(TorchFunctionMode):
    """Inside of this block convolutions are those of this module."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """A convolution by ours where its arguments are of the usual kind; anything else as it is."""
        if func in _TRANSPOSED:
            found = _arguments(_TRANSPOSED[func], *args, **(kwargs or {}))
            if found is not None:
                x, weight, bias, geometry = found
                product = _recorded(_Convolution, x, weight, geometry)
                return product if bias is None else product + bias.reshape(-1, *[1] * (x.ndim - 2))
        return func(*args, **(kwargs or {}))


def _arguments(
    transposed: bool, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor | None, Geometry] | None:
    """None where the padding is a word, or the input is a single sample."""
    order = ["stride", "padding", "dilation", "groups"]
    if transposed:
        order = ["stride", "padding", "output_padding", "groups", "dilation"]
    given = dict(zip(order, rest, strict=False)) | named
    if isinstance(given.get("padding"), str) or input.ndim != weight.ndim or set(given) - set(order):
        return None

    def each(name: str, default: int) -> list[int]:
        value = given.get(name, default)
        values = [value] if isinstance(value, int) else list(value)
        return values * (weight.ndim - 2) if len(values) == 1 else values

    geometry = Geometry(
        each("stride", 1), each("padding", 0), each("dilation", 1), transposed, each("output_padding", 0),
        given.get("groups", 1),
    )  # fmt: skip
    return input, weight, bias, geometry


def _convolve(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    found: Tensor = torch.ops.aten.convolution(x, weight, None, *geometry)
    return found


def _pull(gradient: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, *, to_input: bool) -> Tensor:
    """Gradient by the input or by the weight; of the one that it is by, only the shape counts."""
    mask = [to_input, not to_input, False]
    found = torch.ops.aten.convolution_backward(gradient, x, weight, None, *geometry, mask)
    pulled: Tensor = found[0 if to_input else 1]
    return pulled


class _Convolution(torch.autograd.Function):
    """conv(x, w)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return _convolve(x, weight, geometry)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (*_pulled(ctx, gradient, x, weight), None)


class _InputGradient(torch.autograd.Function):
    """The gradient g by the input, a bilinear function of g and w."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(gradient, weight)
        ctx.geometry = geometry
        return _pull(gradient, x, weight, geometry, to_input=True)

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor | None, ...]:
        gradient, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            _product(direction, weight, ctx.geometry) if needs[0] else None,
            None,
            _by_weight(gradient, direction, weight, ctx.geometry) if needs[2] else None,
            None,
        )


class _WeightGradient(torch.autograd.Function):
    """The gradient g by the weight, a bilinear function of g and x."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(gradient, x)
        ctx.geometry = geometry
        return _pull(gradient, x, weight, geometry, to_input=False)

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor | None, ...]:
        gradient, x = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            _product(x, direction, ctx.geometry) if needs[0] else None,
            _by_input(gradient, x, direction, ctx.geometry) if needs[1] else None,
            None,
            None,
        )


def _pulled(ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    needs = ctx.needs_input_grad
    return (
        _by_input(gradient, x, weight, ctx.geometry) if needs[0] else None,
        _by_weight(gradient, x, weight, ctx.geometry) if needs[1] else None,
    )


# With no further derivative to come the kernels are called as they are: they also take a batch of vectors at once.


def _product(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    return _recorded(_Convolution, x, weight, geometry) if torch.is_grad_enabled() else _convolve(x, weight, geometry)


def _by_input(gradient: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    if torch.is_grad_enabled():
        return _recorded(_InputGradient, gradient, x, weight, geometry)
    return _pull(gradient, x, weight, geometry, to_input=True)


def _by_weight(gradient: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    if torch.is_grad_enabled():
        return _recorded(_WeightGradient, gradient, x, weight, geometry)
    return _pull(gradient, x, weight, geometry, to_input=False)


def _recorded(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    found: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return found
