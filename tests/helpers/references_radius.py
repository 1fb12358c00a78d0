"""Naive twins of the radius, of robustness to noise and of gradient noise: plain loops over directions and samples."""

from __future__ import annotations

import itertools
import math

import torch
from references import Dense, twin
from references_sharpness import STRONG_OPTIONS, _folded
from torch import Tensor

# At weights that are no minimum a radius in a direction across the gradient is long: the mean needs many directions.
_MANY = {"directions": 1000, "tolerance": 1e-2}
STRONG_OPTIONS |= {
    ("flatness_radius", "layer_scaling"): _MANY | {"epsilon": 0.2, "directions": 2000},
    ("flatness_radius", "unit_scaling"): _MANY | {"directions": 2000},
    ("flatness_radius", "batchnorm_scaling"): _MANY,
    ("flatness_radius", "output_scaling"): _MANY,
    ("flatness_radius", "attention_scaling"): _MANY,
    # Queries and keys have a small part in noise and mean alike: without the samples' own noise more of it shows.
    ("gradient_noise_scale", "attention_scaling"): {"unbiased": True},
    ("flatness_radius", "norm_scaling"): _MANY,
}


def crossings(dense: Dense, directions: Tensor, epsilon: float) -> Tensor:
    """First radius of a fine geometric grid at which the loss has changed by more than epsilon, then bisection."""
    names = list(dense.params)
    w, loss = dense.vector(names), float(dense.loss())

    def outside(r: Tensor) -> Tensor:
        return ~((dense.losses_of(w + r[:, None] * directions, names) - loss).abs() <= epsilon)

    high = torch.full((len(directions),), 1e-2 * float(w.norm()), dtype=w.dtype)
    while not bool((beyond := outside(high)).all()):
        high = torch.where(beyond, high, high * 1.3)
    low = torch.zeros_like(high)
    for _ in range(12):
        middle = (low + high) / 2
        beyond = outside(middle)
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return (low + high) / 2


@twin
def flatness_radius(dense: Dense, epsilon: float = 0.05, directions: int = 150) -> float:
    dense = _folded(dense)
    generator = torch.Generator().manual_seed(17)
    size = sum(value.numel() for value in dense.params.values())
    drawn = torch.stack([torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(directions)])
    return float(crossings(dense, drawn / drawn.norm(dim=1, keepdim=True), epsilon).mean())


@twin
def perturbation_robustness(dense: Dense, gamma: float = 1.0, draws: int = 3000) -> float:
    """The last row of the curve."""
    generator = torch.Generator().manual_seed(18)
    wrong, x, together = 0, dense.tiny.x, 100
    with torch.no_grad():
        for _ in range(draws // together):
            noise = gamma * torch.randn(together, *x.shape, generator=generator, dtype=x.dtype)
            outputs = dense.outputs(x=(x + noise).flatten(0, 1))
            wrong += int((outputs.argmax(1) != dense.tiny.y.repeat(together)).sum())
    return wrong / (draws * len(x))


@twin
def input_sensitivity(dense: Dense) -> Tensor:
    found = []
    for x in dense.tiny.x:
        jacobian = torch.autograd.functional.jacobian(lambda v: dense.outputs(x=v[None])[0], x)
        found.append(math.sqrt(float((jacobian**2).sum())))
    return torch.tensor(found, dtype=torch.float64)


def gradients_one_by_one(dense: Dense) -> Tensor:
    """(n, p) in the order of the parameters."""
    tiny, rows = dense.tiny, []
    for i in range(len(tiny.x)):
        one = Dense(type(tiny)(**{**vars(tiny), "x": tiny.x[i : i + 1], "y": tiny.y[i : i + 1]}))
        names = list(one.params)
        rows.append(
            torch.autograd.functional.jacobian(lambda v, one=one, names=names: one.loss_of(v, names), one.vector(names))
        )
    return torch.stack(rows)


@twin
def gradient_noise(dense: Dense) -> float:
    rows = gradients_one_by_one(dense)
    mean = sum(rows) / len(rows)
    return sum(float(((row - mean) ** 2).sum()) for row in rows) / len(rows)


@twin
def gradient_noise_scale(dense: Dense) -> float:
    rows = gradients_one_by_one(dense)
    mean = sum(rows) / len(rows)
    return gradient_noise(dense) / float((mean**2).sum())


@twin
def batch_sharpness(dense: Dense, batch: int = 1, weight_decay: float = 0.0) -> float:
    """Every set of so many samples, each with its whole Hessian."""
    tiny, ratios = dense.tiny, []
    for chosen in itertools.combinations(range(len(tiny.x)), batch):
        some = Dense(type(tiny)(**{**vars(tiny), "x": tiny.x[list(chosen)], "y": tiny.y[list(chosen)]}))
        names = list(some.params)
        w = some.vector(names)
        g = torch.autograd.functional.jacobian(lambda v, some=some, names=names: some.loss_of(v, names), w)
        g = g + weight_decay * w
        H = some.hessian + weight_decay * torch.eye(len(w), dtype=w.dtype)
        ratios.append(float(g @ H @ g / (g @ g)))
    return sum(ratios) / len(ratios)
