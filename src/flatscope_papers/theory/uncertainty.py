"""Atomic uncertainty sets, Definition 4 of Zhang et al. (2017): what disturbances a robust problem may allow.

N is atomic if 0 ∈ N and, for every w, sup wᵀδ = sup −wᵀδ < ∞ over δ ∈ N. Support functions are those of closed convex
hulls, so this says that the hull of N is bounded and its own mirror image.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls
from torch import Tensor

from flatscope import InputError

TOLERANCE = 1e-9


def is_atomic(points: Tensor) -> bool:
    """True if finitely many disturbances, or the polytope that they span with 0 among them, are an atomic set.

    The mirror image of every point must be a convex combination of the points: non-negative least squares tell.

    Args:
        points: (n, d).

    Example:
        >>> import torch
        >>> is_atomic(torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]]))
        True
        >>> is_atomic(torch.tensor([[0.0, 0.0], [1.0, 0.0], [-0.5, 0.0]]))
        False
    """
    if points.dim() != 2 or len(points) == 0:
        raise InputError("points (n, d)", str(tuple(points.shape)), where="is_atomic")
    if not bool(points.isfinite().all()):
        return False
    P = points.detach().double().cpu().numpy()
    scale = float(np.abs(P).max())
    if not (np.abs(P) <= TOLERANCE * scale).all(1).any():
        return False
    if scale == 0:
        return True
    system = np.vstack([P.T / scale, np.ones(len(P))])
    return all(nnls(system, np.append(-point / scale, 1.0))[1] <= TOLERANCE for point in P)
