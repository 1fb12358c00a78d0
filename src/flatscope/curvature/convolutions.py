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

from flatscope.network.products import per_axis

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
                product = _recorded(OUTPUT, geometry, None, x, weight)
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

    axes = weight.ndim - 2
    stride, dilation = (per_axis(given.get(name, 1), axes) for name in ("stride", "dilation"))
    padding, more = (per_axis(given.get(name, 0), axes) for name in ("padding", "output_padding"))
    geometry = Geometry(stride, padding, dilation, transposed, more, given.get("groups", 1))
    return input, weight, bias, geometry


OUTPUT, INPUT, WEIGHT = range(3)  # places of g, x and w


def _kernel(by: int, geometry: Geometry, *given: Tensor | None) -> Tensor:
    """The derivative of ⟨g, conv(x, w)⟩ by one of the three; of that one only the shape counts."""
    found: Tensor
    if by == OUTPUT:
        found = torch.ops.aten.convolution(*given[1:], None, *geometry)
    else:
        mask = [by == INPUT, by == WEIGHT, False]
        found = torch.ops.aten.convolution_backward(*given, None, *geometry, mask)[by - 1]
    return found


class _Derivative(torch.autograd.Function):
    """The same, to be differentiated further: it is bilinear in the other two, and so on."""

    @staticmethod
    def forward(ctx: Any, by: int, geometry: Geometry, *given: Tensor | None) -> Tensor:
        ctx.save_for_backward(*given)
        ctx.by, ctx.geometry = by, geometry
        return _kernel(by, geometry, *given)

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor | None, ...]:
        given = list(ctx.saved_tensors)
        given[ctx.by] = direction
        # With no further derivative to come the kernel is called as it is: it also takes a batch of vectors at once.
        derivative = _recorded if torch.is_grad_enabled() else _kernel
        wanted = [place != ctx.by and ctx.needs_input_grad[2 + place] for place in range(3)]
        return None, None, *(derivative(by, ctx.geometry, *given) if wanted[by] else None for by in range(3))


def _recorded(by: int, geometry: Geometry, *given: Tensor | None) -> Tensor:
    found: Tensor = _Derivative.apply(by, geometry, *given)  # type: ignore[no-untyped-call]
    return found
