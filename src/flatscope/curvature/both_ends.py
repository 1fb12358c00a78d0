"""Both ends of a spectrum from one Krylov space: what the largest eigenvalue has paid for serves the smallest too."""

from __future__ import annotations

import time
import warnings

import torch
from torch import Tensor

from flatscope.curvature.estimators import Operator
from flatscope.curvature.spectrum import DENSE_SIZE, KRYLOV_BYTES, Eigenpair
from flatscope.errors import InputError, NumericalWarning

LEAST_STEPS = 10
SETTLED_STEPS = 5
FEWEST_VECTORS = 20
MOST_VECTORS = 120
MOST_PRODUCTS = 1000


class BothEnds:
    """A Lanczos process with full re-orthogonalisation that goes on only as far as it is asked to.

    Where memory allows no more vectors, it is restarted with the Ritz vectors of both ends (thick restart). The answer
    to a question does not depend on what was asked before: it is that of the first step which fulfilled it.

    Args:
        operator: symmetric p × p.
        generator: for the start vector.
        deadline: `time.monotonic()` after which no further product is begun; None for no limit.
    """

    def __init__(self, operator: Operator, generator: torch.Generator, deadline: float | None = None) -> None:
        self._operator, self._deadline, size = operator, deadline, operator.shape[0]
        self._values: list[tuple[float, float]] = []  # smallest and largest Ritz value after each step
        self._residuals: list[tuple[float, float]] = []
        self._vectors = torch.zeros(size, 2, dtype=torch.float64)
        self._dense = size <= DENSE_SIZE
        self._kept = min(size, max(FEWEST_VECTORS, min(MOST_VECTORS, KRYLOV_BYTES // (8 * size))))
        self._basis = torch.zeros(0, size, dtype=torch.float64)
        self._projected = torch.zeros(0, 0, dtype=torch.float64)
        start = torch.randn(size, generator=generator, dtype=torch.float64)
        self._next: Tensor | None = start / start.norm()

    def largest(self, tolerance: float) -> Eigenpair:
        """The largest eigenvalue, with a residual of at most `tolerance` times the one that is largest in size."""
        return self._end(1, tolerance)

    def smallest(self, tolerance: float) -> Eigenpair:
        """The smallest eigenvalue, with a residual of at most `tolerance` times the width of the spectrum.

        It mostly lies at the edge of a dense cloud around zero, where digits of its own would be looked for for ever.
        """
        return self._end(0, tolerance)

    def _end(self, place: int, tolerance: float) -> Eigenpair:
        if not 0 < tolerance < 1:
            raise InputError("a tolerance between 0 and 1", str(tolerance), where="eigenvalue")
        if self._dense:
            return self._multiplied_out(place)
        step = 0
        while True:
            if step == len(self._values):
                late = self._deadline is not None and time.monotonic() > self._deadline and step > 0
                if late or step == MOST_PRODUCTS or self._next is None:
                    break
                self._advance()
            if self._reached(step, place, tolerance):
                break
            step += 1
        last = min(step, len(self._values) - 1)
        converged = self._next is None or self._reached(last, place, tolerance)
        if not converged:
            warnings.warn(f"eigenvalue not converged after {last + 1} products", NumericalWarning, stacklevel=2)
        value, residual = self._values[last][place], self._residuals[last][place]
        return Eigenpair(value, self._vectors[:, place], residual, converged, last + 1)

    def _reached(self, step: int, place: int, tolerance: float) -> bool:
        """Whether the residual is small enough after a step, and the Ritz value has come to rest.

        A small residual alone shows that some eigenvalue is near, not that it is the last one: a random vector lies
        mostly in the cloud around zero, and looks like the smallest eigenvalue for the first steps.
        """
        least = LEAST_STEPS if place else 2 * LEAST_STEPS
        if step + 1 < least:
            return False
        low, high = self._values[step]
        scale = tolerance * (max(abs(low), abs(high)) if place else high - low)
        before = self._values[step - max(SETTLED_STEPS, step // 4)][place]
        return self._residuals[step][place] <= scale and abs(self._values[step][place] - before) <= scale

    def _advance(self) -> None:
        """One product more."""
        assert self._next is not None
        if len(self._basis) == self._kept:
            self._restart()
        self._basis = torch.cat([self._basis, self._next[None]])
        image = (self._operator @ self._next).cpu().double()
        column = self._basis @ image  # (j,)
        rest = image - self._basis.T @ column
        correction = self._basis @ rest  # once more: enough to stay orthogonal to rounding
        rest = rest - self._basis.T @ correction
        size, length = len(self._basis), float(rest.norm())
        grown = torch.zeros(size, size, dtype=torch.float64)
        grown[:-1, :-1] = self._projected
        grown[:, -1] = grown[-1, :] = column + correction
        self._projected = grown
        values, vectors = torch.linalg.eigh(grown)
        low, high = float(values[0]), float(values[-1])
        exhausted = length <= 1e-12 * max(abs(low), abs(high), 1e-300) or size == len(rest)
        ends = vectors[:, [0, -1]]  # (j, 2)
        self._values.append((low, high))
        length = 0.0 if exhausted else length
        self._residuals.append((length * float(ends[-1, 0].abs()), length * float(ends[-1, 1].abs())))
        self._next = None if exhausted else rest / length
        self._vectors = self._basis.T @ ends

    def _restart(self) -> None:
        """Keep the Ritz vectors of both ends, a quarter of the space each."""
        values, vectors = torch.linalg.eigh(self._projected)
        count = len(values) // 4
        kept = torch.cat([torch.arange(count), torch.arange(len(values) - count, len(values))])
        self._basis = vectors[:, kept].T @ self._basis
        self._projected = torch.diag(values[kept])

    def _multiplied_out(self, place: int) -> Eigenpair:
        size = self._operator.shape[0]
        if not self._values:
            matrix = (self._operator @ torch.eye(size, dtype=torch.float64)).cpu()
            values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
            self._values, self._vectors = [(float(values[0]), float(values[-1]))], vectors[:, [0, -1]]
        return Eigenpair(self._values[0][place], self._vectors[:, place], 0.0, True, size)
