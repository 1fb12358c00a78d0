"""The radius within which no ReLU changes its status, and the change of outputs, as Yi et al. (2019) print them.

Both are about networks of equal widths without biases whose free skeleton weights, the diagonals above the first layer,
are 1 (by rescaling they are ±1 in any network). The values of basis paths are then the first matrix, and every other
weight times the skeleton weight of the first layer that its path passes. The library has a certificate that holds in
place of (32): the measure `psi_activation_radius`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLIP_STEPS = 15


def printed_activation_radius(first: Tensor, second: Tensor, x: Tensor, eta: float = 0.0) -> float:
    """The right-hand side of (32) without its δ₀(η), for which (31) gives no number; (26) is its last term.

    Args:
        first: W_1 (d, d).
        second: W_2 (d, d) with ones on its diagonal.
        x: inputs (n, d) of length at most 1.
        eta: η.
    """
    below = x @ first.T
    above = below.clamp_min(0) @ second.T
    others = second - torch.diag(torch.diag(second))
    sizes = (2 * others.square().sum(1)).sqrt()
    terms = [float(z.abs()[z != 0].min()) for z in (above / sizes, below) if bool((z != 0).any())]
    return min(terms[0] - eta, terms[-1])


def units_flipped_within_radius(first: Tensor, second: Tensor, x: Tensor, radius: float) -> tuple[int, int]:
    """Units of the first and of the second layer that some change of the path values of that length switches.

    For each unit and sample the change is sought by steps to the end of the ball against the gradient: the numbers are
    those of flips that were found, and there may be more.
    """
    d, n = len(first), len(x)
    diagonal = torch.diag(first)
    mask = 1 - torch.eye(d, dtype=first.dtype)
    values = torch.stack([first, second * diagonal * mask])  # of the paths through either layer
    layer, sample, unit = (part.flatten() for part in torch.meshgrid(*map(torch.arange, (2, n, d)), indexing="ij"))
    change = torch.zeros(len(unit), *values.shape, dtype=first.dtype)

    def signals(moved: Tensor) -> Tensor:
        """The pre-activation that each change is about."""
        one, other = (values + moved).unbind(1)
        below = torch.einsum("tij,tj->ti", one, x[sample])
        weights = other * mask / torch.diagonal(one, dim1=1, dim2=2)[:, None, :] + torch.eye(d, dtype=first.dtype)
        above = torch.einsum("tij,tj->ti", weights, below.clamp_min(0))
        return torch.where(layer == 0, below.gather(1, unit[:, None])[:, 0], above.gather(1, unit[:, None])[:, 0])

    start = signals(change)
    flipped = torch.zeros(len(unit), dtype=torch.bool)
    for _ in range(FLIP_STEPS):
        leaf = change.clone().requires_grad_()
        (slope,) = torch.autograd.grad((signals(leaf) * start.sign()).sum(), leaf)
        slope[:, 1] *= mask
        change = -radius * slope / slope.flatten(1).norm(dim=1).clamp_min(1e-300)[:, None, None, None]
        flipped |= signals(change) * start < 0
    return int(flipped[layer == 0].sum()), int(flipped[layer == 1].sum())


def output_difference_bound(weights: Sequence[Tensor], moved: Sequence[Tensor], x: Tensor) -> Tensor:
    """(14) and (33): (Σ_k n_p² Σ_i Σ_p (v'_p − v_p)² a_p x_i²)^½ for each row of x, while no unit changes its status.

    The factor n_p², the square of the number of all paths, is more than the Cauchy-Schwarz inequality asks for.

    Args:
        weights: W_1 … W_L of a ReLU network without biases.
        moved: the same after the change.
        x: inputs (n, d).
    """
    paths = math.prod(len(weight) for weight in weights) * x.shape[1]
    return paths * _squared_differences(weights, moved, x).sqrt()


def _squared_differences(weights: Sequence[Tensor], moved: Sequence[Tensor], x: Tensor) -> Tensor:
    """Σ over active paths of (v' − v)² x² = Σ v'² − 2 Σ v' v + Σ v², each by one pass of products of weights."""
    active, signal = [], x
    for weight in weights[:-1]:
        signal = (signal @ weight.T).clamp_min(0)
        active.append((signal > 0).to(x))
    total = torch.zeros(len(x), dtype=x.dtype)
    for one, other, sign in ((moved, moved, 1), (moved, weights, -2), (weights, weights, 1)):
        passed = x.square()
        for level, (a, b) in enumerate(zip(one, other, strict=True)):
            passed = passed @ (a * b).T
            passed = passed * active[level] if level < len(active) else passed
        total = total + sign * passed.sum(1)
    return total.clamp_min(0)
