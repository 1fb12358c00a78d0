"""What one layer does to one sample, as matrices: its input patches, and the weight gradient they give."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value) * (axes if len(value) == 1 else 1)


def patches(x: Tensor, kernel: tuple[int, ...], settings: dict[str, Any]) -> Tensor:
    """Input patches of a convolution in any number of dimensions: (n, c, *space) -> (n, c, taps, positions)."""
    axes = len(kernel)
    stride = _per_axis(settings.get("stride", 1), axes)
    dilation = _per_axis(settings.get("dilation", 1), axes)
    padding = settings.get("padding", 0)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(side, side) for side in _per_axis(0 if padding == "valid" else padding, axes)]
    if any(side != (0, 0) for side in sides):
        x = functional.pad(x, [amount for side in reversed(sides) for amount in side])
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]  # appends the taps of this axis
    n, c = x.shape[:2]
    x = x.permute(0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))  # (n, c, *taps, *positions)
    return x.reshape(n, c, math.prod(kernel), -1)


def input_matrix(x: Tensor, weight: Tensor, kind: str, settings: dict[str, Any]) -> Tensor:
    """Inputs of a layer as (n, groups, features, positions).

    Dense: one group, one position for vectors. Convolution: features = channels of the group × taps.
    Transposed convolution: the input itself (its patches are taken on the output side).
    """
    if kind == "dense":
        return x.reshape(len(x), 1, -1, x.shape[-1]).mT  # (n, 1, in, t)
    groups = int(settings.get("groups", 1))
    if kind == "conv":
        unfolded = patches(x, tuple(weight.shape[2:]), settings)  # (n, in, taps, t)
        return unfolded.reshape(len(x), groups, -1, unfolded.shape[-1])
    return x.reshape(len(x), groups, x.shape[1] // groups, -1)


def output_matrix(s: Tensor, weight: Tensor, kind: str, settings: dict[str, Any]) -> Tensor:
    """Columns at a layer's output, (k, n, *output) -> (k, n, groups, features, positions)."""
    k, n = s.shape[:2]
    if kind == "dense":
        return s.reshape(k, n, 1, -1, s.shape[-1]).mT  # (k, n, 1, out, t)
    groups = int(settings.get("groups", 1))
    if kind == "conv":
        return s.reshape(k, n, groups, s.shape[2] // groups, -1)
    # y = convᵀ(x) reads its output where a convolution with the same settings would read its input.
    reading: dict[str, Any] = {name: settings[name] for name in ("stride", "padding", "dilation") if name in settings}
    flat = s.reshape(k * n, *s.shape[2:])
    unfolded = patches(flat, tuple(weight.shape[2:]), reading)  # (k n, out, taps, t)
    return unfolded.reshape(k, n, groups, -1, unfolded.shape[-1])


def weight_gradients(u: Tensor, s: Tensor, kind: str) -> Tensor:
    """Per-sample gradients G_c = Σ_t s_t u_tᵀ in the weight's own layout, (k, n, rows, features).

    Rows are output channels for dense and convolutional weights, input channels for transposed ones.
    """
    if u.shape[-1] == 1:
        product = s * u.mT  # outer product, (k, n, g, out, in)
    else:
        product = torch.matmul(s, u.mT)
    if kind == "transposed":
        product = product.mT
    k, n, groups, rows, features = product.shape
    return product.reshape(k, n, groups * rows, features)


def rows_by_output(weight: Tensor, kind: str, groups: int = 1) -> Tensor:
    """The weight as the matrix W̄ with one row per output channel: (out, in·taps)."""
    if kind != "transposed":
        return weight.reshape(len(weight), -1)
    per_group = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)  # (g, in, out, taps)
    return per_group.permute(0, 2, 1, 3).reshape(groups * weight.shape[1], -1)
