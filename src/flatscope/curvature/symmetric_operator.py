"""A symmetric matrix that is known by its products: all that searches, draws and SciPy's solvers ask of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

Vectors = Callable[[int], Tensor]  # vectors (p, k) of a group of samples, by its number
Parts = Iterator[tuple[int, Tensor]]  # numbers of groups and their parts of a product
Gather = Callable[[Parts], Sequence[Tensor]]  # what is made of them: tensors to be summed over the ranks


class SymmetricOperator(ABC):
    """A symmetric p × p matrix known by its products.

    It may be a mean over samples, groups of which can be multiplied with vectors of their own: of groups that are alike
    one pass over the data then tells random draws as much as a pass for each of them.

    Args:
        size: p.
        device: where products are computed and returned.
        groups: number of groups of samples.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu", groups: int = 1) -> None:
        self.size, self.device, self.groups = size, torch.device(device), groups

    @abstractmethod
    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Products with a vector (p,) or with the columns of a matrix (p, k)."""

    def by_groups(self, vectors: Vectors, gather: Gather) -> list[Tensor]:
        """Sums over the ranks of what is gathered from products of every group's samples with vectors of its own.

        Args:
            vectors: (p, k) by the number of the group.
            gather: what to make of the groups' numbers and products (p, k), each a part of the mean over all samples;
                they come one by one, those of this rank's samples. It may be called again where the memory did not
                suffice.
        """
        return list(gather(iter([(0, self @ vectors(0))])))

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        return self.size, self.size

    def to_scipy(self) -> LinearOperator:
        """The same operator for SciPy's solvers, in float64 on the CPU side; it takes arrays of any numbers."""

        def product(array: np.ndarray) -> np.ndarray:
            if np.iscomplexobj(array):
                return product(array.real) + 1j * product(array.imag)
            return (self @ torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))).cpu().numpy()

        return LinearOperator(
            self.shape, matvec=product, matmat=product, rmatvec=product, rmatmat=product, dtype=np.float64
        )


class Congruence(SymmetricOperator):
    """EᵀAE: a matrix A as a function of coefficients, which E lays out as vectors.

    Args:
        matrix: A.
        size: number of coefficients.
        embed: E, from coefficients (m, k) to vectors (p, k).
        pull: its transpose.
    """

    def __init__(
        self,
        matrix: SymmetricOperator,
        size: int,
        embed: Callable[[Tensor], Tensor],
        pull: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(size, matrix.device, matrix.groups)
        self._matrix, self._embed, self._pull = matrix, embed, pull

    def __matmul__(self, coefficients: Tensor) -> Tensor:
        return self._pull(self._matrix @ self._embed(coefficients))

    def by_groups(self, vectors: Vectors, gather: Gather) -> list[Tensor]:
        """Sums of what is gathered from products with coefficients of each group's own."""
        return self._matrix.by_groups(
            lambda group: self._embed(vectors(group)),
            lambda parts: gather((group, self._pull(product)) for group, product in parts),
        )
