"""The Lanczos process: a Krylov space that grows by one product a step and is restarted when it gets too wide."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatscope.curvature.estimators import Operator

# What is left of a product below this share of the longest one is nothing but rounding.
BREAKDOWN = {torch.float32: 1e-6, torch.float64: 1e-12}


class Krylov:
    """An orthonormal basis and the operator seen through it.

    Every step multiplies the newest vector and takes out all earlier ones, so that the basis stays orthogonal to
    rounding and no eigenvalue is found twice. `shrink` keeps chosen Ritz vectors only (Wu and Simon, 2000): the
    process goes on from there as if the others had never been needed.

    Args:
        operator: symmetric p × p.
        start: the first direction (p,), of any length; its dtype is that of the basis.
        width: the most vectors to hold at once.
        generator: for a fresh direction where the space is closed under the operator before it is wide enough.
    """

    def __init__(self, operator: Operator, start: Tensor, width: int, generator: torch.Generator) -> None:
        self._operator, self._generator = operator, generator
        self.width = min(width, operator.shape[0])
        self._basis = start.new_empty(self.width, len(start))  # (width, p), rows
        self._projected = torch.zeros(self.width, self.width, dtype=torch.float64)
        self._next = start / start.norm()
        self.size = self.products = self._restarted = 0
        self.closed = False  # the basis spans an invariant space
        self._largest = 0.0  # of the lengths of products inside of the space
        self.coupling = 0.0  # length of what the newest product adds to the space

    @property
    def full(self) -> bool:
        """Whether a step would need more vectors than may be held."""
        return self.size == self.width

    @property
    def projected(self) -> Tensor:
        """The operator in the basis, (j, j) and symmetric; tridiagonal before the first `shrink`."""
        return self._projected[: self.size, : self.size]

    def step(self) -> None:
        """One more vector, one more product."""
        if self.closed:
            self._next = self._fresh()
        self._basis[self.size] = self._next
        product = (self._operator @ self._next).to(self._basis)  # a fresh tensor: written to below
        self.size += 1
        self.products += 1
        basis = self._basis[: self.size]  # (j, p)
        column = basis.new_zeros(self.size)
        # Twice is enough; and the first time only of those that a product has a part in but for rounding.
        for first in (self._coupled(), 0):
            part = basis[first:] @ product
            product.addmv_(basis[first:].T, part, alpha=-1)
            column[first:] += part
        known = column.double().cpu()
        self._projected[: self.size, self.size - 1] = self._projected[self.size - 1, : self.size] = known
        length = float(product.norm())
        self._largest = max(self._largest, float(known.norm()))
        self.closed = length <= BREAKDOWN[basis.dtype] * self._largest or self.size == self._operator.shape[0]
        self.coupling = 0.0 if self.closed else length
        self._next = product.div_(max(length, torch.finfo(basis.dtype).tiny))

    def _coupled(self) -> int:
        """The first vector that the newest product has a part in: the last but one, or of a restart the first."""
        return 0 if self.size <= self._restarted + 1 else self.size - 2

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values in rising order, the length of each one's residual, and coefficients (j, j) in columns."""
        values, coefficients = torch.linalg.eigh(self.projected)
        return values, self.coupling * coefficients[-1].abs(), coefficients

    def vectors(self, coefficients: Tensor) -> Tensor:
        """Vectors (k, p) with these coefficients (j, k), each of length one."""
        found = coefficients.T.to(self._basis) @ self._basis[: self.size]
        scaled: Tensor = found / found.norm(dim=1, keepdim=True)
        return scaled

    def shrink(self, kept: Sequence[int]) -> None:
        """Go on with some of the Ritz vectors only, by their places in the order of `ritz`."""
        values, _, coefficients = self.ritz()
        places = list(kept)
        chosen = coefficients[:, places]
        self._basis[: len(places)] = chosen.T.to(self._basis) @ self._basis[: self.size]
        self._projected.zero_()
        self.size = self._restarted = len(places)
        self._projected[: self.size, : self.size] = torch.diag(values[places])

    def _fresh(self) -> Tensor:
        """A random direction at right angles to the basis."""
        basis = self._basis[: self.size]
        vector = torch.randn(basis.shape[1], generator=self._generator, dtype=torch.float64).to(basis)
        for _ in range(2):
            vector = vector - basis.T @ (basis @ vector)
        scaled: Tensor = vector / vector.norm()
        return scaled
