"""Largest singular value of a linear map that is known by what it does."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh
from torch import Tensor

LARGEST_DENSE = 512
# Residual over eigenvalue: the relative error of the eigenvalue is at most that, and of the order of its square over
# the relative gap to the next one. Top values often come in pairs (the two phases of a wave) that hardly differ: no
# finer tolerance tells them apart within reasonable time, and it would not change the value.
TOLERANCE = 1e-6
# Where to start from is found in single precision, in which a convolution is several times faster, to as much as that
# allows; from there few passes are left, with fewer vectors to keep between restarts.
ROUGH_TOLERANCE = 1e-5
ROUGH_BASIS, BASIS = 40, 10


def operator_norm(apply: Callable[[Tensor], Tensor], shape: tuple[int, ...], device: torch.device) -> float:
    """Largest singular value of a linear map of tensors (n, *shape), each sample by itself.

    Small maps are written out; for large ones Lanczos iterations on AᵀA, whose transpose comes from backpropagation,
    in single precision first and then to the end in double.

    Args:
        apply: the map, differentiable by torch, for float64 and float32.
        shape: of one sample.
        device: where to compute.
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
    with suppress(ArpackError):  # out of the range of single precision, perhaps
        rough = _top_eigenpair(normal, start.astype(np.float32), ROUGH_TOLERANCE, ROUGH_BASIS)[1].astype(np.float64)
        start = rough if np.isfinite(rough).all() and rough.any() else start
    return math.sqrt(max(_top_eigenpair(normal, start, TOLERANCE, BASIS)[0], 0.0))


def _top_eigenpair(
    product: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
    start: np.ndarray[Any, Any],
    tolerance: float,
    basis: int,
) -> tuple[float, np.ndarray[Any, Any]]:
    """Largest eigenvalue of a symmetric matrix known by its products, and its vector, in the precision of the start."""
    matrix = LinearOperator((len(start), len(start)), matvec=product, dtype=start.dtype)
    values, vectors = eigsh(matrix, k=1, which="LM", v0=start, tol=tolerance, ncv=basis)
    return float(values[0]), vectors[:, 0]


def matrix_norm(matrix: Tensor) -> float:
    """Largest singular value of a matrix, or the largest over a stack of them."""
    return float(torch.linalg.matrix_norm(matrix.double(), ord=2).max())
