"""The largest singular value of a matrix, and of a linear map that is known by what it does."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh
from torch import Tensor

from flatscope.limits import STANDARD

Vector = np.ndarray[Any, Any]
Product = Callable[[Vector], Vector]
# What is called before every product of a search: it raises where there is no time for another.
Check = Callable[[], None]

# Residual over eigenvalue: the relative error of the eigenvalue is at most that, and of the order of its square over
# the relative gap to the next one. Top values often come in pairs (the two phases of a wave) that hardly differ: no
# finer tolerance tells them apart within reasonable time, and it would not change the value.
TOLERANCE = 1e-6
# Where to start from is found in single precision, in which a convolution is several times faster, to as much as that
# allows; from there few passes are left, with fewer vectors to keep between restarts.
ROUGH_TOLERANCE = 1e-5
ROUGH_BASIS, BASIS = 40, 10
# Products with a matrix are cheap: the value agrees with the singular value decomposition to 1e-12, to 1e-9 where many
# values lie within that of the largest, and the search, which starts anew from a random vector in double precision,
# takes a tenth of its time.
MATRIX_TOLERANCE, MATRIX_BASIS = 1e-8, 20


def matrix_norm(matrix: Tensor, check: Check | None = None) -> float:
    """Largest singular value of a matrix, or the largest over a stack of them.

    Args:
        matrix: (rows, columns), or (k, rows, columns).
        check: called before every product of a search, and before a decomposition that takes long.
    """
    matrix = matrix.detach().double()
    if min(matrix.shape[-2:]) <= STANDARD.decomposed_matrix or not bool(matrix.isfinite().all()):
        return _decomposed(matrix)
    return max(_searched(each, check) for each in matrix.reshape(-1, *matrix.shape[-2:]))


def _decomposed(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, ord=2).max())


def _searched(matrix: Tensor, check: Check | None) -> float:
    """The norm by Lanczos iterations on the smaller of AAᵀ and AᵀA; by decomposition where they do not end."""
    size = float(matrix.abs().max())
    if not size:
        return 0.0
    wide = (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T) / size  # squares neither overflow nor vanish
    rows = len(wide)

    def product(vector: Vector) -> Vector:
        if check is not None:
            check()
        image: Vector = (wide @ (wide.T @ torch.from_numpy(vector).to(wide.device))).cpu().numpy()
        return image

    try:
        restarts = max(STANDARD.least_restarts, rows // STANDARD.rows_a_restart)
        top = _top_eigenpair(product, _start(rows), MATRIX_TOLERANCE, MATRIX_BASIS, restarts)[0]
    except ArpackError:  # none found: many singular values that hardly differ from the largest
        if check is not None:
            check()
        return _decomposed(matrix)
    return size * math.sqrt(max(top, 0.0))


def operator_norm(
    apply: Callable[[Tensor], Tensor], shape: tuple[int, ...], device: torch.device, check: Check | None = None
) -> float:
    """Largest singular value of a linear map of tensors (n, *shape), each sample by itself.

    Small maps are written out; for large ones Lanczos iterations on AᵀA, whose transpose comes from backpropagation,
    in single precision first and then to the end in double.

    Args:
        apply: the map, differentiable by torch, for float64 and float32.
        shape: of one sample.
        device: where to compute.
        check: called before every product of a search.
    """
    n = math.prod(shape)
    if n <= STANDARD.decomposed_matrix:
        columns = torch.eye(n, dtype=torch.float64, device=device).reshape(n, *shape)
        return matrix_norm(apply(columns).flatten(1))

    def tensor(vector: Vector) -> Tensor:
        if check is not None:
            check()
        return torch.from_numpy(np.ascontiguousarray(vector)).reshape(1, *shape).to(device)

    def normal(vector: Vector) -> Vector:
        x = tensor(vector).requires_grad_()
        with torch.enable_grad():
            image = apply(x)
            back = torch.autograd.grad(image, x, grad_outputs=image.detach() / size)[0]
        result: Vector = (back / size).flatten().cpu().numpy()
        return result

    start = _start(n)
    # By which the map is divided: the library takes eigenvalues far below 1 for found before they are, and squares of
    # small or large numbers leave the range of their precision.
    size = float(apply(tensor(start)).detach().abs().max())
    if not size:
        return 0.0
    # Weights that single precision rounds to few digits, or to none, are another map: no start comes from that.
    single = float(apply(tensor(start.astype(np.float32))).detach().abs().max())
    if abs(single - size) <= ROUGH_TOLERANCE * size:
        with suppress(ArpackError):  # out of the range of single precision, perhaps
            rough = _top_eigenpair(normal, start.astype(np.float32), ROUGH_TOLERANCE, ROUGH_BASIS)[1].astype(np.float64)
            start = rough if np.isfinite(rough).all() and rough.any() else start
    return size * math.sqrt(max(_top_eigenpair(normal, start, TOLERANCE, BASIS)[0], 0.0))


def _start(n: int) -> Vector:
    """A random vector, always the same: the value does not depend on the seed of the measurement."""
    start: Vector = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).numpy()
    return start


def _top_eigenpair(
    product: Product, start: Vector, tolerance: float, basis: int, restarts: int | None = None
) -> tuple[float, Vector]:
    """Largest eigenvalue of a symmetric matrix known by its products, and its vector, in the precision of the start."""
    matrix = LinearOperator((len(start), len(start)), matvec=product, dtype=start.dtype)
    values, vectors = eigsh(matrix, k=1, which="LM", v0=start, tol=tolerance, ncv=basis, maxiter=restarts)
    return float(values[0]), vectors[:, 0]
