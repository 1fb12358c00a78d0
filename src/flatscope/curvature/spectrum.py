"""Extreme eigenvalues with their residual, and the spectral density."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from flatscope.curvature.estimators import Operator
from flatscope.errors import InputError, NumericalWarning

DENSE_SIZE = 256
KRYLOV_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Eigenpair:
    """An eigenvalue, its vector and ‖Av − λv‖, which bounds its error."""

    value: float
    vector: Tensor
    residual: float
    converged: bool
    products: int


@dataclass(frozen=True)
class Density:
    """Spectral density: Ritz values with weights that sum to one."""

    nodes: Tensor
    weights: Tensor

    def smoothed(self, grid: Tensor, width: float) -> Tensor:
        """The density on a grid, each node blurred to a Gaussian of that width."""
        scaled = (grid[:, None] - self.nodes[None, :]) / width
        bumps = torch.exp(-0.5 * scaled.square()) / (width * (2 * torch.pi) ** 0.5)
        smooth: Tensor = bumps @ self.weights
        return smooth


def extreme_eigenpair(
    operator: Operator,
    generator: torch.Generator,
    *,
    largest: bool = True,
    tolerance: float = 1e-6,
    shift: float = 0.0,
) -> Eigenpair:
    """The algebraically largest (or smallest) eigenvalue of a symmetric operator.

    Small matrices are multiplied out; larger ones go to ARPACK. Its tolerance is relative to the eigenvalue, so
    scaling the loss changes nothing. The start vector is drawn from the generator: repeatable.

    The small end of a loss Hessian is a dense cloud around zero in which ARPACK would look for digits for ever.
    With `shift` near the other end of the spectrum, the eigenvalue of (operator − shift) is sought instead: large,
    and so found to `tolerance` times the width of the spectrum.

    Args:
        operator: symmetric p × p.
        generator: for the start vector.
        largest: which end of the spectrum.
        tolerance: relative accuracy of the eigenvalue (of its distance from the shift).
        shift: subtracted from the operator while solving.
    """
    size = operator.shape[0]
    if not 0 < tolerance < 1:
        raise InputError("a tolerance between 0 and 1", str(tolerance), where="extreme_eigenpair")
    if size <= DENSE_SIZE:
        matrix = (operator @ torch.eye(size, dtype=torch.float64)).cpu()
        values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
        place = -1 if largest else 0
        return Eigenpair(float(values[place]), vectors[:, place], 0.0, True, size)
    counted = 0

    def product(array: np.ndarray) -> np.ndarray:
        nonlocal counted
        counted += 1
        vector = torch.from_numpy(np.ascontiguousarray(array)).reshape(size)
        return ((operator @ vector).cpu() - shift * vector).numpy()

    linear = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = torch.randn(size, generator=generator, dtype=torch.float64).numpy()
    # An end that stands alone is found soon with twenty vectors. In a cloud more vectors mean fewer restarts.
    kept = 20 if shift == 0 else max(20, min(80, KRYLOV_BYTES // (8 * size)))
    converged = True
    try:
        which = "LA" if largest else "SA"
        values, vectors = eigsh(linear, k=1, which=which, v0=start, tol=tolerance, maxiter=300, ncv=kept)
        value, vector = float(values[0]) + shift, torch.from_numpy(vectors[:, 0].copy())
    except ArpackNoConvergence as failure:
        converged = False
        found = failure.eigenvectors
        vector = torch.from_numpy(found[:, 0].copy() if found.size else start / np.linalg.norm(start))
        value = float(vector @ (operator @ vector).cpu())
        warnings.warn(f"eigenvalue not converged after {counted} products", NumericalWarning, stacklevel=2)
    residual = float(((operator @ vector).cpu() - value * vector).norm())
    return Eigenpair(value, vector, residual, converged, counted + 1)


def spectral_density(operator: Operator, generator: torch.Generator, *, steps: int = 64, probes: int = 8) -> Density:
    """Stochastic Lanczos quadrature with full re-orthogonalisation.

    Each random probe gives a tridiagonal matrix whose eigenvalues are nodes and whose eigenvectors' squared first
    entries are their weights; the average over probes approximates the density of eigenvalues.

    Args:
        operator: symmetric p × p.
        generator: for the probes.
        steps: Lanczos steps (products) per probe.
        probes: number of random starts.
    """
    if steps < 1 or probes < 1:
        raise InputError("at least one step and one probe", f"{steps}, {probes}", where="spectral_density")
    size = operator.shape[0]
    nodes, weights = [], []
    for _ in range(probes):
        start = torch.randn(size, generator=generator, dtype=torch.float64)
        diagonal, off = lanczos(operator, start / start.norm(), min(steps, size))
        values, vectors = torch.linalg.eigh(torch.diag(diagonal) + torch.diag(off, 1) + torch.diag(off, -1))
        nodes.append(values)
        weights.append(vectors[0].square() / probes)
    return Density(torch.cat(nodes), torch.cat(weights))


def lanczos(operator: Operator, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Diagonal and off-diagonal of the tridiagonal matrix of the Krylov space of `start`."""
    basis = [start]
    diagonal: list[float] = []
    off: list[float] = []
    while True:
        vector = (operator @ basis[-1]).cpu()
        diagonal.append(float(vector @ basis[-1]))
        stacked = torch.stack(basis)  # (j, p)
        for _ in range(2):  # twice is enough to keep the basis orthogonal to rounding
            vector = vector - stacked.T @ (stacked @ vector)
        length = float(vector.norm())
        scale = max(abs(value) for value in diagonal) + max(off, default=0.0)
        if len(basis) == steps or length <= 1e-12 * max(scale, 1e-300):
            return torch.tensor(diagonal, dtype=torch.float64), torch.tensor(off, dtype=torch.float64)
        off.append(length)
        basis.append(vector / length)
