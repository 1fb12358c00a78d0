"""Norms of the layers: as matrices, and of a convolution as the map that it is on its input."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.context import Context
from flatscope.network.layers import Layer
from flatscope.network.operator_norms import matrix_norm, operator_norm

_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "conv": (functional.conv1d, functional.conv2d, functional.conv3d),
    "transposed": (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
}


def rows_of(ctx: Context, layer: Layer) -> Tensor:
    """The weight as a matrix (outputs, incoming weights of each), float64; of a group only what it reads."""
    weight = ctx.params[layer.weight].detach().double()
    if layer.input_first:  # (in, out / groups, taps)
        grouped = weight.reshape(layer.groups, -1, *weight.shape[1:])
        weight = grouped.transpose(1, 2).flatten(0, 1)
    return weight.flatten(1)


def layer_norms(ctx: Context) -> dict[str, float]:
    """Spectral norm of every layer as a linear map on an input of its true size, by layer name."""
    return {layer.name: _layer_norm(ctx, layer) for layer in ctx.network}


def _layer_norm(ctx: Context, layer: Layer) -> float:
    weight = ctx.params[layer.weight].detach().double()
    if layer.kind in ("dense", "lookup"):
        return matrix_norm(weight)
    if math.prod(weight.shape[2:]) == 1 and layer.kind == "conv":  # positions do not mix
        return matrix_norm(weight.reshape(layer.groups, -1, weight.shape[1]))
    function, weights = _FUNCTIONS[layer.kind][weight.ndim - 3], {torch.float64: weight, torch.float32: weight.float()}

    def apply(x: Tensor) -> Tensor:
        return function(x, weights[x.dtype], None, **layer.settings)

    return operator_norm(apply, layer.input_shape, weight.device)
