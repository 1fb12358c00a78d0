"""The Lanczos process: a Krylov space that grows by one product a step and is restarted when it gets too wide."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# What is left of a product below this share of the longest one is nothing but rounding.
BREAKDOWN = {torch.float32: 1e-6, torch.float64: 1e-12}
# Entries that float32 may add up in one sum of a CPU: how good longer ones are depends on the processor.
SUMMED_TOGETHER = 2**14


def length(vectors: Tensor) -> Tensor:
    """Of a vector or each row, added up in float64: of millions of float32 torch is off by a thousandth."""
    found: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
    return found


def inner_products(rows: Tensor, vector: Tensor) -> Tensor:
    """Inner products of rows (j, p) with a vector (p,): float64, from sums of a few thousand entries each."""
    if vector.dtype == torch.float64 or len(vector) <= SUMMED_TOGETHER or vector.device.type != "cpu":
        return (rows @ vector).double()
    pieces = zip(torch.split(rows, SUMMED_TOGETHER, dim=1), torch.split(vector, SUMMED_TOGETHER), strict=True)
    return torch.stack([part @ piece for part, piece in pieces]).sum(0, dtype=torch.float64)


class Krylov:
    """An orthonormal basis and a symmetric matrix seen through it.

    Every step takes the product with the newest vector and takes all vectors out of it, so that the basis stays
    orthogonal to rounding and no eigenvalue is found twice. `shrink` keeps chosen Ritz vectors only (Wu and Simon,
    2000): the process goes on from there as if the others had never been needed.

    Args:
        start: the first direction (p,), of any length; its dtype and device are those of the basis.
        width: the most vectors to hold at once.
        generator: for a fresh direction where the space is closed under the matrix before it is wide enough.
    """

    def __init__(self, start: Tensor, width: int, generator: torch.Generator) -> None:
        self._generator = generator
        self.width = min(width, len(start))
        self._basis = start.new_empty(self.width, len(start))  # (width, p), rows
        self._projected = torch.zeros(self.width, self.width, dtype=torch.float64)
        self.newest = start / length(start)  # the vector whose product comes next
        self.size = self.products = self._restarted = 0
        self.closed = False  # the basis spans an invariant space
        self._largest = 0.0  # of the lengths of products inside of the space
        self.coupling = 0.0  # length of what the newest product adds to the space
        self.closed_once = False  # then every eigenvalue that the start has a part in is among the Ritz values
        # `newest` is a polynomial of the matrix times the start. Its roots are all Ritz values: those of the space, and
        # those that restarts dropped.
        self._dropped: list[Tensor] = []
        self._log_couplings = 0.0

    @property
    def full(self) -> bool:
        """True where a step would need more vectors than may be held."""
        return self.size == self.width

    @property
    def projected(self) -> Tensor:
        """The matrix in the basis, (j, j) and symmetric; tridiagonal before the first `shrink`."""
        return self._projected[: self.size, : self.size]

    def take(self, product: Tensor) -> None:
        """One step: the product with the newest vector."""
        self._basis[self.size] = self.newest
        product = product.to(self._basis, copy=True)
        self.size += 1
        self.products += 1
        basis = self._basis[: self.size]  # (j, p)
        column = basis.new_zeros(self.size, dtype=torch.float64)
        # Twice is enough; and the first time only of those that a product has a part in but for rounding.
        coupled = 0 if self.size <= self._restarted + 1 else self.size - 2  # from the last but one, or of a restart all
        for first in (coupled, 0):
            part = inner_products(basis[first:], product)
            product.addmv_(basis[first:].T, part.to(product), alpha=-1)
            column[first:] += part
        known = torch.cat([column, length(product)[None]]).cpu()  # one wait for a GPU
        left, known = float(known[-1]), known[:-1]
        self._projected[: self.size, self.size - 1] = self._projected[self.size - 1, : self.size] = known
        self._largest = max(self._largest, float(known.norm()))
        self.closed = left <= BREAKDOWN[basis.dtype] * self._largest or self.size == basis.shape[1]
        self.closed_once |= self.closed
        self.coupling = 0.0 if self.closed else left
        if not self.closed:
            self._log_couplings += math.log(left)
            self.newest = product.div_(left)
        elif self.size < basis.shape[1]:
            self.newest = self._fresh()

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values in rising order, the length of each one's residual, and coefficients (j, j) in columns."""
        values, coefficients = torch.linalg.eigh(self.projected)
        return values, self.coupling * coefficients[-1].abs(), coefficients

    def log_parts(self, place: float, steps: Tensor) -> Tensor:
        """Logarithms of the largest squared parts the start can have in eigenvectors with eigenvalues place + steps.

        An eigenvector u with eigenvalue λ has the part ⟨u, start⟩ p(λ) in the newest vector, with p the polynomial that
        makes it of the start, and r_j / (λ − θ_j) times that in the vector of the Ritz value θ_j with residual r_j. All
        these squared are at most one together, so that no large part far from all Ritz values goes unseen.
        """
        values, residuals, _ = self.ritz()
        apart = (place - torch.cat([*self._dropped, values])) + steps[:, None]  # (n, roots), λ − θ
        growth = apart.abs().log().sum(1) - self._log_couplings
        inside = (residuals / apart[:, -self.size :]).square().sum(1)
        return -2 * growth - inside.log1p()

    def vectors(self, coefficients: Tensor) -> Tensor:
        """Vectors (k, p) with these coefficients (j, k), each of length one."""
        found = coefficients.T.to(self._basis) @ self._basis[: self.size]
        scaled: Tensor = found / length(found)[:, None].to(found)
        return scaled

    def shrink(self, kept: Sequence[int]) -> None:
        """Go on with some of the Ritz vectors only, by their places in the order of `ritz`."""
        values, _, coefficients = self.ritz()
        places = list(kept)
        self._dropped.append(values[sorted(set(range(len(values))) - set(places))])
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
            vector = vector - basis.T @ inner_products(basis, vector).to(vector)
        scaled: Tensor = vector / length(vector)
        return scaled
