"""Deep linear networks: how fast each singular value is learned, and how small residual layers can be.

What Proposition 3 of Zhang et al. (2017) takes from older results: in the weights learning has stages, in the
coefficients it has none, and both end at the same map; linear residual layers have norms like one over their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

SINGULAR = (4.0, 2.0, 1.0)
Floats = np.ndarray[Any, np.dtype[np.float64]]


def learning_times_of_modes(
    seed: int, *, start: float = 1e-3, lr: float = 0.01, steps: int = 4000
) -> tuple[Floats, Floats, float]:
    """Steps at which gradient descent has learned 10 and 90 % of each singular value of a linear map.

    White inputs of six dimensions, three outputs, singular values 4, 2, 1 between random bases.

    Args:
        seed: of the bases and of the starting weights.
        start: standard deviation of the starting weights.
        lr: step size.
        steps: how many.

    Returns:
        Times (3, 2) of W = W₂W₁ by its factors and by its entries, and how far apart the two maps end.
    """
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0] for n in (3, 6))
    target = left @ torch.diag(torch.tensor(SINGULAR, dtype=torch.float64)) @ right[:, :3].T
    first, second = (start * torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((6, 6), (3, 6)))
    whole = second @ first
    seen: list[list[Tensor]] = [[], []]
    for _ in range(steps):
        error = second @ first - target
        first, second = first - lr * second.T @ error, second - lr * error @ first.T
        whole = whole - lr * (whole - target)
        for curve, product in zip(seen, (second @ first, whole), strict=True):
            curve.append((left.T @ product @ right[:, :3]).diagonal())
    strengths = [torch.stack(curve) / torch.tensor(SINGULAR, dtype=torch.float64) for curve in seen]
    deep, direct = (_times_of_tenth_and_nine_tenths(curve) for curve in strengths)
    return deep, direct, float((second @ first - whole).norm() / whole.norm())


def _times_of_tenth_and_nine_tenths(curve: Tensor) -> Floats:
    """First steps at or above a tenth and nine tenths, (modes, 2)."""
    return np.stack([(curve >= share).to(torch.int8).argmax(0).numpy() + 1.0 for share in (0.1, 0.9)], axis=1)


def residual_layer_norm(seed: int, layers: int) -> float:
    """Largest Frobenius norm of A_l in a map Π(I + A_l) of so many equal layers: e^M of a random M of norm 1."""
    generator = torch.Generator().manual_seed(seed)
    M = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    step = torch.linalg.matrix_exp(M / M.norm() / layers) - torch.eye(4, dtype=torch.float64)
    return float(step.norm())
