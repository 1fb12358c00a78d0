"""Largest singular value of a linear map, of a convolution as the map that it is on its input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torch.nn import functional

from flatscope.context import Context
from flatscope.layers import Layer

LARGEST_DENSE = 512
# On the residual; the error of the eigenvalue is of the order of its square over the gap to the next one.
TOLERANCE = 1e-7
BASIS = 40  # Lanczos vectors kept between restarts: fewer passes through the layer than with the usual 20
_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "conv": (functional.conv1d, functional.conv2d, functional.conv3d),
    "transposed": (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
}


def operator_norm(apply: Callable[[Tensor], Tensor], shape: tuple[int, ...], device: torch.device) -> float:
    """Largest singular value of a linear map of tensors (n, *shape), each sample by itself.

    Small maps are written out; for large ones Lanczos iterations on AᵀA, whose transpose comes from backpropagation.

    Args:
        apply: the map, differentiable by torch.
        shape: of one sample.
        device: where to compute, in float64.
    """
    n = math.prod(shape)
    if n <= LARGEST_DENSE:
        columns = torch.eye(n, dtype=torch.float64, device=device).reshape(n, *shape)
        return matrix_norm(apply(columns).flatten(1))

    def normal(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        x = torch.from_numpy(np.ascontiguousarray(vector)).reshape(1, *shape).to(device).requires_grad_()
        with torch.enable_grad():
            image = apply(x)
            back = torch.autograd.grad(image, x, grad_outputs=image.detach())[0]
        result: np.ndarray[Any, Any] = back.flatten().cpu().numpy()
        return result

    # A fixed start: the value does not depend on the seed of the measurement.
    start = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).numpy()
    if not normal(start).any():
        return 0.0
    squares = LinearOperator((n, n), matvec=normal, dtype=np.float64)
    top = eigsh(squares, k=1, which="LM", v0=start, tol=TOLERANCE, ncv=BASIS, return_eigenvectors=False)
    return math.sqrt(max(float(top[0]), 0.0))


def matrix_norm(matrix: Tensor) -> float:
    """Largest singular value of a matrix, or the largest over a stack of them."""
    return float(torch.linalg.matrix_norm(matrix.double(), ord=2).max())


def rows_of(ctx: Context, layer: Layer) -> Tensor:
    """The weight as a matrix (outputs, incoming weights of each), float64; of a group only what it reads."""
    weight = ctx.params[layer.weight].detach().double()
    if layer.kind == "transposed":  # (in, out / groups, taps)
        grouped = weight.reshape(layer.groups, -1, *weight.shape[1:])
        weight = grouped.transpose(1, 2).flatten(0, 1)
    return weight.flatten(1)


def layer_norms(ctx: Context) -> dict[str, float]:
    """Spectral norm of every layer as a linear map on an input of its true size, by layer name."""
    return {layer.name: _layer_norm(ctx, layer) for layer in ctx.network}


def _layer_norm(ctx: Context, layer: Layer) -> float:
    weight = ctx.params[layer.weight].detach().double()
    if layer.kind == "dense":
        return matrix_norm(weight)
    if math.prod(weight.shape[2:]) == 1 and layer.kind == "conv":  # positions do not mix
        return matrix_norm(weight.reshape(layer.groups, -1, weight.shape[1]))
    function = _FUNCTIONS[layer.kind][weight.ndim - 3]

    def apply(x: Tensor) -> Tensor:
        return function(x, weight, None, **layer.settings)

    return operator_norm(apply, layer.input_shape, weight.device)
