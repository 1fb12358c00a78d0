"""Curvature of networks too large for a dense Hessian: random signs and SciPy's Lanczos, with standard errors.

The functions stand for those of the same names in `own_measures`; a value is (mean, standard error).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, cached_property

import scipy.sparse.linalg
import torch
from own_measures import Subject
from torch import Tensor

PROBES = 32
Estimate = tuple[float, float]


class Probes:
    """Hessian products of random directions, the same for all measures of one network."""

    def __init__(self, subject: Subject) -> None:
        self.s, self.own = subject, subject.own
        self.generator = torch.Generator().manual_seed(2)

    def signs(self, *shape: int) -> Tensor:
        drawn = torch.randint(0, 2, shape, generator=self.generator) * 2 - 1
        return drawn.to(self.own.dtype)

    def drawn(self, make: Callable[[], Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Directions and their products."""
        directions = [make() for _ in range(PROBES)]
        return [(v, self.own.product(v)) for v in directions]

    @cached_property
    def of_entries(self) -> list[tuple[Tensor, Tensor]]:
        return self.drawn(lambda: self.signs(self.own.size))

    def _laid_out(self, of_layer: Callable[[str], Tensor]) -> Tensor:
        v = torch.zeros_like(self.own.w)
        for name in self.s.layers.values():
            v[self.own.places[name]] = of_layer(name)
        return v

    @cached_property
    def of_columns(self) -> list[tuple[Tensor, Tensor]]:
        """Each weight times a sign of its input."""

        def signed(name: str) -> Tensor:
            w = self.own.params[name].reshape(-1).clone()
            for column in self.s.reading(name).columns:
                w[column] *= self.signs(1)
            return w

        return self.drawn(lambda: self._laid_out(signed))

    @cached_property
    def of_rows(self) -> list[tuple[Tensor, Tensor]]:
        """The weight as a matrix times a square matrix of signs: entries of rows covary as the rows' inner products."""

        def mixed(name: str) -> Tensor:
            rows = self.s.reading(name).rows
            made = torch.zeros_like(self.own.params[name].reshape(-1))
            made[rows] = self.s.rows(name) @ self.signs(rows.shape[1], rows.shape[1])
            return made

        return self.drawn(lambda: self._laid_out(mixed))

    def estimate(self, pairs: list[tuple[Tensor, Tensor]], place: slice | Tensor | None = None) -> Estimate:
        found = [float((v * h).sum() if place is None else v[place] @ h[place]) for v, h in pairs]
        mean = sum(found) / len(found)
        return mean, math.sqrt(sum((x - mean) ** 2 for x in found) / (len(found) - 1) / len(found))

    def layers(self, pairs: list[tuple[Tensor, Tensor]]) -> dict[str, Estimate]:
        return {layer: self.estimate(pairs, self.own.places[name]) for layer, name in self.s.layers.items()}

    def extreme(self, which: str, place: slice | None = None) -> float:
        """The largest ("LA") or smallest ("SA") eigenvalue, of one parameter's block or of all."""
        place = place or slice(0, self.own.size)
        size = place.stop - place.start

        def apply(v: object) -> object:
            whole = torch.zeros_like(self.own.w)
            whole[place] = torch.as_tensor(v, dtype=self.own.dtype).reshape(-1)
            return self.own.product(whole)[place].numpy()

        square = scipy.sparse.linalg.LinearOperator((size, size), matvec=apply, dtype=float)
        start = torch.randn(size, generator=torch.Generator().manual_seed(0)).double().numpy()
        found = scipy.sparse.linalg.eigsh(square, 1, which=which, v0=start, tol=2e-4, return_eigenvectors=False)
        return float(found[0])


@cache
def probes(subject: Subject) -> Probes:
    return Probes(subject)


def estimates(name: str, s: Subject) -> dict[tuple[str, int], Estimate] | None:
    """Of a measure of curvature; None where it is none."""
    found = _estimates(name, s)
    return None if found is None else {(layer, -1): value for layer, value in found.items()}


def _estimates(name: str, s: Subject) -> dict[str, Estimate] | None:
    p = probes(s)
    if name in ("hessian_max_eigenvalue", "hessian_min_eigenvalue"):
        return {"": (p.extreme("LA" if "max" in name else "SA"), 0.0)}
    if name == "hessian_trace":
        return {"": p.estimate(p.of_entries)}
    if name in ("layer_max_eigenvalue", "kappa", "kappa_max", "kappa_sum"):
        found = {layer: _layer_top(s, weight) for layer, weight in s.layers.items()}
        if name.startswith("kappa"):
            found = {layer: value * s.norm2(s.layers[layer]) for layer, value in found.items()}
        if name in ("kappa_max", "kappa_sum"):
            found = {"": max(found.values()) if name == "kappa_max" else sum(found.values())}
        return {layer: (value, 0.0) for layer, value in found.items()}
    if name == "layer_trace":
        return p.layers(p.of_entries)
    if name == "relative_flatness":
        return p.layers(p.of_rows)
    if name == "rho_layer_sum":
        return p.layers(p.of_columns)
    if name == "rho_sum":
        return {"": _total(p, dict.fromkeys(s.layers.values(), 1.0), p.of_columns)}
    if name.startswith("kappa_trace"):
        each = {layer: _times(s.norm2(s.layers[layer]), one) for layer, one in p.layers(p.of_entries).items()}
        if name == "kappa_trace":
            return each
        if name == "kappa_trace_max":
            return {"": max(each.values())}
        return {"": _total(p, {weight: s.norm2(weight) for weight in s.layers.values()}, p.of_entries)}
    if name == "psi_trace":
        return {"": _psi_trace(s)}
    return None


@cache
def _layer_top(s: Subject, weight: str) -> float:
    return probes(s).extreme("LA", s.own.places[weight])


def _times(factor: float, value: Estimate) -> Estimate:
    return factor * value[0], factor * value[1]


def _total(p: Probes, factors: dict[str, float], pairs: list[tuple[Tensor, Tensor]]) -> Estimate:
    """Sum over layers with a factor each, whose draws are shared."""
    weights = torch.zeros_like(p.own.w)
    for name, factor in factors.items():
        weights[p.own.places[name]] = factor
    return p.estimate([(weights * v, h) for v, h in pairs])


def _psi_trace(s: Subject) -> Estimate:
    paths, own = s.in_paths
    v = paths.values().detach().requires_grad_()
    slope = torch.autograd.grad(own.loss_at(paths.params_of(v)), v, create_graph=True)[0]
    p, pairs = probes(s), []
    for _ in range(PROBES):
        z = p.signs(len(v)).to(v)
        pairs.append((z, torch.autograd.grad(slope, v, z, retain_graph=True)[0]))
    return p.estimate(pairs)
