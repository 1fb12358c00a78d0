"""Both ends of a spectrum from one Krylov space: what the largest eigenvalue has paid for serves the smallest too."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from flatscope.curvature.estimators import Operator
from flatscope.curvature.lanczos import Krylov
from flatscope.curvature.spectrum import COARSE, DENSE_SIZE, KRYLOV_BYTES, Eigenpair, random_start, release
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
        late: says when no further product may be begun; never by default.
    """

    def __init__(self, operator: Operator, generator: torch.Generator, late: Callable[[], bool] = bool) -> None:
        self._operator, self._late, size = operator, late, operator.shape[0]
        self._ends: list[tuple[Tensor, Tensor]] = []  # smallest and largest Ritz value, their residuals, by step
        self._dense = size <= DENSE_SIZE
        start = random_start(operator, generator, COARSE)
        room = KRYLOV_BYTES // (size * start.element_size())
        width = max(FEWEST_VECTORS, min(MOST_VECTORS, room))
        self._space = Krylov(operator, start, width if not self._dense else 1, generator)
        self._vectors = torch.zeros(2, size, dtype=torch.float64)

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
        try:
            step = self._first_step(place, tolerance)
        finally:
            release(self._operator)  # also where a product fails: this object may outlive that
        last = min(step, len(self._ends) - 1)
        converged = self._space.closed or self._reached(last, place, tolerance)
        if not converged:
            warnings.warn(f"eigenvalue not converged after {last + 1} products", NumericalWarning, stacklevel=2)
        values, residuals = self._ends[last]
        vector = self._space.vectors(self._space.ritz()[2][:, [0, -1]])[place].double().cpu()
        return Eigenpair(float(values[place]), vector, float(residuals[place]), converged, last + 1)

    def _first_step(self, place: int, tolerance: float) -> int:
        """The first step that fulfils what is asked, or the one at which there is no going on."""
        step = 0
        while True:
            if step == len(self._ends):
                if self._space.closed or step == MOST_PRODUCTS or (step and self._late()):
                    return step
                self._advance()
            if self._reached(step, place, tolerance):
                return step
            step += 1

    def _reached(self, step: int, place: int, tolerance: float) -> bool:
        """Whether the residual is small enough after a step, and the Ritz value has come to rest.

        A small residual alone shows that some eigenvalue is near, not that it is the last one: a random vector lies
        mostly in the cloud around zero, and looks like the smallest eigenvalue for the first steps.
        """
        least = LEAST_STEPS if place else 2 * LEAST_STEPS
        if step + 1 < least:
            return False
        values, residuals = self._ends[step]
        scale = tolerance * float(values.abs().max() if place else values[1] - values[0])
        before = self._ends[step - max(SETTLED_STEPS, step // 4)][0]
        return float(residuals[place]) <= scale and float((values - before)[place].abs()) <= scale

    def _advance(self) -> None:
        """One product more; where memory allows no more vectors, first back to a quarter of the space at each end."""
        if self._space.full:
            size = self._space.size
            self._space.shrink([*range(size // 4), *range(size - size // 4, size)])
        self._space.step()
        values, residuals, _ = self._space.ritz()
        self._ends.append((values[[0, -1]], residuals[[0, -1]]))

    def _multiplied_out(self, place: int) -> Eigenpair:
        size = self._operator.shape[0]
        if not self._ends:
            matrix = (self._operator @ torch.eye(size, dtype=torch.float64)).cpu()
            values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
            release(self._operator)
            self._ends, self._vectors = [(values[[0, -1]], torch.zeros(2))], vectors[:, [0, -1]].T
        return Eigenpair(float(self._ends[0][0][place]), self._vectors[place], 0.0, True, size)
