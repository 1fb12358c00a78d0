"""Naive twins of the measures that move weights: maxima by SciPy's general solver, means by many plain draws.

A maximum is only searched, by the measure and by its twin alike. They use different parametrisations and solvers, so
where both come to the same number within `SEARCH` neither has left the allowed set nor stopped on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from references import Dense, twin
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import vmap

from flatscope.symmetries.folding import fold_batchnorm

SEARCH = 0.02  # relative agreement of two searches
STARTS = 6
OPTIONS = {"maxiter": 200, "ftol": 1e-7}  # far below what two searches may differ by

# Perturbations small enough for a quadratic loss hide in their own noise what a rescaling does; these show it.
_WIDE = {"sigma": 0.3, "draws": 500}
STRONG_OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("expected_flatness", "layer_scaling"): _WIDE,
    ("expected_flatness", "unit_scaling"): _WIDE,
    ("expected_flatness", "batchnorm_scaling"): _WIDE,
    ("expected_flatness", "permutation"): _WIDE | {"draws": 2000},  # which does not move it: the error has to be small
    ("expected_flatness", "attention_scaling"): _WIDE,
    ("expected_flatness", "norm_scaling"): _WIDE,
    ("expected_flatness", "output_scaling"): {"draws": 1000},
}


@lru_cache(maxsize=16)
def _folded(dense: Dense) -> Dense:
    """The network without BatchNorm, on which weights are moved."""
    tiny = dense.tiny
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in tiny.model.modules()):
        return dense
    return Dense(tiny.with_model(fold_batchnorm(tiny.model, tiny.x)))


def _highest(loss: Callable[[Tensor], Tensor], starts: list[Tensor], bounds: Any = None) -> float:
    """The largest value that L-BFGS-B finds, climbing from all starts at once: the sum of their losses."""
    shape = len(starts), len(starts[0])

    def values(array: np.ndarray) -> tuple[Tensor, Tensor]:
        points = torch.from_numpy(array.copy()).reshape(shape).requires_grad_()
        return points, vmap(loss)(points)

    def negative(array: np.ndarray) -> tuple[float, np.ndarray]:
        points, found = values(array)
        gradient = torch.autograd.grad(found.sum(), points, materialize_grads=True)[0]
        return -float(found.detach().sum()), -gradient.flatten().numpy()

    boxes = bounds and bounds * len(starts)
    first = torch.cat(starts).numpy()
    result = minimize(negative, first, jac=True, method="L-BFGS-B", bounds=boxes, options=OPTIONS)
    return float(values(result.x)[1].detach().max())


def _normals(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def _gradient(dense: Dense, names: list[str]) -> Tensor:
    return torch.autograd.functional.jacobian(lambda v: dense.loss_of(v, names), dense.vector(names))


@twin
def epsilon_flatness(dense: Dense, epsilon: float = 0.01, relative: bool = True, **options: Any) -> float:
    """Over directions z, at w + r z/‖z‖: the maximum of these tiny networks lies on the sphere."""
    dense = _folded(dense)
    names = list(dense.params)
    w, loss = dense.vector(names), float(dense.loss())
    radius = epsilon * float(w.norm()) if relative else epsilon
    starts = [_gradient(dense, names), *_normals(STARTS, len(w))]
    highest = _highest(lambda z: dense.loss_of(w + radius * z / z.norm(), names), [s / s.norm() for s in starts])
    return (highest - loss) / (1 + loss)


@twin
def sharpness(dense: Dense, alpha: float = 5e-4, normalised: bool = True, **options: Any) -> float:
    """Over t in [-1, 1]^p, at w + t α(|w| + 1)."""
    dense = _folded(dense)
    names = list(dense.params)
    w, loss = dense.vector(names), float(dense.loss())
    box = alpha * (w.abs() + 1)
    starts = [_gradient(dense, names).sign(), *[v.clamp(-1, 1) for v in _normals(STARTS, len(w))]]
    # In units of the box, in which the solver's steps are neither too long nor too short.
    highest = _highest(lambda t: (dense.loss_of(w + t * box, names) - loss) / alpha, starts, [(-1, 1)] * len(w))
    return alpha * highest / ((1 + loss) if normalised else 1)


@twin
def expected_flatness(dense: Dense, sigma: float = 0.01, draws: int = 3000, **options: Any) -> float:
    dense = _folded(dense)
    names = list(dense.params)
    w, loss = dense.vector(names), float(dense.loss())
    moves = sigma * torch.stack(_normals(draws // 2, len(w)))
    return abs(float(dense.losses_of(torch.cat([w + moves, w - moves]), names).mean()) - loss)


@twin
def feature_robustness(dense: Dense, delta: float = 0.1, **options: Any) -> dict[str, float]:
    """Over A = exp(K − Kᵀ) diag(sin s) exp(M − Mᵀ): every matrix of spectral norm at most 1, no projection needed."""
    result = {}
    for layer in dense.tiny.layers:
        name = dense.weight_name(layer)
        weight, loss = dense.params[name], float(dense.loss())
        groups = getattr(dict(dense.tiny.model.named_modules()).get(layer), "groups", 1)
        d = weight.shape[1]

        def rise(point: Tensor, name: str = name, weight: Tensor = weight, groups: int = groups, d: int = d) -> Tensor:
            own = point.reshape(groups, -1)
            parts = []
            for g, rows in enumerate(weight.chunk(groups)):
                K, M = (part.reshape(d, d) for part in own[g, : 2 * d * d].chunk(2))
                A = torch.matrix_exp(K - K.T) @ torch.diag(own[g, 2 * d * d :].sin()) @ torch.matrix_exp(M - M.T)
                parts.append(rows + delta * torch.einsum("oi...,ij->oj...", rows, A))
            return dense.loss({**dense.params, name: torch.cat(parts)})

        starts = _normals(STARTS, groups * (2 * d * d + d))
        result[layer] = _highest(rise, starts) - loss
    return result
