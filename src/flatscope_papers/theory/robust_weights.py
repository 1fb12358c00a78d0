"""Disturbed weights in Zhang et al. (2017): robust optimisation (10), open paths (Section 5.3), Proposition 2."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flatscope.errors import InputError

SampleLoss = Callable[[Tensor, Tensor], Tensor]


def robust_loss(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    radius: float,
    *,
    loss: SampleLoss = nn.functional.cross_entropy,
    steps: int = 20,
) -> float:
    """(1/n) Σ_i max over ‖δ_i‖ ≤ r of V(y_i, f_{w+δ_i}(x_i)): what (10) asks to be minimised; a lower bound of it.

    Every sample has a disturbance of its own, found by steps to the end of the ball along the gradient: the exact
    maximum where the loss is a growing function of one linear output.

    Args:
        model: in eval mode.
        x: inputs (n, …).
        y: targets (n,).
        radius: r.
        loss: of one output and its target.
        steps: at most.
    """
    if not 0 <= radius < math.inf:
        raise InputError("a radius from 0 up", str(radius), where="robust_loss")
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def at(moved: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        there = {name: weights[name] + moved[name] for name in weights}
        return loss(functional_call(model, there, (one[None],))[0], target)

    moved = {name: value.new_zeros(len(x), *value.shape) for name, value in weights.items()}
    worst = vmap(at)(moved, x, y)
    for _ in range(steps if radius else 0):
        slope = vmap(grad(at))(moved, x, y)
        length = torch.stack([value.flatten(1).square().sum(1) for value in slope.values()]).sum(0).sqrt()
        factor = radius / length.clamp_min(torch.finfo(length.dtype).tiny)
        moved = {name: value * factor.reshape(-1, *[1] * (value.ndim - 1)) for name, value in slope.items()}
        worst = torch.maximum(worst, vmap(at)(moved, x, y))
    return float(worst.mean())


def first_order_path_change(weights: Tensor, changes: Tensor) -> Tensor:
    """Δp = Σ_j δw_j Π_{i≠j} w_i to first order, of a path with these weights (…, k): Section 5.3."""
    k = weights.shape[-1]
    others = torch.stack([weights[..., [i for i in range(k) if i != j]].prod(-1) for j in range(k)], dim=-1)
    return (others * changes).sum(-1)


def largest_robust_path_value(epsilon: float, k: int) -> float:
    """(ε^(k−1)/k)^(k/(k−1)) ≥ Πw_i for non-negative weights with Δp ≤ ε^(k−1) for unit changes, and at most ε^k.

    The inequality of means gives it. That each weight is at most ε, as Section 5.3 has it on the way, does not follow.
    """
    if k < 2 or not epsilon > 0:
        raise InputError("k ≥ 2 and ε > 0", f"{k}, {epsilon}", where="largest_robust_path_value")
    return float((epsilon ** (k - 1) / k) ** (k / (k - 1)))


def sides_of_robust_inequality(w: Tensor, x: Tensor, y: Tensor, rho: float, c: float = 1.0) -> dict[str, float]:
    """Means over samples behind (42) and (43), for a linear model: residuals r, and s = ρ‖w‖‖x‖.

    `ridge` r² + s² (the path-norm side that (42) puts above), `robust` (|r| + s)², the worst square loss over weights
    within ρ‖w‖, and `above` (1 + 1/c) r² + (1 + c) s²: ridge ≤ robust ≤ above for every c > 0.
    """
    r, s = (y - x @ w).abs(), rho * w.norm() * x.norm(dim=1)
    sides = {"ridge": r**2 + s**2, "robust": (r + s) ** 2, "above": (1 + 1 / c) * r**2 + (1 + c) * s**2}
    return {name: float(value.mean()) for name, value in sides.items()}
