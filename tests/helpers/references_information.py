"""Naive twins of m-sharpness and of the information criteria: everything written out, posteriors by weighted draws."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from references import Dense, twin
from references_radius import gradients_one_by_one
from references_sharpness import STRONG_OPTIONS, _folded, _gradient, _normals
from torch import Tensor
from torch.func import hessian, jacrev

GROW_WITH_SAMPLES = ("local_learning_coefficient", "wbic")  # their posterior narrows with n, and n L̂ is a sum
# Chains that are held tightly forget their start in a few steps, and see the curvature of attention without noise.
STRONG_OPTIONS |= {
    (name, symmetry): {"gamma": 1000.0, "chains": 32, "steps": 200}
    for name in GROW_WITH_SAMPLES
    for symmetry in ("attention_scaling", "norm_scaling")
}


@twin
def m_sharpness(dense: Dense, rho: float = 0.05, **options: Any) -> float:
    """All samples are one group: the loss one step of length rho up the gradient."""
    dense = _folded(dense)
    names = list(dense.params)
    gradient = _gradient(dense, names)
    highest = float(dense.loss_of(dense.vector(names) + rho * gradient / gradient.norm(), names))
    return max(0.0, highest - float(dense.loss()))


def jacobians(dense: Dense) -> Tensor:
    """Derivatives of the outputs by all parameters, (n, C, p)."""
    found = jacrev(dense.outputs)(dense.params)
    return torch.cat([found[name].flatten(2) for name in dense.params], dim=2).detach()


def output_curvatures(dense: Dense) -> tuple[Tensor, Tensor]:
    """Gradient (n, C) and Hessian (n, C, C) of each sample's loss by its outputs."""
    slopes, curvatures = [], []
    for output, target in zip(dense.outputs().detach(), dense.tiny.y, strict=True):

        def loss(z: Tensor, target: Tensor = target) -> Tensor:
            return ((z - target) ** 2).sum() if dense.tiny.loss == "mse" else torch.logsumexp(z, 0) - z[target]

        slopes.append(jacrev(loss)(output))
        curvatures.append(hessian(loss)(output))
    return torch.stack(slopes), torch.stack(curvatures)


def gauss_newton_of(dense: Dense) -> Tensor:
    J, (_, S) = jacobians(dense), output_curvatures(dense)
    return sum(j.T @ s @ j for j, s in zip(J, S, strict=True)) / len(J)


@twin
def effective_dimension(dense: Dense, alpha: float = 1e-3, **options: Any) -> float:
    """Trace of G (G + αI)⁻¹, by solving."""
    G = gauss_newton_of(dense)
    return float(torch.linalg.solve(G + alpha * torch.eye(len(G), dtype=G.dtype), G).trace())


@twin
def takeuchi_trace(dense: Dense, **options: Any) -> float:
    """In the space of samples: with J̃ = S^½ J and z = S^(−½) ∂ℓ/∂f, the part of z in the range of J̃, squared."""
    J, (slopes, curvatures) = jacobians(dense), output_curvatures(dense)
    rows, total = [], 0.0
    embedded = []
    for i, (j, r, s) in enumerate(zip(J, slopes, curvatures, strict=True)):
        values, vectors = torch.linalg.eigh(s)
        kept = values > 1e-12 * values.max()
        root = vectors[:, kept] * values[kept].sqrt()
        rows.append(root.T @ j)
        embedded.append((i, (vectors[:, kept] / values[kept].sqrt()).T @ r))
    U, singular, _ = torch.linalg.svd(torch.cat(rows), full_matrices=False)
    U = U[:, singular > 1e-7 * singular[0]]
    start = 0
    for row, (_, z) in zip(rows, embedded, strict=True):
        total += float((U[start : start + len(row)].T @ z).square().sum())
        start += len(row)
    return total


def second_moment(dense: Dense) -> Tensor:
    gradients = gradients_one_by_one(dense)
    return gradients.T @ gradients / len(gradients)


@lru_cache(maxsize=16)
def mean_rise(dense: Dense, gamma: float = 100.0, draws: int = 10_000) -> float:
    """Of the posterior at 1/log n: draws of its Gaussian prior, each with the weight that the loss gives it."""
    names, n = list(dense.params), len(dense.tiny.x)
    w = dense.vector(names)
    moves = torch.stack(_normals(draws // 2, len(w))) / math.sqrt(gamma)
    rises = dense.losses_of(torch.cat([w + moves, w - moves]), names) - float(dense.loss())
    weights = (-n / math.log(n) * rises).softmax(0)
    return float((weights * rises).sum())


@twin
def local_learning_coefficient(dense: Dense, **options: Any) -> float:
    dense = _folded(dense)
    n = len(dense.tiny.x)
    return n / math.log(n) * mean_rise(dense)


@twin
def wbic(dense: Dense, **options: Any) -> float:
    dense = _folded(dense)
    return len(dense.tiny.x) * (float(dense.loss()) + mean_rise(dense))
