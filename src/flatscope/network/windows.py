"""Pooling windows written out: which entries each output of a pool reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.network.program import Operation

_ORDERS = {
    "max": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    "avg": ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
}


def spatial_axes(op: Operation) -> int:
    """Number of axes that a pool or convolution slides over, read from its name."""
    return next(int(mark) for mark in op.name if mark in "123")


def pool_arguments(op: Operation) -> dict[str, list[int]]:
    """Kernel, stride, padding and dilation of a pool, one number per axis."""
    given = op.named(*_ORDERS["avg" if "avg" in op.name else "max"])
    n = spatial_axes(op)
    kernel = _per_axis(given["kernel_size"], n)
    stride = given.get("stride")
    return {
        "kernel": kernel,
        "stride": kernel if stride is None or stride == [] or stride == () else _per_axis(stride, n),
        "padding": _per_axis(given.get("padding", 0), n),
        "dilation": _per_axis(given.get("dilation", 1), n),
    }


def _per_axis(value: Any, n: int) -> list[int]:
    values = [int(v) for v in value] if isinstance(value, tuple | list) else [int(value)]
    return values * n if len(values) == 1 else values


def window_sums(
    x: Tensor, shape: torch.Size, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """Sum over each window of a pool whose result has that shape; what was padded counts as zero."""
    n = len(kernel)
    flat = x.reshape(-1, 1, *x.shape[-n:])  # (channels of all samples, 1, *axes)
    padded: list[int] = []
    for axis in reversed(range(n)):  # `pad` starts with the last axis
        reached = (shape[axis - n] - 1) * stride[axis] + dilation[axis] * (kernel[axis] - 1) + 1
        padded += [padding[axis], reached - padding[axis] - x.shape[axis - n]]  # the last may cut: floor or ceil mode
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[n - 1]
    ones = torch.ones(1, 1, *kernel, dtype=x.dtype, device=x.device)
    return convolve(functional.pad(flat, padded), ones, stride=stride, dilation=dilation).reshape(shape)


def adaptive_matrices(x: Tensor, pooled: Tensor, n: int) -> list[Tensor]:
    """For each of the last n axes, the averaging matrix (outputs, inputs) of an adaptive pool's windows."""
    matrices = []
    for n_in, n_out in zip(x.shape[-n:], pooled.shape[-n:], strict=True):
        matrix = torch.zeros(n_out, n_in, dtype=x.dtype, device=x.device)
        for i in range(n_out):
            start, stop = i * n_in // n_out, -(-(i + 1) * n_in // n_out)
            matrix[i, start:stop] = 1 / (stop - start)
        matrices.append(matrix)
    return matrices


def along_axes(x: Tensor, matrices: list[Tensor]) -> Tensor:
    """Apply one matrix to each of the last axes of a tensor."""
    for place, matrix in enumerate(matrices):
        axis = x.ndim - len(matrices) + place
        x = torch.tensordot(x, matrix, dims=([axis], [1])).movedim(-1, axis)
    return x
