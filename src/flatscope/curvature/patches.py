"""What one layer does to one sample, as matrices: its input patches, and the weight gradient they give.

Index letters: n samples, k columns, g groups, t positions (one for a dense layer on vectors), rows and features the
two sides of the weight matrix of a group.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.network.products import per_axis


def patches(x: Tensor, kernel: tuple[int, ...], settings: dict[str, Any]) -> Tensor:
    """Input patches of a convolution in any number of dimensions: (n, c, *space) -> (n, c · taps, t)."""
    axes = len(kernel)
    stride = per_axis(settings.get("stride", 1), axes)
    dilation = per_axis(settings.get("dilation", 1), axes)
    padding = settings.get("padding", 0)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(side, side) for side in per_axis(0 if padding == "valid" else padding, axes)]
    if any(side != (0, 0) for side in sides):
        x = functional.pad(x, [amount for side in reversed(sides) for amount in side])
    # A strided view copied once: several times faster than functional.unfold, and for any number of axes.
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]  # appends the taps of this axis
    n, c = x.shape[:2]
    x = x.permute(0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))  # (n, c, *taps, *positions)
    return x.reshape(n, c * math.prod(kernel), -1)


def input_matrix(x: Tensor, weight: Tensor, kind: str, settings: dict[str, Any]) -> Tensor:
    """Inputs of a layer as (n, g, features, t).

    Dense: one group, one position for vectors. Convolution: features = channels of the group × taps.
    Transposed convolution: the input itself (its patches are taken on the output side).
    """
    if kind == "dense":
        return x.reshape(len(x), 1, -1, x.shape[-1]).mT
    groups = int(settings.get("groups", 1))
    if kind == "conv":
        unfolded = patches(x, tuple(weight.shape[2:]), settings)
        return unfolded.reshape(len(x), groups, -1, unfolded.shape[-1])
    return x.reshape(len(x), groups, x.shape[1] // groups, -1)


def output_matrix(s: Tensor, weight: Tensor, kind: str, settings: dict[str, Any]) -> Tensor:
    """Columns at a layer's output, (n, k, *output) -> (n, k, g, rows, t)."""
    n, k = s.shape[:2]
    if kind == "dense":
        return s.reshape(n, k, 1, -1, s.shape[-1]).mT
    groups = int(settings.get("groups", 1))
    if kind == "conv":
        return s.reshape(n, k, groups, s.shape[2] // groups, -1)
    # y = convᵀ(x) reads its output where a convolution with the same settings would read its input.
    reading: dict[str, Any] = {name: settings[name] for name in ("stride", "padding", "dilation") if name in settings}
    unfolded = patches(s.reshape(n * k, *s.shape[2:]), tuple(weight.shape[2:]), reading)  # (n k, out · taps, t)
    return unfolded.reshape(n, k, groups, -1, unfolded.shape[-1])


def weighted_inputs(u: Tensor, v: Tensor, kind: str) -> Tensor:
    """V u, what a weight-shaped v makes of inputs (n, g, features, t): (n, g, rows, t). ⟨G_c, v⟩ is ⟨s_c, V u⟩."""
    groups, features = u.shape[1:3]
    if kind == "transposed":  # the weight is stored (in, out · taps)
        return v.reshape(groups, features, -1).mT @ u
    return v.reshape(groups, -1, features) @ u


def moved_outputs(x: Tensor, moves: Tensor, kind: str, settings: dict[str, Any]) -> Tensor:
    """Outputs of a layer with several weights in the place of its own, side by side: (n, several · output).

    Args:
        x: what it receives, samples first.
        moves: the weights, (several, *weight).
        kind: of the layer.
        settings: of its convolution.
    """
    several, rows, *rest = moves.shape
    if kind == "dense":
        y = functional.linear(x, moves.reshape(several * rows, *rest))  # (n, …, several · out)
        apart: Tensor = y.unflatten(-1, (several, rows))
        return apart.movedim(-2, 1).flatten(2)
    groups, axes = int(settings.get("groups", 1)), len(rest) - 1
    if kind == "conv":
        run = (functional.conv1d, functional.conv2d, functional.conv3d)[axes - 1]
        parts = moves.unflatten(1, (groups, rows // groups)).transpose(0, 1)  # groups stay together
        y = run(x, parts.reshape(several * rows, *rest), **settings)
    else:
        turned = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[axes - 1]
        y = turned(x, moves.transpose(0, 1).flatten(1, 2), **settings)
    by_group: Tensor = y.unflatten(1, (groups, several, -1))
    return by_group.transpose(1, 2).flatten(2)


def weight_gradients(u: Tensor, s: Tensor, kind: str) -> Tensor:
    """Per-sample gradients G_c = Σ_t s_t u_tᵀ in the weight's own layout, (n, k, all rows, features).

    Rows are output channels for dense and convolutional weights, input channels for transposed ones.
    """
    n, k, groups, rows, positions = s.shape
    features = u.shape[2]
    if kind == "transposed":
        product = torch.einsum("nkgrt,ngft->nkgfr", s, u)  # the weight is stored (in, out · taps)
        return product.reshape(n, k, groups * features, rows)
    if groups == 1:
        # One matrix product per sample for all columns together, without copying u for each column.
        product = torch.bmm(s.reshape(n, k * rows, positions), u.reshape(n, features, positions).mT)
        return product.reshape(n, k, rows, features)
    return torch.einsum("nkgrt,ngft->nkgrf", s, u).reshape(n, k, groups * rows, features)


def by_output(weight: Tensor, kind: str, groups: int) -> Tensor:
    """The weight as the matrix W̄ with one row per output channel: (out, in · taps)."""
    if kind != "transposed":
        return weight.reshape(len(weight), -1)
    return _swapped(weight[None], groups)[0]


def gradients_by_output(gradients: Tensor, weight: Tensor, kind: str, groups: int) -> Tensor:
    """Per-sample gradients (n, k, rows, features) laid out like W̄."""
    if kind != "transposed":
        return gradients
    n, k = gradients.shape[:2]
    return _swapped(gradients.reshape(n * k, *weight.shape), groups).reshape(n, k, groups * weight.shape[1], -1)


def _swapped(weights: Tensor, groups: int) -> Tensor:
    """Transposed weights (b, in, out of a group, *taps) -> (b, out, in of a group · taps)."""
    b, inputs, outputs = weights.shape[:3]
    grouped = weights.reshape(b, groups, inputs // groups, outputs, -1)
    return grouped.transpose(2, 3).reshape(b, groups * outputs, -1)


def normalised(x: Tensor, settings: dict[str, Any]) -> Tensor:
    """The input of a BatchNorm in eval mode after subtracting its mean and dividing by its spread."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    spread = (settings["running_var"] + (1e-5 if settings["eps"] is None else settings["eps"])).sqrt()
    centred: Tensor = x - settings["running_mean"].reshape(shape)
    result: Tensor = centred / spread.reshape(shape)
    return result
