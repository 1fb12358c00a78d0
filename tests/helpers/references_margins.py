"""Naive twins of the geometric margins: SciPy's general solver from many starts, faces of polyhedra one by one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from references import Dense, twin
from scipy.optimize import minimize
from torch import Tensor, nn

STARTS = 4
BOUNDING = 100  # steps
SMALL = 6  # entries of an input: so few can be searched at random


@twin
def geometric_margin(dense: Dense) -> Tensor:
    found = []
    for x, y, value in zip(dense.tiny.x, dense.tiny.y.tolist(), dense.margins, strict=True):
        others = [j for j in range(dense.outputs().shape[1]) if j != y]
        if value <= 0:
            found.append(0.0)
        elif len(dense.tiny.layers) == 1:
            layer = dense.tiny.model[0]
            found.append(
                min(_to_plane(layer.weight[y] - layer.weight[j], dense.outputs(x=x[None])[0], y, j) for j in others)
            )
        elif len(dense.tiny.layers) == 2 and isinstance(dense.tiny.model[1], nn.ReLU):
            found.append(min(nearest_by_faces(dense, x, y, j) for j in others))
        else:
            solved = min(_nearest_by_solver(dense, x, y, j) for j in others)
            found.append(min(solved, _nearest_at_random(dense, x, y, solved)) if x.numel() <= SMALL else solved)
    return torch.tensor(found, dtype=torch.float64)


def _to_plane(normal: Tensor, outputs: Tensor, y: int, j: int) -> float:
    return float(((outputs[y] - outputs[j]) / normal.norm()).detach())


def nearest_by_faces(dense: Dense, x: Tensor, y: int, j: int) -> float:
    """For every pattern of active units and every set of constraints that may hold the point: solve and check."""
    model = dense.tiny.model

    def hidden(flat: Tensor) -> Tensor:
        return model[0](flat.reshape(1, *x.shape)).flatten()

    A = torch.autograd.functional.jacobian(hidden, x.flatten()).numpy()
    z = hidden(x.flatten()).detach().numpy()
    weight = (model[-1].weight[y] - model[-1].weight[j]).detach().numpy()
    offset = float((model[-1].bias[y] - model[-1].bias[j]).detach())
    best = _nearest_by_solver(dense, x, y, j) * 1.01 if len(z) > 6 else math.inf  # saves work where there are many
    for least, on in _patterns(A, z, weight, offset, best):
        if least >= best:  # and so are all that follow
            break
        # Constraints Gd ≥ h: units keep the pattern, and class j is at least as high.
        G = np.vstack([(2 * on - 1)[:, None] * A, -(weight * on) @ A])
        h = np.append(-(2 * on - 1) * z, (weight * on) @ z + offset)
        if len(z) > 6:  # too many sets of faces: the convex problem by another solver
            best = min(best, _convex(G, h))
            continue
        for size in range(min(len(h), A.shape[1]) + 1):
            for held in itertools.combinations(range(len(h)), size):
                d = np.linalg.lstsq(G[list(held)], h[list(held)], rcond=None)[0] if held else np.zeros(A.shape[1])
                if (G @ d >= h - 1e-10).all():
                    best = min(best, float(np.linalg.norm(d)))
    return best


def _patterns(
    A: np.ndarray, z: np.ndarray, weight: np.ndarray, offset: float, best: float
) -> list[tuple[float, np.ndarray]]:
    """Patterns of active units, by how far they are at least, the nearest first; none beyond the best."""
    on = np.array(list(itertools.product((0.0, 1.0), repeat=len(z))))
    # The constraints Gd ≥ h of each pattern. For any p ≥ 0 every such d has ‖d‖ ≥ pᵀh / ‖Gᵀp‖, and p climbs there.
    G = np.concatenate([(2 * on - 1)[:, :, None] * A, -(on * weight @ A)[:, None]], axis=1)
    h = np.concatenate([-(2 * on - 1) * z, (on * weight @ z + offset)[:, None]], axis=1)
    lengths = np.maximum(np.linalg.norm(G, axis=2), 1e-12)
    G, h = G / lengths[:, :, None], h / lengths
    least, p = np.maximum(h, 0).max(axis=1), np.zeros_like(h)
    for _ in range(BOUNDING):
        pulled = np.einsum("kcd,kc->kd", G, p)
        reached = np.einsum("kc,kc->k", p, h) / np.maximum(np.linalg.norm(pulled, axis=1), 1e-12)
        least = np.maximum(least, reached)
        p = np.maximum(p + (h - np.einsum("kcd,kd->kc", G, pulled)) / len(z), 0)
    order = np.argsort(least, kind="stable")
    return [(float(least[number]), on[number]) for number in order if least[number] < best]


def _convex(G: np.ndarray, h: np.ndarray) -> float:
    """min ‖d‖ with Gd ≥ h by SLSQP, then exactly on the constraints that it found to hold."""
    result = minimize(
        lambda d: d @ d / 2,
        np.zeros(G.shape[1]),
        jac=lambda d: d,
        constraints={"type": "ineq", "fun": lambda d: G @ d - h, "jac": lambda d: G},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    if not result.success or (G @ result.x < h - 1e-7).any():
        return math.inf
    held = np.abs(G @ result.x - h) < 1e-6
    d = np.linalg.lstsq(G[held], h[held], rcond=None)[0] if held.any() else result.x
    return float(np.linalg.norm(d)) if (G @ d >= h - 1e-9).all() else float(np.linalg.norm(result.x))


def _nearest_by_solver(dense: Dense, x: Tensor, y: int, j: int) -> float:
    """min ‖d‖² with f_y − f_j ≤ 0 by SLSQP, from points around x, each checked for its class."""

    def gap(d: np.ndarray) -> tuple[float, np.ndarray]:
        free = torch.from_numpy(d.copy()).requires_grad_()
        outputs = dense.tiny.model((x + free.reshape(x.shape))[None])[0]
        value = outputs[y] - outputs[j]
        return float(value.detach()), torch.autograd.grad(value, free)[0].numpy()

    last: list[Any] = [None, None]

    def once(d: np.ndarray) -> tuple[float, np.ndarray]:
        if last[0] is None or not np.array_equal(last[0], d):
            last[:] = [d.copy(), gap(d)]
        return last[1]

    generator = torch.Generator().manual_seed(3)
    best = math.inf
    for start in range(STARTS):
        normal = torch.randn(x.numel(), generator=generator, dtype=torch.float64)
        first = (normal / normal.norm() * 2 * float(x.norm()) * start / STARTS).numpy()
        result = minimize(
            lambda d: (d @ d, 2 * d),
            first,
            jac=True,
            constraints={"type": "ineq", "fun": lambda d: -once(d)[0], "jac": lambda d: -once(d)[1]},
            method="SLSQP",
            options={"ftol": 1e-9, "maxiter": 100},
        )
        if gap(result.x)[0] <= 1e-8:
            best = min(best, float(np.linalg.norm(result.x)))
    return best


def _nearest_at_random(dense: Dense, x: Tensor, y: int, known: float) -> float:
    """Many directions, then ever smaller changes of the best one: a solver stumbles over kinks, this does not."""
    generator = torch.Generator().manual_seed(4)

    def changed(points: Tensor) -> Tensor:
        outputs = dense.outputs(x=points)
        others = torch.cat([outputs[:, :y], outputs[:, y + 1 :]], dim=1).amax(1)
        return others >= outputs[:, y]

    best, distance = None, known
    with torch.no_grad():
        for step in range(200):
            spread = 1e9 if step < 40 or best is None else 0.5 * 0.96 ** (step - 40)
            normal = torch.randn(300, x.numel(), generator=generator, dtype=torch.float64)
            ways = normal if best is None else best / best.norm() + spread * normal
            ways = ways / ways.norm(dim=1, keepdim=True) * distance * 0.999
            hits = changed(x + ways.reshape(-1, *x.shape)).nonzero()
            if len(hits):
                best = ways[hits[0, 0]]
                distance = float(best.norm())
    return distance


@twin
def local_linear_margin(dense: Dense) -> Tensor:
    found = []
    for x, y in zip(dense.tiny.x, dense.tiny.y.tolist(), strict=True):
        J = torch.autograd.functional.jacobian(lambda v: dense.outputs(x=v[None])[0], x).flatten(1)
        outputs = dense.outputs(x=x[None])[0]
        ratios = [_to_plane(J[y] - J[j], outputs, y, j) for j in range(len(outputs)) if j != y]
        found.append(max(min(ratios), 0.0))
    return torch.tensor(found, dtype=torch.float64)
