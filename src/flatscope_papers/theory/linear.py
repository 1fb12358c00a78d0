"""Linear models, where the limit of gradient descent is known: minimum norm, maximum margin, robust losses.

Sections 8 and 9 of Zhang et al. (2017), with the corrections their formulas need: eq. (35) follows from (33) only
for inputs of equal length, eq. (39) leaves out the cross term, and the direction printed in (42) is reversed.
Everything here is exact and small, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import nnls
from torch import Tensor

from flatscope import InputError

UNCERTAIN = ("inputs", "weights", "weights-linf")
FREE_BIAS = 1e3  # how much less a bias is penalised than a weight before the solution is polished
FEASIBLE = 1e-7


@dataclass(frozen=True)
class Descent:
    """A run of gradient descent on ‖Xw − y‖²/(2n).

    Attributes:
        weights: the last ones, (d,).
        limit: where it goes: w† + (I − X†X)w_0.
        losses: after each step, (steps,).
        outside_span: largest distance of any w_t − w_0 from the span of the inputs; 0 but for rounding.
    """

    weights: Tensor
    limit: Tensor
    losses: Tensor
    outside_span: float

    @property
    def distance(self) -> float:
        """From the last weights to the limit."""
        return float((self.weights - self.limit).norm())


@dataclass(frozen=True)
class Separator:
    """The classifier sign(wᵀx + b) that withstands the largest disturbance.

    Attributes:
        weight: w, (d,), scaled such that the tightest constraint is an equality.
        bias: b.
        radius: ρ, the largest disturbance that changes no label; see `max_margin`.
        support: (n,) booleans, the samples that hold it.
    """

    weight: Tensor
    bias: float
    radius: float
    support: Tensor


@dataclass(frozen=True)
class LogisticRun:
    """Gradient descent on the logistic loss, against the maximum margin it creeps towards.

    Attributes:
        steps: when it was looked at.
        cosines: of the weights with the maximum-margin direction.
        margin_ratios: the margin of the weights over the largest one; approaches 1 like 1/log t only.
        sideways: length of the part of the weights orthogonal to that direction.
        weight: the last weights.
    """

    steps: tuple[int, ...]
    cosines: tuple[float, ...]
    margin_ratios: tuple[float, ...]
    sideways: tuple[float, ...]
    weight: Tensor


def minimum_norm(X: Tensor, y: Tensor) -> Tensor:
    """w† = X†y = Xᵀ(XXᵀ)⁻¹y for independent rows: the shortest solution of Xw = y (their Lemma 2).

    Example:
        >>> [round(w, 9) for w in minimum_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([2.0])).tolist()]
        [1.0, 1.0]
    """
    X, y = _checked_samples(X, y, "minimum_norm")
    solution: Tensor = torch.linalg.lstsq(X, y.unsqueeze(1), driver="gelsd").solution
    return solution.squeeze(1)


def largest_stable_step(X: Tensor, stochastic: bool = False) -> float:
    """Steps below this converge: 2n/λ_max(XXᵀ) for full gradients, 2/max‖x_i‖² for single samples that all fit."""
    X = X.double()
    if stochastic:
        return 2 / float(X.square().sum(1).max())
    return 2 * len(X) / float(torch.linalg.matrix_norm(X, 2)) ** 2


def descend(
    X: Tensor,
    y: Tensor,
    lr: float,
    steps: int,
    *,
    stochastic: bool = False,
    start: Tensor | None = None,
    seed: int = 0,
) -> Descent:
    """Gradient descent on the least-squares loss, by full gradients or one sample at a time.

    Args:
        X: inputs (n, d).
        y: targets (n,).
        lr: compare `largest_stable_step`; above it the run diverges, which is not refused.
        steps: how many; for samples, drawn with replacement, one per step.
        stochastic: one sample at a time.
        start: w_0, (d,); 0 by default, from where the limit is the minimum-norm solution.
        seed: of the samples' order.
    """
    X, y = _checked_samples(X, y, "descend")
    origin = torch.zeros(X.shape[1], dtype=torch.float64) if start is None else start.detach().double()
    basis = torch.linalg.svd(X, full_matrices=False)
    rows = basis.Vh[basis.S / basis.S.max() > max(X.shape) * torch.finfo(torch.float64).eps]  # (rank, d)
    limit = minimum_norm(X, y) + origin - rows.T @ (rows @ origin)
    order = torch.randint(len(X), (steps,), generator=torch.Generator().manual_seed(seed)).tolist()
    weights, losses, outside = origin.clone(), torch.empty(steps, dtype=torch.float64), 0.0
    for step in range(steps):
        if stochastic:
            row = X[order[step]]
            weights = weights - lr * (row @ weights - y[order[step]]) * row
        else:
            weights = weights - lr / len(X) * (X.T @ (X @ weights - y))
        losses[step] = (X @ weights - y).square().sum() / (2 * len(X))
        moved = weights - origin
        outside = max(outside, float((moved - rows.T @ (rows @ moved)).norm()))
    return Descent(weights, limit, losses, outside)


def max_margin(X: Tensor, y: Tensor, *, uncertain: str = "inputs", bias: bool = True) -> Separator:
    """The separator that withstands the largest disturbance: min ‖w‖ with y_i(wᵀx_i + b) ≥ h_i, and ρ = 1/‖w‖.

    Solved exactly as a least-distance problem by non-negative least squares (Lawson and Hanson 1974).

    Args:
        X: inputs (n, d).
        y: classes −1 and 1, (n,).
        uncertain: what is disturbed: "inputs" by ‖δx‖₂ ≤ ρ (h = 1, the hard-margin SVM (35)); "weights" by
            ‖δw‖₂ ≤ ρ‖w‖₂ (h = ‖x_i‖₂, eq. (33); the same direction only for inputs of equal length);
            "weights-linf" by ‖δw‖_∞ ≤ ρ‖w‖₂ (h = ‖x_i‖₁, eq. (36)).
        bias: whether b is free; otherwise it is 0.

    Raises:
        InputError: the classes cannot be separated.

    Example:
        >>> found = max_margin(torch.tensor([[1.0, 0.0], [-3.0, 0.0]]), torch.tensor([1, -1]))
        >>> [round(number, 9) for number in (float(found.weight[0]), found.bias, found.radius)]
        [0.5, 0.5, 2.0]
    """
    X, y = _checked_samples(X, y, "max_margin")
    if not bool(((y == 1) | (y == -1)).all()):
        raise InputError("classes -1 and 1", str(sorted(set(y.tolist()))[:4]), where="max_margin")
    sizes = _disturbance_sizes(X, uncertain).numpy()
    signed = (y[:, None] * X).numpy()
    scale = max(float(np.abs(signed).max()), 1e-300)
    G = signed / scale
    if bias:
        # b/FREE_BIAS takes part in the norm: the active constraints are right, the polish then sets b free.
        G = np.column_stack([G, FREE_BIAS * y.numpy()])
    solution, active = _least_distance(G, sizes)
    weight, b = _solve_active_constraints(signed, y.numpy(), sizes, active, bias)
    slack = signed @ weight + y.numpy() * b - sizes
    if slack.min() < -FEASIBLE * max(1.0, sizes.max()):  # the polish lost a constraint that was nearly active
        weight = solution[: X.shape[1]] / scale
        b = float(FREE_BIAS * solution[-1]) if bias else 0.0
    support = torch.from_numpy(np.abs(signed @ weight + y.numpy() * b - sizes) < FEASIBLE * np.maximum(1.0, sizes))
    return Separator(torch.from_numpy(weight), b, 1 / float(np.linalg.norm(weight)), support)


def _least_distance(
    G: npt.NDArray[np.float64], h: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """The shortest z with Gz ≥ h, and which constraints are active."""
    A = np.vstack([G.T, h])
    target = np.zeros(len(A))
    target[-1] = 1
    multipliers, distance = nnls(A, target, maxiter=30 * max(A.shape))
    residual = A @ multipliers - target
    if distance < 1e-9 or -residual[-1] < 1e-12:
        fix = "Take a linear separable set, or a soft loss such as `robust_hinge`"
        raise InputError("classes that a plane separates", "none found", where="max_margin", fix=fix)
    return -residual[:-1] / residual[-1], multipliers > 0


def _solve_active_constraints(
    signed: npt.NDArray[np.float64],
    y: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.float64],
    active: npt.NDArray[np.bool_],
    bias: bool,
) -> tuple[npt.NDArray[np.float64], float]:
    """The shortest w with equality on the active constraints, by its linear system of optimality."""
    rows, signs, right = signed[active], y[active], sizes[active]
    k = len(rows)
    if not bias:
        return np.asarray(rows.T @ np.linalg.lstsq(rows @ rows.T, right, rcond=None)[0]), 0.0
    system = np.zeros((k + 1, k + 1))
    system[:k, :k], system[:k, k], system[k, :k] = rows @ rows.T, signs, signs
    solved = np.linalg.lstsq(system, np.append(right, 0.0), rcond=None)[0]
    return np.asarray(rows.T @ solved[:k]), float(solved[k])


def logistic_descent(X: Tensor, y: Tensor, *, steps: int = 10_000, lr: float | None = None) -> LogisticRun:
    """Gradient descent from 0 on mean log(1 + exp(−y wᵀx)) of separable data, looked at ten times per decade.

    Args:
        X: inputs (n, d).
        y: classes −1 and 1, (n,).
        steps: how many.
        lr: by default 1/L, L = λ_max(XᵀX)/(4n) the largest curvature of the loss.
    """
    X, y = _checked_samples(X, y, "logistic_descent")
    best = max_margin(X, y, bias=False)
    direction = best.weight / best.weight.norm()
    signed = y[:, None] * X
    rate = 4 * len(X) / float(torch.linalg.matrix_norm(X, 2)) ** 2 if lr is None else lr
    looks = sorted({round(10 ** (k / 10)) for k in range(int(10 * math.log10(steps)) + 1)} | {steps})
    weight = torch.zeros(X.shape[1], dtype=torch.float64)
    rows: list[tuple[float, float, float]] = []
    for step in range(1, steps + 1):
        weight = weight + rate / len(X) * (signed.T @ torch.sigmoid(-(signed @ weight)))
        if step == looks[len(rows)]:
            length = float(weight.norm())
            along = float(weight @ direction)
            margin = float((signed @ weight).min()) / length
            sideways = float((weight - along * direction).norm())
            rows.append((along / length, margin / best.radius, sideways))
    cosines, ratios, sides = zip(*rows, strict=True)
    return LogisticRun(tuple(looks), cosines, ratios, sides, weight)


def robust_hinge(
    weight: Tensor, bias: float, X: Tensor, y: Tensor, radius: float, *, uncertain: str = "inputs"
) -> tuple[float, float]:
    """Worst mean hinge loss, eq. (37), and the regularised loss (38) above it.

    Each sample meets its own worst disturbance of size `radius` = ρ: mean [1 − y_i(wᵀx_i + b) + ρ‖w‖h_i]₊ with h as
    in `max_margin`, and mean [1 − y_i(wᵀx_i + b)]₊ + ρ‖w‖·mean h_i.

    Args:
        weight: (d,).
        bias: b.
        X: inputs (n, d).
        y: classes −1 and 1, (n,).
        radius: ρ.
        uncertain: what is disturbed, as in `max_margin`.
    """
    X, y = _checked_samples(X, y, "robust_hinge")
    shift = radius * float(weight.double().norm()) * _disturbance_sizes(X, uncertain)
    loss = 1 - y * (X @ weight.double() + bias)
    return float((loss + shift).clamp_min(0).mean()), float((loss.clamp_min(0) + shift).mean())


def _disturbance_sizes(X: Tensor, uncertain: str) -> Tensor:
    """Change of wᵀx_i by a unit disturbance, in units of ‖w‖."""
    if uncertain not in UNCERTAIN:
        raise InputError(f"uncertain one of {', '.join(UNCERTAIN)}", repr(uncertain), where="linear models")
    if uncertain == "inputs":
        return torch.ones(len(X), dtype=torch.float64)
    return X.norm(dim=1) if uncertain == "weights" else X.abs().sum(1)


def _checked_samples(X: Tensor, y: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """In float64 on the CPU, and of shapes that fit."""
    if X.dim() != 2 or y.shape != (len(X),) or len(X) == 0:
        raise InputError("inputs (n, d) and targets (n,)", f"{tuple(X.shape)} and {tuple(y.shape)}", where=where)
    return X.detach().double().cpu(), y.detach().double().cpu()
